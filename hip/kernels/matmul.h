/* hip/kernels/matmul.h: products of a weight matrix with many activation rows (prefill), in tiles, with the bits of engine/cpu/matmul.h.
 *
 * A workgroup of eight waves makes TILE_OUT = 128 outputs of up to TILE_ROWS = 64 rows: each wave 16 outputs, with one to four WMMA tiles of 16 rows.
 *
 *   Weights go from device memory straight into the registers of the one wave that needs them. They are WMMA operand B, so that a lane's column is one weight
 *   row: its scales, minima and d are that lane's own, and a lane loads 16 bytes of its own row at a time. One load gives two operands (low and high
 *   nibbles). Half a block is loaded while the half before it is multiplied.
 *   Activations are operand A, shared by all waves, 256 values of each row at a time in SHARED memory, two buffers in turn: [16 values][row], so that lanes
 *   read and write neighbouring 16 bytes.
 *
 * Arithmetic: a sub-block of 32 values (16 of Q6_K) is an exact integer from WMMA, times its scale added to an integer sum; at the end of a block of 256
 * two fma, blocks in order, as on the CPU. The minima's share of Q4_K and Q5_K, sum over 8 of min * sum32, is one f16 WMMA: sum32 = high + low with high a
 * multiple of 64 and 0 <= low < 64, both exact in f16, and every partial sum is an integer below 2^24, hence exact in any order.
 *
 * The tile's rows are named by a functor, and the results are handed to another, so that experts take rows out of the middle of a step (moe.h). Only
 * as many WMMA tiles are computed as there are rows. */
#ifndef BEDSIDE_HIP_KERNELS_MATMUL_H
#define BEDSIDE_HIP_KERNELS_MATMUL_H

#include "hip/kernels/gpu.h"
#include "hip/kernels/params.h"

enum { TILE_K = 256, TILE_PITCH = TILE_ROWS + 1 };

/* A member function with `this`; DEV makes static ones. */
#if defined(__AMDGCN__)
#define TILE_METHOD inline __attribute__((device, always_inline))
#else
#define TILE_METHOD inline
#endif

/* At most 192 registers: five waves on each SIMD of gfx1150 and gfx1152. The number per kernel is what makes the compiler get by without spilling. */
#if defined(__AMDGCN__)
#define TILE_REGISTERS(n) __attribute__((amdgpu_num_vgpr(n)))
#else
#define TILE_REGISTERS(n)
#endif

#if defined(__clang__)
#define TILE_UNROLL _Pragma("unroll")
#define TILE_LOOP   _Pragma("clang loop unroll(disable)")
#else
#define TILE_UNROLL
#define TILE_LOOP
#endif

/* Keeps the loads before it where they are: early. */
DEV void tile_issue_loads()
{
#if defined(__AMDGCN__)
    __builtin_amdgcn_sched_barrier(0);
#endif
}

/* After every tile of a sub-block: the sums are made now, and SHARED memory is not read further ahead. Otherwise the compiler reads the operands of a
 * whole block first, which takes more registers than there are. The waits that this leaves are filled by the other waves. */
template <class T> DEV void tile_settle(T &sums)
{
#if defined(__AMDGCN__)
    __asm__ volatile("" : "+v"(sums));
#else
    (void)sums;
#endif
}

/* One buffer of activations: 256 values of TILE_ROWS rows. */
struct tile_buffer {
    i32x4_t q[TILE_K / 16][TILE_PITCH];
    union {
        i32x4_t sums[2][TILE_PITCH];       /* act_256: sum32 of 8 sub-blocks as f16, low parts and high parts */
        float d32[TILE_K / 32][TILE_ROWS]; /* act_32: d by sub-block, rows by tile_slot */
    };
    float d[TILE_ROWS]; /* act_256: d, rows by tile_slot */
};

struct tile_shared {
    struct tile_buffer buffer[2];
};

/* What a workgroup multiplies. w[1] is used by kernels with two matrices. */
struct tile_job {
    const uint8_t *w[2]; /* weight row o0 of the matrix, the workgroup's first */
    uint32_t row_stride;
    int n_in, o0, n_out; /* n_out of the whole matrix */
    const uint8_t *x;    /* quantised rows */
    uint32_t x_stride;
    int n_rows; /* of this tile, 1 .. TILE_ROWS */
};

/* Where row r of a tile of 16 stands so that a lane's eight accumulator elements are neighbours. */
DEV int tile_slot(int r)
{
#if WMMA_AB_K == 16
    return (r & 1) * 8 + (r >> 1);
#else
    return r;
#endif
}

/* a + b * c for |b|, |c| < 2^23: one instruction, where a full 32-bit product would take many cycles. */
DEV int tile_mad(int a, int b, int c)
{
#if defined(__AMDGCN__)
    return (int)((uint32_t)b << 8) / 256 * ((int)((uint32_t)c << 8) / 256) + a;
#else
    return (int)((uint32_t)b * (uint32_t)c + (uint32_t)a);
#endif
}

/* ---- operands ----
 * In a group of 32 values each half of a gfx12 wave takes 16 neighbours for the two products, so that its loads are 16 bytes: the order of k does not
 * matter as long as A and B agree. In a group of 16 (one product, one scale) each half takes 8. */

DEV void operand_pair(const uint8_t *p, wmma_i8_t f[2]) /* p: 32 bytes of this lane's row */
{
#if WMMA_AB_K == 16
    f[0] = load_i32x4(p);
    f[1] = load_i32x4(p + 16);
#else
    i32x4_t v = load_i32x4(p + 2 * wmma_ab_k0());
    f[0] = (i32x2_t){v[0], v[1]};
    f[1] = (i32x2_t){v[2], v[3]};
#endif
}

