/* server/bench.h: so many clients at once, each with one request after the other, against the scheduler; and what they saw. */
#ifndef BEDSIDE_SERVER_BENCH_H
#define BEDSIDE_SERVER_BENCH_H

#include <stdint.h>

#include "base/error.h"
#include "engine/tokenizer.h"
#include "server/scheduler.h"

enum { BENCH_MAX_CLIENTS = 256, BENCH_MAX_COUNTS = 16 };

/* "1,2,4,8": into counts[0..*n). 0, or -1 with err, which names the item and the limits. */
int bench_parse_clients(const char *text, int counts[BENCH_MAX_COUNTS], int *n, struct error *err);

struct bench_options {
    struct scheduler *scheduler;
    const struct tokenizer *tokenizer;
    const int32_t *words; /* [n_words] ids that prompts are made of (bench_words) */
    size_t n_words;
    int clients;                      /* 1 .. BENCH_MAX_CLIENTS */
    int requests;                     /* of each client, one after the other; >= 1 */
    int prompt_tokens, answer_tokens; /* of each request, >= 1 */
    uint64_t seed;                    /* the prompts': no two requests of a seed are alike, nor of different seeds */
};

/* Milliseconds; 0 where there were none. */
struct bench_times {
    double p50, p95, max;
};

struct bench_result {
    int requests;
    uint64_t prompt_tokens, answer_tokens; /* of all of them */
    double seconds;                        /* from the first request to the last token */
    double total_per_s;                    /* answer tokens per second of all clients, over the time in which at least one answer is written */
    double client_per_s;                   /* answer tokens per second of one answer, from its first token to its last; the median */
    double prefill_per_s;                  /* prompt tokens per second of all clients, over the time in which at least one prompt is read */
    struct bench_times first_token;        /* from a request to its first token */
    struct bench_times between_tokens;     /* from one token of an answer to its next */
    int pauses;                            /* times that a request gave its KV memory to an older one */
};

/* The ordinary tokens that are printable ASCII. *words is the caller's to free. -1 with err when out of memory, or there are none. */
int bench_words(const struct tokenizer *t, int32_t **words, size_t *n, struct error *err);

/* Returns when all requests have ended: 0, or -1 with err. Nobody else should use the scheduler meanwhile. */
int bench_run(const struct bench_options *options, struct bench_result *out, struct error *err);

#endif
