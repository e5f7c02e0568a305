/* The disk cache's writer thread, eviction and deletion. */
#include "engine/cache_disk_impl.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#include "base/log.h"

/* ---- eviction ---- */

bool cache_disk_unlink(struct cache_disk *d, struct cache_entry *e)
{
    const struct cache_file_ops *ops = d->vault.ops;
    struct cache_space *s = e->space;
    char name[CACHE_FILE_NAME_MAX];
    cache_file_name(&e->id, e->state, name);
    e->stage = CACHE_REMOVING; /* it stays, and so does its namespace: a deletion waits for `unlinks` */
    s->unlinks++;
    pthread_mutex_unlock(&d->mutex);

    bool absent, gone;
    int dir = cache_folder_open(ops, d->root, s->folder, false, &absent, NULL);
    if (dir >= 0)
        gone = cache_op_unlink(ops, dir, name, false) == 0 || errno == ENOENT;
    else
        gone = absent;
    cache_op_close(ops, dir);

    pthread_mutex_lock(&d->mutex);
    if (gone) {
        cache_index_remove(&d->index, e);
    } else {
        e->stage = CACHE_STORED;
        cache_index_use(&d->index, e);
    }
    s->unlinks--;
    pthread_cond_broadcast(&d->done);
    return gone;
}

/* With the mutex held (released meanwhile): removes the least recently used files until `need` more bytes fit the budget. False: they cannot. */
static bool make_room(struct cache_disk *d, uint64_t need)
{
    if (d->budget == 0)
        return true;
    if (need > d->budget)
        return false;
    while (d->index.bytes > d->budget - need) {
        struct cache_entry *e = d->index.oldest;
        while (e && (e->stage != CACHE_STORED || e->space->deleting))
            e = e->newer;
        if (!e)
            return false;
        struct cache_space *s = e->space;
        if (!cache_disk_unlink(d, e))
            return false;
        d->stats.evicted++;
        if (s->named)
            cache_disk_tidy_space(d, s);
    }
    return true;
}

/* ---- writing ---- */

/* Opens a namespace's folder, made when it is not there, with its name file when names are hidden. A descriptor, or -1 with err. Sets *named when the
 * name is known to be stored. */
static int open_space(struct cache_disk *d, const char *folder, const char *ns, bool *named, struct error *err)
{
    const struct cache_file_ops *ops = d->vault.ops;
    bool absent;
    int dir = cache_folder_open(ops, d->root, folder, false, &absent, err);
    if (dir < 0 && absent) {
        if (cache_folder_make(ops, d->root, folder) < 0) {
            error_set(err, "%s", strerror(errno));
            return -1;
        }
        cache_op_fsync(ops, d->root); /* as for files: a power cut may lose it, nothing else */
        *named = false;
        dir = cache_folder_open(ops, d->root, folder, false, &absent, err);
    }
    if (dir < 0 || *named || !d->vault.encrypted)
        return dir;
    char temp[CACHE_FILE_NAME_MAX];
    struct cache_file_head head = {.kind = CACHE_FILE_NAME};
    uint8_t name[CACHE_NAMESPACE_MAX] = {0};
    memcpy(name, ns, strlen(ns));
    cache_file_temp_name(d->next_temp++, temp);
    if (cache_file_write(&d->vault, dir, temp, &head, name, sizeof name, err) < 0 ||
        cache_file_commit(&d->vault, dir, temp, CACHE_NAME_FILE, err) < 0) {
        cache_op_close(ops, dir);
        return -1;
    }
    *named = true;
    return dir;
}

enum outcome { WRITTEN, CANCELLED, FAILED };

/* Writes the file of a job, without the mutex. */
static enum outcome write_job(struct cache_disk *d, struct cache_job *job, struct error *err)
{
    const struct cache_file_ops *ops = d->vault.ops;
    char temp[CACHE_FILE_NAME_MAX], name[CACHE_FILE_NAME_MAX];
    enum outcome outcome = FAILED;
    bool named = job->space->name_stored; /* only the writer looks at it while it runs */
    int dir = open_space(d, job->space->folder, job->space->name, &named, err);
    job->space->name_stored = named;
    if (dir < 0)
        return FAILED;
    cache_file_temp_name(d->next_temp++, temp);
    cache_file_name(&job->entry->id, job->entry->state, name);
    if (cache_file_write(&d->vault, dir, temp, &job->head, job->data, job->bytes, err) == 0) {
        pthread_mutex_lock(&d->mutex);
        bool cancelled = job->space->deleting;
        pthread_mutex_unlock(&d->mutex);
        if (cancelled) {
            cache_op_unlink(ops, dir, temp, false);
            outcome = CANCELLED;
        } else if (cache_file_commit(&d->vault, dir, temp, name, err) == 0) {
            outcome = WRITTEN;
        }
    }
    cache_op_close(ops, dir);
    return outcome;
}

