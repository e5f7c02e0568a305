/* tests/hip/emu_kernels.hip: kernels for the test of the emulator (test_emulator.c). */
#include "hip/kernels/gpu.h"

#define EMU_DEVICE __attribute__((device))
EMU_DEVICE static inline float word_float(uint32_t w)
{
    return __builtin_bit_cast(float, w);
}
EMU_DEVICE static inline uint32_t float_word(float f)
{
    return __builtin_bit_cast(uint32_t, f);
}
EMU_DEVICE static inline half half_at(uint32_t w)
{
    return __builtin_bit_cast(half, (uint16_t)w);
}
EMU_DEVICE static inline uint32_t half_word(half h)
{
    return __builtin_bit_cast(uint16_t, h);
}
#include "tests/hip/emu_cases.h"

/* ---- expressions ---- */

#define CASES_BEGIN(name)                                                                                                                            \
    KERNEL(256) name(struct case_params k)                                                                                                           \
    {                                                                                                                                                \
        const uint32_t i = bid_x() * 256 + tid_x();                                                                                                  \
        if (i >= k.n)                                                                                                                                \
            return;                                                                                                                                  \
        const uint32_t a = k.a[i], b = k.b[i], c = k.c[i];                                                                                           \
        const float f = word_float(a), g = word_float(b), h = word_float(c);                                                                         \
        const half p = half_at(a), q = half_at(b), r = half_at(c);                                                                                   \
        const uint64_t x = (uint64_t)b << 32 | a, y = (uint64_t)a << 32 | c;                                                                         \
        uint32_t *out = k.out + i;                                                                                                                   \
        (void)f, (void)g, (void)h, (void)p, (void)q, (void)r, (void)x, (void)y, (void)c, (void)b;

#define RUN_WORD(name, expression)                                                                                                                   \
    *out = (expression);                                                                                                                             \
    out += k.n;
#define RUN_FLOAT(name, expression)                                                                                                                  \
    *out = float_word(expression);                                                                                                                   \
    out += k.n;
#define RUN_HALF(name, expression)                                                                                                                   \
    *out = half_word(expression);                                                                                                                    \
    out += k.n;
#define RUN_LONG(name, expression)                                                                                                                   \
    {                                                                                                                                                \
        const uint64_t d = (expression);                                                                                                             \
        out[0] = (uint32_t)d;                                                                                                                        \
        out[k.n] = (uint32_t)(d >> 32);                                                                                                              \
        out += 2 * k.n;                                                                                                                              \
    }

CASES_BEGIN(words) WORD_CASES(RUN_WORD) }
CASES_BEGIN(longs) LONG_CASES(RUN_LONG) }
CASES_BEGIN(floats) FLOAT_CASES(RUN_FLOAT) }
CASES_BEGIN(finites) FINITE_CASES(RUN_FLOAT) }
CASES_BEGIN(halves) HALF_CASES(RUN_HALF) }
CASES_BEGIN(closes) CLOSE_CASES(RUN_FLOAT) }

/* The same on values that are the same for the whole wave: scalar instructions. One case for each workgroup's first lane. */
KERNEL(32) words_scalar(struct case_params k)
{
    const uint32_t i = bid_x();
    const uint32_t a = k.a[i], b = k.b[i], c = k.c[i];
    uint32_t *out = k.out + i;
    WORD_CASES(RUN_WORD)
}

KERNEL(32) longs_scalar(struct case_params k)
{
    const uint32_t i = bid_x();
    const uint32_t a = k.a[i], b = k.b[i], c = k.c[i];
    const uint64_t x = (uint64_t)b << 32 | a, y = (uint64_t)a << 32 | c;
    uint32_t *out = k.out + i;
    LONG_CASES(RUN_LONG)
}

KERNEL(32) floats_scalar(struct case_params k)
{
    const uint32_t i = bid_x();
    const uint32_t a = k.a[i], b = k.b[i];
    const float f = word_float(a), g = word_float(b), h = word_float(k.c[i]);
    uint32_t *out = k.out + i;
    FLOAT_CASES(RUN_FLOAT)
}

/* ---- memory ---- */

