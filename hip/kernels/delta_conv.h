/* hip/kernels/delta_conv.h: what the gated DeltaNet does before it looks at its state, spec/qwen35moe.md section 7 steps 1 to 5: the causal convolution, SiLU, L2 norm
 * of q and k, gates. And small things that delta.h needs too.
 *
 * delta_conv: a wave has one head of up to CONV_ROWS rows of a span. The wave with the span's first rows is the only one that reads the slot's
 * history, and it overwrites the history when it has read it; CONV_ROWS is no less than the taps before a row's own. */
#ifndef BEDSIDE_HIP_KERNELS_DELTA_CONV_H
#define BEDSIDE_HIP_KERNELS_DELTA_CONV_H

#include "hip/kernels/gpu.h"
#include "hip/kernels/params.h"
#include "hip/kernels/wave.h"

enum {
    DELTA_COLUMNS = 128, /* of a head, that the lanes of a wave own */
    DELTA_DIM = 256,     /* most channels of a head */
    CONV_THREADS = 128,
    CONV_HEADS = CONV_THREADS / 32,
    CONV_ROWS = 16,
};

#ifdef BEDSIDE_GPU_SHIM
#define DELTA_UNROLLED(n)
#define DELTA_ROLLED
#else
#define DELTA_PRAGMA(text) _Pragma(#text)
#define DELTA_UNROLLED(n)  DELTA_PRAGMA(unroll n) /* n times, or all when n is not given: what indexes registers must be a constant */
#define DELTA_ROLLED       _Pragma("nounroll")
#endif

/* ---- small things ---- */

/* x, from here on as if it came from nowhere: conditions on it are worked out where they are used and do not fill the scalar registers of the whole
 * kernel. */
DEV int delta_fresh(int x)
{
#ifndef BEDSIDE_GPU_SHIM
    __asm__ volatile("" : "+s"(x));
#endif
    return x;
}

/* Nothing is moved across this: what follows is not begun early at the price of registers. */
DEV void delta_apart()
{
#ifndef BEDSIDE_GPU_SHIM
    __builtin_amdgcn_sched_barrier(0);
#endif
}

/* Lane and thread, the same way: addresses made of them are not kept in vector registers from one part of the kernel to the next. */
DEV int delta_lane()
{
    int x = (int)lane_id();
#ifndef BEDSIDE_GPU_SHIM
    __asm__ volatile("" : "+v"(x));
#endif
    return x;
}

DEV int delta_tid()
{
    int x = (int)tid_x();
#ifndef BEDSIDE_GPU_SHIM
    __asm__ volatile("" : "+v"(x));
#endif
    return x;
}

/* The same for an address. */
DEV const float *delta_fresh(const float *p)
{
#ifndef BEDSIDE_GPU_SHIM
    __asm__ volatile("" : "+s"(p));
#endif
    return p;
}

/* Four floats at the same address in all lanes, from memory that nobody writes while the kernel runs: through the scalar cache. */
DEV f32x4_t delta_same_f32x4(const float *p)
{
#ifdef BEDSIDE_GPU_SHIM
    return load_f32x4(p);
#else
    return *(const __attribute__((address_space(4))) f32x4_t *)(uint64_t)p;
#endif
}

/* The same, `bytes` further; a small offset stays in a scalar register. */
DEV f32x4_t delta_same_f32x4_at(const float *p, uint32_t bytes)
{
    return delta_same_f32x4((const float *)(const void *)((const char *)p + bytes));
}

/* Four floats `at` floats from a base that is the same in all lanes: 32-bit offsets from a scalar address. */
DEV f32x4_t delta_load(const float *base, int at)
{
    return load_f32x4((const char *)base + (uint32_t)at * 4U);
}

DEV void delta_store(float *base, int at, f32x4_t x)
{
    store_f32x4((char *)base + (uint32_t)at * 4U, x);
}

DEV float delta_silu(float x)
{
    return x / (1.0f + gpu_expf(-x));
}

DEV f32x4_t delta_fma(float a, f32x4_t x, f32x4_t y)
{
    f32x4_t r = y;
    for (int c = 0; c < 4; c++)
        r[c] = gpu_fmaf(a, x[c], y[c]);
    return r;
}

DEV int delta_min(int a, int b)
{
    return a < b ? a : b;
}

DEV int delta_max(int a, int b)
{
    return a > b ? a : b;
}

DEV bool delta_in_one_cell(const struct gpu_span &span)
{
    return (span.pos & (GPU_GRID - 1)) + span.n <= GPU_GRID;
}

/* ---- delta_conv ---- */

/* ln(1 + e^x). For small e the rounding of 1 + e is taken out again. */
DEV float delta_softplus(float x)
{
    if (x > 20.0f)
        return x;
    const float e = gpu_expf(x), w = 1.0f + e;
    return w == 1.0f ? e : gpu_logf(w) * (e / (w - 1.0f));
}

/* beta and g, kept and returned. */
DEV f32x2_t conv_gates(const struct delta_conv_params &p, int row, int head)
{
    const size_t at = (size_t)row * (size_t)p.v_heads + (size_t)head, to = (size_t)row * 2 * (size_t)p.v_heads + (size_t)head;
    const float x = p.alpha_raw[at] + p.dt_bias[head];
    const f32x2_t gates = {1.0f / (1.0f + gpu_expf(-p.beta_raw[at])), p.a[head] * delta_softplus(x)};
    p.gates[to] = gates[0];
    p.gates[to + (size_t)p.v_heads] = gates[1];
    return gates;
}

