/* engine/cache_disk.h: the budget, the queue, deletion and the list. */
#include "tests/unit/cache_disk_setup.h"

/* ---- budget, queue, deletion ---- */

/* A writer that can be held at its fsync. */
struct gate {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    bool closed;
    int waiting;
};

static int gated_fsync(void *ctx, int fd)
{
    struct gate *g = ctx;
    (void)fd;
    pthread_mutex_lock(&g->mutex);
    g->waiting++;
    pthread_cond_broadcast(&g->changed);
    while (g->closed)
        pthread_cond_wait(&g->changed, &g->mutex);
    g->waiting--;
    pthread_mutex_unlock(&g->mutex);
    return 0;
}

static void gate_use(struct gate *g, struct cache_file_ops *ops)
{
    *g = (struct gate){.mutex = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
    ops->fsync = gated_fsync;
    ops->ctx = g;
}

static void gate_close_and_wait(struct gate *g, struct cache_disk *d, const struct text *t)
{
    pthread_mutex_lock(&g->mutex);
    g->closed = true;
    pthread_mutex_unlock(&g->mutex);
    assert_true(put_page(d, t, 0));
    pthread_mutex_lock(&g->mutex);
    while (!g->waiting)
        pthread_cond_wait(&g->changed, &g->mutex);
    pthread_mutex_unlock(&g->mutex);
}

static void gate_open(struct gate *g)
{
    pthread_mutex_lock(&g->mutex);
    g->closed = false;
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->mutex);
}

static void a_full_queue_drops_and_nobody_waits(void **state)
{
    struct fixture *f = *state;
    struct gate gate;
    gate_use(&gate, &f->ops);
    f->options.queue_bytes = 4 * PAGE_BYTES;
    struct cache_disk *d = open_with(&f->options, 1);
    struct text t = text_of("p", 1, 8);
    gate_close_and_wait(&gate, d, &t); /* the disk hangs in the first page */
    assert_true(put_page(d, &t, 1));
    assert_true(put_page(d, &t, 2));
    assert_true(put_page(d, &t, 3));
    assert_false(put_page(d, &t, 4));
    assert_false(put_state(d, &t, 3));
    assert_true(cache_disk_has(d, "p", &t.keys[3], false));
    assert_false(cache_disk_has(d, "p", &t.keys[4], false));
    bool pages[8], st;
    cache_disk_missing(d, "p", t.keys, 8, pages, &st);
    for (int i = 0; i < 8; i++)
        assert_false(pages[i]);
    assert_false(st);
    assert_int_equal(read_text(d, &t), 0); /* not on disk yet */
    struct cache_disk_stats s = cache_disk_stats(d);
    assert_int_equal(s.dropped, 2);
    assert_int_equal(s.queued_bytes, 4 * PAGE_BYTES);
    assert_int_equal(s.files, 0);
    gate_open(&gate);
    cache_disk_flush(d);
    assert_true(put_page(d, &t, 4));
    assert_true(put_state(d, &t, 3) || cache_disk_stats(d).queued_bytes > 0);
    cache_disk_close(d);
}

