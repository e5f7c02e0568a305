/* engine/cpu/plain.h: what the files of the plain backend share (plain.c, plain_attn.c, plain_delta.c, plain_moe.c). Private to them.
 *
 * Every operation is a loop in double precision that reads like its section of spec/qwen35moe.md. Weights are dequantised a row at a time; only
 * what the interface stores (activations, KV, DeltaNet state) is rounded to f32 or f16. A row's sums run over the inner index in ascending
 * order whatever the number of rows, which is what makes rows independent bit for bit. */
#ifndef BEDSIDE_ENGINE_CPU_PLAIN_H
#define BEDSIDE_ENGINE_CPU_PLAIN_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/backend.h"
#include "engine/cpu/store.h"

struct plain {
    struct backend base; /* first: a struct backend * is a struct plain * */
    struct store store;
};

static inline struct plain *plain_of(struct backend *b)
{
    return (struct plain *)b;
}

static inline double plain_sigmoid(double x)
{
    return 1.0 / (1.0 + exp(-x));
}

static inline double plain_silu(double x)
{
    return x * plain_sigmoid(x);
}

/* True when an operation has something to do: a step is in progress and nothing has failed. */
bool plain_ready(const struct plain *p);

/* True when buf holds [rows][columns] floats. Otherwise the sticky error names `what`. */
bool plain_has(struct plain *p, const char *what, const struct buffer *buf, size_t rows, size_t columns);

/* True when w is n_mats matrices [n_out][n_in]. Otherwise the sticky error names `what`. */
bool plain_fits(struct plain *p, const char *what, const struct weight *w, int64_t n_in, int64_t n_out, int64_t n_mats);

/* n zeroed elements of `size` bytes, released with free(). NULL sets the sticky error. */
void *plain_alloc(struct plain *p, size_t n, size_t size);

/* Row 0 of w as floats [n_in], released with free(): norms, biases, per-head vectors. NULL sets the sticky error. */
float *plain_vector(struct plain *p, const struct weight *w);

/* y[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i], i < n. Section 4. */
void plain_rms_norm(const double *x, const float *weight, size_t n, double eps, double *y);

/* RMSNorm of every row of x [n_rows][n_in(norm)], as doubles, released with free(). NULL sets the sticky error. */
double *plain_norm_rows(struct plain *p, const float *x, size_t n_rows, const struct weight *norm);

/* y[r][o] = sum_i W[mat][o][i] x[r][i] for x [n_rows][n_in], y [n_rows][n_out]. 0, or -1 with the sticky error set. */
int plain_matmul(struct plain *p, const struct weight *w, int64_t mat, const double *x, size_t n_rows, double *y);

/* y [n_rows][n_out(down)] = down(SiLU(gate x) * up x) with matrix `mat` of each weight; x [n_rows][n_in(gate)]. Section 8. 0 or -1. */
int plain_swiglu(struct plain *p, const struct weight *gate, const struct weight *up, const struct weight *down, int64_t mat, const double *x,
                 size_t n_rows, double *y);

/* Operations of struct backend_ops that live in the other files. */
void plain_attn_store(struct backend *b, int layer, struct buffer *q, struct buffer *k, struct buffer *v, struct weight *q_norm,
                      struct weight *k_norm);
void plain_attn_mix(struct backend *b, int layer, struct buffer *q, struct buffer *out);
void plain_delta_conv(struct backend *b, int layer, struct buffer *u, struct buffer *beta_raw, struct buffer *alpha_raw, struct weight *conv,
                      struct weight *dt_bias, struct weight *a, struct buffer *qkv, struct buffer *gates);
void plain_delta_rule(struct backend *b, int layer, struct buffer *qkv, struct buffer *gates, struct buffer *z, struct weight *norm,
                      struct buffer *out);
void plain_moe(struct backend *b, struct buffer *h, struct weight *norm, const struct moe_weights *w, struct buffer *chosen);

#endif
