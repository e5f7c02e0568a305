#include "engine/prefix_cache.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"

enum { FIRST_BUCKETS = 256 };

struct prefix_cache *prefix_open(const struct prefix_options *o)
{
    struct prefix_cache *c = alloc_array(1, sizeof *c);
    if (!c)
        return NULL;
    c->o = *o;
    c->n_buckets = FIRST_BUCKETS;
    c->buckets = alloc_array(c->n_buckets, sizeof(struct prefix_cell *));
    if (!c->buckets) {
        free(c);
        return NULL;
    }
    c->shared.root = cache_key_root(o->model_id, "\1shared"); /* no namespace is called so: see cache_namespace_valid */
    return c;
}

/* ---- namespaces ---- */

static struct prefix_space *find_space(const struct prefix_cache *c, const char *name)
{
    struct prefix_space *s = c->spaces;
    while (s && strcmp(s->name, name) != 0)
        s = s->next;
    return s;
}

/* Frees a namespace that nobody needs any more. */
static void release_space(struct prefix_cache *c, struct prefix_space *s)
{
    if (s == &c->shared || s->guests || s->n_cells)
        return;
    struct prefix_space **at = &c->spaces;
    while (*at != s)
        at = &(*at)->next;
    *at = s->next;
    free(s);
}

struct prefix_space *prefix_enter(struct prefix_cache *c, const char *name)
{
    struct prefix_space *s = find_space(c, name);
    if (!s) {
        size_t len = strlen(name);
        if (len > CACHE_NAMESPACE_MAX || !(s = alloc_array(1, sizeof *s)))
            return NULL;
        memcpy(s->name, name, len);
        s->root = cache_key_root(c->o.model_id, name);
        s->used = c->now;
        s->next = c->spaces;
        c->spaces = s;
    }
    s->guests++;
    return s;
}

void prefix_leave(struct prefix_cache *c, struct prefix_space *s)
{
    s->guests--;
    release_space(c, s);
}

/* ---- the tree ---- */

static struct cache_key key_after(const struct prefix_space *s, const struct prefix_cell *parent, const int32_t *ids)
{
    if (!parent)
        return cache_key_next(&s->root, ids, GRID);
    if (parent->space == s)
        return cache_key_next(&parent->key, ids, GRID);
    /* The first cell of a namespace behind a shared one: the key must tell the namespaces apart. */
    struct cache_key both = parent->key;
    for (size_t i = 0; i < sizeof both.bytes; i++)
        both.bytes[i] ^= s->root.bytes[i];
    return cache_key_next(&both, ids, GRID);
}

static struct prefix_cell **bucket_of(const struct prefix_cache *c, const struct cache_key *key)
{
    uint64_t h;
    memcpy(&h, key->bytes, sizeof h);
    return &c->buckets[h & (c->n_buckets - 1)];
}

static struct prefix_cell *find_cell(const struct prefix_cache *c, const struct prefix_space *s, const struct prefix_cell *parent, const int32_t *ids,
                                     const struct cache_key *key)
{
    struct prefix_cell *cell = *bucket_of(c, key);
    while (cell && !(cell->parent == parent && cell->space == s && memcmp(cell->ids, ids, sizeof cell->ids) == 0))
        cell = cell->bucket;
    return cell;
}

/* The list that a cell of this space is in. */
static struct prefix_cell **siblings_of(struct prefix_space *s, struct prefix_cell *parent)
{
    return parent ? &parent->first : &s->first;
}

static void grow_buckets(struct prefix_cache *c)
{
    if (c->n_cells <= c->n_buckets || c->n_buckets > SIZE_MAX / 4)
        return;
    struct prefix_cell **more = alloc_array(c->n_buckets * 2, sizeof(struct prefix_cell *));
    if (!more)
        return; /* slower, not wrong */
    free(c->buckets);
    c->buckets = more;
    c->n_buckets *= 2;
    for (size_t i = 0; i < c->n_cells; i++) {
        struct prefix_cell **b = bucket_of(c, &c->cells[i]->key);
        c->cells[i]->bucket = *b;
        *b = c->cells[i];
    }
}

