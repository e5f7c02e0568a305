/* tests/unit/tokenizer_checks.h: what the tokenizer's test programs share. Include after <cmocka.h>. */
#ifndef BEDSIDE_TESTS_TOKENIZER_CHECKS_H
#define BEDSIDE_TESTS_TOKENIZER_CHECKS_H

#include <stdbool.h>
#include <string.h>

#include "tests/unit/vocab_image.h"

static inline struct tokenizer *open_vocab(struct vocab *v)
{
    struct tokenizer *t;
    struct error err = {""};
    if (vocab_open(&t, v, &err))
        fail_msg("%s", err.text);
    return t;
}

static inline struct tokenizer *open_default(void)
{
    struct vocab v;
    vocab_default(&v);
    return open_vocab(&v);
}

static inline void encode_ranges(const struct tokenizer *t, const char *text, size_t len, const struct text_range *trusted, size_t n_trusted,
                                 unsigned flags, struct token_list *out)
{
    struct error err;
    out->len = 0;
    assert_int_equal(tokenizer_encode(t, text, len, trusted, n_trusted, flags, out, &err), 0);
}

static inline void encode(const struct tokenizer *t, const char *text, size_t len, bool trusted, struct token_list *out)
{
    struct text_range all = {0, len};
    encode_ranges(t, text, len, &all, trusted, 0, out);
}

/* The tokens' texts, joined by '|'. */
static inline void assert_pieces(const struct tokenizer *t, const char *text, bool trusted, const char *want)
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

static inline bool has_control(const struct tokenizer *t, const struct token_list *ids)
{
    for (size_t i = 0; i < ids->len; i++)
        if (tokenizer_kind(t, ids->ids[i]) == TOKEN_CONTROL)
            return true;
    return false;
}

#endif
