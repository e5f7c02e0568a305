/* The tree of cached text (engine/prefix_cache.h) by itself: what is found, what is kept and what goes first. And where a prompt wants its
 * snapshots (engine/prefix_plan.h). */
#include "tests/unit/pages_fixture.h"

#include <stdio.h>
#include <stdlib.h>

#include "engine/gguf.h"
#include "engine/prefix_cache.h"
#include "engine/prefix_plan.h"

enum { STATE = 1000, PAGE = 100 };

static const uint64_t SECOND = 1000000000u;

struct tree {
    struct fixture f;
    struct prefix_cache *c;
    struct prefix_space *s;
    uint64_t maker;
};

static void tree_open(struct tree *t, int pages, size_t state_bytes, int snapshots, int bare)
{
    fixture_open(&t->f, pages);
    struct prefix_options o = {
        .pages = &t->f.pool, .page_bytes = PAGE, .state_bytes = state_bytes, .budget = (uint64_t)snapshots * STATE + STATE / 2, .max_bare = bare};
    t->c = prefix_open(&o);
    assert_non_null(t->c);
    t->c->now = 1000 * SECOND;
    t->s = prefix_enter(t->c, "ns");
    assert_non_null(t->s);
    t->maker = 0;
}

static void tree_close(struct tree *t)
{
    prefix_leave(t->c, t->s);
    prefix_close(t->c);
    fixture_close(&t->f);
}

/* Everything that is counted twice is counted right. */
static void check_tree(const struct tree *t)
{
    const struct prefix_cache *c = t->c;
    int bare = 0, paged = 0;
    for (size_t i = 0; i < c->n_cells; i++) {
        const struct prefix_cell *cell = c->cells[i];
        assert_int_equal(cell->place, i);
        assert_int_equal(cell->depth, cell->parent ? cell->parent->depth + 1 : 1);
        int children = 0;
        for (const struct prefix_cell *child = cell->first; child; child = child->next) {
            assert_ptr_equal(child->parent, cell);
            assert_true(!child->prev || child->prev->next == child);
            children += child->page >= 0;
        }
        assert_int_equal(children, cell->n_paged);
        assert_true(cell->page >= 0 || (cell->n_paged == 0 && !cell->snapshot && !cell->tails));
        bare += cell->page < 0;
        paged += cell->page >= 0;
    }
    assert_int_equal(bare, c->n_bare);
    int cells = c->shared.n_cells, pages = c->shared.n_pages, snapshots = c->shared.n_snapshots;
    for (const struct prefix_space *s = c->spaces; s; s = s->next) {
        cells += s->n_cells;
        pages += s->n_pages;
        snapshots += s->n_snapshots;
    }
    assert_int_equal(cells, c->n_cells);
    assert_int_equal(pages, paged);
    assert_int_equal(snapshots, c->n_snapshots);
    assert_true(c->bytes + (c->spare ? c->o.state_bytes : 0) <= c->o.budget);
    uint64_t bytes = 0;
    for (size_t i = 0; i < c->n_snapshots; i++) {
        const struct prefix_snapshot *s = c->snapshots[i];
        assert_int_equal(s->place, i);
        assert_ptr_equal(s->n ? prefix_tail(s->cell, s->ids, s->n) : s->cell->snapshot, s);
        assert_true(s->n || s->bytes == c->o.state_bytes);
        bytes += s->bytes;
    }
    assert_int_equal(c->bytes, bytes);
}

static void text_of(uint32_t seed, int32_t *ids, int n)
{
    for (int i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        ids[i] = (int32_t)(seed >> 8) % 1000;
    }
}

/* Reads `cells` cells of a text as a sequence would, and ends. Returns the last cell. */
static struct prefix_cell *read_text(struct tree *t, struct prefix_space *s, const int32_t *ids, int cells, int n_shared)
{
    struct prefix_cell *cell = NULL;
    int32_t *own = calloc((size_t)cells, sizeof *own);
    assert_non_null(own);
    for (int i = 0; i < cells; i++) {
        if (pages_prepare(&t->f.pool, 1, NULL)) {
            assert_int_equal(prefix_reclaim(t->c, 1), 1);
            assert_int_equal(pages_prepare(&t->f.pool, 1, NULL), 0);
        }
        own[i] = pages_take(&t->f.pool);
        cell = prefix_add(t->c, s, cell, ids + (size_t)i * GRID, own[i], i < n_shared);
        assert_non_null(cell);
        if (cell->page != own[i]) {
            pages_use(&t->f.pool, cell->page);
            pages_leave(&t->f.pool, own[i]);
            own[i] = cell->page;
        }
    }
    for (int i = 0; i < cells; i++)
        pages_leave(&t->f.pool, own[i]);
    free(own);
    check_tree(t);
    return cell;
}

static bool snap(struct tree *t, struct prefix_cell *cell, uint64_t maker)
{
    uint8_t *data = prefix_snapshot_room(t->c, maker, t->c->o.state_bytes);
    if (!data)
        return false;
    memset(data, 0x5A, t->c->o.state_bytes);
    assert_int_equal(prefix_snapshot_put(t->c, cell, data, maker), 0);
    check_tree(t);
    return true;
}

static struct prefix_cell *up(struct prefix_cell *cell, int depth)
{
    while (cell->depth > depth)
        cell = cell->parent;
    return cell;
}

