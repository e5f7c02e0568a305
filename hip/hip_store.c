/* Memory of the HIP backend: buffers, weights, KV pages, state slots and their packed images. */
#include "hip/hip_store.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "engine/memory.h"
#include "engine/slot_layout.h"

enum {
    AHEAD_BYTES = 32 << 20, /* of the file, asked for before they are needed */
    REPORT_NS = 2000000000, /* between two progress lines */
    VECTOR_WIDTH = 16,      /* rows this short are the taps of a convolution */
};

static inline struct hip_store *store_of(struct backend *b)
{
    return hip_of(b)->store;
}

/* ---- open and close ---- */

int hip_store_open(struct hip *h, struct error *err)
{
    h->store = alloc_array(1, sizeof *h->store);
    return h->store ? 0 : error_set(err, "out of memory for the GPU backend");
}

void hip_store_close(struct hip *h)
{
    struct hip_store *s = h->store;
    if (!s)
        return;
    while (s->buffers) {
        struct buffer *next = s->buffers->next;
        hip_device_free(hip_dev(h), s->buffers->dev);
        free(s->buffers);
        s->buffers = next;
    }
    while (s->weights) {
        struct weight *next = s->weights->next;
        hip_device_free(hip_dev(h), (void *)(uintptr_t)s->weights->gpu.data);
        free(s->weights);
        s->weights = next;
    }
    for (size_t i = 0; i < s->n_slabs; i++)
        hip_device_free(hip_dev(h), s->slabs[i]);
    free(s->slabs);
    free(s->pages.at);
    free(s->states.at);
    free(s);
    h->store = NULL;
}

/* -1 with err after a failure: what a reader or a snapshot would get is not what was asked for. The error stays for sync. */
static int check_failed(struct hip *h, struct error *err)
{
    return hip_device_failed(hip_dev(h)) ? error_set(err, "%s", hip_device_error(hip_dev(h))) : 0;
}

/* Device memory that begins as zeros. NULL with err when it cannot be had or not be cleared. */
static void *zeroed(struct hip *h, size_t bytes, struct error *err)
{
    void *p = hip_device_alloc(hip_dev(h), bytes, err);
    if (!p)
        return NULL;
    hip_device_zero(hip_dev(h), p, bytes);
    if (!check_failed(h, err))
        return p;
    hip_device_free(hip_dev(h), p);
    return NULL;
}

/* ---- buffers ---- */

struct buffer *hip_buffer_new(struct backend *b, size_t bytes, struct error *err)
{
    struct hip *h = hip_of(b);
    struct buffer *buf = alloc_array(1, sizeof *buf);
    if (!buf) {
        error_set(err, "out of memory for a buffer");
        return NULL;
    }
    buf->dev = zeroed(h, bytes, err);
    if (!buf->dev) {
        error_prefix(err, "a buffer for activations");
        free(buf);
        return NULL;
    }
    buf->bytes = bytes;
    buf->next = h->store->buffers;
    h->store->buffers = buf;
    return buf;
}

void hip_buffer_free(struct backend *b, struct buffer *buf)
{
    for (struct buffer **link = &store_of(b)->buffers; *link; link = &(*link)->next) {
        if (*link != buf)
            continue;
        *link = buf->next;
        hip_device_free(hip_dev(hip_of(b)), buf->dev);
        free(buf);
        return;
    }
}

static int check_range(const struct buffer *buf, size_t offset, size_t bytes, struct error *err)
{
    if (offset <= buf->bytes && bytes <= buf->bytes - offset)
        return 0;
    return error_set(err, "buffer: %zu bytes at %zu lie outside its %zu", bytes, offset, buf->bytes);
}

int hip_buffer_read(struct backend *b, struct buffer *src, size_t offset, void *dst, size_t bytes, struct error *err)
{
    if (check_failed(hip_of(b), err) || check_range(src, offset, bytes, err))
        return -1;
    return hip_device_read(hip_dev(hip_of(b)), dst, (const char *)src->dev + offset, bytes, err);
}

