#include "engine/model.h"

#include <stdlib.h>

#include "base/alloc.h"
#include "engine/model_parts.h"

int model_open(struct model **out, const struct gguf *g, struct error *err)
{
    struct model *m = alloc_array(1, sizeof *m);
    if (!m)
        return error_set(err, "out of memory for the model's description");
    m->file = g;
    if (model_params(m, err) || model_tensors(m, NULL, true, err)) {
        model_close(m);
        return -1;
    }
    *out = m;
    return 0;
}

int model_upload(struct model *m, struct backend *b, struct error *err)
{
    /* Trunk layers have the first KV numbers; a backend that was opened with one more wants the draft block too. */
    int n_kv = 0;
    for (int i = 0; i < m->n_layers; i++)
        n_kv += !m->layers[i].recurrent;
    int extra = b->shape.n_kv_layers - n_kv;
    if (extra < 0 || extra > (m->has_mtp ? 1 : 0))
        return error_set(err, "the backend was opened for %d attention layers, the model has %d", b->shape.n_kv_layers, n_kv);
    bool mtp = extra == 1;
    m->mtp.layer.index = n_kv;
    return model_tensors(m, b, mtp, err);
}

void model_close(struct model *m)
{
    if (!m)
        return;
    free(m->layers);
    free(m->name);
    free(m);
}
