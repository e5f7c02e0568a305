/* The CPU backend's products with weight matrices, and the operations that are little more than that. */
#include "engine/cpu/cpu_impl.h"

#include <string.h>

enum {
    TASKS_PER_THREAD = 8, /* enough that no thread waits long for the last one */
    TILE_MIN = MATMUL_ROWS,
    TILE_MAX = 512,  /* weight rows of one task */
    ROW_BLOCK = 128, /* activation rows of one task */
    ROWS_PER_TASK = 4,
    SMALL_FLOATS = 16384, /* f32 work below this is done by the calling thread alone */
};

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

void cpu_row_table(float **rows, float *base, int n_rows, int64_t width)
{
    for (int r = 0; r < n_rows; r++)
        rows[r] = base + (int64_t)r * width;
}

/* ---- scratch ---- */

static int64_t whole_blocks(int64_t n)
{
    return (n + 255) / 256 * 256;
}

int cpu_mat_open(struct cpu *c)
{
    const struct backend_shape *sh = &c->base.shape;
    const size_t rows = (size_t)sh->max_rows;
    int64_t width = 2 * (int64_t)sh->n_embd; /* mtp_join */
    if (sh->n_kv_layers > 0)
        width = larger(width, (int64_t)sh->n_heads * sh->head_dim);
    if (sh->n_delta_layers > 0)
        width = larger(width, (int64_t)sh->delta_v_heads * sh->delta_dim);
    width = whole_blocks(width);
    c->act_width = (size_t)width;
    c->normed = cpu_scratch(c, rows * c->act_width, sizeof *c->normed);
    if (!c->normed)
        return -1;
    for (int kind = 0; kind < ACT_KINDS; kind++) {
        c->act[kind] = cpu_scratch(c, rows, act_row_bytes((enum act_kind)kind, width));
        c->act_rows[kind] = cpu_scratch(c, rows, sizeof *c->act_rows[kind]);
        if (!c->act[kind] || !c->act_rows[kind])
            return -1;
    }
    for (int i = 0; i < 4; i++) {
        c->out_rows[i] = cpu_scratch(c, rows, sizeof *c->out_rows[i]);
        if (!c->out_rows[i])
            return -1;
    }
    c->vector_room = width;
    for (int i = 0; i < 3; i++) {
        c->vectors[i] = cpu_scratch(c, (size_t)width, sizeof(float));
        if (!c->vectors[i])
            return -1;
    }
    if (sh->dense_ff > 0)
        return cpu_mid_open(c, &c->mid, sh->max_rows < FFN_ROWS ? sh->max_rows : FFN_ROWS, sh->dense_ff);
    return 0;
}

int cpu_mid_open(struct cpu *c, struct mid *m, int n_rows, int width)
{
    const size_t rows = (size_t)n_rows;
    const int64_t blocks = whole_blocks(width);
    size_t act = 0;
    for (int kind = 0; kind < ACT_KINDS; kind++) {
        const size_t bytes = act_row_bytes((enum act_kind)kind, blocks);
        act = bytes > act ? bytes : act;
    }
    m->n_rows = n_rows;
    m->width = width;
    m->rows = cpu_scratch(c, rows, sizeof *m->rows);
    m->up_rows = cpu_scratch(c, rows, sizeof *m->up_rows);
    m->act_rows = cpu_scratch(c, rows, sizeof *m->act_rows);
    m->act = cpu_scratch(c, rows, act);
    float *values = cpu_scratch(c, rows * (size_t)blocks, sizeof(float)), *up = cpu_scratch(c, rows * (size_t)blocks, sizeof(float));
    if (!m->rows || !m->up_rows || !m->act_rows || !m->act || !values || !up)
        return -1;
    cpu_row_table(m->rows, values, n_rows, blocks);
    cpu_row_table(m->up_rows, up, n_rows, blocks);
    return 0;
}

/* ---- activations ---- */

struct activate {
    struct cpu *c;
    const float *x;
    const int32_t *index;
    float *const *from; /* instead of x */
    int n_rows, width;
    const float *norm;
    unsigned kinds;
    struct mid *mid; /* the target, instead of c->act_rows */
    float *normed;
};

