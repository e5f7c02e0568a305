/* The CPU backend: a thread pool and int8 dot products. See cpu_impl.h for its parts. */
#include "engine/cpu/cpu_impl.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"

/* ---- shared by the parts ---- */

void *cpu_scratch(struct cpu *c, size_t n, size_t size)
{
    void *p = alloc_lines(n, size);
    if (!p || alloc_grow(&c->blocks, &c->cap_blocks, c->n_blocks + 1, sizeof *c->blocks)) {
        free(p);
        return NULL;
    }
    c->blocks[c->n_blocks++] = p;
    return p;
}

bool cpu_fits(struct cpu *c, const char *what, const struct buffer *buf, int64_t n_rows, int64_t width)
{
    const size_t need = (size_t)n_rows * (size_t)width * sizeof(float);
    if (buf && buf->bytes >= need)
        return true;
    store_fail(&c->store, "%s: the buffer has %zu bytes, but %lld rows of %lld f32 need %zu", what, buf ? buf->bytes : 0, (long long)n_rows,
               (long long)width, need);
    return false;
}

bool cpu_shaped(struct cpu *c, const char *what, const struct weight *w, int64_t n_in, int64_t n_out, int64_t n_mats)
{
    if (w && (n_in == 0 || w->desc.n_in == n_in) && (n_out == 0 || w->desc.n_out == n_out) && w->desc.n_mats == n_mats)
        return true;
    store_fail(&c->store, "%s: weight %s is %lld x %lld x %lld, expected %lld x %lld x %lld (0 = any)", what, w ? w->name : "(none)",
               w ? (long long)w->desc.n_in : 0, w ? (long long)w->desc.n_out : 0, w ? (long long)w->desc.n_mats : 0, (long long)n_in,
               (long long)n_out, (long long)n_mats);
    return false;
}

const float *cpu_vector(struct cpu *c, const char *what, const struct weight *w, int64_t n, int place)
{
    if (!cpu_shaped(c, what, w, n, 1, 1))
        return NULL;
    if (w->desc.type == BLOCK_F32 && (uintptr_t)w->desc.data % sizeof(float) == 0)
        return (const float *)(const void *)w->desc.data;
    if (n > c->vector_room) {
        store_fail(&c->store, "%s: weight %s has %lld values, more than the model's widest vector", what, w->name, (long long)n);
        return NULL;
    }
    block_dequant(w->desc.type, w->desc.data, c->vectors[place], (size_t)n);
    return c->vectors[place];
}

void cpu_share_out(struct cpu *c, int n, bool small, void (*task)(void *arg, int i, int worker), void *arg)
{
    if (!small && n > 1) {
        pool_run(c->pool, n, task, arg);
        return;
    }
    for (int i = 0; i < n; i++)
        task(arg, i, 0);
}

/* ---- memory ---- */

static void op_close(struct backend *b)
{
    struct cpu *c = cpu_of(b);
    pool_close(c->pool);
    for (int i = 0; c->workers && i < c->threads; i++)
        free(c->workers[i].matmul);
    for (size_t i = 0; i < c->n_blocks; i++)
        free(c->blocks[i]);
    free(c->blocks);
    store_close(&c->store);
    free(c);
}

/* Nothing is queued: every operation is done when its call returns. */
static int op_sync(struct backend *b, struct error *err)
{
    struct store *s = &cpu_of(b)->store;
    if (!s->error.text[0])
        return 0;
    error_set(err, "%s", s->error.text);
    s->error.text[0] = '\0';
    return -1;
}

static struct buffer *op_buffer_new(struct backend *b, size_t bytes, struct error *err)
{
    return store_buffer_new(&cpu_of(b)->store, bytes, err);
}

static void op_buffer_free(struct backend *b, struct buffer *buf)
{
    store_buffer_free(&cpu_of(b)->store, buf);
}

/* -1 with err after a failure: what a reader or a snapshot would get is not what was asked for. The error stays for sync. */
static int check_not_failed(const struct store *s, struct error *err)
{
    return s->error.text[0] ? error_set(err, "%s", s->error.text) : 0;
}

