/* Promise: the GPU's attention is the plain backend's within the rounding of f32 sums, its KV pages hold the bits that the page format asks for, and a row's
 * bits depend on nothing but its own sequence: not on how its tokens were cut into steps, what shared them, or how many workgroups had a part of it.
 *
 * Runs the kernels on the CPU (the shim) and, where it is built, as machine code of three GPU generations (the emulator). */
#include "tests/hip/faulty.h"
#include "tests/hip/hip_groups.h"
#include "tests/unit/backend_checks.h"

/* Matrix products are slow on the shim: less of a long context there. */
static bool short_contexts(void)
{
    return hip_group.on_shim && !hip_in_full();
}

static struct backend_shape with_heads(int n_heads, int n_kv_heads, int head_dim, int n_rot, bool gated, enum kv_type type)
{
    struct backend_shape shape = fixture_shape_small();
    shape.n_delta_layers = 0;
    shape.n_heads = n_heads;
    shape.n_kv_heads = n_kv_heads;
    shape.head_dim = head_dim;
    shape.n_rot = n_rot;
    shape.attn_scale = (float)(1 / sqrt(head_dim));
    shape.attn_gated = gated;
    shape.kv_type = type;
    shape.max_rows = 2048;
    return shape;
}

/* ---- pages ---- */

static size_t kv_row_bytes(const struct backend_shape *sh)
{
    return block_bytes(sh->kv_type == KV_F16 ? BLOCK_F16 : BLOCK_Q8_0, (size_t)sh->head_dim);
}

static uint8_t *page_image(const struct fixture_run *run, int32_t page)
{
    struct error err = {0};
    uint8_t *image = malloc(run->b->ops->page_bytes(run->b));
    assert_non_null(image);
    assert_ok(run->b->ops->page_save(run->b, page, image, &err), err);
    return image;
}

/* Fills every page with NaN: what stands behind a sequence's last token must not matter. */
static void poison_pages(const struct fixture_run *run)
{
    struct error err = {0};
    const size_t bytes = run->b->ops->page_bytes(run->b);
    uint8_t *image = malloc(bytes);
    assert_non_null(image);
    memset(image, 0xff, bytes);
    for (int q = 0; q < run->data->n_seqs; q++)
        for (int p = 0; p * GRID < run->data->n_tokens[q]; p++)
            assert_ok(run->b->ops->page_load(run->b, run->pages[q][p], image, &err), err);
    free(image);
}

static struct fixture_run open_run(const struct fixture_model *model, const struct fixture_data *data)
{
    struct fixture_run run = fixture_run_open(open_hip, model, data);
    poison_pages(&run);
    return run;
}

/* Rows of one page of the last layer, written ones only, are the same up to the rounding of keys: values are given numbers, rounded. */
static void assert_page_near(const struct backend_shape *sh, const uint8_t *got, const uint8_t *want, int filled)
{
    const size_t row = kv_row_bytes(sh), head = GRID * row, dim = (size_t)sh->head_dim, half = (size_t)sh->n_kv_heads * head;
    const size_t layer = (size_t)(sh->n_kv_layers - 1) * 2 * half;
    const enum block_type type = sh->kv_type == KV_F16 ? BLOCK_F16 : BLOCK_Q8_0;
    float *a = malloc(dim * sizeof *a), *b = malloc(dim * sizeof *b);
    assert_true(a && b);
    for (int h = 0; h < sh->n_kv_heads; h++)
        for (int t = 0; t < filled && t < GRID; t++) {
            const size_t at = layer + (size_t)h * head + (size_t)t * row;
            assert_memory_equal(got + at + half, want + at + half, row);
            block_dequant(type, got + at, a, dim);
            block_dequant(type, want + at, b, dim);
            for (size_t i = 0; i < dim; i++) {
                if (!(fabs((double)a[i] - (double)b[i]) <= 1e-5 + fixture_key_rounding(sh->kv_type, b, i)))
                    fail_msg("key of head %d, token %d, channel %zu is %g, expected %g", h, t, i, (double)a[i], (double)b[i]);
            }
        }
    free(a);
    free(b);
}

static void assert_same_pages(const struct fixture_run *a, const struct fixture_run *b)
{
    const struct backend_shape *sh = &a->b->shape;
    const size_t row = kv_row_bytes(sh), head = GRID * row, layer = (size_t)(sh->n_kv_layers - 1) * 2 * (size_t)sh->n_kv_heads * head;
    for (int q = 0; q < a->data->n_seqs; q++)
        for (int at = 0; at < a->length[q]; at += GRID) {
            uint8_t *x = page_image(a, a->pages[q][at / GRID]), *y = page_image(b, b->pages[q][at / GRID]);
            const int filled = a->length[q] - at < GRID ? a->length[q] - at : GRID;
            for (int h = 0; h < 2 * sh->n_kv_heads; h++)
                assert_memory_equal(x + layer + (size_t)h * head, y + layer + (size_t)h * head, (size_t)filled * row);
            free(x);
            free(y);
        }
}

