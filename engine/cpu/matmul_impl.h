/* engine/cpu/matmul_impl.h: what the kernel files of matmul.h share: the layout of quantised activations and the list of kernels. Private.
 *
 * A kernel file exists for each instruction set. All give the same bits: sums of products of small integers are exact in any order, and the few
 * float operations of one output value are written in matmul.h, one after the other. */
#ifndef BEDSIDE_ENGINE_CPU_MATMUL_IMPL_H
#define BEDSIDE_ENGINE_CPU_MATMUL_IMPL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "engine/blocks.h"
#include "engine/cpu/matmul.h"

/* ACT_Q8_256: one block. The sums are the activations' share of minima (groups of 32) and of Q6_K's offset of 32 (groups of 16). */
struct act_256 {
    int8_t q[256];     /* -127 .. 127 */
    int16_t sum16[16]; /* of q, by 16 */
    int16_t sum32[8];  /* of q, by 32 */
    float d;           /* x = d * q */
    uint8_t pad[12];
};
_Static_assert(sizeof(struct act_256) == 320, "blocks start on cache lines");

/* ACT_Q8_32: one row of n values is q [n], then d [n/32] and sum [n/32], each starting on a cache line. */
struct act_32 {
    const int8_t *q;
    const float *d;     /* exactly representable as f16 */
    const int32_t *sum; /* of q, by 32 */
};

static inline size_t lines(size_t bytes)
{
    return (bytes + 63) & ~(size_t)63;
}

static inline struct act_32 act_32_at(const void *row, int64_t n)
{
    const uint8_t *base = row;
    const uint8_t *d = base + lines((size_t)n);
    return (struct act_32){(const int8_t *)base, (const float *)(const void *)d, (const int32_t *)(const void *)(d + lines((size_t)n / 32 * 4))};
}

/* One call of matmul with the weight resolved: rows w + i * row_bytes, i in [0, n_out), give y[r][o0 + i]. */
struct matmul_job {
    enum block_type type;
    const uint8_t *w;
    size_t row_bytes;
    int64_t n_in, n_out, o0;
    const void *const *x;
    float *const *y;
    int n_rows;
    bool add;
    void *scratch; /* 64-byte aligned, MATMUL_SCRATCH bytes for integer kernels */
};

/* The integer kernels lay up to two tiles of weights out anew and keep the sums of as many activation rows as they take in one pass. */
enum { MATMUL_PASS_ROWS = 512, MATMUL_SCRATCH = 96 * 1024 };

/* Up to DOT_ROWS weight rows (f32, w[k] + i, any alignment) times n_rows activation rows: y[r][k] for k < n_w. */
enum { DOT_ROWS = 4 };
struct dot_job {
    const void *w[DOT_ROWS];
    int n_w;
    int64_t n;
    const void *const *x;
    float *const *y; /* y[r] + o0 + k receives the product of w[k] */
    int64_t o0;
    int n_rows;
    bool add;
};

/* Block x of the activation: an all-zero block, or one so small that d rounds to zero, has q = 0 and d = 0; a block with a NaN or an infinity
 * has q = 0 and d = NaN, so that every product with it is NaN. */
void act_256_plain(const float *x, int64_t n, struct act_256 *dst);
void act_32_plain(const float *x, int64_t n, void *dst);
void matmul_int_plain(const struct matmul_job *job);
void matmul_dot_plain(const struct dot_job *job);

#if defined(__x86_64__)
void act_256_avx2(const float *x, int64_t n, struct act_256 *dst);
void act_32_avx2(const float *x, int64_t n, void *dst);
void matmul_int_avx2(const struct matmul_job *job);
void matmul_dot_avx2(const struct dot_job *job);
void widen_halves_avx2(enum block_type type, const void *src, float *dst, int64_t n); /* F16 or BF16 */

void act_256_avx512(const float *x, int64_t n, struct act_256 *dst);
void act_32_avx512(const float *x, int64_t n, void *dst);
void matmul_int_avx512(const struct matmul_job *job);
void matmul_dot_avx512(const struct dot_job *job);
void widen_halves_avx512(enum block_type type, const void *src, float *dst, int64_t n);
#endif

static inline float f32_of_bits(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline uint32_t bits_of_f32(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
}

static inline uint16_t load_u16(const void *p)
{
    uint16_t v;
    memcpy(&v, p, 2);
    return v;
}

static inline uint32_t load_u32(const void *p)
{
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

static inline uint64_t load_u64(const void *p)
{
    uint64_t v;
    memcpy(&v, p, 8);
    return v;
}

#endif
