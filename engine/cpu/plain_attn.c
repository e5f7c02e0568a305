/* Full attention of the plain backend: spec/qwen35moe.md section 6. */
#include "engine/cpu/plain.h"

#include <stdlib.h>

/* Element `index` of an array of KV type. */
static double kv_get(enum kv_type type, const void *base, size_t index)
{
    if (type == KV_F16)
        return (double)f16_to_f32(((const uint16_t *)base)[index]);
    return (double)((const float *)base)[index];
}

static void kv_put(enum kv_type type, void *base, size_t index, double value)
{
    if (type == KV_F16)
        ((uint16_t *)base)[index] = f32_to_f16((float)value);
    else
        ((float *)base)[index] = (float)value;
}

/* Step 4: NeoX pairing inside the first n_rot channels, in place. */
static void rotate(double *x, const struct backend_shape *sh, int pos)
{
    const int half = sh->n_rot / 2;
    for (int j = 0; j < half; j++) {
        double angle = pos * pow((double)sh->rope_theta, -2.0 * j / sh->n_rot);
        double a = x[j], b = x[j + half];
        x[j] = a * cos(angle) - b * sin(angle);
        x[j + half] = a * sin(angle) + b * cos(angle);
    }
}

/* Steps 3 and 4 for one head of HD values: x -> y. */
static void norm_and_rotate(const struct backend_shape *sh, const float *x, const float *norm, int pos, double *y)
{
    const size_t hd = (size_t)sh->head_dim;
    for (size_t i = 0; i < hd; i++)
        y[i] = (double)x[i];
    plain_rms_norm(y, norm, hd, (double)sh->norm_eps, y);
    rotate(y, sh, pos);
}

static bool check_layer(struct plain *p, int layer)
{
    if (layer >= 0 && layer < p->base.shape.n_kv_layers)
        return true;
    store_fail(&p->store, "attention: KV layer %d is outside the model's %d", layer, p->base.shape.n_kv_layers);
    return false;
}

/* Floats of a query row: with gates each head is [HD query][HD gate]. */
static size_t query_stride(const struct backend_shape *sh)
{
    return (size_t)sh->head_dim * (sh->attn_gated ? 2 : 1);
}

/* Steps 3 to 5. k and v themselves are left as they were. */
void plain_attn_store(struct backend *b, int layer, struct buffer *q, struct buffer *k, struct buffer *v, struct weight *q_norm,
                      struct weight *k_norm)
{
    struct plain *p = plain_of(b);
    const struct store *s = &p->store;
    const struct backend_shape *sh = &b->shape;
    const size_t rows = (size_t)s->n_rows, hd = (size_t)sh->head_dim, nh = (size_t)sh->n_heads, nkv = (size_t)sh->n_kv_heads;
    const size_t q_head = query_stride(sh);
    if (!plain_ready(p) || !check_layer(p, layer) || !plain_has(p, "attn_store: q", q, rows, nh * q_head) ||
        !plain_has(p, "attn_store: k", k, rows, nkv * hd) || !plain_has(p, "attn_store: v", v, rows, nkv * hd) ||
        !plain_fits(p, "attn_store: q_norm", q_norm, sh->head_dim, 1, 1) || !plain_fits(p, "attn_store: k_norm", k_norm, sh->head_dim, 1, 1))
        return;
    float *qn = plain_vector(p, q_norm), *kn = plain_vector(p, k_norm);
    double *y = plain_alloc(p, hd, sizeof *y);
    if (!qn || !kn || !y)
        goto out;
    for (int i = 0; i < s->n_spans; i++) {
        const struct span *span = &s->spans[i];
        for (int t = 0; t < span->n; t++) {
            const size_t row = (size_t)(span->row + t);
            const int pos = span->pos + t;
            const int32_t page = span->pages[pos / GRID];
            const size_t at = (size_t)(pos % GRID) * hd;
            for (size_t h = 0; h < nh; h++) {
                float *x = q->data + (row * nh + h) * q_head;
                norm_and_rotate(sh, x, qn, pos, y);
                for (size_t c = 0; c < hd; c++)
                    x[c] = (float)y[c];
            }
            for (size_t h = 0; h < nkv; h++) {
                void *k_page = store_k(s, page, layer, (int)h), *v_page = store_v(s, page, layer, (int)h);
                norm_and_rotate(sh, k->data + (row * nkv + h) * hd, kn, pos, y);
                for (size_t c = 0; c < hd; c++) {
                    kv_put(sh->kv_type, k_page, at + c, y[c]);
                    kv_put(sh->kv_type, v_page, at + c, (double)v->data[(row * nkv + h) * hd + c]);
                }
            }
        }
    }
out:
    free(qn);
    free(kn);
    free(y);
}

/* Steps 6 and 7 for one query head at position pos: out [HD]. score is scratch [pos + 1]. */
static void mix_head(const struct store *s, int layer, const struct span *span, int pos, const float *q, int kv_head, double *score, float *out)
{
    const struct backend_shape *sh = s->shape;
    const size_t hd = (size_t)sh->head_dim;
    double largest = -INFINITY, sum = 0;
    for (int t = 0; t <= pos; t++) {
        const void *k = store_k(s, span->pages[t / GRID], layer, kv_head);
        double dot = 0;
        for (size_t c = 0; c < hd; c++)
            dot += (double)q[c] * kv_get(sh->kv_type, k, (size_t)(t % GRID) * hd + c);
        score[t] = dot * (double)sh->attn_scale;
        largest = fmax(largest, score[t]);
    }
    for (int t = 0; t <= pos; t++) {
        score[t] = exp(score[t] - largest);
        sum += score[t];
    }
    for (size_t c = 0; c < hd; c++) {
        double mixed = 0;
        for (int t = 0; t <= pos; t++)
            mixed += score[t] * kv_get(sh->kv_type, store_v(s, span->pages[t / GRID], layer, kv_head), (size_t)(t % GRID) * hd + c);
        mixed /= sum;
        if (sh->attn_gated)
            mixed *= plain_sigmoid((double)q[hd + c]);
        out[c] = (float)mixed;
    }
}

void plain_attn_mix(struct backend *b, int layer, struct buffer *q, struct buffer *out)
{
    struct plain *p = plain_of(b);
    const struct store *s = &p->store;
    const struct backend_shape *sh = &b->shape;
    const size_t rows = (size_t)s->n_rows, hd = (size_t)sh->head_dim, nh = (size_t)sh->n_heads;
    const int share = sh->n_kv_heads ? sh->n_heads / sh->n_kv_heads : 1; /* consecutive query heads share a KV head */
    if (!plain_ready(p) || !check_layer(p, layer) || !plain_has(p, "attn_mix: q", q, rows, nh * query_stride(sh)) ||
        !plain_has(p, "attn_mix: out", out, rows, nh * hd))
        return;
    for (int i = 0; i < s->n_spans; i++) {
        const struct span *span = &s->spans[i];
        double *score = plain_alloc(p, (size_t)(span->pos + span->n), sizeof *score);
        if (!score)
            return;
        for (int t = 0; t < span->n; t++)
            for (int h = 0; h < sh->n_heads; h++) {
                const size_t head = (size_t)(span->row + t) * nh + (size_t)h;
                mix_head(s, layer, span, span->pos + t, q->data + head * query_stride(sh), h / share, score, out->data + head * hd);
            }
        free(score);
    }
}
