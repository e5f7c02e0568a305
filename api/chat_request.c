/* api/chat_request.c: a chat completion body, checked and turned into plain structs.
 *
 * Messages of errors name the path and what was expected, never a value: values are prompt text. */
#include "api/chat_request.h"

#include <float.h>
#include <jansson.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/chat_fields.h"
#include "api/json_line.h"
#include "base/alloc.h"
#include "base/buf.h"
#include "engine/cache_disk.h"

enum {
    MAX_MESSAGES = 16384,
    MAX_TOOLS = 128,
    MAX_CALLS = 128, /* tool calls of one message */
    MAX_BIAS = 1024,
    MAX_NAME = 128, /* bytes of a function's name */
    PATH_SIZE = 96,
};

/* A field's place in the request, e.g. "messages[2].tool_calls[0].function.name". */
struct path {
    char text[PATH_SIZE];
};

static struct path path_of(const char *format, ...) __attribute__((format(printf, 1, 2)));

static struct path path_of(const char *format, ...)
{
    struct path p;
    va_list args;
    va_start(args, format);
    vsnprintf(p.text, sizeof p.text, format, args);
    va_end(args);
    return p;
}

static int out_of_memory(struct api_error *err)
{
    return api_error_set(err, 500, "out_of_memory", NULL, "the server is out of memory; try again, or with a shorter request");
}

/* ---- texts ---- */

static void text_free(struct text *t)
{
    free(t->data);
    *t = (struct text){0};
}

static int text_set(struct text *t, const char *data, size_t len, struct api_error *err)
{
    t->data = alloc_text(data, len);
    if (!t->data)
        return out_of_memory(err);
    t->len = len;
    return 0;
}

static int text_from_json(struct text *t, const json_t *string, struct api_error *err)
{
    return text_set(t, json_string_value(string), json_string_length(string), err);
}

/* A value as one line of JSON. */
static int text_from_value(struct text *t, json_t *value, struct api_error *err)
{
    struct buf b = BUF_INIT;
    json_line_write(&b, value);
    int rc = b.failed ? out_of_memory(err) : text_set(t, b.data, b.len, err);
    buf_free(&b);
    return rc;
}

/* ---- scalars ---- */

/* A member that is there and not null, or NULL. */
static json_t *member(const json_t *object, const char *name)
{
    json_t *v = json_object_get(object, name);
    return json_is_null(v) ? NULL : v;
}

/* An optional boolean; *out keeps its value when absent. *given may be NULL. */
static int take_bool(const json_t *object, const char *name, const char *path, bool *out, bool *given, struct api_error *err)
{
    const json_t *v = member(object, name);
    if (given)
        *given = v != NULL;
    if (!v)
        return 0;
    if (!json_is_boolean(v))
        return chat_field_wrong(err, path, "a boolean", v);
    *out = json_is_true(v);
    return 0;
}

/* The value of a JSON integer, or of a real without a fraction (5.0). */
static bool integer_of(const json_t *v, int64_t *out)
{
    if (json_is_integer(v)) {
        *out = json_integer_value(v);
        return true;
    }
    if (!json_is_real(v))
        return false;
    double d = json_real_value(v);
    if (d != floor(d) || fabs(d) > 9007199254740992.0) /* 2^53: beyond it a real names no single integer */
        return false;
    *out = (int64_t)d;
    return true;
}

/* An optional integer in lo..hi; *given says whether it was there. */
static int take_integer(const json_t *object, const char *name, int64_t lo, int64_t hi, int64_t *out, bool *given, struct api_error *err)
{
    const json_t *v = member(object, name);
    *given = v != NULL;
    if (!v)
        return 0;
    int64_t n;
    if (!json_is_number(v))
        return chat_field_wrong(err, name, "an integer", v);
    if (!integer_of(v, &n))
        return api_error_set(err, 400, "invalid_value", name, "%s must be an integer, without a fraction", name);
    if (n < lo)
        return api_error_set(err, 400, "invalid_value", name, "%s must be at least %lld", name, (long long)lo);
    if (n > hi)
        return api_error_set(err, 400, "invalid_value", name, "%s must be at most %lld", name, (long long)hi);
    *out = n;
    return 0;
}

