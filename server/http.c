#include "server/http.h"

#include <arpa/inet.h>
#include <errno.h>
#include <limits.h>
#include <microhttpd.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "server/cache_api.h"
#include "server/guard.h"
#include "server/metrics.h"
#include "server/page.h"

enum {
    SPARE_CONNECTIONS = 16,       /* beyond --max-connections: enough to tell them so */
    CONNECTION_STACK = 1 << 20,   /* bytes, of which only what is used takes memory; JSON of the deepest nesting allowed fits */
    CONNECTION_MEMORY = 32 << 10, /* bytes for headers and one write; longer headers get a 431 from libmicrohttpd */
    SEND_BUFFER = 64 << 10,       /* bytes the kernel holds for a client: a client that stops reading is noticed soon */
    DISCARD_LIMIT = 64 << 20,     /* bytes of a refused body that are read and dropped so that its sender sees the reply */
    RETRY_AFTER_S = 5,            /* where nothing better is known */
};

struct http_server {
    const struct config *config;
    struct http_listener listener;
    struct MHD_Daemon *daemon;
    _Atomic(const struct chat_service *) service; /* NULL: loading */
    atomic_bool draining;
    atomic_int n_connections, n_active;
    int idle_fd;
};

enum route { ROUTE_NONE, ROUTE_PAGE, ROUTE_HEALTH, ROUTE_METRICS, ROUTE_MODELS, ROUTE_MODEL, ROUTE_CHAT, ROUTE_CACHE, ROUTE_NAMESPACE, ROUTE_WARM };

static const struct {
    const char *path;    /* for logs and messages */
    const char *methods; /* Allow */
} routes[] = {
    [ROUTE_NONE] = {"(no such path)", "GET, HEAD, POST, DELETE, OPTIONS"},
    [ROUTE_PAGE] = {"/", "GET, HEAD, OPTIONS"},
    [ROUTE_HEALTH] = {"/health", "GET, HEAD, OPTIONS"},
    [ROUTE_METRICS] = {"/metrics", "GET, HEAD, OPTIONS"},
    [ROUTE_MODELS] = {"/v1/models", "GET, HEAD, OPTIONS"},
    [ROUTE_MODEL] = {"/v1/models/{model}", "GET, HEAD, OPTIONS"},
    [ROUTE_CHAT] = {"/v1/chat/completions", "POST, OPTIONS"},
    [ROUTE_CACHE] = {"/v1/cache", "GET, HEAD, DELETE, OPTIONS"},
    [ROUTE_NAMESPACE] = {"/v1/cache/{namespace}", "DELETE, OPTIONS"},
    [ROUTE_WARM] = {"/v1/cache/warm", "POST, DELETE, OPTIONS"},
};

enum method { METHOD_OTHER, METHOD_GET, METHOD_HEAD, METHOD_POST, METHOD_DELETE, METHOD_OPTIONS };

/* One request, from its headers to its last byte; its connection's thread alone uses it. */
struct request {
    struct http_server *server;
    struct MHD_Connection *connection;
    uint64_t began; /* clock_ns */
    enum route route;
    enum method method;
    const char *name; /* ROUTE_MODEL, ROUTE_NAMESPACE: the last part of the URL, valid while the request lives */
    bool refused;
    bool close;             /* the connection ends with this reply */
    struct api_error error; /* why it was refused */
    struct buf body;
    size_t discarded;
    struct chat *chat;
    int status; /* of the reply; 0 while there is none */
};

/* ---- replies ---- */

static const char *header(struct request *r, const char *name)
{
    return MHD_lookup_connection_value(r->connection, MHD_HEADER_KIND, name);
}

static bool has_key(const struct http_server *h)
{
    return h->config->api_key && h->config->api_key[0];
}

