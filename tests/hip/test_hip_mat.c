/* Promise: on the GPU an activation takes the CPU's bits in every form, a product of one to eight rows (mat-vec) the CPU's bits for every
 * weight type, and so do the operations made of them: embed, project, project_add, mlp, head, mtp_join, however the rows are cut into steps. The
 * best k of a row of logits are those of a plain scan.
 *
 * Runs the kernels on the CPU (the shim) and, where it is built, as machine code of three GPU generations (the emulator).
 * BEDSIDE_HIP_TESTS=all: with a whole vocabulary there as well. */
#include "tests/hip/hip_product.h"

/* ---- one kernel at a time ---- */

static const enum act_kind cpu_kinds[] = {[HIP_ACT_F32] = ACT_F32, [HIP_ACT_Q8_32] = ACT_Q8_32, [HIP_ACT_Q8_256] = ACT_Q8_256};

static void check_quantise(enum hip_act kind, int n, int n_rows, uint64_t seed)
{
    struct fixture_rng rng = {seed};
    const size_t stride = hip_act_row_bytes(kind, n), bytes = stride * (size_t)n_rows, values = (size_t)n_rows * (size_t)n;
    assert_int_equal(stride, act_row_bytes(cpu_kinds[kind], n));
    float *x = malloc(values * sizeof *x);
    uint8_t *want = aligned_alloc(64, bytes), *got = malloc(bytes);
    assert_true(x && want && got);
    random_rows(&rng, (size_t)n_rows, (size_t)n, x);
    memset(want, 0xcd, bytes); /* what neither writes stays */
    void *d_x = sent(x, values * sizeof *x), *d_act = sent(want, bytes);
    for (size_t r = 0; r < (size_t)n_rows; r++)
        act_quantise(ISA_PLAIN, cpu_kinds[kind], x + r * (size_t)n, n, want + r * stride);
    struct hip h = {.device = hip_group.dev};
    hip_quantise(&h, kind, d_x, NULL, n_rows, n, d_act);
    fetch(got, d_act, bytes);
    for (size_t i = 0; i < bytes; i++)
        if (got[i] != want[i])
            fail_msg("form %d of %d values: byte %zu of row %zu is %d, the CPU's %d", (int)kind, n, i % stride, i / stride, got[i], want[i]);
    hip_device_free(hip_group.dev, d_x);
    hip_device_free(hip_group.dev, d_act);
    free(x);
    free(want);
    free(got);
}

static void activations_have_the_cpus_bits_in_every_form(void **state)
{
    (void)state;
    static const int wide[] = {256, 512, 2304}, narrow[] = {32, 96, 256, 288, 2080}, any[] = {1, 9, 33, 256, 259, 2049};
    for (size_t i = 0; i < 3; i++)
        check_quantise(HIP_ACT_Q8_256, wide[i], 9, 10 + i);
    for (size_t i = 0; i < 5; i++)
        check_quantise(HIP_ACT_Q8_32, narrow[i], 9, 20 + i);
    for (size_t i = 0; i < 6; i++)
        check_quantise(HIP_ACT_F32, any[i], 3, 30 + i);
}

static void check_product(enum block_type type, int n_in, int n_out, int n_rows, bool add, uint64_t seed)
{
    struct fixture_rng rng = {seed};
    struct fixture_matrix m = fixture_matrix_new(&rng, "w", type, n_in, n_out, 1, 1.0);
    check_against_cpu(hip_product, type, m.bytes, n_in, n_out, n_rows, add, &rng);
    fixture_matrix_free(&m);
}

/* Every number of rows of mat-vec and the first of the tiles, every number of weight rows in a wave's four and a workgroup's sixteen. */
static void products_of_1_to_9_rows_have_the_cpus_bits(void **state)
{
    (void)state;
    static const int outs[] = {1, 2, 3, 4, 5, 15, 17, 33};
    for (int t = 0; t < N_TYPES; t++)
        for (int rows = 1; rows <= 9; rows++)
            check_product(types[t], block_info(types[t])->values == 256 ? 768 : 416, outs[(rows + t) % 8], rows, rows % 2,
                          100 * (uint64_t)t + (uint64_t)rows);
}

