/* The memory of the HIP backend: weights in the kernels' layout, buffers, pages and states that are byte for byte those of the CPU, and the description of a
 * step as the kernels will read it. Kernels are not needed: faulty_runtime.c stands in for the GPU. */
#include "tests/hip/hip_test.h"

#include <math.h>

#include "engine/slot_layout.h"
#include "hip/hip_store.h"
#include "tests/unit/backend_fixture.h"

static const char *library;

static int setup_group(void **state)
{
    (void)state;
    library = hip_test_library("faulty");
    return 0;
}

static struct backend *open_hip(const struct backend_shape *shape, struct error *err)
{
    const struct hip_options options = {.library = library, .no_selftest = true};
    hip_need_bundle();
    hip_clear_settings();
    return backend_open_hip(shape, &options, err);
}

static struct backend *must_open(const struct backend_shape *shape)
{
    struct error err = {""};
    struct backend *b = open_hip(shape, &err);
    if (!b)
        fail_msg("%s", err.text);
    return b;
}

static struct backend_shape test_shape(enum kv_type kv)
{
    struct backend_shape shape = fixture_shape_small();
    shape.kv_type = kv;
    shape.head_dim = 32; /* whole blocks of q8_0 */
    return shape;
}

/* ---- opening ---- */

static void f32_keys_and_values_are_refused_with_the_types_that_work(void **state)
{
    (void)state;
    const struct backend_shape shape = test_shape(KV_F32);
    struct error err = {""};
    assert_null(open_hip(&shape, &err));
    assert_contains(err.text, "f16 or q8_0");
    assert_contains(err.text, "device cpu");
}

static void the_backend_names_its_instruction_set(void **state)
{
    (void)state;
    const struct backend_shape shape = test_shape(KV_F16);
    struct backend *b = must_open(&shape);
    assert_string_equal(b->ops->name, "hip gfx1152");
    assert_true(b->ops->memory_free(b) > 0);
    b->ops->close(b);
}

/* ---- weights ---- */

static const enum block_type types[] = {BLOCK_F32, BLOCK_F16, BLOCK_BF16, BLOCK_Q4_0, BLOCK_Q8_0, BLOCK_Q4_K, BLOCK_Q5_K, BLOCK_Q6_K};

/* Byte i of a device row of nb blocks, from hip/layout.h's words: which byte of the file's row it is, or -1 for padding. */
static int64_t origin(enum block_type type, size_t nb, size_t bytes, size_t i)
{
    const struct {
        size_t at, bytes; /* in the file's block */
    } q6[] = {{0, 128}, {128, 64}, {192, 16}, {208, 2}}, q8[] = {{2, 32}, {0, 2}}, q4[] = {{2, 16}, {0, 2}},
      *parts = type == BLOCK_Q6_K   ? q6
               : type == BLOCK_Q8_0 ? q8
                                    : q4;
    if (i >= bytes)
        return -1;
    if (type != BLOCK_Q6_K && type != BLOCK_Q8_0 && type != BLOCK_Q4_0)
        return (int64_t)i;
    for (int p = 0;; p++) {
        if (i < nb * parts[p].bytes)
            return (int64_t)(i / parts[p].bytes * (bytes / nb) + parts[p].at + i % parts[p].bytes);
        i -= nb * parts[p].bytes;
    }
}