static int check_range(const struct buffer *buf, size_t offset, size_t bytes, struct error *err)
{
    if (offset <= buf->bytes && bytes <= buf->bytes - offset)
        return 0;
    return error_set(err, "buffer: %zu bytes at %zu lie outside its %zu", bytes, offset, buf->bytes);
}

static int op_read(struct backend *b, struct buffer *src, size_t offset, void *dst, size_t bytes, struct error *err)
{
    if (check_not_failed(&cpu_of(b)->store, err) || check_range(src, offset, bytes, err))
        return -1;
    memcpy(dst, (const char *)src->data + offset, bytes);
    return 0;
}

static int op_write(struct backend *b, struct buffer *dst, size_t offset, const void *src, size_t bytes, struct error *err)
{
    if (check_not_failed(&cpu_of(b)->store, err) || check_range(dst, offset, bytes, err))
        return -1;
    memcpy((char *)dst->data + offset, src, bytes);
    return 0;
}

/* The products' scratch follows the widest weight. */
static struct weight *op_weight_new(struct backend *b, const struct weight_desc *desc, struct error *err)
{
    struct cpu *c = cpu_of(b);
    struct weight *w = store_weight_new(&c->store, desc, err);
    if (!w)
        return NULL;
    const size_t bytes = matmul_scratch_bytes(w);
    for (int i = 0; i < c->threads && bytes > c->matmul_bytes; i++) {
        void *p = alloc_lines(bytes, 1);
        if (!p) {
            error_set(err, "out of memory for the scratch of tensor %s", w->name);
            return NULL;
        }
        free(c->workers[i].matmul);
        c->workers[i].matmul = p;
    }
    if (bytes > c->matmul_bytes)
        c->matmul_bytes = bytes;
    return w;
}

static int op_pages_reserve(struct backend *b, int n, struct error *err)
{
    return store_pages_reserve(&cpu_of(b)->store, n, err);
}

static int op_states_reserve(struct backend *b, int n, struct error *err)
{
    return store_states_reserve(&cpu_of(b)->store, n, err);
}

static size_t op_page_bytes(const struct backend *b)
{
    return store_page_bytes(&((const struct cpu *)b)->store);
}

static size_t op_state_bytes(const struct backend *b)
{
    return store_state_bytes(&((const struct cpu *)b)->store);
}

static void op_state_reset(struct backend *b, int32_t state)
{
    store_state_reset(&cpu_of(b)->store, state);
}

static void op_state_copy(struct backend *b, int32_t dst, int32_t src)
{
    store_state_copy(&cpu_of(b)->store, dst, src);
}

static void op_page_copy(struct backend *b, int32_t dst, int32_t src)
{
    store_page_copy(&cpu_of(b)->store, dst, src);
}

static size_t op_state_packed_bytes(const struct backend *b, int pos)
{
    return store_state_packed_bytes(&((const struct cpu *)b)->store, pos);
}

static int check_state(const struct cpu *c, int32_t state, int pos, struct error *err)
{
    if (check_not_failed(&c->store, err))
        return -1;
    if (state < 0 || state >= c->store.n_states)
        return error_set(err, "state slot %d is outside the %d reserved", state, c->store.n_states);
    if (pos < 0)
        return error_set(err, "state slot %d: position %d is negative", state, pos);
    return 0;
}

static int op_state_save(struct backend *b, int32_t state, int pos, void *dst, struct error *err)
{
    if (check_state(cpu_of(b), state, pos, err))
        return -1;
    store_state_save(&cpu_of(b)->store, state, pos, dst);
    return 0;
}

static int op_state_load(struct backend *b, int32_t state, int pos, const void *src, struct error *err)
{
    if (check_state(cpu_of(b), state, pos, err))
        return -1;
    store_state_load(&cpu_of(b)->store, state, pos, src);
    return 0;
}

static int check_page(const struct cpu *c, int32_t page, struct error *err)
{
    if (check_not_failed(&c->store, err))
        return -1;
    if (page < 0 || page >= c->store.n_pages)
        return error_set(err, "KV page %d is outside the %d reserved", page, c->store.n_pages);
    return 0;
}

