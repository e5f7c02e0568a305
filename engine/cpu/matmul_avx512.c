/* engine/cpu/matmul_avx512.c: kernels for AVX-512 with VNNI (Zen 4 and 5, Ice Lake and later).
 *
 * A tile is 16 weight rows; a vector lane is a weight row wherever floats are involved, so that 16 outputs follow the defined order of operations at
 * once. Two ways lead to the integer sums of a tile and a block:
 *
 *   few activation rows (decode): a weight row's block is unpacked in place in registers, multiplied along the row, and the sums of 16 rows are added
 *     across lanes together. Weights pass through once, so this aims at memory speed;
 *   many (prefill): the block of two tiles is laid out as a panel in which lanes are rows, once, and then multiplied with broadcast activations, four
 *     rows at a time: eight independent chains of dot products that use every loaded register several times. */
#if defined(__x86_64__)

#include <immintrin.h>
#include <math.h>

#include "engine/cpu/matmul_impl.h"

#define INLINE static inline __attribute__((always_inline))

enum { T = MATMUL_ROWS, FEW = 6 };

/* 16 weight rows at the current block. Rows beyond the matrix repeat the last one; their results are not stored. */
struct tile {
    const uint8_t *row[T];
};

/* One block of 256 weights (or eight of 32) of a tile with lanes as rows. */
struct panel {
    __m512i q[64];     /* dword k of a row: values 4k .. 4k+3, unsigned */
    __m512i scale[16]; /* K types: scale of each group as i32 */
    __m512i pair[8];   /* K types: minima (or Q6_K's scales) of neighbouring groups as two i16 */
    __m512 d[8];       /* scale of each block */
    __m512 dmin;
};
_Static_assert(2 * sizeof(struct panel) + MATMUL_PASS_ROWS * 2 * T * sizeof(float) <= MATMUL_SCRATCH, "scratch holds panels and sums");

/* ---- activations ---- */

INLINE __m512i magnitude(__m512 x)
{
    return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
}

/* round-half-even(x / d), at most 127 in magnitude, as bytes. */
INLINE __m128i quantise(__m512 x, __m512 d)
{
    __m512 q = _mm512_div_ps(x, d);
    q = _mm512_max_ps(_mm512_min_ps(q, _mm512_set1_ps(127.0f)), _mm512_set1_ps(-127.0f));
    return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(q));
}

void act_256_avx512(const float *x, int64_t n, struct act_256 *dst)
{
    const __m512i ones8 = _mm512_set1_epi8(1);
    const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int64_t b = 0; b < n / 256; b++, x += 256, dst++) {
        __m512i best = _mm512_setzero_si512();
        for (int i = 0; i < 16; i++)
            best = _mm512_max_epu32(best, magnitude(_mm512_loadu_ps(x + 16 * i)));
        uint32_t top = _mm512_reduce_max_epu32(best);
        float d = 0;
        if (top >= 0x7f800000u)
            d = NAN;
        for (int i = 0; i < 16 && top < 0x7f800000u; i++) { /* the first value of that magnitude gives the sign */
            __m512 v = _mm512_loadu_ps(x + 16 * i);
            __mmask16 hit = _mm512_cmpeq_epi32_mask(magnitude(v), _mm512_set1_epi32((int)top));
            if (hit) {
                d = x[16 * i + __builtin_ctz(hit)] / -127.0f;
                break;
            }
        }
        memset(dst, 0, sizeof *dst);
        if (d == 0)
            continue;
        dst->d = d;
        if (isnan(d))
            continue;
        __m512i part[4];
        for (int i = 0; i < 16; i++)
            _mm_store_si128((__m128i *)(void *)(dst->q + 16 * i), quantise(_mm512_loadu_ps(x + 16 * i), _mm512_set1_ps(d)));
        for (int i = 0; i < 4; i++)
            part[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), ones8, _mm512_load_si512(dst->q + 64 * i));
        __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(part[0], part[1]), _mm512_unpackhi_epi32(part[0], part[1]));
        __m512i c = _mm512_add_epi32(_mm512_unpacklo_epi32(part[2], part[3]), _mm512_unpackhi_epi32(part[2], part[3]));
        __m512i sum = _mm512_add_epi32(_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c)); /* lane 4l + i: group 4i + l */
        __m256i sum16 = _mm512_cvtepi32_epi16(_mm512_permutexvar_epi32(in_order, sum));
        _mm256_store_si256((__m256i *)(void *)dst->sum16, sum16);
        _mm_store_si128((__m128i *)(void *)dst->sum32, _mm256_cvtepi32_epi16(_mm256_madd_epi16(sum16, _mm256_set1_epi16(1))));
    }
}

void act_32_avx512(const float *x, int64_t n, void *dst)
{
    struct act_32 at = act_32_at(dst, n);
    uint8_t *q = dst;
    uint8_t *d_out = q + ((const uint8_t *)at.d - q), *sum_out = q + ((const uint8_t *)at.sum - q);
    for (int64_t b = 0; b < n / 32; b++) {
        __m512 x0 = _mm512_loadu_ps(x + 32 * b), x1 = _mm512_loadu_ps(x + 32 * b + 16);
        float top = f32_of_bits(_mm512_reduce_max_epu32(_mm512_max_epu32(magnitude(x0), magnitude(x1))));
        __m128i q0 = _mm_setzero_si128(), q1 = q0;
        float d = top / 127.0f, rounded = NAN;
        if (isfinite(top)) {
            rounded = _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtps_ph(_mm_set_ss(d), _MM_FROUND_TO_NEAREST_INT)));
            if (d != 0) {
                q0 = quantise(x0, _mm512_set1_ps(d));
                q1 = quantise(x1, _mm512_set1_ps(d));
            }
        }
        __m256i both = _mm256_set_m128i(q1, q0);
        _mm256_storeu_si256((__m256i *)(void *)(q + 32 * b), both);
        __m256i by4 = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), both);
        int32_t sum = _mm512_reduce_add_epi32(_mm512_zextsi256_si512(by4));
        memcpy(d_out + 4 * b, &rounded, 4);
        memcpy(sum_out + 4 * b, &sum, 4);
    }
}

