#include "engine/cpu/plain.h"

#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"

/* ---- shared by the files of this backend, see plain.h ---- */

bool plain_ready(const struct plain *p)
{
    return !p->store.error.text[0] && p->store.n_rows > 0;
}

bool plain_has(struct plain *p, const char *what, const struct buffer *buf, size_t rows, size_t columns)
{
    size_t need = rows * columns * sizeof(float);
    if (buf && buf->bytes >= need)
        return true;
    store_fail(&p->store, "%s: the buffer has %zu bytes, %zu are needed", what, buf ? buf->bytes : 0, need);
    return false;
}

bool plain_fits(struct plain *p, const char *what, const struct weight *w, int64_t n_in, int64_t n_out, int64_t n_mats)
{
    if (w && w->desc.n_in == n_in && w->desc.n_out == n_out && w->desc.n_mats == n_mats)
        return true;
    store_fail(&p->store, "%s: weight %s is %lld x %lld x %lld, expected %lld x %lld x %lld", what, w ? w->name : "(none)",
               w ? (long long)w->desc.n_in : 0, w ? (long long)w->desc.n_out : 0, w ? (long long)w->desc.n_mats : 0, (long long)n_in,
               (long long)n_out, (long long)n_mats);
    return false;
}

void *plain_alloc(struct plain *p, size_t n, size_t size)
{
    void *memory = alloc_array(n, size);
    if (!memory)
        store_fail(&p->store, "out of memory for %zu values in the plain backend: lower max_rows", n);
    return memory;
}

static void dequant_row(const struct weight *w, int64_t mat, int64_t o, float *dst)
{
    block_dequant(w->desc.type, weight_row(w, mat, o), dst, (size_t)w->desc.n_in);
}

float *plain_vector(struct plain *p, const struct weight *w)
{
    float *v = plain_alloc(p, (size_t)w->desc.n_in, sizeof *v);
    if (v)
        dequant_row(w, 0, 0, v);
    return v;
}

void plain_rms_norm(const double *x, const float *weight, size_t n, double eps, double *y)
{
    double squares = 0;
    for (size_t i = 0; i < n; i++)
        squares += x[i] * x[i];
    double scale = 1.0 / sqrt(squares / (double)n + eps);
    for (size_t i = 0; i < n; i++)
        y[i] = x[i] * scale * (double)weight[i];
}

double *plain_norm_rows(struct plain *p, const float *x, size_t n_rows, const struct weight *norm)
{
    const size_t n = (size_t)norm->desc.n_in;
    double *y = plain_alloc(p, n_rows * n, sizeof *y);
    float *weight = plain_vector(p, norm);
    if (!y || !weight) {
        free(y);
        free(weight);
        return NULL;
    }
    for (size_t r = 0; r < n_rows; r++) {
        for (size_t i = 0; i < n; i++)
            y[r * n + i] = (double)x[r * n + i];
        plain_rms_norm(y + r * n, weight, n, (double)p->base.shape.norm_eps, y + r * n);
    }
    free(weight);
    return y;
}

int plain_matmul(struct plain *p, const struct weight *w, int64_t mat, const double *x, size_t n_rows, double *y)
{
    const size_t n_in = (size_t)w->desc.n_in, n_out = (size_t)w->desc.n_out;
    float *row = plain_alloc(p, n_in, sizeof *row);
    if (!row)
        return -1;
    for (size_t o = 0; o < n_out; o++) {
        dequant_row(w, mat, (int64_t)o, row);
        for (size_t r = 0; r < n_rows; r++) {
            double sum = 0;
            for (size_t i = 0; i < n_in; i++)
                sum += (double)row[i] * x[r * n_in + i];
            y[r * n_out + o] = sum;
        }
    }
    free(row);
    return 0;
}

int plain_swiglu(struct plain *p, const struct weight *gate, const struct weight *up, const struct weight *down, int64_t mat, const double *x,
                 size_t n_rows, double *y)
{
    const size_t n = n_rows * (size_t)gate->desc.n_out;
    double *g = plain_alloc(p, n, sizeof *g), *u = plain_alloc(p, n, sizeof *u);
    int rc = -1;
    if (!g || !u || plain_matmul(p, gate, mat, x, n_rows, g) || plain_matmul(p, up, mat, x, n_rows, u))
        goto out;
    for (size_t i = 0; i < n; i++)
        g[i] = plain_silu(g[i]) * u[i];
    rc = plain_matmul(p, down, mat, g, n_rows, y);
out:
    free(g);
    free(u);
    return rc;
}

/* ---- memory ---- */

static void plain_close(struct backend *b)
{
    store_close(&plain_of(b)->store);
    free(b);
}

