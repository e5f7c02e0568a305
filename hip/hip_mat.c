/* The GPU backend's products with weight matrices, and the operations that are little more than that. Kernels: act.h, matvec.h, head.h. */
#include "hip/hip_impl.h"

#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"

enum {
    MATVEC_ROWS = 8,   /* most activation rows of a mat-vec kernel */
    MATVEC_GROUP = 16, /* weight rows of its workgroup */
    TOP_ROWS = 16,     /* rows of logits whose candidates have room at once */
    TOP_WAVES = 8,     /* waves of a workgroup of top_part */
    KINDS = 3,
};

_Static_assert((int)GPU_F32 == BLOCK_F32 && (int)GPU_F16 == BLOCK_F16 && (int)GPU_BF16 == BLOCK_BF16, "params.h names the types of blocks.h");
_Static_assert((int)GPU_Q4_0 == BLOCK_Q4_0 && (int)GPU_Q8_0 == BLOCK_Q8_0, "params.h names the types of blocks.h");
_Static_assert((int)GPU_Q4_K == BLOCK_Q4_K && (int)GPU_Q5_K == BLOCK_Q5_K && (int)GPU_Q6_K == BLOCK_Q6_K, "params.h names the types of blocks.h");

/* Device memory that lives as long as the backend. The queue is in order, so an operation may write over what the one before it read. */
struct hip_mat {
    int width;                  /* values of the widest activation row */
    void *act[KINDS];           /* [max_rows] rows in each form */
    float *joined;              /* [max_rows][2 * D]; mtp_join */
    float *gate, *up;           /* [max_rows][dense_ff] */
    int32_t *rows;              /* [max_logit_rows] */
    int parts;                  /* of a row of logits; 0: the vocabulary is too large for hip_top */
    uint64_t *keys;             /* [TOP_ROWS][parts][GPU_TOP_MAX] */
    float *part_max, *part_sum; /* [TOP_ROWS][parts] */
};

/* ---- scratch ---- */

static int larger(int a, int b)
{
    return a > b ? a : b;
}

/* Room for n * width values of `size` bytes; n and width are below 2^31, a row below 2^20 values. */
static void *room(struct hip *h, size_t n, size_t width, size_t size, struct error *err)
{
    const size_t bytes = n * width * size;
    void *p = hip_device_alloc(hip_dev(h), bytes ? bytes : 1, err);
    if (!p)
        error_prefix(err, "scratch of the products");
    return p;
}

int hip_mat_open(struct hip *h, struct error *err)
{
    const struct backend_shape *sh = &h->base.shape;
    const size_t rows = (size_t)sh->max_rows, logit_rows = (size_t)larger(sh->max_logit_rows, 1);
    struct hip_mat *m = h->mat = alloc_array(1, sizeof *m);
    if (!m)
        return error_set(err, "out of memory for the GPU backend");
    int width = 2 * sh->n_embd; /* mtp_join */
    if (sh->n_kv_layers > 0)
        width = larger(width, sh->n_heads * sh->head_dim);
    if (sh->n_delta_layers > 0)
        width = larger(width, sh->delta_v_heads * sh->delta_dim);
    width = larger(width, sh->dense_ff);
    m->width = (width + 255) / 256 * 256;
    for (int kind = 0; kind < KINDS; kind++)
        if (!(m->act[kind] = room(h, rows, hip_act_row_bytes((enum hip_act)kind, m->width), 1, err)))
            return -1;
    if (!(m->joined = room(h, rows, 2 * (size_t)sh->n_embd, sizeof(float), err)) || !(m->rows = room(h, logit_rows, 1, sizeof *m->rows, err)))
        return -1;
    if (sh->dense_ff > 0 &&
        (!(m->gate = room(h, rows, (size_t)sh->dense_ff, sizeof(float), err)) || !(m->up = room(h, rows, (size_t)sh->dense_ff, sizeof(float), err))))
        return -1;
    const int parts = (sh->n_vocab + GPU_TOP_PART - 1) / GPU_TOP_PART;
    if (parts < 1 || parts > GPU_TOP_PARTS)
        return 0;
    m->parts = parts;
    if (!(m->keys = room(h, TOP_ROWS * (size_t)parts, GPU_TOP_MAX, sizeof *m->keys, err)) ||
        !(m->part_max = room(h, TOP_ROWS, (size_t)parts, sizeof(float), err)) ||
        !(m->part_sum = room(h, TOP_ROWS, (size_t)parts, sizeof(float), err)))
        return -1;
    return 0;
}

