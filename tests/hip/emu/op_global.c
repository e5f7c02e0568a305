/* tests/hip/emu/op_global.c: global loads, stores and atomics. Device memory is the host's, so an address is a pointer; every access is checked against
 * the live allocations first. */
#include "tests/hip/emu/operand.h"

#define BEGIN(name) static const struct insn *run_##name(struct wave *w, const struct insn *in)

typedef uint64_t addresses[LANES] __attribute__((aligned(64)));

static inline void *at(uint64_t address)
{
    return (void *)(uintptr_t)address;
}

/* ---- addresses ---- */

/* Addresses from operand k (a lane's offset, or a pair of registers) and k_base (a scalar pair, or off). */
static inline void lane_addresses(const struct wave *w, const struct insn *in, int k, int k_base, uint64_t to[LANES])
{
    const uint32_t *low = w->v[in->o[k].index];
    const uint64_t offset = (uint64_t)(int64_t)in->offset;
    if (in->o[k_base].kind == OPERAND_SGPR) {
        const uint64_t base = scalar64(w, in, k_base) + offset;
        for (int l = 0; l < LANES; l++)
            to[l] = base + low[l];
        return;
    }
    const uint32_t *high = w->v[in->o[k].index + 1];
    for (int l = 0; l < LANES; l++)
        to[l] = ((uint64_t)low[l] | (uint64_t)high[l] << 32) + offset;
}

/* All lanes that are on may touch `bytes` at their address, or the kernel stops. Nearly always one allocation holds them all, the one of last time. */
static inline void check(struct wave *w, const struct insn *in, const uint64_t a[LANES], uint32_t bytes)
{
    const uint32_t exec = exec_of(w);
    uint64_t lowest = UINT64_MAX, highest = 0;
    if (__builtin_expect(exec == ~0u, 1)) {
        for (int l = 0; l < LANES; l++) {
            lowest = a[l] < lowest ? a[l] : lowest;
            highest = a[l] > highest ? a[l] : highest;
        }
    } else {
        for (int l = 0; l < LANES; l++) {
            const uint64_t off = (exec >> l & 1) - 1ull; /* all ones: the lane is off */
            const uint64_t low = a[l] | off, high = a[l] & ~off;
            lowest = low < lowest ? low : lowest;
            highest = high > highest ? high : highest;
        }
    }
    const struct range *seen = &w->group->seen[in->slot];
    if (__builtin_expect(exec && !(lowest >= seen->begin && highest <= seen->end && seen->end - highest >= bytes), 0))
        emu_check_lanes(w, in, a, bytes);
}

static inline void count_read(struct wave *w, const struct insn *in, const uint64_t a[LANES], uint32_t bytes)
{
    struct group *g = w->group;
    g->bytes_read += (uint64_t)__builtin_popcount(exec_of(w)) * bytes;
    if (__builtin_expect(g->lines, 0))
        emu_count_lines(w, in, a, bytes, false);
}

static inline void count_write(struct wave *w, const struct insn *in, const uint64_t a[LANES], uint32_t bytes)
{
    struct group *g = w->group;
    g->bytes_written += (uint64_t)__builtin_popcount(exec_of(w)) * bytes;
    if (__builtin_expect(g->lines, 0))
        emu_count_lines(w, in, a, bytes, true);
}

/* ---- loads: d, address, base ---- */

static inline void load_addresses(struct wave *w, const struct insn *in, uint32_t bytes, uint64_t a[LANES])
{
    lane_addresses(w, in, 1, 2, a);
    check(w, in, a, bytes);
    count_read(w, in, a, bytes);
}

static inline const struct insn *load_words(struct wave *w, const struct insn *in, int words)
{
    addresses a;
    const uint32_t exec = exec_of(w);
    load_addresses(w, in, 4 * (uint32_t)words, a);
    uint32_t(*d)[LANES] = &w->v[in->o[0].index];
    if (__builtin_expect(exec == ~0u, 1)) {
        for (int l = 0; l < LANES; l++) {
            uint32_t x[4];
            memcpy(x, at(a[l]), sizeof(uint32_t) * (size_t)words);
            for (int i = 0; i < words; i++)
                d[i][l] = x[i];
        }
        return in + 1;
    }
    for (uint32_t rest = exec; rest; rest &= rest - 1) {
        const int l = __builtin_ctz(rest);
        uint32_t x[4];
        memcpy(x, at(a[l]), sizeof(uint32_t) * (size_t)words);
        for (int i = 0; i < words; i++)
            d[i][l] = x[i];
    }
    return in + 1;
}

