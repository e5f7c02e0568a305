/* engine/cache_disk.h: the prefix cache's files. Knows keys, sizes and checksums; knows nothing of models, tokens' meaning or requests.
 *
 * One folder per namespace (a patient, named by the client) under the cache folder, mode 0700; files 0600. Two kinds of file, both named by the key of
 * the text they end: NAME.page holds the KV of one GRID of tokens, NAME.state the recurrent state at a grid line. A key is a chain hash (BLAKE2b
 * of the model, the namespace and every token so far), so equal text makes equal names, a page is stored once however many
 * conversations share it, and no file needs another one to be valid. Each file carries its key, its parent's key, the page's token ids, the
 * model's id and a checksum; with a key file it is encrypted and authenticated (libsodium) and names are keyed.
 *
 * A file is written to a temporary name, fsynced and renamed, by one writer thread with a bounded queue; what does not fit the queue or the disk is
 * simply not stored. A bad, truncated, swapped or foreign file is a miss, one log line, and is removed. Nothing here ever changes an
 * answer or stops the server. All functions are thread-safe. */
#ifndef BEDSIDE_ENGINE_CACHE_DISK_H
#define BEDSIDE_ENGINE_CACHE_DISK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

struct cache_disk;

enum { CACHE_NAMESPACE_MAX = 64 };

struct cache_key {
    uint8_t bytes[16];
};

struct cache_disk_options {
    const char *dir;            /* made (0700) when absent */
    const char *key_file;       /* 32 bytes or more; NULL = not encrypted. Refused when others may read it */
    uint64_t budget;            /* bytes on disk; the least recently used files go first */
    uint8_t model_id[32];       /* another model's files are misses and are removed when space is needed */
    size_t page_bytes;
    const struct cache_file_ops *ops; /* NULL = the system's; tests inject faults */
};

/* The system calls used, so that tests can make any of them fail. Semantics and errno as POSIX. */
struct cache_file_ops {
    int (*open)(void *ctx, const char *path, int flags, int mode);
    long (*read)(void *ctx, int fd, void *data, size_t n);
    long (*write)(void *ctx, int fd, const void *data, size_t n);
    int (*fsync)(void *ctx, int fd);
    int (*close)(void *ctx, int fd);
    int (*rename)(void *ctx, const char *from, const char *to);
    int (*unlink)(void *ctx, const char *path);
    void *ctx;
};

/* Opens the folder and reads its index (names and sizes only). -1 with err when the folder cannot be made, read or written. */
int cache_disk_open(struct cache_disk **out, const struct cache_disk_options *options, struct error *err);
void cache_disk_close(struct cache_disk *d); /* writes what is queued first; d may be NULL */

/* 1..64 of A-Z a-z 0-9 . _ - and not starting with a dot or dash. */
bool cache_namespace_valid(const char *ns, size_t len);

/* The key that follows `parent` (NULL: the first) when `n` more tokens are read. ns may be "" (the default namespace). */
struct cache_key cache_key_next(const struct cache_disk *d, const uint8_t model_id[32], const char *ns, const struct cache_key *parent, const int32_t *ids, int n);

/* What one request can take from disk: pages first .. first + n_pages - 1 of its text and the state at their end. */
struct cache_image {
    int first_page, n_pages;
    uint8_t *pages;       /* [n_pages][page_bytes] */
    uint8_t *state;       /* [state_bytes]; NULL when the model has no recurrent state */
    size_t state_bytes;
    char reason[96];      /* when nothing could be read: why, for the reply's timings ("" otherwise) */
};

/* keys [n]: the keys after each GRID of the request's text, ids [n * GRID] its tokens. Finds the deepest state file with all pages before it present
 * from first_page on (with `needs_state` false: the deepest page), reads and verifies them. False: nothing deeper than first_page. */
bool cache_disk_read(struct cache_disk *d, const char *ns, const struct cache_key *keys, const int32_t *ids, int n, int first_page, bool needs_state,
                     struct cache_image *out);
void cache_image_free(struct cache_image *image);

/* Queue a file; `data` (malloc'd) becomes the cache's. False (and data freed): it is there already, the queue is full, or the namespace is
 * being deleted. */
bool cache_disk_put_page(struct cache_disk *d, const char *ns, const struct cache_key *key, const struct cache_key *parent, const int32_t *ids, uint8_t *data);
bool cache_disk_put_state(struct cache_disk *d, const char *ns, const struct cache_key *key, int position, uint8_t *data, size_t bytes);

/* Whether a file is stored or queued (so that a caller need not copy what is there). */
bool cache_disk_has(struct cache_disk *d, const char *ns, const struct cache_key *key, bool state);

struct cache_removed {
    uint64_t files, bytes;
};
/* Removes a namespace's folder and everything queued for it; writes already begun for it are dropped. */
int cache_disk_delete(struct cache_disk *d, const char *ns, struct cache_removed *out, struct error *err);

struct cache_namespace_info {
    char name[CACHE_NAMESPACE_MAX + 1];
    uint64_t files, bytes, hits;
    int64_t last_used; /* Unix seconds */
};
/* Fills at most `max`; returns how many there are. */
size_t cache_disk_list(struct cache_disk *d, struct cache_namespace_info *out, size_t max);

struct cache_disk_stats {
    uint64_t bytes, files, hits, misses, written, write_errors, bad_files, dropped;
};
struct cache_disk_stats cache_disk_stats(struct cache_disk *d);
void cache_disk_flush(struct cache_disk *d); /* waits until the queue is empty (tests, shutdown) */

#endif
