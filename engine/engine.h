/* engine/engine.h: the only engine API that the server and the command line use.
 *
 * An engine is a loaded model on one backend. A sequence is one timeline of tokens with its KV pages and recurrent state. A step feeds tokens to
 * several sequences at once and samples where asked. The engine belongs to one thread at a time: the engine thread (the tokenizer and the info
 * struct are immutable and may be read from anywhere).
 *
 * The same tokens give the same logits bit for bit, however they were cut into steps and whatever other sequences shared them. */
#ifndef BEDSIDE_ENGINE_ENGINE_H
#define BEDSIDE_ENGINE_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "engine/backend.h"
#include "engine/sampler.h"
#include "engine/tokenizer.h"

struct engine;
struct sequence;

struct engine_options {
    const char *model_path;
    int context;   /* most tokens of one sequence; 0 = min(the model's, 32768) */
    int n_threads; /* 0 = physical cores */
    enum kv_type kv_type;
    uint64_t kv_budget; /* bytes for KV pages and states; 0 = what memory allows (see engine_info.pages_total) */
    int max_sequences;  /* most sequences alive at once, at least 1 */
    int max_rows;       /* most rows in a step; 0 = 512 + max_sequences */
    bool plain;         /* the plain backend (tests) */
    bool mtp;           /* load the draft block and keep its KV */
};

struct engine_info {
    const char *model_name; /* general.name or the file's name without .gguf */
    const char *arch;
    const char *backend;
    const char *chat_template; /* tokenizer.chat_template, or "" */
    size_t chat_template_len;
    int64_t n_params;
    uint64_t file_bytes, weight_bytes;
    int context;           /* in force */
    int64_t model_context; /* the model's own limit */
    int max_rows, max_sequences;
    int pages_total; /* KV pages the budget allows */
    size_t page_bytes, state_bytes;
    double default_temperature, default_top_p, default_top_k; /* the file's general.sampling.*, NAN where absent */
};

int engine_open(struct engine **out, const struct engine_options *options, struct error *err);
void engine_close(struct engine *e);
const struct engine_info *engine_info(const struct engine *e);
const struct tokenizer *engine_tokenizer(const struct engine *e);

/* NULL with err when max_sequences are alive or memory is short. */
struct sequence *sequence_new(struct engine *e, struct error *err);
void sequence_free(struct engine *e, struct sequence *s); /* s may be NULL */
int sequence_length(const struct sequence *s);            /* tokens fed so far */

/* Forgets the last n <= ROLLBACK tokens; only while the lengths before and after lie in one grid cell (length / GRID is the same): the token that
 * fills a cell is final. 0 or -1. */
int sequence_rollback(struct sequence *s, int n);

struct step_item {
    struct sequence *seq;  /* each sequence at most once in a step */
    const int32_t *tokens; /* [n_tokens] >= 1, appended to the sequence */
    int n_tokens;
    struct sampler *sampler; /* not NULL: pick a token from the logits of the last row */
    float *logits;           /* not NULL: receives the logits of all rows [n_tokens][V] (tests, perplexity) */
    float *draft_logits;     /* not NULL (needs options.mtp): what the draft head, fed token p and the hidden row of p-1 (zeros for the first
                                  position), says of the token after p, for all rows [n_tokens][V] (tests; spec section 9) */
    int32_t *experts;        /* not NULL: receives the chosen experts [n_layers][n_tokens][used] (tests; MoE only) */
    struct pick pick;        /* result, when a sampler was given; id -1 when the row had no finite logit */
};

/* Runs one step. Either all items are done (0), or none is and no sequence has changed (-1, err): out of pages, beyond the context, too many
 * rows, or a failed backend. */
int engine_step(struct engine *e, struct step_item *items, int n_items, struct error *err);

#endif