/* A new cell, bare. NULL when out of memory. */
static struct prefix_cell *new_cell(struct prefix_cache *c, struct prefix_space *s, struct prefix_cell *parent, const int32_t *ids,
                                    const struct cache_key *key)
{
    if (alloc_grow(&c->cells, &c->cap_cells, c->n_cells + 1, sizeof(struct prefix_cell *)))
        return NULL;
    struct prefix_cell *cell = alloc_array(1, sizeof *cell);
    if (!cell)
        return NULL;
    cell->key = *key;
    cell->space = s;
    cell->parent = parent;
    cell->depth = parent ? parent->depth + 1 : 1;
    cell->page = -1;
    memcpy(cell->ids, ids, sizeof cell->ids);

    struct prefix_cell **list = siblings_of(s, parent);
    cell->next = *list;
    if (cell->next)
        cell->next->prev = cell;
    *list = cell;
    cell->place = c->n_cells;
    c->cells[c->n_cells++] = cell;
    struct prefix_cell **b = bucket_of(c, key);
    cell->bucket = *b;
    *b = cell;
    grow_buckets(c);
    s->n_cells++;
    c->n_bare++;
    return cell;
}

static void give_page(struct prefix_cache *c, struct prefix_cell *cell, int32_t page)
{
    pages_keep(c->o.pages, page);
    cell->page = page;
    cell->space->n_pages++;
    c->n_bare--;
    if (cell->parent)
        cell->parent->n_paged++;
}

/* Takes a snapshot off its cell and out of the list; its data stays counted. */
static void take_snapshot_off(struct prefix_cache *c, struct prefix_cell *cell, struct prefix_snapshot *s)
{
    assert(s->cell == cell);
    c->snapshots[s->place] = c->snapshots[--c->n_snapshots];
    c->snapshots[s->place]->place = s->place;
    if (cell->snapshot == s) {
        cell->snapshot = NULL;
    } else {
        struct prefix_snapshot **at = &cell->tails;
        while (*at != s)
            at = &(*at)->next;
        *at = s->next;
    }
    cell->space->n_snapshots--;
    cell->space->snapshot_bytes -= s->bytes;
    free(s);
}

static void free_snapshot(struct prefix_cache *c, struct prefix_cell *cell, struct prefix_snapshot *s)
{
    if (!s)
        return;
    uint8_t *data = s->data;
    const size_t bytes = s->bytes;
    take_snapshot_off(c, cell, s);
    prefix_snapshot_cancel(c, data, bytes);
}

/* Frees the cell's own snapshot and its tails; returns how many there were. */
static int free_snapshots(struct prefix_cache *c, struct prefix_cell *cell)
{
    int n = cell->snapshot != NULL;
    free_snapshot(c, cell, cell->snapshot);
    for (; cell->tails; n++)
        free_snapshot(c, cell, cell->tails);
    return n;
}

/* Takes the page away; the cell stays as bare text. Only when no cell below has a page. */
static void strip_cell(struct prefix_cache *c, struct prefix_cell *cell)
{
    assert(cell->page >= 0 && cell->n_paged == 0);
    cell->had_snapshot |= cell->snapshot || cell->tails;
    c->snapshots_evicted += (uint64_t)free_snapshots(c, cell);
    pages_discard(c->o.pages, cell->page);
    cell->page = -1;
    cell->space->n_pages--;
    c->n_bare++;
    if (cell->parent)
        cell->parent->n_paged--;
}

/* Forgets a bare cell without children. */
static void remove_cell(struct prefix_cache *c, struct prefix_cell *cell)
{
    assert(cell->page < 0 && !cell->first);
    struct prefix_space *s = cell->space;
    if (cell->prev)
        cell->prev->next = cell->next;
    else
        *siblings_of(s, cell->parent) = cell->next;
    if (cell->next)
        cell->next->prev = cell->prev;
    struct prefix_cell **b = bucket_of(c, &cell->key);
    while (*b != cell)
        b = &(*b)->bucket;
    *b = cell->bucket;
    c->cells[cell->place] = c->cells[--c->n_cells];
    c->cells[cell->place]->place = cell->place;
    c->n_bare--;
    s->n_cells--;
    free(cell);
    release_space(c, s);
}

/* Forgets every cell of a space. Shared cells must be the last to go. */
static struct prefix_dropped drop_cells(struct prefix_cache *c, const struct prefix_space *s)
{
    struct prefix_dropped dropped = {0};
    for (size_t i = 0; i < c->n_cells;) {
        struct prefix_cell *cell = c->cells[i];
        if (cell->space != s) {
            i++;
            continue;
        }
        /* From the leaves up, so that no cell outlives the one above it; the removal moves another cell to place i, or ends the list. */
        while (cell && cell->space == s) {
            while (cell->first)
                cell = cell->first;
            struct prefix_cell *parent = cell->parent;
            if (cell->page >= 0) {
                const uint64_t before = c->bytes;
                dropped.pages++;
                dropped.snapshots += free_snapshots(c, cell);
                dropped.snapshot_bytes += before - c->bytes;
                strip_cell(c, cell);
            }
            remove_cell(c, cell);
            cell = parent;
        }
    }
    return dropped;
}