DEV wmma_i8_t operand_one(const uint8_t *p) /* p: 16 bytes of this lane's row */
{
#if WMMA_AB_K == 16
    return load_i32x4(p);
#else
    return load_i32x2(p + wmma_ab_k0());
#endif
}

/* Rows 16t .. 16t+15 of the buffer, values 32j .. 32j+31. */
DEV void rows_pair(const struct tile_buffer *x, int t, int j, wmma_i8_t f[2])
{
    uint32_t row = (uint32_t)t * 16 + (lane_id() & 15);
#if WMMA_AB_K == 16
    f[0] = x->q[2 * j][row];
    f[1] = x->q[2 * j + 1][row];
#else
    i32x4_t v = x->q[2 * j + (lane_id() >> 4)][row];
    f[0] = (i32x2_t){v[0], v[1]};
    f[1] = (i32x2_t){v[2], v[3]};
#endif
}

/* Values 16k .. 16k+15. */
DEV wmma_i8_t rows_one(const struct tile_buffer *x, int t, int k)
{
    return operand_one((const uint8_t *)&x->q[k][(uint32_t)t * 16 + (lane_id() & 15)]);
}

DEV wmma_h_t rows_sums(const struct tile_buffer *x, int t)
{
    uint32_t row = (uint32_t)t * 16 + (lane_id() & 15);
#if WMMA_AB_K == 16
    half8_t low = load_half8(&x->sums[0][row]), high = load_half8(&x->sums[1][row]);
    wmma_h_t v;
    TILE_UNROLL
    for (int i = 0; i < 8; i++) {
        v[i] = low[i];
        v[8 + i] = high[i];
    }
    return v;
#else
    return load_half8(&x->sums[lane_id() >> 4][row]);
#endif
}

DEV void rows_d(const float *d, int t, float v[8]) /* of the lane's eight accumulator elements */
{
    const float *p = d + t * 16 + (lane_id() >> 4) * 8;
    f32x4_t a = load_f32x4(p), b = load_f32x4(p + 4);
    TILE_UNROLL
    for (int i = 0; i < 4; i++) {
        v[i] = a[i];
        v[4 + i] = b[i];
    }
}

/* ---- weight types ----
 * part: half a block of 256 values of the lane's row, as loaded. head: what goes with the whole block. Offsets are from the workgroup's first weight
 * row: a lane's row and a block fit 32 bits. */

struct tile_sums {
    i32x8_t v;
};

/* Q4_K and Q5_K share scales, minima and the end of a block. */
struct tile_head_k {
    i32x4_t raw;
    uint32_t scale[2], min[2]; /* eight bytes each */
};

DEV void head_k_unpack(struct tile_head_k *h)
{
    uint32_t s0 = (uint32_t)h->raw[1], s1 = (uint32_t)h->raw[2], s2 = (uint32_t)h->raw[3];
    h->scale[0] = s0 & 0x3f3f3f3fU;
    h->min[0] = s1 & 0x3f3f3f3fU;
    h->scale[1] = (s2 & 0x0f0f0f0fU) | (s0 >> 2 & 0x30303030U);
    h->min[1] = (s2 >> 4 & 0x0f0f0f0fU) | (s1 >> 2 & 0x30303030U);
}

/* y = fma(d_x d_w, isum, y), then fma(-d_x dmin_w, msum, y). */
template <int N> DEV void head_k_finish(const struct tile_head_k *h, const struct tile_buffer *x, const i32x8_t (&isum)[N], f32x8_t (&y)[N])
{
    uint32_t dd = (uint32_t)h->raw[0];
    float d = h2f(u2h((uint16_t)dd)), dmin = h2f(u2h((uint16_t)(dd >> 16)));
    wmma_h_t mins;
    TILE_UNROLL
    for (int i = 0; i < 8; i++) {
        /* 0x6400 + m is 1024 + m in f16 */
        half m = u2h((uint16_t)(0x6400U | (h->min[i / 4] >> i % 4 * 8 & 255U))) - (half)1024.0F;
        mins[i] = m;
#if WMMA_AB_K == 16
        mins[8 + i] = m;
#endif
    }
    TILE_UNROLL
    for (int t = 0; t < N; t++) {
        float dx[8];
        rows_d(x->d, t, dx);
        f32x8_t msum = wmma_f16(rows_sums(x, t), mins, (f32x8_t){0, 0, 0, 0, 0, 0, 0, 0});
        TILE_UNROLL
        for (int i = 0; i < 8; i++) {
            y[t][i] = gpu_fmaf(dx[i] * d, (float)isum[t][i], y[t][i]);
            y[t][i] = gpu_fmaf(-(dx[i] * dmin), msum[i], y[t][i]);
        }
        tile_settle(y[t]);
    }
}

/* isum += scale * (the product with two operands). With AHEAD a tile's rows are read while the one before is multiplied: a has the first tile's, and at
 * the end those of sub-block j + 1. */
