/* hip/kernels/attn.h: attention over pages, softmax(q K) V, spec/qwen35moe.md section 6; attn_store.h is what comes before.
 *
 * ONE arithmetic for a row, whether it comes alone or in a prompt: a sequence is cut at absolute positions into pages (GPU_GRID tokens) and parts
 * (ATTN_PART tokens). Within a part a running softmax takes in page after page; the parts of a row are merged in order (attn_merge). Every sum has
 * one order, given by positions and channels alone: a row's bits depend on no row beside it.
 *
 * A workgroup of four waves has TILES * 16 queries (rows of one span times the query heads of one KV head, flattened: any group size fills it) and reads each
 * key and each value of that head once, from device memory straight into the registers of the one wave that needs it:
 *
 *   scores    S^T = K Q^T by WMMA: a wave has 16 of the page's 64 tokens (operand A: a lane is a token and loads 16 bytes of its key at a time). Operand B,
 *             the queries, waits in SHARED memory as high + low f16 parts, 22 bits together: two WMMAs. A lane's accumulator then holds 8 tokens in a row
 *             of one query, so that a softmax over tokens is a sum within lanes and over two of them.
 *   softmax   in f32, by base 2; the waves show each other the largest scores and the sums of their tokens (two barriers for a page).
 *   values    O^T = V^T P^T: a wave has a quarter of the channels and all 64 tokens. A lane loads the same 4 neighbouring channels of 16 tokens, and byte
 *             permutations turn them into operands: no transposition through memory. P is high + low as well.
 *
 * Powers of two keep the low parts away from f16's subnormals: a query is scaled so that its largest channel lies in [2^14, 2^15), a weight of the softmax is at most
 * 2^15 (f16 pages) or 2^9 (q8_0 pages). Both are exact, and are divided out again.
 *
 * q8_0 pages: WMMA multiplies the integers (exact in f16). Scores are summed for each block of 32 channels and multiplied by the token's d in f32; for values d
 * is multiplied into P in f32 before P is split in two. So the numbers in the page are used as they are, to 22 bits. A value's d must stay below 2^7
 * (values below 16,256), f16's largest number over 2^9.
 *
 * What a row reads: K and V of its sequence once for each ceil(rows * group / (TILES * 16)) workgroups of a KV head; with one row, once. Counted on the emulated
 * gfx1152, heads of the 35B, one layer (WMMA of f16 takes 32 cycles of a SIMD, other vector instructions 1):
 *   decode at 6,000, f16    12.73 MB (K and V are 12.29), 48,000 WMMA and 515,000 VALU: 128,000 cycles on 16 SIMDs, 44 us at 2.9 GHz; the bytes take 99 us at 128 GB/s
 *   decode at 6,000, q8_0   6.97 MB, 48,000 WMMA and 1,590,000 VALU: 196,000 cycles, 67 us; the bytes 54 us
 *   512 rows at 1,984, f16  4.60 M WMMA and 31.1 M VALU: 83 % of the issue time in WMMA, 11.1 M cycles, 3.8 ms
 *
 * Of many queries over heads of 256 channels two workgroups fit into a WGP's SHARED memory, that is two waves of a SIMD: these kernels may use more than 192 registers.
 *
 * A value that is not finite (a page may hold such) makes every row of its workgroup NaN from that page on, also rows before it: 0 * inf. */
#ifndef BEDSIDE_HIP_KERNELS_ATTN_H
#define BEDSIDE_HIP_KERNELS_ATTN_H

#include "hip/kernels/attn_store.h"
#include "hip/kernels/tail.h"

enum { ATTN_TOP_EXPONENT = 14 };

#define ATTN_INLINE __attribute__((always_inline))
#if defined(__clang__)
#define ATTN_UNROLL _Pragma("unroll")
#define ATTN_LOOP   _Pragma("clang loop unroll(disable)")
#else
#define ATTN_UNROLL
#define ATTN_LOOP
#endif

/* ---- small things ---- */

/* Keeps the loads before it where they are: early. */
DEV void attn_issue_loads()
{
#if defined(__AMDGCN__)
    __builtin_amdgcn_sched_barrier(0);
#endif
}

/* Four bytes chosen from eight: byte i is number selector[i] of low (0 to 3) and high (4 to 7); 12 gives 0. */
DEV uint32_t attn_pick(uint32_t high, uint32_t low, uint32_t selector)
{
#if defined(__AMDGCN__)
    return __builtin_amdgcn_perm(high, low, selector);
#else
    const uint64_t both = (uint64_t)high << 32 | low;
    uint32_t out = 0;
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t s = selector >> 8 * i & 0xff;
        out |= (s < 8 ? (uint32_t)(both >> 8 * s) & 0xff : 0) << 8 * i;
    }
    return out;
#endif
}

typedef half attn_half2_t __attribute__((vector_size(4)));

/* [q0, 0, q1, 0], signed bytes, as two halves: with the sign bit turned over and the exponent of 1024 set above it the bits are those of 1152 + q. */
DEV uint32_t attn_halves(uint32_t bytes)
{
    const attn_half2_t bias = {(half)1152.0f, (half)1152.0f};
    return __builtin_bit_cast(uint32_t, __builtin_bit_cast(attn_half2_t, bytes ^ 0x64806480U) - bias);
}

