/* engine/cpu/matmul_avx2.c: kernels for AVX2 with FMA (any x86 since 2013 or so).
 *
 * The same two ways as matmul_avx512.c, with tiles of 8 weight rows. Bytes are multiplied in pairs into 16-bit sums (maddubs), which must not overflow: a
 * weight value below 16, 32 or 64 times an activation of at most 127 leaves room for 8, 4 or 2 pairs before they are widened; widening multiplies
 * with the 16-bit scale at the same time. */
#if defined(__x86_64__)

#include <immintrin.h>
#include <math.h>

#include "engine/cpu/matmul_impl.h"

#define INLINE static inline __attribute__((always_inline))

enum { T = 8, FEW = 2 };

struct tile {
    const uint8_t *row[T];
};

struct panel {
    __m256i q[64];     /* dword k of a row: values 4k .. 4k+3 */
    __m256i scale[16]; /* K types: scale of each group, twice, as i16 */
    __m256i pair[8];   /* K types: minima (or Q6_K's scales) of neighbouring groups as two i16 */
    __m256 d[8];
    __m256 dmin;
};
_Static_assert(sizeof(struct panel) + MATMUL_PASS_ROWS * T * sizeof(float) <= MATMUL_SCRATCH, "scratch holds a panel and sums");

INLINE __m256i load_256(const void *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}

INLINE __m128i load_128(const void *p)
{
    return _mm_loadu_si128((const __m128i *)p);
}

/* Keeps additions in the order they are written: compilers otherwise rearrange them into trees that need more registers than there are. */
INLINE __m256i keep(__m256i v)
{
    __asm__("" : "+x"(v));
    return v;
}

/* ---- activations ---- */

INLINE __m256i magnitude(__m256 x)
{
    return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff));
}

INLINE uint32_t largest(__m256i v)
{
    __m128i a = _mm_max_epu32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    a = _mm_max_epu32(a, _mm_shuffle_epi32(a, 0x4e));
    a = _mm_max_epu32(a, _mm_shuffle_epi32(a, 0xb1));
    return (uint32_t)_mm_cvtsi128_si32(a);
}

/* round-half-even(x / d), at most 127 in magnitude. */
INLINE __m256i quantise(const float *x, __m256 d)
{
    __m256 q = _mm256_div_ps(_mm256_loadu_ps(x), d);
    q = _mm256_max_ps(_mm256_min_ps(q, _mm256_set1_ps(127.0f)), _mm256_set1_ps(-127.0f));
    return _mm256_cvtps_epi32(q);
}

/* 32 values; returns their sums by 16 in the low dword of each half. */
INLINE __m256i quantise_32(const float *x, float d, void *q)
{
    __m256 dd = _mm256_set1_ps(d);
    __m256i a = _mm256_packs_epi32(quantise(x, dd), quantise(x + 8, dd)), b = _mm256_packs_epi32(quantise(x + 16, dd), quantise(x + 24, dd));
    __m256i v = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i *)q, v);
    __m256i sum = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), v), _mm256_set1_epi16(1));
    sum = _mm256_add_epi32(sum, _mm256_shuffle_epi32(sum, 0x4e));
    return _mm256_add_epi32(sum, _mm256_shuffle_epi32(sum, 0xb1));
}

void act_256_avx2(const float *x, int64_t n, struct act_256 *dst)
{
    for (int64_t b = 0; b < n / 256; b++, x += 256, dst++) {
        __m256i best = _mm256_setzero_si256();
        for (int i = 0; i < 32; i++)
            best = _mm256_max_epu32(best, magnitude(_mm256_loadu_ps(x + 8 * i)));
        uint32_t top = largest(best);
        float d = 0;
        if (top >= 0x7f800000u)
            d = NAN;
        for (int i = 0; i < 32 && top < 0x7f800000u; i++) { /* the first value of that magnitude gives the sign */
            __m256i hit = _mm256_cmpeq_epi32(magnitude(_mm256_loadu_ps(x + 8 * i)), _mm256_set1_epi32((int)top));
            int mask = _mm256_movemask_ps(_mm256_castsi256_ps(hit));
            if (mask) {
                d = x[8 * i + __builtin_ctz((unsigned)mask)] / -127.0f;
                break;
            }
        }
        memset(dst, 0, sizeof *dst);
        if (d == 0)
            continue;
        dst->d = d;
        if (isnan(d))
            continue;
        for (int i = 0; i < 8; i++) {
            __m256i sum = quantise_32(x + 32 * i, d, dst->q + 32 * i);
            int lo = _mm_cvtsi128_si32(_mm256_castsi256_si128(sum)), hi = _mm_cvtsi128_si32(_mm256_extracti128_si256(sum, 1));
            dst->sum16[2 * i] = (int16_t)lo;
            dst->sum16[2 * i + 1] = (int16_t)hi;
            dst->sum32[i] = (int16_t)(lo + hi);
        }
    }
}

