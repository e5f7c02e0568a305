/* hip/kernels/head.h: the best k of a row of logits, so that 248,320 of them need not be copied to the host to pick one.
 *
 * A logit and its id are one 64-bit key: the larger key is the better rank (higher logit, then lower id; -0 ranks as +0), as in engine/sampler.c.
 * Logits that are not finite and ids that are not usable have key 0 and count for nothing. top_part: every wave takes the best k of 1024 logits, one
 * after the other, and their share of the sum of e^logit; top_merge: one workgroup per row merges those lists, which are sorted. */
#ifndef BEDSIDE_HIP_KERNELS_HEAD_H
#define BEDSIDE_HIP_KERNELS_HEAD_H

#include "hip/kernels/act.h"
#include "hip/kernels/gpu.h"
#include "hip/kernels/params.h"
#include "hip/kernels/wave.h"

enum {
    TOP_THREADS = 256,
    TOP_WAVES = TOP_THREADS / 32,
    TOP_EACH = GPU_TOP_PART / 32,            /* logits of a lane */
    TOP_LISTS = GPU_TOP_PARTS / TOP_THREADS, /* lists of a thread of top_merge */
};

/* The order of floats as the order of integers; no finite value gives 0. */
DEV uint32_t rank_of(float logit)
{
    const uint32_t bits = (uint32_t)as_int(logit + 0.0f);
    return bits ^ (bits >> 31 ? 0xffffffffU : 0x80000000U);
}

DEV float logit_of(uint32_t rank)
{
    return as_float((int)(rank ^ (rank >> 31 ? 0x80000000U : 0xffffffffU)));
}

DEV uint64_t key_of(uint32_t rank, uint32_t id)
{
    return rank ? (uint64_t)rank << 32 | (0xffffffffU - id) : 0;
}

template <int MASK> DEV uint64_t larger_with(uint64_t key)
{
    const uint32_t low = (uint32_t)shfl_xor_i<MASK>((int)(uint32_t)key), high = (uint32_t)shfl_xor_i<MASK>((int)(uint32_t)(key >> 32));
    const uint64_t other = (uint64_t)high << 32 | low;
    return other > key ? other : key;
}

/* The largest key of a wave, in all lanes. */
DEV uint64_t largest_key(uint64_t key)
{
    key = larger_with<1>(key);
    key = larger_with<2>(key);
    key = larger_with<4>(key);
    key = larger_with<8>(key);
    return larger_with<16>(key);
}

#define TOP_NONE (-__builtin_inff())

KERNEL(256) top_part(struct top_params p)
{
    const int part = (int)bid_x() * TOP_WAVES + uniform_i((int)(tid_x() / 32)), lane = (int)lane_id();
    if (part >= p.parts)
        return;
    const size_t at = (size_t)bid_y() * (size_t)p.parts + (size_t)part;
    const float *logits = p.logits + (size_t)bid_y() * (size_t)p.n_vocab;
    uint32_t rank[TOP_EACH];
    uint32_t best = 0;
    UNROLL
    for (int j = 0; j < TOP_EACH; j++) {
        const int id = part * GPU_TOP_PART + j * 32 + lane;
        uint32_t one = 0;
        if (id < p.n_vocab && (!p.usable || (p.usable[id >> 5] >> (id & 31) & 1))) {
            const float v = logits[id];
            one = finite_bits((uint32_t)as_int(v)) ? rank_of(v) : 0;
        }
        rank[j] = one;
        best = larger_u(best, one);
    }
    const float max = largest_of_wave(best ? logit_of(best) : TOP_NONE);
    float sum = 0.0f;
    UNROLL
    for (int j = 0; j < TOP_EACH; j++)
        sum += rank[j] ? exp_f(logit_of(rank[j]) - max) : 0.0f;
    sum = sum_of_wave(sum);
    if (lane == 0) {
        p.part_max[at] = max;
        p.part_sum[at] = sum;
    }
    for (int i = 0; i < p.k; i++) {
        uint64_t mine = 0;
        UNROLL
        for (int j = 0; j < TOP_EACH; j++) /* ids grow with j: the first of equal ones stays */
        {
            const uint64_t key = key_of(rank[j], (uint32_t)(part * GPU_TOP_PART + j * 32 + lane));
            mine = key > mine ? key : mine;
        }
        const uint64_t top = largest_key(mine);
        if (lane == 0)
            p.keys[at * (size_t)p.k + (size_t)i] = top;
        const uint32_t id = 0xffffffffU - (uint32_t)top;
        UNROLL
        for (int j = 0; j < TOP_EACH; j++)
            rank[j] = id == (uint32_t)(part * GPU_TOP_PART + j * 32 + lane) ? 0 : rank[j];
    }
}

