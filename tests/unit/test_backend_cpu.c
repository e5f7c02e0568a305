/* The CPU backend against the plain one on random models, and its promise that a row's bits depend on nothing but its own sequence: not on how it
 * was cut into steps, what shared them, how many threads there were, or the instruction set. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>

#include "engine/cpu/cpu_impl.h"
#include "tests/unit/backend_checks.h"

/* What open_cpu opens; the fixture's callback has no room for it. */
static struct {
    int threads;
    enum isa isa;
} choice;

static struct backend *open_cpu(const struct backend_shape *shape, struct error *err)
{
    return cpu_open(shape, choice.threads, choice.isa, err);
}

static void choose_cpu(int threads, enum isa isa)
{
    choice.threads = threads;
    choice.isa = isa;
}

static struct fixture_run open_run(const struct fixture_model *model, const struct fixture_data *data)
{
    return fixture_run_open(open_cpu, model, data);
}

/* ---- against the plain backend ---- */

/* One page as floats [layer][K, V][kv head][GRID][HD], the rows beyond `filled` tokens as 0. */
static size_t page_floats(const struct fixture_run *run, int32_t page, int filled, float **values)
{
    struct error err = {0};
    const struct backend_shape *sh = &run->b->shape;
    const size_t bytes = run->b->ops->page_bytes(run->b), dim = (size_t)sh->head_dim, row = slot_kv_row_bytes(sh), n_rows = bytes / row;
    uint8_t *image = malloc(bytes);
    *values = calloc(n_rows * dim, sizeof **values);
    assert_true(image && *values);
    assert_int_equal(run->b->ops->page_save(run->b, page, image, &err), 0);
    for (size_t r = 0; r < n_rows; r++)
        if ((int)(r % GRID) < filled)
            block_dequant(slot_kv_format(sh), image + r * row, *values + r * dim, dim);
    free(image);
    return n_rows * dim;
}

/* Values are the numbers given, rounded: the same bits on both backends. Keys may be rounded either way. */
static void assert_same_page(const struct backend_shape *sh, const float *got, const float *want, size_t n)
{
    const size_t dim = (size_t)sh->head_dim, head = GRID * dim;
    for (size_t i = 0; i < n; i++) {
        if (i / head / (size_t)sh->n_kv_heads % 2 == 1) {
            assert_true(got[i] == want[i]);
            continue;
        }
        const double unit = fixture_key_rounding(sh->kv_type, want + i / dim * dim, i % dim);
        assert_true(fabs((double)got[i] - (double)want[i]) <= 1e-5 + unit);
    }
}

/* What both runs left behind: states to `tolerance` of their largest value, pages but for rounding. */
static void assert_left_the_same(const struct fixture_run *got, const struct fixture_run *want, double tolerance)
{
    const struct backend_shape *sh = &got->b->shape;
    const enum fixture_op_kind kind = got->data->op.kind;
    if (kind == FO_DELTA || kind == FO_DELTA_RULE)
        fixture_assert_states_near(got, want, tolerance);
    for (int q = 0; q < got->data->n_seqs; q++) {
        for (int at = 0; at < got->length[q] && kind == FO_ATTN; at += GRID) {
            float *a, *b;
            const size_t n = page_floats(got, got->pages[q][at / GRID], got->length[q] - at, &a);
            assert_int_equal(page_floats(want, want->pages[q][at / GRID], want->length[q] - at, &b), n);
            assert_same_page(sh, a, b, n);
            free(a);
            free(b);
        }
    }
}

/* Output i of an operation holds int32 numbers. */
static bool is_integers(enum fixture_op_kind kind, int output)
{
    return kind == FO_MOE && output == 1;
}