/* With the mutex held (released meanwhile): the first job of the queue, from start to end. */
static void do_job(struct cache_disk *d)
{
    struct cache_job *job = d->first;
    struct error err = {{0}};
    d->first = job->next;
    if (!d->first)
        d->last = NULL;
    d->writing = job;
    d->busy = true;
    struct cache_space *s = job->space;
    const uint64_t bytes = cache_file_bytes(job->bytes);

    if (!make_room(d, bytes)) {
        d->stats.dropped++;
        cache_index_remove(&d->index, job->entry);
    } else {
        pthread_mutex_unlock(&d->mutex);
        enum outcome outcome = write_job(d, job, &err);
        pthread_mutex_lock(&d->mutex);
        if (outcome == WRITTEN) {
            d->stats.written++;
            cache_index_stored(&d->index, job->entry, bytes, cache_disk_now());
        } else {
            cache_index_remove(&d->index, job->entry);
            if (outcome == CANCELLED) {
                s->cancelled_files++;
                s->cancelled_bytes += bytes;
            } else {
                d->stats.write_errors++;
                if (cache_disk_may_log(&d->write_logged))
                    log_warn("prefix cache: cannot write to its folder: %s; what does not fit is not cached (said once a minute at most)", err.text);
            }
        }
    }
    s->jobs--;
    d->queued -= job->bytes;
    d->writing = NULL;
    free(job->data);
    free(job);
    cache_disk_tidy_space(d, s);
    d->busy = false;
    pthread_cond_broadcast(&d->done);
}

void *cache_disk_writer(void *disk)
{
    struct cache_disk *d = disk;
    pthread_mutex_lock(&d->mutex);
    make_room(d, 0); /* the budget may have become smaller since the last run */
    d->busy = false;
    pthread_cond_broadcast(&d->done);
    for (;;) {
        while (!d->first && !d->closing)
            pthread_cond_wait(&d->work, &d->mutex);
        if (!d->first)
            break;
        do_job(d);
    }
    pthread_mutex_unlock(&d->mutex);
    return NULL;
}

/* ---- deletion ---- */

enum { MAX_PASSES = 100 }; /* over a folder, should removed names keep coming back */

struct sweep { /* one pass over a folder */
    struct cache_disk *d;
    int dir;
    bool tidy;                       /* remove no stored file */
    size_t removed, stored, foreign; /* files */
    bool named;                      /* its name file was seen */
    int failed;                      /* errno of the last file that could not be removed; 0 = none */
    struct cache_removed *out;
};

static void sweep_file(void *arg, const char *name)
{
    struct sweep *w = arg;
    const struct cache_file_ops *ops = w->d->vault.ops;
    struct cache_key id;
    struct stat st;
    bool state, stored = cache_file_name_parse(name, &id, &state);
    if (!stored && !cache_file_temp(name) && strcmp(name, CACHE_NAME_FILE) != 0) {
        w->foreign++;
        return;
    }
    if (cache_op_stat_at(ops, w->dir, name, &st) < 0) {
        if (errno != ENOENT)
            w->failed = errno;
        return;
    }
    if (S_ISDIR(st.st_mode)) { /* whatever its name, none of ours */
        w->foreign++;
        return;
    }
    if (stored && w->tidy) {
        w->stored++;
        return;
    }
    if (strcmp(name, CACHE_NAME_FILE) == 0) { /* goes last, by remove_folder: what is left of a folder should have a name */
        w->named = true;
        return;
    }
    if (cache_op_unlink(ops, w->dir, name, false) < 0) {
        if (errno != ENOENT)
            w->failed = errno;
        return;
    }
    w->removed++;
    if (stored) {
        w->out->files++;
        w->out->bytes += st.st_size > 0 ? (uint64_t)st.st_size : 0;
    }
}

/* Removes the cache's files in a folder (with `tidy` only if there is no page or state) and the folder itself, unless others' files lie in it. 0,
 * or -1 with err. */
