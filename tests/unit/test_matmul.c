#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "engine/blocks.h"
#include "engine/cpu/matmul.h"

static const enum block_type integer_types[] = {BLOCK_Q4_K, BLOCK_Q5_K, BLOCK_Q6_K, BLOCK_Q8_0, BLOCK_Q4_0};
enum { N_INTEGER_TYPES = sizeof integer_types / sizeof *integer_types, MAX_ROWS = 33 };

static uint64_t seed = 1;
static uint32_t random_u32(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 32);
}

static int random_below(int n)
{
    return (int)(random_u32() % (uint32_t)n);
}

static float random_float(void) /* about normal */
{
    float sum = 0;
    for (int i = 0; i < 6; i++)
        sum += (float)random_u32() / 4294967296.0f - 0.5f;
    return sum * 1.4f;
}

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

/* The sign and payload of a NaN are not part of the arithmetic's definition. */
static bool same(float a, float b)
{
    return bits_of(a) == bits_of(b) || (isnan(a) && isnan(b));
}

/* Instruction sets to compare with the plain one. */
static int n_isas(void)
{
    return (int)isa_best() + 1;
}

enum filling { ORDINARY, LARGEST, ALL_ONES, ALL_ZERO, ANY_FINITE, N_FILLINGS };

static uint16_t random_half(enum filling filling)
{
    switch (filling) {
    case LARGEST:
    case ALL_ONES:
        return random_below(2) ? 0x7bff : 0xfbff;
    case ALL_ZERO:
        return 0;
    case ANY_FINITE:
        return (uint16_t)((random_u32() & 0x8000u) | random_u32() % 0x7c00u);
    default:
        return f32_to_f16(random_float() * 0.01f);
    }
}

/* Random blocks of a type whose f16 scales are finite. */
static void fill_blocks(enum block_type type, uint8_t *data, size_t n, enum filling filling)
{
    const struct block_info *info = block_info(type);
    for (size_t b = 0; b < n; b++, data += info->bytes) {
        for (size_t i = 0; i < info->bytes; i++)
            data[i] = filling == ALL_ZERO ? 0 : filling == ALL_ONES ? 0xff : (uint8_t)random_u32();
        uint16_t d = random_half(filling), m = random_half(filling);
        switch (type) {
        case BLOCK_Q6_K:
            memcpy(data + 208, &d, 2);
            if (filling == LARGEST)
                memset(data + 192, 0x80, 16);
            break;
        case BLOCK_Q3_K:
            memcpy(data + 108, &d, 2);
            break;
        case BLOCK_Q2_K:
            memcpy(data + 80, &d, 2);
            memcpy(data + 82, &m, 2);
            break;
        case BLOCK_Q4_K:
        case BLOCK_Q5_K:
        case BLOCK_Q4_1:
        case BLOCK_Q5_1:
            memcpy(data + 2, &m, 2);
            memcpy(data, &d, 2);
            break;
        case BLOCK_F16:
            memcpy(data, &d, 2);
            break;
        case BLOCK_BF16:
            d = (uint16_t)(bits_of(random_float()) >> 16);
            memcpy(data, &d, 2);
            break;
        case BLOCK_F32: {
            float x = random_float();
            memcpy(data, &x, 4);
            break;
        }
        case BLOCK_MXFP4:
            data[0] = (uint8_t)(110 + random_below(30));
            break;
        default:
            memcpy(data, &d, 2);
            break;
        }
        if (type == BLOCK_Q8_0 && filling == LARGEST)
            memset(data + 2, 0x80, 32);
    }
}

static void fill_activations(float *x, int64_t n, enum filling filling)
{
    for (int64_t i = 0; i < n; i++) {
        switch (filling) {
        case LARGEST:
            x[i] = random_below(2) ? 127.0f : -127.0f;
            break;
        case ALL_ONES:
            x[i] = 3.0f;
            break;
        case ALL_ZERO:
            x[i] = 0;
            break;
        case ANY_FINITE: { /* blocks of very different sizes, zeros and ties among them */
            static const float sizes[] = {0, 1e-42f, 1e-30f, 1e-3f, 1, 1e3f, 1e20f};
            float size = sizes[i / 32 % 7];
            x[i] = random_below(4) ? size * random_float() : size * 127.0f * ((float)random_below(255) - 127.0f + 0.5f);
            break;
        }
        default:
            x[i] = random_float();
            break;
        }
    }
}

