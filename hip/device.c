#include "hip/device.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "engine/memory.h"
#include "hip/bundle.h"
#include "hip/graph.h"
#include "hip/runtime.h"

enum {
    PIECES = 4,                   /* of HIP_STAGE_BYTES each: while the GPU reads some, the next is filled */
    READ_BYTES = HIP_STAGE_BYTES, /* what comes back goes through its own room, so that it never waits for the ring */
    STAGE_ALIGN = 64,
    CHECKED_BYTES = 1 << 20, /* allocations from here on are compared with what is free first */
};

/* One piece of the pinned ring. Copies are queued from it until it is full; then `event` says when the GPU has read them all. */
struct piece {
    unsigned char *host;
    size_t used;
    hip_event event;
    bool pending;
};

struct kernel_info {
    const char *name;
    unsigned threads;
};

static const struct kernel_info kernels[] = {
#define KERNEL_ENTRY(name, params, threads) {#name, threads},
#include "hip/kernels/list.h"
#undef KERNEL_ENTRY
    {NULL, 0},
};

struct hip_device {
    struct hip_runtime rt;
    struct hip_device_info info;
    int ordinal;
    hip_stream stream;
    hip_module module;
    hip_function functions[K_COUNT + 1];
    struct piece ring[PIECES];
    int piece;                 /* being filled */
    unsigned char *read_room;  /* [READ_BYTES], pinned */
    struct hip_graphs *graphs; /* NULL: off */
    bool recording;            /* launches are added to its list */
    struct error error;        /* sticky, "" = none */
    bool lost;
};

/* ---- errors ---- */

bool hip_device_failed(const struct hip_device *d)
{
    return d->error.text[0] != '\0';
}

const char *hip_device_error(const struct hip_device *d)
{
    return d->error.text;
}

void hip_device_fail(struct hip_device *d, const char *format, ...)
{
    if (hip_device_failed(d))
        return;
    va_list args;
    va_start(args, format);
    error_vset(&d->error, format, args);
    va_end(args);
}

/* After these the context is gone; the runtime answers every later call with an error, or not at all. */
static bool is_fatal(int error)
{
    return error == HIP_DEINITIALIZED || error == HIP_NOT_INITIALIZED || error == HIP_UNKNOWN ||
           (error >= HIP_ILLEGAL_ADDRESS && error <= HIP_LAUNCH_FAILURE);
}

/* True when a runtime call went well. Otherwise the sticky error says what `what` was about. */
static bool ok(struct hip_device *d, int rc, const char *what)
{
    if (rc == HIP_OK)
        return true;
    struct error why = {""};
    hip_runtime_explain(&d->rt, rc, &why);
    hip_device_fail(d, "GPU %d%s%s, %s: %s", d->ordinal, d->info.arch[0] ? " " : "", d->info.arch, what, why.text);
    if (is_fatal(rc))
        d->lost = true;
    return false;
}

/* Waiting failed: what was queued has failed on the GPU itself, and nothing that follows can be trusted. */
static bool ok_wait(struct hip_device *d, int rc, const char *what)
{
    if (ok(d, rc, what))
        return true;
    d->lost = true;
    return false;
}

/* The runtime's current device belongs to the thread, and opening and running are done by different ones. Every step begins with a write, which comes
 * by here; launches rely on that. */
static bool ready(struct hip_device *d)
{
    return !hip_device_failed(d) && ok(d, d->rt.hipSetDevice(d->ordinal), "choosing the device");
}

/* ---- work ---- */

static int submit(void *owner, hip_stream stream, const struct hip_launch *l, const void *params)
{
    struct hip_device *d = owner;
    void *args[1];
    memcpy(args, &params, sizeof params);
    return d->rt.hipModuleLaunchKernel(d->functions[l->kernel], l->gx, l->gy, l->gz, kernels[l->kernel].threads, 1, 1, 0, stream, args, NULL);
}

/* Launches that were recorded go out before anything else is queued or waited for; those of a step that has failed are dropped. */
static void flush(struct hip_device *d)
{
    if (!d->graphs)
        return;
    if (hip_device_failed(d)) {
        hip_graphs_drop(d->graphs);
        return;
    }
    const struct hip_flushed f = hip_graphs_flush(d->graphs, d->stream);
    if (f.rc != HIP_OK)
        ok(d, f.rc, f.kernel < 0 ? "replaying a step" : kernels[f.kernel].name);
    d->recording = d->recording && !hip_graphs_failure(d->graphs);
}

