/* server/scheduler_impl.h: what a scheduler is made of. Private to scheduler.c (threads, messages) and schedule.c (decisions). */
#ifndef BEDSIDE_SERVER_SCHEDULER_IMPL_H
#define BEDSIDE_SERVER_SCHEDULER_IMPL_H

#include <pthread.h>
#include <uv.h>

#include "server/engine_thread.h"
#include "server/job.h"
#include "server/scheduler.h"
#include "server/step_budget.h"

enum call_state { CALL_WAITING, CALL_TAKEN, CALL_DONE, CALL_REFUSED };

/* A function that some thread wants run on the engine thread, and waits for; on that thread's stack. */
struct call {
    void (*fn)(struct engine *e, void *arg);
    void *arg;
    const char *drop_ns;   /* not NULL: jobs of the namespace leave the cache alone from now on */
    enum call_state state; /* under the scheduler's lock */
    struct scheduler *owner;
    struct work_call work;
    struct call *next;
};

struct scheduler {
    struct scheduler_options options;
    const struct engine_info *info;
    const struct tokenizer *tokenizer;
    struct engine_thread *engine;
    uv_loop_t loop;
    uv_async_t wake;
    pthread_t thread;

    pthread_mutex_t lock; /* guards these */
    pthread_cond_t call_done;
    struct job_list inbox;
    struct call *calls; /* in order, as the next step boundary will run them */
    int n_jobs;         /* submitted and not ended */
    int places;         /* of them, how many can run: max_running, or as many as do when memory is what others wait for */
    uint64_t serial, submitted, refused_full, refused_large;
    bool draining, cut, stopping; /* each implies the ones before it */
    struct scheduler_stats seen;  /* copies of what follows, for other threads */
    struct engine_cache_stats cache_seen;

    /* scheduler thread */
    struct job_list queue; /* by age */
    struct job **running;  /* [max_running], in order of admission; one may be starting, the others have a sequence */
    int n_running;
    bool start_failed; /* for want of memory: the next start waits until somebody's is given back */
    bool busy;         /* `work` is with the engine thread */
    bool closing;
    struct work work;
    struct work_start start;
    struct job *starting;      /* whose it is; NULL: none */
    struct work_item *items;   /* [max_running] */
    struct job **item_jobs;    /* [max_running] */
    struct sequence **drops;   /* [max_running + 1] */
    struct step_claim *claims; /* [max_running] */
    struct job **claim_jobs;   /* [max_running] */
    int decode_rows;           /* of the step in hand */
    struct step_budget budget;
    uint64_t turns;       /* chunks of prompts given out */
    uint64_t boundary_at; /* when the last step's results came */
    double usual_run_s;   /* running mean of how long jobs ran; 0: none ended yet */
    struct scheduler_stats stats;
    struct engine_cache_stats cache; /* as of the last work */

    atomic_bool step_done;
};

static inline uint64_t scheduler_now(const struct scheduler *s)
{
    return s->options.clock(s->options.clock_ctx);
}

/* ---- schedule.c, all on the scheduler's thread ---- */

/* 0, or -1 out of memory. */
int schedule_open(struct scheduler *s);
void schedule_close(struct scheduler *s);

/* Ends waiting jobs that were cancelled, those that never ran when `refuse`, all when `stop`. Any time. */
void schedule_sweep_queue(struct scheduler *s, bool refuse, bool stop);

/* Takes in what the engine thread has done. */
void schedule_collect(struct scheduler *s);

/* Between pieces of work: ends cancelled running jobs (all when `stop`) and prepares the next piece in s->work. False: there is nothing to do. `calls`: to
 * be run with it, or NULL. */
bool schedule_next(struct scheduler *s, bool stop, struct work_call *calls);

/* Jobs of the namespace neither use nor feed the cache from now on. */
void schedule_forget(struct scheduler *s, const char *ns);

/* Brings s->stats up to date. Returns the places for running jobs as things are. */
int schedule_count(struct scheduler *s);

/* ---- scheduler.c ---- */

/* The job's last callback; the scheduler's reference is dropped. */
void scheduler_end_job(struct scheduler *s, struct job *j, enum job_end why, const char *message);

#endif
