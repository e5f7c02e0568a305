/* hip/device.c and hip/runtime.c: what an error says, that nothing is left behind, and that no host buffer is touched too early. No GPU, no kernels:
 * faulty_runtime.c stands in. */
#include "tests/hip/faulty.h"

#include "hip/device.h"

static const char *library;

static int setup_group(void **state)
{
    (void)state;
    library = hip_test_library("faulty");
    faulty_load();
    return 0;
}

static struct hip_device *open_device(void)
{
    struct hip_device *d = NULL;
    struct error err = {""};
    hip_need_bundle();
    assert_ok(hip_device_open(&d, library, 0, &err), err);
    return d;
}

/* ---- opening ---- */

static void a_missing_library_is_named_with_the_packages_that_have_it(void **state)
{
    (void)state;
    struct error err = {""};
    assert_int_equal(hip_device_count("/nonexistent/libamdhip64.so", &err), -1);
    assert_contains(err.text, "/nonexistent/libamdhip64.so");
    setenv("BEDSIDE_HIP_LIBRARY", "/also/nonexistent.so", 1);
    assert_int_equal(hip_device_count(NULL, &err), -1);
    assert_contains(err.text, "/also/nonexistent.so");
    /* A library of something else: the first function that it lacks. */
    assert_int_equal(hip_device_count("libm.so.6", &err), -1);
    assert_contains(err.text, "hipInit");
}

static void the_environment_names_the_library(void **state)
{
    (void)state;
    struct error err = {""};
    setenv("BEDSIDE_HIP_LIBRARY", library, 1);
    assert_int_equal(hip_device_count(NULL, &err), 1);
    setenv("FAULTY_DEVICES", "3", 1);
    assert_int_equal(hip_device_count(NULL, &err), 3);
    setenv("FAULTY_DEVICES", "0", 1);
    assert_int_equal(hip_device_count(NULL, &err), 0);
}

static void no_device_says_what_to_look_at(void **state)
{
    (void)state;
    struct hip_device *d = NULL;
    struct error err = {""};
    setenv("FAULTY_DEVICES", "0", 1);
    assert_int_equal(hip_device_open(&d, library, 0, &err), -1);
    assert_null(d);
    assert_contains(err.text, "/dev/kfd");
    assert_contains(err.text, "render");
    setenv("FAULTY_DEVICES", "2", 1);
    assert_int_equal(hip_device_open(&d, library, 2, &err), -1);
    assert_contains(err.text, "GPU 2");
    setenv("FAULTY", "hipInit:1:100", 1);
    assert_int_equal(hip_device_open(&d, library, 0, &err), -1);
    assert_contains(err.text, "hipInit");
    assert_contains(err.text, "/dev/kfd");
    assert_int_equal(faulty_live(), 0);
}

static void an_unknown_gpu_is_named_beside_those_that_are_known(void **state)
{
    (void)state;
    hip_need_bundle();
    static const char *const faults[] = {"hipModuleLoadData:1:209", "hipModuleLoadData:1:200", "hipModuleLoadData:1:1"};
    setenv("FAULTY_ARCH", "gfx906:sramecc+:xnack-", 1);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        struct hip_device *d = NULL;
        struct error err = {""};
        faulty_forget_calls();
        setenv("FAULTY", faults[i], 1);
        assert_int_equal(hip_device_open(&d, library, 0, &err), -1);
        assert_contains(err.text, "is gfx906,");
        assert_contains(err.text, "gfx1152");
        assert_contains(err.text, "HSA_OVERRIDE_GFX_VERSION");
    }
    assert_int_equal(faulty_live(), 0);
}

static void a_gpu_with_waves_of_64_is_refused(void **state)
{
    (void)state;
    struct hip_device *d = NULL;
    struct error err = {""};
    setenv("FAULTY_WAVE", "64", 1);
    assert_int_equal(hip_device_open(&d, library, 0, &err), -1);
    assert_contains(err.text, "waves of 64");
    assert_int_equal(faulty_live(), 0);
}

