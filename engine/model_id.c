#include "engine/model_id.h"

#include <sodium.h>
#include <string.h>

enum {
    LAYOUT_VERSION = 1, /* of pages and packed states, and of the arithmetic that fills them: raise it when either changes */
    TENSOR_HEAD = 4096, /* bytes of each tensor that are read */
};

static void add(crypto_generichash_state *h, const void *data, size_t n)
{
    const uint64_t len = n; /* with its length, so that no two different lists of fields make the same bytes */
    crypto_generichash_update(h, (const unsigned char *)&len, sizeof len);
    crypto_generichash_update(h, data, n);
}

static void add_number(crypto_generichash_state *h, uint64_t n)
{
    add(h, &n, sizeof n);
}

static void add_text(crypto_generichash_state *h, const char *text)
{
    add(h, text, strlen(text));
}

static size_t scalar_bytes(enum gguf_kind kind)
{
    switch (kind) {
    case GGUF_U8:
    case GGUF_I8:
    case GGUF_BOOL:
        return 1;
    case GGUF_U16:
    case GGUF_I16:
        return 2;
    case GGUF_U32:
    case GGUF_I32:
    case GGUF_F32:
        return 4;
    case GGUF_U64:
    case GGUF_I64:
    case GGUF_F64:
        return 8;
    case GGUF_STRING:
    case GGUF_ARRAY:
        break;
    }
    return 0;
}

static void add_string_at(crypto_generichash_state *h, const uint8_t *at)
{
    uint64_t len;
    memcpy(&len, at, sizeof len);
    add(h, at + sizeof len, (size_t)len); /* gguf_open has checked that it lies in the file */
}

static void add_value(crypto_generichash_state *h, const struct gguf_value *v)
{
    add(h, v->key.data, v->key.len);
    add_number(h, (uint64_t)v->kind);
    if (v->kind == GGUF_STRING) {
        add_string_at(h, v->payload);
        return;
    }
    if (v->kind != GGUF_ARRAY) {
        add(h, v->payload, scalar_bytes(v->kind));
        return;
    }
    add_number(h, (uint64_t)v->element);
    add_number(h, v->count);
    if (v->element == GGUF_STRING)
        for (uint64_t i = 0; i < v->count; i++)
            add_string_at(h, v->payload + v->offsets[i]);
    else
        add(h, v->payload, (size_t)v->count * scalar_bytes(v->element));
}

static void add_tensor(crypto_generichash_state *h, const struct gguf_tensor *t)
{
    add_text(h, t->name);
    add_number(h, t->type);
    add(h, t->ne, sizeof t->ne);
    add_number(h, t->bytes);
    add(h, t->data, t->bytes < TENSOR_HEAD ? (size_t)t->bytes : TENSOR_HEAD);
}

int model_id_of(uint8_t id[CACHE_MODEL_ID], const struct gguf *g, const struct backend *b, struct error *err)
{
    if (sodium_init() < 0)
        return error_set(err, "libsodium does not start");
    crypto_generichash_state h;
    crypto_generichash_init(&h, NULL, 0, CACHE_MODEL_ID);
    add_number(&h, LAYOUT_VERSION);
    add_text(&h, b->ops->name);
    add_number(&h, (uint64_t)b->shape.kv_type);
    add_number(&h, (uint64_t)b->shape.n_kv_layers);
    add_number(&h, (uint64_t)b->shape.n_delta_layers);
    add_number(&h, b->ops->page_bytes(b));
    for (size_t i = 0; i < gguf_value_count(g); i++)
        add_value(&h, gguf_value_at(g, i));
    for (size_t i = 0; i < gguf_tensor_count(g); i++)
        add_tensor(&h, gguf_tensor_at(g, i));
    crypto_generichash_final(&h, id, CACHE_MODEL_ID);
    return 0;
}
