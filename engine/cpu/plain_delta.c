/* Gated DeltaNet of the plain backend: spec/qwen35moe.md section 7, in the chunked form that engine/backend.h states. */
#include "engine/cpu/plain.h"

#include <stdlib.h>
#include <string.h>

/* The sizes of one layer. */
struct dims {
    size_t hk, hv, s, k_row, v_row, channels, taps;
};

static struct dims dims_of(const struct backend_shape *sh)
{
    struct dims d = {.hk = (size_t)sh->delta_k_heads, .hv = (size_t)sh->delta_v_heads, .s = (size_t)sh->delta_dim, .taps = (size_t)sh->conv_width};
    d.k_row = d.hk * d.s;
    d.v_row = d.hv * d.s;
    d.channels = 2 * d.k_row + d.v_row;
    return d;
}

static bool check_layer(struct plain *p, int layer)
{
    if (layer >= 0 && layer < p->base.shape.n_delta_layers)
        return true;
    store_fail(&p->store, "DeltaNet: layer %d is outside the model's %d", layer, p->base.shape.n_delta_layers);
    return false;
}

/* ---- steps 1 to 5 ---- */

static double softplus(double x)
{
    return x > 20 ? x : log1p(exp(x));
}

/* Step 2 for the row at position pos, whose raw u is already in the ring: y [CH] = SiLU(convolution). Tap K-1 meets the row itself. */
static void convolve(const struct dims *d, const float *ring_rows, int ring, int pos, const float *taps, double *y)
{
    const int width = (int)d->taps;
    for (size_t c = 0; c < d->channels; c++) {
        double sum = 0;
        for (int j = 0; j < width; j++) {
            int from = pos - (width - 1) + j;
            if (from >= 0)
                sum += (double)taps[c * d->taps + (size_t)j] * (double)ring_rows[(size_t)(from % ring) * d->channels + c];
        }
        y[c] = plain_silu(sum);
    }
}

/* Steps 4 and 5: x [S] / max(|x|, eps) * scale, in place. */
static void l2_norm(double *x, size_t n, double eps, double scale)
{
    double squares = 0;
    for (size_t i = 0; i < n; i++)
        squares += x[i] * x[i];
    double by = scale / fmax(sqrt(squares), eps);
    for (size_t i = 0; i < n; i++)
        x[i] *= by;
}

void plain_delta_conv(struct backend *b, int layer, struct buffer *u, struct buffer *beta_raw, struct buffer *alpha_raw, struct weight *conv,
                      struct weight *dt_bias, struct weight *a, struct buffer *qkv, struct buffer *gates)
{
    struct plain *p = plain_of(b);
    const struct store *s = &p->store;
    const struct backend_shape *sh = &b->shape;
    const struct dims d = dims_of(sh);
    const size_t rows = (size_t)s->n_rows;
    if (!plain_ready(p) || !check_layer(p, layer) || !plain_has(p, "delta_conv: u", u, rows, d.channels) ||
        !plain_has(p, "delta_conv: beta", beta_raw, rows, d.hv) || !plain_has(p, "delta_conv: alpha", alpha_raw, rows, d.hv) ||
        !plain_has(p, "delta_conv: qkv", qkv, rows, d.channels) || !plain_has(p, "delta_conv: gates", gates, rows, 2 * d.hv) ||
        !plain_fits(p, "delta_conv: conv", conv, sh->conv_width, (int64_t)d.channels, 1) ||
        !plain_fits(p, "delta_conv: dt_bias", dt_bias, sh->delta_v_heads, 1, 1) || !plain_fits(p, "delta_conv: a", a, sh->delta_v_heads, 1, 1))
        return;
    float *taps = plain_alloc(p, d.channels * d.taps, sizeof *taps), *bias = plain_vector(p, dt_bias), *rate = plain_vector(p, a);
    double *y = plain_alloc(p, d.channels, sizeof *y);
    if (!taps || !bias || !rate || !y)
        goto out;
    for (size_t c = 0; c < d.channels; c++)
        block_dequant(conv->desc.type, weight_row(conv, 0, (int64_t)c), taps + c * d.taps, d.taps);

