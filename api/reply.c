/* api/reply.c: replies in OpenAI's shapes, written straight into the connection's buffer.
 *
 * A delta is written once per token, so nothing here builds a JSON tree. */
#include "api/reply.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "engine/utf8.h"

/* OpenAI's value for "as good as impossible"; JSON has no infinity. */
static const double LOWEST_LOGPROB = -9999.0;

/* Length of the run at text[0..len) that may stand in a JSON string as it is: ASCII without controls, quote and backslash. */
static size_t plain_run(const char *text, size_t len)
{
    size_t n = 0;
    while (n < len) {
        unsigned char c = (unsigned char)text[n];
        if (c < 0x20 || c > 0x7E || c == '"' || c == '\\')
            break;
        n++;
    }
    return n;
}

/* Writes one code point that is not in a plain run. */
static void write_code_point(struct buf *out, uint32_t code, const char *bytes, size_t n)
{
    switch (code) {
    case '"':
        buf_puts(out, "\\\"");
        return;
    case '\\':
        buf_puts(out, "\\\\");
        return;
    case '\n':
        buf_puts(out, "\\n");
        return;
    case '\r':
        buf_puts(out, "\\r");
        return;
    case '\t':
        buf_puts(out, "\\t");
        return;
    case '\b':
        buf_puts(out, "\\b");
        return;
    case '\f':
        buf_puts(out, "\\f");
        return;
    default:
        break;
    }
    /* U+0085, U+2028 and U+2029 are legal in JSON, but clients that split an event stream with a Unicode-aware line reader would cut
     * the event there. */
    if (code < 0x20 || (code >= 0x7F && code < 0xA0) || code == 0x2028 || code == 0x2029)
        buf_printf(out, "\\u%04x", (unsigned)code);
    else
        buf_add(out, bytes, n);
}

void reply_json_string(struct buf *out, const char *text, size_t len)
{
    buf_putc(out, '"');
    size_t at = 0;
    while (at < len) {
        size_t run = plain_run(text + at, len - at);
        if (run) {
            buf_add(out, text + at, run);
            at += run;
            continue;
        }
        uint32_t code;
        size_t used;
        if (utf8_decode(text + at, len - at, &code, &used) == UTF8_OK)
            write_code_point(out, code, text + at, used);
        else /* invalid, or cut off at the end */
            buf_add(out, UTF8_REPLACEMENT, UTF8_REPLACEMENT_LEN);
        at += used;
    }
    buf_putc(out, '"');
}

/* "token", "logprob" and "bytes" of one token, without the closing brace. */
static void write_token_logprob(struct buf *list, const struct tokenizer *t, int32_t id, float logprob)
{
    size_t len = 0;
    const char *bytes = tokenizer_bytes(t, id, &len);
    buf_puts(list, "{\"token\":");
    reply_json_string(list, bytes, len);
    double value = isfinite(logprob) ? (double)logprob : LOWEST_LOGPROB;
    buf_printf(list, ",\"logprob\":%.9g,\"bytes\":[", value);
    for (size_t i = 0; i < len; i++)
        buf_printf(list, "%s%u", i ? "," : "", (unsigned)(unsigned char)bytes[i]);
    buf_putc(list, ']');
}

void reply_logprob(struct buf *list, const struct tokenizer *t, const struct pick *pick)
{
    if (list->len)
        buf_putc(list, ',');
    write_token_logprob(list, t, pick->id, pick->logprob);
    buf_puts(list, ",\"top_logprobs\":[");
    for (int i = 0; i < pick->n_top; i++) {
        if (i)
            buf_putc(list, ',');
        write_token_logprob(list, t, pick->top[i].id, pick->top[i].logprob);
        buf_putc(list, '}');
    }
    buf_puts(list, "]}");
}

