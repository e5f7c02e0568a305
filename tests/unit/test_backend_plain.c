/* Every operation of the plain backend against the specification's formulas (backend_reference.h), and the two promises of engine/backend.h:
 * rows are independent; states can be taken back, copied, saved and loaded. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>

#include "tests/unit/backend_checks.h"
#include "tests/unit/backend_reference.h"

static struct fixture_run open_run(const struct fixture_model *model, const struct fixture_data *data)
{
    return fixture_run_open(backend_open_plain, model, data);
}

/* Compares everything a finished run gave with the reference. */
static void check_run(const struct fixture_run *run, const struct fixture_model *model, double tolerance)
{
    const struct fixture_op *op = &run->data->op;
    for (int q = 0; q < run->data->n_seqs; q++) {
        const size_t n = (size_t)run->length[q];
        double *want[FIXTURE_BUFFERS];
        char what[64];
        ref_operation(model, run->data, q, (int)n, want);
        for (int i = 0; i < op->n_out; i++) {
            snprintf(what, sizeof what, "operation %d, sequence %d, output %d", (int)op->kind, q, i);
            if (op->kind == FO_MOE && i == 1) {
                int32_t chosen;
                for (size_t j = 0; j < n * op->out[1]; j++) {
                    memcpy(&chosen, run->out[q][1] + j, sizeof chosen);
                    assert_int_equal(chosen, (int)want[1][j]);
                }
            } else {
                fixture_assert_near(what, run->out[q][i], want[i], n, op->out[i], tolerance);
            }
        }
        for (int i = 0; i < FIXTURE_BUFFERS; i++)
            free(want[i]);
    }
}

/* Runs an operation over sequences in mixed random steps and compares with the reference. */
static void check_op(const struct fixture_model *model, enum fixture_op_kind kind, uint64_t seed, int n_seqs, const int *n_tokens, double tolerance)
{
    struct fixture_rng rng = {seed};
    struct fixture_data data = fixture_data_new(&rng, &model->shape, kind, n_seqs, n_tokens);
    struct fixture_run run = fixture_run_open(backend_open_plain, model, &data);
    fixture_feed_mixed(&run, &rng, 40);
    check_run(&run, model, tolerance);
    fixture_run_close(&run);
    fixture_data_free(&data);
}

/* f32 storage of results; DeltaNet and attention also store their memory in f32 (or f16, which the reference rounds alike). */
static const double TIGHT = 5e-7, STATEFUL = 2e-5;

static double tolerance_of(enum fixture_op_kind kind)
{
    return kind == FO_ATTN || kind == FO_DELTA || kind == FO_DELTA_RULE ? STATEFUL : TIGHT;
}

/* ---- every operation ---- */

static void every_operation_is_what_the_specification_says(void **state)
{
    (void)state;
    const struct backend_shape shapes[] = {fixture_shape_small(), fixture_shape_wide()};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        struct fixture_rng rng = {11 + i};
        struct fixture_model model = fixture_model_new(&rng, &shapes[i], BLOCK_F32, i == 0);
        for (int kind = 0; kind < FO_COUNT; kind++) {
            const bool rowwise = kind != FO_ATTN && kind != FO_DELTA && kind != FO_DELTA_RULE && kind != FO_DELTA_CONV;
            const int n_tokens[] = {rowwise ? 5 : 150, rowwise ? 9 : 65, 1};
            check_op(&model, (enum fixture_op_kind)kind, 21 + (uint64_t)kind, 3, n_tokens, tolerance_of((enum fixture_op_kind)kind));
        }
        fixture_model_free(&model);
    }
}

static void every_operation_holds_at_random_shapes(void **state)
{
    (void)state;
    struct fixture_rng rng = {5};
    for (int i = 0; i < 4; i++) {
        struct backend_shape shape = fixture_shape_random(&rng);
        struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, fixture_below(&rng, 2));
        for (int kind = 0; kind < FO_COUNT; kind++)
            check_op(&model, (enum fixture_op_kind)kind, fixture_next(&rng), 2, (const int[]){7, 70}, tolerance_of((enum fixture_op_kind)kind));
        fixture_model_free(&model);
    }
}

