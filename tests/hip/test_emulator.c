/* The emulator gives the CPU's bits for what the compiler makes of ordinary expressions, moves data through memory, LDS and lanes as the GPUs do, on all
 * three kinds of instruction set; it stops kernels that make a mistake and says which; and it fails where a test wants it to. */
#include "tests/hip/hip_test.h"

#include <math.h>
#include <stdbool.h>

#include "hip/runtime.h"
#include "tests/hip/emu/counters.h"

typedef _Float16 half;
#define EMU_DEVICE

static inline float word_float(uint32_t w)
{
    float f;
    memcpy(&f, &w, 4);
    return f;
}

static inline uint32_t float_word(float f)
{
    uint32_t w;
    memcpy(&w, &f, 4);
    return w;
}

static inline half half_at(uint32_t w)
{
    const uint16_t bits = (uint16_t)w;
    half h;
    memcpy(&h, &bits, 2);
    return h;
}

static inline uint32_t half_word(half h)
{
    uint16_t bits;
    memcpy(&bits, &h, 2);
    return bits;
}

#include "tests/hip/emu_cases.h"

static struct hip_runtime rt;
static emu_counters_fn *counters;
static emu_reset_counters_fn *reset_counters;
static emu_last_fault_fn *last_fault;
static emu_recover_fn *recover;
static emu_unknown_fn *unknown;
static hip_module module;

/* ---- the device ---- */

static const char *const archs[] = {"gfx1100", "gfx1152", "gfx1201"};
enum { N_ARCHS = 3 };

#define check(call) assert_int_equal((call), 0)

static int set_up(void **state)
{
    (void)state;
    struct error err;
    if (hip_runtime_load(&rt, hip_test_library("emu"), &err) != 0) {
        print_error("%s\n", err.text);
        return -1;
    }
    void *handle = dlopen(rt.library, RTLD_NOW | RTLD_NOLOAD);
    if (!handle)
        return -1;
    const struct {
        const char *name;
        void *place;
    } extra[] = {{"emu_counters", &counters},
                 {"emu_reset_counters", &reset_counters},
                 {"emu_last_fault", &last_fault},
                 {"emu_recover", &recover},
                 {"emu_unknown", &unknown}};
    for (size_t i = 0; i < sizeof extra / sizeof *extra; i++) {
        void *symbol = dlsym(handle, extra[i].name);
        if (!symbol)
            return -1;
        memcpy(extra[i].place, &symbol, sizeof symbol);
    }
    return 0;
}

static char *read_object(const char *arch)
{
    char path[4500];
    snprintf(path, sizeof path, "%s", hip_test_library("emu"));
    char *name = strstr(path, "libamdhip64-emu.so");
    assert_non_null(name);
    snprintf(name, sizeof path - (size_t)(name - path), "emu_kernels_%s.hsaco", arch);
    FILE *f = fopen(path, "rb");
    if (!f)
        return NULL;
    enum { ROOM = 4 << 20 };
    char *image = calloc(1, ROOM);
    assert_non_null(image);
    assert_true(fread(image, 1, ROOM, f) > 64);
    fclose(f);
    return image;
}

static void open_arch(const char *arch)
{
    char *image = read_object(arch);
    if (!image)
        skip(); /* no compiler for GPUs here */
    setenv("EMU_ARCH", arch, 1);
    check(rt.hipModuleLoadData(&module, image));
    free(image);
}

static void close_arch(void)
{
    check(rt.hipModuleUnload(module));
    module = NULL;
}

static void *upload(const void *data, size_t bytes)
{
    void *p;
    check(rt.hipMalloc(&p, bytes));
    if (data)
        check(rt.hipMemcpyAsync(p, data, bytes, HIP_HOST_TO_DEVICE, NULL));
    return p;
}

static void download(void *to, const void *from, size_t bytes)
{
    check(rt.hipMemcpyAsync(to, from, bytes, HIP_DEVICE_TO_HOST, NULL));
    check(rt.hipStreamSynchronize(NULL));
}

static int launch(const char *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned threads, void *params)
{
    hip_function f;
    void *args[] = {params};
    check(rt.hipModuleGetFunction(&f, module, kernel));
    return rt.hipModuleLaunchKernel(f, gx, gy, gz, threads, 1, 1, 0, NULL, args, NULL);
}

