/* tests/hip/emu/emu.h: an emulator of the machine code of AMD's gfx11, gfx11.5 and gfx12, so that real code objects can be run and counted on machines
 * without such a GPU. Private to tests/hip/emu/; programs see libamdhip64-emu.so, a HIP runtime, and counters.h.
 *
 *   api.c       the functions of the HIP runtime
 *   queue.c     streams: work is done late, by a thread of its own, when somebody waits for it
 *   graph.c     captured launches, and replays that go wrong
 *   memory.c    live allocations with red zones; which addresses a kernel may touch
 *   object.c    code objects: bundle, ELF, kernel descriptors, argument lists
 *   decode.c    the text of llvm-objdump-19 to struct insn, once
 *   run.c       workgroups over host threads, waves between barriers
 *   report.c    counters, faults
 *   op_*.c      what the instructions do, 32 lanes at a time; compiled once for each level of the host's instruction set
 *
 * Wave32 only; no scratch, no flat_* or buffer_* memory operations, no images. What is not known stops the kernel with the text of the instruction.
 * Not modelled: wait counters (the compiler inserts the waits), the order in which WMMA adds, the last bit of exp, log, rcp and rsq. */
#ifndef BEDSIDE_TESTS_EMU_H
#define BEDSIDE_TESTS_EMU_H

#include <setjmp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "tests/hip/emu/counters.h"

enum { LANES = 32, VGPRS = 256, OPERANDS = 6, MAX_WAVES = 32 };

/* Indices of struct wave.s: as the hardware numbers them, then a bin for what is written to `null`. */
enum { S_VCC = 106, S_TTMP = 108, S_M0 = 125, S_EXEC = 126, S_BIN = 128, SGPRS = 136 };

/* ---- instructions ---- */

enum operand_kind {
    OPERAND_NONE,
    OPERAND_VGPR,    /* plain: read in place */
    OPERAND_CONST,   /* .lanes: 32 low words, 32 high words */
    OPERAND_SGPR,    /* the same for all lanes */
    OPERAND_CHANGED, /* a VGPR with neg or abs, or read through DPP */
    OPERAND_CHANGED_SGPR,
    OPERAND_SCC,
    OPERAND_OFF, /* "off": no scalar address */
};

struct operand {
    uint8_t kind;  /* enum operand_kind */
    uint8_t index; /* of the first register */
    uint8_t count; /* registers */
    bool neg : 1, abs : 1, dpp : 1;
    uint32_t literal;      /* OPERAND_CONST: the low word */
    const uint32_t *lanes; /* OPERAND_CONST */
};

/* Lanes that DPP reads from. */
struct dpp {
    uint8_t lane[LANES];
    uint32_t inside;  /* lanes whose source exists */
    uint32_t written; /* by row_mask and bank_mask */
    bool zero;        /* bound_ctrl: a missing source is 0 instead of leaving the destination alone */
    bool inactive;    /* fi: sources that exec switches off count as present */
};

struct wave;
struct insn;
typedef const struct insn *(*op_run)(struct wave *, const struct insn *); /* returns the next one; NULL: the wave ended or waits at a barrier */

struct insn {
    op_run run;
    struct operand o[OPERANDS]; /* in the order of the text */
    const struct dpp *dpp;
    const struct insn *target;                 /* of a branch */
    const struct insn *dual_x, *dual_y;        /* the halves of a dual instruction */
    int32_t offset;                            /* bytes; offset0 of the two-address LDS operations */
    int32_t offset2;                           /* offset1 */
    uint32_t number;                           /* index in its kernel */
    uint8_t n_operands, op_class;              /* enum op_class */
    uint8_t slot;                              /* of struct group.seen: memory operations have each its own, as far as they go */
    uint8_t op_sel, op_sel_hi, neg_lo, neg_hi; /* a bit for each source */
    uint8_t omod;                              /* 0, 1: *2, 2: *4, 3: /2 */
    bool clamp, returns, gfx12;                /* returns: an atomic gives back what was there */
};

enum op_class {
    OP_OTHER, /* waits, hints, cache control */
    OP_VALU,
    OP_DOT4,
    OP_TRANS,
    OP_DUAL,
    OP_WMMA,
    OP_SALU,
    OP_BRANCH,
    OP_BARRIER,
    OP_SMEM,
    OP_LDS,
    OP_LOAD,
    OP_STORE,
    OP_ATOMIC,
    OP_CLASSES
};

