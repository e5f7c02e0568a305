/* engine/tokenizer.h: byte-level BPE with the vocabulary of a GGUF file (spec/tokenizer-and-template.md sections 1 to 6).
 *
 * Immutable after opening and safe to use from any thread. It copies what it needs; the file may be closed. */
#ifndef BEDSIDE_ENGINE_TOKENIZER_H
#define BEDSIDE_ENGINE_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/error.h"
#include "engine/gguf.h"

struct tokenizer;

/* The numbers of tokenizer.ggml.token_type. */
enum token_kind {
    TOKEN_NORMAL = 1,
    TOKEN_UNKNOWN = 2,
    TOKEN_CONTROL = 3,
    TOKEN_USER = 4,
    TOKEN_UNUSED = 5,
    TOKEN_BYTE = 6,
};

struct token_list {
    int32_t *ids;
    size_t len, cap;
};
void token_list_free(struct token_list *list);
int token_list_add(struct token_list *list, int32_t id); /* 0, or -1 out of memory */

/* Bytes [begin, end) of a text. */
struct text_range {
    size_t begin, end;
};

enum { TOKENIZER_NFC = 1 }; /* normalise to NFC, as the models were trained; llama.cpp does not (section 3) */

int tokenizer_open(struct tokenizer **out, const struct gguf *g, struct error *err);
void tokenizer_close(struct tokenizer *t);

/* Appends the ids of text[0..len) to *out. Invalid UTF-8 counts as U+FFFD. User-defined tokens match anywhere; control tokens match only
 * where they lie wholly inside one of the `trusted` ranges (ascending, disjoint): text that came from a client is never inside one, so it
 * can never become a control token. Pre-tokens may cross a range's end: the seams of a template do not change the ids (section 8). */
int tokenizer_encode(const struct tokenizer *t, const char *text, size_t len, const struct text_range *trusted, size_t n_trusted, unsigned flags,
                     struct token_list *out, struct error *err);

int32_t tokenizer_vocab_size(const struct tokenizer *t);
enum token_kind tokenizer_kind(const struct tokenizer *t, int32_t id);

/* The bytes a token stands for (also control tokens' text); *len is set. Never NULL for a valid id. */
const char *tokenizer_bytes(const struct tokenizer *t, int32_t id, size_t *len);

/* Id of the added or ordinary token with exactly this text (UTF-8 as shown, not the printable alphabet), or -1. */
int32_t tokenizer_find(const struct tokenizer *t, const char *text);

/* Generation ends at these: eos, eot, <|im_end|>, <|endoftext|>, fim_pad, repo_name, file_sep where the file has them. */
bool tokenizer_ends_generation(const struct tokenizer *t, int32_t id);

/* False for ids no text uses (padding of the vocabulary): sampling masks them. */
bool tokenizer_usable(const struct tokenizer *t, int32_t id);

/* Turns the bytes of successive tokens into text that is valid UTF-8 at every point (section 5): holds back an unfinished sequence (at most
 * 3 bytes), replaces an invalid one by U+FFFD at once. Start from zero. */
struct utf8_stream {
    unsigned char held[4];
    unsigned n_held;
};
void utf8_stream_add(struct utf8_stream *s, const char *bytes, size_t len, struct buf *out);
void utf8_stream_end(struct utf8_stream *s, struct buf *out); /* U+FFFD for what is still held */

#endif
