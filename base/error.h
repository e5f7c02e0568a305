/* base/error.h: one line that says what went wrong, where, and what to do.
 *
 * Functions that can fail return 0 or -1 (or a pointer or NULL) and take a `struct error *` as their last argument.
 * The text is for a person: it names the field, file or setting and the remedy. It never holds prompt or answer text. */
#ifndef BEDSIDE_BASE_ERROR_H
#define BEDSIDE_BASE_ERROR_H

#include <stdarg.h>

struct error {
    char text[512];
};

/* Formats the message (cut at the buffer's end on a UTF-8 boundary). `err` may be NULL. Always returns -1. */
int error_set(struct error *err, const char *format, ...) __attribute__((format(printf, 2, 3)));

int error_vset(struct error *err, const char *format, va_list args) __attribute__((format(printf, 2, 0)));

/* Puts "prefix: " before the message that is already there. Always returns -1. */
int error_prefix(struct error *err, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
