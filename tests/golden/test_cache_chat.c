/* The prefix cache under real conversations: the demonstration model's 32 goldens, turn after turn, alone, repeated, continued and after a restart.
 * The answers are compared bit by bit with cold runs, and what is computed is counted. */
#include "tests/golden/cache_util.h"

#include "base/buf.h"

enum { SHORT_ANSWER = 16, CASES = 32 };

static const char *const demo = "tests/demo-model/demo-q4_k_m.gguf";

static struct engine_options options_of(enum kv_type kv)
{
    struct engine_options o = golden_options(demo, false);
    o.kv_type = kv;
    o.context = 4096;
    o.cache_memory = (uint64_t)512 << 20;
    return o;
}

/* A conversation as text, up to and without the line that opens the next answer. */
struct chat {
    struct buf text;
    bool think;
};

struct tokens {
    int32_t *ids;
    int n;
};

static struct chat chat_of(const json_t *c)
{
    struct chat chat = {.think = json_is_true(json_object_get(c, "enable_thinking"))};
    const char *prompt = json_string_value(json_object_get(c, "prompt")), *answer = NULL;
    for (const char *at = prompt; (at = strstr(at, "<|im_start|>assistant\n")); at++)
        answer = at;
    assert_non_null(answer);
    assert_true(buf_add(&chat.text, prompt, (size_t)(answer - prompt)));
    return chat;
}

static struct tokens prompt_of(const struct engine *e, const struct chat *c)
{
    struct buf text = BUF_INIT;
    buf_add(&text, c->text.data, c->text.len);
    assert_true(buf_puts(&text, c->think ? "<|im_start|>assistant\n<think>\n" : "<|im_start|>assistant\n<think>\n\n</think>\n\n"));
    const struct text_range all = {0, text.len};
    struct token_list ids = {0};
    assert_int_equal(tokenizer_encode(engine_tokenizer(e), text.data, text.len, &all, 1, TOKENIZER_NFC, &ids, NULL), 0);
    buf_free(&text);
    return (struct tokens){ids.ids, (int)ids.len};
}

/* The next turn as the template renders it: the answer without its reasoning, and a new question. */
static void next_turn(const struct engine *e, struct chat *c, const int32_t *answer, int n, const char *question)
{
    struct buf text = BUF_INIT;
    for (int i = 0; i < n && !tokenizer_ends_generation(engine_tokenizer(e), answer[i]); i++) {
        size_t len;
        const char *bytes = tokenizer_bytes(engine_tokenizer(e), answer[i], &len);
        assert_true(buf_add(&text, bytes, len));
    }
    const char *content = text.data ? text.data : "", *end = c->think ? strstr(content, "</think>") : NULL;
    if (end)
        content = end + strlen("</think>");
    else if (c->think)
        content = "";
    content += strspn(content, "\n");
    assert_true(buf_printf(&c->text, "<|im_start|>assistant\n%s<|im_end|>\n<|im_start|>user\n%s<|im_end|>\n", content, question));
    buf_free(&text);
}

/* From turn 2 on no more is computed than the new text and a page. `old`: what the cache has seen, prompt and answer. */
static void expect_little(const char *name, int turn, const struct cache_result *r, const struct tokens *prompt, const struct tokens *old)
{
    int same = 0;
    while (same < prompt->n && same < old->n && prompt->ids[same] == old->ids[same])
        same++;
    if (prompt->n - r->cached > prompt->n - same + GRID)
        fail_msg("%s, turn %d: of %d tokens %d were cached, though %d were known (%s at %d)", name, turn, prompt->n, r->cached, same,
                 cache_miss_name(r->miss), r->miss_at);
}

static void append(struct tokens *t, const int32_t *ids, int n)
{
    t->ids = realloc(t->ids, (size_t)(t->n + n) * sizeof *t->ids);
    assert_non_null(t->ids);
    memcpy(t->ids + t->n, ids, (size_t)n * sizeof *ids);
    t->n += n;
}

