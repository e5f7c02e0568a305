/* Every golden prompt, byte for byte: 22 conversations in three template families, and the 32 of the demo model. Requests go through the parser,
 * so that both halves are tested together. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/chat_request.h"
#include "api/chatml.h"

static const struct chat_defaults defaults = {.temperature = 1, .top_p = 1, .min_p = 0, .repeat_penalty = 1, .top_k = 0, .n_vocab = 4096};

static json_t *load(const char *path)
{
    json_error_t e;
    json_t *root = json_load_file(path, 0, &e);
    if (!root)
        fail_msg("%s: %s (run from the repository root)", path, e.text);
    return root;
}

/* A template of a family with the built-in words: a source that says the family and nothing about tools. */
static void open_family(struct chat_template *t, const char *name)
{
    const char *source = strcmp(name, "qwen3.6") == 0   ? "<|im_start|> preserve_thinking"
                         : strcmp(name, "qwen3.5") == 0 ? "<|im_start|> <function= <think> else v | string"
                                                        : "<|im_start|> <tool_call>";
    struct error err;
    assert_int_equal(chat_template_open(t, source, strlen(source), "", &err), 0);
    assert_true(t->recognised);
    assert_string_equal(chat_family_name(t->family), name);
}

/* Parses a request object and renders it. 0, or -1 with *err. */
static int render(const struct chat_template *t, json_t *request, struct prompt *out, struct api_error *err)
{
    char *body = json_dumps(request, JSON_COMPACT);
    assert_non_null(body);
    struct chat_request *r = NULL;
    int rc = chat_request_parse(&r, body, strlen(body), &defaults, err);
    free(body);
    if (rc == 0)
        rc = chat_template_render(t, r, out, err);
    chat_request_free(r);
    return rc;
}

/* The trusted ranges lie in order inside the text, and a control token that a message contains is in none of them. */
static void check_trusted(const struct prompt *p)
{
    size_t at = 0;
    for (size_t i = 0; i < p->n_trusted; i++) {
        assert_true(p->trusted[i].begin >= at);
        assert_true(p->trusted[i].end > p->trusted[i].begin);
        at = p->trusted[i].end;
    }
    assert_true(at <= p->text.len);
}

static json_t *request_of(json_t *messages, json_t *tools, json_t *thinking, json_t *preserve)
{
    json_t *request = json_object(), *kwargs = json_object();
    json_object_set(request, "messages", messages);
    if (tools && !json_is_null(tools))
        json_object_set(request, "tools", tools);
    if (thinking)
        json_object_set(kwargs, "enable_thinking", thinking);
    if (preserve)
        json_object_set(kwargs, "preserve_thinking", preserve);
    json_object_set_new(request, "chat_template_kwargs", kwargs);
    return request;
}

static void check_case(const struct chat_template *t, json_t *golden, json_t *want)
{
    const char *name = json_string_value(json_object_get(golden, "name"));
    json_t *options = json_object_get(golden, "options"), *generation = json_object_get(options, "add_generation_prompt");
    json_t *request = request_of(json_object_get(golden, "messages"), json_object_get(options, "tools"), json_object_get(options, "enable_thinking"),
                                 json_object_get(options, "preserve_thinking"));
    struct prompt p;
    struct api_error err = {0};
    int rc = render(t, request, &p, &err);
    json_decref(request);
    if (json_is_null(want)) {
        if (rc == 0)
            fail_msg("%s, %s: rendered, but the model's template refuses it", name, chat_family_name(t->family));
        assert_int_equal(err.status, 400);
        assert_int_equal(strncmp(err.param, "messages", 8), 0);
        assert_int_equal(strncmp(err.message, "messages", 8), 0);
        return;
    }
    if (rc < 0)
        fail_msg("%s, %s: refused: %s", name, chat_family_name(t->family), err.message);
    check_trusted(&p);
    /* The golden file closes the last assistant message when no generation prompt is asked for. This server leaves it open, so that the
     * answer continues it: the golden prompt without its closing is what must be rendered. */
    char *expected = strdup(json_string_value(want));
    assert_non_null(expected);
    if (json_is_false(generation)) {
        static const char closing[] = "<|im_end|>\n";
        size_t len = strlen(expected), tail = sizeof closing - 1;
        assert_true(len > tail);
        assert_string_equal(expected + len - tail, closing);
        expected[len - tail] = '\0';
    }
    if (strcmp(p.text.data, expected) != 0)
        fail_msg("%s, %s:\n%s\n---- expected ----\n%s", name, chat_family_name(t->family), p.text.data, expected);
    free(expected);
    prompt_free(&p);
}

