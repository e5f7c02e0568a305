/* api/template_words.h: the fixed words around a tool list, read from a model's own Jinja template.
 *
 * Publishers edit these instructions, and a model answers best to the words it was trained on; the rest of the template is built in
 * (chatml.h). No Jinja is run: only string literals that are printed one after the other are read. */
#ifndef BEDSIDE_API_TEMPLATE_WORDS_H
#define BEDSIDE_API_TEMPLATE_WORDS_H

#include <stdbool.h>
#include <stddef.h>

#include "base/buf.h"

/* Appends to *intro the text from "# Tools" to <tools> and a newline, to *outro the text from </tools> to the end of the instructions, without
 * <|im_end|>. False when the template has no such text in a form that is understood; both are then empty (or `failed`). */
bool template_words(const char *source, size_t len, struct buf *intro, struct buf *outro);

#endif
