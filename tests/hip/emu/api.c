/* tests/hip/emu/api.c: libamdhip64-emu.so as programs see it: the module API of the HIP runtime, one device.
 *
 *   EMU_ARCH=gfx1201       the device (default gfx1152); EMU_NODEV=1: none; EMU_MEMORY=bytes: its memory; EMU_CUS=n: compute units
 *   EMU_FAIL=name:N[:code] the Nth call of a function fails, with `code` or out of memory for allocations, launch failure for launches (then the device is
 *                          lost and every call fails), 999 for others; kernel:N: the Nth kernel fails while it runs
 *   EMU_QUEUE=n            commands that may wait before they are done (default 64)
 *   EMU_THREADS=n EMU_LEVEL=base|avx2  how the host runs it
 *   EMU_RACES=1 EMU_REVERSED=1         look for races on LDS; run the waves of a workgroup from the last to the first
 *   EMU_LINES=1            count cache lines; EMU_REPORT=1: the counts on stderr when the program ends
 *   EMU_STALE=n            graphs of n kernels or more are replayed with old values (graph.c)
 *   EMU_ABORT=1            abort() at the first fault */
#include "tests/hip/emu/emu.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "tests/hip/emu/hip_errors.h"

#define API __attribute__((visibility("default")))

enum {
    STREAM_MAGIC = 0x5354524d,
    EVENT_MAGIC = 0x45564e54,
    GRAPH_MAGIC = 0x47525048,
    EXEC_MAGIC = 0x45584543,
    ARCH_OFFSET = 1160,
    KERNARG_MAX = 4096
};
enum copy_kind { COPY_HOST_TO_HOST, COPY_HOST_TO_DEVICE, COPY_DEVICE_TO_HOST, COPY_DEVICE_TO_DEVICE, COPY_DEFAULT };

struct stream {
    uint32_t magic;
    int64_t last;          /* number of its newest command */
    struct graph *capture; /* launches go there; NULL: none is in progress */
};

struct event {
    uint32_t magic;
    int64_t number; /* 0: never recorded */
    double when;
};

/* hipGraph_t and hipGraphExec_t. */
struct graph_handle {
    uint32_t magic;
    struct graph *graph;
    int64_t last; /* number of its newest command */
};

static __thread int last_error;
static struct emu_submissions submissions; /* without graphs_live; added to by atomic operations */

static void submitted(uint64_t *kind)
{
    __atomic_fetch_add(kind, 1, __ATOMIC_RELAXED);
}

static int result(int code)
{
    if (code)
        last_error = code;
    return code;
}

/* ---- failures on demand ---- */

/* The code with which this call of `name` is to fail; 0: it is not. */
static int planned_failure(const char *name, int usual)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static char counted[128];
    static long calls;
    const char *plan = getenv("EMU_FAIL");
    const size_t n = strlen(name);
    if (!plan || strncmp(plan, name, n) != 0 || plan[n] != ':')
        return 0;
    pthread_mutex_lock(&lock);
    if (strcmp(counted, plan) != 0) {
        snprintf(counted, sizeof counted, "%s", plan);
        calls = 0;
    }
    char *end;
    const bool now = ++calls == strtol(plan + n + 1, &end, 10);
    pthread_mutex_unlock(&lock);
    if (!now)
        return 0;
    return *end == ':' ? (int)strtol(end + 1, NULL, 10) : usual;
}

/* At the head of each function: fails when the device is lost, or this call's turn has come. */
#define ENTER_AS(usual)                                                                                                                              \
    do {                                                                                                                                             \
        int code_ = emu_queue_error();                                                                                                               \
        if (!code_)                                                                                                                                  \
            code_ = planned_failure(__func__, usual);                                                                                                \
        if (code_)                                                                                                                                   \
            return result(code_);                                                                                                                    \
    } while (0)
#define ENTER() ENTER_AS(HIP_ERROR_UNKNOWN)

static int invalid(const char *what)
{
    fprintf(stderr, "emulator: %s\n", what);
    return result(HIP_ERROR_INVALID_VALUE);
}

/* ---- the device ---- */

static const char *arch(void)
{
    const char *a = getenv("EMU_ARCH");
    return a ? a : "gfx1152";
}

