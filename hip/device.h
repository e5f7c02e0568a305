/* hip/device.h: one GPU: its memory, its queue and the kernels of the embedded code objects.
 *
 * The first failed call makes the device's error sticky: later calls do nothing until hip_device_sync has reported it. One thread. */
#ifndef BEDSIDE_HIP_DEVICE_H
#define BEDSIDE_HIP_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

/* Every kernel of hip/kernels/list.h: K_<name>. */
enum hip_kernel {
#define KERNEL_ENTRY(name, params, threads) K_##name,
#include "hip/kernels/list.h"
#undef KERNEL_ENTRY
    K_COUNT
};

struct hip_device;

struct hip_device_info {
    char name[128]; /* "AMD Radeon 860M Graphics" */
    char arch[32];  /* "gfx1152", or "" where the runtime does not tell */
    int compute_units, wave_size;
    bool integrated;
    size_t memory_total, memory_free; /* as the runtime reports them */
    int runtime_version;
    char library[256]; /* the runtime library that was loaded */
};

/* How many devices there are; -1 with err: no runtime library, or the runtime does not start. `library` NULL: BEDSIDE_HIP_LIBRARY or the usual names. */
int hip_device_count(const char *library, struct error *err);

/* Opens device `ordinal`, loads its code object and looks up every kernel. -1 with err: what is missing and the remedy. */
int hip_device_open(struct hip_device **out, const char *library, int ordinal, struct error *err);
void hip_device_close(struct hip_device *d);
const struct hip_device_info *hip_device_info(const struct hip_device *d);

/* Device memory, 256-byte aligned, not zeroed. NULL with err. */
void *hip_device_alloc(struct hip_device *d, size_t bytes, struct error *err);
void hip_device_free(struct hip_device *d, void *p);

/* What may still be allocated: the runtime's word, or the machine's free memory where the GPU shares it and that is less. 0 when unknown. */
size_t hip_device_memory_free(struct hip_device *d);

/* For filling large memory without a copy in between: `hip_device_stage` gives pinned room for `bytes` (at most HIP_STAGE_BYTES; NULL when the device has
 * failed), the caller fills it, and `hip_device_send` queues it to dst. No other call may come between the two. */
enum { HIP_STAGE_BYTES = 2 << 20 };
void *hip_device_stage(struct hip_device *d, size_t bytes);
void hip_device_send(struct hip_device *d, void *dst, const void *staged, size_t bytes);

/* Queued. `src` of hip_device_write may be reused when the call returns (the bytes go through a pinned ring). */
void hip_device_write(struct hip_device *d, void *dst, const void *src, size_t bytes);
void hip_device_copy(struct hip_device *d, void *dst, const void *src, size_t bytes); /* device to device */
void hip_device_zero(struct hip_device *d, void *dst, size_t bytes);

/* Queued: grid [gx][gy][gz] workgroups of the kernel's own number of threads; params is its struct of hip/kernels/params.h. A grid with a zero side does
 * nothing. */
void hip_device_launch(struct hip_device *d, enum hip_kernel kernel, unsigned gx, unsigned gy, unsigned gz, const void *params, size_t params_bytes);
#define HIP_LAUNCH(d, name, gx, gy, gz, p) hip_device_launch(d, K_##name, gx, gy, gz, &(p), sizeof(p))

/* Graphs: launches that repeat, as one submission (hip/graph.h). Off unless turned on; -1 with err: the runtime library cannot. */
int hip_device_graphs_on(struct hip_device *d, struct error *err);
void hip_device_graphs_off(struct hip_device *d);

/* Whether the launches that follow are likely to be those of an earlier step. They are then held back until anything else is queued or waited for. */
void hip_device_repeats(struct hip_device *d, bool likely);

struct hip_device_graphs {
    bool on;
    const char *failure; /* that turned them off for good; NULL: none */
    uint64_t captured, replayed;
};
struct hip_device_graphs hip_device_graphs(const struct hip_device *d);

/* Waits for everything queued, then copies. -1 with err (the sticky error, which stays). */
int hip_device_read(struct hip_device *d, void *dst, const void *src, size_t bytes, struct error *err);

/* The same for n parts, which go to dst one after the other: small ones share a wait. */
struct hip_part {
    const void *src;
    size_t bytes;
};
int hip_device_gather(struct hip_device *d, void *dst, const struct hip_part *parts, size_t n, struct error *err);

/* Waits. 0, or -1 and the first error since the last sync; the queue is usable again, unless the device is lost (then every call fails). */
int hip_device_sync(struct hip_device *d, struct error *err);

bool hip_device_failed(const struct hip_device *d);
const char *hip_device_error(const struct hip_device *d); /* the sticky error's text, "" without one */
void hip_device_fail(struct hip_device *d, const char *format, ...)
    __attribute__((format(printf, 2, 3))); /* makes this the sticky error, if there is none */

#endif
