/* The HIP backend's gated DeltaNet, spec/qwen35moe.md section 7: checks and launches. The arithmetic is in hip/kernels/delta_conv.h and delta.h. */
#include "hip/hip_impl.h"

#include <math.h>

#include "engine/slot_layout.h"

/* What the kernels count on, and cannot include the headers for. */
_Static_assert((int)GPU_GRID == (int)GRID, "hip/kernels/params.h and engine/backend.h");
enum { CONV_HEADS = 4, CONV_ROWS = 16, DIM_MAX = 256, WIDTH_MAX = 16 }; /* hip/kernels/delta_conv.h */
_Static_assert(CONV_ROWS >= WIDTH_MAX - 1, "the wave with a span's first rows reads all of the history that the span needs");

struct sizes {
    size_t hk, hv, s, channels;
};

static struct sizes sizes_of(const struct hip *h)
{
    const struct backend_shape *sh = &h->base.shape;
    const size_t hk = (size_t)sh->delta_k_heads, hv = (size_t)sh->delta_v_heads, s = (size_t)sh->delta_dim;
    return (struct sizes){hk, hv, s, (2 * hk + hv) * s};
}

int hip_delta_check(const struct backend_shape *sh, struct error *err)
{
    if (sh->n_delta_layers == 0)
        return 0;
    if (sh->delta_dim < 16 || sh->delta_dim > DIM_MAX || sh->delta_dim % 16 != 0)
        return error_set(err, "the GPU's DeltaNet kernels take heads of 16, 32 .. %d channels, and this model's have %d: use device cpu", DIM_MAX,
                         sh->delta_dim);
    if (sh->conv_width < 2 || sh->conv_width > WIDTH_MAX)
        return error_set(err, "the GPU's DeltaNet kernels take convolutions of 2 .. %d taps, and this model's have %d: use device cpu", WIDTH_MAX,
                         sh->conv_width);
    return 0;
}

static bool check_layer(struct hip *h, int layer)
{
    if (layer >= 0 && layer < h->base.shape.n_delta_layers)
        return true;
    hip_device_fail(hip_dev(h), "DeltaNet: layer %d is outside the model's %d", layer, h->base.shape.n_delta_layers);
    return false;
}

/* Every span of the step has one row: decode without drafts. */
static bool single_rows(const struct hip *h)
{
    for (int i = 0; i < h->step.n_spans; i++)
        if (h->spans[i].n != 1)
            return false;
    return true;
}

/* ---- delta_conv ---- */

void hip_delta_conv(struct backend *b, int layer, struct buffer *u, struct buffer *beta_raw, struct buffer *alpha_raw, struct weight *conv,
                    struct weight *dt_bias, struct weight *a, struct buffer *qkv, struct buffer *gates)
{
    struct hip *h = hip_of(b);
    const struct backend_shape *sh = &b->shape;
    const struct sizes d = sizes_of(h);
    const size_t rows = (size_t)h->step.n_rows;
    if (!hip_ready(h) || !check_layer(h, layer) || !hip_has(h, "delta_conv: u", u, rows, d.channels) ||
        !hip_has(h, "delta_conv: beta", beta_raw, rows, d.hv) || !hip_has(h, "delta_conv: alpha", alpha_raw, rows, d.hv) ||
        !hip_has(h, "delta_conv: qkv", qkv, rows, d.channels) || !hip_has(h, "delta_conv: gates", gates, rows, 2 * d.hv) ||
        !hip_values(h, "delta_conv: conv", conv, sh->conv_width, (int64_t)d.channels) ||
        !hip_values(h, "delta_conv: dt_bias", dt_bias, sh->delta_v_heads, 1) || !hip_values(h, "delta_conv: a", a, sh->delta_v_heads, 1))
        return;
    const struct slot_layer at = slot_layer(sh, layer);
    const struct delta_conv_params p = {.step = h->step,
                                        .u = u->dev,
                                        .beta_raw = beta_raw->dev,
                                        .alpha_raw = alpha_raw->dev,
                                        .conv = hip_values_of(conv),
                                        .dt_bias = hip_values_of(dt_bias),
                                        .a = hip_values_of(a),
                                        .qkv = qkv->dev,
                                        .gates = gates->dev,
                                        .ring_at = at.conv,
                                        .ring = slot_ring(sh),
                                        .width = sh->conv_width,
                                        .k_heads = sh->delta_k_heads,
                                        .v_heads = sh->delta_v_heads,
                                        .dim = sh->delta_dim,
                                        .channels = (int32_t)d.channels,
                                        .conv_stride = (int32_t)(conv->gpu.row_stride / sizeof(float)),
                                        .eps = sh->norm_eps,
                                        .q_scale = 1.0f / sqrtf((float)sh->delta_dim)};
    int longest = 0;
    for (int i = 0; i < h->step.n_spans; i++)
        longest = h->spans[i].n > longest ? h->spans[i].n : longest;
    const unsigned heads = (unsigned)(2 * sh->delta_k_heads + sh->delta_v_heads);
    const unsigned groups = (heads + CONV_HEADS - 1) / CONV_HEADS, chunks = ((unsigned)longest + CONV_ROWS - 1) / CONV_ROWS;
    if (single_rows(h)) /* delta_rule may do it */
        hip_hold(h, K_delta_conv, groups, chunks, (unsigned)h->step.n_spans, &p, sizeof p, NULL);
    else
        HIP_LAUNCH(hip_dev(h), delta_conv, groups, chunks, (unsigned)h->step.n_spans, p);
}

