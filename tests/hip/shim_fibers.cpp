/* Runs workgroups of the shim: a fiber for each thread, switched by hand. See gpu_shim.h.
 *
 * A fiber that must wait goes straight to the next runnable lane of its wave; only when its wave has none left does it go back to the scheduler, which
 * takes the next wave and, when all are at the barrier, opens it. Fibers are kept from one workgroup to the next: each loops over kernel calls. */
#include "tests/hip/gpu_shim.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <pthread.h>
#include <sys/mman.h>

#ifdef __has_feature
#if __has_feature(address_sanitizer)
#define SHIM_ASAN 1
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
#define SHIM_ASAN 1
#endif
#ifdef SHIM_ASAN
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef SHIM_TSAN /* from the build: this file itself is not instrumented */
extern "C" {
void *__tsan_get_current_fiber(void);
void *__tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void *fiber, unsigned flags);
void __tsan_acquire(void *address);
void __tsan_release(void *address);
}
#define ORDER_BEFORE(address) __tsan_release(address)
#define ORDER_AFTER(address) __tsan_acquire(address)
#else
#define ORDER_BEFORE(address) ((void)(address))
#define ORDER_AFTER(address) ((void)(address))
#endif

/* All SHARED variables of all kernels. */
extern "C" char __start_shim_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_shim_shared[] __attribute__((weak, visibility("hidden")));

namespace shim {

self now;
wave waves[MAX_THREADS / WAVE];

namespace {

enum { STACK = 256 * 1024, PAGE = 4096 };

struct fiber {
    void *sp;
    char *bottom; /* of its stack */
    size_t bytes;
    void *asan, *tsan;
};

std::mutex lock;
fiber fibers[MAX_THREADS], scheduler;
uint32_t n_fibers; /* made so far */

const char *kernel_name = "";
void (*kernel_call)(const void *);
const void *kernel_params;

uint32_t group_live, group_waiting; /* threads */
place barrier_at;
uint32_t barrier_turn;

/* Addresses for the race detector: start and end of a workgroup, barriers (two in turn: a thread may not have left one when another is at the next). */
char at_start, at_end, at_barrier[2];

/* ---- switching ---- */

#if defined(__x86_64__)
extern "C" void shim_switch(void **save, void *to);
__asm__(".text\n.globl shim_switch\n.hidden shim_switch\n.type shim_switch,@function\nshim_switch:\n"
        "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
        "mov %rsp,(%rdi)\nmov %rsi,%rsp\n"
        "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n.size shim_switch,.-shim_switch\n");

/* A stack as shim_switch would have left it on entry to `start`. */
void *first_frame(char *top, void (*start)())
{
    void **s = (void **)(void *)top;
    *--s = nullptr; /* `start` sees an aligned stack and no caller */
    *--s = (void *)start;
    for (int i = 0; i < 6; i++)
        *--s = nullptr;
    return s;
}
#else
#error "the shim's fibers are written for x86-64: add shim_switch and first_frame for this machine"
#endif

void go(fiber *from, fiber *to)
{
#ifdef SHIM_ASAN
    __sanitizer_start_switch_fiber(&from->asan, to->bottom, to->bytes);
#endif
#ifdef SHIM_TSAN
    __tsan_switch_to_fiber(to->tsan, 1); /* 1: no order between the two */
#endif
    shim_switch(&from->sp, to->sp);
#ifdef SHIM_ASAN
    __sanitizer_finish_switch_fiber(from->asan, nullptr, nullptr);
#endif
}

void go_lane(fiber *from, uint32_t wave_index, uint32_t lanes)
{
    now.tid = wave_index * WAVE + (uint32_t)__builtin_ctz(lanes);
    go(from, &fibers[now.tid]);
}

/* The running lane is not in its wave's `run` any more: on to another, until it is again. */
void rest()
{
    const uint32_t me = now.tid, index = me / WAVE;
    wave *w = &waves[index];
    if (!w->run && w->at_op) {
        if (w->at_op != w->live)
            die("%s at %s:%d is reached by lanes %08x; the live lanes of the wave are %08x", w->op, w->at.file, w->at.line, w->at_op, w->live);
        w->run = w->joined[w->turn] = w->at_op;
        w->at_op = 0;
        w->turn ^= 1;
        if (w->run >> me % WAVE & 1)
            return;
    }
    if (w->run)
        go_lane(&fibers[me], index, w->run);
    else
        go(&fibers[me], &scheduler);
    now.tid = me;
}

/* ---- a fiber's life ---- */

void thread_main()
{
#ifdef SHIM_ASAN
    __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
    const uint32_t me = now.tid;
    for (;;) {
        ORDER_AFTER(&at_start);
        kernel_call(kernel_params);
        ORDER_BEFORE(&at_end);
        wave *w = &waves[me / WAVE];
        w->live &= ~(1U << me % WAVE);
        w->run &= ~(1U << me % WAVE);
        group_live--;
        rest();
    }
}

void make_fibers(uint32_t n)
{
    for (; n_fibers < n; n_fibers++) {
        fiber *f = &fibers[n_fibers];
        void *p = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED || mprotect(p, PAGE, PROT_NONE) != 0)
            die("no memory for the stack of thread %u", n_fibers);
        f->bottom = (char *)p + PAGE;
        f->bytes = STACK - PAGE;
        f->sp = first_frame(f->bottom + f->bytes, thread_main);
#ifdef SHIM_TSAN
        f->tsan = __tsan_create_fiber(0);
#endif
    }
}

/* ---- a workgroup ---- */

void run_group(uint32_t n_threads, bool backwards)
{
    const uint32_t n_waves = (n_threads + WAVE - 1) / WAVE;
    if (__start_shim_shared)
        memset(__start_shim_shared, 0xFF, (size_t)(__stop_shim_shared - __start_shim_shared));
    for (uint32_t i = 0; i < n_waves; i++) {
        const uint32_t lanes = n_threads - i * WAVE;
        waves[i].live = waves[i].run = lanes < WAVE ? (1U << lanes) - 1 : ~0U;
        waves[i].at_op = waves[i].at_barrier = 0;
    }
    group_live = n_threads;
    group_waiting = 0;
    ORDER_BEFORE(&at_start);
    while (group_live > 0) {
        for (uint32_t i = 0; i < n_waves; i++) {
            const uint32_t index = backwards ? n_waves - 1 - i : i;
            if (waves[index].run)
                go_lane(&scheduler, index, waves[index].run);
        }
        if (group_waiting == 0)
            continue;
        if (group_waiting != group_live) /* cannot be: a wave stops only at a barrier or its end */
            die("%u of %u live threads wait at the barrier", group_waiting, group_live);
        group_waiting = 0;
        barrier_turn ^= 1;
        for (uint32_t i = 0; i < n_waves; i++) {
            waves[i].run = waves[i].at_barrier;
            waves[i].at_barrier = 0;
        }
    }
    ORDER_AFTER(&at_end);
}

} // namespace

