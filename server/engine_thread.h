/* server/engine_thread.h: the one thread that uses the engine.
 *
 * It takes one piece of work at a time, does it, and calls back. From engine_thread_start to engine_thread_stop nobody else may call the engine
 * (its tokenizer and info struct are immutable and free for all). */
#ifndef BEDSIDE_SERVER_ENGINE_THREAD_H
#define BEDSIDE_SERVER_ENGINE_THREAD_H

#include <stdbool.h>

#include "base/error.h"
#include "engine/engine.h"

struct engine_thread;

/* One sequence's part of a step. */
struct work_item {
    struct sequence **seq; /* *seq NULL: a sequence is made and left there */
    const int32_t *tokens; /* [n_tokens] >= 1 */
    int n_tokens;
    struct sampler *sampler; /* NULL: nothing is picked */
    /* filled in */
    struct pick pick;
    bool failed;
    struct error err;
};

/* Sequences to free first, then the rows of one step. Both may be empty. */
struct work {
    struct sequence **drop; /* [n_drop] */
    int n_drop;
    struct work_item *items; /* [n_items] */
    int n_items;
};

/* `done(ctx)` is called on the engine thread after each piece of work. The engine stays the caller's, who closes it after engine_thread_stop. */
int engine_thread_start(struct engine_thread **out, struct engine *e, int max_items, void (*done)(void *ctx), void *ctx, struct error *err);

/* Hands over *w, which belongs to the engine thread until `done`. Only one at a time, and at most max_items items.
 *
 * When the step fails as a whole its items are tried one by one, so that a request which cannot be served takes no other down. */
void engine_thread_post(struct engine_thread *t, struct work *w);

/* Waits for the work in hand (whose `done` is called) and ends the thread. t may be NULL. */
void engine_thread_stop(struct engine_thread *t);

#endif