static void matrices_of_every_block_type_give_their_dequantised_products(void **state)
{
    (void)state;
    static const enum block_type types[] = {BLOCK_F16,  BLOCK_BF16, BLOCK_Q4_0, BLOCK_Q4_1, BLOCK_Q5_0,   BLOCK_Q5_1,   BLOCK_Q8_0, BLOCK_Q2_K,
                                            BLOCK_Q3_K, BLOCK_Q4_K, BLOCK_Q5_K, BLOCK_Q6_K, BLOCK_IQ4_NL, BLOCK_IQ4_XS, BLOCK_MXFP4};
    const enum fixture_op_kind kinds[] = {FO_EMBED, FO_PROJECT, FO_PROJECT_ADD, FO_MOE, FO_HEAD};
    struct backend_shape shape = fixture_shape_wide();
    shape.shared_ff = 256;
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        struct fixture_rng rng = {types[i]};
        struct fixture_model model = fixture_model_new(&rng, &shape, types[i], i % 2);
        for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++)
            check_op(&model, kinds[k], 3, 1, (const int[]){3}, TIGHT);
        fixture_model_free(&model);
    }
}

static void delta_rule_follows_the_textbook_recurrence_with_the_heads_of_the_35b(void **state)
{
    (void)state;
    struct backend_shape shape = fixture_shape_35b_heads();
    struct fixture_rng rng = {8};
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    check_op(&model, FO_DELTA_RULE, 1, 1, (const int[]){200}, STATEFUL);
    check_op(&model, FO_ATTN, 2, 1, (const int[]){80}, STATEFUL);
    fixture_model_free(&model);
}

/* 600 tokens with slow decay: M has been folded nine times and still agrees with the recurrence. */
static void delta_state_does_not_drift_over_many_grid_cells(void **state)
{
    (void)state;
    struct backend_shape shape = fixture_shape_small();
    struct fixture_rng rng = {9};
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    struct fixture_data data = fixture_data_new(&rng, &shape, FO_DELTA_RULE, 1, (const int[]){600});
    for (int t = 0; t < 600; t++)
        for (int h = 0; h < shape.delta_v_heads; h++)
            data.in[0][1][(2 * t + 1) * shape.delta_v_heads + h] *= 0.02F;
    struct fixture_run run = fixture_run_open(backend_open_plain, &model, &data);
    fixture_feed_mixed(&run, &rng, 100);
    check_run(&run, &model, STATEFUL);
    fixture_run_close(&run);
    fixture_data_free(&data);
    fixture_model_free(&model);
}

/* Gates at their ends: no decay at all, total decay (e^-1000 is 0: exponents must never be formed with the wrong sign), beta 0 and 1. */
static void delta_rule_survives_extreme_gates(void **state)
{
    (void)state;
    struct backend_shape shape = fixture_shape_small();
    struct fixture_rng rng = {10};
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    struct fixture_data data = fixture_data_new(&rng, &shape, FO_DELTA_RULE, 1, (const int[]){140});
    for (int t = 0; t < 140; t++)
        for (int h = 0; h < shape.delta_v_heads; h++) {
            float *gates = data.in[0][1] + 2 * t * shape.delta_v_heads;
            gates[h] = (float)fixture_below(&rng, 2);
            if (fixture_below(&rng, 3) == 0)
                gates[h] = 0.5F;
            gates[shape.delta_v_heads + h] = t % 50 == 49 ? -1000 : 0;
        }
    struct fixture_run run = fixture_run_open(backend_open_plain, &model, &data);
    fixture_feed(&run, 0, 140, 9);
    for (size_t i = 0; i < 140 * data.op.out[0]; i++)
        assert_true(isfinite(run.out[0][0][i]));
    fixture_run_close(&run);
    fixture_data_free(&data);
    fixture_model_free(&model);
}

/* Gates far outside the range of exp, and a head whose channels are all zero: softplus(x) is x, the L2 norm divides by its floor. */
static void delta_conv_survives_extreme_gates_and_an_empty_head(void **state)
{
    (void)state;
    static const float extremes[] = {-2000, -30, 19.5F, 21.5F, 30, 2000};
    struct backend_shape shape = fixture_shape_small();
    struct fixture_rng rng = {26};
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    struct fixture_data data = fixture_data_new(&rng, &shape, FO_DELTA_CONV, 1, (const int[]){20});
    for (int t = 0; t < 20; t++) {
        for (int h = 0; h < shape.delta_v_heads; h++) {
            data.in[0][1][t * shape.delta_v_heads + h] = extremes[fixture_below(&rng, 6)];
            data.in[0][2][t * shape.delta_v_heads + h] = extremes[fixture_below(&rng, 6)];
        }
        for (int i = 0; i < 2 * shape.delta_dim; i++) /* both q heads */
            data.in[0][0][t * fixture_channels(&shape) + i] = 0;
    }
    struct fixture_run run = fixture_run_open(backend_open_plain, &model, &data);
    fixture_feed(&run, 0, 20, 6);
    check_run(&run, &model, TIGHT);
    fixture_run_close(&run);
    fixture_data_free(&data);
    fixture_model_free(&model);
}

