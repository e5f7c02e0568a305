/* The f32 row functions (engine/cpu/rows.h): exact against double-precision loops within their stated errors, and the same bits from every
 * instruction set this machine has. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "engine/cpu/matmul_impl.h"
#include "engine/cpu/rows.h"
#include "tests/unit/backend_fixture.h"

enum { MOST = 5000 };

static void fill(struct fixture_rng *rng, float *x, int n)
{
    for (int i = 0; i < n; i++)
        x[i] = (float)fixture_normal(rng);
}

/* The tables to compare: plain first. Returns how many this machine can run. */
static int tables(const struct rows_ops **list)
{
    int n = 0;
    for (int isa = ISA_PLAIN; isa <= (int)isa_best(); isa++)
        list[n++] = rows_for((enum isa)isa);
    return n;
}

/* Distance in units of the last place of the correctly rounded value. */
static double ulps(float got, double want)
{
    const float rounded = (float)want;
    return fabs((double)got - want) / ((double)nextafterf(rounded, INFINITY) - (double)rounded);
}

static void exp_is_within_two_ulp_and_ends_in_zero_and_a_finite_number(void **state)
{
    (void)state;
    const struct rows_ops *list[3];
    const int n_tables = tables(list);
    for (int t = 0; t < n_tables; t++) {
        float x[1000], y[1000];
        for (int from = 0; from < 174500; from += 1000) { /* -86.5 .. 88 in steps of 1/1000, and off the grid */
            for (int i = 0; i < 1000; i++)
                x[i] = fminf(-86.5F + (float)(from + i) * 0.00100003F, 88.0F);
            list[t]->exp(x, 1000, y);
            for (int i = 0; i < 1000; i++)
                if (ulps(y[i], exp((double)x[i])) > 2)
                    fail_msg("%g: e^%.9g is %.9g", ulps(y[i], exp((double)x[i])), (double)x[i], (double)y[i]);
        }
        const float ends[] = {-86.6F, -1e30F, -INFINITY, 89.0F, INFINITY, 0.0F, -0.0F, NAN};
        list[t]->exp(ends, 8, y);
        for (int i = 0; i < 3; i++)
            assert_true(y[i] == 0.0F);
        assert_true(y[3] == y[4] && y[3] > 1.6e38F && isfinite(y[3]));
        assert_true(y[5] == 1.0F && y[6] == 1.0F); /* a maximum that stays must not change a running softmax */
        assert_true(isnan(y[7]));
    }
}

static void rms_and_l2_norms_are_those_of_the_specification(void **state)
{
    (void)state;
    struct fixture_rng rng = {1};
    const struct rows_ops *rows = rows_for(isa_best());
    for (int n = 1; n < 300; n += n < 40 ? 1 : 37) {
        float x[300], w[300], y[300];
        double squares = 0;
        fill(&rng, x, n);
        fill(&rng, w, n);
        for (int i = 0; i < n; i++)
            squares += (double)x[i] * (double)x[i];
        rows->rms_norm(x, w, 1e-3F, n, y);
        for (int i = 0; i < n; i++)
            assert_true(ulps(y[i], (double)x[i] / sqrt(squares / n + (double)1e-3F) * (double)w[i]) < 8);
        rows->l2_norm(x, 1e-6F, 0.25F, n);
        double length = 0;
        for (int i = 0; i < n; i++)
            length += (double)x[i] * (double)x[i];
        assert_true(fabs(sqrt(length) - 0.25) < 1e-6);
        float tiny[3] = {1e-9F, 0, 0};
        rows->l2_norm(tiny, 1e-6F, 1.0F, 3); /* divided by eps, not by its length */
        assert_true(fabs((double)tiny[0] - 1e-3) < 1e-9 && tiny[1] == 0.0F);
    }
}

static void f16_rows_convert_as_the_block_format_does(void **state)
{
    (void)state;
    const struct rows_ops *list[3];
    const int n_tables = tables(list);
    struct fixture_rng rng = {2};
    for (int n = 1; n < 50; n++) {
        float x[50], back[50];
        uint16_t half[50];
        fill(&rng, x, n);
        x[0] = n % 3 ? 65519.9F : 1e-7F; /* the largest that does not overflow; a subnormal */
        for (int t = 0; t < n_tables; t++) {
            list[t]->f16_store(x, n, half);
            list[t]->f16_load(half, n, back);
            for (int i = 0; i < n; i++) {
                assert_int_equal(half[i], f32_to_f16(x[i]));
                assert_true(back[i] == f16_to_f32(half[i]));
            }
        }
    }
}

