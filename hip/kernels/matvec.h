/* hip/kernels/matvec.h: products of weight rows with one to eight activation rows (decode), straight from the stored blocks.
 *
 * For other kernels too: dot_rows (below) is the product of a wave's four weight rows with ROWS activation rows. Its contract:
 *
 *   template <int TYPE, int ROWS> dot_rows(w, row_stride, n_w, n_in, x, x_at, sum)
 *   template <int ROWS> dot_rows_any(type, w, row_stride, n_w, n_in, x, x_at, sum)     the same, type chosen by a uniform switch
 *
 *   called by all 32 lanes of a wave together. The weight row of lane l is l / 8: w + (l / 8) * row_stride. Every argument but `sum` is uniform (the
 *   same in the whole wave; make it so with uniform_i where it comes from the thread's or the data's index: then addresses are scalar).
 *     w           the first of the wave's weight rows, on 16 bytes, layout of hip/layout.h; TYPE is its GPU_* number (params.h)
 *     row_stride  bytes to the next
 *     n_w         1 to 4 rows exist; lanes of the others repeat the last one
 *     n_in        values in a row
 *     x, x_at     activation row r lies at x + x_at[r], in the form that goes with TYPE (hip_act_of): struct act_256 [n_in / 256], the row of
 *                 struct act_32, or f32; on 64 bytes. Rows may be scattered: x_at is any list of byte offsets
 *     sum[r]      the product, in the first lane of each eight (lane_id() % 8 == 0); undefined in the others
 *
 *   The bits are those of engine/cpu/matmul.h, for every type and every ROWS: blocks in order, each an exact integer sum and one or two fma; for F32,
 *   F16 and BF16 the 16 partial sums. Nothing is stored, no SHARED memory and no barrier is used.
 *
 * How the work lies: eight lanes share a weight row, so that a wave reads 128 contiguous bytes of each of four rows at once, and the next block's
 * loads are issued before the current block is used.
 *
 *   K types   lane i of 8 holds 16 bytes of nibbles: 16 values of one sub-block and 16 of another. The eight lanes' integer sums are added by
 *             three xor exchanges (they fold into the adds), then all eight do the same one or two fma.
 *   32-value types  lane i holds a whole block of the eight in hand; the running sum walks from lane to lane in the blocks' order, one fma each.
 *             The walk is a Gray code, so that every step is an exchange with lane ^ 1, 2 or 4.
 *   F types   lane i holds partial sums 2i and 2i + 1 of the sixteen.
 *
 * VALU operations in the inner loop, for each weight and lane, counted in gfx1152's code (llvm-objdump-19 -d; a dual-issue instruction counts
 * twice). All of the kernel, with rows of 2048 values, takes 0.1 to 0.3 more (Q4_K 1.71, Q6_K 1.74 at one row, as the emulator counts):
 *
 *   rows   Q4_K   Q5_K   Q6_K   Q8_0   Q4_0
 *   1      1.53   2.14   1.58   1.16   1.55
 *   2      2.31   2.89   2.13   2.03   2.45
 *   4      3.88   4.39   3.25   3.78   4.28
 *   8      6.88   7.39   5.50   7.28   7.91
 *
 * Loads are of 16 bytes except scales and sums; every line of the weights is fetched once. At most 103 VGPRs on any target,
 * 72 on gfx1152 (12 waves on a SIMD). In the K types' loop two blocks are worked on at a time: the loads of the block after the present one and of
 * the one after that are under way together. Loads come back in order, so an activation waits for the weights asked for before it; what hides that
 * is the number of waves. */
#ifndef BEDSIDE_HIP_KERNELS_MATVEC_H
#define BEDSIDE_HIP_KERNELS_MATVEC_H

#include "hip/kernels/act.h"
#include "hip/kernels/attn_store.h"
#include "hip/kernels/gpu.h"
#include "hip/kernels/params.h"
#include "hip/kernels/tail.h"

