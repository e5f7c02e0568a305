/* api/reply.c and api/api_error.c: the shapes OpenAI's clients read. Everything written is parsed back. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "api/api_error.h"
#include "api/reply.h"

static const struct reply_head head = {.id = "chatcmpl-123", .created = 1700000000, .model = "bedside \"q\""};

static json_t *parse(const char *text, size_t len)
{
    json_error_t e;
    json_t *v = json_loadb(text, len, JSON_DECODE_ANY | JSON_ALLOW_NUL | JSON_REJECT_DUPLICATES, &e);
    if (!v)
        fail_msg("%s in: %.*s", e.text, (int)len, text);
    return v;
}

/* The JSON of the only event in b. */
static json_t *parse_event(const struct buf *b)
{
    assert_true(b->len > 8);
    assert_memory_equal(b->data, "data: ", 6);
    assert_string_equal(b->data + b->len - 2, "\n\n");
    const char *line = b->data + 6;
    assert_ptr_equal(strchr(line, '\n'), b->data + b->len - 2); /* one line */
    return parse(line, b->len - 8);
}

static struct buf buf_of(const char *text)
{
    struct buf b = BUF_INIT;
    buf_puts(&b, text);
    return b;
}

static json_t *at(json_t *v, const char *key)
{
    json_t *m = json_object_get(v, key);
    if (!m)
        fail_msg("no %s", key);
    return m;
}

static void assert_text(json_t *v, const char *key, const char *want)
{
    assert_true(json_is_string(at(v, key)));
    assert_string_equal(json_string_value(at(v, key)), want);
}

static json_t *only_choice(json_t *event, const char *object)
{
    assert_text(event, "id", "chatcmpl-123");
    assert_text(event, "object", object);
    assert_text(event, "model", "bedside \"q\"");
    assert_int_equal(json_integer_value(at(event, "created")), 1700000000);
    assert_int_equal(json_array_size(at(event, "choices")), 1);
    json_t *choice = json_array_get(at(event, "choices"), 0);
    assert_true(json_is_integer(at(choice, "index")));
    assert_int_equal(json_integer_value(at(choice, "index")), 0);
    return choice;
}

static void every_code_point_survives_a_json_string(void **state)
{
    (void)state;
    struct buf text = BUF_INIT, out = BUF_INIT;
    for (uint32_t c = 0; c <= 0x10FFFF; c++) {
        if (c >= 0xD800 && c < 0xE000)
            continue;
        char u[4];
        size_t n;
        if (c < 0x80) {
            u[0] = (char)c;
            n = 1;
        } else if (c < 0x800) {
            u[0] = (char)(0xC0 | (c >> 6));
            u[1] = (char)(0x80 | (c & 63));
            n = 2;
        } else if (c < 0x10000) {
            u[0] = (char)(0xE0 | (c >> 12));
            u[1] = (char)(0x80 | ((c >> 6) & 63));
            u[2] = (char)(0x80 | (c & 63));
            n = 3;
        } else {
            u[0] = (char)(0xF0 | (c >> 18));
            u[1] = (char)(0x80 | ((c >> 12) & 63));
            u[2] = (char)(0x80 | ((c >> 6) & 63));
            u[3] = (char)(0x80 | (c & 63));
            n = 4;
        }
        buf_add(&text, u, n);
    }
    reply_json_string(&out, text.data, text.len);
    json_t *v = parse(out.data, out.len);
    assert_int_equal(json_string_length(v), text.len);
    assert_memory_equal(json_string_value(v), text.data, text.len);
    json_decref(v);
    buf_free(&text);
    buf_free(&out);
}

