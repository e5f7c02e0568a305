/* What the scheduler decides, between one piece of work and the next: who starts, who is paused, what the next step carries. */
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "server/scheduler_impl.h"

enum {
    START_SLACK = 2, /* pages that a job should find free beyond its text, so that it is not paused at once */
    GROW_SLACK = 1,  /* pages left for each running one when another starts */
    START_TRIES = 8, /* of a job whose sequence cannot be started, while others run and may give memory back */
    OVERTAKES = 8,   /* smaller jobs that may start before one that waits for memory */
    START_SHARE = 4, /* one part in so many of the gap between tokens may go to starts */
    MOST_RETRY_S = 120,
};

int schedule_open(struct scheduler *s)
{
    const size_t n = (size_t)s->options.max_running;
    step_budget_init(&s->budget, s->options.prefill_chunk, s->options.max_gap_ms);
    s->running = alloc_array(n, sizeof(struct job *));
    s->items = alloc_array(n, sizeof *s->items);
    s->item_jobs = alloc_array(n, sizeof(struct job *));
    s->drops = alloc_array(n, sizeof(struct sequence *));
    s->claims = alloc_array(n, sizeof *s->claims);
    s->claim_jobs = alloc_array(n, sizeof(struct job *));
    s->work.items = s->items;
    s->work.drop = s->drops;
    return s->running && s->items && s->item_jobs && s->drops && s->claims && s->claim_jobs ? 0 : -1;
}

void schedule_close(struct scheduler *s)
{
    free(s->running);
    free(s->items);
    free(s->item_jobs);
    free(s->drops);
    free(s->claims);
    free(s->claim_jobs);
}

/* ---- leaving ---- */

static void remove_running(struct scheduler *s, struct job *j)
{
    for (int i = 0; i < s->n_running; i++) {
        if (s->running[i] == j) {
            memmove(s->running + i, s->running + i + 1, (size_t)(s->n_running - i - 1) * sizeof *s->running);
            s->n_running--;
            return;
        }
    }
}

/* The sequence is freed by the next piece of work. Only between pieces. */
static void drop_sequence(struct scheduler *s, struct job *j)
{
    if (j->seq)
        s->drops[s->work.n_drop++] = j->seq;
    j->seq = NULL;
    j->fed = 0;
    s->start_failed = false;
}

static void retire(struct scheduler *s, struct job *j, enum job_end why, const char *message)
{
    drop_sequence(s, j);
    remove_running(s, j);
    if (j->started) {
        const double run = (double)(scheduler_now(s) - j->started_at) * 1e-9;
        s->usual_run_s = s->usual_run_s > 0 ? (7 * s->usual_run_s + run) / 8 : run;
    }
    scheduler_end_job(s, j, why, message);
}

static void pause_job(struct scheduler *s, struct job *j)
{
    drop_sequence(s, j);
    remove_running(s, j);
    j->report.pauses++;
    s->stats.pauses++;
    list_insert(&s->queue, j);
}

void schedule_sweep_queue(struct scheduler *s, bool refuse, bool stop)
{
    struct job_list old = s->queue;
    if (!old.head)
        return;
    list_init(&s->queue);
    for (struct job *j = old.head, *next; j; j = next) {
        next = j->next;
        if (atomic_load(&j->cancelled))
            scheduler_end_job(s, j, JOB_CANCELLED, NULL);
        else if (stop || (refuse && !j->started))
            scheduler_end_job(s, j, JOB_REFUSED, "the server is shutting down");
        else
            list_add(&s->queue, j);
    }
}

static void sweep_running(struct scheduler *s, bool stop)
{
    for (int i = s->n_running - 1; i >= 0; i--) {
        struct job *j = s->running[i];
        if (atomic_load(&j->cancelled))
            retire(s, j, JOB_CANCELLED, NULL);
        else if (stop)
            retire(s, j, JOB_REFUSED, "the server is shutting down");
    }
}

void schedule_forget(struct scheduler *s, const char *ns)
{
    for (int i = 0; i < s->n_running; i++)
        if (strcmp(s->running[i]->ns, ns) == 0)
            s->running[i]->no_cache = true;
    for (struct job *j = s->queue.head; j; j = j->next) {
        if (strcmp(j->ns, ns) != 0)
            continue;
        j->no_cache = true;
        job_drop_image(j);
    }
}

