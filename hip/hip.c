/* The GPU backend: open, close, the start of a step, the table of operations. See hip_impl.h for its parts. */
#include "hip/hip.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/log.h"
#include "engine/slot_layout.h"
#include "hip/hip_store.h"

enum { STEP_ALIGN = 64 };

/* ---- checks shared by the operations ---- */

bool hip_ready(const struct hip *h)
{
    return h->step.n_rows > 0 && !hip_device_failed(h->device);
}

bool hip_has(struct hip *h, const char *what, const struct buffer *buf, size_t rows, size_t columns)
{
    const size_t need = rows * columns * sizeof(float); /* rows and columns are below 2^31 */
    if (buf && buf->bytes >= need)
        return true;
    hip_device_fail(hip_dev(h), "%s: the buffer has %zu bytes, but %zu rows of %zu values need %zu", what, buf ? buf->bytes : 0, rows, columns, need);
    return false;
}

bool hip_fits(struct hip *h, const char *what, const struct weight *w, int64_t n_in, int64_t n_out, int64_t n_mats)
{
    if (w && (n_in == 0 || w->desc.n_in == n_in) && (n_out == 0 || w->desc.n_out == n_out) && w->desc.n_mats == n_mats)
        return true;
    hip_device_fail(hip_dev(h), "%s: weight %s is %lld x %lld x %lld, expected %lld x %lld x %lld (0 = any)", what, w ? w->name : "(none)",
                    w ? (long long)w->desc.n_in : 0, w ? (long long)w->desc.n_out : 0, w ? (long long)w->desc.n_mats : 0, (long long)n_in,
                    (long long)n_out, (long long)n_mats);
    return false;
}

bool hip_values(struct hip *h, const char *what, const struct weight *w, int64_t n_in, int64_t n_out)
{
    if (!hip_fits(h, what, w, n_in, n_out, 1))
        return false;
    if (w->desc.type == BLOCK_F32)
        return true;
    hip_device_fail(hip_dev(h), "%s: weight %s is of type %s, but the GPU reads F32, F16 and BF16 here: use device cpu", what, w->name,
                    block_info((uint32_t)w->desc.type)->name);
    return false;
}

/* ---- a step ---- */

static size_t aligned(size_t bytes)
{
    return (bytes + STEP_ALIGN - 1) / STEP_ALIGN * STEP_ALIGN;
}

/* Where the parts of a step's description begin; the order of struct gpu_step. */
struct step_parts {
    size_t ids, row_span, row_pos, spans, pages, total;
};

static struct step_parts step_parts(size_t n_rows, size_t n_spans, size_t n_pages)
{
    struct step_parts at = {0};
    at.row_span = at.ids + aligned(n_rows * sizeof(int32_t));
    at.row_pos = at.row_span + aligned(n_rows * sizeof(int32_t));
    at.spans = at.row_pos + aligned(n_rows * sizeof(int32_t));
    at.pages = at.spans + aligned(n_spans * sizeof(struct gpu_span));
    at.total = at.pages + aligned(n_pages * sizeof(uint64_t));
    return at;
}

/* Room for the description on both sides. Growing it is rare (doubling), and waits for the step before. */
static int step_room(struct hip *h, size_t bytes, size_t n_spans, struct error *err)
{
    if (alloc_grow(&h->step_host, &h->step_host_room, bytes, 1) || alloc_grow(&h->spans, &h->spans_room, n_spans, sizeof *h->spans))
        return error_set(err, "step: out of memory for its description of %zu bytes", bytes);
    if (bytes <= h->step_dev_room)
        return 0;
    void *dev = hip_device_alloc(hip_dev(h), h->step_host_room, err);
    if (!dev)
        return error_prefix(err, "step: its description");
    hip_device_free(hip_dev(h), h->step_dev);
    h->step_dev = dev;
    h->step_dev_room = h->step_host_room;
    return 0;
}

