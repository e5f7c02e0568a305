/* A prefix cache hit changes no bit: cold = hit = hit after the text was forgotten and read again = hit from the disk, for every kind of landing point, and
 * it hits where it should. */
#include "tests/golden/cache_util.h"

#include <limits.h>

#include "base/buf.h"
#include "engine/engine_impl.h"

struct subject {
    const char *path;
    enum kv_type kv;
    bool mtp;
};

static struct engine_options options_of(const struct subject *m)
{
    struct engine_options o = golden_options(m->path, false);
    o.kv_type = m->kv;
    o.mtp = m->mtp;
    o.cache_memory = (uint64_t)64 << 20;
    return o;
}

static bool is_hybrid(const struct engine *e)
{
    return engine_info(e)->state_bytes > 0;
}

/* Ordinary tokens, the same for the same seed. */
static void text_of(uint32_t seed, int32_t *ids, int n)
{
    for (int i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        ids[i] = (int32_t)(seed >> 8) % 1000;
    }
}

static void expect(const struct cache_result *r, int cached, enum cache_miss miss, int miss_at)
{
    if (r->cached != cached || r->miss != miss || r->miss_at != miss_at)
        fail_msg("%d tokens cached, %s at %d; expected %d, %s at %d", r->cached, cache_miss_name(r->miss), r->miss_at, cached, cache_miss_name(miss),
                 miss_at);
}

static void nothing_runs(const struct engine *e)
{
    struct engine_cache_stats s;
    engine_cache_stats(e, &s);
    assert_int_equal(s.pages_running, 0);
    assert_int_equal(s.states_running, 0);
    uint64_t misses = 0;
    for (int i = 0; i < CACHE_MISSES; i++)
        misses += s.misses[i];
    assert_int_equal(s.hits + misses, s.lookups);
}

/* ---- kinds of landing points ---- */

enum { LONG = 300 };

static void a_hit_of_any_kind_changes_no_bit(void **state)
{
    struct engine_options options = options_of(*state);
    struct engine *e = golden_engine_with(&options);
    const bool hybrid = is_hybrid(e);
    int32_t text[LONG + ANSWER + 20], other[LONG];
    struct sequence_options o = {.ns = "p1", .prompt = text, .n_prompt = LONG};
    text_of(1, text, LONG);

    struct cache_result r = run_exact(e, &o, ANSWER, "first time", text + LONG);
    expect(&r, 0, CACHE_MISS_EMPTY, -1);
    r = run_exact(e, &o, ANSWER, "the same again", NULL);
    expect(&r, 256, CACHE_MISS_NONE, LONG);
    assert_int_equal(r.source, CACHE_FROM_MEMORY);

    /* The conversation goes on: its own answer was kept. */
    text_of(2, text + LONG + ANSWER, 20);
    o.n_prompt = LONG + ANSWER + 20;
    r = run_exact(e, &o, ANSWER, "continued", NULL);
    expect(&r, 320, CACHE_MISS_NONE, LONG + ANSWER - 44); /* known are whole cells: 320 */
    r = run_exact(e, &o, ANSWER, "continued again", NULL);
    expect(&r, 320, CACHE_MISS_NONE, LONG + ANSWER + 20);

    /* Another text branches off inside: the second visitor leaves a landing point for the third. */
    memcpy(other, text, 200 * sizeof *text);
    text_of(3, other + 200, 100);
    o = (struct sequence_options){.ns = "p1", .prompt = other, .n_prompt = LONG};
    r = run_exact(e, &o, ANSWER, "branches off", NULL);
    if (hybrid)
        expect(&r, 0, CACHE_MISS_NO_STATE, 200);
    else
        expect(&r, 192, CACHE_MISS_NONE, 200);
    text_of(4, other + 200, 100);
    r = run_exact(e, &o, ANSWER, "branches off there again", NULL);
    expect(&r, 192, CACHE_MISS_NONE, 200);

    /* At least one token is left to run, at and around a grid line. */
    o = (struct sequence_options){.ns = "p1", .prompt = text, .n_prompt = 256};
    r = run_exact(e, &o, ANSWER, "ends at a grid line", NULL);
    expect(&r, 192, CACHE_MISS_NONE, 256);
    o.n_prompt = 257;
    r = run_exact(e, &o, ANSWER, "ends behind a grid line", NULL);
    expect(&r, 256, CACHE_MISS_NONE, 257);

    /* Short ones. */
    for (int n = 1; n <= GRID; n += 21) {
        o.n_prompt = n;
        r = run_exact(e, &o, 8, "no full page", NULL);
        expect(&r, 0, CACHE_MISS_SHORT, -1);
    }
    o.n_prompt = GRID + 1;
    r = run_exact(e, &o, ANSWER, "a page and a token", NULL);
    expect(&r, GRID, CACHE_MISS_NONE, GRID + 1);

    /* Forgotten, read again, hit again. */
    struct engine_cache_removed removed;
    engine_cache_drop(e, "p1", &removed);
    assert_true(removed.pages > 0 && removed.bytes >= (uint64_t)removed.pages * engine_info(e)->page_bytes);
    assert_int_equal(removed.snapshots > 0, hybrid);
    o.n_prompt = LONG;
    r = run_exact(e, &o, ANSWER, "after it was dropped", NULL);
    expect(&r, 0, CACHE_MISS_EMPTY, -1);
    r = run_exact(e, &o, ANSWER, "cached anew", NULL);
    expect(&r, 256, CACHE_MISS_NONE, LONG);
    nothing_runs(e);
    engine_close(e);
}

