/* hip/kernels/delta.h: the gated DeltaNet, spec/qwen35moe.md section 7 steps 6 to 8, in the chunked form that engine/backend.h states. Steps 1 to 5 are in
 * delta_conv.h.
 *
 * delta_rule: a workgroup has one value head of one span and works off the span's grid cells in order. Wave w owns rows 8w .. 8w+7 of the cell;
 * its lanes own four columns each of the head (of every 128 columns, should the head have more). In a cell:
 *   dots      k_t.k_s and q_t.k_s with their decay and beta, for the new rows t and all rows s up to t, into SHARED `coef`;
 *   products  k_t M0 and q_t M0 of the wave's new rows: one read of M0 for both and for all eight rows;
 *   stages    for each block of eight rows in order: its wave solves for U inside the block and publishes U, the waves after it take that off;
 *   fold      when the cell is full: M0 = e^G M0 + sum_t e^(G - G_t) k_t^T U_t.
 * One row of decode goes the same way as 64 of prefill. Each sum runs over the same terms in the same order whatever the rows beside it:
 *   products  i in order, one chain of fused multiply-adds;
 *   dots      four chains, chain l over i with i / 4 % 4 == l; then (0 + 1) + (2 + 3);
 *   stages    one chain for each block of eight s; then the chains in order, the row's own block last;
 *   fold      t in order, one chain.
 *
 * A row's k comes from the slot if the row is older than the step, else from qkv: the heads that share a key head do not wait for each other, and
 * none may write keys that another still reads. A span inside one cell writes rows that nobody reads (delta_rule does it), others go through
 * delta_keep.
 *
 * delta_step: the same, and steps 1 to 5 before it, of steps in which every span has one row: a launch less. A workgroup makes its own q, k, v and gates in SHARED
 * memory; the first value head of a key head keeps what it shares with others. Nobody reads what another workgroup writes: a row's place in the history is
 * none of those that the row reads.
 *
 * Cost with the 35B's heads, counted on the emulator for gfx1152: 64 rows of a cell are 3.4 million vector instructions (2.1 million of them dual),
 * 3300 cycles a row of eight compute units; one row of decode reads M0 once, at most eight rows of it ahead. */
#ifndef BEDSIDE_HIP_KERNELS_DELTA_H
#define BEDSIDE_HIP_KERNELS_DELTA_H

#include "hip/kernels/delta_conv.h"
#include "hip/kernels/gpu.h"
#include "hip/kernels/params.h"
#include "hip/kernels/tail.h"
#include "hip/kernels/wave.h"

enum {
    DELTA_WAVES = 8,
    DELTA_THREADS = 32 * DELTA_WAVES,
    DELTA_BLOCK = GPU_GRID / DELTA_WAVES, /* rows of a cell that a wave owns */
    DELTA_COEF = 68,                      /* row of coef: more than the cell, for the banks, and a multiple of 4 */
    DELTA_TURNED = 65,                    /* row of turned keys */
    DELTA_FEW = 8,                        /* so many new rows in a cell take their dots one by one */
    DELTA_PART = 4,                       /* rows whose q and k are in scalar registers at a time */
};

/* STEP: of delta_step, whose one row's q, k and v are here and not in memory. */
template <bool STEP> struct alignas(16) delta_shared {
    float coef[GPU_GRID * DELTA_COEF];
    float turned[32 * DELTA_TURNED];                      /* keys for the dots; then U of two blocks in turn */
    float done[(STEP ? 1 : DELTA_BLOCK) * DELTA_COLUMNS]; /* o of the block whose stage it is */
    float q[STEP ? DELTA_DIM : 4], k[STEP ? DELTA_DIM : 4], v[STEP ? DELTA_DIM : 4];
    float sums[GPU_GRID], beta[GPU_GRID], decay[GPU_GRID];
    float norm[DELTA_DIM];
};
static_assert(32 * DELTA_TURNED >= 2 * DELTA_BLOCK * DELTA_COLUMNS, "room for two blocks");

/* What stays in registers from one part of the kernel to the next: one value head of a span, rows t0 .. t0+n-1 of the cell in work, which are rows
 * row .. row+n-1 of the step, and the wave. Everything else is made again where it is used: scalar registers are few. */
struct delta_place {
    uint64_t state;
    int head, key_head, row, t0, n, wave;
};

/* The head's arrays and their steps. */
struct delta_cell {
    const float *qkv;     /* at the head's q of row 0; k is k_row floats further, v v_at */
    float *m, *k, *u, *g; /* the slot's, at this head */
    int v_at, channels, dim, k_row, v_row, v_heads, row, t0, n;
};

/* DIM: the heads' channels, or 0 when only p.dim tells. */
template <int DIM> DEV int delta_dim(const struct delta_rule_params &p)
{
    return DIM > 0 ? DIM : read_again(p).dim;
}

DEV struct gpu_span delta_span_of(const struct delta_rule_params &p)
{
    const struct gpu_span *spans = read_again(p).step.spans;
#ifdef BEDSIDE_GPU_SHIM
    return spans[bid_y()];
#else
    return *(const struct gpu_span *)((const __attribute__((address_space(4))) struct gpu_span *)(uint64_t)spans + bid_y());
#endif
}

