#include "engine/gguf.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "engine/gguf_part.h"

enum { MAX_PARTS = 999 };

struct gguf {
    struct gguf_part *parts; /* the values of all but the first are released once checked */
    size_t n_parts;
    struct gguf_tensor *tensors;
    size_t n_tensors;
    const struct gguf_tensor **by_name; /* sorted */
};

static int compare_names(const void *a, const void *b)
{
    const struct gguf_tensor *const *x = a, *const *y = b;
    return strcmp((*x)->name, (*y)->name);
}

static int index_tensors(struct gguf *g, struct error *err)
{
    g->by_name = alloc_array(g->n_tensors, sizeof *g->by_name);
    if (!g->by_name)
        return error_set(err, "out of memory for %zu tensors", g->n_tensors);
    for (size_t i = 0; i < g->n_tensors; i++)
        g->by_name[i] = &g->tensors[i];
    qsort(g->by_name, g->n_tensors, sizeof *g->by_name, compare_names);
    for (size_t i = 1; i < g->n_tensors; i++)
        if (strcmp(g->by_name[i - 1]->name, g->by_name[i]->name) == 0)
            return error_set(err, "tensor '%s' occurs twice", g->by_name[i]->name);
    return 0;
}

/* ---- split models ---- */

/* Reads an integer of one part: 1, 0 (absent) or -1. */
static int part_u64(const struct gguf_part *p, const char *key, uint64_t *out, struct error *err);

/* For a path that ends in -KKKKK-of-NNNNN.gguf: where "KKKKK" starts, and the two numbers. */
static bool split_name(const char *path, size_t *digits, unsigned *k, unsigned *n)
{
    static const char form[] = "-00000-of-00000.gguf"; /* 0 stands for a digit */
    size_t len = strlen(path), m = sizeof form - 1;
    if (len <= m)
        return false;
    const char *tail = path + len - m;
    for (size_t i = 0; i < m; i++)
        if (form[i] == '0' ? tail[i] < '0' || tail[i] > '9' : tail[i] != form[i])
            return false;
    *digits = len - m + 1;
    *k = (unsigned)strtoul(tail + 1, NULL, 10);
    *n = (unsigned)strtoul(tail + 10, NULL, 10);
    return true;
}

/* What part `index` of `count` says of itself must agree with its name. */
static int check_split(const struct gguf *g, size_t index, size_t count, struct error *err)
{
    const struct gguf_part *p = &g->parts[index];
    uint64_t no = 0, parts = 1;
    int has_no = part_u64(p, "split.no", &no, err), has_count = part_u64(p, "split.count", &parts, err);
    if (has_no < 0 || has_count < 0)
        return -1;
    if (parts == 0)
        parts = 1; /* written by some tools for "not split" */
    if (count == 1 && parts > 1)
        return error_set(err,
                         "this is part %" PRIu64 " of a model split into %" PRIu64 ", but it is not named NAME-00001-of-%05" PRIu64
                         ".gguf, so the other parts cannot be found",
                         no + 1, parts, parts);
    if (count > 1 && (!has_no || !has_count))
        return error_set(err, "its name says part %zu of %zu, but it has no %s key", index + 1, count, has_no ? "split.count" : "split.no");
    if (parts != count)
        return error_set(err, "its name says %zu parts, but split.count is %" PRIu64, count, parts);
    if (no != index)
        return error_set(err, "its name says part %zu, but split.no is %" PRIu64 " (counted from 0)", index + 1, no);
    return 0;
}

/* split.tensors.count of part 1 against what was found. */
static int check_split_total(const struct gguf *g, struct error *err)
{
    uint64_t total = 0;
    int has = part_u64(&g->parts[0], "split.tensors.count", &total, err);
    if (has > 0 && total != g->n_tensors)
        return error_set(err, "split.tensors.count is %" PRIu64 ", but the %zu parts have %zu tensors: parts of different models are mixed", total,
                         g->n_parts, g->n_tensors);
    return has < 0 ? -1 : 0;
}

