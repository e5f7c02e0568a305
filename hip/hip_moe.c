/* The mixture of experts (hip/kernels/moe.h), spec section 8.
 *
 * Few rows (decode), three launches (four for more than one row) after norm and forms of x, which the launch before makes where it can (hip_hold.c): router, shared
 * router, the shared expert's gate and up, and choosing; gate and up of the chosen experts, SiLU and forms; down with the weighted sum. Many rows
 * (prefill): the same with tiles over pairs sorted by expert. Nothing is asked of the device. */
#include <stdlib.h>

#include "hip/hip_impl.h"

_Static_assert((int)GPU_ACT_F32 == HIP_ACT_F32 && (int)GPU_ACT_Q8_32 == HIP_ACT_Q8_32 && (int)GPU_ACT_Q8_256 == HIP_ACT_Q8_256,
               "params.h names the forms");

enum {
    MOE_ROWS = 1024,     /* rows that go through together: bounds the scratch */
    MOE_DECODE_ROWS = 8, /* the most of the mat-vec kernels */
    GROUP_OUT = 16       /* outputs of a mat-vec workgroup */
};

/* Scratch. Pairs are (row, rank); `mid` has the pairs first and then the rows of the shared expert. */
struct hip_moe {
    void *block;                       /* of all */
    int rows;                          /* that fit */
    uint8_t *x[HIP_ACT_Q8_256 + 1];    /* [rows] of the normalised x in each form, or NULL where no weight can want it */
    float *logits, *shared_logit;      /* [rows][E], [rows] */
    int32_t *chosen;                   /* [rows][used] */
    float *share;                      /* [rows][used + 1] */
    int32_t *sorted_row, *sorted_pair; /* [rows * used] */
    struct gpu_moe_tile *tiles;        /* [tiles_of] */
    float *gate, *up;                  /* [rows * used][expert_ff], then [rows][shared_ff] */
    uint8_t *mid;                      /* the same in the form that `down` wants */
    float *out, *shared_out;           /* [rows * used][D], [rows][D] */
    int32_t *counters;                 /* [1], then [MOE_DECODE_ROWS * used][blocks of 256 of expert_ff]; 0 between kernels */
};

/* ---- scratch ---- */

/* The most tiles that pairs of any experts make: each expert but the last may end in an unfilled one. */
static size_t tiles_of(size_t pairs, size_t experts)
{
    return pairs / TILE_ROWS + (pairs < experts ? pairs : experts);
}

/* Rounded up, so that what follows begins on a cache line and kernels may read it in wide pieces. */
static size_t whole_lines(size_t values)
{
    return (values + 15) & ~(size_t)15;
}

static size_t mid_row_bytes(int n)
{
    const size_t plain = hip_act_row_bytes(HIP_ACT_F32, n),
                 blocks = hip_act_row_bytes(HIP_ACT_Q8_32, n); /* the longest forms; of a single block the second */
    return plain > blocks ? plain : blocks;
}

static size_t counter_bytes(const struct backend_shape *sh)
{
    return (1 + (size_t)MOE_DECODE_ROWS * (size_t)sh->n_experts_used * ((size_t)sh->expert_ff / 256 + 1)) * sizeof(int32_t);
}

/* Lays the arrays out; returns the bytes needed. With a base of NULL only counts. */
static size_t place(struct hip_moe *m, uint8_t *base, const struct backend_shape *sh)
{
    const size_t n = (size_t)m->rows, used = (size_t)sh->n_experts_used, pairs = n * used, experts = (size_t)sh->n_experts, dim = (size_t)sh->n_embd;
    const size_t ffs = whole_lines(pairs * (size_t)sh->expert_ff) + n * (size_t)sh->shared_ff;
    size_t at = 0;
#define TAKE(member, bytes)                                                                                                                          \
    do {                                                                                                                                             \
        (m->member) = base ? (void *)(base + at) : NULL;                                                                                             \
        at += ((bytes) + 255) & ~(size_t)255;                                                                                                        \
    } while (0)
    TAKE(x[HIP_ACT_F32], n * hip_act_row_bytes(HIP_ACT_F32, sh->n_embd));
    if (sh->n_embd % 32 == 0)
        TAKE(x[HIP_ACT_Q8_32], n * hip_act_row_bytes(HIP_ACT_Q8_32, sh->n_embd));
    if (sh->n_embd % 256 == 0)
        TAKE(x[HIP_ACT_Q8_256], n * hip_act_row_bytes(HIP_ACT_Q8_256, sh->n_embd));
    TAKE(logits, n * experts * sizeof(float));
    TAKE(shared_logit, n * sizeof(float));
    TAKE(chosen, pairs * sizeof(int32_t));
    TAKE(share, (pairs + n) * sizeof(float));
    TAKE(sorted_row, pairs * sizeof(int32_t));
    TAKE(sorted_pair, pairs * sizeof(int32_t));
    TAKE(tiles, tiles_of(pairs, experts) * sizeof(struct gpu_moe_tile));
    TAKE(gate, ffs * sizeof(float));
    TAKE(up, ffs * sizeof(float));
    TAKE(mid, pairs * mid_row_bytes(sh->expert_ff) + n * mid_row_bytes(sh->shared_ff));
    TAKE(out, pairs * dim * sizeof(float));
    TAKE(shared_out, n * dim * sizeof(float));
    TAKE(counters, counter_bytes(sh));
#undef TAKE
    return at;
}

