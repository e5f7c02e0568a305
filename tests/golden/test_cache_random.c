/* A few hundred random requests, steps, rollbacks, ends, deletions and evictions over a cache that is far too small, against an engine that never
 * caches: every row of logits that is looked at has the same bits, every page and state is accounted for after every operation, and in the end nothing is
 * left in use. */
#include "tests/golden/cache_util.h"

#include "engine/engine_impl.h"
#include "engine/slot_layout.h"

enum { OPERATIONS = 600, MOST_LIVE = 4, PAGES = 14, MOST_TEXT = 480, FAMILIES = 3 };

struct subject {
    const char *path;
    enum kv_type kv;
    int snapshots; /* the cache's budget */
    bool disk, share_system;
    uint32_t seed;
};

struct live {
    struct sequence *s; /* NULL: the place is free */
    int32_t text[MOST_TEXT];
    int n_prompt, fed;
};

struct world {
    struct engine *e, *cold;
    struct cache_disk *disk;
    size_t v;
    uint64_t random;
    struct live live[MOST_LIVE];
    int32_t system[200]; /* a system message, for the texts that begin with one */
    int n_system;
    int32_t turn[16]; /* what stands between two messages */
    int n_turn;
    int starts, hits, hits_disk, hits_tail, hits_tail_disk, checked, refused, rolled_back, dropped;
    float *row, *cold_row;
};

static const char *const names[] = {"", "anna", "bert"};

static int below(struct world *w, int n)
{
    w->random = w->random * 6364136223846793005u + 1442695040888963407u;
    return (int)((w->random >> 33) % (uint64_t)n);
}

/* ---- accounts ---- */

/* Behind its own tokens a tail's page holds nothing of what went on, or of whoever had the page before. */
static void check_tail(const struct world *w, const struct prefix_snapshot *t)
{
    const struct backend_shape *sh = &w->e->backend->shape;
    const size_t row = slot_kv_row_bytes(sh);
    assert_int_equal(t->bytes, engine_cache_tail_bytes(w->e, prefix_tail_end(t)));
    assert_true(t->cell->page >= 0);
    if (t->cell->space == &w->e->cache->shared)
        assert_in_range(prefix_tail_end(t), 1, w->n_system);
    for (int layer = 0; layer < sh->n_kv_layers; layer++)
        for (int part = 0; part < 2 * sh->n_kv_heads; part++) {
            const uint8_t *rows = t->data + slot_page_offset(sh, layer, part % 2, part / 2);
            for (size_t k = (size_t)t->n * row; k < GRID * row; k++)
                assert_int_equal(rows[k], 0);
        }
}

static void check_accounts(const struct world *w)
{
    const struct engine *e = w->e;
    const struct page_pool *p = &e->pages;
    struct page_counts counts[PAGES] = {{0}};
    int running = 0, idle = 0, unused = 0, states = 0, guests = 0, expected_guests = 0;
    for (int i = 0; i < e->info.max_sequences; i++) {
        const struct sequence *s = e->alive[i];
        if (!s)
            continue;
        states += s->state >= 0;
        assert_in_range(s->n_pages, pages_for(s->length), pages_for(s->length) + 1); /* a rollback leaves the last one for the next step */
        for (int k = 0; k < s->n_pages; k++)
            counts[s->pages[k]].users++;
        if (!s->space)
            continue;
        guests++;
        assert_int_equal(s->n_cells, s->length / GRID);
        assert_int_equal(s->cell ? s->cell->depth : 0, s->n_cells);
        for (const struct prefix_cell *c = s->cell; c; c = c->parent) {
            assert_int_equal(c->page, s->pages[c->depth - 1]);
            assert_memory_equal(c->ids, s->ids + (c->depth - 1) * GRID, sizeof c->ids);
        }
    }
    for (size_t i = 0; i < e->cache->n_cells; i++)
        if (e->cache->cells[i]->page >= 0)
            counts[e->cache->cells[i]->page].keepers++;
    for (int i = 0; i < p->slots.reserved; i++) {
        assert_int_equal(counts[i].users, p->counts[i].users);
        assert_int_equal(counts[i].keepers, p->counts[i].keepers);
        running += counts[i].users > 0;
        idle += counts[i].users == 0 && counts[i].keepers > 0;
        unused += counts[i].users == 0 && counts[i].keepers == 0;
    }
    assert_int_equal(running, p->n_running);
    assert_int_equal(idle, p->n_idle);
    assert_int_equal(unused, p->slots.n_free);
    for (int i = 0; i < p->slots.n_free; i++)
        assert_true(counts[p->slots.free_list[i]].users == 0 && counts[p->slots.free_list[i]].keepers == 0);
    for (const struct prefix_space *s = e->cache->spaces; s; s = s->next)
        expected_guests += s->guests;
    assert_int_equal(guests, expected_guests);
    struct engine_cache_stats stats;
    engine_cache_stats(e, &stats);
    assert_int_equal(stats.states_running, states);
    assert_true(stats.bytes <= stats.budget);
    uint64_t bytes = 0;
    for (size_t i = 0; i < e->cache->n_snapshots; i++) {
        bytes += e->cache->snapshots[i]->bytes;
        if (e->cache->snapshots[i]->n)
            check_tail(w, e->cache->snapshots[i]);
    }
    assert_int_equal(stats.bytes, bytes);
}

