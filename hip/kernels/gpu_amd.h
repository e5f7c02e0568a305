/* hip/kernels/gpu_amd.h: the kernel language (gpu.h) on AMD GPUs: gfx11 and gfx12, wave32, compiler builtins only.
 *
 * No ROCm header or device library is read (-nogpuinc -nogpulib). What kernels may use is what this file and tests/hip/gpu_shim.h both define:
 *
 *   KERNEL(threads) name(struct name_params p)   a kernel; its workgroups have exactly `threads` threads
 *   DEV                                          a device function, always inlined
 *   SHARED T name[n];                            in a kernel: memory of the workgroup, undefined at its start
 *   GLOBAL(T, address)                           T * from an address that was read out of memory; without it the compiler emits flat_*
 *   tid_x() bid_x() bid_y() bid_z() lane_id()    thread in the workgroup, workgroup in the grid, lane in the wave
 *   sync_threads() sync_threads_global()         barrier; the first orders SHARED memory only, the second device memory as well
 *   sync_wave()                                  orders SHARED memory between the lanes of a wave
 *   release_device() acquire_device()            order device memory between workgroups
 *   shfl_i shfl_f shfl_xor_i<M> shfl_xor_f<M>    another lane's value
 *   uniform_i                                    a value that is the same in all lanes, as a scalar
 *   dot4_ss dot4_us                              c + sum of four byte products; us: a unsigned
 *   wmma_f16 wmma_i8 wmma_i8_us                  16x16x16 matrix product
 *   gpu_*f                                       mathematics
 *   load_* store_*                               one wide access; the address is a multiple of its size
 *   atomic_*                                     relaxed, device scope
 *
 * Operations that join lanes (sync, shfl, uniform, wmma) must be reached by all live threads of the workgroup or wave together. */
#ifndef BEDSIDE_HIP_KERNELS_GPU_AMD_H
#define BEDSIDE_HIP_KERNELS_GPU_AMD_H

/* The instructions differ from one generation to the next, so a target is named here only after somebody has looked at it. */
#if defined(__AMDGCN__)
#if defined(__gfx1100__) || defined(__gfx1101__) || defined(__gfx1102__) || defined(__gfx1103__) || defined(__gfx1150__) || defined(__gfx1151__) ||  \
    defined(__gfx1152__) || defined(__gfx1153__)
#define GPU_GFX11 1
#elif defined(__gfx1200__) || defined(__gfx1201__)
#define GPU_GFX12 1
#else
#error "unknown gfx target: add it to hip/kernels/gpu_amd.h after checking dot4, DPP and WMMA on it"
#endif
#if __AMDGCN_WAVEFRONT_SIZE != 32
#error "kernels are written for waves of 32"
#endif
#endif

/* ---- types ---- */

#define BEDSIDE_GPU_TYPES 1 /* params.h need not include <stdint.h> */
typedef __INT8_TYPE__ int8_t;
typedef __UINT8_TYPE__ uint8_t;
typedef __INT16_TYPE__ int16_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __INT32_TYPE__ int32_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __INT64_TYPE__ int64_t;
typedef __UINT64_TYPE__ uint64_t;
typedef __SIZE_TYPE__ size_t;

typedef _Float16 half;
typedef half half8_t __attribute__((ext_vector_type(8)));
typedef half half16_t __attribute__((ext_vector_type(16)));
typedef float f32x2_t __attribute__((ext_vector_type(2)));
typedef float f32x4_t __attribute__((ext_vector_type(4)));
typedef float f32x8_t __attribute__((ext_vector_type(8)));
typedef int32_t i32x2_t __attribute__((ext_vector_type(2)));
typedef int32_t i32x4_t __attribute__((ext_vector_type(4)));
typedef int32_t i32x8_t __attribute__((ext_vector_type(8)));
typedef uint32_t u32x4_t __attribute__((ext_vector_type(4)));

/* ---- kernels and their memory ---- */

#define DEV static inline __attribute__((device, always_inline))
/* The compiler assumes 1024 threads, and so fewer registers, unless told. */
#define KERNEL(threads)    extern "C" __attribute__((global, amdgpu_flat_work_group_size(threads, threads))) void
#define SHARED             static __attribute__((shared))
#define GLOBAL(T, address) ((T *)(__attribute__((address_space(1))) T *)(uint64_t)(address))

/* ---- who am I ---- */

DEV uint32_t tid_x()
{
    return __builtin_amdgcn_workitem_id_x();
}

DEV uint32_t bid_x()
{
    return __builtin_amdgcn_workgroup_id_x();
}

DEV uint32_t bid_y()
{
    return __builtin_amdgcn_workgroup_id_y();
}

DEV uint32_t bid_z()
{
    return __builtin_amdgcn_workgroup_id_z();
}

DEV uint32_t lane_id()
{
    return __builtin_amdgcn_mbcnt_lo(~0U, 0U);
}

/* ---- order ---- */

/* Waits for no global memory and flushes no cache. */
DEV void sync_threads()
{
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}

