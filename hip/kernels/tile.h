/* hip/kernels/tile.h: what the tiled products share (matmul.h, tile_types.h, tile_float.h): what a workgroup multiplies, the activations' buffers in SHARED memory
 * and how a wave reads its WMMA operands from them, where rows come from and results go. matmul.h tells how the work lies. */
#ifndef BEDSIDE_HIP_KERNELS_TILE_H
#define BEDSIDE_HIP_KERNELS_TILE_H

#include "hip/kernels/gpu.h"
#include "hip/kernels/params.h"

enum { TILE_K = 256, TILE_PITCH = TILE_ROWS + 1 };

/* A member function with `this`; DEV makes static ones. */
#if defined(__AMDGCN__)
#define TILE_METHOD inline __attribute__((device, always_inline))
#else
#define TILE_METHOD inline
#endif

/* At most 192 registers: five waves on each SIMD of gfx1150 and gfx1152. The number per kernel is what makes the compiler get by without spilling. */
#if defined(__AMDGCN__)
#define TILE_REGISTERS(n) __attribute__((amdgpu_num_vgpr(n)))
#else
#define TILE_REGISTERS(n)
#endif

#if defined(__clang__)
#define TILE_UNROLL _Pragma("unroll")
#define TILE_LOOP   _Pragma("clang loop unroll(disable)")
#else
#define TILE_UNROLL
#define TILE_LOOP
#endif

/* Keeps the loads before it where they are: early. */
DEV void tile_issue_loads()
{
#if defined(__AMDGCN__)
    __builtin_amdgcn_sched_barrier(0);
#endif
}

/* After every tile of a sub-block: the sums are made now, and SHARED memory is not read further ahead. Otherwise the compiler reads the operands of a
 * whole block first, which takes more registers than there are. The waits that this leaves are filled by the other waves. */
template <class T> DEV void tile_settle(T &sums)
{
#if defined(__AMDGCN__)
    __asm__ volatile("" : "+v"(sums));
#else
    (void)sums;
#endif
}

/* One buffer of activations: 256 values of TILE_ROWS rows. */
struct tile_buffer {
    i32x4_t q[TILE_K / 16][TILE_PITCH];
    union {
        i32x4_t sums[2][TILE_PITCH];       /* act_256: sum32 of 8 sub-blocks as f16, low parts and high parts */
        float d32[TILE_K / 32][TILE_ROWS]; /* act_32: d by sub-block, rows by tile_slot */
    };
    float d[TILE_ROWS]; /* act_256: d, rows by tile_slot */
};

struct tile_shared {
    struct tile_buffer buffer[2];
};

/* What a workgroup multiplies. w[1] is used by kernels with two matrices. */
struct tile_job {
    const uint8_t *w[2]; /* weight row o0 of the matrix, the workgroup's first */
    uint32_t row_stride;
    int n_in, o0, n_out; /* n_out of the whole matrix */
    const uint8_t *x;    /* quantised rows */
    uint32_t x_stride;
    int n_rows; /* of this tile, 1 .. TILE_ROWS */
};

/* Where row r of a tile of 16 stands so that a lane's eight accumulator elements are neighbours. */
DEV int tile_slot(int r)
{
#if WMMA_AB_K == 16
    return (r & 1) * 8 + (r >> 1);
#else
    return r;
#endif
}

/* a + b * c for |b|, |c| < 2^23: one instruction, where a full 32-bit product would take many cycles. */
DEV int tile_mad(int a, int b, int c)
{
#if defined(__AMDGCN__)
    return (int)((uint32_t)b << 8) / 256 * ((int)((uint32_t)c << 8) / 256) + a;
#else
    return (int)((uint32_t)b * (uint32_t)c + (uint32_t)a);
#endif
}

DEV int tile_min(int a, int b)
{
    return a < b ? a : b;
}

/* ---- operands ----
 * In a group of 32 values each half of a gfx12 wave takes 16 neighbours for the two products, so that its loads are 16 bytes: the order of k does not
 * matter as long as A and B agree. In a group of 16 (one product, one scale) each half takes 8. */

