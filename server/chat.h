/* server/chat.h: one answer, from the body of POST /v1/chat/completions to the bytes of its reply. Knows nothing of HTTP but the status.
 *
 * chat_start runs on the connection's thread: parse, render, tokenise, check lengths, submit. Tokens then arrive on the scheduler's thread, become
 * text, and go through an outbox back to the connection's thread, which writes them to the client. */
#ifndef BEDSIDE_SERVER_CHAT_H
#define BEDSIDE_SERVER_CHAT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "api/api_error.h"
#include "api/chat_request.h"
#include "api/chatml.h"
#include "api/reply.h"
#include "config/config.h"
#include "engine/engine.h"
#include "server/outbox.h"
#include "server/scheduler.h"

/* What all requests share; immutable. */
struct chat_service {
    const struct engine_info *info;
    const struct tokenizer *tokenizer;
    struct scheduler *scheduler;
    struct chat_template chat_template;
    struct chat_defaults defaults;
    int default_max_tokens;  /* 0 = to the end of the context */
    const char *model;       /* the name in replies: the alias, or the file's own name */
    char *file_stem;         /* the file's name without folder and .gguf: also accepted */
    int64_t started;         /* Unix seconds */
    struct cache_disk *disk; /* the prefix cache's files, or NULL; borrowed */
    bool deterministic;      /* a request without a seed gets a fixed one */
};

/* The engine must outlive the service; the scheduler owns the engine (see scheduler.h). */
int chat_service_open(struct chat_service *s, const struct engine *e, struct scheduler *scheduler, const struct config *c, struct error *err);
void chat_service_close(struct chat_service *s);

/* Sampling where the request is silent: the setting, else the model file's, else OpenAI's (temperature 1, top_p 1). */
struct chat_defaults chat_defaults_of(const struct config *c, const struct engine_info *info, const struct tokenizer *t);

/* Whether a client that asks for `name` means the served model: the alias, the file's own name or the file's stem. */
bool chat_serves_model(const struct chat_service *s, const char *name, size_t len);

struct chat;

/* A request as it came. */
struct chat_input {
    const char *body; /* [len] */
    size_t len;
    const char *ns; /* the X-Cache-Namespace header, or NULL; the body's cache_namespace says the same thing */
    bool warm;      /* POST /v1/cache/warm: read the messages into the cache and answer nothing; never a stream */
};

/* Takes a request up to the point where the model's work begins. 0 and *out, or -1 with err:
 *   400 malformed, refused field, prompt too long (context_length_exceeded, both counts), too large for the KV memory
 *   404 another model than the one served
 *   429 the queue is full; 503 shutting down, or out of memory */
int chat_start(const struct chat_service *s, const struct chat_input *in, struct chat **out, struct api_error *err);

bool chat_streams(const struct chat *c);

/* The reply's bytes: server-sent events as they come, or one JSON document just before the end. The connection's thread reads here. */
struct outbox *chat_outbox(struct chat *c);

/* How long the connection may be silent before chat_heartbeat: shorter while a client watches its prompt being read. */
int chat_heartbeat_ms(const struct chat *c);

/* Puts a comment line (": reading prompt 128/6000 tokens") into the stream's outbox, so that neither the client nor anything between thinks the
 * connection dead; and a progress event where the request asked for them. */
void chat_heartbeat(struct chat *c);

/* HTTP status of a reply that is not a stream; valid once the outbox is at its end. */
int chat_status(struct chat *c);

/* Gives up what still runs, and drops the connection's hold. *usage is what was done so far. */
void chat_finish(struct chat *c, struct usage *usage);

#endif