/* Adds what every reply has, queues it and lets go of it. */
static enum MHD_Result send_response(struct request *r, int status, const char *type, struct MHD_Response *response)
{
    if (!response)
        return MHD_NO;
    if (type)
        MHD_add_response_header(response, "Content-Type", type);
    MHD_add_response_header(response, "Cache-Control", "no-store");
    MHD_add_response_header(response, "X-Content-Type-Options", "nosniff");
    MHD_add_response_header(response, "Vary", "Origin");
    const char *origin = header(r, "Origin");
    if (origin && (has_key(r->server) || guard_origin_is_local(origin, r->server->config->host)))
        MHD_add_response_header(response, "Access-Control-Allow-Origin", origin);
    if (status == 405 || r->method == METHOD_OPTIONS)
        MHD_add_response_header(response, "Allow", routes[r->route].methods);
    if (status == 401)
        MHD_add_response_header(response, "WWW-Authenticate", "Bearer");
    if (status == 429 || status == 503) {
        char seconds[16];
        const struct chat_service *s = atomic_load(&r->server->service);
        snprintf(seconds, sizeof seconds, "%d", status == 429 && s ? scheduler_stats(s->scheduler).retry_after_s : RETRY_AFTER_S);
        MHD_add_response_header(response, "Retry-After", seconds);
    }
    if (r->close || atomic_load(&r->server->draining))
        MHD_add_response_header(response, "Connection", "close");
    r->status = status;
    enum MHD_Result ok = MHD_queue_response(r->connection, (unsigned)status, response);
    MHD_destroy_response(response);
    return ok;
}

/* Sends *b and frees it. */
static enum MHD_Result send_buf(struct request *r, int status, const char *type, struct buf *b)
{
    if (b->failed) {
        buf_free(b);
        return MHD_NO;
    }
    /* An empty buf has no data, and libmicrohttpd wants a pointer all the same. */
    struct MHD_Response *response = b->data ? MHD_create_response_from_buffer(b->len, b->data, MHD_RESPMEM_MUST_FREE)
                                            : MHD_create_response_from_buffer(0, "", MHD_RESPMEM_PERSISTENT);
    if (response)
        *b = (struct buf)BUF_INIT;
    else
        buf_free(b);
    return send_response(r, status, type, response);
}

static enum MHD_Result send_error(struct request *r, const struct api_error *error)
{
    struct buf b = BUF_INIT;
    api_error_write(error, &b);
    return send_buf(r, error->status, "application/json", &b);
}

/* ---- who may come in ---- */

/* Counts a header, for those that must not come twice, and looks at how it is written. */
struct header_count {
    int content_length, transfer_encoding, host, cache_namespace;
    bool malformed; /* a control character anywhere, or a space in a name, as in "Content-Length : 5": others may read another header there */
};

/* Whether no byte is a control character, nor, in a name, a blank. */
static bool is_header_text(const char *text, size_t len, bool name)
{
    for (size_t i = 0; i < len; i++) {
        const unsigned char c = (unsigned char)text[i];
        if (c == ' ' || c == '\t' ? name : c < 0x20 || c == 0x7F)
            return false;
    }
    return true;
}

static enum MHD_Result count_header(void *cls, enum MHD_ValueKind kind, const char *key, size_t key_len, const char *value, size_t value_len)
{
    struct header_count *n = cls;
    (void)kind;
    n->malformed = n->malformed || !is_header_text(key, key_len, true) || (value && !is_header_text(value, value_len, false));
    n->content_length += strcasecmp(key, "Content-Length") == 0;
    n->transfer_encoding += strcasecmp(key, "Transfer-Encoding") == 0;
    n->host += strcasecmp(key, "Host") == 0;
    n->cache_namespace += strcasecmp(key, "X-Cache-Namespace") == 0;
    return MHD_YES;
}

/* "application/json", with or without parameters. */
static bool is_json_type(const char *type)
{
    static const char json[] = "application/json";
    return type && strncasecmp(type, json, sizeof json - 1) == 0 && (type[sizeof json - 1] == '\0' || strchr("; \t", type[sizeof json - 1]));
}

static int check_body_headers(struct request *r)
{
    struct api_error *err = &r->error;
    const char *encoding = header(r, "Content-Encoding"), *length = header(r, "Content-Length");
    if (!is_json_type(header(r, "Content-Type")))
        return api_error_set(err, 415, NULL, NULL, "the body must be JSON: send Content-Type: application/json");
    if (encoding && strcasecmp(encoding, "identity") != 0)
        return api_error_set(err, 415, NULL, NULL, "a compressed body is not read: send it without Content-Encoding");
    const unsigned long long max = (unsigned long long)r->server->config->max_body * 1024, n = length ? strtoull(length, NULL, 10) : 0;
    if (n > max) {
        r->close = n > DISCARD_LIMIT; /* too long to be heard out: told at once */
        return api_error_set(err, 413, NULL, NULL, "the body has %s bytes; at most %llu are taken (--max-body)", length, max);
    }
    return 0;
}

