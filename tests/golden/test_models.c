/* Whole models against golden vectors: the reference implementation in double precision on dequantised weights (tests/reference), and llama.cpp's
 * distance from it (oracle-summary.json) as the measure for models whose products round activations to 8 bits. */
#include "tests/golden/golden_util.h"

struct subject {
    const char *name;
    bool plain;
    bool draft; /* the file has a draft block: compare its logits too */
};

enum { GREEDY = 64, POSITIONS = 443 };

/* Runs every prompt of the golden file; returns the distances of trunk and draft logits, and how many prompts' 64 greedy tokens are equal. `rows`, when
 * not NULL, receives the logits of all positions, *rows [POSITIONS][V], to be freed; the size of the vocabulary is returned. */
static size_t measure(const struct subject *m, const json_t *golden, enum kv_type kv, struct golden_distance *trunk, struct golden_distance *draft,
                      int *greedy_equal, int *prompts, float **rows)
{
    struct golden_path path = golden_file(m->name, "gguf");
    struct engine_options o = golden_options(path.text, m->plain);
    o.mtp = m->draft;
    o.kv_type = kv;
    struct engine *e = golden_engine_with(&o);
    size_t v = (size_t)tokenizer_vocab_size(engine_tokenizer(e)), i;
    json_t *prompt;
    if (rows)
        *rows = golden_rows(e, POSITIONS);
    json_array_foreach(json_object_get(golden, "prompts"), i, prompt)
    {
        int n, n_greedy;
        int32_t *ids = golden_ids(json_object_get(prompt, "ids"), &n);
        int32_t *greedy = golden_ids(json_object_get(prompt, "greedy64"), &n_greedy), own[GREEDY];
        float *logits = golden_rows(e, n), *drafts = m->draft ? golden_rows(e, n) : NULL;
        struct sequence *s = golden_sequence(e);
        golden_feed(e, s, ids, n, 512, logits, drafts);
        assert_true(trunk->positions + n <= POSITIONS);
        if (rows)
            memcpy(*rows + (size_t)trunk->positions * v, logits, (size_t)n * v * sizeof(float));
        for (int p = 0; p < n; p++) {
            golden_compare(trunk, logits + (size_t)p * v, v, json_array_get(json_object_get(prompt, "top20"), (size_t)p),
                           json_array_get(json_object_get(prompt, "lse"), (size_t)p));
            if (drafts)
                golden_compare(draft, drafts + (size_t)p * v, v, json_array_get(json_object_get(prompt, "mtp_top20"), (size_t)p), NULL);
        }
        assert_int_equal(n_greedy, GREEDY);
        if (greedy_equal) {
            golden_greedy(e, s, logits + (size_t)(n - 1) * v, GREEDY, own);
            *greedy_equal += memcmp(own, greedy, sizeof own) == 0;
        }
        ++*prompts;
        sequence_free(e, s);
        free(drafts);
        free(logits);
        free(greedy);
        free(ids);
    }
    engine_close(e);
    return v;
}

static void print_distance(const struct subject *m, const char *what, const struct golden_distance *d)
{
    print_message("# %s, %s, %s: largest difference of a logit %.2e; arg-max %d of %d", m->name, m->plain ? "plain" : "fast", what, d->most_logit,
                  d->argmax_equal, d->positions);
    if (d->most_lse > 0)
        print_message("; largest difference of lse %.2e, mean KL %.2e", d->most_lse, d->kl / d->positions);
    print_message("\n");
}

/* f32 weights: nothing is rounded to 8 bits, so every backend must agree to rounding of sums. */
static void f32_logits_and_greedy_text_equal_the_reference(void **state)
{
    const struct subject *m = *state;
    struct golden_path path = golden_file(m->name, "json");
    json_t *golden = golden_json(path.text);
    struct golden_distance trunk = {0}, draft = {0};
    int greedy = 0, prompts = 0;
    measure(m, golden, KV_F32, &trunk, &draft, &greedy, &prompts, NULL);
    print_distance(m, "trunk", &trunk);
    if (m->draft)
        print_distance(m, "draft", &draft);
    print_message("# %s: greedy 64 identical for %d of %d prompts\n", m->name, greedy, prompts);
    assert_int_equal(trunk.positions, POSITIONS);
    assert_true(trunk.most_logit <= 1e-3);
    assert_true(trunk.most_lse <= 1e-3);
    assert_int_equal(trunk.argmax_equal, POSITIONS);
    assert_int_equal(greedy, prompts);
    if (m->draft)
        assert_true(draft.most_logit <= 2e-3);
    json_decref(golden);
}

/* The plain backend multiplies dequantised weights with unrounded activations: as near to the reference as with f32 weights. The fast one rounds
 * activations to 8 bits: no further from that, over the whole vocabulary, than twice what llama.cpp, which rounds alike, is. */
