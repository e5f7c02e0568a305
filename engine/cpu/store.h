/* engine/cpu/store.h: the memory of the two CPU backends: buffers, weights, KV pages, DeltaNet states and their packed images.
 *
 * Both backends (plain.c, cpu.c) embed a `struct store` right after their `struct backend` and share these layouts, so that a test can run one
 * operation on each and compare everything it left behind. */
#ifndef BEDSIDE_ENGINE_CPU_STORE_H
#define BEDSIDE_ENGINE_CPU_STORE_H

#include "engine/slot_layout.h"

struct buffer {
    float *data; /* 64-byte aligned */
    size_t bytes;
    struct buffer *next;
};

struct weight {
    struct weight_desc desc; /* bytes stay where the caller mapped them */
    size_t row_bytes;        /* of one output row */
    char name[64];
    struct weight *next;
};

/* Bytes of output row `o` of matrix `mat`. */
static inline const uint8_t *weight_row(const struct weight *w, int64_t mat, int64_t o)
{
    return w->desc.data + (size_t)mat * w->desc.stride + (size_t)o * w->row_bytes;
}

/* One DeltaNet layer of one state slot; see delta_rule in engine/backend.h. Position p of a sequence stands at row p % GRID of k, u and G and
 * at row p % ring of conv. */
struct delta_state {
    float *m;    /* [HV][S key][S value], at the last grid line */
    float *k;    /* [GRID][HK][S], normalised keys since the grid line */
    float *u;    /* [GRID][HV][S] */
    float *g;    /* [GRID][HV], running sum of g since the grid line, this row included */
    float *conv; /* [ring][CH], raw u rows; rows before position 0 count as zero and are never read */
};

struct store {
    const struct backend_shape *shape;
    struct buffer *buffers;
    struct weight *weights;
    uint8_t **pages; /* [n_pages] */
    int n_pages, cap_pages;
    float **states; /* [n_states], each one block of all layers */
    int n_states, cap_states;
    int ring; /* rows of conv history, a power of two >= conv_width - 1 + ROLLBACK */
    /* the step in progress */
    int32_t *ids; /* [n_rows] */
    int n_rows;
    struct span *spans; /* [n_spans], page lists copied */
    int n_spans;
    int32_t *span_pages; /* all spans' page lists, one after the other */
    size_t cap_ids, cap_spans, cap_span_pages;
    struct error error; /* sticky, "" = none */
};

int store_open(struct store *s, const struct backend_shape *shape, struct error *err);
void store_close(struct store *s);

struct buffer *store_buffer_new(struct store *s, size_t bytes, struct error *err);
void store_buffer_free(struct store *s, struct buffer *buf);
struct weight *store_weight_new(struct store *s, const struct weight_desc *desc, struct error *err);
int store_pages_reserve(struct store *s, int n, struct error *err);
int store_states_reserve(struct store *s, int n, struct error *err);
size_t store_page_bytes(const struct store *s);
size_t store_state_bytes(const struct store *s);
void store_state_reset(struct store *s, int32_t state);
void store_state_copy(struct store *s, int32_t dst, int32_t src);
void store_page_copy(struct store *s, int32_t dst, int32_t src);
size_t store_state_packed_bytes(const struct store *s, int pos);
void store_state_save(const struct store *s, int32_t state, int pos, void *dst);
void store_state_load(struct store *s, int32_t state, int pos, const void *src);

/* Copies a step's description. Sets the sticky error when it is out of memory or inconsistent (page or state out of range...). */
void store_begin(struct store *s, const int32_t *ids, int n_rows, const struct span *spans, int n_spans);

/* Makes `err` the backend's sticky error unless one is already there. */
void store_fail(struct store *s, const char *format, ...) __attribute__((format(printf, 2, 3)));

struct delta_state store_delta(const struct store *s, int32_t state, int layer);

/* The keys or values of one KV head in a page: GRID rows of slot_kv_row_bytes, one after the other. */
void *store_k(const struct store *s, int32_t page, int layer, int kv_head);
void *store_v(const struct store *s, int32_t page, int layer, int kv_head);

#endif