/* An optional number in lo..hi; lo itself is refused when `above`, hi itself when `below`. */
struct range {
    double lo, hi;
    bool above, below;
};

static int take_number(const json_t *object, const char *name, struct range r, float *out, bool *given, struct api_error *err)
{
    const json_t *v = member(object, name);
    if (given)
        *given = v != NULL;
    if (!v)
        return 0;
    if (!json_is_number(v))
        return chat_field_wrong(err, name, "a number", v);
    double d = json_number_value(v);
    if (d < r.lo || d > r.hi || (r.above && d <= r.lo) || (r.below && d >= r.hi))
        return api_error_set(err, 400, "invalid_value", name, "%s must be %s %g and %s %g", name, r.above ? "above" : "at least", r.lo,
                             r.below ? "below" : "at most", r.hi);
    *out = (float)d;
    return 0;
}

/* ---- sampling ---- */

/* logit_bias: an object of token id to number. */
static int take_bias(struct chat_request *r, const json_t *root, const struct chat_defaults *defaults, struct api_error *err)
{
    json_t *object = member(root, "logit_bias");
    size_t n = json_object_size(object);
    if (!n)
        return 0;
    if (n > MAX_BIAS)
        return api_error_set(err, 400, "invalid_value", "logit_bias", "logit_bias has %zu entries; at most %d are allowed", n, MAX_BIAS);
    r->bias = alloc_array(n, sizeof *r->bias);
    if (!r->bias)
        return out_of_memory(err);
    for (void *it = json_object_iter(object); it; it = json_object_iter_next(object, it)) {
        const char *key = json_object_iter_key(it);
        const json_t *value = json_object_iter_value(it);
        int64_t id = 0;
        size_t digits = 0;
        while (key[digits] >= '0' && key[digits] <= '9' && digits < 10) {
            id = id * 10 + (key[digits] - '0');
            digits++;
        }
        if (!digits || key[digits] || id >= defaults->n_vocab)
            return api_error_set(err, 400, "invalid_value", "logit_bias", "the keys of logit_bias must be token ids from 0 to %d",
                                 (int)defaults->n_vocab - 1);
        struct path path = path_of("logit_bias.%d", (int)id);
        if (!json_is_number(value))
            return chat_field_wrong(err, path.text, "a number", value);
        double bias = json_number_value(value);
        if (bias < -100 || bias > 100)
            return api_error_set(err, 400, "invalid_value", path.text, "%s must be at least -100 and at most 100", path.text);
        for (size_t i = 0; i < r->sampling.n_bias; i++)
            if (r->bias[i].id == (int32_t)id) /* "7" and "07" */
                return api_error_set(err, 400, "invalid_value", path.text, "%s is given twice", path.text);
        r->bias[r->sampling.n_bias++] = (struct logit_bias){.id = (int32_t)id, .bias = (float)bias};
    }
    r->sampling.bias = r->bias;
    return 0;
}

static int take_penalties(struct sampler_params *s, const json_t *root, struct api_error *err)
{
    const struct range signed_penalty = {.lo = -2, .hi = 2}, factor = {.lo = 0, .hi = 10, .above = true};
    bool a, b;
    float first = s->repeat_penalty, second = s->repeat_penalty;
    if (take_number(root, "presence_penalty", signed_penalty, &s->presence_penalty, NULL, err) < 0 ||
        take_number(root, "frequency_penalty", signed_penalty, &s->frequency_penalty, NULL, err) < 0 ||
        take_number(root, "repeat_penalty", factor, &first, &a, err) < 0 || take_number(root, "repetition_penalty", factor, &second, &b, err) < 0)
        return -1;
    if (a && b && (first < second || first > second))
        return api_error_set(err, 400, "invalid_value", "repetition_penalty",
                             "repeat_penalty and repetition_penalty are two names for one setting and differ; send one of them");
    s->repeat_penalty = a ? first : second;
    return 0;
}

