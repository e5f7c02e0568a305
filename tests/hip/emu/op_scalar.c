/* tests/hip/emu/op_scalar.c: scalar operations, scalar loads, branches, barriers, and all that only waits or hints. */
#include "tests/hip/emu/operand.h"

#include <math.h>

#define I(x)        ((int32_t)(x))
#define BEGIN(name) static const struct insn *run_##name(struct wave *w, const struct insn *in)

/* d = expr(a, b), scc = flag (of d); `scc` is the flag before. */
#define KEEP w->scc
#define S1(name, expr, flag)                                                                                                                         \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        const uint32_t a = scalar(w, in, 1);                                                                                                         \
        const uint32_t d = (uint32_t)(expr);                                                                                                         \
        w->scc = (flag) ? 1u : 0u;                                                                                                                   \
        set_scalar(w, in, 0, d);                                                                                                                     \
        return in + 1;                                                                                                                               \
    }
#define S2(name, expr, flag)                                                                                                                         \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        const uint32_t a = scalar(w, in, 1), b = scalar(w, in, 2);                                                                                   \
        const uint32_t d = (uint32_t)(expr);                                                                                                         \
        w->scc = (flag) ? 1u : 0u;                                                                                                                   \
        set_scalar(w, in, 0, d);                                                                                                                     \
        return in + 1;                                                                                                                               \
    }
#define S1_64(name, expr, flag)                                                                                                                      \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        const uint64_t a = scalar64(w, in, 1);                                                                                                       \
        const uint64_t d = (uint64_t)(expr);                                                                                                         \
        w->scc = (flag) ? 1u : 0u;                                                                                                                   \
        set_scalar64(w, in, 0, d);                                                                                                                   \
        return in + 1;                                                                                                                               \
    }
#define S2_64(name, expr, flag)                                                                                                                      \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        const uint64_t a = scalar64(w, in, 1), b = scalar64(w, in, 2);                                                                               \
        const uint64_t d = (uint64_t)(expr);                                                                                                         \
        w->scc = (flag) ? 1u : 0u;                                                                                                                   \
        set_scalar64(w, in, 0, d);                                                                                                                   \
        return in + 1;                                                                                                                               \
    }
/* A float result. */
#define SF(name, n, expr)                                                                                                                            \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        const float a = as_float(scalar(w, in, 1)), b = (n) > 1 ? as_float(scalar(w, in, 2)) : 0.0f, c = as_float(scalar(w, in, (n) > 2 ? 3 : 0));   \
        (void)b, (void)c;                                                                                                                            \
        set_scalar(w, in, 0, as_word(expr));                                                                                                         \
        return in + 1;                                                                                                                               \
    }

static inline uint32_t field(uint32_t a, uint32_t b)
{
    const uint32_t n = b >> 16 & 127;
    return n ? a >> (b & 31) & (uint32_t)((1ull << (n > 32 ? 32 : n)) - 1) : 0;
}

static inline uint32_t signed_field(uint32_t a, uint32_t b)
{
    uint32_t n = b >> 16 & 127;
    const uint32_t at = b & 31;
    n = n > 32 - at ? 32 - at : n;
    return n ? (uint32_t)(I(a << (32 - at - n)) >> (32 - n)) : 0;
}

static inline uint64_t field64(uint64_t a, uint64_t b)
{
    const uint32_t n = (uint32_t)b >> 16 & 127;
    return n ? a >> (b & 63) & (n > 63 ? ~0ull : (1ull << n) - 1) : 0;
}

static inline uint32_t reversed(uint32_t a)
{
    uint32_t r = 0;
    for (int i = 0; i < 32; i++)
        r |= (a >> i & 1) << (31 - i);
    return r;
}

static inline uint32_t leading_sign(uint32_t a) /* s_cls_i32: bits equal to the sign, -1 when all are */
{
    const uint32_t x = I(a) < 0 ? ~a : a;
    return x ? (uint32_t)__builtin_clz(x) : ~0u;
}