/* ---- against the plain backend ---- */

/* What the plain backend makes of the pages and queries that the GPU has made: attn_mix alone, to the rounding of f32. */
static void assert_mix_near(const struct fixture_run *got, const struct fixture_model *model, const char *what, double tolerance)
{
    const struct fixture_data *data = got->data;
    const struct fixture_op *op = &data->op;
    struct error err = {0};
    struct fixture_run plain = fixture_run_open(backend_open_plain, model, data);
    const struct backend_ops *ops = plain.b->ops;
    for (int q = 0; q < data->n_seqs; q++) {
        const int n = got->length[q];
        for (int p = 0; p * GRID < n; p++) {
            uint8_t *image = page_image(got, got->pages[q][p]);
            assert_ok(ops->page_load(plain.b, plain.pages[q][p], image, &err), err);
            free(image);
        }
        struct buffer *in = ops->buffer_new(plain.b, (size_t)n * op->out[0] * sizeof(float), &err);
        struct buffer *out = fixture_poisoned(plain.b, (size_t)n, op->out[1]);
        const struct span span = {.row = 0, .n = n, .pos = 0, .pages = plain.pages[q], .state = plain.state[q]};
        assert_ok(ops->write(plain.b, in, 0, got->out[q][0], (size_t)n * op->out[0] * sizeof(float), &err), err);
        ops->begin(plain.b, data->ids[q], n, &span, 1);
        ops->attn_mix(plain.b, plain.b->shape.n_kv_layers - 1, in, out);
        assert_ok(ops->sync(plain.b, &err), err);
        assert_ok(ops->read(plain.b, out, 0, plain.out[q][1], (size_t)n * op->out[1] * sizeof(float), &err), err);
        fixture_assert_near_floats(what, got->out[q][1], plain.out[q][1], (size_t)n, op->out[1], tolerance);
    }
    fixture_run_close(&plain);
}

/* Queries and keys of 22 bits, scores and sums in f32. Measured: below 3e-6. */
static const double NEAR = 1e-5;

static void compare_model(const struct fixture_model *model, struct fixture_rng *rng, int n_seqs, const int *n_tokens, int most_rows)
{
    const struct backend_shape *shape = &model->shape;
    struct fixture_data data = fixture_data_new(rng, shape, FO_ATTN, n_seqs, n_tokens);
    struct fixture_run want = fixture_run_open(backend_open_plain, model, &data), got = open_run(model, &data);
    char what[96];
    fixture_feed_all(&want, 1000);
    fixture_feed_mixed(&got, rng, most_rows);
    snprintf(what, sizeof what, "%d/%d heads of %d, %d rotated, %s", shape->n_heads, shape->n_kv_heads, shape->head_dim, shape->n_rot,
             shape->kv_type == KV_F16 ? "f16" : "q8_0");
    for (int q = 0; q < n_seqs; q++) {
        fixture_assert_near_floats(what, got.out[q][0], want.out[q][0], (size_t)n_tokens[q], data.op.out[0], 1e-6);
        for (int p = 0; p * GRID < n_tokens[q]; p++) {
            uint8_t *a = page_image(&got, got.pages[q][p]), *b = page_image(&want, want.pages[q][p]);
            assert_page_near(shape, a, b, n_tokens[q] - p * GRID);
            free(a);
            free(b);
        }
    }
    assert_mix_near(&got, model, what, NEAR);
    fixture_run_close(&got);
    fixture_run_close(&want);
    fixture_data_free(&data);
}

static void compare(const struct backend_shape *shape, uint64_t seed, int n_seqs, const int *n_tokens, int most_rows)
{
    struct fixture_rng rng = {seed};
    struct fixture_model model = fixture_model_new(&rng, shape, BLOCK_F32, false);
    compare_model(&model, &rng, n_seqs, n_tokens, most_rows);
    fixture_model_free(&model);
}

static void it_agrees_with_the_plain_backend(void **state)
{
    (void)state;
    for (int k = 0; k < 2; k++) {
        const enum kv_type type = k ? KV_Q8_0 : KV_F16;
        const struct backend_shape shapes[] = {with_heads(4, 2, 32, 16, true, type), with_heads(3, 3, k ? 32 : 16, 16, false, type),
                                               with_heads(16, 2, 256, 64, true, type), with_heads(4, 2, 128, 128, false, type)};
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
            compare(&shapes[i], 1 + i, hip_in_full() ? 3 : 2, hip_in_full() ? (const int[]){100, 41, 7} : (const int[]){70, 7}, 60);
    }
}