static bool no_device(void)
{
    const char *text = getenv("EMU_NODEV");
    return text && text[0] && strcmp(text, "0") != 0;
}

API int hipInit(unsigned flags)
{
    ENTER();
    return flags ? result(HIP_ERROR_INVALID_VALUE) : no_device() ? result(HIP_ERROR_NO_DEVICE) : 0;
}

API int hipGetDeviceCount(int *count)
{
    ENTER();
    *count = no_device() ? 0 : 1;
    return no_device() ? result(HIP_ERROR_NO_DEVICE) : 0;
}

API int hipSetDevice(int ordinal)
{
    ENTER();
    return ordinal == 0 && !no_device() ? 0 : result(HIP_ERROR_INVALID_DEVICE);
}

API int hipGetDevice(int *ordinal)
{
    ENTER();
    *ordinal = 0;
    return 0;
}

API int hipDeviceGet(int *device, int ordinal)
{
    ENTER();
    *device = 0;
    return ordinal == 0 ? 0 : result(HIP_ERROR_INVALID_DEVICE);
}

API int hipDeviceGetName(char *name, int len, int device)
{
    ENTER();
    if (device != 0 || !name || len <= 0)
        return result(HIP_ERROR_INVALID_DEVICE);
    snprintf(name, (size_t)len, "emulated %s", arch());
    return 0;
}

API int hipDeviceGetAttribute(int *value, int attribute, int device)
{
    ENTER();
    if (device != 0)
        return result(HIP_ERROR_INVALID_DEVICE);
    const char *cus = getenv("EMU_CUS");
    switch (attribute) {
    case 5: /* clock rate, kHz */
        *value = 2800000;
        break;
    case 16: /* integrated */
        *value = strncmp(arch(), "gfx115", 6) == 0 || strcmp(arch(), "gfx1103") == 0;
        break;
    case 19: /* L2 bytes */
        *value = 2 << 20;
        break;
    case 23: /* compute capability */
        *value = strncmp(arch(), "gfx12", 5) == 0 ? 12 : 11;
        break;
    case 61:
        *value = strncmp(arch(), "gfx115", 6) == 0 ? 5 : 0;
        break;
    case 56: /* threads in a workgroup */
        *value = 1024;
        break;
    case 59: /* bus bits */
        *value = 128;
        break;
    case 63: /* compute units */
        *value = cus ? (int)strtol(cus, NULL, 10) : 8;
        break;
    case 74: /* LDS bytes */
        *value = 65536;
        break;
    case 87: /* lanes of a wave */
        *value = LANES;
        break;
    default:
        *value = 0;
    }
    return 0;
}

API int hipGetDevicePropertiesR0600(void *properties, int device)
{
    ENTER();
    if (device != 0)
        return result(HIP_ERROR_INVALID_DEVICE);
    memset(properties, 0, 1472);
    snprintf(properties, 256, "emulated %s", arch());
    snprintf((char *)properties + ARCH_OFFSET, 256, "%s", arch());
    return 0;
}

API int hipRuntimeGetVersion(int *version)
{
    ENTER();
    *version = 60443484;
    return 0;
}

API int hipDriverGetVersion(int *version)
{
    ENTER();
    *version = 60443484;
    return 0;
}

/* ---- memory ---- */

API int hipMemGetInfo(size_t *free_bytes, size_t *total)
{
    ENTER();
    emu_memory_info(free_bytes, total);
    return 0;
}

API int hipMalloc(void **p, size_t bytes)
{
    ENTER_AS(HIP_ERROR_OUT_OF_MEMORY);
    if (!p)
        return result(HIP_ERROR_INVALID_VALUE);
    *p = NULL;
    if (bytes == 0)
        return 0;
    *p = emu_alloc(bytes, MEMORY_DEVICE);
    return *p ? 0 : result(HIP_ERROR_OUT_OF_MEMORY);
}

/* Waits, as the real one does. */
static int free_memory(void *p, enum memory_kind kind)
{
    if (!p)
        return 0;
    const int lost = emu_queue_wait(emu_queue_last());
    if (emu_free(p, kind) != 0)
        return invalid("free of what is no allocation");
    return result(lost);
}

