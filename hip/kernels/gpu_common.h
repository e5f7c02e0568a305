/* hip/kernels/gpu_common.h: the part of the kernel language (gpu.h) that is the same everywhere: conversions, mathematics, wide accesses. Included by
 * gpu_amd.h and tests/hip/gpu_shim.h in their middle, where the types and DEV are known. */
#ifndef BEDSIDE_HIP_KERNELS_GPU_COMMON_H
#define BEDSIDE_HIP_KERNELS_GPU_COMMON_H

#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL
#endif

/* ---- bits and conversions ---- */

DEV int as_int(float f)
{
    return __builtin_bit_cast(int, f);
}

DEV float as_float(int i)
{
    return __builtin_bit_cast(float, i);
}

DEV float h2f(half h)
{
    return (float)h;
}

DEV half f2h(float f)
{
    return (half)f;
}

DEV half u2h(uint16_t u)
{
    return __builtin_bit_cast(half, u);
}

DEV uint16_t h2u(half h)
{
    return __builtin_bit_cast(uint16_t, h);
}

DEV float bf2f(uint16_t u)
{
    return as_float((int)((uint32_t)u << 16));
}

/* ---- mathematics: exp and log within 2e-7 relative, sqrt and division correctly rounded ---- */

DEV float gpu_expf(float x)
{
    return __builtin_expf(x);
}

DEV float gpu_exp2f(float x)
{
    return __builtin_exp2f(x);
}

DEV float gpu_logf(float x)
{
    return __builtin_logf(x);
}

DEV float gpu_sqrtf(float x)
{
    return __builtin_sqrtf(x);
}

DEV float gpu_fmaxf(float a, float b)
{
    return __builtin_fmaxf(a, b);
}

DEV float gpu_fminf(float a, float b)
{
    return __builtin_fminf(a, b);
}

DEV float gpu_fabsf(float a)
{
    return __builtin_fabsf(a);
}

DEV float gpu_rintf(float a)
{
    return __builtin_rintf(a);
}

DEV float gpu_fmaf(float a, float b, float c)
{
    return __builtin_fmaf(a, b, c);
}

/* ---- wide accesses: plain ones, so that on the CPU -fsanitize=alignment sees them ---- */

DEV i32x4_t load_i32x4(const void *p) /* p on 16 bytes */
{
    return *(const i32x4_t *)p;
}

DEV u32x4_t load_u32x4(const void *p)
{
    return *(const u32x4_t *)p;
}

DEV f32x4_t load_f32x4(const void *p)
{
    return *(const f32x4_t *)p;
}

DEV half8_t load_half8(const void *p)
{
    return *(const half8_t *)p;
}

DEV i32x2_t load_i32x2(const void *p) /* p on 8 bytes */
{
    return *(const i32x2_t *)p;
}

DEV f32x2_t load_f32x2(const void *p)
{
    return *(const f32x2_t *)p;
}

DEV int load_i32(const void *p) /* p on 4 bytes */
{
    return *(const int *)p;
}

DEV void store_i32x4(void *p, i32x4_t v)
{
    *(i32x4_t *)p = v;
}

DEV void store_f32x4(void *p, f32x4_t v)
{
    *(f32x4_t *)p = v;
}

DEV void store_half8(void *p, half8_t v)
{
    *(half8_t *)p = v;
}

#endif
