/* tests/hip/emu/op_compare.c: v_cmp and v_cmpx of every type and condition, v_cmp_class. */
#include "tests/hip/emu/vector.h"

#include <math.h>

/* Where the bits go: v_cmp to its first operand, v_cmpx to exec. Lanes that are off give 0. */
static inline const struct insn *finish(struct wave *w, const struct insn *in, bool to_exec, const uint32_t flags[LANES])
{
    uint32_t bits = 0;
    for (int l = 0; l < LANES; l++)
        bits |= flags[l] << l;
    bits &= exec_of(w);
    if (to_exec)
        w->s[S_EXEC] = bits;
    else
        set_scalar(w, in, 0, bits);
    return in + 1;
}

#define COMPARE_AS(fn, first, to_exec, type, load, expr)                                                                                             \
    static const struct insn *fn(struct wave *w, const struct insn *in)                                                                              \
    {                                                                                                                                                \
        lanes flags;                                                                                                                                 \
        load(first);                                                                                                                                 \
        for (int l = 0; l < LANES; l++) {                                                                                                            \
            const type a = (type)lanes_a[l], b = (type)lanes_b[l];                                                                                   \
            flags[l] = (expr) ? 1u : 0u;                                                                                                             \
        }                                                                                                                                            \
        return finish(w, in, to_exec, flags);                                                                                                        \
    }