void prefix_close(struct prefix_cache *c)
{
    if (!c)
        return;
    while (c->spaces) {
        struct prefix_space *s = c->spaces;
        s->guests = 1; /* keeps it until here, whoever forgot to leave */
        drop_cells(c, s);
        prefix_leave(c, s);
    }
    drop_cells(c, &c->shared);
    free(c->spare);
    free(c->snapshots);
    free(c->cells);
    free(c->buckets);
    free(c);
}

/* ---- finding ---- */

static int common(const int32_t *a, const int32_t *b, int n)
{
    int i = 0;
    while (i < n && a[i] == b[i])
        i++;
    return i;
}

struct prefix_snapshot *prefix_tail(const struct prefix_cell *cell, const int32_t *ids, int n)
{
    struct prefix_snapshot *t = cell->tails;
    while (t && !(t->n == n && memcmp(t->ids, ids, (size_t)n * sizeof *ids) == 0))
        t = t->next;
    return t;
}

/* The longest tail of the cells from `known` up to the landing that the text goes on with. */
static struct prefix_snapshot *find_tail(struct prefix_cell *known, const struct prefix_cell *landing, const int32_t *ids, int n)
{
    struct prefix_snapshot *best = NULL;
    for (struct prefix_cell *cell = known; cell && !best; cell = cell == landing ? NULL : cell->parent) {
        const int left = n - 1 - cell->depth * GRID;
        for (struct prefix_snapshot *t = cell->tails; t; t = t->next)
            if (t->n <= left && (!best || t->n > best->n) && common(t->ids, ids + cell->depth * GRID, t->n) == t->n)
                best = t;
    }
    return best;
}

struct prefix_found prefix_find(const struct prefix_cache *c, const struct prefix_space *s, const int32_t *ids, int n, int n_shared)
{
    struct prefix_found f = {0};
    int depth = 0;
    const struct prefix_space *own = n_shared > 0 ? &c->shared : s;
    while (n - depth * GRID >= GRID) {
        const struct cache_key key = key_after(own, f.known, ids + depth * GRID);
        struct prefix_cell *cell = find_cell(c, own, f.known, ids + depth * GRID, &key);
        if (!cell)
            break;
        f.known = cell;
        depth++;
        if (prefix_can_land(c, cell) && depth * GRID < n)
            f.landing = cell;
        own = depth < n_shared ? &c->shared : s;
    }
    const int left = n - depth * GRID, most = left < GRID ? left : GRID;
    f.matched = depth * GRID;
    for (const struct prefix_cell *cell = f.known ? f.known->first : own->first; cell; cell = cell->next) {
        int same = cell->space == own ? common(cell->ids, ids + depth * GRID, most) : 0;
        if (depth * GRID + same > f.matched)
            f.matched = depth * GRID + same;
    }

    f.tail = find_tail(f.known, f.landing, ids, n);
    if (f.tail && prefix_tail_end(f.tail) > f.matched)
        f.matched = prefix_tail_end(f.tail);

    const int landed = f.tail ? f.tail->cell->depth : f.landing ? f.landing->depth : 0, wanted = (f.matched < n ? f.matched : n - 1) / GRID;
    if (wanted > landed) {
        f.loss = PREFIX_NO_STATE;
        for (const struct prefix_cell *cell = f.known; cell && cell->depth > landed; cell = cell->parent)
            if (cell->page < 0 || cell->had_snapshot)
                f.loss = PREFIX_EVICTED;
    } else if (!landed) {
        f.loss = s->n_cells || (n_shared > 0 && c->shared.n_cells) ? PREFIX_UNKNOWN : PREFIX_EMPTY;
    }
    return f;
}

void prefix_hit(struct prefix_cache *c, struct prefix_space *s, struct prefix_cell *landing, struct prefix_snapshot *snapshot)
{
    s->hits++;
    s->used = c->now;
    if (snapshot) {
        snapshot->hits++;
        snapshot->used = c->now;
    }
    for (struct prefix_cell *cell = landing; cell; cell = cell->parent) {
        cell->hits++;
        cell->used = c->now;
    }
}

/* ---- what a landing point is worth ---- */

static double weight(const struct prefix_cache *c, uint64_t hits, uint64_t used)
{
    double age = c->now > used ? (double)(c->now - used) * 1e-9 : 0;
    return (1 + (double)hits) * exp2(-age / PREFIX_HALF_LIFE_S);
}