/* A matrix and activation rows, each piece of memory exactly as long as promised, so that a sanitizer sees any step beyond. */
struct problem {
    struct weight w;
    uint8_t *data;
    enum act_kind kind;
    int n_rows;
    float *x[MAX_ROWS];        /* [n_in] */
    void *act[MAX_ROWS];       /* quantised by the plain code */
    float *y[MAX_ROWS];        /* [n_out] */
    float *expected[MAX_ROWS]; /* by the plain code */
    void *scratch;
};

static void run(enum isa isa, struct problem *p, int64_t o0, int64_t o1, int r0, int r1, bool add)
{
    const void *x[MAX_ROWS];
    for (int r = 0; r < p->n_rows; r++)
        x[r] = p->act[r];
    matmul(isa, &p->w, 1, o0, o1, x + r0, p->y + r0, r1 - r0, add, p->scratch);
}

static void problem_open(struct problem *p, enum block_type type, int64_t n_in, int64_t n_out, int n_rows, enum filling weights, enum filling acts)
{
    memset(p, 0, sizeof *p);
    size_t row_bytes = block_bytes(type, (size_t)n_in);
    size_t values = block_info(type)->values;
    p->data = malloc(2 * (size_t)n_out * row_bytes); /* matrix 1 of 2 is the one used */
    assert_non_null(p->data);
    fill_blocks(type, p->data, 2 * (size_t)n_out * (size_t)n_in / values, weights);
    p->w = (struct weight){.desc = {.name = "w", .type = type, .n_in = n_in, .n_out = n_out, .n_mats = 2, .data = p->data}, .row_bytes = row_bytes};
    p->w.desc.stride = (size_t)n_out * row_bytes;
    p->kind = act_kind_of(type);
    p->n_rows = n_rows;
    p->scratch = alloc_lines(matmul_scratch_bytes(&p->w), 1);
    for (int r = 0; r < n_rows; r++) {
        p->x[r] = malloc((size_t)n_in * sizeof(float));
        p->act[r] = alloc_lines(act_row_bytes(p->kind, n_in), 1);
        p->y[r] = malloc((size_t)n_out * sizeof(float));
        p->expected[r] = malloc((size_t)n_out * sizeof(float));
        assert_true(p->x[r] && p->act[r] && p->y[r] && p->expected[r]);
        fill_activations(p->x[r], n_in, acts);
        act_quantise(ISA_PLAIN, p->kind, p->x[r], n_in, p->act[r]);
        for (int64_t o = 0; o < n_out; o++)
            p->y[r][o] = (float)o; /* what `add` starts from */
    }
}

static void problem_close(struct problem *p)
{
    for (int r = 0; r < p->n_rows; r++) {
        free(p->x[r]);
        free(p->act[r]);
        free(p->y[r]);
        free(p->expected[r]);
    }
    free(p->scratch);
    free(p->data);
}

/* Runs the plain code and keeps its results, then sets y back. */
static void expect(struct problem *p, bool add)
{
    run(ISA_PLAIN, p, 0, p->w.desc.n_out, 0, p->n_rows, add);
    for (int r = 0; r < p->n_rows; r++) {
        memcpy(p->expected[r], p->y[r], (size_t)p->w.desc.n_out * sizeof(float));
        for (int64_t o = 0; o < p->w.desc.n_out; o++)
            p->y[r][o] = (float)o;
    }
}

static void check(struct problem *p, const char *what)
{
    for (int r = 0; r < p->n_rows; r++) {
        for (int64_t o = 0; o < p->w.desc.n_out; o++) {
            if (!same(p->y[r][o], p->expected[r][o]))
                fail_msg("%s: %s, n_in %lld, %d rows, row %d, output %lld: %.9g, expected %.9g", what, block_info(p->w.desc.type)->name,
                         (long long)p->w.desc.n_in, p->n_rows, r, (long long)o, (double)p->y[r][o], (double)p->expected[r][o]);
            p->y[r][o] = (float)o;
        }
    }
}

static void compare_isas(enum block_type type, int64_t n_in, int64_t n_out, int n_rows, enum filling weights, enum filling acts, bool add)
{
    struct problem p;
    problem_open(&p, type, n_in, n_out, n_rows, weights, acts);
    expect(&p, add);
    for (int isa = ISA_AVX2; isa < n_isas(); isa++) {
        run((enum isa)isa, &p, 0, n_out, 0, n_rows, add);
        check(&p, isa_name((enum isa)isa));
    }
    problem_close(&p);
}

