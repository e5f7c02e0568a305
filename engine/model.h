/* engine/model.h: the hyper-parameters and tensors of a model file, checked (spec/qwen35moe.md sections 1 to 3, gguf.md section 4).
 *
 * model_open turns names into pointers: afterwards every tensor that the forward pass needs is present with exactly the expected shape, and no
 * later code looks at a key or a name. */
#ifndef BEDSIDE_ENGINE_MODEL_H
#define BEDSIDE_ENGINE_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"
#include "engine/backend.h"
#include "engine/gguf.h"

enum model_arch { MODEL_QWEN35MOE, MODEL_QWEN35, MODEL_QWEN3 };

/* The weights of one block. In a layer only the fields of its kind are set; the rest are NULL. */
struct layer {
    bool recurrent;                              /* DeltaNet; otherwise full attention */
    int index;                                   /* among the layers of its kind: KV layer or DeltaNet layer number */
    struct weight *attn_norm, *ffn_norm;         /* [D] */
    struct weight *q, *k, *v, *o;                /* attention */
    struct weight *q_norm, *k_norm;              /* [HD] */
    struct weight *qkv, *z, *beta, *alpha, *out; /* DeltaNet: attn_qkv, attn_gate, ssm_beta, ssm_alpha, ssm_out */
    struct weight *conv, *dt_bias, *a, *delta_norm;
    struct weight *gate, *up, *down; /* dense MLP */
    struct moe_weights moe;          /* moe.router != NULL: MoE */
};

struct mtp_block { /* the draft head, spec section 9 */
    struct layer layer;
    struct weight *eh_proj, *enorm, *hnorm, *head_norm, *embed, *head;
};

struct model {
    enum model_arch arch;
    const char *arch_name;
    char *name;                 /* general.name, or "" */
    struct backend_shape shape; /* kv_type, max_rows and max_logit_rows are the caller's to set before model_upload */
    int n_layers;               /* trunk */
    bool has_mtp;
    bool tied_output;
    int64_t context_length; /* the model's own limit */
    int64_t n_params;
    uint64_t weight_bytes; /* of all tensors used, the draft block included */
    struct {               /* general.sampling.*, NAN where absent */
        double temperature, top_p, top_k, min_p, repeat_penalty;
    } sampling;
    /* filled by model_upload */
    struct layer *layers; /* [n_layers]; `recurrent` and `index` are set from the start */
    struct mtp_block mtp;
    struct weight *token_embd, *output_norm, *output;
    /* private */
    const struct gguf *file;
};

/* Reads and checks. `g` must outlive the model. */
int model_open(struct model **out, const struct gguf *g, struct error *err);

/* Gives every tensor to the backend. shape.n_kv_layers counts the trunk's attention layers; a backend opened with one more gets the draft
 * block too, whose KV layer is the last. */
int model_upload(struct model *m, struct backend *b, struct error *err);
void model_close(struct model *m);

#endif