/* ---- opening ---- */

static int map_file(struct gguf_part *p, const char *path, struct error *err)
{
    /* O_NONBLOCK: opening a FIFO must not wait for a writer. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return error_set(err, "%s", strerror(errno));
    struct stat st;
    if (fstat(fd, &st)) {
        error_set(err, "%s", strerror(errno));
    } else if (S_ISDIR(st.st_mode)) {
        error_set(err, "this is a directory; give the path of the .gguf file in it");
    } else if (!S_ISREG(st.st_mode)) {
        error_set(err, "this is not a regular file");
    } else if (st.st_size == 0) {
        error_set(err, "the file is empty");
    } else {
        void *data = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
        if (data == MAP_FAILED) {
            error_set(err, "cannot map its %lld bytes: %s", (long long)st.st_size, strerror(errno));
        } else {
            p->data = data;
            p->size = (size_t)st.st_size;
            p->mapped = true;
            p->fd = fd;
            return 0;
        }
    }
    close(fd);
    return -1;
}

static struct gguf *new_handle(size_t n_parts)
{
    struct gguf *g = alloc_array(1, sizeof *g);
    if (!g)
        return NULL;
    g->parts = alloc_array(n_parts, sizeof *g->parts);
    if (!g->parts) {
        free(g);
        return NULL;
    }
    g->n_parts = n_parts;
    return g;
}

/* Maps and parses part `index` of the model; `path` is its own. */
static int open_part(struct gguf *g, size_t index, const char *path, struct error *err)
{
    struct gguf_part *p = &g->parts[index];
    if (map_file(p, path, err) || gguf_part_parse(p, (uint32_t)index, &g->tensors, &g->n_tensors, err) || check_split(g, index, g->n_parts, err))
        return error_prefix(err, "%s", path);
    if (index > 0)
        gguf_part_free_values(p);
    return 0;
}

int gguf_open(struct gguf **out, const char *path, struct error *err)
{
    *out = NULL;
    size_t digits = 0;
    unsigned k = 1, n = 1;
    bool split = split_name(path, &digits, &k, &n);
    if (split && (n == 0 || k == 0 || k > n || n > MAX_PARTS))
        return error_set(err, "%s: part %u of %u is not a possible name for a part of a split model", path, k, n);
    if (split && k != 1)
        return error_set(err, "%s: this is part %u of %u; give the path of part 1 (...-00001-of-%05u.gguf)", path, k, n, n);

    struct gguf *g = new_handle(n);
    char *name = alloc_text(path, strlen(path));
    if (!g || !name) {
        error_set(err, "%s: out of memory", path);
        goto fail;
    }
    if (open_part(g, 0, path, err))
        goto fail;
    for (unsigned i = 1; i < n; i++) {
        char number[12];
        snprintf(number, sizeof number, "%05u", i + 1);
        memcpy(name + digits, number, 5);
        if (access(name, F_OK)) {
            error_set(err, "%s: part %u of %u is missing (%s); put all parts into one directory", name, i + 1, n, strerror(errno));
            goto fail;
        }
        if (open_part(g, i, name, err))
            goto fail;
    }
    if (check_split_total(g, err) || index_tensors(g, err)) {
        error_prefix(err, "%s", path);
        goto fail;
    }
    free(name);
    *out = g;
    return 0;

fail:
    free(name);
    gguf_close(g);
    return -1;
}

int gguf_open_bytes(struct gguf **out, const void *data, size_t size, struct error *err)
{
    *out = NULL;
    struct gguf *g = new_handle(1);
    if (!g)
        return error_set(err, "out of memory");
    g->parts[0].data = data;
    g->parts[0].size = size;
    if (gguf_part_parse(&g->parts[0], 0, &g->tensors, &g->n_tensors, err) || check_split(g, 0, 1, err) || check_split_total(g, err) ||
        index_tensors(g, err)) {
        gguf_close(g);
        return -1;
    }
    *out = g;
    return 0;
}

void gguf_close(struct gguf *g)
{
    if (!g)
        return;
    for (size_t i = 0; i < g->n_parts; i++) {
        struct gguf_part *p = &g->parts[i];
        gguf_part_free_values(p);
        free(p->names);
        if (p->mapped) {
            void *data;
            memcpy(&data, &p->data, sizeof data);
            munmap(data, p->size);
            close(p->fd);
        }
    }
    free(g->parts);
    free(g->tensors);
    free(g->by_name);
    free(g);
}

/* ---- reading ---- */

uint32_t gguf_version(const struct gguf *g)
{
    return g->parts[0].version;
}

void gguf_load(const struct gguf *g)
{
    for (size_t i = 0; i < g->n_parts; i++) {
        const struct gguf_part *p = &g->parts[i];
        if (!p->mapped)
            continue;
        void *data = (void *)(uintptr_t)p->data; /* madvise does not write */
#ifdef MADV_POPULATE_READ
        const bool populated = madvise(data, p->size, MADV_POPULATE_READ) == 0;
#else
        const bool populated = false;
#endif
        if (!populated)
            madvise(data, p->size, MADV_WILLNEED); /* a hint: failing changes nothing */
    }
}

/* Whole pages only: its neighbours' bytes may still be wanted. Both calls are hints: failing changes nothing. */
void gguf_forget(const struct gguf *g, const struct gguf_tensor *t)
{
    const struct gguf_part *p = &g->parts[t->part];
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), start = ((uintptr_t)t->data + page - 1) / page * page;
    const uintptr_t end = ((uintptr_t)t->data + t->bytes) / page * page;
    if (!p->mapped || start >= end)
        return;
    madvise((void *)start, end - start, MADV_DONTNEED);
    posix_fadvise(p->fd, (off_t)(start - (uintptr_t)p->data), (off_t)(end - start), POSIX_FADV_DONTNEED);
}