void hip_mat_close(struct hip *h)
{
    struct hip_mat *m = h->mat;
    if (!m)
        return;
    for (int kind = 0; kind < KINDS; kind++)
        hip_device_free(hip_dev(h), m->act[kind]);
    hip_device_free(hip_dev(h), m->joined);
    hip_device_free(hip_dev(h), m->gate);
    hip_device_free(hip_dev(h), m->up);
    hip_device_free(hip_dev(h), m->rows);
    hip_device_free(hip_dev(h), m->keys);
    hip_device_free(hip_dev(h), m->part_max);
    hip_device_free(hip_dev(h), m->part_sum);
    free(m);
    h->mat = NULL;
}

/* ---- activations ---- */

enum hip_act hip_act_of(enum block_type weight_type)
{
    switch (weight_type) {
    case BLOCK_Q4_K:
    case BLOCK_Q5_K:
    case BLOCK_Q6_K:
        return HIP_ACT_Q8_256;
    case BLOCK_Q8_0:
    case BLOCK_Q4_0:
        return HIP_ACT_Q8_32;
    default:
        return HIP_ACT_F32;
    }
}

static size_t lines(size_t bytes)
{
    return (bytes + 63) & ~(size_t)63;
}

size_t hip_act_row_bytes(enum hip_act kind, int n)
{
    const size_t values = (size_t)n;
    switch (kind) {
    case HIP_ACT_Q8_256:
        return values / 256 * 320;
    case HIP_ACT_Q8_32:
        return lines(values) + 2 * lines(values / 32 * 4);
    default:
        return lines(values * 4);
    }
}

static unsigned kind_bit(const struct weight *w)
{
    return 1U << hip_act_for(w);
}

void hip_act_to(struct act_params *p, enum hip_act kind, void *dst)
{
    switch (kind) {
    case HIP_ACT_F32:
        p->f32 = dst;
        break;
    case HIP_ACT_Q8_32:
        p->q8_32 = dst;
        break;
    case HIP_ACT_Q8_256:
        p->q8_256 = dst;
        break;
    }
}

/* Queues the forms of `kinds` into this file's scratch. */
static void activate(struct hip *h, struct act_params *p, int n_rows, unsigned kinds)
{
    struct hip_mat *m = h->mat;
    p->eps = h->base.shape.norm_eps;
    for (int kind = 0; kind < KINDS; kind++)
        if (kinds & 1U << kind)
            hip_act_to(p, (enum hip_act)kind, m->act[kind]);
    hip_act(h, p, n_rows);
}

void hip_quantise(struct hip *h, enum hip_act kind, const float *x, const float *up, int n_rows, int n, void *dst)
{
    struct act_params p = {.x = x, .up = up, .n = n};
    hip_act_to(&p, kind, dst);
    hip_act(h, &p, n_rows);
}

/* ---- products ---- */

/* One product of a launch: y [n_rows][n_out] (+)= w * act. */
struct product {
    const struct weight *w;
    const void *act;
    float *y;
    bool add;
};

