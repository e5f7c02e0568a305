/* The time of every operation at the shapes of Qwen3.6-35B-A3B: one layer of each kind with random Q4_K_M weights, 1 row and 512 rows, at positions
 * 0 and 6000.
 *
 *   bench_ops [threads] [seconds per measurement]
 *
 * With one thread the time is the thread's CPU time, which other programs on the machine disturb little. GB/s counts the weights, states and pages that an
 * operation has to read at least once, GFLOP/s two operations per multiply-add. A measurement is the median of its repetitions. The last lines add the layers
 * up to one token and one prompt chunk. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "engine/cpu/cpu_impl.h"
#include "tests/bench/arguments.h"
#include "tests/bench/shape_35b.h"

enum { MAX_REPS = 2000 };

/* ---- random data ---- */

/* The bytes are kept until the program ends. */
static struct weight *matrix(struct backend *b, enum block_type type, int64_t n_in, int64_t n_out, int64_t n_mats)
{
    const struct weight_desc desc = random_matrix(type, n_in, n_out, n_mats);
    return random_weight(b, &desc);
}

static struct buffer *buffer(struct backend *b, int64_t width)
{
    struct error err = {0};
    struct buffer *buf = b->ops->buffer_new(b, (size_t)width * ROWS * sizeof(float), &err);
    if (!buf)
        die(err.text);
    return buf;
}

static void randomise(struct buffer *buf)
{
    for (size_t i = 0; i < buf->bytes / sizeof(float); i++)
        buf->data[i] = draw_f32();
}

/* ---- the model ---- */

static struct {
    struct backend *b;
    struct weight *norm, *embd, *head, *delta_in[4], *delta_out, *attn_in[3], *attn_out, *q_norm, *conv, *dt_bias, *a, *delta_norm;
    struct moe_weights moe;
    struct buffer *h, *u, *z, *beta, *alpha, *qkv, *gates, *mixed, *q, *k, *v, *logits;
    int32_t pages[CONTEXT / GRID + ROWS / GRID + 2];
    int rows, pos;
} m;

static void make_model(int threads)
{
    struct error err = {0};
    struct backend *b = m.b = backend_open_cpu(&shape, threads, &err);
    if (!b)
        die(err.text);
    m.norm = matrix(b, BLOCK_F32, D, 1, 1);
    m.embd = matrix(b, BLOCK_Q4_K, D, V, 1);
    m.head = matrix(b, BLOCK_Q6_K, D, V, 1);
    m.delta_in[0] = matrix(b, BLOCK_Q6_K, D, CH, 1);
    m.delta_in[1] = matrix(b, BLOCK_Q4_K, D, V_ROW, 1);
    m.delta_in[2] = matrix(b, BLOCK_Q4_K, D, HV, 1);
    m.delta_in[3] = matrix(b, BLOCK_Q4_K, D, HV, 1);
    m.delta_out = matrix(b, BLOCK_Q4_K, V_ROW, D, 1);
    m.attn_in[0] = matrix(b, BLOCK_Q4_K, D, Q_ROW, 1);
    m.attn_in[1] = matrix(b, BLOCK_Q4_K, D, NKV * HD, 1);
    m.attn_in[2] = matrix(b, BLOCK_Q6_K, D, NKV * HD, 1);
    m.attn_out = matrix(b, BLOCK_Q4_K, NH * HD, D, 1);
    m.q_norm = matrix(b, BLOCK_F32, HD, 1, 1);
    m.conv = matrix(b, BLOCK_F32, CONV, CH, 1);
    m.dt_bias = matrix(b, BLOCK_F32, HV, 1, 1);
    m.a = matrix(b, BLOCK_F32, HV, 1, 1);
    for (int i = 0; i < HV; i++)
        ((float *)(uintptr_t)m.a->desc.data)[i] = -0.1F; /* decay: random signs would let states grow */
    m.delta_norm = matrix(b, BLOCK_F32, S, 1, 1);
    m.moe = (struct moe_weights){matrix(b, BLOCK_F32, D, EXPERTS, 1),   matrix(b, BLOCK_Q4_K, D, FF, EXPERTS), matrix(b, BLOCK_Q4_K, D, FF, EXPERTS),
                                 matrix(b, BLOCK_Q6_K, FF, D, EXPERTS), matrix(b, BLOCK_F32, D, 1, 1),         matrix(b, BLOCK_Q4_K, D, FF, 1),
                                 matrix(b, BLOCK_Q4_K, D, FF, 1),       matrix(b, BLOCK_Q6_K, FF, D, 1)};
    m.h = buffer(b, D);
    m.u = buffer(b, CH);
    m.z = buffer(b, V_ROW);
    m.beta = buffer(b, HV);
    m.alpha = buffer(b, HV);
    m.qkv = buffer(b, CH);
    m.gates = buffer(b, 2 * HV);
    m.mixed = buffer(b, V_ROW);
    m.q = buffer(b, Q_ROW);
    m.k = buffer(b, NKV * HD);
    m.v = buffer(b, NKV * HD);
    m.logits = buffer(b, V / ROWS + 1);
    struct buffer *const all[] = {m.h, m.u, m.z, m.beta, m.alpha, m.mixed, m.q, m.k, m.v};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        randomise(all[i]);
    const int n_pages = (int)(sizeof m.pages / sizeof m.pages[0]);
    for (int i = 0; i < n_pages; i++)
        m.pages[i] = i;
    if (b->ops->pages_reserve(b, n_pages, &err) || b->ops->states_reserve(b, 1, &err))
        die(err.text);
    b->ops->state_reset(b, 0);
}

