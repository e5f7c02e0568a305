#include "engine/forward.h"

#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"

/* The activation buffers, by number of f32 values in a row. */
enum {
    BUF_H,        /* residual stream [D] */
    BUF_Q,        /* attention: queries, with their gates [NH][HD or 2*HD] */
    BUF_K,        /* [NKV][HD] */
    BUF_V,        /* [NKV][HD] */
    BUF_U,        /* DeltaNet: raw q, k, v [CH] */
    BUF_Z,        /* output gate [HV][S] */
    BUF_BETA,     /* raw [HV] */
    BUF_ALPHA,    /* raw [HV] */
    BUF_QKV,      /* after convolution and norm [CH] */
    BUF_GATES,    /* [2][HV] */
    BUF_MIX,      /* a mixer's output before its last projection */
    BUF_CHOSEN,   /* experts [used], int32 */
    BUF_LOGITS,   /* [V], max_logit_rows rows */
    BUF_HIDDEN,   /* draft block: trunk rows after the final norm [D] */
    BUF_SHIFTED,  /* the same one position later: what goes with each row's token [D] */
    BUF_EMBEDDED, /* token embeddings [D] */
    BUF_USABLE,   /* ids that count among the best, a bit each; one row */
    BUF_TOP,      /* struct top_row, max_logit_rows rows */
    N_BUFS,
};

struct forward {
    const struct model *m;
    struct backend *b;
    bool mtp;
    struct buffer *bufs[N_BUFS];
    float *hidden, *shifted; /* host copies [max_rows][D] */
    float *logits;           /* host copy [max_logit_rows][V] */
    struct top_row *tops;    /* host copy [max_logit_rows] */
};

/* Bytes of buffer i; 0 when this model does not need it. */
static size_t buffer_bytes(const struct backend_shape *s, bool mtp, int i)
{
    size_t d = (size_t)s->n_embd, hd = (size_t)s->head_dim, kv = (size_t)s->n_kv_heads * hd, mix = (size_t)s->n_heads * hd;
    size_t hv = (size_t)s->delta_v_heads, inner = hv * (size_t)s->delta_dim, ch = 2 * (size_t)s->delta_k_heads * (size_t)s->delta_dim + inner;
    size_t row = 0, rows = (size_t)s->max_rows;
    switch (i) {
    case BUF_H:
        row = d;
        break;
    case BUF_Q:
        row = s->attn_gated ? 2 * mix : mix;
        break;
    case BUF_K:
    case BUF_V:
        row = kv;
        break;
    case BUF_U:
    case BUF_QKV:
        row = ch;
        break;
    case BUF_Z:
        row = inner;
        break;
    case BUF_BETA:
    case BUF_ALPHA:
        row = hv;
        break;
    case BUF_GATES:
        row = 2 * hv;
        break;
    case BUF_MIX:
        row = mix > inner ? mix : inner;
        break;
    case BUF_CHOSEN:
        row = (size_t)s->n_experts_used;
        break;
    case BUF_LOGITS:
        row = (size_t)s->n_vocab;
        rows = (size_t)s->max_logit_rows;
        break;
    case BUF_USABLE:
        row = ((size_t)s->n_vocab + 31) / 32;
        rows = 1;
        break;
    case BUF_TOP:
        row = sizeof(struct top_row) / sizeof(float);
        rows = (size_t)s->max_logit_rows;
        break;
    default: /* the draft block's */
        row = mtp ? d : 0;
    }
    return rows * row * sizeof(float);
}

uint64_t forward_bytes(const struct backend_shape *s, bool mtp)
{
    uint64_t sum = 0;
    for (int i = 0; i < N_BUFS; i++)
        sum += buffer_bytes(s, mtp, i);
    return sum;
}

int forward_open(struct forward **out, const struct model *m, struct backend *b, bool mtp, const uint32_t *usable, struct error *err)
{
    const struct backend_shape *s = &b->shape;
    struct forward *f = alloc_array(1, sizeof *f);
    if (!f)
        return error_set(err, "out of memory for the forward pass");
    f->m = m;
    f->b = b;
    f->mtp = mtp;
    for (int i = 0; i < N_BUFS; i++) {
        size_t bytes = buffer_bytes(s, mtp, i);
        if ((i == BUF_USABLE || i == BUF_TOP) && !b->ops->head_top)
            continue;
        if (bytes && !(f->bufs[i] = b->ops->buffer_new(b, bytes, err)))
            goto failed;
    }
    if (f->bufs[BUF_USABLE] && b->ops->write(b, f->bufs[BUF_USABLE], 0, usable, buffer_bytes(s, mtp, BUF_USABLE), err))
        goto failed;
    f->tops = alloc_array((size_t)s->max_logit_rows, sizeof *f->tops);
    f->logits = alloc_array((size_t)s->max_logit_rows * (size_t)s->n_vocab, sizeof(float));
    if (mtp) {
        f->hidden = alloc_array((size_t)s->max_rows * (size_t)s->n_embd, sizeof(float));
        f->shifted = alloc_array((size_t)s->max_rows * (size_t)s->n_embd, sizeof(float));
    }
    if (!f->logits || !f->tops || (mtp && (!f->hidden || !f->shifted))) {
        error_set(err, "out of memory for activations of %d rows: lower the rows of a step (prefill chunk)", s->max_rows);
        goto failed;
    }
    *out = f;
    return 0;
failed:
    forward_close(f);
    return -1;
}