int hip_moe_open(struct hip *h, struct error *err)
{
    const struct backend_shape *sh = &h->base.shape;
    if (sh->n_experts < 1)
        return 0;
    if (sh->n_experts > MOE_EXPERTS || sh->n_experts_used < 1 || sh->n_experts_used > MOE_USED || sh->n_experts_used > sh->n_experts)
        return error_set(err, "the GPU's router takes up to %d experts, up to %d of them for a token; this model has %d and %d: use device cpu",
                         MOE_EXPERTS, MOE_USED, sh->n_experts, sh->n_experts_used);
    struct hip_moe *m = calloc(1, sizeof *m);
    if (!m)
        return error_set(err, "out of memory for the experts' scratch");
    h->moe = m;
    m->rows = sh->max_rows < MOE_ROWS ? sh->max_rows : MOE_ROWS;
    m->block = hip_device_alloc(hip_dev(h), place(m, NULL, sh), err);
    if (!m->block)
        return -1;
    place(m, m->block, sh);
    hip_device_zero(hip_dev(h), m->counters, counter_bytes(sh));
    return 0;
}

void hip_moe_close(struct hip *h)
{
    if (!h->moe)
        return;
    hip_device_free(hip_dev(h), h->moe->block);
    free(h->moe);
    h->moe = NULL;
}

/* ---- parts of the operation ---- */

struct moe_run {
    struct hip *h;
    struct hip_moe *m;
    const struct moe_weights *w;
    int rows, pairs, used;
    bool shared;
};

/* Rows of x as w wants them. */
static const uint8_t *x_for(const struct moe_run *run, const struct weight *w)
{
    return run->m->x[hip_act_for(w)];
}

static uint32_t row_bytes_for(const struct weight *w)
{
    return (uint32_t)hip_act_row_bytes(hip_act_for(w), w->gpu.n_in);
}

/* x in every form that a weight wants, in one launch. */
static void activate(const struct moe_run *run, const float *h, const struct weight *norm)
{
    const struct moe_weights *w = run->w;
    const struct weight *const all[] = {w->router, w->gate, w->up, w->shared_router, w->shared_gate, w->shared_up};
    struct act_params p = {.x = h, .norm = hip_values_of(norm), .eps = run->h->base.shape.norm_eps, .n = run->h->base.shape.n_embd};
    for (size_t i = 0; i < (run->shared ? 6U : 3U); i++)
        hip_act_to(&p, hip_act_for(all[i]), run->m->x[hip_act_for(all[i])]);
    hip_act(run->h, &p, run->rows);
}

/* dst [n_rows] = SiLU(gate) * up (or gate alone, where up is NULL) in the form that `down` wants. */
static void activate_mid(const struct moe_run *run, const float *gate, const float *up, int n_rows, const struct weight *down, uint8_t *dst)
{
    hip_quantise(run->h, hip_act_for(down), gate, up, n_rows, down->gpu.n_in, dst);
}

static struct moe_choose_params choose_params(const struct moe_run *run, int32_t *chosen)
{
    const struct hip_moe *m = run->m;
    return (struct moe_choose_params){.logits = m->logits,
                                      .shared = run->shared ? m->shared_logit : NULL,
                                      .chosen = m->chosen,
                                      .chosen_too = chosen,
                                      .share = m->share,
                                      .n_rows = run->rows,
                                      .n_experts = run->w->router->gpu.n_out,
                                      .used = run->used};
}

