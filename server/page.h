/* server/page.h: the page at /: one paragraph that says what runs here. */
#ifndef BEDSIDE_SERVER_PAGE_H
#define BEDSIDE_SERVER_PAGE_H

#include "base/buf.h"

/* `model` NULL: still loading. `url`: where the server is reached, without a slash at the end. Never holds text of a request. */
void page_write(struct buf *out, const char *model, const char *url);

#endif