/* Every operation on both backends, sequences of the given lengths in mixed steps. */
static void compare_with_plain(const struct backend_shape *shape, enum block_type type, uint64_t seed, int n_seqs, const int *n_tokens,
                               const double *tolerance)
{
    struct fixture_rng rng = {seed};
    struct fixture_model model = fixture_model_new(&rng, shape, type, seed % 2);
    for (int kind = 0; kind < FO_COUNT; kind++) {
        struct fixture_data data = fixture_data_new(&rng, shape, (enum fixture_op_kind)kind, n_seqs, n_tokens);
        struct fixture_run want = fixture_run_open(backend_open_plain, &model, &data), got = fixture_run_open(open_cpu, &model, &data);
        fixture_feed_all(&want, 100);
        fixture_feed_mixed(&got, &rng, 80);
        for (int q = 0; q < n_seqs; q++) {
            for (int i = 0; i < data.op.n_out; i++) {
                const size_t n = (size_t)n_tokens[q], width = data.op.out[i];
                char what[64];
                snprintf(what, sizeof what, "operation %d, output %d, seed %d", kind, i, (int)seed);
                if (is_integers((enum fixture_op_kind)kind, i)) {
                    assert_memory_equal(got.out[q][i], want.out[q][i], n * width * sizeof(float));
                    continue;
                }
                /* A row of one value has no other to be measured by: the whole output is one row then. */
                fixture_assert_near_floats(what, got.out[q][i], want.out[q][i], width > 1 ? n : 1, width > 1 ? width : n, tolerance[kind]);
            }
        }
        assert_left_the_same(&got, &want, tolerance[FO_DELTA_RULE]);
        fixture_run_close(&got);
        fixture_run_close(&want);
        fixture_data_free(&data);
    }
    fixture_model_free(&model);
}

/* In f32: sums of some hundred terms in 16 partials err by a few units of 2^-24 = 6e-8 of their largest terms; 1e-5 leaves room for cancellation.
 * Attention over f16 pages: a key or value that is rounded the other way moves by 1/2048 of itself, one of many. Measured: below 3e-6 (f32) and 1.5e-4. */
static const double f32_bounds[FO_COUNT] = {0, 1e-5, 1e-5, 1e-5, 1e-5, 1e-5, 1e-5, 1e-5, 1e-5, 1e-5, 1e-5};
static const double f16_kv_bounds[FO_COUNT] = {0, 1e-5, 1e-5, 4e-4, 1e-5, 1e-5, 1e-5, 1e-5, 1e-5, 1e-5, 1e-5};

/* Over q8_0 pages such a key moves by 1/127 of the largest of its 32, but this is rare: most rows are as near as in f32. Measured: below 4.3e-4. */
static const double q8_0_kv_bounds[FO_COUNT] = {0, 1e-5, 1e-5, 2e-3, 1e-5, 1e-5, 1e-5, 1e-5, 1e-5, 1e-5, 1e-5};

static const double *kv_bounds(const struct backend_shape *shape)
{
    return shape->kv_type == KV_F32 ? f32_bounds : shape->kv_type == KV_F16 ? f16_kv_bounds : q8_0_kv_bounds;
}

/* With int8 activations: rounding to steps of d = max|x|/127 has a deviation of d/sqrt(12) = max|x|/440, and the largest of 32 .. 256 normal values is
 * 2 .. 3 deviations, so an output errs by 0.5 .. 0.7 % of its own deviation, and the worst of some thousand outputs by 4.5 times that, measured
 * against the row's largest value, which among 20 outputs may be as small as 1.2 deviations: 2.7 %. Two such roundings in a row and a product
 * of two such numbers (mlp, moe): twice that. What no quantised matrix touches keeps its f32 bound. A wrong row, scale or expert errs by 100 %. */
static const double int8_bounds[FO_COUNT] = {0, 0.027, 0.027, 4e-4, 1e-5, 1e-5, 1e-5, 0.054, 0.054, 0.027, 0.027};

static void every_operation_agrees_with_the_plain_backend(void **state)
{
    (void)state;
    const int n_tokens[] = {150, 41, 7};
    struct backend_shape small = fixture_shape_small(), wide = fixture_shape_wide();
    choose_cpu(2, isa_best());
    compare_with_plain(&small, BLOCK_F32, 1, 3, n_tokens, f32_bounds);
    compare_with_plain(&small, BLOCK_Q8_0, 2, 3, n_tokens, int8_bounds);
    compare_with_plain(&wide, BLOCK_Q4_K, 3, 3, n_tokens, int8_bounds);
    wide.kv_type = KV_F32;
    compare_with_plain(&wide, BLOCK_F16, 4, 3, n_tokens, f32_bounds);
}

static void every_operation_agrees_at_random_shapes_and_head_sizes(void **state)
{
    (void)state;
    static const int head_dims[] = {64, 128, 256};
    struct fixture_rng rng = {5};
    choose_cpu(2, isa_best());
    for (uint64_t i = 0; i < 9; i++) {
        struct backend_shape shape = fixture_shape_random(&rng);
        if (i < 3) { /* HV/HK = 1, 2, 3 as well */
            shape.head_dim = head_dims[i];
            shape.n_rot = head_dims[i] / (1 << i);
            shape.attn_scale = (float)(1.0 / sqrt((double)shape.head_dim));
            shape.delta_v_heads = shape.delta_k_heads * (int)(i + 1);
        }
        const int n_tokens[] = {1 + fixture_below(&rng, 90), 1 + fixture_below(&rng, 90)};
        compare_with_plain(&shape, BLOCK_F32, 100 + i, 2, n_tokens, kv_bounds(&shape));
    }
}

