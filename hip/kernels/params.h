/* hip/kernels/params.h: what the host (C17) and the kernels (HIP C++) say to each other: one struct per kernel, passed by value. Private to hip/.
 *
 * Every kernel takes exactly one argument, its struct. Plain members only; pointers are device addresses. Addresses that a kernel reads out of
 * device memory are uint64_t and are turned into pointers with GLOBAL() (hip/kernels/gpu.h). Each file of kernels has its own block of structs. */
#ifndef BEDSIDE_HIP_KERNELS_PARAMS_H
#define BEDSIDE_HIP_KERNELS_PARAMS_H

#ifndef BEDSIDE_GPU_TYPES /* the device header brings its own fixed-width types */
#include <stdint.h>
#endif

/* Launches are compared by the bytes of their parameters (hip/graph.h): none of them may be one that nobody writes. */
#pragma GCC diagnostic push
#pragma GCC diagnostic error "-Wpadded"

enum { GPU_GRID = 64 }; /* GRID of engine/backend.h */

/* enum block_type of engine/blocks.h: the types that have kernels. */
enum {
    GPU_F32 = 0,
    GPU_F16 = 1,
    GPU_Q4_0 = 2,
    GPU_Q8_0 = 8,
    GPU_Q4_K = 12,
    GPU_Q5_K = 13,
    GPU_Q6_K = 14,
    GPU_BF16 = 30,
};

/* ---- shared ---- */

/* One sequence's share of a step: rows row .. row+n-1 at positions pos .. pos+n-1. */
struct gpu_span {
    int32_t row, n, pos;
    int32_t first_page; /* index of its page 0 in gpu_step.pages */
    uint64_t state;     /* address of its state slot; 0 without DeltaNet */
};

/* The step in progress, uploaded by `begin`. */
struct gpu_step {
    const int32_t *ids;           /* [n_rows] */
    const int32_t *row_span;      /* [n_rows] index into spans */
    const int32_t *row_pos;       /* [n_rows] position in its sequence */
    const struct gpu_span *spans; /* [n_spans] */
    const uint64_t *pages;        /* page addresses of all spans, one span after the other */
    int32_t n_rows, n_spans;
};

/* A weight on the device; layout by type in hip/layout.h. Row o of matrix m begins at data + m * mat_stride + o * row_stride. */
struct gpu_matrix {
    const uint8_t *data;
    uint64_t row_stride, mat_stride;
    int32_t type; /* enum block_type */
    int32_t n_in, n_out, n_mats;
};

/* ---- act.h ---- */

/* Row r of the result is row index[r] (or r) of x, then silu(x) * up where `up` is given, then RMSNorm where `norm` is given; written in every form whose
 * pointer is not NULL. Grid [rows]. */
struct act_params {
    const float *x, *up;           /* [..][n], one after the other */
    const int32_t *index;          /* or NULL */
    const float *norm;             /* [n], or NULL */
    float *normed;                 /* rows of n values, normed_stride values apart */
    uint8_t *q8_256, *q8_32, *f32; /* rows of hip_act_row_bytes */
    float eps;
    int32_t n;
    uint32_t normed_stride;
    uint32_t pad;
};

/* What the last workgroup of a launch makes of `rows` rows of act.x, once they are written: the forms that the next operation reads. Without `up`, `index`
 * and `normed`. counters NULL: nothing. */
enum { GPU_TAIL_ROWS = 8 }; /* most rows */
struct act_tail {
    struct act_params act;
    int32_t *counters; /* [GPU_TAIL_ROWS], 0 before and after */
    int32_t rows;
    int32_t members; /* workgroups to wait for: of the launch, or of a row where workgroups have one */
};

/* out [rows][n]: row ids[r] (or 0) of the matrix. Grid [rows]. */
struct embed_params {
    struct gpu_matrix w;
    const int32_t *ids; /* or NULL */
    float *out;
};

/* ---- attn_store.h ---- */

enum {
    ATTN_PART = 256,       /* tokens: a sequence's parts, on the absolute grid */
    ATTN_MAX_DIM = 256,    /* channels of a head, a multiple of 16 */
    ATTN_ROPE_ROWS = 1024, /* positions in one piece of the table of angles */
};

struct attn_store_params {
    struct gpu_step step;
    float *q;                                                   /* [R][NH][q_stride] */
    const float *k, *v;                                         /* [R][NKV][HD] */
    int32_t n_heads, n_kv_heads, head_dim, n_rot, q_stride, q8; /* near q, k and v, see attn_same */
    float eps;
    int32_t pad;
    const float *q_norm, *k_norm;   /* [HD] */
    const uint64_t *rope;           /* addresses of [ATTN_ROPE_ROWS][n_rot] f32: cos of n_rot / 2 angles, then sin */
    uint64_t k_offset, v_offset;    /* of KV head 0, from the page's address */
    uint32_t head_bytes, row_bytes; /* from one KV head to the next, from one token to the next */
};

