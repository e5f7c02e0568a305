/* server/show.h: bytes from a file shown on a terminal. */
#ifndef BEDSIDE_SERVER_SHOW_H
#define BEDSIDE_SERVER_SHOW_H

#include <stddef.h>
#include <stdio.h>

/* Writes text[0..len) on one line, at most `max` characters of it, then "..." if there was more. Control characters, invalid UTF-8, quotes
 * and backslashes are escaped: a file cannot move the terminal's cursor. */
void show_text(FILE *out, const char *text, size_t len, size_t max);
void show_quoted(FILE *out, const char *text, size_t len, size_t max); /* in double quotes */

/* Writes a size with its unit: "21.7 GB", "640 bytes". */
void show_bytes(FILE *out, unsigned long long bytes);

#endif
