#include "engine/cache_disk.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "engine/backend.h"
#include "engine/cache_disk_impl.h"

_Static_assert((int)CACHE_FILE_IDS == (int)GRID, "a page file holds one cell of the grid");

static const int64_t second = 1000000000;

int64_t cache_disk_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * second + t.tv_nsec;
}

bool cache_disk_may_log(uint64_t *logged)
{
    const uint64_t now = clock_ns();
    if (*logged && now - *logged < 60 * (uint64_t)second)
        return false;
    *logged = now;
    return true;
}

bool cache_disk_folder(const struct cache_disk *d, const char *ns, char folder[CACHE_FOLDER_MAX])
{
    if (!ns || (*ns && !cache_namespace_valid(ns, strnlen(ns, CACHE_NAMESPACE_MAX + 1))))
        return false;
    cache_vault_folder(&d->vault, ns, d->vault.encrypted, folder);
    return true;
}

void cache_disk_bind(struct cache_disk *d, const struct cache_model *model)
{
    pthread_mutex_lock(&d->mutex);
    d->model = *model;
    d->bound = model->page_bytes > 0 && model->page_bytes <= CACHE_PAYLOAD_MAX && model->state_bytes <= CACHE_PAYLOAD_MAX;
    pthread_mutex_unlock(&d->mutex);
}

/* With the mutex held: the namespace of a folder when it may be used, or NULL. */
static struct cache_space *usable_space(const struct cache_disk *d, const char *folder)
{
    struct cache_space *s = cache_index_space(&d->index, folder);
    return s && !s->deleting ? s : NULL;
}

static struct cache_entry *find(const struct cache_disk *d, const struct cache_space *s, const struct cache_key *key, bool state)
{
    const struct cache_key id = cache_vault_file_id(&d->vault, key, state);
    return s ? cache_index_find(&d->index, s, &id, state) : NULL;
}

/* ---- reading ---- */

struct reading { /* one call of cache_disk_read */
    struct cache_disk *d;
    struct cache_model model;
    char folder[CACHE_FOLDER_MAX];
    uint64_t serial; /* of the namespace */
    int dir;
    struct cache_key root;
    const struct cache_text *text;
    int from, first; /* tokens and full pages that the caller has */
    int limit;       /* pages first .. limit - 1 are there, as far as is known */
    int tail;        /* the deepest tail that still seems possible, an index; -1 none */
    bool *state;     /* [n]: the state at the end of page i is there, as far as is known; later: the page's time of change is to be set */
    bool touch_state;
    bool read_failed, damaged, no_memory, removed;
};

/* How many pages from the text's start the deepest hit has that still seems possible; `first` when there is none. */
static int deepest(const struct reading *r)
{
    int n = r->limit;
    if (r->model.state_bytes)
        while (n > r->first && !r->state[n - 1])
            n--;
    return n;
}

/* Pages before the tail that is left, or 0. */
static int tail_pages(const struct reading *r)
{
    return r->tail < 0 ? 0 : r->text->tails[r->tail].position / CACHE_FILE_IDS;
}

/* The deepest tail before number `below` that is stored and whose pages are there, as far as is known; -1: none. With the mutex held. */
static int find_tail(const struct reading *r, const struct cache_space *s, int below)
{
    for (int i = below - 1; i >= 0; i--) {
        const struct cache_tail *t = &r->text->tails[i];
        if (t->position <= r->from)
            break;
        const struct cache_entry *e = t->position / CACHE_FILE_IDS <= r->limit ? find(r->d, s, &t->key, true) : NULL;
        if (e && e->stage == CACHE_STORED)
            return i;
    }
    return -1;
}

/* Looks up what is stored. False: nothing for this text. */
static bool survey(struct reading *r)
{
    struct cache_disk *d = r->d;
    pthread_mutex_lock(&d->mutex);
    r->model = d->model;
    r->limit = r->first;
    const struct cache_space *s = d->bound ? usable_space(d, r->folder) : NULL;
    if (s) {
        r->serial = s->serial;
        for (const struct cache_entry *e; r->limit < r->text->n; r->limit++) {
            e = find(d, s, &r->text->keys[r->limit], false);
            if (!e || e->stage != CACHE_STORED)
                break;
            e = r->model.state_bytes ? find(d, s, &r->text->keys[r->limit], true) : NULL;
            r->state[r->limit] = e && e->stage == CACHE_STORED;
        }
        r->tail = find_tail(r, s, r->text->n_tails);
    }
    pthread_mutex_unlock(&d->mutex);
    return r->limit > r->first || r->tail >= 0;
}

