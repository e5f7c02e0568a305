/* tests/hip/emu/op_lds.c: the memory of a workgroup, and the lane shuffles that go through its crossbar. Every access is checked against the size that
 * the kernel declares; with EMU_RACES=1 also for two waves that meet at a byte between two barriers, one of them writing. */
#include "tests/hip/emu/operand.h"

#define BEGIN(name) static const struct insn *run_##name(struct wave *w, const struct insn *in)

/* ---- addresses ---- */

/* Addresses from operand k plus offset, modulo 2^32 (the compiler makes use of that: a negative register, a larger offset); all lanes that are on may touch
 * `bytes` there, or the kernel stops. */
static inline void lds_addresses(struct wave *w, const struct insn *in, int k, uint32_t offset, uint32_t bytes, uint32_t to[LANES])
{
    lanes room;
    const uint32_t *v = source(w, in, k, room);
    const uint32_t exec = exec_of(w);
    struct group *g = w->group;
    uint32_t highest = 0;
    for (int l = 0; l < LANES; l++) {
        const uint32_t on = 0u - (exec >> l & 1), a = (v[l] + offset) & on;
        to[l] = a;
        highest = a > highest ? a : highest;
    }
    g->bytes_lds += (uint64_t)__builtin_popcount(exec) * bytes;
    if (__builtin_expect(exec && (highest > g->lds_bytes || g->lds_bytes - highest < bytes), 0))
        emu_fault_lds(w, in, v, offset, bytes);
}

static inline void note_read(struct wave *w, const struct insn *in, const uint32_t a[LANES], uint32_t bytes)
{
    if (__builtin_expect(w->group->shadow != NULL, 0))
        emu_note_lds(w, in, a, bytes, false);
}

static inline void note_write(struct wave *w, const struct insn *in, const uint32_t a[LANES], uint32_t bytes)
{
    if (__builtin_expect(w->group->shadow != NULL, 0))
        emu_note_lds(w, in, a, bytes, true);
}

/* ---- loads: d, address ---- */

static inline void load_at(struct wave *w, const struct insn *in, uint32_t offset, int words, int reg, uint32_t a[LANES])
{
    const uint8_t *lds = w->group->lds;
    lds_addresses(w, in, 1, offset, 4 * (uint32_t)words, a);
    note_read(w, in, a, 4 * (uint32_t)words);
    uint32_t r[4][LANES];
    for (int l = 0; l < LANES; l++) {
        uint32_t x[4];
        memcpy(x, lds + a[l], sizeof(uint32_t) * (size_t)words); /* address 0 for lanes that are off: there is always that much memory */
        for (int i = 0; i < words; i++)
            r[i][l] = x[i];
    }
    for (int i = 0; i < words; i++)
        put_word(w, reg + i, exec_of(w), r[i]);
}

#define LOAD(name, words)                                                                                                                            \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        lanes a;                                                                                                                                     \
        load_at(w, in, (uint32_t)in->offset, words, in->o[0].index, a);                                                                              \
        return in + 1;                                                                                                                               \
    }
/* Two places, `unit` bytes to a step of the offsets. The first result may overwrite the address. */
#define LOAD2(name, words, unit)                                                                                                                     \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        lanes a, address;                                                                                                                            \
        const uint8_t reg = in->o[1].index;                                                                                                          \
        const bool overlaps = reg >= in->o[0].index && reg < in->o[0].index + (words);                                                               \
        lanes saved;                                                                                                                                 \
        if (!overlaps) {                                                                                                                             \
            load_at(w, in, (uint32_t)in->offset *(unit), words, in->o[0].index, a);                                                                  \
            load_at(w, in, (uint32_t)in->offset2 *(unit), words, in->o[0].index + (words), a);                                                       \
            return in + 1;                                                                                                                           \
        }                                                                                                                                            \
        memcpy(address, w->v[reg], sizeof address);                                                                                                  \
        load_at(w, in, (uint32_t)in->offset *(unit), words, in->o[0].index, a);                                                                      \
        memcpy(saved, w->v[reg], sizeof saved);                                                                                                      \
        memcpy(w->v[reg], address, sizeof address);                                                                                                  \
        load_at(w, in, (uint32_t)in->offset2 *(unit), words, in->o[0].index + (words), a);                                                           \
        memcpy(w->v[reg], saved, sizeof saved);                                                                                                      \
        return in + 1;                                                                                                                               \
    }
