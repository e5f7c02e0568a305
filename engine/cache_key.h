/* engine/cache_key.h: what names a stretch of text in the prefix cache, in memory and on disk alike.
 *
 * A key stands for the model, the namespace and every token from the first one on: the root key is a hash of model and namespace, and each
 * following key is a hash of the tokens of one grid cell, keyed (BLAKE2b's key) with the key before. So equal text makes equal keys, nothing below one
 * namespace's root is ever found from another's, and a key says nothing of the text to somebody who cannot guess all of it. */
#ifndef BEDSIDE_ENGINE_CACHE_KEY_H
#define BEDSIDE_ENGINE_CACHE_KEY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { CACHE_NAMESPACE_MAX = 64, CACHE_MODEL_ID = 32 };

struct cache_key {
    uint8_t bytes[16];
};

/* 1..CACHE_NAMESPACE_MAX of A-Z a-z 0-9 . _ - and not starting with a dot or dash. (The default namespace is "", which a client cannot name.) */
bool cache_namespace_valid(const char *ns, size_t len);

/* The key before the first token. ns: "" or a valid namespace. */
struct cache_key cache_key_root(const uint8_t model_id[CACHE_MODEL_ID], const char *ns);

/* The key after n (>= 0) more tokens than `before`. */
struct cache_key cache_key_next(const struct cache_key *before, const int32_t *ids, int n);

static inline bool cache_key_equal(const struct cache_key *a, const struct cache_key *b)
{
    return memcmp(a->bytes, b->bytes, sizeof a->bytes) == 0;
}

/* A snapshot between grid lines (engine/prefix_cache.h). */
enum { CACHE_TAILS_MAX = 32 };
struct cache_tail {
    int position; /* tokens from the start of the text, no multiple of 64 */
    size_t bytes; /* of the page and the state */
    struct cache_key key;
};

#endif