void meet(const char *op, place at)
{
    wave *w = my_wave();
    const uint32_t bit = 1U << now.tid % WAVE;
    if (!w->at_op) {
        w->op = op;
        w->at = at;
    } else if (w->op != op || w->at.line != at.line || strcmp(w->at.file, at.file) != 0) {
        die("lanes part: %s at %s:%d, but lanes %08x are in %s at %s:%d", op, at.file, at.line, w->at_op, w->op, w->at.file, w->at.line);
    }
    const uint32_t turn = w->turn;
    w->run &= ~bit;
    w->at_op |= bit;
    ORDER_BEFORE(&w->slot[turn]);
    rest();
    ORDER_AFTER(&w->slot[turn]);
}

void barrier(const char *op, place at)
{
    wave *w = my_wave();
    const uint32_t bit = 1U << now.tid % WAVE;
    if (w->at_op)
        die("lanes part: %s at %s:%d, but lanes %08x are in %s at %s:%d", op, at.file, at.line, w->at_op, w->op, w->at.file, w->at.line);
    if (group_waiting == 0)
        barrier_at = at;
    else if (barrier_at.line != at.line || strcmp(barrier_at.file, at.file) != 0)
        die("threads part: barrier at %s:%d, but others are at the one at %s:%d", at.file, at.line, barrier_at.file, barrier_at.line);
    group_waiting++;
    w->run &= ~bit;
    w->at_barrier |= bit;
    const uint32_t turn = barrier_turn;
    ORDER_BEFORE(&at_barrier[turn]);
    rest();
    ORDER_AFTER(&at_barrier[turn]);
}

void die(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "gpu_shim: kernel %s, workgroup (%u, %u, %u), thread %u: ", kernel_name, now.bid[0], now.bid[1], now.bid[2], now.tid);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    abort();
}

void launch(const char *name, const uint32_t grid[3], uint32_t n_threads, void (*kernel)(const void *params), const void *params)
{
    std::lock_guard<std::mutex> hold(lock);
    kernel_name = name;
    kernel_call = kernel;
    kernel_params = params;
    if (n_threads < 1 || n_threads > MAX_THREADS)
        die("workgroups of %u threads", n_threads);
    make_fibers(n_threads);
#ifdef SHIM_ASAN
    static thread_local char *bottom;
    static thread_local size_t bytes;
    if (!bottom) {
        pthread_attr_t attr;
        void *p = nullptr;
        if (pthread_getattr_np(pthread_self(), &attr) != 0 || pthread_attr_getstack(&attr, &p, &bytes) != 0)
            die("where is this thread's stack?");
        pthread_attr_destroy(&attr);
        bottom = (char *)p;
    }
    scheduler.bottom = bottom;
    scheduler.bytes = bytes;
#endif
#ifdef SHIM_TSAN
    scheduler.tsan = __tsan_get_current_fiber();
#endif
    for (now.bid[2] = 0; now.bid[2] < grid[2]; now.bid[2]++)
        for (now.bid[1] = 0; now.bid[1] < grid[1]; now.bid[1]++)
            for (now.bid[0] = 0; now.bid[0] < grid[0]; now.bid[0]++)
                run_group(n_threads, (now.bid[0] + now.bid[1] + now.bid[2]) & 1);
    kernel_name = "";
}

} // namespace shim