/* ---- delta_rule ---- */

/* The delta_conv that waits is of the same layer, makes what is read here, and nothing that it reads is overwritten by another workgroup. */
static bool makes_input(const struct delta_conv_params *conv, const struct delta_rule_params *rule, uint64_t ring_at)
{
    return conv->qkv == rule->qkv && conv->gates == rule->gates && conv->ring_at == ring_at && rule->out != conv->u && rule->out != conv->beta_raw &&
           rule->out != conv->alpha_raw && conv->qkv != conv->u && conv->gates != conv->beta_raw && conv->gates != conv->alpha_raw;
}

void hip_delta_rule(struct backend *b, int layer, struct buffer *qkv, struct buffer *gates, struct buffer *z, struct weight *norm, struct buffer *out)
{
    struct hip *h = hip_of(b);
    const struct backend_shape *sh = &b->shape;
    const struct sizes d = sizes_of(h);
    const size_t rows = (size_t)h->step.n_rows, v_row = d.hv * d.s;
    if (!hip_ready(h) || !check_layer(h, layer) || !hip_has(h, "delta_rule: qkv", qkv, rows, d.channels) ||
        !hip_has(h, "delta_rule: gates", gates, rows, 2 * d.hv) || !hip_has(h, "delta_rule: z", z, rows, v_row) ||
        !hip_has(h, "delta_rule: out", out, rows, v_row) || !hip_values(h, "delta_rule: norm", norm, sh->delta_dim, 1))
        return;
    const struct slot_layer at = slot_layer(sh, layer);
    const struct delta_rule_params p = {
        .step = h->step,
        .qkv = qkv->dev,
        .gates = gates->dev,
        .z = z->dev,
        .norm = hip_values_of(norm),
        .out = out->dev,
        .m_at = at.m,
        .k_at = at.k,
        .u_at = at.u,
        .g_at = at.g,
        .k_heads = sh->delta_k_heads,
        .v_heads = sh->delta_v_heads,
        .dim = sh->delta_dim,
        .eps = sh->norm_eps,
        .tail = {.act = {.x = out->dev, .n = (int32_t)v_row}, .rows = h->step.n_rows, .members = sh->delta_v_heads * h->step.n_spans}};
    const bool wide = sh->delta_dim == 128;
    const unsigned heads = (unsigned)sh->delta_v_heads, spans = (unsigned)h->step.n_spans;
    const struct delta_conv_params *conv = hip_held_params(h, K_delta_conv);
    if (conv && makes_input(conv, &p, at.conv)) {
        const struct delta_step_params both = {.rule = p, .conv = *conv};
        hip_hold_drop(h);
        hip_hold(h, wide ? K_delta_step_128 : K_delta_step, heads, spans, 1, &both, sizeof both, &both.rule.tail);
        return;
    }
    bool crosses = false; /* a span that goes on into another grid cell: its keys are kept when no head reads the old ones any more */
    for (int i = 0; i < h->step.n_spans; i++)
        crosses |= h->spans[i].pos % GRID + h->spans[i].n > GRID;
    hip_hold(h, wide ? K_delta_rule_128 : K_delta_rule, heads, spans, 1, &p, sizeof p, &p.tail);
    if (crosses)
        HIP_LAUNCH(hip_dev(h), delta_keep, GRID, spans, 1, p);
}
