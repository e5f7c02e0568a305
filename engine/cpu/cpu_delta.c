/* The CPU backend's gated DeltaNet, spec/qwen35moe.md section 7, in the chunked form that engine/backend.h states.
 *
 * A grid cell's rows are worked off together as far as a step has them: products with M0 as one small matrix product per head, then the triangular
 * part row by row. Each row's sums run over the same terms in the same order however many rows are there. */
#include "engine/cpu/cpu_impl.h"

#include <math.h>
#include <string.h>

enum { TASKS_PER_THREAD = 4, SMALL_ROWS = 8, DOT_ROWS = 16 };

struct sizes {
    int hk, hv, s, reps; /* reps: value heads of one key head */
    size_t k_row, v_row, channels;
};

static struct sizes sizes_of(const struct cpu *c)
{
    const struct backend_shape *sh = &c->base.shape;
    struct sizes d = {.hk = sh->delta_k_heads, .hv = sh->delta_v_heads, .s = sh->delta_dim, .reps = sh->delta_v_heads / sh->delta_k_heads};
    d.k_row = (size_t)d.hk * (size_t)d.s;
    d.v_row = (size_t)d.hv * (size_t)d.s;
    d.channels = 2 * d.k_row + d.v_row;
    return d;
}

int cpu_delta_open(struct cpu *c)
{
    const struct backend_shape *sh = &c->base.shape;
    if (sh->n_delta_layers == 0)
        return 0;
    const struct sizes d = sizes_of(c);
    const size_t layers = (size_t)sh->n_delta_layers, s = (size_t)d.s;
    c->taps = cpu_scratch(c, layers, sizeof *c->taps);
    c->taps_of = cpu_scratch(c, layers, sizeof *c->taps_of);
    c->zeros = cpu_scratch(c, d.channels, sizeof *c->zeros);
    float *taps = cpu_scratch(c, layers * (size_t)sh->conv_width * d.channels, sizeof(float));
    if (!c->taps || !c->taps_of || !c->zeros || !taps)
        return -1;
    for (size_t i = 0; i < layers; i++)
        c->taps[i] = taps + i * (size_t)sh->conv_width * d.channels;
    for (int i = 0; i < c->threads; i++) {
        struct worker *w = &c->workers[i];
        w->kk = cpu_scratch(c, GRID * GRID, sizeof(float));
        w->qk = cpu_scratch(c, GRID * GRID, sizeof(float));
        w->to_u = cpu_scratch(c, GRID, sizeof(float));
        w->to_o = cpu_scratch(c, GRID, sizeof(float));
        w->sums = cpu_scratch(c, GRID, sizeof(float));
        w->through = cpu_scratch(c, 2 * GRID * s, sizeof(float));
        w->turned = cpu_scratch(c, GRID * s, sizeof(float));
        if (!w->kk || !w->qk || !w->to_u || !w->to_o || !w->sums || !w->through || !w->turned)
            return -1;
    }
    return 0;
}

static bool check_layer(struct cpu *c, int layer)
{
    if (layer >= 0 && layer < c->base.shape.n_delta_layers)
        return true;
    store_fail(&c->store, "DeltaNet: layer %d is outside the model's %d", layer, c->base.shape.n_delta_layers);
    return false;
}

/* ---- delta_conv ---- */

enum { TAPS_MAX = 16 }; /* store_open's bound */

struct conv {
    struct cpu *c;
    struct sizes d;
    int layer, groups; /* tasks per span */
    const float *u, *beta_raw, *alpha_raw, *taps, *dt_bias, *a;
    float *qkv, *gates;
};

/* The layer's filters, turned so that one tap of all channels is contiguous; done once per layer. */
static const float *turned_taps(struct cpu *c, int layer, const struct weight *conv)
{
    const size_t channels = sizes_of(c).channels, width = (size_t)c->base.shape.conv_width;
    float row[TAPS_MAX];
    if (c->taps_of[layer] == conv)
        return c->taps[layer];
    for (size_t ch = 0; ch < channels; ch++) {
        block_dequant(conv->desc.type, weight_row(conv, 0, (int64_t)ch), row, width);
        for (size_t j = 0; j < width; j++)
            c->taps[layer][j * channels + ch] = row[j];
    }
    c->taps_of[layer] = conv;
    return c->taps[layer];
}

