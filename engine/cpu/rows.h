/* engine/cpu/rows.h: f32 work on activation rows, everything of a layer that is not a product with a weight matrix.
 *
 * One source text (rows_impl.h over rows_vec.h) is compiled per instruction set. Each function's arithmetic is defined over 16 lanes, down to the
 * order of every sum, so that the tables of all instruction sets give the same bits, and so that a result does not depend on how many rows are
 * given at once. The order is: a sum over i of a dot product goes to partial i % 16 by fma in order, the partials are added 8+8, 4+4, 2+2, 1+1; a
 * weighted sum of rows is one fma per row in order.
 *
 * exp here has an error below 2 ulp; below -86.5 it is 0 and above 88 it stays at e^88. Pointers need no alignment; n is any length >= 1. */
#ifndef BEDSIDE_ENGINE_CPU_ROWS_H
#define BEDSIDE_ENGINE_CPU_ROWS_H

#include <stddef.h>
#include <stdint.h>

#include "engine/cpu/matmul.h"

/* One page of attention for nq queries q [nq][n]: query i sees tokens 0 .. limit[i]-1 of k, v [GRID][n] (1 <= limit <= GRID; limits never fall), and
 * its running softmax, maximum m, sum s, weighted values acc [nq][n], takes them in. */
struct attn_page {
    const float *q;
    int nq, n;
    const void *k, *v; /* rows kept as `format`: BLOCK_F32, BLOCK_F16 or BLOCK_Q8_0 */
    enum block_type format;
    const int *limit;
    float scale;
    float *m, *s, *acc;
    const char *next_k, *next_v; /* the next page's rows, asked of memory while this one's are worked on; NULL if there is none */
    float *scores, *room;        /* scratch, [nq][GRID] and [GRID][n] */
};

struct rows_ops {
    void (*exp)(const float *x, int n, float *y);

    /* y = x / sqrt(mean(x^2) + eps) * w, spec section 4; y may be x. */
    void (*rms_norm)(const float *x, const float *w, float eps, int n, float *y);

    /* x = x / max(sqrt(sum x^2), eps) * scale, spec section 7 steps 4 and 5. */
    void (*l2_norm)(float *x, float eps, float scale, int n);

    /* y = SiLU(gate) * x; y may be gate or x. */
    void (*silu_mul)(const float *gate, const float *x, int n, float *y);

    void (*add)(float *y, const float *x, int n);           /* y += x */
    void (*axpy)(float *y, float a, const float *x, int n); /* y = fma(a, x, y) */

    /* Rotates pairs (x[j], x[j + half]) by the angles of cos [half] and sin [half], spec section 6 step 4. */
    void (*rope)(float *x, const float *cos, const float *sin, int half);

    void (*f16_load)(const uint16_t *x, int n, float *y);
    void (*f16_store)(const float *x, int n, uint16_t *y); /* nearest even */

    /* Q8_0 blocks, n a multiple of 32: the numbers of block_dequant and the bytes of block_quant_q8_0 (engine/blocks.h). */
    void (*q8_0_load)(const uint8_t *x, int n, float *y);
    void (*q8_0_store)(const float *x, int n, uint8_t *y);

    /* y = SiLU(sum over j < taps of w[j] * u[j]), rows of n; w [taps] rows ld_w apart. Spec section 7 step 2. */
    void (*conv_silu)(const float *const *u, const float *w, size_t ld_w, int taps, int n, float *y);

    /* out[i][j] = a[i] . b[j], i < na, j < nb, over n values; rows ld apart. */
    void (*dots)(const float *a, size_t ld_a, int na, const float *b, size_t ld_b, int nb, int n, float *out, size_t ld_out);

    /* y[r][j] = keep * y[r][j] + sum over i < n_in of x[r][i] * m[i][j], r < rows, j < n_out. keep 0: y is not read. */
    void (*gemm)(const float *x, size_t ld_x, int rows, int n_in, const float *m, size_t ld_m, int n_out, float *y, size_t ld_y, float keep);

    /* Factors of row t of a grid cell: with L = e^(sums[t] - sums[s]): to_u[s] = -beta * kk[s] * L for s < t, to_o[s] = qk[s] * L for s <= t.
     * kk, qk, sums, to_u, to_o have room for GRID values. Returns e^sums[t]. */
    float (*delta_factors)(const float *kk, const float *qk, const float *sums, int t, float beta, float *to_u, float *to_o);

    /* Row t of delta_rule (engine/backend.h): u = beta * (v - decay * km) + sum over s < t of to_u[s] * us[s], then o = decay * qm + sum over s <= t
     * of to_o[s] * us[s], where us[t] = u is written here; us rows ld_us apart, all rows n long. */
    void (*delta_row)(const float *v, const float *km, const float *qm, float beta, float decay, const float *to_u, const float *to_o, int t,
                      float *us, size_t ld_us, int n, float *o);

    void (*attn_page)(const struct attn_page *page);

    /* Adds a part's running softmax to a total of the same form. */
    void (*attn_merge)(float *m, float *s, float *acc, const float *part_m, const float *part_s, const float *part_acc, int nq, int n);

    /* out = acc / s, times sigmoid(gate) when gate is not NULL. */
    void (*attn_finish)(const float *acc, float s, const float *gate, int n, float *out);
};

extern const struct rows_ops rows_base;
#if defined(__x86_64__)
extern const struct rows_ops rows_avx2, rows_avx512;
#endif

/* The table of an instruction set. */
const struct rows_ops *rows_for(enum isa isa);

#endif