/* One operation, attention, at all head sizes and KV types, few rows and many. */
static void attention_over_every_kv_type_agrees_with_the_plain_backend(void **state)
{
    (void)state;
    static const enum kv_type types[] = {KV_F32, KV_F16, KV_Q8_0};
    static const int head_dims[] = {64, 128, 256};
    const int n_tokens[] = {200, 70};
    for (size_t k = 0; k < 3; k++)
        for (size_t d = 0; d < 3; d++) {
            struct backend_shape shape = fixture_shape_small();
            struct fixture_rng rng = {50 + d};
            shape.kv_type = types[k];
            shape.head_dim = head_dims[d];
            shape.n_rot = head_dims[d] / 4;
            shape.attn_scale = (float)(1.0 / sqrt((double)shape.head_dim));
            struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
            struct fixture_data data = fixture_data_new(&rng, &shape, FO_ATTN, 2, n_tokens);
            struct fixture_run want = fixture_run_open(backend_open_plain, &model, &data);
            fixture_feed_all(&want, 100);
            for (int isa = ISA_PLAIN; isa <= (int)isa_best(); isa++) {
                choose_cpu(2, (enum isa)isa);
                struct fixture_run got = fixture_run_open(open_cpu, &model, &data);
                for (int q = 0; q < 2; q++)
                    fixture_feed(&got, q, n_tokens[q], q ? 1 : 130);
                for (int q = 0; q < 2; q++)
                    fixture_assert_near_floats("attention", got.out[q][1], want.out[q][1], (size_t)n_tokens[q], data.op.out[1],
                                               kv_bounds(&shape)[FO_ATTN]);
                assert_left_the_same(&got, &want, 0);
                fixture_run_close(&got);
            }
            fixture_run_close(&want);
            fixture_data_free(&data);
            fixture_model_free(&model);
        }
}

static void every_operation_agrees_with_the_heads_of_the_35b(void **state)
{
    (void)state;
    const int n_tokens[] = {70};
    struct backend_shape shape = fixture_shape_35b_heads();
    choose_cpu(2, isa_best());
    compare_with_plain(&shape, BLOCK_Q4_K, 7, 1, n_tokens, int8_bounds);
}

/* ---- rows are independent ---- */

/* Both runs hold the same bits in every state and every written row of every page. */
static void assert_left_the_same_bits(const struct fixture_run *a, const struct fixture_run *b)
{
    const enum fixture_op_kind kind = a->data->op.kind;
    if (kind == FO_DELTA)
        fixture_assert_same_states(a, b);
    for (int q = 0; q < a->data->n_seqs; q++) {
        for (int at = 0; at < a->length[q] && kind == FO_ATTN; at += GRID) {
            float *x, *y;
            const size_t n = page_floats(a, a->pages[q][at / GRID], a->length[q] - at, &x);
            assert_int_equal(page_floats(b, b->pages[q][at / GRID], b->length[q] - at, &y), n);
            assert_memory_equal(x, y, n * sizeof *x);
            free(x);
            free(y);
        }
    }
}

static void a_rows_bits_depend_on_no_cut_no_neighbour_no_thread_and_no_instruction_set(void **state)
{
    (void)state;
    const int n_tokens[] = {300, 33, 130};
    struct backend_shape shapes[] = {fixture_shape_small(), fixture_shape_wide(), fixture_shape_small()};
    shapes[2].kv_type = KV_Q8_0; /* f32 and f16 are the other two's */
    for (size_t i = 0; i < 3; i++) {
        struct fixture_rng rng = {16 + i};
        struct fixture_model model = fixture_model_new(&rng, &shapes[i], i == 1 ? BLOCK_Q4_K : BLOCK_Q8_0, i != 1);
        for (int kind = 0; kind < FO_COUNT; kind++) {
            if (i == 2 && kind != FO_ATTN)
                continue;
            struct fixture_data data = fixture_data_new(&rng, &shapes[i], (enum fixture_op_kind)kind, 3, n_tokens);
            choose_cpu(1, isa_best());
            struct fixture_run single = fixture_run_open(open_cpu, &model, &data);
            fixture_feed_all(&single, 1);
            for (int isa = ISA_PLAIN; isa <= (int)isa_best(); isa++) {
                static const int chunks[] = {7, 64, 200, 0};
                for (int c = 0; c < 4; c++) {
                    choose_cpu(c % 2 + 1, (enum isa)isa);
                    check_cut(&single, open_run(&model, &data), chunks[c], &rng, assert_left_the_same_bits);
                }
            }
            fixture_run_close(&single);
            fixture_data_free(&data);
        }
        fixture_model_free(&model);
    }
}

