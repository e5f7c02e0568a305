/* hip/kernels/tile_float.h: the products of prefill with float weights (F32, F16, BF16), on the vector units, in the order of engine/cpu/matmul.h.
 *
 * The CPU's sixteen partial sums (value i goes to partial i % 16, each by fma in order; then 8+8, 4+4, 2+2, 1+1) lie in four lanes, four neighbours in
 * each. A wave makes 8 outputs of 16 rows: lane = 4 * group + quarter, groups 0 and 1 of outputs times 0 to 3 of rows, and each lane 4 x 4 results. A workgroup
 * makes FLOAT_OUT outputs; its waves read the same rows, which the first level of cache holds. */
#ifndef BEDSIDE_HIP_KERNELS_TILE_FLOAT_H
#define BEDSIDE_HIP_KERNELS_TILE_FLOAT_H

#include "hip/kernels/tile.h"

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

/* ---- kernels: y [n_rows][n_out] (+)= w * x; grid as in matmul.h ---- */

template <class W> DEV void float_tile_kernel(const struct tile_params *p)
{
    int first = (int)bid_x() * FLOAT_ROWS;
    struct tile_job job;
    tile_job_of(&job, p, first, FLOAT_ROWS, (int)bid_y() * FLOAT_OUT);
    float_tile<W>(&job, tile_all_rows{first}, tile_store{p->y, first, p->w.n_out, p->add});
}

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