static void choose(const struct moe_run *run, int32_t *chosen)
{
    const struct moe_choose_params p = choose_params(run, chosen);
    HIP_LAUNCH(hip_dev(run->h), moe_choose, (unsigned)(run->rows + 3) / 4, 1, 1, p);
}

/* Where the shared expert's rows begin, behind those of the pairs in this run. */
static size_t shared_at(const struct moe_run *run)
{
    return whole_lines((size_t)run->pairs * (size_t)run->w->gate->gpu.n_out);
}

static uint8_t *shared_mid(const struct moe_run *run)
{
    return run->m->mid + (size_t)run->pairs * row_bytes_for(run->w->down);
}

/* ---- decode ---- */

static struct matvec_item item_of(const struct moe_run *run, const struct weight *w, float *y)
{
    return (struct matvec_item){.w = w->gpu.data,
                                .x = x_for(run, w),
                                .y = y,
                                .row_stride = (uint32_t)w->gpu.row_stride,
                                .x_stride = row_bytes_for(w),
                                .type = w->gpu.type,
                                .n_in = w->gpu.n_in,
                                .n_out = w->gpu.n_out};
}

/* Router and the first half of the shared expert, all from x; and the choice. */
static void route(const struct moe_run *run, int32_t *chosen)
{
    const struct moe_weights *w = run->w;
    const struct hip_moe *m = run->m;
    struct matvec_items p = {.n_items = 1, .item = {item_of(run, w->router, m->logits)}};
    if (run->shared) {
        p.n_items = 4;
        p.item[1] = item_of(run, w->shared_router, m->shared_logit);
        p.item[2] = item_of(run, w->shared_gate, m->gate + shared_at(run));
        p.item[3] = item_of(run, w->shared_up, m->up + shared_at(run));
    }
    uint32_t groups = 0;
    for (int i = 0; i < p.n_items; i++) {
        p.item[i].first_group = groups;
        groups += ((uint32_t)p.item[i].n_out + GROUP_OUT - 1) / GROUP_OUT;
    }
    if (run->rows == 1) {
        const struct moe_route_params one = {.products = p, .choose = choose_params(run, chosen), .counter = m->counters, .groups = (int32_t)groups};
        HIP_LAUNCH(hip_dev(run->h), moe_route, groups, 1, 1, one);
    } else {
        const enum hip_kernel kernel = (enum hip_kernel)(K_matvec_1 + (run->rows - 1));
        const struct matvec_params several = {.products = p};
        hip_device_launch(hip_dev(run->h), kernel, groups, 1, 1, &several, sizeof several);
        choose(run, chosen);
    }
}

static void decode(const struct moe_run *run, float *h, int32_t *chosen)
{
    const struct moe_weights *w = run->w;
    struct hip_moe *m = run->m;
    const unsigned rows = (unsigned)run->rows, groups = ((unsigned)w->gate->gpu.n_out + GROUP_OUT - 1) / GROUP_OUT;
    const unsigned out_groups = ((unsigned)w->down->gpu.n_out + GROUP_OUT - 1) / GROUP_OUT;
    route(run, chosen);

    struct moe_up_params up = {.w = {w->gate->gpu, w->up->gpu},
                               .x = {x_for(run, w->gate), x_for(run, w->up)},
                               .x_stride = {row_bytes_for(w->gate), row_bytes_for(w->up)},
                               .chosen = m->chosen,
                               .gate = m->gate,
                               .up = m->up,
                               .mid = {m->mid},
                               .mid_stride = {row_bytes_for(w->down)},
                               .mid_form = {(int32_t)hip_act_for(w->down)},
                               .counters = m->counters + 1,
                               .used = run->used,
                               .groups = (int32_t)groups};
    if (run->shared) {
        up.shared_gate = m->gate + shared_at(run);
        up.shared_up = m->up + shared_at(run);
        up.shared_ff = w->shared_gate->gpu.n_out;
        up.mid[1] = shared_mid(run);
        up.mid_stride[1] = row_bytes_for(w->shared_down);
        up.mid_form[1] = (int32_t)hip_act_for(w->shared_down);
    }
    HIP_LAUNCH(hip_dev(run->h), moe_up, (unsigned)run->used + run->shared, rows, groups, up);

    struct moe_down_params down = {.w = {w->down->gpu},
                                   .mid = {m->mid},
                                   .mid_stride = {row_bytes_for(w->down)},
                                   .chosen = m->chosen,
                                   .share = m->share,
                                   .h = h,
                                   .used = run->used,
                                   .parts = run->used,
                                   .tail = {.act = {.x = h, .n = w->down->gpu.n_out}, .rows = run->rows, .members = (int32_t)out_groups}};
    if (run->shared) {
        down.w[1] = w->shared_down->gpu;
        down.mid[1] = shared_mid(run);
        down.mid_stride[1] = row_bytes_for(w->shared_down);
        down.parts++;
    }
    hip_hold(run->h, K_moe_down, rows, out_groups, 1, &down, sizeof down, &down.tail);
}

