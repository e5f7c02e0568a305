/* A prediction, without a GPU, of how fast the whole Qwen3.6-35B-A3B (Q4_K_M) runs on three AMD iGPUs: a roofline from the emulator's counts.
 *
 *   hip_model [--check] [--prefill-rows N] [--library FILE]
 *
 * Every operation of a layer runs once on the emulator (libamdhip64-emu.so, real machine code of gfx1152) at the model's true shapes with random weights: one
 * decode step at context 0 and at context 6000, and one prefill chunk of 512 rows. In decode it runs between the operations that stand before and
 * after it in a layer, because launches of neighbours are joined (hip/hip_hold.c); a launch that was held back counts for the operation that held it.
 * Its kernels' instructions and distinct cache lines are counted and multiplied by how often the operation occurs in the 40 layers and the head. Formula and
 * constants are printed with the result. --check: the exit status says whether every gate holds.
 *
 * What the prediction does not know: stalls of a wave that nothing else fills beyond the flat efficiency, the wait for a launch's last workgroup while it makes
 * what the next operation reads (hip/kernels/tail.h), cache misses of lines that a launch reads more than
 * once, clocks that fall with heat, memory that the CPU uses meanwhile, and how uneven real routing is (here every expert is as likely as another). */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "hip/hip_impl.h"
#include "tests/bench/arguments.h"
#include "tests/bench/shape_35b.h"
#include "tests/hip/emu/counters.h"

enum { LAYERS = DELTA_LAYERS + ATTN_LAYERS, BLOCKS = LAYERS + 1, MAX_KERNELS = 160 }; /* the file counts the MTP block too */

/* ---- the model of the machine ---- */

struct gpu {
    const char *name;
    int units;    /* compute units, two SIMDs each */
    double clock; /* Hz, nine tenths of the advertised boost clock */
    double bus;   /* bytes per second */
};

static const struct gpu gpus[] = {
    {"860M", 8, 0.9 * 3.0e9, 128e9},
    {"890M", 16, 0.9 * 2.9e9, 128e9},
    {"8060S", 40, 0.9 * 2.9e9, 256e9},
};
enum { GPUS = sizeof gpus / sizeof *gpus, SIMDS = 2 };

struct guess {
    double bus_share;  /* of the bus's peak that long reads reach */
    double efficiency; /* share of issue slots that are used where issue is the limit */
    double launch;     /* seconds from the end of one kernel to the start of the next in the same queue */
};

/* A launch: 941 that depend on each other, on a gfx1100, in a stream and in a replayed graph alike (ROCm/rocm-systems issue 10834). */
static const struct guess usual = {0.85, 0.70, 3.9e-6};
static const struct guess others[] = {{0.85, 0.50, 3.9e-6}, {0.85, 0.70, 8e-6}, {0.70, 0.50, 8e-6}};
enum { WMMA_CYCLES = 32, TRANS_CYCLES = 4 };

/* ---- counting ---- */

struct entry { /* one kernel within one operation, times the operation's number in the model */
    const char *part;
    char kernel[96];
    double launches, waves, read, written, valu, wmma, trans, lines;
};

struct pass {
    const char *name;
    int rows, pos;
    struct entry at[MAX_KERNELS];
    int n;
    double needed; /* bytes of weights, states and KV that must be read */
};

static emu_counters_fn *count;
static emu_reset_counters_fn *forget;

static double issue_cycles(const struct entry *e)
{
    return e->valu + (TRANS_CYCLES - 1) * e->trans + WMMA_CYCLES * e->wmma;
}

static double seconds_of(const struct entry *e, const struct gpu *g, const struct guess *guess)
{
    double simds = g->units * SIMDS;
    if (e->waves / e->launches < simds)
        simds = e->waves / e->launches;
    double memory = (e->read + e->written) / (g->bus * guess->bus_share), issue = issue_cycles(e) / (simds * g->clock * guess->efficiency);
    return (memory > issue ? memory : issue) + e->launches * guess->launch;
}

/* ---- random data ---- */

