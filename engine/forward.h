/* engine/forward.h: one step of the model over a backend: embed, layers, head, draft block (spec/qwen35moe.md sections 4 to 9).
 *
 * It owns the activation buffers, allocated once for shape.max_rows rows; it knows rows and spans, not sequences or text. */
#ifndef BEDSIDE_ENGINE_FORWARD_H
#define BEDSIDE_ENGINE_FORWARD_H

#include "engine/model.h"

struct forward;

/* What a step computes, and where the results go. All pointers are to the caller's memory. */
struct step {
    const int32_t *ids; /* [n_rows] */
    int n_rows;
    const struct span *spans; /* cover the rows, in order */
    int n_spans;

    const int32_t *logit_rows; /* [n_logits], rows whose logits are wanted */
    float *const *logits;      /* [n_logits] -> [V] each */
    const int *best;           /* [n_logits]: of how many of the largest logits the row is told in tops, up to TOP_MOST; 0: the whole row in logits */
    struct top_row *const *tops; /* [n_logits], where best is not 0 */
    int n_logits;

    int32_t *experts; /* [n_layers][n_rows][used], or NULL */

    /* With the draft block only: */
    const float *const *before; /* [n_spans] -> [D], the hidden row of the position before the span's first; NULL = zeros */
    const int32_t *draft_rows;  /* [n_drafts], rows whose draft logits are wanted */
    float *const *drafts;       /* [n_drafts] -> [V] each */
    int n_drafts;
};

/* The model must have been uploaded to the backend. `mtp`: the draft block runs in every step, which keeps its KV up with the trunk's. usable [(V + 31) / 32]:
 * a bit for each id that counts among a row's best. */
int forward_open(struct forward **out, const struct model *m, struct backend *b, bool mtp, const uint32_t *usable, struct error *err);

/* Whether steps may ask for the best of a row (step.best). */
bool forward_has_best(const struct forward *f);
void forward_close(struct forward *f);

/* Device bytes of the activation buffers for a shape (with its max_rows and max_logit_rows). */
uint64_t forward_bytes(const struct backend_shape *s, bool mtp);

/* Runs a step and waits for its results. -1 with err when the backend failed. */
int forward_run(struct forward *f, const struct step *s, struct error *err);

/* With the draft block, after a step: hidden rows of the step [n_rows][D] (after the final norm). */
const float *forward_hidden(const struct forward *f);

#endif
