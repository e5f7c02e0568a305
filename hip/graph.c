#include "hip/graph.h"

#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"

/* A list is a run of struct hip_launch, each with its parameters behind it, filled up to eight bytes. */
enum { STEP = 8 };

struct kept {
    unsigned char *list; /* [bytes]; NULL: free */
    size_t bytes;
    uint64_t hash, used; /* used: the flush that needed it last */
    hip_graph_exec exec;
};

struct hip_graphs {
    const struct hip_runtime *rt;
    hip_launch_fn *launch;
    void *owner;
    hip_stream side; /* where graphs are captured */
    unsigned char *list;
    size_t bytes, room;
    int n;
    struct kept kept[GRAPH_MOST];
    hip_graph_exec retired;    /* gave way, and may still run */
    uint64_t seen[GRAPH_MOST]; /* hashes of the newest lists without a graph, a ring; 0: none */
    int next_seen;
    uint64_t flushes;
    struct hip_graph_counts counts;
    struct error failure; /* "": none */
};

/* ---- open and close ---- */

int hip_graphs_open(struct hip_graphs **out, const struct hip_runtime *rt, hip_launch_fn *launch, void *owner, struct error *err)
{
    *out = NULL;
    if (rt->no_graphs)
        return error_set(err, "the HIP runtime library %s has no function %s", rt->library, rt->no_graphs);
    struct hip_graphs *g = alloc_array(1, sizeof *g);
    if (!g)
        return error_set(err, "out of memory for HIP graphs");
    g->rt = rt;
    g->launch = launch;
    g->owner = owner;
    const int rc = rt->hipStreamCreateWithFlags(&g->side, HIP_STREAM_NON_BLOCKING);
    if (rc != HIP_OK) {
        struct error why = {""};
        hip_runtime_explain(rt, rc, &why);
        error_set(err, "a queue to capture HIP graphs on: %s", why.text);
        free(g);
        return -1;
    }
    *out = g;
    return 0;
}

void hip_graphs_idle(struct hip_graphs *g)
{
    if (g->retired)
        g->rt->hipGraphExecDestroy(g->retired);
    g->retired = NULL;
}

static void release(struct hip_graphs *g, struct kept *k)
{
    if (k->exec)
        g->rt->hipGraphExecDestroy(k->exec);
    free(k->list);
    *k = (struct kept){0};
}

void hip_graphs_forget(struct hip_graphs *g)
{
    hip_graphs_idle(g);
    for (int i = 0; i < GRAPH_MOST; i++)
        release(g, &g->kept[i]);
}

void hip_graphs_close(struct hip_graphs *g)
{
    if (!g)
        return;
    hip_graphs_forget(g);
    g->rt->hipStreamDestroy(g->side);
    free(g->list);
    free(g);
}

const char *hip_graphs_failure(const struct hip_graphs *g)
{
    return g->failure.text[0] ? g->failure.text : NULL;
}

struct hip_graph_counts hip_graphs_counts(const struct hip_graphs *g)
{
    return g->counts;
}

/* ---- the list ---- */

static size_t filled(size_t bytes)
{
    return (bytes + STEP - 1) / STEP * STEP;
}

int hip_graphs_add(struct hip_graphs *g, const struct hip_launch *l, const void *params)
{
    const size_t room = filled(l->params_bytes);
    if (alloc_grow(&g->list, &g->room, g->bytes + sizeof *l + room, 1))
        return -1;
    unsigned char *at = g->list + g->bytes;
    memcpy(at, l, sizeof *l);
    memset(at + sizeof *l + room - STEP, 0, room ? STEP : 0);
    memcpy(at + sizeof *l, params, l->params_bytes);
    g->bytes += sizeof *l + room;
    g->n++;
    return 0;
}

void hip_graphs_drop(struct hip_graphs *g)
{
    g->n = 0;
    g->bytes = 0;
}

static uint64_t hash_of(const unsigned char *list, size_t bytes)
{
    uint64_t hash = bytes;
    for (size_t i = 0; i < bytes; i += STEP) {
        uint64_t word;
        memcpy(&word, list + i, sizeof word);
        hash = (hash ^ word) * UINT64_C(0x9e3779b97f4a7c15);
        hash ^= hash >> 32;
    }
    return hash ? hash : 1;
}