#define LOAD(name, words)                                                                                                                            \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        return load_words(w, in, words);                                                                                                             \
    }
#define LOADS(X)                                                                                                                                     \
    X(global_load_b32, 1)                                                                                                                            \
    X(global_load_b64, 2)                                                                                                                            \
    X(global_load_b96, 3)                                                                                                                            \
    X(global_load_b128, 4)
LOADS(LOAD)

/* `x` of `type` is what memory holds, `old` the register before. */
#define LOAD_SMALL(name, type, expr)                                                                                                                 \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        addresses a;                                                                                                                                 \
        load_addresses(w, in, sizeof(type), a);                                                                                                      \
        uint32_t *d = w->v[in->o[0].index];                                                                                                          \
        for (uint32_t rest = exec_of(w); rest; rest &= rest - 1) {                                                                                   \
            const int l = __builtin_ctz(rest);                                                                                                       \
            const uint32_t old = d[l];                                                                                                               \
            type x;                                                                                                                                  \
            (void)old;                                                                                                                               \
            memcpy(&x, at(a[l]), sizeof x);                                                                                                          \
            d[l] = (expr);                                                                                                                           \
        }                                                                                                                                            \
        return in + 1;                                                                                                                               \
    }
#define SMALL_LOADS(X)                                                                                                                               \
    X(global_load_u8, uint8_t, x)                                                                                                                    \
    X(global_load_i8, int8_t, (uint32_t)(int32_t)x)                                                                                                  \
    X(global_load_u16, uint16_t, x)                                                                                                                  \
    X(global_load_i16, int16_t, (uint32_t)(int32_t)x)                                                                                                \
    X(global_load_d16_u8, uint8_t, (old & 0xffff0000u) | x)                                                                                          \
    X(global_load_d16_i8, int8_t, (old & 0xffff0000u) | (uint16_t)(int16_t)x)                                                                        \
    X(global_load_d16_b16, uint16_t, (old & 0xffff0000u) | x)                                                                                        \
    X(global_load_d16_hi_u8, uint8_t, (old & 0xffff) | (uint32_t)x << 16)                                                                            \
    X(global_load_d16_hi_i8, int8_t, (old & 0xffff) | (uint32_t)(int32_t)x << 16)                                                                    \
    X(global_load_d16_hi_b16, uint16_t, (old & 0xffff) | (uint32_t)x << 16)
SMALL_LOADS(LOAD_SMALL)

/* ---- stores: address, data, base ---- */

static inline void store_addresses(struct wave *w, const struct insn *in, uint32_t bytes, uint64_t a[LANES])
{
    lane_addresses(w, in, 0, 2, a);
    check(w, in, a, bytes);
    count_write(w, in, a, bytes);
}

static inline const struct insn *store_words(struct wave *w, const struct insn *in, int words)
{
    addresses a;
    store_addresses(w, in, 4 * (uint32_t)words, a);
    const uint32_t(*v)[LANES] = (const uint32_t(*)[LANES]) & w->v[in->o[1].index];
    for (uint32_t rest = exec_of(w); rest; rest &= rest - 1) {
        const int l = __builtin_ctz(rest);
        uint32_t x[4] = {0};
        for (int i = 0; i < words; i++)
            x[i] = v[i][l];
        memcpy(at(a[l]), x, sizeof(uint32_t) * (size_t)words);
    }
    return in + 1;
}

#define STORE(name, words)                                                                                                                           \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        return store_words(w, in, words);                                                                                                            \
    }
#define STORES(X)                                                                                                                                    \
    X(global_store_b32, 1)                                                                                                                           \
    X(global_store_b64, 2)                                                                                                                           \
    X(global_store_b96, 3)                                                                                                                           \
    X(global_store_b128, 4)
STORES(STORE)

