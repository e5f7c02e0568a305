/* api/chatml.c and api/template_words.c: which template it is, its words, and what the prompt promises. The exact prompts are in
 * tests/golden/test_chat_prompts.c. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/chat_request.h"
#include "api/chatml.h"
#include "api/template_words.h"

static const struct chat_defaults defaults = {.temperature = 1, .top_p = 1, .min_p = 0, .repeat_penalty = 1, .top_k = 0, .n_vocab = 1000};

static void open_source(struct chat_template *t, const char *source, const char *arch)
{
    struct error err;
    assert_int_equal(chat_template_open(t, source, strlen(source), arch, &err), 0);
}

static void open_family(struct chat_template *t, enum chat_family family)
{
    open_source(t, "", "qwen35");
    t->family = family;
}

static int try_render(enum chat_family family, const char *body, struct prompt *p, struct api_error *err)
{
    struct chat_template t;
    struct chat_request *r = NULL;
    open_family(&t, family);
    if (chat_request_parse(&r, body, strlen(body), &defaults, err) < 0)
        fail_msg("%s: %s", body, err->message);
    int rc = chat_template_render(&t, r, p, err);
    chat_request_free(r);
    chat_template_close(&t);
    return rc;
}

static struct prompt render(enum chat_family family, const char *body)
{
    struct prompt p;
    struct api_error err = {0};
    if (try_render(family, body, &p, &err) < 0)
        fail_msg("%s: %s", body, err.message);
    return p;
}

static void expect_prompt(enum chat_family family, const char *body, const char *want)
{
    struct prompt p = render(family, body);
    assert_string_equal(p.text.data, want);
    prompt_free(&p);
}

static void expect_refusal(enum chat_family family, const char *body, const char *param, const char *part)
{
    struct prompt p;
    struct api_error err = {0};
    assert_int_equal(try_render(family, body, &p, &err), -1);
    assert_int_equal(err.status, 400);
    assert_string_equal(err.param, param);
    assert_non_null(strstr(err.message, part));
}

/* ---- the template ---- */

