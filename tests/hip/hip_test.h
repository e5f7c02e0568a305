/* tests/hip/hip_test.h: what the tests of hip/ share: finding the stand-in libraries, what this build and this run can do, error texts. */
#ifndef BEDSIDE_TESTS_HIP_TEST_H
#define BEDSIDE_TESTS_HIP_TEST_H

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "hip/bundle.h"

/* The path of a stand-in, such as "faulty": it lies in hip/ of the build folder, of which this program is tests/hip/test_something. */
static inline const char *hip_test_library(const char *kind)
{
    static char path[4400];
    char self[4096] = "";
    FILE *f = fopen("/proc/self/cmdline", "r");
    assert_non_null(f);
    const size_t n = fread(self, 1, sizeof self - 1, f);
    fclose(f);
    self[n] = '\0'; /* the first argument ends at its own NUL */
    char *at = strstr(self, "tests/hip/");
    if (!at) {
        fail_msg("run this program as BUILD/tests/hip/test_...");
        abort(); /* not reached; static checks do not know that fail_msg does not return */
    }
    *at = '\0';
    snprintf(path, sizeof path, "%s%ship/libamdhip64-%s.so", self[0] == '/' || self[0] == '.' ? "" : "./", self, kind);
    return path;
}

/* Every case, however long it takes: make test-hip. */
static inline bool hip_in_full(void)
{
    const char *choice = getenv("BEDSIDE_HIP_TESTS");
    return choice && strcmp(choice, "all") == 0;
}

/* No device opens without kernels: a build without clang-19 skips the test. */
static inline void hip_need_bundle(void)
{
    if (!hip_bundle_list().text[0])
        skip();
}

/* The emulator can be this GPU: it was built, and this build's HIP_TARGETS name the GPU. */
static inline bool hip_can_emulate(const char *arch)
{
    return hip_bundle_has(arch) && access(hip_test_library("emu"), R_OK) == 0;
}

/* What earlier tests asked of the stand-ins, and what the user's environment does. */
static inline void hip_clear_settings(void)
{
    static const char *const settings[] = {"FAULTY",      "FAULTY_ONCE", "FAULTY_DEVICES", "FAULTY_ARCH",        "FAULTY_WAVE",
                                           "FAULTY_FREE", "SHIM_SKIP",   "SHIM_FAIL",      "BEDSIDE_HIP_LIBRARY"};
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
        unsetenv(settings[i]);
}

#define assert_contains(text, part)                                                                                                                  \
    do {                                                                                                                                             \
        if (!strstr((text), (part)))                                                                                                                 \
            fail_msg("expected '%s' in: %s", (part), (text));                                                                                        \
    } while (0)

#define assert_ok(call, err)                                                                                                                         \
    do {                                                                                                                                             \
        if ((call) != 0)                                                                                                                             \
            fail_msg("%s: %s", #call, (err).text);                                                                                                   \
    } while (0)

/* A reproducible byte for place i. */
static inline uint8_t hip_test_byte(uint64_t i)
{
    i = (i + 1) * UINT64_C(0x9e3779b97f4a7c15);
    return (uint8_t)(i >> 29 ^ i >> 51);
}

#endif
