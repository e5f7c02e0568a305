/* libamdhip64-faulty.so: a HIP runtime without a GPU that fails where it is told to. Kernels do nothing; memory and copies are real.
 *
 * Copies are queued and done only when somebody waits, and an event's wait does what came before it and not more: a host buffer that is
 * overwritten too early, or read too early, shows in the data.
 *
 *   FAULTY=function:n:error   the n-th call (from 1) of that function, and every later one, returns `error`
 *   FAULTY_ONCE=...           the same, but only that call
 *   FAULTY_DEVICES, FAULTY_ARCH, FAULTY_WAVE, FAULTY_FREE (bytes that hipMemGetInfo calls free)
 *
 * faulty_live() counts what was made and not yet released; faulty_calls(name) counts calls. */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, CAPTURE_UNSUPPORTED = 900, MOST_FUNCTIONS = 64 };

#define EXPORT __attribute__((visibility("default")))

static long live;

EXPORT long faulty_live(void)
{
    return live;
}

/* ---- faults ---- */

static struct {
    const char *name;
    long calls;
} counts[MOST_FUNCTIONS];

static long count(const char *name, long more)
{
    for (int i = 0; i < MOST_FUNCTIONS; i++) {
        if (counts[i].name && strcmp(counts[i].name, name) != 0)
            continue;
        counts[i].name = name;
        return counts[i].calls += more;
    }
    abort();
}

EXPORT long faulty_calls(const char *name)
{
    for (int i = 0; i < MOST_FUNCTIONS && counts[i].name; i++)
        if (strcmp(counts[i].name, name) == 0)
            return counts[i].calls;
    return 0;
}

EXPORT void faulty_forget_calls(void)
{
    memset(counts, 0, sizeof counts);
}

/* The error that this call of `name` is to return. */
static int fault(const char *name)
{
    const long n = count(name, 1);
    static const char *const settings[] = {"FAULTY", "FAULTY_ONCE"};
    for (int i = 0; i < 2; i++) {
        const char *text = getenv(settings[i]);
        const char *colon = text ? strchr(text, ':') : NULL;
        if (!colon || (size_t)(colon - text) != strlen(name) || strncmp(text, name, strlen(name)) != 0)
            continue;
        char *end;
        const long nth = strtol(colon + 1, &end, 10);
        if (*end == ':' && (n == nth || (i == 0 && n > nth)))
            return (int)strtol(end + 1, NULL, 10);
    }
    return OK;
}

#define FAULT()                                                                                                                                      \
    do {                                                                                                                                             \
        const int error_ = fault(__func__);                                                                                                          \
        if (error_)                                                                                                                                  \
            return error_;                                                                                                                           \
    } while (0)

static long number(const char *name, long otherwise)
{
    const char *text = getenv(name);
    return text && text[0] ? strtol(text, NULL, 10) : otherwise;
}

/* ---- the queue ---- */

struct item {
    void *dst;
    const void *src; /* NULL: fill with value */
    int value;
    size_t bytes;
};

static struct item *queue;
static size_t n_queue, cap_queue, n_done; /* items ever queued, and ever done; queue holds the ones from n_done on */

static void do_until(size_t end)
{
    size_t i = n_done;
    for (; i < end; i++) {
        const struct item *it = &queue[i - n_done];
        if (it->src)
            memmove(it->dst, it->src, it->bytes);
        else
            memset(it->dst, it->value, it->bytes);
    }
    if (end > n_done) {
        memmove(queue, queue + (end - n_done), (n_queue - end) * sizeof *queue);
        n_done = end;
    }
}

static int enqueue(struct item item)
{
    if (n_queue - n_done == cap_queue) {
        cap_queue = cap_queue ? 2 * cap_queue : 64;
        queue = realloc(queue, cap_queue * sizeof *queue);
        if (!queue)
            abort();
    }
    queue[n_queue++ - n_done] = item;
    return OK;
}

__attribute__((destructor)) static void release(void)
{
    free(queue);
}

/* ---- the interface, in the order of hip/runtime.h ---- */

EXPORT int hipInit(unsigned flags)
{
    FAULT();
    return flags ? INVALID_VALUE : OK;
}

EXPORT int hipRuntimeGetVersion(int *version)
{
    FAULT();
    *version = 60443484;
    return OK;
}

EXPORT int hipGetDeviceCount(int *n)
{
    FAULT();
    *n = (int)number("FAULTY_DEVICES", 1);
    return *n > 0 ? OK : NO_DEVICE;
}

EXPORT int hipSetDevice(int ordinal)
{
    FAULT();
    return ordinal >= 0 ? OK : INVALID_VALUE;
}

EXPORT int hipDeviceGetName(char *name, int len, int ordinal)
{
    FAULT();
    (void)ordinal;
    snprintf(name, (size_t)len, "no GPU at all");
    return OK;
}

EXPORT int hipDeviceGetAttribute(int *value, int attribute, int ordinal)
{
    FAULT();
    (void)ordinal;
    *value = attribute == 16 ? 0 : attribute == 63 ? 8 : attribute == 87 ? (int)number("FAULTY_WAVE", 32) : 0;
    return OK;
}

EXPORT int hipGetDevicePropertiesR0600(void *properties, int ordinal)
{
    FAULT();
    (void)ordinal;
    const char *arch = getenv("FAULTY_ARCH");
    snprintf((char *)properties + 1160, 256, "%s", arch ? arch : "gfx1152");
    return OK;
}

