#include "server/cache_api.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "api/reply.h"
#include "base/alloc.h"
#include "base/log.h"
#include "engine/cache_disk.h"

enum {
    ENGINE_WAIT_MS = 60000, /* for the engine thread's turn: longer than a step of the largest model on a slow machine */
    MOST_LISTED = 4096,     /* namespaces in one list */
};

/* One line of the list: a namespace in memory, on disk or both. */
struct line {
    char name[CACHE_NAMESPACE_MAX + 1];
    int pages, snapshots;
    uint64_t memory_bytes, disk_files, disk_bytes, hits;
    double idle_seconds;
};

static int busy(struct api_error *err)
{
    return api_error_set(err, 503, "busy", NULL, "the engine did not answer in time: try again");
}

static int out_of_memory(struct api_error *err)
{
    return api_error_set(err, 503, NULL, NULL, "the server is out of memory; try again later");
}

/* ---- GET /v1/cache ---- */

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct line *)a)->name, ((const struct line *)b)->name);
}

/* Lines of what memory holds; *n of at most MOST_LISTED. */
static int list_memory(const struct chat_service *s, struct line *lines, size_t *n, struct api_error *err)
{
    struct engine_cache_entry *entries = alloc_array(MOST_LISTED, sizeof *entries);
    if (!entries)
        return out_of_memory(err);
    size_t count = 0;
    int rc = scheduler_cache_list(s->scheduler, entries, MOST_LISTED, &count, ENGINE_WAIT_MS) ? busy(err) : 0;
    for (size_t i = 0; rc == 0 && i < count && i < MOST_LISTED; i++) {
        const struct engine_cache_entry *e = &entries[i];
        struct line *l = &lines[(*n)++];
        *l = (struct line){.pages = e->pages, .snapshots = e->snapshots, .memory_bytes = e->bytes, .hits = e->hits, .idle_seconds = e->idle_seconds};
        memcpy(l->name, e->ns, sizeof l->name);
    }
    free(entries);
    return rc;
}

/* Adds what the disk holds: to the line of the same name, or as a new one. `lines` are sorted by name up to n_memory. */
static int add_disk(const struct chat_service *s, struct line *lines, size_t n_memory, size_t *n, struct api_error *err)
{
    if (!s->disk)
        return 0;
    struct cache_namespace_info *infos = alloc_array(MOST_LISTED, sizeof *infos);
    if (!infos)
        return out_of_memory(err);
    const size_t count = cache_disk_list(s->disk, infos, MOST_LISTED);
    const int64_t now = (int64_t)time(NULL);
    for (size_t i = 0; i < count && i < MOST_LISTED; i++) {
        struct line key = {0};
        memcpy(key.name, infos[i].name, sizeof key.name);
        struct line *l = bsearch(&key, lines, n_memory, sizeof *lines, by_name);
        if (!l) {
            l = &lines[(*n)++];
            *l = key;
            l->idle_seconds = now > infos[i].last_used ? (double)(now - infos[i].last_used) : 0;
        }
        l->disk_files = infos[i].files;
        l->disk_bytes = infos[i].bytes;
        if (l->hits < infos[i].hits)
            l->hits = infos[i].hits;
    }
    free(infos);
    return 0;
}

static void write_totals(const struct chat_service *s, struct buf *out)
{
    struct engine_cache_stats m;
    scheduler_cache_stats(s->scheduler, &m);
    buf_printf(out,
               ",\"memory\":{\"snapshot_bytes\":%" PRIu64 ",\"snapshot_budget\":%" PRIu64
               ",\"snapshots\":%d,\"pages_idle\":%d,\"pages_total\":%d,\"lookups\":%" PRIu64 ",\"hits\":%" PRIu64 "}",
               m.bytes, m.budget, m.snapshots, m.pages_idle, m.pages_total, m.lookups, m.hits);
    if (!s->disk) {
        buf_puts(out, ",\"disk\":null");
        return;
    }
    const struct cache_disk_stats d = cache_disk_stats(s->disk);
    buf_printf(out,
               ",\"disk\":{\"files\":%" PRIu64 ",\"bytes\":%" PRIu64 ",\"queued_bytes\":%" PRIu64 ",\"hits\":%" PRIu64 ",\"misses\":%" PRIu64
               ",\"bad_files\":%" PRIu64 ",\"write_errors\":%" PRIu64 "}",
               d.files, d.bytes, d.queued_bytes, d.hits, d.misses, d.bad_files, d.write_errors);
}

