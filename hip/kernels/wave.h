/* hip/kernels/wave.h: what a whole wave makes of its lanes' values, in all of them; always in the same order. */
#ifndef BEDSIDE_HIP_KERNELS_WAVE_H
#define BEDSIDE_HIP_KERNELS_WAVE_H

#include "hip/kernels/gpu.h"

DEV float sum_of_wave(float v)
{
    v += shfl_xor_f<16>(v);
    v += shfl_xor_f<8>(v);
    v += shfl_xor_f<4>(v);
    v += shfl_xor_f<2>(v);
    return v + shfl_xor_f<1>(v);
}

DEV float largest_of_wave(float v)
{
    v = gpu_fmaxf(v, shfl_xor_f<16>(v));
    v = gpu_fmaxf(v, shfl_xor_f<8>(v));
    v = gpu_fmaxf(v, shfl_xor_f<4>(v));
    v = gpu_fmaxf(v, shfl_xor_f<2>(v));
    return gpu_fmaxf(v, shfl_xor_f<1>(v));
}

DEV int larger_i(int a, int b)
{
    return a > b ? a : b;
}

DEV int largest_of_wave_i(int v)
{
    v = larger_i(v, shfl_xor_i<16>(v));
    v = larger_i(v, shfl_xor_i<8>(v));
    v = larger_i(v, shfl_xor_i<4>(v));
    v = larger_i(v, shfl_xor_i<2>(v));
    return larger_i(v, shfl_xor_i<1>(v));
}

#endif
