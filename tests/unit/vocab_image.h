/* tests/unit/vocab_image.h: vocabularies for tests, as the image of a GGUF file in memory.
 *
 * vocab_default() is a small, complete one: the 256 bytes (ids 0 to 255 in the order of spec section 2), a few merges' products, some added
 * tokens and padding. A test changes what it is about and opens the result. */
#ifndef BEDSIDE_TESTS_VOCAB_IMAGE_H
#define BEDSIDE_TESTS_VOCAB_IMAGE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "engine/gguf.h"
#include "engine/tokenizer.h"

enum { VOCAB_MAX_TOKENS = 1024, VOCAB_MAX_MERGES = 1024, VOCAB_TEXT = 48, VOCAB_NO_ID = -1 };

struct vocab {
    const char *model, *pre;                   /* NULL: the key is absent */
    char tokens[VOCAB_MAX_TOKENS][VOCAB_TEXT]; /* as spelled in the file */
    int32_t types[VOCAB_MAX_TOKENS];
    char merges[VOCAB_MAX_MERGES][VOCAB_TEXT];
    uint64_t n_tokens, n_types, n_merges; /* n_types == 0: no token_type */
    uint64_t n_scores;                    /* 0: no scores */
    bool no_tokens, no_merges;            /* the key is absent */
    int64_t bos, eos, eot, padding;       /* VOCAB_NO_ID: absent */
};

static inline int32_t vocab_add(struct vocab *v, const char *spelling, int32_t type)
{
    if (v->n_tokens >= VOCAB_MAX_TOKENS || strlen(spelling) >= VOCAB_TEXT)
        abort();
    snprintf(v->tokens[v->n_tokens], VOCAB_TEXT, "%s", spelling);
    v->types[v->n_tokens] = type;
    v->n_types = ++v->n_tokens;
    return (int32_t)v->n_tokens - 1;
}

static inline void vocab_merge(struct vocab *v, const char *merge)
{
    if (v->n_merges >= VOCAB_MAX_MERGES || strlen(merge) >= VOCAB_TEXT)
        abort();
    snprintf(v->merges[v->n_merges++], VOCAB_TEXT, "%s", merge);
}

/* The byte b in the printable alphabet, as UTF-8. */
static inline void vocab_byte(unsigned b, char spelling[3])
{
    unsigned cp = b, rest = 0;
    for (unsigned i = 0; i < 256; i++) {
        bool itself = (i >= 33 && i <= 126) || (i >= 161 && i <= 172) || i >= 174;
        if (i == b && !itself)
            cp = 256 + rest;
        rest += !itself;
    }
    if (cp < 0x80) {
        spelling[0] = (char)cp;
        spelling[1] = '\0';
    } else {
        spelling[0] = (char)(0xC0 | cp >> 6);
        spelling[1] = (char)(0x80 | (cp & 0x3F));
        spelling[2] = '\0';
    }
}

static inline void vocab_init(struct vocab *v)
{
    *v = (struct vocab){.model = "gpt2", .pre = "qwen35", .bos = VOCAB_NO_ID, .eos = VOCAB_NO_ID, .eot = VOCAB_NO_ID, .padding = VOCAB_NO_ID};
    for (int pass = 0; pass < 2; pass++)
        for (unsigned b = 0; b < 256; b++) {
            bool itself = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
            char spelling[3];
            vocab_byte(b, spelling);
            if (itself == (pass == 0))
                vocab_add(v, spelling, TOKEN_NORMAL);
        }
}