static int take_sampling(struct chat_request *r, const json_t *root, const struct chat_defaults *defaults, struct api_error *err)
{
    struct sampler_params *s = &r->sampling;
    s->temperature = defaults->temperature;
    s->top_p = defaults->top_p;
    s->top_k = defaults->top_k;
    s->min_p = defaults->min_p;
    s->repeat_penalty = defaults->repeat_penalty;

    int64_t n = 0;
    bool given;
    if (take_number(root, "temperature", (struct range){.lo = 0, .hi = 2}, &s->temperature, NULL, err) < 0 ||
        take_number(root, "top_p", (struct range){.lo = 0, .hi = 1}, &s->top_p, NULL, err) < 0 ||
        take_number(root, "min_p", (struct range){.lo = 0, .hi = 1, .below = true}, &s->min_p, NULL, err) < 0)
        return -1;
    /* OpenAI allows top_p 0: the smallest nucleus there is, the likeliest token alone. */
    if (s->top_p < FLT_MIN)
        s->top_p = FLT_MIN;
    /* The float nearest to a double just below 1 may be 1. */
    if (s->min_p >= 1.0f)
        s->min_p = nextafterf(1.0f, 0.0f);
    /* -1 is how some clients say "off". */
    if (take_integer(root, "top_k", -1, INT_MAX, &n, &given, err) < 0)
        return -1;
    if (given)
        s->top_k = n < 0 ? 0 : (int)n;
    if (take_integer(root, "seed", INT64_MIN, INT64_MAX, &n, &r->seed_given, err) < 0)
        return -1;
    if (r->seed_given)
        s->seed = (uint64_t)n;
    if (take_penalties(s, root, err) < 0)
        return -1;

    if (take_bool(root, "logprobs", "logprobs", &s->want_logprob, NULL, err) < 0 ||
        take_integer(root, "top_logprobs", 0, SAMPLER_MAX_TOP, &n, &given, err) < 0)
        return -1;
    if (given && !s->want_logprob && n > 0)
        return api_error_set(err, 400, "invalid_value", "top_logprobs", "top_logprobs needs logprobs to be true");
    if (given)
        s->n_top = (int)n;
    return take_bias(r, root, defaults, err);
}

/* ---- limits, stream, thinking ---- */

static int take_max_tokens(struct chat_request *r, const json_t *root, struct api_error *err)
{
    int64_t a = -1, b = -1;
    bool given_a, given_b;
    if (take_integer(root, "max_tokens", 1, INT64_MAX, &a, &given_a, err) < 0 ||
        take_integer(root, "max_completion_tokens", 1, INT64_MAX, &b, &given_b, err) < 0)
        return -1;
    if (given_a && given_b && a != b)
        return api_error_set(err, 400, "invalid_value", "max_completion_tokens",
                             "max_tokens and max_completion_tokens are two names for one limit and differ; send one of them");
    r->max_tokens = given_b ? b : a;
    return 0;
}

static int take_stop(struct chat_request *r, const json_t *root, struct api_error *err)
{
    const json_t *v = member(root, "stop");
    if (!v)
        return 0;
    size_t n = json_is_array(v) ? json_array_size(v) : 1;
    if (n > CHAT_MAX_STOP)
        return api_error_set(err, 400, "invalid_value", "stop", "stop has %zu strings; at most %d are allowed", n, (int)CHAT_MAX_STOP);
    if (!json_is_array(v) && !json_is_string(v))
        return chat_field_wrong(err, "stop", "a string or an array of strings", v);
    for (size_t i = 0; i < n; i++) {
        const json_t *s = json_is_array(v) ? json_array_get(v, i) : v;
        struct path path = json_is_array(v) ? path_of("stop[%zu]", i) : path_of("stop");
        if (!json_is_string(s))
            return chat_field_wrong(err, path.text, "a string", s);
        if (!json_string_length(s))
            return api_error_set(err, 400, "invalid_value", path.text, "%s must not be empty", path.text);
        if (text_from_json(&r->stop[i], s, err) < 0)
            return -1;
        r->n_stop = i + 1;
    }
    return 0;
}

