#include "engine/gguf_part.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/alloc.h"
#include "engine/blocks.h"

/* Limits of spec/gguf.md section 4. */
enum {
    HEADER_BYTES = 24,
    MIN_VALUE_BYTES = 13,
    MIN_TENSOR_BYTES = 33,
    MAX_VALUES = 65536,
    MAX_TENSORS = 1000000,
    MAX_KEY = 65535,
    MAX_NAME = GGUF_NAME_ROOM - 1,
    MAX_ALIGNMENT = 65536,
    DEFAULT_ALIGNMENT = 32,
};
#define MAX_STRING   ((uint64_t)1 << 30)
#define MAX_ELEMENTS ((uint64_t)1 << 62)

/* Reads forward through one part; pos <= size always. */
struct cursor {
    const uint8_t *data;
    size_t size, pos;
};

static size_t left(const struct cursor *c)
{
    return c->size - c->pos;
}

static bool take(struct cursor *c, uint64_t n, const uint8_t **bytes)
{
    if (n > left(c))
        return false;
    *bytes = c->data + c->pos;
    c->pos += (size_t)n;
    return true;
}

static bool take_u32(struct cursor *c, uint32_t *value)
{
    const uint8_t *p;
    if (!take(c, 4, &p))
        return false;
    *value = gguf_load_u32(p);
    return true;
}

static bool take_u64(struct cursor *c, uint64_t *value)
{
    const uint8_t *p;
    if (!take(c, 8, &p))
        return false;
    *value = gguf_load_u64(p);
    return true;
}

/* ---- messages ---- */

/* A key or name as it may be shown: at most 63 bytes, anything but printable ASCII as '?'. */
struct shown {
    char text[GGUF_NAME_ROOM];
};

static struct shown show(struct gguf_string s)
{
    struct shown out;
    size_t n = s.len < MAX_NAME ? s.len : MAX_NAME;
    for (size_t i = 0; i < n; i++)
        out.text[i] = s.data[i] >= 0x20 && s.data[i] < 0x7F ? s.data[i] : '?';
    out.text[n] = '\0';
    return out;
}

/* The file ends inside `what`, at or before which the cursor stands. */
static int cut_short(const struct cursor *c, const char *what, struct error *err)
{
    return error_set(err, "the file ends inside %s (at byte %zu of %zu): the download is incomplete, or the file is damaged; fetch it again", what,
                     c->pos, c->size);
}

const char *gguf_kind_name(enum gguf_kind kind)
{
    static const char *const names[] = {"u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64"};
    return names[kind];
}

/* ---- values ---- */

size_t gguf_kind_bytes(enum gguf_kind kind)
{
    static const uint8_t bytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return bytes[kind];
}

/* Takes a string's length word and bytes. 0, or -1 with err set; `what` names it. */
static int take_string(struct cursor *c, uint64_t max, const char *what, struct gguf_string *out, struct error *err)
{
    uint64_t len;
    const uint8_t *bytes;
    size_t at = c->pos;
    if (!take_u64(c, &len))
        return cut_short(c, what, err);
    if (len > max)
        return error_set(err, "%s at byte %zu claims a length of %" PRIu64 " bytes; at most %" PRIu64 " make sense: the file is damaged", what, at,
                         len, max);
    if (!take(c, len, &bytes))
        return cut_short(c, what, err);
    *out = (struct gguf_string){(const char *)bytes, (size_t)len};
    return 0;
}

/* Bools are 0 or 1 and floats finite (rule 7), so that no later reader meets anything else. */
static int check_elements(const struct gguf_value *v, enum gguf_kind kind, const char *key, struct error *err)
{
    for (uint64_t i = 0; i < v->count; i++) {
        if (kind == GGUF_BOOL && v->payload[i] > 1)
            return error_set(err, "key '%s' is a bool with the byte %u: only 0 and 1 are valid", key, v->payload[i]);
        if ((kind == GGUF_F32 && !isfinite(gguf_load_f32(v->payload + 4 * i))) || (kind == GGUF_F64 && !isfinite(gguf_load_f64(v->payload + 8 * i))))
            return error_set(err, "key '%s' holds a number that is not finite", key);
    }
    return 0;
}