/* ---- memory ---- */

static int pages_for(int64_t length)
{
    return (int)((length + GRID - 1) / GRID);
}

/* Pages that the job's next n tokens take. */
static int new_pages(const struct job *j, int n)
{
    return pages_for((int64_t)j->fed + n) - pages_for(j->fed);
}

/* Pages that sequences could take; the cache's idle ones among them. */
static int free_pages(const struct scheduler *s)
{
    const int n = s->cache.pages_total - s->cache.pages_running;
    return n > 0 ? n : 0;
}

/* Pages for the job's text and its next token, and `slack` more unless it can never come to need them. */
static int wanted_pages(const struct job *j, int slack)
{
    const int most = pages_for((int64_t)j->n_prompt + j->max_tokens), want = pages_for((int64_t)j->n_tokens + !j->warm) + slack;
    return want < most ? want : most;
}

/* Whether there is room to start the job beside those that run, without taking what they need next. Its own need is counted as if nothing of it could be
 * shared. Alone it may always start: nothing would ever make more room. */
static bool fits(const struct scheduler *s, const struct job *j)
{
    int room = free_pages(s);
    for (int i = 0; i < s->n_running; i++) {
        const int more = wanted_pages(s->running[i], GROW_SLACK) - pages_for(s->running[i]->fed);
        room -= more > 0 ? more : 0;
    }
    return s->n_running == 0 || wanted_pages(j, START_SLACK) <= room;
}

/* Sees to it that every running job can go on by a token: or else the youngest is paused. True: a sequence is to be freed before anything else. */
static bool make_room(struct scheduler *s)
{
    int need = 0;
    struct job *youngest = NULL;
    for (int i = 0; i < s->n_running; i++) {
        struct job *j = s->running[i];
        need += new_pages(j, 1);
        if (!youngest || j->serial > youngest->serial)
            youngest = j;
    }
    if (need <= free_pages(s))
        return false;
    if (s->n_running > 1)
        pause_job(s, youngest);
    else if (youngest->n_tokens > youngest->n_prompt)
        retire(s, youngest, JOB_LENGTH, NULL);
    else
        retire(s, youngest, JOB_FAILED, "there is too little KV memory for the prompt (--kv-memory)");
    return true;
}

/* ---- starting ---- */

static int count_decoding(const struct scheduler *s)
{
    int n = 0;
    for (int i = 0; i < s->n_running; i++)
        n += job_decodes(s->running[i]);
    return n;
}

/* Pages that the job may come to need in all. */
static int most_pages(const struct job *j)
{
    return pages_for((int64_t)j->n_prompt + j->max_tokens);
}

/* Who starts next; NULL: nobody can. In order, except that some smaller jobs for which there is room go before a large one that waits for memory: some,
 * or it might wait for ever. */
static struct job *next_job(const struct scheduler *s)
{
    struct job *head = s->queue.head;
    if (!head || s->n_running >= s->options.max_running || s->start_failed || fits(s, head))
        return s->start_failed || s->n_running >= s->options.max_running ? NULL : head;
    if (head->overtaken >= OVERTAKES)
        return NULL;
    struct job *j = head->next;
    while (j && !(most_pages(j) < most_pages(head) && fits(s, j)))
        j = j->next;
    return j;
}

/* How long the readers of running answers have been waiting for the next step. */
static uint64_t spent_ns(const struct scheduler *s)
{
    return count_decoding(s) ? scheduler_now(s) - s->boundary_at : 0;
}

static bool start_one(struct scheduler *s)
{
    struct job *j = next_job(s);
    if (!j || spent_ns(s) > (uint64_t)s->options.max_gap_ms * 1000000u / START_SHARE)
        return false;
    s->queue.head->overtaken += j != s->queue.head;
    list_remove(&s->queue, j);
    s->running[s->n_running++] = j;
    s->starting = j;
    if (!j->started)
        j->started_at = scheduler_now(s);
    j->turn = s->turns;
    s->start = (struct work_start){
        .options = {.ns = j->ns, .prompt = j->tokens, .n_prompt = j->n_tokens, .image = j->image, .no_cache = j->no_cache},
    };
    s->work.start = &s->start;
    return true;
}

