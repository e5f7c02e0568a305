#include "engine/blocks.h"

#include <assert.h>
#include <math.h>
#include <string.h>

/* ---- the type table (spec/gguf.md section 2) ---- */

static const struct block_info infos[] = {
    [BLOCK_F32] = {"F32", 1, 4},
    [BLOCK_F16] = {"F16", 1, 2},
    [BLOCK_Q4_0] = {"Q4_0", 32, 18},
    [BLOCK_Q4_1] = {"Q4_1", 32, 20},
    [BLOCK_Q5_0] = {"Q5_0", 32, 22},
    [BLOCK_Q5_1] = {"Q5_1", 32, 24},
    [BLOCK_Q8_0] = {"Q8_0", 32, 34},
    [9] = {"Q8_1", 0, 0},
    [BLOCK_Q2_K] = {"Q2_K", 256, 84},
    [BLOCK_Q3_K] = {"Q3_K", 256, 110},
    [BLOCK_Q4_K] = {"Q4_K", 256, 144},
    [BLOCK_Q5_K] = {"Q5_K", 256, 176},
    [BLOCK_Q6_K] = {"Q6_K", 256, 210},
    [15] = {"Q8_K", 0, 0},
    [16] = {"IQ2_XXS", 0, 0},
    [17] = {"IQ2_XS", 0, 0},
    [18] = {"IQ3_XXS", 0, 0},
    [19] = {"IQ1_S", 0, 0},
    [BLOCK_IQ4_NL] = {"IQ4_NL", 32, 18},
    [21] = {"IQ3_S", 0, 0},
    [22] = {"IQ2_S", 0, 0},
    [BLOCK_IQ4_XS] = {"IQ4_XS", 256, 136},
    [24] = {"I8", 0, 0},
    [25] = {"I16", 0, 0},
    [26] = {"I32", 0, 0},
    [27] = {"I64", 0, 0},
    [28] = {"F64", 0, 0},
    [29] = {"IQ1_M", 0, 0},
    [BLOCK_BF16] = {"BF16", 1, 2},
    [34] = {"TQ1_0", 0, 0},
    [35] = {"TQ2_0", 0, 0},
    [BLOCK_MXFP4] = {"MXFP4", 32, 17},
    [40] = {"NVFP4", 0, 0},
    [41] = {"Q1_0", 0, 0},
    [42] = {"Q2_0", 0, 0},
};

const struct block_info *block_info(uint32_t type)
{
    if (type >= sizeof infos / sizeof infos[0] || !infos[type].name)
        return NULL;
    return &infos[type];
}

size_t block_bytes(enum block_type type, size_t n)
{
    const struct block_info *info = block_info((uint32_t)type);
    assert(info && info->values && n % info->values == 0);
    return n / info->values * info->bytes;
}

/* ---- half precision ---- */

float f16_to_f32(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 0x3FF, bits;
    if (exponent == 0) {
        float value = (float)fraction * 0x1p-24f; /* zero and subnormals: exact in f32 */
        memcpy(&bits, &value, sizeof bits);
    } else if (exponent == 31) {
        bits = 0x7F800000u | fraction << 13;
    } else {
        bits = (exponent + 112) << 23 | fraction << 13;
    }
    bits |= sign;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

uint16_t f32_to_f16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    bits &= 0x7FFFFFFFu;
    if (bits > 0x7F800000u) /* NaN, made quiet */
        return (uint16_t)(sign | 0x7E00 | (bits >> 13 & 0x3FF));
    if (bits >= 0x47800000u) /* 65536 and more */
        return (uint16_t)(sign | 0x7C00);
    if (bits < 0x38800000u) {
        /* Below the smallest normal half: one unit of a half is then 2^-24, which is also one unit of an f32 in [0.5, 1), so the
         * addition itself rounds to nearest even. */
        float magnitude;
        memcpy(&magnitude, &bits, sizeof magnitude);
        magnitude += 0.5f;
        memcpy(&bits, &magnitude, sizeof bits);
        return (uint16_t)(sign | (bits - 0x3F000000u));
    }
    bits += 0xFFF + (bits >> 13 & 1); /* ties go to the even half; a carry may reach infinity, as it should */
    return (uint16_t)(sign | (bits - 0x38000000u) >> 13);
}

/* ---- one block of each format (spec/gguf.md section 3; p is the block, x its values) ---- */

static uint16_t load_u16(const uint8_t *p)
{
    return (uint16_t)(p[0] | p[1] << 8);
}

static uint32_t load_u32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static float load_f16(const uint8_t *p)
{
    return f16_to_f32(load_u16(p));
}

static void dequant_f32(const uint8_t *p, float *x)
{
    uint32_t bits = load_u32(p);
    memcpy(x, &bits, sizeof *x);
}

static void dequant_f16(const uint8_t *p, float *x)
{
    *x = load_f16(p);
}

static void dequant_bf16(const uint8_t *p, float *x)
{
    uint32_t bits = (uint32_t)load_u16(p) << 16;
    memcpy(x, &bits, sizeof *x);
}

