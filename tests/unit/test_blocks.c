#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/blocks.h"

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* The next `n` bytes of the file, in fresh memory that a sanitizer guards on both ends. */
static uint8_t *read_bytes(FILE *f, size_t n)
{
    uint8_t *p = malloc(n);
    assert_non_null(p);
    assert_int_equal(fread(p, 1, n, f), n);
    return p;
}

/* tests/data/make_blocks.py wrote the file with the independent reference reader. */
static void every_format_reads_bit_for_bit_as_the_reference_does(void **state)
{
    (void)state;
    FILE *f = fopen("tests/data/blocks.bin", "rb");
    assert_non_null(f);
    uint32_t head[2];
    int formats = 0;
    while (fread(head, sizeof head, 1, f) == 1) {
        const struct block_info *info = block_info(head[0]);
        assert_non_null(info);
        assert_int_not_equal(info->values, 0);
        size_t bytes = block_bytes((enum block_type)head[0], head[1]);
        uint8_t *blocks = read_bytes(f, bytes);
        uint8_t *wanted = read_bytes(f, 4 * (size_t)head[1]);
        float *got = malloc(4 * (size_t)head[1]);
        assert_non_null(got);
        block_dequant((enum block_type)head[0], blocks, got, head[1]);
        for (size_t i = 0; i < head[1]; i++) {
            float w;
            memcpy(&w, wanted + 4 * i, 4);
            if (bits_of(got[i]) != bits_of(w))
                fail_msg("%s value %zu is %.9g, the reference says %.9g", info->name, i, (double)got[i], (double)w);
        }
        free(got);
        free(wanted);
        free(blocks);
        formats++;
    }
    fclose(f);
    assert_int_equal(formats, 16);
}

static void blocks_may_lie_at_any_address(void **state)
{
    (void)state;
    static const uint32_t types[] = {BLOCK_F32, BLOCK_F16, BLOCK_BF16, BLOCK_Q8_0, BLOCK_Q5_0, BLOCK_Q4_K, BLOCK_IQ4_XS};
    for (size_t k = 0; k < sizeof types / sizeof types[0]; k++) {
        uint8_t even[256] __attribute__((aligned(8))), odd[257] __attribute__((aligned(8)));
        for (size_t i = 0; i < sizeof even; i++)
            even[i] = odd[i + 1] = (uint8_t)(i * 37 % 101); /* no byte pair is an infinite half */
        float a[256], b[256];
        size_t n = block_info(types[k])->values;
        block_dequant((enum block_type)types[k], even, a, n);
        block_dequant((enum block_type)types[k], odd + 1, b, n);
        assert_memory_equal(a, b, n * sizeof a[0]);
    }
}

static void mxfp4_scales_reach_subnormals_and_infinity(void **state)
{
    (void)state;
    uint8_t block[17] = {0};
    float x[32];
    memset(block + 1, 0x1F, 16); /* low nibble 15 = -6, high nibble 1 = 0.5 */
    block_dequant(BLOCK_MXFP4, block, x, 32);
    assert_true(x[0] == -6 * 0x1p-127f && x[16] == 0x1p-128f);
    block[0] = 255; /* 2^128 */
    block_dequant(BLOCK_MXFP4, block, x, 32);
    assert_true(isinf(x[0]) && x[0] < 0 && x[16] == 0x1p127f);
}

static void every_half_survives_the_way_to_f32_and_back(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 65536; h++) {
        float x = f16_to_f32((uint16_t)h);
        if ((h & 0x7C00) == 0x7C00 && (h & 0x3FF)) {
            assert_true(isnan(x) && isnan(f16_to_f32(f32_to_f16(x))));
            continue;
        }
        int exponent = (int)(h >> 10 & 31), fraction = (int)(h & 0x3FF);
        double wanted = exponent == 31 ? (double)INFINITY : exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
        assert_true((double)fabsf(x) == wanted && !signbit(x) == !(h & 0x8000));
        assert_int_equal(f32_to_f16(x), h);
    }
}

static void halves_round_to_nearest_and_ties_to_even(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 0x7C00; h++) {
        /* The upper neighbour of the largest half would be 65536: from halfway on, infinity. */
        float low = f16_to_f32((uint16_t)h), high = h == 0x7BFF ? 65536.f : f16_to_f32((uint16_t)(h + 1));
        float middle = low + (high - low) / 2; /* exact in f32 */
        assert_int_equal(f32_to_f16(middle), h % 2 ? h + 1 : h);
        assert_int_equal(f32_to_f16(nextafterf(middle, 0)), h);
        assert_int_equal(f32_to_f16(nextafterf(middle, INFINITY)), h + 1);
        assert_int_equal(f32_to_f16(-middle), 0x8000 | (h % 2 ? h + 1 : h));
    }
    assert_int_equal(f32_to_f16(1e30f), 0x7C00);
    assert_int_equal(f32_to_f16(-INFINITY), 0xFC00);
    assert_int_equal(f32_to_f16(1e-30f), 0);
}

