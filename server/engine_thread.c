#include "server/engine_thread.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"

struct engine_thread {
    struct engine_thread_options o;
    struct step_item *items; /* [max_items] */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct work *work; /* NULL: idle */
    bool stop;
};

/* Runs n prepared items as one step and copies the results back. */
static int run_items(struct engine_thread *t, struct work *w, int first, int n, struct error *err)
{
    if (engine_step(t->o.engine, t->items + first, n, err))
        return -1;
    for (int i = first; i < first + n; i++) {
        w->items[i].pick = t->items[i].pick;
        w->items[i].stop = sequence_stop(w->items[i].seq);
    }
    return 0;
}

static void run_step(struct engine_thread *t, struct work *w)
{
    for (int i = 0; i < w->n_items; i++) {
        struct work_item *item = &w->items[i];
        item->failed = false;
        t->items[i] = (struct step_item){.seq = item->seq, .tokens = item->tokens, .n_tokens = item->n_tokens, .sampler = item->sampler};
    }
    struct error err;
    const uint64_t before = t->o.clock(t->o.clock_ctx);
    if (run_items(t, w, 0, w->n_items, &err) == 0) {
        w->step_ns = t->o.clock(t->o.clock_ctx) - before;
        return;
    }
    for (int i = 0; i < w->n_items; i++) {
        struct work_item *item = &w->items[i];
        if (w->n_items == 1)
            item->err = err;
        item->failed = w->n_items == 1 || run_items(t, w, i, 1, &item->err) != 0;
    }
}

static void start_sequence(struct engine_thread *t, struct work_start *s)
{
    s->seq = sequence_start(t->o.engine, &s->options, &s->cache, &s->err);
    if (!s->seq)
        return;
    s->length = sequence_length(s->seq);
    s->stop = sequence_stop(s->seq);
}

static void do_work(struct engine_thread *t, struct work *w)
{
    for (int i = 0; i < w->n_drop; i++)
        sequence_free(t->o.engine, w->drop[i]);
    for (struct work_call *c = w->calls, *next; c; c = next) {
        next = c->next; /* whoever made the call may be gone when it returns */
        c->run(t->o.engine, c->ctx);
    }
    if (w->start)
        start_sequence(t, w->start);
    w->step_ns = 0;
    if (w->n_items > 0)
        run_step(t, w);
    engine_cache_stats(t->o.engine, &w->cache);
}

static void *engine_main(void *arg)
{
    struct engine_thread *t = arg;
    pthread_mutex_lock(&t->lock);
    for (;;) {
        while (!t->work && !t->stop)
            pthread_cond_wait(&t->changed, &t->lock);
        struct work *w = t->work;
        if (!w)
            break;
        pthread_mutex_unlock(&t->lock);
        do_work(t, w);
        pthread_mutex_lock(&t->lock);
        t->work = NULL;
        pthread_mutex_unlock(&t->lock);
        t->o.done(t->o.ctx);
        engine_settle(t->o.engine); /* while the tokens travel */
        pthread_mutex_lock(&t->lock);
    }
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

int engine_thread_start(struct engine_thread **out, const struct engine_thread_options *options, struct error *err)
{
    struct engine_thread *t = alloc_array(1, sizeof *t);
    if (!t)
        return error_set(err, "out of memory for the engine thread");
    t->o = *options;
    engine_defer(t->o.engine);
    t->items = alloc_array((size_t)options->max_items, sizeof *t->items);
    if (!t->items) {
        error_set(err, "out of memory for the engine thread");
        goto fail;
    }
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->changed, NULL);
    int rc = pthread_create(&t->thread, NULL, engine_main, t);
    if (rc) {
        pthread_cond_destroy(&t->changed);
        pthread_mutex_destroy(&t->lock);
        error_set(err, "cannot start the engine thread: %s", strerror(rc));
        goto fail;
    }
    *out = t;
    return 0;
fail:
    free(t->items);
    free(t);
    return -1;
}

void engine_thread_post(struct engine_thread *t, struct work *w)
{
    pthread_mutex_lock(&t->lock);
    t->work = w;
    pthread_cond_signal(&t->changed);
    pthread_mutex_unlock(&t->lock);
}

void engine_thread_stop(struct engine_thread *t)
{
    if (!t)
        return;
    pthread_mutex_lock(&t->lock);
    t->stop = true;
    pthread_cond_signal(&t->changed);
    pthread_mutex_unlock(&t->lock);
    pthread_join(t->thread, NULL);
    pthread_cond_destroy(&t->changed);
    pthread_mutex_destroy(&t->lock);
    free(t->items);
    free(t);
}
