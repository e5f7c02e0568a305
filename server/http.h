/* server/http.h: the front end: sockets, routes, limits, and who may come in.
 *
 * libmicrohttpd runs one thread per connection, so that a thread may sleep until its answer grows and no connection is ever suspended:
 * libmicrohttpd before 1.0.5 can pass over connections for ever when others are suspended, and that cannot reach a program that suspends none. A
 * thread costs a small stack; --max-connections bounds their number. */
#ifndef BEDSIDE_SERVER_HTTP_H
#define BEDSIDE_SERVER_HTTP_H

#include <stdbool.h>

#include "base/error.h"
#include "config/config.h"
#include "server/chat.h"

struct http_listener {
    int fd;
    int port; /* the one bound, also when 0 was asked for */
    bool ipv6;
    bool loopback; /* nothing outside this machine can reach it */
    char url[160]; /* "http://127.0.0.1:8080" */
};

struct http_server;

/* Binds and listens. The error line names host, port and remedy. */
int http_listen(struct http_listener *out, const char *host, int port, struct error *err);

/* Starts to answer: /health says "loading" and chats get a 503 until http_set_service. Takes over the listener's socket. `config` must outlive it. */
int http_start(struct http_server **out, const struct http_listener *listener, const struct config *config, struct error *err);
void http_set_service(struct http_server *h, const struct chat_service *service);

/* From now on /health says "draining" (503) and each reply ends its connection. Chats are refused by the scheduler. */
void http_set_draining(struct http_server *h);

/* Chats whose reply is not yet sent, and an eventfd that becomes readable each time that number falls to 0. */
int http_active(const struct http_server *h);
int http_idle_fd(const struct http_server *h);

/* Breaks all connections and waits for their threads; then no job is held by a connection any more. h may be NULL. */
void http_stop(struct http_server *h);

#endif
