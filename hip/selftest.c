/* The self-test: every operation, with every weight type and both KV types, on random data against the CPU backend. It runs whenever a GPU is opened, so that a
 * broken compiler, driver or chip is found before it answers anybody.
 *
 * Both backends run the same steps: a prompt longer than a grid cell beside a short one, then steps of one to eight rows. After every operation the
 * results are compared, and the GPU goes on with the CPU's, so that an error is told by the operation that made it. Every other step of few rows,
 * and with f32, which every file has, each of them, compares after several operations, whose launches are then joined as in a real step (hip_hold.c). */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "engine/slot_layout.h"
#include "hip/hip_impl.h"

enum { D = 256, V = 320, FF = 256, EXPERTS = 4, USED = 2, WHOLE = 256 };
enum { LONG = 70, SHORT = 3, MOST_ROWS = LONG + SHORT, SEQUENCES = 2, MOST_PAGES = 2, STEPS = 10 };

/* Rows that each sequence adds in each step: one sum for each of the products of few rows, and one for those of many. Most steps of a server have one row: that is
 * compared both ways with every type. */
static const int rows_of[STEPS][SEQUENCES] = {{LONG, SHORT}, {1, 0}, {1, 0}, {1, 1}, {1, 2}, {2, 2}, {1, 4}, {3, 3}, {6, 1}, {4, 4}};

/* Differences allowed, as a part of a row's largest value. Where an activation lies between two steps of its quantisation, the last bit of a norm decides which it
 * takes; that is one part in a hundred at most. A wrong nibble or scale is far more. */
#define NEAR_F32   1e-3
#define NEAR_QUANT 2e-2

enum buffer_name {
    B_X,
    B_NORMED,
    B_H,
    B_Q,
    B_K,
    B_V,
    B_MIX,
    B_U,
    B_Z,
    B_BETA,
    B_ALPHA,
    B_QKV,
    B_GATES,
    B_DELTA,
    B_CHOSEN,
    B_LOGITS,
    B_JOINED,
    B_COUNT
};

enum weight_name {
    W_EMBD,
    W_NORM,
    W_Q,
    W_K,
    W_V,
    W_Q_NORM,
    W_K_NORM,
    W_O,
    W_U,
    W_Z,
    W_BETA,
    W_ALPHA,
    W_CONV,
    W_DT_BIAS,
    W_A,
    W_DELTA_NORM,
    W_OUT,
    W_GATE,
    W_UP,
    W_DOWN,
    W_ROUTER,
    W_EXP_GATE,
    W_EXP_UP,
    W_EXP_DOWN,
    W_SH_ROUTER,
    W_SH_GATE,
    W_SH_UP,
    W_SH_DOWN,
    W_EH_PROJ,
    W_COUNT,
};

/* One backend with its weights and buffers. */
struct side {
    struct backend *b;
    struct weight *w[W_COUNT];
    struct buffer *buf[B_COUNT];
};

struct test {
    struct backend_shape shape;
    enum block_type type;
    const char *arch;
    uint64_t random;
    struct side cpu, gpu;
    int channels, inner;         /* of DeltaNet: CH and HV*S */
    size_t width[B_COUNT];       /* values of a row */
    struct buffer *usable, *top; /* of head_top */
    uint8_t *bytes[W_COUNT];
    float *want, *got; /* [MOST_ROWS][widest] */
    int length[SEQUENCES];
    int n_rows, step, variant;
    bool joined; /* this step compares after several operations */
};

/* ---- random weights ---- */

static uint32_t next_random(struct test *t) /* xorshift64*, Vigna */
{
    t->random ^= t->random >> 12;
    t->random ^= t->random << 25;
    t->random ^= t->random >> 27;
    return (uint32_t)(t->random * UINT64_C(0x2545F4914F6CDD1D) >> 32);
}

static float uniform(struct test *t, float from, float to)
{
    return from + (to - from) * (float)(next_random(t) >> 8) / 16777216.0F;
}

static void put_f16(uint8_t *at, float value)
{
    const uint16_t half = f32_to_f16(value);
    memcpy(at, &half, sizeof half);
}

