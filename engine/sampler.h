/* engine/sampler.h: from a row of logits to a token. One sampler per answer; not shared between threads.
 *
 * Order: mask of unused ids, logit bias, repeat / presence / frequency penalties, then greedy (temperature 0: highest logit, lowest id on a tie)
 * or temperature, top-k, top-p, min-p and a draw. The same seed and logits give the same token on every machine. */
#ifndef BEDSIDE_ENGINE_SAMPLER_H
#define BEDSIDE_ENGINE_SAMPLER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/tokenizer.h"

enum { SAMPLER_MAX_TOP = 20, SAMPLER_REPEAT_WINDOW = 64 };

struct logit_bias {
    int32_t id;
    float bias;
};

struct sampler_params {
    float temperature;       /* >= 0; 0 = greedy */
    float top_p;             /* (0, 1]; 1 = off */
    int top_k;               /* 0 = off */
    float min_p;             /* [0, 1); 0 = off */
    float repeat_penalty;    /* > 0; 1 = off; over the last SAMPLER_REPEAT_WINDOW tokens, prompt included */
    float presence_penalty;  /* [-2, 2], over the answer's own tokens */
    float frequency_penalty; /* [-2, 2], over the answer's own tokens */
    uint64_t seed;
    int n_top;         /* alternatives to report, 0 .. SAMPLER_MAX_TOP */
    bool want_logprob; /* fill pick.logprob and pick.top: log-softmax of the model's own logits, before bias, penalties and temperature */
    const struct logit_bias *bias;
    size_t n_bias;
};

struct token_logprob {
    int32_t id;
    float logprob;
};

struct pick {
    int32_t id;
    float logprob;
    int n_top;
    struct token_logprob top[SAMPLER_MAX_TOP]; /* best first */
};

struct sampler;

/* Copies params (and the bias array). NULL when out of memory. */
struct sampler *sampler_new(const struct tokenizer *t, const struct sampler_params *params);
void sampler_free(struct sampler *s);

/* Tells the sampler about prompt tokens, for the repeat penalty. Only the last SAMPLER_REPEAT_WINDOW matter. */
void sampler_prompt(struct sampler *s, const int32_t *ids, size_t n);

/* Whether the sampler needs no more of a row than its best k usable logits, with nothing to adjust and no log-probabilities to report: k, or 0 when it needs
 * the row. Never more than TOP_MOST (engine/backend.h). */
int sampler_best(const struct sampler *s);

/* Ids that can be picked, a bit each, the first id lowest: words [(n_vocab + 31) / 32]. */
void sampler_usable(const struct tokenizer *t, uint32_t *words);

/* The same pick as from the row, given its best min(k, number of finite usable ones) logits with k = sampler_best: the higher first, of equal ones the lower id. */
struct top_logit;
int sampler_pick_best(struct sampler *s, const struct top_logit *best, int n, struct pick *out);

/* Picks from logits [V] and remembers the token. The logits are not changed. A row without any finite logit gives -1. */
int sampler_pick(struct sampler *s, const float *logits, struct pick *out);

#endif