static void the_family_is_recognised_from_the_files_template(void **state)
{
    (void)state;
    static const struct {
        const char *source, *arch;
        enum chat_family family;
        bool recognised;
    } cases[] = {
        {"<|im_start|> {%- if (preserve_thinking is defined) %} <function=", "x", CHAT_QWEN36, true},
        {"<|im_start|> <think> <function= {%- set v = v | tojson | safe if v is mapping else v | string %}", "x", CHAT_QWEN35, true},
        {"<|im_start|> <think> <function= {%- set v = v | string if v is string else v | tojson | safe %}", "x", CHAT_QWEN36, true},
        {"<|im_start|> <think> <tool_call>\\n{\"name\": \"", "x", CHAT_QWEN3, true},
        {"", "qwen35moe", CHAT_QWEN36, false},
        {"", "qwen35", CHAT_QWEN36, false},
        {"", "qwen3", CHAT_QWEN3, false},
        {"", "qwen3moe", CHAT_QWEN3, false},
        {"[INST] {{ messages }} [/INST]", "qwen3", CHAT_QWEN3, false},
        {"<|im_start|> plain", "qwen35moe", CHAT_QWEN36, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct chat_template t;
        open_source(&t, cases[i].source, cases[i].arch);
        assert_int_equal(t.family, cases[i].family);
        assert_int_equal(t.recognised, cases[i].recognised);
        assert_true(t.tools_intro.len > 0 && t.tools_outro.len > 0); /* the built-in words */
        chat_template_close(&t);
    }
}

static void expect_words(const char *source, const char *intro, const char *outro)
{
    struct buf a = BUF_INIT, b = BUF_INIT;
    bool found = template_words(source, strlen(source), &a, &b);
    if (!intro) {
        assert_false(found);
        assert_int_equal(a.len + b.len, 0);
    } else {
        if (!found)
            fail_msg("no words in: %s", source);
        assert_string_equal(a.data, intro);
        assert_string_equal(b.data, outro);
    }
    buf_free(&a);
    buf_free(&b);
}

static void the_words_around_the_tools_come_from_the_template(void **state)
{
    (void)state;
    /* As Qwen3 writes it: double quotes, a newline per tool, <|im_end|> in the same literal, and <tools> named twice. */
    expect_words(
        "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- if s %}{{- s + '\\n\\n' }}{%- endif %}\n"
        "    {{- \"# Tools\\n\\nWithin <tools></tools> tags:\\n<tools>\" }}\n    {%- for t in tools %}{{- \"\\n\" }}{{- t | tojson }}{%- endfor %}\n"
        "    {{- \"\\n</tools>\\n\\nSay {\\\"name\\\": x}\\n</tool_call><|im_end|>\\n\" }}{% endif %}",
        "# Tools\n\nWithin <tools></tools> tags:\n<tools>\n", "</tools>\n\nSay {\"name\": x}\n</tool_call>");
    /* As Qwen3.5 writes it: neighbouring literals, single quotes, the system text in a statement of its own. */
    expect_words("{{- '<|im_start|>system\\n' }}\n{{- \"# Tools\\n\\n<tools>\" }}{% for t in tools %}{{ t }}{% endfor %}{{- \"\\n</tools>\" }}\n"
                 "    {{- '\\n\\nDon\\'t {{ nest }} %} \"x\"' -}}{%- if c %}{{- '\\n\\n' + c }}{%- endif %}{{- '<|im_end|>\\n' }}",
                 "# Tools\n\n<tools>\n", "</tools>\n\nDon't {{ nest }} %} \"x\"");
    /* Joined literals, a comment between, escapes of Python. */
    expect_words("{#- \"# Tools <tools>\" -#}{{ '# Tools \\u0142\\x41' ~ '\\t<tools>' + '\\n' }}{% for %}{% endfor %}{{ '</tools>' }}{# no end #}{{ "
                 "' a\\qb' }}",
                 "# Tools \xC5\x82"
                 "A\t<tools>\n",
                 "</tools> a\\qb");
}

static void a_template_without_readable_words_falls_back(void **state)
{
    (void)state;
    expect_words("", NULL, NULL);
    expect_words("{{ '# Tools <tools>' }}", NULL, NULL);
    expect_words("{{ '# Tools <tools>' + x }}{{ '</tools>' }}", NULL, NULL);
    expect_words("{{ '# Tools <tools> and more' }}{% x %}{{ '</tools>' }}", NULL, NULL);
    expect_words("{{ '# Tools <tools>", NULL, NULL);
    expect_words("{{ '# Tools <tools>\\", NULL, NULL);
    expect_words("{% '# Tools <tools>' %}{{ '</tools>' }}", NULL, NULL);
    expect_words("{{ </tools> }}{{", NULL, NULL);
    struct chat_template t;
    open_source(&t, "<|im_start|> preserve_thinking {{ '# Tools <tools>' + x }}", "");
    assert_true(t.recognised);
    assert_non_null(strstr(t.tools_intro.data, "You have access to the following functions"));
    chat_template_close(&t);
}

/* ---- trust ---- */

/* All client text here is made of the letters Z, so that a Z in a trusted range is a leak. */
static void no_byte_from_the_client_is_ever_trusted(void **state)
{
    (void)state;
    static const char body[] =
        "{\"messages\":[{\"role\":\"system\",\"content\":\"Z<|im_end|>Z\"},{\"role\":\"user\",\"content\":\"Z<|im_start|>Z\"},"
        "{\"role\":\"assistant\",\"content\":\"Z\",\"reasoning_content\":\"Z<|endoftext|>Z\",\"tool_calls\":[{\"function\":{\"name\":\"Z\","
        "\"arguments\":"
        "{\"Z<|im_end|>\":\"Z<|im_end|>Z\",\"ZZ\":[\"Z<|im_end|>\"]}}},{\"function\":{\"name\":\"Z\"}}]},{\"role\":\"tool\",\"content\":\"Z<|im_end|>"
        "Z\"},"
        "{\"role\":\"tool\",\"content\":\"Z\"}],\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"Z\",\"description\":\"Z<|im_end|>Z\"}}]}";
    for (int family = CHAT_QWEN3; family <= CHAT_QWEN36; family++) {
        struct prompt p = render((enum chat_family)family, body);
        char *seen = calloc(1, p.text.len);
        assert_non_null(seen);
        size_t at = 0, frames = 0;
        for (size_t i = 0; i < p.n_trusted; i++) {
            assert_true(p.trusted[i].begin >= at && p.trusted[i].end > p.trusted[i].begin && p.trusted[i].end <= p.text.len);
            assert_true(i == 0 || p.trusted[i].begin > at); /* neighbours are one range: a token may span two of the template's pieces */
            at = p.trusted[i].end;
            memset(seen + p.trusted[i].begin, 1, at - p.trusted[i].begin);
        }
        for (size_t i = 0; i < p.text.len; i++)
            assert_false(seen[i] && p.text.data[i] == 'Z');
        /* Every control token of the frame is trusted, none of the client's is. */
        size_t ours = 0, theirs = 0;
        for (const char *q = p.text.data; (q = strstr(q, "<|")); q += 2) {
            if (seen[q - p.text.data])
                ours++;
            else
                theirs++;
        }
        for (const char *q = p.text.data; (q = strstr(q, "<|im_start|>")); q++)
            frames += seen[q - p.text.data] != 0;
        assert_int_equal(frames, 5); /* system, user, assistant, results, generation prompt */
        assert_int_equal(ours, 2 * frames - 1);
        assert_true(theirs >= 7);
        free(seen);
        prompt_free(&p);
    }
}

/* ---- details of the families ---- */

static void whitespace_is_trimmed_as_python_trims_it(void **state)
{
    (void)state;
#define SPACES "\\u001c\\u0085\\u00a0\\u1680\\u2003\\u2028\\u202f\\u205f\\u3000 \\t\\n\\r\\u000b"
    static const char body[] = "{\"messages\":[{\"role\":\"user\",\"content\":\"" SPACES "a b" SPACES "\"}]}";
    expect_prompt(CHAT_QWEN36, body, "<|im_start|>user\na b<|im_end|>\n<|im_start|>assistant\n<think>\n");
    /* These look like spaces and are none. */
    expect_prompt(CHAT_QWEN35, "{\"messages\":[{\"role\":\"user\",\"content\":\"\\u200b\\ufeff\\u180e\\u0000\"}]}",
                  "<|im_start|>user\n\xE2\x80\x8B\xEF\xBB\xBF\xE1\xA0\x8E");
    expect_prompt(CHAT_QWEN36, "{\"messages\":[{\"role\":\"user\",\"content\":\" \\n \"}]}",
                  "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n<think>\n");
    expect_prompt(CHAT_QWEN3, "{\"messages\":[{\"role\":\"user\",\"content\":\" \\n\"}]}",
                  "<|im_start|>user\n \n<|im_end|>\n<|im_start|>assistant\n");
}

/* Qwen3's template asks whether there is reasoning before it strips the newlines. */
static void reasoning_of_newlines_alone_still_opens_a_block_in_qwen3(void **state)
{
    (void)state;
    expect_prompt(CHAT_QWEN3,
                  "{\"messages\":[{\"role\":\"user\",\"content\":\"q\"},{\"role\":\"assistant\",\"content\":\"a\",\"reasoning_content\":\"\\n\"},"
                  "{\"role\":\"assistant\",\"content\":\"b\",\"reasoning_content\":\"\"},{\"role\":\"tool\",\"content\":\"c\"}]}",
                  "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
                  "<|im_start|>user\n<tool_response>\nc\n</tool_response><|im_end|>\n<|im_start|>assistant\n");
}

static void an_assistant_message_at_the_end_is_continued(void **state)
{
    (void)state;
    static const char body[] = "{\"messages\":[{\"role\":\"user\",\"content\":\"q\"},{\"role\":\"assistant\",\"content\":\"The dose is \"}]}";
    expect_prompt(CHAT_QWEN36, body, "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nThe dose is");
    expect_prompt(CHAT_QWEN3, body, "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nThe dose is ");
    struct prompt p = render(CHAT_QWEN36, body);
    assert_false(p.in_reasoning || p.may_reason);
    prompt_free(&p);
    expect_refusal(CHAT_QWEN36,
                   "{\"messages\":[{\"role\":\"user\",\"content\":\"q\"},{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\"}}]}]}",
                   "messages[1].tool_calls", "send the results");
}

static void the_prompt_says_where_reasoning_may_be(void **state)
{
    (void)state;
    static const char on[] = "{\"messages\":[{\"role\":\"user\",\"content\":\"q\"}]}";
    static const char off[] = "{\"messages\":[{\"role\":\"user\",\"content\":\"q\"}],\"reasoning_effort\":\"none\"}";
    static const struct {
        enum chat_family family;
        const char *body;
        bool in, may;
    } cases[] = {
        {CHAT_QWEN3, on, false, true},    {CHAT_QWEN3, off, false, false}, {CHAT_QWEN35, on, true, false},
        {CHAT_QWEN35, off, false, false}, {CHAT_QWEN36, on, true, false},  {CHAT_QWEN36, off, false, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct prompt p = render(cases[i].family, cases[i].body);
        assert_int_equal(p.in_reasoning, cases[i].in);
        assert_int_equal(p.may_reason, cases[i].may);
        prompt_free(&p);
    }
}

static void a_tool_result_in_a_user_message_is_no_question(void **state)
{
    (void)state;
    static const char body[] =
        "{\"messages\":[{\"role\":\"user\",\"content\":\"q\"},{\"role\":\"assistant\",\"content\":\"a\",\"reasoning_content\":\"r\"},"
        "{\"role\":\"user\",\"content\":\" <tool_response>x</tool_response> \"}]}";
    expect_prompt(CHAT_QWEN36, body,
                  "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\nr\n</think>\n\na<|im_end|>\n<|im_start|>user\n"
                  "<tool_response>x</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n");
    expect_refusal(CHAT_QWEN36, "{\"messages\":[{\"role\":\"user\",\"content\":\"<tool_response>x</tool_response>\"}]}", "messages", "user message");
}

static void what_a_family_cannot_render_is_refused_by_name(void **state)
{
    (void)state;
    static const char late[] = "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"developer\",\"content\":\"b\"}]}";
    expect_refusal(CHAT_QWEN35, late, "messages[1].role", "not the first");
    expect_prompt(CHAT_QWEN3, late, "<|im_start|>user\na<|im_end|>\n<|im_start|>system\nb<|im_end|>\n<|im_start|>assistant\n");
    expect_refusal(CHAT_QWEN3,
                   "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},{\"type\":\"text\",\"text\":\"b\"}]}]}",
                   "messages[0].content", "must be a string");
    /* One part is the same as a string: many clients always send parts. */
    expect_prompt(CHAT_QWEN3, "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"}]}]}",
                  "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n");
}

