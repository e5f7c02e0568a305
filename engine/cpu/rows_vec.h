/* engine/cpu/rows_vec.h: sixteen f32 lanes for rows_impl.h, in AVX-512, in AVX2 (two halves) and in plain C. Every operation is one IEEE operation
 * per lane, with the same result in all three; max and min return the second operand when either is NaN, as the x86 instructions do. */
#ifndef BEDSIDE_ENGINE_CPU_ROWS_VEC_H
#define BEDSIDE_ENGINE_CPU_ROWS_VEC_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "engine/blocks.h"

enum { LANES = 16 };

#define ROWS_INLINE static inline __attribute__((always_inline, unused))

#if defined(__AVX512F__)
#include <immintrin.h>

typedef __m512 v16;

ROWS_INLINE __mmask16 v16_first(int n)
{
    return (__mmask16)((1u << n) - 1);
}
ROWS_INLINE v16 v16_set(float x)
{
    return _mm512_set1_ps(x);
}
ROWS_INLINE v16 v16_load(const float *p)
{
    return _mm512_loadu_ps(p);
}
ROWS_INLINE v16 v16_load_part(const float *p, int n)
{
    return _mm512_maskz_loadu_ps(v16_first(n), p);
}
ROWS_INLINE void v16_store(float *p, v16 x)
{
    _mm512_storeu_ps(p, x);
}
ROWS_INLINE void v16_store_part(float *p, v16 x, int n)
{
    _mm512_mask_storeu_ps(p, v16_first(n), x);
}
ROWS_INLINE v16 v16_add(v16 a, v16 b)
{
    return _mm512_add_ps(a, b);
}
ROWS_INLINE v16 v16_sub(v16 a, v16 b)
{
    return _mm512_sub_ps(a, b);
}
ROWS_INLINE v16 v16_mul(v16 a, v16 b)
{
    return _mm512_mul_ps(a, b);
}
ROWS_INLINE v16 v16_div(v16 a, v16 b)
{
    return _mm512_div_ps(a, b);
}
ROWS_INLINE v16 v16_fma(v16 a, v16 b, v16 c)
{
    return _mm512_fmadd_ps(a, b, c);
}
ROWS_INLINE v16 v16_fnma(v16 a, v16 b, v16 c) /* c - a * b */
{
    return _mm512_fnmadd_ps(a, b, c);
}
ROWS_INLINE v16 v16_max(v16 a, v16 b)
{
    return _mm512_max_ps(a, b);
}
ROWS_INLINE v16 v16_min(v16 a, v16 b)
{
    return _mm512_min_ps(a, b);
}
/* x where !(a < b), 0 elsewhere */
ROWS_INLINE v16 v16_zero_where_less(v16 x, v16 a, v16 b)
{
    return _mm512_maskz_mov_ps((__mmask16)~_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), x);
}
/* x * 2^k for k in the low bits of `t` (see v16_exp) */
ROWS_INLINE v16 v16_scale(v16 x, v16 t)
{
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_slli_epi32(_mm512_castps_si512(t), 23)));
}
ROWS_INLINE __m256 v16_high(v16 x)
{
    return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
}
ROWS_INLINE float v16_sum(v16 x)
{
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x), v16_high(x));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
ROWS_INLINE float v16_largest(v16 x)
{
    __m256 a = _mm256_max_ps(_mm512_castps512_ps256(x), v16_high(x));
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}
ROWS_INLINE v16 v16_from_f16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p));
}
ROWS_INLINE void v16_to_f16(uint16_t *p, v16 x)
{
    _mm256_storeu_si256((__m256i *)(void *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
ROWS_INLINE v16 v16_from_i8(const int8_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p)));
}
/* Rounded half to even; |x| <= 127. */
ROWS_INLINE void v16_to_i8(int8_t *p, v16 x)
{
    _mm_storeu_si128((__m128i *)(void *)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}
ROWS_INLINE float f16_scale(uint16_t half)
{
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
}

/* The sums of 16 vectors at once: lane 4 * c + k is v16_sum(v[4 * k + c]), the same additions in a third of the instructions. */
ROWS_INLINE v16 v16_sums(const v16 *v)
{
    v16 a[8], b[4], c[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        a[i] = v16_add(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x44), _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xee));
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        b[i] = v16_add(_mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0x88), _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0xdd));
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        c[i] = v16_add(_mm512_shuffle_ps(b[2 * i], b[2 * i + 1], 0x44), _mm512_shuffle_ps(b[2 * i], b[2 * i + 1], 0xee));
    return v16_add(_mm512_shuffle_ps(c[0], c[1], 0x88), _mm512_shuffle_ps(c[0], c[1], 0xdd));
}

#elif defined(__AVX2__)
#include <immintrin.h>

typedef struct {
    __m256 a, b;
} v16;