static void the_device_describes_itself(void **state)
{
    (void)state;
    struct hip_device *d = open_device();
    const struct hip_device_info *info = hip_device_info(d);
    assert_string_equal(info->name, "no GPU at all");
    assert_string_equal(info->arch, "gfx1152");
    assert_string_equal(info->library, library);
    assert_int_equal(info->compute_units, 8);
    assert_int_equal(info->wave_size, 32);
    assert_false(info->integrated);
    assert_int_equal(info->memory_free, 1L << 34);
    assert_int_equal(info->memory_total, 1L << 35);
    assert_true(info->runtime_version > 0);
    hip_device_close(d);
    assert_int_equal(faulty_live(), 0);
}

static void the_bundle_lists_its_targets(void **state)
{
    (void)state;
    hip_need_bundle();
    assert_true(hip_bundle_has("gfx1152") || !strstr(hip_bundle_list().text, "gfx1152"));
    assert_false(hip_bundle_has("gfx115"));
    assert_false(hip_bundle_has(""));
    assert_false(hip_bundle_has("gfx906"));
}

/* ---- every call may fail ---- */

enum { SMALL = 1000, LARGE = 4 * HIP_STAGE_BYTES + 12345 };

/* A day's work: 0, or -1 with err, from whichever call failed first. */
static int work(struct error *err)
{
    struct hip_device *d = NULL;
    static uint8_t data[LARGE], back[LARGE];
    if (hip_device_open(&d, library, 0, err))
        return -1;
    int rc = -1;
    unsigned char *a = hip_device_alloc(d, LARGE, err), *b = a ? hip_device_alloc(d, LARGE, err) : NULL;
    if (b) {
        hip_device_zero(d, a, LARGE);
        for (int i = 0; i < 200; i++)
            hip_device_write(d, a + i, data, SMALL);
        hip_device_write(d, a, data, LARGE);
        hip_device_copy(d, b, a, LARGE);
        if (hip_device_memory_free(d) == 0 && !hip_device_failed(d))
            error_set(err, "no free memory");
        else if (hip_device_read(d, back, b, LARGE, err) == 0 && hip_device_sync(d, err) == 0)
            rc = 0;
    }
    hip_device_free(d, b);
    hip_device_free(d, a);
    if (rc == 0 && hip_device_failed(d))
        rc = error_set(err, "%s", hip_device_error(d));
    hip_device_close(d);
    return rc;
}

static void whichever_call_fails_the_error_says_so_and_nothing_is_left_behind(void **state)
{
    (void)state;
    hip_need_bundle();
    static const struct {
        const char *function;
        bool quiet; /* its failure may go unseen */
    } functions[] = {
        {"hipInit", false},
        {"hipRuntimeGetVersion", false},
        {"hipGetDeviceCount", false},
        {"hipSetDevice", true}, /* at close */
        {"hipDeviceGetName", false},
        {"hipDeviceGetAttribute", false},
        {"hipGetDevicePropertiesR0600", true},
        {"hipMemGetInfo", false},
        {"hipMalloc", false},
        {"hipFree", true},
        {"hipHostMalloc", false},
        {"hipHostFree", true},
        {"hipMemcpyAsync", false},
        {"hipMemsetAsync", false},
        {"hipStreamCreateWithFlags", false},
        {"hipStreamDestroy", true},
        {"hipStreamSynchronize", true}, /* at close */
        {"hipEventCreateWithFlags", false},
        {"hipEventDestroy", true},
        {"hipEventRecord", false},
        {"hipEventSynchronize", false},
        {"hipModuleLoadData", false},
        {"hipModuleUnload", true},
        {"hipModuleGetFunction", false},
    };
    struct error err = {""};
    assert_ok(work(&err), err);
    assert_int_equal(faulty_live(), 0);
    long calls[sizeof functions / sizeof *functions];
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        calls[i] = faulty_calls(functions[i].function);
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        for (long nth = 1; nth <= calls[i]; nth += nth < 3 || nth + 2 > calls[i] ? 1 : (calls[i] - nth) / 2) {
            for (int once = 0; once < 2; once++) {
                char fault[96];
                snprintf(fault, sizeof fault, "%s:%ld:%d", functions[i].function, nth, once ? 719 : 999);
                faulty_forget_calls();
                unsetenv(once ? "FAULTY" : "FAULTY_ONCE");
                setenv(once ? "FAULTY_ONCE" : "FAULTY", fault, 1);
                err.text[0] = '\0';
                const int rc = work(&err);
                if (rc == 0 && !functions[i].quiet)
                    fail_msg("%s went unseen", fault);
                if (rc && !strstr(err.text, once ? "719" : "999") && !strstr(err.text, "waves of 0"))
                    fail_msg("%s: no such number in: %s", fault, err.text);
                if (faulty_live() != 0)
                    fail_msg("%s: %ld things left behind", fault, faulty_live());
            }
        }
        if (calls[i] == 0 && strcmp(functions[i].function, "hipModuleGetFunction") != 0)
            fail_msg("%s is never called", functions[i].function);
    }
}