/* The namespace that the path of a cache request names. */
static const char *path_namespace(const struct request *r)
{
    return r->route == ROUTE_WARM ? "warm" : r->route == ROUTE_NAMESPACE ? r->name : "";
}

/* Only the path says what is deleted; whoever seems to say it in another way may mean another namespace. */
static int check_delete(struct request *r)
{
    const char *ns = header(r, "X-Cache-Namespace");
    if (MHD_get_connection_values(r->connection, MHD_GET_ARGUMENT_KIND, NULL, NULL) > 0)
        return api_error_set(&r->error, 400, NULL, NULL, "DELETE takes no query: name the namespace in the path, DELETE /v1/cache/{namespace}");
    if (ns && strcmp(ns, path_namespace(r)) != 0)
        return api_error_set(&r->error, 400, "invalid_value", "X-Cache-Namespace",
                             "the X-Cache-Namespace header and the path name two namespaces: send DELETE /v1/cache/{namespace} without the header");
    return 0;
}

static bool takes_method(const struct request *r)
{
    switch (r->route) {
    case ROUTE_CHAT:
        return r->method == METHOD_POST;
    case ROUTE_WARM: /* "warm" may be the name of a namespace too */
        return r->method == METHOD_POST || r->method == METHOD_DELETE;
    case ROUTE_NAMESPACE:
        return r->method == METHOD_DELETE;
    case ROUTE_CACHE:
        return r->method == METHOD_GET || r->method == METHOD_HEAD || r->method == METHOD_DELETE;
    default:
        return r->method == METHOD_GET || r->method == METHOD_HEAD;
    }
}

/* Looks at everything but the body. 0, or -1 with r->error (and r->close where the connection cannot go on). */
static int check_request(struct request *r)
{
    struct http_server *h = r->server;
    struct api_error *err = &r->error;
    const char *host = header(r, "Host"), *origin = header(r, "Origin"), *transfer = header(r, "Transfer-Encoding");

    /* Two lengths for one body, or a length that only one side sees, are how requests are smuggled past a proxy, and older libmicrohttpd lets them
     * through. */
    struct header_count count = {0};
    MHD_get_connection_values_n(r->connection, MHD_HEADER_KIND, count_header, &count);
    if (count.malformed) {
        r->close = true;
        return api_error_set(err, 400, NULL, NULL, "a header has a space in its name, or a control character");
    }
    if (count.content_length > 1 || count.transfer_encoding > 1 || count.host > 1 || (count.content_length && count.transfer_encoding)) {
        r->close = true;
        return api_error_set(err, 400, NULL, NULL, "Content-Length, Transfer-Encoding or Host is given twice, or both of the first two are");
    }
    if (transfer && strcasecmp(transfer, "chunked") != 0) {
        r->close = true;
        return api_error_set(err, 501, NULL, NULL, "of transfer encodings only \"chunked\" is read: send the body with Content-Length");
    }
    if (atomic_load(&h->n_connections) > h->config->max_connections) {
        r->close = true;
        return api_error_set(err, 503, "too_many_connections", NULL,
                             "the server has all the connections it takes (--max-connections %lld): try again later",
                             (long long)h->config->max_connections);
    }
    if (h->listener.loopback && host && !guard_host_is_local(host, h->config->host))
        return api_error_set(err, 403, NULL, NULL, "the Host header names another machine; use %s", h->listener.url);
    if (origin && !has_key(h) && !guard_origin_is_local(origin, h->config->host))
        return api_error_set(err, 403, NULL, NULL, "pages of other origins may not use this server unless it has a key (--api-key)");
    if (r->method == METHOD_OPTIONS)
        return 0;
    if (has_key(h) && r->route != ROUTE_HEALTH && r->route != ROUTE_PAGE && !guard_key_matches(header(r, "Authorization"), h->config->api_key))
        return api_error_set(err, 401, "invalid_api_key", NULL, "this server wants its key: send Authorization: Bearer KEY");
    if (r->route == ROUTE_NONE)
        return api_error_set(err, 404, "not_found", NULL,
                             "no such path here; there are POST /v1/chat/completions, POST /v1/cache/warm, GET and DELETE /v1/cache, "
                             "DELETE /v1/cache/{namespace}, GET /v1/models, GET /v1/models/{model}, GET /health, GET /metrics and GET /");
    if (!takes_method(r))
        return api_error_set(err, 405, "method_not_allowed", NULL, "%s takes %s", routes[r->route].path, routes[r->route].methods);
    if (count.cache_namespace > 1)
        return api_error_set(err, 400, "invalid_value", "X-Cache-Namespace", "the X-Cache-Namespace header is given twice; send one of them");
    if (r->method == METHOD_DELETE)
        return check_delete(r);
    return r->method == METHOD_POST ? check_body_headers(r) : 0;
}

