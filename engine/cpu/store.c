#include "engine/cpu/store.h"

#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"

/* Packed states are little-endian, as are the GGUF files that are used in place. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "this code reads and writes f32 images in the machine's own order");
_Static_assert(sizeof(float) == 4, "f32 images");

enum { LINE_FLOATS = 64 / sizeof(float) };

/* ---- sizes: every dimension is bounded by check_shape, so that none of these products overflows 64 bits ---- */

static size_t up_to_line(size_t floats)
{
    return (floats + LINE_FLOATS - 1) / LINE_FLOATS * LINE_FLOATS;
}

static size_t conv_channels(const struct backend_shape *sh)
{
    return 2 * (size_t)sh->delta_k_heads * (size_t)sh->delta_dim + (size_t)sh->delta_v_heads * (size_t)sh->delta_dim;
}

static size_t matrix_floats(const struct backend_shape *sh)
{
    return (size_t)sh->delta_v_heads * (size_t)sh->delta_dim * (size_t)sh->delta_dim;
}

static size_t key_row_floats(const struct backend_shape *sh)
{
    return (size_t)sh->delta_k_heads * (size_t)sh->delta_dim;
}

static size_t value_row_floats(const struct backend_shape *sh)
{
    return (size_t)sh->delta_v_heads * (size_t)sh->delta_dim;
}

/* Where the five arrays of one layer begin, in floats from the layer's start; each starts on a cache line. */
struct layer_layout {
    size_t m, k, u, g, conv, total;
};

static struct layer_layout layer_layout(const struct store *s)
{
    const struct backend_shape *sh = s->shape;
    struct layer_layout at = {0};
    at.k = at.m + up_to_line(matrix_floats(sh));
    at.u = at.k + up_to_line(GRID * key_row_floats(sh));
    at.g = at.u + up_to_line(GRID * value_row_floats(sh));
    at.conv = at.g + up_to_line(GRID * (size_t)sh->delta_v_heads);
    at.total = at.conv + up_to_line((size_t)s->ring * conv_channels(sh));
    return at;
}

enum block_type store_kv_format(const struct backend_shape *shape)
{
    static const enum block_type formats[] = {[KV_F32] = BLOCK_F32, [KV_F16] = BLOCK_F16, [KV_Q8_0] = BLOCK_Q8_0};
    return formats[shape->kv_type];
}

size_t store_kv_row_bytes(const struct backend_shape *shape)
{
    return block_bytes(store_kv_format(shape), (size_t)shape->head_dim);
}

/* Bytes of one head's keys (or values) in a page. */
static size_t kv_head_bytes(const struct store *s)
{
    return GRID * store_kv_row_bytes(s->shape);
}

/* ---- opening ---- */

static int check_dimension(const char *name, int value, int low, int high, struct error *err)
{
    if (value < low || value > high)
        return error_set(err, "backend shape: %s is %d, but must lie in %d .. %d", name, value, low, high);
    return 0;
}

/* The bounds of spec/gguf.md section 4, item 13. A model file was checked before; this protects the arithmetic of this file. */
static int check_shape(const struct backend_shape *sh, struct error *err)
{
    if (check_dimension("n_embd", sh->n_embd, 1, 65536, err) || check_dimension("n_vocab", sh->n_vocab, 1, 1 << 21, err) ||
        check_dimension("n_kv_layers", sh->n_kv_layers, 0, 513, err) || check_dimension("n_delta_layers", sh->n_delta_layers, 0, 513, err) ||
        check_dimension("n_experts", sh->n_experts, 0, 1024, err) || check_dimension("max_rows", sh->max_rows, 1, 1 << 20, err) ||
        check_dimension("max_logit_rows", sh->max_logit_rows, 0, 1 << 20, err))
        return -1;
    if (sh->n_kv_layers > 0) {
        if (check_dimension("n_heads", sh->n_heads, 1, 1024, err) || check_dimension("n_kv_heads", sh->n_kv_heads, 1, sh->n_heads, err) ||
            check_dimension("head_dim", sh->head_dim, 1, 1024, err) || check_dimension("n_rot", sh->n_rot, 0, sh->head_dim, err))
            return -1;
        if (sh->n_heads % sh->n_kv_heads || sh->n_rot % 2)
            return error_set(err, "backend shape: n_heads must be a multiple of n_kv_heads (%d, %d) and n_rot even (%d)", sh->n_heads, sh->n_kv_heads,
                             sh->n_rot);
        if (sh->kv_type != KV_F32 && sh->kv_type != KV_F16 && sh->kv_type != KV_Q8_0)
            return error_set(err, "backend shape: unknown kv_type %d", (int)sh->kv_type);
        if (sh->kv_type == KV_Q8_0 && sh->head_dim % block_info(BLOCK_Q8_0)->values)
            return error_set(err, "kv-type q8_0 needs heads of a multiple of 32 channels, and this model's have %d: use kv-type f16", sh->head_dim);
    }
    if (sh->n_delta_layers > 0) {
        if (check_dimension("delta_k_heads", sh->delta_k_heads, 1, 1024, err) || check_dimension("delta_v_heads", sh->delta_v_heads, 1, 1024, err) ||
            check_dimension("delta_dim", sh->delta_dim, 1, 1024, err) || check_dimension("conv_width", sh->conv_width, 2, 16, err))
            return -1;
        if (sh->delta_v_heads % sh->delta_k_heads)
            return error_set(err, "backend shape: delta_v_heads (%d) must be a multiple of delta_k_heads (%d)", sh->delta_v_heads, sh->delta_k_heads);
    }
    if (sh->n_experts > 0)
        return check_dimension("n_experts_used", sh->n_experts_used, 1, sh->n_experts, err);
    return 0;
}