static void deletion_takes_files_and_queue_and_counts_them(void **state)
{
    struct fixture *f = *state;
    struct gate gate;
    gate_use(&gate, &f->ops);
    struct cache_disk *d = open_with(&f->options, 1);
    struct text stored = text_of("p", 1, 3), queued = text_of("p", 2, 4), other = text_of("q", 3, 3), blocker = text_of("r", 4, 1);
    struct cache_removed removed = {9, 9};
    assert_int_equal(cache_disk_delete(d, "never-seen", &removed, NULL), 0);
    assert_int_equal(removed.files, 0);
    assert_int_equal(removed.bytes, 0);
    store_text(d, &stored);
    store_text(d, &other);
    gate_close_and_wait(&gate, d, &blocker);
    for (int i = 0; i < 4; i++)
        assert_true(put_page(d, &queued, i));
    assert_true(put_state(d, &queued, 3));
    /* The writer hangs in another namespace, and the deletion does not wait for that. */
    struct error err = {{0}};
    f->ops.fsync = no_fsync; /* for this thread's own calls: the writer is inside its fsync */
    if (cache_disk_delete(d, "p", &removed, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(removed.files, 4 + 5);
    assert_int_equal(removed.bytes, 7 * cache_file_bytes(PAGE_BYTES) + 2 * cache_file_bytes(STATE_BYTES));
    assert_false(exists(space_path(f->dir, f->key_file, "p")));
    assert_int_equal(read_text(d, &stored), 0);
    assert_false(cache_disk_has(d, "p", &queued.keys[0], false));
    assert_int_equal(cache_disk_stats(d).queued_bytes, PAGE_BYTES);
    gate_open(&gate);
    cache_disk_flush(d);
    assert_false(exists(space_path(f->dir, f->key_file, "p")));
    assert_int_equal(read_text(d, &other), 3);
    store_text(d, &stored); /* and the namespace can be used again */
    assert_int_equal(read_text(d, &stored), 3);
    cache_disk_close(d);
}

struct deletion {
    struct cache_disk *d;
    const char *ns;
    struct cache_removed removed;
    int result;
};

static void *delete_it(void *arg)
{
    struct deletion *del = arg;
    del->result = cache_disk_delete(del->d, del->ns, &del->removed, NULL);
    return NULL;
}

static void deletion_stops_the_write_that_is_under_way(void **state)
{
    struct fixture *f = *state;
    struct gate gate;
    gate_use(&gate, &f->ops);
    struct cache_disk *d = open_with(&f->options, 1);
    struct text t = text_of("p", 1, 3);
    gate_close_and_wait(&gate, d, &t); /* in the middle of the first page of "p" */
    assert_true(put_page(d, &t, 1));
    struct deletion del[2] = {{.d = d, .ns = "p"}, {.d = d, .ns = "p"}};
    pthread_t threads[2];
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, delete_it, &del[i]), 0);
    while (cache_disk_stats(d).queued_bytes > PAGE_BYTES) /* until one of them has emptied the queue */
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    assert_false(put_page(d, &t, 2)); /* nothing is taken while it is being deleted */
    gate_open(&gate);
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(del[i].result, 0);
    }
    assert_int_equal(del[0].removed.files + del[1].removed.files, 2);
    assert_int_equal(del[0].removed.bytes + del[1].removed.bytes, 2 * cache_file_bytes(PAGE_BYTES));
    assert_int_equal(count_names(f->dir), 0);
    assert_int_equal(read_text(d, &t), 0);
    cache_disk_close(d);
}

static void the_least_recently_used_text_goes_first_and_from_its_end(void **state)
{
    struct fixture *f = *state;
    const uint64_t text_bytes = 4 * cache_file_bytes(PAGE_BYTES) + cache_file_bytes(STATE_BYTES);
    f->options.budget = 3 * text_bytes + 100;
    struct cache_disk *d = open_with(&f->options, 1);
    struct text a = text_of("p", 1, 4), b = text_of("q", 2, 4), c = text_of("p", 3, 4), e = text_of("p", 4, 4);
    store_text(d, &a);
    store_text(d, &b);
    store_text(d, &c);
    assert_int_equal(read_text(d, &a), 4); /* used: b is the oldest now */
    assert_int_equal(cache_disk_stats(d).evicted, 0);
    put_page(d, &e, 0);
    cache_disk_flush(d);
    assert_false(cache_disk_has(d, "q", &b.keys[3], true)); /* the state, then the pages from the last */
    assert_true(cache_disk_has(d, "q", &b.keys[3], false));
    store_text(d, &e);
    assert_true(cache_disk_stats(d).bytes <= f->options.budget);
    assert_int_equal(read_text(d, &a), 4);
    assert_int_equal(read_text(d, &c), 4);
    assert_int_equal(read_text(d, &e), 4);
    assert_int_equal(read_text(d, &b), 0);
    assert_int_equal(cache_disk_stats(d).evicted, 5);
    assert_false(exists(space_path(f->dir, f->key_file, "q"))); /* nothing left of it */
    cache_disk_close(d);

    f->options.budget = text_bytes + 100; /* a smaller budget holds from the next start on */
    d = open_with(&f->options, 1);
    struct text g = text_of("p", 5, 1);
    put_page(d, &g, 0);
    cache_disk_flush(d);
    assert_true(cache_disk_stats(d).bytes <= f->options.budget);
    cache_disk_close(d);

    f->options.budget = 100; /* nothing fits */
    d = open_with(&f->options, 1);
    struct text h = text_of("p", 6, 1);
    put_page(d, &h, 0);
    cache_disk_flush(d);
    put_state(d, &h, 0);
    cache_disk_flush(d);
    assert_int_equal(cache_disk_stats(d).bytes, 0);
    assert_int_equal(cache_disk_stats(d).dropped, 2);
    assert_int_equal(count_names(f->dir), 0);
    cache_disk_close(d);
}