/* ---- operations ---- */

/* One of few texts, which branch off one another, so that many requests have something in common. */
static void make_text(struct world *w, struct live *l)
{
    static const int branches[] = {40, 64, 130, 200};
    const int family = below(w, FAMILIES), variant = below(w, 2), branch = branches[below(w, 4)];
    for (int i = 0; i < MOST_TEXT; i++) {
        const uint32_t which = (uint32_t)(i < branch ? family : 10 + family * 4 + variant);
        l->text[i] = (int32_t)((which * 7919u + (uint32_t)i * 104729u + (which * (uint32_t)i) % 613u) % 1000u);
    }
    /* Messages of all lengths, some of a few tokens; the prompt may end behind the line that opens one. */
    int opened = 0, wanted = 90 + 70 * below(w, 3);
    for (int i = 20 + 3 * family; i + w->n_turn <= MOST_TEXT;) {
        memcpy(l->text + i, w->turn, (size_t)w->n_turn * sizeof *l->text);
        i += w->n_turn;
        if (!opened && i >= wanted)
            opened = i;
        i += 3 + (i * (i < branch ? 7 + family : 11 + variant)) % 50;
    }
    if (family == 0) /* one of them begins with a system message */
        memcpy(l->text, w->system, (size_t)w->n_system * sizeof *l->text);
    l->n_prompt = below(w, 3) ? opened + 4 * below(w, 2) : below(w, 2) ? 100 + 64 * below(w, 4) : 1 + below(w, 330);
    l->fed = 0;
}

static void compare_row(struct world *w, const struct live *l)
{
    struct sequence *s = golden_sequence(w->cold);
    golden_feed(w->cold, s, l->text, l->fed - 1, 512, NULL, NULL);
    golden_feed(w->cold, s, l->text + l->fed - 1, 1, 1, w->cold_row, NULL);
    sequence_free(w->cold, s);
    if (memcmp(w->row, w->cold_row, w->v * sizeof(float)) != 0)
        fail_msg("after %d checks: the logits of token %d (prompt of %d) differ from the cold engine's", w->checked, l->fed - 1, l->n_prompt);
    w->checked++;
}

static void start(struct world *w)
{
    struct live *l = w->live;
    while (l < w->live + MOST_LIVE && l->s)
        l++;
    if (l == w->live + MOST_LIVE)
        return;
    make_text(w, l);
    struct sequence_options o = {.ns = names[below(w, 2) * below(w, 3)], .prompt = l->text, .n_prompt = l->n_prompt, .no_cache = below(w, 10) == 0};
    struct cache_image image = {0};
    if (w->disk && below(w, 3) == 0) {
        cache_disk_flush(w->disk);
        const struct server server = {w->disk, w->e};
        if (read_image(&server, o.ns, o.prompt, o.n_prompt, &image))
            o.image = &image;
    }
    struct cache_result r;
    l->s = run_start(w->e, &o, &r);
    l->fed = r.cached;
    w->starts++;
    w->hits += r.cached > 0;
    w->hits_disk += r.source == CACHE_FROM_DISK;
    w->hits_tail += r.cached % GRID != 0;
    w->hits_tail_disk += r.cached % GRID && r.source == CACHE_FROM_DISK;
    cache_image_free(&image);
}

static void end(struct world *w, struct live *l)
{
    sequence_free(w->e, l->s);
    l->s = NULL;
}

