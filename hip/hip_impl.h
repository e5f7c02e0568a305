/* hip/hip_impl.h: what the parts of the HIP backend share. Private to hip/.
 *
 *   runtime.c    dlopen of the HIP runtime
 *   device.c     one GPU: memory, queue, kernels, errors
 *   graph.c      launches that repeat, as one submission
 *   layout.c     weights in the form that the kernels read
 *   hip.c        open, close, the start of a step, the table of operations
 *   hip_hold.c   the launch that waits for what the next operation reads
 *   hip_store.c  buffers, weights, KV pages, state slots and their packed images
 *   hip_mat.c    products with weights: project, project_add, mlp, head, embed, mtp_join
 *   hip_moe.c    router and experts
 *   hip_attn.c   attn_store, attn_mix
 *   hip_delta.c  delta_conv, delta_rule
 *   selftest.c   every kernel against the CPU; selftest_graph.c: replayed launches against what they must give
 *
 * An operation of these files checks its buffers (hip_has, hip_fits), fills a parameter struct and launches; it never waits. The device is reached by
 * hip_dev alone, so that a launch that is held back goes first whatever is done with the queue or with memory. Kernels are in
 * hip/kernels/, one file per concern, mirrored by the host file of the same name. */
#ifndef BEDSIDE_HIP_HIP_IMPL_H
#define BEDSIDE_HIP_HIP_IMPL_H

#include "engine/backend.h"
#include "hip/device.h"
#include "hip/hip.h"
#include "hip/kernels/params.h"
#include "hip/layout.h"

struct buffer {
    void *dev;
    size_t bytes;
    struct buffer *next;
};

struct weight {
    struct weight_desc desc; /* data and stride describe the file and are not read after weight_new */
    struct gpu_matrix gpu;
    char name[64];
    struct weight *next;
};

/* Scratch of one concern, made at open by the file that uses it. */
struct hip_hold;
struct hip_mat;
struct hip_moe;
struct hip_attn;

struct hip {
    struct backend base;       /* first: a struct backend * is a struct hip * */
    struct backend_ops ops;    /* base.ops, with this device's name */
    char name[40];             /* "hip gfx1152" */
    struct hip_device *device; /* see hip_dev; as it is only to ask whether it has failed */
    bool borrowed;             /* it is closed by somebody else */
    bool told_of_graphs;       /* that they have failed */
    struct hip_store *store;   /* hip_store.c */
    struct gpu_step step;      /* of the step in progress; n_rows 0: none */
    struct span *spans;        /* [step.n_spans], the host's copy (pages not kept): for launch geometry */
    size_t spans_room;
    unsigned char *step_host; /* what step points to, before it is sent */
    void *step_dev;           /* and where it lies on the device */
    size_t step_host_room, step_dev_room;
    struct hip_hold *hold;
    struct hip_mat *mat;
    struct hip_moe *moe;
    struct hip_attn *attn;
};

static inline struct hip *hip_of(struct backend *b)
{
    return (struct hip *)b;
}

/* ---- hip_hold.c ----
 *
 * What an operation makes is often read by the next one in another form: normalised, quantised. The kernel that made it can do that too, and one launch is saved
 * (struct act_tail of hip/kernels/params.h), but an operation does not know what follows it. So its launch waits until the next one says what it reads.
 * At most one waits; anything else that is done with the device sends it first, as it is. */

int hip_hold_open(struct hip *h, struct error *err);
void hip_hold_close(struct hip *h);

/* hip_device_launch, later. `tail` lies in params: x, n, rows and members say what it could be made of; or NULL. */
void hip_hold(struct hip *h, enum hip_kernel kernel, unsigned gx, unsigned gy, unsigned gz, const void *params, size_t bytes,
              const struct act_tail *tail);

/* Queues what the kernel `act` would do with n_rows rows: by the launch that waits, if it makes what is read here, otherwise by a launch of `act`. */
void hip_act(struct hip *h, const struct act_params *p, int n_rows);

void hip_hold_send(struct hip *h);             /* the launch that waits, if there is one */
enum hip_kernel hip_held(const struct hip *h); /* its kernel; K_COUNT: there is none */

/* For an operation that does the work of the launch that waits as well, or has it do its own: that launch's parameters (NULL: another one waits, or none), and
 * that it need not be sent. */
void *hip_held_params(struct hip *h, enum hip_kernel kernel);
void hip_hold_drop(struct hip *h);

/* The device, with nothing held back. */
static inline struct hip_device *hip_dev(struct hip *h)
{
    if (h->hold)
        hip_hold_send(h);
    return h->device;
}

/* ---- checks, hip.c ---- */

/* True when an operation has something to do: a step is in progress and nothing has failed. */
bool hip_ready(const struct hip *h);

/* True when buf holds [rows][columns] 4-byte values. Otherwise the sticky error names `what`. */
bool hip_has(struct hip *h, const char *what, const struct buffer *buf, size_t rows, size_t columns);

/* True when w is n_mats matrices [n_out][n_in] (0 = any). Otherwise the sticky error names `what`. */
bool hip_fits(struct hip *h, const char *what, const struct weight *w, int64_t n_in, int64_t n_out, int64_t n_mats);