static void expect_found(const struct prefix_found *f, int landing, int known, int matched, enum prefix_loss loss)
{
    assert_int_equal(f->landing ? f->landing->depth : 0, landing);
    assert_int_equal(f->known ? f->known->depth : 0, known);
    assert_int_equal(f->matched, matched);
    assert_int_equal(f->loss, loss);
}

/* ---- finding ---- */

static void a_text_is_found_as_far_as_it_is_the_same(void **state)
{
    (void)state;
    struct tree t;
    tree_open(&t, 32, 0, 0, 100);
    int32_t ids[6 * GRID], other[6 * GRID];
    text_of(1, ids, 6 * GRID);
    struct prefix_found f = prefix_find(t.c, t.s, ids, 6 * GRID, 0);
    expect_found(&f, 0, 0, 0, PREFIX_EMPTY);
    read_text(&t, t.s, ids, 5, 0);
    f = prefix_find(t.c, t.s, ids, 6 * GRID, 0);
    expect_found(&f, 5, 5, 5 * GRID, PREFIX_COMPLETE);
    f = prefix_find(t.c, t.s, ids, 5 * GRID, 0); /* a token is left to run */
    expect_found(&f, 4, 5, 5 * GRID, PREFIX_COMPLETE);
    f = prefix_find(t.c, t.s, ids, 5 * GRID + 1, 0);
    expect_found(&f, 5, 5, 5 * GRID, PREFIX_COMPLETE);
    f = prefix_find(t.c, t.s, ids, 3 * GRID + 10, 0); /* ends inside of a known cell */
    expect_found(&f, 3, 3, 3 * GRID + 10, PREFIX_COMPLETE);
    for (int at = 0; at < 5 * GRID; at += 7) {
        memcpy(other, ids, sizeof ids);
        other[at] = 1000; /* no such token in the text */
        f = prefix_find(t.c, t.s, other, 6 * GRID, 0);
        expect_found(&f, at / GRID, at / GRID, at, at < GRID ? PREFIX_UNKNOWN : PREFIX_COMPLETE);
    }
    tree_close(&t);
}

static void a_recurrent_model_lands_only_behind_a_snapshot(void **state)
{
    (void)state;
    struct tree t;
    tree_open(&t, 32, STATE, 4, 100);
    int32_t ids[6 * GRID];
    text_of(1, ids, 6 * GRID);
    struct prefix_cell *last = read_text(&t, t.s, ids, 5, 0);
    struct prefix_found f = prefix_find(t.c, t.s, ids, 6 * GRID, 0);
    expect_found(&f, 0, 5, 5 * GRID, PREFIX_NO_STATE);
    assert_true(snap(&t, up(last, 2), 1));
    assert_true(snap(&t, last, 1));
    f = prefix_find(t.c, t.s, ids, 6 * GRID, 0);
    expect_found(&f, 5, 5, 5 * GRID, PREFIX_COMPLETE);
    f = prefix_find(t.c, t.s, ids, 5 * GRID, 0);
    expect_found(&f, 2, 5, 5 * GRID, PREFIX_NO_STATE);
    f = prefix_find(t.c, t.s, ids, 3 * GRID, 0);
    expect_found(&f, 2, 3, 3 * GRID, PREFIX_COMPLETE);
    f = prefix_find(t.c, t.s, ids, 2 * GRID, 0);
    expect_found(&f, 0, 2, 2 * GRID, PREFIX_NO_STATE);
    tree_close(&t);
}

static void spaces_do_not_see_one_another(void **state)
{
    (void)state;
    struct tree t;
    tree_open(&t, 64, 0, 0, 100);
    struct prefix_space *b = prefix_enter(t.c, "b"), *same = prefix_enter(t.c, "b");
    assert_ptr_equal(b, same);
    prefix_leave(t.c, same);
    int32_t ids[6 * GRID], other[6 * GRID];
    text_of(1, ids, 6 * GRID);
    read_text(&t, t.s, ids, 5, 0);
    struct prefix_found f = prefix_find(t.c, b, ids, 6 * GRID, 0);
    expect_found(&f, 0, 0, 0, PREFIX_EMPTY);

    /* Two cells of the text are everybody's; of what others wrote behind them not a token is seen. */
    text_of(2, ids, 6 * GRID);
    memcpy(other, ids, sizeof ids);
    text_of(3, other + 3 * GRID, 3 * GRID);
    read_text(&t, t.s, ids, 5, 2);
    f = prefix_find(t.c, b, other, 6 * GRID, 2);
    expect_found(&f, 2, 2, 2 * GRID, PREFIX_COMPLETE);
    read_text(&t, b, other, 5, 2);
    f = prefix_find(t.c, b, other, 6 * GRID, 2);
    expect_found(&f, 5, 5, 5 * GRID, PREFIX_COMPLETE);
    f = prefix_find(t.c, t.s, other, 6 * GRID, 2);
    expect_found(&f, 3, 3, 3 * GRID, PREFIX_COMPLETE);
    f = prefix_find(t.c, t.s, ids, 6 * GRID, 0); /* a text whose beginning is not marked as shared */
    expect_found(&f, 0, 0, 0, PREFIX_UNKNOWN);
    assert_int_equal(t.c->shared.n_pages, 2);

    prefix_leave(t.c, b);
    struct prefix_dropped d = prefix_drop(t.c, "b");
    check_tree(&t);
    assert_int_equal(d.pages, 3);
    assert_int_equal(t.c->shared.n_pages, 2);
    assert_int_equal(prefix_drop(t.c, "b").pages, 0);
    f = prefix_find(t.c, t.s, ids, 6 * GRID, 2);
    expect_found(&f, 5, 5, 5 * GRID, PREFIX_COMPLETE);
    assert_int_equal(prefix_drop(t.c, "ns").pages, 5 + 3);
    check_tree(&t);
    expect_pages(&t.f, 0, 2, t.f.backend.reserved - 2);
    tree_close(&t);
}