template <int DIM> DEV struct delta_cell delta_cell_of(const struct delta_rule_params &params, const struct delta_place &place)
{
    const struct delta_rule_params &p = read_again(params);
    const int head = delta_fresh(place.head), key_head = delta_fresh(place.key_head);
    struct delta_cell cell;
    cell.dim = DIM > 0 ? DIM : p.dim;
    cell.k_row = p.k_heads * cell.dim;
    cell.v_row = p.v_heads * cell.dim;
    cell.channels = 2 * cell.k_row + cell.v_row;
    cell.v_heads = p.v_heads;
    cell.qkv = p.qkv + key_head * cell.dim;
    cell.v_at = 2 * cell.k_row + (head - key_head) * cell.dim;
    cell.m = GLOBAL(float, place.state + p.m_at) + head * cell.dim * cell.dim;
    cell.k = GLOBAL(float, place.state + p.k_at) + key_head * cell.dim;
    cell.u = GLOBAL(float, place.state + p.u_at) + head * cell.dim;
    cell.g = GLOBAL(float, place.state + p.g_at) + head;
    cell.row = place.row;
    cell.t0 = place.t0;
    cell.n = place.n;
    return cell;
}

DEV const float *cell_q(const struct delta_cell &cell, int t)
{
    return cell.qkv + (size_t)(cell.row + t - cell.t0) * (size_t)cell.channels;
}

/* The key of row t, new or old. */
DEV const float *cell_key(const struct delta_cell &cell, int t)
{
    return t < cell.t0 ? cell.k + (size_t)t * (size_t)cell.k_row : cell_q(cell, t) + cell.k_row;
}

/* The wave's block of rows, of which lo .. hi-1 are new; bit r of `kept` is set when row first + r is. */
struct delta_block {
    int first, lo, hi, kept;
};

DEV struct delta_block delta_block_of(const struct delta_place &place)
{
    const int first = delta_fresh(place.wave) * DELTA_BLOCK, lo = delta_max(first, place.t0), hi = delta_min(first + DELTA_BLOCK, place.t0 + place.n);
    return {first, lo, hi, lo < hi ? (1 << (hi - first)) - (1 << (lo - first)) : 0};
}

/* Where the block's q and k are: `q` is row lo's, `row[r]` how many bytes further row r's is. Rows that are not new are stood in for by the nearest
 * that is, so that there is something to read; what is made of them is not kept. */
struct delta_sources {
    const float *q;
    int k_row;
    uint32_t row[DELTA_BLOCK];
};

DEV struct delta_sources cell_sources(const struct delta_cell &cell, const struct delta_block &block)
{
    struct delta_sources from;
    from.q = cell_q(cell, block.lo);
    from.k_row = cell.k_row;
    for (int r = 0; r < DELTA_BLOCK; r++)
        from.row[r] = (uint32_t)delta_max(delta_min(block.first + r, block.hi - 1) - block.lo, 0) * (uint32_t)cell.channels * 4;
    return from;
}

/* The lane's four columns of the 128 from `start` on. Lanes beyond the head's columns repeat the first and keep nothing. */
struct delta_column {
    int lane, at;
    bool has;
};

DEV struct delta_column delta_column_of(int dim, int start)
{
    const int lane = delta_lane();
    const bool has = start + 4 * lane < dim;
    return {lane, has ? start + 4 * lane : 0, has};
}

/* Sums and betas of the cell's rows; the slot receives the new sums. STEP: g and beta of the row are there already. */
template <bool STEP>
DEV void cell_sums(const struct delta_rule_params &params, const struct delta_cell &cell, int head, struct delta_shared<STEP> &shared)
{
    const struct delta_rule_params &p = read_again(params);
    const int tid = delta_tid(), t = tid % GPU_GRID, end = cell.t0 + cell.n;
    const size_t of = (size_t)(cell.row + t - cell.t0) * 2 * (size_t)cell.v_heads + (size_t)head;
    if (tid < GPU_GRID && t < cell.t0)
        shared.sums[t] = cell.g[(size_t)t * (size_t)cell.v_heads];
    else if (!STEP && tid < GPU_GRID && t < end)
        shared.sums[t] = p.gates[of + (size_t)cell.v_heads];
    else if (!STEP && tid >= GPU_GRID && tid < 2 * GPU_GRID && t >= cell.t0 && t < end)
        shared.beta[t] = p.gates[of];
    sync_threads();
    if (tid == 0) {
        float sum = cell.t0 > 0 ? shared.sums[cell.t0 - 1] : 0.0f;
        for (int i = cell.t0; i < end; i++)
            shared.sums[i] = sum = sum + shared.sums[i];
    }
    sync_threads();
    if (tid >= cell.t0 && tid < end)
        cell.g[(size_t)t * (size_t)cell.v_heads] = shared.sums[t];
}

/* ---- dots ---- */