KERNEL(256) top_merge(struct top_params p)
{
    SHARED uint64_t wave_key[2][TOP_WAVES];
    SHARED float wave_max[TOP_WAVES], wave_sum[TOP_WAVES];
    const int t = (int)tid_x(), wave = t / 32;
    const size_t first = (size_t)bid_x() * (size_t)p.parts;
    struct gpu_top *out = p.out + bid_x();
    const uint64_t *list[TOP_LISTS];
    uint64_t head[TOP_LISTS];
    int used[TOP_LISTS];
    float max = TOP_NONE, sum = 0.0f;
    UNROLL
    for (int j = 0; j < TOP_LISTS; j++) {
        const int part = j * TOP_THREADS + t;
        list[j] = p.keys + (first + (size_t)part) * (size_t)p.k;
        used[j] = 0;
        head[j] = part < p.parts && p.k > 0 ? list[j][0] : 0;
        max = gpu_fmaxf(max, part < p.parts ? p.part_max[first + (size_t)part] : TOP_NONE);
    }
    max = largest_of_wave(max);
    if ((t & 31) == 0)
        wave_max[wave] = max;
    sync_threads();
    for (int w = 0; w < TOP_WAVES; w++)
        max = gpu_fmaxf(max, wave_max[w]);
    UNROLL
    for (int j = 0; j < TOP_LISTS; j++) {
        const int part = j * TOP_THREADS + t;
        const float of_part = part < p.parts ? p.part_max[first + (size_t)part] : TOP_NONE;
        if (of_part > TOP_NONE)
            sum = gpu_fmaf(p.part_sum[first + (size_t)part], exp_f(of_part - max), sum);
    }
    sum = sum_of_wave(sum);
    if ((t & 31) == 0)
        wave_sum[wave] = sum;
    int n = 0;
    for (; n < p.k; n++) {
        uint64_t mine = 0;
        UNROLL
        for (int j = 0; j < TOP_LISTS; j++)
            mine = head[j] > mine ? head[j] : mine;
        uint64_t top = largest_key(mine);
        if ((t & 31) == 0)
            wave_key[n & 1][wave] = top; /* two sets in turn: one barrier a round is enough */
        sync_threads();
        for (int w = 0; w < TOP_WAVES; w++)
            top = wave_key[n & 1][w] > top ? wave_key[n & 1][w] : top;
        if (top == 0) /* for all threads */
            break;
        UNROLL
        for (int j = 0; j < TOP_LISTS; j++) {
            if (head[j] != top)
                continue;
            out->top[n].id = (int32_t)(0xffffffffU - (uint32_t)top);
            out->top[n].logit = logit_of((uint32_t)(top >> 32));
            used[j]++;
            head[j] = used[j] < p.k ? list[j][used[j]] : 0;
        }
    }
    sync_threads();
    if (t != 0)
        return;
    for (int w = 1; w < TOP_WAVES; w++)
        sum += wave_sum[w];
    out->max = max;
    out->sum = sum;
    out->n = n;
    out->pad = 0;
}

#endif