API int hipFree(void *p)
{
    const int failed = planned_failure(__func__, HIP_ERROR_UNKNOWN);
    return failed ? result(failed) : free_memory(p, MEMORY_DEVICE);
}

API int hipHostMalloc(void **p, size_t bytes, unsigned flags)
{
    ENTER_AS(HIP_ERROR_OUT_OF_MEMORY);
    (void)flags;
    *p = bytes ? emu_alloc(bytes, MEMORY_HOST) : NULL;
    return *p || !bytes ? 0 : result(HIP_ERROR_OUT_OF_MEMORY);
}

API int hipHostFree(void *p)
{
    const int failed = planned_failure(__func__, HIP_ERROR_UNKNOWN);
    return failed ? result(failed) : free_memory(p, MEMORY_HOST);
}

API int hipHostRegister(void *p, size_t bytes, unsigned flags)
{
    ENTER_AS(HIP_ERROR_OUT_OF_MEMORY);
    if (flags & ~15u)
        return result(HIP_ERROR_INVALID_VALUE);
    return emu_register(p, bytes, MEMORY_REGISTERED) == 0 ? 0 : result(HIP_ERROR_ALREADY_REGISTERED);
}

API int hipHostUnregister(void *p)
{
    ENTER();
    emu_queue_wait(emu_queue_last());
    return emu_unregister(p, MEMORY_REGISTERED) == 0 ? 0 : result(HIP_ERROR_NOT_REGISTERED);
}

API int hipHostGetDevicePointer(void **device, void *host, unsigned flags)
{
    ENTER();
    (void)flags;
    *device = host;
    return 0;
}

static bool on_device(const void *p, size_t bytes)
{
    return emu_memory_kind(p, bytes) >= 0;
}

static bool is_pinned(const void *p, size_t bytes)
{
    const int kind = emu_memory_kind(p, bytes);
    return kind == MEMORY_HOST || kind == MEMORY_REGISTERED || kind == MEMORY_DEVICE;
}

static struct stream *stream_of(void *p)
{
    static struct stream null_stream = {.magic = STREAM_MAGIC};
    struct stream *s = p ? p : &null_stream;
    return s->magic == STREAM_MAGIC ? s : NULL;
}

/* A stream that is captured takes launches only. */
static bool capturing(const struct stream *s)
{
    if (s && s->capture)
        fprintf(stderr, "emulator: something else than a launch on a stream that is captured\n");
    return s && s->capture;
}

static int queued(struct stream *s, int64_t number)
{
    if (number < 0)
        return result(HIP_ERROR_OUT_OF_MEMORY);
    s->last = number;
    return 0;
}

/* Pinned sources are read late; pageable ones at once, and pageable destinations are complete on return, as the real runtime does it. */
static int copy(void *dst, const void *src, size_t bytes, int kind, struct stream *s, bool wait)
{
    if (!s)
        return result(HIP_ERROR_INVALID_HANDLE);
    if (capturing(s))
        return result(HIP_ERROR_CAPTURE_UNSUPPORTED);
    if (kind < COPY_HOST_TO_HOST || kind > COPY_DEFAULT || (bytes && (!dst || !src)))
        return result(HIP_ERROR_INVALID_VALUE);
    if (bytes == 0)
        return 0;
    if ((kind == COPY_HOST_TO_DEVICE || kind == COPY_DEVICE_TO_DEVICE) && !on_device(dst, bytes))
        return invalid("copy to what is not (wholly) an allocation of the device");
    if ((kind == COPY_DEVICE_TO_HOST || kind == COPY_DEVICE_TO_DEVICE) && !on_device(src, bytes))
        return invalid("copy from what is not (wholly) an allocation of the device");
    const int rc = queued(s, emu_queue_copy(dst, src, bytes, is_pinned(src, bytes)));
    if (rc)
        return rc;
    submitted(&submissions.copies);
    if (kind == COPY_HOST_TO_DEVICE)
        emu_graph_note_copy(dst, bytes);
    return wait || !is_pinned(dst, bytes) ? result(emu_queue_wait(s->last)) : 0;
}

