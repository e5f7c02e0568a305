#include "engine/slot_layout.h"

#include <limits.h>
#include <string.h>

/* Packed states are little-endian, as are the GGUF files that are used in place. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "this code reads and writes f32 images in the machine's own order");
_Static_assert(sizeof(float) == 4, "f32 images");

enum { LINE_FLOATS = 64 / sizeof(float) };

/* ---- checks ---- */

static int check_dimension(const char *name, int value, int low, int high, struct error *err)
{
    if (value < low || value > high)
        return error_set(err, "backend shape: %s is %d, but must lie in %d .. %d", name, value, low, high);
    return 0;
}

int slot_check_shape(const struct backend_shape *sh, struct error *err)
{
    if (check_dimension("n_embd", sh->n_embd, 1, 65536, err) || check_dimension("n_vocab", sh->n_vocab, 1, 1 << 21, err) ||
        check_dimension("n_kv_layers", sh->n_kv_layers, 0, 513, err) || check_dimension("n_delta_layers", sh->n_delta_layers, 0, 513, err) ||
        check_dimension("n_experts", sh->n_experts, 0, 1024, err) || check_dimension("max_rows", sh->max_rows, 1, 1 << 20, err) ||
        check_dimension("max_logit_rows", sh->max_logit_rows, 0, 1 << 20, err))
        return -1;
    if (sh->n_kv_layers > 0) {
        if (check_dimension("n_heads", sh->n_heads, 1, 1024, err) || check_dimension("n_kv_heads", sh->n_kv_heads, 1, sh->n_heads, err) ||
            check_dimension("head_dim", sh->head_dim, 1, 1024, err) || check_dimension("n_rot", sh->n_rot, 0, sh->head_dim, err))
            return -1;
        if (sh->n_heads % sh->n_kv_heads || sh->n_rot % 2)
            return error_set(err, "backend shape: n_heads must be a multiple of n_kv_heads (%d, %d) and n_rot even (%d)", sh->n_heads, sh->n_kv_heads,
                             sh->n_rot);
        if (sh->kv_type != KV_F32 && sh->kv_type != KV_F16 && sh->kv_type != KV_Q8_0)
            return error_set(err, "backend shape: unknown kv_type %d", (int)sh->kv_type);
        if (sh->kv_type == KV_Q8_0 && sh->head_dim % block_info(BLOCK_Q8_0)->values)
            return error_set(err, "kv-type q8_0 needs heads of a multiple of 32 channels, and this model's have %d: use kv-type f16", sh->head_dim);
    }
    if (sh->n_delta_layers > 0) {
        if (check_dimension("delta_k_heads", sh->delta_k_heads, 1, 1024, err) || check_dimension("delta_v_heads", sh->delta_v_heads, 1, 1024, err) ||
            check_dimension("delta_dim", sh->delta_dim, 1, 1024, err) || check_dimension("conv_width", sh->conv_width, 2, 16, err))
            return -1;
        if (sh->delta_v_heads % sh->delta_k_heads)
            return error_set(err, "backend shape: delta_v_heads (%d) must be a multiple of delta_k_heads (%d)", sh->delta_v_heads, sh->delta_k_heads);
    }
    if (sh->n_experts > 0)
        return check_dimension("n_experts_used", sh->n_experts_used, 1, sh->n_experts, err);
    return 0;
}

int slot_check_weight(const struct weight_desc *desc, struct error *err)
{
    const char *name = desc->name ? desc->name : "?";
    const struct block_info *info = block_info((uint32_t)desc->type);
    if (!info || !info->values)
        return error_set(err, "tensor %s: block type %d (%s) is not supported", name, (int)desc->type, info ? info->name : "unknown");
    const int64_t limit = INT64_C(1) << 31;
    if (desc->n_in < 1 || desc->n_in >= limit || desc->n_in % info->values || desc->n_out < 1 || desc->n_out >= limit || desc->n_mats < 1 ||
        desc->n_mats > 65536 || !desc->data)
        return error_set(err, "tensor %s: %lld x %lld x %lld values of type %s do not make whole rows of blocks", name, (long long)desc->n_in,
                         (long long)desc->n_out, (long long)desc->n_mats, info->name);
    const size_t row_bytes = block_bytes(desc->type, (size_t)desc->n_in);
    if (desc->n_mats > 1 && desc->stride / row_bytes < (size_t)desc->n_out)
        return error_set(err, "tensor %s: a stride of %zu bytes is less than one matrix", name, desc->stride);
    return 0;
}