/* ---- routes ---- */

static enum MHD_Result answer_options(struct request *r)
{
    struct MHD_Response *response = MHD_create_response_from_buffer(0, "", MHD_RESPMEM_PERSISTENT);
    const char *wanted = header(r, "Access-Control-Request-Headers");
    if (response && header(r, "Origin")) { /* the origin was checked */
        MHD_add_response_header(response, "Access-Control-Allow-Methods", routes[r->route].methods);
        MHD_add_response_header(response, "Access-Control-Max-Age", "600");
        if (wanted)
            MHD_add_response_header(response, "Access-Control-Allow-Headers", wanted);
    }
    return send_response(r, 204, NULL, response);
}

static enum MHD_Result answer_page(struct request *r, const struct chat_service *s)
{
    struct buf b = BUF_INIT;
    page_write(&b, s ? s->info->model_name : NULL, r->server->listener.url);
    return send_buf(r, 200, "text/html; charset=utf-8", &b);
}

static enum MHD_Result answer_health(struct request *r, const struct chat_service *s)
{
    struct http_server *h = r->server;
    const bool draining = atomic_load(&h->draining);
    struct buf b = BUF_INIT;
    if (!s) {
        buf_puts(&b, draining ? "{\"status\":\"draining\"}\n" : "{\"status\":\"loading\"}\n");
        return send_buf(r, 503, "application/json", &b);
    }
    const struct scheduler_stats n = scheduler_stats(s->scheduler);
    buf_printf(&b, "{\"status\":\"%s\",\"model\":", draining ? "draining" : "ok");
    reply_json_string(&b, s->model, strlen(s->model));
    buf_printf(&b, ",\"running\":%d,\"queued\":%d,\"kv_pages_used\":%d,\"kv_pages_total\":%d,\"connections\":%d}\n", n.running, n.queued,
               n.pages_used, n.pages_total, atomic_load(&h->n_connections));
    return send_buf(r, draining ? 503 : 200, "application/json", &b);
}

static enum MHD_Result send_loading(struct request *r)
{
    api_error_set(&r->error, 503, "loading", NULL, "the model is still being loaded: try again later");
    return send_error(r, &r->error);
}

static enum MHD_Result answer_models(struct request *r, const struct chat_service *s)
{
    if (!s)
        return send_loading(r);
    struct buf b = BUF_INIT;
    if (r->route == ROUTE_MODELS) {
        reply_models(&b, s->model, s->started, s->info->context);
        return send_buf(r, 200, "application/json", &b);
    }
    if (!chat_serves_model(s, r->name, strlen(r->name))) {
        api_error_set(&r->error, 404, "model_not_found", "model", "this server has no model of that name; it serves \"%s\"", s->model);
        return send_error(r, &r->error);
    }
    buf_puts(&b, "{\"id\":");
    reply_json_string(&b, s->model, strlen(s->model));
    buf_printf(&b, ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"bedside\",\"context_length\":%d}\n", (long long)s->started,
               s->info->context);
    return send_buf(r, 200, "application/json", &b);
}

static enum MHD_Result answer_metrics(struct request *r, const struct chat_service *s)
{
    if (!s)
        return send_loading(r);
    struct buf b = BUF_INIT;
    metrics_write(&b, s, atomic_load(&r->server->n_connections));
    return send_buf(r, 200, "text/plain; version=0.0.4; charset=utf-8", &b);
}

