/* api/chat_request.c: what a request may say, and how a refusal names what is wrong. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <float.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/chat_fields.h"
#include "api/chat_request.h"
#include "api/json_line.h"

static const struct chat_defaults defaults = {
    .temperature = 0.6f, .top_p = 0.95f, .min_p = 0.01f, .repeat_penalty = 1.05f, .top_k = 20, .n_vocab = 1000};

#define USER "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]"

static struct chat_request *parse_ok(const char *body)
{
    struct chat_request *r = NULL;
    struct api_error err = {0};
    if (chat_request_parse(&r, body, strlen(body), &defaults, &err) < 0)
        fail_msg("%s refused: %s", body, err.message);
    assert_non_null(r);
    return r;
}

/* A request whose members besides one user message are `fields`. */
static struct chat_request *with(const char *fields)
{
    char body[8192];
    assert_in_range(snprintf(body, sizeof body, "{%s%s%s}", USER, *fields ? "," : "", fields), 1, sizeof body - 1);
    return parse_ok(body);
}

static void refused_bytes(const char *body, size_t len, const char *param, const char *part)
{
    struct chat_request *r = NULL;
    struct api_error err = {0};
    if (chat_request_parse(&r, body, len, &defaults, &err) == 0)
        fail_msg("accepted: %s", body);
    assert_null(r);
    assert_int_equal(err.status, 400);
    assert_string_equal(err.type, "invalid_request_error");
    assert_non_null(err.code);
    if (strcmp(err.param, param) != 0 || !strstr(err.message, part))
        fail_msg("%s\n  gave param \"%s\", message \"%s\"\n  wanted \"%s\", \"%s\"", body, err.param, err.message, param, part);
}

static void refused(const char *body, const char *param, const char *part)
{
    refused_bytes(body, strlen(body), param, part);
}

/* A refusal of a request whose members besides one user message are `fields`. */
static void refused_with(const char *fields, const char *param, const char *part)
{
    char body[8192];
    assert_in_range(snprintf(body, sizeof body, "{%s,%s}", USER, fields), 1, sizeof body - 1);
    refused(body, param, part);
}

/* A refusal of a request with only these messages. */
static void refused_messages(const char *messages, const char *param, const char *part)
{
    char body[8192];
    assert_in_range(snprintf(body, sizeof body, "{\"messages\":[%s]}", messages), 1, sizeof body - 1);
    refused(body, param, part);
}

/* ---- the body ---- */

static void a_body_that_is_no_json_object_is_told_so(void **state)
{
    (void)state;
    refused("", "", "the body is empty");
    refused(" \r\n\t", "", "the body is empty");
    refused("[]", "", "must be a JSON object, not an array");
    refused("\"x\"", "", "must be a JSON object, not a string");
    refused("null", "", "must be a JSON object, not null");
    refused("{\"messages\": [{\"role\": \"user\"", "", "ends too early");
    refused("{" USER "} x", "", "something after the end");
    refused("{" USER ",}", "", "is not valid JSON (line 1, column");
    refused("\xEF\xBB\xBF{" USER "}", "", "byte order mark");
    refused("{\"messages\":[{\"role\":\"user\",\"content\":\"\xFF\"}]}", "", "is not valid UTF-8");
    refused("{\"messages\":[{\"role\":\"user\",\"content\":\"\xED\xA0\x80\"}]}", "", "is not valid UTF-8");
    refused("{\"messages\":[{\"role\":\"user\",\"content\":\"\\ud800\"}]}", "", "is not valid JSON");
    refused_bytes("{\"a\":1\0}", 8, "", "has a NUL byte");
}

static void a_key_given_twice_is_refused(void **state)
{
    (void)state;
    refused("{" USER ",\"seed\":1,\"seed\":2}", "", "same key twice");
    refused("{" USER ",\"x\":{\"a\":1,\"a\":2}}", "", "same key twice");
}

static void numbers_json_cannot_hold_are_refused(void **state)
{
    (void)state;
    refused("{" USER ",\"temperature\":NaN}", "", "is not valid JSON");
    refused("{" USER ",\"temperature\":Infinity}", "", "is not valid JSON");
    refused("{" USER ",\"temperature\":1e999}", "", "number that is too large");
    refused("{" USER ",\"seed\":18446744073709551616}", "", "number that is too large");
}

