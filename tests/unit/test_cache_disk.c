/* The disk cache as its callers see it: what is stored, found, kept private, evicted and deleted. */
#include "tests/unit/cache_disk_setup.h"

/* ---- keys and namespaces ---- */

static void equal_text_makes_equal_keys_and_any_difference_other_ones(void **state)
{
    (void)state;
    struct cache_model a = model_number(1), b = model_number(2);
    struct text t = text_make("p", &a, 1, 3), same = text_make("p", &a, 1, 3);
    assert_memory_equal(t.keys, same.keys, 3 * sizeof t.keys[0]);
    struct text other_model = text_make("p", &b, 1, 3), other_space = text_make("q", &a, 1, 3), no_space = text_make("", &a, 1, 3);
    for (int i = 0; i < 3; i++) {
        assert_false(cache_key_equal(&t.keys[i], &other_model.keys[i]));
        assert_false(cache_key_equal(&t.keys[i], &other_space.keys[i]));
        assert_false(cache_key_equal(&t.keys[i], &no_space.keys[i]));
    }
    for (int at = 0; at < 64; at++) {
        int32_t ids[64];
        memcpy(ids, t.ids, sizeof ids);
        ids[at] ^= 1;
        struct cache_key k = cache_key_next(&t.root, ids, 64);
        assert_false(cache_key_equal(&k, &t.keys[0]));
    }
    struct cache_key few = cache_key_next(&t.root, t.ids, 63);
    assert_false(cache_key_equal(&few, &t.keys[0]));
    /* The last cells are equal, what went before is not. */
    struct text u = t;
    u.ids[0] ^= 1;
    text_keys(&u, &a);
    assert_false(cache_key_equal(&t.keys[2], &u.keys[2]));
}

static void a_namespace_has_no_path_meaning(void **state)
{
    (void)state;
    char long_name[4097];
    memset(long_name, 'a', sizeof long_name);
    static const char *const good[] = {"a", "Z", "0", "_", "patient-7", "a.b", "a..b", "A_b-c.9", "CON", "a-"};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++)
        assert_true(cache_namespace_valid(good[i], strlen(good[i])));
    assert_true(cache_namespace_valid(long_name, 64));
    static const char *const wrong[] = {"",
                                        ".",
                                        "..",
                                        "../x",
                                        "..\\x",
                                        "/",
                                        "/etc",
                                        "a/b",
                                        "a\\b",
                                        ".a",
                                        "-a",
                                        "-rf",
                                        " a",
                                        "a ",
                                        "a\n",
                                        "a b",
                                        "a:b",
                                        "a%2e",
                                        "a*",
                                        "a\x7f",
                                        "a=b",
                                        "~",
                                        "\xd0\xb0",          /* a Cyrillic a */
                                        "p\xe2\x80\xa4q",    /* one dot leader */
                                        "a\xe2\x88\x95\x62", /* division slash */
                                        "\xef\xbd\x81",      /* a full-width a */
                                        "a\xcc\x81",         /* a combining accent */
                                        "a\xff",
                                        "a\xe2\x80\x8b"}; /* a space of no width */
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        if (cache_namespace_valid(wrong[i], strlen(wrong[i])))
            fail_msg("accepted: '%s'", wrong[i]);
    assert_false(cache_namespace_valid(long_name, 65));
    assert_false(cache_namespace_valid(long_name, 4096));
    assert_false(cache_namespace_valid("a\0b", 3));
    assert_false(cache_namespace_valid("\0", 1));
    assert_false(cache_namespace_valid("a", 0));
    assert_false(cache_namespace_valid(NULL, 0));
}

static void an_invalid_namespace_touches_nothing(void **state)
{
    struct fixture *f = *state;
    struct cache_disk *d = open_with(&f->options, 1);
    struct text t = text_of("p", 1, 1);
    static const char *const wrong[] = {"../p", ".", "a/b", "", "\xd0\xb0"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        if (!wrong[i][0])
            continue;
        bool page, st;
        struct cache_image image;
        struct cache_removed removed;
        struct error err = {{0}};
        assert_false(cache_disk_put_state(d, wrong[i], &t.keys[0], 64, contents(&t.keys[0], true)));
        assert_false(cache_disk_has(d, wrong[i], &t.keys[0], true));
        cache_disk_missing(d, wrong[i], t.keys, 1, &page, &st);
        assert_false(page || st);
        assert_false(cache_disk_read(d, wrong[i], &(struct cache_text){.keys = t.keys, .ids = t.ids, .n = 1}, 0, &image));
        assert_int_equal(cache_disk_delete(d, wrong[i], &removed, &err), -1);
        assert_non_null(strstr(err.text, "namespace"));
    }
    cache_disk_close(d);
    assert_int_equal(count_names(f->dir), 0);
    assert_int_equal(count_names(f->base), f->key_file ? 2 : 1);
}

/* ---- storing and finding ---- */

