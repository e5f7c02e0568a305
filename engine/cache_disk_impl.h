/* engine/cache_disk_impl.h: the inside of the disk cache, shared by engine/cache_disk.c (what callers see), cache_disk_open.c (start and end) and
 * cache_disk_write.c (the writer thread, eviction and deletion).
 *
 * One mutex guards everything but the constants. It is never held across a file operation, so that a caller on the engine thread waits for
 * nobody's disk. What somebody works on without it is marked first and stays meanwhile: a file's entry by CACHE_REMOVING and its namespace's
 * `unlinks`, a job's namespace by `writing`, a whole namespace by `tidying` or `deleting`; who deletes waits for all the others.
 */
#ifndef BEDSIDE_ENGINE_CACHE_DISK_IMPL_H
#define BEDSIDE_ENGINE_CACHE_DISK_IMPL_H

#include <pthread.h>

#include "engine/cache_disk.h"
#include "engine/cache_file.h"
#include "engine/cache_index.h"

struct cache_job { /* a file to write */
    struct cache_job *next;
    struct cache_space *space;
    struct cache_entry *entry;
    struct cache_file_head head;
    uint8_t *data;
    size_t bytes;
};

struct cache_disk {
    /* Constants after opening. */
    struct cache_vault vault;
    int root; /* the cache folder */
    uint64_t budget, queue_bytes;
    pthread_t writer;

    pthread_mutex_t mutex;
    pthread_cond_t work; /* for the writer: a job, or closing */
    pthread_cond_t done; /* for everybody else: a job or a deletion has ended */
    struct cache_index index;
    struct cache_model model;
    bool bound, closing;
    bool busy;                          /* the writer has something in hand: a job and what follows from it, or the start's eviction */
    struct cache_job *first, *last;     /* the queue */
    struct cache_job *writing;          /* taken from the queue, in the writer's hands */
    uint64_t queued;                    /* payload bytes of the queue and of `writing` */
    uint64_t next_temp;                 /* number of the next temporary file; the writer's only */
    uint64_t write_logged, read_logged; /* clock_ns of the last line about a failing disk; 0 = never */
    struct cache_disk_stats stats;      /* the counters; sizes are filled in when asked */
};

/* The folder in which the vault keeps a namespace. False: ns is neither "" nor valid. */
bool cache_disk_folder(const struct cache_disk *d, const char *ns, char folder[CACHE_FOLDER_MAX]);

int64_t cache_disk_now(void); /* Unix nanoseconds */

/* With the mutex held: whether a line about a failing disk may be logged now (one a minute), and notes that it is. */
bool cache_disk_may_log(uint64_t *logged);

void *cache_disk_writer(void *disk);

/* With the mutex held (released meanwhile): unlinks the file of an entry in stage CACHE_STORED, in a namespace that is not being deleted, and forgets it.
 * The entry's namespace is valid afterwards. False: the file is still there and counts as just used. */
bool cache_disk_unlink(struct cache_disk *d, struct cache_entry *e);

/* With the mutex held (released meanwhile): removes the folder of a namespace that has no file and no job, if others' files do not lie in it. s may be
 * gone afterwards. Only by the writer, or before it is started. */
void cache_disk_tidy_space(struct cache_disk *d, struct cache_space *s);

#endif
