/* server/bench.c: clients that do nothing but ask, and the arithmetic over what they saw.
 *
 * The calling thread submits, so that a client's next request comes as it would from a real one: after its answer has ended. Tokens are timed where
 * the server would begin to write them out, on the scheduler's thread. */
#include "server/bench.h"

#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/clock.h"

/* Times are of clock_ns; 0 is not yet. */
struct request {
    uint64_t submitted, started, first, last;
    int tokens;
};

struct client {
    struct bench *bench;
    struct job *job;         /* of the request in hand */
    struct request *request; /* the one in hand */
    int left;                /* requests not submitted yet */
};

struct bench {
    const struct bench_options *options;
    struct sampler_params sampling;
    struct logit_bias *bias; /* [n_bias] bans what would end an answer early */
    size_t n_bias;
    int32_t *prompt; /* [prompt_tokens] scratch */

    struct request *requests; /* [clients * requests] */
    int n_requests;           /* submitted */

    /* the scheduler's thread while requests run, the caller's afterwards */
    uint64_t *gaps; /* [n_gaps] ns between tokens */
    size_t n_gaps, cap_gaps;
    bool no_memory;

    struct client *clients; /* [clients] */
    pthread_mutex_t lock;
    pthread_cond_t ended;
    struct client **idle; /* [n_idle] whose request has ended; under lock, as what follows */
    int n_idle;
    int pauses;
    bool failed;
    struct error why;
};

/* ---- options ---- */

int bench_parse_clients(const char *text, int counts[BENCH_MAX_COUNTS], int *n, struct error *err)
{
    *n = 0;
    for (const char *p = text;;) {
        const size_t len = strcspn(p, ",");
        const size_t digits = strspn(p, "0123456789");
        const long count = digits == len && len >= 1 && len <= 6 ? strtol(p, NULL, 10) : 0;
        if (count < 1 || count > BENCH_MAX_CLIENTS)
            return error_set(err, "clients: '%.*s' (item %d) is not a number of clients; the list is like 1,2,4,8, of numbers from 1 to %d",
                             len > 40 ? 40 : (int)len, p, *n + 1, BENCH_MAX_CLIENTS);
        if (*n == BENCH_MAX_COUNTS)
            return error_set(err, "clients: more than %d numbers; the list is like 1,2,4,8", BENCH_MAX_COUNTS);
        counts[(*n)++] = (int)count;
        if (!p[len])
            return 0;
        p += len + 1;
    }
}

int bench_words(const struct tokenizer *t, int32_t **words, size_t *n, struct error *err)
{
    const int32_t n_vocab = tokenizer_vocab_size(t);
    *n = 0;
    *words = alloc_array((size_t)n_vocab, sizeof **words);
    if (!*words)
        return error_set(err, "out of memory");
    for (int32_t id = 0; id < n_vocab; id++) {
        size_t len;
        const char *bytes = tokenizer_bytes(t, id, &len);
        bool printable = len > 0 && tokenizer_kind(t, id) == TOKEN_NORMAL && tokenizer_usable(t, id) && !tokenizer_ends_generation(t, id);
        for (size_t i = 0; i < len && printable; i++)
            printable = bytes[i] >= 0x20 && bytes[i] < 0x7F;
        if (printable)
            (*words)[(*n)++] = id;
    }
    if (*n)
        return 0;
    free(*words);
    *words = NULL;
    return error_set(err, "the model's vocabulary has no printable token to make prompts of");
}

/* Bans of all tokens that end an answer: every answer is as long as asked for, so that runs can be compared. */
static int ban_ends(struct bench *b)
{
    const struct tokenizer *t = b->options->tokenizer;
    size_t cap = 0;
    for (int32_t id = 0; id < tokenizer_vocab_size(t); id++) {
        if (!tokenizer_ends_generation(t, id))
            continue;
        if (alloc_grow(&b->bias, &cap, b->n_bias + 1, sizeof *b->bias))
            return -1;
        b->bias[b->n_bias++] = (struct logit_bias){.id = id, .bias = -1e9f};
    }
    return 0;
}

/* ---- the clients ---- */

static bool on_token(void *ctx, const struct pick *pick)
{
    (void)pick;
    const struct client *c = ctx;
    struct bench *b = c->bench;
    struct request *r = c->request;
    const uint64_t now = clock_ns();
    if (r->tokens++ == 0)
        r->first = now;
    else if (alloc_grow(&b->gaps, &b->cap_gaps, b->n_gaps + 1, sizeof *b->gaps) == 0)
        b->gaps[b->n_gaps++] = now - r->last;
    else
        b->no_memory = true;
    r->last = now;
    return false;
}