/* From one block (or one value) to 4096, odd numbers of blocks, numbers of blocks that do not fill the eight lanes. */
static void rows_of_any_length_have_the_cpus_bits(void **state)
{
    (void)state;
    static const int wide[] = {256, 512, 768, 1280, 4096}, narrow[] = {32, 64, 224, 256, 288, 544, 4096},
                     any[] = {1, 15, 16, 20, 100, 128, 259, 4096};
    for (int t = 0; t < N_TYPES; t++) {
        const int values = block_info(types[t])->values;
        const int *list = values == 256 ? wide : values == 32 ? narrow : any;
        const int n = values == 256 ? 5 : values == 32 ? 7 : 8;
        for (int i = 0; i < n; i++)
            check_product(types[t], list[i], 6, 1 + (i + t) % 3, i % 2, 9000 + 100 * (uint64_t)t + (uint64_t)i);
    }
}

/* ---- whole operations, against the CPU backend ---- */

static struct backend_shape mat_shape(enum block_type type)
{
    struct backend_shape sh = block_info((uint32_t)type)->values == 256 ? fixture_shape_wide() : fixture_shape_small();
    sh.kv_type = KV_F16;
    return sh;
}

static const enum fixture_op_kind kinds[] = {FO_EMBED, FO_PROJECT, FO_PROJECT_ADD, FO_MLP, FO_HEAD, FO_MTP_JOIN};

/* One row at a time, in chunks of three, of eleven, and mixed with another sequence. */
static void operations_have_the_cpus_bits_however_rows_are_cut(void **state)
{
    (void)state;
    for (int t = 0; t < N_TYPES; t++) {
        const struct backend_shape sh = mat_shape(types[t]);
        for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
            struct fixture_rng rng = {1000 * (uint64_t)t + k};
            struct fixture_model model = fixture_model_new(&rng, &sh, types[t], false);
            const int tokens[2] = {12, 5};
            struct fixture_data data = fixture_data_new(&rng, &sh, kinds[k], 2, tokens);
            struct fixture_run want = fixture_run_open(open_cpu, &model, &data), got = fixture_run_open(open_hip, &model, &data);
            fixture_feed(&want, 0, 12, 12);
            fixture_feed(&want, 1, 5, 5);
            const int cut = (int)((t + (int)k) % 3);
            fixture_feed(&got, 0, 1, 1);
            if (cut == 0)
                fixture_feed(&got, 0, 12, 11); /* tiles */
            else if (cut == 1)
                fixture_feed(&got, 0, 12, 3);
            else
                fixture_feed_mixed(&got, &rng, 4);
            fixture_feed(&got, 1, 5, 8);
            fixture_assert_same_bits(&want, &got);
            fixture_run_close(&want);
            fixture_run_close(&got);
            fixture_data_free(&data);
            fixture_model_free(&model);
        }
    }
}

/* n tokens have the CPU's bits in two steps, cut at `at`. */
static void check_two_steps(const struct fixture_model *model, struct fixture_rng *rng, enum fixture_op_kind kind, int n, int at)
{
    struct fixture_data data = fixture_data_new(rng, &model->shape, kind, 1, &n);
    struct fixture_run want = fixture_run_open(open_cpu, model, &data), got = fixture_run_open(open_hip, model, &data);
    fixture_feed(&want, 0, n, n);
    fixture_feed(&got, 0, at, at);
    fixture_feed(&got, 0, n, n - at);
    fixture_assert_same_bits(&want, &got);
    fixture_run_close(&want);
    fixture_run_close(&got);
    fixture_data_free(&data);
}

/* Matrices of four types, in three forms of activations, in one `project`. */
static void matrices_of_different_types_go_together(void **state)
{
    (void)state;
    static const enum block_type mixed[4] = {BLOCK_Q6_K, BLOCK_Q8_0, BLOCK_F32, BLOCK_Q4_K};
    const struct backend_shape sh = mat_shape(BLOCK_Q4_K);
    struct fixture_rng rng = {77};
    struct fixture_model model = fixture_model_new(&rng, &sh, BLOCK_Q4_K, false);
    for (int i = 0; i < 4; i++) {
        const int n_out = (int)model.m[FM_PROJ_0 + i].desc.n_out;
        fixture_matrix_free(&model.m[FM_PROJ_0 + i]);
        model.m[FM_PROJ_0 + i] = fixture_matrix_new(&rng, "proj", mixed[i], sh.n_embd, n_out, 1, 0.06);
    }
    check_two_steps(&model, &rng, FO_PROJECT, 14, 5);
    fixture_model_free(&model);
}

/* A model as wide as the 35B: the norm adds more than one round of values. */
static void a_wide_norm_has_the_cpus_bits(void **state)
{
    (void)state;
    struct backend_shape sh = mat_shape(BLOCK_Q8_0);
    sh.n_embd = 5120;
    sh.n_vocab = 3;
    sh.n_experts = sh.n_experts_used = sh.expert_ff = sh.shared_ff = 0;
    struct fixture_rng rng = {5};
    struct fixture_model model = fixture_model_new(&rng, &sh, BLOCK_Q8_0, false);
    check_two_steps(&model, &rng, FO_HEAD, 3, 1);
    fixture_model_free(&model);
}

