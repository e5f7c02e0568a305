/* tests/hip/emu/graph.c: launches that were captured, and a runtime that replays them wrongly.
 *
 *   EMU_STALE=n  graphs of n kernels or more read what the host had copied to the device when they were made, whatever was copied there since, as
 *                ROCm/hip issue 3887 says of some real ones */
#include "tests/hip/emu/emu.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { NOTED_BYTES = 1 << 16 }; /* larger copies are weights */

struct place {
    uint8_t *at;
    size_t bytes;
    uint8_t *held; /* [bytes] what it held when the graph was made */
};

struct graph {
    int references;
    struct launch *launches; /* [n] */
    size_t n, room;
    struct place *stale; /* [n_stale] */
    size_t n_stale;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct place *noted; /* [n_noted] where copies from the host went */
static size_t n_noted, room_noted;
static long live;

/* ---- places that the host writes ---- */

/* 0: graphs are replayed as they should be. */
static size_t stale_from(void)
{
    const char *text = getenv("EMU_STALE");
    return text ? strtoul(text, NULL, 10) : 0;
}

void emu_graph_note_copy(void *dst, size_t bytes)
{
    if (stale_from() == 0 || bytes > NOTED_BYTES)
        return;
    pthread_mutex_lock(&lock);
    size_t i = 0;
    while (i < n_noted && noted[i].at != dst)
        i++;
    if (i == room_noted) {
        room_noted = room_noted ? 2 * room_noted : 64;
        noted = realloc(noted, room_noted * sizeof *noted);
        if (!noted)
            abort();
    }
    if (i == n_noted)
        noted[n_noted++] = (struct place){.at = dst};
    noted[i].bytes = bytes > noted[i].bytes ? bytes : noted[i].bytes;
    pthread_mutex_unlock(&lock);
}

/* What those places hold now, unless their memory is gone. */
static void hold(struct graph *g)
{
    emu_queue_wait(emu_queue_last());
    pthread_mutex_lock(&lock);
    g->stale = calloc(n_noted + 1, sizeof *g->stale);
    for (size_t i = 0; g->stale && i < n_noted; i++) {
        const struct place p = noted[i];
        uint8_t *held = emu_memory_kind(p.at, p.bytes) == MEMORY_DEVICE ? malloc(p.bytes) : NULL;
        if (!held)
            continue;
        memcpy(held, p.at, p.bytes);
        g->stale[g->n_stale++] = (struct place){p.at, p.bytes, held};
    }
    pthread_mutex_unlock(&lock);
}

/* Puts what was held in place of what is there, and the other way round. */
static void swap(struct graph *g)
{
    emu_queue_wait(emu_queue_last());
    for (size_t i = 0; i < g->n_stale; i++) {
        struct place *p = &g->stale[i];
        if (emu_memory_kind(p->at, p->bytes) != MEMORY_DEVICE)
            continue;
        for (size_t k = 0; k < p->bytes; k++) {
            const uint8_t byte = p->at[k];
            p->at[k] = p->held[k];
            p->held[k] = byte;
        }
    }
}

/* ---- graphs ---- */

static void count(long more)
{
    pthread_mutex_lock(&lock);
    live += more;
    pthread_mutex_unlock(&lock);
}

long emu_graphs_live(void)
{
    pthread_mutex_lock(&lock);
    const long n = live;
    pthread_mutex_unlock(&lock);
    return n;
}

struct graph *emu_graph_new(void)
{
    struct graph *g = calloc(1, sizeof *g);
    if (g) {
        g->references = 1;
        count(1);
    }
    return g;
}

int emu_graph_add(struct graph *g, const struct launch *l)
{
    if (g->n == g->room) {
        const size_t room = g->room ? 2 * g->room : 64;
        struct launch *more = aligned_alloc(64, room * sizeof *more);
        if (!more)
            return -1;
        if (g->n)
            memcpy(more, g->launches, g->n * sizeof *more);
        free(g->launches);
        g->launches = more;
        g->room = room;
    }
    g->launches[g->n++] = *l;
    return 0;
}

struct graph *emu_graph_instantiate(struct graph *g)
{
    g->references++;
    count(1);
    if (stale_from() > 0 && g->n >= stale_from() && !g->stale)
        hold(g);
    return g;
}

void emu_graph_release(struct graph *g)
{
    count(-1);
    if (--g->references > 0)
        return;
    for (size_t i = 0; i < g->n_stale; i++)
        free(g->stale[i].held);
    free(g->stale);
    free(g->launches);
    free(g);
}

int64_t emu_graph_launch(struct graph *g)
{
    int64_t number = emu_queue_last();
    if (g->stale)
        swap(g);
    for (size_t i = 0; i < g->n && number >= 0; i++)
        number = emu_queue_launch(&g->launches[i]);
    if (g->stale)
        swap(g);
    return number;
}

/* What tests noted must not outlive the library. */
__attribute__((destructor)) static void release_noted(void)
{
    free(noted);
}