/* coef [t][s] = beta_t (k_t.k_s) e^(G_t - G_s) for s < t, and coef [s][t] = (q_t.k_s) e^(G_t - G_s) for s <= t. First the dots. */
DEV void cell_keep_dots(float *coef, int t, int s, float kk, float qk)
{
    if (s < t)
        coef[t * DELTA_COEF + s] = kk;
    if (s <= t)
        coef[s * DELTA_COEF + t] = qk;
}

/* Then what goes with them, by the lane that kept them. */
template <bool STEP> DEV void cell_decay_dots(struct delta_shared<STEP> &shared, int t, int s)
{
    if (s > t)
        return;
    const float decay = gpu_expf(shared.sums[t] - shared.sums[s]);
    if (s < t)
        shared.coef[t * DELTA_COEF + s] = shared.beta[t] * shared.coef[t * DELTA_COEF + s] * decay;
    shared.coef[s * DELTA_COEF + t] *= decay;
}

/* Few new rows: four lanes for each s, one for each of the four chains. */
template <bool STEP> DEV void cell_dots_few(const struct delta_cell &cell, int wave, struct delta_shared<STEP> &shared)
{
    const int tid = delta_tid(), s = tid >> 2, chain = tid & 3, steps = cell.dim / 16, end = cell.t0 + cell.n;
    /* STEP: the row's own key is in SHARED memory. */
    const float *ks = (STEP ? cell.k + delta_max(delta_min(s, cell.t0 - 1), 0) * cell.k_row : cell_key(cell, delta_min(s, end - 1))) + 4 * chain;
    DELTA_ROLLED for (int t = delta_max(cell.t0, DELTA_BLOCK * wave); t < end; t++)
    {
        const float *q = cell_q(cell, t), *k = q + cell.k_row;
        float kk = 0.0f, qk = 0.0f;
        DELTA_UNROLLED(8) for (int m = 0; m < steps; m++)
        {
            f32x4_t y = load_f32x4(ks + 16 * m), xk, xq;
            if constexpr (STEP) {
                xk = load_f32x4(shared.k + 16 * m + 4 * chain);
                xq = load_f32x4(shared.q + 16 * m + 4 * chain);
                y = s < cell.t0 ? y : xk;
            } else {
                xk = delta_load(k, 16 * m + 4 * chain);
                xq = delta_load(q, 16 * m + 4 * chain);
            }
            for (int e = 0; e < 4; e++) {
                kk = gpu_fmaf(xk[e], y[e], kk);
                qk = gpu_fmaf(xq[e], y[e], qk);
            }
        }
        kk += shfl_xor_f<1>(kk);
        qk += shfl_xor_f<1>(qk);
        kk += shfl_xor_f<2>(kk);
        qk += shfl_xor_f<2>(qk);
        if (chain == 0) {
            cell_keep_dots(shared.coef, t, s, kk, qk);
            cell_decay_dots(shared, t, s);
        }
    }
}

/* Chain `chain` of sixteens m0 .. m0+steps-1 of the keys of all rows of the cell, turned: [4 * steps][row], so that lanes can take a row each. */
DEV void cell_turn_keys(const struct delta_cell &cell, float *turned, int chain, int m0, int steps)
{
    DELTA_ROLLED for (int i = delta_tid(); i < 8 * GPU_GRID; i += DELTA_THREADS)
    {
        const int m = i & 7, s = i >> 3;
        if (m >= steps || s >= cell.t0 + cell.n)
            continue;
        const f32x4_t x = load_f32x4(cell_key(cell, s) + 16 * (m0 + m) + 4 * chain);
        for (int e = 0; e < 4; e++)
            turned[(4 * m + e) * DELTA_TURNED + s] = x[e];
    }
}

/* Dots of a wave's rows: a lane has s = lane and, in WIDE waves (whose rows lie beyond), s = lane + 32. */
struct delta_dots {
    float kk[DELTA_BLOCK][2], qk[DELTA_BLOCK][2];
};

template <bool WIDE> DEV void cell_dots_add(const struct delta_sources &from, const float *turned, int at, int steps, struct delta_dots &sum)
{
    const int lane = delta_lane();
    DELTA_ROLLED for (int m = 0; m < steps; m++)
    {
        float y[4][2];
        for (int e = 0; e < 4; e++) {
            y[e][0] = turned[(4 * m + e) * DELTA_TURNED + lane];
            y[e][1] = WIDE ? turned[(4 * m + e) * DELTA_TURNED + lane + 32] : 0.0f;
        }
        DELTA_UNROLLED() for (int part = 0; part < DELTA_BLOCK; part += DELTA_PART)
        {
            delta_apart();
            const float *q = delta_fresh(from.q + at + 16 * m), *k = delta_fresh(q + from.k_row);
            DELTA_UNROLLED() for (int r = part; r < part + DELTA_PART; r++)
            {
                const f32x4_t xq = delta_same_f32x4_at(q, from.row[r]), xk = delta_same_f32x4_at(k, from.row[r]);
                for (int e = 0; e < 4; e++)
                    for (int half = 0; half < (WIDE ? 2 : 1); half++) {
                        sum.kk[r][half] = gpu_fmaf(xk[e], y[e][half], sum.kk[r][half]);
                        sum.qk[r][half] = gpu_fmaf(xq[e], y[e][half], sum.qk[r][half]);
                    }
            }
        }
    }
}

