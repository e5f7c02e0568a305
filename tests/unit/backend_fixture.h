/* tests/unit/backend_fixture.h: random models, random inputs and step-by-step runs of one operation on any backend.
 *
 * A test picks a shape (fixture_shape_*), fills a `struct fixture_model` with random weights of a block type, describes an operation with
 * fixture_op, draws inputs for whole sequences with fixture_data_new, opens the backend under test with fixture_run_open and feeds the
 * sequences in steps of its choice. Outputs are collected per sequence, so that runs cut in different ways, or runs on different backends,
 * are compared with one memcmp or one loop. Everything follows from the seed. Include after <cmocka.h>. */
#ifndef BEDSIDE_TESTS_BACKEND_FIXTURE_H
#define BEDSIDE_TESTS_BACKEND_FIXTURE_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "engine/backend.h"

/* ---- random numbers: the same on every machine ---- */

struct fixture_rng {
    uint64_t state;
};

static inline uint64_t fixture_next(struct fixture_rng *rng) /* splitmix64, Vigna */
{
    uint64_t z = rng->state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

/* 0 .. n-1 */
static inline int fixture_below(struct fixture_rng *rng, int n)
{
    return (int)(fixture_next(rng) % (uint64_t)n);
}

/* [0, 1) */
static inline double fixture_uniform(struct fixture_rng *rng)
{
    return (double)(fixture_next(rng) >> 11) * 0x1p-53;
}

/* Mean 0, deviation 1: a sum of twelve, good enough and exact everywhere. */
static inline double fixture_normal(struct fixture_rng *rng)
{
    double sum = -6;
    for (int i = 0; i < 12; i++)
        sum += fixture_uniform(rng);
    return sum;
}

/* ---- shapes ---- */

/* Everything at once, small: gated attention with partial rotation, DeltaNet with 3 value heads per key head, MoE with a shared expert, dense
 * MLP. Every row is a multiple of 32, so that types with blocks of 32 fit. */
static inline struct backend_shape fixture_shape_small(void)
{
    return (struct backend_shape){.n_embd = 64,
                                  .n_vocab = 101,
                                  .norm_eps = 1e-6F,
                                  .n_heads = 4,
                                  .n_kv_heads = 2,
                                  .head_dim = 32,
                                  .n_rot = 16,
                                  .rope_theta = 1e4F,
                                  .attn_scale = 0.17677669F,
                                  .attn_gated = true,
                                  .n_kv_layers = 2,
                                  .n_delta_layers = 2,
                                  .delta_k_heads = 2,
                                  .delta_v_heads = 6,
                                  .delta_dim = 16,
                                  .conv_width = 4,
                                  .n_experts = 8,
                                  .n_experts_used = 3,
                                  .expert_ff = 32,
                                  .shared_ff = 64,
                                  .dense_ff = 96,
                                  .kv_type = KV_F32,
                                  .max_rows = 256,
                                  .max_logit_rows = 256};
}

/* Rows of 256 for the K types; no shared expert, no gate, all channels rotated, f16 KV. */
static inline struct backend_shape fixture_shape_wide(void)
{
    return (struct backend_shape){.n_embd = 256,
                                  .n_vocab = 67,
                                  .norm_eps = 1e-6F,
                                  .n_heads = 3,
                                  .n_kv_heads = 3,
                                  .head_dim = 16,
                                  .n_rot = 16,
                                  .rope_theta = 1e6F,
                                  .attn_scale = 0.25F,
                                  .attn_gated = false,
                                  .n_kv_layers = 1,
                                  .n_delta_layers = 1,
                                  .delta_k_heads = 2,
                                  .delta_v_heads = 2,
                                  .delta_dim = 32,
                                  .conv_width = 3,
                                  .n_experts = 5,
                                  .n_experts_used = 2,
                                  .expert_ff = 256,
                                  .shared_ff = 0,
                                  .dense_ff = 512,
                                  .kv_type = KV_F16,
                                  .max_rows = 256,
                                  .max_logit_rows = 256};
}

/* The heads of the 35B on a narrow model. */
static inline struct backend_shape fixture_shape_35b_heads(void)
{
    return (struct backend_shape){.n_embd = 256,
                                  .n_vocab = 64,
                                  .norm_eps = 1e-6F,
                                  .n_heads = 16,
                                  .n_kv_heads = 2,
                                  .head_dim = 256,
                                  .n_rot = 64,
                                  .rope_theta = 1e7F,
                                  .attn_scale = 0.0625F,
                                  .attn_gated = true,
                                  .n_kv_layers = 1,
                                  .n_delta_layers = 1,
                                  .delta_k_heads = 16,
                                  .delta_v_heads = 32,
                                  .delta_dim = 128,
                                  .conv_width = 4,
                                  .n_experts = 32,
                                  .n_experts_used = 8,
                                  .expert_ff = 256,
                                  .shared_ff = 256,
                                  .dense_ff = 256,
                                  .kv_type = KV_F16,
                                  .max_rows = 256,
                                  .max_logit_rows = 256};
}

/* Any shape of that size whose rows are multiples of 32. */
static inline struct backend_shape fixture_shape_random(struct fixture_rng *rng)
{
    struct backend_shape sh = fixture_shape_small();
    sh.n_embd = 32 * (1 + fixture_below(rng, 4));
    sh.n_kv_heads = 1 + fixture_below(rng, 3);
    sh.n_heads = sh.n_kv_heads * (1 + fixture_below(rng, 3));
    sh.head_dim = 16 * (1 + fixture_below(rng, 4));
    sh.n_rot = 2 * (1 + fixture_below(rng, sh.head_dim / 2));
    sh.rope_theta = (float)(1000.0 + 1e5 * fixture_uniform(rng));
    sh.attn_scale = (float)(1.0 / sqrt((double)sh.head_dim));
    sh.attn_gated = fixture_below(rng, 2);
    const int kv = fixture_below(rng, 3);
    sh.kv_type = kv == 0 ? KV_F32 : kv == 1 && sh.head_dim % 32 == 0 ? KV_Q8_0 : KV_F16;
    sh.delta_k_heads = 1 + fixture_below(rng, 3);
    sh.delta_v_heads = sh.delta_k_heads * (1 + fixture_below(rng, 3));
    sh.delta_dim = 16 * (1 + fixture_below(rng, 3));
    sh.conv_width = 2 + fixture_below(rng, 4);
    sh.n_experts = 3 + fixture_below(rng, 14);
    sh.n_experts_used = 1 + fixture_below(rng, 3);
    sh.expert_ff = 32 * (1 + fixture_below(rng, 3));
    sh.shared_ff = 32 * fixture_below(rng, 3);
    sh.dense_ff = 32 * (1 + fixture_below(rng, 4));
    return sh;
}

static inline int fixture_channels(const struct backend_shape *sh)
{
    return (2 * sh->delta_k_heads + sh->delta_v_heads) * sh->delta_dim;
}

/* ---- weights ---- */

struct fixture_matrix {
    struct weight_desc desc; /* n_in == 0: this model has no such matrix */
    uint8_t *bytes;          /* owned; NULL for a view into another matrix */
    float *values;           /* [n_mats][n_out][n_in], dequantised */
};

static inline void fixture_put_f16(uint8_t *at, double value)
{
    uint16_t half = f32_to_f16((float)value);
    memcpy(at, &half, sizeof half);
}

/* One block of random bits with scales such that its values have a deviation near `spread`. */
static inline void fixture_block(struct fixture_rng *rng, enum block_type type, double spread, uint8_t *out)
{
    const size_t bytes = block_info((uint32_t)type)->bytes;
    const double d = spread * (0.75 + 0.5 * fixture_uniform(rng));
    for (size_t i = 0; i < bytes; i++)
        out[i] = (uint8_t)fixture_next(rng);
    switch (type) {
    case BLOCK_Q4_0:
        fixture_put_f16(out, d / 4.6);
        break;
    case BLOCK_Q4_1:
        fixture_put_f16(out, d / 4.6);
        fixture_put_f16(out + 2, -7.5 * d / 4.6);
        break;
    case BLOCK_Q5_0:
        fixture_put_f16(out, d / 9.2);
        break;
    case BLOCK_Q5_1:
        fixture_put_f16(out, d / 9.2);
        fixture_put_f16(out + 2, -15.5 * d / 9.2);
        break;
    case BLOCK_Q8_0:
        fixture_put_f16(out, d / 74);
        break;
    case BLOCK_Q2_K:
        fixture_put_f16(out + 80, d / 10);
        fixture_put_f16(out + 82, 1.5 * d / 10);
        break;
    case BLOCK_Q3_K:
        fixture_put_f16(out + 108, d / 42);
        break;
    case BLOCK_Q4_K:
        fixture_put_f16(out, d / 250);
        fixture_put_f16(out + 2, 7.5 * d / 250);
        break;
    case BLOCK_Q5_K:
        fixture_put_f16(out, d / 500);
        fixture_put_f16(out + 2, 15.5 * d / 500);
        break;
    case BLOCK_Q6_K:
        fixture_put_f16(out + 208, d / 1300);
        break;
    case BLOCK_IQ4_NL:
        fixture_put_f16(out, d / 70);
        break;
    case BLOCK_IQ4_XS:
        fixture_put_f16(out, d / 1300);
        break;
    case BLOCK_MXFP4:
        out[0] = (uint8_t)(127 + lrint(log2(spread / 3)) + fixture_below(rng, 2));
        break;
    case BLOCK_F16:
        fixture_put_f16(out, spread * fixture_normal(rng));
        break;
    case BLOCK_F32:
    case BLOCK_BF16: {
        const float value = (float)(spread * fixture_normal(rng));
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        if (type == BLOCK_BF16) {
            const uint16_t high = (uint16_t)(bits >> 16);
            memcpy(out, &high, sizeof high);
        } else {
            memcpy(out, &bits, sizeof bits);
        }
        break;
    }
    }
}

/* Dequantises again after a test has changed the bytes. */
static inline void fixture_matrix_refresh(struct fixture_matrix *m)
{
    const struct weight_desc *d = &m->desc;
    const size_t row = block_bytes(d->type, (size_t)d->n_in);
    for (int64_t mat = 0; mat < d->n_mats; mat++)
        for (int64_t o = 0; o < d->n_out; o++)
            block_dequant(d->type, d->data + (size_t)mat * d->stride + (size_t)o * row, m->values + (mat * d->n_out + o) * d->n_in, (size_t)d->n_in);
}

static inline void fixture_matrix_describe(struct fixture_matrix *m, const char *name, enum block_type type, int n_in, int n_out, int n_mats,
                                           const uint8_t *data, size_t stride)
{
    m->desc = (struct weight_desc){.name = name, .type = type, .n_in = n_in, .n_out = n_out, .n_mats = n_mats, .data = data, .stride = stride};
    m->values = malloc((size_t)n_mats * (size_t)n_out * (size_t)n_in * sizeof(float));
    assert_non_null(m->values);
    fixture_matrix_refresh(m);
}

/* n_mats random matrices [n_out][n_in] with values of deviation near `spread`. */
static inline struct fixture_matrix fixture_matrix_new(struct fixture_rng *rng, const char *name, enum block_type type, int n_in, int n_out,
                                                       int n_mats, double spread)
{
    struct fixture_matrix m = {0};
    const struct block_info *info = block_info((uint32_t)type);
    assert_int_equal(n_in % info->values, 0);
    const size_t stride = block_bytes(type, (size_t)n_in) * (size_t)n_out, blocks = stride / info->bytes * (size_t)n_mats;
    m.bytes = malloc(blocks * info->bytes);
    assert_non_null(m.bytes);
    for (size_t i = 0; i < blocks; i++)
        fixture_block(rng, type, spread, m.bytes + i * info->bytes);
    fixture_matrix_describe(&m, name, type, n_in, n_out, n_mats, m.bytes, stride);
    return m;
}

/* A row of F32 values mean + spread * normal: norms, biases, rates. */
static inline struct fixture_matrix fixture_vector_new(struct fixture_rng *rng, const char *name, int n, double mean, double spread)
{
    struct fixture_matrix m = {0};
    const size_t bytes = (size_t)n * sizeof(float);
    m.bytes = malloc(bytes);
    assert_non_null(m.bytes);
    for (int i = 0; i < n; i++) {
        const float value = (float)(mean + spread * fixture_normal(rng));
        memcpy(m.bytes + (size_t)i * sizeof value, &value, sizeof value);
    }
    fixture_matrix_describe(&m, name, BLOCK_F32, n, 1, 1, m.bytes, bytes);
    return m;
}

/* Two views of one fused tensor [n_mats][2 * n_out][n_in]: first half of each matrix `a`, which owns the bytes, second half `b`. */
static inline void fixture_fused_new(struct fixture_rng *rng, enum block_type type, int n_in, int n_out, int n_mats, double spread,
                                     struct fixture_matrix *a, struct fixture_matrix *b)
{
    struct fixture_matrix both = fixture_matrix_new(rng, "fused", type, n_in, 2 * n_out, n_mats, spread);
    const size_t half = block_bytes(type, (size_t)n_in) * (size_t)n_out;
    free(both.values);
    memset(a, 0, sizeof *a);
    memset(b, 0, sizeof *b);
    a->bytes = both.bytes;
    fixture_matrix_describe(a, "fused.gate", type, n_in, n_out, n_mats, both.bytes, 2 * half);
    fixture_matrix_describe(b, "fused.up", type, n_in, n_out, n_mats, both.bytes + half, 2 * half);
}

static inline void fixture_matrix_free(struct fixture_matrix *m)
{
    free(m->bytes);
    free(m->values);
    memset(m, 0, sizeof *m);
}

enum fixture_name {
    FM_EMBD,
    FM_NORM,
    FM_PROJ_0,
    FM_PROJ_1,
    FM_PROJ_2,
    FM_PROJ_3,
    FM_BACK,
    FM_Q_NORM,
    FM_K_NORM,
    FM_CONV,
    FM_DT_BIAS,
    FM_A,
    FM_DELTA_NORM,
    FM_GATE,
    FM_UP,
    FM_DOWN,
    FM_ROUTER,
    FM_EXP_GATE,
    FM_EXP_UP,
    FM_EXP_DOWN,
    FM_SH_ROUTER,
    FM_SH_GATE,
    FM_SH_UP,
    FM_SH_DOWN,
    FM_HEAD,
    FM_ENORM,
    FM_HNORM,
    FM_EH_PROJ,
    FM_COUNT
};

/* One of every weight that an operation takes. */
struct fixture_model {
    struct backend_shape shape;
    struct fixture_matrix m[FM_COUNT];
};

/* `type` is the type of the large matrices; its block must divide n_embd and the ff sizes of the shape. `fused`: the experts' gate and up are
 * views of one tensor. */
static inline struct fixture_model fixture_model_new(struct fixture_rng *rng, const struct backend_shape *sh, enum block_type type, bool fused)
{
    struct fixture_model model = {.shape = *sh};
    struct fixture_matrix *m = model.m;
    const int d = sh->n_embd;
    const double in = 1.0 / sqrt((double)d);
    static const int proj_out[4] = {48, 33, 20, 1};
    m[FM_EMBD] = fixture_matrix_new(rng, "embd", type, d, sh->n_vocab, 1, 1.0);
    m[FM_NORM] = fixture_vector_new(rng, "norm", d, 1.0, 0.2);
    for (int i = 0; i < 4; i++)
        m[FM_PROJ_0 + i] = fixture_matrix_new(rng, "proj", type, d, proj_out[i], 1, in);
    m[FM_BACK] = fixture_matrix_new(rng, "back", type, sh->dense_ff, d, 1, 1.0 / sqrt((double)sh->dense_ff));
    m[FM_Q_NORM] = fixture_vector_new(rng, "q_norm", sh->head_dim, 1.0, 0.2);
    m[FM_K_NORM] = fixture_vector_new(rng, "k_norm", sh->head_dim, 1.0, 0.2);
    if (sh->n_delta_layers > 0) {
        m[FM_CONV] = fixture_matrix_new(rng, "conv", BLOCK_F32, sh->conv_width, fixture_channels(sh), 1, 0.5);
        m[FM_DT_BIAS] = fixture_vector_new(rng, "dt_bias", sh->delta_v_heads, -1.0, 1.0);
        m[FM_A] = fixture_vector_new(rng, "a", sh->delta_v_heads, -0.5, 0.08); /* negative: the sum of twelve never leaves +-6 */
        m[FM_DELTA_NORM] = fixture_vector_new(rng, "delta_norm", sh->delta_dim, 1.0, 0.2);
    }
    m[FM_GATE] = fixture_matrix_new(rng, "gate", type, d, sh->dense_ff, 1, in);
    m[FM_UP] = fixture_matrix_new(rng, "up", type, d, sh->dense_ff, 1, in);
    m[FM_DOWN] = fixture_matrix_new(rng, "down", type, sh->dense_ff, d, 1, 1.0 / sqrt((double)sh->dense_ff));
    if (sh->n_experts > 0) {
        m[FM_ROUTER] = fixture_matrix_new(rng, "router", BLOCK_F32, d, sh->n_experts, 1, 2 * in);
        if (fused) {
            fixture_fused_new(rng, type, d, sh->expert_ff, sh->n_experts, in, &m[FM_EXP_GATE], &m[FM_EXP_UP]);
        } else {
            m[FM_EXP_GATE] = fixture_matrix_new(rng, "gate_exps", type, d, sh->expert_ff, sh->n_experts, in);
            m[FM_EXP_UP] = fixture_matrix_new(rng, "up_exps", type, d, sh->expert_ff, sh->n_experts, in);
        }
        m[FM_EXP_DOWN] = fixture_matrix_new(rng, "down_exps", type, sh->expert_ff, d, sh->n_experts, 1.0 / sqrt((double)sh->expert_ff));
    }
    if (sh->n_experts > 0 && sh->shared_ff > 0) {
        m[FM_SH_ROUTER] = fixture_matrix_new(rng, "shared_router", BLOCK_BF16, d, 1, 1, 2 * in);
        m[FM_SH_GATE] = fixture_matrix_new(rng, "shared_gate", type, d, sh->shared_ff, 1, in);
        m[FM_SH_UP] = fixture_matrix_new(rng, "shared_up", type, d, sh->shared_ff, 1, in);
        m[FM_SH_DOWN] = fixture_matrix_new(rng, "shared_down", type, sh->shared_ff, d, 1, 1.0 / sqrt((double)sh->shared_ff));
    }
    m[FM_HEAD] = fixture_matrix_new(rng, "head", type, d, sh->n_vocab, 1, in);
    m[FM_ENORM] = fixture_vector_new(rng, "enorm", d, 1.0, 0.2);
    m[FM_HNORM] = fixture_vector_new(rng, "hnorm", d, 1.0, 0.2);
    m[FM_EH_PROJ] = fixture_matrix_new(rng, "eh_proj", type, 2 * d, d, 1, 0.7 * in);
    return model;
}

static inline void fixture_model_free(struct fixture_model *model)
{
    for (int i = 0; i < FM_COUNT; i++)
        fixture_matrix_free(&model->m[i]);
}

/* ---- operations ---- */

enum { FIXTURE_BUFFERS = 4, FIXTURE_SEQUENCES = 4 };

enum fixture_op_kind {                 /* inputs -> outputs; "=" marks one that is changed in place */
                       FO_EMBED,       /* (ids) -> [D] */
                       FO_PROJECT,     /* x [D] -> 4 projections */
                       FO_PROJECT_ADD, /* x [dense_ff], h [D] -> =h */
                       FO_ATTN,        /* q, k, v -> =q, out [NH*HD]; the last KV layer */
                       FO_DELTA_CONV,  /* u [CH], beta [HV], alpha [HV] -> qkv [CH], gates [2*HV]; the last DeltaNet layer */
                       FO_DELTA_RULE,  /* qkv, gates, z -> out [HV*S] */
                       FO_DELTA,       /* u, beta, alpha, z -> qkv, gates, out: both, as a layer runs them */
                       FO_MLP,         /* h -> =h */
                       FO_MOE,         /* h -> =h, chosen [used] (int32 bits) */
                       FO_HEAD,        /* h -> hidden [D], logits [V] of every row */
                       FO_MTP_JOIN,    /* embedding, hidden -> h */
                       FO_COUNT
};

struct fixture_op {
    enum fixture_op_kind kind;
    int n_in, n_out;
    size_t in[FIXTURE_BUFFERS], out[FIXTURE_BUFFERS]; /* floats per row */
    int same[FIXTURE_BUFFERS];                        /* output i is input same[i] changed in place; -1: its own buffer */
};

static inline struct fixture_op fixture_op(const struct backend_shape *sh, enum fixture_op_kind kind)
{
    const size_t d = (size_t)sh->n_embd, ch = (size_t)fixture_channels(sh), hv = (size_t)sh->delta_v_heads;
    const size_t v_row = hv * (size_t)sh->delta_dim, q_row = (size_t)sh->n_heads * (size_t)sh->head_dim;
    const size_t kv_row = (size_t)sh->n_kv_heads * (size_t)sh->head_dim;
    switch (kind) {
    case FO_EMBED:
        return (struct fixture_op){kind, 0, 1, {0}, {d}, {-1}};
    case FO_PROJECT:
        return (struct fixture_op){kind, 1, 4, {d}, {48, 33, 20, 1}, {-1, -1, -1, -1}};
    case FO_PROJECT_ADD:
        return (struct fixture_op){kind, 2, 1, {(size_t)sh->dense_ff, d}, {d}, {1}};
    case FO_ATTN:
        return (struct fixture_op){kind,   3, 2, {q_row * (sh->attn_gated ? 2 : 1), kv_row, kv_row}, {q_row * (sh->attn_gated ? 2 : 1), q_row},
                                   {0, -1}};
    case FO_DELTA_CONV:
        return (struct fixture_op){kind, 3, 2, {ch, hv, hv}, {ch, 2 * hv}, {-1, -1}};
    case FO_DELTA_RULE:
        return (struct fixture_op){kind, 3, 1, {ch, 2 * hv, v_row}, {v_row}, {-1}};
    case FO_DELTA:
        return (struct fixture_op){kind, 4, 3, {ch, hv, hv, v_row}, {ch, 2 * hv, v_row}, {-1, -1, -1}};
    case FO_MLP:
        return (struct fixture_op){kind, 1, 1, {d}, {d}, {0}};
    case FO_MOE:
        return (struct fixture_op){kind, 1, 2, {d}, {d, (size_t)sh->n_experts_used}, {0, -1}};
    case FO_HEAD:
        return (struct fixture_op){kind, 1, 2, {d}, {d, (size_t)sh->n_vocab}, {-1, -1}};
    case FO_MTP_JOIN:
        return (struct fixture_op){kind, 2, 1, {d, d}, {d}, {-1}};
    case FO_COUNT:
        break;
    }
    fail_msg("no such operation");
    return (struct fixture_op){0};
}

/* Calls the operation on step buffers. w is indexed by enum fixture_name. */
static inline void fixture_call(struct backend *b, enum fixture_op_kind kind, struct weight *const *w, struct buffer *const *in,
                                struct buffer *const *out, int n_rows)
{
    const struct backend_ops *ops = b->ops;
    const int kv = b->shape.n_kv_layers - 1, delta = b->shape.n_delta_layers - 1;
    switch (kind) {
    case FO_EMBED:
        ops->embed(b, w[FM_EMBD], out[0]);
        break;
    case FO_PROJECT:
        ops->project(b, in[0], w[FM_NORM], 4, &w[FM_PROJ_0], out);
        break;
    case FO_PROJECT_ADD:
        ops->project_add(b, in[0], w[FM_BACK], in[1]);
        break;
    case FO_ATTN:
        ops->attn_store(b, kv, in[0], in[1], in[2], w[FM_Q_NORM], w[FM_K_NORM]);
        ops->attn_mix(b, kv, in[0], out[1]);
        break;
    case FO_DELTA_CONV:
        ops->delta_conv(b, delta, in[0], in[1], in[2], w[FM_CONV], w[FM_DT_BIAS], w[FM_A], out[0], out[1]);
        break;
    case FO_DELTA_RULE:
        ops->delta_rule(b, delta, in[0], in[1], in[2], w[FM_DELTA_NORM], out[0]);
        break;
    case FO_DELTA:
        ops->delta_conv(b, delta, in[0], in[1], in[2], w[FM_CONV], w[FM_DT_BIAS], w[FM_A], out[0], out[1]);
        ops->delta_rule(b, delta, out[0], out[1], in[3], w[FM_DELTA_NORM], out[2]);
        break;
    case FO_MLP:
        ops->mlp(b, in[0], w[FM_NORM], w[FM_GATE], w[FM_UP], w[FM_DOWN]);
        break;
    case FO_MOE: {
        const struct moe_weights moe = {w[FM_ROUTER],    w[FM_EXP_GATE], w[FM_EXP_UP], w[FM_EXP_DOWN],
                                        w[FM_SH_ROUTER], w[FM_SH_GATE],  w[FM_SH_UP],  w[FM_SH_DOWN]};
        ops->moe(b, in[0], w[FM_NORM], &moe, out[1]);
        break;
    }
    case FO_HEAD: {
        int32_t *rows = malloc((size_t)n_rows * sizeof *rows);
        assert_non_null(rows);
        for (int i = 0; i < n_rows; i++)
            rows[i] = i;
        ops->head(b, in[0], w[FM_NORM], w[FM_HEAD], rows, n_rows, out[0], out[1]);
        free(rows);
        break;
    }
    case FO_MTP_JOIN:
        ops->mtp_join(b, in[0], in[1], w[FM_ENORM], w[FM_HNORM], w[FM_EH_PROJ], out[0]);
        break;
    case FO_COUNT:
        fail_msg("no such operation");
    }
}

/* ---- inputs of whole sequences ---- */

struct fixture_data {
    struct fixture_op op;
    int n_seqs, n_tokens[FIXTURE_SEQUENCES];
    int32_t *ids[FIXTURE_SEQUENCES];
    float *in[FIXTURE_SEQUENCES][FIXTURE_BUFFERS]; /* [n_tokens][op.in[i]] */
};

/* delta_rule expects what delta_conv makes: q and k heads of length 1/sqrt(S) and 1, beta in (0, 1), g <= 0. */
static inline void fixture_tame_delta(const struct backend_shape *sh, float *qkv, float *gates, int n_tokens)
{
    const size_t s = (size_t)sh->delta_dim, hk = (size_t)sh->delta_k_heads, hv = (size_t)sh->delta_v_heads;
    for (int t = 0; t < n_tokens; t++, qkv += fixture_channels(sh), gates += 2 * hv) {
        for (size_t h = 0; h < 2 * hk; h++) {
            double squares = 0;
            for (size_t i = 0; i < s; i++)
                squares += (double)qkv[h * s + i] * (double)qkv[h * s + i];
            const double by = (h < hk ? 1.0 / sqrt((double)s) : 1.0) / sqrt(squares);
            for (size_t i = 0; i < s; i++)
                qkv[h * s + i] = (float)((double)qkv[h * s + i] * by);
        }
        for (size_t h = 0; h < hv; h++) {
            gates[h] = (float)(1.0 / (1.0 + exp(-(double)gates[h])));
            gates[hv + h] = -0.2F * gates[hv + h] * gates[hv + h];
        }
    }
}

static inline struct fixture_data fixture_data_new(struct fixture_rng *rng, const struct backend_shape *sh, enum fixture_op_kind kind, int n_seqs,
                                                   const int *n_tokens)
{
    struct fixture_data data = {.op = fixture_op(sh, kind), .n_seqs = n_seqs};
    for (int q = 0; q < n_seqs; q++) {
        const size_t n = (size_t)n_tokens[q];
        data.n_tokens[q] = n_tokens[q];
        data.ids[q] = malloc(n * sizeof(int32_t));
        assert_non_null(data.ids[q]);
        for (size_t t = 0; t < n; t++)
            data.ids[q][t] = fixture_below(rng, sh->n_vocab);
        for (int i = 0; i < data.op.n_in; i++) {
            data.in[q][i] = malloc(n * data.op.in[i] * sizeof(float));
            assert_non_null(data.in[q][i]);
            for (size_t j = 0; j < n * data.op.in[i]; j++)
                data.in[q][i][j] = (float)fixture_normal(rng);
        }
        if (kind == FO_DELTA_RULE)
            fixture_tame_delta(sh, data.in[q][0], data.in[q][1], n_tokens[q]);
    }
    return data;
}

static inline void fixture_data_free(struct fixture_data *data)
{
    for (int q = 0; q < data->n_seqs; q++) {
        free(data->ids[q]);
        for (int i = 0; i < data->op.n_in; i++)
            free(data->in[q][i]);
    }
}

/* ---- a run of one operation on one backend ---- */

typedef struct backend *(*fixture_open)(const struct backend_shape *shape, struct error *err);

struct fixture_run {
    struct backend *b;
    struct weight *w[FM_COUNT];
    const struct fixture_data *data;
    int length[FIXTURE_SEQUENCES];     /* tokens fed so far; a test may lower it to take rows back */
    int32_t *pages[FIXTURE_SEQUENCES]; /* shuffled over the sequences */
    int32_t state[FIXTURE_SEQUENCES];
    float *out[FIXTURE_SEQUENCES][FIXTURE_BUFFERS]; /* [n_tokens][op.out[i]], filled as tokens are fed */
};

/* What one sequence adds to a step. */
struct fixture_part {
    int seq, n;
};

static inline void fixture_upload(struct backend *b, const struct fixture_model *model, struct weight **w)
{
    struct error err = {0};
    for (int i = 0; i < FM_COUNT; i++) {
        w[i] = NULL;
        if (model->m[i].desc.n_in == 0)
            continue;
        w[i] = b->ops->weight_new(b, &model->m[i].desc, &err);
        if (!w[i])
            fail_msg("weight_new: %s", err.text);
    }
}

/* Opens a backend of the model's shape, gives it the weights, and every sequence a reset state and pages in shuffled order. */
static inline struct fixture_run fixture_run_open(fixture_open open, const struct fixture_model *model, const struct fixture_data *data)
{
    struct error err = {0};
    struct fixture_run run = {.data = data};
    struct fixture_rng rng = {7};
    int32_t order[256] = {0};
    int n_pages = 0;
    run.b = open(&model->shape, &err);
    if (!run.b) {
        fail_msg("open: %s", err.text);
        abort(); /* not reached; static checks do not know that fail_msg does not return */
    }
    fixture_upload(run.b, model, run.w);
    for (int q = 0; q < data->n_seqs; q++)
        n_pages += (data->n_tokens[q] + GRID - 1) / GRID;
    assert_in_range(n_pages, 1, 256);
    for (int i = 0; i < n_pages; i++) { /* Fisher-Yates */
        int j = fixture_below(&rng, i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    assert_int_equal(run.b->ops->pages_reserve(run.b, n_pages, &err), 0);
    assert_int_equal(run.b->ops->states_reserve(run.b, data->n_seqs + 1, &err), 0);
    for (int q = 0, page = 0; q < data->n_seqs; q++) {
        const int n = (data->n_tokens[q] + GRID - 1) / GRID;
        run.pages[q] = malloc((size_t)n * sizeof(int32_t));
        assert_non_null(run.pages[q]);
        memcpy(run.pages[q], order + page, (size_t)n * sizeof(int32_t));
        page += n;
        run.state[q] = data->n_seqs - q; /* slot 0 stays free for tests */
        run.b->ops->state_reset(run.b, run.state[q]);
        for (int i = 0; i < data->op.n_out; i++) {
            run.out[q][i] = calloc((size_t)data->n_tokens[q] * data->op.out[i], sizeof(float));
            assert_non_null(run.out[q][i]);
        }
    }
    return run;
}

static inline void fixture_run_close(struct fixture_run *run)
{
    run->b->ops->close(run->b);
    for (int q = 0; q < run->data->n_seqs; q++) {
        free(run->pages[q]);
        for (int i = 0; i < run->data->op.n_out; i++)
            free(run->out[q][i]);
    }
}

/* A buffer of [n_rows][width] floats, all NaN: what an operation should have written and did not shows up. */
static inline struct buffer *fixture_poisoned(struct backend *b, size_t n_rows, size_t width)
{
    struct error err = {0};
    const size_t bytes = n_rows * width * sizeof(float);
    struct buffer *buf = b->ops->buffer_new(b, bytes, &err);
    void *nan = malloc(bytes);
    assert_non_null(buf);
    assert_non_null(nan);
    memset(nan, 0xff, bytes);
    assert_int_equal(b->ops->write(b, buf, 0, nan, bytes, &err), 0);
    free(nan);
    return buf;
}

/* Runs one step with the next tokens of each part's sequence and collects the outputs. The parts' sequences must differ. */
static inline void fixture_step(struct fixture_run *run, const struct fixture_part *parts, int n_parts)
{
    struct backend *b = run->b;
    const struct fixture_data *data = run->data;
    const struct fixture_op *op = &data->op;
    struct error err = {0};
    struct buffer *in[FIXTURE_BUFFERS] = {0}, *out[FIXTURE_BUFFERS] = {0};
    struct span spans[FIXTURE_SEQUENCES];
    int32_t ids[1024];
    int n_rows = 0;
    for (int i = 0; i < n_parts; i++) {
        const int q = parts[i].seq, pos = run->length[q];
        assert_in_range(pos + parts[i].n, 1, data->n_tokens[q]);
        assert_in_range(n_rows + parts[i].n, 1, 1024);
        spans[i] = (struct span){.row = n_rows, .n = parts[i].n, .pos = pos, .pages = run->pages[q], .state = run->state[q]};
        memcpy(ids + n_rows, data->ids[q] + pos, (size_t)parts[i].n * sizeof(int32_t));
        n_rows += parts[i].n;
    }
    for (int i = 0; i < op->n_in; i++) {
        in[i] = fixture_poisoned(b, (size_t)n_rows, op->in[i]);
        for (int s = 0; s < n_parts; s++) {
            const size_t row = op->in[i] * sizeof(float);
            const float *from = data->in[parts[s].seq][i] + (size_t)spans[s].pos * op->in[i];
            assert_int_equal(b->ops->write(b, in[i], (size_t)spans[s].row * row, from, (size_t)parts[s].n * row, &err), 0);
        }
    }
    for (int i = 0; i < op->n_out; i++)
        out[i] = op->same[i] >= 0 ? in[op->same[i]] : fixture_poisoned(b, (size_t)n_rows, op->out[i]);
    b->ops->begin(b, ids, n_rows, spans, n_parts);
    fixture_call(b, op->kind, run->w, in, out, n_rows);
    if (b->ops->sync(b, &err))
        fail_msg("step: %s", err.text);
    for (int i = 0; i < op->n_out; i++) {
        const size_t row = op->out[i] * sizeof(float);
        for (int s = 0; s < n_parts; s++) {
            float *to = run->out[parts[s].seq][i] + (size_t)spans[s].pos * op->out[i];
            assert_int_equal(b->ops->read(b, out[i], (size_t)spans[s].row * row, to, (size_t)parts[s].n * row, &err), 0);
        }
        if (op->same[i] < 0)
            b->ops->buffer_free(b, out[i]);
    }
    for (int i = 0; i < op->n_in; i++)
        b->ops->buffer_free(b, in[i]);
    for (int i = 0; i < n_parts; i++)
        run->length[parts[i].seq] += parts[i].n;
}

/* Feeds the rest of one sequence, up to `end`, in steps of at most `chunk` rows. */
static inline void fixture_feed(struct fixture_run *run, int seq, int end, int chunk)
{
    while (run->length[seq] < end) {
        const int left = end - run->length[seq];
        fixture_step(run, &(struct fixture_part){seq, left < chunk ? left : chunk}, 1);
    }
}

/* Feeds every sequence to its end, one after the other. */
static inline void fixture_feed_all(struct fixture_run *run, int chunk)
{
    for (int q = 0; q < run->data->n_seqs; q++)
        fixture_feed(run, q, run->data->n_tokens[q], chunk);
}

/* Feeds every sequence to its end in steps that mix random numbers of rows of random sequences. */
static inline void fixture_feed_mixed(struct fixture_run *run, struct fixture_rng *rng, int most_rows)
{
    for (;;) {
        struct fixture_part parts[FIXTURE_SEQUENCES];
        int n_parts = 0, unfinished = 0;
        const int first = fixture_below(rng, run->data->n_seqs);
        for (int i = 0; i < run->data->n_seqs; i++) {
            const int q = (first + i) % run->data->n_seqs, left = run->data->n_tokens[q] - run->length[q];
            if (left == 0)
                continue;
            unfinished++;
            if (fixture_below(rng, 4) == 0)
                continue; /* not in this step */
            const int n = 1 + fixture_below(rng, most_rows);
            parts[n_parts++] = (struct fixture_part){q, n < left ? n : left};
        }
        if (!unfinished)
            return;
        if (n_parts)
            fixture_step(run, parts, n_parts);
    }
}

/* Both runs have the same bits in every output of every sequence, up to each sequence's length in `a`. */
static inline void fixture_assert_same_bits(const struct fixture_run *a, const struct fixture_run *b)
{
    const struct fixture_op *op = &a->data->op;
    for (int q = 0; q < a->data->n_seqs; q++)
        for (int i = 0; i < op->n_out; i++)
            for (int t = 0; t < a->length[q]; t++)
                if (memcmp(a->out[q][i] + (size_t)t * op->out[i], b->out[q][i] + (size_t)t * op->out[i], op->out[i] * sizeof(float)) != 0)
                    fail_msg("operation %d: output %d of sequence %d differs at position %d", (int)op->kind, i, q, t);
}

/* |got - want| <= tolerance * (largest |want| of the row) for every value; a NaN fails. */
static inline void fixture_assert_near(const char *what, const float *got, const double *want, size_t n_rows, size_t width, double tolerance)
{
    for (size_t r = 0; r < n_rows; r++) {
        double scale = 1e-6;
        for (size_t i = 0; i < width; i++)
            scale = fmax(scale, fabs(want[r * width + i]));
        for (size_t i = 0; i < width; i++) {
            const double off = fabs((double)got[r * width + i] - want[r * width + i]);
            if (!(off <= tolerance * scale))
                fail_msg("%s: row %zu, value %zu is %.9g, expected %.9g (off by %.3g of %.3g)", what, r, i, (double)got[r * width + i],
                         want[r * width + i], off, scale);
        }
    }
}

/* The same, of what another backend gave. */
static inline void fixture_assert_near_floats(const char *what, const float *got, const float *want, size_t n_rows, size_t width, double tolerance)
{
    double *exact = calloc(n_rows * width + 1, sizeof *exact);
    assert_non_null(exact);
    for (size_t i = 0; i < n_rows * width; i++)
        exact[i] = (double)want[i];
    fixture_assert_near(what, got, exact, n_rows, width, tolerance);
    free(exact);
}

/* ---- states and pages that runs leave behind ---- */

/* All of a sequence's state as floats: M, k, u, g and conv of every layer. Returns their number. */
static inline size_t fixture_state(const struct fixture_run *run, int seq, float **values)
{
    struct error err = {0};
    const int pos = run->length[seq];
    const size_t bytes = run->b->ops->state_packed_bytes(run->b, pos);
    *values = malloc(bytes + 1);
    assert_non_null(*values);
    if (run->b->ops->state_save(run->b, run->state[seq], pos, *values, &err))
        fail_msg("state_save: %s", err.text);
    return bytes / sizeof(float);
}

static inline void fixture_assert_same_states(const struct fixture_run *a, const struct fixture_run *b)
{
    for (int q = 0; q < a->data->n_seqs; q++) {
        float *x, *y;
        const size_t n = fixture_state(a, q, &x);
        assert_int_equal(fixture_state(b, q, &y), n);
        assert_memory_equal(x, y, n * sizeof *x);
        free(x);
        free(y);
    }
}

static inline void fixture_assert_states_near(const struct fixture_run *got, const struct fixture_run *want, double tolerance)
{
    const struct backend_shape *sh = &got->b->shape;
    for (int q = 0; q < got->data->n_seqs; q++) {
        float *a, *b;
        size_t n = fixture_state(got, q, &a);
        assert_int_equal(fixture_state(want, q, &b), n);
        const int history = got->length[q] < sh->conv_width - 1 ? got->length[q] : sh->conv_width - 1;
        if (got->data->op.kind == FO_DELTA_RULE) /* the history is delta_conv's, not written here */
            n -= (size_t)(sh->n_delta_layers * history * fixture_channels(sh));
        fixture_assert_near_floats("state", a, b, 1, n, tolerance);
        free(a);
        free(b);
    }
}

/* How far a stored key may be from channel i of `row`, because it lay between two numbers of its type and was rounded the other way: the next f16 is 1/1024 of
 * it away; in q8_0 the next number is 1/127 of the largest of its 32 away, and the scale may be the next f16 as well. */
static inline double fixture_key_rounding(enum kv_type type, const float *row, size_t i)
{
    double unit = type == KV_F16 ? fabs((double)row[i]) / 1024 : 0;
    for (size_t j = i / 32 * 32; type == KV_Q8_0 && j < i / 32 * 32 + 32; j++)
        unit = fmax(unit, fabs((double)row[j]) / 127 * 1.07);
    return unit;
}

#endif
