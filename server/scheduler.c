#include "server/scheduler.h"

#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <uv.h>

#include "base/alloc.h"
#include "server/engine_thread.h"

enum { DECODING_CHUNK = 128 }; /* prompt tokens per step while an answer is being written */

struct job {
    /* any thread */
    atomic_int refs;
    atomic_bool cancelled;
    atomic_int prompt_done;
    struct scheduler *owner;
    /* fixed */
    int32_t *prompt; /* [n_prompt] */
    int n_prompt, max_tokens, pages;
    struct sampler *sampler; /* used by the engine thread in a step, by nobody else */
    bool (*token)(void *ctx, const struct pick *pick);
    void (*end)(void *ctx, enum job_end why, const char *message, const struct job_report *report);
    void (*release)(void *ctx);
    void *ctx;
    /* scheduler thread */
    struct sequence *seq;
    int fed;            /* prompt tokens in the sequence */
    int written;        /* tokens picked */
    int32_t last;       /* the last one, not yet fed */
    uint64_t served_at; /* when its prompt last had a chunk, by `serves`; 0: never */
    struct job *next;   /* in the inbox or the queue */
};

struct job_list { /* first in, first out */
    struct job *head, **tail;
};

struct scheduler {
    struct scheduler_options options;
    const struct engine_info *info;
    const struct tokenizer *tokenizer;
    struct engine_thread *engine;
    uv_loop_t loop;
    uv_async_t wake;
    pthread_t thread;

    pthread_mutex_t lock; /* guards these four */
    struct job_list inbox;
    int n_jobs; /* submitted and not ended */
    bool draining, stopping;

    /* scheduler thread */
    struct job_list queue;
    struct job **running; /* [max_running], in order of admission */
    int n_running, pages_used;
    bool busy; /* `work` is with the engine thread */
    bool closing;
    struct work work;
    struct work_item *items; /* [max_running] */
    struct job **item_jobs;  /* [max_running] */
    struct sequence **drops; /* [max_running] */
    uint64_t step, serves;   /* steps built, prompt chunks given */

    /* any thread */
    atomic_bool step_done;
    atomic_int n_running_seen, n_queued_seen, pages_seen;
    _Atomic uint64_t steps_seen;
};

static void list_init(struct job_list *l)
{
    l->head = NULL;
    l->tail = &l->head;
}

static void list_add(struct job_list *l, struct job *j)
{
    j->next = NULL;
    *l->tail = j;
    l->tail = &j->next;
}

static void list_append(struct job_list *l, struct job_list *more)
{
    if (!more->head)
        return;
    *l->tail = more->head;
    l->tail = more->tail;
    list_init(more);
}

/* ---- jobs ---- */

void job_unref(struct job *j)
{
    if (!j || atomic_fetch_sub(&j->refs, 1) != 1)
        return;
    j->release(j->ctx);
    sampler_free(j->sampler);
    free(j->prompt);
    free(j);
}

void job_cancel(struct job *j)
{
    if (!atomic_exchange(&j->cancelled, true))
        uv_async_send(&j->owner->wake);
}

int job_prompt_done(const struct job *j)
{
    return atomic_load(&j->prompt_done);
}

int scheduler_pages(int n_prompt, int max_tokens)
{
    return (int)(((int64_t)n_prompt + max_tokens + GRID - 1) / GRID);
}

static struct job *job_new(struct scheduler *s, const struct job_options *o)
{
    struct job *j = alloc_array(1, sizeof *j);
    if (!j)
        return NULL;
    j->prompt = alloc_array((size_t)o->n_prompt, sizeof *j->prompt);
    j->sampler = sampler_new(s->tokenizer, o->sampling);
    if (!j->prompt || !j->sampler) {
        sampler_free(j->sampler);
        free(j->prompt);
        free(j);
        return NULL;
    }
    memcpy(j->prompt, o->prompt, (size_t)o->n_prompt * sizeof *j->prompt);
    sampler_prompt(j->sampler, j->prompt, (size_t)o->n_prompt);
    atomic_store(&j->refs, 2); /* the caller's and the scheduler's */
    j->owner = s;
    j->n_prompt = o->n_prompt;
    j->max_tokens = o->max_tokens;
    j->pages = scheduler_pages(o->n_prompt, o->max_tokens);
    j->token = o->token;
    j->end = o->end;
    j->release = o->release;
    j->ctx = o->ctx;
    return j;
}

