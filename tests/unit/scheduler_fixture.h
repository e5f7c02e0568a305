/* tests/unit/scheduler_fixture.h: the scheduler with a fake engine: the functions of engine/engine.h that it calls are defined here, so that the linker
 * takes these and leaves the real ones in the library. For one test program each; include after <cmocka.h>.
 *
 * The fake counts pages and states as the real one does, but computes nothing: a sequence "writes" FIRST, FIRST + 1, ... going on where its text
 * ends, so that text continued after a pause shows whether anything was lost. Each step is recorded, can be held, and moves the fake clock by
 * a price per row. */
#ifndef BEDSIDE_TESTS_SCHEDULER_FIXTURE_H
#define BEDSIDE_TESTS_SCHEDULER_FIXTURE_H

#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/cache_disk.h"
#include "engine/engine.h"
#include "engine/gguf.h"
#include "server/scheduler.h"

enum { MAX_STEPS = 8192, MAX_ITEMS = 64, FIRST = 1000000 }; /* FIRST: beyond any vocabulary, so that none ends the generation */

/* ---- the fake engine ---- */

struct sequence {
    int32_t *tokens;
    int length;
};

struct step_record {
    int n_items, n_rows, n_picks;
    int n_tokens[MAX_ITEMS];
    int32_t name[MAX_ITEMS]; /* the first token of the sequence: prompts of these tests begin with one that names their job */
    int from[MAX_ITEMS];     /* its length before the step */
    bool picks[MAX_ITEMS];
};

struct engine {
    struct engine_info info;
    struct tokenizer *tokenizer;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int allowed;      /* steps and held starts that may run; -1: all */
    bool hold_starts; /* starts wait too */
    int waiting;      /* 1 while a step or start is held */
    atomic_int drops; /* engine_cache_drop calls */
    /* behaviour */
    int pages_now;   /* KV pages there are; info.pages_total at first */
    int fail_starts; /* so many starts fail from now on */
    int cached;      /* starts find so many tokens cached, a multiple of GRID */
    int stop_every;  /* sequence_stop: multiples of it; 0: none */
    int32_t poison;  /* a step with this token fails */
    int end_after;   /* tokens of an answer before the end token; 0: never */
    int32_t end_id;
    uint64_t row_ns, step_ns, start_ns; /* price of a row, a step and a start */
    _Atomic uint64_t now;
    /* what happened */
    struct sequence *alive[MAX_ITEMS];
    int n_alive, most_alive;
    int starts, no_cache_starts, images, short_steps; /* short: failed for want of pages */
    int n_steps;
    struct step_record steps[MAX_STEPS];
};

const struct engine_info *engine_info(const struct engine *e)
{
    return &e->info;
}

const struct tokenizer *engine_tokenizer(const struct engine *e)
{
    return e->tokenizer;
}

static int fake_pages(int length)
{
    return (length + GRID - 1) / GRID;
}

static int fake_pages_running(const struct engine *e)
{
    int n = 0;
    for (int i = 0; i < MAX_ITEMS; i++)
        n += e->alive[i] ? fake_pages(e->alive[i]->length) : 0;
    return n;
}

/* Under the lock: waits at the gate. */
static void fake_gate(struct engine *e)
{
    e->waiting = 1;
    pthread_cond_broadcast(&e->changed);
    while (e->allowed == 0)
        pthread_cond_wait(&e->changed, &e->lock);
    if (e->allowed > 0)
        e->allowed--;
    e->waiting = 0;
}