static void wrong_arguments_are_named(void **state)
{
    (void)state;
    const struct backend_shape sh = mat_shape(BLOCK_F32);
    struct fixture_rng rng = {3};
    struct fixture_model model = fixture_model_new(&rng, &sh, BLOCK_F32, false);
    const int tokens[1] = {2};
    struct fixture_data data = fixture_data_new(&rng, &sh, FO_HEAD, 1, tokens);
    struct fixture_run run = fixture_run_open(open_hip, &model, &data);
    struct error err = {""};
    struct buffer *x = fixture_poisoned(run.b, 2, (size_t)sh.n_embd), *y = fixture_poisoned(run.b, 2, (size_t)sh.n_vocab);
    const struct span span = {.row = 0, .n = 2, .pos = 0, .pages = run.pages[0], .state = run.state[0]};
    const int32_t outside[1] = {2};
    run.b->ops->begin(run.b, data.ids[0], 2, &span, 1);
    run.b->ops->head(run.b, x, run.w[FM_NORM], run.w[FM_HEAD], outside, 1, NULL, y);
    assert_int_equal(run.b->ops->sync(run.b, &err), -1);
    assert_contains(err.text, "row 2");
    run.b->ops->begin(run.b, data.ids[0], 2, &span, 1);
    run.b->ops->project(run.b, x, run.w[FM_NORM], 5, &run.w[FM_PROJ_0], (struct buffer *[]){y, y, y, y, y});
    assert_int_equal(run.b->ops->sync(run.b, &err), -1);
    assert_contains(err.text, "5 matrices");
    run.b->ops->begin(run.b, data.ids[0], 2, &span, 1);
    run.b->ops->mlp(run.b, x, run.w[FM_NORM], run.w[FM_GATE], run.w[FM_UP], run.w[FM_GATE]);
    assert_int_equal(run.b->ops->sync(run.b, &err), -1);
    assert_contains(err.text, "mlp: down");
    hip_top(run.b, y, 2, GPU_TOP_MAX + 1, NULL, x);
    assert_int_equal(run.b->ops->sync(run.b, &err), -1);
    assert_contains(err.text, "at most 64");
    fixture_run_close(&run);
    fixture_data_free(&data);
    fixture_model_free(&model);
}

/* ---- the best of a row of logits ---- */

static bool is_usable(const uint32_t *usable, int id)
{
    return !usable || (usable[id / 32] >> (id % 32) & 1);
}

/* The plain scan: k times the highest of the rest, the lowest id among equal ones. */
static void scan(const float *logits, const uint32_t *usable, int n, int k, struct gpu_top *out, double *log_total)
{
    bool *taken = calloc((size_t)n, 1);
    assert_non_null(taken);
    *out = (struct gpu_top){.max = -INFINITY};
    double sum = 0;
    for (int i = 0; i < k; i++) {
        int best = -1;
        for (int id = 0; id < n; id++)
            if (!taken[id] && is_usable(usable, id) && isfinite(logits[id]) && (best < 0 || logits[id] > logits[best]))
                best = id;
        if (best < 0)
            break;
        taken[best] = true;
        out->top[i].id = best;
        out->top[i].logit = logits[best] + 0.0F;
        out->n = i + 1;
    }
    for (int id = 0; id < n; id++)
        if (is_usable(usable, id) && isfinite(logits[id]) && logits[id] > out->max)
            out->max = logits[id] + 0.0F;
    for (int id = 0; id < n; id++)
        if (is_usable(usable, id) && isfinite(logits[id]))
            sum += exp((double)logits[id] - (double)out->max);
    *log_total = log(sum);
    free(taken);
}