static void no_line_separator_of_any_kind_stands_in_an_event(void **state)
{
    (void)state;
    /* A client that splits lines as Unicode has them must not cut the event. */
    static const char text[] = "a\nb\rc\vd\fe\x1C\x1D\x1E\xC2\x85\xE2\x80\xA8\xE2\x80\xA9z";
    struct buf out = BUF_INIT;
    reply_json_string(&out, text, sizeof text - 1);
    for (size_t i = 0; i < out.len; i++)
        assert_in_range(out.data[i], 0x20, 0x7E);
    json_t *v = parse(out.data, out.len);
    assert_string_equal(json_string_value(v), text);
    json_decref(v);
    buf_free(&out);
}

static void invalid_utf8_becomes_replacements_and_the_reply_stays_json(void **state)
{
    (void)state;
    static const char *const bad[] = {"\xFF", "a\xC3", "\xED\xA0\x80", "\xC0\xAF", "\xF4\x90\x80\x80", "\x80x", "\xE2\x82"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct buf out = BUF_INIT;
        reply_json_string(&out, bad[i], strlen(bad[i]));
        json_t *v = parse(out.data, out.len);
        assert_non_null(strstr(json_string_value(v), "\xEF\xBF\xBD"));
        json_decref(v);
        buf_free(&out);
    }
}

static void the_first_chunk_gives_the_role(void **state)
{
    (void)state;
    struct buf out = BUF_INIT;
    reply_chunk_role(&out, &head);
    json_t *v = parse_event(&out), *choice = only_choice(v, "chat.completion.chunk");
    assert_text(at(choice, "delta"), "role", "assistant");
    assert_text(at(choice, "delta"), "content", "");
    assert_true(json_is_null(at(choice, "finish_reason")));
    assert_true(json_is_null(at(choice, "logprobs")));
    json_decref(v);
    buf_free(&out);
}

static void a_delta_holds_only_what_there_is(void **state)
{
    (void)state;
    struct buf reasoning = buf_of("hm\n"), content = buf_of("\xC5\x81\xC3\xB3"), empty = BUF_INIT, out = BUF_INIT;
    reply_chunk_delta(&out, &head, &empty, &content, NULL);
    json_t *v = parse_event(&out), *delta = at(only_choice(v, "chat.completion.chunk"), "delta");
    assert_text(delta, "content", "\xC5\x81\xC3\xB3");
    assert_int_equal(json_object_size(delta), 1);
    json_decref(v);
    buf_clear(&out);
    reply_chunk_delta(&out, &head, &reasoning, NULL, NULL);
    v = parse_event(&out);
    delta = at(only_choice(v, "chat.completion.chunk"), "delta");
    assert_text(delta, "reasoning_content", "hm\n");
    assert_int_equal(json_object_size(delta), 1);
    json_decref(v);
    buf_clear(&out);
    reply_chunk_delta(&out, &head, &reasoning, &content, NULL);
    v = parse_event(&out);
    assert_int_equal(json_object_size(at(only_choice(v, "chat.completion.chunk"), "delta")), 2);
    json_decref(v);
    buf_clear(&out);
    reply_chunk_delta(&out, &head, &empty, &empty, &empty); /* a token that was held back whole */
    assert_int_equal(out.len, 0);
    buf_free(&reasoning);
    buf_free(&content);
    buf_free(&out);
}

