/* engine/cpu/rows_impl.h: the functions of engine/cpu/rows.h, included once by each of rows_base.c, rows_avx2.c and rows_avx512.c.
 *
 * Loops are cut into tiles that keep their sums in registers. The tile sizes differ with the number of registers; what is added to what, and in
 * which order, does not. */
#include <math.h>
#include <string.h>

#include "engine/cpu/rows.h"
#include "engine/cpu/rows_vec.h"

#if defined(__AVX512F__)
enum { TILE_ROWS = 4, TILE_VECS = 4, WIDE_VECS = 8, DOT_A = 4, DOT_B = 4 }; /* of 32 registers */
#elif defined(__AVX2__)
enum { TILE_ROWS = 2, TILE_VECS = 2, WIDE_VECS = 2, DOT_A = 2, DOT_B = 2 }; /* a v16 takes two of 16 */
#else
enum { TILE_ROWS = 1, TILE_VECS = 1, WIDE_VECS = 1, DOT_A = 1, DOT_B = 1 };
#endif

/* Runs `statements` for each vector of 16 in 0 .. n-1, with `i` its first index and `part` its lanes. */
#define ROWS_EACH(n, statements)                                                                                                                     \
    do {                                                                                                                                             \
        for (int i = 0; i < (n); i += LANES) {                                                                                                       \
            const int part = (n)-i < LANES ? (n)-i : LANES;                                                                                          \
            statements                                                                                                                               \
        }                                                                                                                                            \
    } while (0)

ROWS_INLINE v16 load(const float *p, int part)
{
    return part == LANES ? v16_load(p) : v16_load_part(p, part);
}

ROWS_INLINE void store(float *p, v16 x, int part)
{
    if (part == LANES)
        v16_store(p, x);
    else
        v16_store_part(p, x, part);
}

static void rows_exp(const float *x, int n, float *y)
{
    ROWS_EACH(n, { store(y + i, v16_exp(load(x + i, part)), part); });
}

ROWS_INLINE float exp_of(float x)
{
    float lanes[LANES];
    v16_store(lanes, v16_exp(v16_set(x)));
    return lanes[0];
}

ROWS_INLINE float sum_of_squares(const float *x, int n)
{
    v16 sum = v16_set(0.0f);
    ROWS_EACH(n, {
        v16 v = load(x + i, part);
        sum = v16_fma(v, v, sum);
    });
    return v16_sum(sum);
}

static void rows_rms_norm(const float *x, const float *w, float eps, int n, float *y)
{
    v16 scale = v16_set(1.0f / sqrtf(sum_of_squares(x, n) / (float)n + eps));
    ROWS_EACH(n, { store(y + i, v16_mul(v16_mul(load(x + i, part), scale), load(w + i, part)), part); });
}

static void rows_l2_norm(float *x, float eps, float scale, int n)
{
    float length = sqrtf(sum_of_squares(x, n));
    v16 factor = v16_set(scale / (length > eps ? length : eps));
    ROWS_EACH(n, { store(x + i, v16_mul(load(x + i, part), factor), part); });
}

ROWS_INLINE v16 silu(v16 x)
{
    return v16_div(x, v16_one_plus_exp_minus(x));
}

static void rows_silu_mul(const float *gate, const float *x, int n, float *y)
{
    ROWS_EACH(n, { store(y + i, v16_mul(silu(load(gate + i, part)), load(x + i, part)), part); });
}

static void rows_add(float *y, const float *x, int n)
{
    ROWS_EACH(n, { store(y + i, v16_add(load(y + i, part), load(x + i, part)), part); });
}

static void rows_axpy(float *y, float a, const float *x, int n)
{
    v16 factor = v16_set(a);
    ROWS_EACH(n, { store(y + i, v16_fma(factor, load(x + i, part), load(y + i, part)), part); });
}

static void rows_rope(float *x, const float *cos, const float *sin, int half)
{
    ROWS_EACH(half, {
        v16 a = load(x + i, part);
        v16 b = load(x + half + i, part);
        v16 c = load(cos + i, part);
        v16 s = load(sin + i, part);
        store(x + i, v16_sub(v16_mul(a, c), v16_mul(b, s)), part);
        store(x + half + i, v16_add(v16_mul(a, s), v16_mul(b, c)), part);
    });
}

