/* api/chatml.c: the three generations of the Qwen chat template (spec/tokenizer-and-template.md section 7). */
#include "api/chatml.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/template_words.h"
#include "base/alloc.h"
#include "engine/utf8.h"

/* ---- recognising the template ---- */

/* The words around the tools when the file's own template does not yield them. */
static const char intro_qwen3[] = "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
                                  "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n";
static const char outro_qwen3[] = "</tools>\n\nFor each function call, return a json object with function name and arguments within "
                                  "<tool_call></tool_call> XML tags:\n<tool_call>\n"
                                  "{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>";
static const char intro_qwen35[] = "# Tools\n\nYou have access to the following functions:\n\n<tools>\n";
static const char outro_qwen35[] =
    "</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
    "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
    "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple lines\n</parameter>\n"
    "</function>\n</tool_call>\n\n<IMPORTANT>\nReminder:\n"
    "- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within "
    "<tool_call></tool_call> XML tags\n"
    "- Required parameters MUST be specified\n"
    "- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT after\n"
    "- If there is no function call available, answer the question like normal with your current knowledge and do not tell the user about "
    "function calls\n</IMPORTANT>";

/* Whether word stands in text[0..len). */
static bool contains(const char *text, size_t len, const char *word)
{
    return len && memmem(text, len, word, strlen(word)) != NULL;
}

/* Qwen3.5 prints a tool argument that is no string as Python text: its template ends the choice with "else VALUE | string". Qwen3.6 and its
 * relatives use tojson there, and "| string" only in front of "if". */
static bool prints_python_text(const char *source, size_t len)
{
    const char *p = source, *end = source + len;
    while ((p = memmem(p, (size_t)(end - p), "string", 6))) {
        const char *before = p, *after = p + 6;
        while (before > source && before[-1] == ' ')
            before--;
        while (after < end && *after == ' ')
            after++;
        if (before > source && before[-1] == '|' && !(end - after >= 2 && memcmp(after, "if", 2) == 0))
            return true;
        p += 6;
    }
    return false;
}

static bool recognise(const char *source, size_t len, enum chat_family *family)
{
    if (!contains(source, len, "<|im_start|>"))
        return false;
    if (contains(source, len, "preserve_thinking"))
        *family = CHAT_QWEN36;
    else if (contains(source, len, "<function=") && contains(source, len, "<think>"))
        *family = prints_python_text(source, len) ? CHAT_QWEN35 : CHAT_QWEN36;
    else if (contains(source, len, "<tool_call>") && !contains(source, len, "<function="))
        *family = CHAT_QWEN3;
    else
        return false;
    return true;
}

int chat_template_open(struct chat_template *t, const char *source, size_t len, const char *arch, struct error *err)
{
    *t = (struct chat_template){.tools_intro = BUF_INIT, .tools_outro = BUF_INIT};
    t->recognised = recognise(source, len, &t->family);
    if (!t->recognised)
        t->family = strncmp(arch, "qwen35", 6) == 0 ? CHAT_QWEN36 : CHAT_QWEN3;
    if (!t->recognised || !template_words(source, len, &t->tools_intro, &t->tools_outro)) {
        buf_puts(&t->tools_intro, t->family == CHAT_QWEN3 ? intro_qwen3 : intro_qwen35);
        buf_puts(&t->tools_outro, t->family == CHAT_QWEN3 ? outro_qwen3 : outro_qwen35);
    }
    if (t->tools_intro.failed || t->tools_outro.failed) {
        chat_template_close(t);
        return error_set(err, "out of memory while reading the chat template");
    }
    return 0;
}

void chat_template_close(struct chat_template *t)
{
    buf_free(&t->tools_intro);
    buf_free(&t->tools_outro);
}

const char *chat_family_name(enum chat_family family)
{
    switch (family) {
    case CHAT_QWEN3:
        return "qwen3";
    case CHAT_QWEN35:
        return "qwen3.5";
    case CHAT_QWEN36:
        break;
    }
    return "qwen3.6";
}

/* ---- slices of text ---- */

struct slice {
    const char *p;
    size_t len;
};

static struct slice slice_of(const struct text *t)
{
    return (struct slice){t->data ? t->data : "", t->data ? t->len : 0};
}

/* Python's str.isspace for one code point: what str.strip removes. */
static bool is_space(uint32_t c)
{
    return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) ||
           c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

