/* engine/utf8.h: one strict UTF-8 decoder, shared by the tokenizer and the output stream.
 *
 * Strict as in the Unicode standard, table 3-7: no overlong forms, no surrogates, nothing above U+10FFFF. What is invalid is cut into
 * maximal subparts (section 3.9, "U+FFFD substitution of maximal subparts"), the practice of Python's errors="replace" and of browsers. */
#ifndef BEDSIDE_ENGINE_UTF8_H
#define BEDSIDE_ENGINE_UTF8_H

#include <stddef.h>
#include <stdint.h>

#define UTF8_REPLACEMENT "\xEF\xBF\xBD" /* U+FFFD */

enum { UTF8_REPLACEMENT_LEN = 3 };

enum utf8_result {
    UTF8_OK,         /* a whole character: *cp is its code point */
    UTF8_INVALID,    /* a maximal subpart that no following byte could complete */
    UTF8_UNFINISHED, /* the bytes end inside a character that is valid so far */
};

/* Decodes the first character of bytes[0..len), len >= 1. *used becomes the length of the character, of the invalid subpart, or of the
 * unfinished rest (all of them >= 1 and <= len). *cp is written only for UTF8_OK. */
static inline enum utf8_result utf8_decode(const char *bytes, size_t len, uint32_t *cp, size_t *used)
{
    const unsigned char *p = (const unsigned char *)bytes;
    unsigned char lead = p[0];
    *used = 1;
    if (lead < 0x80) {
        *cp = lead;
        return UTF8_OK;
    }
    size_t need;
    unsigned char low = 0x80, high = 0xBF; /* bounds of the second byte */
    uint32_t value;
    if (lead >= 0xC2 && lead <= 0xDF) {
        need = 2;
        value = lead & 0x1Fu;
    } else if (lead >= 0xE0 && lead <= 0xEF) {
        need = 3;
        value = lead & 0x0Fu;
        if (lead == 0xE0)
            low = 0xA0;
        else if (lead == 0xED)
            high = 0x9F;
    } else if (lead >= 0xF0 && lead <= 0xF4) {
        need = 4;
        value = lead & 0x07u;
        if (lead == 0xF0)
            low = 0x90;
        else if (lead == 0xF4)
            high = 0x8F;
    } else {
        return UTF8_INVALID;
    }
    for (size_t i = 1; i < need; i++) {
        *used = i;
        if (i == len)
            return UTF8_UNFINISHED;
        if (p[i] < low || p[i] > high)
            return UTF8_INVALID;
        value = value << 6 | (p[i] & 0x3Fu);
        low = 0x80;
        high = 0xBF;
    }
    *used = need;
    *cp = value;
    return UTF8_OK;
}

#endif