/* One block, of values of about +-0.1. The bits of integers are random; scales are chosen so that the values are of that size. */
static void random_block(struct test *t, enum block_type type, uint8_t *out)
{
    const struct block_info *info = block_info((uint32_t)type);
    const float value = uniform(t, -0.1F, 0.1F), scale = uniform(t, 0.7F, 1.3F);
    uint32_t bits;
    for (int i = 0; i < info->bytes; i++)
        out[i] = (uint8_t)next_random(t);
    switch (type) {
    case BLOCK_F32:
        memcpy(out, &value, sizeof value);
        break;
    case BLOCK_F16:
        put_f16(out, value);
        break;
    case BLOCK_BF16:
        memcpy(&bits, &value, sizeof bits);
        out[0] = (uint8_t)(bits >> 16);
        out[1] = (uint8_t)(bits >> 24);
        break;
    case BLOCK_Q4_0: /* d * (q - 8) */
        put_f16(out, 0.012F * scale);
        break;
    case BLOCK_Q8_0: /* d * q */
        put_f16(out, 0.0008F * scale);
        break;
    case BLOCK_Q4_K: /* d * sc * q - dmin * m, q up to 15, sc and m up to 63 */
        put_f16(out, 0.0004F * scale);
        put_f16(out + 2, 0.003F * scale);
        break;
    case BLOCK_Q5_K: /* q up to 31 */
        put_f16(out, 0.0002F * scale);
        put_f16(out + 2, 0.003F * scale);
        break;
    case BLOCK_Q6_K: /* d * sc * (q - 32), q up to 63, sc of either sign */
        put_f16(out + 208, 0.0001F * scale);
        break;
    default:
        break;
    }
}

static int make_weight(struct test *t, enum weight_name i, const char *name, enum block_type type, int n_in, int n_out, int n_mats, struct error *err)
{
    const size_t values = block_info((uint32_t)type)->values, block = block_bytes(type, values);
    const size_t blocks = (size_t)n_in / values * (size_t)n_out * (size_t)n_mats;
    t->bytes[i] = alloc_array(blocks, block);
    if (!t->bytes[i])
        return error_set(err, "out of memory for the GPU's self-test");
    for (size_t k = 0; k < blocks; k++)
        random_block(t, type, t->bytes[i] + k * block);
    const struct weight_desc desc = {.name = name,
                                     .type = type,
                                     .n_in = n_in,
                                     .n_out = n_out,
                                     .n_mats = n_mats,
                                     .data = t->bytes[i],
                                     .stride = block_bytes(type, (size_t)n_in) * (size_t)n_out};
    t->cpu.w[i] = t->cpu.b->ops->weight_new(t->cpu.b, &desc, err);
    t->gpu.w[i] = t->cpu.w[i] ? t->gpu.b->ops->weight_new(t->gpu.b, &desc, err) : NULL;
    return t->gpu.w[i] ? 0 : -1;
}

/* n values in [from, to]. */
static int make_vector(struct test *t, enum weight_name i, const char *name, int n_in, int n_out, float from, float to, struct error *err)
{
    const size_t n = (size_t)n_in * (size_t)n_out;
    float *values = alloc_array(n, sizeof *values);
    if (!values)
        return error_set(err, "out of memory for the GPU's self-test");
    t->bytes[i] = (uint8_t *)values;
    for (size_t k = 0; k < n; k++)
        values[k] = uniform(t, from, to);
    const struct weight_desc desc = {.name = name, .type = BLOCK_F32, .n_in = n_in, .n_out = n_out, .n_mats = 1, .data = t->bytes[i]};
    t->cpu.w[i] = t->cpu.b->ops->weight_new(t->cpu.b, &desc, err);
    t->gpu.w[i] = t->cpu.w[i] ? t->gpu.b->ops->weight_new(t->gpu.b, &desc, err) : NULL;
    return t->gpu.w[i] ? 0 : -1;
}

