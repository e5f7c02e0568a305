/* tests/hip/emu/op_half.c: vector operations on halves: single, packed (v_pk_*), mixed with floats (v_fma_mix), and conversions. Computed in float and
 * rounded once: exact for add and mul; fma is done in double, whose rounding to half is right except in double-rounding cases that need 2^-30. */
#include "tests/hip/emu/vector.h"

#include <math.h>

static inline float max_num(float a, float b)
{
    return a > b || b != b || (a == b && !signbit(a)) ? a : b;
}

static inline float min_num(float a, float b)
{
    return a < b || b != b || (a == b && signbit(a)) ? a : b;
}

static inline uint32_t to_half_d(double x)
{
    const _Float16 h = (_Float16)x;
    uint16_t bits;
    memcpy(&bits, &h, 2);
    return bits;
}

static inline uint32_t half_of(const struct insn *in, float x)
{
    if (__builtin_expect(in->clamp, 0))
        x = !(x > 0.0f) ? 0.0f : x > 1.0f ? 1.0f : x;
    return float_to_half(x);
}

static inline void load_half(const struct wave *w, const struct insn *in, int k, int bit, float to[LANES])
{
    lanes bits;
    source16(w, in, k, bit, bits);
    for (int l = 0; l < LANES; l++)
        to[l] = half_to_float(bits[l]);
}

#define HALF_N(name, n, expr)                                                                                                                        \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        float_lanes x[3];                                                                                                                            \
        lanes r;                                                                                                                                     \
        for (int k = 0; k < (n); k++)                                                                                                                \
            load_half(w, in, k + 1, k, x[k]);                                                                                                        \
        for (int l = 0; l < LANES; l++) {                                                                                                            \
            const float a = x[0][l], b = (n) > 1 ? x[1][l] : 0.0f, c = (n) > 2 ? x[2][l] : 0.0f;                                                     \
            (void)b, (void)c;                                                                                                                        \
            r[l] = (expr);                                                                                                                           \
        }                                                                                                                                            \
        put16(w, in, (n), r);                                                                                                                        \
        return in + 1;                                                                                                                               \
    }
#define HALF1(name, expr) HALF_N(name, 1, half_of(in, expr))
#define HALF2(name, expr) HALF_N(name, 2, half_of(in, expr))
#define HALF3(name, expr) HALF_N(name, 3, half_of(in, expr))

#define OPS1(X)                                                                                                                                      \
    X(v_rndne_f16, rintf(a))                                                                                                                         \
    X(v_floor_f16, floorf(a))                                                                                                                        \
    X(v_ceil_f16, ceilf(a))                                                                                                                          \
    X(v_trunc_f16, truncf(a))                                                                                                                        \
    X(v_sqrt_f16, sqrtf(a))                                                                                                                          \
    X(v_rcp_f16, 1.0f / a)                                                                                                                           \
    X(v_rsq_f16, 1.0f / sqrtf(a))                                                                                                                    \
    X(v_exp_f16, exp2f(a))                                                                                                                           \
    X(v_log_f16, log2f(a))
#define OPS2(X)                                                                                                                                      \
    X(v_add_f16, a + b)                                                                                                                              \
    X(v_sub_f16, a - b)                                                                                                                              \
    X(v_subrev_f16, b - a)                                                                                                                           \
    X(v_mul_f16, a *b)                                                                                                                               \
    X(v_max_f16, max_num(a, b))                                                                                                                      \
    X(v_min_f16, min_num(a, b))
#define OPS3(X)                                                                                                                                      \
    X(v_max3_f16, max_num(max_num(a, b), c))                                                                                                         \
    X(v_min3_f16, min_num(min_num(a, b), c))                                                                                                         \
    X(v_med3_f16, max_num(min_num(a, b), min_num(max_num(a, b), c)))                                                                                 \
    X(v_maxmin_f16, min_num(max_num(a, b), c))                                                                                                       \
    X(v_minmax_f16, max_num(min_num(a, b), c))