static int take_stream(struct chat_request *r, const json_t *root, struct api_error *err)
{
    bool obfuscation = false; /* padding against traffic analysis, useless on a loopback; accepted, never sent */
    const json_t *options = member(root, "stream_options");
    if (take_bool(root, "stream", "stream", &r->stream, NULL, err) < 0 ||
        take_bool(options, "include_usage", "stream_options.include_usage", &r->include_usage, NULL, err) < 0 ||
        take_bool(options, "include_progress", "stream_options.include_progress", &r->include_progress, NULL, err) < 0)
        return -1;
    return take_bool(options, "include_obfuscation", "stream_options.include_obfuscation", &obfuscation, NULL, err);
}

int chat_namespace_check(const char *name, size_t len, const char *where, struct api_error *err)
{
    if (cache_namespace_valid(name, len))
        return 0;
    return api_error_set(err, 400, "invalid_value", where, "%s must be 1 to %d characters of A-Z a-z 0-9 . _ - and begin with a letter, digit or _",
                         where, (int)CACHE_NAMESPACE_MAX);
}

static int take_namespace(struct chat_request *r, const json_t *root, struct api_error *err)
{
    const json_t *ns = member(root, "cache_namespace");
    if (!ns)
        return 0;
    if (text_from_json(&r->cache_namespace, ns, err) < 0)
        return -1;
    return chat_namespace_check(r->cache_namespace.data, r->cache_namespace.len, "cache_namespace", err);
}

/* Thinking is on unless chat_template_kwargs.enable_thinking is false or reasoning_effort is "none". */
static int take_thinking(struct chat_request *r, const json_t *root, struct api_error *err)
{
    const json_t *kwargs = member(root, "chat_template_kwargs"), *effort = member(root, "reasoning_effort");
    bool given;
    r->enable_thinking = true;
    if (take_bool(kwargs, "enable_thinking", "chat_template_kwargs.enable_thinking", &r->enable_thinking, &given, err) < 0 ||
        take_bool(kwargs, "preserve_thinking", "chat_template_kwargs.preserve_thinking", &r->preserve_thinking, NULL, err) < 0)
        return -1;
    if (!effort)
        return 0;
    static const char *const known[] = {"none", "minimal", "low", "medium", "high", "xhigh"};
    size_t i = 0, n = sizeof known / sizeof known[0];
    while (i < n && strcmp(json_string_value(effort), known[i]) != 0)
        i++;
    if (i == n)
        return api_error_set(err, 400, "invalid_value", "reasoning_effort",
                             "reasoning_effort must be \"none\" (no thinking), \"minimal\", \"low\", \"medium\", \"high\" or \"xhigh\"");
    if (i == 0 && given && r->enable_thinking)
        return api_error_set(err, 400, "invalid_value", "reasoning_effort",
                             "reasoning_effort \"none\" and chat_template_kwargs.enable_thinking true contradict each other; send one of them");
    if (i == 0)
        r->enable_thinking = false;
    return 0;
}

/* ---- tools ---- */

/* A function's name stands unquoted in the prompt: printable ASCII that cannot break out of its place. */
static int check_name(const json_t *name, const char *path, struct api_error *err)
{
    if (!json_is_string(name))
        return chat_field_wrong(err, path, "a string", name);
    const char *s = json_string_value(name);
    size_t len = json_string_length(name);
    bool good = len > 0 && len <= MAX_NAME;
    for (size_t i = 0; i < len && good; i++)
        good = s[i] > ' ' && s[i] < 0x7F && !strchr("<>\"'\\{}", s[i]);
    if (good)
        return 0;
    return api_error_set(err, 400, "invalid_value", path, "%s must be 1 to %d letters, digits, '_', '-', '.', ':' or '/'", path, MAX_NAME);
}