static void integer_kernels_of_every_instruction_set_give_the_plain_bits(void **state)
{
    (void)state;
    static const int rows[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, MAX_ROWS};
    static const int outs[] = {1, 17, 40};
    static const int blocks[] = {1, 2, 3, 7, 20};
    int n = 0;
    for (int t = 0; t < N_INTEGER_TYPES; t++) {
        int values = block_info(integer_types[t])->values;
        for (size_t b = 0; b < sizeof blocks / sizeof *blocks; b++) {
            for (size_t o = 0; o < sizeof outs / sizeof *outs; o++) {
                for (size_t r = 0; r < sizeof rows / sizeof *rows; r++, n++)
                    compare_isas(integer_types[t], blocks[b] * values, outs[o], rows[r], ORDINARY, ORDINARY, n % 2);
            }
        }
    }
}

static void integer_kernels_agree_on_extreme_blocks_too(void **state)
{
    (void)state;
    static const int rows[] = {1, 2, 3, 4, 7};
    for (int t = 0; t < N_INTEGER_TYPES; t++) {
        int values = block_info(integer_types[t])->values;
        for (int w = 0; w < N_FILLINGS; w++) {
            for (int x = 0; x < N_FILLINGS; x++) {
                for (size_t r = 0; r < sizeof rows / sizeof *rows; r++)
                    compare_isas(integer_types[t], 3 * values, 33, rows[r], (enum filling)w, (enum filling)x, (w + x) % 2);
            }
        }
    }
}

static void float_kernels_of_every_instruction_set_give_the_plain_bits(void **state)
{
    (void)state;
    static const int rows[] = {1, 2, 4, 6, 9};
    static const int sizes[] = {1, 7, 16, 33, 100, 256};
    static const enum block_type plain_types[] = {BLOCK_F32, BLOCK_F16, BLOCK_BF16};
    static const enum block_type other_types[] = {BLOCK_Q4_1, BLOCK_Q5_0,   BLOCK_Q5_1,   BLOCK_Q2_K,
                                                  BLOCK_Q3_K, BLOCK_IQ4_NL, BLOCK_IQ4_XS, BLOCK_MXFP4};
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
        for (size_t t = 0; t < sizeof plain_types / sizeof *plain_types; t++) {
            for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
                compare_isas(plain_types[t], sizes[s], 1 + random_below(12), rows[r], ORDINARY, ORDINARY, random_below(2));
        }
        for (size_t t = 0; t < sizeof other_types / sizeof *other_types; t++)
            compare_isas(other_types[t], 2 * block_info(other_types[t])->values, 7, rows[r], ORDINARY, ORDINARY, random_below(2));
    }
}

/* Cancelling and vanishing products leave zeros of either sign in the partial sums. */
static void float_kernels_keep_the_sign_of_zero_beyond_the_last_full_vector(void **state)
{
    (void)state;
    struct problem p;
    problem_open(&p, BLOCK_F32, 19, 5, 2, ORDINARY, ORDINARY);
    for (int i = 0; i < 2 * 5 * 19; i++) {
        float tiny = i % 3 ? -1e-30f : 0.0f;
        memcpy(p.data + 4 * i, &tiny, 4);
    }
    for (int r = 0; r < 2; r++) {
        for (int i = 0; i < 19; i++)
            ((float *)p.act[r])[i] = r ? 1e-30f : -0.0f;
    }
    expect(&p, false);
    for (int isa = ISA_AVX2; isa < n_isas(); isa++) {
        run((enum isa)isa, &p, 0, 5, 0, 2, false);
        check(&p, isa_name((enum isa)isa));
    }
    problem_close(&p);
}

static void a_row_does_not_depend_on_its_neighbours_or_on_how_outputs_are_shared_out(void **state)
{
    (void)state;
    static const enum block_type types[] = {BLOCK_Q4_K, BLOCK_Q5_K, BLOCK_Q6_K, BLOCK_Q8_0, BLOCK_Q4_0, BLOCK_F32, BLOCK_F16, BLOCK_Q4_1};
    for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
        for (int isa = ISA_PLAIN; isa < n_isas(); isa++) {
            struct problem p;
            problem_open(&p, types[t], 512, 83, MAX_ROWS, ORDINARY, ORDINARY);
            expect(&p, true);
            for (int r = 0; r < MAX_ROWS;) {
                int n = 1 + random_below(7);
                n = n < MAX_ROWS - r ? n : MAX_ROWS - r;
                for (int64_t o = 0; o < 83;) {
                    int64_t end = o + MATMUL_ROWS * (1 + random_below(3));
                    end = end < 83 ? end : 83;
                    run((enum isa)isa, &p, o, end, r, r + n, true);
                    o = end;
                }
                r += n;
            }
            check(&p, isa_name((enum isa)isa));
            problem_close(&p);
        }
    }
}

