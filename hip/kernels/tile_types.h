/* hip/kernels/tile_types.h: the quantised weight types as operands of the tiled products (matmul.h). */
#ifndef BEDSIDE_HIP_KERNELS_TILE_TYPES_H
#define BEDSIDE_HIP_KERNELS_TILE_TYPES_H

#include "hip/kernels/tile.h"

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

/* What Q4_K and Q5_K have in common: scales and minima, and nibbles that begin NIBBLES bytes into the block. */
template <int BYTES, int NIBBLES> struct tile_with_mins {
    enum { ACT = 256, MINS = 1, BLOCK = BYTES };
    struct part {
        wmma_i8_t q[2][2];
    };

    DEV void load(struct part *p, const uint8_t *w, uint32_t row, int, int b, int h2)
    {
        TILE_UNROLL
        for (int g = 0; g < 2; g++)
            operand_pair(w + (row + (uint32_t)b * BLOCK + NIBBLES + (uint32_t)(64 * h2 + 32 * g)), p->q[g]);
    }

    DEV void unpack(struct tile_head_k *h)
    {
        head_k_unpack(h);
    }

    template <int N> DEV void finish(const struct tile_head_k *h, const struct tile_buffer *x, const i32x8_t (&isum)[N], f32x8_t (&y)[N])
    {
        head_k_finish<N>(h, x, isum, y);
    }
};

struct tile_q4_k : tile_with_mins<144, 16> {
    typedef struct tile_head_k head;

    DEV void load_head(struct tile_head_k *h, const uint8_t *w, uint32_t row, int, int b)
    {
        h->raw = load_i32x4(w + (row + (uint32_t)b * BLOCK));
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
};

struct tile_q5_k : tile_with_mins<176, 48> {
    struct head : tile_head_k {
        wmma_i8_t bits[2];
    };

    DEV void load_head(head *h, const uint8_t *w, uint32_t row, int, int b)
    {
        h->raw = load_i32x4(w + (row + (uint32_t)b * BLOCK));
        operand_pair(w + (row + (uint32_t)b * BLOCK + 16), h->bits);
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

#endif
