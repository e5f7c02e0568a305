/* engine/cpu/pool.c: a job is one 64-bit word, {generation, tasks not yet taken}, from which threads take tasks by compare-and-swap.
 *
 * Why a late worker can do no harm: it reads the word, then the job's fields, then swaps the word for one with a task fewer. The swap succeeds only
 * if the word is unchanged, that is, if the same generation still has a task that nobody took; and pool_run does not return, so does not touch the
 * fields again, before every task has been run. So fields read before a successful swap belong to the generation that was swapped. */
#include "engine/cpu/pool.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/clock.h"

enum {
    SPIN_NS = 50 * 1000, /* longer than the gap between two operations of a step, shorter than anybody notices on a battery */
    SPIN_CHECK = 32,     /* pauses between looks at the clock */
    MAX_THREADS = 1024,
};

typedef void task_fn(void *arg, int i, int worker);

struct worker {
    struct pool *pool;
    pthread_t thread;
    int index; /* 1 .. n_threads - 1; the caller of pool_run is worker 0 */
};

struct pool {
    int n_threads;
    struct worker *workers; /* [n_threads - 1] */
    /* The job. On lines of their own: `word` is written by everybody, `done` once per worker and job. */
    _Alignas(64) _Atomic uint64_t word; /* generation << 32 | tasks left */
    _Atomic int n;
    _Atomic(task_fn *) task;
    _Atomic(void *) arg;
    _Alignas(64) _Atomic int done;
    /* Sleeping. A sleeper counts itself and then looks once more; a waker changes the state and then looks at the count: in the one order that
     * sequentially consistent operations have, at least one sees the other. */
    _Alignas(64) _Atomic int sleepers;
    _Atomic bool caller_sleeps;
    _Atomic bool stop;
    pthread_mutex_t lock;
    pthread_cond_t work, finished;
};

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Runs tasks of the current generation until none is left. */
static void take_tasks(struct pool *p, int worker)
{
    int ran = 0, n = 0;
    uint64_t word = atomic_load(&p->word);
    uint32_t generation = (uint32_t)(word >> 32);
    while ((uint32_t)word > 0 && (uint32_t)(word >> 32) == generation) {
        int jobs = atomic_load_explicit(&p->n, memory_order_relaxed);
        task_fn *task = atomic_load_explicit(&p->task, memory_order_relaxed);
        void *arg = atomic_load_explicit(&p->arg, memory_order_relaxed);
        if (!atomic_compare_exchange_weak(&p->word, &word, word - 1))
            continue;
        n = jobs;
        task(arg, jobs - (int)(uint32_t)word, worker);
        ran++;
        word = atomic_load(&p->word);
    }
    if (ran > 0 && atomic_fetch_add(&p->done, ran) + ran == n && atomic_load(&p->caller_sleeps)) {
        pthread_mutex_lock(&p->lock);
        pthread_cond_signal(&p->finished);
        pthread_mutex_unlock(&p->lock);
    }
}

static bool work_waits(struct pool *p)
{
    return (uint32_t)atomic_load(&p->word) > 0 || atomic_load(&p->stop);
}

static bool job_done(struct pool *p)
{
    return atomic_load(&p->done) == atomic_load_explicit(&p->n, memory_order_relaxed);
}

/* Spins until `ready` or the time is up. */
static bool spin(struct pool *p, bool (*ready)(struct pool *))
{
    uint64_t end = clock_ns() + SPIN_NS;
    do {
        for (int i = 0; i < SPIN_CHECK; i++) {
            if (ready(p))
                return true;
            relax();
        }
    } while (clock_ns() < end);
    return ready(p);
}

static void *work(void *arg)
{
    struct worker *w = arg;
    struct pool *p = w->pool;
    while (!atomic_load(&p->stop)) {
        if (!spin(p, work_waits)) {
            pthread_mutex_lock(&p->lock);
            atomic_fetch_add(&p->sleepers, 1);
            while (!work_waits(p))
                pthread_cond_wait(&p->work, &p->lock);
            atomic_fetch_sub(&p->sleepers, 1);
            pthread_mutex_unlock(&p->lock);
        }
        take_tasks(p, w->index);
    }
    return NULL;
}

void pool_run(struct pool *p, int n, void (*task)(void *arg, int i, int worker), void *arg)
{
    if (n <= 0)
        return;
    if (n == 1 || p->n_threads == 1) {
        for (int i = 0; i < n; i++)
            task(arg, i, 0);
        return;
    }
    atomic_store_explicit(&p->n, n, memory_order_relaxed);
    atomic_store_explicit(&p->task, task, memory_order_relaxed);
    atomic_store_explicit(&p->arg, arg, memory_order_relaxed);
    atomic_store_explicit(&p->done, 0, memory_order_relaxed);
    uint64_t generation = (atomic_load_explicit(&p->word, memory_order_relaxed) >> 32) + 1;
    atomic_store(&p->word, generation << 32 | (uint32_t)n);
    if (atomic_load(&p->sleepers) > 0) {
        pthread_mutex_lock(&p->lock);
        pthread_cond_broadcast(&p->work);
        pthread_mutex_unlock(&p->lock);
    }
    take_tasks(p, 0);
    if (spin(p, job_done))
        return;
    pthread_mutex_lock(&p->lock);
    atomic_store(&p->caller_sleeps, true);
    while (!job_done(p))
        pthread_cond_wait(&p->finished, &p->lock);
    atomic_store(&p->caller_sleeps, false);
    pthread_mutex_unlock(&p->lock);
}

int pool_threads(const struct pool *p)
{
    return p->n_threads;
}