/* Says once what is wrong with a file that could not be read or believed, and forgets or removes it. */
static void bad_file(struct reading *r, const struct cache_key *key, bool state, const char *name, enum cache_file_status status, const char *why)
{
    struct cache_disk *d = r->d;
    bool say = false;
    pthread_mutex_lock(&d->mutex);
    struct cache_entry *e = find(d, usable_space(d, r->folder), key, state);
    if (e && e->stage == CACHE_STORED) { /* else somebody else sees to it */
        switch (status) {
        case CACHE_FILE_ABSENT: /* taken away behind our back, or evicted just now (and perhaps written again: so not only forgotten) */
            cache_disk_unlink(d, e);
            break;
        case CACHE_FILE_BAD:
            d->stats.bad_files++;
            r->damaged = say = true;
            cache_disk_unlink(d, e);
            break;
        case CACHE_FILE_OTHER:
            d->stats.bad_files++;
            say = cache_disk_may_log(&d->read_logged);
            break;
        default:
            d->stats.read_errors++;
            r->read_failed = true;
            say = cache_disk_may_log(&d->read_logged);
        }
    }
    pthread_mutex_unlock(&d->mutex);
    if (say)
        log_warn("prefix cache: file %s: %s; it counts as missing%s", name, why,
                 status == CACHE_FILE_BAD ? " and is removed" : " (said once a minute at most)");
}

/* Reads a file that must say `want` of itself. out: [bytes] */
static bool read_file(struct reading *r, struct cache_file_head *want, uint8_t *out, size_t bytes)
{
    struct cache_disk *d = r->d;
    const bool state = want->kind == CACHE_FILE_STATE;
    char name[CACHE_FILE_NAME_MAX];
    struct error err = {{0}};
    memcpy(want->model_id, r->model.id, sizeof want->model_id);
    const struct cache_key id = cache_vault_file_id(&d->vault, &want->key, state);
    cache_file_name(&id, state, name);
    enum cache_file_status status = cache_file_read(&d->vault, r->dir, name, want, out, bytes, &err);
    if (status != CACHE_FILE_OK)
        bad_file(r, &want->key, state, name, status, err.text);
    return status == CACHE_FILE_OK;
}

static bool read_page(struct reading *r, int i, uint8_t *out)
{
    struct cache_file_head want = {
        .kind = CACHE_FILE_PAGE,
        .key = r->text->keys[i],
        .parent = i ? r->text->keys[i - 1] : r->root,
        .position = (i + 1) * CACHE_FILE_IDS,
        .n_ids = CACHE_FILE_IDS,
    };
    memcpy(want.ids, r->text->ids + (size_t)i * CACHE_FILE_IDS, sizeof want.ids);
    return read_file(r, &want, out, r->model.page_bytes);
}

/* The state that ends the image: of the tail, or behind the last page. */
static struct cache_tail image_end(const struct reading *r, int pages, bool tail)
{
    if (tail)
        return r->text->tails[r->tail];
    return (struct cache_tail){.position = pages * CACHE_FILE_IDS, .bytes = r->model.state_bytes, .key = r->text->keys[pages - 1]};
}

static bool read_state(struct reading *r, const struct cache_tail *end, uint8_t **out)
{
    uint8_t *data = realloc(*out, end->bytes);
    r->no_memory = !data;
    if (!data)
        return false;
    *out = data;
    struct cache_file_head want = {.kind = CACHE_FILE_STATE, .key = end->key, .position = end->position};
    return read_file(r, &want, data, end->bytes);
}

/* The tail turned out bad, or pages before it are missing: the next best. */
static void next_tail(struct reading *r)
{
    pthread_mutex_lock(&r->d->mutex);
    const struct cache_space *s = usable_space(r->d, r->folder);
    r->tail = s ? find_tail(r, s, r->tail) : -1;
    pthread_mutex_unlock(&r->d->mutex);
}

/* Pages before the deepest hit that still seems possible, and whether it is a tail; `first` and false when there is none. */
static int next_target(struct reading *r, bool *tail)
{
    while (r->tail >= 0 && tail_pages(r) > r->limit)
        next_tail(r);
    const int grid = deepest(r);
    *tail = r->tail >= 0 && tail_pages(r) >= grid;
    return *tail ? tail_pages(r) : grid;
}