    for (int i = 0; i < s->n_spans; i++) {
        const struct span *span = &s->spans[i];
        const struct delta_state state = store_delta(s, span->state, layer);
        for (int t = 0; t < span->n; t++) {
            const size_t row = (size_t)(span->row + t);
            const int pos = span->pos + t;
            memcpy(state.conv + (size_t)(pos % s->ring) * d.channels, u->data + row * d.channels, d.channels * sizeof(float));
            convolve(&d, state.conv, s->ring, pos, taps, y);
            for (size_t h = 0; h < d.hk; h++) {
                l2_norm(y + h * d.s, d.s, (double)sh->norm_eps, 1.0 / sqrt((double)d.s)); /* q */
                l2_norm(y + d.k_row + h * d.s, d.s, (double)sh->norm_eps, 1.0);           /* k */
            }
            for (size_t c = 0; c < d.channels; c++)
                qkv->data[row * d.channels + c] = (float)y[c];
            for (size_t h = 0; h < d.hv; h++) { /* step 1 */
                double beta = plain_sigmoid((double)beta_raw->data[row * d.hv + h]);
                double g = (double)rate[h] * softplus((double)alpha_raw->data[row * d.hv + h] + (double)bias[h]);
                gates->data[(row * 2 + 0) * d.hv + h] = (float)beta;
                gates->data[(row * 2 + 1) * d.hv + h] = (float)g;
            }
        }
    }
out:
    free(taps);
    free(bias);
    free(rate);
    free(y);
}

/* ---- steps 6 to 8 ---- */

/* One value head of one layer: where its numbers stand in the slot. Rows of the cell are t = 0 .. GRID-1. */
struct head {
    const struct dims *d;
    float *m; /* [S key][S value] */
    float *k, *u, *g;
    size_t key_head, head;
};

static const float *key(const struct head *h, int t)
{
    return h->k + (size_t)t * h->d->k_row + h->key_head * h->d->s;
}

static float *update(const struct head *h, int t)
{
    return h->u + (size_t)t * h->d->v_row + h->head * h->d->s;
}

/* G_t, and exp(G_t - G_s): the exponent is never positive. */
static double decay_sum(const struct head *h, int t)
{
    return (double)h->g[(size_t)t * h->d->hv + h->head];
}

static double decay(const struct head *h, int t, int s)
{
    return exp(decay_sum(h, t) - decay_sum(h, s));
}

static double dot(const float *x, const float *y, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += (double)x[i] * (double)y[i];
    return sum;
}

/* y [S] = scale * x M0. */
static void times_matrix(const struct head *h, const float *x, double scale, double *y)
{
    const size_t n = h->d->s;
    for (size_t j = 0; j < n; j++)
        y[j] = 0;
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < n; j++)
            y[j] += (double)x[i] * (double)h->m[i * n + j];
    for (size_t j = 0; j < n; j++)
        y[j] *= scale;
}

/* U_t = beta (v - e^{G_t} k_t M0 - sum_{s<t} (k_t.k_s) e^{G_t-G_s} U_s). Row t of k and G are in the slot. */
static void solve_row(const struct head *h, int t, double beta, const float *v, double *tmp)
{
    const size_t n = h->d->s;
    times_matrix(h, key(h, t), exp(decay_sum(h, t)), tmp);
    for (int s = 0; s < t; s++) {
        const double a = dot(key(h, t), key(h, s), n) * decay(h, t, s);
        for (size_t j = 0; j < n; j++)
            tmp[j] += a * (double)update(h, s)[j];
    }
    for (size_t j = 0; j < n; j++)
        update(h, t)[j] = (float)(beta * ((double)v[j] - tmp[j]));
}

/* o_t = e^{G_t} q M0 + sum_{s<=t} (q.k_s) e^{G_t-G_s} U_s. */
static void output_row(const struct head *h, int t, const float *q, double *o)
{
    const size_t n = h->d->s;
    times_matrix(h, q, exp(decay_sum(h, t)), o);
    for (int s = 0; s <= t; s++) {
        const double a = dot(q, key(h, s), n) * decay(h, t, s);
        for (size_t j = 0; j < n; j++)
            o[j] += a * (double)update(h, s)[j];
    }
}