/* Takes `v->count` strings of an array and notes where each starts. */
static int take_string_array(struct cursor *c, struct gguf_value *v, const char *key, struct error *err)
{
    size_t start = c->pos;
    uint64_t *offsets = alloc_array((size_t)v->count, sizeof *offsets); /* count <= bytes left / 8 */
    if (!offsets)
        return error_set(err, "key '%s': out of memory for %" PRIu64 " strings", key, v->count);
    v->offsets = offsets;
    char what[GGUF_NAME_ROOM + 64];
    snprintf(what, sizeof what, "a string of the array '%s'", key);
    for (uint64_t i = 0; i < v->count; i++) {
        struct gguf_string s;
        offsets[i] = c->pos - start;
        if (take_string(c, MAX_STRING, what, &s, err))
            return -1;
    }
    return 0;
}

/* Takes the value that follows a key. v->key is set. */
static int take_value(struct cursor *c, struct gguf_value *v, struct error *err)
{
    struct shown key = show(v->key);
    char what[GGUF_NAME_ROOM + 32];
    snprintf(what, sizeof what, "the value of key '%s'", key.text);

    uint32_t kind;
    if (!take_u32(c, &kind))
        return cut_short(c, what, err);
    if (kind > GGUF_F64)
        return error_set(err, "key '%s' has the unknown value type %" PRIu32, key.text, kind);
    v->kind = (enum gguf_kind)kind;
    v->count = 1;
    v->element = v->kind;
    if (v->kind == GGUF_STRING) {
        struct gguf_string s;
        v->payload = c->data + c->pos;
        return take_string(c, MAX_STRING, what, &s, err);
    }
    if (v->kind == GGUF_ARRAY) {
        uint32_t element;
        if (!take_u32(c, &element) || !take_u64(c, &v->count))
            return cut_short(c, what, err);
        if (element == GGUF_ARRAY)
            return error_set(err, "key '%s' is an array of arrays, which no model file uses", key.text);
        if (element > GGUF_F64)
            return error_set(err, "key '%s' is an array of the unknown value type %" PRIu32, key.text, element);
        v->element = (enum gguf_kind)element;
        size_t smallest = element == GGUF_STRING ? 8 : gguf_kind_bytes(v->element);
        if (v->count > left(c) / smallest)
            return error_set(err,
                             "key '%s' claims an array of %" PRIu64
                             " elements, but only %zu bytes follow: the download is incomplete, or the file is "
                             "damaged; fetch it again",
                             key.text, v->count, left(c));
    }
    v->payload = c->data + c->pos;
    if (v->element == GGUF_STRING)
        return take_string_array(c, v, key.text, err);
    const uint8_t *bytes;
    if (!take(c, v->count * gguf_kind_bytes(v->element), &bytes))
        return cut_short(c, what, err);
    return check_elements(v, v->element, key.text, err);
}

static int compare_strings(struct gguf_string a, struct gguf_string b)
{
    int order = memcmp(a.data, b.data, a.len < b.len ? a.len : b.len);
    return order ? order : (a.len > b.len) - (a.len < b.len);
}

static int compare_keys(const void *a, const void *b)
{
    const struct gguf_value *const *x = a, *const *y = b;
    return compare_strings((*x)->key, (*y)->key);
}

/* Sorts the keys for lookup and refuses duplicates. Sorting, unlike a hash table, has no inputs that make it quadratic. */
static int index_values(struct gguf_part *p, struct error *err)
{
    p->by_key = alloc_array(p->n_values, sizeof *p->by_key);
    if (!p->by_key)
        return error_set(err, "out of memory for %zu keys", p->n_values);
    for (size_t i = 0; i < p->n_values; i++)
        p->by_key[i] = &p->values[i];
    qsort(p->by_key, p->n_values, sizeof *p->by_key, compare_keys);
    for (size_t i = 1; i < p->n_values; i++)
        if (compare_keys(&p->by_key[i - 1], &p->by_key[i]) == 0)
            return error_set(err, "key '%s' occurs twice", show(p->by_key[i]->key).text);
    return 0;
}