/* ---- tiles ---- */

/* 16 bytes at `offset` of each row, as four vectors of dwords with lanes as rows. */
INLINE void load_dwords(const struct tile *t, size_t offset, __m512i out[4])
{
    __m512i z[4];
    for (int j = 0; j < 4; j++) {
        z[j] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(const void *)(t->row[j] + offset)));
        z[j] = _mm512_mask_broadcast_i32x4(z[j], 0x00f0, _mm_loadu_si128((const __m128i *)(const void *)(t->row[4 + j] + offset)));
        z[j] = _mm512_mask_broadcast_i32x4(z[j], 0x0f00, _mm_loadu_si128((const __m128i *)(const void *)(t->row[8 + j] + offset)));
        z[j] = _mm512_mask_broadcast_i32x4(z[j], 0xf000, _mm_loadu_si128((const __m128i *)(const void *)(t->row[12 + j] + offset)));
    }
    __m512i a = _mm512_unpacklo_epi32(z[0], z[1]), b = _mm512_unpackhi_epi32(z[0], z[1]);
    __m512i c = _mm512_unpacklo_epi32(z[2], z[3]), d = _mm512_unpackhi_epi32(z[2], z[3]);
    out[0] = _mm512_unpacklo_epi64(a, c);
    out[1] = _mm512_unpackhi_epi64(a, c);
    out[2] = _mm512_unpacklo_epi64(b, d);
    out[3] = _mm512_unpackhi_epi64(b, d);
}

/* The f16 at `offset` of each row. */
INLINE __m512 load_halves(const struct tile *t, size_t offset)
{
    uint16_t half[T];
    for (int i = 0; i < T; i++)
        half[i] = load_u16(t->row[i] + offset);
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)half));
}

/* The 16-byte head of Q4_K and Q5_K: d, dmin and the six-bit scales and minima, four of them to a dword. */
struct k_head {
    __m512 d, dmin;
    __m512i scale[2], min[2];
};

INLINE struct k_head load_k_head(const struct tile *t, size_t offset)
{
    const __m512i six = _mm512_set1_epi32(0x3f3f3f3f), low = _mm512_set1_epi32(0x0f0f0f0f), high = _mm512_set1_epi32(0x30303030);
    __m512i w[4];
    struct k_head h;
    load_dwords(t, offset, w);
    h.d = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(w[0]));
    h.dmin = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(w[0], 16)));
    h.scale[0] = _mm512_and_si512(w[1], six);
    h.min[0] = _mm512_and_si512(w[2], six);
    h.scale[1] = _mm512_or_si512(_mm512_and_si512(w[3], low), _mm512_and_si512(_mm512_srli_epi32(w[1], 2), high));
    h.min[1] = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi32(w[3], 4), low), _mm512_and_si512(_mm512_srli_epi32(w[2], 2), high));
    return h;
}

/* Bytes 0, 1 (half 0) or 2, 3 (half 1) of each dword as two unsigned i16. */
INLINE __m512i widen_bytes(__m512i v, int half)
{
    const __m512i first = _mm512_set4_epi32((int)0x800d800c, (int)0x80098008, (int)0x80058004, (int)0x80018000);
    const __m512i second = _mm512_set4_epi32((int)0x800f800e, (int)0x800b800a, (int)0x80078006, (int)0x80038002);
    return _mm512_shuffle_epi8(v, half ? second : first);
}

/* The same, signed. */
INLINE __m512i widen_signed_bytes(__m512i v, int half)
{
    return _mm512_srai_epi16(_mm512_slli_epi16(widen_bytes(v, half), 8), 8);
}

INLINE __m512i broadcast_pair(const int16_t *p)
{
    return _mm512_set1_epi32((int)load_u32(p));
}

/* sum over pairs of pair[j] * (sums 2j, 2j+1), for n pairs. */
INLINE __m512i dot_pairs(const __m512i *pair, const int16_t *sums, int n)
{
    __m512i sum = _mm512_setzero_si512();
    for (int j = 0; j < n; j++)
        sum = _mm512_dpwssd_epi32(sum, pair[j], broadcast_pair(sums + 2 * j));
    return sum;
}

INLINE __m512 add_isum(__m512 y, float dx, __m512 dw, __m512i isum)
{
    return _mm512_fmadd_ps(_mm512_mul_ps(_mm512_set1_ps(dx), dw), _mm512_cvtepi32_ps(isum), y);
}

INLINE __m512 sub_msum(__m512 y, float dx, __m512 dmin, __m512i msum)
{
    return _mm512_fnmadd_ps(_mm512_mul_ps(_mm512_set1_ps(dx), dmin), _mm512_cvtepi32_ps(msum), y);
}

/* ---- many activation rows: panels ---- */

