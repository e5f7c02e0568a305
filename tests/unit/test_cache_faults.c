/* The disk cache when the system fails it: every file operation in turn, a disk that dies, a process that is killed, and everything at once from
 * several threads. What is read is right or missing, and the cache goes on. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <time.h>

#include "base/log.h"
#include "tests/unit/cache_fixture.h"

/* ---- operations that fail ---- */

enum fault { NO_SPACE, IO_ERROR, INTERRUPTED, SHORT, DEAD_DISK, N_FAULTS };

enum { MAX_CALLS = 2000 };

struct injector {
    atomic_int calls;
    bool moves_bytes[MAX_CALLS]; /* per call: a read or write, which can be cut short */
    atomic_bool full;            /* no write succeeds until this is false again */
    int at;                      /* the call that fails, from 0 on; -1 = none */
    enum fault fault;
};

/* Counts a call. Whether it is to fail (errno set), or for reads and writes be cut short. */
static bool hit(struct injector *in)
{
    int call = atomic_fetch_add(&in->calls, 1);
    if (in->at < 0 || (in->fault == DEAD_DISK ? call < in->at : call != in->at))
        return false;
    errno = in->fault == NO_SPACE ? ENOSPC : in->fault == INTERRUPTED ? EINTR : EIO;
    return true;
}

static const struct cache_file_ops *sys = &cache_file_system;

#define FAIL_OR(ctx, call) return hit(ctx) && ((struct injector *)(ctx))->fault != SHORT ? -1 : (call)

static int f_open(void *ctx, int dir, const char *name, int flags, unsigned mode)
{
    FAIL_OR(ctx, sys->open(NULL, dir, name, flags, mode));
}

/* Notes that the call to come is a read or write. */
static void note(struct injector *in)
{
    int call = atomic_load(&in->calls);
    if (call < MAX_CALLS)
        in->moves_bytes[call] = true;
}

static long f_read(void *ctx, int fd, void *data, size_t n)
{
    note(ctx);
    if (hit(ctx)) {
        if (((struct injector *)ctx)->fault != SHORT)
            return -1;
        n = n > 1 ? n / 2 : n;
    }
    return sys->read(NULL, fd, data, n);
}

static long f_write(void *ctx, int fd, const void *data, size_t n)
{
    note(ctx);
    if (atomic_load(&((struct injector *)ctx)->full)) {
        errno = ENOSPC;
        return -1;
    }
    if (hit(ctx)) {
        if (((struct injector *)ctx)->fault == DEAD_DISK || ((struct injector *)ctx)->fault == IO_ERROR)
            (void)!sys->write(NULL, fd, data, n / 2); /* and fails all the same */
        if (((struct injector *)ctx)->fault != SHORT) {
            errno = ((struct injector *)ctx)->fault == NO_SPACE ? ENOSPC : ((struct injector *)ctx)->fault == INTERRUPTED ? EINTR : EIO;
            return -1;
        }
        n = n > 1 ? n / 2 : n;
    }
    return sys->write(NULL, fd, data, n);
}

static int f_fsync(void *ctx, int fd)
{
    (void)fd;
    FAIL_OR(ctx, 0);
}

static int f_close(void *ctx, int fd)
{
    bool fails = hit(ctx) && ((struct injector *)ctx)->fault != SHORT;
    int why = errno;
    sys->close(NULL, fd); /* Linux closes it whatever it says */
    errno = why;
    return fails ? -1 : 0;
}

static int f_stat(void *ctx, int fd, struct stat *st)
{
    FAIL_OR(ctx, sys->stat(NULL, fd, st));
}

static int f_stat_at(void *ctx, int dir, const char *name, struct stat *st)
{
    FAIL_OR(ctx, sys->stat_at(NULL, dir, name, st));
}

static int f_rename(void *ctx, int dir, const char *from, const char *to)
{
    FAIL_OR(ctx, sys->rename(NULL, dir, from, to));
}

static int f_unlink(void *ctx, int dir, const char *name, bool folder)
{
    FAIL_OR(ctx, sys->unlink(NULL, dir, name, folder));
}

static int f_mkdir(void *ctx, int dir, const char *name, unsigned mode)
{
    FAIL_OR(ctx, sys->mkdir(NULL, dir, name, mode));
}

static int f_chmod(void *ctx, int dir, const char *name, unsigned mode)
{
    FAIL_OR(ctx, sys->chmod(NULL, dir, name, mode));
}

