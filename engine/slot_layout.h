/* engine/slot_layout.h: what a KV page and a state slot look like in memory, what a packed state looks like on disk, and which shapes, weights and steps
 * make sense. Said once, for all backends: they agree byte for byte, so that a test can compare what they left behind.
 *
 * A page is [layer][K, V][KV head][GRID rows]. A slot is [layer] of five f32 arrays, see struct slot_layer. Everything here is arithmetic on a shape
 * that slot_check_shape has accepted; nothing overflows 64 bits then. */
#ifndef BEDSIDE_ENGINE_SLOT_LAYOUT_H
#define BEDSIDE_ENGINE_SLOT_LAYOUT_H

#include "engine/backend.h"

/* Bounds of spec/gguf.md section 4, item 13. A model file was checked before; this protects the arithmetic. */
int slot_check_shape(const struct backend_shape *sh, struct error *err);

/* Refuses what the row arithmetic of a backend could not describe; sizes against the file were checked by the caller. */
int slot_check_weight(const struct weight_desc *desc, struct error *err);

/* A whole step's description: rows, spans, pages below n_pages, states below n_states. The number of pages of all spans together, or -1 with err. */
int64_t slot_check_step(const struct backend_shape *sh, int n_pages, int n_states, const int32_t *ids, int n_rows, const struct span *spans,
                        int n_spans, struct error *err);

/* ---- KV pages ---- */

/* The block format of keys and values, and the bytes of one token's key or value of one KV head. */
enum block_type slot_kv_format(const struct backend_shape *sh);
size_t slot_kv_row_bytes(const struct backend_shape *sh);
size_t slot_page_bytes(const struct backend_shape *sh);

/* From a page's start to the keys or values of one KV head: GRID rows of slot_kv_row_bytes. */
size_t slot_page_offset(const struct backend_shape *sh, int layer, bool value, int kv_head);

/* Zeroes a page's rows from n on: what stands behind the last token of an unfinished page is some other text's, of before. */
void slot_page_clear(const struct backend_shape *sh, void *page, int n);

/* ---- state slots ---- */

/* Rows of conv history: a power of two >= conv_width - 1 + ROLLBACK. A row needs conv_width - 1 rows before it, also after ROLLBACK rows were taken back. */
int slot_ring(const struct backend_shape *sh);

/* Where the arrays of one layer begin, in bytes from the slot's start; each starts on a cache line. Position p of a sequence stands at row p % GRID of k, u
 * and g and at row p % ring of conv. */
struct slot_layer {
    size_t m;    /* [HV][S key][S value], at the last grid line */
    size_t k;    /* [GRID][HK][S], normalised keys since the grid line */
    size_t u;    /* [GRID][HV][S] */
    size_t g;    /* [GRID][HV], running sum of g since the grid line, this row included */
    size_t conv; /* [ring][CH], raw u rows; rows before position 0 count as zero and are never read */
};
struct slot_layer slot_layer(const struct backend_shape *sh, int layer);
size_t slot_matrix_bytes(const struct backend_shape *sh); /* of m */
size_t slot_state_bytes(const struct backend_shape *sh);

/* ---- packed states ----
 *
 * The image of a sequence of length pos, little-endian f32 without gaps, with n = pos % GRID and c = min(pos, conv_width - 1):
 *     for each layer  M    [HV][S][S]
 *     for each layer  k    [n][HK][S], u [n][HV][S], g [n][HV]   positions pos - n .. pos - 1
 *     for each layer  conv [c][CH]                               positions pos - c .. pos - 1
 * At a grid line n is 0: the cell before it was folded into M when its last row was done. Rows older than these are not kept, so a sequence that
 * was loaded can take back only rows that were run since. */

size_t slot_packed_bytes(const struct backend_shape *sh, int pos);

/* The image is slot_packed_runs runs, one after the other, each contiguous in the slot as well: `offset` from the slot's start. */
struct slot_run {
    size_t offset, bytes;
};
int slot_packed_runs(const struct backend_shape *sh, int pos);
struct slot_run slot_packed_run(const struct backend_shape *sh, int pos, int i);

#endif