static void thousands_of_cells_are_found_again(void **state)
{
    (void)state;
    enum { TEXTS = 700, CELLS = 3 };
    struct tree t;
    tree_open(&t, TEXTS * CELLS, 0, 0, 100);
    int32_t ids[CELLS * GRID];
    for (uint32_t i = 0; i < TEXTS; i++) {
        text_of(i, ids, CELLS * GRID);
        struct prefix_cell *cell = NULL;
        for (int k = 0; k < CELLS; k++) {
            assert_int_equal(pages_prepare(&t.f.pool, 1, NULL), 0);
            const int32_t page = pages_take(&t.f.pool);
            cell = prefix_add(t.c, t.s, cell, ids + k * GRID, page, false);
            assert_non_null(cell);
            pages_leave(&t.f.pool, page);
        }
    }
    check_tree(&t);
    for (uint32_t i = 0; i < TEXTS; i++) {
        text_of(i, ids, CELLS * GRID);
        struct prefix_found f = prefix_find(t.c, t.s, ids, CELLS * GRID, 0);
        expect_found(&f, CELLS - 1, CELLS, CELLS * GRID, PREFIX_COMPLETE);
    }
    tree_close(&t);
}

/* ---- snapshots: what goes first ---- */

/* Five texts of 4 cells with a snapshot each; the budget is for four. */
static void four_texts(struct tree *t, int32_t ids[5][4 * GRID], struct prefix_cell *last[5])
{
    tree_open(t, 64, STATE, 4, 100);
    for (uint32_t i = 0; i < 5; i++) {
        text_of(10 + i, ids[i], 4 * GRID);
        last[i] = read_text(t, t->s, ids[i], 4, 0);
        if (i < 4)
            assert_true(snap(t, last[i], i + 1));
    }
    assert_int_equal(t->c->n_snapshots, 4);
}

static void of_equal_snapshots_the_oldest_goes(void **state)
{
    (void)state;
    struct tree t;
    int32_t ids[5][4 * GRID];
    struct prefix_cell *last[5];
    four_texts(&t, ids, last);
    static const uint64_t ages[4] = {50, 10, 70, 30};
    for (int i = 0; i < 4; i++)
        last[i]->snapshot->used = t.c->now - ages[i] * SECOND;
    assert_true(snap(&t, last[4], 9));
    assert_null(last[2]->snapshot);
    assert_true(last[2]->had_snapshot);
    assert_true(last[0]->snapshot && last[1]->snapshot && last[3]->snapshot && last[4]->snapshot);
    assert_int_equal(t.c->snapshots_evicted, 1);
    struct prefix_found f = prefix_find(t.c, t.s, ids[2], 4 * GRID, 0);
    assert_int_equal(f.loss, PREFIX_EVICTED);
    tree_close(&t);
}

static void a_snapshot_in_use_outlives_an_unused_one(void **state)
{
    (void)state;
    struct tree t;
    int32_t ids[5][4 * GRID];
    struct prefix_cell *last[5];
    four_texts(&t, ids, last);
    for (int i = 0; i < 4; i++)
        last[i]->snapshot->used = t.c->now - (uint64_t)(100 - i) * SECOND; /* 0 is the oldest */
    last[0]->snapshot->hits = last[1]->snapshot->hits = 3;
    last[3]->snapshot->hits = 1;
    assert_true(snap(&t, last[4], 9));
    assert_null(last[2]->snapshot);
    /* But not for ever: three hits are worth two half-lives. */
    tree_close(&t);
    four_texts(&t, ids, last);
    last[0]->snapshot->hits = 3;
    last[0]->snapshot->used = 0;
    t.c->now = 3 * (uint64_t)PREFIX_HALF_LIFE_S * SECOND;
    for (int i = 1; i < 4; i++)
        last[i]->snapshot->used = t.c->now;
    assert_true(snap(&t, last[4], 9));
    assert_null(last[0]->snapshot);
    tree_close(&t);
}

static void what_saves_fewer_tokens_goes_first(void **state)
{
    (void)state;
    struct tree t;
    tree_open(&t, 64, STATE, 3, 100);
    int32_t ids[12 * GRID], other[4 * GRID];
    text_of(1, ids, 12 * GRID);
    text_of(2, other, 4 * GRID);
    struct prefix_cell *last = read_text(&t, t.s, ids, 12, 0), *short_one = read_text(&t, t.s, other, 4, 0);
    assert_true(snap(&t, up(last, 6), 1)); /* 6 cells */
    assert_true(snap(&t, up(last, 8), 2)); /* 2 more than the one above */
    assert_true(snap(&t, last, 3));        /* 4 more */
    assert_true(snap(&t, short_one, 4));   /* 4 */
    assert_null(up(last, 8)->snapshot);
    assert_true(up(last, 6)->snapshot && last->snapshot);
    /* Now the last one saves 6, as the one at 6 does, and the other text's only 4. */
    assert_true(snap(&t, up(last, 2), 5));
    assert_null(short_one->snapshot);
    assert_true(up(last, 6)->snapshot && last->snapshot);
    tree_close(&t);
}