/* An answer of several pages leaves one snapshot, at its last grid line; a sequence given up on a grid line leaves what it had read. */
static void what_was_computed_stays(void **state)
{
    struct engine_options options = options_of(*state);
    struct engine *e = golden_engine_with(&options);
    int32_t text[LONG + 200];
    text_of(5, text, LONG + 200);
    struct sequence_options o = {.prompt = text, .n_prompt = 100};
    struct cache_result r;
    struct sequence *s = run_start(e, &o, &r);
    run_feed(e, s, text, 100);
    run_feed(e, s, text, LONG);
    struct engine_cache_stats stats;
    engine_cache_stats(e, &stats);
    assert_int_equal(stats.snapshots, is_hybrid(e) ? 2 : 0); /* at 64, before the prompt's end, and at 256 */
    sequence_free(e, s);
    o.n_prompt = LONG + 10;
    r = run_exact(e, &o, ANSWER, "after a long answer", NULL);
    expect(&r, 256, CACHE_MISS_NONE, 256);

    text_of(6, text, LONG + 200);
    o.n_prompt = LONG + 200;
    s = run_start(e, &o, &r);
    expect(&r, 0, CACHE_MISS_DIVERGED, r.miss_at);
    struct step_item it = {.seq = s, .tokens = text, .n_tokens = 192};
    golden_step(e, &it, 1);
    sequence_free(e, s);
    r = run_exact(e, &o, ANSWER, "after it was given up", NULL);
    expect(&r, 192, CACHE_MISS_NONE, 192);
    nothing_runs(e);
    engine_close(e);
}

/* Two sequences read the same text side by side: each gets the bits it would get alone, and in the end there is one copy of the pages. */
static void twins_share_their_pages(void **state)
{
    struct engine_options options = options_of(*state);
    struct engine *e = golden_engine_with(&options);
    const size_t v = (size_t)tokenizer_vocab_size(engine_tokenizer(e));
    int32_t text[LONG];
    text_of(7, text, LONG);
    struct sequence_options o = {.prompt = text, .n_prompt = LONG};
    struct cache_result r;
    float *rows = golden_rows(e, 3);
    struct sequence *a = run_start(e, &o, &r), *b = run_start(e, &o, &r);
    while (sequence_length(b) < LONG) {
        struct step_item items[2];
        int n = 0;
        const int at[2] = {sequence_length(a), sequence_length(b)};
        for (int i = 0; i < 2; i++) {
            const int share = i ? 37 : 50, left = LONG - at[i];
            if (left)
                items[n++] = (struct step_item){.seq = i ? b : a, .tokens = text + at[i], .n_tokens = left < share ? left : share};
            if (left && left <= share) { /* the last token by itself, for its logits alone */
                if (left > 1)
                    items[n - 1].n_tokens = left - 1;
                else
                    items[n - 1].logits = rows + (size_t)i * v;
            }
        }
        golden_step(e, items, n);
    }
    struct engine_cache_stats stats;
    engine_cache_stats(e, &stats);
    assert_int_equal(stats.pages_running, LONG / GRID + 2); /* the unfinished page is each one's own */
    sequence_free(e, a);
    sequence_free(e, b);
    struct run cold = run_with(e, &(struct sequence_options){.prompt = text, .n_prompt = LONG, .no_cache = true}, 0);
    assert_memory_equal(cold.rows, rows, v * sizeof(float));
    assert_memory_equal(cold.rows, rows + v, v * sizeof(float));
    run_free(&cold);
    free(rows);
    nothing_runs(e);
    engine_close(e);
}