/* Python's str.strip(). The text is valid UTF-8. */
static struct slice strip(struct slice s)
{
    uint32_t c;
    size_t used;
    while (s.len && utf8_decode(s.p, s.len, &c, &used) == UTF8_OK && is_space(c)) {
        s.p += used;
        s.len -= used;
    }
    while (s.len) {
        size_t at = s.len - 1;
        while (at && ((unsigned char)s.p[at] & 0xC0) == 0x80)
            at--;
        if (utf8_decode(s.p + at, s.len - at, &c, &used) != UTF8_OK || at + used != s.len || !is_space(c))
            break;
        s.len = at;
    }
    return s;
}

/* Python's str.lstrip("\n") and str.rstrip("\n"). */
static struct slice strip_front_newlines(struct slice s)
{
    while (s.len && *s.p == '\n') {
        s.p++;
        s.len--;
    }
    return s;
}

static struct slice strip_back_newlines(struct slice s)
{
    while (s.len && s.p[s.len - 1] == '\n')
        s.len--;
    return s;
}

/* Where word begins in s, first or last occurrence; s.len when it does not. */
static size_t find(struct slice s, const char *word, bool last)
{
    size_t n = strlen(word), at = s.len;
    for (const char *p = s.p; (p = memmem(p, s.len - (size_t)(p - s.p), word, n)); p++) {
        at = (size_t)(p - s.p);
        if (!last)
            break;
    }
    return at;
}

static bool is_tool_response(struct slice s)
{
    static const char begin[] = "<tool_response>", end[] = "</tool_response>";
    size_t nb = sizeof begin - 1, ne = sizeof end - 1;
    return s.len >= nb && s.len >= ne && memcmp(s.p, begin, nb) == 0 && memcmp(s.p + s.len - ne, end, ne) == 0;
}

/* An assistant message's reasoning and content. Reasoning inside the content is split off when there is no field for it. */
static void split_reasoning(const struct chat_message *m, enum chat_family family, struct slice *reasoning, struct slice *content)
{
    static const char open[] = "<think>", close[] = "</think>";
    *content = slice_of(&m->content);
    if (family != CHAT_QWEN3)
        *content = strip(*content);
    *reasoning = slice_of(&m->reasoning);
    size_t at = m->reasoning.data ? content->len : find(*content, close, false);
    if (at < content->len) {
        struct slice head = strip_back_newlines((struct slice){content->p, at});
        size_t begin = find(head, open, true);
        if (begin < head.len) {
            head.p += begin + sizeof open - 1;
            head.len -= begin + sizeof open - 1;
        }
        *reasoning = strip_front_newlines(head);
        size_t tail = find(*content, close, true) + sizeof close - 1;
        *content = strip_front_newlines((struct slice){content->p + tail, content->len - tail});
    }
    if (family != CHAT_QWEN3) /* Qwen3 strips newlines only, and only after it asked whether there is any reasoning */
        *reasoning = strip(*reasoning);
}

/* ---- writing ---- */

/* The prompt being written. Running out of memory is sticky. */
struct writer {
    struct prompt *p;
    enum chat_family family;
    bool failed;
};

/* Text of the template itself: control tokens may appear in it. Adjacent pieces become one range. */
static void own_bytes(struct writer *w, const char *text, size_t len)
{
    struct prompt *p = w->p;
    size_t begin = p->text.len;
    if (!len)
        return;
    if (!buf_add(&p->text, text, len)) {
        w->failed = true;
        return;
    }
    if (p->n_trusted && p->trusted[p->n_trusted - 1].end == begin) {
        p->trusted[p->n_trusted - 1].end = p->text.len;
        return;
    }
    if (alloc_grow(&p->trusted, &p->cap_trusted, p->n_trusted + 1, sizeof *p->trusted) < 0) {
        w->failed = true;
        return;
    }
    p->trusted[p->n_trusted++] = (struct text_range){begin, p->text.len};
}

static void own(struct writer *w, const char *text)
{
    own_bytes(w, text, strlen(text));
}

/* Text that came from the client: never trusted. */
static void theirs(struct writer *w, struct slice s)
{
    if (!buf_add(&w->p->text, s.p, s.len))
        w->failed = true;
}

/* A whole message of the system or the user. */
static void write_plain(struct writer *w, const char *role, struct slice content)
{
    own(w, "<|im_start|>");
    own(w, role);
    own(w, "\n");
    theirs(w, content);
    own(w, "<|im_end|>\n");
}

