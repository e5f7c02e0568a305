/* tests/hip/emu_cases.h: expressions that are compiled twice: for the GPU (emu_kernels.hip) and for the CPU (test_emulator.c). The emulated machine code
 * must give the CPU's bits. They are chosen for the instructions that the compiler makes of them. X(name, expression). */
#ifndef BEDSIDE_TESTS_EMU_CASES_H
#define BEDSIDE_TESTS_EMU_CASES_H

/* ---- words a, b, c ---- */

#define I(x)        ((int32_t)(x))
#define ROT(x, n)   ((x) << ((n)&31) | (x) >> ((32 - (n)) & 31))
#define BYTE(x, i)  ((x) >> 8 * (i)&255u)
#define SBYTE(x, i) ((int32_t)(int8_t)((x) >> 8 * (i)))
#define SHORT(x)    ((int32_t)(int16_t)(x))

#define WORD_CASES(X)                                                                                                                                \
    X(add, a + b)                                                                                                                                    \
    X(sub, a - b)                                                                                                                                    \
    X(mul, a *b)                                                                                                                                     \
    X(mul_high, (uint32_t)((uint64_t)a * b >> 32))                                                                                                   \
    X(mul_high_signed, (uint32_t)((uint64_t)((int64_t)I(a) * I(b)) >> 32))                                                                           \
    X(mul_24, (a & 0xffffffu) * (b & 0xffffffu) + c)                                                                                                 \
    X(mul_24_signed, (uint32_t)((I(a) >> 9) * (I(b) >> 20)) + c)                                                                                     \
    X(divide, a / (b | 1u))                                                                                                                          \
    X(remainder, a % (b >> 20 | 1u))                                                                                                                 \
    X(divide_signed, (uint32_t)(I(a) / (I(b) >> 8 | 1)))                                                                                             \
    X(divide_by_7, a / 7u + b % 13u)                                                                                                                 \
    X(shift_left, a << (b & 31u))                                                                                                                    \
    X(shift_right, a >> (b & 31u))                                                                                                                   \
    X(shift_signed, (uint32_t)(I(a) >> (b & 31u)))                                                                                                   \
    X(rotate, ROT(a, b))                                                                                                                             \
    X(rotate_7, ROT(a, 7) ^ ROT(b, 18) ^ c >> 3)                                                                                                     \
    X(funnel, (uint32_t)(((uint64_t)a << 32 | b) >> (c & 31u)))                                                                                      \
    X(and_or, (a & b) | c)                                                                                                                           \
    X(or3, a | b | c)                                                                                                                                \
    X(xor3, a ^ b ^ c)                                                                                                                               \
    X(xor_not, ~(a ^ b))                                                                                                                             \
    X(and_not, a & ~b)                                                                                                                               \
    X(choose_bits, (a & b) | (~a & c))                                                                                                               \
    X(majority, (a & b) ^ (a & c) ^ (b & c))                                                                                                         \
    X(add3, a + b + c)                                                                                                                               \
    X(shift_add, (a << 3) + b)                                                                                                                       \
    X(shift_or, a << 5 | b)                                                                                                                          \
    X(add_shift, (a + b) << 7)                                                                                                                       \
    X(xor_add, (a ^ b) + c)                                                                                                                          \
    X(field, a >> 5 & 0x3ffu)                                                                                                                        \
    X(field_signed, (uint32_t)(I(a << 9) >> 20))                                                                                                     \
    X(field_variable, a >> (b & 15u) & ((1u << (c & 15u)) - 1))                                                                                      \
    X(ones, (uint32_t)__builtin_popcount(a) + b)                                                                                                     \
    X(leading, (uint32_t)__builtin_clz(a | 1u))                                                                                                      \
    X(trailing, (uint32_t)__builtin_ctz(a | 0x80000000u))                                                                                            \
    X(swap_bytes, __builtin_bswap32(a))                                                                                                              \
    X(larger, a > b ? a : b)                                                                                                                         \
    X(smaller, a < b ? a : b)                                                                                                                        \
    X(larger_signed, (uint32_t)(I(a) > I(b) ? I(a) : I(b)))                                                                                          \
    X(smaller_signed, (uint32_t)(I(a) < I(b) ? I(a) : I(b)))                                                                                         \
    X(clamped, (uint32_t)(I(a) < -127 ? -127 : I(a) > 127 ? 127 : I(a)))                                                                             \
    X(largest, (a > b ? a : b) > c ? (a > b ? a : b) : c)                                                                                            \
    X(absolute, (uint32_t)(I(a) < 0 ? 0u - a : a))                                                                                                   \
    X(difference, a > b ? a - b : b - a)                                                                                                             \
    X(select_chain, a < b ? (b < c ? 1u : 2u) : (a == c ? 3u : 4u))                                                                                  \
    X(select_signed, I(a) >= I(b) ? a + 1 : b - 1)                                                                                                   \
    X(byte_sum, BYTE(a, 0) + BYTE(a, 1) + BYTE(a, 2) + BYTE(a, 3))                                                                                   \
    X(byte_signed_sum, (uint32_t)(SBYTE(a, 0) + SBYTE(a, 1) + SBYTE(b, 2) + SBYTE(b, 3)))                                                            \
    X(byte_shuffle, BYTE(a, 3) | BYTE(b, 0) << 8 | BYTE(a, 1) << 16 | BYTE(b, 2) << 24)                                                              \
    X(byte_differences, sad4(a, b) + c)                                                                                                              \
    X(pack_shorts, (a & 0xffffu) | b << 16)                                                                                                          \
    X(pack_high, a >> 16 | (b & 0xffff0000u))                                                                                                        \
    X(short_mul, (uint32_t)(SHORT(a) * SHORT(b)))                                                                                                    \
    X(short_add, (uint32_t)(uint16_t)((uint16_t)a + (uint16_t)b))                                                                                    \
    X(short_mad, (uint32_t)(uint16_t)((uint16_t)a * (uint16_t)b + (uint16_t)c))                                                                      \
    X(short_max, (uint32_t)(SHORT(a) > SHORT(b) ? SHORT(a) : SHORT(b)))                                                                              \
    X(short_shift, (uint32_t)(uint16_t)((uint16_t)a >> (b & 15u)) + (uint32_t)(SHORT(a) >> (c & 15u)))                                               \
    X(short_compare, (uint16_t)a<(uint16_t)b ? a : SHORT(b)> SHORT(c) ? b : c)                                                                       \
    X(nibbles, (a & 0x0f0f0f0fu) + (b >> 4 & 0x0f0f0f0fu))                                                                                           \
    X(scales_q4_k, (a & 0x3f3f3f3fu) | (b >> 4 & 0x0f0f0f0fu) | (c >> 2 & 0x30303030u))                                                              \
    X(bits_loop, gray_walk(a, b))                                                                                                                    \
    X(collatz, collatz(a))