static void what_was_stored_is_read_back_exactly(void **state)
{
    struct fixture *f = *state;
    struct cache_disk *d = open_with(&f->options, 1);
    struct text t = text_of("patient-7", 1, 5), nobody = text_of("patient-8", 1, 5), other = text_of("patient-7", 2, 5);
    assert_int_equal(read_text(d, &t), 0);
    store_text(d, &t);
    assert_int_equal(read_text(d, &t), 5);
    assert_int_equal(read_text_from(d, &t, 3), 2);
    assert_int_equal(read_text(d, &nobody), 0);
    assert_int_equal(read_text(d, &other), 0);
    struct cache_disk_stats s = cache_disk_stats(d);
    assert_int_equal(s.files, 6);
    assert_int_equal(s.bytes, 5 * cache_file_bytes(PAGE_BYTES) + cache_file_bytes(STATE_BYTES));
    assert_int_equal(s.written, 6);
    assert_int_equal(s.hits, 2);
    assert_int_equal(s.misses, 3);
    assert_int_equal(s.queued_bytes, 0);
    assert_int_equal(s.write_errors + s.read_errors + s.bad_files + s.dropped + s.evicted, 0);
    cache_disk_close(d);
}

static void the_default_namespace_is_one_of_its_own(void **state)
{
    struct fixture *f = *state;
    struct cache_disk *d = open_with(&f->options, 1);
    struct text t = text_of("", 1, 2), named = text_of("default", 1, 2);
    store_text(d, &t);
    assert_int_equal(read_text(d, &t), 2);
    assert_int_equal(read_text(d, &named), 0);
    cache_disk_close(d);
    d = open_with(&f->options, 1);
    assert_int_equal(read_text(d, &t), 2);
    struct cache_namespace_info info[2];
    assert_int_equal(cache_disk_list(d, info, 2), 1);
    assert_string_equal(info[0].name, "");
    cache_disk_close(d);
}

static void it_survives_closing_and_opening_again(void **state)
{
    struct fixture *f = *state;
    struct text t = text_of("patient-7", 1, 4);
    struct cache_disk *d = open_with(&f->options, 1);
    for (int i = 0; i < t.n; i++)
        assert_true(put_page(d, &t, i));
    assert_true(put_state(d, &t, 3));
    cache_disk_close(d); /* without a flush: closing writes what is queued */
    for (int again = 0; again < 2; again++) {
        d = open_with(&f->options, 1);
        assert_true(cache_disk_has(d, t.ns, &t.keys[0], false));
        assert_true(cache_disk_has(d, t.ns, &t.keys[3], true));
        assert_false(cache_disk_has(d, t.ns, &t.keys[3], false) && cache_disk_has(d, t.ns, &t.keys[2], true));
        assert_int_equal(read_text(d, &t), 4);
        assert_int_equal(cache_disk_stats(d).files, 5);
        cache_disk_close(d);
    }
}

static void a_hit_is_the_deepest_state_that_all_pages_lead_to(void **state)
{
    struct fixture *f = *state;
    struct cache_disk *d = open_with(&f->options, 1);
    struct text t = text_of("p", 1, 8);
    struct cache_image image;
    for (int i = 0; i < 6; i++)
        put_page(d, &t, i);
    cache_disk_flush(d);
    assert_false(
        cache_disk_read(d, t.ns, &(struct cache_text){.keys = t.keys, .ids = t.ids, .n = t.n}, 0, &image)); /* pages alone are nothing to land on */
    assert_non_null(strstr(image.reason, "no state"));
    put_state(d, &t, 1);
    cache_disk_flush(d);
    assert_int_equal(read_text(d, &t), 2);
    put_state(d, &t, 4);
    put_state(d, &t, 6); /* its page is not there */
    cache_disk_flush(d);
    assert_int_equal(read_text(d, &t), 5);
    assert_int_equal(read_text_from(d, &t, 4), 1);
    assert_int_equal(read_text_from(d, &t, 5), 0); /* nothing deeper */
    put_page(d, &t, 7);
    put_state(d, &t, 7);
    cache_disk_flush(d);
    assert_int_equal(read_text(d, &t), 5); /* a gap at 6 */
    assert_int_equal(read_text_from(d, &t, 7), 1);
    put_page(d, &t, 6);
    cache_disk_flush(d);
    assert_int_equal(read_text(d, &t), 8);
    assert_true(cache_disk_read(d, t.ns, &(struct cache_text){.keys = t.keys, .ids = t.ids, .n = 7}, 0,
                                &image)); /* a text that is a prefix of the stored one */
    assert_int_equal(image.n_pages, 7);
    cache_image_free(&image);
    cache_image_free(&image);
    cache_image_free(NULL);
    assert_false(cache_disk_read(d, t.ns, &(struct cache_text){.keys = t.keys, .ids = t.ids, .n = 8}, 8 * 64, &image));
    assert_false(cache_disk_read(d, t.ns, &(struct cache_text){.keys = t.keys, .ids = t.ids, .n = 8}, -1 * 64, &image));
    assert_false(cache_disk_read(d, t.ns, &(struct cache_text){.keys = t.keys, .ids = t.ids, .n = 0}, 0, &image));
    cache_disk_close(d);
}

/* The tail of `n` tokens behind page i of the text. */
static struct cache_tail tail_of(const struct text *t, int i, int n)
{
    return (struct cache_tail){.position = (i + 1) * 64 + n,
                               .bytes = PAGE_BYTES + STATE_BYTES + (size_t)n,
                               .key = cache_key_next(&t->keys[i], t->ids + (ptrdiff_t)(i + 1) * 64, n)};
}

static uint8_t *tail_bytes(const struct cache_tail *tail)
{
    uint8_t *data = malloc(tail->bytes);
    assert_non_null(data);
    for (size_t i = 0; i < tail->bytes; i++)
        data[i] = (uint8_t)(tail->key.bytes[i % 16] + i);
    return data;
}