void act_32_avx2(const float *x, int64_t n, void *dst)
{
    struct act_32 at = act_32_at(dst, n);
    uint8_t *q = dst;
    uint8_t *d_out = q + ((const uint8_t *)at.d - q), *sum_out = q + ((const uint8_t *)at.sum - q);
    for (int64_t b = 0; b < n / 32; b++, x += 32) {
        __m256i best = magnitude(_mm256_loadu_ps(x));
        for (int i = 1; i < 4; i++)
            best = _mm256_max_epu32(best, magnitude(_mm256_loadu_ps(x + 8 * i)));
        float top = f32_of_bits(largest(best)), d = top / 127.0f, rounded = NAN;
        int32_t sum = 0;
        memset(q + 32 * b, 0, 32);
        if (isfinite(top)) {
            rounded = _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtps_ph(_mm_set_ss(d), _MM_FROUND_TO_NEAREST_INT)));
            if (d != 0) {
                __m256i s = quantise_32(x, d, q + 32 * b);
                sum = _mm_cvtsi128_si32(_mm256_castsi256_si128(s)) + _mm_cvtsi128_si32(_mm256_extracti128_si256(s, 1));
            }
        }
        memcpy(d_out + 4 * b, &rounded, 4);
        memcpy(sum_out + 4 * b, &sum, 4);
    }
}

/* ---- tiles ---- */

/* 16 bytes at `offset` of each row, as four vectors of dwords with lanes as rows. */
INLINE void load_dwords(const struct tile *t, size_t offset, __m256i out[4])
{
    __m256i z[4];
    for (int j = 0; j < 4; j++)
        z[j] = _mm256_inserti128_si256(_mm256_castsi128_si256(load_128(t->row[j] + offset)), load_128(t->row[4 + j] + offset), 1);
    __m256i a = _mm256_unpacklo_epi32(z[0], z[1]), b = _mm256_unpackhi_epi32(z[0], z[1]);
    __m256i c = _mm256_unpacklo_epi32(z[2], z[3]), d = _mm256_unpackhi_epi32(z[2], z[3]);
    out[0] = _mm256_unpacklo_epi64(a, c);
    out[1] = _mm256_unpackhi_epi64(a, c);
    out[2] = _mm256_unpacklo_epi64(b, d);
    out[3] = _mm256_unpackhi_epi64(b, d);
}

INLINE __m256 load_halves(const struct tile *t, size_t offset)
{
    return _mm256_cvtph_ps(_mm_setr_epi16((short)load_u16(t->row[0] + offset), (short)load_u16(t->row[1] + offset),
                                          (short)load_u16(t->row[2] + offset), (short)load_u16(t->row[3] + offset),
                                          (short)load_u16(t->row[4] + offset), (short)load_u16(t->row[5] + offset),
                                          (short)load_u16(t->row[6] + offset), (short)load_u16(t->row[7] + offset)));
}

/* The low halves of eight dwords as f16. */
INLINE __m256 half_of_dwords(__m256i v)
{
    v = _mm256_shuffle_epi8(
        v, _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1, 0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1));
    return _mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64(v, 0x08)));
}

/* The 16-byte head of Q4_K and Q5_K: d, dmin and the six-bit scales and minima, four of them to a dword. */
struct k_head {
    __m256 d, dmin;
    __m256i scale[2], min[2];
};

INLINE struct k_head load_k_head(const struct tile *t, size_t offset)
{
    const __m256i six = _mm256_set1_epi32(0x3f3f3f3f), low = _mm256_set1_epi32(0x0f0f0f0f), high = _mm256_set1_epi32(0x30303030);
    __m256i w[4];
    struct k_head h;
    load_dwords(t, offset, w);
    h.d = half_of_dwords(w[0]);
    h.dmin = half_of_dwords(_mm256_srli_epi32(w[0], 16));
    h.scale[0] = _mm256_and_si256(w[1], six);
    h.min[0] = _mm256_and_si256(w[2], six);
    h.scale[1] = _mm256_or_si256(_mm256_and_si256(w[3], low), _mm256_and_si256(_mm256_srli_epi32(w[1], 2), high));
    h.min[1] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi32(w[3], 4), low), _mm256_and_si256(_mm256_srli_epi32(w[2], 2), high));
    return h;
}

/* Bytes 0, 1 (half 0) or 2, 3 (half 1) of each dword as two unsigned i16. */
INLINE __m256i widen_bytes(__m256i v, int half)
{
    const __m256i first =
        _mm256_setr_epi8(0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1, 0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1);
    return _mm256_shuffle_epi8(half ? _mm256_srli_epi32(v, 16) : v, first);
}

