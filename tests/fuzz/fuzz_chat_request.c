/* Fuzz target: a request body of arbitrary bytes. What parses is rendered in all three template families; the prompt must be valid UTF-8 and its
 * trusted ranges in order and inside the text. The same bytes are also opened as a chat template. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "api/chat_request.h"
#include "api/chatml.h"
#include "engine/utf8.h"

static void must(int condition)
{
    if (!condition)
        abort();
}

static void check_utf8(const char *text, size_t len)
{
    for (size_t at = 0; at < len;) {
        uint32_t code;
        size_t used;
        must(utf8_decode(text + at, len - at, &code, &used) == UTF8_OK);
        at += used;
    }
}

static void check_error(const struct api_error *err)
{
    must(err->status >= 400 && err->status < 600 && err->message[0]);
    struct buf body = BUF_INIT;
    api_error_write(err, &body);
    check_utf8(body.data, body.len);
    buf_free(&body);
}

static void check_prompt(const struct prompt *p)
{
    check_utf8(p->text.data, p->text.len);
    size_t at = 0, control = 0;
    for (size_t i = 0; i < p->n_trusted; i++) {
        must(p->trusted[i].begin >= at && p->trusted[i].end > p->trusted[i].begin && p->trusted[i].end <= p->text.len);
        at = p->trusted[i].end;
        const char *q = p->text.data + p->trusted[i].begin, *end = p->text.data + p->trusted[i].end;
        while ((q = memmem(q, (size_t)(end - q), "<|im_", 5))) {
            q += 5;
            control++;
        }
    }
    must(control > 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const sources[] = {"<|im_start|> preserve_thinking", "<|im_start|> <function= <think> else v | string",
                                          "<|im_start|> <tool_call>"};
    const struct chat_defaults defaults = {.temperature = 1, .top_p = 0.95f, .min_p = 0, .repeat_penalty = 1, .top_k = 20, .n_vocab = 248320};
    struct chat_request *r = NULL;
    struct api_error err = {0};
    if (chat_request_parse(&r, (const char *)data, size, &defaults, &err) < 0) {
        check_error(&err);
    } else {
        must(r->n_messages > 0 && r->n_stop <= CHAT_MAX_STOP);
        for (size_t f = 0; f < sizeof sources / sizeof sources[0]; f++) {
            struct chat_template t;
            struct prompt p;
            must(chat_template_open(&t, sources[f], strlen(sources[f]), "", NULL) == 0);
            if (chat_template_render(&t, r, &p, &err) == 0) {
                check_prompt(&p);
                prompt_free(&p);
            } else {
                check_error(&err);
            }
            chat_template_close(&t);
        }
        chat_request_free(r);
    }
    /* The same bytes as a template: whatever a file says, opening it must be safe. */
    struct chat_template t;
    if (chat_template_open(&t, (const char *)data, size, "qwen35", NULL) == 0)
        chat_template_close(&t);
    return 0;
}
