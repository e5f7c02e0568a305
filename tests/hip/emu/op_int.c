/* tests/hip/emu/op_int.c: vector operations on integers and bits. */
#include "tests/hip/emu/vector.h"

static inline uint32_t reverse_bits(uint32_t a)
{
    a = (a >> 1 & 0x55555555u) | (a & 0x55555555u) << 1;
    a = (a >> 2 & 0x33333333u) | (a & 0x33333333u) << 2;
    a = (a >> 4 & 0x0f0f0f0fu) | (a & 0x0f0f0f0fu) << 4;
    return __builtin_bswap32(a);
}

static inline uint32_t count_bits(uint32_t a)
{
    a = a - (a >> 1 & 0x55555555u);
    a = (a & 0x33333333u) + (a >> 2 & 0x33333333u);
    return ((a + (a >> 4)) & 0x0f0f0f0fu) * 0x01010101u >> 24;
}

static inline int32_t low24(uint32_t a)
{
    return I(a << 8) >> 8;
}

static inline uint32_t leading_sign(uint32_t a) /* bits equal to the sign, -1 when all are */
{
    const uint32_t x = I(a) < 0 ? ~a : a;
    return x ? (uint32_t)__builtin_clz(x) : ~0u;
}

static inline uint32_t extract(uint32_t a, uint32_t from, uint32_t n)
{
    return a >> (from & 31) & ((1u << (n & 31)) - 1);
}

/* Sign-extended; a field that reaches beyond bit 31 ends there. */
static inline uint32_t extract_signed(uint32_t a, uint32_t from, uint32_t n)
{
    const uint32_t bits = n & 31, at = from & 31;
    const uint32_t width = at + bits > 32 ? 32 - at : bits;
    const uint32_t up = 32 - at - width;
    return width ? (uint32_t)(I(a << (up & 31)) >> ((32 - width) & 31)) : 0;
}

/* Bytes of a:b (b is the low word) picked by the bytes of c. */
static inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t c)
{
    const uint64_t both = (uint64_t)a << 32 | b;
    uint32_t r = 0;
    for (int i = 0; i < 4; i++) {
        const uint32_t sel = c >> 8 * i & 255;
        uint32_t byte;
        if (sel < 8)
            byte = (uint32_t)(both >> 8 * sel) & 255;
        else if (sel < 12)
            byte = both >> (16 * (sel - 8) + 15) & 1 ? 255 : 0;
        else
            byte = sel == 12 ? 0 : 255;
        r |= byte << 8 * i;
    }
    return r;
}

static inline uint32_t sum_of_differences(uint32_t a, uint32_t b, uint32_t c)
{
    for (int i = 0; i < 4; i++) {
        const int32_t d = I(a >> 8 * i & 255) - I(b >> 8 * i & 255);
        c += (uint32_t)(d < 0 ? -d : d);
    }
    return c;
}

static inline uint32_t larger_of(int32_t a, int32_t b)
{
    return (uint32_t)(a > b ? a : b);
}

static inline uint32_t smaller_of(int32_t a, int32_t b)
{
    return (uint32_t)(a < b ? a : b);
}

