#include "server/chat.h"

#include <errno.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "api/answer.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "engine/cache_disk.h"

enum {
    HEARTBEAT_MS = 4000, /* longest silence of a stream; the promise is 5 s */
    PROGRESS_MS = 500,   /* between progress events */
    DEPTH_WAIT_MS = 300, /* to ask the engine thread what memory holds before files are read */
};

/* A logprobs entry may be shown once the text of its token was: what a stop string may yet withhold must not show through it. */
struct chance {
    size_t text_end;  /* content_read behind the token */
    size_t entry_end; /* length of `chances` behind the entry */
};

/* Belongs to its job: freed when both the connection and the scheduler have let go. Between chat_start and the `end` callback the fields below
 * "scheduler thread" are that thread's alone; the connection's thread looks at them after the outbox was closed. */
struct chat {
    const struct chat_service *service;
    struct job *job;
    struct outbox outbox;
    bool stream, include_usage, include_progress, logprobs, warm;
    char ns[CACHE_NAMESPACE_MAX + 1];
    uint64_t began;    /* clock_ns */
    int progress_sent; /* connection thread: prompt tokens that the last progress event told of */
    int n_prompt;
    struct reply_head head;
    atomic_int written; /* tokens of the answer, the one that ends it not counted */

    /* scheduler thread */
    struct answer *answer;
    int reasoning_tokens;
    struct buf reasoning, content; /* text not yet sent (stream) or all of it */
    struct buf chances;            /* logprobs of content tokens, likewise */
    struct chance *marks;          /* [n_marks] the entries in `chances` */
    size_t n_marks, cap_marks;
    size_t content_shown; /* bytes of content that left the answer so far */
    size_t content_read;  /* bytes of the tokens that are content */
    struct buf event;     /* scratch */
    bool stopped;         /* by a stop string */
    bool overrun;         /* the client does not read */
    int status;
};

/* ---- the service ---- */

/* The setting, which config has checked; else the model file's value where it lies in [low, high]; else `otherwise`. */
static float first_set(double setting, double file, double low, double high, double otherwise)
{
    if (!isnan(setting) && setting >= 0)
        return (float)setting;
    return (float)(file >= low && file <= high ? file : otherwise); /* false for NAN */
}

struct chat_defaults chat_defaults_of(const struct config *c, const struct engine_info *info, const struct tokenizer *t)
{
    const double least = 1e-6; /* in place of an open 0, well above what f32 cannot tell from it */
    return (struct chat_defaults){
        .temperature = first_set(c->temperature, info->default_temperature, 0, 2, 1),
        .top_p = first_set(c->top_p, info->default_top_p, least, 1, 1),
        .top_k = (int)first_set((double)c->top_k, info->default_top_k, 0, 1 << 21, 0),
        .min_p = first_set(c->min_p, info->default_min_p, 0, 1 - least, 0),
        .repeat_penalty = first_set(c->repeat_penalty, info->default_repeat_penalty, least, 10, 1),
        .n_vocab = tokenizer_vocab_size(t),
    };
}

/* "/dir/name.gguf" -> "name". */
static char *stem_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    const char *name = slash ? slash + 1 : path;
    size_t len = strlen(name);
    if (len > 5 && strcmp(name + len - 5, ".gguf") == 0)
        len -= 5;
    return alloc_text(name, len);
}

int chat_service_open(struct chat_service *s, const struct engine *e, struct scheduler *scheduler, const struct config *c, struct error *err)
{
    const struct engine_info *info = engine_info(e);
    const struct tokenizer *t = engine_tokenizer(e);
    *s = (struct chat_service){
        .info = info,
        .tokenizer = t,
        .scheduler = scheduler,
        .defaults = chat_defaults_of(c, info, t),
        .default_max_tokens = (int)c->max_tokens,
        .model = c->alias && c->alias[0] ? c->alias : info->model_name,
        .file_stem = stem_of(c->model),
        .started = (int64_t)time(NULL),
        .deterministic = c->deterministic,
    };
    if (!s->file_stem)
        return error_set(err, "out of memory");
    if (chat_template_open(&s->chat_template, info->chat_template, info->chat_template_len, info->arch, err)) {
        free(s->file_stem);
        return -1;
    }
    return 0;
}