/* A sequence does not throw out its own snapshots to make room for another one. */
static void a_sequence_spares_its_own_snapshots(void **state)
{
    (void)state;
    struct tree t;
    tree_open(&t, 64, STATE, 2, 100);
    int32_t ids[4 * GRID];
    text_of(1, ids, 4 * GRID);
    struct prefix_cell *last = read_text(&t, t.s, ids, 4, 0);
    assert_true(snap(&t, up(last, 1), 7));
    assert_true(snap(&t, up(last, 2), 7));
    assert_false(snap(&t, up(last, 3), 7));
    assert_true(snap(&t, up(last, 3), 8)); /* another may */
    assert_int_equal(t.c->n_snapshots, 2);
    tree_close(&t);
}

static void a_stolen_or_cancelled_buffer_is_accounted_for(void **state)
{
    (void)state;
    struct tree t;
    tree_open(&t, 64, STATE, 1, 100);
    int32_t ids[2 * GRID];
    text_of(1, ids, 2 * GRID);
    struct prefix_cell *last = read_text(&t, t.s, ids, 2, 0);
    assert_true(snap(&t, last->parent, 1));
    uint8_t *data = prefix_snapshot_steal(t.c, last->parent);
    assert_null(last->parent->snapshot);
    assert_int_equal(prefix_snapshot_put(t.c, last, data, 1), 0);
    check_tree(&t);
    data = prefix_snapshot_room(t.c, 2, STATE);
    assert_non_null(data);
    assert_null(last->snapshot);
    prefix_snapshot_cancel(t.c, data, STATE);
    check_tree(&t);
    assert_int_equal(t.c->bytes, 0);
    assert_true(snap(&t, last, 3));
    prefix_drop(t.c, "ns");
    assert_null(t.c->spare); /* no bytes of a dropped namespace stay behind */
    tree_close(&t);
    tree_open(&t, 4, STATE, 0, 100); /* a budget for none */
    assert_null(prefix_snapshot_room(t.c, 1, STATE));
    tree_close(&t);
}

/* ---- tails ---- */

/* n tokens after the cell get a tail of `bytes`. */
static bool put_tail(struct tree *t, struct prefix_cell *cell, const int32_t *ids, int n, size_t bytes, uint64_t maker)
{
    uint8_t *data = prefix_snapshot_room(t->c, maker, bytes);
    if (!data)
        return false;
    memset(data, 0xA5, bytes);
    assert_int_equal(prefix_tail_put(t->c, cell, ids, n, data, bytes, maker), 0);
    check_tree(t);
    return true;
}

static void a_tail_is_found_where_the_text_goes_on_as_it_did(void **state)
{
    (void)state;
    struct tree t;
    tree_open(&t, 64, STATE, 8, 100);
    int32_t ids[5 * GRID];
    text_of(1, ids, 5 * GRID);
    struct prefix_cell *last = read_text(&t, t.s, ids, 4, 0), *third = up(last, 3);
    assert_true(snap(&t, up(last, 2), 1));
    assert_true(put_tail(&t, third, ids + 3 * GRID, 10, STATE + 3, 1));
    assert_true(put_tail(&t, third, ids + 3 * GRID, 40, STATE + 9, 1));
    assert_int_equal(t.c->bytes, STATE + STATE + 3 + STATE + 9);
    assert_ptr_equal(prefix_tail(third, ids + 3 * GRID, 40)->cell, third);
    assert_null(prefix_tail(third, ids + 3 * GRID, 41));

    struct prefix_found f = prefix_find(t.c, t.s, ids, 5 * GRID, 0);
    expect_found(&f, 2, 4, 4 * GRID, PREFIX_NO_STATE); /* the fourth cell has nothing to land on */
    assert_non_null(f.tail);
    assert_int_equal(prefix_tail_end(f.tail), 3 * GRID + 40);
    for (int n = 3 * GRID; n <= 3 * GRID + 50; n++) { /* at least one token is left */
        f = prefix_find(t.c, t.s, ids, n, 0);
        const int want = n > 3 * GRID + 40 ? 40 : n > 3 * GRID + 10 ? 10 : 0;
        assert_int_equal(f.tail ? f.tail->n : 0, want);
    }
    int32_t other[5 * GRID];
    memcpy(other, ids, sizeof other);
    other[3 * GRID + 39] ^= 1; /* the last token of the longer one */
    f = prefix_find(t.c, t.s, other, 5 * GRID, 0);
    assert_int_equal(f.tail->n, 10);
    assert_int_equal(f.matched, 3 * GRID + 39);
    assert_int_equal(f.loss, PREFIX_COMPLETE);
    other[3 * GRID] ^= 1;
    f = prefix_find(t.c, t.s, other, 5 * GRID, 0);
    assert_null(f.tail);
    /* A landing point that is deeper than a tail wins. */
    assert_true(snap(&t, last, 1));
    f = prefix_find(t.c, t.s, ids, 5 * GRID, 0);
    assert_null(f.tail);
    expect_found(&f, 4, 4, 4 * GRID, PREFIX_COMPLETE);
    /* And the texts of others do not have it. */
    struct prefix_space *s = prefix_enter(t.c, "other");
    f = prefix_find(t.c, s, ids, 5 * GRID, 0);
    assert_null(f.tail);
    prefix_leave(t.c, s);
    tree_close(&t);
}

