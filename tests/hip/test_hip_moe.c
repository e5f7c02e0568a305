/* Promise: the mixture of experts on the GPU is the CPU's: the same experts, best first, ties to the lower index; the same values within rounding; and a row's bits do
 * not depend on how many rows share the step, so that decode (mat-vec) and prefill (tiles over rows sorted by expert) agree to the bit. For every weight
 * type, fused and separate gate and up, with and without a shared expert, any sizes.
 *
 * Runs the kernels on the CPU (the shim) and, where it is built, as machine code (the emulator): of gfx1152, and with BEDSIDE_HIP_TESTS=all of gfx1100 and gfx1201. */
#include "tests/hip/hip_groups.h"
#include "tests/unit/backend_fixture.h"

static struct backend_shape moe_shape(int n_embd, int experts, int used, int ff, int shared_ff)
{
    struct backend_shape sh = fixture_shape_small();
    sh.kv_type = KV_F16;
    sh.n_embd = n_embd;
    sh.n_experts = experts;
    sh.n_experts_used = used;
    sh.expert_ff = ff;
    sh.shared_ff = shared_ff;
    sh.dense_ff = sh.n_embd;
    return sh;
}

/* The experts of every row are equal, and the values near. */
static void assert_like(const struct fixture_run *got, const struct fixture_run *want, double tolerance)
{
    const struct fixture_op *op = &got->data->op;
    for (int q = 0; q < got->data->n_seqs; q++) {
        const size_t rows = (size_t)got->length[q];
        if (memcmp(got->out[q][1], want->out[q][1], rows * op->out[1] * sizeof(float)) != 0)
            fail_msg("sequence %d: other experts", q);
        fixture_assert_near_floats("moe", got->out[q][0], want->out[q][0], rows, op->out[0], tolerance);
    }
}

/* `n` tokens: on the CPU in one step; on the GPU one by one, in one step, and in chunks of each given length. */
static void check_model(const struct fixture_model *model, struct fixture_rng *rng, int n, const int *chunks, int n_chunks)
{
    struct fixture_data data = fixture_data_new(rng, &model->shape, FO_MOE, 1, &n);
    struct fixture_run cpu = fixture_run_open(open_cpu, model, &data), one = fixture_run_open(open_hip, model, &data);
    fixture_feed(&cpu, 0, n, n);
    fixture_feed(&one, 0, n, 1);
    assert_like(&one, &cpu, 1e-6);
    for (int i = 0; i < n_chunks; i++) {
        struct fixture_run run = fixture_run_open(open_hip, model, &data);
        fixture_feed(&run, 0, n, chunks[i]);
        fixture_assert_same_bits(&run, &one);
        fixture_run_close(&run);
    }
    fixture_run_close(&one);
    fixture_run_close(&cpu);
    fixture_data_free(&data);
}

static const enum block_type types[] = {BLOCK_Q4_K, BLOCK_Q5_K, BLOCK_Q6_K, BLOCK_Q8_0, BLOCK_Q4_0, BLOCK_F16, BLOCK_BF16, BLOCK_F32};
enum { N_TYPES = sizeof types / sizeof *types };

static bool is_wide(enum block_type type)
{
    return block_info((uint32_t)type)->values == 256;
}

static void every_type_in_decode_and_prefill(void **state)
{
    (void)state;
    static const int chunks[] = {33, 9, 4};
    for (int t = 0; t < N_TYPES; t++) {
        struct fixture_rng rng = {300 + (uint64_t)t};
        const struct backend_shape sh = is_wide(types[t]) ? moe_shape(256, 6, 2, 256, t % 2 ? 256 : 512) : moe_shape(96, 11, 3, 64, t % 2 ? 64 : 32);
        struct fixture_model model = fixture_model_new(&rng, &sh, types[t], t % 2);
        check_model(&model, &rng, 33, chunks, hip_in_full() ? 3 : 2);
        fixture_model_free(&model);
    }
}