/* Many new rows: a wave has its own rows t, a lane has one s or two. */
template <int DIM, bool WIDE>
DEV void cell_dots_many(const struct delta_rule_params &p, const struct delta_place &place, struct delta_shared<false> &shared)
{
    struct delta_dots total = {}, third = {};
    DELTA_ROLLED for (int chain = 0; chain < 4; chain++)
    {
        struct delta_dots sum = {};
        DELTA_ROLLED for (int m0 = 0; 16 * m0 < delta_dim<DIM>(p); m0 += 8)
        {
            const struct delta_cell cell = delta_cell_of<DIM>(p, place);
            const struct delta_block block = delta_block_of(place);
            const int steps = delta_min(cell.dim / 16 - m0, 8);
            sync_threads();
            cell_turn_keys(cell, shared.turned, chain, m0, steps);
            sync_threads();
            if (block.kept)
                cell_dots_add<WIDE>(cell_sources(cell, block), shared.turned, 16 * m0 + 4 * chain, steps, sum);
        }
        DELTA_UNROLLED() for (int r = 0; r < DELTA_BLOCK; r++) for (int half = 0; half < (WIDE ? 2 : 1); half++)
        {
            if (chain == 2) {
                third.kk[r][half] = sum.kk[r][half];
                third.qk[r][half] = sum.qk[r][half];
                continue;
            }
            const float kk = chain == 3 ? third.kk[r][half] + sum.kk[r][half] : sum.kk[r][half];
            const float qk = chain == 3 ? third.qk[r][half] + sum.qk[r][half] : sum.qk[r][half];
            total.kk[r][half] = chain == 0 ? kk : total.kk[r][half] + kk;
            total.qk[r][half] = chain == 0 ? qk : total.qk[r][half] + qk;
        }
    }
    const struct delta_block block = delta_block_of(place);
    const int lane = delta_lane();
    DELTA_UNROLLED()
    for (int r = 0; r < DELTA_BLOCK; r++)
        for (int half = 0; half < (WIDE ? 2 : 1); half++)
            if (block.kept >> r & 1)
                cell_keep_dots(shared.coef, block.first + r, lane + 32 * half, total.kk[r][half], total.qk[r][half]);
    DELTA_ROLLED for (int t = block.lo; t < block.hi; t++) for (int half = 0; half < (WIDE ? 2 : 1); half++)
        cell_decay_dots(shared, t, lane + 32 * half);
}

/* ---- products ---- */

/* What a wave has of its rows: before its stage U is beta_t (v_t - e^(G_t) k_t M0) less what earlier rows take off, then U_t; o the same of o_t. Rows
 * older than the step have their U from the slot. */
struct delta_rows {
    f32x4_t u[DELTA_BLOCK], o[DELTA_BLOCK];
};

/* km[r] = k M0 and qm[r] = q M0 of ROWS rows of the block (1: of row lo), at the lane's columns. The next DEPTH rows of M0 are on their way while
 * these are worked on. */
template <int ROWS, int DEPTH>
DEV void cell_products(const struct delta_cell &cell, int column, const struct delta_sources &from, f32x4_t *km, f32x4_t *qm)
{
    enum { PART = ROWS < DELTA_PART ? ROWS : DELTA_PART };
    const int dim = cell.dim;
    f32x4_t ahead[2][DEPTH];
    DELTA_UNROLLED() for (int r = 0; r < ROWS; r++) km[r] = qm[r] = f32x4_t{0.0f, 0.0f, 0.0f, 0.0f};
    DELTA_UNROLLED() for (int j = 0; j < DEPTH; j++) ahead[0][j] = delta_load(cell.m, j * dim + column);
    DELTA_ROLLED for (int i = 0; i < dim; i += 2 * DEPTH) DELTA_UNROLLED() for (int half = 0; half < 2; half++)
    {
        const int at = i + half * DEPTH, next = at + DEPTH < dim ? at + DEPTH : 0;
        DELTA_UNROLLED() for (int j = 0; j < DEPTH; j++) ahead[1 - half][j] = delta_load(cell.m + next * dim, j * dim + column);
        DELTA_UNROLLED() for (int j = 0; j < DEPTH; j += 4) DELTA_UNROLLED() for (int part = 0; part < ROWS; part += PART)
        {
            const float *q = delta_fresh(from.q + at + j), *k = delta_fresh(q + from.k_row);
            if (ROWS > 1)
                delta_apart();
            DELTA_UNROLLED() for (int r = part; r < part + PART; r++)
            {
                const uint32_t row = ROWS > 1 ? from.row[r] : 0;
                const f32x4_t xq = delta_same_f32x4_at(q, row), xk = delta_same_f32x4_at(k, row);
                for (int e = 0; e < 4; e++) {
                    km[r] = delta_fma(xk[e], ahead[half][j + e], km[r]);
                    qm[r] = delta_fma(xq[e], ahead[half][j + e], qm[r]);
                }
            }
        }
    }
}