void chat_service_close(struct chat_service *s)
{
    chat_template_close(&s->chat_template);
    free(s->file_stem);
}

bool chat_serves_model(const struct chat_service *s, const char *name, size_t len)
{
    const char *const known[] = {s->model, s->info->model_name, s->file_stem};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strlen(known[i]) == len && memcmp(known[i], name, len) == 0)
            return true;
    }
    return false;
}

/* ---- one answer: scheduler thread ---- */

/* Sends what is in c->event. */
static void send_event(struct chat *c)
{
    if (c->event.failed || !outbox_put(&c->outbox, c->event.data, c->event.len)) {
        if (!c->overrun)
            log_warn("an answer was given up: its client does not read, or memory is short");
        c->overrun = true;
    }
    buf_clear(&c->event);
}

/* How many entries of `chances` may be shown, and the bytes they take. */
static size_t shown_chances(const struct chat *c, size_t *bytes)
{
    size_t n = 0;
    while (n < c->n_marks && c->marks[n].text_end <= c->content_shown)
        n++;
    *bytes = n ? c->marks[n - 1].entry_end : 0;
    return n;
}

/* Forgets the first n entries, which take `bytes`, and the comma behind them. */
static void drop_chances(struct chat *c, size_t n, size_t bytes)
{
    if (n == 0)
        return;
    if (n < c->n_marks)
        bytes++;
    buf_drop_front(&c->chances, bytes);
    memmove(c->marks, c->marks + n, (c->n_marks - n) * sizeof *c->marks);
    c->n_marks -= n;
    for (size_t i = 0; i < c->n_marks; i++)
        c->marks[i].entry_end -= bytes;
}

/* Streams what is ready: text, and the logprobs of the tokens whose text has been shown. */
static void send_delta(struct chat *c)
{
    size_t bytes;
    const size_t n = shown_chances(c, &bytes);
    if (c->reasoning.len == 0 && c->content.len == 0 && n == 0)
        return;
    const struct buf entries = {.data = c->chances.data, .len = bytes};
    reply_chunk_delta(&c->event, &c->head, &c->reasoning, &c->content, n ? &entries : NULL);
    send_event(c);
    buf_clear(&c->reasoning);
    buf_clear(&c->content);
    drop_chances(c, n, bytes);
}

/* Adds a content token's entry. */
static void add_chance(struct chat *c, const struct pick *pick, const char *bytes, size_t len)
{
    const struct tokenizer *t = c->service->tokenizer;
    /* The blank lines after the reasoning and control tokens are not shown: they take no room in the text. */
    const bool blank = c->content_shown == 0 && strspn(bytes, "\n") >= len;
    if (tokenizer_kind(t, pick->id) != TOKEN_CONTROL && !blank)
        c->content_read += len;
    reply_logprob(&c->chances, t, pick);
    if (alloc_grow(&c->marks, &c->cap_marks, c->n_marks + 1, sizeof *c->marks)) {
        c->chances.failed = true;
        return;
    }
    c->marks[c->n_marks++] = (struct chance){c->content_read, c->chances.len};
}

static bool on_token(void *ctx, const struct pick *pick)
{
    struct chat *c = ctx;
    const struct tokenizer *t = c->service->tokenizer;
    atomic_fetch_add(&c->written, 1);
    const bool reasoning = answer_in_reasoning(c->answer);
    if (reasoning)
        c->reasoning_tokens++;

    size_t len;
    const char *bytes = tokenizer_bytes(t, pick->id, &len);
    const size_t before = c->content.len;
    c->stopped = answer_add(c->answer, tokenizer_kind(t, pick->id), bytes, len, &c->reasoning, &c->content);
    if (c->logprobs && !reasoning)
        add_chance(c, pick, bytes, len);
    c->content_shown += c->content.len - before;
    if (c->stream)
        send_delta(c);
    return c->stopped || c->overrun;
}

