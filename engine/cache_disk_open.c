/* The disk cache's start and end: its folder, its lock, and the index read from what lies there. */
#include "engine/cache_disk_impl.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sodium.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/log.h"

static const uint64_t default_queue_bytes = (uint64_t)1 << 30;

/* ---- reading the folder ---- */

struct names {
    char **list;
    size_t n, cap;
    bool failed;
};

static void add_name(void *arg, const char *name)
{
    struct names *names = arg;
    char *copy = alloc_text(name, strlen(name));
    if (!copy || alloc_grow(&names->list, &names->cap, names->n + 1, sizeof *names->list) < 0) {
        free(copy);
        names->failed = true;
        return;
    }
    names->list[names->n++] = copy;
}

static void free_names(struct names *names)
{
    for (size_t i = 0; i < names->n; i++)
        free(names->list[i]);
    free(names->list);
}

struct scan {
    struct cache_disk *d;
    size_t foreign;    /* folders of another key file */
    size_t clear;      /* folders that are not encrypted though there is a key */
    size_t unreadable; /* folders that could not be listed in full, or are not private */
    size_t not_ours;   /* files with the cache's names that are no private regular files */
};

/* Adds one file to the index; a temporary one is a leftover and goes. */
static void scan_file(struct scan *scan, int dir, struct cache_space *s, const char *name)
{
    struct cache_disk *d = scan->d;
    const struct cache_file_ops *ops = d->vault.ops;
    struct cache_key id;
    bool state;
    struct stat st;
    if (cache_file_temp(name)) {
        cache_op_unlink(ops, dir, name, false);
        return;
    }
    if (!cache_file_name_parse(name, &id, &state))
        return;
    if (cache_op_stat_at(ops, dir, name, &st) < 0 || !S_ISREG(st.st_mode) || !cache_file_private(&st) || st.st_size < 0) {
        scan->not_ours++;
        return;
    }
    if (cache_index_find(&d->index, s, &id, state))
        return; /* a folder that changes while it is listed may name a file twice */
    struct cache_entry *e = cache_index_add(&d->index, s, &id, state, NULL);
    if (!e)
        return; /* out of memory: as if it were not there */
    const int64_t now = cache_disk_now();
    int64_t touched = (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec;
    cache_index_stored(&d->index, e, (uint64_t)st.st_size, touched < now ? touched : now);
}

/* Learns the name of a namespace whose folder hides it. False: another key file wrote it, or it is damaged. */
static bool read_name(struct cache_disk *d, int dir, struct cache_space *s)
{
    const struct cache_file_head want = {.kind = CACHE_FILE_NAME};
    uint8_t name[CACHE_NAMESPACE_MAX + 1] = {0};
    char folder[CACHE_FOLDER_MAX];
    if (!d->vault.encrypted || cache_file_read(&d->vault, dir, CACHE_NAME_FILE, &want, name, CACHE_NAMESPACE_MAX, NULL) != CACHE_FILE_OK)
        return false;
    size_t len = strlen((const char *)name);
    if (len && !cache_namespace_valid((const char *)name, len))
        return false;
    cache_vault_folder(&d->vault, (const char *)name, true, folder);
    if (strcmp(folder, s->folder) != 0)
        return false;
    memcpy(s->name, name, len + 1);
    return true;
}

static void scan_folder(struct scan *scan, const char *folder)
{
    struct cache_disk *d = scan->d;
    const struct cache_file_ops *ops = d->vault.ops;
    const bool hidden = strncmp(folder, "enc=", 4) == 0;
    const size_t len = strlen(folder);
    if (hidden ? len != 36 || strspn(folder + 4, "0123456789abcdef") != 32
               : strncmp(folder, "ns=", 3) != 0 || (len > 3 && !cache_namespace_valid(folder + 3, len - 3)))
        return; /* none of ours */
    struct names names = {0};
    struct cache_space *s = NULL;
    struct stat st;
    bool absent, unnamed = false;
    int dir = cache_folder_open(ops, d->root, folder, false, &absent, NULL);
    if (dir < 0 || cache_op_list(ops, dir, add_name, &names) < 0 || names.failed || !(s = cache_index_add_space(&d->index, folder))) {
        scan->unreadable++;
        goto done;
    }
    for (size_t i = 0; i < names.n; i++)
        scan_file(scan, dir, s, names.list[i]);
    if (!hidden) {
        memcpy(s->name, folder + 3, len - 3 + 1);
        s->named = s->name_stored = true;
        scan->clear += d->vault.encrypted;
    } else if (read_name(d, dir, s)) {
        s->named = s->name_stored = true;
    } else if (s->files || cache_op_stat_at(ops, dir, CACHE_NAME_FILE, &st) == 0) {
        scan->foreign++;
    } else { /* a writer was killed between making the folder and giving it a name */
        unnamed = true;
    }
done:
    cache_op_close(ops, dir);
    free_names(&names);
    if (s && s->files == 0) { /* nothing left of it */
        pthread_mutex_lock(&d->mutex);
        if (s->named || unnamed)
            cache_disk_tidy_space(d, s);
        else
            cache_index_remove_space(&d->index, s);
        pthread_mutex_unlock(&d->mutex);
    }
}

/* Reads names and sizes of all files; what is wrong with some of them costs a line, not the start. */
static int scan_root(struct cache_disk *d, const char *path, struct error *err)
{
    struct names names = {0};
    struct scan scan = {.d = d};
    if (cache_op_list(d->vault.ops, d->root, add_name, &names) < 0 || names.failed) {
        error_set(err, "cache folder %s: cannot be listed: %s", path, names.failed ? "out of memory" : strerror(errno));
        free_names(&names);
        return -1;
    }
    for (size_t i = 0; i < names.n; i++)
        scan_folder(&scan, names.list[i]);
    free_names(&names);
    cache_index_sort(&d->index);
    d->stats.foreign_namespaces = scan.foreign;
    if (scan.foreign)
        log_warn("prefix cache: %zu namespaces in its folder were written with %s; they stay and are not read", scan.foreign,
                 d->vault.encrypted ? "another key file, or are damaged" : "a key file, and there is none now");
    if (scan.clear)
        log_warn(
            "prefix cache: %zu namespaces in its folder are not encrypted, from a time without a key file; they are not read. DELETE them, or remove "
            "the folders ns=*",
            scan.clear);
    if (scan.unreadable)
        log_warn(
            "prefix cache: %zu namespaces in its folder cannot be read in full or are open to others (they should belong to the server's user, mode "
            "0700)",
            scan.unreadable);
    if (scan.not_ours)
        log_warn("prefix cache: %zu files in its folder are no private regular files; they are not read", scan.not_ours);
    return 0;
}

/* ---- the folder itself ---- */

/* Makes the folder and those above it where they are missing. */
static int make_folders(const struct cache_file_ops *ops, const char *path, struct error *err)
{
    struct stat st;
    if (cache_op_stat_at(ops, AT_FDCWD, path, &st) == 0)
        return 0;
    char *part = alloc_text(path, strlen(path));
    if (!part)
        return error_set(err, "out of memory");
    int result = 0;
    for (char *p = part + 1; result == 0; p++) {
        if (*p != '/' && *p)
            continue;
        const char kept = *p;
        *p = '\0';
        if (p[-1] != '/' && cache_op_stat_at(ops, AT_FDCWD, part, &st) < 0 && cache_folder_make(ops, AT_FDCWD, part) < 0)
            result = error_set(err, "cache folder %s: cannot be made: %s", path, strerror(errno));
        *p = kept;
        if (!kept)
            break;
    }
    free(part);
    return result;
}

/* Whether files can be made in it. A full disk is no reason to refuse: what is there can be read, and room may come. */
static int check_writable(struct cache_disk *d, const char *path, struct error *err)
{
    const struct cache_file_ops *ops = d->vault.ops;
    char temp[CACHE_FILE_NAME_MAX];
    cache_file_temp_name(d->next_temp++, temp);
    cache_op_unlink(ops, d->root, temp, false); /* left by a start that was killed just here */
    int fd = cache_op_open(ops, d->root, temp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return errno == ENOSPC || errno == EDQUOT ? 0 : error_set(err, "cache folder %s: cannot be written: %s", path, strerror(errno));
    cache_op_close(ops, fd);
    cache_op_unlink(ops, d->root, temp, false);
    return 0;
}

static int open_root(struct cache_disk *d, const char *path, struct error *err)
{
    const struct cache_file_ops *ops = d->vault.ops;
    bool absent;
    if (!path || !*path)
        return error_set(err, "cache folder: the path is empty");
    if (make_folders(ops, path, err) < 0)
        return -1;
    d->root = cache_folder_open(ops, AT_FDCWD, path, true, &absent, err);
    if (d->root < 0)
        return error_prefix(err, "cache folder %s", path);
    /* The folder itself is locked, so that it works on a full disk and leaves no file. The lock ends with the process. */
    if (cache_op_lock(ops, d->root) < 0)
        return errno == EWOULDBLOCK ? error_set(err, "cache folder %s: another server is using it; stop that one or choose another folder", path)
                                    : error_set(err, "cache folder %s: cannot be locked: %s", path, strerror(errno));
    return check_writable(d, path, err);
}

/* The writer runs with all signals blocked: they are the main thread's business. */
static int start_writer(struct cache_disk *d)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int r = pthread_create(&d->writer, NULL, cache_disk_writer, d);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return r;
}

static void free_disk(struct cache_disk *d)
{
    cache_op_close(d->vault.ops, d->root);
    cache_vault_close(&d->vault);
    cache_index_free(&d->index);
    pthread_cond_destroy(&d->work);
    pthread_cond_destroy(&d->done);
    pthread_mutex_destroy(&d->mutex);
    free(d);
}

int cache_disk_open(struct cache_disk **out, const struct cache_disk_options *options, struct error *err)
{
    *out = NULL;
    if (sodium_init() < 0)
        return error_set(err, "cache folder: libsodium cannot start");
    struct cache_disk *d = alloc_array(1, sizeof *d);
    if (!d)
        return error_set(err, "cache folder: out of memory");
    d->root = -1;
    d->busy = true; /* until the writer has looked at the budget */
    d->vault.ops = options->ops ? options->ops : &cache_file_system;
    d->budget = options->budget;
    d->queue_bytes = options->queue_bytes ? options->queue_bytes : default_queue_bytes;
    pthread_mutex_init(&d->mutex, NULL); /* with default attributes these three cannot fail on Linux */
    pthread_cond_init(&d->work, NULL);
    pthread_cond_init(&d->done, NULL);
    if (cache_vault_open(&d->vault, d->vault.ops, options->key_file, err) < 0 || open_root(d, options->dir, err) < 0 ||
        scan_root(d, options->dir, err) < 0) {
        free_disk(d);
        return -1;
    }
    int r = start_writer(d);
    if (r) {
        free_disk(d);
        return error_set(err, "cache folder: its writer thread cannot start: %s", strerror(r));
    }
    *out = d;
    return 0;
}

void cache_disk_close(struct cache_disk *d)
{
    if (!d)
        return;
    pthread_mutex_lock(&d->mutex);
    d->closing = true;
    pthread_cond_signal(&d->work);
    pthread_mutex_unlock(&d->mutex);
    pthread_join(d->writer, NULL);
    free_disk(d);
}
