/* engine/cpu/pool.h: worker threads that share out one job at a time and sleep when there is none.
 *
 * The caller works too: a pool of n threads has n - 1 workers. Between jobs of a running step a worker spins for some tens of microseconds, then
 * sleeps on a futex or condition variable: an idle server uses no CPU. */
#ifndef BEDSIDE_ENGINE_CPU_POOL_H
#define BEDSIDE_ENGINE_CPU_POOL_H

#include "base/error.h"

struct pool;

/* n_threads 0 = one per physical core that this process may run on (affinity mask, cgroup quota). */
struct pool *pool_open(int n_threads, struct error *err);
void pool_close(struct pool *p);
int pool_threads(const struct pool *p);

/* Calls task(arg, i, worker) once for each i in [0, n), in any order and on any thread, and returns when all are done. worker is in
 * [0, pool_threads) and names the scratch memory a task may use. Not reentrant. */
void pool_run(struct pool *p, int n, void (*task)(void *arg, int i, int worker), void *arg);

#endif