/* Every size of load and store, at every alignment that the type allows: out = in, in pieces. */
KERNEL(32) pieces(struct plain_params k)
{
    const uint32_t t = tid_x();
    uint32_t *words = (uint32_t *)k.out;
    const uint8_t *in = k.in;
    words[t] = in[t];
    words[32 + t] = (uint32_t)((const int8_t *)in)[t];
    words[64 + t] = ((const uint16_t *)in)[t];
    words[96 + t] = (uint32_t)((const int16_t *)in)[t];
    words[128 + t] = (uint32_t)in[t] << 16 | in[t + 1];                                                      /* d16_hi */
    words[160 + t] = (uint32_t)((const uint16_t *)in)[2 * t] | (uint32_t)((const uint16_t *)in)[t] << 16;     /* d16 */
    const u32x4_t v = ((const u32x4_t *)in)[t];
    ((u32x4_t *)(words + 192))[31 - t] = v;                                                                   /* b128 */
    struct three {
        uint32_t x, y, z;
    };
    const struct three s = ((const struct three *)in)[t];                                                     /* b96 */
    ((struct three *)(words + 320))[t] = (struct three){s.z, s.x, s.y};
    ((uint64_t *)(words + 416))[t] = ((const uint64_t *)in)[t] + 1;                                           /* b64 */
    k.out[4 * 480 + t] = (uint8_t)(in[t] + 1);                                                                /* b8 */
    ((uint16_t *)(k.out + 4 * 480 + 32))[t] = (uint16_t)(((const uint16_t *)in)[t] >> 1);                     /* b16 */
    k.out[4 * 480 + 96 + t] = (uint8_t)(v.x >> 16);                                                           /* d16_hi_b8 */
    ((uint16_t *)(k.out + 4 * 480 + 128))[t] = (uint16_t)(v.y >> 16);                                         /* d16_hi_b16 */
}