/* A WMMA operand: WMMA_AB_K halves. */
union attn_operand {
    wmma_h_t h;
    half8_t part[WMMA_AB_K / 8];
    half one[WMMA_AB_K];
    uint32_t word[WMMA_AB_K / 2];
};

DEV wmma_h_t attn_load_halves(const void *p) /* on 16 bytes */
{
    attn_operand a;
    ATTN_UNROLL for (int i = 0; i < WMMA_AB_K / 8; i++) a.part[i] = load_half8((const half *)p + 8 * i);
    return a.h;
}

/* Blocks of q8_0 lie on 2 bytes only; device memory allows that for every width. */
typedef wmma_i8_t attn_loose_bytes_t __attribute__((aligned(2)));
typedef int32_t attn_loose_i32_t __attribute__((aligned(2)));

DEV wmma_i8_t attn_load_bytes(const void *p) /* WMMA_AB_K of them */
{
    return *(const attn_loose_bytes_t *)p;
}

DEV wmma_h_t attn_operand_of_bytes(wmma_i8_t bytes)
{
    attn_operand a;
    ATTN_UNROLL for (int i = 0; i < WMMA_AB_K / 4; i++)
    {
        a.word[2 * i] = attn_halves(attn_pick(0, (uint32_t)bytes[i], 0x0c010c00));
        a.word[2 * i + 1] = attn_halves(attn_pick(0, (uint32_t)bytes[i], 0x0c030c02));
    }
    return a.h;
}

/* x as high + low: what is lost is below 2^-22 of x. */
DEV void attn_halve(float x, half *high, half *low)
{
    *high = f2h(x);
    *low = f2h(x - h2f(*high));
}

/* The row of operand A that must hold token t of 16 so that element i of the accumulator of lane l is token 8 * (l / 16) + i; here its inverse: a lane's token. */
DEV uint32_t attn_token()
{
    const uint32_t r = lane_id() & 15;
#if WMMA_AB_K == 16
    return (r & 1) * 8 + (r >> 1);
#else
    return r;
#endif
}

/* ---- attn_mix ---- */

/* DIM: the room for a head's channels; TILES: of 16 queries; Q8: q8_0 pages, otherwise f16; WHOLE: heads have exactly DIM channels. */
template <int DIM, int TILES, bool Q8, bool WHOLE> struct attn_kind {
    enum { dim = DIM, tiles = TILES, q8 = Q8, whole = WHOLE };
    enum {
        queries = 16 * TILES,
        columns = DIM / 64, /* channels of a lane in operand A of the values: WMMA tiles of a wave */
        steps = DIM / 16,
        blocks = DIM / 32,
        ahead = TILES == 1 ? 6 : 3, /* steps of 16 channels whose keys are loaded before they are needed */
        pass = Q8 ? 2 : columns,    /* WMMA tiles of values that share operand B */
        row_bytes = Q8 ? 34 * blocks : 2 * DIM,
        value_words = Q8 ? 1 : columns / 2, /* a token's values in a lane */
        weight_scale = Q8 ? 1 << 9 : 1 << 15,
    };
};

/* From one token's key or value to the next's. */
template <class K> DEV uint32_t attn_row_bytes(const struct attn_mix_params &p)
{
    return K::whole ? (uint32_t)K::row_bytes : p.row_bytes;
}

template <class K> struct alignas(16) attn_shared {
    half q[K::tiles][2][16][K::dim + 8]; /* high and low parts; 8 more, so that 16 lanes reading one channel use all banks */
    union {
        half p[K::tiles][2][16][GPU_GRID + 8]; /* the softmax's weights of a page */
        float p32[K::tiles][16][GPU_GRID + 4]; /* the same for q8_0 pages */
    };
    float d_k[K::q8 ? K::blocks : 1][GPU_GRID], d_v[K::q8 ? K::blocks : 1][GPU_GRID];
    float factor[K::queries]; /* from WMMA's score to a power of two */
    float top[ATTN_WAVES][K::queries], sum[ATTN_WAVES][K::queries];
    int last;
};

/* A workgroup's queries and where their keys are; all the same in every lane. */
struct attn_block {
    int row, n, pos; /* of the span */
    const uint64_t *pages;
    int first;    /* query: index in the span's rows * group */
    int last_pos; /* of the block's last row */
    int kv_head;
};

/* What a lane knows of its queries (column lane % 16 of each tile). */
template <class K> struct attn_lane {
    int pos[K::tiles];  /* -1: no query */
    int head[K::tiles]; /* index in [R][NH] */
    float factor[K::tiles], m[K::tiles], s[K::tiles];
};

template <class K> using attn_acc = f32x8_t[K::tiles][K::columns];

