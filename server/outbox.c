#include "server/outbox.h"

#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/clock.h"

int outbox_open(struct outbox *o)
{
    *o = (struct outbox){.event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
    if (o->event_fd < 0)
        return -1;
    int rc = pthread_mutex_init(&o->lock, NULL);
    if (rc) {
        close(o->event_fd);
        errno = rc;
        return -1;
    }
    return 0;
}

void outbox_free(struct outbox *o)
{
    pthread_mutex_destroy(&o->lock);
    close(o->event_fd);
    buf_free(&o->data);
}

/* The eventfd's counter is 0 or 1 here, so that neither call can block or fail for a reason that matters. */
static void raise_event(struct outbox *o)
{
    uint64_t one = 1;
    ssize_t n = write(o->event_fd, &one, sizeof one);
    (void)n;
}

static void clear_event(struct outbox *o)
{
    uint64_t count;
    ssize_t n = read(o->event_fd, &count, sizeof count);
    (void)n;
}

bool outbox_put(struct outbox *o, const void *data, size_t n)
{
    if (n == 0)
        return true;
    pthread_mutex_lock(&o->lock);
    size_t unread = o->data.len - o->taken;
    bool ok = !o->closed && unread <= OUTBOX_LIMIT;
    if (ok && o->taken > o->data.len / 2) { /* at least half is read: moving the rest costs less than the reading did */
        buf_drop_front(&o->data, o->taken);
        o->taken = 0;
    }
    ok = ok && buf_add(&o->data, data, n);
    if (ok && unread == 0)
        raise_event(o);
    pthread_mutex_unlock(&o->lock);
    return ok;
}

void outbox_close(struct outbox *o)
{
    pthread_mutex_lock(&o->lock);
    if (!o->closed) {
        o->closed = true;
        raise_event(o);
    }
    pthread_mutex_unlock(&o->lock);
}

enum outbox_state outbox_wait(struct outbox *o, int client_fd, int timeout_ms)
{
    struct pollfd fds[2] = {{.fd = o->event_fd, .events = POLLIN}, {.fd = client_fd, .events = POLLRDHUP}};
    const nfds_t n_fds = client_fd >= 0 ? 2 : 1;
    const uint64_t deadline = clock_ns() + (uint64_t)timeout_ms * 1000000u;
    for (;;) {
        uint64_t now = clock_ns();
        int left = now >= deadline ? 0 : (int)((deadline - now + 999999u) / 1000000u);
        int n = poll(fds, n_fds, left);
        if (n < 0 && errno != EINTR)
            return OUTBOX_GONE; /* out of kernel memory: the connection cannot be served */
        if (n < 0)
            continue;
        /* POLLHUP and POLLERR come unasked. A client that only shut down its sending half counts as gone as well: it cannot be told apart
         * from one that closed, and clients of this interface keep both halves open until they have the reply. */
        if (n_fds == 2 && fds[1].revents)
            return OUTBOX_GONE;
        if (fds[0].revents) {
            pthread_mutex_lock(&o->lock);
            enum outbox_state state = o->data.len > o->taken ? OUTBOX_READY : OUTBOX_END;
            pthread_mutex_unlock(&o->lock);
            return state;
        }
        if (n == 0)
            return OUTBOX_TIMEOUT;
    }
}

size_t outbox_take(struct outbox *o, char *dst, size_t max)
{
    pthread_mutex_lock(&o->lock);
    size_t unread = o->data.len - o->taken;
    size_t n = unread < max ? unread : max;
    if (n) {
        memcpy(dst, o->data.data + o->taken, n);
        o->taken += n;
        if (n == unread) {
            buf_clear(&o->data);
            o->taken = 0;
            if (!o->closed)
                clear_event(o);
        }
    }
    pthread_mutex_unlock(&o->lock);
    return n;
}