/* Reads a small file into text [size]; false when there is none. */
static bool read_line(const char *path, char *text, size_t size)
{
    FILE *f = fopen(path, "re");
    if (!f)
        return false;
    bool ok = fgets(text, (int)size, f) != NULL;
    fclose(f);
    return ok;
}

/* The first CPU of those that share a core with `cpu`: one name per core. The CPU itself where the system does not say. */
static int core_of(int cpu)
{
    static const char *const names[] = {"core_cpus_list", "thread_siblings_list"}; /* the second is the older name */
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char path[128], text[256];
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/%s", cpu, names[i]);
        if (!read_line(path, text, sizeof text))
            continue;
        char *end;
        long first = strtol(text, &end, 10);
        if (end != text && first >= 0 && first <= INT_MAX)
            return (int)first;
    }
    return cpu;
}

/* Cores with at least one CPU in the affinity mask; 1 when the mask cannot be read. */
static int allowed_cores(void)
{
    int cores = 0;
    for (int cpus = 1024; cpus <= 1 << 20; cpus *= 4) { /* the kernel refuses a mask smaller than its own */
        cpu_set_t *set = CPU_ALLOC((size_t)cpus);
        int *seen = alloc_array((size_t)cpus, sizeof *seen);
        size_t bytes = CPU_ALLOC_SIZE((size_t)cpus);
        bool ok = set && seen && sched_getaffinity(0, bytes, set) == 0;
        bool larger = !ok && set && seen && errno == EINVAL;
        for (int cpu = 0; ok && cpu < cpus; cpu++) {
            if (!CPU_ISSET_S((size_t)cpu, bytes, set))
                continue;
            int core = core_of(cpu);
            if (core >= cpus || !seen[core])
                cores++;
            if (core < cpus)
                seen[core] = 1;
        }
        free(seen);
        if (set)
            CPU_FREE(set);
        if (!larger)
            break;
    }
    return cores > 0 ? cores : 1;
}

/* Whole CPUs that one cpu.max line ("quota period" or "max period") grants; INT_MAX = no limit. */
static int quota_of(const char *text)
{
    char *end;
    long long quota = strtoll(text, &end, 10); /* 0 for "max" */
    long long period = strtoll(end, NULL, 10);
    if (quota <= 0 || period <= 0)
        return INT_MAX;
    long long whole = quota / period; /* rounded down: a thread beyond the quota would only be throttled with the rest */
    return whole < 1 ? 1 : whole > INT_MAX ? INT_MAX : (int)whole;
}

/* The tightest CPU quota of this process's cgroup (v2) and the groups above it; INT_MAX = none. */
static int cgroup_quota(void)
{
    FILE *f = fopen("/proc/self/cgroup", "re");
    if (!f)
        return INT_MAX;
    char line[1024], path[1200], text[128];
    int limit = INT_MAX;
    while (fgets(line, sizeof line, f)) {
        if (strncmp(line, "0::/", 4) != 0)
            continue;
        char *group = line + 3;
        group[strcspn(group, "\n")] = '\0';
        for (;;) {
            snprintf(path, sizeof path, "/sys/fs/cgroup%s/cpu.max", strcmp(group, "/") == 0 ? "" : group);
            if (read_line(path, text, sizeof text)) {
                int quota = quota_of(text);
                limit = quota < limit ? quota : limit;
            }
            char *slash = strrchr(group, '/');
            if (!slash || group[1] == '\0')
                break;
            slash[slash == group ? 1 : 0] = '\0';
        }
    }
    fclose(f);
    return limit;
}

static int default_threads(void)
{
    int cores = allowed_cores(), quota = cgroup_quota();
    int n = cores < quota ? cores : quota;
    return n > MAX_THREADS ? MAX_THREADS : n;
}

/* Ends and joins the first n workers. */
static void stop_workers(struct pool *p, int n)
{
    pthread_mutex_lock(&p->lock);
    atomic_store(&p->stop, true);
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->lock);
    for (int i = 0; i < n; i++)
        pthread_join(p->workers[i].thread, NULL);
}

struct pool *pool_open(int n_threads, struct error *err)
{
    if (n_threads < 0 || n_threads > MAX_THREADS) {
        error_set(err, "threads: %d is out of range; give 0 (one per core) to %d", n_threads, MAX_THREADS);
        return NULL;
    }
    struct pool *p = alloc_lines(1, sizeof *p);
    if (!p) {
        error_set(err, "out of memory for the thread pool");
        return NULL;
    }
    p->n_threads = n_threads ? n_threads : default_threads();
    p->workers = alloc_array((size_t)p->n_threads, sizeof *p->workers);
    if (!p->workers) {
        error_set(err, "out of memory for the thread pool");
        free(p);
        return NULL;
    }
    pthread_mutex_init(&p->lock, NULL); /* default attributes: on Linux these three cannot fail */
    pthread_cond_init(&p->work, NULL);
    pthread_cond_init(&p->finished, NULL);
    for (int i = 0; i < p->n_threads - 1; i++) {
        struct worker *w = &p->workers[i];
        w->pool = p;
        w->index = i + 1;
        int rc = pthread_create(&w->thread, NULL, work, w);
        if (rc != 0) {
            error_set(err, "cannot start thread %d of %d: %s; set fewer threads", i + 2, p->n_threads, strerror(rc));
            p->n_threads = i + 1;
            pool_close(p);
            return NULL;
        }
    }
    return p;
}

void pool_close(struct pool *p)
{
    if (!p)
        return;
    stop_workers(p, p->n_threads - 1);
    pthread_cond_destroy(&p->finished);
    pthread_cond_destroy(&p->work);
    pthread_mutex_destroy(&p->lock);
    free(p->workers);
    free(p);
}
