/* Promise: the GPU's gated DeltaNet is the plain backend's within the rounding of f32 sums, and a row's bits depend on nothing but its own sequence:
 * not on how its tokens were cut into steps, what shared them, rows taken back, or a snapshot in between.
 *
 * Runs the kernels on the CPU (the shim) and, where it is built, as machine code of three GPU generations (the emulator). */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <unistd.h>

#include "hip/hip_impl.h"
#include "tests/hip/hip_test.h"
#include "tests/unit/backend_fixture.h"

static struct hip_device *dev; /* of the group that runs */
static bool few; /* shorter lists: for the emulator, and for all unless BEDSIDE_HIP_TESTS=all; each list begins with what matters most */

static int some(int n, int when_few)
{
    return few && when_few < n ? when_few : n;
}

static struct backend *open_hip(const struct backend_shape *shape, struct error *err)
{
    return hip_open_on(dev, shape, err);
}

/* Shapes of this test have no attention: nothing but DeltaNet is asked of the backend. */
static struct backend_shape delta_only(struct backend_shape shape)
{
    shape.n_kv_layers = 0;
    return shape;
}

static struct backend_shape with_heads(int k_heads, int v_heads, int dim, int width)
{
    struct backend_shape shape = delta_only(fixture_shape_small());
    shape.delta_k_heads = k_heads;
    shape.delta_v_heads = v_heads;
    shape.delta_dim = dim;
    shape.conv_width = width;
    return shape;
}

/* The 35B's heads and dimensions, but two key heads and four value heads. */
static struct backend_shape narrow_35b(void)
{
    return with_heads(2, 4, 128, 4);
}

/* All of a sequence's state as floats. Returns their number. */
static size_t state_floats(const struct fixture_run *run, int seq, float **values)
{
    struct error err = {0};
    const int pos = run->length[seq];
    const size_t bytes = run->b->ops->state_packed_bytes(run->b, pos);
    *values = malloc(bytes + 1);
    assert_non_null(*values);
    assert_ok(run->b->ops->state_save(run->b, run->state[seq], pos, *values, &err), err);
    return bytes / sizeof(float);
}

static double *as_doubles(const float *x, size_t n)
{
    double *y = calloc(n + 1, sizeof *y);
    assert_non_null(y);
    for (size_t i = 0; i < n; i++)
        y[i] = (double)x[i];
    return y;
}

static void assert_states_near(const struct fixture_run *got, const struct fixture_run *want, double tolerance)
{
    const struct backend_shape *sh = &got->b->shape;
    for (int q = 0; q < got->data->n_seqs; q++) {
        float *a, *b;
        size_t n = state_floats(got, q, &a);
        assert_int_equal(state_floats(want, q, &b), n);
        double *expected = as_doubles(b, n);
        const int history = got->length[q] < sh->conv_width - 1 ? got->length[q] : sh->conv_width - 1;
        if (got->data->op.kind == FO_DELTA_RULE) /* the history is delta_conv's, not written here */
            n -= (size_t)(sh->n_delta_layers * history * fixture_channels(sh));
        fixture_assert_near("state", a, expected, 1, n, tolerance);
        free(expected);
        free(a);
        free(b);
    }
}

static void assert_same_states(const struct fixture_run *x, const struct fixture_run *y)
{
    for (int q = 0; q < x->data->n_seqs; q++) {
        float *a, *b;
        const size_t n = state_floats(x, q, &a);
        assert_int_equal(state_floats(y, q, &b), n);
        assert_memory_equal(a, b, n * sizeof *a);
        free(a);
        free(b);
    }
}

/* ---- against the plain backend ---- */

/* Sums of some hundred terms in f32; see f32_bounds in tests/unit/test_backend_cpu.c. */
static const double NEAR = 1e-5;

