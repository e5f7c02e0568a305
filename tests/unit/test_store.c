/* The memory of the CPU backends: what is refused, what stays where it is, and the layout of packed states. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "engine/cpu/store.h"

#if defined(__has_feature)
#define BUILT_WITH_ASAN __has_feature(address_sanitizer)
#else
#define BUILT_WITH_ASAN 0
#endif

static struct backend_shape shape_of_two_layers(void)
{
    return (struct backend_shape){.n_embd = 8,
                                  .n_vocab = 50,
                                  .norm_eps = 1e-6F,
                                  .n_heads = 4,
                                  .n_kv_heads = 2,
                                  .head_dim = 8,
                                  .n_rot = 4,
                                  .rope_theta = 1e4F,
                                  .attn_scale = 0.5F,
                                  .n_kv_layers = 3,
                                  .n_delta_layers = 2,
                                  .delta_k_heads = 2,
                                  .delta_v_heads = 4,
                                  .delta_dim = 3,
                                  .conv_width = 4,
                                  .kv_type = KV_F32,
                                  .max_rows = 100,
                                  .max_logit_rows = 4,
                                  .n_experts_used = 0,
                                  .dense_ff = 8};
}

enum { HK = 2, HV = 4, S = 3, CH = 2 * HK * S + HV * S, TAPS = 4 };

struct fixture {
    struct backend_shape shape;
    struct store s;
};

static int setup(void **state)
{
    static struct fixture f;
    struct error err = {0};
    f.shape = shape_of_two_layers();
    if (store_open(&f.s, &f.shape, &err) || store_pages_reserve(&f.s, 4, &err) || store_states_reserve(&f.s, 3, &err))
        return -1;
    *state = &f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    store_close(&f->s);
    return 0;
}

/* ---- opening ---- */