/* Rows from one to the first tile and beyond; experts with more rows than a tile holds. */
static void any_number_of_rows(void **state)
{
    (void)state;
    struct fixture_rng rng = {41};
    const struct backend_shape sh = moe_shape(64, 3, 2, 32, 0);
    struct fixture_model model = fixture_model_new(&rng, &sh, BLOCK_Q8_0, false);
    static const int rows[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 33, 100, 150};
    check_model(&model, &rng, 150, rows, sizeof rows / sizeof *rows);
    fixture_model_free(&model);
}

/* Sizes that fill no group of outputs, and experts that no row chooses. */
static void odd_sizes(void **state)
{
    (void)state;
    static const int chunks[] = {20, 7};
    static const struct {
        int embd, experts, used, ff, shared;
        enum block_type type;
    } odd[] = {{20, 7, 1, 13, 9, BLOCK_F32},     {24, 5, 1, 9, 24, BLOCK_BF16},     {70, 40, 8, 6, 30, BLOCK_F16},
               {132, 33, 5, 131, 2, BLOCK_BF16}, {160, 300, 9, 32, 96, BLOCK_Q8_0}, {32, 5, 5, 160, 0, BLOCK_Q4_0}};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        struct fixture_rng rng = {77 + i};
        const struct backend_shape sh = moe_shape(odd[i].embd, odd[i].experts, odd[i].used, odd[i].ff, odd[i].shared);
        struct fixture_model model = fixture_model_new(&rng, &sh, odd[i].type, i % 2);
        check_model(&model, &rng, 20, chunks, 2);
        fixture_model_free(&model);
    }
}

/* Gate, up, down and the shared expert each of another type, as mixed files have them. */
static void mixed_types(void **state)
{
    (void)state;
    static const int chunks[] = {25, 5};
    static const enum block_type mixed[][7] = {
        {BLOCK_F32, BLOCK_Q4_K, BLOCK_Q6_K, BLOCK_Q8_0, BLOCK_F16, BLOCK_Q4_K, BLOCK_F32},
        {BLOCK_BF16, BLOCK_F32, BLOCK_Q4_0, BLOCK_Q5_K, BLOCK_Q8_0, BLOCK_Q8_0, BLOCK_Q6_K},
        {BLOCK_Q8_0, BLOCK_Q5_K, BLOCK_Q5_K, BLOCK_F16, BLOCK_Q6_K, BLOCK_BF16, BLOCK_Q8_0},
    };
    for (size_t i = 0; i < sizeof mixed / sizeof *mixed; i++) {
        struct fixture_rng rng = {177 + i};
        const struct backend_shape sh = moe_shape(256, 4, 2, 256, 256);
        struct fixture_model model = fixture_model_new(&rng, &sh, BLOCK_F16, false);
        static const enum fixture_name names[] = {FM_ROUTER, FM_EXP_GATE, FM_EXP_UP, FM_EXP_DOWN, FM_SH_GATE, FM_SH_UP, FM_SH_DOWN};
        for (int k = 0; k < 7; k++) {
            struct fixture_matrix *m = &model.m[names[k]];
            const struct weight_desc d = m->desc;
            fixture_matrix_free(m);
            *m = fixture_matrix_new(&rng, d.name, mixed[i][k], (int)d.n_in, (int)d.n_out, (int)d.n_mats, 1.0 / 16);
        }
        check_model(&model, &rng, 25, chunks, 2);
        fixture_model_free(&model);
    }
}