DEV struct attn_block attn_find_block(const struct attn_mix_params &p, int queries)
{
    struct attn_block b = {};
    const struct gpu_span *span = p.step.spans;
    int left = (int)bid_x();
    for (;; span++) {
        const int n = uniform_i(span->n), blocks = (n * p.group + queries - 1) / queries;
        if (left < blocks) {
            b.n = n;
            break;
        }
        left -= blocks;
    }
    b.row = uniform_i(span->row);
    b.pos = uniform_i(span->pos);
    b.pages = p.step.pages + uniform_i(span->first_page);
    b.first = left * queries;
    const int end = b.first + queries, all = b.n * p.group;
    b.last_pos = b.pos + ((end < all ? end : all) - 1) / p.group;
    b.kv_head = (int)bid_y();
    return b;
}

/* Query `index` of the span: its row and head. False: there is none. */
DEV bool attn_query(const struct attn_mix_params &p, const struct attn_block &b, int index, int *pos, int *head)
{
    const int row = index / p.group;
    *pos = b.pos + row;
    *head = (b.row + row) * p.n_heads + b.kv_head * p.group + index - row * p.group;
    return row < b.n;
}

/* Brings the block's queries into SHARED memory, scaled and split: a wave one query at a time. */
template <class K> DEV void attn_gather(const struct attn_mix_params &p, const struct attn_block &b, struct attn_shared<K> *sh)
{
    enum { MINE = K::dim / 32 };
    const int wave = uniform_i((int)(tid_x() >> 5)), c = (int)lane_id() * MINE;
    for (int i = wave; i < K::queries; i += ATTN_WAVES) {
        int pos, head, top = 0;
        float x[MINE] = {};
        if (attn_query(p, b, b.first + i, &pos, &head) && (K::whole || c < p.head_dim)) {
            const float *from = p.q + (size_t)head * (size_t)p.q_stride + c;
            ATTN_UNROLL for (int j = 0; j < MINE; j += 4)
            {
                const f32x4_t four = load_f32x4(from + j);
                ATTN_UNROLL for (int k = 0; k < 4; k++) x[j + k] = four[k];
            }
        }
        ATTN_UNROLL for (int j = 0; j < MINE; j++) top = larger_i(top, as_int(x[j]) & 0x7fffffff);
        int exponent = largest_of_wave_i(top) >> 23; /* 127: the largest lies in [1, 2) */
        exponent = larger_i(exponent, ATTN_TOP_EXPONENT + 1);
        const float scale = as_float((254 + ATTN_TOP_EXPONENT - exponent) << 23);
        attn_operand high, low;
        ATTN_UNROLL for (int j = 0; j < MINE; j++) attn_halve(x[j] * scale, &high.one[j], &low.one[j]);
        half *to_high = &sh->q[i / 16][0][i % 16][c], *to_low = &sh->q[i / 16][1][i % 16][c];
        if constexpr (MINE == 8) {
            store_half8(to_high, high.part[0]);
            store_half8(to_low, low.part[0]);
        } else {
            ATTN_UNROLL for (int j = 0; j < MINE; j++)
            {
                to_high[j] = high.one[j];
                to_low[j] = low.one[j];
            }
        }
        if (lane_id() == 0)
            sh->factor[i] = p.scale * as_float((exponent - ATTN_TOP_EXPONENT) << 23);
    }
}

/* d of a page's blocks, [block][token]; 0 after token `last`. */
template <class K> DEV void attn_stage_scales(const struct attn_mix_params &p, const uint8_t *rows, int last, float (*to)[GPU_GRID])
{
    const int token = (int)tid_x() % GPU_GRID, blocks = K::whole ? (int)K::blocks : p.head_dim / 32;
    for (int b = (int)tid_x() / GPU_GRID; b < blocks; b += ATTN_WAVES * 32 / GPU_GRID)
        to[b][token] = token <= last ? h2f(u2h(*(const uint16_t *)(rows + (uint32_t)token * attn_row_bytes<K>(p) + 34 * (uint32_t)b))) : 0.0f;
}

/* s += the wave's 16 tokens of a page (from `rows` on) times 16 channels (step kk) of the queries. */
template <class K> DEV void attn_score_step(const struct attn_shared<K> *sh, wmma_h_t key, int kk, f32x8_t *s)
{
    const uint32_t query = lane_id() & 15, at = 16 * (uint32_t)kk + wmma_ab_k0();
    ATTN_UNROLL for (int t = 0; t < K::tiles; t++)
    {
        s[t] = wmma_f16(key, attn_load_halves(&sh->q[t][0][query][at]), s[t]);
        s[t] = wmma_f16(key, attn_load_halves(&sh->q[t][1][query][at]), s[t]);
        if (t + 1 < K::tiles)
            attn_issue_loads();
    }
}

template <class K> DEV void attn_scores_f16(const struct attn_mix_params &p, const struct attn_shared<K> *sh, const uint8_t *row, f32x8_t *s)
{
    const half *key = (const half *)row + wmma_ab_k0();
    if constexpr (!K::whole) {
        ATTN_LOOP for (int kk = 0; kk < p.head_dim / 16; kk++) attn_score_step<K>(sh, attn_load_halves(key + 16 * kk), kk, s);
    } else {
        wmma_h_t ahead[K::ahead];
        ATTN_UNROLL for (int kk = 0; kk < K::ahead; kk++) ahead[kk] = attn_load_halves(key + 16 * kk);
        ATTN_UNROLL for (int kk = 0; kk < K::steps; kk++)
        {
            attn_issue_loads();
            attn_score_step<K>(sh, ahead[kk % K::ahead], kk, s);
            if (kk + K::ahead < K::steps)
                ahead[kk % K::ahead] = attn_load_halves(key + 16 * (kk + K::ahead));
        }
    }
}