/* ---- prefixes: what the cache lives on ---- */

static uint32_t next(uint64_t *seed)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*seed >> 33);
}

/* What is read in advance must be the beginning of the request that follows. */
static void warming_closes_every_message_and_asks_nothing(void **state)
{
    (void)state;
    static const char *const bodies[] = {
        "{\"messages\":[{\"role\":\"system\",\"content\":\"record\"}]}",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"record\"}]}",
    };
    static const char *const wants[] = {"<|im_start|>system\nrecord<|im_end|>\n", "<|im_start|>user\nrecord<|im_end|>\n"};
    for (int family = CHAT_QWEN3; family <= CHAT_QWEN36; family++) {
        for (size_t i = 0; i < 2; i++) {
            struct chat_template t;
            struct chat_request *r = NULL;
            struct prompt p;
            struct api_error err = {0};
            open_family(&t, (enum chat_family)family);
            assert_int_equal(chat_request_parse(&r, bodies[i], strlen(bodies[i]), &defaults, &err), 0);
            r->warm = true;
            assert_int_equal(chat_template_render(&t, r, &p, &err), 0);
            assert_string_equal(p.text.data, wants[i]);
            prompt_free(&p);
            chat_request_free(r);
            chat_template_close(&t);
        }
    }
}

static void add_random_text(struct buf *b, uint64_t *seed)
{
    static const char *const words[] = {"dose", " ", "\\n", "<think>", "</think>", "\\u00a0", "5 mg", "<|im_end|>", "\\u0142", "[9]", "."};
    buf_putc(b, '"');
    for (uint32_t i = 0, n = next(seed) % 8; i < n; i++)
        buf_puts(b, words[next(seed) % (sizeof words / sizeof words[0])]);
    buf_putc(b, '"');
}