API int hipMemcpyAsync(void *dst, const void *src, size_t bytes, int kind, void *stream)
{
    ENTER();
    return copy(dst, src, bytes, kind, stream_of(stream), false);
}

API int hipMemcpy(void *dst, const void *src, size_t bytes, int kind)
{
    ENTER();
    return copy(dst, src, bytes, kind, stream_of(NULL), true);
}

API int hipMemcpyHtoDAsync(void *dst, void *src, size_t bytes, void *stream)
{
    ENTER();
    return copy(dst, src, bytes, COPY_HOST_TO_DEVICE, stream_of(stream), false);
}

API int hipMemcpyDtoHAsync(void *dst, void *src, size_t bytes, void *stream)
{
    ENTER();
    return copy(dst, src, bytes, COPY_DEVICE_TO_HOST, stream_of(stream), false);
}

API int hipMemcpyDtoDAsync(void *dst, void *src, size_t bytes, void *stream)
{
    ENTER();
    return copy(dst, src, bytes, COPY_DEVICE_TO_DEVICE, stream_of(stream), false);
}

static int set_memory(void *dst, int value, size_t n, size_t width, struct stream *s)
{
    if (!s)
        return result(HIP_ERROR_INVALID_HANDLE);
    if (capturing(s))
        return result(HIP_ERROR_CAPTURE_UNSUPPORTED);
    if (n == 0)
        return 0;
    if (!on_device(dst, n * width))
        return invalid("memset of what is not (wholly) an allocation of the device");
    submitted(&submissions.fills);
    return queued(s, emu_queue_fill(dst, value, n * width, width));
}

API int hipMemsetAsync(void *dst, int value, size_t bytes, void *stream)
{
    ENTER();
    return set_memory(dst, value, bytes, 1, stream_of(stream));
}

API int hipMemsetD32Async(void *dst, int value, size_t n, void *stream)
{
    ENTER();
    return set_memory(dst, value, n, 4, stream_of(stream));
}

API int hipMemset(void *dst, int value, size_t bytes)
{
    ENTER();
    const int rc = set_memory(dst, value, bytes, 1, stream_of(NULL));
    return rc ? rc : result(emu_queue_wait(stream_of(NULL)->last));
}

/* ---- streams and events ---- */

API int hipStreamCreateWithFlags(void **stream, unsigned flags)
{
    ENTER();
    (void)flags;
    struct stream *s = calloc(1, sizeof *s);
    if (!s)
        return result(HIP_ERROR_OUT_OF_MEMORY);
    s->magic = STREAM_MAGIC;
    *stream = s;
    return 0;
}

API int hipStreamCreate(void **stream)
{
    ENTER();
    return hipStreamCreateWithFlags(stream, 0);
}

API int hipStreamDestroy(void *stream)
{
    struct stream *s = stream_of(stream);
    if (!stream || !s)
        return result(HIP_ERROR_INVALID_HANDLE);
    const int rc = emu_queue_wait(s->last);
    if (s->capture)
        emu_graph_release(s->capture);
    s->magic = 0;
    free(s);
    return result(rc);
}

API int hipStreamSynchronize(void *stream)
{
    ENTER();
    const struct stream *s = stream_of(stream);
    if (capturing(s))
        return result(HIP_ERROR_CAPTURE_UNSUPPORTED);
    submitted(&submissions.waits);
    return result(s ? emu_queue_wait(s->last) : HIP_ERROR_INVALID_HANDLE);
}

API int hipStreamQuery(void *stream)
{
    ENTER();
    const struct stream *s = stream_of(stream);
    if (!s)
        return result(HIP_ERROR_INVALID_HANDLE);
    if (emu_queue_done(s->last))
        return 0;
    emu_queue_start(s->last);
    return HIP_ERROR_NOT_READY;
}

/* All streams share one order, so what was recorded has been done already when later work begins. */
API int hipStreamWaitEvent(void *stream, void *event, unsigned flags)
{
    ENTER();
    (void)flags;
    return stream_of(stream) && event ? 0 : result(HIP_ERROR_INVALID_HANDLE);
}

API int hipDeviceSynchronize(void)
{
    ENTER();
    return result(emu_queue_wait(emu_queue_last()));
}

