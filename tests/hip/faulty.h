/* tests/hip/faulty.h: what libamdhip64-faulty.so (faulty_runtime.c) counts beyond the HIP runtime. */
#ifndef BEDSIDE_TESTS_HIP_FAULTY_H
#define BEDSIDE_TESTS_HIP_FAULTY_H

#include "tests/hip/hip_test.h"

static long (*faulty_live)(void);              /* things made and not yet destroyed */
static long (*faulty_calls)(const char *name); /* of that function since faulty_forget_calls */
static void (*faulty_forget_calls)(void);      /* the n of FAULTY=function:n:error counts from here too */

static inline void faulty_find(void *handle, const char *name, void *place)
{
    void *symbol = dlsym(handle, name);
    assert_non_null(symbol);
    memcpy(place, &symbol, sizeof symbol);
}

/* Finds the three; the library then stays loaded. */
static inline void faulty_load(void)
{
    void *handle = dlopen(hip_test_library("faulty"), RTLD_NOW);
    if (!handle)
        fail_msg("%s", dlerror());
    faulty_find(handle, "faulty_live", &faulty_live);
    faulty_find(handle, "faulty_calls", &faulty_calls);
    faulty_find(handle, "faulty_forget_calls", &faulty_forget_calls);
}

/* Before each test. */
static inline int faulty_setup(void **state)
{
    (void)state;
    hip_clear_settings();
    faulty_forget_calls();
    return 0;
}

#endif
