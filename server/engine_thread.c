#include "server/engine_thread.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"

struct engine_thread {
    struct engine *engine;
    void (*done)(void *ctx);
    void *ctx;
    struct step_item *items; /* [max_items] */
    int *index;              /* [max_items] items[i] is work->items[index[i]] */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct work *work; /* NULL: idle */
    bool stop;
};

/* Runs n prepared items as one step and copies the results back. */
static int run_items(struct engine_thread *t, struct work *w, int first, int n, struct error *err)
{
    if (engine_step(t->engine, t->items + first, n, err))
        return -1;
    for (int i = first; i < first + n; i++)
        w->items[t->index[i]].pick = t->items[i].pick;
    return 0;
}

static void do_work(struct engine_thread *t, struct work *w)
{
    for (int i = 0; i < w->n_drop; i++)
        sequence_free(t->engine, w->drop[i]);

    int n = 0;
    for (int i = 0; i < w->n_items; i++) {
        struct work_item *item = &w->items[i];
        item->failed = false;
        if (!*item->seq)
            *item->seq = sequence_new(t->engine, &item->err);
        if (!*item->seq) {
            item->failed = true;
            continue;
        }
        t->items[n] = (struct step_item){.seq = *item->seq, .tokens = item->tokens, .n_tokens = item->n_tokens, .sampler = item->sampler};
        t->index[n++] = i;
    }
    struct error err;
    if (n == 0 || run_items(t, w, 0, n, &err) == 0)
        return;
    for (int i = 0; i < n; i++) {
        struct work_item *item = &w->items[t->index[i]];
        if (n == 1)
            item->err = err;
        item->failed = n == 1 || run_items(t, w, i, 1, &item->err) != 0;
    }
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
        t->done(t->ctx);
        pthread_mutex_lock(&t->lock);
    }
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

int engine_thread_start(struct engine_thread **out, struct engine *e, int max_items, void (*done)(void *ctx), void *ctx, struct error *err)
{
    struct engine_thread *t = alloc_array(1, sizeof *t);
    if (!t)
        return error_set(err, "out of memory for the engine thread");
    t->engine = e;
    t->done = done;
    t->ctx = ctx;
    t->items = alloc_array((size_t)max_items, sizeof *t->items);
    t->index = alloc_array((size_t)max_items, sizeof *t->index);
    if (!t->items || !t->index) {
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
    free(t->index);
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
    free(t->index);
    free(t);
}