static void fail(struct bench *b, const char *message)
{
    if (!b->failed)
        error_set(&b->why, "%s", message);
    b->failed = true;
}

static void on_end(void *ctx, enum job_end why, const char *message, const struct job_report *report)
{
    struct client *c = ctx;
    struct bench *b = c->bench;
    c->request->started = c->request->submitted + (uint64_t)(report->queue_ms * 1e6);
    pthread_mutex_lock(&b->lock);
    b->pauses += report->pauses;
    if (why != JOB_STOP && why != JOB_LENGTH)
        fail(b, message ? message : "a request was cut off");
    b->idle[b->n_idle++] = c;
    pthread_cond_signal(&b->ended);
    pthread_mutex_unlock(&b->lock);
}

static void on_release(void *ctx)
{
    (void)ctx; /* bench_run keeps everything until all have ended */
}

/* The next number of splitmix64 (Steele, Lea, Flood 2014). */
static uint64_t random_next(uint64_t *state)
{
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static const char *submit_message(enum submit_result result)
{
    switch (result) {
    case SUBMIT_TOO_LARGE:
        return "--prompt-tokens and --answer-tokens need more KV memory than there is (--kv-memory)";
    case SUBMIT_NO_MEMORY:
        return "out of memory";
    default:
        return "the scheduler takes no requests";
    }
}

/* The client's next request. False: it was not taken, and the run has failed. */
static bool ask(struct bench *b, struct client *c)
{
    const struct bench_options *o = b->options;
    uint64_t state = o->seed * 0x2545F4914F6CDD1Du + (uint64_t)b->n_requests;
    state = random_next(&state); /* neighbouring seeds begin far apart */
    for (int i = 0; i < o->prompt_tokens; i++)
        b->prompt[i] = o->words[random_next(&state) % o->n_words];
    const struct job_options job = {
        .prompt = b->prompt,
        .n_prompt = o->prompt_tokens,
        .max_tokens = o->answer_tokens,
        .max_tokens_asked = true,
        .sampling = &b->sampling,
        .no_cache = true,
        .token = on_token,
        .end = on_end,
        .release = on_release,
        .ctx = c,
    };
    c->request = &b->requests[b->n_requests++];
    c->request->submitted = clock_ns();
    c->left--;
    const enum submit_result result = scheduler_submit(o->scheduler, &job, &c->job);
    if (result == SUBMIT_OK)
        return true;
    pthread_mutex_lock(&b->lock);
    fail(b, submit_message(result));
    pthread_mutex_unlock(&b->lock);
    return false;
}

/* Waits for a request to end. Returns its client; *failed is whether the run is to be given up. */
static struct client *wait_ended(struct bench *b, bool *failed)
{
    pthread_mutex_lock(&b->lock);
    while (b->n_idle == 0)
        pthread_cond_wait(&b->ended, &b->lock);
    struct client *c = b->idle[--b->n_idle];
    *failed = b->failed;
    pthread_mutex_unlock(&b->lock);
    return c;
}

static void run_clients(struct bench *b)
{
    int running = 0;
    bool failed = false;
    for (int i = 0; i < b->options->clients && !failed; i++) {
        b->clients[i] = (struct client){.bench = b, .left = b->options->requests};
        failed = !ask(b, &b->clients[i]);
        running += !failed;
    }
    while (running > 0) {
        for (int i = 0; failed && i < b->options->clients; i++)
            if (b->clients[i].job)
                job_cancel(b->clients[i].job);
        struct client *c = wait_ended(b, &failed);
        job_unref(c->job);
        c->job = NULL;
        running--;
        if (failed || c->left == 0)
            continue;
        failed = !ask(b, c);
        running += !failed;
    }
}

/* ---- the figures ---- */

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The smallest value that at least the part p of them do not exceed (nearest rank); values ascending, n >= 1. */
static double percentile(const double *values, size_t n, double p)
{
    const size_t rank = (size_t)ceil(p * (double)n);
    return values[rank > 0 ? rank - 1 : 0];
}

/* Sorts the values. */
static struct bench_times times_of(double *values, size_t n)
{
    if (n == 0)
        return (struct bench_times){0};
    qsort(values, n, sizeof *values, by_value);
    return (struct bench_times){.p50 = percentile(values, n, 0.5), .p95 = percentile(values, n, 0.95), .max = values[n - 1]};
}

struct stretch {
    uint64_t begin, end;
};

static int by_begin(const void *a, const void *b)
{
    const struct stretch *x = a, *y = b;
    return (x->begin > y->begin) - (x->begin < y->begin);
}

/* Seconds that lie in at least one of the stretches. Sorts them. */
static double covered(struct stretch *stretches, size_t n)
{
    uint64_t sum = 0, until = 0;
    qsort(stretches, n, sizeof *stretches, by_begin);
    for (size_t i = 0; i < n; i++) {
        const uint64_t begin = stretches[i].begin > until ? stretches[i].begin : until;
        if (stretches[i].end <= begin)
            continue;
        sum += stretches[i].end - begin;
        until = stretches[i].end;
    }
    return (double)sum * 1e-9;
}

static double rate(uint64_t tokens, double seconds)
{
    return seconds > 0 ? (double)tokens / seconds : 0;
}

/* Everything of *out; `stretches` and `values` have room for all requests, `gaps` for all gaps. */
static void sum_up(const struct bench *b, struct stretch *stretches, double *values, double *gaps, struct bench_result *out)
{
    const size_t n = (size_t)b->n_requests;
    uint64_t begin = UINT64_MAX, end = 0, written = 0;
    *out = (struct bench_result){.requests = b->n_requests, .pauses = b->pauses};
    for (size_t i = 0; i < n; i++) {
        const struct request *r = &b->requests[i];
        out->prompt_tokens += (uint64_t)b->options->prompt_tokens;
        out->answer_tokens += (uint64_t)r->tokens;
        written += r->tokens > 1 ? (uint64_t)r->tokens - 1 : 0; /* the first token is the prompt's */
        begin = r->submitted < begin ? r->submitted : begin;
        end = r->last > end ? r->last : end;
    }
    out->seconds = end > begin ? (double)(end - begin) * 1e-9 : 0;

    for (size_t i = 0; i < n; i++)
        stretches[i] = (struct stretch){b->requests[i].first, b->requests[i].last};
    out->total_per_s = rate(written, covered(stretches, n));
    for (size_t i = 0; i < n; i++)
        stretches[i] = (struct stretch){b->requests[i].started, b->requests[i].first};
    out->prefill_per_s = rate(out->prompt_tokens, covered(stretches, n));

    for (size_t i = 0; i < n; i++) {
        const struct request *r = &b->requests[i];
        values[i] = r->tokens > 1 ? rate((uint64_t)r->tokens - 1, (double)(r->last - r->first) * 1e-9) : 0;
    }
    out->client_per_s = times_of(values, n).p50;
    size_t n_first = 0;
    for (size_t i = 0; i < n; i++)
        if (b->requests[i].tokens > 0)
            values[n_first++] = (double)(b->requests[i].first - b->requests[i].submitted) * 1e-6;
    out->first_token = times_of(values, n_first);
    for (size_t i = 0; i < b->n_gaps; i++)
        gaps[i] = (double)b->gaps[i] * 1e-6;
    out->between_tokens = times_of(gaps, b->n_gaps);
}

static int figures(const struct bench *b, struct bench_result *out, struct error *err)
{
    const size_t n = (size_t)b->n_requests;
    struct stretch *stretches = alloc_array(n, sizeof *stretches);
    double *values = alloc_array(n, sizeof *values), *gaps = alloc_array(b->n_gaps, sizeof *gaps);
    const bool ok = stretches && values && gaps && !b->no_memory;
    if (ok)
        sum_up(b, stretches, values, gaps, out);
    free(stretches);
    free(values);
    free(gaps);
    return ok ? 0 : error_set(err, "out of memory");
}

int bench_run(const struct bench_options *options, struct bench_result *out, struct error *err)
{
    struct bench b = {.options = options};
    int rc = -1;
    const size_t clients = (size_t)options->clients;
    if (pthread_mutex_init(&b.lock, NULL))
        return error_set(err, "out of memory");
    if (pthread_cond_init(&b.ended, NULL)) {
        pthread_mutex_destroy(&b.lock);
        return error_set(err, "out of memory");
    }
    b.prompt = alloc_array((size_t)options->prompt_tokens, sizeof *b.prompt);
    b.requests = alloc_array(clients * (size_t)options->requests, sizeof *b.requests);
    b.clients = alloc_array(clients, sizeof *b.clients);
    b.idle = alloc_array(clients, sizeof(struct client *));
    if (!b.prompt || !b.requests || !b.clients || !b.idle || ban_ends(&b)) {
        error_set(err, "out of memory");
        goto done;
    }
    b.sampling = (struct sampler_params){.top_p = 1, .repeat_penalty = 1, .bias = b.bias, .n_bias = b.n_bias}; /* temperature 0 */
    run_clients(&b);
    if (b.failed)
        *err = b.why;
    else
        rc = figures(&b, out, err);
done:
    free(b.gaps);
    free(b.bias);
    free(b.prompt);
    free(b.requests);
    free(b.clients);
    free(b.idle);
    pthread_cond_destroy(&b.ended);
    pthread_mutex_destroy(&b.lock);
    return rc;
}