/* Nothing is queued here: every operation is done when its call returns. */
static int plain_sync(struct backend *b, struct error *err)
{
    struct store *s = &plain_of(b)->store;
    if (!s->error.text[0])
        return 0;
    error_set(err, "%s", s->error.text);
    s->error.text[0] = '\0';
    return -1;
}

static struct buffer *plain_buffer_new(struct backend *b, size_t bytes, struct error *err)
{
    return store_buffer_new(&plain_of(b)->store, bytes, err);
}

static void plain_buffer_free(struct backend *b, struct buffer *buf)
{
    store_buffer_free(&plain_of(b)->store, buf);
}

/* -1 with err when the backend has failed: what a snapshot or a reader would get is not what was asked for. The error stays for sync. */
static int check_not_failed(const struct store *s, struct error *err)
{
    return s->error.text[0] ? error_set(err, "%s", s->error.text) : 0;
}

static int check_range(const struct buffer *buf, size_t offset, size_t bytes, struct error *err)
{
    if (offset > buf->bytes || bytes > buf->bytes - offset)
        return error_set(err, "%zu bytes at %zu do not lie inside a buffer of %zu", bytes, offset, buf->bytes);
    return 0;
}

static int plain_read(struct backend *b, struct buffer *src, size_t offset, void *dst, size_t bytes, struct error *err)
{
    if (check_not_failed(&plain_of(b)->store, err) || check_range(src, offset, bytes, err))
        return -1;
    memcpy(dst, (const char *)src->data + offset, bytes);
    return 0;
}

static int plain_write(struct backend *b, struct buffer *dst, size_t offset, const void *src, size_t bytes, struct error *err)
{
    if (check_not_failed(&plain_of(b)->store, err) || check_range(dst, offset, bytes, err))
        return -1;
    memcpy((char *)dst->data + offset, src, bytes);
    return 0;
}

static struct weight *plain_weight_new(struct backend *b, const struct weight_desc *desc, struct error *err)
{
    return store_weight_new(&plain_of(b)->store, desc, err);
}

static int plain_pages_reserve(struct backend *b, int n_pages, struct error *err)
{
    return store_pages_reserve(&plain_of(b)->store, n_pages, err);
}

static int plain_states_reserve(struct backend *b, int n_states, struct error *err)
{
    return store_states_reserve(&plain_of(b)->store, n_states, err);
}

static size_t plain_page_bytes(const struct backend *b)
{
    return store_page_bytes(&((const struct plain *)b)->store);
}

static size_t plain_state_bytes(const struct backend *b)
{
    return store_state_bytes(&((const struct plain *)b)->store);
}

static void plain_state_reset(struct backend *b, int32_t state)
{
    store_state_reset(&plain_of(b)->store, state);
}

static void plain_state_copy(struct backend *b, int32_t dst, int32_t src)
{
    store_state_copy(&plain_of(b)->store, dst, src);
}

static void plain_page_copy(struct backend *b, int32_t dst, int32_t src)
{
    store_page_copy(&plain_of(b)->store, dst, src);
}

static size_t plain_state_packed_bytes(const struct backend *b, int pos)
{
    return store_state_packed_bytes(&((const struct plain *)b)->store, pos);
}

static int check_state(const struct store *s, int32_t state, int pos, struct error *err)
{
    if (check_not_failed(s, err))
        return -1;
    if (state < 0 || state >= s->n_states || pos < 0)
        return error_set(err, "state slot %d at position %d: there are %d slots and positions begin at 0", state, pos, s->n_states);
    return 0;
}

static int plain_state_save(struct backend *b, int32_t state, int pos, void *dst, struct error *err)
{
    struct store *s = &plain_of(b)->store;
    if (check_state(s, state, pos, err))
        return -1;
    store_state_save(s, state, pos, dst);
    return 0;
}

static int plain_state_load(struct backend *b, int32_t state, int pos, const void *src, struct error *err)
{
    struct store *s = &plain_of(b)->store;
    if (check_state(s, state, pos, err))
        return -1;
    store_state_load(s, state, pos, src);
    return 0;
}

static int check_page(const struct store *s, int32_t page, struct error *err)
{
    if (check_not_failed(s, err))
        return -1;
    if (page < 0 || page >= s->n_pages)
        return error_set(err, "KV page %d is outside the %d reserved", page, s->n_pages);
    return 0;
}

static int plain_page_save(struct backend *b, int32_t page, void *dst, struct error *err)
{
    struct store *s = &plain_of(b)->store;
    if (check_page(s, page, err))
        return -1;
    memcpy(dst, s->pages[page], store_page_bytes(s));
    return 0;
}

static int plain_page_load(struct backend *b, int32_t page, const void *src, struct error *err)
{
    struct store *s = &plain_of(b)->store;
    if (check_page(s, page, err))
        return -1;
    memcpy(s->pages[page], src, store_page_bytes(s));
    return 0;
}

