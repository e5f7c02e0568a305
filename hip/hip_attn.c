/* The GPU backend's attention: attn_store and attn_mix, spec/qwen35moe.md section 6. How the kernels work: hip/kernels/attn.h.
 *
 * Angles of the rotation are computed here, in double precision, and stay on the device: cos and sin of every position so far, in pieces of
 * ATTN_ROPE_ROWS positions that are made when a step first reaches them.
 *
 * attn_store is done by the launch that makes q, k and v, where that still waits (hip_hold.c). attn_mix is one launch. With few queries over a long context each
 * part of a sequence has its own workgroup, and the last to finish merges them; otherwise a workgroup takes the parts one after the other. The bits are
 * the same. */
#include "hip/hip_impl.h"

#include <math.h>
#include <stdlib.h>

#include "base/alloc.h"
#include "engine/slot_layout.h"

enum {
    FEW_QUERIES = 16,
    MANY_QUERIES = 32,     /* of one workgroup, see attn_kind */
    BUSY_GROUPS = 64,      /* so many workgroups keep the GPU busy without cutting sequences into parts */
    PART_FLOATS = 6 << 20, /* scratch for parts: 24 MiB, decode of 16 heads of 256 channels at 393,216 tokens */
    ROPE_PIECES = 4096,    /* of the table of angles: 4,194,304 positions */
    STORE_WAVES = 4,
};

struct hip_attn {
    float *part_acc, *part_ms; /* device: see struct attn_mix_params */
    size_t part_heads;         /* queries x parts that they have room for */
    int32_t *done;             /* device, [BUSY_GROUPS] */
    int32_t *head_counters;    /* device, [n_heads + 2 * n_kv_heads]; 0 between kernels */
    uint64_t *rope_dev;        /* device, [ROPE_PIECES] */
    float *rope[ROPE_PIECES];  /* device, NULL where not made */
    int n_rope;                /* pieces made, the first ones */
    double *rate;              /* [n_rot / 2] angle per position */
    float *angles;             /* [ATTN_ROPE_ROWS][n_rot], to be sent */
};

static void *attn_scratch(struct hip *h, size_t bytes, struct error *err)
{
    void *p = hip_device_alloc(hip_dev(h), bytes, err);
    if (!p)
        error_prefix(err, "attention: its scratch");
    return p;
}

/* Makes the next piece of the table of angles. 0 or -1. */
static int add_rope_piece(struct hip *h, struct error *err)
{
    struct hip_attn *a = h->attn;
    const size_t n_rot = (size_t)h->base.shape.n_rot, half = n_rot / 2, bytes = ATTN_ROPE_ROWS * n_rot * sizeof(float);
    float *piece = attn_scratch(h, bytes ? bytes : sizeof(float), err);
    if (!piece)
        return -1;
    for (size_t i = 0; i < ATTN_ROPE_ROWS; i++) {
        const double pos = (double)a->n_rope * ATTN_ROPE_ROWS + (double)i;
        for (size_t j = 0; j < half; j++) {
            a->angles[i * n_rot + j] = (float)cos(pos * a->rate[j]);
            a->angles[i * n_rot + half + j] = (float)sin(pos * a->rate[j]);
        }
    }
    const uint64_t address = (uint64_t)(uintptr_t)piece;
    hip_device_write(hip_dev(h), piece, a->angles, bytes);
    hip_device_write(hip_dev(h), a->rope_dev + a->n_rope, &address, sizeof address);
    if (hip_device_failed(hip_dev(h))) { /* it may not be there: the next step that wants it makes it again */
        hip_device_free(hip_dev(h), piece);
        return error_set(err, "%s", hip_device_error(hip_dev(h)));
    }
    a->rope[a->n_rope++] = piece;
    return 0;
}

/* The device's attention is written for these shapes; hip_open_on has checked the rest. */
static int check_heads(const struct backend_shape *sh, struct error *err)
{
    if (sh->head_dim > ATTN_MAX_DIM || sh->head_dim % 16)
        return error_set(err, "attention heads of %d channels: the GPU has kernels for multiples of 16 up to %d: use device cpu", sh->head_dim,
                         ATTN_MAX_DIM);
    return 0;
}