/* ---- attention in detail ---- */

/* One head of four channels, two of them rotated, norm weights 1: every number is worked out by hand. */
static void rope_turns_pairs_half_the_rotated_width_apart_and_leaves_the_rest(void **state)
{
    (void)state;
    struct backend_shape shape = {.n_embd = 4,
                                  .n_vocab = 4,
                                  .norm_eps = 1e-6F,
                                  .n_heads = 1,
                                  .n_kv_heads = 1,
                                  .head_dim = 8,
                                  .n_rot = 4,
                                  .rope_theta = 100,
                                  .attn_scale = 1,
                                  .n_kv_layers = 1,
                                  .max_rows = 8,
                                  .max_logit_rows = 1};
    struct error err = {0};
    struct backend *b = backend_open_plain(&shape, &err);
    assert_non_null(b);
    float ones[8];
    for (int i = 0; i < 8; i++)
        ones[i] = 1;
    /* mean square 1, so that the norm changes nothing */
    const float x[8] = {1, 1, -1, 1, -1, 1, 1, -1};
    const struct weight_desc desc = {
        .name = "ones", .type = BLOCK_F32, .n_in = 8, .n_out = 1, .n_mats = 1, .data = (const uint8_t *)ones, .stride = 32};
    struct weight *norm = b->ops->weight_new(b, &desc, &err);
    struct buffer *q = b->ops->buffer_new(b, sizeof x, &err), *k = b->ops->buffer_new(b, sizeof x, &err), *v = b->ops->buffer_new(b, sizeof x, &err);
    const int32_t pages[] = {0}, ids[] = {0};
    const int pos = 3;
    float got[8];
    assert_int_equal(b->ops->pages_reserve(b, 1, &err), 0);
    assert_int_equal(b->ops->write(b, q, 0, x, sizeof x, &err), 0);
    b->ops->begin(b, ids, 1, &(struct span){.row = 0, .n = 1, .pos = pos, .pages = pages, .state = -1}, 1);
    b->ops->attn_store(b, 0, q, k, v, norm, norm);
    assert_int_equal(b->ops->sync(b, &err), 0);
    assert_int_equal(b->ops->read(b, q, 0, got, sizeof got, &err), 0);
    /* pair 0: channels 0 and 2, angle 3; pair 1: channels 1 and 3, angle 3 * 100^(-2/4) = 0.3 */
    const double want[8] = {cos(3.0) + sin(3.0), cos(0.3) - sin(0.3), sin(3.0) - cos(3.0), sin(0.3) + cos(0.3), -1, 1, 1, -1};
    fixture_assert_near("rope", got, want, 1, 8, 2e-6);
    b->ops->close(b);
}

/* A large score must not overflow: softmax subtracts the maximum. */
static void attention_survives_scores_far_beyond_the_range_of_exp(void **state)
{
    (void)state;
    struct backend_shape shape = fixture_shape_small();
    struct fixture_rng rng = {12};
    shape.attn_scale = 5000;
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    struct fixture_data data = fixture_data_new(&rng, &shape, FO_ATTN, 1, (const int[]){20});
    struct fixture_run run = fixture_run_open(backend_open_plain, &model, &data);
    fixture_feed(&run, 0, 20, 20);
    for (size_t i = 0; i < 20 * data.op.out[1]; i++)
        assert_true(isfinite(run.out[0][1][i]));
    fixture_run_close(&run);
    fixture_data_free(&data);
    fixture_model_free(&model);
}

/* Attention over rounded keys and values is the specification's formula on the rounded numbers, at every usual head size. */
static void attention_over_every_kv_type_is_the_formula_on_rounded_numbers(void **state)
{
    (void)state;
    static const enum kv_type types[] = {KV_F32, KV_F16, KV_Q8_0};
    static const int head_dims[] = {32, 64, 128, 256};
    for (size_t k = 0; k < 3; k++)
        for (size_t d = 0; d < 4; d++) {
            struct backend_shape shape = fixture_shape_small();
            struct fixture_rng rng = {40 + d};
            shape.kv_type = types[k];
            shape.head_dim = head_dims[d];
            shape.attn_scale = (float)(1.0 / sqrt((double)shape.head_dim));
            struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
            check_op(&model, FO_ATTN, 50 + d, 2, (const int[]){90, 7}, STATEFUL);
            fixture_model_free(&model);
        }
}

