/* Promise: the tiled products of prefill give the bits of the CPU's (engine/cpu/matmul.h), for every weight type, any number of rows and of outputs, stored
 * or added, and touch nothing beside their results; so a row does not change with the number of rows beside it.
 *
 * Runs the kernels on the CPU (the shim) and, where it is built, as machine code of three GPU generations (the emulator). */
#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <unistd.h>

#include "hip/bundle.h"
#include "hip/hip_impl.h"
#include "tests/hip/hip_test.h"
#include "tests/unit/backend_fixture.h"

/* The CPU's weights and buffers have the same names as the GPU's. */
#define weight cpu_weight
#define buffer cpu_buffer
#include "engine/cpu/matmul_impl.h"
#undef weight
#undef buffer

static const enum block_type types[] = {BLOCK_Q4_K, BLOCK_Q5_K, BLOCK_Q6_K, BLOCK_Q8_0, BLOCK_Q4_0, BLOCK_F32, BLOCK_F16, BLOCK_BF16};
enum { N_TYPES = sizeof types / sizeof *types, MARGIN = 64 };

static struct hip_device *dev; /* of the group that runs */
static bool few;               /* every third case: for the emulator, unless BEDSIDE_HIP_TESTS=all */
static int turn;               /* which third */

/* A finite f16 or, in its upper half, bf16: of either sign, from subnormals to 0.1 or so, now and then zero. */
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

/* Rows of very different size; the third is zero, the fifth holds a NaN. */
static void random_rows(struct fixture_rng *rng, size_t n_rows, size_t n, float *x)
{
    for (size_t r = 0; r < n_rows; r++) {
        double size = ldexp(1, fixture_below(rng, 30) - 20);
        for (size_t i = 0; i < n; i++)
            x[r * n + i] = r == 2 ? 0 : (float)(size * fixture_normal(rng));
        if (r == 4)
            x[r * n + n / 2] = NAN;
    }
}

/* y [n_rows][n_out] of the CPU. */
static void on_cpu(enum block_type type, const uint8_t *w, int n_in, int n_out, const uint8_t *act, size_t act_stride, int n_rows, float *y, bool add)
{
    struct cpu_weight cw = {.desc = {.name = "w", .type = type, .n_in = n_in, .n_out = n_out, .n_mats = 1, .data = w},
                            .row_bytes = block_bytes(type, (size_t)n_in)};
    const void **x = calloc((size_t)n_rows, sizeof *x);
    float **out = calloc((size_t)n_rows, sizeof *out);
    void *scratch = aligned_alloc(64, lines(matmul_scratch_bytes(&cw)));
    assert_true(x && out && scratch);
    for (int r = 0; r < n_rows; r++) {
        x[r] = act + (size_t)r * act_stride;
        out[r] = y + (size_t)r * (size_t)n_out;
    }
    matmul(ISA_PLAIN, &cw, 0, 0, n_out, x, out, n_rows, add, scratch);
    free(x);
    free(out);
    free(scratch);
}