static int take_tools(struct chat_request *r, const json_t *root, struct api_error *err)
{
    json_t *tools = member(root, "tools");
    if (!tools)
        return 0;
    if (!json_is_array(tools))
        return chat_field_wrong(err, "tools", "an array", tools);
    size_t n = json_array_size(tools);
    if (n > MAX_TOOLS)
        return api_error_set(err, 400, "invalid_value", "tools", "there are %zu tools; at most %d are allowed", n, MAX_TOOLS);
    const json_t *choice = member(root, "tool_choice");
    bool none = json_is_string(choice) && strcmp(json_string_value(choice), "none") == 0;
    r->tools = alloc_array(n, sizeof *r->tools);
    if (!r->tools)
        return out_of_memory(err);
    for (size_t i = 0; i < n; i++) {
        json_t *tool = json_array_get(tools, i);
        struct path path = path_of("tools[%zu]", i);
        if (!json_is_object(tool))
            return chat_field_wrong(err, path.text, "an object", tool);
        const json_t *type = json_object_get(tool, "type"), *function = json_object_get(tool, "function");
        path = path_of("tools[%zu].type", i);
        if (!json_is_string(type))
            return chat_field_wrong(err, path.text, "a string", type);
        if (strcmp(json_string_value(type), "function") != 0)
            return api_error_set(err, 400, "unsupported_value", path.text, "%s must be \"function\": there are no other tools here", path.text);
        path = path_of("tools[%zu].function", i);
        if (!json_is_object(function))
            return chat_field_wrong(err, path.text, "an object", function);
        path = path_of("tools[%zu].function.name", i);
        if (check_name(json_object_get(function, "name"), path.text, err) < 0)
            return -1;
        const json_t *parameters = member(function, "parameters");
        path = path_of("tools[%zu].function.parameters", i);
        if (parameters && !json_is_object(parameters))
            return chat_field_wrong(err, path.text, "an object", parameters);
        if (none)
            continue;
        if (text_from_value(&r->tools[i], tool, err) < 0)
            return -1;
        r->n_tools = i + 1;
    }
    return 0;
}

/* ---- JSON text ---- */

/* Parses text into *out (a new reference). `what` begins the message. */
static int parse_json(json_t **out, const char *text, size_t len, const char *path, const char *what, struct api_error *err)
{
    if (memchr(text, '\0', len)) /* never valid in JSON, but the parser steps over some */
        return api_error_set(err, 400, "invalid_json", path, "%s has a NUL byte; JSON writes it as \\u0000", what);
    json_error_t e;
    *out = json_loadb(text, len, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY | JSON_ALLOW_NUL, &e);
    if (*out)
        return 0;
    /* jansson's own text quotes the input: only its code and place are used. */
    const char *why = "is not valid JSON";
    switch (json_error_code(&e)) {
    case json_error_out_of_memory:
        return out_of_memory(err);
    case json_error_duplicate_key:
        why = "has the same key twice in one object";
        break;
    case json_error_invalid_utf8:
        why = "is not valid UTF-8";
        break;
    case json_error_null_byte_in_key:
        why = "has a NUL character in a key";
        break;
    case json_error_numeric_overflow:
        why = "has a number that is too large (integers have 64 bits, reals are below 1.8e308)";
        break;
    case json_error_stack_overflow:
        why = "is nested deeper than 2048 levels";
        break;
    case json_error_premature_end_of_input:
        why = "ends too early: it is cut off or a bracket is open";
        break;
    case json_error_end_of_input_expected:
        why = "has something after the end of the JSON value";
        break;
    default:
        break;
    }
    return api_error_set(err, 400, "invalid_json", path, "%s %s (line %d, column %d)", what, why, e.line, e.column);
}

/* ---- messages ---- */

/* A string, or an array of text parts, joined. */
static int take_content(struct chat_message *m, const json_t *v, const char *path, struct api_error *err)
{
    if (json_is_string(v))
        return text_from_json(&m->content, v, err);
    if (!json_is_array(v))
        return chat_field_wrong(err, path, "a string or an array of text parts", v);
    size_t n = json_array_size(v);
    if (!n)
        return api_error_set(err, 400, "invalid_value", path, "%s must have at least one part", path);
    struct buf joined = BUF_INIT;
    buf_reserve(&joined, 0);
    int rc = 0;
    for (size_t i = 0; i < n && rc == 0; i++) {
        const json_t *part = json_array_get(v, i), *type = json_object_get(part, "type"), *text = json_object_get(part, "text");
        struct path at = path_of("%.70s[%zu]", path, i);
        struct path at_type = path_of("%.80s.type", at.text), at_text = path_of("%.80s.text", at.text);
        if (!json_is_object(part))
            rc = chat_field_wrong(err, at.text, "an object", part);
        else if (!json_is_string(type))
            rc = chat_field_wrong(err, at_type.text, "a string", type);
        else if (strcmp(json_string_value(type), "text") != 0)
            rc = api_error_set(err, 400, "unsupported_value", at_type.text, "%s must be \"text\": this server reads no images, audio or files",
                               at_type.text);
        else if (!json_is_string(text))
            rc = chat_field_wrong(err, at_text.text, "a string", text);
        else
            buf_add(&joined, json_string_value(text), json_string_length(text));
    }
    if (rc == 0)
        rc = joined.failed ? out_of_memory(err) : text_set(&m->content, joined.data, joined.len, err);
    buf_free(&joined);
    m->n_parts = n;
    return rc;
}