/* Up to four products with the same rows, in one launch where there are few rows. */
static void products(struct hip *h, const struct product *list, int n, int n_rows)
{
    static const enum hip_kernel kernels[MATVEC_ROWS + 1] = {K_COUNT,    K_matvec_1, K_matvec_2, K_matvec_3, K_matvec_4,
                                                             K_matvec_5, K_matvec_6, K_matvec_7, K_matvec_8};
    if (n_rows < 1)
        return;
    if (n_rows > MATVEC_ROWS) {
        for (int i = 0; i < n; i++)
            hip_tile(h, list[i].w, list[i].act, n_rows, list[i].y, list[i].add);
        return;
    }
    struct matvec_params p = {.products.n_items = n};
    uint32_t groups = 0;
    for (int i = 0; i < n; i++) {
        const struct gpu_matrix *w = &list[i].w->gpu;
        const size_t x_stride = hip_act_row_bytes(hip_act_for(list[i].w), w->n_in);
        if (w->row_stride > UINT32_MAX / 4 || x_stride > UINT32_MAX / MATVEC_ROWS) { /* the kernels' offsets in rows have 32 bits */
            hip_device_fail(hip_dev(h), "weight %s: rows of %d values are too long for the GPU's kernels", list[i].w->name, w->n_in);
            return;
        }
        p.products.item[i] = (struct matvec_item){.w = w->data,
                                                  .x = list[i].act,
                                                  .y = list[i].y,
                                                  .row_stride = (uint32_t)w->row_stride,
                                                  .x_stride = (uint32_t)x_stride,
                                                  .type = w->type,
                                                  .n_in = w->n_in,
                                                  .n_out = w->n_out,
                                                  .add = list[i].add,
                                                  .first_group = groups};
        groups += ((uint32_t)w->n_out + MATVEC_GROUP - 1) / MATVEC_GROUP; /* below 2^27 each */
    }
    p.tail = (struct act_tail){.act = {.x = list[0].y, .n = list[0].w->gpu.n_out}, .rows = n_rows, .members = (int32_t)groups};
    hip_hold(h, kernels[n_rows], groups, 1, 1, &p, sizeof p, n == 1 ? &p.tail : NULL);
}

void hip_product(struct hip *h, const struct weight *w, const void *act, int n_rows, float *y, bool add)
{
    products(h, &(struct product){w, act, y, add}, 1, n_rows);
}

/* A product with rows that `activate` has left in this file's scratch. */
static struct product with_scratch(struct hip *h, const struct weight *w, float *y, bool add)
{
    return (struct product){w, h->mat->act[hip_act_for(w)], y, add};
}

/* ---- operations ---- */

void hip_embed(struct backend *b, struct weight *w, struct buffer *out)
{
    struct hip *h = hip_of(b);
    if (!hip_ready(h) || !hip_fits(h, "embed", w, b->shape.n_embd, b->shape.n_vocab, 1) ||
        !hip_has(h, "embed", out, (size_t)h->step.n_rows, (size_t)b->shape.n_embd))
        return;
    const struct embed_params p = {.w = w->gpu, .ids = h->step.ids, .out = out->dev};
    HIP_LAUNCH(hip_dev(h), embed, (unsigned)h->step.n_rows, 1, 1, p);
}

void hip_project(struct backend *b, struct buffer *x, struct weight *norm, int n, struct weight *const w[], struct buffer *const out[])
{
    struct hip *h = hip_of(b);
    const int rows = h->step.n_rows, dim = b->shape.n_embd;
    struct product list[4];
    unsigned kinds = 0;
    if (!hip_ready(h) || !hip_has(h, "project: x", x, (size_t)rows, (size_t)dim))
        return;
    if (n < 1 || n > 4) {
        hip_device_fail(hip_dev(h), "project: %d matrices, but 1 to 4 go together", n);
        return;
    }
    if (!hip_values(h, "project: norm", norm, dim, 1))
        return;
    for (int i = 0; i < n; i++) {
        if (!hip_fits(h, "project", w[i], dim, 0, 1) || !hip_has(h, "project: out", out[i], (size_t)rows, (size_t)w[i]->gpu.n_out))
            return;
        kinds |= kind_bit(w[i]);
        list[i] = with_scratch(h, w[i], out[i]->dev, false);
    }
    struct act_params p = {.x = x->dev, .norm = hip_values_of(norm), .n = dim};
    activate(h, &p, rows, kinds);
    products(h, list, n, rows);
}

void hip_project_add(struct backend *b, struct buffer *x, struct weight *w, struct buffer *h)
{
    struct hip *hip = hip_of(b);
    const int rows = hip->step.n_rows;
    if (!hip_ready(hip) || !hip_fits(hip, "project_add", w, 0, 0, 1) || !hip_has(hip, "project_add: x", x, (size_t)rows, (size_t)w->gpu.n_in) ||
        !hip_has(hip, "project_add: h", h, (size_t)rows, (size_t)w->gpu.n_out))
        return;
    if (w->gpu.n_in > hip->mat->width) {
        hip_device_fail(hip_dev(hip), "project_add: weight %s has rows of %d values, more than any of this model's shape", w->name, w->gpu.n_in);
        return;
    }
    struct act_params p = {.x = x->dev, .n = w->gpu.n_in};
    activate(hip, &p, rows, kind_bit(w));
    products(hip, &(struct product){w, hip->mat->act[hip_act_for(w)], h->dev, true}, 1, rows);
}

