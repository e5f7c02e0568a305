/* server/cache_api.h: what a client may ask of the prefix cache itself: GET /v1/cache and DELETE /v1/cache/{namespace}. */
#ifndef BEDSIDE_SERVER_CACHE_API_H
#define BEDSIDE_SERVER_CACHE_API_H

#include "api/api_error.h"
#include "base/buf.h"
#include "server/chat.h"

/* Appends a JSON list of all namespaces: what they hold in memory and on disk, hits, and how long ago they were used. 0, or -1 with a 503. */
int cache_api_list(const struct chat_service *s, struct buf *out, struct api_error *err);

/* Forgets a namespace ("": of requests that name none) in memory and removes its files; appends what was removed. Nothing there is no error: the
 * client wanted it gone. 0; or -1 with a 400 (not a name) or a 5xx (something could not be removed; asking again goes on with the rest). */
int cache_api_delete(const struct chat_service *s, const char *ns, struct buf *out, struct api_error *err);

#endif