/* The GPU's copy is the only one that is read. */
static struct weight *matrix(struct backend *b, enum block_type type, int64_t n_in, int64_t n_out, int64_t n_mats)
{
    const struct weight_desc desc = random_matrix(type, n_in, n_out, n_mats);
    struct weight *w = random_weight(b, &desc);
    free((void *)(uintptr_t)desc.data);
    return w;
}

/* [rows][width], random. */
static struct buffer *buffer(struct backend *b, int rows, int64_t width)
{
    struct error err = {0};
    const size_t n = (size_t)width * (size_t)rows;
    struct buffer *buf = b->ops->buffer_new(b, n * sizeof(float), &err);
    float *x = malloc(n * sizeof *x);
    if (!buf || !x)
        die(buf ? "out of memory" : err.text);
    for (size_t i = 0; i < n; i++)
        x[i] = draw_f32();
    if (b->ops->write(b, buf, 0, x, n * sizeof *x, &err))
        die(err.text);
    free(x);
    return buf;
}

/* ---- one layer of each kind ---- */

enum { LESS, MORE }; /* Q4_K or Q6_K where the file's rule differs by layer (spec/qwen35moe.md section 11) */

static struct {
    struct backend *b;
    struct weight *norm, *embd, *head, *delta_in[2][4], *delta_out, *attn_in[2][3], *attn_out, *q_norm, *conv, *dt_bias, *a, *delta_norm;
    struct moe_weights moe[2];
    struct buffer *h, *u, *z, *beta, *alpha, *qkv, *gates, *mixed, *q, *k, *v, *logits;
    int32_t pages[CONTEXT / GRID + ROWS / GRID + 2];
    int rows, pos, kind;
} m;

static bool more_bits(int layer)
{
    return layer < BLOCKS / 8 || layer >= 7 * BLOCKS / 8 || (layer - BLOCKS / 8) % 3 == 2;
}

