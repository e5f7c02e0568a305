/* The scheduler's threads and messages; what is decided, and when, is in schedule.c. */
#include "server/scheduler.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "server/scheduler_impl.h"

enum { DEFAULT_GAP_MS = 250 };

/* ---- jobs in, and out ---- */

void job_cancel(struct job *j)
{
    if (!atomic_exchange(&j->cancelled, true))
        uv_async_send(&j->owner->wake);
}

int scheduler_pages(int n_prompt, int max_tokens)
{
    return (int)(((int64_t)n_prompt + max_tokens + GRID - 1) / GRID);
}

/* Whether the job could not even run alone. */
static bool too_large(const struct scheduler *s, const struct job_options *o)
{
    const int answer = o->warm ? 0 : o->max_tokens_asked ? o->max_tokens : 1;
    return scheduler_pages(o->n_prompt, answer) > s->info->pages_total;
}

enum submit_result scheduler_submit(struct scheduler *s, const struct job_options *options, struct job **out)
{
    /* Count first, so that a full server refuses before it copies anything. */
    pthread_mutex_lock(&s->lock);
    enum submit_result r = SUBMIT_OK;
    if (s->draining || s->stopping) {
        r = SUBMIT_DRAINING;
    } else if (too_large(s, options)) {
        r = SUBMIT_TOO_LARGE;
        s->refused_large++;
    } else if (s->n_jobs >= s->places + s->options.max_queue) {
        r = SUBMIT_FULL;
        s->refused_full++;
    } else {
        s->n_jobs++;
    }
    pthread_mutex_unlock(&s->lock);
    if (r != SUBMIT_OK)
        return r;

    struct job *j = job_new(s, s->tokenizer, options);
    if (j)
        j->submitted_at = scheduler_now(s);
    pthread_mutex_lock(&s->lock);
    if (j) {
        *out = j;
        j->serial = ++s->serial;
        s->submitted++;
        list_add(&s->inbox, j);
    } else {
        s->n_jobs--;
        r = SUBMIT_NO_MEMORY;
    }
    pthread_mutex_unlock(&s->lock);
    if (j)
        uv_async_send(&s->wake);
    return r;
}

void scheduler_end_job(struct scheduler *s, struct job *j, enum job_end why, const char *message)
{
    pthread_mutex_lock(&s->lock);
    s->n_jobs--;
    pthread_mutex_unlock(&s->lock);
    switch (why) {
    case JOB_STOP:
    case JOB_LENGTH:
        s->stats.completed++;
        break;
    case JOB_CANCELLED:
        s->stats.cancelled++;
        break;
    case JOB_REFUSED:
        s->stats.refused++;
        break;
    case JOB_FAILED:
        s->stats.failed++;
        break;
    }
    job_drop_image(j);
    job_fill_report(j, scheduler_now(s));
    j->end(j->ctx, why, message, &j->report);
    job_unref(j);
}

/* ---- calls on the engine thread ---- */

static void answer_call(struct call *c, enum call_state state)
{
    pthread_mutex_lock(&c->owner->lock);
    c->state = state;
    pthread_cond_broadcast(&c->owner->call_done);
    pthread_mutex_unlock(&c->owner->lock); /* the caller may be gone from here on */
}

/* On the engine thread. */
static void run_call(struct engine *e, void *ctx)
{
    struct call *c = ctx;
    c->fn(e, c->arg);
    answer_call(c, CALL_DONE);
}

static void unlink_call(struct scheduler *s, struct call *c)
{
    struct call **at = &s->calls;
    while (*at != c)
        at = &(*at)->next;
    *at = c->next;
}

static int wait_for_call(struct scheduler *s, struct call *c, int timeout_ms)
{
    const uint64_t deadline = clock_ns() + (uint64_t)(timeout_ms > 0 ? timeout_ms : 0) * 1000000u;
    const struct timespec until = {.tv_sec = (time_t)(deadline / 1000000000u), .tv_nsec = (long)(deadline % 1000000000u)};

    pthread_mutex_lock(&s->lock);
    if (s->stopping) {
        pthread_mutex_unlock(&s->lock);
        return -1;
    }
    struct call **at = &s->calls;
    while (*at)
        at = &(*at)->next;
    *at = c;
    uv_async_send(&s->wake); /* under the lock: the scheduler cannot close meanwhile */
    int rc = 0;
    while (c->state == CALL_WAITING && rc != ETIMEDOUT)
        rc = pthread_cond_timedwait(&s->call_done, &s->lock, &until);
    if (c->state == CALL_WAITING) {
        unlink_call(s, c);
        c->state = CALL_REFUSED;
    }
    while (c->state == CALL_TAKEN)
        pthread_cond_wait(&s->call_done, &s->lock);
    const bool done = c->state == CALL_DONE;
    pthread_mutex_unlock(&s->lock);
    return done ? 0 : -1;
}

