/* Text to tokens: the ids the definition gives, that client text never becomes a control token, and that no text is too much. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "engine/tokenizer_split.h"
#include "tests/unit/tokenizer_checks.h"

#define R "\xEF\xBF\xBD" /* U+FFFD */

/* Far above what n log n needs, with sanitizers and on a busy machine; far below what n * n would take for a million bytes. */
enum { LIMIT_SECONDS = 30, MEGABYTE = 1 << 20 };

/* ---- helpers */

static struct tokenizer *open_tiny(void)
{
    struct gguf *g;
    struct tokenizer *t;
    struct error err;
    assert_int_equal(gguf_open(&g, "tests/data/tiny-qwen35-f32.gguf", &err), 0);
    assert_int_equal(tokenizer_open(&t, g, &err), 0);
    gguf_close(g);
    return t;
}

static void decode(const struct tokenizer *t, const struct token_list *ids, struct buf *out)
{
    buf_clear(out);
    for (size_t i = 0; i < ids->len; i++) {
        size_t len;
        const char *bytes = tokenizer_bytes(t, ids->ids[i], &len);
        assert_non_null(bytes);
        buf_add(out, bytes, len);
    }
}

static void assert_same_ids(const struct token_list *a, const struct token_list *b)
{
    assert_int_equal(a->len, b->len);
    if (a->len)
        assert_memory_equal(a->ids, b->ids, a->len * sizeof *a->ids);
}

static uint32_t next_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static void put_code_point(struct buf *b, uint32_t cp)
{
    if (cp < 0x80) {
        buf_putc(b, (char)cp);
    } else if (cp < 0x800) {
        buf_putc(b, (char)(0xC0 | cp >> 6));
        buf_putc(b, (char)(0x80 | (cp & 0x3F)));
    } else if (cp < 0x10000) {
        buf_putc(b, (char)(0xE0 | cp >> 12));
        buf_putc(b, (char)(0x80 | (cp >> 6 & 0x3F)));
        buf_putc(b, (char)(0x80 | (cp & 0x3F)));
    } else {
        buf_putc(b, (char)(0xF0 | cp >> 18));
        buf_putc(b, (char)(0x80 | (cp >> 12 & 0x3F)));
        buf_putc(b, (char)(0x80 | (cp >> 6 & 0x3F)));
        buf_putc(b, (char)(0x80 | (cp & 0x3F)));
    }
}

/* ---- pre-tokens */