static int f_touch(void *ctx, int dir, const char *name)
{
    FAIL_OR(ctx, sys->touch(NULL, dir, name));
}

static int f_lock(void *ctx, int fd)
{
    FAIL_OR(ctx, sys->lock(NULL, fd));
}

static int f_list(void *ctx, int dir, void (*each)(void *arg, const char *name), void *arg)
{
    FAIL_OR(ctx, sys->list(NULL, dir, each, arg));
}

static struct cache_file_ops failing_ops(struct injector *in)
{
    return (struct cache_file_ops){.open = f_open,
                                   .read = f_read,
                                   .write = f_write,
                                   .fsync = f_fsync,
                                   .close = f_close,
                                   .stat = f_stat,
                                   .stat_at = f_stat_at,
                                   .rename = f_rename,
                                   .unlink = f_unlink,
                                   .mkdir = f_mkdir,
                                   .chmod = f_chmod,
                                   .touch = f_touch,
                                   .lock = f_lock,
                                   .list = f_list,
                                   .ctx = in};
}

/* ---- a life of the cache, with a fault somewhere in it ---- */

struct life {
    char *base, *dir;
    const char *key_file;
    struct text old, evicted, text, deleted;
};

static struct text text_of(const char *ns, unsigned seed, int n)
{
    struct cache_model m = model_number(1);
    return text_make(ns, &m, seed, n);
}

/* The old text and the new one; anything more has to be made room for. */
static const uint64_t life_budget = 4 * (uint64_t)(PAGE_BYTES + 480) + 2 * (uint64_t)(STATE_BYTES + 480);

static void age(const struct life *l, const struct text *t, time_t seconds)
{
    const struct timespec then[2] = {{.tv_sec = time(NULL) - seconds}, {.tv_sec = time(NULL) - seconds}};
    for (int i = 0; i < t->n; i++)
        assert_int_equal(utimensat(AT_FDCWD, file_path(l->dir, l->key_file, t, i, false), then, 0), 0);
    assert_int_equal(utimensat(AT_FDCWD, file_path(l->dir, l->key_file, t, t->n - 1, true), then, 0), 0);
}

/* A folder with two older texts and a leftover of a killed writer. */
static void prepare(struct life *l, bool encrypted)
{
    l->base = temp_folder();
    l->dir = strdup(path_in(l->base, "cache"));
    l->key_file = NULL;
    if (encrypted) {
        l->key_file = strdup(path_in(l->base, "key"));
        write_file(l->key_file, "forty bytes of a key file, not random at", 40, 0600);
    }
    struct cache_file_ops quick = quick_ops();
    struct cache_disk_options o = {.dir = l->dir, .key_file = l->key_file, .ops = &quick};
    struct cache_disk *d = open_with(&o, 1);
    l->old = text_of("p", 1, 2);
    l->evicted = text_of("gone", 2, 1);
    l->text = text_of("p", 3, 2);
    l->deleted = text_of("q", 4, 1);
    store_text(d, &l->old);
    store_text(d, &l->evicted);
    cache_disk_close(d);
    age(l, &l->old, 3600);
    age(l, &l->evicted, 7200);
    write_file(path_in(space_path(l->dir, l->key_file, "p"), "tmp.0000000000000009"), "half", 4, 0600);
}

static void clean(struct life *l)
{
    remove_folder_at(l->base);
    free(l->dir);
    free((char *)(uintptr_t)l->key_file);
}

