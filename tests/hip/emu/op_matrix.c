/* tests/hip/emu/op_matrix.c: products of packed small integers (v_dot4, v_dot8) and matrix operations (v_wmma).
 *
 * WMMA multiplies A [16][16] by B [16][16] and adds C; D[m][n] = sum over k of A[m][k] * B[k][n] + C[m][n].
 *   gfx11: lane l holds row m = l & 15 of A, and column n = l & 15 of B, all 16 values of k; lanes 16 to 31 must hold the same as 0 to 15, which is
 *          checked. Register i of C and D: row 2 i + (l >> 4), column l & 15.
 *   gfx12: lane l holds k = 8 (l >> 4) .. + 7 of row or column l & 15. Register i of C and D: row 8 (l >> 4) + i.
 * The hardware's order of the sixteen additions is not known; here k goes up. */
#include "tests/hip/emu/vector.h"

#include <math.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

/* ---- dot products ---- */

static inline int32_t byte_of(uint32_t x, int i, bool is_signed)
{
    return is_signed ? (int8_t)(x >> 8 * i) : (uint8_t)(x >> 8 * i);
}

static inline int32_t nibble_of(uint32_t x, int i, bool is_signed)
{
    return is_signed ? (int32_t)(x << (28 - 4 * i)) >> 28 : (int32_t)(x >> 4 * i & 15);
}

static inline uint32_t saturated(int64_t x)
{
    return x > INT32_MAX ? 0x7fffffffu : x < INT32_MIN ? 0x80000000u : (uint32_t)(int32_t)x;
}

/* Without constants for the signs the loop does not vectorise. */
#define DOT4(a_signed, b_signed)                                                                                                                     \
    for (int l = 0; l < LANES; l++) {                                                                                                                \
        int32_t sum = 0;                                                                                                                             \
        for (int i = 0; i < 4; i++)                                                                                                                  \
            sum += byte_of(lanes_a[l], i, a_signed) * byte_of(lanes_b[l], i, b_signed);                                                              \
        r[l] = (uint32_t)sum + lanes_c[l];                                                                                                           \
    }

BEGIN(v_dot4_i32_iu8)
{
    WORDS(1, a);
    WORDS(2, b);
    WORDS(3, c);
    lanes r;
    if (__builtin_expect(in->clamp, 0)) {
        for (int l = 0; l < LANES; l++) {
            int64_t sum = I(lanes_c[l]);
            for (int i = 0; i < 4; i++)
                sum += byte_of(lanes_a[l], i, in->neg_lo & 1) * byte_of(lanes_b[l], i, in->neg_lo >> 1 & 1);
            r[l] = saturated(sum);
        }
    } else {
        switch (in->neg_lo & 3) {
        case 0:
            DOT4(false, false);
            break;
        case 1:
            DOT4(true, false);
            break;
        case 2:
            DOT4(false, true);
            break;
        default:
            DOT4(true, true);
        }
    }
    put(w, in, r);
    return in + 1;
}

BEGIN(v_dot8_i32_iu4)
{
    WORDS(1, a);
    WORDS(2, b);
    WORDS(3, c);
    lanes r;
    for (int l = 0; l < LANES; l++) {
        int64_t sum = I(lanes_c[l]);
        for (int i = 0; i < 8; i++)
            sum += nibble_of(lanes_a[l], i, in->neg_lo & 1) * nibble_of(lanes_b[l], i, in->neg_lo >> 1 & 1);
        r[l] = in->clamp ? saturated(sum) : (uint32_t)sum;
    }
    put(w, in, r);
    return in + 1;
}

BEGIN(v_dot4_u32_u8)
{
    WORDS(1, a);
    WORDS(2, b);
    WORDS(3, c);
    lanes r;
    DOT4(false, false);
    put(w, in, r);
    return in + 1;
}

/* ---- WMMA ---- */

/* Registers of A or B in gfx11's form: word [i][n], n = 0 .. 15, for i in 0 .. words-1. gfx12 has the second half of k in lanes 16 to 31. */
static inline void gather_words(struct wave *w, const struct insn *in, int k, int words, uint32_t to[][16])
{
    const struct operand *o = &in->o[k];
    if (in->gfx12) {
        for (int i = 0; i < words; i++)
            memcpy(to[i], w->v[o->index + i % (words / 2)] + (i >= words / 2 ? 16 : 0), 16 * sizeof(uint32_t));
        return;
    }
    for (int i = 0; i < words; i++) {
        const uint32_t *v = w->v[o->index + i];
        if (memcmp(v, v + 16, 16 * sizeof(uint32_t)) != 0)
            emu_fault(w, in, "register v%d of the matrix operand differs between lanes 0 to 15 and 16 to 31", o->index + i);
        memcpy(to[i], v, 16 * sizeof(uint32_t));
    }
}

static inline int row_of(const struct insn *in, int i, int half)
{
    return in->gfx12 ? 8 * half + i : 2 * i + half;
}

/* C as [16][16] words; a constant is the same everywhere. */
static inline void load_c(const struct wave *w, const struct insn *in, uint32_t c[16][16])
{
    lanes room;
    const struct operand *o = &in->o[3];
    for (int i = 0; i < 8; i++) {
        const uint32_t *p = o->kind == OPERAND_VGPR ? w->v[o->index + i] : source(w, in, 3, room);
        memcpy(c[row_of(in, i, 0)], p, 16 * sizeof(uint32_t));
        memcpy(c[row_of(in, i, 1)], p + 16, 16 * sizeof(uint32_t));
    }
}