static int take_values(struct cursor *c, struct gguf_part *p, uint64_t n, struct error *err)
{
    p->values = alloc_array((size_t)n, sizeof *p->values); /* n <= MAX_VALUES */
    if (!p->values)
        return error_set(err, "out of memory for %" PRIu64 " keys", n);
    for (uint64_t i = 0; i < n; i++) {
        struct gguf_value *v = &p->values[i];
        char what[32];
        snprintf(what, sizeof what, "key %" PRIu64, i);
        size_t at = c->pos;
        if (take_string(c, MAX_KEY, what, &v->key, err))
            return -1;
        if (v->key.len == 0)
            return error_set(err, "key %" PRIu64 " at byte %zu is empty", i, at);
        for (size_t k = 0; k < v->key.len; k++)
            if ((unsigned char)v->key.data[k] < 0x20 || v->key.data[k] == 0x7F)
                return error_set(err, "key %" PRIu64 " ('%s') at byte %zu has a control byte in it", i, show(v->key).text, at);
        p->n_values = (size_t)i + 1;
        if (take_value(c, v, err))
            return -1;
    }
    return index_values(p, err);
}

const struct gguf_value *gguf_part_value(const struct gguf_part *p, const char *key)
{
    struct gguf_value wanted = {.key = {key, strlen(key)}};
    const struct gguf_value *w = &wanted;
    const struct gguf_value **found = bsearch(&w, p->by_key, p->n_values, sizeof *p->by_key, compare_keys);
    return found ? *found : NULL;
}

/* ---- tensors ---- */

static int take_tensor(struct cursor *c, struct gguf_tensor *t, uint64_t index, char *name_room, struct error *err)
{
    char what[64];
    snprintf(what, sizeof what, "the name of tensor %" PRIu64, index);
    struct gguf_string name = {0};
    size_t at = c->pos;
    if (take_string(c, MAX_NAME, what, &name, err))
        return -1;
    if (name.len == 0)
        return error_set(err, "tensor %" PRIu64 " at byte %zu has an empty name", index, at);
    for (size_t i = 0; i < name.len; i++)
        if (name.data[i] < 0x20 || name.data[i] > 0x7E)
            return error_set(err, "tensor %" PRIu64 " at byte %zu: its name '%s' has a byte that is not printable ASCII", index, at, show(name).text);
    memcpy(name_room, name.data, name.len);
    t->name = name_room;

    snprintf(what, sizeof what, "the record of tensor %" PRIu64, index);
    if (!take_u32(c, &t->n_dims))
        return cut_short(c, what, err);
    if (t->n_dims < 1 || t->n_dims > 4)
        return error_set(err, "tensor '%s' has %" PRIu32 " dimensions; 1 to 4 are possible", t->name, t->n_dims);
    uint64_t elements = 1;
    for (uint32_t d = 0; d < 4; d++) {
        t->ne[d] = 1;
        if (d >= t->n_dims)
            continue;
        if (!take_u64(c, &t->ne[d]))
            return cut_short(c, what, err);
        if (t->ne[d] == 0)
            return error_set(err, "tensor '%s': dimension %" PRIu32 " is 0", t->name, d);
        if (t->ne[d] > MAX_ELEMENTS / elements)
            return error_set(err, "tensor '%s' has more than 2^62 elements: the file is damaged", t->name);
        elements *= t->ne[d];
    }
    if (!take_u32(c, &t->type) || !take_u64(c, &t->file_offset))
        return cut_short(c, what, err);
    const struct block_info *info = block_info(t->type);
    if (!info)
        return error_set(err, "tensor '%s' has the unknown type number %" PRIu32, t->name, t->type);
    if (info->values == 0)
        return error_set(err, "tensor '%s' has the type %s (%" PRIu32 "), which bedside cannot read; use a Q4_K_M, Q6_K or Q8_0 file of this model",
                         t->name, info->name, t->type);
    if (t->ne[0] % info->values)
        return error_set(err, "tensor '%s': rows of %" PRIu64 " values do not divide into %s blocks of %u", t->name, t->ne[0], info->name,
                         info->values);
    if (__builtin_mul_overflow(elements / info->values, (uint64_t)info->bytes, &t->bytes) || t->bytes > MAX_ELEMENTS)
        return error_set(err, "tensor '%s' has more than 2^62 bytes: the file is damaged", t->name);
    return 0;
}