/* ---- matvec.h ---- */

/* One matrix: y [rows][n_out] (+)= w * x. */
struct matvec_item {
    const uint8_t *w;
    const uint8_t *x; /* rows in the form that goes with the type */
    float *y;
    uint32_t row_stride, x_stride; /* bytes */
    int32_t type, n_in, n_out, add;
    uint32_t first_group; /* of 16 weight rows, among those of all items */
    uint32_t pad;
};
struct matvec_items {
    struct matvec_item item[4];
    int32_t n_items, pad;
};
enum { GPU_HEAD_ROWS = 7 }; /* most rows whose heads are turned; with eight the registers would cost a wave in six */
struct matvec_params {
    struct matvec_items products;
    struct act_tail tail;           /* of the first item's y */
    struct attn_store_params heads; /* of items 0, 1 and 2, which are q, k and v */
    int32_t *head_counters;         /* [n_heads + 2 * n_kv_heads], 0 before and after; NULL: they are not */
};

/* ---- head.h ---- */

enum {
    GPU_TOP_MAX = 64,    /* most values of a gpu_top */
    GPU_TOP_PART = 1024, /* logits of one wave */
    GPU_TOP_PARTS = 2048 /* most parts of a row: two million logits, more than any shape may have */
};

/* What is kept of a row of logits: usable and finite ones only. */
struct gpu_top {
    float max,
        sum; /* the largest, and the sum of e^(logit - max): log-probability of a token = logit - max - log(sum); -inf and 0 when there is none */
    int32_t n, pad; /* entries below: k, or less where the row has fewer */
    struct {
        int32_t id;
        float logit;
    } top[GPU_TOP_MAX]; /* best first, the lower id first of equal ones */
};

/* top_part: grid [parts / 8][rows], a wave finds the best k of its part. top_merge: grid [rows]. */
struct top_params {
    const float *logits;        /* [rows][n_vocab] */
    const uint32_t *usable;     /* a bit for each id, or NULL: all */
    uint64_t *keys;             /* [rows][parts][k], descending; 0: none */
    float *part_max, *part_sum; /* [rows][parts] */
    struct gpu_top *out;        /* [rows] */
    int32_t n_vocab, k, parts, pad;
};

/* ---- matmul.h, tile_float.h ---- */

/* y [n_rows][w.n_out] (+)= w * x; x: rows in the form that goes with w's type, x_stride bytes apart. TILE_OUT and TILE_ROWS results make a workgroup, or FLOAT_*
 * for float types. */
struct tile_params {
    struct gpu_matrix w;
    const uint8_t *x;
    float *y;
    uint32_t x_stride;
    int32_t n_rows, add, pad;
};

enum { TILE_OUT = 128, TILE_ROWS = 64, FLOAT_OUT = 64, FLOAT_ROWS = 16 };

/* ---- delta.h ---- */

struct delta_conv_params {
    struct gpu_step step;
    const float *u, *beta_raw, *alpha_raw;                /* [R][channels], [R][v_heads] twice */
    const float *conv, *dt_bias, *a;                      /* [channels][conv_stride], `width` taps of each; [v_heads] twice */
    float *qkv, *gates;                                   /* [R][channels], [R][2][v_heads] */
    uint64_t ring_at;                                     /* from a slot's address to the layer's history [ring][channels] */
    int32_t ring, width, k_heads, v_heads, dim, channels; /* ring: a power of two; heads of `dim` channels */
    int32_t conv_stride, pad;
    float eps, q_scale;
};

/* Also of delta_keep. */
struct delta_rule_params {
    struct gpu_step step;
    const float *qkv, *gates, *z;    /* [R][channels], [R][2][v_heads], [R][v_heads][dim] */
    const float *norm;               /* [dim] */
    float *out;                      /* [R][v_heads][dim] */
    uint64_t m_at, k_at, u_at, g_at; /* from a slot's address to the layer's arrays */
    int32_t k_heads, v_heads, dim;
    float eps;
    struct act_tail tail; /* of out; not in delta_keep */
};

/* Steps of one row a span: delta_conv and delta_rule in one. */
struct delta_step_params {
    struct delta_rule_params rule; /* first: what they share reads the arguments as these. qkv and gates are not read */
    struct delta_conv_params conv;
};

/* ---- attn.h ---- */

