/* server/cmd_inspect.c: `bedside inspect FILE [--tensors]`, what a model file holds and whether it can be served. */
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/blocks.h"
#include "engine/gguf.h"
#include "engine/model.h"
#include "server/commands.h"
#include "server/show.h"

enum { TEXT_SHOWN = 80, ELEMENT_SHOWN = 20, ELEMENTS_SHOWN = 6 };

static void print_usage(FILE *out)
{
    fputs("usage: bedside inspect FILE [--tensors]\n"
          "\n"
          "Prints the metadata of a GGUF file, how many bytes each block type takes, and whether bedside serves it.\n"
          "  --tensors   also every tensor: type, shape, bytes, offset in the file\n",
          out);
}

/* ---- metadata ---- */

static const char *kind_name(enum gguf_kind kind)
{
    static const char *const names[] = {"u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64"};
    return names[kind];
}

/* Element i of an array, or the value itself (i = 0): both lie the same way in the file. */
static void print_element(const struct gguf_value *v, uint64_t i, size_t max)
{
    static const uint64_t start = 0;
    int64_t whole;
    double real;
    if (v->element == GGUF_STRING) {
        struct gguf_value strings = *v;
        if (v->kind != GGUF_ARRAY)
            strings.offsets = &start;
        struct gguf_string s = gguf_array_string(&strings, i);
        show_quoted(stdout, s.data, s.len, max);
    } else if (v->element == GGUF_BOOL && gguf_array_i64(v, i, &whole)) {
        fputs(whole ? "true" : "false", stdout);
    } else if (gguf_array_i64(v, i, &whole)) {
        printf("%" PRId64, whole);
    } else if (gguf_array_f64(v, i, &real)) {
        printf(v->element == GGUF_F32 ? "%.7g" : "%.15g", real);
    } else {
        fputs("above 2^63", stdout);
    }
}

static void print_value(const struct gguf_value *v)
{
    show_text(stdout, v->key.data, v->key.len, TEXT_SHOWN);
    if (v->kind != GGUF_ARRAY) {
        printf("  %s  ", kind_name(v->kind));
        print_element(v, 0, TEXT_SHOWN);
        putchar('\n');
        return;
    }
    printf("  %s[%" PRIu64 "]  ", kind_name(v->element), v->count);
    for (uint64_t i = 0; i < v->count && i < ELEMENTS_SHOWN; i++) {
        if (i)
            fputs(", ", stdout);
        print_element(v, i, ELEMENT_SHOWN);
    }
    puts(v->count > ELEMENTS_SHOWN ? ", ..." : "");
}

/* ---- tensors ---- */

static void print_tensors(const struct gguf *g)
{
    size_t width = 0;
    for (size_t i = 0; i < gguf_tensor_count(g); i++) {
        size_t len = strlen(gguf_tensor_at(g, i)->name);
        width = len > width ? len : width;
    }
    puts("\ntensors: name, type, shape (contiguous axis first), bytes, offset in the file");
    for (size_t i = 0; i < gguf_tensor_count(g); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(g, i);
        char shape[96];
        size_t n = 0;
        for (uint32_t d = 0; d < t->n_dims; d++)
            n += (size_t)snprintf(shape + n, sizeof shape - n, "%s%" PRIu64, d ? " x " : "", t->ne[d]);
        printf("%-*s  %-6s  %-26s %12" PRIu64 " %14" PRIu64, (int)width, t->name, block_info(t->type)->name, shape, t->bytes, t->file_offset);
        if (t->part)
            printf("  part %" PRIu32, t->part + 1);
        putchar('\n');
    }
}

static void print_totals(const struct gguf *g)
{
    enum { TYPES = 64 }; /* above every type number that block_info knows */
    uint64_t tensors[TYPES] = {0}, bytes[TYPES] = {0}, values[TYPES] = {0}, all = 0;
    for (size_t i = 0; i < gguf_tensor_count(g); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(g, i);
        if (t->type >= TYPES)
            continue;
        tensors[t->type]++;
        bytes[t->type] += t->bytes;
        values[t->type] += t->ne[0] * t->ne[1] * t->ne[2] * t->ne[3];
        all += t->bytes;
    }
    puts("\nby type: tensors, values, bytes, share");
    for (uint32_t type = 0; type < TYPES; type++)
        if (tensors[type])
            printf("%-6s %6" PRIu64 " %14" PRIu64 " %14" PRIu64 " %5.1f %%\n", block_info(type)->name, tensors[type], values[type], bytes[type],
                   100 * (double)bytes[type] / (double)all);
}

/* ---- the command ---- */

static void print_verdict(const struct gguf *g)
{
    struct model *m = NULL;
    struct error err = {""};
    putchar('\n');
    if (model_open(&m, g, &err)) {
        printf("bedside does not serve this file: %s\n", err.text);
        return;
    }
    bool billions = m->n_params >= 1000000000;
    printf("bedside serves this file: architecture %s, %.1f %s parameters, context up to %" PRId64 " tokens\n", m->arch_name,
           (double)m->n_params / (billions ? 1e9 : 1e6), billions ? "billion" : "million", m->context_length);
    model_close(m);
}

int cmd_inspect(int argc, char **argv)
{
    const char *path = NULL;
    bool tensors = false;
    for (int i = 0; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            print_usage(stdout);
            return 0;
        }
        if (strcmp(argv[i], "--tensors") == 0) {
            tensors = true;
        } else if (argv[i][0] == '-' || path) {
            fprintf(stderr, "bedside inspect: '%s' is not expected\n", argv[i]);
            print_usage(stderr);
            return 2;
        } else {
            path = argv[i];
        }
    }
    if (!path) {
        print_usage(stderr);
        return 2;
    }
    struct gguf *g;
    struct error err;
    if (gguf_open(&g, path, &err)) {
        fprintf(stderr, "bedside inspect: %s\n", err.text);
        return 1;
    }
    printf("%s: GGUF version %" PRIu32 ", ", path, gguf_version(g));
    show_bytes(stdout, gguf_file_bytes(g));
    printf(", %zu keys, %zu tensors\n\n", gguf_value_count(g), gguf_tensor_count(g));
    for (size_t i = 0; i < gguf_value_count(g); i++)
        print_value(gguf_value_at(g, i));
    if (tensors)
        print_tensors(g);
    print_totals(g);
    print_verdict(g);
    gguf_close(g);
    if (fflush(stdout) || ferror(stdout)) {
        perror("bedside inspect: standard output");
        return 1;
    }
    return 0;
}
