/* tests/hip/gpu_shim.h: the kernel language (hip/kernels/gpu.h) on the CPU, for sanitizers, debuggers and machines without the GPU's compiler.
 *
 * Every GPU thread of a workgroup is a fiber with its own stack; workgroups run one after another. A fiber runs until it joins other lanes (a
 * shuffle, a WMMA) or comes to a barrier, so the order of memory accesses between those points is not the GPU's: code that relies on it without a
 * barrier gets wrong numbers here, as it might there. Waves run forwards in one workgroup and backwards in the next, so that a missing barrier shows
 * whichever way the data flows; built with -fsanitize=thread it is reported with both places, SHARED and device memory alike.
 *
 * Ends the process with a message: a wave operation that some live lanes of the wave do not reach or that lanes reach at different places, a barrier
 * that some live threads do not reach, WMMA operands whose copies differ, lanes that differ in a uniform value. SHARED memory is 0xFF (NaN, -1) at the start
 * of a workgroup. WMMA has gfx11's layout. Compiles as C++17 with GCC 12 and clang 19. */
#ifndef BEDSIDE_TESTS_HIP_GPU_SHIM_H
#define BEDSIDE_TESTS_HIP_GPU_SHIM_H

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define GPU_SHIM 1

/* ---- types ---- */

typedef _Float16 half;
typedef half half8_t __attribute__((vector_size(16)));
typedef half half16_t __attribute__((vector_size(32)));
typedef float f32x2_t __attribute__((vector_size(8)));
typedef float f32x4_t __attribute__((vector_size(16)));
typedef float f32x8_t __attribute__((vector_size(32)));
typedef int32_t i32x2_t __attribute__((vector_size(8)));
typedef int32_t i32x4_t __attribute__((vector_size(16)));
typedef int32_t i32x8_t __attribute__((vector_size(32)));
typedef uint32_t u32x4_t __attribute__((vector_size(16)));

#define DEV                [[maybe_unused]] static inline
#define KERNEL(threads)    static void
#define SHARED             static __attribute__((section("shim_shared"), used)) /* used: somebody else writes there too */
#define GLOBAL(T, address) ((T *)(uintptr_t)(address))

/* ---- fibers (shim_fibers.cpp) ---- */