static const char *finish_name(enum finish_reason reason)
{
    switch (reason) {
    case FINISH_STOP:
        return "\"stop\"";
    case FINISH_LENGTH:
        return "\"length\"";
    case FINISH_TOOL_CALLS:
        return "\"tool_calls\"";
    case FINISH_NONE:
        break;
    }
    return "null";
}

static bool has_text(const struct buf *b)
{
    return b && b->len > 0;
}

/* id, object, created and model: what every reply begins with. */
static void write_head(struct buf *out, const struct reply_head *head, const char *object)
{
    buf_puts(out, "{\"id\":");
    reply_json_string(out, head->id, strlen(head->id));
    buf_printf(out, ",\"object\":\"%s\",\"created\":%" PRId64 ",\"model\":", object, head->created);
    reply_json_string(out, head->model, strlen(head->model));
}

static void write_logprobs(struct buf *out, const struct buf *logprobs)
{
    buf_puts(out, ",\"logprobs\":");
    if (!logprobs || !logprobs->len) {
        buf_puts(out, "null");
        return;
    }
    buf_puts(out, "{\"content\":[");
    buf_add(out, logprobs->data, logprobs->len);
    buf_puts(out, "],\"refusal\":null}");
}

static void write_usage(struct buf *out, const struct usage *u)
{
    buf_printf(out,
               ",\"usage\":{\"prompt_tokens\":%d,\"completion_tokens\":%d,\"total_tokens\":%lld,"
               "\"prompt_tokens_details\":{\"cached_tokens\":%d},\"completion_tokens_details\":{\"reasoning_tokens\":%d}}",
               u->prompt_tokens, u->completion_tokens, (long long)u->prompt_tokens + u->completion_tokens, u->cached_tokens, u->reasoning_tokens);
}

/* Tokens per second; 0 when nothing was measured. */
static double rate(int tokens, double ms)
{
    return ms > 0 ? tokens * 1e3 / ms : 0;
}

static void write_timings(struct buf *out, const struct timings *t)
{
    if (!t)
        return;
    buf_printf(out, ",\"timings\":{\"queue_ms\":%.3f,\"prefill_ms\":%.3f,\"prefill_tokens\":%d,\"prefill_tokens_per_second\":%.2f", t->queue_ms,
               t->prefill_ms, t->prefill_tokens, rate(t->prefill_tokens, t->prefill_ms));
    buf_printf(out, ",\"decode_ms\":%.3f,\"decode_tokens\":%d,\"decode_tokens_per_second\":%.2f", t->decode_ms, t->decode_tokens,
               rate(t->decode_tokens, t->decode_ms));
    buf_printf(out, ",\"cached_tokens\":%d,\"cache_source\":\"%s\",\"cache_miss\":", t->cached_tokens, t->cache_source);
    if (t->cache_miss)
        reply_json_string(out, t->cache_miss, strlen(t->cache_miss));
    else
        buf_puts(out, "null");
    if (t->cache_miss && t->cache_miss_at >= 0)
        buf_printf(out, ",\"cache_miss_at\":%d", t->cache_miss_at);
    buf_printf(out, ",\"pauses\":%d}", t->pauses);
}

/* Starts an event up to and including "delta":{ of the only choice. */
static void begin_chunk(struct buf *out, const struct reply_head *head)
{
    buf_puts(out, "data: ");
    write_head(out, head, "chat.completion.chunk");
    buf_puts(out, ",\"choices\":[{\"index\":0,\"delta\":{");
}

/* Ends what begin_chunk began. */
static void end_chunk(struct buf *out, const struct buf *logprobs, enum finish_reason reason, const struct timings *timings)
{
    buf_putc(out, '}');
    write_logprobs(out, logprobs);
    buf_printf(out, ",\"finish_reason\":%s}]", finish_name(reason));
    write_timings(out, timings);
    buf_puts(out, "}\n\n");
}

void reply_chunk_role(struct buf *out, const struct reply_head *head)
{
    begin_chunk(out, head);
    buf_puts(out, "\"role\":\"assistant\",\"content\":\"\"");
    end_chunk(out, NULL, FINISH_NONE, NULL);
}

