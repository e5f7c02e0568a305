/* tests/hip/emu/op_float.c: vector operations on floats and doubles, and conversions. Round to nearest even, denormals kept except where the hardware's
 * approximations (exp, log, rcp, rsq, sqrt) drop them. */
#include "tests/hip/emu/vector.h"

#include <math.h>

/* ---- maximum and minimum: a number wins over a NaN, +0 is larger than -0 ---- */

static inline float max_num(float a, float b)
{
    const float both = as_float(as_word(a) & as_word(b));
    const float r = a > b ? a : b; /* b when unordered */
    return a == b ? both : b != b ? a : r;
}

static inline float min_num(float a, float b)
{
    const float both = as_float(as_word(a) | as_word(b));
    const float r = a < b ? a : b;
    return a == b ? both : b != b ? a : r;
}

/* gfx12: a NaN wins. */
static inline float maximum(float a, float b)
{
    return a != a ? a : b != b ? b : max_num(a, b);
}

static inline float minimum(float a, float b)
{
    return a != a ? a : b != b ? b : min_num(a, b);
}

static inline float middle(float a, float b, float c)
{
    return max_num(min_num(a, b), min_num(max_num(a, b), c));
}

/* ---- approximations of the hardware, here to the last bit or nearly: computed in double, rounded once ---- */

static inline float flushed(float x)
{
    return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x;
}

static inline double power_of_two(int64_t e) /* -1022 .. 1023 */
{
    const uint64_t bits = (uint64_t)(e + 1023) << 52;
    double d;
    memcpy(&d, &bits, 8);
    return d;
}

static inline float exp2_of(float a)
{
    const float x = a < -150.0f ? -150.0f : a > 129.0f ? 129.0f : a;
    const double whole = rint((double)x), f = (double)x - whole;
    double p = 1.3215486790144309e-6; /* ln2^n / n! */
    p = p * f + 1.5252733804059840e-5;
    p = p * f + 1.5403530393381609e-4;
    p = p * f + 1.3333558146428443e-3;
    p = p * f + 9.6181291076284772e-3;
    p = p * f + 5.5504108664821580e-2;
    p = p * f + 2.4022650695910071e-1;
    p = p * f + 6.9314718055994531e-1;
    p = p * f + 1.0;
    const float r = (float)(p * power_of_two((int64_t)whole));
    return a != a ? a : r < 0x1p-126f ? 0.0f : r;
}

static inline float log2_of(float a)
{
    const double x = (double)flushed(a);
    uint64_t bits;
    memcpy(&bits, &x, 8);
    const int64_t high = (int64_t)(bits >> 52) - 1023;
    const uint64_t fraction = bits & 0xfffffffffffffull;
    const int64_t up = fraction > 0x6a09e667f3bcdull; /* above sqrt(2): halve, so that the mantissa is near 1 */
    const uint64_t mantissa_bits = fraction | (uint64_t)(1023 - up) << 52;
    double m;
    memcpy(&m, &mantissa_bits, 8);
    const double t = (m - 1.0) / (m + 1.0), t2 = t * t;
    double p = 1.0 / 17.0; /* atanh */
    p = p * t2 + 1.0 / 15.0;
    p = p * t2 + 1.0 / 13.0;
    p = p * t2 + 1.0 / 11.0;
    p = p * t2 + 1.0 / 9.0;
    p = p * t2 + 1.0 / 7.0;
    p = p * t2 + 1.0 / 5.0;
    p = p * t2 + 1.0 / 3.0;
    p = p * t2 + 1.0;
    const float r = (float)((double)(high + up) + 2.8853900817779268 * t * p);
    if (x == 0.0)
        return -INFINITY;
    return !(x >= 0.0) ? NAN : x > 3.5e38 ? INFINITY : r;
}

static inline float reciprocal(float a)
{
    return flushed(1.0f / flushed(a));
}

static inline float reciprocal_root(float a)
{
    return (float)(1.0 / sqrt((double)flushed(a)));
}

/* a * 2^e. Two steps reach every float; the first one never rounds except towards the final overflow. */
static inline float scaled(float a, int32_t e)
{
    const int32_t n = e < -300 ? -300 : e > 300 ? 300 : e;
    return (float)((double)a * power_of_two(n));
}