static void the_last_chunks_give_reason_usage_and_done(void **state)
{
    (void)state;
    static const struct {
        enum finish_reason reason;
        const char *name;
    } reasons[] = {{FINISH_STOP, "stop"}, {FINISH_LENGTH, "length"}, {FINISH_TOOL_CALLS, "tool_calls"}};
    for (size_t i = 0; i < 3; i++) {
        struct buf out = BUF_INIT;
        reply_chunk_finish(&out, &head, reasons[i].reason, NULL);
        json_t *v = parse_event(&out), *choice = only_choice(v, "chat.completion.chunk");
        assert_text(choice, "finish_reason", reasons[i].name);
        assert_int_equal(json_object_size(at(choice, "delta")), 0);
        json_decref(v);
        buf_free(&out);
    }
    struct buf out = BUF_INIT;
    reply_chunk_usage(&out, &head, &(struct usage){.prompt_tokens = 100, .completion_tokens = 7, .reasoning_tokens = 3, .cached_tokens = 64});
    json_t *v = parse_event(&out), *u = at(v, "usage");
    assert_int_equal(json_array_size(at(v, "choices")), 0);
    assert_true(json_is_array(at(v, "choices")));
    assert_int_equal(json_integer_value(at(u, "prompt_tokens")), 100);
    assert_int_equal(json_integer_value(at(u, "completion_tokens")), 7);
    assert_int_equal(json_integer_value(at(u, "total_tokens")), 107);
    assert_int_equal(json_integer_value(at(at(u, "prompt_tokens_details"), "cached_tokens")), 64);
    assert_int_equal(json_integer_value(at(at(u, "completion_tokens_details"), "reasoning_tokens")), 3);
    json_decref(v);
    buf_clear(&out);
    reply_chunk_done(&out);
    assert_string_equal(out.data, "data: [DONE]\n\n");
    buf_clear(&out);
    reply_chunk_error(&out, "the \"engine\" stopped");
    v = parse_event(&out);
    assert_text(at(v, "error"), "message", "the \"engine\" stopped");
    assert_text(at(v, "error"), "type", "server_error");
    json_decref(v);
    buf_free(&out);
}

static const struct timings timings = {
    .queue_ms = 1.5,
    .prefill_ms = 200,
    .decode_ms = 50,
    .prefill_tokens = 100,
    .decode_tokens = 5,
    .cached_tokens = 64,
    .cache_source = "memory",
    .cache_miss = "diverged",
    .cache_miss_at = 70,
    .pauses = 1,
};

static void assert_timings(json_t *t)
{
    assert_float_equal(json_number_value(at(t, "queue_ms")), 1.5, 1e-6);
    assert_float_equal(json_number_value(at(t, "prefill_ms")), 200, 1e-6);
    assert_int_equal(json_integer_value(at(t, "prefill_tokens")), 100);
    assert_float_equal(json_number_value(at(t, "prefill_tokens_per_second")), 500, 1e-6);
    assert_int_equal(json_integer_value(at(t, "decode_tokens")), 5);
    assert_float_equal(json_number_value(at(t, "decode_tokens_per_second")), 100, 1e-6);
    assert_int_equal(json_integer_value(at(t, "cached_tokens")), 64);
    assert_text(t, "cache_source", "memory");
    assert_text(t, "cache_miss", "diverged");
    assert_int_equal(json_integer_value(at(t, "cache_miss_at")), 70);
    assert_int_equal(json_integer_value(at(t, "pauses")), 1);
}

static void the_last_chunk_says_where_the_time_went(void **state)
{
    (void)state;
    struct buf out = BUF_INIT;
    reply_chunk_finish(&out, &head, FINISH_STOP, &timings);
    json_t *v = parse_event(&out);
    assert_timings(at(v, "timings"));
    json_decref(v);
    buf_clear(&out);
    struct timings hit = {.cache_source = "none", .cache_miss = NULL, .cache_miss_at = -1};
    reply_chunk_finish(&out, &head, FINISH_STOP, &hit);
    v = parse_event(&out);
    assert_true(json_is_null(at(at(v, "timings"), "cache_miss")));
    assert_null(json_object_get(at(v, "timings"), "cache_miss_at"));
    assert_float_equal(json_number_value(at(at(v, "timings"), "decode_tokens_per_second")), 0, 0); /* nothing measured: not infinite */
    json_decref(v);
    buf_free(&out);
}

static void progress_is_an_event_without_choices(void **state)
{
    (void)state;
    struct buf out = BUF_INIT;
    reply_chunk_progress(&out, &head, &(struct progress){.total = 6000, .cached = 64, .done = 576, .elapsed_ms = 1234.4});
    json_t *v = parse_event(&out), *p = at(v, "prompt_progress");
    assert_int_equal(json_array_size(at(v, "choices")), 0);
    assert_int_equal(json_integer_value(at(p, "total")), 6000);
    assert_int_equal(json_integer_value(at(p, "cached")), 64);
    assert_int_equal(json_integer_value(at(p, "processed")), 576);
    assert_int_equal(json_integer_value(at(p, "time_ms")), 1234);
    json_decref(v);
    buf_free(&out);
}