INLINE __m256i widen_signed_bytes(__m256i v, int half)
{
    return _mm256_srai_epi16(_mm256_slli_epi16(widen_bytes(v, half), 8), 8);
}

/* The low 16 bits of each dword, twice. */
INLINE __m256i low_twice(__m256i v)
{
    v = _mm256_and_si256(v, _mm256_set1_epi32(0xffff));
    return _mm256_or_si256(v, _mm256_slli_epi32(v, 16));
}

/* sum over pairs of pair[j] * (sums 2j, 2j+1), for n pairs. */
INLINE __m256i dot_pairs(const __m256i *pair, const int16_t *sums, int n)
{
    __m256i sum = _mm256_setzero_si256();
    for (int j = 0; j < n; j++)
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pair[j], _mm256_set1_epi32((int)load_u32(sums + 2 * j))));
    return sum;
}

INLINE __m256 add_isum(__m256 y, float dx, __m256 dw, __m256i isum)
{
    return _mm256_fmadd_ps(_mm256_mul_ps(_mm256_set1_ps(dx), dw), _mm256_cvtepi32_ps(isum), y);
}

INLINE __m256 sub_msum(__m256 y, float dx, __m256 dmin, __m256i msum)
{
    return _mm256_fnmadd_ps(_mm256_mul_ps(_mm256_set1_ps(dx), dmin), _mm256_cvtepi32_ps(msum), y);
}

INLINE void aim(struct tile *t, const struct matmul_job *job, int64_t o, size_t offset)
{
    for (int i = 0; i < T; i++) {
        int64_t row = o + i < job->n_out ? o + i : job->n_out - 1;
        t->row[i] = job->w + (size_t)row * job->row_bytes + offset;
    }
}

INLINE void prefetch(const uint8_t *p, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += 64)
        _mm_prefetch((const char *)p + i, _MM_HINT_T0);
}

INLINE void store_outputs(const struct matmul_job *job, int64_t o, int r, __m256 sum)
{
    float *y = job->y[r] + job->o0 + o;
    int n = job->n_out - o < T ? (int)(job->n_out - o) : T;
    __m256i valid = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    if (job->add)
        sum = _mm256_add_ps(_mm256_maskload_ps(y, valid), sum);
    _mm256_maskstore_ps(y, valid, sum);
}

/* ---- many activation rows: panels ---- */

static void pack_k_head(struct panel *p, const struct tile *t)
{
    struct k_head h = load_k_head(t, 0);
    p->d[0] = h.d;
    p->dmin = h.dmin;
    for (int j = 0; j < 8; j++)
        p->scale[j] = low_twice(_mm256_and_si256(_mm256_srli_epi32(h.scale[j / 4], 8 * (j % 4)), _mm256_set1_epi32(0xff)));
    for (int j = 0; j < 4; j++)
        p->pair[j] = widen_bytes(h.min[j / 2], j % 2);
}

static void pack_q4_k(struct panel *p, const struct tile *t)
{
    const __m256i low = _mm256_set1_epi8(15);
    pack_k_head(p, t);
    for (int i = 0; i < 8; i++) {
        __m256i w[4], *out = p->q + 16 * (i / 2) + 4 * (i % 2);
        load_dwords(t, 16 + 16 * (size_t)i, w);
        for (int k = 0; k < 4; k++) {
            out[k] = _mm256_and_si256(w[k], low);
            out[k + 8] = _mm256_and_si256(_mm256_srli_epi32(w[k], 4), low);
        }
    }
}

static void pack_q5_k(struct panel *p, const struct tile *t)
{
    const __m256i low = _mm256_set1_epi8(15), bit = _mm256_set1_epi8(1);
    __m256i fifth[8];
    pack_k_head(p, t);
    load_dwords(t, 16, fifth);
    load_dwords(t, 32, fifth + 4);
    for (int i = 0; i < 8; i++) {
        __m256i w[4], *out = p->q + 16 * (i / 2) + 4 * (i % 2);
        load_dwords(t, 48 + 16 * (size_t)i, w);
        for (int k = 0; k < 4; k++) {
            __m256i *h = &fifth[4 * (i % 2) + k]; /* bit 0: this sub-block's, bit 1: the next one's */
            out[k] = _mm256_or_si256(_mm256_and_si256(w[k], low), _mm256_slli_epi32(_mm256_and_si256(*h, bit), 4));
            __m256i next = _mm256_and_si256(_mm256_srli_epi32(*h, 1), bit);
            out[k + 8] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi32(w[k], 4), low), _mm256_slli_epi32(next, 4));
            *h = _mm256_srli_epi32(*h, 2);
        }
    }
}

