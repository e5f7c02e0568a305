/* server/scheduler.h: who runs when. One libuv loop thread that owns every job, and the engine thread that runs the steps it builds.
 *
 * A job is one prompt to be read and one answer to be written. It waits in a queue (first come, first served) until there is a place and memory
 * for all it may ever need: ceil((prompt + max_tokens) / GRID) pages are set aside when it is admitted, so that a running answer never has
 * to be broken off for want of memory. A step has one row for every answer being written, and prompt chunks up to a budget; prompts share
 * the budget in turn, so that a short one does not sit behind a long one.
 *
 * Messages come in from any thread under a mutex and uv_async, results go out through the job's callbacks on the scheduler's thread. Nothing
 * ticks while nothing runs. */
#ifndef BEDSIDE_SERVER_SCHEDULER_H
#define BEDSIDE_SERVER_SCHEDULER_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "engine/engine.h"

enum {
    SCHEDULER_DECODING_CHUNK = 128, /* prompt tokens per step while an answer is being written, so that its text keeps flowing */
};

struct scheduler;
struct job;

enum job_end {
    JOB_STOP,      /* the model ended the answer, or the token callback did */
    JOB_LENGTH,    /* max_tokens were written */
    JOB_CANCELLED, /* job_cancel */
    JOB_REFUSED,   /* the server shuts down */
    JOB_FAILED,    /* the engine could not; `message` says why */
};

struct job_options {
    const int32_t *prompt; /* [n_prompt] >= 1, copied */
    int n_prompt;
    int max_tokens;                        /* >= 1; n_prompt + max_tokens <= the context */
    const struct sampler_params *sampling; /* copied */

    /* All run on the scheduler's thread and must not block. `token` gets every picked token but the one that ends the generation; true: the
     * answer is over. `end` comes exactly once, and last. `release` frees ctx when the last reference to the job is dropped (any thread). */
    bool (*token)(void *ctx, const struct pick *pick);
    void (*end)(void *ctx, enum job_end why, const char *message);
    void (*release)(void *ctx);
    void *ctx;
};

struct scheduler_options {
    struct engine *engine;
    int max_running;   /* jobs read and written at once, at most the engine's max_sequences */
    int max_queue;     /* jobs waiting beyond those */
    int prefill_chunk; /* prompt tokens per step while nobody is being written to */
};

struct scheduler_stats {
    int running, queued;
    int pages_used, pages_total; /* KV pages set aside, and all there are */
    uint64_t steps;
};

/* The engine is the scheduler's alone until scheduler_close; it is not closed. */
int scheduler_open(struct scheduler **out, const struct scheduler_options *options, struct error *err);

/* Refuses new jobs and ends the waiting ones with JOB_REFUSED; running ones go on. */
void scheduler_drain(struct scheduler *s);

/* Ends all jobs (JOB_REFUSED) after the step in hand, and both threads. Jobs may outlive it: job_unref stays good. s may be NULL. */
void scheduler_close(struct scheduler *s);

struct scheduler_stats scheduler_stats(const struct scheduler *s); /* any thread */

enum submit_result {
    SUBMIT_OK,
    SUBMIT_FULL,      /* max_running + max_queue jobs are here already */
    SUBMIT_TOO_LARGE, /* needs more KV pages than there are: it could never run */
    SUBMIT_DRAINING,
    SUBMIT_NO_MEMORY,
};

/* KV pages that a job sets aside. */
int scheduler_pages(int n_prompt, int max_tokens);

/* On SUBMIT_OK *out is a reference for job_cancel and job_unref, and the callbacks may already run before this returns. Otherwise no callback is
 * ever called, not even `release`. Any thread. */
enum submit_result scheduler_submit(struct scheduler *s, const struct job_options *options, struct job **out);

/* Any thread, any number of times. Takes effect before the next step; `end` follows with JOB_CANCELLED unless the job ended by itself. */
void job_cancel(struct job *j);
int job_prompt_done(const struct job *j); /* prompt tokens read so far; any thread */
void job_unref(struct job *j);            /* j may be NULL */

#endif
