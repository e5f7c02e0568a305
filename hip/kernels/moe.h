/* hip/kernels/moe.h: the mixture of experts, spec section 8: choosing experts, and their products for few rows (decode) and for many (prefill).
 *
 * Choosing is one wave for a row, sums in the order of experts as on the CPU. In decode each (row, rank) pair is a product of its own with the weights of
 * its expert, and one wave adds up all parts of its outputs; choosing, and quantising a block, is done by the last of the workgroups whose results it
 * needs (tail.h). In prefill the pairs are sorted by expert on the device; a table of tiles, as long as there can be
 * tiles at most, tells each workgroup its expert and rows, and workgroups beyond its end leave.
 *
 * Decode and prefill give the same bits: the products do (matvec.h, matmul.h), and the sum over parts is the same chain of fma, best expert first, then the
 * shared one. The order of pairs within an expert is open; nothing depends on it. */
#ifndef BEDSIDE_HIP_KERNELS_MOE_H
#define BEDSIDE_HIP_KERNELS_MOE_H

#include "hip/kernels/act.h"
#include "hip/kernels/gpu.h"
#include "hip/kernels/matmul.h"
#include "hip/kernels/matvec.h"
#include "hip/kernels/params.h"
#include "hip/kernels/tail.h"
#include "hip/kernels/tile_float.h"

enum { MOE_THREADS = 128, MOE_WAVES = MOE_THREADS / 32, SORT_THREADS = 256 };

/* ---- choosing ---- */

/* A larger number has a larger key; both zeros are equal, NaN is last. */
DEV uint32_t logit_key(float x)
{
    const uint32_t bits = (uint32_t)as_int(x + 0.0f);
    if ((bits & 0x7fffffffU) > 0x7f800000U)
        return 0;
    return bits >> 31 ? ~bits : bits | 0x80000000U;
}

struct best_logit {
    uint32_t key, expert;
};

DEV bool better(best_logit a, best_logit b)
{
    return a.key > b.key || (a.key == b.key && a.expert < b.expert);
}

template <int MASK> DEV best_logit best_of_two(best_logit a)
{
    const best_logit b = {(uint32_t)shfl_xor_i<MASK>((int)a.key), (uint32_t)shfl_xor_i<MASK>((int)a.expert)};
    return better(b, a) ? b : a;
}

/* One wave, for row r; v: room for n_experts floats of SHARED memory, on 16 bytes. */
DEV void choose_row(const struct moe_choose_params &p, int r, float *v)
{
    const int lane = (int)lane_id();
    const float *logits = p.logits + (size_t)(uint32_t)r * (uint32_t)p.n_experts;
    for (int e = lane; e < p.n_experts; e += 32)
        v[e] = logits[e];
    sync_wave();

    /* Lane l looks after experts l, l + 32, ...; bit i of `taken` is the i-th of them. Lane k keeps the k-th best. */
    uint32_t taken = 0;
    int mine = 0;
    for (int k = 0; k < p.used; k++) {
        best_logit best = {0, 0xffffffffU};
        for (int e = lane, i = 0; e < p.n_experts; e += 32, i++) {
            const best_logit it = {logit_key(v[e]), (uint32_t)e};
            if ((taken >> i & 1) == 0 && better(it, best))
                best = it;
        }
        best = best_of_two<16>(best);
        best = best_of_two<8>(best);
        best = best_of_two<4>(best);
        best = best_of_two<2>(best);
        best = best_of_two<1>(best);
        if ((int)(best.expert % 32) == lane)
            taken |= 1U << best.expert / 32;
        if (k == lane)
            mine = (int)best.expert;
    }

    const float most = v[shfl_i(mine, 0)];
    sync_wave(); /* all have read it */
    for (int e = lane; e < p.n_experts; e += 32)
        v[e] = exp_f(v[e] - most);
    sync_wave();
    float all = 0.0f;
    for (int e = 0; e < p.n_experts; e++) /* one after the other, as on the CPU */
        all += v[e];
    float share = v[mine] / all, sum = 0.0f;
    for (int k = 0; k < p.used; k++)
        sum += shfl_f(share, k);
    share /= gpu_fmaxf(sum, 0x1p-14f);

    float *factors = p.share + (size_t)(uint32_t)r * (uint32_t)(p.used + 1);
    if (lane < p.used) {
        const size_t at = (size_t)(uint32_t)r * (uint32_t)p.used + (uint32_t)lane;
        p.chosen[at] = mine;
        if (p.chosen_too)
            p.chosen_too[at] = mine;
        factors[lane] = share;
    }
    if (p.shared && lane == 0)
        factors[p.used] = 1.0f / (1.0f + exp_f(0.0f - atomic_load_f(p.shared + r)));
}

