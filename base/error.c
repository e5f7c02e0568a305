#include "base/error.h"

#include <stdio.h>
#include <string.h>

/* Drops a UTF-8 sequence that the buffer's end cut in two. */
static void trim_partial_utf8(char *text, size_t cap)
{
    size_t len = strlen(text);
    if (len + 1 < cap)
        return; /* it fitted */
    size_t i = len;
    while (i > 0 && len - i < 4 && ((unsigned char)text[i - 1] & 0xC0) == 0x80)
        i--;
    unsigned char lead = i > 0 ? (unsigned char)text[i - 1] : 0;
    size_t whole = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
    if (lead >= 0xC0 && len - (i - 1) < whole)
        text[i - 1] = '\0';
}

int error_vset(struct error *err, const char *format, va_list args)
{
    if (!err)
        return -1;
    vsnprintf(err->text, sizeof err->text, format, args);
    trim_partial_utf8(err->text, sizeof err->text);
    return -1;
}

int error_set(struct error *err, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    error_vset(err, format, args);
    va_end(args);
    return -1;
}

int error_prefix(struct error *err, const char *format, ...)
{
    if (!err)
        return -1;
    struct error old = *err;
    va_list args;
    va_start(args, format);
    int n = vsnprintf(err->text, sizeof err->text, format, args);
    va_end(args);
    if (n < 0 || (size_t)n + 3 > sizeof err->text)
        return -1; /* the prefix alone fills it */
    memcpy(err->text + n, ": ", 3);
    size_t at = (size_t)n + 2, room = sizeof err->text - at - 1, len = strlen(old.text);
    if (len > room)
        len = room;
    memcpy(err->text + at, old.text, len);
    err->text[at + len] = '\0';
    trim_partial_utf8(err->text, sizeof err->text);
    return -1;
}