/* A call's arguments: an object, or OpenAI's string that holds one. */
static int take_arguments(struct tool_call *call, json_t *v, const char *path, struct api_error *err)
{
    json_t *object = NULL;
    int rc = -1;
    if (!v || (json_is_string(v) && !json_string_length(v))) {
        object = json_object(); /* a call without arguments */
        if (!object)
            return out_of_memory(err);
    } else if (json_is_string(v)) {
        if (parse_json(&object, json_string_value(v), json_string_length(v), path, path, err) < 0)
            return -1;
    } else {
        object = json_incref(v);
    }
    if (!json_is_object(object)) {
        chat_field_wrong(err, path, json_is_string(v) ? "a string that holds a JSON object" : "an object or a string that holds one", object);
        goto done;
    }
    if (text_from_value(&call->arguments_json, object, err) < 0)
        goto done;
    size_t n = json_object_size(object);
    call->arguments = alloc_array(n, sizeof *call->arguments);
    if (!call->arguments) {
        out_of_memory(err);
        goto done;
    }
    for (void *it = json_object_iter(object); it; it = json_object_iter_next(object, it)) {
        struct tool_argument *a = &call->arguments[call->n_arguments++];
        const char *key = json_object_iter_key(it);
        json_t *value = json_object_iter_value(it);
        a->is_string = json_is_string(value);
        if (text_set(&a->name, key, strlen(key), err) < 0 ||
            (a->is_string ? text_from_json(&a->value, value, err) : text_from_value(&a->value, value, err)) < 0)
            goto done;
    }
    rc = 0;
done:
    json_decref(object);
    return rc;
}

/* tool_calls of the assistant's message i. */
static int take_calls(struct chat_message *m, size_t i, const json_t *calls, struct api_error *err)
{
    struct path path = path_of("messages[%zu].tool_calls", i);
    if (!json_is_array(calls))
        return chat_field_wrong(err, path.text, "an array", calls);
    size_t n = json_array_size(calls);
    if (n > MAX_CALLS)
        return api_error_set(err, 400, "invalid_value", path.text, "%s has %zu calls; at most %d are allowed", path.text, n, MAX_CALLS);
    m->calls = alloc_array(n, sizeof *m->calls);
    if (!m->calls)
        return out_of_memory(err);
    for (size_t k = 0; k < n; k++) {
        const json_t *call = json_array_get(calls, k);
        path = path_of("messages[%zu].tool_calls[%zu]", i, k);
        if (!json_is_object(call))
            return chat_field_wrong(err, path.text, "an object", call);
        const json_t *type = member(call, "type"), *id = member(call, "id"), *function = json_object_get(call, "function");
        struct tool_call *out = &m->calls[m->n_calls++];
        path = path_of("messages[%zu].tool_calls[%zu].type", i, k);
        if (type && !(json_is_string(type) && strcmp(json_string_value(type), "function") == 0))
            return api_error_set(err, 400, "unsupported_value", path.text, "%s must be \"function\"", path.text);
        path = path_of("messages[%zu].tool_calls[%zu].id", i, k);
        if (id && !json_is_string(id))
            return chat_field_wrong(err, path.text, "a string", id);
        if (id && text_from_json(&out->id, id, err) < 0)
            return -1;
        path = path_of("messages[%zu].tool_calls[%zu].function", i, k);
        if (!json_is_object(function))
            return chat_field_wrong(err, path.text, "an object", function);
        path = path_of("messages[%zu].tool_calls[%zu].function.name", i, k);
        const json_t *name = json_object_get(function, "name");
        if (check_name(name, path.text, err) < 0 || text_from_json(&out->name, name, err) < 0)
            return -1;
        path = path_of("messages[%zu].tool_calls[%zu].function.arguments", i, k);
        if (take_arguments(out, member(function, "arguments"), path.text, err) < 0)
            return -1;
    }
    return 0;
}