/* Some tokens for one or more sequences. With what they have, and what they ask for, within the budget, it must succeed. */
static void step(struct world *w)
{
    struct step_item items[MOST_LIVE];
    struct live *who[MOST_LIVE];
    int n = 0, pages = 0, rows = 0;
    for (int i = 0; i < MOST_LIVE; i++) {
        struct live *l = &w->live[i];
        if (!l->s)
            continue;
        const int left = (l->fed < l->n_prompt ? l->n_prompt : MOST_TEXT) - l->fed, most = l->fed < l->n_prompt ? 200 : 8;
        int share = left && below(w, 3) ? 1 + below(w, left < most ? left : most) : 0;
        if (share && below(w, 2) && share > sequence_stop(l->s) - l->fed)
            share = sequence_stop(l->s) - l->fed; /* as a scheduler would; otherwise a snapshot is missed */
        if (rows + share > 512)
            share = 0;
        rows += share;
        pages += pages_for(l->fed + share);
        if (share) {
            who[n] = l;
            items[n++] = (struct step_item){.seq = l->s, .tokens = l->text + l->fed, .n_tokens = share};
        }
    }
    if (!n)
        return;
    const int watched = items[0].n_tokens == 1 ? 0 : -1;
    if (watched == 0)
        items[0].logits = w->row;
    struct error err = {""};
    if (engine_step(w->e, items, n, &err)) {
        if (pages <= PAGES)
            fail_msg("%d of %d pages are needed, and the step failed: %s", pages, PAGES, err.text);
        w->refused++;
        check_accounts(w);
        end(w, who[n - 1]); /* what a scheduler would pause */
        return;
    }
    for (int i = 0; i < n; i++)
        who[i]->fed += items[i].n_tokens;
    check_accounts(w);
    if (watched == 0)
        compare_row(w, who[0]);
}

static void look(struct world *w)
{
    struct live *l = &w->live[below(w, MOST_LIVE)];
    if (!l->s || l->fed == MOST_TEXT)
        return;
    struct step_item it = {.seq = l->s, .tokens = l->text + l->fed, .n_tokens = 1, .logits = w->row};
    struct error err;
    if (engine_step(w->e, &it, 1, &err))
        return; /* the budget; see step */
    l->fed++;
    check_accounts(w);
    compare_row(w, l);
}

static void roll_back(struct world *w)
{
    struct live *l = &w->live[below(w, MOST_LIVE)];
    if (!l->s)
        return;
    const int n = below(w, ROLLBACK + 1);
    if (sequence_rollback(l->s, n) == 0) {
        l->fed -= n;
        w->rolled_back += n > 0;
    }
}

static void drop(struct world *w)
{
    struct engine_cache_removed removed;
    engine_cache_drop(w->e, names[below(w, 3)], &removed);
    w->dropped += removed.pages;
}

static void operate(struct world *w)
{
    const int what = below(w, 100);
    if (what < 25) {
        start(w);
    } else if (what < 62) {
        step(w);
    } else if (what < 77) {
        look(w);
    } else if (what < 81) {
        roll_back(w);
    } else if (what < 97) {
        struct live *l = &w->live[below(w, MOST_LIVE)];
        if (l->s)
            end(w, l);
    } else if (what < 98) {
        drop(w);
    } else {
        prefix_reclaim(w->e->cache, 1 + below(w, 6));
    }
}

