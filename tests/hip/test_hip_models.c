/* Whole models through the GPU backend, on the real machine code of one GPU under the emulator: the CPU's greedy text, prompts of several chunks, several
 * sequences at once, prefix-cache hits, picks from the best logits alone. */
#include "tests/golden/cache_util.h"
#include "tests/hip/hip_test.h"

#include "engine/engine_impl.h"

static struct engine_options options_of(const char *path, enum kv_type kv, bool gpu)
{
    if (gpu && !hip_can_emulate("gfx1152"))
        skip();
    struct engine_options o = golden_options(path, false);
    o.kv_type = kv;
    o.kv_budget = (uint64_t)48 << 20;
    o.device = gpu ? DEVICE_HIP : DEVICE_CPU;
    o.hip_library = gpu ? hip_test_library("emu") : NULL;
    o.no_selftest = true; /* test_hip_engine.c runs it */
    return o;
}

struct subject {
    const char *path;
    enum kv_type kv;
};

/* Ordinary tokens, the same for the same seed. */
static void text_of(const struct engine *e, uint32_t seed, int32_t *ids, int n)
{
    const uint32_t v = (uint32_t)tokenizer_vocab_size(engine_tokenizer(e));
    for (int i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        ids[i] = (int32_t)((seed >> 8) % (v < 1000 ? v : 1000));
    }
}

/* ---- the CPU's text ---- */

enum { PROMPT = 150, CHUNK = 64, SAID = 12 };

/* CPU and GPU have the same integer products, but sum other things in other orders. With f32 weights that is all. With quantised ones a sum that differs in its
 * last bit may round to another 8-bit activation, as between any two correct programs (tests/golden/test_demo.c has the same bound against
 * llama.cpp); the tiny models are random, their logits flat and their every weight coarse, so there it shows more. Where the CPU's two best logits are
 * nearer than `tie` either may win; nothing else may, and the distributions must be the same. */
struct bounds {
    double tie, logit, kl;
};
static const struct bounds EXACT = {1e-3, 5e-3, 1e-7}, TRAINED = {0.1, 0.3, 5e-4}, RANDOM = {0.25, 0.6, 2e-3};

/* Feeds the prompt in chunks and then the CPU's greedy tokens to both: the GPU names the same token every time, near ties apart. */
static void same_greedy_text(struct engine *cpu, struct engine *gpu, const int32_t *prompt, int n_prompt, int chunk, int n_answer, const char *name,
                             const struct bounds *most_allowed)
{
    const size_t v = (size_t)tokenizer_vocab_size(engine_tokenizer(cpu));
    float *a = golden_rows(cpu, 1), *b = golden_rows(gpu, 1);
    struct sequence *sa = golden_sequence(cpu), *sb = golden_sequence(gpu);
    golden_feed(cpu, sa, prompt, n_prompt - 1, chunk, NULL, NULL);
    golden_feed(gpu, sb, prompt, n_prompt - 1, chunk, NULL, NULL);
    int32_t token = prompt[n_prompt - 1];
    double most = 0, kl = 0;
    int ties = 0, same = 0;
    for (int i = 0; i <= n_answer; i++) {
        golden_feed(cpu, sa, &token, 1, 1, a, NULL);
        golden_feed(gpu, sb, &token, 1, 1, b, NULL);
        token = golden_argmax(a, v);
        const int32_t other = golden_argmax(b, v);
        const double gap = (double)a[token] - (double)a[other];
        if (gap > most_allowed->tie)
            fail_msg("%s: after %d tokens of answer the GPU says %d, the CPU %d, which is better by %g", name, i, other, token, gap);
        ties += other != token;
        kl += golden_mean_kl(a, b, 1, v, &same);
        for (size_t k = 0; k < v; k++) {
            const double d = fabs((double)a[k] - (double)b[k]);
            most = d > most || isnan(d) ? d : most;
        }
    }
    kl /= n_answer + 1;
    print_message("# %s: largest difference of a logit %.1e, mean KL %.1e, %d near ties\n", name, most, kl, ties);
    assert_true(kl < most_allowed->kl); /* not with a NaN either */
    assert_true(most < most_allowed->logit);
    sequence_free(cpu, sa);
    sequence_free(gpu, sb);
    free(a);
    free(b);
}

static void the_gpu_says_what_the_cpu_says(void **state)
{
    const struct subject *m = *state;
    const struct engine_options on_cpu = options_of(m->path, m->kv, false), on_gpu = options_of(m->path, m->kv, true);
    struct engine *cpu = golden_engine_with(&on_cpu), *gpu = golden_engine_with(&on_gpu);
    assert_string_equal(engine_info(gpu)->backend, "hip gfx1152");
    int32_t prompt[PROMPT];
    text_of(cpu, 7, prompt, PROMPT);
    same_greedy_text(cpu, gpu, prompt, PROMPT, CHUNK, SAID, m->path, strstr(m->path, "-f32") ? &EXACT : &RANDOM);
    engine_close(cpu);
    engine_close(gpu);
}