static void a_tail_goes_with_its_page_its_namespace_or_for_want_of_room(void **state)
{
    (void)state;
    struct tree t;
    tree_open(&t, 64, STATE, 3, 100);
    int32_t ids[4 * GRID];
    text_of(1, ids, 4 * GRID);
    struct prefix_cell *last = read_text(&t, t.s, ids, 3, 0);
    assert_true(put_tail(&t, last, ids + 3 * GRID, 5, STATE + 1, 1));
    assert_int_equal(prefix_reclaim(t.c, 1), 1); /* the page */
    check_tree(&t);
    assert_int_equal(t.c->n_snapshots, 0);
    assert_int_equal(t.c->bytes, 0);

    last = read_text(&t, t.s, ids, 3, 0);
    assert_true(put_tail(&t, last, ids + 3 * GRID, 5, STATE + 1, 1));
    assert_int_equal(prefix_drop(t.c, "ns").snapshots, 1);
    assert_int_equal(t.c->bytes, 0);

    /* The budget holds three grid snapshots: a tail saves the fewest tokens for its bytes. */
    last = read_text(&t, t.s, ids, 3, 0);
    assert_true(snap(&t, up(last, 1), 1));
    assert_true(put_tail(&t, up(last, 1), ids + GRID, 5, STATE, 1));
    assert_true(snap(&t, up(last, 2), 1));
    assert_true(snap(&t, last, 2));
    assert_null(prefix_tail(up(last, 1), ids + GRID, 5));
    assert_int_equal(t.c->n_snapshots, 3);
    assert_false(prefix_snapshot_reserve(t.c, 3, 4 * STATE)); /* more than all there is */
    assert_int_equal(t.c->n_snapshots, 3);
    /* A buffer of another size than a grid snapshot's finds room too, and the spare one does not stand beside a full budget. */
    assert_true(put_tail(&t, last, ids + 3 * GRID, 7, 2 * STATE + 1, 3));
    assert_int_equal(t.c->n_snapshots, 2);
    tree_close(&t);
}

/* ---- pages: what goes first ---- */

static void pages_nobody_can_land_behind_go_first(void **state)
{
    (void)state;
    struct tree t;
    tree_open(&t, 16, STATE, 8, 100);
    int32_t a[6 * GRID], b[6 * GRID];
    text_of(1, a, 6 * GRID);
    text_of(2, b, 6 * GRID);
    struct prefix_cell *last_a = read_text(&t, t.s, a, 6, 0);
    t.c->now += 60 * SECOND;
    struct prefix_cell *last_b = read_text(&t, t.s, b, 6, 0);
    assert_true(snap(&t, up(last_a, 4), 1));
    assert_true(snap(&t, up(last_b, 3), 2));
    /* Behind a's snapshot 2 pages, behind b's 3: all useless, the oldest first, from the end. */
    assert_int_equal(prefix_reclaim(t.c, 2), 2);
    check_tree(&t);
    assert_true(last_a->page < 0 && last_a->parent->page < 0 && up(last_a, 4)->page >= 0);
    assert_int_equal(prefix_reclaim(t.c, 3), 3);
    check_tree(&t);
    assert_true(up(last_b, 4)->page < 0 && up(last_b, 3)->page >= 0);
    assert_int_equal(t.c->n_snapshots, 2);
    /* Then a landing point with all that it alone made worth keeping: b's saves 3 cells, a's 4, and b was used. */
    prefix_hit(t.c, t.s, up(last_b, 3), up(last_b, 3)->snapshot);
    assert_int_equal(prefix_reclaim(t.c, 4), 4);
    check_tree(&t);
    assert_true(up(last_a, 1)->page < 0);
    assert_true(up(last_b, 3)->snapshot != NULL);
    assert_int_equal(t.c->n_snapshots, 1);
    struct prefix_found f = prefix_find(t.c, t.s, a, 6 * GRID, 0);
    expect_found(&f, 0, 6, 6 * GRID, PREFIX_EVICTED);
    assert_int_equal(prefix_reclaim(t.c, 100), 3); /* and no more than there is */
    expect_pages(&t.f, 0, 0, t.f.backend.reserved);
    tree_close(&t);
}

static void pages_in_use_are_never_taken(void **state)
{
    (void)state;
    struct tree t;
    tree_open(&t, 16, 0, 0, 100);
    int32_t a[4 * GRID], b[4 * GRID];
    text_of(1, a, 4 * GRID);
    text_of(2, b, 4 * GRID);
    struct prefix_cell *last_a = read_text(&t, t.s, a, 4, 0), *last_b = read_text(&t, t.s, b, 4, 0);
    for (int i = 1; i <= 3; i++)
        pages_use(&t.f.pool, up(last_a, i)->page);
    assert_int_equal(prefix_reclaim(t.c, 16), 5);
    check_tree(&t);
    assert_true(last_a->page < 0 && last_b->page < 0);
    for (int i = 1; i <= 3; i++) {
        assert_true(up(last_a, i)->page >= 0);
        pages_leave(&t.f.pool, up(last_a, i)->page);
    }
    tree_close(&t);
}