static void pack_q6_k(struct panel *p, const struct tile *t)
{
    const __m256i low = _mm256_set1_epi8(15), two = _mm256_set1_epi8(0x30);
    __m256i w[4];
    load_dwords(t, 192, w);
    for (int k = 0; k < 16; k++)
        p->scale[k] = low_twice(_mm256_srai_epi32(_mm256_slli_epi32(w[k / 4], 24 - 8 * (k % 4)), 24));
    for (int j = 0; j < 8; j++)
        p->pair[j] = widen_signed_bytes(w[j / 2], j % 2);
    p->d[0] = load_halves(t, 208);
    for (int half = 0; half < 2; half++) {
        for (int i = 0; i < 2; i++) { /* values 16i .. 16i + 15 of each of the half's four planes of 32 */
            __m256i a[4], b[4], h[4], *out = p->q + 32 * half + 4 * i;
            load_dwords(t, (size_t)(64 * half + 16 * i), a);
            load_dwords(t, (size_t)(64 * half + 32 + 16 * i), b);
            load_dwords(t, (size_t)(128 + 32 * half + 16 * i), h);
            for (int k = 0; k < 4; k++) {
                __m256i h0 = _mm256_and_si256(_mm256_slli_epi32(h[k], 4), two), h1 = _mm256_and_si256(_mm256_slli_epi32(h[k], 2), two);
                __m256i h2 = _mm256_and_si256(h[k], two), h3 = _mm256_and_si256(_mm256_srli_epi32(h[k], 2), two);
                out[k] = _mm256_or_si256(_mm256_and_si256(a[k], low), h0);
                out[k + 8] = _mm256_or_si256(_mm256_and_si256(b[k], low), h1);
                out[k + 16] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi32(a[k], 4), low), h2);
                out[k + 24] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi32(b[k], 4), low), h3);
            }
        }
    }
}

static void pack_q8_0(struct panel *p, const struct tile *t, int n_blocks)
{
    for (int b = 0; b < n_blocks; b++) {
        size_t at = (size_t)b * 34;
        p->d[b] = load_halves(t, at);
        load_dwords(t, at + 2, p->q + 8 * b);
        load_dwords(t, at + 18, p->q + 8 * b + 4);
    }
}

static void pack_q4_0(struct panel *p, const struct tile *t, int n_blocks)
{
    const __m256i low = _mm256_set1_epi8(15);
    for (int b = 0; b < n_blocks; b++) {
        size_t at = (size_t)b * 18;
        __m256i w[4], *out = p->q + 8 * b;
        p->d[b] = load_halves(t, at);
        load_dwords(t, at + 2, w);
        for (int k = 0; k < 4; k++) {
            out[k] = _mm256_and_si256(w[k], low);
            out[k + 4] = _mm256_and_si256(_mm256_srli_epi32(w[k], 4), low);
        }
    }
}

/* R activation rows times a panel of a K type with groups of G values, of which F dwords may be added in 16 bits; acc [R][T]. */
INLINE void multiply_256(int R, int G, int F, const struct panel *p, const struct act_256 *const *x, float *acc)
{
    __m256i isum[4];
    for (int r = 0; r < R; r++) {
        isum[r] = _mm256_setzero_si256();
        if (G == 16) /* values are stored + 32 */
            isum[r] = _mm256_sub_epi32(isum[r], _mm256_slli_epi32(dot_pairs(p->pair, x[r]->sum16, 8), 5));
    }
    for (int k0 = 0; k0 < 64; k0 += F) {
        __m256i s[4];
        for (int r = 0; r < R; r++)
            s[r] = _mm256_setzero_si256();
        for (int i = 0; i < F; i++) {
            for (int r = 0; r < R; r++) {
                __m256i v = _mm256_set1_epi32((int)load_u32(x[r]->q + 4 * (k0 + i)));
                s[r] = keep(_mm256_add_epi16(s[r], _mm256_maddubs_epi16(p->q[k0 + i], v)));
            }
        }
        for (int r = 0; r < R; r++)
            isum[r] = keep(_mm256_add_epi32(isum[r], _mm256_madd_epi16(s[r], p->scale[4 * k0 / G])));
    }
    for (int r = 0; r < R; r++) {
        __m256 y = add_isum(_mm256_load_ps(acc + r * T), x[r]->d, p->d[0], isum[r]);
        if (G == 32)
            y = sub_msum(y, x[r]->d, p->dmin, dot_pairs(p->pair, x[r]->sum32, 4));
        _mm256_store_ps(acc + r * T, y);
    }
}