static inline void store_d(struct wave *w, const struct insn *in, uint32_t c[16][16])
{
    if (exec_of(w) != ~0u)
        emu_fault(w, in, "WMMA with lanes switched off (exec 0x%08x)", exec_of(w));
    for (int i = 0; i < 8; i++) {
        uint32_t *d = w->v[in->o[0].index + i];
        memcpy(d, c[row_of(in, i, 0)], 16 * sizeof(uint32_t));
        memcpy(d + 16, c[row_of(in, i, 1)], 16 * sizeof(uint32_t));
    }
}

static inline void multiply_f(const float a[16][16], const float b[16][16], uint32_t c[16][16]) /* a [k][m], b [k][n] */
{
    for (int m = 0; m < 16; m++) {
        float sum[16];
        memcpy(sum, c[m], sizeof sum);
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < 16; n++)
                sum[n] = fmaf(a[k][m], b[k][n], sum[n]);
        memcpy(c[m], sum, sizeof sum);
    }
}

BEGIN(v_wmma_f32_16x16x16_f16)
{
    uint32_t words[2][8][16], c[16][16];
    float x[2][16][16];
    gather_words(w, in, 1, 8, words[0]);
    gather_words(w, in, 2, 8, words[1]);
    load_c(w, in, c);
    for (int side = 0; side < 2; side++)
        for (int i = 0; i < 8; i++)
            for (int n = 0; n < 16; n++) {
                x[side][2 * i][n] = half_to_float(words[side][i][n]);
                x[side][2 * i + 1][n] = half_to_float(words[side][i][n] >> 16);
            }
    multiply_f(x[0], x[1], c);
    store_d(w, in, c);
    return in + 1;
}

BEGIN(v_wmma_f32_16x16x16_bf16)
{
    uint32_t words[2][8][16], c[16][16];
    float x[2][16][16];
    gather_words(w, in, 1, 8, words[0]);
    gather_words(w, in, 2, 8, words[1]);
    load_c(w, in, c);
    for (int side = 0; side < 2; side++)
        for (int i = 0; i < 8; i++)
            for (int n = 0; n < 16; n++) {
                x[side][2 * i][n] = as_float(words[side][i][n] << 16);
                x[side][2 * i + 1][n] = as_float(words[side][i][n] & 0xffff0000u);
            }
    multiply_f(x[0], x[1], c);
    store_d(w, in, c);
    return in + 1;
}

/* Four rows of k at a time: two pairs of int16, as vpmaddwd wants them. The sums fit: 16 * 255 * 255. */
static inline void multiply_i(const uint32_t a[4][16], const uint32_t b[4][16], bool a_signed, bool b_signed, int32_t sum[16][16])
{
    int16_t pairs[4][2][32]; /* of b: [k / 4][pair][n][2] */
    for (int g = 0; g < 4; g++)
        for (int p = 0; p < 2; p++)
            for (int n = 0; n < 16; n++) {
                pairs[g][p][2 * n] = (int16_t)byte_of(b[g][n], 2 * p, b_signed);
                pairs[g][p][2 * n + 1] = (int16_t)byte_of(b[g][n], 2 * p + 1, b_signed);
            }
    for (int m = 0; m < 16; m++) {
        int32_t s[16] = {0};
        for (int g = 0; g < 4; g++)
            for (int p = 0; p < 2; p++) {
                const int32_t a0 = byte_of(a[g][m], 2 * p, a_signed), a1 = byte_of(a[g][m], 2 * p + 1, a_signed);
#ifdef __AVX2__
                const __m256i both = _mm256_set1_epi32((int32_t)((uint32_t)(a0 & 0xffff) | (uint32_t)a1 << 16));
                for (int h = 0; h < 2; h++) {
                    __m256i *at = (__m256i *)(void *)(s + 8 * h);
                    const __m256i products = _mm256_madd_epi16(both, _mm256_loadu_si256((const __m256i *)(const void *)(pairs[g][p] + 16 * h)));
                    _mm256_storeu_si256(at, _mm256_add_epi32(_mm256_loadu_si256(at), products));
                }
#else
                for (int n = 0; n < 16; n++)
                    s[n] += a0 * pairs[g][p][2 * n] + a1 * pairs[g][p][2 * n + 1];
#endif
            }
        memcpy(sum[m], s, sizeof s);
    }
}

BEGIN(v_wmma_i32_16x16x16_iu8)
{
    uint32_t words[2][4][16], c[16][16];
    int32_t sum[16][16];
    gather_words(w, in, 1, 4, words[0]);
    gather_words(w, in, 2, 4, words[1]);
    load_c(w, in, c);
    multiply_i(words[0], words[1], in->neg_lo & 1, in->neg_lo >> 1 & 1, sum);
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n++)
            c[m][n] = in->clamp ? saturated((int64_t)I(c[m][n]) + sum[m][n]) : c[m][n] + (uint32_t)sum[m][n];
    store_d(w, in, c);
    return in + 1;
}

#define WMMA(name) ALSO(name, name, OP_WMMA, OPF_PACKED)

const struct op EMU_TABLE(emu_matrix)[] = {ALSO(v_dot4_i32_iu8, v_dot4_i32_iu8, OP_DOT4, OPF_PACKED)
                                               ALSO(v_dot8_i32_iu4, v_dot8_i32_iu4, OP_DOT4, OPF_PACKED)
                                                   ALSO(v_dot4_u32_u8, v_dot4_u32_u8, OP_DOT4, OPF_PACKED) WMMA(v_wmma_f32_16x16x16_f16)
                                                       WMMA(v_wmma_f32_16x16x16_bf16) WMMA(v_wmma_i32_16x16x16_iu8){NULL, NULL, 0, 0}};