/* Runs a kernel on in, and gives its output. */
static void run_plain(const char *kernel, unsigned groups, unsigned threads, const void *in, size_t in_bytes, void *out, size_t out_bytes)
{
    struct plain_params p = {.in = upload(in, in_bytes), .out = upload(out, out_bytes)};
    if (launch(kernel, groups, 1, 1, threads, &p) != 0)
        fail_msg("%s does not start", kernel);
    download(out, p.out, out_bytes);
    check(rt.hipFree((void *)(uintptr_t)p.in));
    check(rt.hipFree(p.out));
}

/* ---- expressions ---- */

enum { N = 1000 };
static uint32_t in_a[N], in_b[N], in_c[N];

static uint32_t next_random(void)
{
    static uint64_t s = 88172645463325252u;
    s ^= s << 13;
    s ^= s >> 7;
    s ^= s << 17;
    return (uint32_t)(s >> 16);
}

enum inputs { ANY_BITS, NUMBERS, SMALL_NUMBERS, HALVES };

static uint32_t input(enum inputs kind)
{
    static const uint32_t corners[] = {0,           1,           0x80000000u, 0x7fffffffu, 0xffffffffu, 0x3f800000u,
                                       0xbf800000u, 0x7f800000u, 0xff800000u, 0x7fc00000u, 0x00800000u, 0x007fffffu,
                                       0x00000100u, 0x7f7fffffu, 0x4b000000u, 0x3f000000u, 0x4effffffu, 0x4f000000u};
    const uint32_t r = next_random();
    switch (kind) {
    case ANY_BITS:
        return r % 5 == 0 ? corners[next_random() % (sizeof corners / sizeof *corners)] : r % 5 == 1 ? next_random() & 255 : next_random();
    case NUMBERS:
        return float_word(((float)(int32_t)next_random() + 0.5f) * (r & 1 ? 0x1p-22f : 0x1p-30f));
    case SMALL_NUMBERS:
        return float_word((float)(int32_t)next_random() * 0x1p-28f + 0.001f);
    case HALVES:
        return half_word((half)((float)(int32_t)next_random() * 0x1p-27f)) | half_word((half)((float)(int32_t)next_random() * 0x1p-30f)) << 16;
    }
    return r;
}

static void fill_inputs(enum inputs kind)
{
    for (int i = 0; i < N; i++) {
        in_a[i] = input(kind);
        in_b[i] = input(kind);
        in_c[i] = input(kind);
    }
}

/* out [words][N] of a kernel over the inputs. */
static uint32_t *run_cases(const char *kernel, int words, bool scalar_values)
{
    const size_t bytes = (size_t)words * N * 4;
    uint32_t *out = malloc(bytes);
    assert_non_null(out);
    struct case_params p = {upload(in_a, sizeof in_a), upload(in_b, sizeof in_b), upload(in_c, sizeof in_c), upload(NULL, bytes), N};
    check(launch(kernel, scalar_values ? N : (N + 255) / 256, 1, 1, scalar_values ? 32 : 256, &p));
    download(out, p.out, bytes);
    check(rt.hipFree((void *)(uintptr_t)p.a));
    check(rt.hipFree((void *)(uintptr_t)p.b));
    check(rt.hipFree((void *)(uintptr_t)p.c));
    check(rt.hipFree(p.out));
    return out;
}

static bool is_nan(uint32_t w)
{
    return (w & 0x7fffffffu) > 0x7f800000u;
}

static bool is_half_nan(uint32_t w)
{
    return (w & 0x7fffu) > 0x7c00u;
}

#define OPERANDS                                                                                                                                     \
    const uint32_t a = in_a[i], b = in_b[i], c = in_c[i];                                                                                            \
    const float f = word_float(a), g = word_float(b), h = word_float(c);                                                                             \
    const half p = half_at(a), q = half_at(b), r = half_at(c);                                                                                       \
    const uint64_t x = (uint64_t)b << 32 | a, y = (uint64_t)a << 32 | c;                                                                             \
    (void)f, (void)g, (void)h, (void)p, (void)q, (void)r, (void)x, (void)y, (void)a, (void)b, (void)c

