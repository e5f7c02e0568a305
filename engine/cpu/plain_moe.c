/* Mixture of experts of the plain backend: spec/qwen35moe.md section 8. */
#include "engine/cpu/plain.h"

#include <stdlib.h>
#include <string.h>

/* best [used] = the experts with the largest logits, best first; a tie goes to the lower index. */
static void choose(const double *logit, int n_experts, int used, int32_t *best, bool *taken)
{
    memset(taken, 0, (size_t)n_experts * sizeof *taken);
    for (int i = 0; i < used; i++) {
        int32_t top = -1;
        for (int32_t e = 0; e < n_experts; e++)
            if (!taken[e] && (top < 0 || logit[e] > logit[top]))
                top = e;
        taken[top] = true;
        best[i] = top;
    }
}

/* weight [used] = the chosen experts' softmax probabilities divided by their sum. The sum over all experts cancels, so only the chosen ones need
 * forming. */
static void expert_weights(const double *logit, const int32_t *best, int used, double *weight)
{
    double sum = 0;
    for (int i = 0; i < used; i++) {
        weight[i] = exp(logit[best[i]] - logit[best[0]]);
        sum += weight[i];
    }
    for (int i = 0; i < used; i++)
        weight[i] /= sum;
}

static bool check_weights(struct plain *p, const struct weight *norm, const struct moe_weights *w)
{
    const int64_t dim = p->base.shape.n_embd, e = p->base.shape.n_experts, ff = p->base.shape.expert_ff, shared = p->base.shape.shared_ff;
    if (!plain_fits(p, "moe: norm", norm, dim, 1, 1) || !plain_fits(p, "moe: router", w->router, dim, e, 1) ||
        !plain_fits(p, "moe: gate", w->gate, dim, ff, e) || !plain_fits(p, "moe: up", w->up, dim, ff, e) ||
        !plain_fits(p, "moe: down", w->down, ff, dim, e))
        return false;
    if (!w->shared_router)
        return true;
    return plain_fits(p, "moe: shared_router", w->shared_router, dim, 1, 1) && plain_fits(p, "moe: shared_gate", w->shared_gate, dim, shared, 1) &&
           plain_fits(p, "moe: shared_up", w->shared_up, dim, shared, 1) && plain_fits(p, "moe: shared_down", w->shared_down, shared, dim, 1);
}

void plain_moe(struct backend *b, struct buffer *h, struct weight *norm, const struct moe_weights *w, struct buffer *chosen)
{
    struct plain *p = plain_of(b);
    const int n_experts = b->shape.n_experts, used = b->shape.n_experts_used;
    const size_t rows = (size_t)p->store.n_rows, dim = (size_t)b->shape.n_embd;
    if (!plain_ready(p) || !plain_has(p, "moe: h", h, rows, dim) || !check_weights(p, norm, w))
        return;
    if (chosen && !plain_has(p, "moe: chosen", chosen, rows, (size_t)used))
        return;
    double *x = plain_norm_rows(p, h->data, rows, norm), *logit = plain_alloc(p, (size_t)n_experts, sizeof *logit);
    double *weight = plain_alloc(p, (size_t)used, sizeof *weight), *y = plain_alloc(p, dim, sizeof *y), *sum = plain_alloc(p, dim, sizeof *sum);
    int32_t *best = plain_alloc(p, (size_t)used, sizeof *best);
    bool *taken = plain_alloc(p, (size_t)n_experts, sizeof *taken);
    if (!x || !logit || !weight || !y || !sum || !best || !taken)
        goto out;
    for (size_t r = 0; r < rows; r++) {
        const double *xr = x + r * dim;
        if (plain_matmul(p, w->router, 0, xr, 1, logit))
            goto out;
        choose(logit, n_experts, used, best, taken);
        expert_weights(logit, best, used, weight);
        if (chosen)
            memcpy((char *)chosen->data + r * (size_t)used * sizeof *best, best, (size_t)used * sizeof *best);

        for (size_t i = 0; i < dim; i++)
            sum[i] = 0;
        for (int e = 0; e < used; e++) {
            if (plain_swiglu(p, w->gate, w->up, w->down, best[e], xr, 1, y))
                goto out;
            for (size_t i = 0; i < dim; i++)
                sum[i] += weight[e] * y[i];
        }
        if (w->shared_router) {
            double gate;
            if (plain_matmul(p, w->shared_router, 0, xr, 1, &gate) || plain_swiglu(p, w->shared_gate, w->shared_up, w->shared_down, 0, xr, 1, y))
                goto out;
            for (size_t i = 0; i < dim; i++)
                sum[i] += plain_sigmoid(gate) * y[i];
        }
        for (size_t i = 0; i < dim; i++)
            h->data[r * dim + i] = (float)((double)h->data[r * dim + i] + sum[i]);
    }
out:
    free(x);
    free(logit);
    free(weight);
    free(y);
    free(sum);
    free(best);
    free(taken);
}