/* Tokens that need not be computed because one can land here and not only at the next landing point above. */
static int tokens_saved(const struct prefix_cache *c, const struct prefix_cell *cell)
{
    const struct prefix_cell *above = cell->parent;
    while (above && !prefix_can_land(c, above))
        above = above->parent;
    return (cell->depth - (above ? above->depth : 0)) * GRID;
}

static double snapshot_score(const struct prefix_cache *c, const struct prefix_snapshot *s)
{
    const int saved = s->n == 0 ? tokens_saved(c, s->cell) : s->n + (prefix_can_land(c, s->cell) ? 0 : tokens_saved(c, s->cell));
    return saved / (double)s->bytes * weight(c, s->hits, s->used);
}

/* Of a cell with a page and none below: what goes with it is the stretch up to the next landing point. */
static double page_score(const struct prefix_cache *c, const struct prefix_cell *cell)
{
    const struct prefix_snapshot *s = cell->snapshot ? cell->snapshot : cell->tails;
    if (!prefix_can_land(c, cell) && !s)
        return 0;
    const int saved = tokens_saved(c, cell), pages = saved / GRID;
    const double bytes = pages * (double)c->o.page_bytes + (double)c->o.state_bytes;
    return saved / bytes * (s ? weight(c, s->hits, s->used) : weight(c, cell->hits, cell->used));
}

/* ---- keeping ---- */

struct prefix_cell *prefix_add(struct prefix_cache *c, struct prefix_space *s, struct prefix_cell *parent, const int32_t ids[GRID], int32_t page,
                               bool shared)
{
    assert(!parent || parent->page >= 0);
    struct prefix_space *own = shared ? &c->shared : s;
    const struct cache_key key = key_after(own, parent, ids);
    struct prefix_cell *cell = find_cell(c, own, parent, ids, &key);
    if (!cell && !(cell = new_cell(c, own, parent, ids, &key)))
        return NULL;
    if (cell->page < 0)
        give_page(c, cell, page);
    cell->used = s->used = c->now;
    return cell;
}

static void evict_snapshot(struct prefix_cache *c, struct prefix_snapshot *s)
{
    s->cell->had_snapshot = true;
    c->snapshots_evicted++;
    free_snapshot(c, s->cell, s);
}

/* Counts `bytes` more, when the budget has room for them or gets it. */
static bool make_room(struct prefix_cache *c, uint64_t maker, size_t bytes)
{
    if (bytes == 0 || bytes > c->o.budget)
        return false;
    while (c->bytes > c->o.budget - bytes) {
        struct prefix_snapshot *worst = NULL;
        double least = 0;
        for (size_t i = 0; i < c->n_snapshots; i++) {
            struct prefix_snapshot *s = c->snapshots[i];
            if (s->maker == maker)
                continue;
            double score = snapshot_score(c, s);
            if (!worst || score < least || (score == least && s->used < worst->used)) {
                worst = s;
                least = score;
            }
        }
        if (!worst)
            return false;
        evict_snapshot(c, worst);
    }
    c->bytes += bytes;
    return true;
}

/* The spare buffer is not counted, so it may not stand beside a full budget. */
static void trim_spare(struct prefix_cache *c)
{
    if (!c->spare || c->bytes <= c->o.budget - c->o.state_bytes)
        return;
    free(c->spare);
    c->spare = NULL;
}

bool prefix_snapshot_reserve(struct prefix_cache *c, uint64_t maker, size_t bytes)
{
    const bool room = make_room(c, maker, bytes);
    trim_spare(c);
    return room;
}

uint8_t *prefix_snapshot_room(struct prefix_cache *c, uint64_t maker, size_t bytes)
{
    uint8_t *data = NULL;
    if (!make_room(c, maker, bytes))
        return NULL;
    if (bytes == c->o.state_bytes && c->spare) {
        data = c->spare;
        c->spare = NULL;
    } else {
        trim_spare(c);
        data = malloc(bytes);
    }
    if (!data)
        c->bytes -= bytes;
    return data;
}

void prefix_snapshot_cancel(struct prefix_cache *c, uint8_t *data, size_t bytes)
{
    c->bytes -= bytes;
    /* One buffer is kept: what makes room for a snapshot becomes its memory, without a trip to the system and its fresh pages. */
    if (bytes != c->o.state_bytes || c->spare || c->bytes > c->o.budget - bytes)
        free(data);
    else
        c->spare = data;
}

