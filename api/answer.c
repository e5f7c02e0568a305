/* api/answer.c: from tokens to the text a client sees (spec/tokenizer-and-template.md section 5 and the end of section 7).
 *
 * Two machines in a row, both fed one byte at a time so that the result cannot depend on how the text was cut into tokens:
 *   the think machine splits reasoning from content at <think> and </think>;
 *   the stop machine looks for stop strings in the content (one Knuth-Morris-Pratt automaton for each).
 * Each holds back exactly what may still turn out not to be text. */
#include "api/answer.h"

#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"

enum phase {
    PHASE_START,     /* may open with <think>: leading whitespace and a part of the tag are held */
    PHASE_OPENED,    /* in reasoning, before its first character: newlines are skipped */
    PHASE_REASONING, /* newlines and a part of </think> are held */
    PHASE_CLOSED,    /* after </think>: newlines are skipped */
    PHASE_CONTENT,
    PHASE_STOPPED, /* a stop string was completed */
};

struct stop {
    char *text;
    size_t len;
    size_t *fail; /* [len] length of the longest proper prefix of text[0..i] that also ends it */
    size_t matched;
};

struct answer {
    struct utf8_stream utf8;
    struct buf valid; /* scratch: the text of one token, valid UTF-8 */
    enum phase phase;
    struct buf space; /* PHASE_START: leading whitespace; PHASE_REASONING: newlines */
    size_t tag;       /* bytes of the awaited tag that were seen */
    struct stop stops[CHAT_MAX_STOP];
    size_t n_stop;
    struct buf held; /* content that may begin a stop string */
};

static const char OPEN_TAG[] = "<think>", CLOSE_TAG[] = "</think>";

/* Copies a stop string and builds its failure table. 0 or -1. */
static int stop_init(struct stop *s, const struct text *text)
{
    s->text = alloc_text(text->data, text->len);
    s->fail = alloc_array(text->len, sizeof *s->fail);
    if (!s->text || !s->fail)
        return -1;
    s->len = text->len;
    for (size_t i = 1, k = 0; i < s->len; i++) {
        while (k && s->text[i] != s->text[k])
            k = s->fail[k - 1];
        if (s->text[i] == s->text[k])
            k++;
        s->fail[i] = k;
    }
    return 0;
}

struct answer *answer_new(const struct answer_options *options)
{
    struct answer *a = alloc_array(1, sizeof *a);
    if (!a)
        return NULL;
    a->phase = options->in_reasoning ? PHASE_OPENED : options->may_reason ? PHASE_START : PHASE_CONTENT;
    for (size_t i = 0; i < options->n_stop && i < CHAT_MAX_STOP; i++) {
        if (!options->stop[i].len)
            continue; /* an empty string would stop everything; requests with one are refused */
        if (stop_init(&a->stops[a->n_stop++], &options->stop[i]) < 0) {
            answer_free(a);
            return NULL;
        }
    }
    return a;
}

void answer_free(struct answer *a)
{
    if (!a)
        return;
    for (size_t i = 0; i < a->n_stop; i++) {
        free(a->stops[i].text);
        free(a->stops[i].fail);
    }
    buf_free(&a->valid);
    buf_free(&a->space);
    buf_free(&a->held);
    free(a);
}

bool answer_in_reasoning(const struct answer *a)
{
    return a->phase == PHASE_OPENED || a->phase == PHASE_REASONING;
}

bool answer_out_of_memory(const struct answer *a)
{
    return a->valid.failed || a->space.failed || a->held.failed;
}

/* One more byte of content. The stop string that is completed first wins, the longest of several that end on the same byte; what stood
 * before it is handed out. */
static void content_byte(struct answer *a, char c, struct buf *content)
{
    if (a->phase == PHASE_STOPPED)
        return;
    a->phase = PHASE_CONTENT;
    buf_putc(&a->held, c);
    size_t keep = 0, found = 0;
    for (size_t i = 0; i < a->n_stop; i++) {
        struct stop *s = &a->stops[i];
        while (s->matched && s->text[s->matched] != c)
            s->matched = s->fail[s->matched - 1];
        if (s->text[s->matched] == c)
            s->matched++;
        if (s->matched > keep)
            keep = s->matched;
        if (s->matched == s->len && s->len > found)
            found = s->len;
    }
    if (found)
        keep = found;
    if (a->held.failed)
        return;
    /* A shorter stop string may end inside a longer one that had begun earlier: what was held for the longer is text after all. */
    size_t out = a->held.len - keep;
    if (out) {
        buf_add(content, a->held.data, out);
        buf_drop_front(&a->held, out);
    }
    if (found) {
        buf_clear(&a->held);
        a->phase = PHASE_STOPPED;
    }
}