static void deep_nesting_is_refused_not_followed(void **state)
{
    (void)state;
    struct buf body = BUF_INIT;
    buf_puts(&body, "{\"x\":");
    for (int i = 0; i < 100000; i++)
        buf_putc(&body, '[');
    refused(body.data, "", "nested deeper than 2048");
    buf_free(&body);
}

static void errors_never_repeat_prompt_text(void **state)
{
    (void)state;
    static const char *const bodies[] = {
        "{\"messages\":[{\"role\":\"SECRET\",\"content\":\"x\"}]}",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"x\" SECRET}]}",
        "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"SECRET\"}]}]}",
        "{" USER ",\"logit_bias\":{\"SECRET\":1}}",
        "{" USER ",\"reasoning_effort\":\"SECRET\"}",
        "{" USER ",\"SECRET\":1,\"SECRET\":2}",
        "{" USER ",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"SECRET word\"}}]}",
    };
    for (size_t i = 0; i < sizeof bodies / sizeof bodies[0]; i++) {
        struct chat_request *r = NULL;
        struct api_error err = {0};
        assert_int_equal(chat_request_parse(&r, bodies[i], strlen(bodies[i]), &defaults, &err), -1);
        assert_null(strstr(err.message, "SECRET"));
        assert_null(strstr(err.param, "SECRET"));
    }
}

/* ---- fields ---- */

static void every_known_openai_field_is_in_the_table(void **state)
{
    (void)state;
    static const char *const openai[] = {
        "messages",
        "model",
        "audio",
        "frequency_penalty",
        "function_call",
        "functions",
        "logit_bias",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "metadata",
        "modalities",
        "n",
        "parallel_tool_calls",
        "prediction",
        "presence_penalty",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "response_format",
        "safety_identifier",
        "seed",
        "service_tier",
        "stop",
        "store",
        "stream",
        "stream_options",
        "temperature",
        "tool_choice",
        "tools",
        "top_logprobs",
        "top_p",
        "user",
        "verbosity",
        "web_search_options",
    };
    size_t n;
    const struct chat_field *fields = chat_fields(&n);
    for (size_t i = 0; i < sizeof openai / sizeof openai[0]; i++) {
        size_t k = 0;
        while (k < n && strcmp(fields[k].name, openai[i]) != 0)
            k++;
        if (k == n)
            fail_msg("%s is in no list", openai[i]);
    }
}

static void refused_fields_are_refused_by_name_and_null_counts_as_absent(void **state)
{
    (void)state;
    size_t n, refusals = 0;
    const struct chat_field *fields = chat_fields(&n);
    for (size_t i = 0; i < n; i++) {
        char text[200];
        if (fields[i].rule == FIELD_REFUSED) {
            snprintf(text, sizeof text, "\"%s\":{}", fields[i].name);
            refused_with(text, fields[i].name, fields[i].name);
            refusals++;
        }
        if (strcmp(fields[i].name, "messages") == 0)
            continue;
        snprintf(text, sizeof text, "\"%s\":null", fields[i].name);
        chat_request_free(with(text));
    }
    assert_int_equal(refusals, 5);
}

static void unknown_fields_are_ignored(void **state)
{
    (void)state;
    chat_request_free(with("\"cache_prompt\":true,\"x\":{\"y\":[1,2,{}]}"));
}

static void harmless_values_pass_and_others_are_refused_by_name(void **state)
{
    (void)state;
    chat_request_free(with("\"user\":\"u\",\"metadata\":{\"a\":\"b\"},\"store\":false,\"service_tier\":\"auto\",\"safety_identifier\":\"s\","
                           "\"prompt_cache_key\":\"k\",\"modalities\":[\"text\"],\"response_format\":{\"type\":\"text\"},\"n\":1,"
                           "\"verbosity\":\"medium\",\"parallel_tool_calls\":false,\"tool_choice\":\"none\""));
    chat_request_free(with("\"service_tier\":\"default\",\"n\":1.0,\"parallel_tool_calls\":true,\"tool_choice\":\"auto\""));
    refused_with("\"store\":true", "store", "must be false");
    refused_with("\"service_tier\":\"flex\"", "service_tier", "auto");
    refused_with("\"modalities\":[\"text\",\"audio\"]", "modalities", "text only");
    refused_with("\"verbosity\":\"low\"", "verbosity", "medium");
    refused_with("\"n\":2", "n", "must be 1");
    refused_with("\"n\":\"1\"", "n", "must be an integer, not a string");
    refused_with("\"response_format\":{\"type\":\"json_object\"}", "response_format.type", "json_object");
    refused_with("\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{}}", "response_format.type", "json_schema");
    refused_with("\"response_format\":{}", "response_format.type", "is missing");
    refused_with("\"tool_choice\":\"required\"", "tool_choice", "cannot force");
    refused_with("\"tool_choice\":{\"type\":\"function\",\"function\":{\"name\":\"f\"}}", "tool_choice", "cannot force");
    refused_with("\"user\":1", "user", "must be a string, not a number");
    refused_with("\"model\":[]", "model", "must be a string, not an array");
    refused_with("\"parallel_tool_calls\":false,\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}]", "parallel_tool_calls",
                 "must be true");
}