static enum MHD_Result answer_cache(struct request *r, const struct chat_service *s)
{
    if (!s)
        return send_loading(r);
    struct buf b = BUF_INIT;
    int rc = r->method == METHOD_DELETE ? cache_api_delete(s, path_namespace(r), &b, &r->error) : cache_api_list(s, &b, &r->error);
    if (rc == 0)
        return send_buf(r, 200, "application/json", &b);
    buf_free(&b);
    return send_error(r, &r->error);
}

/* Sleeps until there is something to send or nobody to send it to. libmicrohttpd's clock for idle connections is stopped meanwhile: a client that
 * waits for us is not idle. Setting it again starts it anew, so that it measures only how long the client takes to read. */
static enum outbox_state wait_for_answer(struct request *r, int timeout_ms)
{
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(r->connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    MHD_set_connection_option(r->connection, MHD_CONNECTION_OPTION_TIMEOUT, 0u);
    enum outbox_state state = outbox_wait(chat_outbox(r->chat), info ? info->connect_fd : -1, timeout_ms);
    MHD_set_connection_option(r->connection, MHD_CONNECTION_OPTION_TIMEOUT, (unsigned)r->server->config->idle_timeout);
    return state;
}

/* MHD_ContentReaderCallback of a stream. Blocks; see http.h for why it may. */
static ssize_t read_stream(void *cls, uint64_t pos, char *dst, size_t max)
{
    struct request *r = cls;
    (void)pos;
    for (;;) {
        switch (wait_for_answer(r, chat_heartbeat_ms(r->chat))) {
        case OUTBOX_READY:
            return (ssize_t)outbox_take(chat_outbox(r->chat), dst, max);
        case OUTBOX_END:
            return MHD_CONTENT_READER_END_OF_STREAM;
        case OUTBOX_TIMEOUT:
            chat_heartbeat(r->chat);
            break;
        case OUTBOX_GONE:
            r->status = 499;
            return MHD_CONTENT_READER_END_WITH_ERROR;
        }
    }
}

/* Waits for a reply in one piece and sends it. */
static enum MHD_Result send_whole(struct request *r)
{
    for (;;) {
        enum outbox_state state = wait_for_answer(r, INT_MAX);
        if (state == OUTBOX_GONE) {
            r->status = 499;
            return MHD_NO;
        }
        if (state != OUTBOX_TIMEOUT)
            break;
    }
    struct buf b = BUF_INIT;
    char piece[4096];
    for (;;) { /* the writer closes just after the one reply */
        enum outbox_state state = outbox_wait(chat_outbox(r->chat), -1, INT_MAX);
        if (state != OUTBOX_READY)
            break;
        buf_add(&b, piece, outbox_take(chat_outbox(r->chat), piece, sizeof piece));
    }
    const int status = chat_status(r->chat);
    if (b.failed || b.len == 0) {
        buf_free(&b);
        api_error_set(&r->error, status >= 500 ? status : 503, NULL, NULL, "the server ran out of memory for this reply; try again later");
        return send_error(r, &r->error);
    }
    return send_buf(r, status, "application/json", &b);
}

static enum MHD_Result answer_chat(struct request *r, const struct chat_service *s)
{
    if (!s)
        return send_loading(r);
    if (r->body.failed) {
        api_error_set(&r->error, 503, NULL, NULL, "the server is out of memory; try again later");
        return send_error(r, &r->error);
    }
    atomic_fetch_add(&r->server->n_active, 1);
    const struct chat_input in = {
        .body = r->body.data ? r->body.data : "",
        .len = r->body.len,
        .ns = header(r, "X-Cache-Namespace"),
        .warm = r->route == ROUTE_WARM,
    };
    if (chat_start(s, &in, &r->chat, &r->error)) {
        if (atomic_fetch_sub(&r->server->n_active, 1) == 1)
            eventfd_write(r->server->idle_fd, 1);
        return send_error(r, &r->error);
    }
    buf_free(&r->body); /* the prompt is in tokens now; not kept while it is answered */
    if (!chat_streams(r->chat))
        return send_whole(r);
    struct MHD_Response *response = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 4096, read_stream, r, NULL);
    if (response)
        MHD_add_response_header(response, "X-Accel-Buffering", "no");
    return send_response(r, 200, "text/event-stream; charset=utf-8", response);
}