/* One block of 32 channels: integers in WMMA, then each token's d. */
template <class K> DEV void attn_score_block(const struct attn_shared<K> *sh, wmma_i8_t low, wmma_i8_t high, int block, int token, f32x8_t *s)
{
    f32x8_t c[K::tiles] = {};
    attn_score_step<K>(sh, attn_operand_of_bytes(low), 2 * block, c);
    attn_issue_loads();
    attn_score_step<K>(sh, attn_operand_of_bytes(high), 2 * block + 1, c);
    const f32x4_t d[2] = {load_f32x4(&sh->d_k[block][token]), load_f32x4(&sh->d_k[block][token + 4])};
    ATTN_UNROLL for (int t = 0; t < K::tiles; t++) ATTN_UNROLL for (int i = 0; i < 8; i++) s[t][i] = gpu_fmaf(d[i / 4][i % 4], c[t][i], s[t][i]);
}

/* `token`: the first of the 8 that are in the lane's accumulator. */
template <class K>
DEV void attn_scores_q8(const struct attn_mix_params &p, const struct attn_shared<K> *sh, const uint8_t *row, int token, f32x8_t *s)
{
    const uint8_t *key = row + 2 + wmma_ab_k0();
    if constexpr (!K::whole) {
        ATTN_LOOP for (int b = 0; b < p.head_dim / 32; b++)
            attn_score_block<K>(sh, attn_load_bytes(key + 34 * b), attn_load_bytes(key + 34 * b + 16), b, token, s);
    } else {
        wmma_i8_t ahead[2][2];
        ATTN_UNROLL for (int i = 0; i < 4; i++) ahead[i / 2][i % 2] = attn_load_bytes(key + 34 * (i / 2) + 16 * (i % 2));
        ATTN_UNROLL for (int b = 0; b < K::blocks; b++)
        {
            attn_issue_loads();
            attn_score_block<K>(sh, ahead[b % 2][0], ahead[b % 2][1], b, token, s);
            if (b + 2 < K::blocks)
                ATTN_UNROLL for (int i = 0; i < 2; i++) ahead[b % 2][i] = attn_load_bytes(key + 34 * (b + 2) + 16 * i);
        }
    }
}

/* ---- values: which channel is where ----
 *
 * f16: lane r loads channels [columns] from r * columns on; tile j has the j-th of each lane. q8_0: a tile must lie in one block, so that its d can go into P:
 * with two blocks of a wave lane r loads 4 channels of block r / 8 and gives two of them to lane r ^ 8; tiles 0 and 1 are then the first block, 2 and 3
 * the second. Pairs of tiles (j, j + 1) have neighbouring channels. */

/* Row r of tile j, j even. */
template <class K> DEV int attn_channel(int wave, int r, int j)
{
    if constexpr (K::q8 && K::columns == 4)
        return wave * 64 + 16 * j + 4 * (r & 7) + 2 * (r >> 3);
    else
        return wave * (K::dim / 4) + r * K::columns + j;
}

/* Bytes from the beginning of a token's values to those that the lane loads. */
template <class K> DEV uint32_t attn_value_offset(const struct attn_mix_params &p, int wave)
{
    const int first = wave * (K::dim / 4) + ((int)lane_id() & 15) * K::columns;
    const int c = K::whole || first < p.head_dim ? first : 0; /* what comes of the channels beyond is not stored */
    if constexpr (K::q8)
        return (uint32_t)(c / 32 * 34 + 2 + c % 32);
    else
        return 2 * (uint32_t)c;
}

template <class K> struct attn_values {
    uint32_t word[WMMA_AB_K][K::value_words];
};

/* The lane's values of tokens first .. first + WMMA_AB_K - 1. */
template <class K> DEV void attn_load_values(const struct attn_mix_params &p, const uint8_t *at, int first, struct attn_values<K> *v)
{
    ATTN_UNROLL for (int i = 0; i < WMMA_AB_K; i++)
    {
        const uint8_t *from = at + (uint32_t)(first + i) * attn_row_bytes<K>(p);
        if constexpr (K::q8 && K::columns == 4) {
            v->word[i][0] = (uint32_t) * (const attn_loose_i32_t *)from;
        } else if constexpr (K::q8) {
            v->word[i][0] = *(const uint16_t *)from;
        } else if constexpr (K::columns == 4) {
            const i32x2_t two = load_i32x2(from);
            v->word[i][0] = (uint32_t)two[0];
            v->word[i][1] = (uint32_t)two[1];
        } else {
            v->word[i][0] = (uint32_t)load_i32(from);
        }
    }
}