static void pack_k_head(struct panel *p, const struct tile *t)
{
    struct k_head h = load_k_head(t, 0);
    p->d[0] = h.d;
    p->dmin = h.dmin;
    for (int j = 0; j < 8; j++)
        p->scale[j] = _mm512_and_si512(_mm512_srli_epi32(h.scale[j / 4], (unsigned)(8 * (j % 4))), _mm512_set1_epi32(0xff));
    for (int j = 0; j < 4; j++)
        p->pair[j] = widen_bytes(h.min[j / 2], j % 2);
}

static void pack_q4_k(struct panel *p, const struct tile *t)
{
    const __m512i low = _mm512_set1_epi8(15);
    pack_k_head(p, t);
    for (int i = 0; i < 8; i++) { /* 16 packed bytes: dwords of sub-block 2g in the low nibbles, of 2g + 1 in the high ones */
        __m512i w[4];
        load_dwords(t, 16 + 16 * (size_t)i, w);
        __m512i *out = p->q + 16 * (i / 2) + 4 * (i % 2);
        for (int k = 0; k < 4; k++) {
            out[k] = _mm512_and_si512(w[k], low);
            out[k + 8] = _mm512_and_si512(_mm512_srli_epi32(w[k], 4), low);
        }
    }
}

static void pack_q5_k(struct panel *p, const struct tile *t)
{
    const __m512i low = _mm512_set1_epi8(15), bit = _mm512_set1_epi8(1);
    __m512i fifth[8];
    pack_k_head(p, t);
    load_dwords(t, 16, fifth);
    load_dwords(t, 32, fifth + 4);
    for (int i = 0; i < 8; i++) {
        __m512i w[4];
        load_dwords(t, 48 + 16 * (size_t)i, w);
        __m512i *out = p->q + 16 * (i / 2) + 4 * (i % 2);
        for (int k = 0; k < 4; k++) {
            __m512i *h = &fifth[4 * (i % 2) + k]; /* bit 0: this sub-block's, bit 1: the next one's */
            out[k] = _mm512_or_si512(_mm512_and_si512(w[k], low), _mm512_slli_epi32(_mm512_and_si512(*h, bit), 4));
            __m512i next = _mm512_and_si512(_mm512_srli_epi32(*h, 1), bit);
            out[k + 8] = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi32(w[k], 4), low), _mm512_slli_epi32(next, 4));
            *h = _mm512_srli_epi32(*h, 2);
        }
    }
}

static void pack_q6_k(struct panel *p, const struct tile *t)
{
    const __m512i low = _mm512_set1_epi8(15), two = _mm512_set1_epi8(0x30);
    __m512i w[4];
    load_dwords(t, 192, w);
    for (int k = 0; k < 16; k++)
        p->scale[k] = _mm512_srai_epi32(_mm512_slli_epi32(w[k / 4], (unsigned)(24 - 8 * (k % 4))), 24);
    for (int j = 0; j < 8; j++)
        p->pair[j] = widen_signed_bytes(w[j / 2], j % 2);
    p->d[0] = load_halves(t, 208);
    for (int half = 0; half < 2; half++) {
        for (int i = 0; i < 2; i++) { /* values 16i .. 16i + 15 of each of the half's four planes of 32 */
            __m512i a[4], b[4], h[4], *out = p->q + 32 * half + 4 * i;
            load_dwords(t, (size_t)(64 * half + 16 * i), a);
            load_dwords(t, (size_t)(64 * half + 32 + 16 * i), b);
            load_dwords(t, (size_t)(128 + 32 * half + 16 * i), h);
            for (int k = 0; k < 4; k++) {
                __m512i h0 = _mm512_and_si512(_mm512_slli_epi32(h[k], 4), two), h1 = _mm512_and_si512(_mm512_slli_epi32(h[k], 2), two);
                __m512i h2 = _mm512_and_si512(h[k], two), h3 = _mm512_and_si512(_mm512_srli_epi32(h[k], 2), two);
                out[k] = _mm512_or_si512(_mm512_and_si512(a[k], low), h0);
                out[k + 8] = _mm512_or_si512(_mm512_and_si512(b[k], low), h1);
                out[k + 16] = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi32(a[k], 4), low), h2);
                out[k + 24] = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi32(b[k], 4), low), h3);
            }
        }
    }
}

static void pack_q8_0(struct panel *p, const struct tile *t, int n_blocks)
{
    const __m512i flip = _mm512_set1_epi8(-128); /* q + 128, to make it unsigned */
    for (int b = 0; b < n_blocks; b++) {
        size_t at = (size_t)b * 34;
        p->d[b] = load_halves(t, at);
        for (int half = 0; half < 2; half++) {
            __m512i w[4], *out = p->q + 8 * b + 4 * half;
            load_dwords(t, at + 2 + 16 * (size_t)half, w);
            for (int k = 0; k < 4; k++)
                out[k] = _mm512_xor_si512(w[k], flip);
        }
    }
}

static void pack_q4_0(struct panel *p, const struct tile *t, int n_blocks)
{
    const __m512i low = _mm512_set1_epi8(15);
    for (int b = 0; b < n_blocks; b++) {
        size_t at = (size_t)b * 18;
        __m512i w[4], *out = p->q + 8 * b;
        p->d[b] = load_halves(t, at);
        load_dwords(t, at + 2, w);
        for (int k = 0; k < 4; k++) {
            out[k] = _mm512_and_si512(w[k], low);
            out[k + 4] = _mm512_and_si512(_mm512_srli_epi32(w[k], 4), low);
        }
    }
}

