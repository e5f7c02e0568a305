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
#include "engine/cache_key.h"
#include "engine/sampler.h"
#include "engine/tokenizer.h"

struct engine;
struct sequence;
struct cache_disk; /* engine/cache_disk.h */
struct cache_image;

enum { ENGINE_MOST_AUTO = 64 };

enum device {
    DEVICE_CPU,
    DEVICE_HIP,  /* an AMD GPU, or engine_open fails */
    DEVICE_AUTO, /* the GPU if it can be used and has room, otherwise the CPU and a line in the log that says why */
};

struct engine_options {
    const char *model_path;
    int context; /* most tokens of one sequence; 0 = min(the model's, 32768) */
    enum device device;
    int device_ordinal;      /* which of several GPUs */
    const char *hip_library; /* NULL or "" = libamdhip64 where the system finds it */
    bool hip_graph;          /* decode steps as HIP graphs, where they can be trusted */
    int n_threads;           /* 0 = physical cores */
    enum kv_type kv_type;
    uint64_t kv_budget; /* bytes for KV pages and states; 0 = what memory allows (see engine_info.pages_total) */
    int max_sequences;  /* most sequences alive at once; 0 = what memory allows, at most ENGINE_MOST_AUTO */
    int max_rows;       /* most rows in a step; 0 = 512 + max_sequences */
    bool plain;         /* the plain backend, whatever `device` says (tests) */
    bool no_selftest;   /* of the GPU (tests of something else) */
    bool mtp;           /* load the draft block and keep its KV */

    uint64_t
        cache_memory;  /* bytes for state snapshots of the prefix cache; 0 = no cache. Cached pages live in the KV budget and yield to sequences */
    bool share_system; /* the system + tools prefix may be hit from any namespace; otherwise namespaces share nothing */
    struct cache_disk *disk; /* where snapshots are written; borrowed, may be NULL. engine_open tells it the model (cache_disk_bind) */
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
    /* The file's general.sampling.*, NAN where absent. Not checked: somebody else's numbers. */
    double default_temperature, default_top_p, default_top_k, default_min_p, default_repeat_penalty;
    uint8_t model_id[CACHE_MODEL_ID]; /* names whatever pages and states depend on: the model file, the KV type and layout, the backend */
};

int engine_open(struct engine **out, const struct engine_options *options, struct error *err);
void engine_close(struct engine *e);
const struct engine_info *engine_info(const struct engine *e);
const struct tokenizer *engine_tokenizer(const struct engine *e);

/* An empty sequence that neither uses nor feeds the prefix cache. NULL with err when max_sequences are alive or memory is short. */
struct sequence *sequence_new(struct engine *e, struct error *err);
void sequence_free(struct engine *e, struct sequence *s); /* s may be NULL; what it computed stays in the cache where it can */
int sequence_length(const struct sequence *s);            /* tokens fed so far, those taken from the cache included */
const int32_t *sequence_tokens(const struct sequence *s); /* [sequence_length]; valid until the next step */

/* ---- the prefix cache ---- */

/* Why a prompt, or the part of it behind `cached`, had to be computed. */
enum cache_miss {
    CACHE_MISS_NONE,     /* a hit, as deep as the known text allows */
    CACHE_MISS_OFF,      /* no cache, or the request wanted none */
    CACHE_MISS_SHORT,    /* the prompt is too short: at least GRID + 1 tokens are needed */
    CACHE_MISS_EMPTY,    /* nothing is known of the namespace */
    CACHE_MISS_DIVERGED, /* other text is known; this one differs from token `miss_at` on */
    CACHE_MISS_NO_STATE, /* the text is known further than `cached`, but no snapshot was taken there */
    CACHE_MISS_EVICTED,  /* the text was cached further than `cached`, but made room for others */
    CACHE_MISS_FAILED,   /* what was cached could not be loaded (memory, device, or a disk image that does not fit) */
    CACHE_MISSES,
};
const char *cache_miss_name(enum cache_miss miss); /* "none", "off", "short", ...: for timings and metric labels */

enum cache_source { CACHE_FROM_NONE, CACHE_FROM_MEMORY, CACHE_FROM_DISK };