static void activate_row(const struct activate *a, int r)
{
    struct cpu *c = a->c;
    const float *x = a->from ? a->from[r] : a->x + (size_t)(a->index ? a->index[r] : r) * (size_t)a->width;
    if (a->norm) {
        float *y = a->normed + (size_t)r * (size_t)a->width;
        c->rows->rms_norm(x, a->norm, c->base.shape.norm_eps, a->width, y);
        x = y;
    }
    for (unsigned kind = 0; kind < ACT_KINDS; kind++) {
        if (!(a->kinds & 1u << kind))
            continue;
        const size_t bytes = act_row_bytes((enum act_kind)kind, a->width);
        uint8_t *row = (a->mid ? a->mid->act : c->act[kind]) + (size_t)r * bytes;
        (a->mid ? a->mid->act_rows : c->act_rows[kind])[r] = row;
        act_quantise(c->isa, (enum act_kind)kind, x, a->width, row);
    }
}

static void activate_task(void *arg, int i, int worker)
{
    const struct activate *a = arg;
    (void)worker;
    for (int r = i * ROWS_PER_TASK; r < a->n_rows && r < (i + 1) * ROWS_PER_TASK; r++)
        activate_row(a, r);
}

static void activate(struct activate *a)
{
    const bool small = (int64_t)a->n_rows * a->width <= SMALL_FLOATS;
    cpu_share_out(a->c, (a->n_rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK, small, activate_task, a);
}

void cpu_activate(struct cpu *c, const float *x, const int32_t *index, int n_rows, int width, const float *norm, unsigned kinds)
{
    activate(&(struct activate){.c = c, .x = x, .index = index, .n_rows = n_rows, .width = width, .norm = norm, .kinds = kinds, .normed = c->normed});
}

void cpu_norm_rows(struct cpu *c, const float *x, int n_rows, const float *norm, float *y)
{
    activate(&(struct activate){.c = c, .x = x, .n_rows = n_rows, .width = c->base.shape.n_embd, .norm = norm, .normed = y});
}

void cpu_mid_activate(struct cpu *c, struct mid *m, int n_rows, enum act_kind kind)
{
    activate(&(struct activate){.c = c, .from = m->rows, .n_rows = n_rows, .width = m->width, .kinds = 1u << kind, .mid = m});
}

/* ---- products ---- */

struct mat_run {
    struct cpu *c;
    const struct mat_job *jobs;
    int n_jobs;
};

static void mat_tile(struct cpu *c, const struct mat_job *job, int i, void *scratch)
{
    const int64_t o0 = (int64_t)(i / job->row_blocks) * job->tile, n_out = job->w->desc.n_out;
    const int64_t o1 = o0 + job->tile < n_out ? o0 + job->tile : n_out;
    const int r0 = i % job->row_blocks * job->row_block;
    const int n = job->n_rows - r0 < job->row_block ? job->n_rows - r0 : job->row_block;
    matmul(c->isa, job->w, job->mat, o0, o1, job->x + r0, job->y + r0, n, job->add, scratch);
    if (!job->up)
        return;
    matmul(c->isa, job->up, job->mat, o0, o1, job->up_x + r0, job->up_y + r0, n, false, scratch);
    for (int r = r0; r < r0 + n; r++)
        c->rows->silu_mul(job->y[r] + o0, job->up_y[r] + o0, (int)(o1 - o0), job->y[r] + o0);
}

/* Task i belongs to the last job whose first task is not after it. */
static void mat_task(void *arg, int i, int worker)
{
    const struct mat_run *run = arg;
    int low = 0, high = run->n_jobs - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (run->jobs[middle].first_task <= i)
            low = middle;
        else
            high = middle - 1;
    }
    mat_tile(run->c, &run->jobs[low], i - run->jobs[low].first_task, run->c->workers[worker].matmul);
}

void cpu_mat_run(struct cpu *c, struct mat_job *jobs, int n_jobs)
{
    int64_t work = 0; /* weight rows, once per block of activation rows */
    for (int i = 0; i < n_jobs; i++) {
        jobs[i].row_blocks = (jobs[i].n_rows + ROW_BLOCK - 1) / ROW_BLOCK;
        jobs[i].row_block = (jobs[i].n_rows + jobs[i].row_blocks - 1) / jobs[i].row_blocks;
        work += jobs[i].w->desc.n_out * (jobs[i].up ? 2 : 1) * jobs[i].row_blocks;
    }
    int64_t tile = work / (TASKS_PER_THREAD * (int64_t)c->threads) / TILE_MIN * TILE_MIN;
    tile = tile < TILE_MIN ? TILE_MIN : tile > TILE_MAX ? TILE_MAX : tile;
    int tasks = 0;
    for (int i = 0; i < n_jobs; i++) {
        const int64_t own = jobs[i].up ? larger(tile / 2 / TILE_MIN * TILE_MIN, TILE_MIN) : tile;
        jobs[i].tile = (int)own;
        jobs[i].first_task = tasks;
        tasks += (int)((jobs[i].w->desc.n_out + own - 1) / own) * jobs[i].row_blocks;
    }
    struct mat_run run = {c, jobs, n_jobs};
    cpu_share_out(c, tasks, false, mat_task, &run);
}

