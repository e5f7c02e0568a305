/* tests/hip/emu/op_lane.c: vector operations that look across lanes, and the pair of a dual instruction. */
#include "tests/hip/emu/vector.h"

/* Scalar results of vector operations ignore exec. */
BEGIN(v_readlane_b32)
{
    const uint32_t lane = scalar(w, in, 2) & 31;
    set_scalar(w, in, 0, in->o[1].kind == OPERAND_VGPR ? w->v[in->o[1].index][lane] : scalar(w, in, 1));
    return in + 1;
}

BEGIN(v_readfirstlane_b32)
{
    const uint32_t exec = exec_of(w);
    const int lane = exec ? __builtin_ctz(exec) : 0;
    set_scalar(w, in, 0, in->o[1].kind == OPERAND_VGPR ? w->v[in->o[1].index][lane] : scalar(w, in, 1));
    return in + 1;
}

BEGIN(v_writelane_b32)
{
    w->v[in->o[0].index][scalar(w, in, 2) & 31] = scalar(w, in, 1);
    return in + 1;
}

/* Within rows of 16 (flip 0) or from the other row (flip 16): lane i of a row reads the lane that nibble i of b (low eight), c says. Lanes that exec
 * switches off give 0 with bound_ctrl (op_sel bit 1), and what they hold with fi (op_sel bit 0). */
static inline const struct insn *permute_rows(struct wave *w, const struct insn *in, uint32_t flip)
{
    const uint32_t low = scalar(w, in, 2), high = scalar(w, in, 3), exec = exec_of(w);
    const uint32_t present = in->op_sel & 1 ? ~0u : exec;
    const uint32_t *from = w->v[in->o[1].index];
    lanes r;
    uint32_t mask = exec;
    for (uint32_t l = 0; l < LANES; l++) {
        const uint32_t nibble = (l & 8 ? high : low) >> 4 * (l & 7) & 15;
        const uint32_t at = ((l & 16) ^ flip) | nibble;
        const bool ok = present >> at & 1;
        r[l] = ok ? from[at] : 0;
        if (!ok && !(in->op_sel >> 1 & 1))
            mask &= ~(1u << l);
    }
    put_word(w, in->o[0].index, mask, r);
    return in + 1;
}

BEGIN(v_permlane16_b32)
{
    return permute_rows(w, in, 0);
}

BEGIN(v_permlanex16_b32)
{
    return permute_rows(w, in, 16);
}

/* gfx12: the nibbles come from lanes. */
static inline const struct insn *permute_rows_var(struct wave *w, const struct insn *in, uint32_t flip)
{
    const uint32_t exec = exec_of(w), present = in->op_sel & 1 ? ~0u : exec;
    const uint32_t *from = w->v[in->o[1].index];
    WORDS(2, b);
    lanes r;
    uint32_t mask = exec;
    for (uint32_t l = 0; l < LANES; l++) {
        const uint32_t at = ((l & 16) ^ flip) | (lanes_b[l] & 15);
        const bool ok = present >> at & 1;
        r[l] = ok ? from[at] : 0;
        if (!ok && !(in->op_sel >> 1 & 1))
            mask &= ~(1u << l);
    }
    put_word(w, in->o[0].index, mask, r);
    return in + 1;
}

BEGIN(v_permlane16_var_b32)
{
    return permute_rows_var(w, in, 0);
}

BEGIN(v_permlanex16_var_b32)
{
    return permute_rows_var(w, in, 16);
}

static inline uint32_t bits_below(uint32_t a, int lane)
{
    uint32_t x = a & ((1u << lane) - 1);
    x = x - (x >> 1 & 0x55555555u);
    x = (x & 0x33333333u) + (x >> 2 & 0x33333333u);
    return ((x + (x >> 4)) & 0x0f0f0f0fu) * 0x01010101u >> 24;
}

WORD2(v_mbcnt_lo_u32_b32, bits_below(a, l) + b)
WORD2(v_mbcnt_hi_u32_b32, ((void)a, b)) /* wave32: no lanes above 31 */

/* Both registers change; exec counts. */
BEGIN(v_swap_b32)
{
    lanes a, b;
    memcpy(a, w->v[in->o[0].index], sizeof a);
    memcpy(b, w->v[in->o[1].index], sizeof b);
    put_word(w, in->o[0].index, exec_of(w), b);
    put_word(w, in->o[1].index, exec_of(w), a);
    return in + 1;
}

/* ---- registers chosen by m0 ---- */

static inline uint8_t relative(struct wave *w, const struct insn *in, uint8_t reg)
{
    const uint32_t at = reg + w->s[S_M0];
    if (at >= VGPRS)
        emu_fault(w, in, "register v%u, by m0", at);
    return (uint8_t)at;
}

BEGIN(v_movrels_b32)
{
    put_word(w, in->o[0].index, exec_of(w), w->v[relative(w, in, in->o[1].index)]);
    return in + 1;
}

BEGIN(v_movreld_b32)
{
    WORDS(1, a);
    put_word(w, relative(w, in, in->o[0].index), exec_of(w), lanes_a);
    return in + 1;
}

BEGIN(v_movrelsd_b32)
{
    put_word(w, relative(w, in, in->o[0].index), exec_of(w), w->v[relative(w, in, in->o[1].index)]);
    return in + 1;
}

/* ---- dual instructions: both halves read before either writes ---- */

static inline bool reads(const struct insn *in, uint8_t reg)
{
    for (int k = 0; k < in->n_operands; k++) /* the destination too: v_fmac reads it */
        if ((in->o[k].kind == OPERAND_VGPR || in->o[k].kind == OPERAND_CHANGED) && in->o[k].index == reg)
            return true;
    return false;
}

BEGIN(dual)
{
    const struct insn *x = in->dual_x, *y = in->dual_y;
    const uint8_t dx = x->o[0].index, dy = y->o[0].index;
    if (!reads(y, dx)) {
        x->run(w, x);
        y->run(w, y);
    } else if (!reads(x, dy)) {
        y->run(w, y);
        x->run(w, x);
    } else {
        lanes before, after;
        memcpy(before, w->v[dx], sizeof before);
        x->run(w, x);
        memcpy(after, w->v[dx], sizeof after);
        memcpy(w->v[dx], before, sizeof before);
        y->run(w, y);
        memcpy(w->v[dx], after, sizeof after);
    }
    return in + 1;
}

const struct op EMU_TABLE(emu_lane)[] = {VALU(v_readlane_b32) VALU(v_readfirstlane_b32) VALU(v_writelane_b32) VALU(v_permlane16_b32)
                                             VALU(v_permlanex16_b32) VALU(v_permlane16_var_b32) VALU(v_permlanex16_var_b32) VALU(v_mbcnt_lo_u32_b32)
                                                 VALU(v_mbcnt_hi_u32_b32) VALU(v_swap_b32) VALU(v_movrels_b32) VALU(v_movreld_b32)
                                                     VALU(v_movrelsd_b32) ALSO(dual, dual, OP_DUAL, 0){NULL, NULL, 0, 0}};
