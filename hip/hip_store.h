/* hip/hip_store.h: the memory operations of engine/backend.h on a GPU, and what hip.c needs of them. Private to hip/. */
#ifndef BEDSIDE_HIP_STORE_H
#define BEDSIDE_HIP_STORE_H

#include "hip/hip_impl.h"

enum { SLOT_ALIGN = 256 };

/* Device addresses of KV pages or state slots by number. */
struct addresses {
    uint64_t *at; /* [n] */
    int n;
    size_t cap;
};

struct hip_store {
    struct buffer *buffers;
    struct weight *weights;
    struct addresses pages, states;
    void **slabs; /* [n_slabs], what the addresses point into */
    size_t n_slabs, cap_slabs;
    uint64_t loaded, reported; /* bytes of weights; when the last progress line was written, clock_ns */
};

int hip_store_open(struct hip *h, struct error *err);
void hip_store_close(struct hip *h);

struct buffer *hip_buffer_new(struct backend *b, size_t bytes, struct error *err);
void hip_buffer_free(struct backend *b, struct buffer *buf);
int hip_buffer_read(struct backend *b, struct buffer *src, size_t offset, void *dst, size_t bytes, struct error *err);
int hip_buffer_write(struct backend *b, struct buffer *dst, size_t offset, const void *src, size_t bytes, struct error *err);
struct weight *hip_weight_new(struct backend *b, const struct weight_desc *desc, struct error *err);
int hip_pages_reserve(struct backend *b, int n, struct error *err);
int hip_states_reserve(struct backend *b, int n, struct error *err);
size_t hip_page_bytes(const struct backend *b);
size_t hip_state_bytes(const struct backend *b);
void hip_state_reset(struct backend *b, int32_t state);
void hip_state_copy(struct backend *b, int32_t dst, int32_t src);
void hip_page_copy(struct backend *b, int32_t dst, int32_t src);
size_t hip_state_packed_bytes(const struct backend *b, int pos);
int hip_state_save(struct backend *b, int32_t state, int pos, void *dst, struct error *err);
int hip_state_load(struct backend *b, int32_t state, int pos, const void *src, struct error *err);
int hip_page_save(struct backend *b, int32_t page, void *dst, struct error *err);
int hip_page_load(struct backend *b, int32_t page, const void *src, struct error *err);

#endif
