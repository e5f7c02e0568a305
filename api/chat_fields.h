/* api/chat_fields.h: every known field of a chat completion request, and what this server does with it.
 *
 * One table, so that no field is silently dropped: a field is honoured (chat_request.c reads it), harmless (it changes nothing of the answer; some
 * only with certain values), or refused by name. Fields that are in no list are ignored, as OpenAI's clients expect of other servers. */
#ifndef BEDSIDE_API_CHAT_FIELDS_H
#define BEDSIDE_API_CHAT_FIELDS_H

#include <jansson.h>
#include <stddef.h>

#include "api/api_error.h"

enum chat_field_rule { FIELD_HONOURED, FIELD_HARMLESS, FIELD_REFUSED };

struct chat_field {
    const char *name;
    enum chat_field_rule rule;
    /* Accepts or refuses a value that is not null; NULL = every value is accepted here (and read later, or ignored). */
    int (*check)(const char *name, const json_t *value, const json_t *request, struct api_error *err);
    const char *why; /* FIELD_REFUSED: the rest of a sentence that begins with the field's name */
};

/* The table; *n is set to its length. */
const struct chat_field *chat_fields(size_t *n);

/* Applies the table to a request. 0, or -1 with a 400 that names the field. */
int chat_fields_check(const json_t *request, struct api_error *err);

/* "a string", "null"... for messages about a wrong type. */
const char *chat_field_kind(const json_t *value);

/* A 400 about a value of the wrong type: "<path> must be <expected>, not <what it is>". */
int chat_field_wrong(struct api_error *err, const char *path, const char *expected, const json_t *value);

#endif
