/* The tensors of a model file: looked up by name, held to their exact shape, handed to the backend (spec/qwen35moe.md section 3).
 *
 * The same walk over the model serves twice: without a backend it checks and counts, with one it uploads. */
#include "engine/model_parts.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/log.h"

struct binder {
    struct model *m;
    struct backend *b; /* NULL: check only */
    struct error *err;
    bool failed;                     /* sticky: after it every call does nothing */
    const struct gguf_tensor **used; /* check only: every tensor found, once or more */
    size_t n_used, cap_used;
};

static void fail(struct binder *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void fail(struct binder *t, const char *format, ...)
{
    if (t->failed)
        return;
    t->failed = true;
    va_list args;
    va_start(args, format);
    error_vset(t->err, format, args);
    va_end(args);
}

struct name {
    char text[80];
};

static struct name in_block(int block, const char *suffix)
{
    struct name n;
    snprintf(n.text, sizeof n.text, "blk.%d.%s", block, suffix);
    return n;
}

static bool exists(const struct binder *t, const char *name)
{
    return gguf_tensor(t->m->file, name) != NULL;
}

/* The tensor `name` with ne = [n_in, n_out, n_mats]; an error when it is absent or shaped otherwise. Missing dimensions are 1. */
static const struct gguf_tensor *find(struct binder *t, const char *name, int64_t n_in, int64_t n_out, int64_t n_mats)
{
    if (t->failed)
        return NULL;
    const struct gguf_tensor *x = gguf_tensor(t->m->file, name);
    char want[80];
    if (n_mats > 1)
        snprintf(want, sizeof want, "[%" PRId64 ", %" PRId64 ", %" PRId64 "]", n_in, n_out, n_mats);
    else if (n_out > 1)
        snprintf(want, sizeof want, "[%" PRId64 ", %" PRId64 "]", n_in, n_out);
    else
        snprintf(want, sizeof want, "[%" PRId64 "]", n_in);
    if (!x) {
        fail(t, "tensor %s is missing: expected shape %s", name, want);
        return NULL;
    }
    if (x->ne[0] != (uint64_t)n_in || x->ne[1] != (uint64_t)n_out || x->ne[2] != (uint64_t)n_mats || x->ne[3] != 1) {
        char is[120];
        int n = 0;
        for (uint32_t d = 0; d < x->n_dims && d < 4; d++)
            n += snprintf(is + n, sizeof is - (size_t)n, "%s%" PRIu64, d ? ", " : "", x->ne[d]);
        fail(t, "tensor %s has shape [%s]: expected %s", name, is, want);
        return NULL;
    }
    if (!t->b) {
        if (alloc_grow(&t->used, &t->cap_used, t->n_used + 1, sizeof *t->used)) {
            fail(t, "out of memory for the list of tensors");
            return NULL;
        }
        t->used[t->n_used++] = x;
    }
    return x;
}

/* Rows first .. first+n_out-1 of each of the n_mats matrices of a tensor. */
static struct weight *upload(struct binder *t, const struct gguf_tensor *x, int64_t first, int64_t n_out)
{
    if (t->failed || !x || !t->b)
        return NULL;
    enum block_type type = (enum block_type)x->type;
    size_t row = block_bytes(type, (size_t)x->ne[0]);
    struct weight_desc d = {
        .name = x->name,
        .type = type,
        .n_in = (int64_t)x->ne[0],
        .n_out = n_out,
        .n_mats = (int64_t)x->ne[2],
        .data = x->data + (size_t)first * row,
        .stride = row * (size_t)x->ne[1],
    };
    struct weight *w = t->b->ops->weight_new(t->b, &d, t->err);
    if (!w)
        t->failed = true;
    else if (t->b->ops->memory_free)
        gguf_forget(t->m->file, x); /* the backend has a copy; a second one in the page cache would take the memory that the GPU shares */
    return w;
}

static struct weight *matrices(struct binder *t, const char *name, int64_t n_in, int64_t n_out, int64_t n_mats)
{
    return upload(t, find(t, name, n_in, n_out, n_mats), 0, n_out);
}

static struct weight *matrix(struct binder *t, const char *name, int64_t n_in, int64_t n_out)
{
    return matrices(t, name, n_in, n_out, 1);
}

static struct weight *vector(struct binder *t, const char *name, int64_t n)
{
    return matrices(t, name, n, 1, 1);
}

static void bind_attention(struct binder *t, struct layer *l, int i)
{
    const struct backend_shape *s = &t->m->shape;
    int64_t d = s->n_embd, hd = s->head_dim, mix = s->n_heads * hd, q = s->attn_gated ? 2 * mix : mix, kv = s->n_kv_heads * hd;
    struct name fused = in_block(i, "attn_qkv.weight");
    if (exists(t, fused.text) && !exists(t, in_block(i, "attn_q.weight").text)) {
        const struct gguf_tensor *x = find(t, fused.text, d, q + 2 * kv, 1);
        l->q = upload(t, x, 0, q);
        l->k = upload(t, x, q, kv);
        l->v = upload(t, x, q + kv, kv);
    } else {
        l->q = matrix(t, in_block(i, "attn_q.weight").text, d, q);
        l->k = matrix(t, in_block(i, "attn_k.weight").text, d, kv);
        l->v = matrix(t, in_block(i, "attn_v.weight").text, d, kv);
    }
    l->o = matrix(t, in_block(i, "attn_output.weight").text, mix, d);
    l->q_norm = vector(t, in_block(i, "attn_q_norm.weight").text, hd);
    l->k_norm = vector(t, in_block(i, "attn_k_norm.weight").text, hd);
}

static void bind_delta(struct binder *t, struct layer *l, int i)
{
    const struct backend_shape *s = &t->m->shape;
    int64_t d = s->n_embd, hv = s->delta_v_heads, inner = hv * s->delta_dim, ch = 2 * (int64_t)s->delta_k_heads * s->delta_dim + inner;
    l->qkv = matrix(t, in_block(i, "attn_qkv.weight").text, d, ch);
    l->z = matrix(t, in_block(i, "attn_gate.weight").text, d, inner);
    l->beta = matrix(t, in_block(i, "ssm_beta.weight").text, d, hv);
    l->alpha = matrix(t, in_block(i, "ssm_alpha.weight").text, d, hv);
    l->conv = matrix(t, in_block(i, "ssm_conv1d.weight").text, s->conv_width, ch);
    struct name bias = in_block(i, "ssm_dt.bias"), old = in_block(i, "ssm_dt");
    l->dt_bias = vector(t, !exists(t, bias.text) && exists(t, old.text) ? old.text : bias.text, hv);
    l->a = vector(t, in_block(i, "ssm_a").text, hv);
    l->delta_norm = vector(t, in_block(i, "ssm_norm.weight").text, s->delta_dim);
    l->out = matrix(t, in_block(i, "ssm_out.weight").text, inner, d);
}

static void bind_moe(struct binder *t, struct moe_weights *w, int i)
{
    const struct backend_shape *s = &t->m->shape;
    int64_t d = s->n_embd, e = s->n_experts, f = s->expert_ff, fs = s->shared_ff;
    w->router = matrix(t, in_block(i, "ffn_gate_inp.weight").text, d, e);
    struct name fused = in_block(i, "ffn_gate_up_exps.weight"), gate = in_block(i, "ffn_gate_exps.weight");
    if (!exists(t, fused.text) && !exists(t, gate.text))
        fail(t, "tensor %s is missing, and so is %s, which may stand for it", gate.text, fused.text);
    if (exists(t, fused.text)) { /* of each expert the first F rows are gate, the next up */
        const struct gguf_tensor *x = find(t, fused.text, d, 2 * f, e);
        w->gate = upload(t, x, 0, f);
        w->up = upload(t, x, f, f);
    } else {
        w->gate = matrices(t, gate.text, d, f, e);
        w->up = matrices(t, in_block(i, "ffn_up_exps.weight").text, d, f, e);
    }
    w->down = matrices(t, in_block(i, "ffn_down_exps.weight").text, f, d, e);
    w->shared_router = vector(t, in_block(i, "ffn_gate_inp_shexp.weight").text, d);
    w->shared_gate = matrix(t, in_block(i, "ffn_gate_shexp.weight").text, d, fs);
    w->shared_up = matrix(t, in_block(i, "ffn_up_shexp.weight").text, d, fs);
    w->shared_down = matrix(t, in_block(i, "ffn_down_shexp.weight").text, fs, d);
}

static void bind_layer(struct binder *t, struct layer *l, int i)
{
    const struct backend_shape *s = &t->m->shape;
    int64_t d = s->n_embd, ff = s->dense_ff;
    l->attn_norm = vector(t, in_block(i, "attn_norm.weight").text, d);
    if (l->recurrent)
        bind_delta(t, l, i);
    else
        bind_attention(t, l, i);
    l->ffn_norm = vector(t, in_block(i, t->m->arch == MODEL_QWEN3 ? "ffn_norm.weight" : "post_attention_norm.weight").text, d);
    if (s->n_experts) {
        bind_moe(t, &l->moe, i);
        return;
    }
    l->gate = matrix(t, in_block(i, "ffn_gate.weight").text, d, ff);
    l->up = matrix(t, in_block(i, "ffn_up.weight").text, d, ff);
    l->down = matrix(t, in_block(i, "ffn_down.weight").text, ff, d);
}

static void bind_mtp(struct binder *t, struct mtp_block *x)
{
    struct model *m = t->m;
    int i = m->n_layers;
    int64_t d = m->shape.n_embd, v = m->shape.n_vocab;
    bind_layer(t, &x->layer, i);
    x->eh_proj = matrix(t, in_block(i, "nextn.eh_proj.weight").text, 2 * d, d);
    x->enorm = vector(t, in_block(i, "nextn.enorm.weight").text, d);
    x->hnorm = vector(t, in_block(i, "nextn.hnorm.weight").text, d);
    struct name norm = in_block(i, "nextn.shared_head_norm.weight"), embed = in_block(i, "nextn.embed_tokens.weight"),
                head = in_block(i, "nextn.shared_head_head.weight");
    x->head_norm = exists(t, norm.text) ? vector(t, norm.text, d) : m->output_norm;
    x->embed = exists(t, embed.text) ? matrix(t, embed.text, d, v) : m->token_embd;
    x->head = exists(t, head.text) ? matrix(t, head.text, d, v) : m->output;
}

static bool starts_with(const char *text, const char *prefix)
{
    return strncmp(text, prefix, strlen(prefix)) == 0;
}

static bool ends_with(const char *text, const char *suffix)
{
    size_t n = strlen(text), k = strlen(suffix);
    return n >= k && strcmp(text + n - k, suffix) == 0;
}

/* What the names alone say: a file of another kind, or a draft block that is announced but absent. */
static void check_names(struct binder *t)
{
    struct model *m = t->m;
    struct name draft = in_block(m->n_layers, "");
    bool first_block = false, draft_block = false;
    for (size_t i = 0; i < gguf_tensor_count(m->file); i++) {
        const char *name = gguf_tensor_at(m->file, i)->name;
        first_block |= starts_with(name, "blk.0.");
        draft_block |= starts_with(name, draft.text);
        if (ends_with(name, ".scale") || ends_with(name, ".input_scale")) {
            fail(t, "tensor %s belongs to an NVFP4 model, which is not supported: use a Q4_K_M or Q8_0 file of this model", name);
            return;
        }
    }
    if (!first_block && m->has_mtp && draft_block)
        fail(t, "no tensor blk.0.*: the file holds only the draft (MTP) block, %s*; load the whole model's file instead", draft.text);
    else if (!first_block)
        fail(t, "no tensor blk.0.*: the file holds no layers; load the whole model's file instead");
    if (m->has_mtp && !draft_block) {
        log_warn("the model file announces a draft (MTP) block but holds no tensor %s*: going on without it", draft.text);
        m->has_mtp = false;
    }
}

static int by_address(const void *a, const void *b)
{
    const struct gguf_tensor *const *x = a, *const *y = b;
    return (*x > *y) - (*x < *y);
}

/* Adds up what is used, and looks at what is not: vision towers and the like are noted; a bias, which would change the answer, is refused. */
static void count_tensors(struct binder *t)
{
    struct model *m = t->m;
    qsort(t->used, t->n_used, sizeof(struct gguf_tensor *), by_address);
    for (size_t i = 0; i < t->n_used; i++) {
        const struct gguf_tensor *x = t->used[i];
        if (i && t->used[i - 1] == x)
            continue;
        m->n_params += (int64_t)(x->ne[0] * x->ne[1] * x->ne[2]);
        m->weight_bytes += x->bytes;
    }
    size_t ignored = 0;
    const char *example = "";
    for (size_t i = 0; i < gguf_tensor_count(m->file); i++) {
        const struct gguf_tensor *x = gguf_tensor_at(m->file, i);
        if (t->n_used && bsearch(&x, t->used, t->n_used, sizeof(struct gguf_tensor *), by_address))
            continue;
        bool vision = starts_with(x->name, "v.") || starts_with(x->name, "mm.");
        if (!vision && ends_with(x->name, ".bias")) {
            fail(t, "tensor %s: a bias is not part of architecture %s and would change its answers; this file is of another model", x->name,
                 m->arch_name);
            return;
        }
        if (!ignored++)
            example = x->name;
    }
    if (ignored)
        log_info("%zu tensors of the model file are not used for text (vision and the like), the first is %s", ignored, example);
}

int model_tensors(struct model *m, struct backend *b, bool mtp, struct error *err)
{
    struct error unused = {""};
    struct binder t = {.m = m, .b = b, .err = err ? err : &unused};
    const struct backend_shape *s = &m->shape;
    if (!b)
        check_names(&t);
    m->token_embd = matrix(&t, "token_embd.weight", s->n_embd, s->n_vocab);
    m->output_norm = vector(&t, "output_norm.weight", s->n_embd);
    m->tied_output = !exists(&t, "output.weight");
    m->output = m->tied_output ? m->token_embd : matrix(&t, "output.weight", s->n_embd, s->n_vocab);
    for (int i = 0; i < m->n_layers; i++)
        bind_layer(&t, &m->layers[i], i);
    if (mtp && m->has_mtp)
        bind_mtp(&t, &m->mtp);
    if (!b && !t.failed)
        count_tensors(&t);
    free(t.used);
    return t.failed ? -1 : 0;
}
