/* engine/pages.h: the KV pages and who uses them. Private to the engine.
 *
 * A full page never changes, so sequences and the prefix cache share it by counting: `users` are sequences, `keepers` are places in the cache. A
 * page with neither is free; one with keepers alone is idle: it may be taken away from the cache whenever a sequence needs room. */
#ifndef BEDSIDE_ENGINE_PAGES_H
#define BEDSIDE_ENGINE_PAGES_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "engine/backend.h"
#include "engine/sequence.h"

struct page_counts {
    uint32_t users, keepers;
};

struct page_pool {
    struct backend *backend;
    struct slots slots;
    struct page_counts *counts; /* [slots.reserved] */
    size_t cap_counts;
    int n_running; /* pages with users */
    int n_idle;    /* pages with keepers only */
};

void pages_open(struct page_pool *p, struct backend *b, int total);
void pages_close(struct page_pool *p);

/* Sees to it that n pages can be taken. -1 with err, and nothing changed, when the total or the memory does not allow it. */
int pages_prepare(struct page_pool *p, int n, struct error *err);

/* After pages_prepare(n) has failed: whether memory was short although the total allows n more. Then the total becomes what there is, so that nobody
 * counts on the rest again. */
bool pages_settle(struct page_pool *p, int n);
int pages_ready(const struct page_pool *p); /* how many can be taken right now */

int32_t pages_take(struct page_pool *p); /* only when one is ready; it has one user */
void pages_use(struct page_pool *p, int32_t page);
void pages_leave(struct page_pool *p, int32_t page);   /* one user less */
void pages_keep(struct page_pool *p, int32_t page);    /* of a page in use or kept */
void pages_discard(struct page_pool *p, int32_t page); /* one keeper less */

/* Whether the cache alone holds it. */
static inline bool pages_idle(const struct page_pool *p, int32_t page)
{
    return p->counts[page].users == 0;
}

#endif