static void the_demo_models_answers_are_the_cpus(void **state)
{
    const struct subject *m = *state;
    static const char *const names[] = {"latest-inr", "tool-generic", "hello", "polish-1"};
    const struct engine_options on_cpu = options_of(m->path, m->kv, false), on_gpu = options_of(m->path, m->kv, true);
    struct engine *cpu = golden_engine_with(&on_cpu), *gpu = golden_engine_with(&on_gpu);
    json_t *goldens = golden_json("tests/demo-model/goldens.json"), *c;
    size_t i;
    int seen = 0;
    json_array_foreach(json_object_get(goldens, "cases"), i, c)
    {
        const char *name = json_string_value(json_object_get(c, "name"));
        bool wanted = false;
        for (size_t k = 0; k < (hip_in_full() ? 4u : 1u); k++)
            wanted |= strcmp(name, names[k]) == 0;
        if (!wanted)
            continue;
        int n;
        int32_t *prompt = golden_ids(json_object_get(c, "prompt_tokens"), &n);
        same_greedy_text(cpu, gpu, prompt, n, CHUNK, hip_in_full() ? 24 : 8, name, &TRAINED);
        free(prompt);
        seen++;
    }
    assert_int_equal(seen, hip_in_full() ? 4 : 1);
    json_decref(goldens);
    engine_close(cpu);
    engine_close(gpu);
}

/* ---- rows are independent ---- */

static const char MOE[] = "tests/data/tiny-qwen35moe-q8_0.gguf";

/* Three sequences of different lengths share their steps, prompts beside single rows: each has the bits it has alone. */
static void sequences_in_one_step_have_the_bits_they_have_alone(void **state)
{
    (void)state;
    enum { N = 3, LENGTH = 100 };
    const struct engine_options options = options_of(MOE, KV_F16, true);
    struct engine *e = golden_engine_with(&options);
    const size_t v = (size_t)tokenizer_vocab_size(engine_tokenizer(e));
    int32_t text[N][LENGTH];
    float *alone[N], *together[N];
    struct sequence *s[N];
    for (int i = 0; i < N; i++) {
        text_of(e, 40 + (uint32_t)i, text[i], LENGTH);
        alone[i] = golden_rows(e, 1);
        together[i] = golden_rows(e, 1);
        s[i] = golden_sequence(e);
        golden_feed(e, s[i], text[i], LENGTH - 1, 50, NULL, NULL);
        golden_feed(e, s[i], text[i] + LENGTH - 1, 1, 1, alone[i], NULL);
        sequence_free(e, s[i]);
        s[i] = golden_sequence(e);
    }
    static const int shares[N] = {1, 17, 40};
    for (int done = 0; done < N;) {
        struct step_item items[N];
        int n = 0;
        done = 0;
        for (int i = 0; i < N; i++) {
            const int at = sequence_length(s[i]), before = i == 0 && at < LENGTH - 20 ? LENGTH - 20 : at, left = LENGTH - at;
            done += left == 0;
            if (left == 0)
                continue;
            int share = before > at ? before - at : shares[i]; /* the first one goes on by single rows soon */
            share = left > 1 && share >= left ? left - 1 : share;
            share = left == 1 ? 1 : share;
            items[n++] = (struct step_item){.seq = s[i], .tokens = text[i] + at, .n_tokens = share, .logits = left == 1 ? together[i] : NULL};
        }
        if (n)
            golden_step(e, items, n);
    }
    for (int i = 0; i < N; i++) {
        assert_memory_equal(alone[i], together[i], v * sizeof(float));
        sequence_free(e, s[i]);
        free(alone[i]);
        free(together[i]);
    }
    engine_close(e);
}

static void a_prefix_cache_hit_changes_no_bit(void **state)
{
    (void)state;
    enum { LENGTH = 150 };
    struct engine_options options = options_of(MOE, KV_F16, true);
    options.cache_memory = (uint64_t)64 << 20;
    struct engine *e = golden_engine_with(&options);
    int32_t text[LENGTH + 4 + 10];
    text_of(e, 3, text, LENGTH);
    struct sequence_options o = {.ns = "p", .prompt = text, .n_prompt = LENGTH};
    struct cache_result r = run_exact(e, &o, 4, "cold", text + LENGTH);
    assert_int_equal(r.cached, 0);
    r = run_exact(e, &o, 4, "the same again", NULL);
    assert_int_equal(r.cached, 128);
    text_of(e, 5, text + LENGTH + 4, 10);
    o.n_prompt = LENGTH + 4 + 10;
    r = run_exact(e, &o, 4, "continued", NULL);
    assert_int_equal(r.cached, 128);
    engine_close(e);
}