/* Experts with the same router row tie exactly; and with a router of zeros all tie. */
static void ties_go_to_the_lower_index(void **state)
{
    (void)state;
    for (int zero = 0; zero < 2; zero++) {
        struct fixture_rng rng = {19};
        const struct backend_shape sh = moe_shape(64, 70, 6, 32, 0);
        struct fixture_model model = fixture_model_new(&rng, &sh, BLOCK_Q8_0, false);
        struct fixture_matrix *router = &model.m[FM_ROUTER];
        const size_t row = 64 * sizeof(float);
        for (size_t e = 0; e < 70; e++) {
            if (zero)
                memset(router->bytes + e * row, 0, row);
            else if (e % 10 != 0) /* groups of ten alike, in no order */
                memcpy(router->bytes + (e * 37 % 70) * row, router->bytes + (e / 10 * 10 * 37 % 70) * row, row);
        }
        fixture_matrix_refresh(router);
        int n = 12;
        struct fixture_data data = fixture_data_new(&rng, &sh, FO_MOE, 1, &n);
        struct fixture_run cpu = fixture_run_open(open_cpu, &model, &data), hip = fixture_run_open(open_hip, &model, &data);
        fixture_feed(&cpu, 0, n, n);
        fixture_feed(&hip, 0, n, 12);
        assert_like(&hip, &cpu, 1e-6);
        for (int k = 0; zero && k < 6; k++) {
            int32_t expert;
            memcpy(&expert, hip.out[0][1] + k, sizeof expert);
            assert_int_equal(expert, k);
        }
        fixture_run_close(&hip);
        fixture_run_close(&cpu);
        fixture_data_free(&data);
        fixture_model_free(&model);
    }
}

/* Rows that hold NaN or infinity spoil nobody else's, and choose experts that exist. */
static void a_spoilt_row_stays_alone(void **state)
{
    (void)state;
    struct fixture_rng rng = {23};
    const struct backend_shape sh = moe_shape(64, 9, 4, 32, 32);
    struct fixture_model model = fixture_model_new(&rng, &sh, BLOCK_Q8_0, false);
    int n = 16;
    struct fixture_data data = fixture_data_new(&rng, &sh, FO_MOE, 1, &n);
    struct fixture_run clean = fixture_run_open(open_hip, &model, &data), spoilt = fixture_run_open(open_hip, &model, &data);
    fixture_feed(&clean, 0, n, n);
    for (int i = 0; i < 64; i++) {
        data.in[0][0][3 * 64 + i] = NAN;
        data.in[0][0][11 * 64 + i] = i ? 1.0F : INFINITY;
    }
    fixture_feed(&spoilt, 0, n, n);
    for (int r = 0; r < n; r++) {
        for (int k = 0; k < 4; k++) {
            int32_t expert;
            memcpy(&expert, spoilt.out[0][1] + 4 * r + k, sizeof expert);
            assert_in_range(expert, 0, 8);
        }
        if (r != 3 && r != 11)
            assert_memory_equal(spoilt.out[0][0] + 64 * r, clean.out[0][0] + 64 * r, 64 * sizeof(float));
    }
    fixture_run_close(&spoilt);
    fixture_run_close(&clean);
    fixture_data_free(&data);
    fixture_model_free(&model);
}

/* Several sequences in steps of any mixture. */
static void rows_do_not_depend_on_their_neighbours(void **state)
{
    (void)state;
    struct fixture_rng rng = {29};
    const struct backend_shape sh = moe_shape(256, 12, 4, 256, 256);
    struct fixture_model model = fixture_model_new(&rng, &sh, BLOCK_Q4_K, true);
    const int n[3] = {21, 13, 17};
    struct fixture_data data = fixture_data_new(&rng, &sh, FO_MOE, 3, n);
    struct fixture_run alone = fixture_run_open(open_hip, &model, &data), mixed = fixture_run_open(open_hip, &model, &data);
    fixture_feed_all(&alone, 100);
    fixture_feed_mixed(&mixed, &rng, 6);
    fixture_assert_same_bits(&mixed, &alone);
    fixture_run_close(&mixed);
    fixture_run_close(&alone);
    fixture_data_free(&data);
    fixture_model_free(&model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_type_in_decode_and_prefill),
        cmocka_unit_test(any_number_of_rows),
        cmocka_unit_test(odd_sizes),
        cmocka_unit_test(mixed_types),
        cmocka_unit_test(ties_go_to_the_lower_index),
        cmocka_unit_test(a_spoilt_row_stays_alone),
        cmocka_unit_test(rows_do_not_depend_on_their_neighbours),
    };
    return HIP_RUN("hip_moe", tests, hip_in_full() ? HIP_GPUS : 1);
}