/* shape must outlive the store. 0 or -1. */
int store_open(struct store *s, const struct backend_shape *shape, struct error *err)
{
    memset(s, 0, sizeof *s);
    s->shape = shape;
    if (check_shape(shape, err))
        return -1;
    /* A row needs conv_width - 1 rows before it, also after ROLLBACK rows were taken back. */
    s->ring = 1;
    while (s->ring < shape->conv_width - 1 + ROLLBACK)
        s->ring *= 2;
    return 0;
}

void store_close(struct store *s)
{
    while (s->buffers) {
        struct buffer *next = s->buffers->next;
        free(s->buffers->data);
        free(s->buffers);
        s->buffers = next;
    }
    while (s->weights) {
        struct weight *next = s->weights->next;
        free(s->weights);
        s->weights = next;
    }
    for (int i = 0; i < s->n_pages; i++)
        free(s->pages[i]);
    for (int i = 0; i < s->n_states; i++)
        free(s->states[i]);
    free(s->pages);
    free(s->states);
    free(s->ids);
    free(s->spans);
    free(s->span_pages);
    memset(s, 0, sizeof *s);
}

/* ---- buffers and weights ---- */

struct buffer *store_buffer_new(struct store *s, size_t bytes, struct error *err)
{
    struct buffer *buf = alloc_array(1, sizeof *buf);
    float *data = alloc_lines(bytes, 1);
    if (!buf || !data) {
        free(buf);
        free(data);
        error_set(err, "out of memory for a buffer of %zu bytes: lower max_rows or free memory", bytes);
        return NULL;
    }
    buf->data = data;
    buf->bytes = bytes;
    buf->next = s->buffers;
    s->buffers = buf;
    return buf;
}

void store_buffer_free(struct store *s, struct buffer *buf)
{
    for (struct buffer **link = &s->buffers; *link; link = &(*link)->next) {
        if (*link != buf)
            continue;
        *link = buf->next;
        free(buf->data);
        free(buf);
        return;
    }
}

/* Refuses what the row arithmetic of weight_row could not describe; sizes against the file were checked by the caller. */
struct weight *store_weight_new(struct store *s, const struct weight_desc *desc, struct error *err)
{
    const char *name = desc->name ? desc->name : "?";
    const struct block_info *info = block_info((uint32_t)desc->type);
    if (!info || !info->values) {
        error_set(err, "tensor %s: block type %d (%s) is not supported", name, (int)desc->type, info ? info->name : "unknown");
        return NULL;
    }
    const int64_t limit = INT64_C(1) << 31;
    if (desc->n_in < 1 || desc->n_in >= limit || desc->n_in % info->values || desc->n_out < 1 || desc->n_out >= limit || desc->n_mats < 1 ||
        desc->n_mats > 65536 || !desc->data) {
        error_set(err, "tensor %s: %lld x %lld x %lld values of type %s do not make whole rows of blocks", name, (long long)desc->n_in,
                  (long long)desc->n_out, (long long)desc->n_mats, info->name);
        return NULL;
    }
    size_t row_bytes = block_bytes(desc->type, (size_t)desc->n_in);
    if (desc->n_mats > 1 && desc->stride / row_bytes < (size_t)desc->n_out) {
        error_set(err, "tensor %s: a stride of %zu bytes is less than one matrix", name, desc->stride);
        return NULL;
    }
    struct weight *w = alloc_array(1, sizeof *w);
    if (!w) {
        error_set(err, "out of memory for tensor %s", name);
        return NULL;
    }
    w->desc = *desc;
    w->row_bytes = row_bytes;
    snprintf(w->name, sizeof w->name, "%s", name);
    w->desc.name = w->name;
    w->next = s->weights;
    s->weights = w;
    return w;
}