static inline float scalar_max(float a, float b)
{
    return a > b || b != b || (a == b && !signbit(a)) ? a : b;
}

static inline float scalar_min(float a, float b)
{
    return a < b || b != b || (a == b && signbit(a)) ? a : b;
}

static inline uint32_t float_to_int(float a)
{
    return a != a ? 0 : a >= 2147483648.0f ? 0x7fffffffu : a <= -2147483648.0f ? 0x80000000u : (uint32_t)(int32_t)a;
}

static inline uint32_t float_to_uint(float a)
{
    return !(a > 0.0f) ? 0 : a >= 4294967296.0f ? ~0u : (uint32_t)a;
}

static inline uint32_t toward_zero(float x)
{
    const uint32_t h = float_to_half(x);
    return fabsf(half_to_float(h)) > fabsf(x) ? h - 1 : h;
}

#define OPS1(X)                                                                                                                                      \
    X(s_mov_b32, a, KEEP)                                                                                                                            \
    X(s_movk_i32, a, KEEP)                                                                                                                           \
    X(s_not_b32, ~a, d)                                                                                                                              \
    X(s_brev_b32, reversed(a), KEEP)                                                                                                                 \
    X(s_bcnt0_i32_b32, 32 - __builtin_popcount(a), d)                                                                                                \
    X(s_bcnt1_i32_b32, __builtin_popcount(a), d)                                                                                                     \
    X(s_ctz_i32_b32, a ? __builtin_ctz(a) : -1, KEEP)                                                                                                \
    X(s_clz_i32_u32, a ? __builtin_clz(a) : -1, KEEP)                                                                                                \
    X(s_cls_i32, leading_sign(a), KEEP)                                                                                                              \
    X(s_sext_i32_i16, (int16_t)a, KEEP)                                                                                                              \
    X(s_sext_i32_i8, (int8_t)a, KEEP)                                                                                                                \
    X(s_abs_i32, I(a) < 0 ? 0u - a : a, d)                                                                                                           \
    X(s_cvt_i32_f32, float_to_int(as_float(a)), KEEP)                                                                                                \
    X(s_cvt_u32_f32, float_to_uint(as_float(a)), KEEP)                                                                                               \
    X(s_cvt_f32_i32, as_word((float)I(a)), KEEP)                                                                                                     \
    X(s_cvt_f32_u32, as_word((float)a), KEEP)                                                                                                        \
    X(s_cvt_f16_f32, float_to_half(as_float(a)), KEEP)                                                                                               \
    X(s_cvt_f32_f16, as_word(half_to_float(a)), KEEP)                                                                                                \
    X(s_cvt_hi_f32_f16, as_word(half_to_float(a >> 16)), KEEP)                                                                                       \
    X(s_ceil_f32, as_word(ceilf(as_float(a))), KEEP)                                                                                                 \
    X(s_floor_f32, as_word(floorf(as_float(a))), KEEP)                                                                                               \
    X(s_trunc_f32, as_word(truncf(as_float(a))), KEEP)                                                                                               \
    X(s_rndne_f32, as_word(rintf(as_float(a))), KEEP)