static void compare(const struct backend_shape *shape, uint64_t seed, int n_seqs, const int *n_tokens)
{
    struct fixture_rng rng = {seed};
    struct fixture_model model = fixture_model_new(&rng, shape, BLOCK_F32, false);
    static const enum fixture_op_kind kinds[] = {FO_DELTA_CONV, FO_DELTA_RULE, FO_DELTA};
    if (seed % 2) { /* filters of another type; the small vectors too */
        fixture_matrix_free(&model.m[FM_CONV]);
        model.m[FM_CONV] =
            fixture_matrix_new(&rng, "conv", seed % 4 == 1 ? BLOCK_F16 : BLOCK_BF16, shape->conv_width, fixture_channels(shape), 1, 0.5);
        fixture_matrix_free(&model.m[FM_DELTA_NORM]);
        model.m[FM_DELTA_NORM] = fixture_matrix_new(&rng, "norm", BLOCK_F16, shape->delta_dim, 1, 1, 1);
    }
    for (int k = 0; k < 3; k++) {
        struct fixture_data data = fixture_data_new(&rng, shape, kinds[k], n_seqs, n_tokens);
        struct fixture_run want = fixture_run_open(backend_open_plain, &model, &data), got = fixture_run_open(open_hip, &model, &data);
        for (int q = 0; q < n_seqs; q++)
            fixture_feed(&want, q, n_tokens[q], 100);
        fixture_feed_mixed(&got, &rng, 80);
        for (int q = 0; q < n_seqs; q++) {
            for (int i = 0; i < data.op.n_out; i++) {
                const size_t n = (size_t)n_tokens[q], width = data.op.out[i];
                char what[64];
                snprintf(what, sizeof what, "operation %d, output %d, seed %d", (int)kinds[k], i, (int)seed);
                double *expected = as_doubles(want.out[q][i], n * width);
                fixture_assert_near(what, got.out[q][i], expected, n, width, NEAR);
                free(expected);
            }
        }
        if (kinds[k] != FO_DELTA_CONV)
            assert_states_near(&got, &want, NEAR);
        fixture_run_close(&got);
        fixture_run_close(&want);
        fixture_data_free(&data);
    }
    fixture_model_free(&model);
}

static void it_agrees_with_the_plain_backend(void **state)
{
    (void)state;
    const int n_tokens[] = {150, 41, 7};
    const struct backend_shape shapes[] = {delta_only(fixture_shape_small()), delta_only(fixture_shape_wide()), narrow_35b()};
    for (int i = 0; i < 3; i++)
        compare(&shapes[i], (uint64_t)i, some(3, i == 2 ? 1 : 3), n_tokens);
}

static void it_agrees_with_all_heads_of_the_35b(void **state)
{
    (void)state;
    const struct backend_shape shape = delta_only(fixture_shape_35b_heads());
    compare(&shape, 10, 1, (const int[]){some(70, 66)});
}

/* Heads that fill part of the lanes, all of them, all and a part again, twice all; filters of 2 to 16 taps; every ratio of heads. */
static void it_agrees_at_every_head_size_and_filter_width(void **state)
{
    (void)state;
    static const int shapes[][4] = {{1, 1, 144, 4}, {1, 3, 32, 16}, {1, 2, 128, 9}, {3, 3, 48, 5},   {1, 2, 256, 3},
                                    {2, 4, 64, 4},  {1, 1, 16, 2},  {2, 2, 112, 7}, {2, 6, 192, 16}, {2, 2, 240, 4}};
    struct fixture_rng rng = {5};
    for (int i = 0; i < some(10, 4); i++) {
        const struct backend_shape shape = with_heads(shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3]);
        const int n_tokens[] = {66 + fixture_below(&rng, 30), 1 + fixture_below(&rng, 90)};
        compare(&shape, 100 + (uint64_t)i, some(2, 1), n_tokens);
    }
}

