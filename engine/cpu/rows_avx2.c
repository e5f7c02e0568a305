/* The row functions for AVX2, FMA and F16C (compiled with those; called only where isa_best found them). */
#include "engine/cpu/rows.h"

#if defined(__AVX2__)
#include "engine/cpu/rows_impl.h"

const struct rows_ops rows_avx2 = ROWS_TABLE;
#endif
