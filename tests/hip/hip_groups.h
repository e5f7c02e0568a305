/* tests/hip/hip_groups.h: one list of tests, run on every device that computes: the kernels compiled for the CPU (the shim), and, where the emulator is
 * built and there is code for it, the machine code of three GPU generations. A program's main returns HIP_RUN.
 *
 * HIP_TEST_ONLY=sanitized: nothing but the shim that was built under sanitizers (tests/hip/test_sanitized.sh). */
#ifndef BEDSIDE_TESTS_HIP_GROUPS_H
#define BEDSIDE_TESTS_HIP_GROUPS_H

#include "hip/hip_impl.h"
#include "tests/hip/hip_test.h"

/* The laptop's own GPU first. */
static const char *const hip_gpus[] = {"gfx1152", "gfx1100", "gfx1201"};
enum { HIP_GPUS = sizeof hip_gpus / sizeof *hip_gpus };

/* The group that runs. */
static struct {
    const char *library; /* "shim", "sanitized", "emu", "faulty" */
    bool on_shim;
    struct hip_device *dev;
} hip_group;

/* Backends to compare, as the fixture opens them. */
static inline struct backend *open_hip(const struct backend_shape *shape, struct error *err)
{
    return hip_open_on(hip_group.dev, shape, err);
}

static inline struct backend *open_cpu(const struct backend_shape *shape, struct error *err)
{
    return backend_open_cpu(shape, 1, err);
}

static inline int hip_group_setup(void **state)
{
    (void)state;
    struct error err = {""};
    const int status = hip_device_open(&hip_group.dev, hip_test_library(hip_group.library), 0, &err);
    if (status)
        fprintf(stderr, "%s: %s\n", hip_group.library, err.text);
    return status;
}

static inline int hip_group_teardown(void **state)
{
    (void)state;
    hip_device_close(hip_group.dev);
    hip_group.dev = NULL;
    return 0;
}

/* The number of failed tests. */
static inline int hip_run_on(const char *library, const char *group, const struct CMUnitTest *tests, size_t n_tests)
{
    hip_group.library = library;
    hip_group.on_shim = strcmp(library, "shim") == 0 || strcmp(library, "sanitized") == 0;
    return _cmocka_run_group_tests(group, tests, n_tests, hip_group_setup, hip_group_teardown);
}

static inline int hip_run(const char *what, const struct CMUnitTest *tests, size_t n_tests, int n_gpus)
{
    char group[96];
    const char *only = getenv("HIP_TEST_ONLY");
    snprintf(group, sizeof group, "%s on the %s", what, only ? only : "shim");
    int failed = hip_run_on(only ? only : "shim", group, tests, n_tests);
    n_gpus = only ? 0 : n_gpus;
    for (int i = 0; i < n_gpus; i++) {
        snprintf(group, sizeof group, "%s on %s", what, hip_gpus[i]);
        if (!hip_can_emulate(hip_gpus[i])) {
            fprintf(stderr, "%s: left out, no emulator or no code for it in this build (HIP_TARGETS)\n", group);
            continue;
        }
        setenv("EMU_ARCH", hip_gpus[i], 1);
        failed += hip_run_on("emu", group, tests, n_tests);
    }
    return failed;
}

/* Runs the array `tests` on the shim and on the first n_gpus of hip_gpus. */
#define HIP_RUN(what, tests, n_gpus) hip_run(what, tests, sizeof(tests) / sizeof *(tests), n_gpus)

/* Runs it on a stand-in that is named. */
#define HIP_RUN_ON(library, group, tests) hip_run_on(library, group, tests, sizeof(tests) / sizeof *(tests))

#endif
