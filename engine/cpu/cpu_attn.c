/* The CPU backend's attention, spec/qwen35moe.md section 6.
 *
 * A sequence is cut at absolute positions into pages (GRID tokens) and parts (PART_PAGES pages). Within a part a running softmax takes in page after
 * page; the parts' results are merged in order. That is the arithmetic for every query, alone or in a prompt, so the parts may be computed one
 * after the other (many queries) or at once by several threads (few queries, long context) and the bits are the same. The query heads of a KV
 * head share its loads. */
#include "engine/cpu/cpu_impl.h"

#include <math.h>
#include <string.h>

enum { ROWS_PER_TASK = 4, SMALL_ROWS = 4, PART_TOKENS = PART_PAGES * GRID, ITEMS_PER_THREAD = 4 };

/* ---- scratch ---- */

static int partial_open(struct cpu *c, struct partial *p, size_t queries)
{
    p->m = cpu_scratch(c, queries, sizeof(float));
    p->s = cpu_scratch(c, queries, sizeof(float));
    p->acc = cpu_scratch(c, queries * (size_t)c->base.shape.head_dim, sizeof(float));
    return p->m && p->s && p->acc ? 0 : -1;
}

int cpu_attn_open(struct cpu *c)
{
    const struct backend_shape *sh = &c->base.shape;
    const size_t rows = (size_t)sh->max_rows;
    c->row_pos = cpu_scratch(c, rows, sizeof *c->row_pos);
    if (!c->row_pos)
        return -1;
    if (sh->n_kv_layers == 0)
        return 0;
    const size_t dim = (size_t)sh->head_dim, half = (size_t)sh->n_rot / 2;
    const int group = sh->n_heads / sh->n_kv_heads;
    const size_t queries = (size_t)(group > BLOCK_QUERIES ? group : BLOCK_QUERIES);
    c->block_rows = group > BLOCK_QUERIES ? 1 : BLOCK_QUERIES / group;
    c->rope_rate = cpu_scratch(c, half, sizeof *c->rope_rate);
    c->rope = cpu_scratch(c, rows * 2 * half, sizeof *c->rope);
    c->items = cpu_scratch(c, rows * (size_t)sh->n_kv_heads, sizeof *c->items);
    if (!c->rope_rate || !c->rope || !c->items || partial_open(c, &c->parts, SPLIT_QUERIES) || partial_open(c, &c->totals, SPLIT_QUERIES))
        return -1;
    for (size_t j = 0; j < half; j++)
        c->rope_rate[j] = pow((double)sh->rope_theta, -2.0 * (double)j / (double)sh->n_rot);
    for (int i = 0; i < c->threads; i++) {
        struct worker *w = &c->workers[i];
        w->q = cpu_scratch(c, queries * dim, sizeof(float));
        w->scores = cpu_scratch(c, queries * GRID, sizeof(float));
        w->limit = cpu_scratch(c, queries, sizeof(int));
        w->page = cpu_scratch(c, GRID * dim, sizeof(float));
        if (!w->q || !w->scores || !w->limit || !w->page || partial_open(c, &w->part, queries) || partial_open(c, &w->total, queries))
            return -1;
    }
    return 0;
}

static size_t q_head_floats(const struct backend_shape *sh)
{
    return (size_t)sh->head_dim * (sh->attn_gated ? 2 : 1);
}

static bool check_layer(struct cpu *c, int layer)
{
    if (layer >= 0 && layer < c->base.shape.n_kv_layers)
        return true;
    store_fail(&c->store, "attention: KV layer %d is outside the model's %d", layer, c->base.shape.n_kv_layers);
    return false;
}

/* ---- attn_store ---- */

struct attn_store {
    struct cpu *c;
    int layer;
    float *q, *k, *v;
    const float *q_norm, *k_norm;
};

/* Token t's key or value of one head, rounded to the KV type. */
static void append(struct cpu *c, const float *head, void *page_rows, int t)
{
    const struct backend_shape *sh = &c->base.shape;
    void *row = (char *)page_rows + (size_t)t * slot_kv_row_bytes(sh);
    switch (sh->kv_type) {
    case KV_F32:
        memcpy(row, head, (size_t)sh->head_dim * sizeof *head);
        break;
    case KV_F16:
        c->rows->f16_store(head, sh->head_dim, row);
        break;
    case KV_Q8_0:
        c->rows->q8_0_store(head, sh->head_dim, row);
        break;
    }
}

