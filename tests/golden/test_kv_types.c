/* What keeping keys and values in fewer bits costs: logits and greedy text with f16 and q8_0 KV against f32 KV, on the tiny models and on the
 * trained one. */
#include "tests/golden/golden_util.h"

enum { TYPES = 3, POSITIONS = 443 };
static const enum kv_type types[TYPES] = {KV_F32, KV_F16, KV_Q8_0};
static const char *const type_names[TYPES] = {"f32", "f16", "q8_0"};

/* ---- the tiny models: every position of every golden prompt ---- */

/* Logits of all positions [POSITIONS][V], to be freed. */
static float *all_rows(const char *model, bool plain, enum kv_type kv, size_t *v, size_t *page_bytes)
{
    struct golden_path file = golden_file(model, "gguf"), golden = golden_file(model, "json");
    struct engine_options o = golden_options(file.text, plain);
    o.kv_type = kv;
    struct engine *e = golden_engine_with(&o);
    json_t *j = golden_json(golden.text), *prompt;
    size_t i, done = 0;
    float *rows = golden_rows(e, POSITIONS);
    *v = (size_t)tokenizer_vocab_size(engine_tokenizer(e));
    *page_bytes = engine_info(e)->page_bytes;
    json_array_foreach(json_object_get(j, "prompts"), i, prompt)
    {
        int n;
        int32_t *ids = golden_ids(json_object_get(prompt, "ids"), &n);
        struct sequence *s = golden_sequence(e);
        assert_true(done + (size_t)n <= POSITIONS);
        golden_feed(e, s, ids, n, 50, rows + done * *v, NULL);
        done += (size_t)n;
        sequence_free(e, s);
        free(ids);
    }
    assert_int_equal(done, POSITIONS);
    json_decref(j);
    engine_close(e);
    return rows;
}

struct subject {
    const char *model;
    bool plain;
};

/* Rounding to f16 errs by 1.4e-4 of a number, deviation over deviation; to q8_0 by 1/127/sqrt(12) of the largest of 32, which among normal numbers
 * is 2.3 deviations: 5.2e-3, 37 times as much. KL grows with the square of an error. Nothing here rounds activations, so that nothing else is
 * measured. Measured: at most 1.6e-7 and 8.8e-5. */
static void narrow_kv_stays_near_f32_kv(void **state)
{
    static const double bounds[TYPES] = {0, 1e-6, 4e-4};
    const struct subject *m = *state;
    double kl[TYPES] = {0};
    size_t v, page_bytes[TYPES];
    float *exact = all_rows(m->model, m->plain, KV_F32, &v, &page_bytes[0]);
    for (int t = 1; t < TYPES; t++) {
        int equal = 0;
        float *rows = all_rows(m->model, m->plain, types[t], &v, &page_bytes[t]);
        kl[t] = golden_mean_kl(exact, rows, POSITIONS, v, &equal);
        print_message("# %s, %s, %s KV: mean KL %.2e, arg-max equal in %d of %d\n", m->model, m->plain ? "plain" : "fast", type_names[t], kl[t],
                      equal, POSITIONS);
        assert_true(kl[t] > kl[t - 1] && kl[t] <= bounds[t]);
        assert_true(equal >= POSITIONS * 9 / 10); /* random weights: the two best logits are often close */
        free(rows);
    }
    assert_int_equal(page_bytes[0], 2 * page_bytes[1]);
    assert_int_equal(page_bytes[2] * 32, page_bytes[1] * 17);
    free(exact);
}

/* Where activations are rounded to 8 bits too, rounded keys do not count: as near the exact logits as test_models.c asks with f32 KV. */
static void q8_0_kv_adds_little_to_rounded_activations(void **state)
{
    const struct subject *m = *state;
    int equal = 0;
    size_t v, page_bytes;
    json_t *summary = golden_json("tests/data/oracle-summary.json");
    const double theirs = json_real_value(json_object_get(json_object_get(summary, m->model), "kl_mean"));
    float *exact = all_rows(m->model, true, KV_F32, &v, &page_bytes), *rows = all_rows(m->model, false, KV_Q8_0, &v, &page_bytes);
    const double kl = golden_mean_kl(exact, rows, POSITIONS, v, &equal);
    print_message("# %s, fast, q8_0 KV, against plain, f32 KV: mean KL %.2e, llama.cpp %.2e\n", m->model, kl, theirs);
    assert_true(theirs > 0 && kl > 0 && kl <= 2 * theirs);
    json_decref(summary);
    free(exact);
    free(rows);
}

/* ---- the trained model: 32 conversations ---- */

struct demo {
    struct engine *e[TYPES];
    struct sequence *s[TYPES];
    float *logits[TYPES]; /* [V], of the last token fed */
    size_t v;
    int cases, identical, tokens;
    double worst_gap, kl[TYPES];
};

static void feed_all(struct demo *d, const int32_t *ids, int n)
{
    for (int t = 0; t < TYPES; t++) {
        if (n > 1)
            golden_feed(d->e[t], d->s[t], ids, n - 1, 512, NULL, NULL);
        golden_feed(d->e[t], d->s[t], ids + n - 1, 1, 1, d->logits[t], NULL);
    }
}

