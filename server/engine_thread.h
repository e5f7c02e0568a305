/* server/engine_thread.h: the one thread that uses the engine.
 *
 * It takes one piece of work at a time, does it, and calls back. From engine_thread_start to engine_thread_stop nobody else may call the engine
 * (its tokenizer and info struct are immutable and free for all). */
#ifndef BEDSIDE_SERVER_ENGINE_THREAD_H
#define BEDSIDE_SERVER_ENGINE_THREAD_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "engine/engine.h"

struct engine_thread;

/* A function to be run between steps. */
struct work_call {
    void (*run)(struct engine *e, void *ctx);
    void *ctx;
    struct work_call *next;
};

/* A sequence to be started. */
struct work_start {
    struct sequence_options options;
    /* filled in */
    struct sequence *seq; /* NULL: failed, `err` says why */
    struct cache_result cache;
    int length, stop; /* sequence_length, sequence_stop */
    struct error err;
};

/* One sequence's part of a step. */
struct work_item {
    struct sequence *seq;
    const int32_t *tokens; /* [n_tokens] >= 1 */
    int n_tokens;
    struct sampler *sampler; /* NULL: nothing is picked */
    /* filled in */
    struct pick pick;
    int stop;    /* sequence_stop */
    bool failed; /* the sequence has not changed, unless the device failed */
    struct error err;
};

/* Sequences to free, then functions to call, then a sequence to start, then the rows of one step. Each may be absent. */
struct work {
    struct sequence **drop; /* [n_drop] */
    int n_drop;
    struct work_call *calls;  /* a list, or NULL */
    struct work_start *start; /* or NULL */
    struct work_item *items;  /* [n_items] */
    int n_items;
    /* filled in */
    uint64_t step_ns; /* of a step that went through as a whole, else 0 */
    struct engine_cache_stats cache;
};

struct engine_thread_options {
    struct engine *engine; /* stays the caller's, who closes it after engine_thread_stop */
    int max_items;
    void (*done)(void *ctx); /* on the engine thread, after each piece of work */
    void *ctx;
    uint64_t (*clock)(void *ctx); /* ns */
    void *clock_ctx;
};

int engine_thread_start(struct engine_thread **out, const struct engine_thread_options *options, struct error *err);

/* Hands over *w, which belongs to the engine thread until `done`. Only one at a time, and at most max_items items.
 *
 * When the step fails as a whole its items are tried one by one, so that a request which cannot be served takes no other down. */
void engine_thread_post(struct engine_thread *t, struct work *w);

/* Waits for the work in hand (whose `done` is called) and ends the thread. t may be NULL. */
void engine_thread_stop(struct engine_thread *t);

#endif