static void store_tail(struct cache_disk *d, const struct text *t, const struct cache_tail *tail)
{
    assert_true(cache_disk_put_tail(d, t->ns, &tail->key, &t->keys[tail->position / 64 - 1], tail->position, tail_bytes(tail), tail->bytes));
    cache_disk_flush(d);
}

/* Reads from a position on: where the image ends, checked byte for byte. */
static int read_tails(struct cache_disk *d, const struct text *t, int n, const struct cache_tail *tails, int n_tails, int from)
{
    const struct cache_text text = {.keys = t->keys, .ids = t->ids, .n = n, .tails = tails, .n_tails = n_tails};
    struct cache_image image;
    int end = 0;
    if (cache_disk_read(d, t->ns, &text, from, &image)) {
        end = (int)cache_image_end(&image);
        assert_true(end > from);
        for (int i = 0; i < image.n_pages; i++) {
            uint8_t *right = contents(&t->keys[image.first_page + i], false);
            assert_memory_equal(image.pages + (size_t)i * PAGE_BYTES, right, PAGE_BYTES);
            free(right);
        }
        const struct cache_tail *tail = NULL;
        for (int i = 0; i < n_tails; i++)
            if (tails[i].position == end)
                tail = &tails[i];
        assert_int_equal(image.tail, end % 64);
        assert_int_equal(tail != NULL, image.tail != 0);
        uint8_t *right = tail ? tail_bytes(tail) : contents(&t->keys[end / 64 - 1], true);
        assert_int_equal(image.state_bytes, tail ? tail->bytes : STATE_BYTES);
        assert_memory_equal(image.state, right, image.state_bytes);
        free(right);
    }
    cache_image_free(&image);
    return end;
}

static void a_tail_is_read_back_where_it_is_the_deepest(void **state)
{
    struct fixture *f = *state;
    struct cache_disk *d = open_with(&f->options, 1);
    struct text t = text_of("p", 1, 6);
    const struct cache_tail tails[] = {tail_of(&t, 1, 7), tail_of(&t, 3, 20), tail_of(&t, 3, 63)};
    for (int i = 0; i < 5; i++)
        put_page(d, &t, i);
    put_state(d, &t, 1);
    cache_disk_flush(d);
    assert_int_equal(read_tails(d, &t, 5, tails, 3, 0), 2 * 64);
    store_tail(d, &t, &tails[0]);
    assert_int_equal(read_tails(d, &t, 5, tails, 3, 0), 2 * 64 + 7);
    store_tail(d, &t, &tails[1]);
    store_tail(d, &t, &tails[2]);
    assert_false(cache_disk_put_tail(d, t.ns, &tails[2].key, &t.keys[3], tails[2].position, tail_bytes(&tails[2]), tails[2].bytes)); /* it is there */
    assert_false(cache_disk_put_tail(d, t.ns, &t.keys[4], &t.keys[3], 5 * 64, contents(&t.keys[4], true), STATE_BYTES)); /* a grid line has no tail */
    for (int again = 0; again < 2; again++) {
        assert_int_equal(read_tails(d, &t, 5, tails, 3, 0), 4 * 64 + 63);
        assert_int_equal(read_tails(d, &t, 4, tails, 2, 0), 4 * 64 + 20);
        /* What memory has is not read: here all pages, and the shorter tail. */
        assert_int_equal(read_tails(d, &t, 5, tails, 3, 4 * 64), 4 * 64 + 63);
        assert_int_equal(read_tails(d, &t, 5, tails, 3, 4 * 64 + 20), 4 * 64 + 63);
        assert_int_equal(read_tails(d, &t, 5, tails, 3, 4 * 64 + 63), 0);
        assert_int_equal(read_tails(d, &t, 5, tails, 3, 3 * 64), 4 * 64 + 63);
        cache_disk_close(d);
        d = open_with(&f->options, 1);
    }
    /* A state on a grid line behind it is deeper. */
    put_state(d, &t, 4);
    cache_disk_flush(d);
    assert_int_equal(read_tails(d, &t, 5, tails, 3, 0), 5 * 64);
    cache_disk_close(d);
}

static void a_damaged_tail_or_page_before_it_makes_the_hit_shallower(void **state)
{
    struct fixture *f = *state;
    for (int what = 0; what < 3; what++) {
        struct cache_disk *d = open_with(&f->options, 1);
        static const char *const names[] = {"damaged-0", "damaged-1", "damaged-2"};
        struct text t = text_of(names[what], 1, 5);
        const struct cache_tail tails[] = {tail_of(&t, 1, 7), tail_of(&t, 3, 20)};
        for (int i = 0; i < 4; i++)
            put_page(d, &t, i);
        put_state(d, &t, 0);
        cache_disk_flush(d);
        store_tail(d, &t, &tails[0]);
        store_tail(d, &t, &tails[1]);
        if (what == 2) { /* longer than the caller wants: of another model, perhaps */
            struct cache_tail longer[] = {tails[0], tails[1]};
            longer[1].bytes++;
            assert_int_equal(read_tails(d, &t, 4, longer, 2, 0), 2 * 64 + 7);
        } else {
            damage(key_path(f->dir, f->key_file, t.ns, what == 0 ? &tails[1].key : &t.keys[2], what == 0), 600);
            assert_int_equal(read_tails(d, &t, 4, tails, 2, 0), 2 * 64 + 7);
            damage(key_path(f->dir, f->key_file, t.ns, &tails[0].key, true), 600);
            assert_int_equal(read_tails(d, &t, 4, tails, 2, 0), 64);
        }
        assert_true(cache_disk_stats(d).bad_files > 0);
        cache_disk_close(d);
    }
}