static int compare_offsets(const void *a, const void *b)
{
    const struct gguf_tensor *const *x = a, *const *y = b;
    return ((*x)->file_offset > (*y)->file_offset) - ((*x)->file_offset < (*y)->file_offset);
}

/* Tensors t[0..n), whose file_offset still counts from the data's start: inside the file, aligned, disjoint (rules 11 and 12). */
static int place_tensors(const struct gguf_part *p, struct gguf_tensor *t, size_t n, uint64_t data_start, uint64_t alignment, struct error *err)
{
    uint64_t needed = 0;
    const struct gguf_tensor *last = NULL;
    for (size_t i = 0; i < n; i++) {
        if (t[i].file_offset % alignment)
            return error_set(err, "tensor '%s': its offset %" PRIu64 " is not a multiple of the alignment %" PRIu64, t[i].name, t[i].file_offset,
                             alignment);
        if (t[i].file_offset > MAX_ELEMENTS)
            return error_set(err, "tensor '%s': its offset %" PRIu64 " is past any possible file: the file is damaged", t[i].name, t[i].file_offset);
        t[i].file_offset += data_start; /* below 2^62 + 2^63 */
        if (t[i].file_offset + t[i].bytes > needed) {
            needed = t[i].file_offset + t[i].bytes; /* below 2^64 */
            last = &t[i];
        }
    }
    if (last && needed > p->size)
        return error_set(err,
                         "the file is incomplete: its tensors need %" PRIu64
                         " bytes, it has %zu (tensor '%s' ends past the end); the download was cut "
                         "short, fetch it again",
                         needed, p->size, last->name);
    const struct gguf_tensor **order = alloc_array(n, sizeof *order);
    if (!order)
        return error_set(err, "out of memory for %zu tensors", n);
    for (size_t i = 0; i < n; i++) {
        t[i].data = p->data + t[i].file_offset;
        order[i] = &t[i];
    }
    qsort(order, n, sizeof *order, compare_offsets);
    int rc = 0;
    for (size_t i = 1; i < n && rc == 0; i++)
        if (order[i - 1]->file_offset + order[i - 1]->bytes > order[i]->file_offset)
            rc = error_set(err, "tensors '%s' and '%s' overlap in the file", order[i - 1]->name, order[i]->name);
    free(order);
    return rc;
}

/* `general.alignment`, or its default (rule 8). */
static int read_alignment(const struct gguf_part *p, uint64_t *alignment, struct error *err)
{
    *alignment = DEFAULT_ALIGNMENT;
    const struct gguf_value *v = gguf_part_value(p, "general.alignment");
    if (!v)
        return 0;
    if (v->kind != GGUF_U32)
        return error_set(err, "general.alignment has the kind %s; it must be u32", gguf_kind_name(v->kind));
    uint64_t a = gguf_load_u32(v->payload);
    if (a == 0 || a > MAX_ALIGNMENT || (a & (a - 1)))
        return error_set(err, "general.alignment is %" PRIu64 "; it must be a power of two from 1 to %d", a, MAX_ALIGNMENT);
    *alignment = a;
    return 0;
}

/* ---- one part ---- */