static int make_weights(struct test *t, struct error *err)
{
    const struct backend_shape *s = &t->shape;
    const enum block_type type = t->type;
    const int mix = s->n_heads * s->head_dim, kv = s->n_kv_heads * s->head_dim;
    return make_weight(t, W_EMBD, "embedding", type, D, V, 1, err) || make_vector(t, W_NORM, "norm", D, 1, 0.5F, 1.5F, err) ||
                   make_weight(t, W_Q, "q", type, D, s->attn_gated ? 2 * mix : mix, 1, err) || make_weight(t, W_K, "k", type, D, kv, 1, err) ||
                   make_weight(t, W_V, "v", type, D, kv, 1, err) || make_vector(t, W_Q_NORM, "q norm", s->head_dim, 1, 0.5F, 1.5F, err) ||
                   make_vector(t, W_K_NORM, "k norm", s->head_dim, 1, 0.5F, 1.5F, err) || make_weight(t, W_O, "o", type, mix, D, 1, err) ||
                   make_weight(t, W_U, "qkv", type, D, t->channels, 1, err) || make_weight(t, W_Z, "z", type, D, t->inner, 1, err) ||
                   make_weight(t, W_BETA, "beta", type, D, s->delta_v_heads, 1, err) ||
                   make_weight(t, W_ALPHA, "alpha", type, D, s->delta_v_heads, 1, err) ||
                   make_vector(t, W_CONV, "taps", s->conv_width, t->channels, -0.7F, 0.7F, err) ||
                   make_vector(t, W_DT_BIAS, "dt bias", s->delta_v_heads, 1, -1.0F, 1.0F, err) ||
                   make_vector(t, W_A, "a", s->delta_v_heads, 1, -0.6F, -0.1F, err) ||
                   make_vector(t, W_DELTA_NORM, "delta norm", s->delta_dim, 1, 0.5F, 1.5F, err) ||
                   make_weight(t, W_OUT, "out", type, t->inner, D, 1, err) || make_weight(t, W_GATE, "gate", type, D, FF, 1, err) ||
                   make_weight(t, W_UP, "up", type, D, FF, 1, err) || make_weight(t, W_DOWN, "down", type, FF, D, 1, err) ||
                   make_vector(t, W_ROUTER, "router", D, EXPERTS, -0.3F, 0.3F, err) ||
                   make_weight(t, W_EXP_GATE, "expert gate", type, D, FF, EXPERTS, err) ||
                   make_weight(t, W_EXP_UP, "expert up", type, D, FF, EXPERTS, err) ||
                   make_weight(t, W_EXP_DOWN, "expert down", type, FF, D, EXPERTS, err) ||
                   make_vector(t, W_SH_ROUTER, "shared router", D, 1, -0.1F, 0.1F, err) ||
                   make_weight(t, W_SH_GATE, "shared gate", type, D, FF, 1, err) || make_weight(t, W_SH_UP, "shared up", type, D, FF, 1, err) ||
                   make_weight(t, W_SH_DOWN, "shared down", type, FF, D, 1, err) || make_weight(t, W_EH_PROJ, "eh projection", type, 2 * D, D, 1, err)
               ? -1
               : 0;
}

/* ---- comparing ---- */

static bool is_integer(enum block_type type)
{
    return type != BLOCK_F32 && type != BLOCK_F16 && type != BLOCK_BF16;
}

static int differs(const struct test *t, const char *operation, const char *what, size_t row, size_t i, double got, double want, struct error *err)
{
    return error_set(err,
                     "the GPU's self-test failed on %s: %s (%s) with %s weights and %s KV gives %.7g where the CPU gives %.7g (step %d, row %zu, "
                     "value %zu); this GPU, its "
                     "driver or this build cannot be trusted: use device cpu",
                     t->arch, operation, what, block_info((uint32_t)t->type)->name, t->shape.kv_type == KV_F16 ? "f16" : "q8_0", got, want, t->step,
                     row, i);
}

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static int compare(const struct test *t, const char *operation, const char *what, const float *got, const float *want, size_t rows, size_t width,
                   double near, struct error *err)
{
    for (size_t r = 0; r < rows; r++) {
        const float *g = got + r * width, *w = want + r * width;
        double most = 1e-3; /* rows of nearly nothing */
        for (size_t i = 0; i < width; i++)
            most = fmax(most, fabs((double)w[i]));
        for (size_t i = 0; i < width; i++)
            if (!(fabs((double)g[i] - (double)w[i]) <= near * most) && bits_of(g[i]) != bits_of(w[i]))
                return differs(t, operation, what, r, i, (double)g[i], (double)w[i], err);
    }
    return 0;
}

