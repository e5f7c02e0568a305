/* The row functions in plain C, and the choice between the tables. fmaf is a library call where the compiler may not assume an fma instruction:
 * slow, but the same bits. */
#include "engine/cpu/rows_impl.h"

const struct rows_ops rows_base = ROWS_TABLE;

const struct rows_ops *rows_for(enum isa isa)
{
#if defined(__x86_64__)
    if (isa == ISA_AVX512)
        return &rows_avx512;
    if (isa == ISA_AVX2)
        return &rows_avx2;
#else
    (void)isa;
#endif
    return &rows_base;
}