static void all_golden_prompts_are_rendered_byte_for_byte(void **state)
{
    (void)state;
    json_t *root = load("tests/data/chat_prompts.json"), *cases = json_object_get(root, "cases");
    int checked = 0;
    const char *families[] = {"qwen3", "qwen3.5", "qwen3.6"};
    for (size_t f = 0; f < 3; f++) {
        struct chat_template t;
        open_family(&t, families[f]);
        for (size_t i = 0; i < json_array_size(cases); i++, checked++) {
            json_t *c = json_array_get(cases, i);
            json_t *want = json_object_get(json_object_get(c, "prompt"), families[f]);
            assert_non_null(want);
            check_case(&t, c, want);
        }
        chat_template_close(&t);
    }
    assert_int_equal(checked, 22 * 3);
    json_decref(root);
}

static void tool_arguments_as_openai_sends_them_give_the_same_prompts(void **state)
{
    (void)state;
    json_t *root = load("tests/data/chat_prompts.json"), *cases = json_object_get(root, "cases");
    int changed = 0;
    for (size_t i = 0; i < json_array_size(cases); i++) {
        json_t *c = json_array_get(cases, i), *messages = json_object_get(c, "messages");
        int calls_here = 0;
        for (size_t m = 0; m < json_array_size(messages); m++) {
            json_t *calls = json_object_get(json_array_get(messages, m), "tool_calls");
            for (size_t k = 0; k < json_array_size(calls); k++, calls_here++) {
                json_t *function = json_object_get(json_array_get(calls, k), "function");
                char *text = json_dumps(json_object_get(function, "arguments"), JSON_COMPACT | JSON_ENSURE_ASCII);
                assert_non_null(text);
                json_object_set_new(function, "arguments", json_string(text));
                free(text);
            }
        }
        for (size_t f = 0; calls_here && f < 3; f++) {
            const char *families[] = {"qwen3", "qwen3.5", "qwen3.6"};
            struct chat_template t;
            open_family(&t, families[f]);
            check_case(&t, c, json_object_get(json_object_get(c, "prompt"), families[f]));
            chat_template_close(&t);
            changed++;
        }
    }
    assert_true(changed >= 15);
    json_decref(root);
}

static void demo_conversations_are_rendered_with_the_words_of_the_files_own_template(void **state)
{
    (void)state;
    FILE *f = fopen("tests/demo-model/chat_template.jinja", "rb");
    assert_non_null(f);
    char source[16384];
    size_t len = fread(source, 1, sizeof source, f);
    fclose(f);
    assert_in_range(len, 1, sizeof source - 1);
    struct chat_template t;
    struct error err;
    assert_int_equal(chat_template_open(&t, source, len, "qwen35moe", &err), 0);
    assert_true(t.recognised);
    assert_int_equal(t.family, CHAT_QWEN36);
    assert_non_null(strstr(t.tools_intro.data, "You can call these functions:"));
    assert_non_null(strstr(t.tools_outro.data, "reply in this form:"));

    json_t *root = load("tests/demo-model/goldens.json"), *cases = json_object_get(root, "cases");
    int with_tools = 0;
    for (size_t i = 0; i < json_array_size(cases); i++) {
        json_t *c = json_array_get(cases, i), *tools = json_object_get(c, "tools");
        json_t *request = request_of(json_object_get(c, "messages"), tools, json_object_get(c, "enable_thinking"), NULL);
        struct prompt p;
        struct api_error e = {0};
        if (render(&t, request, &p, &e) < 0)
            fail_msg("%s: %s", json_string_value(json_object_get(c, "name")), e.message);
        json_decref(request);
        check_trusted(&p);
        if (strcmp(p.text.data, json_string_value(json_object_get(c, "prompt"))) != 0)
            fail_msg("%s:\n%s", json_string_value(json_object_get(c, "name")), p.text.data);
        assert_int_equal(p.in_reasoning, json_is_true(json_object_get(c, "enable_thinking")));
        prompt_free(&p);
        with_tools += json_is_array(tools);
    }
    assert_int_equal(json_array_size(cases), 32);
    assert_true(with_tools >= 5);
    json_decref(root);
    chat_template_close(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_golden_prompts_are_rendered_byte_for_byte),
        cmocka_unit_test(tool_arguments_as_openai_sends_them_give_the_same_prompts),
        cmocka_unit_test(demo_conversations_are_rendered_with_the_words_of_the_files_own_template),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