static void a_text_read_again_fills_its_bare_cells(void **state)
{
    (void)state;
    struct tree t;
    tree_open(&t, 16, 0, 0, 100);
    int32_t a[4 * GRID];
    text_of(1, a, 4 * GRID);
    struct prefix_cell *last = read_text(&t, t.s, a, 4, 0);
    assert_int_equal(prefix_reclaim(t.c, 3), 3);
    struct prefix_found f = prefix_find(t.c, t.s, a, 4 * GRID, 0);
    expect_found(&f, 1, 4, 4 * GRID, PREFIX_EVICTED);
    assert_ptr_equal(read_text(&t, t.s, a, 4, 0), last);
    f = prefix_find(t.c, t.s, a, 4 * GRID, 0);
    expect_found(&f, 3, 4, 4 * GRID, PREFIX_COMPLETE);
    assert_int_equal(t.c->n_cells, 4);
    tree_close(&t);
}

static void bare_text_is_forgotten_in_the_end(void **state)
{
    (void)state;
    struct tree t;
    tree_open(&t, 8, 0, 0, 16);
    int32_t a[4 * GRID], first[4 * GRID];
    text_of(0, first, 4 * GRID);
    for (uint32_t i = 0; i < 50; i++) {
        t.c->now += SECOND;
        text_of(i, a, 4 * GRID);
        read_text(&t, t.s, a, 4, 0);
        assert_true(t.c->n_bare <= 16);
        assert_true(t.c->n_cells <= 8 + 16);
    }
    struct prefix_found f = prefix_find(t.c, t.s, first, 4 * GRID, 0);
    expect_found(&f, 0, 0, 0, PREFIX_UNKNOWN);
    f = prefix_find(t.c, t.s, a, 4 * GRID, 0);
    expect_found(&f, 3, 4, 4 * GRID, PREFIX_COMPLETE);
    tree_close(&t);
}

/* A namespace whose last cell is forgotten is forgotten itself, unless a sequence holds it. */
static void an_empty_space_goes(void **state)
{
    (void)state;
    struct tree t;
    tree_open(&t, 8, 0, 0, 0);
    struct prefix_space *b = prefix_enter(t.c, "b");
    int32_t a[2 * GRID];
    text_of(1, a, 2 * GRID);
    read_text(&t, b, a, 2, 0);
    read_text(&t, t.s, a, 2, 0);
    prefix_leave(t.c, b);
    assert_int_equal(prefix_reclaim(t.c, 4), 4);
    assert_int_equal(t.c->n_cells, 0);
    assert_ptr_equal(t.c->spaces, t.s);
    assert_null(t.s->next);
    tree_close(&t);
}

/* ---- where snapshots are wanted ---- */

static struct tokenizer *open_tokenizer(void)
{
    struct gguf *g;
    struct tokenizer *t;
    assert_int_equal(gguf_open(&g, "tests/data/tiny-qwen35moe-q8_0.gguf", NULL), 0);
    assert_int_equal(tokenizer_open(&t, g, NULL), 0);
    gguf_close(g);
    return t;
}

/* A message of n tokens of text. */
static void add_message(const struct tokenizer *t, struct token_list *ids, const char *role, int n)
{
    char head[64];
    const int len = snprintf(head, sizeof head, "<|im_start|>%s\n", role);
    const struct text_range all = {0, (size_t)len};
    assert_int_equal(tokenizer_encode(t, head, (size_t)len, &all, 1, 0, ids, NULL), 0);
    for (int i = 0; i < n; i++)
        assert_int_equal(token_list_add(ids, 300 + i % 200), 0);
    static const char end[] = "<|im_end|>\n";
    const struct text_range whole = {0, sizeof end - 1};
    assert_int_equal(tokenizer_encode(t, end, sizeof end - 1, &whole, 1, 0, ids, NULL), 0);
}

static void expect_plan(const int *plan, int n, const int *wanted, int n_wanted)
{
    assert_int_equal(n, n_wanted);
    for (int i = 0; i < n_wanted; i++)
        assert_int_equal(plan[i], wanted[i]);
}

static int line(size_t position)
{
    return (int)position / GRID * GRID;
}

/* A conversation of short messages asks for few steps of its own: positions are a cell apart, but for the line that opens the answer, which costs none. */
static void short_messages_share_a_position(void **state)
{
    (void)state;
    struct tokenizer *t = open_tokenizer();
    const struct prefix_marks m = prefix_marks_of(t);
    for (int words = 1; words < 120; words += 7) {
        struct token_list ids = {0};
        int plan[PLAN_MOST] = {0};
        add_message(t, &ids, "system", 100);
        const int system = (int)ids.len;
        for (int i = 0; i < 6; i++)
            add_message(t, &ids, i % 2 ? "assistant" : "user", words);
        add_message(t, &ids, "user", 5);
        static const char open[] = "<|im_start|>assistant\n";
        const struct text_range all = {0, sizeof open - 1};
        assert_int_equal(tokenizer_encode(t, open, sizeof open - 1, &all, 1, 0, &ids, NULL), 0);
        const int opened = (int)ids.len;
        token_list_add(&ids, 300);
        int n = prefix_plan(&m, ids.ids, (int)ids.len, 0, 0, true, PLAN_MOST, plan);
        assert_int_equal(plan[0], system);
        assert_int_equal(plan[n - 1], opened);
        for (int i = 1; i < n - 1; i++)
            assert_true(plan[i] - plan[i - 1] >= GRID);
        assert_true(n >= 2 + (words > GRID)); /* the last message, when it is sent again changed, has a place to begin */
        /* Going on from just before: the end alone. */
        n = prefix_plan(&m, ids.ids, (int)ids.len, opened - 30, 0, true, PLAN_MOST, plan);
        assert_int_equal(n, 1);
        assert_int_equal(plan[0], opened);
        token_list_free(&ids);
    }
    tokenizer_close(t);
}