DEV void sync_threads_global()
{
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

DEV void sync_wave()
{
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

/* Between workgroups, for "the last one to finish sums up": what this thread stored before release_device is seen after acquire_device by a thread that has
 * seen, through an atomic in between, that the release happened. Addresses read afterwards must differ between lanes, or be read with atomic_load_f: the
 * scalar cache takes no part. */
DEV void release_device()
{
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
}

DEV void acquire_device()
{
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
}

DEV void fence_device() /* both */
{
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "agent");
}

#include "hip/kernels/gpu_common.h"

/* ---- lanes ---- */

/* The value of lane `src`; no SHARED memory is used. */
DEV int shfl_i(int v, int src)
{
    return __builtin_amdgcn_ds_bpermute(src << 2, v);
}

DEV float shfl_f(float v, int src)
{
    return as_float(shfl_i(as_int(v), src));
}

/* The value of lane lane_id() ^ MASK: for 1, 2, 4 and 8 a modifier of the instruction that uses it. */
template <int MASK> DEV int shfl_xor_i(int v)
{
    static_assert(MASK > 0 && MASK <= 16, "one to fifteen, or sixteen");
    if constexpr (MASK < 16)
        return __builtin_amdgcn_update_dpp(0, v, 0x160 | MASK, 0xf, 0xf, true); /* row_xmask */
    int other = (int)__builtin_amdgcn_permlanex16((uint32_t)v, (uint32_t)v, 0x76543210U, 0xfedcba98U, false, false);
    /* clang 19 moves v_permlanex16 into a branch that alone uses its result, where other lanes are off; not past this. */
    __asm__ volatile("" : "+v"(other));
    return other;
}

template <int MASK> DEV float shfl_xor_f(float v)
{
    return as_float(shfl_xor_i<MASK>(as_int(v)));
}

DEV int uniform_i(int v)
{
    return __builtin_amdgcn_readfirstlane(v);
}

/* ---- dot products of four bytes ---- */

DEV int dot4_ss(int a, int b, int c)
{
    return __builtin_amdgcn_sudot4(true, a, true, b, c, false);
}

DEV int dot4_us(int a, int b, int c)
{
    return __builtin_amdgcn_sudot4(false, a, true, b, c, false);
}

/* ---- mathematics that the instruction set has its own way with: within one unit in the last place ---- */

DEV float gpu_rsqrtf(float x)
{
    return __builtin_amdgcn_rsqf(x);
}

DEV float gpu_rcpf(float x)
{
    return __builtin_amdgcn_rcpf(x);
}

/* ---- atomics: the old value ---- */

DEV float atomic_add_f(float *p, float v)
{
    return __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

DEV int atomic_add_i(int *p, int v)
{
    return __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

/* Never from the scalar cache. */
DEV float atomic_load_f(const float *p)
{
    return __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

/* ---- matrix products of a wave: C [16][16] += A [16][16] * B [16][16]^T ----
 *
 * Operand A: lane l holds WMMA_AB_K values of row l % 16, beginning at column (k) wmma_ab_k0(). B the same: lane l, row l % 16 of B, which is column l % 16 of
 * the product. On gfx11 lanes 16 to 31 repeat lanes 0 to 15; on gfx12 they hold the other half of k.
 * Accumulator: element i of lane l is row wmma_c_row(i), column wmma_c_col(). Integer operands: four bytes in an int, the first lowest. */

#if defined(GPU_GFX12)
#define WMMA_AB_K 8
typedef half8_t wmma_h_t;
typedef i32x2_t wmma_i8_t;

DEV f32x8_t wmma_f16(wmma_h_t a, wmma_h_t b, f32x8_t c)
{
    return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(a, b, c);
}

DEV i32x8_t wmma_i8(wmma_i8_t a, wmma_i8_t b, i32x8_t c)
{
    return __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32_gfx12(true, a, true, b, c, false);
}

DEV i32x8_t wmma_i8_us(wmma_i8_t a, wmma_i8_t b, i32x8_t c)
{
    return __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32_gfx12(false, a, true, b, c, false);
}

DEV uint32_t wmma_ab_k0()
{
    return (lane_id() >> 4) * 8;
}

DEV uint32_t wmma_c_row(uint32_t i)
{
    return (lane_id() >> 4) * 8 + i;
}
#else
#define WMMA_AB_K 16
typedef half16_t wmma_h_t;
typedef i32x4_t wmma_i8_t;

DEV f32x8_t wmma_f16(wmma_h_t a, wmma_h_t b, f32x8_t c)
{
    return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(a, b, c);
}

DEV i32x8_t wmma_i8(wmma_i8_t a, wmma_i8_t b, i32x8_t c)
{
    return __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32(true, a, true, b, c, false);
}

DEV i32x8_t wmma_i8_us(wmma_i8_t a, wmma_i8_t b, i32x8_t c)
{
    return __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32(false, a, true, b, c, false);
}

DEV uint32_t wmma_ab_k0()
{
    return 0;
}

DEV uint32_t wmma_c_row(uint32_t i)
{
    return 2 * i + (lane_id() >> 4);
}
#endif

DEV uint32_t wmma_c_col()
{
    return lane_id() & 15;
}

#endif