OPS1(HALF1)
OPS2(HALF2)
OPS3(HALF3)
HALF_N(v_fma_f16, 3, to_half_d((double)a *(double)b + (double)c))
HALF_N(v_fmamk_f16, 3, to_half_d((double)a *(double)b + (double)c))
HALF_N(v_fmaak_f16, 3, to_half_d((double)a *(double)b + (double)c))
HALF_N(v_cvt_u16_f16, 1, a > 0.0f ? a >= 65535.0f ? 65535u : (uint32_t)a : 0u)
HALF_N(v_cvt_i16_f16, 1, a != a ? 0u : (uint32_t)(int32_t)(a >= 32767.0f ? 32767.0f : a <= -32768.0f ? -32768.0f : a) & 0xffff)

BEGIN(v_fmac_f16)
{
    float_lanes a, b, c;
    lanes r;
    load_half(w, in, 1, 0, a);
    load_half(w, in, 2, 1, b);
    load_half(w, in, 0, 2, c);
    for (int l = 0; l < LANES; l++)
        r[l] = to_half_d((double)a[l] * (double)b[l] + (double)c[l]);
    put16(w, in, 2, r);
    return in + 1;
}

#define FROM_SHORT(name, type)                                                                                                                       \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        lanes a;                                                                                                                                     \
        source16(w, in, 1, 0, a);                                                                                                                    \
        for (int l = 0; l < LANES; l++)                                                                                                              \
            a[l] = float_to_half((float)(type)a[l]);                                                                                                 \
        put16(w, in, 1, a);                                                                                                                          \
        return in + 1;                                                                                                                               \
    }
FROM_SHORT(v_cvt_f16_u16, uint16_t)
FROM_SHORT(v_cvt_f16_i16, int16_t)

BEGIN(v_ldexp_f16)
{
    float_lanes a;
    lanes e;
    load_half(w, in, 1, 0, a);
    source16(w, in, 2, 1, e);
    for (int l = 0; l < LANES; l++)
        e[l] = float_to_half(ldexpf(a[l], (int16_t)e[l]));
    put16(w, in, 2, e);
    return in + 1;
}

/* ---- conversions ---- */

BEGIN(v_cvt_f32_f16)
{
    float_lanes r;
    load_half(w, in, 1, 0, r);
    put_f(w, in, r);
    return in + 1;
}

BEGIN(v_cvt_f16_f32)
{
    FLOATS(1, a);
    lanes r;
    for (int l = 0; l < LANES; l++)
        r[l] = half_of(in, lanes_a[l]);
    put16(w, in, 1, r);
    return in + 1;
}

/* Towards zero. */
static inline uint32_t half_towards_zero(float x)
{
    const uint32_t h = float_to_half(x);
    return fabsf(half_to_float(h)) > fabsf(x) ? h - 1 : h;
}

#define PACK_FLOATS(name, low, high)                                                                                                                 \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        FLOATS(1, a);                                                                                                                                \
        FLOATS(2, b);                                                                                                                                \
        lanes r;                                                                                                                                     \
        for (int l = 0; l < LANES; l++) {                                                                                                            \
            const float a = lanes_a[l], b = lanes_b[l];                                                                                              \
            r[l] = ((uint32_t)(low)&0xffff) | (uint32_t)(high) << 16;                                                                                \
        }                                                                                                                                            \
        put(w, in, r);                                                                                                                               \
        return in + 1;                                                                                                                               \
    }

static inline int32_t signed16(float x, float scale)
{
    const float y = rintf(x * scale);
    return x != x ? 0 : (int32_t)(y > scale ? scale : y < -scale ? -scale : y);
}

static inline uint32_t unsigned16(float x)
{
    const float y = rintf(x * 65535.0f);
    return !(y > 0.0f) ? 0 : y > 65535.0f ? 65535u : (uint32_t)y;
}

static inline int32_t short_of(float x)
{
    return x != x ? 0 : (int32_t)(x >= 32767.0f ? 32767.0f : x <= -32768.0f ? -32768.0f : x);
}

static inline uint32_t ushort_of(float x)
{
    return !(x > 0.0f) ? 0 : x >= 65535.0f ? 65535u : (uint32_t)x;
}