static void a_prompt_wants_snapshots_where_the_next_one_begins(void **state)
{
    (void)state;
    struct tokenizer *t = open_tokenizer();
    const struct prefix_marks m = prefix_marks_of(t);
    assert_true(m.im_start >= 0 && m.im_end >= 0);
    struct token_list ids = {0};
    add_message(t, &ids, "system", 300);
    const size_t system = ids.len;
    add_message(t, &ids, "user", 200);
    const size_t user = ids.len;
    add_message(t, &ids, "assistant", 150);
    const size_t assistant = ids.len;
    add_message(t, &ids, "user", 100);
    const size_t last = ids.len;
    static const char open[] = "<|im_start|>assistant\n<think>\n\n</think>\n\n";
    const struct text_range all = {0, sizeof open - 1};
    assert_int_equal(tokenizer_encode(t, open, sizeof open - 1, &all, 1, 0, &ids, NULL), 0);
    for (int i = 0; i < 140; i++) /* as far as a prompt goes that is resumed in the middle of its answer */
        token_list_add(&ids, 300);
    const int n = (int)ids.len;
    assert_int_equal(prefix_system_end(&m, ids.ids, n), system);

    int plan[PLAN_MOST] = {0};
    struct token_list role_line = {0};
    const struct text_range role_range = {0, strlen("<|im_start|>assistant\n")};
    assert_int_equal(tokenizer_encode(t, open, role_range.end, &role_range, 1, 0, &role_line, NULL), 0);
    const size_t answer = last + role_line.len;
    token_list_free(&role_line);
    for (int exact = 0; exact < 2; exact++) {
        const int at_system = exact ? (int)system : line(system), at_user = exact ? (int)user : line(user),
                  at_open = exact ? (int)answer : line(answer);
        const int all_of_them[] = {at_system, at_user, exact ? (int)assistant : line(assistant), at_open, line(ids.len - 1)};
        expect_plan(plan, prefix_plan(&m, ids.ids, n, 0, 0, exact, PLAN_MOST, plan), all_of_them, 5);
        /* The most useful ones first. */
        expect_plan(plan, prefix_plan(&m, ids.ids, n, 0, 128, exact, 1, plan), (const int[]){at_open}, 1);
        expect_plan(plan, prefix_plan(&m, ids.ids, n, 0, 128, exact, 2, plan), (const int[]){at_system, at_open}, 2);
        expect_plan(plan, prefix_plan(&m, ids.ids, n, 0, 128, exact, 3, plan), (const int[]){128, at_system, at_open}, 3);
        expect_plan(plan, prefix_plan(&m, ids.ids, n, 0, 128, exact, 4, plan), (const int[]){128, at_system, at_open, line(ids.len - 1)}, 4);
        assert_int_equal(prefix_plan(&m, ids.ids, n, 0, 128, exact, 0, plan), 0);
        /* Nothing at or below the place where it begins. */
        expect_plan(plan, prefix_plan(&m, ids.ids, n, all_of_them[2], 0, exact, PLAN_MOST, plan), all_of_them + 3, 2);
    }
    assert_int_equal(prefix_plan(&m, ids.ids, n, line(ids.len - 1), 0, false, PLAN_MOST, plan), 0);

    /* Where a known text was left is not wanted so soon after the place where this one begins. */
    for (int near = 0; near < 2; near++) {
        const int from = GRID + 5, branch = near ? 2 * GRID : 3 * GRID;
        assert_true((int)system >= branch + GRID); /* nothing else is near */
        const int count = prefix_plan(&m, ids.ids, n, from, branch, true, PLAN_MOST, plan);
        bool wanted = false;
        for (int i = 0; i < count; i++)
            wanted |= plan[i] == branch;
        assert_int_equal(wanted, !near);
    }

    /* A text that ends with a message is read ahead for what may follow: its very end is wanted, if that can be had. */
    const int read_ahead = (int)last;
    int ends_there = prefix_plan(&m, ids.ids, read_ahead, 0, 0, true, 1, plan);
    expect_plan(plan, ends_there, (const int[]){read_ahead}, 1);
    expect_plan(plan, prefix_plan(&m, ids.ids, read_ahead, 0, 0, false, 1, plan), (const int[]){line(last - 1)}, 1);

    /* The line that opens the answer is certain to come again, what follows it is not: see a prompt that has a grid line between them. */
    for (int pad = 0; pad < GRID; pad++) {
        struct token_list p = {0};
        add_message(t, &p, "user", 100 + pad);
        const size_t end = p.len;
        static const char role[] = "<|im_start|>assistant\n";
        const struct text_range r = {0, sizeof role - 1};
        assert_int_equal(tokenizer_encode(t, role, sizeof role - 1, &r, 1, 0, &p, NULL), 0);
        const size_t opened = p.len;
        assert_true(opened > end);
        token_list_add(&p, 300);
        expect_plan(plan, prefix_plan(&m, p.ids, (int)p.len, 0, 0, false, 1, plan), (const int[]){line(opened)}, 1);
        expect_plan(plan, prefix_plan(&m, p.ids, (int)p.len, 0, 0, true, 1, plan), (const int[]){(int)opened}, 1);
        token_list_free(&p);
    }
    token_list_free(&ids);
    tokenizer_close(t);
}

