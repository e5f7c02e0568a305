/* tests/hip/emu/decode.c: from the text of llvm-objdump-19 -d to struct insn. The text is used because LLVM's own decoder then stands for the encoding:
 * an emulator that shared a misunderstanding of the encoding with nobody could not be wrong about it. */
#include "tests/hip/emu/emu.h"

#include <ctype.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#ifdef __x86_64__
#include <cpuid.h>
#endif

/* ---- the operations of this host's level ---- */

enum { OP_BUCKETS = 4096 };
static const struct op *op_table[OP_BUCKETS]; /* open addressing */
static pthread_once_t op_once = PTHREAD_ONCE_INIT;

static uint32_t hash_text(const char *s)
{
    uint32_t h = 2166136261u;
    for (; *s; s++)
        h = (h ^ (uint8_t)*s) * 16777619u;
    return h;
}

static void add_ops(const struct op *ops)
{
    for (; ops->name; ops++) {
        uint32_t at = hash_text(ops->name) % OP_BUCKETS;
        while (op_table[at])
            at = (at + 1) % OP_BUCKETS;
        op_table[at] = ops;
    }
}

#define ADD_LEVEL(level)                                                                                                                             \
    do {                                                                                                                                             \
        const struct op *const files[] = {emu_int_##level,    emu_float_##level,  emu_half_##level,   emu_compare_##level, emu_lane_##level,         \
                                          emu_matrix_##level, emu_scalar_##level, emu_global_##level, emu_lds_##level};                              \
        for (size_t i = 0; i < sizeof files / sizeof *files; i++)                                                                                    \
            add_ops(files[i]);                                                                                                                       \
    } while (0)

#ifdef __x86_64__
/* The one feature that not every compiler's check knows by name. */
static bool has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

/* EMU_LEVEL=base or avx2 holds it below what the host has. */
static void choose_level(void)
{
#ifdef __x86_64__
    const char *wish = getenv("EMU_LEVEL");
    const bool below_avx2 = wish && strcmp(wish, "base") == 0, below_avx512 = below_avx2 || (wish && strcmp(wish, "avx2") == 0);
    __builtin_cpu_init();
    if (!below_avx512 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
        ADD_LEVEL(avx512);
        return;
    }
    if (!below_avx2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) {
        ADD_LEVEL(avx2);
        return;
    }
#endif
    ADD_LEVEL(base);
}

const struct op *emu_find_op(const char *name)
{
    pthread_once(&op_once, choose_level);
    for (uint32_t at = hash_text(name) % OP_BUCKETS; op_table[at]; at = (at + 1) % OP_BUCKETS)
        if (strcmp(op_table[at]->name, name) == 0)
            return op_table[at];
    return NULL;
}

/* ---- constants as 64 words, shared ---- */

struct constant {
    _Alignas(64) uint32_t lanes[2 * LANES];
    struct constant *next;
};

enum { CONSTANT_BUCKETS = 1024 };
static struct constant *constants[CONSTANT_BUCKETS];
static pthread_mutex_t constants_lock = PTHREAD_MUTEX_INITIALIZER;

const uint32_t *emu_constant(uint32_t low, uint32_t high)
{
    const uint32_t bucket = (low * 2654435761u ^ high * 40503u) >> 16 & (CONSTANT_BUCKETS - 1);
    pthread_mutex_lock(&constants_lock);
    struct constant *c = constants[bucket];
    while (c && (c->lanes[0] != low || c->lanes[LANES] != high))
        c = c->next;
    if (!c) {
        c = aligned_alloc(64, sizeof *c);
        if (!c)
            abort();
        for (int l = 0; l < LANES; l++) {
            c->lanes[l] = low;
            c->lanes[LANES + l] = high;
        }
        c->next = constants[bucket];
        constants[bucket] = c;
    }
    pthread_mutex_unlock(&constants_lock);
    return c->lanes;
}

/* ---- operands ---- */

static void set_constant(struct operand *o, uint32_t low, uint32_t high)
{
    o->kind = OPERAND_CONST;
    o->literal = low;
    o->lanes = emu_constant(low, high);
}

static void set_scalar_register(struct operand *o, int index, int count)
{
    o->kind = OPERAND_SGPR;
    o->index = (uint8_t)index;
    o->count = (uint8_t)count;
}

/* "12" or "[12:15]" after the letter: first register and count. False: something else. */
static bool register_range(const char *p, int *first, int *count)
{
    char *end;
    const bool list = *p == '[';
    if (list)
        p++;
    if (!isdigit((unsigned char)*p))
        return false;
    const long a = strtol(p, &end, 10);
    long b = a;
    if (list && *end == ':')
        b = strtol(end + 1, &end, 10);
    if (list && *end++ != ']')
        return false;
    if (*end || a < 0 || b < a || b > 255)
        return false;
    *first = (int)a;
    *count = (int)(b - a + 1);
    return true;
}

static bool named_register(const char *p, struct operand *o, bool destination)
{
    static const struct {
        const char *name;
        int index, count;
    } names[] = {{"vcc_lo", S_VCC, 1},       {"vcc_hi", S_VCC + 1, 1}, {"vcc", S_VCC, 2}, {"exec_lo", S_EXEC, 1},
                 {"exec_hi", S_EXEC + 1, 1}, {"exec", S_EXEC, 2},      {"m0", S_M0, 1}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(p, names[i].name) == 0) {
            set_scalar_register(o, names[i].index, names[i].count);
            return true;
        }
    if (strcmp(p, "null") == 0) {
        if (destination)
            set_scalar_register(o, S_BIN, 1);
        else
            set_constant(o, 0, 0);
        return true;
    }
    if (strcmp(p, "scc") == 0 || strcmp(p, "src_scc") == 0) {
        o->kind = OPERAND_SCC;
        return true;
    }
    if (strcmp(p, "off") == 0) {
        o->kind = OPERAND_OFF;
        return true;
    }
    return false;
}

static bool parse_register(const char *p, struct operand *o, bool destination)
{
    int first, count;
    if (named_register(p, o, destination))
        return true;
    if (*p == 'v' && register_range(p + 1, &first, &count)) {
        o->kind = OPERAND_VGPR;
        o->index = (uint8_t)first;
        o->count = (uint8_t)count;
        return first + count <= VGPRS;
    }
    if (*p == 's' && register_range(p + 1, &first, &count)) {
        set_scalar_register(o, first, count);
        return first + count <= S_VCC;
    }
    if (strncmp(p, "ttmp", 4) == 0 && register_range(p + 4, &first, &count)) {
        set_scalar_register(o, S_TTMP + first, count);
        return first + count <= 16;
    }
    return false;
}

static uint32_t half_bits(double x)
{
    const _Float16 h = (_Float16)x;
    uint16_t bits;
    memcpy(&bits, &h, 2);
    return bits;
}

static bool parse_number(const char *p, struct operand *o, uint8_t flags)
{
    char *end;
    const bool hex = strncmp(p, "0x", 2) == 0 || strncmp(p, "-0x", 3) == 0;
    if (!hex && strchr(p, '.')) {
        const double d = strtod(p, &end);
        const float f = (float)d;
        uint32_t low, high;
        uint64_t wide;
        memcpy(&low, &f, 4);
        memcpy(&wide, &d, 8);
        high = 0;
        if (flags & OPF_F16) {
            low = half_bits(d);
        } else if (flags & OPF_F64) {
            low = (uint32_t)wide;
            high = (uint32_t)(wide >> 32);
        }
        set_constant(o, low, high);
        return *end == 0;
    }
    const long long v = strtoll(p, &end, 0);
    if (*end || end == p)
        return false;
    const uint32_t low = (uint32_t)v;
    if (hex && (flags & OPF_F64))
        set_constant(o, 0, low);
    else
        set_constant(o, low, v < 0 || ((flags & OPF_SIGNED64) && low >> 31) ? ~0u : 0);
    return true;
}

static bool parse_operand(char *p, struct operand *o, uint8_t flags, bool destination)
{
    memset(o, 0, sizeof *o);
    bool neg = false, absolute = false;
    if (p[0] == '-' && strchr("vs|et", p[1])) {
        neg = true;
        p++;
    }
    if (*p == '|') {
        char *close = strchr(p + 1, '|');
        if (!close)
            return false;
        *close = 0;
        absolute = true;
        p++;
    }
    if (parse_register(p, o, destination)) {
        if (neg || absolute) {
            o->kind = o->kind == OPERAND_VGPR ? OPERAND_CHANGED : o->kind == OPERAND_SGPR ? OPERAND_CHANGED_SGPR : OPERAND_NONE;
            o->neg = neg;
            o->abs = absolute;
        }
        return o->kind != OPERAND_NONE;
    }
    if (!parse_number(p, o, flags))
        return false;
    if (absolute || neg) { /* |1.0|, and -|0x...| */
        uint32_t x = o->literal;
        const uint32_t sign = flags & OPF_F16 ? 0x8000u : 0x80000000u;
        if (flags & OPF_F64)
            return false;
        x = absolute ? x & ~sign : x;
        set_constant(o, neg ? x ^ sign : x, 0);
    }
    return true;
}

/* ---- modifiers ---- */

static uint8_t bit_list(const char *p) /* "[0,1,1]" */
{
    uint8_t bits = 0;
    int k = 0;
    for (; *p && *p != ']'; p++)
        if (isdigit((unsigned char)*p))
            bits = (uint8_t)(bits | (*p == '1') << k++);
    return bits;
}

static struct dpp *new_dpp(void)
{
    struct dpp *d = calloc(1, sizeof *d);
    if (!d)
        abort();
    d->inside = d->written = ~0u;
    for (int l = 0; l < LANES; l++)
        d->lane[l] = (uint8_t)l;
    return d;
}

/* Lane l of a row of 16 reads lane from(l) of its row; outside 0 .. 15: there is none. */
enum dpp_kind { DPP_QUAD, DPP_XMASK, DPP_ROR, DPP_SHL, DPP_SHR, DPP_SHARE, DPP_MIRROR, DPP_HALF_MIRROR };

static void set_dpp(struct dpp *d, enum dpp_kind kind, const int arg[4])
{
    for (int l = 0; l < LANES; l++) {
        const int p = l & 15;
        int from = 0; /* each kind sets it */
        switch (kind) {
        case DPP_QUAD:
            from = (p & ~3) + arg[p & 3];
            break;
        case DPP_XMASK:
            from = p ^ arg[0];
            break;
        case DPP_ROR:
            from = (p - arg[0]) & 15;
            break;
        case DPP_SHL:
            from = p + arg[0];
            break;
        case DPP_SHR:
            from = p - arg[0];
            break;
        case DPP_SHARE:
            from = arg[0];
            break;
        case DPP_MIRROR:
            from = 15 - p;
            break;
        case DPP_HALF_MIRROR:
            from = (p & 8) | (7 - (p & 7));
            break;
        }
        if (from < 0 || from > 15)
            d->inside &= ~(1u << l);
        d->lane[l] = (uint8_t)((l & 16) | (from & 15));
    }
}

static bool dpp_modifier(const char *word, struct dpp **dpp)
{
    static const struct {
        const char *prefix;
        enum dpp_kind kind;
    } kinds[] = {{"quad_perm:", DPP_QUAD}, {"row_xmask:", DPP_XMASK}, {"row_ror:", DPP_ROR},      {"row_shl:", DPP_SHL},
                 {"row_shr:", DPP_SHR},    {"row_share:", DPP_SHARE}, {"row_mirror", DPP_MIRROR}, {"row_half_mirror", DPP_HALF_MIRROR}};
    if (!*dpp)
        *dpp = new_dpp();
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        const size_t n = strlen(kinds[i].prefix);
        if (strncmp(word, kinds[i].prefix, n) != 0)
            continue;
        int arg[4] = {0};
        const char *p = word + n;
        if (*p == '[')
            p++;
        for (int k = 0; k < 4 && isdigit((unsigned char)*p); k++) {
            char *end;
            arg[k] = (int)strtol(p, &end, 10);
            p = *end == ',' ? end + 1 : end;
        }
        set_dpp(*dpp, kinds[i].kind, arg);
        return true;
    }
    if (strncmp(word, "dpp8:[", 6) == 0) {
        const char *p = word + 6;
        for (int k = 0; k < 8 && isdigit((unsigned char)*p); k++, p += 2)
            for (int l = k; l < LANES; l += 8)
                (*dpp)->lane[l] = (uint8_t)((l & ~7) | (*p - '0'));
        return true;
    }
    const long value = strchr(word, ':') ? strtol(strchr(word, ':') + 1, NULL, 0) : 0;
    if (strncmp(word, "row_mask:", 9) == 0) {
        for (int l = 0; l < LANES; l++)
            if (!(value >> (l >> 4) & 1))
                (*dpp)->written &= ~(1u << l);
    } else if (strncmp(word, "bank_mask:", 10) == 0) {
        for (int l = 0; l < LANES; l++)
            if (!(value >> ((l & 15) >> 2) & 1))
                (*dpp)->written &= ~(1u << l);
    } else if (strncmp(word, "bound_ctrl:", 11) == 0) {
        (*dpp)->zero = value != 0;
    } else if (strncmp(word, "fi:", 3) == 0) {
        (*dpp)->inactive = value != 0;
    } else {
        return false;
    }
    return true;
}