static void check_weight(struct backend *b, enum block_type type, size_t n_in, size_t n_out, size_t n_mats)
{
    struct error err = {""};
    const size_t row = block_bytes(type, n_in), gap = 48, stride = n_out * row + gap;
    uint8_t *file = malloc(n_mats * stride);
    assert_non_null(file);
    for (size_t i = 0; i < n_mats * stride; i++)
        file[i] = hip_test_byte(i);
    const struct weight_desc desc = {
        .name = "w", .type = type, .n_in = (int64_t)n_in, .n_out = (int64_t)n_out, .n_mats = (int64_t)n_mats, .data = file, .stride = stride};
    struct weight *w = b->ops->weight_new(b, &desc, &err);
    if (!w) {
        fail_msg("%s", err.text);
        abort();
    }
    assert_int_equal(w->gpu.type, type);
    assert_int_equal(w->gpu.n_in, n_in);
    assert_int_equal(w->gpu.n_out, n_out);
    assert_int_equal(w->gpu.n_mats, n_mats);
    assert_int_equal(w->gpu.row_stride, (row + 15) / 16 * 16);
    assert_int_equal(w->gpu.mat_stride, n_out * w->gpu.row_stride);
    const size_t bytes = n_mats * w->gpu.mat_stride, per_block = block_bytes(type, block_info(type)->values);
    uint8_t *got = malloc(bytes);
    assert_non_null(got);
    assert_ok(hip_device_read(hip_dev(hip_of(b)), got, w->gpu.data, bytes, &err), err);
    for (size_t m = 0; m < n_mats; m++)
        for (size_t o = 0; o < n_out; o++)
            for (size_t i = 0; i < w->gpu.row_stride; i++) {
                const int64_t from = origin(type, row / per_block, row, i);
                const uint8_t want = from < 0 ? 0 : file[m * stride + o * row + (size_t)from];
                if (got[m * w->gpu.mat_stride + o * w->gpu.row_stride + i] != want)
                    fail_msg("%s: byte %zu of row %zu of matrix %zu is wrong", block_info(type)->name, i, o, m);
            }
    free(got);
    free(file);
}

static void every_row_arrives_in_the_layout_of_the_kernels(void **state)
{
    (void)state;
    const struct backend_shape shape = test_shape(KV_F16);
    struct backend *b = must_open(&shape);
    for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
        const size_t values = block_info(types[t])->values;
        check_weight(b, types[t], values == 1 ? 37 : values, 1 + 4 * t, 3);
        check_weight(b, types[t], values == 1 ? 1030 : 5 * values, 7, 1);
    }
    check_weight(b, BLOCK_Q6_K, 2048, 8000, 1); /* 13 MB: several times around the ring */
    check_weight(b, BLOCK_Q8_0, 4096, 300, 20); /* matrices smaller than a piece */
    check_weight(b, BLOCK_F32, 500000, 3, 1);   /* one row fills a piece */
    b->ops->close(b);
}

static void half_precision_norms_and_taps_become_f32(void **state)
{
    (void)state;
    const struct backend_shape shape = test_shape(KV_F16);
    struct backend *b = must_open(&shape);
    struct error err = {""};
    enum { N = 40, TAPS = 4 };
    const uint16_t half[N] = {0x3c00, 0x4000, 0xc000, 0x3555, 1, 0x7bff}; /* 1, 2, -2, 0.333, the least subnormal, 65504 */
    float got[N], taps[10 * TAPS];
    for (int k = 0; k < 2; k++) {
        const enum block_type type = k ? BLOCK_BF16 : BLOCK_F16;
        float want[N];
        block_dequant(type, half, want, N);
        struct weight_desc norm = {.name = "norm", .type = type, .n_in = N, .n_out = 1, .n_mats = 1, .data = (const uint8_t *)half};
        struct weight *w = b->ops->weight_new(b, &norm, &err);
        assert_non_null(w);
        assert_int_equal(w->gpu.type, BLOCK_F32);
        assert_int_equal(w->desc.type, BLOCK_F32);
        assert_ok(hip_device_read(hip_dev(hip_of(b)), got, w->gpu.data, sizeof got, &err), err);
        assert_memory_equal(got, want, sizeof got);
        struct weight_desc conv = {.name = "conv", .type = type, .n_in = TAPS, .n_out = 10, .n_mats = 1, .data = (const uint8_t *)half};
        w = b->ops->weight_new(b, &conv, &err);
        assert_non_null(w);
        assert_int_equal(w->gpu.row_stride, TAPS * sizeof(float));
        assert_ok(hip_device_read(hip_dev(hip_of(b)), taps, w->gpu.data, sizeof taps, &err), err);
        assert_memory_equal(taps, want, sizeof taps);
    }
    b->ops->close(b);
}