/* ---- namespaces ---- */

static void namespaces_never_hit_one_another(void **state)
{
    struct engine_options options = options_of(*state);
    struct engine *e = golden_engine_with(&options);
    int32_t text[LONG];
    text_of(8, text, LONG);
    static const char *const names[] = {"anna", "bert", "", "annA"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        struct sequence_options o = {.ns = names[i], .prompt = text, .n_prompt = LONG};
        struct cache_result r = run_exact(e, &o, 4, names[i], NULL);
        expect(&r, 0, CACHE_MISS_EMPTY, -1);
        assert_int_equal(r.matched, 0);
        r = run_exact(e, &o, 4, names[i], NULL);
        expect(&r, 256, CACHE_MISS_NONE, 256);
    }
    struct engine_cache_entry list[8];
    assert_int_equal(engine_cache_list(e, list, 8), 4);
    assert_string_equal(list[0].ns, "annA"); /* the last one used */
    assert_string_equal(list[3].ns, "anna");
    assert_true(list[0].pages >= 4 && list[0].hits == 1 && list[0].idle_seconds >= 0 && list[0].bytes > 0);
    assert_int_equal(engine_cache_list(e, list, 2), 4);
    assert_string_equal(list[1].ns, "");

    struct engine_cache_removed removed;
    engine_cache_drop(e, "bert", &removed);
    assert_true(removed.pages >= 4);
    engine_cache_drop(e, "bert", &removed);
    assert_int_equal(removed.pages, 0);
    assert_int_equal(engine_cache_list(e, list, 8), 3);
    struct sequence_options o = {.ns = "bert", .prompt = text, .n_prompt = LONG};
    struct cache_result r = run_exact(e, &o, 4, "bert is gone", NULL);
    expect(&r, 0, CACHE_MISS_EMPTY, -1);
    o.ns = "anna";
    r = run_exact(e, &o, 4, "anna is not", NULL);
    expect(&r, 256, CACHE_MISS_NONE, 256);
    nothing_runs(e);
    engine_close(e);
}

/* A running sequence whose namespace is dropped goes on with the right bits, and leaves nothing. */
static void a_dropped_namespace_stays_dropped(void **state)
{
    struct engine_options options = options_of(*state);
    struct engine *e = golden_engine_with(&options);
    const size_t v = (size_t)tokenizer_vocab_size(engine_tokenizer(e));
    int32_t text[LONG];
    text_of(9, text, LONG);
    struct sequence_options o = {.ns = "gone", .prompt = text, .n_prompt = LONG};
    struct cache_result r = run_exact(e, &o, 4, "before", NULL);
    struct sequence *s = run_start(e, &o, &r);
    assert_int_equal(r.cached, 256);
    struct engine_cache_removed removed;
    engine_cache_drop(e, "gone", &removed);
    float *row = golden_rows(e, 1);
    run_feed(e, s, text, LONG - 1);
    golden_feed(e, s, text + LONG - 1, 1, 1, row, NULL);
    struct run cold = run_with(e, &(struct sequence_options){.prompt = text, .n_prompt = LONG, .no_cache = true}, 0);
    assert_memory_equal(cold.rows, row, v * sizeof(float));
    golden_feed(e, s, text, 60, 60, NULL, NULL); /* and over the next grid line */
    sequence_free(e, s);
    struct engine_cache_stats stats;
    engine_cache_stats(e, &stats);
    assert_int_equal(stats.nodes, 0);
    assert_int_equal(stats.pages_idle, 0);
    assert_int_equal(stats.bytes, 0);
    run_free(&cold);
    free(row);
    nothing_runs(e);
    engine_close(e);
}