/* R activation rows times C panels of a K type with groups of G values; acc [R][2 * T]. */
INLINE void multiply_256(int R, int C, int G, const struct panel *p, const struct act_256 *const *x, float *acc)
{
    __m512i isum[4][2];
    for (int r = 0; r < R; r++) {
        for (int c = 0; c < C; c++) {
            isum[r][c] = _mm512_setzero_si512();
            if (G == 16) /* values are stored + 32 */
                isum[r][c] = _mm512_sub_epi32(isum[r][c], _mm512_slli_epi32(dot_pairs(p[c].pair, x[r]->sum16, 8), 5));
        }
    }
    for (int g = 0; g < 256 / G; g++) {
        __m512i s[4][2];
        for (int r = 0; r < R; r++) {
            for (int c = 0; c < C; c++)
                s[r][c] = _mm512_setzero_si512();
        }
        for (int i = 0; i < G / 4; i++) {
            int k = g * (G / 4) + i;
            for (int r = 0; r < R; r++) {
                __m512i v = _mm512_set1_epi32((int)load_u32(x[r]->q + 4 * k));
                for (int c = 0; c < C; c++)
                    s[r][c] = _mm512_dpbusd_epi32(s[r][c], p[c].q[k], v);
            }
        }
        for (int r = 0; r < R; r++) {
            for (int c = 0; c < C; c++)
                isum[r][c] = _mm512_add_epi32(isum[r][c], _mm512_mullo_epi32(s[r][c], p[c].scale[g]));
        }
    }
    for (int r = 0; r < R; r++) {
        for (int c = 0; c < C; c++) {
            float *at = acc + (2 * r + c) * T;
            __m512 y = add_isum(_mm512_load_ps(at), x[r]->d, p[c].d[0], isum[r][c]);
            if (G == 32)
                y = sub_msum(y, x[r]->d, p[c].dmin, dot_pairs(p[c].pair, x[r]->sum32, 4));
            _mm512_store_ps(at, y);
        }
    }
}

/* R activation rows, from block b0, times C panels of n_blocks blocks of 32 whose values are stored + `offset`. */
INLINE void multiply_32(int R, int C, int offset, int n_blocks, int64_t b0, const struct panel *p, const struct act_32 *x, float *acc)
{
    __m512 y[4][2];
    for (int r = 0; r < R; r++) {
        for (int c = 0; c < C; c++)
            y[r][c] = _mm512_load_ps(acc + (2 * r + c) * T);
    }
    for (int b = 0; b < n_blocks; b++) {
        __m512i s[4][2];
        for (int r = 0; r < R; r++) {
            for (int c = 0; c < C; c++)
                s[r][c] = _mm512_set1_epi32(-offset * x[r].sum[b0 + b]);
        }
        for (int k = 0; k < 8; k++) {
            for (int r = 0; r < R; r++) {
                __m512i v = _mm512_set1_epi32((int)load_u32(x[r].q + 32 * (b0 + b) + 4 * k));
                for (int c = 0; c < C; c++)
                    s[r][c] = _mm512_dpbusd_epi32(s[r][c], p[c].q[8 * b + k], v);
            }
        }
        for (int r = 0; r < R; r++) {
            for (int c = 0; c < C; c++)
                y[r][c] = add_isum(y[r][c], x[r].d[b0 + b], p[c].d[b], s[r][c]);
        }
    }
    for (int r = 0; r < R; r++) {
        for (int c = 0; c < C; c++)
            _mm512_store_ps(acc + (2 * r + c) * T, y[r][c]);
    }
}

/* Runs DO(R, C) with the numbers as constants, so that the sums of each shape live in registers. */
/* clang-format off */
#define WITH_SHAPE(rows, tiles, DO)                                                                                                                  \
    switch ((rows) * 2 + (tiles)) {                                                                                                                  \
    case 10: DO(4, 2); break;                                                                                                                        \
    case 8: DO(3, 2); break;                                                                                                                         \
    case 6: DO(2, 2); break;                                                                                                                         \
    case 4: DO(1, 2); break;                                                                                                                         \
    case 9: DO(4, 1); break;                                                                                                                         \
    case 7: DO(3, 1); break;                                                                                                                         \
    case 5: DO(2, 1); break;                                                                                                                         \
    default: DO(1, 1); break;                                                                                                                        \
    }
/* clang-format on */

/* Up to four activation rows, of a K type, at block b. */
static void rows_256(const struct matmul_job *job, int64_t b, int r, int rows, int tiles, const struct panel *p, float *acc)
{
    const struct act_256 *x[4];
    for (int i = 0; i < 4; i++) /* all four, though a kernel for fewer rows reads fewer */
        x[i] = (const struct act_256 *)job->x[r + (i < rows ? i : 0)] + b;
#define BY_32(R, C) multiply_256(R, C, 32, p, x, acc)
#define BY_16(R, C) multiply_256(R, C, 16, p, x, acc)
    if (job->type == BLOCK_Q6_K)
        WITH_SHAPE(rows, tiles, BY_16)
    else
        WITH_SHAPE(rows, tiles, BY_32)
}

static void rows_32(const struct matmul_job *job, int64_t b, int n_blocks, int r, int rows, int tiles, const struct panel *p, float *acc)
{
    struct act_32 x[4];
    for (int i = 0; i < 4; i++)
        x[i] = act_32_at(job->x[r + (i < rows ? i : 0)], job->n_in);
#define Q8(R, C) multiply_32(R, C, 128, n_blocks, b, p, x, acc)
#define Q4(R, C) multiply_32(R, C, 8, n_blocks, b, p, x, acc)
    if (job->type == BLOCK_Q8_0)
        WITH_SHAPE(rows, tiles, Q8)
    else
        WITH_SHAPE(rows, tiles, Q4)
}

