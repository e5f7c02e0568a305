/* The engine's side of the prefix cache: where a sequence begins, and what it leaves behind. */
#include "engine/engine_impl.h"

#include <assert.h>
#include <limits.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "engine/cache_disk.h"
#include "engine/memory.h"
#include "engine/slot_layout.h"

enum {
    FEW_SNAPSHOTS = 4, /* a budget for fewer is kept for prompts: an answer leaves none behind */
    LEAST_BARE = 256,  /* cells of bare text that are remembered at least */
};

const char *cache_miss_name(enum cache_miss miss)
{
    static const char *const names[CACHE_MISSES] = {"none", "off", "short", "empty", "diverged", "no_state", "evicted", "failed"};
    return (unsigned)miss < CACHE_MISSES ? names[miss] : "unknown";
}

int engine_cache_open(struct engine *e, const struct engine_options *o, struct error *err)
{
    const struct backend_ops *ops = e->backend->ops;
    const size_t state_bytes = e->backend->shape.n_delta_layers ? ops->state_packed_bytes(e->backend, GRID) : 0;
    if (o->cache_memory == 0)
        return 0;
    if (state_bytes > o->cache_memory) {
        log_warn("no prefix cache: cache-memory is %s, and a single snapshot of this model's state takes %s", memory_text(o->cache_memory).text,
                 memory_text(state_bytes).text);
        return 0;
    }
    const int bare = e->info.pages_total / 4;
    struct prefix_options p = {
        .pages = &e->pages,
        .page_bytes = e->info.page_bytes,
        .state_bytes = state_bytes,
        .budget = o->cache_memory,
        .max_bare = bare > LEAST_BARE ? bare : LEAST_BARE,
    };
    memcpy(p.model_id, e->info.model_id, sizeof p.model_id);
    e->cache = prefix_open(&p);
    if (!e->cache)
        return error_set(err, "out of memory for the prefix cache");
    const uint64_t most = state_bytes ? o->cache_memory / state_bytes : INT_MAX;
    e->most_snapshots = most > INT_MAX ? INT_MAX : (int)most;
    e->marks = prefix_marks_of(e->tokenizer);
    e->share_system = o->share_system;
    e->disk = o->disk;
    if (e->disk) {
        struct cache_model m = {.page_bytes = e->info.page_bytes, .state_bytes = state_bytes};
        memcpy(m.id, e->info.model_id, sizeof m.id);
        cache_disk_bind(e->disk, &m);
    }
    return 0;
}

void engine_cache_close(struct engine *e)
{
    prefix_close(e->cache);
    e->cache = NULL;
}

int engine_pages(struct engine *e, int n, struct error *err)
{
    if (pages_prepare(&e->pages, n, err) == 0)
        return 0;
    if (e->cache) {
        e->cache->now = clock_ns();
        prefix_reclaim(e->cache, n - pages_ready(&e->pages));
        if (pages_prepare(&e->pages, n, err) == 0)
            return 0;
    }
    if (pages_settle(&e->pages, n))
        log_warn("the machine has no memory for more than %d KV pages: from now on the server does with those", e->pages.slots.total);
    return -1;
}

/* ---- beginning ---- */

/* From here on the sequence neither uses nor feeds the cache. */
static void leave_cache(struct engine *e, struct sequence *s)
{
    prefix_leave(e->cache, s->space);
    s->space = NULL;
    s->cell = s->decoded = NULL;
    s->n_cells = s->n_plan = 0;
}

int engine_cache_tail_load(struct engine *e, struct sequence *s, int position, const uint8_t *data)
{
    const struct backend_ops *ops = e->backend->ops;
    if (engine_pages(e, 1, NULL))
        return -1;
    s->pages[s->n_pages] = pages_take(&e->pages);
    if (ops->page_load(e->backend, s->pages[s->n_pages++], data, NULL))
        return -1;
    return ops->state_load(e->backend, s->state, position, data + e->info.page_bytes, NULL);
}

