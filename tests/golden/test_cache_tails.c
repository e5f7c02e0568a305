/* Snapshots between grid lines, where messages end: from memory and from disk, in a budget for few of them, beside a shared system message, and with
 * nothing in them that is another text's. Each hit is compared bit by bit with a cold run. */
#include "tests/golden/cache_util.h"

#include "base/buf.h"
#include "engine/engine_impl.h"
#include "engine/slot_layout.h"

static struct engine_options options_of(const char *path)
{
    struct engine_options o = golden_options(path, false);
    o.cache_memory = (uint64_t)64 << 20;
    return o;
}

static void add(const struct engine *e, struct token_list *ids, const char *text)
{
    const struct text_range all = {0, strlen(text)};
    assert_int_equal(tokenizer_encode(engine_tokenizer(e), text, all.end, &all, 1, 0, ids, NULL), 0);
}

/* Ordinary tokens. */
static void add_words(struct token_list *ids, uint32_t seed, int n)
{
    for (int i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        assert_int_equal(token_list_add(ids, (int32_t)(seed >> 8) % 1000), 0);
    }
}

static void add_message(const struct engine *e, struct token_list *ids, const char *role, uint32_t seed, int words)
{
    add(e, ids, "<|im_start|>");
    add(e, ids, role);
    add(e, ids, "\n");
    add_words(ids, seed, words);
    add(e, ids, "<|im_end|>\n");
}

static struct cache_result ask(const struct server *s, const char *ns, const struct token_list *ids, struct cache_image *image, const char *what)
{
    struct sequence_options o = {.ns = ns, .prompt = ids->ids, .n_prompt = (int)ids->len, .image = image};
    struct cache_result r = run_exact(s->e, &o, 4, what, NULL);
    cache_image_free(image);
    return r;
}

/* What no snapshot may hold: rows behind its text, which are another's, or were. */
static void tails_hold_their_own_rows_alone(const struct engine *e)
{
    const struct backend_shape *sh = &e->backend->shape;
    const size_t row = slot_kv_row_bytes(sh);
    for (size_t i = 0; i < e->cache->n_snapshots; i++) {
        const struct prefix_snapshot *t = e->cache->snapshots[i];
        for (int layer = 0; t->n && layer < sh->n_kv_layers; layer++)
            for (int part = 0; part < 2 * sh->n_kv_heads; part++) {
                const uint8_t *rows = t->data + slot_page_offset(sh, layer, part % 2, part / 2);
                size_t k = (size_t)t->n * row;
                while (k < GRID * row && rows[k] == 0)
                    k++;
                if (k < GRID * row)
                    fail_msg("a tail of %d tokens holds row %zu", t->n, k / row);
            }
    }
}

