/* engine/prefix_cache.h: the text whose KV pages and recurrent states are kept in memory. Private to the engine, one thread.
 *
 * A tree of cells. A cell is GRID tokens of text at one place of a conversation: it has their KV page and, at a few useful places, a snapshot of
 * the recurrent state at its end. Cells are found by a chain hash of everything before them (cache_key), and then compared token by token, parent
 * by parent: a collision can cost time, never a wrong hit. A sequence can begin ("land") behind a cell that has its page and a
 * snapshot; a model without recurrent layers can land behind any cell.
 *
 * A tail is a snapshot between grid lines, where a message ends: it hangs on the cell before it and holds what no cell does, the fewer than GRID tokens
 * after the grid line, a copy of the page they lie in and the state at their end. It goes when the cell's page goes.
 *
 * Each namespace is a space of its own: cells of one are never seen from another. The one exception, when the engine asks for it, are shared cells (the
 * system + tools prefix): these belong to no namespace, and cells of several may follow them.
 *
 * A cell whose page was taken away is kept for a while as bare text: so a miss can say that the text was evicted, and a second visitor knows where it
 * branches off. Pages are counted in the page pool; whatever only the cache holds is given up on demand (prefix_reclaim). Snapshots have a byte
 * budget. What goes first is what saves the fewest tokens per byte, weighed by use and age:
 *
 *     score = tokens from the landing point above / bytes * (1 + hits) * 2^(-age / half-life)
 *
 * No failure in here is an error for a request: the worst that happens is that nothing is kept. */
#ifndef BEDSIDE_ENGINE_PREFIX_CACHE_H
#define BEDSIDE_ENGINE_PREFIX_CACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/cache_key.h"
#include "engine/pages.h"

enum { PREFIX_HALF_LIFE_S = 3600 };

struct prefix_cache;

/* A namespace. Lives while it has cells or guests. */
struct prefix_space {
    char name[CACHE_NAMESPACE_MAX + 1];
    struct cache_key root;
    struct prefix_space *next;
    struct prefix_cell *first; /* cells at the start of a text; the shared ones are in the cache's own space */
    int n_cells, n_pages, n_snapshots;
    uint64_t snapshot_bytes;
    int guests; /* sequences that hold a pointer to it */
    uint64_t hits, used;
};

struct prefix_snapshot {
    struct prefix_cell *cell;
    size_t place;  /* in the cache's list */
    uint8_t *data; /* [bytes]: the state; of a tail the page, then the state */
    size_t bytes;
    uint64_t maker; /* the sequence that took it */
    uint64_t hits, used;
    int n;                        /* tokens after the cell's end; 0 = the cell's own snapshot, otherwise a tail */
    int32_t ids[GRID];            /* [n] */
    struct prefix_snapshot *next; /* the cell's tails */
};

struct prefix_cell {
    struct cache_key key;
    struct prefix_space *space;
    struct prefix_cell *parent;              /* NULL at the start of the text */
    struct prefix_cell *first, *prev, *next; /* children; siblings */
    struct prefix_cell *bucket;
    size_t place;      /* in the cache's list */
    int depth;         /* 1 = the first; the cell ends at position depth * GRID */
    int32_t page;      /* -1: bare text */
    int n_paged;       /* children with a page */
    bool had_snapshot; /* one, or a tail, was here and was evicted */
    struct prefix_snapshot *snapshot;
    struct prefix_snapshot *tails; /* in no order */
    uint64_t hits, used;
    int32_t ids[GRID];
};

struct prefix_options {
    struct page_pool *pages;
    size_t page_bytes;
    size_t state_bytes; /* of a snapshot; 0 = the model has no recurrent state, any cell can be landed on */
    uint64_t budget;    /* bytes of snapshots */
    int max_bare;       /* cells without a page that are remembered */
    uint8_t model_id[CACHE_MODEL_ID];
};

struct prefix_cache {
    struct prefix_options o;
    uint64_t now;                /* ns, set by the caller: only differences count */
    struct prefix_space *spaces; /* named ones */
    struct prefix_space shared;
    struct prefix_cell **buckets;
    size_t n_buckets; /* a power of two */
    struct prefix_cell **cells;
    size_t n_cells, cap_cells;
    struct prefix_snapshot **snapshots;
    size_t n_snapshots, cap_snapshots;
    int n_bare;
    uint64_t bytes; /* of snapshots */
    uint8_t *spare; /* a buffer for the next snapshot, or NULL */
    uint64_t snapshots_evicted, pages_evicted;
};