/* R activation rows, from block b0, times a panel of n_blocks blocks of 32: signed bytes (Q8_0), or nibbles stored + 8 (Q4_0). */
INLINE void multiply_32(int R, bool four, int n_blocks, int64_t b0, const struct panel *p, const struct act_32 *x, float *acc)
{
    const __m256i ones = _mm256_set1_epi16(1);
    for (int b = 0; b < n_blocks; b++) {
        __m256i s[4];
        for (int r = 0; r < R; r++)
            s[r] = _mm256_setzero_si256();
        for (int i = 0; i < 8; i++) {
            int k = 8 * b + i;
            __m256i w = p->q[k], size = _mm256_abs_epi8(w);
            for (int r = 0; r < R; r++) {
                __m256i v = _mm256_set1_epi32((int)load_u32(x[r].q + 32 * b0 + 4 * k));
                if (four) /* eight pairs of 15 * 127 fit 16 bits */
                    s[r] = keep(_mm256_add_epi16(s[r], _mm256_maddubs_epi16(w, v)));
                else /* one pair of 128 * 127 does; the sign goes to the activation */
                    s[r] = keep(_mm256_add_epi32(s[r], _mm256_madd_epi16(_mm256_maddubs_epi16(size, _mm256_sign_epi8(v, w)), ones)));
            }
        }
        for (int r = 0; r < R; r++) {
            if (four)
                s[r] = _mm256_sub_epi32(_mm256_madd_epi16(s[r], ones), _mm256_set1_epi32(8 * x[r].sum[b0 + b]));
            _mm256_store_ps(acc + r * T, add_isum(_mm256_load_ps(acc + r * T), x[r].d[b0 + b], p->d[b], s[r]));
        }
    }
}

/* Runs DO(R) with the number as a constant, so that the sums of each shape live in registers. */
/* clang-format off */
#define WITH_ROWS(rows, DO)                                                                                                                          \
    switch (rows) {                                                                                                                                  \
    case 1: DO(1); break;                                                                                                                            \
    case 2: DO(2); break;                                                                                                                            \
    case 3: DO(3); break;                                                                                                                            \
    default: DO(4); break;                                                                                                                           \
    }
/* clang-format on */

static void rows_256(const struct matmul_job *job, int64_t b, int r, int rows, const struct panel *p, float *acc)
{
    const struct act_256 *x[4];
    for (int i = 0; i < 4; i++) /* all four, though a kernel for fewer rows reads fewer */
        x[i] = (const struct act_256 *)job->x[r + (i < rows ? i : 0)] + b;
#define Q4_K(R) multiply_256(R, 32, 8, p, x, acc)
#define Q5_K(R) multiply_256(R, 32, 4, p, x, acc)
#define Q6_K(R) multiply_256(R, 16, 2, p, x, acc)
    if (job->type == BLOCK_Q4_K)
        WITH_ROWS(rows, Q4_K)
    else if (job->type == BLOCK_Q5_K)
        WITH_ROWS(rows, Q5_K)
    else
        WITH_ROWS(rows, Q6_K)
}

static void rows_32(const struct matmul_job *job, int64_t b, int n_blocks, int r, int rows, const struct panel *p, float *acc)
{
    struct act_32 x[4];
    for (int i = 0; i < 4; i++)
        x[i] = act_32_at(job->x[r + (i < rows ? i : 0)], job->n_in);
#define Q8_0(R) multiply_32(R, false, n_blocks, b, p, x, acc)
#define Q4_0(R) multiply_32(R, true, n_blocks, b, p, x, acc)
    if (job->type == BLOCK_Q8_0)
        WITH_ROWS(rows, Q8_0)
    else
        WITH_ROWS(rows, Q4_0)
}

static void pack(struct panel *p, const struct tile *t, enum block_type type, int n_blocks)
{
    switch (type) {
    case BLOCK_Q4_K:
        pack_q4_k(p, t);
        break;
    case BLOCK_Q5_K:
        pack_q5_k(p, t);
        break;
    case BLOCK_Q6_K:
        pack_q6_k(p, t);
        break;
    case BLOCK_Q8_0:
        pack_q8_0(p, t, n_blocks);
        break;
    default:
        pack_q4_0(p, t, n_blocks);
        break;
    }
}