static enum MHD_Result answer(struct request *r)
{
    if (r->refused)
        return send_error(r, &r->error);
    if (r->method == METHOD_OPTIONS)
        return answer_options(r);
    const struct chat_service *s = atomic_load(&r->server->service);
    switch (r->route) {
    case ROUTE_PAGE:
        return answer_page(r, s);
    case ROUTE_HEALTH:
        return answer_health(r, s);
    case ROUTE_MODELS:
    case ROUTE_MODEL:
        return answer_models(r, s);
    case ROUTE_METRICS:
        return answer_metrics(r, s);
    case ROUTE_CHAT:
        return answer_chat(r, s);
    case ROUTE_WARM:
        return r->method == METHOD_POST ? answer_chat(r, s) : answer_cache(r, s);
    case ROUTE_CACHE:
    case ROUTE_NAMESPACE:
        return answer_cache(r, s);
    case ROUTE_NONE:
        break;
    }
    return MHD_NO; /* check_request refuses unknown paths */
}

/* ---- libmicrohttpd's callbacks ---- */

/* What follows `start` in the URL, or NULL when it is another URL or nothing follows. */
static const char *after(const char *url, const char *start)
{
    const size_t n = strlen(start);
    return strncmp(url, start, n) == 0 && url[n] ? url + n : NULL;
}

static enum route route_of(const char *url, const char **name)
{
    for (int i = ROUTE_PAGE; i <= ROUTE_WARM; i++) {
        if (strcmp(url, routes[i].path) == 0)
            return (enum route)i;
    }
    if ((*name = after(url, "/v1/models/")) != NULL)
        return ROUTE_MODEL;
    if ((*name = after(url, "/v1/cache/")) != NULL)
        return ROUTE_NAMESPACE;
    return ROUTE_NONE;
}

static enum method method_of(const char *name)
{
    static const char *const names[] = {
        [METHOD_GET] = "GET", [METHOD_HEAD] = "HEAD", [METHOD_POST] = "POST", [METHOD_DELETE] = "DELETE", [METHOD_OPTIONS] = "OPTIONS"};
    for (int i = METHOD_GET; i <= METHOD_OPTIONS; i++) {
        if (strcmp(name, names[i]) == 0)
            return (enum method)i;
    }
    return METHOD_OTHER;
}

/* A piece of the body. Of a refused request it is dropped: a client that is still sending would not read the reply, and closing on unread bytes
 * would destroy it. */
static enum MHD_Result take_body(struct request *r, const char *data, size_t n)
{
    const size_t max = (size_t)r->server->config->max_body * 1024;
    if (!r->refused && n > max - r->body.len) {
        r->refused = true;
        buf_free(&r->body);
        api_error_set(&r->error, 413, NULL, NULL, "the body has more than the %zu bytes that are taken (--max-body)", max);
    }
    if (!r->refused) {
        buf_add(&r->body, data, n);
        return MHD_YES;
    }
    r->discarded += n;
    return r->discarded <= DISCARD_LIMIT ? MHD_YES : MHD_NO;
}

static enum MHD_Result on_request(void *cls, struct MHD_Connection *connection, const char *url, const char *method, const char *version,
                                  const char *upload_data, size_t *upload_data_size, void **con_cls)
{
    struct request *r = *con_cls;
    (void)version;
    if (!r) {
        r = alloc_array(1, sizeof *r);
        if (!r)
            return MHD_NO;
        *con_cls = r;
        r->server = cls;
        r->connection = connection;
        r->began = clock_ns();
        r->route = route_of(url, &r->name);
        r->method = method_of(method);
        r->refused = check_request(r) != 0;
        /* A client that asked first (Expect: 100-continue) is told no before it sends; everybody else is heard out. */
        const char *expect = header(r, "Expect");
        if (r->refused && (r->close || (expect && strcasecmp(expect, "100-continue") == 0)))
            return answer(r);
        return MHD_YES;
    }
    if (*upload_data_size) {
        enum MHD_Result ok = take_body(r, upload_data, *upload_data_size);
        *upload_data_size = 0;
        return ok;
    }
    return answer(r);
}

