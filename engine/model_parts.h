/* engine/model_parts.h: the two halves of model.c. Private to it.
 *
 * model_params turns metadata into numbers; model_tensors turns names into weights. */
#ifndef BEDSIDE_ENGINE_MODEL_PARTS_H
#define BEDSIDE_ENGINE_MODEL_PARTS_H

#include "engine/model.h"

/* Fills arch, name, shape (but for what the caller sets), layer kinds and the rest of the numbers from the metadata of m->file, each checked
 * and bounded before it enters arithmetic (spec/qwen35moe.md section 2, spec/gguf.md section 4 item 13). Allocates m->layers. */
int model_params(struct model *m, struct error *err);

/* With b == NULL: checks that every tensor is there with its exact shape, counts parameters and bytes, clears has_mtp when the file
 * announces a draft block but holds none of it, and notes or refuses tensors that nothing reads. With a backend: gives it the
 * weights of the trunk and, when `mtp`, of the draft block (spec/qwen35moe.md section 3). */
int model_tensors(struct model *m, struct backend *b, bool mtp, struct error *err);

#endif