/* Groups that fill tiles and that do not, heads that fill the room for channels and that do not, any number of rotated channels. */
static void it_agrees_at_every_head_and_group_size(void **state)
{
    (void)state;
    static const int shapes[][4] = {{1, 1, 16, 2},    {2, 1, 48, 48},   {6, 2, 64, 10}, {16, 1, 80, 80},  {3, 3, 112, 112},
                                    {20, 1, 128, 64}, {4, 1, 128, 96},  {3, 1, 256, 6}, {5, 5, 256, 256}, {33, 1, 240, 16},
                                    {8, 1, 192, 192}, {16, 16, 16, 16}, {32, 2, 32, 0}, {24, 2, 256, 64}};
    struct fixture_rng rng = {5};
    const size_t n = sizeof shapes / sizeof *shapes;
    for (size_t i = 0; i < n; i += hip_in_full() ? 1 : 5)
        for (int k = 0; k < 2; k++) {
            const int *s = shapes[i];
            const enum kv_type type = k && s[2] % 32 == 0 ? KV_Q8_0 : KV_F16;
            const struct backend_shape shape = with_heads(s[0], s[1], s[2], s[3], (i + (size_t)k) % 2, type);
            compare(&shape, 100 + i, 2, (const int[]){1 + fixture_below(&rng, 8), 66 + fixture_below(&rng, 8)}, 60);
        }
}

static void it_agrees_over_several_parts_of_a_long_context(void **state)
{
    (void)state;
    for (int k = 0; k < 2; k++) {
        const struct backend_shape shape = with_heads(4, 1, 32, 32, true, k ? KV_Q8_0 : KV_F16),
                                   large = with_heads(2, 1, 256, 64, false, shape.kv_type);
        compare(&shape, 30, 2, short_contexts() ? (const int[]){520, 30} : (const int[]){1100, 300}, 400);
        compare(&large, 31, 1, (const int[]){330}, 330);
    }
}

/* Norms in other types; queries, keys and values of sizes that f16 could not hold, or only as subnormals. */
static void numbers_of_any_size_agree(void **state)
{
    (void)state;
    static const double sizes[] = {1e-7, 1e-3, 40, 3e4};
    static const enum block_type types[] = {BLOCK_F32, BLOCK_F16, BLOCK_BF16};
    for (size_t i = 0; i < 4; i++)
        for (int k = 0; k < 2; k++) {
            struct backend_shape shape = with_heads(4, 1, 64, 32, true, k ? KV_Q8_0 : KV_F16);
            struct fixture_rng rng = {40 + i};
            struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
            fixture_matrix_free(&model.m[FM_Q_NORM]);
            fixture_matrix_free(&model.m[FM_K_NORM]);
            const double q = i == 3 && k == 0 ? 3e5 : sizes[i]; /* f16 norms hold less */
            model.m[FM_Q_NORM] = fixture_matrix_new(&rng, "q_norm", q > 6e4 ? BLOCK_F32 : types[i % 3], 64, 1, 1, q < 1e-3 ? 1e-3 : q / 10);
            model.m[FM_K_NORM] = fixture_matrix_new(&rng, "k_norm", types[(i + 1) % 3], 64, 1, 1, i < 2 ? 1 : 1e-4);
            model.shape.attn_scale = 0.01F;
            compare_model(&model, &rng, 1, (const int[]){90}, 50);
            fixture_model_free(&model);
        }
}

/* ---- rows are independent ---- */

static void a_rows_bits_depend_on_no_cut_and_no_neighbour(void **state)
{
    (void)state;
    static const int chunks[] = {1, 2, 7, 64, 200};
    for (int k = 0; k < 2; k++) {
        const enum kv_type type = k ? KV_Q8_0 : KV_F16;
        const struct backend_shape shapes[] = {with_heads(4, 2, 32, 16, true, type), with_heads(16, 2, 256, 64, true, type),
                                               with_heads(3, 1, 128, 128, false, type)};
        for (uint64_t i = 0; i < 3; i++) {
            struct fixture_rng rng = {16 + i};
            struct fixture_model model = fixture_model_new(&rng, &shapes[i], BLOCK_F32, false);
            check_cuts(open_run, &model, &rng, FO_ATTN, 3, (const int[]){20, 3, 68}, chunks, hip_in_full() ? 5 : 3, assert_same_pages);
            fixture_model_free(&model);
        }
    }
}