/* Each launch of the list onto `stream`, up to the first that fails. */
static struct hip_flushed launch_all(const struct hip_graphs *g, hip_stream stream)
{
    for (size_t at = 0; at < g->bytes;) {
        struct hip_launch l;
        memcpy(&l, g->list + at, sizeof l);
        const int rc = g->launch(g->owner, stream, &l, g->list + at + sizeof l);
        if (rc != HIP_OK)
            return (struct hip_flushed){rc, (int)l.kernel};
        at += sizeof l + filled(l.params_bytes);
    }
    return (struct hip_flushed){HIP_OK, -1};
}

/* ---- graphs ---- */

/* For good: what failed once in such new code may fail again, or worse. */
static void give_up(struct hip_graphs *g, int rc, const char *what)
{
    struct error why = {""};
    hip_runtime_explain(g->rt, rc, &why);
    error_set(&g->failure, "%s: %s", what, why.text);
}

static struct kept *find(struct hip_graphs *g, uint64_t hash)
{
    for (int i = 0; i < GRAPH_MOST; i++) {
        struct kept *k = &g->kept[i];
        if (k->list && k->hash == hash && k->bytes == g->bytes && memcmp(k->list, g->list, g->bytes) == 0)
            return k;
    }
    return NULL;
}

/* True when a list of this hash was met lately. A hash that is met by chance only makes a graph too early. */
static bool seen_before(struct hip_graphs *g, uint64_t hash)
{
    for (int i = 0; i < GRAPH_MOST; i++)
        if (g->seen[i] == hash)
            return true;
    g->seen[g->next_seen] = hash;
    g->next_seen = (g->next_seen + 1) % GRAPH_MOST;
    return false;
}

/* The list as a graph that can be launched; NULL: graphs are off now. */
static hip_graph_exec capture(struct hip_graphs *g)
{
    const struct hip_runtime *rt = g->rt;
    hip_graph graph = NULL;
    hip_graph_exec exec = NULL;
    int rc = rt->hipStreamBeginCapture(g->side, HIP_CAPTURE_RELAXED);
    if (rc != HIP_OK) {
        give_up(g, rc, "beginning a capture");
        return NULL;
    }
    const int launched = launch_all(g, g->side).rc, ended = rt->hipStreamEndCapture(g->side, &graph);
    if (launched != HIP_OK || ended != HIP_OK || !graph)
        give_up(g, launched != HIP_OK ? launched : ended != HIP_OK ? ended : HIP_UNKNOWN, "capturing a step");
    else if ((rc = rt->hipGraphInstantiate(&exec, graph, NULL, NULL, 0)) != HIP_OK || !exec) {
        give_up(g, rc != HIP_OK ? rc : HIP_UNKNOWN, "making a graph");
        exec = NULL;
    }
    if (graph)
        rt->hipGraphDestroy(graph);
    return exec;
}

/* A place for one more: a free one, or that of the graph that was needed longest ago. NULL while the last one that gave way may still run. */
static struct kept *place(struct hip_graphs *g)
{
    struct kept *oldest = &g->kept[0];
    for (int i = 0; i < GRAPH_MOST; i++) {
        struct kept *k = &g->kept[i];
        if (!k->list)
            return k;
        if (k->used < oldest->used)
            oldest = k;
    }
    return g->retired ? NULL : oldest;
}

static struct kept *make(struct hip_graphs *g, uint64_t hash)
{
    struct kept *k = place(g);
    unsigned char *list = k ? alloc_array(g->bytes, 1) : NULL;
    hip_graph_exec exec = list ? capture(g) : NULL;
    if (!exec) {
        free(list);
        return NULL;
    }
    g->retired = k->exec ? k->exec : g->retired;
    k->exec = NULL;
    release(g, k);
    memcpy(list, g->list, g->bytes);
    *k = (struct kept){.list = list, .bytes = g->bytes, .hash = hash, .exec = exec};
    g->counts.captured++;
    return k;
}

struct hip_flushed hip_graphs_flush(struct hip_graphs *g, hip_stream stream)
{
    struct hip_flushed f = {HIP_OK, -1};
    struct kept *k = NULL;
    if (g->n == 0)
        return f;
    g->flushes++;
    if (g->n >= GRAPH_FEWEST && !hip_graphs_failure(g)) {
        const uint64_t hash = hash_of(g->list, g->bytes);
        k = find(g, hash);
        if (!k && seen_before(g, hash))
            k = make(g, hash);
    }
    if (k) {
        k->used = g->flushes;
        f.rc = g->rt->hipGraphLaunch(k->exec, stream);
        if (f.rc == HIP_OK)
            g->counts.replayed++;
        else
            give_up(g, f.rc, "launching a graph"); /* whether a part of it runs is not known: the step is lost */
    } else {
        f = launch_all(g, stream);
    }
    hip_graphs_drop(g);
    return f;
}