int cache_api_list(const struct chat_service *s, struct buf *out, struct api_error *err)
{
    struct line *lines = alloc_array((size_t)2 * MOST_LISTED, sizeof *lines);
    if (!lines)
        return out_of_memory(err);
    size_t n = 0;
    int rc = list_memory(s, lines, &n, err);
    if (rc == 0) {
        qsort(lines, n, sizeof *lines, by_name);
        rc = add_disk(s, lines, n, &n, err);
    }
    if (rc == 0) {
        qsort(lines, n, sizeof *lines, by_name);
        buf_puts(out, "{\"object\":\"list\",\"data\":[");
        for (size_t i = 0; i < n; i++) {
            const struct line *l = &lines[i];
            buf_printf(out, "%s{\"object\":\"cache.namespace\",\"namespace\":", i ? "," : "");
            reply_json_string(out, l->name, strlen(l->name));
            buf_printf(out,
                       ",\"pages\":%d,\"snapshots\":%d,\"memory_bytes\":%" PRIu64 ",\"disk_files\":%" PRIu64 ",\"disk_bytes\":%" PRIu64
                       ",\"hits\":%" PRIu64 ",\"idle_seconds\":%.1f}",
                       l->pages, l->snapshots, l->memory_bytes, l->disk_files, l->disk_bytes, l->hits, l->idle_seconds);
        }
        buf_putc(out, ']');
        write_totals(s, out);
        buf_puts(out, "}\n");
    }
    free(lines);
    return rc;
}

/* ---- DELETE /v1/cache/{namespace} ---- */

/* Adds what was removed to *sum. */
static int delete_files(const struct chat_service *s, const char *ns, struct cache_removed *sum, struct api_error *err)
{
    struct cache_removed n = {0};
    struct error why = {""};
    const int rc = cache_disk_delete(s->disk, ns, &n, &why);
    sum->files += n.files;
    sum->bytes += n.bytes;
    if (rc == 0)
        return 0;
    log_error("a cache namespace could not be removed from disk: %s", why.text);
    return api_error_set(err, 500, "not_removed", NULL, "memory was cleared and %" PRIu64 " files were removed, but not all: %s", sum->files,
                         why.text);
}

int cache_api_delete(const struct chat_service *s, const char *ns, struct buf *out, struct api_error *err)
{
    if (ns[0] && chat_namespace_check(ns, strlen(ns), "namespace", err))
        return -1;
    /* Memory first: what it drops is then not written again; what a request computes meanwhile leaves nothing behind. A request that had read its
     * files before they went may bring them back while they go, so memory is looked at once more, and then the disk. */
    struct engine_cache_removed memory = {0}, again = {0};
    struct cache_removed disk = {0};
    for (int round = 0; round < 2; round++) {
        if (scheduler_cache_drop(s->scheduler, ns, &again, ENGINE_WAIT_MS))
            return busy(err);
        if (round == 1 && again.bytes == 0)
            break;
        memory.pages += again.pages;
        memory.snapshots += again.snapshots;
        memory.bytes += again.bytes;
        if (!s->disk)
            break;
        if (delete_files(s, ns, &disk, err))
            return -1;
    }
    buf_puts(out, "{\"object\":\"cache.deleted\",\"namespace\":");
    reply_json_string(out, ns, strlen(ns));
    buf_printf(out,
               ",\"deleted\":%s,\"pages\":%d,\"snapshots\":%d,\"memory_bytes\":%" PRIu64 ",\"disk_files\":%" PRIu64 ",\"disk_bytes\":%" PRIu64 "}\n",
               memory.bytes || disk.files ? "true" : "false", memory.pages, memory.snapshots, memory.bytes, disk.files, disk.bytes);
    return 0;
}