/* ---- sampling ---- */

static void a_silent_request_gets_the_servers_defaults(void **state)
{
    (void)state;
    struct chat_request *r = with("");
    assert_null(r->model.data);
    assert_int_equal(r->max_tokens, -1);
    assert_true(r->sampling.temperature == defaults.temperature);
    assert_true(r->sampling.top_p == defaults.top_p);
    assert_true(r->sampling.min_p == defaults.min_p);
    assert_true(r->sampling.repeat_penalty == defaults.repeat_penalty);
    assert_int_equal(r->sampling.top_k, 20);
    assert_true(r->sampling.presence_penalty == 0 && r->sampling.frequency_penalty == 0);
    assert_false(r->seed_given || r->stream || r->include_usage || r->sampling.want_logprob || r->preserve_thinking);
    assert_true(r->enable_thinking);
    assert_int_equal(r->n_stop + r->n_tools + r->sampling.n_bias + (size_t)r->sampling.n_top, 0);
    chat_request_free(r);
}

static void every_sampling_field_reaches_the_sampler(void **state)
{
    (void)state;
    struct chat_request *r =
        with("\"model\":\"m\",\"max_tokens\":5.0,\"max_completion_tokens\":5,\"temperature\":0,\"top_p\":1,\"top_k\":40,\"min_p\":0.5,"
             "\"seed\":-3,\"presence_penalty\":-2,\"frequency_penalty\":2,\"repeat_penalty\":1.5,\"logprobs\":true,\"top_logprobs\":20,"
             "\"logit_bias\":{\"7\":-100,\"999\":1.5},\"stream\":true,\"stream_options\":{\"include_usage\":true}");
    assert_string_equal(r->model.data, "m");
    assert_int_equal(r->max_tokens, 5);
    assert_true(r->sampling.temperature == 0.0f && r->sampling.top_p == 1.0f && r->sampling.min_p == 0.5f);
    assert_int_equal(r->sampling.top_k, 40);
    assert_true(r->seed_given && r->sampling.seed == (uint64_t)-3);
    assert_true(r->sampling.presence_penalty == -2.0f && r->sampling.frequency_penalty == 2.0f && r->sampling.repeat_penalty == 1.5f);
    assert_true(r->sampling.want_logprob);
    assert_int_equal(r->sampling.n_top, 20);
    assert_ptr_equal(r->sampling.bias, r->bias);
    assert_int_equal(r->sampling.n_bias, 2);
    assert_int_equal(r->bias[0].id, 7);
    assert_true(r->bias[0].bias == -100.0f && r->bias[1].bias == 1.5f);
    assert_true(r->stream && r->include_usage);
    chat_request_free(r);
}

static void a_namespace_is_a_plain_name_or_refused(void **state)
{
    (void)state;
    struct chat_request *r = with("\"cache_namespace\":\"patient-7.a_B\",\"stream_options\":{\"include_progress\":true}");
    assert_string_equal(r->cache_namespace.data, "patient-7.a_B");
    assert_true(r->include_progress);
    chat_request_free(r);
    r = with("\"cache_namespace\":null");
    assert_null(r->cache_namespace.data);
    chat_request_free(r);
    static const char *const bad[] = {"", ".", "..", "../x", "/etc/passwd", "a/b", "-a", "a b", "a\\u0000b", "\u0430"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char field[64];
        snprintf(field, sizeof field, "\"cache_namespace\":\"%s\"", bad[i]);
        refused_with(field, "cache_namespace", "cache_namespace must be 1 to 64 characters");
    }
    refused_with("\"cache_namespace\":7", "cache_namespace", "must be a string");
}

