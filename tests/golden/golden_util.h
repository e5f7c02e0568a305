/* tests/golden/golden_util.h: what the golden tests share: opening engines and files, running tokens, comparing with reference logits. */
#ifndef BEDSIDE_TESTS_GOLDEN_UTIL_H
#define BEDSIDE_TESTS_GOLDEN_UTIL_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"

enum { GOLDEN_THREADS = 2 };

static inline struct engine *golden_engine_with(const struct engine_options *o)
{
    struct engine *e = NULL;
    struct error err = {""};
    if (engine_open(&e, o, &err))
        fail_msg("%s: %s", o->model_path, err.text);
    return e;
}

/* The options the tests start from: exact KV, a small fixed budget, so that no machine decides the outcome. */
static inline struct engine_options golden_options(const char *path, bool plain)
{
    return (struct engine_options){
        .model_path = path,
        .context = 2048,
        .n_threads = GOLDEN_THREADS,
        .kv_type = KV_F32,
        .kv_budget = (uint64_t)256 << 20,
        .max_sequences = 4,
        .max_rows = 512,
        .plain = plain,
    };
}

struct golden_path {
    char text[256];
};

static inline struct golden_path golden_file(const char *name, const char *extension)
{
    struct golden_path p;
    snprintf(p.text, sizeof p.text, "tests/data/%s.%s", name, extension);
    return p;
}

static inline json_t *golden_json(const char *path)
{
    json_error_t e;
    json_t *j = json_load_file(path, 0, &e);
    if (!j)
        fail_msg("%s:%d: %s", path, e.line, e.text);
    return j;
}

/* An array of integers; *n is set. Release with free(). */
static inline int32_t *golden_ids(const json_t *array, int *n)
{
    *n = (int)json_array_size(array);
    int32_t *ids = calloc((size_t)*n + 1, sizeof *ids);
    assert_non_null(ids);
    for (int i = 0; i < *n; i++)
        ids[i] = (int32_t)json_integer_value(json_array_get(array, (size_t)i));
    return ids;
}

static inline float *golden_rows(const struct engine *e, int n)
{
    float *rows = calloc((size_t)n * (size_t)tokenizer_vocab_size(engine_tokenizer(e)), sizeof *rows);
    assert_non_null(rows);
    return rows;
}

static inline struct sequence *golden_sequence(struct engine *e)
{
    struct error err = {""};
    struct sequence *s = sequence_new(e, &err);
    if (!s)
        fail_msg("%s", err.text);
    return s;
}

static inline void golden_step(struct engine *e, struct step_item *items, int n)
{
    struct error err = {""};
    if (engine_step(e, items, n, &err))
        fail_msg("%s", err.text);
}

/* Feeds tokens in steps of at most `chunk`; logits and drafts (may be NULL) receive [n][V]. */
static inline void golden_feed(struct engine *e, struct sequence *s, const int32_t *ids, int n, int chunk, float *logits, float *drafts)
{
    size_t v = (size_t)tokenizer_vocab_size(engine_tokenizer(e));
    for (int i = 0; i < n; i += chunk) {
        struct step_item it = {
            .seq = s,
            .tokens = ids + i,
            .n_tokens = n - i < chunk ? n - i : chunk,
            .logits = logits ? logits + (size_t)i * v : NULL,
            .draft_logits = drafts ? drafts + (size_t)i * v : NULL,
        };
        golden_step(e, &it, 1);
    }
}

/* The highest logit, lowest id on a tie. */
static inline int32_t golden_argmax(const float *row, size_t n)
{
    size_t best = 0;
    for (size_t i = 1; i < n; i++)
        if (row[i] > row[best])
            best = i;
    return (int32_t)best;
}

static inline double golden_lse(const float *row, size_t n)
{
    double most = (double)row[golden_argmax(row, n)], sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += exp((double)row[i] - most);
    return most + log(sum);
}

/* n greedy tokens, each fed in turn. `last` [V]: the logits of the sequence's last token, before and after. */
static inline void golden_greedy(struct engine *e, struct sequence *s, float *last, int n, int32_t *out)
{
    size_t v = (size_t)tokenizer_vocab_size(engine_tokenizer(e));
    for (int i = 0; i < n; i++) {
        out[i] = golden_argmax(last, v);
        golden_feed(e, s, &out[i], 1, 1, last, NULL);
    }
}

/* Mean KL(p || q) in nats over whole rows of logits, and how many rows have the same arg-max. */
static inline double golden_mean_kl(const float *p, const float *q, size_t n_rows, size_t v, int *argmax_equal)
{
    double sum = 0;
    for (size_t r = 0; r < n_rows; r++, p += v, q += v) {
        double lp = golden_lse(p, v), lq = golden_lse(q, v);
        for (size_t i = 0; i < v; i++)
            sum += exp((double)p[i] - lp) * (((double)p[i] - lp) - ((double)q[i] - lq));
        *argmax_equal += golden_argmax(p, v) == golden_argmax(q, v);
    }
    return sum / (double)n_rows;
}

/* The distance of a row of logits from a golden row: top [[id, logit] x 20] and its log-sum-exp. */
struct golden_distance {
    double most_logit, most_lse, kl; /* largest |difference|; sum over positions */
    int positions, argmax_equal;
};

static inline void golden_compare(struct golden_distance *d, const float *row, size_t n, const json_t *top, const json_t *lse)
{
    double own = golden_lse(row, n), kl = 0, p_rest = 1, q_rest = 1, reference = lse ? json_real_value(lse) : NAN;
    for (size_t i = 0; i < json_array_size(top); i++) {
        const json_t *pair = json_array_get(top, i);
        size_t id = (size_t)json_integer_value(json_array_get(pair, 0));
        double logit = json_number_value(json_array_get(pair, 1)), diff = fabs((double)row[id] - logit);
        if (!(diff <= d->most_logit)) /* a NaN counts as the largest of all */
            d->most_logit = isnan(diff) ? INFINITY : diff;
        double p = exp(logit - reference), q = exp((double)row[id] - own);
        kl += p * log(p / q);
        p_rest -= p;
        q_rest -= q;
    }
    if (p_rest > 1e-9 && q_rest > 1e-9)
        kl += p_rest * log(p_rest / q_rest);
    if (lse) {
        d->kl += kl;
        if (!(fabs(own - reference) <= d->most_lse))
            d->most_lse = isnan(own) ? INFINITY : fabs(own - reference);
    }
    d->positions++;
    d->argmax_equal += golden_argmax(row, n) == json_integer_value(json_array_get(json_array_get(top, 0), 0));
}

#endif
