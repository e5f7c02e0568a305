#include "server/show.h"

#include <stdint.h>
#include <unictype.h>

#include "engine/utf8.h"

/* One character that starts at p (n bytes follow). Returns how many bytes it took. */
static size_t show_character(FILE *out, const uint8_t *p, size_t n)
{
    static const struct {
        char byte;
        const char *escape;
    } named[] = {{'\n', "\\n"}, {'\r', "\\r"}, {'\t', "\\t"}, {'"', "\\\""}, {'\\', "\\\\"}};
    for (size_t i = 0; i < sizeof named / sizeof named[0]; i++) {
        if (*p == (uint8_t)named[i].byte) {
            fputs(named[i].escape, out);
            return 1;
        }
    }
    uint32_t c;
    size_t len;
    if (utf8_decode((const char *)p, n, &c, &len) != UTF8_OK) {
        fprintf(out, "\\x%02x", *p);
        return 1;
    }
    /* Control, format (which can reverse the writing direction) and unassigned characters, line and paragraph separators. */
    if (!uc_is_general_category_withtable(c, UC_CATEGORY_MASK_C | UC_CATEGORY_MASK_Zl | UC_CATEGORY_MASK_Zp))
        fwrite(p, 1, len, out);
    else if (c < 0x80)
        fprintf(out, "\\x%02x", (unsigned)c);
    else
        fprintf(out, "\\u{%x}", (unsigned)c);
    return len;
}

/* Returns how many bytes were shown. */
static size_t show_characters(FILE *out, const char *text, size_t len, size_t max)
{
    size_t at = 0;
    for (size_t shown = 0; at < len && shown < max; shown++)
        at += show_character(out, (const uint8_t *)text + at, len - at);
    return at;
}

void show_text(FILE *out, const char *text, size_t len, size_t max)
{
    if (show_characters(out, text, len, max) < len)
        fputs("...", out);
}

void show_quoted(FILE *out, const char *text, size_t len, size_t max)
{
    fputc('"', out);
    size_t shown = show_characters(out, text, len, max);
    fputs(shown < len ? "\"..." : "\"", out);
}

void show_bytes(FILE *out, unsigned long long bytes)
{
    static const char *const units[] = {"kB", "MB", "GB", "TB"};
    if (bytes < 1000) {
        fprintf(out, "%llu bytes", bytes);
        return;
    }
    double value = (double)bytes / 1000;
    size_t unit = 0;
    while (value >= 999.95 && unit + 1 < sizeof units / sizeof units[0]) {
        value /= 1000;
        unit++;
    }
    fprintf(out, "%.1f %s", value, units[unit]);
}