/* ---- a step ---- */

static void plain_begin(struct backend *b, const int32_t *ids, int n_rows, const struct span *spans, int n_spans)
{
    store_begin(&plain_of(b)->store, ids, n_rows, spans, n_spans);
}

/* Section 5: h = token_embd[id], no scaling. */
static void plain_embed(struct backend *b, struct weight *w, struct buffer *out)
{
    struct plain *p = plain_of(b);
    const size_t rows = (size_t)p->store.n_rows, dim = (size_t)b->shape.n_embd;
    if (!plain_ready(p) || !plain_has(p, "embed: out", out, rows, dim) || !plain_fits(p, "embed", w, b->shape.n_embd, b->shape.n_vocab, 1))
        return;
    for (size_t r = 0; r < rows; r++)
        dequant_row(w, 0, p->store.ids[r], out->data + r * dim);
}

static void plain_project(struct backend *b, struct buffer *x, struct weight *norm, int n, struct weight *const w[], struct buffer *const out[])
{
    struct plain *p = plain_of(b);
    const size_t rows = (size_t)p->store.n_rows, dim = (size_t)b->shape.n_embd;
    if (!plain_ready(p) || !plain_has(p, "project: x", x, rows, dim) || !plain_fits(p, "project: norm", norm, b->shape.n_embd, 1, 1))
        return;
    double *xn = plain_norm_rows(p, x->data, rows, norm);
    for (int i = 0; xn && i < n; i++) {
        const size_t n_out = (size_t)w[i]->desc.n_out;
        if (!plain_fits(p, "project", w[i], b->shape.n_embd, w[i]->desc.n_out, 1) || !plain_has(p, "project: out", out[i], rows, n_out))
            break;
        double *y = plain_alloc(p, rows * n_out, sizeof *y);
        if (!y)
            break;
        if (plain_matmul(p, w[i], 0, xn, rows, y) == 0)
            for (size_t j = 0; j < rows * n_out; j++)
                out[i]->data[j] = (float)y[j];
        free(y);
    }
    free(xn);
}

static void plain_project_add(struct backend *b, struct buffer *x, struct weight *w, struct buffer *h)
{
    struct plain *p = plain_of(b);
    const size_t rows = (size_t)p->store.n_rows, n_in = (size_t)w->desc.n_in, n_out = (size_t)w->desc.n_out;
    if (!plain_ready(p) || !plain_has(p, "project_add: x", x, rows, n_in) || !plain_has(p, "project_add: h", h, rows, n_out))
        return;
    double *xd = plain_alloc(p, rows * n_in, sizeof *xd), *y = plain_alloc(p, rows * n_out, sizeof *y);
    if (!xd || !y)
        goto out;
    for (size_t i = 0; i < rows * n_in; i++)
        xd[i] = (double)x->data[i];
    if (plain_matmul(p, w, 0, xd, rows, y))
        goto out;
    for (size_t i = 0; i < rows * n_out; i++)
        h->data[i] = (float)((double)h->data[i] + y[i]);
out:
    free(xd);
    free(y);
}

/* Section 8, dense. */
static void plain_mlp(struct backend *b, struct buffer *h, struct weight *norm, struct weight *gate, struct weight *up, struct weight *down)
{
    struct plain *p = plain_of(b);
    const int dim = b->shape.n_embd;
    const size_t rows = (size_t)p->store.n_rows, n = rows * (size_t)dim;
    if (!plain_ready(p) || !plain_has(p, "mlp: h", h, rows, (size_t)dim) || !plain_fits(p, "mlp: norm", norm, dim, 1, 1) ||
        !plain_fits(p, "mlp: gate", gate, dim, gate->desc.n_out, 1) || !plain_fits(p, "mlp: up", up, dim, gate->desc.n_out, 1) ||
        !plain_fits(p, "mlp: down", down, gate->desc.n_out, dim, 1))
        return;
    double *x = plain_norm_rows(p, h->data, rows, norm), *y = plain_alloc(p, n, sizeof *y);
    if (x && y && plain_swiglu(p, gate, up, down, 0, x, rows, y) == 0)
        for (size_t i = 0; i < n; i++)
            h->data[i] = (float)((double)h->data[i] + y[i]);
    free(x);
    free(y);
}

