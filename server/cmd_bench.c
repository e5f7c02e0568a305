/* server/cmd_bench.c: `bedside bench`: how fast several clients are served at once. The scheduler and the engine as in `serve`, without HTTP. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/reply.h"
#include "base/buf.h"
#include "base/log.h"
#include "config/config.h"
#include "engine/engine.h"
#include "server/bench.h"
#include "server/commands.h"
#include "server/scheduler.h"
#include "server/setup.h"

enum { WARM_TOKENS = 512 }; /* of the request before the first row: it brings the weights into memory */

static void print_intro(const struct engine *e, const struct config *c)
{
    setup_print_engine(stdout, e, c);
    printf("requests %lld of each client, one after the other: prompts of %lld random tokens, answers of %lld; no prefix cache\n\n",
           (long long)c->requests, (long long)c->prompt_tokens, (long long)c->answer_tokens);
    printf("         |  writing, tok/s  | reading |  first token, ms  |   between tokens, ms\n"
           "clients  |  total   client  |  tok/s  |    p50      p95   |   p50     p95     max\n");
    fflush(stdout);
}

static void print_row(int clients, const struct bench_result *r)
{
    printf("%7d  | %7.1f  %7.1f | %7.1f | %8.1f %8.1f | %7.1f %7.1f %7.1f\n", clients, r->total_per_s, r->client_per_s, r->prefill_per_s,
           r->first_token.p50, r->first_token.p95, r->between_tokens.p50, r->between_tokens.p95, r->between_tokens.max);
    if (r->pauses)
        printf("         | %d times a request gave its memory to an older one (--kv-memory)\n", r->pauses);
    fflush(stdout);
}

static void print_legend(void)
{
    printf("\nwriting  answer tokens: of all clients together while any answer is written; of one client from its first token to its last (median)\n"
           "reading  prompt tokens: of all clients together while any prompt is read; answers are written meanwhile (--max-gap)\n"
           "The numbers depend on what else the machine does: compare only runs on an idle machine, with the same settings.\n");
}

static void print_times(const char *name, const struct bench_times *t)
{
    printf(",\"%s\":{\"p50\":%.3f,\"p95\":%.3f,\"max\":%.3f}", name, t->p50, t->p95, t->max);
}

static int print_json_intro(const struct engine *e, const struct config *c, struct error *err)
{
    const struct engine_info *i = engine_info(e);
    struct buf name = BUF_INIT;
    reply_json_string(&name, i->model_name, strlen(i->model_name));
    if (name.failed) {
        buf_free(&name);
        return error_set(err, "out of memory");
    }
    printf("{\"model\":%s,\"arch\":\"%s\",\"backend\":\"%s\",", name.data, i->arch, i->backend);
    if (c->threads > 0)
        printf("\"threads\":%lld", (long long)c->threads);
    else
        printf("\"threads\":\"one per physical core\"");
    printf(",\"kv_type\":\"%s\",\"max_gap_ms\":%lld,\"prompt_tokens\":%lld,\"answer_tokens\":%lld,\"requests_per_client\":%lld,\"runs\":[",
           c->kv_type, (long long)c->max_gap, (long long)c->prompt_tokens, (long long)c->answer_tokens, (long long)c->requests);
    buf_free(&name);
    return 0;
}

static void print_json_row(bool first, int clients, const struct bench_result *r)
{
    printf("%s\n{\"clients\":%d,\"requests\":%d,\"prompt_tokens\":%llu,\"answer_tokens\":%llu,\"seconds\":%.3f", first ? "" : ",", clients,
           r->requests, (unsigned long long)r->prompt_tokens, (unsigned long long)r->answer_tokens, r->seconds);
    printf(",\"total_tok_s\":%.3f,\"client_tok_s\":%.3f,\"prefill_tok_s\":%.3f", r->total_per_s, r->client_per_s, r->prefill_per_s);
    print_times("first_token_ms", &r->first_token);
    print_times("between_tokens_ms", &r->between_tokens);
    printf(",\"pauses\":%d}", r->pauses);
}

