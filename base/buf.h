/* base/buf.h: a growing byte buffer, always NUL-terminated once anything was added.
 *
 * Out of memory is sticky: after a failed growth every call does nothing and `failed` stays true, so that a caller checks once,
 * at the end. Start from BUF_INIT (all zero); release with buf_free. */
#ifndef BEDSIDE_BASE_BUF_H
#define BEDSIDE_BASE_BUF_H

#include <stdbool.h>
#include <stddef.h>

struct buf {
    char *data; /* [len] bytes and a NUL; NULL while nothing was added */
    size_t len, cap;
    bool failed;
};

#define BUF_INIT                                                                                                                                     \
    {                                                                                                                                                \
        0                                                                                                                                            \
    }

void buf_free(struct buf *b);
void buf_clear(struct buf *b);                 /* len = 0, memory kept, `failed` kept */
bool buf_reserve(struct buf *b, size_t extra); /* room for `extra` more bytes; false = failed */
bool buf_add(struct buf *b, const void *data, size_t n);
bool buf_puts(struct buf *b, const char *text);
bool buf_putc(struct buf *b, char c);
bool buf_printf(struct buf *b, const char *format, ...) __attribute__((format(printf, 2, 3)));
void buf_drop_front(struct buf *b, size_t n); /* forgets the first n (at most len) bytes */

#endif