static void edge_values_become_what_the_sampler_can_take(void **state)
{
    (void)state;
    struct chat_request *r = with("\"top_p\":0,\"top_k\":-1,\"min_p\":0.99999999999,\"seed\":-9223372036854775808,\"repetition_penalty\":2");
    assert_true(r->sampling.top_p > 0 && r->sampling.top_p <= FLT_MIN); /* the likeliest token alone */
    assert_int_equal(r->sampling.top_k, 0);
    assert_true(r->sampling.min_p < 1.0f);
    assert_true(r->sampling.seed == (uint64_t)INT64_MIN);
    assert_true(r->sampling.repeat_penalty == 2.0f);
    chat_request_free(r);
    r = with("\"repeat_penalty\":1.5,\"repetition_penalty\":1.5,\"max_completion_tokens\":9223372036854775807");
    assert_true(r->max_tokens == INT64_MAX);
    chat_request_free(r);
}

static void values_out_of_range_are_refused_with_the_range(void **state)
{
    (void)state;
    refused_with("\"temperature\":2.1", "temperature", "at least 0 and at most 2");
    refused_with("\"temperature\":-0.1", "temperature", "at least 0 and at most 2");
    refused_with("\"temperature\":\"1\"", "temperature", "must be a number, not a string");
    refused_with("\"temperature\":true", "temperature", "must be a number, not a boolean");
    refused_with("\"top_p\":1.01", "top_p", "at least 0 and at most 1");
    refused_with("\"min_p\":1", "min_p", "below 1");
    refused_with("\"top_k\":-2", "top_k", "at least -1");
    refused_with("\"top_k\":2147483648", "top_k", "at most 2147483647");
    refused_with("\"presence_penalty\":2.5", "presence_penalty", "at most 2");
    refused_with("\"frequency_penalty\":-2.5", "frequency_penalty", "at least -2");
    refused_with("\"repeat_penalty\":0", "repeat_penalty", "above 0");
    refused_with("\"repeat_penalty\":1.1,\"repetition_penalty\":1.2", "repetition_penalty", "differ");
    refused_with("\"seed\":1.5", "seed", "without a fraction");
    refused_with("\"seed\":1e300", "seed", "integer");
    refused_with("\"seed\":\"1\"", "seed", "must be an integer, not a string");
    refused_with("\"max_tokens\":0", "max_tokens", "at least 1");
    refused_with("\"max_tokens\":1.5", "max_tokens", "without a fraction");
    refused_with("\"max_tokens\":5,\"max_completion_tokens\":6", "max_completion_tokens", "differ");
    refused_with("\"logprobs\":1", "logprobs", "must be a boolean, not a number");
    refused_with("\"logprobs\":true,\"top_logprobs\":21", "top_logprobs", "at most 20");
    refused_with("\"top_logprobs\":2", "top_logprobs", "needs logprobs");
    refused_with("\"logit_bias\":{\"1000\":1}", "logit_bias", "from 0 to 999");
    refused_with("\"logit_bias\":{\"-1\":1}", "logit_bias", "token ids");
    refused_with("\"logit_bias\":{\"\":1}", "logit_bias", "token ids");
    refused_with("\"logit_bias\":{\"99999999999999999999\":1}", "logit_bias", "token ids");
    refused_with("\"logit_bias\":{\"7\":101}", "logit_bias.7", "at most 100");
    refused_with("\"logit_bias\":{\"7\":\"1\"}", "logit_bias.7", "must be a number");
    refused_with("\"logit_bias\":{\"7\":1,\"07\":1}", "logit_bias.7", "twice");
    refused_with("\"logit_bias\":[]", "logit_bias", "must be an object, not an array");
    refused_with("\"stream\":\"yes\"", "stream", "must be a boolean");
    refused_with("\"stream_options\":{\"include_usage\":1}", "stream_options.include_usage", "must be a boolean");
    refused_with("\"stream_options\":{\"include_progress\":1}", "stream_options.include_progress", "must be a boolean");
    refused_with("\"stream_options\":true", "stream_options", "must be an object");
}

