/* api/answer.h: from tokens to the text a client sees, as it grows.
 *
 * UTF-8 is never cut, control tokens are dropped, reasoning is split from content, and text that may be the start of a stop string is held
 * back until it is decided. What was handed out never has to be taken back. */
#ifndef BEDSIDE_API_ANSWER_H
#define BEDSIDE_API_ANSWER_H

#include <stdbool.h>
#include <stddef.h>

#include "api/chat_request.h"
#include "base/buf.h"
#include "engine/tokenizer.h"

struct answer;

struct answer_options {
    const struct text *stop; /* [n_stop], copied */
    size_t n_stop;
    bool in_reasoning; /* see struct prompt */
    bool may_reason;
};

struct answer *answer_new(const struct answer_options *options); /* NULL: out of memory */
void answer_free(struct answer *a);

/* Adds a token. New visible text is appended to *reasoning and *content. Stop strings are looked for in content only. Returns true when a stop
 * string was completed: the answer is over, and nothing from the stop string on was handed out. */
bool answer_add(struct answer *a, enum token_kind kind, const char *bytes, size_t len, struct buf *reasoning, struct buf *content);

/* No more tokens: hands out what was held back. */
void answer_end(struct answer *a, struct buf *reasoning, struct buf *content);

/* True while what comes next belongs to the reasoning: ask before answer_add to count reasoning tokens. */
bool answer_in_reasoning(const struct answer *a);

bool answer_out_of_memory(const struct answer *a);

#endif
