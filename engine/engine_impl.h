/* engine/engine_impl.h: what an engine is made of. Private to engine.c and engine_cache.c. */
#ifndef BEDSIDE_ENGINE_ENGINE_IMPL_H
#define BEDSIDE_ENGINE_ENGINE_IMPL_H

#include "engine/engine.h"
#include "engine/forward.h"
#include "engine/gguf.h"
#include "engine/model.h"
#include "engine/sequence.h"

struct engine {
    struct gguf *file;
    struct model *model;
    struct tokenizer *tokenizer;
    struct backend *backend;
    struct forward *forward;
    struct engine_info info;
    char *name, *chat_template;
    bool mtp;
    struct slots pages, states;
    struct sequence **alive; /* [max_sequences], NULL where free */

    /* scratch of a step */
    int32_t *ids;                     /* [max_rows] */
    struct span *spans;               /* [max_sequences] */
    const float **before;             /* [max_sequences] */
    int32_t *logit_rows, *draft_rows; /* [max_rows] */
    float **logits, **drafts;         /* [max_rows] */
    float *sampled;                   /* [number of samplers][V] */
    size_t cap_sampled;
    int32_t *experts; /* [n_layers][rows][used] */
    size_t cap_experts;
};

#endif