/* Compares a buffer of both sides, and gives the GPU the CPU's values to go on with. near 0: bit for bit. */
static int check(struct test *t, const char *operation, const char *what, enum buffer_name i, double near, struct error *err)
{
    const size_t width = t->width[i], n = (size_t)t->n_rows * width, bytes = n * sizeof(float);
    if (t->cpu.b->ops->read(t->cpu.b, t->cpu.buf[i], 0, t->want, bytes, err) || t->gpu.b->ops->read(t->gpu.b, t->gpu.buf[i], 0, t->got, bytes, err))
        return error_prefix(err, "the GPU's self-test on %s: %s", t->arch, operation);
    for (size_t k = 0; near == 0 && k < n; k++)
        if (bits_of(t->got[k]) != bits_of(t->want[k]))
            return differs(t, operation, what, k / width, k % width, (double)t->got[k], (double)t->want[k], err);
    if (near > 0 && compare(t, operation, what, t->got, t->want, (size_t)t->n_rows, width, near, err))
        return -1;
    return t->gpu.b->ops->write(t->gpu.b, t->gpu.buf[i], 0, t->want, bytes, err);
}

/* The same random rows for both. */
static int fill(struct test *t, enum buffer_name i, struct error *err)
{
    const size_t n = (size_t)t->n_rows * t->width[i];
    for (size_t k = 0; k < n; k++)
        t->want[k] = uniform(t, -1.0F, 1.0F);
    return t->cpu.b->ops->write(t->cpu.b, t->cpu.buf[i], 0, t->want, n * sizeof(float), err) ||
                   t->gpu.b->ops->write(t->gpu.b, t->gpu.buf[i], 0, t->want, n * sizeof(float), err)
               ? -1
               : 0;
}

/* ---- the operations ---- */

#define BOTH(call)                                                                                                                                   \
    do {                                                                                                                                             \
        struct side *s = &t->cpu;                                                                                                                    \
        s->b->ops->call;                                                                                                                             \
        s = &t->gpu;                                                                                                                                 \
        s->b->ops->call;                                                                                                                             \
    } while (0)

static int run_attention(struct test *t, double near, double exact, struct error *err)
{
    BOTH(project(s->b, s->buf[B_H], s->w[W_NORM], 3, (struct weight *[]){s->w[W_Q], s->w[W_K], s->w[W_V]},
                 (struct buffer *[]){s->buf[B_Q], s->buf[B_K], s->buf[B_V]}));
    if (!t->joined &&
        (check(t, "project", "q", B_Q, near, err) || check(t, "project", "k", B_K, near, err) || check(t, "project", "v", B_V, near, err)))
        return -1;
    BOTH(attn_store(s->b, 0, s->buf[B_Q], s->buf[B_K], s->buf[B_V], s->w[W_Q_NORM], s->w[W_K_NORM]));
    if (!t->joined && check(t, "attn_store", "q", B_Q, NEAR_F32, err))
        return -1;
    BOTH(attn_mix(s->b, 0, s->buf[B_Q], s->buf[B_MIX]));
    const double near_mix = t->shape.kv_type == KV_F16 ? 5 * NEAR_F32 : NEAR_QUANT;
    if (!t->joined && check(t, "attn_mix", "out", B_MIX, near_mix, err))
        return -1;
    BOTH(project_add(s->b, s->buf[B_MIX], s->w[W_O], s->buf[B_H]));
    if (t->joined)
        return check(t, "project, attn_store, attn_mix, project_add", "q", B_Q, fmax(near, NEAR_F32), err) ||
                       check(t, "project, attn_store, attn_mix, project_add", "v", B_V, near, err) ||
                       check(t, "project, attn_store, attn_mix, project_add", "out", B_MIX, fmax(near, near_mix), err) ||
                       check(t, "project, attn_store, attn_mix, project_add", "h", B_H, NEAR_QUANT, err)
                   ? -1
                   : 0;
    return check(t, "project_add", "h", B_H, exact, err);
}