static void content_bytes(struct answer *a, const char *text, size_t len, struct buf *content)
{
    if (!a->n_stop && a->phase == PHASE_CONTENT) { /* nothing to look for */
        buf_add(content, text, len);
        return;
    }
    for (size_t i = 0; i < len; i++)
        content_byte(a, text[i], content);
}

/* What was held in PHASE_START is content after all. */
static void start_is_content(struct answer *a, struct buf *content)
{
    a->phase = PHASE_CONTENT;
    content_bytes(a, a->space.data, a->space.len, content);
    content_bytes(a, OPEN_TAG, a->tag, content);
    buf_clear(&a->space);
    a->tag = 0;
}

/* Held newlines and the part of a tag that was none belong to the reasoning. */
static void release_reasoning(struct answer *a, struct buf *reasoning)
{
    buf_add(reasoning, a->space.data, a->space.len);
    buf_add(reasoning, CLOSE_TAG, a->tag);
    buf_clear(&a->space);
    a->tag = 0;
}

static bool is_space(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

/* Leading whitespace, then <think>, or content. */
static void start_byte(struct answer *a, char c, struct buf *content)
{
    if (c == OPEN_TAG[a->tag]) {
        if (++a->tag == sizeof OPEN_TAG - 1) {
            buf_clear(&a->space);
            a->tag = 0;
            a->phase = PHASE_OPENED;
        }
    } else if (!a->tag && is_space(c)) {
        buf_putc(&a->space, c);
    } else {
        start_is_content(a, content);
        content_byte(a, c, content);
    }
}

/* Reasoning up to </think>. The newlines next to either tag belong to the frame, not to the text. */
static void reasoning_byte(struct answer *a, char c, struct buf *reasoning)
{
    if (c == CLOSE_TAG[a->tag]) {
        if (++a->tag == sizeof CLOSE_TAG - 1) {
            buf_clear(&a->space);
            a->tag = 0;
            a->phase = PHASE_CLOSED;
        }
        return;
    }
    if (a->tag) { /* no tag: '<' occurs only at its start, so only the byte at hand can begin another */
        release_reasoning(a, reasoning);
        a->phase = PHASE_REASONING;
        reasoning_byte(a, c, reasoning);
        return;
    }
    if (c == '\n') {
        if (a->phase == PHASE_REASONING)
            buf_putc(&a->space, c);
        return;
    }
    release_reasoning(a, reasoning);
    a->phase = PHASE_REASONING;
    buf_putc(reasoning, c);
}

/* Runs valid UTF-8 through the machines. */
static void add_text(struct answer *a, const char *text, size_t len, struct buf *reasoning, struct buf *content)
{
    for (size_t i = 0; i < len; i++) {
        char c = text[i];
        switch (a->phase) {
        case PHASE_START:
            start_byte(a, c, content);
            break;
        case PHASE_OPENED:
        case PHASE_REASONING:
            reasoning_byte(a, c, reasoning);
            break;
        case PHASE_CLOSED:
            if (c != '\n')
                content_byte(a, c, content);
            break;
        case PHASE_CONTENT:
            content_bytes(a, text + i, len - i, content);
            return;
        case PHASE_STOPPED:
            return;
        }
    }
}

bool answer_add(struct answer *a, enum token_kind kind, const char *bytes, size_t len, struct buf *reasoning, struct buf *content)
{
    if (a->phase == PHASE_STOPPED)
        return true;
    if (kind == TOKEN_CONTROL)
        return false;
    buf_clear(&a->valid);
    utf8_stream_add(&a->utf8, bytes, len, &a->valid);
    add_text(a, a->valid.data, a->valid.len, reasoning, content);
    return a->phase == PHASE_STOPPED;
}

void answer_end(struct answer *a, struct buf *reasoning, struct buf *content)
{
    if (a->phase == PHASE_STOPPED)
        return;
    buf_clear(&a->valid);
    utf8_stream_end(&a->utf8, &a->valid);
    add_text(a, a->valid.data, a->valid.len, reasoning, content);
    if (a->phase == PHASE_START)
        start_is_content(a, content);
    if (a->phase == PHASE_OPENED || a->phase == PHASE_REASONING)
        release_reasoning(a, reasoning); /* never closed: all of it is reasoning */
    if (a->phase == PHASE_CONTENT)
        buf_add(content, a->held.data, a->held.len);
    a->phase = PHASE_STOPPED;
}