static void quantised_models_are_exact_on_plain_and_near_on_fast(void **state)
{
    const struct subject *m = *state;
    struct subject plain = *m;
    plain.plain = true;
    struct golden_path path = golden_file(m->name, "json");
    json_t *golden = golden_json(path.text), *summary = golden_json("tests/data/oracle-summary.json");
    struct golden_distance trunk = {0}, draft = {0}, fast_trunk = {0}, fast_draft = {0};
    int prompts = 0, equal = 0;
    float *exact, *fast;
    size_t v = measure(&plain, golden, KV_F32, &trunk, &draft, NULL, &prompts, &exact);
    print_distance(&plain, "trunk", &trunk);
    assert_int_equal(trunk.positions, POSITIONS);
    assert_true(trunk.most_logit <= 2e-3);
    if (m->draft) {
        print_distance(&plain, "draft", &draft);
        assert_true(draft.most_logit <= 2e-3);
    }

    measure(m, golden, KV_F32, &fast_trunk, &fast_draft, NULL, &prompts, &fast);
    const json_t *theirs = json_object_get(summary, m->name);
    double kl = json_real_value(json_object_get(theirs, "kl_mean")), own = golden_mean_kl(exact, fast, POSITIONS, v, &equal);
    int agree = (int)json_integer_value(json_object_get(theirs, "argmax_agree"));
    print_distance(m, "trunk", &fast_trunk);
    print_message("# %s: mean KL over the whole vocabulary %.2e, llama.cpp %.2e; arg-max equal in %d of %d, llama.cpp %d\n", m->name, own, kl, equal,
                  POSITIONS, agree);
    assert_int_equal(fast_trunk.positions, POSITIONS);
    assert_true(kl > 0);
    assert_true(own >= 0 && own <= 2 * kl);
    assert_true(fast_trunk.kl / POSITIONS <= 2 * kl);
    assert_true(fast_trunk.argmax_equal >= agree - 0.03 * POSITIONS);
    free(exact);
    free(fast);
    json_decref(summary);
    json_decref(golden);
}

/* Keys and values of 11 bits: the same text where the margin allows it, and near the reference. */
static void f16_kv_stays_near_the_reference(void **state)
{
    const struct subject *m = *state;
    struct golden_path path = golden_file(m->name, "json");
    json_t *golden = golden_json(path.text);
    struct golden_distance trunk = {0}, draft = {0};
    int prompts = 0;
    measure(m, golden, KV_F16, &trunk, &draft, NULL, &prompts, NULL);
    print_distance(m, "trunk, f16 KV", &trunk);
    assert_true(trunk.kl / trunk.positions <= 1e-5);
    assert_true(trunk.argmax_equal >= POSITIONS * 99 / 100);
    json_decref(golden);
}

#define ON(test, model, backend, has_draft)                                                                                                          \
    {                                                                                                                                                \
#test ": " model ", " backend, test, NULL, NULL, &(struct subject)                                                                           \
        {                                                                                                                                            \
            model, (backend)[0] == 'p', has_draft                                                                                                    \
        }                                                                                                                                            \
    }

int main(void)
{
    const struct CMUnitTest tests[] = {
        ON(f32_logits_and_greedy_text_equal_the_reference, "tiny-qwen35moe-f32", "fast", true),
        ON(f32_logits_and_greedy_text_equal_the_reference, "tiny-qwen35moe-fused-f32", "fast", false),
        ON(f32_logits_and_greedy_text_equal_the_reference, "tiny-qwen35-f32", "fast", true),
        ON(f32_logits_and_greedy_text_equal_the_reference, "tiny-qwen35-tied-f32", "fast", false),
        ON(f32_logits_and_greedy_text_equal_the_reference, "tiny-qwen3-f32", "fast", false),
        ON(f32_logits_and_greedy_text_equal_the_reference, "tiny-qwen35moe-f32", "plain", true),
        ON(f32_logits_and_greedy_text_equal_the_reference, "tiny-qwen35moe-fused-f32", "plain", false),
        ON(f32_logits_and_greedy_text_equal_the_reference, "tiny-qwen35-f32", "plain", true),
        ON(f32_logits_and_greedy_text_equal_the_reference, "tiny-qwen35-tied-f32", "plain", false),
        ON(f32_logits_and_greedy_text_equal_the_reference, "tiny-qwen3-f32", "plain", false),
        ON(quantised_models_are_exact_on_plain_and_near_on_fast, "tiny-qwen35moe-q8_0", "fast", true),
        ON(quantised_models_are_exact_on_plain_and_near_on_fast, "tiny-qwen35moe-wide-q4_k", "fast", true),
        ON(quantised_models_are_exact_on_plain_and_near_on_fast, "tiny-qwen35-q8_0", "fast", true),
        ON(quantised_models_are_exact_on_plain_and_near_on_fast, "tiny-qwen35-wide-q4_k", "fast", true),
        ON(quantised_models_are_exact_on_plain_and_near_on_fast, "tiny-qwen3-q8_0", "fast", false),
        ON(quantised_models_are_exact_on_plain_and_near_on_fast, "tiny-qwen3-wide-q4_k", "fast", false),
        ON(f16_kv_stays_near_the_reference, "tiny-qwen35moe-f32", "fast", true),
        ON(f16_kv_stays_near_the_reference, "tiny-qwen3-f32", "fast", false),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