/* Checks one span; `row` is where it must begin. Returns its number of pages, or -1. */
static int check_span(const struct backend_shape *sh, int most_pages, int n_states, const struct span *span, int row, int n_rows, struct error *err)
{
    if (span->row != row || span->n < 1 || span->n > n_rows - row || span->pos < 0 || span->pos > INT_MAX - span->n)
        return error_set(err, "step: a span of %d rows at row %d, position %d does not continue at row %d of %d", span->n, span->row, span->pos, row,
                         n_rows);
    if (sh->n_delta_layers > 0 && (span->state < 0 || span->state >= n_states))
        return error_set(err, "state slot %d is outside the %d reserved", span->state, n_states);
    if (sh->n_kv_layers == 0)
        return 0;
    const int n_pages = (span->pos + span->n - 1) / GRID + 1;
    if (!span->pages)
        return error_set(err, "step: the span at row %d has no pages", row);
    for (int i = 0; i < n_pages; i++)
        if (span->pages[i] < 0 || span->pages[i] >= most_pages)
            return error_set(err, "KV page %d is outside the %d reserved", span->pages[i], most_pages);
    return n_pages;
}

int64_t slot_check_step(const struct backend_shape *sh, int n_pages, int n_states, const int32_t *ids, int n_rows, const struct span *spans,
                        int n_spans, struct error *err)
{
    int64_t total = 0;
    int row = 0;
    if (n_rows < 1 || n_rows > sh->max_rows || n_spans < 1 || n_spans > n_rows)
        return error_set(err, "step: %d rows in %d spans; at most %d rows fit", n_rows, n_spans, sh->max_rows);
    for (int i = 0; i < n_spans; i++) {
        const int n = check_span(sh, n_pages, n_states, &spans[i], row, n_rows, err);
        if (n < 0)
            return -1;
        total += n;
        row += spans[i].n;
        for (int j = 0; j < i && sh->n_delta_layers > 0; j++)
            if (spans[j].state == spans[i].state)
                return error_set(err, "step: state slot %d is used by two spans", spans[i].state);
    }
    if (row != n_rows)
        return error_set(err, "step: the spans cover %d of %d rows", row, n_rows);
    for (int i = 0; i < n_rows; i++)
        if (ids[i] < 0 || ids[i] >= sh->n_vocab)
            return error_set(err, "step: the token id of row %d is %d, outside the vocabulary of %d", i, ids[i], sh->n_vocab);
    return total;
}

/* ---- KV pages ---- */

enum block_type slot_kv_format(const struct backend_shape *sh)
{
    static const enum block_type formats[] = {[KV_F32] = BLOCK_F32, [KV_F16] = BLOCK_F16, [KV_Q8_0] = BLOCK_Q8_0};
    return formats[sh->kv_type];
}

size_t slot_kv_row_bytes(const struct backend_shape *sh)
{
    return block_bytes(slot_kv_format(sh), (size_t)sh->head_dim);
}

/* Bytes of one head's keys (or values) in a page. */
static size_t kv_head_bytes(const struct backend_shape *sh)
{
    return GRID * slot_kv_row_bytes(sh);
}

size_t slot_page_bytes(const struct backend_shape *sh)
{
    if (sh->n_kv_layers == 0)
        return 0;
    return (size_t)sh->n_kv_layers * 2 * (size_t)sh->n_kv_heads * kv_head_bytes(sh);
}

size_t slot_page_offset(const struct backend_shape *sh, int layer, bool value, int kv_head)
{
    return (((size_t)layer * 2 + (value ? 1 : 0)) * (size_t)sh->n_kv_heads + (size_t)kv_head) * kv_head_bytes(sh);
}

void slot_page_clear(const struct backend_shape *sh, void *page, int n)
{
    const size_t row = slot_kv_row_bytes(sh);
    for (int layer = 0; layer < sh->n_kv_layers; layer++)
        for (int part = 0; part < 2 * sh->n_kv_heads; part++)
            memset((char *)page + slot_page_offset(sh, layer, part % 2, part / 2) + (size_t)n * row, 0, (size_t)(GRID - n) * row);
}

/* ---- state slots ---- */

static size_t up_to_line(size_t floats)
{
    return (floats + LINE_FLOATS - 1) / LINE_FLOATS * LINE_FLOATS;
}