/* With shared system prompts, and only there: what stands behind the system message is seen by nobody else. */
static void only_the_system_prefix_is_shared_when_asked_for(void **state)
{
    struct engine_options options = options_of(*state);
    for (int share = 0; share < 2; share++) {
        options.share_system = share;
        struct engine *e = golden_engine_with(&options);
        const struct tokenizer *t = engine_tokenizer(e);
        struct buf system = BUF_INIT;
        buf_puts(&system, "<|im_start|>system\n");
        for (int i = 0; i < 40; i++)
            buf_printf(&system, "Rule %d: answer from the record. ", i);
        buf_puts(&system, "<|im_end|>\n");
        const int n_system = (int)system.len; /* of bytes; the tokens are counted below */
        buf_puts(&system, "<|im_start|>user\nThe record of a patient. The record of a patient. The record of a patient. The record of a patient. The "
                          "record of a patient. The record of a patient. The record of a patient. The record of a patient. The record of a patient. "
                          "What is it?<|im_end|>\n<|im_start|>assistant\n");
        struct token_list ids = {0}, head = {0};
        const struct text_range all = {0, system.len}, first = {0, (size_t)n_system};
        assert_int_equal(tokenizer_encode(t, system.data, system.len, &all, 1, 0, &ids, NULL), 0);
        assert_int_equal(tokenizer_encode(t, system.data, (size_t)n_system, &first, 1, 0, &head, NULL), 0);
        const int n = (int)ids.len, line = (int)head.len / GRID * GRID,
                  shared = is_hybrid(e) ? (int)head.len : line; /* a tail reaches to the message's end */
        assert_true(line >= GRID && n > line + 2 * GRID);

        struct sequence_options o = {.ns = "a", .prompt = ids.ids, .n_prompt = n};
        struct cache_result r = run_exact(e, &o, 8, "first", NULL);
        expect(&r, 0, CACHE_MISS_EMPTY, -1);
        o.ns = "b";
        assert_int_equal(engine_cache_depth(e, "b", ids.ids, n), share ? shared : 0);
        r = run_exact(e, &o, 8, "another namespace", NULL);
        if (share) {
            expect(&r, shared, CACHE_MISS_NONE, shared);
        } else {
            expect(&r, 0, CACHE_MISS_EMPTY, -1);
        }
        r = run_exact(e, &o, 8, "the same one again", NULL);
        assert_true(r.cached > shared && r.miss == CACHE_MISS_NONE);
        /* Dropping a patient leaves the shared part, and takes the rest. */
        struct engine_cache_removed removed;
        engine_cache_drop(e, "a", &removed);
        engine_cache_drop(e, "b", &removed);
        o.ns = "a";
        r = run_exact(e, &o, 8, "after the drop", NULL);
        if (share) {
            expect(&r, shared, CACHE_MISS_NONE, shared);
        } else {
            expect(&r, 0, CACHE_MISS_EMPTY, -1);
        }
        nothing_runs(e);
        buf_free(&system);
        token_list_free(&ids);
        token_list_free(&head);
        engine_close(e);
    }
}

/* ---- the disk ---- */

/* The same image with a state of its own, which the cache may keep. The caller frees the state. */
static struct cache_image lend(const struct cache_image *image)
{
    struct cache_image lent = *image;
    if (image->state) {
        lent.state = malloc(image->state_bytes);
        assert_non_null(lent.state);
        memcpy(lent.state, image->state, image->state_bytes);
    }
    return lent;
}

