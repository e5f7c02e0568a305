/* libamdhip64-shim.so: the part of AMD's HIP runtime that hip/runtime.h names, over the shim (gpu_shim.h) and the project's own kernels.
 *
 * A module is any image: functions are found by name in hip/kernels/list.h, and the code that runs is the kernels' source compiled for this CPU.
 * Work is queued and runs when somebody waits (or the queue is long), so that a host buffer reused too early, or a result read too early, shows.
 *
 *   SHIM_DEVICES=0    no device            SHIM_NAME, SHIM_ARCH    what the device says it is
 *   SHIM_MEMORY=n     bytes of memory      SHIM_NOW=1              run work at once: shorter backtraces
 *   SHIM_SKIP=kernel  that kernel does nothing: a broken GPU        SHIM_FAIL=kernel  its launch makes the next wait fail with 719
 *   SHIM_LOST=path    as soon as that file exists every wait fails with 719: a GPU lost while it serves */
#include "tests/hip/gpu_shim.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

using shim::function;
using shim::functions;

namespace {

/* ---- errors ---- */

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101, NOT_FOUND = 500, LAUNCH_FAILURE = 719, UNSUPPORTED = 801 };

const char *setting(const char *name, const char *otherwise)
{
    const char *text = getenv(name);
    return text && text[0] ? text : otherwise;
}

bool is_set(const char *name, const char *value)
{
    return strcmp(setting(name, ""), value) == 0;
}

/* ---- memory: exactly as large as asked, so that AddressSanitizer sees the first byte beyond; NaN until written ---- */

std::recursive_mutex lock;
std::map<void *, size_t> blocks;
size_t used;

size_t memory_total()
{
    return (size_t)strtoull(setting("SHIM_MEMORY", "51539607552"), nullptr, 10);
}

int block_new(void **p, size_t bytes)
{
    std::lock_guard<std::recursive_mutex> hold(lock);
    if (!p || bytes == 0)
        return INVALID_VALUE;
    if (bytes > memory_total() - used || posix_memalign(p, 4096, bytes) != 0)
        return OUT_OF_MEMORY;
    memset(*p, 0xFF, bytes);
    blocks[*p] = bytes;
    used += bytes;
    return OK;
}

int block_free(void *p)
{
    std::lock_guard<std::recursive_mutex> hold(lock);
    if (!p)
        return OK;
    const auto at = blocks.find(p);
    if (at == blocks.end())
        return INVALID_VALUE;
    used -= at->second;
    blocks.erase(at);
    free(p);
    return OK;
}

/* ---- the queue: one for all streams, in order ---- */

enum { LONG_QUEUE = 512 };
std::vector<std::function<void()>> queue;
int queue_error; /* until the next wait */

int drain()
{
    std::lock_guard<std::recursive_mutex> hold(lock);
    std::vector<std::function<void()>> work;
    work.swap(queue);
    for (const auto &item : work)
        item();
    const int error = queue_error;
    queue_error = OK;
    const char *lost = setting("SHIM_LOST", "");
    return lost[0] && access(lost, F_OK) == 0 ? LAUNCH_FAILURE : error;
}

int enqueue(std::function<void()> item)
{
    std::lock_guard<std::recursive_mutex> hold(lock);
    queue.push_back(std::move(item));
    if (queue.size() > LONG_QUEUE || is_set("SHIM_NOW", "1")) {
        const int error = drain();
        if (error)
            queue_error = error;
    }
    return OK;
}

} // namespace

/* ---- the interface ---- */