template <int N, bool AHEAD>
DEV void sub_block_32(const struct tile_buffer *x, int j, const wmma_i8_t b[2], int scale, wmma_i8_t a[2], i32x8_t (&isum)[N])
{
    TILE_UNROLL
    for (int t = 0; t < N; t++) {
        if (!AHEAD)
            rows_pair(x, t, j, a);
        wmma_i8_t now[2] = {a[0], a[1]};
        if (AHEAD && (t + 1 < N || j % 4 < 3))
            rows_pair(x, t + 1 < N ? t + 1 : 0, t + 1 < N ? j : j + 1, a);
        i32x8_t c = wmma_i8(now[0], b[0], (i32x8_t){0, 0, 0, 0, 0, 0, 0, 0});
        c = wmma_i8(now[1], b[1], c);
        TILE_UNROLL
        for (int i = 0; i < 8; i++)
            isum[t][i] = tile_mad(isum[t][i], scale, c[i]);
        tile_settle(isum[t]);
    }
}

struct tile_q4_k {
    enum { ACT = 256, MINS = 1, BLOCK = 144 };
    typedef struct tile_head_k head;
    struct part {
        wmma_i8_t q[2][2];
    };

    DEV void load_head(struct tile_head_k *h, const uint8_t *w, uint32_t row, int, int b)
    {
        h->raw = load_i32x4(w + (row + (uint32_t)b * BLOCK));
    }

    DEV void load(struct part *p, const uint8_t *w, uint32_t row, int, int b, int h2)
    {
        TILE_UNROLL
        for (int g = 0; g < 2; g++)
            operand_pair(w + (row + (uint32_t)b * BLOCK + 16 + (uint32_t)(64 * h2 + 32 * g)), p->q[g]);
    }

    template <int N> DEV void multiply(const struct part *p, head *h, const struct tile_buffer *x, int h2, int, i32x8_t (&isum)[N], f32x8_t (&)[N])
    {
        wmma_i8_t a[2];
        rows_pair(x, 0, 4 * h2, a);
        TILE_UNROLL
        for (int g = 0; g < 2; g++) {
            int j = 4 * h2 + 2 * g;
            wmma_i8_t low[2], high[2];
            TILE_UNROLL
            for (int k = 0; k < 2; k++) {
                low[k] = p->q[g][k] & 0x0f0f0f0f;
                high[k] = p->q[g][k] >> 4 & 0x0f0f0f0f;
            }
            sub_block_32<N, true>(x, j, low, (int)(h->scale[h2] >> 16 * g & 255U), a, isum);
            sub_block_32<N, true>(x, j + 1, high, (int)(h->scale[h2] >> (16 * g + 8) & 255U), a, isum);
        }
    }

    DEV void unpack(head *h)
    {
        head_k_unpack(h);
    }

    template <int N> DEV void finish(const head *h, const struct tile_buffer *x, const i32x8_t (&isum)[N], f32x8_t (&y)[N])
    {
        head_k_finish<N>(h, x, isum, y);
    }
};

struct tile_q5_k {
    enum { ACT = 256, MINS = 1, BLOCK = 176 };
    struct head : tile_head_k {
        wmma_i8_t bits[2];
    };
    struct part {
        wmma_i8_t q[2][2];
    };

    DEV void load_head(head *h, const uint8_t *w, uint32_t row, int, int b)
    {
        h->raw = load_i32x4(w + (row + (uint32_t)b * BLOCK));
        operand_pair(w + (row + (uint32_t)b * BLOCK + 16), h->bits);
    }

    DEV void load(struct part *p, const uint8_t *w, uint32_t row, int, int b, int h2)
    {
        TILE_UNROLL
        for (int g = 0; g < 2; g++)
            operand_pair(w + (row + (uint32_t)b * BLOCK + 48 + (uint32_t)(64 * h2 + 32 * g)), p->q[g]);
    }

    DEV wmma_i8_t fifth_bit(wmma_i8_t bits, int j) /* bit j of every byte, as 16 */
    {
        return (j < 4 ? bits << (4 - j) : bits >> (j - 4)) & 0x10101010;
    }

    template <int N> DEV void multiply(const struct part *p, head *h, const struct tile_buffer *x, int h2, int, i32x8_t (&isum)[N], f32x8_t (&)[N])
    {
        wmma_i8_t a[2]; /* there are no registers to read ahead */
        TILE_UNROLL
        for (int g = 0; g < 2; g++) {
            int j = 4 * h2 + 2 * g;
            wmma_i8_t low[2], high[2];
            TILE_UNROLL
            for (int k = 0; k < 2; k++) {
                low[k] = (p->q[g][k] & 0x0f0f0f0f) | fifth_bit(h->bits[k], j);
                high[k] = (p->q[g][k] >> 4 & 0x0f0f0f0f) | fifth_bit(h->bits[k], j + 1);
            }
            sub_block_32<N, false>(x, j, low, (int)(h->scale[h2] >> 16 * g & 255U), a, isum);
            sub_block_32<N, false>(x, j + 1, high, (int)(h->scale[h2] >> (16 * g + 8) & 255U), a, isum);
        }
    }

    DEV void unpack(head *h)
    {
        head_k_unpack(h);
    }

    template <int N> DEV void finish(const head *h, const struct tile_buffer *x, const i32x8_t (&isum)[N], f32x8_t (&y)[N])
    {
        head_k_finish<N>(h, x, isum, y);
    }
};

/* A value is used as 4 * (v - 32): its six bits at the top of a byte with the sign bit turned, which needs no subtraction. The sums are then four times
 * the CPU's, below 2^31, and divided by 4 at the end of the block. */
struct tile_q6_k {
    enum { ACT = 256, MINS = 0 };
    struct head {
        i32x4_t scale; /* sixteen signed bytes */
        uint32_t d;
    };
    struct part {
        wmma_i8_t low[4], high[2];
    };