static void the_order_of_use_survives_a_restart(void **state)
{
    struct fixture *f = *state;
    struct cache_disk *d = open_with(&f->options, 1);
    struct text a = text_of("p", 1, 2), b = text_of("p", 2, 2), c = text_of("p", 3, 2);
    store_text(d, &a);
    store_text(d, &b);
    cache_disk_close(d);
    const struct timespec hour_ago[2] = {{.tv_sec = time(NULL) - 3600}, {.tv_sec = time(NULL) - 3600}};
    const struct timespec two_hours_ago[2] = {{.tv_sec = time(NULL) - 7200}, {.tv_sec = time(NULL) - 7200}};
    for (int i = 0; i < 3; i++) {
        assert_int_equal(utimensat(AT_FDCWD, file_path(f->dir, f->key_file, &a, i < 2 ? i : 1, i == 2), two_hours_ago, 0), 0);
        assert_int_equal(utimensat(AT_FDCWD, file_path(f->dir, f->key_file, &b, i < 2 ? i : 1, i == 2), hour_ago, 0), 0);
    }
    d = open_with(&f->options, 1);
    struct cache_namespace_info info[1];
    assert_int_equal(cache_disk_list(d, info, 1), 1);
    assert_true(info[0].last_used <= time(NULL) - 3590 && info[0].last_used >= time(NULL) - 3700);
    assert_int_equal(read_text(d, &a), 2);
    cache_disk_close(d);
    struct stat st;
    assert_int_equal(stat(file_path(f->dir, f->key_file, &a, 0, false), &st), 0);
    assert_true(st.st_mtime >= time(NULL) - 60);
    f->options.budget = 2 * (2 * cache_file_bytes(PAGE_BYTES) + cache_file_bytes(STATE_BYTES));
    d = open_with(&f->options, 1);
    store_text(d, &c);
    assert_int_equal(read_text(d, &a), 2);
    assert_int_equal(read_text(d, &b), 0);
    cache_disk_close(d);
}

static void the_list_tells_names_sizes_hits_and_ages(void **state)
{
    struct fixture *f = *state;
    struct cache_disk *d = open_with(&f->options, 1);
    struct text a = text_of("alpha", 1, 2), b = text_of("beta", 2, 3);
    struct cache_namespace_info info[3];
    assert_int_equal(cache_disk_list(d, info, 3), 0);
    store_text(d, &a);
    store_text(d, &b);
    read_text(d, &b);
    read_text(d, &b);
    assert_int_equal(cache_disk_list(d, info, 1), 2); /* how many there are, not how many found room */
    assert_int_equal(cache_disk_list(d, info, 3), 2);
    const struct cache_namespace_info *i = strcmp(info[0].name, "alpha") == 0 ? &info[0] : &info[1], *j = i == info ? &info[1] : &info[0];
    assert_string_equal(i->name, "alpha");
    assert_string_equal(j->name, "beta");
    assert_int_equal(i->files, 3);
    assert_int_equal(i->bytes, 2 * cache_file_bytes(PAGE_BYTES) + cache_file_bytes(STATE_BYTES));
    assert_int_equal(j->files, 4);
    assert_int_equal(i->hits, 0);
    assert_int_equal(j->hits, 2);
    assert_true(i->last_used <= time(NULL) + 1 && /* time() may lag by a tick */ i->last_used >= time(NULL) - 100);
    cache_disk_close(d);
}

int main(void)
{
    static char yes[] = "encrypted";
    const struct CMUnitTest tests[] = {
        PLAIN(a_full_queue_drops_and_nobody_waits),       BOTH(deletion_takes_files_and_queue_and_counts_them),
        BOTH(deletion_stops_the_write_that_is_under_way), BOTH(the_least_recently_used_text_goes_first_and_from_its_end),
        BOTH(the_order_of_use_survives_a_restart),        BOTH(the_list_tells_names_sizes_hits_and_ages),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
