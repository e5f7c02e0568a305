/* engine/cache_disk.h: the prefix cache's files. Knows keys, sizes and checksums; knows nothing of models, tokens' meaning or requests.
 *
 * One folder per namespace (a patient, named by the client) under the cache folder, mode 0700; files 0600. Two kinds of file, both named by the key of
 * the text they end: a page file holds the KV of one cell of 64 tokens (the cell that ends at its position), a state file the recurrent state at
 * a grid line. Equal text makes equal names, so a page is stored once however many conversations share it, and no file needs another one to be
 * valid. Each carries its key, its parent's key, its token ids, the model's id and a checksum (engine/cache_file.h has the format); with a
 * key file it is encrypted and authenticated and all names are keyed.
 *
 * A file is written to a temporary name, fsynced and renamed, by one writer thread with a bounded queue; what does not fit the queue or the disk is
 * simply not stored. A bad, truncated or swapped file is a miss, one log line, and is removed; files that are none of the cache's are left
 * alone. Nothing here ever changes an answer or stops the server.
 *
 * All functions are thread-safe. Only cache_disk_open, _close, _read, _delete and _flush wait for the disk; the others never do, so the
 * engine thread may call them. */
#ifndef BEDSIDE_ENGINE_CACHE_DISK_H
#define BEDSIDE_ENGINE_CACHE_DISK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"
#include "engine/cache_key.h"

struct cache_disk;
struct cache_file_ops; /* engine/cache_file.h */

struct cache_disk_options {
    const char *dir;                  /* made (0700) when absent; refused when group or others have any right in it */
    const char *key_file;             /* 32 to 4096 bytes, used as they are; NULL = not encrypted. Refused when group or others may read it */
    uint64_t budget;                  /* bytes on disk, 0 = no limit; the least recently used files go first */
    uint64_t queue_bytes;             /* most bytes waiting to be written; 0 = 1 GiB */
    const struct cache_file_ops *ops; /* NULL = the system's; tests inject faults */
};

/* Opens the folder, takes its lock, removes what an interrupted writer left and reads the index (names and sizes only). -1 with err when the
 * folder cannot be made, read, written or locked (another server has it), or the key file is refused. */
int cache_disk_open(struct cache_disk **out, const struct cache_disk_options *options, struct error *err);
void cache_disk_close(struct cache_disk *d); /* writes what is queued first; d may be NULL. No other call may be under way */

struct cache_model {
    uint8_t id[CACHE_MODEL_ID];
    size_t page_bytes;  /* of one page of 64 tokens, all layers; > 0 */
    size_t state_bytes; /* of one recurrent state; 0 = the model has none and any page can be landed on */
};

/* Says which model the files are for. Called by engine_open; until then every read is a miss and every put is refused. Files of other models are not
 * found (their keys differ) and go when space is needed. */
void cache_disk_bind(struct cache_disk *d, const struct cache_model *model);

/* What one request can take from disk: pages first_page .. first_page + n_pages - 1 of its text and the state at their end, or a tail behind them. */
struct cache_image {
    int first_page, n_pages;
    int tail;       /* tokens of the tail; 0 = none */
    uint8_t *pages; /* [n_pages][page_bytes] */
    uint8_t *state; /* [state_bytes], of a tail the page and the state; from malloc; NULL when the model has no recurrent state */
    size_t state_bytes;
    const char *reason; /* a constant text: why it does not reach deeper ("" when it reaches the last key) */
};

/* Tokens from the start of the text up to the image's end. */
static inline int64_t cache_image_end(const struct cache_image *m)
{
    return ((int64_t)m->first_page + m->n_pages) * 64 + m->tail;
}

/* A request's text. keys [n]: the keys after each 64 of its tokens (keys[i] at position (i + 1) * 64), ids [n * 64] these tokens; tails [n_tails], in ascending
 * order: where else a state may have been kept. */
struct cache_text {
    const struct cache_key *keys;
    const int32_t *ids;
    int n;
    const struct cache_tail *tails;
    int n_tails;
};

