#include "server/page.h"

#include <string.h>

static void add_escaped(struct buf *out, const char *text)
{
    for (; *text; text++) {
        switch (*text) {
        case '&':
            buf_puts(out, "&amp;");
            break;
        case '<':
            buf_puts(out, "&lt;");
            break;
        case '>':
            buf_puts(out, "&gt;");
            break;
        case '"':
            buf_puts(out, "&quot;");
            break;
        default:
            buf_putc(out, *text);
        }
    }
}

bool page_is_demo(const char *model)
{
    return strncmp(model, "Tiny clinical demo", 18) == 0; /* as tests/demo-model/export_gguf.py writes it */
}

void page_write(struct buf *out, const char *model, const char *url)
{
    buf_puts(out, "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>bedside</title>\n"
                  "<style>body{font:16px/1.5 sans-serif;max-width:40em;margin:3em auto;padding:0 1em}</style></head>\n<body><p>");
    buf_puts(out, "This is <strong>bedside</strong>, a language model server for this machine. ");
    if (model) {
        buf_puts(out, "It serves <em>");
        add_escaped(out, model);
        buf_puts(out, "</em>. ");
    } else {
        buf_puts(out, "Its model is still being loaded. ");
    }
    if (model && page_is_demo(model))
        buf_puts(out, "<strong>That model is a demonstration: 16 million parameters, trained on invented records, often wrong. It is not for "
                      "clinical use.</strong> ");
    buf_puts(out, "Programs talk to it at <code>");
    add_escaped(out, url);
    buf_puts(out, "/v1/chat/completions</code> in the manner of OpenAI's interface; <a href=\"/v1/models\">/v1/models</a> names the model and "
                  "<a href=\"/health\">/health</a> says how it fares. Nothing that is asked here leaves the machine, and nothing of it is logged."
                  "</p></body></html>\n");
}