static void rows_f16_load(const uint16_t *x, int n, float *y)
{
    int i = 0;
    for (; i + LANES <= n; i += LANES)
        v16_store(y + i, v16_from_f16(x + i));
    for (; i < n; i++)
        y[i] = f16_to_f32(x[i]);
}

static void rows_f16_store(const float *x, int n, uint16_t *y)
{
    int i = 0;
    for (; i + LANES <= n; i += LANES)
        v16_to_f16(y + i, v16_load(x + i));
    for (; i < n; i++)
        y[i] = f32_to_f16(x[i]);
}

enum { Q8_0_VALUES = 32, Q8_0_BYTES = 34 };

static void rows_q8_0_load(const uint8_t *x, int n, float *y)
{
    for (int i = 0; i < n; i += Q8_0_VALUES, x += Q8_0_BYTES) {
        uint16_t half;
        memcpy(&half, x, sizeof half);
        const v16 d = v16_set(f16_scale(half));
        const int8_t *q = (const int8_t *)x + sizeof half;
        v16_store(y + i, v16_mul(d, v16_from_i8(q)));
        v16_store(y + i + LANES, v16_mul(d, v16_from_i8(q + LANES)));
    }
}

/* The largest magnitude of a block, compared as integers: infinities and NaNs come out on top. */
ROWS_INLINE float largest_of_block(const float *x)
{
    uint32_t bits[Q8_0_VALUES], top = 0;
    float value;
    memcpy(bits, x, sizeof bits);
    for (int i = 0; i < Q8_0_VALUES; i++) {
        const uint32_t magnitude = bits[i] & 0x7fffffffU;
        top = magnitude > top ? magnitude : top;
    }
    memcpy(&value, &top, sizeof value);
    return value;
}

/* As block_quant_q8_0, where the cases are explained. */
static void rows_q8_0_store(const float *x, int n, uint8_t *y)
{
    for (int i = 0; i < n; i += Q8_0_VALUES, y += Q8_0_BYTES) {
        uint16_t half = f32_to_f16(largest_of_block(x + i) / 127.0f);
        const float d = f16_to_f32(half);
        int8_t *q = (int8_t *)y + sizeof half;
        if (!isfinite(d))
            half = f32_to_f16(NAN);
        memcpy(y, &half, sizeof half);
        if (!isfinite(d) || d == 0.0f) {
            memset(q, 0, Q8_0_VALUES);
            continue;
        }
        for (int j = 0; j < Q8_0_VALUES; j += LANES)
            v16_to_i8(q + j, v16_max(v16_set(-127.0f), v16_min(v16_set(127.0f), v16_div(v16_load(x + i + j), v16_set(d)))));
    }
}

static void rows_conv_silu(const float *const *u, const float *w, size_t ld_w, int taps, int n, float *y)
{
    ROWS_EACH(n, {
        v16 sum = v16_set(0.0f);
        for (int j = 0; j < taps; j++)
            sum = v16_fma(load(w + (size_t)j * ld_w + i, part), load(u[j] + i, part), sum);
        store(y + i, silu(sum), part);
    });
}

/* ---- dot products of rows with rows ---- */

/* ROWS x COLS of them, both compile-time constants when inlined. */
ROWS_INLINE void dots_tile(const float *a, size_t ld_a, const float *b, size_t ld_b, int n, float *out, size_t ld_out, const int rows, const int cols)
{
    v16 sum[LANES];
#pragma GCC unroll 16
    for (int t = 0; t < rows * cols; t++)
        sum[t] = v16_set(0.0f);
    for (int i = 0; i < n; i += LANES) {
        const int part = n - i < LANES ? n - i : LANES;
        v16 x[LANES];
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
            x[r] = load(a + (size_t)r * ld_a + i, part);
#pragma GCC unroll 16
        for (int c = 0; c < cols; c++) {
            v16 y = load(b + (size_t)c * ld_b + i, part);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++)
                sum[c * rows + r] = v16_fma(x[r], y, sum[c * rows + r]);
        }
    }
#if defined(__AVX512F__)
    if (rows == 4 && cols == 4) { /* sum[4c + r] arrives in lane 4r + c */
        __m512 all = v16_sums(sum);
        _mm_storeu_ps(out, _mm512_castps512_ps128(all));
        _mm_storeu_ps(out + ld_out, _mm512_extractf32x4_ps(all, 1));
        _mm_storeu_ps(out + 2 * ld_out, _mm512_extractf32x4_ps(all, 2));
        _mm_storeu_ps(out + 3 * ld_out, _mm512_extractf32x4_ps(all, 3));
        return;
    }
    if (rows == 1 && cols == 16) {
        v16 turned[LANES];
#pragma GCC unroll 16
        for (int c = 0; c < LANES; c++) /* sum[c] must arrive in lane c */
            turned[4 * (c % 4) + c / 4] = sum[c];
        v16_store(out, v16_sums(turned));
        return;
    }