#define LOADS(X)                                                                                                                                     \
    X(ds_load_b32, 1)                                                                                                                                \
    X(ds_load_b64, 2)                                                                                                                                \
    X(ds_load_b96, 3)                                                                                                                                \
    X(ds_load_b128, 4)
#define LOADS2(X)                                                                                                                                    \
    X(ds_load_2addr_b32, 1, 4)                                                                                                                       \
    X(ds_load_2addr_b64, 2, 8)                                                                                                                       \
    X(ds_load_2addr_stride64_b32, 1, 256)                                                                                                            \
    X(ds_load_2addr_stride64_b64, 2, 512)
LOADS(LOAD)
LOADS2(LOAD2)

#define LOAD_SMALL(name, type, expr)                                                                                                                 \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        lanes a, r;                                                                                                                                  \
        const uint8_t *lds = w->group->lds;                                                                                                          \
        const uint32_t *d = w->v[in->o[0].index];                                                                                                    \
        lds_addresses(w, in, 1, (uint32_t)in->offset, sizeof(type), a);                                                                              \
        note_read(w, in, a, sizeof(type));                                                                                                           \
        for (int l = 0; l < LANES; l++) {                                                                                                            \
            const uint32_t old = d[l];                                                                                                               \
            type x;                                                                                                                                  \
            (void)old;                                                                                                                               \
            memcpy(&x, lds + a[l], sizeof x);                                                                                                        \
            r[l] = (expr);                                                                                                                           \
        }                                                                                                                                            \
        put_word(w, in->o[0].index, exec_of(w), r);                                                                                                  \
        return in + 1;                                                                                                                               \
    }
#define SMALL_LOADS(X)                                                                                                                               \
    X(ds_load_u8, uint8_t, x)                                                                                                                        \
    X(ds_load_i8, int8_t, (uint32_t)(int32_t)x)                                                                                                      \
    X(ds_load_u16, uint16_t, x)                                                                                                                      \
    X(ds_load_i16, int16_t, (uint32_t)(int32_t)x)                                                                                                    \
    X(ds_load_u8_d16, uint8_t, (old & 0xffff0000u) | x)                                                                                              \
    X(ds_load_i8_d16, int8_t, (old & 0xffff0000u) | (uint16_t)(int16_t)x)                                                                            \
    X(ds_load_u16_d16, uint16_t, (old & 0xffff0000u) | x)                                                                                            \
    X(ds_load_u8_d16_hi, uint8_t, (old & 0xffff) | (uint32_t)x << 16)                                                                                \
    X(ds_load_i8_d16_hi, int8_t, (old & 0xffff) | (uint32_t)(int32_t)x << 16)                                                                        \
    X(ds_load_u16_d16_hi, uint16_t, (old & 0xffff) | (uint32_t)x << 16)
SMALL_LOADS(LOAD_SMALL)

/* ---- stores: address, data [, data] ---- */

static inline void store_at(struct wave *w, const struct insn *in, uint32_t offset, int words, int k)
{
    lanes a;
    uint8_t *lds = w->group->lds;
    lds_addresses(w, in, 0, offset, 4 * (uint32_t)words, a);
    note_write(w, in, a, 4 * (uint32_t)words);
    const uint32_t(*v)[LANES] = (const uint32_t(*)[LANES]) & w->v[in->o[k].index];
    for (uint32_t rest = exec_of(w); rest; rest &= rest - 1) {
        const int l = __builtin_ctz(rest);
        uint32_t x[4] = {0};
        for (int i = 0; i < words; i++)
            x[i] = v[i][l];
        memcpy(lds + a[l], x, sizeof(uint32_t) * (size_t)words);
    }
}

#define STORE(name, words)                                                                                                                           \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        store_at(w, in, (uint32_t)in->offset, words, 1);                                                                                             \
        return in + 1;                                                                                                                               \
    }
#define STORE2(name, words, unit)                                                                                                                    \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        store_at(w, in, (uint32_t)in->offset *(unit), words, 1);                                                                                     \
        store_at(w, in, (uint32_t)in->offset2 *(unit), words, 2);                                                                                    \
        return in + 1;                                                                                                                               \
    }