/* Reads pages and the state of the deepest hit into the image, going back to a shallower one whenever a file turns out bad. */
static void read_files(struct reading *r, struct cache_image *out)
{
    const size_t page_bytes = r->model.page_bytes;
    bool tail, absent;
    const size_t n_pages = (size_t)(next_target(r, &tail) - r->first);
    if (n_pages == 0 && !tail)
        return;
    out->pages = n_pages <= SIZE_MAX / page_bytes ? malloc(n_pages ? n_pages * page_bytes : 1) : NULL;
    r->no_memory = !out->pages;
    if (r->no_memory)
        return;
    struct error err;
    r->dir = cache_folder_open(r->d->vault.ops, r->d->root, r->folder, false, &absent, &err);
    if (r->dir < 0) {
        r->removed = absent;
        r->read_failed = !absent;
        return;
    }
    int have = r->first, target;
    while ((target = next_target(r, &tail)) > r->first || tail) {
        if (have < target) {
            if (read_page(r, have, out->pages + (size_t)(have - r->first) * page_bytes))
                have++;
            else
                r->limit = have;
            continue;
        }
        const struct cache_tail end = image_end(r, target, tail);
        if (end.bytes == 0 || read_state(r, &end, &out->state)) {
            out->n_pages = target - r->first;
            out->tail = end.position % CACHE_FILE_IDS;
            out->state_bytes = end.bytes;
            return;
        }
        if (r->no_memory)
            return;
        if (tail)
            next_tail(r);
        else
            r->state[target - 1] = false;
    }
}

/* Whether the file's time of change is to be set; it counts as used now. With the mutex held. */
static bool use_file(struct cache_disk *d, struct cache_entry *e, int64_t now)
{
    const bool touch = e && now - e->touched >= 60 * second;
    if (touch)
        e->touched = now;
    if (e)
        cache_index_use(&d->index, e);
    return touch;
}

/* Counts a hit and makes its files the last used, the first page last, so that a text is evicted from its end. False: the namespace was deleted
 * while it was read. */
static bool use_files(struct reading *r, const struct cache_image *m)
{
    struct cache_disk *d = r->d;
    const int64_t now = cache_disk_now();
    pthread_mutex_lock(&d->mutex);
    struct cache_space *s = usable_space(d, r->folder);
    const bool there = s && s->serial == r->serial;
    if (there) {
        s->hits++;
        s->last_used = now;
        const struct cache_tail end = image_end(r, r->first + m->n_pages, m->tail);
        r->touch_state = use_file(d, find(d, s, &end.key, true), now);
        for (int i = r->first + m->n_pages - 1; i >= r->first; i--)
            r->state[i] = use_file(d, find(d, s, &r->text->keys[i], false), now);
    }
    pthread_mutex_unlock(&d->mutex);
    return there;
}

static void touch_file(const struct reading *r, const struct cache_key *key, bool state)
{
    char name[CACHE_FILE_NAME_MAX];
    const struct cache_key id = cache_vault_file_id(&r->d->vault, key, state);
    cache_file_name(&id, state, name);
    cache_op_touch(r->d->vault.ops, r->dir, name);
}

/* Keeps the last use in the files' times of change for the next start, where use_files said so. A failure only makes that order worse. */
static void touch_files(const struct reading *r, const struct cache_image *m)
{
    const struct cache_tail end = image_end(r, r->first + m->n_pages, m->tail);
    if (r->touch_state)
        touch_file(r, &end.key, true);
    for (int i = r->first + m->n_pages - 1; i >= r->first; i--)
        if (r->state[i])
            touch_file(r, &r->text->keys[i], false);
}

static const char *reason(const struct reading *r, bool found, const struct cache_image *m)
{
    if (r->no_memory)
        return "out of memory";
    if (r->removed)
        return "the namespace was removed";
    if (r->read_failed)
        return "the disk could not be read";
    if (r->damaged)
        return "a stored file was damaged";
    if (!found)
        return "nothing is stored for this text";
    if (r->first + m->n_pages < r->limit)
        return "no state is stored for the rest";
    return r->limit < r->text->n ? "the stored text ends earlier" : "";
}

bool cache_disk_read(struct cache_disk *d, const char *ns, const struct cache_text *text, int from, struct cache_image *out)
{
    const int first = from >= 0 ? from / CACHE_FILE_IDS : 0;
    *out = (struct cache_image){.first_page = first, .reason = ""};
    struct reading r = {.d = d, .dir = -1, .text = text, .from = from, .first = first, .limit = first, .tail = -1};
    bool found = false, hit = false;
    if (from >= 0 && first <= text->n && text->n > 0 && text->n <= INT32_MAX / CACHE_FILE_IDS && cache_disk_folder(d, ns, r.folder)) {
        r.state = alloc_array((size_t)text->n, sizeof *r.state);
        r.no_memory = !r.state;
        found = r.state && survey(&r);
        if (found) {
            r.root = cache_key_root(r.model.id, ns);
            read_files(&r, out);
            hit = out->n_pages || out->tail;
            if (hit && !use_files(&r, out)) {
                r.removed = true;
                hit = false;
            }
            if (hit)
                touch_files(&r, out);
        }
    }
    out->reason = reason(&r, found, out);
    cache_op_close(d->vault.ops, r.dir);
    free(r.state);
    if (!hit)
        cache_image_free(out);
    pthread_mutex_lock(&d->mutex);
    *(hit ? &d->stats.hits : &d->stats.misses) += 1;
    pthread_mutex_unlock(&d->mutex);
    return hit;
}