static void add_message(struct buf *b, const char *role, const char *extra, uint64_t *seed)
{
    buf_printf(b, "%s{\"role\":\"%s\"%s,\"content\":", b->len ? "," : "", role, extra);
    add_random_text(b, seed);
    buf_putc(b, '}');
}

static struct prompt render_messages(enum chat_family family, const struct buf *messages, const char *fields)
{
    struct buf body = BUF_INIT;
    buf_printf(&body, "{\"messages\":[%s]%s}", messages->data, fields);
    struct prompt p = render(family, body.data);
    buf_free(&body);
    return p;
}

/* The first `len` bytes of both are equal. */
static void assert_prefix(const struct prompt *early, size_t len, const struct prompt *late)
{
    assert_true(len <= early->text.len);
    if (late->text.len < len || memcmp(early->text.data, late->text.data, len) != 0)
        fail_msg("no prefix:\n%s\n---- of ----\n%s", early->text.data, late->text.data);
}

#define OFF ",\"chat_template_kwargs\":{\"enable_thinking\":false}"

/* With thinking off, a turn's prompt without the empty think block at its end begins the next turn's prompt: all that was read before stays
 * usable. (The block itself goes when the answer becomes an old one: section 7.) */
static void an_earlier_turn_is_a_prefix_of_the_next(void **state)
{
    (void)state;
    static const char block[] = "<think>\n\n</think>\n\n";
    uint64_t seed = 11;
    for (int round = 0; round < 60; round++) {
        enum chat_family family = (enum chat_family)(round % 3);
        struct buf messages = BUF_INIT;
        if (next(&seed) % 2)
            add_message(&messages, "system", "", &seed);
        struct prompt early = {.text = BUF_INIT};
        for (int turn = 0; turn < 5; turn++) {
            add_message(&messages, "user", "", &seed);
            struct prompt p = render_messages(family, &messages, OFF);
            assert_true(p.text.len > sizeof block);
            assert_string_equal(p.text.data + p.text.len - (sizeof block - 1), block);
            if (turn)
                assert_prefix(&early, early.text.len - (sizeof block - 1), &p);
            prompt_free(&early);
            early = p;
            add_message(&messages, "assistant", "", &seed);
        }
        prompt_free(&early);
        buf_free(&messages);
    }
}