void hip_device_launch(struct hip_device *d, enum hip_kernel kernel, unsigned gx, unsigned gy, unsigned gz, const void *params, size_t params_bytes)
{
    if (hip_device_failed(d) || gx == 0 || gy == 0 || gz == 0)
        return;
    const uint64_t threads = (uint64_t)gx * kernels[kernel].threads;
    if (threads > UINT32_MAX || gy > UINT16_MAX || gz > UINT16_MAX) {
        hip_device_fail(d, "%s: a grid of %u x %u x %u workgroups is too large", kernels[kernel].name, gx, gy, gz);
        return;
    }
    /* params_bytes is only for the record: the code object knows the size, and the runtime copies the struct before it returns. */
    const struct hip_launch l = {.kernel = kernel, .gx = gx, .gy = gy, .gz = gz, .params_bytes = (uint32_t)params_bytes};
    if (d->recording) {
        if (hip_graphs_add(d->graphs, &l, params) == 0)
            return;
        flush(d); /* out of memory: this one goes out alone, in its turn */
        if (hip_device_failed(d))
            return;
    }
    const int rc = submit(d, d->stream, &l, params);
    if (rc != HIP_OK)
        ok(d, rc, kernels[kernel].name);
}

/* ---- graphs ---- */

int hip_device_graphs_on(struct hip_device *d, struct error *err)
{
    if (d->graphs)
        return 0;
    return ready(d) ? hip_graphs_open(&d->graphs, &d->rt, submit, d, err) : error_set(err, "%s", d->error.text);
}

void hip_device_graphs_off(struct hip_device *d)
{
    if (!d->graphs)
        return;
    d->rt.hipSetDevice(d->ordinal);
    flush(d);
    d->recording = false;
    if (!d->lost)
        ok_wait(d, d->rt.hipStreamSynchronize(d->stream), "waiting for its work"); /* a graph may still run */
    hip_graphs_close(d->graphs);
    d->graphs = NULL;
}

void hip_device_repeats(struct hip_device *d, bool likely)
{
    if (!d->graphs)
        return;
    flush(d);
    d->recording = likely && !hip_graphs_failure(d->graphs);
}

struct hip_device_graphs hip_device_graphs(const struct hip_device *d)
{
    if (!d->graphs)
        return (struct hip_device_graphs){0};
    const struct hip_graph_counts c = hip_graphs_counts(d->graphs);
    const char *failure = hip_graphs_failure(d->graphs);
    return (struct hip_device_graphs){.on = !failure, .failure = failure, .captured = c.captured, .replayed = c.replayed};
}

/* ---- opening ---- */

int hip_device_count(const char *library, struct error *err)
{
    struct hip_runtime rt;
    return hip_runtime_load(&rt, library, err) ? -1 : hip_runtime_start(&rt, err);
}

static void describe(struct hip_device *d)
{
    const struct hip_runtime *rt = &d->rt;
    struct hip_device_info *info = &d->info;
    int integrated = 0;
    snprintf(info->library, sizeof info->library, "%s", rt->library);
    snprintf(info->arch, sizeof info->arch, "%s", hip_runtime_arch(rt, d->ordinal).name);
    if (ok(d, rt->hipDeviceGetName(info->name, (int)sizeof info->name, d->ordinal), "asking for its name"))
        info->name[sizeof info->name - 1] = '\0';
    ok(d, rt->hipDeviceGetAttribute(&integrated, HIP_ATTR_INTEGRATED, d->ordinal), "asking whether it is integrated");
    ok(d, rt->hipDeviceGetAttribute(&info->compute_units, HIP_ATTR_COMPUTE_UNITS, d->ordinal), "asking for its compute units");
    ok(d, rt->hipDeviceGetAttribute(&info->wave_size, HIP_ATTR_WAVE_SIZE, d->ordinal), "asking for its wave size");
    ok(d, rt->hipRuntimeGetVersion(&info->runtime_version), "asking for the runtime's version");
    ok(d, rt->hipMemGetInfo(&info->memory_free, &info->memory_total), "asking for its memory");
    info->integrated = integrated != 0;
}

