#include "engine/cache_index.h"

#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"

/* ---- namespaces: a sorted array, searched by halving ---- */

/* Where `folder` is or belongs. */
static size_t space_at(const struct cache_index *x, const char *folder)
{
    size_t low = 0, high = x->n_spaces;
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        if (strcmp(x->spaces[mid]->folder, folder) < 0)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

struct cache_space *cache_index_space(const struct cache_index *x, const char *folder)
{
    size_t at = space_at(x, folder);
    return at < x->n_spaces && strcmp(x->spaces[at]->folder, folder) == 0 ? x->spaces[at] : NULL;
}

struct cache_space *cache_index_add_space(struct cache_index *x, const char *folder)
{
    size_t at = space_at(x, folder);
    if (at < x->n_spaces && strcmp(x->spaces[at]->folder, folder) == 0)
        return x->spaces[at];
    size_t len = strlen(folder);
    struct cache_space *s = alloc_array(1, sizeof *s);
    if (!s || len >= sizeof s->folder || alloc_grow(&x->spaces, &x->cap_spaces, x->n_spaces + 1, sizeof *x->spaces) < 0) {
        free(s);
        return NULL;
    }
    memcpy(s->folder, folder, len + 1);
    memmove(x->spaces + at + 1, x->spaces + at, (x->n_spaces - at) * sizeof *x->spaces);
    x->spaces[at] = s;
    x->n_spaces++;
    s->serial = x->next_serial++;
    return s;
}

void cache_index_remove_space(struct cache_index *x, struct cache_space *s)
{
    size_t at = space_at(x, s->folder);
    x->n_spaces--;
    memmove(x->spaces + at, x->spaces + at + 1, (x->n_spaces - at) * sizeof *x->spaces);
    free(s);
}

/* ---- files: a hash table with chains ---- */

static size_t slot_of(const struct cache_index *x, const struct cache_key *id)
{
    uint64_t h; /* the id is a hash already */
    memcpy(&h, id->bytes, sizeof h);
    return (size_t)h & (x->n_table - 1);
}

struct cache_entry *cache_index_find(const struct cache_index *x, const struct cache_space *s, const struct cache_key *id, bool state)
{
    if (!x->n_table)
        return NULL;
    for (struct cache_entry *e = x->table[slot_of(x, id)]; e; e = e->chain)
        if (e->space == s && e->state == state && cache_key_equal(&e->id, id))
            return e;
    return NULL;
}

/* Twice the slots when there are as many entries as slots. A failure only makes chains longer, unless there is no table yet: -1. */
static int grow_table(struct cache_index *x)
{
    if (x->n_entries < x->n_table)
        return 0;
    size_t n = x->n_table ? 2 * x->n_table : 1024;
    struct cache_entry **table = alloc_array(n, sizeof(struct cache_entry *));
    if (!table)
        return x->n_table ? 0 : -1;
    free(x->table);
    x->table = table;
    x->n_table = n;
    for (struct cache_entry *e = x->oldest; e; e = e->newer) {
        size_t slot = slot_of(x, &e->id);
        e->chain = table[slot];
        table[slot] = e;
    }
    return 0;
}

static void unlink_order(struct cache_index *x, struct cache_entry *e)
{
    *(e->older ? &e->older->newer : &x->oldest) = e->newer;
    *(e->newer ? &e->newer->older : &x->newest) = e->older;
}

/* Puts e just older than `younger` (NULL: as the newest). */
static void link_order(struct cache_index *x, struct cache_entry *e, struct cache_entry *younger)
{
    e->newer = younger;
    e->older = younger ? younger->older : x->newest;
    *(e->older ? &e->older->newer : &x->oldest) = e;
    *(younger ? &younger->older : &x->newest) = e;
}

struct cache_entry *cache_index_add(struct cache_index *x, struct cache_space *s, const struct cache_key *id, bool state, struct cache_entry *younger)
{
    struct cache_entry *e = alloc_array(1, sizeof *e);
    if (!e || grow_table(x) < 0) {
        free(e);
        return NULL;
    }
    e->space = s;
    e->id = *id;
    e->state = state;
    e->stage = CACHE_QUEUED;
    size_t slot = slot_of(x, id);
    e->chain = x->table[slot];
    x->table[slot] = e;
    link_order(x, e, younger);
    x->n_entries++;
    return e;
}

void cache_index_stored(struct cache_index *x, struct cache_entry *e, uint64_t bytes, int64_t touched)
{
    e->stage = CACHE_STORED;
    e->bytes = bytes;
    e->touched = touched;
    x->files++;
    x->bytes += bytes;
    e->space->files++;
    e->space->bytes += bytes;
    if (touched > e->space->last_used)
        e->space->last_used = touched;
}

void cache_index_use(struct cache_index *x, struct cache_entry *e)
{
    unlink_order(x, e);
    link_order(x, e, NULL);
}

void cache_index_remove(struct cache_index *x, struct cache_entry *e)
{
    struct cache_entry **p = &x->table[slot_of(x, &e->id)];
    while (*p != e)
        p = &(*p)->chain;
    *p = e->chain;
    unlink_order(x, e);
    if (e->stage != CACHE_QUEUED) {
        x->files--;
        x->bytes -= e->bytes;
        e->space->files--;
        e->space->bytes -= e->bytes;
    }
    x->n_entries--;
    free(e);
}

static int by_touched(const void *a, const void *b)
{
    const struct cache_entry *const *x = a, *const *y = b;
    return ((*x)->touched > (*y)->touched) - ((*x)->touched < (*y)->touched);
}

void cache_index_sort(struct cache_index *x)
{
    size_t n = 0;
    struct cache_entry **all = alloc_array(x->n_entries, sizeof(struct cache_entry *));
    if (!all)
        return; /* the order only decides who is evicted first */
    for (struct cache_entry *e = x->oldest; e; e = e->newer)
        all[n++] = e;
    qsort(all, n, sizeof(struct cache_entry *), by_touched);
    x->oldest = x->newest = NULL;
    for (size_t i = 0; i < n; i++)
        link_order(x, all[i], NULL);
    free(all);
}

void cache_index_free(struct cache_index *x)
{
    for (struct cache_entry *e = x->oldest, *next; e; e = next) {
        next = e->newer;
        free(e);
    }
    for (size_t i = 0; i < x->n_spaces; i++)
        free(x->spaces[i]);
    free(x->spaces);
    free(x->table);
    *x = (struct cache_index){0};
}
