#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <glob.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/buf.h"
#include "engine/blocks.h"
#include "engine/gguf.h"
#include "tests/fuzz/walk_gguf.h"
#include "tests/unit/gguf_builder.h"

/* ---- opening what was built ---- */

/* A copy of the bytes that ends at a page nobody may read: a read past the end is a crash, sanitizer or not. */
struct guarded {
    uint8_t *map;
    size_t map_bytes;
    const uint8_t *data;
};

static struct guarded guard(const char *data, size_t size)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), body = (size + page - 1) / page * page;
    struct guarded g = {.map_bytes = body + page};
    g.map = mmap(NULL, g.map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(g.map != MAP_FAILED);
    uint8_t *start = g.map + body - size;
    if (size)
        memcpy(start, data, size);
    assert_int_equal(mprotect(g.map + body, page, PROT_NONE), 0);
    g.data = start;
    return g;
}

static void unguard(struct guarded *g)
{
    munmap(g->map, g->map_bytes);
}

/* Opens and reads everything. Returns gguf_open_bytes' result; on -1 the message is one printable line. */
static int try_bytes(const char *data, size_t size, struct error *err)
{
    struct guarded bytes = guard(data, size);
    struct gguf *g = NULL;
    int rc = gguf_open_bytes(&g, bytes.data, size, err);
    if (rc == 0) {
        assert_true(walk_gguf(g) > 0);
    } else {
        assert_int_equal(rc, -1);
        assert_null(g);
        assert_true(strlen(err->text) > 10);
        for (const char *p = err->text; *p; p++)
            assert_true(*p >= 0x20 && *p < 0x7F);
    }
    gguf_close(g);
    unguard(&bytes);
    return rc;
}

/* The file must be refused with a message that has `words` in it. Takes the buffers. */
static void refused(struct image *m, const char *words)
{
    struct buf file = finish(m);
    struct error err = {""};
    assert_int_equal(try_bytes(file.data, file.len, &err), -1);
    if (!strstr(err.text, words))
        fail_msg("the message is: %s\nbut should have in it: %s", err.text, words);
    buf_free(&file);
}

static void accepted(struct image *m)
{
    struct buf file = finish(m);
    struct error err = {""};
    if (try_bytes(file.data, file.len, &err))
        fail_msg("%s", err.text);
    buf_free(&file);
}

/* ---- reading ---- */

static void what_was_written_is_read(void **state)
{
    (void)state;
    struct buf file = small_file();
    struct error err;
    struct gguf *g;
    assert_int_equal(gguf_open_bytes(&g, file.data, file.len, &err), 0);
    assert_int_equal(gguf_version(g), 3);
    assert_int_equal(gguf_file_bytes(g), file.len);
    assert_int_equal(gguf_value_count(g), 16);
    assert_memory_equal(gguf_value_at(g, 0)->key.data, "general.architecture", 20);

    struct gguf_string s;
    assert_int_equal(gguf_get_string(g, "general.architecture", &s, &err), 1);
    assert_int_equal(s.len, 5);
    assert_memory_equal(s.data, "qwen3", 5);
    const struct gguf_value *words = gguf_value(g, "words");
    assert_int_equal(words->count, 3);
    s = gguf_array_string(words, 2);
    assert_int_equal(s.len, 6);
    assert_memory_equal(s.data, "th\0ree", 6);
    assert_int_equal(gguf_array_string(words, 1).len, 0);

    int64_t n;
    double x;
    assert_true(gguf_array_i64(gguf_value(g, "numbers"), 0, &n) && n == -10);
    assert_true(gguf_array_i64(gguf_value(g, "numbers"), 1, &n) && n == 77);
    assert_false(gguf_array_f64(gguf_value(g, "numbers"), 0, &x));
    assert_true(gguf_array_f64(gguf_value(g, "reals"), 0, &x) && x == 1.5);
    assert_false(gguf_array_i64(gguf_value(g, "reals"), 0, &n));
    assert_int_equal(gguf_value(g, "none")->count, 0);
    assert_null(gguf_value(g, "general"));

    assert_int_equal(gguf_tensor_count(g), 2);
    const struct gguf_tensor *b = gguf_tensor(g, "b");
    assert_ptr_equal(b, gguf_tensor_at(g, 1));
    assert_int_equal(b->n_dims, 2);
    assert_int_equal(b->ne[0], 32);
    assert_int_equal(b->ne[1], 2);
    assert_int_equal(b->ne[3], 1);
    assert_int_equal(b->bytes, 68);
    assert_int_equal(b->data[0], 32);
    assert_int_equal(b->file_offset, (uint64_t)(b->data - (const uint8_t *)file.data));
    assert_null(gguf_tensor(g, "c"));
    gguf_close(g);
    buf_free(&file);
}