/* ---- KV pages and state slots: allocated one by one, so that reserving more moves nothing ---- */

/* Room for n pointers in *table. */
static int table_room(void *table, int *cap, int n, const char *what, struct error *err)
{
    size_t room = (size_t)*cap;
    if (alloc_grow(table, &room, (size_t)n, sizeof(void *)) || room > INT_MAX)
        return error_set(err, "out of memory for a table of %d %s", n, what);
    *cap = (int)room;
    return 0;
}

/* Either n pages are there afterwards (0) or nothing has changed (-1). A smaller n than before changes nothing. */
int store_pages_reserve(struct store *s, int n, struct error *err)
{
    const size_t bytes = store_page_bytes(s);
    if (n <= s->n_pages)
        return 0;
    if (table_room(&s->pages, &s->cap_pages, n, "KV pages", err))
        return -1;
    int have = s->n_pages;
    while (have < n && (s->pages[have] = alloc_lines(bytes, 1)))
        have++;
    if (have == n) {
        s->n_pages = n;
        return 0;
    }
    while (have > s->n_pages)
        free(s->pages[--have]);
    return error_set(err, "out of memory for %d KV pages of %zu bytes: lower the context or the number of sequences", n, bytes);
}

/* As store_pages_reserve. */
int store_states_reserve(struct store *s, int n, struct error *err)
{
    const size_t bytes = store_state_bytes(s);
    if (n <= s->n_states)
        return 0;
    if (table_room(&s->states, &s->cap_states, n, "DeltaNet states", err))
        return -1;
    int have = s->n_states;
    while (have < n && (s->states[have] = alloc_lines(bytes, 1)))
        have++;
    if (have == n) {
        s->n_states = n;
        return 0;
    }
    while (have > s->n_states)
        free(s->states[--have]);
    return error_set(err, "out of memory for %d DeltaNet states of %zu bytes: lower the number of sequences", n, bytes);
}

size_t store_page_bytes(const struct store *s)
{
    if (s->shape->n_kv_layers == 0)
        return 0;
    return (size_t)s->shape->n_kv_layers * 2 * (size_t)s->shape->n_kv_heads * kv_head_bytes(s);
}

size_t store_state_bytes(const struct store *s)
{
    if (s->shape->n_delta_layers == 0)
        return 0;
    return (size_t)s->shape->n_delta_layers * layer_layout(s).total * sizeof(float);
}

struct delta_state store_delta(const struct store *s, int32_t state, int layer)
{
    struct layer_layout at = layer_layout(s);
    float *base = s->states[state] + (size_t)layer * at.total;
    return (struct delta_state){.m = base + at.m, .k = base + at.k, .u = base + at.u, .g = base + at.g, .conv = base + at.conv};
}

/* A page is [layer][K, V][kv head][GRID rows]. */
static void *kv_head(const struct store *s, int32_t page, int layer, int which, int head)
{
    size_t index = ((size_t)layer * 2 + (size_t)which) * (size_t)s->shape->n_kv_heads + (size_t)head;
    return s->pages[page] + index * kv_head_bytes(s);
}

void *store_k(const struct store *s, int32_t page, int layer, int head)
{
    return kv_head(s, page, layer, 0, head);
}

void *store_v(const struct store *s, int32_t page, int layer, int head)
{
    return kv_head(s, page, layer, 1, head);
}

static bool has_state(struct store *s, int32_t state)
{
    if (state >= 0 && state < s->n_states)
        return true;
    store_fail(s, "state slot %d is outside the %d reserved", state, s->n_states);
    return false;
}

static bool has_page(struct store *s, int32_t page)
{
    if (page >= 0 && page < s->n_pages)
        return true;
    store_fail(s, "KV page %d is outside the %d reserved", page, s->n_pages);
    return false;
}

