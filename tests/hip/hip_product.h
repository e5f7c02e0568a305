/* tests/hip/hip_product.h: one product of the GPU beside the CPU's, bit for bit: what the tests of mat-vec and of the tiles share. */
#ifndef BEDSIDE_TESTS_HIP_PRODUCT_H
#define BEDSIDE_TESTS_HIP_PRODUCT_H

#include <math.h>

#include "tests/hip/hip_groups.h"
#include "tests/unit/backend_fixture.h"

/* The CPU's weights and buffers have the same names as the GPU's. */
#define weight cpu_weight
#define buffer cpu_buffer
#include "engine/cpu/matmul_impl.h"
#undef weight
#undef buffer

static const enum block_type types[] = {BLOCK_Q4_K, BLOCK_Q5_K, BLOCK_Q6_K, BLOCK_Q8_0, BLOCK_Q4_0, BLOCK_F32, BLOCK_F16, BLOCK_BF16};
enum { N_TYPES = sizeof types / sizeof *types, MARGIN = 64 /* floats before and behind the results that stay as they are */ };

static inline bool same_float(float a, float b)
{
    return bits_of_f32(a) == bits_of_f32(b) || (isnan(a) && isnan(b));
}

/* Rows of very different size; row 2 is zero, row 3 holds a NaN, row 4 infinities, row 5 is subnormal in places, row 6 has ties for the largest
 * magnitude with either sign first, row 7 ends with a block whose scale is beyond f16, row 8
 * is halfway between two numbers throughout. */
static inline void random_rows(struct fixture_rng *rng, size_t n_rows, size_t n, float *x)
{
    for (size_t r = 0; r < n_rows; r++) {
        const double size = ldexp(1, fixture_below(rng, 40) - 30);
        for (size_t i = 0; i < n; i++)
            x[r * n + i] = r == 2 ? (i % 3 ? 0.0F : -0.0F) : (float)(size * fixture_normal(rng));
        float *row = x + r * n;
        if (r == 3)
            row[n / 2] = NAN;
        if (r == 4)
            row[n - 1] = INFINITY, row[0] = -INFINITY;
        for (size_t i = 0; r == 5 && i < n; i++)
            row[i] = (float)ldexp(fixture_normal(rng), -130 - (int)(i / 32 % 24));
        for (size_t i = 0; r == 6 && i + 7 < n; i += 7)
            row[i] = (float)(fixture_below(rng, 2) ? 9 * size : -9 * size);
        for (size_t i = n > 32 ? n - 32 : 0; r == 7 && i < n; i++)
            row[i] = (float)(1e30 * fixture_normal(rng));
        for (size_t i = 0; r == 8 && i < n; i++)
            row[i] = (float)ldexp(i % 32 == 9 ? 127 : fixture_below(rng, 254) - 126.5, 3);
    }
}

static inline void *sent(const void *bytes, size_t n)
{
    struct error err = {""};
    void *p = hip_device_alloc(hip_group.dev, n, &err);
    if (!p)
        fail_msg("%s", err.text);
    hip_device_write(hip_group.dev, p, bytes, n);
    return p;
}

static inline void fetch(void *to, const void *from, size_t n)
{
    struct error err = {""};
    assert_ok(hip_device_sync(hip_group.dev, &err), err);
    assert_ok(hip_device_read(hip_group.dev, to, from, n, &err), err);
}

/* y [n_rows][n_out] of the CPU. */
static inline void product_on_cpu(enum block_type type, const uint8_t *w, int n_in, int n_out, const uint8_t *act, size_t act_stride, int n_rows,
                                  float *y, bool add)
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

typedef void (*hip_product_fn)(struct hip *h, const struct weight *w, const void *act, int n_rows, float *y, bool add);

/* Random rows times the matrix [n_out][n_in] of a file, on both, stored or added to random values. */
static inline void check_against_cpu(hip_product_fn product, enum block_type type, const uint8_t *file, int n_in, int n_out, int n_rows, bool add,
                                     struct fixture_rng *rng)
{
    const size_t file_row = block_bytes(type, (size_t)n_in), dev_row = hip_layout_row_stride(type, (size_t)n_in), outs = (size_t)n_out;
    const size_t stride = hip_act_row_bytes(hip_act_of(type), n_in), n_y = (size_t)n_rows * outs + 2 * MARGIN;
    assert_int_equal(stride, act_row_bytes(act_kind_of(type), n_in));
    uint8_t *rows = calloc(outs, dev_row), *act = aligned_alloc(64, stride * (size_t)n_rows);
    float *x = malloc((size_t)n_rows * (size_t)n_in * sizeof *x), *want = malloc(n_y * sizeof *want), *got = malloc(n_y * sizeof *got);
    assert_true(rows && act && x && want && got);
    random_rows(rng, (size_t)n_rows, (size_t)n_in, x);
    for (size_t o = 0; o < outs; o++)
        hip_layout_row(type, file + o * file_row, (size_t)n_in, rows + o * dev_row);
    memset(act, 0xff, stride * (size_t)n_rows); /* NaN: what lies between the rows must not be used */
    for (size_t r = 0; r < (size_t)n_rows; r++)
        act_quantise(ISA_PLAIN, act_kind_of(type), x + r * (size_t)n_in, n_in, act + r * stride);
    for (size_t i = 0; i < n_y; i++)
        want[i] = got[i] = (float)fixture_normal(rng);

    /* Nothing lies behind the last weight row or the last activation: the stand-ins report a read beyond an allocation. */
    void *d_w = sent(rows, dev_row * outs), *d_x = sent(act, stride * (size_t)n_rows);
    float *d_y = sent(got, n_y * sizeof *got);
    struct hip h = {.device = hip_group.dev};
    const struct weight w = {
        .gpu = {.data = d_w, .row_stride = dev_row, .mat_stride = dev_row * outs, .type = (int32_t)type, .n_in = n_in, .n_out = n_out, .n_mats = 1},
        .name = "w"};
    product(&h, &w, d_x, n_rows, d_y + MARGIN, add);
    fetch(got, d_y, n_y * sizeof *got);
    product_on_cpu(type, file, n_in, n_out, act, stride, n_rows, want + MARGIN, add);
    for (size_t i = 0; i < n_y; i++) {
        const ptrdiff_t at = (ptrdiff_t)i - MARGIN;
        if (!same_float(got[i], want[i]))
            fail_msg("%s [%d][%d], %d rows, add %d: row %td output %td is %.9g, the CPU's %.9g", block_info(type)->name, n_out, n_in, n_rows, add,
                     at / n_out, at % n_out, (double)got[i], (double)want[i]);
    }
    hip_device_free(hip_group.dev, d_w);
    hip_device_free(hip_group.dev, d_x);
    hip_device_free(hip_group.dev, d_y);
    free(rows);
    free(act);
    free(x);
    free(want);
    free(got);
}

#endif
