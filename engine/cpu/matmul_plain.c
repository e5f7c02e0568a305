/* engine/cpu/matmul_plain.c: the integer kernels in plain C, readable beside spec/gguf.md section 3. Every other kernel must give these bits. */
#include "engine/cpu/matmul_impl.h"

#include <math.h>

/* q = round-half-even(x / d), at most 127 in magnitude; d as the two forms define it. Divides (rather than multiplying by 1/d) because a quotient is
 * correctly rounded everywhere. */
static int8_t quantise(float x, float d)
{
    float q = rintf(x / d);
    if (q > 127.0f)
        q = 127.0f; /* only where d is subnormal and therefore coarse */
    if (q < -127.0f)
        q = -127.0f;
    return (int8_t)q;
}

/* The first value of largest magnitude. Compared as integers, so that infinities and NaNs come out on top. */
static float largest(const float *x, int n)
{
    uint32_t best = 0;
    float value = 0;
    for (int i = 0; i < n; i++) {
        uint32_t bits = bits_of_f32(x[i]) & 0x7fffffffu;
        if (bits > best) {
            best = bits;
            value = x[i];
        }
    }
    return value;
}

void act_256_plain(const float *x, int64_t n, struct act_256 *dst)
{
    for (int64_t b = 0; b < n / 256; b++, x += 256, dst++) {
        memset(dst, 0, sizeof *dst);
        float top = largest(x, 256);
        if (!isfinite(top)) {
            dst->d = NAN;
            continue;
        }
        float d = top / -127.0f;
        if (d == 0)
            continue;
        dst->d = d;
        for (int i = 0; i < 256; i++) {
            int8_t q = quantise(x[i], d);
            dst->q[i] = q;
            dst->sum16[i / 16] = (int16_t)(dst->sum16[i / 16] + q);
            dst->sum32[i / 32] = (int16_t)(dst->sum32[i / 32] + q);
        }
    }
}

void act_32_plain(const float *x, int64_t n, void *dst)
{
    struct act_32 at = act_32_at(dst, n);
    int8_t *q = dst;
    float *d_out = (float *)(void *)((uint8_t *)dst + ((const uint8_t *)at.d - (const uint8_t *)dst));
    int32_t *sum = (int32_t *)(void *)((uint8_t *)dst + ((const uint8_t *)at.sum - (const uint8_t *)dst));
    for (int64_t b = 0; b < n / 32; b++) {
        float top = fabsf(largest(x + b * 32, 32));
        float d = top / 127.0f;
        sum[b] = 0;
        d_out[b] = isfinite(top) ? f16_to_f32(f32_to_f16(d)) : NAN;
        for (int i = 0; i < 32; i++) {
            q[b * 32 + i] = isfinite(top) && d != 0 ? quantise(x[b * 32 + i], d) : 0;
            sum[b] += q[b * 32 + i];
        }
    }
}

/* A weight block as integers: value i = scale[i / group] * v[i] - min[i / 32], times the block's d and dmin. */
struct unpacked {
    int8_t v[256];
    int group; /* values per scale: 16 or 32 */
    int32_t scale[16];
    int32_t min[8]; /* with has_min */
    bool has_min;
    float d, dmin;
};

/* Six-bit scales and minima of Q4_K and Q5_K. */
static void unpack_k_scales(const uint8_t *s, struct unpacked *u)
{
    for (int j = 0; j < 8; j++) {
        if (j < 4) {
            u->scale[j] = s[j] & 63;
            u->min[j] = s[j + 4] & 63;
        } else {
            u->scale[j] = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
            u->min[j] = s[j + 4] >> 4 | (s[j] >> 6) << 4;
        }
    }
}

static void unpack_q4_k(const uint8_t *block, struct unpacked *u)
{
    u->group = 32;
    u->has_min = true;
    u->d = f16_to_f32(load_u16(block));
    u->dmin = f16_to_f32(load_u16(block + 2));
    unpack_k_scales(block + 4, u);
    const uint8_t *q = block + 16;
    for (int g = 0; g < 4; g++) {
        for (int n = 0; n < 32; n++) {
            u->v[64 * g + n] = (int8_t)(q[32 * g + n] & 15);
            u->v[64 * g + 32 + n] = (int8_t)(q[32 * g + n] >> 4);
        }
    }
}

static void unpack_q5_k(const uint8_t *block, struct unpacked *u)
{
    u->group = 32;
    u->has_min = true;
    u->d = f16_to_f32(load_u16(block));
    u->dmin = f16_to_f32(load_u16(block + 2));
    unpack_k_scales(block + 4, u);
    const uint8_t *qh = block + 16, *q = block + 48;
    for (int j = 0; j < 8; j++) {
        for (int n = 0; n < 32; n++) {
            int nibble = j % 2 ? q[32 * (j / 2) + n] >> 4 : q[32 * (j / 2) + n] & 15;
            u->v[32 * j + n] = (int8_t)(nibble | ((qh[n] >> j) & 1) << 4);
        }
    }
}