static int run_delta(struct test *t, double near, double exact, struct error *err)
{
    BOTH(project(s->b, s->buf[B_H], s->w[W_NORM], 4, (struct weight *[]){s->w[W_U], s->w[W_Z], s->w[W_BETA], s->w[W_ALPHA]},
                 (struct buffer *[]){s->buf[B_U], s->buf[B_Z], s->buf[B_BETA], s->buf[B_ALPHA]}));
    if (check(t, "project", "qkv", B_U, near, err) || check(t, "project", "z", B_Z, near, err) || check(t, "project", "beta", B_BETA, near, err) ||
        check(t, "project", "alpha", B_ALPHA, near, err))
        return -1;
    BOTH(delta_conv(s->b, 0, s->buf[B_U], s->buf[B_BETA], s->buf[B_ALPHA], s->w[W_CONV], s->w[W_DT_BIAS], s->w[W_A], s->buf[B_QKV], s->buf[B_GATES]));
    if (!t->joined && (check(t, "delta_conv", "qkv", B_QKV, NEAR_F32, err) || check(t, "delta_conv", "gates", B_GATES, NEAR_F32, err)))
        return -1;
    BOTH(delta_rule(s->b, 0, s->buf[B_QKV], s->buf[B_GATES], s->buf[B_Z], s->w[W_DELTA_NORM], s->buf[B_DELTA]));
    if (!t->joined && check(t, "delta_rule", "out", B_DELTA, 5 * NEAR_F32, err))
        return -1;
    BOTH(project_add(s->b, s->buf[B_DELTA], s->w[W_OUT], s->buf[B_H]));
    if (t->joined)
        return check(t, "delta_conv, delta_rule, project_add", "qkv", B_QKV, NEAR_F32, err) ||
                       check(t, "delta_conv, delta_rule, project_add", "gates", B_GATES, NEAR_F32, err) ||
                       check(t, "delta_conv, delta_rule, project_add", "out", B_DELTA, 5 * NEAR_F32, err) ||
                       check(t, "delta_conv, delta_rule, project_add", "h", B_H, NEAR_QUANT, err)
                   ? -1
                   : 0;
    return check(t, "project_add", "h", B_H, exact, err);
}

static void moe(struct side *s)
{
    const struct moe_weights w = {
        .router = s->w[W_ROUTER],
        .gate = s->w[W_EXP_GATE],
        .up = s->w[W_EXP_UP],
        .down = s->w[W_EXP_DOWN],
        .shared_router = s->w[W_SH_ROUTER],
        .shared_gate = s->w[W_SH_GATE],
        .shared_up = s->w[W_SH_UP],
        .shared_down = s->w[W_SH_DOWN],
    };
    s->b->ops->moe(s->b, s->buf[B_H], s->w[W_NORM], &w, s->buf[B_CHOSEN]);
}

/* The best of every row of logits, which the CPU has no operation for. Ids with a remainder of 1 by 5 do not count. */
static int run_top(struct test *t, struct error *err)
{
    enum { K = 12 };
    uint32_t usable[(V + 31) / 32] = {0};
    struct top_row *rows = alloc_array((size_t)t->n_rows, sizeof *rows);
    struct backend *b = t->gpu.b;
    for (int id = 0; id < V; id++)
        usable[id / 32] |= (uint32_t)(id % 5 != 1) << id % 32;
    int rc = rows ? b->ops->write(b, t->usable, 0, usable, sizeof usable, err) : error_set(err, "out of memory for the GPU's self-test");
    if (rc == 0) {
        b->ops->head_top(b, t->gpu.buf[B_LOGITS], t->n_rows, K, t->usable, t->top);
        rc = b->ops->read(b, t->top, 0, rows, (size_t)t->n_rows * sizeof *rows, err);
    }
    for (int r = 0; rc == 0 && r < t->n_rows; r++) {
        const float *logits = t->want + (size_t)r * V; /* left there by check() */
        bool taken[V] = {false};
        for (int k = 0; rc == 0 && k < K; k++) {
            int best = -1;
            for (int id = 0; id < V; id++)
                if (id % 5 != 1 && !taken[id] && (best < 0 || logits[id] > logits[best]))
                    best = id;
            taken[best] = true;
            if (rows[r].n != K || rows[r].top[k].id != best || bits_of(rows[r].top[k].logit) != bits_of(logits[best]))
                rc = differs(t, "head_top", "the best", (size_t)r, (size_t)k, (double)rows[r].top[k].logit, (double)logits[best], err);
        }
        double sum = 0;
        for (int id = 0; id < V; id++)
            sum += id % 5 != 1 ? exp((double)logits[id] - (double)rows[r].max) : 0;
        if (rc == 0 && (bits_of(rows[r].max) != bits_of(rows[r].top[0].logit) || !(fabs((double)rows[r].sum - sum) <= NEAR_F32 * sum)))
            rc = differs(t, "head_top", "sum", (size_t)r, 0, (double)rows[r].sum, sum, err);
    }
    free(rows);
    return rc;
}