void engine_cache_unbegin(struct engine *e, struct sequence *s)
{
    for (int i = 0; i < s->n_pages; i++)
        if (s->pages[i] >= 0)
            pages_leave(&e->pages, s->pages[i]);
    s->n_pages = s->n_cells = 0;
    s->cell = NULL;
    s->length = s->high = s->held_from = 0;
    e->backend->ops->sync(e->backend, NULL);
    if (s->state < 0)
        return;
    e->backend->ops->state_reset(e->backend, s->state);
    s->lost = e->backend->ops->sync(e->backend, NULL) != 0;
}

/* Begins the (empty) sequence behind a cell, or behind its tail: its pages are shared, its state (and a tail's page) is copied. -1 and unchanged when memory or
 * the device fails. */
static int land(struct engine *e, struct sequence *s, const int32_t *prompt, struct prefix_cell *cell, struct prefix_snapshot *tail)
{
    const struct backend_ops *ops = e->backend->ops;
    const int length = tail ? prefix_tail_end(tail) : cell->depth * GRID;
    if (sequence_room(s, length))
        return -1;
    for (struct prefix_cell *c = cell; c; c = c->parent) {
        s->pages[c->depth - 1] = c->page;
        pages_use(&e->pages, c->page);
    }
    s->n_pages = s->n_cells = cell->depth;
    s->cell = cell;
    if (tail ? engine_cache_tail_load(e, s, length, tail->data)
             : cell->snapshot && ops->state_load(e->backend, s->state, length, cell->snapshot->data, NULL)) {
        engine_cache_unbegin(e, s);
        return -1;
    }
    s->length = s->high = s->held_from = length;
    memcpy(s->ids, prompt, (size_t)length * sizeof *s->ids);
    prefix_hit(e->cache, s->space, cell, tail ? tail : cell->snapshot);
    return 0;
}

static enum cache_miss miss_of(enum prefix_loss loss)
{
    switch (loss) {
    case PREFIX_COMPLETE:
        return CACHE_MISS_NONE;
    case PREFIX_UNKNOWN:
        return CACHE_MISS_DIVERGED;
    case PREFIX_EMPTY:
        return CACHE_MISS_EMPTY;
    case PREFIX_NO_STATE:
        return CACHE_MISS_NO_STATE;
    case PREFIX_EVICTED:
        return CACHE_MISS_EVICTED;
    }
    return CACHE_MISS_FAILED;
}

/* Tokens that memory lets a text begin behind. */
static int found_end(const struct prefix_found *f)
{
    return f->tail ? prefix_tail_end(f->tail) : f->landing ? f->landing->depth * GRID : 0;
}

/* Sets where snapshots are to be taken: as many as the budget holds beside one for the answer. They are taken in order, so more of them would leave no
 * room for the last ones, which are worth most. */
static void plan(struct engine *e, struct sequence *s, const struct sequence_options *o, int from, int branch)
{
    const size_t state_bytes = e->cache->o.state_bytes, largest = engine_cache_tail_bytes(e, 2 * GRID - 1);
    uint64_t budget = e->cache->o.budget;
    const bool exact = state_bytes && largest <= budget;
    int most = state_bytes ? e->most_snapshots : e->disk ? PLAN_MOST : 0;
    if (state_bytes && most >= FEW_SNAPSHOTS) {
        most--;
        budget -= !exact || budget - state_bytes >= largest ? state_bytes : 0;
    }
    for (uint64_t bytes = UINT64_MAX; bytes > budget; most = s->n_plan - 1) {
        s->n_plan = prefix_plan(&e->marks, o->prompt, o->n_prompt, from, branch, exact, most, s->plan);
        bytes = 0;
        for (int i = 0; i < s->n_plan; i++)
            bytes += s->plan[i] % GRID ? engine_cache_tail_bytes(e, s->plan[i]) : state_bytes;
    }
}

