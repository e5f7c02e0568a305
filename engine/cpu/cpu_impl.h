/* engine/cpu/cpu_impl.h: what the parts of the CPU backend share.
 *
 *   cpu.c        open, close, memory, the start of a step, the table of operations
 *   cpu_mat.c    products with weights: project, project_add, mlp, head, embed, mtp_join
 *   cpu_moe.c    router and experts
 *   cpu_attn.c   attn_store, attn_mix
 *   cpu_delta.c  delta_conv, delta_rule
 *
 * Work is cut into tasks for the pool by shape only, and every sum has one fixed order (engine/cpu/rows.h, engine/cpu/matmul.h), so that a row's
 * result depends neither on the other rows nor on the number of threads nor on the instruction set. Scratch memory is allocated at open. */
#ifndef BEDSIDE_ENGINE_CPU_CPU_IMPL_H
#define BEDSIDE_ENGINE_CPU_CPU_IMPL_H

#include "engine/cpu/matmul.h"
#include "engine/cpu/pool.h"
#include "engine/cpu/rows.h"
#include "engine/cpu/store.h"

enum {
    ACT_KINDS = 3,
    FFN_ROWS = 512,       /* rows of a step that go through an MLP or the experts together; bounds their scratch */
    PART_PAGES = 8,       /* pages of one part of a sequence: attention's unit of parallel work, on the absolute grid */
    BLOCK_QUERIES = 64,   /* queries of one KV head that share the loads of a page (or those of one row, if more) */
    SPLIT_QUERIES = 2048, /* queries x parts that may be in flight at once when a sequence is split over threads */
};

/* Some queries' running softmax: m, s [queries], acc [queries][HD]. */
struct partial {
    float *m, *s, *acc;
};

/* One thread's scratch. */
struct worker {
    void *matmul;
    /* attention, for one block of queries */
    float *q;      /* [queries][HD] */
    float *scores; /* [queries][GRID] */
    int *limit;    /* [queries] */
    float *page;   /* [GRID][HD], keys or values as f32 */
    struct partial part, total;
    /* DeltaNet, for one grid cell of one head */
    float *kk, *qk;     /* [GRID][GRID], dot products of its rows */
    float *to_u, *to_o; /* [GRID] */
    float *sums;        /* [GRID] */
    float *through;     /* [2 * GRID][S], rows of q and k times M0 */
    float *turned;      /* [S][GRID], weighted keys */
};

/* A matrix product as work for the pool: y[r] (+)= w[mat] * x[r], or with `up` y[r] = SiLU(w[mat] * x[r]) * (up[mat] * up_x[r]). */
struct mat_job {
    const struct weight *w, *up;
    int64_t mat;
    const void *const *x, *const *up_x;
    float *const *y;
    float *const *up_y; /* room for up's product */
    int n_rows;
    bool add;
    int tile, row_block, row_blocks, first_task; /* set by cpu_mat_run */
};

/* Rows between gate/up and down: f32, and in the form that the down matrix wants. */
struct mid {
    int n_rows, width;
    float **rows, **up_rows; /* [n_rows] -> [width] */
    uint8_t *act;
    const void **act_rows;
};

/* One KV head for some consecutive rows of one span. */
struct attn_item {
    const struct span *span;
    int row, n_rows, kv_head;
    int first_query; /* where its queries begin in the totals of a split run */
};

struct cpu {
    struct backend base;
    struct store store; /* right after the base, as in the plain backend */
    struct pool *pool;
    int threads;
    enum isa isa;
    const struct rows_ops *rows;
    void **blocks; /* everything allocated by cpu_scratch */
    size_t n_blocks, cap_blocks;
    struct worker *workers; /* [threads] */
    size_t matmul_bytes;

    /* products: activations in the form their weights want */
    size_t act_width;  /* widest n_in */
    float *normed;     /* [rows][act_width at most] */
    float *vectors[3]; /* norms and biases that are not plain f32 in the file, dequantised */
    int64_t vector_room;
    uint8_t *act[ACT_KINDS];
    const void **act_rows[ACT_KINDS]; /* [rows] */
    float **out_rows[4];              /* [rows] addresses of result rows */
    struct mid mid, expert_mid, shared_mid;

    /* moe */
    float **router_rows;      /* [FFN_ROWS] -> [E] */
    float **shared_rows;      /* [FFN_ROWS] -> [1] */
    int32_t *chosen;          /* [FFN_ROWS][used] experts, best first */
    float *share;             /* [FFN_ROWS][used] their weights */
    int *place;               /* [FFN_ROWS][used] where each stands in the order of experts */
    int *expert_first;        /* [E + 1] */
    const void **expert_x[2]; /* [FFN_ROWS * used] activation rows in the order of experts, for gate and for up */
    float **expert_out;       /* [FFN_ROWS * used] -> [D] */
    float **shared_out;       /* [FFN_ROWS] -> [D] */
    struct mat_job *jobs;     /* [E + 1] */

    /* attention */
    int *row_pos;                 /* [rows] positions of the step's rows */
    double *rope_rate;            /* [n_rot / 2] angle per position */
    float *rope;                  /* [rows][2][n_rot / 2] cos, then sin */
    struct attn_item *items;      /* [rows * NKV] */
    int block_rows;               /* rows of one item */
    struct partial parts, totals; /* [SPLIT_QUERIES] */