static void a_restart_changes_no_bit_and_forgets_nothing(void **state)
{
    const struct engine_options options = options_of(*state);
    const struct folder folder = new_folder();
    int32_t text[LONG + ANSWER + 20];
    text_of(21, text, LONG);
    text_of(22, text + LONG + ANSWER, 20);

    struct server s = server_open(&options, &folder);
    struct sequence_options o = {.ns = "anna", .prompt = text, .n_prompt = LONG};
    run_exact(s.e, &o, ANSWER, "before the restart", text + LONG);
    struct engine_cache_stats stats;
    engine_cache_stats(s.e, &stats);
    assert_true(stats.disk_queued >= 5);
    const uint64_t queued = stats.disk_queued;
    run_exact(s.e, &o, ANSWER, "again", NULL);
    engine_cache_stats(s.e, &stats);
    assert_int_equal(stats.disk_queued, queued); /* nothing is written twice */
    server_close(&s);

    /* The whole conversation, so far as it was kept: 320 tokens with the answer's own snapshot. */
    s = server_open(&options, &folder);
    struct cache_image image = {0};
    assert_false(read_image(&s, "bert", text, LONG + ANSWER + 20, &image));
    cache_image_free(&image);
    assert_true(read_image(&s, "anna", text, LONG + ANSWER + 20, &image));
    assert_int_equal(image.first_page + image.n_pages, 320 / GRID);
    o.n_prompt = LONG + ANSWER + 20;
    struct cache_image lent = lend(&image);
    o.image = &lent;
    struct cache_result r = run_exact(s.e, &o, ANSWER, "after the restart", NULL);
    expect(&r, 320, CACHE_MISS_NONE, 320);
    assert_int_equal(r.source, CACHE_FROM_DISK);
    /* From now on it is in memory, whether the image comes along or not. */
    r = run_exact(s.e, &o, ANSWER, "with the image again", NULL);
    assert_int_equal(r.cached, 320);
    assert_int_equal(r.source, CACHE_FROM_MEMORY);
    o.image = NULL;
    r = run_exact(s.e, &o, ANSWER, "without", NULL);
    assert_int_equal(r.cached, 320);
    engine_cache_stats(s.e, &stats);
    assert_int_equal(stats.hits_disk, 1);

    /* Images that do not fit are not used, and harm nothing. */
    struct engine_cache_removed removed;
    for (int i = 0; i < 6; i++) {
        engine_cache_drop(s.e, "anna", &removed);
        struct cache_image bad = lend(&image);
        o.image = &bad;
        switch (i) {
        case 0:
            bad.state_bytes--;
            bad.pages = is_hybrid(s.e) ? bad.pages : NULL; /* a model without states has nothing to compare */
            break;
        case 1:
            bad.n_pages = 1000;
            break;
        case 2:
            bad.first_page = 1; /* and nothing in memory to stand before it */
            bad.n_pages = 3;
            break;
        case 3:
            bad.first_page = -1;
            break;
        case 4:
            bad.first_page = INT_MAX;
            break;
        default:
            bad.pages = NULL;
            break;
        }
        r = run_exact(s.e, &o, 4, "a bad image", NULL);
        expect(&r, 0, CACHE_MISS_FAILED, 0);
        free(bad.state);
    }

    /* An image that goes on where memory ends. */
    engine_cache_drop(s.e, "anna", &removed);
    o = (struct sequence_options){.ns = "anna", .prompt = text, .n_prompt = 140};
    run_exact(s.e, &o, 4, "the beginning", NULL);
    free(lent.state);
    struct cache_image tail = lend(&image);
    tail.first_page = 2;
    tail.n_pages = image.n_pages - 2;
    tail.pages = image.pages + 2 * engine_info(s.e)->page_bytes;
    o.n_prompt = LONG + ANSWER + 20;
    o.image = &tail;
    r = run_exact(s.e, &o, ANSWER, "memory and disk together", NULL);
    assert_int_equal(r.cached, 320);
    assert_int_equal(r.source, CACHE_FROM_DISK);
    free(tail.state);
    nothing_runs(s.e);
    cache_image_free(&image);
    server_close(&s);
    remove_folder(&folder);
}