/* Over more than one part of PART_PAGES pages the parts of a few rows go to several threads, those of many rows do not; with more parts than fit
 * at once they go in rounds. */
static void attention_split_over_a_long_context_gives_the_same_bits(void **state)
{
    (void)state;
    enum { LONG = 3100 };
    struct backend_shape shape = fixture_shape_wide();
    struct fixture_rng rng = {30};
    shape.n_heads = 8;
    shape.n_kv_heads = 2;
    shape.n_embd = 32;
    shape.dense_ff = shape.expert_ff = 32;
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    struct fixture_data data = fixture_data_new(&rng, &shape, FO_ATTN, 1, (const int[]){LONG});
    assert_true(LONG > (SPLIT_QUERIES / (64 * 8)) * PART_PAGES * GRID); /* 64 rows: more than one round */
    choose_cpu(1, isa_best());
    struct fixture_run whole = fixture_run_open(open_cpu, &model, &data), plain = fixture_run_open(backend_open_plain, &model, &data);
    fixture_feed(&whole, 0, LONG, 256);
    static const int chunks[] = {1, 9, 64, 100};
    for (int c = 0; c < 4; c++) {
        choose_cpu(4, isa_best());
        struct fixture_run cut = fixture_run_open(open_cpu, &model, &data);
        fixture_feed(&cut, 0, LONG, chunks[c]);
        fixture_assert_same_bits(&whole, &cut);
        fixture_run_close(&cut);
    }
    fixture_feed(&plain, 0, LONG, 256);
    fixture_assert_near_floats("long attention", whole.out[0][1], plain.out[0][1], LONG, data.op.out[1], f16_kv_bounds[FO_ATTN]);
    fixture_run_close(&plain);
    fixture_run_close(&whole);
    fixture_data_free(&data);
    fixture_model_free(&model);
}

/* ---- states ---- */

static void rows_taken_back_inside_a_grid_cell_leave_no_trace(void **state)
{
    (void)state;
    struct backend_shape shape = fixture_shape_small();
    struct fixture_rng rng = {18};
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    choose_cpu(2, isa_best());
    check_rollback(open_run, &model, &rng, FO_DELTA, 160, assert_left_the_same_bits);
    check_rollback(open_run, &model, &rng, FO_ATTN, 160, assert_left_the_same_bits);
    fixture_model_free(&model);
}

static void a_state_saved_and_loaded_elsewhere_goes_on_with_the_same_bits(void **state)
{
    (void)state;
    static const int stops[] = {2, 63, 64, 70, 130};
    struct backend_shape shape = fixture_shape_small();
    struct fixture_rng rng = {19};
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    choose_cpu(2, isa_best());
    check_state_moves(open_run, &model, &rng, 200, stops, sizeof stops / sizeof *stops);
    fixture_model_free(&model);
}

static void delta_rule_survives_extreme_gates(void **state)
{
    (void)state;
    struct backend_shape shape = fixture_shape_small();
    struct fixture_rng rng = {10};
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    choose_cpu(2, isa_best());
    check_extreme_gates(open_run, &model, &rng);
    fixture_model_free(&model);
}

/* ---- experts ---- */

