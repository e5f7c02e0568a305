/* hip/doctor.h: can the GPU be used on this machine, and if not, what is missing? Looks at the kernel's driver, the permissions, the memory limits, the runtime
 * library, the devices, the kernels in this build, and runs the self-test. */
#ifndef BEDSIDE_HIP_DOCTOR_H
#define BEDSIDE_HIP_DOCTOR_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

struct hip_doctor_options {
    const char *library;   /* NULL or "": the usual names */
    int device;            /* the one to test */
    uint64_t types;        /* as hip_options.types */
    bool graph;            /* hip-graph is on: may it be? */
    uint64_t weight_bytes; /* of the model that is to fit; 0: none */
    const char *root;      /* before /dev, /sys and /proc; "" but in tests */
};

/* Prints what it finds, a line each, then what is wrong and what to do. 0 when the GPU can be used, otherwise 1. */
int hip_doctor(FILE *out, const struct hip_doctor_options *options);

#endif
