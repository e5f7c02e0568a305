/* engine/cpu/matmul.h: products of weight rows with activation rows, one thread's share of the work.
 *
 * Activations are first turned into the form that pairs with the weight's block type (act_*), once per row, then used for many weight rows.
 * The arithmetic is defined, so that every kernel (plain C, AVX2, AVX-512 VNNI; one activation row or many) gives the same bits:
 *
 *   ACT_Q8_256, with the K types: per block of 256, integers exactly: isum = sum over sub-blocks of scale * sum(q_w * q_x), msum = sum of min *
 *       sum(q_x); then in f32, blocks in order: y = fma(d_x * d_w, isum, y) and, for types with minima, y = fma(-d_x * dmin_w, msum, y).
 *   ACT_Q8_32, with the types of 32 values: per block, y = fma(d_x * d_w, isum, y), with offsets (Q4_0's -8, ...) inside the integer sum.
 *   ACT_F32, with F32, F16, BF16 and every type that has no integer kernel: the weight row is dequantised and multiplied in 16 partial sums
 *       (value i goes to partial i % 16, each by fma in order), added pairwise at the end: 8+8, 4+4, 2+2, 1+1.
 *
 * Rounding of activations: ACT_Q8_32: d = max|x| / 127 rounded to f16, q = round(x / d before rounding); ACT_Q8_256: d = -(value of largest magnitude) / 127
 * in f32, q = round(x / d) capped at 127 (spec/gguf.md, end of section 3). round is to the nearest, ties to even; of two values of the same magnitude the
 * first counts. A block whose d rounds to 0 in f32 has q = 0; a block with a NaN or an infinity has d = NaN and q = 0, so that its products are NaN. */
#ifndef BEDSIDE_ENGINE_CPU_MATMUL_H
#define BEDSIDE_ENGINE_CPU_MATMUL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/backend.h"
#include "engine/cpu/store.h"

enum act_kind { ACT_F32, ACT_Q8_32, ACT_Q8_256 };

/* The instruction sets that have kernels; chosen once at start-up. */
enum isa { ISA_PLAIN, ISA_AVX2, ISA_AVX512 };
enum isa isa_best(void);            /* what this CPU and its operating system allow */
const char *isa_name(enum isa isa); /* "plain", "avx2", "avx512-vnni" */

enum act_kind act_kind_of(enum block_type weight_type);

/* Bytes of one activation row of n values in a form (n a multiple of the form's block), a multiple of 64. */
size_t act_row_bytes(enum act_kind kind, int64_t n);

/* Turns x [n] into dst (64-byte aligned). */
void act_quantise(enum isa isa, enum act_kind kind, const float *x, int64_t n, void *dst);

/* y[r][o] = (add ? y[r][o] : 0) + sum_i W[mat][o][i] * x[r][i] for o in [o0, o1) and r in [0, n_rows). x[r] points to an activation row of the kind
 * that goes with the weight's type; y[r] to an output row, indexed by o. o0 and o1 should be multiples of MATMUL_ROWS, except o1 at the end. The sum is
 * formed from zero and then added, so `add` rounds once. */
enum { MATMUL_ROWS = 16 };
void matmul(enum isa isa, const struct weight *w, int64_t mat, int64_t o0, int64_t o1, const void *const *x, float *const *y, int n_rows, bool add,
            void *scratch);

/* Scratch (64-byte aligned) that one thread needs for matmul with this weight. */
size_t matmul_scratch_bytes(const struct weight *w);

#endif
