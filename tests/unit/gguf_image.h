/* tests/unit/gguf_image.h: takes a GGUF file apart, lets a test change it, and puts it together again in memory.
 *
 * Every function fails the test when something is not as it must be, so that tests read as a list of edits. */
#ifndef BEDSIDE_TESTS_GGUF_IMAGE_H
#define BEDSIDE_TESTS_GGUF_IMAGE_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "engine/blocks.h"
#include "engine/gguf.h"

enum { IMAGE_ALIGNMENT = 32, IMAGE_MOST = 1024 };

struct image_value {
    char *key;
    enum gguf_kind kind;
    struct buf bytes; /* as in the file, after the kind */
};

struct image_tensor {
    char name[64];
    uint32_t n_dims, type;
    uint64_t ne[4];
    const uint8_t *data; /* in the source file, or in `own` */
    size_t bytes;        /* there are this many; the shape may ask for more or less */
    uint8_t *own;
};

struct image {
    struct gguf *source;
    struct image_value values[IMAGE_MOST];
    struct image_tensor tensors[IMAGE_MOST];
    size_t n_values, n_tensors;
    struct buf built;
};

static inline size_t image_kind_bytes(enum gguf_kind k)
{
    static const size_t sizes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return sizes[k];
}

static inline void image_add_bytes(struct buf *b, const void *data, size_t n)
{
    assert_true(buf_add(b, data, n));
}

static inline void image_add_u32(struct buf *b, uint32_t v)
{
    image_add_bytes(b, &v, sizeof v);
}

static inline void image_add_u64(struct buf *b, uint64_t v)
{
    image_add_bytes(b, &v, sizeof v);
}

/* Opens tests/data/NAME.gguf. Release with image_free. */
static inline struct image *image_open(const char *name)
{
    struct image *im = calloc(1, sizeof *im);
    struct error err = {""};
    char path[256];
    snprintf(path, sizeof path, "tests/data/%s.gguf", name);
    assert_non_null(im);
    if (gguf_open(&im->source, path, &err))
        fail_msg("%s: %s", path, err.text);
    for (size_t i = 0; i < gguf_value_count(im->source); i++) {
        const struct gguf_value *v = gguf_value_at(im->source, i);
        struct image_value *to = &im->values[im->n_values++];
        assert_true(im->n_values < IMAGE_MOST);
        to->key = strndup(v->key.data, v->key.len);
        to->kind = v->kind;
        if (v->kind == GGUF_ARRAY) {
            image_add_u32(&to->bytes, v->element);
            image_add_u64(&to->bytes, v->count);
        }
        enum gguf_kind element = v->kind == GGUF_ARRAY ? v->element : v->kind;
        if (element != GGUF_STRING) {
            image_add_bytes(&to->bytes, v->payload, (size_t)v->count * image_kind_bytes(element));
        } else if (v->kind == GGUF_STRING) {
            struct gguf_string s;
            assert_int_equal(gguf_get_string(im->source, to->key, &s, NULL), 1);
            image_add_u64(&to->bytes, s.len);
            image_add_bytes(&to->bytes, s.data, s.len);
        } else if (v->count) { /* strings stand one after the other: all bytes up to the end of the last */
            struct gguf_string last = gguf_array_string(v, v->count - 1);
            image_add_bytes(&to->bytes, v->payload, (size_t)v->offsets[v->count - 1] + sizeof(uint64_t) + last.len);
        }
    }
    for (size_t i = 0; i < gguf_tensor_count(im->source); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(im->source, i);
        struct image_tensor *to = &im->tensors[im->n_tensors++];
        assert_true(im->n_tensors < IMAGE_MOST);
        *to = (struct image_tensor){.n_dims = t->n_dims, .type = t->type, .data = t->data, .bytes = (size_t)t->bytes};
        snprintf(to->name, sizeof to->name, "%s", t->name);
        memcpy(to->ne, t->ne, sizeof to->ne);
    }
    return im;
}

static inline void image_free(struct image *im)
{
    for (size_t i = 0; i < im->n_values; i++) {
        free(im->values[i].key);
        buf_free(&im->values[i].bytes);
    }
    for (size_t i = 0; i < im->n_tensors; i++)
        free(im->tensors[i].own);
    buf_free(&im->built);
    gguf_close(im->source);
    free(im);
}

/* ---- metadata ---- */

static inline struct image_value *image_value(struct image *im, const char *key)
{
    for (size_t i = 0; i < im->n_values; i++)
        if (strcmp(im->values[i].key, key) == 0)
            return &im->values[i];
    return NULL;
}

static inline void image_drop_key(struct image *im, const char *key)
{
    struct image_value *v = image_value(im, key);
    if (!v) {
        fail_msg("no key %s to drop", key);
        return;
    }
    free(v->key);
    buf_free(&v->bytes);
    *v = im->values[--im->n_values];
}

/* A key, old or new, emptied and given a kind. */
static inline struct buf *image_key(struct image *im, const char *key, enum gguf_kind kind)
{
    struct image_value *v = image_value(im, key);
    if (!v) {
        v = &im->values[im->n_values++];
        assert_true(im->n_values < IMAGE_MOST);
        *v = (struct image_value){.key = strdup(key)};
    }
    v->kind = kind;
    buf_clear(&v->bytes);
    return &v->bytes;
}

static inline void image_set_u32(struct image *im, const char *key, uint32_t v)
{
    image_add_u32(image_key(im, key, GGUF_U32), v);
}

static inline void image_set_f32(struct image *im, const char *key, float v)
{
    image_add_bytes(image_key(im, key, GGUF_F32), &v, sizeof v);
}

static inline void image_set_text(struct image *im, const char *key, const char *text)
{
    struct buf *b = image_key(im, key, GGUF_STRING);
    image_add_u64(b, strlen(text));
    image_add_bytes(b, text, strlen(text));
}