#define STORE_SMALL(name, type, shift)                                                                                                               \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        addresses a;                                                                                                                                 \
        store_addresses(w, in, sizeof(type), a);                                                                                                     \
        const uint32_t *v = w->v[in->o[1].index];                                                                                                    \
        for (uint32_t rest = exec_of(w); rest; rest &= rest - 1) {                                                                                   \
            const int l = __builtin_ctz(rest);                                                                                                       \
            const type x = (type)(v[l] >> (shift));                                                                                                  \
            memcpy(at(a[l]), &x, sizeof x);                                                                                                          \
        }                                                                                                                                            \
        return in + 1;                                                                                                                               \
    }
#define SMALL_STORES(X)                                                                                                                              \
    X(global_store_b8, uint8_t, 0)                                                                                                                   \
    X(global_store_b16, uint16_t, 0)                                                                                                                 \
    X(global_store_d16_hi_b8, uint8_t, 16)                                                                                                           \
    X(global_store_d16_hi_b16, uint16_t, 16)
SMALL_STORES(STORE_SMALL)

/* ---- atomics: [d,] address, data, base. Real ones: workgroups run in parallel ---- */

static inline float float_sum(uint32_t a, uint32_t b)
{
    return as_float(a) + as_float(b);
}

static inline uint32_t float_larger(uint32_t a, uint32_t b)
{
    return as_float(b) > as_float(a) || as_float(a) != as_float(a) ? b : a;
}

static inline uint32_t float_smaller(uint32_t a, uint32_t b)
{
    return as_float(b) < as_float(a) || as_float(a) != as_float(a) ? b : a;
}

static inline const struct insn *atomic_lanes(struct wave *w, const struct insn *in, uint32_t bytes, uint64_t a[LANES], int *data)
{
    const int first = in->returns ? 1 : 0;
    lane_addresses(w, in, first, first + 2, a);
    check(w, in, a, bytes);
    for (uint32_t rest = exec_of(w); rest; rest &= rest - 1)
        if (a[__builtin_ctz(rest)] % bytes)
            emu_fault(w, in, "atomic at 0x%llx is not aligned (lane %d)", (unsigned long long)a[__builtin_ctz(rest)], __builtin_ctz(rest));
    count_read(w, in, a, bytes);
    count_write(w, in, a, bytes);
    *data = in->o[first + 1].index;
    return in + 1;
}

