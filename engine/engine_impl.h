/* engine/engine_impl.h: what an engine is made of. Private to engine.c and its files for the cache. */
#ifndef BEDSIDE_ENGINE_ENGINE_IMPL_H
#define BEDSIDE_ENGINE_ENGINE_IMPL_H

#include "engine/engine.h"
#include "engine/forward.h"
#include "engine/gguf.h"
#include "engine/model.h"
#include "engine/pages.h"
#include "engine/prefix_cache.h"
#include "engine/prefix_plan.h"
#include "engine/sequence.h"

struct engine {
    struct gguf *file;
    struct model *model;
    struct tokenizer *tokenizer;
    struct backend *backend;
    struct forward *forward;
    struct engine_info info;
    char *name, *chat_template;
    bool mtp;
    struct page_pool pages;
    struct slots states;
    struct sequence **alive; /* [max_sequences], NULL where free */
    struct sequence **grown; /* [n_grown] of the last step, not yet settled */
    int n_grown;
    bool defers;

    /* the prefix cache (engine_cache.c) */
    struct prefix_cache *cache; /* NULL: off */
    struct cache_disk *disk;    /* borrowed, or NULL */
    struct prefix_marks marks;
    bool share_system;
    bool snapshot_failed; /* said once */
    int most_snapshots;   /* that the budget holds */
    uint64_t next_serial;
    struct engine_cache_stats counts; /* of what has happened; what there is, is counted when asked for */

    /* scratch of a step */
    int32_t *ids;                     /* [max_rows] */
    struct span *spans;               /* [max_sequences] */
    const float **before;             /* [max_sequences] */
    int32_t *logit_rows, *draft_rows; /* [max_rows] */
    float **logits, **drafts;         /* [max_rows] */
    float *sampled;                   /* [number of samplers][V] */
    size_t cap_sampled;
    int *best;              /* [max_rows], struct step */
    struct top_row **tops;  /* [max_rows] */
    struct top_row *picked; /* [max_sequences] */
    uint32_t *usable;       /* [(V + 31) / 32] ids that a sampler may pick */
    int32_t *experts;       /* [n_layers][rows][used] */
    size_t cap_experts;
};

/* ---- engine_cache.c ---- */

/* After the backend, the info and the pages. -1 with err: out of memory. */
int engine_cache_open(struct engine *e, const struct engine_options *o, struct error *err);
void engine_cache_close(struct engine *e);

/* Sees to it that n pages can be taken; idle pages of the cache make room. -1 with err when running sequences leave too few, or memory does. */
int engine_pages(struct engine *e, int n, struct error *err);

/* The sequence has grown by a step: its new full pages become known, and a snapshot is taken where one is wanted. */
void engine_cache_grown(struct engine *e, struct sequence *s);

/* Page and state of a tail (engine/prefix_cache.h) at this position. */
size_t engine_cache_tail_bytes(const struct engine *e, int position);

/* Whether a tail at this position may hang on the sequence's last cell: not on a shared one, where it would show this namespace's text to others. */
bool engine_cache_may_hang(const struct sequence *s, int position);

/* Gives the sequence, whose pages reach to the grid line before, a page of its own with the tail's tokens and the state at the position. -1: memory or the device
 * failed, the sequence is to be made empty. */
int engine_cache_tail_load(struct engine *e, struct sequence *s, int position, const uint8_t *data);

/* Makes a sequence empty again that has not computed anything yet. */
void engine_cache_unbegin(struct engine *e, struct sequence *s);

/* The sequence is about to be freed. */
void engine_cache_part(struct engine *e, struct sequence *s);

/* Makes the sequence, whose pages hold all cells up to its length, known cell by cell. -1: it has left the cache for want of memory. */
int engine_cache_extend(struct engine *e, struct sequence *s);

/* ---- engine_disk.c ---- */

/* Begins the (empty) sequence with what was read from disk; the image's state may become the cache's. Returns the tokens it then has; 0 and unchanged
 * when the image does not fit or could not be loaded. */
int engine_disk_import(struct engine *e, struct sequence *s, const int32_t *prompt, int n_prompt, struct cache_image *image);

/* Queues the sequence's first `depth` pages and the state behind them (NULL: the model has none) for the disk, as far as it lacks them. */
void engine_disk_queue(struct engine *e, struct sequence *s, int depth, const uint8_t *state);

/* The same for the pages before a tail, and the tail. */
void engine_disk_queue_tail(struct engine *e, struct sequence *s, const struct prefix_snapshot *tail);

#endif
