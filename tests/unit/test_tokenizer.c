/* Opening a vocabulary: what a file must hold, and what is known about single tokens. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdbool.h>
#include <string.h>

#include "base/log.h"
#include "tests/unit/tokenizer_checks.h"

/* Opening fails and the message holds both texts. */
static void assert_refused(struct vocab *v, const char *what, const char *why)
{
    struct tokenizer *t;
    struct error err = {""};
    assert_int_equal(vocab_open(&t, v, &err), -1);
    assert_null(t);
    if (!strstr(err.text, what) || !strstr(err.text, why))
        fail_msg("\"%s\" should name \"%s\" and say \"%s\"", err.text, what, why);
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
    memcpy(v.tokens[0], "\"", 2); /* "!" is gone */
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
    };
    log_set_level(LOG_ERROR); /* warnings about the vocabularies above are expected */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
