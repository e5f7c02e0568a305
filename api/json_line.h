/* api/json_line.h: JSON on one line, as the models saw it in training: key order kept, ", " and ": " between, non-ASCII as it is,
 * numbers as Python prints them. */
#ifndef BEDSIDE_API_JSON_LINE_H
#define BEDSIDE_API_JSON_LINE_H

#include <jansson.h>

#include "base/buf.h"

/* Appends value. Reals are the shortest decimal that reads back as the same double. */
void json_line_write(struct buf *out, json_t *value);

#endif