/* ---- operations ---- */

struct embed {
    struct cpu *c;
    const struct weight *w;
    float *out;
};

static void embed_task(void *arg, int i, int worker)
{
    const struct embed *e = arg;
    const struct store *s = &e->c->store;
    const size_t dim = (size_t)e->c->base.shape.n_embd;
    (void)worker;
    for (int r = i * ROWS_PER_TASK; r < s->n_rows && r < (i + 1) * ROWS_PER_TASK; r++)
        block_dequant(e->w->desc.type, weight_row(e->w, 0, s->ids[r]), e->out + (size_t)r * dim, dim);
}

void cpu_embed(struct backend *b, struct weight *w, struct buffer *out)
{
    struct cpu *c = cpu_of(b);
    const int rows = c->store.n_rows;
    if (!cpu_ready(c) || !cpu_shaped(c, "embed", w, b->shape.n_embd, b->shape.n_vocab, 1) || !cpu_fits(c, "embed", out, rows, b->shape.n_embd))
        return;
    struct embed e = {c, w, out->data};
    cpu_share_out(c, (rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK, (int64_t)rows * b->shape.n_embd <= SMALL_FLOATS, embed_task, &e);
}

void cpu_project(struct backend *b, struct buffer *x, struct weight *norm, int n, struct weight *const w[], struct buffer *const out[])
{
    struct cpu *c = cpu_of(b);
    const int rows = c->store.n_rows, dim = b->shape.n_embd;
    struct mat_job jobs[4] = {0};
    unsigned kinds = 0;
    if (!cpu_ready(c) || !cpu_fits(c, "project: x", x, rows, dim))
        return;
    if (n < 1 || n > 4) {
        store_fail(&c->store, "project: %d matrices, but 1 to 4 go together", n);
        return;
    }
    const float *scale = cpu_vector(c, "project: norm", norm, dim, 0);
    if (!scale)
        return;
    for (int i = 0; i < n; i++) {
        if (!cpu_shaped(c, "project", w[i], dim, 0, 1) || !cpu_fits(c, "project: out", out[i], rows, w[i]->desc.n_out))
            return;
        kinds |= cpu_kind_bit(w[i]);
    }
    cpu_activate(c, x->data, NULL, rows, dim, scale, kinds);
    for (int i = 0; i < n; i++) {
        cpu_row_table(c->out_rows[i], out[i]->data, rows, w[i]->desc.n_out);
        jobs[i] = (struct mat_job){.w = w[i], .x = c->act_rows[cpu_kind(w[i])], .y = c->out_rows[i], .n_rows = rows};
    }
    cpu_mat_run(c, jobs, n);
}

/* y [n_rows][n_out(w)] (+)= w * x, x [n_rows][n_in(w)] or its rows index[..]. */
static void product(struct cpu *c, const float *x, const int32_t *index, int n_rows, const float *norm, const struct weight *w, bool add, float *y)
{
    cpu_activate(c, x, index, n_rows, (int)w->desc.n_in, norm, cpu_kind_bit(w));
    cpu_row_table(c->out_rows[0], y, n_rows, w->desc.n_out);
    struct mat_job job = {.w = w, .x = c->act_rows[cpu_kind(w)], .y = c->out_rows[0], .n_rows = n_rows, .add = add};
    cpu_mat_run(c, &job, 1);
}

void cpu_project_add(struct backend *b, struct buffer *x, struct weight *w, struct buffer *h)
{
    struct cpu *c = cpu_of(b);
    const int rows = c->store.n_rows;
    if (!cpu_ready(c) || !cpu_shaped(c, "project_add", w, 0, 0, 1) || !cpu_fits(c, "project_add: x", x, rows, w->desc.n_in) ||
        !cpu_fits(c, "project_add: h", h, rows, w->desc.n_out))
        return;
    if (w->desc.n_in > (int64_t)c->act_width) {
        store_fail(&c->store, "project_add: weight %s has rows of %lld values, more than any of this model's shape", w->name,
                   (long long)w->desc.n_in);
        return;
    }
    product(c, x->data, NULL, rows, NULL, w, true, h->data);
}

void cpu_mlp(struct backend *b, struct buffer *h, struct weight *norm, struct weight *gate, struct weight *up, struct weight *down)
{
    struct cpu *c = cpu_of(b);
    const int rows = c->store.n_rows, dim = b->shape.n_embd, ff = b->shape.dense_ff;
    if (!cpu_ready(c) || !cpu_fits(c, "mlp: h", h, rows, dim) || !cpu_shaped(c, "mlp: gate", gate, dim, ff, 1) ||
        !cpu_shaped(c, "mlp: up", up, dim, ff, 1) || !cpu_shaped(c, "mlp: down", down, ff, dim, 1))
        return;
    if (ff < 1) {
        store_fail(&c->store, "mlp: weight %s, but the model's shape has no dense MLP", gate->name);
        return;
    }
    const float *scale = cpu_vector(c, "mlp: norm", norm, dim, 0);
    if (!scale)
        return;
    for (int r0 = 0; r0 < rows; r0 += c->mid.n_rows) {
        const int n = rows - r0 < c->mid.n_rows ? rows - r0 : c->mid.n_rows;
        float *part = h->data + (size_t)r0 * (size_t)dim;
        cpu_activate(c, part, NULL, n, dim, scale, cpu_kind_bit(gate) | cpu_kind_bit(up));
        struct mat_job in = {.w = gate,
                             .up = up,
                             .x = c->act_rows[cpu_kind(gate)],
                             .up_x = c->act_rows[cpu_kind(up)],
                             .y = c->mid.rows,
                             .up_y = c->mid.up_rows,
                             .n_rows = n};
        cpu_mat_run(c, &in, 1);
        cpu_mid_activate(c, &c->mid, n, cpu_kind(down));
        cpu_row_table(c->out_rows[0], part, n, dim);
        struct mat_job out = {.w = down, .x = c->mid.act_rows, .y = c->out_rows[0], .n_rows = n, .add = true};
        cpu_mat_run(c, &out, 1);
    }
}

void cpu_head(struct backend *b, struct buffer *h, struct weight *norm, struct weight *w, const int32_t *rows, int n, struct buffer *hidden,
              struct buffer *logits)
{
    struct cpu *c = cpu_of(b);
    const int all = c->store.n_rows, dim = b->shape.n_embd;
    if (!cpu_ready(c) || !cpu_fits(c, "head: h", h, all, dim))
        return;
    if (n < 0 || n > b->shape.max_logit_rows || n > b->shape.max_rows) {
        store_fail(&c->store, "head: %d rows of logits, but at most %d fit", n, b->shape.max_logit_rows);
        return;
    }
    for (int i = 0; i < n; i++) {
        if (rows[i] >= 0 && rows[i] < all)
            continue;
        store_fail(&c->store, "head: row %d is outside the step's %d", rows[i], all);
        return;
    }
    const float *scale = cpu_vector(c, "head: norm", norm, dim, 0);
    if (!scale || (hidden && !cpu_fits(c, "head: hidden", hidden, all, dim)))
        return;
    if (n > 0 && (!cpu_shaped(c, "head", w, dim, b->shape.n_vocab, 1) || !cpu_fits(c, "head: logits", logits, n, b->shape.n_vocab)))
        return;
    if (hidden)
        cpu_norm_rows(c, h->data, all, scale, hidden->data);
    if (n == 0)
        return;
    if (hidden)
        product(c, hidden->data, rows, n, NULL, w, false, logits->data);
    else
        product(c, h->data, rows, n, scale, w, false, logits->data);
}

void cpu_mtp_join(struct backend *b, struct buffer *embedding, struct buffer *hidden, struct weight *enorm, struct weight *hnorm,
                  struct weight *eh_proj, struct buffer *h)
{
    struct cpu *c = cpu_of(b);
    const int rows = c->store.n_rows, dim = b->shape.n_embd;
    if (!cpu_ready(c) || !cpu_fits(c, "mtp_join: embedding", embedding, rows, dim) || !cpu_fits(c, "mtp_join: hidden", hidden, rows, dim) ||
        !cpu_fits(c, "mtp_join: h", h, rows, dim) || !cpu_shaped(c, "mtp_join: eh_proj", eh_proj, 2 * (int64_t)dim, dim, 1))
        return;
    const float *scales[2] = {cpu_vector(c, "mtp_join: enorm", enorm, dim, 0), cpu_vector(c, "mtp_join: hnorm", hnorm, dim, 1)};
    if (!scales[0] || !scales[1])
        return;
    for (int r = 0; r < rows; r++) {
        float *joined = c->normed + (size_t)r * 2 * (size_t)dim;
        c->rows->rms_norm(embedding->data + (size_t)r * (size_t)dim, scales[0], b->shape.norm_eps, dim, joined);
        c->rows->rms_norm(hidden->data + (size_t)r * (size_t)dim, scales[1], b->shape.norm_eps, dim, joined + dim);
    }
    product(c, c->normed, NULL, rows, NULL, eh_proj, false, h->data);
}
