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

#include "hip/kernels/tile.h"
#include "hip/kernels/tile_types.h"

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

/* ---- results ---- */

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

/* ---- kernels: y [n_rows][n_out] (+)= w * x; grid [row tiles][output tiles], so that the row tiles of one weight tile run together ---- */

template <class W> DEV void tile_kernel(struct tile_shared *shared, const struct tile_params *p)
{
    int first = (int)bid_x() * TILE_ROWS;
    struct tile_job job;
    tile_job_of(&job, p, first, TILE_ROWS, (int)bid_y() * TILE_OUT);
    tile<W, 1>(shared, &job, tile_all_rows{first}, tile_store{p->y, first, p->w.n_out, p->add});
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

#endif
