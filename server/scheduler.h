/* server/scheduler.h: who runs when. One libuv loop thread that owns every job, and the engine thread that runs the steps it builds.
 *
 * A job is one prompt to be read and one answer to be written. It waits in a queue (first come, first served) until there is a place and memory
 * for its prompt beside those that run; then its sequence is started from the prefix cache, the rest of the prompt is read in chunks, and the answer
 * is written token by token. A step has one row for every answer being written and prompt chunks up to a budget, which is kept so small that
 * the answers' text flows (server/step_budget.h).
 *
 * When answers grow until memory is short, the cache's idle pages go first (engine/engine.h); then the youngest job is paused: its sequence is
 * freed, its text and sampler are kept, and it is started again with all its text when there is room, with the same bits as if nothing had
 * been. The oldest is never paused, so something always gets done.
 *
 * Messages come in from any thread under a mutex and uv_async, results go out through the job's callbacks on the scheduler's thread. Nothing
 * ticks while nothing runs. */
#ifndef BEDSIDE_SERVER_SCHEDULER_H
#define BEDSIDE_SERVER_SCHEDULER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "engine/engine.h"
#include "server/histogram.h"

struct scheduler;
struct job;

enum job_end {
    JOB_STOP,      /* the model ended the answer, or the token callback did; a warming job has read its prompt */
    JOB_LENGTH,    /* max_tokens were written, or (unless max_tokens_asked) KV memory holds no longer answer */
    JOB_CANCELLED, /* job_cancel */
    JOB_REFUSED,   /* the server shuts down */
    JOB_FAILED,    /* the engine could not; `message` says why */
};

/* What became of a job. Times are 0 for what was not reached. */
struct job_report {
    double queue_ms;           /* from scheduler_submit until its sequence was started */
    double prefill_ms;         /* from there to the first token (a warming job: to the end of its prompt) */
    double decode_ms;          /* from there to the end, pauses included */
    int prompt_tokens;         /* all of the prompt */
    int completion_tokens;     /* those handed to `token` */
    struct cache_result cache; /* of the first start: cached tokens, source, and why there were not more; miss OFF when it never started */
    int pauses;                /* how often it gave its memory to an older one */
};

struct job_options {
    const int32_t *prompt; /* [n_prompt] >= 1, copied */
    int n_prompt;
    int max_tokens;        /* >= 1; n_prompt + max_tokens <= the context */
    bool max_tokens_asked; /* the client asked for so many: refused (SUBMIT_TOO_LARGE) when they can never fit. Otherwise it is only a limit */
    bool warm;             /* only read the prompt, into the cache: no token is picked, max_tokens is not looked at */
    const struct sampler_params *sampling; /* copied; may be NULL when `warm` */

    const char *ns;            /* cache namespace, copied; NULL or "" = the default one */
    struct cache_image *image; /* what cache_disk_read found, in a malloc'd struct, or NULL. On SUBMIT_OK it becomes the job's, which ends it with
                                  cache_image_free and free; otherwise it stays the caller's */
    bool no_cache;             /* neither use nor feed the prefix cache */

    /* All run on the scheduler's thread and must not block. `token` gets every picked token but the one that ends the generation; true: the
     * answer is over. `end` comes exactly once, and last. `release` frees ctx when the last reference to the job is dropped (any thread). */
    bool (*token)(void *ctx, const struct pick *pick);
    void (*end)(void *ctx, enum job_end why, const char *message, const struct job_report *report);
    void (*release)(void *ctx);
    void *ctx;
};

struct scheduler_options {
    struct engine *engine;
    int max_running;              /* jobs read and written at once, at most the engine's max_sequences; 0 = those */
    int max_queue;                /* jobs waiting beyond those that run */
    int prefill_chunk;            /* prompt tokens per step while nobody is being written to, and most ever */
    int max_gap_ms;               /* aim for the time between two tokens of an answer while prompts are read; 0 = 250 */
    uint64_t (*clock)(void *ctx); /* ns, any thread; NULL = the system's monotonic clock (tests have their own) */
    void *clock_ctx;
};