static void store_row(const struct attn_store *a, const struct span *span, int row)
{
    struct cpu *c = a->c;
    const struct backend_shape *sh = &c->base.shape;
    const int dim = sh->head_dim, half = sh->n_rot / 2, pos = c->row_pos[row];
    const float *cosines = c->rope + (size_t)row * (size_t)sh->n_rot;
    for (int h = 0; h < sh->n_heads; h++) {
        float *q = a->q + ((size_t)row * (size_t)sh->n_heads + (size_t)h) * q_head_floats(sh);
        c->rows->rms_norm(q, a->q_norm, sh->norm_eps, dim, q);
        c->rows->rope(q, cosines, cosines + half, half);
    }
    for (int h = 0; h < sh->n_kv_heads; h++) {
        const size_t at = ((size_t)row * (size_t)sh->n_kv_heads + (size_t)h) * (size_t)dim;
        const int32_t page = span->pages[pos / GRID];
        c->rows->rms_norm(a->k + at, a->k_norm, sh->norm_eps, dim, a->k + at);
        c->rows->rope(a->k + at, cosines, cosines + half, half);
        append(c, a->k + at, store_k(&c->store, page, a->layer, h), pos % GRID);
        append(c, a->v + at, store_v(&c->store, page, a->layer, h), pos % GRID);
    }
}

static const struct span *span_of(const struct store *s, int row)
{
    int i = 0;
    while (s->spans[i].row + s->spans[i].n <= row)
        i++;
    return &s->spans[i];
}

static void store_task(void *arg, int i, int worker)
{
    const struct attn_store *a = arg;
    const struct store *s = &a->c->store;
    const struct span *span = span_of(s, i * ROWS_PER_TASK);
    (void)worker;
    for (int row = i * ROWS_PER_TASK; row < s->n_rows && row < (i + 1) * ROWS_PER_TASK; row++) {
        while (row >= span->row + span->n)
            span++;
        store_row(a, span, row);
    }
}