static void count_first_start(struct scheduler *s, struct job *j, const struct cache_result *r)
{
    j->started = true;
    j->report.cache = *r;
    atomic_store(&j->prompt_cached, r->cached);
    histogram_add(&s->stats.queue_time, j->started_at - j->submitted_at);
    s->stats.prompt_tokens_cached += (uint64_t)r->cached;
    if (r->cached == 0)
        s->stats.misses[r->miss]++;
    else if (r->source == CACHE_FROM_DISK)
        s->stats.hits_disk++;
    else
        s->stats.hits_memory++;
}

static void collect_start(struct scheduler *s)
{
    struct job *j = s->starting;
    struct work_start *w = &s->start;
    s->starting = NULL;
    if (!w->seq) {
        if (s->n_running == 1 || ++j->failed_starts >= START_TRIES) {
            retire(s, j, JOB_FAILED, w->err.text);
            return;
        }
        remove_running(s, j);
        list_insert(&s->queue, j);
        s->start_failed = true;
        return;
    }
    job_drop_image(j);
    j->failed_starts = 0;
    j->seq = w->seq;
    j->fed = w->length;
    j->stop = w->stop;
    if (j->started)
        s->stats.resumes++;
    else
        count_first_start(s, j, &w->cache);
    if (j->most_fed < j->fed)
        j->most_fed = j->fed;
    const int done = j->most_fed < j->n_prompt ? j->most_fed : j->n_prompt;
    atomic_store(&j->prompt_done, done);
}

/* ---- steps ---- */

static void add_item(struct scheduler *s, struct job *j, int n)
{
    const bool pick = j->fed + n == j->n_tokens && !j->warm;
    const int i = s->work.n_items++;
    s->item_jobs[i] = j;
    s->items[i] = (struct work_item){.seq = j->seq, .tokens = j->tokens + j->fed, .n_tokens = n, .sampler = pick ? j->sampler : NULL};
}

/* Decode rows of all, then prompt chunks up to the budget, as far as there are pages. */
static void build_step(struct scheduler *s)
{
    int n_claims = 0, pages = free_pages(s);
    for (int i = 0; i < s->n_running; i++) {
        struct job *j = s->running[i];
        if (job_decodes(j)) {
            pages -= new_pages(j, 1);
            add_item(s, j, 1);
            continue;
        }
        s->claim_jobs[n_claims] = j;
        s->claims[n_claims++] = (struct step_claim){.fed = j->fed, .left = j->n_tokens - j->fed, .stop = j->stop, .turn = j->turn};
    }
    s->decode_rows = s->work.n_items;
    if (n_claims == 0)
        return;
    step_shares(&s->budget, s->claims, n_claims, step_budget_rows(&s->budget, s->decode_rows, spent_ns(s)));
    for (int i = 0; i < n_claims; i++) {
        struct job *j = s->claim_jobs[i];
        const int64_t room = ((int64_t)pages_for(j->fed) + pages) * GRID - j->fed;
        const int n = s->claims[i].rows < room ? s->claims[i].rows : (int)room;
        if (n < 1)
            continue;
        pages -= new_pages(j, n);
        j->turn = ++s->turns;
        add_item(s, j, n);
    }
}

bool schedule_next(struct scheduler *s, bool stop, struct work_call *calls)
{
    sweep_running(s, stop);
    s->work.calls = calls;
    s->work.start = NULL;
    s->work.n_items = 0;
    /* What frees memory first, on its own, so that what follows is decided by what there is then. */
    if (s->work.n_drop || calls || make_room(s) || start_one(s))
        return true;
    build_step(s);
    return s->work.n_items > 0;
}

/* ---- results ---- */

/* Counts the n tokens that were computed behind j->fed. */
static void count_computed(struct scheduler *s, const struct job *j, int n)
{
    const int end = j->fed + n, again = j->most_fed < end ? j->most_fed : end;
    if (again > j->fed)
        s->stats.resume_tokens_computed += (uint64_t)(again - j->fed);
    const int from = j->fed > j->most_fed ? j->fed : j->most_fed, to = end < j->n_prompt ? end : j->n_prompt;
    if (to > from)
        s->stats.prompt_tokens_computed += (uint64_t)(to - from);
}

