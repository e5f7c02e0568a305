/* hip/graph.h: launches that repeat, as one submission each time: recorded, and replayed as a HIP graph. Private to hip/device.c.
 *
 * A decode step is some hundred launches whose parameters are those of the step before: what changes lies in memory. The list of them is compared in full
 * with the lists that have a graph. Equal: that graph is launched. Seen once before: it becomes a graph. New: it is launched as it is. A graph is
 * never updated. It is captured on a stream of its own, so that a capture that goes wrong leaves the stream that works as it was; then no graph is made
 * or launched any more. */
#ifndef BEDSIDE_HIP_GRAPH_H
#define BEDSIDE_HIP_GRAPH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "hip/runtime.h"

enum {
    GRAPH_FEWEST = 16, /* launches of a list that is worth a graph */
    GRAPH_MOST = 8,    /* graphs that are kept, and new lists that are remembered */
};

struct hip_launch {
    uint32_t kernel; /* enum hip_kernel */
    uint32_t gx, gy, gz;
    uint32_t params_bytes, pad;
};

/* Queues one launch on a stream: a hipError_t. */
typedef int hip_launch_fn(void *owner, hip_stream stream, const struct hip_launch *l, const void *params);

struct hip_graphs;

/* -1 with err: what the library lacks, or what failed. `rt` is kept. */
int hip_graphs_open(struct hip_graphs **out, const struct hip_runtime *rt, hip_launch_fn *launch, void *owner, struct error *err);
void hip_graphs_close(struct hip_graphs *g); /* nothing may be queued any more */

/* The first failure, NULL before. From then on lists go out as they are, and there is no use in recording them. */
const char *hip_graphs_failure(const struct hip_graphs *g);

/* Adds to the list. -1: out of memory; the list is as it was. */
int hip_graphs_add(struct hip_graphs *g, const struct hip_launch *l, const void *params);

/* Queues the list, one way or the other, and empties it. */
struct hip_flushed {
    int rc;     /* hipError_t of the first call that failed; nothing was queued after it */
    int kernel; /* the one whose launch failed; -1: the graph's */
};
struct hip_flushed hip_graphs_flush(struct hip_graphs *g, hip_stream stream);

void hip_graphs_drop(struct hip_graphs *g);   /* empties the list without queueing it */
void hip_graphs_idle(struct hip_graphs *g);   /* nothing is queued: graphs that gave way are released */
void hip_graphs_forget(struct hip_graphs *g); /* nothing is queued, and memory that graphs may name goes: all are released */

struct hip_graph_counts {
    uint64_t captured, replayed;
};
struct hip_graph_counts hip_graphs_counts(const struct hip_graphs *g);

#endif
