/* bench_matmul.c: speed of the matrix products beside the speed at which memory can be read.
 *
 * usage: bench_matmul [seconds per figure, default 0.3] [only: plain|avx2|avx512-vnni]
 *
 * Every call uses the next of many matrices that together are larger than any cache, as a step through a model's layers does. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "engine/blocks.h"
#include "engine/cpu/matmul.h"
#include "engine/cpu/pool.h"

enum { MAX_ROWS = 512, OUTS_PER_TASK = 64, READ_PER_TASK = 1 << 20 };
static const size_t weight_bytes = (size_t)768 << 20;

struct bench {
    struct pool *pool;
    enum isa isa;
    struct weight w;
    int64_t mat;
    int n_rows;
    const void *x[MAX_ROWS];
    float *y[MAX_ROWS];
    uint8_t *scratch; /* [threads][scratch_bytes] */
    size_t scratch_bytes;
    const uint8_t *memory;
    uint64_t sum[1024]; /* by worker; keeps the reads */
};

static void multiply_task(void *arg, int i, int worker)
{
    struct bench *b = arg;
    int64_t o0 = (int64_t)i * OUTS_PER_TASK, o1 = o0 + OUTS_PER_TASK < b->w.desc.n_out ? o0 + OUTS_PER_TASK : b->w.desc.n_out;
    matmul(b->isa, &b->w, b->mat, o0, o1, b->x, b->y, b->n_rows, false, b->scratch + (size_t)worker * b->scratch_bytes);
}

static void read_task(void *arg, int i, int worker)
{
    struct bench *b = arg;
    const uint64_t *p = (const uint64_t *)(const void *)(b->memory + (size_t)i * READ_PER_TASK);
    uint64_t s[8] = {0};
    for (size_t k = 0; k < READ_PER_TASK / 8; k += 8) {
        __builtin_prefetch(p + k + 512);
        for (size_t j = 0; j < 8; j++)
            s[j] += p[k + j];
    }
    for (int j = 0; j < 8; j++)
        b->sum[worker] += s[j];
}

