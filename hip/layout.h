/* hip/layout.h: how weights and activations lie in device memory. Shared by host and kernels.
 *
 * Weights, one row of n_in values (nb = blocks in the row), each row starting on 16 bytes:
 *
 *   F32, F16, BF16  as in the file
 *   Q4_K            as in the file: nb blocks of 144 bytes (d, dmin, 12 scale bytes, 128 nibble bytes); all on 16 bytes
 *   Q5_K            as in the file: nb blocks of 176 bytes (d, dmin, 12 scale bytes, 32 high-bit bytes, 128 nibble bytes)
 *   Q6_K            [ql 128 * nb][qh 64 * nb][scales 16 * nb][d 2 * nb]: the parts of the file's blocks, each part one after the other
 *   Q8_0            [q 32 * nb][d 2 * nb]
 *   Q4_0            [q 16 * nb][d 2 * nb]
 *
 * Other types have no kernel: a model that holds one is refused by the GPU and runs on the CPU.
 *
 * Activations quantised for the integer products lie exactly as on the CPU (engine/cpu/matmul_impl.h): for the K types struct act_256 [n_in / 256], for
 * Q8_0 and Q4_0 the row of struct act_32. The integer products are defined to the bit in engine/cpu/matmul.h, and the GPU's kernels, mat-vec and
 * tiled alike, give those bits: that is what makes a row independent of the rows beside it. */
#ifndef BEDSIDE_HIP_LAYOUT_H
#define BEDSIDE_HIP_LAYOUT_H

#include <stdbool.h>
#include <stddef.h>

#include "engine/blocks.h"

/* True when the GPU has kernels for the type. */
bool hip_layout_supported(enum block_type type);

/* Bytes from one row to the next on the device. */
size_t hip_layout_row_stride(enum block_type type, size_t n_in);

/* One row from the file's form to the device's: dst [hip_layout_row_stride], src [block_bytes(type, n_in)]. Padding is zeroed. */
void hip_layout_row(enum block_type type, const void *src, size_t n_in, void *dst);

#endif
