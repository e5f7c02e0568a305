/* hip/kernels/act.h: activations before a product: RMSNorm, SiLU, and the forms that pair with the weights' types; rows of the token table.
 *
 * Every number here has the bits of the CPU backend: the norm adds squares in its 16 partial sums (engine/cpu/rows_impl.h), e^x is its polynomial
 * (engine/cpu/rows_vec.h), quantising is engine/cpu/matmul.h. A workgroup does one row, so nothing depends on the other rows.
 *
 * For other kernels: act_block, quantise_256 and quantise_32 (a wave, 256 values), exp_f, silu_f. */
#ifndef BEDSIDE_HIP_KERNELS_ACT_H
#define BEDSIDE_HIP_KERNELS_ACT_H

#include "hip/kernels/gpu.h"
#include "hip/kernels/params.h"

enum {
    ACT_THREADS = 256,
    ACT_WAVES = ACT_THREADS / 32,
    ACT_EACH = 8,        /* neighbouring values of one lane */
    ACT_256_SUM16 = 256, /* offsets in struct act_256 of engine/cpu/matmul_impl.h */
    ACT_256_SUM32 = 288,
    ACT_256_D = 304,
    ACT_256_BYTES = 320,
    NORM_TILE = 4096,               /* values added up at a time */
    NORM_LANE = NORM_TILE / 16 + 4, /* floats from one partial sum's values to the next one's: 16 bytes apart modulo the banks */
};

DEV uint32_t lines_of(uint32_t bytes)
{
    return (bytes + 63) & ~63U;
}

/* ---- functions of one number ---- */

/* e^x as engine/cpu/rows_vec.h defines it (v16_exp): 0 below -86.5, e^88 above 88, NaN for NaN. */
DEV float exp_f(float x)
{
    const float magic = 0x1.8p23f;
    const float below = 88.0f < x ? 88.0f : x;
    const float c = -86.5f > below ? -86.5f : below;
    const float t = gpu_fmaf(c, 0x1.715476p0f, magic); /* 1 / ln 2 */
    const float k = t - magic;
    float r = gpu_fmaf(-k, 0x1.62e43p-1f, c); /* ln 2, its f32 value and the rest */
    r = gpu_fmaf(-k, -0x1.05c61p-29f, r);
    float p = gpu_fmaf(1.0f / 5040, r, 1.0f / 720);
    p = gpu_fmaf(p, r, 1.0f / 120);
    p = gpu_fmaf(p, r, 1.0f / 24);
    p = gpu_fmaf(p, r, 1.0f / 6);
    p = gpu_fmaf(p, r, 0.5f);
    p = gpu_fmaf(p, r, 1.0f);
    p = gpu_fmaf(p, r, 1.0f);
    p = as_float((int)((uint32_t)as_int(p) + ((uint32_t)as_int(t) << 23)));
    return x < -86.5f ? 0.0f : p;
}

DEV float silu_f(float x)
{
    return x / (1.0f + exp_f(0.0f - x));
}

/* ---- RMSNorm ---- */

/* 1 / sqrt(mean of squares + eps) of x [n], in every thread. All ACT_THREADS threads call it together; `tile` holds 16 * NORM_LANE floats of SHARED
 * memory and `scale` one. Value i belongs to partial sum i % 16, each by fma in order, then 8 + 8, 4 + 4, 2 + 2, 1 + 1. One wave adds, out of a
 * tile laid out so that a lane reads four of its values at once. */
DEV float rms_scale(const float *x, int n, float eps, float *tile, float *scale)
{
    const int t = (int)tid_x(), part = t & 15;
    float sum = 0.0f;
    for (int base = 0; base < n; base += NORM_TILE) {
        const int count = n - base < NORM_TILE ? n - base : NORM_TILE, padded = (count + 63) & ~63;
        for (int i = t; i < padded; i += ACT_THREADS) /* the padding, zeros, changes no sum */
            tile[(i & 15) * NORM_LANE + (i >> 4)] = i < count ? x[base + i] : 0.0f;
        sync_threads();
        if (t < 32) { /* the upper lanes do what the lower ones do */
            const float *mine = tile + part * NORM_LANE;
            for (int i = 0; i < padded / 16; i += 4) {
                const f32x4_t v = load_f32x4(mine + i);
                sum = gpu_fmaf(v[0], v[0], sum);
                sum = gpu_fmaf(v[1], v[1], sum);
                sum = gpu_fmaf(v[2], v[2], sum);
                sum = gpu_fmaf(v[3], v[3], sum);
            }
        }
        sync_threads();
    }
    if (t < 32) {
        sum += shfl_xor_f<8>(sum);
        sum += shfl_xor_f<4>(sum);
        sum += shfl_xor_f<2>(sum);
        sum += shfl_xor_f<1>(sum);
        if (t == 0)
            *scale = 1.0f / gpu_sqrtf(sum / (float)n + eps);
    }
    sync_threads();
    return *scale;
}