/* The same of delta_step's row. */
DEV void cell_products_of_step(const struct delta_cell &cell, int column, const struct delta_shared<true> &shared, f32x4_t *km, f32x4_t *qm)
{
    enum { DEPTH = 8 };
    const int dim = cell.dim;
    f32x4_t ahead[2][DEPTH];
    km[0] = qm[0] = f32x4_t{0.0f, 0.0f, 0.0f, 0.0f};
    DELTA_UNROLLED() for (int j = 0; j < DEPTH; j++) ahead[0][j] = delta_load(cell.m, j * dim + column);
    DELTA_ROLLED for (int i = 0; i < dim; i += 2 * DEPTH) DELTA_UNROLLED() for (int half = 0; half < 2; half++)
    {
        const int at = i + half * DEPTH, next = at + DEPTH < dim ? at + DEPTH : 0;
        DELTA_UNROLLED() for (int j = 0; j < DEPTH; j++) ahead[1 - half][j] = delta_load(cell.m + next * dim, j * dim + column);
        DELTA_UNROLLED() for (int j = 0; j < DEPTH; j += 4)
        {
            const f32x4_t xq = load_f32x4(shared.q + at + j), xk = load_f32x4(shared.k + at + j);
            for (int e = 0; e < 4; e++) {
                km[0] = delta_fma(xk[e], ahead[half][j + e], km[0]);
                qm[0] = delta_fma(xq[e], ahead[half][j + e], qm[0]);
            }
        }
    }
}

/* The wave's rows before the stages. */
template <int DIM, bool STEP>
DEV void cell_begin_rows(const struct delta_rule_params &p, const struct delta_place &place, const struct delta_shared<STEP> &shared, int start,
                         struct delta_rows &rows)
{
    const struct delta_block has = delta_block_of(place);
    if constexpr (STEP) {
        if (has.kept) {
            const struct delta_cell cell = delta_cell_of<DIM>(p, place);
            cell_products_of_step(cell, delta_column_of(cell.dim, start).at, shared, rows.u, rows.o);
            DELTA_UNROLLED() for (int r = 1; r < DELTA_BLOCK; r++)
            {
                rows.u[r] = rows.u[0];
                rows.o[r] = rows.o[0];
            }
        }
    } else if (has.hi - has.lo == 1) {
        const struct delta_cell cell = delta_cell_of<DIM>(p, place);
        cell_products<1, 8>(cell, delta_column_of(cell.dim, start).at, cell_sources(cell, has), rows.u, rows.o);
        DELTA_UNROLLED() for (int r = 1; r < DELTA_BLOCK; r++)
        {
            rows.u[r] = rows.u[0];
            rows.o[r] = rows.o[0];
        }
    } else if (has.kept) {
        const struct delta_cell cell = delta_cell_of<DIM>(p, place);
        cell_products<DELTA_BLOCK, 4>(cell, delta_column_of(cell.dim, start).at, cell_sources(cell, has), rows.u, rows.o);
    }
    const struct delta_cell cell = delta_cell_of<DIM>(p, place);
    const struct delta_block block = delta_block_of(place);
    const int old = cell.t0 - block.first, column = delta_column_of(cell.dim, start).at;
    const float *u = cell.u + (size_t)block.first * (size_t)cell.v_row, *v = cell_q(cell, block.first) + cell.v_at;
    DELTA_UNROLLED() for (int r = 0; r < DELTA_BLOCK; r++)
    {
        if (r < old)
            rows.u[r] = delta_load(u, r * cell.v_row + column);
        if (!(block.kept >> r & 1))
            continue;
        f32x4_t x;
        if constexpr (STEP)
            x = load_f32x4(shared.v + column);
        else
            x = delta_load(v + (size_t)r * (size_t)cell.channels, column);
        const float grown = gpu_expf(shared.sums[block.first + r]), b = shared.beta[block.first + r];
        for (int c = 0; c < 4; c++) {
            rows.u[r][c] = b * gpu_fmaf(-grown, rows.u[r][c], x[c]);
            rows.o[r][c] = grown * rows.o[r][c];
        }
    }
}

/* ---- stages ---- */

/* The wave's own stage: U of its new rows from U of the rows before them in the block. */
DEV void cell_solve(const float *coef, const struct delta_block &block, struct delta_rows &rows)
{
    DELTA_UNROLLED() for (int r = 1; r < DELTA_BLOCK; r++)
    {
        if (!(block.kept >> r & 1))
            continue;
        const float *a = coef + (block.first + r) * DELTA_COEF + block.first;
        f32x4_t a4[2] = {load_f32x4(a)}, chain = {0.0f, 0.0f, 0.0f, 0.0f};
        if (r > 4)
            a4[1] = load_f32x4(a + 4);
        DELTA_UNROLLED() for (int s = 0; s < r; s++) chain = delta_fma(a4[s / 4][s % 4], rows.u[s], chain);
        rows.u[r] -= chain;
    }
}