/* ---- errors stick, and go ---- */

static void a_bad_argument_is_told_at_the_next_sync_and_then_forgotten(void **state)
{
    (void)state;
    struct hip_device *d = open_device();
    struct error err = {""};
    char byte = 7, back = 0;
    char *p = hip_device_alloc(d, 64, &err);
    assert_non_null(p);
    hip_device_copy(d, p, NULL, 1);
    assert_true(hip_device_failed(d));
    hip_device_fail(d, "a second error");
    assert_int_equal(hip_device_read(d, &back, p, 1, &err), -1);
    assert_contains(err.text, "HIP error 1)");
    assert_true(hip_device_failed(d));
    assert_int_equal(hip_device_sync(d, &err), -1);
    assert_contains(err.text, "HIP error 1)");
    assert_ok(hip_device_sync(d, &err), err);
    hip_device_write(d, p, &byte, 1);
    assert_ok(hip_device_read(d, &back, p, 1, &err), err);
    assert_int_equal(back, 7);
    hip_device_free(d, p);
    hip_device_close(d);
    assert_int_equal(faulty_live(), 0);
}

static void after_a_lost_device_every_call_fails_and_none_asks_it_again(void **state)
{
    (void)state;
    struct hip_device *d = open_device();
    struct error err = {""};
    char byte = 7;
    char *p = hip_device_alloc(d, 64, &err);
    assert_non_null(p);
    setenv("FAULTY_ONCE", "hipStreamSynchronize:1:719", 1);
    faulty_forget_calls();
    for (int i = 0; i < 3; i++) {
        hip_device_write(d, p, &byte, 1);
        assert_int_equal(hip_device_sync(d, &err), -1);
        assert_contains(err.text, "719");
        assert_contains(err.text, "restart");
        assert_int_equal(hip_device_read(d, &byte, p, 1, &err), -1);
        assert_null(hip_device_alloc(d, 64, &err));
        assert_int_equal(hip_device_memory_free(d), 0);
    }
    assert_int_equal(faulty_calls("hipStreamSynchronize"), 1);
    assert_int_equal(faulty_calls("hipMemcpyAsync"), 1);
    hip_device_free(d, p);
    hip_device_close(d);
    assert_int_equal(faulty_live(), 0);
}

static void an_allocation_that_does_not_fit_says_what_there_is_and_what_to_do(void **state)
{
    (void)state;
    struct hip_device *d = open_device();
    struct error err = {""};
    setenv("FAULTY_FREE", "104857600", 1);
    assert_null(hip_device_alloc(d, (size_t)200 << 20, &err));
    assert_contains(err.text, "100.0 MiB free");
    assert_contains(err.text, "200.0 MiB");
    assert_contains(err.text, "ttm.pages_limit");
    assert_contains(err.text, "device cpu");
    assert_false(hip_device_failed(d)); /* the caller may ask for less */
    faulty_forget_calls();
    setenv("FAULTY", "hipMalloc:1:2", 1);
    assert_null(hip_device_alloc(d, 100, &err));
    assert_contains(err.text, "out of memory (HIP error 2)");
    assert_contains(err.text, "ttm.pages_limit");
    assert_false(hip_device_failed(d));
    unsetenv("FAULTY");
    void *p = hip_device_alloc(d, 100, &err);
    assert_non_null(p);
    hip_device_free(d, p);
    hip_device_close(d);
}

/* ---- the ring ---- */

