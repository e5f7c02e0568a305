/* server/cmd_run.c: `bedside run`: one answer in the terminal, as it is written. The engine without a server around it. */
#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "api/answer.h"
#include "api/chat_request.h"
#include "api/chatml.h"
#include "api/reply.h"
#include "base/buf.h"
#include "base/clock.h"
#include "base/log.h"
#include "config/config.h"
#include "engine/engine.h"
#include "server/chat.h"
#include "server/commands.h"
#include "server/setup.h"

enum { MAX_WORDS = 256, MAX_INPUT = 64 << 20 };

/* Set by Ctrl-C; a signal handler may touch nothing else. */
static volatile sig_atomic_t interrupted;

static void on_interrupt(int number)
{
    (void)number;
    interrupted = 1;
}

/* The first Ctrl-C ends the answer after the step in hand, the second the program. */
static void catch_interrupt(void)
{
    struct sigaction action = {.sa_handler = on_interrupt, .sa_flags = (int)SA_RESETHAND};
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
}

/* The prompt: --prompt, else the words, else standard input without its last newline. */
static int read_prompt(struct buf *out, const struct config *c, const char *const *words, int n_words, struct error *err)
{
    if (c->prompt[0] && n_words)
        return error_set(err, "the prompt is given twice: with --prompt and as words");
    if (c->prompt[0])
        return buf_puts(out, c->prompt) ? 0 : error_set(err, "out of memory");
    for (int i = 0; i < n_words; i++) {
        if (i)
            buf_putc(out, ' ');
        buf_puts(out, words[i]);
    }
    while (!n_words) {
        if (!buf_reserve(out, 65536))
            break;
        ssize_t n = read(STDIN_FILENO, out->data + out->len, 65536);
        if (n < 0 && errno == EINTR && !interrupted)
            continue;
        if (n < 0)
            return error_set(err, "standard input: %s", strerror(errno));
        if (n == 0)
            break;
        out->len += (size_t)n;
        if (out->len > MAX_INPUT)
            return error_set(err, "standard input: more than %d MiB", MAX_INPUT >> 20);
    }
    while (out->len && (out->data[out->len - 1] == '\n' || out->data[out->len - 1] == '\r'))
        out->len--;
    if (out->failed)
        return error_set(err, "out of memory");
    return out->len ? 0 : error_set(err, "the prompt is empty: give it with --prompt, as words, or on standard input");
}

/* The same request a client would send: one path for both, so that the terminal shows what the server would answer. */
static struct chat_request *make_request(const struct config *c, const struct buf *prompt, const struct chat_defaults *defaults, struct error *err)
{
    struct chat_request *request = NULL;
    struct buf body = BUF_INIT;
    struct api_error why = {0};
    buf_puts(&body, "{\"messages\":[");
    if (c->system[0]) {
        buf_puts(&body, "{\"role\":\"system\",\"content\":");
        reply_json_string(&body, c->system, strlen(c->system));
        buf_puts(&body, "},");
    }
    buf_puts(&body, "{\"role\":\"user\",\"content\":");
    reply_json_string(&body, prompt->data, prompt->len);
    buf_printf(&body, "}],\"chat_template_kwargs\":{\"enable_thinking\":%s}", c->no_think ? "false" : "true");
    if (c->max_tokens > 0)
        buf_printf(&body, ",\"max_tokens\":%lld", (long long)c->max_tokens);
    if (c->seed >= 0)
        buf_printf(&body, ",\"seed\":%lld", (long long)c->seed);
    buf_putc(&body, '}');
    if (body.failed)
        error_set(err, "out of memory");
    else if (chat_request_parse(&request, body.data, body.len, defaults, &why))
        error_set(err, "%s", why.message);
    buf_free(&body);
    return request;
}

struct run {
    struct engine *engine;
    const struct engine_info *info;
    const struct tokenizer *tokenizer;
    const struct config *config;
    struct sampler *sampler;
    struct sequence *seq;
    struct answer *answer;
    struct buf reasoning, content;
    bool dim_on, colour;
};

/* Shows what is new: reasoning dimmed on a terminal, to standard error otherwise, so that a pipe gets the answer alone. */
static void show(struct run *r)
{
    if (r->reasoning.len) {
        if (r->colour && !r->dim_on)
            fputs("\033[2m", stdout);
        r->dim_on = true;
        fwrite(r->reasoning.data, 1, r->reasoning.len, r->colour ? stdout : stderr);
    }
    if (r->content.len) {
        if (r->dim_on)
            fputs(r->colour ? "\033[0m\n\n" : "\n", r->colour ? stdout : stderr);
        r->dim_on = false;
        fwrite(r->content.data, 1, r->content.len, stdout);
    }
    fflush(stdout);
    buf_clear(&r->reasoning);
    buf_clear(&r->content);
}