static inline int32_t exponent_of(float a) /* as the field says: 0 for zero and denormals */
{
    return (int32_t)(as_word(a) >> 23 & 255);
}

static inline uint32_t to_int(float a)
{
    const float x = a >= 2147483648.0f ? 0.0f : a <= -2147483648.0f ? 0.0f : a != a ? 0.0f : a;
    return a >= 2147483648.0f ? 0x7fffffffu : a <= -2147483648.0f ? 0x80000000u : (uint32_t)(int32_t)x;
}

static inline uint32_t to_uint(float a)
{
    const float x = !(a > 0.0f) ? 0.0f : a >= 4294967296.0f ? 0.0f : a;
    return a >= 4294967296.0f ? ~0u : (uint32_t)x;
}

#define OPS1(X)                                                                                                                                      \
    X(v_rndne_f32, rintf(a))                                                                                                                         \
    X(v_floor_f32, floorf(a))                                                                                                                        \
    X(v_ceil_f32, ceilf(a))                                                                                                                          \
    X(v_trunc_f32, truncf(a))                                                                                                                        \
    X(v_fract_f32, min_num(a - floorf(a), 0x1.fffffep-1f))
#define TRANS1(X)                                                                                                                                    \
    X(v_exp_f32, exp2_of(flushed(a)))                                                                                                                \
    X(v_log_f32, log2_of(a))                                                                                                                         \
    X(v_rcp_f32, reciprocal(a))                                                                                                                      \
    X(v_rcp_iflag_f32, reciprocal(a))                                                                                                                \
    X(v_rsq_f32, reciprocal_root(a))                                                                                                                 \
    X(v_sqrt_f32, sqrtf(flushed(a)))                                                                                                                 \
    X(v_sin_f32, (float)sin(6.283185307179586 * (double)a))                                                                                          \
    X(v_cos_f32, (float)cos(6.283185307179586 * (double)a))
#define OPS2(X)                                                                                                                                      \
    X(v_add_f32, a + b)                                                                                                                              \
    X(v_sub_f32, a - b)                                                                                                                              \
    X(v_subrev_f32, b - a)                                                                                                                           \
    X(v_mul_f32, a *b)                                                                                                                               \
    X(v_mul_legacy_f32, a == 0.0f || b == 0.0f ? 0.0f : a * b)                                                                                       \
    X(v_max_f32, max_num(a, b))                                                                                                                      \
    X(v_min_f32, min_num(a, b))                                                                                                                      \
    X(v_maximum_f32, maximum(a, b))                                                                                                                  \
    X(v_minimum_f32, minimum(a, b))
#define OPS3(X)                                                                                                                                      \
    X(v_fma_f32, fmaf(a, b, c))                                                                                                                      \
    X(v_fmamk_f32, fmaf(a, b, c))                                                                                                                    \
    X(v_fmaak_f32, fmaf(a, b, c))                                                                                                                    \
    X(v_max3_f32, max_num(max_num(a, b), c))                                                                                                         \
    X(v_min3_f32, min_num(min_num(a, b), c))                                                                                                         \
    X(v_maximum3_f32, maximum(maximum(a, b), c))                                                                                                     \
    X(v_minimum3_f32, minimum(minimum(a, b), c))                                                                                                     \
    X(v_med3_f32, middle(a, b, c))                                                                                                                   \
    X(v_maxmin_f32, min_num(max_num(a, b), c))                                                                                                       \
    X(v_minmax_f32, max_num(min_num(a, b), c))
#define TO_FLOAT(X)                                                                                                                                  \
    X(v_cvt_f32_i32, (int32_t)a)                                                                                                                     \
    X(v_cvt_f32_u32, a)                                                                                                                              \
    X(v_cvt_f32_ubyte0, a & 255)                                                                                                                     \
    X(v_cvt_f32_ubyte1, a >> 8 & 255)                                                                                                                \
    X(v_cvt_f32_ubyte2, a >> 16 & 255)                                                                                                               \
    X(v_cvt_f32_ubyte3, a >> 24)                                                                                                                     \
    X(v_cvt_off_f32_i4, (float)((int32_t)(a << 28) >> 28) * 0.0625f)
