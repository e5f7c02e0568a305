/* engine/utf8_stream.c: bytes of successive tokens to text that is valid UTF-8 at every point (spec/tokenizer-and-template.md section 5).
 *
 * A token may end inside a character. What is held back is always a valid beginning of a character, so at most 3 bytes; anything that can
 * no longer become a character is replaced at once, otherwise one bad byte would stall the stream. */
#include "engine/tokenizer.h"
#include "engine/utf8.h"

#include <string.h>

/* Writes whole characters and replacements for invalid subparts; returns how many bytes at the end are an unfinished character. */
static size_t add_complete(const char *bytes, size_t len, struct buf *out)
{
    size_t at = 0, good = 0; /* bytes[good..at) are valid and not yet written */
    while (at < len) {
        uint32_t cp;
        size_t used;
        enum utf8_result result = utf8_decode(bytes + at, len - at, &cp, &used);
        if (result == UTF8_OK) {
            at += used;
            continue;
        }
        buf_add(out, bytes + good, at - good);
        if (result == UTF8_UNFINISHED)
            return used;
        buf_add(out, UTF8_REPLACEMENT, UTF8_REPLACEMENT_LEN);
        at += used;
        good = at;
    }
    buf_add(out, bytes + good, at - good);
    return 0;
}

void utf8_stream_add(struct utf8_stream *s, const char *bytes, size_t len, struct buf *out)
{
    /* First the character that is held: feed it byte by byte until it is complete or hopeless. */
    size_t at = 0;
    while (s->n_held > 0 && at < len) {
        char joined[4];
        memcpy(joined, s->held, s->n_held);
        joined[s->n_held] = bytes[at];
        uint32_t cp;
        size_t used;
        enum utf8_result result = utf8_decode(joined, s->n_held + 1, &cp, &used);
        if (result == UTF8_UNFINISHED) {
            s->held[s->n_held++] = (unsigned char)bytes[at++];
        } else if (result == UTF8_OK) {
            buf_add(out, joined, used);
            s->n_held = 0;
            at++;
        } else { /* the held bytes are one maximal subpart; the new byte starts afresh */
            buf_add(out, UTF8_REPLACEMENT, UTF8_REPLACEMENT_LEN);
            s->n_held = 0;
        }
    }
    if (at == len)
        return;
    size_t unfinished = add_complete(bytes + at, len - at, out);
    if (unfinished)
        memcpy(s->held, bytes + len - unfinished, unfinished);
    s->n_held = (unsigned)unfinished;
}

void utf8_stream_end(struct utf8_stream *s, struct buf *out)
{
    if (s->n_held > 0)
        buf_add(out, UTF8_REPLACEMENT, UTF8_REPLACEMENT_LEN);
    s->n_held = 0;
}