void cache_image_free(struct cache_image *image)
{
    if (!image)
        return;
    free(image->pages);
    free(image->state);
    image->pages = image->state = NULL;
    image->n_pages = image->tail = 0;
    image->state_bytes = 0;
}

/* ---- queueing ---- */

void cache_disk_missing(struct cache_disk *d, const char *ns, const struct cache_key *keys, int n, bool *page_missing, bool *state_missing)
{
    char folder[CACHE_FOLDER_MAX];
    if (n > 0)
        memset(page_missing, 0, (size_t)n * sizeof *page_missing);
    *state_missing = false;
    if (n <= 0 || !cache_disk_folder(d, ns, folder))
        return;
    pthread_mutex_lock(&d->mutex);
    struct cache_space *s = cache_index_space(&d->index, folder);
    if (d->bound && !(s && s->deleting)) {
        struct cache_entry *e = d->model.state_bytes ? find(d, s, &keys[n - 1], true) : NULL;
        *state_missing = d->model.state_bytes && !e;
        if (e)
            cache_index_use(&d->index, e);
        for (int i = n - 1; i >= 0; i--) { /* the first page last: a text is evicted from its end */
            e = find(d, s, &keys[i], false);
            page_missing[i] = !e;
            if (e)
                cache_index_use(&d->index, e);
        }
        uint64_t room = d->queue_bytes > d->queued ? d->queue_bytes - d->queued : 0;
        for (int i = 0; i < n; i++) {
            if (!page_missing[i])
                continue;
            if (room >= d->model.page_bytes) {
                room -= d->model.page_bytes;
            } else { /* and nothing after it either: it would be of no use */
                room = 0;
                page_missing[i] = false;
                *state_missing = false;
            }
        }
        *state_missing = *state_missing && room >= d->model.state_bytes;
    }
    pthread_mutex_unlock(&d->mutex);
}

bool cache_disk_use_tail(struct cache_disk *d, const char *ns, const struct cache_key *key)
{
    char folder[CACHE_FOLDER_MAX];
    if (!cache_disk_folder(d, ns, folder))
        return false;
    pthread_mutex_lock(&d->mutex);
    struct cache_entry *e = find(d, usable_space(d, folder), key, true);
    if (e)
        cache_index_use(&d->index, e);
    pthread_mutex_unlock(&d->mutex);
    return e != NULL;
}

bool cache_disk_has(struct cache_disk *d, const char *ns, const struct cache_key *key, bool state)
{
    char folder[CACHE_FOLDER_MAX];
    if (!cache_disk_folder(d, ns, folder))
        return false;
    pthread_mutex_lock(&d->mutex);
    bool has = find(d, usable_space(d, folder), key, state) != NULL;
    pthread_mutex_unlock(&d->mutex);
    return has;
}

/* With the mutex held: queues the job, whose head and data are set, and of a tail the bytes. `beside`: the key of the page that its file is to stay
 * just older than. */
static bool enqueue(struct cache_disk *d, const char *ns, const char *folder, const struct cache_key *beside, struct cache_job *job)
{
    const bool state = job->head.kind == CACHE_FILE_STATE, tail = state && job->head.position % CACHE_FILE_IDS;
    if (!tail)
        job->bytes = state ? d->model.state_bytes : d->model.page_bytes;
    if (!d->bound || !d->model.page_bytes || !job->bytes || job->bytes > CACHE_PAYLOAD_MAX || d->closing || job->head.position <= 0 ||
        (job->head.position % CACHE_FILE_IDS && !tail))
        return false;
    memcpy(job->head.model_id, d->model.id, sizeof job->head.model_id);
    struct cache_space *s = cache_index_space(&d->index, folder);
    if ((s && s->deleting) || find(d, s, &job->head.key, state))
        return false;
    if (d->queued > d->queue_bytes || job->bytes > d->queue_bytes - d->queued) {
        d->stats.dropped++;
        return false;
    }
    if (!s)
        s = cache_index_add_space(&d->index, folder);
    if (!s)
        return false;
    if (!s->named) {
        memcpy(s->name, ns, strlen(ns) + 1);
        s->named = true;
    }
    const struct cache_key id = cache_vault_file_id(&d->vault, &job->head.key, state);
    job->entry = cache_index_add(&d->index, s, &id, state, find(d, s, beside, false));
    if (!job->entry) {
        if (s->files == 0 && s->jobs == 0 && !s->tidying)
            cache_index_remove_space(&d->index, s);
        return false;
    }
    job->space = s;
    s->jobs++;
    s->last_used = cache_disk_now();
    d->queued += job->bytes;
    *(d->last ? &d->last->next : &d->first) = job;
    d->last = job;
    pthread_cond_signal(&d->work);
    return true;
}