/* True when w is one matrix [n_out][n_in] in f32, as hip_weight_new makes every norm, bias and filter (a vector: n_out 1). Otherwise the sticky error
 * names `what`. */
bool hip_values(struct hip *h, const char *what, const struct weight *w, int64_t n_in, int64_t n_out);

/* Those values, on the device. */
static inline const float *hip_values_of(const struct weight *w)
{
    return (const float *)(const void *)w->gpu.data;
}

/* A backend on a device that stays the caller's. */
struct backend *hip_open_on(struct hip_device *d, const struct backend_shape *shape, struct error *err);

/* One for each concern: scratch made at open, -1 with err. close accepts what open left half done. */
int hip_mat_open(struct hip *h, struct error *err);
void hip_mat_close(struct hip *h);
int hip_moe_open(struct hip *h, struct error *err);
void hip_moe_close(struct hip *h);
int hip_attn_open(struct hip *h, struct error *err);
void hip_attn_close(struct hip *h);
int hip_delta_check(const struct backend_shape *sh, struct error *err); /* needs no scratch; refuses shapes that the kernels do not know */

/* ---- hip_mat.c ---- */

void hip_embed(struct backend *b, struct weight *w, struct buffer *out);
void hip_project(struct backend *b, struct buffer *x, struct weight *norm, int n, struct weight *const w[], struct buffer *const out[]);
void hip_project_add(struct backend *b, struct buffer *x, struct weight *w, struct buffer *h);
void hip_mlp(struct backend *b, struct buffer *h, struct weight *norm, struct weight *gate, struct weight *up, struct weight *down);
void hip_head(struct backend *b, struct buffer *h, struct weight *norm, struct weight *w, const int32_t *rows, int n, struct buffer *hidden,
              struct buffer *logits);
void hip_mtp_join(struct backend *b, struct buffer *embedding, struct buffer *hidden, struct weight *enorm, struct weight *hnorm,
                  struct weight *eh_proj, struct buffer *h);

/* Order, ties and what counts as a logit are the sampler's (key_of in engine/sampler.c), so that the best give the same tokens from it as the row. 528 bytes are
 * copied instead of 993 KB for 248,320 logits. */
void hip_top(struct backend *b, struct buffer *logits, int n, int k, struct buffer *usable, struct buffer *out);

/* The forms that activations are turned into for products, see hip/layout.h. */
enum hip_act { HIP_ACT_F32, HIP_ACT_Q8_32, HIP_ACT_Q8_256 };
enum hip_act hip_act_of(enum block_type weight_type);
size_t hip_act_row_bytes(enum hip_act kind, int n); /* a multiple of 64; the CPU's act_row_bytes */

/* The form that goes with w. */
static inline enum hip_act hip_act_for(const struct weight *w)
{
    return hip_act_of((enum block_type)w->gpu.type);
}

/* Where the kernel `act` is to put that form. */
void hip_act_to(struct act_params *p, enum hip_act kind, void *dst);

/* Queues: dst [n_rows] rows of hip_act_row_bytes = x [n_rows][n], or SiLU(x) * up where `up` is not NULL, in that form. Device addresses. */
void hip_quantise(struct hip *h, enum hip_act kind, const float *x, const float *up, int n_rows, int n, void *dst);

/* Queues y [n_rows][n_out] (+)= w * act, act in the form that goes with w's type. One to eight rows: mat-vec (hip_mat.c); more: tiles (hip_tile.c). */
void hip_product(struct hip *h, const struct weight *w, const void *act, int n_rows, float *y, bool add);

/* ---- hip_tile.c: the tiled products of prefill ---- */

void hip_tile(struct hip *h, const struct weight *w, const void *act, int n_rows, float *y, bool add);

/* ---- hip_moe.c ---- */

void hip_moe(struct backend *b, struct buffer *h, struct weight *norm, const struct moe_weights *w, struct buffer *chosen);

/* ---- hip_attn.c ---- */

void hip_attn_store(struct backend *b, int layer, struct buffer *q, struct buffer *k, struct buffer *v, struct weight *q_norm, struct weight *k_norm);
void hip_attn_mix(struct backend *b, int layer, struct buffer *q, struct buffer *out);

/* ---- hip_delta.c ---- */

void hip_delta_conv(struct backend *b, int layer, struct buffer *u, struct buffer *beta_raw, struct buffer *alpha_raw, struct weight *conv,
                    struct weight *dt_bias, struct weight *a, struct buffer *qkv, struct buffer *gates);
void hip_delta_rule(struct backend *b, int layer, struct buffer *qkv, struct buffer *gates, struct buffer *z, struct weight *norm,
                    struct buffer *out);

/* ---- selftest.c ---- */

/* Runs every operation against the CPU on random data, with the weight types in `types` (bits 1 << enum block_type; 0: all) and the
 * heads of `like` (NULL: of all sizes that have kernels of their own). -1 with err naming the operation and the ISA. */
int hip_selftest(struct hip_device *d, uint64_t types, const struct backend_shape *like, struct error *err);

/* ---- selftest_graph.c ---- */

/* Turns graphs on and checks that replays read what was written just before them. -1: they are off again, with the reason. */
int hip_graphs_try(struct hip_device *d, struct error *err);

#endif
