#include "engine/cache_key.h"

#include <sodium.h>

bool cache_namespace_valid(const char *ns, size_t len)
{
    if (!ns || len < 1 || len > CACHE_NAMESPACE_MAX)
        return false;
    for (size_t i = 0; i < len; i++) {
        char c = ns[i];
        bool word = (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
        if (!word && (i == 0 || (c != '.' && c != '-')))
            return false;
    }
    return true;
}

struct cache_key cache_key_root(const uint8_t model_id[CACHE_MODEL_ID], const char *ns)
{
    /* The number is the version of everything a key stands for: the keys' own scheme and the layout of the files. */
    static const char scheme[] = "bedside prefix cache 1";
    struct cache_key key;
    crypto_generichash_state s;
    crypto_generichash_init(&s, model_id, CACHE_MODEL_ID, sizeof key.bytes);
    crypto_generichash_update(&s, (const unsigned char *)scheme, sizeof scheme);
    crypto_generichash_update(&s, (const unsigned char *)ns, strlen(ns));
    crypto_generichash_final(&s, key.bytes, sizeof key.bytes);
    return key;
}

struct cache_key cache_key_next(const struct cache_key *before, const int32_t *ids, int n)
{
    struct cache_key key;
    crypto_generichash_state s;
    crypto_generichash_init(&s, before->bytes, sizeof before->bytes, sizeof key.bytes);
    for (int i = 0; i < n; i++) {
        uint32_t id = (uint32_t)ids[i];
        const unsigned char le[4] = {(unsigned char)id, (unsigned char)(id >> 8), (unsigned char)(id >> 16), (unsigned char)(id >> 24)};
        crypto_generichash_update(&s, le, sizeof le);
    }
    crypto_generichash_final(&s, key.bytes, sizeof key.bytes);
    return key;
}
