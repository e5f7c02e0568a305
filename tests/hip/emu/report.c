/* tests/hip/emu/report.c: what the checks find, and the counters. */
#include "tests/hip/emu/emu.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct module *modules;
static struct counted {
    struct emu_counters counters;
    struct counted *next;
} * counted; /* one for each name of a kernel, kept to the end of the process */
static char last_fault[1024];

/* ---- faults ---- */

void emu_note_fault(const char *format, ...)
{
    va_list args;
    pthread_mutex_lock(&lock);
    va_start(args, format);
    vsnprintf(last_fault, sizeof last_fault, format, args);
    va_end(args);
    fprintf(stderr, "emulator: %s\n", last_fault);
    const bool stop = getenv("EMU_ABORT") != NULL;
    pthread_mutex_unlock(&lock);
    if (stop)
        abort();
}

void emu_fault(const struct wave *w, const struct insn *in, const char *format, ...)
{
    char why[512];
    va_list args;
    va_start(args, format);
    vsnprintf(why, sizeof why, format, args);
    va_end(args);
    struct group *g = w->group;
    const struct kernel *k = g->launch->kernel;
    emu_note_fault("kernel %s, workgroup (%u,%u,%u), wave %u, \"%s\" at 0x%llx: %s", k->name, g->id[0], g->id[1], g->id[2], w->number,
                   k->text[in->number], (unsigned long long)k->address[in->number], why);
    _longjmp(g->fault, 1);
}

EXPORTED const char *emu_last_fault(void)
{
    return last_fault;
}

/* ---- global memory ---- */

/* The range that holds the bytes; NULL: none. */
static const struct range *range_of(const struct group *g, uint64_t at, uint32_t bytes)
{
    if (at >= g->kernarg.begin && at <= g->kernarg.end && g->kernarg.end - at >= bytes)
        return &g->kernarg;
    const int i = emu_find_range(g->ranges, g->n_ranges, at);
    return i >= 0 && g->ranges[i].end - at >= bytes ? &g->ranges[i] : NULL;
}

/* What lies near an address that is in no allocation. */
static void describe(const struct group *g, uint64_t at, char *text, size_t bytes)
{
    const struct range *best = NULL;
    uint64_t distance = 1 << 20;
    for (int i = 0; i < g->n_ranges; i++) {
        const struct range *r = &g->ranges[i];
        const uint64_t d = at < r->begin ? r->begin - at : at >= r->end ? at - r->end : 0;
        if (d < distance) {
            distance = d;
            best = r;
        }
    }
    if (!best)
        snprintf(text, bytes, "no allocation is near");
    else if (at < best->begin)
        snprintf(text, bytes, "%llu bytes before an allocation of %llu bytes", (unsigned long long)(best->begin - at),
                 (unsigned long long)(best->end - best->begin));
    else
        snprintf(text, bytes, "at byte %llu of an allocation of %llu bytes", (unsigned long long)(at - best->begin),
                 (unsigned long long)(best->end - best->begin));
}

void emu_check_lanes(struct wave *w, const struct insn *in, const uint64_t *address, uint32_t bytes)
{
    struct group *g = w->group;
    const struct range *first = NULL;
    bool same = true;
    for (uint32_t rest = w->s[S_EXEC]; rest; rest &= rest - 1) {
        const int l = __builtin_ctz(rest);
        const struct range *r = range_of(g, address[l], bytes);
        if (!r) {
            char near[128];
            describe(g, address[l], near, sizeof near);
            emu_fault(w, in, "lane %d touches %u bytes at 0x%llx, outside every allocation: %s", l, bytes, (unsigned long long)address[l], near);
        }
        same = same && (!first || r == first);
        first = r;
    }
    if (same && first)
        g->seen[in->slot] = *first;
}

/* A line may begin before its allocation does. */
static void mark(struct group *g, uint64_t line, bool write)
{
    const uint64_t first = line * EMU_LINE_BYTES;
    int i = emu_find_range(g->ranges, g->n_ranges, first);
    if (i < 0)
        i = emu_find_range(g->ranges, g->n_ranges, first + EMU_LINE_BYTES - 1);
    if (i < 0)
        return;
    const uint64_t bit = line - g->ranges[i].begin / EMU_LINE_BYTES;
    __atomic_fetch_or(&(write ? g->write_bits : g->read_bits)[i][bit / 64], 1ull << bit % 64, __ATOMIC_RELAXED);
}

void emu_count_lines(struct wave *w, const struct insn *in, const uint64_t *address, uint32_t bytes, bool write)
{
    struct group *g = w->group;
    uint64_t lines[2 * LANES];
    int n = 0;
    (void)in;
    for (uint32_t rest = w->s[S_EXEC]; rest; rest &= rest - 1) {
        const uint64_t a = address[__builtin_ctz(rest)];
        for (uint64_t line = a / EMU_LINE_BYTES; line <= (a + bytes - 1) / EMU_LINE_BYTES; line++) {
            int k = n;
            while (k > 0 && lines[k - 1] != line)
                k--;
            if (k == 0)
                lines[n++] = line;
        }
    }
    for (int k = 0; k < n; k++)
        mark(g, lines[k], write);
    *(write ? &g->lines_written : &g->lines_read) += (uint64_t)n;
}

