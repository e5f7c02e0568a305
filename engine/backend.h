/* engine/backend.h: what a device must be able to do. The forward pass (engine/forward.c) is written once over these operations.
 *
 * A backend knows shapes, blocks, pages and state slots; it knows nothing of text, requests or the order of layers. All calls come from one
 * thread, the engine thread. Operations are queued in order and return at once; a failed one makes the backend's error sticky and the rest
 * of the step does nothing. Only `sync` and `read` wait, and `sync` reports the error.
 *
 * Two things hold for every backend and are tested:
 *
 *   Rows are independent. What an operation computes for a row depends on that row's own sequence alone, bit for bit: not on which other rows
 *   share the step and not on how a sequence's tokens were cut into steps. So an answer cannot change with load, chunk size or cache hits.
 *
 *   Positions are on an absolute grid of GRID tokens. A KV page holds GRID tokens. A DeltaNet state is kept as the matrix at the last grid
 *   line plus the tokens since (see `delta_rule`), which is what makes the first rule hold for a recurrent layer, and lets up to
 *   ROLLBACK rows be taken back for nothing.
 *
 * Shapes: R = rows of the step, D = n_embd, NH/NKV/HD = query heads, KV heads, head size, HK/HV/S = DeltaNet key heads, value heads, head size,
 * CH = 2*HK*S + HV*S, E = experts, V = vocabulary. All activations are f32, row-major. */
#ifndef BEDSIDE_ENGINE_BACKEND_H
#define BEDSIDE_ENGINE_BACKEND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "engine/blocks.h"

enum {
    GRID = 64,    /* tokens per KV page and per DeltaNet chunk */
    ROLLBACK = 8, /* rows of a sequence that may be taken back, if they lie in the grid cell of its last row */
};

struct backend; /* a device, its memory and its queue */
struct buffer;  /* device memory for activations */
struct weight;  /* one matrix, or n_mats equal ones (experts), in device memory in whatever layout is fastest */

/* How a head's key or value of one token is kept: HD numbers, or HD / 32 blocks of Q8_0 (spec/gguf.md section 3), for which HD must be a multiple of 32. */
enum kv_type { KV_F32, KV_F16, KV_Q8_0 };

/* Everything about the model that the operations need; fixed for a backend's life. */
struct backend_shape {
    int n_embd;  /* D */
    int n_vocab; /* V */
    float norm_eps;
    int n_heads, n_kv_heads, head_dim; /* NH, NKV, HD */
    int n_rot;                         /* rotated channels, even, <= HD */
    float rope_theta;
    float attn_scale;                                        /* normally 1/sqrt(HD) */
    bool attn_gated;                                         /* q rows are per head [HD query][HD gate] (qwen35*); otherwise [HD query] */
    int n_kv_layers;                                         /* attention layers with a KV cache: numbered 0 .. n_kv_layers-1 */
    int n_delta_layers;                                      /* DeltaNet layers, numbered 0 .. n_delta_layers-1; 0 for qwen3 */
    int delta_k_heads, delta_v_heads, delta_dim, conv_width; /* HK, HV, S, K (taps) */
    int n_experts, n_experts_used, expert_ff, shared_ff;     /* 0 for dense */
    int dense_ff;                                            /* 0 for MoE */
    enum kv_type kv_type;
    int max_rows;       /* most rows in a step */
    int max_logit_rows; /* most rows given to `head` in a step */
};

/* A matrix as the file has it: n_mats slices of n_out rows of n_in values. `stride` bytes lie between slices (so that a fused tensor can be
 * described as views of its rows). The bytes stay mapped until the backend is closed; a CPU may use them in place. */
struct weight_desc {
    const char *name; /* for messages */
    enum block_type type;
    int64_t n_in, n_out, n_mats;
    const uint8_t *data;
    size_t stride;
};

/* One sequence's share of a step: rows row .. row+n-1 hold its tokens at positions pos .. pos+n-1. */
struct span {
    int row, n;
    int pos;
    const int32_t *pages; /* [(pos + n - 1) / GRID + 1] page ids, in order of position; the last may be partly filled */
    int32_t state;        /* state slot; -1 when the model has no DeltaNet layers */
};