uint64_t gguf_file_bytes(const struct gguf *g)
{
    uint64_t total = 0;
    for (size_t i = 0; i < g->n_parts; i++)
        total += g->parts[i].size;
    return total;
}

size_t gguf_value_count(const struct gguf *g)
{
    return g->parts[0].n_values;
}

const struct gguf_value *gguf_value_at(const struct gguf *g, size_t i)
{
    return &g->parts[0].values[i];
}

const struct gguf_value *gguf_value(const struct gguf *g, const char *key)
{
    return gguf_part_value(&g->parts[0], key);
}

size_t gguf_tensor_count(const struct gguf *g)
{
    return g->n_tensors;
}

const struct gguf_tensor *gguf_tensor_at(const struct gguf *g, size_t i)
{
    return &g->tensors[i];
}

static int compare_name(const void *key, const void *element)
{
    const struct gguf_tensor *const *t = element;
    return strcmp(key, (*t)->name);
}

const struct gguf_tensor *gguf_tensor(const struct gguf *g, const char *name)
{
    const struct gguf_tensor **found = bsearch(name, g->by_name, g->n_tensors, sizeof *g->by_name, compare_name);
    return found ? *found : NULL;
}

/* An integer of any kind as sign and magnitude. */
struct integer {
    bool negative;
    uint64_t magnitude;
};

static bool load_integer(const uint8_t *p, enum gguf_kind kind, struct integer *out)
{
    int64_t value = 0;
    switch (kind) {
    case GGUF_U8:
    case GGUF_BOOL:
        value = p[0];
        break;
    case GGUF_I8:
        value = (int8_t)p[0];
        break;
    case GGUF_U16:
        value = gguf_load_u16(p);
        break;
    case GGUF_I16:
        value = (int16_t)gguf_load_u16(p);
        break;
    case GGUF_U32:
        value = gguf_load_u32(p);
        break;
    case GGUF_I32:
        value = (int32_t)gguf_load_u32(p);
        break;
    case GGUF_U64:
        *out = (struct integer){false, gguf_load_u64(p)};
        return true;
    case GGUF_I64:
        value = (int64_t)gguf_load_u64(p);
        break;
    default:
        return false;
    }
    *out = (struct integer){value < 0, value < 0 ? (uint64_t)0 - (uint64_t)value : (uint64_t)value};
    return true;
}