PACK_FLOATS(v_cvt_pk_rtz_f16_f32, half_towards_zero(a), half_towards_zero(b))
PACK_FLOATS(v_cvt_pk_norm_i16_f32, signed16(a, 32767.0f), signed16(b, 32767.0f))
PACK_FLOATS(v_cvt_pk_norm_u16_f32, unsigned16(a), unsigned16(b))
PACK_FLOATS(v_cvt_pk_i16_f32, short_of(a), short_of(b))
PACK_FLOATS(v_cvt_pk_u16_f32, ushort_of(a), ushort_of(b))
WORD2(v_cvt_pk_i16_i32, ((uint32_t)(I(a) > 32767    ? 32767
                                    : I(a) < -32768 ? -32768
                                                    : I(a)) &
                         0xffff) |
                            (uint32_t)(I(b) > 32767    ? 32767
                                       : I(b) < -32768 ? -32768
                                                       : I(b))
                                << 16)
WORD2(v_cvt_pk_u16_u32, (a > 65535 ? 65535 : a) | (b > 65535 ? 65535u : b) << 16)

BEGIN(v_cvt_pk_u8_f32)
{
    FLOATS(1, a);
    WORDS(2, b);
    WORDS(3, c);
    lanes r;
    for (int l = 0; l < LANES; l++) {
        const float x = lanes_a[l];
        const uint32_t at = 8 * (lanes_b[l] & 3), byte = !(x > 0.0f) ? 0 : x >= 255.0f ? 255 : (uint32_t)x;
        r[l] = (lanes_c[l] & ~(255u << at)) | byte << at;
    }
    put(w, in, r);
    return in + 1;
}

BEGIN(v_pack_b32_f16)
{
    lanes a, b;
    source16(w, in, 1, 0, a);
    source16(w, in, 2, 1, b);
    for (int l = 0; l < LANES; l++)
        a[l] |= b[l] << 16;
    put(w, in, a);
    return in + 1;
}

/* ---- packed: each half of the result picks its halves of the sources ---- */

/* Source k (from 0) for the low (part 0) or high (part 1) result. */
static inline void packed_source(const struct wave *w, const struct insn *in, int k, int part, uint32_t to[LANES])
{
    lanes room;
    const struct operand *o = &in->o[k + 1];
    const uint32_t *p = o->kind == OPERAND_CHANGED ? w->v[o->index] : source(w, in, k + 1, room);
    const uint32_t shift = ((part ? in->op_sel_hi : in->op_sel) >> k & 1) * 16u;
    const uint32_t flip = ((part ? in->neg_hi : in->neg_lo) >> k & 1) * 0x8000u;
    for (int l = 0; l < LANES; l++)
        to[l] = (p[l] >> shift & 0xffff) ^ flip;
}

#define PACKED(name, n, convert, result, expr)                                                                                                       \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        lanes x[3], half[2];                                                                                                                         \
        for (int part = 0; part < 2; part++) {                                                                                                       \
            for (int k = 0; k < (n); k++)                                                                                                            \
                packed_source(w, in, k, part, x[k]);                                                                                                 \
            for (int l = 0; l < LANES; l++) {                                                                                                        \
                const __auto_type a = convert(x[0][l]);                                                                                              \
                const __auto_type b = convert(x[1][l]);                                                                                              \
                const __auto_type c = convert((n) > 2 ? x[2][l] : 0);                                                                                \
                (void)c;                                                                                                                             \
                half[part][l] = result(expr);                                                                                                        \
            }                                                                                                                                        \
        }                                                                                                                                            \
        for (int l = 0; l < LANES; l++)                                                                                                              \
            half[0][l] = (half[0][l] & 0xffff) | half[1][l] << 16;                                                                                   \
        put(w, in, half[0]);                                                                                                                         \
        return in + 1;                                                                                                                               \
    }
#define FROM_U16(x) (x)
#define FROM_I16(x) ((int32_t)(int16_t)(x))
#define TO_U16(x)   ((uint32_t)(x))
#define TO_HALF(x)  half_of(in, x)

