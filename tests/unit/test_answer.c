/* api/answer.c: what a client sees of an answer as it grows. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/answer.h"
#include "engine/utf8.h"

/* What came out of a whole answer. */
struct result {
    struct buf reasoning, content;
    bool stopped;
};

static void result_free(struct result *r)
{
    buf_free(&r->reasoning);
    buf_free(&r->content);
}

static const char *text_of(const struct buf *b)
{
    return b->data ? b->data : "";
}

enum { PLAIN, IN_REASONING, MAY_REASON };

static struct answer *open_answer(int mode, const char *const *stop)
{
    struct text stops[CHAT_MAX_STOP];
    struct answer_options options = {.stop = stops, .in_reasoning = mode == IN_REASONING, .may_reason = mode == MAY_REASON};
    char *copies[CHAT_MAX_STOP];
    for (size_t i = 0; stop && stop[i]; i++) {
        copies[i] = strdup(stop[i]);
        assert_non_null(copies[i]);
        stops[options.n_stop++] = (struct text){copies[i], strlen(copies[i])};
    }
    struct answer *a = answer_new(&options);
    assert_non_null(a);
    for (size_t i = 0; i < options.n_stop; i++)
        free(copies[i]); /* the answer has its own */
    return a;
}

static void assert_valid_utf8(const struct buf *b)
{
    for (size_t at = 0; at < b->len;) {
        uint32_t code;
        size_t used;
        assert_int_equal(utf8_decode(b->data + at, b->len - at, &code, &used), UTF8_OK);
        at += used;
    }
}

/* Feeds pieces (NULL-terminated) as ordinary tokens. */
static struct result feed(int mode, const char *const *stop, const char *const *pieces)
{
    struct answer *a = open_answer(mode, stop);
    struct result r = {0};
    for (size_t i = 0; pieces[i] && !r.stopped; i++) {
        r.stopped = answer_add(a, TOKEN_NORMAL, pieces[i], strlen(pieces[i]), &r.reasoning, &r.content);
        assert_valid_utf8(&r.reasoning);
        assert_valid_utf8(&r.content);
    }
    answer_end(a, &r.reasoning, &r.content);
    assert_false(answer_out_of_memory(a));
    answer_free(a);
    return r;
}

#define PIECES(...) ((const char *const[]){__VA_ARGS__, NULL})

static void expect(struct result r, const char *reasoning, const char *content, bool stopped)
{
    assert_string_equal(text_of(&r.reasoning), reasoning);
    assert_string_equal(text_of(&r.content), content);
    assert_int_equal(r.stopped, stopped);
    result_free(&r);
}

static void a_character_split_over_tokens_is_never_cut(void **state)
{
    (void)state;
    expect(feed(PLAIN, NULL, PIECES("na\xC3", "\xAFve \xF0\x9F", "\x99", "\x82!")), "", "na\xC3\xAFve \xF0\x9F\x99\x82!", false);
}

static void an_unfinished_character_at_the_end_becomes_a_replacement(void **state)
{
    (void)state;
    expect(feed(PLAIN, NULL, PIECES("ab\xF0\x9F\x99")), "", "ab\xEF\xBF\xBD", false);
    expect(feed(PLAIN, NULL, PIECES("a\xFF", "b")), "",
           "a\xEF\xBF\xBD"
           "b",
           false);
    expect(feed(IN_REASONING, NULL, PIECES("ab\xC3")), "ab\xEF\xBF\xBD", "", false);
}

static void control_tokens_are_dropped_and_user_defined_ones_are_text(void **state)
{
    (void)state;
    struct answer *a = open_answer(PLAIN, NULL);
    struct result r = {0};
    assert_false(answer_add(a, TOKEN_NORMAL, "x", 1, &r.reasoning, &r.content));
    assert_false(answer_add(a, TOKEN_CONTROL, "<|im_end|>", 10, &r.reasoning, &r.content));
    assert_false(answer_add(a, TOKEN_USER, "<tool_call>", 11, &r.reasoning, &r.content));
    answer_end(a, &r.reasoning, &r.content);
    answer_free(a);
    expect(r, "", "x<tool_call>", false);
}

static void reasoning_ends_at_the_closing_tag_and_the_newlines_around_it_vanish(void **state)
{
    (void)state;
    expect(feed(IN_REASONING, NULL, PIECES("Two and two.\n", "</think>", "\n\n", "Four.\n")), "Two and two.", "Four.\n", false);
    expect(feed(IN_REASONING, NULL, PIECES("\n\n</think>\n\nFour.")), "", "Four.", false);
    expect(feed(IN_REASONING, NULL, PIECES("a\n\nb\n\n", "\n</think>", "x")), "a\n\nb", "x", false);
}