/* The first run is one step, whose workgroups take one part after the other; the steps of the second are small, and each part has a workgroup: tiles of 16
 * and of 32 queries, positions in three parts. */
static void a_long_context_has_the_same_bits_however_its_parts_are_run(void **state)
{
    (void)state;
    for (int k = 0; k < 2; k++) {
        const struct backend_shape shape = with_heads(8, k ? 2 : 1, k ? 128 : 256, 32, true, k ? KV_Q8_0 : KV_F16);
        const int n_tokens[] = {short_contexts() ? 280 : 530}; /* 70 or 133 workgroups of 32 queries: more than are cut into parts */
        struct fixture_rng rng = {50};
        struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
        struct fixture_data data = fixture_data_new(&rng, &shape, FO_ATTN, 1, n_tokens);
        struct fixture_run whole = open_run(&model, &data), cut = open_run(&model, &data);
        fixture_feed(&whole, 0, n_tokens[0], 1000);
        for (int at = 250; at < n_tokens[0]; at += 256) {
            fixture_feed(&cut, 0, at, 90);
            fixture_feed(&cut, 0, at + 8, 1);
            fixture_feed(&cut, 0, at + 16, 4);
        }
        fixture_feed(&cut, 0, n_tokens[0], 9);
        fixture_assert_same_bits(&whole, &cut);
        assert_same_pages(&whole, &cut);
        fixture_run_close(&whole);
        fixture_run_close(&cut);
        fixture_data_free(&data);
        fixture_model_free(&model);
    }
}

/* A row at a position far from 0 (the table of angles grows to it) agrees with the plain backend. */
static void angles_far_out_agree(void **state)
{
    (void)state;
    enum { FAR = 5000, ROWS = 3 };
    const struct backend_shape shape = with_heads(2, 1, 32, 32, false, KV_F16);
    struct fixture_rng rng = {60};
    struct error err = {0};
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    struct fixture_data data = fixture_data_new(&rng, &shape, FO_ATTN, 1, (const int[]){ROWS});
    float out[2][ROWS * 64];
    for (int k = 0; k < 2; k++) {
        struct fixture_run run = fixture_run_open(k ? open_hip : backend_open_plain, &model, &data);
        const struct backend_ops *ops = run.b->ops;
        struct buffer *in[3];
        int32_t pages[FAR / GRID + 1];
        for (int i = 0; i < 3; i++) {
            const size_t bytes = ROWS * data.op.in[i] * sizeof(float);
            in[i] = ops->buffer_new(run.b, bytes, &err);
            assert_ok(ops->write(run.b, in[i], 0, data.in[0][i], bytes, &err), err);
        }
        for (int i = 0; i <= FAR / GRID; i++)
            pages[i] = i;
        assert_ok(ops->pages_reserve(run.b, FAR / GRID + 1, &err), err);
        const struct span span = {.row = 0, .n = ROWS, .pos = FAR, .pages = pages, .state = run.state[0]};
        ops->begin(run.b, data.ids[0], ROWS, &span, 1);
        ops->attn_store(run.b, 0, in[0], in[1], in[2], run.w[FM_Q_NORM], run.w[FM_K_NORM]);
        assert_ok(ops->sync(run.b, &err), err);
        assert_ok(ops->read(run.b, in[0], 0, out[k], sizeof out[k], &err), err);
        fixture_run_close(&run);
    }
    fixture_assert_near_floats("far out", out[1], out[0], ROWS, 64, 1e-6);
    fixture_data_free(&data);
    fixture_model_free(&model);
}

/* ---- errors ---- */