static void a_weight_without_a_kernel_or_without_room_is_refused_by_name(void **state)
{
    (void)state;
    const struct backend_shape shape = test_shape(KV_F16);
    struct backend *b = must_open(&shape);
    struct error err = {""};
    uint8_t *bytes = calloc(1, 4 << 20);
    assert_non_null(bytes);
    struct weight_desc desc = {.name = "blk.3.odd", .type = BLOCK_Q3_K, .n_in = 256, .n_out = 1, .n_mats = 1, .data = bytes};
    assert_null(b->ops->weight_new(b, &desc, &err));
    assert_contains(err.text, "blk.3.odd");
    assert_contains(err.text, "Q3_K");
    assert_contains(err.text, "device cpu");
    desc = (struct weight_desc){.name = "blk.4.wide", .type = BLOCK_F32, .n_in = 1 << 20, .n_out = 1, .n_mats = 1, .data = bytes};
    assert_null(b->ops->weight_new(b, &desc, &err));
    assert_contains(err.text, "blk.4.wide");
    setenv("FAULTY_FREE", "1000000", 1);
    desc = (struct weight_desc){.name = "blk.5.large", .type = BLOCK_F32, .n_in = 1024, .n_out = 1024, .n_mats = 1, .data = bytes};
    assert_null(b->ops->weight_new(b, &desc, &err));
    assert_contains(err.text, "blk.5.large");
    assert_contains(err.text, "ttm.pages_limit");
    unsetenv("FAULTY_FREE");
    assert_non_null(b->ops->weight_new(b, &desc, &err)); /* nothing stuck */
    b->ops->close(b);
    free(bytes);
}

/* ---- buffers ---- */

static void buffers_begin_zeroed_and_keep_to_their_bounds(void **state)
{
    (void)state;
    const struct backend_shape shape = test_shape(KV_F16);
    struct backend *b = must_open(&shape);
    struct error err = {""};
    uint8_t bytes[100], zero[100] = {0};
    struct buffer *buf = b->ops->buffer_new(b, 100, &err), *other = b->ops->buffer_new(b, 0, &err);
    assert_non_null(buf);
    assert_non_null(other);
    assert_ok(b->ops->read(b, buf, 0, bytes, 100, &err), err);
    assert_memory_equal(bytes, zero, 100);
    assert_ok(b->ops->write(b, buf, 90, "0123456789", 10, &err), err);
    assert_ok(b->ops->read(b, buf, 88, bytes, 12, &err), err);
    assert_memory_equal(bytes,
                        "\0\0"
                        "0123456789",
                        12);
    assert_int_equal(b->ops->read(b, buf, 91, bytes, 10, &err), -1);
    assert_int_equal(b->ops->write(b, buf, SIZE_MAX, bytes, 2, &err), -1);
    assert_int_equal(b->ops->read(b, other, 0, bytes, 1, &err), -1);
    assert_ok(b->ops->sync(b, &err), err); /* the caller's mistakes did not stick */
    b->ops->buffer_free(b, buf);
    b->ops->close(b);
}

/* ---- pages and states, beside the CPU's ---- */

static void *image(size_t bytes, uint64_t seed)
{
    uint8_t *p = malloc(bytes ? bytes : 1);
    assert_non_null(p);
    for (size_t i = 0; i < bytes; i++)
        p[i] = hip_test_byte(seed + i);
    return p;
}