#define OPS2(X)                                                                                                                                      \
    X(s_and_b32, a &b, d)                                                                                                                            \
    X(s_or_b32, a | b, d)                                                                                                                            \
    X(s_xor_b32, a ^ b, d)                                                                                                                           \
    X(s_nand_b32, ~(a & b), d)                                                                                                                       \
    X(s_nor_b32, ~(a | b), d)                                                                                                                        \
    X(s_xnor_b32, ~(a ^ b), d)                                                                                                                       \
    X(s_and_not1_b32, a & ~b, d)                                                                                                                     \
    X(s_or_not1_b32, a | ~b, d)                                                                                                                      \
    X(s_lshl_b32, a << (b & 31), d)                                                                                                                  \
    X(s_lshr_b32, a >> (b & 31), d)                                                                                                                  \
    X(s_ashr_i32, I(a) >> (b & 31), d)                                                                                                               \
    X(s_add_u32, a + b, d < a)                                                                                                                       \
    X(s_addc_u32, a + b + w->scc, (uint64_t)a + b + w->scc > UINT32_MAX)                                                                             \
    X(s_sub_u32, a - b, a < b)                                                                                                                       \
    X(s_subb_u32, a - b - w->scc, (uint64_t)b + w->scc > a)                                                                                          \
    X(s_add_i32, a + b, (~(a ^ b) & (a ^ d)) >> 31)                                                                                                  \
    X(s_sub_i32, a - b, ((a ^ b) & (a ^ d)) >> 31)                                                                                                   \
    X(s_mul_i32, a *b, KEEP)                                                                                                                         \
    X(s_mul_hi_u32, (uint64_t)a *b >> 32, KEEP)                                                                                                      \
    X(s_mul_hi_i32, (int64_t)I(a) * I(b) >> 32, KEEP)                                                                                                \
    X(s_min_u32, a < b ? a : b, a < b)                                                                                                               \
    X(s_max_u32, a > b ? a : b, a > b)                                                                                                               \
    X(s_min_i32, I(a) < I(b) ? a : b, I(a) < I(b))                                                                                                   \
    X(s_max_i32, I(a) > I(b) ? a : b, I(a) > I(b))                                                                                                   \
    X(s_absdiff_i32, I(a) > I(b) ? a - b : b - a, d)                                                                                                 \
    X(s_bfe_u32, field(a, b), d)                                                                                                                     \
    X(s_bfe_i32, signed_field(a, b), d)                                                                                                              \
    X(s_bfm_b32, ((1u << (a & 31)) - 1) << (b & 31), KEEP)                                                                                           \
    X(s_cselect_b32, w->scc ? a : b, KEEP)                                                                                                           \
    X(s_pack_ll_b32_b16, (a & 0xffff) | b << 16, KEEP)                                                                                               \
    X(s_pack_lh_b32_b16, (a & 0xffff) | (b & 0xffff0000u), KEEP)                                                                                     \
    X(s_pack_hl_b32_b16, a >> 16 | b << 16, KEEP)                                                                                                    \
    X(s_pack_hh_b32_b16, a >> 16 | (b & 0xffff0000u), KEEP)                                                                                          \
    X(s_lshl1_add_u32, (a << 1) + b, ((uint64_t)a << 1) + b > UINT32_MAX)                                                                            \
    X(s_lshl2_add_u32, (a << 2) + b, ((uint64_t)a << 2) + b > UINT32_MAX)                                                                            \
    X(s_lshl3_add_u32, (a << 3) + b, ((uint64_t)a << 3) + b > UINT32_MAX)                                                                            \
    X(s_lshl4_add_u32, (a << 4) + b, ((uint64_t)a << 4) + b > UINT32_MAX)                                                                            \
    X(s_cvt_pk_rtz_f16_f32, toward_zero(as_float(a)) | toward_zero(as_float(b)) << 16, KEEP)
#define OPS1_64(X)                                                                                                                                   \
    X(s_mov_b64, a, KEEP)                                                                                                                            \
    X(s_not_b64, ~a, d)
#define OPS2_64(X)                                                                                                                                   \
    X(s_and_b64, a &b, d)                                                                                                                            \
    X(s_or_b64, a | b, d)                                                                                                                            \
    X(s_xor_b64, a ^ b, d)                                                                                                                           \
    X(s_and_not1_b64, a & ~b, d)                                                                                                                     \
    X(s_or_not1_b64, a | ~b, d)                                                                                                                      \
    X(s_add_nc_u64, a + b, KEEP)                                                                                                                     \
    X(s_sub_nc_u64, a - b, KEEP)                                                                                                                     \
    X(s_mul_u64, a *b, KEEP)                                                                                                                         \
    X(s_bfe_u64, field64(a, b), d)                                                                                                                   \
    X(s_cselect_b64, w->scc ? a : b, KEEP)