static void what_the_kernels_cannot_do_is_refused_by_name(void **state)
{
    (void)state;
    struct error err = {0};
    struct backend_shape shape = with_heads(2, 1, 40, 8, false, KV_F16);
    assert_null(open_hip(&shape, &err));
    assert_contains(err.text, "heads of 40 channels");
    shape = with_heads(2, 1, 272, 8, false, KV_F16);
    assert_null(open_hip(&shape, &err));
    assert_contains(err.text, "heads of 272 channels");
    shape = with_heads(2, 1, 32, 8, false, KV_F32);
    assert_null(open_hip(&shape, &err));
    assert_contains(err.text, "kv-type");

    shape = with_heads(2, 1, 32, 8, false, KV_F16);
    struct fixture_rng rng = {70};
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    fixture_matrix_free(&model.m[FM_K_NORM]);
    model.m[FM_K_NORM] = fixture_matrix_new(&rng, "k_norm", BLOCK_Q8_0, 32, 1, 1, 1);
    struct fixture_data data = fixture_data_new(&rng, &shape, FO_ATTN, 1, (const int[]){4});
    struct fixture_run run = fixture_run_open(open_hip, &model, &data);
    const struct backend_ops *ops = run.b->ops;
    const struct span span = {.row = 0, .n = 4, .pos = 0, .pages = run.pages[0], .state = run.state[0]};
    struct buffer *large = ops->buffer_new(run.b, 1 << 16, &err), *tiny = ops->buffer_new(run.b, 12, &err);
    struct weight *const *w = run.w;
    for (int i = 0; i < 6; i++) {
        static const char *const says[] = {"k_norm", "KV layer -1", "KV layer 2", "attn_store: v", "attn_mix: q", "attn_mix: out"};
        ops->begin(run.b, data.ids[0], 4, &span, 1);
        if (i == 0)
            ops->attn_store(run.b, 0, large, large, large, w[FM_Q_NORM], w[FM_K_NORM]);
        if (i == 1 || i == 2)
            ops->attn_mix(run.b, i == 1 ? -1 : 2, large, large);
        if (i == 3)
            ops->attn_store(run.b, 0, large, large, tiny, w[FM_Q_NORM], w[FM_Q_NORM]);
        if (i > 3)
            ops->attn_mix(run.b, 0, i == 4 ? tiny : large, i == 5 ? tiny : large);
        assert_int_equal(ops->sync(run.b, &err), -1);
        assert_contains(err.text, says[i]);
    }
    fixture_run_close(&run);
    fixture_data_free(&data);
    fixture_model_free(&model);
}

/* Angles that did not reach the device are not counted on: the next step that wants them sends them again. */
static void angles_that_were_not_sent_are_made_again(void **state)
{
    (void)state;
    enum { FAR = 1500, SENT = 2 }; /* behind the piece that is made at open; copies: the angles, and where they are */
    faulty_load();
    const struct backend_shape shape = with_heads(2, 1, 32, 32, false, KV_F16);
    struct fixture_rng rng = {80};
    struct fixture_model model = fixture_model_new(&rng, &shape, BLOCK_F32, false);
    struct fixture_data data = fixture_data_new(&rng, &shape, FO_ATTN, 1, (const int[]){1});
    for (int failing = 0; failing < SENT; failing++) {
        struct error err = {0};
        char fault[40];
        struct fixture_run run = fixture_run_open(open_hip, &model, &data);
        const struct backend_ops *ops = run.b->ops;
        struct buffer *x = ops->buffer_new(run.b, 1 << 12, &err);
        int32_t pages[FAR / GRID + 1];
        for (int i = 0; i <= FAR / GRID; i++)
            pages[i] = i;
        assert_ok(ops->pages_reserve(run.b, FAR / GRID + 1, &err), err);
        const struct span span = {.row = 0, .n = 1, .pos = FAR, .pages = pages, .state = run.state[0]};
        snprintf(fault, sizeof fault, "hipMemcpyAsync:%d:98", failing + 1);
        for (int turn = 0; turn < 3; turn++) {
            ops->begin(run.b, data.ids[0], 1, &span, 1);
            faulty_forget_calls();
            if (turn == 0)
                setenv("FAULTY_ONCE", fault, 1);
            ops->attn_store(run.b, 0, x, x, x, run.w[FM_Q_NORM], run.w[FM_K_NORM]);
            assert_int_equal(ops->sync(run.b, &err), turn == 0 ? -1 : 0);
            unsetenv("FAULTY_ONCE");
            assert_int_equal(faulty_calls("hipMemcpyAsync"), turn == 0 ? failing + 1 : turn == 1 ? SENT : 0);
        }
        fixture_run_close(&run);
    }
    fixture_data_free(&data);
    fixture_model_free(&model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_agrees_with_the_plain_backend),
        cmocka_unit_test(it_agrees_at_every_head_and_group_size),
        cmocka_unit_test(it_agrees_over_several_parts_of_a_long_context),
        cmocka_unit_test(numbers_of_any_size_agree),
        cmocka_unit_test(a_rows_bits_depend_on_no_cut_and_no_neighbour),
        cmocka_unit_test(a_long_context_has_the_same_bits_however_its_parts_are_run),
        cmocka_unit_test(angles_far_out_agree),
        cmocka_unit_test(what_the_kernels_cannot_do_is_refused_by_name),
    };
    const struct CMUnitTest failing[] = {cmocka_unit_test(angles_that_were_not_sent_are_made_again)};
    const int failed = HIP_RUN("hip_attn", tests, HIP_GPUS);
    return failed + HIP_RUN_ON("faulty", "hip_attn where calls fail", failing);
}