static inline uint32_t larger_of_u(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

static inline uint32_t smaller_of_u(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

#define OPS1(X)                                                                                                                                      \
    X(v_mov_b32, a)                                                                                                                                  \
    X(v_not_b32, ~a)                                                                                                                                 \
    X(v_bfrev_b32, reverse_bits(a))                                                                                                                  \
    X(v_ffbh_u32, a ? __builtin_clz(a) : -1)                                                                                                         \
    X(v_clz_i32_u32, a ? __builtin_clz(a) : -1)                                                                                                      \
    X(v_ctz_i32_b32, a ? __builtin_ctz(a) : -1)                                                                                                      \
    X(v_cls_i32, leading_sign(a))                                                                                                                    \
    X(v_cvt_i32_i16, (int16_t)a)                                                                                                                     \
    X(v_cvt_u32_u16, a & 0xffff)

#define OPS2(X)                                                                                                                                      \
    X(v_add_nc_u32, a + b)                                                                                                                           \
    X(v_sub_nc_u32, a - b)                                                                                                                           \
    X(v_subrev_nc_u32, b - a)                                                                                                                        \
    X(v_add_nc_i32, a + b)                                                                                                                           \
    X(v_sub_nc_i32, a - b)                                                                                                                           \
    X(v_mul_lo_u32, a *b)                                                                                                                            \
    X(v_mul_hi_u32, (uint64_t)a *b >> 32)                                                                                                            \
    X(v_mul_hi_i32, (int64_t)I(a) * I(b) >> 32)                                                                                                      \
    X(v_mul_u32_u24, (a & 0xffffff) * (b & 0xffffff))                                                                                                \
    X(v_mul_hi_u32_u24, (uint64_t)(a & 0xffffff) * (b & 0xffffff) >> 32)                                                                             \
    X(v_mul_i32_i24, (int64_t)low24(a) * low24(b))                                                                                                   \
    X(v_mul_hi_i32_i24, (int64_t)low24(a) * low24(b) >> 32)                                                                                          \
    X(v_lshlrev_b32, b << (a & 31))                                                                                                                  \
    X(v_lshrrev_b32, b >> (a & 31))                                                                                                                  \
    X(v_ashrrev_i32, I(b) >> (a & 31))                                                                                                               \
    X(v_and_b32, a &b)                                                                                                                               \
    X(v_or_b32, a | b)                                                                                                                               \
    X(v_xor_b32, a ^ b)                                                                                                                              \
    X(v_xnor_b32, ~(a ^ b))                                                                                                                          \
    X(v_max_u32, larger_of_u(a, b))                                                                                                                  \
    X(v_min_u32, smaller_of_u(a, b))                                                                                                                 \
    X(v_max_i32, larger_of(I(a), I(b)))                                                                                                              \
    X(v_min_i32, smaller_of(I(a), I(b)))                                                                                                             \
    X(v_bfm_b32, ((1u << (a & 31)) - 1) << (b & 31))                                                                                                 \
    X(v_bcnt_u32_b32, count_bits(a) + b)

#define OPS3(X)                                                                                                                                      \
    X(v_mad_u32_u24, (a & 0xffffff) * (b & 0xffffff) + c)                                                                                            \
    X(v_mad_i32_i24, (uint32_t)((int64_t)low24(a) * low24(b)) + c)                                                                                   \
    X(v_or3_b32, a | b | c)                                                                                                                          \
    X(v_xor3_b32, a ^ b ^ c)                                                                                                                         \
    X(v_and_or_b32, (a & b) | c)                                                                                                                     \
    X(v_lshl_or_b32, (a << (b & 31)) | c)                                                                                                            \
    X(v_lshl_add_u32, (a << (b & 31)) + c)                                                                                                           \
    X(v_add_lshl_u32, (a + b) << (c & 31))                                                                                                           \
    X(v_add3_u32, a + b + c)                                                                                                                         \
    X(v_xad_u32, (a ^ b) + c)                                                                                                                        \
    X(v_bfe_u32, extract(a, b, c))                                                                                                                   \
    X(v_bfe_i32, extract_signed(a, b, c))                                                                                                            \
    X(v_bfi_b32, (a & b) | (~a & c))                                                                                                                 \
    X(v_alignbit_b32, ((uint64_t)a << 32 | b) >> (c & 31))                                                                                           \
    X(v_alignbyte_b32, ((uint64_t)a << 32 | b) >> 8 * (c & 3))                                                                                       \
    X(v_perm_b32, permute_bytes(a, b, c))                                                                                                            \
    X(v_sad_u8, sum_of_differences(a, b, c))                                                                                                         \
    X(v_sad_u32, larger_of_u(a, b) - smaller_of_u(a, b) + c)                                                                                         \
    X(v_max3_u32, larger_of_u(larger_of_u(a, b), c))                                                                                                 \
    X(v_min3_u32, smaller_of_u(smaller_of_u(a, b), c))                                                                                               \
    X(v_max3_i32, larger_of(I(larger_of(I(a), I(b))), I(c)))                                                                                         \
    X(v_min3_i32, smaller_of(I(smaller_of(I(a), I(b))), I(c)))                                                                                       \
    X(v_med3_u32, larger_of_u(smaller_of_u(a, b), smaller_of_u(larger_of_u(a, b), c)))                                                               \
    X(v_med3_i32, larger_of(I(smaller_of(I(a), I(b))), I(smaller_of(I(larger_of(I(a), I(b))), I(c)))))                                               \
    X(v_maxmin_u32, smaller_of_u(larger_of_u(a, b), c))                                                                                              \
    X(v_minmax_u32, larger_of_u(smaller_of_u(a, b), c))                                                                                              \
    X(v_maxmin_i32, smaller_of(I(larger_of(I(a), I(b))), I(c)))                                                                                      \
    X(v_minmax_i32, larger_of(I(smaller_of(I(a), I(b))), I(c)))

OPS1(WORD1)
OPS2(WORD2)
OPS3(WORD3)

BEGIN(v_nop)
{
    (void)w;
    return in + 1;
}

/* ---- selection by a mask of lanes ---- */

BEGIN(v_cndmask_b32)
{
    WORDS(1, a);
    WORDS(2, b);
    const uint32_t mask = scalar(w, in, 3);
    lanes r;
    for (int l = 0; l < LANES; l++) {
        const uint32_t on = 0u - (mask >> l & 1);
        r[l] = (lanes_b[l] & on) | (lanes_a[l] & ~on);
    }
    put(w, in, r);
    return in + 1;
}

/* ---- carries: d, carry out, a, b [, carry in] ---- */

static inline uint32_t bits_of(const uint32_t flags[LANES])
{
    uint32_t bits = 0;
    for (int l = 0; l < LANES; l++)
        bits |= flags[l] << l;
    return bits;
}

/* Lanes that are switched off give no carry. */
static inline const struct insn *carry_out(struct wave *w, const struct insn *in, const uint32_t r[LANES], const uint32_t carry[LANES])
{
    const uint32_t mask = write_mask(w, in);
    put_word(w, in->o[0].index, mask, r);
    set_scalar(w, in, 1, bits_of(carry) & mask);
    return in + 1;
}

#define CARRY(name, sum, out)                                                                                                                        \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        WORDS(2, a);                                                                                                                                 \
        WORDS(3, b);                                                                                                                                 \
        lanes r, carry;                                                                                                                              \
        for (int l = 0; l < LANES; l++) {                                                                                                            \
            const uint32_t a = lanes_a[l], b = lanes_b[l];                                                                                           \
            const uint32_t d = (sum);                                                                                                                \
            r[l] = d;                                                                                                                                \
            carry[l] = (out) ? 1 : 0;                                                                                                                \
        }                                                                                                                                            \
        return carry_out(w, in, r, carry);                                                                                                           \
    }
#define CARRY_IN(name, sum, out)                                                                                                                     \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        WORDS(2, a);                                                                                                                                 \
        WORDS(3, b);                                                                                                                                 \
        const uint32_t before = scalar(w, in, 4);                                                                                                    \
        lanes r, carry;                                                                                                                              \
        for (int l = 0; l < LANES; l++) {                                                                                                            \
            const uint32_t a = lanes_a[l], b = lanes_b[l], ci = before >> l & 1;                                                                     \
            const uint32_t d = (sum);                                                                                                                \
            r[l] = d;                                                                                                                                \
            carry[l] = (out) ? 1 : 0;                                                                                                                \
        }                                                                                                                                            \
        return carry_out(w, in, r, carry);                                                                                                           \
    }