/* How the text of an instruction becomes operands, where that depends on the operation. */
enum op_flags {
    OPF_F16 = 1,       /* floating constants are halves */
    OPF_F64 = 2,       /* floating constants are doubles: their high word */
    OPF_PACKED = 4,    /* op_sel_hi is all ones when not written; halves of constants as v_pk_* want them */
    OPF_CARRY = 8,     /* the second operand is a scalar destination */
    OPF_NO_DEST = 16,  /* the first operand is a source (v_cmpx) */
    OPF_SIGNED64 = 32, /* 64-bit: literals are sign-extended */
};

struct op {
    const char *name; /* without _e32, _e64, _dpp */
    op_run run;
    uint8_t op_class, flags;
};

/* One array for each op_*.c and level of the host, ended by a NULL name. */
#define EMU_JOIN2(a, b) a##_##b
#define EMU_JOIN(a, b)  EMU_JOIN2(a, b)
#define EMU_TABLES(level)                                                                                                                            \
    extern const struct op emu_int_##level[], emu_float_##level[], emu_half_##level[], emu_compare_##level[], emu_lane_##level[],                    \
        emu_matrix_##level[], emu_scalar_##level[], emu_global_##level[], emu_lds_##level[]
EMU_TABLES(base);
EMU_TABLES(avx2);
EMU_TABLES(avx512);

const struct op *emu_find_op(const char *name); /* for this host; NULL: unknown */
op_run emu_dual_op(void);                       /* runs dual_x and dual_y */
const struct insn *emu_run_unknown(struct wave *, const struct insn *);

/* ---- modules ---- */

struct kernel_arg {
    uint32_t offset, size;
    char hidden[40]; /* "hidden_block_count_x"; "" for the arguments that the caller gives */
};

struct kernel {
    char name[96];
    struct module *module;
    uint64_t begin, end; /* vaddr of its code */
    struct insn *insns;  /* [n_insns + 1] in order of address, from the first launch on; NULL: not read yet */
    char **text;         /* [n_insns] */
    uint64_t *address;   /* [n_insns] vaddr */
    uint32_t n_insns, room, n_memory;
    struct kernel_arg args[40];
    int n_args;
    uint32_t kernarg_bytes, lds_bytes, scratch_bytes, max_threads;
    uint32_t vgprs, sgprs, spills;
    uint32_t user_sgprs; /* as the descriptor says */
    bool wave32, id_x, id_y, id_z, kernarg_ptr;
    uint32_t kernarg_at;           /* SGPR of the kernarg address */
    struct emu_counters *counters; /* outlives the module */
};

struct module {
    uint8_t *image; /* the loaded segments: address of vaddr 0 */
    size_t image_bytes;
    int file; /* the ELF file, in memory, for LLVM's tools */
    bool gfx12;
    struct kernel *kernels;
    int n_kernels;
    struct module *next;
};

/* 0, or a hipError_t with a message on stderr. */
int emu_module_load(struct module **out, const void *image);
void emu_module_free(struct module *m);
/* Reads the kernel's instructions, unless that has been done. -1: no disassembly. One caller at a time. */
int emu_kernel_decode(struct kernel *k);

/* Decodes one line of disassembly; encoding is its first word. Branch targets are the caller's work: a branch's distance is the literal of its
 * operand 0. What is not understood gets emu_run_unknown. */
void emu_decode(struct insn *in, const char *text, uint32_t encoding, bool gfx12);
const uint32_t *emu_constant(uint32_t low, uint32_t high); /* [64], never freed */

/* ---- memory ---- */

struct range {
    uint64_t begin, end;
};

enum memory_kind { MEMORY_DEVICE, MEMORY_HOST, MEMORY_REGISTERED, MEMORY_IMAGE };

/* bytes of poisoned memory between red zones; NULL: not enough left of EMU_MEMORY, or of the host. */
void *emu_alloc(size_t bytes, enum memory_kind kind);
int emu_free(void *p, enum memory_kind kind);                   /* -1: no such allocation. A red zone that is no longer intact is noted as a fault */
int emu_register(void *p, size_t bytes, enum memory_kind kind); /* memory of somebody else; -1: overlaps another */
int emu_unregister(void *p, enum memory_kind kind);
/* All of it in one live allocation: which kind; -1: no. */
int emu_memory_kind(const void *p, size_t bytes);
void emu_memory_info(size_t *free_bytes, size_t *total);
/* The live ranges in order; valid until the next call. */
const struct range *emu_ranges(int *n);
int emu_find_range(const struct range *ranges, int n, uint64_t address); /* index; -1: none */

/* ---- running ---- */

struct launch {
    struct kernel *kernel;
    uint32_t grid[3], block[3];
    uint32_t dynamic_lds;
    uint64_t number;
    _Alignas(64) uint8_t kernarg[4096];
};