static void typed_reads_take_what_fits_and_refuse_the_rest_by_key(void **state)
{
    (void)state;
    struct buf file = small_file();
    struct error err;
    struct gguf *g;
    assert_int_equal(gguf_open_bytes(&g, file.data, file.len, &err), 0);
    uint64_t n = 42;
    double x = 42;
    bool yes = false;
    struct gguf_string s;
    assert_int_equal(gguf_get_u64(g, "absent", &n, &err), 0);
    assert_int_equal(n, 42);
    assert_true(gguf_get_u64(g, "u8", &n, &err) == 1 && n == 200);
    assert_true(gguf_get_u64(g, "u16", &n, &err) == 1 && n == 60000);
    assert_true(gguf_get_u64(g, "u64", &n, &err) == 1 && n == UINT64_MAX);
    assert_true(gguf_get_u64(g, "i64", &n, &err) == 1 && n == 1);
    static const char *const negative[] = {"i8", "i16", "i32"};
    for (size_t i = 0; i < 3; i++) {
        assert_int_equal(gguf_get_u64(g, negative[i], &n, &err), -1);
        assert_non_null(strstr(err.text, negative[i]));
        assert_non_null(strstr(err.text, "negative"));
    }
    assert_int_equal(gguf_get_u64(g, "f32", &n, &err), -1);
    assert_non_null(strstr(err.text, "'f32' has the kind f32"));
    assert_int_equal(gguf_get_u64(g, "words", &n, &err), -1);
    assert_true(gguf_get_f64(g, "f32", &x, &err) == 1 && x == 1.5);
    assert_true(gguf_get_f64(g, "f64", &x, &err) == 1 && x == 2);
    assert_int_equal(gguf_get_f64(g, "u8", &x, &err), -1);
    assert_int_equal(gguf_get_f64(g, "reals", &x, &err), -1);
    assert_int_equal(gguf_get_f64(g, "absent", &x, &err), 0);
    assert_true(gguf_get_bool(g, "yes", &yes, &err) == 1 && yes);
    assert_true(gguf_get_bool(g, "i64", &yes, &err) == 1 && yes);
    assert_int_equal(gguf_get_bool(g, "u8", &yes, &err), -1);
    assert_int_equal(gguf_get_bool(g, "i32", &yes, &err), -1);
    assert_int_equal(gguf_get_bool(g, "f32", &yes, &err), -1);
    assert_int_equal(gguf_get_string(g, "u8", &s, &err), -1);
    assert_int_equal(gguf_get_string(g, "absent", &s, &err), 0);
    gguf_close(g);
    buf_free(&file);
}

static void version_2_reads_like_version_3(void **state)
{
    (void)state;
    struct image m = small_image();
    m.version = 2;
    accepted(&m);
}

/* ---- damage of every kind ---- */

static void a_file_cut_at_any_byte_is_refused_and_never_read_past_its_end(void **state)
{
    (void)state;
    struct buf file = small_file();
    struct error err;
    assert_int_equal(try_bytes(file.data, file.len, &err), 0);
    for (size_t size = 0; size < file.len; size++) {
        assert_int_equal(try_bytes(file.data, size, &err), -1);
        if (size >= 4 && !strstr(err.text, "incomplete"))
            fail_msg("cut at %zu: %s", size, err.text);
    }
    buf_free(&file);
}

static void a_truncated_download_says_how_many_bytes_it_needs_and_has(void **state)
{
    (void)state;
    struct buf file = small_file();
    struct error err;
    char need[64], have[64];
    snprintf(need, sizeof need, "need %zu bytes", file.len);
    snprintf(have, sizeof have, "it has %zu", file.len - 7);
    assert_int_equal(try_bytes(file.data, file.len - 7, &err), -1);
    assert_non_null(strstr(err.text, need));
    assert_non_null(strstr(err.text, have));
    assert_non_null(strstr(err.text, "download"));
    buf_free(&file);
}