    /* DeltaNet */
    float **taps;                  /* [n_delta_layers] conv weights as [K][CH] */
    const struct weight **taps_of; /* whose they are */
    float *zeros;                  /* [CH] */
};

static inline struct cpu *cpu_of(struct backend *b)
{
    return (struct cpu *)b;
}

/* Opens the backend on a given instruction set (tests compare them all). `isa` must be one that isa_best allows. */
struct backend *cpu_open(const struct backend_shape *shape, int n_threads, enum isa isa, struct error *err);

/* n zeroed elements that live as long as the backend; NULL when out of memory. */
void *cpu_scratch(struct cpu *c, size_t n, size_t size);

/* Scratch of each part: 0, or -1 when out of memory. */
int cpu_mat_open(struct cpu *c);
int cpu_moe_open(struct cpu *c);
int cpu_attn_open(struct cpu *c);
int cpu_delta_open(struct cpu *c);

/* ---- checks: when one is false (or NULL), the sticky error is set and the operation returns ---- */

/* True when an operation has something to do: a step is in progress and nothing has failed. */
static inline bool cpu_ready(const struct cpu *c)
{
    return !c->store.error.text[0] && c->store.n_rows > 0;
}

/* `buf` has room for n_rows rows of `width` f32. */
bool cpu_fits(struct cpu *c, const char *what, const struct buffer *buf, int64_t n_rows, int64_t width);

/* `w` is n_mats matrices of n_out rows of n_in values; 0 for n_in or n_out means any. */
bool cpu_shaped(struct cpu *c, const char *what, const struct weight *w, int64_t n_in, int64_t n_out, int64_t n_mats);

/* The n values of a norm or bias as f32; `place` 0 .. 2 says which scratch may be used. */
const float *cpu_vector(struct cpu *c, const char *what, const struct weight *w, int64_t n, int place);

/* ---- products ---- */

static inline enum act_kind cpu_kind(const struct weight *w)
{
    return act_kind_of(w->desc.type);
}

static inline unsigned cpu_kind_bit(const struct weight *w)
{
    return 1u << cpu_kind(w);
}

/* Runs task over [0, n) in the pool, or right here when all of it is too small to wake anybody for. */
void cpu_share_out(struct cpu *c, int n, bool small, void (*task)(void *arg, int i, int worker), void *arg);

/* Turns rows of x (row index[r], or r when index is NULL; `width` wide; RMSNorm with `norm` first unless NULL) into each of the forms in `kinds`
 * (bits 1 << act_kind): c->act_rows[kind][r]. */
void cpu_activate(struct cpu *c, const float *x, const int32_t *index, int n_rows, int width, const float *norm, unsigned kinds);

/* y[r] = RMSNorm(x[r], norm), rows of D. */
void cpu_norm_rows(struct cpu *c, const float *x, int n_rows, const float *norm, float *y);

/* Room for n_rows mid rows of `width`; 0 or -1. */
int cpu_mid_open(struct cpu *c, struct mid *m, int n_rows, int width);

/* The first n_rows mid rows in the form `kind`: m->act_rows. */
void cpu_mid_activate(struct cpu *c, struct mid *m, int n_rows, enum act_kind kind);

/* Runs all jobs in one go over the pool. */
void cpu_mat_run(struct cpu *c, struct mat_job *jobs, int n_jobs);

/* rows[r] = base + r * width, for r < n_rows */
void cpu_row_table(float **rows, float *base, int n_rows, int64_t width);

/* ---- operations, see engine/backend.h ---- */

void cpu_embed(struct backend *b, struct weight *w, struct buffer *out);
void cpu_project(struct backend *b, struct buffer *x, struct weight *norm, int n, struct weight *const w[], struct buffer *const out[]);
void cpu_project_add(struct backend *b, struct buffer *x, struct weight *w, struct buffer *h);
void cpu_mlp(struct backend *b, struct buffer *h, struct weight *norm, struct weight *gate, struct weight *up, struct weight *down);
void cpu_head(struct backend *b, struct buffer *h, struct weight *norm, struct weight *w, const int32_t *rows, int n, struct buffer *hidden,
              struct buffer *logits);
void cpu_mtp_join(struct backend *b, struct buffer *embedding, struct buffer *hidden, struct weight *enorm, struct weight *hnorm,
                  struct weight *eh_proj, struct buffer *h);
void cpu_moe(struct backend *b, struct buffer *h, struct weight *norm, const struct moe_weights *w, struct buffer *chosen);
void cpu_attn_store(struct backend *b, int layer, struct buffer *q, struct buffer *k, struct buffer *v, struct weight *q_norm, struct weight *k_norm);
void cpu_attn_mix(struct backend *b, int layer, struct buffer *q, struct buffer *out);
void cpu_delta_conv(struct backend *b, int layer, struct buffer *u, struct buffer *beta_raw, struct buffer *alpha_raw, struct weight *conv,
                    struct weight *dt_bias, struct weight *a, struct buffer *qkv, struct buffer *gates);
void cpu_delta_rule(struct backend *b, int layer, struct buffer *qkv, struct buffer *gates, struct buffer *z, struct weight *norm,
                    struct buffer *out);

#endif