static bool starts(const char *s, const char *prefix)
{
    return strncmp(s, prefix, strlen(prefix)) == 0;
}

static bool parse_modifier(struct insn *in, const char *word, uint32_t encoding, struct dpp **dpp, bool *sel_hi_given)
{
    const char *value = strchr(word, ':') ? strchr(word, ':') + 1 : "";
    if (starts(word, "offset:swizzle("))
        in->offset = (int32_t)(encoding & 0xffff);
    else if (starts(word, "offset:"))
        in->offset = (int32_t)strtol(value, NULL, 0);
    else if (starts(word, "offset0:"))
        in->offset = (int32_t)strtol(value, NULL, 0);
    else if (starts(word, "offset1:"))
        in->offset2 = (int32_t)strtol(value, NULL, 0);
    else if (starts(word, "op_sel:"))
        in->op_sel = bit_list(value);
    else if (starts(word, "op_sel_hi:"))
        in->op_sel_hi = bit_list(value), *sel_hi_given = true;
    else if (starts(word, "neg_lo:"))
        in->neg_lo = bit_list(value);
    else if (starts(word, "neg_hi:"))
        in->neg_hi = bit_list(value);
    else if (strcmp(word, "clamp") == 0)
        in->clamp = true;
    else if (strcmp(word, "mul:2") == 0)
        in->omod = 1;
    else if (strcmp(word, "mul:4") == 0)
        in->omod = 2;
    else if (strcmp(word, "div:2") == 0)
        in->omod = 3;
    else if (strcmp(word, "glc") == 0 || strstr(word, "_RETURN"))
        in->returns = true;
    else if (strcmp(word, "slc") == 0 || strcmp(word, "dlc") == 0 || starts(word, "th:") || starts(word, "scope:"))
        return true; /* caches: nothing to do */
    else
        return dpp_modifier(word, dpp);
    return true;
}