static void the_whole_reply_has_openais_shape(void **state)
{
    (void)state;
    struct buf reasoning = buf_of("why"), content = buf_of("what"), out = BUF_INIT;
    struct usage usage = {.prompt_tokens = 5, .completion_tokens = 2};
    reply_whole(&out, &head, &reasoning, &content, NULL, FINISH_STOP, &usage, &timings);
    json_t *v = parse(out.data, out.len), *choice = only_choice(v, "chat.completion"), *message = at(choice, "message");
    assert_text(message, "role", "assistant");
    assert_text(message, "content", "what");
    assert_text(message, "reasoning_content", "why");
    assert_text(choice, "finish_reason", "stop");
    assert_true(json_is_null(at(choice, "logprobs")));
    assert_int_equal(json_integer_value(at(at(v, "usage"), "total_tokens")), 7);
    assert_timings(at(v, "timings"));
    json_decref(v);
    buf_clear(&out);
    reply_whole(&out, &head, NULL, NULL, NULL, FINISH_LENGTH, &usage, NULL);
    v = parse(out.data, out.len);
    message = at(only_choice(v, "chat.completion"), "message");
    assert_text(message, "content", "");
    assert_null(json_object_get(message, "reasoning_content"));
    json_decref(v);
    buf_free(&reasoning);
    buf_free(&content);
    buf_free(&out);
}

static void logprobs_carry_text_bytes_and_alternatives(void **state)
{
    (void)state;
    struct gguf *g = NULL;
    struct tokenizer *t = NULL;
    struct error err;
    assert_int_equal(gguf_open(&g, "tests/data/tiny-qwen3-q8_0.gguf", &err), 0);
    assert_int_equal(tokenizer_open(&t, g, &err), 0);
    gguf_close(g);
    int32_t half = -1; /* a token that is a part of a character */
    for (int32_t id = 0; id < tokenizer_vocab_size(t) && half < 0; id++) {
        size_t len;
        const char *bytes = tokenizer_bytes(t, id, &len);
        if (len == 1 && (unsigned char)bytes[0] == 0xC3)
            half = id;
    }
    assert_true(half >= 0);
    int32_t a = tokenizer_find(t, "a");
    assert_true(a >= 0);
    struct pick pick = {.id = a, .logprob = -0.25f, .n_top = 2, .top = {{a, -0.25f}, {half, -INFINITY}}};
    struct buf list = BUF_INIT, content = buf_of("a"), out = BUF_INIT;
    reply_logprob(&list, t, &pick);
    pick.n_top = 0;
    reply_logprob(&list, t, &pick);
    reply_chunk_delta(&out, &head, NULL, &content, &list);
    json_t *v = parse_event(&out), *entries = at(at(only_choice(v, "chat.completion.chunk"), "logprobs"), "content");
    assert_int_equal(json_array_size(entries), 2);
    json_t *first = json_array_get(entries, 0), *top = at(first, "top_logprobs"), *second = json_array_get(top, 1);
    assert_text(first, "token", "a");
    assert_true(json_real_value(at(first, "logprob")) == -0.25);
    assert_int_equal(json_array_size(at(first, "bytes")), 1);
    assert_int_equal(json_integer_value(json_array_get(at(first, "bytes"), 0)), 'a');
    assert_int_equal(json_array_size(top), 2);
    assert_text(second, "token", "\xEF\xBF\xBD");
    assert_int_equal(json_integer_value(json_array_get(at(second, "bytes"), 0)), 0xC3);
    assert_true(json_number_value(at(second, "logprob")) == -9999.0); /* JSON has no infinity */
    assert_int_equal(json_array_size(at(json_array_get(entries, 1), "top_logprobs")), 0);
    json_decref(v);
    buf_free(&list);
    buf_free(&content);
    buf_free(&out);
    tokenizer_close(t);
}