int scheduler_call(struct scheduler *s, void (*fn)(struct engine *e, void *arg), void *arg, int timeout_ms)
{
    struct call c = {.fn = fn, .arg = arg, .owner = s};
    return wait_for_call(s, &c, timeout_ms);
}

struct drop_args {
    const char *ns;
    struct engine_cache_removed *out;
};

static void drop_namespace(struct engine *e, void *arg)
{
    struct drop_args *a = arg;
    engine_cache_drop(e, a->ns, a->out);
}

int scheduler_cache_drop(struct scheduler *s, const char *ns, struct engine_cache_removed *out, int timeout_ms)
{
    struct drop_args args = {.ns = ns, .out = out};
    struct call c = {.fn = drop_namespace, .arg = &args, .drop_ns = ns, .owner = s};
    return wait_for_call(s, &c, timeout_ms);
}

struct list_args {
    struct engine_cache_entry *out;
    size_t max, *n;
};

static void list_namespaces(struct engine *e, void *arg)
{
    struct list_args *a = arg;
    *a->n = engine_cache_list(e, a->out, a->max);
}

int scheduler_cache_list(struct scheduler *s, struct engine_cache_entry *out, size_t max, size_t *n, int timeout_ms)
{
    struct list_args args = {.out = out, .max = max, .n = n};
    struct call c = {.fn = list_namespaces, .arg = &args, .owner = s};
    return wait_for_call(s, &c, timeout_ms);
}

/* Those that are due, for the next piece of work; none when `stop`. */
static struct work_call *take_calls(struct scheduler *s, bool stop)
{
    pthread_mutex_lock(&s->lock);
    struct call *calls = s->calls;
    s->calls = NULL;
    list_append(&s->queue, &s->inbox); /* a namespace that is dropped is forgotten by everybody who is here */
    for (struct call *c = calls; c; c = c->next)
        c->state = stop ? CALL_REFUSED : CALL_TAKEN;
    if (stop && calls)
        pthread_cond_broadcast(&s->call_done);
    pthread_mutex_unlock(&s->lock);
    if (stop)
        return NULL;
    struct work_call *first = NULL, **at = &first;
    for (struct call *c = calls; c; c = c->next) {
        if (c->drop_ns)
            schedule_forget(s, c->drop_ns);
        c->work = (struct work_call){.run = run_call, .ctx = c};
        *at = &c->work;
        at = &c->work.next;
    }
    return first;
}

/* ---- the loop ---- */

static void publish(struct scheduler *s)
{
    const int places = schedule_count(s);
    pthread_mutex_lock(&s->lock);
    s->places = places;
    s->seen = s->stats;
    s->cache_seen = s->cache;
    pthread_mutex_unlock(&s->lock);
}

static void on_wake(uv_async_t *handle)
{
    struct scheduler *s = handle->data;
    if (s->closing)
        return;
    pthread_mutex_lock(&s->lock);
    list_append(&s->queue, &s->inbox);
    const bool stop = s->stopping, cut = s->cut || stop, refuse = s->draining || cut;
    pthread_mutex_unlock(&s->lock);

    schedule_sweep_queue(s, refuse, cut);
    if (s->busy && atomic_exchange(&s->step_done, false)) {
        s->busy = false;
        schedule_collect(s);
    }
    if (!s->busy) {
        struct work_call *calls = take_calls(s, stop);
        if (schedule_next(s, cut, calls)) {
            s->busy = true;
            engine_thread_post(s->engine, &s->work);
        } else if (stop) {
            s->closing = true;
            uv_close((uv_handle_t *)&s->wake, NULL);
        }
    }
    publish(s);
}

/* On the engine thread. */
static void on_work_done(void *ctx)
{
    struct scheduler *s = ctx;
    atomic_store(&s->step_done, true);
    uv_async_send(&s->wake);
}

static void *scheduler_main(void *arg)
{
    struct scheduler *s = arg;
    uv_run(&s->loop, UV_RUN_DEFAULT);
    return NULL;
}

/* ---- opening and closing ---- */

static uint64_t system_clock(void *ctx)
{
    (void)ctx;
    return clock_ns();
}

