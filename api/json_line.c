/* api/json_line.c: JSON as Python's json.dumps(value, ensure_ascii=False) writes it. */
#include "api/json_line.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void write_string(struct buf *out, const char *text, size_t len)
{
    buf_putc(out, '"');
    size_t from = 0;
    for (size_t i = 0; i < len; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c >= 0x20 && c != '"' && c != '\\')
            continue;
        buf_add(out, text + from, i - from);
        from = i + 1;
        static const char names[] = "\"\"\\\\\nn\rr\tt\bb\ff"; /* pairs: the byte and what follows the backslash */
        const char *pair = NULL;
        for (size_t k = 0; k < sizeof names - 1 && !pair; k += 2)
            if ((unsigned char)names[k] == c)
                pair = names + k;
        if (pair)
            buf_printf(out, "\\%c", pair[1]);
        else
            buf_printf(out, "\\u%04x", c);
    }
    buf_add(out, text + from, len - from);
    buf_putc(out, '"');
}

/* repr(float): the shortest digits that round-trip; an exponent below 1e-4 and from 1e16 on. */
static void write_real(struct buf *out, double value)
{
    if (value == 0) {
        buf_puts(out, signbit(value) ? "-0.0" : "0.0");
        return;
    }
    char text[40];
    for (int precision = 0; precision <= 16; precision++) {
        snprintf(text, sizeof text, "%.*e", precision, value);
        if (strtod(text, NULL) == value)
            break;
    }
    /* text is [-]d[.ddd]e[+-]dd */
    const char *p = text;
    if (*p == '-')
        buf_putc(out, *p++);
    char digits[24] = "0";
    int n = 0;
    for (; *p && *p != 'e'; p++)
        if (*p >= '0' && *p <= '9' && n < (int)sizeof digits)
            digits[n++] = *p;
    int exponent = *p == 'e' ? (int)strtol(p + 1, NULL, 10) : 0;
    if (exponent < -4 || exponent >= 16) {
        buf_putc(out, digits[0]);
        if (n > 1) {
            buf_putc(out, '.');
            buf_add(out, digits + 1, (size_t)n - 1);
        }
        buf_printf(out, "e%c%02d", exponent < 0 ? '-' : '+', abs(exponent));
        return;
    }
    if (exponent < 0) {
        buf_puts(out, "0.");
        for (int i = -1; i > exponent; i--)
            buf_putc(out, '0');
        buf_add(out, digits, (size_t)n);
        return;
    }
    for (int i = 0; i <= exponent; i++)
        buf_putc(out, i < n ? digits[i] : '0');
    buf_putc(out, '.');
    if (n > exponent + 1)
        buf_add(out, digits + exponent + 1, (size_t)(n - exponent - 1));
    else
        buf_putc(out, '0');
}

void json_line_write(struct buf *out, json_t *value)
{
    switch (json_typeof(value)) {
    case JSON_OBJECT: {
        buf_putc(out, '{');
        bool first = true;
        for (void *it = json_object_iter(value); it; it = json_object_iter_next(value, it)) { /* in the order of insertion */
            if (!first)
                buf_puts(out, ", ");
            first = false;
            const char *key = json_object_iter_key(it);
            write_string(out, key, strlen(key)); /* keys with NUL are refused by the parser */
            buf_puts(out, ": ");
            json_line_write(out, json_object_iter_value(it));
        }
        buf_putc(out, '}');
        break;
    }
    case JSON_ARRAY:
        buf_putc(out, '[');
        for (size_t i = 0; i < json_array_size(value); i++) {
            if (i)
                buf_puts(out, ", ");
            json_line_write(out, json_array_get(value, i));
        }
        buf_putc(out, ']');
        break;
    case JSON_STRING:
        write_string(out, json_string_value(value), json_string_length(value));
        break;
    case JSON_INTEGER:
        buf_printf(out, "%" JSON_INTEGER_FORMAT, json_integer_value(value));
        break;
    case JSON_REAL:
        write_real(out, json_real_value(value));
        break;
    case JSON_TRUE:
        buf_puts(out, "true");
        break;
    case JSON_FALSE:
        buf_puts(out, "false");
        break;
    case JSON_NULL:
        buf_puts(out, "null");
        break;
    }
}