static void dequant_q8_0(const uint8_t *p, float *x)
{
    float d = load_f16(p);
    for (int n = 0; n < 32; n++)
        x[n] = d * (float)(int8_t)p[2 + n];
}

static void dequant_q4_0(const uint8_t *p, float *x)
{
    float d = load_f16(p);
    for (int n = 0; n < 16; n++) {
        x[n] = d * (float)((p[2 + n] & 15) - 8);
        x[n + 16] = d * (float)((p[2 + n] >> 4) - 8);
    }
}

static void dequant_q4_1(const uint8_t *p, float *x)
{
    float d = load_f16(p), m = load_f16(p + 2);
    for (int n = 0; n < 16; n++) {
        x[n] = d * (float)(p[4 + n] & 15) + m;
        x[n + 16] = d * (float)(p[4 + n] >> 4) + m;
    }
}

static void dequant_q5_0(const uint8_t *p, float *x)
{
    float d = load_f16(p);
    uint32_t high = load_u32(p + 2);
    for (int n = 0; n < 16; n++) {
        int low_half = (p[6 + n] & 15) | (int)(high >> n & 1) << 4;
        int high_half = (p[6 + n] >> 4) | (int)(high >> (n + 16) & 1) << 4;
        x[n] = d * (float)(low_half - 16);
        x[n + 16] = d * (float)(high_half - 16);
    }
}

static void dequant_q5_1(const uint8_t *p, float *x)
{
    float d = load_f16(p), m = load_f16(p + 2);
    uint32_t high = load_u32(p + 4);
    for (int n = 0; n < 16; n++) {
        int low_half = (p[8 + n] & 15) | (int)(high >> n & 1) << 4;
        int high_half = (p[8 + n] >> 4) | (int)(high >> (n + 16) & 1) << 4;
        x[n] = d * (float)low_half + m;
        x[n + 16] = d * (float)high_half + m;
    }
}

/* The values of the four-bit "non-linear" formats IQ4_NL and IQ4_XS. */
static const int8_t iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

static void dequant_iq4_nl(const uint8_t *p, float *x)
{
    float d = load_f16(p);
    for (int n = 0; n < 16; n++) {
        x[n] = d * (float)iq4_values[p[2 + n] & 15];
        x[n + 16] = d * (float)iq4_values[p[2 + n] >> 4];
    }
}

static void dequant_mxfp4(const uint8_t *p, float *x)
{
    static const float values[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};
    int exponent = p[0] - 127;
    for (int n = 0; n < 16; n++) { /* ldexpf is exact, also where 2^-127 itself is subnormal */
        x[n] = ldexpf(values[p[1 + n] & 15], exponent);
        x[n + 16] = ldexpf(values[p[1 + n] >> 4], exponent);
    }
}

/* Six-bit scale and minimum of sub-block j (0..7) of Q4_K and Q5_K, packed in s[12]. */
static void k4_scale(const uint8_t *s, int j, int *scale, int *min)
{
    if (j < 4) {
        *scale = s[j] & 63;
        *min = s[j + 4] & 63;
    } else {
        *scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
        *min = s[j + 4] >> 4 | (s[j] >> 6) << 4;
    }
}

static void dequant_q4_k(const uint8_t *p, float *x)
{
    float d = load_f16(p), dmin = load_f16(p + 2);
    for (int j = 0; j < 8; j++) {
        int sc, m, shift = j % 2 * 4;
        k4_scale(p + 4, j, &sc, &m);
        float scale = d * (float)sc, min = dmin * (float)m;
        const uint8_t *q = p + 16 + j / 2 * 32;
        for (int n = 0; n < 32; n++)
            x[32 * j + n] = scale * (float)(q[n] >> shift & 15) - min;
    }
}

static void dequant_q5_k(const uint8_t *p, float *x)
{
    float d = load_f16(p), dmin = load_f16(p + 2);
    const uint8_t *high = p + 16;
    for (int j = 0; j < 8; j++) {
        int sc, m, shift = j % 2 * 4;
        k4_scale(p + 4, j, &sc, &m);
        float scale = d * (float)sc, min = dmin * (float)m;
        const uint8_t *q = p + 48 + j / 2 * 32;
        for (int n = 0; n < 32; n++)
            x[32 * j + n] = scale * (float)((q[n] >> shift & 15) | (high[n] >> j & 1) << 4) - min;
    }
}

static void dequant_q6_k(const uint8_t *p, float *x)
{
    float d = load_f16(p + 208);
    const uint8_t *scales = p + 192;
    for (int h = 0; h < 2; h++) {
        const uint8_t *low = p + 64 * h, *high = p + 128 + 32 * h;
        for (int n = 0; n < 32; n++) {
            int v[4] = {
                (low[n] & 15) | (high[n] & 3) << 4,
                (low[n + 32] & 15) | (high[n] >> 2 & 3) << 4,
                low[n] >> 4 | (high[n] >> 4 & 3) << 4,
                low[n + 32] >> 4 | (high[n] >> 6) << 4,
            };
            for (int plane = 0; plane < 4; plane++) {
                int i = 128 * h + 32 * plane + n;
                x[i] = d * (float)(int8_t)scales[i / 16] * (float)(v[plane] - 32);
            }
        }
    }
}

