/* How fast text becomes tokens and logits become a token. usage: bench_tokenizer [model.gguf] (default: the demo model) */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/clock.h"
#include "engine/gguf.h"
#include "engine/sampler.h"
#include "engine/tokenizer.h"

enum { TARGET_TOKENS = 6000, REPEATS = 20, PICKS = 50 };

/* A record as clinicians write it, repeated with other numbers until it has the length of a real history. */
static int make_text(const struct tokenizer *t, struct buf *text, struct token_list *ids, struct error *err)
{
    for (int i = 0; ids->len < TARGET_TOKENS; i++) {
        buf_printf(text,
                   "2024-%02d-%02d  Visit %d. Patient reports dyspnoea on exertion; BP %d/%d mmHg, HR %d/min, SpO2 %d%%.\n"
                   "Medication: metoprolol %d mg 1-0-1, ramipril 5 mg 1-0-0, torasemide 10 mg. Potassium %d.%d mmol/l, eGFR %d.\n"
                   "Plan: control in %d weeks; it's the patient's wish to stay at home. Zażółć gęślą jaźń, niño, día.\n\n",
                   1 + i % 12, 1 + i % 28, i, 110 + i % 60, 60 + i % 30, 55 + i % 50, 88 + i % 12, 25 + 25 * (i % 4), 3 + i % 3, i % 10, 30 + i % 70,
                   1 + i % 8);
        ids->len = 0;
        if (text->failed || tokenizer_encode(t, text->data, text->len, NULL, 0, TOKENIZER_NFC, ids, err))
            return -1;
    }
    return 0;
}

static int bench_encode(const struct tokenizer *t, struct error *err)
{
    struct buf text = BUF_INIT;
    struct token_list ids = {0};
    uint64_t best = UINT64_MAX;
    int rc = make_text(t, &text, &ids, err);
    for (int i = 0; i < REPEATS && rc == 0; i++) {
        ids.len = 0;
        uint64_t start = clock_ns();
        rc = tokenizer_encode(t, text.data, text.len, NULL, 0, TOKENIZER_NFC, &ids, err);
        uint64_t ns = clock_ns() - start;
        best = ns < best ? ns : best;
    }
    if (rc == 0)
        printf("encode: %zu bytes, %zu tokens in %.2f ms: %.1f million tokens/s\n", text.len, ids.len, (double)best / 1e6,
               (double)ids.len * 1e3 / (double)best);
    buf_free(&text);
    token_list_free(&ids);
    return rc;
}

/* Milliseconds of the fastest pick from a row of logits as long as the vocabulary; -1 out of memory. */
static double bench_pick(const struct tokenizer *t, const struct sampler_params *p, float spread)
{
    size_t n = (size_t)tokenizer_vocab_size(t);
    float *logits = malloc(n * sizeof *logits);
    struct sampler *s = sampler_new(t, p);
    double ms = -1;
    if (logits && s) {
        uint32_t random = 1;
        for (size_t i = 0; i < n; i++) {
            random = random * 1664525u + 1013904223u;
            logits[i] = spread * sqrtf(-2 * logf(((float)(random >> 8) + 1) / 16777217.0f)) * (random & 128 ? 1.0f : -1.0f);
        }
        struct pick out;
        sampler_pick(s, logits, &out); /* touches the memory */
        uint64_t best = UINT64_MAX;
        for (int i = 0; i < PICKS; i++) {
            uint64_t start = clock_ns();
            sampler_pick(s, logits, &out);
            uint64_t ns = clock_ns() - start;
            best = ns < best ? ns : best;
        }
        ms = (double)best / 1e6;
    }
    free(logits);
    sampler_free(s);
    return ms;
}

int main(int argc, char **argv)
{
    const char *path = argc > 1 ? argv[1] : "tests/demo-model/demo-q4_k_m.gguf";
    struct gguf *g = NULL;
    struct tokenizer *t = NULL;
    struct error err = {""};
    int rc = 1;
    if (gguf_open(&g, path, &err))
        goto done;
    uint64_t start = clock_ns();
    if (tokenizer_open(&t, g, &err))
        goto done;
    printf("open: %d tokens in %.1f ms\n", tokenizer_vocab_size(t), (double)(clock_ns() - start) / 1e6);
    if (bench_encode(t, &err))
        goto done;
    static const struct {
        const char *name;
        float spread;
        struct sampler_params p;
    } cases[] = {
        {"greedy", 2, {.temperature = 0, .top_p = 1, .repeat_penalty = 1}},
        {"top_k 20, top_p 0.95", 2, {.temperature = 1, .top_k = 20, .top_p = 0.95f, .repeat_penalty = 1}},
        {"top_k 20, log probabilities", 2, {.temperature = 1, .top_k = 20, .top_p = 1, .repeat_penalty = 1, .want_logprob = true, .n_top = 20}},
        {"temperature 1 alone", 2, {.temperature = 1, .top_p = 1, .repeat_penalty = 1}},
        {"top_p 0.95, flat logits", 1, {.temperature = 1, .top_p = 0.95f, .repeat_penalty = 1}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        printf("pick, %s: %.2f ms\n", cases[i].name, bench_pick(t, &cases[i].p, cases[i].spread));
    rc = 0;
done:
    if (rc)
        fprintf(stderr, "%s: %s\n", path, err.text);
    tokenizer_close(t);
    gguf_close(g);
    return rc;
}
