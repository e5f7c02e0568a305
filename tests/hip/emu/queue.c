/* tests/hip/emu/queue.c: the device as a thread of its own that does nothing before somebody waits, or EMU_QUEUE (default 64) commands have piled up. A
 * host buffer that is overwritten before its copy was waited for, or read before, then shows as wrong numbers every time and not once in a month. */
#include "tests/hip/emu/emu.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/hip/emu/hip_errors.h"

enum command_kind { COMMAND_LAUNCH, COMMAND_COPY, COMMAND_FILL, COMMAND_MARK };

struct command {
    struct command *next;
    int64_t number;
    enum command_kind kind;
    void *dst;
    const void *src;
    void *staged; /* a copy's own bytes */
    size_t bytes, width;
    int value;
    struct launch *launch;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wanted = PTHREAD_COND_INITIALIZER, finished = PTHREAD_COND_INITIALIZER;
static struct command *head, *tail;
static int64_t last, done, target; /* numbers: newest, executed, to be executed */
static int error;
static bool running;

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static void fill(const struct command *c)
{
    uint8_t *p = c->dst;
    if (c->width == 1) {
        memset(p, c->value, c->bytes);
        return;
    }
    for (size_t i = 0; i < c->bytes / c->width; i++)
        memcpy(p + i * c->width, &c->value, c->width);
}

/* EMU_FAIL=kernel:N makes the Nth execution of a kernel fail, as a hang or a fault of the hardware would. */
static bool fails_on_device(void)
{
    static int executed;
    const char *text = getenv("EMU_FAIL");
    executed++;
    if (!text || strncmp(text, "kernel:", 7) != 0) {
        executed = 0;
        return false;
    }
    return executed == (int)strtol(text + 7, NULL, 10);
}

static int execute(const struct command *c)
{
    switch (c->kind) {
    case COMMAND_LAUNCH:
        return fails_on_device() ? HIP_ERROR_LAUNCH_FAILURE : emu_run(c->launch);
    case COMMAND_COPY:
        memmove(c->dst, c->staged ? c->staged : c->src, c->bytes);
        return 0;
    case COMMAND_FILL:
        fill(c);
        return 0;
    case COMMAND_MARK:
        *(double *)c->dst = now_ms();
        return 0;
    }
    return 0;
}

static void free_command(struct command *c)
{
    free(c->staged);
    free(c->launch);
    free(c);
}

static void *device_main(void *arg)
{
    (void)arg;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!head || done >= target)
            pthread_cond_wait(&wanted, &lock);
        struct command *c = head;
        const bool drop = error != 0;
        pthread_mutex_unlock(&lock);
        const int rc = drop ? 0 : execute(c);
        pthread_mutex_lock(&lock);
        head = c->next;
        if (!head)
            tail = NULL;
        if (rc && !error)
            error = rc;
        done = c->number;
        free_command(c);
        pthread_cond_broadcast(&finished);
    }
    return NULL;
}

static int64_t queue_room(void)
{
    const char *text = getenv("EMU_QUEUE");
    const long n = text ? strtol(text, NULL, 10) : 64;
    return n < 0 ? 0 : n;
}

static int64_t append(struct command *c)
{
    if (!c)
        return -1;
    pthread_mutex_lock(&lock);
    if (!running) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, device_main, NULL) != 0) {
            pthread_mutex_unlock(&lock);
            free_command(c);
            return -1;
        }
        pthread_detach(thread);
        running = true;
    }
    c->number = ++last;
    if (tail)
        tail->next = c;
    else
        head = c;
    tail = c;
    const int64_t late = last - queue_room();
    if (late > target) {
        target = late;
        pthread_cond_signal(&wanted);
    }
    const int64_t number = c->number;
    pthread_mutex_unlock(&lock);
    return number;
}

static struct command *new_command(enum command_kind kind)
{
    struct command *c = calloc(1, sizeof *c);
    if (c)
        c->kind = kind;
    return c;
}

int64_t emu_queue_launch(const struct launch *l)
{
    struct command *c = new_command(COMMAND_LAUNCH);
    if (!c)
        return -1;
    c->launch = aligned_alloc(64, sizeof *l);
    if (!c->launch) {
        free(c);
        return -1;
    }
    *c->launch = *l;
    return append(c);
}

int64_t emu_queue_copy(void *dst, const void *src, size_t bytes, bool late)
{
    struct command *c = new_command(COMMAND_COPY);
    if (!c)
        return -1;
    c->dst = dst;
    c->src = src;
    c->bytes = bytes;
    if (!late && bytes) {
        c->staged = malloc(bytes);
        if (!c->staged) {
            free(c);
            return -1;
        }
        memcpy(c->staged, src, bytes);
    }
    return append(c);
}

int64_t emu_queue_fill(void *dst, int value, size_t bytes, size_t width)
{
    struct command *c = new_command(COMMAND_FILL);
    if (!c)
        return -1;
    c->dst = dst;
    c->value = value;
    c->bytes = bytes;
    c->width = width;
    return append(c);
}

int64_t emu_queue_mark(double *when)
{
    struct command *c = new_command(COMMAND_MARK);
    if (!c)
        return -1;
    c->dst = when;
    return append(c);
}

int64_t emu_queue_last(void)
{
    pthread_mutex_lock(&lock);
    const int64_t n = last;
    pthread_mutex_unlock(&lock);
    return n;
}

void emu_queue_start(int64_t number)
{
    pthread_mutex_lock(&lock);
    if (number > target) {
        target = number;
        pthread_cond_signal(&wanted);
    }
    pthread_mutex_unlock(&lock);
}

bool emu_queue_done(int64_t number)
{
    pthread_mutex_lock(&lock);
    const bool yes = done >= number;
    pthread_mutex_unlock(&lock);
    return yes;
}

int emu_queue_wait(int64_t number)
{
    emu_queue_start(number);
    pthread_mutex_lock(&lock);
    while (done < number)
        pthread_cond_wait(&finished, &lock);
    const int rc = error;
    pthread_mutex_unlock(&lock);
    return rc;
}

int emu_queue_error(void)
{
    pthread_mutex_lock(&lock);
    const int rc = error;
    pthread_mutex_unlock(&lock);
    return rc;
}

void emu_queue_set_error(int code)
{
    pthread_mutex_lock(&lock);
    if (!error)
        error = code;
    pthread_mutex_unlock(&lock);
}

void emu_queue_recover(void)
{
    emu_queue_set_error(HIP_ERROR_UNKNOWN);
    emu_queue_wait(emu_queue_last());
    pthread_mutex_lock(&lock);
    error = 0;
    pthread_mutex_unlock(&lock);
}
