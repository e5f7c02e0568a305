/* engine/tokenizer_impl.h: the tokenizer's tables, shared by tokenizer.c (which builds them) and tokenizer_encode.c (which reads them). */
#ifndef BEDSIDE_ENGINE_TOKENIZER_IMPL_H
#define BEDSIDE_ENGINE_TOKENIZER_IMPL_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/tokenizer.h"
#include "engine/tokenizer_split.h"

/* A token matched as text before anything else: control, unknown and user-defined ones. */
struct added_token {
    const char *text; /* in the tokenizer's blob, len >= 1 bytes */
    uint32_t len;
    int32_t id;
    uint32_t order; /* 0 = matched first: longer before shorter, then lower id */
    bool control;   /* matches only in trusted text */
};

/* An entry of the merge table: open addressing, linear probing. */
struct merge {
    uint64_t key; /* merge_key; 0 = free */
    uint32_t rank;
    int32_t id; /* of the merged token */
};

struct tokenizer {
    int32_t n;                  /* vocabulary size */
    enum split_pattern pattern; /* tokenizer.ggml.pre */
    char *blob;                 /* the bytes of all tokens, one after another */
    uint32_t *start;            /* [n + 1] offsets into blob */
    uint8_t *kind;              /* [n] enum token_kind */
    bool *ends;                 /* [n] generation ends here */
    int32_t byte_id[256];       /* the token of each single byte */

    int32_t *by_bytes; /* ordinary tokens by their bytes: id + 1, 0 = free; [by_bytes_mask + 1], linear probing */
    uint32_t by_bytes_mask;

    struct merge *merges; /* [merges_mask + 1] */
    uint32_t merges_mask;

    struct added_token *added; /* [n_added] sorted by text (bytes), no text twice */
    uint32_t n_added;
    uint32_t *added_by_order;  /* [n_added] index into added */
    uint32_t added_first[257]; /* added[added_first[b] .. added_first[b + 1]) begin with byte b */
};

static inline uint64_t merge_key(int32_t left, int32_t right)
{
    return (uint64_t)(uint32_t)(left + 1) << 32 | (uint32_t)right;
}

static inline uint32_t merge_slot(const struct tokenizer *t, uint64_t key)
{
    return (uint32_t)(key * 0x9E3779B97F4A7C15u >> 32) & t->merges_mask; /* Fibonacci hashing */
}

/* The merge of two adjacent tokens, or NULL. */
static inline const struct merge *merge_find(const struct tokenizer *t, int32_t left, int32_t right)
{
    uint64_t key = merge_key(left, right);
    for (uint32_t i = merge_slot(t, key);; i = (i + 1) & t->merges_mask) {
        const struct merge *m = &t->merges[i];
        if (m->key == key)
            return m;
        if (m->key == 0)
            return NULL;
    }
}

#endif