void emu_check_scalar(struct wave *w, const struct insn *in, uint64_t at, uint32_t bytes)
{
    struct group *g = w->group;
    struct range *seen = &g->seen[in->slot];
    if (at < seen->begin || at > seen->end || seen->end - at < bytes) {
        const struct range *r = range_of(g, at, bytes);
        if (!r) {
            char near[128];
            describe(g, at, near, sizeof near);
            emu_fault(w, in, "reads %u bytes at 0x%llx, outside every allocation: %s", bytes, (unsigned long long)at, near);
        }
        *seen = *r;
    }
    g->bytes_scalar += bytes;
    if (g->lines && (at < g->kernarg.begin || at >= g->kernarg.end))
        for (uint64_t line = at / EMU_LINE_BYTES; line <= (at + bytes - 1) / EMU_LINE_BYTES; line++)
            mark(g, line, false);
}

/* ---- LDS ---- */

void emu_fault_lds(struct wave *w, const struct insn *in, const uint32_t *address, uint32_t offset, uint32_t bytes)
{
    const uint32_t limit = w->group->lds_bytes;
    for (uint32_t rest = w->s[S_EXEC]; rest; rest &= rest - 1) {
        const int l = __builtin_ctz(rest);
        const uint32_t at = address[l] + offset;
        if (at > limit || limit - at < bytes)
            emu_fault(w, in, "lane %d touches %u bytes at 0x%x of LDS, which has %u bytes", l, bytes, at, limit);
    }
    emu_fault(w, in, "LDS address out of range");
}

void emu_note_lds(struct wave *w, const struct insn *in, const uint32_t *address, uint32_t bytes, bool write)
{
    struct group *g = w->group;
    const uint32_t me = 1u << w->number;
    for (uint32_t rest = w->s[S_EXEC]; rest; rest &= rest - 1) {
        const int l = __builtin_ctz(rest);
        for (uint32_t b = 0; b < bytes; b++) {
            struct shadow *s = &g->shadow[address[l] + b];
            if (s->epoch != g->epoch)
                *s = (struct shadow){.epoch = g->epoch};
            const bool other_wrote = s->writer && s->writer != w->number + 1;
            if (other_wrote || (write && (s->readers & ~me)))
                emu_fault(w, in, "race on byte 0x%x of LDS (lane %d): wave %d has %s it since the last barrier", address[l] + b, l,
                          other_wrote ? s->writer - 1 : __builtin_ctz(s->readers & ~me), other_wrote ? "written" : "read");
            if (write)
                s->writer = (uint16_t)(w->number + 1);
            else
                s->readers |= me;
        }
    }
}

/* ---- counters ---- */

static uint64_t vector_ops(const uint64_t *c)
{
    return c[OP_VALU] + c[OP_DOT4] + c[OP_TRANS] + c[OP_DUAL];
}

void emu_count_group(struct group *g)
{
    struct emu_counters *k = g->launch->kernel->counters;
    const uint64_t *c = g->counts;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < OP_CLASSES; i++)
        k->instructions += c[i];
    k->valu += vector_ops(c);
    k->dot4 += c[OP_DOT4];
    k->dual += c[OP_DUAL];
    k->trans += c[OP_TRANS];
    k->wmma += c[OP_WMMA];
    k->salu += c[OP_SALU];
    k->branches += c[OP_BRANCH];
    k->barriers += c[OP_BARRIER];
    k->other += c[OP_OTHER];
    k->smem += c[OP_SMEM];
    k->lds += c[OP_LDS];
    k->loads += c[OP_LOAD];
    k->stores += c[OP_STORE];
    k->atomics += c[OP_ATOMIC];
    k->bytes_read += g->bytes_read;
    k->bytes_written += g->bytes_written;
    k->bytes_scalar += g->bytes_scalar;
    k->bytes_lds += g->bytes_lds;
    k->lines_read += g->lines_read;
    k->lines_written += g->lines_written;
    pthread_mutex_unlock(&lock);
    memset(g->counts, 0, sizeof g->counts);
    g->bytes_read = g->bytes_written = g->bytes_scalar = g->bytes_lds = g->lines_read = g->lines_written = 0;
}

void emu_count_launch(const struct launch *l, uint64_t unique_read, uint64_t unique_written)
{
    struct emu_counters *k = l->kernel->counters;
    const uint64_t groups = (uint64_t)l->grid[0] * l->grid[1] * l->grid[2];
    const uint64_t threads = (uint64_t)l->block[0] * l->block[1] * l->block[2];
    pthread_mutex_lock(&lock);
    k->launches++;
    k->workgroups += groups;
    k->waves += groups * ((threads + LANES - 1) / LANES);
    k->unique_read += unique_read;
    k->unique_written += unique_written;
    pthread_mutex_unlock(&lock);
}

