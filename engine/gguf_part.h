/* engine/gguf_part.h: one file of a model, parsed and checked (internal to gguf.c and gguf_part.c). */
#ifndef BEDSIDE_ENGINE_GGUF_PART_H
#define BEDSIDE_ENGINE_GGUF_PART_H

#include <string.h>

#include "engine/gguf.h"

enum { GGUF_NAME_ROOM = 64 }; /* a tensor's name and its NUL */

struct gguf_part {
    const uint8_t *data; /* [size] */
    size_t size;
    bool mapped; /* by gguf.c, to be unmapped */
    int fd;      /* of a mapped file */
    uint32_t version;
    struct gguf_value *values; /* file order */
    size_t n_values;
    const struct gguf_value **by_key; /* sorted by key */
    char *names;                      /* [tensors of this part][GGUF_NAME_ROOM] */
};

/* Parses and checks p->data. Appends the tensors to (*tensors)[*n_tensors] (grown by realloc), as of part `index`. On failure -1 with err;
 * what was allocated stays in *p and *tensors for the usual release. */
int gguf_part_parse(struct gguf_part *p, uint32_t index, struct gguf_tensor **tensors, size_t *n_tensors, struct error *err);

/* NULL: absent. */
const struct gguf_value *gguf_part_value(const struct gguf_part *p, const char *key);

/* Releases the values, not the data or the names. */
void gguf_part_free_values(struct gguf_part *p);

/* "u8", "string", ... */
const char *gguf_kind_name(enum gguf_kind kind);

/* Bytes of one scalar of this kind; 0 for strings and arrays. */
size_t gguf_kind_bytes(enum gguf_kind kind);

/* Little-endian loads from any address. */
static inline uint16_t gguf_load_u16(const uint8_t *p)
{
    return (uint16_t)(p[0] | p[1] << 8);
}

static inline uint32_t gguf_load_u32(const uint8_t *p)
{
    return (uint32_t)gguf_load_u16(p) | (uint32_t)gguf_load_u16(p + 2) << 16;
}

static inline uint64_t gguf_load_u64(const uint8_t *p)
{
    return (uint64_t)gguf_load_u32(p) | (uint64_t)gguf_load_u32(p + 4) << 32;
}

static inline double gguf_load_f32(const uint8_t *p)
{
    uint32_t bits = gguf_load_u32(p);
    float value;
    memcpy(&value, &bits, sizeof value);
    return (double)value;
}

static inline double gguf_load_f64(const uint8_t *p)
{
    uint64_t bits = gguf_load_u64(p);
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#endif
