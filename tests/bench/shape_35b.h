/* tests/bench/shape_35b.h: the shape of Qwen3.6-35B-A3B (one layer of each kind) and random weights, for the benchmarks of single operations. */
#ifndef BEDSIDE_TESTS_BENCH_SHAPE_35B_H
#define BEDSIDE_TESTS_BENCH_SHAPE_35B_H

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "engine/backend.h"

enum { D = 2048, V = 248320, FF = 512, EXPERTS = 256, USED = 8, NH = 16, NKV = 2, HD = 256, HK = 16, HV = 32, S = 128, CONV = 4 };
enum { CH = 2 * HK * S + HV * S, Q_ROW = NH * HD * 2, V_ROW = HV * S, DELTA_LAYERS = 30, ATTN_LAYERS = 10 };
enum { ROWS = 512, CONTEXT = 6000 }; /* a prefill step; the tokens before it */

static const struct backend_shape shape = {.n_embd = D,
                                           .n_vocab = V,
                                           .norm_eps = 1e-6F,
                                           .n_heads = NH,
                                           .n_kv_heads = NKV,
                                           .head_dim = HD,
                                           .n_rot = 64,
                                           .rope_theta = 1e7F,
                                           .attn_scale = 0.0625F,
                                           .attn_gated = true,
                                           .n_kv_layers = 1,
                                           .n_delta_layers = 1,
                                           .delta_k_heads = HK,
                                           .delta_v_heads = HV,
                                           .delta_dim = S,
                                           .conv_width = CONV,
                                           .n_experts = EXPERTS,
                                           .n_experts_used = USED,
                                           .expert_ff = FF,
                                           .shared_ff = FF,
                                           .kv_type = KV_F16,
                                           .max_rows = ROWS,
                                           .max_logit_rows = 1};

static inline void die(const char *text)
{
    fprintf(stderr, "%s: %s\n", program_invocation_short_name, text);
    exit(2);
}

static inline uint64_t draw(void) /* xorshift64, Marsaglia */
{
    static uint64_t seed = 1;
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed;
}

static inline float draw_f32(void) /* uniform in [-1, 1) */
{
    return (float)(int32_t)(uint32_t)draw() * 0x1p-31F;
}

/* n_mats matrices [n_out][n_in] of F32, Q4_K or Q6_K: random bits in every block, with scales that keep values near 1 / sqrt(n_in). Free desc.data. */
static inline struct weight_desc random_matrix(enum block_type type, int64_t n_in, int64_t n_out, int64_t n_mats)
{
    const struct block_info *info = block_info((uint32_t)type);
    const size_t stride = block_bytes(type, (size_t)n_in) * (size_t)n_out, bytes = stride * (size_t)n_mats;
    uint8_t *data = alloc_lines(bytes, 1);
    if (!data)
        die("out of memory for the weights");
    const float size = 1.0F / sqrtf((float)n_in);
    if (type == BLOCK_F32) {
        for (size_t i = 0; i < bytes; i += 4) {
            const float x = draw_f32() * size;
            memcpy(data + i, &x, 4);
        }
    } else {
        for (size_t i = 0; i + 8 <= bytes; i += 8) {
            const uint64_t x = draw();
            memcpy(data + i, &x, 8);
        }
        for (size_t i = 0; i < bytes; i += info->bytes) {
            const uint16_t scale = f32_to_f16(size / (type == BLOCK_Q4_K ? 250 : 1300)), min = f32_to_f16(size / 33);
            memcpy(data + i + (type == BLOCK_Q6_K ? 208 : 0), &scale, 2);
            if (type == BLOCK_Q4_K)
                memcpy(data + i + 2, &min, 2);
        }
    }
    return (struct weight_desc){.name = "random", .type = type, .n_in = n_in, .n_out = n_out, .n_mats = n_mats, .data = data, .stride = stride};
}

static inline struct weight *random_weight(struct backend *b, const struct weight_desc *desc)
{
    struct error err = {0};
    struct weight *w = b->ops->weight_new(b, desc, &err);
    if (!w)
        die(err.text);
    return w;
}

/* Begins a step of `rows` random tokens of one sequence. */
static inline void begin_rows(struct backend *b, int rows, int pos, const int32_t *pages)
{
    int32_t ids[ROWS];
    const struct span span = {.row = 0, .n = rows, .pos = pos, .pages = pages, .state = 0};
    for (int i = 0; i < rows; i++)
        ids[i] = (int32_t)(draw() % V);
    b->ops->begin(b, ids, rows, &span, 1);
}

#endif