/* Points a tile at the block that starts `offset` bytes into rows o .. o + 15. */
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

INLINE void store_outputs(const struct matmul_job *job, int64_t o, int r, __m512 sum)
{
    float *y = job->y[r] + job->o0 + o;
    int n = job->n_out - o < T ? (int)(job->n_out - o) : T;
    __mmask16 valid = (__mmask16)((1u << n) - 1);
    if (job->add)
        sum = _mm512_add_ps(_mm512_maskz_loadu_ps(valid, y), sum);
    _mm512_mask_storeu_ps(y, valid, sum);
}

/* Two tiles (or the last one) times up to MATMUL_PASS_ROWS activation rows. */
static void panels(const struct matmul_job *job, int64_t o, int r0, int n_rows)
{
    struct panel *p = job->scratch;
    float *acc = (float *)(void *)(p + 2);
    bool wide = act_kind_of(job->type) == ACT_Q8_256;
    int tiles = job->n_out - o > T ? 2 : 1;
    int64_t n_blocks = job->n_in / (wide ? 256 : 32);
    int step = wide ? 1 : 8;
    size_t bytes = block_bytes(job->type, wide ? 256 : 32);
    memset(acc, 0, (size_t)n_rows * 2 * T * sizeof *acc);
    for (int64_t b = 0; b < n_blocks; b += step) {
        int n = n_blocks - b < step ? (int)(n_blocks - b) : step;
        for (int c = 0; c < tiles; c++) {
            struct tile t;
            aim(&t, job, o + c * T, (size_t)b * bytes);
            for (int i = 0; i < T; i++)
                prefetch(t.row[i] + 2 * T * job->row_bytes, (size_t)n * bytes);
            pack(p + c, &t, job->type, n);
        }
        for (int r = 0; r < n_rows; r += 4) {
            int rows = n_rows - r < 4 ? n_rows - r : 4;
            if (wide)
                rows_256(job, b, r0 + r, rows, tiles, p, acc + (size_t)r * 2 * T);
            else
                rows_32(job, b, n, r0 + r, rows, tiles, p, acc + (size_t)r * 2 * T);
        }
    }
    for (int r = 0; r < n_rows; r++) {
        for (int c = 0; c < tiles; c++)
            store_outputs(job, o + c * T, r0 + r, _mm512_load_ps(acc + (size_t)(2 * r + c) * T));
    }
}

/* ---- few activation rows ---- */

/* Lane i of the result: the sum of the 16 lanes of v[i]. */
INLINE __m512i add_across(const __m512i v[T])
{
    __m512i a[8], b[4];
    for (int i = 0; i < 8; i++)
        a[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 4; i++)
        b[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_epi64(a[2 * i], a[2 * i + 1]));
    __m512i c = _mm512_add_epi32(_mm512_shuffle_i32x4(b[0], b[1], 0x88), _mm512_shuffle_i32x4(b[0], b[1], 0xdd));
    __m512i d = _mm512_add_epi32(_mm512_shuffle_i32x4(b[2], b[3], 0x88), _mm512_shuffle_i32x4(b[2], b[3], 0xdd));
    return _mm512_add_epi32(_mm512_shuffle_i32x4(c, d, 0x88), _mm512_shuffle_i32x4(c, d, 0xdd));
}

/* Lanes 4i + l of 256-bit halves: sums of the low halves of v in *lo and of the high halves in *hi. */
INLINE void add_across_halves(const __m512i v[T], __m512i *lo, __m512i *hi)
{
    __m512i a[8], b[4];
    for (int i = 0; i < 8; i++)
        a[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 4; i++)
        b[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_epi64(a[2 * i], a[2 * i + 1]));
    __m512i c = _mm512_add_epi32(_mm512_shuffle_i32x4(b[0], b[1], 0x88), _mm512_shuffle_i32x4(b[0], b[1], 0xdd)); /* 0l 0h 1l 1h */
    __m512i d = _mm512_add_epi32(_mm512_shuffle_i32x4(b[2], b[3], 0x88), _mm512_shuffle_i32x4(b[2], b[3], 0xdd)); /* 2l 2h 3l 3h */
    *lo = _mm512_shuffle_i32x4(c, d, 0x88);
    *hi = _mm512_shuffle_i32x4(c, d, 0xdd);
}

/* Sums along a row whose values stand in u[0..3] with the activations x[0..3] in the same order. Each lane of u[0] and u[1] adds four products that fit
 * 16 bits together, so pairs of vectors are narrowed and multiplied with 16-bit scales. */
INLINE __m512i dot_row(const __m512i u[4], const __m512i x[4], __m512i scale01, __m512i scale23)
{
    const __m512i zero = _mm512_setzero_si512();
    __m512i a = _mm512_packs_epi32(_mm512_dpbusd_epi32(zero, u[0], x[0]), _mm512_dpbusd_epi32(zero, u[1], x[1]));
    __m512i b = _mm512_packs_epi32(_mm512_dpbusd_epi32(zero, u[2], x[2]), _mm512_dpbusd_epi32(zero, u[3], x[3]));
    return _mm512_dpwssd_epi32(_mm512_dpwssd_epi32(zero, a, scale01), b, scale23);
}

INLINE __m512i load_512(const void *p)
{
    return _mm512_loadu_si512(p);
}

INLINE __m512i twice_256(const void *p)
{
    return _mm512_broadcast_i64x4(_mm256_loadu_si256(p));
}