static void load_kernels(struct hip_device *d)
{
    if (hip_device_failed(d))
        return;
    const struct hip_bundle_list list = hip_bundle_list();
    if (!list.text[0]) {
        hip_device_fail(d, "this build holds no GPU kernels: build again with clang-19, lld-19 and clang-tools-19 (make run compiles kernels for the "
                           "GPUs it finds, make for all)");
        return;
    }
    const char *arch = d->info.arch[0] ? d->info.arch : "of unknown kind";
    int rc = d->rt.hipModuleLoadData(&d->module, hip_bundle_start);
    if (rc == HIP_NO_BINARY_FOR_GPU || rc == HIP_INVALID_IMAGE || rc == HIP_INVALID_VALUE) {
        const char *text = d->rt.hipGetErrorString(rc);
        hip_device_fail(
            d,
            "GPU %d is %s, for which there are no kernels (%s, HIP error %d); there are some for %s. A close relative may run as one of these "
            "with HSA_OVERRIDE_GFX_VERSION, for instance 11.5.0",
            d->ordinal, arch, text ? text : "no text", rc, list.text);
        return;
    }
    if (!ok(d, rc, "loading the kernels"))
        return;
    for (int i = 0; i < K_COUNT; i++) {
        rc = d->rt.hipModuleGetFunction(&d->functions[i], d->module, kernels[i].name);
        if (rc != HIP_OK) {
            hip_device_fail(d, "GPU %d (%s): the code has no kernel %s (HIP error %d): build again from clean sources", d->ordinal, arch,
                            kernels[i].name, rc);
            return;
        }
    }
}

static unsigned char *pinned(struct hip_device *d, size_t bytes)
{
    void *p = NULL;
    return ok(d, d->rt.hipHostMalloc(&p, bytes, 0), "allocating pinned memory") ? p : NULL;
}

static void open_queue(struct hip_device *d)
{
    const struct hip_runtime *rt = &d->rt;
    if (hip_device_failed(d) || !ok(d, rt->hipStreamCreateWithFlags(&d->stream, HIP_STREAM_NON_BLOCKING), "making its queue"))
        return;
    for (int i = 0; i < PIECES; i++) {
        d->ring[i].host = pinned(d, HIP_STAGE_BYTES);
        if (!d->ring[i].host || !ok(d, rt->hipEventCreateWithFlags(&d->ring[i].event, HIP_EVENT_DISABLE_TIMING), "making an event"))
            return;
    }
    d->read_room = pinned(d, READ_BYTES);
}

int hip_device_open(struct hip_device **out, const char *library, int ordinal, struct error *err)
{
    *out = NULL;
    struct hip_device *d = alloc_array(1, sizeof *d);
    if (!d)
        return error_set(err, "out of memory for a GPU");
    d->ordinal = ordinal;
    int n;
    if (hip_runtime_load(&d->rt, library, err) || (n = hip_runtime_start(&d->rt, err)) < 0)
        goto fail;
    if (n == 0) {
        error_set(
            err,
            "the HIP runtime (%s) finds no GPU: is the amdgpu driver loaded, and may this user open /dev/kfd and /dev/dri/renderD* (groups render "
            "and video)?",
            d->rt.library);
        goto fail;
    }
    if (ordinal < 0 || ordinal >= n) {
        error_set(err, "there is no GPU %d: the HIP runtime finds %d, numbered from 0", ordinal, n);
        goto fail;
    }
    if (ready(d))
        describe(d);
    if (!hip_device_failed(d) && d->info.wave_size != 32)
        hip_device_fail(d, "GPU %d (%s) runs waves of %d threads: the kernels need 32 (RDNA)", ordinal, d->info.name, d->info.wave_size);
    load_kernels(d);
    open_queue(d);
    if (hip_device_failed(d)) {
        error_set(err, "%s", d->error.text);
        goto fail;
    }
    *out = d;
    return 0;
fail:
    hip_device_close(d);
    return -1;
}

