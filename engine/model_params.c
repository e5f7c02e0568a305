/* The hyper-parameters of a model file: read, bounded, checked against each other (spec/qwen35moe.md section 2). */
#include "engine/model_parts.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"

/* Bounds of spec/gguf.md section 4 item 13. Every product of two or three of them fits an int64_t. */
enum {
    MAX_BLOCKS = 512,
    MAX_EMBD = 65536,
    MAX_VOCAB = 1 << 21,
    MAX_EXPERTS = 1024,
    MAX_HEADS = 1024,
    MAX_HEAD_DIM = 1024,
    MAX_STATE_DIM = 1024,
    MAX_TAPS = 16,
    MAX_FF = 1 << 20,
};

/* Reads keys one after the other; after the first error every further call does nothing, so that the caller checks once. */
struct reader {
    const struct gguf *g;
    const char *arch;
    bool failed;
    struct error *err;
};

static void fail(struct reader *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void fail(struct reader *r, const char *format, ...)
{
    if (r->failed)
        return;
    r->failed = true;
    va_list args;
    va_start(args, format);
    error_vset(r->err, format, args);
    va_end(args);
}

struct key {
    char text[96];
};

static struct key key_of(const struct reader *r, const char *name)
{
    struct key k;
    snprintf(k.text, sizeof k.text, "%s.%s", r->arch, name);
    return k;
}

static const int64_t REQUIRED = INT64_MIN;

/* The integer `name`, in [lo, hi]; `fallback` (or an error, when REQUIRED) where the key is absent. */
static int64_t read_int(struct reader *r, const char *name, int64_t lo, int64_t hi, int64_t fallback)
{
    if (r->failed)
        return lo;
    struct key k = key_of(r, name);
    uint64_t v = 0;
    int got = gguf_get_u64(r->g, k.text, &v, r->err);
    if (got < 0) {
        r->failed = true;
        return lo;
    }
    if (got == 0) {
        if (fallback == REQUIRED) {
            fail(r, "%s is missing: expected an integer from %" PRId64 " to %" PRId64, k.text, lo, hi);
            return lo;
        }
        if (fallback < lo || fallback > hi) {
            fail(r, "%s is missing and its default, %" PRId64 ", is outside %" PRId64 " to %" PRId64, k.text, fallback, lo, hi);
            return lo;
        }
        return fallback;
    }
    if (v > (uint64_t)hi || (int64_t)v < lo) {
        fail(r, "%s is %" PRIu64 ": expected an integer from %" PRId64 " to %" PRId64, k.text, v, lo, hi);
        return lo;
    }
    return (int64_t)v;
}

/* The number `name`, finite; `fallback` (NAN = required) where the key is absent. */
static double read_real(struct reader *r, const char *name, double fallback)
{
    if (r->failed)
        return 1;
    struct key k = key_of(r, name);
    double v = fallback;
    int got = gguf_get_f64(r->g, k.text, &v, r->err);
    if (got < 0) {
        r->failed = true;
        return 1;
    }
    if (got == 0 && isnan(fallback))
        fail(r, "%s is missing: expected a number", k.text);
    return v;
}

/* One of the publisher's sampling defaults, which may be of any number type; NAN where absent or of another kind. */
static double read_sampling(const struct gguf *g, const char *key)
{
    double real;
    uint64_t integer;
    if (gguf_get_f64(g, key, &real, NULL) == 1)
        return real;
    if (gguf_get_u64(g, key, &integer, NULL) == 1 && integer <= UINT32_MAX)
        return (double)integer;
    return NAN;
}

static void read_arch(struct reader *r, struct model *m)
{
    static const char *const served[] = {"qwen35moe", "qwen35", "qwen3"};
    struct gguf_string s;
    int got = gguf_get_string(r->g, "general.architecture", &s, r->err);
    if (got < 0) {
        r->failed = true;
        return;
    }
    if (got == 0) {
        fail(r, "general.architecture is missing: expected qwen35moe, qwen35 or qwen3");
        return;
    }
    for (size_t i = 0; i < sizeof served / sizeof served[0]; i++) {
        if (s.len == strlen(served[i]) && memcmp(s.data, served[i], s.len) == 0) {
            m->arch = (enum model_arch)i;
            m->arch_name = r->arch = served[i];
            return;
        }
    }
    fail(r, "general.architecture is \"%.*s\", which this program does not serve: it serves qwen35moe, qwen35 and qwen3",
         s.len < 64 ? (int)s.len : 64, s.data);
}

/* block_count, nextn_predict_layers; allocates the layers. Returns block_count. */
static int read_blocks(struct reader *r, struct model *m)
{
    int blocks = (int)read_int(r, "block_count", 1, MAX_BLOCKS, REQUIRED);
    int mtp = (int)read_int(r, "nextn_predict_layers", 0, MAX_BLOCKS, 0);
    if (r->failed)
        return blocks;
    if (mtp >= blocks)
        fail(r, "%s is %d of %d blocks (%s): the file holds only a draft block; load the whole model's file instead",
             key_of(r, "nextn_predict_layers").text, mtp, blocks, key_of(r, "block_count").text);
    else if (mtp > 1)
        fail(r, "%s is %d: at most 1 is supported", key_of(r, "nextn_predict_layers").text, mtp);
    if (r->failed)
        return blocks;
    m->has_mtp = mtp == 1;
    m->n_layers = blocks - mtp;
    m->layers = alloc_array((size_t)m->n_layers, sizeof *m->layers);
    if (!m->layers)
        fail(r, "out of memory for %d layers", m->n_layers);
    return blocks;
}

/* An integer or, in old conversions, one per block, of which the largest counts (0 stands on DeltaNet layers). */
static int read_kv_heads(struct reader *r, int blocks, int n_layers, int n_heads)
{
    struct key k = key_of(r, "attention.head_count_kv");
    const struct gguf_value *v = gguf_value(r->g, k.text);
    if (r->failed || !v || v->kind != GGUF_ARRAY)
        return (int)read_int(r, "attention.head_count_kv", 1, MAX_HEADS, n_heads);
    if (v->count != (uint64_t)blocks && v->count != (uint64_t)n_layers) {
        fail(r, "%s has %" PRIu64 " entries: expected one for each of the %d blocks", k.text, v->count, blocks);
        return 1;
    }
    int64_t most = 0;
    for (uint64_t i = 0; i < v->count; i++) {
        int64_t n;
        if (!gguf_array_i64(v, i, &n) || n < 0 || n > MAX_HEADS) {
            fail(r, "%s[%" PRIu64 "]: expected an integer from 0 to %d", k.text, i, MAX_HEADS);
            return 1;
        }
        if (n > most)
            most = n;
    }
    if (most < 1)
        fail(r, "%s has only zeros: expected at least one block with KV heads", k.text);
    return most < 1 ? 1 : (int)most;
}

/* The rotary sections only matter for images; for text they must add up (spec/qwen35moe.md section 6 step 4). */
static void check_sections(struct reader *r, int n_rot)
{
    struct key k = key_of(r, "rope.dimension_sections");
    if (r->failed)
        return;
    const struct gguf_value *v = gguf_value(r->g, k.text);
    if (!v || v->kind != GGUF_ARRAY || v->count < 3 || v->count > 4) {
        fail(r, "%s is %s: expected an array of 3 or 4 integers", k.text, v ? "something else" : "missing");
        return;
    }
    int64_t sum = 0;
    for (uint64_t i = 0; i < v->count; i++) {
        int64_t n;
        if (!gguf_array_i64(v, i, &n) || n < 0 || n > MAX_HEAD_DIM) {
            fail(r, "%s[%" PRIu64 "]: expected an integer from 0 to %d", k.text, i, MAX_HEAD_DIM);
            return;
        }
        sum += n;
    }
    if (2 * sum != n_rot)
        fail(r, "%s adds up to %" PRId64 ": expected %d, half of %s.rope.dimension_count", k.text, sum, n_rot / 2, r->arch);
}

static void check_rope_scaling(struct reader *r)
{
    struct key k = key_of(r, "rope.scaling.type");
    struct gguf_string type = {"linear", 6}; /* what a factor without a type means */
    if (r->failed)
        return;
    if (gguf_get_string(r->g, k.text, &type, r->err) < 0) {
        r->failed = true;
        return;
    }
    if (type.len == 4 && memcmp(type.data, "none", 4) == 0)
        return;
    if (type.len != 6 || memcmp(type.data, "linear", 6) != 0) {
        fail(r, "%s is \"%.*s\": expected \"none\", or \"linear\" with factor 1; scaled positions are not supported", k.text,
             type.len < 64 ? (int)type.len : 64, type.data);
        return;
    }
    static const char *const factors[] = {"rope.scaling.factor", "rope.scale_linear"};
    for (size_t i = 0; i < 2; i++) {
        double factor = read_real(r, factors[i], 1);
        if (factor != 1 && factor != 0) /* 0 = not set, in old files */
            fail(r, "%s is %g: expected 1, scaled positions are not supported", key_of(r, factors[i]).text, factor);
    }
}

static void read_attention(struct reader *r, struct model *m, int blocks)
{
    struct backend_shape *s = &m->shape;
    s->n_heads = (int)read_int(r, "attention.head_count", 1, MAX_HEADS, REQUIRED);
    s->n_kv_heads = read_kv_heads(r, blocks, m->n_layers, s->n_heads);
    if (!r->failed && s->n_heads % s->n_kv_heads)
        fail(r, "%s.attention.head_count is %d: expected a multiple of the %d KV heads (attention.head_count_kv)", r->arch, s->n_heads,
             s->n_kv_heads);
    s->head_dim = (int)read_int(r, "attention.key_length", 1, MAX_HEAD_DIM, r->failed ? 1 : s->n_embd / s->n_heads);
    int value_dim = (int)read_int(r, "attention.value_length", 1, MAX_HEAD_DIM, r->failed ? 1 : s->n_embd / s->n_heads);
    if (!r->failed && value_dim != s->head_dim)
        fail(r, "%s.attention.value_length is %d: expected %d, the same as attention.key_length", r->arch, value_dim, s->head_dim);

    double eps = read_real(r, "attention.layer_norm_rms_epsilon", NAN);
    if (!r->failed && !(eps > 0 && eps < 1 && (float)eps > 0))
        fail(r, "%s.attention.layer_norm_rms_epsilon is %g: expected a number above 0 and below 1", r->arch, eps);
    s->norm_eps = (float)eps;
    double scale = read_real(r, "attention.scale", 0);
    if (!r->failed && !(scale >= 0 && scale < 1e6))
        fail(r, "%s.attention.scale is %g: expected 0 (the default) or a positive number", r->arch, scale);
    s->attn_scale = scale > 0 ? (float)scale : (float)(1 / sqrt((double)s->head_dim));
    s->attn_gated = m->arch != MODEL_QWEN3;

    s->n_rot = (int)read_int(r, "rope.dimension_count", 2, MAX_HEAD_DIM, s->head_dim);
    if (!r->failed && (s->n_rot % 2 || s->n_rot > s->head_dim))
        fail(r, "%s.rope.dimension_count is %d: expected an even number, at most %d (the head size)", r->arch, s->n_rot, s->head_dim);
    double theta = read_real(r, "rope.freq_base", 10000);
    if (!r->failed && !(theta > 0 && theta <= 1e15))
        fail(r, "%s.rope.freq_base is %g: expected a positive number", r->arch, theta);
    s->rope_theta = (float)theta;
    if (m->arch != MODEL_QWEN3)
        check_sections(r, s->n_rot);
    check_rope_scaling(r);
}

static void read_delta(struct reader *r, struct backend_shape *s)
{
    s->conv_width = (int)read_int(r, "ssm.conv_kernel", 2, MAX_TAPS, REQUIRED);
    s->delta_dim = (int)read_int(r, "ssm.state_size", 1, MAX_STATE_DIM, REQUIRED);
    s->delta_k_heads = (int)read_int(r, "ssm.group_count", 1, MAX_HEADS, REQUIRED);
    s->delta_v_heads = (int)read_int(r, "ssm.time_step_rank", 1, MAX_HEADS, REQUIRED);
    int64_t inner = read_int(r, "ssm.inner_size", 1, (int64_t)MAX_HEADS * MAX_STATE_DIM, REQUIRED);
    if (r->failed)
        return;
    if (s->delta_v_heads % s->delta_k_heads)
        fail(r, "%s.ssm.time_step_rank is %d: expected a multiple of the %d key heads (ssm.group_count)", r->arch, s->delta_v_heads,
             s->delta_k_heads);
    if (inner != (int64_t)s->delta_v_heads * s->delta_dim)
        fail(r, "%s.ssm.inner_size is %" PRId64 ": expected %" PRId64 " (ssm.time_step_rank x ssm.state_size)", r->arch, inner,
             (int64_t)s->delta_v_heads * s->delta_dim);
}

/* Keys that other converters write, which change the mathematics where they are false; an absent one is true. */
static void check_flags(struct reader *r)
{
    static const struct {
        const char *name, *why;
    } flags[] = {
        {"ssm.v_head_reordered", "the value heads of the DeltaNet layers are in another order than this program reads"},
        {"norm_top_k_prob", "weights of experts that do not add up to 1 are not supported"},
    };
    for (size_t i = 0; i < sizeof flags / sizeof flags[0] && !r->failed; i++) {
        struct key k = key_of(r, flags[i].name);
        bool value = true;
        if (gguf_get_bool(r->g, k.text, &value, r->err) < 0)
            r->failed = true;
        else if (!value)
            fail(r, "%s is false: %s; convert the model again", k.text, flags[i].why);
    }
}

/* Which layers are DeltaNet, from the array or else the interval, and their numbers among their kind. */
static void read_layer_kinds(struct reader *r, struct model *m, int blocks)
{
    int interval = (int)read_int(r, "full_attention_interval", 1, MAX_BLOCKS, 4);
    struct key k = key_of(r, "attention.recurrent_layers");
    const struct gguf_value *v = gguf_value(r->g, k.text);
    if (r->failed)
        return;
    if (v && (v->kind != GGUF_ARRAY || (v->count != (uint64_t)blocks && v->count != (uint64_t)m->n_layers))) {
        fail(r, "%s: expected an array with one entry for each of the %d blocks", k.text, blocks);
        return;
    }
    for (int i = 0; i < m->n_layers; i++)
        m->layers[i].recurrent = m->arch != MODEL_QWEN3 && (i + 1) % interval != 0;
    for (uint64_t i = 0; v && i < v->count; i++) {
        int64_t flag;
        if (!gguf_array_i64(v, i, &flag) || (flag != 0 && flag != 1)) {
            fail(r, "%s[%" PRIu64 "]: expected 0 or 1", k.text, i);
            return;
        }
        if (flag && i >= (uint64_t)m->n_layers) {
            fail(r, "%s[%" PRIu64 "] is 1: the draft block cannot be recurrent", k.text, i);
            return;
        }
        if (flag && m->arch == MODEL_QWEN3) {
            fail(r, "%s[%" PRIu64 "] is 1: qwen3 has no recurrent layers", k.text, i);
            return;
        }
        if (i < (uint64_t)m->n_layers)
            m->layers[i].recurrent = flag == 1;
    }
    for (int i = 0; i < m->n_layers; i++)
        m->layers[i].index = m->layers[i].recurrent ? m->shape.n_delta_layers++ : m->shape.n_kv_layers++;
}

static void read_ffn(struct reader *r, struct model *m)
{
    struct backend_shape *s = &m->shape;
    if (m->arch != MODEL_QWEN35MOE) {
        if (read_int(r, "expert_count", 0, MAX_EXPERTS, 0) != 0)
            fail(r, "%s.expert_count is not 0: %s is a dense architecture", r->arch, r->arch);
        s->dense_ff = (int)read_int(r, "feed_forward_length", 1, MAX_FF, REQUIRED);
        return;
    }
    s->n_experts = (int)read_int(r, "expert_count", 1, MAX_EXPERTS, REQUIRED);
    s->n_experts_used = (int)read_int(r, "expert_used_count", 1, r->failed ? 1 : s->n_experts, REQUIRED);
    int64_t ff = read_int(r, "feed_forward_length", 0, MAX_FF, 0);
    s->expert_ff = (int)read_int(r, "expert_feed_forward_length", 1, MAX_FF, r->failed ? 1 : ff / s->n_experts_used);
    s->shared_ff = (int)read_int(r, "expert_shared_feed_forward_length", 1, MAX_FF, ff);
}

/* The vocabulary is as long as the token list; model_tensors holds token_embd to it. */
static void read_vocabulary(struct reader *r, struct backend_shape *s)
{
    const struct gguf_value *v = gguf_value(r->g, "tokenizer.ggml.tokens");
    if (r->failed)
        return;
    if (!v || v->kind != GGUF_ARRAY || v->element != GGUF_STRING)
        fail(r, "tokenizer.ggml.tokens is %s: expected an array of strings", v ? "something else" : "missing");
    else if (v->count < 1 || v->count > MAX_VOCAB)
        fail(r, "tokenizer.ggml.tokens has %" PRIu64 " entries: expected 1 to %d", v->count, MAX_VOCAB);
    else
        s->n_vocab = (int)v->count;
}

int model_params(struct model *m, struct error *err)
{
    struct error unused = {""};
    struct reader r = {.g = m->file, .arch = "", .err = err ? err : &unused};
    read_arch(&r, m);
    if (r.failed)
        return -1;
    struct gguf_string name = {"", 0};
    if (gguf_get_string(r.g, "general.name", &name, NULL) < 0)
        name.len = 0; /* informational: a name of another kind is no name */
    m->name = alloc_text(name.data, name.len < 256 ? name.len : 256);
    if (!m->name)
        fail(&r, "out of memory for the model's name");

    int blocks = read_blocks(&r, m);
    m->context_length = read_int(&r, "context_length", 1, INT32_MAX / 2, REQUIRED);
    m->shape.n_embd = (int)read_int(&r, "embedding_length", 1, MAX_EMBD, REQUIRED);
    read_attention(&r, m, blocks);
    if (m->arch != MODEL_QWEN3)
        read_delta(&r, &m->shape);
    read_layer_kinds(&r, m, blocks);
    read_ffn(&r, m);
    check_flags(&r);
    read_vocabulary(&r, &m->shape);

    m->sampling.temperature = read_sampling(r.g, "general.sampling.temp");
    m->sampling.top_p = read_sampling(r.g, "general.sampling.top_p");
    m->sampling.top_k = read_sampling(r.g, "general.sampling.top_k");
    m->sampling.min_p = read_sampling(r.g, "general.sampling.min_p");
    m->sampling.repeat_penalty = read_sampling(r.g, "general.sampling.penalty_repeat");
    return r.failed ? -1 : 0;
}
