/* api/api_error.c: refusals in OpenAI's shape. */
#include "api/api_error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "api/reply.h"

/* The error type OpenAI's clients expect for a status. */
static const char *type_of_status(int status)
{
    switch (status) {
    case 401:
        return "authentication_error";
    case 403:
        return "permission_error";
    case 429:
        return "rate_limit_error";
    default:
        return status >= 500 ? "server_error" : "invalid_request_error";
    }
}

int api_error_set(struct api_error *err, int status, const char *code, const char *param, const char *format, ...)
{
    if (!err)
        return -1;
    err->status = status;
    err->type = type_of_status(status);
    err->code = code;
    snprintf(err->param, sizeof err->param, "%s", param ? param : "");
    va_list args;
    va_start(args, format);
    vsnprintf(err->message, sizeof err->message, format, args);
    va_end(args);
    return -1;
}

void api_error_write(const struct api_error *err, struct buf *out)
{
    buf_puts(out, "{\"error\":{\"message\":");
    reply_json_string(out, err->message, strlen(err->message)); /* a sequence cut at the buffer's end becomes U+FFFD */
    buf_puts(out, ",\"type\":");
    const char *type = err->type ? err->type : type_of_status(err->status);
    reply_json_string(out, type, strlen(type));
    buf_puts(out, ",\"param\":");
    if (err->param[0])
        reply_json_string(out, err->param, strlen(err->param));
    else
        buf_puts(out, "null");
    buf_puts(out, ",\"code\":");
    if (err->code)
        reply_json_string(out, err->code, strlen(err->code));
    else
        buf_puts(out, "null");
    buf_puts(out, "}}");
}
