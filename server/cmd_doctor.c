/* bedside doctor: can the GPU be used, and what is missing? With --model also: does the GPU take this model? */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "engine/gguf.h"
#include "hip/doctor.h"
#include "hip/hip.h"
#include "server/commands.h"
#include "server/setup.h"

/* What the model needs of the GPU. -1 when the file cannot be read. */
static int look_at_model(const char *path, struct hip_doctor_options *o, struct error *err)
{
    struct gguf *g = NULL;
    if (gguf_open(&g, path, err))
        return -1;
    int rc = 0;
    for (size_t i = 0; i < gguf_tensor_count(g); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(g, i);
        o->types |= UINT64_C(1) << t->type; /* below 64: supported types only */
        o->weight_bytes += t->bytes;
        if (rc == 0 && !backend_hip_takes((enum block_type)t->type))
            rc = error_set(err, "%s: tensor %s is of type %s, for which there is no GPU kernel: use a Q4_K_M, Q8_0 or F16 file of the model", path,
                           t->name, block_info(t->type)->name);
    }
    gguf_close(g);
    return rc;
}

int cmd_doctor(int argc, char **argv)
{
    struct config c;
    int n_words = 0;
    int rc = setup_config(&c, "doctor", argc, argv, NULL, 0, &n_words);
    if (rc >= 0)
        return rc;
    struct error err = {""};
    struct hip_doctor_options o = {.library = c.hip_library, .device = setup_device_ordinal(&c), .graph = strcmp(c.hip_graph, "on") == 0, .root = ""};
    if (c.model[0] && look_at_model(c.model, &o, &err)) {
        fprintf(stderr, "bedside: %s\n", err.text);
        rc = 1;
    } else {
        rc = hip_doctor(stdout, &o);
    }
    config_free(&c);
    return rc;
}
