/* api/chat_request.h: the body of POST /v1/chat/completions as a plain struct; nothing later looks at JSON.
 *
 * Every known OpenAI field is honoured or refused with a 400 that names it; unknown fields are ignored. All text is valid UTF-8 without NUL
 * problems: lengths are explicit. */
#ifndef BEDSIDE_API_CHAT_REQUEST_H
#define BEDSIDE_API_CHAT_REQUEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "api/api_error.h"
#include "engine/sampler.h"

struct text {
    char *data; /* len bytes and a NUL; NULL = absent */
    size_t len;
};

enum chat_role { ROLE_SYSTEM, ROLE_USER, ROLE_ASSISTANT, ROLE_TOOL }; /* "developer" is read as system */

struct tool_argument {
    struct text name;
    struct text value; /* a string's own text, or JSON for any other kind */
    bool is_string;
};

struct tool_call {
    struct text id, name;
    struct tool_argument *arguments; /* in the order given */
    size_t n_arguments;
    struct text arguments_json; /* the whole object, separators ", " and ": " */
};

struct chat_message {
    enum chat_role role;
    struct text content;     /* text parts joined; data NULL when null or absent */
    size_t n_parts;          /* how many text parts it was given as; 0 = a plain string (Qwen3's template knows no parts) */
    struct text reasoning;   /* reasoning_content; data NULL when absent */
    struct tool_call *calls; /* assistant */
    size_t n_calls;
    struct text tool_call_id; /* tool */
};

enum { CHAT_MAX_STOP = 16 };

struct chat_request {
    struct text model;             /* as sent; data NULL when absent */
    struct chat_message *messages; /* at least one */
    size_t n_messages;
    struct text *tools; /* each definition as one line of JSON, key order kept, separators ", " and ": " */
    size_t n_tools;     /* 0 also for tool_choice "none" */
    bool stream, include_usage;
    bool include_progress;          /* stream_options.include_progress: events that say how much of the prompt was read */
    struct text cache_namespace;    /* cache_namespace: whose cached text may be used; data NULL when absent */
    bool warm;                      /* set by the server: the messages are only to be read into the cache, nothing is asked */
    int64_t max_tokens;             /* -1 = not given */
    struct sampler_params sampling; /* defaults applied; bias points into `bias` */
    bool seed_given;                /* otherwise the caller draws one */
    struct logit_bias *bias;
    struct text stop[CHAT_MAX_STOP]; /* non-empty strings */
    size_t n_stop;
    bool enable_thinking;   /* chat_template_kwargs.enable_thinking, reasoning_effort "none"; default true */
    bool preserve_thinking; /* chat_template_kwargs.preserve_thinking; default false */
};

/* What is used where the request is silent, and the limits of this server. */
struct chat_defaults {
    float temperature, top_p, min_p, repeat_penalty;
    int top_k;
    int32_t n_vocab; /* bounds logit_bias ids */
};

/* Parses and validates a body. *out is set on success only. Returns 0 or -1 with *err. */
int chat_request_parse(struct chat_request **out, const char *body, size_t len, const struct chat_defaults *defaults, struct api_error *err);

/* Whether a namespace that came in `where` (a field or a header) may be used. 0, or -1 with a 400. */
int chat_namespace_check(const char *name, size_t len, const char *where, struct api_error *err);
void chat_request_free(struct chat_request *r); /* r may be NULL */

#endif
