/* engine/sequence.h: what the engine keeps of a sequence, and the free lists of pages and state slots. Private to the engine. */
#ifndef BEDSIDE_ENGINE_SEQUENCE_H
#define BEDSIDE_ENGINE_SEQUENCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "engine/backend.h"
#include "engine/cache_key.h"
#include "engine/prefix_plan.h"

struct page_pool;
struct prefix_cell;
struct prefix_space;

/* Small integers 0 .. total-1 that name pages or states. They are reserved from the backend as they are first needed and used again after. */
struct slots {
    int total;    /* most there may ever be */
    int reserved; /* the backend has memory for these */
    int32_t *free_list;
    size_t cap;
    int n_free;
    int (*reserve)(struct backend *b, int n, struct error *err);
};

/* Sees to it that n can be taken, reserving at least `step` more at a time. -1 with err, and nothing changed, when the total or the memory does not
 * allow it. */
int slots_prepare(struct slots *s, struct backend *b, int n, int step, struct error *err);
int32_t slots_take(struct slots *s); /* only after slots_prepare */
void slots_give(struct slots *s, int32_t slot);
int slots_available(const struct slots *s); /* free or not yet reserved */
void slots_close(struct slots *s);

enum { HELD = ROLLBACK + 1 }; /* hidden rows kept for the draft block: the last one, and those a rollback may come back to */

struct sequence {
    int length;   /* tokens fed so far */
    int high;     /* the most it ever was: the convolution's history reaches back from here */
    int32_t *ids; /* [length] */
    size_t cap_ids;
    int32_t *pages; /* [n_pages], in order of position */
    size_t cap_pages;
    int n_pages;
    int32_t state; /* slot, or -1 */
    float *held;   /* [HELD][D]: the hidden row of position p at p % HELD; NULL without a draft block */
    int held_from; /* rows of positions before this one are not there: the text was taken from the cache */
    bool in_step;  /* seen in the step being checked */
    bool lost;     /* a device failure in mid-step left its recurrent state undefined */

    /* The prefix cache's part (engine_cache.c). While `space` is set the first n_cells pages are those of the cells from `cell` up. */
    struct prefix_space *space; /* NULL: neither uses nor feeds the cache */
    struct prefix_cell *cell;   /* the last full page's; NULL before the first */
    int n_cells;
    uint64_t serial;             /* tells its snapshots from others' */
    int n_prompt;                /* from here on it is decoding */
    int n_shared, shared_end;    /* its first cells, those of the shared system prefix; tokens of that prefix */
    int plan[PLAN_MOST], n_plan; /* lengths at which a snapshot is wanted */
    int next_plan;
    struct prefix_cell *decoded; /* the cell above with this sequence's last snapshot from decoding, as long as it is there; or NULL */
    struct cache_key *keys;      /* [n_keys] of its cells in its own namespace, as far as the disk needed them */
    size_t cap_keys;
    int n_keys;
};

/* Pages that a sequence needs to hold `length` tokens. */
static inline int pages_for(int length)
{
    return length / GRID + (length % GRID != 0);
}

/* The hidden row of position p (>= 0, one of the last HELD). */
static inline float *sequence_held(const struct sequence *s, int p, int n_embd)
{
    return s->held + (size_t)(p % HELD) * (size_t)n_embd;
}

/* Room for `length` token ids and the page ids for them. 0, or -1 out of memory. */
int sequence_room(struct sequence *s, int length);

/* Gives back the pages beyond the first n. */
void sequence_drop_pages(struct sequence *s, struct page_pool *pages, int n);

#endif