static void check_top(int n_vocab, int n_rows, int k, bool masked, uint64_t seed)
{
    struct backend_shape sh = fixture_shape_small();
    sh.kv_type = KV_F16;
    sh.n_vocab = n_vocab;
    struct fixture_rng rng = {seed};
    struct error err = {""};
    struct backend *b = open_hip(&sh, &err);
    if (!b) {
        fail_msg("%s", err.text);
        abort();
    }
    const size_t all = (size_t)n_rows * (size_t)n_vocab, words = ((size_t)n_vocab + 31) / 32;
    float *logits = malloc(all * sizeof *logits);
    uint32_t *usable = malloc(words * sizeof *usable);
    struct gpu_top *got = malloc((size_t)n_rows * sizeof *got);
    assert_true(logits && usable && got);
    for (size_t i = 0; i < words; i++) {
        usable[i] = (uint32_t)fixture_next(&rng);
        usable[i] |= (uint32_t)fixture_next(&rng); /* three of four are */
    }
    for (size_t i = 0; i < all; i++) {
        const size_t row = i / (size_t)n_vocab;
        logits[i] = (float)(4 * fixture_normal(&rng));
        if (row % 6 == 1)
            logits[i] = (float)(fixture_below(&rng, 5) - 2) * 0.0F; /* all equal, of either sign */
        if (row % 6 == 2)
            logits[i] = (float)fixture_below(&rng, 9); /* many ties */
        if (row % 6 == 3 && fixture_below(&rng, 3))
            logits[i] = fixture_below(&rng, 2) ? NAN : fixture_below(&rng, 2) ? INFINITY : -INFINITY;
        if (row % 6 == 4)
            logits[i] = i % (size_t)n_vocab == 5 ? -3.0F : NAN; /* a single one, or none */
        if (row % 6 == 5)
            logits[i] = NAN;
    }
    struct buffer *in = b->ops->buffer_new(b, all * sizeof *logits, &err), *mask = b->ops->buffer_new(b, words * 4, &err);
    struct buffer *out = b->ops->buffer_new(b, (size_t)n_rows * sizeof *got, &err);
    assert_true(in && mask && out);
    assert_ok(b->ops->write(b, in, 0, logits, all * sizeof *logits, &err), err);
    assert_ok(b->ops->write(b, mask, 0, usable, words * 4, &err), err);
    hip_top(b, in, n_rows, k, masked ? mask : NULL, out);
    assert_ok(b->ops->sync(b, &err), err);
    assert_ok(b->ops->read(b, out, 0, got, (size_t)n_rows * sizeof *got, &err), err);
    for (int r = 0; r < n_rows; r++) {
        struct gpu_top want;
        double log_total;
        scan(logits + (size_t)r * (size_t)n_vocab, masked ? usable : NULL, n_vocab, k, &want, &log_total);
        if (got[r].n != want.n || !same_float(got[r].max, want.max))
            fail_msg("%d of %d, row %d: %d found, the largest %g; expected %d and %g", k, n_vocab, r, got[r].n, (double)got[r].max, want.n,
                     (double)want.max);
        for (int i = 0; i < want.n; i++)
            if (got[r].top[i].id != want.top[i].id || bits_of_f32(got[r].top[i].logit) != bits_of_f32(want.top[i].logit))
                fail_msg("%d of %d, row %d: place %d is %d (%g), expected %d (%g)", k, n_vocab, r, i, got[r].top[i].id, (double)got[r].top[i].logit,
                         want.top[i].id, (double)want.top[i].logit);
        if (want.max > -INFINITY && !(fabs(log((double)got[r].sum) - log_total) < 2e-6))
            fail_msg("%d of %d, row %d: log of the sum is %.9g, expected %.9g", k, n_vocab, r, log((double)got[r].sum), log_total);
        if (!(want.max > -INFINITY))
            assert_true(got[r].sum == 0);
    }
    b->ops->close(b);
    free(logits);
    free(usable);
    free(got);
}

static void the_best_of_a_row_are_those_of_a_scan(void **state)
{
    (void)state;
    check_top(101, 6, 1, false, 1);
    check_top(101, 6, GPU_TOP_MAX, true, 2);
    check_top(7, 6, GPU_TOP_MAX, false, 3);
    check_top(1024, 6, 20, false, 4);
    check_top(8193, 6, 3, true, 5);
    check_top(1033, 19, 2, false, 6); /* more rows than have room at once */
    if (hip_group.on_shim || hip_in_full())
        check_top(270001, 3, 10, true, 7); /* more lists than the merging workgroup has threads */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(activations_have_the_cpus_bits_in_every_form),
        cmocka_unit_test(products_of_1_to_9_rows_have_the_cpus_bits),
        cmocka_unit_test(rows_of_any_length_have_the_cpus_bits),
        cmocka_unit_test(operations_have_the_cpus_bits_however_rows_are_cut),
        cmocka_unit_test(matrices_of_different_types_go_together),
        cmocka_unit_test(a_wide_norm_has_the_cpus_bits),
        cmocka_unit_test(wrong_arguments_are_named),
        cmocka_unit_test(the_best_of_a_row_are_those_of_a_scan),
    };
    return HIP_RUN("hip_mat", tests, HIP_GPUS);
}