/* What a layer's end and the next one's start are to each other. */
static int run_joined(struct test *t, double near, struct error *err)
{
    BOTH(project_add(s->b, s->buf[B_DELTA], s->w[W_OUT], s->buf[B_H]));
    moe(&t->cpu);
    moe(&t->gpu);
    BOTH(project(s->b, s->buf[B_H], s->w[W_NORM], 3, (struct weight *[]){s->w[W_Q], s->w[W_K], s->w[W_V]},
                 (struct buffer *[]){s->buf[B_Q], s->buf[B_K], s->buf[B_V]}));
    if (check(t, "project_add, moe, project", "experts", B_CHOSEN, 0, err) || check(t, "project_add, moe, project", "h", B_H, near, err) ||
        check(t, "project_add, moe, project", "q", B_Q, near, err) || check(t, "project_add, moe, project", "v", B_V, near, err))
        return -1;
    BOTH(project_add(s->b, s->buf[B_MIX], s->w[W_O], s->buf[B_H]));
    BOTH(mlp(s->b, s->buf[B_H], s->w[W_NORM], s->w[W_GATE], s->w[W_UP], s->w[W_DOWN]));
    BOTH(project(s->b, s->buf[B_H], s->w[W_NORM], 2, (struct weight *[]){s->w[W_U], s->w[W_Z]}, (struct buffer *[]){s->buf[B_U], s->buf[B_Z]}));
    return check(t, "project_add, mlp, project", "h", B_H, near, err) || check(t, "project_add, mlp, project", "qkv", B_U, near, err) ? -1 : 0;
}

static int run_rest(struct test *t, double near, struct error *err)
{
    int32_t rows[MOST_ROWS];
    for (int i = 0; i < t->n_rows; i++)
        rows[i] = i;
    BOTH(mlp(s->b, s->buf[B_H], s->w[W_NORM], s->w[W_GATE], s->w[W_UP], s->w[W_DOWN]));
    if (check(t, "mlp", "h", B_H, near, err))
        return -1;
    moe(&t->cpu);
    moe(&t->gpu);
    if (check(t, "moe", "experts", B_CHOSEN, 0, err) || check(t, "moe", "h", B_H, near, err))
        return -1;
    BOTH(head(s->b, s->buf[B_H], s->w[W_NORM], s->w[W_EMBD], rows, t->n_rows, s->buf[B_NORMED], s->buf[B_LOGITS]));
    if (check(t, "head", "hidden", B_NORMED, NEAR_F32, err) || check(t, "head", "logits", B_LOGITS, near, err) || run_top(t, err))
        return -1;
    BOTH(mtp_join(s->b, s->buf[B_X], s->buf[B_NORMED], s->w[W_NORM], s->w[W_NORM], s->w[W_EH_PROJ], s->buf[B_JOINED]));
    return check(t, "mtp_join", "h", B_JOINED, near, err);
}

static int run_step(struct test *t, struct error *err)
{
    static const int32_t pages[SEQUENCES][MOST_PAGES] = {{2, 0}, {1, 3}};
    int32_t ids[MOST_ROWS];
    struct span spans[SEQUENCES];
    const double near = is_integer(t->type) ? NEAR_QUANT : NEAR_F32;
    int n_spans = 0;
    t->n_rows = 0;
    for (int q = 0; q < SEQUENCES; q++) {
        const int n = rows_of[t->step][q];
        if (n == 0)
            continue;
        spans[n_spans++] = (struct span){.row = t->n_rows, .n = n, .pos = t->length[q], .pages = pages[q], .state = SEQUENCES - 1 - q};
        t->n_rows += n;
        t->length[q] += n;
    }
    for (int i = 0; i < t->n_rows; i++)
        ids[i] = (int32_t)(next_random(t) % V);
    t->joined = t->n_rows <= GPU_TAIL_ROWS && (t->type == BLOCK_F32 || (t->step + t->variant) % 2);
    BOTH(begin(s->b, ids, t->n_rows, spans, n_spans));
    if (fill(t, B_H, err))
        return -1;
    BOTH(embed(s->b, s->w[W_EMBD], s->buf[B_X]));
    if (check(t, "embed", "rows", B_X, 1e-6, err) || run_attention(t, near, is_integer(t->type) ? 0 : NEAR_F32, err) ||
        run_delta(t, near, is_integer(t->type) ? 0 : NEAR_F32, err) || (t->joined && run_joined(t, near, err)) || run_rest(t, near, err))
        return -1;
    return t->gpu.b->ops->sync(t->gpu.b, err);
}