/* Weights of one MoE block, spec section 8. */
struct moe_weights {
    struct weight *router;                                /* [E][D] */
    struct weight *gate, *up, *down;                      /* n_mats = E: [F][D], [F][D], [D][F] */
    struct weight *shared_router;                         /* [1][D]; NULL without a shared expert */
    struct weight *shared_gate, *shared_up, *shared_down; /* [Fs][D], [Fs][D], [D][Fs] */
};

struct top_logit {
    int32_t id;
    float logit;
};

/* What `head_top` tells of a row of logits, of those that are usable and finite. */
enum { TOP_MOST = 64 };
struct top_row {
    float max, sum; /* the largest, and the sum of e^(logit - max); -inf and 0 when there is none */
    int32_t n;      /* entries of top: k, or less where there are fewer */
    int32_t pad;
    struct top_logit top[TOP_MOST]; /* the largest first, of equal ones the lower id */
};

struct backend_ops {
    const char *name; /* "cpu", "cpu-plain", "hip" */

    void (*close)(struct backend *b); /* releases everything made from it */

    /* Waits for the queue. 0, or -1 and the first error since the last sync (the queue is usable again). */
    int (*sync)(struct backend *b, struct error *err);

    /* ---- memory ---- */
    struct buffer *(*buffer_new)(struct backend *b, size_t bytes, struct error *err); /* zeroed */
    void (*buffer_free)(struct backend *b, struct buffer *buf);
    int (*read)(struct backend *b, struct buffer *src, size_t offset, void *dst, size_t bytes, struct error *err); /* waits */
    int (*write)(struct backend *b, struct buffer *dst, size_t offset, const void *src, size_t bytes, struct error *err);
    struct weight *(*weight_new)(struct backend *b, const struct weight_desc *desc, struct error *err);

    /* NULL for a backend that uses weights in place. Otherwise it keeps them in memory of its own, the file's bytes are not read again after weight_new,
     * and this is how many bytes it may still allocate (0: unknown). */
    size_t (*memory_free)(struct backend *b);

    /* KV pages and state slots are named by small integers chosen by the caller (below the count last reserved). Reserving more never moves
     * the old ones. A page's content is undefined until written; state_reset makes a slot the start of a sequence. */
    int (*pages_reserve)(struct backend *b, int n_pages, struct error *err);
    int (*states_reserve)(struct backend *b, int n_states, struct error *err);
    size_t (*page_bytes)(const struct backend *b);  /* one page, all layers, K and V */
    size_t (*state_bytes)(const struct backend *b); /* one live slot, all layers */
    void (*state_reset)(struct backend *b, int32_t state);
    void (*state_copy)(struct backend *b, int32_t dst, int32_t src);
    void (*page_copy)(struct backend *b, int32_t dst, int32_t src);

    /* Packed images for snapshots on disk and in RAM: the state of a sequence of length `pos` takes state_packed_bytes(pos) bytes (the
     * tokens since the grid line only). Both wait. */
    size_t (*state_packed_bytes)(const struct backend *b, int pos);
    int (*state_save)(struct backend *b, int32_t state, int pos, void *dst, struct error *err);
    int (*state_load)(struct backend *b, int32_t state, int pos, const void *src, struct error *err);
    int (*page_save)(struct backend *b, int32_t page, void *dst, struct error *err); /* page_bytes */
    int (*page_load)(struct backend *b, int32_t page, const void *src, struct error *err);

    /* ---- a step: begin, then operations over its R rows ---- */

    /* ids [R]: the rows' tokens. The arrays may be reused when the call returns. */
    void (*begin)(struct backend *b, const int32_t *ids, int n_rows, const struct span *spans, int n_spans);

    /* out [R][D] = rows of W [V][D] for the step's ids. */
    void (*embed)(struct backend *b, struct weight *w, struct buffer *out);

    /* out[i] [R][n_out(w[i])] = w[i] * RMSNorm(x, norm), i < n <= 4; x [R][D]; norm is a [1][D] f32 weight. Spec section 4. */
    void (*project)(struct backend *b, struct buffer *x, struct weight *norm, int n, struct weight *const w[], struct buffer *const out[]);

    /* h [R][n_out] += w * x, x [R][n_in]. */
    void (*project_add)(struct backend *b, struct buffer *x, struct weight *w, struct buffer *h);

