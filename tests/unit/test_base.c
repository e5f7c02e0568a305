#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/buf.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"

/* ---- buf ---- */

static void a_buffer_keeps_what_was_added_and_ends_with_nul(void **state)
{
    (void)state;
    struct buf b = BUF_INIT;
    char wanted[4096 * 3 + 1] = "";
    for (int i = 0; i < 4096; i++) {
        buf_putc(&b, 'a');
        buf_puts(&b, "b");
        buf_add(&b, "c", 1);
        memcpy(wanted + (size_t)i * 3, "abc", 3);
        assert_int_equal(b.data[b.len], '\0');
    }
    assert_int_equal(b.len, 4096 * 3);
    assert_string_equal(b.data, wanted);
    assert_false(b.failed);
    buf_free(&b);
    assert_null(b.data);
    assert_int_equal(b.len, 0);
}

static void a_buffer_holds_any_bytes_and_nothing(void **state)
{
    (void)state;
    struct buf b = BUF_INIT;
    assert_true(buf_add(&b, NULL, 0)); /* adding nothing gives an empty text, not NULL */
    assert_string_equal(b.data, "");
    assert_true(buf_add(&b, "a\0b", 3));
    assert_memory_equal(b.data, "a\0b", 4);
    assert_int_equal(b.len, 3);
    buf_free(&b);
}

static void printf_grows_the_buffer_to_fit(void **state)
{
    (void)state;
    struct buf b = BUF_INIT;
    buf_puts(&b, "<");
    assert_true(buf_printf(&b, "%0200d|%s", 7, "end"));
    assert_int_equal(b.len, 1 + 200 + 4);
    assert_string_equal(b.data + 198, "007|end");
    assert_true(buf_printf(&b, "%s", ""));
    assert_int_equal(b.len, 205);
    buf_free(&b);
}

static void dropping_the_front_keeps_the_rest(void **state)
{
    (void)state;
    struct buf b = BUF_INIT;
    buf_drop_front(&b, 3); /* an empty buffer has nothing to drop */
    buf_puts(&b, "hello");
    buf_drop_front(&b, 2);
    assert_string_equal(b.data, "llo");
    buf_drop_front(&b, 0);
    assert_string_equal(b.data, "llo");
    buf_drop_front(&b, 99);
    assert_string_equal(b.data, "");
    assert_int_equal(b.len, 0);
    buf_puts(&b, "again");
    buf_clear(&b);
    assert_string_equal(b.data, "");
    buf_free(&b);
}

static void running_out_of_memory_is_sticky_and_changes_nothing(void **state)
{
    (void)state;
    struct buf b = BUF_INIT;
    buf_puts(&b, "kept");
    assert_false(buf_reserve(&b, SIZE_MAX));
    assert_false(buf_reserve(&b, SIZE_MAX / 2));
    assert_true(b.failed);
    assert_false(buf_puts(&b, "more"));
    assert_false(buf_printf(&b, "%d", 1));
    buf_clear(&b);
    assert_true(b.failed);
    assert_false(buf_putc(&b, 'x'));
    assert_int_equal(b.len, 0);
    buf_free(&b);
    assert_false(b.failed);
}

/* ---- error ---- */

static void an_error_is_one_text_and_minus_one(void **state)
{
    (void)state;
    struct error err;
    assert_int_equal(error_set(&err, "port %d is taken", 80), -1);
    assert_string_equal(err.text, "port 80 is taken");
    assert_int_equal(error_prefix(&err, "server %s", "a"), -1);
    assert_string_equal(err.text, "server a: port 80 is taken");
    assert_int_equal(error_set(NULL, "nobody listens %d", 1), -1);
    assert_int_equal(error_prefix(NULL, "nobody"), -1);
}

/* A text of n bytes: k ASCII bytes, then three-byte characters. */
static void fill(char *out, size_t n, size_t k)
{
    memset(out, 'x', k);
    for (size_t i = k; i < n; i++)
        out[i] = "\xE2\x82\xAC"[(i - k) % 3];
    out[n] = '\0';
}