void forward_close(struct forward *f)
{
    if (!f)
        return;
    for (int i = 0; i < N_BUFS; i++)
        if (f->bufs[i])
            f->b->ops->buffer_free(f->b, f->bufs[i]);
    free(f->hidden);
    free(f->shifted);
    free(f->logits);
    free(f->tops);
    free(f);
}

bool forward_has_best(const struct forward *f)
{
    return f->bufs[BUF_TOP] != NULL;
}

const float *forward_hidden(const struct forward *f)
{
    return f->hidden;
}

/* h += attention(RMSNorm(h)), section 6. */
static void attention(struct forward *f, const struct layer *l)
{
    struct backend *b = f->b;
    struct buffer *h = f->bufs[BUF_H], *q = f->bufs[BUF_Q], *k = f->bufs[BUF_K], *v = f->bufs[BUF_V], *mix = f->bufs[BUF_MIX];
    b->ops->project(b, h, l->attn_norm, 3, (struct weight *[]){l->q, l->k, l->v}, (struct buffer *[]){q, k, v});
    b->ops->attn_store(b, l->index, q, k, v, l->q_norm, l->k_norm);
    b->ops->attn_mix(b, l->index, q, mix);
    b->ops->project_add(b, mix, l->o, h);
}

/* h += DeltaNet(RMSNorm(h)), section 7. */
static void delta_net(struct forward *f, const struct layer *l)
{
    struct backend *b = f->b;
    struct buffer *h = f->bufs[BUF_H], *u = f->bufs[BUF_U], *z = f->bufs[BUF_Z], *beta = f->bufs[BUF_BETA], *alpha = f->bufs[BUF_ALPHA];
    struct buffer *qkv = f->bufs[BUF_QKV], *gates = f->bufs[BUF_GATES], *mix = f->bufs[BUF_MIX];
    b->ops->project(b, h, l->attn_norm, 4, (struct weight *[]){l->qkv, l->z, l->beta, l->alpha}, (struct buffer *[]){u, z, beta, alpha});
    b->ops->delta_conv(b, l->index, u, beta, alpha, l->conv, l->dt_bias, l->a, qkv, gates);
    b->ops->delta_rule(b, l->index, qkv, gates, z, l->delta_norm, mix);
    b->ops->project_add(b, mix, l->out, h);
}

/* One block: mixer, then MoE or dense MLP, each added to the residual stream. */
static void block(struct forward *f, const struct layer *l, struct buffer *chosen)
{
    struct backend *b = f->b;
    if (l->recurrent)
        delta_net(f, l);
    else
        attention(f, l);
    if (l->moe.router)
        b->ops->moe(b, f->bufs[BUF_H], l->ffn_norm, &l->moe, chosen);
    else
        b->ops->mlp(b, f->bufs[BUF_H], l->ffn_norm, l->gate, l->up, l->down);
}

/* Where the logits of some rows go; see struct step. */
struct wanted {
    const int32_t *rows;         /* [n] */
    float *const *logits;        /* [n] */
    const int *best;             /* [n], or NULL: whole rows */
    struct top_row *const *tops; /* [n] */
    int n;
};

/* The best of the first k rows of the logits buffer, those of wanted rows i and on. */
static int read_best(struct forward *f, const struct wanted *w, int i, int k, struct error *err)
{
    struct backend *b = f->b;
    int most = 0;
    for (int j = 0; j < k; j++)
        most = w->best[i + j] > most ? w->best[i + j] : most;
    if (most == 0)
        return 0;
    b->ops->head_top(b, f->bufs[BUF_LOGITS], k, most, f->bufs[BUF_USABLE], f->bufs[BUF_TOP]);
    if (b->ops->read(b, f->bufs[BUF_TOP], 0, f->tops, (size_t)k * sizeof *f->tops, err))
        return -1;
    for (int j = 0; j < k; j++)
        if (w->best[i + j])
            *w->tops[i + j] = f->tops[j];
    return 0;
}