static void begin(int rows, int pos)
{
    m.rows = rows;
    m.pos = pos;
    begin_rows(m.b, rows, pos, m.pages);
}

static void check(void)
{
    struct error err = {0};
    if (m.b->ops->sync(m.b, &err))
        die(err.text);
}

/* ---- operations ---- */

static void run_embed(void)
{
    m.b->ops->embed(m.b, m.embd, m.h);
}

static void run_delta_in(void)
{
    m.b->ops->project(m.b, m.h, m.norm, 4, m.delta_in, (struct buffer *const[]){m.u, m.z, m.beta, m.alpha});
}

static void run_conv(void)
{
    m.b->ops->delta_conv(m.b, 0, m.u, m.beta, m.alpha, m.conv, m.dt_bias, m.a, m.qkv, m.gates);
}

static void run_rule(void)
{
    m.b->ops->delta_rule(m.b, 0, m.qkv, m.gates, m.z, m.delta_norm, m.mixed);
}

static void run_delta_out(void)
{
    m.b->ops->project_add(m.b, m.mixed, m.delta_out, m.h);
}

static void run_attn_in(void)
{
    m.b->ops->project(m.b, m.h, m.norm, 3, m.attn_in, (struct buffer *const[]){m.q, m.k, m.v});
}

static void run_store(void)
{
    m.b->ops->attn_store(m.b, 0, m.q, m.k, m.v, m.q_norm, m.q_norm);
}

static void run_mix(void)
{
    m.b->ops->attn_mix(m.b, 0, m.q, m.mixed);
}

static void run_attn_out(void)
{
    m.b->ops->project_add(m.b, m.mixed, m.attn_out, m.h);
}

/* Other rows each time, so that one row meets experts that are not in the cache. */
static void run_moe(void)
{
    if (m.rows == 1)
        for (int i = 0; i < D; i++)
            m.h->data[i] = draw_f32();
    m.b->ops->moe(m.b, m.h, m.norm, &m.moe, NULL);
}

static void run_head(void)
{
    m.b->ops->head(m.b, m.h, m.norm, m.head, (const int32_t[]){m.rows - 1}, 1, NULL, m.logits);
}

static double weight_bytes(const struct weight *w)
{
    return (double)w->row_bytes * (double)w->desc.n_out * (double)w->desc.n_mats;
}

static double multiplies(const struct weight *w)
{
    return 2 * (double)w->desc.n_in * (double)w->desc.n_out;
}

static void cost_delta_in(double *bytes, double *flops)
{
    for (int i = 0; i < 4; i++) {
        *bytes += weight_bytes(m.delta_in[i]);
        *flops += m.rows * multiplies(m.delta_in[i]);
    }
}

static void cost_attn_in(double *bytes, double *flops)
{
    for (int i = 0; i < 3; i++) {
        *bytes += weight_bytes(m.attn_in[i]);
        *flops += m.rows * multiplies(m.attn_in[i]);
    }
}

static void cost_out(double *bytes, double *flops)
{
    *bytes = weight_bytes(m.delta_out);
    *flops = m.rows * multiplies(m.delta_out);
}

static void cost_embed(double *bytes, double *flops)
{
    *bytes = m.rows * (double)m.embd->row_bytes;
    *flops = 0;
}

static void cost_conv(double *bytes, double *flops)
{
    *bytes = 4.0 * CH * (2.0 * m.rows + 3);
    *flops = 8.0 * CH * m.rows;
}

/* Per row and head: q and k through M0 and the fold (6 S^2), and on average half a cell of earlier rows, of which the dot products are shared by
 * the heads of a key head. */
static void cost_rule(double *bytes, double *flops)
{
    const double past = m.rows == 1 ? m.pos % GRID : GRID / 2.0;
    *bytes = 4.0 * HV * S * S + 4.0 * past * (HK + HV) * S;
    *flops = m.rows * (HV * (6.0 * S * S + past * 4 * S) + HK * past * 4 * S);
}

static void cost_store(double *bytes, double *flops)
{
    *bytes = m.rows * 4.0 * (Q_ROW + 2 * NKV * HD);
    *flops = 0;
}

static void cost_mix(double *bytes, double *flops)
{
    *bytes = (m.pos + m.rows) * 4.0 * NKV * HD;
    *flops = m.rows * (m.pos + m.rows / 2.0) * NH * HD * 4.0;
}

