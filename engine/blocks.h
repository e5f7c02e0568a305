/* engine/blocks.h: the block formats of GGUF tensors (spec/gguf.md section 2 and 3).
 *
 * A matrix row is a run of blocks; a block holds `values` weights in `bytes` bytes. This file is the plain statement of every format:
 * one function that turns blocks into f32, and for Q8_0, in which KV pages may be kept, one that makes them. Fast kernels elsewhere are tested against it. */
#ifndef BEDSIDE_ENGINE_BLOCKS_H
#define BEDSIDE_ENGINE_BLOCKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The numbers of the file format. */
enum block_type {
    BLOCK_F32 = 0,
    BLOCK_F16 = 1,
    BLOCK_Q4_0 = 2,
    BLOCK_Q4_1 = 3,
    BLOCK_Q5_0 = 6,
    BLOCK_Q5_1 = 7,
    BLOCK_Q8_0 = 8,
    BLOCK_Q2_K = 10,
    BLOCK_Q3_K = 11,
    BLOCK_Q4_K = 12,
    BLOCK_Q5_K = 13,
    BLOCK_Q6_K = 14,
    BLOCK_IQ4_NL = 20,
    BLOCK_IQ4_XS = 23,
    BLOCK_BF16 = 30,
    BLOCK_MXFP4 = 39,
};

struct block_info {
    const char *name;
    uint16_t values; /* per block; 0 for a known but unsupported type */
    uint16_t bytes;
};

/* What is known of a type number: NULL for a number never assigned or removed; values == 0 for a type that is known by name only. */
const struct block_info *block_info(uint32_t type);

/* Bytes of `n` values (n a multiple of the block's values). The type must be supported. */
size_t block_bytes(enum block_type type, size_t n);

/* Dequantises n values (a multiple of the block's values) from src (no alignment needed) to dst [n]. */
void block_dequant(enum block_type type, const void *src, float *dst, size_t n);

/* Quantises n values (a multiple of 32) to Q8_0: d = max|x| / 127 rounded to f16, q = x / d rounded half to even, at most 127 in magnitude. A block
 * whose d rounds to zero has q = 0; a block with a NaN, an infinity or a d beyond f16 reads back as NaN throughout. dst needs no alignment. */
void block_quant_q8_0(const float *x, size_t n, void *dst);

float f16_to_f32(uint16_t half);
uint16_t f32_to_f16(float value); /* round to nearest even; overflow gives infinity */

#endif