#define CHECK_CASE(name, wanted, same)                                                                                                               \
    for (int i = 0; i < N; i++) {                                                                                                                    \
        OPERANDS;                                                                                                                                    \
        const uint32_t want = (wanted), got = out[i];                                                                                                \
        if (!(same))                                                                                                                                 \
            fail_msg("%s, %s of %08x %08x %08x: %08x, not %08x", getenv("EMU_ARCH"), #name, a, b, c, got, want);                                     \
    }                                                                                                                                                \
    out += N;
#define CHECK_WORD(name, expression)  CHECK_CASE(name, expression, got == want)
#define CHECK_FLOAT(name, expression) CHECK_CASE(name, float_word(expression), got == want || (is_nan(got) && is_nan(want)))
#define CHECK_HALF(name, expression)  CHECK_CASE(name, half_word(expression), got == want || (is_half_nan(got) && is_half_nan(want)))
#define CHECK_CLOSE(name, expression)                                                                                                                \
    CHECK_CASE(name, float_word(expression), fabsf(word_float(got) - word_float(want)) <= 2e-6f * fabsf(word_float(want)) + 2e-7f)
#define CHECK_LONG(name, expression)                                                                                                                 \
    for (int i = 0; i < N; i++) {                                                                                                                    \
        OPERANDS;                                                                                                                                    \
        const uint64_t want = (expression), got = (uint64_t)out[i] | (uint64_t)out[N + i] << 32;                                                     \
        if (got != want)                                                                                                                             \
            fail_msg("%s, %s of %08x %08x %08x: %016llx, not %016llx", getenv("EMU_ARCH"), #name, a, b, c, (unsigned long long)got,                  \
                     (unsigned long long)want);                                                                                                      \
    }                                                                                                                                                \
    out += 2 * N;

static const uint32_t *check_words(const uint32_t *out)
{
    WORD_CASES(CHECK_WORD)
    return out;
}

static const uint32_t *check_longs(const uint32_t *out)
{
    LONG_CASES(CHECK_LONG)
    return out;
}

static const uint32_t *check_floats(const uint32_t *out)
{
    FLOAT_CASES(CHECK_FLOAT)
    return out;
}

static const uint32_t *check_finites(const uint32_t *out)
{
    FINITE_CASES(CHECK_FLOAT)
    return out;
}

static const uint32_t *check_halves(const uint32_t *out)
{
    HALF_CASES(CHECK_HALF)
    return out;
}

static const uint32_t *check_closes(const uint32_t *out)
{
    CLOSE_CASES(CHECK_CLOSE)
    return out;
}

static void run_and_check(const char *kernel, enum inputs kind, int words, bool scalar_values, const uint32_t *(*checker)(const uint32_t *))
{
    fill_inputs(kind);
    for (int k = 0; k < N_ARCHS; k++) {
        open_arch(archs[k]);
        uint32_t *out = run_cases(kernel, words, scalar_values);
        assert_ptr_equal(checker(out), out + (size_t)words * N);
        free(out);
        close_arch();
    }
}

static void integer_expressions_have_the_cpus_bits(void **state)
{
    (void)state;
    run_and_check("words", ANY_BITS, N_WORD, false, check_words);
    run_and_check("words_scalar", ANY_BITS, N_WORD, true, check_words);
}

static void wide_integer_expressions_have_the_cpus_bits(void **state)
{
    (void)state;
    run_and_check("longs", ANY_BITS, 2 * N_LONG, false, check_longs);
    run_and_check("longs_scalar", ANY_BITS, 2 * N_LONG, true, check_longs);
}

static void float_expressions_have_the_cpus_bits(void **state)
{
    (void)state;
    run_and_check("floats", ANY_BITS, N_FLOAT, false, check_floats);
    run_and_check("floats", NUMBERS, N_FLOAT, false, check_floats);
    run_and_check("floats_scalar", NUMBERS, N_FLOAT, true, check_floats);
    run_and_check("finites", NUMBERS, N_FINITE, false, check_finites);
}

static void half_expressions_have_the_cpus_bits(void **state)
{
    (void)state;
    run_and_check("halves", HALVES, N_HALF, false, check_halves);
}

static void approximations_are_close(void **state)
{
    (void)state;
    run_and_check("closes", SMALL_NUMBERS, N_CLOSE, false, check_closes);
}

/* ---- memory, LDS, lanes ---- */

static void loads_and_stores_of_every_size(void **state)
{
    (void)state;
    uint8_t in[2048], out[4 * 480 + 256];
    for (size_t i = 0; i < sizeof in; i++)
        in[i] = hip_test_byte(i);
    for (int k = 0; k < N_ARCHS; k++) {
        open_arch(archs[k]);
        memset(out, 0, sizeof out);
        run_plain("pieces", 1, 32, in, sizeof in, out, sizeof out);
        uint32_t words[480], raw[512];
        uint16_t shorts[1024];
        memcpy(words, out, sizeof words);
        memcpy(raw, in, sizeof raw);
        memcpy(shorts, in, sizeof shorts);
        for (uint32_t t = 0; t < 32; t++) {
            assert_int_equal(words[t], in[t]);
            assert_int_equal(words[32 + t], (uint32_t)(int8_t)in[t]);
            assert_int_equal(words[64 + t], shorts[t]);
            assert_int_equal(words[96 + t], (uint32_t)(int16_t)shorts[t]);
            assert_int_equal(words[128 + t], (uint32_t)in[t] << 16 | in[t + 1]);
            assert_int_equal(words[160 + t], (uint32_t)shorts[2 * t] | (uint32_t)shorts[t] << 16);
            for (uint32_t i = 0; i < 4; i++)
                assert_int_equal(words[192 + 4 * (31 - t) + i], raw[4 * t + i]);
            assert_int_equal(words[320 + 3 * t], raw[3 * t + 2]);
            assert_int_equal(words[320 + 3 * t + 1], raw[3 * t]);
            assert_int_equal(words[320 + 3 * t + 2], raw[3 * t + 1]);
            const uint64_t wide = ((uint64_t)raw[2 * t + 1] << 32 | raw[2 * t]) + 1;
            assert_int_equal(words[416 + 2 * t], (uint32_t)wide);
            assert_int_equal(words[416 + 2 * t + 1], (uint32_t)(wide >> 32));
            const uint8_t *tail = out + 4 * 480;
            uint16_t got;
            assert_int_equal(tail[t], (uint8_t)(in[t] + 1));
            memcpy(&got, tail + 32 + 2 * t, 2);
            assert_int_equal(got, shorts[t] >> 1);
            assert_int_equal(tail[96 + t], (uint8_t)(raw[4 * t] >> 16));
            memcpy(&got, tail + 128 + 2 * t, 2);
            assert_int_equal(got, raw[4 * t + 1] >> 16);
        }
        close_arch();
    }
}

static void check_lds(const uint32_t *in, const uint32_t *out)
{
    uint32_t sums[8] = {0}, highest[8] = {0};
    for (uint32_t t = 0; t < 256; t++) {
        sums[t & 7] += in[t];
        highest[t & 7] = in[t] > highest[t & 7] ? in[t] : highest[t & 7];
    }
    for (uint32_t t = 0; t < 256; t++) {
        const uint32_t u = 255 - t, v = u & 63;
        const int32_t high = (int32_t)in[t] >> 16;
        assert_int_equal(out[t], (in[u] & 255) + ((uint32_t)(int8_t)in[t] << 16));
        assert_int_equal(out[256 + t], (in[u] >> 16) + (uint32_t)high);
        assert_int_equal(out[512 + t], in[u] ^ (in[t] + 1));
        assert_int_equal(out[768 + t], in[u] + u);
        assert_int_equal(out[1024 + t], in[v] ^ (in[v] + 1) ^ (in[v] + 2) ^ (in[v] + 3));
        assert_int_equal(out[1280 + t], in[t & 127] + in[64 + (t & 127)]);
        assert_int_equal(out[1536 + t], sums[t & 7]);
        assert_int_equal(out[1792 + t], highest[t & 7]);
    }
}

static void lds_of_every_size_and_its_atomics(void **state)
{
    (void)state;
    enum { GROUPS = 5 };
    static uint32_t in[GROUPS * 256], out[GROUPS * 2048];
    for (int i = 0; i < GROUPS * 256; i++)
        in[i] = next_random();
    setenv("EMU_RACES", "1", 1); /* and there is none */
    for (int k = 0; k < N_ARCHS; k++) {
        open_arch(archs[k]);
        run_plain("lds_sizes", GROUPS, 256, in, sizeof in, out, sizeof out);
        for (int g = 0; g < GROUPS; g++)
            check_lds(in + 256 * g, out + 2048 * g);
        close_arch();
    }
    unsetenv("EMU_RACES");
}

static void prefix_sums_cross_waves(void **state)
{
    (void)state;
    enum { GROUPS = 40 };
    static uint32_t in[GROUPS * 256], out[GROUPS * 256];
    for (int i = 0; i < GROUPS * 256; i++)
        in[i] = next_random();
    for (int k = 0; k < N_ARCHS; k++)
        for (int reversed = 0; reversed < 2; reversed++) {
            setenv("EMU_REVERSED", reversed ? "1" : "0", 1);
            open_arch(archs[k]);
            run_plain("prefix", GROUPS, 256, in, sizeof in, out, sizeof out);
            uint32_t sum = 0;
            for (int i = 0; i < GROUPS * 256; i++) {
                sum = (i % 256 ? sum : 0) + in[i];
                assert_int_equal(out[i], sum);
            }
            close_arch();
        }
    unsetenv("EMU_REVERSED");
}

static void lanes_reach_each_other(void **state)
{
    (void)state;
    uint32_t in[32], out[17][32];
    for (int i = 0; i < 32; i++)
        in[i] = next_random();
    for (int k = 0; k < N_ARCHS; k++) {
        open_arch(archs[k]);
        memset(out, 0, sizeof out);
        run_plain("lanes", 1, 32, in, sizeof in, out, sizeof out);
        uint32_t odd = 0, second = 0;
        for (uint32_t t = 0; t < 32; t++) {
            odd |= (in[t] & 1) << t;
            second |= (in[t] >> 1 & 1) << t;
        }
        for (uint32_t t = 0; t < 32; t++) {
            const uint32_t row = t & 16, p = t & 15;
            for (uint32_t m = 0; m < 5; m++)
                assert_int_equal(out[m][t], in[t ^ (1u << m)]);
            assert_int_equal(out[5][t], in[31 - t]);
            assert_int_equal(out[6][t], in[t ^ 3]);
            assert_int_equal(out[7][t], p ? in[t - 1] : 7);
            assert_int_equal(out[8][t], p < 15 ? in[t + 1] : 0);
            assert_int_equal(out[9][t], in[row | ((p - 3) & 15)]);
            assert_int_equal(out[10][t], in[row | (15 - p)]);
            assert_int_equal(out[11][t], in[row | (p & 8) | (7 - (p & 7))]);
            assert_int_equal(out[12][t], in[row | 5]);
            assert_int_equal(out[13][t], !row && p < 8 ? in[t] : 9);
            assert_int_equal(out[14][t], in[13] + in[0]);
            assert_int_equal(out[15][t], odd);
            const uint32_t next = (t + 1) & 31;
            assert_int_equal(out[16][t], in[t] & 2 ? second + (second >> next & 1 ? in[next] : 0) : 0xffffffffu);
        }
        close_arch();
    }
}

static int by_value(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static void atomics_lose_nothing(void **state)
{
    (void)state;
    enum { COUNT = 64 * 256 };
    static uint32_t in[COUNT], out[16 + COUNT];
    for (int i = 0; i < COUNT; i++)
        in[i] = next_random();
    for (int k = 0; k < N_ARCHS; k++) {
        open_arch(archs[k]);
        memset(out, 0, sizeof out);
        out[2] = ~0u;
        out[5] = 0x80000000u;
        run_plain("atomics", COUNT / 256, 256, in, sizeof in, out, sizeof out);
        uint32_t high = 0, low = ~0u, all_xor = 0, all_or = 0;
        int32_t high_signed = INT32_MIN;
        uint64_t sum = 0;
        for (int i = 0; i < COUNT; i++) {
            high = in[i] > high ? in[i] : high;
            low = in[i] < low ? in[i] : low;
            high_signed = (int32_t)in[i] > high_signed ? (int32_t)in[i] : high_signed;
            all_xor ^= in[i];
            all_or |= in[i];
            sum += in[i];
        }
        assert_int_equal(out[0], COUNT);
        assert_int_equal(out[1], high);
        assert_int_equal(out[2], low);
        assert_int_equal(out[3], all_xor);
        assert_int_equal(out[4], all_or);
        assert_int_equal(out[5], (uint32_t)high_signed);
        assert_true(word_float(out[6]) == (float)COUNT);
        assert_int_equal((uint64_t)out[9] << 32 | out[8], sum);
        static uint32_t sorted[COUNT];
        memcpy(sorted, in, sizeof sorted);
        qsort(sorted, COUNT, 4, by_value);
        qsort(out + 16, COUNT, 4, by_value);
        assert_memory_equal(out + 16, sorted, sizeof sorted); /* each thread had a place of its own */
        close_arch();
    }
}

static void packed_products_of_bytes(void **state)
{
    (void)state;
    fill_inputs(ANY_BITS);
    for (int k = 0; k < N_ARCHS; k++) {
        open_arch(archs[k]);
        uint32_t *out = run_cases("dots", 4, false);
        for (int i = 0; i < N; i++) {
            int64_t ss = (int32_t)in_c[i], us = ss, uu = ss;
            for (int j = 0; j < 4; j++) {
                const uint8_t a = (uint8_t)(in_a[i] >> 8 * j), b = (uint8_t)(in_b[i] >> 8 * j);
                ss += (int8_t)a * (int8_t)b;
                us += a * (int8_t)b;
                uu += a * b;
            }
            assert_int_equal(out[i], (uint32_t)ss);
            assert_int_equal(out[N + i], (uint32_t)us);
            assert_int_equal(out[2 * N + i], (uint32_t)(ss > INT32_MAX ? INT32_MAX : ss < INT32_MIN ? INT32_MIN : ss));
            assert_int_equal(out[3 * N + i], (uint32_t)uu);
        }
        free(out);
        close_arch();
    }
}

static void matrices_in_both_layouts(void **state)
{
    (void)state;
    struct {
        int8_t a[16][16], b[16][16]; /* b by column */
        half ha[16][16], hb[16][16];
    } in;
    union {
        int32_t i[3][16][16];
        float f[3][16][16];
    } out;
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 16; k++) {
            in.a[i][k] = (int8_t)next_random();
            in.b[i][k] = (int8_t)next_random();
            in.ha[i][k] = (half)((float)(int)(next_random() % 33) - 16.0f); /* sums of these are exact in any order */
            in.hb[i][k] = (half)((float)(int)(next_random() % 65) * 0.25f - 8.0f);
        }
    for (int arch = 0; arch < N_ARCHS; arch++) {
        open_arch(archs[arch]);
        memset(&out, 0, sizeof out);
        run_plain("matrices", 1, 32, &in, sizeof in, &out, sizeof out);
        for (int m = 0; m < 16; m++)
            for (int n = 0; n < 16; n++) {
                int32_t ss = 1000 * m, us = ss;
                float f = (float)m;
                for (int k = 0; k < 16; k++) {
                    ss += in.a[m][k] * in.b[n][k];
                    us += (uint8_t)in.a[m][k] * in.b[n][k];
                    f += (float)in.ha[m][k] * (float)in.hb[n][k];
                }
                assert_int_equal(out.i[0][m][n], ss);
                assert_int_equal(out.i[1][m][n], us);
                assert_true(out.f[2][m][n] == f);
            }
        close_arch();
    }
}

static void workgroups_know_where_they_are(void **state)
{
    (void)state;
    enum { X = 7, Y = 5, Z = 3 };
    static const uint32_t table[32] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7, 9, 5};
    static uint32_t out[Z][Y][X][64];
    for (int k = 0; k < N_ARCHS; k++) {
        open_arch(archs[k]);
        struct plain_params p = {.out = upload(NULL, sizeof out), .n = Y, .extra = X};
        check(launch("places", X, Y, Z, 64, &p));
        download(out, p.out, sizeof out);
        check(rt.hipFree(p.out));
        for (uint32_t z = 0; z < Z; z++)
            for (uint32_t y = 0; y < Y; y++)
                for (uint32_t x = 0; x < X; x++)
                    for (uint32_t t = 0; t < 64; t++)
                        assert_int_equal(out[z][y][x][t], x | y << 8 | z << 16 | table[(t + (z * Y + y) * X + x) & 31] << 24);
        close_arch();
    }
}

