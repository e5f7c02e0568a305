/* The CPU backend's mixture of experts, spec/qwen35moe.md section 8.
 *
 * The (row, expert) pairs of a step are put in order of expert, so that an expert's weights are read once for all its rows. A row's result is the
 * sum over its experts in order of rank, whatever shared the step. */
#include "engine/cpu/cpu_impl.h"

#include <math.h>
#include <string.h>

enum { ROWS_PER_TASK = 4, SMALL_PAIRS = 16 };

int cpu_moe_open(struct cpu *c)
{
    const struct backend_shape *sh = &c->base.shape;
    if (sh->n_experts == 0)
        return 0;
    const int rows = sh->max_rows < FFN_ROWS ? sh->max_rows : FFN_ROWS;
    const size_t n = (size_t)rows, pairs = n * (size_t)sh->n_experts_used, experts = (size_t)sh->n_experts, dim = (size_t)sh->n_embd;
    c->router_rows = cpu_scratch(c, n, sizeof *c->router_rows);
    c->shared_rows = cpu_scratch(c, n, sizeof *c->shared_rows);
    c->chosen = cpu_scratch(c, pairs, sizeof *c->chosen);
    c->share = cpu_scratch(c, pairs, sizeof *c->share);
    c->place = cpu_scratch(c, pairs, sizeof *c->place);
    c->expert_first = cpu_scratch(c, experts + 1, sizeof *c->expert_first);
    c->expert_x[0] = cpu_scratch(c, pairs, sizeof *c->expert_x[0]);
    c->expert_x[1] = cpu_scratch(c, pairs, sizeof *c->expert_x[1]);
    c->expert_out = cpu_scratch(c, pairs, sizeof *c->expert_out);
    c->shared_out = cpu_scratch(c, n, sizeof *c->shared_out);
    c->jobs = cpu_scratch(c, experts + 1, sizeof *c->jobs);
    float *router = cpu_scratch(c, n * experts, sizeof(float)), *shared = cpu_scratch(c, n, sizeof(float));
    float *out = cpu_scratch(c, (pairs + n) * dim, sizeof(float));
    if (!c->router_rows || !c->shared_rows || !c->chosen || !c->share || !c->place || !c->expert_first || !c->expert_x[0] || !c->expert_x[1] ||
        !c->expert_out || !c->shared_out || !c->jobs || !router || !shared || !out)
        return -1;
    cpu_row_table(c->router_rows, router, rows, sh->n_experts);
    cpu_row_table(c->shared_rows, shared, rows, 1);
    cpu_row_table(c->expert_out, out, (int)pairs, sh->n_embd);
    cpu_row_table(c->shared_out, out + pairs * dim, rows, sh->n_embd);
    if (cpu_mid_open(c, &c->expert_mid, (int)pairs, sh->expert_ff))
        return -1;
    return sh->shared_ff > 0 ? cpu_mid_open(c, &c->shared_mid, rows, sh->shared_ff) : 0;
}

/* ---- routing ---- */

/* chosen [used]: the experts of the largest logits, best first, ties to the lower index (a later equal one never passes an earlier one). */
static void choose(const float *logits, int n_experts, int used, int32_t *chosen)
{
    int have = 0;
    for (int32_t e = 0; e < n_experts; e++) {
        int at = have < used ? have : used;
        while (at > 0 && logits[e] > logits[chosen[at - 1]])
            at--;
        if (at == used)
            continue;
        const int keep = have < used ? have : used - 1; /* how many of the old ones remain */
        memmove(chosen + at + 1, chosen + at, (size_t)(keep - at) * sizeof *chosen);
        chosen[at] = e;
        have = keep + 1;
    }
}

/* share [used]: the chosen experts' softmax probabilities over their sum, the sum clamped as the spec says. logits is overwritten. */
static void weigh(const struct rows_ops *rows, float *logits, int n_experts, const int32_t *chosen, int used, float *share)
{
    const float most = logits[chosen[0]];
    for (int e = 0; e < n_experts; e++)
        logits[e] -= most;
    rows->exp(logits, n_experts, logits);
    float all = 0.0f, sum = 0.0f;
    for (int e = 0; e < n_experts; e++)
        all += logits[e];
    for (int i = 0; i < used; i++)
        sum += share[i] = logits[chosen[i]] / all;
    sum = fmaxf(sum, 0x1p-14f);
    for (int i = 0; i < used; i++)
        share[i] /= sum;
}

