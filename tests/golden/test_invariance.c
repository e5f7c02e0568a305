/* The same tokens give the same logits, bit for bit, however they were cut into steps, whatever other sequences shared them, and whatever was rolled
 * back before. */
#include "tests/golden/golden_util.h"

struct subject {
    const char *name;
    bool plain;
    enum kv_type kv;
    bool draft;
};

enum { MOST = 256, GREEDY = 64 };

/* A subject's engine with the ids of the golden prompts. */
struct bench {
    struct engine *e;
    size_t v;
    bool draft;
    int n_prompts;
    int n[8];
    int32_t *ids[8];
    int longest;
};

static struct bench bench_open(const struct subject *m)
{
    struct golden_path file = golden_file(m->name, "gguf"), golden = golden_file(m->name, "json");
    struct engine_options o = golden_options(file.text, m->plain);
    o.kv_type = m->kv;
    o.mtp = m->draft;
    struct bench b = {.e = golden_engine_with(&o), .draft = m->draft};
    b.v = (size_t)tokenizer_vocab_size(engine_tokenizer(b.e));
    json_t *j = golden_json(golden.text), *prompt;
    size_t i;
    json_array_foreach(json_object_get(j, "prompts"), i, prompt)
    {
        assert_true(b.n_prompts < 8);
        b.ids[b.n_prompts] = golden_ids(json_object_get(prompt, "ids"), &b.n[b.n_prompts]);
        if (b.n[b.n_prompts] > b.n[b.longest])
            b.longest = b.n_prompts;
        b.n_prompts++;
    }
    json_decref(j);
    assert_true(b.n[b.longest] > 3 * GRID && b.n[b.longest] <= MOST);
    return b;
}

static void bench_close(struct bench *b)
{
    for (int i = 0; i < b->n_prompts; i++)
        free(b->ids[i]);
    engine_close(b->e);
}

/* Logits, and draft logits where there are any, of all positions of a prompt, run alone. Rows [n][V], to be freed; *drafts may become NULL. */
static float *run_alone(struct bench *b, int prompt, int chunk, float **drafts, int32_t *greedy)
{
    int n = b->n[prompt];
    float *logits = golden_rows(b->e, n);
    *drafts = b->draft ? golden_rows(b->e, n) : NULL;
    struct sequence *s = golden_sequence(b->e);
    golden_feed(b->e, s, b->ids[prompt], n, chunk, logits, *drafts);
    assert_int_equal(sequence_length(s), n);
    if (greedy) {
        float *last = golden_rows(b->e, 1);
        memcpy(last, logits + (size_t)(n - 1) * b->v, b->v * sizeof(float));
        golden_greedy(b->e, s, last, GREEDY, greedy);
        free(last);
    }
    sequence_free(b->e, s);
    return logits;
}

static void assert_same_rows(const float *a, const float *b, int n, size_t v, const char *what, int detail)
{
    for (int i = 0; i < n; i++)
        if (memcmp(a + (size_t)i * v, b + (size_t)i * v, v * sizeof(float)) != 0)
            fail_msg("%s (%d): row %d of %d differs", what, detail, i, n);
}

static void cutting_a_prompt_anywhere_changes_no_bit_and_no_token(void **state)
{
    struct bench b = bench_open(*state);
    static const int chunks[] = {1, 7, 64, 200};
    int n = b.n[b.longest];
    int32_t greedy[GREEDY], own[GREEDY];
    float *drafts, *whole = run_alone(&b, b.longest, 512, &drafts, greedy);
    for (size_t i = 0; i < sizeof chunks / sizeof chunks[0]; i++) {
        float *cut_drafts, *cut = run_alone(&b, b.longest, chunks[i], &cut_drafts, own);
        assert_same_rows(whole, cut, n, b.v, "chunks of", chunks[i]);
        if (drafts)
            assert_same_rows(drafts, cut_drafts, n, b.v, "drafts, chunks of", chunks[i]);
        assert_memory_equal(greedy, own, sizeof own);
        free(cut_drafts);
        free(cut);
    }
    free(drafts);
    free(whole);
    bench_close(&b);
}