static int take_role(enum chat_role *out, const json_t *role, const char *path, struct api_error *err)
{
    static const struct {
        const char *name;
        enum chat_role role;
    } roles[] = {
        {"system", ROLE_SYSTEM}, {"developer", ROLE_SYSTEM}, {"user", ROLE_USER}, {"assistant", ROLE_ASSISTANT}, {"tool", ROLE_TOOL},
    };
    if (!json_is_string(role))
        return chat_field_wrong(err, path, "a string", role);
    for (size_t i = 0; i < sizeof roles / sizeof roles[0]; i++) {
        if (strcmp(json_string_value(role), roles[i].name) == 0) {
            *out = roles[i].role;
            return 0;
        }
    }
    return api_error_set(err, 400, "invalid_value", path, "%s must be \"system\", \"developer\", \"user\", \"assistant\" or \"tool\"", path);
}

/* An optional string member of message i, for the assistant (or whoever may have it). */
static int take_message_text(struct text *out, const json_t *message, size_t i, const char *name, struct api_error *err)
{
    const json_t *v = member(message, name);
    if (!v || out->data)
        return 0;
    struct path path = path_of("messages[%zu].%s", i, name);
    return json_is_string(v) ? text_from_json(out, v, err) : chat_field_wrong(err, path.text, "a string", v);
}

static int take_assistant(struct chat_message *m, const json_t *v, size_t i, struct api_error *err)
{
    static const char *const refused[] = {"audio", "function_call"};
    for (size_t k = 0; k < sizeof refused / sizeof refused[0]; k++) {
        struct path path = path_of("messages[%zu].%s", i, refused[k]);
        if (member(v, refused[k]))
            return api_error_set(err, 400, "unsupported_parameter", path.text, "%s is not supported; use content and tool_calls", path.text);
    }
    /* "reasoning" is what some servers and clients call the same field. */
    if (take_message_text(&m->reasoning, v, i, "reasoning_content", err) < 0 || take_message_text(&m->reasoning, v, i, "reasoning", err) < 0)
        return -1;
    const json_t *calls = member(v, "tool_calls");
    return calls ? take_calls(m, i, calls, err) : 0;
}

static int take_message(struct chat_message *m, const json_t *v, size_t i, struct api_error *err)
{
    struct path path = path_of("messages[%zu]", i);
    if (!json_is_object(v))
        return chat_field_wrong(err, path.text, "an object", v);
    path = path_of("messages[%zu].role", i);
    if (take_role(&m->role, json_object_get(v, "role"), path.text, err) < 0)
        return -1;
    struct text name = {0}; /* the models' templates have no place for it */
    int rc = take_message_text(&name, v, i, "name", err);
    text_free(&name);
    if (rc < 0)
        return -1;
    if (m->role == ROLE_ASSISTANT && take_assistant(m, v, i, err) < 0)
        return -1;
    if (m->role != ROLE_ASSISTANT && member(v, "tool_calls")) {
        path = path_of("messages[%zu].tool_calls", i);
        return api_error_set(err, 400, "invalid_value", path.text, "%s: only an assistant message makes tool calls", path.text);
    }
    if (m->role == ROLE_TOOL && take_message_text(&m->tool_call_id, v, i, "tool_call_id", err) < 0)
        return -1;
    path = path_of("messages[%zu].content", i);
    const json_t *content = json_object_get(v, "content");
    if (m->role == ROLE_ASSISTANT && (!content || json_is_null(content))) {
        if (m->n_calls || m->reasoning.data)
            return 0;
        return api_error_set(err, 400, "missing_field", path.text, "%s is missing; only an assistant message with tool_calls may do without",
                             path.text);
    }
    return take_content(m, content, path.text, err);
}