static void a_tie_between_experts_goes_to_the_lower_index(void **state)
{
    (void)state;
    struct backend_shape shape = fixture_shape_small();
    struct fixture_rng rng = {14};
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    const size_t row = (size_t)shape.n_embd * sizeof(float);
    static const size_t like[] = {0, 1, 2, 0, 0, 2, 0, 2}; /* experts 2, 5 and 7 are alike, and so are 0, 3, 4 and 6 */
    for (size_t e = 0; e < 8; e++)
        memcpy(model.m[FM_ROUTER].bytes + e * row, model.m[FM_ROUTER].bytes + like[e] * row, row);
    fixture_matrix_refresh(&model.m[FM_ROUTER]);
    struct fixture_data data = fixture_data_new(&rng, &shape, FO_MOE, 1, (const int[]){64});
    choose_cpu(2, isa_best());
    struct fixture_run got = fixture_run_open(open_cpu, &model, &data), want = fixture_run_open(backend_open_plain, &model, &data);
    fixture_feed(&got, 0, 64, 64);
    fixture_feed(&want, 0, 64, 64);
    assert_memory_equal(got.out[0][1], want.out[0][1], 64 * data.op.out[1] * sizeof(float));
    int tied = 0;
    for (int t = 0; t < 64; t++) {
        int32_t first[3];
        memcpy(first, got.out[0][1] + (size_t)t * data.op.out[1], sizeof first);
        tied += first[0] == 2 && first[1] == 5 && first[2] == 7;
    }
    assert_in_range(tied, 5, 60);
    fixture_run_close(&got);
    fixture_run_close(&want);
    fixture_data_free(&data);
    fixture_model_free(&model);
}

static void more_rows_than_go_through_the_experts_together_give_the_same_bits(void **state)
{
    (void)state;
    enum { MANY = FFN_ROWS + 100 };
    struct backend_shape shape = fixture_shape_small();
    struct fixture_rng rng = {31};
    shape.max_rows = MANY;
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_Q8_0, false);
    const enum fixture_op_kind kinds[] = {FO_MOE, FO_MLP};
    choose_cpu(2, isa_best());
    for (int k = 0; k < 2; k++) {
        struct fixture_data data = fixture_data_new(&rng, &shape, kinds[k], 1, (const int[]){MANY});
        struct fixture_run whole = fixture_run_open(open_cpu, &model, &data), cut = fixture_run_open(open_cpu, &model, &data);
        fixture_feed(&whole, 0, MANY, MANY);
        fixture_feed(&cut, 0, MANY, 50);
        fixture_assert_same_bits(&whole, &cut);
        fixture_run_close(&whole);
        fixture_run_close(&cut);
        fixture_data_free(&data);
    }
    fixture_model_free(&model);
}

/* ---- errors ---- */

static void wrong_sizes_are_refused_by_name_and_the_next_step_runs(void **state)
{
    (void)state;
    struct backend_shape shape = fixture_shape_small();
    struct fixture_rng rng = {24};
    struct error err = {0};
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    choose_cpu(2, isa_best());
    for (int kind = 0; kind < FO_COUNT; kind++) {
        struct fixture_data data = fixture_data_new(&rng, &shape, (enum fixture_op_kind)kind, 1, (const int[]){4});
        struct fixture_run run = fixture_run_open(open_cpu, &model, &data);
        const struct backend_ops *ops = run.b->ops;
        const struct span span = {.row = 0, .n = 4, .pos = 0, .pages = run.pages[0], .state = run.state[0]};
        struct buffer *small = ops->buffer_new(run.b, 3, &err), *small_in[4] = {small, small, small, small}, *large[4];
        struct weight *wrong[FM_COUNT];
        for (int i = 0; i < FM_COUNT; i++)
            wrong[i] = run.w[FM_SH_UP]; /* [64][64]: no operation but project_add takes it alone */
        for (int i = 0; i < 4; i++)
            large[i] = ops->buffer_new(run.b, 1 << 20, &err);
        ops->begin(run.b, data.ids[0], 4, &span, 1);
        fixture_call(run.b, (enum fixture_op_kind)kind, run.w, small_in, small_in, 4);
        assert_int_equal(ops->sync(run.b, &err), -1);
        assert_non_null(strstr(err.text, "bytes"));
        ops->begin(run.b, data.ids[0], 4, &span, 1);
        fixture_call(run.b, (enum fixture_op_kind)kind, wrong, large, large, 4);
        if (kind != FO_PROJECT_ADD) {
            assert_int_equal(ops->sync(run.b, &err), -1);
            assert_non_null(strstr(err.text, "shared_up"));
        }
        fixture_step(&run, &(struct fixture_part){0, 4}, 1); /* fails the test unless it succeeds */
        fixture_run_close(&run);
        fixture_data_free(&data);
    }
    fixture_model_free(&model);
}

