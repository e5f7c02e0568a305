/* api/template_words.c: a scanner for Jinja's tags that collects printed string literals.
 *
 * A "run" is the text of consecutive {{ "literal" }} tags with nothing but whitespace between them. Tool instructions are always such runs: one before
 * the loop over the tools and one after it. A statement, a printed variable or plain text outside of tags ends a run. */
#include "api/template_words.h"

#include <string.h>
#include <unistr.h>

struct scan {
    const char *p, *end;
    struct buf run;
    struct buf *intro, *outro;
};

static bool is_blank(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

static bool starts(const struct scan *s, const char *word)
{
    size_t n = strlen(word);
    return (size_t)(s->end - s->p) >= n && memcmp(s->p, word, n) == 0;
}

/* The last occurrence of word in text, or NULL. */
static const char *find_last(const char *text, const char *word)
{
    const char *found = NULL;
    for (const char *p = strstr(text, word); p; p = strstr(p + 1, word))
        found = p;
    return found;
}

static int hex_value(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c = (char)(c | 0x20);
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* The code point of `digits` hex digits at p, or -1. */
static long hex_code(const char *p, const char *end, int digits)
{
    if (end - p < digits)
        return -1;
    long code = 0;
    for (int i = 0; i < digits; i++) {
        int v = hex_value(p[i]);
        if (v < 0)
            return -1;
        code = code * 16 + v;
    }
    return code;
}

/* Decodes the escape after a backslash at s->p (which points behind the backslash), as Python's string literals have them. */
static void add_escape(struct scan *s, struct buf *out)
{
    static const char simple[] = "n\nt\tr\rb\bf\fv\va\a\\\\''\"\""; /* pairs: letter and meaning */
    char c = *s->p;
    for (size_t k = 0; k < sizeof simple - 1; k += 2) {
        if (simple[k] == c) {
            buf_putc(out, simple[k + 1]);
            s->p++;
            return;
        }
    }
    int digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    long code = digits ? hex_code(s->p + 1, s->end, digits) : -1;
    uint8_t utf8[6];
    int n = code > 0 && code <= 0x10FFFF ? u8_uctomb(utf8, (ucs4_t)code, sizeof utf8) : -1;
    if (n > 0) {
        buf_add(out, utf8, (size_t)n);
        s->p += 1 + digits;
        return;
    }
    buf_putc(out, '\\'); /* no escape: both characters stand for themselves */
}

/* A string literal at s->p, decoded into *out when it is not NULL. False when it never ends. */
static bool read_string(struct scan *s, struct buf *out)
{
    struct buf ignored = BUF_INIT;
    struct buf *to = out ? out : &ignored;
    char quote = *s->p++;
    bool closed = false;
    while (s->p < s->end && !closed) {
        char c = *s->p++;
        if (c == quote)
            closed = true;
        else if (c == '\\' && s->p < s->end)
            add_escape(s, to);
        else if (c)
            buf_putc(to, c); /* a NUL would end the searches below early */
    }
    buf_free(&ignored);
    return closed;
}

/* Moves behind `close`, stepping over string literals. */
static void skip_tag(struct scan *s, const char *close)
{
    while (s->p < s->end && !starts(s, close)) {
        if (*s->p == '"' || *s->p == '\'')
            read_string(s, NULL);
        else
            s->p++;
    }
    s->p = starts(s, close) ? s->p + strlen(close) : s->end;
}

static void skip_blanks(struct scan *s)
{
    while (s->p < s->end && is_blank(*s->p))
        s->p++;
}

/* The inside of a {{ }} tag. Literals joined by + or ~ are appended to the run; anything else leaves *literal false. */
static void read_print(struct scan *s, struct buf *text, bool *literal)
{
    *literal = false;
    if (s->p < s->end && (*s->p == '-' || *s->p == '+'))
        s->p++;
    for (;;) {
        skip_blanks(s);
        if (s->p >= s->end || (*s->p != '"' && *s->p != '\'') || !read_string(s, text))
            break;
        skip_blanks(s);
        if (starts(s, "}}") || starts(s, "-}}") || starts(s, "+}}")) {
            *literal = true;
            break;
        }
        if (s->p >= s->end || (*s->p != '+' && *s->p != '~'))
            break;
        s->p++;
    }
    skip_tag(s, "}}");
}

/* Looks for the words in the run that just ended. */
static void end_run(struct scan *s)
{
    char *text = s->run.data;
    if (!s->run.len)
        return;
    if (!s->intro->len) {
        const char *from = strstr(text, "# Tools"), *to = from ? find_last(from, "<tools>") : NULL;
        const char *rest = to ? to + strlen("<tools>") : NULL;
        while (rest && is_blank(*rest))
            rest++;
        if (rest && !*rest) {
            buf_add(s->intro, from, (size_t)(to - from) + strlen("<tools>"));
            buf_putc(s->intro, '\n');
        }
    } else if (!s->outro->len) {
        const char *from = text;
        while (is_blank(*from))
            from++;
        if (strncmp(from, "</tools>", strlen("</tools>")) == 0) {
            const char *to = strstr(from, "<|im_end|>");
            buf_add(s->outro, from, to ? (size_t)(to - from) : strlen(from));
        }
    }
    buf_clear(&s->run);
}

bool template_words(const char *source, size_t len, struct buf *intro, struct buf *outro)
{
    struct scan s = {.p = source, .end = source + len, .run = BUF_INIT, .intro = intro, .outro = outro};
    while (s.p < s.end && !outro->len) {
        if (starts(&s, "{{")) {
            struct buf text = BUF_INIT;
            bool literal;
            s.p += 2;
            read_print(&s, &text, &literal);
            if (literal)
                buf_add(&s.run, text.data, text.len);
            else
                end_run(&s);
            buf_free(&text);
        } else if (starts(&s, "{%")) {
            skip_tag(&s, "%}");
            end_run(&s);
        } else if (starts(&s, "{#")) {
            while (s.p < s.end && !starts(&s, "#}"))
                s.p++;
            s.p = starts(&s, "#}") ? s.p + 2 : s.end;
        } else {
            if (!is_blank(*s.p))
                end_run(&s);
            s.p++;
        }
    }
    end_run(&s);
    bool ok = intro->len && outro->len && !intro->failed && !outro->failed && !s.run.failed;
    intro->failed = intro->failed || s.run.failed;
    buf_free(&s.run);
    if (!ok) {
        buf_clear(intro);
        buf_clear(outro);
    }
    return ok;
}
