/* The counting of KV pages (engine/pages.h): a page is free exactly when nobody uses or keeps it. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>

#include "tests/unit/pages_fixture.h"

static void pages_come_from_the_backend_as_they_are_needed(void **state)
{
    (void)state;
    struct fixture f;
    fixture_open(&f, 40);
    assert_int_equal(pages_ready(&f.pool), 0);
    assert_int_equal(pages_prepare(&f.pool, 1, NULL), 0);
    assert_in_range(f.backend.reserved, 1, 39); /* some ahead, not all */
    assert_int_equal(pages_prepare(&f.pool, 40, NULL), 0);
    assert_int_equal(f.backend.reserved, 40);
    assert_int_equal(pages_ready(&f.pool), 40);
    bool seen[40] = {false};
    for (int i = 0; i < 40; i++) {
        const int32_t page = pages_take(&f.pool);
        assert_in_range(page, 0, 39);
        assert_false(seen[page]);
        seen[page] = true;
    }
    struct error err = {""};
    assert_int_equal(pages_prepare(&f.pool, 1, &err), -1);
    assert_true(err.text[0] != '\0');
    assert_int_equal(f.pool.n_running, 40);
    for (int i = 0; i < 40; i++)
        pages_leave(&f.pool, i);
    fixture_close(&f);
}

static void a_page_is_free_when_the_last_user_and_keeper_are_gone(void **state)
{
    (void)state;
    struct fixture f;
    fixture_open(&f, 4);
    assert_int_equal(pages_prepare(&f.pool, 4, NULL), 0);
    const int32_t page = pages_take(&f.pool);
    pages_use(&f.pool, page);
    pages_keep(&f.pool, page);
    pages_keep(&f.pool, page);
    expect_pages(&f, 1, 0, 3);
    pages_leave(&f.pool, page);
    expect_pages(&f, 1, 0, 3);
    assert_false(pages_idle(&f.pool, page));
    pages_leave(&f.pool, page);
    expect_pages(&f, 0, 1, 3);
    assert_true(pages_idle(&f.pool, page));
    pages_discard(&f.pool, page);
    expect_pages(&f, 0, 1, 3);
    pages_use(&f.pool, page); /* back in use before the last keeper leaves */
    expect_pages(&f, 1, 0, 3);
    pages_discard(&f.pool, page);
    expect_pages(&f, 1, 0, 3);
    pages_leave(&f.pool, page);
    expect_pages(&f, 0, 0, 4);
    fixture_close(&f);
}

static void a_backend_without_memory_changes_nothing(void **state)
{
    (void)state;
    struct fixture f;
    fixture_open(&f, 64);
    assert_int_equal(pages_prepare(&f.pool, 2, NULL), 0);
    const int ready = pages_ready(&f.pool);
    const int32_t page = pages_take(&f.pool);
    f.backend.full = true;
    struct error err = {""};
    assert_int_equal(pages_prepare(&f.pool, ready + 1, &err), -1);
    assert_non_null(strstr(err.text, "no memory for pages"));
    expect_pages(&f, 1, 0, ready - 1);
    assert_int_equal(pages_prepare(&f.pool, ready - 1, NULL), 0); /* what is there can still be had */
    f.backend.full = false;
    assert_int_equal(pages_prepare(&f.pool, 63, NULL), 0);
    pages_leave(&f.pool, page);
    expect_pages(&f, 0, 0, 64);
    fixture_close(&f);
}

static void memory_that_is_not_there_is_not_counted_on_again(void **state)
{
    (void)state;
    struct fixture f;
    fixture_open(&f, 64);
    assert_int_equal(pages_prepare(&f.pool, 20, NULL), 0);
    const int there = pages_ready(&f.pool);
    assert_int_equal(pages_prepare(&f.pool, 65, NULL), -1);
    assert_false(pages_settle(&f.pool, 65)); /* the total, not the memory */
    f.backend.full = true;
    assert_int_equal(pages_prepare(&f.pool, 64, NULL), -1);
    assert_true(pages_settle(&f.pool, 64));
    f.backend.full = false;
    assert_int_equal(pages_prepare(&f.pool, there + 1, NULL), -1);
    assert_int_equal(pages_prepare(&f.pool, there, NULL), 0);
    fixture_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pages_come_from_the_backend_as_they_are_needed),
        cmocka_unit_test(a_page_is_free_when_the_last_user_and_keeper_are_gone),
        cmocka_unit_test(a_backend_without_memory_changes_nothing),
        cmocka_unit_test(memory_that_is_not_there_is_not_counted_on_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