enum {
    MATVEC_W = 4,     /* weight rows of a wave */
    MATVEC_WAVES = 4, /* waves of a workgroup of the matvec kernels */
};

/* ---- bits ---- */

/* Four bytes chosen from lo (selectors 0 to 3) and hi (4 to 7); 12 gives 0. */
DEV uint32_t byte_perm(uint32_t hi, uint32_t lo, uint32_t selectors)
{
#ifdef GPU_SHIM
    const uint64_t both = (uint64_t)hi << 32 | lo;
    uint32_t out = 0;
    for (int i = 0; i < 4; i++) {
        const uint32_t s = selectors >> (8 * i) & 0xff;
        out |= (s < 8 ? (uint32_t)(both >> (8 * s)) & 0xff : 0U) << (8 * i);
    }
    return out;
#else
    return __builtin_amdgcn_perm(hi, lo, selectors);
#endif
}

/* The product of two numbers of at most 24 bits, sign included: one full-rate instruction, where 32 bits take four times as long. */
DEV int mul24(int a, int b)
{
    return ((int)((uint32_t)a << 8) >> 8) * ((int)((uint32_t)b << 8) >> 8);
}

DEV uint32_t rotate_right(uint32_t x, uint32_t n)
{
    return x >> (n & 31) | x << ((0U - n) & 31);
}

/* The sum over the eight lanes of a group, in all of them. */
DEV int sum_of_8(int v)
{
    v += shfl_xor_i<1>(v);
    v += shfl_xor_i<2>(v);
    return v + shfl_xor_i<4>(v);
}

/* base + offset, base uniform and offset the lane's own. The compiler is kept from seeing through the offset inside of loops: it would add the two
 * beforehand and count up a 64-bit address in every lane, two instructions for each load, where a load takes both parts as they are. */
DEV const uint8_t *lane_address(const uint8_t *base, uint32_t offset)
{
#ifndef GPU_SHIM
    __asm__("" : "+v"(offset));
#endif
    return base + offset;
}

DEV float half_low(uint32_t two)
{
    return h2f(u2h((uint16_t)two));
}

DEV float half_high(uint32_t two)
{
    return h2f(u2h((uint16_t)(two >> 16)));
}

/* ---- Q4_K and Q5_K ---- */

/* The six-bit scales of sub-blocks 2g and 2g + 1 (g = lane / 2) and the minimum of sub-block `lane`, out of the twelve scale bytes a, b, c: for
 * sub-blocks 0 to 3 a scale is the low six bits of a byte, for 4 to 7 a nibble of c with two bits of a; minima alike with b. What differs between
 * lanes is in constants. */
struct k4_lane {
    uint32_t scale_select, scale_mask, min_select, min_shift, min_mask;
};

DEV k4_lane k4_lane_of(uint32_t i)
{
    const uint32_t j = i & 2, m = i & 3;
    if (i < 4)
        return {0x0c0c0100U + j * 0x0101U, 0x3f3fU, 0x0c0c0c00U + m, 0, 0x3fU};
    return {0x01000504U + j * 0x01010101U, 0x0f0fU, 0x0c0c0004U + m * 0x0101U, 4, 0x0fU};
}

DEV uint32_t k4_scales(const k4_lane &lane, uint32_t a, uint32_t c) /* bytes 0 and 1 */
{
    const uint32_t t = byte_perm(c, a, lane.scale_select);
    return (t & lane.scale_mask) | (t >> 18 & 0x3030U);
}

DEV int k4_min(const k4_lane &lane, uint32_t b, uint32_t c)
{
    const uint32_t t = byte_perm(c, b, lane.min_select);
    return (int)((t >> lane.min_shift & lane.min_mask) | (t >> 10 & 0x30U));
}