/* Values of tokens after `last` may be anything, NaN too, which a weight of 0 does not silence. The integers of q8_0 are always finite. */
template <class K> DEV void attn_clear_values(int first, int last, struct attn_values<K> *v)
{
    ATTN_UNROLL for (int i = 0; i < WMMA_AB_K; i++) ATTN_UNROLL for (int w = 0; w < K::value_words; w++) v->word[i][w] =
        first + i <= last ? v->word[i][w] : 0;
}

/* Lanes r and r ^ 8 exchange halves: afterwards the low half of a word is in the first block, the high half in the second. */
template <class K> DEV void attn_turn_values(struct attn_values<K> *v)
{
    if constexpr (K::q8 && K::columns == 4) {
        const uint32_t selector = lane_id() & 8 ? 0x03020706 : 0x05040100;
        ATTN_UNROLL for (int i = 0; i < WMMA_AB_K; i++) v->word[i][0] =
            attn_pick((uint32_t)shfl_xor_i<8>((int)v->word[i][0]), v->word[i][0], selector);
    }
}

/* Tile j's operand A: the lane's channel of each token. */
template <class K> DEV wmma_h_t attn_value_operand(const struct attn_values<K> &v, int j)
{
    attn_operand a;
    ATTN_UNROLL for (int i = 0; i < WMMA_AB_K / 2; i++)
    {
        if constexpr (K::q8)
            a.word[i] = attn_halves(attn_pick(v.word[2 * i + 1][0], v.word[2 * i][0], 0x0c040c00U + 0x00010001U * (uint32_t)j));
        else
            a.word[i] = attn_pick(v.word[2 * i + 1][j / 2], v.word[2 * i][j / 2], j % 2 ? 0x07060302 : 0x05040100);
    }
    return a.h;
}

/* acc += P times one step of 16 tokens, a: their values. `at`: 16 * step + wmma_ab_k0(). */
template <class K> DEV void attn_mix_step(const struct attn_shared<K> *sh, const wmma_h_t *a, int at, int wave, attn_acc<K> &acc)
{
    const uint32_t query = lane_id() & 15;
    ATTN_UNROLL for (int first = 0; first < K::columns; first += K::pass) ATTN_UNROLL for (int t = 0; t < K::tiles; t++)
    {
        attn_operand high, low;
        if constexpr (K::q8) {
            const float *d = &sh->d_v[wave * (K::columns / 2) + first / 2][at];
            ATTN_UNROLL for (int i = 0; i < WMMA_AB_K; i += 4)
            {
                const f32x4_t weight = load_f32x4(&sh->p32[t][query][at + i]), by = load_f32x4(d + i);
                ATTN_UNROLL for (int k = 0; k < 4; k++) attn_halve(weight[k] * by[k], &high.one[i + k], &low.one[i + k]);
            }
        } else {
            high.h = attn_load_halves(&sh->p[t][0][query][at]);
            low.h = attn_load_halves(&sh->p[t][1][query][at]);
        }
        ATTN_UNROLL for (int j = 0; j < K::pass; j++) acc[t][first + j] = wmma_f16(a[first + j], high.h, acc[t][first + j]);
        ATTN_UNROLL for (int j = 0; j < K::pass; j++) acc[t][first + j] = wmma_f16(a[first + j], low.h, acc[t][first + j]);
        attn_issue_loads(); /* no more than one tile's weights in registers */
    }
}

/* e as in 2^(x - e): anything where all scores so far are -inf. */
DEV float attn_base(float m)
{
    return m == -__builtin_inff() ? 0.0f : m;
}

/* Scores of the wave's 16 tokens of a page, masked and by base 2; the lane's and its half's largest into SHARED memory. */
template <class K>
DEV void attn_page_scores(const struct attn_mix_params &p, const struct attn_block &b, const struct attn_lane<K> &l, struct attn_shared<K> *sh,
                          const uint8_t *keys, int page, f32x8_t *s)
{
    const int wave = uniform_i((int)(tid_x() >> 5)), first = page * GPU_GRID + 16 * wave; /* the wave's first token */
    const int upper = 8 * (int)(lane_id() >> 4);
    ATTN_UNROLL for (int t = 0; t < K::tiles; t++) s[t] = f32x8_t{};
    if (first <= b.last_pos) {
        const uint8_t *row = keys + (16 * (uint32_t)wave + attn_token()) * attn_row_bytes<K>(p);
        if constexpr (K::q8)
            attn_scores_q8<K>(p, sh, row, 16 * wave + upper, s);
        else
            attn_scores_f16<K>(p, sh, row, s);
    }
    ATTN_UNROLL for (int t = 0; t < K::tiles; t++)
    {
        float top = -__builtin_inff();
        ATTN_UNROLL for (int i = 0; i < 8; i++)
        {
            s[t][i] = first + upper + i <= l.pos[t] ? s[t][i] * l.factor[t] : -__builtin_inff();
            top = gpu_fmaxf(top, s[t][i]);
        }
        top = gpu_fmaxf(top, shfl_xor_f<16>(top));
        if (lane_id() < 16)
            sh->top[wave][16 * t + (int)lane_id()] = top;
    }
}