/* Reads the prompt and writes up to max_tokens. *written counts them, *first_ns is when the first came. */
static int generate(struct run *r, const struct token_list *ids, int max_tokens, int *written, uint64_t *first_ns, struct error *err)
{
    struct step_item item = {.seq = r->seq};
    int32_t next = -1;
    for (size_t fed = 0; fed < ids->len && !interrupted;) {
        size_t n = ids->len - fed, chunk = (size_t)r->config->prefill_chunk;
        n = n < chunk ? n : chunk;
        item.tokens = ids->ids + fed;
        item.n_tokens = (int)n;
        fed += n;
        item.sampler = fed == ids->len ? r->sampler : NULL;
        if (engine_step(r->engine, &item, 1, err))
            return -1;
    }
    *first_ns = clock_ns();
    while (!interrupted) {
        const struct pick pick = item.pick;
        if (pick.id < 0)
            return error_set(err, "the model gave no finite logit: the file may be damaged");
        if (tokenizer_ends_generation(r->tokenizer, pick.id))
            break;
        ++*written;
        size_t len;
        const char *bytes = tokenizer_bytes(r->tokenizer, pick.id, &len);
        bool stop = answer_add(r->answer, tokenizer_kind(r->tokenizer, pick.id), bytes, len, &r->reasoning, &r->content);
        show(r);
        if (stop || *written >= max_tokens)
            break;
        next = pick.id;
        item = (struct step_item){.seq = r->seq, .tokens = &next, .n_tokens = 1, .sampler = r->sampler};
        if (engine_step(r->engine, &item, 1, err))
            return -1;
    }
    answer_end(r->answer, &r->reasoning, &r->content);
    show(r);
    if (r->dim_on && r->colour)
        fputs("\033[0m", stdout);
    fputc('\n', stdout);
    fflush(stdout);
    if (answer_out_of_memory(r->answer) || r->reasoning.failed || r->content.failed)
        return error_set(err, "out of memory");
    return 0;
}

static int run_prompt(const struct config *c, const struct buf *text, struct error *err)
{
    int rc = -1;
    struct run r = {.config = c, .colour = isatty(STDOUT_FILENO)};
    struct chat_request *request = NULL;
    struct chat_template format = {0};
    bool have_format = false;
    struct prompt prompt = {0};
    struct token_list ids = {0};
    struct api_error why = {0};

    const struct engine_options options = setup_engine_options(c, 1);
    if (engine_open(&r.engine, &options, err))
        return -1;
    r.info = engine_info(r.engine);
    r.tokenizer = engine_tokenizer(r.engine);
    const struct chat_defaults defaults = chat_defaults_of(c, r.info, r.tokenizer);
    request = make_request(c, text, &defaults, err);
    if (!request)
        goto done;
    if (chat_template_open(&format, r.info->chat_template, r.info->chat_template_len, r.info->arch, err))
        goto done;
    have_format = true;
    if (chat_template_render(&format, request, &prompt, &why)) {
        error_set(err, "%s", why.message);
        goto done;
    }
    if (tokenizer_encode(r.tokenizer, prompt.text.data, prompt.text.len, prompt.trusted, prompt.n_trusted, TOKENIZER_NFC, &ids, err))
        goto done;
    if (ids.len >= (size_t)r.info->context) {
        error_set(err, "the prompt has %zu tokens; the context holds %d, of which the answer needs at least one (--context)", ids.len,
                  r.info->context);
        goto done;
    }
    int max_tokens = r.info->context - (int)ids.len;
    if (request->max_tokens > 0 && request->max_tokens < max_tokens)
        max_tokens = (int)request->max_tokens;
    if (!request->seed_given && getrandom(&request->sampling.seed, sizeof request->sampling.seed, 0) != (ssize_t)sizeof request->sampling.seed) {
        error_set(err, "the system gives no random numbers; set --seed");
        goto done;
    }
    r.sampler = sampler_new(r.tokenizer, &request->sampling);
    r.answer = answer_new(&(struct answer_options){.in_reasoning = prompt.in_reasoning, .may_reason = prompt.may_reason});
    if (!r.sampler || !r.answer) {
        error_set(err, "out of memory");
        goto done;
    }
    sampler_prompt(r.sampler, ids.ids, ids.len);
    r.seq = sequence_new(r.engine, err);
    if (!r.seq)
        goto done;

    int written = 0;
    uint64_t first = 0;
    const uint64_t begin = clock_ns();
    rc = generate(&r, &ids, max_tokens, &written, &first, err);
    if (rc == 0) {
        const double read_s = (double)(first - begin) / 1e9, write_s = (double)(clock_ns() - first) / 1e9;
        fprintf(stderr, "\nprompt %zu tokens in %.2f s (%.1f/s), answer %d tokens in %.2f s (%.1f/s)%s\n", ids.len, read_s,
                read_s > 0 ? (double)ids.len / read_s : 0.0, written, write_s, write_s > 0 && written > 1 ? (double)(written - 1) / write_s : 0.0,
                interrupted             ? ", interrupted"
                : written >= max_tokens ? ", cut at the limit"
                                        : "");
    }
done:
    sequence_free(r.engine, r.seq);
    answer_free(r.answer);
    sampler_free(r.sampler);
    buf_free(&r.reasoning);
    buf_free(&r.content);
    token_list_free(&ids);
    prompt_free(&prompt);
    if (have_format)
        chat_template_close(&format);
    chat_request_free(request);
    engine_close(r.engine);
    return rc;
}

int cmd_run(int argc, char **argv)
{
    struct config c;
    struct error err;
    const char *words[MAX_WORDS];
    int n_words = 0;
    int status = setup_config(&c, "run", argc, argv, words, MAX_WORDS, &n_words);
    if (status >= 0)
        return status;
    status = 2;
    struct buf text = BUF_INIT;
    if (!c.model[0]) {
        fprintf(stderr, "bedside: %s\n", setup_which_model);
    } else if (read_prompt(&text, &c, words, n_words, &err)) {
        fprintf(stderr, "bedside: %s\n", err.text);
    } else {
        catch_interrupt();
        status = run_prompt(&c, &text, &err) ? 1 : 0;
        if (status)
            fprintf(stderr, "bedside: %s\n", err.text);
    }
    buf_free(&text);
    config_free(&c);
    return status;
}