template <bool FIVE> struct k45_dot {
    enum { BYTES = FIVE ? 176 : 144, NIBBLES = FIVE ? 48 : 16, VALUES = 256 };
    struct block {
        u32x4_t head, high, q;
    };
    const uint8_t *w;
    uint32_t at_head, at_q, at_high; /* of this lane, from the first block of the wave's first row */
    uint32_t x_q, x_min;             /* of this lane, in an activation block */
    uint32_t high_shift;
    k4_lane lane;

    DEV void open(k45_dot &t, const uint8_t *rows, uint32_t row_at, int n_in)
    {
        const uint32_t i = lane_id() & 7;
        (void)n_in;
        t.w = rows;
        t.at_head = row_at;
        t.at_q = row_at + NIBBLES + 16 * i;
        t.at_high = row_at + 16 + 16 * (i & 1);
        t.x_q = 64 * (i >> 1) + 16 * (i & 1);
        t.x_min = ACT_256_SUM32 + 2 * i;
        t.high_shift = (i & 6) - 4; /* bit 2g of every byte to bit 4 */
        t.lane = k4_lane_of(i);
    }

    DEV block load(const k45_dot &t, int b)
    {
        const uint8_t *at = t.w + (uint32_t)b * BYTES;
        block k;
        k.head = load_u32x4(lane_address(at, t.at_head));
        k.q = load_u32x4(lane_address(at, t.at_q));
        if constexpr (FIVE)
            k.high = load_u32x4(lane_address(at, t.at_high));
        return k;
    }

    template <int ROWS> DEV void add(const k45_dot &t, const block &k, int b, const uint8_t *x, const uint32_t (&x_at)[ROWS], float (&sum)[ROWS])
    {
        /* With few activation rows the high nibbles stay where they are, sixteen times too large, and their sum is shifted instead. */
        constexpr bool SHIFT_LATE = !FIVE && ROWS < 4;
        const uint32_t scales = k4_scales(t.lane, k.head[1], k.head[3]);
        const int s0 = (int)(scales & 0xff), s1 = (int)(scales >> 8), min = k4_min(t.lane, k.head[2], k.head[3]);
        const float d = half_low(k.head[0]), dmin = half_high(k.head[0]);
        int v0[4], v1[4];
        for (int i = 0; i < 4; i++) {
            uint32_t low = k.q[i] & 0x0f0f0f0fU, high = SHIFT_LATE ? k.q[i] & 0xf0f0f0f0U : k.q[i] >> 4 & 0x0f0f0f0fU;
            if constexpr (FIVE) {
                const uint32_t bits = rotate_right(k.high[i], t.high_shift);
                low |= bits & 0x10101010U;
                high |= bits >> 1 & 0x10101010U;
            }
            v0[i] = (int)low;
            v1[i] = (int)high;
        }
        UNROLL
        for (int r = 0; r < ROWS; r++) {
            const uint8_t *xb = x + x_at[r] + (uint32_t)b * ACT_256_BYTES;
            const uint8_t *xq = lane_address(xb, t.x_q), *xs = lane_address(xb, t.x_min);
            const i32x4_t q0 = load_i32x4(xq), q1 = load_i32x4(xq + 32);
            const int group = *(const int16_t *)xs;
            const float dx = *(const float *)(xb + ACT_256_D);
            int dot0 = 0, dot1 = 0;
            for (int i = 0; i < 4; i++) {
                dot0 = dot4_us(v0[i], q0[i], dot0);
                dot1 = dot4_us(v1[i], q1[i], dot1);
            }
            if constexpr (SHIFT_LATE)
                dot1 >>= 4; /* exact */
            const int isum = sum_of_8(mul24(s1, dot1) + mul24(s0, dot0)), msum = sum_of_8(mul24(min, group));
            sum[r] = gpu_fmaf(dx * d, (float)isum, sum[r]);
            sum[r] = gpu_fmaf(-(dx * dmin), (float)msum, sum[r]);
        }
    }
};

/* ---- Q6_K: [ql 128 * nb][qh 64 * nb][scales 16 * nb][d 2 * nb] ---- */