#define TO_WORD(X)                                                                                                                                   \
    X(v_cvt_i32_f32, to_int(a))                                                                                                                      \
    X(v_cvt_u32_f32, to_uint(a))                                                                                                                     \
    X(v_cvt_nearest_i32_f32, to_int(floorf(a + 0.5f)))                                                                                               \
    X(v_cvt_floor_i32_f32, to_int(floorf(a)))                                                                                                        \
    X(v_frexp_exp_i32_f32, a == 0.0f || a - a != 0.0f ? 0 : ilogbf(a) + 1)

OPS1(FLOAT1)
TRANS1(FLOAT1)
OPS2(FLOAT2)
OPS3(FLOAT3)
TO_FLOAT(WORD_TO_FLOAT)
TO_WORD(FLOAT_TO_WORD)
FLOAT_ACC(v_fmac_f32, fmaf(a, b, c))

static inline float mantissa_of(float a)
{
    int e;
    return a == 0.0f || a - a != 0.0f ? a : frexpf(a, &e);
}
FLOAT1(v_frexp_mant_f32, mantissa_of(a))

/* gfx12: the same approximations of a scalar register. */
#define SCALAR_TRANS(name, expr)                                                                                                                     \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        lanes room;                                                                                                                                  \
        const float a = source_f(w, in, 1, room)[0];                                                                                                 \
        set_scalar(w, in, 0, as_word(expr));                                                                                                         \
        return in + 1;                                                                                                                               \
    }
#define SCALAR_TRANSES(X)                                                                                                                            \
    X(v_s_exp_f32, exp2_of(flushed(a)))                                                                                                              \
    X(v_s_log_f32, log2_of(a))                                                                                                                       \
    X(v_s_rcp_f32, reciprocal(a))                                                                                                                    \
    X(v_s_rsq_f32, reciprocal_root(a))                                                                                                               \
    X(v_s_sqrt_f32, sqrtf(flushed(a)))
SCALAR_TRANSES(SCALAR_TRANS)

BEGIN(v_ldexp_f32)
{
    FLOATS(1, a);
    WORDS(2, b);
    float_lanes r;
    for (int l = 0; l < LANES; l++)
        r[l] = scaled(lanes_a[l], I(lanes_b[l]));
    put_f(w, in, r);
    return in + 1;
}

/* ---- division: v_div_scale brings the operands into a safe range, v_div_fmas undoes it, v_div_fixup sees to the special cases ---- */

/* d, vcc, s0, denominator, numerator: s0 (one of the two) scaled. *undo: v_div_fmas has to scale back. */
static inline float div_scale(float s0, float den, float num, uint32_t *undo)
{
    const bool is_den = as_word(s0) == as_word(den), is_num = as_word(s0) == as_word(num);
    const bool tiny_quotient = fabsf(num / den)<0x1p-126f, huge_den = fabsf(den)> 0x1p126f;
    *undo = 0;
    if (num == 0.0f || den == 0.0f)
        return NAN;
    if (exponent_of(num) - exponent_of(den) >= 96) {
        *undo = 1;
        return is_den ? scaled(s0, 64) : s0;
    }
    if (exponent_of(den) == 0)
        return scaled(s0, 64);
    if (huge_den && tiny_quotient) {
        *undo = 1;
        return is_den ? scaled(s0, -64) : s0;
    }
    if (huge_den)
        return scaled(s0, -64);
    if (tiny_quotient) {
        *undo = 1;
        return is_num ? scaled(s0, 64) : s0;
    }
    return exponent_of(num) <= 23 ? scaled(s0, 64) : s0;
}

BEGIN(v_div_scale_f32)
{
    FLOATS(2, a);
    FLOATS(3, b);
    FLOATS(4, c);
    lanes r;
    uint32_t bits = 0;
    for (int l = 0; l < LANES; l++) {
        uint32_t undo;
        r[l] = as_word(div_scale(lanes_a[l], lanes_b[l], lanes_c[l], &undo));
        bits |= undo << l;
    }
    put(w, in, r);
    set_scalar(w, in, 1, bits & exec_of(w));
    return in + 1;
}