static void any_single_damaged_byte_is_survived(void **state)
{
    (void)state;
    static const unsigned char patterns[] = {0x00, 0x01, 0x7F, 0x80, 0xFF};
    struct buf file = small_file();
    struct error err;
    int refusals = 0;
    for (size_t i = 0; i < file.len; i++) {
        char original = file.data[i];
        for (size_t k = 0; k < sizeof patterns; k++) {
            file.data[i] = (char)patterns[k];
            refusals += try_bytes(file.data, file.len, &err) != 0;
        }
        file.data[i] = original;
    }
    assert_true(refusals > 500);
    buf_free(&file);
}

static void other_files_and_versions_are_told_apart(void **state)
{
    (void)state;
    static const struct {
        uint32_t version;
        const char *words;
    } versions[] = {{0, "version 0"}, {1, "version 1"}, {4, "version 4"}, {0x03000000, "big-endian"}, {0x02000000, "big-endian"}};
    for (size_t i = 0; i < sizeof versions / sizeof versions[0]; i++) {
        struct image m = small_image();
        m.version = versions[i].version;
        refused(&m, versions[i].words);
    }
    static const struct {
        const char *bytes, *words;
    } others[] = {{"", "empty"},
                  {"GG", "incomplete"},
                  {"GGUF", "incomplete"},
                  {"GGML tensors and so on, long enough", "not a GGUF file"},
                  {"<!DOCTYPE html><html><body>404", "web page"},
                  {"version https://git-lfs.github.com/spec/v1", "Git LFS"}};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        struct error err;
        assert_int_equal(try_bytes(others[i].bytes, strlen(others[i].bytes), &err), -1);
        assert_non_null(strstr(err.text, others[i].words));
    }
}

static void absurd_counts_are_refused_before_any_allocation(void **state)
{
    (void)state;
    static const uint64_t counts[] = {100, 65537, (uint64_t)1 << 32, (uint64_t)1 << 60, (uint64_t)1 << 63, UINT64_MAX};
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        struct image m = small_image();
        m.n_values = counts[i];
        refused(&m, "keys");
        m = small_image();
        m.n_tensors = counts[i];
        refused(&m, "tensors");
        m = new_image();
        key_array(&m, "words", GGUF_STRING, counts[i]);
        refused(&m, "'words'");
        m = new_image();
        key_array(&m, "numbers", GGUF_U64, counts[i]);
        refused(&m, "'numbers'");
    }
}

static void strings_longer_than_the_file_are_refused(void **state)
{
    (void)state;
    static const uint64_t lengths[] = {1000, (uint64_t)1 << 30, (uint64_t)1 << 32, (uint64_t)1 << 63, UINT64_MAX - 7, UINT64_MAX};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        struct image m = new_image();
        key(&m, "text", GGUF_STRING);
        put(&m.values, lengths[i], 8);
        refused(&m, "'text'");
        m = new_image();
        key_array(&m, "words", GGUF_STRING, 1);
        put(&m.values, lengths[i], 8);
        refused(&m, "'words'");
        m = new_image();
        m.n_values = 1;
        put(&m.values, lengths[i], 8);
        put(&m.values, 0, 8);
        refused(&m, "key 0");
        m = new_image();
        m.n_tensors = 1;
        put(&m.tensors, lengths[i], 8);
        put(&m.tensors, 0, 32);
        refused(&m, "tensor 0");
    }
}

static void keys_are_unique_printable_and_not_empty(void **state)
{
    (void)state;
    struct image m = small_image();
    key_string(&m, "u8", "again");
    refused(&m, "'u8' occurs twice");

    m = new_image();
    key_string(&m, "", "x");
    refused(&m, "is empty");

    m = new_image();
    m.n_values = 1;
    put_text(&m.values, "a\0b", 3);
    put(&m.values, GGUF_U8, 4);
    put(&m.values, 1, 1);
    refused(&m, "control byte");

    m = new_image();
    key_number(&m, "a\nb", GGUF_U8, 1, 1);
    refused(&m, "'a?b'");

    char *long_key = malloc(65537);
    assert_non_null(long_key);
    memset(long_key, 'k', 65536);
    long_key[65536] = '\0';
    m = new_image();
    key_number(&m, long_key, GGUF_U8, 1, 1);
    refused(&m, "65535");
    long_key[65535] = '\0';
    m = new_image();
    key_number(&m, long_key, GGUF_U8, 1, 1);
    accepted(&m);
    free(long_key);
}

