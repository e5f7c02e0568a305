/* engine/memory.h: how much memory this process may still take. */
#ifndef BEDSIDE_ENGINE_MEMORY_H
#define BEDSIDE_ENGINE_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

/* Bytes that can be allocated without swapping: MemAvailable of /proc/meminfo, or less where a cgroup (a container) allows less. 0 when unknown.
 * Clean pages of a mapped model file count as available although they are in use: subtract the whole file. */
uint64_t memory_available(void);

struct memory_text {
    char text[24];
};

/* "412.0 MiB", "20.2 GiB". */
struct memory_text memory_text(uint64_t bytes);

/* The number, decimal or 0x..., after `label` at the start of a line of one of the kernel's small text files; an empty label: the first line's that begins
 * with one. False, and *out unchanged: there is none. */
bool number_in_file(const char *path, const char *label, uint64_t *out);

#endif
