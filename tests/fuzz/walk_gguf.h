/* tests/fuzz/walk_gguf.h: touches everything that an opened file hands out, so that a sanitizer (or a guard page) sees any read outside it. */
#ifndef BEDSIDE_TESTS_WALK_GGUF_H
#define BEDSIDE_TESTS_WALK_GGUF_H

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "engine/blocks.h"
#include "engine/gguf.h"

/* Returns a sum over what was read, so that no read can be optimised away. */
static inline uint64_t walk_string(struct gguf_string s)
{
    uint64_t sum = s.len;
    for (size_t i = 0; i < s.len; i++)
        sum += (unsigned char)s.data[i];
    return sum;
}

static inline uint64_t walk_value(const struct gguf *g, const struct gguf_value *v)
{
    uint64_t sum = walk_string(v->key), whole;
    int64_t element;
    double real;
    bool flag;
    char *key = strndup(v->key.data, v->key.len);
    if (!key)
        abort();
    if (gguf_value(g, key) != v) /* every key is found, and is the only one of its name */
        abort();
    struct error err;
    struct gguf_string text;
    if (gguf_get_u64(g, key, &whole, &err) == 1)
        sum += whole;
    if (gguf_get_f64(g, key, &real, &err) == 1)
        sum += real > 0;
    if (gguf_get_bool(g, key, &flag, &err) == 1)
        sum += flag;
    if (gguf_get_string(g, key, &text, &err) == 1)
        sum += walk_string(text);
    free(key);
    if (v->kind != GGUF_ARRAY)
        return sum;
    for (uint64_t i = 0; i < v->count; i++) {
        if (v->element == GGUF_STRING) {
            sum += walk_string(gguf_array_string(v, i));
        } else if (gguf_array_i64(v, i, &element)) {
            sum += (uint64_t)element;
        } else if (gguf_array_f64(v, i, &real)) {
            sum += real > 0;
        }
    }
    return sum;
}

static inline uint64_t walk_gguf(const struct gguf *g)
{
    uint64_t sum = gguf_version(g) + gguf_file_bytes(g);
    for (size_t i = 0; i < gguf_value_count(g); i++)
        sum += walk_value(g, gguf_value_at(g, i));
    for (size_t i = 0; i < gguf_tensor_count(g); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(g, i);
        const struct block_info *info = block_info(t->type);
        uint64_t rows = t->ne[1] * t->ne[2] * t->ne[3];
        if (gguf_tensor(g, t->name) != t || !info || !info->values || t->bytes != t->ne[0] / info->values * rows * info->bytes)
            abort();
        sum += t->data[0];
        sum += t->data[t->bytes - 1];
    }
    return sum;
}

#endif