/* The address of the raw row `back` rows after the span's first (before it: negative), or 0 before the sequence's. */
DEV uint64_t conv_source(const struct delta_conv_params &p, const struct gpu_span &span, const float *ring, int back)
{
    const int pos = span.pos + back;
    if (pos < 0)
        return 0;
    return (uint64_t)(back < 0 ? ring : p.u) + (uint64_t)(back < 0 ? pos & (p.ring - 1) : span.row + back) * (uint64_t)p.channels * sizeof(float);
}

/* Steps 2 to 5 for rows first .. last-1 of the span and one head. FAST: four taps, held in registers, and at most 128 channels. ROOM: the row is also
 * put there, one of its channels after the other, and stored only with `keep`. */
template <bool FAST, bool ROOM>
DEV void conv_rows(const struct delta_conv_params &p, const struct gpu_span &span, const float *ring, int head, int first, int last, float *room,
                   bool keep)
{
    enum { PARTS = FAST ? 1 : 2 };
    const int lane = (int)lane_id(), at = head * p.dim;
    f32x4_t taps[4];
    for (int c = 0; c < 4 && FAST; c++)
        taps[c] = load_f32x4(p.conv + (size_t)(at + (4 * lane < p.dim ? 4 * lane : 0) + c) * (size_t)p.conv_stride);
    for (int t = first; t < last; t++) {
        f32x4_t y[PARTS];
        float squares = 0.0f;
        for (int part = 0; part < PARTS; part++) {
            const int channel = DELTA_COLUMNS * part + 4 * lane;
            f32x4_t sum = {0.0f, 0.0f, 0.0f, 0.0f};
            for (int j = 0; j < (FAST ? 4 : p.width); j++) {
                const uint64_t from = conv_source(p, span, ring, t - (FAST ? 3 : p.width - 1) + j);
                if (!from || channel >= p.dim)
                    continue;
                const f32x4_t x = load_f32x4(GLOBAL(const float, from) + at + channel);
                for (int c = 0; c < 4; c++) {
                    float tap;
                    if constexpr (FAST)
                        tap = taps[c][j];
                    else
                        tap = p.conv[(size_t)(at + channel + c) * (size_t)p.conv_stride + (size_t)j];
                    sum[c] = gpu_fmaf(tap, x[c], sum[c]);
                }
            }
            for (int c = 0; c < 4; c++) {
                y[part][c] = delta_silu(sum[c]);
                squares = gpu_fmaf(y[part][c], y[part][c], squares);
            }
        }
        if (head < 2 * p.k_heads) {
            const float by = (head < p.k_heads ? p.q_scale : 1.0f) / gpu_fmaxf(gpu_sqrtf(sum_of_wave(squares)), p.eps);
            for (int part = 0; part < PARTS; part++)
                for (int c = 0; c < 4; c++)
                    y[part][c] *= by;
        }
        for (int part = 0; part < PARTS; part++) {
            const int channel = DELTA_COLUMNS * part + 4 * lane;
            if (channel < p.dim && ROOM)
                store_f32x4(room + channel, y[part]);
            if (channel < p.dim && keep)
                store_f32x4(p.qkv + (size_t)(span.row + t) * (size_t)p.channels + at + channel, y[part]);
        }
    }
}

/* The same with the way that suits the filter; then the raw rows that the history needs, with `keep`. */
template <bool ROOM>
DEV void conv_head(const struct delta_conv_params &p, const struct gpu_span &span, int head, int first, int last, float *room, bool keep)
{
    const int at = head * p.dim;
    float *ring = GLOBAL(float, span.state + p.ring_at);
    if (p.width == 4 && p.dim <= DELTA_COLUMNS)
        conv_rows<true, ROOM>(p, span, ring, head, first, last, room, keep);
    else
        conv_rows<false, ROOM>(p, span, ring, head, first, last, room, keep);
    if (first > 0 || !keep)
        return;
    for (int t = delta_max(span.n - p.ring, 0); t < span.n; t++)
        for (int channel = 4 * (int)lane_id(); channel < p.dim; channel += DELTA_COLUMNS)
            store_f32x4(ring + (size_t)((span.pos + t) & (p.ring - 1)) * (size_t)p.channels + at + channel,
                        load_f32x4(p.u + (size_t)(span.row + t) * (size_t)p.channels + at + channel));
}

/* Grid [heads / CONV_HEADS][rows of the longest span / CONV_ROWS][spans]. */
KERNEL(CONV_THREADS) delta_conv(struct delta_conv_params p)
{
    const int head = (int)bid_x() * CONV_HEADS + uniform_i((int)(tid_x() >> 5)), first = (int)bid_y() * CONV_ROWS, lane = (int)lane_id();
    const struct gpu_span span = p.step.spans[bid_z()];
    if (head >= 2 * p.k_heads + p.v_heads || first >= span.n)
        return;
    const int last = delta_min(first + CONV_ROWS, span.n);
    if (head >= 2 * p.k_heads && first + lane < last)
        conv_gates(p, span.row + first + lane, head - 2 * p.k_heads);
    conv_head<false>(p, span, head, first, last, nullptr, true);
}

#endif