static void many_keys_take_no_quadratic_time(void **state)
{
    (void)state;
    struct image m = new_image();
    char name[16];
    for (unsigned i = 0; i < 65536; i++) {
        snprintf(name, sizeof name, "k%u", i * 40503 % 65536);
        key_number(&m, name, GGUF_U8, 1, 1);
    }
    accepted(&m); /* walks them, with a lookup of each */
}

static void kinds_outside_the_format_are_refused(void **state)
{
    (void)state;
    struct image m = new_image();
    key_number(&m, "odd", 13, 0, 8);
    refused(&m, "'odd' has the unknown value type 13");
    m = new_image();
    key_number(&m, "odd", UINT32_MAX, 0, 8);
    refused(&m, "unknown value type");
    m = new_image();
    key_array(&m, "nested", GGUF_ARRAY, 1);
    refused(&m, "array of arrays");
    m = new_image();
    key_array(&m, "odd", 13, 0);
    refused(&m, "unknown value type 13");
}

static void bools_are_0_or_1_and_numbers_are_finite(void **state)
{
    (void)state;
    struct image m = new_image();
    key_number(&m, "flag", GGUF_BOOL, 2, 1);
    refused(&m, "'flag'");
    m = new_image();
    key_array(&m, "flags", GGUF_BOOL, 2);
    put(&m.values, 0xFF01, 2);
    refused(&m, "'flags'");
    static const uint64_t bad32[] = {0x7F800000, 0xFF800000, 0x7FC00000}, bad64[] = {0x7FF0000000000000, 0x7FF8000000000000};
    for (size_t i = 0; i < 3; i++) {
        m = new_image();
        key_number(&m, "eps", GGUF_F32, bad32[i], 4);
        refused(&m, "'eps' holds a number that is not finite");
        m = new_image();
        key_array(&m, "scores", GGUF_F32, 2);
        put(&m.values, 0, 4);
        put(&m.values, bad32[i], 4);
        refused(&m, "'scores'");
    }
    for (size_t i = 0; i < 2; i++) {
        m = new_image();
        key_number(&m, "eps", GGUF_F64, bad64[i], 8);
        refused(&m, "'eps'");
    }
}

static void the_alignment_is_a_power_of_two_up_to_64_kib(void **state)
{
    (void)state;
    static const uint64_t bad[] = {0, 3, 24, 65537, 131072, 0x80000000, UINT32_MAX};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct image m = new_image();
        key_number(&m, "general.alignment", GGUF_U32, bad[i], 4);
        refused(&m, "general.alignment");
    }
    struct image m = new_image();
    key_number(&m, "general.alignment", GGUF_U64, 32, 8);
    refused(&m, "must be u32");
    static const uint32_t good[] = {1, 8, 64, 65536};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        m = new_image();
        m.alignment = good[i];
        key_number(&m, "general.alignment", GGUF_U32, good[i], 4);
        tensor(&m, "a", 1, (uint64_t[]){4}, BLOCK_F32, 0);
        tensor(&m, "b", 1, (uint64_t[]){4}, BLOCK_F32, good[i] < 16 ? 16 : good[i]);
        m.data_bytes = 16 + (good[i] < 16 ? 16 : good[i]);
        accepted(&m);
    }
}

/* ---- tensors ---- */

/* An image with one tensor of this shape and enough data for a small one. */
static struct image one_tensor(uint32_t n_dims, const uint64_t *ne, uint32_t type, uint64_t offset)
{
    struct image m = new_image();
    tensor(&m, "blk.0.w", n_dims, ne, type, offset);
    m.data_bytes = 256;
    return m;
}