static void a_tag_in_ordinary_pieces_is_a_tag(void **state)
{
    (void)state;
    expect(feed(IN_REASONING, NULL, PIECES("hm", "</", "th", "ink", ">\n", "\nok")), "hm", "ok", false);
    expect(feed(IN_REASONING, NULL, PIECES("a<", "</thin", "k></think>b")), "a<", "</think>b", false);
    expect(feed(MAY_REASON, NULL, PIECES("<th", "ink>", "\nhm", "\n</think>", "\n\nok")), "hm", "ok", false);
}

static void what_only_looks_like_a_tag_stays_reasoning(void **state)
{
    (void)state;
    expect(feed(IN_REASONING, NULL, PIECES("if a < b and\n</thin>\n</", "b> then", "\n</think>y")), "if a < b and\n</thin>\n</b> then", "y", false);
}

static void reasoning_that_never_closes_is_all_reasoning(void **state)
{
    (void)state;
    expect(feed(IN_REASONING, NULL, PIECES("thinking\n", "</thi")), "thinking\n</thi", "", false);
    expect(feed(MAY_REASON, NULL, PIECES("<think>\nabc")), "abc", "", false);
}

static void qwen3_reasons_only_when_the_answer_begins_with_the_tag(void **state)
{
    (void)state;
    expect(feed(MAY_REASON, NULL, PIECES("Hello <think>x</think>")), "", "Hello <think>x</think>", false);
    expect(feed(MAY_REASON, NULL, PIECES("\n ", "<think>\nx\n</think>\n\ny")), "x", "y", false);
    expect(feed(MAY_REASON, NULL, PIECES("\n ", "<thin", "g>")), "", "\n <thing>", false);
    expect(feed(MAY_REASON, NULL, PIECES(" \n", "<th")), "", " \n<th", false);
    expect(feed(PLAIN, NULL, PIECES("<think>x</think>")), "", "<think>x</think>", false);
}

static void a_stop_string_split_over_tokens_never_leaks(void **state)
{
    (void)state;
    const char *const stop[] = {"END\xC3\xA9", NULL};
    struct answer *a = open_answer(PLAIN, stop);
    struct result r = {0};
    const char *const pieces[] = {"abc E", "N", "D\xC3", "\xA9 tail", NULL};
    for (size_t i = 0; i < 3; i++) {
        assert_false(answer_add(a, TOKEN_NORMAL, pieces[i], strlen(pieces[i]), &r.reasoning, &r.content));
        assert_string_equal(text_of(&r.content), "abc ");
    }
    assert_true(answer_add(a, TOKEN_NORMAL, pieces[3], strlen(pieces[3]), &r.reasoning, &r.content));
    assert_true(answer_add(a, TOKEN_NORMAL, "more", 4, &r.reasoning, &r.content)); /* it stays over */
    answer_end(a, &r.reasoning, &r.content);
    answer_free(a);
    r.stopped = true;
    expect(r, "", "abc ", true);
}

static void what_only_began_like_a_stop_string_is_handed_out(void **state)
{
    (void)state;
    expect(feed(PLAIN, PIECES("aab"), PIECES("aa", "ac", "aa")), "", "aaacaa", false);
    expect(feed(PLAIN, PIECES("aab"), PIECES("aa", "ab", "x")), "", "a", true);
}

static void the_stop_string_completed_first_wins(void **state)
{
    (void)state;
    /* "b" is complete while "abc" is not yet: the "a" before it is text. */
    expect(feed(PLAIN, PIECES("abc", "b"), PIECES("xabc")), "", "xa", true);
    /* Both end on the same byte: the longer one is cut out. */
    expect(feed(PLAIN, PIECES("c", "abc"), PIECES("xabc")), "", "x", true);
    expect(feed(PLAIN, PIECES("\n\n", "\n\n\n"), PIECES("x\n", "\n\n")), "", "x", true);
}

static void stop_strings_are_looked_for_in_content_only(void **state)
{
    (void)state;
    expect(feed(IN_REASONING, PIECES("stop", "\n\n"), PIECES("no stop\n\n here", "\n</think>\n\n", "go stop")), "no stop\n\n here", "go ", true);
    /* Not over the seam of reasoning and content either. */
    expect(feed(IN_REASONING, PIECES("ab"), PIECES("a</think>b")), "a", "b", false);
}

static void it_says_whether_the_next_token_is_reasoning(void **state)
{
    (void)state;
    struct answer *a = open_answer(IN_REASONING, NULL);
    struct result r = {0};
    assert_true(answer_in_reasoning(a));
    answer_add(a, TOKEN_NORMAL, "x", 1, &r.reasoning, &r.content);
    assert_true(answer_in_reasoning(a));
    answer_add(a, TOKEN_USER, "</think>", 8, &r.reasoning, &r.content);
    assert_false(answer_in_reasoning(a));
    answer_free(a);
    result_free(&r);
    a = open_answer(MAY_REASON, NULL);
    assert_false(answer_in_reasoning(a));
    answer_add(a, TOKEN_USER, "<think>", 7, &r.reasoning, &r.content);
    assert_true(answer_in_reasoning(a));
    answer_free(a);
    result_free(&r);
}