/* A number's rounding error is half a unit of 2^-11 of itself (f16), or half a step of 1/127 of the largest of its 32 (q8_0): 1/508 of it on average. */
static void narrow_keys_take_less_memory_and_stay_close(void **state)
{
    (void)state;
    static const struct {
        enum kv_type type;
        size_t of_f32[2]; /* memory: so many of so many */
        double tolerance;
    } cases[] = {{KV_F16, {1, 2}, 5e-3}, {KV_Q8_0, {17, 64}, 2e-2}};
    struct backend_shape shape = fixture_shape_small();
    struct fixture_rng rng = {13};
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    struct fixture_data data = fixture_data_new(&rng, &shape, FO_ATTN, 1, (const int[]){70});
    struct fixture_run full = fixture_run_open(backend_open_plain, &model, &data);
    double *want = ref_doubles(70 * data.op.out[1]);
    fixture_feed(&full, 0, 70, 70);
    for (size_t i = 0; i < 70 * data.op.out[1]; i++)
        want[i] = (double)full.out[0][1][i];
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        model.shape.kv_type = cases[k].type;
        struct fixture_run narrow = fixture_run_open(backend_open_plain, &model, &data);
        const size_t bytes = full.b->ops->page_bytes(full.b);
        assert_int_equal(narrow.b->ops->page_bytes(narrow.b), bytes / cases[k].of_f32[1] * cases[k].of_f32[0]);
        fixture_feed(&narrow, 0, 70, 70);
        fixture_assert_near("narrow KV", narrow.out[0][1], want, 70, data.op.out[1], cases[k].tolerance);
        assert_memory_not_equal(narrow.out[0][1], full.out[0][1], 70 * data.op.out[1] * sizeof(float));
        fixture_run_close(&narrow);
    }
    free(want);
    fixture_run_close(&full);
    fixture_data_free(&data);
    fixture_model_free(&model);
}

/* ---- MoE, head ---- */

static void a_tie_between_experts_goes_to_the_lower_index(void **state)
{
    (void)state;
    struct backend_shape shape = fixture_shape_small();
    struct fixture_rng rng = {14};
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, true);
    /* Experts 1, 4 and 6 get the same router row, and so do 0, 2, 3: whichever group wins, the cut at 3 of 8 goes through ties. */
    uint8_t *router = model.m[FM_ROUTER].bytes;
    const size_t row = (size_t)shape.n_embd * sizeof(float);
    memcpy(router + 4 * row, router + 1 * row, row);
    memcpy(router + 6 * row, router + 1 * row, row);
    memcpy(router + 2 * row, router, row);
    memcpy(router + 3 * row, router, row);
    memcpy(router + 5 * row, router, row);
    fixture_matrix_refresh(&model.m[FM_ROUTER]);
    check_op(&model, FO_MOE, 1, 1, (const int[]){24}, TIGHT);
    fixture_model_free(&model);
}

