/* hip/kernels/tail.h: small work that needs the results of many workgroups is done by the last of them, which saves a launch: choosing experts, quantising, and
 * the tail of a launch: the forms in which the next operation reads what this one has made (act.h), with the bits of the kernel `act`.
 *
 * The sums of the norm are added straight from memory, sixteen lanes for a row and all rows at once, so that the kernels need no SHARED memory
 * to speak of: mat-vec lives on waves in flight. */
#ifndef BEDSIDE_HIP_KERNELS_TAIL_H
#define BEDSIDE_HIP_KERNELS_TAIL_H

#include "hip/kernels/act.h"
#include "hip/kernels/gpu.h"
#include "hip/kernels/params.h"

/* True in all threads of the workgroup that comes last of n; what the others have stored is then there. All threads call it; `said` is SHARED. */
DEV bool last_of(int *counter, int n, int *said)
{
    release_device();
    sync_threads();
    if (tid_x() == 0) {
        *said = atomic_add_i(counter, 1);
        if (*said == n - 1)
            *counter = 0;
    }
    sync_threads();
    if (*said != n - 1)
        return false;
    acquire_device();
    return true;
}

/* The kernel's parameters, to be read again: what the end of a kernel needs does not fill the scalar registers from its start. */
template <class PARAMS> DEV const PARAMS &read_again(const PARAMS &p)
{
#ifdef BEDSIDE_GPU_SHIM
    return p;
#else
    (void)p;
    auto *again = (const __attribute__((address_space(4))) PARAMS *)__builtin_amdgcn_kernarg_segment_ptr();
    __asm__ volatile("" : "+s"(again));
    return *(const PARAMS *)again;
#endif
}

struct tail_shared {
    float scale[GPU_TAIL_ROWS];
    int said;
};

enum { TAIL_STEPS = 32 }; /* values of a lane that are on their way at a time */

/* rms_scale of the wave's two rows of act.x, of `rows` from `first` on: lanes 0 to 15 have the partial sums of one, lanes 16 to 31 those of the other. */
DEV void tail_scales(const struct act_params &p, int first, int rows, int wave, float *scale)
{
    const int part = (int)lane_id() & 15, row = 2 * wave + (int)(lane_id() >> 4);
    const float *x = p.x + (size_t)(uint32_t)(first + (row < rows ? row : rows - 1)) * (uint32_t)p.n;
    float sum = 0.0f;
    int i = part;
    for (; i - part + 16 * TAIL_STEPS <= p.n; i += 16 * TAIL_STEPS) {
        float v[TAIL_STEPS];
        UNROLL
        for (int k = 0; k < TAIL_STEPS; k++)
            v[k] = x[i + 16 * k];
        UNROLL
        for (int k = 0; k < TAIL_STEPS; k++)
            sum = gpu_fmaf(v[k], v[k], sum);
    }
    for (; i < p.n; i += 16)
        sum = gpu_fmaf(x[i], x[i], sum);
    sum += shfl_xor_f<8>(sum);
    sum += shfl_xor_f<4>(sum);
    sum += shfl_xor_f<2>(sum);
    sum += shfl_xor_f<1>(sum);
    if (part == 0 && row < rows)
        scale[row] = 1.0f / gpu_sqrtf(sum / (float)p.n + p.eps);
}

/* The forms of rows first .. first+rows-1, made by the workgroup of WAVES waves that comes last of tail.members by the counter `first`. All threads call it when
 * they have stored what is theirs. */
template <int WAVES> DEV void tail_of(const struct act_tail &tail, int first, int rows, struct tail_shared *shared)
{
    if (!tail.counters || !last_of(tail.counters + first, tail.members, &shared->said))
        return;
    const struct act_params &p = tail.act;
    const int wave = uniform_i((int)(tid_x() / 32)), blocks = (p.n + 255) / 256;
    if (p.norm) {
        if (2 * wave < rows)
            tail_scales(p, first, rows, wave, shared->scale);
        sync_threads();
    }
    for (int i = wave; i < rows * blocks; i += WAVES) {
        const int r = i / blocks;
        act_block<true>(p, first + r, first + r, (i - r * blocks) * 256, p.norm ? shared->scale[r] : 1.0f);
    }
}

#endif