/* Fills the host's copy of the description: page ids and slots become device addresses. */
static void describe(struct hip *h, const struct step_parts *at, const int32_t *ids, int n_rows, const struct span *spans, int n_spans)
{
    unsigned char *host = h->step_host;
    int32_t *row_span = (int32_t *)(void *)(host + at->row_span), *row_pos = (int32_t *)(void *)(host + at->row_pos);
    struct gpu_span *out = (struct gpu_span *)(void *)(host + at->spans);
    uint64_t *pages = (uint64_t *)(void *)(host + at->pages);
    const struct addresses *page_at = &h->store->pages, *state_at = &h->store->states;
    int32_t first = 0;
    memcpy(host + at->ids, ids, (size_t)n_rows * sizeof *ids);
    for (int i = 0; i < n_spans; i++) {
        const struct span *s = &spans[i];
        const int n_pages = h->base.shape.n_kv_layers ? (s->pos + s->n - 1) / GRID + 1 : 0;
        out[i] = (struct gpu_span){.row = s->row, .n = s->n, .pos = s->pos, .first_page = first};
        if (h->base.shape.n_delta_layers)
            out[i].state = state_at->at[s->state];
        for (int p = 0; p < n_pages; p++)
            pages[first + p] = page_at->at[s->pages[p]];
        first += n_pages;
        for (int t = 0; t < s->n; t++) {
            row_span[s->row + t] = i;
            row_pos[s->row + t] = s->pos + t;
        }
        h->spans[i] = *s;
        h->spans[i].pages = NULL;
    }
}

/* Says once that graphs failed while steps were run. */
static void tell_of_graphs(struct hip *h)
{
    const char *failure = hip_device_graphs(hip_dev(h)).failure;
    if (failure && !h->told_of_graphs)
        log_warn("HIP graphs are off from here on, and kernels are launched one by one: %s", failure);
    h->told_of_graphs = failure != NULL;
}

static void op_begin(struct backend *b, const int32_t *ids, int n_rows, const struct span *spans, int n_spans)
{
    struct hip *h = hip_of(b);
    struct error err = {""};
    h->step = (struct gpu_step){0};
    tell_of_graphs(h);
    if (hip_device_failed(hip_dev(h)))
        return;
    const int64_t n_pages = slot_check_step(&b->shape, h->store->pages.n, h->store->states.n, ids, n_rows, spans, n_spans, &err);
    if (n_pages > INT32_MAX)
        error_set(&err, "step: %lld pages in all are too many", (long long)n_pages);
    if (n_pages < 0 || n_pages > INT32_MAX) {
        hip_device_fail(hip_dev(h), "%s", err.text);
        return;
    }
    const struct step_parts at = step_parts((size_t)n_rows, (size_t)n_spans, (size_t)n_pages);
    if (step_room(h, at.total, (size_t)n_spans, &err)) {
        hip_device_fail(hip_dev(h), "%s", err.text);
        return;
    }
    describe(h, &at, ids, n_rows, spans, n_spans);
    hip_device_repeats(hip_dev(h), n_rows == n_spans); /* no prompt is read: what changes from step to step is in the description */
    hip_device_write(hip_dev(h), h->step_dev, h->step_host, at.total);
    const char *dev = h->step_dev;
    h->step = (struct gpu_step){
        .ids = (const int32_t *)(const void *)(dev + at.ids),
        .row_span = (const int32_t *)(const void *)(dev + at.row_span),
        .row_pos = (const int32_t *)(const void *)(dev + at.row_pos),
        .spans = (const struct gpu_span *)(const void *)(dev + at.spans),
        .pages = (const uint64_t *)(const void *)(dev + at.pages),
        .n_rows = n_rows,
        .n_spans = n_spans,
    };
}

static int op_sync(struct backend *b, struct error *err)
{
    struct hip *h = hip_of(b);
    if (hip_device_sync(hip_dev(h), err) == 0)
        return 0;
    h->step = (struct gpu_step){0}; /* what it left behind is not to be gone on with */
    return -1;
}

static size_t op_memory_free(struct backend *b)
{
    return hip_device_memory_free(hip_dev(hip_of(b)));
}

/* ---- open and close ---- */

static void op_close(struct backend *b)
{
    struct hip *h = hip_of(b);
    hip_hold_close(h);
    hip_attn_close(h);
    hip_moe_close(h);
    hip_mat_close(h);
    hip_store_close(h);
    hip_device_free(hip_dev(h), h->step_dev);
    if (!h->borrowed)
        hip_device_close(hip_dev(h));
    free(h->step_host);
    free(h->spans);
    free(h);
}

