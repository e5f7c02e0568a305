/* hip/kernels/attn_store.h: what attention does before it looks at other tokens, spec/qwen35moe.md section 6, steps 3 to 5: RMSNorm of query and key heads, rotation
 * by position, keys and values into the page. A wave for each head of each row, in a launch of its own or, where
 * rows are few, in that of the product that makes q, k and v (matvec.h). It moves 13 KB a row for the 35B and is bound by its latency. */
#ifndef BEDSIDE_HIP_KERNELS_ATTN_STORE_H
#define BEDSIDE_HIP_KERNELS_ATTN_STORE_H

#include "hip/kernels/gpu.h"
#include "hip/kernels/params.h"
#include "hip/kernels/wave.h"

enum { ATTN_WAVES = 4 };

/* The compiler takes a kernel for bound by memory, and trades its waves for loads in flight, when it sees a few addresses that were loaded, or that lie far
 * apart from one access to the next (AMDGPUPerfHint; arguments count too). Of mat-vec kernels, which do this work for a moment at their end, that must not
 * become true: attn_same and attn_opaque hide it, and tests/hip/test_static_gates.sh counts the registers. */

/* *p, the same in all lanes, from memory that nobody writes while the kernel runs: through the scalar cache. */
template <class T> DEV T attn_same(const T *p)
{
#ifdef BEDSIDE_GPU_SHIM
    return *p;
#else
    return *(const __attribute__((address_space(4))) T *)(uint64_t)p;
#endif
}

/* v, but the compiler does not know. */
DEV int attn_opaque(int v)
{
#if defined(__AMDGCN__)
    __asm__ volatile("" : "+v"(v));
#endif
    return v;
}

/* Values c = lane, lane + 32, ... of a head. */
enum { ATTN_LANE_VALUES = ATTN_MAX_DIM / 32 };

/* As block_quant_q8_0: a block's 32 values are the wave's lanes. */
DEV void attn_append(const struct attn_store_params &p, const float *y, uint8_t *to)
{
    const int lane = (int)lane_id();
    for (int i = 0; 32 * i < p.head_dim; i++) {
        const int c = 32 * i + lane;
        if (!p.q8) {
            if (c < p.head_dim)
                ((uint16_t *)to)[c] = h2u(f2h(y[i]));
            continue;
        }
        const float largest = as_float(largest_of_wave_i(as_int(y[i]) & 0x7fffffff));
        const half scale = f2h(largest / 127.0f);
        const float d = h2f(scale);
        const bool finite = (h2u(scale) & 0x7c00) != 0x7c00;
        const float q = gpu_fmaxf(-127.0f, gpu_fminf(127.0f, gpu_rintf(y[i] / d)));
        uint8_t *block = to + 34 * i;
        if (lane == 0)
            *(uint16_t *)block = finite ? h2u(scale) : (uint16_t)0x7e00;
        ((int8_t *)block)[2 + lane] = finite && d > 0.0f ? (int8_t)(int)q : (int8_t)0;
    }
}

/* Where the row's key or value of KV head 0 lies. */
DEV uint64_t attn_row_at(const struct attn_store_params &p, int row, int kv_head)
{
    const int pos = attn_same(p.step.row_pos + row), first_page = attn_same(&p.step.spans[attn_same(p.step.row_span + row)].first_page);
    return attn_same(p.step.pages + first_page + pos / GPU_GRID) + (uint64_t)kv_head * p.head_bytes + (uint64_t)(pos % GPU_GRID) * p.row_bytes;
}

/* A wave: one query head (is_key false) or key head of a row. `turned`: room for a head in SHARED memory. */
DEV void attn_turn_head(const struct attn_store_params &p, int row, int head, bool is_key, float *turned)
{
    const int lane = (int)lane_id(), pos = attn_same(p.step.row_pos + row);
    const float *x = is_key ? p.k + ((size_t)row * (size_t)p.n_kv_heads + (size_t)head) * (size_t)p.head_dim
                            : p.q + ((size_t)row * (size_t)p.n_heads + (size_t)head) * (size_t)p.q_stride;
    float y[ATTN_LANE_VALUES] = {}, squares = 0.0f;
    for (int i = 0; 32 * i < p.head_dim; i++) {
        const int c = attn_opaque(32 * i + lane);
        y[i] = c < p.head_dim ? x[c] : 0.0f;
        squares = gpu_fmaf(y[i], y[i], squares);
    }
    const float *norm = is_key ? p.k_norm : p.q_norm;
    const float scale = 1.0f / gpu_sqrtf(sum_of_wave(squares) / (float)p.head_dim + p.eps);
    for (int i = 0; 32 * i < p.head_dim; i++) {
        const int c = attn_opaque(32 * i + lane);
        if (c < p.head_dim) {
            y[i] = y[i] * scale * norm[c];
            turned[c] = y[i];
        }
    }
    sync_wave();
    const int half_rot = p.n_rot / 2;
    const float *cosines = GLOBAL(const float, attn_same(p.rope + pos / ATTN_ROPE_ROWS)) + (size_t)(pos % ATTN_ROPE_ROWS) * (size_t)p.n_rot;
    for (int i = 0; 32 * i < p.n_rot; i++) {
        const int c = attn_opaque(32 * i + lane);
        if (c >= p.n_rot)
            break;
        const bool upper = c >= half_rot;
        const int j = upper ? c - half_rot : c;
        const float a = turned[j], b = turned[j + half_rot], cosine = cosines[j], sine = cosines[half_rot + j];
        y[i] = upper ? a * sine + b * cosine : a * cosine - b * sine;
    }
    sync_wave(); /* `turned` is free again */
    if (!is_key) {
        float *q = p.q + ((size_t)row * (size_t)p.n_heads + (size_t)head) * (size_t)p.q_stride;
        for (int i = 0; 32 * i < p.head_dim; i++) {
            const int c = attn_opaque(32 * i + lane);
            if (c < p.head_dim)
                q[c] = y[i];
        }
        return;
    }
    attn_append(p, y, GLOBAL(uint8_t, attn_row_at(p, row, head) + p.k_offset));
}

/* A wave: one head's value of a row. */
DEV void attn_keep_value(const struct attn_store_params &p, int row, int kv_head)
{
    const int lane = (int)lane_id();
    float y[ATTN_LANE_VALUES] = {};
    const float *v = p.v + ((size_t)row * (size_t)p.n_kv_heads + (size_t)kv_head) * (size_t)p.head_dim;
    for (int i = 0; 32 * i < p.head_dim; i++) {
        const int c = attn_opaque(32 * i + lane);
        y[i] = c < p.head_dim ? v[c] : 0.0f;
    }
    attn_append(p, y, GLOBAL(uint8_t, attn_row_at(p, row, kv_head) + p.v_offset));
}

/* A wave for each query head of each row, and for each KV head of each row. Grid [ceil(units / 4)]. */
KERNEL(128) attn_store(struct attn_store_params p)
{
    SHARED float room[ATTN_WAVES][ATTN_MAX_DIM];
    const int units = p.n_heads + p.n_kv_heads, unit = uniform_i((int)(bid_x() * ATTN_WAVES + (tid_x() >> 5)));
    if (unit >= units * p.step.n_rows)
        return;
    const int row = unit / units, head = unit % units;
    const bool is_key = head >= p.n_heads;
    attn_turn_head(p, row, is_key ? head - p.n_heads : head, is_key, room[tid_x() >> 5]);
    if (is_key)
        attn_keep_value(p, row, head - p.n_heads);
}

#endif