struct scheduler_stats {
    int running, queued;         /* jobs; paused ones count as queued */
    int paused;                  /* of the queued: those that were running before */
    int prefilling, decoding;    /* of the running */
    int pages_used, pages_total; /* KV pages of running sequences (shared ones once), and all there are */
    int retry_after_s;           /* what to tell a client that was refused: about when a place in the queue gets free, at least 1 */

    /* since the start */
    uint64_t steps;
    uint64_t submitted, refused_full, refused_large; /* by scheduler_submit */
    uint64_t completed, cancelled, failed, refused;  /* ends: STOP or LENGTH, CANCELLED, FAILED, REFUSED */
    uint64_t pauses, resumes;
    uint64_t prompt_tokens_computed, prompt_tokens_cached; /* of prompts as they came */
    uint64_t resume_tokens_computed;                       /* computed again after pauses */
    uint64_t tokens;                                       /* handed to `token` */
    uint64_t hits_memory, hits_disk, misses[CACHE_MISSES]; /* first starts of jobs: those with cached tokens, and those without, by reason */
    struct histogram step_time;                            /* of engine steps */
    struct histogram queue_time;                           /* submit to start */
    struct histogram first_token_time;                     /* submit to first token */
    struct histogram between_tokens;                       /* from one token of an answer to its next, pauses included */
};

/* The engine is the scheduler's alone until scheduler_close; it is not closed. */
int scheduler_open(struct scheduler **out, const struct scheduler_options *options, struct error *err);

/* Refuses new jobs and ends those that never ran with JOB_REFUSED; running and paused ones go on. */
void scheduler_drain(struct scheduler *s);

/* Drains, and ends those that ran, too, with JOB_REFUSED after the step in hand: nobody is left without a word. */
void scheduler_cut(struct scheduler *s);

/* Ends all jobs (JOB_REFUSED) after the step in hand, and both threads. Jobs may outlive it: job_unref stays good. s may be NULL. */
void scheduler_close(struct scheduler *s);

/* Any thread; never waits for a step. Numbers are as of the last step boundary. */
struct scheduler_stats scheduler_stats(struct scheduler *s);

enum submit_result {
    SUBMIT_OK,
    SUBMIT_FULL,      /* the queue is: see retry_after_s */
    SUBMIT_TOO_LARGE, /* the prompt and one token (or max_tokens, when asked for) need more KV pages than there are: it could never run */
    SUBMIT_DRAINING,
    SUBMIT_NO_MEMORY,
};

/* KV pages of so many tokens. */
int scheduler_pages(int n_prompt, int max_tokens);

/* On SUBMIT_OK *out is a reference for job_cancel and job_unref, and the callbacks may already run before this returns (*out is set before they do).
 * Otherwise no callback is ever called, not even `release`. Any thread. */
enum submit_result scheduler_submit(struct scheduler *s, const struct job_options *options, struct job **out);

/* Any thread, any number of times. Takes effect before the next step; `end` follows with JOB_CANCELLED unless the job ended by itself. */
void job_cancel(struct job *j);
int job_prompt_done(const struct job *j);   /* prompt tokens read or taken from the cache so far, never falling; any thread */
int job_prompt_cached(const struct job *j); /* of those, taken from the cache when it started; any thread */
void job_unref(struct job *j);              /* j may be NULL */

/* ---- the prefix cache, from any thread but the scheduler's own ---- */

/* As of the last step boundary; never waits. */
void scheduler_cache_stats(struct scheduler *s, struct engine_cache_stats *out);

/* Runs fn(engine, arg) on the engine thread between two steps and waits for it. 0; or -1, and fn was not and will not be called: its turn did not
 * come within timeout_ms, or the scheduler is closing. `fn` must be short: everybody's text waits. */
int scheduler_call(struct scheduler *s, void (*fn)(struct engine *e, void *arg), void *arg, int timeout_ms);

/* engine_cache_drop by way of scheduler_call; jobs that are here already neither use nor feed the namespace's cache any more, not when they are
 * resumed either. 0, or -1 as scheduler_call. */
int scheduler_cache_drop(struct scheduler *s, const char *ns, struct engine_cache_removed *out, int timeout_ms);

/* engine_cache_list by way of scheduler_call; *n receives its result. */
int scheduler_cache_list(struct scheduler *s, struct engine_cache_entry *out, size_t max, size_t *n, int timeout_ms);

#endif