/* Section 5, last two lines. */
static void plain_head(struct backend *b, struct buffer *h, struct weight *norm, struct weight *w, const int32_t *rows, int n, struct buffer *hidden,
                       struct buffer *logits)
{
    struct plain *p = plain_of(b);
    const size_t n_rows = (size_t)p->store.n_rows, dim = (size_t)b->shape.n_embd, vocab = (size_t)b->shape.n_vocab;
    if (!plain_ready(p) || !plain_has(p, "head: h", h, n_rows, dim) || !plain_fits(p, "head: norm", norm, b->shape.n_embd, 1, 1))
        return;
    if (hidden && !plain_has(p, "head: hidden", hidden, n_rows, dim))
        return;
    if (n > 0 && (!plain_fits(p, "head", w, b->shape.n_embd, b->shape.n_vocab, 1) || !plain_has(p, "head: logits", logits, (size_t)n, vocab)))
        return;
    double *hn = plain_norm_rows(p, h->data, n_rows, norm), *y = plain_alloc(p, vocab, sizeof *y);
    if (!hn || !y)
        goto out;
    for (int i = 0; i < n; i++) {
        if (rows[i] < 0 || rows[i] >= p->store.n_rows) {
            store_fail(&p->store, "head: row %d is outside the step's %d", rows[i], p->store.n_rows);
            goto out;
        }
        if (plain_matmul(p, w, 0, hn + (size_t)rows[i] * dim, 1, y))
            goto out;
        for (size_t o = 0; o < vocab; o++)
            logits->data[(size_t)i * vocab + o] = (float)y[o];
    }
    for (size_t i = 0; hidden && i < n_rows * dim; i++)
        hidden->data[i] = (float)hn[i];
out:
    free(hn);
    free(y);
}

/* Section 9: h = eh_proj * [RMSNorm(embedding) ; RMSNorm(hidden)]. */
static void plain_mtp_join(struct backend *b, struct buffer *embedding, struct buffer *hidden, struct weight *enorm, struct weight *hnorm,
                           struct weight *eh_proj, struct buffer *h)
{
    struct plain *p = plain_of(b);
    const int dim = b->shape.n_embd;
    const size_t rows = (size_t)p->store.n_rows, d = (size_t)dim;
    if (!plain_ready(p) || !plain_has(p, "mtp_join: embedding", embedding, rows, d) || !plain_has(p, "mtp_join: hidden", hidden, rows, d) ||
        !plain_has(p, "mtp_join: h", h, rows, d) || !plain_fits(p, "mtp_join: enorm", enorm, dim, 1, 1) ||
        !plain_fits(p, "mtp_join: hnorm", hnorm, dim, 1, 1) || !plain_fits(p, "mtp_join: eh_proj", eh_proj, 2 * (int64_t)dim, dim, 1))
        return;
    double *e = plain_norm_rows(p, embedding->data, rows, enorm), *f = plain_norm_rows(p, hidden->data, rows, hnorm);
    double *both = plain_alloc(p, rows * 2 * d, sizeof *both), *y = plain_alloc(p, rows * d, sizeof *y);
    if (!e || !f || !both || !y)
        goto out;
    for (size_t r = 0; r < rows; r++) {
        memcpy(both + r * 2 * d, e + r * d, d * sizeof *e);
        memcpy(both + r * 2 * d + d, f + r * d, d * sizeof *f);
    }
    if (plain_matmul(p, eh_proj, 0, both, rows, y))
        goto out;
    for (size_t i = 0; i < rows * d; i++)
        h->data[i] = (float)y[i];
out:
    free(e);
    free(f);
    free(both);
    free(y);
}

static const struct backend_ops plain_ops = {
    .name = "cpu-plain",
    .close = plain_close,
    .sync = plain_sync,
    .buffer_new = plain_buffer_new,
    .buffer_free = plain_buffer_free,
    .read = plain_read,
    .write = plain_write,
    .weight_new = plain_weight_new,
    .pages_reserve = plain_pages_reserve,
    .states_reserve = plain_states_reserve,
    .page_bytes = plain_page_bytes,
    .state_bytes = plain_state_bytes,
    .state_reset = plain_state_reset,
    .state_copy = plain_state_copy,
    .page_copy = plain_page_copy,
    .state_packed_bytes = plain_state_packed_bytes,
    .state_save = plain_state_save,
    .state_load = plain_state_load,
    .page_save = plain_page_save,
    .page_load = plain_page_load,
    .begin = plain_begin,
    .embed = plain_embed,
    .project = plain_project,
    .project_add = plain_project_add,
    .attn_store = plain_attn_store,
    .attn_mix = plain_attn_mix,
    .delta_conv = plain_delta_conv,
    .delta_rule = plain_delta_rule,
    .mlp = plain_mlp,
    .moe = plain_moe,
    .head = plain_head,
    .mtp_join = plain_mtp_join,
};

struct backend *backend_open_plain(const struct backend_shape *shape, struct error *err)
{
    struct plain *p = alloc_array(1, sizeof *p);
    if (!p) {
        error_set(err, "out of memory for the plain backend");
        return NULL;
    }
    p->base.ops = &plain_ops;
    p->base.shape = *shape;
    if (store_open(&p->store, &p->base.shape, err)) {
        free(p);
        return NULL;
    }
    return &p->base;
}