BEGIN(v_div_fmas_f32)
{
    FLOATS(1, a);
    FLOATS(2, b);
    FLOATS(3, c);
    const uint32_t undo = w->s[S_VCC];
    float_lanes r;
    for (int l = 0; l < LANES; l++) {
        const float x = fmaf(lanes_a[l], lanes_b[l], lanes_c[l]);
        const double exact = (double)lanes_a[l] * (double)lanes_b[l] + (double)lanes_c[l]; /* a quotient that becomes a denormal is rounded once */
        r[l] = !(undo >> l & 1) ? x : (float)(exact * (exponent_of(lanes_c[l]) > 127 ? 0x1p64 : 0x1p-64));
    }
    put_f(w, in, r);
    return in + 1;
}

static inline float div_fixup(float q, float den, float num)
{
    const uint32_t sign = (as_word(den) ^ as_word(num)) & 0x80000000u;
    if (num != num)
        return num;
    if (den != den)
        return den;
    const bool num_inf = fabsf(num) == INFINITY, den_inf = fabsf(den) == INFINITY;
    if ((num == 0.0f && den == 0.0f) || (num_inf && den_inf))
        return as_float(0xffc00000u);
    if (den == 0.0f || num_inf)
        return as_float(sign | 0x7f800000u);
    if (den_inf || num == 0.0f || exponent_of(num) - exponent_of(den) < -150)
        return as_float(sign);
    if (q != q) /* what v_div_scale could not save: an overflow */
        return as_float(sign | 0x7f800000u);
    return as_float(sign | (as_word(q) & 0x7fffffffu));
}
FLOAT3(v_div_fixup_f32, div_fixup(a, b, c))

/* ---- doubles ---- */

typedef double double_lanes[LANES] __attribute__((aligned(64)));

static inline void load_double(const struct wave *w, const struct insn *in, int k, double to[LANES])
{
    lanes room_low, room_high;
    const uint32_t *low = source64(w, in, k, 0, room_low), *high = source64(w, in, k, 1, room_high);
    for (int l = 0; l < LANES; l++) {
        const uint64_t bits = (uint64_t)low[l] | (uint64_t)high[l] << 32;
        memcpy(&to[l], &bits, 8);
    }
}

static inline void put_double(struct wave *w, const struct insn *in, const double r[LANES])
{
    lanes low, high;
    for (int l = 0; l < LANES; l++) {
        uint64_t bits;
        memcpy(&bits, &r[l], 8);
        low[l] = (uint32_t)bits;
        high[l] = (uint32_t)(bits >> 32);
    }
    const uint32_t mask = write_mask(w, in);
    put_word(w, in->o[0].index, mask, low);
    put_word(w, in->o[0].index + 1, mask, high);
}

#define DOUBLE(name, n, expr)                                                                                                                        \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        double_lanes x[3], r;                                                                                                                        \
        for (int k = 0; k < (n); k++)                                                                                                                \
            load_double(w, in, k + 1, x[k]);                                                                                                         \
        for (int l = 0; l < LANES; l++)                                                                                                              \
            r[l] = (expr);                                                                                                                           \
        put_double(w, in, r);                                                                                                                        \
        return in + 1;                                                                                                                               \
    }
DOUBLE(v_add_f64, 2, x[0][l] + x[1][l])
DOUBLE(v_mul_f64, 2, x[0][l] * x[1][l])
DOUBLE(v_max_f64, 2, fmax(x[0][l], x[1][l]))
DOUBLE(v_min_f64, 2, fmin(x[0][l], x[1][l]))
DOUBLE(v_fma_f64, 3, fma(x[0][l], x[1][l], x[2][l]))
DOUBLE(v_rndne_f64, 1, rint(x[0][l]))
DOUBLE(v_floor_f64, 1, floor(x[0][l]))
DOUBLE(v_rcp_f64, 1, 1.0 / x[0][l])