static const struct backend_ops ops = {
    .name = "hip",
    .close = op_close,
    .sync = op_sync,
    .buffer_new = hip_buffer_new,
    .buffer_free = hip_buffer_free,
    .read = hip_buffer_read,
    .write = hip_buffer_write,
    .weight_new = hip_weight_new,
    .memory_free = op_memory_free,
    .pages_reserve = hip_pages_reserve,
    .states_reserve = hip_states_reserve,
    .page_bytes = hip_page_bytes,
    .state_bytes = hip_state_bytes,
    .state_reset = hip_state_reset,
    .state_copy = hip_state_copy,
    .page_copy = hip_page_copy,
    .state_packed_bytes = hip_state_packed_bytes,
    .state_save = hip_state_save,
    .state_load = hip_state_load,
    .page_save = hip_page_save,
    .page_load = hip_page_load,
    .begin = op_begin,
    .embed = hip_embed,
    .project = hip_project,
    .project_add = hip_project_add,
    .attn_store = hip_attn_store,
    .attn_mix = hip_attn_mix,
    .delta_conv = hip_delta_conv,
    .delta_rule = hip_delta_rule,
    .mlp = hip_mlp,
    .moe = hip_moe,
    .head = hip_head,
    .head_top = hip_top,
    .mtp_join = hip_mtp_join,
};

static int check_shape(const struct backend_shape *shape, struct error *err)
{
    if (slot_check_shape(shape, err))
        return -1;
    if (shape->n_kv_layers > 0 && shape->kv_type == KV_F32)
        return error_set(err, "the GPU keeps keys and values as f16 or q8_0: set kv-type to one of them, or use device cpu");
    return 0;
}

struct backend *hip_open_on(struct hip_device *d, const struct backend_shape *shape, struct error *err)
{
    if (check_shape(shape, err))
        return NULL;
    struct hip *h = alloc_array(1, sizeof *h);
    if (!h) {
        error_set(err, "out of memory for the GPU backend");
        return NULL;
    }
    /* The name says which code ran, so that a cache on disk is never shared between two kinds of GPU. */
    const char *arch = hip_device_info(d)->arch;
    snprintf(h->name, sizeof h->name, "hip%s%s", arch[0] ? " " : "", arch);
    h->ops = ops;
    h->ops.name = h->name;
    h->base.ops = &h->ops;
    h->base.shape = *shape;
    h->device = d;
    h->borrowed = true;
    if (hip_store_open(h, err) || hip_hold_open(h, err) || hip_mat_open(h, err) || hip_moe_open(h, err) || hip_attn_open(h, err) ||
        hip_delta_check(shape, err)) {
        op_close(&h->base);
        return NULL;
    }
    return &h->base;
}

bool backend_hip_takes(enum block_type type)
{
    return hip_layout_supported(type);
}

/* Graphs that cannot be had, or are not to be trusted, are done without. -1 only when the device was lost over them. */
static int turn_graphs_on(struct hip_device *d, const struct hip_options *options, struct error *err)
{
    struct error why = {""};
    const int rc = options->no_selftest ? hip_device_graphs_on(d, &why) : hip_graphs_try(d, &why);
    if (rc == 0) {
        log_info("HIP graphs are on: a step that only writes is one submission");
        return 0;
    }
    if (hip_device_failed(d))
        return error_set(err, "the GPU failed when HIP graphs were tried (leave hip-graph off): %s", why.text);
    log_warn("HIP graphs stay off, and kernels are launched one by one: %s", why.text);
    return 0;
}

struct backend *backend_open_hip(const struct backend_shape *shape, const struct hip_options *options, struct error *err)
{
    struct hip_device *d = NULL;
    if (check_shape(shape, err) || hip_device_open(&d, options->library, options->device, err))
        return NULL;
    struct backend *b = NULL;
    if ((options->no_selftest || hip_selftest(d, options->types, shape, err) == 0) && (!options->graph || turn_graphs_on(d, options, err) == 0))
        b = hip_open_on(d, shape, err);
    if (!b) {
        hip_device_close(d);
        return NULL;
    }
    hip_of(b)->borrowed = false;
    return b;
}
