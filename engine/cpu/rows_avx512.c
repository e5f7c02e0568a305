/* The row functions for AVX-512 (compiled with it; called only where isa_best found it). */
#include "engine/cpu/rows.h"

#if defined(__AVX512F__)
#include "engine/cpu/rows_impl.h"

const struct rows_ops rows_avx512 = ROWS_TABLE;
#endif
