/* server/outbox.h: bytes on their way from the scheduler's thread to the thread of one connection.
 *
 * The writer never blocks. The reader sleeps in poll() on two things at once: the outbox and the client's socket, so that a client that leaves is
 * noticed while nothing is being written to it. One writer, one reader. */
#ifndef BEDSIDE_SERVER_OUTBOX_H
#define BEDSIDE_SERVER_OUTBOX_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

#include "base/buf.h"

enum { OUTBOX_LIMIT = 8 << 20 }; /* more unread bytes than this: the client is taken to have stopped reading */

struct outbox {
    pthread_mutex_t lock;
    struct buf data;
    size_t taken; /* bytes at the front of `data` that were read */
    int event_fd; /* readable while there are bytes, or the outbox is closed */
    bool closed;
};

enum outbox_state {
    OUTBOX_READY, /* there are bytes to take */
    OUTBOX_END,   /* closed, and all bytes were taken */
    OUTBOX_TIMEOUT,
    OUTBOX_GONE, /* the client closed or half-closed its connection, or it broke */
};

int outbox_open(struct outbox *o); /* 0, or -1 with errno */
void outbox_free(struct outbox *o);

/* Writer. False when memory is short or more than OUTBOX_LIMIT bytes are unread already; nothing is added then. */
bool outbox_put(struct outbox *o, const void *data, size_t n);
void outbox_close(struct outbox *o); /* no more bytes will come */

/* Reader. Waits at most timeout_ms; the client's leaving counts before anything else. client_fd -1: no client to watch. */
enum outbox_state outbox_wait(struct outbox *o, int client_fd, int timeout_ms);
size_t outbox_take(struct outbox *o, char *dst, size_t max);

#endif