    DEV void load_head(head *h, const uint8_t *w, uint32_t row, int nb, int b)
    {
        h->scale = load_i32x4(w + (row + (uint32_t)nb * 192 + (uint32_t)b * 16));
        h->d = *(const uint16_t *)(w + (row + (uint32_t)nb * 208 + (uint32_t)b * 2));
    }

    DEV void load(struct part *p, const uint8_t *w, uint32_t row, int nb, int b, int h2)
    {
        TILE_UNROLL
        for (int k = 0; k < 4; k++)
            p->low[k] = operand_one(w + (row + (uint32_t)b * 128 + (uint32_t)(64 * h2 + 16 * k)));
        TILE_UNROLL
        for (int k = 0; k < 2; k++)
            p->high[k] = operand_one(w + (row + (uint32_t)nb * 128 + (uint32_t)b * 64 + (uint32_t)(32 * h2 + 16 * k)));
    }

    /* a: the first tile's rows, already on their way; at the end those of group `after`. */
    template <int N> DEV void group(const struct tile_buffer *x, int k, int after, wmma_i8_t b, const head *h, wmma_i8_t *a, i32x8_t (&isum)[N])
    {
        int scale = (int)((uint32_t)h->scale[k / 4] << (24 - k % 4 * 8)) >> 24;
        TILE_UNROLL
        for (int t = 0; t < N; t++) {
            wmma_i8_t now = *a;
            *a = rows_one(x, t + 1 < N ? t + 1 : 0, t + 1 < N ? k : after);
            i32x8_t c = wmma_i8(now, b, (i32x8_t){0, 0, 0, 0, 0, 0, 0, 0});
            TILE_UNROLL
            for (int i = 0; i < 8; i++)
                isum[t][i] = tile_mad(isum[t][i], scale, c[i]);
            tile_settle(isum[t]);
        }
    }

    template <int N> DEV void multiply(const struct part *p, head *h, const struct tile_buffer *x, int h2, int, i32x8_t (&isum)[N], f32x8_t (&)[N])
    {
        const int top = (int)0xc0c0c0c0U, six = 0x3c3c3c3c;
        wmma_i8_t a = rows_one(x, 0, 8 * h2);
        TILE_UNROLL
        for (int k = 0; k < 2; k++) { /* values 16k .. 16k+15 of each plane of 32 */
            wmma_i8_t turned = p->high[k] ^ (int)0xaaaaaaaaU;
            int g = 8 * h2 + k;
            group<N>(x, g, g + 2, (turned << 6 & top) | (p->low[k] << 2 & six), h, &a, isum);
            group<N>(x, g + 2, g + 4, (turned << 4 & top) | (p->low[2 + k] << 2 & six), h, &a, isum);
            group<N>(x, g + 4, g + 6, (turned << 2 & top) | (p->low[k] >> 2 & six), h, &a, isum);
            group<N>(x, g + 6, k == 0 ? g + 1 : g + 6, (turned & top) | (p->low[2 + k] >> 2 & six), h, &a, isum);
        }
    }

    DEV void unpack(head *)
    {
    }

    template <int N> DEV void finish(const head *h, const struct tile_buffer *x, const i32x8_t (&isum)[N], f32x8_t (&y)[N])
    {
        float d = h2f(u2h((uint16_t)h->d));
        TILE_UNROLL
        for (int t = 0; t < N; t++) {
            float dx[8];
            rows_d(x->d, t, dx);
            TILE_UNROLL
            for (int i = 0; i < 8; i++)
                y[t][i] = gpu_fmaf(dx[i] * d, (float)(isum[t][i] >> 2), y[t][i]);
            tile_settle(y[t]);
        }
    }
};

/* Types of 32 values: a part is four blocks, a "block" of 256 may be the row's last few. */
template <int N> DEV void block_32(const struct tile_buffer *x, int j, float d, const i32x8_t (&c)[N], f32x8_t (&y)[N])
{
    TILE_UNROLL
    for (int t = 0; t < N; t++) {
        float dx[8];
        rows_d(x->d32[j], t, dx);
        TILE_UNROLL
        for (int i = 0; i < 8; i++)
            y[t][i] = gpu_fmaf(dx[i] * d, (float)c[t][i], y[t][i]);
        tile_settle(y[t]);
    }
}

DEV int tile_min(int a, int b)
{
    return a < b ? a : b;
}

struct tile_q8_0 {
    enum { ACT = 32, MINS = 0 };
    struct head {
    };
    struct part {
        wmma_i8_t q[4][2];
        uint16_t d[4];
    };

    DEV void load_head(head *, const uint8_t *, uint32_t, int, int)
    {
    }

    DEV void load(struct part *p, const uint8_t *w, uint32_t row, int n32, int b, int h2)
    {
        TILE_UNROLL
        for (int k = 0; k < 4; k++) {
            uint32_t at = (uint32_t)tile_min(8 * b + 4 * h2 + k, n32 - 1);
            operand_pair(w + (row + at * 32), p->q[k]);
            p->d[k] = *(const uint16_t *)(w + (row + (uint32_t)n32 * 32 + at * 2));
        }
    }

