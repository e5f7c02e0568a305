/* Promise: the GPU's gated DeltaNet is the plain backend's within the rounding of f32 sums, and a row's bits depend on nothing but its own sequence:
 * not on how its tokens were cut into steps, what shared them, rows taken back, or a snapshot in between.
 *
 * Runs the kernels on the CPU (the shim) and, where it is built, as machine code of three GPU generations (the emulator). */
#include "tests/hip/hip_groups.h"
#include "tests/unit/backend_checks.h"

/* Of a list of n cases that begins with what matters most: how many are run, all of them only with BEDSIDE_HIP_TESTS=all. */
static int some(int n, int when_few)
{
    return !hip_in_full() && when_few < n ? when_few : n;
}

static struct fixture_run open_run(const struct fixture_model *model, const struct fixture_data *data)
{
    return fixture_run_open(open_hip, model, data);
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
        struct fixture_run want = fixture_run_open(backend_open_plain, &model, &data), got = open_run(&model, &data);
        fixture_feed_all(&want, 100);
        fixture_feed_mixed(&got, &rng, 80);
        for (int q = 0; q < n_seqs; q++) {
            for (int i = 0; i < data.op.n_out; i++) {
                const size_t n = (size_t)n_tokens[q], width = data.op.out[i];
                char what[64];
                snprintf(what, sizeof what, "operation %d, output %d, seed %d", (int)kinds[k], i, (int)seed);
                fixture_assert_near_floats(what, got.out[q][i], want.out[q][i], n, width, NEAR);
            }
        }
        if (kinds[k] != FO_DELTA_CONV)
            fixture_assert_states_near(&got, &want, NEAR);
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

static void it_survives_extreme_gates(void **state)
{
    (void)state;
    const struct backend_shape shape = with_heads(2, 6, 16, 4);
    struct fixture_rng rng = {10};
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    check_extreme_gates(open_run, &model, &rng);
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
    struct fixture_run got = open_run(&model, &data), want = fixture_run_open(backend_open_plain, &model, &data);
    fixture_feed(&got, 0, ROWS, ROWS);
    fixture_feed(&want, 0, ROWS, ROWS);
    fixture_assert_near_floats("gates", got.out[0][1], want.out[0][1], ROWS * data.op.out[1], 1, NEAR);
    fixture_run_close(&got);
    fixture_run_close(&want);
    fixture_data_free(&data);
    fixture_model_free(&model);
}

/* ---- rows are independent ---- */

static void a_rows_bits_depend_on_no_cut_and_no_neighbour(void **state)
{
    (void)state;
    static const int chunks[] = {1, 200, 9, 3, 8, 64, 2, 7, 13, 67}; /* 200: three folds in one step, the second finds M0 not zero */
    const struct backend_shape shapes[] = {with_heads(1, 2, 128, 4), with_heads(2, 6, 16, 4), with_heads(1, 2, 144, 16)};
    for (int i = 0; i < 3; i++) {
        struct fixture_rng rng = {16 + (uint64_t)i};
        struct fixture_model model = fixture_model_new(&rng, &shapes[i], BLOCK_F32, false);
        check_cuts(open_run, &model, &rng, FO_DELTA, 2, (const int[]){200, 75}, chunks, some(10, 3), fixture_assert_same_states);
        fixture_model_free(&model);
    }
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
    struct fixture_run whole = open_run(&model, &data);
    fixture_feed(&whole, 0, ROWS, ROWS);
    for (int at = 1; at < ROWS; at += hip_in_full() ? 1 : 11) {
        struct fixture_run cut = open_run(&model, &data);
        fixture_feed(&cut, 0, at, at);
        fixture_feed(&cut, 0, ROWS, ROWS);
        fixture_assert_same_bits(&whole, &cut);
        fixture_assert_same_states(&whole, &cut);
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
    const struct backend_shape shape = with_heads(2, 4, 32, 4);
    struct fixture_rng rng = {18};
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    check_rollback(open_run, &model, &rng, FO_DELTA, 140, fixture_assert_same_states);
    fixture_model_free(&model);
}

static void a_state_saved_and_loaded_elsewhere_goes_on_with_the_same_bits(void **state)
{
    (void)state;
    static const int stops[] = {70, 63, 64, 2, 130};
    const struct backend_shape shape = with_heads(2, 4, 32, 4);
    struct fixture_rng rng = {19};
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    check_state_moves(open_run, &model, &rng, 160, stops, some(5, 2));
    fixture_model_free(&model);
}

/* Rows before position 0 count as zero, whatever an earlier sequence has left in the slot. */
static void a_slot_that_was_used_before_begins_anew(void **state)
{
    (void)state;
    const struct backend_shape shape = with_heads(1, 2, 32, 5);
    struct fixture_rng rng = {20};
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    check_reset_slot(open_run, &model, &rng, 20, 2);
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
    struct fixture_run run = open_run(&model, &data);
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
    return HIP_RUN("hip_delta", tests, HIP_GPUS);
}