/* Lane i = 4h + c holds ql bytes 16i to 16i + 15: low nibbles are the 16 values at 128h + 16c, high nibbles those at 128h + 64 + 16c. */
struct q6_k_dot {
    enum { VALUES = 256 };
    struct block {
        u32x4_t low, high;
        int scale0, scale1;
        uint32_t d;
    };
    const uint8_t *w;
    uint32_t part; /* blocks in a row: the parts begin at 128, 192 and 208 times this */
    uint32_t at_low, at_high, at_scale, at_d;
    uint32_t x_q, x_sum;
    uint32_t shift;

    DEV void open(q6_k_dot &t, const uint8_t *rows, uint32_t row_at, int n_in)
    {
        const uint32_t i = lane_id() & 7, h = i >> 2, c = i & 3;
        t.w = rows;
        t.part = (uint32_t)n_in / 256;
        t.at_low = row_at + 16 * i;
        t.at_high = row_at + 32 * h + 16 * (c & 1);
        t.at_scale = row_at + 8 * h + c;
        t.at_d = row_at;
        t.x_q = 128 * h + 16 * c;
        t.x_sum = ACT_256_SUM16 + 2 * (8 * h + c);
        t.shift = (c & 2) - 4; /* plane p = c / 2 of a byte's four pairs of bits: to bits 4 and 5 */
    }

    DEV block load(const q6_k_dot &t, int b)
    {
        const uint32_t n = (uint32_t)b;
        const uint8_t *scale = lane_address(t.w + (192 * t.part + 16 * n), t.at_scale);
        block k;
        k.low = load_u32x4(lane_address(t.w + 128 * n, t.at_low));
        k.high = load_u32x4(lane_address(t.w + (128 * t.part + 64 * n), t.at_high));
        k.scale0 = *(const int8_t *)scale;
        k.scale1 = *(const int8_t *)(scale + 4);
        k.d = *(const uint16_t *)lane_address(t.w + (208 * t.part + 2 * n), t.at_d);
        return k;
    }

    template <int ROWS> DEV void add(const q6_k_dot &t, const block &k, int b, const uint8_t *x, const uint32_t (&x_at)[ROWS], float (&sum)[ROWS])
    {
        const float d = half_low(k.d);
        int v0[4], v1[4];
        for (int i = 0; i < 4; i++) {
            const uint32_t bits = rotate_right(k.high[i], t.shift);
            v0[i] = (int)((k.low[i] & 0x0f0f0f0fU) | (bits & 0x30303030U));
            v1[i] = (int)((k.low[i] >> 4 & 0x0f0f0f0fU) | (rotate_right(bits, 4) & 0x30303030U));
        }
        UNROLL
        for (int r = 0; r < ROWS; r++) {
            const uint8_t *xb = x + x_at[r] + (uint32_t)b * ACT_256_BYTES;
            const uint8_t *xq = lane_address(xb, t.x_q), *xs = lane_address(xb, t.x_sum);
            const i32x4_t q0 = load_i32x4(xq), q1 = load_i32x4(xq + 64);
            const int sum0 = *(const int16_t *)xs, sum1 = *(const int16_t *)(xs + 8);
            const float dx = *(const float *)(xb + ACT_256_D);
            int dot0 = mul24(sum0, -32), dot1 = mul24(sum1, -32); /* values are stored 32 too large */
            for (int i = 0; i < 4; i++) {
                dot0 = dot4_us(v0[i], q0[i], dot0);
                dot1 = dot4_us(v1[i], q1[i], dot1);
            }
            const int isum = sum_of_8(mul24(k.scale1, dot1) + mul24(k.scale0, dot0));
            sum[r] = gpu_fmaf(dx * d, (float)isum, sum[r]);
        }
    }
};

/* ---- Q8_0: [q 32 * nb][d 2 * nb]; Q4_0: [q 16 * nb][d 2 * nb] ---- */

