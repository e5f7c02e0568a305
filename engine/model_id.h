/* engine/model_id.h: a short name for everything that KV pages and recurrent states depend on. */
#ifndef BEDSIDE_ENGINE_MODEL_ID_H
#define BEDSIDE_ENGINE_MODEL_ID_H

#include <stdint.h>

#include "engine/backend.h"
#include "engine/cache_key.h"
#include "engine/gguf.h"

/* BLAKE2b-256 over the file's keys and tensor table, the first 4 KiB of each tensor, and the backend with its KV type and layer counts (a draft
 * block adds a KV layer): pages and states computed under one id may be used under the same id, and under no other. -1 with err: libsodium
 * does not start. */
int model_id_of(uint8_t id[CACHE_MODEL_ID], const struct gguf *g, const struct backend *b, struct error *err);

#endif