static void make_model(struct hip_device *dev)
{
    struct error err = {0};
    struct backend *b = m.b = hip_open_on(dev, &shape, &err);
    if (!b)
        die(err.text);
    m.norm = matrix(b, BLOCK_F32, D, 1, 1);
    m.embd = matrix(b, BLOCK_Q4_K, D, V, 1);
    m.head = matrix(b, BLOCK_Q6_K, D, V, 1);
    for (int kind = LESS; kind <= MORE; kind++) {
        const enum block_type type = kind == MORE ? BLOCK_Q6_K : BLOCK_Q4_K;
        m.delta_in[kind][0] = matrix(b, type, D, CH, 1);
        m.attn_in[kind][2] = matrix(b, type, D, NKV * HD, 1);
        m.moe[kind].down = matrix(b, type, FF, D, EXPERTS);
        m.moe[kind].shared_down = matrix(b, type, FF, D, 1);
    }
    m.delta_in[0][1] = matrix(b, BLOCK_Q4_K, D, V_ROW, 1);
    m.delta_in[0][2] = matrix(b, BLOCK_Q4_K, D, HV, 1);
    m.delta_in[0][3] = matrix(b, BLOCK_Q4_K, D, HV, 1);
    m.delta_out = matrix(b, BLOCK_Q4_K, V_ROW, D, 1);
    m.attn_in[0][0] = matrix(b, BLOCK_Q4_K, D, Q_ROW, 1);
    m.attn_in[0][1] = matrix(b, BLOCK_Q4_K, D, NKV * HD, 1);
    m.attn_out = matrix(b, BLOCK_Q4_K, NH * HD, D, 1);
    m.moe[0].router = matrix(b, BLOCK_F32, D, EXPERTS, 1);
    m.moe[0].gate = matrix(b, BLOCK_Q4_K, D, FF, EXPERTS);
    m.moe[0].up = matrix(b, BLOCK_Q4_K, D, FF, EXPERTS);
    m.moe[0].shared_router = matrix(b, BLOCK_F32, D, 1, 1);
    m.moe[0].shared_gate = matrix(b, BLOCK_Q4_K, D, FF, 1);
    m.moe[0].shared_up = matrix(b, BLOCK_Q4_K, D, FF, 1);
    for (int i = 1; i < 4; i++)
        m.delta_in[1][i] = m.delta_in[0][i];
    for (int i = 0; i < 2; i++)
        m.attn_in[1][i] = m.attn_in[0][i];
    struct weight *down = m.moe[1].down, *shared_down = m.moe[1].shared_down;
    m.moe[1] = m.moe[0];
    m.moe[1].down = down;
    m.moe[1].shared_down = shared_down;
    m.q_norm = matrix(b, BLOCK_F32, HD, 1, 1);
    m.conv = matrix(b, BLOCK_F32, CONV, CH, 1);
    m.dt_bias = matrix(b, BLOCK_F32, HV, 1, 1);
    m.a = matrix(b, BLOCK_F32, HV, 1, 1);
    m.delta_norm = matrix(b, BLOCK_F32, S, 1, 1);
    m.h = buffer(b, ROWS, D);
    m.u = buffer(b, ROWS, CH);
    m.z = buffer(b, ROWS, V_ROW);
    m.beta = buffer(b, ROWS, HV);
    m.alpha = buffer(b, ROWS, HV);
    m.qkv = buffer(b, ROWS, CH);
    m.gates = buffer(b, ROWS, 2 * HV);
    m.mixed = buffer(b, ROWS, V_ROW);
    m.q = buffer(b, ROWS, Q_ROW);
    m.k = buffer(b, ROWS, NKV * HD);
    m.v = buffer(b, ROWS, NKV * HD);
    m.logits = buffer(b, 1, V);
    const int n_pages = (int)(sizeof m.pages / sizeof m.pages[0]);
    if (b->ops->pages_reserve(b, n_pages, &err) || b->ops->states_reserve(b, 1, &err))
        die(err.text);
    const size_t page = b->ops->page_bytes(b);
    uint16_t *kv = malloc(page);
    if (!kv)
        die("out of memory");
    for (int i = 0; i < n_pages; i++) {
        m.pages[i] = i;
        for (size_t j = 0; j < page / 2; j++)
            kv[j] = f32_to_f16(draw_f32());
        if (b->ops->page_load(b, i, kv, &err))
            die(err.text);
    }
    free(kv);
    b->ops->state_reset(b, 0);
}

static double bytes_of(const struct weight *w)
{
    return (double)block_bytes(w->desc.type, (size_t)w->desc.n_in) * (double)w->desc.n_out * (double)w->desc.n_mats;
}

/* ---- operations; each returns the bytes of weights, state and KV that a decode step has to read for it ---- */

static double run_embed(void)
{
    m.b->ops->embed(m.b, m.embd, m.h);
    return bytes_of(m.embd) / V;
}

static double run_delta_in(void)
{
    struct weight **w = m.delta_in[m.kind];
    m.b->ops->project(m.b, m.h, m.norm, 4, w, (struct buffer *const[]){m.u, m.z, m.beta, m.alpha});
    return bytes_of(m.norm) + bytes_of(w[0]) + bytes_of(w[1]) + bytes_of(w[2]) + bytes_of(w[3]);
}

static double run_conv(void)
{
    m.b->ops->delta_conv(m.b, 0, m.u, m.beta, m.alpha, m.conv, m.dt_bias, m.a, m.qkv, m.gates);
    return bytes_of(m.conv) + 4.0 * CH * (m.pos < CONV - 1 ? m.pos : CONV - 1);
}

static double run_rule(void)
{
    m.b->ops->delta_rule(m.b, 0, m.qkv, m.gates, m.z, m.delta_norm, m.mixed);
    return 4.0 * HV * S * S + 4.0 * (m.pos % GRID) * (HK * S + HV * S + HV);
}

static double run_delta_out(void)
{
    m.b->ops->project_add(m.b, m.mixed, m.delta_out, m.h);
    return bytes_of(m.delta_out);
}