static int check_header(const struct gguf_part *p, struct error *err)
{
    if (p->size == 0)
        return error_set(err, "the file is empty");
    if (p->size >= 4 && memcmp(p->data, "GGUF", 4) != 0) {
        if (p->size >= 8 && memcmp(p->data, "version ", 8) == 0)
            return error_set(err, "this is a Git LFS pointer, not the model itself; fetch the model file (git lfs pull, or download it)");
        if (p->data[0] == '<')
            return error_set(err, "this is a web page, not a GGUF file; download the model file again");
        return error_set(err, "this is not a GGUF file (it starts with the bytes %02x %02x %02x %02x)", p->data[0], p->data[1], p->data[2],
                         p->data[3]);
    }
    if (p->size < HEADER_BYTES)
        return error_set(err, "the file has %zu bytes, less than the %d of a GGUF header: the download is incomplete", p->size, HEADER_BYTES);
    uint32_t version = gguf_load_u32(p->data + 4);
    if (version == 1)
        return error_set(err, "GGUF version 1 is no longer in use; convert the model again");
    if (version == 0x02000000 || version == 0x03000000)
        return error_set(err, "this is a big-endian GGUF file; a little-endian one is needed");
    if (version != 2 && version != 3)
        return error_set(err, "GGUF version %" PRIu32 " is unknown; versions 2 and 3 can be read", version);
    return 0;
}

/* Checks a count of the header against what the file could hold and an absolute cap. */
static int check_count(const char *what, uint64_t n, uint64_t possible, uint64_t cap, struct error *err)
{
    if (n > cap)
        return error_set(err, "the header claims %" PRIu64 " %s; at most %" PRIu64 " make sense: the file is damaged", n, what, cap);
    if (n > possible)
        return error_set(err,
                         "the header claims %" PRIu64 " %s, but the file has room for %" PRIu64
                         " at most: the download is incomplete, or the file is "
                         "damaged; fetch it again",
                         n, what, possible);
    return 0;
}

int gguf_part_parse(struct gguf_part *p, uint32_t index, struct gguf_tensor **tensors, size_t *n_tensors, struct error *err)
{
    if (check_header(p, err))
        return -1;
    p->version = gguf_load_u32(p->data + 4);
    uint64_t count = gguf_load_u64(p->data + 8), n_values = gguf_load_u64(p->data + 16);
    struct cursor c = {p->data, p->size, HEADER_BYTES};
    if (check_count("keys", n_values, left(&c) / MIN_VALUE_BYTES, MAX_VALUES, err) ||
        check_count("tensors", count, left(&c) / MIN_TENSOR_BYTES, MAX_TENSORS - *n_tensors, err) || take_values(&c, p, n_values, err))
        return -1;
    uint64_t alignment;
    if (read_alignment(p, &alignment, err))
        return -1;

    size_t n = (size_t)count; /* <= MAX_TENSORS */
    p->names = alloc_array(n, GGUF_NAME_ROOM);
    struct gguf_tensor *grown = realloc(*tensors, (*n_tensors + n + 1) * sizeof *grown);
    if (grown)
        *tensors = grown;
    if (!p->names || !grown)
        return error_set(err, "out of memory for %zu tensors", n);
    struct gguf_tensor *mine = grown + *n_tensors;
    memset(mine, 0, n * sizeof *mine);
    for (size_t i = 0; i < n; i++) {
        mine[i].part = index;
        if (take_tensor(&c, &mine[i], i, p->names + i * GGUF_NAME_ROOM, err))
            return -1;
    }
    uint64_t data_start = ((uint64_t)c.pos + alignment - 1) & ~(alignment - 1);
    if (place_tensors(p, mine, n, data_start, alignment, err))
        return -1;
    *n_tensors += n;
    return 0;
}

void gguf_part_free_values(struct gguf_part *p)
{
    for (size_t i = 0; i < p->n_values; i++) {
        void *offsets;
        memcpy(&offsets, &p->values[i].offsets, sizeof offsets); /* we allocated it; readers see it const */
        free(offsets);
    }
    free(p->values);
    free(p->by_key);
    p->values = NULL;
    p->by_key = NULL;
    p->n_values = 0;
}