/* After a barrier: the weights into SHARED memory; `shrink` is what the sums so far are multiplied with. */
template <class K> DEV void attn_page_weights(struct attn_lane<K> &l, struct attn_shared<K> *sh, f32x8_t *s, float *shrink)
{
    const int wave = uniform_i((int)(tid_x() >> 5)), query = (int)(lane_id() & 15), at = 16 * wave + 8 * (int)(lane_id() >> 4);
    ATTN_UNROLL for (int t = 0; t < K::tiles; t++)
    {
        const int q = 16 * t + query;
        const float top = gpu_fmaxf(gpu_fmaxf(sh->top[0][q], sh->top[1][q]), gpu_fmaxf(sh->top[2][q], sh->top[3][q]));
        const float most = gpu_fmaxf(l.m[t], top), base = attn_base(most);
        attn_operand high, low;
        float sum = 0.0f;
        shrink[t] = gpu_exp2f(l.m[t] - base);
        l.m[t] = most;
        ATTN_UNROLL for (int i = 0; i < 8; i++)
        {
            s[t][i] = gpu_exp2f(s[t][i] - base) * (float)K::weight_scale;
            sum += s[t][i];
            attn_halve(s[t][i], &high.one[i], &low.one[i]);
        }
        sum += shfl_xor_f<16>(sum);
        if (lane_id() < 16)
            sh->sum[wave][q] = sum;
        if constexpr (K::q8) {
            store_f32x4(&sh->p32[t][query][at], f32x4_t{s[t][0], s[t][1], s[t][2], s[t][3]});
            store_f32x4(&sh->p32[t][query][at + 4], f32x4_t{s[t][4], s[t][5], s[t][6], s[t][7]});
        } else {
            store_half8(&sh->p[t][0][query][at], high.part[0]);
            store_half8(&sh->p[t][1][query][at], low.part[0]);
        }
    }
}

/* After another barrier: acc and s. `values`: the lane's values of the page's first token. */
template <class K>
DEV void attn_page_values(const struct attn_mix_params &p, const struct attn_block &b, struct attn_lane<K> &l, const struct attn_shared<K> *sh,
                          const uint8_t *values, int page, struct attn_values<K> &next, const float *shrink, attn_acc<K> &acc)
{
    const int wave = uniform_i((int)(tid_x() >> 5)), query = (int)(lane_id() & 15), last = b.last_pos - page * GPU_GRID;
    ATTN_UNROLL for (int t = 0; t < K::tiles; t++)
    {
        const int q = 16 * t + query;
        l.s[t] = gpu_fmaf(l.s[t], shrink[t], (sh->sum[0][q] + sh->sum[1][q]) + (sh->sum[2][q] + sh->sum[3][q]));
        if (shrink[t] != 1.0f) /* multiplying would change nothing */
            ATTN_UNROLL for (int j = 0; j < K::columns; j++) acc[t][j] *= shrink[t];
    }
    if (!K::whole && wave * (K::dim / 4) >= p.head_dim)
        return;
    const int k0 = (int)wmma_ab_k0();
    ATTN_LOOP for (int step = 0; step < GPU_GRID / 16; step++)
    {
        if (16 * step > last)
            break;
        wmma_h_t a[K::columns];
        if (!K::q8 && 16 * step + 15 > last)
            attn_clear_values<K>(16 * step + k0, last, &next);
        attn_turn_values<K>(&next);
        ATTN_UNROLL for (int j = 0; j < K::columns; j++) a[j] = attn_value_operand<K>(next, j);
        attn_issue_loads();
        if (step + 1 < GPU_GRID / 16) /* of tokens of this page: there is memory, whatever it holds */
            attn_load_values<K>(p, values, 16 * (step + 1) + k0, &next);
        attn_issue_loads();
        attn_mix_step<K>(sh, a, 16 * step + k0, wave, acc);
    }
}

/* How the running softmax so far (m, s) and another one go together: factors of the two. */
DEV void attn_merge(float *m, float *s, float other_m, float other_s, float *keep, float *add)
{
    const float most = gpu_fmaxf(*m, other_m), base = attn_base(most);
    *keep = gpu_exp2f(*m - base);
    *add = gpu_exp2f(other_m - base);
    *s = gpu_fmaf(other_s, *add, *s * *keep);
    *m = most;
}

DEV float attn_merged(float total, float other, float keep, float add)
{
    return gpu_fmaf(other, add, total * keep);
}

/* Adding 0 makes a -0 positive: whether an all-masked page was added to it or not must not show. */
DEV float attn_finished(const struct attn_mix_params &p, float acc, float s, int head, int c)
{
    const float x = (acc + 0.0f) / s;
    return p.gated ? x / (1.0f + gpu_expf(-p.q[(size_t)head * (size_t)p.q_stride + (size_t)(p.head_dim + c)])) : x;
}