static double run_attn_in(void)
{
    struct weight **w = m.attn_in[m.kind];
    m.b->ops->project(m.b, m.h, m.norm, 3, w, (struct buffer *const[]){m.q, m.k, m.v});
    return bytes_of(m.norm) + bytes_of(w[0]) + bytes_of(w[1]) + bytes_of(w[2]);
}

static double run_store(void)
{
    m.b->ops->attn_store(m.b, 0, m.q, m.k, m.v, m.q_norm, m.q_norm);
    return 2 * bytes_of(m.q_norm);
}

static double run_mix(void)
{
    m.b->ops->attn_mix(m.b, 0, m.q, m.mixed);
    return (m.pos + 1) * 4.0 * NKV * HD;
}

static double run_attn_out(void)
{
    m.b->ops->project_add(m.b, m.mixed, m.attn_out, m.h);
    return bytes_of(m.attn_out);
}

static double run_moe(void)
{
    const struct moe_weights *w = &m.moe[m.kind];
    m.b->ops->moe(m.b, m.h, m.norm, w, NULL);
    return bytes_of(m.norm) + bytes_of(w->router) + bytes_of(w->shared_router) + bytes_of(w->shared_gate) + bytes_of(w->shared_up) +
           bytes_of(w->shared_down) + (bytes_of(w->gate) + bytes_of(w->up) + bytes_of(w->down)) * USED / EXPERTS;
}

static double run_head(void)
{
    m.b->ops->head(m.b, m.h, m.norm, m.head, (const int32_t[]){m.rows - 1}, 1, NULL, m.logits);
    return bytes_of(m.norm) + bytes_of(m.head);
}

enum place { ONCE, FIRST, LATER, DELTA, ATTENTION, EVERY }; /* FIRST: in layer 0, a DeltaNet layer; LATER: in the other DeltaNet layers */

static const struct part {
    const char *name;
    double (*run)(void);
    enum place place;
    bool kinds;                             /* differs with the layer's types */
    double (*before)(void), (*after)(void); /* its neighbours */
} parts[] = {
    {"embed", run_embed, ONCE, false, NULL, run_delta_in},
    {"project, first layer", run_delta_in, FIRST, true, run_embed, run_conv},
    {"project, DeltaNet", run_delta_in, LATER, true, run_moe, run_conv},
    {"delta_conv", run_conv, DELTA, false, run_delta_in, run_rule},
    {"delta_rule", run_rule, DELTA, false, run_conv, run_delta_out},
    {"project_add, DeltaNet", run_delta_out, DELTA, false, run_rule, run_moe},
    {"project, attention", run_attn_in, ATTENTION, true, run_moe, run_store},
    {"attn_store", run_store, ATTENTION, false, run_attn_in, run_mix},
    {"attn_mix", run_mix, ATTENTION, false, run_store, run_attn_out},
    {"project_add, attention", run_attn_out, ATTENTION, false, run_mix, run_moe},
    {"moe", run_moe, EVERY, true, run_delta_out, run_delta_in},
    {"head", run_head, ONCE, false, run_moe, NULL},
};

/* How often the part occurs with layers of the kind. */
static int occurrences(const struct part *p, int kind)
{
    if (p->place == ONCE)
        return 1;
    int n = 0;
    for (int i = p->place == LATER; i < (p->place == FIRST ? 1 : LAYERS); i++) {
        const bool attention = (i + 1) % 4 == 0;
        const bool here = p->place == EVERY || (p->place == ATTENTION) == attention;
        if (here && (!p->kinds || more_bits(i) == (kind == MORE)))
            n++;
    }
    return n;
}

static void begin(int rows, int pos)
{
    m.rows = rows;
    m.pos = pos;
    begin_rows(m.b, rows, pos, m.pages);
}

static void wait_for_it(const char *what)
{
    struct error err = {0};
    if (m.b->ops->sync(m.b, &err)) {
        fprintf(stderr, "hip_model: %s: ", what);
        die(err.text);
    }
}