static struct usage usage_of(const struct chat *c, const struct job_report *report)
{
    return (struct usage){
        .prompt_tokens = c->n_prompt,
        .completion_tokens = atomic_load(&c->written),
        .reasoning_tokens = c->reasoning_tokens,
        .cached_tokens = report->cache.cached,
    };
}

static struct timings timings_of(const struct job_report *report)
{
    static const char *const sources[] = {[CACHE_FROM_NONE] = "none", [CACHE_FROM_MEMORY] = "memory", [CACHE_FROM_DISK] = "disk"};
    const enum cache_miss miss = report->cache.miss;
    return (struct timings){
        .queue_ms = report->queue_ms,
        .prefill_ms = report->prefill_ms,
        .decode_ms = report->decode_ms,
        .prefill_tokens = report->prompt_tokens - report->cache.cached,
        .decode_tokens = report->completion_tokens > 1 ? report->completion_tokens - 1 : 0,
        .cached_tokens = report->cache.cached,
        .cache_source = sources[report->cache.source],
        .cache_miss = miss == CACHE_MISS_NONE ? NULL : cache_miss_name(miss),
        .cache_miss_at = report->cache.miss_at,
        .pauses = report->pauses,
    };
}

static void end_with_error(struct chat *c, const char *message)
{
    if (c->stream) {
        reply_chunk_error(&c->event, message);
    } else {
        struct api_error error = {0};
        api_error_set(&error, c->status, NULL, NULL, "%s", message);
        api_error_write(&error, &c->event);
    }
    send_event(c);
}

static void end_with_reply(struct chat *c, enum finish_reason reason, const struct job_report *report)
{
    const struct usage usage = usage_of(c, report);
    const struct timings timings = timings_of(report);
    if (!c->stream) {
        if (c->warm)
            reply_warm(&c->event, c->ns, &usage, &timings);
        else
            reply_whole(&c->event, &c->head, &c->reasoning, &c->content, c->logprobs ? &c->chances : NULL, reason, &usage, &timings);
        if (!c->event.failed) {
            c->status = 200;
            send_event(c);
        }
        return;
    }
    send_delta(c);
    reply_chunk_finish(&c->event, &c->head, reason, &timings);
    if (c->include_usage)
        reply_chunk_usage(&c->event, &c->head, &usage);
    reply_chunk_done(&c->event);
    send_event(c);
}

static void on_end(void *ctx, enum job_end why, const char *message, const struct job_report *report)
{
    struct chat *c = ctx;
    if (c->stopped) {
        size_t bytes;
        c->n_marks = shown_chances(c, &bytes);
        if (c->chances.len > bytes)
            c->chances.data[c->chances.len = bytes] = '\0';
    } else {
        answer_end(c->answer, &c->reasoning, &c->content);
        c->content_shown = SIZE_MAX; /* nothing is withheld any more */
    }
    const bool memory = answer_out_of_memory(c->answer) || c->reasoning.failed || c->content.failed || c->chances.failed;
    switch (why) {
    case JOB_STOP:
    case JOB_LENGTH:
        c->status = 503;
        if (c->overrun)
            break;
        if (memory)
            end_with_error(c, "the server ran out of memory for this answer; try again");
        else
            end_with_reply(c, why == JOB_LENGTH ? FINISH_LENGTH : FINISH_STOP, report);
        break;
    case JOB_CANCELLED:
        c->status = 499; /* nobody is there to see it; for the log */
        break;
    case JOB_REFUSED:
        c->status = 503;
        end_with_error(c, message);
        break;
    case JOB_FAILED:
        log_error("a request failed: %s", message);
        c->status = 500;
        end_with_error(c, message);
        break;
    }
    outbox_close(&c->outbox);
}

static void chat_free(void *ctx)
{
    struct chat *c = ctx;
    answer_free(c->answer);
    buf_free(&c->reasoning);
    buf_free(&c->content);
    buf_free(&c->chances);
    free(c->marks);
    buf_free(&c->event);
    outbox_free(&c->outbox);
    free(c);
}