#pragma GCC visibility push(default)
extern "C" {

int hipInit(unsigned flags)
{
    return flags ? INVALID_VALUE : OK;
}

int hipRuntimeGetVersion(int *version)
{
    *version = 60443484; /* 6.4.3 */
    return OK;
}

int hipGetDeviceCount(int *count)
{
    *count = atoi(setting("SHIM_DEVICES", "1"));
    return *count > 0 ? OK : NO_DEVICE;
}

int hipSetDevice(int ordinal)
{
    return ordinal >= 0 && ordinal < atoi(setting("SHIM_DEVICES", "1")) ? OK : INVALID_DEVICE;
}

int hipDeviceGetName(char *name, int len, int ordinal)
{
    if (len < 1 || ordinal < 0)
        return INVALID_VALUE;
    snprintf(name, (size_t)len, "%s", setting("SHIM_NAME", "host shim"));
    return OK;
}

int hipDeviceGetAttribute(int *value, int attribute, int ordinal)
{
    (void)ordinal;
    switch (attribute) {
    case 16: /* integrated */
        *value = 1;
        return OK;
    case 63: /* compute units, in workgroup processor mode two to one */
        *value = 4;
        return OK;
    case 87: /* wave size */
        *value = 32;
        return OK;
    case 74: /* SHARED memory of a workgroup */
        *value = 65536;
        return OK;
    case 56: /* threads of a workgroup */
        *value = 1024;
        return OK;
    default:
        return INVALID_VALUE;
    }
}

/* hipDeviceProp_tR0600: only the name of the instruction set. */
int hipGetDevicePropertiesR0600(void *properties, int ordinal)
{
    if (ordinal < 0)
        return INVALID_DEVICE;
    snprintf((char *)properties + 1160, 256, "%s", setting("SHIM_ARCH", "gfx1152"));
    return OK;
}

int hipMemGetInfo(size_t *free_bytes, size_t *total)
{
    std::lock_guard<std::recursive_mutex> hold(lock);
    *total = memory_total();
    *free_bytes = *total - used;
    return OK;
}

int hipMalloc(void **p, size_t bytes)
{
    return block_new(p, bytes);
}

int hipFree(void *p) /* waits, as AMD's does */
{
    const int error = drain();
    return error ? error : block_free(p);
}

int hipHostMalloc(void **p, size_t bytes, unsigned flags)
{
    (void)flags;
    return block_new(p, bytes);
}

int hipHostFree(void *p)
{
    const int error = drain();
    return error ? error : block_free(p);
}

int hipMemcpyAsync(void *dst, const void *src, size_t bytes, int kind, void *stream)
{
    (void)stream;
    if (kind < 1 || kind > 4 || ((!dst || !src) && bytes > 0))
        return INVALID_VALUE;
    return enqueue([=] { memmove(dst, src, bytes); });
}

int hipMemsetAsync(void *dst, int value, size_t bytes, void *stream)
{
    (void)stream;
    if (!dst && bytes > 0)
        return INVALID_VALUE;
    return enqueue([=] { memset(dst, value, bytes); });
}

int hipStreamCreateWithFlags(void **stream, unsigned flags)
{
    (void)flags;
    *stream = malloc(1);
    return *stream ? OK : OUT_OF_MEMORY;
}

int hipStreamDestroy(void *stream)
{
    const int error = drain();
    free(stream);
    return error;
}

int hipStreamSynchronize(void *stream)
{
    (void)stream;
    return drain();
}

int hipDeviceSynchronize(void)
{
    return drain();
}

int hipEventCreateWithFlags(void **event, unsigned flags)
{
    (void)flags;
    *event = calloc(1, sizeof(double));
    return *event ? OK : OUT_OF_MEMORY;
}

int hipEventDestroy(void *event)
{
    const int error = drain();
    free(event);
    return error;
}

int hipEventRecord(void *event, void *stream)
{
    (void)stream;
    return enqueue([=] {
        timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        *(double *)event = (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
    });
}

int hipEventSynchronize(void *event)
{
    (void)event;
    return drain();
}

int hipEventElapsedTime(float *ms, void *from, void *to)
{
    const int error = drain();
    *ms = (float)(*(double *)to - *(double *)from);
    return error;
}

int hipModuleLoadData(void **module, const void *image)
{
    *module = (void *)image;
    return image ? OK : INVALID_VALUE;
}

int hipModuleUnload(void *module)
{
    (void)module;
    return drain();
}

int hipModuleGetFunction(void **result, void *module, const char *name)
{
    (void)module;
    for (const function *f = functions; f->name; f++)
        if (strcmp(f->name, name) == 0) {
            *result = (void *)f;
            return OK;
        }
    return NOT_FOUND;
}

int hipModuleLaunchKernel(void *handle, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared_bytes, void *stream,
                          void **params, void **extra)
{
    (void)stream;
    const function *f = (const function *)handle;
    if (!f || !params || extra || shared_bytes || gx < 1 || gy < 1 || gz < 1 || gx > 0x7fffffff || gy > 65535 || gz > 65535)
        return INVALID_VALUE;
    if (bx != f->threads || by != 1 || bz != 1) {
        fprintf(stderr, "shim: kernel %s has workgroups of %u threads, launched with %u x %u x %u\n", f->name, f->threads, bx, by, bz);
        return INVALID_VALUE;
    }
    if (is_set("SHIM_FAIL", f->name))
        return enqueue([] { queue_error = LAUNCH_FAILURE; });
    if (is_set("SHIM_SKIP", f->name))
        return OK;
    const std::string copy((const char *)params[0], f->params_bytes);
    return enqueue([=] {
        const uint32_t grid[3] = {gx, gy, gz};
        alignas(16) unsigned char block[4096];
        memcpy(block, copy.data(), copy.size());
        shim::launch(f->name, grid, f->threads, f->call, block);
    });
}

int hipGetLastError(void)
{
    return OK;
}

const char *hipGetErrorString(int error)
{
    switch (error) {
    case OK:
        return "no error";
    case INVALID_VALUE:
        return "invalid argument";
    case OUT_OF_MEMORY:
        return "out of memory";
    case NO_DEVICE:
        return "no ROCm-capable device is detected";
    case INVALID_DEVICE:
        return "invalid device ordinal";
    case NOT_FOUND:
        return "named symbol not found";
    case LAUNCH_FAILURE:
        return "unspecified launch failure";
    default:
        return "unknown error";
    }
}

} // extern "C"
#pragma GCC visibility pop
