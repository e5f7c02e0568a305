/* api/chat_fields.c: the table of known request fields. */
#include "api/chat_fields.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

const char *chat_field_kind(const json_t *value)
{
    if (!value)
        return "missing";
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "an array";
    case JSON_STRING:
        return "a string";
    case JSON_INTEGER:
    case JSON_REAL:
        return "a number";
    case JSON_TRUE:
    case JSON_FALSE:
        return "a boolean";
    case JSON_NULL:
        break;
    }
    return "null";
}

int chat_field_wrong(struct api_error *err, const char *path, const char *expected, const json_t *value)
{
    if (!value)
        return api_error_set(err, 400, "missing_field", path, "%s is missing; it must be %s", path, expected);
    return api_error_set(err, 400, "invalid_type", path, "%s must be %s, not %s", path, expected, chat_field_kind(value));
}

static bool is_text(const json_t *value, const char *word)
{
    return json_is_string(value) && strcmp(json_string_value(value), word) == 0;
}

static int refuse(struct api_error *err, const char *path, const char *why)
{
    return api_error_set(err, 400, "unsupported_value", path, "%s %s", path, why);
}

static int check_string(const char *name, const json_t *value, const json_t *request, struct api_error *err)
{
    (void)request;
    return json_is_string(value) ? 0 : chat_field_wrong(err, name, "a string", value);
}

static int check_object(const char *name, const json_t *value, const json_t *request, struct api_error *err)
{
    (void)request;
    return json_is_object(value) ? 0 : chat_field_wrong(err, name, "an object", value);
}

static int check_store(const char *name, const json_t *value, const json_t *request, struct api_error *err)
{
    (void)request;
    if (!json_is_boolean(value))
        return chat_field_wrong(err, name, "a boolean", value);
    return json_is_false(value) ? 0 : refuse(err, name, "must be false: this server keeps no answers");
}

static int check_service_tier(const char *name, const json_t *value, const json_t *request, struct api_error *err)
{
    (void)request;
    if (!json_is_string(value))
        return chat_field_wrong(err, name, "a string", value);
    return is_text(value, "auto") || is_text(value, "default") ? 0 : refuse(err, name, "must be \"auto\" or \"default\": this server has one tier");
}

static int check_verbosity(const char *name, const json_t *value, const json_t *request, struct api_error *err)
{
    (void)request;
    if (!json_is_string(value))
        return chat_field_wrong(err, name, "a string", value);
    return is_text(value, "medium") ? 0 : refuse(err, name, "must be \"medium\": the models have no such control; ask for brevity in a message");
}

static int check_modalities(const char *name, const json_t *value, const json_t *request, struct api_error *err)
{
    (void)request;
    if (!json_is_array(value))
        return chat_field_wrong(err, name, "an array", value);
    if (json_array_size(value) == 1 && is_text(json_array_get(value, 0), "text"))
        return 0;
    return refuse(err, name, "must be [\"text\"]: this server writes text only");
}

static int check_response_format(const char *name, const json_t *value, const json_t *request, struct api_error *err)
{
    (void)request;
    if (!json_is_object(value))
        return chat_field_wrong(err, name, "an object", value);
    const json_t *type = json_object_get(value, "type");
    if (!json_is_string(type))
        return chat_field_wrong(err, "response_format.type", "a string", type);
    if (is_text(type, "text"))
        return 0;
    return refuse(err, "response_format.type", "must be \"text\": this server cannot enforce json_object or json_schema; ask for JSON in a message");
}

static int check_n(const char *name, const json_t *value, const json_t *request, struct api_error *err)
{
    (void)request;
    if (!json_is_number(value))
        return chat_field_wrong(err, name, "an integer", value);
    return json_number_value(value) == 1 ? 0 : refuse(err, name, "must be 1: send the request again for another answer");
}

static int check_parallel_tool_calls(const char *name, const json_t *value, const json_t *request, struct api_error *err)
{
    if (!json_is_boolean(value))
        return chat_field_wrong(err, name, "a boolean", value);
    if (json_is_true(value) || json_array_size(json_object_get(request, "tools")) == 0)
        return 0;
    return refuse(err, name, "must be true when there are tools: the model decides how many calls it makes");
}