BEGIN(v_ldexp_f64)
{
    double_lanes x;
    load_double(w, in, 1, x);
    WORDS(2, e);
    for (int l = 0; l < LANES; l++)
        x[l] = ldexp(x[l], I(lanes_e[l]));
    put_double(w, in, x);
    return in + 1;
}

#define TO_DOUBLE(name, type)                                                                                                                        \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        WORDS(1, a);                                                                                                                                 \
        double_lanes r;                                                                                                                              \
        for (int l = 0; l < LANES; l++)                                                                                                              \
            r[l] = (double)(type)lanes_a[l];                                                                                                         \
        put_double(w, in, r);                                                                                                                        \
        return in + 1;                                                                                                                               \
    }
TO_DOUBLE(v_cvt_f64_i32, int32_t)
TO_DOUBLE(v_cvt_f64_u32, uint32_t)

BEGIN(v_cvt_f64_f32)
{
    FLOATS(1, a);
    double_lanes r;
    for (int l = 0; l < LANES; l++)
        r[l] = (double)lanes_a[l];
    put_double(w, in, r);
    return in + 1;
}

BEGIN(v_cvt_f32_f64)
{
    double_lanes x;
    load_double(w, in, 1, x);
    float_lanes r;
    for (int l = 0; l < LANES; l++)
        r[l] = (float)x[l];
    put_f(w, in, r);
    return in + 1;
}

BEGIN(v_cvt_i32_f64)
{
    double_lanes x;
    load_double(w, in, 1, x);
    lanes r;
    for (int l = 0; l < LANES; l++)
        r[l] = x[l] != x[l] ? 0 : x[l] >= 2147483647.0 ? 0x7fffffffu : x[l] <= -2147483648.0 ? 0x80000000u : (uint32_t)(int32_t)x[l];
    put(w, in, r);
    return in + 1;
}

#define TRANS(name, ...) ALSO(name, name, OP_TRANS, 0)
#define F64(name)        ALSO(name, name, OP_VALU, OPF_F64)

const struct op EMU_TABLE(emu_float)[] = {
    OPS1(VALU) TRANS1(TRANS) SCALAR_TRANSES(TRANS) OPS2(VALU) OPS3(VALU) TO_FLOAT(VALU) TO_WORD(VALU) VALU(v_fmac_f32) VALU(v_frexp_mant_f32)
        VALU(v_ldexp_f32) ALSO(v_max_num_f32, v_max_f32, OP_VALU, 0) ALSO(v_min_num_f32, v_min_f32, OP_VALU, 0)
            ALSO(v_max3_num_f32, v_max3_f32, OP_VALU, 0) ALSO(v_min3_num_f32, v_min3_f32, OP_VALU, 0) ALSO(v_med3_num_f32, v_med3_f32, OP_VALU, 0)
                ALSO(v_maxmin_num_f32, v_maxmin_f32, OP_VALU, 0) ALSO(v_minmax_num_f32, v_minmax_f32, OP_VALU, 0)
                    ALSO(v_mul_dx9_zero_f32, v_mul_legacy_f32, OP_VALU, 0) ALSO(v_cvt_rpi_i32_f32, v_cvt_nearest_i32_f32, OP_VALU, 0)
                        ALSO(v_cvt_flr_i32_f32, v_cvt_floor_i32_f32, OP_VALU, 0) ALSO(v_div_scale_f32, v_div_scale_f32, OP_VALU, OPF_CARRY)
                            VALU(v_div_fmas_f32) VALU(v_div_fixup_f32) F64(v_add_f64) F64(v_mul_f64) F64(v_max_f64) F64(v_min_f64) F64(v_fma_f64)
                                F64(v_rndne_f64) F64(v_floor_f64) F64(v_rcp_f64) F64(v_ldexp_f64) ALSO(v_max_num_f64, v_max_f64, OP_VALU, OPF_F64)
                                    ALSO(v_min_num_f64, v_min_f64, OP_VALU, OPF_F64) VALU(v_cvt_f64_i32) VALU(v_cvt_f64_u32) VALU(v_cvt_f64_f32)
                                        F64(v_cvt_f32_f64) F64(v_cvt_i32_f64){NULL, NULL, 0, 0}};