static void dequant_q3_k(const uint8_t *p, float *x)
{
    float d = load_f16(p + 108);
    const uint8_t *mask = p, *q = p + 32, *s = p + 96;
    for (int k = 0; k < 16; k++) {
        int low = k < 8 ? s[k] & 15 : s[k - 8] >> 4;
        int high = s[8 + k % 4] >> (2 * (k / 4)) & 3;
        float scale = d * (float)((low | high << 4) - 32);
        int half = k / 8, plane = k / 2 % 4; /* value index is 128 half + 32 plane + n */
        for (int i = 0; i < 16; i++) {
            int n = k % 2 * 16 + i;
            int bits = q[32 * half + n] >> (2 * plane) & 3;
            int set = mask[n] >> (4 * half + plane) & 1;
            x[16 * k + i] = scale * (float)(bits - (set ? 0 : 4));
        }
    }
}

static void dequant_q2_k(const uint8_t *p, float *x)
{
    float d = load_f16(p + 80), dmin = load_f16(p + 82);
    const uint8_t *s = p, *q = p + 16;
    for (int k = 0; k < 16; k++) {
        float scale = d * (float)(s[k] & 15), min = dmin * (float)(s[k] >> 4);
        int half = k / 8, plane = k / 2 % 4;
        for (int i = 0; i < 16; i++)
            x[16 * k + i] = scale * (float)(q[32 * half + k % 2 * 16 + i] >> (2 * plane) & 3) - min;
    }
}

static void dequant_iq4_xs(const uint8_t *p, float *x)
{
    float d = load_f16(p);
    int high = load_u16(p + 2);
    const uint8_t *low = p + 4;
    for (int j = 0; j < 8; j++) {
        float scale = d * (float)(((low[j / 2] >> (j % 2 * 4) & 15) | (high >> (2 * j) & 3) << 4) - 32);
        const uint8_t *q = p + 8 + 16 * j;
        for (int n = 0; n < 16; n++) {
            x[32 * j + n] = scale * (float)iq4_values[q[n] & 15];
            x[32 * j + n + 16] = scale * (float)iq4_values[q[n] >> 4];
        }
    }
}

static void (*block_function(enum block_type type))(const uint8_t *, float *)
{
    switch (type) {
    case BLOCK_F32:
        return dequant_f32;
    case BLOCK_F16:
        return dequant_f16;
    case BLOCK_BF16:
        return dequant_bf16;
    case BLOCK_Q4_0:
        return dequant_q4_0;
    case BLOCK_Q4_1:
        return dequant_q4_1;
    case BLOCK_Q5_0:
        return dequant_q5_0;
    case BLOCK_Q5_1:
        return dequant_q5_1;
    case BLOCK_Q8_0:
        return dequant_q8_0;
    case BLOCK_Q2_K:
        return dequant_q2_k;
    case BLOCK_Q3_K:
        return dequant_q3_k;
    case BLOCK_Q4_K:
        return dequant_q4_k;
    case BLOCK_Q5_K:
        return dequant_q5_k;
    case BLOCK_Q6_K:
        return dequant_q6_k;
    case BLOCK_IQ4_NL:
        return dequant_iq4_nl;
    case BLOCK_IQ4_XS:
        return dequant_iq4_xs;
    case BLOCK_MXFP4:
        return dequant_mxfp4;
    }
    return NULL;
}

void block_dequant(enum block_type type, const void *src, float *dst, size_t n)
{
    const struct block_info *info = block_info((uint32_t)type);
    void (*one)(const uint8_t *, float *) = block_function(type);
    assert(info && one && n % info->values == 0);
    const uint8_t *p = src;
    for (size_t i = 0; i < n; i += info->values, p += info->bytes)
        one(p, dst + i);
}

/* ---- quantising ---- */

/* Magnitudes are compared as integers, so that infinities and NaNs come out on top. */
static float largest_magnitude(const float *x, size_t n)
{
    uint32_t top = 0;
    float value;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        bits &= 0x7fffffffU;
        top = bits > top ? bits : top;
    }
    memcpy(&value, &top, sizeof value);
    return value;
}

void block_quant_q8_0(const float *x, size_t n, void *dst)
{
    const size_t values = infos[BLOCK_Q8_0].values, bytes = infos[BLOCK_Q8_0].bytes;
    uint8_t *block = dst;
    assert(n % values == 0);
    for (size_t b = 0; b < n / values; b++, x += values, block += bytes) {
        uint16_t half = f32_to_f16(largest_magnitude(x, values) / 127.0F);
        const float d = f16_to_f32(half);
        if (!isfinite(d))
            half = f32_to_f16(NAN);
        memcpy(block, &half, sizeof half);
        memset(block + sizeof half, 0, values);
        for (size_t i = 0; i < values && d > 0 && isfinite(d); i++) {
            const float q = rintf(x[i] / d); /* beyond 127 only where d is subnormal and therefore coarse */
            block[2 + i] = (uint8_t)(int8_t)fmaxf(-127.0F, fminf(127.0F, q));
        }
    }
}