API int hipEventCreateWithFlags(void **event, unsigned flags)
{
    ENTER();
    (void)flags;
    struct event *e = calloc(1, sizeof *e);
    if (!e)
        return result(HIP_ERROR_OUT_OF_MEMORY);
    e->magic = EVENT_MAGIC;
    *event = e;
    return 0;
}

API int hipEventCreate(void **event)
{
    ENTER();
    return hipEventCreateWithFlags(event, 0);
}

static struct event *event_of(void *p)
{
    struct event *e = p;
    return e && e->magic == EVENT_MAGIC ? e : NULL;
}

API int hipEventDestroy(void *event)
{
    struct event *e = event_of(event);
    if (!e)
        return result(HIP_ERROR_INVALID_HANDLE);
    emu_queue_wait(e->number); /* its mark writes into it */
    e->magic = 0;
    free(e);
    return 0;
}

API int hipEventRecord(void *event, void *stream)
{
    ENTER();
    struct event *e = event_of(event);
    struct stream *s = stream_of(stream);
    if (!e || !s)
        return result(HIP_ERROR_INVALID_HANDLE);
    if (capturing(s))
        return result(HIP_ERROR_CAPTURE_UNSUPPORTED);
    const int rc = queued(s, emu_queue_mark(&e->when));
    e->number = rc ? e->number : s->last;
    return rc;
}

API int hipEventSynchronize(void *event)
{
    ENTER();
    const struct event *e = event_of(event);
    return result(e ? emu_queue_wait(e->number) : HIP_ERROR_INVALID_HANDLE);
}

API int hipEventQuery(void *event)
{
    ENTER();
    const struct event *e = event_of(event);
    if (!e)
        return result(HIP_ERROR_INVALID_HANDLE);
    if (emu_queue_done(e->number))
        return 0;
    emu_queue_start(e->number);
    return HIP_ERROR_NOT_READY;
}

API int hipEventElapsedTime(float *ms, void *start, void *stop)
{
    ENTER();
    const struct event *a = event_of(start), *b = event_of(stop);
    if (!a || !b || !a->number || !b->number)
        return result(HIP_ERROR_INVALID_HANDLE);
    if (!emu_queue_done(a->number) || !emu_queue_done(b->number))
        return HIP_ERROR_NOT_READY;
    *ms = (float)(b->when - a->when);
    return 0;
}

/* ---- modules ---- */

API int hipModuleLoadData(void **module, const void *image)
{
    ENTER_AS(HIP_ERROR_NO_BINARY);
    struct module *m = NULL;
    const int rc = image ? emu_module_load(&m, image) : HIP_ERROR_INVALID_VALUE;
    *module = m;
    return result(rc);
}

API int hipModuleUnload(void *module)
{
    const int rc = emu_queue_wait(emu_queue_last());
    emu_module_free(module);
    return result(rc);
}

API int hipModuleGetFunction(void **function, void *module, const char *name)
{
    ENTER_AS(HIP_ERROR_NOT_FOUND);
    struct module *m = module;
    for (int i = 0; m && i < m->n_kernels; i++)
        if (strcmp(m->kernels[i].name, name) == 0) {
            *function = &m->kernels[i];
            return 0;
        }
    return result(HIP_ERROR_NOT_FOUND);
}

/* What the compiler may want beside the arguments. */
static uint32_t hidden_value(const struct launch *l, const char *kind)
{
    static const char *const sides[] = {"x", "y", "z"};
    char name[40];
    for (int i = 0; i < 3; i++) {
        snprintf(name, sizeof name, "hidden_block_count_%s", sides[i]);
        if (strcmp(kind, name) == 0)
            return l->grid[i];
        snprintf(name, sizeof name, "hidden_group_size_%s", sides[i]);
        if (strcmp(kind, name) == 0)
            return l->block[i];
    }
    return strcmp(kind, "hidden_grid_dims") == 0 ? 3 : 0;
}

static void fill_arguments(struct launch *l, void **params)
{
    const struct kernel *k = l->kernel;
    int given = 0;
    for (int i = 0; i < k->n_args; i++) {
        const struct kernel_arg *a = &k->args[i];
        if (!a->hidden[0]) {
            memcpy(l->kernarg + a->offset, params[given++], a->size);
        } else {
            const uint32_t value = hidden_value(l, a->hidden);
            memcpy(l->kernarg + a->offset, &value, a->size < 4 ? a->size : 4);
        }
    }
}