/* One line per request: what, how it went, how much, how long. Never a word of what was said, and no path that a client made up. */
static void log_request(const struct request *r, const struct usage *usage, enum MHD_RequestTerminationCode code)
{
    static const char *const methods[] = {[METHOD_OTHER] = "(other)", [METHOD_GET] = "GET",       [METHOD_HEAD] = "HEAD",
                                          [METHOD_POST] = "POST",     [METHOD_DELETE] = "DELETE", [METHOD_OPTIONS] = "OPTIONS"};
    const double seconds = (double)(clock_ns() - r->began) / 1e9;
    const char *end = code == MHD_REQUEST_TERMINATED_COMPLETED_OK      ? ""
                      : code == MHD_REQUEST_TERMINATED_TIMEOUT_REACHED ? ", the client stopped reading or sending"
                      : code == MHD_REQUEST_TERMINATED_DAEMON_SHUTDOWN ? ", cut off by the shutdown"
                                                                       : ", the client left";
    if (r->chat)
        log_info("%s %s %d, prompt %d tokens, answer %d tokens, %.3f s%s", methods[r->method], routes[r->route].path, r->status, usage->prompt_tokens,
                 usage->completion_tokens, seconds, end);
    else
        log_info("%s %s %d, %.3f s%s", methods[r->method], routes[r->route].path, r->status, seconds, end);
}

static void on_completed(void *cls, struct MHD_Connection *connection, void **con_cls, enum MHD_RequestTerminationCode code)
{
    struct http_server *h = cls;
    struct request *r = *con_cls;
    (void)connection;
    if (!r)
        return;
    *con_cls = NULL;
    struct usage usage = {0};
    const bool active = r->chat != NULL;
    if (active)
        chat_finish(r->chat, &usage);
    log_request(r, &usage, code);
    buf_free(&r->body);
    free(r);
    if (active && atomic_fetch_sub(&h->n_active, 1) == 1)
        eventfd_write(h->idle_fd, 1);
}

static void on_connection(void *cls, struct MHD_Connection *connection, void **socket_context, enum MHD_ConnectionNotificationCode code)
{
    struct http_server *h = cls;
    (void)socket_context;
    if (code == MHD_CONNECTION_NOTIFY_CLOSED) {
        atomic_fetch_sub(&h->n_connections, 1);
        return;
    }
    atomic_fetch_add(&h->n_connections, 1);
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    if (!info)
        return;
    /* None of these matters enough to refuse a client when it fails. */
    int size = SEND_BUFFER, on = 1, idle = 30;
    setsockopt(info->connect_fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
    setsockopt(info->connect_fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on); /* a machine that vanished sends no FIN */
    setsockopt(info->connect_fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
}

/* What libmicrohttpd has to say is about sockets and its own limits; request text can be in it, so the text stays out of the log. */
static void on_mhd_message(void *cls, const char *format, va_list args)
{
    (void)cls;
    (void)args;
    log_debug("libmicrohttpd: %s", format);
}

/* Decodes %XX in a part of a URL, but none that holds %00: the name would end there and be another one. (No name of ours has a '%'.) */
static size_t unescape(void *cls, struct MHD_Connection *connection, char *text)
{
    (void)cls;
    (void)connection;
    return strstr(text, "%00") ? strlen(text) : MHD_http_unescape(text);
}

/* ---- life ---- */

static bool is_loopback(const struct sockaddr *a)
{
    if (a->sa_family == AF_INET) {
        struct sockaddr_in in;
        memcpy(&in, a, sizeof in);
        return ntohl(in.sin_addr.s_addr) >> 24 == 127;
    }
    struct sockaddr_in6 in6;
    memcpy(&in6, a, sizeof in6);
    return IN6_IS_ADDR_LOOPBACK(&in6.sin6_addr);
}

static int bound_port(int fd)
{
    struct sockaddr_storage a;
    socklen_t len = sizeof a;
    if (getsockname(fd, (struct sockaddr *)&a, &len))
        return -1;
    struct sockaddr_in in;
    memcpy(&in, &a, sizeof in); /* the port is at the same place in sockaddr_in6 */
    return ntohs(in.sin_port);
}

int http_listen(struct http_listener *out, const char *host, int port, struct error *err)
{
    char service[16];
    snprintf(service, sizeof service, "%d", port);
    const size_t host_len = strlen(host);
    char name[256];
    if (host_len == 0 || host_len >= sizeof name)
        return error_set(err, "--host is empty or too long");
    /* [::1] is how a URL says it; the resolver wants ::1. */
    const bool brackets = host[0] == '[' && host[host_len - 1] == ']';
    snprintf(name, sizeof name, "%.*s", (int)(brackets ? host_len - 2 : host_len), brackets ? host + 1 : host);

    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV}, *list = NULL;
    int rc = getaddrinfo(name, service, &hints, &list);
    if (rc)
        return error_set(err, "cannot listen on %s: %s (--host)", host, gai_strerror(rc));
    int fd = -1, why = 0;
    const struct addrinfo *a = list;
    for (; a; a = a->ai_next) {
        fd = socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, a->ai_protocol);
        int on = 1;
        if (fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 && bind(fd, a->ai_addr, a->ai_addrlen) == 0 &&
            listen(fd, 511) == 0)
            break;
        why = errno;
        if (fd >= 0)
            close(fd);
        fd = -1;
    }
    if (fd < 0) {
        freeaddrinfo(list);
        return error_set(err, "cannot listen on %s port %d: %s%s", host, port, strerror(why),
                         why == EADDRINUSE ? " (another program has that port; choose one with --port or BEDSIDE_PORT, 0 for any)" : "");
    }
    *out = (struct http_listener){.fd = fd, .port = bound_port(fd), .ipv6 = a->ai_family == AF_INET6, .loopback = is_loopback(a->ai_addr)};
    freeaddrinfo(list);
    const bool literal6 = strchr(name, ':') != NULL;
    snprintf(out->url, sizeof out->url, "http://%s%.120s%s:%d", literal6 ? "[" : "", name, literal6 ? "]" : "", out->port);
    return 0;
}