/* Opens, reads, writes beyond the budget, deletes and closes. Whatever fails, nothing read is wrong (read_text checks). */
static void live(const struct life *l, struct injector *in)
{
    struct cache_file_ops ops = failing_ops(in);
    struct cache_disk_options o = {.dir = l->dir, .key_file = l->key_file, .budget = life_budget, .ops = &ops};
    struct cache_disk *d;
    struct error err = {{0}};
    if (cache_disk_open(&d, &o, &err) < 0) {
        assert_true(err.text[0] != '\0');
        assert_null(d);
        return;
    }
    struct cache_model m = model_number(1);
    cache_disk_bind(d, &m);
    read_text(d, &l->old);
    store_text(d, &l->text);
    read_text(d, &l->text);
    store_text(d, &l->deleted);
    read_text(d, &l->deleted);
    struct cache_removed removed;
    if (cache_disk_delete(d, l->deleted.ns, &removed, &err) == 0) {
        assert_int_equal(read_text(d, &l->deleted), 0);
        assert_false(exists(space_path(l->dir, l->key_file, l->deleted.ns)));
    } else {
        assert_true(err.text[0] != '\0');
    }
    assert_int_equal(read_text(d, &l->deleted), 0); /* deleted as far as this run goes, whatever the disk says */
    /* One fault never costs more than one attempt. */
    store_text(d, &l->text);
    int pages = read_text(d, &l->text);
    if (in->fault != DEAD_DISK && pages != l->text.n) {
        store_text(d, &l->text);
        assert_int_equal(read_text(d, &l->text), l->text.n);
    }
    assert_true(cache_disk_stats(d).bytes <= life_budget);
    assert_int_equal(cache_disk_stats(d).queued_bytes, 0);
    cache_disk_close(d);
}

/* The folder afterwards, with a system that works again: nothing wrong in it, and everything works. */
static void live_on(const struct life *l)
{
    struct cache_file_ops quick = quick_ops();
    struct cache_disk_options o = {.dir = l->dir, .key_file = l->key_file, .ops = &quick};
    struct cache_disk *d = open_with(&o, 1);
    const struct text *const all[] = {&l->old, &l->text, &l->deleted, &l->evicted};
    for (int i = 0; i < 4; i++)
        read_text(d, all[i]);
    assert_int_equal(cache_disk_stats(d).bad_files, 0);
    for (int i = 1; i < 3; i++) {
        store_text(d, all[i]);
        assert_int_equal(read_text(d, all[i]), all[i]->n);
    }
    struct cache_removed removed;
    struct error err = {{0}};
    static const char *const spaces[] = {"p", "q", "gone"};
    for (int i = 0; i < 3; i++)
        if (cache_disk_delete(d, spaces[i], &removed, &err) < 0)
            fail_msg("%s", err.text);
    cache_disk_close(d);
    if (count_names(l->dir) != 0)
        fail_msg("%d names are left", count_names(l->dir));
}

static void any_single_failure_costs_a_miss_at_most(void **state)
{
    struct life l;
    static struct injector dry, in;
    dry = (struct injector){.at = -1};
    prepare(&l, *state != NULL);
    live(&l, &dry);
    live_on(&l);
    clean(&l);
    const int n = atomic_load(&dry.calls);
    assert_true(n > 120 && n < MAX_CALLS);
    log_set_level(LOG_ERROR); /* the lines are another test's */
    for (int fault = 0; fault < N_FAULTS; fault++) {
        for (int at = 0; at < n; at += fault == DEAD_DISK ? 5 : 1) {
            if (fault == SHORT && !dry.moves_bytes[at])
                continue;
            /* The causes differ little once every call is known to be watched: with encryption one of them, for the calls that only then are. */
            if (*state && (fault == NO_SPACE || fault == INTERRUPTED))
                continue;
            prepare(&l, *state != NULL);
            in = (struct injector){.at = at, .fault = (enum fault)fault};
            live(&l, &in);
            live_on(&l);
            clean(&l);
        }
    }
    log_set_level(LOG_INFO);
}

static void a_full_disk_is_said_once_and_counted_and_reading_goes_on(void **state)
{
    struct life l;
    static struct injector in;
    in = (struct injector){.at = -1};
    prepare(&l, *state != NULL);
    struct cache_file_ops ops = failing_ops(&in);
    struct cache_disk_options o = {.dir = l.dir, .key_file = l.key_file, .ops = &ops};
    struct cache_disk *d = open_with(&o, 1);
    struct text t = text_of("new", 50, 4);
    atomic_store(&in.full, true);
    struct captured log = capture_log();
    for (int round = 1; round <= 4; round++) {
        store_text(d, &t);
        assert_int_equal(read_text(d, &t), 0);
        assert_int_equal(read_text(d, &l.old), 2);
        assert_int_equal(cache_disk_stats(d).write_errors, 5 * round);
    }
    assert_int_equal(captured_lines(log, "No space left"), 1);
    assert_false(exists(space_path(l.dir, l.key_file, "new")));
    atomic_store(&in.full, false);
    store_text(d, &t);
    assert_int_equal(read_text(d, &t), 4);
    cache_disk_close(d);
    clean(&l);
}

/* ---- a process that is killed ---- */