/* Finds where the sequence can begin, and begins it there. */
static void begin(struct engine *e, struct sequence *s, const struct sequence_options *o, struct cache_result *r)
{
    struct prefix_found f = prefix_find(e->cache, s->space, o->prompt, o->n_prompt, s->n_shared);
    const int known = f.known ? f.known->depth * GRID : 0;
    r->matched = f.matched;
    r->miss = miss_of(f.loss);
    bool failed = false;
    if (o->image && cache_image_end(o->image) > found_end(&f)) {
        r->cached = engine_disk_import(e, s, o->prompt, o->n_prompt, o->image);
        failed = !r->cached;
        if (r->cached)
            r->source = CACHE_FROM_DISK;
        else /* making room for it may have cost what was found */
            f = prefix_find(e->cache, s->space, o->prompt, o->n_prompt, s->n_shared);
    }
    if (!r->cached && found_end(&f)) {
        failed = land(e, s, o->prompt, f.tail ? f.tail->cell : f.landing, f.tail) != 0;
        r->cached = s->length;
        r->source = failed ? CACHE_FROM_NONE : CACHE_FROM_MEMORY;
    }
    if (r->cached > r->matched)
        r->matched = r->cached;
    if (r->cached && r->cached + GRID > (r->matched < o->n_prompt ? r->matched : o->n_prompt - 1))
        r->miss = CACHE_MISS_NONE;
    else if (failed && !r->cached)
        r->miss = CACHE_MISS_FAILED;
    r->miss_at = r->miss == CACHE_MISS_EMPTY ? -1 : r->matched;
    if (o->n_prompt <= GRID) {
        r->miss = CACHE_MISS_SHORT;
        r->miss_at = -1;
    }

    plan(e, s, o, r->cached, known);
}

static void count_start(struct engine *e, const struct sequence_options *o, const struct cache_result *r)
{
    struct engine_cache_stats *c = &e->counts;
    c->lookups++;
    c->prompt_tokens += (uint64_t)o->n_prompt;
    c->cached_tokens += (uint64_t)r->cached;
    c->hits += r->cached > 0;
    c->hits_disk += r->source == CACHE_FROM_DISK;
    if (!r->cached)
        c->misses[r->miss]++;
}

struct sequence *sequence_start(struct engine *e, const struct sequence_options *o, struct cache_result *r, struct error *err)
{
    engine_settle(e);
    *r = (struct cache_result){.miss = CACHE_MISS_OFF, .miss_at = -1};
    const char *ns = o->ns ? o->ns : "";
    const size_t ns_len = strlen(ns);
    if (o->n_prompt < 1) {
        error_set(err, "a prompt needs at least one token");
        return NULL;
    }
    for (int i = 0; i < o->n_prompt; i++)
        if (o->prompt[i] < 0 || o->prompt[i] >= e->model->shape.n_vocab) {
            error_set(err, "token %d of the prompt is %d: expected 0 to %d", i, o->prompt[i], e->model->shape.n_vocab - 1);
            return NULL;
        }
    if (ns_len && !cache_namespace_valid(ns, ns_len)) {
        error_set(err, "the cache namespace is not valid: expected 1 to %d of A-Z a-z 0-9 . _ -", CACHE_NAMESPACE_MAX);
        return NULL;
    }
    struct sequence *s = sequence_new(e, err);
    if (!s)
        return NULL;
    if (e->cache && !o->no_cache) {
        e->cache->now = clock_ns();
        s->space = prefix_enter(e->cache, ns);
        if (s->space) {
            s->serial = ++e->next_serial;
            s->n_prompt = o->n_prompt;
            s->shared_end = e->share_system ? prefix_system_end(&e->marks, o->prompt, o->n_prompt) : 0;
            s->n_shared = s->shared_end / GRID;
            begin(e, s, o, r);
        } else {
            r->miss = CACHE_MISS_FAILED;
        }
    }
    count_start(e, o, r);
    return s;
}

/* ---- growing ---- */