/* Through LDS in all sizes; the result is the input again, bytes of a workgroup reversed in words. */
KERNEL(256) lds_sizes(struct plain_params k)
{
    SHARED uint32_t tile[2048] __attribute__((aligned(16)));
    const uint32_t t = tid_x();
    const uint32_t *in = (const uint32_t *)k.in + bid_x() * 256;
    uint32_t *out = (uint32_t *)k.out + bid_x() * 2048;
    uint8_t *bytes = (uint8_t *)tile;
    uint16_t *shorts = (uint16_t *)tile;
    bytes[t] = (uint8_t)in[t];
    shorts[128 + t] = (uint16_t)(in[t] >> 16);
    tile[256 + t] = in[t];
    tile[512 + t] = in[t] + 1; /* two addresses at once */
    ((uint64_t *)(tile + 768))[t] = (uint64_t)in[t] << 32 | t;
    if (t < 64)
        *(u32x4_t *)(tile + 1280 + 4 * t) = u32x4_t{in[t], in[t] + 1, in[t] + 2, in[t] + 3};
    tile[1536 + t] = 0;
    tile[1792 + t] = 0;
    sync_threads();
    const uint32_t u = 255 - t;
    out[t] = bytes[u] + ((uint32_t)(int8_t)bytes[t] << 16);
    out[256 + t] = shorts[128 + u] + (uint32_t)(int16_t)shorts[128 + t];
    out[512 + t] = tile[256 + u] ^ tile[512 + t];
    const uint64_t wide = ((const uint64_t *)(tile + 768))[u];
    out[768 + t] = (uint32_t)(wide >> 32) + (uint32_t)wide;
    const u32x4_t four = *(const u32x4_t *)(tile + 1280 + 4 * (u & 63));
    out[1024 + t] = four.x ^ four.y ^ four.z ^ four.w;
    out[1280 + t] = tile[256 + (t & 127)] + tile[256 + 64 + (t & 127)];
    __hip_atomic_fetch_add(&tile[1536 + (t & 7)], in[t], __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
    __hip_atomic_fetch_max(&tile[1792 + (t & 7)], in[t], __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
    sync_threads();
    out[1536 + t] = tile[1536 + (t & 7)];
    out[1792 + t] = tile[1792 + (t & 7)];
}

/* Inclusive prefix sums of 256 words: shuffles in the wave, LDS between waves. */
KERNEL(256) prefix(struct plain_params k)
{
    SHARED uint32_t totals[8];
    const uint32_t t = tid_x(), lane = lane_id(), wave = t >> 5;
    uint32_t v = ((const uint32_t *)k.in)[bid_x() * 256 + t];
    for (uint32_t d = 1; d < 32; d *= 2) {
        const uint32_t other = (uint32_t)shfl_i((int)v, (int)(lane - d));
        v += lane >= d ? other : 0;
    }
    if (lane == 31)
        totals[wave] = v;
    sync_threads();
    for (uint32_t w = 0; w < wave; w++)
        v += totals[w];
    ((uint32_t *)k.out)[bid_x() * 256 + t] = v;
}

/* Shuffles, as words: out[row][lane]. */
KERNEL(32) lanes(struct plain_params k)
{
    const uint32_t t = tid_x();
    const int v = ((const int *)k.in)[t];
    int *out = (int *)k.out + t;
    *out = shfl_xor_i<1>(v), out += 32;
    *out = shfl_xor_i<2>(v), out += 32;
    *out = shfl_xor_i<4>(v), out += 32;
    *out = shfl_xor_i<8>(v), out += 32;
    *out = shfl_xor_i<16>(v), out += 32;
    *out = shfl_i(v, (int)(31 - t)), out += 32;
    *out = __builtin_amdgcn_update_dpp(0, v, 0x1b, 0xf, 0xf, true), out += 32;     /* quad_perm 3,2,1,0 */
    *out = __builtin_amdgcn_update_dpp(7, v, 0x111, 0xf, 0xf, false), out += 32;   /* row_shr:1, what is missing stays 7 */
    *out = __builtin_amdgcn_update_dpp(7, v, 0x101, 0xf, 0xf, true), out += 32;    /* row_shl:1, what is missing is 0 */
    *out = __builtin_amdgcn_update_dpp(0, v, 0x123, 0xf, 0xf, true), out += 32;    /* row_ror:3 */
    *out = __builtin_amdgcn_update_dpp(0, v, 0x140, 0xf, 0xf, true), out += 32;    /* row_mirror */
    *out = __builtin_amdgcn_update_dpp(0, v, 0x141, 0xf, 0xf, true), out += 32;    /* row_half_mirror */
    *out = __builtin_amdgcn_update_dpp(0, v, 0x155, 0xf, 0xf, true), out += 32;    /* row_share:5 */
    *out = __builtin_amdgcn_update_dpp(9, v, 0xe4, 0x5, 0x3, false), out += 32;    /* only some rows and banks are written */
    *out = __builtin_amdgcn_readlane(v, 13) + __builtin_amdgcn_readfirstlane(v), out += 32;
    *out = (int)__builtin_amdgcn_ballot_w32(v & 1), out += 32;
    if (v & 2) /* lanes that are off do not take part */
        *out = (int)__builtin_amdgcn_ballot_w32(true) + shfl_i(v, (int)((t + 1) & 31));
    else
        *out = -1;
}

/* Atomics on out[0..7]; what came back, per thread, behind. */
KERNEL(256) atomics(struct plain_params k)
{
    const uint32_t t = bid_x() * 256 + tid_x(), v = ((const uint32_t *)k.in)[t];
    uint32_t *out = (uint32_t *)k.out;
    const uint32_t ticket = __hip_atomic_fetch_add(&out[0], 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    __hip_atomic_fetch_max(&out[1], v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    __hip_atomic_fetch_min(&out[2], v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    __hip_atomic_fetch_xor(&out[3], v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    __hip_atomic_fetch_or(&out[4], v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    __hip_atomic_fetch_max((int *)&out[5], (int)v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    atomic_add_f((float *)&out[6], 1.0f);
    __hip_atomic_fetch_add((uint64_t *)&out[8], (uint64_t)v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    out[16 + ticket] = v;
}

/* out = sums of four products of bytes, both signs of signedness. */
KERNEL(256) dots(struct case_params k)
{
    const uint32_t i = bid_x() * 256 + tid_x();
    if (i >= k.n)
        return;
    const int a = (int)k.a[i], b = (int)k.b[i], c = (int)k.c[i];
    k.out[i] = (uint32_t)dot4_ss(a, b, c);
    k.out[k.n + i] = (uint32_t)dot4_us(a, b, c);
    k.out[2 * k.n + i] = (uint32_t)__builtin_amdgcn_sudot4(true, a, true, b, c, true);
    k.out[3 * k.n + i] = (uint32_t)__builtin_amdgcn_sudot4(false, a, false, b, c, false);
}

/* in: A [16][16] bytes, B [16][16] bytes by column (B[n][k]); then the same as halves. out: A * B + C of int32, C = row * 1000; then of float. */
KERNEL(32) matrices(struct plain_params k)
{
    const uint32_t row = lane_id() & 15, k0 = wmma_ab_k0();
    const int8_t *a = (const int8_t *)k.in + row * 16 + k0, *b = a + 256;
    wmma_i8_t ia, ib;
    for (int i = 0; i < WMMA_AB_K / 4; i++) {
        ia[i] = ((const int *)a)[i];
        ib[i] = ((const int *)b)[i];
    }
    i32x8_t ic;
    for (uint32_t i = 0; i < 8; i++)
        ic[i] = (int)wmma_c_row(i) * 1000;
    const i32x8_t id = wmma_i8(ia, ib, ic), iu = wmma_i8_us(ia, ib, ic);
    const half *ha = (const half *)(k.in + 512) + row * 16 + k0, *hb = ha + 256;
    wmma_h_t fa, fb;
    for (int i = 0; i < WMMA_AB_K; i++) {
        fa[i] = ha[i];
        fb[i] = hb[i];
    }
    f32x8_t fc;
    for (uint32_t i = 0; i < 8; i++)
        fc[i] = (float)wmma_c_row(i);
    const f32x8_t fd = wmma_f16(fa, fb, fc);
    for (uint32_t i = 0; i < 8; i++) {
        const uint32_t at = wmma_c_row(i) * 16 + wmma_c_col();
        ((int *)k.out)[at] = id[i];
        ((int *)k.out)[256 + at] = iu[i];
        ((float *)k.out)[512 + at] = fd[i];
    }
}

/* A table in the code object, and where a workgroup is. */
static __attribute__((device)) const uint32_t table[64] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7, 9, 5};

KERNEL(64) places(struct plain_params k)
{
    const uint32_t at = (bid_z() * k.n + bid_y()) * k.extra + bid_x();
    ((uint32_t *)k.out)[at * 64 + tid_x()] = bid_x() | bid_y() << 8 | bid_z() << 16 | table[(tid_x() + at) & 31] << 24;
}

/* Packed halves: two at a time. */
KERNEL(32) pairs(struct plain_params k)
{
    typedef half half2 __attribute__((ext_vector_type(2)));
    const uint32_t t = tid_x();
    const half2 *in = (const half2 *)k.in;
    const half2 a = in[t], b = in[32 + t], c = in[64 + t];
    half2 *out = (half2 *)k.out + t;
    out[0] = a + b;
    out[32] = a * b;
    out[64] = __builtin_elementwise_fma(a, b, c);
    out[96] = a * b.yx - c;
    out[128] = a * half2{b.x, b.x};
    out[160] = a * (half)2.0f + (half)1.0f;
    out[192] = -a;
}

/* ---- mistakes ---- */

/* Reverses 256 words through LDS, or with n moves them by a wave, and forgets the barrier. */
KERNEL(256) no_barrier(struct plain_params k)
{
    SHARED uint32_t tile[256];
    const uint32_t t = tid_x();
    tile[t] = ((const uint32_t *)k.in)[t];
    sync_wave();
    ((uint32_t *)k.out)[t] = tile[k.n ? (t - 32) & 255 : 255 - t];
}

/* Stores n words, whatever the buffer holds. */
KERNEL(32) store_n(struct plain_params k)
{
    for (uint32_t i = tid_x(); i < k.n; i += 32)
        ((uint32_t *)k.out)[i] = i;
}

KERNEL(32) load_n(struct plain_params k)
{
    uint32_t sum = 0;
    for (uint32_t i = tid_x(); i < k.n; i += 32)
        sum += ((const uint32_t *)k.in)[i];
    ((uint32_t *)k.out)[tid_x()] = sum;
}

KERNEL(32) lds_too_far(struct plain_params k)
{
    SHARED uint32_t tile[64];
    tile[tid_x() + k.extra] = tid_x();
    sync_threads();
    ((uint32_t *)k.out)[tid_x()] = tile[tid_x()];
}

/* Half the waves leave before the barrier. */
KERNEL(128) barrier_for_some(struct plain_params k)
{
    SHARED uint32_t tile[128];
    tile[tid_x()] = tid_x();
    if (tid_x() >= k.n)
        return;
    sync_threads();
    ((uint32_t *)k.out)[tid_x()] = tile[127 - tid_x()];
}

/* gfx11 wants lanes 16 to 31 of a matrix operand to be the same as 0 to 15. */
KERNEL(32) wrong_matrix_lanes(struct plain_params k)
{
    wmma_i8_t a, b;
    i32x8_t c;
    for (int i = 0; i < WMMA_AB_K / 4; i++)
        a[i] = b[i] = ((const int *)k.in)[lane_id() * 4 + (uint32_t)i];
    for (int i = 0; i < 8; i++)
        c[i] = 0;
    c = wmma_i8(a, b, c);
    ((int *)k.out)[lane_id()] = c[0];
}
