/* hip/kernels/gpu.h: the small language that kernels are written in: wave of 32, shared memory, barriers, shuffles, dot4, WMMA.
 *
 * gpu_amd.h is it for the GPU; tests/hip/gpu_shim.h runs the same sources on the CPU, a fiber per GPU thread, under sanitizers; what is the same
 * in both is in gpu_common.h. */
#ifdef BEDSIDE_GPU_SHIM
#include "tests/hip/gpu_shim.h"
#else
#include "hip/kernels/gpu_amd.h"
#endif