/* Four prompts side by side, each in shares of its own size, so that prefill chunks and single rows of different sequences meet in one step. */
static void sequences_that_share_steps_get_the_bits_they_get_alone(void **state)
{
    struct bench b = bench_open(*state);
    static const int share[4] = {64, 1, 13, 30};
    float *alone[4], *alone_drafts[4], *together[4], *together_drafts[4];
    struct sequence *s[4];
    int done[4] = {0}, running = 4, prompts[4];
    for (int i = 0; i < 4; i++) {
        prompts[i] = i == 0 ? b.longest : (b.longest + i) % b.n_prompts;
        alone[i] = run_alone(&b, prompts[i], 512, &alone_drafts[i], NULL);
        together[i] = golden_rows(b.e, b.n[prompts[i]]);
        together_drafts[i] = b.draft ? golden_rows(b.e, b.n[prompts[i]]) : NULL;
    }
    for (int i = 0; i < 4; i++)
        s[i] = golden_sequence(b.e);
    while (running) {
        struct step_item items[4];
        int n = 0;
        for (int i = 0; i < 4; i++) {
            int left = b.n[prompts[i]] - done[i];
            if (!left)
                continue;
            size_t at = (size_t)done[i] * b.v;
            items[n] = (struct step_item){.seq = s[i], .tokens = b.ids[prompts[i]] + done[i], .n_tokens = left < share[i] ? left : share[i]};
            items[n].logits = together[i] + at;
            items[n].draft_logits = b.draft ? together_drafts[i] + at : NULL;
            done[i] += items[n].n_tokens;
            running -= done[i] == b.n[prompts[i]];
            n++;
        }
        golden_step(b.e, items, n);
    }
    for (int i = 0; i < 4; i++) {
        assert_same_rows(alone[i], together[i], b.n[prompts[i]], b.v, "sequence", i);
        if (b.draft)
            assert_same_rows(alone_drafts[i], together_drafts[i], b.n[prompts[i]], b.v, "drafts of sequence", i);
        free(alone[i]);
        free(alone_drafts[i]);
        free(together[i]);
        free(together_drafts[i]);
        sequence_free(b.e, s[i]);
    }
    bench_close(&b);
}

/* Wrong tokens are fed and taken back after every few right ones, wherever the grid allows it. */
static void a_token_that_was_rolled_back_never_was(void **state)
{
    struct bench b = bench_open(*state);
    int n = b.n[b.longest], rolled = 0;
    const int32_t *ids = b.ids[b.longest];
    float *drafts, *alone = run_alone(&b, b.longest, 512, &drafts, NULL);
    float *logits = golden_rows(b.e, n), *own_drafts = b.draft ? golden_rows(b.e, n) : NULL;
    struct sequence *s = golden_sequence(b.e);
    for (int at = 0, step = 0; at < n; step++) {
        int wrong = 1 + step % ROLLBACK, right = 1 + step * 5 % 12;
        int32_t other[ROLLBACK];
        for (int i = 0; i < wrong; i++)
            other[i] = (int32_t)((at * 31 + i * 17 + 5) % (int)b.v);
        if (at % GRID + wrong < GRID) {
            golden_feed(b.e, s, other, wrong, ROLLBACK, NULL, NULL);
            assert_int_equal(sequence_rollback(s, wrong), 0);
            assert_int_equal(sequence_length(s), at);
            rolled += wrong;
        }
        right = right < n - at ? right : n - at;
        golden_feed(b.e, s, ids + at, right, 512, logits + (size_t)at * b.v, own_drafts ? own_drafts + (size_t)at * b.v : NULL);
        at += right;
    }
    assert_true(rolled > 50);
    assert_same_rows(alone, logits, n, b.v, "tokens rolled back", rolled);
    if (own_drafts)
        assert_same_rows(drafts, own_drafts, n, b.v, "drafts, tokens rolled back", rolled);
    sequence_free(b.e, s);
    free(own_drafts);
    free(logits);
    free(drafts);
    free(alone);
    bench_close(&b);
}