struct cache_result {
    int cached;  /* tokens that need not be computed, less than the prompt */
    int matched; /* tokens of the prompt that the cache knows the text of, >= cached */
    enum cache_source source;
    enum cache_miss miss; /* never NONE when cached is 0 */
    int miss_at;          /* = matched: the first token that the cache does not know; -1 where that says nothing (OFF, SHORT, EMPTY) */
};

struct sequence_options {
    const char *ns;        /* namespace, valid by cache_namespace_valid; NULL or "" = the default one */
    const int32_t *prompt; /* [n_prompt] >= 1; the caller feeds prompt + sequence_length(s) on in steps */
    int n_prompt;
    struct cache_image
        *image; /* what the disk holds of the prompt (pages and state verified by cache_disk_read), or NULL; borrowed, but its state may be taken */
    bool no_cache; /* neither use nor feed the cache */
};

/* A sequence that begins with the longest cached prefix of the prompt; at least one token is left to run. `r` receives what was found and must not
 * be NULL. An engine without cache, or a cache that fails, gives an empty sequence. NULL with err as sequence_new, or for a bad prompt. */
struct sequence *sequence_start(struct engine *e, const struct sequence_options *o, struct cache_result *r, struct error *err);

/* The length at which the sequence's next step should end at the latest, so that a snapshot can be taken there (> sequence_length; INT_MAX: as the
 * caller likes). A step that goes further is correct too, and leaves no snapshot. */
int sequence_stop(const struct sequence *s);

/* Tokens that sequence_start would take from memory for this prompt. Changes nothing. */
int engine_cache_depth(const struct engine *e, const char *ns, const int32_t *prompt, int n_prompt);

/* Where in this prompt the cache keeps tails (snapshots between grid lines): position and bytes of each, in ascending order; keys are not filled in. Returns
 * how many. */
int engine_cache_tails(const struct engine *e, const int32_t *prompt, int n_prompt, struct cache_tail out[CACHE_TAILS_MAX]);

struct engine_cache_stats {
    bool on;
    uint64_t budget, bytes; /* of snapshots: allowed, held */
    int nodes;              /* grid cells of text known, with or without a page */
    int snapshots;          /* states held */
    int pages_total, pages_running,
        pages_idle;     /* KV pages: allowed (fewer once the machine had no more); used by sequences; kept by the cache alone */
    int states_running; /* state slots used by sequences */
    uint64_t lookups, hits, hits_disk, misses[CACHE_MISSES]; /* sequence_start calls; hits + the sum of misses = lookups */
    uint64_t prompt_tokens, cached_tokens;
    uint64_t snapshots_taken, snapshots_failed, snapshots_evicted, pages_evicted;
    uint64_t disk_queued; /* files handed to the disk cache */
};
void engine_cache_stats(const struct engine *e, struct engine_cache_stats *out);

struct engine_cache_removed {
    int pages, snapshots;
    uint64_t bytes; /* of both */
};
/* Forgets everything of a namespace in memory; its running sequences go on and leave nothing behind. The disk's part is cache_disk_delete, to be
 * called after this one. */
void engine_cache_drop(struct engine *e, const char *ns, struct engine_cache_removed *out);

struct engine_cache_entry {
    char ns[CACHE_NAMESPACE_MAX + 1]; /* "" = the default namespace */
    int pages, snapshots;
    uint64_t bytes; /* of both, though pages that namespaces share count in each */
    uint64_t hits;
    double idle_seconds; /* since it was last used */
};
/* Fills at most `max`, most recently used first; returns how many namespaces there are. */
size_t engine_cache_list(const struct engine *e, struct engine_cache_entry *out, size_t max);

/* Forgets the last n tokens; only those it was fed itself, at most ROLLBACK below the most it ever had, and only while the lengths before and after lie in
 * one grid cell (length / GRID is the same): the token that fills a cell is final. 0 or -1. */
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

/* What a step leaves to the prefix cache (snapshots: copies of tens of MB) is kept before engine_step returns, or, after engine_defer, by engine_settle: a caller
 * that hands the step's tokens on first spares its readers that time. Whatever else is asked of the engine settles first by itself. */
void engine_defer(struct engine *e);
void engine_settle(struct engine *e);

#endif