static bool put(struct cache_disk *d, const char *ns, const struct cache_file_head *head, const struct cache_key *beside, uint8_t *data, size_t bytes)
{
    char folder[CACHE_FOLDER_MAX];
    bool queued = false;
    struct cache_job *job = alloc_array(1, sizeof *job);
    if (job && data && cache_disk_folder(d, ns, folder)) {
        job->head = *head;
        job->data = data;
        job->bytes = bytes;
        pthread_mutex_lock(&d->mutex);
        queued = enqueue(d, ns, folder, beside, job);
        pthread_mutex_unlock(&d->mutex);
    }
    if (!queued) {
        free(job);
        free(data);
    }
    return queued;
}

bool cache_disk_put_page(struct cache_disk *d, const char *ns, const struct cache_key *key, const struct cache_key *parent, int position,
                         const int32_t ids[64], uint8_t *data)
{
    struct cache_file_head head = {.kind = CACHE_FILE_PAGE, .key = *key, .parent = *parent, .position = position, .n_ids = CACHE_FILE_IDS};
    memcpy(head.ids, ids, sizeof head.ids);
    return put(d, ns, &head, parent, data, 0);
}

bool cache_disk_put_state(struct cache_disk *d, const char *ns, const struct cache_key *key, int position, uint8_t *data)
{
    const struct cache_file_head head = {.kind = CACHE_FILE_STATE, .key = *key, .position = position};
    return position % CACHE_FILE_IDS == 0 ? put(d, ns, &head, key, data, 0) : (free(data), false);
}

bool cache_disk_put_tail(struct cache_disk *d, const char *ns, const struct cache_key *key, const struct cache_key *parent, int position,
                         uint8_t *data, size_t bytes)
{
    const struct cache_file_head head = {.kind = CACHE_FILE_STATE, .key = *key, .position = position};
    return position % CACHE_FILE_IDS ? put(d, ns, &head, parent, data, bytes) : (free(data), false);
}

void cache_disk_flush(struct cache_disk *d)
{
    pthread_mutex_lock(&d->mutex);
    while (d->first || d->busy)
        pthread_cond_wait(&d->done, &d->mutex);
    pthread_mutex_unlock(&d->mutex);
}

/* ---- telling ---- */

size_t cache_disk_list(struct cache_disk *d, struct cache_namespace_info *out, size_t max)
{
    size_t n = 0;
    char folder[CACHE_FOLDER_MAX];
    pthread_mutex_lock(&d->mutex);
    for (size_t i = 0; i < d->index.n_spaces; i++) {
        const struct cache_space *s = d->index.spaces[i], *clear = NULL;
        if (!s->named || s->files == 0)
            continue;
        if (d->vault.encrypted) { /* a folder from the time without a key counts with the encrypted one of the same name */
            const bool hidden = strncmp(s->folder, "enc=", 4) == 0;
            cache_vault_folder(&d->vault, s->name, !hidden, folder);
            const struct cache_space *other = cache_index_space(&d->index, folder);
            if (!hidden && other && other->files)
                continue;
            clear = hidden ? other : NULL;
        }
        if (n < max) {
            struct cache_namespace_info *info = &out[n];
            memcpy(info->name, s->name, sizeof info->name);
            info->files = s->files + (clear ? clear->files : 0);
            info->bytes = s->bytes + (clear ? clear->bytes : 0);
            info->hits = s->hits;
            info->last_used = s->last_used / second;
        }
        n++;
    }
    pthread_mutex_unlock(&d->mutex);
    return n;
}

struct cache_disk_stats cache_disk_stats(struct cache_disk *d)
{
    pthread_mutex_lock(&d->mutex);
    struct cache_disk_stats stats = d->stats;
    stats.files = d->index.files;
    stats.bytes = d->index.bytes;
    stats.queued_bytes = d->queued;
    pthread_mutex_unlock(&d->mutex);
    return stats;
}
