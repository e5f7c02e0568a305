/* engine/tokenizer_split.h: cuts text into pre-tokens, the pieces within which byte pairs are merged (spec/tokenizer-and-template.md
 * section 4). Part of the tokenizer; nobody else needs it. */
#ifndef BEDSIDE_ENGINE_TOKENIZER_SPLIT_H
#define BEDSIDE_ENGINE_TOKENIZER_SPLIT_H

#include <stddef.h>

enum split_pattern {
    SPLIT_QWEN2,  /* words are runs of letters; combining marks count as punctuation */
    SPLIT_QWEN35, /* words are runs of letters and combining marks */
};

/* Where the pre-token that starts at text[at] ends: at < result <= len. The text must be valid UTF-8 (engine/tokenizer_encode.c makes it
 * so), `at` < len and a character's start. Characters are looked at beyond the pre-token's end, so pass the whole stretch. */
size_t split_next(enum split_pattern pattern, const char *text, size_t len, size_t at);

#endif