static void shapes_are_bounded_before_they_are_multiplied(void **state)
{
    (void)state;
    const uint64_t big = (uint64_t)1 << 62, ones[5] = {1, 1, 1, 1, 1};
    struct image m = one_tensor(0, ones, BLOCK_F32, 0);
    refused(&m, "'blk.0.w' has 0 dimensions");
    m = one_tensor(5, ones, BLOCK_F32, 0);
    refused(&m, "has 5 dimensions");
    m = one_tensor(4, ones, BLOCK_F32, 0);
    accepted(&m);
    m = one_tensor(2, (uint64_t[]){4, 0}, BLOCK_F32, 0);
    refused(&m, "dimension 1 is 0");
    m = one_tensor(1, (uint64_t[]){(uint64_t)1 << 63}, BLOCK_F32, 0);
    refused(&m, "2^62");
    m = one_tensor(1, &big, BLOCK_F32, 0); /* 2^64 bytes */
    refused(&m, "2^62");
    m = one_tensor(2, (uint64_t[]){(uint64_t)1 << 32, (uint64_t)1 << 32}, BLOCK_F32, 0); /* 2^64 elements */
    refused(&m, "2^62");
    m = one_tensor(4, (uint64_t[]){UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX}, BLOCK_F32, 0);
    refused(&m, "2^62");
    m = one_tensor(2, (uint64_t[]){(uint64_t)1 << 30, (uint64_t)1 << 30}, BLOCK_F32, 0); /* 2^62 bytes: possible, but not here */
    refused(&m, "incomplete");
    m = one_tensor(1, (uint64_t[]){33}, BLOCK_Q8_0, 0);
    refused(&m, "rows of 33 values do not divide into Q8_0 blocks of 32");
    m = one_tensor(2, (uint64_t[]){16, 2}, BLOCK_Q8_0, 0); /* rows never share a block */
    refused(&m, "rows of 16 values");
}

static void types_that_cannot_be_read_are_named(void **state)
{
    (void)state;
    struct image m = one_tensor(1, (uint64_t[]){256}, 21, 0);
    refused(&m, "'blk.0.w' has the type IQ3_S (21), which bedside cannot read");
    m = one_tensor(1, (uint64_t[]){256}, 40, 0);
    refused(&m, "NVFP4");
    m = one_tensor(1, (uint64_t[]){256}, 4, 0);
    refused(&m, "unknown type number 4");
    m = one_tensor(1, (uint64_t[]){256}, UINT32_MAX, 0);
    refused(&m, "unknown type number");
}

static void tensor_data_is_aligned_and_inside_the_file(void **state)
{
    (void)state;
    const uint64_t four[] = {4};
    struct image m = one_tensor(1, four, BLOCK_F32, 16);
    refused(&m, "not a multiple of the alignment 32");
    m = one_tensor(1, four, BLOCK_F32, 224);
    accepted(&m);
    m = one_tensor(1, (uint64_t[]){8}, BLOCK_F32, 224); /* to the very last byte */
    accepted(&m);
    m = one_tensor(1, (uint64_t[]){9}, BLOCK_F32, 224);
    refused(&m, "incomplete");
    m = one_tensor(1, four, BLOCK_F32, 256);
    refused(&m, "incomplete");
    m = one_tensor(1, four, BLOCK_F32, (uint64_t)1 << 40);
    refused(&m, "incomplete");
    m = one_tensor(1, four, BLOCK_F32, (uint64_t)1 << 63);
    refused(&m, "past any possible file");
    m = one_tensor(1, four, BLOCK_F32, UINT64_MAX - 31);
    refused(&m, "past any possible file");
}

static void tensors_may_leave_gaps_but_not_overlap(void **state)
{
    (void)state;
    const uint64_t nine[] = {9}, eight[] = {8}; /* 36 and 32 bytes */
    struct image m = new_image();
    tensor(&m, "late", 1, eight, BLOCK_F32, 128);
    tensor(&m, "early", 1, eight, BLOCK_F32, 0);
    tensor(&m, "next", 1, eight, BLOCK_F32, 32);
    m.data_bytes = 500; /* bytes behind the last tensor are fine */
    accepted(&m);
    m = new_image();
    tensor(&m, "late", 1, eight, BLOCK_F32, 32);
    tensor(&m, "early", 1, nine, BLOCK_F32, 0);
    m.data_bytes = 128;
    refused(&m, "'early' and 'late' overlap");
    m = new_image();
    tensor(&m, "one", 1, eight, BLOCK_F32, 32);
    tensor(&m, "same", 1, eight, BLOCK_F32, 32);
    m.data_bytes = 128;
    refused(&m, "overlap");
}