#endif
#pragma GCC unroll 16
    for (int c = 0; c < cols; c++)
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++)
            out[(size_t)r * ld_out + (size_t)c] = v16_sum(sum[c * rows + r]);
}

static void rows_dots(const float *a, size_t ld_a, int na, const float *b, size_t ld_b, int nb, int n, float *out, size_t ld_out)
{
    int r = 0;
    for (; r + DOT_A <= na; r += DOT_A) {
        const float *from = a + (size_t)r * ld_a;
        float *to = out + (size_t)r * ld_out;
        int c = 0;
        for (; c + DOT_B <= nb; c += DOT_B)
            dots_tile(from, ld_a, b + (size_t)c * ld_b, ld_b, n, to + c, ld_out, DOT_A, DOT_B);
        for (; c < nb; c++)
            dots_tile(from, ld_a, b + (size_t)c * ld_b, ld_b, n, to + c, ld_out, DOT_A, 1);
    }
    for (; r < na; r++) {
        const float *from = a + (size_t)r * ld_a;
        float *to = out + (size_t)r * ld_out;
        int c = 0;
        for (; c + DOT_A * DOT_B <= nb; c += DOT_A * DOT_B)
            dots_tile(from, ld_a, b + (size_t)c * ld_b, ld_b, n, to + c, ld_out, 1, DOT_A * DOT_B);
        for (; c + DOT_B <= nb; c += DOT_B)
            dots_tile(from, ld_a, b + (size_t)c * ld_b, ld_b, n, to + c, ld_out, 1, DOT_B);
        for (; c < nb; c++)
            dots_tile(from, ld_a, b + (size_t)c * ld_b, ld_b, n, to + c, ld_out, 1, 1);
    }
}

/* ---- weighted sums of rows ---- */

/* rows x (vecs * 16) values of gemm, or with vecs == 1 the `part` lanes of one vector. */
ROWS_INLINE void gemm_tile(const float *x, size_t ld_x, int n_in, const float *m, size_t ld_m, float *y, size_t ld_y, float keep, const int rows,
                           const int vecs, int part)
{
    v16 sum[16];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < vecs; c++)
            sum[r * vecs + c] = keep == 0.0f ? v16_set(0.0f) : v16_mul(v16_set(keep), load(y + (size_t)r * ld_y + c * LANES, part));
    for (int i = 0; i < n_in; i++) {
        v16 row[8];
#pragma GCC unroll 8
        for (int c = 0; c < vecs; c++)
            row[c] = load(m + (size_t)i * ld_m + c * LANES, part);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            v16 factor = v16_set(x[(size_t)r * ld_x + (size_t)i]);
#pragma GCC unroll 8
            for (int c = 0; c < vecs; c++)
                sum[r * vecs + c] = v16_fma(factor, row[c], sum[r * vecs + c]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < vecs; c++)
            store(y + (size_t)r * ld_y + c * LANES, sum[r * vecs + c], part);
}

/* One block of columns for all rows, so that the block of m stays in the cache. */
#define GEMM_COLUMN(vecs, part)                                                                                                                      \
    do {                                                                                                                                             \
        int r = 0;                                                                                                                                   \
        for (; r + TILE_ROWS <= rows; r += TILE_ROWS)                                                                                                \
            gemm_tile(x + (size_t)r * ld_x, ld_x, n_in, m + j, ld_m, y + (size_t)r * ld_y + j, ld_y, keep, TILE_ROWS, vecs, part);                   \
        for (; r < rows; r++)                                                                                                                        \
            gemm_tile(x + (size_t)r * ld_x, ld_x, n_in, m + j, ld_m, y + (size_t)r * ld_y + j, ld_y, keep, 1, vecs, part);                           \
    } while (0)