static bool is_kernel(const char *name, enum hip_kernel kernel)
{
    static const char *const names[] = {
#define KERNEL_ENTRY(name, params, threads) #name,
#include "hip/kernels/list.h"
#undef KERNEL_ENTRY
    };
    return kernel != K_COUNT && strcmp(name, names[kernel]) == 0;
}

/* What has run since the last `forget`, without one launch of `not`, or of nothing but one launch of `only`; K_COUNT: no such kernel. */
static void add_counters(struct pass *pass, const char *part, double times, enum hip_kernel not, enum hip_kernel only)
{
    static struct emu_counters now[MAX_KERNELS];
    const int n = count(now, MAX_KERNELS);
    if (n > MAX_KERNELS)
        die("more kernels than there is room for");
    for (int i = 0; i < n; i++) {
        const struct emu_counters *c = &now[i];
        if (c->launches == 0 || (only != K_COUNT && !is_kernel(c->kernel, only)))
            continue;
        if ((only != K_COUNT || is_kernel(c->kernel, not )) && c->launches != 1)
            die("two neighbours run the same kernel: their counts cannot be told apart");
        if (is_kernel(c->kernel, not ))
            continue;
        if (pass->n == MAX_KERNELS)
            die("more entries than there is room for");
        struct entry *e = &pass->at[pass->n++];
        e->part = part;
        memcpy(e->kernel, c->kernel, sizeof e->kernel);
        e->launches = times * (double)c->launches;
        e->waves = times * (double)c->waves;
        e->read = times * (double)c->unique_read;
        e->written = times * (double)c->unique_written;
        e->valu = times * (double)c->valu;
        e->trans = times * (double)c->trans;
        e->wmma = times * (double)c->wmma;
        e->lines = times * (double)(c->lines_read + c->lines_written) * EMU_LINE_BYTES;
    }
}

static void run_pass(struct pass *pass)
{
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        for (int kind = LESS; kind <= (parts[i].kinds ? MORE : LESS); kind++) {
            const uint64_t start = clock_ns();
            const int times = occurrences(&parts[i], kind);
            const bool joined = pass->rows <= GPU_TAIL_ROWS;
            struct hip *h = (struct hip *)(void *)m.b;
            if (times == 0)
                continue;
            m.kind = kind;
            begin(pass->rows, pass->pos);
            wait_for_it("begin");
            if (joined && parts[i].before)
                parts[i].before();
            const enum hip_kernel of_before = hip_held(h);
            forget();
            pass->needed += times * parts[i].run();
            const enum hip_kernel mine = hip_held(h);
            add_counters(pass, parts[i].name, times, of_before, K_COUNT);
            forget();
            if (mine != K_COUNT && parts[i].after)
                parts[i].after();
            wait_for_it(parts[i].name);
            if (mine != K_COUNT)
                add_counters(pass, parts[i].name, times, K_COUNT, mine);
            fprintf(stderr, "%s: %s%s, %.1f s\n", pass->name, parts[i].name, parts[i].kinds ? kind == MORE ? " (Q6_K)" : " (Q4_K)" : "",
                    (double)(clock_ns() - start) * 1e-9);
        }
    }
}

/* ---- the result ---- */

static int by_time(const void *a, const void *b)
{
    const double x = seconds_of(a, &gpus[0], &usual), y = seconds_of(b, &gpus[0], &usual);
    return (x < y) - (x > y);
}

