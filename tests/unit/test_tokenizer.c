/* The tokenizer: what a file must hold, what becomes of text, and that client text never becomes a control token. */
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
#include "tests/unit/vocab_image.h"

#define R "\xEF\xBF\xBD" /* U+FFFD */

/* Far above what n log n needs, with sanitizers and on a busy machine; far below what n * n would take for a million bytes. */
enum { LIMIT_SECONDS = 30, MEGABYTE = 1 << 20 };

/* ---- helpers */

static struct tokenizer *open_vocab(struct vocab *v)
{
    struct tokenizer *t;
    struct error err = {""};
    if (vocab_open(&t, v, &err))
        fail_msg("%s", err.text);
    vocab_free(v);
    return t;
}

static struct tokenizer *open_default(void)
{
    struct vocab v;
    vocab_default(&v);
    return open_vocab(&v);
}

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

/* Opening fails and the message holds both texts. */
static void assert_refused(struct vocab *v, const char *what, const char *why)
{
    struct tokenizer *t;
    struct error err = {""};
    assert_int_equal(vocab_open(&t, v, &err), -1);
    assert_null(t);
    if (!strstr(err.text, what) || !strstr(err.text, why))
        fail_msg("\"%s\" should name \"%s\" and say \"%s\"", err.text, what, why);
    vocab_free(v);
}

static void encode_ranges(const struct tokenizer *t, const char *text, size_t len, const struct text_range *trusted, size_t n_trusted, unsigned flags,
                          struct token_list *out)
{
    struct error err;
    out->len = 0;
    assert_int_equal(tokenizer_encode(t, text, len, trusted, n_trusted, flags, out, &err), 0);
}

static void encode(const struct tokenizer *t, const char *text, size_t len, bool trusted, struct token_list *out)
{
    struct text_range all = {0, len};
    encode_ranges(t, text, len, &all, trusted, 0, out);
}