static int value_u64(const struct gguf_value *v, const char *key, uint64_t *out, struct error *err)
{
    struct integer n;
    if (!v)
        return 0;
    if (v->kind == GGUF_BOOL || !load_integer(v->payload, v->kind, &n))
        return error_set(err, "key '%s' has the kind %s; an integer is needed", key, gguf_kind_name(v->kind));
    if (n.negative)
        return error_set(err, "key '%s' is negative (-%" PRIu64 ")", key, n.magnitude);
    *out = n.magnitude;
    return 1;
}

static int part_u64(const struct gguf_part *p, const char *key, uint64_t *out, struct error *err)
{
    return value_u64(gguf_part_value(p, key), key, out, err);
}

int gguf_get_u64(const struct gguf *g, const char *key, uint64_t *out, struct error *err)
{
    return value_u64(gguf_value(g, key), key, out, err);
}

int gguf_get_f64(const struct gguf *g, const char *key, double *out, struct error *err)
{
    const struct gguf_value *v = gguf_value(g, key);
    if (!v)
        return 0;
    if (v->kind != GGUF_F32 && v->kind != GGUF_F64)
        return error_set(err, "key '%s' has the kind %s; a floating-point number is needed", key, gguf_kind_name(v->kind));
    *out = v->kind == GGUF_F32 ? gguf_load_f32(v->payload) : gguf_load_f64(v->payload); /* finite: checked at opening */
    return 1;
}

int gguf_get_bool(const struct gguf *g, const char *key, bool *out, struct error *err)
{
    const struct gguf_value *v = gguf_value(g, key);
    struct integer n;
    if (!v)
        return 0;
    if (!load_integer(v->payload, v->kind, &n))
        return error_set(err, "key '%s' has the kind %s; a bool is needed", key, gguf_kind_name(v->kind));
    if (n.negative || n.magnitude > 1)
        return error_set(err, "key '%s' is %s%" PRIu64 "; a bool (0 or 1) is needed", key, n.negative ? "-" : "", n.magnitude);
    *out = n.magnitude != 0;
    return 1;
}

static struct gguf_string load_string(const uint8_t *p)
{
    return (struct gguf_string){(const char *)p + 8, (size_t)gguf_load_u64(p)};
}

int gguf_get_string(const struct gguf *g, const char *key, struct gguf_string *out, struct error *err)
{
    const struct gguf_value *v = gguf_value(g, key);
    if (!v)
        return 0;
    if (v->kind != GGUF_STRING)
        return error_set(err, "key '%s' has the kind %s; a string is needed", key, gguf_kind_name(v->kind));
    *out = load_string(v->payload);
    return 1;
}

struct gguf_string gguf_array_string(const struct gguf_value *v, uint64_t i)
{
    return load_string(v->payload + v->offsets[i]);
}

bool gguf_array_i64(const struct gguf_value *v, uint64_t i, int64_t *out)
{
    struct integer n;
    if (!load_integer(v->payload + i * gguf_kind_bytes(v->element), v->element, &n) || (!n.negative && n.magnitude > INT64_MAX))
        return false;
    *out = n.negative ? (int64_t)((uint64_t)0 - n.magnitude) : (int64_t)n.magnitude;
    return true;
}

bool gguf_array_f64(const struct gguf_value *v, uint64_t i, double *out)
{
    if (v->element != GGUF_F32 && v->element != GGUF_F64)
        return false;
    *out = v->element == GGUF_F32 ? gguf_load_f32(v->payload + 4 * i) : gguf_load_f64(v->payload + 8 * i);
    return true;
}