/* Turn after turn over a restart: the next one begins where the line ends that opened the answer, wherever in a page that is. */
static void the_next_turn_begins_behind_the_line_that_opened_the_answer(void **state)
{
    const struct engine_options options = options_of(*state);
    for (int words = 60; words < 60 + GRID; words += words < 84 ? 7 : 1) { /* the last ones put the positions around a grid line */
        const struct folder folder = new_folder();
        struct server s = server_open(&options, &folder);
        struct token_list first = {0}, second = {0};
        add_message(s.e, &first, "system", 1, 20);
        add_message(s.e, &first, "user", 2, words);
        add(s.e, &first, "<|im_start|>assistant\n");
        const int opened = (int)first.len;
        for (int i = 0; i < opened; i++)
            assert_int_equal(token_list_add(&second, first.ids[i]), 0);
        add(s.e, &first, "<think>\n\n</think>\n\n");
        add_words(&second, 4, 30);
        add(s.e, &second, "<|im_end|>\n");
        add_message(s.e, &second, "user", 5, 25);
        add(s.e, &second, "<|im_start|>assistant\n<think>\n\n</think>\n\n");

        struct cache_result r = ask(&s, "p", &first, NULL, "the first turn");
        assert_int_equal(r.cached, 0);
        tails_hold_their_own_rows_alone(s.e);
        r = ask(&s, "p", &second, NULL, "the second turn");
        if (r.cached != opened)
            fail_msg("%d of %d tokens were in memory", r.cached, opened);
        tails_hold_their_own_rows_alone(s.e);
        server_close(&s);

        for (int turn = 1; turn <= 2; turn++) {
            s = server_open(&options, &folder);
            const struct token_list *ids = turn == 1 ? &first : &second;
            struct cache_image image;
            assert_true(read_image(&s, "p", ids->ids, (int)ids->len, &image));
            r = ask(&s, "p", ids, &image, "after a restart");
            const int wanted = turn == 1 ? opened : (int)second.len - 4;
            assert_int_equal(r.source, CACHE_FROM_DISK);
            if (r.cached < wanted)
                fail_msg("turn %d after a restart: %d tokens from disk; expected %d", turn, r.cached, wanted);
            server_close(&s);
        }
        remove_folder(&folder);

        /* And when the first turn alone was stored. */
        const struct folder other = new_folder();
        s = server_open(&options, &other);
        ask(&s, "p", &first, NULL, "the first turn");
        server_close(&s);
        s = server_open(&options, &other);
        struct cache_image image;
        assert_true(read_image(&s, "p", second.ids, (int)second.len, &image));
        r = ask(&s, "p", &second, &image, "the second turn after a restart");
        if (r.cached != opened || r.source != CACHE_FROM_DISK)
            fail_msg("the second turn after a restart: %d of %d tokens from disk", r.cached, opened);
        server_close(&s);
        remove_folder(&other);
        token_list_free(&first);
        token_list_free(&second);
    }
}

/* In a budget for one state, or a few, the position that is worth most is kept. */
static void a_small_budget_keeps_the_most_useful_position(void **state)
{
    struct engine_options options = options_of(*state);
    struct engine *probe = golden_engine_with(&options);
    const size_t one = probe->backend->ops->state_packed_bytes(probe->backend, GRID), tail = engine_cache_tail_bytes(probe, 2 * GRID - 1);
    engine_close(probe);
    const uint64_t budgets[] = {one, tail - 1, tail, 2 * tail - 1, 3 * one, 4 * one, one + tail, 5 * one + 1, 4 * tail, 7 * one};
    for (size_t i = 0; i < sizeof budgets / sizeof *budgets; i++) {
        options.cache_memory = budgets[i];
        struct server s = {.e = golden_engine_with(&options)};
        struct token_list ids = {0};
        add_message(s.e, &ids, "system", 1, 120);
        add_message(s.e, &ids, "user", 2, 90);
        add_message(s.e, &ids, "assistant", 3, 80);
        add_message(s.e, &ids, "user", 4, 110);
        add(s.e, &ids, "<|im_start|>assistant\n");
        const int opened = (int)ids.len;
        add(s.e, &ids, "<think>\n\n</think>\n\n");
        ask(&s, "", &ids, NULL, "first");
        struct cache_result r = ask(&s, "", &ids, NULL, "again");
        const int wanted = budgets[i] < tail ? opened / GRID * GRID : opened;
        if (r.cached < wanted)
            fail_msg("a budget of %.2f states: %d of %d tokens were cached", (double)budgets[i] / (double)one, r.cached, wanted);
        struct engine_cache_stats stats;
        engine_cache_stats(s.e, &stats);
        assert_int_equal(stats.snapshots_failed, 0);
        token_list_free(&ids);
        engine_close(s.e);
    }
}