static void tensor_names_are_unique_printable_and_short(void **state)
{
    (void)state;
    const uint64_t eight[] = {8};
    struct image m = new_image();
    tensor(&m, "twin", 1, eight, BLOCK_F32, 0);
    tensor(&m, "other", 1, eight, BLOCK_F32, 32);
    tensor(&m, "twin", 1, eight, BLOCK_F32, 64);
    m.data_bytes = 96;
    refused(&m, "'twin' occurs twice");

    char name[65];
    memset(name, 'n', 64);
    name[64] = '\0';
    m = new_image();
    tensor(&m, name, 1, eight, BLOCK_F32, 0);
    m.data_bytes = 32;
    refused(&m, "tensor 0");
    name[63] = '\0';
    m = new_image();
    tensor(&m, name, 1, eight, BLOCK_F32, 0);
    m.data_bytes = 32;
    accepted(&m);
    static const char *const bad[] = {"", "a\tb", "a\x1b[2Jb", "caf\xC3\xA9", "a\x7f"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        m = new_image();
        tensor(&m, bad[i], 1, eight, BLOCK_F32, 0);
        m.data_bytes = 32;
        refused(&m, i ? "printable ASCII" : "empty name");
    }
    m = new_image();
    m.n_tensors = 1;
    put_text(&m.tensors, "a\0b", 3);
    put(&m.tensors, 1, 4);
    put(&m.tensors, 8, 8);
    put(&m.tensors, BLOCK_F32, 4);
    put(&m.tensors, 0, 8);
    m.data_bytes = 32;
    refused(&m, "printable ASCII");
}

/* ---- files ---- */

static char directory[64];

static int make_directory(void **state)
{
    (void)state;
    snprintf(directory, sizeof directory, "/tmp/bedside-gguf-XXXXXX");
    return mkdtemp(directory) ? 0 : -1;
}

static int remove_directory(void **state)
{
    (void)state;
    char pattern[96];
    glob_t found;
    snprintf(pattern, sizeof pattern, "%s/*", directory);
    if (glob(pattern, 0, NULL, &found) == 0) {
        for (size_t i = 0; i < found.gl_pathc; i++)
            unlink(found.gl_pathv[i]);
        globfree(&found);
    }
    return rmdir(directory);
}

static void path_of(char path[160], const char *name)
{
    snprintf(path, 160, "%s/%s", directory, name);
}

static void write_image(struct image *m, const char *name)
{
    char path[160];
    path_of(path, name);
    struct buf file = finish(m);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(file.data, 1, file.len, f), file.len);
    assert_int_equal(fclose(f), 0);
    buf_free(&file);
}

/* Part `no` (from 0) of `count`, with one tensor. */
static void write_part(const char *name, uint64_t no, uint64_t count, uint64_t total, const char *tensor_name)
{
    struct image m = new_image();
    if (no == 0)
        key_string(&m, "general.architecture", "qwen3");
    key_number(&m, "split.no", GGUF_U16, no, 2);
    key_number(&m, "split.count", GGUF_U16, count, 2);
    key_number(&m, "split.tensors.count", GGUF_I32, total, 4);
    tensor(&m, tensor_name, 1, (uint64_t[]){8}, BLOCK_F32, 32 * no);
    m.data_bytes = 96;
    write_image(&m, name);
}

/* The file must be refused, naming itself and `words`. */
static void file_refused(const char *name, const char *words)
{
    char path[160];
    struct gguf *g;
    struct error err = {""};
    path_of(path, name);
    assert_int_equal(gguf_open(&g, path, &err), -1);
    assert_null(g);
    if (!strstr(err.text, words) || !strstr(err.text, directory))
        fail_msg("the message is: %s\nbut should have in it: %s", err.text, words);
}