static void a_long_error_is_cut_between_characters(void **state)
{
    (void)state;
    struct error err;
    char text[700];
    size_t room = sizeof err.text - 1;
    for (size_t k = 0; k < 3; k++) {
        fill(text, 699, k);
        error_set(&err, "%s", text);
        assert_int_equal(strlen(err.text), k + (room - k) / 3 * 3);
        assert_memory_equal(err.text, text, strlen(err.text));
        /* Also when a prefix pushes it over the end. */
        fill(text, k + 498 / 3 * 3, k);
        error_set(&err, "%s", text);
        error_prefix(&err, "%s", "a prefix of thirty-odd bytes, so");
        assert_true(strlen(err.text) <= room && strlen(err.text) > room - 3);
        assert_int_equal((strlen(err.text) - strlen("a prefix of thirty-odd bytes, so: ") - k) % 3, 0);
    }
    /* A prefix that fills everything replaces the message. */
    fill(text, 699, 1);
    error_set(&err, "message");
    error_prefix(&err, "%s", text);
    assert_true(strlen(err.text) <= room);
    assert_int_equal(err.text[0], 'x');
    assert_null(strstr(err.text, "message"));
}

/* ---- alloc ---- */

/* AddressSanitizer asks this: a refused allocation gives NULL there too, instead of ending the program. */
const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
    return "allocator_may_return_null=1";
}

static void allocation_checks_the_product_and_gives_zeroes(void **state)
{
    (void)state;
    volatile size_t huge = SIZE_MAX / 2;
    assert_null(alloc_array(huge, 3));
    assert_null(alloc_lines(huge, 3));
    assert_null(alloc_lines(SIZE_MAX, 1));
    uint8_t *a = alloc_array(1000, 3);
    assert_non_null(a);
    for (size_t i = 0; i < 3000; i++)
        assert_int_equal(a[i], 0);
    free(a);
    static const size_t empty[][2] = {{0, 8}, {8, 0}, {0, 0}};
    for (size_t i = 0; i < 3; i++) {
        void *p = alloc_array(empty[i][0], empty[i][1]), *q = alloc_lines(empty[i][0], empty[i][1]);
        assert_non_null(p);
        assert_non_null(q);
        free(p);
        free(q);
    }
}

static void lines_start_on_a_cache_line_and_fill_whole_ones(void **state)
{
    (void)state;
    for (size_t n = 1; n < 200; n += 7) {
        uint8_t *p = alloc_lines(n, 1);
        assert_non_null(p);
        assert_int_equal((uintptr_t)p % 64, 0);
        size_t whole = (n + 63) / 64 * 64;
        for (size_t i = 0; i < whole; i++)
            assert_int_equal(p[i], 0);
        free(p);
    }
}

static void growing_keeps_the_elements_or_changes_nothing(void **state)
{
    (void)state;
    uint32_t *a = NULL;
    size_t cap = 0;
    for (uint32_t i = 0; i < 1000; i++) {
        assert_int_equal(alloc_grow(&a, &cap, i + 1, sizeof *a), 0);
        assert_true(cap > i);
        a[i] = i;
    }
    for (uint32_t i = 0; i < 1000; i++)
        assert_int_equal(a[i], i);
    uint32_t *before = a;
    size_t cap_before = cap;
    assert_int_equal(alloc_grow(&a, &cap, SIZE_MAX, sizeof *a), -1);
    assert_int_equal(alloc_grow(&a, &cap, SIZE_MAX / 4, sizeof *a), -1);
    assert_ptr_equal(a, before);
    assert_int_equal(cap, cap_before);
    free(a);
}

static void text_is_copied_with_an_end(void **state)
{
    (void)state;
    char *p = alloc_text("abcdef", 3);
    assert_string_equal(p, "abc");
    free(p);
    p = alloc_text(NULL, 0);
    assert_string_equal(p, "");
    free(p);
    assert_null(alloc_text("x", SIZE_MAX));
}

/* ---- clock ---- */

static void the_clock_never_goes_back(void **state)
{
    (void)state;
    uint64_t last = clock_ns();
    for (int i = 0; i < 1000; i++) {
        uint64_t now = clock_ns();
        assert_true(now >= last);
        last = now;
    }
    usleep(2000);
    assert_true(clock_ns() - last >= 2000000);
}

/* ---- log ---- */