/* ---- a device that fails ---- */

static bool failing[4]; /* state_save, state_load, page_save, page_load */

static int fail_or(bool fails, int result, struct error *err)
{
    return fails ? error_set(err, "the device failed") : result;
}

static const struct backend_ops *real_ops;

static int bad_state_save(struct backend *b, int32_t state, int pos, void *dst, struct error *err)
{
    return fail_or(failing[0], failing[0] ? 0 : real_ops->state_save(b, state, pos, dst, err), err);
}

static int bad_state_load(struct backend *b, int32_t state, int pos, const void *src, struct error *err)
{
    return fail_or(failing[1], real_ops->state_load(b, state, pos, src, err), err); /* having changed the state */
}

static int bad_page_save(struct backend *b, int32_t page, void *dst, struct error *err)
{
    return fail_or(failing[2], failing[2] ? 0 : real_ops->page_save(b, page, dst, err), err);
}

static int bad_page_load(struct backend *b, int32_t page, const void *src, struct error *err)
{
    return fail_or(failing[3], failing[3] ? 0 : real_ops->page_load(b, page, src, err), err);
}

static void a_failing_device_costs_a_hit_never_an_answer(void **state)
{
    const struct engine_options options = options_of(*state);
    const struct folder folder = new_folder();
    struct server s = server_open(&options, &folder);
    struct backend_ops bad = *s.e->backend->ops;
    real_ops = s.e->backend->ops;
    bad.state_save = bad_state_save;
    bad.state_load = bad_state_load;
    bad.page_save = bad_page_save;
    bad.page_load = bad_page_load;
    s.e->backend->ops = &bad;
    int32_t text[LONG];
    text_of(31, text, LONG);
    struct engine_cache_removed removed;
    struct engine_cache_stats stats;

    /* No snapshot can be taken: the text is known, and read again. */
    failing[0] = true;
    struct sequence_options o = {.ns = "x", .prompt = text, .n_prompt = LONG};
    struct cache_result r = run_exact(s.e, &o, 8, "no snapshot", NULL);
    r = run_exact(s.e, &o, 8, "no snapshot again", NULL);
    if (is_hybrid(s.e)) {
        expect(&r, 0, CACHE_MISS_NO_STATE, 256);
        engine_cache_stats(s.e, &stats);
        assert_int_equal(stats.snapshots, 0);
        assert_int_equal(stats.bytes, 0);
        assert_true(stats.snapshots_failed > 0);
        assert_int_equal(stats.disk_queued, 0);
    }
    failing[0] = false;
    run_exact(s.e, &o, 8, "it works again", NULL);

    /* No state can be loaded. */
    failing[1] = true;
    r = run_exact(s.e, &o, 8, "no load", NULL);
    if (is_hybrid(s.e))
        expect(&r, 0, CACHE_MISS_FAILED, 256);
    failing[1] = false;
    r = run_exact(s.e, &o, 8, "loads again", NULL);
    expect(&r, 256, CACHE_MISS_NONE, 256);

    /* From disk neither pages nor states. */
    cache_disk_flush(s.disk);
    struct cache_image image = {0};
    assert_true(read_image(&s, "x", text, LONG, &image));
    o.image = &image;
    for (int i = 1; i <= 3; i += 2) {
        engine_cache_drop(s.e, "x", &removed);
        failing[i] = i == 3 || is_hybrid(s.e);
        r = run_exact(s.e, &o, 8, "no import", NULL);
        if (failing[i])
            expect(&r, 0, CACHE_MISS_FAILED, 0);
        failing[i] = false;
    }
    /* With the beginning in memory the import fails, and what is in memory is used. */
    engine_cache_drop(s.e, "x", &removed);
    o = (struct sequence_options){.ns = "x", .prompt = text, .n_prompt = 140};
    run_exact(s.e, &o, 8, "the beginning", NULL);
    o = (struct sequence_options){.ns = "x", .prompt = text, .n_prompt = LONG, .image = &image};
    failing[3] = true;
    r = run_exact(s.e, &o, 8, "half an import", NULL);
    assert_int_equal(r.cached, 128);
    assert_int_equal(r.source, CACHE_FROM_MEMORY);
    failing[3] = false;

    /* Nothing can be handed to the disk. */
    failing[2] = true;
    o = (struct sequence_options){.ns = "y", .prompt = text, .n_prompt = LONG};
    run_exact(s.e, &o, 8, "no page for the disk", NULL);
    failing[2] = false;
    nothing_runs(s.e);
    s.e->backend->ops = real_ops;
    cache_image_free(&image);
    server_close(&s);
    remove_folder(&folder);
}