/* The same rows as a whole, where they are wanted so: neighbours with one call. */
static int read_rows(struct forward *f, const struct wanted *w, int i, int k, struct error *err)
{
    const size_t v = (size_t)f->b->shape.n_vocab;
    for (int j = 0, end; j < k; j = end) {
        for (end = j; end < k && !(w->best && w->best[i + end]); end++)
            ;
        if (end > j &&
            f->b->ops->read(f->b, f->bufs[BUF_LOGITS], (size_t)j * v * sizeof(float), f->logits, (size_t)(end - j) * v * sizeof(float), err))
            return -1;
        for (int r = j; r < end; r++)
            memcpy(w->logits[i + r], f->logits + (size_t)(r - j) * v, v * sizeof(float));
        end += end == j;
    }
    return 0;
}

/* Logits of some rows of the residual stream, as many at a time as the buffer holds, to the caller's memory. `hidden` as in backend_ops.head. */
static int head(struct forward *f, struct weight *norm, struct weight *w, const struct wanted *want, struct buffer *hidden, struct error *err)
{
    struct backend *b = f->b;
    const int most = b->shape.max_logit_rows;
    for (int i = 0; i < want->n || hidden; i += most) {
        const int k = want->n - i < most ? want->n - i : most;
        b->ops->head(b, f->bufs[BUF_H], norm, w, want->rows + i, k, hidden, f->bufs[BUF_LOGITS]);
        hidden = NULL; /* all rows are done with the first call */
        if (k == 0)
            break;
        if ((want->best && read_best(f, want, i, k, err)) || read_rows(f, want, i, k, err))
            return -1;
    }
    return 0;
}

/* Brings the trunk's hidden rows to the host and sets beside each row's token the hidden row of the position before it. */
static int shift_hidden(struct forward *f, const struct step *s, struct error *err)
{
    struct backend *b = f->b;
    size_t d = (size_t)b->shape.n_embd, bytes = (size_t)s->n_rows * d * sizeof(float);
    if (b->ops->read(b, f->bufs[BUF_HIDDEN], 0, f->hidden, bytes, err))
        return -1;
    for (int i = 0; i < s->n_spans; i++) {
        const struct span *span = &s->spans[i];
        float *first = f->shifted + (size_t)span->row * d;
        if (s->before[i])
            memcpy(first, s->before[i], d * sizeof(float));
        else
            memset(first, 0, d * sizeof(float));
        memcpy(first + d, f->hidden + (size_t)span->row * d, (size_t)(span->n - 1) * d * sizeof(float));
    }
    return b->ops->write(b, f->bufs[BUF_SHIFTED], 0, f->shifted, bytes, err);
}

/* The draft block over all rows, section 9. */
static int draft(struct forward *f, const struct step *s, struct error *err)
{
    struct backend *b = f->b;
    const struct mtp_block *x = &f->m->mtp;
    if (shift_hidden(f, s, err))
        return -1;
    b->ops->embed(b, x->embed, f->bufs[BUF_EMBEDDED]);
    b->ops->mtp_join(b, f->bufs[BUF_EMBEDDED], f->bufs[BUF_SHIFTED], x->enorm, x->hnorm, x->eh_proj, f->bufs[BUF_H]);
    block(f, &x->layer, NULL);
    const struct wanted want = {.rows = s->draft_rows, .logits = s->drafts, .n = s->n_drafts};
    return head(f, x->head_norm, x->head, &want, NULL, err);
}

int forward_run(struct forward *f, const struct step *s, struct error *err)
{
    const struct model *m = f->m;
    struct backend *b = f->b;
    size_t experts = (size_t)s->n_rows * (size_t)b->shape.n_experts_used;
    struct buffer *chosen = s->experts ? f->bufs[BUF_CHOSEN] : NULL;
    struct buffer *hidden = f->mtp ? f->bufs[BUF_HIDDEN] : NULL;

    b->ops->begin(b, s->ids, s->n_rows, s->spans, s->n_spans);
    b->ops->embed(b, m->token_embd, f->bufs[BUF_H]);
    for (int i = 0; i < m->n_layers; i++) {
        block(f, &m->layers[i], chosen);
        if (chosen && b->ops->read(b, chosen, 0, s->experts + (size_t)i * experts, experts * sizeof(int32_t), err))
            return -1;
    }
    const struct wanted want = {.rows = s->logit_rows, .logits = s->logits, .best = s->best, .tops = s->tops, .n = s->n_logits};
    if (head(f, m->output_norm, m->output, &want, hidden, err))
        return -1;
    if (f->mtp && draft(f, s, err))
        return -1;
    return b->ops->sync(b, err);
}