static void a_rollback_over_a_grid_line_or_too_far_is_refused(void **state)
{
    struct bench b = bench_open(*state);
    struct sequence *s = golden_sequence(b.e);
    assert_int_equal(sequence_rollback(s, 1), -1); /* nothing there */
    golden_feed(b.e, s, b.ids[b.longest], GRID - 1, 512, NULL, NULL);
    assert_int_equal(sequence_rollback(s, ROLLBACK + 1), -1);
    assert_int_equal(sequence_rollback(s, -1), -1);
    assert_int_equal(sequence_rollback(s, 0), 0);
    assert_int_equal(sequence_length(s), GRID - 1);
    golden_feed(b.e, s, b.ids[b.longest] + GRID - 1, 1, 512, NULL, NULL);
    assert_int_equal(sequence_rollback(s, 1), -1); /* it filled the cell */
    golden_feed(b.e, s, b.ids[b.longest] + GRID, 3, 512, NULL, NULL);
    assert_int_equal(sequence_rollback(s, 4), -1);
    assert_int_equal(sequence_rollback(s, 3), 0);
    assert_int_equal(sequence_length(s), GRID);
    sequence_free(b.e, s);
    bench_close(&b);
}

/* The experts that a step reports are those of each row: distinct, in range, and the same however the prompt was cut. */
static void chosen_experts_are_reported_by_layer_and_row(void **state)
{
    enum { LAYERS = 8, EXPERTS = 12, USED = 3, N = 100 };
    struct bench b = bench_open(*state);
    static int32_t whole[LAYERS][N][USED], part[LAYERS][N][USED];
    struct sequence *s = golden_sequence(b.e);
    struct step_item it = {.seq = s, .tokens = b.ids[b.longest], .n_tokens = N, .experts = &whole[0][0][0]};
    golden_step(b.e, &it, 1);
    sequence_free(b.e, s);
    bool used[EXPERTS] = {false};
    int n_used = 0;
    for (int layer = 0; layer < LAYERS; layer++)
        for (int row = 0; row < N; row++)
            for (int i = 0; i < USED; i++) {
                int32_t x = whole[layer][row][i];
                assert_in_range(x, 0, EXPERTS - 1);
                for (int k = 0; k < i; k++)
                    assert_int_not_equal(x, whole[layer][row][k]);
                n_used += !used[x];
                used[x] = true;
            }
    assert_int_equal(n_used, EXPERTS);

    /* Again in two steps, the second shared with another sequence that wants none. */
    struct sequence *other = golden_sequence(b.e);
    s = golden_sequence(b.e);
    it = (struct step_item){.seq = s, .tokens = b.ids[b.longest], .n_tokens = 40, .experts = &part[0][0][0]};
    golden_step(b.e, &it, 1);
    for (int layer = 0; layer < LAYERS; layer++)
        for (int row = 0; row < 40; row++) /* the step's own layout is [layers][40][used] */
            assert_memory_equal(whole[layer][row], &part[0][0][0] + (layer * 40 + row) * USED, sizeof whole[0][0]);
    struct step_item two[2] = {
        {.seq = other, .tokens = b.ids[b.longest], .n_tokens = 5},
        {.seq = s, .tokens = b.ids[b.longest] + 40, .n_tokens = 60, .experts = &part[0][0][0]},
    };
    golden_step(b.e, two, 2);
    for (int layer = 0; layer < LAYERS; layer++)
        for (int row = 0; row < 60; row++)
            assert_memory_equal(whole[layer][40 + row], &part[0][0][0] + (layer * 60 + row) * USED, sizeof whole[0][0]);
    sequence_free(b.e, s);
    sequence_free(b.e, other);
    bench_close(&b);
}