/* Errors of releasing are of no use to anybody. */
void hip_device_close(struct hip_device *d)
{
    if (!d)
        return;
    const struct hip_runtime *rt = &d->rt;
    if (d->stream) {
        rt->hipSetDevice(d->ordinal);
        flush(d);
        rt->hipStreamSynchronize(d->stream); /* nothing may still use what is released now */
    }
    hip_graphs_close(d->graphs);
    for (int i = 0; i < PIECES; i++) {
        if (d->ring[i].event)
            rt->hipEventDestroy(d->ring[i].event);
        if (d->ring[i].host)
            rt->hipHostFree(d->ring[i].host);
    }
    if (d->read_room)
        rt->hipHostFree(d->read_room);
    if (d->module)
        rt->hipModuleUnload(d->module);
    if (d->stream)
        rt->hipStreamDestroy(d->stream);
    free(d);
}

const struct hip_device_info *hip_device_info(const struct hip_device *d)
{
    return &d->info;
}

/* ---- memory ---- */

size_t hip_device_memory_free(struct hip_device *d)
{
    size_t left = 0, total = 0;
    if (!ready(d) || !ok(d, d->rt.hipMemGetInfo(&left, &total), "asking for its free memory"))
        return 0;
    const uint64_t machine = d->info.integrated ? memory_available() : 0;
    return machine && machine < left ? (size_t)machine : left;
}

/* The GPU's share of an APU's memory is bounded by the driver, the rest by what other programs left: the message says which it was. */
static int check_room(struct hip_device *d, size_t bytes, struct error *err)
{
    size_t left = 0, total = 0;
    if (bytes < CHECKED_BYTES)
        return 0;
    if (!ok(d, d->rt.hipMemGetInfo(&left, &total), "asking for its free memory"))
        return error_set(err, "%s", d->error.text);
    if (bytes > left)
        return error_set(
            err,
            "the GPU has %s free of the %s that it may use, and %s more are needed: lower context or kv-memory, raise the kernel parameter "
            "ttm.pages_limit (4 KiB pages) where the GPU shares the machine's memory, or use device cpu",
            memory_text(left).text, memory_text(total).text, memory_text(bytes).text);
    const uint64_t machine = d->info.integrated ? memory_available() : 0;
    if (machine && bytes > machine)
        return error_set(err,
                         "the machine has %s of memory available, which the GPU shares, and %s more are needed: close programs, lower context or "
                         "kv-memory, or use a smaller model",
                         memory_text(machine).text, memory_text(bytes).text);
    return 0;
}

/* An allocation that fails is the caller's affair, who may ask for less: it does not make the device's error sticky. */
void *hip_device_alloc(struct hip_device *d, size_t bytes, struct error *err)
{
    void *p = NULL;
    if (!ready(d)) {
        error_set(err, "%s", d->error.text);
        return NULL;
    }
    if (check_room(d, bytes, err))
        return NULL;
    int rc = d->rt.hipMalloc(&p, bytes ? bytes : 1);
    if (rc == HIP_OK && p)
        return p;
    struct error why = {""};
    hip_runtime_explain(&d->rt, rc, &why);
    error_set(err, "GPU %d, allocating %s: %s", d->ordinal, memory_text(bytes).text, why.text);
    if (is_fatal(rc))
        ok(d, rc, "allocating memory");
    return NULL;
}

void hip_device_free(struct hip_device *d, void *p)
{
    if (!p)
        return;
    d->rt.hipSetDevice(d->ordinal);
    flush(d);
    if (!d->lost)
        ok_wait(d, d->rt.hipStreamSynchronize(d->stream), "waiting for its work"); /* queued work may still use it */
    if (d->graphs)
        hip_graphs_forget(d->graphs); /* what is allocated next may lie there */
    d->rt.hipFree(p);
}

/* ---- copies ---- */

/* Moves on to the next piece and waits until the GPU has read what it held. */
static bool next_piece(struct hip_device *d)
{
    struct piece *full = &d->ring[d->piece];
    if (!ok(d, d->rt.hipEventRecord(full->event, d->stream), "recording an event"))
        return false;
    full->pending = true;
    d->piece = (d->piece + 1) % PIECES;
    struct piece *p = &d->ring[d->piece];
    if (p->pending && !ok_wait(d, d->rt.hipEventSynchronize(p->event), "waiting for a copy"))
        return false;
    p->pending = false;
    p->used = 0;
    return true;
}

/* Everything queued is done: all pieces are free. */
static void queue_idle(struct hip_device *d)
{
    if (d->graphs)
        hip_graphs_idle(d->graphs);
    for (int i = 0; i < PIECES; i++) {
        d->ring[i].pending = false;
        d->ring[i].used = 0;
    }
}