/* Whether grid lines of an answer get a snapshot. */
static bool keeps_answers(const struct engine *e)
{
    return e->cache->o.state_bytes && e->most_snapshots >= FEW_SNAPSHOTS;
}

static bool at_grid_line(const struct sequence *s)
{
    return s->cell && s->n_cells * GRID == s->length;
}

int engine_cache_extend(struct engine *e, struct sequence *s)
{
    while (s->n_cells < s->length / GRID) {
        const int i = s->n_cells;
        struct prefix_cell *cell = prefix_add(e->cache, s->space, s->cell, s->ids + (size_t)i * GRID, s->pages[i], i < s->n_shared);
        if (!cell) {
            leave_cache(e, s);
            return -1;
        }
        if (cell->page != s->pages[i]) { /* somebody else has computed the same: one copy is enough */
            pages_use(&e->pages, cell->page);
            pages_leave(&e->pages, s->pages[i]);
            s->pages[i] = cell->page;
        }
        s->cell = cell;
        s->n_cells++;
    }
    return 0;
}

static void count_snapshot(struct engine *e, bool taken)
{
    *(taken ? &e->counts.snapshots_taken : &e->counts.snapshots_failed) += 1;
    if (taken)
        return;
    if (!e->snapshot_failed)
        log_warn("a snapshot for the prefix cache could not be taken (no memory, or the device failed): that text will be read again; said once");
    e->snapshot_failed = true;
}

/* Fills the buffer with the sequence's state at the end of its last cell and gives it to that. */
static void fill_snapshot(struct engine *e, struct sequence *s, uint8_t *data)
{
    const struct backend_ops *ops = e->backend->ops;
    if (data && ops->state_save(e->backend, s->state, s->n_cells * GRID, data, NULL)) {
        ops->sync(e->backend, NULL);
        prefix_snapshot_cancel(e->cache, data, e->cache->o.state_bytes);
        data = NULL;
    }
    count_snapshot(e, data && prefix_snapshot_put(e->cache, s->cell, data, s->serial) == 0);
}

size_t engine_cache_tail_bytes(const struct engine *e, int position)
{
    return e->info.page_bytes + e->backend->ops->state_packed_bytes(e->backend, position);
}

bool engine_cache_may_hang(const struct sequence *s, int position)
{
    return s->cell->space == s->space || position <= s->shared_end;
}

/* Later sequences may begin at this position, which lies in the cell that the sequence is in. Returns the tail, or NULL. */
static const struct prefix_snapshot *take_tail(struct engine *e, struct sequence *s, int position)
{
    const struct backend_ops *ops = e->backend->ops;
    const int n = position % GRID;
    const int32_t *ids = s->ids + (size_t)s->n_cells * GRID;
    if (!engine_cache_may_hang(s, position))
        return NULL;
    struct prefix_snapshot *known = prefix_tail(s->cell, ids, n);
    if (known) {
        known->used = e->cache->now;
        return known;
    }
    const size_t bytes = engine_cache_tail_bytes(e, position);
    uint8_t *data = prefix_snapshot_room(e->cache, s->serial, bytes);
    if (!data)
        return NULL; /* the budget is full of what is worth more, or of this sequence's own */
    if (ops->page_save(e->backend, s->pages[s->n_cells], data, NULL) ||
        ops->state_save(e->backend, s->state, position, data + e->info.page_bytes, NULL)) {
        ops->sync(e->backend, NULL);
        prefix_snapshot_cancel(e->cache, data, bytes);
        data = NULL;
    }
    if (data) /* of what went on, and of whoever had the page before, nothing is kept: it may be a text that is to be forgotten */
        slot_page_clear(&e->backend->shape, data, n);
    count_snapshot(e, data && prefix_tail_put(e->cache, s->cell, ids, n, data, bytes, s->serial) == 0);
    return prefix_tail(s->cell, ids, n);
}