static void it_agrees_at_random_shapes(void **state)
{
    (void)state;
    struct fixture_rng rng = {6};
    for (int i = 0; i < some(6, 2); i++) {
        const struct backend_shape shape = delta_only(fixture_shape_random(&rng));
        const int n_tokens[] = {1 + fixture_below(&rng, 90), 1 + fixture_below(&rng, 140)};
        compare(&shape, 200 + (uint64_t)i, 2, n_tokens);
    }
}

/* No decay, total decay (e^-1000 is 0: no exponent may be formed with the wrong sign), beta 0 and 1. */
static void it_survives_extreme_gates(void **state)
{
    (void)state;
    const struct backend_shape shape = with_heads(2, 6, 16, 4);
    struct fixture_rng rng = {10};
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    struct fixture_data data = fixture_data_new(&rng, &shape, FO_DELTA_RULE, 1, (const int[]){140});
    for (int t = 0; t < 140; t++)
        for (int h = 0; h < shape.delta_v_heads; h++) {
            float *gates = data.in[0][1] + 2 * t * shape.delta_v_heads;
            gates[h] = fixture_below(&rng, 3) == 0 ? 0.5F : (float)fixture_below(&rng, 2);
            gates[shape.delta_v_heads + h] = t % 50 == 49 ? -1000 : 0;
        }
    struct fixture_run got = fixture_run_open(open_hip, &model, &data), want = fixture_run_open(backend_open_plain, &model, &data);
    fixture_feed(&got, 0, 140, 9);
    fixture_feed(&want, 0, 140, 9);
    double *expected = as_doubles(want.out[0][0], 140 * data.op.out[0]);
    fixture_assert_near("delta_rule", got.out[0][0], expected, 140, data.op.out[0], 1e-4); /* without decay, rounding stays for the whole sequence */
    free(expected);
    fixture_run_close(&got);
    fixture_run_close(&want);
    fixture_data_free(&data);
    fixture_model_free(&model);
}

/* Raw gates of any size: sigmoid and softplus reach their ends without a NaN, and small e^x are not lost in 1 + e^x. */
static void gates_of_any_size_agree(void **state)
{
    (void)state;
    enum { ROWS = 90 };
    const struct backend_shape shape = with_heads(1, 3, 16, 4);
    struct fixture_rng rng = {11};
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    struct fixture_data data = fixture_data_new(&rng, &shape, FO_DELTA_CONV, 1, (const int[]){ROWS});
    for (int i = 0; i < ROWS * shape.delta_v_heads; i++) {
        data.in[0][1][i] = (float)(i - 135);
        data.in[0][2][i] = (float)(i - 135) / 3 + (float)fixture_uniform(&rng);
    }
    struct fixture_run got = fixture_run_open(open_hip, &model, &data), want = fixture_run_open(backend_open_plain, &model, &data);
    fixture_feed(&got, 0, ROWS, ROWS);
    fixture_feed(&want, 0, ROWS, ROWS);
    double *expected = as_doubles(want.out[0][1], ROWS * data.op.out[1]);
    fixture_assert_near("gates", got.out[0][1], expected, ROWS * data.op.out[1], 1, NEAR);
    free(expected);
    fixture_run_close(&got);
    fixture_run_close(&want);
    fixture_data_free(&data);
    fixture_model_free(&model);
}

/* ---- rows are independent ---- */

static void check_cuts(const struct backend_shape *shape, uint64_t seed, const int *n_tokens, const int *chunks, int n_chunks)
{
    struct fixture_rng rng = {seed};
    struct fixture_model model = fixture_model_new(&rng, shape, BLOCK_F32, false);
    struct fixture_data data = fixture_data_new(&rng, shape, FO_DELTA, 2, n_tokens);
    struct fixture_run single = fixture_run_open(open_hip, &model, &data);
    for (int q = 0; q < 2; q++)
        fixture_feed(&single, q, n_tokens[q], 1);
    for (int c = 0; c <= n_chunks; c++) {
        struct fixture_run cut = fixture_run_open(open_hip, &model, &data);
        for (int q = 0; q < 2 && c < n_chunks; q++)
            fixture_feed(&cut, q, n_tokens[q], chunks[c]);
        if (c == n_chunks)
            fixture_feed_mixed(&cut, &rng, 80);
        fixture_assert_same_bits(&single, &cut);
        assert_same_states(&single, &cut);
        fixture_run_close(&cut);
    }
    fixture_run_close(&single);
    fixture_data_free(&data);
    fixture_model_free(&model);
}