static void a_model_without_states_lands_on_any_page(void **state)
{
    struct fixture *f = *state;
    struct cache_disk *d = open_with(&f->options, 1);
    struct cache_model m = model_number(1);
    m.state_bytes = 0;
    cache_disk_bind(d, &m);
    struct text t = text_of("p", 1, 5);
    for (int i = 0; i < 3; i++)
        put_page(d, &t, i);
    assert_false(put_state(d, &t, 2));
    cache_disk_flush(d);
    assert_int_equal(read_text(d, &t), 3);
    bool pages[5], st;
    cache_disk_missing(d, t.ns, t.keys, 5, pages, &st);
    assert_false(pages[0] || pages[1] || pages[2] || st);
    assert_true(pages[3] && pages[4]);
    cache_disk_close(d);
}

static void a_page_is_stored_once_however_many_texts_share_it(void **state)
{
    struct fixture *f = *state;
    struct cache_disk *d = open_with(&f->options, 1);
    struct cache_model m = model_number(1);
    struct text a = text_of("p", 1, 4), b = a;
    b.ids[3 * 64 + 5] ^= 1; /* they part in the last cell */
    text_keys(&b, &m);
    store_text(d, &a);
    assert_true(cache_disk_has(d, b.ns, &b.keys[2], false));
    assert_false(put_page(d, &b, 0));
    store_text(d, &b);
    assert_int_equal(cache_disk_stats(d).written, 5 + 2);
    assert_int_equal(read_text(d, &a), 4);
    assert_int_equal(read_text(d, &b), 4);
    cache_disk_close(d);
}

static void missing_names_what_is_worth_queueing_and_finds_room(void **state)
{
    struct fixture *f = *state;
    f->options.queue_bytes = 3 * PAGE_BYTES + STATE_BYTES;
    struct cache_disk *d = open_with(&f->options, 1);
    struct text t = text_of("p", 1, 6);
    bool pages[6], st;
    cache_disk_missing(d, t.ns, t.keys, 3, pages, &st);
    assert_true(pages[0] && pages[1] && pages[2] && st);
    cache_disk_missing(d, t.ns, t.keys, 6, pages, &st); /* room for five pages; a state without all its pages is no use */
    assert_true(pages[0] && pages[1] && pages[2] && pages[3] && pages[4]);
    assert_false(pages[5] || st);
    cache_disk_missing(d, t.ns, t.keys, 4, pages, &st); /* four pages, and then no room for the state */
    assert_true(pages[3]);
    assert_false(st);
    put_page(d, &t, 0);
    put_page(d, &t, 1);
    put_state(d, &t, 1);
    cache_disk_flush(d);
    cache_disk_missing(d, t.ns, t.keys, 2, pages, &st);
    assert_false(pages[0] || pages[1] || st);
    cache_disk_missing(d, t.ns, t.keys, 3, pages, &st);
    assert_true(!pages[0] && !pages[1] && pages[2] && st);
    cache_disk_missing(d, t.ns, t.keys, 0, pages, &st);
    assert_false(st);
    cache_disk_close(d);
}

static void nothing_is_taken_before_a_model_is_bound_or_at_a_wrong_position(void **state)
{
    struct fixture *f = *state;
    struct cache_disk *d;
    struct error err;
    struct text t = text_of("p", 1, 1);
    assert_int_equal(cache_disk_open(&d, &f->options, &err), 0);
    assert_false(put_page(d, &t, 0));
    assert_false(put_state(d, &t, 0));
    assert_int_equal(read_text(d, &t), 0);
    struct cache_model m = model_number(1);
    cache_disk_bind(d, &m);
    static const int wrong[] = {0, -64, 1, 63, 65};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        assert_false(cache_disk_put_page(d, "p", &t.keys[0], &t.root, wrong[i], t.ids, contents(&t.keys[0], false)));
        assert_false(cache_disk_put_state(d, "p", &t.keys[0], wrong[i], contents(&t.keys[0], true)));
    }
    assert_false(cache_disk_put_state(d, "p", &t.keys[0], 64, NULL));
    assert_true(put_page(d, &t, 0));
    assert_false(put_page(d, &t, 0)); /* queued or stored already */
    cache_disk_close(d);
    cache_disk_close(NULL);
}

static void another_model_finds_nothing_and_removes_nothing(void **state)
{
    struct fixture *f = *state;
    struct text t = text_of("p", 1, 3);
    struct cache_disk *d = open_with(&f->options, 1);
    store_text(d, &t);
    cache_disk_close(d);
    d = open_with(&f->options, 2);
    struct cache_model m = model_number(2);
    struct text same_words = text_make("p", &m, 1, 3);
    assert_int_equal(read_text(d, &same_words), 0);
    struct captured log = capture_log();
    assert_int_equal(read_text(d, &t), 0); /* even with the first model's keys */
    assert_int_equal(captured_lines(log, "another model"), 1);
    store_text(d, &same_words);
    assert_int_equal(read_text(d, &same_words), 3);
    cache_disk_close(d);
    d = open_with(&f->options, 1);
    assert_int_equal(read_text(d, &t), 3);
    cache_disk_close(d);
}