/* The sums over one part, into acc, l.m and l.s. */
template <class K>
DEV void attn_part(const struct attn_mix_params &p, const struct attn_block &b, struct attn_lane<K> &l, struct attn_shared<K> *sh, int part,
                   attn_acc<K> &acc)
{
    const int wave = uniform_i((int)(tid_x() >> 5));
    const uint32_t offset = attn_value_offset<K>(p, wave);
    const uint64_t head = (uint64_t)b.kv_head * p.head_bytes;
    int end = (part + 1) * (ATTN_PART / GPU_GRID);
    end = end < b.last_pos / GPU_GRID + 1 ? end : b.last_pos / GPU_GRID + 1;
    ATTN_UNROLL for (int t = 0; t < K::tiles; t++)
    {
        l.m[t] = -__builtin_inff();
        l.s[t] = 0.0f;
        ATTN_UNROLL for (int j = 0; j < K::columns; j++) acc[t][j] = f32x8_t{};
    }
    if constexpr (K::q8) { /* d of the first page's keys; the others' during the page before */
        const int page = part * (ATTN_PART / GPU_GRID);
        attn_stage_scales<K>(p, GLOBAL(const uint8_t, b.pages[page] + p.k_offset + head), b.last_pos - page * GPU_GRID, sh->d_k);
        sync_threads();
    }
    ATTN_LOOP for (int page = part * (ATTN_PART / GPU_GRID); page < end; page++)
    {
        const uint64_t at = b.pages[page] + head;
        const uint8_t *values = GLOBAL(const uint8_t, at + p.v_offset);
        f32x8_t s[K::tiles];
        float shrink[K::tiles];
        struct attn_values<K> first;
        attn_page_scores<K>(p, b, l, sh, GLOBAL(const uint8_t, at + p.k_offset), page, s);
        attn_load_values<K>(p, values + offset, (int)wmma_ab_k0(), &first);
        sync_threads();
        if constexpr (K::q8) {
            attn_stage_scales<K>(p, values, b.last_pos - page * GPU_GRID, sh->d_v);
            if (page + 1 < end)
                attn_stage_scales<K>(p, GLOBAL(const uint8_t, b.pages[page + 1] + head + p.k_offset), b.last_pos - (page + 1) * GPU_GRID, sh->d_k);
        }
        attn_page_weights<K>(l, sh, s, shrink);
        sync_threads();
        attn_page_values<K>(p, b, l, sh, values + offset, page, first, shrink, acc);
    }
}

/* Calls use(tile, element of the accumulator, pair of WMMA tiles, query head, channel) for every pair of channels of a lane's queries. */
template <class K, class F> DEV void attn_each_pair(const struct attn_mix_params &p, const struct attn_lane<K> &l, F use)
{
    /* Opaque: the compiler would compute 64 addresses once, before the loop over parts, and keep them. */
    const int wave = uniform_i((int)(tid_x() >> 5)), row = attn_opaque((int)wmma_c_row(0));
    ATTN_UNROLL for (int t = 0; t < K::tiles; t++)
    {
        const int head = attn_opaque(l.head[t]);
        ATTN_UNROLL for (int i = 0; i < 8; i++) ATTN_UNROLL for (int j = 0; j < K::columns; j += 2)
        {
            const int c = attn_channel<K>(wave, row + i * (WMMA_AB_K / 8), j);
            if (l.pos[t] >= 0 && (K::whole || c < p.head_dim))
                use(t, i, j, head, c);
            attn_issue_loads(); /* few at a time: registers are short */
        }
    }
}

/* What a lane's queries have of part `part` to where the last workgroup finds it. */
template <class K> DEV void attn_store_part(const struct attn_mix_params &p, const struct attn_lane<K> &l, int part, attn_acc<K> &acc)
{
    attn_each_pair<K>(p, l, [&](int t, int i, int j, int head, int c) ATTN_INLINE {
        float *to = p.part_acc + ((size_t)head * (size_t)p.parts + (size_t)part) * (size_t)p.head_dim + (size_t)c;
        *(f32x2_t *)to = f32x2_t{acc[t][j][i], acc[t][j + 1][i]};
    });
    if (tid_x() >= 16)
        return;
    ATTN_UNROLL for (int t = 0; t < K::tiles; t++) if (l.pos[t] >= 0) *
        (f32x2_t *)(p.part_ms + ((size_t)l.head[t] * (size_t)p.parts + (size_t)part) * 2) = f32x2_t{l.m[t], l.s[t]};
}

/* The workgroup that finishes the last of a block's parts merges them all, in order: true. */
template <class K> DEV bool attn_merge_parts(const struct attn_mix_params &p, const struct attn_block &b, struct attn_shared<K> *sh, int n_parts)
{
    int *done = p.done + bid_x() * (uint32_t)p.n_kv_heads + bid_y();
    fence_device();
    sync_threads_global();
    if (tid_x() == 0) {
        sh->last = atomic_add_i(done, 1) == n_parts - 1;
        if (sh->last)
            *done = 0; /* for the next launch */
    }
    sync_threads();
    if (!uniform_i(sh->last))
        return false;
    fence_device();
    const int fours = p.head_dim / 4;
    for (int i = (int)tid_x(); i < K::queries * fours; i += ATTN_WAVES * 32) {
        int pos, head;
        if (!attn_query(p, b, b.first + i / fours, &pos, &head))
            break;
        const int c = i % fours * 4;
        const float *ms = p.part_ms + (size_t)head * (size_t)p.parts * 2;
        const float *from = p.part_acc + (size_t)head * (size_t)p.parts * (size_t)p.head_dim + c;
        f32x4_t total = load_f32x4(from);
        float m = ms[0], s = ms[1];
        for (int part = 1; part <= pos / ATTN_PART; part++) {
            const f32x4_t other = load_f32x4(from + (size_t)part * (size_t)p.head_dim);
            float keep, add;
            attn_merge(&m, &s, ms[2 * part], ms[2 * part + 1], &keep, &add);
            ATTN_UNROLL for (int k = 0; k < 4; k++) total[k] = attn_merged(total[k], other[k], keep, add);
        }
        ATTN_UNROLL for (int k = 0; k < 4; k++) total[k] = attn_finished(p, total[k], s, head, c + k);
        store_f32x4(p.out + (size_t)head * (size_t)p.head_dim + c, total);
    }
    return true;
}