int hip_attn_open(struct hip *h, struct error *err)
{
    const struct backend_shape *sh = &h->base.shape;
    if (sh->n_kv_layers == 0)
        return 0;
    if (check_heads(sh, err))
        return -1;
    struct hip_attn *a = h->attn = alloc_array(1, sizeof *a);
    const size_t half = (size_t)sh->n_rot / 2, n_counters = (size_t)sh->n_heads + 2 * (size_t)sh->n_kv_heads;
    if (!a || !(a->rate = alloc_array(half, sizeof *a->rate)) || !(a->angles = alloc_array(ATTN_ROPE_ROWS * (size_t)sh->n_rot, sizeof *a->angles)))
        return error_set(err, "attention: out of memory for its table of angles");
    for (size_t j = 0; j < half; j++)
        a->rate[j] = pow((double)sh->rope_theta, -2.0 * (double)j / (double)sh->n_rot);
    a->part_heads = PART_FLOATS / (size_t)sh->head_dim;
    if (!(a->part_acc = attn_scratch(h, PART_FLOATS * sizeof(float), err)) ||
        !(a->part_ms = attn_scratch(h, a->part_heads * 2 * sizeof(float), err)) || !(a->done = attn_scratch(h, BUSY_GROUPS * sizeof *a->done, err)) ||
        !(a->head_counters = attn_scratch(h, n_counters * sizeof *a->head_counters, err)) ||
        !(a->rope_dev = attn_scratch(h, ROPE_PIECES * sizeof *a->rope_dev, err)))
        return -1;
    hip_device_zero(hip_dev(h), a->done, BUSY_GROUPS * sizeof *a->done);
    hip_device_zero(hip_dev(h), a->head_counters, n_counters * sizeof *a->head_counters);
    return add_rope_piece(h, err);
}

void hip_attn_close(struct hip *h)
{
    struct hip_attn *a = h->attn;
    if (!a)
        return;
    hip_device_free(hip_dev(h), a->part_acc);
    hip_device_free(hip_dev(h), a->part_ms);
    hip_device_free(hip_dev(h), a->done);
    hip_device_free(hip_dev(h), a->head_counters);
    hip_device_free(hip_dev(h), a->rope_dev);
    for (int i = 0; i < a->n_rope; i++)
        hip_device_free(hip_dev(h), a->rope[i]);
    free(a->rate);
    free(a->angles);
    free(a);
    h->attn = NULL;
}

static int q_head_floats(const struct backend_shape *sh)
{
    return sh->head_dim * (sh->attn_gated ? 2 : 1);
}

static bool check_layer(struct hip *h, int layer)
{
    if (layer >= 0 && layer < h->base.shape.n_kv_layers)
        return true;
    hip_device_fail(hip_dev(h), "attention: KV layer %d is outside the model's %d", layer, h->base.shape.n_kv_layers);
    return false;
}

/* Angles up to the step's last position. */
static bool has_angles(struct hip *h)
{
    struct error err = {""};
    int last = 0;
    for (int i = 0; i < h->step.n_spans; i++)
        if (h->spans[i].pos + h->spans[i].n - 1 > last)
            last = h->spans[i].pos + h->spans[i].n - 1;
    if (last / ATTN_ROPE_ROWS >= ROPE_PIECES) {
        hip_device_fail(hip_dev(h), "attention: position %d is beyond the %d that there are angles for", last, ROPE_PIECES * ATTN_ROPE_ROWS);
        return false;
    }
    while (h->attn->n_rope <= last / ATTN_ROPE_ROWS)
        if (add_rope_piece(h, &err)) {
            hip_device_fail(hip_dev(h), "%s", err.text);
            return false;
        }
    return true;
}

static bool is_product(const struct matvec_item *item, const float *y, int n_out)
{
    return item->y == y && item->n_out == n_out;
}

void hip_attn_store(struct backend *b, int layer, struct buffer *q, struct buffer *k, struct buffer *v, struct weight *q_norm, struct weight *k_norm)
{
    struct hip *h = hip_of(b);
    const struct backend_shape *sh = &b->shape;
    if (!hip_ready(h) || !check_layer(h, layer))
        return;
    const size_t rows = (size_t)h->step.n_rows, kv_width = (size_t)sh->n_kv_heads * (size_t)sh->head_dim;
    if (!hip_has(h, "attn_store: q", q, rows, (size_t)sh->n_heads * (size_t)q_head_floats(sh)) || !hip_has(h, "attn_store: k", k, rows, kv_width) ||
        !hip_has(h, "attn_store: v", v, rows, kv_width) || !hip_values(h, "attn_store: q_norm", q_norm, sh->head_dim, 1) ||
        !hip_values(h, "attn_store: k_norm", k_norm, sh->head_dim, 1) || !has_angles(h))
        return;
    const size_t units = rows * (size_t)(sh->n_heads + sh->n_kv_heads);
    const struct attn_store_params p = {
        .step = h->step,
        .q = q->dev,
        .k = k->dev,
        .v = v->dev,
        .q_norm = hip_values_of(q_norm),
        .k_norm = hip_values_of(k_norm),
        .rope = h->attn->rope_dev,
        .k_offset = slot_page_offset(sh, layer, false, 0),
        .v_offset = slot_page_offset(sh, layer, true, 0),
        .head_bytes = (uint32_t)(GRID * slot_kv_row_bytes(sh)),
        .row_bytes = (uint32_t)slot_kv_row_bytes(sh),
        .n_heads = sh->n_heads,
        .n_kv_heads = sh->n_kv_heads,
        .head_dim = sh->head_dim,
        .n_rot = sh->n_rot,
        .q_stride = q_head_floats(sh),
        .q8 = sh->kv_type == KV_Q8_0,
        .eps = sh->norm_eps,
    };
    if (rows <= GPU_HEAD_ROWS) { /* the launch that makes q, k and v can do it */
        struct matvec_params *m = hip_held_params(h, (enum hip_kernel)(K_matvec_1 + (int)(rows - 1)));
        if (m && m->products.n_items == 3 && is_product(&m->products.item[0], p.q, p.n_heads * p.q_stride) &&
            is_product(&m->products.item[1], p.k, (int)kv_width) && is_product(&m->products.item[2], p.v, (int)kv_width)) {
            m->heads = p;
            m->head_counters = h->attn->head_counters;
            hip_hold_send(h);
            return;
        }
    }
    HIP_LAUNCH(hip_dev(h), attn_store, (unsigned)((units + STORE_WAVES - 1) / STORE_WAVES), 1, 1, p);
}