static void rows_gemm(const float *x, size_t ld_x, int rows, int n_in, const float *m, size_t ld_m, int n_out, float *y, size_t ld_y, float keep)
{
    int j = 0;
    if (rows == 2) /* one row's key and query: m is read once, in long runs */
        for (; j + WIDE_VECS * LANES <= n_out; j += WIDE_VECS * LANES)
            gemm_tile(x, ld_x, n_in, m + j, ld_m, y + j, ld_y, keep, 2, WIDE_VECS, LANES);
    for (; j + TILE_VECS * LANES <= n_out; j += TILE_VECS * LANES)
        GEMM_COLUMN(TILE_VECS, LANES);
    for (; j + LANES <= n_out; j += LANES)
        GEMM_COLUMN(1, LANES);
    if (j < n_out)
        GEMM_COLUMN(1, n_out - j);
}

/* ---- DeltaNet ---- */

static float rows_delta_factors(const float *kk, const float *qk, const float *sums, int t, float beta, float *to_u, float *to_o)
{
    const v16 now = v16_set(sums[t]), minus_beta = v16_set(-beta);
    for (int s = 0; s <= t; s += LANES) { /* the lanes after t are never used */
        v16 decay = v16_exp(v16_sub(now, v16_load(sums + s)));
        v16_store(to_u + s, v16_mul(v16_mul(minus_beta, v16_load(kk + s)), decay));
        v16_store(to_o + s, v16_mul(v16_load(qk + s), decay));
    }
    return exp_of(sums[t]);
}

struct delta_row {
    const float *v, *km, *qm;
    float beta, decay;
    const float *to_u, *to_o;
    float *us;
    size_t ld;
    float *o;
};

ROWS_INLINE void delta_row_tile(const struct delta_row *d, int t, int j, const int vecs, int part)
{
    v16 u[8], o[8];
    const v16 beta = v16_set(d->beta), decay = v16_set(d->decay);
#pragma GCC unroll 8
    for (int c = 0; c < vecs; c++) {
        u[c] = v16_mul(beta, v16_fnma(decay, load(d->km + j + c * LANES, part), load(d->v + j + c * LANES, part)));
        o[c] = v16_mul(decay, load(d->qm + j + c * LANES, part));
    }
    for (int s = 0; s < t; s++) {
        const float *row = d->us + (size_t)s * d->ld + j;
        const v16 to_u = v16_set(d->to_u[s]), to_o = v16_set(d->to_o[s]);
#pragma GCC unroll 8
        for (int c = 0; c < vecs; c++) {
            v16 past = load(row + c * LANES, part);
            u[c] = v16_fma(to_u, past, u[c]);
            o[c] = v16_fma(to_o, past, o[c]);
        }
    }
    const v16 to_o = v16_set(d->to_o[t]);
#pragma GCC unroll 8
    for (int c = 0; c < vecs; c++) {
        store(d->us + (size_t)t * d->ld + j + c * LANES, u[c], part);
        store(d->o + j + c * LANES, v16_fma(to_o, u[c], o[c]), part);
    }
}

static void rows_delta_row(const float *v, const float *km, const float *qm, float beta, float decay, const float *to_u, const float *to_o, int t,
                           float *us, size_t ld_us, int n, float *o)
{
    const struct delta_row d = {v, km, qm, beta, decay, to_u, to_o, us, ld_us, o};
    int j = 0;
    for (; j + WIDE_VECS * LANES <= n; j += WIDE_VECS * LANES)
        delta_row_tile(&d, t, j, WIDE_VECS, LANES);
    for (; j + LANES <= n; j += LANES)
        delta_row_tile(&d, t, j, 1, LANES);
    if (j < n)
        delta_row_tile(&d, t, j, 1, n - j);
}

/* ---- attention ---- */

/* One query's scores [GRID], of which the first `limit` count, become weights e^(score - m); m, s and acc move to the new maximum. */
ROWS_INLINE void softmax_page(float *scores, int limit, float scale, float *m, float *s, float *acc, int n)
{
    v16 x[GRID / LANES];
    v16 top = v16_set(-INFINITY);
    for (int j = limit; j < GRID; j++)
        scores[j] = -INFINITY;
    for (int c = 0; c < GRID / LANES; c++) {
        x[c] = v16_mul(v16_load(scores + c * LANES), v16_set(scale));
        top = v16_max(x[c], top);
    }
    float most = v16_largest(top);
    most = most > *m ? most : *m;
    v16 sum = v16_set(0.0f);
    for (int c = 0; c < GRID / LANES; c++) {
        x[c] = v16_exp(v16_sub(x[c], v16_set(most)));
        sum = v16_add(sum, x[c]);
        v16_store(scores + c * LANES, x[c]);
    }
    float shrink = exp_of(*m - most);
    *s = fmaf(*s, shrink, v16_sum(sum));
    *m = most;
    if (shrink == 1.0f) /* multiplying would change nothing */
        return;
    v16 factor = v16_set(shrink);
    ROWS_EACH(n, { store(acc + i, v16_mul(factor, load(acc + i, part)), part); });
}