#define OPSF(X)                                                                                                                                      \
    X(s_add_f32, 2, a + b)                                                                                                                           \
    X(s_sub_f32, 2, a - b)                                                                                                                           \
    X(s_mul_f32, 2, a *b)                                                                                                                            \
    X(s_max_f32, 2, scalar_max(a, b))                                                                                                                \
    X(s_min_f32, 2, scalar_min(a, b))                                                                                                                \
    X(s_fmac_f32, 2, fmaf(a, b, c))                                                                                                                  \
    X(s_fmamk_f32, 3, fmaf(a, b, c))                                                                                                                 \
    X(s_fmaak_f32, 3, fmaf(a, b, c))

OPS1(S1)
OPS2(S2)
OPS1_64(S1_64)
OPS2_64(S2_64)
OPSF(SF)

/* d (64 bits) = a (64 bits) shifted by b (32 bits) */
#define SHIFT64(name, expr)                                                                                                                          \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        const uint64_t a = scalar64(w, in, 1);                                                                                                       \
        const uint32_t b = scalar(w, in, 2) & 63;                                                                                                    \
        const uint64_t d = (uint64_t)(expr);                                                                                                         \
        w->scc = d != 0;                                                                                                                             \
        set_scalar64(w, in, 0, d);                                                                                                                   \
        return in + 1;                                                                                                                               \
    }
SHIFT64(s_lshl_b64, a << b)
SHIFT64(s_lshr_b64, a >> b)
SHIFT64(s_ashr_i64, (int64_t)a >> b)

/* d (32 bits) from a (64 bits) */
#define NARROW(name, expr, flag)                                                                                                                     \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        const uint64_t a = scalar64(w, in, 1);                                                                                                       \
        const uint32_t d = (uint32_t)(expr);                                                                                                         \
        w->scc = (flag) ? 1u : 0u;                                                                                                                   \
        set_scalar(w, in, 0, d);                                                                                                                     \
        return in + 1;                                                                                                                               \
    }
NARROW(s_bcnt1_i32_b64, __builtin_popcountll(a), d)
NARROW(s_ctz_i32_b64, a ? __builtin_ctzll(a) : -1, KEEP)
NARROW(s_clz_i32_u64, a ? __builtin_clzll(a) : -1, KEEP)

BEGIN(s_addk_i32)
{
    const uint32_t a = scalar(w, in, 0), b = scalar(w, in, 1), d = a + b;
    w->scc = (~(a ^ b) & (a ^ d)) >> 31;
    set_scalar(w, in, 0, d);
    return in + 1;
}

BEGIN(s_mulk_i32)
{
    set_scalar(w, in, 0, scalar(w, in, 0) * scalar(w, in, 1));
    return in + 1;
}

BEGIN(s_cmovk_i32)
{
    if (w->scc)
        set_scalar(w, in, 0, scalar(w, in, 1));
    return in + 1;
}

BEGIN(s_cmov_b64)
{
    if (w->scc)
        set_scalar64(w, in, 0, scalar64(w, in, 1));
    return in + 1;
}

BEGIN(s_bitset1_b32)
{
    set_scalar(w, in, 0, scalar(w, in, 0) | 1u << (scalar(w, in, 1) & 31));
    return in + 1;
}

BEGIN(s_bitset0_b32)
{
    set_scalar(w, in, 0, scalar(w, in, 0) & ~(1u << (scalar(w, in, 1) & 31)));
    return in + 1;
}

/* ---- comparisons ---- */