/* Two 256-bit halves with 16-bit elements a and b. */
INLINE __m512i halves_of(short a, short b)
{
    return _mm512_inserti64x4(_mm512_set1_epi16(a), _mm256_set1_epi16(b), 1);
}

/* Q4_K and Q5_K. A load of 64 packed bytes holds sub-blocks 4c and 4c + 2 in its low nibbles, 4c + 1 and 4c + 3 in the high ones. */
INLINE void few_k(int R, bool five, const struct matmul_job *job, int64_t o)
{
    const __m512i low = _mm512_set1_epi8(15), bit4 = _mm512_set1_epi8(16);
    const __m512i spread01 =
        _mm512_set_epi64((long long)0x8003800380038003, (long long)0x8002800280028002, (long long)0x8003800380038003, (long long)0x8002800280028002,
                         (long long)0x8001800180018001, (long long)0x8000800080008000, (long long)0x8001800180018001, (long long)0x8000800080008000);
    const __m512i spread23 = _mm512_add_epi8(spread01, _mm512_set1_epi16(4));
    const size_t bytes = five ? 176 : 144;
    const size_t ahead = T * job->row_bytes;
    __m512 y[FEW];
    for (int r = 0; r < R; r++)
        y[r] = _mm512_setzero_ps();
    struct tile t;
    aim(&t, job, o, 0);
    for (int64_t b = 0; b < job->n_in / 256; b++) {
        const size_t at = (size_t)b * bytes;
        const struct act_256 *act[FEW];
        __m512i x[FEW][4], sums[FEW][T];
        for (int r = 0; r < R; r++) {
            act[r] = (const struct act_256 *)job->x[r] + b;
            for (int c = 0; c < 2; c++) {
                __m512i x0 = load_512(act[r]->q + 128 * c), x1 = load_512(act[r]->q + 128 * c + 64);
                x[r][2 * c] = _mm512_shuffle_i64x2(x0, x1, 0x44);
                x[r][2 * c + 1] = _mm512_shuffle_i64x2(x0, x1, 0xee);
            }
        }
        struct k_head h = load_k_head(&t, at);
        _Alignas(64) uint8_t scale[T * 8]; /* the eight scales of a row side by side; rows in the order unpack leaves them */
        _mm512_store_si512(scale, _mm512_unpacklo_epi32(h.scale[0], h.scale[1]));
        _mm512_store_si512(scale + 64, _mm512_unpackhi_epi32(h.scale[0], h.scale[1]));
        for (int i = 0; i < T; i++) {
            const uint8_t *block = t.row[i] + at, *q = block + bytes - 128;
            prefetch(block + ahead, bytes);
            __m512i q0 = load_512(q), q1 = load_512(q + 64);
            __m512i u[4] = {_mm512_and_si512(q0, low), _mm512_and_si512(_mm512_srli_epi16(q0, 4), low), _mm512_and_si512(q1, low),
                            _mm512_and_si512(_mm512_srli_epi16(q1, 4), low)};
            if (five) { /* sub-block s has its fifth bit in bit s of qh */
                __m512i qh = twice_256(block + 16);
                u[0] = _mm512_or_si512(u[0], _mm512_and_si512(_mm512_sllv_epi16(qh, halves_of(4, 2)), bit4));
                u[1] = _mm512_or_si512(u[1], _mm512_and_si512(_mm512_sllv_epi16(qh, halves_of(3, 1)), bit4));
                u[2] = _mm512_or_si512(u[2], _mm512_and_si512(_mm512_srlv_epi16(qh, halves_of(0, 2)), bit4));
                u[3] = _mm512_or_si512(u[3], _mm512_and_si512(_mm512_srlv_epi16(qh, halves_of(1, 3)), bit4));
            }
            __m512i s = _mm512_set1_epi64((long long)load_u64(scale + (i / 2 % 2) * 64 + i / 4 * 16 + i % 2 * 8));
            __m512i s01 = _mm512_shuffle_epi8(s, spread01), s23 = _mm512_shuffle_epi8(s, spread23);
            for (int r = 0; r < R; r++)
                sums[r][i] = dot_row(u, x[r], s01, s23);
        }
        const __m512i pair[4] = {widen_bytes(h.min[0], 0), widen_bytes(h.min[0], 1), widen_bytes(h.min[1], 0), widen_bytes(h.min[1], 1)};
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
    const __m512i low = _mm512_set1_epi8(15), two = _mm512_set1_epi8(0x30);
    /* lane l: scale l four times, then scale 4 + l four times; and the same 8 scales on */
    const __m512i spread01 = _mm512_set_epi64(0x0007000700070007, 0x0003000300030003, 0x0006000600060006, 0x0002000200020002, 0x0005000500050005,
                                              0x0001000100010001, 0x0004000400040004, 0x0000000000000000);
    const __m512i spread23 = _mm512_add_epi16(spread01, _mm512_set1_epi16(8));
    const size_t bytes = 210;
    const size_t ahead = T * job->row_bytes;
    __m512 y[FEW];
    for (int r = 0; r < R; r++)
        y[r] = _mm512_setzero_ps();
    struct tile t;
    aim(&t, job, o, 0);
    for (int64_t b = 0; b < job->n_in / 256; b++) {
        const size_t at = (size_t)b * bytes;
        const struct act_256 *act[FEW];
        __m512i x[FEW][4], sums[FEW][T];
        __m256i sum16[FEW];
        for (int r = 0; r < R; r++) {
            act[r] = (const struct act_256 *)job->x[r] + b;
            sum16[r] = _mm256_load_si256((const __m256i *)(const void *)act[r]->sum16);
            for (int c = 0; c < 4; c++)
                x[r][c] = load_512(act[r]->q + 64 * c);
        }
        __m512 d = load_halves(&t, at + 208);
        for (int i = 0; i < T; i++) {
            const uint8_t *block = t.row[i] + at;
            prefetch(block + ahead, bytes);
            __m512i u[4];
            for (int half = 0; half < 2; half++) {
                __m512i l = load_512(block + 64 * half), h = twice_256(block + 128 + 32 * half);
                __m512i h01 = _mm512_and_si512(_mm512_sllv_epi16(h, halves_of(4, 2)), two);
                __m512i h23 = _mm512_and_si512(_mm512_srlv_epi16(h, halves_of(0, 2)), two);
                u[2 * half] = _mm512_or_si512(_mm512_and_si512(l, low), h01);
                u[2 * half + 1] = _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi16(l, 4), low), h23);
            }
            __m256i scale = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(const void *)(block + 192)));
            __m512i s = _mm512_castsi256_si512(scale);
            __m512i s01 = _mm512_permutexvar_epi16(spread01, s), s23 = _mm512_permutexvar_epi16(spread23, s);
            for (int r = 0; r < R; r++) {
                __m256i offset = _mm256_slli_epi32(_mm256_madd_epi16(scale, sum16[r]), 5); /* values are stored + 32 */
                sums[r][i] = _mm512_sub_epi32(dot_row(u, x[r], s01, s23), _mm512_zextsi256_si512(offset));
            }
        }
        for (int r = 0; r < R; r++)
            y[r] = add_isum(y[r], act[r]->d, d, add_across(sums[r]));
    }
    for (int r = 0; r < R; r++)
        store_outputs(job, o, r, y[r]);
}