struct sequence *sequence_start(struct engine *e, const struct sequence_options *o, struct cache_result *r, struct error *err)
{
    pthread_mutex_lock(&e->lock);
    if (e->hold_starts)
        fake_gate(e);
    *r = (struct cache_result){.miss = CACHE_MISS_EMPTY, .miss_at = -1};
    struct sequence *s = NULL;
    e->starts++;
    e->no_cache_starts += o->no_cache;
    e->images += o->image != NULL;
    if (e->fail_starts > 0) {
        e->fail_starts--;
        error_set(err, "no memory for a state");
    } else if (e->n_alive >= e->info.max_sequences) {
        error_set(err, "too many sequences");
    } else {
        s = calloc(1, sizeof *s);
        s->tokens = calloc((size_t)e->info.context, sizeof *s->tokens);
        while (s->length < e->cached && s->length + GRID < o->n_prompt && !o->no_cache)
            s->length += GRID;
        memcpy(s->tokens, o->prompt, (size_t)s->length * sizeof *s->tokens);
        if (s->length)
            *r = (struct cache_result){.cached = s->length, .matched = s->length, .source = o->image ? CACHE_FROM_DISK : CACHE_FROM_MEMORY};
        int place = 0;
        while (e->alive[place])
            place++;
        e->alive[place] = s;
        if (++e->n_alive > e->most_alive)
            e->most_alive = e->n_alive;
        atomic_fetch_add(&e->now, e->start_ns);
    }
    pthread_mutex_unlock(&e->lock);
    return s;
}

void engine_defer(struct engine *e)
{
    (void)e;
}

void engine_settle(struct engine *e)
{
    (void)e;
}

void sequence_free(struct engine *e, struct sequence *s)
{
    if (!s)
        return;
    pthread_mutex_lock(&e->lock);
    for (int i = 0; i < MAX_ITEMS; i++)
        if (e->alive[i] == s)
            e->alive[i] = NULL;
    e->n_alive--;
    pthread_mutex_unlock(&e->lock);
    free(s->tokens);
    free(s);
}

int sequence_length(const struct sequence *s)
{
    return s->length;
}

static int fake_stop_every; /* of the engine in use: sequence_stop is told no engine */

int sequence_stop(const struct sequence *s)
{
    return fake_stop_every ? (s->length / fake_stop_every + 1) * fake_stop_every : INT_MAX;
}

void engine_cache_stats(const struct engine *e, struct engine_cache_stats *out)
{
    *out = (struct engine_cache_stats){.pages_total = e->pages_now, .pages_running = fake_pages_running(e), .states_running = e->n_alive};
}

void engine_cache_drop(struct engine *e, const char *ns, struct engine_cache_removed *out)
{
    atomic_fetch_add(&e->drops, 1);
    *out = (struct engine_cache_removed){.pages = (int)strlen(ns), .snapshots = 1, .bytes = 7};
}

size_t engine_cache_list(const struct engine *e, struct engine_cache_entry *out, size_t max)
{
    (void)e;
    if (max)
        out[0] = (struct engine_cache_entry){.ns = "patient", .pages = 3};
    return 2;
}

/* FIRST + the number of answer tokens that the text ends with. */
static int32_t fake_next(const struct engine *e, const struct sequence *s)
{
    int k = 0;
    while (k < s->length && s->tokens[s->length - 1 - k] >= FIRST)
        k++;
    return e->end_after && k >= e->end_after ? e->end_id : FIRST + k;
}

static int fake_check(struct engine *e, const struct step_item *items, int n_items, const struct step_record *r, struct error *err)
{
    int pages = fake_pages_running(e);
    for (int i = 0; i < n_items; i++) {
        pages += fake_pages(items[i].seq->length + items[i].n_tokens) - fake_pages(items[i].seq->length);
        for (int k = 0; k < items[i].n_tokens; k++)
            if (e->poison && items[i].tokens[k] == e->poison)
                return error_set(err, "poisoned");
        if (items[i].seq->length + items[i].n_tokens > e->info.context)
            return error_set(err, "beyond the context");
    }
    if (r->n_rows > e->info.max_rows)
        return error_set(err, "too many rows");
    if (pages > e->pages_now) {
        e->short_steps++;
        return error_set(err, "no pages");
    }
    return 0;
}

int engine_step(struct engine *e, struct step_item *items, int n_items, struct error *err)
{
    pthread_mutex_lock(&e->lock);
    fake_gate(e);
    struct step_record *r = &e->steps[e->n_steps < MAX_STEPS ? e->n_steps++ : MAX_STEPS - 1];
    *r = (struct step_record){.n_items = n_items};
    for (int i = 0; i < n_items; i++) {
        r->n_tokens[i] = items[i].n_tokens;
        r->from[i] = items[i].seq->length;
        r->name[i] = items[i].seq->length ? items[i].seq->tokens[0] : items[i].tokens[0];
        r->picks[i] = items[i].sampler != NULL;
        r->n_picks += items[i].sampler != NULL;
        r->n_rows += items[i].n_tokens;
    }
    const int rc = fake_check(e, items, n_items, r, err);
    for (int i = 0; i < n_items && rc == 0; i++) {
        struct sequence *s = items[i].seq;
        memcpy(s->tokens + s->length, items[i].tokens, (size_t)items[i].n_tokens * sizeof *s->tokens);
        s->length += items[i].n_tokens;
        if (items[i].sampler)
            items[i].pick.id = fake_next(e, s);
    }
    atomic_fetch_add(&e->now, e->step_ns + (uint64_t)r->n_rows * e->row_ns);
    pthread_mutex_unlock(&e->lock);
    return rc;
}