static void a_rows_bits_depend_on_no_cut_and_no_neighbour(void **state)
{
    (void)state;
    static const int chunks[] = {200, 9, 3, 8, 64, 2, 7, 13, 67};
    const struct backend_shape shapes[] = {with_heads(1, 2, 128, 4), with_heads(2, 6, 16, 4), with_heads(1, 2, 144, 16)};
    for (int i = 0; i < 3; i++)
        check_cuts(&shapes[i], 16 + (uint64_t)i, (const int[]){200, 75}, chunks,
                   some(9, 2)); /* three folds in one step: the second finds M0 not zero */
}

/* Two steps, cut at every place of the first two cells, or at some. */
static void a_cut_anywhere_changes_no_bit(void **state)
{
    (void)state;
    enum { ROWS = 140 };
    const struct backend_shape shape = with_heads(1, 2, 32, 4);
    struct fixture_rng rng = {17};
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    struct fixture_data data = fixture_data_new(&rng, &shape, FO_DELTA, 1, (const int[]){ROWS});
    struct fixture_run whole = fixture_run_open(open_hip, &model, &data);
    fixture_feed(&whole, 0, ROWS, ROWS);
    for (int at = 1; at < ROWS; at += few ? 11 : 1) {
        struct fixture_run cut = fixture_run_open(open_hip, &model, &data);
        fixture_feed(&cut, 0, at, at);
        fixture_feed(&cut, 0, ROWS, ROWS);
        fixture_assert_same_bits(&whole, &cut);
        assert_same_states(&whole, &cut);
        fixture_run_close(&cut);
    }
    fixture_run_close(&whole);
    fixture_data_free(&data);
    fixture_model_free(&model);
}

/* ---- states ---- */

static void rows_taken_back_inside_a_grid_cell_leave_no_trace(void **state)
{
    (void)state;
    enum { ROWS = 140 };
    const struct backend_shape shape = with_heads(2, 4, 32, 4);
    struct fixture_rng rng = {18};
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    struct fixture_data data = fixture_data_new(&rng, &shape, FO_DELTA, 1, (const int[]){ROWS});
    struct fixture_data drafts = fixture_data_new(&rng, &shape, FO_DELTA, 1, (const int[]){ROWS});
    struct fixture_run straight = fixture_run_open(open_hip, &model, &data), back = fixture_run_open(open_hip, &model, &data);
    fixture_feed(&straight, 0, ROWS, ROWS);
    while (back.length[0] < ROWS) {
        const int keep = back.length[0], room = GRID - 1 - keep % GRID; /* rows before the one that folds the cell */
        const int draft = keep + ROLLBACK <= ROWS ? (room < ROLLBACK ? room : ROLLBACK) : 0;
        back.data = &drafts;
        if (draft > 0)
            fixture_feed(&back, 0, keep + draft, keep % 2 ? draft : 1);
        back.length[0] = keep;
        back.data = &data;
        fixture_feed(&back, 0, keep + 1 + (keep % 5 == 0 && keep < ROWS - 1), 2);
    }
    fixture_assert_same_bits(&straight, &back);
    assert_same_states(&straight, &back);
    fixture_run_close(&straight);
    fixture_run_close(&back);
    fixture_data_free(&data);
    fixture_data_free(&drafts);
    fixture_model_free(&model);
}

