#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <dirent.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "base/alloc.h"
#include "engine/cpu/pool.h"

struct tally {
    int n, n_threads;
    _Atomic int *runs; /* [n] */
    _Atomic int bad_worker;
    _Atomic int busy[16]; /* by worker: 1 while it runs a task */
    int64_t sum[16];      /* by worker, not atomic on purpose: only its own worker may write */
};

static void count(void *arg, int i, int worker)
{
    struct tally *t = arg;
    if (worker < 0 || worker >= t->n_threads || atomic_exchange(&t->busy[worker], 1) != 0)
        atomic_store(&t->bad_worker, 1);
    if (i >= 0 && i < t->n)
        atomic_fetch_add(&t->runs[i], 1);
    t->sum[worker] += i;
    atomic_store(&t->busy[worker], 0);
}

static void every_index_runs_exactly_once_whatever_the_number_of_threads(void **state)
{
    (void)state;
    static const int threads[] = {1, 2, 3, 8};
    static const int sizes[] = {0, 1, 2, 3, 7, 64, 10000};
    for (size_t k = 0; k < 4; k++) {
        struct error err = {""};
        struct pool *p = pool_open(threads[k], &err);
        assert_non_null(p);
        assert_int_equal(pool_threads(p), threads[k]);
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
            struct tally t = {.n = sizes[s], .n_threads = threads[k]};
            t.runs = alloc_array((size_t)sizes[s], sizeof *t.runs);
            assert_non_null(t.runs);
            pool_run(p, sizes[s], count, &t);
            int64_t sum = 0;
            for (int w = 0; w < 16; w++)
                sum += t.sum[w];
            assert_int_equal(sum, (int64_t)sizes[s] * (sizes[s] - 1) / 2);
            for (int i = 0; i < sizes[s]; i++)
                assert_int_equal(atomic_load(&t.runs[i]), 1);
            assert_int_equal(atomic_load(&t.bad_worker), 0);
            free((void *)t.runs);
        }
        pool_close(p);
    }
}

struct step {
    int value[4];
    int expected;
    _Atomic int wrong;
};

static void check_and_advance(void *arg, int i, int worker)
{
    (void)worker;
    struct step *s = arg;
    if (s->value[i] != s->expected)
        atomic_store(&s->wrong, 1);
    s->value[i]++;
}

/* What one job wrote, the next one sees, on whichever thread it runs; and the caller's writes between jobs too. */
static void a_hundred_thousand_small_jobs_follow_each_other_without_losing_a_write(void **state)
{
    (void)state;
    struct pool *p = pool_open(2, NULL);
    assert_non_null(p);
    struct step s = {.expected = 0};
    for (int job = 0; job < 100000; job++) {
        s.expected = job;
        pool_run(p, 4, check_and_advance, &s);
    }
    assert_int_equal(atomic_load(&s.wrong), 0);
    for (int i = 0; i < 4; i++)
        assert_int_equal(s.value[i], 100000);
    pool_close(p);
}

static void nap(long ns)
{
    struct timespec t = {0, ns};
    nanosleep(&t, NULL);
}

static void take_a_while(void *arg, int i, int worker)
{
    (void)worker;
    if (i == 0)
        nap(2 * 1000 * 1000);
    atomic_fetch_add((_Atomic int *)arg, 1);
}

/* Long enough that the spinning ends: workers asleep are woken by a job, and a caller asleep by the last task. */
static void sleepers_wake_for_a_job_and_for_its_end(void **state)
{
    (void)state;
    struct pool *p = pool_open(3, NULL);
    assert_non_null(p);
    for (int round = 0; round < 20; round++) {
        _Atomic int done = 0;
        nap(1000 * 1000);
        pool_run(p, 5, take_a_while, (void *)&done);
        assert_int_equal(atomic_load(&done), 5);
    }
    pool_close(p);
}

static double cpu_ms(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) * 1e3 + (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e3;
}

static void an_idle_pool_uses_no_cpu(void **state)
{
    (void)state;
    struct pool *p = pool_open(4, NULL);
    assert_non_null(p);
    struct step s = {.expected = 0};
    pool_run(p, 4, check_and_advance, &s);
    nap(10 * 1000 * 1000); /* the spinning after a job */
    double before = cpu_ms();
    nap(300 * 1000 * 1000);
    assert_true(cpu_ms() - before < 5);
    pool_close(p);
}

static int n_threads_of_process(void)
{
    int n = 0;
    DIR *d = opendir("/proc/self/task");
    assert_non_null(d);
    for (struct dirent *e = readdir(d); e; e = readdir(d))
        n += e->d_name[0] != '.';
    closedir(d);
    return n;
}

static void closing_ends_every_thread(void **state)
{
    (void)state;
    int before = n_threads_of_process();
    for (int round = 0; round < 50; round++) {
        struct pool *p = pool_open(1 + round % 5, NULL);
        assert_non_null(p);
        struct step s = {.expected = 0};
        if (round % 2)
            pool_run(p, 4, check_and_advance, &s);
        pool_close(p);
    }
    assert_int_equal(n_threads_of_process(), before);
    pool_close(NULL);
}

static void the_default_is_no_more_than_the_cpus_this_process_may_use(void **state)
{
    (void)state;
    cpu_set_t set, one;
    assert_int_equal(sched_getaffinity(0, sizeof set, &set), 0);
    struct pool *p = pool_open(0, NULL);
    assert_non_null(p);
    assert_in_range(pool_threads(p), 1, CPU_COUNT(&set));
    pool_close(p);
    size_t first = 0;
    while (!CPU_ISSET(first, &set))
        first++;
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
    p = pool_open(0, NULL);
    assert_non_null(p);
    assert_int_equal(pool_threads(p), 1);
    pool_close(p);
    assert_int_equal(sched_setaffinity(0, sizeof set, &set), 0);
}

static void an_absurd_number_of_threads_is_refused_by_name(void **state)
{
    (void)state;
    struct error err = {""};
    assert_null(pool_open(-1, &err));
    assert_non_null(strstr(err.text, "threads: -1"));
    assert_null(pool_open(100000, &err));
    assert_non_null(strstr(err.text, "threads: 100000"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_index_runs_exactly_once_whatever_the_number_of_threads),
        cmocka_unit_test(a_hundred_thousand_small_jobs_follow_each_other_without_losing_a_write),
        cmocka_unit_test(sleepers_wake_for_a_job_and_for_its_end),
        cmocka_unit_test(an_idle_pool_uses_no_cpu),
        cmocka_unit_test(closing_ends_every_thread),
        cmocka_unit_test(the_default_is_no_more_than_the_cpus_this_process_may_use),
        cmocka_unit_test(an_absurd_number_of_threads_is_refused_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