/* Stores text after text until it is killed. Never returns. */
static void write_for_ever(const struct life *l, int ready)
{
    struct cache_disk_options o = {.dir = l->dir, .key_file = l->key_file};
    struct cache_disk *d;
    if (cache_disk_open(&d, &o, NULL) < 0)
        _exit(1);
    struct cache_model m = model_number(1);
    cache_disk_bind(d, &m);
    if (write(ready, "x", 1) != 1)
        _exit(1);
    for (unsigned seed = 1000;; seed = seed < 1100 ? seed + 1 : 1000) {
        struct text t = text_of(seed % 2 ? "p" : "q", seed, 3);
        store_text(d, &t);
        if (seed % 10 == 9) /* so that there is always something to write */
            cache_disk_delete(d, "p", &(struct cache_removed){0}, NULL);
    }
}

static void a_writer_killed_at_any_moment_leaves_whole_files_only(void **state)
{
    struct life l;
    prepare(&l, *state != NULL);
    struct cache_disk_options o = {.dir = l.dir, .key_file = l.key_file};
    uint64_t files = 0;
    for (int round = 0; round < 20; round++) {
        int ready[2];
        char byte;
        assert_int_equal(pipe(ready), 0);
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            close(ready[0]);
            write_for_ever(&l, ready[1]);
        }
        close(ready[1]);
        assert_int_equal(read(ready[0], &byte, 1), 1);
        close(ready[0]);
        nanosleep(&(struct timespec){.tv_nsec = 3000000 + 1370000 * round}, NULL);
        kill(child, SIGKILL);
        assert_int_equal(waitpid(child, NULL, 0), child);

        struct captured log = capture_log();
        struct cache_disk *d = open_with(&o, 1); /* the lock has gone with the process */
        for (unsigned seed = 1000; seed <= 1100; seed++) {
            struct text t = text_of(seed % 2 ? "p" : "q", seed, 3);
            read_text(d, &t);
        }
        struct cache_disk_stats s = cache_disk_stats(d);
        cache_disk_close(d);
        captured_nothing(log);
        assert_int_equal(s.bad_files + s.read_errors + s.foreign_namespaces, 0);
        files += s.files;
    }
    assert_true(files > 0);
    clean(&l);
}

/* ---- everything at once ---- */

struct crowd {
    struct cache_disk *d;
    atomic_bool stop;
    atomic_int hits, deleted;
    atomic_int wrong;
};

/* Like read_text, without ending the program from a thread that cmocka does not know. */
static void read_in_crowd(struct crowd *c, const struct text *t)
{
    struct cache_image image;
    if (cache_disk_read(c->d, t->ns, &(struct cache_text){.keys = t->keys, .ids = t->ids, .n = t->n}, 0, &image)) {
        atomic_fetch_add(&c->hits, 1);
        for (int i = 0; i < image.n_pages; i++) {
            uint8_t *right = contents(&t->keys[i], false);
            atomic_fetch_add(&c->wrong, memcmp(right, image.pages + (size_t)i * PAGE_BYTES, PAGE_BYTES) != 0);
            free(right);
        }
        uint8_t *right = contents(&t->keys[image.n_pages - 1], true);
        atomic_fetch_add(&c->wrong, memcmp(right, image.state, STATE_BYTES) != 0);
        free(right);
    }
    cache_image_free(&image);
}

enum { CROWD_TEXTS = 12 };

static struct text crowd_text(unsigned i)
{
    static const char *const spaces[] = {"a", "b", "c"};
    return text_of(spaces[i % 3], 200 + i, 3);
}

static void *crowd_reader(void *arg)
{
    struct crowd *c = arg;
    for (unsigned i = 0; !atomic_load(&c->stop); i = (i + 7) % CROWD_TEXTS) {
        struct text t = crowd_text(i);
        read_in_crowd(c, &t);
    }
    return NULL;
}

static void *crowd_writer(void *arg)
{
    struct crowd *c = arg;
    for (unsigned i = 0; !atomic_load(&c->stop); i = (i + 5) % CROWD_TEXTS) {
        struct text t = crowd_text(i);
        bool pages[3], st;
        cache_disk_missing(c->d, t.ns, t.keys, 3, pages, &st);
        for (int p = 0; p < 3; p++)
            if (pages[p])
                put_page(c->d, &t, p);
        if (st)
            put_state(c->d, &t, 2);
        if (i == 0)
            cache_disk_flush(c->d);
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    }
    return NULL;
}