/* Adds a part to the total of the block, which waits in `out` from part to part; the last one finishes. */
template <class K>
DEV void attn_add_part(const struct attn_mix_params &p, const struct attn_lane<K> &l, int part, bool last, float *total_m, float *total_s,
                       attn_acc<K> &acc)
{
    float keep[K::tiles] = {}, add[K::tiles] = {};
    ATTN_UNROLL for (int t = 0; t < K::tiles; t++)
    {
        if (part == 0) {
            total_m[t] = l.m[t];
            total_s[t] = l.s[t];
        } else {
            attn_merge(&total_m[t], &total_s[t], l.m[t], l.s[t], &keep[t], &add[t]);
        }
    }
    attn_each_pair<K>(p, l, [&](int t, int i, int j, int head, int c) ATTN_INLINE {
        float *to = p.out + (size_t)head * (size_t)p.head_dim + (size_t)c;
        f32x2_t x = {acc[t][j][i], acc[t][j + 1][i]};
        if (part > 0) {
            const f32x2_t total = load_f32x2(to);
            x = f32x2_t{attn_merged(total[0], x[0], keep[t], add[t]), attn_merged(total[1], x[1], keep[t], add[t])};
        }
        if (last)
            x = f32x2_t{attn_finished(p, x[0], total_s[t], head, c), attn_finished(p, x[1], total_s[t], head, c + 1)};
        *(f32x2_t *)to = x;
    });
}

/* Grid [blocks of K::queries of all spans][NKV][parts, or 1]. With p.parts a workgroup has one part of a sequence, otherwise one after the other.
 * True in the one whose stores complete the block. */
template <class K> DEV bool attn_mix_block(const struct attn_mix_params &p, struct attn_shared<K> *sh)
{
    const struct attn_block b = attn_find_block(p, K::queries);
    const int n_parts = b.last_pos / ATTN_PART + 1;
    const bool apart = p.parts > 0 && n_parts > 1;
    int part = (int)bid_z();
    if (part >= n_parts)
        return false;
    struct attn_lane<K> l;
    float total_m[K::tiles] = {}, total_s[K::tiles] = {};
    attn_acc<K> acc;
    attn_gather<K>(p, b, sh);
    sync_threads();
    ATTN_UNROLL for (int t = 0; t < K::tiles; t++)
    {
        const int q = 16 * t + ((int)lane_id() & 15);
        int pos;
        l.pos[t] = attn_query(p, b, b.first + q, &pos, &l.head[t]) ? pos : -1;
        l.factor[t] = sh->factor[q];
    }
    ATTN_LOOP for (;; part++)
    {
        attn_part<K>(p, b, l, sh, part, acc);
        if (apart)
            break;
        attn_add_part<K>(p, l, part, part == n_parts - 1, total_m, total_s, acc);
        if (part == n_parts - 1)
            return true;
    }
    attn_store_part<K>(p, l, part, acc);
    return attn_merge_parts<K>(p, b, sh, n_parts);
}

#define ATTN_KERNEL(name, dim, tiles, q8, whole)                                                                                                     \
    KERNEL(128) name(struct attn_mix_params p)                                                                                                       \
    {                                                                                                                                                \
        SHARED struct attn_shared<attn_kind<dim, tiles, q8, whole>> shared;                                                                          \
        SHARED struct tail_shared tail;                                                                                                              \
        if (attn_mix_block<attn_kind<dim, tiles, q8, whole>>(p, &shared) && whole)                                                                   \
            tail_of<ATTN_WAVES>(read_again(p).tail, 0, read_again(p).tail.rows, &tail);                                                              \
    }
ATTN_KERNEL(attn_few_256, 256, 1, false, true)
ATTN_KERNEL(attn_many_256, 256, 2, false, true)
ATTN_KERNEL(attn_few_128, 128, 1, false, true)
ATTN_KERNEL(attn_many_128, 128, 2, false, true)
ATTN_KERNEL(attn_any, 256, 1, false, false)
ATTN_KERNEL(attn_few_256_q8, 256, 1, true, true)
ATTN_KERNEL(attn_many_256_q8, 256, 2, true, true)
ATTN_KERNEL(attn_few_128_q8, 128, 1, true, true)
ATTN_KERNEL(attn_many_128_q8, 128, 2, true, true)
ATTN_KERNEL(attn_any_q8, 256, 1, true, false)
#undef ATTN_KERNEL

#endif