PACKED(v_pk_add_f16, 2, half_to_float, TO_HALF, a + b)
PACKED(v_pk_mul_f16, 2, half_to_float, TO_HALF, a *b)
PACKED(v_pk_max_f16, 2, half_to_float, TO_HALF, max_num(a, b))
PACKED(v_pk_min_f16, 2, half_to_float, TO_HALF, min_num(a, b))
PACKED(v_pk_fma_f16, 3, half_to_float, to_half_d, (double)a *(double)b + (double)c)
PACKED(v_pk_add_u16, 2, FROM_U16, TO_U16, a + b)
PACKED(v_pk_sub_u16, 2, FROM_U16, TO_U16, a - b)
PACKED(v_pk_mul_lo_u16, 2, FROM_U16, TO_U16, a *b)
PACKED(v_pk_mad_u16, 3, FROM_U16, TO_U16, a *b + c)
PACKED(v_pk_lshlrev_b16, 2, FROM_U16, TO_U16, b << (a & 15))
PACKED(v_pk_lshrrev_b16, 2, FROM_U16, TO_U16, b >> (a & 15))
PACKED(v_pk_max_u16, 2, FROM_U16, TO_U16, a > b ? a : b)
PACKED(v_pk_min_u16, 2, FROM_U16, TO_U16, a < b ? a : b)
PACKED(v_pk_ashrrev_i16, 2, FROM_I16, TO_U16, b >> (a & 15))
PACKED(v_pk_max_i16, 2, FROM_I16, TO_U16, a > b ? a : b)
PACKED(v_pk_min_i16, 2, FROM_I16, TO_U16, a < b ? a : b)

/* ---- mixed: a source is a float, or with op_sel_hi the half that op_sel picks; neg_hi means absolute value ---- */

static inline void mixed_source(const struct wave *w, const struct insn *in, int k, float to[LANES])
{
    lanes room;
    const struct operand *o = &in->o[k + 1];
    const bool changed = o->kind == OPERAND_CHANGED || o->kind == OPERAND_CHANGED_SGPR;
    const uint32_t *p = changed ? changed_source(w, in, k + 1, 0, false, room) : source(w, in, k + 1, room);
    const bool absolute = o->abs || (in->neg_hi >> k & 1), negative = o->neg || (in->neg_lo >> k & 1);
    if (in->op_sel_hi >> k & 1) {
        const uint32_t shift = (in->op_sel >> k & 1) * 16u;
        for (int l = 0; l < LANES; l++)
            to[l] = half_to_float(p[l] >> shift);
    } else {
        memcpy(to, p, sizeof(float) * LANES);
    }
    if (absolute)
        for (int l = 0; l < LANES; l++)
            to[l] = fabsf(to[l]);
    if (negative)
        for (int l = 0; l < LANES; l++)
            to[l] = -to[l];
}

static inline void mixed_fma(const struct wave *w, const struct insn *in, float r[LANES])
{
    float_lanes a, b, c;
    mixed_source(w, in, 0, a);
    mixed_source(w, in, 1, b);
    mixed_source(w, in, 2, c);
    for (int l = 0; l < LANES; l++)
        r[l] = fmaf(a[l], b[l], c[l]);
}

BEGIN(v_fma_mix_f32)
{
    float_lanes r;
    mixed_fma(w, in, r);
    put_f(w, in, r);
    return in + 1;
}

static inline const struct insn *mixed_half(struct wave *w, const struct insn *in, bool high)
{
    float_lanes r;
    lanes word;
    const uint32_t *old = w->v[in->o[0].index];
    mixed_fma(w, in, r);
    for (int l = 0; l < LANES; l++) {
        const uint32_t h = half_of(in, r[l]);
        word[l] = high ? (old[l] & 0xffff) | h << 16 : (old[l] & 0xffff0000u) | h;
    }
    put(w, in, word);
    return in + 1;
}

BEGIN(v_fma_mixlo_f16)
{
    return mixed_half(w, in, false);
}

BEGIN(v_fma_mixhi_f16)
{
    return mixed_half(w, in, true);
}

/* Two halves times two halves, added to a float. */
BEGIN(v_dot2_f32_f16)
{
    lanes x[2][2];
    FLOATS(3, c);
    float_lanes r;
    for (int part = 0; part < 2; part++)
        for (int k = 0; k < 2; k++)
            packed_source(w, in, k, part, x[part][k]);
    for (int l = 0; l < LANES; l++)
        r[l] = fmaf(half_to_float(x[1][0][l]), half_to_float(x[1][1][l]), fmaf(half_to_float(x[0][0][l]), half_to_float(x[0][1][l]), lanes_c[l]));
    put_f(w, in, r);
    return in + 1;
}