/* ---- prefill ---- */

struct tile_kernels {
    bool known, has_pair;
    enum hip_kernel rows, pair;
    unsigned out;
};

static struct tile_kernels tile_kernels(const struct weight *w)
{
    switch ((enum block_type)w->gpu.type) {
    case BLOCK_Q4_K:
        return (struct tile_kernels){true, true, K_moe_rows_q4_k, K_moe_pair_q4_k, TILE_OUT};
    case BLOCK_Q5_K:
        return (struct tile_kernels){true, true, K_moe_rows_q5_k, K_moe_pair_q5_k, TILE_OUT};
    case BLOCK_Q6_K:
        return (struct tile_kernels){true, true, K_moe_rows_q6_k, K_moe_pair_q6_k, TILE_OUT};
    case BLOCK_Q8_0:
        return (struct tile_kernels){true, true, K_moe_rows_q8_0, K_moe_pair_q8_0, TILE_OUT};
    case BLOCK_Q4_0:
        return (struct tile_kernels){true, true, K_moe_rows_q4_0, K_moe_pair_q4_0, TILE_OUT};
    case BLOCK_F32:
        return (struct tile_kernels){true, false, K_moe_rows_f32, K_moe_rows_f32, FLOAT_OUT};
    case BLOCK_F16:
        return (struct tile_kernels){true, false, K_moe_rows_f16, K_moe_rows_f16, FLOAT_OUT};
    case BLOCK_BF16:
        return (struct tile_kernels){true, false, K_moe_rows_bf16, K_moe_rows_bf16, FLOAT_OUT};
    default:
        return (struct tile_kernels){0};
    }
}

/* y = w (and `pair`, or NULL) times rows of x, over the tiles of pairs. */
static void tile(const struct moe_run *run, const struct weight *w, const struct weight *pair, const uint8_t *x, const int32_t *x_row,
                 const int32_t *y_row, float *y)
{
    const struct tile_kernels k = tile_kernels(w);
    const size_t stride = hip_act_row_bytes(hip_act_for(w), w->gpu.n_in), x_rows = (size_t)(x_row ? run->rows : run->pairs);
    /* The kernels reckon with 32 bits inside x and inside the weight rows of one workgroup. */
    if (!k.known || stride > UINT32_MAX / x_rows || w->gpu.row_stride > UINT32_MAX / (uint64_t)k.out) {
        hip_device_fail(hip_dev(run->h), "moe: no GPU kernel for weight %s, %s [%d][%d], with %zu rows", w->name,
                        block_info((uint32_t)w->gpu.type)->name, w->gpu.n_out, w->gpu.n_in, x_rows);
        return;
    }
    const struct moe_tile_params p = {.w = {w->gpu, pair ? pair->gpu : w->gpu},
                                      .x = x,
                                      .x_stride = (uint32_t)stride,
                                      .tiles = run->m->tiles,
                                      .x_row = x_row,
                                      .y_row = y_row,
                                      .y = y};
    const unsigned tiles = (unsigned)tiles_of((size_t)run->pairs, (size_t)run->h->base.shape.n_experts);
    hip_device_launch(hip_dev(run->h), pair ? k.pair : k.rows, tiles, ((unsigned)w->gpu.n_out + k.out - 1) / k.out, 1, &p, sizeof p);
}