/* Eight blocks in hand at once. Lane gray(t) = t ^ t >> 1 holds block t of them; the sum is at lane gray(t) after block t. */
template <bool FOUR> struct q32_dot {
    enum { VALUES = 256 };
    struct block {
        u32x4_t q0, q1;
        uint32_t d;
        uint32_t at; /* index in the row */
        bool past;   /* beyond the row's end: the last block again, to be left out */
    };
    const uint8_t *w;
    uint32_t row_at, blocks, first, x_d, x_sum;

    DEV void open(q32_dot &t, const uint8_t *rows, uint32_t at, int n_in)
    {
        const uint32_t i = lane_id() & 7;
        t.w = rows;
        t.row_at = at;
        t.blocks = (uint32_t)n_in / 32;
        t.first = i ^ i >> 1 ^ i >> 2;
        t.x_d = lines_of((uint32_t)n_in);
        t.x_sum = t.x_d + lines_of(t.blocks * 4);
    }

    DEV block load(const q32_dot &t, int b)
    {
        block k;
        k.at = t.first + (uint32_t)b * 8;
        k.past = k.at >= t.blocks;
        k.at = k.past ? t.blocks - 1 : k.at;
        const uint32_t at = t.row_at + k.at * (FOUR ? 16 : 32);
        const uint8_t *q = lane_address(t.w, at);
        k.q0 = load_u32x4(q);
        if constexpr (!FOUR)
            k.q1 = load_u32x4(q + 16);
        k.d = *(const uint16_t *)lane_address(t.w + t.blocks * (FOUR ? 16 : 32), t.row_at + k.at * 2);
        return k;
    }

    template <int ROWS> DEV void add(const q32_dot &t, const block &k, int b, const uint8_t *x, const uint32_t (&x_at)[ROWS], float (&sum)[ROWS])
    {
        const float d = half_low(k.d);
        float scale[ROWS], value[ROWS];
        (void)b;
        UNROLL
        for (int r = 0; r < ROWS; r++) {
            const uint8_t *xr = x + x_at[r];
            const uint8_t *xq = lane_address(xr, k.at * 32);
            const i32x4_t q0 = load_i32x4(xq), q1 = load_i32x4(xq + 16);
            const float dx = *(const float *)lane_address(xr + t.x_d, k.at * 4);
            int isum = 0;
            if constexpr (FOUR) {
                isum = mul24(*(const int *)lane_address(xr + t.x_sum, k.at * 4), -8); /* values are stored 8 too large */
                for (int i = 0; i < 4; i++) {
                    isum = dot4_us((int)(k.q0[i] & 0x0f0f0f0fU), q0[i], isum);
                    isum = dot4_us((int)(k.q0[i] >> 4 & 0x0f0f0f0fU), q1[i], isum);
                }
            } else {
                for (int i = 0; i < 4; i++)
                    isum = dot4_ss((int)k.q0[i], q0[i], isum);
                for (int i = 0; i < 4; i++)
                    isum = dot4_ss((int)k.q1[i], q1[i], isum);
            }
            value[r] = k.past ? 0.0f : (float)isum;
            scale[r] = k.past ? -0.0f : dx * d; /* the product -0 changes no sum */
        }
        UNROLL
        for (int r = 0; r < ROWS; r++) {
            float y = sum[r];
            y = gpu_fmaf(scale[r], value[r], shfl_xor_f<4>(y)); /* from the last of eight to the first of the next */
            y = gpu_fmaf(scale[r], value[r], shfl_xor_f<1>(y));
            y = gpu_fmaf(scale[r], value[r], shfl_xor_f<2>(y));
            y = gpu_fmaf(scale[r], value[r], shfl_xor_f<1>(y));
            y = gpu_fmaf(scale[r], value[r], shfl_xor_f<4>(y));
            y = gpu_fmaf(scale[r], value[r], shfl_xor_f<1>(y));
            y = gpu_fmaf(scale[r], value[r], shfl_xor_f<2>(y));
            sum[r] = gpu_fmaf(scale[r], value[r], shfl_xor_f<1>(y));
        }
    }
};

/* ---- F32, F16, BF16 ---- */