/* Step 1 for value head h of a row. */
static void make_gates(const struct conv *v, int row, int h)
{
    const size_t at = (size_t)row * (size_t)v->d.hv + (size_t)h, to = (size_t)row * 2 * (size_t)v->d.hv + (size_t)h;
    const float x = v->alpha_raw[at] + v->dt_bias[h];
    v->gates[to] = 1.0f / (1.0f + expf(-v->beta_raw[at]));
    v->gates[to + (size_t)v->d.hv] = v->a[h] * (x > 20.0f ? x : log1pf(expf(x)));
}

/* Steps 2 to 5 for heads h0 .. h1-1 (q heads, then k, then v) of all rows of a span. */
static void conv_heads(const struct conv *v, const struct span *span, int h0, int h1)
{
    struct cpu *c = v->c;
    const struct sizes *d = &v->d;
    const struct delta_state state = store_delta(&c->store, span->state, v->layer);
    const int taps = c->base.shape.conv_width, ring = c->store.ring, width = (h1 - h0) * d->s;
    const size_t at = (size_t)h0 * (size_t)d->s;
    const float eps = c->base.shape.norm_eps, q_scale = 1.0f / sqrtf((float)d->s);
    for (int t = 0; t < span->n; t++) {
        const float *from[TAPS_MAX];
        float *y = v->qkv + (size_t)(span->row + t) * d->channels + at;
        for (int j = 0; j < taps; j++) {
            const int back = t - (taps - 1) + j, pos = span->pos + back;
            if (pos < 0)
                from[j] = c->zeros + at;
            else if (back < 0)
                from[j] = state.conv + (size_t)(pos % ring) * d->channels + at;
            else
                from[j] = v->u + (size_t)(span->row + back) * d->channels + at;
        }
        c->rows->conv_silu(from, v->taps + at, d->channels, taps, width, y);
        for (int h = h0; h < h1; h++) {
            if (h < 2 * d->hk)
                c->rows->l2_norm(y + (size_t)(h - h0) * (size_t)d->s, eps, h < d->hk ? q_scale : 1.0f, d->s);
            else
                make_gates(v, span->row + t, h - 2 * d->hk);
        }
    }
    for (int t = span->n > ring ? span->n - ring : 0; t < span->n; t++)
        memcpy(state.conv + (size_t)((span->pos + t) % ring) * d->channels + at, v->u + (size_t)(span->row + t) * d->channels + at,
               (size_t)width * sizeof(float));
}

static void conv_task(void *arg, int i, int worker)
{
    const struct conv *v = arg;
    const int heads = 2 * v->d.hk + v->d.hv, part = i % v->groups;
    (void)worker;
    conv_heads(v, &v->c->store.spans[i / v->groups], heads * part / v->groups, heads * (part + 1) / v->groups);
}

void cpu_delta_conv(struct backend *b, int layer, struct buffer *u, struct buffer *beta_raw, struct buffer *alpha_raw, struct weight *conv,
                    struct weight *dt_bias, struct weight *a, struct buffer *qkv, struct buffer *gates)
{
    struct cpu *c = cpu_of(b);
    const struct sizes d = sizes_of(c);
    const int rows = c->store.n_rows;
    if (!cpu_ready(c) || !check_layer(c, layer) || !cpu_fits(c, "delta_conv: u", u, rows, (int64_t)d.channels) ||
        !cpu_fits(c, "delta_conv: beta", beta_raw, rows, d.hv) || !cpu_fits(c, "delta_conv: alpha", alpha_raw, rows, d.hv) ||
        !cpu_fits(c, "delta_conv: qkv", qkv, rows, (int64_t)d.channels) || !cpu_fits(c, "delta_conv: gates", gates, rows, 2 * (int64_t)d.hv) ||
        !cpu_shaped(c, "delta_conv: conv", conv, b->shape.conv_width, (int64_t)d.channels, 1))
        return;
    struct conv v = {c, d, layer, 0, u->data, beta_raw->data, alpha_raw->data, NULL, NULL, NULL, qkv->data, gates->data};
    v.dt_bias = cpu_vector(c, "delta_conv: dt_bias", dt_bias, d.hv, 0);
    v.a = cpu_vector(c, "delta_conv: a", a, d.hv, 1);
    if (!v.dt_bias || !v.a)
        return;
    v.taps = turned_taps(c, layer, conv);
    const int heads = 2 * d.hk + d.hv;
    v.groups = rows <= SMALL_ROWS ? 2 * c->threads : heads / 4;
    v.groups = v.groups < 1 ? 1 : v.groups > heads ? heads : v.groups;
    cpu_share_out(c, c->store.n_spans * v.groups, false, conv_task, &v);
}

/* ---- delta_rule ---- */

struct rule {
    struct cpu *c;
    struct sizes d;
    int layer;
    bool by_value_head; /* a task is one value head, else one key head with all its value heads */
    const float *qkv, *gates, *z, *norm;
    float *out;
};