struct moe_run {
    struct cpu *c;
    int n_rows;
    bool shared;
    float *h;
};

static void route_task(void *arg, int i, int worker)
{
    const struct moe_run *run = arg;
    struct cpu *c = run->c;
    const int n_experts = c->base.shape.n_experts, used = c->base.shape.n_experts_used;
    (void)worker;
    for (int r = i * ROWS_PER_TASK; r < run->n_rows && r < (i + 1) * ROWS_PER_TASK; r++) {
        choose(c->router_rows[r], n_experts, used, c->chosen + r * used);
        weigh(c->rows, c->router_rows[r], n_experts, c->chosen + r * used, used, c->share + r * used);
    }
}

/* Counting sort of the (row, rank) pairs by expert; rows stay in order within one. Fills place, expert_first and the activation rows. */
static void group(struct cpu *c, int n_rows, const void *const *gate_rows, const void *const *up_rows)
{
    const int n_experts = c->base.shape.n_experts, used = c->base.shape.n_experts_used;
    int *first = c->expert_first;
    memset(first, 0, ((size_t)n_experts + 1) * sizeof *first);
    for (int i = 0; i < n_rows * used; i++)
        first[c->chosen[i] + 1]++;
    for (int e = 0; e < n_experts; e++)
        first[e + 1] += first[e];
    for (int i = 0; i < n_rows * used; i++) {
        const int at = first[c->chosen[i]]++;
        c->place[i] = at;
        c->expert_x[0][at] = gate_rows[i / used];
        c->expert_x[1][at] = up_rows[i / used];
    }
    memmove(first + 1, first, (size_t)n_experts * sizeof *first); /* each entry has become the next one's */
    first[0] = 0;
}

/* ---- sums ---- */

/* h += sum over ranks of share * expert + sigmoid(shared router) * shared expert */
static void combine_task(void *arg, int i, int worker)
{
    const struct moe_run *run = arg;
    struct cpu *c = run->c;
    const int used = c->base.shape.n_experts_used, dim = c->base.shape.n_embd;
    (void)worker;
    for (int r = i * ROWS_PER_TASK; r < run->n_rows && r < (i + 1) * ROWS_PER_TASK; r++) {
        float *sum = c->normed + (size_t)r * (size_t)dim; /* free by now */
        memset(sum, 0, (size_t)dim * sizeof *sum);
        for (int k = 0; k < used; k++)
            c->rows->axpy(sum, c->share[r * used + k], c->expert_out[c->place[r * used + k]], dim);
        if (run->shared)
            c->rows->axpy(sum, 1.0f / (1.0f + expf(-c->shared_rows[r][0])), c->shared_out[r], dim);
        c->rows->add(run->h + (size_t)r * (size_t)dim, sum, dim);
    }
}

/* ---- the operation ---- */

static bool check_weights(struct cpu *c, const struct moe_weights *w)
{
    const struct backend_shape *sh = &c->base.shape;
    const int64_t dim = sh->n_embd, experts = sh->n_experts;
    if (!cpu_shaped(c, "moe: router", w->router, dim, experts, 1) || !cpu_shaped(c, "moe: gate", w->gate, dim, sh->expert_ff, experts) ||
        !cpu_shaped(c, "moe: up", w->up, dim, sh->expert_ff, experts) || !cpu_shaped(c, "moe: down", w->down, sh->expert_ff, dim, experts))
        return false;
    if (!w->shared_router)
        return true;
    if (sh->shared_ff < 1) {
        store_fail(&c->store, "moe: weight %s, but the model's shape has no shared expert", w->shared_router->name);
        return false;
    }
    return cpu_shaped(c, "moe: shared_router", w->shared_router, dim, 1, 1) &&
           cpu_shaped(c, "moe: shared_gate", w->shared_gate, dim, sh->shared_ff, 1) &&
           cpu_shaped(c, "moe: shared_up", w->shared_up, dim, sh->shared_ff, 1) &&
           cpu_shaped(c, "moe: shared_down", w->shared_down, sh->shared_ff, dim, 1);
}