static void pages_are_the_cpus_and_never_move(void **state)
{
    (void)state;
    for (int k = 0; k < 2; k++) {
        const struct backend_shape shape = test_shape(k ? KV_Q8_0 : KV_F16);
        struct backend *b = must_open(&shape), *cpu = backend_open_plain(&shape, NULL);
        struct error err = {""};
        assert_non_null(cpu);
        const size_t bytes = cpu->ops->page_bytes(cpu);
        assert_int_equal(b->ops->page_bytes(b), bytes);
        assert_ok(b->ops->pages_reserve(b, 3, &err), err);
        uint8_t *one = image(bytes, 1), *two = image(bytes, 2), *got = malloc(bytes);
        assert_non_null(got);
        assert_ok(b->ops->page_load(b, 0, one, &err), err);
        assert_ok(b->ops->page_load(b, 2, two, &err), err);
        const uint64_t before = hip_of(b)->store->pages.at[2];
        for (int n = 4; n < 40; n += 5)
            assert_ok(b->ops->pages_reserve(b, n, &err), err);
        assert_int_equal(hip_of(b)->store->pages.at[2], before);
        b->ops->page_copy(b, 30, 2);
        b->ops->page_copy(b, 1, 0);
        assert_ok(b->ops->page_save(b, 0, got, &err), err);
        assert_memory_equal(got, one, bytes);
        assert_ok(b->ops->page_save(b, 1, got, &err), err);
        assert_memory_equal(got, one, bytes);
        assert_ok(b->ops->page_save(b, 30, got, &err), err);
        assert_memory_equal(got, two, bytes);
        assert_int_equal(b->ops->page_save(b, 39, got, &err), -1);
        assert_contains(err.text, "KV page 39");
        assert_ok(b->ops->sync(b, &err), err);
        b->ops->page_copy(b, 0, 39);
        assert_int_equal(b->ops->sync(b, &err), -1);
        assert_contains(err.text, "KV page 39");
        /* Each head's rows begin where slot_page_offset says, and all of them fill the page. */
        assert_int_equal(slot_page_offset(&shape, shape.n_kv_layers - 1, true, shape.n_kv_heads - 1) + GRID * slot_kv_row_bytes(&shape), bytes);
        b->ops->close(b);
        cpu->ops->close(cpu);
        free(one);
        free(two);
        free(got);
    }
}

static void packed_states_are_the_cpus(void **state)
{
    (void)state;
    static const int positions[] = {0, 1, 2, 5, 63, 64, 65, 130, 1000};
    const struct backend_shape shape = test_shape(KV_F16);
    struct backend *b = must_open(&shape), *cpu = backend_open_plain(&shape, NULL);
    struct error err = {""};
    assert_non_null(cpu);
    assert_int_equal(b->ops->state_bytes(b), cpu->ops->state_bytes(cpu));
    assert_ok(b->ops->states_reserve(b, 3, &err), err);
    assert_ok(cpu->ops->states_reserve(cpu, 3, &err), err);
    for (size_t i = 0; i < sizeof positions / sizeof *positions; i++) {
        const int pos = positions[i];
        const size_t bytes = cpu->ops->state_packed_bytes(cpu, pos);
        assert_int_equal(b->ops->state_packed_bytes(b, pos), bytes);
        uint8_t *in = image(bytes, i), *out = malloc(bytes), *expected = malloc(bytes);
        assert_true(out && expected);
        assert_ok(b->ops->state_load(b, 1, pos, in, &err), err);
        assert_ok(cpu->ops->state_load(cpu, 1, pos, in, &err), err);
        b->ops->state_copy(b, 2, 1);
        b->ops->state_reset(b, 1);
        cpu->ops->state_copy(cpu, 2, 1);
        cpu->ops->state_reset(cpu, 1);
        for (int32_t slot = 1; slot < 3; slot++) { /* 1: all but M is what it was */
            assert_ok(b->ops->state_save(b, slot, pos, out, &err), err);
            assert_ok(cpu->ops->state_save(cpu, slot, pos, expected, &err), err);
            assert_memory_equal(out, expected, bytes);
        }
        free(in);
        free(out);
        free(expected);
    }
    assert_int_equal(b->ops->state_save(b, 1, -1, &err, &err), -1);
    assert_int_equal(b->ops->state_load(b, 3, 0, &err, &err), -1);
    assert_contains(err.text, "state slot 3");
    assert_ok(b->ops->sync(b, &err), err);
    b->ops->close(b);
    cpu->ops->close(cpu);
}