#define COMPARE(name, kind, expr)                                                                                                                    \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        LOAD_##kind;                                                                                                                                 \
        w->scc = (expr) ? 1u : 0u;                                                                                                                   \
        return in + 1;                                                                                                                               \
    }
#define LOAD_U32 const uint32_t a = scalar(w, in, 0), b = scalar(w, in, 1)
#define LOAD_I32 const int32_t a = I(scalar(w, in, 0)), b = I(scalar(w, in, 1))
#define LOAD_U64 const uint64_t a = scalar64(w, in, 0), b = scalar64(w, in, 1)
#define LOAD_F32 const float a = as_float(scalar(w, in, 0)), b = as_float(scalar(w, in, 1))
#define INTEGERS(X, prefix, type, kind)                                                                                                              \
    X(prefix##_eq_##type, kind, a == b)                                                                                                              \
    X(prefix##_lg_##type, kind, a != b)                                                                                                              \
    X(prefix##_gt_##type, kind, a > b)                                                                                                               \
    X(prefix##_ge_##type, kind, a >= b)                                                                                                              \
    X(prefix##_lt_##type, kind, a < b)                                                                                                               \
    X(prefix##_le_##type, kind, a <= b)
#define COMPARES(X)                                                                                                                                  \
    INTEGERS(X, s_cmp, i32, I32)                                                                                                                     \
    INTEGERS(X, s_cmp, u32, U32)                                                                                                                     \
    INTEGERS(X, s_cmpk, i32, I32)                                                                                                                    \
    INTEGERS(X, s_cmpk, u32, U32)                                                                                                                    \
    X(s_cmp_eq_u64, U64, a == b)                                                                                                                     \
    X(s_cmp_lg_u64, U64, a != b)                                                                                                                     \
    X(s_cmp_lt_f32, F32, a < b)                                                                                                                      \
    X(s_cmp_eq_f32, F32, a == b)                                                                                                                     \
    X(s_cmp_le_f32, F32, a <= b)                                                                                                                     \
    X(s_cmp_gt_f32, F32, a > b)                                                                                                                      \
    X(s_cmp_lg_f32, F32, a<b || a> b)                                                                                                                \
    X(s_cmp_ge_f32, F32, a >= b)                                                                                                                     \
    X(s_cmp_o_f32, F32, a == a && b == b)                                                                                                            \
    X(s_cmp_u_f32, F32, a != a || b != b)                                                                                                            \
    X(s_cmp_nge_f32, F32, !(a >= b))                                                                                                                 \
    X(s_cmp_nlg_f32, F32, !(a < b || a > b))                                                                                                         \
    X(s_cmp_ngt_f32, F32, !(a > b))                                                                                                                  \
    X(s_cmp_nle_f32, F32, !(a <= b))                                                                                                                 \
    X(s_cmp_neq_f32, F32, a != b)                                                                                                                    \
    X(s_cmp_nlt_f32, F32, !(a < b))                                                                                                                  \
    X(s_bitcmp1_b32, U32, a >> (b & 31) & 1)                                                                                                         \
    X(s_bitcmp0_b32, U32, !(a >> (b & 31) & 1))
COMPARES(COMPARE)

/* ---- exec ---- */

#define SAVE_EXEC(name, expr)                                                                                                                        \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        const uint32_t a = scalar(w, in, 1), exec = exec_of(w);                                                                                      \
        set_scalar(w, in, 0, exec);                                                                                                                  \
        w->s[S_EXEC] = (expr);                                                                                                                       \
        w->scc = w->s[S_EXEC] != 0;                                                                                                                  \
        return in + 1;                                                                                                                               \
    }
#define SAVES(X)                                                                                                                                     \
    X(s_and_saveexec_b32, a &exec)                                                                                                                   \
    X(s_or_saveexec_b32, a | exec)                                                                                                                   \
    X(s_xor_saveexec_b32, a ^ exec)                                                                                                                  \
    X(s_and_not1_saveexec_b32, a & ~exec)                                                                                                            \
    X(s_or_not1_saveexec_b32, a | ~exec)                                                                                                             \
    X(s_and_not0_saveexec_b32, ~a &exec)
SAVES(SAVE_EXEC)

/* s_*_wrexec_b32: the new exec is also the result. */
BEGIN(s_and_not1_wrexec_b32)
{
    w->s[S_EXEC] = scalar(w, in, 1) & ~exec_of(w);
    set_scalar(w, in, 0, w->s[S_EXEC]);
    w->scc = w->s[S_EXEC] != 0;
    return in + 1;
}

/* ---- branches ---- */

#define BRANCH(name, condition)                                                                                                                      \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        (void)w;                                                                                                                                     \
        return (condition) ? in->target : in + 1;                                                                                                    \
    }
#define BRANCHES(X)                                                                                                                                  \
    X(s_branch, true)                                                                                                                                \
    X(s_cbranch_scc0, !w->scc)                                                                                                                       \
    X(s_cbranch_scc1, w->scc)                                                                                                                        \
    X(s_cbranch_vccz, !w->s[S_VCC])                                                                                                                  \
    X(s_cbranch_vccnz, w->s[S_VCC])                                                                                                                  \
    X(s_cbranch_execz, !exec_of(w))                                                                                                                  \
    X(s_cbranch_execnz, exec_of(w))
BRANCHES(BRANCH)

BEGIN(s_getpc_b64)
{
    const struct kernel *k = w->group->launch->kernel;
    set_scalar64(w, in, 0, (uint64_t)(uintptr_t)k->module->image + k->address[in->number] + 4);
    return in + 1;
}

BEGIN(s_endpgm)
{
    (void)in;
    w->next = NULL;
    return NULL;
}

BEGIN(s_barrier)
{
    w->next = in + 1;
    w->at_barrier = true;
    return NULL;
}

BEGIN(s_nop)
{
    (void)w;
    return in + 1;
}

/* ---- scalar loads: d, base (64 bits), offset [, offset:n] ---- */

static inline uint64_t scalar_address(struct wave *w, const struct insn *in, uint32_t bytes)
{
    const uint32_t extra = in->o[2].kind == OPERAND_SGPR ? w->s[in->o[2].index] : in->o[2].literal;
    const int64_t offset = in->o[2].kind == OPERAND_SGPR ? (int64_t)extra : (int64_t)I(extra);
    const uint64_t at = scalar64(w, in, 1) + (uint64_t)offset + (uint64_t)(int64_t)in->offset;
    emu_check_scalar(w, in, at, bytes);
    return at;
}

static inline const struct insn *load_scalar(struct wave *w, const struct insn *in, uint32_t words)
{
    const uint64_t at = scalar_address(w, in, words * 4) & ~3ull;
    memcpy(w->s + in->o[0].index, (const void *)(uintptr_t)at, words * 4);
    return in + 1;
}

#define LOAD(name, words)                                                                                                                            \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        return load_scalar(w, in, words);                                                                                                            \
    }
#define LOADS(X)                                                                                                                                     \
    X(s_load_b32, 1)                                                                                                                                 \
    X(s_load_b64, 2)                                                                                                                                 \
    X(s_load_b96, 3)                                                                                                                                 \
    X(s_load_b128, 4)                                                                                                                                \
    X(s_load_b256, 8)                                                                                                                                \
    X(s_load_b512, 16)
LOADS(LOAD)

#define LOAD_SMALL(name, type)                                                                                                                       \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        type x;                                                                                                                                      \
        memcpy(&x, (const void *)(uintptr_t)scalar_address(w, in, sizeof x), sizeof x);                                                              \
        set_scalar(w, in, 0, (uint32_t)(int32_t)x);                                                                                                  \
        return in + 1;                                                                                                                               \
    }
#define SMALL_LOADS(X)                                                                                                                               \
    X(s_load_u8, uint8_t)                                                                                                                            \
    X(s_load_i8, int8_t)                                                                                                                             \
    X(s_load_u16, uint16_t)                                                                                                                          \
    X(s_load_i16, int16_t)
SMALL_LOADS(LOAD_SMALL)

#define SALU(name, ...)      {#name, run_##name, OP_SALU, 0},
#define AS(name, other)      {#name, run_##other, OP_SALU, 0},
#define WAIT(name)           {#name, run_s_nop, OP_OTHER, 0},
#define ENTRY_BRANCH(n, ...) {#n, run_##n, OP_BRANCH, 0},
#define ENTRY_SMEM(n, ...)   {#n, run_##n, OP_SMEM, 0},

const struct op EMU_TABLE(emu_scalar)[] = {
    OPS1(SALU) OPS2(SALU) OPS1_64(SALU) OPS2_64(SALU) OPSF(SALU) COMPARES(SALU) SAVES(SALU) SALU(s_lshl_b64)
        SALU(s_lshr_b64){"s_ashr_i64", run_s_ashr_i64, OP_SALU, OPF_SIGNED64},
    SALU(s_bcnt1_i32_b64) SALU(s_ctz_i32_b64) SALU(s_clz_i32_u64) SALU(s_addk_i32) SALU(s_mulk_i32) SALU(s_cmovk_i32) AS(s_cmov_b32, s_cmovk_i32)
        SALU(s_cmov_b64) SALU(s_bitset1_b32) SALU(s_bitset0_b32) SALU(s_and_not1_wrexec_b32) SALU(s_getpc_b64) AS(s_add_co_u32, s_add_u32)
            AS(s_add_co_ci_u32, s_addc_u32) AS(s_sub_co_u32, s_sub_u32) AS(s_sub_co_ci_u32, s_subb_u32) AS(s_add_co_i32, s_add_i32)
                AS(s_sub_co_i32, s_sub_i32) AS(s_addk_co_i32, s_addk_i32) AS(s_max_num_f32, s_max_f32) AS(s_min_num_f32, s_min_f32)
                    BRANCHES(ENTRY_BRANCH) LOADS(ENTRY_SMEM) SMALL_LOADS(ENTRY_SMEM){"s_barrier", run_s_barrier, OP_BARRIER, 0},
    {"s_barrier_wait", run_s_barrier, OP_BARRIER, 0},
    {"s_endpgm", run_s_endpgm, OP_OTHER, 0},
    WAIT(s_barrier_signal) WAIT(s_nop) WAIT(s_clause) WAIT(s_delay_alu) WAIT(s_waitcnt) WAIT(s_waitcnt_vscnt) WAIT(s_waitcnt_depctr) WAIT(s_sendmsg)
        WAIT(s_code_end) WAIT(s_wait_alu) WAIT(s_wait_kmcnt) WAIT(s_wait_loadcnt) WAIT(s_wait_dscnt) WAIT(s_wait_storecnt) WAIT(s_wait_loadcnt_dscnt)
            WAIT(s_wait_storecnt_dscnt) WAIT(s_wait_samplecnt) WAIT(s_wait_bvhcnt) WAIT(s_wait_expcnt) WAIT(s_wait_event) WAIT(s_setprio)
                WAIT(s_set_inst_prefetch_distance) WAIT(s_icache_inv) WAIT(s_dcache_inv) WAIT(s_sleep) WAIT(s_ttracedata) WAIT(s_prefetch_inst)
                    WAIT(s_prefetch_inst_pc_rel) WAIT(s_prefetch_data) WAIT(s_wait_idle) WAIT(s_waitcnt_vmcnt) WAIT(s_waitcnt_lgkmcnt)
                        WAIT(buffer_gl0_inv) WAIT(buffer_gl1_inv) WAIT(global_inv) WAIT(global_wb) WAIT(global_wbinv){NULL, NULL, 0, 0}};