static void stop_is_a_string_or_up_to_sixteen(void **state)
{
    (void)state;
    struct chat_request *r = with("\"stop\":\"a\\u0000b\"");
    assert_int_equal(r->n_stop, 1);
    assert_int_equal(r->stop[0].len, 3); /* a NUL is a character like any other */
    chat_request_free(r);
    struct buf fifteen = BUF_INIT;
    buf_puts(&fifteen, "\"stop\":[\"a\"");
    for (int i = 1; i < 15; i++)
        buf_puts(&fifteen, ",\"b\"");
    char sixteen[200], seventeen[200];
    snprintf(sixteen, sizeof sixteen, "%s,\"c\"]", fifteen.data);
    snprintf(seventeen, sizeof seventeen, "%s,\"c\",\"d\"]", fifteen.data);
    buf_free(&fifteen);
    r = with(sixteen);
    assert_int_equal(r->n_stop, 16);
    assert_string_equal(r->stop[15].data, "c");
    chat_request_free(r);
    r = with("\"stop\":[]");
    assert_int_equal(r->n_stop, 0);
    chat_request_free(r);
    refused_with(seventeen, "stop", "at most 16");
    refused_with("\"stop\":\"\"", "stop", "must not be empty");
    refused_with("\"stop\":[\"a\",\"\"]", "stop[1]", "must not be empty");
    refused_with("\"stop\":[\"a\",1]", "stop[1]", "must be a string, not a number");
    refused_with("\"stop\":{}", "stop", "a string or an array of strings");
}