/* ---- memory ---- */

/* Whatever lies idle in the cache, sequences get the whole budget. */
static void idle_pages_never_make_a_step_fail(void **state)
{
    enum { PAGES = 8 };
    struct engine_options options = options_of(*state);
    struct engine *probe = golden_engine_with(&options);
    options.max_sequences = 2;
    options.context = PAGES * GRID;
    options.kv_budget = PAGES * engine_info(probe)->page_bytes + 2 * engine_info(probe)->state_bytes;
    engine_close(probe);
    struct engine *e = golden_engine_with(&options);
    assert_int_equal(engine_info(e)->pages_total, PAGES);
    int32_t text[PAGES * GRID];
    struct engine_cache_stats stats;
    for (uint32_t i = 0; i < 6; i++) {
        text_of(100 + i, text, PAGES * GRID);
        struct sequence_options o = {.prompt = text, .n_prompt = i % 2 ? PAGES * GRID : 5 * GRID + 1};
        struct cache_result r;
        struct sequence *s = run_start(e, &o, &r);
        run_feed(e, s, text, o.n_prompt);
        sequence_free(e, s);
        engine_cache_stats(e, &stats);
        assert_true(stats.pages_idle >= 5);
        assert_int_equal(stats.pages_running, 0);
    }
    assert_true(stats.pages_evicted > 8);
    /* The last one is still there; the first is known to have been. */
    struct sequence_options o = {.prompt = text, .n_prompt = PAGES * GRID - 4};
    struct cache_result r;
    struct sequence *s = run_start(e, &o, &r);
    assert_int_equal(r.cached, 7 * GRID);
    sequence_free(e, s);
    text_of(100, text, PAGES * GRID);
    o.n_prompt = 5 * GRID + 1;
    s = run_start(e, &o, &r);
    expect(&r, 0, CACHE_MISS_EVICTED, 5 * GRID);
    sequence_free(e, s);
    nothing_runs(e);
    engine_close(e);
}

static void a_cache_too_small_for_one_snapshot_is_off(void **state)
{
    struct engine_options options = options_of(*state);
    options.cache_memory = 1000;
    struct engine *e = golden_engine_with(&options);
    int32_t text[LONG];
    text_of(9, text, LONG);
    struct sequence_options o = {.prompt = text, .n_prompt = LONG};
    for (int i = 0; i < 2; i++) {
        struct cache_result r = run_exact(e, &o, 4, "off", NULL);
        expect(&r, 0, CACHE_MISS_OFF, -1);
    }
    struct engine_cache_stats stats;
    engine_cache_stats(e, &stats);
    assert_false(stats.on);
    assert_int_equal(stats.misses[CACHE_MISS_OFF], 4);
    assert_int_equal(engine_cache_list(e, NULL, 0), 0);
    engine_close(e);
}