/* Rows t0 .. t0+n-1 of a grid cell, step rows row .. row+n-1, for one key head. */
struct cell {
    const struct rule *rule;
    struct worker *w;
    struct delta_state state;
    int row, t0, n, key_head;
};

static const float *cell_q(const struct cell *cell)
{
    return cell->rule->qkv + (size_t)cell->row * cell->rule->d.channels + (size_t)cell->key_head * (size_t)cell->rule->d.s;
}

static const float *cell_k(const struct cell *cell)
{
    return cell_q(cell) + cell->rule->d.k_row;
}

/* w->qk[i][s] = q_i . k_s and w->kk[i][s] = k_i . k_s for the new rows i and all rows s of the cell so far that any of them needs. */
static void cell_dots(const struct cell *cell)
{
    const struct sizes *d = &cell->rule->d;
    const struct rows_ops *rows = cell->rule->c->rows;
    const float *past = cell->state.k + (size_t)cell->key_head * (size_t)d->s;
    for (int i = 0; i < cell->n; i += DOT_ROWS) {
        const int n = cell->n - i < DOT_ROWS ? cell->n - i : DOT_ROWS;
        const float *q = cell_q(cell) + (size_t)i * d->channels, *k = cell_k(cell) + (size_t)i * d->channels;
        float *qk = cell->w->qk + i * GRID, *kk = cell->w->kk + i * GRID;
        if (cell->t0 > 0) {
            rows->dots(q, d->channels, n, past, d->k_row, cell->t0, d->s, qk, GRID);
            rows->dots(k, d->channels, n, past, d->k_row, cell->t0, d->s, kk, GRID);
        }
        rows->dots(q, d->channels, n, cell_k(cell), d->channels, i + n, d->s, qk + cell->t0, GRID);
        if (i + n > 1)
            rows->dots(k, d->channels, n, cell_k(cell), d->channels, i + n, d->s, kk + cell->t0, GRID);
    }
}

/* The cell is full: M0 = e^G M0 + sum_t e^(G - G_t) k_t^T U_t, rows in order. */
static void fold(const struct cell *cell, int head, float *m)
{
    const struct sizes *d = &cell->rule->d;
    const struct rows_ops *rows = cell->rule->c->rows;
    const struct worker *w = cell->w;
    float decay[GRID], keep;
    for (int t = 0; t < GRID; t++)
        decay[t] = w->sums[GRID - 1] - w->sums[t];
    rows->exp(decay, GRID, decay);
    rows->exp(&w->sums[GRID - 1], 1, &keep);
    for (int t = 0; t < GRID; t++) {
        const float *k = t < cell->t0 ? cell->state.k + (size_t)t * d->k_row + (size_t)cell->key_head * (size_t)d->s
                                      : cell_k(cell) + (size_t)(t - cell->t0) * d->channels;
        for (int i = 0; i < d->s; i++)
            w->turned[i * GRID + t] = decay[t] * k[i];
    }
    rows->gemm(w->turned, GRID, d->s, GRID, cell->state.u + (size_t)head * (size_t)d->s, d->v_row, d->s, m, (size_t)d->s, keep);
}

/* One value head of the cell's rows; the dot products are in the worker's scratch. */
static void cell_head(const struct cell *cell, int head)
{
    const struct rule *rule = cell->rule;
    const struct sizes *d = &rule->d;
    const struct rows_ops *rows = rule->c->rows;
    struct worker *w = cell->w;
    const size_t s = (size_t)d->s, at = (size_t)head * s;
    float *m = cell->state.m + at * s, *qm = w->through, *km = w->through + (size_t)cell->n * s;

    for (int t = 0; t < cell->t0; t++)
        w->sums[t] = cell->state.g[(size_t)t * (size_t)d->hv + (size_t)head];
    float sum = cell->t0 > 0 ? w->sums[cell->t0 - 1] : 0.0f;
    for (int i = 0; i < cell->n; i++) {
        sum += rule->gates[((size_t)(cell->row + i) * 2 + 1) * (size_t)d->hv + (size_t)head];
        w->sums[cell->t0 + i] = sum;
        cell->state.g[(size_t)(cell->t0 + i) * (size_t)d->hv + (size_t)head] = sum;
    }

    if (cell->n == 1) { /* q and k lie k_row apart: M0 is read once */
        rows->gemm(cell_q(cell), d->k_row, 2, d->s, m, s, d->s, qm, s, 0.0f);
    } else {
        rows->gemm(cell_q(cell), d->channels, cell->n, d->s, m, s, d->s, qm, s, 0.0f);
        rows->gemm(cell_k(cell), d->channels, cell->n, d->s, m, s, d->s, km, s, 0.0f);
    }
    for (int i = 0; i < cell->n; i++) {
        const size_t row = (size_t)(cell->row + i);
        const float beta = rule->gates[row * 2 * (size_t)d->hv + (size_t)head];
        float *o = rule->out + row * d->v_row + at;
        const float decay = rows->delta_factors(w->kk + i * GRID, w->qk + i * GRID, w->sums, cell->t0 + i, beta, w->to_u, w->to_o);
        rows->delta_row(rule->qkv + row * d->channels + 2 * d->k_row + at, km + (size_t)i * s, qm + (size_t)i * s, beta, decay, w->to_u, w->to_o,
                        cell->t0 + i, cell->state.u + at, d->v_row, d->s, o);
        rows->rms_norm(o, rule->norm, rule->c->base.shape.norm_eps, d->s, o); /* step 8: norm first, gate after */
        rows->silu_mul(rule->z + row * d->v_row + at, o, d->s, o);
    }
    if (cell->t0 + cell->n == GRID)
        fold(cell, head, m);
}