static void too_many_rows_and_layers_outside_the_model_are_refused(void **state)
{
    (void)state;
    struct backend_shape shape = fixture_shape_small();
    struct fixture_rng rng = {25};
    struct error err = {0};
    shape.max_rows = 8;
    shape.max_logit_rows = 2;
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    struct fixture_data data = fixture_data_new(&rng, &shape, FO_EMBED, 1, (const int[]){9});
    choose_cpu(1, isa_best());
    struct fixture_run run = fixture_run_open(open_cpu, &model, &data);
    struct backend *b = run.b;
    const struct backend_ops *ops = b->ops;
    struct span span = {.row = 0, .n = 9, .pos = 0, .pages = run.pages[0], .state = run.state[0]};
    struct buffer *x[4];
    char image[16];
    for (int i = 0; i < 4; i++)
        x[i] = ops->buffer_new(b, 1 << 16, &err);

    ops->begin(b, data.ids[0], 9, &span, 1);
    ops->embed(b, run.w[FM_EMBD], x[0]);
    assert_int_equal(ops->read(b, x[0], 0, image, sizeof image, &err), -1); /* nothing is read until sync has told */
    assert_int_equal(ops->sync(b, &err), -1);
    assert_non_null(strstr(err.text, "at most 8 rows"));
    assert_int_equal(ops->sync(b, &err), 0);

    span.n = 8;
    ops->begin(b, data.ids[0], 8, &span, 1);
    ops->head(b, x[0], run.w[FM_NORM], run.w[FM_HEAD], (const int32_t[]){0, 1, 2}, 3, NULL, x[1]);
    assert_int_equal(ops->sync(b, &err), -1);
    assert_non_null(strstr(err.text, "at most 2"));
    ops->begin(b, data.ids[0], 8, &span, 1);
    ops->head(b, x[0], run.w[FM_NORM], run.w[FM_HEAD], (const int32_t[]){8}, 1, NULL, x[1]);
    assert_int_equal(ops->sync(b, &err), -1);
    assert_non_null(strstr(err.text, "row 8"));
    ops->begin(b, data.ids[0], 8, &span, 1);
    ops->attn_mix(b, shape.n_kv_layers, x[0], x[1]);
    assert_int_equal(ops->sync(b, &err), -1);
    assert_non_null(strstr(err.text, "KV layer 2"));
    ops->begin(b, data.ids[0], 8, &span, 1);
    ops->delta_rule(b, -1, x[0], x[1], x[2], run.w[FM_DELTA_NORM], x[3]);
    assert_int_equal(ops->sync(b, &err), -1);
    assert_non_null(strstr(err.text, "layer -1"));

    assert_int_equal(ops->read(b, x[0], (1 << 16) - 4, image, 8, &err), -1);
    assert_int_equal(ops->write(b, x[0], (1 << 16) + 4, image, 0, &err), -1);
    assert_int_equal(ops->page_save(b, 99, image, &err), -1);
    assert_int_equal(ops->page_load(b, -1, image, &err), -1);
    assert_int_equal(ops->state_save(b, 99, 5, image, &err), -1);
    assert_int_equal(ops->state_load(b, 0, -1, image, &err), -1);

    shape.n_rot = 5;
    assert_null(cpu_open(&shape, 1, isa_best(), &err));
    assert_non_null(strstr(err.text, "n_rot"));
    fixture_run_close(&run);
    fixture_data_free(&data);
    fixture_model_free(&model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_operation_agrees_with_the_plain_backend),
        cmocka_unit_test(every_operation_agrees_at_random_shapes_and_head_sizes),
        cmocka_unit_test(attention_over_every_kv_type_agrees_with_the_plain_backend),
        cmocka_unit_test(every_operation_agrees_with_the_heads_of_the_35b),
        cmocka_unit_test(a_rows_bits_depend_on_no_cut_no_neighbour_no_thread_and_no_instruction_set),
        cmocka_unit_test(attention_split_over_a_long_context_gives_the_same_bits),
        cmocka_unit_test(rows_taken_back_inside_a_grid_cell_leave_no_trace),
        cmocka_unit_test(a_state_saved_and_loaded_elsewhere_goes_on_with_the_same_bits),
        cmocka_unit_test(delta_rule_survives_extreme_gates),
        cmocka_unit_test(a_tie_between_experts_goes_to_the_lower_index),
        cmocka_unit_test(more_rows_than_go_through_the_experts_together_give_the_same_bits),
        cmocka_unit_test(wrong_sizes_are_refused_by_name_and_the_next_step_runs),
        cmocka_unit_test(too_many_rows_and_layers_outside_the_model_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
