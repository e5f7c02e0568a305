#include "hip/runtime.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- loading ---- */

static void *try_load(struct hip_runtime *rt, const char *name, struct error *why)
{
    void *handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        const char *text = dlerror();
        error_set(why, "%s", text ? text : name);
        return NULL;
    }
    snprintf(rt->library, sizeof rt->library, "%s", name);
    return handle;
}

/* dlsym gives object pointers; POSIX promises that they hold functions. */
static int find(void *handle, const char *name, void *place)
{
    void *symbol = dlsym(handle, name);
    memcpy(place, &symbol, sizeof symbol);
    return symbol ? 0 : -1;
}

int hip_runtime_load(struct hip_runtime *rt, const char *library, struct error *err)
{
    static const char *const usual[] = {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so", "/opt/rocm/lib/libamdhip64.so"};
    struct error why = {""};
    void *handle = NULL;
    memset(rt, 0, sizeof *rt);
    if (!library || !library[0])
        library = getenv("BEDSIDE_HIP_LIBRARY");
    if (library && library[0]) {
        if (!(handle = try_load(rt, library, &why)))
            return error_set(err, "the HIP runtime library does not load: %s", why.text);
    } else {
        /* The first name that is there at all tells why it does not load; the last would only say that it is not found. */
        struct error first = {""};
        for (size_t i = 0; i < sizeof usual / sizeof *usual && !handle; i++) {
            handle = try_load(rt, usual[i], &why);
            if (!handle && !first.text[0] && !strstr(why.text, "No such file"))
                first = why;
        }
        if (!handle && first.text[0])
            return error_set(err, "the HIP runtime library does not load: %s", first.text);
        if (!handle)
            return error_set(err, "no HIP runtime library (libamdhip64) is installed; an AMD GPU needs one (bedside doctor says what is missing), or "
                                  "--hip-library names one that lies elsewhere");
    }
#define HIP_FIND(name, ...)                                                                                                                          \
    if (find(handle, #name, &rt->name))                                                                                                              \
        return error_set(err, "the HIP runtime library %s has no function %s: ROCm 5.2 or later is needed", rt->library, #name);
    HIP_FUNCTIONS(HIP_FIND)
    HIP_FIND(hipGetErrorString, )
#undef HIP_FIND
#define HIP_LOOK(name, ...)                                                                                                                          \
    if (find(handle, #name, &rt->name) && !rt->no_graphs)                                                                                            \
        rt->no_graphs = #name;
    HIP_GRAPH_FUNCTIONS(HIP_LOOK)
#undef HIP_LOOK
    find(handle, "hipGetDevicePropertiesR0600", &rt->hipGetDevicePropertiesR0600);
    return 0;
}

/* ---- what the numbers mean ---- */

static const char *remedy(int error)
{
    switch (error) {
    case HIP_OUT_OF_MEMORY:
        return "lower context or kv-memory, close programs, raise the kernel's limit for GPU memory (ttm.pages_limit), or use device cpu";
    case HIP_NO_DEVICE:
    case HIP_INVALID_DEVICE:
        return "no usable AMD GPU: is the amdgpu driver loaded, and may this user open /dev/kfd and /dev/dri/renderD* (groups render and video)?";
    case HIP_INVALID_IMAGE:
    case HIP_NO_BINARY_FOR_GPU:
        return "there is no code for this GPU";
    case HIP_ILLEGAL_ADDRESS:
    case HIP_LAUNCH_TIMEOUT:
    case HIP_ASSERT:
    case HIP_LAUNCH_FAILURE:
        return "the GPU has stopped this program's work; restart it, and look at the kernel's log (dmesg) for amdgpu";
    default:
        return NULL;
    }
}

void hip_runtime_explain(const struct hip_runtime *rt, int error, struct error *out)
{
    const char *text = rt->hipGetErrorString(error), *help = remedy(error);
    error_set(out, "%s (HIP error %d)%s%s", text ? text : "unknown error", error, help ? "; " : "", help ? help : "");
}

int hip_runtime_start(const struct hip_runtime *rt, struct error *err)
{
    struct error why = {""};
    int count = 0, rc = rt->hipInit(0);
    if (rc != HIP_OK) {
        hip_runtime_explain(rt, rc, &why);
        return error_set(err, "hipInit: %s", why.text);
    }
    rc = rt->hipGetDeviceCount(&count);
    if (rc == HIP_NO_DEVICE)
        return 0;
    if (rc != HIP_OK) {
        hip_runtime_explain(rt, rc, &why);
        return error_set(err, "hipGetDeviceCount: %s", why.text);
    }
    return count > 0 ? count : 0;
}

/* hipDeviceProp_t differs between versions, but the one of R0600 is frozen: 1472 bytes, gcnArchName at 1160. */
struct hip_arch hip_runtime_arch(const struct hip_runtime *rt, int ordinal)
{
    enum { PROP_BYTES = 4096, ARCH_OFFSET = 1160 };
    struct hip_arch arch = {""};
    union {
        char bytes[PROP_BYTES];
        max_align_t align;
    } prop;
    memset(&prop, 0, sizeof prop);
    if (!rt->hipGetDevicePropertiesR0600 || rt->hipGetDevicePropertiesR0600(&prop, ordinal) != HIP_OK)
        return arch;
    const char *name = prop.bytes + ARCH_OFFSET;
    if (strncmp(name, "gfx", 3) != 0)
        return arch;
    snprintf(arch.name, sizeof arch.name, "%.*s", (int)strcspn(name, ":"), name); /* "gfx90a:sramecc+" */
    return arch;
}