/* NULL when out of memory. */
struct prefix_cache *prefix_open(const struct prefix_options *o);
void prefix_close(struct prefix_cache *c); /* may be NULL; discards all pages */

/* The namespace, made when it is new; NULL when out of memory. Each enter is answered by a leave. */
struct prefix_space *prefix_enter(struct prefix_cache *c, const char *name);
void prefix_leave(struct prefix_cache *c, struct prefix_space *s);

/* ---- finding ---- */

enum prefix_loss { PREFIX_COMPLETE, PREFIX_UNKNOWN, PREFIX_EMPTY, PREFIX_NO_STATE, PREFIX_EVICTED };

struct prefix_found {
    struct prefix_cell *landing;  /* deepest cell that the text can begin behind, with at least one token left; NULL: none */
    struct prefix_snapshot *tail; /* a tail that reaches deeper than the landing, with at least one token left; NULL: none */
    struct prefix_cell *known;    /* deepest cell with the same text, page or not; NULL: none */
    int matched;                  /* tokens of the text that are known, the part of a cell included */
    enum prefix_loss loss;        /* what was lost between the landing and the last grid line of the known text */
};

/* Looks a text up. n_shared: how many of its first cells are shared ones. Changes nothing. */
struct prefix_found prefix_find(const struct prefix_cache *c, const struct prefix_space *s, const int32_t *ids, int n, int n_shared);

/* Notes that a sequence begins behind `landing` with this snapshot, the cell's own or a tail; NULL: the model needs none. */
void prefix_hit(struct prefix_cache *c, struct prefix_space *s, struct prefix_cell *landing, struct prefix_snapshot *snapshot);

/* Tokens up to the end of the cell or of the tail. */
static inline int prefix_tail_end(const struct prefix_snapshot *tail)
{
    return tail->cell->depth * GRID + tail->n;
}

static inline bool prefix_can_land(const struct prefix_cache *c, const struct prefix_cell *cell)
{
    return cell->page >= 0 && (cell->snapshot || c->o.state_bytes == 0);
}

/* ---- keeping ---- */

/* The cell that follows `parent` (NULL: begins the text) with this text, made when it is new; it keeps `page` unless it had one already (then
 * the caller should use cell->page instead of its own: the content is the same). All cells above must have pages. `shared`: among the first
 * n_shared. NULL when out of memory. */
struct prefix_cell *prefix_add(struct prefix_cache *c, struct prefix_space *s, struct prefix_cell *parent, const int32_t ids[GRID], int32_t page,
                               bool shared);

/* Snapshots. Room for one: a buffer of `bytes` (state_bytes; of a tail what it needs) to fill, then a _put or _cancel; NULL when there is no memory,
 * or when only snapshots by `maker` itself could make room. _reserve: the same for a buffer that the caller has (from malloc). _put: the cell has a page and
 * no snapshot (no tail with this text); data is the cache's, also when it fails (-1). */
uint8_t *prefix_snapshot_room(struct prefix_cache *c, uint64_t maker, size_t bytes);
bool prefix_snapshot_reserve(struct prefix_cache *c, uint64_t maker, size_t bytes);
int prefix_snapshot_put(struct prefix_cache *c, struct prefix_cell *cell, uint8_t *data, uint64_t maker);
int prefix_tail_put(struct prefix_cache *c, struct prefix_cell *cell, const int32_t *ids, int n, uint8_t *data, size_t bytes, uint64_t maker);
void prefix_snapshot_cancel(struct prefix_cache *c, uint8_t *data, size_t bytes);

/* The cell's tail with exactly these n tokens, or NULL. */
struct prefix_snapshot *prefix_tail(const struct prefix_cell *cell, const int32_t *ids, int n);

/* Takes a snapshot away from its cell, to write another one into its buffer. */
uint8_t *prefix_snapshot_steal(struct prefix_cache *c, struct prefix_cell *cell);

/* ---- giving up ---- */

/* Gives up idle pages, the least worthy first, until n have become free. Returns how many have. */
int prefix_reclaim(struct prefix_cache *c, int n);

struct prefix_dropped {
    int pages, snapshots;
    uint64_t snapshot_bytes;
};
/* Forgets all cells of a namespace. No sequence may hold pointers to its cells any more. */
struct prefix_dropped prefix_drop(struct prefix_cache *c, const char *name);

#endif