/* System text with tools. Qwen3 puts the caller's text before the tools, the others behind them. */
static void write_tools(struct writer *w, const struct chat_template *t, const struct chat_request *r)
{
    bool has_system = r->messages[0].role == ROLE_SYSTEM;
    struct slice system = {"", 0};
    if (has_system)
        system = w->family == CHAT_QWEN3 ? slice_of(&r->messages[0].content) : strip(slice_of(&r->messages[0].content));
    own(w, "<|im_start|>system\n");
    if (has_system && w->family == CHAT_QWEN3) {
        theirs(w, system);
        own(w, "\n\n");
    }
    own_bytes(w, t->tools_intro.data, t->tools_intro.len);
    for (size_t i = 0; i < r->n_tools; i++) {
        theirs(w, slice_of(&r->tools[i]));
        own(w, "\n");
    }
    own_bytes(w, t->tools_outro.data, t->tools_outro.len);
    if (system.len && w->family != CHAT_QWEN3) {
        own(w, "\n\n");
        theirs(w, system);
    }
    own(w, "<|im_end|>\n");
}

static void write_call_json(struct writer *w, const struct tool_call *c)
{
    own(w, "<tool_call>\n{\"name\": \"");
    theirs(w, slice_of(&c->name));
    own(w, "\", \"arguments\": ");
    theirs(w, slice_of(&c->arguments_json));
    own(w, "}\n</tool_call>");
}

/* A value inside <parameter>: a string as it is, everything else as JSON; Qwen3.5 writes Python's words for true, false and null. */
static struct slice parameter_text(const struct tool_argument *a, enum chat_family family)
{
    struct slice s = slice_of(&a->value);
    if (a->is_string || family != CHAT_QWEN35)
        return s;
    if (s.len == 4 && memcmp(s.p, "true", 4) == 0)
        return (struct slice){"True", 4};
    if (s.len == 5 && memcmp(s.p, "false", 5) == 0)
        return (struct slice){"False", 5};
    if (s.len == 4 && memcmp(s.p, "null", 4) == 0)
        return (struct slice){"None", 4};
    return s;
}

static void write_call_xml(struct writer *w, const struct tool_call *c)
{
    own(w, "<tool_call>\n<function=");
    theirs(w, slice_of(&c->name));
    own(w, ">\n");
    for (size_t i = 0; i < c->n_arguments; i++) {
        own(w, "<parameter=");
        theirs(w, slice_of(&c->arguments[i].name));
        own(w, ">\n");
        theirs(w, parameter_text(&c->arguments[i], w->family));
        own(w, "\n</parameter>\n");
    }
    own(w, "</function>\n</tool_call>");
}

/* Assistant message i. `current`: it comes after the last question, so its reasoning is kept. The last message of all is left open. */
static void write_assistant(struct writer *w, const struct chat_request *r, size_t i, bool current)
{
    const struct chat_message *m = &r->messages[i];
    bool last = i + 1 == r->n_messages;
    struct slice reasoning, content;
    split_reasoning(m, w->family, &reasoning, &content);
    bool block;
    if (w->family == CHAT_QWEN3)
        block = current && (last || reasoning.len);
    else
        block = current || (w->family == CHAT_QWEN36 && r->preserve_thinking);
    own(w, "<|im_start|>assistant\n");
    if (block) {
        own(w, "<think>\n");
        theirs(w, w->family == CHAT_QWEN3 ? strip_front_newlines(strip_back_newlines(reasoning)) : reasoning);
        own(w, "\n</think>\n\n");
    }
    bool has_content = content.len > 0;
    if (block && w->family == CHAT_QWEN3)
        content = strip_front_newlines(content);
    theirs(w, content);
    for (size_t k = 0; k < m->n_calls; k++) {
        if (k || has_content)
            own(w, !k && w->family != CHAT_QWEN3 ? "\n\n" : "\n");
        if (w->family == CHAT_QWEN3)
            write_call_json(w, &m->calls[k]);
        else
            write_call_xml(w, &m->calls[k]);
    }
    if (!last || r->warm)
        own(w, "<|im_end|>\n");
    w->p->may_reason = last && w->family == CHAT_QWEN3 && !block && !content.len && r->enable_thinking;
}

