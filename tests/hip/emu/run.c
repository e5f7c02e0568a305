/* tests/hip/emu/run.c: a launch: workgroups spread over host threads; in a workgroup one wave after the other, each until it ends or waits at a barrier. */
#include "tests/hip/emu/emu.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/hip/emu/hip_errors.h"

enum { MAX_THREADS = 64, LDS_MAX = 65536, POISON = 0xff };

struct job {
    const struct launch *launch;
    const struct range *ranges;
    int n_ranges;
    uint64_t n_groups;
    bool lines, races, reversed;
    uint64_t **read_bits, **write_bits;
    atomic_ullong next;
    atomic_bool failed;
};

struct worker {
    struct group group;
    pthread_t thread;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t begin = PTHREAD_COND_INITIALIZER, end = PTHREAD_COND_INITIALIZER;
static struct worker *workers[MAX_THREADS]; /* 0 is the calling thread's */
static int n_workers;
static struct job *current;
static uint64_t current_number;
static int wanted, busy; /* threads that the job still wants; threads at it */

/* ---- one workgroup ---- */

const struct insn *emu_run_unknown(struct wave *w, const struct insn *in)
{
    emu_fault(w, in, "the emulator does not know this instruction");
}

static void start_wave(struct wave *w, struct group *g, uint32_t number)
{
    const struct launch *l = g->launch;
    const struct kernel *k = l->kernel;
    const uint32_t threads = l->block[0] * l->block[1] * l->block[2], left = threads - number * LANES;
    memset(w->v, POISON, (size_t)((k->vgprs + 7) & ~7u) * sizeof w->v[0]);
    memset(w->s, POISON, sizeof w->s);
    w->scc = 0;
    w->number = number;
    w->group = g;
    w->next = k->insns;
    w->at_barrier = false;
    w->s[S_EXEC] = left >= LANES ? ~0u : (1u << left) - 1;
    w->s[S_EXEC + 1] = 0;
    if (k->kernarg_ptr) {
        const uint64_t at = (uint64_t)(uintptr_t)l->kernarg;
        w->s[k->kernarg_at] = (uint32_t)at;
        w->s[k->kernarg_at + 1] = (uint32_t)(at >> 32);
    }
    uint32_t s = k->user_sgprs;
    if (k->id_x)
        w->s[s++] = g->id[0];
    if (k->id_y)
        w->s[s++] = g->id[1];
    if (k->id_z)
        w->s[s++] = g->id[2];
    w->s[S_TTMP + 9] = g->id[0]; /* gfx12 has them here */
    w->s[S_TTMP + 7] = (g->id[1] & 0xffff) | g->id[2] << 16;
    for (uint32_t i = 0; i < LANES; i++) {
        const uint32_t t = number * LANES + i, x = t % l->block[0], yz = t / l->block[0];
        w->v[0][i] = x | (yz % l->block[1]) << 10 | (yz / l->block[1]) << 20;
    }
}

static void run_wave(struct wave *w)
{
    uint64_t *counts = w->group->counts;
    const struct insn *in = w->next;
    do {
        counts[in->op_class]++;
        in = in->run(w, in);
    } while (in);
}

/* Waves run up to the barrier until none is left. Faults leave through g->fault. */
static void run_group(struct group *g, bool reversed)
{
    memset(g->lds, POISON, g->lds_bytes);
    g->epoch++;
    for (uint32_t i = 0; i < g->n_waves; i++)
        start_wave(&g->waves[i], g, i);
    for (;;) {
        const struct wave *waiting = NULL, *ended = NULL;
        for (uint32_t i = 0; i < g->n_waves; i++) {
            struct wave *w = &g->waves[reversed ? g->n_waves - 1 - i : i];
            if (w->next)
                run_wave(w);
            if (w->next)
                waiting = w;
            else
                ended = w;
        }
        if (!waiting)
            return;
        if (ended)
            emu_fault(waiting, waiting->next - 1, "a barrier that wave %u of the workgroup does not reach: it has ended", ended->number);
        g->epoch++;
    }
}

static void run_groups(struct worker *worker, struct job *job)
{
    struct group *g = &worker->group;
    const struct launch *l = job->launch;
    const uint64_t n = job->n_groups;
    /* A few at a time where there are many, so that the counter is not fought for. */
    const uint64_t batch = n / 256 + 1;
    g->launch = l;
    g->ranges = job->ranges;
    g->n_ranges = job->n_ranges;
    g->lines = job->lines;
    g->read_bits = job->read_bits;
    g->write_bits = job->write_bits;
    g->lds_bytes = l->kernel->lds_bytes + l->dynamic_lds;
    g->n_waves = (l->block[0] * l->block[1] * l->block[2] + LANES - 1) / LANES;
    g->kernarg = (struct range){(uint64_t)(uintptr_t)l->kernarg, (uint64_t)(uintptr_t)l->kernarg + l->kernel->kernarg_bytes};
    memset(g->seen, 0, sizeof g->seen);
    if (job->races && !g->shadow)
        g->shadow = calloc(LDS_MAX, sizeof *g->shadow);
    if (!job->races) {
        free(g->shadow);
        g->shadow = NULL;
    }
    if (_setjmp(g->fault)) {
        atomic_store(&job->failed, true);
        emu_count_group(g);
        return;
    }
    while (!atomic_load(&job->failed)) {
        const uint64_t first = atomic_fetch_add(&job->next, batch);
        if (first >= n)
            break;
        for (uint64_t i = first; i < first + batch && i < n; i++) {
            g->id[0] = (uint32_t)(i % l->grid[0]);
            g->id[1] = (uint32_t)(i / l->grid[0] % l->grid[1]);
            g->id[2] = (uint32_t)(i / l->grid[0] / l->grid[1]);
            run_group(g, job->reversed);
        }
    }
    emu_count_group(g);
}

/* ---- threads ---- */

static struct worker *new_worker(void)
{
    struct worker *w = aligned_alloc(64, (sizeof *w + 63) & ~(size_t)63);
    if (!w)
        return NULL;
    memset(w, 0, sizeof *w);
    w->group.waves = aligned_alloc(64, MAX_WAVES * sizeof(struct wave));
    w->group.lds = aligned_alloc(64, LDS_MAX + 64);
    if (!w->group.waves || !w->group.lds) {
        free(w->group.waves);
        free(w->group.lds);
        free(w);
        return NULL;
    }
    memset(w->group.lds, POISON, LDS_MAX + 64);
    return w;
}

static void *worker_main(void *arg)
{
    struct worker *w = arg;
    uint64_t seen = 0;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!current || current_number == seen || wanted == 0)
            pthread_cond_wait(&begin, &lock);
        struct job *job = current;
        seen = current_number;
        wanted--;
        busy++;
        pthread_mutex_unlock(&lock);
        run_groups(w, job);
        pthread_mutex_lock(&lock);
        if (--busy == 0)
            pthread_cond_signal(&end);
    }
    return NULL;
}