/* What the steps left in pages and states. */
static int check_left_behind(struct test *t, struct error *err)
{
    const size_t page_bytes = slot_page_bytes(&t->shape), values = page_bytes / slot_kv_row_bytes(&t->shape) * (size_t)t->shape.head_dim;
    const int pos = t->length[0];
    const size_t state_bytes = slot_packed_bytes(&t->shape, pos), state_floats = state_bytes / sizeof(float);
    const size_t room = state_floats > values ? state_floats : values;
    uint8_t *image = alloc_array(page_bytes, 1);
    float *want = alloc_array(room, sizeof *want), *got = alloc_array(room, sizeof *got);
    const enum block_type format = slot_kv_format(&t->shape);
    int rc = image && want && got ? 0 : error_set(err, "out of memory for the GPU's self-test");
    if (rc == 0)
        rc = t->cpu.b->ops->page_save(t->cpu.b, 2, image, err);
    if (rc == 0) {
        block_dequant(format, image, want, values);
        rc = t->gpu.b->ops->page_save(t->gpu.b, 2, image, err);
    }
    if (rc == 0) {
        block_dequant(format, image, got, values);
        rc = compare(t, "attn_store", "keys and values", got, want, values / (size_t)t->shape.head_dim, (size_t)t->shape.head_dim, NEAR_QUANT, err);
    }
    if (rc == 0 &&
        (t->cpu.b->ops->state_save(t->cpu.b, SEQUENCES - 1, pos, want, err) || t->gpu.b->ops->state_save(t->gpu.b, SEQUENCES - 1, pos, got, err)))
        rc = -1;
    if (rc == 0)
        rc = compare(t, "delta_rule", "state", got, want, 1, state_floats, 5 * NEAR_F32, err);
    free(image);
    free(want);
    free(got);
    return rc;
}

/* ---- one weight type ---- */

/* How many heads of this size make rows of whole blocks of every type. */
static int heads_of(int size)
{
    int a = size, b = WHOLE;
    while (b) {
        const int rest = a % b;
        a = b;
        b = rest;
    }
    return WHOLE / a > 2 ? WHOLE / a : 2;
}

/* The heads and the KV type of `like`, where there is one; otherwise every size that has kernels of its own, and one that has not, in turn. */
static struct backend_shape shape_for(int variant, const struct backend_shape *like)
{
    static const int head_dims[] = {256, 128, 256, 128, 64, 64, 256, 128};
    const bool attention = like && like->n_kv_layers > 0, delta = like && like->n_delta_layers > 0;
    const int head_dim = attention ? like->head_dim : head_dims[variant], delta_dim = delta ? like->delta_dim : head_dim == 64 ? 64 : 128;
    const int heads = heads_of(head_dim), delta_heads = heads_of(delta_dim);
    return (struct backend_shape){
        .n_embd = D,
        .n_vocab = V,
        .norm_eps = 1e-6F,
        .n_heads = heads,
        .n_kv_heads = heads / 2,
        .head_dim = head_dim,
        .n_rot = attention         ? like->n_rot
                 : head_dim == 256 ? 64
                                   : head_dim,
        .rope_theta = attention ? like->rope_theta : 1e6F,
        .attn_scale = 1.0F / sqrtf((float)head_dim),
        .attn_gated = attention ? like->attn_gated : true,
        .n_kv_layers = 1,
        .n_delta_layers = 1,
        .delta_k_heads = delta_heads / 2,
        .delta_v_heads = delta_heads,
        .delta_dim = delta_dim,
        .conv_width = delta ? like->conv_width : 4,
        .n_experts = EXPERTS,
        .n_experts_used = USED,
        .expert_ff = FF,
        .shared_ff = FF,
        .dense_ff = FF,
        .kv_type = attention                        ? like->kv_type
                   : variant / 2 % 2 == variant % 2 ? KV_F16
                                                    : KV_Q8_0,
        .max_rows = MOST_ROWS,
        .max_logit_rows = MOST_ROWS,
    };
}