/* The sequence has come to a grid line: later ones may begin there. */
static void take_snapshot(struct engine *e, struct sequence *s)
{
    if (e->cache->o.state_bytes == 0)
        return;
    if (s->cell->snapshot) {
        s->cell->snapshot->used = e->cache->now;
        return;
    }
    uint8_t *data = prefix_snapshot_room(e->cache, s->serial, e->cache->o.state_bytes);
    if (data || e->cache->bytes <= e->cache->o.budget - e->cache->o.state_bytes) /* a budget full of this sequence's own is no failure */
        fill_snapshot(e, s, data);
}

/* The same in an answer, where each grid line replaces the one before, unless somebody has landed there. */
static void take_decode_snapshot(struct engine *e, struct sequence *s)
{
    const struct prefix_snapshot *last = s->decoded ? s->decoded->snapshot : NULL;
    if (!s->cell->snapshot) {
        if (last && last->maker == s->serial && last->hits == 0)
            fill_snapshot(e, s, prefix_snapshot_steal(e->cache, s->decoded));
        else
            take_snapshot(e, s);
    }
    s->decoded = s->cell->snapshot ? s->cell : NULL;
}

static void queue(struct engine *e, struct sequence *s, const struct prefix_cell *cell)
{
    if (e->disk && cell && prefix_can_land(e->cache, cell))
        engine_disk_queue(e, s, cell->depth, cell->snapshot ? cell->snapshot->data : NULL);
}

/* Whether a sequence that has `high` tokens, or had before some were taken back, still has the state of an earlier position: as long as its rows lie in one
 * cell with those behind it, and the convolution's history reaches back (ROLLBACK, engine/backend.h). */
static bool reaches_back(int high, int position)
{
    return high - position <= ROLLBACK && high / GRID == position / GRID;
}

/* A planned position has been passed, or is where the sequence stands. */
static void keep_position(struct engine *e, struct sequence *s, int position)
{
    if (!s->cell || position / GRID != s->n_cells || (position != s->length && !reaches_back(s->high, position)))
        return;
    if (position % GRID == 0) {
        take_snapshot(e, s);
        queue(e, s, s->cell);
    } else if (e->cache->o.state_bytes) {
        const struct prefix_snapshot *tail = take_tail(e, s, position);
        if (e->disk && tail)
            engine_disk_queue_tail(e, s, tail);
    }
}

void engine_cache_grown(struct engine *e, struct sequence *s)
{
    if (!s->space)
        return;
    e->cache->now = clock_ns();
    if (engine_cache_extend(e, s))
        return;
    bool planned = false;
    for (; s->space && s->next_plan < s->n_plan && s->plan[s->next_plan] <= s->length; s->next_plan++) {
        planned = s->plan[s->next_plan] == s->length;
        keep_position(e, s, s->plan[s->next_plan]);
    }
    if (!planned && at_grid_line(s) && s->length >= s->n_prompt && keeps_answers(e))
        take_decode_snapshot(e, s);
}

int sequence_stop(const struct sequence *s)
{
    int next = s->next_plan;
    while (next < s->n_plan && s->plan[next] <= s->length) /* not yet settled */
        next++;
    /* A position that the prompt's end still reaches back to needs no stop: a step for a few rows reads nearly as many weights as one for many. */
    if (s->space && next < s->n_plan && !reaches_back(s->n_prompt, s->plan[next]))
        return s->plan[next];
    if (s->space && s->state >= 0 && s->length >= s->n_prompt)
        return (s->length / GRID + 1) * GRID;
    return INT_MAX;
}

void engine_cache_part(struct engine *e, struct sequence *s)
{
    if (!s->space)
        return;
    e->cache->now = clock_ns();
    /* A prompt that was given up on a grid line: what was computed stays. */
    if (!s->lost && at_grid_line(s))
        take_snapshot(e, s);
    if (s->cell)
        queue(e, s, prefix_can_land(e->cache, s->cell) ? s->cell : s->decoded);
    leave_cache(e, s);
}

