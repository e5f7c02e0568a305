/* Full attention of the plain backend: spec/qwen35moe.md section 6. */
#include "engine/cpu/plain.h"

#include <stdlib.h>
#include <string.h>

/* Row t of one head's keys or values in a page, as floats [HD]. */
static void kv_get(const struct backend_shape *sh, const void *head, int t, float *x)
{
    const uint8_t *row = (const uint8_t *)head + (size_t)t * slot_kv_row_bytes(sh);
    block_dequant(slot_kv_format(sh), row, x, (size_t)sh->head_dim);
}

/* Where keys and values are rounded to their type. */
static void kv_put(const struct backend_shape *sh, const float *x, void *head, int t)
{
    const size_t hd = (size_t)sh->head_dim;
    uint8_t *row = (uint8_t *)head + (size_t)t * slot_kv_row_bytes(sh);
    switch (sh->kv_type) {
    case KV_F32:
        memcpy(row, x, hd * sizeof *x);
        break;
    case KV_F16:
        for (size_t c = 0; c < hd; c++) {
            const uint16_t half = f32_to_f16(x[c]);
            memcpy(row + c * sizeof half, &half, sizeof half);
        }
        break;
    case KV_Q8_0:
        block_quant_q8_0(x, hd, row);
        break;
    }
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

/* Steps 3 and 4 for one head of HD values: x -> y, which may be x. `room` is scratch [HD]. */
static void norm_and_rotate(const struct backend_shape *sh, const float *x, const float *norm, int pos, double *room, float *y)
{
    const size_t hd = (size_t)sh->head_dim;
    for (size_t i = 0; i < hd; i++)
        room[i] = (double)x[i];
    plain_rms_norm(room, norm, hd, (double)sh->norm_eps, room);
    rotate(room, sh, pos);
    for (size_t i = 0; i < hd; i++)
        y[i] = (float)room[i];
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
    double *room = plain_alloc(p, hd, sizeof *room);
    float *key = plain_alloc(p, hd, sizeof *key);
    if (!qn || !kn || !room || !key)
        goto out;
    for (int i = 0; i < s->n_spans; i++) {
        const struct span *span = &s->spans[i];
        for (int t = 0; t < span->n; t++) {
            const size_t row = (size_t)(span->row + t);
            const int pos = span->pos + t;
            const int32_t page = span->pages[pos / GRID];
            for (size_t h = 0; h < nh; h++) {
                float *x = q->data + (row * nh + h) * q_head;
                norm_and_rotate(sh, x, qn, pos, room, x);
            }
            for (size_t h = 0; h < nkv; h++) {
                norm_and_rotate(sh, k->data + (row * nkv + h) * hd, kn, pos, room, key);
                kv_put(sh, key, store_k(s, page, layer, (int)h), pos % GRID);
                kv_put(sh, v->data + (row * nkv + h) * hd, store_v(s, page, layer, (int)h), pos % GRID);
            }
        }
    }
out:
    free(qn);
    free(kn);
    free(room);
    free(key);
}

/* Scratch of one query head. */
struct mix {
    double *score; /* [pos + 1] */
    double *sum;   /* [HD] */
    float *row;    /* [HD], a key or value as it was stored */
};

static bool mix_open(struct plain *p, struct mix *m, int n_tokens)
{
    const size_t hd = (size_t)p->base.shape.head_dim;
    m->score = plain_alloc(p, (size_t)n_tokens, sizeof *m->score);
    m->sum = plain_alloc(p, hd, sizeof *m->sum);
    m->row = plain_alloc(p, hd, sizeof *m->row);
    return m->score && m->sum && m->row;
}

static void mix_close(struct mix *m)
{
    free(m->score);
    free(m->sum);
    free(m->row);
}

/* Steps 6 and 7 for one query head at position pos: out [HD]. */
static void mix_head(const struct store *s, int layer, const struct span *span, int pos, const float *q, int kv_head, const struct mix *m, float *out)
{
    const struct backend_shape *sh = s->shape;
    const size_t hd = (size_t)sh->head_dim;
    double largest = -INFINITY, total = 0;
    for (int t = 0; t <= pos; t++) {
        double dot = 0;
        kv_get(sh, store_k(s, span->pages[t / GRID], layer, kv_head), t % GRID, m->row);
        for (size_t c = 0; c < hd; c++)
            dot += (double)q[c] * (double)m->row[c];
        m->score[t] = dot * (double)sh->attn_scale;
        largest = fmax(largest, m->score[t]);
    }
    for (int t = 0; t <= pos; t++) {
        m->score[t] = exp(m->score[t] - largest);
        total += m->score[t];
    }
    memset(m->sum, 0, hd * sizeof *m->sum);
    for (int t = 0; t <= pos; t++) {
        kv_get(sh, store_v(s, span->pages[t / GRID], layer, kv_head), t % GRID, m->row);
        for (size_t c = 0; c < hd; c++)
            m->sum[c] += m->score[t] * (double)m->row[c];
    }
    for (size_t c = 0; c < hd; c++) {
        double mixed = m->sum[c] / total;
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
        struct mix m;
        const bool ready = mix_open(p, &m, span->pos + span->n);
        for (int t = 0; ready && t < span->n; t++)
            for (int h = 0; h < sh->n_heads; h++) {
                const size_t head = (size_t)(span->row + t) * nh + (size_t)h;
                mix_head(s, layer, span, span->pos + t, q->data + head * query_stride(sh), h / share, &m, out->data + head * hd);
            }
        mix_close(&m);
        if (!ready)
            return;
    }
}