KERNEL(128) moe_choose(struct moe_choose_params p)
{
    SHARED __attribute__((aligned(16))) float values[MOE_WAVES][MOE_EXPERTS];
    const int wave = uniform_i((int)(tid_x() / 32)), r = (int)bid_x() * MOE_WAVES + wave;
    if (r < p.n_rows)
        choose_row(p, r, values[wave]);
}

/* ---- sorting pairs by expert ---- */

/* The thread looks after experts e0 .. e1-1. */
KERNEL(256) moe_sort(struct moe_sort_params p)
{
    SHARED int count[MOE_EXPERTS], place[MOE_EXPERTS];
    SHARED int pairs[2][SORT_THREADS], tiles[2][SORT_THREADS];
    const int t = (int)tid_x(), each = (p.n_experts + SORT_THREADS - 1) / SORT_THREADS;
    const int e0 = t * each < p.n_experts ? t * each : p.n_experts, e1 = e0 + each < p.n_experts ? e0 + each : p.n_experts;
    for (int e = e0; e < e1; e++)
        count[e] = 0;
    sync_threads();
    for (int i = t; i < p.n_pairs; i += SORT_THREADS)
        atomic_add_i(&count[p.chosen[i]], 1);
    sync_threads();

    /* Sums over the threads up to this one, in log2 steps. */
    int my_pairs = 0, my_tiles = 0, turn = 0;
    for (int e = e0; e < e1; e++) {
        my_pairs += count[e];
        my_tiles += (count[e] + TILE_ROWS - 1) / TILE_ROWS;
    }
    pairs[0][t] = my_pairs;
    tiles[0][t] = my_tiles;
    sync_threads();
    for (int step = 1; step < SORT_THREADS; step *= 2, turn ^= 1) {
        const int from = t - step;
        pairs[turn ^ 1][t] = pairs[turn][t] + (from >= 0 ? pairs[turn][from] : 0);
        tiles[turn ^ 1][t] = tiles[turn][t] + (from >= 0 ? tiles[turn][from] : 0);
        sync_threads();
    }

    int at = pairs[turn][t] - my_pairs, tile = tiles[turn][t] - my_tiles;
    for (int e = e0; e < e1; e++) {
        const int n = count[e];
        place[e] = at;
        for (int done = 0; done < n; done += TILE_ROWS)
            p.tiles[tile++] = {e, at + done, n - done < TILE_ROWS ? n - done : (int)TILE_ROWS, 0};
        at += n;
    }
    for (int i = tiles[turn][SORT_THREADS - 1] + t; i < p.n_tiles; i += SORT_THREADS)
        p.tiles[i] = {0, 0, 0, 0};
    sync_threads();
    for (int i = t; i < p.n_pairs; i += SORT_THREADS) {
        const int to = atomic_add_i(&place[p.chosen[i]], 1);
        p.row[to] = i / p.used;
        p.pair[to] = i;
    }
}

/* ---- decode ---- */

KERNEL(128) moe_route(struct moe_route_params p)
{
    SHARED __attribute__((aligned(16))) float values[MOE_EXPERTS];
    SHARED int said;
    matvec<1>(p.products);
    if (last_of(p.counter, p.groups, &said) && tid_x() < 32)
        choose_row(p.choose, 0, values);
}

/* dot_rows for one activation row. */
DEV float dot_one(const struct gpu_matrix &w, uint64_t mat, int row, int n_w, const uint8_t *x)
{
    const uint32_t x_at[1] = {0};
    float sum[1];
    dot_rows_any<1>(w.type, w.data + mat * w.mat_stride + (uint64_t)(uint32_t)row * w.row_stride, (uint32_t)w.row_stride, n_w, w.n_in, x, x_at, sum);
    return sum[0];
}

/* A wave: values at .. at+255 of SiLU(gate) * up [n] into their places of a row in the given form. The bits of the kernel `act`. */
DEV void mid_block(const float *gate, const float *up, int at, int n, int form, uint8_t *row)
{
    const int i = at + (int)lane_id() * ACT_EACH;
    const bool aligned = (n & 7) == 0;
    float v[ACT_EACH], by[ACT_EACH];
    load_values(v, gate, i, n, aligned);
    load_values(by, up, i, n, aligned);
    UNROLL for (int j = 0; j < ACT_EACH; j++) v[j] = i + j < n ? silu_f(v[j]) * by[j] : 0.0f;
    if (form == GPU_ACT_Q8_256)
        quantise_256(v, row + (uint32_t)at / 256 * ACT_256_BYTES);
    else if (form == GPU_ACT_Q8_32)
        quantise_32(v, row, at, n);
    else
        store_values(v, (float *)row, i, n, aligned);
}