/* All rows of a span for value heads key_head + r * HK, first <= r < last; `owner` also keeps the keys. */
static void span_head(const struct rule *rule, struct worker *w, const struct span *span, int key_head, int first, int last, bool owner)
{
    const struct sizes *d = &rule->d;
    struct cell cell = {rule, w, store_delta(&rule->c->store, span->state, rule->layer), span->row, span->pos % GRID, 0, key_head};
    for (int done = 0; done < span->n; done += cell.n) {
        cell.row = span->row + done;
        cell.t0 = (span->pos + done) % GRID;
        cell.n = span->n - done < GRID - cell.t0 ? span->n - done : GRID - cell.t0;
        cell_dots(&cell);
        for (int i = 0; i < cell.n && owner; i++)
            memcpy(cell.state.k + (size_t)(cell.t0 + i) * d->k_row + (size_t)key_head * (size_t)d->s, cell_k(&cell) + (size_t)i * d->channels,
                   (size_t)d->s * sizeof(float));
        for (int r = first; r < last; r++)
            cell_head(&cell, key_head + r * d->hk);
    }
}

static void rule_task(void *arg, int i, int worker)
{
    const struct rule *rule = arg;
    const struct sizes *d = &rule->d;
    const int heads = rule->by_value_head ? d->hv : d->hk;
    const struct span *span = &rule->c->store.spans[i / heads];
    const int head = i % heads, rep = head / d->hk;
    struct worker *w = &rule->c->workers[worker];
    if (rule->by_value_head)
        span_head(rule, w, span, head % d->hk, rep, rep + 1, rep == 0);
    else
        span_head(rule, w, span, head, 0, d->reps, true);
}

/* Tasks by value head are twice as many or more, but share keys: the owner may then not overwrite rows that others still read, as it would
 * where a span enters a new cell. */
static bool may_go_by_value_head(const struct store *s)
{
    for (int i = 0; i < s->n_spans; i++)
        if (s->spans[i].pos % GRID + s->spans[i].n > GRID)
            return false;
    return true;
}

void cpu_delta_rule(struct backend *b, int layer, struct buffer *qkv, struct buffer *gates, struct buffer *z, struct weight *norm, struct buffer *out)
{
    struct cpu *c = cpu_of(b);
    const struct sizes d = sizes_of(c);
    const int rows = c->store.n_rows;
    if (!cpu_ready(c) || !check_layer(c, layer) || !cpu_fits(c, "delta_rule: qkv", qkv, rows, (int64_t)d.channels) ||
        !cpu_fits(c, "delta_rule: gates", gates, rows, 2 * (int64_t)d.hv) || !cpu_fits(c, "delta_rule: z", z, rows, (int64_t)d.v_row) ||
        !cpu_fits(c, "delta_rule: out", out, rows, (int64_t)d.v_row))
        return;
    struct rule rule = {c, d, layer, false, qkv->data, gates->data, z->data, cpu_vector(c, "delta_rule: norm", norm, d.s, 0), out->data};
    if (!rule.norm)
        return;
    rule.by_value_head = d.reps > 1 && c->store.n_spans * d.hk < TASKS_PER_THREAD * c->threads && may_go_by_value_head(&c->store);
    cpu_share_out(c, c->store.n_spans * (rule.by_value_head ? d.hv : d.hk), false, rule_task, &rule);
}