/* More activation rows than a kernel takes in one pass. */
static void long_prompts_are_cut_into_passes_without_a_seam(void **state)
{
    (void)state;
    enum { ROWS = 1100 };
    struct problem p;
    for (int isa = ISA_PLAIN; isa < n_isas(); isa++) {
        problem_open(&p, BLOCK_Q4_K, 256, 20, 1, ORDINARY, ORDINARY);
        expect(&p, false);
        const void **x = alloc_array(ROWS, sizeof *x);
        float **y = alloc_array(ROWS, sizeof *y);
        float *all = alloc_array((size_t)ROWS * 20, sizeof *all);
        assert_true(x && y && all);
        for (int r = 0; r < ROWS; r++) {
            x[r] = p.act[0];
            y[r] = all + r * 20;
        }
        matmul((enum isa)isa, &p.w, 1, 0, 20, x, y, ROWS, false, p.scratch);
        for (int i = 0; i < ROWS * 20; i++)
            assert_int_equal(bits_of(all[i]), bits_of(p.expected[0][i % 20]));
        free(x);
        free(y);
        free(all);
        problem_close(&p);
    }
}

/* Everything that can differ is the rounding of the activations (half a step each; a Q8_32 step is also rounded to f16) and f32 sums. */
static void products_differ_from_the_exact_ones_by_the_activation_rounding_only(void **state)
{
    (void)state;
    for (int t = 0; t < N_INTEGER_TYPES; t++) {
        enum { N = 1024, OUT = 16, ROWS = 4 };
        struct problem p;
        problem_open(&p, integer_types[t], N, OUT, ROWS, ORDINARY, ORDINARY);
        run(ISA_PLAIN, &p, 0, OUT, 0, ROWS, false);
        int block = p.kind == ACT_Q8_256 ? 256 : 32;
        for (int o = 0; o < OUT; o++) {
            float w[N];
            block_dequant(p.w.desc.type, weight_row(&p.w, 1, o), w, N);
            for (int r = 0; r < ROWS; r++) {
                double exact = 0, bound = 0, size = 0;
                for (int b = 0; b < N; b += block) {
                    double top = 0;
                    for (int i = b; i < b + block; i++)
                        top = fmax(top, fabs((double)p.x[r][i]));
                    for (int i = b; i < b + block; i++) {
                        exact += (double)w[i] * (double)p.x[r][i];
                        size += fabs((double)w[i] * (double)p.x[r][i]);
                        bound += fabs((double)w[i]) * (top / 127 * 0.5001 + (block == 32 ? fabs((double)p.x[r][i]) * 0x1p-11 : 0));
                        bound += fabs((double)w[i] * (double)p.x[r][i]) * 4e-6;
                    }
                }
                assert_true(fabs((double)p.y[r][o] - exact) <= bound);
                assert_true(bound < 0.03 * size); /* the bound is tight enough to notice a wrong scale */
            }
        }
        problem_close(&p);
    }
}

static void quantised_activations_have_the_same_bytes_on_every_instruction_set(void **state)
{
    (void)state;
    enum { N = 256 * 5 };
    static const enum act_kind kinds[] = {ACT_F32, ACT_Q8_32, ACT_Q8_256};
    for (int k = 0; k < 3; k++) {
        size_t bytes = act_row_bytes(kinds[k], N);
        assert_int_equal(bytes % 64, 0);
        uint8_t *plain = alloc_lines(bytes, 1), *other = alloc_lines(bytes, 1);
        assert_true(plain && other);
        for (int round = 0; round < 60; round++) {
            float x[N];
            fill_activations(x, N, (enum filling)(round % N_FILLINGS));
            for (int i = 0; round % 4 == 3 && i < 6; i++) {
                static const float odd[] = {-0.0f, FLT_MAX, -FLT_MAX, FLT_MIN, 1e-45f, -1e-45f, 2e-43f};
                x[random_below(N)] = odd[random_below(7)];
            }
            act_quantise(ISA_PLAIN, kinds[k], x, N, plain);
            for (int isa = ISA_AVX2; isa < n_isas(); isa++) {
                memset(other, 0, bytes);
                act_quantise((enum isa)isa, kinds[k], x, N, other);
                assert_memory_equal(plain, other, bytes);
            }
        }
        free(plain);
        free(other);
    }
}