/* A snapshot in the cache's list, on no cell yet. NULL when out of memory; data is then gone. */
static struct prefix_snapshot *new_snapshot(struct prefix_cache *c, struct prefix_cell *cell, uint8_t *data, size_t bytes, uint64_t maker)
{
    struct prefix_snapshot *s = NULL;
    if (alloc_grow(&c->snapshots, &c->cap_snapshots, c->n_snapshots + 1, sizeof(struct prefix_snapshot *)) || !(s = alloc_array(1, sizeof *s))) {
        prefix_snapshot_cancel(c, data, bytes);
        return NULL;
    }
    *s = (struct prefix_snapshot){.cell = cell, .place = c->n_snapshots, .data = data, .bytes = bytes, .maker = maker, .used = c->now};
    c->snapshots[c->n_snapshots++] = s;
    cell->space->n_snapshots++;
    cell->space->snapshot_bytes += bytes;
    return s;
}

int prefix_snapshot_put(struct prefix_cache *c, struct prefix_cell *cell, uint8_t *data, uint64_t maker)
{
    assert(cell->page >= 0 && !cell->snapshot);
    struct prefix_snapshot *s = new_snapshot(c, cell, data, c->o.state_bytes, maker);
    if (!s)
        return -1;
    cell->snapshot = s;
    cell->had_snapshot = false;
    return 0;
}

int prefix_tail_put(struct prefix_cache *c, struct prefix_cell *cell, const int32_t *ids, int n, uint8_t *data, size_t bytes, uint64_t maker)
{
    assert(cell->page >= 0 && n > 0 && n < GRID && !prefix_tail(cell, ids, n));
    struct prefix_snapshot *s = new_snapshot(c, cell, data, bytes, maker);
    if (!s)
        return -1;
    s->n = n;
    memcpy(s->ids, ids, (size_t)n * sizeof *ids);
    s->next = cell->tails;
    cell->tails = s;
    return 0;
}

uint8_t *prefix_snapshot_steal(struct prefix_cache *c, struct prefix_cell *cell)
{
    uint8_t *data = cell->snapshot->data;
    take_snapshot_off(c, cell, cell->snapshot);
    return data;
}

/* ---- giving up ---- */

/* Bare text is cheap, not free: the oldest goes when there is too much of it. */
static void prune_bare(struct prefix_cache *c)
{
    if (c->n_bare <= c->o.max_bare)
        return;
    const int enough = c->o.max_bare - c->o.max_bare / 8;
    while (c->n_bare > enough) {
        struct prefix_cell *oldest = NULL;
        for (size_t i = 0; i < c->n_cells; i++) {
            struct prefix_cell *cell = c->cells[i];
            if (cell->page < 0 && !cell->first && (!oldest || cell->used < oldest->used))
                oldest = cell;
        }
        if (!oldest)
            return;
        for (struct prefix_cell *cell = oldest, *parent; cell && cell->page < 0 && !cell->first && c->n_bare > enough; cell = parent) {
            parent = cell->parent;
            remove_cell(c, cell);
        }
    }
}

static bool may_go(const struct prefix_cache *c, const struct prefix_cell *cell)
{
    return cell->page >= 0 && cell->n_paged == 0 && pages_idle(c->o.pages, cell->page);
}

int prefix_reclaim(struct prefix_cache *c, int n)
{
    const int before = pages_ready(c->o.pages);
    while (pages_ready(c->o.pages) - before < n) {
        struct prefix_cell *worst = NULL;
        double least = 0;
        for (size_t i = 0; i < c->n_cells; i++) {
            struct prefix_cell *cell = c->cells[i];
            if (!may_go(c, cell))
                continue;
            double score = page_score(c, cell);
            if (!worst || score < least || (score == least && cell->used < worst->used)) {
                worst = cell;
                least = score;
            }
        }
        if (!worst)
            break;
        /* With it goes what it alone made worth keeping: the pages above, up to the next landing point or branch. */
        for (struct prefix_cell *cell = worst; cell && pages_ready(c->o.pages) - before < n; cell = cell->parent) {
            if (!may_go(c, cell) || (cell != worst && page_score(c, cell) > least))
                break;
            strip_cell(c, cell);
            c->pages_evicted++;
        }
    }
    prune_bare(c);
    return pages_ready(c->o.pages) - before;
}

struct prefix_dropped prefix_drop(struct prefix_cache *c, const char *name)
{
    struct prefix_space *s = find_space(c, name);
    if (!s)
        return (struct prefix_dropped){0};
    s->guests++;
    struct prefix_dropped dropped = drop_cells(c, s);
    prefix_leave(c, s);
    free(c->spare); /* it may hold what was just forgotten */
    c->spare = NULL;
    return dropped;
}