static int check_tool_choice(const char *name, const json_t *value, const json_t *request, struct api_error *err)
{
    (void)request;
    if (!json_is_string(value) && !json_is_object(value))
        return chat_field_wrong(err, name, "a string or an object", value);
    if (is_text(value, "auto") || is_text(value, "none"))
        return 0;
    return refuse(err, name, "must be \"auto\" or \"none\": this server cannot force a call");
}

/* https://platform.openai.com/docs/api-reference/chat/create, and what other local servers added to it. */
static const struct chat_field fields[] = {
    {"audio", FIELD_REFUSED, NULL, "is not supported: this server writes text only"},
    {"cache_namespace", FIELD_HONOURED, check_string, NULL},
    {"chat_template_kwargs", FIELD_HONOURED, check_object, NULL},
    {"frequency_penalty", FIELD_HONOURED, NULL, NULL},
    {"function_call", FIELD_REFUSED, NULL, "is not supported: use tool_choice"},
    {"functions", FIELD_REFUSED, NULL, "is not supported: use tools"},
    {"logit_bias", FIELD_HONOURED, check_object, NULL},
    {"logprobs", FIELD_HONOURED, NULL, NULL},
    {"max_completion_tokens", FIELD_HONOURED, NULL, NULL},
    {"max_tokens", FIELD_HONOURED, NULL, NULL},
    {"messages", FIELD_HONOURED, NULL, NULL},
    {"metadata", FIELD_HARMLESS, check_object, NULL},
    {"min_p", FIELD_HONOURED, NULL, NULL},
    {"modalities", FIELD_HONOURED, check_modalities, NULL},
    {"model", FIELD_HONOURED, check_string, NULL},
    {"n", FIELD_HONOURED, check_n, NULL},
    {"parallel_tool_calls", FIELD_HONOURED, check_parallel_tool_calls, NULL},
    {"prediction", FIELD_REFUSED, NULL, "is not supported: leave it out, the answer is the same"},
    {"presence_penalty", FIELD_HONOURED, NULL, NULL},
    {"prompt_cache_key", FIELD_HARMLESS, check_string, NULL},
    {"prompt_cache_retention", FIELD_HARMLESS, check_string, NULL},
    {"reasoning_effort", FIELD_HONOURED, check_string, NULL},
    {"repeat_penalty", FIELD_HONOURED, NULL, NULL},
    {"repetition_penalty", FIELD_HONOURED, NULL, NULL},
    {"response_format", FIELD_HONOURED, check_response_format, NULL},
    {"safety_identifier", FIELD_HARMLESS, check_string, NULL},
    {"seed", FIELD_HONOURED, NULL, NULL},
    {"service_tier", FIELD_HARMLESS, check_service_tier, NULL},
    {"stop", FIELD_HONOURED, NULL, NULL},
    {"store", FIELD_HARMLESS, check_store, NULL},
    {"stream", FIELD_HONOURED, NULL, NULL},
    {"stream_options", FIELD_HONOURED, check_object, NULL},
    {"temperature", FIELD_HONOURED, NULL, NULL},
    {"tool_choice", FIELD_HONOURED, check_tool_choice, NULL},
    {"tools", FIELD_HONOURED, NULL, NULL},
    {"top_k", FIELD_HONOURED, NULL, NULL},
    {"top_logprobs", FIELD_HONOURED, NULL, NULL},
    {"top_p", FIELD_HONOURED, NULL, NULL},
    {"user", FIELD_HARMLESS, check_string, NULL},
    {"verbosity", FIELD_HARMLESS, check_verbosity, NULL},
    {"web_search_options", FIELD_REFUSED, NULL, "is not supported: this server never leaves the machine"},
};

const struct chat_field *chat_fields(size_t *n)
{
    *n = sizeof fields / sizeof fields[0];
    return fields;
}

int chat_fields_check(const json_t *request, struct api_error *err)
{
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        const struct chat_field *f = &fields[i];
        const json_t *value = json_object_get(request, f->name);
        if (!value || json_is_null(value))
            continue; /* null counts as absent */
        if (f->rule == FIELD_REFUSED)
            return api_error_set(err, 400, "unsupported_parameter", f->name, "%s %s", f->name, f->why);
        if (f->check && f->check(f->name, value, request, err) < 0)
            return -1;
    }
    return 0;
}