/* Unit weights show the activations as the products see them. */
static void activations_round_half_to_even_on_the_step_that_the_specification_says(void **state)
{
    (void)state;
    uint8_t block[34];
    uint16_t one = f32_to_f16(1.0f);
    struct weight w = {.desc = {.name = "w", .type = BLOCK_Q8_0, .n_in = 32, .n_out = 1, .n_mats = 1, .data = block}, .row_bytes = sizeof block};
    float x[32] = {127.0f, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, 100.4f, -126.6f};
    static const float rounded[8] = {127, 0, 2, 2, 0, -2, 100, -127};
    void *act = alloc_lines(act_row_bytes(ACT_Q8_32, 32), 1), *scratch = alloc_lines(matmul_scratch_bytes(&w), 1);
    assert_true(act && scratch);
    for (int isa = ISA_PLAIN; isa < n_isas(); isa++) {
        act_quantise((enum isa)isa, ACT_Q8_32, x, 32, act);
        for (int i = 0; i < 8; i++) {
            float y = 0, *out = &y;
            const void *in = act;
            memset(block, 0, sizeof block);
            memcpy(block, &one, 2);
            block[2 + i] = 1;
            matmul((enum isa)isa, &w, 0, 0, 1, &in, &out, 1, false, scratch);
            assert_true(y == rounded[i]);
        }
    }
    free(act);
    free(scratch);
}

static void an_activation_that_is_not_finite_makes_its_own_row_nan_and_no_other(void **state)
{
    (void)state;
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    for (int t = 0; t < N_INTEGER_TYPES; t++) {
        for (int isa = ISA_PLAIN; isa < n_isas(); isa++) {
            for (int rows = 2; rows <= 6; rows += 4) {
                struct problem p;
                problem_open(&p, integer_types[t], 512, 20, rows, ORDINARY, ORDINARY);
                p.x[1][300] = bad[isa % 3];
                act_quantise((enum isa)isa, p.kind, p.x[1], 512, p.act[1]);
                run((enum isa)isa, &p, 0, 20, 0, rows, false);
                for (int r = 0; r < rows; r++) {
                    for (int o = 0; o < 20; o++)
                        assert_int_equal(isnan(p.y[r][o]), r == 1);
                }
                problem_close(&p);
            }
        }
    }
}

static void only_the_types_with_integer_kernels_take_quantised_activations(void **state)
{
    (void)state;
    assert_int_equal(act_kind_of(BLOCK_Q4_K), ACT_Q8_256);
    assert_int_equal(act_kind_of(BLOCK_Q5_K), ACT_Q8_256);
    assert_int_equal(act_kind_of(BLOCK_Q6_K), ACT_Q8_256);
    assert_int_equal(act_kind_of(BLOCK_Q8_0), ACT_Q8_32);
    assert_int_equal(act_kind_of(BLOCK_Q4_0), ACT_Q8_32);
    assert_int_equal(act_kind_of(BLOCK_F32), ACT_F32);
    assert_int_equal(act_kind_of(BLOCK_MXFP4), ACT_F32);
    for (int isa = ISA_PLAIN; isa <= ISA_AVX512; isa++)
        assert_string_not_equal(isa_name((enum isa)isa), "unknown");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(integer_kernels_of_every_instruction_set_give_the_plain_bits),
        cmocka_unit_test(integer_kernels_agree_on_extreme_blocks_too),
        cmocka_unit_test(float_kernels_of_every_instruction_set_give_the_plain_bits),
        cmocka_unit_test(float_kernels_keep_the_sign_of_zero_beyond_the_last_full_vector),
        cmocka_unit_test(a_row_does_not_depend_on_its_neighbours_or_on_how_outputs_are_shared_out),
        cmocka_unit_test(long_prompts_are_cut_into_passes_without_a_seam),
        cmocka_unit_test(products_differ_from_the_exact_ones_by_the_activation_rounding_only),
        cmocka_unit_test(quantised_activations_have_the_same_bytes_on_every_instruction_set),
        cmocka_unit_test(activations_round_half_to_even_on_the_step_that_the_specification_says),
        cmocka_unit_test(an_activation_that_is_not_finite_makes_its_own_row_nan_and_no_other),
        cmocka_unit_test(only_the_types_with_integer_kernels_take_quantised_activations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