static void types_are_known_known_by_name_or_unknown(void **state)
{
    (void)state;
    static const struct {
        uint32_t type;
        const char *name;
        unsigned values, bytes;
    } known[] = {{0, "F32", 1, 4},       {1, "F16", 1, 2},       {30, "BF16", 1, 2},     {8, "Q8_0", 32, 34},    {2, "Q4_0", 32, 18},
                 {3, "Q4_1", 32, 20},    {6, "Q5_0", 32, 22},    {7, "Q5_1", 32, 24},    {10, "Q2_K", 256, 84},  {11, "Q3_K", 256, 110},
                 {12, "Q4_K", 256, 144}, {13, "Q5_K", 256, 176}, {14, "Q6_K", 256, 210}, {20, "IQ4_NL", 32, 18}, {23, "IQ4_XS", 256, 136},
                 {39, "MXFP4", 32, 17},  {21, "IQ3_S", 0, 0},    {18, "IQ3_XXS", 0, 0},  {16, "IQ2_XXS", 0, 0},  {40, "NVFP4", 0, 0}};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        const struct block_info *info = block_info(known[i].type);
        assert_non_null(info);
        assert_string_equal(info->name, known[i].name);
        assert_int_equal(info->values, known[i].values);
        assert_int_equal(info->bytes, known[i].bytes);
    }
    static const uint32_t never[] = {4, 5, 31, 32, 33, 36, 37, 38, 43, 1000, UINT32_MAX};
    for (size_t i = 0; i < sizeof never / sizeof never[0]; i++)
        assert_null(block_info(never[i]));
    assert_int_equal(block_bytes(BLOCK_Q4_K, 2048), 1152);
    assert_int_equal(block_bytes(BLOCK_F32, 3), 12);
    assert_int_equal(block_bytes(BLOCK_Q8_0, 0), 0);
}

static float q8_0_scale(const uint8_t *block)
{
    uint16_t half;
    memcpy(&half, block, sizeof half);
    return f16_to_f32(half);
}

static void q8_0_keeps_every_value_to_half_a_step_of_a_scale_that_fits_the_largest(void **state)
{
    (void)state;
    uint64_t random = 1;
    for (int round = 0; round < 2000; round++) {
        float x[64], back[64], magnitude = ldexpf(1, round % 28 - 6);
        uint8_t block[2 * 34], again[2 * 34];
        for (int i = 0; i < 64; i++) {
            random = random * 6364136223846793005U + 1442695040888963407U;
            x[i] = magnitude * ((float)(random >> 40) / 8388608.0F - 1);
        }
        block_quant_q8_0(x, 64, block);
        block_dequant(BLOCK_Q8_0, block, back, 64);
        for (int b = 0; b < 2; b++) {
            const float d = q8_0_scale(block + 34 * b);
            float most = 0;
            int most_q = 0;
            for (int i = 32 * b; i < 32 * b + 32; i++) {
                const int q = (int8_t)block[34 * b + 2 + i % 32];
                most = fmaxf(most, fabsf(x[i]));
                most_q = abs(q) > most_q ? abs(q) : most_q;
                assert_true(back[i] == d * (float)q);
                assert_true(fabs((double)back[i] - (double)x[i]) <= 0.5001 * (double)d);
            }
            assert_true(d == f16_to_f32(f32_to_f16(most / 127)));
            assert_int_equal(most_q, 127);
        }
        block_quant_q8_0(back, 64, again); /* what was rounded once stays as it is */
        assert_memory_equal(block, again, sizeof block);
    }
}

static void q8_0_rounds_ties_to_even_and_survives_tiny_huge_and_broken_values(void **state)
{
    (void)state;
    float x[32] = {0}, back[32];
    uint8_t memory[35], *block = memory + 1; /* at an odd address */
    x[0] = -63.5F;                           /* d = 0.5 */
    x[1] = 0.25F;
    x[2] = 0.75F;
    x[3] = -1.25F;
    x[4] = 63.3F;
    block_quant_q8_0(x, 32, block);
    static const int8_t wanted[5] = {-127, 0, 2, -2, 127};
    assert_true(q8_0_scale(block) == 0.5F);
    assert_memory_equal(block + 2, wanted, sizeof wanted);

    memset(x, 0, sizeof x);
    block_quant_q8_0(x, 32, block);
    for (int i = 0; i < 34; i++)
        assert_int_equal(block[i], 0);
    x[3] = -1e-30F; /* d rounds to zero */
    x[4] = 1e-31F;
    block_quant_q8_0(x, 32, block);
    for (int i = 0; i < 34; i++)
        assert_int_equal(block[i], 0);
    x[5] = 127 * 0x1.7p-24F; /* d rounds to the smallest f16, and the number is cut */
    block_quant_q8_0(x, 32, block);
    assert_true(q8_0_scale(block) == 0x1p-24F && (int8_t)block[2 + 5] == 127);

    const float broken[] = {NAN, INFINITY, -INFINITY, 3e38F};
    for (int k = 0; k < 4; k++) {
        memset(x, 0, sizeof x);
        x[0] = 1;
        x[31] = broken[k];
        block_quant_q8_0(x, 32, block);
        block_dequant(BLOCK_Q8_0, block, back, 32);
        for (int i = 0; i < 32; i++)
            assert_true(isnan(back[i]));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_format_reads_bit_for_bit_as_the_reference_does),
        cmocka_unit_test(blocks_may_lie_at_any_address),
        cmocka_unit_test(mxfp4_scales_reach_subnormals_and_infinity),
        cmocka_unit_test(every_half_survives_the_way_to_f32_and_back),
        cmocka_unit_test(halves_round_to_nearest_and_ties_to_even),
        cmocka_unit_test(q8_0_keeps_every_value_to_half_a_step_of_a_scale_that_fits_the_largest),
        cmocka_unit_test(q8_0_rounds_ties_to_even_and_survives_tiny_huge_and_broken_values),
        cmocka_unit_test(types_are_known_known_by_name_or_unknown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
