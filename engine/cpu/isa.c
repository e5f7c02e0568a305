/* engine/cpu/isa.c: which kernels this machine can run. */
#include "engine/cpu/matmul.h"

#if defined(__x86_64__)
#include <cpuid.h>

/* The compilers' own check also asks the operating system whether it saves the wide registers; half-float conversion is the one feature that not
 * every compiler's check knows by name. */
static bool has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

enum isa isa_best(void)
{
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c())
        return ISA_PLAIN;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
        return ISA_AVX512;
    return ISA_AVX2;
}
#else
enum isa isa_best(void)
{
    return ISA_PLAIN;
}
#endif

const char *isa_name(enum isa isa)
{
    switch (isa) {
    case ISA_PLAIN:
        return "plain";
    case ISA_AVX2:
        return "avx2";
    case ISA_AVX512:
        return "avx512-vnni";
    }
    return "unknown";
}