/* The step gave the job this token, which is not the end. */
static void take_token(struct scheduler *s, struct job *j, const struct pick *pick, uint64_t now)
{
    if (alloc_grow(&j->tokens, &j->cap_tokens, (size_t)j->n_tokens + 1, sizeof *j->tokens)) {
        retire(s, j, JOB_FAILED, "the server is out of memory");
        return;
    }
    j->tokens[j->n_tokens++] = pick->id;
    j->report.completion_tokens++;
    s->stats.tokens++;
    if (j->token_at)
        histogram_add(&s->stats.between_tokens, now - j->token_at);
    else
        histogram_add(&s->stats.first_token_time, now - j->submitted_at);
    j->token_at = now;
    if (j->token(j->ctx, pick))
        retire(s, j, JOB_STOP, NULL);
    else if (j->report.completion_tokens >= j->max_tokens)
        retire(s, j, JOB_LENGTH, NULL);
}

/* What the last step gave to one job. */
static void take_result(struct scheduler *s, struct job *j, const struct work_item *item, uint64_t now)
{
    if (item->failed) {
        /* For want of pages that were to be there: nothing is lost, and make_room sees to it. */
        if (s->n_running == 1 || new_pages(j, item->n_tokens) <= free_pages(s))
            retire(s, j, JOB_FAILED, item->err.text);
        return;
    }
    count_computed(s, j, item->n_tokens);
    j->fed += item->n_tokens;
    j->stop = item->stop;
    if (j->most_fed < j->fed)
        j->most_fed = j->fed;
    atomic_store(&j->prompt_done, j->most_fed < j->n_prompt ? j->most_fed : j->n_prompt);
    if (j->fed < j->n_tokens || atomic_load(&j->cancelled))
        return; /* a cancelled job hands out nothing more; the sweep takes it */
    if (!j->picked_at)
        j->picked_at = now;
    if (j->warm)
        retire(s, j, JOB_STOP, NULL);
    else if (item->pick.id < 0)
        retire(s, j, JOB_FAILED, "the model gave no finite logit: the file may be damaged");
    else if (tokenizer_ends_generation(s->tokenizer, item->pick.id))
        retire(s, j, JOB_STOP, NULL);
    else
        take_token(s, j, &item->pick, now);
}

void schedule_collect(struct scheduler *s)
{
    s->work.n_drop = 0;
    s->cache = s->work.cache;
    if (s->starting)
        collect_start(s);
    const int n = s->work.n_items;
    if (n == 0)
        return;
    s->stats.steps++;
    s->boundary_at = scheduler_now(s);
    int rows = 0;
    for (int i = 0; i < n; i++)
        rows += s->items[i].n_tokens;
    if (s->work.step_ns) {
        step_budget_learn(&s->budget, s->decode_rows, rows - s->decode_rows, s->work.step_ns);
        histogram_add(&s->stats.step_time, s->work.step_ns);
    }
    for (int i = 0; i < n; i++)
        take_result(s, s->item_jobs[i], &s->items[i], s->boundary_at);
}

/* ---- counting ---- */

int schedule_count(struct scheduler *s)
{
    struct scheduler_stats *st = &s->stats;
    st->running = s->n_running;
    st->decoding = count_decoding(s);
    st->prefilling = st->running - st->decoding;
    st->queued = st->paused = 0;
    for (const struct job *j = s->queue.head; j; j = j->next) {
        st->queued++;
        st->paused += j->started;
    }
    st->pages_used = s->cache.pages_running;
    st->pages_total = s->cache.pages_total;
    const double wait = s->usual_run_s / (s->n_running > 0 ? s->n_running : 1);
    st->retry_after_s = wait >= MOST_RETRY_S ? MOST_RETRY_S : 1 + (int)wait;

    /* Places that nobody can take for want of memory are none. */
    const struct job *head = s->queue.head;
    const bool blocked = head && s->n_running > 0 && (s->start_failed || !fits(s, head));
    return blocked ? s->n_running : s->options.max_running;
}