/* A tile times up to MATMUL_PASS_ROWS activation rows. */
static void panels(const struct matmul_job *job, int64_t o, int r0, int n_rows)
{
    struct panel *p = job->scratch;
    float *acc = (float *)(void *)(p + 1);
    bool wide = act_kind_of(job->type) == ACT_Q8_256;
    int64_t n_blocks = job->n_in / (wide ? 256 : 32);
    int step = wide ? 1 : 8;
    size_t bytes = block_bytes(job->type, wide ? 256 : 32);
    memset(acc, 0, (size_t)n_rows * T * sizeof *acc);
    for (int64_t b = 0; b < n_blocks; b += step) {
        int n = n_blocks - b < step ? (int)(n_blocks - b) : step;
        struct tile t;
        aim(&t, job, o, (size_t)b * bytes);
        for (int i = 0; i < T; i++)
            prefetch(t.row[i] + T * job->row_bytes, (size_t)n * bytes);
        pack(p, &t, job->type, n);
        for (int r = 0; r < n_rows; r += 4) {
            int rows = n_rows - r < 4 ? n_rows - r : 4;
            if (wide)
                rows_256(job, b, r0 + r, rows, p, acc + (size_t)r * T);
            else
                rows_32(job, b, n, r0 + r, rows, p, acc + (size_t)r * T);
        }
    }
    for (int r = 0; r < n_rows; r++)
        store_outputs(job, o, r0 + r, _mm256_load_ps(acc + (size_t)r * T));
}

/* ---- few activation rows ---- */

/* Lane i of the result: the sum of the 8 lanes of v[i]. */
INLINE __m256i add_across(const __m256i v[T])
{
    __m256i a[4], b[2];
    for (int i = 0; i < 4; i++)
        a[i] = _mm256_add_epi32(_mm256_unpacklo_epi32(v[2 * i], v[2 * i + 1]), _mm256_unpackhi_epi32(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 2; i++)
        b[i] = _mm256_add_epi32(_mm256_unpacklo_epi64(a[2 * i], a[2 * i + 1]), _mm256_unpackhi_epi64(a[2 * i], a[2 * i + 1]));
    return _mm256_add_epi32(_mm256_permute2x128_si256(b[0], b[1], 0x20), _mm256_permute2x128_si256(b[0], b[1], 0x31));
}

/* Adds 32 products, times a 16-bit scale, to a row's sum. */
INLINE __m256i dot_32(__m256i sum, __m256i u, const int8_t *x, __m256i scale)
{
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(u, load_256(x)), scale));
}

INLINE void few_k(int R, bool five, const struct matmul_job *job, int64_t o)
{
    const __m256i low = _mm256_set1_epi8(15), bit4 = _mm256_set1_epi8(16);
    const size_t bytes = five ? 176 : 144;
    const size_t ahead = T * job->row_bytes;
    __m256 y[FEW];
    for (int r = 0; r < R; r++)
        y[r] = _mm256_setzero_ps();
    struct tile t;
    aim(&t, job, o, 0);
    for (int64_t b = 0; b < job->n_in / 256; b++) {
        const size_t at = (size_t)b * bytes;
        const struct act_256 *act[FEW];
        __m256i sums[FEW][T];
        for (int r = 0; r < R; r++)
            act[r] = (const struct act_256 *)job->x[r] + b;
        struct k_head h = load_k_head(&t, at);
        _Alignas(32) uint8_t scale[2][T][4];
        _mm256_store_si256((__m256i *)(void *)scale[0], h.scale[0]);
        _mm256_store_si256((__m256i *)(void *)scale[1], h.scale[1]);
        for (int i = 0; i < T; i++) {
            const uint8_t *block = t.row[i] + at, *q = block + bytes - 128;
            prefetch(block + ahead, bytes);
            for (int r = 0; r < R; r++)
                sums[r][i] = _mm256_setzero_si256();
            __m256i qh = five ? load_256(block + 16) : low;
            for (int g = 0; g < 4; g++) {
                __m256i packed = load_256(q + 32 * g);
                __m256i u0 = _mm256_and_si256(packed, low), u1 = _mm256_and_si256(_mm256_srli_epi16(packed, 4), low);
                if (five) { /* sub-blocks 2g and 2g + 1 have their fifth bits in those bits of qh */
                    u0 = _mm256_or_si256(u0, _mm256_and_si256(_mm256_slli_epi16(_mm256_srli_epi16(qh, 2 * g), 4), bit4));
                    u1 = _mm256_or_si256(u1, _mm256_and_si256(_mm256_slli_epi16(_mm256_srli_epi16(qh, 2 * g + 1), 4), bit4));
                }
                __m256i s0 = _mm256_set1_epi16(scale[g / 2][i][2 * g % 4]), s1 = _mm256_set1_epi16(scale[g / 2][i][2 * g % 4 + 1]);
                for (int r = 0; r < R; r++)
                    sums[r][i] = dot_32(dot_32(sums[r][i], u0, act[r]->q + 64 * g, s0), u1, act[r]->q + 64 * g + 32, s1);
            }
        }
        const __m256i pair[4] = {widen_bytes(h.min[0], 0), widen_bytes(h.min[0], 1), widen_bytes(h.min[1], 0), widen_bytes(h.min[1], 1)};
        for (int r = 0; r < R; r++) {
            y[r] = add_isum(y[r], act[r]->d, h.d, add_across(sums[r]));
            y[r] = sub_msum(y[r], act[r]->d, h.dmin, dot_pairs(pair, act[r]->sum32, 4));
        }
    }
    for (int r = 0; r < R; r++)
        store_outputs(job, o, r, y[r]);
}

