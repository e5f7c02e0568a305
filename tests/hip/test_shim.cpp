/* The shim does what the kernels' language says, and ends the process where a kernel would be undefined on the GPU. Writes TAP. */
#include "tests/hip/gpu_shim.h"

#include <cstdio>
#include <cstdlib>
#include <string>
#include <sys/wait.h>
#include <unistd.h>

namespace {

struct probe {
    int *out;
    int fault; /* which line of the kernel goes wrong; 0: none */
};

/* Every kind of join, with results that say whether it joined. */
KERNEL(96) joins(struct probe p)
{
    SHARED int words[96];
    const int t = (int)tid_x(), lane = (int)lane_id();
    int *out = p.out + 96 * (int)bid_x();
    words[t] = t;
    if (p.fault != 1)
        sync_threads();
    int sum = words[95 - t];                                          /* 95 - t */
    sum = 1000 * sum + shfl_xor_i<1>(t) - (t ^ 1);                    /* + 0 */
    sum += (int)shfl_f((float)lane, (lane + 5) % 32) - (lane + 5) % 32; /* + 0 */
    if (p.fault == 2 && lane < 16)
        sum += shfl_xor_i<2>(sum); /* half of the wave only */
    if (p.fault == 3) {
        if (lane & 1)
            sum += shfl_xor_i<16>(sum);
        else
            sum += shfl_xor_i<16>(sum); /* the lanes are at different places */
    }
    if (p.fault == 4 && t < 32)
        sync_threads(); /* one wave only */
    if (p.fault == 5 && lane == 7)
        return; /* and its neighbour reads from it below */
    sum += shfl_xor_i<2>(lane) - (lane ^ 2);
    sum += uniform_i(p.fault == 6 ? lane : 4);
    sync_threads_global();
    out[t] = sum;
}

struct product {
    const int8_t *a, *b; /* [16][16] */
    int *ss, *us;        /* [16][16] */
    float *f;
    int fault;
};

KERNEL(32) products(struct product p)
{
    const uint32_t row = lane_id() & 15;
    wmma_i8_t a = load_i32x4(p.a + 16 * row), b = load_i32x4(p.b + 16 * row);
    i32x8_t zero = {0, 0, 0, 0, 0, 0, 0, 0};
    f32x8_t none = {0, 0, 0, 0, 0, 0, 0, 0};
    if (p.fault == 1 && lane_id() == 20)
        a[1] ^= 1;
    const i32x8_t ss = wmma_i8(a, b, zero), us = wmma_i8_us(a, b, zero);
    wmma_h_t ah, bh;
    for (int k = 0; k < 16; k++) {
        ah[k] = (half)p.a[16 * row + (uint32_t)k];
        bh[k] = (half)p.b[16 * row + (uint32_t)k];
    }
    const f32x8_t f = wmma_f16(ah, bh, none);
    for (uint32_t i = 0; i < 8; i++) {
        p.ss[16 * wmma_c_row(i) + wmma_c_col()] = ss[i];
        p.us[16 * wmma_c_row(i) + wmma_c_col()] = us[i];
        p.f[16 * wmma_c_row(i) + wmma_c_col()] = f[i];
    }
}

KERNEL(64) poisoned(struct probe p)
{
    SHARED int word;
    if (tid_x() == 0)
        p.out[bid_x()] = word;
    sync_threads();
    if (tid_x() == 33)
        word = 5;
}

template <class P, void (*kernel)(P)> void call(const void *p)
{
    kernel(*(const P *)p);
}

/* ---- TAP ---- */

int n_tests, n_bad;

void result(bool ok, const char *what)
{
    n_tests++;
    n_bad += !ok;
    printf("%s %d - %s\n", ok ? "ok" : "not ok", n_tests, what);
    fflush(stdout);
}

const uint32_t two[3] = {2, 1, 1}, one[3] = {1, 1, 1};

void run_joins(int fault, int *out)
{
    const probe p = {out, fault};
    shim::launch("joins", two, 96, call<probe, joins>, &p);
}

void run_products(int fault, bool *right)
{
    alignas(16) int8_t a[256], b[256];
    int ss[256], us[256];
    float f[256];
    for (int i = 0; i < 256; i++) {
        a[i] = (int8_t)(i * 37 + 11);
        b[i] = (int8_t)(i * 101 + 3);
    }
    const product p = {a, b, ss, us, f, fault};
    shim::launch("products", one, 32, call<product, products>, &p);
    *right = true;
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n++) {
            int s = 0, u = 0;
            for (int k = 0; k < 16; k++) {
                s += a[16 * m + k] * b[16 * n + k];
                u += (uint8_t)a[16 * m + k] * b[16 * n + k];
            }
            *right = *right && ss[16 * m + n] == s && us[16 * m + n] == u && f[16 * m + n] == (float)s;
        }
}

/* True when `what` ends the process with a message that holds `words`. */
template <class F> bool dies(F what, const char *words)
{
    int fd[2];
    if (pipe(fd) != 0)
        return false;
    const pid_t child = fork();
    if (child == 0) {
        dup2(fd[1], 2);
        what();
        _exit(0);
    }
    close(fd[1]);
    std::string text;
    char part[512];
    for (ssize_t n; (n = read(fd[0], part, sizeof part)) > 0;)
        text.append(part, (size_t)n);
    close(fd[0]);
    int status = 0;
    waitpid(child, &status, 0);
    const bool ok = !(WIFEXITED(status) && WEXITSTATUS(status) == 0) && text.find(words) != std::string::npos;
    if (!ok)
        printf("# status %d, not \"%s\": %s\n", status, words, text.c_str());
    return ok;
}

} // namespace

int main(int argc, char **argv)
{
    static int out[192];
    if (argc > 1 && strcmp(argv[1], "race") == 0) {
        run_joins(1, out);
        return 0;
    }
    run_joins(0, out);
    bool right = true;
    for (int i = 0; i < 192; i++)
        right = right && out[i] == 1000 * (95 - i % 96) + 4;
    result(right, "barriers and shuffles join the lanes");
    run_products(0, &right);
    result(right, "the matrix products of a wave");

    static int words[2];
    const probe p = {words, 0};
    shim::launch("poisoned", two, 64, call<probe, poisoned>, &p);
    result(words[0] == -1 && words[1] == -1, "SHARED memory is undefined at the start of each workgroup");

#if defined(__SANITIZE_THREAD__)
    /* In a new program: the detector does not look at what a fork does. */
    result(dies([] { execl("/proc/self/exe", "test_shim", "race", nullptr); }, "data race"), "a missing barrier is a race");
#else
    run_joins(1, out);
    right = true;
    for (int i = 0; i < 192; i++)
        right = right && out[i] == 1000 * (95 - i % 96) + 4;
    result(!right, "a missing barrier gives wrong numbers");
#endif
    result(dies([] { run_joins(2, out); }, "lanes part"), "a wave operation that half of the lanes reach");
    result(dies([] { run_joins(3, out); }, "lanes part"), "a wave operation that lanes reach at different places");
    result(dies([] { run_joins(4, out); }, "threads part"), "a barrier that one wave reaches");
    result(dies([] { run_joins(5, out); }, "which has left the kernel"), "a shuffle from a lane that has left");
    result(dies([] { run_joins(6, out); }, "uniform_i"), "a uniform value that is not");
    result(dies([] { bool ignored; run_products(1, &ignored); }, "operands of lanes 4 and 20 differ"), "WMMA operands without their copies");
    printf("1..%d\n", n_tests);
    return n_bad > 0;
}