/* The first n tokens of a page's keys or values as f32. */
static const float *page_rows(const struct attn_page *p, const void *rows, int tokens)
{
    if (p->format == BLOCK_F32)
        return rows;
    if (p->format == BLOCK_F16)
        rows_f16_load(rows, tokens * p->n, p->room);
    else
        rows_q8_0_load(rows, tokens * p->n, p->room);
    return p->room;
}

static void rows_attn_page(const struct attn_page *p)
{
    enum { STEP = 4 }; /* tokens between two requests for rows of the next page: few enough that they overlap with work */
    const int nq = p->nq, n = p->n, filled = p->limit[nq - 1];
    const size_t ld = (size_t)n, ahead = STEP * block_bytes(p->format, ld);
    const float *k = page_rows(p, p->k, filled);
    for (int t = 0; t < filled; t += STEP) {
        for (size_t i = 0; p->next_k && i < ahead; i += 64) {
            __builtin_prefetch(p->next_k + (size_t)(t / STEP) * ahead + i, 0, 2);
            __builtin_prefetch(p->next_v + (size_t)(t / STEP) * ahead + i, 0, 2);
        }
        rows_dots(p->q, ld, nq, k + (size_t)t * ld, ld, filled - t < STEP ? filled - t : STEP, n, p->scores + t, GRID);
    }
    for (int i = 0; i < nq; i++)
        softmax_page(p->scores + (size_t)i * GRID, p->limit[i], p->scale, &p->m[i], &p->s[i], p->acc + (size_t)i * ld, n);
    const float *v = page_rows(p, p->v, filled);
    for (int i = 0, next; i < nq; i = next) { /* runs of queries that see the same tokens */
        next = i + 1;
        while (next < nq && p->limit[next] == p->limit[i])
            next++;
        rows_gemm(p->scores + (size_t)i * GRID, GRID, next - i, p->limit[i], v, ld, n, p->acc + (size_t)i * ld, ld, 1.0f);
    }
}

static void rows_attn_merge(float *m, float *s, float *acc, const float *part_m, const float *part_s, const float *part_acc, int nq, int n)
{
    for (int q = 0; q < nq; q++) {
        const float most = m[q] > part_m[q] ? m[q] : part_m[q];
        const float mine = exp_of(m[q] - most), other = exp_of(part_m[q] - most);
        s[q] = fmaf(part_s[q], other, s[q] * mine);
        m[q] = most;
        float *to = acc + (size_t)q * (size_t)n;
        const float *from = part_acc + (size_t)q * (size_t)n;
        ROWS_EACH(n, {
            v16 kept = v16_mul(v16_set(mine), load(to + i, part));
            store(to + i, v16_fma(v16_set(other), load(from + i, part), kept), part);
        });
    }
}

static void rows_attn_finish(const float *acc, float s, const float *gate, int n, float *out)
{
    v16 sum = v16_set(s);
    ROWS_EACH(n, {
        v16 x = v16_div(load(acc + i, part), sum);
        if (gate)
            x = v16_div(x, v16_one_plus_exp_minus(load(gate + i, part)));
        store(out + i, x, part);
    });
}

#define ROWS_TABLE                                                                                                                                   \
    {                                                                                                                                                \
        .exp = rows_exp, .rms_norm = rows_rms_norm, .l2_norm = rows_l2_norm, .silu_mul = rows_silu_mul, .add = rows_add, .axpy = rows_axpy,          \
        .rope = rows_rope, .f16_load = rows_f16_load, .f16_store = rows_f16_store, .q8_0_load = rows_q8_0_load, .q8_0_store = rows_q8_0_store,       \
        .conv_silu = rows_conv_silu, .dots = rows_dots, .gemm = rows_gemm, .delta_factors = rows_delta_factors, .delta_row = rows_delta_row,         \
        .attn_page = rows_attn_page, .attn_merge = rows_attn_merge, .attn_finish = rows_attn_finish,                                                 \
    }