/* The tokens' texts, joined by '|'. */
static void assert_pieces(const struct tokenizer *t, const char *text, bool trusted, const char *want)
{
    struct token_list ids = {0};
    struct buf got = BUF_INIT;
    encode(t, text, strlen(text), trusted, &ids);
    for (size_t i = 0; i < ids.len; i++) {
        size_t len;
        const char *bytes = tokenizer_bytes(t, ids.ids[i], &len);
        if (i)
            buf_putc(&got, '|');
        buf_add(&got, bytes, len);
    }
    assert_string_equal(got.data ? got.data : "", want);
    token_list_free(&ids);
    buf_free(&got);
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

static bool has_control(const struct tokenizer *t, const struct token_list *ids)
{
    for (size_t i = 0; i < ids->len; i++)
        if (tokenizer_kind(t, ids->ids[i]) == TOKEN_CONTROL)
            return true;
    return false;
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

/* ---- opening */

static void another_kind_of_tokenizer_is_refused_by_name(void **state)
{
    (void)state;
    struct vocab v;
    vocab_default(&v);
    v.model = "llama";
    assert_refused(&v, "tokenizer.ggml.model", "\"llama\"");
    vocab_default(&v);
    v.pre = "default";
    assert_refused(&v, "tokenizer.ggml.pre", "\"default\"");
    vocab_default(&v);
    v.pre = "qwen3";
    assert_refused(&v, "tokenizer.ggml.pre", "only qwen2 and qwen35");
}

static void a_missing_key_is_named(void **state)
{
    (void)state;
    struct vocab v;
    vocab_default(&v);
    v.model = NULL;
    assert_refused(&v, "tokenizer.ggml.model", "missing");
    vocab_default(&v);
    v.pre = NULL;
    assert_refused(&v, "tokenizer.ggml.pre", "missing");
    vocab_default(&v);
    v.no_tokens = true;
    assert_refused(&v, "tokenizer.ggml.tokens", "missing");
    vocab_default(&v);
    v.no_merges = true;
    assert_refused(&v, "tokenizer.ggml.merges", "missing");
}

static void arrays_of_another_length_than_the_vocabulary_are_refused(void **state)
{
    (void)state;
    struct vocab v;
    vocab_default(&v);
    v.n_types--;
    assert_refused(&v, "tokenizer.ggml.token_type", "271 entries");
    vocab_default(&v);
    v.n_scores = v.n_tokens + 1;
    assert_refused(&v, "tokenizer.ggml.scores", "273 entries");
    vocab_default(&v);
    v.n_scores = v.n_tokens; /* as older converters write them */
    tokenizer_close(open_vocab(&v));
}

static void an_id_outside_the_vocabulary_is_refused_by_its_key(void **state)
{
    (void)state;
    struct vocab v;
    vocab_default(&v);
    v.eos = (int64_t)v.n_tokens;
    assert_refused(&v, "tokenizer.ggml.eos_token_id", "272");
    vocab_default(&v);
    v.bos = UINT32_MAX;
    assert_refused(&v, "tokenizer.ggml.bos_token_id", "4294967295");
    vocab_default(&v);
    v.padding = 100000;
    assert_refused(&v, "tokenizer.ggml.padding_token_id", "100000");
    vocab_default(&v);
    v.eot = 300;
    assert_refused(&v, "tokenizer.ggml.eot_token_id", "300");
}

static void a_token_type_outside_the_format_is_refused_with_its_index(void **state)
{
    (void)state;
    struct vocab v;
    vocab_default(&v);
    v.types[7] = 9;
    assert_refused(&v, "tokenizer.ggml.token_type[7]", "9");
    vocab_default(&v);
    v.types[3] = -1;
    assert_refused(&v, "tokenizer.ggml.token_type[3]", "-1");
}

static void a_vocabulary_that_lacks_a_byte_is_refused(void **state)
{
    (void)state;
    struct vocab v;
    vocab_default(&v);
    strcpy(v.tokens[0], "\""); /* "!" is gone */
    assert_refused(&v, "tokenizer.ggml.tokens", "byte 0x21");
}

static void merges_that_do_not_fit_are_skipped_and_the_others_count(void **state)
{
    (void)state;
    static const char *const bad[] = {"", " ", "h", "he", "h ", " e", "h e e", "h  e", "q z", "hello x", "\xFF e", "h \xE2\x82\xAC", "<think> h"};
    struct vocab v;
    vocab_init(&v);
    vocab_add(&v, "he", TOKEN_NORMAL);
    vocab_add(&v, "qz", TOKEN_UNUSED); /* not ordinary: no product */
    vocab_add(&v, "<|im_end|>", TOKEN_CONTROL);
    vocab_add(&v, "<|", TOKEN_NORMAL);
    vocab_add(&v, "im_end|>", TOKEN_NORMAL);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        vocab_merge(&v, bad[i]);
    vocab_merge(&v, "<| im_end|>"); /* a merge must not make a control token */
    vocab_merge(&v, "h e");
    vocab_merge(&v, "< |");
    struct tokenizer *t = open_vocab(&v);
    assert_pieces(t, "hehh", false, "he|h|h");
    assert_pieces(t, "qz", false, "q|z");
    struct token_list ids = {0};
    encode(t, "<|im_end|>", 10, false, &ids);
    assert_false(has_control(t, &ids));
    token_list_free(&ids);
    tokenizer_close(t);
}

static void without_token_types_the_known_added_tokens_keep_their_kinds(void **state)
{
    (void)state;
    struct vocab v;
    vocab_default(&v);
    v.n_types = 0;
    struct tokenizer *t = open_vocab(&v);
    assert_int_equal(tokenizer_kind(t, tokenizer_find(t, "<|im_start|>")), TOKEN_CONTROL);
    assert_int_equal(tokenizer_kind(t, tokenizer_find(t, "<think>")), TOKEN_USER);
    assert_int_equal(tokenizer_kind(t, 270), TOKEN_UNUSED);
    assert_int_equal(tokenizer_kind(t, 'A' - 33), TOKEN_NORMAL);
    assert_pieces(t, "<|im_start|>", true, "<|im_start|>");
    assert_pieces(t, "<|im_start|>", false, "<|||i|m|_|s|t|a|r|t|||>");
    tokenizer_close(t);
}

static void a_control_token_that_the_file_calls_ordinary_is_a_control_token(void **state)
{
    (void)state;
    static const int32_t wrong[] = {TOKEN_NORMAL, TOKEN_USER, TOKEN_UNUSED, 0};
    for (size_t i = 0; i < 4; i++) {
        struct vocab v;
        vocab_default(&v);
        v.types[v.eos] = wrong[i];
        struct tokenizer *t = open_vocab(&v);
        int32_t id = tokenizer_find(t, "<|im_end|>");
        assert_int_equal(tokenizer_kind(t, id), TOKEN_CONTROL);
        assert_true(tokenizer_ends_generation(t, id));
        assert_pieces(t, "<|im_end|>", false, "<|||i|m|_|e|n|d|||>");
        tokenizer_close(t);
    }
}

static void padding_that_a_converter_called_user_defined_is_unusable_and_never_matched(void **state)
{
    (void)state;
    struct vocab v;
    vocab_default(&v);
    v.types[270] = TOKEN_USER;
    v.types[271] = TOKEN_NORMAL;
    int32_t real = vocab_add(&v, "[PAD]", TOKEN_USER); /* no number: somebody's token */
    int32_t user = vocab_add(&v, "[PADx1]", TOKEN_USER);
    struct tokenizer *t = open_vocab(&v);
    assert_false(tokenizer_usable(t, 270));
    assert_false(tokenizer_usable(t, 271));
    assert_true(tokenizer_usable(t, real));
    assert_true(tokenizer_usable(t, user));
    assert_int_equal(tokenizer_find(t, "[PAD270]"), -1);
    assert_pieces(t, "[PAD270]", true, "[|P|A|D|2|7|0|]");
    tokenizer_close(t);
}

static void generation_ends_at_the_ids_of_the_file_and_at_the_known_texts(void **state)
{
    (void)state;
    struct vocab v;
    vocab_default(&v);
    v.eos = 5;
    v.eot = 6;
    v.padding = 7;
    v.bos = 8;
    int32_t fim = vocab_add(&v, "<|fim_pad|>", TOKEN_CONTROL);
    int32_t repo = vocab_add(&v, "<|repo_name|>", TOKEN_CONTROL);
    int32_t sep = vocab_add(&v, "<|file_sep|>", TOKEN_CONTROL);
    int32_t prefix = vocab_add(&v, "<|fim_prefix|>", TOKEN_CONTROL);
    struct tokenizer *t = open_vocab(&v);
    const int32_t ends[] = {5, 6, fim, repo, sep, tokenizer_find(t, "<|im_end|>"), tokenizer_find(t, "<|endoftext|>")};
    size_t n_ends = 0;
    for (int32_t id = 0; id < tokenizer_vocab_size(t); id++)
        n_ends += tokenizer_ends_generation(t, id);
    assert_int_equal(n_ends, 7);
    for (size_t i = 0; i < 7; i++)
        assert_true(tokenizer_ends_generation(t, ends[i]));
    assert_false(tokenizer_ends_generation(t, prefix));
    assert_false(tokenizer_ends_generation(t, -1));
    assert_false(tokenizer_ends_generation(t, tokenizer_vocab_size(t)));
    tokenizer_close(t);
}

/* ---- single tokens */

static void a_token_stands_for_its_bytes(void **state)
{
    (void)state;
    struct tokenizer *t = open_default();
    size_t len;
    assert_memory_equal(tokenizer_bytes(t, tokenizer_find(t, " hello"), &len), " hello", 6);
    assert_int_equal(len, 6); /* no merge makes it, and yet it is a token */
    assert_memory_equal(tokenizer_bytes(t, tokenizer_find(t, "\xC3\xA9"), &len), "\xC3\xA9", 2);
    assert_int_equal(len, 2);
    assert_memory_equal(tokenizer_bytes(t, tokenizer_find(t, "<|im_end|>"), &len), "<|im_end|>", 10);
    assert_int_equal(len, 10);
    assert_memory_equal(tokenizer_bytes(t, 270, &len), "[PAD270]", 8);
    assert_int_equal(tokenizer_find(t, "\n"), 198);
    assert_int_equal(tokenizer_find(t, " "), 220);
    assert_int_equal(tokenizer_find(t, ""), -1);
    assert_int_equal(tokenizer_find(t, "nowhere"), -1);
    assert_int_equal(tokenizer_find(t, "Ġhello"), -1); /* the alphabet is the file's business */
    tokenizer_close(t);
}

static void ids_outside_the_vocabulary_are_harmless(void **state)
{
    (void)state;
    struct tokenizer *t = open_default();
    static const int32_t ids[] = {-1, INT32_MIN, 272, INT32_MAX};
    assert_int_equal(tokenizer_vocab_size(t), 272);
    for (size_t i = 0; i < 4; i++) {
        size_t len = 99;
        assert_null(tokenizer_bytes(t, ids[i], &len));
        assert_int_equal(len, 0);
        assert_false(tokenizer_usable(t, ids[i]));
        assert_int_equal(tokenizer_kind(t, ids[i]), TOKEN_UNUSED);
    }
    tokenizer_close(t);
    tokenizer_close(NULL);
}

static void only_unused_tokens_are_unusable(void **state)
{
    (void)state;
    struct tokenizer *t = open_default();
    for (int32_t id = 0; id < tokenizer_vocab_size(t); id++)
        assert_int_equal(tokenizer_usable(t, id), id < 270);
    tokenizer_close(t);
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
        vocab_free(&v);
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
        cmocka_unit_test(another_kind_of_tokenizer_is_refused_by_name),
        cmocka_unit_test(a_missing_key_is_named),
        cmocka_unit_test(arrays_of_another_length_than_the_vocabulary_are_refused),
        cmocka_unit_test(an_id_outside_the_vocabulary_is_refused_by_its_key),
        cmocka_unit_test(a_token_type_outside_the_format_is_refused_with_its_index),
        cmocka_unit_test(a_vocabulary_that_lacks_a_byte_is_refused),
        cmocka_unit_test(merges_that_do_not_fit_are_skipped_and_the_others_count),
        cmocka_unit_test(without_token_types_the_known_added_tokens_keep_their_kinds),
        cmocka_unit_test(a_control_token_that_the_file_calls_ordinary_is_a_control_token),
        cmocka_unit_test(padding_that_a_converter_called_user_defined_is_unusable_and_never_matched),
        cmocka_unit_test(generation_ends_at_the_ids_of_the_file_and_at_the_known_texts),
        cmocka_unit_test(a_token_stands_for_its_bytes),
        cmocka_unit_test(ids_outside_the_vocabulary_are_harmless),
        cmocka_unit_test(only_unused_tokens_are_unusable),
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
