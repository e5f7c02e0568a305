/* hip/bundle.h: the code objects of all kernels for all instruction sets, in clang's offload bundle format, inside the executable. Private to hip/.
 *
 * Made from hip/kernels/kernels.hip at build time. Where there was no compiler for it the bundle is empty, and the GPU is refused with that reason. */
#ifndef BEDSIDE_HIP_BUNDLE_H
#define BEDSIDE_HIP_BUNDLE_H

#include <stdbool.h>
#include <stddef.h>

extern const unsigned char hip_bundle_start[], hip_bundle_end[]; /* bundle.S */

struct hip_bundle_list {
    char text[256]; /* "gfx1100, gfx1101"; "" for an empty bundle */
};

/* The instruction sets that the bundle has code for. */
struct hip_bundle_list hip_bundle_list(void);

/* True when one of them is `arch`. */
bool hip_bundle_has(const char *arch);

#endif