int http_start(struct http_server **out, const struct http_listener *listener, const struct config *config, struct error *err)
{
    struct http_server *h = alloc_array(1, sizeof *h);
    if (!h) {
        close(listener->fd);
        return error_set(err, "out of memory for the HTTP server");
    }
    h->config = config;
    h->listener = *listener;
    h->idle_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (h->idle_fd < 0) {
        error_set(err, "cannot start the HTTP server: %s", strerror(errno));
        close(listener->fd);
        free(h);
        return -1;
    }
    const unsigned flags = MHD_USE_THREAD_PER_CONNECTION | MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_POLL | MHD_USE_ITC | MHD_USE_ERROR_LOG |
                           (listener->ipv6 ? MHD_USE_IPv6 : 0u);
    h->daemon = MHD_start_daemon(flags, (uint16_t)listener->port, NULL, NULL, on_request, h, /* */
                                 MHD_OPTION_EXTERNAL_LOGGER, on_mhd_message, NULL,           /* first, to catch the others' messages */
                                 MHD_OPTION_LISTEN_SOCKET, listener->fd,                     /* */
                                 MHD_OPTION_CONNECTION_LIMIT, (unsigned)config->max_connections + SPARE_CONNECTIONS, /* */
                                 MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)config->idle_timeout,                      /* */
                                 MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)CONNECTION_MEMORY,                      /* */
                                 MHD_OPTION_THREAD_STACK_SIZE, (size_t)CONNECTION_STACK,                             /* */
                                 MHD_OPTION_STRICT_FOR_CLIENT, 1,                                                    /* */
                                 MHD_OPTION_UNESCAPE_CALLBACK, unescape, NULL,                                       /* */
                                 MHD_OPTION_NOTIFY_COMPLETED, on_completed, h,                                       /* */
                                 MHD_OPTION_NOTIFY_CONNECTION, on_connection, h, MHD_OPTION_END);
    if (!h->daemon) {
        /* The socket is libmicrohttpd's by now, and closed or not; the caller gives up anyway. */
        close(h->idle_fd);
        free(h);
        return error_set(err, "cannot start the HTTP server (out of threads, memory or file descriptors?)");
    }
    *out = h;
    return 0;
}

void http_set_service(struct http_server *h, const struct chat_service *service)
{
    atomic_store(&h->service, service);
}

void http_set_draining(struct http_server *h)
{
    atomic_store(&h->draining, true);
}

int http_active(const struct http_server *h)
{
    return atomic_load(&h->n_active);
}

int http_idle_fd(const struct http_server *h)
{
    return h->idle_fd;
}

void http_stop(struct http_server *h)
{
    if (!h)
        return;
    MHD_stop_daemon(h->daemon);
    close(h->idle_fd);
    free(h);
}