static void packed_halves(void **state)
{
    (void)state;
    half in[3][32][2], out[7][32][2];
    for (int i = 0; i < 3; i++)
        for (int t = 0; t < 32; t++)
            for (int e = 0; e < 2; e++)
                in[i][t][e] = (half)((float)(int32_t)next_random() * 0x1p-29f);
    for (int k = 0; k < N_ARCHS; k++) {
        open_arch(archs[k]);
        memset(out, 0, sizeof out);
        run_plain("pairs", 1, 32, in, sizeof in, out, sizeof out);
        for (int t = 0; t < 32; t++)
            for (int e = 0; e < 2; e++) {
                const half a = in[0][t][e], b = in[1][t][e], c = in[2][t][e], other = in[1][t][1 - e], first = in[1][t][0];
                assert_true(out[0][t][e] == (half)(a + b));
                assert_true(out[1][t][e] == (half)(a * b));
                assert_true(out[2][t][e] == (half)((double)a * (double)b + (double)c));
                assert_true(out[3][t][e] == (half)((half)(a * other) - c));
                assert_true(out[4][t][e] == (half)(a * first));
                assert_true(out[5][t][e] == (half)((half)(a * (half)2.0f) + (half)1.0f));
                assert_true(out[6][t][e] == (half)-a);
            }
        close_arch();
    }
}