/* ---- instructions ---- */

/* Mnemonic of `text` without the suffix of its encoding, into name[64]; where the operands begin. */
static const char *mnemonic(const char *text, char name[64])
{
    static const char *const suffixes[] = {"_e64_dpp", "_e32_dpp", "_e32", "_e64", "_dpp"};
    size_t n = strcspn(text, " ");
    const char *rest = text + n;
    if (n > 63)
        n = 63;
    memcpy(name, text, n);
    name[n] = 0;
    for (size_t i = 0; i < sizeof suffixes / sizeof *suffixes; i++) {
        const size_t m = strlen(suffixes[i]);
        if (n > m && strcmp(name + n - m, suffixes[i]) == 0) {
            name[n - m] = 0;
            break;
        }
    }
    while (*rest == ' ')
        rest++;
    return rest;
}

/* Cuts "a, b[1:2], c mod mod:[0,1]" : *s at a operand; returns it without blanks, *s behind it, *last set at the end of the list. */
static char *next_operand(char **s, bool *last)
{
    char *p = *s;
    while (*p == ' ')
        p++;
    char *begin = p;
    int depth = 0;
    while (*p && (depth || (*p != ',' && *p != ' '))) {
        depth += *p == '[';
        depth -= *p == ']';
        p++;
    }
    *last = *p != ',';
    if (*p)
        *p++ = 0;
    *s = p;
    return begin;
}