/* Q8_0 and Q4_0: two blocks of a row at a time, one in each half of a vector. */
INLINE void few_32(int R, bool four, const struct matmul_job *job, int64_t o)
{
    const __m512i flip = _mm512_set1_epi8(-128), low = _mm512_set1_epi8(15);
    const size_t bytes = four ? 18 : 34;
    const size_t ahead = T * job->row_bytes;
    const int offset = four ? 8 : 128;
    __m512 y[FEW];
    struct act_32 act[FEW];
    for (int r = 0; r < R; r++) {
        y[r] = _mm512_setzero_ps();
        act[r] = act_32_at(job->x[r], job->n_in);
    }
    struct tile t;
    aim(&t, job, o, 0);
    int64_t n_blocks = job->n_in / 32;
    for (int64_t b = 0; b < n_blocks; b += 2) {
        bool second = b + 1 < n_blocks; /* when not, the last block stands in both halves and the second sum is not used */
        const size_t at = (size_t)b * bytes, next = second ? bytes : 0;
        __m512i x[FEW], sums[FEW][T];
        for (int r = 0; r < R; r++)
            x[r] = second ? load_512(act[r].q + 32 * b) : twice_256(act[r].q + 32 * b);
        __m512 d[2] = {load_halves(&t, at), load_halves(&t, at + next)};
        for (int i = 0; i < T; i++) {
            const uint8_t *block = t.row[i] + at;
            prefetch(block + ahead, 2 * bytes);
            __m512i u;
            if (four) {
                __m128i q0 = _mm_loadu_si128((const __m128i *)(const void *)(block + 2));
                __m128i q1 = _mm_loadu_si128((const __m128i *)(const void *)(block + next + 2));
                __m256i w0 = _mm256_inserti128_si256(_mm256_castsi128_si256(q0), _mm_srli_epi16(q0, 4), 1);
                __m256i w1 = _mm256_inserti128_si256(_mm256_castsi128_si256(q1), _mm_srli_epi16(q1, 4), 1);
                u = _mm512_and_si512(_mm512_inserti64x4(_mm512_castsi256_si512(w0), w1, 1), low);
            } else {
                __m256i w0 = _mm256_loadu_si256((const __m256i *)(const void *)(block + 2));
                __m256i w1 = _mm256_loadu_si256((const __m256i *)(const void *)(block + next + 2));
                u = _mm512_xor_si512(_mm512_inserti64x4(_mm512_castsi256_si512(w0), w1, 1), flip);
            }
            for (int r = 0; r < R; r++)
                sums[r][i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), u, x[r]);
        }
        for (int r = 0; r < R; r++) {
            __m512i s0, s1;
            add_across_halves(sums[r], &s0, &s1);
            y[r] = add_isum(y[r], act[r].d[b], d[0], _mm512_sub_epi32(s0, _mm512_set1_epi32(offset * act[r].sum[b])));
            if (second)
                y[r] = add_isum(y[r], act[r].d[b + 1], d[1], _mm512_sub_epi32(s1, _mm512_set1_epi32(offset * act[r].sum[b + 1])));
        }
    }
    for (int r = 0; r < R; r++)
        store_outputs(job, o, r, y[r]);
}

/* clang-format off */
#define WITH_ROWS(rows, DO)                                                                                                                          \
    switch (rows) {                                                                                                                                  \
    case 1: DO(1); break;                                                                                                                            \
    case 2: DO(2); break;                                                                                                                            \
    case 3: DO(3); break;                                                                                                                            \
    case 4: DO(4); break;                                                                                                                            \
    case 5: DO(5); break;                                                                                                                            \
    default: DO(6); break;                                                                                                                           \
    }