/* Two neighbouring values as f32. */
template <int TYPE> DEV f32x2_t load_two(const uint8_t *p)
{
    if constexpr (TYPE == GPU_F32) {
        return load_f32x2(p);
    } else {
        const uint32_t two = (uint32_t)load_i32(p);
        f32x2_t v;
        v[0] = TYPE == GPU_F16 ? half_low(two) : as_float((int)(two << 16));
        v[1] = TYPE == GPU_F16 ? half_high(two) : as_float((int)(two & 0xffff0000U));
        return v;
    }
}

template <int TYPE> DEV float load_one(const uint8_t *p)
{
    if constexpr (TYPE == GPU_F32)
        return *(const float *)p;
    else if constexpr (TYPE == GPU_F16)
        return h2f(*(const half *)p);
    else
        return bf2f(*(const uint16_t *)p);
}

template <int TYPE, int ROWS>
DEV void dot_floats(const uint8_t *w, uint32_t row_at, int n_in, const uint8_t *x, const uint32_t (&x_at)[ROWS], float (&sum)[ROWS])
{
    enum { STEPS = ROWS > 4 ? 4 : 8, BYTES = TYPE == GPU_F32 ? 4 : 2 }; /* groups of 16 values in hand */
    const uint32_t i = 2 * (lane_id() & 7);
    const uint32_t at = row_at + i * BYTES, x_lane = i * 4;
    float p0[ROWS], p1[ROWS];
    UNROLL
    for (int r = 0; r < ROWS; r++)
        p0[r] = p1[r] = 0.0f;
    int k = 0;
    for (; k + 16 * STEPS <= n_in; k += 16 * STEPS) {
        const uint8_t *wk = lane_address(w + (uint32_t)k * BYTES, at);
        f32x2_t v[STEPS];
        for (int s = 0; s < STEPS; s++)
            v[s] = load_two<TYPE>(wk + 16 * BYTES * s);
        UNROLL
        for (int r = 0; r < ROWS; r++) {
            const uint8_t *xk = lane_address(x + x_at[r] + (uint32_t)k * 4, x_lane);
            for (int s = 0; s < STEPS; s++) {
                const f32x2_t y = load_f32x2(xk + 64 * s);
                p0[r] = gpu_fmaf(v[s][0], y[0], p0[r]);
                p1[r] = gpu_fmaf(v[s][1], y[1], p1[r]);
            }
        }
    }
    for (; k < n_in; k += 16) {
        const bool has0 = (uint32_t)k + i < (uint32_t)n_in, has1 = (uint32_t)k + i + 1 < (uint32_t)n_in;
        UNROLL
        for (int r = 0; r < ROWS; r++) {
            const uint8_t *wk = w + (uint32_t)k * BYTES + at, *xk = x + x_at[r] + (uint32_t)k * 4 + x_lane;
            if (has0)
                p0[r] = gpu_fmaf(load_one<TYPE>(wk), *(const float *)xk, p0[r]);
            if (has1)
                p1[r] = gpu_fmaf(load_one<TYPE>(wk + BYTES), *(const float *)(xk + 4), p1[r]);
        }
    }
    UNROLL
    for (int r = 0; r < ROWS; r++) { /* 8 + 8, 4 + 4, 2 + 2, 1 + 1 */
        p0[r] += shfl_xor_f<4>(p0[r]);
        p1[r] += shfl_xor_f<4>(p1[r]);
        p0[r] += shfl_xor_f<2>(p0[r]);
        p1[r] += shfl_xor_f<2>(p1[r]);
        p0[r] += shfl_xor_f<1>(p0[r]);
        p1[r] += shfl_xor_f<1>(p1[r]);
        sum[r] = p0[r] + p1[r];
    }
}

/* ---- a wave's four rows ---- */