static void prefill(const struct moe_run *run, float *h, int32_t *chosen)
{
    const struct moe_weights *w = run->w;
    struct hip *g = run->h;
    struct hip_moe *m = run->m;
    hip_product(g, w->router, x_for(run, w->router), run->rows, m->logits, false);
    if (run->shared) {
        float *gate = m->gate + shared_at(run), *up = m->up + shared_at(run);
        hip_product(g, w->shared_router, x_for(run, w->shared_router), run->rows, m->shared_logit, false);
        hip_product(g, w->shared_gate, x_for(run, w->shared_gate), run->rows, gate, false);
        hip_product(g, w->shared_up, x_for(run, w->shared_up), run->rows, up, false);
        activate_mid(run, gate, up, run->rows, w->shared_down, shared_mid(run));
        hip_product(g, w->shared_down, shared_mid(run), run->rows, m->shared_out, false);
    }
    choose(run, chosen);
    const struct moe_sort_params sort = {.chosen = m->chosen,
                                         .row = m->sorted_row,
                                         .pair = m->sorted_pair,
                                         .tiles = m->tiles,
                                         .n_pairs = run->pairs,
                                         .used = run->used,
                                         .n_experts = g->base.shape.n_experts,
                                         .n_tiles = (int32_t)tiles_of((size_t)run->pairs, (size_t)g->base.shape.n_experts)};
    HIP_LAUNCH(hip_dev(g), moe_sort, 1, 1, 1, sort);

    const bool fused = tile_kernels(w->gate).has_pair && w->gate->gpu.type == w->up->gpu.type && w->gate->gpu.row_stride == w->up->gpu.row_stride;
    tile(run, w->gate, fused ? w->up : NULL, x_for(run, w->gate), m->sorted_row, NULL, m->gate);
    if (!fused)
        tile(run, w->up, NULL, x_for(run, w->up), m->sorted_row, NULL, m->up);
    activate_mid(run, m->gate, fused ? NULL : m->up, run->pairs, w->down, m->mid);
    tile(run, w->down, NULL, m->mid, NULL, m->sorted_pair, m->out);

    const struct moe_sum_params sum = {
        .out = m->out, .shared = run->shared ? m->shared_out : NULL, .share = m->share, .h = h, .used = run->used, .n = g->base.shape.n_embd};
    HIP_LAUNCH(hip_dev(g), moe_sum, (unsigned)run->rows, 1, 1, sum);
}

/* ---- the operation ---- */

static bool check_weights(struct hip *h, const struct weight *norm, const struct moe_weights *w)
{
    const struct backend_shape *sh = &h->base.shape;
    const int64_t dim = sh->n_embd, experts = sh->n_experts;
    if (!h->moe) {
        hip_device_fail(hip_dev(h), "moe: the model's shape has no experts");
        return false;
    }
    if (!hip_values(h, "moe: norm", norm, dim, 1) || !hip_fits(h, "moe: router", w->router, dim, experts, 1) ||
        !hip_fits(h, "moe: gate", w->gate, dim, sh->expert_ff, experts) || !hip_fits(h, "moe: up", w->up, dim, sh->expert_ff, experts) ||
        !hip_fits(h, "moe: down", w->down, sh->expert_ff, dim, experts))
        return false;
    if (!w->shared_router)
        return true;
    if (sh->shared_ff < 1) {
        hip_device_fail(hip_dev(h), "moe: weight %s, but the model's shape has no shared expert", w->shared_router->name);
        return false;
    }
    return hip_fits(h, "moe: shared_router", w->shared_router, dim, 1, 1) && hip_fits(h, "moe: shared_gate", w->shared_gate, dim, sh->shared_ff, 1) &&
           hip_fits(h, "moe: shared_up", w->shared_up, dim, sh->shared_ff, 1) &&
           hip_fits(h, "moe: shared_down", w->shared_down, sh->shared_ff, dim, 1);
}

void hip_moe(struct backend *b, struct buffer *buf, struct weight *norm, const struct moe_weights *w, struct buffer *chosen)
{
    struct hip *h = hip_of(b);
    const int rows = h->step.n_rows, dim = b->shape.n_embd, used = b->shape.n_experts_used;
    if (!hip_ready(h) || !check_weights(h, norm, w) || !hip_has(h, "moe: h", buf, (size_t)rows, (size_t)dim) ||
        (chosen && !hip_has(h, "moe: chosen", chosen, (size_t)rows, (size_t)used)))
        return;
    for (int r0 = 0; r0 < rows; r0 += h->moe->rows) {
        struct moe_run run = {.h = h, .m = h->moe, .w = w, .used = used, .shared = w->shared_router != NULL};
        run.rows = rows - r0 < h->moe->rows ? rows - r0 : h->moe->rows;
        run.pairs = run.rows * used;
        float *x = (float *)buf->dev + (size_t)r0 * (size_t)dim;
        int32_t *to = chosen ? (int32_t *)chosen->dev + (size_t)r0 * (size_t)used : NULL;
        activate(&run, x, norm);
        if (run.rows <= MOE_DECODE_ROWS)
            decode(&run, x, to);
        else
            prefill(&run, x, to);
    }
}