CARRY(v_add_co_u32, a + b, d < a)
CARRY(v_sub_co_u32, a - b, a < b)
CARRY(v_subrev_co_u32, b - a, b < a)
CARRY_IN(v_add_co_ci_u32, a + b + ci, d < a || (ci && d == a))
CARRY_IN(v_sub_co_ci_u32, a - b - ci, a < b || (ci && a == b))
CARRY_IN(v_subrev_co_ci_u32, b - a - ci, b < a || (ci && a == b))

/* ---- 64 bits ---- */

static inline const struct insn *put64(struct wave *w, const struct insn *in, const uint32_t low[LANES], const uint32_t high[LANES])
{
    const uint32_t mask = write_mask(w, in);
    put_word(w, in->o[0].index, mask, low);
    put_word(w, in->o[0].index + 1, mask, high);
    return in + 1;
}

#define SHIFT64(name, expr)                                                                                                                          \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        WORDS(1, a);                                                                                                                                 \
        lanes room_low, room_high, low, high;                                                                                                        \
        const uint32_t *b_low = source64(w, in, 2, 0, room_low), *b_high = source64(w, in, 2, 1, room_high);                                         \
        for (int l = 0; l < LANES; l++) {                                                                                                            \
            const uint32_t a = lanes_a[l] & 63;                                                                                                      \
            const uint64_t b = (uint64_t)b_low[l] | (uint64_t)b_high[l] << 32;                                                                       \
            const uint64_t d = (uint64_t)(expr);                                                                                                     \
            low[l] = (uint32_t)d;                                                                                                                    \
            high[l] = (uint32_t)(d >> 32);                                                                                                           \
        }                                                                                                                                            \
        return put64(w, in, low, high);                                                                                                              \
    }