    /* Attention, spec section 6. attn_store: RMS-normalises the heads of q [R][NH][HD or 2*HD] (in place, gates untouched) and k [R][NKV][HD],
     * rotates both by position, appends k and v [R][NKV][HD] to the pages of KV layer `layer`. attn_mix: out [R][NH*HD] = softmax(q K) V over
     * the row's sequence up to its position, times sigmoid(gate) when gated. */
    void (*attn_store)(struct backend *b, int layer, struct buffer *q, struct buffer *k, struct buffer *v, struct weight *q_norm,
                       struct weight *k_norm);
    void (*attn_mix)(struct backend *b, int layer, struct buffer *q, struct buffer *out);

    /* DeltaNet, spec section 7. delta_conv, steps 1 to 5: from u [R][CH] (raw), beta_raw and alpha_raw [R][HV]: causal convolution with the slot's
     * history, SiLU, L2 norm of q and k heads, q scaled by 1/sqrt(S); writes qkv [R][CH] and gates [R][2][HV] = beta, g; keeps raw rows in
     * the slot's history by position.
     *
     * delta_rule, steps 6 to 8, in the chunked form: the slot holds M0 [HV][S][S] at the last grid line and, for each token since, k, G (the
     * running sum of g since the grid line) and U. For a row t of the grid cell:
     *     U_t = beta_t (v_t - e^{G_t} k_t M0) - sum_{s<t} beta_t (k_t.k_s) e^{G_t-G_s} U_s
     *     o_t = e^{G_t} q_t M0 + sum_{s<=t} (q_t.k_s) e^{G_t-G_s} U_s
     * and when the cell's last row is done M0 becomes e^{G} M0 + sum_t e^{G-G_t} k_t^T U_t. Prefill and decode are the same arithmetic, so
     * that cutting a prompt anywhere changes no bit. Then out [R][HV*S] = RMSNorm(o, norm) * SiLU(z), z [R][HV*S]. */
    void (*delta_conv)(struct backend *b, int layer, struct buffer *u, struct buffer *beta_raw, struct buffer *alpha_raw, struct weight *conv,
                       struct weight *dt_bias, struct weight *a, struct buffer *qkv, struct buffer *gates);
    void (*delta_rule)(struct backend *b, int layer, struct buffer *qkv, struct buffer *gates, struct buffer *z, struct weight *norm,
                       struct buffer *out);

    /* h [R][D] += down(SiLU(gate x) * up x) with x = RMSNorm(h, norm). Spec section 8. */
    void (*mlp)(struct backend *b, struct buffer *h, struct weight *norm, struct weight *gate, struct weight *up, struct weight *down);

    /* h [R][D] += the MoE block of RMSNorm(h, norm); a tie between experts goes to the lower index. `chosen`, when not NULL, receives the experts
     * [R][used] as int32, best first. */
    void (*moe)(struct backend *b, struct buffer *h, struct weight *norm, const struct moe_weights *w, struct buffer *chosen);

    /* hidden [R][D] = RMSNorm(h, norm) for all rows when `hidden` is not NULL. logits [n][V] = w * RMSNorm(h, norm) for rows[0..n). */
    void (*head)(struct backend *b, struct buffer *h, struct weight *norm, struct weight *w, const int32_t *rows, int n, struct buffer *hidden,
                 struct buffer *logits);

    /* out[r] (struct top_row) = the k <= TOP_MOST largest of row r of logits [n][V], r < n. usable: a bit for each id that counts, the first id lowest, in words
     * of 32 bits. NULL where whole rows are as cheap to read. */
    void (*head_top)(struct backend *b, struct buffer *logits, int n, int k, struct buffer *usable, struct buffer *out);

    /* h [R][D] = eh_proj * [RMSNorm(embedding, enorm) ; RMSNorm(hidden, hnorm)], spec section 9; embedding and hidden [R][D]. */
    void (*mtp_join)(struct backend *b, struct buffer *embedding, struct buffer *hidden, struct weight *enorm, struct weight *hnorm,
                     struct weight *eh_proj, struct buffer *h);
};

struct backend {
    const struct backend_ops *ops;
    struct backend_shape shape;
    /* the implementation's own data follows */
};

/* The plain CPU backend: double-precision loops on one thread. Slow; the oracle for every other one. */
struct backend *backend_open_plain(const struct backend_shape *shape, struct error *err);

/* The CPU backend: a thread pool and int8 dot products. n_threads 0 = the physical cores this process may use. */
struct backend *backend_open_cpu(const struct backend_shape *shape, int n_threads, struct error *err);

#endif