static inline void allow(struct engine *e, int steps)
{
    pthread_mutex_lock(&e->lock);
    e->allowed = steps;
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
}

/* Until a step or start stands before the gate. */
static inline void wait_held(struct engine *e)
{
    pthread_mutex_lock(&e->lock);
    while (!e->waiting || e->allowed != 0)
        pthread_cond_wait(&e->changed, &e->lock);
    pthread_mutex_unlock(&e->lock);
}

/* Lets one held step through and waits for the next one to arrive. */
static inline void one_step(struct engine *e)
{
    pthread_mutex_lock(&e->lock);
    int n = e->n_steps;
    e->allowed = 1;
    pthread_cond_broadcast(&e->changed);
    while (e->n_steps == n || !e->waiting)
        pthread_cond_wait(&e->changed, &e->lock);
    pthread_mutex_unlock(&e->lock);
}

/* ---- a client ---- */

struct client {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct job *job;
    /* wishes, set before submit */
    int stop_after; /* the token callback says it is over; 0: never */
    bool asked, warm;
    const char *ns;
    struct cache_image *image;
    /* what came */
    int n_tokens, ends, releases;
    int32_t first, last;
    bool broken; /* the tokens were not FIRST, FIRST + 1, ... */
    enum job_end why;
    char message[64];
    struct job_report report;
};

static inline bool on_token(void *ctx, const struct pick *pick)
{
    struct client *c = ctx;
    pthread_mutex_lock(&c->lock);
    if (pick->id != FIRST + c->n_tokens)
        c->broken = true;
    if (c->n_tokens++ == 0)
        c->first = pick->id;
    c->last = pick->id;
    bool stop = c->stop_after && c->n_tokens >= c->stop_after;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
    return stop;
}

static inline void on_end(void *ctx, enum job_end why, const char *message, const struct job_report *report)
{
    struct client *c = ctx;
    pthread_mutex_lock(&c->lock);
    c->ends++;
    c->why = why;
    c->report = *report;
    if (message)
        strncpy(c->message, message, sizeof c->message - 1);
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
}

static inline void on_release(void *ctx)
{
    struct client *c = ctx;
    pthread_mutex_lock(&c->lock);
    c->releases++;
    pthread_mutex_unlock(&c->lock);
}

static inline enum job_end wait_end(struct client *c)
{
    pthread_mutex_lock(&c->lock);
    while (!c->ends)
        pthread_cond_wait(&c->changed, &c->lock);
    enum job_end why = c->why;
    pthread_mutex_unlock(&c->lock);
    return why;
}

static inline enum submit_result submit(struct scheduler *s, struct client *c, int32_t name, int n_prompt, int max_tokens)
{
    static const struct sampler_params greedy = {.top_p = 1, .repeat_penalty = 1};
    *c = (struct client){.lock = PTHREAD_MUTEX_INITIALIZER,
                         .changed = PTHREAD_COND_INITIALIZER,
                         .stop_after = c->stop_after,
                         .asked = c->asked,
                         .warm = c->warm,
                         .ns = c->ns,
                         .image = c->image};
    int32_t *prompt = calloc((size_t)n_prompt, sizeof *prompt);
    assert_non_null(prompt);
    for (int i = 0; i < n_prompt; i++)
        prompt[i] = name;
    enum submit_result r = scheduler_submit(s,
                                            &(struct job_options){.prompt = prompt,
                                                                  .n_prompt = n_prompt,
                                                                  .max_tokens = max_tokens,
                                                                  .max_tokens_asked = c->asked,
                                                                  .warm = c->warm,
                                                                  .ns = c->ns,
                                                                  .image = c->image,
                                                                  .sampling = c->warm ? NULL : &greedy,
                                                                  .token = on_token,
                                                                  .end = on_end,
                                                                  .release = on_release,
                                                                  .ctx = c},
                                            &c->job);
    free(prompt);
    return r;
}