static void goldens_cold_hit_continued_and_after_a_restart(void **state)
{
    const enum kv_type kv = *(const enum kv_type *)*state;
    const struct engine_options options = options_of(kv);
    const struct folder folder = new_folder();
    const int n_cold = kv == KV_F16 ? ANSWER : ANSWER / 2; /* the second kind in less depth, for time's sake */
    json_t *goldens = golden_json("tests/demo-model/goldens.json"), *cases = json_object_get(goldens, "cases"), *c;
    assert_int_equal(json_array_size(cases), CASES);
    struct run cold[CASES];
    memset(cold, 0, sizeof cold);
    size_t i;
    int repeated[CASES] = {0};
    uint64_t read = 0, hit = 0;

    struct server s = server_open(&options, &folder);
    json_array_foreach(cases, i, c)
    {
        const char *name = json_string_value(json_object_get(c, "name"));
        struct chat chat = chat_of(c);
        struct tokens prompt = prompt_of(s.e, &chat);
        struct sequence_options o = {.ns = "goldens", .prompt = prompt.ids, .n_prompt = prompt.n}, off = o;
        off.no_cache = true;
        cold[i] = run_with(s.e, &off, n_cold);
        struct run first = run_with(s.e, &o, kv == KV_F16 ? ANSWER : SHORT_ANSWER), again = run_with(s.e, &o, SHORT_ANSWER);
        run_same(s.e, &cold[i], &first, name);
        run_same(s.e, &cold[i], &again, name);
        repeated[i] = again.cache.cached;
        if (prompt.n > GRID)
            assert_in_range(again.cache.cached, prompt.n - 8, prompt.n - 1); /* all but what follows the line that opens the answer */
        else
            assert_int_equal(again.cache.cached, 0);

        append(&prompt, first.answer, first.n_answer);
        next_turn(s.e, &chat, cold[i].answer, n_cold, "And the dose of warfarin?");
        struct tokens second = prompt_of(s.e, &chat);
        o.prompt = second.ids;
        o.n_prompt = second.n;
        struct cache_result r = run_exact(s.e, &o, SHORT_ANSWER, name, NULL);
        expect_little(name, 2, &r, &second, &prompt);
        read += (uint64_t)second.n;
        hit += (uint64_t)r.cached;
        run_free(&first);
        run_free(&again);
        free(second.ids);
        free(prompt.ids);
        buf_free(&chat.text);
    }
    print_message("# second turns: %.1f %% of %llu prompt tokens came from the cache\n", 100.0 * (double)hit / (double)read,
                  (unsigned long long)read);
    server_close(&s);

    s = server_open(&options, &folder);
    json_array_foreach(cases, i, c)
    {
        const char *name = json_string_value(json_object_get(c, "name"));
        struct chat chat = chat_of(c);
        struct tokens prompt = prompt_of(s.e, &chat);
        struct cache_image image = {0};
        const bool there = read_image(&s, "goldens", prompt.ids, prompt.n, &image);
        assert_int_equal(there, prompt.n > GRID);
        struct sequence_options o = {.ns = "goldens", .prompt = prompt.ids, .n_prompt = prompt.n, .image = there ? &image : NULL};
        struct run own = run_with(s.e, &o, SHORT_ANSWER);
        run_same(s.e, &cold[i], &own, name);
        assert_int_equal(own.cache.cached, repeated[i]);
        run_free(&own);
        cache_image_free(&image);
        free(prompt.ids);
        buf_free(&chat.text);
        run_free(&cold[i]);
    }
    server_close(&s);
    json_decref(goldens);
    remove_folder(&folder);
}

/* Ten turns over a record of more than a thousand tokens. */
static void ten_turns_read_only_what_is_new(const char *case_name)
{
    static const char *const questions[] = {"What is the latest INR?", "Is the patient allergic to penicillin?", "List the medications."};
    const struct engine_options options = options_of(KV_F16);
    struct engine *e = golden_engine_with(&options);
    json_t *goldens = golden_json("tests/demo-model/goldens.json"), *c;
    size_t i;
    struct chat chat = {0};
    json_array_foreach(json_object_get(goldens, "cases"), i, c) if (strcmp(json_string_value(json_object_get(c, "name")), case_name) == 0) chat =
        chat_of(c);
    assert_true(chat.text.len > 0);
    struct tokens seen = {0};
    int32_t answer[ANSWER];
    for (int turn = 1; turn <= 10; turn++) {
        struct tokens prompt = prompt_of(e, &chat);
        struct sequence_options o = {.ns = "chat", .prompt = prompt.ids, .n_prompt = prompt.n};
        struct cache_result r;
        if (turn == 1 || turn == 5 || turn == 10) {
            r = run_exact(e, &o, ANSWER, case_name, answer);
        } else {
            struct run own = run_with(e, &o, ANSWER);
            memcpy(answer, own.answer, sizeof answer);
            r = own.cache;
            run_free(&own);
        }
        if (turn > 1)
            expect_little(case_name, turn, &r, &prompt, &seen);
        free(seen.ids);
        seen = prompt;
        append(&seen, answer, ANSWER);
        next_turn(e, &chat, answer, ANSWER, questions[turn % 3]);
    }
    free(seen.ids);
    buf_free(&chat.text);
    json_decref(goldens);
    engine_close(e);
}

static void ten_turns_over_a_record_read_only_what_is_new(void **state)
{
    (void)state;
    ten_turns_read_only_what_is_new("long-1");
}

static void ten_turns_with_thinking_read_only_what_is_new(void **state)
{
    (void)state;
    ten_turns_read_only_what_is_new("long-think-1");
}

static void ten_turns_with_tools_read_only_what_is_new(void **state)
{
    (void)state;
    ten_turns_read_only_what_is_new("tool-answer");
}

static void ten_turns_with_tools_and_thinking_read_only_what_is_new(void **state)
{
    (void)state;
    ten_turns_read_only_what_is_new("polish-tool-answer-1");
}

int main(void)
{
    static enum kv_type f16 = KV_F16, q8_0 = KV_Q8_0;
    const struct CMUnitTest tests[] = {
        {"goldens_cold_hit_continued_and_after_a_restart: KV_F16", goldens_cold_hit_continued_and_after_a_restart, NULL, NULL, &f16},
        cmocka_unit_test(ten_turns_over_a_record_read_only_what_is_new),
        cmocka_unit_test(ten_turns_with_thinking_read_only_what_is_new),
        cmocka_unit_test(ten_turns_with_tools_read_only_what_is_new),
        cmocka_unit_test(ten_turns_with_tools_and_thinking_read_only_what_is_new),
        {"goldens_cold_hit_continued_and_after_a_restart: KV_Q8_0", goldens_cold_hit_continued_and_after_a_restart, NULL, NULL, &q8_0},
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