static int remove_folder(struct cache_disk *d, const char *folder, bool tidy, struct cache_removed *out, struct error *err)
{
    const struct cache_file_ops *ops = d->vault.ops;
    bool absent;
    struct sweep w = {.d = d, .tidy = tidy, .out = out};
    w.dir = cache_folder_open(ops, d->root, folder, false, &absent, err);
    if (w.dir < 0)
        return absent ? 0 : -1;
    int result = 0;
    /* A folder's listing may skip names while others are being removed: again until a pass removes nothing. */
    int passes = 0;
    do {
        w.removed = w.stored = w.foreign = 0;
        w.failed = 0;
        if (cache_op_list(ops, w.dir, sweep_file, &w) < 0)
            w.failed = errno;
    } while (w.removed && ++passes < MAX_PASSES);
    if (w.removed)
        w.failed = EBUSY;
    const bool empty = w.stored == 0 && w.foreign == 0 && w.failed == 0;
    if (w.failed)
        result = error_set(err, "%s", strerror(w.failed));
    if (w.named && w.stored == 0 && w.failed == 0 && cache_op_unlink(ops, w.dir, CACHE_NAME_FILE, false) < 0 && errno != ENOENT)
        result = error_set(err, "%s", strerror(errno));
    cache_op_fsync(ops, w.dir);
    cache_op_close(ops, w.dir);
    if (empty && result == 0 && cache_op_unlink(ops, d->root, folder, true) < 0 && errno != ENOENT)
        result = error_set(err, "%s", strerror(errno));
    cache_op_fsync(ops, d->root);
    return result;
}

/* Takes the namespace's jobs out of the queue. */
static void drop_queue(struct cache_disk *d, struct cache_space *s, struct cache_removed *out)
{
    struct cache_job **p = &d->first;
    d->last = NULL;
    while (*p) {
        struct cache_job *job = *p;
        if (job->space != s) {
            d->last = job;
            p = &job->next;
            continue;
        }
        *p = job->next;
        out->files++;
        out->bytes += cache_file_bytes(job->bytes);
        cache_index_remove(&d->index, job->entry);
        d->queued -= job->bytes;
        s->jobs--;
        free(job->data);
        free(job);
    }
}

void cache_disk_tidy_space(struct cache_disk *d, struct cache_space *s)
{
    if (s->files || s->jobs || s->deleting || s->tidying)
        return;
    s->tidying = true;
    pthread_mutex_unlock(&d->mutex);
    remove_folder(d, s->folder, true, &(struct cache_removed){0}, NULL); /* if it cannot be removed now, the next start does it */
    pthread_mutex_lock(&d->mutex);
    s->tidying = false;
    s->name_stored = false;
    if (!s->jobs)
        cache_index_remove_space(&d->index, s);
    pthread_cond_broadcast(&d->done);
}

/* With the mutex held (released meanwhile): removes a namespace's queue, files and folder, and adds to `out`; s is gone afterwards. 0, or -1 with err
 * when something is left that should not be. */
static int remove_space(struct cache_disk *d, struct cache_space *s, struct cache_removed *out, struct error *err)
{
    s->deleting = true; /* from here on the struct stays: nobody else removes it, and nothing is queued for it */
    s->cancelled_files = s->cancelled_bytes = 0;
    drop_queue(d, s, out);
    while (s->unlinks || (d->writing && d->writing->space == s))
        pthread_cond_wait(&d->done, &d->mutex);
    out->files += s->cancelled_files;
    out->bytes += s->cancelled_bytes;
    pthread_mutex_unlock(&d->mutex);
    int result = remove_folder(d, s->folder, false, out, err);
    pthread_mutex_lock(&d->mutex);
    for (struct cache_entry *e = d->index.oldest, *newer; e; e = newer) {
        newer = e->newer;
        if (e->space == s)
            cache_index_remove(&d->index, e);
    }
    cache_index_remove_space(&d->index, s);
    pthread_cond_broadcast(&d->done);
    return result;
}

int cache_disk_delete(struct cache_disk *d, const char *ns, struct cache_removed *out, struct error *err)
{
    *out = (struct cache_removed){0};
    char folder[CACHE_FOLDER_MAX];
    if (!cache_disk_folder(d, ns, folder))
        return error_set(err, "cache namespace: 1 to %d of A-Z a-z 0-9 . _ - and not a dot or dash first", CACHE_NAMESPACE_MAX);
    int result = 0;
    /* With a key there may also be a folder from the time without one. */
    for (int clear = 0; clear < (d->vault.encrypted ? 2 : 1); clear++) {
        if (clear)
            cache_vault_folder(&d->vault, ns, false, folder);
        pthread_mutex_lock(&d->mutex);
        struct cache_space *s;
        while ((s = cache_index_space(&d->index, folder)) && (s->deleting || s->tidying))
            pthread_cond_wait(&d->done, &d->mutex);
        if (!s) /* its folder may still hold what could not be indexed */
            s = cache_index_add_space(&d->index, folder);
        if (!s)
            result = error_set(err, "out of memory");
        else if (remove_space(d, s, out, err) < 0)
            result = -1;
        pthread_mutex_unlock(&d->mutex);
    }
    if (result < 0)
        error_prefix(err, "the namespace's cache files could not all be removed");
    return result;
}