static inline void image_set_i32s(struct image *im, const char *key, const int32_t *v, size_t n)
{
    struct buf *b = image_key(im, key, GGUF_ARRAY);
    image_add_u32(b, GGUF_I32);
    image_add_u64(b, n);
    image_add_bytes(b, v, n * sizeof *v);
}

/* ---- tensors ---- */

static inline struct image_tensor *image_tensor(struct image *im, const char *name)
{
    for (size_t i = 0; i < im->n_tensors; i++)
        if (strcmp(im->tensors[i].name, name) == 0)
            return &im->tensors[i];
    fail_msg("no tensor %s", name);
    return NULL;
}

static inline void image_drop_tensor(struct image *im, const char *name)
{
    struct image_tensor *t = image_tensor(im, name);
    free(t->own);
    *t = im->tensors[--im->n_tensors];
}

/* Drops every tensor whose name begins so. */
static inline void image_drop_tensors(struct image *im, const char *prefix)
{
    for (size_t i = im->n_tensors; i-- > 0;)
        if (strncmp(im->tensors[i].name, prefix, strlen(prefix)) == 0)
            image_drop_tensor(im, im->tensors[i].name);
}

static inline void image_rename(struct image *im, const char *from, const char *to)
{
    struct image_tensor *t = image_tensor(im, from);
    snprintf(t->name, sizeof t->name, "%s", to);
}

/* A new f32 tensor of zeros. */
static inline void image_add_tensor(struct image *im, const char *name, uint64_t n_in, uint64_t n_out)
{
    struct image_tensor *t = &im->tensors[im->n_tensors++];
    assert_true(im->n_tensors < IMAGE_MOST);
    *t = (struct image_tensor){.n_dims = 2, .type = BLOCK_F32, .ne = {n_in, n_out, 1, 1}};
    snprintf(t->name, sizeof t->name, "%s", name);
}

/* Gives a tensor own bytes. */
static inline uint8_t *image_own(struct image_tensor *t, size_t bytes)
{
    uint8_t *own = calloc(bytes ? bytes : 1, 1);
    assert_non_null(own);
    if (t->data)
        memcpy(own, t->data, t->bytes < bytes ? t->bytes : bytes);
    free(t->own);
    t->own = own;
    t->data = own;
    t->bytes = bytes;
    return own;
}

/* f32 becomes f16 or bf16 (cut). */
static inline void image_halve(struct image *im, const char *name, enum block_type type)
{
    struct image_tensor *t = image_tensor(im, name);
    assert_int_equal(t->type, BLOCK_F32);
    size_t n = t->bytes / sizeof(float);
    uint16_t *half = calloc(n + 1, sizeof *half);
    assert_non_null(half);
    for (size_t i = 0; i < n; i++) {
        float x;
        uint32_t bits;
        memcpy(&x, t->data + i * sizeof x, sizeof x);
        memcpy(&bits, &x, sizeof bits);
        half[i] = type == BLOCK_F16 ? f32_to_f16(x) : (uint16_t)(bits >> 16);
    }
    free(t->own);
    t->own = (uint8_t *)half;
    t->data = t->own;
    t->bytes = n * sizeof *half;
    t->type = type;
}

/* ---- putting it together ---- */

static inline size_t image_tensor_bytes(const struct image_tensor *t)
{
    return block_bytes((enum block_type)t->type, (size_t)(t->ne[0] * t->ne[1] * t->ne[2] * t->ne[3]));
}

static inline void image_pad(struct buf *b)
{
    while (b->len % IMAGE_ALIGNMENT)
        assert_true(buf_putc(b, '\0'));
}

/* The file's bytes, valid until the image changes or is freed. A tensor that has fewer bytes than its shape asks for is filled up with zeros. */
static inline const struct buf *image_build(struct image *im)
{
    struct buf *b = &im->built;
    buf_clear(b);
    image_add_bytes(b, "GGUF", 4);
    image_add_u32(b, 3);
    image_add_u64(b, im->n_tensors);
    image_add_u64(b, im->n_values);
    for (size_t i = 0; i < im->n_values; i++) {
        const struct image_value *v = &im->values[i];
        image_add_u64(b, strlen(v->key));
        image_add_bytes(b, v->key, strlen(v->key));
        image_add_u32(b, v->kind);
        image_add_bytes(b, v->bytes.data, v->bytes.len);
    }
    uint64_t offset = 0;
    for (size_t i = 0; i < im->n_tensors; i++) {
        const struct image_tensor *t = &im->tensors[i];
        image_add_u64(b, strlen(t->name));
        image_add_bytes(b, t->name, strlen(t->name));
        image_add_u32(b, t->n_dims);
        for (uint32_t d = 0; d < t->n_dims; d++)
            image_add_u64(b, t->ne[d]);
        image_add_u32(b, t->type);
        image_add_u64(b, offset);
        offset += (image_tensor_bytes(t) + IMAGE_ALIGNMENT - 1) / IMAGE_ALIGNMENT * IMAGE_ALIGNMENT;
    }
    image_pad(b);
    for (size_t i = 0; i < im->n_tensors; i++) {
        const struct image_tensor *t = &im->tensors[i];
        size_t want = image_tensor_bytes(t), have = t->bytes < want ? t->bytes : want;
        if (have)
            image_add_bytes(b, t->data, have);
        for (size_t k = have; k < want; k++)
            assert_true(buf_putc(b, '\0'));
        image_pad(b);
    }
    return b;
}

/* Writes the file to `path`. */
static inline void image_write(struct image *im, const char *path)
{
    const struct buf *b = image_build(im);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(b->data, 1, b->len, f), b->len);
    assert_int_equal(fclose(f), 0);
}

#endif