/* ---- quantising ---- */

DEV uint32_t larger_u(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

DEV uint32_t smaller_u(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

DEV bool finite_bits(uint32_t bits)
{
    return (bits & 0x7f800000U) != 0x7f800000U;
}

/* round-half-even(x / d), at most 127 in magnitude (more only where d is subnormal and therefore coarse), as a byte. */
DEV uint32_t quantised(float x, float d)
{
    float q = gpu_rintf(x / d);
    q = q > 127.0f ? 127.0f : q;
    q = q < -127.0f ? -127.0f : q;
    return (uint32_t)(int)q & 0xff;
}

struct quantised_8 {
    uint32_t low, high; /* eight bytes */
    int sum;
};

DEV quantised_8 quantise_8(const float (&v)[ACT_EACH], float d, bool zero)
{
    quantised_8 q = {0, 0, 0};
    UNROLL
    for (int i = 0; i < 4; i++) {
        q.low |= (zero ? 0U : quantised(v[i], d)) << (8 * i);
        q.high |= (zero ? 0U : quantised(v[4 + i], d)) << (8 * i);
    }
    q.sum = dot4_ss((int)q.high, 0x01010101, dot4_ss((int)q.low, 0x01010101, 0));
    return q;
}

/* The largest magnitude among a lane's values, as bits: infinities and NaNs come out on top. */
DEV uint32_t largest_8(const float (&v)[ACT_EACH])
{
    uint32_t top = 0;
    UNROLL
    for (int i = 0; i < ACT_EACH; i++)
        top = larger_u(top, (uint32_t)as_int(v[i]) & 0x7fffffffU);
    return top;
}

/* One struct act_256 from a wave's 256 values, eight neighbours in each lane. */
DEV void quantise_256(const float (&v)[ACT_EACH], uint8_t *dst)
{
    const uint32_t lane = lane_id();
    uint32_t top = largest_8(v);
    top = larger_u(top, (uint32_t)shfl_xor_i<1>((int)top));
    top = larger_u(top, (uint32_t)shfl_xor_i<2>((int)top));
    top = larger_u(top, (uint32_t)shfl_xor_i<4>((int)top));
    top = larger_u(top, (uint32_t)shfl_xor_i<8>((int)top));
    top = larger_u(top, (uint32_t)shfl_xor_i<16>((int)top));
    /* The sign of the first of that magnitude: the smallest index, with the sign below it. */
    uint32_t first = 0xffffffffU;
    UNROLL
    for (int i = ACT_EACH - 1; i >= 0; i--) {
        const uint32_t bits = (uint32_t)as_int(v[i]);
        if ((bits & 0x7fffffffU) == top)
            first = (lane * ACT_EACH + (uint32_t)i) << 1 | bits >> 31;
    }
    first = smaller_u(first, (uint32_t)shfl_xor_i<1>((int)first));
    first = smaller_u(first, (uint32_t)shfl_xor_i<2>((int)first));
    first = smaller_u(first, (uint32_t)shfl_xor_i<4>((int)first));
    first = smaller_u(first, (uint32_t)shfl_xor_i<8>((int)first));
    first = smaller_u(first, (uint32_t)shfl_xor_i<16>((int)first));
    const bool finite = finite_bits(top);
    const float d = as_float((int)(top | first << 31)) / -127.0f;
    const bool zero = !finite || d == 0.0f;
    const quantised_8 q = quantise_8(v, d, zero);
    const int sum16 = q.sum + shfl_xor_i<1>(q.sum), sum32 = sum16 + shfl_xor_i<2>(sum16);
    i32x2_t bytes;
    bytes[0] = (int)q.low;
    bytes[1] = (int)q.high;
    *(i32x2_t *)(dst + lane * ACT_EACH) = bytes;
    if ((lane & 1) == 0)
        *(int16_t *)(dst + ACT_256_SUM16 + lane) = (int16_t)sum16;
    if ((lane & 3) == 0)
        *(int16_t *)(dst + ACT_256_SUM32 + lane / 2) = (int16_t)sum32;
    if (lane == 0) {
        i32x4_t tail; /* d and the padding */
        tail[0] = !finite ? 0x7fc00000 : zero ? 0 : as_int(d);
        tail[1] = tail[2] = tail[3] = 0;
        store_i32x4(dst + ACT_256_D, tail);
    }
}

/* Eight blocks of a row of struct act_32 [n] from a wave's 256 values, the first of them `at`; lanes whose values lie beyond n store nothing. */
DEV void quantise_32(const float (&v)[ACT_EACH], uint8_t *row, int at, int n)
{
    const uint32_t lane = lane_id(), i = (uint32_t)at + lane * ACT_EACH, d_at = lines_of((uint32_t)n);
    uint32_t top = largest_8(v);
    top = larger_u(top, (uint32_t)shfl_xor_i<1>((int)top));
    top = larger_u(top, (uint32_t)shfl_xor_i<2>((int)top));
    const bool finite = finite_bits(top);
    const float d = as_float((int)top) / 127.0f;
    const quantised_8 q = quantise_8(v, d, !finite || d == 0.0f);
    int sum = q.sum + shfl_xor_i<1>(q.sum);
    sum += shfl_xor_i<2>(sum);
    if (i >= (uint32_t)n)
        return;
    i32x2_t bytes;
    bytes[0] = (int)q.low;
    bytes[1] = (int)q.high;
    *(i32x2_t *)(row + i) = bytes;
    if ((lane & 3) == 0) {
        *(float *)(row + d_at + i / 32 * 4) = finite ? h2f(f2h(d)) : as_float(0x7fc00000);
        *(int *)(row + d_at + lines_of((uint32_t)n / 32 * 4) + i / 32 * 4) = sum;
    }
}

/* ---- the kernel ---- */

/* x[i] to x[i + 7]; those past the end, n, are the last one. `aligned`: n is a multiple of eight and x lies on 16 bytes. */
DEV void load_values(float (&v)[ACT_EACH], const float *x, int i, int n, bool aligned)
{
    if (aligned) {
        const int at = i < n ? i : n - ACT_EACH;
        const f32x4_t a = load_f32x4(x + at), b = load_f32x4(x + at + 4);
        UNROLL
        for (int j = 0; j < 4; j++) {
            v[j] = a[j];
            v[4 + j] = b[j];
        }
        return;
    }
    UNROLL
    for (int j = 0; j < ACT_EACH; j++)
        v[j] = x[i + j < n ? i + j : n - 1];
}

/* y[i] to y[i + 7], those below n. */
DEV void store_values(const float (&v)[ACT_EACH], float *y, int i, int n, bool aligned)
{
    if (aligned) {
        f32x4_t a, b;
        UNROLL
        for (int j = 0; j < 4; j++) {
            a[j] = v[j];
            b[j] = v[4 + j];
        }
        if (i >= n)
            return;
        store_f32x4(y + i, a);
        store_f32x4(y + i + 4, b);
        return;
    }
    UNROLL
    for (int j = 0; j < ACT_EACH; j++) {
        if (i + j < n)
            y[i + j] = v[j];
    }
}

/* A wave: values at .. at+255 of row r of the result, which is row `from` of x. PLAIN: without `up` and `normed`. */
template <bool PLAIN> DEV void act_block(const struct act_params &p, int r, int from, int at, float scale)
{
    const int n = p.n, i0 = at + (int)lane_id() * ACT_EACH;
    const size_t row = (size_t)(uint32_t)r, x_at = (size_t)(uint32_t)from * (uint32_t)n;
    const bool aligned = (n & 7) == 0;
    float v[ACT_EACH], by[ACT_EACH];
    load_values(v, p.x + x_at, i0, n, aligned);
    if (!PLAIN && p.up) {
        load_values(by, p.up + x_at, i0, n, aligned);
        UNROLL
        for (int j = 0; j < ACT_EACH; j++)
            v[j] = silu_f(v[j]) * by[j];
    }
    if (p.norm) {
        load_values(by, p.norm, i0, n, aligned);
        UNROLL
        for (int j = 0; j < ACT_EACH; j++)
            v[j] = v[j] * scale * by[j];
    }
    UNROLL
    for (int j = 0; j < ACT_EACH; j++)
        v[j] = i0 + j < n ? v[j] : 0.0f;
    if (!PLAIN && p.normed)
        store_values(v, p.normed + row * p.normed_stride, i0, n, aligned);
    if (p.f32)
        store_values(v, (float *)(p.f32 + row * lines_of((uint32_t)n * 4)), i0, n, aligned);
    if (p.q8_256)
        quantise_256(v, p.q8_256 + row * ((uint32_t)n / 256 * ACT_256_BYTES) + (uint32_t)at / 256 * ACT_256_BYTES);
    if (p.q8_32)
        quantise_32(v, p.q8_32 + row * (lines_of((uint32_t)n) + 2 * lines_of((uint32_t)n / 32 * 4)), at, n);
}

KERNEL(256) act(struct act_params p)
{
    SHARED float tile[16 * NORM_LANE];
    SHARED float shared_scale;
    const int r = (int)bid_x(), from = p.index ? p.index[r] : r;
    const float scale = p.norm ? rms_scale(p.x + (size_t)(uint32_t)from * (uint32_t)p.n, p.n, p.eps, tile, &shared_scale) : 1.0f;
    for (int at = uniform_i((int)(tid_x() / 32)) * 256; at < p.n; at += ACT_WAVES * 256)
        act_block<false>(p, r, from, at, scale);
}

/* ---- rows of a matrix as f32: the bits of block_dequant (engine/blocks.c) ---- */

/* Value i of a row of n that begins at `row`, layout of hip/layout.h. */
DEV float weight_value(int type, const uint8_t *row, uint32_t n, uint32_t i)
{
    switch (type) {
    case GPU_F32:
        return ((const float *)row)[i];
    case GPU_F16:
        return h2f(((const half *)row)[i]);
    case GPU_BF16:
        return bf2f(((const uint16_t *)row)[i]);
    case GPU_Q8_0:
        return h2f(((const half *)(row + n))[i / 32]) * (float)((const int8_t *)row)[i];
    case GPU_Q4_0: {
        const int byte = row[i / 32 * 16 + i % 16];
        return h2f(((const half *)(row + n / 2))[i / 32]) * (float)((i % 32 < 16 ? byte & 15 : byte >> 4) - 8);
    }
    case GPU_Q6_K: {
        const uint32_t part = n / 256, b = i / 256, h = i / 128 % 2, plane = i / 32 % 4, k = i % 32;
        const int low = row[128 * b + 64 * h + 32 * (plane & 1) + k] >> (plane & 2) * 2 & 15;
        const int high = row[128 * part + 64 * b + 32 * h + k] >> 2 * plane & 3;
        const float d = h2f(((const half *)(row + 208 * part))[b]);
        return d * (float)((const int8_t *)row)[192 * part + i / 16] * (float)((low | high << 4) - 32);
    }
    default: { /* Q4_K, Q5_K */
        const bool five = type == GPU_Q5_K;
        const uint8_t *block = row + i / 256 * (five ? 176 : 144), *s = block + 4;
        const uint32_t j = i / 32 % 8, k = i % 32;
        const int sc = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
        const int min = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | (s[j] >> 6) << 4;
        int q = block[(five ? 48 : 16) + j / 2 * 32 + k] >> j % 2 * 4 & 15;
        if (five)
            q |= (block[16 + k] >> j & 1) << 4;
        const float scale = h2f(((const half *)block)[0]) * (float)sc;
        return scale * (float)q - h2f(((const half *)block)[1]) * (float)min;
    }
    }
}

KERNEL(256) embed(struct embed_params p)
{
    const uint32_t n = (uint32_t)p.w.n_in;
    const uint64_t id = p.ids ? (uint64_t)(uint32_t)p.ids[bid_x()] : 0;
    const uint8_t *row = p.w.data + id * p.w.row_stride;
    float *out = p.out + (size_t)bid_x() * n;
    for (uint32_t i = tid_x(); i < n; i += ACT_THREADS)
        out[i] = weight_value(p.w.type, row, n, i);
}

#endif