/* The cell is full: M0 = e^{G} M0 + sum_t e^{G-G_t} k_t^T U_t with G of the last row. The rows since the grid line are then none. */
static void fold_cell(const struct head *h, double *tmp)
{
    const size_t n = h->d->s;
    const int last = GRID - 1;
    for (size_t i = 0; i < n; i++) {
        for (size_t j = 0; j < n; j++)
            tmp[j] = exp(decay_sum(h, last)) * (double)h->m[i * n + j];
        for (int t = 0; t < GRID; t++) {
            const double a = decay(h, last, t) * (double)key(h, t)[i];
            for (size_t j = 0; j < n; j++)
                tmp[j] += a * (double)update(h, t)[j];
        }
        for (size_t j = 0; j < n; j++)
            h->m[i * n + j] = (float)tmp[j];
    }
}

/* One row of one sequence, all heads. Everything of earlier rows is taken from the slot, where it is f32: a row cannot tell whether they belonged
 * to this step or to an earlier one. */
static void rule_row(const struct backend_shape *sh, const struct dims *d, const struct delta_state *state, int pos, const float *qkv,
                     const float *gates, const float *z, const float *norm, double *tmp, float *out)
{
    const int t = pos % GRID;
    const float *q = qkv, *k = qkv + d->k_row, *v = qkv + 2 * d->k_row, *beta = gates, *g = gates + d->hv;
    memcpy(state->k + (size_t)t * d->k_row, k, d->k_row * sizeof *k);
    for (size_t i = 0; i < d->hv; i++) {
        const struct head h = {d, state->m + i * d->s * d->s, state->k, state->u, state->g, i % d->hk, i}; /* step 6 */
        const double before = t ? decay_sum(&h, t - 1) : 0;
        state->g[(size_t)t * d->hv + i] = (float)(before + (double)g[i]);
        solve_row(&h, t, (double)beta[i], v + i * d->s, tmp);
        output_row(&h, t, q + h.key_head * d->s, tmp);
        plain_rms_norm(tmp, norm, d->s, (double)sh->norm_eps, tmp); /* step 8: norm first, gate after */
        for (size_t j = 0; j < d->s; j++)
            out[i * d->s + j] = (float)(tmp[j] * plain_silu((double)z[i * d->s + j]));
        if (t == GRID - 1)
            fold_cell(&h, tmp);
    }
}

void plain_delta_rule(struct backend *b, int layer, struct buffer *qkv, struct buffer *gates, struct buffer *z, struct weight *norm,
                      struct buffer *out)
{
    struct plain *p = plain_of(b);
    const struct store *s = &p->store;
    const struct dims d = dims_of(&b->shape);
    const size_t rows = (size_t)s->n_rows;
    if (!plain_ready(p) || !check_layer(p, layer) || !plain_has(p, "delta_rule: qkv", qkv, rows, d.channels) ||
        !plain_has(p, "delta_rule: gates", gates, rows, 2 * d.hv) || !plain_has(p, "delta_rule: z", z, rows, d.v_row) ||
        !plain_has(p, "delta_rule: out", out, rows, d.v_row) || !plain_fits(p, "delta_rule: norm", norm, b->shape.delta_dim, 1, 1))
        return;
    float *weight = plain_vector(p, norm);
    double *tmp = plain_alloc(p, d.s, sizeof *tmp);
    if (!weight || !tmp)
        goto out;
    for (int i = 0; i < s->n_spans; i++) {
        const struct span *span = &s->spans[i];
        const struct delta_state state = store_delta(s, span->state, layer);
        for (int t = 0; t < span->n; t++) {
            const size_t row = (size_t)(span->row + t);
            rule_row(&b->shape, &d, &state, span->pos + t, qkv->data + row * d.channels, gates->data + row * 2 * d.hv, z->data + row * d.v_row,
                     weight, tmp, out->data + row * d.v_row);
        }
    }
out:
    free(weight);
    free(tmp);
}