static void cost_moe(double *bytes, double *flops)
{
    const struct weight *expert[] = {m.moe.gate, m.moe.up, m.moe.down},
                        *rest[] = {m.moe.router, m.moe.shared_gate, m.moe.shared_up, m.moe.shared_down};
    for (int i = 0; i < 3; i++) {
        *bytes += weight_bytes(expert[i]) * (m.rows == 1 ? (double)USED / EXPERTS : 1);
        *flops += m.rows * USED * multiplies(expert[i]);
    }
    for (int i = 0; i < 4; i++) {
        *bytes += weight_bytes(rest[i]);
        *flops += m.rows * multiplies(rest[i]);
    }
}

static void cost_head(double *bytes, double *flops)
{
    *bytes = weight_bytes(m.head);
    *flops = multiplies(m.head);
}

static const struct {
    const char *name;
    void (*run)(void);
    void (*cost)(double *bytes, double *flops);
    int per_token; /* how often in a pass through the model */
    bool product;  /* with a weight matrix */
    bool by_context;
} table[] = {
    {"embed", run_embed, cost_embed, 1, false, false},
    {"project (DeltaNet)", run_delta_in, cost_delta_in, DELTA_LAYERS, true, false},
    {"delta_conv", run_conv, cost_conv, DELTA_LAYERS, false, false},
    {"delta_rule", run_rule, cost_rule, DELTA_LAYERS, false, true},
    {"project_add", run_delta_out, cost_out, DELTA_LAYERS, true, false},
    {"project (attention)", run_attn_in, cost_attn_in, ATTN_LAYERS, true, false},
    {"attn_store", run_store, cost_store, ATTN_LAYERS, false, false},
    {"attn_mix", run_mix, cost_mix, ATTN_LAYERS, false, true},
    {"project_add", run_attn_out, cost_out, ATTN_LAYERS, true, false},
    {"moe", run_moe, cost_moe, DELTA_LAYERS + ATTN_LAYERS, true, false},
    {"head (1 row)", run_head, cost_head, 1, true, false},
};

/* Nanoseconds of this thread when it is the only one, else of the clock. */
static uint64_t now(void)
{
    struct timespec t;
    if (pool_threads(cpu_of(m.b)->pool) > 1)
        return clock_ns();
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000U + (uint64_t)t.tv_nsec;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Median seconds of one run. */
static double measure(void (*run)(void), double seconds)
{
    static double times[MAX_REPS];
    int n = 0;
    run(); /* warm */
    check();
    for (double total = 0; n < MAX_REPS && (n < 3 || total < seconds); n++) {
        const uint64_t start = now();
        run();
        times[n] = (double)(now() - start) * 1e-9;
        total += times[n];
    }
    check();
    qsort(times, (size_t)n, sizeof times[0], by_value);
    return times[n / 2];
}

int main(int argc, char **argv)
{
    const int threads = argc > 1 ? whole_number(argv[1]) : 0;
    const double seconds = argc > 2 ? strtod(argv[2], NULL) : 0.5;
    make_model(threads);
    printf("%s, %d threads\n\n%-20s %5s %6s %10s %8s %9s\n", isa_name(isa_best()), pool_threads(cpu_of(m.b)->pool), "operation", "rows", "at", "us",
           "GB/s", "GFLOP/s");
    for (int pos = 0; pos < CONTEXT; pos += ROWS) { /* a context to attend to and a state that has seen it */
        begin(ROWS, pos);
        run_store();
        run_conv();
        run_rule();
        check();
    }
    static const int rows[] = {1, ROWS}, contexts[] = {0, CONTEXT};
    for (int i = 0; i < 2; i++) {
        double products = 0, rest[2] = {0};
        for (size_t op = 0; op < sizeof table / sizeof table[0]; op++) {
            for (int c = 0; c < (table[op].by_context ? 2 : 1); c++) {
                double bytes = 0, flops = 0;
                begin(rows[i], contexts[c]);
                const double time = measure(table[op].run, seconds);
                table[op].cost(&bytes, &flops);
                printf("%-20s %5d %6d %10.1f %8.1f %9.1f\n", table[op].name, rows[i], contexts[c], time * 1e6, bytes / time * 1e-9,
                       flops / time * 1e-9);
                fflush(stdout);
                if (table[op].product)
                    products += time * table[op].per_token;
                for (int at = c; at < (table[op].by_context ? c + 1 : 2) && !table[op].product; at++)
                    rest[at] += time * table[op].per_token;
            }
        }
        for (int c = 0; c < 2; c++)
            printf("all layers, %d row%s at %d: %.2f ms products, %.2f ms (%.1f %%) the rest, %.1f tok/s\n", rows[i], i ? "s" : "", contexts[c],
                   products * 1e3, rest[c] * 1e3, 100 * rest[c] / products, rows[i] / (products + rest[c]));
        printf("\n");
    }
    m.b->ops->close(m.b);
    return 0;
}