/* Rows per second on each GPU into speed. */
static void report(struct pass *pass, double speed[GPUS])
{
    printf("\n%s: %d row%s at position %d\n\n%-22s %-16s %8s %9s %9s %9s %10s %10s %6s", pass->name, pass->rows, pass->rows == 1 ? "" : "s",
           pass->pos, "operation", "kernel", "launches", "waves/l.", "MB read", "MB writ.", "k VALU", "k WMMA", "limit");
    for (int g = 0; g < GPUS; g++)
        printf(" %9s", gpus[g].name);
    printf("\n");
    qsort(pass->at, (size_t)pass->n, sizeof pass->at[0], by_time);
    double sum[GPUS] = {0}, launches = 0, read = 0, written = 0, issue = 0, wmma = 0, lines = 0;
    for (int i = 0; i < pass->n; i++) {
        const struct entry *e = &pass->at[i];
        struct entry no_memory = *e;
        no_memory.read = no_memory.written = 0;
        const bool issue_bound = seconds_of(&no_memory, &gpus[0], &usual) >= seconds_of(e, &gpus[0], &usual);
        printf("%-22s %-16s %8.0f %9.0f %9.2f %9.2f %10.1f %10.1f %6s", e->part, e->kernel, e->launches, e->waves / e->launches, e->read * 1e-6,
               e->written * 1e-6, e->valu * 1e-3, e->wmma * 1e-3, issue_bound ? "issue" : "bus");
        for (int g = 0; g < GPUS; g++) {
            sum[g] += seconds_of(e, &gpus[g], &usual);
            printf(" %6.0f us", seconds_of(e, &gpus[g], &usual) * 1e6);
        }
        printf("\n");
        launches += e->launches;
        read += e->read;
        written += e->written;
        issue += issue_cycles(e);
        wmma += WMMA_CYCLES * e->wmma;
        lines += e->lines;
    }
    printf("%-22s %-16s %8.0f %9s %9.2f %9.2f %10s %9.0f%% %6s", "all", "", launches, "", read * 1e-6, written * 1e-6, "", 100 * wmma / issue,
           "WMMA");
    for (int g = 0; g < GPUS; g++)
        printf(" %6.0f us", sum[g] * 1e6);
    printf("\n");
    if (pass->rows == 1)
        printf("needed from memory: %.2f MB; reads are %.3f times that\n", pass->needed * 1e-6, read / pass->needed);
    printf("lines asked of the caches: %.1f MB\npredicted:", lines * 1e-6);
    for (int g = 0; g < GPUS; g++) {
        speed[g] = pass->rows / sum[g];
        printf("  %s %.1f tok/s", gpus[g].name, speed[g]);
    }
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        printf("\n  with %.2f of the bus, %.2f of the issue slots, %.1f us a launch:", others[i].bus_share, others[i].efficiency,
               others[i].launch * 1e6);
        for (int g = 0; g < GPUS; g++) {
            double other = 0;
            for (int k = 0; k < pass->n; k++)
                other += seconds_of(&pass->at[k], &gpus[g], &others[i]);
            printf("  %s %.1f", gpus[g].name, pass->rows / other);
        }
    }
    printf("\n");
}

static double reads(const struct pass *pass)
{
    double read = 0;
    for (int i = 0; i < pass->n; i++)
        read += pass->at[i].read;
    return read / pass->needed;
}

static double wmma_share(const struct pass *pass)
{
    double wmma = 0, issue = 0;
    for (int i = 0; i < pass->n; i++) {
        wmma += WMMA_CYCLES * pass->at[i].wmma;
        issue += issue_cycles(&pass->at[i]);
    }
    return wmma / issue;
}

/* Vector lane-instructions per weight of a mat-vec of one row. */
static double per_weight(struct buffer *x, struct weight *w, struct buffer *out)
{
    static struct emu_counters now[MAX_KERNELS];
    begin(1, 0);
    wait_for_it("begin");
    forget();
    m.b->ops->project_add(m.b, x, w, out);
    wait_for_it("mat-vec");
    const int n = count(now, MAX_KERNELS);
    double most = 0;
    for (int i = 0; i < n && i < MAX_KERNELS; i++)
        if (strncmp(now[i].kernel, "matvec", 6) == 0 && (double)now[i].valu > most)
            most = (double)now[i].valu;
    if (most == 0)
        die("no kernel of that name: matvec*");
    return most * 32 / ((double)w->desc.n_in * (double)w->desc.n_out);
}

static int failed;

static void gate(const char *what, double value, const char *relation, double limit)
{
    const bool holds = relation[0] == '<' ? value <= limit : value >= limit;
    failed += !holds;
    printf("  %-4s %-66s %9.3f %s %g\n", holds ? "ok" : "MISS", what, value, relation, limit);
}

