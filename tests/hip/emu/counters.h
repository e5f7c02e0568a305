/* tests/hip/emu/counters.h: what libamdhip64-emu.so tells beyond the HIP runtime; found with dlsym. */
#ifndef BEDSIDE_TESTS_EMU_COUNTERS_H
#define BEDSIDE_TESTS_EMU_COUNTERS_H

#include <stdint.h>

enum { EMU_LINE_BYTES = 128 };

/* Of one kernel since the last reset, over all its launches. Instructions are wave instructions: one issue for 32 lanes. */
struct emu_counters {
    char kernel[96];
    uint32_t vgprs, sgprs, lds_bytes, spills;
    uint64_t launches, workgroups, waves;

    uint64_t instructions; /* all; a dual instruction is one */
    uint64_t valu;         /* vector, without WMMA; of these: */
    uint64_t dot4, dual, trans;
    uint64_t wmma;
    uint64_t salu, branches, barriers, other; /* other: waits, hints, cache control */
    uint64_t smem, lds, loads, stores, atomics;

    /* Bytes that active lanes asked for. */
    uint64_t bytes_read, bytes_written; /* global memory, vector operations */
    uint64_t bytes_scalar;              /* s_load */
    uint64_t bytes_lds;

    /* With EMU_LINES=1, else 0. */
    uint64_t lines_read, lines_written; /* distinct lines of EMU_LINE_BYTES in each wave instruction, summed */
    uint64_t unique_read,
        unique_written; /* bytes of the distinct lines of a launch (vector and scalar, without arguments and code), summed over launches */
};

/* Writes up to `cap` entries, one for each kernel that has run; the number of entries there are. Waits for queued work first. */
typedef int emu_counters_fn(struct emu_counters *out, int cap);
int emu_counters(struct emu_counters *out, int cap);

/* Forgets all counts. */
typedef void emu_reset_counters_fn(void);
void emu_reset_counters(void);

/* What was queued since the library was loaded, and what waits for work there were. A graph is one, whatever it holds; captured launches are none. */
struct emu_submissions {
    uint64_t kernels, graphs, copies, fills, waits;
    long graphs_live; /* made, captured or ready to launch, and not yet destroyed */
};
typedef struct emu_submissions emu_submissions_fn(void);
struct emu_submissions emu_submissions(void);

/* The last fault's message, "" when there was none. */
typedef const char *emu_last_fault_fn(void);
const char *emu_last_fault(void);

/* Makes a lost device usable again and forgets the last fault: for tests that provoke one. Queued work is dropped. */
typedef void emu_recover_fn(void);
void emu_recover(void);

/* Instructions of the loaded modules that the emulator does not know, "kernel: instruction" a line, into text; how many. */
typedef int emu_unknown_fn(char *text, int bytes);
int emu_unknown(char *text, int bytes);

#endif