/* Writes nothing when there is neither text nor logprobs: a token may be held back whole. */
void reply_chunk_delta(struct buf *out, const struct reply_head *head, const struct buf *reasoning, const struct buf *content,
                       const struct buf *logprobs)
{
    if (!has_text(reasoning) && !has_text(content) && !has_text(logprobs))
        return;
    begin_chunk(out, head);
    if (has_text(reasoning)) {
        buf_puts(out, "\"reasoning_content\":");
        reply_json_string(out, reasoning->data, reasoning->len);
    }
    if (has_text(content)) {
        buf_puts(out, has_text(reasoning) ? ",\"content\":" : "\"content\":");
        reply_json_string(out, content->data, content->len);
    }
    end_chunk(out, logprobs, FINISH_NONE, NULL);
}

void reply_chunk_progress(struct buf *out, const struct reply_head *head, const struct progress *progress)
{
    buf_puts(out, "data: ");
    write_head(out, head, "chat.completion.chunk");
    buf_printf(out, ",\"choices\":[],\"prompt_progress\":{\"total\":%d,\"cached\":%d,\"processed\":%d,\"time_ms\":%.0f}}\n\n", progress->total,
               progress->cached, progress->done, progress->elapsed_ms);
}

void reply_chunk_finish(struct buf *out, const struct reply_head *head, enum finish_reason reason, const struct timings *timings)
{
    begin_chunk(out, head);
    end_chunk(out, NULL, reason, timings);
}

void reply_chunk_usage(struct buf *out, const struct reply_head *head, const struct usage *usage)
{
    buf_puts(out, "data: ");
    write_head(out, head, "chat.completion.chunk");
    buf_puts(out, ",\"choices\":[]");
    write_usage(out, usage);
    buf_puts(out, "}\n\n");
}

void reply_chunk_error(struct buf *out, const char *message)
{
    buf_puts(out, "data: {\"error\":{\"message\":");
    reply_json_string(out, message, strlen(message));
    buf_puts(out, ",\"type\":\"server_error\",\"param\":null,\"code\":null}}\n\n");
}

void reply_chunk_done(struct buf *out)
{
    buf_puts(out, "data: [DONE]\n\n");
}

void reply_whole(struct buf *out, const struct reply_head *head, const struct buf *reasoning, const struct buf *content, const struct buf *logprobs,
                 enum finish_reason reason, const struct usage *usage, const struct timings *timings)
{
    write_head(out, head, "chat.completion");
    buf_puts(out, ",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":");
    if (has_text(content))
        reply_json_string(out, content->data, content->len);
    else
        buf_puts(out, "\"\"");
    if (has_text(reasoning)) {
        buf_puts(out, ",\"reasoning_content\":");
        reply_json_string(out, reasoning->data, reasoning->len);
    }
    buf_puts(out, ",\"refusal\":null}");
    write_logprobs(out, logprobs);
    buf_printf(out, ",\"finish_reason\":%s}]", finish_name(reason));
    write_usage(out, usage);
    write_timings(out, timings);
    buf_putc(out, '}');
}

void reply_warm(struct buf *out, const char *ns, const struct usage *usage, const struct timings *timings)
{
    buf_puts(out, "{\"object\":\"cache.warm\",\"namespace\":");
    reply_json_string(out, ns, strlen(ns));
    write_usage(out, usage);
    write_timings(out, timings);
    buf_putc(out, '}');
}

void reply_models(struct buf *out, const char *model, int64_t created, int context)
{
    buf_puts(out, "{\"object\":\"list\",\"data\":[{\"id\":");
    reply_json_string(out, model, strlen(model));
    buf_printf(out, ",\"object\":\"model\",\"created\":%" PRId64 ",\"owned_by\":\"bedside\",\"context_length\":%d}]}", created, context);
}