KERNEL(128) moe_up(struct moe_up_params p)
{
    SHARED int said;
    const uint32_t rank = bid_x(), r = bid_y(), pair = r * (uint32_t)p.used + rank, group = bid_z();
    const int wave = uniform_i((int)(tid_x() / 32)), lane = (int)lane_id(), n_out = p.w[0].n_out;
    if (rank == (uint32_t)p.used) { /* the shared expert's row: its products are there already */
        const float *gate = p.shared_gate + (size_t)r * (uint32_t)p.shared_ff, *up = p.shared_up + (size_t)r * (uint32_t)p.shared_ff;
        for (int at = ((int)group * MOE_WAVES + wave) * 256; at < p.shared_ff; at += p.groups * MOE_WAVES * 256)
            mid_block(gate, up, at, p.shared_ff, p.mid_form[1], p.mid[1] + (size_t)r * p.mid_stride[1]);
        return;
    }
    float *gate = p.gate + (size_t)pair * (uint32_t)n_out, *up = p.up + (size_t)pair * (uint32_t)n_out;
    const int row = ((int)group * MOE_WAVES + wave) * MATVEC_W;
    if (row < n_out) {
        const uint64_t expert = (uint64_t)(uint32_t)uniform_i(p.chosen[pair]);
        const int n_w = n_out - row < MATVEC_W ? n_out - row : (int)MATVEC_W;
        TILE_LOOP
        for (int m = 0; m < 2; m++) {
            const uint8_t *x = (m ? p.x[1] : p.x[0]) + (uint64_t)r * (m ? p.x_stride[1] : p.x_stride[0]);
            const float sum = dot_one(m ? p.w[1] : p.w[0], expert, row, n_w, x);
            if (lane % 8 == 0 && lane / 8 < n_w)
                (m ? up : gate)[row + lane / 8] = sum;
        }
    }
    /* A block of 256 outputs is quantised by the last of its sixteen workgroups. */
    const int block = (int)group / 16, blocks = (p.groups + 15) / 16, members = p.groups - block * 16 < 16 ? p.groups - block * 16 : 16;
    if (last_of(p.counters + ((size_t)pair * (uint32_t)blocks + (uint32_t)block), members, &said) && tid_x() < 32)
        mid_block(gate, up, block * 256, n_out, p.mid_form[0], p.mid[0] + (size_t)pair * p.mid_stride[0]);
}

DEV void down_rows(const struct moe_down_params &p, uint32_t r)
{
    const int row = ((int)bid_y() * MOE_WAVES + uniform_i((int)(tid_x() / 32))) * MATVEC_W, n_out = p.w[0].n_out;
    if (row >= n_out)
        return;
    const int n_w = n_out - row < MATVEC_W ? n_out - row : (int)MATVEC_W, lane = (int)lane_id();
    const int32_t *chosen = p.chosen + (size_t)r * (uint32_t)p.used;
    const float *share = p.share + (size_t)r * (uint32_t)(p.used + 1);
    float sum = 0.0f;
    TILE_LOOP
    for (int k = 0; k < p.parts; k++) {
        const bool shared = k == p.used;
        const uint64_t expert = shared ? 0 : (uint64_t)(uint32_t)uniform_i(chosen[k]);
        const uint64_t x_row = shared ? r : r * (uint32_t)p.used + (uint32_t)k;
        const uint8_t *x = (shared ? p.mid[1] : p.mid[0]) + x_row * (shared ? p.mid_stride[1] : p.mid_stride[0]);
        sum = gpu_fmaf(share[k], dot_one(shared ? p.w[1] : p.w[0], expert, row, n_w, x), sum);
    }
    float *h = p.h + ((size_t)r * (uint32_t)n_out + (uint32_t)row);
    if (lane % 8 == 0 && lane / 8 < n_w)
        h[lane / 8] += sum;
}

KERNEL(128) moe_down(struct moe_down_params p)
{
    SHARED struct tail_shared shared;
    down_rows(p, bid_x());
    tail_of<MOE_WAVES>(read_again(p).tail, (int)bid_x(), 1, &shared);
}

/* ---- prefill ---- */

struct moe_place {
    const int32_t *row;
    int first;
    TILE_METHOD int operator()(int r) const
    {
        return row ? row[first + r] : first + r;
    }
};