/* ---- both together ---- */

struct bench {
    struct gguf *file;
    struct engine engine;
    struct scheduler *scheduler;
};

static inline uint64_t fake_clock(void *ctx)
{
    struct engine *e = ctx;
    return atomic_load(&e->now);
}

/* All steps are held at first. */
static inline struct bench *bench_open(int max_running, int max_queue, int chunk, int pages)
{
    struct error err = {{0}};
    struct bench *b = calloc(1, sizeof *b);
    assert_non_null(b);
    if (gguf_open(&b->file, "tests/data/tiny-qwen3-f32.gguf", &err) || tokenizer_open(&b->engine.tokenizer, b->file, &err))
        fail_msg("%s", err.text);
    struct engine *e = &b->engine;
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->changed, NULL);
    e->info = (struct engine_info){.context = 16384, .max_rows = chunk + max_running, .max_sequences = max_running, .pages_total = pages};
    e->pages_now = pages;
    e->end_id = -1;
    for (int32_t id = 0; id < tokenizer_vocab_size(e->tokenizer); id++)
        if (tokenizer_ends_generation(e->tokenizer, id))
            e->end_id = id;
    assert_true(e->end_id >= 0);
    atomic_store(&e->now, 1000000000u);
    fake_stop_every = 0;
    struct scheduler_options o = {.engine = e,
                                  .max_running = max_running,
                                  .max_queue = max_queue,
                                  .prefill_chunk = chunk,
                                  .max_gap_ms = 250,
                                  .clock = fake_clock,
                                  .clock_ctx = e};
    if (scheduler_open(&b->scheduler, &o, &err))
        fail_msg("%s", err.text);
    return b;
}

static inline void bench_close(struct bench *b)
{
    allow(&b->engine, -1);
    scheduler_close(b->scheduler);
    assert_int_equal(b->engine.n_alive, 0); /* every sequence was given back */
    tokenizer_close(b->engine.tokenizer);
    gguf_close(b->file);
    pthread_cond_destroy(&b->engine.changed);
    pthread_mutex_destroy(&b->engine.lock);
    free(b);
}

/* The rows that the job named `name` had in a recorded step, its decode rows included. */
static inline int rows_of(const struct step_record *r, int32_t name)
{
    int n = 0;
    for (int i = 0; i < r->n_items; i++)
        if (r->name[i] == name)
            n += r->n_tokens[i];
    return n;
}

/* Of these, rows of its prompt of n_prompt tokens. */
static inline int prompt_rows_of(const struct step_record *r, int32_t name, int n_prompt)
{
    for (int i = 0; i < r->n_items; i++)
        if (r->name[i] == name && r->from[i] < n_prompt)
            return r->n_tokens[i];
    return 0;
}

static inline void nap(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
}

/* Until the published counters say so; they follow the messages by less than a step. */
static inline void wait_counts(struct scheduler *s, int running, int queued)
{
    for (;;) {
        struct scheduler_stats n = scheduler_stats(s);
        if (n.running == running && n.queued == queued)
            return;
        nap();
    }
}

/* Until `running` jobs run and none waits. A job that comes while a step stands before the gate waits for its end, so steps are let through one by one,
 * as many as it takes: how many depends on how fast the jobs came. */
static inline void wait_all_run(struct bench *b, int running)
{
    for (;;) {
        struct scheduler_stats n = scheduler_stats(b->scheduler);
        if (n.running == running && n.queued == 0)
            return;
        pthread_mutex_lock(&b->engine.lock);
        const bool held = b->engine.waiting && b->engine.allowed == 0;
        pthread_mutex_unlock(&b->engine.lock);
        if (held)
            allow(&b->engine, 1);
        nap();
    }
}

/* Until nothing is left of any job. */
static inline void wait_idle(struct scheduler *s)
{
    wait_counts(s, 0, 0);
    while (scheduler_stats(s).pages_used)
        nap();
}

#endif