#define COMPARE(name, type_name, type, load, expr)                                                                                                   \
    COMPARE_AS(run_cmp_##name##_##type_name, 1, false, type, load, expr)                                                                             \
    COMPARE_AS(run_cmpx_##name##_##type_name, 0, true, type, load, expr)

#define LOAD_WORDS(k)                                                                                                                                \
    WORDS(k, a);                                                                                                                                     \
    WORDS((k) + 1, b)
#define LOAD_FLOATS(k)                                                                                                                               \
    FLOATS(k, a);                                                                                                                                    \
    FLOATS((k) + 1, b)
#define LOAD_SHORTS(k)                                                                                                                               \
    lanes lanes_a, lanes_b;                                                                                                                          \
    source16(w, in, k, 0, lanes_a);                                                                                                                  \
    source16(w, in, (k) + 1, 1, lanes_b)
#define LOAD_HALVES(k)                                                                                                                               \
    lanes bits_a, bits_b;                                                                                                                            \
    float_lanes lanes_a, lanes_b;                                                                                                                    \
    source16(w, in, k, 0, bits_a);                                                                                                                   \
    source16(w, in, (k) + 1, 1, bits_b);                                                                                                             \
    for (int l = 0; l < LANES; l++) {                                                                                                                \
        lanes_a[l] = half_to_float(bits_a[l]);                                                                                                       \
        lanes_b[l] = half_to_float(bits_b[l]);                                                                                                       \
    }
#define LOAD_LONGS(k)                                                                                                                                \
    uint64_t lanes_a[LANES], lanes_b[LANES];                                                                                                         \
    load_long(w, in, k, lanes_a);                                                                                                                    \
    load_long(w, in, (k) + 1, lanes_b)
#define LOAD_DOUBLES(k)                                                                                                                              \
    double lanes_a[LANES], lanes_b[LANES];                                                                                                           \
    load_long(w, in, k, lanes_a);                                                                                                                    \
    load_long(w, in, (k) + 1, lanes_b)

static inline void load_long(const struct wave *w, const struct insn *in, int k, void *lanes_of_64)
{
    uint64_t *to = lanes_of_64;
    lanes room_low, room_high;
    const uint32_t *low = source64(w, in, k, 0, room_low), *high = source64(w, in, k, 1, room_high);
    for (int l = 0; l < LANES; l++)
        to[l] = (uint64_t)low[l] | (uint64_t)high[l] << 32;
}

#define INTEGERS(X, ...)                                                                                                                             \
    X(lt, __VA_ARGS__, a < b)                                                                                                                        \
    X(eq, __VA_ARGS__, a == b)                                                                                                                       \
    X(le, __VA_ARGS__, a <= b)                                                                                                                       \
    X(gt, __VA_ARGS__, a > b)                                                                                                                        \
    X(ne, __VA_ARGS__, a != b)                                                                                                                       \
    X(ge, __VA_ARGS__, a >= b)
#define REALS(X, ...)                                                                                                                                \
    X(lt, __VA_ARGS__, a < b)                                                                                                                        \
    X(eq, __VA_ARGS__, a == b)                                                                                                                       \
    X(le, __VA_ARGS__, a <= b)                                                                                                                       \
    X(gt, __VA_ARGS__, a > b)                                                                                                                        \
    X(lg, __VA_ARGS__, a<b || a> b)                                                                                                                  \
    X(ge, __VA_ARGS__, a >= b)                                                                                                                       \
    X(o, __VA_ARGS__, a == a && b == b)                                                                                                              \
    X(u, __VA_ARGS__, a != a || b != b)                                                                                                              \
    X(nge, __VA_ARGS__, !(a >= b))                                                                                                                   \
    X(nlg, __VA_ARGS__, !(a < b || a > b))                                                                                                           \
    X(ngt, __VA_ARGS__, !(a > b))                                                                                                                    \
    X(nle, __VA_ARGS__, !(a <= b))                                                                                                                   \
    X(neq, __VA_ARGS__, a != b)                                                                                                                      \
    X(nlt, __VA_ARGS__, !(a < b))

#define ALL(INTS, FLTS)                                                                                                                              \
    INTEGERS(INTS, i32, int32_t, LOAD_WORDS)                                                                                                         \
    INTEGERS(INTS, u32, uint32_t, LOAD_WORDS)                                                                                                        \
    INTEGERS(INTS, i16, int16_t, LOAD_SHORTS)                                                                                                        \
    INTEGERS(INTS, u16, uint16_t, LOAD_SHORTS)                                                                                                       \
    INTEGERS(INTS, i64, int64_t, LOAD_LONGS)                                                                                                         \
    INTEGERS(INTS, u64, uint64_t, LOAD_LONGS)                                                                                                        \
    REALS(FLTS, f32, float, LOAD_FLOATS)                                                                                                             \
    REALS(FLTS, f16, float, LOAD_HALVES)                                                                                                             \
    REALS(FLTS, f64, double, LOAD_DOUBLES)

ALL(COMPARE, COMPARE)

/* Bits of b: signalling NaN, quiet NaN, -inf, -normal, -denormal, -0, +0, +denormal, +normal, +inf. */
static inline uint32_t float_class(uint32_t bits, uint32_t fraction_bits, uint32_t exponent_bits)
{
    const uint32_t fraction = bits & ((1u << fraction_bits) - 1), top = (1u << exponent_bits) - 1;
    const uint32_t exponent = bits >> fraction_bits & top, negative = bits >> (fraction_bits + exponent_bits) & 1;
    if (exponent == top && fraction)
        return fraction >> (fraction_bits - 1);
    const uint32_t kind = exponent == top ? 3 : exponent ? 2 : fraction ? 1 : 0; /* inf, normal, denormal, zero */
    return negative ? 5 - kind : 6 + kind;
}

static inline const struct insn *class_f32(struct wave *w, const struct insn *in, int first, bool to_exec)
{
    WORDS(first, a);
    WORDS(first + 1, b);
    lanes flags;
    for (int l = 0; l < LANES; l++)
        flags[l] = lanes_b[l] >> float_class(lanes_a[l], 23, 8) & 1;
    return finish(w, in, to_exec, flags);
}

static inline const struct insn *class_f16(struct wave *w, const struct insn *in, int first, bool to_exec)
{
    lanes a;
    source16(w, in, first, 0, a);
    WORDS(first + 1, b);
    for (int l = 0; l < LANES; l++)
        a[l] = lanes_b[l] >> float_class(a[l], 10, 5) & 1;
    return finish(w, in, to_exec, a);
}

BEGIN(v_cmp_class_f32)
{
    return class_f32(w, in, 1, false);
}

BEGIN(v_cmpx_class_f32)
{
    return class_f32(w, in, 0, true);
}

BEGIN(v_cmp_class_f16)
{
    return class_f16(w, in, 1, false);
}

BEGIN(v_cmpx_class_f16)
{
    return class_f16(w, in, 0, true);
}

#define FLAGS_i32 0
#define FLAGS_u32 0
#define FLAGS_i16 0
#define FLAGS_u16 0
#define FLAGS_i64 OPF_SIGNED64
#define FLAGS_u64 0
#define FLAGS_f32 0
#define FLAGS_f16 OPF_F16
#define FLAGS_f64 OPF_F64
#define ENTRY(name, type_name, ...)                                                                                                                  \
    {"v_cmp_" #name "_" #type_name, run_cmp_##name##_##type_name, OP_VALU, FLAGS_##type_name},                                                       \
        {"v_cmpx_" #name "_" #type_name, run_cmpx_##name##_##type_name, OP_VALU, FLAGS_##type_name | OPF_NO_DEST},

const struct op EMU_TABLE(emu_compare)[] = {ALL(ENTRY, ENTRY) VALU(v_cmp_class_f32) ALSO(v_cmpx_class_f32, v_cmpx_class_f32, OP_VALU, OPF_NO_DEST)
                                                VALU_F16(v_cmp_class_f16)
                                                    ALSO(v_cmpx_class_f16, v_cmpx_class_f16, OP_VALU, OPF_F16 | OPF_NO_DEST){NULL, NULL, 0, 0}};