/* The greedy answer with f16 KV, as long as the golden one; all three read it. Where q8_0 would first go on otherwise is noted. */
static void run_case(struct demo *d, const json_t *c)
{
    const char *name = json_string_value(json_object_get(c, "name"));
    const json_t *golden = json_object_get(json_object_get(json_object_get(c, "greedy"), "llama.cpp_q8_0"), "tokens");
    const int n = (int)json_array_size(golden);
    int n_prompt, differs_at = -1, unused = 0;
    int32_t *prompt = golden_ids(json_object_get(c, "prompt_tokens"), &n_prompt);
    assert_true(n > 0 && n_prompt > 0);
    for (int t = 0; t < TYPES; t++)
        d->s[t] = golden_sequence(d->e[t]);
    feed_all(d, prompt, n_prompt);
    for (int i = 0; i < n; i++) {
        const int32_t next = golden_argmax(d->logits[1], d->v), own = golden_argmax(d->logits[2], d->v);
        for (int t = 1; t < TYPES; t++)
            d->kl[t] += golden_mean_kl(d->logits[0], d->logits[t], 1, d->v, &unused);
        if (own != next && differs_at < 0) {
            const double gap = (double)d->logits[2][own] - (double)d->logits[2][next];
            differs_at = i;
            d->worst_gap = fmax(d->worst_gap, gap);
            print_message("# %s: q8_0 KV differs from f16 KV at token %d of %d, by a gap of %.4f\n", name, i, n, gap);
        }
        feed_all(d, &next, 1);
    }
    d->tokens += n;
    d->cases++;
    d->identical += differs_at < 0;
    for (int t = 0; t < TYPES; t++)
        sequence_free(d->e[t], d->s[t]);
    free(prompt);
}

/* The text is f16's but where its own two best tokens are nearly equal, as in test_demo.c. */
static void answers_with_q8_0_kv_are_those_with_f16_kv(void **state)
{
    (void)state;
    struct demo d = {0};
    for (int t = 0; t < TYPES; t++) {
        struct engine_options o = golden_options("tests/demo-model/demo-q8_0.gguf", false);
        o.kv_type = types[t];
        d.e[t] = golden_engine_with(&o);
        d.logits[t] = golden_rows(d.e[t], 1);
    }
    d.v = (size_t)tokenizer_vocab_size(engine_tokenizer(d.e[0]));
    json_t *goldens = golden_json("tests/demo-model/goldens.json"), *c;
    size_t i;
    json_array_foreach(json_object_get(goldens, "cases"), i, c) run_case(&d, c);
    json_decref(goldens);
    for (int t = 0; t < TYPES; t++) {
        engine_close(d.e[t]);
        free(d.logits[t]);
    }
    print_message(
        "# %d of %d answers identical with q8_0 and f16 KV, largest gap at a difference %.4f; mean KL against f32 KV over %d tokens: f16 %.2e, "
        "q8_0 %.2e\n",
        d.identical, d.cases, d.worst_gap, d.tokens, d.kl[1] / d.tokens, d.kl[2] / d.tokens);
    assert_int_equal(d.cases, 32);
    assert_true(d.identical >= 30);
    assert_true(d.worst_gap < 0.1);
    assert_true(d.kl[1] > 0 && d.kl[1] / d.tokens < 1e-5);
    assert_true(d.kl[2] > d.kl[1] && d.kl[2] / d.tokens < 1e-4);
}

#define ON(test, model, backend)                                                                                                                     \
    {                                                                                                                                                \
#test ": " model ", " backend, test, NULL, NULL, &(struct subject)                                                                           \
        {                                                                                                                                            \
            model, (backend)[0] == 'p'                                                                                                               \
        }                                                                                                                                            \
    }

int main(void)
{
    const struct CMUnitTest tests[] = {
        ON(narrow_kv_stays_near_f32_kv, "tiny-qwen35moe-f32", "fast"),
        ON(narrow_kv_stays_near_f32_kv, "tiny-qwen35-f32", "fast"),
        ON(narrow_kv_stays_near_f32_kv, "tiny-qwen3-f32", "fast"),
        ON(narrow_kv_stays_near_f32_kv, "tiny-qwen35moe-f32", "plain"),
        ON(narrow_kv_stays_near_f32_kv, "tiny-qwen35-q8_0", "plain"),
        ON(narrow_kv_stays_near_f32_kv, "tiny-qwen3-wide-q4_k", "plain"),
        ON(q8_0_kv_adds_little_to_rounded_activations, "tiny-qwen35moe-q8_0", "fast"),
        ON(q8_0_kv_adds_little_to_rounded_activations, "tiny-qwen35-wide-q4_k", "fast"),
        ON(q8_0_kv_adds_little_to_rounded_activations, "tiny-qwen3-q8_0", "fast"),
        ON(q8_0_kv_adds_little_to_rounded_activations, "tiny-qwen3-wide-q4_k", "fast"),
        cmocka_unit_test(answers_with_q8_0_kv_are_those_with_f16_kv),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