static void unpack_q6_k(const uint8_t *block, struct unpacked *u)
{
    u->group = 16;
    u->has_min = false;
    u->d = f16_to_f32(load_u16(block + 208));
    for (int k = 0; k < 16; k++)
        u->scale[k] = (int8_t)block[192 + k];
    for (int h = 0; h < 2; h++) {
        const uint8_t *low = block + 64 * h, *high = block + 128 + 32 * h;
        int8_t *v = u->v + 128 * h;
        for (int n = 0; n < 32; n++) {
            v[n] = (int8_t)(((low[n] & 15) | (high[n] & 3) << 4) - 32);
            v[n + 32] = (int8_t)(((low[n + 32] & 15) | (high[n] >> 2 & 3) << 4) - 32);
            v[n + 64] = (int8_t)((low[n] >> 4 | (high[n] >> 4 & 3) << 4) - 32);
            v[n + 96] = (int8_t)((low[n + 32] >> 4 | (high[n] >> 6) << 4) - 32);
        }
    }
}

static void unpack_q8_0(const uint8_t *block, struct unpacked *u)
{
    u->d = f16_to_f32(load_u16(block));
    memcpy(u->v, block + 2, 32);
}

static void unpack_q4_0(const uint8_t *block, struct unpacked *u)
{
    u->d = f16_to_f32(load_u16(block));
    for (int n = 0; n < 16; n++) {
        u->v[n] = (int8_t)((block[2 + n] & 15) - 8);
        u->v[n + 16] = (int8_t)((block[2 + n] >> 4) - 8);
    }
}

static int32_t dot(const int8_t *a, const int8_t *b, int n)
{
    int32_t sum = 0;
    for (int i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

static float add_256(const struct unpacked *u, const struct act_256 *x, float y)
{
    int32_t isum = 0, msum = 0;
    for (int k = 0; k < 256 / u->group; k++)
        isum += u->scale[k] * dot(u->v + k * u->group, x->q + k * u->group, u->group);
    y = fmaf(x->d * u->d, (float)isum, y);
    if (u->has_min) {
        for (int j = 0; j < 8; j++)
            msum += u->min[j] * x->sum32[j];
        y = fmaf(-(x->d * u->dmin), (float)msum, y);
    }
    return y;
}

/* The sums of one weight row with up to PASS activation rows; a block is unpacked once for all of them. */
enum { PASS = 64 };

static void row_256(const struct matmul_job *job, const uint8_t *w, const void *const *x, int n_rows, float *sum)
{
    struct unpacked u;
    size_t bytes = block_bytes(job->type, 256);
    for (int64_t b = 0; b < job->n_in / 256; b++, w += bytes) {
        switch (job->type) {
        case BLOCK_Q4_K:
            unpack_q4_k(w, &u);
            break;
        case BLOCK_Q5_K:
            unpack_q5_k(w, &u);
            break;
        default:
            unpack_q6_k(w, &u);
            break;
        }
        for (int r = 0; r < n_rows; r++)
            sum[r] = add_256(&u, (const struct act_256 *)x[r] + b, sum[r]);
    }
}

static void row_32(const struct matmul_job *job, const uint8_t *w, const void *const *x, int n_rows, float *sum)
{
    struct unpacked u;
    size_t bytes = block_bytes(job->type, 32);
    for (int64_t b = 0; b < job->n_in / 32; b++, w += bytes) {
        if (job->type == BLOCK_Q8_0)
            unpack_q8_0(w, &u);
        else
            unpack_q4_0(w, &u);
        for (int r = 0; r < n_rows; r++) {
            struct act_32 act = act_32_at(x[r], job->n_in);
            sum[r] = fmaf(act.d[b] * u.d, (float)dot(u.v, act.q + b * 32, 32), sum[r]);
        }
    }
}

void matmul_int_plain(const struct matmul_job *job)
{
    bool wide = act_kind_of(job->type) == ACT_Q8_256;
    for (int r0 = 0; r0 < job->n_rows; r0 += PASS) {
        int n_rows = job->n_rows - r0 < PASS ? job->n_rows - r0 : PASS;
        for (int64_t i = 0; i < job->n_out; i++) {
            float sum[PASS] = {0};
            const uint8_t *w = job->w + (size_t)i * job->row_bytes;
            if (wide)
                row_256(job, w, job->x + r0, n_rows, sum);
            else
                row_32(job, w, job->x + r0, n_rows, sum);
            for (int r = 0; r < n_rows; r++) {
                float *y = job->y[r0 + r] + job->o0 + i;
                *y = job->add ? *y + sum[r] : sum[r];
            }
        }
    }
}

/* The sixteen partial sums are part of the definition: they are the lanes of one wide register, or of two or four narrower ones. */
void matmul_dot_plain(const struct dot_job *job)
{
    for (int r = 0; r < job->n_rows; r++) {
        const float *x = job->x[r];
        for (int k = 0; k < job->n_w; k++) {
            const uint8_t *w = job->w[k];
            float p[16] = {0};
            for (int64_t i = 0; i < job->n; i++)
                p[i % 16] = fmaf(f32_of_bits(load_u32(w + i * 4)), x[i], p[i % 16]);
            for (int half = 8; half >= 1; half /= 2) {
                for (int i = 0; i < half; i++)
                    p[i] += p[i + half];
            }
            float *y = job->y[r] + job->o0 + k;
            *y = job->add ? *y + p[0] : p[0];
        }
    }
}