enum { SEEN = 256 };

/* One byte of LDS: who touched it since the last barrier. */
struct shadow {
    uint32_t readers, epoch;
    uint16_t writer; /* wave + 1 */
};

/* What one host thread needs to run workgroups. */
struct group {
    const struct launch *launch;
    const struct range *ranges;
    int n_ranges;
    struct range seen[SEEN]; /* by insn.slot: the allocation that the instruction met last */
    struct range kernarg;
    uint8_t *lds;
    uint32_t lds_bytes;
    struct shadow *shadow; /* [lds_bytes], or NULL: races are not looked for */
    uint32_t epoch;
    uint32_t id[3];
    struct wave *waves; /* [MAX_WAVES] */
    uint32_t n_waves;
    bool lines;                         /* EMU_LINES: count cache lines */
    uint64_t **read_bits, **write_bits; /* EMU_LINES: [n_ranges] a bit for each line of the range */
    uint64_t counts[OP_CLASSES];
    uint64_t bytes_read, bytes_written, bytes_scalar, bytes_lds, lines_read, lines_written;
    jmp_buf fault;
};

struct wave {
    _Alignas(64) uint32_t v[VGPRS][LANES];
    uint32_t s[SGPRS];
    uint32_t scc;
    uint32_t number;         /* in the workgroup */
    const struct insn *next; /* where it goes on; NULL: ended */
    bool at_barrier;
    struct group *group;
};

/* Runs a launch to its end. 0, or a hipError_t after a fault. One caller at a time. */
int emu_run(const struct launch *l);

/* ---- queue ---- */

/* Each gets a number, in order; work of all streams is done in that order, and not before emu_queue_wait or emu_queue_start wants it, or too much waits.
 * -1: out of memory. */
int64_t emu_queue_launch(const struct launch *l);                            /* copies *l */
int64_t emu_queue_copy(void *dst, const void *src, size_t bytes, bool late); /* late: src is read when the copy is done; else now */
int64_t emu_queue_fill(void *dst, int value, size_t bytes, size_t width);
int64_t emu_queue_mark(double *when); /* *when: the time in milliseconds */
int64_t emu_queue_last(void);         /* number of the newest */
void emu_queue_start(int64_t number);
bool emu_queue_done(int64_t number);
int emu_queue_wait(int64_t number); /* 0, or the error that has stopped the device */
int emu_queue_error(void);
void emu_queue_set_error(int error); /* the device is lost: what waits is dropped, also later */
void emu_queue_recover(void);

/* ---- graphs ---- */

struct graph;
struct graph *emu_graph_new(void); /* NULL: out of memory */
int emu_graph_add(struct graph *g, const struct launch *l);
struct graph *emu_graph_instantiate(struct graph *g); /* both are to be released */
void emu_graph_release(struct graph *g);
int64_t emu_graph_launch(struct graph *g);         /* as emu_queue_launch, of all its launches */
void emu_graph_note_copy(void *dst, size_t bytes); /* the host has sent that there */
long emu_graphs_live(void);

/* ---- faults ---- */

/* Stops the kernel: the message names kernel, workgroup, wave and instruction. */
void emu_fault(const struct wave *w, const struct insn *in, const char *format, ...) __attribute__((noreturn, format(printf, 3, 4)));
void emu_check_scalar(struct wave *w, const struct insn *in, uint64_t at, uint32_t bytes);            /* a scalar load; counts it */
void emu_check_lanes(struct wave *w, const struct insn *in, const uint64_t *address, uint32_t bytes); /* faults, or remembers the allocation */
void emu_count_lines(struct wave *w, const struct insn *in, const uint64_t *address, uint32_t bytes, bool write);
void emu_fault_lds(struct wave *w, const struct insn *in, const uint32_t *address, uint32_t offset, uint32_t bytes) __attribute__((noreturn));
void emu_note_lds(struct wave *w, const struct insn *in, const uint32_t *address, uint32_t bytes, bool write); /* faults on a race */
void emu_note_fault(const char *format, ...) __attribute__((format(printf, 1, 2)));                            /* on stderr, and for emu_last_fault */
struct emu_counters *emu_counters_for(const char *kernel);                                                     /* NULL: out of memory */
void emu_count_group(struct group *g); /* adds a thread's counts to its kernel's and resets them */
void emu_count_launch(const struct launch *l, uint64_t unique_read, uint64_t unique_written); /* unique: bytes */
void emu_forget_module(struct module *m);
void emu_add_module(struct module *m);

#endif