/* U of the block for the waves that follow, and of the new rows for the slot. */
DEV void cell_publish(const struct delta_cell &cell, const struct delta_block &block, const struct delta_rows &rows, float *solved, int start)
{
    const struct delta_column column = delta_column_of(cell.dim, start);
    float *u = cell.u + (size_t)block.first * (size_t)cell.v_row;
    DELTA_UNROLLED() for (int r = 0; r < DELTA_BLOCK; r++)
    {
        store_f32x4(solved + r * DELTA_COLUMNS + 4 * column.lane, rows.u[r]);
        if ((block.kept >> r & 1) && column.has)
            delta_store(u, r * cell.v_row + column.at, rows.u[r]);
    }
}

/* What the eight rows of an earlier block (from `before` on, their U in `earlier`) take off the wave's new rows and give to their outputs. */
DEV void cell_absorb(const float *coef, const float *earlier, int before, const struct delta_block &block, struct delta_rows &rows)
{
    const int lane = delta_lane();
    f32x4_t u[DELTA_BLOCK];
    DELTA_UNROLLED() for (int s = 0; s < DELTA_BLOCK; s++) u[s] = load_f32x4(earlier + s * DELTA_COLUMNS + 4 * lane);
    DELTA_UNROLLED() for (int r = 0; r < DELTA_BLOCK; r++)
    {
        if (!(block.kept >> r & 1))
            continue;
        const float *a = coef + (block.first + r) * DELTA_COEF + before, *b = coef + before * DELTA_COEF + block.first + r;
        const f32x4_t a4[2] = {load_f32x4(a), load_f32x4(a + 4)};
        f32x4_t of_u = {0.0f, 0.0f, 0.0f, 0.0f}, of_o = {0.0f, 0.0f, 0.0f, 0.0f};
        DELTA_UNROLLED() for (int s = 0; s < DELTA_BLOCK; s++)
        {
            of_u = delta_fma(a4[s / 4][s % 4], u[s], of_u);
            of_o = delta_fma(b[s * DELTA_COEF], u[s], of_o);
        }
        rows.u[r] -= of_u;
        rows.o[r] += of_o;
    }
}

/* Four columns of step 8: the gate after the norm. */
DEV f32x4_t cell_gate(f32x4_t o, float scale, f32x4_t norm, f32x4_t z)
{
    f32x4_t y;
    for (int c = 0; c < 4; c++)
        y[c] = o[c] * scale * norm[c] * delta_silu(z[c]);
    return y;
}

/* o_t of the wave's new rows with what the rows of their own block give, themselves included; then step 8. Columns before the last 128 wait in `out`,
 * these in `done`; a lane fetches what it has put there itself. */
template <bool STEP>
DEV void cell_finish(const struct delta_rule_params &params, const struct delta_cell &cell, const struct delta_block &block, int head, int start,
                     struct delta_shared<STEP> &shared, const struct delta_rows &rows)
{
    const struct delta_rule_params &p = read_again(params);
    const struct delta_column column = delta_column_of(cell.dim, start);
    const int own = 4 * column.lane;
    const bool whole = start + DELTA_COLUMNS >= cell.dim;
    const size_t at = (size_t)(cell.row + block.lo - cell.t0) * (size_t)cell.v_row + (size_t)(head * cell.dim);
    float *y = p.out + at;
    const float *z = p.z + at;
    DELTA_UNROLLED() for (int r = 0; r < DELTA_BLOCK; r++)
    {
        if (!(block.kept >> r & 1))
            continue;
        f32x4_t o = {0.0f, 0.0f, 0.0f, 0.0f};
        DELTA_UNROLLED() for (int s = 0; s <= r; s++) o = delta_fma(shared.coef[(block.first + s) * DELTA_COEF + block.first + r], rows.u[s], o);
        o += rows.o[r];
        if (whole)
            store_f32x4(shared.done + (STEP ? 0 : r) * DELTA_COLUMNS + own, o);
        else
            delta_store(y, (block.first + r - block.lo) * cell.v_row + column.at, o);
    }
    DELTA_ROLLED for (int t = block.lo; t < block.hi && whole; t++, y += cell.v_row, z += cell.v_row)
    {
        const f32x4_t o = load_f32x4(shared.done + (STEP ? 0 : t - block.first) * DELTA_COLUMNS + own);
        f32x4_t before = {0.0f, 0.0f, 0.0f, 0.0f}; /* a head has 256 columns at most */
        float sum = 0.0f;
        if (start > 0) {
            before = delta_load(y, own);
            for (int c = 0; c < 4; c++)
                sum = gpu_fmaf(before[c], before[c], sum);
        }
        for (int c = 0; c < 4; c++)
            sum = column.has ? gpu_fmaf(o[c], o[c], sum) : sum;
        const float scale = 1.0f / gpu_sqrtf(sum_of_wave(sum) / (float)cell.dim + p.eps);
        if (start > 0)
            delta_store(y, own, cell_gate(before, scale, load_f32x4(shared.norm + own), delta_load(z, own)));
        if (column.has)
            delta_store(y, column.at, cell_gate(o, scale, load_f32x4(shared.norm + column.at), delta_load(z, column.at)));
    }
}