static size_t conv_channels(const struct backend_shape *sh)
{
    return 2 * (size_t)sh->delta_k_heads * (size_t)sh->delta_dim + (size_t)sh->delta_v_heads * (size_t)sh->delta_dim;
}

static size_t matrix_floats(const struct backend_shape *sh)
{
    return (size_t)sh->delta_v_heads * (size_t)sh->delta_dim * (size_t)sh->delta_dim;
}

static size_t key_row_floats(const struct backend_shape *sh)
{
    return (size_t)sh->delta_k_heads * (size_t)sh->delta_dim;
}

static size_t value_row_floats(const struct backend_shape *sh)
{
    return (size_t)sh->delta_v_heads * (size_t)sh->delta_dim;
}

int slot_ring(const struct backend_shape *sh)
{
    int ring = 1;
    while (ring < sh->conv_width - 1 + ROLLBACK)
        ring *= 2;
    return ring;
}

/* Bytes of one layer's arrays; with `at`, where they begin from the layer's start. */
static size_t layer_bytes(const struct backend_shape *sh, struct slot_layer *at)
{
    const size_t m = up_to_line(matrix_floats(sh)), k = up_to_line(GRID * key_row_floats(sh)), u = up_to_line(GRID * value_row_floats(sh)),
                 g = up_to_line(GRID * (size_t)sh->delta_v_heads), conv = up_to_line((size_t)slot_ring(sh) * conv_channels(sh)), f = sizeof(float);
    if (at)
        *at = (struct slot_layer){.m = 0, .k = m * f, .u = (m + k) * f, .g = (m + k + u) * f, .conv = (m + k + u + g) * f};
    return (m + k + u + g + conv) * f;
}

struct slot_layer slot_layer(const struct backend_shape *sh, int layer)
{
    struct slot_layer at;
    const size_t start = (size_t)layer * layer_bytes(sh, &at);
    return (struct slot_layer){.m = start + at.m, .k = start + at.k, .u = start + at.u, .g = start + at.g, .conv = start + at.conv};
}

size_t slot_matrix_bytes(const struct backend_shape *sh)
{
    return matrix_floats(sh) * sizeof(float);
}

size_t slot_state_bytes(const struct backend_shape *sh)
{
    return sh->n_delta_layers == 0 ? 0 : (size_t)sh->n_delta_layers * layer_bytes(sh, NULL);
}

/* ---- packed states ---- */

static size_t pending_rows(int pos)
{
    return (size_t)(pos % GRID);
}

static int history_rows(const struct backend_shape *sh, int pos)
{
    const int most = sh->conv_width - 1;
    return pos < most ? pos : most;
}

size_t slot_packed_bytes(const struct backend_shape *sh, int pos)
{
    if (sh->n_delta_layers == 0 || pos < 0)
        return 0;
    const size_t row = key_row_floats(sh) + value_row_floats(sh) + (size_t)sh->delta_v_heads;
    const size_t floats = matrix_floats(sh) + pending_rows(pos) * row + (size_t)history_rows(sh, pos) * conv_channels(sh);
    return (size_t)sh->n_delta_layers * floats * sizeof(float);
}

int slot_packed_runs(const struct backend_shape *sh, int pos)
{
    return sh->n_delta_layers * (1 + 3 + history_rows(sh, pos));
}

/* The one statement of the image's layout, for both directions. */
struct slot_run slot_packed_run(const struct backend_shape *sh, int pos, int i)
{
    const int layers = sh->n_delta_layers, history = history_rows(sh, pos);
    const size_t n = pending_rows(pos);
    if (i < layers)
        return (struct slot_run){slot_layer(sh, i).m, slot_matrix_bytes(sh)};
    i -= layers;
    if (i < 3 * layers) {
        const struct slot_layer at = slot_layer(sh, i / 3);
        if (i % 3 == 0)
            return (struct slot_run){at.k, n * key_row_floats(sh) * sizeof(float)};
        if (i % 3 == 1)
            return (struct slot_run){at.u, n * value_row_floats(sh) * sizeof(float)};
        return (struct slot_run){at.g, n * (size_t)sh->delta_v_heads * sizeof(float)};
    }
    i -= 3 * layers; /* only when history > 0 */
    const int p = pos - history + i % history;
    const size_t row = conv_channels(sh) * sizeof(float);
    return (struct slot_run){slot_layer(sh, i / history).conv + (size_t)(p % slot_ring(sh)) * row, row};
}