    template <int N> DEV void multiply(const struct part *p, head *, const struct tile_buffer *x, int h2, int left, i32x8_t (&)[N], f32x8_t (&y)[N])
    {
        TILE_UNROLL
        for (int k = 0; k < 4; k++) {
            int j = 4 * h2 + k;
            if (j < left) {
                i32x8_t c[N];
                TILE_UNROLL
                for (int t = 0; t < N; t++) {
                    wmma_i8_t a[2];
                    rows_pair(x, t, j, a);
                    c[t] = wmma_i8(a[0], p->q[k][0], (i32x8_t){0, 0, 0, 0, 0, 0, 0, 0});
                    c[t] = wmma_i8(a[1], p->q[k][1], c[t]);
                }
                block_32<N>(x, j, h2f(u2h(p->d[k])), c, y);
            }
        }
    }

    DEV void unpack(head *)
    {
    }

    template <int N> DEV void finish(const head *, const struct tile_buffer *, const i32x8_t (&)[N], f32x8_t (&)[N])
    {
    }
};

/* n - 8 in every byte: + 0x78 carries nothing over, and the sign bit is then the wrong way round. */
DEV wmma_i8_t nibbles_less_8(wmma_i8_t n)
{
    TILE_UNROLL
    for (int i = 0; i < WMMA_AB_K / 4; i++)
        n[i] = (int)(((uint32_t)n[i] + 0x78787878U) ^ 0x80808080U);
    return n;
}

struct tile_q4_0 {
    enum { ACT = 32, MINS = 0 };
    struct head {
    };
    struct part {
        wmma_i8_t q[4];
        uint16_t d[4];
    };

    DEV void load_head(head *, const uint8_t *, uint32_t, int, int)
    {
    }

    DEV void load(struct part *p, const uint8_t *w, uint32_t row, int n32, int b, int h2)
    {
        TILE_UNROLL
        for (int k = 0; k < 4; k++) {
            uint32_t at = (uint32_t)tile_min(8 * b + 4 * h2 + k, n32 - 1);
            p->q[k] = operand_one(w + (row + at * 16));
            p->d[k] = *(const uint16_t *)(w + (row + (uint32_t)n32 * 16 + at * 2));
        }
    }

    template <int N> DEV void multiply(const struct part *p, head *, const struct tile_buffer *x, int h2, int left, i32x8_t (&)[N], f32x8_t (&y)[N])
    {
        TILE_UNROLL
        for (int k = 0; k < 4; k++) {
            int j = 4 * h2 + k;
            if (j < left) {
                wmma_i8_t low = nibbles_less_8(p->q[k] & 0x0f0f0f0f), high = nibbles_less_8(p->q[k] >> 4 & 0x0f0f0f0f);
                i32x8_t c[N];
                TILE_UNROLL
                for (int t = 0; t < N; t++) {
                    c[t] = wmma_i8(rows_one(x, t, 2 * j), low, (i32x8_t){0, 0, 0, 0, 0, 0, 0, 0});
                    c[t] = wmma_i8(rows_one(x, t, 2 * j + 1), high, c[t]);
                }
                block_32<N>(x, j, h2f(u2h(p->d[k])), c, y);
            }
        }
    }

    DEV void unpack(head *)
    {
    }

    template <int N> DEV void finish(const head *, const struct tile_buffer *, const i32x8_t (&)[N], f32x8_t (&)[N])
    {
    }
};

/* ---- activations into SHARED memory ---- */

/* What one thread carries of the next 256 values: N chunks of 16 values, and a row's d and sums. */
template <int N> struct tile_carry {
    i32x4_t q[N];
    i32x4_t sums;
    float d[N > 1 ? N / 2 : 1];
};

/* rows[i]: offset of row tid / 16 + 16 i; side: of the row (act_256) or d (act_32) that the thread is in charge of besides. */
template <class W, int N>
DEV void carry_load(struct tile_carry<N> *c, const uint8_t *x, const uint32_t rows[N], const uint32_t side[2], int n_in, int b)
{
    uint32_t chunk = tid_x() & 15;
    uint32_t last = (uint32_t)n_in / 16 - 1;
    if constexpr (W::ACT == 256) {
        TILE_UNROLL
        for (int i = 0; i < N; i++)
            c->q[i] = load_i32x4(x + (rows[i] + (uint32_t)b * 320 + chunk * 16));
        if constexpr (W::MINS)
            c->sums = load_i32x4(x + (side[0] + (uint32_t)b * 320 + 288));
        c->d[0] = *(const float *)(x + (side[0] + (uint32_t)b * 320 + 304));
    } else {
        uint32_t at = (uint32_t)b * 16 + chunk;
        at = at < last ? at : last;
        TILE_UNROLL
        for (int i = 0; i < N; i++)
            c->q[i] = load_i32x4(x + (rows[i] + at * 16));
        uint32_t block = (uint32_t)b * 8 + (tid_x() & 7);
        block = block < last / 2 ? block : last / 2;
        TILE_UNROLL
        for (int i = 0; i < (N > 1 ? N / 2 : 1); i++)
            c->d[i] = *(const float *)(x + (side[i] + (((uint32_t)n_in + 63) & ~63U) + block * 4));
    }
}

DEV void carry_sums(struct tile_buffer *buffer, uint32_t row, i32x4_t sums)
{
    half8_t low, high;
    TILE_UNROLL
    for (int i = 0; i < 8; i++) {
        int16_t s = (int16_t)(sums[i / 2] >> i % 2 * 16);
        int16_t l = (int16_t)(s & 63);
        low[i] = (half)l;
        high[i] = (half)(int16_t)(s - l);
    }
    store_half8(&buffer->sums[0][row], low);
    store_half8(&buffer->sums[1][row], high);
}