void *hip_device_stage(struct hip_device *d, size_t bytes)
{
    flush(d);
    if (!ready(d))
        return NULL;
    if (bytes > HIP_STAGE_BYTES) {
        hip_device_fail(d, "a transfer of %zu bytes at once, more than %d", bytes, HIP_STAGE_BYTES);
        return NULL;
    }
    if (bytes > HIP_STAGE_BYTES - d->ring[d->piece].used && !next_piece(d))
        return NULL;
    return d->ring[d->piece].host + d->ring[d->piece].used;
}

void hip_device_send(struct hip_device *d, void *dst, const void *staged, size_t bytes)
{
    struct piece *p = &d->ring[d->piece];
    flush(d);
    if (hip_device_failed(d) || bytes == 0)
        return;
    const size_t room = (bytes + STAGE_ALIGN - 1) / STAGE_ALIGN * STAGE_ALIGN;
    p->used += room < HIP_STAGE_BYTES - p->used ? room : HIP_STAGE_BYTES - p->used;
    ok(d, d->rt.hipMemcpyAsync(dst, staged, bytes, HIP_HOST_TO_DEVICE, d->stream), "a copy to it");
}

void hip_device_write(struct hip_device *d, void *dst, const void *src, size_t bytes)
{
    while (bytes > 0 && !hip_device_failed(d)) {
        const size_t n = bytes < HIP_STAGE_BYTES ? bytes : HIP_STAGE_BYTES;
        void *room = hip_device_stage(d, n);
        if (!room)
            return;
        memcpy(room, src, n);
        hip_device_send(d, dst, room, n);
        dst = (char *)dst + n;
        src = (const char *)src + n;
        bytes -= n;
    }
}

void hip_device_copy(struct hip_device *d, void *dst, const void *src, size_t bytes)
{
    flush(d);
    if (bytes > 0 && ready(d))
        ok(d, d->rt.hipMemcpyAsync(dst, src, bytes, HIP_DEVICE_TO_DEVICE, d->stream), "a copy in its memory");
}

void hip_device_zero(struct hip_device *d, void *dst, size_t bytes)
{
    flush(d);
    if (bytes > 0 && ready(d))
        ok(d, d->rt.hipMemsetAsync(dst, 0, bytes, d->stream), "clearing memory");
}

int hip_device_gather(struct hip_device *d, void *dst, const struct hip_part *parts, size_t n, struct error *err)
{
    size_t i = 0, done = 0; /* bytes of part i */
    flush(d);
    while (i < n && ready(d)) {
        size_t used = 0;
        while (i < n && used < READ_BYTES) {
            const size_t left = parts[i].bytes - done, take = left < READ_BYTES - used ? left : READ_BYTES - used;
            if (take && !ok(d, d->rt.hipMemcpyAsync(d->read_room + used, (const char *)parts[i].src + done, take, HIP_DEVICE_TO_HOST, d->stream),
                            "a copy from it"))
                break;
            used += take;
            done = take == left ? 0 : done + take;
            i += take == left;
        }
        if (used == 0 || hip_device_failed(d) || !ok_wait(d, d->rt.hipStreamSynchronize(d->stream), "waiting for its work"))
            break;
        queue_idle(d);
        memcpy(dst, d->read_room, used);
        dst = (char *)dst + used;
    }
    return hip_device_failed(d) ? error_set(err, "%s", d->error.text) : 0;
}

int hip_device_read(struct hip_device *d, void *dst, const void *src, size_t bytes, struct error *err)
{
    return hip_device_gather(d, dst, &(struct hip_part){src, bytes}, 1, err);
}

/* ---- waiting ---- */

/* The queue is usable again after an error that came from the host's side, such as a bad argument. Work that failed on the GPU has taken the context
 * with it. */
int hip_device_sync(struct hip_device *d, struct error *err)
{
    flush(d);
    if (d->lost)
        return error_set(err, "%s", d->error.text);
    d->rt.hipSetDevice(d->ordinal);
    if (ok_wait(d, d->rt.hipStreamSynchronize(d->stream), "waiting for its work"))
        queue_idle(d);
    if (!hip_device_failed(d))
        return 0;
    error_set(err, "%s", d->error.text);
    if (!d->lost)
        d->error.text[0] = '\0';
    return -1;
}