SHIFT64(v_lshlrev_b64, b << a)
SHIFT64(v_lshrrev_b64, b >> a)
SHIFT64(v_ashrrev_i64, (int64_t)b >> a)

/* d (64 bits), carry out, a, b, c (64 bits) */
#define MAD64(name, product, carried)                                                                                                                \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        WORDS(2, a);                                                                                                                                 \
        WORDS(3, b);                                                                                                                                 \
        lanes room_low, room_high, low, high, carry;                                                                                                 \
        const uint32_t *c_low = source64(w, in, 4, 0, room_low), *c_high = source64(w, in, 4, 1, room_high);                                         \
        for (int l = 0; l < LANES; l++) {                                                                                                            \
            const uint32_t a = lanes_a[l], b = lanes_b[l];                                                                                           \
            const uint64_t c = (uint64_t)c_low[l] | (uint64_t)c_high[l] << 32;                                                                       \
            const uint64_t p = (uint64_t)(product), d = p + c;                                                                                       \
            low[l] = (uint32_t)d;                                                                                                                    \
            high[l] = (uint32_t)(d >> 32);                                                                                                           \
            carry[l] = (carried) ? 1 : 0;                                                                                                            \
        }                                                                                                                                            \
        const uint32_t mask = write_mask(w, in);                                                                                                     \
        set_scalar(w, in, 1, bits_of(carry) & mask);                                                                                                 \
        return put64(w, in, low, high);                                                                                                              \
    }

MAD64(v_mad_u64_u32, (uint64_t)a *b, d < p)
MAD64(v_mad_i64_i32, (int64_t)I(a) * I(b), ((~(p ^ c) & (p ^ d)) >> 63))

/* ---- 16 bits: the other half of the destination is kept ---- */

#define SHORT2(name, expr)                                                                                                                           \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        lanes lanes_a, lanes_b, r;                                                                                                                   \
        source16(w, in, 1, 0, lanes_a);                                                                                                              \
        source16(w, in, 2, 1, lanes_b);                                                                                                              \
        for (int l = 0; l < LANES; l++) {                                                                                                            \
            const uint32_t a = lanes_a[l], b = lanes_b[l];                                                                                           \
            r[l] = (uint32_t)(expr)&0xffff;                                                                                                          \
        }                                                                                                                                            \
        put16(w, in, 2, r);                                                                                                                          \
        return in + 1;                                                                                                                               \
    }
#define SHORT3(name, expr)                                                                                                                           \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        lanes lanes_a, lanes_b, lanes_c, r;                                                                                                          \
        source16(w, in, 1, 0, lanes_a);                                                                                                              \
        source16(w, in, 2, 1, lanes_b);                                                                                                              \
        source16(w, in, 3, 2, lanes_c);                                                                                                              \
        for (int l = 0; l < LANES; l++) {                                                                                                            \
            const uint32_t a = lanes_a[l], b = lanes_b[l], c = lanes_c[l];                                                                           \
            r[l] = (uint32_t)(expr)&0xffff;                                                                                                          \
        }                                                                                                                                            \
        put16(w, in, 3, r);                                                                                                                          \
        return in + 1;                                                                                                                               \
    }
#define H(x) ((int32_t)(int16_t)(x))

#define SHORTS2(X)                                                                                                                                   \
    X(v_add_nc_u16, a + b)                                                                                                                           \
    X(v_sub_nc_u16, a - b)                                                                                                                           \
    X(v_add_nc_i16, a + b)                                                                                                                           \
    X(v_sub_nc_i16, a - b)                                                                                                                           \
    X(v_mul_lo_u16, a *b)                                                                                                                            \
    X(v_lshlrev_b16, b << (a & 15))                                                                                                                  \
    X(v_lshrrev_b16, b >> (a & 15))                                                                                                                  \
    X(v_ashrrev_i16, H(b) >> (a & 15))                                                                                                               \
    X(v_and_b16, a &b)                                                                                                                               \
    X(v_or_b16, a | b)                                                                                                                               \
    X(v_xor_b16, a ^ b)                                                                                                                              \
    X(v_max_u16, larger_of_u(a, b))                                                                                                                  \
    X(v_min_u16, smaller_of_u(a, b))                                                                                                                 \
    X(v_max_i16, larger_of(H(a), H(b)))                                                                                                              \
    X(v_min_i16, smaller_of(H(a), H(b)))
