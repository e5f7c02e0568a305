/* tests/hip/emu/operand.h: how operations read and write registers. Included by op_*.c, once for each level of the host. */
#ifndef BEDSIDE_TESTS_EMU_OPERAND_H
#define BEDSIDE_TESTS_EMU_OPERAND_H

#include <string.h>

#include "tests/hip/emu/emu.h"

#define EMU_TABLE(name) EMU_JOIN(name, EMU_LEVEL)

#define RARE static __attribute__((noinline, unused)) /* kept out of the operations, which stay small */

typedef float lane_float __attribute__((may_alias)); /* registers hold words; operations on floats look at the same bytes */
typedef uint32_t lanes[LANES] __attribute__((aligned(64)));
typedef float float_lanes[LANES] __attribute__((aligned(64)));

static inline float as_float(uint32_t u)
{
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static inline uint32_t as_word(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

static inline uint32_t exec_of(const struct wave *w)
{
    return w->s[S_EXEC];
}

/* ---- scalar operands ---- */

static inline uint32_t scalar(const struct wave *w, const struct insn *in, int k)
{
    const struct operand *o = &in->o[k];
    if (o->kind == OPERAND_SGPR)
        return w->s[o->index];
    return o->kind == OPERAND_SCC ? w->scc : o->literal;
}

static inline uint64_t scalar64(const struct wave *w, const struct insn *in, int k)
{
    const struct operand *o = &in->o[k];
    if (o->kind == OPERAND_SGPR)
        return (uint64_t)w->s[o->index] | (uint64_t)w->s[o->index + 1] << 32;
    return (uint64_t)o->literal | (uint64_t)(o->lanes ? o->lanes[LANES] : 0) << 32;
}

static inline void set_scalar(struct wave *w, const struct insn *in, int k, uint32_t value)
{
    w->s[in->o[k].index] = value;
}

static inline void set_scalar64(struct wave *w, const struct insn *in, int k, uint64_t value)
{
    w->s[in->o[k].index] = (uint32_t)value;
    w->s[in->o[k].index + 1] = (uint32_t)(value >> 32);
}

/* ---- vector operands ---- */

/* Lanes that the instruction writes: exec, less those whose DPP source is missing. */
RARE uint32_t dpp_mask(const struct wave *w, const struct dpp *d)
{
    const uint32_t exec = exec_of(w);
    uint32_t present = d->inside;
    if (!d->inactive)
        for (int l = 0; l < LANES; l++)
            if (!(exec >> d->lane[l] & 1))
                present &= ~(1u << l);
    return exec & d->written & (d->zero ? ~0u : present);
}

static inline uint32_t write_mask(const struct wave *w, const struct insn *in)
{
    return __builtin_expect(in->dpp != NULL, 0) ? dpp_mask(w, in->dpp) : exec_of(w);
}

RARE void through_dpp(const struct wave *w, const struct dpp *d, const uint32_t from[LANES], uint32_t to[LANES])
{
    const uint32_t exec = exec_of(w);
    const uint32_t present = d->inactive ? ~0u : exec;
    if (d->inside == ~0u && present == ~0u) {
        for (int l = 0; l < LANES; l++)
            to[l] = from[d->lane[l]];
        return;
    }
    for (int l = 0; l < LANES; l++) {
        const uint32_t ok = (d->inside >> l) & (present >> d->lane[l]) & 1;
        to[l] = from[d->lane[l]] & (0u - ok);
    }
}

static inline void spread(uint32_t to[LANES], uint32_t value)
{
    for (int l = 0; l < LANES; l++)
        to[l] = value;
}

/* Word `word` of a source, modifiers on its sign bit (bit 31 of the last word) when `sign`. */
RARE const uint32_t *changed_source(const struct wave *w, const struct insn *in, int k, int word, bool sign, uint32_t room[LANES])
{
    const struct operand *o = &in->o[k];
    const bool is_scalar = o->kind == OPERAND_CHANGED_SGPR;
    if (is_scalar)
        spread(room, w->s[o->index + word]);
    else if (o->dpp)
        through_dpp(w, in->dpp, w->v[o->index + word], room);
    else
        memcpy(room, w->v[o->index + word], sizeof(uint32_t) * LANES);
    if (!sign)
        return room;
    const uint32_t keep = o->abs ? 0x7fffffffu : ~0u, flip = o->neg ? 0x80000000u : 0;
    for (int l = 0; l < LANES; l++)
        room[l] = (room[l] & keep) ^ flip;
    return room;
}

/* Operand k as 32 words; `room` is used when they have to be made. */
static inline const uint32_t *source(const struct wave *w, const struct insn *in, int k, uint32_t room[LANES])
{
    const struct operand *o = &in->o[k];
    if (o->kind == OPERAND_VGPR)
        return w->v[o->index];
    if (o->kind == OPERAND_CONST)
        return o->lanes;
    if (o->kind == OPERAND_SGPR) {
        spread(room, w->s[o->index]);
        return room;
    }
    if (o->kind == OPERAND_SCC) {
        spread(room, w->scc);
        return room;
    }
    return changed_source(w, in, k, 0, true, room);
}

static inline const lane_float *source_f(const struct wave *w, const struct insn *in, int k, uint32_t room[LANES])
{
    return (const void *)source(w, in, k, room);
}

/* The low (word 0) or high word of a 64-bit operand. */
static inline const uint32_t *source64(const struct wave *w, const struct insn *in, int k, int word, uint32_t room[LANES])
{
    const struct operand *o = &in->o[k];
    if (o->kind == OPERAND_VGPR)
        return w->v[o->index + word];
    if (o->kind == OPERAND_CONST)
        return o->lanes + word * LANES;
    if (o->kind == OPERAND_SGPR) {
        spread(room, w->s[o->index + word]);
        return room;
    }
    return changed_source(w, in, k, word, word == 1, room);
}

/* Destination register `word` of operand k. */
static inline void put_word(struct wave *w, int reg, uint32_t mask, const uint32_t r[LANES])
{
    uint32_t *d = w->v[reg];
    if (__builtin_expect(mask == ~0u, 1)) {
        for (int l = 0; l < LANES; l++)
            d[l] = r[l];
        return;
    }
    for (int l = 0; l < LANES; l++) {
        const uint32_t on = 0u - (mask >> l & 1);
        d[l] = (r[l] & on) | (d[l] & ~on);
    }
}

static inline void put(struct wave *w, const struct insn *in, const uint32_t r[LANES])
{
    put_word(w, in->o[0].index, write_mask(w, in), r);
}

RARE void put_modified(struct wave *w, const struct insn *in, const float r[LANES])
{
    static const float factor[] = {1.0f, 2.0f, 4.0f, 0.5f};
    lanes changed;
    for (int l = 0; l < LANES; l++) {
        const float x = r[l] * factor[in->omod];
        changed[l] = as_word(!in->clamp ? x : !(x > 0.0f) ? 0.0f : x > 1.0f ? 1.0f : x);
    }
    put(w, in, changed);
}

/* Floats: with the output modifiers. */
static inline void put_f(struct wave *w, const struct insn *in, const float r[LANES])
{
    if (__builtin_expect(in->omod || in->clamp, 0)) {
        put_modified(w, in, r);
        return;
    }
    const void *words = r;
    put(w, in, words); /* these files are compiled with -fno-strict-aliasing */
}

/* ---- halves: source op_sel bit k picks the high one ---- */

static inline uint32_t half_bits(const struct insn *in, int k, int bit, uint32_t word)
{
    uint32_t h = (in->op_sel >> bit & 1 ? word >> 16 : word) & 0xffff;
    if (in->o[k].abs)
        h &= 0x7fff;
    if (in->o[k].neg)
        h ^= 0x8000;
    return h;
}

/* Operand k, of which op_sel bit `bit` speaks, as 16-bit values in words. */
static inline void source16(const struct wave *w, const struct insn *in, int k, int bit, uint32_t to[LANES])
{
    const struct operand *o = &in->o[k];
    lanes room;
    const uint32_t *p;
    if (o->kind == OPERAND_CHANGED || o->kind == OPERAND_CHANGED_SGPR)
        p = changed_source(w, in, k, 0, false, room);
    else
        p = source(w, in, k, room);
    for (int l = 0; l < LANES; l++)
        to[l] = half_bits(in, k, bit, p[l]);
}

/* The other half of the destination stays as it is. `bit` is the destination's in op_sel. */
static inline void put16(struct wave *w, const struct insn *in, int bit, const uint32_t r[LANES])
{
    const uint32_t *old = w->v[in->o[0].index];
    lanes word;
    if (in->op_sel >> bit & 1)
        for (int l = 0; l < LANES; l++)
            word[l] = (old[l] & 0xffff) | r[l] << 16;
    else
        for (int l = 0; l < LANES; l++)
            word[l] = (old[l] & 0xffff0000u) | (r[l] & 0xffff);
    put(w, in, word);
}

static inline float half_to_float(uint32_t h)
{
    const uint16_t bits = (uint16_t)h;
    _Float16 x;
    memcpy(&x, &bits, 2);
    return (float)x;
}

static inline uint32_t float_to_half(float f)
{
    const _Float16 x = (_Float16)f;
    uint16_t bits;
    memcpy(&bits, &x, 2);
    return bits;
}

#endif
