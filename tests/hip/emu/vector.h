/* tests/hip/emu/vector.h: makers of vector operations: an expression over the operands a, b, c of one lane becomes a function over 32, which the
 * compiler vectorises. NAME##_op is the entry for the file's table. */
#ifndef BEDSIDE_TESTS_EMU_VECTOR_H
#define BEDSIDE_TESTS_EMU_VECTOR_H

#include "tests/hip/emu/operand.h"

#define I(x) ((int32_t)(x))

#define WORDS(i, x)                                                                                                                                  \
    lanes room_##x;                                                                                                                                  \
    const uint32_t *lanes_##x = source(w, in, i, room_##x)
#define FLOATS(i, x)                                                                                                                                 \
    lanes room_##x;                                                                                                                                  \
    const lane_float *lanes_##x = source_f(w, in, i, room_##x)

#define BEGIN(name) static const struct insn *run_##name(struct wave *w, const struct insn *in)

/* Words in, words out: d = expr(a), (a, b), (a, b, c). */
#define WORD1(name, expr)                                                                                                                            \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        WORDS(1, a);                                                                                                                                 \
        lanes r;                                                                                                                                     \
        for (int l = 0; l < LANES; l++) {                                                                                                            \
            const uint32_t a = lanes_a[l];                                                                                                           \
            r[l] = (uint32_t)(expr);                                                                                                                 \
        }                                                                                                                                            \
        put(w, in, r);                                                                                                                               \
        return in + 1;                                                                                                                               \
    }
#define WORD2(name, expr)                                                                                                                            \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        WORDS(1, a);                                                                                                                                 \
        WORDS(2, b);                                                                                                                                 \
        lanes r;                                                                                                                                     \
        for (int l = 0; l < LANES; l++) {                                                                                                            \
            const uint32_t a = lanes_a[l], b = lanes_b[l];                                                                                           \
            r[l] = (uint32_t)(expr);                                                                                                                 \
        }                                                                                                                                            \
        put(w, in, r);                                                                                                                               \
        return in + 1;                                                                                                                               \
    }
#define WORD3(name, expr)                                                                                                                            \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        WORDS(1, a);                                                                                                                                 \
        WORDS(2, b);                                                                                                                                 \
        WORDS(3, c);                                                                                                                                 \
        lanes r;                                                                                                                                     \
        for (int l = 0; l < LANES; l++) {                                                                                                            \
            const uint32_t a = lanes_a[l], b = lanes_b[l], c = lanes_c[l];                                                                           \
            r[l] = (uint32_t)(expr);                                                                                                                 \
        }                                                                                                                                            \
        put(w, in, r);                                                                                                                               \
        return in + 1;                                                                                                                               \
    }

/* Floats in, floats out, with the output modifiers. FLOAT_ACC: c is the destination. */
#define FLOAT1(name, expr)                                                                                                                           \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        FLOATS(1, a);                                                                                                                                \
        float_lanes r;                                                                                                                               \
        for (int l = 0; l < LANES; l++) {                                                                                                            \
            const float a = lanes_a[l];                                                                                                              \
            r[l] = (expr);                                                                                                                           \
        }                                                                                                                                            \
        put_f(w, in, r);                                                                                                                             \
        return in + 1;                                                                                                                               \
    }
#define FLOAT2(name, expr)                                                                                                                           \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        FLOATS(1, a);                                                                                                                                \
        FLOATS(2, b);                                                                                                                                \
        float_lanes r;                                                                                                                               \
        for (int l = 0; l < LANES; l++) {                                                                                                            \
            const float a = lanes_a[l], b = lanes_b[l];                                                                                              \
            r[l] = (expr);                                                                                                                           \
        }                                                                                                                                            \
        put_f(w, in, r);                                                                                                                             \
        return in + 1;                                                                                                                               \
    }
#define FLOAT3_AT(name, i, expr)                                                                                                                     \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        FLOATS(1, a);                                                                                                                                \
        FLOATS(2, b);                                                                                                                                \
        FLOATS(i, c);                                                                                                                                \
        float_lanes r;                                                                                                                               \
        for (int l = 0; l < LANES; l++) {                                                                                                            \
            const float a = lanes_a[l], b = lanes_b[l], c = lanes_c[l];                                                                              \
            r[l] = (expr);                                                                                                                           \
        }                                                                                                                                            \
        put_f(w, in, r);                                                                                                                             \
        return in + 1;                                                                                                                               \
    }
#define FLOAT3(name, expr)    FLOAT3_AT(name, 3, expr)
#define FLOAT_ACC(name, expr) FLOAT3_AT(name, 0, expr)

/* Words in, floats out, and the reverse. */
#define WORD_TO_FLOAT(name, expr)                                                                                                                    \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        WORDS(1, a);                                                                                                                                 \
        float_lanes r;                                                                                                                               \
        for (int l = 0; l < LANES; l++) {                                                                                                            \
            const uint32_t a = lanes_a[l];                                                                                                           \
            r[l] = (float)(expr);                                                                                                                    \
        }                                                                                                                                            \
        put_f(w, in, r);                                                                                                                             \
        return in + 1;                                                                                                                               \
    }
#define FLOAT_TO_WORD(name, expr)                                                                                                                    \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        FLOATS(1, a);                                                                                                                                \
        lanes r;                                                                                                                                     \
        for (int l = 0; l < LANES; l++) {                                                                                                            \
            const float a = lanes_a[l];                                                                                                              \
            r[l] = (uint32_t)(expr);                                                                                                                 \
        }                                                                                                                                            \
        put(w, in, r);                                                                                                                               \
        return in + 1;                                                                                                                               \
    }

/* Table entries. */
#define VALU(name, ...)           {#name, run_##name, OP_VALU, 0},
#define VALU_F16(name, ...)       {#name, run_##name, OP_VALU, OPF_F16},
#define ALSO(name, other, cl, fl) {#name, run_##other, cl, fl},

#endif