void hip_mlp(struct backend *b, struct buffer *h, struct weight *norm, struct weight *gate, struct weight *up, struct weight *down)
{
    struct hip *hip = hip_of(b);
    struct hip_mat *m = hip->mat;
    const int rows = hip->step.n_rows, dim = b->shape.n_embd, ff = b->shape.dense_ff;
    if (!hip_ready(hip) || !hip_has(hip, "mlp: h", h, (size_t)rows, (size_t)dim) || !hip_fits(hip, "mlp: gate", gate, dim, ff, 1) ||
        !hip_fits(hip, "mlp: up", up, dim, ff, 1) || !hip_fits(hip, "mlp: down", down, ff, dim, 1) || !hip_values(hip, "mlp: norm", norm, dim, 1))
        return;
    if (ff < 1) {
        hip_device_fail(hip_dev(hip), "mlp: weight %s, but the model's shape has no dense MLP", gate->name);
        return;
    }
    struct act_params in = {.x = h->dev, .norm = hip_values_of(norm), .n = dim};
    activate(hip, &in, rows, kind_bit(gate) | kind_bit(up));
    const struct product two[2] = {with_scratch(hip, gate, m->gate, false), with_scratch(hip, up, m->up, false)};
    products(hip, two, 2, rows);
    struct act_params middle = {.x = m->gate, .up = m->up, .n = ff};
    activate(hip, &middle, rows, kind_bit(down));
    const struct product back = with_scratch(hip, down, h->dev, true);
    products(hip, &back, 1, rows);
}

/* True when rows [n] are neighbours in order: all of a step's, or a prompt's last one. */
static bool neighbours(const int32_t *rows, int n)
{
    for (int i = 1; i < n; i++)
        if (rows[i] != rows[0] + i)
            return false;
    return true;
}

void hip_head(struct backend *b, struct buffer *h, struct weight *norm, struct weight *w, const int32_t *rows, int n, struct buffer *hidden,
              struct buffer *logits)
{
    struct hip *hip = hip_of(b);
    const int all = hip->step.n_rows, dim = b->shape.n_embd;
    if (!hip_ready(hip) || !hip_has(hip, "head: h", h, (size_t)all, (size_t)dim))
        return;
    if (n < 0 || n > b->shape.max_logit_rows || n > b->shape.max_rows) {
        hip_device_fail(hip_dev(hip), "head: %d rows of logits, but at most %d fit", n, b->shape.max_logit_rows);
        return;
    }
    for (int i = 0; i < n; i++) {
        if (rows[i] >= 0 && rows[i] < all)
            continue;
        hip_device_fail(hip_dev(hip), "head: row %d is outside the step's %d", rows[i], all);
        return;
    }
    if (!hip_values(hip, "head: norm", norm, dim, 1) || (hidden && !hip_has(hip, "head: hidden", hidden, (size_t)all, (size_t)dim)))
        return;
    if (n > 0 && (!hip_fits(hip, "head", w, dim, b->shape.n_vocab, 1) || !hip_has(hip, "head: logits", logits, (size_t)n, (size_t)b->shape.n_vocab)))
        return;
    if (hidden) {
        struct act_params p = {.x = h->dev, .norm = hip_values_of(norm), .normed = hidden->dev, .normed_stride = (uint32_t)dim, .n = dim};
        activate(hip, &p, all, 0);
    }
    if (n == 0)
        return;
    struct act_params p = {.x = hidden ? hidden->dev : h->dev, .norm = hidden ? NULL : hip_values_of(norm), .n = dim};
    if (neighbours(rows, n)) { /* nothing to send in mid-step */
        p.x += (size_t)rows[0] * (size_t)dim;
    } else {
        hip_device_write(hip_dev(hip), hip->mat->rows, rows, (size_t)n * sizeof *rows);
        p.index = hip->mat->rows;
    }
    activate(hip, &p, n, kind_bit(w));
    const struct product product = with_scratch(hip, w, logits->dev, false);
    products(hip, &product, 1, n);
}