static void another_key_file_finds_nothing_removes_nothing_and_says_so_once(void **state)
{
    struct fixture *f = *state;
    struct text t = text_of("patient-7", 1, 3), u = text_of("patient-8", 2, 2);
    struct cache_disk *d = open_with(&f->options, 1);
    store_text(d, &t);
    store_text(d, &u);
    cache_disk_close(d);

    char other[PATH_BYTES];
    snprintf(other, sizeof other, "%s/other-key", f->base);
    write_file(other, "another forty bytes, which are no secret", 40, 0600);
    struct cache_disk_options o = f->options;
    for (int none = 0; none < 2; none++) {
        o.key_file = none ? NULL : other;
        struct captured log = capture_log();
        d = open_with(&o, 1);
        assert_int_equal(read_text(d, &t), 0);
        assert_int_equal(read_text(d, &u), 0);
        assert_int_equal(captured_lines(log, "2 namespaces"), 1);
        struct cache_namespace_info info[4];
        assert_int_equal(cache_disk_list(d, info, 4), 0);
        assert_int_equal(cache_disk_stats(d).foreign_namespaces, 2);
        assert_int_equal(cache_disk_stats(d).files, 4 + 3); /* they count for the budget */
        struct cache_removed removed;
        assert_int_equal(cache_disk_delete(d, t.ns, &removed, NULL), 0);
        assert_int_equal(removed.files, 0);
        cache_disk_close(d);
    }
    struct captured log = capture_log();
    d = open_with(&f->options, 1);
    assert_int_equal(read_text(d, &t), 3);
    assert_int_equal(read_text(d, &u), 2);
    captured_nothing(log);
    cache_disk_close(d);
}

static void files_from_before_there_was_a_key_are_not_read_but_listed_and_deleted(void **state)
{
    struct fixture *f = *state;
    struct text t = text_of("patient-7", 1, 3), u = text_of("patient-7", 2, 2);
    struct cache_disk_options clear = f->options;
    clear.key_file = NULL;
    struct cache_disk *d = open_with(&clear, 1);
    store_text(d, &t);
    cache_disk_close(d);
    struct captured log = capture_log();
    d = open_with(&f->options, 1);
    assert_int_equal(captured_lines(log, "not encrypted"), 1);
    assert_int_equal(read_text(d, &t), 0);
    struct cache_namespace_info info[4];
    assert_int_equal(cache_disk_list(d, info, 4), 1);
    assert_int_equal(info[0].files, 4);
    store_text(d, &u);
    assert_int_equal(read_text(d, &u), 2);
    assert_int_equal(cache_disk_list(d, info, 4), 1); /* both folders are one namespace */
    assert_string_equal(info[0].name, "patient-7");
    assert_int_equal(info[0].files, 4 + 3);
    struct cache_removed removed;
    assert_int_equal(cache_disk_delete(d, "patient-7", &removed, NULL), 0);
    assert_int_equal(removed.files, 4 + 3);
    assert_int_equal(count_names(f->dir), 0);
    cache_disk_close(d);
}

/* ---- damage ---- */

static void a_bad_file_is_a_miss_one_line_and_goes_and_the_hit_is_shallower(void **state)
{
    struct fixture *f = *state;
    struct cache_disk *d = open_with(&f->options, 1);
    struct text t = text_of("p", 1, 5);
    store_text(d, &t);
    put_state(d, &t, 1);
    put_state(d, &t, 2);
    cache_disk_flush(d);
    struct {
        int page;
        bool state;
        size_t at;
        int left; /* pages of the hit afterwards */
    } steps[] = {{4, true, 600, 3}, {2, false, 130, 2}, {1, true, 3, 1000}};
    steps[2].left = 0;
    for (int i = 0; i < 3; i++) {
        const char *path = file_path(f->dir, f->key_file, &t, steps[i].page, steps[i].state);
        damage(path, steps[i].at);
        struct captured log = capture_log();
        assert_int_equal(read_text(d, &t), steps[i].left);
        assert_int_equal(read_text(d, &t), steps[i].left);
        assert_int_equal(captured_lines(log, "prefix cache"), 1);
        assert_int_equal(cache_disk_stats(d).bad_files, i + 1);
        assert_false(cache_disk_has(d, t.ns, &t.keys[steps[i].page], steps[i].state));
        assert_false(exists(path));
    }
    store_text(d, &t);
    assert_int_equal(read_text(d, &t), 5);
    cache_disk_close(d);
}