/* Up to FFN_ROWS rows of h. */
static void moe_rows(struct cpu *c, float *h, int n_rows, const float *norm, const struct moe_weights *w)
{
    const int n_experts = c->base.shape.n_experts, used = c->base.shape.n_experts_used;
    const bool shared = w->shared_router != NULL;
    struct moe_run run = {c, n_rows, shared, h};
    const int row_tasks = (n_rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK;
    const bool small = n_rows * used <= SMALL_PAIRS;

    unsigned kinds = cpu_kind_bit(w->router) | cpu_kind_bit(w->gate) | cpu_kind_bit(w->up);
    if (shared)
        kinds |= cpu_kind_bit(w->shared_router) | cpu_kind_bit(w->shared_gate) | cpu_kind_bit(w->shared_up);
    cpu_activate(c, h, NULL, n_rows, c->base.shape.n_embd, norm, kinds);

    /* router, and the shared expert's first half beside it */
    int n = 0;
    struct mat_job first[3];
    first[n++] = (struct mat_job){.w = w->router, .x = c->act_rows[cpu_kind(w->router)], .y = c->router_rows, .n_rows = n_rows};
    if (shared) {
        first[n++] = (struct mat_job){.w = w->shared_gate,
                                      .up = w->shared_up,
                                      .x = c->act_rows[cpu_kind(w->shared_gate)],
                                      .up_x = c->act_rows[cpu_kind(w->shared_up)],
                                      .y = c->shared_mid.rows,
                                      .up_y = c->shared_mid.up_rows,
                                      .n_rows = n_rows};
        first[n++] = (struct mat_job){.w = w->shared_router, .x = c->act_rows[cpu_kind(w->shared_router)], .y = c->shared_rows, .n_rows = n_rows};
    }
    cpu_mat_run(c, first, n);

    cpu_share_out(c, row_tasks, small, route_task, &run);
    group(c, n_rows, c->act_rows[cpu_kind(w->gate)], c->act_rows[cpu_kind(w->up)]);

    n = 0;
    for (int e = 0; e < n_experts; e++) {
        const int at = c->expert_first[e], rows = c->expert_first[e + 1] - at;
        if (rows > 0)
            c->jobs[n++] = (struct mat_job){.w = w->gate,
                                            .up = w->up,
                                            .mat = e,
                                            .x = c->expert_x[0] + at,
                                            .up_x = c->expert_x[1] + at,
                                            .y = c->expert_mid.rows + at,
                                            .up_y = c->expert_mid.up_rows + at,
                                            .n_rows = rows};
    }
    cpu_mat_run(c, c->jobs, n);
    cpu_mid_activate(c, &c->expert_mid, n_rows * used, cpu_kind(w->down));

    for (int i = 0; i < n; i++) {
        const int at = c->expert_first[c->jobs[i].mat];
        c->jobs[i] = (struct mat_job){
            .w = w->down, .mat = c->jobs[i].mat, .x = c->expert_mid.act_rows + at, .y = c->expert_out + at, .n_rows = c->jobs[i].n_rows};
    }
    if (shared) {
        cpu_mid_activate(c, &c->shared_mid, n_rows, cpu_kind(w->shared_down));
        c->jobs[n++] = (struct mat_job){.w = w->shared_down, .x = c->shared_mid.act_rows, .y = c->shared_out, .n_rows = n_rows};
    }
    cpu_mat_run(c, c->jobs, n);
    cpu_share_out(c, row_tasks, small, combine_task, &run);
}

void cpu_moe(struct backend *b, struct buffer *h, struct weight *norm, const struct moe_weights *w, struct buffer *chosen)
{
    struct cpu *c = cpu_of(b);
    const int rows = c->store.n_rows, dim = b->shape.n_embd, used = b->shape.n_experts_used;
    if (!cpu_ready(c) || !cpu_fits(c, "moe: h", h, rows, dim) || !check_weights(c, w))
        return;
    const float *scale = cpu_vector(c, "moe: norm", norm, dim, 0);
    if (!scale || (chosen && !cpu_fits(c, "moe: chosen", chosen, rows, used)))
        return;
    for (int r0 = 0; r0 < rows; r0 += FFN_ROWS) {
        const int n = rows - r0 < FFN_ROWS ? rows - r0 : FFN_ROWS;
        moe_rows(c, h->data + (size_t)r0 * (size_t)dim, n, scale, w);
        if (chosen)
            memcpy((int32_t *)(void *)chosen->data + (size_t)r0 * (size_t)used, c->chosen, (size_t)n * (size_t)used * sizeof *c->chosen);
    }
}