#define SHORTS3(X)                                                                                                                                   \
    X(v_mad_u16, a *b + c)                                                                                                                           \
    X(v_mad_i16, a *b + c)                                                                                                                           \
    X(v_max3_u16, larger_of_u(larger_of_u(a, b), c))                                                                                                 \
    X(v_min3_u16, smaller_of_u(smaller_of_u(a, b), c))                                                                                               \
    X(v_max3_i16, larger_of(I(larger_of(H(a), H(b))), H(c)))                                                                                         \
    X(v_min3_i16, smaller_of(I(smaller_of(H(a), H(b))), H(c)))                                                                                       \
    X(v_med3_i16, larger_of(I(smaller_of(H(a), H(b))), I(smaller_of(I(larger_of(H(a), H(b))), H(c)))))                                               \
    X(v_med3_u16, larger_of_u(smaller_of_u(a, b), smaller_of_u(larger_of_u(a, b), c)))

SHORTS2(SHORT2)
SHORTS3(SHORT3)

BEGIN(v_not_b16)
{
    lanes a;
    source16(w, in, 1, 0, a);
    for (int l = 0; l < LANES; l++)
        a[l] = ~a[l] & 0xffff;
    put16(w, in, 1, a);
    return in + 1;
}

/* a and b are 16 bits, c and d 32. */
#define SHORT_MAD(name, expr)                                                                                                                        \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        lanes lanes_a, lanes_b, r;                                                                                                                   \
        source16(w, in, 1, 0, lanes_a);                                                                                                              \
        source16(w, in, 2, 1, lanes_b);                                                                                                              \
        WORDS(3, c);                                                                                                                                 \
        for (int l = 0; l < LANES; l++) {                                                                                                            \
            const uint32_t a = lanes_a[l], b = lanes_b[l];                                                                                           \
            r[l] = (uint32_t)(expr) + lanes_c[l];                                                                                                    \
        }                                                                                                                                            \
        put(w, in, r);                                                                                                                               \
        return in + 1;                                                                                                                               \
    }
SHORT_MAD(v_mad_u32_u16, a *b)
SHORT_MAD(v_mad_i32_i16, H(a) * H(b))

BEGIN(v_cndmask_b16)
{
    lanes a, b;
    source16(w, in, 1, 0, a);
    source16(w, in, 2, 1, b);
    const uint32_t mask = scalar(w, in, 3);
    for (int l = 0; l < LANES; l++)
        a[l] = mask >> l & 1 ? b[l] : a[l];
    put16(w, in, 3, a);
    return in + 1;
}

const struct op EMU_TABLE(emu_int)[] = {
    OPS1(VALU) OPS2(VALU) OPS3(VALU) SHORTS2(VALU) SHORTS3(VALU) VALU(v_nop) VALU(v_cndmask_b32) VALU(v_not_b16) VALU(v_mad_u32_u16)
        VALU(v_mad_i32_i16) VALU(v_cndmask_b16) ALSO(v_add_co_u32, v_add_co_u32, OP_VALU, OPF_CARRY)
            ALSO(v_sub_co_u32, v_sub_co_u32, OP_VALU, OPF_CARRY) ALSO(v_subrev_co_u32, v_subrev_co_u32, OP_VALU, OPF_CARRY)
                ALSO(v_add_co_ci_u32, v_add_co_ci_u32, OP_VALU, OPF_CARRY) ALSO(v_sub_co_ci_u32, v_sub_co_ci_u32, OP_VALU, OPF_CARRY)
                    ALSO(v_subrev_co_ci_u32, v_subrev_co_ci_u32, OP_VALU, OPF_CARRY) ALSO(v_mad_u64_u32, v_mad_u64_u32, OP_VALU, OPF_CARRY)
                        ALSO(v_mad_co_u64_u32, v_mad_u64_u32, OP_VALU, OPF_CARRY)
                            ALSO(v_mad_i64_i32, v_mad_i64_i32, OP_VALU, OPF_CARRY | OPF_SIGNED64)
                                ALSO(v_mad_co_i64_i32, v_mad_i64_i32, OP_VALU, OPF_CARRY | OPF_SIGNED64) VALU(v_lshlrev_b64) VALU(v_lshrrev_b64)
                                    ALSO(v_ashrrev_i64, v_ashrrev_i64, OP_VALU, OPF_SIGNED64){NULL, NULL, 0, 0}};
