/* The engine and the prefix cache's files: beginning a sequence with what was read, and handing over what was computed. */
#include "engine/engine_impl.h"

#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "engine/cache_disk.h"

enum { NOBODY = 0 }; /* the maker of what was read: no sequence's serial, so that it may make room for what the sequence goes on to take */

/* ---- reading ---- */

/* Whether the image is one that this prompt can begin with; the disk has checked its content. */
static bool image_fits(const struct engine *e, int n_prompt, const struct cache_image *m)
{
    if (m->first_page < 0 || m->n_pages < 0 || (m->n_pages && !m->pages) || cache_image_end(m) >= n_prompt || (int64_t)m->first_page + m->n_pages < 1)
        return false;
    const size_t state = e->cache->o.state_bytes;
    if (m->tail)
        return state && m->tail < GRID && m->state && m->state_bytes == engine_cache_tail_bytes(e, (int)cache_image_end(m));
    return m->n_pages && (state ? m->state && m->state_bytes == state : true);
}

/* Shares the pages of the prompt's first `depth` cells that memory holds; the others' places get -1. Returns how many those are, or -1 when one
 * before `first` is among them. */
static int share_known(struct engine *e, struct sequence *s, const int32_t *prompt, int depth, int first)
{
    const struct prefix_found f = prefix_find(e->cache, s->space, prompt, depth * GRID, s->n_shared);
    int missing = depth;
    for (int i = 0; i < depth; i++)
        s->pages[i] = -1;
    for (const struct prefix_cell *c = f.known; c; c = c->parent)
        if (c->page >= 0) {
            s->pages[c->depth - 1] = c->page;
            pages_use(&e->pages, c->page);
            missing--;
        }
    s->n_pages = depth;
    for (int i = 0; i < first && i < depth; i++)
        if (s->pages[i] < 0)
            return -1;
    return missing;
}

static int load(struct engine *e, struct sequence *s, int depth, const struct cache_image *m)
{
    const struct backend_ops *ops = e->backend->ops;
    for (int i = 0; i < depth; i++) {
        if (s->pages[i] >= 0)
            continue;
        s->pages[i] = pages_take(&e->pages);
        if (ops->page_load(e->backend, s->pages[i], m->pages + (size_t)(i - m->first_page) * e->info.page_bytes, NULL))
            return -1;
    }
    if (m->tail)
        return engine_cache_tail_load(e, s, depth * GRID + m->tail, m->state);
    return s->state >= 0 ? ops->state_load(e->backend, s->state, depth * GRID, m->state, NULL) : 0;
}

/* The snapshot that was read is memory's from now on, where its budget has room. */
static struct prefix_snapshot *keep_state(struct engine *e, struct sequence *s, const int32_t *prompt, struct cache_image *m)
{
    struct prefix_cell *cell = s->cell;
    const int32_t *ids = prompt + (size_t)cell->depth * GRID;
    struct prefix_snapshot *known = m->tail ? prefix_tail(cell, ids, m->tail) : cell->snapshot;
    if (known || !m->state || (m->tail && !engine_cache_may_hang(s, s->length)) || !prefix_snapshot_reserve(e->cache, NOBODY, m->state_bytes))
        return known;
    if (m->tail)
        prefix_tail_put(e->cache, cell, ids, m->tail, m->state, m->state_bytes, NOBODY);
    else
        prefix_snapshot_put(e->cache, cell, m->state, NOBODY);
    m->state = NULL;
    return m->tail ? prefix_tail(cell, ids, m->tail) : cell->snapshot;
}

int engine_disk_import(struct engine *e, struct sequence *s, const int32_t *prompt, int n_prompt, struct cache_image *image)
{
    if (!image_fits(e, n_prompt, image))
        return 0;
    const int depth = image->first_page + image->n_pages, length = depth * GRID + image->tail;
    if (sequence_room(s, length))
        return 0;
    const int missing = share_known(e, s, prompt, depth, image->first_page);
    if (missing < 0 || engine_pages(e, missing, NULL) || load(e, s, depth, image)) {
        engine_cache_unbegin(e, s);
        return 0;
    }
    s->length = s->high = s->held_from = length;
    memcpy(s->ids, prompt, (size_t)s->length * sizeof *s->ids);
    if (engine_cache_extend(e, s))
        return s->length; /* not known to others, but begun */
    prefix_hit(e->cache, s->space, s->cell, keep_state(e, s, prompt, image));
    return s->length;
}

/* ---- writing ---- */

/* The keys of the sequence's first `depth` cells in its own namespace. */
static int make_keys(struct sequence *s, int depth)
{
    if (alloc_grow(&s->keys, &s->cap_keys, (size_t)depth, sizeof *s->keys))
        return -1;
    for (; s->n_keys < depth; s->n_keys++) {
        const struct cache_key *before = s->n_keys ? &s->keys[s->n_keys - 1] : &s->space->root;
        s->keys[s->n_keys] = cache_key_next(before, s->ids + (size_t)s->n_keys * GRID, GRID);
    }
    return 0;
}

/* Whether the page is queued now. */
static bool queue_page(struct engine *e, const struct sequence *s, int i)
{
    uint8_t *data = malloc(e->info.page_bytes);
    if (!data)
        return false;
    if (e->backend->ops->page_save(e->backend, s->pages[i], data, NULL)) {
        e->backend->ops->sync(e->backend, NULL);
        free(data);
        return false;
    }
    const struct cache_key *parent = i ? &s->keys[i - 1] : &s->space->root;
    const bool queued = cache_disk_put_page(e->disk, s->space->name, &s->keys[i], parent, (i + 1) * GRID, s->ids + (size_t)i * GRID, data);
    e->counts.disk_queued += queued;
    return queued;
}

void engine_disk_queue(struct engine *e, struct sequence *s, int depth, const uint8_t *state)
{
    bool *page_missing = alloc_array((size_t)depth, sizeof *page_missing), state_missing = false;
    if (!page_missing || make_keys(s, depth)) {
        free(page_missing);
        return;
    }
    cache_disk_missing(e->disk, s->space->name, s->keys, depth, page_missing, &state_missing);
    bool whole = true; /* what comes behind a page that is missing is of no use */
    for (int i = 0; i < depth && whole; i++)
        whole = !page_missing[i] || queue_page(e, s, i);
    uint8_t *copy = state && state_missing && whole ? malloc(e->cache->o.state_bytes) : NULL;
    if (copy) {
        memcpy(copy, state, e->cache->o.state_bytes);
        e->counts.disk_queued += cache_disk_put_state(e->disk, s->space->name, &s->keys[depth - 1], depth * GRID, copy);
    }
    free(page_missing);
}

void engine_disk_queue_tail(struct engine *e, struct sequence *s, const struct prefix_snapshot *tail)
{
    const int depth = tail->cell->depth;
    if (make_keys(s, depth))
        return;
    const struct cache_key key = cache_key_next(&s->keys[depth - 1], tail->ids, tail->n);
    const bool there = cache_disk_use_tail(e->disk, s->space->name, &key); /* before its pages: a text is evicted from its end */
    engine_disk_queue(e, s, depth, NULL);
    /* Where not all pages found room in the queue, the last did not: the tail is of no use without it. */
    uint8_t *copy = !there && cache_disk_has(e->disk, s->space->name, &s->keys[depth - 1], false) ? malloc(tail->bytes) : NULL;
    if (!copy)
        return;
    memcpy(copy, tail->data, tail->bytes);
    e->counts.disk_queued += cache_disk_put_tail(e->disk, s->space->name, &key, &s->keys[depth - 1], prefix_tail_end(tail), copy, tail->bytes);
}