/* `extra`: HIP_LAUNCH_PARAM_BUFFER_POINTER (1), address, HIP_LAUNCH_PARAM_BUFFER_SIZE (2), address of the size, HIP_LAUNCH_PARAM_END (3). */
static int fill_from_buffer(struct launch *l, void **extra)
{
    const void *buffer = NULL;
    size_t bytes = 0;
    for (int i = 0; extra[i] != (void *)3; i += 2) {
        if (extra[i] == (void *)1)
            buffer = extra[i + 1];
        else if (extra[i] == (void *)2)
            bytes = *(const size_t *)extra[i + 1];
        else
            return -1;
    }
    if (!buffer || bytes > KERNARG_MAX)
        return -1;
    memcpy(l->kernarg, buffer, bytes);
    return 0;
}

API int hipModuleLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared_bytes,
                              void *stream, void **params, void **extra)
{
    const int lost = emu_queue_error();
    const int failed = lost ? lost : planned_failure(__func__, HIP_ERROR_LAUNCH_FAILURE);
    if (failed) {
        emu_queue_set_error(failed);
        return result(failed);
    }
    struct kernel *k = function;
    struct stream *s = stream_of(stream);
    if (!k || !s)
        return result(HIP_ERROR_INVALID_HANDLE);
    const uint64_t threads = (uint64_t)bx * by * bz;
    if (!gx || !gy || !gz || !threads || threads > k->max_threads || gy > 65535 || gz > 65535)
        return invalid("launch with a grid or workgroup that the kernel does not allow");
    if (k->kernarg_bytes > KERNARG_MAX || (k->n_args && !params == !extra))
        return invalid("launch without arguments, or with both kinds");
    struct launch l = {.kernel = k, .grid = {gx, gy, gz}, .block = {bx, by, bz}, .dynamic_lds = shared_bytes};
    memset(l.kernarg, 0, sizeof l.kernarg);
    if (params)
        fill_arguments(&l, params);
    else if (extra && fill_from_buffer(&l, extra) != 0)
        return invalid("launch with an argument buffer that is not understood");
    if (s->capture)
        return emu_graph_add(s->capture, &l) == 0 ? 0 : result(HIP_ERROR_OUT_OF_MEMORY);
    submitted(&submissions.kernels);
    return queued(s, emu_queue_launch(&l));
}

/* ---- graphs ---- */

API struct emu_submissions emu_submissions(void)
{
    struct emu_submissions s = submissions;
    s.graphs_live = emu_graphs_live();
    return s;
}

static int graph_handle(void **out, uint32_t magic, struct graph *g)
{
    struct graph_handle *h = g ? calloc(1, sizeof *h) : NULL;
    *out = h;
    if (!h) {
        if (g)
            emu_graph_release(g);
        return result(HIP_ERROR_OUT_OF_MEMORY);
    }
    *h = (struct graph_handle){.magic = magic, .graph = g};
    return 0;
}

static struct graph *graph_of(void *p, uint32_t magic)
{
    const struct graph_handle *h = p;
    return h && h->magic == magic ? h->graph : NULL;
}

/* Released also when it is told to fail. */
static int destroy_graph(void *p, uint32_t magic)
{
    struct graph *g = graph_of(p, magic);
    if (!g)
        return result(HIP_ERROR_INVALID_VALUE);
    struct graph_handle *h = p;
    if (!emu_queue_done(h->last))
        emu_note_fault("a graph is destroyed while it is queued");
    emu_graph_release(g);
    h->magic = 0;
    free(h);
    return 0;
}

API int hipStreamBeginCapture(void *stream, int mode)
{
    ENTER();
    struct stream *s = stream_of(stream);
    if (!stream || !s || mode < 0 || mode > 2)
        return result(HIP_ERROR_INVALID_VALUE);
    if (s->capture)
        return result(HIP_ERROR_ILLEGAL_STATE);
    s->capture = emu_graph_new();
    return s->capture ? 0 : result(HIP_ERROR_OUT_OF_MEMORY);
}