/* ---- one answer: connection thread ---- */

static int out_of_memory(struct api_error *err)
{
    return api_error_set(err, 503, NULL, NULL, "the server is out of memory; try again later");
}

static int random_bytes(void *dst, size_t n)
{
    for (size_t done = 0; done < n;) {
        ssize_t k = getrandom((char *)dst + done, n - done, 0);
        if (k < 0 && errno != EINTR)
            return -1;
        if (k > 0)
            done += (size_t)k;
    }
    return 0;
}

static struct chat *chat_new(const struct chat_service *s, const struct chat_request *r, const struct prompt *p, struct api_error *err)
{
    uint64_t id[2];
    if (random_bytes(id, sizeof id)) {
        api_error_set(err, 503, NULL, NULL, "the system gives no random numbers");
        return NULL;
    }
    struct chat *c = alloc_array(1, sizeof *c);
    if (!c || outbox_open(&c->outbox)) {
        free(c);
        out_of_memory(err); /* or of file descriptors: both pass when others leave */
        return NULL;
    }
    c->service = s;
    c->stream = r->stream && !r->warm;
    c->warm = r->warm;
    c->include_usage = r->include_usage;
    c->include_progress = r->include_progress;
    c->began = clock_ns();
    c->progress_sent = -1;
    if (r->cache_namespace.data)
        memcpy(c->ns, r->cache_namespace.data, r->cache_namespace.len + 1); /* its length was checked */
    c->logprobs = r->sampling.want_logprob;
    snprintf(c->head.id, sizeof c->head.id, "chatcmpl-%016llx%08x", (unsigned long long)id[0], (unsigned)(id[1] & 0xFFFFFFFFu));
    c->head.created = (int64_t)time(NULL);
    c->head.model = s->model;
    c->answer =
        answer_new(&(struct answer_options){.stop = r->stop, .n_stop = r->n_stop, .in_reasoning = p->in_reasoning, .may_reason = p->may_reason});
    if (!c->answer) {
        chat_free(c);
        out_of_memory(err);
        return NULL;
    }
    return c;
}

/* How many tokens the answer may have: *out >= 1, what was asked for or less where the context ends; or -1 with a 400 that gives the counts. */
static int answer_room(const struct chat_service *s, const struct chat_request *r, size_t n_prompt, int *out, struct api_error *err)
{
    const int context = s->info->context;
    if (n_prompt >= (size_t)context)
        return api_error_set(err, 400, "context_length_exceeded", "messages",
                             "the prompt has %zu tokens; the context holds %d, of which the answer needs at least one: shorten the messages, or "
                             "start the server with a larger --context",
                             n_prompt, context);
    const int64_t left = context - (int64_t)n_prompt;
    int64_t n = r->max_tokens;
    if (n < 0)
        n = s->default_max_tokens > 0 ? s->default_max_tokens : left;
    *out = (int)(n < 1 ? 1 : n > left ? left : n);
    return 0;
}

static int submit_error(const struct chat_service *s, enum submit_result result, int n_prompt, int max_tokens, struct api_error *err)
{
    switch (result) {
    case SUBMIT_OK:
        return 0;
    case SUBMIT_FULL:
        return api_error_set(err, 429, "queue_full", NULL,
                             "all places are taken and the queue is full (%d running, %d waiting): try again later, or start the server with "
                             "a larger --max-queue",
                             scheduler_stats(s->scheduler).running, scheduler_stats(s->scheduler).queued);
    case SUBMIT_TOO_LARGE:
        return api_error_set(err, 400, "context_length_exceeded", "max_tokens",
                             "%d tokens of prompt and %d of answer need %d pages of KV memory, the server has %d: ask for less, or start it with a "
                             "larger --kv-memory",
                             n_prompt, max_tokens, scheduler_pages(n_prompt, max_tokens), s->info->pages_total);
    case SUBMIT_DRAINING:
        return api_error_set(err, 503, "shutting_down", NULL, "the server is shutting down");
    case SUBMIT_NO_MEMORY:
        break;
    }
    return out_of_memory(err);
}