/* However many tokens it takes: a vocabulary of single bytes spells the role out, and a snapshot that missed it would cost a step of its own. */
static void the_line_that_opens_the_answer_is_known_by_its_text(void **state)
{
    (void)state;
    struct tokenizer *t = open_tokenizer();
    const struct prefix_marks m = prefix_marks_of(t);
    struct token_list ids = {0};
    add_message(t, &ids, "user", 100);
    token_list_add(&ids, m.im_start);
    const size_t role = ids.len;
    for (const char *c = "assistant\n"; *c; c++) {
        const struct text_range one = {0, 1};
        assert_int_equal(tokenizer_encode(t, c, 1, &one, 1, 0, &ids, NULL), 0);
    }
    assert_int_equal(ids.len - role, strlen("assistant\n")); /* one each */
    const int opened = (int)ids.len;
    for (int i = 0; i < 6; i++)
        token_list_add(&ids, 300);
    int plan[PLAN_MOST] = {0};
    expect_plan(plan, prefix_plan(&m, ids.ids, (int)ids.len, 0, 0, true, 1, plan), &opened, 1);
    token_list_free(&ids);
    tokenizer_close(t);
}

static void only_a_system_message_counts_as_one(void **state)
{
    (void)state;
    struct tokenizer *t = open_tokenizer();
    const struct prefix_marks m = prefix_marks_of(t);
    struct token_list ids = {0};
    add_message(t, &ids, "user", 100);
    add_message(t, &ids, "system", 100);
    assert_int_equal(prefix_system_end(&m, ids.ids, (int)ids.len), 0);
    ids.len = 0;
    add_message(t, &ids, "systematic", 100);
    assert_int_equal(prefix_system_end(&m, ids.ids, (int)ids.len), 0);
    ids.len = 0;
    add_message(t, &ids, "system", 100);
    for (int n = 0; n <= (int)ids.len - 2; n++) /* cut before its end */
        assert_int_equal(prefix_system_end(&m, ids.ids, n), 0);
    assert_int_equal(prefix_system_end(&m, ids.ids, (int)ids.len), ids.len);
    struct prefix_marks none = m;
    none.im_end = -1;
    assert_int_equal(prefix_system_end(&none, ids.ids, (int)ids.len), 0);
    token_list_free(&ids);
    tokenizer_close(t);
}

static void a_long_text_has_landing_points_on_the_way(void **state)
{
    (void)state;
    enum { N = 200000 };
    const struct prefix_marks none = {.im_start = -1, .im_end = -1};
    int32_t *ids = calloc(N, sizeof *ids);
    assert_non_null(ids);
    int plan[PLAN_MOST] = {0};
    int n = prefix_plan(&none, ids, 10000, 0, 0, false, PLAN_MOST, plan);
    expect_plan(plan, n, (const int[]){2048, 4096, 6144, 8192, 9984}, 5);
    n = prefix_plan(&none, ids, N, 640, 0, false, PLAN_MOST, plan);
    assert_in_range(n, PLAN_MOST / 3, PLAN_MOST);
    assert_int_equal(plan[n - 1], (N - 1) / GRID * GRID);
    for (int i = 0; i < n; i++) {
        assert_int_equal(plan[i] % GRID, 0);
        assert_true(plan[i] > (i ? plan[i - 1] : 640));
        assert_true(plan[i] - (i ? plan[i - 1] : 640) <= 8 * PLAN_EVERY);
    }
    assert_int_equal(prefix_plan(&none, ids, GRID, 0, 0, false, PLAN_MOST, plan), 0);
    expect_plan(plan, prefix_plan(&none, ids, GRID + 1, 0, 0, false, PLAN_MOST, plan), (const int[]){GRID}, 1);
    free(ids);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_text_is_found_as_far_as_it_is_the_same),
        cmocka_unit_test(a_recurrent_model_lands_only_behind_a_snapshot),
        cmocka_unit_test(spaces_do_not_see_one_another),
        cmocka_unit_test(thousands_of_cells_are_found_again),
        cmocka_unit_test(of_equal_snapshots_the_oldest_goes),
        cmocka_unit_test(a_snapshot_in_use_outlives_an_unused_one),
        cmocka_unit_test(what_saves_fewer_tokens_goes_first),
        cmocka_unit_test(a_sequence_spares_its_own_snapshots),
        cmocka_unit_test(a_stolen_or_cancelled_buffer_is_accounted_for),
        cmocka_unit_test(a_tail_is_found_where_the_text_goes_on_as_it_did),
        cmocka_unit_test(a_tail_goes_with_its_page_its_namespace_or_for_want_of_room),
        cmocka_unit_test(pages_nobody_can_land_behind_go_first),
        cmocka_unit_test(pages_in_use_are_never_taken),
        cmocka_unit_test(a_text_read_again_fills_its_bare_cells),
        cmocka_unit_test(bare_text_is_forgotten_in_the_end),
        cmocka_unit_test(an_empty_space_goes),
        cmocka_unit_test(short_messages_share_a_position),
        cmocka_unit_test(a_prompt_wants_snapshots_where_the_next_one_begins),
        cmocka_unit_test(the_line_that_opens_the_answer_is_known_by_its_text),
        cmocka_unit_test(only_a_system_message_counts_as_one),
        cmocka_unit_test(a_long_text_has_landing_points_on_the_way),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