static void q8_0_rows_are_the_bytes_and_numbers_of_the_block_format(void **state)
{
    (void)state;
    enum { VALUES = 96, BYTES = 3 * 34 };
    const struct rows_ops *list[3];
    const int n_tables = tables(list);
    struct fixture_rng rng = {12};
    for (int round = 0; round < 3000; round++) {
        float x[VALUES], back[VALUES], wanted_back[VALUES];
        uint8_t memory[BYTES + 2], wanted[BYTES], *blocks = memory + 1;
        const double spread = ldexp(1, round % 60 - 40); /* from d = 0 over subnormal ones to d = infinity */
        const float special[] = {0, NAN, INFINITY, -INFINITY, 3e38F, 127, -127, 1e-42F};
        for (int i = 0; i < VALUES; i++)
            x[i] = (float)(spread * (round % 3 ? fixture_normal(&rng) : fixture_below(&rng, 255) - 127)); /* every third: ties and halves */
        if (round % 5 == 0)
            x[fixture_below(&rng, VALUES)] = special[fixture_below(&rng, 8)];
        if (round % 7 == 0)
            memset(x + 32, 0, 32 * sizeof *x);
        block_quant_q8_0(x, VALUES, wanted);
        block_dequant(BLOCK_Q8_0, wanted, wanted_back, VALUES);
        for (int t = 0; t < n_tables; t++) {
            memset(memory, 0x5a, sizeof memory);
            list[t]->q8_0_store(x, VALUES, blocks);
            assert_memory_equal(blocks, wanted, BYTES);
            assert_true(memory[0] == 0x5a && memory[BYTES + 1] == 0x5a);
            list[t]->q8_0_load(blocks, VALUES, back);
            for (int i = 0; i < VALUES; i++)
                assert_true(back[i] == wanted_back[i] || (isnan(back[i]) && isnan(wanted_back[i])));
        }
    }
}

static void dots_and_gemm_sum_what_they_say(void **state)
{
    (void)state;
    struct fixture_rng rng = {3};
    const struct rows_ops *rows = rows_for(isa_best());
    float *a = malloc(MOST * sizeof *a), *b = malloc(MOST * sizeof *b), *out = malloc(MOST * sizeof *out), *old = malloc(MOST * sizeof *old);
    assert_true(a && b && out && old);
    for (int round = 0; round < 400; round++) {
        const int na = 1 + fixture_below(&rng, 11), nb = 1 + fixture_below(&rng, 37), n = 1 + fixture_below(&rng, 70);
        const size_t ld_a = (size_t)(n + fixture_below(&rng, 5)), ld_b = (size_t)(n + fixture_below(&rng, 5)), ld = (size_t)(nb + 3);
        fill(&rng, a, MOST);
        fill(&rng, b, MOST);
        fill(&rng, out, MOST);
        memcpy(old, out, MOST * sizeof *out);
        rows->dots(a, ld_a, na, b, ld_b, nb, n, out, ld);
        for (int i = 0; i < na; i++)
            for (int j = 0; j < (int)ld; j++) {
                const size_t at = (size_t)i * ld + (size_t)j;
                double sum = 0;
                for (int k = 0; k < n; k++)
                    sum += (double)a[(size_t)i * ld_a + (size_t)k] * (double)b[(size_t)j * ld_b + (size_t)k];
                if (j >= nb)
                    assert_true(out[at] == old[at]); /* nothing beyond the columns */
                else
                    assert_true(fabs((double)out[at] - sum) < 1e-4);
            }

        const int n_out = 1 + fixture_below(&rng, 150), n_in = 1 + fixture_below(&rng, 20);
        const size_t ld_m = (size_t)(n_out + fixture_below(&rng, 3)), ld_y = (size_t)(n_out + 2);
        const float keep = round % 3 == 0 ? 0.0F : round % 3 == 1 ? 1.0F : 0.75F;
        memcpy(old, out, MOST * sizeof *out);
        if (keep == 0.0F)
            for (int i = 0; i < MOST; i++)
                out[i] = old[i] = NAN; /* not read */
        rows->gemm(a, (size_t)n_in + 1, na, n_in, b, ld_m, n_out, out, ld_y, keep);
        for (int i = 0; i < na; i++)
            for (int j = 0; j < (int)ld_y; j++) {
                const size_t at = (size_t)i * ld_y + (size_t)j;
                if (j >= n_out) {
                    assert_memory_equal(&out[at], &old[at], sizeof *out);
                    continue;
                }
                double sum = keep == 0.0F ? 0 : (double)keep * (double)old[at];
                for (int k = 0; k < n_in; k++)
                    sum += (double)a[(size_t)i * ((size_t)n_in + 1) + (size_t)k] * (double)b[(size_t)k * ld_m + (size_t)j];
                assert_true(fabs((double)out[at] - sum) < 1e-4);
            }
    }
    free(a);
    free(b);
    free(out);
    free(old);
}