ROWS_INLINE v16 v16_set(float x)
{
    return (v16){_mm256_set1_ps(x), _mm256_set1_ps(x)};
}
ROWS_INLINE v16 v16_load(const float *p)
{
    return (v16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
/* Masks for the first n of 16 lanes: 16 entries from table + 16 - n. */
static const int32_t v16_mask_table[32] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
ROWS_INLINE __m256i v16_mask(int n, int from)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)(v16_mask_table + LANES - n + from));
}
ROWS_INLINE v16 v16_load_part(const float *p, int n)
{
    v16 x = {_mm256_maskload_ps(p, v16_mask(n, 0)), _mm256_setzero_ps()};
    if (n > 8)
        x.b = _mm256_maskload_ps(p + 8, v16_mask(n, 8));
    return x;
}
ROWS_INLINE void v16_store(float *p, v16 x)
{
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
ROWS_INLINE void v16_store_part(float *p, v16 x, int n)
{
    _mm256_maskstore_ps(p, v16_mask(n, 0), x.a);
    if (n > 8)
        _mm256_maskstore_ps(p + 8, v16_mask(n, 8), x.b);
}
ROWS_INLINE v16 v16_add(v16 x, v16 y)
{
    return (v16){_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}
ROWS_INLINE v16 v16_sub(v16 x, v16 y)
{
    return (v16){_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
}
ROWS_INLINE v16 v16_mul(v16 x, v16 y)
{
    return (v16){_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
ROWS_INLINE v16 v16_div(v16 x, v16 y)
{
    return (v16){_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)};
}
ROWS_INLINE v16 v16_fma(v16 x, v16 y, v16 z)
{
    return (v16){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
ROWS_INLINE v16 v16_fnma(v16 x, v16 y, v16 z) /* z - x * y */
{
    return (v16){_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)};
}
ROWS_INLINE v16 v16_max(v16 x, v16 y)
{
    return (v16){_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
}
ROWS_INLINE v16 v16_min(v16 x, v16 y)
{
    return (v16){_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)};
}
/* x where !(y < z), 0 elsewhere */
ROWS_INLINE v16 v16_zero_where_less(v16 x, v16 y, v16 z)
{
    return (v16){_mm256_andnot_ps(_mm256_cmp_ps(y.a, z.a, _CMP_LT_OQ), x.a), _mm256_andnot_ps(_mm256_cmp_ps(y.b, z.b, _CMP_LT_OQ), x.b)};
}
ROWS_INLINE __m256 v8_scale(__m256 x, __m256 t)
{
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_castps_si256(t), 23)));
}
/* x * 2^k for k in the low bits of `t` (see v16_exp) */
ROWS_INLINE v16 v16_scale(v16 x, v16 t)
{
    return (v16){v8_scale(x.a, t.a), v8_scale(x.b, t.b)};
}
ROWS_INLINE float v16_sum(v16 x)
{
    __m256 a = _mm256_add_ps(x.a, x.b);
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
ROWS_INLINE float v16_largest(v16 x)
{
    __m256 a = _mm256_max_ps(x.a, x.b);
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}
ROWS_INLINE v16 v16_from_f16(const uint16_t *p)
{
    return (v16){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p)),
                 _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(p + 8)))};
}
ROWS_INLINE void v16_to_f16(uint16_t *p, v16 x)
{
    _mm_storeu_si128((__m128i *)(void *)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128((__m128i *)(void *)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
ROWS_INLINE v16 v16_from_i8(const int8_t *p)
{
    const __m128i q = _mm_loadu_si128((const __m128i *)(const void *)p);
    return (v16){_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(q)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(q, q)))};
}
ROWS_INLINE __m128i v8_to_i16(__m256 x)
{
    const __m256i q = _mm256_cvtps_epi32(x);
    return _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
}
/* Rounded half to even; |x| <= 127. */
ROWS_INLINE void v16_to_i8(int8_t *p, v16 x)
{
    _mm_storeu_si128((__m128i *)(void *)p, _mm_packs_epi16(v8_to_i16(x.a), v8_to_i16(x.b)));
}
ROWS_INLINE float f16_scale(uint16_t half)
{
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
}

#else

/* Here the operations are loops. Inlined everywhere, with AddressSanitizer's checks in each, they would take minutes to compile. */
#if defined(__SANITIZE_ADDRESS__)
#define BASE_INLINE static __attribute__((noinline, unused))
#else
#define BASE_INLINE static inline __attribute__((unused))
#endif

typedef struct {
    float f[LANES];
} v16;

#define V16_EACH(expression)                                                                                                                         \
    v16 y;                                                                                                                                           \
    for (int i = 0; i < LANES; i++)                                                                                                                  \
        y.f[i] = (expression);                                                                                                                       \
    return y

BASE_INLINE v16 v16_set(float x)
{
    V16_EACH(x);
}
BASE_INLINE v16 v16_load(const float *p)
{
    V16_EACH(p[i]);
}
BASE_INLINE v16 v16_load_part(const float *p, int n)
{
    V16_EACH(i < n ? p[i] : 0.0f);
}
BASE_INLINE void v16_store(float *p, v16 x)
{
    memcpy(p, x.f, sizeof x.f);
}
BASE_INLINE void v16_store_part(float *p, v16 x, int n)
{
    memcpy(p, x.f, (size_t)n * sizeof *p);
}
BASE_INLINE v16 v16_add(v16 a, v16 b)
{
    V16_EACH(a.f[i] + b.f[i]);
}
BASE_INLINE v16 v16_sub(v16 a, v16 b)
{
    V16_EACH(a.f[i] - b.f[i]);
}
BASE_INLINE v16 v16_mul(v16 a, v16 b)
{
    V16_EACH(a.f[i] * b.f[i]);
}
BASE_INLINE v16 v16_div(v16 a, v16 b)
{
    V16_EACH(a.f[i] / b.f[i]);
}
BASE_INLINE v16 v16_fma(v16 a, v16 b, v16 c)
{
    V16_EACH(fmaf(a.f[i], b.f[i], c.f[i]));
}
BASE_INLINE v16 v16_fnma(v16 a, v16 b, v16 c) /* c - a * b */
{
    V16_EACH(fmaf(-a.f[i], b.f[i], c.f[i]));
}
BASE_INLINE v16 v16_max(v16 a, v16 b)
{
    V16_EACH(a.f[i] > b.f[i] ? a.f[i] : b.f[i]);
}
BASE_INLINE v16 v16_min(v16 a, v16 b)
{
    V16_EACH(a.f[i] < b.f[i] ? a.f[i] : b.f[i]);
}
/* x where !(a < b), 0 elsewhere */
BASE_INLINE v16 v16_zero_where_less(v16 x, v16 a, v16 b)
{
    V16_EACH(a.f[i] < b.f[i] ? 0.0f : x.f[i]);
}
/* x * 2^k for k in the low bits of `t` (see v16_exp) */
BASE_INLINE v16 v16_scale(v16 x, v16 t)
{
    uint32_t bits[LANES], shift[LANES];
    memcpy(bits, x.f, sizeof bits);
    memcpy(shift, t.f, sizeof shift);
    for (int i = 0; i < LANES; i++)
        bits[i] += shift[i] << 23;
    memcpy(x.f, bits, sizeof bits);
    return x;
}
BASE_INLINE float v16_sum(v16 x)
{
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            x.f[i] += x.f[i + half];
    return x.f[0];
}
BASE_INLINE float v16_largest(v16 x)
{
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            x.f[i] = x.f[i] > x.f[i + half] ? x.f[i] : x.f[i + half];
    return x.f[0];
}
BASE_INLINE v16 v16_from_f16(const uint16_t *p)
{
    V16_EACH(f16_to_f32(p[i]));
}
BASE_INLINE void v16_to_f16(uint16_t *p, v16 x)
{
    for (int i = 0; i < LANES; i++)
        p[i] = f32_to_f16(x.f[i]);
}
BASE_INLINE v16 v16_from_i8(const int8_t *p)
{
    V16_EACH((float)p[i]);
}
/* Rounded half to even; |x| <= 127. */
BASE_INLINE void v16_to_i8(int8_t *p, v16 x)
{
    for (int i = 0; i < LANES; i++)
        p[i] = (int8_t)rintf(x.f[i]);
}
BASE_INLINE float f16_scale(uint16_t half)
{
    return f16_to_f32(half);
}
#endif

/* e^x with an error below 2 ulp: x = k ln 2 + r with |r| <= ln 2 / 2 (+ rounding), e^r by its Taylor sum to r^7 (remainder < 6e-9), times 2^k by adding
 * k to the exponent. Adding 1.5 * 2^23 leaves k, rounded, in the low bits. Clamped so that every result is a normal number, or 0 below -86.5. */
ROWS_INLINE v16 v16_exp(v16 x)
{
    const v16 magic = v16_set(0x1.8p23f);
    v16 c = v16_max(v16_set(-86.5f), v16_min(v16_set(88.0f), x));
    v16 t = v16_fma(c, v16_set(0x1.715476p0f), magic); /* 1 / ln 2 */
    v16 k = v16_sub(t, magic);
    v16 r = v16_fnma(k, v16_set(0x1.62e43p-1f), c); /* ln 2, its f32 value and the rest */
    r = v16_fnma(k, v16_set(-0x1.05c61p-29f), r);
    v16 p = v16_fma(v16_set(1.0f / 5040), r, v16_set(1.0f / 720));
    p = v16_fma(p, r, v16_set(1.0f / 120));
    p = v16_fma(p, r, v16_set(1.0f / 24));
    p = v16_fma(p, r, v16_set(1.0f / 6));
    p = v16_fma(p, r, v16_set(0.5f));
    p = v16_fma(p, r, v16_set(1.0f));
    p = v16_fma(p, r, v16_set(1.0f));
    return v16_zero_where_less(v16_scale(p, t), x, v16_set(-86.5f));
}

/* 1 + e^-x, the denominator of the sigmoid */
ROWS_INLINE v16 v16_one_plus_exp_minus(v16 x)
{
    return v16_add(v16_set(1.0f), v16_exp(v16_sub(v16_set(0.0f), x)));
}

#endif