static inline void vocab_default(struct vocab *v)
{
    static const char *const products[] = {"he", "ll", "hell", "hello", "Ġw", "or", "Ġwor", "Ã©", "Ġhello"};
    static const char *const merges[] = {"h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "Ã ©"};
    vocab_init(v);
    for (size_t i = 0; i < sizeof products / sizeof *products; i++)
        vocab_add(v, products[i], TOKEN_NORMAL);
    for (size_t i = 0; i < sizeof merges / sizeof *merges; i++)
        vocab_merge(v, merges[i]);
    vocab_add(v, "<|endoftext|>", TOKEN_CONTROL);
    vocab_add(v, "<|im_start|>", TOKEN_CONTROL);
    v->eos = vocab_add(v, "<|im_end|>", TOKEN_CONTROL);
    vocab_add(v, "<think>", TOKEN_USER);
    vocab_add(v, "</think>", TOKEN_USER);
    vocab_add(v, "[PAD270]", TOKEN_UNUSED);
    vocab_add(v, "[PAD271]", TOKEN_UNUSED);
}

static inline void vocab_put(struct buf *b, uint64_t value, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        buf_putc(b, (char)(value >> (8 * i)));
}

static inline void vocab_put_text(struct buf *b, const char *text)
{
    vocab_put(b, strlen(text), 8);
    buf_puts(b, text);
}

/* The head of a key; the value follows. */
static inline void vocab_put_key(struct buf *b, uint64_t *n_keys, const char *key, enum gguf_kind kind)
{
    char name[64];
    snprintf(name, sizeof name, "tokenizer.ggml.%s", key);
    vocab_put_text(b, name);
    vocab_put(b, (uint64_t)kind, 4);
    (*n_keys)++;
}

static inline void vocab_put_array(struct buf *b, uint64_t *n_keys, const char *key, enum gguf_kind element, uint64_t count)
{
    vocab_put_key(b, n_keys, key, GGUF_ARRAY);
    vocab_put(b, (uint64_t)element, 4);
    vocab_put(b, count, 8);
}

static inline void vocab_put_id(struct buf *b, uint64_t *n_keys, const char *key, int64_t id)
{
    if (id == VOCAB_NO_ID)
        return;
    vocab_put_key(b, n_keys, key, GGUF_U32);
    vocab_put(b, (uint64_t)id, 4);
}

/* The file image; release with buf_free. */
static inline struct buf vocab_image(const struct vocab *v)
{
    struct buf keys = BUF_INIT, image = BUF_INIT;
    uint64_t n = 0;
    if (v->model) {
        vocab_put_key(&keys, &n, "model", GGUF_STRING);
        vocab_put_text(&keys, v->model);
    }
    if (v->pre) {
        vocab_put_key(&keys, &n, "pre", GGUF_STRING);
        vocab_put_text(&keys, v->pre);
    }
    if (!v->no_tokens) {
        vocab_put_array(&keys, &n, "tokens", GGUF_STRING, v->n_tokens);
        for (size_t i = 0; i < v->n_tokens; i++)
            vocab_put_text(&keys, v->tokens[i]);
    }
    if (v->n_types) {
        vocab_put_array(&keys, &n, "token_type", GGUF_I32, v->n_types);
        for (size_t i = 0; i < v->n_types; i++)
            vocab_put(&keys, (uint64_t)(int64_t)v->types[i], 4);
    }
    if (v->n_scores) {
        vocab_put_array(&keys, &n, "scores", GGUF_F32, v->n_scores);
        for (size_t i = 0; i < v->n_scores; i++)
            vocab_put(&keys, 0, 4);
    }
    if (!v->no_merges) {
        vocab_put_array(&keys, &n, "merges", GGUF_STRING, v->n_merges);
        for (size_t i = 0; i < v->n_merges; i++)
            vocab_put_text(&keys, v->merges[i]);
    }
    vocab_put_id(&keys, &n, "bos_token_id", v->bos);
    vocab_put_id(&keys, &n, "eos_token_id", v->eos);
    vocab_put_id(&keys, &n, "eot_token_id", v->eot);
    vocab_put_id(&keys, &n, "padding_token_id", v->padding);

    buf_puts(&image, "GGUF");
    vocab_put(&image, 3, 4);
    vocab_put(&image, 0, 8);
    vocab_put(&image, n, 8);
    buf_add(&image, keys.data, keys.len);
    while (image.len % 32)
        buf_putc(&image, '\0');
    buf_free(&keys);
    return image;
}

/* Opens the vocabulary; *t is independent of it. */
static inline int vocab_open(struct tokenizer **t, const struct vocab *v, struct error *err)
{
    struct buf image = vocab_image(v);
    struct gguf *g = NULL;
    *t = NULL;
    int rc = gguf_open_bytes(&g, image.data, image.len, err);
    if (rc == 0)
        rc = tokenizer_open(t, g, err);
    gguf_close(g);
    buf_free(&image);
    return rc;
}

#endif
