/* engine/sequence.h: what the engine keeps of a sequence, and the free lists of pages and state slots. Private to engine.c. */
#ifndef BEDSIDE_ENGINE_SEQUENCE_H
#define BEDSIDE_ENGINE_SEQUENCE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "engine/backend.h"

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
    int32_t *ids; /* [length] */
    size_t cap_ids;
    int32_t *pages; /* [n_pages], in order of position */
    size_t cap_pages;
    int n_pages;
    int32_t state; /* slot, or -1 */
    float *held;   /* [HELD][D]: the hidden row of position p at p % HELD; NULL without a draft block */
    bool in_step;  /* seen in the step being checked */
    bool lost;     /* a device failure in mid-step left its recurrent state undefined */
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
void sequence_drop_pages(struct sequence *s, struct slots *pages, int n);

#endif