static void a_reservation_that_fails_changes_nothing(void **state)
{
    (void)state;
    const struct backend_shape shape = test_shape(KV_F16);
    struct backend *b = must_open(&shape);
    struct error err = {""};
    uint8_t *page = malloc(b->ops->page_bytes(b));
    assert_non_null(page);
    assert_ok(b->ops->pages_reserve(b, 2, &err), err);
    setenv("FAULTY_FREE", "100", 1);
    assert_int_equal(b->ops->pages_reserve(b, 2000, &err), -1);
    assert_contains(err.text, "KV pages");
    assert_int_equal(b->ops->states_reserve(b, 2000, &err), -1);
    assert_contains(err.text, "DeltaNet states");
    unsetenv("FAULTY_FREE");
    setenv("FAULTY", "hipMemsetAsync:1:1", 1); /* memory that cannot be cleared is none */
    assert_int_equal(b->ops->pages_reserve(b, 5, &err), -1);
    assert_contains(err.text, "KV pages");
    unsetenv("FAULTY");
    assert_int_equal(b->ops->sync(b, &err), -1);
    assert_int_equal(b->ops->page_save(b, 2, page, &err), -1);
    assert_contains(err.text, "KV page 2");
    assert_ok(b->ops->page_save(b, 1, page, &err), err);
    assert_ok(b->ops->pages_reserve(b, 5, &err), err);
    assert_ok(b->ops->page_save(b, 4, page, &err), err);
    b->ops->close(b);
    free(page);
}

/* ---- a step ---- */

static void fetch(struct backend *b, void *dst, const void *src, size_t bytes)
{
    struct error err = {""};
    assert_ok(hip_device_read(hip_dev(hip_of(b)), dst, src, bytes, &err), err);
}

static void the_kernels_find_rows_spans_pages_and_states_of_the_step(void **state)
{
    (void)state;
    const struct backend_shape shape = test_shape(KV_F16);
    struct backend *b = must_open(&shape);
    struct hip *h = hip_of(b);
    struct error err = {""};
    assert_ok(b->ops->pages_reserve(b, 9, &err), err);
    assert_ok(b->ops->states_reserve(b, 4, &err), err);
    int32_t ids[] = {3, 1, 4, 1, 5, 9}, first[] = {8, 2, 5}, second[] = {7};
    struct span spans[] = {{.row = 0, .n = 4, .pos = 126, .pages = first, .state = 3}, {.row = 4, .n = 2, .pos = 0, .pages = second, .state = 0}};
    for (int round = 0; round < 2; round++) {
        b->ops->begin(b, ids, 6, spans, 2);
        ids[0]++; /* the arrays are the caller's again */
        first[0] = second[0] = 0;
        spans[0].pos = 0;
        assert_true(hip_ready(h));
        int32_t got_ids[6], row_span[6], row_pos[6];
        struct gpu_span got[2];
        uint64_t pages[4];
        fetch(b, got_ids, h->step.ids, sizeof got_ids);
        fetch(b, row_span, h->step.row_span, sizeof row_span);
        fetch(b, row_pos, h->step.row_pos, sizeof row_pos);
        fetch(b, got, h->step.spans, sizeof got);
        fetch(b, pages, h->step.pages, sizeof pages);
        assert_memory_equal(got_ids, ((const int32_t[]){3 + round, 1, 4, 1, 5, 9}), sizeof got_ids);
        assert_memory_equal(row_span, ((const int32_t[]){0, 0, 0, 0, 1, 1}), sizeof row_span);
        assert_memory_equal(row_pos, ((const int32_t[]){126, 127, 128, 129, 0, 1}), sizeof row_pos);
        assert_int_equal(h->step.n_rows, 6);
        assert_int_equal(h->step.n_spans, 2);
        assert_int_equal(got[0].first_page, 0);
        assert_int_equal(got[1].first_page, 3);
        assert_int_equal(got[1].row, 4);
        assert_int_equal(got[0].pos, 126);
        assert_int_equal(got[0].n, 4);
        assert_int_equal(got[0].state, h->store->states.at[3]);
        assert_int_equal(got[1].state, h->store->states.at[0]);
        const int32_t want[] = {8, 2, 5, 7};
        for (int i = 0; i < 4; i++)
            assert_int_equal(pages[i], h->store->pages.at[want[i]]);
        assert_int_equal(h->spans[0].pos, 126);
        first[0] = 8;
        second[0] = 7;
        spans[0].pos = 126;
    }
    b->ops->close(b);
}