static void chosen_may_be_left_out_and_rows_of_the_head_may_be_picked(void **state)
{
    (void)state;
    struct backend_shape shape = fixture_shape_small();
    struct fixture_rng rng = {15};
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, true);
    struct fixture_data data = fixture_data_new(&rng, &shape, FO_HEAD, 1, (const int[]){9});
    struct fixture_run run = fixture_run_open(backend_open_plain, &model, &data);
    struct backend *b = run.b;
    const struct backend_ops *ops = b->ops;
    struct error err = {0};
    const size_t d = (size_t)shape.n_embd, vocab = (size_t)shape.n_vocab;
    fixture_feed(&run, 0, 9, 9);

    struct buffer *h = ops->buffer_new(b, 9 * d * sizeof(float), &err), *logits = fixture_poisoned(b, 2, vocab);
    float *got = malloc(2 * vocab * sizeof *got);
    assert_non_null(got);
    assert_int_equal(ops->write(b, h, 0, data.in[0][0], 9 * d * sizeof(float), &err), 0);
    ops->begin(b, data.ids[0], 9, &(struct span){.row = 0, .n = 9, .pos = 0, .pages = run.pages[0], .state = run.state[0]}, 1);
    ops->head(b, h, run.w[FM_NORM], run.w[FM_HEAD], (const int32_t[]){8, 2}, 2, NULL, logits);
    assert_int_equal(ops->sync(b, &err), 0);
    assert_int_equal(ops->read(b, logits, 0, got, 2 * vocab * sizeof *got, &err), 0);
    assert_memory_equal(got, run.out[0][1] + 8 * vocab, vocab * sizeof *got);
    assert_memory_equal(got + vocab, run.out[0][1] + 2 * vocab, vocab * sizeof *got);

    const struct moe_weights moe = {run.w[FM_ROUTER],    run.w[FM_EXP_GATE], run.w[FM_EXP_UP], run.w[FM_EXP_DOWN],
                                    run.w[FM_SH_ROUTER], run.w[FM_SH_GATE],  run.w[FM_SH_UP],  run.w[FM_SH_DOWN]};
    double *want = ref_doubles(9 * d);
    float *rows = malloc(9 * d * sizeof *rows);
    int chosen[8];
    assert_non_null(rows);
    ops->moe(b, h, run.w[FM_NORM], &moe, NULL);
    assert_int_equal(ops->sync(b, &err), 0);
    assert_int_equal(ops->read(b, h, 0, rows, 9 * d * sizeof *rows, &err), 0);
    for (size_t r = 0; r < 9; r++)
        ref_moe(&model, data.in[0][0] + r * d, want + r * d, chosen);
    fixture_assert_near("moe", rows, want, 9, d, TIGHT);
    free(want);
    free(rows);
    free(got);
    fixture_run_close(&run);
    fixture_data_free(&data);
    fixture_model_free(&model);
}

/* ---- rows are independent ---- */

static void assert_same_states(const struct fixture_run *a, const struct fixture_run *b)
{
    if (a->data->op.kind == FO_DELTA)
        fixture_assert_same_states(a, b);
}

static void cutting_a_sequence_anywhere_changes_no_bit(void **state)
{
    (void)state;
    static const int n_tokens[] = {150, 97, 64}, chunks[] = {256, 1, 7, 64};
    struct backend_shape shapes[] = {fixture_shape_small(), fixture_shape_wide(), fixture_shape_small()};
    shapes[2].kv_type = KV_Q8_0; /* f32 and f16 are the other two's */
    for (size_t i = 0; i < 3; i++) {
        struct fixture_rng rng = {16 + i};
        struct fixture_model model = fixture_model_new(&rng, &shapes[i], i == 1 ? BLOCK_Q4_K : BLOCK_Q8_0, i != 1);
        for (int kind = 0; kind < FO_COUNT; kind++) {
            if (i == 2 && kind != FO_ATTN)
                continue;
            check_cuts(open_run, &model, &rng, (enum fixture_op_kind)kind, 3, n_tokens, chunks, 4, assert_same_states);
        }
        fixture_model_free(&model);
    }
}

/* ---- states ---- */

/* The packed image of a slot, released with free(). */
static void *save_state(const struct fixture_run *run, int32_t slot, int pos)
{
    struct error err = {0};
    void *image = malloc(run->b->ops->state_packed_bytes(run->b, pos) + 1);
    assert_non_null(image);
    assert_int_equal(run->b->ops->state_save(run->b, slot, pos, image, &err), 0);
    return image;
}

static void rows_taken_back_inside_a_grid_cell_leave_no_trace(void **state)
{
    (void)state;
    struct backend_shape shape = fixture_shape_small();
    struct fixture_rng rng = {18};
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    check_rollback(open_run, &model, &rng, FO_DELTA, 160, assert_same_states);
    check_rollback(open_run, &model, &rng, FO_ATTN, 160, assert_same_states);
    fixture_model_free(&model);
}