static void the_model_list_names_the_model_and_its_context(void **state)
{
    (void)state;
    struct buf out = BUF_INIT;
    reply_models(&out, "demo", 1700000000, 32768);
    json_t *v = parse(out.data, out.len), *entry = json_array_get(at(v, "data"), 0);
    assert_text(v, "object", "list");
    assert_int_equal(json_array_size(at(v, "data")), 1);
    assert_text(entry, "id", "demo");
    assert_text(entry, "object", "model");
    assert_int_equal(json_integer_value(at(entry, "context_length")), 32768);
    json_decref(v);
    buf_free(&out);
}

static void errors_have_openais_shape(void **state)
{
    (void)state;
    struct api_error err = {0};
    assert_int_equal(api_error_set(&err, 400, "invalid_value", "messages[0].role", "bad \"%s\"", "x"), -1);
    struct buf out = BUF_INIT;
    api_error_write(&err, &out);
    json_t *v = parse(out.data, out.len), *e = at(v, "error");
    assert_text(e, "message", "bad \"x\"");
    assert_text(e, "type", "invalid_request_error");
    assert_text(e, "param", "messages[0].role");
    assert_text(e, "code", "invalid_value");
    json_decref(v);
    buf_clear(&out);
    assert_int_equal(api_error_set(&err, 503, NULL, NULL, "busy"), -1);
    api_error_write(&err, &out);
    v = parse(out.data, out.len);
    e = at(v, "error");
    assert_text(e, "type", "server_error");
    assert_true(json_is_null(at(e, "param")));
    assert_true(json_is_null(at(e, "code")));
    json_decref(v);
    buf_free(&out);
    assert_int_equal(api_error_set(&err, 429, NULL, NULL, "slow down"), -1);
    assert_string_equal(err.type, "rate_limit_error");
    assert_int_equal(api_error_set(&err, 401, NULL, NULL, "who?"), -1);
    assert_string_equal(err.type, "authentication_error");
    assert_int_equal(api_error_set(NULL, 400, NULL, NULL, "nobody listens"), -1);
}

static void a_message_cut_in_the_middle_of_a_character_is_still_json(void **state)
{
    (void)state;
    char text[1200];
    memset(text, 'a', sizeof text);
    for (size_t i = 1; i + 1 < sizeof text; i += 2)
        memcpy(text + i, "\xC3\xB3", 2);
    text[sizeof text - 1] = '\0';
    struct api_error err = {0};
    struct buf out = BUF_INIT;
    api_error_set(&err, 400, NULL, text, "%s", text);
    api_error_write(&err, &out);
    json_t *v = parse(out.data, out.len);
    assert_in_range(json_string_length(at(at(v, "error"), "message")), 400, 600);
    json_decref(v);
    buf_free(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_code_point_survives_a_json_string),
        cmocka_unit_test(no_line_separator_of_any_kind_stands_in_an_event),
        cmocka_unit_test(invalid_utf8_becomes_replacements_and_the_reply_stays_json),
        cmocka_unit_test(the_first_chunk_gives_the_role),
        cmocka_unit_test(a_delta_holds_only_what_there_is),
        cmocka_unit_test(the_last_chunks_give_reason_usage_and_done),
        cmocka_unit_test(the_whole_reply_has_openais_shape),
        cmocka_unit_test(the_last_chunk_says_where_the_time_went),
        cmocka_unit_test(progress_is_an_event_without_choices),
        cmocka_unit_test(logprobs_carry_text_bytes_and_alternatives),
        cmocka_unit_test(the_model_list_names_the_model_and_its_context),
        cmocka_unit_test(errors_have_openais_shape),
        cmocka_unit_test(a_message_cut_in_the_middle_of_a_character_is_still_json),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
