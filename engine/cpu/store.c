#include "engine/cpu/store.h"

#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"

/* ---- opening ---- */

/* shape must outlive the store. 0 or -1. */
int store_open(struct store *s, const struct backend_shape *shape, struct error *err)
{
    memset(s, 0, sizeof *s);
    s->shape = shape;
    if (slot_check_shape(shape, err))
        return -1;
    s->ring = slot_ring(shape);
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

struct weight *store_weight_new(struct store *s, const struct weight_desc *desc, struct error *err)
{
    const char *name = desc->name ? desc->name : "?";
    if (slot_check_weight(desc, err))
        return NULL;
    struct weight *w = alloc_array(1, sizeof *w);
    if (!w) {
        error_set(err, "out of memory for tensor %s", name);
        return NULL;
    }
    w->desc = *desc;
    w->row_bytes = block_bytes(desc->type, (size_t)desc->n_in);
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
    return slot_page_bytes(s->shape);
}

size_t store_state_bytes(const struct store *s)
{
    return slot_state_bytes(s->shape);
}

struct delta_state store_delta(const struct store *s, int32_t state, int layer)
{
    const struct slot_layer at = slot_layer(s->shape, layer);
    float *base = s->states[state];
    const size_t f = sizeof(float);
    return (struct delta_state){.m = base + at.m / f, .k = base + at.k / f, .u = base + at.u / f, .g = base + at.g / f, .conv = base + at.conv / f};
}

void *store_k(const struct store *s, int32_t page, int layer, int head)
{
    return s->pages[page] + slot_page_offset(s->shape, layer, false, head);
}

void *store_v(const struct store *s, int32_t page, int layer, int head)
{
    return s->pages[page] + slot_page_offset(s->shape, layer, true, head);
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
        memset(store_delta(s, state, layer).m, 0, slot_matrix_bytes(s->shape));
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

/* ---- packed states ---- */

size_t store_state_packed_bytes(const struct store *s, int pos)
{
    return slot_packed_bytes(s->shape, pos);
}

/* dst takes store_state_packed_bytes(pos) bytes. The state is valid and pos >= 0 (the caller checks). */
void store_state_save(const struct store *s, int32_t state, int pos, void *dst)
{
    const char *slot = (const char *)s->states[state];
    char *image = dst;
    for (int i = 0; i < slot_packed_runs(s->shape, pos); i++) {
        const struct slot_run run = slot_packed_run(s->shape, pos, i);
        memcpy(image, slot + run.offset, run.bytes);
        image += run.bytes;
    }
}

/* The slot then holds what it held when `src` was saved, as far as rows from pos on can tell. */
void store_state_load(struct store *s, int32_t state, int pos, const void *src)
{
    char *slot = (char *)s->states[state];
    const char *image = src;
    for (int i = 0; i < slot_packed_runs(s->shape, pos); i++) {
        const struct slot_run run = slot_packed_run(s->shape, pos, i);
        memcpy(slot + run.offset, image, run.bytes);
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

/* After a refused step n_rows is 0, so that operations have nothing to do even if they did not look at the error. */
void store_begin(struct store *s, const int32_t *ids, int n_rows, const struct span *spans, int n_spans)
{
    s->n_rows = s->n_spans = 0;
    if (s->error.text[0])
        return;
    const int64_t total = slot_check_step(s->shape, s->n_pages, s->n_states, ids, n_rows, spans, n_spans, &s->error);
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