template <class W, int N> DEV void carry_store(const struct tile_carry<N> *c, struct tile_buffer *buffer)
{
    uint32_t t = tid_x();
    TILE_UNROLL
    for (int i = 0; i < N; i++)
        buffer->q[t & 15][t / 16 + 16 * (uint32_t)i] = c->q[i];
    if constexpr (W::ACT == 256) {
        if (t < 16 * N) {
            if constexpr (W::MINS)
                carry_sums(buffer, t, c->sums);
            buffer->d[(t & ~15U) + (uint32_t)tile_slot((int)(t & 15))] = c->d[0];
        }
    } else {
        TILE_UNROLL
        for (int i = 0; i < (N > 1 ? N / 2 : 1); i++) {
            uint32_t row = t / 8 + 32 * (uint32_t)i;
            if (row < 16 * N)
                buffer->d32[t & 7][(row & ~15U) + (uint32_t)tile_slot((int)(row & 15))] = c->d[i];
        }
    }
}

/* ---- where rows come from and results go ---- */

/* Rows in the order of the step. */
struct tile_all_rows {
    int first;
    TILE_METHOD int operator()(int r) const
    {
        return first + r;
    }
};

/* To y [..][n_out], below 4 GiB. */
struct tile_store {
    float *y;
    int first, n_out, add;
    TILE_METHOD float *at(int r, int o) const
    {
        return (float *)((uint8_t *)y + ((uint32_t)(first + r) * (uint32_t)n_out + (uint32_t)o) * 4);
    }
    TILE_METHOD void operator()(int r, int o, float v, float) const
    {
        float *p = at(r, o);
        *p = add ? *p + v : v;
    }
};

/* A lane's results, column o: eight rows of each of N WMMA tiles. */
template <int M, int N, class OUT> DEV void tile_results(const struct tile_job *job, int o, const f32x8_t (&y)[M][N], OUT out)
{
    if (o >= job->n_out)
        return;
    TILE_UNROLL
    for (int n = 0; n < N; n++) {
        TILE_UNROLL
        for (int i = 0; i < 8; i++) {
            int r = 16 * n + (int)wmma_c_row((uint32_t)i);
            if (r < job->n_rows)
                out(r, o, y[0][n][i], y[M - 1][n][i]);
        }
    }
}