/* ---- fold ---- */

/* M0 = e^G M0 + sum_t e^(G - G_t) k_t^T U_t, sixteen rows of M0 a wave; the decays e^(G - G_t) are in SHARED memory. */
template <bool STEP> DEV void cell_fold(const struct delta_cell &cell, int wave, const struct delta_shared<STEP> &shared)
{
    enum { ROWS = 16 };
    const float keep = gpu_expf(shared.sums[GPU_GRID - 1]);
    DELTA_ROLLED for (int i = ROWS * wave; i < cell.dim; i += ROWS * DELTA_WAVES)
        DELTA_ROLLED for (int start = 0; start < cell.dim; start += DELTA_COLUMNS)
    {
        const struct delta_column column = delta_column_of(cell.dim, start);
        float *m = cell.m + i * cell.dim;
        f32x4_t sum[ROWS];
        if (!column.has)
            continue;
        DELTA_UNROLLED() for (int r = 0; r < ROWS; r++) sum[r] = keep * delta_load(m, r * cell.dim + column.at);
        const float *u = cell.u;
        f32x4_t next = delta_load(u, column.at);
        DELTA_ROLLED for (int t = 0, end = cell.t0; t < GPU_GRID; end = GPU_GRID)
        {                                           /* the old rows, then the new */
            const bool here = STEP && t >= cell.t0; /* in SHARED memory */
            const float *k = here ? cell.k : cell_key(cell, t) + i;
            const int step = t < cell.t0 ? cell.k_row : cell.channels;
            DELTA_ROLLED for (; t < end; t++, k += step)
            {
                const f32x4_t grown = shared.decay[t] * next;
                const float *x = delta_fresh(k);
                u += t + 1 < GPU_GRID ? cell.v_row : 0;
                next = delta_load(u, column.at);
                DELTA_UNROLLED() for (int r = 0; r < ROWS; r += 4)
                {
                    const f32x4_t x4 = here ? load_f32x4(shared.k + i + r) : delta_same_f32x4(x + r);
                    for (int e = 0; e < 4; e++)
                        sum[r + e] = delta_fma(x4[e], grown, sum[r + e]);
                }
            }
        }
        DELTA_UNROLLED() for (int r = 0; r < ROWS; r++) delta_store(m, r * cell.dim + column.at, sum[r]);
    }
}

/* ---- the kernels ---- */

/* One cell. */
template <int DIM, bool STEP>
DEV void delta_work(const struct delta_rule_params &p, const struct delta_place &place, struct delta_shared<STEP> &shared)
{
    const int last = (place.t0 + place.n - 1) / DELTA_BLOCK;
    sync_threads_global(); /* the cell before is done */
    cell_sums(p, delta_cell_of<DIM>(p, place), delta_fresh(place.head), shared);
    if constexpr (STEP) {
        cell_dots_few(delta_cell_of<DIM>(p, place), delta_fresh(place.wave), shared);
    } else {
        if (place.n <= DELTA_FEW)
            cell_dots_few(delta_cell_of<DIM>(p, place), delta_fresh(place.wave), shared);
        else if (delta_fresh(place.wave) >= DELTA_WAVES / 2)
            cell_dots_many<DIM, true>(p, place, shared);
        else
            cell_dots_many<DIM, false>(p, place, shared);
    }
    DELTA_ROLLED for (int start = 0; start < delta_dim<DIM>(p); start += DELTA_COLUMNS)
    {
        struct delta_rows rows = {};
        cell_begin_rows<DIM, STEP>(p, place, shared, start, rows);
        sync_threads(); /* coef is there, and `turned` is free */
        DELTA_ROLLED for (int b = 0; b <= last; b++)
        {
            float *solved = shared.turned + (b & 1) * DELTA_BLOCK * DELTA_COLUMNS;
            const struct delta_block block = delta_block_of(place);
            if (place.wave == b) {
                cell_solve(shared.coef, block, rows);
                cell_publish(delta_cell_of<DIM>(p, place), block, rows, solved, start);
            }
            sync_threads();
            if (place.wave > b)
                cell_absorb(shared.coef, solved, b * DELTA_BLOCK, block, rows);
            if (place.wave == b)
                cell_finish(p, delta_cell_of<DIM>(p, place), block, delta_fresh(place.head), start, shared, rows);
        }
    }
    if (place.t0 + place.n < GPU_GRID)
        return;
    const int t = delta_tid();
    if (t < GPU_GRID)
        shared.decay[t] = gpu_expf(shared.sums[GPU_GRID - 1] - shared.sums[t]);
    sync_threads_global(); /* U of all rows is in the slot */
    cell_fold(delta_cell_of<DIM>(p, place), delta_fresh(place.wave), shared);
}

DEV struct delta_place delta_place_here(const struct delta_rule_params &p)
{
    struct delta_place place = {};
    place.state = delta_span_of(p).state;
    place.head = (int)bid_x();
    place.key_head = place.head % p.k_heads;
    place.wave = uniform_i(delta_tid() >> 5);
    return place;
}

