/* hip/hip.h: the GPU backend: engine/backend.h on an AMD iGPU through the HIP runtime. The only header of hip/ that the engine reads. */
#ifndef BEDSIDE_HIP_HIP_H
#define BEDSIDE_HIP_HIP_H

#include "engine/backend.h"

struct hip_options {
    const char *library; /* the runtime library; NULL: BEDSIDE_HIP_LIBRARY or the usual names */
    int device;          /* ordinal */
    uint64_t types;      /* bits 1 << enum block_type of the weights to come: the self-test covers these; 0: all that there are kernels for */
    bool graph;          /* steps that repeat as HIP graphs, if the check at start finds them right */
    bool no_selftest;    /* and no such check: for tests of something else */
};

/* Opens the device, runs the self-test of every kernel against the CPU, and makes the backend. NULL with err: what is missing, what failed (a kernel
 * and the ISA) and what to do; nothing is left behind. */
struct backend *backend_open_hip(const struct backend_shape *shape, const struct hip_options *options, struct error *err);

/* True when there are kernels for weights of this type. */
bool backend_hip_takes(enum block_type type);

#endif