/* What is added to is read eight at a time, not one after the other. */
template <int N> DEV void tile_results(const struct tile_job *job, int o, const f32x8_t (&y)[1][N], struct tile_store out)
{
    if (o >= job->n_out)
        return;
    TILE_UNROLL
    for (int n = 0; n < N; n++) {
        float old[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (out.add) {
            TILE_UNROLL
            for (int i = 0; i < 8; i++)
                old[i] = *out.at(tile_min(16 * n + (int)wmma_c_row((uint32_t)i), job->n_rows - 1), o);
        }
        TILE_UNROLL
        for (int i = 0; i < 8; i++) {
            int r = 16 * n + (int)wmma_c_row((uint32_t)i);
            if (r < job->n_rows)
                *out.at(r, o) = out.add ? old[i] + y[0][n][i] : y[0][n][i];
        }
    }
}

/* ---- the tile ---- */

/* N WMMA tiles of 16 rows; M matrices of the same type and shape (2: gate and up). rows(r), r < n_rows: index of the tile's row r among x's rows. out(r, o, y0, y1):
 * takes a result, of matrix 0 and of matrix M - 1. */
template <class W, int M, int N, class ROWS, class OUT> DEV void tile_of(struct tile_shared *shared, const struct tile_job *job, ROWS rows, OUT out)
{
    uint32_t t = tid_x();
    int nb = W::ACT == 256 ? job->n_in / 256 : job->n_in / 32; /* of the file's blocks in a row */
    int steps = (job->n_in + 255) / 256;
    int wave_o = (int)(t / 32) * 16 + (int)wmma_c_col();
    uint32_t weight_row = (uint32_t)tile_min(wave_o, job->n_out - job->o0 - 1) * job->row_stride;

    uint32_t offset[N], side[2];
    TILE_UNROLL
    for (int i = 0; i < N; i++)
        offset[i] = (uint32_t)rows(tile_min((int)(t / 16) + 16 * i, job->n_rows - 1)) * job->x_stride;
    TILE_UNROLL
    for (int i = 0; i < 2; i++) {
        int r = W::ACT == 256 ? (int)t : (int)(t / 8) + 32 * i;
        side[i] = (uint32_t)rows(tile_min(r, job->n_rows - 1)) * job->x_stride;
    }

    f32x8_t y[M][N];
    TILE_UNROLL
    for (int m = 0; m < M; m++) {
        TILE_UNROLL
        for (int n = 0; n < N; n++)
            y[m][n] = (f32x8_t){0, 0, 0, 0, 0, 0, 0, 0};
    }

    struct tile_carry<N> carry;
    carry_load<W, N>(&carry, job->x, offset, side, job->n_in, 0);
    typename W::head head;
    struct W::part part;
    W::load_head(&head, job->w[0], weight_row, nb, 0);
    W::load(&part, job->w[0], weight_row, nb, 0, 0);
    carry_store<W, N>(&carry, &shared->buffer[0]);
    sync_threads();

    TILE_LOOP
    for (int b = 0; b < steps; b++) {
        const struct tile_buffer *x = &shared->buffer[b & 1];
        int next_b = tile_min(b + 1, steps - 1);
        TILE_UNROLL
        for (int m = 0; m < M; m++) {
            i32x8_t isum[N];
            TILE_UNROLL
            for (int n = 0; n < N; n++)
                isum[n] = (i32x8_t){0, 0, 0, 0, 0, 0, 0, 0};
            W::unpack(&head);

            /* First half; the second half's weights are on their way, and the next block's rows, for the buffer that was last read before the barrier. */
            struct W::part next;
            W::load(&next, job->w[m], weight_row, nb, b, 1);
            if (m == 0)
                carry_load<W, N>(&carry, job->x, offset, side, job->n_in, next_b);
            tile_issue_loads();
            W::template multiply<N>(&part, &head, x, 0, nb - 8 * b, isum, y[m]);
            if (m == 0)
                carry_store<W, N>(&carry, &shared->buffer[(b + 1) & 1]);

            /* Second half; the next block's weights are on their way. */
            bool last = m == M - 1;
            typename W::head next_head;
            W::load_head(&next_head, job->w[last ? 0 : m + 1], weight_row, nb, last ? next_b : b);
            W::load(&part, job->w[last ? 0 : m + 1], weight_row, nb, last ? next_b : b, 0);
            tile_issue_loads();
            W::template multiply<N>(&next, &head, x, 1, nb - 8 * b, isum, y[m]);
            W::template finish<N>(&head, x, isum, y[m]);
            head = next_head;
        }
        sync_threads();
    }

    tile_results(job, job->o0 + wave_o, y, out);
}

template <class ROWS> struct tile_rows_from {
    ROWS rows;
    int first;
    TILE_METHOD int operator()(int r) const
    {
        return rows(first + r);
    }
};

template <class OUT> struct tile_out_from {
    OUT out;
    int first;
    TILE_METHOD void operator()(int r, int o, float y0, float y1) const
    {
        out(first + r, o, y0, y1);
    }
};

/* As many WMMA tiles as the rows need. With two matrices there are registers for 32 rows; more take turns. job->n_rows, 1 .. TILE_ROWS, must be the same in
 * all threads. */
template <class W, int M, class ROWS, class OUT> DEV void tile(struct tile_shared *shared, const struct tile_job *job, ROWS rows, OUT out)
{
    if constexpr (M == 1) {
        if (job->n_rows <= 16)
            tile_of<W, 1, 1>(shared, job, rows, out);
        else if (job->n_rows <= 32)
            tile_of<W, 1, 2>(shared, job, rows, out);
        else
            tile_of<W, 1, 4>(shared, job, rows, out);
    } else {
        TILE_LOOP
        for (int first = 0; first < job->n_rows; first += 32) {
            struct tile_job turn = *job;
            turn.n_rows = tile_min(32, job->n_rows - first);
            if (turn.n_rows <= 16)
                tile_of<W, M, 1>(shared, &turn, tile_rows_from<ROWS>{rows, first}, tile_out_from<OUT>{out, first});
            else
                tile_of<W, M, 2>(shared, &turn, tile_rows_from<ROWS>{rows, first}, tile_out_from<OUT>{out, first});
        }
    }
}

/* ---- float types: F32, F16, BF16 ----
 *
 * The CPU's sixteen partial sums (value i goes to partial i % 16, each by fma in order; then 8+8, 4+4, 2+2, 1+1) lie in four lanes, four neighbours in
 * each. A wave makes 8 outputs of 16 rows: lane = 4 * group + quarter, groups 0 and 1 of outputs times 0 to 3 of rows, and each lane 4 x 4 results. A workgroup
 * makes FLOAT_OUT outputs; its waves read the same rows, which the first level of cache holds. */

struct tile_f32 {
    enum { BYTES = 4 };
    DEV f32x4_t load(const uint8_t *p)
    {
        return load_f32x4(p);
    }
    DEV float one(const uint8_t *p)
    {
        return *(const float *)p;
    }
};

struct tile_f16 {
    enum { BYTES = 2 };
    DEV f32x4_t load(const uint8_t *p)
    {
        i32x2_t v = load_i32x2(p);
        return (f32x4_t){h2f(u2h((uint16_t)v[0])), h2f(u2h((uint16_t)(v[0] >> 16))), h2f(u2h((uint16_t)v[1])), h2f(u2h((uint16_t)(v[1] >> 16)))};
    }
    DEV float one(const uint8_t *p)
    {
        return h2f(u2h(*(const uint16_t *)p));
    }
};

struct tile_bf16 {
    enum { BYTES = 2 };
    DEV f32x4_t load(const uint8_t *p)
    {
        i32x2_t v = load_i32x2(p);
        return (f32x4_t){as_float((int)((uint32_t)v[0] << 16)), as_float(v[0] & (int)0xffff0000U), as_float((int)((uint32_t)v[1] << 16)),
                         as_float(v[1] & (int)0xffff0000U)};
    }
    DEV float one(const uint8_t *p)
    {
        return bf2f(*(const uint16_t *)p);
    }
};

/* job as for tile, x rows of f32; n_rows up to FLOAT_ROWS. */
template <class W, class ROWS, class OUT> DEV void float_tile(const struct tile_job *job, ROWS rows, OUT out)
{
    uint32_t lane = lane_id();
    uint32_t quarter = lane & 3;
    int wave_o = (int)(tid_x() / 32) * 8 + (int)(lane >> 2 & 1) * 4, r0 = (int)(lane >> 3) * 4;
    uint32_t w_at[4], x_at[4];
    TILE_UNROLL
    for (int k = 0; k < 4; k++) {
        w_at[k] = (uint32_t)tile_min(wave_o + k, job->n_out - job->o0 - 1) * job->row_stride + quarter * 4 * W::BYTES;
        x_at[k] = (uint32_t)rows(tile_min(r0 + k, job->n_rows - 1)) * job->x_stride + quarter * 16;
    }
    f32x4_t sum[4][4]; /* [output][row] of the lane's four partial sums */
    TILE_UNROLL
    for (int k = 0; k < 4; k++) {
        TILE_UNROLL
        for (int r = 0; r < 4; r++)
            sum[k][r] = (f32x4_t){0, 0, 0, 0};
    }
    int whole = job->n_in / 16;
    TILE_LOOP
    for (int c = 0; c < whole; c++) {
        f32x4_t w[4], x[4];
        TILE_UNROLL
        for (int k = 0; k < 4; k++) {
            w[k] = W::load(job->w[0] + (w_at[k] + (uint32_t)c * 16 * W::BYTES));
            x[k] = load_f32x4(job->x + (x_at[k] + (uint32_t)c * 64));
        }
        TILE_UNROLL
        for (int k = 0; k < 4; k++) {
            TILE_UNROLL
            for (int r = 0; r < 4; r++) {
                TILE_UNROLL
                for (int e = 0; e < 4; e++)
                    sum[k][r][e] = gpu_fmaf(w[k][e], x[r][e], sum[k][r][e]);
            }
        }
    }
    /* the last n_in % 16 values; a partial sum that has none is left alone */
    TILE_UNROLL
    for (int e = 0; e < 4; e++) {
        if (whole * 16 + (int)quarter * 4 + e < job->n_in) {
            TILE_UNROLL
            for (int k = 0; k < 4; k++) {
                float w = W::one(job->w[0] + (w_at[k] + ((uint32_t)whole * 16 + (uint32_t)e) * W::BYTES));
                TILE_UNROLL
                for (int r = 0; r < 4; r++) {
                    float x = *(const float *)(job->x + (x_at[r] + (uint32_t)whole * 64 + (uint32_t)e * 4));
                    sum[k][r][e] = gpu_fmaf(w, x, sum[k][r][e]);
                }
            }
        }
    }
    TILE_UNROLL
    for (int k = 0; k < 4; k++) {
        TILE_UNROLL
        for (int r = 0; r < 4; r++) {
            f32x4_t v = sum[k][r];
            TILE_UNROLL
            for (int e = 0; e < 4; e++)
                v[e] += shfl_xor_f<2>(v[e]); /* partials 8 apart */
            TILE_UNROLL
            for (int e = 0; e < 4; e++)
                v[e] += shfl_xor_f<1>(v[e]);
            float y = (v[0] + v[2]) + (v[1] + v[3]);
            int o = job->o0 + wave_o + k;
            if ((int)quarter == r && r0 + r < job->n_rows && o < job->n_out)
                out(r0 + r, o, y, y);
        }
    }
}

/* ---- kernels: y [n_rows][n_out] (+)= w * x; grid [row tiles][output tiles], so that the row tiles of one weight tile run together ---- */

/* Rows first .. of the step, outputs o0 .. of the matrix. */
DEV void tile_job_of(struct tile_job *job, const struct tile_params *p, int first, int max_rows, int o0)
{
    job->w[0] = job->w[1] = p->w.data + (uint64_t)(uint32_t)o0 * p->w.row_stride;
    job->row_stride = (uint32_t)p->w.row_stride;
    job->n_in = p->w.n_in;
    job->o0 = o0;
    job->n_out = p->w.n_out;
    job->x = p->x;
    job->x_stride = p->x_stride;
    job->n_rows = tile_min(max_rows, p->n_rows - first);
}

template <class W> DEV void tile_kernel(struct tile_shared *shared, const struct tile_params *p)
{
    int first = (int)bid_x() * TILE_ROWS;
    struct tile_job job;
    tile_job_of(&job, p, first, TILE_ROWS, (int)bid_y() * TILE_OUT);
    tile<W, 1>(shared, &job, tile_all_rows{first}, tile_store{p->y, first, p->w.n_out, p->add});
}

template <class W> DEV void float_tile_kernel(const struct tile_params *p)
{
    int first = (int)bid_x() * FLOAT_ROWS;
    struct tile_job job;
    tile_job_of(&job, p, first, FLOAT_ROWS, (int)bid_y() * FLOAT_OUT);
    float_tile<W>(&job, tile_all_rows{first}, tile_store{p->y, first, p->w.n_out, p->add});
}

#define TILE_KERNEL(type, registers)                                                                                                                 \
    KERNEL(256) TILE_REGISTERS(registers) rows_##type(struct tile_params p)                                                                          \
    {                                                                                                                                                \
        SHARED struct tile_shared shared;                                                                                                            \
        tile_kernel<struct tile_##type>(&shared, &p);                                                                                                \
    }
TILE_KERNEL(q4_k, 192)
TILE_KERNEL(q5_k, 192)
TILE_KERNEL(q6_k, 184)
TILE_KERNEL(q8_0, 192)
TILE_KERNEL(q4_0, 192)
#undef TILE_KERNEL

#define FLOAT_KERNEL(type)                                                                                                                           \
    KERNEL(256) rows_##type(struct tile_params p)                                                                                                    \
    {                                                                                                                                                \
        float_tile_kernel<struct tile_##type>(&p);                                                                                                   \
    }
FLOAT_KERNEL(f32)
FLOAT_KERNEL(f16)
FLOAT_KERNEL(bf16)
#undef FLOAT_KERNEL

#endif