static void steps_of_every_size_follow_one_another(void **state)
{
    (void)state;
    struct backend_shape shape = test_shape(KV_F16);
    shape.max_rows = 5000;
    struct backend *b = must_open(&shape);
    struct hip *h = hip_of(b);
    struct error err = {""};
    enum { MOST = 5000 };
    static int32_t ids[MOST], pages[MOST / GRID + 1], got[MOST];
    assert_ok(b->ops->pages_reserve(b, MOST / GRID + 1, &err), err);
    assert_ok(b->ops->states_reserve(b, 1, &err), err);
    for (int i = 0; i <= MOST / GRID; i++)
        pages[i] = i;
    for (int n = 1; n <= MOST; n = n * 3 + 1) {
        for (int i = 0; i < n; i++)
            ids[i] = (i + n) % shape.n_vocab;
        b->ops->begin(b, ids, n, &(struct span){.row = 0, .n = n, .pos = 0, .pages = pages, .state = 0}, 1);
        fetch(b, got, h->step.ids, (size_t)n * sizeof *got);
        assert_memory_equal(got, ids, (size_t)n * sizeof *got);
        fetch(b, got, h->step.row_pos, (size_t)n * sizeof *got);
        assert_int_equal(got[n - 1], n - 1);
    }
    b->ops->close(b);
}

static void a_wrong_step_is_refused_and_the_next_one_runs(void **state)
{
    (void)state;
    const struct backend_shape shape = test_shape(KV_F16);
    struct backend *b = must_open(&shape);
    struct error err = {""};
    assert_ok(b->ops->pages_reserve(b, 1, &err), err);
    assert_ok(b->ops->states_reserve(b, 1, &err), err);
    const int32_t ids[] = {0, 0}, good[] = {0}, bad[] = {1};
    struct span span = {.row = 0, .n = 2, .pos = 0, .pages = bad, .state = 0};
    b->ops->begin(b, ids, 2, &span, 1);
    assert_false(hip_ready(hip_of(b)));
    assert_int_equal(b->ops->sync(b, &err), -1);
    assert_contains(err.text, "KV page 1");
    span.pages = good;
    b->ops->begin(b, ids, 2, &span, 1);
    assert_true(hip_ready(hip_of(b)));
    assert_ok(b->ops->sync(b, &err), err);
    b->ops->close(b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(f32_keys_and_values_are_refused_with_the_types_that_work),
        cmocka_unit_test(the_backend_names_its_instruction_set),
        cmocka_unit_test(every_row_arrives_in_the_layout_of_the_kernels),
        cmocka_unit_test(half_precision_norms_and_taps_become_f32),
        cmocka_unit_test(a_weight_without_a_kernel_or_without_room_is_refused_by_name),
        cmocka_unit_test(buffers_begin_zeroed_and_keep_to_their_bounds),
        cmocka_unit_test(pages_are_the_cpus_and_never_move),
        cmocka_unit_test(packed_states_are_the_cpus),
        cmocka_unit_test(a_reservation_that_fails_changes_nothing),
        cmocka_unit_test(the_kernels_find_rows_spans_pages_and_states_of_the_step),
        cmocka_unit_test(steps_of_every_size_follow_one_another),
        cmocka_unit_test(a_wrong_step_is_refused_and_the_next_one_runs),
    };
    return cmocka_run_group_tests(tests, setup_group, NULL);
}