static inline EMU_DEVICE uint32_t sad4(uint32_t a, uint32_t b)
{
    uint32_t sum = 0;
    for (int i = 0; i < 4; i++) {
        const uint32_t x = BYTE(a, i), y = BYTE(b, i);
        sum += x > y ? x - y : y - x;
    }
    return sum;
}

static inline EMU_DEVICE uint32_t gray_walk(uint32_t a, uint32_t b) /* as many turns as bits in a: lanes leave the loop one by one */
{
    while (a) {
        b = ROT(b, 5) ^ (a & (0u - a));
        a &= a - 1;
    }
    return b;
}

static inline EMU_DEVICE uint32_t collatz(uint32_t a)
{
    uint32_t n = a & 1023u, steps = 0;
    while (n > 1 && steps < 200) {
        n = n & 1u ? 3 * n + 1 : n / 2;
        steps++;
    }
    return steps;
}

/* ---- 64 bits: x, y, and the words a, b ---- */

#define J(x) ((int64_t)(x))
#define LONG_CASES(X)                                                                                                                                \
    X(add, x + y)                                                                                                                                    \
    X(sub, x - y)                                                                                                                                    \
    X(mul, x *y)                                                                                                                                     \
    X(mul_wide, (uint64_t)a *b + y)                                                                                                                  \
    X(mul_wide_signed, (uint64_t)((int64_t)I(a) * I(b)) + y)                                                                                         \
    X(divide, x / (y | 1u))                                                                                                                          \
    X(divide_small, x / (b | 1u))                                                                                                                    \
    X(remainder, x % (y >> 40 | 1u))                                                                                                                 \
    X(divide_signed, (uint64_t)(J(x) / (J(y) >> 30 | 1)))                                                                                            \
    X(shift_left, x << (a & 63u))                                                                                                                    \
    X(shift_right, x >> (a & 63u))                                                                                                                   \
    X(shift_signed, (uint64_t)(J(x) >> (a & 63u)))                                                                                                   \
    X(compare, x < y ? x : y)                                                                                                                        \
    X(compare_signed, J(x) < J(y) ? x : y)                                                                                                           \
    X(equal, x == y ? 1u : 2u)                                                                                                                       \
    X(above, J(x) > 5 ? y : x)                                                                                                                       \
    X(negative, 0 - x)                                                                                                                               \
    X(logic, (x & y) ^ (~x | y))                                                                                                                     \
    X(ones, (uint64_t)__builtin_popcountll(x))                                                                                                       \
    X(leading, (uint64_t)__builtin_clzll(x | 1u))                                                                                                    \
    X(trailing, (uint64_t)__builtin_ctzll(x | 1ull << 63))                                                                                           \
    X(sign_extend, (uint64_t)(int64_t)I(a) + x)                                                                                                      \
    X(address, x + (uint64_t)a * 144 + (b & 31u) * 4)