/* ---- picks ---- */

/* The engine asks the device for the best few logits: the tokens are those of the whole rows. */
static void picks_from_the_best_logits_are_those_from_whole_rows(void **state)
{
    (void)state;
    enum { LENGTH = 12, TOKENS = 20 };
    const struct engine_options options = options_of(MOE, KV_F16, true);
    struct engine *e = golden_engine_with(&options);
    assert_true(forward_has_best(e->forward));
    int32_t text[LENGTH];
    text_of(e, 11, text, LENGTH);
    for (int greedy = 0; greedy < 2; greedy++) {
        const struct sampler_params p = {.temperature = greedy ? 0 : 0.9f, .top_p = 0.95f, .top_k = 20, .repeat_penalty = 1, .seed = 5};
        struct sampler *best = sampler_new(engine_tokenizer(e), &p), *rows = sampler_new(engine_tokenizer(e), &p);
        assert_non_null(best);
        assert_non_null(rows);
        assert_true(sampler_best(best) > 0);
        float *row = golden_rows(e, 1);
        struct sequence *a = golden_sequence(e), *b = golden_sequence(e);
        golden_feed(e, a, text, LENGTH - 1, 512, NULL, NULL);
        golden_feed(e, b, text, LENGTH - 1, 512, NULL, NULL);
        int32_t next = text[LENGTH - 1];
        for (int i = 0; i < TOKENS; i++) {
            struct step_item items[2] = {{.seq = a, .tokens = &next, .n_tokens = 1, .sampler = best},
                                         {.seq = b, .tokens = &next, .n_tokens = 1, .logits = row}};
            golden_step(e, items, 2);
            struct pick want;
            assert_int_equal(sampler_pick(rows, row, &want), 0);
            assert_int_equal(items[0].pick.id, want.id);
            next = want.id;
        }
        sequence_free(e, a);
        sequence_free(e, b);
        sampler_free(best);
        sampler_free(rows);
        free(row);
    }
    engine_close(e);
}

#define ON(test, file, kind)                                                                                                                         \
    {                                                                                                                                                \
        .name = #test ": " file ", " #kind, .test_func = (test), .initial_state = &(struct subject)                                                  \
        {                                                                                                                                            \
            .path = (file), .kv = (kind)                                                                                                             \
        }                                                                                                                                            \
    }

int main(void)
{
    const struct CMUnitTest quick[] = {
        ON(the_gpu_says_what_the_cpu_says, "tests/data/tiny-qwen35moe-q8_0.gguf", KV_F16),
        ON(the_gpu_says_what_the_cpu_says, "tests/data/tiny-qwen35moe-wide-q4_k.gguf", KV_Q8_0),
        ON(the_gpu_says_what_the_cpu_says, "tests/data/tiny-qwen35-tied-f32.gguf", KV_F16),
        ON(the_gpu_says_what_the_cpu_says, "tests/data/tiny-qwen3-wide-q4_k.gguf", KV_F16),
        ON(the_demo_models_answers_are_the_cpus, "tests/demo-model/demo-q4_k_m.gguf", KV_F16),
        cmocka_unit_test(sequences_in_one_step_have_the_bits_they_have_alone),
        cmocka_unit_test(a_prefix_cache_hit_changes_no_bit),
        cmocka_unit_test(picks_from_the_best_logits_are_those_from_whole_rows),
    };
    const struct CMUnitTest others[] = {
        ON(the_gpu_says_what_the_cpu_says, "tests/data/tiny-qwen35moe-f32.gguf", KV_F16),
        ON(the_gpu_says_what_the_cpu_says, "tests/data/tiny-qwen35moe-fused-f32.gguf", KV_Q8_0),
        ON(the_gpu_says_what_the_cpu_says, "tests/data/tiny-qwen35-f32.gguf", KV_F16),
        ON(the_gpu_says_what_the_cpu_says, "tests/data/tiny-qwen35-q8_0.gguf", KV_Q8_0),
        ON(the_gpu_says_what_the_cpu_says, "tests/data/tiny-qwen35-wide-q4_k.gguf", KV_F16),
        ON(the_gpu_says_what_the_cpu_says, "tests/data/tiny-qwen3-f32.gguf", KV_F16),
        ON(the_gpu_says_what_the_cpu_says, "tests/data/tiny-qwen3-q8_0.gguf", KV_Q8_0),
        ON(the_demo_models_answers_are_the_cpus, "tests/demo-model/demo-q8_0.gguf", KV_Q8_0),
    };
    const int failed = cmocka_run_group_tests(quick, NULL, NULL);
    return failed || (hip_in_full() && cmocka_run_group_tests(others, NULL, NULL));
}