/* Q6_K. Each 128-bit lane of an unpacked vector is one group of 16 values. */
INLINE void few_q6_k(int R, const struct matmul_job *job, int64_t o)
{
    const __m256i low = _mm256_set1_epi8(15), two = _mm256_set1_epi8(0x30);
    const __m256i spread = _mm256_inserti128_si256(_mm256_set1_epi16(0x0100), _mm_set1_epi16(0x0302), 1); /* i16 0 | i16 1 */
    const size_t bytes = 210;
    const size_t ahead = T * job->row_bytes;
    __m256 y[FEW];
    for (int r = 0; r < R; r++)
        y[r] = _mm256_setzero_ps();
    struct tile t;
    aim(&t, job, o, 0);
    for (int64_t b = 0; b < job->n_in / 256; b++) {
        const size_t at = (size_t)b * bytes;
        const struct act_256 *act[FEW];
        __m256i sums[FEW][T];
        for (int r = 0; r < R; r++)
            act[r] = (const struct act_256 *)job->x[r] + b;
        __m256 d = load_halves(&t, at + 208);
        for (int i = 0; i < T; i++) {
            const uint8_t *block = t.row[i] + at;
            prefetch(block + ahead, bytes);
            __m256i scale = _mm256_cvtepi8_epi16(load_128(block + 192));
            for (int r = 0; r < R; r++) { /* values are stored + 32 */
                __m256i offset = _mm256_slli_epi32(_mm256_madd_epi16(scale, load_256(act[r]->sum16)), 5);
                sums[r][i] = _mm256_sub_epi32(_mm256_setzero_si256(), offset);
            }
            for (int half = 0; half < 2; half++) {
                __m256i l0 = load_256(block + 64 * half), l1 = load_256(block + 64 * half + 32), h = load_256(block + 128 + 32 * half);
                /* this half's eight scales in both lanes */
                __m256i s = half ? _mm256_permute4x64_epi64(scale, 0xee) : _mm256_permute4x64_epi64(scale, 0x44);
                __m256i u[4] = {_mm256_or_si256(_mm256_and_si256(l0, low), _mm256_and_si256(_mm256_slli_epi16(h, 4), two)),
                                _mm256_or_si256(_mm256_and_si256(l1, low), _mm256_and_si256(_mm256_slli_epi16(h, 2), two)),
                                _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(l0, 4), low), _mm256_and_si256(h, two)),
                                _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(l1, 4), low), _mm256_and_si256(_mm256_srli_epi16(h, 2), two))};
                for (int g = 0; g < 4; g++) {
                    __m256i sg = _mm256_shuffle_epi8(s, _mm256_add_epi8(spread, _mm256_set1_epi8((char)(4 * g))));
                    for (int r = 0; r < R; r++)
                        sums[r][i] = dot_32(sums[r][i], u[g], act[r]->q + 128 * half + 32 * g, sg);
                }
            }
        }
        for (int r = 0; r < R; r++)
            y[r] = add_isum(y[r], act[r]->d, d, add_across(sums[r]));
    }
    for (int r = 0; r < R; r++)
        store_outputs(job, o, r, y[r]);
}

INLINE void few_32(int R, bool four, const struct matmul_job *job, int64_t o)
{
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    const size_t bytes = four ? 18 : 34;
    const size_t ahead = T * job->row_bytes;
    __m256 y[FEW];
    struct act_32 act[FEW];
    for (int r = 0; r < R; r++) {
        y[r] = _mm256_setzero_ps();
        act[r] = act_32_at(job->x[r], job->n_in);
    }
    struct tile t;
    aim(&t, job, o, 0);
    for (int64_t b = 0; b < job->n_in / 32; b++) {
        const size_t at = (size_t)b * bytes;
        __m256i sums[FEW][T];
        __m256 d = load_halves(&t, at);
        for (int i = 0; i < T; i++) {
            const uint8_t *block = t.row[i] + at;
            prefetch(block + ahead, bytes);
            __m256i w;
            if (four) {
                __m128i q = load_128(block + 2);
                w = _mm256_and_si256(_mm256_inserti128_si256(_mm256_castsi128_si256(q), _mm_srli_epi16(q, 4), 1), low);
            } else {
                w = load_256(block + 2);
            }
            for (int r = 0; r < R; r++) { /* the sign goes to the activation, so that the other factor is unsigned */
                __m256i v = load_256(act[r].q + 32 * b);
                sums[r][i] = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(v, w)), ones);
            }
        }
        for (int r = 0; r < R; r++) {
            __m256i isum = add_across(sums[r]);
            if (four)
                isum = _mm256_sub_epi32(isum, _mm256_set1_epi32(8 * act[r].sum[b]));
            y[r] = add_isum(y[r], act[r].d[b], d, isum);
        }
    }
    for (int r = 0; r < R; r++)
        store_outputs(job, o, r, y[r]);
}

