#include "engine/tokenizer_split.h"

#include <stdbool.h>
#include <stdint.h>
#include <unictype.h>

#include "engine/utf8.h"

/* What the patterns distinguish. Marks are words or others, depending on the pattern. */
enum char_class { CLASS_LETTER, CLASS_MARK, CLASS_NUMBER, CLASS_SPACE, CLASS_OTHER };

struct character {
    uint32_t cp;
    enum char_class class;
    size_t end; /* offset of the next character */
};

/* \s of the patterns: Unicode's White_Space property. It includes U+0085 and U+00A0, and not U+200B, U+FEFF or U+180E. */
static bool is_space(uint32_t cp)
{
    if (cp <= 0x20)
        return cp == 0x20 || (cp >= 0x09 && cp <= 0x0D);
    return cp == 0x85 || cp == 0xA0 || cp == 0x1680 || (cp >= 0x2000 && cp <= 0x200A) || cp == 0x2028 || cp == 0x2029 || cp == 0x202F ||
           cp == 0x205F || cp == 0x3000;
}

static enum char_class class_of(uint32_t cp)
{
    if (cp < 0x80) { /* nearly all text: no table */
        if ((cp | 0x20) >= 'a' && (cp | 0x20) <= 'z')
            return CLASS_LETTER;
        if (cp >= '0' && cp <= '9')
            return CLASS_NUMBER;
        return is_space(cp) ? CLASS_SPACE : CLASS_OTHER;
    }
    if (is_space(cp))
        return CLASS_SPACE;
    if (uc_is_general_category_withtable(cp, UC_CATEGORY_MASK_L))
        return CLASS_LETTER;
    if (uc_is_general_category_withtable(cp, UC_CATEGORY_MASK_M))
        return CLASS_MARK;
    if (uc_is_general_category_withtable(cp, UC_CATEGORY_MASK_N))
        return CLASS_NUMBER;
    return CLASS_OTHER;
}

/* The character at text[at], at < len. Reads a byte that is not UTF-8 (the caller promises there is none) as a character of its own. */
static struct character char_at(const char *text, size_t len, size_t at)
{
    struct character c = {0};
    size_t used;
    if (utf8_decode(text + at, len - at, &c.cp, &used) != UTF8_OK)
        c.cp = 0xFFFD;
    c.class = class_of(c.cp);
    c.end = at + used;
    return c;
}

static bool is_word(enum split_pattern pattern, enum char_class class)
{
    return class == CLASS_LETTER || (class == CLASS_MARK && pattern == SPLIT_QWEN35);
}

static bool is_other(enum split_pattern pattern, enum char_class class)
{
    return class == CLASS_OTHER || (class == CLASS_MARK && pattern == SPLIT_QWEN2);
}

static bool is_line_end(uint32_t cp)
{
    return cp == '\r' || cp == '\n';
}

/* Length of 's 't 'm 'd 're 've 'll in any case at text[at] == '\'', or 0. */
static size_t contraction(const char *text, size_t len, size_t at)
{
    if (len - at < 2)
        return 0;
    char a = (char)(text[at + 1] | 0x20);
    if (text[at + 1] < 'A')
        return 0;
    if (a == 's' || a == 't' || a == 'm' || a == 'd')
        return 2;
    if (len - at < 3 || text[at + 2] < 'A')
        return 0;
    char b = (char)(text[at + 2] | 0x20);
    if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l'))
        return 3;
    return 0;
}

/* End of the run of word characters that starts at text[at], possibly empty. */
static size_t word_end(enum split_pattern pattern, const char *text, size_t len, size_t at)
{
    while (at < len) {
        struct character c = char_at(text, len, at);
        if (!is_word(pattern, c.class))
            break;
        at = c.end;
    }
    return at;
}

/* End of O+ followed by any line ends, starting at text[at]; `at` itself when there is no O. */
static size_t other_end(enum split_pattern pattern, const char *text, size_t len, size_t at)
{
    size_t start = at;
    while (at < len) {
        struct character c = char_at(text, len, at);
        if (!is_other(pattern, c.class))
            break;
        at = c.end;
    }
    if (at == start)
        return at;
    while (at < len && is_line_end((unsigned char)text[at]))
        at++;
    return at;
}

/* White space that nothing else took: up to its last line end; else all but the last character when something follows; else all. */
static size_t space_end(const char *text, size_t len, size_t at)
{
    size_t end = at, last = at, after_line = 0;
    while (end < len) {
        struct character c = char_at(text, len, end);
        if (c.class != CLASS_SPACE)
            break;
        last = end;
        end = c.end;
        if (is_line_end(c.cp))
            after_line = end;
    }
    if (after_line)
        return after_line;
    return end < len && last > at ? last : end;
}

size_t split_next(enum split_pattern pattern, const char *text, size_t len, size_t at)
{
    /* The alternatives of the pattern in their order; the first that matches wins. */
    struct character first = char_at(text, len, at);
    if (first.cp == '\'') {
        size_t n = contraction(text, len, at);
        if (n)
            return at + n;
    }

    /* A word, with one leading character that is not a line end, letter or number. That character is taken if a word follows it,
     * also when it is a mark that could be part of the word itself. */
    bool may_lead = !is_line_end(first.cp) && first.class != CLASS_LETTER && first.class != CLASS_NUMBER;
    if (may_lead && first.end < len) {
        size_t end = word_end(pattern, text, len, first.end);
        if (end > first.end)
            return end;
    }
    if (is_word(pattern, first.class))
        return word_end(pattern, text, len, first.end);

    if (first.class == CLASS_NUMBER)
        return first.end;

    size_t start = first.cp == ' ' ? first.end : at;
    size_t end = other_end(pattern, text, len, start);
    if (end > start)
        return end;

    return space_end(text, len, at);
}