template <class DOT, int ROWS>
DEV void dot_blocks(const uint8_t *w, uint32_t row_at, int n_in, const uint8_t *x, const uint32_t (&x_at)[ROWS], float (&sum)[ROWS])
{
    DOT dot;
    DOT::open(dot, w, row_at, n_in);
    UNROLL
    for (int r = 0; r < ROWS; r++)
        sum[r] = 0.0f;
    const int last = (n_in + DOT::VALUES - 1) / DOT::VALUES - 1;
    /* By twos, so that no block is moved from "next" to "now". */
    typename DOT::block even = DOT::load(dot, 0), odd;
    int b = 0;
    for (; b + 2 <= last; b += 2) {
        odd = DOT::load(dot, b + 1);
        DOT::template add<ROWS>(dot, even, b, x, x_at, sum);
        even = DOT::load(dot, b + 2);
        DOT::template add<ROWS>(dot, odd, b + 1, x, x_at, sum);
    }
    if (b < last) {
        odd = DOT::load(dot, b + 1);
        DOT::template add<ROWS>(dot, even, b++, x, x_at, sum);
        even = odd;
    }
    DOT::template add<ROWS>(dot, even, b, x, x_at, sum);
}

template <int TYPE, int ROWS>
DEV void dot_rows(const uint8_t *w, uint32_t row_stride, int n_w, int n_in, const uint8_t *x, const uint32_t (&x_at)[ROWS], float (&sum)[ROWS])
{
    const int mine = (int)(lane_id() >> 3);
    const uint32_t row_at = (uint32_t)(mine < n_w ? mine : n_w - 1) * row_stride;
    if constexpr (TYPE == GPU_Q4_K)
        dot_blocks<k45_dot<false>, ROWS>(w, row_at, n_in, x, x_at, sum);
    else if constexpr (TYPE == GPU_Q5_K)
        dot_blocks<k45_dot<true>, ROWS>(w, row_at, n_in, x, x_at, sum);
    else if constexpr (TYPE == GPU_Q6_K)
        dot_blocks<q6_k_dot, ROWS>(w, row_at, n_in, x, x_at, sum);
    else if constexpr (TYPE == GPU_Q8_0 || TYPE == GPU_Q4_0) {
        dot_blocks<q32_dot<TYPE == GPU_Q4_0>, ROWS>(w, row_at, n_in, x, x_at, sum);
        UNROLL
        for (int r = 0; r < ROWS; r++)
            sum[r] = shfl_xor_f<4>(sum[r]); /* the last block is lane 4's */
    } else
        dot_floats<TYPE, ROWS>(w, row_at, n_in, x, x_at, sum);
}

/* dot_rows for a type known at run time, uniform. */
template <int ROWS>
DEV void dot_rows_any(int type, const uint8_t *w, uint32_t row_stride, int n_w, int n_in, const uint8_t *x, const uint32_t (&x_at)[ROWS],
                      float (&sum)[ROWS])
{
    switch (type) {
    case GPU_Q4_K:
        dot_rows<GPU_Q4_K, ROWS>(w, row_stride, n_w, n_in, x, x_at, sum);
        break;
    case GPU_Q5_K:
        dot_rows<GPU_Q5_K, ROWS>(w, row_stride, n_w, n_in, x, x_at, sum);
        break;
    case GPU_Q6_K:
        dot_rows<GPU_Q6_K, ROWS>(w, row_stride, n_w, n_in, x, x_at, sum);
        break;
    case GPU_Q8_0:
        dot_rows<GPU_Q8_0, ROWS>(w, row_stride, n_w, n_in, x, x_at, sum);
        break;
    case GPU_Q4_0:
        dot_rows<GPU_Q4_0, ROWS>(w, row_stride, n_w, n_in, x, x_at, sum);
        break;
    case GPU_F16:
        dot_rows<GPU_F16, ROWS>(w, row_stride, n_w, n_in, x, x_at, sum);
        break;
    case GPU_BF16:
        dot_rows<GPU_BF16, ROWS>(w, row_stride, n_w, n_in, x, x_at, sum);
        break;
    default:
        dot_rows<GPU_F32, ROWS>(w, row_stride, n_w, n_in, x, x_at, sum);
        break;
    }
}