struct depth_question {
    const char *ns;
    const struct token_list *ids;
    int depth; /* tokens that memory has */
    struct cache_tail tails[CACHE_TAILS_MAX];
    int n_tails;
};

static void ask_depth(struct engine *e, void *arg)
{
    struct depth_question *q = arg;
    q->depth = engine_cache_depth(e, q->ns, q->ids->ids, (int)q->ids->len);
    q->n_tails = engine_cache_tails(e, q->ids->ids, (int)q->ids->len, q->tails);
}

/* What the disk holds of the prompt beyond what memory does: read here, on the connection's thread, so that nobody else waits for it. NULL: nothing
 * (then the prompt is simply computed). */
static struct cache_image *read_disk(const struct chat_service *s, const char *ns, const struct token_list *ids)
{
    const int cells = ids->len ? (int)((ids->len - 1) / GRID) : 0; /* at least one token is left to run */
    if (!s->disk || cells == 0)
        return NULL;
    struct cache_key *keys = alloc_array((size_t)cells, sizeof *keys), before = cache_key_root(s->info->model_id, ns);
    struct cache_image *image = keys ? alloc_array(1, sizeof *image) : NULL;
    if (!image) {
        free(keys);
        return NULL;
    }
    for (int i = 0; i < cells; i++)
        before = keys[i] = cache_key_next(&before, ids->ids + (size_t)i * GRID, GRID);
    /* When the engine is too busy to say, everything is read: some of it in vain, but it is correct. */
    struct depth_question q = {.ns = ns, .ids = ids};
    scheduler_call(s->scheduler, ask_depth, &q, DEPTH_WAIT_MS);
    for (int i = 0; i < q.n_tails; i++) {
        const int at = q.tails[i].position / GRID;
        q.tails[i].key = cache_key_next(&keys[at - 1], ids->ids + (size_t)at * GRID, q.tails[i].position % GRID);
    }
    const struct cache_text text = {.keys = keys, .ids = ids->ids, .n = cells, .tails = q.tails, .n_tails = q.n_tails};
    const bool found = cache_disk_read(s->disk, ns, &text, q.depth, image);
    free(keys);
    if (!found) {
        cache_image_free(image);
        free(image);
        return NULL;
    }
    return image;
}

/* The two ways to name a namespace must agree. */
static int settle_namespace(struct chat_request *r, const char *header, struct api_error *err)
{
    if (!header)
        return 0;
    if (chat_namespace_check(header, strlen(header), "X-Cache-Namespace", err))
        return -1;
    if (r->cache_namespace.data) {
        if (strcmp(r->cache_namespace.data, header) == 0)
            return 0;
        return api_error_set(err, 400, "invalid_value", "cache_namespace",
                             "cache_namespace and the X-Cache-Namespace header name two namespaces; send one of them");
    }
    r->cache_namespace.len = strlen(header);
    r->cache_namespace.data = alloc_text(header, r->cache_namespace.len);
    return r->cache_namespace.data ? 0 : out_of_memory(err);
}