/* Tool result i. Neighbouring results share one turn of the user's. */
static void write_tool_result(struct writer *w, const struct chat_request *r, size_t i)
{
    struct slice content = slice_of(&r->messages[i].content);
    if (i == 0 || r->messages[i - 1].role != ROLE_TOOL)
        own(w, "<|im_start|>user");
    own(w, "\n<tool_response>\n");
    theirs(w, w->family == CHAT_QWEN3 ? content : strip(content));
    own(w, "\n</tool_response>");
    if (i + 1 == r->n_messages || r->messages[i + 1].role != ROLE_TOOL)
        own(w, "<|im_end|>\n");
}

static void write_generation_prompt(struct writer *w, bool thinking)
{
    own(w, "<|im_start|>assistant\n");
    if (!thinking)
        own(w, "<think>\n\n</think>\n\n");
    else if (w->family != CHAT_QWEN3)
        own(w, "<think>\n");
    w->p->in_reasoning = thinking && w->family != CHAT_QWEN3;
    w->p->may_reason = thinking && w->family == CHAT_QWEN3;
}

/* ---- the whole ---- */

static int refuse(struct api_error *err, size_t i, const char *field, const char *why)
{
    char path[96];
    snprintf(path, sizeof path, "messages[%zu]%s", i, field);
    return api_error_set(err, 400, "invalid_value", path, "%s %s", path, why);
}

/* The index of the last question: the last user message that is no tool result in disguise. False: there is none. */
static bool last_question(const struct chat_request *r, enum chat_family family, size_t *index)
{
    for (size_t i = r->n_messages; i-- > 0;) {
        struct slice content = slice_of(&r->messages[i].content);
        if (r->messages[i].role != ROLE_USER || is_tool_response(family == CHAT_QWEN3 ? content : strip(content)))
            continue;
        *index = i;
        return true;
    }
    *index = r->n_messages - 1;
    return false;
}

/* What the models' own templates refuse, and what cannot be continued. */
static int check_messages(const struct chat_request *r, enum chat_family family, bool has_question, struct api_error *err)
{
    for (size_t i = 0; i < r->n_messages; i++) {
        const struct chat_message *m = &r->messages[i];
        if (family == CHAT_QWEN3 && m->n_parts > 1) /* one part is the same as a string; how several are joined was never trained */
            return refuse(err, i, ".content", "must be a string: this model's template does not join several text parts");
        if (family != CHAT_QWEN3 && m->role == ROLE_SYSTEM && i > 0)
            return refuse(err, i, ".role", "is a system message that is not the first: this model's template takes one, at the beginning");
        if (i + 1 == r->n_messages && m->role == ROLE_ASSISTANT && m->n_calls)
            return refuse(err, i, ".tool_calls", "is not followed by tool messages: send the results of the calls");
    }
    if (family != CHAT_QWEN3 && !has_question && !r->warm)
        return api_error_set(err, 400, "invalid_value", "messages", "messages must have a user message: this model's template needs a question");
    return 0;
}

int chat_template_render(const struct chat_template *t, const struct chat_request *r, struct prompt *out, struct api_error *err)
{
    *out = (struct prompt){.text = BUF_INIT};
    size_t question;
    bool has_question = last_question(r, t->family, &question);
    if (check_messages(r, t->family, has_question, err) < 0)
        return -1;
    struct writer w = {.p = out, .family = t->family};
    bool system_done = r->n_tools > 0 && r->messages[0].role == ROLE_SYSTEM;
    if (r->n_tools)
        write_tools(&w, t, r);
    for (size_t i = system_done ? 1 : 0; i < r->n_messages; i++) {
        const struct chat_message *m = &r->messages[i];
        struct slice content = slice_of(&m->content);
        switch (m->role) {
        case ROLE_SYSTEM:
            write_plain(&w, "system", t->family == CHAT_QWEN3 ? content : strip(content));
            break;
        case ROLE_USER:
            write_plain(&w, "user", t->family == CHAT_QWEN3 ? content : strip(content));
            break;
        case ROLE_ASSISTANT:
            write_assistant(&w, r, i, i > question);
            break;
        case ROLE_TOOL:
            write_tool_result(&w, r, i);
            break;
        }
    }
    if (r->messages[r->n_messages - 1].role != ROLE_ASSISTANT && !r->warm)
        write_generation_prompt(&w, r->enable_thinking);
    if (w.failed || out->text.failed) {
        prompt_free(out);
        return api_error_set(err, 500, "out_of_memory", NULL, "the server is out of memory; try again, or with a shorter request");
    }
    return 0;
}

void prompt_free(struct prompt *p)
{
    buf_free(&p->text);
    free(p->trusted);
    *p = (struct prompt){.text = BUF_INIT};
}