/* `old` is what memory held, `b` the data; a loop of compare and swap. */
#define ATOMIC(name, expr)                                                                                                                           \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        addresses a;                                                                                                                                 \
        int data;                                                                                                                                    \
        const struct insn *next = atomic_lanes(w, in, 4, a, &data);                                                                                  \
        for (uint32_t rest = exec_of(w); rest; rest &= rest - 1) {                                                                                   \
            const int l = __builtin_ctz(rest);                                                                                                       \
            uint32_t *p = at(a[l]);                                                                                                                  \
            const uint32_t b = w->v[data][l];                                                                                                        \
            uint32_t old = __atomic_load_n(p, __ATOMIC_RELAXED);                                                                                     \
            while (!__atomic_compare_exchange_n(p, &old, (uint32_t)(expr), false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {                             \
            }                                                                                                                                        \
            if (in->returns)                                                                                                                         \
                w->v[in->o[0].index][l] = old;                                                                                                       \
        }                                                                                                                                            \
        return next;                                                                                                                                 \
    }
#define ATOMICS(X)                                                                                                                                   \
    X(global_atomic_swap_b32, b)                                                                                                                     \
    X(global_atomic_add_u32, old + b)                                                                                                                \
    X(global_atomic_sub_u32, old - b)                                                                                                                \
    X(global_atomic_and_b32, old &b)                                                                                                                 \
    X(global_atomic_or_b32, old | b)                                                                                                                 \
    X(global_atomic_xor_b32, old ^ b)                                                                                                                \
    X(global_atomic_max_u32, old > b ? old : b)                                                                                                      \
    X(global_atomic_min_u32, old < b ? old : b)                                                                                                      \
    X(global_atomic_max_i32, (int32_t)old > (int32_t)b ? old : b)                                                                                    \
    X(global_atomic_min_i32, (int32_t)old < (int32_t)b ? old : b)                                                                                    \
    X(global_atomic_inc_u32, old >= b ? 0 : old + 1)                                                                                                 \
    X(global_atomic_dec_u32, old == 0 || old > b ? b : old - 1)                                                                                      \
    X(global_atomic_add_f32, as_word(float_sum(old, b)))                                                                                             \
    X(global_atomic_max_f32, float_larger(old, b))                                                                                                   \
    X(global_atomic_min_f32, float_smaller(old, b))
ATOMICS(ATOMIC)

#define ATOMIC64(name, expr)                                                                                                                         \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        addresses a;                                                                                                                                 \
        int data;                                                                                                                                    \
        const struct insn *next = atomic_lanes(w, in, 8, a, &data);                                                                                  \
        for (uint32_t rest = exec_of(w); rest; rest &= rest - 1) {                                                                                   \
            const int l = __builtin_ctz(rest);                                                                                                       \
            uint64_t *p = at(a[l]);                                                                                                                  \
            const uint64_t b = (uint64_t)w->v[data][l] | (uint64_t)w->v[data + 1][l] << 32;                                                          \
            uint64_t old = __atomic_load_n(p, __ATOMIC_RELAXED);                                                                                     \
            while (!__atomic_compare_exchange_n(p, &old, (uint64_t)(expr), false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {                             \
            }                                                                                                                                        \
            if (in->returns) {                                                                                                                       \
                w->v[in->o[0].index][l] = (uint32_t)old;                                                                                             \
                w->v[in->o[0].index + 1][l] = (uint32_t)(old >> 32);                                                                                 \
            }                                                                                                                                        \
        }                                                                                                                                            \
        return next;                                                                                                                                 \
    }
#define ATOMICS64(X)                                                                                                                                 \
    X(global_atomic_swap_b64, b)                                                                                                                     \
    X(global_atomic_add_u64, old + b)                                                                                                                \
    X(global_atomic_or_b64, old | b)                                                                                                                 \
    X(global_atomic_max_u64, old > b ? old : b)                                                                                                      \
    X(global_atomic_min_u64, old < b ? old : b)
ATOMICS64(ATOMIC64)

/* Data: the new value, then what memory has to hold. */
BEGIN(global_atomic_cmpswap_b32)
{
    addresses a;
    int data;
    const struct insn *next = atomic_lanes(w, in, 4, a, &data);
    for (uint32_t rest = exec_of(w); rest; rest &= rest - 1) {
        const int l = __builtin_ctz(rest);
        uint32_t old = w->v[data + 1][l];
        __atomic_compare_exchange_n((uint32_t *)at(a[l]), &old, w->v[data][l], false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
        if (in->returns)
            w->v[in->o[0].index][l] = old;
    }
    return next;
}

BEGIN(global_atomic_cmpswap_b64)
{
    addresses a;
    int data;
    const struct insn *next = atomic_lanes(w, in, 8, a, &data);
    for (uint32_t rest = exec_of(w); rest; rest &= rest - 1) {
        const int l = __builtin_ctz(rest);
        uint64_t old = (uint64_t)w->v[data + 2][l] | (uint64_t)w->v[data + 3][l] << 32;
        const uint64_t value = (uint64_t)w->v[data][l] | (uint64_t)w->v[data + 1][l] << 32;
        __atomic_compare_exchange_n((uint64_t *)at(a[l]), &old, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
        if (in->returns) {
            w->v[in->o[0].index][l] = (uint32_t)old;
            w->v[in->o[0].index + 1][l] = (uint32_t)(old >> 32);
        }
    }
    return next;
}

#define ENTRY_LOAD(name, ...)   {#name, run_##name, OP_LOAD, 0},
#define ENTRY_STORE(name, ...)  {#name, run_##name, OP_STORE, 0},
#define ENTRY_ATOMIC(name, ...) {#name, run_##name, OP_ATOMIC, 0},

const struct op EMU_TABLE(emu_global)[] = {
    LOADS(ENTRY_LOAD) SMALL_LOADS(ENTRY_LOAD) STORES(ENTRY_STORE) SMALL_STORES(ENTRY_STORE) ATOMICS(ENTRY_ATOMIC) ATOMICS64(ENTRY_ATOMIC)
        ENTRY_ATOMIC(global_atomic_cmpswap_b32)
            ENTRY_ATOMIC(global_atomic_cmpswap_b64){"global_atomic_max_num_f32", run_global_atomic_max_f32, OP_ATOMIC, 0},
    {"global_atomic_min_num_f32", run_global_atomic_min_f32, OP_ATOMIC, 0},
    {NULL, NULL, 0, 0}};