static void *crowd_deleter(void *arg)
{
    struct crowd *c = arg;
    static const char *const spaces[] = {"a", "b", "c", "nobody"};
    for (unsigned i = 0; !atomic_load(&c->stop); i++) {
        struct cache_removed removed;
        struct cache_namespace_info info[4];
        if (cache_disk_delete(c->d, spaces[i % 4], &removed, NULL) < 0)
            atomic_fetch_add(&c->wrong, 1);
        atomic_fetch_add(&c->deleted, (int)removed.files);
        atomic_fetch_add(&c->wrong, cache_disk_list(c->d, info, 4) > 5);
        nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    }
    return NULL;
}

/* Damages files as a failing disk would. */
static void *crowd_vandal(void *arg)
{
    const struct life *l = ((void **)arg)[1];
    struct crowd *c = ((void **)arg)[0];
    for (unsigned i = 0; !atomic_load(&c->stop); i++) {
        struct text t = crowd_text(i % CROWD_TEXTS);
        int fd = open(file_path(l->dir, l->key_file, &t, (int)(i % 3), false), O_RDWR | O_CLOEXEC);
        if (fd >= 0) {
            (void)!pwrite(fd, "vandal", 6, 700);
            close(fd);
        }
        nanosleep(&(struct timespec){.tv_nsec = 3000000}, NULL);
    }
    return NULL;
}

static void readers_writer_and_deleter_at_once_never_get_a_wrong_byte(void **state)
{
    struct life l;
    prepare(&l, *state != NULL);
    struct cache_file_ops quick = quick_ops();
    struct cache_disk_options o = {.dir = l.dir,
                                   .key_file = l.key_file,
                                   .ops = &quick,
                                   .budget = 24 * (PAGE_BYTES + 480) + 8 * (STATE_BYTES + 480), /* two texts in three */
                                   .queue_bytes = 40000};
    log_set_level(LOG_ERROR);
    struct crowd c = {.d = open_with(&o, 1)};
    pthread_t threads[5];
    void *vandal[] = {&c, &l};
    void *(*const work[])(void *) = {crowd_reader, crowd_reader, crowd_writer, crowd_deleter, crowd_vandal};
    for (int i = 0; i < 5; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, work[i], i == 4 ? (void *)vandal : (void *)&c), 0);
    nanosleep(&(struct timespec){.tv_sec = 2}, NULL);
    atomic_store(&c.stop, true);
    for (int i = 0; i < 5; i++)
        pthread_join(threads[i], NULL);
    cache_disk_flush(c.d);
    log_set_level(LOG_INFO);
    assert_int_equal(atomic_load(&c.wrong), 0);
    assert_true(atomic_load(&c.hits) > 0 && atomic_load(&c.deleted) > 0);
    struct cache_disk_stats s = cache_disk_stats(c.d);
    assert_true(s.written > 0 && s.bad_files > 0 && s.bytes <= o.budget);
    assert_int_equal(s.queued_bytes, 0);

    /* The index and the folder agree. */
    struct cache_namespace_info info[8];
    uint64_t files = 0;
    const size_t n = cache_disk_list(c.d, info, 8);
    assert_true(n <= 8);
    for (size_t i = 0; i < n; i++)
        files += info[i].files;
    assert_int_equal(files, s.files);
    cache_disk_close(c.d);
    c.d = open_with(&o, 1);
    assert_int_equal(cache_disk_stats(c.d).files, s.files);
    assert_int_equal(cache_disk_stats(c.d).bytes, s.bytes);
    cache_disk_close(c.d);
    clean(&l);
}

#define BOTH(test)                                                                                                                                   \
    {#test "_plain", test, NULL, NULL, NULL},                                                                                                        \
    {                                                                                                                                                \
#test "_encrypted", test, NULL, NULL, yes                                                                                                    \
    }

int main(void)
{
    static char yes[] = "encrypted";
    const struct CMUnitTest tests[] = {
        BOTH(any_single_failure_costs_a_miss_at_most),
        BOTH(a_full_disk_is_said_once_and_counted_and_reading_goes_on),
        BOTH(a_writer_killed_at_any_moment_leaves_whole_files_only),
        BOTH(readers_writer_and_deleter_at_once_never_get_a_wrong_byte),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