/* One product, compared with the CPU's. */
static void check(enum block_type type, int n_in, int n_out, int n_rows, bool add, uint64_t seed)
{
    if (few && turn++ % 3 != 0)
        return;
    struct fixture_rng rng = {seed};
    struct error err = {0};
    size_t file_row = block_bytes(type, (size_t)n_in), dev_row = hip_layout_row_stride(type, (size_t)n_in);
    size_t act_stride = act_row_bytes(act_kind_of(type), n_in), n_y = (size_t)n_rows * (size_t)n_out;
    assert_int_equal(act_stride, hip_act_row_bytes(hip_act_of(type), n_in));

    uint8_t *file = malloc(file_row * (size_t)n_out), *rows = malloc(dev_row * (size_t)n_out), *act = aligned_alloc(64, act_stride * (size_t)n_rows);
    float *x = malloc((size_t)n_rows * (size_t)n_in * sizeof *x), *want = malloc((n_y + 2 * MARGIN) * sizeof *want),
          *got = malloc((n_y + 2 * MARGIN) * sizeof *got);
    assert_true(file && rows && act && x && want && got);
    random_blocks(&rng, type, (size_t)n_in * (size_t)n_out, file);
    random_rows(&rng, (size_t)n_rows, (size_t)n_in, x);
    for (size_t o = 0; o < (size_t)n_out; o++)
        hip_layout_row(type, file + o * file_row, (size_t)n_in, rows + o * dev_row);
    memset(act, 0, act_stride * (size_t)n_rows);
    for (size_t r = 0; r < (size_t)n_rows; r++)
        act_quantise(ISA_PLAIN, act_kind_of(type), x + r * (size_t)n_in, n_in, act + r * act_stride);
    for (size_t i = 0; i < n_y + 2 * MARGIN; i++)
        want[i] = got[i] = (float)fixture_normal(&rng);

    /* Nothing lies behind the last weight row or the last activation: the stand-ins report a read beyond an allocation. */
    void *d_w = hip_device_alloc(dev, dev_row * (size_t)n_out, &err), *d_x = hip_device_alloc(dev, act_stride * (size_t)n_rows, &err);
    float *d_y = hip_device_alloc(dev, (n_y + 2 * MARGIN) * sizeof *got, &err);
    assert_true(d_w && d_x && d_y);
    hip_device_write(dev, d_w, rows, dev_row * (size_t)n_out);
    hip_device_write(dev, d_x, act, act_stride * (size_t)n_rows);
    hip_device_write(dev, d_y, got, (n_y + 2 * MARGIN) * sizeof *got);

    struct hip h = {.dev = dev};
    struct weight w = {.gpu = {.data = d_w,
                               .row_stride = dev_row,
                               .mat_stride = dev_row * (size_t)n_out,
                               .type = (int32_t)type,
                               .n_in = n_in,
                               .n_out = n_out,
                               .n_mats = 1},
                       .name = "w"};
    hip_tile(&h, &w, d_x, n_rows, d_y + MARGIN, add);
    assert_ok(hip_device_read(dev, got, d_y, (n_y + 2 * MARGIN) * sizeof *got, &err), err);
    assert_ok(hip_device_sync(dev, &err), err);
    on_cpu(type, file, n_in, n_out, act, act_stride, n_rows, want + MARGIN, add);

    for (size_t i = 0; i < n_y + 2 * MARGIN; i++) {
        if (bits_of_f32(got[i]) != bits_of_f32(want[i]) && !(isnan(got[i]) && isnan(want[i]))) {
            ptrdiff_t at = (ptrdiff_t)i - MARGIN;
            fail_msg("%s [%d][%d], %d rows, add %d: row %td output %td is %.9g, the CPU's %.9g", block_info(type)->name, n_out, n_in, n_rows, add,
                     at / n_out, at % n_out, (double)got[i], (double)want[i]);
        }
    }
    hip_device_free(dev, d_w);
    hip_device_free(dev, d_x);
    hip_device_free(dev, d_y);
    free(file);
    free(rows);
    free(act);
    free(x);
    free(want);
    free(got);
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

static int open_library(const char *kind)
{
    struct error err = {0};
    int status = hip_device_open(&dev, hip_test_library(kind), 0, &err);
    if (status != 0)
        fprintf(stderr, "%s: %s\n", kind, err.text);
    return status;
}

static int open_shim(void **state)
{
    (void)state;
    few = false;
    return open_library("shim");
}

static int open_emulator(const char *arch)
{
    const char *choice = getenv("BEDSIDE_HIP_TESTS");
    few = !choice || strcmp(choice, "all") != 0;
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
        cmocka_unit_test(rows_9_to_130),
        cmocka_unit_test(any_number_of_outputs),
        cmocka_unit_test(any_length_of_row),
    };
    int failed = cmocka_run_group_tests_name("hip_tile on the shim", tests, open_shim, close_device);
    const struct {
        const char *arch, *group;
        CMFixtureFunction open;
    } gpus[] = {{"gfx1152", "hip_tile on gfx1152", open_gfx1152},
                {"gfx1100", "hip_tile on gfx1100", open_gfx1100},
                {"gfx1201", "hip_tile on gfx1201", open_gfx1201}};
    for (size_t i = 0; i < sizeof gpus / sizeof *gpus && access(hip_test_library("emu"), R_OK) == 0; i++) {
        if (hip_bundle_has(gpus[i].arch))
            failed += cmocka_run_group_tests_name(gpus[i].group, tests, gpus[i].open, close_device);
        else
            fprintf(stderr, "%s: this build has no code for it (HIP_TARGETS)\n", gpus[i].group);
    }
    return failed;
}