/* ---- floats f, g, h: any bit pattern, NaNs compare equal ---- */

#define FLOAT_CASES(X)                                                                                                                               \
    X(add, f + g)                                                                                                                                    \
    X(sub, f - g)                                                                                                                                    \
    X(mul, f *g)                                                                                                                                     \
    X(mul_add, f *g + h)                                                                                                                             \
    X(fma, __builtin_fmaf(f, g, h))                                                                                                                  \
    X(fma_negative, __builtin_fmaf(-f, g, h))                                                                                                        \
    X(fma_constant, __builtin_fmaf(f, 0.7109375f, g))                                                                                                \
    X(fma_add_constant, __builtin_fmaf(f, g, 1.5f))                                                                                                  \
    X(negative, -f)                                                                                                                                  \
    X(absolute, __builtin_fabsf(f))                                                                                                                  \
    X(minus_absolute, g - __builtin_fabsf(f))                                                                                                        \
    X(divide, f / g)                                                                                                                                 \
    X(reciprocal, 1.0f / f)                                                                                                                          \
    X(root, __builtin_sqrtf(__builtin_fabsf(f)))                                                                                                     \
    X(less, f < g ? f : h)                                                                                                                           \
    X(less_or_equal, f <= g ? f : h)                                                                                                                 \
    X(not_less, !(f < g) ? f : h)                                                                                                                    \
    X(equal, f == g ? 1.0f : h)                                                                                                                      \
    X(unequal, f != f ? 0.0f : g)                                                                                                                    \
    X(unordered, __builtin_isunordered(f, g) ? 1.0f : 2.0f)                                                                                          \
    X(round_even, __builtin_rintf(f))                                                                                                                \
    X(floor, __builtin_floorf(f))                                                                                                                    \
    X(ceil, __builtin_ceilf(f))                                                                                                                      \
    X(trunc, __builtin_truncf(f))                                                                                                                    \
    X(copy_sign, __builtin_copysignf(f, g))                                                                                                          \
    X(from_int, (float)(int32_t)a)                                                                                                                   \
    X(from_uint, (float)a)                                                                                                                           \
    X(from_byte, (float)(a & 255u) + (float)(a >> 8 & 255u) - (float)(a >> 24))                                                                      \
    X(from_signed_byte, (float)(int8_t)a *g)                                                                                                         \
    X(from_short, (float)(int16_t)a + (float)(uint16_t)b)                                                                                            \
    X(from_long, (float)((uint64_t)a << 32 | b))                                                                                                     \
    X(double_sum, (float)((double)f * (double)g + (double)h))                                                                                        \
    X(double_int, (float)((double)(int32_t)a * 0.1))                                                                                                 \
    X(bf16, word_float(a << 16) * word_float(b & 0xffff0000u))                                                                                       \
    X(half_in, (float)half_at(a) + (float)half_at(a >> 16) * g)                                                                                      \
    X(half_fma, __builtin_fmaf((float)half_at(a), (float)half_at(b), h))                                                                             \
    X(clamp_unit, unit(f))                                                                                                                           \
    X(poly, ((f * 0.25f + g) * f - 3.0f) * g + 1.0f)