int hip_buffer_write(struct backend *b, struct buffer *dst, size_t offset, const void *src, size_t bytes, struct error *err)
{
    if (check_failed(hip_of(b), err) || check_range(dst, offset, bytes, err))
        return -1;
    hip_device_write(hip_dev(hip_of(b)), (char *)dst->dev + offset, src, bytes);
    return check_failed(hip_of(b), err);
}

/* ---- weights ---- */

/* Norms, biases and the taps of a convolution are read as f32 by every kernel. Halves become f32 exactly. */
static enum block_type device_type(const struct weight_desc *desc)
{
    const bool vector = (desc->n_out == 1 && desc->n_mats == 1) || desc->n_in <= VECTOR_WIDTH;
    return vector && (desc->type == BLOCK_F16 || desc->type == BLOCK_BF16) ? BLOCK_F32 : desc->type;
}

static int check_weight(const struct weight_desc *desc, struct error *err)
{
    if (slot_check_weight(desc, err))
        return -1;
    if (!hip_layout_supported(desc->type))
        return error_set(err, "tensor %s is of type %s, for which there is no GPU kernel: use device cpu, or a Q4_K_M, Q8_0 or F16 file of the model",
                         desc->name, block_info((uint32_t)desc->type)->name);
    const size_t stride = hip_layout_row_stride(device_type(desc), (size_t)desc->n_in);
    if (stride > HIP_STAGE_BYTES)
        return error_set(err, "tensor %s: a row of %lld values is longer than the GPU backend transfers (%d bytes)", desc->name,
                         (long long)desc->n_in, HIP_STAGE_BYTES);
    if ((uint64_t)desc->n_out * (uint64_t)desc->n_mats > (UINT64_C(1) << 46) / stride)
        return error_set(err, "tensor %s: %lld x %lld x %lld values are more than any GPU holds", desc->name, (long long)desc->n_in,
                         (long long)desc->n_out, (long long)desc->n_mats);
    return 0;
}

/* Asks the system to read what comes next of a mapped file while the copies of what came before are under way. Harmless for other memory. */
static void read_ahead(const uint8_t *from, size_t bytes)
{
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), start = (uintptr_t)from / page * page;
    madvise((void *)start, bytes + ((uintptr_t)from - start), MADV_WILLNEED);
}

static void report(struct hip_store *s, size_t bytes)
{
    const uint64_t now = clock_ns();
    s->loaded += bytes;
    if (s->reported == 0)
        s->reported = now;
    if (now - s->reported < REPORT_NS)
        return;
    log_info("%s of weights are in GPU memory", memory_text(s->loaded).text);
    s->reported = now;
}

/* Rows from the file's form to the device's, straight into pinned memory that the GPU copies from. */
static void upload(struct hip *h, struct weight *w)
{
    const struct weight_desc *d = &w->desc;
    const size_t n_in = (size_t)d->n_in, from = block_bytes(d->type, n_in), stride = (size_t)w->gpu.row_stride;
    const size_t most = HIP_STAGE_BYTES / stride, ahead = AHEAD_BYTES / from + 1;
    const bool widen = w->gpu.type != (int32_t)d->type;
    uint8_t *dst = (uint8_t *)(uintptr_t)w->gpu.data;
    for (int64_t m = 0; m < d->n_mats; m++) {
        const uint8_t *src = d->data + (size_t)m * d->stride;
        size_t rows = (size_t)d->n_out, done = 0, asked = 0;
        while (done < rows) {
            if (done + ahead / 2 >= asked && asked < rows) {
                const size_t next = rows - asked < ahead ? rows - asked : ahead;
                read_ahead(src + asked * from, next * from);
                asked += next;
            }
            const size_t n = rows - done < most ? rows - done : most;
            uint8_t *room = hip_device_stage(hip_dev(h), n * stride);
            if (!room)
                return;
            for (size_t i = 0; i < n && !widen; i++)
                hip_layout_row(d->type, src + (done + i) * from, n_in, room + i * stride);
            for (size_t i = 0; i < n && widen; i++) {
                memset(room + i * stride, 0, stride);
                block_dequant(d->type, src + (done + i) * from, (float *)(void *)(room + i * stride), n_in);
            }
            hip_device_send(hip_dev(h), dst + done * stride, room, n * stride);
            report(h->store, n * stride);
            done += n;
        }
        dst += w->gpu.mat_stride;
    }
}