/* What a server without shared system messages stored stays one namespace's when the next server shares them. */
static void a_stored_tail_never_hangs_on_a_shared_cell_for_others(void **state)
{
    struct engine_options options = options_of(*state);
    const struct folder folder = new_folder();
    struct server s = server_open(&options, &folder);
    struct token_list ids = {0};
    add_message(s.e, &ids, "system", 1, 62); /* ends behind the first line */
    add_message(s.e, &ids, "user", 2, 20);
    add(s.e, &ids, "<|im_start|>assistant\n");
    const int opened = (int)ids.len;
    assert_true(opened < 2 * GRID);
    add(s.e, &ids, "<think>\n\n</think>\n\n");
    ask(&s, "anna", &ids, NULL, "anna's");
    server_close(&s);

    options.share_system = true;
    s = server_open(&options, &folder);
    struct cache_image image;
    assert_true(read_image(&s, "anna", ids.ids, (int)ids.len, &image));
    struct cache_result r = ask(&s, "anna", &ids, &image, "anna's again");
    assert_int_equal(r.cached, opened);
    r = ask(&s, "bert", &ids, NULL, "bert's");
    if (r.cached > 62 + 8)
        fail_msg("bert got %d tokens, which only anna had", r.cached);
    token_list_free(&ids);
    server_close(&s);
    remove_folder(&folder);
}

/* ---- a step that fails on its way ---- */

static const struct backend_ops *real_ops;
static bool fail_head;

static int bad_sync(struct backend *b, struct error *err)
{
    int rc = real_ops->sync(b, err);
    const bool fails = fail_head && err; /* without err the engine clears what is left of a failure */
    return fails ? error_set(err, "the device failed") : rc;
}

/* It may be fed again, with the right bits, or it must say that it is lost. */
static void a_failed_step_never_leaves_a_wrong_history(void **state)
{
    const struct engine_options options = options_of(*state);
    struct engine *e = golden_engine_with(&options);
    const size_t v = (size_t)tokenizer_vocab_size(engine_tokenizer(e));
    struct token_list ids = {0};
    add_words(&ids, 7, 60);
    float *rows = golden_rows(e, 2);
    struct backend_ops bad = *e->backend->ops;
    real_ops = e->backend->ops;
    bad.sync = bad_sync;
    int again = 0;
    for (int n = 1; n <= 48; n++) {
        struct sequence *s = golden_sequence(e), *cold = golden_sequence(e);
        golden_feed(e, s, ids.ids, 10, 10, NULL, NULL);
        golden_feed(e, cold, ids.ids, 10, 10, NULL, NULL);
        e->backend->ops = &bad;
        fail_head = true;
        struct step_item it = {.seq = s, .tokens = ids.ids + 10, .n_tokens = n};
        struct error err;
        assert_int_equal(engine_step(e, &it, 1, &err), -1);
        fail_head = false;
        e->backend->ops = real_ops;
        it = (struct step_item){.seq = s, .tokens = ids.ids + 10, .n_tokens = 1, .logits = rows};
        if (engine_step(e, &it, 1, &err) == 0) {
            golden_feed(e, cold, ids.ids + 10, 1, 1, rows + v, NULL);
            if (memcmp(rows, rows + v, v * sizeof *rows) != 0)
                fail_msg("after a failed step of %d rows the next row has other bits", n);
            again++;
        }
        sequence_free(e, s);
        sequence_free(e, cold);
    }
    assert_true(again >= 8);
    free(rows);
    token_list_free(&ids);
    engine_close(e);
}

#define ON(test, path)                                                                                                                               \
    {                                                                                                                                                \
#test ": " path, test, NULL, NULL, path                                                                                                      \
    }
#define TINY(name)    "tests/data/tiny-" name ".gguf"
#define HYBRIDS(test) ON(test, TINY("qwen35-q8_0")), ON(test, TINY("qwen35moe-q8_0"))

int main(void)
{
    const struct CMUnitTest tests[] = {
        HYBRIDS(the_next_turn_begins_behind_the_line_that_opened_the_answer),
        HYBRIDS(a_small_budget_keeps_the_most_useful_position),
        HYBRIDS(a_stored_tail_never_hangs_on_a_shared_cell_for_others),
        HYBRIDS(a_failed_step_never_leaves_a_wrong_history),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