/* A small generator of its own: the same cases on every machine. */
static uint32_t next(uint64_t *seed)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*seed >> 33);
}

/* The first stop string to be completed in text, found the slow way; where it begins, or len. */
static size_t first_stop(const char *text, size_t len, const char *const *stop)
{
    for (size_t end = 1; end <= len; end++) {
        size_t longest = 0;
        for (size_t i = 0; stop[i]; i++) {
            size_t n = strlen(stop[i]);
            if (n <= end && n > longest && memcmp(text + end - n, stop[i], n) == 0)
                longest = n;
        }
        if (longest)
            return end - longest;
    }
    return len;
}

static void however_the_text_is_cut_into_tokens_the_result_is_the_same(void **state)
{
    (void)state;
    static const char *const words[] = {"a", "b",    "ab", "\n", "\n\n", "<", "</", "think>", "</think>", "<think>", "\xC5\x82", "\xF0\x9F\x99\x82",
                                        " ", "STOP", "ST", "OP", "\xFF"};
    static const char *const stop[] = {"STOP", "b\xC5\x82", "aab", "\xF0\x9F\x99\x82\xF0\x9F\x99\x82", "ab<", NULL};
    uint64_t seed = 7;
    int stopped = 0;
    for (int round = 0; round < 3000; round++) {
        struct buf built = BUF_INIT;
        buf_puts(&built, "");
        for (uint32_t i = 0, n = next(&seed) % 24; i < n; i++)
            buf_puts(&built, words[next(&seed) % (sizeof words / sizeof words[0])]);
        const char *text = built.data;
        size_t len = built.len;
        int mode = (int)(next(&seed) % 3);
        struct result whole = feed(mode, stop, (const char *const[]){text, NULL});
        for (int cut = 0; cut < 3; cut++) {
            struct answer *a = open_answer(mode, stop);
            struct result r = {0};
            for (size_t at = 0; at < len && !r.stopped;) {
                size_t n = 1 + next(&seed) % (cut ? 6 : 1);
                if (n > len - at)
                    n = len - at;
                size_t before = r.content.len;
                r.stopped = answer_add(a, TOKEN_NORMAL, text + at, n, &r.reasoning, &r.content);
                assert_true(r.content.len >= before);
                assert_valid_utf8(&r.content);
                assert_valid_utf8(&r.reasoning);
                at += n;
            }
            answer_end(a, &r.reasoning, &r.content);
            answer_free(a);
            assert_string_equal(text_of(&r.content), text_of(&whole.content));
            assert_string_equal(text_of(&r.reasoning), text_of(&whole.reasoning));
            result_free(&r);
        }
        /* No stop string in what was shown, and nothing missing before the first one. */
        assert_int_equal(first_stop(text_of(&whole.content), whole.content.len, stop), whole.content.len);
        if (mode == PLAIN && !strchr(text, '\xFF')) {
            size_t want = first_stop(text, len, stop);
            assert_int_equal(whole.content.len, want);
            assert_memory_equal(text_of(&whole.content), text, want);
        }
        stopped += whole.stopped;
        result_free(&whole);
        buf_free(&built);
    }
    assert_true(stopped > 300); /* the cases do exercise stop strings */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_character_split_over_tokens_is_never_cut),
        cmocka_unit_test(an_unfinished_character_at_the_end_becomes_a_replacement),
        cmocka_unit_test(control_tokens_are_dropped_and_user_defined_ones_are_text),
        cmocka_unit_test(reasoning_ends_at_the_closing_tag_and_the_newlines_around_it_vanish),
        cmocka_unit_test(a_tag_in_ordinary_pieces_is_a_tag),
        cmocka_unit_test(what_only_looks_like_a_tag_stays_reasoning),
        cmocka_unit_test(reasoning_that_never_closes_is_all_reasoning),
        cmocka_unit_test(qwen3_reasons_only_when_the_answer_begins_with_the_tag),
        cmocka_unit_test(a_stop_string_split_over_tokens_never_leaks),
        cmocka_unit_test(what_only_began_like_a_stop_string_is_handed_out),
        cmocka_unit_test(the_stop_string_completed_first_wins),
        cmocka_unit_test(stop_strings_are_looked_for_in_content_only),
        cmocka_unit_test(it_says_whether_the_next_token_is_reasoning),
        cmocka_unit_test(however_the_text_is_cut_into_tokens_the_result_is_the_same),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