static void what_stands_in_a_files_place_is_a_miss_and_storing_goes_on(void **state)
{
    struct fixture *f = *state;
    for (int kind = 0; kind < 6; kind++) {
        struct text t = text_of("p", 100 + (unsigned)kind, 2);
        for (int restart = 0; restart < 2; restart++) {
            struct cache_disk *d = open_with(&f->options, 1);
            store_text(d, &t);
            const char *path = file_path(f->dir, f->key_file, &t, 1, false);
            if (restart)
                cache_disk_close(d);
            if (kind != 4) /* taken away */
                assert_int_equal(unlink(path), 0);
            if (kind == 1)
                assert_int_equal(symlink(file_path(f->dir, f->key_file, &t, 0, false), path), 0);
            if (kind == 2)
                assert_int_equal(mkfifo(path, 0600), 0);
            if (kind == 3)
                assert_int_equal(mkdir(path, 0700), 0);
            if (kind == 4)
                assert_int_equal(chmod(path, 0666), 0);
            if (kind == 5)
                write_file(path, "", 0, 0600);
            struct captured log = capture_log();
            if (restart)
                d = open_with(&f->options, 1);
            assert_int_equal(read_text(d, &t), 0);
            assert_int_equal(captured_lines(log, "prefix cache"), kind ? 1 : 0);
            log = capture_log();
            store_text(d, &t);
            assert_int_equal(read_text(d, &t), kind == 3 ? 0 : 2);
            assert_true(captured_lines(log, "prefix cache") <= (kind == 3 ? 1 : 0));
            cache_disk_close(d);
            if (kind == 3)
                assert_int_equal(rmdir(path), 0); /* a folder is nobody's to remove */
        }
    }
}

static void other_peoples_files_are_left_alone(void **state)
{
    struct fixture *f = *state;
    struct text t = text_of("p", 1, 2);
    struct cache_disk *d = open_with(&f->options, 1);
    store_text(d, &t);
    cache_disk_close(d);
    char space[PATH_BYTES];
    snprintf(space, sizeof space, "%s", space_path(f->dir, f->key_file, "p"));
    static const char *const junk[] = {"notes.txt",  "page", ".page",     "x.state", "0123456789abcdef0123456789abcdef.page.bak",
                                       "tmp.backup", "core", "namespace2"};
    enum { N = sizeof junk / sizeof junk[0] };
    for (int i = 0; i < N; i++) {
        write_file(path_in(space, junk[i]), "mine", 4, 0644);
        write_file(path_in(f->dir, junk[i]), "mine", 4, 0644);
    }
    static const char *const folders[] = {"lost+found", "ns=..", "ns=a b", "enc=xyz", "NS=p", "ns", "enc=0123456789abcdef0123456789abcdeF"};
    for (size_t i = 0; i < sizeof folders / sizeof folders[0]; i++) {
        assert_int_equal(mkdir(path_in(f->dir, folders[i]), 0755), 0);
        write_file(path_in(path_in(f->dir, folders[i]), "tmp.0000000000000001"), "mine", 4, 0644);
    }
    struct captured log = capture_log();
    d = open_with(&f->options, 1);
    assert_int_equal(read_text(d, &t), 2);
    captured_nothing(log);
    struct cache_removed removed;
    assert_int_equal(cache_disk_delete(d, "p", &removed, NULL), 0);
    assert_int_equal(removed.files, 3);
    cache_disk_close(d);
    assert_int_equal(count_names(space), N); /* the folder stays for their sake */
    for (int i = 0; i < N; i++)
        assert_true(exists(path_in(space, junk[i])) && exists(path_in(f->dir, junk[i])));
    for (size_t i = 0; i < sizeof folders / sizeof folders[0]; i++)
        assert_true(exists(path_in(path_in(f->dir, folders[i]), "tmp.0000000000000001")));
}

static void what_an_interrupted_writer_left_is_removed_at_the_start(void **state)
{
    struct fixture *f = *state;
    struct text t = text_of("p", 1, 2);
    struct cache_disk *d = open_with(&f->options, 1);
    store_text(d, &t);
    cache_disk_close(d);
    char space[PATH_BYTES];
    snprintf(space, sizeof space, "%s", space_path(f->dir, f->key_file, "p"));
    int before = count_names(space);
    write_file(path_in(space, "tmp.0000000000000003"), "half a page", 11, 0600);
    write_file(path_in(space, "tmp.00000000000000ff"), "", 0, 0600);
    d = open_with(&f->options, 1);
    assert_int_equal(count_names(space), before);
    assert_int_equal(read_text(d, &t), 2);
    cache_disk_close(d);
}

static void a_folder_of_a_namespace_that_is_a_link_or_open_to_others_is_not_used(void **state)
{
    struct fixture *f = *state;
    struct text t = text_of("p", 1, 2), u = text_of("q", 2, 2);
    char elsewhere[PATH_BYTES], space[PATH_BYTES];
    snprintf(elsewhere, sizeof elsewhere, "%s", path_in(f->base, "elsewhere"));
    snprintf(space, sizeof space, "%s", space_path(f->dir, f->key_file, "p"));
    assert_int_equal(mkdir(f->dir, 0700), 0);
    assert_int_equal(mkdir(elsewhere, 0700), 0);
    assert_int_equal(symlink(elsewhere, space), 0);
    for (int open_to_others = 0; open_to_others < 2; open_to_others++) {
        struct captured log = capture_log();
        struct cache_disk *d = open_with(&f->options, 1);
        store_text(d, &t);
        assert_int_equal(read_text(d, &t), 0);
        assert_int_equal(captured_lines(log, "prefix cache"), 2); /* at the start, and at the first write */
        struct cache_removed removed;
        struct error err = {{0}};
        assert_int_equal(cache_disk_delete(d, "p", &removed, &err), -1); /* never a false "all gone" */
        assert_non_null(strstr(err.text, "removed"));
        store_text(d, &u);
        assert_int_equal(read_text(d, &u), 2);
        assert_int_equal(cache_disk_stats(d).write_errors, 3);
        cache_disk_close(d);
        assert_int_equal(count_names(elsewhere), 0);
        if (!open_to_others) {
            assert_int_equal(unlink(space), 0);
            assert_int_equal(mkdir(space, 0700), 0);
            assert_int_equal(chmod(space, 0755), 0);
        }
    }
    assert_int_equal(count_names(space), 0);
}