#define STORES(X)                                                                                                                                    \
    X(ds_store_b32, 1)                                                                                                                               \
    X(ds_store_b64, 2)                                                                                                                               \
    X(ds_store_b96, 3)                                                                                                                               \
    X(ds_store_b128, 4)
#define STORES2(X)                                                                                                                                   \
    X(ds_store_2addr_b32, 1, 4)                                                                                                                      \
    X(ds_store_2addr_b64, 2, 8)                                                                                                                      \
    X(ds_store_2addr_stride64_b32, 1, 256)                                                                                                           \
    X(ds_store_2addr_stride64_b64, 2, 512)
STORES(STORE)
STORES2(STORE2)

#define STORE_SMALL(name, type, shift)                                                                                                               \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        lanes a;                                                                                                                                     \
        uint8_t *lds = w->group->lds;                                                                                                                \
        const uint32_t *v = w->v[in->o[1].index];                                                                                                    \
        lds_addresses(w, in, 0, (uint32_t)in->offset, sizeof(type), a);                                                                              \
        note_write(w, in, a, sizeof(type));                                                                                                          \
        for (uint32_t rest = exec_of(w); rest; rest &= rest - 1) {                                                                                   \
            const int l = __builtin_ctz(rest);                                                                                                       \
            const type x = (type)(v[l] >> (shift));                                                                                                  \
            memcpy(lds + a[l], &x, sizeof x);                                                                                                        \
        }                                                                                                                                            \
        return in + 1;                                                                                                                               \
    }
#define SMALL_STORES(X)                                                                                                                              \
    X(ds_store_b8, uint8_t, 0)                                                                                                                       \
    X(ds_store_b16, uint16_t, 0)                                                                                                                     \
    X(ds_store_b8_d16_hi, uint8_t, 16)                                                                                                               \
    X(ds_store_b16_d16_hi, uint16_t, 16)
SMALL_STORES(STORE_SMALL)

/* ---- atomics: [d,] address, data; one host thread runs a workgroup, so plain memory will do. Not noted as races: they may meet ---- */

#define ATOMIC_AS(name, first, result, expr)                                                                                                         \
    BEGIN(name)                                                                                                                                      \
    {                                                                                                                                                \
        lanes a;                                                                                                                                     \
        uint8_t *lds = w->group->lds;                                                                                                                \
        lds_addresses(w, in, first, (uint32_t)in->offset, 4, a);                                                                                     \
        for (uint32_t rest = exec_of(w); rest; rest &= rest - 1) {                                                                                   \
            const int l = __builtin_ctz(rest);                                                                                                       \
            const uint32_t b = w->v[in->o[(first) + 1].index][l];                                                                                    \
            uint32_t old;                                                                                                                            \
            memcpy(&old, lds + a[l], 4);                                                                                                             \
            const uint32_t d = (uint32_t)(expr);                                                                                                     \
            memcpy(lds + a[l], &d, 4);                                                                                                               \
            if (result)                                                                                                                              \
                w->v[in->o[0].index][l] = old;                                                                                                       \
        }                                                                                                                                            \
        return in + 1;                                                                                                                               \
    }
#define ATOMIC(name, rtn, expr)                                                                                                                      \
    ATOMIC_AS(name, 0, false, expr)                                                                                                                  \
    ATOMIC_AS(rtn, 1, true, expr)
#define ATOMICS(X)                                                                                                                                   \
    X(ds_add_u32, ds_add_rtn_u32, old + b)                                                                                                           \
    X(ds_sub_u32, ds_sub_rtn_u32, old - b)                                                                                                           \
    X(ds_and_b32, ds_and_rtn_b32, old &b)                                                                                                            \
    X(ds_or_b32, ds_or_rtn_b32, old | b)                                                                                                             \
    X(ds_xor_b32, ds_xor_rtn_b32, old ^ b)                                                                                                           \
    X(ds_max_u32, ds_max_rtn_u32, old > b ? old : b)                                                                                                 \
    X(ds_min_u32, ds_min_rtn_u32, old < b ? old : b)                                                                                                 \
    X(ds_max_i32, ds_max_rtn_i32, (int32_t)old > (int32_t)b ? old : b)                                                                               \
    X(ds_min_i32, ds_min_rtn_i32, (int32_t)old < (int32_t)b ? old : b)                                                                               \
    X(ds_add_f32, ds_add_rtn_f32, as_word(as_float(old) + as_float(b)))                                                                              \
    X(ds_max_f32, ds_max_rtn_f32, as_float(b) > as_float(old) ? b : old)                                                                             \
    X(ds_min_f32, ds_min_rtn_f32, as_float(b) < as_float(old) ? b : old)