/* Only M carries something from before position 0: rows of k, u and g are written before they are read in every grid cell, and conv rows before
 * position 0 are never read. */
void store_state_reset(struct store *s, int32_t state)
{
    if (!has_state(s, state))
        return;
    for (int layer = 0; layer < s->shape->n_delta_layers; layer++)
        memset(store_delta(s, state, layer).m, 0, matrix_floats(s->shape) * sizeof(float));
}

void store_state_copy(struct store *s, int32_t dst, int32_t src)
{
    if (has_state(s, dst) && has_state(s, src) && dst != src)
        memcpy(s->states[dst], s->states[src], store_state_bytes(s));
}

void store_page_copy(struct store *s, int32_t dst, int32_t src)
{
    if (has_page(s, dst) && has_page(s, src) && dst != src)
        memcpy(s->pages[dst], s->pages[src], store_page_bytes(s));
}

/* ---- packed states ----
 *
 * The image of a sequence of length pos, little-endian f32 without gaps, with n = pos % GRID and c = min(pos, conv_width - 1):
 *     for each layer  M    [HV][S][S]
 *     for each layer  k    [n][HK][S], u [n][HV][S], g [n][HV]   positions pos - n .. pos - 1
 *     for each layer  conv [c][CH]                               positions pos - c .. pos - 1
 * At a grid line n is 0: the cell before it was folded into M when its last row was done. Rows older than these are not kept, so a sequence that
 * was loaded can take back only rows that were run since. */

static int pending_rows(int pos)
{
    return pos % GRID;
}

static int history_rows(const struct store *s, int pos)
{
    int most = s->shape->conv_width - 1;
    return pos < most ? pos : most;
}

size_t store_state_packed_bytes(const struct store *s, int pos)
{
    const struct backend_shape *sh = s->shape;
    if (sh->n_delta_layers == 0 || pos < 0)
        return 0;
    size_t row = key_row_floats(sh) + value_row_floats(sh) + (size_t)sh->delta_v_heads;
    size_t floats = matrix_floats(sh) + (size_t)pending_rows(pos) * row + (size_t)history_rows(s, pos) * conv_channels(sh);
    return (size_t)sh->n_delta_layers * floats * sizeof(float);
}

/* One run of floats that is contiguous both in the image and in the slot. */
struct run {
    float *data;
    size_t bytes;
};

static int packed_runs(const struct store *s, int pos)
{
    return s->shape->n_delta_layers * (1 + 3 + history_rows(s, pos));
}

/* Run i of the image, in order: the one statement of the layout, for both directions. */
static struct run packed_run(const struct store *s, int32_t state, int pos, int i)
{
    const struct backend_shape *sh = s->shape;
    const int layers = sh->n_delta_layers, history = history_rows(s, pos);
    const size_t n = (size_t)pending_rows(pos);
    if (i < layers)
        return (struct run){store_delta(s, state, i).m, matrix_floats(sh) * sizeof(float)};
    i -= layers;
    if (i < 3 * layers) {
        struct delta_state d = store_delta(s, state, i / 3);
        if (i % 3 == 0)
            return (struct run){d.k, n * key_row_floats(sh) * sizeof(float)};
        if (i % 3 == 1)
            return (struct run){d.u, n * value_row_floats(sh) * sizeof(float)};
        return (struct run){d.g, n * (size_t)sh->delta_v_heads * sizeof(float)};
    }
    i -= 3 * layers; /* only when history > 0 */
    const int p = pos - history + i % history;
    const size_t row = (size_t)(p % s->ring) * conv_channels(sh);
    return (struct run){store_delta(s, state, i / history).conv + row, conv_channels(sh) * sizeof(float)};
}

/* dst takes store_state_packed_bytes(pos) bytes. The state is valid and pos >= 0 (the caller checks). */
void store_state_save(const struct store *s, int32_t state, int pos, void *dst)
{
    char *image = dst;
    for (int i = 0; i < packed_runs(s, pos); i++) {
        struct run run = packed_run(s, state, pos, i);
        memcpy(image, run.data, run.bytes);
        image += run.bytes;
    }
}

/* The slot then holds what it held when `src` was saved, as far as rows from pos on can tell. */
void store_state_load(struct store *s, int32_t state, int pos, const void *src)
{
    const char *image = src;
    for (int i = 0; i < packed_runs(s, pos); i++) {
        struct run run = packed_run(s, state, pos, i);
        memcpy(run.data, image, run.bytes);
        image += run.bytes;
    }
}