/* Everything one table makes of one seed, as a long row of floats. */
static int everything(const struct rows_ops *rows, uint64_t seed, float *out)
{
    struct fixture_rng rng = {seed};
    static float x[MOST], y[MOST], z[MOST];
    float *const start = out;
    const int n = 1 + fixture_below(&rng, 200), na = 1 + fixture_below(&rng, 9), nb = 1 + fixture_below(&rng, 20);
    fill(&rng, x, MOST);
    fill(&rng, y, MOST);
    for (int i = 0; i < n; i++)
        x[i] *= (float)(1 + fixture_below(&rng, 30)); /* all branches of exp */

    rows->exp(x, n, out), out += n;
    rows->rms_norm(x, y, 1e-6F, n, out), out += n;
    rows->silu_mul(x, y, n, out), out += n;
    memcpy(out, x, (size_t)n * sizeof *x);
    rows->l2_norm(out, 1e-6F, 0.1F, n), out += n;
    memcpy(out, x, (size_t)n * sizeof *x);
    rows->add(out, y, n);
    rows->axpy(out, -1.7F, y + n, n), out += n;
    memcpy(out, x, (size_t)n * sizeof *x);
    rows->rope(out, y, y + n, n / 2), out += n;
    rows->conv_silu((const float *const[]){x, y, x + n, y + n}, x + 7, 231, 4, n, out), out += n;
    rows->dots(x, 3, na, y, 5, nb, n, out, (size_t)nb), out += na * nb;
    rows->gemm(x, 41, na, nb, y, (size_t)n, n, out, (size_t)n, 0.0F), out += na * n;

    /* one cell of DeltaNet, 20 rows */
    float sums[GRID] = {0}, to_u[GRID], to_o[GRID];
    for (int t = 1; t < GRID; t++)
        sums[t] = sums[t - 1] - fabsf(y[t]) * 0.3F;
    float *us = out, *o = out + 20 * n;
    for (int t = 0; t < 20; t++) {
        const float decay = rows->delta_factors(x + GRID * t, y + GRID * t, sums, t, 0.3F, to_u, to_o);
        rows->delta_row(x + t, y + t, x + t + 200, 0.3F, decay, to_u, to_o, t, us, (size_t)n, n, o + t * n);
    }
    out += 40 * n;

    /* three pages of attention in two parts, then the sum */
    float m[9], s[9], part_m[9], part_s[9];
    int limit[9];
    for (int i = 0; i < na; i++) {
        m[i] = part_m[i] = -INFINITY;
        s[i] = part_s[i] = 0;
        limit[i] = GRID - 2 * na + 2 * (i / 2);
    }
    const int dim = 1 + n % 70;
    float *acc = out, *part = out + na * dim;
    memset(acc, 0, (size_t)(2 * na * dim) * sizeof *acc);
    struct attn_page page = {
        .q = x, .k = y, .v = x + 100, .nq = na, .n = dim, .limit = limit, .scale = 0.2F, .scores = z, .m = m, .s = s, .acc = acc};
    rows->attn_page(&page);
    page.k = y + 60;
    page.v = x + 70;
    rows->attn_page(&page);
    page.k = x + 5;
    page.v = y + 70;
    page.m = part_m;
    page.s = part_s;
    page.acc = part;
    rows->attn_page(&page);
    rows->attn_merge(m, s, acc, part_m, part_s, part, na, dim);
    for (int i = 0; i < na; i++)
        rows->attn_finish(acc + i * dim, s[i], i % 2 ? y : NULL, dim, part + i * dim);
    out += 2 * na * dim;
    memcpy(out, m, (size_t)na * sizeof *m), out += na;
    memcpy(out, s, (size_t)na * sizeof *s), out += na;
    return (int)(out - start);
}

static void every_instruction_set_gives_the_same_bits(void **state)
{
    (void)state;
    const struct rows_ops *list[3];
    const int n_tables = tables(list);
    enum { ROOM = 20000 };
    float *want = malloc(ROOM * sizeof *want), *got = malloc(ROOM * sizeof *got);
    assert_non_null(want);
    assert_non_null(got);
    for (uint64_t seed = 1; seed < 300; seed++) {
        const int n = everything(list[0], seed, want);
        assert_in_range(n, 1, ROOM);
        for (int i = 0; i < n; i++)
            assert_true(want[i] == want[i]); /* no NaN */
        for (int t = 1; t < n_tables; t++) {
            assert_int_equal(everything(list[t], seed, got), n);
            for (int i = 0; i < n; i++)
                if (bits_of_f32(want[i]) != bits_of_f32(got[i]))
                    fail_msg("seed %d, table %d: value %d of %d is %.9g, not %.9g", (int)seed, t, i, n, (double)got[i], (double)want[i]);
        }
    }
    free(want);
    free(got);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exp_is_within_two_ulp_and_ends_in_zero_and_a_finite_number),
        cmocka_unit_test(rms_and_l2_norms_are_those_of_the_specification),
        cmocka_unit_test(f16_rows_convert_as_the_block_format_does),
        cmocka_unit_test(q8_0_rows_are_the_bytes_and_numbers_of_the_block_format),
        cmocka_unit_test(dots_and_gemm_sum_what_they_say),
        cmocka_unit_test(every_instruction_set_gives_the_same_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