#define ON(test, model, backend, kv, draft)                                                                                                          \
    {                                                                                                                                                \
#test ": " model ", " backend ", " #kv, test, NULL, NULL, &(struct subject)                                                                  \
        {                                                                                                                                            \
            model, (backend)[0] == 'p', kv, draft                                                                                                    \
        }                                                                                                                                            \
    }

int main(void)
{
    const struct CMUnitTest tests[] = {
        ON(cutting_a_prompt_anywhere_changes_no_bit_and_no_token, "tiny-qwen35moe-f32", "fast", KV_F32, true),
        ON(cutting_a_prompt_anywhere_changes_no_bit_and_no_token, "tiny-qwen35moe-q8_0", "fast", KV_F16, true),
        ON(cutting_a_prompt_anywhere_changes_no_bit_and_no_token, "tiny-qwen35moe-wide-q4_k", "fast", KV_F16, true),
        ON(cutting_a_prompt_anywhere_changes_no_bit_and_no_token, "tiny-qwen35-wide-q4_k", "fast", KV_F32, true),
        ON(cutting_a_prompt_anywhere_changes_no_bit_and_no_token, "tiny-qwen35-tied-f32", "fast", KV_F16, false),
        ON(cutting_a_prompt_anywhere_changes_no_bit_and_no_token, "tiny-qwen3-wide-q4_k", "fast", KV_F16, false),
        ON(cutting_a_prompt_anywhere_changes_no_bit_and_no_token, "tiny-qwen35moe-wide-q4_k", "fast", KV_Q8_0, true),
        ON(cutting_a_prompt_anywhere_changes_no_bit_and_no_token, "tiny-qwen3-q8_0", "fast", KV_Q8_0, false),
        ON(cutting_a_prompt_anywhere_changes_no_bit_and_no_token, "tiny-qwen35moe-q8_0", "plain", KV_F16, true),
        ON(cutting_a_prompt_anywhere_changes_no_bit_and_no_token, "tiny-qwen3-q8_0", "plain", KV_F32, false),
        ON(sequences_that_share_steps_get_the_bits_they_get_alone, "tiny-qwen35moe-q8_0", "fast", KV_F16, true),
        ON(sequences_that_share_steps_get_the_bits_they_get_alone, "tiny-qwen35moe-wide-q4_k", "fast", KV_F32, true),
        ON(sequences_that_share_steps_get_the_bits_they_get_alone, "tiny-qwen35-f32", "fast", KV_F16, true),
        ON(sequences_that_share_steps_get_the_bits_they_get_alone, "tiny-qwen3-wide-q4_k", "fast", KV_F16, false),
        ON(sequences_that_share_steps_get_the_bits_they_get_alone, "tiny-qwen35-wide-q4_k", "fast", KV_Q8_0, true),
        ON(sequences_that_share_steps_get_the_bits_they_get_alone, "tiny-qwen35moe-f32", "plain", KV_F32, true),
        ON(a_token_that_was_rolled_back_never_was, "tiny-qwen35moe-wide-q4_k", "fast", KV_F16, true),
        ON(a_token_that_was_rolled_back_never_was, "tiny-qwen35-f32", "fast", KV_F32, true),
        ON(a_token_that_was_rolled_back_never_was, "tiny-qwen3-q8_0", "fast", KV_F16, false),
        ON(a_token_that_was_rolled_back_never_was, "tiny-qwen35moe-q8_0", "fast", KV_Q8_0, true),
        ON(a_token_that_was_rolled_back_never_was, "tiny-qwen35moe-q8_0", "plain", KV_F32, true),
        ON(a_rollback_over_a_grid_line_or_too_far_is_refused, "tiny-qwen35moe-q8_0", "fast", KV_F16, false),
        ON(chosen_experts_are_reported_by_layer_and_row, "tiny-qwen35moe-f32", "fast", KV_F16, true),
        ON(chosen_experts_are_reported_by_layer_and_row, "tiny-qwen35moe-f32", "plain", KV_F16, false),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