static void few(const struct matmul_job *job, int64_t o)
{
#define FEW_CASE(type, call)                                                                                                                         \
    case type:                                                                                                                                       \
        if (job->n_rows == 1) {                                                                                                                      \
            const int R = 1;                                                                                                                         \
            call;                                                                                                                                    \
        } else {                                                                                                                                     \
            const int R = 2;                                                                                                                         \
            call;                                                                                                                                    \
        }                                                                                                                                            \
        break
    switch (job->type) {
        FEW_CASE(BLOCK_Q4_K, few_k(R, false, job, o));
        FEW_CASE(BLOCK_Q5_K, few_k(R, true, job, o));
        FEW_CASE(BLOCK_Q6_K, few_q6_k(R, job, o));
        FEW_CASE(BLOCK_Q8_0, few_32(R, false, job, o));
        FEW_CASE(BLOCK_Q4_0, few_32(R, true, job, o));
    default:
        break;
    }
}

void matmul_int_avx2(const struct matmul_job *job)
{
    for (int64_t o = 0; o < job->n_out; o += T) {
        if (job->n_rows <= FEW) {
            few(job, o);
            continue;
        }
        for (int r = 0; r < job->n_rows; r += MATMUL_PASS_ROWS)
            panels(job, o, r, job->n_rows - r < MATMUL_PASS_ROWS ? job->n_rows - r : MATMUL_PASS_ROWS);
    }
}

/* ---- float weights ---- */

void widen_halves_avx2(enum block_type type, const void *src, float *dst, int64_t n)
{
    const uint8_t *p = src;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m128i v = load_128(p + 2 * i);
        __m256 wide = type == BLOCK_F16 ? _mm256_cvtph_ps(v) : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
        _mm256_storeu_ps(dst + i, wide);
    }
    block_dequant(type, p + 2 * i, dst + i, (size_t)(n - i));
}

/* R activation rows with K weight rows; the sixteen partial sums are two vectors. */
INLINE void dots(int R, int K, const struct dot_job *job, int r0)
{
    __m256 p[2][DOT_ROWS][2];
    const float *x[2];
    for (int r = 0; r < R; r++) {
        x[r] = job->x[r0 + r];
        for (int k = 0; k < K; k++)
            p[r][k][0] = p[r][k][1] = _mm256_setzero_ps();
    }
    int64_t i = 0;
    for (; i + 16 <= job->n; i += 16) {
        for (int r = 0; r < R; r++) {
            __m256 lo = _mm256_loadu_ps(x[r] + i), hi = _mm256_loadu_ps(x[r] + i + 8);
            for (int k = 0; k < K; k++) {
                const float *w = (const float *)(const void *)((const uint8_t *)job->w[k] + 4 * i);
                p[r][k][0] = _mm256_fmadd_ps(_mm256_loadu_ps(w), lo, p[r][k][0]);
                p[r][k][1] = _mm256_fmadd_ps(_mm256_loadu_ps(w + 8), hi, p[r][k][1]);
            }
        }
    }
    for (int r = 0; r < R; r++) {
        for (int k = 0; k < K; k++) {
            _Alignas(32) float part[16];
            _mm256_store_ps(part, p[r][k][0]);
            _mm256_store_ps(part + 8, p[r][k][1]);
            for (int64_t j = i; j < job->n; j++)
                part[j - i] = fmaf(f32_of_bits(load_u32((const uint8_t *)job->w[k] + 4 * j)), x[r][j], part[j - i]);
            __m256 a = _mm256_add_ps(_mm256_load_ps(part), _mm256_load_ps(part + 8));
            __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
            b = _mm_add_ps(b, _mm_movehl_ps(b, b));
            float sum = _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
            float *y = job->y[r0 + r] + job->o0 + k;
            *y = job->add ? *y + sum : sum;
        }
    }
}

void matmul_dot_avx2(const struct dot_job *job)
{
    int r = 0;
    for (; job->n_w == DOT_ROWS && r < job->n_rows; r++)
        dots(1, DOT_ROWS, job, r);
    for (; r < job->n_rows; r++) {
        struct dot_job one = *job;
        for (int k = 0; k < job->n_w; k++) {
            one.w[0] = job->w[k];
            one.o0 = job->o0 + k;
            dots(1, 1, &one, r);
        }
    }
}

#else
typedef int matmul_avx2_not_on_this_machine; /* a translation unit may not be empty */
#endif