static int thread_count(void)
{
    const char *text = getenv("EMU_THREADS");
    const long n = text ? strtol(text, NULL, 10) : sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : n > MAX_THREADS ? MAX_THREADS : (int)n;
}

/* As many workers as there are threads to be; fewer where the host gives no more. They live as long as the process. */
static int make_workers(int n)
{
    if (n_workers == 0) {
        workers[0] = new_worker();
        if (!workers[0])
            return -1;
        n_workers = 1;
    }
    while (n_workers < n) {
        struct worker *w = new_worker();
        if (!w)
            return 0;
        if (pthread_create(&w->thread, NULL, worker_main, w) != 0) {
            free(w->group.waves);
            free(w->group.lds);
            free(w);
            return 0;
        }
        pthread_detach(w->thread);
        workers[n_workers++] = w;
    }
    return 0;
}

/* ---- launches ---- */

static uint64_t **new_bits(const struct range *ranges, int n)
{
    uint64_t **bits = calloc((size_t)n + 1, sizeof *bits);
    if (!bits)
        abort();
    for (int i = 0; i < n; i++) {
        const uint64_t lines = (ranges[i].end - 1) / EMU_LINE_BYTES - ranges[i].begin / EMU_LINE_BYTES + 1;
        bits[i] = calloc(lines / 64 + 1, sizeof **bits);
        if (!bits[i])
            abort();
    }
    return bits;
}

static uint64_t count_and_free(uint64_t **bits, const struct range *ranges, int n)
{
    uint64_t lines = 0;
    for (int i = 0; i < n; i++) {
        const uint64_t words = ((ranges[i].end - 1) / EMU_LINE_BYTES - ranges[i].begin / EMU_LINE_BYTES + 1) / 64 + 1;
        for (uint64_t k = 0; k < words; k++)
            lines += (uint64_t)__builtin_popcountll(bits[i][k]);
        free(bits[i]);
    }
    free(bits);
    return lines * EMU_LINE_BYTES;
}

static bool enabled(const char *variable)
{
    const char *text = getenv(variable);
    return text && text[0] && strcmp(text, "0") != 0;
}

static int refuse(const struct kernel *k, const char *why)
{
    emu_note_fault("kernel %s: %s", k->name, why);
    return HIP_ERROR_LAUNCH_FAILURE;
}

int emu_run(const struct launch *l)
{
    struct kernel *k = l->kernel;
    if (emu_kernel_decode(k) != 0)
        return refuse(k, "cannot be disassembled");
    if (!k->wave32)
        return refuse(k, "compiled for waves of 64");
    if (k->scratch_bytes)
        return refuse(k, "uses scratch memory");
    if (k->lds_bytes + l->dynamic_lds > LDS_MAX)
        return refuse(k, "more than 64 KiB of LDS");
    struct job job = {.launch = l, .n_groups = (uint64_t)l->grid[0] * l->grid[1] * l->grid[2]};
    int threads = thread_count();
    if ((uint64_t)threads > job.n_groups)
        threads = (int)job.n_groups;
    if (make_workers(threads) != 0)
        return refuse(k, "no memory for the emulator's threads");
    job.ranges = emu_ranges(&job.n_ranges);
    job.lines = enabled("EMU_LINES");
    job.races = enabled("EMU_RACES");
    job.reversed = enabled("EMU_REVERSED");
    if (job.lines) {
        job.read_bits = new_bits(job.ranges, job.n_ranges);
        job.write_bits = new_bits(job.ranges, job.n_ranges);
    }
    pthread_mutex_lock(&lock);
    current = &job;
    current_number++;
    wanted = (threads < n_workers ? threads : n_workers) - 1;
    for (int i = 0; i < wanted; i++)
        pthread_cond_signal(&begin);
    pthread_mutex_unlock(&lock);

    run_groups(workers[0], &job);

    pthread_mutex_lock(&lock);
    wanted = 0;
    while (busy)
        pthread_cond_wait(&end, &lock);
    current = NULL;
    pthread_mutex_unlock(&lock);
    const uint64_t read = job.lines ? count_and_free(job.read_bits, job.ranges, job.n_ranges) : 0;
    const uint64_t written = job.lines ? count_and_free(job.write_bits, job.ranges, job.n_ranges) : 0;
    emu_count_launch(l, read, written);
    return atomic_load(&job.failed) ? HIP_ERROR_ILLEGAL_ADDRESS : 0;
}