static int take_messages(struct chat_request *r, const json_t *root, struct api_error *err)
{
    const json_t *messages = member(root, "messages");
    if (!json_is_array(messages))
        return chat_field_wrong(err, "messages", "an array", messages);
    size_t n = json_array_size(messages);
    if (!n)
        return api_error_set(err, 400, "invalid_value", "messages", "messages must have at least one message");
    if (n > MAX_MESSAGES)
        return api_error_set(err, 400, "invalid_value", "messages", "there are %zu messages; at most %d are allowed", n, MAX_MESSAGES);
    r->messages = alloc_array(n, sizeof *r->messages);
    if (!r->messages)
        return out_of_memory(err);
    for (size_t i = 0; i < n; i++) {
        r->n_messages = i + 1; /* counted before it is filled: freeing a half-filled one is safe */
        if (take_message(&r->messages[i], json_array_get(messages, i), i, err) < 0)
            return -1;
    }
    return 0;
}

/* ---- the whole ---- */

static int load_body(json_t **root, const char *body, size_t len, struct api_error *err)
{
    size_t blank = 0;
    while (blank < len && strchr(" \t\r\n", body[blank]) && body[blank])
        blank++;
    if (blank == len)
        return api_error_set(err, 400, "invalid_json", NULL, "the body is empty; send a JSON object with \"messages\"");
    if (len >= 3 && memcmp(body, "\xEF\xBB\xBF", 3) == 0)
        return api_error_set(err, 400, "invalid_json", NULL, "the body begins with a byte order mark; send plain UTF-8 without it");
    if (parse_json(root, body, len, NULL, "the body", err) < 0)
        return -1;
    if (json_is_object(*root))
        return 0;
    api_error_set(err, 400, "invalid_type", NULL, "the body must be a JSON object, not %s", chat_field_kind(*root));
    json_decref(*root);
    *root = NULL;
    return -1;
}

int chat_request_parse(struct chat_request **out, const char *body, size_t len, const struct chat_defaults *defaults, struct api_error *err)
{
    json_t *root = NULL;
    if (load_body(&root, body, len, err) < 0)
        return -1;
    int rc = -1;
    struct chat_request *r = alloc_array(1, sizeof *r);
    if (!r) {
        out_of_memory(err);
        goto done;
    }
    r->max_tokens = -1;
    const json_t *model = member(root, "model");
    if (chat_fields_check(root, err) < 0 || (model && text_from_json(&r->model, model, err) < 0) || take_namespace(r, root, err) < 0 ||
        take_messages(r, root, err) < 0 || take_tools(r, root, err) < 0 || take_max_tokens(r, root, err) < 0 ||
        take_sampling(r, root, defaults, err) < 0 || take_stop(r, root, err) < 0 || take_stream(r, root, err) < 0 || take_thinking(r, root, err) < 0)
        goto done;
    *out = r;
    r = NULL;
    rc = 0;
done:
    chat_request_free(r);
    json_decref(root);
    return rc;
}

static void message_free(struct chat_message *m)
{
    for (size_t k = 0; k < m->n_calls; k++) {
        struct tool_call *c = &m->calls[k];
        for (size_t a = 0; a < c->n_arguments; a++) {
            text_free(&c->arguments[a].name);
            text_free(&c->arguments[a].value);
        }
        free(c->arguments);
        text_free(&c->id);
        text_free(&c->name);
        text_free(&c->arguments_json);
    }
    free(m->calls);
    text_free(&m->content);
    text_free(&m->reasoning);
    text_free(&m->tool_call_id);
}

void chat_request_free(struct chat_request *r)
{
    if (!r)
        return;
    for (size_t i = 0; i < r->n_messages; i++)
        message_free(&r->messages[i]);
    free(r->messages);
    for (size_t i = 0; i < r->n_tools; i++)
        text_free(&r->tools[i]);
    free(r->tools);
    for (size_t i = 0; i < r->n_stop; i++)
        text_free(&r->stop[i]);
    free(r->bias);
    text_free(&r->model);
    text_free(&r->cache_namespace);
    free(r);
}