void hip_mtp_join(struct backend *b, struct buffer *embedding, struct buffer *hidden, struct weight *enorm, struct weight *hnorm,
                  struct weight *eh_proj, struct buffer *h)
{
    struct hip *hip = hip_of(b);
    struct hip_mat *m = hip->mat;
    const int rows = hip->step.n_rows, dim = b->shape.n_embd;
    const size_t all = (size_t)rows, width = (size_t)dim;
    if (!hip_ready(hip) || !hip_has(hip, "mtp_join: embedding", embedding, all, width) || !hip_has(hip, "mtp_join: hidden", hidden, all, width) ||
        !hip_has(hip, "mtp_join: h", h, all, width) || !hip_fits(hip, "mtp_join: eh_proj", eh_proj, 2 * (int64_t)dim, dim, 1) ||
        !hip_values(hip, "mtp_join: enorm", enorm, dim, 1) || !hip_values(hip, "mtp_join: hnorm", hnorm, dim, 1))
        return;
    struct act_params first = {.x = embedding->dev, .norm = hip_values_of(enorm), .normed = m->joined, .normed_stride = 2 * (uint32_t)dim, .n = dim};
    struct act_params second = {
        .x = hidden->dev, .norm = hip_values_of(hnorm), .normed = m->joined + dim, .normed_stride = 2 * (uint32_t)dim, .n = dim};
    struct act_params both = {.x = m->joined, .n = 2 * dim};
    activate(hip, &first, rows, 0);
    activate(hip, &second, rows, 0);
    activate(hip, &both, rows, kind_bit(eh_proj));
    const struct product product = with_scratch(hip, eh_proj, h->dev, false);
    products(hip, &product, 1, rows);
}

_Static_assert(sizeof(struct gpu_top) == sizeof(struct top_row) && offsetof(struct gpu_top, top) == offsetof(struct top_row, top) &&
                   (int)GPU_TOP_MAX == (int)TOP_MOST,
               "the device writes a struct top_row");

void hip_top(struct backend *b, struct buffer *logits, int n, int k, struct buffer *usable, struct buffer *out)
{
    struct hip *h = hip_of(b);
    struct hip_mat *m = h->mat;
    const int vocab = b->shape.n_vocab;
    const size_t words = ((size_t)vocab + 31) / 32;
    if (hip_device_failed(hip_dev(h)) || n < 1)
        return;
    if (k < 0 || k > GPU_TOP_MAX || m->parts == 0) {
        hip_device_fail(hip_dev(h), "top: the best %d of %d logits, but the GPU finds at most %d of %d", k, vocab, GPU_TOP_MAX,
                        GPU_TOP_PARTS * GPU_TOP_PART);
        return;
    }
    if (!hip_has(h, "top: logits", logits, (size_t)n, (size_t)vocab) || (usable && !hip_has(h, "top: usable", usable, 1, words)) ||
        !hip_has(h, "top: out", out, (size_t)n, sizeof(struct gpu_top) / sizeof(float)))
        return;
    for (int r = 0; r < n; r += TOP_ROWS) {
        const int rows = n - r < TOP_ROWS ? n - r : TOP_ROWS;
        const struct top_params p = {.logits = (const float *)logits->dev + (size_t)r * (size_t)vocab,
                                     .usable = usable ? usable->dev : NULL,
                                     .keys = m->keys,
                                     .part_max = m->part_max,
                                     .part_sum = m->part_sum,
                                     .out = (struct gpu_top *)out->dev + r,
                                     .n_vocab = vocab,
                                     .k = k,
                                     .parts = m->parts};
        HIP_LAUNCH(hip_dev(h), top_part, ((unsigned)m->parts + TOP_WAVES - 1) / TOP_WAVES, (unsigned)rows, 1, p);
        HIP_LAUNCH(hip_dev(h), top_merge, (unsigned)rows, 1, 1, p);
    }
}