static int op_page_save(struct backend *b, int32_t page, void *dst, struct error *err)
{
    struct store *s = &cpu_of(b)->store;
    if (check_page(cpu_of(b), page, err))
        return -1;
    memcpy(dst, s->pages[page], store_page_bytes(s));
    return 0;
}

static int op_page_load(struct backend *b, int32_t page, const void *src, struct error *err)
{
    struct store *s = &cpu_of(b)->store;
    if (check_page(cpu_of(b), page, err))
        return -1;
    memcpy(s->pages[page], src, store_page_bytes(s));
    return 0;
}

/* ---- a step ---- */

/* Positions and rotation angles of the step's rows, once for all layers. The angle is formed in double precision: at position 262,143 an f32 one
 * would be off by a hundredth of a turn. */
static void op_begin(struct backend *b, const int32_t *ids, int n_rows, const struct span *spans, int n_spans)
{
    struct cpu *c = cpu_of(b);
    store_begin(&c->store, ids, n_rows, spans, n_spans);
    const int half = b->shape.n_kv_layers > 0 ? b->shape.n_rot / 2 : 0;
    for (int i = 0; i < c->store.n_spans; i++)
        for (int t = 0; t < c->store.spans[i].n; t++)
            c->row_pos[c->store.spans[i].row + t] = c->store.spans[i].pos + t;
    for (int r = 0; r < c->store.n_rows; r++) {
        float *cosines = c->rope + (size_t)r * 2 * (size_t)half, *sines = cosines + half;
        for (int j = 0; j < half; j++) {
            const double angle = (double)c->row_pos[r] * c->rope_rate[j];
            cosines[j] = (float)cos(angle);
            sines[j] = (float)sin(angle);
        }
    }
}

static const struct backend_ops ops = {
    .name = "cpu",
    .close = op_close,
    .sync = op_sync,
    .buffer_new = op_buffer_new,
    .buffer_free = op_buffer_free,
    .read = op_read,
    .write = op_write,
    .weight_new = op_weight_new,
    .pages_reserve = op_pages_reserve,
    .states_reserve = op_states_reserve,
    .page_bytes = op_page_bytes,
    .state_bytes = op_state_bytes,
    .state_reset = op_state_reset,
    .state_copy = op_state_copy,
    .page_copy = op_page_copy,
    .state_packed_bytes = op_state_packed_bytes,
    .state_save = op_state_save,
    .state_load = op_state_load,
    .page_save = op_page_save,
    .page_load = op_page_load,
    .begin = op_begin,
    .embed = cpu_embed,
    .project = cpu_project,
    .project_add = cpu_project_add,
    .attn_store = cpu_attn_store,
    .attn_mix = cpu_attn_mix,
    .delta_conv = cpu_delta_conv,
    .delta_rule = cpu_delta_rule,
    .mlp = cpu_mlp,
    .moe = cpu_moe,
    .head = cpu_head,
    .mtp_join = cpu_mtp_join,
};

/* ---- opening ---- */

struct backend *cpu_open(const struct backend_shape *shape, int n_threads, enum isa isa, struct error *err)
{
    struct cpu *c = alloc_array(1, sizeof *c);
    if (!c) {
        error_set(err, "out of memory for the CPU backend");
        return NULL;
    }
    c->base.ops = &ops;
    c->base.shape = *shape;
    c->isa = isa;
    c->rows = rows_for(isa);
    if (store_open(&c->store, &c->base.shape, err) || !(c->pool = pool_open(n_threads, err)))
        goto fail;
    c->threads = pool_threads(c->pool);
    c->workers = cpu_scratch(c, (size_t)c->threads, sizeof *c->workers);
    if (!c->workers || cpu_mat_open(c) || cpu_moe_open(c) || cpu_attn_open(c) || cpu_delta_open(c)) {
        error_set(err, "out of memory for the CPU backend's scratch of %d rows: lower max_rows", shape->max_rows);
        goto fail;
    }
    return &c->base;

fail:
    op_close(&c->base);
    return NULL;
}

struct backend *backend_open_cpu(const struct backend_shape *shape, int n_threads, struct error *err)
{
    return cpu_open(shape, n_threads, isa_best(), err);
}
