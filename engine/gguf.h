/* engine/gguf.h: reads a GGUF v2/v3 model file, or all parts of a split one, by mmap (spec/gguf.md sections 1 and 4).
 *
 * gguf_open checks everything that can be checked without knowing the architecture: afterwards every key, string, array and tensor
 * range lies inside the mapping, names are unique and offsets do not overlap, so readers need no further bounds checks. A hostile or
 * truncated file gives one line that says what is wrong and where. All pointers handed out live until gguf_close. */
#ifndef BEDSIDE_ENGINE_GGUF_H
#define BEDSIDE_ENGINE_GGUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

struct gguf;

/* The numbers of the file format. */
enum gguf_kind {
    GGUF_U8 = 0,
    GGUF_I8,
    GGUF_U16,
    GGUF_I16,
    GGUF_U32,
    GGUF_I32,
    GGUF_F32,
    GGUF_BOOL,
    GGUF_STRING,
    GGUF_ARRAY,
    GGUF_U64,
    GGUF_I64,
    GGUF_F64,
};

struct gguf_string {
    const char *data; /* len bytes, no terminator */
    size_t len;
};

struct gguf_value {
    struct gguf_string key;
    enum gguf_kind kind;     /* GGUF_ARRAY: see element and count */
    enum gguf_kind element;  /* of an array */
    uint64_t count;          /* of an array; 1 otherwise */
    const uint8_t *payload;  /* the value's bytes in the mapping (after the array head) */
    const uint64_t *offsets; /* arrays of strings: offset of each string's length word from payload [count]; else NULL */
};

struct gguf_tensor {
    char *name; /* NUL-terminated, 1..63 printable bytes */
    uint32_t n_dims;
    uint64_t ne[4];      /* ne[0] is contiguous; missing dimensions are 1 */
    uint32_t type;       /* enum block_type, supported */
    const uint8_t *data; /* `bytes` bytes in the mapping */
    uint64_t bytes;
    uint64_t file_offset; /* of data, in its part */
    uint32_t part;        /* 0-based part of a split model */
};

/* Opens `path`; for NAME-00001-of-0000N.gguf also the other parts. */
int gguf_open(struct gguf **out, const char *path, struct error *err);

/* Opens a file image in memory that outlives the handle (tests, fuzzing). */
int gguf_open_bytes(struct gguf **out, const void *data, size_t size, struct error *err);
void gguf_close(struct gguf *g);

uint32_t gguf_version(const struct gguf *g);
/* Brings the mapped parts into memory and into the page tables, so that the first request does not wait for that. Takes as long as the disk needs; where
 * the system cannot, it is only asked to read ahead. Only for a file that fits in memory. */
void gguf_load(const struct gguf *g);

/* The tensor's bytes are not needed any more (they may be read again, from disk): gives its memory back to the system. */
void gguf_forget(const struct gguf *g, const struct gguf_tensor *t);

uint64_t gguf_file_bytes(const struct gguf *g); /* over all parts */

size_t gguf_value_count(const struct gguf *g);
const struct gguf_value *gguf_value_at(const struct gguf *g, size_t i);     /* file order, of part 1 */
const struct gguf_value *gguf_value(const struct gguf *g, const char *key); /* NULL: absent */

size_t gguf_tensor_count(const struct gguf *g);
const struct gguf_tensor *gguf_tensor_at(const struct gguf *g, size_t i);      /* file order, over all parts */
const struct gguf_tensor *gguf_tensor(const struct gguf *g, const char *name); /* NULL: absent */

/* Typed reads. Each returns 1 and sets *out, 0 when the key is absent (*out untouched), or -1 with err set when the value has another
 * kind or does not fit. Integers are accepted from any integer kind, floats from f32 and f64 (finite only), bools from bool and 0/1. */
int gguf_get_u64(const struct gguf *g, const char *key, uint64_t *out, struct error *err);
int gguf_get_f64(const struct gguf *g, const char *key, double *out, struct error *err);
int gguf_get_bool(const struct gguf *g, const char *key, bool *out, struct error *err);
int gguf_get_string(const struct gguf *g, const char *key, struct gguf_string *out, struct error *err);

/* Element i (< count) of an array value. */
struct gguf_string gguf_array_string(const struct gguf_value *v, uint64_t i); /* element kind must be GGUF_STRING */
bool gguf_array_i64(const struct gguf_value *v, uint64_t i, int64_t *out);    /* any integer or bool element; false: not an integer */
bool gguf_array_f64(const struct gguf_value *v, uint64_t i, double *out);     /* f32 or f64 element */

#endif