static void every_instruction_of_the_kernels_is_known(void **state)
{
    (void)state;
    static char text[1 << 16];
    for (int k = 0; k < N_ARCHS; k++) {
        open_arch(archs[k]);
        if (unknown(text, sizeof text) != 0)
            fail_msg("%s: %s", archs[k], text);
        close_arch();
    }
}

/* ---- mistakes ---- */

/* A kernel that has to be stopped, and what has to be said. */
static void expect_fault(const char *kernel, unsigned threads, struct plain_params *p, const char *part)
{
    check(launch(kernel, 1, 1, 1, threads, p));
    assert_int_not_equal(rt.hipStreamSynchronize(NULL), 0);
    assert_contains(last_fault(), kernel);
    assert_contains(last_fault(), part);
    void *q;
    assert_int_not_equal(rt.hipMalloc(&q, 16), 0); /* the device is lost */
    recover();
    check(rt.hipMalloc(&q, 16));
    check(rt.hipFree(q));
}

static void mistakes_are_named(void **state)
{
    (void)state;
    for (int k = 0; k < N_ARCHS; k++) {
        open_arch(archs[k]);
        struct plain_params p = {.in = upload(NULL, 1024), .out = upload(NULL, 1024), .n = 256, .extra = 32};
        check(launch("store_n", 1, 1, 1, 32, &p)); /* exactly as much as there is */
        check(launch("load_n", 1, 1, 1, 32, &p));
        check(launch("lds_too_far", 1, 1, 1, 32, &p));
        check(rt.hipStreamSynchronize(NULL));
        p.n = 257;
        expect_fault("store_n", 32, &p, "lane 0 touches 4 bytes");
        expect_fault("load_n", 32, &p, "at byte 1024 of an allocation of 1024 bytes");
        p.extra = 33;
        expect_fault("lds_too_far", 32, &p, "lane 31 touches 4 bytes at 0x100 of LDS");
        p.n = 64;
        expect_fault("barrier_for_some", 128, &p, "has ended");
        p.n = 128;
        check(launch("barrier_for_some", 1, 1, 1, 128, &p));
        check(rt.hipStreamSynchronize(NULL));
        setenv("EMU_RACES", "1", 1);
        p.n = 0;
        expect_fault("no_barrier", 256, &p, "wave 3 has read it since the last barrier");
        p.n = 1;
        expect_fault("no_barrier", 256, &p, "wave 0 has written it since the last barrier");
        unsetenv("EMU_RACES");
        uint8_t rows[512];
        for (int i = 0; i < 512; i++)
            rows[i] = (uint8_t)(i / 16);
        check(rt.hipMemcpyAsync((void *)(uintptr_t)p.in, rows, sizeof rows, HIP_HOST_TO_DEVICE, NULL));
        if (strncmp(archs[k], "gfx11", 5) == 0)
            expect_fault("wrong_matrix_lanes", 32, &p, "differs between lanes");
        check(rt.hipFree((void *)(uintptr_t)p.in));
        check(rt.hipFree(p.out));
        close_arch();
    }
}