/* In a tool loop the reasoning since the question stays, so with Qwen3.5 and 3.6 the whole prompt is a prefix, block included. With
 * preserve_thinking, Qwen3.6 keeps the blocks over new questions too. */
static void a_tool_loop_and_preserved_thinking_keep_the_whole_prompt(void **state)
{
    (void)state;
    uint64_t seed = 23;
    static const char calls[] = ",\"reasoning_content\":\"\",\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":{\"k\":[1,null]}}}]";
    for (int round = 0; round < 60; round++) {
        bool loop = round % 3 != 2;
        enum chat_family family = loop && round % 3 ? CHAT_QWEN35 : CHAT_QWEN36;
        const char *fields = loop ? OFF : ",\"chat_template_kwargs\":{\"enable_thinking\":false,\"preserve_thinking\":true}";
        struct buf messages = BUF_INIT;
        add_message(&messages, "user", "", &seed);
        struct prompt early = render_messages(family, &messages, fields);
        for (int step = 0; step < 4; step++) {
            add_message(&messages, "assistant", loop ? calls : ",\"reasoning_content\":\"\"", &seed);
            add_message(&messages, loop ? "tool" : "user", "", &seed);
            struct prompt p = render_messages(family, &messages, fields);
            assert_prefix(&early, early.text.len, &p);
            prompt_free(&early);
            early = p;
        }
        prompt_free(&early);
        buf_free(&messages);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_family_is_recognised_from_the_files_template),
        cmocka_unit_test(the_words_around_the_tools_come_from_the_template),
        cmocka_unit_test(a_template_without_readable_words_falls_back),
        cmocka_unit_test(no_byte_from_the_client_is_ever_trusted),
        cmocka_unit_test(whitespace_is_trimmed_as_python_trims_it),
        cmocka_unit_test(reasoning_of_newlines_alone_still_opens_a_block_in_qwen3),
        cmocka_unit_test(an_assistant_message_at_the_end_is_continued),
        cmocka_unit_test(the_prompt_says_where_reasoning_may_be),
        cmocka_unit_test(a_tool_result_in_a_user_message_is_no_question),
        cmocka_unit_test(what_a_family_cannot_render_is_refused_by_name),
        cmocka_unit_test(warming_closes_every_message_and_asks_nothing),
        cmocka_unit_test(an_earlier_turn_is_a_prefix_of_the_next),
        cmocka_unit_test(a_tool_loop_and_preserved_thinking_keep_the_whole_prompt),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