/* ---- kernels: grid [groups of 16 weight rows of all matrices] ---- */

template <int ROWS> DEV void matvec(const matvec_items &p)
{
    const uint32_t group = bid_x();
    matvec_item item = p.item[0];
    if (p.n_items > 1 && group >= p.item[1].first_group)
        item = p.item[1];
    if (p.n_items > 2 && group >= p.item[2].first_group)
        item = p.item[2];
    if (p.n_items > 3 && group >= p.item[3].first_group)
        item = p.item[3];
    const int row = ((int)(group - item.first_group) * MATVEC_WAVES + uniform_i((int)(tid_x() / 32))) * MATVEC_W;
    if (row >= item.n_out)
        return;
    const int n_w = item.n_out - row < MATVEC_W ? item.n_out - row : MATVEC_W;
    const uint8_t *w = item.w + (uint64_t)(uint32_t)row * item.row_stride;
    uint32_t x_at[ROWS];
    float sum[ROWS];
    UNROLL
    for (int r = 0; r < ROWS; r++)
        x_at[r] = (uint32_t)r * item.x_stride;
    dot_rows_any<ROWS>(item.type, w, item.row_stride, n_w, item.n_in, item.x, x_at, sum);
    const int mine = (int)(lane_id() >> 3);
    if ((lane_id() & 7) != 0 || mine >= n_w)
        return;
    float *y = item.y + (row + mine);
    for (int r = 0; r < ROWS; r++, y += item.n_out)
        *y = item.add ? *y + sum[r] : sum[r];
}

/* Items 0, 1 and 2 are q, k and v of attention: a head of all rows is turned and kept (attn_store.h) by the last of the workgroups that make it. */
template <int ROWS> DEV void matvec_heads(const matvec_params &p, float (*room)[ATTN_MAX_DIM], int *said)
{
    static_assert((int)MATVEC_WAVES == (int)ATTN_WAVES, "room for each wave");
    enum { GROUP = MATVEC_WAVES * MATVEC_W };
    if (ROWS > GPU_HEAD_ROWS || !p.head_counters)
        return;
    const struct attn_store_params &heads = p.heads;
    const int group = (int)bid_x(), which = (group >= (int)p.products.item[1].first_group) + (group >= (int)p.products.item[2].first_group);
    const int first = which == 2 ? (int)p.products.item[2].first_group : which == 1 ? (int)p.products.item[1].first_group : 0;
    const int members = (which == 0 ? heads.q_stride : heads.head_dim) / GROUP, head = (group - first) / members;
    const int counter = head + (which > 0 ? heads.n_heads : 0) + (which > 1 ? heads.n_kv_heads : 0);
    if (!last_of(p.head_counters + counter, members, said))
        return;
    const int wave = uniform_i((int)(tid_x() / 32));
    for (int r = wave; r < ROWS; r += MATVEC_WAVES) {
        if (which < 2)
            attn_turn_head(heads, r, head, which == 1, room[wave]);
        else
            attn_keep_value(heads, r, head);
    }
}

#define MATVEC_KERNEL(rows)                                                                                                                          \
    KERNEL(128) matvec_##rows(struct matvec_params p)                                                                                                \
    {                                                                                                                                                \
        SHARED struct tail_shared shared;                                                                                                            \
        SHARED float room[ATTN_WAVES][ATTN_MAX_DIM];                                                                                                 \
        matvec<rows>(p.products);                                                                                                                    \
        matvec_heads<rows>(read_again(p), room, &shared.said);                                                                                       \
        tail_of<MATVEC_WAVES>(read_again(p).tail, 0, rows, &shared);                                                                                 \
    }
MATVEC_KERNEL(1)
MATVEC_KERNEL(2)
MATVEC_KERNEL(3)
MATVEC_KERNEL(4)
MATVEC_KERNEL(5)
MATVEC_KERNEL(6)
MATVEC_KERNEL(7)
MATVEC_KERNEL(8)
#undef MATVEC_KERNEL

#endif