static void thinking_can_be_turned_off_in_two_ways(void **state)
{
    (void)state;
    static const struct {
        const char *fields;
        bool thinking, preserve;
    } cases[] = {
        {"\"chat_template_kwargs\":{\"enable_thinking\":false}", false, false},
        {"\"chat_template_kwargs\":{\"enable_thinking\":true,\"preserve_thinking\":true,\"other\":1}", true, true},
        {"\"reasoning_effort\":\"none\"", false, false},
        {"\"reasoning_effort\":\"none\",\"chat_template_kwargs\":{\"enable_thinking\":false}", false, false},
        {"\"reasoning_effort\":\"low\",\"chat_template_kwargs\":{\"enable_thinking\":false}", false, false},
        {"\"reasoning_effort\":\"minimal\"", true, false},
        {"\"reasoning_effort\":\"high\"", true, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct chat_request *r = with(cases[i].fields);
        assert_int_equal(r->enable_thinking, cases[i].thinking);
        assert_int_equal(r->preserve_thinking, cases[i].preserve);
        chat_request_free(r);
    }
    refused_with("\"reasoning_effort\":\"huge\"", "reasoning_effort", "none");
    refused_with("\"reasoning_effort\":1", "reasoning_effort", "must be a string");
    refused_with("\"reasoning_effort\":\"none\",\"chat_template_kwargs\":{\"enable_thinking\":true}", "reasoning_effort", "contradict");
    refused_with("\"chat_template_kwargs\":{\"enable_thinking\":\"no\"}", "chat_template_kwargs.enable_thinking", "must be a boolean");
    refused_with("\"chat_template_kwargs\":[]", "chat_template_kwargs", "must be an object");
}

/* ---- messages ---- */

static void messages_of_every_role_are_read(void **state)
{
    (void)state;
    struct chat_request *r = parse_ok(
        "{\"messages\":[{\"role\":\"developer\",\"content\":\"d\",\"name\":\"n\"},{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},"
        "{\"type\":\"text\",\"text\":\"\\u0142\"}]},{\"role\":\"assistant\",\"content\":null,\"reasoning_content\":\"r\",\"tool_calls\":[{\"id\":"
        "\"c\",\"type\":"
        "\"function\",\"function\":{\"name\":\"f\",\"arguments\":\"{\\\"b\\\":1,\\\"a\\\":\\\"x\\\"}\"}}]},{\"role\":\"tool\",\"tool_call_id\":\"c\","
        "\"content\":\"\"},"
        "{\"role\":\"system\",\"content\":\"s\"},{\"role\":\"assistant\",\"content\":\"x\",\"reasoning\":\"alias\",\"tool_calls\":null,\"refusal\":"
        "null}]}");
    assert_int_equal(r->n_messages, 6);
    assert_int_equal(r->messages[0].role, ROLE_SYSTEM);
    assert_int_equal(r->messages[0].n_parts, 0);
    assert_string_equal(r->messages[1].content.data, "a\xC5\x82");
    assert_int_equal(r->messages[1].n_parts, 2);
    const struct chat_message *m = &r->messages[2];
    assert_null(m->content.data);
    assert_string_equal(m->reasoning.data, "r");
    assert_int_equal(m->n_calls, 1);
    assert_string_equal(m->calls[0].id.data, "c");
    assert_string_equal(m->calls[0].name.data, "f");
    assert_string_equal(m->calls[0].arguments_json.data, "{\"b\": 1, \"a\": \"x\"}");
    assert_int_equal(m->calls[0].n_arguments, 2);
    assert_string_equal(m->calls[0].arguments[0].name.data, "b"); /* in the order given */
    assert_false(m->calls[0].arguments[0].is_string);
    assert_string_equal(m->calls[0].arguments[1].value.data, "x");
    assert_true(m->calls[0].arguments[1].is_string);
    assert_int_equal(r->messages[3].role, ROLE_TOOL);
    assert_string_equal(r->messages[3].tool_call_id.data, "c");
    assert_string_equal(r->messages[3].content.data, "");
    assert_string_equal(r->messages[5].reasoning.data, "alias");
    chat_request_free(r);
}

static void a_wrong_message_is_named_by_its_path(void **state)
{
    (void)state;
    refused("{}", "messages", "messages is missing; it must be an array");
    refused("{\"messages\":null}", "messages", "missing");
    refused("{\"messages\":{}}", "messages", "must be an array, not an object");
    refused("{\"messages\":[]}", "messages", "at least one message");
    refused_messages("1", "messages[0]", "must be an object, not a number");
    refused_messages("{\"content\":\"x\"}", "messages[0].role", "messages[0].role is missing");
    refused_messages("{\"role\":\"function\",\"content\":\"x\"}", "messages[0].role", "\"assistant\" or \"tool\"");
    refused_messages("{\"role\":1}", "messages[0].role", "must be a string, not a number");
    refused_messages("{\"role\":\"user\"}", "messages[0].content", "is missing");
    refused_messages("{\"role\":\"user\",\"content\":null}", "messages[0].content", "not null");
    refused_messages("{\"role\":\"user\",\"content\":1}", "messages[0].content", "a string or an array of text parts, not a number");
    refused_messages("{\"role\":\"user\",\"content\":[]}", "messages[0].content", "at least one part");
    refused_messages("{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"user\",\"content\":[1]}", "messages[1].content[0]", "must be an object");
    refused_messages("{\"role\":\"user\",\"content\":[{\"text\":\"a\"}]}", "messages[0].content[0].type", "is missing");
    refused_messages("{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},{\"type\":\"image_url\",\"image_url\":{}}]}",
                     "messages[0].content[1].type", "no images");
    refused_messages("{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":5}]}", "messages[0].content[0].text",
                     "must be a string, not a number");
    refused_messages("{\"role\":\"user\",\"content\":\"x\",\"name\":5}", "messages[0].name", "must be a string");
    refused_messages("{\"role\":\"user\",\"content\":\"x\",\"tool_calls\":[]}", "messages[0].tool_calls", "only an assistant");
    refused_messages("{\"role\":\"assistant\",\"content\":null}", "messages[0].content", "tool_calls");
    refused_messages("{\"role\":\"assistant\",\"content\":\"x\",\"reasoning_content\":5}", "messages[0].reasoning_content", "must be a string");
    refused_messages("{\"role\":\"assistant\",\"content\":\"x\",\"function_call\":{}}", "messages[0].function_call", "not supported");
    refused_messages("{\"role\":\"tool\",\"content\":\"x\",\"tool_call_id\":5}", "messages[0].tool_call_id", "must be a string");
#define CALL(inside) "{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[" inside "]}"
    refused_messages(CALL("5"), "messages[0].tool_calls[0]", "must be an object");
    refused_messages(CALL("{\"type\":\"custom\"}"), "messages[0].tool_calls[0].type", "function");
    refused_messages(CALL("{}"), "messages[0].tool_calls[0].function", "is missing");
    refused_messages(CALL("{\"function\":{}}"), "messages[0].tool_calls[0].function.name", "is missing");
    refused_messages(CALL("{\"function\":{\"name\":\"a b\"}}"), "messages[0].tool_calls[0].function.name", "letters");
    refused_messages(CALL("{\"function\":{\"name\":\"f\",\"arguments\":\"{\"}}"), "messages[0].tool_calls[0].function.arguments", "ends too early");
    refused_messages(CALL("{\"function\":{\"name\":\"f\",\"arguments\":\"[]\"}}"), "messages[0].tool_calls[0].function.arguments",
                     "a string that holds a JSON object, not an array");
    refused_messages(CALL("{\"function\":{\"name\":\"f\",\"arguments\":[]}}"), "messages[0].tool_calls[0].function.arguments", "not an array");
    refused_messages(CALL("{\"function\":{\"name\":\"f\",\"arguments\":\"{\\\"a\\\":1,\\\"a\\\":2}\"}}"),
                     "messages[0].tool_calls[0].function.arguments", "same key twice");
}

