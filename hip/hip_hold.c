/* The launch that waits until the next operation says what it reads of it. See hip_impl.h. */
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "hip/hip_impl.h"

/* Room for the parameters of every kernel that is held. */
union held_params {
    struct matvec_params matvec;
    struct moe_down_params moe_down;
    struct attn_mix_params attn_mix;
    struct delta_conv_params delta_conv;
    struct delta_rule_params delta_rule;
    struct delta_step_params delta_step;
};

struct hip_hold {
    int32_t *counters;      /* device, [GPU_TAIL_ROWS]; 0 between kernels */
    enum hip_kernel kernel; /* K_COUNT: nothing is held */
    unsigned gx, gy, gz;
    size_t bytes;
    struct act_tail *tail; /* in params, or NULL */
    union held_params params;
};

int hip_hold_open(struct hip *h, struct error *err)
{
    struct hip_hold *held = alloc_array(1, sizeof *held);
    if (!held)
        return error_set(err, "out of memory for the GPU backend");
    held->kernel = K_COUNT;
    held->counters = hip_device_alloc(h->device, GPU_TAIL_ROWS * sizeof *held->counters, err);
    if (!held->counters) {
        free(held);
        return -1;
    }
    hip_device_zero(h->device, held->counters, GPU_TAIL_ROWS * sizeof *held->counters);
    h->hold = held;
    return 0;
}

void hip_hold_close(struct hip *h)
{
    if (!h->hold)
        return;
    hip_device_free(hip_dev(h), h->hold->counters);
    free(h->hold);
    h->hold = NULL;
}

void hip_hold(struct hip *h, enum hip_kernel kernel, unsigned gx, unsigned gy, unsigned gz, const void *params, size_t bytes,
              const struct act_tail *tail)
{
    struct hip_hold *held = h->hold;
    struct hip_device *dev = hip_dev(h);
    if (!held || bytes > sizeof held->params || (tail && tail->rows > GPU_TAIL_ROWS)) {
        hip_device_launch(dev, kernel, gx, gy, gz, params, bytes);
        return;
    }
    held->kernel = kernel;
    held->gx = gx;
    held->gy = gy;
    held->gz = gz;
    held->bytes = bytes;
    memcpy(&held->params, params, bytes);
    held->tail = tail ? (struct act_tail *)(void *)((char *)&held->params + ((const char *)tail - (const char *)params)) : NULL;
}

enum hip_kernel hip_held(const struct hip *h)
{
    return h->hold ? h->hold->kernel : K_COUNT;
}

void *hip_held_params(struct hip *h, enum hip_kernel kernel)
{
    return kernel != K_COUNT && hip_held(h) == kernel ? &h->hold->params : NULL;
}

void hip_hold_drop(struct hip *h)
{
    if (h->hold)
        h->hold->kernel = K_COUNT;
}

void hip_hold_send(struct hip *h)
{
    struct hip_hold *held = h->hold;
    if (held->kernel == K_COUNT)
        return;
    hip_device_launch(h->device, held->kernel, held->gx, held->gy, held->gz, &held->params, held->bytes);
    held->kernel = K_COUNT;
}

/* The launch that waits writes just the rows that are read, and the kernels' tails can do what is wanted of them. */
static bool makes(const struct hip_hold *held, const struct act_params *p, int n_rows)
{
    return held && held->kernel != K_COUNT && held->tail && held->tail->act.x == p->x && held->tail->act.n == p->n && held->tail->rows == n_rows &&
           !p->up && !p->index && !p->normed;
}

void hip_act(struct hip *h, const struct act_params *p, int n_rows)
{
    struct hip_hold *held = h->hold;
    if (!makes(held, p, n_rows)) {
        HIP_LAUNCH(hip_dev(h), act, (unsigned)n_rows, 1, 1, *p);
        return;
    }
    held->tail->act = *p;
    held->tail->counters = held->counters;
    hip_hold_send(h);
}