template <int DIM, bool STEP> DEV void delta_span(const struct delta_rule_params &p, struct delta_shared<STEP> &shared)
{
    struct delta_place place = delta_place_here(p);
    for (int i = delta_tid(); i < delta_dim<DIM>(p); i += DELTA_THREADS)
        shared.norm[i] = p.norm[i];
    DELTA_ROLLED for (int done = 0; done < delta_span_of(p).n; done += place.n)
    {
        const struct gpu_span span = delta_span_of(p);
        place.row = span.row + done;
        place.t0 = (span.pos + done) & (GPU_GRID - 1);
        place.n = delta_min(span.n - done, GPU_GRID - place.t0);
        delta_work<DIM, STEP>(p, place, shared);
    }
    if (place.head >= read_again(p).k_heads || !delta_in_one_cell(delta_span_of(p)))
        return;
    const struct delta_cell cell = delta_cell_of<DIM>(p, place);
    for (int r = delta_fresh(place.wave); r < place.n; r += DELTA_WAVES) /* the first head of each key head keeps the keys */
        for (int i = 4 * delta_lane(); i < cell.dim; i += DELTA_COLUMNS)
            if constexpr (STEP)
                delta_store(cell.k + (size_t)cell.t0 * (size_t)cell.k_row, i, load_f32x4(shared.k + i));
            else
                delta_store(cell.k + (size_t)(cell.t0 + r) * (size_t)cell.k_row, i, delta_load(cell_q(cell, cell.t0 + r) + cell.k_row, i));
}

/* Steps 1 to 5: q, k, v, beta and g of the span's row into SHARED memory, a wave for each. */
DEV void delta_begin_step(const struct delta_step_params &params, struct delta_shared<true> &shared)
{
    const struct delta_conv_params &p = read_again(params).conv;
    const struct delta_place place = delta_place_here(params.rule);
    const struct gpu_span span = delta_span_of(params.rule);
    const bool first = place.head < p.k_heads;
    if (place.wave == 0)
        conv_head<true>(p, span, place.key_head, 0, 1, shared.q, first);
    else if (place.wave == 1)
        conv_head<true>(p, span, p.k_heads + place.key_head, 0, 1, shared.k, first);
    else if (place.wave == 2)
        conv_head<true>(p, span, 2 * p.k_heads + place.head, 0, 1, shared.v, true);
    else if (place.wave == 3 && lane_id() == 0) {
        const f32x2_t gates = conv_gates(p, span.row, place.head);
        shared.beta[span.pos & (GPU_GRID - 1)] = gates[0];
        shared.sums[span.pos & (GPU_GRID - 1)] = gates[1];
    }
}

/* Grid [v_heads][spans]. */
KERNEL(DELTA_THREADS) delta_rule(struct delta_rule_params p)
{
    SHARED struct delta_shared<false> shared;
    SHARED struct tail_shared tail;
    delta_span<0, false>(p, shared);
    tail_of<DELTA_WAVES>(read_again(p).tail, 0, read_again(p).tail.rows, &tail);
}

KERNEL(DELTA_THREADS) delta_rule_128(struct delta_rule_params p)
{
    SHARED struct delta_shared<false> shared;
    SHARED struct tail_shared tail;
    delta_span<128, false>(p, shared);
    tail_of<DELTA_WAVES>(read_again(p).tail, 0, read_again(p).tail.rows, &tail);
}

KERNEL(DELTA_THREADS) delta_step(struct delta_step_params p)
{
    SHARED struct delta_shared<true> shared;
    SHARED struct tail_shared tail;
    delta_begin_step(p, shared);
    delta_span<0, true>(p.rule, shared);
    tail_of<DELTA_WAVES>(read_again(p).rule.tail, 0, read_again(p).rule.tail.rows, &tail);
}

KERNEL(DELTA_THREADS) delta_step_128(struct delta_step_params p)
{
    SHARED struct delta_shared<true> shared;
    SHARED struct tail_shared tail;
    delta_begin_step(p, shared);
    delta_span<128, true>(p.rule, shared);
    tail_of<DELTA_WAVES>(read_again(p).rule.tail, 0, read_again(p).rule.tail.rows, &tail);
}

/* The keys of a span's last cell, when that is not its first, after all heads are done. Grid [GPU_GRID][spans]. */
KERNEL(DELTA_THREADS) delta_keep(struct delta_rule_params p)
{
    const struct gpu_span span = p.step.spans[bid_y()];
    const int t = (int)bid_x(), n = (span.pos + span.n) & (GPU_GRID - 1), k_row = p.k_heads * p.dim;
    if (t >= n || delta_in_one_cell(span))
        return;
    const float *from = p.qkv + (size_t)(span.row + span.n - n + t) * (size_t)(2 * k_row + p.v_heads * p.dim) + k_row;
    float *to = GLOBAL(float, span.state + p.k_at) + (size_t)t * (size_t)k_row;
    for (int i = 4 * (int)tid_x(); i < k_row; i += 4 * DELTA_THREADS)
        store_f32x4(to + i, load_f32x4(from + i));
}

#endif