API int hipStreamEndCapture(void *stream, void **graph)
{
    ENTER(); /* fails with the stream still captured: the worst case */
    struct stream *s = stream_of(stream);
    if (!s || !s->capture)
        return result(HIP_ERROR_ILLEGAL_STATE);
    struct graph *g = s->capture;
    s->capture = NULL;
    return graph_handle(graph, GRAPH_MAGIC, g);
}

API int hipGraphInstantiate(void **exec, void *graph, void *error_node, char *log, size_t log_bytes)
{
    ENTER_AS(HIP_ERROR_OUT_OF_MEMORY);
    (void)error_node;
    (void)log;
    (void)log_bytes;
    struct graph *g = graph_of(graph, GRAPH_MAGIC);
    return g ? graph_handle(exec, EXEC_MAGIC, emu_graph_instantiate(g)) : result(HIP_ERROR_INVALID_VALUE);
}

API int hipGraphDestroy(void *graph)
{
    const int failed = planned_failure(__func__, HIP_ERROR_UNKNOWN), rc = destroy_graph(graph, GRAPH_MAGIC);
    return failed ? result(failed) : rc;
}

API int hipGraphExecDestroy(void *exec)
{
    const int failed = planned_failure(__func__, HIP_ERROR_UNKNOWN), rc = destroy_graph(exec, EXEC_MAGIC);
    return failed ? result(failed) : rc;
}

API int hipGraphLaunch(void *exec, void *stream)
{
    ENTER_AS(HIP_ERROR_UNKNOWN);
    struct graph *g = graph_of(exec, EXEC_MAGIC);
    struct stream *s = stream_of(stream);
    if (!g || !s)
        return result(HIP_ERROR_INVALID_VALUE);
    if (capturing(s))
        return result(HIP_ERROR_CAPTURE_UNSUPPORTED);
    submitted(&submissions.graphs);
    const int rc = queued(s, emu_graph_launch(g));
    ((struct graph_handle *)exec)->last = s->last;
    return rc;
}

/* ---- errors ---- */

API int hipGetLastError(void)
{
    const int code = last_error;
    last_error = 0;
    return code;
}

API int hipPeekAtLastError(void)
{
    return last_error;
}

static const struct {
    int code;
    const char *name, *text;
} errors[] = {
    {HIP_SUCCESS, "hipSuccess", "no error"},
    {HIP_ERROR_INVALID_VALUE, "hipErrorInvalidValue", "invalid argument"},
    {HIP_ERROR_OUT_OF_MEMORY, "hipErrorOutOfMemory", "out of memory"},
    {HIP_ERROR_NO_DEVICE, "hipErrorNoDevice", "no ROCm-capable device is detected"},
    {HIP_ERROR_INVALID_DEVICE, "hipErrorInvalidDevice", "invalid device ordinal"},
    {HIP_ERROR_INVALID_IMAGE, "hipErrorInvalidImage", "device kernel image is invalid"},
    {HIP_ERROR_NO_BINARY, "hipErrorNoBinaryForGpu", "no kernel image is available for execution on the device"},
    {HIP_ERROR_INVALID_HANDLE, "hipErrorInvalidHandle", "invalid resource handle"},
    {HIP_ERROR_NOT_FOUND, "hipErrorNotFound", "named symbol not found"},
    {HIP_ERROR_NOT_READY, "hipErrorNotReady", "device not ready"},
    {HIP_ERROR_ILLEGAL_ADDRESS, "hipErrorIllegalAddress", "an illegal memory access was encountered"},
    {HIP_ERROR_LAUNCH_FAILURE, "hipErrorLaunchFailure", "unspecified launch failure"},
    {HIP_ERROR_NOT_SUPPORTED, "hipErrorNotSupported", "operation not supported"},
    {HIP_ERROR_UNKNOWN, "hipErrorUnknown", "unknown error"},
};

API const char *hipGetErrorString(int code)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code)
            return errors[i].text;
    return "unknown error";
}

API const char *hipGetErrorName(int code)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code)
            return errors[i].name;
    return "hipErrorUnknown";
}