BEGIN(v_dot2acc_f32_f16)
{
    WORDS(1, a);
    WORDS(2, b);
    FLOATS(0, c);
    float_lanes r;
    for (int l = 0; l < LANES; l++)
        r[l] = fmaf(half_to_float(lanes_a[l] >> 16), half_to_float(lanes_b[l] >> 16),
                    fmaf(half_to_float(lanes_a[l]), half_to_float(lanes_b[l]), lanes_c[l]));
    put_f(w, in, r);
    return in + 1;
}

#define PK(name) ALSO(name, name, OP_VALU, OPF_F16 | OPF_PACKED)

const struct op EMU_TABLE(emu_half)[] = {
    OPS1(VALU_F16) OPS2(VALU_F16) OPS3(VALU_F16) VALU_F16(v_fma_f16) VALU_F16(v_fmamk_f16) VALU_F16(v_fmaak_f16) VALU_F16(v_fmac_f16)
        VALU_F16(v_cvt_u16_f16) VALU_F16(v_cvt_i16_f16) VALU(v_cvt_f16_u16) VALU(v_cvt_f16_i16) VALU_F16(v_ldexp_f16) VALU_F16(v_cvt_f32_f16)
            VALU(v_cvt_f16_f32) ALSO(v_max_num_f16, v_max_f16, OP_VALU, OPF_F16) ALSO(v_min_num_f16, v_min_f16, OP_VALU, OPF_F16)
                ALSO(v_max3_num_f16, v_max3_f16, OP_VALU, OPF_F16) ALSO(v_min3_num_f16, v_min3_f16, OP_VALU, OPF_F16)
                    ALSO(v_med3_num_f16, v_med3_f16, OP_VALU, OPF_F16) VALU(v_cvt_pk_rtz_f16_f32)
                        ALSO(v_cvt_pkrtz_f16_f32, v_cvt_pk_rtz_f16_f32, OP_VALU, 0) VALU(v_cvt_pk_norm_i16_f32) VALU(v_cvt_pk_norm_u16_f32)
                            VALU(v_cvt_pk_i16_f32) VALU(v_cvt_pk_u16_f32) VALU(v_cvt_pk_i16_i32) VALU(v_cvt_pk_u16_u32) VALU(v_cvt_pk_u8_f32)
                                VALU_F16(v_pack_b32_f16) PK(v_pk_add_f16) PK(v_pk_mul_f16) PK(v_pk_max_f16) PK(v_pk_min_f16) PK(v_pk_fma_f16)
                                    ALSO(v_pk_max_num_f16, v_pk_max_f16, OP_VALU, OPF_F16 | OPF_PACKED)
                                        ALSO(v_pk_min_num_f16, v_pk_min_f16, OP_VALU, OPF_F16 | OPF_PACKED) PK(v_pk_add_u16) PK(v_pk_sub_u16)
                                            PK(v_pk_mul_lo_u16) PK(v_pk_mad_u16) PK(v_pk_lshlrev_b16) PK(v_pk_lshrrev_b16) PK(v_pk_ashrrev_i16)
                                                ALSO(v_pk_add_i16, v_pk_add_u16, OP_VALU, OPF_F16 | OPF_PACKED)
                                                    ALSO(v_pk_sub_i16, v_pk_sub_u16, OP_VALU, OPF_F16 | OPF_PACKED)
                                                        ALSO(v_pk_mad_i16, v_pk_mad_u16, OP_VALU, OPF_F16 | OPF_PACKED) PK(v_pk_max_u16)
                                                            PK(v_pk_min_u16) PK(v_pk_max_i16) PK(v_pk_min_i16) VALU(v_fma_mix_f32)
                                                                VALU(v_fma_mixlo_f16) VALU(v_fma_mixhi_f16)
                                                                    ALSO(v_dot2_f32_f16, v_dot2_f32_f16, OP_VALU, OPF_PACKED) VALU(v_dot2acc_f32_f16)
                                                                        ALSO(v_dot2c_f32_f16, v_dot2acc_f32_f16, OP_VALU, 0){NULL, NULL, 0, 0}};