struct emu_counters *emu_counters_for(const char *kernel)
{
    pthread_mutex_lock(&lock);
    struct counted *c = counted;
    while (c && strcmp(c->counters.kernel, kernel) != 0)
        c = c->next;
    if (!c) {
        c = calloc(1, sizeof *c);
        if (c) {
            snprintf(c->counters.kernel, sizeof c->counters.kernel, "%s", kernel);
            c->next = counted;
            counted = c;
        }
    }
    pthread_mutex_unlock(&lock);
    return c ? &c->counters : NULL;
}

EXPORTED int emu_counters(struct emu_counters *out, int cap)
{
    int n = 0;
    emu_queue_wait(emu_queue_last());
    pthread_mutex_lock(&lock);
    for (const struct counted *c = counted; c; c = c->next) {
        if (c->counters.launches == 0)
            continue;
        if (n < cap)
            out[n] = c->counters;
        n++;
    }
    pthread_mutex_unlock(&lock);
    return n;
}

EXPORTED void emu_reset_counters(void)
{
    emu_queue_wait(emu_queue_last());
    pthread_mutex_lock(&lock);
    for (struct counted *c = counted; c; c = c->next) {
        const struct emu_counters k = c->counters;
        c->counters = (struct emu_counters){.vgprs = k.vgprs, .sgprs = k.sgprs, .lds_bytes = k.lds_bytes, .spills = k.spills};
        memcpy(c->counters.kernel, k.kernel, sizeof k.kernel);
    }
    pthread_mutex_unlock(&lock);
}

/* EMU_REPORT=1: a line for each kernel when the program ends. */
__attribute__((destructor)) static void report(void)
{
    static struct emu_counters c[512];
    const char *wanted = getenv("EMU_REPORT");
    if (!wanted || strcmp(wanted, "1") != 0)
        return;
    const int n = emu_counters(c, 512);
    fprintf(stderr, "%-24s %5s %5s %6s %8s %9s %12s %12s %10s %10s %9s %10s %10s %10s %9s %12s %12s %12s %12s\n", "kernel", "vgprs", "sgprs", "lds",
            "launches", "waves", "instructions", "valu", "dot4", "dual", "wmma", "salu", "lds ops", "loads", "stores", "bytes read", "written",
            "lines read", "unique");
    for (int i = 0; i < n && i < 512; i++)
        fprintf(stderr, "%-24s %5u %5u %6u %8llu %9llu %12llu %12llu %10llu %10llu %9llu %10llu %10llu %10llu %9llu %12llu %12llu %12llu %12llu\n",
                c[i].kernel, c[i].vgprs, c[i].sgprs, c[i].lds_bytes, (unsigned long long)c[i].launches, (unsigned long long)c[i].waves,
                (unsigned long long)c[i].instructions, (unsigned long long)c[i].valu, (unsigned long long)c[i].dot4, (unsigned long long)c[i].dual,
                (unsigned long long)c[i].wmma, (unsigned long long)c[i].salu, (unsigned long long)c[i].lds, (unsigned long long)c[i].loads,
                (unsigned long long)c[i].stores, (unsigned long long)c[i].bytes_read, (unsigned long long)c[i].bytes_written,
                (unsigned long long)c[i].lines_read, (unsigned long long)c[i].unique_read);
}

EXPORTED void emu_recover(void)
{
    emu_queue_recover();
    pthread_mutex_lock(&lock);
    last_fault[0] = 0;
    pthread_mutex_unlock(&lock);
}

/* ---- modules ---- */

void emu_add_module(struct module *m)
{
    emu_register(m->image, m->image_bytes, MEMORY_IMAGE);
    pthread_mutex_lock(&lock);
    m->next = modules;
    modules = m;
    pthread_mutex_unlock(&lock);
}

void emu_forget_module(struct module *m)
{
    if (m->image)
        emu_unregister(m->image, MEMORY_IMAGE);
    pthread_mutex_lock(&lock);
    for (struct module **p = &modules; *p; p = &(*p)->next)
        if (*p == m) {
            *p = m->next;
            break;
        }
    pthread_mutex_unlock(&lock);
}

EXPORTED int emu_unknown(char *text, int bytes)
{
    int n = 0, at = 0;
    emu_queue_wait(emu_queue_last());
    pthread_mutex_lock(&lock);
    for (const struct module *m = modules; m; m = m->next)
        for (int k = 0; k < m->n_kernels; k++) {
            struct kernel *kernel = &m->kernels[k];
            if (emu_kernel_decode(kernel) != 0)
                n++;
            for (uint32_t i = 0; i < kernel->n_insns; i++) {
                if (kernel->insns[i].run != emu_run_unknown)
                    continue;
                n++;
                if (at < bytes)
                    at += snprintf(text + at, (size_t)(bytes - at), "%s: %s\n", kernel->name, kernel->text[i]);
            }
        }
    pthread_mutex_unlock(&lock);
    return n;
}