static void a_call_without_arguments_has_none(void **state)
{
    (void)state;
    static const char *const forms[] = {"", ",\"arguments\":null", ",\"arguments\":\"\"", ",\"arguments\":\"{}\"", ",\"arguments\":{}"};
    for (size_t i = 0; i < sizeof forms / sizeof forms[0]; i++) {
        char body[400];
        snprintf(body, sizeof body, "{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\"%s}}]}]}", forms[i]);
        struct chat_request *r = parse_ok(body);
        assert_int_equal(r->messages[0].calls[0].n_arguments, 0);
        assert_string_equal(r->messages[0].calls[0].arguments_json.data, "{}");
        chat_request_free(r);
    }
}

static void too_many_of_anything_is_refused_with_the_limit(void **state)
{
    (void)state;
    static const struct {
        const char *begin, *item, *end, *param, *limit;
        int most;
    } cases[] = {
        {"{\"messages\":[", "{\"role\":\"user\",\"content\":\"\"}", "]}", "messages", "at most 16384", 16384},
        {"{" USER ",\"tools\":[", "{\"type\":\"function\",\"function\":{\"name\":\"f\"}}", "]}", "tools", "at most 128", 128},
        {"{\"messages\":[{\"role\":\"assistant\",\"tool_calls\":[", "{\"function\":{\"name\":\"f\"}}", "]}]}", "messages[0].tool_calls",
         "at most 128", 128},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct buf b = BUF_INIT;
        buf_puts(&b, cases[i].begin);
        for (int k = 0; k < cases[i].most; k++)
            buf_printf(&b, "%s%s", k ? "," : "", cases[i].item);
        struct buf over = BUF_INIT;
        buf_printf(&over, "%s,%s%s", b.data, cases[i].item, cases[i].end);
        buf_puts(&b, cases[i].end);
        chat_request_free(parse_ok(b.data));
        refused(over.data, cases[i].param, cases[i].limit);
        buf_free(&b);
        buf_free(&over);
    }
    struct buf b = BUF_INIT;
    buf_puts(&b, "{" USER ",\"logit_bias\":{\"0\":1");
    for (int k = 1; k <= 1024; k++)
        buf_printf(&b, ",\"%d\":1", k);
    buf_puts(&b, "}}");
    refused(b.data, "logit_bias", "at most 1024");
    buf_free(&b);
}

/* ---- tools ---- */

static void tool_definitions_are_kept_exactly_as_given(void **state)
{
    (void)state;
    struct chat_request *r = with(
        "\"tools\":[{\"type\":\"function\",\"strict\":true,\"function\":{\"parameters\":{\"z\":1,\"a\":[1.0,1e-7,-0.0,true,null,\"\\u0142\\n\"]},"
        "\"name\":\"ns.get-it/x:1\"}}]");
    assert_int_equal(r->n_tools, 1);
    assert_string_equal(r->tools[0].data,
                        "{\"type\": \"function\", \"strict\": true, \"function\": {\"parameters\": {\"z\": 1, \"a\": [1.0, 1e-07, -0.0, true, "
                        "null, \"\xC5\x82\\n\"]}, \"name\": \"ns.get-it/x:1\"}}");
    chat_request_free(r);
    r = with("\"tool_choice\":\"none\",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}]");
    assert_int_equal(r->n_tools, 0); /* the model is not to know of them */
    chat_request_free(r);
    refused_with("\"tools\":{}", "tools", "must be an array");
    refused_with("\"tools\":[1]", "tools[0]", "must be an object");
    refused_with("\"tools\":[{\"function\":{\"name\":\"f\"}}]", "tools[0].type", "is missing");
    refused_with("\"tools\":[{\"type\":\"custom\"}]", "tools[0].type", "must be \"function\"");
    refused_with("\"tools\":[{\"type\":\"function\"}]", "tools[0].function", "is missing");
    refused_with("\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"\"}}]", "tools[0].function.name", "1 to 128");
    refused_with("\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"a>b\"}}]", "tools[0].function.name", "1 to 128");
    refused_with("\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":[]}}]", "tools[0].function.parameters",
                 "must be an object");
    refused_with("\"tool_choice\":\"none\",\"tools\":[{\"type\":\"function\"}]", "tools[0].function", "is missing");
}