/* ---- a step ---- */

void store_fail(struct store *s, const char *format, ...)
{
    if (s->error.text[0])
        return;
    va_list args;
    va_start(args, format);
    vsnprintf(s->error.text, sizeof s->error.text, format, args);
    va_end(args);
}

/* Checks one span; `row` is where it must begin. Returns its number of pages, or -1 with the sticky error set. */
static int check_span(struct store *s, const struct span *span, int row, int n_rows)
{
    if (span->row != row || span->n < 1 || span->n > n_rows - row || span->pos < 0 || span->pos > INT_MAX - span->n) {
        store_fail(s, "step: a span of %d rows at row %d, position %d does not continue at row %d of %d", span->n, span->row, span->pos, row, n_rows);
        return -1;
    }
    if (s->shape->n_delta_layers > 0 && !has_state(s, span->state))
        return -1;
    if (s->shape->n_kv_layers == 0)
        return 0;
    int n_pages = (span->pos + span->n - 1) / GRID + 1;
    if (!span->pages) {
        store_fail(s, "step: the span at row %d has no pages", row);
        return -1;
    }
    for (int i = 0; i < n_pages; i++)
        if (!has_page(s, span->pages[i]))
            return -1;
    return n_pages;
}

/* The whole step's description is checked before anything of it is kept. Returns the number of pages in all, or -1. */
static int64_t check_step(struct store *s, const int32_t *ids, int n_rows, const struct span *spans, int n_spans)
{
    int64_t total = 0;
    int row = 0;
    if (n_rows < 1 || n_rows > s->shape->max_rows || n_spans < 1 || n_spans > n_rows) {
        store_fail(s, "step: %d rows in %d spans; at most %d rows fit", n_rows, n_spans, s->shape->max_rows);
        return -1;
    }
    for (int i = 0; i < n_spans; i++) {
        int n_pages = check_span(s, &spans[i], row, n_rows);
        if (n_pages < 0)
            return -1;
        total += n_pages;
        row += spans[i].n;
        for (int j = 0; j < i && s->shape->n_delta_layers > 0; j++) {
            if (spans[j].state != spans[i].state)
                continue;
            store_fail(s, "step: state slot %d is used by two spans", spans[i].state);
            return -1;
        }
    }
    if (row != n_rows) {
        store_fail(s, "step: the spans cover %d of %d rows", row, n_rows);
        return -1;
    }
    for (int i = 0; i < n_rows; i++) {
        if (ids[i] >= 0 && ids[i] < s->shape->n_vocab)
            continue;
        store_fail(s, "step: the token id of row %d is %d, outside the vocabulary of %d", i, ids[i], s->shape->n_vocab);
        return -1;
    }
    return total;
}

/* After a refused step n_rows is 0, so that operations have nothing to do even if they did not look at the error. */
void store_begin(struct store *s, const int32_t *ids, int n_rows, const struct span *spans, int n_spans)
{
    s->n_rows = s->n_spans = 0;
    if (s->error.text[0])
        return;
    int64_t total = check_step(s, ids, n_rows, spans, n_spans);
    if (total < 0)
        return;
    if (alloc_grow(&s->ids, &s->cap_ids, (size_t)n_rows, sizeof *s->ids) || alloc_grow(&s->spans, &s->cap_spans, (size_t)n_spans, sizeof *s->spans) ||
        alloc_grow(&s->span_pages, &s->cap_span_pages, (size_t)total, sizeof *s->span_pages)) {
        store_fail(s, "step: out of memory for %d rows and %lld page ids", n_rows, (long long)total);
        return;
    }
    memcpy(s->ids, ids, (size_t)n_rows * sizeof *ids);
    int32_t *pages = s->span_pages;
    for (int i = 0; i < n_spans; i++) {
        s->spans[i] = spans[i];
        s->spans[i].pages = NULL;
        if (s->shape->n_kv_layers == 0)
            continue;
        size_t n_pages = (size_t)((spans[i].pos + spans[i].n - 1) / GRID + 1);
        memcpy(pages, spans[i].pages, n_pages * sizeof *pages);
        s->spans[i].pages = pages;
        pages += n_pages;
    }
    s->n_rows = n_rows;
    s->n_spans = n_spans;
}