static void copies_are_checked_and_late(void **state)
{
    (void)state;
    uint32_t *pinned, *device, got[4];
    check(rt.hipHostMalloc((void **)&pinned, 16, 0));
    check(rt.hipMalloc((void **)&device, 16));
    pinned[0] = 1;
    check(rt.hipMemcpyAsync(device, pinned, 16, HIP_HOST_TO_DEVICE, NULL));
    pinned[0] = 2; /* the mistake that must show */
    download(got, device, 16);
    assert_int_equal(got[0], 2);
    uint32_t pageable[4] = {3};
    check(rt.hipMemcpyAsync(device, pageable, 16, HIP_HOST_TO_DEVICE, NULL));
    pageable[0] = 4;
    download(got, device, 16);
    assert_int_equal(got[0], 3);
    assert_int_not_equal(rt.hipMemcpyAsync(device, pageable, 17, HIP_HOST_TO_DEVICE, NULL), 0);
    assert_int_not_equal(rt.hipMemsetAsync(device + 1, 0, 16, NULL), 0);
    check(rt.hipHostFree(pinned));
    check(rt.hipFree(device));
    assert_int_not_equal(rt.hipFree(device), 0);
}

static void failures_come_where_they_are_wanted(void **state)
{
    (void)state;
    void *p[3] = {NULL};
    setenv("EMU_FAIL", "hipMalloc:3", 1);
    check(rt.hipMalloc(&p[0], 16));
    check(rt.hipMalloc(&p[1], 16));
    assert_int_equal(rt.hipMalloc(&p[2], 16), HIP_OUT_OF_MEMORY);
    setenv("EMU_FAIL", "hipStreamSynchronize:1:702", 1);
    assert_int_equal(rt.hipStreamSynchronize(NULL), 702);
    check(rt.hipStreamSynchronize(NULL));
    unsetenv("EMU_FAIL");

    size_t free_bytes, total;
    setenv("EMU_MEMORY", "1000000", 1);
    check(rt.hipMemGetInfo(&free_bytes, &total));
    assert_int_equal(total, 1000000);
    assert_int_equal(free_bytes, 1000000 - 32);
    assert_int_equal(rt.hipMalloc(&p[2], 1000000), HIP_OUT_OF_MEMORY);
    unsetenv("EMU_MEMORY");

    open_arch("gfx1152");
    struct plain_params params = {.in = p[0], .out = p[1], .n = 0};
    setenv("EMU_FAIL", "hipModuleLaunchKernel:2", 1);
    check(launch("store_n", 1, 1, 1, 32, &params));
    assert_int_equal(launch("store_n", 1, 1, 1, 32, &params), HIP_LAUNCH_FAILURE);
    assert_int_equal(rt.hipStreamSynchronize(NULL), HIP_LAUNCH_FAILURE);
    recover();
    setenv("EMU_FAIL", "kernel:2", 1);
    check(launch("store_n", 1, 1, 1, 32, &params));
    check(launch("store_n", 1, 1, 1, 32, &params));
    assert_int_equal(rt.hipStreamSynchronize(NULL), HIP_LAUNCH_FAILURE);
    unsetenv("EMU_FAIL");
    recover();
    close_arch();
    check(rt.hipFree(p[0]));
    check(rt.hipFree(p[1]));

    int count = 5;
    setenv("EMU_NODEV", "1", 1);
    assert_int_equal(rt.hipGetDeviceCount(&count), HIP_NO_DEVICE);
    unsetenv("EMU_NODEV");
    check(rt.hipGetDeviceCount(&count));
    assert_int_equal(count, 1);
}