static void pre_tokens_are_cut_as_the_patterns_say(void **state)
{
    (void)state;
    static const struct {
        const char *text, *qwen35, *qwen2; /* qwen2 NULL: the same */
    } cases[] = {
        {"it's I'LL x'RE y'vE 'dog", "it|'s| I|'LL| x|'RE| y|'vE| '|dog", NULL},
        {"'dog", "'d|og", NULL},
        {"'", "'", NULL},
        {"'l", "'l", NULL},
        {"x'", "x|'", NULL},
        {"12 x9", "1|2| x|9", NULL},
        {"½Ⅷ²x", "½|Ⅷ|²|x", NULL},
        {"a,b (c) ...\n\nd", "a|,b| (|c|)| ...\n\n|d", NULL},
        {"a  b", "a| | b", NULL},
        {"a   b", "a|  | b", NULL},
        {"a\t\tb", "a|\t|\tb", NULL},
        {"a \n b", "a| \n| b", NULL},
        {"a \n \n  b", "a| \n \n| | b", NULL},
        {"  ", "  ", NULL},
        {"a \r\n", "a| \r\n", NULL},
        {"\xC2\xA0\xC2\xA0x", "\xC2\xA0|\xC2\xA0x", NULL},
        {"a\xE2\x80\x8B"
         "b",
         "a|\xE2\x80\x8B"
         "b",
         NULL},                                                                      /* U+200B is no space */
        {"\xE0\xA4\xA8\xE0\xA4\xAE\xE0\xA4\xB8\xE0\xA5\x8D\xE0\xA4\xA4\xE0\xA5\x87", /* Devanagari with two marks */
         "\xE0\xA4\xA8\xE0\xA4\xAE\xE0\xA4\xB8\xE0\xA5\x8D\xE0\xA4\xA4\xE0\xA5\x87",
         "\xE0\xA4\xA8\xE0\xA4\xAE\xE0\xA4\xB8|\xE0\xA5\x8D\xE0\xA4\xA4|\xE0\xA5\x87"},
        {"e\xCC\x81x \xCC\x81 ", "e\xCC\x81x| \xCC\x81| ", "e|\xCC\x81x| \xCC\x81| "},
        {"'\xC5\xBF", "'\xC5\xBF", NULL}, /* U+017F is no s */
        {"日本語。テスト", "日本語|。テスト", NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (int pattern = SPLIT_QWEN2; pattern <= SPLIT_QWEN35; pattern++) {
            struct buf got = BUF_INIT;
            size_t len = strlen(cases[i].text);
            for (size_t at = 0; at < len;) {
                size_t end = split_next((enum split_pattern)pattern, cases[i].text, len, at);
                assert_true(end > at && end <= len);
                if (at)
                    buf_putc(&got, '|');
                buf_add(&got, cases[i].text + at, end - at);
                at = end;
            }
            assert_string_equal(got.data, pattern == SPLIT_QWEN2 && cases[i].qwen2 ? cases[i].qwen2 : cases[i].qwen35);
            buf_free(&got);
        }
    }
}

/* ---- merging */

static void the_lowest_rank_is_merged_first_and_the_leftmost_on_a_tie(void **state)
{
    (void)state;
    struct vocab v;
    vocab_init(&v);
    static const char *const products[] = {"aa", "aaa", "ab", "bc", "abc"};
    for (size_t i = 0; i < 5; i++)
        vocab_add(&v, products[i], TOKEN_NORMAL);
    static const char *const merges[] = {"a a", "b c", "a b", "ab c", "a bc", "aa a"};
    for (size_t i = 0; i < 6; i++)
        vocab_merge(&v, merges[i]);
    struct tokenizer *t = open_vocab(&v);
    assert_pieces(t, "aaa", false, "aaa");
    assert_pieces(t, "aaaaa", false, "aa|aaa");
    assert_pieces(t, "abc", false, "abc"); /* by way of bc */
    assert_pieces(t, "aabc", false, "aa|bc");
    assert_pieces(t, "abab", false, "ab|ab");
    tokenizer_close(t);
}

/* Merges as the definition says: look for the lowest rank among all pairs, leftmost; merge; again. */
static void naive_merge(const struct vocab *v, const struct tokenizer *t, const char *word, struct token_list *out)
{
    size_t n = strlen(word), cut[65]; /* part i is word[cut[i]..cut[i + 1]) */
    struct buf text = BUF_INIT;
    assert_true(n <= 64);
    for (size_t i = 0; i <= n; i++)
        cut[i] = i;
    for (;;) {
        size_t best_rank = SIZE_MAX, best_at = 0;
        for (size_t i = 0; i + 1 < n; i++) {
            buf_clear(&text);
            buf_add(&text, word + cut[i], cut[i + 1] - cut[i]);
            buf_putc(&text, ' ');
            buf_add(&text, word + cut[i + 1], cut[i + 2] - cut[i + 1]);
            for (size_t r = 0; r < v->n_merges && r < best_rank; r++) {
                if (strcmp(v->merges[r], text.data) == 0) {
                    best_rank = r;
                    best_at = i;
                }
            }
        }
        if (best_rank == SIZE_MAX)
            break;
        memmove(cut + best_at + 1, cut + best_at + 2, (n - best_at - 1) * sizeof *cut);
        n--;
    }
    out->len = 0;
    for (size_t i = 0; i < n; i++) {
        buf_clear(&text);
        buf_add(&text, word + cut[i], cut[i + 1] - cut[i]);
        assert_int_equal(token_list_add(out, tokenizer_find(t, text.data)), 0);
    }
    buf_free(&text);
}

static void merging_gives_what_the_definition_gives(void **state)
{
    (void)state;
    uint32_t random = 1;
    struct token_list got = {0}, want = {0};
    for (int round = 0; round < 40; round++) {
        struct vocab v;
        vocab_init(&v);
        char parts[128][16] = {"a", "b", "c"};
        size_t n_parts = 3;
        for (int m = 0; m < 80; m++) {
            const char *left = parts[next_random(&random) % n_parts], *right = parts[next_random(&random) % n_parts];
            char product[32], merge[40];
            snprintf(product, sizeof product, "%s%s", left, right);
            snprintf(merge, sizeof merge, "%s %s", left, right);
            if (strlen(product) > 12)
                continue;
            bool known = false;
            for (size_t i = 0; i < n_parts; i++)
                known = known || strcmp(parts[i], product) == 0;
            if (!known) {
                vocab_add(&v, product, TOKEN_NORMAL);
                memcpy(parts[n_parts++], product, strlen(product) + 1);
            }
            vocab_merge(&v, merge); /* some products have several merges, some merges come twice */
        }
        struct tokenizer *t;
        struct error err;
        assert_int_equal(vocab_open(&t, &v, &err), 0);
        for (int w = 0; w < 60; w++) {
            char word[64];
            size_t len = 1 + next_random(&random) % 50;
            for (size_t i = 0; i < len; i++)
                word[i] = (char)('a' + next_random(&random) % 3);
            word[len] = '\0';
            encode(t, word, len, false, &got);
            naive_merge(&v, t, word, &want);
            assert_same_ids(&got, &want);
        }
        tokenizer_close(t);
    }
    token_list_free(&got);
    token_list_free(&want);
}

static void of_two_equal_merges_the_first_counts(void **state)
{
    (void)state;
    struct vocab v;
    vocab_init(&v);
    vocab_add(&v, "ab", TOKEN_NORMAL);
    vocab_add(&v, "bc", TOKEN_NORMAL);
    vocab_merge(&v, "a b");
    vocab_merge(&v, "b c");
    vocab_merge(&v, "a b");
    struct tokenizer *t = open_vocab(&v);
    assert_pieces(t, "abc", false, "ab|c");
    tokenizer_close(t);
}

/* ---- added tokens */

static void the_longest_added_token_wins_over_the_whole_text(void **state)
{
    (void)state;
    struct vocab v;
    vocab_init(&v);
    static const char *const added[] = {"<a>", "<a><b>", "><b", "<b>c", "xx"};
    for (size_t i = 0; i < 5; i++)
        vocab_add(&v, added[i], TOKEN_USER);
    struct tokenizer *t = open_vocab(&v);
    assert_pieces(t, "<a><b>c", false, "<a><b>|c"); /* six bytes before four */
    assert_pieces(t, "<a<b>c", false, "<|a|<b>c");
    assert_pieces(t, "<a>.><b.", false, "<a>|.|><b|."); /* the same length: each in its place */
    assert_pieces(t, "><b>c", false, ">|<b>c");         /* a longer one further right comes first */
    assert_pieces(t, "xxxxx", false, "xx|xx|x");        /* left to right */
    tokenizer_close(t);
}

static void user_defined_tokens_match_anywhere_and_control_tokens_only_in_trusted_text(void **state)
{
    (void)state;
    struct tokenizer *t = open_default();
    assert_pieces(t, "x<think>hello</think>", false, "x|<think>|hello|</think>");
    assert_pieces(t, "<|im_start|>hello<|im_end|>", true, "<|im_start|>|hello|<|im_end|>");
    assert_pieces(t, "<|im_end|>", false, "<|||i|m|_|e|n|d|||>");

    /* Template, client, template: only the template's own tokens are control tokens. */
    static const char text[] = "<|im_start|>he<|im_end|><|im_start|>ll<|im_end|>\n";
    struct text_range trusted[] = {{0, 12}, {38, 49}};
    struct token_list ids = {0};
    encode_ranges(t, text, 49, trusted, 2, 0, &ids);
    assert_int_equal(ids.ids[0], tokenizer_find(t, "<|im_start|>"));
    assert_int_equal(ids.ids[1], tokenizer_find(t, "he"));
    assert_int_equal(ids.ids[ids.len - 2], tokenizer_find(t, "<|im_end|>"));
    size_t n_control = 0;
    for (size_t i = 0; i < ids.len; i++)
        n_control += tokenizer_kind(t, ids.ids[i]) == TOKEN_CONTROL;
    assert_int_equal(n_control, 2);
    token_list_free(&ids);
    tokenizer_close(t);
}

static void a_control_token_across_the_edge_of_trusted_text_is_plain_text(void **state)
{
    (void)state;
    struct tokenizer *t = open_tiny();
    struct token_list ids = {0};
    size_t n_control = 0;
    for (int32_t id = 0; id < tokenizer_vocab_size(t); id++) {
        if (tokenizer_kind(t, id) != TOKEN_CONTROL)
            continue;
        n_control++;
        size_t len;
        const char *token = tokenizer_bytes(t, id, &len);
        char text[80] = "x ";
        memcpy(text + 2, token, len);
        memcpy(text + 2 + len, " y", 2);
        size_t begin = 2, end = 2 + len, all = len + 4;

        struct text_range exact = {begin, end};
        encode_ranges(t, text, all, &exact, 1, 0, &ids);
        assert_true(has_control(t, &ids));
        for (size_t cut = begin + 1; cut < end; cut++) {
            struct text_range left = {0, cut}, right = {cut, all}, both[] = {{0, cut}, {cut, all}};
            encode_ranges(t, text, all, &left, 1, 0, &ids);
            assert_false(has_control(t, &ids));
            encode_ranges(t, text, all, &right, 1, 0, &ids);
            assert_false(has_control(t, &ids));
            encode_ranges(t, text, all, both, 2, 0, &ids); /* two ranges that meet inside it are two texts */
            assert_false(has_control(t, &ids));
        }
        struct text_range around[] = {{0, begin}, {begin, begin}, {end, all}};
        encode_ranges(t, text, all, around, 3, 0, &ids);
        assert_false(has_control(t, &ids));
        encode_ranges(t, text, all, NULL, 0, TOKENIZER_NFC, &ids);
        assert_false(has_control(t, &ids));
    }
    assert_int_equal(n_control, 20);
    token_list_free(&ids);
    tokenizer_close(t);
}

static void random_mixtures_of_control_text_stay_plain_outside_trusted_ranges(void **state)
{
    (void)state;
    struct tokenizer *t = open_tiny();
    uint32_t random = 7;
    struct token_list ids = {0};
    struct buf text = BUF_INIT, back = BUF_INIT;
    for (int round = 0; round < 3000; round++) {
        /* Pieces of control tokens, whole ones, marks, and bytes that are not UTF-8; some stretches trusted. */
        struct text_range trusted[8];
        size_t n_trusted = 0, n_expected = 0;
        buf_clear(&text);
        for (int piece = 0; piece < 12; piece++) {
            size_t len, before = text.len;
            int32_t id = 1472 + (int32_t)(next_random(&random) % 32);
            const char *token = tokenizer_bytes(t, id, &len);
            switch (next_random(&random) % 6) {
            case 0: /* from the template */
                if (n_trusted == 8 || tokenizer_kind(t, id) != TOKEN_CONTROL)
                    break;
                buf_puts(&text, "\n");
                trusted[n_trusted++] = (struct text_range){text.len, text.len + len};
                buf_add(&text, token, len);
                buf_puts(&text, "\n");
                n_expected++;
                break;
            case 1:
                buf_add(&text, token, len);
                break;
            case 2:
                buf_add(&text, token, next_random(&random) % (len + 1));
                break;
            case 3:
                buf_puts(&text, "e\xCC\x81");
                break;
            case 4:
                buf_puts(&text, "\xE2\x82");
                break;
            default:
                buf_puts(&text, "<|<");
            }
            assert_true(text.len >= before);
        }
        encode_ranges(t, text.data, text.len, trusted, n_trusted, round % 2 ? TOKENIZER_NFC : 0, &ids);
        size_t n_control = 0, range = 0;
        for (size_t i = 0; i < ids.len; i++) {
            if (tokenizer_kind(t, ids.ids[i]) != TOKEN_CONTROL)
                continue;
            size_t len;
            const char *token = tokenizer_bytes(t, ids.ids[i], &len);
            assert_true(range < n_trusted);
            assert_memory_equal(token, text.data + trusted[range].begin, len);
            range++;
            n_control++;
        }
        assert_int_equal(n_control, n_expected);
        decode(t, &ids, &back);
        assert_false(back.failed);
    }
    buf_free(&text);
    buf_free(&back);
    token_list_free(&ids);
    tokenizer_close(t);
}

static void the_edges_of_trusted_ranges_do_not_change_the_ids_of_plain_text(void **state)
{
    (void)state;
    struct tokenizer *t = open_tiny();
    static const char text[] = "user\nHello world, it's 12  caf\xC3\xA9s\n\n and <think>more</think>";
    size_t len = sizeof text - 1;
    struct token_list want = {0}, got = {0};
    encode(t, text, len, false, &want);
    for (size_t cut = 0; cut <= len; cut++) {
        struct text_range ranges[] = {{0, cut}, {cut, len}};
        encode_ranges(t, text, len, ranges, 1, 0, &got);
        assert_same_ids(&got, &want);
        encode_ranges(t, text, len, ranges, 2, 0, &got);
        assert_same_ids(&got, &want);
    }
    token_list_free(&want);
    token_list_free(&got);
    tokenizer_close(t);
}

static void repair_and_normalisation_leave_the_offsets_of_trusted_ranges_alone(void **state)
{
    (void)state;
    struct tokenizer *t = open_default();
    static const char text[] = "e\xCC\x81\xFF\xE2\x82<|im_start|>e\xCC\x81<|im_start|>";
    size_t len = sizeof text - 1;
    struct text_range trusted = {6, 18}; /* the first one */
    struct token_list ids = {0};
    encode_ranges(t, text, len, &trusted, 1, TOKENIZER_NFC, &ids);
    size_t n_control = 0;
    for (size_t i = 0; i < ids.len; i++)
        n_control += tokenizer_kind(t, ids.ids[i]) == TOKEN_CONTROL;
    assert_int_equal(n_control, 1);
    struct buf back = BUF_INIT;
    decode(t, &ids, &back);
    assert_string_equal(back.data, "\xC3\xA9" R R "<|im_start|>\xC3\xA9<|im_start|>");
    buf_free(&back);
    token_list_free(&ids);
    tokenizer_close(t);
}

static void wrong_trusted_ranges_are_an_error_and_add_nothing(void **state)
{
    (void)state;
    struct tokenizer *t = open_default();
    static const struct text_range wrong[][2] = {{{0, 6}, {6, 6}}, {{3, 2}, {3, 4}}, {{0, 3}, {2, 4}}, {{3, 4}, {0, 2}}};
    struct token_list ids = {0};
    assert_int_equal(token_list_add(&ids, 42), 0);
    for (size_t i = 0; i < 4; i++) {
        struct error err = {""};
        assert_int_equal(tokenizer_encode(t, "hello", 5, wrong[i], 2, 0, &ids, &err), -1);
        assert_non_null(strstr(err.text, "trusted range"));
        assert_int_equal(ids.len, 1);
    }
    struct error err;
    assert_int_equal(tokenizer_encode(t, "hello", 5, NULL, 0, 0, &ids, &err), 0); /* appended */
    assert_int_equal(ids.len, 2);
    assert_int_equal(ids.ids[0], 42);
    assert_int_equal(tokenizer_encode(t, NULL, 0, NULL, 0, 0, &ids, &err), 0);
    assert_int_equal(ids.len, 2);
    token_list_free(&ids);
    tokenizer_close(t);
}

/* ---- bytes */

static void decomposed_accents_are_composed_with_nfc_only(void **state)
{
    (void)state;
    struct tokenizer *t = open_default();
    struct token_list ids = {0};
    encode_ranges(t, "e\xCC\x81", 3, NULL, 0, TOKENIZER_NFC, &ids);
    assert_int_equal(ids.len, 1);
    assert_int_equal(ids.ids[0], tokenizer_find(t, "\xC3\xA9"));
    encode_ranges(t, "e\xCC\x81", 3, NULL, 0, 0, &ids);
    assert_int_equal(ids.len, 3);
    /* An added token ends the stretch: the mark after it stands alone. */
    encode_ranges(t, "e<think>\xCC\x81", 10, NULL, 0, TOKENIZER_NFC, &ids);
    assert_int_equal(ids.len, 4);
    token_list_free(&ids);
    tokenizer_close(t);
}

static void every_input_of_two_bytes_counts_as_its_repaired_text(void **state)
{
    (void)state;
    struct tokenizer *t = open_tiny();
    struct token_list raw = {0}, repaired = {0};
    struct buf clean = BUF_INIT, back = BUF_INIT;
    for (unsigned pair = 0; pair < 65536; pair++) {
        const char bytes[2] = {(char)(pair >> 8), (char)pair};
        struct utf8_stream s = {0};
        buf_clear(&clean);
        utf8_stream_add(&s, bytes, 2, &clean);
        utf8_stream_end(&s, &clean);
        encode(t, bytes, 2, true, &raw);
        encode(t, clean.data, clean.len, true, &repaired);
        assert_same_ids(&raw, &repaired);
        decode(t, &raw, &back);
        assert_int_equal(back.len, clean.len);
        assert_memory_equal(back.data, clean.data, clean.len);
        encode_ranges(t, bytes, 2, NULL, 0, TOKENIZER_NFC, &raw);
        assert_true(raw.len > 0);
    }
    buf_free(&clean);
    buf_free(&back);
    token_list_free(&raw);
    token_list_free(&repaired);
    tokenizer_close(t);
}

static void every_code_point_comes_back(void **state)
{
    (void)state;
    struct tokenizer *t = open_tiny();
    struct token_list ids = {0};
    struct buf all = BUF_INIT, one = BUF_INIT, back = BUF_INIT;
    for (uint32_t cp = 0; cp <= 0x10FFFF; cp++) {
        if (cp >= 0xD800 && cp <= 0xDFFF)
            continue;
        put_code_point(&all, cp);
        if (cp >= 0x3400 && cp % 64) /* singly: all small scripts, a sample of the large blocks */
            continue;
        buf_clear(&one);
        buf_puts(&one, "a");
        put_code_point(&one, cp);
        buf_puts(&one, "b ");
        put_code_point(&one, cp);
        encode(t, one.data, one.len, false, &ids);
        decode(t, &ids, &back);
        assert_int_equal(back.len, one.len);
        assert_memory_equal(back.data, one.data, one.len);
    }
    encode(t, all.data, all.len, false, &ids);
    decode(t, &ids, &back);
    assert_int_equal(back.len, all.len);
    assert_memory_equal(back.data, all.data, all.len);
    encode_ranges(t, all.data, all.len, NULL, 0, TOKENIZER_NFC, &ids);
    assert_true(ids.len > 0x10FFFF / 2);
    buf_free(&all);
    buf_free(&one);
    buf_free(&back);
    token_list_free(&ids);
    tokenizer_close(t);
}

/* A megabyte made of one unit: encoded within the limit, and nothing lost. */
static void check_megabyte(const struct tokenizer *t, const char *unit, unsigned flags)
{
    struct buf text = BUF_INIT, back = BUF_INIT;
    struct token_list ids = {0};
    struct text_range all;
    while (text.len < MEGABYTE)
        buf_puts(&text, unit);
    uint64_t start = clock_ns();
    all = (struct text_range){0, text.len};
    encode_ranges(t, text.data, text.len, &all, 1, flags, &ids);
    if (clock_ns() - start > LIMIT_SECONDS * 1000000000ull)
        fail_msg("a megabyte of \"%s\" takes %.1f s", unit, (double)(clock_ns() - start) / 1e9);
    if (!flags) {
        decode(t, &ids, &back);
        assert_int_equal(back.len, text.len);
        assert_memory_equal(back.data, text.data, text.len);
    }
    buf_free(&text);
    buf_free(&back);
    token_list_free(&ids);
}

static void a_megabyte_of_anything_takes_n_log_n(void **state)
{
    (void)state;
    struct tokenizer *t = open_tiny();
    static const char *const units[] = {"a",
                                        "<",
                                        " ",
                                        "\n",
                                        "'",
                                        "1",
                                        "\xCC\x81",
                                        "hello",
                                        "<|im_start",
                                        "<|im_end|>",
                                        "<think",
                                        "<think>",
                                        "\xF0\x9F\x99\x82",
                                        " \n x",
                                        "\xE2\x82\xAC",
                                        "\r"};
    for (size_t i = 0; i < sizeof units / sizeof *units; i++)
        check_megabyte(t, units[i], 0);
    check_megabyte(t, "\xCC\x81\xCC\xA7", TOKENIZER_NFC); /* marks to be put in order: one run of a million */
    check_megabyte(t, "e\xCC\x81", TOKENIZER_NFC);
    tokenizer_close(t);
}

static void a_word_of_a_megabyte_of_random_letters_comes_back(void **state)
{
    (void)state;
    struct tokenizer *t = open_tiny();
    struct token_list ids = {0};
    struct buf text = BUF_INIT, back = BUF_INIT;
    uint32_t random = 3;
    while (text.len < MEGABYTE)
        buf_putc(&text, "etaoinshrdlucmfwypvbgk"[next_random(&random) % 22]);
    uint64_t start = clock_ns();
    encode(t, text.data, text.len, false, &ids);
    assert_true(clock_ns() - start < LIMIT_SECONDS * 1000000000ull);
    assert_true(ids.len < MEGABYTE * 9 / 10); /* it was merged */
    decode(t, &ids, &back);
    assert_int_equal(back.len, text.len);
    assert_memory_equal(back.data, text.data, text.len);
    buf_free(&text);
    buf_free(&back);
    token_list_free(&ids);
    tokenizer_close(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pre_tokens_are_cut_as_the_patterns_say),
        cmocka_unit_test(the_lowest_rank_is_merged_first_and_the_leftmost_on_a_tie),
        cmocka_unit_test(merging_gives_what_the_definition_gives),
        cmocka_unit_test(of_two_equal_merges_the_first_counts),
        cmocka_unit_test(the_longest_added_token_wins_over_the_whole_text),
        cmocka_unit_test(user_defined_tokens_match_anywhere_and_control_tokens_only_in_trusted_text),
        cmocka_unit_test(a_control_token_across_the_edge_of_trusted_text_is_plain_text),
        cmocka_unit_test(random_mixtures_of_control_text_stay_plain_outside_trusted_ranges),
        cmocka_unit_test(the_edges_of_trusted_ranges_do_not_change_the_ids_of_plain_text),
        cmocka_unit_test(repair_and_normalisation_leave_the_offsets_of_trusted_ranges_alone),
        cmocka_unit_test(wrong_trusted_ranges_are_an_error_and_add_nothing),
        cmocka_unit_test(decomposed_accents_are_composed_with_nfc_only),
        cmocka_unit_test(every_input_of_two_bytes_counts_as_its_repaired_text),
        cmocka_unit_test(every_code_point_comes_back),
        cmocka_unit_test(a_megabyte_of_anything_takes_n_log_n),
        cmocka_unit_test(a_word_of_a_megabyte_of_random_letters_comes_back),
    };
    log_set_level(LOG_ERROR); /* warnings about the vocabularies above are expected */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