ATOMICS(ATOMIC)
ATOMIC_AS(ds_storexchg_rtn_b32, 1, true, b)

/* d, address, new value, value that memory has to hold */
BEGIN(ds_cmpstore_rtn_b32)
{
    lanes a;
    uint8_t *lds = w->group->lds;
    lds_addresses(w, in, 1, (uint32_t)in->offset, 4, a);
    for (uint32_t rest = exec_of(w); rest; rest &= rest - 1) {
        const int l = __builtin_ctz(rest);
        const uint32_t wanted = w->v[in->o[3].index][l];
        uint32_t old;
        memcpy(&old, lds + a[l], 4);
        if (old == wanted)
            memcpy(lds + a[l], &w->v[in->o[2].index][l], 4);
        w->v[in->o[0].index][l] = old;
    }
    return in + 1;
}

/* ---- shuffles; lanes that are off give 0 ---- */

BEGIN(ds_bpermute_b32)
{
    lanes room, room_data, r;
    const uint32_t exec = exec_of(w);
    const uint32_t *lane = source(w, in, 1, room), *data = source(w, in, 2, room_data);
    for (int l = 0; l < LANES; l++) {
        const uint32_t from = (lane[l] + (uint32_t)in->offset) >> 2 & 31;
        r[l] = data[from] & (0u - (exec >> from & 1));
    }
    put_word(w, in->o[0].index, exec, r);
    return in + 1;
}

BEGIN(ds_permute_b32)
{
    lanes room, room_data, r = {0};
    const uint32_t exec = exec_of(w);
    const uint32_t *lane = source(w, in, 1, room), *data = source(w, in, 2, room_data);
    for (uint32_t rest = exec; rest; rest &= rest - 1) {
        const int l = __builtin_ctz(rest);
        r[(lane[l] + (uint32_t)in->offset) >> 2 & 31] = data[l];
    }
    put_word(w, in->o[0].index, exec, r);
    return in + 1;
}

BEGIN(ds_swizzle_b32)
{
    lanes r;
    const uint32_t exec = exec_of(w), pattern = (uint32_t)in->offset;
    const uint32_t *data = w->v[in->o[1].index];
    for (uint32_t l = 0; l < LANES; l++) {
        const uint32_t from =
            pattern & 0x8000 ? (l & ~3u) | (pattern >> 2 * (l & 3) & 3) : ((l & pattern) | (pattern >> 5 & 31)) ^ (pattern >> 10 & 31);
        r[l] = data[from & 31] & (0u - (exec >> (from & 31) & 1));
    }
    put_word(w, in->o[0].index, exec, r);
    return in + 1;
}

#define ENTRY(name, ...)       {#name, run_##name, OP_LDS, 0},
#define ENTRY2(name, rtn, ...) ENTRY(name) ENTRY(rtn)

const struct op EMU_TABLE(emu_lds)[] = {LOADS(ENTRY) LOADS2(ENTRY) SMALL_LOADS(ENTRY) STORES(ENTRY) STORES2(ENTRY) SMALL_STORES(ENTRY) ATOMICS(ENTRY2)
                                            ENTRY(ds_storexchg_rtn_b32) ENTRY(ds_cmpstore_rtn_b32) ENTRY(ds_bpermute_b32) ENTRY(ds_permute_b32)
                                                ENTRY(ds_swizzle_b32){"ds_add_num_f32", run_ds_add_f32, OP_LDS, 0},
                                        {"ds_max_num_f32", run_ds_max_f32, OP_LDS, 0},
                                        {"ds_min_num_f32", run_ds_min_f32, OP_LDS, 0},
                                        {"ds_max_num_rtn_f32", run_ds_max_rtn_f32, OP_LDS, 0},
                                        {"ds_min_num_rtn_f32", run_ds_min_rtn_f32, OP_LDS, 0},
                                        {NULL, NULL, 0, 0}};