/* One thread is timed by the CPU it used, so that other work on the machine does not count; several by the clock on the wall. */
static uint64_t now(const struct bench *b)
{
    struct timespec t;
    if (pool_threads(b->pool) > 1)
        return clock_ns();
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static double seconds_since(const struct bench *b, uint64_t start)
{
    return (double)(now(b) - start) * 1e-9;
}

static double read_speed(struct bench *b, double limit)
{
    uint64_t start = now(b);
    double bytes = 0;
    do {
        pool_run(b->pool, (int)(weight_bytes / READ_PER_TASK), read_task, b);
        bytes += (double)weight_bytes;
    } while (seconds_since(b, start) < limit);
    return bytes / seconds_since(b, start) * 1e-9;
}

/* Calls per second. */
static double call_speed(struct bench *b, double limit)
{
    int tasks = (int)((b->w.desc.n_out + OUTS_PER_TASK - 1) / OUTS_PER_TASK), calls = 0;
    pool_run(b->pool, tasks, multiply_task, b);
    uint64_t start = now(b);
    do {
        b->mat = (b->mat + 1) % b->w.desc.n_mats;
        pool_run(b->pool, tasks, multiply_task, b);
        calls++;
    } while (seconds_since(b, start) < limit);
    return calls / seconds_since(b, start);
}

static int measure(struct bench *b, enum block_type type, int64_t n_in, int64_t n_out, double limit)
{
    static const int row_counts[] = {1, 4, 16, 64, 512};
    size_t row_bytes = block_bytes(type, (size_t)n_in);
    b->w =
        (struct weight){.desc = {.name = "bench", .type = type, .n_in = n_in, .n_out = n_out, .data = b->memory, .stride = row_bytes * (size_t)n_out},
                        .row_bytes = row_bytes};
    b->w.desc.n_mats = (int64_t)(weight_bytes / b->w.desc.stride);
    b->mat = 0;
    b->scratch_bytes = matmul_scratch_bytes(&b->w);
    b->scratch = alloc_lines((size_t)pool_threads(b->pool), b->scratch_bytes);
    enum act_kind kind = act_kind_of(type);
    size_t act_bytes = act_row_bytes(kind, n_in);
    uint8_t *acts = alloc_lines(MAX_ROWS, act_bytes);
    float *values = alloc_array((size_t)n_in, sizeof *values), *out = alloc_array(MAX_ROWS * (size_t)n_out, sizeof *out);
    int rc = -1;
    if (b->scratch && acts && values && out) {
        for (int r = 0; r < MAX_ROWS; r++) {
            for (int64_t i = 0; i < n_in; i++)
                values[i] = (float)((r * 31 + i * 17) % 257 - 128);
            act_quantise(b->isa, kind, values, n_in, acts + (size_t)r * act_bytes);
            b->x[r] = acts + (size_t)r * act_bytes;
            b->y[r] = out + (size_t)r * (size_t)n_out;
        }
        printf("%-12s %-5s %5lld -> %-5lld", isa_name(b->isa), block_info(type)->name, (long long)n_in, (long long)n_out);
        for (size_t i = 0; i < sizeof row_counts / sizeof *row_counts; i++) {
            b->n_rows = row_counts[i];
            if (b->isa == ISA_PLAIN && b->n_rows > 4)
                break;
            double calls = call_speed(b, limit);
            if (b->n_rows == 1)
                printf("  1: %6.2f GB/s", calls * (double)b->w.desc.stride * 1e-9);
            else
                printf("  %d: %6.1f", b->n_rows, calls * (double)n_in * (double)n_out * b->n_rows * 1e-9);
            fflush(stdout);
        }
        printf(" GMAC/s\n");
        rc = 0;
    }
    free(out);
    free(values);
    free(acts);
    free(b->scratch);
    return rc;
}

int main(int argc, char **argv)
{
    static const enum block_type types[] = {BLOCK_Q4_K, BLOCK_Q5_K, BLOCK_Q6_K, BLOCK_Q8_0, BLOCK_Q4_0};
    static const int shapes[][2] = {{2048, 8192}, {4096, 2048}, {512, 2048}};
    double limit = argc > 1 ? strtod(argv[1], NULL) : 0.3;
    uint8_t *memory = alloc_lines(weight_bytes, 1);
    if (!memory || !(limit > 0)) {
        fprintf(stderr, "bench_matmul: %s\n", memory ? "give a positive number of seconds" : "out of memory");
        free(memory);
        return 1;
    }
    uint64_t v = 1; /* f16 scales that are NaN cost the same as others */
    for (size_t i = 0; i < weight_bytes; i += 8) {
        v = v * 6364136223846793005u + 1442695040888963407u;
        uint64_t word = v ^ v >> 29;
        memcpy(memory + i, &word, 8);
    }
    int rc = 0;
    for (int all = 0; all < 2 && rc == 0; all++) {
        struct error err;
        struct bench b = {.memory = memory};
        b.pool = pool_open(all ? 0 : 1, &err);
        if (!b.pool) {
            fprintf(stderr, "bench_matmul: %s\n", err.text);
            rc = 1;
            break;
        }
        if (all && pool_threads(b.pool) == 1) {
            pool_close(b.pool);
            break;
        }
        printf("%d thread%s: memory is read at %.2f GB/s\n", pool_threads(b.pool), all ? "s" : "", read_speed(&b, limit));
        for (int isa = (int)isa_best(); isa >= ISA_PLAIN && rc == 0; isa--) {
            b.isa = (enum isa)isa;
            if (argc > 2 && strcmp(argv[2], isa_name(b.isa)) != 0)
                continue;
            for (size_t t = 0; t < sizeof types / sizeof *types && rc == 0; t++) {
                for (size_t s = 0; s < sizeof shapes / sizeof *shapes && rc == 0; s++)
                    rc = measure(&b, types[t], shapes[s][0], shapes[s][1], limit) ? 1 : 0;
            }
        }
        pool_close(b.pool);
    }
    free(memory);
    return rc;
}
