/* server/page.h: the page at /: one paragraph that says what runs here. */
#ifndef BEDSIDE_SERVER_PAGE_H
#define BEDSIDE_SERVER_PAGE_H

#include <stdbool.h>

#include "base/buf.h"

/* Whether a model of this name is the demonstration that comes with the project (tests/demo-model). */
bool page_is_demo(const char *model);

/* `model` NULL: still loading. `url`: where the server is reached, without a slash at the end. Never holds text of a request. */
void page_write(struct buf *out, const char *model, const char *url);

#endif