static void a_bad_prompt_or_namespace_is_refused(void **state)
{
    struct engine_options options = options_of(*state);
    struct engine *e = golden_engine_with(&options);
    int32_t text[2] = {1, -1};
    static const struct {
        const char *ns;
        int n;
        const char *word;
    } bad[] = {{"", 0, "at least one token"}, {"", 2, "token 1 of the prompt is -1"}, {"../x", 1, "namespace"}, {".", 1, "namespace"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct error err = {""};
        struct cache_result r;
        struct sequence_options o = {.ns = bad[i].ns, .prompt = text, .n_prompt = bad[i].n};
        assert_null(sequence_start(e, &o, &r, &err));
        assert_non_null(strstr(err.text, bad[i].word));
    }
    for (int i = 0; i < CACHE_MISSES; i++)
        for (int k = 0; k < i; k++)
            assert_string_not_equal(cache_miss_name((enum cache_miss)i), cache_miss_name((enum cache_miss)k));
    nothing_runs(e);
    engine_close(e);
}

#define ON(test, path, kv, mtp)                                                                                                                      \
    {                                                                                                                                                \
#test ": " path ", " #kv, test, NULL, NULL, &(struct subject)                                                                                \
        {                                                                                                                                            \
            path, kv, mtp                                                                                                                            \
        }                                                                                                                                            \
    }
#define TINY(name) "tests/data/tiny-" name ".gguf"

int main(void)
{
    const struct CMUnitTest tests[] = {
        ON(a_hit_of_any_kind_changes_no_bit, TINY("qwen35moe-f32"), KV_F32, true),
        ON(a_hit_of_any_kind_changes_no_bit, TINY("qwen35moe-q8_0"), KV_F16, false),
        ON(a_hit_of_any_kind_changes_no_bit, TINY("qwen35moe-q8_0"), KV_Q8_0, true),
        ON(a_hit_of_any_kind_changes_no_bit, TINY("qwen35moe-wide-q4_k"), KV_F16, false),
        ON(a_hit_of_any_kind_changes_no_bit, TINY("qwen35-f32"), KV_F16, false),
        ON(a_hit_of_any_kind_changes_no_bit, TINY("qwen35-q8_0"), KV_F32, false),
        ON(a_hit_of_any_kind_changes_no_bit, TINY("qwen3-f32"), KV_F16, false),
        ON(a_hit_of_any_kind_changes_no_bit, TINY("qwen3-q8_0"), KV_Q8_0, false),
        ON(what_was_computed_stays, TINY("qwen35moe-q8_0"), KV_F16, false),
        ON(what_was_computed_stays, TINY("qwen3-q8_0"), KV_F16, false),
        ON(twins_share_their_pages, TINY("qwen35moe-q8_0"), KV_F16, false),
        ON(twins_share_their_pages, TINY("qwen3-q8_0"), KV_F16, false),
        ON(namespaces_never_hit_one_another, TINY("qwen35moe-q8_0"), KV_F16, false),
        ON(namespaces_never_hit_one_another, TINY("qwen3-q8_0"), KV_F16, false),
        ON(only_the_system_prefix_is_shared_when_asked_for, TINY("qwen35moe-q8_0"), KV_F16, false),
        ON(only_the_system_prefix_is_shared_when_asked_for, TINY("qwen3-q8_0"), KV_F16, false),
        ON(a_dropped_namespace_stays_dropped, TINY("qwen35moe-q8_0"), KV_F16, false),
        ON(a_dropped_namespace_stays_dropped, TINY("qwen3-q8_0"), KV_F16, false),
        ON(a_restart_changes_no_bit_and_forgets_nothing, TINY("qwen35moe-f32"), KV_F32, true),
        ON(a_restart_changes_no_bit_and_forgets_nothing, TINY("qwen35moe-q8_0"), KV_F16, false),
        ON(a_restart_changes_no_bit_and_forgets_nothing, TINY("qwen35-q8_0"), KV_Q8_0, false),
        ON(a_restart_changes_no_bit_and_forgets_nothing, TINY("qwen3-q8_0"), KV_F16, false),
        ON(a_failing_device_costs_a_hit_never_an_answer, TINY("qwen35moe-q8_0"), KV_F16, false),
        ON(a_failing_device_costs_a_hit_never_an_answer, TINY("qwen3-q8_0"), KV_F16, false),
        ON(idle_pages_never_make_a_step_fail, TINY("qwen35moe-q8_0"), KV_F16, false),
        ON(idle_pages_never_make_a_step_fail, TINY("qwen3-q8_0"), KV_F16, false),
        ON(a_cache_too_small_for_one_snapshot_is_off, TINY("qwen35moe-q8_0"), KV_F16, false),
        ON(a_bad_prompt_or_namespace_is_refused, TINY("qwen35moe-q8_0"), KV_F16, false),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