static void numbers_are_printed_as_python_prints_them(void **state)
{
    (void)state;
    static const char *const pairs[][2] = {
        {"0.1", "0.1"},
        {"1.5", "1.5"},
        {"5.0", "5.0"},
        {"100.0", "100.0"},
        {"1e15", "1000000000000000.0"},
        {"1e16", "1e+16"},
        {"123456789012345680.0", "1.2345678901234568e+17"},
        {"0.0001", "0.0001"},
        {"0.00001", "1e-05"},
        {"0.00012345", "0.00012345"},
        {"1.7976931348623157e308", "1.7976931348623157e+308"},
        {"5e-324", "5e-324"},
        {"0.30000000000000004", "0.30000000000000004"},
        {"-2.50", "-2.5"},
        {"0.0", "0.0"},
        {"-0.0", "-0.0"},
        {"1E2", "100.0"},
        {"9007199254740993.0", "9007199254740992.0"},
        {"9223372036854775807", "9223372036854775807"},
        {"-9223372036854775808", "-9223372036854775808"},
        {"-1e-10", "-1e-10"},
        {"12345.678e-9", "1.2345678e-05"},
        {"9999999999999998.0", "9999999999999998.0"},
    };
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        json_t *v = json_loads(pairs[i][0], JSON_DECODE_ANY, NULL);
        assert_non_null(v);
        struct buf b = BUF_INIT;
        json_line_write(&b, v);
        assert_string_equal(b.data, pairs[i][1]);
        json_decref(v);
        buf_free(&b);
    }
}

static void strings_are_escaped_as_python_escapes_them(void **state)
{
    (void)state;
    static const char text[] = "\"\\\x01\b\t\n\f\r\x1F/\x7F<\xE2\x80\xA8\xF0\x9F\x99\x82";
    json_t *v = json_stringn(text, sizeof text - 1);
    struct buf b = BUF_INIT;
    json_line_write(&b, v);
    assert_string_equal(b.data, "\"\\\"\\\\\\u0001\\b\\t\\n\\f\\r\\u001f/\x7F<\xE2\x80\xA8\xF0\x9F\x99\x82\"");
    json_decref(v);
    buf_free(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_body_that_is_no_json_object_is_told_so),
        cmocka_unit_test(a_key_given_twice_is_refused),
        cmocka_unit_test(numbers_json_cannot_hold_are_refused),
        cmocka_unit_test(deep_nesting_is_refused_not_followed),
        cmocka_unit_test(errors_never_repeat_prompt_text),
        cmocka_unit_test(every_known_openai_field_is_in_the_table),
        cmocka_unit_test(refused_fields_are_refused_by_name_and_null_counts_as_absent),
        cmocka_unit_test(unknown_fields_are_ignored),
        cmocka_unit_test(harmless_values_pass_and_others_are_refused_by_name),
        cmocka_unit_test(a_silent_request_gets_the_servers_defaults),
        cmocka_unit_test(every_sampling_field_reaches_the_sampler),
        cmocka_unit_test(a_namespace_is_a_plain_name_or_refused),
        cmocka_unit_test(edge_values_become_what_the_sampler_can_take),
        cmocka_unit_test(values_out_of_range_are_refused_with_the_range),
        cmocka_unit_test(stop_is_a_string_or_up_to_sixteen),
        cmocka_unit_test(thinking_can_be_turned_off_in_two_ways),
        cmocka_unit_test(messages_of_every_role_are_read),
        cmocka_unit_test(a_wrong_message_is_named_by_its_path),
        cmocka_unit_test(a_call_without_arguments_has_none),
        cmocka_unit_test(too_many_of_anything_is_refused_with_the_limit),
        cmocka_unit_test(tool_definitions_are_kept_exactly_as_given),
        cmocka_unit_test(numbers_are_printed_as_python_prints_them),
        cmocka_unit_test(strings_are_escaped_as_python_escapes_them),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