/* One request of one client that nobody counts, then a row for each number of clients. */
static int run_rows(const struct bench_options *base, const struct config *c, const int *counts, int n_counts, struct error *err)
{
    struct bench_options o = *base;
    struct bench_result result;
    o.clients = o.requests = o.answer_tokens = 1;
    o.prompt_tokens = o.prompt_tokens < WARM_TOKENS ? o.prompt_tokens : WARM_TOKENS;
    if (bench_run(&o, &result, err))
        return -1;
    for (int i = 0; i < n_counts; i++) {
        o = *base;
        o.clients = counts[i];
        o.seed = base->seed + 1 + (uint64_t)i;
        if (bench_run(&o, &result, err))
            return -1;
        if (c->json)
            print_json_row(i == 0, counts[i], &result);
        else
            print_row(counts[i], &result);
    }
    return 0;
}

static int bench(const struct config *c, const int *counts, int n_counts, struct error *err)
{
    int most = 0, rc = -1;
    for (int i = 0; i < n_counts; i++)
        most = counts[i] > most ? counts[i] : most;
    struct engine *e = NULL;
    struct scheduler *scheduler = NULL;
    int32_t *words = NULL;
    size_t n_words = 0;
    const struct engine_options options = setup_engine_options(c, most);
    if (engine_open(&e, &options, err))
        return -1;
    const struct engine_info *info = engine_info(e);
    const struct scheduler_options scheduling = {
        .engine = e,
        .max_queue = most,
        .prefill_chunk = (int)c->prefill_chunk,
        .max_gap_ms = (int)c->max_gap,
    };
    if (c->prompt_tokens + c->answer_tokens > info->context) {
        error_set(err, "--prompt-tokens %lld and --answer-tokens %lld are more than the context of %d tokens (--context)",
                  (long long)c->prompt_tokens, (long long)c->answer_tokens, info->context);
        goto done;
    }
    if (bench_words(engine_tokenizer(e), &words, &n_words, err) || scheduler_open(&scheduler, &scheduling, err))
        goto done;
    if (!c->json)
        print_intro(e, c);
    else if (print_json_intro(e, c, err))
        goto done;
    const struct bench_options base = {
        .scheduler = scheduler,
        .tokenizer = engine_tokenizer(e),
        .words = words,
        .n_words = n_words,
        .requests = (int)c->requests,
        .prompt_tokens = (int)c->prompt_tokens,
        .answer_tokens = (int)c->answer_tokens,
    };
    rc = run_rows(&base, c, counts, n_counts, err);
    if (rc == 0 && c->json)
        printf("\n]}\n");
    else if (rc == 0)
        print_legend();
done:
    scheduler_close(scheduler);
    engine_close(e);
    free(words);
    if (rc == 0 && (fflush(stdout) || ferror(stdout)))
        rc = error_set(err, "standard output cannot be written: is the disk full?");
    return rc;
}

int cmd_bench(int argc, char **argv)
{
    struct config c;
    struct error err;
    int counts[BENCH_MAX_COUNTS], n_counts = 0, n_words = 0;
    const char *word;
    int status = setup_config(&c, "bench", argc, argv, &word, 1, &n_words);
    if (status >= 0)
        return status;
    status = 2;
    if (n_words) {
        fprintf(stderr, "bedside: bench takes no words besides its options; the model is --model FILE\n");
    } else if (!c.model[0]) {
        fprintf(stderr, "bedside: %s\n", setup_which_model);
    } else if (bench_parse_clients(c.clients, counts, &n_counts, &err)) {
        fprintf(stderr, "bedside: %s\n", err.text);
    } else {
        status = bench(&c, counts, n_counts, &err) ? 1 : 0;
        if (status)
            fprintf(stderr, "bedside: %s\n", err.text);
    }
    config_free(&c);
    return status;
}
