#include "server/job.h"

#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "engine/cache_disk.h"

/* ---- lists ---- */

void list_init(struct job_list *l)
{
    l->head = NULL;
    l->tail = &l->head;
}

void list_add(struct job_list *l, struct job *j)
{
    j->next = NULL;
    *l->tail = j;
    l->tail = &j->next;
}

void list_append(struct job_list *l, struct job_list *more)
{
    if (!more->head)
        return;
    *l->tail = more->head;
    l->tail = more->tail;
    list_init(more);
}

void list_insert(struct job_list *l, struct job *j)
{
    struct job **at = &l->head;
    while (*at && (*at)->serial < j->serial)
        at = &(*at)->next;
    j->next = *at;
    *at = j;
    if (!j->next)
        l->tail = &j->next;
}

void list_remove(struct job_list *l, struct job *j)
{
    struct job **at = &l->head;
    while (*at != j)
        at = &(*at)->next;
    *at = j->next;
    if (!*at)
        l->tail = at;
    j->next = NULL;
}

/* ---- jobs ---- */

struct job *job_new(struct scheduler *owner, const struct tokenizer *t, const struct job_options *o)
{
    struct job *j = alloc_array(1, sizeof *j);
    if (!j)
        return NULL;
    const char *ns = o->ns ? o->ns : "";
    j->ns = alloc_text(ns, strlen(ns));
    if (!o->warm)
        j->sampler = sampler_new(t, o->sampling);
    if (!j->ns || (!o->warm && !j->sampler) || alloc_grow(&j->tokens, &j->cap_tokens, (size_t)o->n_prompt, sizeof *j->tokens)) {
        sampler_free(j->sampler);
        free(j->ns);
        free(j);
        return NULL;
    }
    memcpy(j->tokens, o->prompt, (size_t)o->n_prompt * sizeof *j->tokens);
    if (j->sampler)
        sampler_prompt(j->sampler, j->tokens, (size_t)o->n_prompt);
    atomic_store(&j->refs, 2);
    j->owner = owner;
    j->n_prompt = j->n_tokens = o->n_prompt;
    j->max_tokens = o->warm ? 0 : o->max_tokens;
    j->warm = o->warm;
    j->no_cache = o->no_cache;
    j->image = o->image;
    j->token = o->token;
    j->end = o->end;
    j->release = o->release;
    j->ctx = o->ctx;
    j->report = (struct job_report){.prompt_tokens = o->n_prompt, .cache = {.miss = CACHE_MISS_OFF, .miss_at = -1}};
    return j;
}

void job_drop_image(struct job *j)
{
    cache_image_free(j->image);
    free(j->image);
    j->image = NULL;
}

void job_unref(struct job *j)
{
    if (!j || atomic_fetch_sub(&j->refs, 1) != 1)
        return;
    j->release(j->ctx);
    job_drop_image(j);
    sampler_free(j->sampler);
    free(j->tokens);
    free(j->ns);
    free(j);
}

int job_prompt_done(const struct job *j)
{
    return atomic_load(&j->prompt_done);
}

int job_prompt_cached(const struct job *j)
{
    return atomic_load(&j->prompt_cached);
}

static double ms_between(uint64_t from, uint64_t to)
{
    return to > from ? (double)(to - from) * 1e-6 : 0;
}

void job_fill_report(struct job *j, uint64_t now)
{
    struct job_report *r = &j->report;
    const bool read = j->picked_at != 0;
    r->queue_ms = ms_between(j->submitted_at, j->started ? j->started_at : now);
    r->prefill_ms = j->started ? ms_between(j->started_at, read ? j->picked_at : now) : 0;
    r->decode_ms = read ? ms_between(j->picked_at, now) : 0;
}