struct weight *hip_weight_new(struct backend *b, const struct weight_desc *desc, struct error *err)
{
    struct hip *h = hip_of(b);
    struct weight_desc named = *desc;
    if (!named.name)
        named.name = "?";
    if (check_failed(h, err) || check_weight(&named, err))
        return NULL;
    struct weight *w = alloc_array(1, sizeof *w);
    if (!w) {
        error_set(err, "out of memory for tensor %s", named.name);
        return NULL;
    }
    const enum block_type type = device_type(desc);
    const size_t stride = hip_layout_row_stride(type, (size_t)desc->n_in), mat = stride * (size_t)desc->n_out;
    void *data = hip_device_alloc(hip_dev(h), mat * (size_t)desc->n_mats, err);
    if (!data) {
        error_prefix(err, "tensor %s", named.name);
        free(w);
        return NULL;
    }
    w->desc = named;
    w->gpu = (struct gpu_matrix){.data = data,
                                 .row_stride = stride,
                                 .mat_stride = mat,
                                 .type = (int32_t)type,
                                 .n_in = (int32_t)desc->n_in,
                                 .n_out = (int32_t)desc->n_out,
                                 .n_mats = (int32_t)desc->n_mats};
    snprintf(w->name, sizeof w->name, "%s", named.name);
    upload(h, w);
    w->desc.name = w->name;
    w->desc.data = NULL;
    w->desc.type = type;
    w->next = h->store->weights;
    h->store->weights = w;
    if (!check_failed(h, err))
        return w;
    error_prefix(err, "tensor %s", w->name);
    return NULL; /* released with the others */
}

/* ---- KV pages and state slots: every reservation is a slab of its own, so that nothing moves ---- */

/* Either n are there afterwards (0) or nothing has changed (-1). Slabs begin zeroed: rows that were never written are read by nobody's result, but a NaN
 * in them could get through a multiplication by zero. */
static int reserve(struct hip *h, struct addresses *a, int n, size_t bytes, const char *what, struct error *err)
{
    struct hip_store *s = h->store;
    if (n <= a->n || check_failed(h, err))
        return n <= a->n ? 0 : -1;
    if (alloc_grow(&a->at, &a->cap, (size_t)n, sizeof *a->at) || alloc_grow(&s->slabs, &s->cap_slabs, s->n_slabs + 1, sizeof *s->slabs))
        return error_set(err, "out of memory for a table of %d %s", n, what);
    const size_t more = (size_t)(n - a->n), each = (bytes + SLOT_ALIGN - 1) / SLOT_ALIGN * SLOT_ALIGN;
    if (more > SIZE_MAX / 2 / (each ? each : 1))
        return error_set(err, "%d %s of %zu bytes are more than any GPU holds", n, what, bytes);
    char *slab = zeroed(h, more * each, err);
    if (!slab)
        return error_prefix(err, "%d %s of %s", n, what, memory_text(bytes).text);
    s->slabs[s->n_slabs++] = slab;
    for (size_t i = 0; i < more; i++)
        a->at[(size_t)a->n + i] = (uint64_t)(uintptr_t)(slab + i * each);
    a->n = n;
    return 0;
}

int hip_pages_reserve(struct backend *b, int n, struct error *err)
{
    return reserve(hip_of(b), &store_of(b)->pages, n, slot_page_bytes(&b->shape), "KV pages", err);
}

int hip_states_reserve(struct backend *b, int n, struct error *err)
{
    return reserve(hip_of(b), &store_of(b)->states, n, slot_state_bytes(&b->shape), "DeltaNet states", err);
}

size_t hip_page_bytes(const struct backend *b)
{
    return slot_page_bytes(&b->shape);
}

size_t hip_state_bytes(const struct backend *b)
{
    return slot_state_bytes(&b->shape);
}

/* The address of slot or page i; NULL with the sticky error when there is no such one. */
static char *address(struct hip *h, const struct addresses *a, int32_t i, const char *what)
{
    if (i >= 0 && i < a->n)
        return (char *)(uintptr_t)a->at[i];
    hip_device_fail(hip_dev(h), "%s %d is outside the %d reserved", what, i, a->n);
    return NULL;
}

