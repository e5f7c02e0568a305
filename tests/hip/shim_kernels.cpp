/* The project's kernels compiled for this CPU, and the table by which shim_runtime.cpp finds them. */
#define BEDSIDE_GPU_SHIM 1
#include "hip/kernels/kernels.hip"

namespace shim {

#define KERNEL_ENTRY(name, params, threads)                                                                                                        \
    static void call_##name(const void *p)                                                                                                         \
    {                                                                                                                                              \
        ::name(*(const struct params *)p);                                                                                                         \
    }
#include "hip/kernels/list.h"
#undef KERNEL_ENTRY

const function functions[] = {
#define KERNEL_ENTRY(name, params, threads) {#name, threads, sizeof(struct params), call_##name},
#include "hip/kernels/list.h"
#undef KERNEL_ENTRY
    {nullptr, 0, 0, nullptr}};

} // namespace shim