struct attn_mix_params {
    struct gpu_step step;
    const float *q;
    float *out;      /* [R][NH][HD] */
    float *part_acc; /* [R][NH][parts][HD] */
    float *part_ms;  /* [R][NH][parts][2] */
    int32_t *done;   /* [blocks][NKV], 0 */
    uint64_t k_offset, v_offset;
    uint32_t head_bytes, row_bytes;
    int32_t n_heads, n_kv_heads, group, head_dim, q_stride, gated;
    float scale;          /* attn_scale / ln 2 */
    int32_t parts;        /* most parts of a sequence, when each has its own workgroup; otherwise 0 */
    struct act_tail tail; /* of out; not in attn_any */
};

/* ---- moe.h ---- */

enum {
    MOE_EXPERTS = 1024, /* most experts of a router */
    MOE_USED = 32,      /* most of them for a row */
};

/* The experts of each row, best first, and the factors of their outputs. Grid [rows / 4]. */
struct moe_choose_params {
    const float *logits; /* [n_rows][n_experts] */
    const float *shared; /* [n_rows] logit of the shared expert, or NULL */
    int32_t *chosen;     /* [n_rows][used] */
    int32_t *chosen_too; /* the same, or NULL */
    float *share;        /* [n_rows][used + 1]: of the experts, of the shared one */
    int32_t n_rows, n_experts, used, pad;
};

/* Up to TILE_ROWS (row, rank) pairs of one expert. */
struct gpu_moe_tile {
    int32_t expert, first, n; /* pairs first .. first+n-1 in the order of experts; n = 0: nothing */
    int32_t pad;
};

/* Sorts pairs by expert. Grid [1]. */
struct moe_sort_params {
    const int32_t *chosen;      /* [n_pairs] */
    int32_t *row, *pair;        /* [n_pairs], by place in the order of experts: the pair's row, and the pair */
    struct gpu_moe_tile *tiles; /* [n_tiles], as many as there may be */
    int32_t n_pairs, used, n_experts, n_tiles;
};

/* Decode of one row: products with x (router, and what of the shared expert depends on x alone); the workgroup that is last chooses. Grid [groups of 16 weight rows]. */
struct moe_route_params {
    struct matvec_items products;
    struct moe_choose_params choose;
    int32_t *counter; /* 0 before and after */
    int32_t groups, pad;
};

/* Which form an activation row takes: enum hip_act of hip_impl.h. */
enum { GPU_ACT_F32, GPU_ACT_Q8_32, GPU_ACT_Q8_256 };

/* Decode: gate and up of each pair, then SiLU(gate) * up of pairs and of the shared expert's rows, in the forms that `down` wants. Grid [used, or used + 1 with a
 * shared expert][rows][groups of 16 outputs]. */
struct moe_up_params {
    struct gpu_matrix w[2]; /* gate, up */
    const uint8_t *x[2];    /* [rows] in the form of w's type */
    uint32_t x_stride[2];
    const int32_t *chosen;                /* [rows][used] */
    float *gate, *up;                     /* [rows][used][ff] */
    const float *shared_gate, *shared_up; /* [rows][shared_ff] */
    uint8_t *mid[2];                      /* of pairs, of the shared expert's rows */
    uint32_t mid_stride[2];
    int32_t mid_form[2];
    int32_t *counters; /* [rows][used][blocks of 256 outputs], 0 before and after */
    int32_t used, shared_ff, groups, pad;
};

/* Decode: h += sum of share * (down * mid). Grid [rows][groups of 16 outputs]. */
struct moe_down_params {
    struct gpu_matrix w[2]; /* experts, shared expert */
    const uint8_t *mid[2];  /* [rows][used], [rows] in the form of w's type */
    uint32_t mid_stride[2];
    const int32_t *chosen; /* [rows][used] */
    const float *share;    /* [rows][used + 1] */
    float *h;              /* [rows][n_out] */
    int32_t used;
    int32_t parts;        /* used, or used + 1 with a shared expert */
    struct act_tail tail; /* of h, a row by itself */
};

/* Prefill: products of tiles of pairs. Grid [tiles][groups of TILE_OUT or FLOAT_OUT outputs]. */
struct moe_tile_params {
    struct gpu_matrix w[2]; /* moe_pair: gate and up, of one type; otherwise the second is not used */
    const uint8_t *x;
    uint32_t x_stride, pad;
    const struct gpu_moe_tile *tiles;
    const int32_t *x_row, *y_row; /* row of x and of y by place in the order of experts; NULL: the place itself */
    float *y;                     /* [..][n_out] */
};

/* Prefill: h += sum of share * out. Grid [rows]. */
struct moe_sum_params {
    const float *out;    /* [rows][used][n] */
    const float *shared; /* [rows][n], or NULL */
    const float *share;  /* [rows][used + 1] */
    float *h;            /* [rows][n] */
    int32_t used, n;
};

#pragma GCC diagnostic pop

#endif