namespace shim
{

enum { WAVE = 32, MAX_THREADS = 1024, SLOT = 64 };

/* The running thread. */
struct self {
    uint32_t tid, bid[3];
};
extern self now;

/* Where in the source an operation was called; as a default argument it is the caller's line. */
struct place {
    const char *file;
    int line;
    static constexpr place here(const char *file = __builtin_FILE(), int line = __builtin_LINE())
    {
        return {file, line};
    }
};
#define SHIM_AT shim::place at = shim::place::here()

struct wave {
    uint32_t live, run, at_op, at_barrier; /* lanes */
    uint32_t turn;                         /* which of the two sets below the operation in progress uses */
    uint32_t joined[2];                    /* the lanes that took part */
    const char *op;                        /* what the first lane has reached */
    place at;                              /* and where */
    /* What the lanes show each other. Two sets in turn: a lane may still read the last operation's while another deposits for the next. */
    alignas(64) unsigned char slot[2][WAVE][SLOT];
};
extern wave waves[MAX_THREADS / WAVE];

static inline wave *my_wave()
{
    return &waves[now.tid / WAVE];
}

/* The running lane waits until all live lanes of its wave have come to the same operation, or all live threads to the barrier. */
void meet(const char *op, place at);
void barrier(const char *op, place at);
[[noreturn]] void die(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Runs a grid of workgroups of n_threads fibers, each of which calls kernel(params). */
void launch(const char *name, const uint32_t grid[3], uint32_t n_threads, void (*kernel)(const void *params), const void *params);

/* The kernels of hip/kernels/list.h (shim_kernels.cpp); the last has no name. */
struct function {
    const char *name;
    uint32_t threads;
    size_t params_bytes;
    void (*call)(const void *params);
};
extern const function functions[];

/* What the lanes deposited, valid until the lane's operation after the next. */
template <class T> struct shown {
    const wave *w;
    uint32_t turn;

    bool has(uint32_t lane) const
    {
        return w->joined[turn] >> lane & 1;
    }
    const T *at(uint32_t lane) const
    {
        return (const T *)(const void *)w->slot[turn][lane];
    }
};

template <class T> static inline shown<T> show(const T &v, const char *op, place at)
{
    static_assert(sizeof(T) <= SLOT, "a slot is too small");
    wave *w = my_wave();
    const uint32_t turn = w->turn;
    memcpy(w->slot[turn][now.tid % WAVE], &v, sizeof v);
    meet(op, at);
    return {w, turn};
}

} // namespace shim

/* ---- who am I ---- */

DEV uint32_t tid_x()
{
    return shim::now.tid;
}

DEV uint32_t bid_x()
{
    return shim::now.bid[0];
}

DEV uint32_t bid_y()
{
    return shim::now.bid[1];
}

DEV uint32_t bid_z()
{
    return shim::now.bid[2];
}

DEV uint32_t lane_id()
{
    return shim::now.tid % shim::WAVE;
}

/* ---- order ---- */

DEV void sync_threads(SHIM_AT)
{
    shim::barrier("sync_threads", at);
}

DEV void sync_threads_global(SHIM_AT)
{
    shim::barrier("sync_threads_global", at);
}

DEV void sync_wave(SHIM_AT)
{
    shim::meet("sync_wave", at);
}

DEV void release_device()
{
}

DEV void acquire_device()
{
}

DEV void fence_device()
{
}

#include "hip/kernels/gpu_common.h"

/* ---- lanes ---- */

/* A lane that has left the kernel has no value to give. */
DEV int shim_shuffle(int v, uint32_t lane, const char *op, shim::place at)
{
    const shim::shown<int> all = shim::show(v, op, at);
    if (!all.has(lane))
        shim::die("%s at %s:%d reads lane %u, which has left the kernel", op, at.file, at.line, lane);
    return *all.at(lane);
}

DEV int shfl_i(int v, int src, SHIM_AT)
{
    return shim_shuffle(v, (uint32_t)src % shim::WAVE, "shfl", at);
}

DEV float shfl_f(float v, int src, SHIM_AT)
{
    return as_float(shim_shuffle(as_int(v), (uint32_t)src % shim::WAVE, "shfl", at));
}

template <int MASK> DEV int shfl_xor_i(int v, SHIM_AT)
{
    static_assert(MASK > 0 && MASK <= 16, "one to fifteen, or sixteen");
    return shim_shuffle(v, lane_id() ^ MASK, "shfl_xor", at);
}

template <int MASK> DEV float shfl_xor_f(float v, SHIM_AT)
{
    return as_float(shim_shuffle(as_int(v), lane_id() ^ MASK, "shfl_xor", at));
}

DEV int uniform_i(int v, SHIM_AT)
{
    const shim::shown<int> all = shim::show(v, "uniform_i", at);
    const uint32_t first = (uint32_t)__builtin_ctz(all.w->joined[all.turn]);
    if (*all.at(first) != v)
        shim::die("uniform_i at %s:%d: this lane has %d, lane %u has %d", at.file, at.line, v, first, *all.at(first));
    return v;
}

/* ---- dot products of four bytes ---- */

DEV int dot4_ss(int a, int b, int c)
{
    for (int i = 0; i < 4; i++)
        c += (int)(int8_t)(a >> 8 * i) * (int)(int8_t)(b >> 8 * i);
    return c;
}

DEV int dot4_us(int a, int b, int c)
{
    for (int i = 0; i < 4; i++)
        c += (int)(uint8_t)(a >> 8 * i) * (int)(int8_t)(b >> 8 * i);
    return c;
}

/* ---- mathematics that the instruction set has its own way with ---- */

DEV float gpu_rsqrtf(float x)
{
    return 1.0f / sqrtf(x);
}

DEV float gpu_rcpf(float x)
{
    return 1.0f / x;
}

/* ---- atomics ---- */

DEV float atomic_add_f(float *p, float v)
{
    int old = __atomic_load_n((int *)(void *)p, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n((int *)(void *)p, &old, as_int(as_float(old) + v), true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return as_float(old);
}

DEV int atomic_add_i(int *p, int v)
{
    return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
}

DEV float atomic_load_f(const float *p)
{
    return as_float(__atomic_load_n((const int *)(const void *)p, __ATOMIC_RELAXED));
}

/* ---- matrix products of a wave, gfx11's layout ---- */

#define WMMA_AB_K 16
typedef half16_t wmma_h_t;
typedef i32x4_t wmma_i8_t;

DEV uint32_t wmma_ab_k0()
{
    return 0;
}

DEV uint32_t wmma_c_row(uint32_t i)
{
    return 2 * i + (lane_id() >> 4);
}

DEV uint32_t wmma_c_col()
{
    return lane_id() & 15;
}

template <class T> struct shim_operands {
    T a[16], b[16];

    template <class V> shim_operands(const V &va, const V &vb)
    {
        static_assert(sizeof a == sizeof va, "an operand is sixteen values");
        memcpy(a, &va, sizeof a);
        memcpy(b, &vb, sizeof b);
    }
};

/* Row r of the operands, after a look at its copy in lane r + 16. */
template <class T> static inline const shim_operands<T> *shim_row(const shim::shown<shim_operands<T>> &all, uint32_t r, const char *op)
{
    if (!all.has(r) || !all.has(r + 16))
        shim::die("%s: lanes of the wave have left the kernel", op);
    if (memcmp(all.at(r), all.at(r + 16), sizeof(shim_operands<T>)) != 0)
        shim::die("%s: the operands of lanes %u and %u differ", op, r, r + 16);
    return all.at(r);
}

DEV f32x8_t wmma_f16(wmma_h_t a, wmma_h_t b, f32x8_t c, SHIM_AT)
{
    const auto all = shim::show(shim_operands<half>(a, b), "wmma_f16", at);
    const shim_operands<half> *column = shim_row(all, wmma_c_col(), "wmma_f16");
    for (uint32_t i = 0; i < 8; i++) {
        const shim_operands<half> *row = shim_row(all, wmma_c_row(i), "wmma_f16");
        float sum = c[i];
        for (int k = 0; k < 16; k++)
            sum += (float)row->a[k] * (float)column->b[k];
        c[i] = sum;
    }
    return c;
}

/* A is the type that a's bytes are read as. */
template <class A> static inline i32x8_t shim_wmma_int(const shim::shown<shim_operands<int8_t>> &all, i32x8_t c, const char *op)
{
    const shim_operands<int8_t> *column = shim_row(all, wmma_c_col(), op);
    for (uint32_t i = 0; i < 8; i++) {
        const shim_operands<int8_t> *row = shim_row(all, wmma_c_row(i), op);
        int sum = 0;
        for (int k = 0; k < 16; k++)
            sum += (int)(A)row->a[k] * (int)column->b[k];
        c[i] += sum;
    }
    return c;
}

DEV i32x8_t wmma_i8(wmma_i8_t a, wmma_i8_t b, i32x8_t c, SHIM_AT)
{
    return shim_wmma_int<int8_t>(shim::show(shim_operands<int8_t>(a, b), "wmma_i8", at), c, "wmma_i8");
}

DEV i32x8_t wmma_i8_us(wmma_i8_t a, wmma_i8_t b, i32x8_t c, SHIM_AT)
{
    return shim_wmma_int<uint8_t>(shim::show(shim_operands<int8_t>(a, b), "wmma_i8_us", at), c, "wmma_i8_us");
}

#endif
