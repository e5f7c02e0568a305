/* api/reply.h: replies on the wire: chat.completion, chat.completion.chunk, the model list (OpenAI's shapes). */
#ifndef BEDSIDE_API_REPLY_H
#define BEDSIDE_API_REPLY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "engine/sampler.h"
#include "engine/tokenizer.h"

struct reply_head {  /* the same in every chunk of an answer */
    char id[48];     /* "chatcmpl-..." */
    int64_t created; /* Unix seconds */
    const char *model;
};

struct usage {
    int prompt_tokens, completion_tokens, reasoning_tokens, cached_tokens;
};

/* Where the time went, for `timings` of a reply. */
struct timings {
    double queue_ms;    /* waiting for a place */
    double prefill_ms;  /* reading the prompt, to the first token */
    double decode_ms;   /* writing, from there to the end */
    int prefill_tokens; /* prompt tokens computed; with cached_tokens the whole prompt */
    int decode_tokens;  /* tokens written after the first */
    int cached_tokens;
    const char *cache_source; /* "memory", "disk" or "none" */
    const char *cache_miss;   /* why no more was cached; NULL = all that could be was */
    int cache_miss_at;        /* the token where the cached text ended or differed; -1 = none */
    int pauses;               /* how often the answer waited for an older one's memory */
};

/* How much of a prompt was read. */
struct progress {
    int total, cached, done; /* tokens; done includes cached */
    double elapsed_ms;
};

enum finish_reason { FINISH_NONE, FINISH_STOP, FINISH_LENGTH, FINISH_TOOL_CALLS };

/* One token's entry of choices[0].logprobs.content; appended to `list` as a JSON array element (comma included when needed). */
void reply_logprob(struct buf *list, const struct tokenizer *t, const struct pick *pick);

/* Server-sent events, each "data: {...}\n\n". `logprobs` is a list made by reply_logprob, or NULL. */
void reply_chunk_role(struct buf *out, const struct reply_head *head);
void reply_chunk_delta(struct buf *out, const struct reply_head *head, const struct buf *reasoning, const struct buf *content,
                       const struct buf *logprobs);
void reply_chunk_progress(struct buf *out, const struct reply_head *head, const struct progress *progress);
/* timings: NULL = none. */
void reply_chunk_finish(struct buf *out, const struct reply_head *head, enum finish_reason reason, const struct timings *timings);
void reply_chunk_usage(struct buf *out, const struct reply_head *head, const struct usage *usage);
void reply_chunk_error(struct buf *out, const char *message); /* an error after the headers went out */
void reply_chunk_done(struct buf *out);                       /* data: [DONE] */

/* The one JSON reply. */
void reply_whole(struct buf *out, const struct reply_head *head, const struct buf *reasoning, const struct buf *content, const struct buf *logprobs,
                 enum finish_reason reason, const struct usage *usage, const struct timings *timings);

/* POST /v1/cache/warm: what was read. ns "" = the default namespace. */
void reply_warm(struct buf *out, const char *ns, const struct usage *usage, const struct timings *timings);

/* GET /v1/models: one entry. */
void reply_models(struct buf *out, const char *model, int64_t created, int context);

/* Appends text as a JSON string with its quotes. Invalid UTF-8 becomes U+FFFD. */
void reply_json_string(struct buf *out, const char *text, size_t len);

#endif