static void a_shape_that_would_overflow_or_divide_badly_is_refused_by_field(void **state)
{
    (void)state;
    static const struct {
        size_t offset;
        int value;
        const char *field;
    } cases[] = {
        {offsetof(struct backend_shape, n_embd), 0, "n_embd"},
        {offsetof(struct backend_shape, n_vocab), -1, "n_vocab"},
        {offsetof(struct backend_shape, n_heads), 5, "n_heads"},
        {offsetof(struct backend_shape, n_kv_heads), 0, "n_kv_heads"},
        {offsetof(struct backend_shape, head_dim), 1 << 20, "head_dim"},
        {offsetof(struct backend_shape, n_rot), 10, "n_rot"},
        {offsetof(struct backend_shape, n_rot), 3, "n_rot"},
        {offsetof(struct backend_shape, n_kv_layers), -1, "n_kv_layers"},
        {offsetof(struct backend_shape, n_delta_layers), 1 << 20, "n_delta_layers"},
        {offsetof(struct backend_shape, delta_k_heads), 3, "delta_k_heads"},
        {offsetof(struct backend_shape, delta_v_heads), 1 << 30, "delta_v_heads"},
        {offsetof(struct backend_shape, delta_dim), 1 << 16, "delta_dim"},
        {offsetof(struct backend_shape, conv_width), 1, "conv_width"},
        {offsetof(struct backend_shape, max_rows), 0, "max_rows"},
        {offsetof(struct backend_shape, n_experts), 4, "n_experts_used"},
        {offsetof(struct backend_shape, kv_type), 7, "kv_type"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct backend_shape shape = shape_of_two_layers();
        struct error err = {0};
        struct store s;
        memcpy((char *)&shape + cases[i].offset, &cases[i].value, sizeof(int));
        assert_int_equal(store_open(&s, &shape, &err), -1);
        if (!strstr(err.text, cases[i].field))
            fail_msg("expected %s in: %s", cases[i].field, err.text);
    }
}

static void the_ring_holds_what_a_row_needs_after_a_full_rollback(void **state)
{
    (void)state;
    for (int taps = 2; taps <= 16; taps++) {
        struct backend_shape shape = shape_of_two_layers();
        struct error err = {0};
        struct store s;
        shape.conv_width = taps;
        assert_int_equal(store_open(&s, &shape, &err), 0);
        assert_true(s.ring >= taps - 1 + ROLLBACK && (s.ring & (s.ring - 1)) == 0);
        store_close(&s);
    }
}

static void models_without_deltanet_or_without_attention_need_no_memory_for_it(void **state)
{
    (void)state;
    struct backend_shape dense = shape_of_two_layers(), recurrent = shape_of_two_layers();
    const int32_t ids[] = {1, 2}, pages[] = {0};
    struct error err = {0};
    struct store s;
    dense.n_delta_layers = dense.delta_k_heads = dense.delta_v_heads = dense.delta_dim = dense.conv_width = 0;
    assert_int_equal(store_open(&s, &dense, &err), 0);
    assert_int_equal(store_state_bytes(&s), 0);
    assert_int_equal(store_state_packed_bytes(&s, 70), 0);
    assert_int_equal(store_pages_reserve(&s, 1, &err), 0);
    store_begin(&s, ids, 2, &(struct span){.row = 0, .n = 2, .pos = 0, .pages = pages, .state = -1}, 1);
    assert_string_equal(s.error.text, "");
    store_close(&s);

    recurrent.n_kv_layers = 0;
    assert_int_equal(store_open(&s, &recurrent, &err), 0);
    assert_int_equal(store_page_bytes(&s), 0);
    assert_int_equal(store_states_reserve(&s, 1, &err), 0);
    store_begin(&s, ids, 2, &(struct span){.row = 0, .n = 2, .pos = 70, .pages = NULL, .state = 0}, 1);
    assert_string_equal(s.error.text, "");
    store_close(&s);
}

/* ---- memory ---- */

static void buffers_are_zero_and_on_cache_lines_and_may_go_in_any_order(void **state)
{
    struct fixture *f = *state;
    struct error err = {0};
    struct buffer *b[3];
    for (int i = 0; i < 3; i++) {
        b[i] = store_buffer_new(&f->s, (size_t)(i * 100), &err);
        assert_non_null(b[i]);
        assert_int_equal((uintptr_t)b[i]->data % 64, 0);
        for (size_t j = 0; j < b[i]->bytes / sizeof(float); j++)
            assert_true(b[i]->data[j] == 0);
    }
    store_buffer_free(&f->s, b[1]);
    store_buffer_free(&f->s, b[2]);
    store_buffer_free(&f->s, NULL);
    assert_ptr_equal(f->s.buffers, b[0]);
    assert_null(b[0]->next);
    assert_null(store_buffer_new(&f->s, SIZE_MAX - 3, &err));
    assert_non_null(strstr(err.text, "out of memory"));
}

static void a_weight_must_be_whole_rows_of_a_supported_type(void **state)
{
    struct fixture *f = *state;
    static const uint8_t bytes[4096];
    const struct weight_desc good = {.name = "blk.0.x", .type = BLOCK_Q8_0, .n_in = 64, .n_out = 3, .n_mats = 2, .data = bytes, .stride = 3 * 68};
    struct weight_desc bad[7];
    struct error err = {0};
    struct weight *w = store_weight_new(&f->s, &good, &err);
    assert_non_null(w);
    assert_int_equal(w->row_bytes, 68);
    assert_ptr_equal(weight_row(w, 1, 2), bytes + 204 + 136);
    assert_string_equal(w->name, "blk.0.x");
    for (size_t i = 0; i < 7; i++)
        bad[i] = good;
    bad[0].type = (enum block_type)99;
    bad[1].n_in = 65;
    bad[2].n_out = 0;
    bad[3].n_mats = -1;
    bad[4].stride = 203;
    bad[5].data = NULL;
    bad[6].n_in = INT64_MAX - 31;
    for (size_t i = 0; i < 7; i++) {
        err.text[0] = '\0';
        assert_null(store_weight_new(&f->s, &bad[i], &err));
        assert_non_null(strstr(err.text, "blk.0.x"));
    }
    bad[4].n_mats = 1; /* the stride of a single matrix does not matter */
    bad[4].stride = 0;
    assert_non_null(store_weight_new(&f->s, &bad[4], &err));
}

static void reserving_more_moves_nothing(void **state)
{
    struct fixture *f = *state;
    struct error err = {0};
    uint8_t *page = f->s.pages[3];
    float *slot = f->s.states[2];
    memset(page, 0x5a, store_page_bytes(&f->s));
    slot[0] = 42;
    assert_int_equal(store_pages_reserve(&f->s, 200, &err), 0);
    assert_int_equal(store_states_reserve(&f->s, 40, &err), 0);
    assert_int_equal(store_pages_reserve(&f->s, 2, &err), 0); /* fewer: nothing happens */
    assert_int_equal(f->s.n_pages, 200);
    assert_ptr_equal(f->s.pages[3], page);
    assert_ptr_equal(f->s.states[2], slot);
    assert_int_equal(page[store_page_bytes(&f->s) - 1], 0x5a);
    assert_true(slot[0] == 42);
    for (int i = 0; i < 200; i++)
        assert_int_equal((uintptr_t)f->s.pages[i] % 64, 0);
}

/* With 64 MiB of address space left, a thousand pages of 384 KiB run out on the way; what was there stays, and a smaller wish is still met. */
static void a_reservation_that_fails_changes_nothing(void **state)
{
#if defined(__SANITIZE_ADDRESS__) || BUILT_WITH_ASAN
    (void)state;
    skip(); /* its shadow memory does not live with an address space limit */
#else
    struct fixture *f = *state;
    struct error err = {0};
    struct rlimit old, low;
    char line[64] = "";
    FILE *statm = fopen("/proc/self/statm", "r");
    assert_non_null(statm);
    assert_non_null(fgets(line, sizeof line, statm)); /* the first number: pages of address space in use */
    fclose(statm);
    f->shape.head_dim = 128; /* before anything looked at a page */
    store_close(&f->s);
    assert_int_equal(store_open(&f->s, &f->shape, &err), 0);
    assert_int_equal(store_pages_reserve(&f->s, 2, &err), 0);
    uint8_t *page = f->s.pages[1];

    assert_int_equal(getrlimit(RLIMIT_AS, &old), 0);
    low = old;
    low.rlim_cur = strtoul(line, NULL, 10) * (size_t)sysconf(_SC_PAGESIZE) + ((size_t)64 << 20);
    assert_int_equal(setrlimit(RLIMIT_AS, &low), 0);
    const int many = store_pages_reserve(&f->s, 1000, &err), n_after = f->s.n_pages, few = store_pages_reserve(&f->s, 50, NULL);
    assert_int_equal(setrlimit(RLIMIT_AS, &old), 0);
    assert_int_equal(many, -1);
    assert_non_null(strstr(err.text, "1000 KV pages"));
    assert_int_equal(n_after, 2);
    assert_ptr_equal(f->s.pages[1], page);
    assert_int_equal(few, 0); /* the half that was allocated has been given back */
    assert_int_equal(f->s.n_pages, 50);
#endif
}

/* Every array of every layer gets its own value in every element: none overlaps another, and the last ends inside the block. */
static void pages_and_slots_have_room_for_every_layer_without_overlap(void **state)
{
    struct fixture *f = *state;
    const size_t lengths[5] = {HV * S * S, GRID * HK * S, GRID * HV * S, GRID * HV, (size_t)f->s.ring * CH};
    for (int pass = 0; pass < 2; pass++)
        for (int layer = 0; layer < 2; layer++) {
            const struct delta_state d = store_delta(&f->s, 1, layer);
            float *const arrays[5] = {d.m, d.k, d.u, d.g, d.conv};
            for (int a = 0; a < 5; a++) {
                assert_int_equal((uintptr_t)arrays[a] % 64, 0);
                assert_true(arrays[a] >= f->s.states[1] && arrays[a] + lengths[a] <= f->s.states[1] + store_state_bytes(&f->s) / sizeof(float));
                for (size_t i = 0; i < lengths[a]; i++) {
                    if (pass == 0)
                        arrays[a][i] = (float)(10 * layer + a + 1);
                    else
                        assert_true(arrays[a][i] == (float)(10 * layer + a + 1));
                }
            }
        }
    for (int pass = 0; pass < 2; pass++)
        for (int layer = 0; layer < 3; layer++)
            for (int head = 0; head < 2; head++)
                for (int v = 0; v < 2; v++) {
                    float *x = v ? store_v(&f->s, 2, layer, head) : store_k(&f->s, 2, layer, head);
                    assert_int_equal((uintptr_t)x % 64, 0);
                    assert_true((uint8_t *)(x + (ptrdiff_t)(GRID * 8)) <= f->s.pages[2] + store_page_bytes(&f->s));
                    for (int i = 0; i < GRID * 8; i++) {
                        if (pass == 0)
                            x[i] = (float)(layer * 4 + head * 2 + v);
                        else
                            assert_true(x[i] == (float)(layer * 4 + head * 2 + v));
                    }
                }
    assert_int_equal(store_page_bytes(&f->s), 3 * 2 * 2 * GRID * 8 * sizeof(float));
    f->shape.kv_type = KV_F16;
    assert_int_equal(store_page_bytes(&f->s), 3 * 2 * 2 * GRID * 8 * 2);
}

/* Rows of blocks: every row of every head has its own bytes, whatever the type, and they fill the page. */
static void pages_of_every_kv_type_are_filled_by_their_rows_and_q8_0_takes_about_half_of_f16(void **state)
{
    (void)state;
    static const enum kv_type types[] = {KV_F32, KV_F16, KV_Q8_0};
    static const int head_dims[] = {32, 64, 96, 128, 256};
    for (size_t d = 0; d < sizeof head_dims / sizeof head_dims[0]; d++) {
        size_t page_bytes[3];
        for (size_t k = 0; k < 3; k++) {
            struct backend_shape shape = shape_of_two_layers();
            struct error err = {0};
            struct store s;
            shape.head_dim = head_dims[d];
            shape.kv_type = types[k];
            assert_int_equal(store_open(&s, &shape, &err), 0);
            assert_int_equal(store_pages_reserve(&s, 1, &err), 0);
            const size_t row = slot_kv_row_bytes(&shape), bytes = page_bytes[k] = store_page_bytes(&s);
            uint8_t *taken = calloc(bytes, 1);
            assert_non_null(taken);
            for (int layer = 0; layer < 3; layer++)
                for (int head = 0; head < 2; head++)
                    for (int v = 0; v < 2; v++) {
                        const uint8_t *rows = v ? store_v(&s, 0, layer, head) : store_k(&s, 0, layer, head);
                        const size_t from = (size_t)(rows - s.pages[0]);
                        assert_int_equal((uintptr_t)rows % 64, 0);
                        assert_true(from + GRID * row <= bytes);
                        for (size_t i = 0; i < GRID * row; i++)
                            assert_int_equal(taken[from + i]++, 0);
                    }
            for (size_t i = 0; i < bytes; i++)
                assert_int_equal(taken[i], 1);
            free(taken);
            store_close(&s);
        }
        assert_int_equal(page_bytes[0], 2 * page_bytes[1]);
        assert_int_equal(page_bytes[2] * 32, page_bytes[1] * 17); /* 34 bytes for 32 numbers instead of 64 */
    }
}

static void heads_that_are_no_whole_blocks_are_refused_for_q8_0_by_the_settings_name(void **state)
{
    (void)state;
    for (int dim = 1; dim <= 130; dim++) {
        struct backend_shape shape = shape_of_two_layers();
        struct error err = {0};
        struct store s;
        shape.head_dim = dim;
        shape.n_rot = 0;
        shape.kv_type = KV_Q8_0;
        const int rc = store_open(&s, &shape, &err);
        assert_int_equal(rc, dim % 32 == 0 ? 0 : -1);
        if (rc == 0)
            store_close(&s);
        else if (!strstr(err.text, "kv-type q8_0") || !strstr(err.text, "use kv-type f16"))
            fail_msg("what to change is not said: %s", err.text);
    }
}

static void a_reset_clears_the_matrix_of_every_layer_and_of_no_other_slot(void **state)
{
    struct fixture *f = *state;
    for (int32_t slot = 0; slot < 2; slot++)
        for (int layer = 0; layer < 2; layer++)
            for (int i = 0; i < HV * S * S; i++)
                store_delta(&f->s, slot, layer).m[i] = 1;
    store_state_reset(&f->s, 0);
    for (int layer = 0; layer < 2; layer++)
        for (int i = 0; i < HV * S * S; i++) {
            assert_true(store_delta(&f->s, 0, layer).m[i] == 0);
            assert_true(store_delta(&f->s, 1, layer).m[i] == 1);
        }
}

static void copies_outside_what_is_reserved_fail_and_change_nothing(void **state)
{
    struct fixture *f = *state;
    f->s.states[1][0] = 5;
    store_state_copy(&f->s, 1, 3);
    assert_non_null(strstr(f->s.error.text, "slot 3"));
    store_page_copy(&f->s, -1, 0);
    assert_non_null(strstr(f->s.error.text, "slot 3")); /* the first error stays */
    f->s.error.text[0] = '\0';
    store_page_copy(&f->s, -1, 0);
    assert_non_null(strstr(f->s.error.text, "page -1"));
    f->s.error.text[0] = '\0';
    store_state_reset(&f->s, 99);
    assert_non_null(strstr(f->s.error.text, "slot 99"));
    assert_true(f->s.states[1][0] == 5);
    f->s.error.text[0] = '\0';
    store_state_copy(&f->s, 2, 1);
    assert_true(f->s.states[2][0] == 5);
    store_state_copy(&f->s, 2, 2);
    assert_string_equal(f->s.error.text, "");
}

/* ---- packed states ---- */

/* A number for each element that says where it belongs. */
static float label(int layer, int array, int position, int i)
{
    return (float)(layer * 1000000 + array * 100000 + position * 100 + i);
}

/* Fills a slot as a sequence of length pos leaves it, and the rest with -1. */
static void fill_slot(struct store *s, int32_t slot, int pos)
{
    for (size_t i = 0; i < store_state_bytes(s) / sizeof(float); i++)
        s->states[slot][i] = -1;
    for (int layer = 0; layer < 2; layer++) {
        const struct delta_state d = store_delta(s, slot, layer);
        for (int i = 0; i < HV * S * S; i++)
            d.m[i] = label(layer, 0, 0, i);
        for (int p = pos / GRID * GRID; p < pos; p++) {
            for (int i = 0; i < HK * S; i++)
                d.k[p % GRID * HK * S + i] = label(layer, 1, p, i);
            for (int i = 0; i < HV * S; i++)
                d.u[p % GRID * HV * S + i] = label(layer, 2, p, i);
            for (int i = 0; i < HV; i++)
                d.g[p % GRID * HV + i] = label(layer, 3, p, i);
        }
        for (int p = 0; p < pos; p++)
            for (int i = 0; i < CH; i++)
                d.conv[p % s->ring * CH + i] = label(layer, 4, p, i);
    }
}

static void a_packed_state_has_the_documented_layout_and_comes_back_whole(void **state)
{
    struct fixture *f = *state;
    static const int positions[] = {0, 1, 2, 3, 4, 17, 63, 64, 65, 130};
    for (size_t c = 0; c < sizeof positions / sizeof positions[0]; c++) {
        const int pos = positions[c], n = pos % GRID, history = pos < TAPS - 1 ? pos : TAPS - 1;
        const size_t floats = 2 * (size_t)(HV * S * S + n * (HK * S + HV * S + HV) + history * CH);
        assert_int_equal(store_state_packed_bytes(&f->s, pos), floats * sizeof(float));
        float *image = malloc((floats + 1) * sizeof *image), *again = malloc(floats * sizeof *again);
        assert_true(image && again);
        image[floats] = 77;
        fill_slot(&f->s, 0, pos);
        store_state_save(&f->s, 0, pos, image);
        assert_true(image[floats] == 77);

        const float *at = image;
        for (int layer = 0; layer < 2; layer++)
            for (int i = 0; i < HV * S * S; i++)
                assert_true(*at++ == label(layer, 0, 0, i));
        for (int layer = 0; layer < 2; layer++) {
            const int widths[] = {HK * S, HV * S, HV};
            for (int a = 0; a < 3; a++)
                for (int p = pos - n; p < pos; p++)
                    for (int i = 0; i < widths[a]; i++)
                        assert_true(*at++ == label(layer, a + 1, p, i));
        }
        for (int layer = 0; layer < 2; layer++)
            for (int p = pos - history; p < pos; p++)
                for (int i = 0; i < CH; i++)
                    assert_true(*at++ == label(layer, 4, p, i));
        assert_ptr_equal(at, image + floats);

        fill_slot(&f->s, 1, 0); /* another slot, full of something else */
        store_state_load(&f->s, 1, pos, image);
        store_state_save(&f->s, 1, pos, again);
        assert_memory_equal(image, again, floats * sizeof *image);
        for (int layer = 0; layer < 2; layer++) { /* and where rows look for it */
            const struct delta_state d = store_delta(&f->s, 1, layer);
            assert_true(d.m[1] == label(layer, 0, 0, 1));
            if (n > 0)
                assert_true(d.u[(n - 1) * HV * S] == label(layer, 2, pos - 1, 0));
            if (history > 0)
                assert_true(d.conv[(pos - history) % f->s.ring * CH] == label(layer, 4, pos - history, 0));
        }
        free(image);
        free(again);
    }
    assert_int_equal(store_state_packed_bytes(&f->s, -1), 0);
}

/* ---- a step ---- */

static void a_step_is_copied_so_that_the_callers_arrays_may_be_reused(void **state)
{
    struct fixture *f = *state;
    int32_t ids[] = {1, 2, 3, 49, 0}, first[] = {3, 1}, second[] = {2};
    struct span spans[] = {{.row = 0, .n = 3, .pos = 62, .pages = first, .state = 2}, {.row = 3, .n = 2, .pos = 0, .pages = second, .state = 0}};
    store_begin(&f->s, ids, 5, spans, 2);
    memset(ids, 0x7f, sizeof ids);
    memset(first, 0x7f, sizeof first);
    memset(second, 0x7f, sizeof second);
    memset(spans, 0x7f, sizeof spans);
    assert_string_equal(f->s.error.text, "");
    assert_int_equal(f->s.n_rows, 5);
    assert_int_equal(f->s.n_spans, 2);
    assert_int_equal(f->s.ids[3], 49);
    assert_int_equal(f->s.spans[0].pos, 62);
    assert_int_equal(f->s.spans[0].pages[0], 3);
    assert_int_equal(f->s.spans[0].pages[1], 1);
    assert_int_equal(f->s.spans[1].pages[0], 2);
    assert_int_equal(f->s.spans[1].row, 3);
    assert_int_equal(f->s.spans[1].state, 0);
}

static void an_inconsistent_step_is_refused_whole(void **state)
{
    struct fixture *f = *state;
    static const int32_t pages[] = {0, 1}, far_page[] = {0, 4}, negative_page[] = {-1, 0};
    const struct span good[2] = {{.row = 0, .n = 2, .pos = 63, .pages = pages, .state = 0}, {.row = 2, .n = 1, .pos = 5, .pages = pages, .state = 1}};
    struct {
        struct span spans[2];
        int n_rows, n_spans;
        int32_t last_id;
        const char *message;
    } cases[16];
    size_t n = sizeof cases / sizeof cases[0];
    for (size_t i = 0; i < n; i++) {
        memcpy(cases[i].spans, good, sizeof good);
        cases[i].n_rows = 3;
        cases[i].n_spans = 2;
        cases[i].last_id = 9;
        cases[i].message = "does not continue";
    }
    cases[0].spans[1].row = 1; /* overlaps */
    cases[1].spans[1].row = 3; /* leaves a gap */
    cases[2].spans[1].n = 2;   /* beyond the last row */
    cases[3].spans[1].n = 0;
    cases[4].spans[0].pos = -1;
    cases[5].spans[0].pos = INT_MAX - 1;
    cases[6].n_rows = 4, cases[6].message = "cover 3 of 4";
    cases[7].n_rows = 0, cases[7].message = "0 rows";
    cases[8].n_rows = 101, cases[8].message = "at most 100 rows";
    cases[9].n_spans = 0, cases[9].message = "0 spans";
    cases[10].spans[0].pages = far_page, cases[10].message = "page 4";
    cases[11].spans[0].pages = negative_page, cases[11].message = "page -1";
    cases[12].spans[1].state = 3, cases[12].message = "slot 3";
    cases[13].spans[1].state = 0, cases[13].message = "used by two spans";
    cases[14].last_id = 50, cases[14].message = "token id of row 2 is 50";
    cases[15].spans[0].pages = NULL, cases[15].message = "no pages";
    for (size_t i = 0; i < n; i++) {
        int32_t ids[128] = {1, 2, cases[i].last_id};
        store_begin(&f->s, ids, 3, good, 2);
        if (cases[i].last_id == 9)
            assert_string_equal(f->s.error.text, "");
        store_begin(&f->s, ids, cases[i].n_rows, cases[i].spans, cases[i].n_spans);
        if (!strstr(f->s.error.text, cases[i].message))
            fail_msg("case %zu: expected '%s' in: %s", i, cases[i].message, f->s.error.text);
        assert_int_equal(f->s.n_rows, 0);
        assert_int_equal(f->s.n_spans, 0);
        f->s.error.text[0] = '\0';
    }
}

static void after_an_error_a_step_does_not_begin(void **state)
{
    struct fixture *f = *state;
    const int32_t ids[] = {1}, pages[] = {0};
    const struct span span = {.row = 0, .n = 1, .pos = 0, .pages = pages, .state = 0};
    store_begin(&f->s, ids, 1, &span, 1);
    assert_int_equal(f->s.n_rows, 1);
    store_fail(&f->s, "first %d", 1);
    store_fail(&f->s, "second");
    assert_string_equal(f->s.error.text, "first 1");
    store_begin(&f->s, ids, 1, &span, 1);
    assert_int_equal(f->s.n_rows, 0);
    assert_string_equal(f->s.error.text, "first 1");
}

int main(void)
{
#define WITH_STORE(test) cmocka_unit_test_setup_teardown(test, setup, teardown)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_shape_that_would_overflow_or_divide_badly_is_refused_by_field),
        cmocka_unit_test(the_ring_holds_what_a_row_needs_after_a_full_rollback),
        cmocka_unit_test(models_without_deltanet_or_without_attention_need_no_memory_for_it),
        WITH_STORE(buffers_are_zero_and_on_cache_lines_and_may_go_in_any_order),
        WITH_STORE(a_weight_must_be_whole_rows_of_a_supported_type),
        WITH_STORE(reserving_more_moves_nothing),
        WITH_STORE(a_reservation_that_fails_changes_nothing),
        WITH_STORE(pages_and_slots_have_room_for_every_layer_without_overlap),
        cmocka_unit_test(pages_of_every_kv_type_are_filled_by_their_rows_and_q8_0_takes_about_half_of_f16),
        cmocka_unit_test(heads_that_are_no_whole_blocks_are_refused_for_q8_0_by_the_settings_name),
        WITH_STORE(a_reset_clears_the_matrix_of_every_layer_and_of_no_other_slot),
        WITH_STORE(copies_outside_what_is_reserved_fail_and_change_nothing),
        WITH_STORE(a_packed_state_has_the_documented_layout_and_comes_back_whole),
        WITH_STORE(a_step_is_copied_so_that_the_callers_arrays_may_be_reused),
        WITH_STORE(an_inconsistent_step_is_refused_whole),
        WITH_STORE(after_an_error_a_step_does_not_begin),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