/* Runs `act` with standard error going into `out` [room], as a text. */
static void capture(void (*act)(void), char *out, size_t room)
{
    FILE *file = tmpfile();
    assert_non_null(file);
    int saved = dup(STDERR_FILENO);
    assert_true(saved >= 0);
    assert_true(dup2(fileno(file), STDERR_FILENO) >= 0);
    act();
    assert_true(dup2(saved, STDERR_FILENO) >= 0);
    close(saved);
    rewind(file);
    size_t n = fread(out, 1, room - 1, file);
    out[n] = '\0';
    fclose(file);
}

static size_t lines_in(const char *text)
{
    size_t n = 0;
    for (; *text; text++)
        n += *text == '\n';
    return n;
}

static void log_hostile_text(void)
{
    log_info("key %s end", "a\nb\r\x1b[2J\x7f\tc \xC3\xA9");
}

static void a_client_cannot_forge_a_log_line_or_move_the_cursor(void **state)
{
    (void)state;
    char text[2048];
    capture(log_hostile_text, text, sizeof text);
    assert_int_equal(lines_in(text), 1);
    assert_non_null(strstr(text, " info  key a\\x0ab\\x0d\\x1b[2J\\x7f\\x09c \xC3\xA9 end\n"));
    for (const char *p = text; p[1]; p++)
        assert_true((unsigned char)*p >= 0x20 && *p != 0x7F);
}

static void log_all_levels(void)
{
    log_error("one");
    log_warn("two");
    log_info("three");
    log_debug("four");
}

static void the_level_decides_what_is_logged(void **state)
{
    (void)state;
    char text[2048];
    static const enum log_level levels[] = {LOG_ERROR, LOG_WARN, LOG_INFO, LOG_DEBUG};
    for (size_t i = 0; i < 4; i++) {
        log_set_level(levels[i]);
        capture(log_all_levels, text, sizeof text);
        assert_int_equal(lines_in(text), i + 1);
    }
    log_set_level(LOG_INFO);
    assert_non_null(strstr(text, " error one\n"));
    assert_non_null(strstr(text, " debug four\n"));
}

static void log_a_long_text(void)
{
    char text[5000];
    memset(text, '\n', sizeof text - 1); /* the worst case: four bytes for each */
    text[sizeof text - 1] = '\0';
    log_error("%s", text);
}

static void a_long_line_is_cut_and_still_one_line(void **state)
{
    (void)state;
    char text[16384];
    capture(log_a_long_text, text, sizeof text);
    assert_int_equal(lines_in(text), 1);
    assert_true(strlen(text) > 3000 && strlen(text) < 5000);
}

static void *log_a_hundred(void *arg)
{
    for (int i = 0; i < 100; i++)
        log_info("thread %s says something of a certain length", (const char *)arg);
    return NULL;
}

static void log_from_threads(void)
{
    static char names[4][2] = {"a", "b", "c", "d"};
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, log_a_hundred, names[i]), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
}

static void lines_of_several_threads_do_not_mix(void **state)
{
    (void)state;
    static char text[65536];
    capture(log_from_threads, text, sizeof text);
    assert_int_equal(lines_in(text), 400);
    size_t whole = 0;
    for (const char *p = text; (p = strstr(p, "thread ")); p++)
        whole += strncmp(p + 8, " says something of a certain length\n", 36) == 0;
    assert_int_equal(whole, 400);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_buffer_keeps_what_was_added_and_ends_with_nul),
        cmocka_unit_test(a_buffer_holds_any_bytes_and_nothing),
        cmocka_unit_test(printf_grows_the_buffer_to_fit),
        cmocka_unit_test(dropping_the_front_keeps_the_rest),
        cmocka_unit_test(running_out_of_memory_is_sticky_and_changes_nothing),
        cmocka_unit_test(an_error_is_one_text_and_minus_one),
        cmocka_unit_test(a_long_error_is_cut_between_characters),
        cmocka_unit_test(allocation_checks_the_product_and_gives_zeroes),
        cmocka_unit_test(lines_start_on_a_cache_line_and_fill_whole_ones),
        cmocka_unit_test(growing_keeps_the_elements_or_changes_nothing),
        cmocka_unit_test(text_is_copied_with_an_end),
        cmocka_unit_test(the_clock_never_goes_back),
        cmocka_unit_test(a_client_cannot_forge_a_log_line_or_move_the_cursor),
        cmocka_unit_test(the_level_decides_what_is_logged),
        cmocka_unit_test(a_long_line_is_cut_and_still_one_line),
        cmocka_unit_test(lines_of_several_threads_do_not_mix),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