/* Only M carries something from before position 0, see store_state_reset of engine/cpu/store.c. */
void hip_state_reset(struct backend *b, int32_t state)
{
    struct hip *h = hip_of(b);
    char *at = address(h, &h->store->states, state, "state slot");
    for (int layer = 0; at && layer < b->shape.n_delta_layers; layer++)
        hip_device_zero(hip_dev(h), at + slot_layer(&b->shape, layer).m, slot_matrix_bytes(&b->shape));
}

void hip_state_copy(struct backend *b, int32_t dst, int32_t src)
{
    struct hip *h = hip_of(b);
    char *to = address(h, &h->store->states, dst, "state slot"), *from = address(h, &h->store->states, src, "state slot");
    if (to && from && to != from)
        hip_device_copy(hip_dev(h), to, from, slot_state_bytes(&b->shape));
}

void hip_page_copy(struct backend *b, int32_t dst, int32_t src)
{
    struct hip *h = hip_of(b);
    char *to = address(h, &h->store->pages, dst, "KV page"), *from = address(h, &h->store->pages, src, "KV page");
    if (to && from && to != from)
        hip_device_copy(hip_dev(h), to, from, slot_page_bytes(&b->shape));
}

/* ---- packed images ---- */

size_t hip_state_packed_bytes(const struct backend *b, int pos)
{
    return slot_packed_bytes(&b->shape, pos);
}

/* For images a wrong number is the caller's error alone and does not stick. */
static char *image_address(struct hip *h, const struct addresses *a, int32_t i, const char *what, struct error *err)
{
    if (check_failed(h, err))
        return NULL;
    if (i >= 0 && i < a->n)
        return (char *)(uintptr_t)a->at[i];
    error_set(err, "%s %d is outside the %d reserved", what, i, a->n);
    return NULL;
}

static char *packed_slot(struct hip *h, int32_t state, int pos, struct error *err)
{
    char *at = image_address(h, &h->store->states, state, "state slot", err);
    if (at && pos < 0) {
        error_set(err, "state slot %d: position %d is negative", state, pos);
        return NULL;
    }
    return at;
}

int hip_state_save(struct backend *b, int32_t state, int pos, void *dst, struct error *err)
{
    struct hip *h = hip_of(b);
    const char *slot = packed_slot(h, state, pos, err);
    if (!slot)
        return -1;
    const int n = slot_packed_runs(&b->shape, pos);
    struct hip_part *parts = alloc_array((size_t)n, sizeof *parts);
    if (!parts)
        return error_set(err, "out of memory for the parts of a state");
    for (int i = 0; i < n; i++) {
        const struct slot_run run = slot_packed_run(&b->shape, pos, i);
        parts[i] = (struct hip_part){slot + run.offset, run.bytes};
    }
    const int rc = hip_device_gather(hip_dev(h), dst, parts, (size_t)n, err);
    free(parts);
    return rc;
}

int hip_state_load(struct backend *b, int32_t state, int pos, const void *src, struct error *err)
{
    struct hip *h = hip_of(b);
    char *slot = packed_slot(h, state, pos, err);
    const char *image = src;
    if (!slot)
        return -1;
    for (int i = 0; i < slot_packed_runs(&b->shape, pos); i++) {
        const struct slot_run run = slot_packed_run(&b->shape, pos, i);
        hip_device_write(hip_dev(h), slot + run.offset, image, run.bytes);
        image += run.bytes;
    }
    return check_failed(h, err);
}

int hip_page_save(struct backend *b, int32_t page, void *dst, struct error *err)
{
    struct hip *h = hip_of(b);
    const char *at = image_address(h, &h->store->pages, page, "KV page", err);
    return at ? hip_device_read(hip_dev(h), dst, at, slot_page_bytes(&b->shape), err) : -1;
}

int hip_page_load(struct backend *b, int32_t page, const void *src, struct error *err)
{
    struct hip *h = hip_of(b);
    char *at = image_address(h, &h->store->pages, page, "KV page", err);
    if (!at)
        return -1;
    hip_device_write(hip_dev(h), at, src, slot_page_bytes(&b->shape));
    return check_failed(h, err);
}