static int init_lock(struct scheduler *s)
{
    pthread_condattr_t attr;
    if (pthread_condattr_init(&attr))
        return -1;
    int rc = pthread_condattr_setclock(&attr, CLOCK_MONOTONIC) || pthread_cond_init(&s->call_done, &attr);
    pthread_condattr_destroy(&attr);
    if (rc == 0 && pthread_mutex_init(&s->lock, NULL)) {
        pthread_cond_destroy(&s->call_done);
        rc = -1;
    }
    return rc ? -1 : 0;
}

static void free_memory(struct scheduler *s)
{
    schedule_close(s);
    pthread_cond_destroy(&s->call_done);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

static void settle_options(struct scheduler *s, const struct scheduler_options *options)
{
    struct scheduler_options *o = &s->options;
    *o = *options;
    if (o->max_running < 1 || o->max_running > s->info->max_sequences)
        o->max_running = s->info->max_sequences;
    if (o->prefill_chunk > s->info->max_rows - o->max_running)
        o->prefill_chunk = s->info->max_rows - o->max_running;
    if (o->prefill_chunk < 1)
        o->prefill_chunk = 1;
    if (o->max_gap_ms < 1)
        o->max_gap_ms = DEFAULT_GAP_MS;
    if (!o->clock)
        o->clock = system_clock;
}

static int start_threads(struct scheduler *s, struct error *err)
{
    int rc = uv_loop_init(&s->loop);
    if (rc)
        return error_set(err, "cannot start the scheduler's loop: %s", uv_strerror(rc));
    s->wake.data = s;
    rc = uv_async_init(&s->loop, &s->wake, on_wake);
    if (rc) {
        error_set(err, "cannot start the scheduler's loop: %s", uv_strerror(rc));
        goto fail_loop;
    }
    const struct engine_thread_options engine = {
        .engine = s->options.engine,
        .max_items = s->options.max_running,
        .done = on_work_done,
        .ctx = s,
        .clock = s->options.clock,
        .clock_ctx = s->options.clock_ctx,
    };
    if (engine_thread_start(&s->engine, &engine, err))
        goto fail_async;
    rc = pthread_create(&s->thread, NULL, scheduler_main, s);
    if (rc == 0)
        return 0;
    error_set(err, "cannot start the scheduler's thread: %s", strerror(rc));
    engine_thread_stop(s->engine);
fail_async:
    uv_close((uv_handle_t *)&s->wake, NULL);
    uv_run(&s->loop, UV_RUN_DEFAULT);
fail_loop:
    uv_loop_close(&s->loop);
    return -1;
}

int scheduler_open(struct scheduler **out, const struct scheduler_options *options, struct error *err)
{
    struct scheduler *s = alloc_array(1, sizeof *s);
    if (!s || init_lock(s)) {
        free(s);
        return error_set(err, "out of memory for the scheduler");
    }
    s->info = engine_info(options->engine);
    s->tokenizer = engine_tokenizer(options->engine);
    settle_options(s, options);
    list_init(&s->inbox);
    list_init(&s->queue);
    if (schedule_open(s)) {
        free_memory(s);
        return error_set(err, "out of memory for the scheduler");
    }
    engine_cache_stats(options->engine, &s->cache);
    publish(s);
    if (start_threads(s, err)) {
        free_memory(s);
        return -1;
    }
    *out = s;
    return 0;
}

void scheduler_drain(struct scheduler *s)
{
    pthread_mutex_lock(&s->lock);
    s->draining = true;
    pthread_mutex_unlock(&s->lock);
    uv_async_send(&s->wake);
}

void scheduler_cut(struct scheduler *s)
{
    pthread_mutex_lock(&s->lock);
    s->draining = s->cut = true;
    pthread_mutex_unlock(&s->lock);
    uv_async_send(&s->wake);
}

void scheduler_close(struct scheduler *s)
{
    if (!s)
        return;
    pthread_mutex_lock(&s->lock);
    s->stopping = true;
    pthread_mutex_unlock(&s->lock);
    uv_async_send(&s->wake);
    pthread_join(s->thread, NULL);
    engine_thread_stop(s->engine);
    uv_loop_close(&s->loop);
    free_memory(s);
}

/* ---- what others see ---- */

struct scheduler_stats scheduler_stats(struct scheduler *s)
{
    pthread_mutex_lock(&s->lock);
    struct scheduler_stats seen = s->seen;
    seen.submitted = s->submitted;
    seen.refused_full = s->refused_full;
    seen.refused_large = s->refused_large;
    pthread_mutex_unlock(&s->lock);
    return seen;
}

void scheduler_cache_stats(struct scheduler *s, struct engine_cache_stats *out)
{
    pthread_mutex_lock(&s->lock);
    *out = s->cache_seen;
    pthread_mutex_unlock(&s->lock);
}
