/* api/api_error.h: a refusal in OpenAI's shape: {"error": {"message", "type", "param", "code"}} and an HTTP status. */
#ifndef BEDSIDE_API_API_ERROR_H
#define BEDSIDE_API_API_ERROR_H

#include "base/buf.h"

struct api_error {
    int status;        /* HTTP status; 0 = no error */
    const char *type;  /* "invalid_request_error", "server_error", "rate_limit_error"... (static text) */
    const char *code;  /* short machine-readable word, or NULL (static text) */
    char param[96];    /* the request field, e.g. "messages[2].content"; "" = none */
    char message[512]; /* for a person: what is wrong and what to do; never prompt text */
};

/* Fills *err (may be NULL); type follows from the status. Always returns -1. */
int api_error_set(struct api_error *err, int status, const char *code, const char *param, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

/* Appends the JSON body. */
void api_error_write(const struct api_error *err, struct buf *out);

#endif