void cpu_attn_store(struct backend *b, int layer, struct buffer *q, struct buffer *k, struct buffer *v, struct weight *q_norm, struct weight *k_norm)
{
    struct cpu *c = cpu_of(b);
    const struct backend_shape *sh = &b->shape;
    const int rows = c->store.n_rows;
    const int64_t kv_width = (int64_t)sh->n_kv_heads * sh->head_dim;
    if (!cpu_ready(c) || !check_layer(c, layer) || !cpu_fits(c, "attn_store: q", q, rows, sh->n_heads * (int64_t)q_head_floats(sh)) ||
        !cpu_fits(c, "attn_store: k", k, rows, kv_width) || !cpu_fits(c, "attn_store: v", v, rows, kv_width))
        return;
    struct attn_store a = {c, layer, q->data, k->data, v->data, cpu_vector(c, "attn_store: q_norm", q_norm, sh->head_dim, 0), NULL};
    a.k_norm = cpu_vector(c, "attn_store: k_norm", k_norm, sh->head_dim, 1);
    if (!a.q_norm || !a.k_norm)
        return;
    cpu_share_out(c, (rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK, rows <= SMALL_ROWS, store_task, &a);
}

/* ---- attn_mix ---- */

struct attn_mix {
    struct cpu *c;
    int layer, n_items;
    const float *q;
    float *out;
    /* split runs */
    int queries;           /* of all items */
    int first_part, parts; /* of this round */
};

static int group_of(const struct cpu *c)
{
    return c->base.shape.n_heads / c->base.shape.n_kv_heads;
}

static int last_pos(const struct attn_mix *a, const struct attn_item *item)
{
    return a->c->row_pos[item->row + item->n_rows - 1];
}

static int part_count(const struct attn_mix *a, const struct attn_item *item)
{
    return last_pos(a, item) / PART_TOKENS + 1;
}

/* Where query head g of the item's KV head stands in q. */
static const float *query(const struct attn_mix *a, const struct attn_item *item, int row, int g)
{
    const struct backend_shape *sh = &a->c->base.shape;
    const size_t head = (size_t)(item->row + row) * (size_t)sh->n_heads + (size_t)(item->kv_head * group_of(a->c) + g);
    return a->q + head * q_head_floats(sh);
}

static void gather_queries(const struct attn_mix *a, const struct attn_item *item, float *q)
{
    const size_t dim = (size_t)a->c->base.shape.head_dim;
    for (int row = 0; row < item->n_rows; row++)
        for (int g = 0; g < group_of(a->c); g++, q += dim)
            memcpy(q, query(a, item, row, g), dim * sizeof *q);
}

static void partial_clear(struct partial p, int queries, int dim)
{
    for (int i = 0; i < queries; i++) {
        p.m[i] = -INFINITY;
        p.s[i] = 0.0f;
    }
    memset(p.acc, 0, (size_t)queries * (size_t)dim * sizeof *p.acc);
}

static struct partial partial_at(struct partial p, int query, int dim)
{
    return (struct partial){p.m + query, p.s + query, p.acc + (size_t)query * (size_t)dim};
}

/* The first row of the item that sees position `pos`; rows before it lie before `pos`. */
static int first_row_at(const struct attn_mix *a, const struct attn_item *item, int pos)
{
    const int before = pos - a->c->row_pos[item->row];
    return before > 0 ? before : 0;
}

/* The running softmax of the item's queries (gathered in w->q) over one part. Queries that lie before the part are left cleared. */
static void run_part(const struct attn_mix *a, const struct attn_item *item, int part, struct worker *w, struct partial p)
{
    struct cpu *c = a->c;
    const struct backend_shape *sh = &c->base.shape;
    const int group = group_of(c), dim = sh->head_dim, last = last_pos(a, item);
    partial_clear(p, item->n_rows * group, dim);
    for (int page = part * PART_PAGES; page < (part + 1) * PART_PAGES && page * GRID <= last; page++) {
        const int32_t id = item->span->pages[page];
        const int row0 = first_row_at(a, item, page * GRID), first = row0 * group, n = item->n_rows * group - first;
        for (int i = 0; i < n; i++) {
            const int seen = c->row_pos[item->row + row0 + i / group] - page * GRID + 1;
            w->limit[i] = seen < GRID ? seen : GRID;
        }
        const struct partial at = partial_at(p, first, dim);
        struct attn_page work = {.q = w->q + (size_t)first * (size_t)dim,
                                 .nq = n,
                                 .n = dim,
                                 .k = store_k(&c->store, id, a->layer, item->kv_head),
                                 .v = store_v(&c->store, id, a->layer, item->kv_head),
                                 .format = slot_kv_format(sh),
                                 .limit = w->limit,
                                 .scale = sh->attn_scale,
                                 .m = at.m,
                                 .s = at.s,
                                 .acc = at.acc,
                                 .scores = w->scores,
                                 .room = w->page};
        if ((page + 1) * GRID <= last) {
            work.next_k = store_k(&c->store, item->span->pages[page + 1], a->layer, item->kv_head);
            work.next_v = store_v(&c->store, item->span->pages[page + 1], a->layer, item->kv_head);
        }
        c->rows->attn_page(&work);
    }
}

static void merge_part(const struct attn_mix *a, const struct attn_item *item, int part, struct partial total, struct partial p)
{
    const int group = group_of(a->c), dim = a->c->base.shape.head_dim;
    const int first = first_row_at(a, item, part * PART_TOKENS) * group;
    const struct partial to = partial_at(total, first, dim), from = partial_at(p, first, dim);
    a->c->rows->attn_merge(to.m, to.s, to.acc, from.m, from.s, from.acc, item->n_rows * group - first, dim);
}

static void finish(const struct attn_mix *a, const struct attn_item *item, struct partial total)
{
    const struct backend_shape *sh = &a->c->base.shape;
    const int group = group_of(a->c), dim = sh->head_dim;
    for (int row = 0; row < item->n_rows; row++) {
        for (int g = 0; g < group; g++) {
            const struct partial p = partial_at(total, row * group + g, dim);
            const float *gate = sh->attn_gated ? query(a, item, row, g) + dim : NULL;
            const size_t head = (size_t)(item->row + row) * (size_t)sh->n_heads + (size_t)(item->kv_head * group + g);
            a->c->rows->attn_finish(p.acc, p.s[0], gate, dim, a->out + head * (size_t)dim);
        }
    }
}

/* All parts of one item in turn. */
static void whole_task(void *arg, int i, int worker)
{
    const struct attn_mix *a = arg;
    const struct attn_item *item = &a->c->items[i];
    struct worker *w = &a->c->workers[worker];
    gather_queries(a, item, w->q);
    partial_clear(w->total, item->n_rows * group_of(a->c), a->c->base.shape.head_dim);
    for (int part = 0; part < part_count(a, item); part++) {
        run_part(a, item, part, w, w->part);
        merge_part(a, item, part, w->total, w->part);
    }
    finish(a, item, w->total);
}

/* Part i / n_items of this round of item i % n_items. */
static void part_task(void *arg, int i, int worker)
{
    const struct attn_mix *a = arg;
    const struct attn_item *item = &a->c->items[i % a->n_items];
    struct worker *w = &a->c->workers[worker];
    const int part = i / a->n_items;
    if (a->first_part + part >= part_count(a, item))
        return;
    gather_queries(a, item, w->q);
    run_part(a, item, a->first_part + part, w, partial_at(a->c->parts, part * a->queries + item->first_query, a->c->base.shape.head_dim));
}

/* Takes this round's parts of one item into its total, and finishes after the last. */
static void merge_task(void *arg, int i, int worker)
{
    const struct attn_mix *a = arg;
    const struct attn_item *item = &a->c->items[i];
    const int dim = a->c->base.shape.head_dim, count = part_count(a, item);
    const struct partial total = partial_at(a->c->totals, item->first_query, dim);
    (void)worker;
    if (a->first_part == 0)
        partial_clear(total, item->n_rows * group_of(a->c), dim);
    for (int part = 0; part < a->parts && a->first_part + part < count; part++)
        merge_part(a, item, a->first_part + part, total, partial_at(a->c->parts, part * a->queries + item->first_query, dim));
    if (a->first_part < count && a->first_part + a->parts >= count)
        finish(a, item, total);
}

/* Cuts the step's spans into items; returns how many parts the longest has. */
static int make_items(struct attn_mix *a)
{
    struct cpu *c = a->c;
    const int n_kv = c->base.shape.n_kv_heads, group = group_of(c);
    int most = 0;
    a->n_items = a->queries = 0;
    for (int i = 0; i < c->store.n_spans; i++) {
        const struct span *span = &c->store.spans[i];
        const int parts = (span->pos + span->n - 1) / PART_TOKENS + 1;
        most = parts > most ? parts : most;
        for (int r = 0; r < span->n; r += c->block_rows) {
            const int n = span->n - r < c->block_rows ? span->n - r : c->block_rows;
            for (int h = 0; h < n_kv; h++, a->queries += n * group)
                c->items[a->n_items++] = (struct attn_item){span, span->row + r, n, h, a->queries};
        }
    }
    return most;
}

void cpu_attn_mix(struct backend *b, int layer, struct buffer *q, struct buffer *out)
{
    struct cpu *c = cpu_of(b);
    const struct backend_shape *sh = &b->shape;
    const int rows = c->store.n_rows;
    if (!cpu_ready(c) || !check_layer(c, layer) || !cpu_fits(c, "attn_mix: q", q, rows, sh->n_heads * (int64_t)q_head_floats(sh)) ||
        !cpu_fits(c, "attn_mix: out", out, rows, (int64_t)sh->n_heads * sh->head_dim))
        return;
    struct attn_mix a = {.c = c, .layer = layer, .q = q->data, .out = out->data};
    const int most = make_items(&a);
    /* Few queries over a long context: the parts are the parallel work, as many at once as there is room for. */
    if (most > 1 && a.queries > 0 && a.n_items < ITEMS_PER_THREAD * c->threads && a.queries <= SPLIT_QUERIES / 4) {
        a.parts = SPLIT_QUERIES / a.queries;
        for (a.first_part = 0; a.first_part < most; a.first_part += a.parts) {
            const int left = most - a.first_part;
            cpu_share_out(c, a.n_items * (left < a.parts ? left : a.parts), false, part_task, &a);
            cpu_share_out(c, a.n_items, rows <= SMALL_ROWS, merge_task, &a);
        }
        return;
    }
    cpu_share_out(c, a.n_items, false, whole_task, &a);
}