static void forgotten_tensors_can_still_be_read(void **state)
{
    (void)state;
    struct gguf *g = NULL;
    struct error err = {""};
    if (gguf_open(&g, "tests/data/tiny-qwen35moe-q8_0.gguf", &err))
        fail_msg("%s", err.text);
    for (size_t i = 0; i < gguf_tensor_count(g); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(g, i);
        uint8_t *before = malloc(t->bytes);
        assert_non_null(before);
        memcpy(before, t->data, t->bytes);
        gguf_forget(g, t);
        assert_memory_equal(t->data, before, t->bytes);
        free(before);
    }
    gguf_close(g);

    /* Memory that is not a file's must never be given back: it would read as zeros. */
    static _Alignas(4096) uint8_t image[1 << 20];
    FILE *f = fopen("tests/data/tiny-qwen3-q8_0.gguf", "rb");
    assert_non_null(f);
    const size_t size = fread(image, 1, sizeof image, f);
    assert_true(feof(f));
    fclose(f);
    assert_int_equal(gguf_open_bytes(&g, image, size, &err), 0);
    for (size_t i = 0; i < gguf_tensor_count(g); i++)
        gguf_forget(g, gguf_tensor_at(g, i));
    const struct gguf_tensor *t = gguf_tensor(g, "token_embd.weight");
    assert_non_null(t);
    int zeros = 0;
    for (uint64_t i = 0; i < t->bytes; i++)
        zeros += t->data[i] == 0;
    assert_true(zeros < (int)t->bytes / 4);
    gguf_close(g);
}

static void all_parts_of_a_split_model_are_read(void **state)
{
    (void)state;
    write_part("m-00001-of-00003.gguf", 0, 3, 3, "a");
    write_part("m-00002-of-00003.gguf", 1, 3, 3, "b");
    write_part("m-00003-of-00003.gguf", 2, 3, 3, "c");
    char path[160];
    struct gguf *g;
    struct error err = {""};
    path_of(path, "m-00001-of-00003.gguf");
    if (gguf_open(&g, path, &err))
        fail_msg("%s", err.text);
    assert_int_equal(gguf_tensor_count(g), 3);
    assert_int_equal(gguf_value_count(g), 4); /* part 1's */
    for (unsigned i = 0; i < 3; i++) {
        const struct gguf_tensor *t = gguf_tensor_at(g, i);
        assert_int_equal(t->name[0], 'a' + (int)i);
        assert_int_equal(t->part, i);
        assert_int_equal(t->data[0], 32 * i);
        assert_ptr_equal(gguf_tensor(g, t->name), t);
    }
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    assert_true(gguf_file_bytes(g) > 2 * (uint64_t)st.st_size);
    gguf_close(g);
}

static void a_missing_part_is_named(void **state)
{
    (void)state;
    write_part("m-00001-of-00003.gguf", 0, 3, 3, "a");
    write_part("m-00003-of-00003.gguf", 2, 3, 3, "c");
    file_refused("m-00001-of-00003.gguf", "m-00002-of-00003.gguf: part 2 of 3 is missing");
}

static void parts_that_do_not_belong_together_are_refused(void **state)
{
    (void)state;
    write_part("m-00001-of-00002.gguf", 0, 2, 2, "a");
    write_part("m-00002-of-00002.gguf", 1, 2, 2, "b");
    file_refused("m-00002-of-00002.gguf", "give the path of part 1");
    write_part("m-00002-of-00002.gguf", 0, 2, 2, "b");
    file_refused("m-00001-of-00002.gguf", "split.no is 0");
    write_part("m-00002-of-00002.gguf", 1, 3, 2, "b");
    file_refused("m-00001-of-00002.gguf", "split.count is 3");
    write_part("m-00002-of-00002.gguf", 1, 2, 2, "a");
    file_refused("m-00001-of-00002.gguf", "'a' occurs twice");
    write_part("m-00002-of-00002.gguf", 1, 2, 2, "b");
    write_part("m-00001-of-00002.gguf", 0, 2, 7, "a");
    file_refused("m-00001-of-00002.gguf", "split.tensors.count is 7");
    struct image m = small_image();
    write_image(&m, "m-00002-of-00002.gguf");
    file_refused("m-00001-of-00002.gguf", "no split.no key");
    write_part("renamed.gguf", 0, 2, 2, "a");
    file_refused("renamed.gguf", "part 1 of a model split into 2");
    file_refused("m-00003-of-00002.gguf", "not a possible name");
    file_refused("m-00000-of-00002.gguf", "not a possible name");
    file_refused("m-00001-of-99999.gguf", "not a possible name");
}