DEV void operand_pair(const uint8_t *p, wmma_i8_t f[2]) /* p: 32 bytes of this lane's row */
{
#if WMMA_AB_K == 16
    f[0] = load_i32x4(p);
    f[1] = load_i32x4(p + 16);
#else
    i32x4_t v = load_i32x4(p + 2 * wmma_ab_k0());
    f[0] = (i32x2_t){v[0], v[1]};
    f[1] = (i32x2_t){v[2], v[3]};
#endif
}

DEV wmma_i8_t operand_one(const uint8_t *p) /* p: 16 bytes of this lane's row */
{
#if WMMA_AB_K == 16
    return load_i32x4(p);
#else
    return load_i32x2(p + wmma_ab_k0());
#endif
}

/* Rows 16t .. 16t+15 of the buffer, values 32j .. 32j+31. */
DEV void rows_pair(const struct tile_buffer *x, int t, int j, wmma_i8_t f[2])
{
    uint32_t row = (uint32_t)t * 16 + (lane_id() & 15);
#if WMMA_AB_K == 16
    f[0] = x->q[2 * j][row];
    f[1] = x->q[2 * j + 1][row];
#else
    i32x4_t v = x->q[2 * j + (lane_id() >> 4)][row];
    f[0] = (i32x2_t){v[0], v[1]};
    f[1] = (i32x2_t){v[2], v[3]};
#endif
}

/* Values 16k .. 16k+15. */
DEV wmma_i8_t rows_one(const struct tile_buffer *x, int t, int k)
{
    return operand_one((const uint8_t *)&x->q[k][(uint32_t)t * 16 + (lane_id() & 15)]);
}

DEV wmma_h_t rows_sums(const struct tile_buffer *x, int t)
{
    uint32_t row = (uint32_t)t * 16 + (lane_id() & 15);
#if WMMA_AB_K == 16
    half8_t low = load_half8(&x->sums[0][row]), high = load_half8(&x->sums[1][row]);
    wmma_h_t v;
    TILE_UNROLL
    for (int i = 0; i < 8; i++) {
        v[i] = low[i];
        v[8 + i] = high[i];
    }
    return v;
#else
    return load_half8(&x->sums[lane_id() >> 4][row]);
#endif
}

DEV void rows_d(const float *d, int t, float v[8]) /* of the lane's eight accumulator elements */
{
    const float *p = d + t * 16 + (lane_id() >> 4) * 8;
    f32x4_t a = load_f32x4(p), b = load_f32x4(p + 4);
    TILE_UNROLL
    for (int i = 0; i < 4; i++) {
        v[i] = a[i];
        v[4 + i] = b[i];
    }
}

/* ---- where rows come from and results go ---- */

/* Rows in the order of the step. */
struct tile_all_rows {
    int first;
    TILE_METHOD int operator()(int r) const
    {
        return first + r;
    }
};

/* To y [..][n_out], below 4 GiB. */
struct tile_store {
    float *y;
    int first, n_out, add;
    TILE_METHOD float *at(int r, int o) const
    {
        return (float *)((uint8_t *)y + ((uint32_t)(first + r) * (uint32_t)n_out + (uint32_t)o) * 4);
    }
    TILE_METHOD void operator()(int r, int o, float v, float) const
    {
        float *p = at(r, o);
        *p = add ? *p + v : v;
    }
};

/* Rows first .. of the step, outputs o0 .. of the matrix. */
DEV void tile_job_of(struct tile_job *job, const struct tile_params *p, int first, int max_rows, int o0)
{
    job->w[0] = job->w[1] = p->w.data + (uint64_t)(uint32_t)o0 * p->w.row_stride;
    job->row_stride = (uint32_t)p->w.row_stride;
    job->n_in = p->w.n_in;
    job->o0 = o0;
    job->n_out = p->w.n_out;
    job->x = p->x;
    job->x_stride = p->x_stride;
    job->n_rows = tile_min(max_rows, p->n_rows - first);
}

#endif