/* ---- what the server asks ---- */

void engine_cache_stats(const struct engine *e, struct engine_cache_stats *out)
{
    const struct prefix_cache *c = e->cache;
    *out = e->counts;
    out->pages_total = e->pages.slots.total;
    out->pages_running = e->pages.n_running;
    out->pages_idle = e->pages.n_idle;
    out->states_running = e->states.total - slots_available(&e->states);
    out->on = c != NULL;
    if (!c)
        return;
    out->budget = c->o.budget;
    out->bytes = c->bytes;
    out->nodes = (int)c->n_cells;
    out->snapshots = (int)c->n_snapshots;
    out->snapshots_evicted = c->snapshots_evicted;
    out->pages_evicted = c->pages_evicted;
}

static uint64_t bytes_of(const struct engine *e, int pages, uint64_t snapshot_bytes)
{
    return (uint64_t)pages * e->cache->o.page_bytes + snapshot_bytes;
}

void engine_cache_drop(struct engine *e, const char *ns, struct engine_cache_removed *out)
{
    engine_settle(e);
    *out = (struct engine_cache_removed){0};
    if (!e->cache)
        return;
    for (int i = 0; i < e->info.max_sequences; i++) {
        struct sequence *s = e->alive[i];
        if (s && s->space && strcmp(s->space->name, ns) == 0)
            leave_cache(e, s);
    }
    struct prefix_dropped d = prefix_drop(e->cache, ns);
    *out = (struct engine_cache_removed){.pages = d.pages, .snapshots = d.snapshots, .bytes = bytes_of(e, d.pages, d.snapshot_bytes)};
}

size_t engine_cache_list(const struct engine *e, struct engine_cache_entry *out, size_t max)
{
    size_t n = 0;
    const uint64_t now = clock_ns();
    for (const struct prefix_space *s = e->cache ? e->cache->spaces : NULL; s; s = s->next, n++) {
        const double idle = now > s->used ? (double)(now - s->used) * 1e-9 : 0;
        size_t at = n < max ? n : max;
        while (at > 0 && out[at - 1].idle_seconds > idle)
            at--;
        if (at == max)
            continue;
        const size_t moved = (n < max ? n : max - 1) - at;
        memmove(out + at + 1, out + at, moved * sizeof *out);
        out[at] = (struct engine_cache_entry){
            .pages = s->n_pages,
            .snapshots = s->n_snapshots,
            .bytes = bytes_of(e, s->n_pages, s->snapshot_bytes),
            .hits = s->hits,
            .idle_seconds = idle,
        };
        memcpy(out[at].ns, s->name, sizeof out[at].ns);
    }
    return n;
}

int engine_cache_depth(const struct engine *e, const char *ns, const int32_t *prompt, int n_prompt)
{
    if (!e->cache)
        return 0;
    const struct prefix_space none = {0}, *space = e->cache->spaces;
    while (space && strcmp(space->name, ns) != 0)
        space = space->next;
    if (!space)
        space = &none; /* the shared cells are there for a new namespace too */
    const int n_shared = e->share_system ? prefix_system_end(&e->marks, prompt, n_prompt) / GRID : 0;
    const struct prefix_found f = prefix_find(e->cache, space, prompt, n_prompt, n_shared);
    return found_end(&f);
}

int engine_cache_tails(const struct engine *e, const int32_t *prompt, int n_prompt, struct cache_tail out[CACHE_TAILS_MAX])
{
    if (!e->cache || !e->cache->o.state_bytes)
        return 0;
    int ends[CACHE_TAILS_MAX], n = 0;
    const int n_ends = prefix_ends(&e->marks, prompt, n_prompt, CACHE_TAILS_MAX, ends);
    for (int i = 0; i < n_ends; i++)
        if (ends[i] > GRID && ends[i] % GRID)
            out[n++] = (struct cache_tail){.position = ends[i], .bytes = engine_cache_tail_bytes(e, ends[i])};
    return n;
}