/* ---- privacy ---- */

static int check_private(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)ftw;
    if ((st->st_mode & 07777) != (type == FTW_D ? 0700 : 0600))
        fail_msg("%s: mode %o", path, st->st_mode & 07777);
    return 0;
}

static void everything_is_private_whatever_the_umask(void **state)
{
    struct fixture *f = *state;
    static const mode_t masks[] = {0, 0777, 022, 0277};
    const mode_t before = umask(0);
    for (size_t i = 0; i < sizeof masks / sizeof masks[0]; i++) {
        char name[16];
        snprintf(name, sizeof name, "umask%zu/deep", i);
        char *dir = strdup(path_in(f->base, name));
        struct cache_disk_options o = f->options;
        o.dir = dir;
        struct text t = text_of("p", 1, 2);
        umask(masks[i]);
        struct cache_disk *d = open_with(&o, 1);
        store_text(d, &t);
        assert_int_equal(read_text(d, &t), 2);
        cache_disk_close(d);
        umask(0);
        assert_int_equal(nftw(dir, check_private, 8, FTW_PHYS), 0);
        free(dir);
    }
    umask(before);
}

static const char secret_name[] = "Jane-Roe.1970";

static int check_silent(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st;
    (void)ftw;
    if (strstr(path, secret_name))
        fail_msg("the folder's name tells: %s", path);
    if (type != FTW_F)
        return 0;
    struct text t = text_of(secret_name, 1, 2);
    size_t n;
    uint8_t *data = read_whole(path, &n);
    if (memmem(data, n, secret_name, 8))
        fail_msg("%s holds the namespace's name", path);
    for (int i = 0; i < t.n; i++) {
        uint8_t *page = contents(&t.keys[i], false);
        char hex[33];
        if (memmem(data, n, &t.ids[i * 64], 16) || memmem(data, n, page + 64, 16) || memmem(data, n, t.keys[i].bytes, 16))
            fail_msg("%s holds text in clear", path);
        sodium_bin2hex(hex, sizeof hex, t.keys[i].bytes, 16);
        if (strstr(path, hex)) /* a key can be computed by who guesses the text */
            fail_msg("%s: its name is a key in clear", path);
        free(page);
    }
    free(data);
    return 0;
}

static void with_a_key_file_nothing_on_disk_tells_of_text_or_names(void **state)
{
    struct fixture *f = *state;
    struct text t = text_of(secret_name, 1, 2);
    struct cache_disk *d = open_with(&f->options, 1);
    store_text(d, &t);
    cache_disk_close(d);
    d = open_with(&f->options, 1);
    struct cache_namespace_info info[1];
    assert_int_equal(cache_disk_list(d, info, 1), 1); /* the cache itself knows */
    assert_string_equal(info[0].name, secret_name);
    cache_disk_close(d);
    assert_int_equal(nftw(f->dir, check_silent, 8, FTW_PHYS), 0);
}

static void a_damaged_name_file_costs_the_name_only_and_is_written_again(void **state)
{
    struct fixture *f = *state;
    struct text t = text_of("patient-7", 1, 2), u = text_of("patient-7", 2, 1);
    struct cache_disk *d = open_with(&f->options, 1);
    store_text(d, &t);
    cache_disk_close(d);
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "%s", path_in(space_path(f->dir, f->key_file, t.ns), CACHE_NAME_FILE));
    write_file(path, "x", 1, 0600);
    struct cache_namespace_info info[1];
    struct captured log = capture_log();
    d = open_with(&f->options, 1);
    assert_int_equal(captured_lines(log, "1 namespaces"), 1);
    assert_int_equal(cache_disk_list(d, info, 1), 0);
    assert_int_equal(read_text(d, &t), 2);
    store_text(d, &u);
    assert_int_equal(cache_disk_list(d, info, 1), 1);
    cache_disk_close(d);
    d = open_with(&f->options, 1);
    assert_int_equal(cache_disk_list(d, info, 1), 1);
    assert_string_equal(info[0].name, "patient-7");
    assert_int_equal(info[0].files, 5);
    cache_disk_close(d);
}