int main(int argc, char **argv)
{
    static struct pass decode = {.name = "decode", .rows = 1}, late = {.name = "decode, context 6000", .rows = 1, .pos = CONTEXT},
                       prefill = {.name = "prefill", .rows = ROWS};
    bool check = false;
    char library[4400] = "";
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--check") == 0)
            check = true;
        else if (strcmp(argv[i], "--library") == 0 && i + 1 < argc)
            snprintf(library, sizeof library, "%s", argv[++i]);
        else if (strcmp(argv[i], "--prefill-rows") == 0 && i + 1 < argc)
            prefill.rows = whole_number(argv[++i]);
        else
            die("hip_model [--check] [--prefill-rows N] [--library FILE]");
    }
    if (prefill.rows < 1 || prefill.rows > ROWS)
        die("--prefill-rows is 1 to 512");
    if (!library[0]) { /* BUILD/tests/bench/hip_model has its emulator in BUILD/hip */
        const char *at = strstr(argv[0], "tests/bench/");
        snprintf(library, sizeof library, "%s%.*ship/libamdhip64-emu.so", argv[0][0] == '/' ? "" : "./", at ? (int)(at - argv[0]) : 0, argv[0]);
    }
    setenv("EMU_LINES", "1", 1);
    struct error err = {0};
    struct hip_device *dev;
    if (hip_device_open(&dev, library, 0, &err))
        die(err.text);
    void *emulator = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
    if (emulator) {
        *(void **)&count = dlsym(emulator, "emu_counters");
        *(void **)&forget = dlsym(emulator, "emu_reset_counters");
    }
    if (!count || !forget)
        die("the library is not the emulator: it has no emu_counters");
    make_model(dev);

    const double q4 = per_weight(m.mixed, m.delta_out, m.h), q6 = per_weight(m.h, m.delta_in[MORE][0], m.u);
    run_pass(&decode);
    run_pass(&late);
    run_pass(&prefill);

    printf("PREDICTION for Qwen3.6-35B-A3B, Q4_K_M; no such GPU was there. Counts: machine code of %s on the emulator, random weights.\n\n"
           "  time of a kernel = max(bytes / (bus * %.2f), cycles / (SIMDs * clock * %.2f)) + launches * %.1f us\n"
           "  bytes: distinct %d-byte lines that a launch reads and writes; cycles: VALU + %d WMMA + %d more for each exp, log, rcp\n"
           "  SIMDs: two for each compute unit, or as many as the launch has waves\n",
           hip_device_info(dev)->arch, usual.bus_share, usual.efficiency, usual.launch * 1e6, (int)EMU_LINE_BYTES, (int)WMMA_CYCLES,
           (int)TRANS_CYCLES - 1);
    for (int g = 0; g < GPUS; g++)
        printf("  %-6s %2d compute units, %.2f GHz, %.0f GB/s\n", gpus[g].name, gpus[g].units, gpus[g].clock * 1e-9, gpus[g].bus * 1e-9);
    double speed[3][GPUS];
    report(&decode, speed[0]);
    report(&late, speed[1]);
    report(&prefill, speed[2]);

    printf("\ngates:\n");
    gate("decode reads, times what weights and state need, context 0", reads(&decode), "<=", 1.05);
    gate("decode reads, times what weights, state and KV need, context 6000", reads(&late), "<=", 1.05);
    gate("mat-vec, vector lane-instructions per Q4_K weight", q4, "<=", 2);
    gate("mat-vec, vector lane-instructions per Q6_K weight", q6, "<=", 3);
    gate("prefill, share of issue time in WMMA", wmma_share(&prefill), ">=", 0.5);
    gate("decode tok/s at context 0, 860M", speed[0][0], ">=", 45);
    gate("prefill tok/s, 860M", speed[2][0], ">=", 600);
    hip_device_sync(dev, &err);
    m.b->ops->close(m.b);
    hip_device_close(dev);
    return check && failed ? 1 : 0;
}