/* Everything after parsing. */
static int start_request(const struct chat_service *s, struct chat_request *r, struct chat **out, struct api_error *err)
{
    int rc = -1;
    struct prompt prompt = {0};
    struct token_list ids = {0};
    struct chat *c = NULL;
    struct cache_image *image = NULL;
    struct error why;

    if (r->model.data && !chat_serves_model(s, r->model.data, r->model.len)) {
        api_error_set(err, 404, "model_not_found", "model", "this server has no model of that name; it serves \"%s\"", s->model);
        goto done;
    }
    if (chat_template_render(&s->chat_template, r, &prompt, err))
        goto done;
    if (tokenizer_encode(s->tokenizer, prompt.text.data, prompt.text.len, prompt.trusted, prompt.n_trusted, TOKENIZER_NFC, &ids, &why)) {
        api_error_set(err, 503, NULL, NULL, "%s", why.text);
        goto done;
    }
    int max_tokens = 0;
    if (answer_room(s, r, ids.len, &max_tokens, err))
        goto done;
    if (!r->seed_given && s->deterministic)
        r->sampling.seed = 0;
    else if (!r->seed_given && random_bytes(&r->sampling.seed, sizeof r->sampling.seed)) {
        api_error_set(err, 503, NULL, NULL, "the system gives no random numbers");
        goto done;
    }
    c = chat_new(s, r, &prompt, err);
    if (!c)
        goto done;
    c->n_prompt = (int)ids.len;
    if (c->stream) { /* before submitting, so that nothing can come first; chat_heartbeat needs the job */
        buf_printf(&c->event, ": reading prompt 0/%d tokens\n\n", c->n_prompt);
        reply_chunk_role(&c->event, &c->head);
        send_event(c);
    }
    image = read_disk(s, c->ns, &ids);
    enum submit_result result = scheduler_submit(s->scheduler,
                                                 &(struct job_options){
                                                     .prompt = ids.ids,
                                                     .n_prompt = c->n_prompt,
                                                     .max_tokens = max_tokens,
                                                     .max_tokens_asked = r->max_tokens >= 0,
                                                     .warm = r->warm,
                                                     .ns = c->ns,
                                                     .image = image,
                                                     .sampling = &r->sampling,
                                                     .token = on_token,
                                                     .end = on_end,
                                                     .release = chat_free,
                                                     .ctx = c,
                                                 },
                                                 &c->job);
    if (result != SUBMIT_OK) {
        submit_error(s, result, c->n_prompt, max_tokens, err);
        chat_free(c);
        goto done;
    }
    image = NULL; /* the job's now */
    *out = c;
    rc = 0;
done:
    cache_image_free(image);
    free(image);
    token_list_free(&ids);
    prompt_free(&prompt);
    return rc;
}

int chat_start(const struct chat_service *s, const struct chat_input *in, struct chat **out, struct api_error *err)
{
    struct chat_request *r;
    if (chat_request_parse(&r, in->body, in->len, &s->defaults, err))
        return -1;
    r->warm = in->warm;
    int rc = settle_namespace(r, in->ns, err);
    if (rc == 0)
        rc = start_request(s, r, out, err);
    chat_request_free(r);
    return rc;
}

bool chat_streams(const struct chat *c)
{
    return c->stream;
}

struct outbox *chat_outbox(struct chat *c)
{
    return &c->outbox;
}

int chat_heartbeat_ms(const struct chat *c)
{
    return c->include_progress && job_prompt_done(c->job) < c->n_prompt ? PROGRESS_MS : HEARTBEAT_MS;
}

void chat_heartbeat(struct chat *c)
{
    struct buf b = BUF_INIT;
    const int written = atomic_load(&c->written), done = job_prompt_done(c->job);
    if (done < c->n_prompt)
        buf_printf(&b, ": reading prompt %d/%d tokens\n\n", done, c->n_prompt);
    else
        buf_printf(&b, ": writing, %d tokens so far\n\n", written);
    if (c->include_progress && written == 0 && done != c->progress_sent) {
        const struct progress p = {
            .total = c->n_prompt, .cached = job_prompt_cached(c->job), .done = done, .elapsed_ms = (double)(clock_ns() - c->began) / 1e6};
        reply_chunk_progress(&b, &c->head, &p);
        c->progress_sent = done;
    }
    if (!b.failed)
        outbox_put(&c->outbox, b.data, b.len); /* when it fails, so does the answer's own next event */
    buf_free(&b);
}

int chat_status(struct chat *c)
{
    return c->status;
}

void chat_finish(struct chat *c, struct usage *usage)
{
    *usage = (struct usage){.prompt_tokens = c->n_prompt, .completion_tokens = atomic_load(&c->written)};
    job_cancel(c->job);
    job_unref(c->job);
}