static void a_saved_state_loaded_elsewhere_goes_on_with_the_same_bits(void **state)
{
    (void)state;
    static const int stops[] = {0, 1, 2, 3, 63, 64, 65, 127, 128, 130};
    struct backend_shape shape = fixture_shape_small();
    struct fixture_rng rng = {19};
    struct error err = {0};
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    struct fixture_data data = fixture_data_new(&rng, &shape, FO_DELTA, 1, (const int[]){200});
    struct fixture_run straight = fixture_run_open(backend_open_plain, &model, &data);
    fixture_feed(&straight, 0, 200, 200);
    for (size_t i = 0; i < sizeof stops / sizeof stops[0]; i++) {
        struct fixture_run first = fixture_run_open(backend_open_plain, &model, &data);
        struct fixture_run second = fixture_run_open(backend_open_plain, &model, &data);
        fixture_feed(&first, 0, stops[i], 5);
        void *image = save_state(&first, first.state[0], stops[i]);
        fixture_run_close(&first);
        fixture_feed(&second, 0, 77, 77); /* the slot has been used: old rows must not shine through */
        second.b->ops->state_reset(second.b, second.state[0]);
        assert_int_equal(second.b->ops->state_load(second.b, second.state[0], stops[i], image, &err), 0);
        void *again = save_state(&second, second.state[0], stops[i]);
        assert_memory_equal(image, again, second.b->ops->state_packed_bytes(second.b, stops[i]));
        memcpy(second.out[0][0], straight.out[0][0], (size_t)stops[i] * data.op.out[0] * sizeof(float));
        memcpy(second.out[0][1], straight.out[0][1], (size_t)stops[i] * data.op.out[1] * sizeof(float));
        memcpy(second.out[0][2], straight.out[0][2], (size_t)stops[i] * data.op.out[2] * sizeof(float));
        second.length[0] = stops[i];
        fixture_feed(&second, 0, 200, 11);
        fixture_assert_same_bits(&straight, &second);
        free(image);
        free(again);
        fixture_run_close(&second);
    }
    fixture_run_close(&straight);
    fixture_data_free(&data);
    fixture_model_free(&model);
}

static void a_copied_state_goes_on_by_itself(void **state)
{
    (void)state;
    struct backend_shape shape = fixture_shape_small();
    struct fixture_rng rng = {20};
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    struct fixture_data data = fixture_data_new(&rng, &shape, FO_DELTA, 1, (const int[]){120});
    struct fixture_run straight = fixture_run_open(backend_open_plain, &model, &data), copied = fixture_run_open(backend_open_plain, &model, &data);
    fixture_feed(&straight, 0, 120, 120);
    fixture_feed(&copied, 0, 70, 70);
    copied.b->ops->state_copy(copied.b, 0, copied.state[0]);
    fixture_feed(&copied, 0, 120, 6); /* the original runs on ... */
    copied.b->ops->state_reset(copied.b, copied.state[0]);
    copied.length[0] = 70;
    copied.state[0] = 0; /* ... and the copy does not notice */
    fixture_feed(&copied, 0, 120, 50);
    fixture_assert_same_bits(&straight, &copied);
    fixture_run_close(&straight);
    fixture_run_close(&copied);
    fixture_data_free(&data);
    fixture_model_free(&model);
}

static void a_reset_slot_forgets_the_sequence_before(void **state)
{
    (void)state;
    struct backend_shape shape = fixture_shape_small();
    struct fixture_rng rng = {21};
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    check_reset_slot(open_run, &model, &rng, 100, 3);
    fixture_model_free(&model);
}

static void pages_copied_or_saved_and_loaded_hold_the_same_keys(void **state)
{
    (void)state;
    const enum kv_type types[] = {KV_F32, KV_F16, KV_Q8_0};
    for (int i = 0; i < 3; i++) {
        struct backend_shape shape = fixture_shape_small();
        struct fixture_rng rng = {22};
        struct error err = {0};
        shape.kv_type = types[i];
        struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
        struct fixture_data data = fixture_data_new(&rng, &shape, FO_ATTN, 1, (const int[]){150});
        struct fixture_run straight = fixture_run_open(backend_open_plain, &model, &data),
                           moved = fixture_run_open(backend_open_plain, &model, &data);
        const struct backend_ops *ops = moved.b->ops;
        fixture_feed(&straight, 0, 150, 150);
        fixture_feed(&moved, 0, 130, 130);
        assert_int_equal(ops->pages_reserve(moved.b, 6, &err), 0);
        void *image = malloc(ops->page_bytes(moved.b)), *noise = malloc(ops->page_bytes(moved.b));
        assert_true(image && noise);
        memset(noise, 0x3c, ops->page_bytes(moved.b));
        for (int32_t page = 0; page < 3; page++) {
            const int32_t old = moved.pages[0][page];
            if (page == 1) {
                ops->page_copy(moved.b, 4, old);
            } else {
                assert_int_equal(ops->page_save(moved.b, old, image, &err), 0);
                assert_int_equal(ops->page_load(moved.b, 3 + page, image, &err), 0);
            }
            assert_int_equal(ops->page_load(moved.b, old, noise, &err), 0);
            moved.pages[0][page] = 3 + page;
        }
        fixture_feed(&moved, 0, 150, 8);
        fixture_assert_same_bits(&straight, &moved);
        free(image);
        free(noise);
        fixture_run_close(&straight);
        fixture_run_close(&moved);
        fixture_data_free(&data);
        fixture_model_free(&model);
    }
}