static bool decode_operands(struct insn *in, const struct op *op, const char *rest, uint32_t encoding)
{
    char buffer[256];
    if (strlen(rest) >= sizeof buffer)
        return false;
    memcpy(buffer, rest, strlen(rest) + 1);
    char *s = buffer;
    bool last = *s == 0, sel_hi_given = false;
    while (!last) {
        char *word = next_operand(&s, &last);
        const int k = in->n_operands;
        const bool destination = !(op->flags & OPF_NO_DEST) && (k == 0 || (k == 1 && (op->flags & OPF_CARRY)));
        if (k == OPERANDS || !parse_operand(word, &in->o[k], op->flags, destination))
            return false;
        in->n_operands++;
    }
    struct dpp *dpp = NULL;
    bool known = true;
    char *save;
    for (char *word = strtok_r(s, " ", &save); word; word = strtok_r(NULL, " ", &save))
        known = known && parse_modifier(in, word, encoding, &dpp, &sel_hi_given);
    if (!sel_hi_given && (op->flags & OPF_PACKED))
        in->op_sel_hi = 7;
    if (dpp) {
        const int k = op->flags & OPF_NO_DEST ? 0 : op->flags & OPF_CARRY ? 2 : 1;
        struct operand *o = &in->o[k];
        if (o->kind != OPERAND_VGPR && o->kind != OPERAND_CHANGED)
            return false;
        o->kind = OPERAND_CHANGED;
        o->dpp = true;
        in->dpp = dpp;
    }
    return known;
}