EXPORT int hipMemGetInfo(size_t *left, size_t *total)
{
    FAULT();
    *left = (size_t)number("FAULTY_FREE", 1L << 34);
    *total = (size_t)1 << 35;
    return OK;
}

/* Never zeroed: what nobody wrote is not zero. */
static int allocate(void **p, size_t bytes)
{
    if (!p || bytes == 0)
        return INVALID_VALUE;
    *p = malloc(bytes);
    if (!*p)
        return OUT_OF_MEMORY;
    memset(*p, 0xa5, bytes);
    live++;
    return OK;
}

static void release_block(void *p)
{
    do_until(n_queue);
    if (p)
        live--;
    free(p);
}

EXPORT int hipMalloc(void **p, size_t bytes)
{
    FAULT();
    return allocate(p, bytes);
}

EXPORT int hipFree(void *p) /* releases even when it is told to fail: the process goes on without the device */
{
    release_block(p);
    FAULT();
    return OK;
}

EXPORT int hipHostMalloc(void **p, size_t bytes, unsigned flags)
{
    FAULT();
    (void)flags;
    return allocate(p, bytes);
}

EXPORT int hipHostFree(void *p)
{
    release_block(p);
    FAULT();
    return OK;
}

/* Only launches may go onto a stream that is captured. */
static bool captured(const void *stream)
{
    return stream && *(const char *)stream;
}

EXPORT int hipMemcpyAsync(void *dst, const void *src, size_t bytes, int kind, void *stream)
{
    FAULT();
    if (captured(stream))
        return CAPTURE_UNSUPPORTED;
    return kind < 1 || kind > 3 || !dst || !src ? INVALID_VALUE : enqueue((struct item){dst, src, 0, bytes});
}

EXPORT int hipMemsetAsync(void *dst, int value, size_t bytes, void *stream)
{
    FAULT();
    if (captured(stream))
        return CAPTURE_UNSUPPORTED;
    return dst ? enqueue((struct item){dst, NULL, value, bytes}) : INVALID_VALUE;
}

static int handle(void **out, size_t bytes)
{
    *out = calloc(1, bytes);
    live += *out != NULL;
    return *out ? OK : OUT_OF_MEMORY;
}

EXPORT int hipStreamCreateWithFlags(void **stream, unsigned flags)
{
    FAULT();
    (void)flags;
    return handle(stream, 1);
}

EXPORT int hipStreamDestroy(void *stream)
{
    release_block(stream);
    FAULT();
    return OK;
}

EXPORT int hipStreamSynchronize(void *stream)
{
    FAULT();
    if (captured(stream))
        return CAPTURE_UNSUPPORTED;
    do_until(n_queue);
    return OK;
}

EXPORT int hipEventCreateWithFlags(void **event, unsigned flags)
{
    FAULT();
    (void)flags;
    return handle(event, sizeof(size_t));
}

EXPORT int hipEventDestroy(void *event)
{
    release_block(event);
    FAULT();
    return OK;
}

EXPORT int hipEventRecord(void *event, void *stream)
{
    FAULT();
    if (captured(stream))
        return CAPTURE_UNSUPPORTED;
    *(size_t *)event = n_queue;
    return OK;
}

EXPORT int hipEventSynchronize(void *event)
{
    FAULT();
    do_until(*(size_t *)event);
    return OK;
}

EXPORT int hipModuleLoadData(void **module, const void *image)
{
    FAULT();
    return image ? handle(module, 1) : INVALID_VALUE;
}

EXPORT int hipModuleUnload(void *module)
{
    release_block(module);
    FAULT();
    return OK;
}

EXPORT int hipModuleGetFunction(void **function, void *module, const char *name)
{
    FAULT();
    (void)name;
    *function = module;
    return OK;
}

EXPORT int hipModuleLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                                 void *stream, void **params, void **extra)
{
    FAULT();
    (void)stream;
    return function && gx && gy && gz && bx && by == 1 && bz == 1 && !shared && params && !extra ? OK : INVALID_VALUE;
}

/* ---- graphs: a stream's byte says whether it is captured ---- */

EXPORT int hipStreamBeginCapture(void *stream, int mode)
{
    FAULT();
    if (!stream || mode != 2 || *(char *)stream)
        return INVALID_VALUE;
    *(char *)stream = 1;
    return OK;
}

EXPORT int hipStreamEndCapture(void *stream, void **graph)
{
    FAULT(); /* the stream stays as it is: nothing else may be asked of it */
    if (!stream || !*(char *)stream)
        return INVALID_VALUE;
    *(char *)stream = 0;
    return handle(graph, 1);
}

EXPORT int hipGraphInstantiate(void **exec, void *graph, void *node, char *log, size_t bytes)
{
    FAULT();
    (void)node;
    (void)log;
    (void)bytes;
    return graph ? handle(exec, 1) : INVALID_VALUE;
}

EXPORT int hipGraphDestroy(void *graph)
{
    release_block(graph);
    FAULT();
    return OK;
}

EXPORT int hipGraphExecDestroy(void *exec)
{
    release_block(exec);
    FAULT();
    return OK;
}

EXPORT int hipGraphLaunch(void *exec, void *stream)
{
    FAULT();
    return exec && stream && !*(char *)stream ? OK : INVALID_VALUE;
}

EXPORT const char *hipGetErrorString(int error)
{
    return error == OK              ? "no error"
           : error == OUT_OF_MEMORY ? "out of memory"
           : error == NO_DEVICE     ? "no ROCm-capable device is detected"
                                    : "made to fail";
}
