/* utf8_stream: text is valid UTF-8 at every point of the stream, and the whole is what a one-shot decoder gives. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistr.h>

#include "base/buf.h"
#include "engine/tokenizer.h"

#define R "\xEF\xBF\xBD" /* U+FFFD */

/* ---- an independent one-shot decoder: libunistring judges validity, brute force finds the maximal subparts */

static bool is_valid(const char *bytes, size_t len)
{
    return u8_check((const uint8_t *)bytes, len) == NULL;
}

/* Whether some bytes after these complete exactly one character. */
static bool can_become_character(const char *bytes, size_t len)
{
    static const char tails[] = {'\x80', '\x8F', '\x90', '\x9F', '\xA0', '\xBF'};
    unsigned lead = (unsigned char)bytes[0];
    size_t need = lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
    if (len > need)
        return false;
    char whole[4];
    memcpy(whole, bytes, len);
    for (size_t try = 0; try < 6 * 6 * 6; try++) {
        size_t digits = try;
        for (size_t i = len; i < need; i++, digits /= 6)
            whole[i] = tails[digits % 6];
        if (is_valid(whole, need))
            return true;
    }
    return false;
}

static void one_shot(const char *bytes, size_t len, struct buf *out)
{
    for (size_t at = 0; at < len;) {
        size_t n = 0;
        while (at + n < len && can_become_character(bytes + at, n + 1))
            n++;
        if (n > 0 && is_valid(bytes + at, n))
            buf_add(out, bytes + at, n);
        else
            buf_puts(out, R);
        at += n ? n : 1;
    }
}

/* ---- helpers */

/* Feeds bytes cut where the bits of `cuts` are set (bit i: after byte i), checking every intermediate state. */
static void feed(const char *bytes, size_t len, unsigned cuts, struct buf *out)
{
    struct utf8_stream s = {0};
    size_t begin = 0;
    for (size_t i = 0; i < len; i++) {
        if (i + 1 < len && !(cuts >> i & 1))
            continue;
        size_t before = out->len;
        utf8_stream_add(&s, bytes + begin, i + 1 - begin, out);
        begin = i + 1;
        assert_true(s.n_held <= 3);
        assert_true(out->len == before || is_valid(out->data, out->len));
        if (s.n_held)
            assert_true(can_become_character((const char *)s.held, s.n_held));
    }
    utf8_stream_end(&s, out);
    assert_int_equal(s.n_held, 0);
}

static void assert_same(const struct buf *got, const struct buf *want)
{
    assert_int_equal(got->len, want->len);
    if (want->len)
        assert_memory_equal(got->data, want->data, want->len);
}

/* ---- tests */