#define WITH_ROWS_32(rows, DO)                                                                                                                       \
    switch (rows) {                                                                                                                                  \
    case 1: DO(1); break;                                                                                                                            \
    case 2: DO(2); break;                                                                                                                            \
    default: DO(3); break;                                                                                                                           \
    }
/* clang-format on */

/* Up to this many rows a panel costs more than it saves (measured on Zen 5). */
static int few_limit(enum block_type type)
{
    return act_kind_of(type) == ACT_Q8_256 ? FEW : FEW / 2;
}

#define FEW_ROWS(name, with, call)                                                                                                                   \
    static __attribute__((noinline)) void name(const struct matmul_job *job, int64_t o, int rows)                                                    \
    {                                                                                                                                                \
        with(rows, call)                                                                                                                             \
    }
#define FEW_Q4_K(R) few_k(R, false, job, o)
#define FEW_Q5_K(R) few_k(R, true, job, o)
#define FEW_Q6_K(R) few_q6_k(R, job, o)
#define FEW_Q8_0(R) few_32(R, false, job, o)
#define FEW_Q4_0(R) few_32(R, true, job, o)
FEW_ROWS(rows_q4_k, WITH_ROWS, FEW_Q4_K)
FEW_ROWS(rows_q5_k, WITH_ROWS, FEW_Q5_K)
FEW_ROWS(rows_q6_k, WITH_ROWS, FEW_Q6_K)
FEW_ROWS(rows_q8_0, WITH_ROWS_32, FEW_Q8_0)
FEW_ROWS(rows_q4_0, WITH_ROWS_32, FEW_Q4_0)

static void few(const struct matmul_job *job, int64_t o)
{
    switch (job->type) {
    case BLOCK_Q4_K:
        rows_q4_k(job, o, job->n_rows);
        break;
    case BLOCK_Q5_K:
        rows_q5_k(job, o, job->n_rows);
        break;
    case BLOCK_Q6_K:
        rows_q6_k(job, o, job->n_rows);
        break;
    case BLOCK_Q8_0:
        rows_q8_0(job, o, job->n_rows);
        break;
    default:
        rows_q4_0(job, o, job->n_rows);
        break;
    }
}

void matmul_int_avx512(const struct matmul_job *job)
{
    if (job->n_rows <= few_limit(job->type)) {
        for (int64_t o = 0; o < job->n_out; o += T)
            few(job, o);
        return;
    }
    for (int64_t o = 0; o < job->n_out; o += 2 * T) {
        for (int r = 0; r < job->n_rows; r += MATMUL_PASS_ROWS)
            panels(job, o, r, job->n_rows - r < MATMUL_PASS_ROWS ? job->n_rows - r : MATMUL_PASS_ROWS);
    }
}

/* ---- float weights ---- */

void widen_halves_avx512(enum block_type type, const void *src, float *dst, int64_t n)
{
    const uint8_t *p = src;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m256i v = _mm256_loadu_si256((const __m256i *)(const void *)(p + 2 * i));
        __m512 wide = type == BLOCK_F16 ? _mm512_cvtph_ps(v) : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
        _mm512_storeu_ps(dst + i, wide);
    }
    block_dequant(type, p + 2 * i, dst + i, (size_t)(n - i));
}

/* 8 + 8, 4 + 4, 2 + 2, 1 + 1. */
INLINE float add_partials(__m512 p)
{
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256(p), _mm512_extractf32x8_ps(p, 1));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}

/* R activation rows with K weight rows. */
INLINE void dots(int R, int K, const struct dot_job *job, int r0)
{
    __m512 p[4][DOT_ROWS];
    const float *x[4];
    for (int r = 0; r < R; r++) {
        x[r] = job->x[r0 + r];
        for (int k = 0; k < K; k++)
            p[r][k] = _mm512_setzero_ps();
    }
    int64_t i = 0;
    for (; i + 16 <= job->n; i += 16) {
        __m512 w[DOT_ROWS];
        for (int k = 0; k < K; k++)
            w[k] = _mm512_loadu_ps((const uint8_t *)job->w[k] + 4 * i);
        for (int r = 0; r < R; r++) {
            __m512 v = _mm512_loadu_ps(x[r] + i);
            for (int k = 0; k < K; k++)
                p[r][k] = _mm512_fmadd_ps(w[k], v, p[r][k]);
        }
    }
    if (i < job->n) { /* partial sums beyond the end are left alone: adding 0 would turn -0 into 0 */
        __mmask16 rest = (__mmask16)((1u << (job->n - i)) - 1);
        for (int r = 0; r < R; r++) {
            __m512 v = _mm512_maskz_loadu_ps(rest, x[r] + i);
            for (int k = 0; k < K; k++)
                p[r][k] = _mm512_mask3_fmadd_ps(_mm512_maskz_loadu_ps(rest, (const uint8_t *)job->w[k] + 4 * i), v, p[r][k], rest);
        }
    }
    for (int r = 0; r < R; r++) {
        for (int k = 0; k < K; k++) {
            float *y = job->y[r0 + r] + job->o0 + k;
            *y = job->add ? *y + add_partials(p[r][k]) : add_partials(p[r][k]);
        }
    }
}

void matmul_dot_avx512(const struct dot_job *job)
{
    int r = 0;
    for (; job->n_w == DOT_ROWS && r + 4 <= job->n_rows; r += 4)
        dots(4, DOT_ROWS, job, r);
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
typedef int matmul_avx512_not_on_this_machine; /* a translation unit may not be empty */
#endif
