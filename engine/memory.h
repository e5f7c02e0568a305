/* engine/memory.h: how much memory this process may still take. */
#ifndef BEDSIDE_ENGINE_MEMORY_H
#define BEDSIDE_ENGINE_MEMORY_H

#include <stdint.h>

/* Bytes that can be allocated without swapping: MemAvailable of /proc/meminfo, or less where a cgroup (a container) allows less. 0 when unknown.
 * Clean pages of a mapped model file count as available although they are in use: subtract the whole file. */
uint64_t memory_available(void);

struct memory_text {
    char text[24];
};

/* "412.0 MiB", "20.2 GiB". */
struct memory_text memory_text(uint64_t bytes);

#endif
