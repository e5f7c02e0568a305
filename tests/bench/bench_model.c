/* bench_model: prefill and decode speed of a whole model through engine/engine.h, as one line of JSON.
 *
 * usage: bench_model MODEL.gguf [--prompt 512] [--decode 64] [--threads 0] [--repeat 3] [--kv f16|q8_0|f32]
 * Prints the best of the repeats: the machines are shared, and the best run is the one least disturbed. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "engine/engine.h"
#include "tests/bench/arguments.h"

struct times {
    double prefill, decode; /* tokens per second */
};

/* A fixed pseudo-random token below `limit`. */
static int32_t token_at(uint32_t i, int32_t limit)
{
    uint32_t x = (i + 1) * 2654435761u;
    x ^= x >> 15;
    return (int32_t)(x % (uint32_t)limit);
}

static int step(struct engine *e, struct sequence *s, const int32_t *ids, int n, float *logits, struct error *err)
{
    struct step_item item = {.seq = s, .tokens = ids, .n_tokens = n, .logits = logits};
    return engine_step(e, &item, 1, err);
}

static int measure(struct engine *e, const int32_t *ids, int n_prompt, int n_decode, float *logits, struct times *out, struct error *err)
{
    struct sequence *s = sequence_new(e, err);
    if (!s)
        return -1;
    int chunk = engine_info(e)->max_rows < 512 ? engine_info(e)->max_rows : 512;
    int rc = 0;
    uint64_t t0 = clock_ns();
    for (int i = 0; i < n_prompt && rc == 0; i += chunk)
        rc = step(e, s, ids + i, n_prompt - i < chunk ? n_prompt - i : chunk, NULL, err);
    uint64_t t1 = clock_ns();
    for (int i = 0; i < n_decode && rc == 0; i++)
        rc = step(e, s, ids + n_prompt + i, 1, logits, err);
    uint64_t t2 = clock_ns();
    sequence_free(e, s);
    out->prefill = n_prompt / ((double)(t1 - t0) * 1e-9);
    out->decode = n_decode / ((double)(t2 - t1) * 1e-9);
    return rc;
}

int main(int argc, char **argv)
{
    int n_prompt = 512, n_decode = 64, repeat = 3;
    struct engine_options o = {.kv_type = KV_F16, .max_sequences = 1, .context = 0};
    if (argc < 2) {
        fprintf(stderr, "usage: bench_model MODEL.gguf [--prompt N] [--decode N] [--threads N] [--repeat N] [--kv f16|q8_0|f32]\n");
        return 2;
    }
    o.model_path = argv[1];
    for (int i = 2; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--prompt"))
            n_prompt = whole_number(argv[i + 1]);
        else if (!strcmp(argv[i], "--decode"))
            n_decode = whole_number(argv[i + 1]);
        else if (!strcmp(argv[i], "--threads"))
            o.n_threads = whole_number(argv[i + 1]);
        else if (!strcmp(argv[i], "--repeat"))
            repeat = whole_number(argv[i + 1]);
        else if (!strcmp(argv[i], "--kv"))
            o.kv_type = !strcmp(argv[i + 1], "f32") ? KV_F32 : !strcmp(argv[i + 1], "q8_0") ? KV_Q8_0 : KV_F16;
        else {
            fprintf(stderr, "bench_model: unknown option %s\n", argv[i]);
            return 2;
        }
    }
    if (n_prompt < 1 || n_decode < 1 || repeat < 1) {
        fprintf(stderr, "bench_model: --prompt, --decode and --repeat must be at least 1\n");
        return 2;
    }
    struct error err;
    struct engine *e;
    if (engine_open(&e, &o, &err)) {
        fprintf(stderr, "bench_model: %s\n", err.text);
        return 1;
    }
    int32_t n_vocab = tokenizer_vocab_size(engine_tokenizer(e));
    int n = n_prompt + n_decode;
    int32_t *ids = alloc_array((size_t)n, sizeof *ids);
    float *logits = alloc_array((size_t)n_vocab, sizeof *logits);
    int rc = ids && logits ? 0 : -1;
    for (int i = 0; rc == 0 && i < n; i++)
        ids[i] = token_at((uint32_t)i, n_vocab);
    struct times best = {0}, t;
    for (int r = 0; rc == 0 && r < repeat; r++) {
        rc = measure(e, ids, n_prompt, n_decode, logits, &t, &err);
        if (rc) {
            fprintf(stderr, "bench_model: %s\n", err.text);
            break;
        }
        best.prefill = t.prefill > best.prefill ? t.prefill : best.prefill;
        best.decode = t.decode > best.decode ? t.decode : best.decode;
    }
    if (rc == 0)
        printf("{\"prompt\": %d, \"decode\": %d, \"prefill_tok_s\": %.2f, \"decode_tok_s\": %.2f}\n", n_prompt, n_decode, best.prefill, best.decode);
    free(ids);
    free(logits);
    engine_close(e);
    return rc ? 1 : 0;
}