enum submit_result scheduler_submit(struct scheduler *s, const struct job_options *options, struct job **out)
{
    if (scheduler_pages(options->n_prompt, options->max_tokens) > s->info->pages_total)
        return SUBMIT_TOO_LARGE;

    /* Count first, so that a full server refuses before it copies anything. */
    pthread_mutex_lock(&s->lock);
    enum submit_result r = SUBMIT_OK;
    if (s->draining || s->stopping)
        r = SUBMIT_DRAINING;
    else if (s->n_jobs >= s->options.max_running + s->options.max_queue)
        r = SUBMIT_FULL;
    else
        s->n_jobs++;
    pthread_mutex_unlock(&s->lock);
    if (r != SUBMIT_OK)
        return r;

    struct job *j = job_new(s, options);
    pthread_mutex_lock(&s->lock);
    if (j) {
        *out = j;
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

/* The job has had its last callback; the scheduler's reference is dropped. */
static void end_job(struct scheduler *s, struct job *j, enum job_end why, const char *message)
{
    pthread_mutex_lock(&s->lock);
    s->n_jobs--;
    pthread_mutex_unlock(&s->lock);
    const struct job_report report = {.prompt_tokens = j->n_prompt, .completion_tokens = j->written, .cache.miss = CACHE_MISS_OFF};
    j->end(j->ctx, why, message, &report);
    job_unref(j);
}

/* Ends a running job: its sequence is freed by the next piece of work. Only between steps. */
static void retire(struct scheduler *s, struct job *j, enum job_end why, const char *message)
{
    if (j->seq)
        s->drops[s->work.n_drop++] = j->seq;
    s->pages_used -= j->pages;
    for (int i = 0; i < s->n_running; i++) {
        if (s->running[i] == j) {
            memmove(s->running + i, s->running + i + 1, (size_t)(s->n_running - i - 1) * sizeof *s->running);
            break;
        }
    }
    s->n_running--;
    end_job(s, j, why, message);
}

/* ---- building a step ---- */

/* Tokens of j's prompt for a chunk of at most `room`: to the prompt's end, or to a line of the grid when one is in reach. The engine gives the same
 * bits for any cut; whole pages are only cheaper. */
static int chunk_size(const struct job *j, int room)
{
    int left = j->n_prompt - j->fed;
    if (left <= room)
        return left;
    int end = (j->fed + room) / GRID * GRID;
    return end > j->fed ? end - j->fed : room;
}

/* The prompt that has waited longest for a chunk, among those that had none since `since`. */
static struct job *next_prompt(const struct scheduler *s, uint64_t since)
{
    struct job *best = NULL;
    for (int i = 0; i < s->n_running; i++) {
        struct job *j = s->running[i];
        if (j->fed < j->n_prompt && j->served_at <= since && (!best || j->served_at < best->served_at))
            best = j;
    }
    return best;
}

static void add_item(struct scheduler *s, struct job *j, const int32_t *tokens, int n, bool pick)
{
    int i = s->work.n_items++;
    s->item_jobs[i] = j;
    s->items[i] = (struct work_item){.seq = &j->seq, .tokens = tokens, .n_tokens = n, .sampler = pick ? j->sampler : NULL};
}

/* Decode rows of all, then prompt chunks: an equal share each (at least a page's worth), in turn; what is left over goes to the first ones. */
static void build_step(struct scheduler *s)
{
    s->step++;
    s->work.n_items = 0;
    int n_prompts = 0;
    for (int i = 0; i < s->n_running; i++) {
        struct job *j = s->running[i];
        if (j->fed < j->n_prompt)
            n_prompts++;
        else
            add_item(s, j, &j->last, 1, true);
    }
    if (!n_prompts)
        return;
    const int first = s->work.n_items;
    int budget = s->options.prefill_chunk;
    if (first > 0 && budget > DECODING_CHUNK)
        budget = DECODING_CHUNK;
    if (budget > s->info->max_rows - first)
        budget = s->info->max_rows - first;
    int share = budget / n_prompts / GRID * GRID;
    if (share < GRID)
        share = GRID;
    const uint64_t since = s->serves;
    struct job *j;
    while (budget > 0 && (j = next_prompt(s, since)) != NULL) {
        int n = chunk_size(j, share < budget ? share : budget);
        add_item(s, j, j->prompt + j->fed, n, false);
        budget -= n;
        j->served_at = ++s->serves;
    }
    for (int i = first; i < s->work.n_items; i++) {
        struct work_item *item = &s->items[i];
        j = s->item_jobs[i];
        int more = chunk_size(j, item->n_tokens + budget) - item->n_tokens;
        if (more > 0) {
            item->n_tokens += more;
            budget -= more;
        }
        if (j->fed + item->n_tokens == j->n_prompt)
            item->sampler = j->sampler;
    }
}

/* ---- the loop ---- */

/* What the last step gave to one job. */
static void take_result(struct scheduler *s, struct job *j, const struct work_item *item)
{
    if (item->failed) {
        retire(s, j, JOB_FAILED, item->err.text);
        return;
    }
    if (j->fed < j->n_prompt) {
        j->fed += item->n_tokens;
        atomic_store(&j->prompt_done, j->fed);
    }
    if (!item->sampler || atomic_load(&j->cancelled))
        return; /* a cancelled job hands out nothing more; the sweep takes it */
    if (item->pick.id < 0) {
        retire(s, j, JOB_FAILED, "the model gave no finite logit: the file may be damaged");
        return;
    }
    if (tokenizer_ends_generation(s->tokenizer, item->pick.id)) {
        retire(s, j, JOB_STOP, NULL);
        return;
    }
    j->last = item->pick.id;
    j->written++;
    if (j->token(j->ctx, &item->pick))
        retire(s, j, JOB_STOP, NULL);
    else if (j->written >= j->max_tokens)
        retire(s, j, JOB_LENGTH, NULL);
}

static void sweep_queue(struct scheduler *s, bool refuse)
{
    struct job_list old = s->queue;
    if (!old.head)
        return;
    list_init(&s->queue);
    for (struct job *j = old.head, *next; j; j = next) {
        next = j->next;
        if (atomic_load(&j->cancelled))
            end_job(s, j, JOB_CANCELLED, NULL);
        else if (refuse)
            end_job(s, j, JOB_REFUSED, "the server is shutting down");
        else
            list_add(&s->queue, j);
    }
}

static void sweep_running(struct scheduler *s, bool refuse)
{
    for (int i = s->n_running - 1; i >= 0; i--) {
        struct job *j = s->running[i];
        if (atomic_load(&j->cancelled))
            retire(s, j, JOB_CANCELLED, NULL);
        else if (refuse)
            retire(s, j, JOB_REFUSED, "the server is shutting down");
    }
}

/* Strictly in order: a large job at the head waits for pages and nobody overtakes it, or it might wait for ever. */
static void admit(struct scheduler *s)
{
    struct job *j;
    while ((j = s->queue.head) != NULL && s->n_running < s->options.max_running && s->pages_used + j->pages <= s->info->pages_total) {
        s->queue.head = j->next;
        if (!s->queue.head)
            s->queue.tail = &s->queue.head;
        s->running[s->n_running++] = j;
        s->pages_used += j->pages;
    }
}

static void publish(struct scheduler *s)
{
    int queued = 0;
    for (const struct job *j = s->queue.head; j; j = j->next)
        queued++;
    atomic_store(&s->n_running_seen, s->n_running);
    atomic_store(&s->n_queued_seen, queued);
    atomic_store(&s->pages_seen, s->pages_used);
    atomic_store(&s->steps_seen, s->step);
}

static void on_wake(uv_async_t *handle)
{
    struct scheduler *s = handle->data;
    if (s->closing)
        return;
    pthread_mutex_lock(&s->lock);
    list_append(&s->queue, &s->inbox);
    const bool stopping = s->stopping, refuse = s->draining || stopping;
    pthread_mutex_unlock(&s->lock);

    sweep_queue(s, refuse);
    if (s->busy && atomic_exchange(&s->step_done, false)) {
        s->busy = false;
        s->work.n_drop = 0;
        const int n = s->work.n_items;
        for (int i = 0; i < n; i++)
            take_result(s, s->item_jobs[i], &s->items[i]);
    }
    if (!s->busy) {
        sweep_running(s, stopping);
        admit(s);
        build_step(s);
        if (s->work.n_items || s->work.n_drop) {
            s->busy = true;
            engine_thread_post(s->engine, &s->work);
        } else if (stopping) {
            s->closing = true;
            uv_close((uv_handle_t *)&s->wake, NULL);
        }
    }
    publish(s);
}

/* On the engine thread. */
static void on_step_done(void *ctx)
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

static void free_memory(struct scheduler *s)
{
    free(s->running);
    free(s->items);
    free(s->item_jobs);
    free(s->drops);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

int scheduler_open(struct scheduler **out, const struct scheduler_options *options, struct error *err)
{
    struct scheduler *s = alloc_array(1, sizeof *s);
    if (!s)
        return error_set(err, "out of memory for the scheduler");
    pthread_mutex_init(&s->lock, NULL);
    s->options = *options;
    s->info = engine_info(options->engine);
    s->tokenizer = engine_tokenizer(options->engine);
    if (s->options.max_running > s->info->max_sequences)
        s->options.max_running = s->info->max_sequences;
    const size_t n = (size_t)s->options.max_running;
    s->running = alloc_array(n, sizeof(struct job *));
    s->items = alloc_array(n, sizeof *s->items);
    s->item_jobs = alloc_array(n, sizeof(struct job *));
    s->drops = alloc_array(n, sizeof(struct sequence *));
    if (!s->running || !s->items || !s->item_jobs || !s->drops) {
        free_memory(s);
        return error_set(err, "out of memory for the scheduler");
    }
    s->work.items = s->items;
    s->work.drop = s->drops;
    list_init(&s->inbox);
    list_init(&s->queue);

    int rc = uv_loop_init(&s->loop);
    if (rc) {
        free_memory(s);
        return error_set(err, "cannot start the scheduler's loop: %s", uv_strerror(rc));
    }
    s->wake.data = s;
    rc = uv_async_init(&s->loop, &s->wake, on_wake);
    if (rc) {
        error_set(err, "cannot start the scheduler's loop: %s", uv_strerror(rc));
        goto fail_loop;
    }
    if (engine_thread_start(&s->engine, options->engine, s->options.max_running, on_step_done, s, err))
        goto fail_async;
    rc = pthread_create(&s->thread, NULL, scheduler_main, s);
    if (rc) {
        error_set(err, "cannot start the scheduler's thread: %s", strerror(rc));
        engine_thread_stop(s->engine);
        goto fail_async;
    }
    *out = s;
    return 0;
fail_async:
    uv_close((uv_handle_t *)&s->wake, NULL);
    uv_run(&s->loop, UV_RUN_DEFAULT);
fail_loop:
    uv_loop_close(&s->loop);
    free_memory(s);
    return -1;
}

void scheduler_drain(struct scheduler *s)
{
    pthread_mutex_lock(&s->lock);
    s->draining = true;
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

struct scheduler_stats scheduler_stats(struct scheduler *s)
{
    return (struct scheduler_stats){
        .running = atomic_load(&s->n_running_seen),
        .queued = atomic_load(&s->n_queued_seen),
        .pages_used = atomic_load(&s->pages_seen),
        .pages_total = s->info->pages_total,
        .steps = atomic_load(&s->steps_seen),
    };
}