static int make_buffers(struct test *t, struct error *err)
{
    const struct backend_shape *s = &t->shape;
    const size_t mix = (size_t)(s->n_heads * s->head_dim), kv = (size_t)(s->n_kv_heads * s->head_dim), hv = (size_t)s->delta_v_heads;
    const size_t ch = (size_t)t->channels, inner = (size_t)t->inner;
    const size_t width[B_COUNT] = {[B_X] = D,          [B_NORMED] = D,    [B_H] = D,         [B_Q] = s->attn_gated ? 2 * mix : mix,
                                   [B_K] = kv,         [B_V] = kv,        [B_MIX] = mix,     [B_U] = ch,
                                   [B_Z] = inner,      [B_BETA] = hv,     [B_ALPHA] = hv,    [B_QKV] = ch,
                                   [B_GATES] = 2 * hv, [B_DELTA] = inner, [B_CHOSEN] = USED, [B_LOGITS] = V,
                                   [B_JOINED] = D};
    size_t widest = 0;
    for (int i = 0; i < B_COUNT; i++) {
        t->width[i] = width[i];
        widest = width[i] > widest ? width[i] : widest;
        const size_t bytes = MOST_ROWS * width[i] * sizeof(float);
        if (!(t->cpu.buf[i] = t->cpu.b->ops->buffer_new(t->cpu.b, bytes, err)) || !(t->gpu.buf[i] = t->gpu.b->ops->buffer_new(t->gpu.b, bytes, err)))
            return -1;
    }
    if (!(t->usable = t->gpu.b->ops->buffer_new(t->gpu.b, V / 8 + 8, err)) ||
        !(t->top = t->gpu.b->ops->buffer_new(t->gpu.b, MOST_ROWS * sizeof(struct top_row), err)))
        return -1;
    t->want = alloc_array(MOST_ROWS * widest, sizeof *t->want);
    t->got = alloc_array(MOST_ROWS * widest, sizeof *t->got);
    return t->want && t->got ? 0 : error_set(err, "out of memory for the GPU's self-test");
}

static int make_slots(struct side *s, struct error *err)
{
    if (s->b->ops->pages_reserve(s->b, SEQUENCES * MOST_PAGES, err) || s->b->ops->states_reserve(s->b, SEQUENCES, err))
        return -1;
    for (int q = 0; q < SEQUENCES; q++)
        s->b->ops->state_reset(s->b, q);
    return 0;
}

static int run_type(struct hip_device *d, enum block_type type, int variant, const struct backend_shape *like, struct error *err)
{
    struct test t = {.shape = shape_for(variant, like), .type = type, .random = 88172645463325252u + (uint64_t)variant, .variant = variant};
    const char *arch = hip_device_info(d)->arch;
    t.inner = t.shape.delta_v_heads * t.shape.delta_dim;
    t.channels = 2 * t.shape.delta_k_heads * t.shape.delta_dim + t.inner;
    t.arch = arch[0] ? arch : "the GPU";
    int rc = -1;
    if (!(t.cpu.b = backend_open_cpu(&t.shape, 0, err)) || !(t.gpu.b = hip_open_on(d, &t.shape, err)))
        goto done;
    if (make_buffers(&t, err) || make_weights(&t, err) || make_slots(&t.cpu, err) || make_slots(&t.gpu, err))
        goto done;
    rc = 0;
    for (t.step = 0; rc == 0 && t.step < STEPS; t.step++)
        rc = run_step(&t, err);
    if (rc == 0)
        rc = check_left_behind(&t, err);
done:
    if (t.gpu.b)
        t.gpu.b->ops->close(t.gpu.b);
    if (t.cpu.b)
        t.cpu.b->ops->close(t.cpu.b);
    for (int i = 0; i < W_COUNT; i++)
        free(t.bytes[i]);
    free(t.want);
    free(t.got);
    return rc;
}

int hip_selftest(struct hip_device *d, uint64_t wanted, const struct backend_shape *like, struct error *err)
{
    static const enum block_type types[] = {BLOCK_Q4_K, BLOCK_Q6_K, BLOCK_Q5_K, BLOCK_Q8_0, BLOCK_Q4_0, BLOCK_F16, BLOCK_BF16, BLOCK_F32};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if ((wanted == 0 || (wanted >> types[i] & 1)) && run_type(d, types[i], (int)i, like, err))
            return -1;
    return 0;
}