/* Finds the deepest state file, a tail or one on the grid, with all pages before it present from that of position `from` on (the deepest page when the model has no
 * state), reads and verifies them; a bad file makes the hit shallower. False: nothing deeper than `from`, the tokens that the caller has already; `out` then holds
 * the reason only. Any thread, several at once; end with cache_image_free either way. */
bool cache_disk_read(struct cache_disk *d, const char *ns, const struct cache_text *text, int from, struct cache_image *out);
void cache_image_free(struct cache_image *image); /* may be NULL, or free already; does not free the struct itself */

/* Which files of a text are worth queueing: page_missing[i] (for the page that ends with keys[i]) and *state_missing (for the state at keys[n-1])
 * become true for what is neither stored nor queued and still finds room in the queue, in this order. What is there counts as used now. */
void cache_disk_missing(struct cache_disk *d, const char *ns, const struct cache_key *keys, int n, bool *page_missing, bool *state_missing);

/* Queue a file; `data` (malloc'd, [page_bytes] or [state_bytes]) becomes the cache's. position: tokens from the start of the text to the end of the
 * page, > 0 and a multiple of 64; parent: the key before the page (the root key for the first). False, and data freed: it is there already, the
 * queue is full, the namespace is being deleted or is not valid, or no model is bound. */
bool cache_disk_put_page(struct cache_disk *d, const char *ns, const struct cache_key *key, const struct cache_key *parent, int position,
                         const int32_t ids[64], uint8_t *data);
bool cache_disk_put_state(struct cache_disk *d, const char *ns, const struct cache_key *key, int position, uint8_t *data);

/* The same for a tail of `bytes` at a position that is no multiple of 64; parent: the key at the grid line before. */
bool cache_disk_put_tail(struct cache_disk *d, const char *ns, const struct cache_key *key, const struct cache_key *parent, int position,
                         uint8_t *data, size_t bytes);

/* Whether a tail is stored or queued; it then counts as used now. */
bool cache_disk_use_tail(struct cache_disk *d, const char *ns, const struct cache_key *key);

/* Whether one file is stored or queued. */
bool cache_disk_has(struct cache_disk *d, const char *ns, const struct cache_key *key, bool state);

struct cache_removed {
    uint64_t files, bytes; /* stored files and those still queued */
};
/* Removes a namespace ("" = the default one): its files, its folder (unless somebody else's files lie there) and everything queued for it; a write
 * already begun for it is dropped. -1 with err when something could not be removed; `out` says what was. A namespace that does
 * not exist: 0, and nothing removed. */
int cache_disk_delete(struct cache_disk *d, const char *ns, struct cache_removed *out, struct error *err);

struct cache_namespace_info {
    char name[CACHE_NAMESPACE_MAX + 1];
    uint64_t files, bytes;
    uint64_t hits;     /* since the cache was opened */
    int64_t last_used; /* Unix seconds */
};
/* Fills at most `max`, in order of the name on disk; returns how many there are. Namespaces written with another key file are not among them. */
size_t cache_disk_list(struct cache_disk *d, struct cache_namespace_info *out, size_t max);

struct cache_disk_stats {
    uint64_t files, bytes;       /* stored now, all models and keys */
    uint64_t queued_bytes;       /* waiting to be written */
    uint64_t hits, misses;       /* of cache_disk_read */
    uint64_t written, evicted;   /* files */
    uint64_t write_errors;       /* files not stored because of the disk */
    uint64_t dropped;            /* files not stored for want of room in the queue or the budget */
    uint64_t read_errors;        /* reads that failed because of the disk; the file stays */
    uint64_t bad_files;          /* files found damaged or not as they should be */
    uint64_t foreign_namespaces; /* folders found at the start that another key file wrote */
};
struct cache_disk_stats cache_disk_stats(struct cache_disk *d);
void cache_disk_flush(struct cache_disk *d); /* waits until the queue is empty and written (tests, shutdown) */

#endif
