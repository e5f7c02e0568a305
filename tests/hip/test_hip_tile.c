/* Promise: the tiled products of prefill give the bits of the CPU's (engine/cpu/matmul.h), for every weight type, any number of rows and of outputs, stored
 * or added, and touch nothing beside their results; so a row does not change with the number of rows beside it.
 *
 * Runs the kernels on the CPU (the shim) and, where it is built, as machine code of three GPU generations (the emulator). */
#include "tests/hip/hip_product.h"

static int turn; /* on the emulator only every third case is run, on each GPU other ones, unless BEDSIDE_HIP_TESTS=all */

/* A finite f16 of either sign, from subnormals to 0.06 or so, now and then zero. */
static uint16_t random_f16(struct fixture_rng *rng)
{
    uint64_t r = fixture_next(rng);
    return r % 16 == 0 ? 0 : (uint16_t)((r >> 8 & 0x8000) | (r >> 24) % 0x2c00);
}

/* Random blocks whose scales are finite; every value of every other field occurs. */
static void random_blocks(struct fixture_rng *rng, enum block_type type, size_t n, uint8_t *dst)
{
    const struct block_info *info = block_info(type);
    size_t bytes = block_bytes(type, n);
    for (size_t i = 0; i < bytes; i++)
        dst[i] = (uint8_t)fixture_next(rng);
    for (size_t at = 0; at < bytes; at += info->bytes) {
        uint16_t d = random_f16(rng), dmin = random_f16(rng);
        switch (type) {
        case BLOCK_Q4_K:
        case BLOCK_Q5_K:
            memcpy(dst + at, &d, 2);
            memcpy(dst + at + 2, &dmin, 2);
            break;
        case BLOCK_Q6_K:
            memcpy(dst + at + 208, &d, 2);
            break;
        case BLOCK_Q8_0:
        case BLOCK_Q4_0:
            memcpy(dst + at, &d, 2);
            break;
        case BLOCK_F32: {
            float f = (float)fixture_normal(rng);
            memcpy(dst + at, &f, 4);
            break;
        }
        case BLOCK_BF16: {
            uint32_t bits = bits_of_f32((float)fixture_normal(rng)) >> 16;
            memcpy(dst + at, &bits, 2);
            break;
        }
        default:
            memcpy(dst + at, &d, 2);
        }
    }
}

static void check(enum block_type type, int n_in, int n_out, int n_rows, bool add, uint64_t seed)
{
    if (!hip_group.on_shim && !hip_in_full() && turn++ % 3 != 0)
        return;
    struct fixture_rng rng = {seed};
    uint8_t *file = malloc(block_bytes(type, (size_t)n_in) * (size_t)n_out);
    assert_non_null(file);
    random_blocks(&rng, type, (size_t)n_in * (size_t)n_out, file);
    check_against_cpu(hip_tile, type, file, n_in, n_out, n_rows, add, &rng);
    free(file);
}

static bool in_256s(enum block_type type)
{
    return block_info(type)->values == 256;
}

/* Each number of 16-row tiles in a workgroup, its edges, more than one workgroup. */
static void rows_9_to_130(void **state)
{
    (void)state;
    static const int counts[] = {9, 15, 16, 17, 32, 33, 47, 64, 65, 130};
    for (int t = 0; t < N_TYPES; t++) {
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
            check(types[t], in_256s(types[t]) ? 512 : 96, 33, counts[i], i % 2, 100 * (uint64_t)t + i);
    }
}

/* One output, odd numbers, just past a workgroup's. */
static void any_number_of_outputs(void **state)
{
    (void)state;
    static const int counts[] = {1, 15, 63, 65, 127, 129, 261};
    for (int t = 0; t < N_TYPES; t++) {
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
            check(types[t], in_256s(types[t]) ? 256 : 64, counts[i], i % 2 ? 19 : 10, i % 2 == 0, 7000 + 100 * (uint64_t)t + i);
    }
}

/* Rows shorter than, as long as and longer than what is worked on at a time, odd numbers of blocks. */
static void any_length_of_row(void **state)
{
    (void)state;
    static const int wide[] = {256, 768, 1280}, narrow[] = {32, 160, 224, 256, 288, 544}, any[] = {1, 15, 16, 20, 100, 259};
    for (int t = 0; t < N_TYPES; t++) {
        int values = block_info(types[t])->values;
        const int *list = values == 256 ? wide : values == 32 ? narrow : any;
        for (int i = 0; i < (values == 256 ? 3 : 6); i++)
            check(types[t], list[i], 20, 12 + 3 * i, i % 2, 14000 + 100 * (uint64_t)t + (uint64_t)i);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_9_to_130),
        cmocka_unit_test(any_number_of_outputs),
        cmocka_unit_test(any_length_of_row),
    };
    return HIP_RUN("hip_tile", tests, HIP_GPUS);
}