static void a_state_saved_and_loaded_elsewhere_goes_on_with_the_same_bits(void **state)
{
    (void)state;
    enum { ROWS = 160 };
    static const int stops[] = {70, 63, 64, 2, 130};
    const struct backend_shape shape = with_heads(2, 4, 32, 4);
    struct fixture_rng rng = {19};
    struct error err = {0};
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    struct fixture_data data = fixture_data_new(&rng, &shape, FO_DELTA, 1, (const int[]){ROWS});
    struct fixture_run straight = fixture_run_open(open_hip, &model, &data);
    fixture_feed(&straight, 0, ROWS, ROWS);
    for (int i = 0; i < some(5, 2); i++) {
        struct fixture_run run = fixture_run_open(open_hip, &model, &data);
        const struct backend_ops *ops = run.b->ops;
        void *image = malloc(ops->state_packed_bytes(run.b, stops[i]));
        assert_non_null(image);
        fixture_feed(&run, 0, stops[i], 5);
        assert_ok(ops->state_save(run.b, run.state[0], stops[i], image, &err), err);
        fixture_feed(&run, 0, ROWS, 50); /* the slot goes on and is then overwritten */
        assert_ok(ops->state_load(run.b, run.state[0], stops[i], image, &err), err);
        ops->state_copy(run.b, 0, run.state[0]);
        run.state[0] = 0;
        run.length[0] = stops[i];
        fixture_feed(&run, 0, ROWS, 11);
        fixture_assert_same_bits(&straight, &run);
        free(image);
        fixture_run_close(&run);
    }
    fixture_run_close(&straight);
    fixture_data_free(&data);
    fixture_model_free(&model);
}

/* Rows before position 0 count as zero, whatever an earlier sequence has left in the slot. */
static void a_slot_that_was_used_before_begins_anew(void **state)
{
    (void)state;
    enum { ROWS = 20 };
    const struct backend_shape shape = with_heads(1, 2, 32, 5);
    struct fixture_rng rng = {20};
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    struct fixture_data data = fixture_data_new(&rng, &shape, FO_DELTA, 1, (const int[]){ROWS}),
                        other = fixture_data_new(&rng, &shape, FO_DELTA, 1, (const int[]){ROWS});
    struct fixture_run fresh = fixture_run_open(open_hip, &model, &data), used = fixture_run_open(open_hip, &model, &data);
    fixture_feed(&fresh, 0, ROWS, ROWS);
    used.data = &other;
    fixture_feed(&used, 0, ROWS, ROWS);
    used.b->ops->state_reset(used.b, used.state[0]);
    used.length[0] = 0;
    used.data = &data;
    fixture_feed(&used, 0, ROWS, 2);
    fixture_assert_same_bits(&fresh, &used);
    assert_same_states(&fresh, &used);
    fixture_run_close(&fresh);
    fixture_run_close(&used);
    fixture_data_free(&data);
    fixture_data_free(&other);
    fixture_model_free(&model);
}

/* ---- errors ---- */