struct moe_store {
    float *y;
    moe_place place;
    int n_out;
    bool pair;
    TILE_METHOD void operator()(int r, int o, float v0, float v1) const
    {
        y[(size_t)(uint32_t)place(r) * (uint32_t)n_out + (uint32_t)o] = pair ? silu_f(v0) * v1 : v0;
    }
};

DEV void moe_job_of(struct tile_job *job, const struct moe_tile_params *p, const struct gpu_moe_tile *tile, int o0)
{
    const uint64_t expert = (uint64_t)(uint32_t)tile->expert;
    for (int m = 0; m < 2; m++)
        job->w[m] = p->w[m].data + expert * p->w[m].mat_stride + (uint64_t)(uint32_t)o0 * p->w[m].row_stride;
    job->row_stride = (uint32_t)p->w[0].row_stride;
    job->n_in = p->w[0].n_in;
    job->o0 = o0;
    job->n_out = p->w[0].n_out;
    job->x = p->x;
    job->x_stride = p->x_stride;
    job->n_rows = tile->n;
}

/* Uniform, as the tile's loops want it. */
DEV struct gpu_moe_tile moe_tile_here(const struct moe_tile_params *p)
{
    const struct gpu_moe_tile t = p->tiles[bid_x()];
    return {uniform_i(t.expert), uniform_i(t.first), uniform_i(t.n), 0};
}

template <class W, int M> DEV void moe_tile(struct tile_shared *shared, const struct moe_tile_params *p)
{
    const struct gpu_moe_tile here = moe_tile_here(p);
    if (here.n == 0)
        return;
    struct tile_job job;
    moe_job_of(&job, p, &here, (int)bid_y() * TILE_OUT);
    tile<W, M>(shared, &job, moe_place{p->x_row, here.first}, moe_store{p->y, {p->y_row, here.first}, job.n_out, M == 2});
}

template <class W> DEV void moe_float_tile(const struct moe_tile_params *p)
{
    struct gpu_moe_tile here = moe_tile_here(p);
    struct tile_job job;
    TILE_LOOP
    for (int left = here.n; left > 0; left -= FLOAT_ROWS, here.first += FLOAT_ROWS) {
        here.n = tile_min(left, FLOAT_ROWS);
        moe_job_of(&job, p, &here, (int)bid_y() * FLOAT_OUT);
        float_tile<W>(&job, moe_place{p->x_row, here.first}, moe_store{p->y, {p->y_row, here.first}, job.n_out, false});
    }
}

#define MOE_TILE_KERNELS(type)                                                                                                                       \
    KERNEL(256) moe_rows_##type(struct moe_tile_params p)                                                                                            \
    {                                                                                                                                                \
        SHARED struct tile_shared shared;                                                                                                            \
        moe_tile<struct tile_##type, 1>(&shared, &p);                                                                                                \
    }                                                                                                                                                \
    KERNEL(256) moe_pair_##type(struct moe_tile_params p)                                                                                            \
    {                                                                                                                                                \
        SHARED struct tile_shared shared;                                                                                                            \
        moe_tile<struct tile_##type, 2>(&shared, &p);                                                                                                \
    }
MOE_TILE_KERNELS(q4_k)
MOE_TILE_KERNELS(q5_k)
MOE_TILE_KERNELS(q6_k)
MOE_TILE_KERNELS(q8_0)
MOE_TILE_KERNELS(q4_0)
#undef MOE_TILE_KERNELS

#define MOE_FLOAT_KERNEL(type)                                                                                                                       \
    KERNEL(256) moe_rows_##type(struct moe_tile_params p)                                                                                            \
    {                                                                                                                                                \
        moe_float_tile<struct tile_##type>(&p);                                                                                                      \
    }
MOE_FLOAT_KERNEL(f32)
MOE_FLOAT_KERNEL(f16)
MOE_FLOAT_KERNEL(bf16)
#undef MOE_FLOAT_KERNEL

KERNEL(256) moe_sum(struct moe_sum_params p)
{
    const size_t r = bid_x(), n = (uint32_t)p.n, used = (uint32_t)p.used;
    const float *out = p.out + r * used * n, *shared = p.shared ? p.shared + r * n : nullptr, *share = p.share + r * (used + 1);
    float *h = p.h + r * n;
    for (size_t o = tid_x(); o < n; o += 256) {
        float sum = 0.0f;
        for (size_t k = 0; k < used; k++)
            sum = gpu_fmaf(share[k], out[k * n + o], sum);
        if (shared)
            sum = gpu_fmaf(share[used], shared[o], sum);
        h[o] += sum;
    }
}

#endif