/* The queue runs only when it must: whatever overtakes it is seen. */
static void the_callers_buffer_may_be_reused_at_once(void **state)
{
    (void)state;
    enum { PIECE = 70001, N = 400 };
    struct hip_device *d = open_device();
    struct error err = {""};
    uint8_t *dev = hip_device_alloc(d, (size_t)PIECE * N, &err), *host = malloc(PIECE), *back = malloc((size_t)PIECE * N);
    assert_non_null(dev);
    assert_true(host && back);
    for (int i = 0; i < N; i++) {
        for (int j = 0; j < PIECE; j++)
            host[j] = hip_test_byte((uint64_t)i * PIECE + (uint64_t)j);
        hip_device_write(d, dev + (size_t)i * PIECE, host, PIECE);
        memset(host, 0, PIECE);
    }
    assert_ok(hip_device_read(d, back, dev, (size_t)PIECE * N, &err), err);
    for (size_t i = 0; i < (size_t)PIECE * N; i++)
        if (back[i] != hip_test_byte(i))
            fail_msg("byte %zu is wrong", i);
    assert_true(faulty_calls("hipEventSynchronize") > 3);
    hip_device_free(d, dev);
    hip_device_close(d);
    free(host);
    free(back);
}

static void staged_room_is_as_large_as_asked_and_never_larger_than_a_piece(void **state)
{
    (void)state;
    struct hip_device *d = open_device();
    struct error err = {""};
    uint8_t *dev = hip_device_alloc(d, 8 * (size_t)HIP_STAGE_BYTES, &err), *back = malloc(8 * (size_t)HIP_STAGE_BYTES);
    assert_non_null(dev);
    assert_non_null(back);
    for (int i = 0; i < 8; i++) {
        uint8_t *room = hip_device_stage(d, HIP_STAGE_BYTES);
        assert_non_null(room);
        memset(room, i + 1, HIP_STAGE_BYTES);
        hip_device_send(d, dev + (size_t)i * HIP_STAGE_BYTES, room, HIP_STAGE_BYTES);
    }
    assert_ok(hip_device_read(d, back, dev, 8 * (size_t)HIP_STAGE_BYTES, &err), err);
    for (size_t i = 0; i < 8 * (size_t)HIP_STAGE_BYTES; i++)
        if (back[i] != i / HIP_STAGE_BYTES + 1)
            fail_msg("byte %zu is %d", i, back[i]);
    assert_null(hip_device_stage(d, HIP_STAGE_BYTES + 1));
    assert_true(hip_device_failed(d));
    assert_int_equal(hip_device_sync(d, &err), -1);
    hip_device_free(d, dev);
    hip_device_close(d);
    free(back);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(a_missing_library_is_named_with_the_packages_that_have_it, faulty_setup),
        cmocka_unit_test_setup(the_environment_names_the_library, faulty_setup),
        cmocka_unit_test_setup(no_device_says_what_to_look_at, faulty_setup),
        cmocka_unit_test_setup(an_unknown_gpu_is_named_beside_those_that_are_known, faulty_setup),
        cmocka_unit_test_setup(a_gpu_with_waves_of_64_is_refused, faulty_setup),
        cmocka_unit_test_setup(the_device_describes_itself, faulty_setup),
        cmocka_unit_test_setup(the_bundle_lists_its_targets, faulty_setup),
        cmocka_unit_test_setup(whichever_call_fails_the_error_says_so_and_nothing_is_left_behind, faulty_setup),
        cmocka_unit_test_setup(a_bad_argument_is_told_at_the_next_sync_and_then_forgotten, faulty_setup),
        cmocka_unit_test_setup(after_a_lost_device_every_call_fails_and_none_asks_it_again, faulty_setup),
        cmocka_unit_test_setup(an_allocation_that_does_not_fit_says_what_there_is_and_what_to_do, faulty_setup),
        cmocka_unit_test_setup(the_callers_buffer_may_be_reused_at_once, faulty_setup),
        cmocka_unit_test_setup(staged_room_is_as_large_as_asked_and_never_larger_than_a_piece, faulty_setup),
    };
    return cmocka_run_group_tests(tests, setup_group, NULL);
}