static inline EMU_DEVICE float unit(float f)
{
    return f > 1.0f ? 1.0f : f > 0.0f ? f : 0.0f;
}

/* Of numbers, not NaNs and zeros: what fmax gives for +-0 is open in C. */
#define FINITE_CASES(X)                                                                                                                              \
    X(larger, __builtin_fmaxf(f, g))                                                                                                                 \
    X(smaller, __builtin_fminf(f, g))                                                                                                                \
    X(largest, __builtin_fmaxf(__builtin_fmaxf(f, g), h))                                                                                            \
    X(smallest, __builtin_fminf(__builtin_fminf(f, g), h))                                                                                           \
    X(between, __builtin_fminf(__builtin_fmaxf(f, -1.0f), 1.0f))                                                                                     \
    X(scaled, __builtin_ldexpf(f, (int)(b & 15u) - 8))                                                                                               \
    X(to_int, (float)(int32_t)__builtin_rintf(f))                                                                                                    \
    X(to_uint, (float)(uint32_t)__builtin_fabsf(f))                                                                                                  \
    X(quantised, (float)(int8_t)(int32_t)__builtin_rintf(__builtin_fminf(__builtin_fmaxf(f, -127.0f), 127.0f)))                                      \
    X(fraction, f - __builtin_floorf(f))

/* ---- halves p, q, r ---- */

#define HALF_CASES(X)                                                                                                                                \
    X(add, (half)(p + q))                                                                                                                            \
    X(sub, (half)(p - q))                                                                                                                            \
    X(mul, (half)(p * q))                                                                                                                            \
    X(mul_add, (half)((half)(p * q) + r))                                                                                                            \
    X(negative, (half)-p)                                                                                                                            \
    X(less, p < q ? p : r)                                                                                                                           \
    X(equal, p == q ? q : r)                                                                                                                         \
    X(from_float, (half)((float)p * 1.1f))                                                                                                           \
    X(from_int, (half)(int16_t)a)                                                                                                                    \
    X(scaled, (half)(p * (half)0.125f))

/* ---- approximations: relative error of at most 2e-6 against the CPU, of numbers in a range ---- */

#define CLOSE_CASES(X)                                                                                                                               \
    X(exp, __builtin_expf(f))                                                                                                                        \
    X(exp2, __builtin_exp2f(f))                                                                                                                      \
    X(log, __builtin_logf(__builtin_fabsf(f) + 1e-6f))                                                                                               \
    X(log2, __builtin_log2f(__builtin_fabsf(f) + 1e-6f))                                                                                             \
    X(sigmoid, 1.0f / (1.0f + __builtin_expf(-f)))                                                                                                   \
    X(silu, f / (1.0f + __builtin_expf(-f)))                                                                                                         \
    X(softplus, f > 20.0f ? f : __builtin_logf(1.0f + __builtin_expf(f)) + 1.0f)

/* A character for each. */
#define COUNT_CASE(name, expression) "."
enum {
    N_WORD = (int)sizeof(WORD_CASES(COUNT_CASE)) - 1,
    N_LONG = (int)sizeof(LONG_CASES(COUNT_CASE)) - 1,
    N_FLOAT = (int)sizeof(FLOAT_CASES(COUNT_CASE)) - 1,
    N_FINITE = (int)sizeof(FINITE_CASES(COUNT_CASE)) - 1,
    N_HALF = (int)sizeof(HALF_CASES(COUNT_CASE)) - 1,
    N_CLOSE = (int)sizeof(CLOSE_CASES(COUNT_CASE)) - 1,
};

/* ---- arguments ---- */

/* out[case * n + i] for i in 0 .. n-1; the inputs are words. */
struct case_params {
    const uint32_t *a, *b, *c;
    uint32_t *out; /* 64-bit cases: two words each */
    uint32_t n;
};

struct plain_params {
    const uint8_t *in;
    uint8_t *out;
    uint32_t n, extra;
};

#endif