static void random_work_keeps_every_bit_and_every_account(void **state)
{
    const struct subject *m = *state;
    struct world w = {.random = m->seed};
    struct engine_options o = golden_options(m->path, false);
    o.kv_type = m->kv;
    o.context = MOST_TEXT;
    o.max_sequences = MOST_LIVE;
    w.cold = golden_engine_with(&o);
    const struct engine_info *info = engine_info(w.cold);
    o.kv_budget = PAGES * info->page_bytes + MOST_LIVE * info->state_bytes;
    o.cache_memory = 1000 + (uint64_t)m->snapshots * w.cold->backend->ops->state_packed_bytes(w.cold->backend, GRID);
    o.share_system = m->share_system;
    const struct folder folder = new_folder();
    struct error err;
    if (m->disk) {
        struct cache_disk_options d = {.dir = folder.path, /* room for some conversations, not all */
                                       .budget = 100 * info->page_bytes + 20 * info->state_bytes};
        assert_int_equal(cache_disk_open(&w.disk, &d, &err), 0);
        o.disk = w.disk;
    }
    w.e = golden_engine_with(&o);
    assert_int_equal(engine_info(w.e)->pages_total, PAGES);
    w.v = (size_t)tokenizer_vocab_size(engine_tokenizer(w.e));
    w.row = golden_rows(w.e, 1);
    w.cold_row = golden_rows(w.e, 1);
    static const char system[] =
        "<|im_start|>system\nAnswer from the record. Answer from the record. Answer from the record. Answer from the record. "
        "Answer from the record. Answer from the record. Answer from the record.<|im_end|>\n";
    struct token_list ids = {0};
    const struct text_range all = {0, sizeof system - 1};
    assert_int_equal(tokenizer_encode(engine_tokenizer(w.e), system, sizeof system - 1, &all, 1, 0, &ids, NULL), 0);
    assert_in_range(ids.len, GRID, 200);
    w.n_system = (int)ids.len;
    memcpy(w.system, ids.ids, ids.len * sizeof *ids.ids);
    static const char turn[] = "<|im_end|>\n<|im_start|>assistant\n";
    const struct text_range turns = {0, sizeof turn - 1};
    ids.len = 0;
    assert_int_equal(tokenizer_encode(engine_tokenizer(w.e), turn, sizeof turn - 1, &turns, 1, 0, &ids, NULL), 0);
    assert_in_range(ids.len, 5, 16);
    w.n_turn = (int)ids.len;
    memcpy(w.turn, ids.ids, ids.len * sizeof *ids.ids);
    token_list_free(&ids);

    for (int i = 0; i < OPERATIONS; i++) {
        operate(&w);
        check_accounts(&w);
    }
    print_message("# %d starts, %d hits (%d from disk; %d between grid lines, %d of them from disk), %d rows compared\n", w.starts, w.hits,
                  w.hits_disk, w.hits_tail, w.hits_tail_disk, w.checked);
    print_message("# %d steps refused, %d rollbacks, %d pages dropped, %llu evicted, %llu snapshots\n", w.refused, w.rolled_back, w.dropped,
                  (unsigned long long)w.e->cache->pages_evicted, (unsigned long long)w.e->counts.snapshots_taken);
    assert_true(w.starts > 50 && w.hits > w.starts / 16 && w.checked > 60 && w.rolled_back > 2);
    assert_true(w.e->cache->pages_evicted > 20);
    assert_int_equal(w.hits_disk > 0, m->disk);
    if (w.e->cache->o.state_bytes)
        assert_true(w.hits_tail > 2 && w.hits_tail_disk >= m->disk);

    for (int i = 0; i < MOST_LIVE; i++)
        if (w.live[i].s)
            end(&w, &w.live[i]);
    check_accounts(&w);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        struct engine_cache_removed removed;
        engine_cache_drop(w.e, names[i], &removed);
    }
    check_accounts(&w);
    struct engine_cache_stats stats;
    engine_cache_stats(w.e, &stats);
    assert_int_equal(stats.pages_running, 0);
    assert_int_equal(stats.states_running, 0);
    if (!m->share_system) {
        assert_int_equal(stats.nodes, 0);
        assert_int_equal(stats.pages_idle, 0);
        assert_int_equal(stats.bytes, 0);
    }
    assert_int_equal(stats.lookups, w.starts);
    assert_int_equal(stats.hits, w.hits);
    free(w.row);
    free(w.cold_row);
    engine_close(w.e);
    engine_close(w.cold);
    cache_disk_close(w.disk);
    remove_folder(&folder);
}

#define ON(path, ...)                                                                                                                                \
    {                                                                                                                                                \
        "random_work_keeps_every_bit_and_every_account: " path, random_work_keeps_every_bit_and_every_account, NULL, NULL, &(struct subject)         \
        {                                                                                                                                            \
            path, __VA_ARGS__                                                                                                                        \
        }                                                                                                                                            \
    }
#define TINY(name) "tests/data/tiny-" name ".gguf"

int main(void)
{
    const struct CMUnitTest tests[] = {
        ON(TINY("qwen35moe-q8_0"), KV_F16, 16, false, false, 1), ON(TINY("qwen35moe-q8_0"), KV_Q8_0, 12, true, false, 2),
        ON(TINY("qwen35-q8_0"), KV_F32, 9, false, true, 3),      ON(TINY("qwen35-q8_0"), KV_F16, 20, true, true, 4),
        ON(TINY("qwen3-q8_0"), KV_F16, 1, false, true, 5),       ON(TINY("qwen3-q8_0"), KV_Q8_0, 1, true, false, 6),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
