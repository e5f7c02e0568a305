/* hip/runtime.h: AMD's HIP runtime library, loaded when wanted, so that one binary runs with and without it. No HIP header is needed.
 *
 * libamdhip64.so.7, .so.6, .so.5 and .so are tried in turn, or the file that BEDSIDE_HIP_LIBRARY names. Only functions whose prototypes are the same in
 * 5.x, 6.x and 7.x are used; every number below is the same in all of them too. */
#ifndef BEDSIDE_HIP_RUNTIME_H
#define BEDSIDE_HIP_RUNTIME_H

#include <stddef.h>

#include "base/error.h"

typedef struct hip_stream_opaque *hip_stream;
typedef struct hip_event_opaque *hip_event;
typedef struct hip_module_opaque *hip_module;
typedef struct hip_function_opaque *hip_function;
typedef struct hip_graph_opaque *hip_graph;
typedef struct hip_graph_exec_opaque *hip_graph_exec;

/* hipError_t, as far as we act on it. */
enum {
    HIP_OK = 0,
    HIP_INVALID_VALUE = 1,
    HIP_OUT_OF_MEMORY = 2,
    HIP_NOT_INITIALIZED = 3,
    HIP_DEINITIALIZED = 4,
    HIP_NO_DEVICE = 100,
    HIP_INVALID_DEVICE = 101,
    HIP_INVALID_IMAGE = 200,
    HIP_NO_BINARY_FOR_GPU = 209,
    HIP_NOT_FOUND = 500,
    HIP_ILLEGAL_ADDRESS = 700,
    HIP_LAUNCH_TIMEOUT = 702,
    HIP_CONTEXT_DESTROYED = 709,
    HIP_ASSERT = 710,
    HIP_LAUNCH_FAILURE = 719,
    HIP_UNKNOWN = 999,
};

/* hipMemcpyKind, hipDeviceAttribute_t, hipStreamNonBlocking, hipEventDisableTiming, hipStreamCaptureModeRelaxed. */
enum { HIP_HOST_TO_DEVICE = 1, HIP_DEVICE_TO_HOST = 2, HIP_DEVICE_TO_DEVICE = 3 };
enum { HIP_ATTR_INTEGRATED = 16, HIP_ATTR_COMPUTE_UNITS = 63, HIP_ATTR_WAVE_SIZE = 87 };
enum { HIP_STREAM_NON_BLOCKING = 1, HIP_EVENT_DISABLE_TIMING = 2 };
enum { HIP_CAPTURE_RELAXED = 2 };

/* Every function that is always used, all of them required: X(name, parameters...); each returns a hipError_t as int. */
#define HIP_FUNCTIONS(X)                                                                                                                             \
    X(hipInit, unsigned flags)                                                                                                                       \
    X(hipRuntimeGetVersion, int *version)                                                                                                            \
    X(hipGetDeviceCount, int *count)                                                                                                                 \
    X(hipSetDevice, int ordinal)                                                                                                                     \
    X(hipDeviceGetName, char *name, int len, int ordinal)                                                                                            \
    X(hipDeviceGetAttribute, int *value, int attribute, int ordinal)                                                                                 \
    X(hipMemGetInfo, size_t *free, size_t *total)                                                                                                    \
    X(hipMalloc, void **p, size_t bytes)                                                                                                             \
    X(hipFree, void *p)                                                                                                                              \
    X(hipHostMalloc, void **p, size_t bytes, unsigned flags)                                                                                         \
    X(hipHostFree, void *p)                                                                                                                          \
    X(hipMemcpyAsync, void *dst, const void *src, size_t bytes, int kind, hip_stream stream)                                                         \
    X(hipMemsetAsync, void *dst, int value, size_t bytes, hip_stream stream)                                                                         \
    X(hipStreamCreateWithFlags, hip_stream *stream, unsigned flags)                                                                                  \
    X(hipStreamDestroy, hip_stream stream)                                                                                                           \
    X(hipStreamSynchronize, hip_stream stream)                                                                                                       \
    X(hipEventCreateWithFlags, hip_event *event, unsigned flags)                                                                                     \
    X(hipEventDestroy, hip_event event)                                                                                                              \
    X(hipEventRecord, hip_event event, hip_stream stream)                                                                                            \
    X(hipEventSynchronize, hip_event event)                                                                                                          \
    X(hipModuleLoadData, hip_module *module, const void *image)                                                                                      \
    X(hipModuleUnload, hip_module module)                                                                                                            \
    X(hipModuleGetFunction, hip_function *function, hip_module module, const char *name)                                                             \
    X(hipModuleLaunchKernel, hip_function function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,                    \
      unsigned shared_bytes, hip_stream stream, void **params, void **extra)

/* Only for graphs (hip/graph.h): NULL where the library lacks them. */
#define HIP_GRAPH_FUNCTIONS(X)                                                                                                                       \
    X(hipStreamBeginCapture, hip_stream stream, int mode)                                                                                            \
    X(hipStreamEndCapture, hip_stream stream, hip_graph *graph)                                                                                      \
    X(hipGraphInstantiate, hip_graph_exec *exec, hip_graph graph, void *error_node, char *log, size_t log_bytes)                                     \
    X(hipGraphDestroy, hip_graph graph)                                                                                                              \
    X(hipGraphLaunch, hip_graph_exec exec, hip_stream stream)                                                                                        \
    X(hipGraphExecDestroy, hip_graph_exec exec)

struct hip_runtime {
#define HIP_MEMBER(name, ...) int (*(name))(__VA_ARGS__);
    HIP_FUNCTIONS(HIP_MEMBER)
    HIP_GRAPH_FUNCTIONS(HIP_MEMBER)
#undef HIP_MEMBER
    const char *(*hipGetErrorString)(int error);                 /* required too */
    int (*hipGetDevicePropertiesR0600)(void *prop, int ordinal); /* NULL in 5.x: only asked for the name of the instruction set */
    const char *no_graphs;                                       /* the first function for graphs that is missing; NULL: all are there */
    char library[256];                                           /* the file that was loaded */
};

/* Loads the library (NULL: BEDSIDE_HIP_LIBRARY or the usual names) and looks every function up. It stays loaded: AMD's library does not survive being
 * unloaded, and a second load gives the same one. -1 with err: what was tried, or the function that is missing. */
int hip_runtime_load(struct hip_runtime *rt, const char *library, struct error *err);

/* "out of memory (HIP error 2)" and, where one is known, "; " and the remedy. */
void hip_runtime_explain(const struct hip_runtime *rt, int error, struct error *out);

/* hipInit and hipGetDeviceCount: how many devices, 0 included, or -1 with err. */
int hip_runtime_start(const struct hip_runtime *rt, struct error *err);

/* "gfx1152", or "" where the runtime does not tell. */
struct hip_arch {
    char name[32];
};
struct hip_arch hip_runtime_arch(const struct hip_runtime *rt, int ordinal);

#endif
