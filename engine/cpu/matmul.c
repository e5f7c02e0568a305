/* engine/cpu/matmul.c: chooses the kernel for a weight type and an instruction set, and dequantises the types that have no integer kernel. */
#include "engine/cpu/matmul.h"

#include "engine/cpu/matmul_impl.h"

enum act_kind act_kind_of(enum block_type weight_type)
{
    switch (weight_type) {
    case BLOCK_Q4_K:
    case BLOCK_Q5_K:
    case BLOCK_Q6_K:
        return ACT_Q8_256;
    case BLOCK_Q8_0:
    case BLOCK_Q4_0:
        return ACT_Q8_32;
    default:
        return ACT_F32;
    }
}

size_t act_row_bytes(enum act_kind kind, int64_t n)
{
    switch (kind) {
    case ACT_Q8_256:
        return (size_t)n / 256 * sizeof(struct act_256);
    case ACT_Q8_32:
        return lines((size_t)n) + 2 * lines((size_t)n / 32 * 4);
    default:
        return lines((size_t)n * 4);
    }
}

void act_quantise(enum isa isa, enum act_kind kind, const float *x, int64_t n, void *dst)
{
    if (kind == ACT_F32) {
        memcpy(dst, x, (size_t)n * sizeof *x);
        return;
    }
#if defined(__x86_64__)
    if (isa == ISA_AVX512) {
        if (kind == ACT_Q8_256)
            act_256_avx512(x, n, dst);
        else
            act_32_avx512(x, n, dst);
        return;
    }
    if (isa == ISA_AVX2) {
        if (kind == ACT_Q8_256)
            act_256_avx2(x, n, dst);
        else
            act_32_avx2(x, n, dst);
        return;
    }
#endif
    (void)isa;
    if (kind == ACT_Q8_256)
        act_256_plain(x, n, dst);
    else
        act_32_plain(x, n, dst);
}

size_t matmul_scratch_bytes(const struct weight *w)
{
    if (act_kind_of(w->desc.type) != ACT_F32)
        return MATMUL_SCRATCH;
    return DOT_ROWS * lines((size_t)w->desc.n_in * sizeof(float));
}

/* One weight row as f32 in `dst`, or in place where it is f32 already. */
static const void *widen(enum isa isa, const struct matmul_job *job, const uint8_t *row, float *dst)
{
    if (job->type == BLOCK_F32)
        return row;
#if defined(__x86_64__)
    if (isa != ISA_PLAIN && (job->type == BLOCK_F16 || job->type == BLOCK_BF16)) {
        if (isa == ISA_AVX512)
            widen_halves_avx512(job->type, row, dst, job->n_in);
        else
            widen_halves_avx2(job->type, row, dst, job->n_in);
        return dst;
    }
#endif
    (void)isa;
    block_dequant(job->type, row, dst, (size_t)job->n_in);
    return dst;
}

static void dot(enum isa isa, const struct dot_job *dots)
{
#if defined(__x86_64__)
    if (isa == ISA_AVX512) {
        matmul_dot_avx512(dots);
        return;
    }
    if (isa == ISA_AVX2) {
        matmul_dot_avx2(dots);
        return;
    }
#endif
    (void)isa;
    matmul_dot_plain(dots);
}

static void matmul_f32(enum isa isa, const struct matmul_job *job)
{
    /* Where widening is cheap, all weights pass over as many activation rows as the second-level cache holds; otherwise a row is widened once. */
    bool cheap = job->type == BLOCK_F32 || job->type == BLOCK_F16 || job->type == BLOCK_BF16;
    int step = cheap ? 32 : job->n_rows;
    size_t stride = lines((size_t)job->n_in * sizeof(float)) / sizeof(float);
    for (int r = 0; r < job->n_rows; r += step) {
        struct dot_job dots = {.n = job->n_in, .x = job->x + r, .y = job->y + r, .add = job->add};
        dots.n_rows = job->n_rows - r < step ? job->n_rows - r : step;
        for (int64_t i = 0; i < job->n_out; i += dots.n_w) {
            dots.o0 = job->o0 + i;
            dots.n_w = job->n_out - i < DOT_ROWS ? (int)(job->n_out - i) : DOT_ROWS;
            for (int k = 0; k < dots.n_w; k++)
                dots.w[k] = widen(isa, job, job->w + (size_t)(i + k) * job->row_bytes, (float *)job->scratch + (size_t)k * stride);
            dot(isa, &dots);
        }
    }
}

void matmul(enum isa isa, const struct weight *w, int64_t mat, int64_t o0, int64_t o1, const void *const *x, float *const *y, int n_rows, bool add,
            void *scratch)
{
    if (o0 >= o1 || n_rows <= 0)
        return;
    struct matmul_job job = {
        .type = w->desc.type,
        .w = weight_row(w, mat, o0),
        .row_bytes = w->row_bytes,
        .n_in = w->desc.n_in,
        .n_out = o1 - o0,
        .o0 = o0,
        .x = x,
        .y = y,
        .n_rows = n_rows,
        .add = add,
        .scratch = scratch,
    };
    if (act_kind_of(job.type) == ACT_F32) {
        matmul_f32(isa, &job);
        return;
    }
#if defined(__x86_64__)
    if (isa == ISA_AVX512) {
        matmul_int_avx512(&job);
        return;
    }
    if (isa == ISA_AVX2) {
        matmul_int_avx2(&job);
        return;
    }
#endif
    matmul_int_plain(&job);
}