static void a_key_file_that_is_short_long_or_open_to_others_is_refused(void **state)
{
    struct fixture *f = *state;
    char bytes[5000];
    memset(bytes, 'k', sizeof bytes);
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "%s/a-key", f->base);
    struct cache_disk_options o = f->options;
    o.key_file = path;
    static const struct {
        size_t n;
        unsigned mode;
        const char *says; /* NULL: taken */
    } cases[] = {
        {0, 0600, "0 bytes"},    {31, 0600, "31 bytes"}, {32, 0600, NULL},        {4096, 0600, NULL},      {4097, 0600, "4097 bytes or more"},
        {5000, 0600, "or more"}, {32, 0400, NULL},       {32, 0640, "chmod 600"}, {32, 0604, "chmod 600"}, {32, 0602, "chmod 600"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct cache_disk *d;
        struct error err = {{0}};
        unlink(path);
        write_file(path, bytes, cases[i].n, cases[i].mode);
        int r = cache_disk_open(&d, &o, &err);
        assert_int_equal(r, cases[i].says ? -1 : 0);
        if (cases[i].says && (!strstr(err.text, cases[i].says) || !strstr(err.text, path)))
            fail_msg("%s", err.text);
        cache_disk_close(d);
    }
    struct cache_disk *d;
    struct error err = {{0}};
    unlink(path);
    assert_int_equal(cache_disk_open(&d, &o, &err), -1);
    assert_non_null(strstr(err.text, "No such file"));
    assert_int_equal(mkdir(path, 0700), 0);
    assert_int_equal(cache_disk_open(&d, &o, &err), -1);
    assert_non_null(strstr(err.text, "regular"));
    assert_int_equal(rmdir(path), 0);
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_int_equal(cache_disk_open(&d, &o, &err), -1); /* at once */
    assert_non_null(strstr(err.text, "regular"));
}

static void a_folder_that_cannot_serve_is_refused_with_a_reason(void **state)
{
    struct fixture *f = *state;
    struct cache_disk *d;
    struct error err = {{0}};
    struct cache_disk_options o = f->options;
    o.dir = "";
    assert_int_equal(cache_disk_open(&d, &o, &err), -1);
    assert_null(d);
    char path[PATH_BYTES];
    snprintf(path, sizeof path, "%s/file", f->base);
    write_file(path, "", 0, 0600);
    o.dir = path;
    assert_int_equal(cache_disk_open(&d, &o, &err), -1);
    assert_non_null(strstr(err.text, path));
    snprintf(path, sizeof path, "%s/file/below", f->base);
    assert_int_equal(cache_disk_open(&d, &o, &err), -1);
    assert_non_null(strstr(err.text, "Not a directory"));
    snprintf(path, sizeof path, "%s/open", f->base);
    assert_int_equal(mkdir(path, 0700), 0);
    assert_int_equal(chmod(path, 0750), 0);
    assert_int_equal(cache_disk_open(&d, &o, &err), -1);
    assert_non_null(strstr(err.text, "0700"));
    snprintf(path, sizeof path, "%s/a//b/c/", f->base);
    if (cache_disk_open(&d, &o, &err) < 0)
        fail_msg("%s", err.text);
    cache_disk_close(d);
    assert_int_equal(nftw(path_in(f->base, "a"), check_private, 8, FTW_PHYS), 0);
}

static void two_servers_never_share_a_folder(void **state)
{
    struct fixture *f = *state;
    struct cache_disk *d = open_with(&f->options, 1), *second;
    struct error err = {{0}};
    assert_int_equal(cache_disk_open(&second, &f->options, &err), -1);
    assert_non_null(strstr(err.text, "another server"));
    assert_non_null(strstr(err.text, f->dir));
    assert_null(second);
    struct text t = text_of("p", 1, 2);
    store_text(d, &t);
    assert_int_equal(read_text(d, &t), 2);
    cache_disk_close(d);
    d = open_with(&f->options, 1);
    cache_disk_close(d);
}

int main(void)
{
    static char yes[] = "encrypted";
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equal_text_makes_equal_keys_and_any_difference_other_ones),
        cmocka_unit_test(a_namespace_has_no_path_meaning),
        BOTH(an_invalid_namespace_touches_nothing),
        BOTH(what_was_stored_is_read_back_exactly),
        BOTH(the_default_namespace_is_one_of_its_own),
        BOTH(it_survives_closing_and_opening_again),
        BOTH(a_hit_is_the_deepest_state_that_all_pages_lead_to),
        BOTH(a_tail_is_read_back_where_it_is_the_deepest),
        BOTH(a_damaged_tail_or_page_before_it_makes_the_hit_shallower),
        PLAIN(a_model_without_states_lands_on_any_page),
        BOTH(a_page_is_stored_once_however_many_texts_share_it),
        PLAIN(missing_names_what_is_worth_queueing_and_finds_room),
        PLAIN(nothing_is_taken_before_a_model_is_bound_or_at_a_wrong_position),
        BOTH(another_model_finds_nothing_and_removes_nothing),
        ENCRYPTED(another_key_file_finds_nothing_removes_nothing_and_says_so_once),
        ENCRYPTED(files_from_before_there_was_a_key_are_not_read_but_listed_and_deleted),
        BOTH(a_bad_file_is_a_miss_one_line_and_goes_and_the_hit_is_shallower),
        BOTH(what_stands_in_a_files_place_is_a_miss_and_storing_goes_on),
        BOTH(other_peoples_files_are_left_alone),
        BOTH(what_an_interrupted_writer_left_is_removed_at_the_start),
        BOTH(a_folder_of_a_namespace_that_is_a_link_or_open_to_others_is_not_used),
        BOTH(everything_is_private_whatever_the_umask),
        ENCRYPTED(with_a_key_file_nothing_on_disk_tells_of_text_or_names),
        ENCRYPTED(a_damaged_name_file_costs_the_name_only_and_is_written_again),
        PLAIN(a_key_file_that_is_short_long_or_open_to_others_is_refused),
        PLAIN(a_folder_that_cannot_serve_is_refused_with_a_reason),
        PLAIN(two_servers_never_share_a_folder),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
