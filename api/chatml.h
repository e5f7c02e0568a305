/* api/chatml.h: from messages to the exact prompt text the model was trained on (spec/tokenizer-and-template.md section 7).
 *
 * Three generations of the Qwen template are built in and chosen by recognising the file's own template; the fixed words around a tool list are
 * taken from that template. The renderer marks which bytes are the template's own ("trusted"): only there may control tokens appear. */
#ifndef BEDSIDE_API_CHATML_H
#define BEDSIDE_API_CHATML_H

#include "api/api_error.h"
#include "api/chat_request.h"
#include "base/buf.h"
#include "base/error.h"
#include "engine/tokenizer.h"

enum chat_family { CHAT_QWEN3, CHAT_QWEN35, CHAT_QWEN36 };

struct chat_template {
    enum chat_family family;
    bool recognised;        /* the source was of a known family; otherwise `family` is a guess from the architecture */
    struct buf tools_intro; /* from "# Tools" to the newline after <tools> */
    struct buf tools_outro; /* from </tools> to the end of the instructions */
};

/* `source` is tokenizer.chat_template ("" when absent); `arch` is general.architecture, used when the source says nothing. */
int chat_template_open(struct chat_template *t, const char *source, size_t len, const char *arch, struct error *err);
void chat_template_close(struct chat_template *t);
const char *chat_family_name(enum chat_family family); /* "qwen3", "qwen3.5", "qwen3.6" */

struct prompt {
    struct buf text;
    struct text_range *trusted; /* ascending, disjoint; see tokenizer_encode */
    size_t n_trusted, cap_trusted;
    bool in_reasoning; /* the answer starts inside <think> */
    bool may_reason;   /* the answer may open a <think> block by itself (Qwen3) */
};

/* Renders the request's messages, tools and thinking mode. When the last message is the assistant's, its text is left open and the answer
 * continues it; when the request only warms the cache, all messages are closed and nothing is asked. 0, or -1 with a 400 that names the message (e.g. a system message that is not first, no user message). */
int chat_template_render(const struct chat_template *t, const struct chat_request *r, struct prompt *out, struct api_error *err);
void prompt_free(struct prompt *p);

#endif