/* ---- errors ---- */

static void a_failed_step_does_nothing_and_sync_reports_the_first_error_once(void **state)
{
    (void)state;
    struct backend_shape shape = fixture_shape_small();
    struct fixture_rng rng = {23};
    struct error err = {0};
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    struct fixture_data data = fixture_data_new(&rng, &shape, FO_EMBED, 1, (const int[]){4});
    struct fixture_run run = fixture_run_open(backend_open_plain, &model, &data);
    const struct backend_ops *ops = run.b->ops;
    struct buffer *out = fixture_poisoned(run.b, 4, (size_t)shape.n_embd);
    float before[4 * 64], after[4 * 64];
    assert_int_equal(ops->read(run.b, out, 0, before, sizeof before, &err), 0);

    const int32_t bad[] = {0, 1, shape.n_vocab, 2};
    const struct span span = {.row = 0, .n = 4, .pos = 0, .pages = run.pages[0], .state = run.state[0]};
    ops->begin(run.b, bad, 4, &span, 1);
    ops->embed(run.b, run.w[FM_EMBD], out);
    ops->embed(run.b, run.w[FM_NORM], out); /* a second error, not reported */
    assert_int_equal(ops->read(run.b, out, 0, after, sizeof after, &err), -1);
    assert_int_equal(ops->sync(run.b, &err), -1);
    assert_non_null(strstr(err.text, "token id of row 2"));
    assert_int_equal(ops->sync(run.b, &err), 0);
    assert_int_equal(ops->read(run.b, out, 0, after, sizeof after, &err), 0);
    assert_memory_equal(before, after, sizeof before);

    fixture_feed(&run, 0, 4, 4); /* usable again */
    check_run(&run, &model, TIGHT);
    fixture_run_close(&run);
    fixture_data_free(&data);
    fixture_model_free(&model);
}

static void buffers_and_weights_of_the_wrong_size_are_refused_by_name(void **state)
{
    (void)state;
    struct backend_shape shape = fixture_shape_small();
    struct fixture_rng rng = {24};
    struct error err = {0};
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    for (int kind = 0; kind < FO_COUNT; kind++) {
        struct fixture_data data = fixture_data_new(&rng, &shape, (enum fixture_op_kind)kind, 1, (const int[]){4});
        struct fixture_run run = fixture_run_open(backend_open_plain, &model, &data);
        const struct backend_ops *ops = run.b->ops;
        const struct span span = {.row = 0, .n = 4, .pos = 0, .pages = run.pages[0], .state = run.state[0]};
        struct buffer *small = ops->buffer_new(run.b, 3, &err), *small_in[4] = {small, small, small, small};
        struct weight *wrong[FM_COUNT];
        for (int i = 0; i < FM_COUNT; i++)
            wrong[i] = run.w[FM_SH_UP]; /* [64][64]: no operation takes it alone */
        ops->begin(run.b, data.ids[0], 4, &span, 1);
        fixture_call(run.b, (enum fixture_op_kind)kind, run.w, small_in, small_in, 4);
        assert_int_equal(ops->sync(run.b, &err), -1);
        assert_non_null(strstr(err.text, "bytes"));

        struct buffer *large[4];
        for (int i = 0; i < 4; i++)
            large[i] = ops->buffer_new(run.b, 1 << 20, &err);
        ops->begin(run.b, data.ids[0], 4, &span, 1);
        fixture_call(run.b, (enum fixture_op_kind)kind, wrong, large, large, 4);
        if (kind == FO_PROJECT_ADD) { /* takes any matrix that fits its buffers */
            assert_int_equal(ops->sync(run.b, &err), 0);
        } else {
            assert_int_equal(ops->sync(run.b, &err), -1);
            assert_non_null(strstr(err.text, "up"));
        }
        fixture_run_close(&run);
        fixture_data_free(&data);
    }
    fixture_model_free(&model);
}