static void a_name_with_one_part_needs_no_others(void **state)
{
    (void)state;
    struct image m = small_image();
    write_image(&m, "m-00001-of-00001.gguf");
    char path[160];
    struct gguf *g;
    struct error err = {""};
    path_of(path, "m-00001-of-00001.gguf");
    assert_int_equal(gguf_open(&g, path, &err), 0);
    gguf_close(g);
}

static void what_is_no_regular_file_is_refused_at_once(void **state)
{
    (void)state;
    char path[160];
    path_of(path, "pipe.gguf");
    assert_int_equal(mkfifo(path, 0600), 0); /* nobody will ever write to it */
    file_refused("pipe.gguf", "not a regular file");
    file_refused("", "directory");
    file_refused("absent.gguf", "No such file");
    path_of(path, "empty.gguf");
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    fclose(f);
    file_refused("empty.gguf", "empty");
}

static void every_model_file_of_the_tests_opens(void **state)
{
    (void)state;
    static const char *const patterns[] = {"tests/data/tiny-*.gguf", "tests/demo-model/*.gguf"};
    for (size_t k = 0; k < 2; k++) {
        glob_t found;
        assert_int_equal(glob(patterns[k], 0, NULL, &found), 0);
        assert_true(found.gl_pathc >= 2);
        for (size_t i = 0; i < found.gl_pathc; i++) {
            struct gguf *g;
            struct error err = {""};
            if (gguf_open(&g, found.gl_pathv[i], &err))
                fail_msg("%s", err.text);
            assert_true(gguf_tensor_count(g) > 40);
            assert_non_null(gguf_tensor(g, "token_embd.weight"));
            assert_true(walk_gguf(g) > 0);
            gguf_close(g);
        }
        globfree(&found);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_was_written_is_read),
        cmocka_unit_test(typed_reads_take_what_fits_and_refuse_the_rest_by_key),
        cmocka_unit_test(version_2_reads_like_version_3),
        cmocka_unit_test(a_file_cut_at_any_byte_is_refused_and_never_read_past_its_end),
        cmocka_unit_test(a_truncated_download_says_how_many_bytes_it_needs_and_has),
        cmocka_unit_test(any_single_damaged_byte_is_survived),
        cmocka_unit_test(other_files_and_versions_are_told_apart),
        cmocka_unit_test(absurd_counts_are_refused_before_any_allocation),
        cmocka_unit_test(strings_longer_than_the_file_are_refused),
        cmocka_unit_test(keys_are_unique_printable_and_not_empty),
        cmocka_unit_test(many_keys_take_no_quadratic_time),
        cmocka_unit_test(kinds_outside_the_format_are_refused),
        cmocka_unit_test(bools_are_0_or_1_and_numbers_are_finite),
        cmocka_unit_test(the_alignment_is_a_power_of_two_up_to_64_kib),
        cmocka_unit_test(shapes_are_bounded_before_they_are_multiplied),
        cmocka_unit_test(types_that_cannot_be_read_are_named),
        cmocka_unit_test(tensor_data_is_aligned_and_inside_the_file),
        cmocka_unit_test(tensors_may_leave_gaps_but_not_overlap),
        cmocka_unit_test(tensor_names_are_unique_printable_and_short),
        cmocka_unit_test_setup_teardown(all_parts_of_a_split_model_are_read, make_directory, remove_directory),
        cmocka_unit_test_setup_teardown(a_missing_part_is_named, make_directory, remove_directory),
        cmocka_unit_test_setup_teardown(parts_that_do_not_belong_together_are_refused, make_directory, remove_directory),
        cmocka_unit_test_setup_teardown(a_name_with_one_part_needs_no_others, make_directory, remove_directory),
        cmocka_unit_test_setup_teardown(what_is_no_regular_file_is_refused_at_once, make_directory, remove_directory),
        cmocka_unit_test(forgotten_tensors_can_still_be_read),
        cmocka_unit_test(every_model_file_of_the_tests_opens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