/* Integer results with clamp saturate: nobody has needed that of plain arithmetic. */
static bool clamp_is_modelled(const struct insn *in, const char *name)
{
    return !in->clamp || strstr(name, "_f32") || strstr(name, "_f16") || starts(name, "v_dot") || starts(name, "v_wmma");
}

/* The constants of SOPK have 16 bits, of which the highest is a sign; the disassembler writes them without one. */
static bool has_short_constant(const char *name)
{
    const size_t n = strlen(name);
    return starts(name, "s_movk_") || starts(name, "s_cmovk_") || starts(name, "s_addk_") || starts(name, "s_mulk_") ||
           (starts(name, "s_cmpk_") && n > 4 && strcmp(name + n - 4, "_i32") == 0);
}

static void decode_single(struct insn *in, const char *text, uint32_t encoding)
{
    char name[64];
    const char *rest = mnemonic(text, name);
    const struct op *op = emu_find_op(name);
    in->run = emu_run_unknown;
    if (!op)
        return;
    in->op_class = op->op_class;
    if (op->op_class != OP_OTHER && op->op_class != OP_BARRIER && strcmp(name, "v_nop") != 0) {
        if (!decode_operands(in, op, rest, encoding) || !clamp_is_modelled(in, name))
            return;
        if (has_short_constant(name)) {
            struct operand *constant = &in->o[in->n_operands - 1];
            set_constant(constant, (uint32_t)(int16_t)constant->literal, 0);
        }
        if (in->n_operands == 3 && strcmp(name, "v_cndmask_b32") == 0) /* in a dual instruction vcc is not written */
            set_scalar_register(&in->o[in->n_operands++], S_VCC, 1);
    }
    in->run = op->run;
}

static struct insn *decode_half(const char *text, size_t n, uint32_t encoding, bool gfx12)
{
    char half[256];
    struct insn *in = calloc(1, sizeof *in);
    if (!in)
        abort();
    in->run = emu_run_unknown;
    in->gfx12 = gfx12;
    while (n && text[n - 1] == ' ')
        n--;
    if (n < sizeof half - 8 && n > 7 && starts(text, "v_dual_")) {
        memcpy(half, "v_", 2);
        memcpy(half + 2, text + 7, n - 7);
        half[n - 5] = 0;
        decode_single(in, half, encoding);
    }
    return in;
}

void emu_decode(struct insn *in, const char *text, uint32_t encoding, bool gfx12)
{
    in->gfx12 = gfx12;
    const char *second = strstr(text, " :: ");
    if (!second) {
        decode_single(in, text, encoding);
        return;
    }
    struct insn *x = decode_half(text, (size_t)(second - text), encoding, gfx12);
    struct insn *y = decode_half(second + 4, strlen(second + 4), encoding, gfx12);
    in->dual_x = x;
    in->dual_y = y;
    in->op_class = OP_DUAL;
    in->run = x->run == emu_run_unknown || y->run == emu_run_unknown ? emu_run_unknown : emu_find_op("dual")->run;
}