static void what_the_kernels_cannot_do_is_refused_by_name(void **state)
{
    (void)state;
    struct error err = {0};
    struct backend_shape shape = with_heads(1, 1, 40, 4);
    assert_null(open_hip(&shape, &err));
    assert_contains(err.text, "have 40");
    shape = with_heads(1, 1, 272, 4);
    assert_null(open_hip(&shape, &err));
    assert_contains(err.text, "have 272");

    shape = with_heads(1, 2, 32, 4);
    struct fixture_rng rng = {25};
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    fixture_matrix_free(&model.m[FM_DELTA_NORM]);
    model.m[FM_DELTA_NORM] = fixture_matrix_new(&rng, "ssm_norm", BLOCK_Q8_0, 32, 1, 1, 1);
    struct fixture_data data = fixture_data_new(&rng, &shape, FO_DELTA, 1, (const int[]){4});
    struct fixture_run run = fixture_run_open(open_hip, &model, &data);
    const struct backend_ops *ops = run.b->ops;
    const struct span span = {.row = 0, .n = 4, .pos = 0, .pages = run.pages[0], .state = run.state[0]};
    struct buffer *large = ops->buffer_new(run.b, 1 << 16, &err), *tiny = ops->buffer_new(run.b, 12, &err);
    struct weight *const *w = run.w;
    ops->begin(run.b, data.ids[0], 4, &span, 1);
    ops->delta_rule(run.b, 1, large, large, large, w[FM_DELTA_NORM], large);
    assert_int_equal(ops->sync(run.b, &err), -1);
    assert_contains(err.text, "ssm_norm is of type Q8_0");
    for (int layer = -1; layer < 3; layer += 3) {
        ops->begin(run.b, data.ids[0], 4, &span, 1);
        ops->delta_conv(run.b, layer, large, large, large, w[FM_CONV], w[FM_DT_BIAS], w[FM_A], large, large);
        assert_int_equal(ops->sync(run.b, &err), -1);
        assert_contains(err.text, layer < 0 ? "layer -1" : "layer 2");
    }
    ops->begin(run.b, data.ids[0], 4, &span, 1);
    ops->delta_conv(run.b, 0, tiny, large, large, w[FM_CONV], w[FM_DT_BIAS], w[FM_A], large, large);
    assert_int_equal(ops->sync(run.b, &err), -1);
    assert_contains(err.text, "delta_conv: u");
    fixture_run_close(&run);
    fixture_data_free(&data);
    fixture_model_free(&model);
}

/* ---- groups ---- */

static int open_library(const char *kind)
{
    struct error err = {0};
    const char *choice = getenv("BEDSIDE_HIP_TESTS");
    few = !choice || strcmp(choice, "all") != 0;
    int status = hip_device_open(&dev, hip_test_library(kind), 0, &err);
    if (status != 0)
        fprintf(stderr, "%s: %s\n", kind, err.text);
    return status;
}

static int open_shim(void **state)
{
    (void)state;
    return open_library("shim");
}

static int open_emulator(const char *arch)
{
    setenv("EMU_ARCH", arch, 1);
    return open_library("emu");
}

static int open_gfx1152(void **state)
{
    (void)state;
    return open_emulator("gfx1152");
}

static int open_gfx1100(void **state)
{
    (void)state;
    return open_emulator("gfx1100");
}

static int open_gfx1201(void **state)
{
    (void)state;
    return open_emulator("gfx1201");
}

static int close_device(void **state)
{
    (void)state;
    hip_device_close(dev);
    dev = NULL;
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_agrees_with_the_plain_backend),
        cmocka_unit_test(it_agrees_with_all_heads_of_the_35b),
        cmocka_unit_test(it_agrees_at_every_head_size_and_filter_width),
        cmocka_unit_test(it_agrees_at_random_shapes),
        cmocka_unit_test(it_survives_extreme_gates),
        cmocka_unit_test(gates_of_any_size_agree),
        cmocka_unit_test(a_rows_bits_depend_on_no_cut_and_no_neighbour),
        cmocka_unit_test(a_cut_anywhere_changes_no_bit),
        cmocka_unit_test(rows_taken_back_inside_a_grid_cell_leave_no_trace),
        cmocka_unit_test(a_state_saved_and_loaded_elsewhere_goes_on_with_the_same_bits),
        cmocka_unit_test(a_slot_that_was_used_before_begins_anew),
        cmocka_unit_test(what_the_kernels_cannot_do_is_refused_by_name),
    };
    int failed = cmocka_run_group_tests_name("hip_delta on the shim", tests, open_shim, close_device);
    if (access(hip_test_library("emu"), R_OK) == 0) {
        failed += cmocka_run_group_tests_name("hip_delta on gfx1152", tests, open_gfx1152, close_device);
        failed += cmocka_run_group_tests_name("hip_delta on gfx1100", tests, open_gfx1100, close_device);
        failed += cmocka_run_group_tests_name("hip_delta on gfx1201", tests, open_gfx1201, close_device);
    }
    return failed;
}