static void layers_rows_and_ranges_outside_the_model_are_refused(void **state)
{
    (void)state;
    struct backend_shape shape = fixture_shape_small();
    struct fixture_rng rng = {25};
    struct error err = {0};
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    struct fixture_data data = fixture_data_new(&rng, &shape, FO_HEAD, 1, (const int[]){4});
    struct fixture_run run = fixture_run_open(backend_open_plain, &model, &data);
    const struct backend_ops *ops = run.b->ops;
    struct backend *b = run.b;
    const struct span span = {.row = 0, .n = 4, .pos = 0, .pages = run.pages[0], .state = run.state[0]};
    struct buffer *x[5];
    char image[16];
    for (int i = 0; i < 5; i++)
        x[i] = ops->buffer_new(b, 1 << 16, &err);

    ops->begin(b, data.ids[0], 4, &span, 1);
    ops->attn_mix(b, shape.n_kv_layers, x[0], x[1]);
    assert_int_equal(ops->sync(b, &err), -1);
    assert_non_null(strstr(err.text, "KV layer 2"));
    ops->begin(b, data.ids[0], 4, &span, 1);
    ops->delta_rule(b, -1, x[0], x[1], x[2], run.w[FM_DELTA_NORM], x[3]);
    assert_int_equal(ops->sync(b, &err), -1);
    assert_non_null(strstr(err.text, "layer -1"));
    ops->begin(b, data.ids[0], 4, &span, 1);
    ops->head(b, x[0], run.w[FM_NORM], run.w[FM_HEAD], (const int32_t[]){4}, 1, NULL, x[1]);
    assert_int_equal(ops->sync(b, &err), -1);
    assert_non_null(strstr(err.text, "row 4"));

    assert_int_equal(ops->read(b, x[0], (1 << 16) - 4, image, 8, &err), -1);
    assert_int_equal(ops->write(b, x[0], (1 << 16) + 4, image, 0, &err), -1);
    assert_int_equal(ops->page_save(b, 1, image, &err), -1);
    assert_int_equal(ops->page_load(b, -1, image, &err), -1);
    assert_int_equal(ops->state_save(b, 2, 5, image, &err), -1);
    assert_int_equal(ops->state_load(b, 0, -1, image, &err), -1);
    ops->state_copy(b, 0, 9);
    assert_int_equal(ops->sync(b, &err), -1);
    assert_non_null(strstr(err.text, "slot 9"));
    fixture_run_close(&run);
    fixture_data_free(&data);
    fixture_model_free(&model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_operation_is_what_the_specification_says),
        cmocka_unit_test(every_operation_holds_at_random_shapes),
        cmocka_unit_test(matrices_of_every_block_type_give_their_dequantised_products),
        cmocka_unit_test(delta_rule_follows_the_textbook_recurrence_with_the_heads_of_the_35b),
        cmocka_unit_test(delta_state_does_not_drift_over_many_grid_cells),
        cmocka_unit_test(delta_rule_survives_extreme_gates),
        cmocka_unit_test(delta_conv_survives_extreme_gates_and_an_empty_head),
        cmocka_unit_test(rope_turns_pairs_half_the_rotated_width_apart_and_leaves_the_rest),
        cmocka_unit_test(attention_survives_scores_far_beyond_the_range_of_exp),
        cmocka_unit_test(attention_over_every_kv_type_is_the_formula_on_rounded_numbers),
        cmocka_unit_test(narrow_keys_take_less_memory_and_stay_close),
        cmocka_unit_test(a_tie_between_experts_goes_to_the_lower_index),
        cmocka_unit_test(chosen_may_be_left_out_and_rows_of_the_head_may_be_picked),
        cmocka_unit_test(cutting_a_sequence_anywhere_changes_no_bit),
        cmocka_unit_test(rows_taken_back_inside_a_grid_cell_leave_no_trace),
        cmocka_unit_test(a_saved_state_loaded_elsewhere_goes_on_with_the_same_bits),
        cmocka_unit_test(a_copied_state_goes_on_by_itself),
        cmocka_unit_test(a_reset_slot_forgets_the_sequence_before),
        cmocka_unit_test(pages_copied_or_saved_and_loaded_hold_the_same_keys),
        cmocka_unit_test(a_failed_step_does_nothing_and_sync_reports_the_first_error_once),
        cmocka_unit_test(buffers_and_weights_of_the_wrong_size_are_refused_by_name),
        cmocka_unit_test(layers_rows_and_ranges_outside_the_model_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