static void invalid_bytes_become_one_replacement_per_maximal_subpart(void **state)
{
    (void)state;
    static const struct {
        const char *bytes, *text; /* text as Python's bytes.decode("utf-8", "replace") gives it */
    } cases[] = {
        {"plain", "plain"},
        {"\xC3\xA9", "\xC3\xA9"},
        {"\xE2\x82\xAC", "\xE2\x82\xAC"},
        {"\xF0\x9F\x99\x82", "\xF0\x9F\x99\x82"},
        {"\x80", R},
        {"\xC0\xAF", R R},
        {"\xC3", R},
        {"\xC3(", R "("},
        {"\xE2\x82", R},
        {"\xE2\x82(", R "("},
        {"\xE2(\x82", R "(" R},
        {"\xE0\x80\x80", R R R},
        {"\xED\xA0\x80", R R R},
        {"\xED\x9F\xBF", "\xED\x9F\xBF"},
        {"\xF0\x9F\x99", R},
        {"\xF0\x9F\x99x", R "x"},
        {"\xF0\x80\x80\x80", R R R R},
        {"\xF4\x8F\xBF\xBF", "\xF4\x8F\xBF\xBF"},
        {"\xF4\x90\x80\x80", R R R R},
        {"\xF5\xFF\xFE", R R R},
        {"a\xF1\x80\x80\xE1\x80\xC2"
         "b\x80"
         "c\x80\xBF"
         "d",
         "a" R R R "b" R "c" R R "d"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct buf out = BUF_INIT;
        feed(cases[i].bytes, strlen(cases[i].bytes), 0, &out);
        assert_string_equal(out.data, cases[i].text);
        buf_free(&out);
    }
}

static void every_split_of_a_sequence_gives_the_one_shot_text(void **state)
{
    (void)state;
    static const char *const sequences[] = {
        "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x99\x82z",
        "\xF0\x9F\x99\x82\xF0\x9F\x98\x80",
        "\xE2\x82\xE2\x82\xAC",
        "\xF0\x9F\x99(\xC3\xA9",
        "\xF0\x9F\xF0\x9F\x99\x82\x82",
        "\xED\xA0\x80\xED\xB0\x80",
        "\xF4\x90\x80\x80\xC3",
        "\xC3\xC3\xA9\xA9\xFF\xFE",
        "\xE0\x9F\xBF\xE0\xA0\x80",
        "\xF0\x8F\xBF\xBF\xF1\x80\x80",
        "\xC0\x80\xC1\xBF\xC2\x80",
        "x\x80y\xBFz\xF8\x88\x80\x80\x80",
    };
    for (size_t i = 0; i < sizeof sequences / sizeof *sequences; i++) {
        size_t len = strlen(sequences[i]);
        assert_true(len <= 12);
        struct buf want = BUF_INIT, got = BUF_INIT;
        one_shot(sequences[i], len, &want);
        for (unsigned cuts = 0; cuts < 1u << (len - 1); cuts++) {
            buf_clear(&got);
            feed(sequences[i], len, cuts, &got);
            assert_same(&got, &want);
        }
        buf_free(&want);
        buf_free(&got);
    }
}

static void all_pairs_of_bytes_decode_as_one_shot_whole_and_split(void **state)
{
    (void)state;
    struct buf want = BUF_INIT, got = BUF_INIT;
    for (unsigned pair = 0; pair < 65536; pair++) {
        const char bytes[2] = {(char)(pair >> 8), (char)pair};
        buf_clear(&want);
        one_shot(bytes, 2, &want);
        for (unsigned cuts = 0; cuts < 2; cuts++) {
            buf_clear(&got);
            feed(bytes, 2, cuts, &got);
            assert_same(&got, &want);
        }
    }
    buf_free(&want);
    buf_free(&got);
}

static void sequences_around_every_boundary_of_the_encoding_decode_as_one_shot(void **state)
{
    (void)state;
    /* The bytes at which the grammar changes its mind, in all sequences of four. */
    static const unsigned char edge[] = {0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC1, 0xC2, 0xE0, 0xE1, 0xED, 0xF0, 0xF4, 0xF5};
    enum { N = sizeof edge };
    struct buf want = BUF_INIT, got = BUF_INIT;
    for (unsigned n = 0; n < N * N * N * N; n++) {
        const char bytes[4] = {(char)edge[n % N], (char)edge[n / N % N], (char)edge[n / N / N % N], (char)edge[n / N / N / N]};
        buf_clear(&want);
        buf_clear(&got);
        one_shot(bytes, 4, &want);
        feed(bytes, 4, n % 8, &got);
        assert_same(&got, &want);
    }
    buf_free(&want);
    buf_free(&got);
}

static void a_bad_byte_is_replaced_at_once_and_does_not_stall_the_stream(void **state)
{
    (void)state;
    struct utf8_stream s = {0};
    struct buf out = BUF_INIT;
    utf8_stream_add(&s, "\xFF", 1, &out);
    assert_string_equal(out.data, R);
    utf8_stream_add(&s, "\xE2\x82", 2, &out); /* could still become a character: held */
    assert_string_equal(out.data, R);
    assert_int_equal(s.n_held, 2);
    utf8_stream_add(&s, "x", 1, &out); /* it could not */
    assert_string_equal(out.data, R R "x");
    assert_int_equal(s.n_held, 0);
    utf8_stream_add(&s, "", 0, &out);
    utf8_stream_end(&s, &out);
    assert_string_equal(out.data, R R "x");
    buf_free(&out);
}

static void what_is_held_at_the_end_becomes_one_replacement(void **state)
{
    (void)state;
    struct utf8_stream s = {0};
    struct buf out = BUF_INIT;
    utf8_stream_add(&s, "ok\xF0\x9F\x99", 5, &out);
    assert_string_equal(out.data, "ok");
    utf8_stream_end(&s, &out);
    assert_string_equal(out.data, "ok" R);
    utf8_stream_end(&s, &out); /* and only once */
    assert_string_equal(out.data, "ok" R);
    utf8_stream_add(&s, "\x99\x82", 2, &out); /* nothing of the old character is remembered */
    assert_string_equal(out.data, "ok" R R R);
    buf_free(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(invalid_bytes_become_one_replacement_per_maximal_subpart),
        cmocka_unit_test(every_split_of_a_sequence_gives_the_one_shot_text),
        cmocka_unit_test(all_pairs_of_bytes_decode_as_one_shot_whole_and_split),
        cmocka_unit_test(sequences_around_every_boundary_of_the_encoding_decode_as_one_shot),
        cmocka_unit_test(a_bad_byte_is_replaced_at_once_and_does_not_stall_the_stream),
        cmocka_unit_test(what_is_held_at_the_end_becomes_one_replacement),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
