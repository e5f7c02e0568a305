/* engine/cache_index.h: what the disk cache knows to be in its folder: namespaces, files, and the order in which files were last used.
 *
 * Plain data: no file operation and no lock; engine/cache_disk*.c holds its mutex around every call. */
#ifndef BEDSIDE_ENGINE_CACHE_INDEX_H
#define BEDSIDE_ENGINE_CACHE_INDEX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/cache_file.h"

struct cache_space { /* a namespace */
    char folder[CACHE_FOLDER_MAX];
    char name[CACHE_NAMESPACE_MAX + 1];
    uint64_t serial;       /* no two in the life of an index have the same */
    bool named;            /* the name is known (not of a folder that another key file wrote) */
    bool name_stored;      /* the folder holds its name file, or needs none */
    bool deleting;         /* nothing may be queued or read; whoever wants it waits until this ends */
    bool tidying;          /* its empty folder is being removed; what is queued meanwhile makes it again */
    uint64_t files, bytes; /* stored */
    uint64_t hits;
    int64_t last_used;                         /* Unix seconds */
    size_t jobs;                               /* queued or being written */
    size_t unlinks;                            /* files of it being unlinked without the mutex */
    uint64_t cancelled_files, cancelled_bytes; /* writes that a deletion has stopped in the middle */
};

enum cache_stage {
    CACHE_QUEUED,  /* not on disk yet */
    CACHE_STORED,  /* on disk, may be read or evicted */
    CACHE_REMOVING /* being unlinked by somebody who has released the mutex */
};

struct cache_entry {                   /* a file */
    struct cache_entry *chain;         /* same slot of the table */
    struct cache_entry *older, *newer; /* order of last use */
    struct cache_space *space;
    struct cache_key id; /* cache_vault_file_id */
    bool state;
    enum cache_stage stage;
    uint64_t bytes;  /* of the file; counted from CACHE_STORED on */
    int64_t touched; /* its time of last change, Unix nanoseconds */
};

struct cache_index {
    struct cache_entry **table;
    size_t n_table; /* a power of two, or 0 */
    size_t n_entries;
    struct cache_entry *oldest, *newest;
    struct cache_space **spaces; /* in order of the folder's name */
    size_t n_spaces, cap_spaces;
    uint64_t next_serial;
    uint64_t files, bytes; /* stored */
};

void cache_index_free(struct cache_index *x);

struct cache_space *cache_index_space(const struct cache_index *x, const char *folder); /* or NULL */
struct cache_space *cache_index_add_space(struct cache_index *x, const char *folder);   /* the one there is, or a new one; NULL: out of memory */
void cache_index_remove_space(struct cache_index *x, struct cache_space *s);            /* without files, jobs and unlinks */

struct cache_entry *cache_index_find(const struct cache_index *x, const struct cache_space *s, const struct cache_key *id, bool state); /* or NULL */

/* A new queued entry, just older than `younger`, or the newest when that is NULL. It must not be there yet. NULL: out of memory. */
struct cache_entry *cache_index_add(struct cache_index *x, struct cache_space *s, const struct cache_key *id, bool state,
                                    struct cache_entry *younger);
void cache_index_stored(struct cache_index *x, struct cache_entry *e, uint64_t bytes, int64_t touched); /* its file is on disk now */
void cache_index_use(struct cache_index *x, struct cache_entry *e);                                     /* makes it the newest */
void cache_index_remove(struct cache_index *x, struct cache_entry *e);                                  /* and frees it */
void cache_index_sort(struct cache_index *x);                                                           /* orders by time of last change */

#endif
