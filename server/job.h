/* server/job.h: one request on its way through the scheduler. Private to the scheduler. */
#ifndef BEDSIDE_SERVER_JOB_H
#define BEDSIDE_SERVER_JOB_H

#include <stdatomic.h>

#include "server/scheduler.h"

struct job {
    /* any thread */
    atomic_int refs;
    atomic_bool cancelled;
    atomic_int prompt_done, prompt_cached;
    struct scheduler *owner;

    /* fixed */
    int n_prompt, max_tokens;
    bool warm;
    char *ns;
    uint64_t serial; /* in order of submission: the largest is the youngest */
    uint64_t submitted_at;
    bool (*token)(void *ctx, const struct pick *pick);
    void (*end)(void *ctx, enum job_end why, const char *message, const struct job_report *report);
    void (*release)(void *ctx);
    void *ctx;

    struct sampler *sampler; /* used by the engine thread in a step, by nobody else; kept over pauses */

    /* scheduler thread */
    int32_t *tokens; /* [n_tokens] the prompt and what was written; the last one written is not yet in the sequence */
    size_t cap_tokens;
    int n_tokens;
    struct cache_image *image; /* for the first start */
    bool no_cache;
    struct sequence *seq; /* NULL: waits, or its start is under way */
    int fed, stop;        /* length of the sequence, and where its next step should end */
    int most_fed;         /* the longest it has been */
    int failed_starts;
    int overtaken;                            /* times that a smaller job started while it was the first of those that wait */
    uint64_t turn;                            /* struct step_claim */
    bool started;                             /* once at least */
    uint64_t started_at, picked_at, token_at; /* first start, first pick, last token; 0: not yet */
    struct job_report report;
    struct job *next; /* in a list */
};

struct job_list { /* first in, first out */
    struct job *head, **tail;
};

void list_init(struct job_list *l);
void list_add(struct job_list *l, struct job *j);
void list_append(struct job_list *l, struct job_list *more); /* empties `more` */
void list_insert(struct job_list *l, struct job *j);         /* before the first that is younger */
void list_remove(struct job_list *l, struct job *j);         /* j is in it */

/* With two references, the caller's and the scheduler's. Takes the image over. NULL when out of memory. */
struct job *job_new(struct scheduler *owner, const struct tokenizer *t, const struct job_options *o);

void job_drop_image(struct job *j);

/* Writes an answer, as opposed to reading its prompt or the text from before a pause: its next row gives a token. */
static inline bool job_decodes(const struct job *j)
{
    return j->seq && j->n_tokens > j->n_prompt && j->fed == j->n_tokens - 1;
}

/* Fills in the report's times; `now` as submitted_at. */
void job_fill_report(struct job *j, uint64_t now);

#endif