/* ---- counters ---- */

static void work_is_counted(void **state)
{
    (void)state;
    enum { GROUPS = 8 };
    static uint32_t in[GROUPS * 256], out[GROUPS * 256];
    struct emu_counters c[64];
    open_arch("gfx1152");
    setenv("EMU_LINES", "1", 1);
    reset_counters();
    run_plain("prefix", GROUPS, 256, in, sizeof in, out, sizeof out);
    const int n = counters(c, 64);
    assert_int_equal(n, 1);
    assert_string_equal(c[0].kernel, "prefix");
    assert_int_equal(c[0].launches, 1);
    assert_int_equal(c[0].workgroups, GROUPS);
    assert_int_equal(c[0].waves, GROUPS * 8);
    assert_int_equal(c[0].loads, GROUPS * 8);
    assert_int_equal(c[0].stores, GROUPS * 8);
    assert_int_equal(c[0].barriers, GROUPS * 8);
    assert_int_equal(c[0].bytes_read, sizeof in);
    assert_int_equal(c[0].bytes_written, sizeof out);
    assert_int_equal(c[0].lines_read, sizeof in / EMU_LINE_BYTES);
    assert_int_equal(c[0].unique_read, sizeof in);
    assert_int_equal(c[0].unique_written, sizeof out);
    assert_int_equal(c[0].instructions, c[0].valu + c[0].wmma + c[0].salu + c[0].branches + c[0].barriers + c[0].other + c[0].smem + c[0].lds +
                                            c[0].loads + c[0].stores + c[0].atomics);
    assert_true(c[0].valu > 0 && c[0].lds > 0 && c[0].smem > 0 && c[0].vgprs > 0 && c[0].spills == 0);
    assert_int_equal(c[0].lds_bytes, 32);
    unsetenv("EMU_LINES");
    close_arch();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_instruction_of_the_kernels_is_known),
        cmocka_unit_test(integer_expressions_have_the_cpus_bits),
        cmocka_unit_test(wide_integer_expressions_have_the_cpus_bits),
        cmocka_unit_test(float_expressions_have_the_cpus_bits),
        cmocka_unit_test(half_expressions_have_the_cpus_bits),
        cmocka_unit_test(approximations_are_close),
        cmocka_unit_test(loads_and_stores_of_every_size),
        cmocka_unit_test(lds_of_every_size_and_its_atomics),
        cmocka_unit_test(prefix_sums_cross_waves),
        cmocka_unit_test(lanes_reach_each_other),
        cmocka_unit_test(atomics_lose_nothing),
        cmocka_unit_test(packed_products_of_bytes),
        cmocka_unit_test(matrices_in_both_layouts),
        cmocka_unit_test(workgroups_know_where_they_are),
        cmocka_unit_test(packed_halves),
        cmocka_unit_test(mistakes_are_named),
        cmocka_unit_test(copies_are_checked_and_late),
        cmocka_unit_test(failures_come_where_they_are_wanted),
        cmocka_unit_test(work_is_counted),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