/* [head size 256, 128, other][f16, q8_0][few, many queries]; other sizes are rare and need no second kernel. */
static enum hip_kernel mix_kernel(const struct backend_shape *sh, bool many)
{
    static const enum hip_kernel kernels[3][2][2] = {{{K_attn_few_256, K_attn_many_256}, {K_attn_few_256_q8, K_attn_many_256_q8}},
                                                     {{K_attn_few_128, K_attn_many_128}, {K_attn_few_128_q8, K_attn_many_128_q8}},
                                                     {{K_attn_any, K_attn_any}, {K_attn_any_q8, K_attn_any_q8}}};
    const int size = sh->head_dim == 256 ? 0 : sh->head_dim == 128 ? 1 : 2;
    return kernels[size][sh->kv_type == KV_Q8_0][many];
}

static size_t count_blocks(const struct hip *h, size_t group, size_t queries)
{
    size_t blocks = 0;
    for (int i = 0; i < h->step.n_spans; i++)
        blocks += ((size_t)h->spans[i].n * group + queries - 1) / queries;
    return blocks;
}

void hip_attn_mix(struct backend *b, int layer, struct buffer *q, struct buffer *out)
{
    struct hip *h = hip_of(b);
    const struct backend_shape *sh = &b->shape;
    if (!hip_ready(h) || !check_layer(h, layer))
        return;
    const size_t rows = (size_t)h->step.n_rows, heads = (size_t)sh->n_heads, kv_heads = (size_t)sh->n_kv_heads, group = heads / kv_heads;
    if (!hip_has(h, "attn_mix: q", q, rows, heads * (size_t)q_head_floats(sh)) ||
        !hip_has(h, "attn_mix: out", out, rows, heads * (size_t)sh->head_dim))
        return;
    bool many = false;
    int parts = 0;
    for (int i = 0; i < h->step.n_spans; i++) {
        const int mine = (h->spans[i].pos + h->spans[i].n - 1) / ATTN_PART + 1;
        parts = mine > parts ? mine : parts;
        many |= (size_t)h->spans[i].n * group > FEW_QUERIES;
    }
    many &= sh->head_dim == 256 || sh->head_dim == 128;
    const size_t blocks = count_blocks(h, group, many ? MANY_QUERIES : FEW_QUERIES);
    if (parts == 1 || blocks * kv_heads > BUSY_GROUPS || rows * heads * (size_t)parts > h->attn->part_heads)
        parts = 0;
    const struct attn_mix_params p = {
        .step = h->step,
        .q = q->dev,
        .out = out->dev,
        .part_acc = h->attn->part_acc,
        .part_ms = h->attn->part_ms,
        .done = h->attn->done,
        .k_offset = slot_page_offset(sh, layer, false, 0),
        .v_offset = slot_page_offset(sh, layer, true, 0),
        .head_bytes = (uint32_t)(GRID * slot_kv_row_bytes(sh)),
        .row_bytes = (uint32_t)slot_kv_row_bytes(sh),
        .n_heads = sh->n_heads,
        .n_kv_heads = sh->n_kv_heads,
        .group = (int32_t)group,
        .head_dim = sh->head_dim,
        .q_stride = q_head_floats(sh),
        .gated = sh->attn_gated,
        .scale = (float)((double)sh->attn_scale / M_LN2),
        .parts = parts,
        .tail = {.act = {.x = out->dev, .n = sh->n_heads * sh->head_dim}, .rows = h->step.n_rows, .members = (int32_t)(blocks * kv_heads)},
    };
    const unsigned gy = (unsigned)kv_heads, gz = parts ? (unsigned)parts : 1;
    if (sh->head_dim == 256 || sh->head_dim == 128)
        hip_hold(h, mix_kernel(sh, many), (unsigned)blocks, gy, gz, &p, sizeof p, &p.tail);
    else /* attn_any makes no forms */
        hip_device_launch(hip_dev(h), mix_kernel(sh, many), (unsigned)blocks, gy, gz, &p, sizeof p);
}
