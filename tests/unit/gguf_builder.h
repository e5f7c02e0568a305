/* tests/unit/gguf_builder.h: writes GGUF files from nothing, valid or not: every count, kind and offset is what the test says. (To change a real
 * file, see gguf_image.h.) */
#ifndef BEDSIDE_TESTS_GGUF_BUILDER_H
#define BEDSIDE_TESTS_GGUF_BUILDER_H

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <string.h>

#include "base/buf.h"
#include "engine/blocks.h"
#include "engine/gguf.h"

struct image {
    struct buf values, tensors;
    uint64_t n_values, n_tensors; /* as the header will say */
    uint32_t version;
    uint64_t alignment, data_bytes;
};

static inline struct image new_image(void)
{
    return (struct image){.version = 3, .alignment = 32};
}

static inline void put(struct buf *b, uint64_t value, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        buf_putc(b, (char)(value & 0xFF));
        value >>= 8;
    }
}

static inline void put_text(struct buf *b, const char *text, size_t len)
{
    put(b, len, 8);
    buf_add(b, text, len);
}

/* A key and its kind; the caller writes the value. */
static inline void key(struct image *m, const char *name, uint32_t kind)
{
    m->n_values++;
    put_text(&m->values, name, strlen(name));
    put(&m->values, kind, 4);
}

static inline void key_number(struct image *m, const char *name, uint32_t kind, uint64_t bits, size_t bytes)
{
    key(m, name, kind);
    put(&m->values, bits, bytes);
}

static inline void key_string(struct image *m, const char *name, const char *text)
{
    key(m, name, GGUF_STRING);
    put_text(&m->values, text, strlen(text));
}

static inline void key_array(struct image *m, const char *name, uint32_t element, uint64_t count)
{
    key(m, name, GGUF_ARRAY);
    put(&m->values, element, 4);
    put(&m->values, count, 8);
}

static inline void tensor(struct image *m, const char *name, uint32_t n_dims, const uint64_t *ne, uint32_t type, uint64_t offset)
{
    m->n_tensors++;
    put_text(&m->tensors, name, strlen(name));
    put(&m->tensors, n_dims, 4);
    for (uint32_t d = 0; d < n_dims; d++)
        put(&m->tensors, ne[d], 8);
    put(&m->tensors, type, 4);
    put(&m->tensors, offset, 8);
}

/* Header, values, tensors, padding, data_bytes of data (byte i is i mod 251). Releases the image's buffers. */
static inline struct buf finish(struct image *m)
{
    struct buf file = BUF_INIT;
    buf_puts(&file, "GGUF");
    put(&file, m->version, 4);
    put(&file, m->n_tensors, 8);
    put(&file, m->n_values, 8);
    buf_add(&file, m->values.data, m->values.len);
    buf_add(&file, m->tensors.data, m->tensors.len);
    while (m->data_bytes && m->alignment && file.len % m->alignment)
        buf_putc(&file, '\0');
    for (uint64_t i = 0; i < m->data_bytes; i++)
        buf_putc(&file, (char)(i % 251));
    buf_free(&m->values);
    buf_free(&m->tensors);
    assert_false(file.failed);
    return file;
}

/* One of every kind of value, two tensors, nothing behind the last. */
static inline struct image small_image(void)
{
    struct image m = new_image();
    key_string(&m, "general.architecture", "qwen3");
    key_number(&m, "general.alignment", GGUF_U32, 32, 4);
    key_number(&m, "u8", GGUF_U8, 200, 1);
    key_number(&m, "i8", GGUF_I8, 0x85, 1);
    key_number(&m, "u16", GGUF_U16, 60000, 2);
    key_number(&m, "i16", GGUF_I16, 0xFFFE, 2);
    key_number(&m, "i32", GGUF_I32, 0xFFFFFFFF, 4);
    key_number(&m, "u64", GGUF_U64, UINT64_MAX, 8);
    key_number(&m, "i64", GGUF_I64, 1, 8);
    key_number(&m, "f32", GGUF_F32, 0x3FC00000, 4);
    key_number(&m, "f64", GGUF_F64, 0x4000000000000000, 8);
    key_number(&m, "yes", GGUF_BOOL, 1, 1);
    key_array(&m, "words", GGUF_STRING, 3);
    put_text(&m.values, "one", 3);
    put_text(&m.values, "", 0);
    put_text(&m.values, "th\0ree", 6);
    key_array(&m, "numbers", GGUF_I16, 2);
    put(&m.values, 0xFFF6, 2);
    put(&m.values, 77, 2);
    key_array(&m, "reals", GGUF_F32, 1);
    put(&m.values, 0x3FC00000, 4);
    key_array(&m, "none", GGUF_U64, 0);
    tensor(&m, "a", 1, (uint64_t[]){5}, BLOCK_F32, 0);
    tensor(&m, "b", 2, (uint64_t[]){32, 2}, BLOCK_Q8_0, 32);
    m.data_bytes = 32 + 68;
    return m;
}

static inline struct buf small_file(void)
{
    struct image m = small_image();
    return finish(&m);
}

#endif
