/* bedside doctor's part for the GPU: what it prints of the system, the library and the devices, and what it advises. /dev and /sys are a folder of the test. */
#include "tests/hip/hip_test.h"

#include <sys/stat.h>

#include "engine/blocks.h"
#include "hip/doctor.h"

/* The shim's worker thread still stands on a fiber's stack when the program ends, and the leak detector dies of reading it (LSan, "Tracer caught signal 11"). */
#if defined(__SANITIZE_ADDRESS__)
const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
    return "detect_leaks=0";
}
#endif

static char root[64];
static char text[16384];

static void put(const char *path, const char *content)
{
    char full[512];
    snprintf(full, sizeof full, "%s%s", root, path);
    for (char *p = full + strlen(root) + 1; (p = strchr(p, '/')); p++) {
        *p = '\0';
        mkdir(full, 0700);
        *p = '/';
    }
    FILE *f = fopen(full, "w");
    assert_non_null(f);
    fputs(content, f);
    assert_int_equal(fclose(f), 0);
}

static int setup(void **state)
{
    (void)state;
    hip_clear_settings();
    snprintf(root, sizeof root, "/tmp/bedside-doctor-XXXXXX");
    return mkdtemp(root) ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    char command[96];
    snprintf(command, sizeof command, "rm -rf %s", root);
    return system(command);
}

/* A machine that has everything. */
static void a_good_system(void)
{
    put("/sys/module/amdgpu/version", "");
    put("/sys/module/ttm/parameters/pages_limit", "8388608\n");
    put("/sys/class/drm/card1/device/mem_info_gtt_total", "34359738368\n");
    put("/sys/class/drm/card1/device/mem_info_vram_total", "536870912\n");
    put("/dev/kfd", "");
    put("/dev/dri/renderD128", "");
}

static int doctor_with(const struct hip_doctor_options o)
{
    memset(text, 0, sizeof text);
    FILE *out = fmemopen(text, sizeof text - 1, "w");
    assert_non_null(out);
    const int rc = hip_doctor(out, &o);
    fclose(out);
    return rc;
}

static int doctor(const char *library, uint64_t types, uint64_t weight_bytes)
{
    return doctor_with((struct hip_doctor_options){.library = library, .root = root, .types = types, .weight_bytes = weight_bytes});
}

static void a_machine_without_anything_is_told_what_is_missing(void **state)
{
    (void)state;
    assert_int_equal(doctor("/nonexistent/libamdhip64.so", 0, 0), 1);
    assert_contains(text, "the amdgpu driver is not loaded");
    assert_contains(text, "/dev/kfd is not there");
    assert_contains(text, "there is no /dev/dri/renderD*");
    assert_contains(text, "/nonexistent/libamdhip64.so");
    assert_contains(text, "The GPU cannot be used");
    assert_contains(text, "--device cpu");
}

static void a_machine_without_an_amd_gpu_is_told_that_and_nothing_else(void **state)
{
    (void)state;
    put("/sys/bus/pci/devices/0000:00:02.0/vendor", "0x8086\n"); /* another maker's GPU */
    put("/sys/bus/pci/devices/0000:00:02.0/class", "0x030000\n");
    put("/sys/bus/pci/devices/0000:00:03.0/vendor", "0x1002\n"); /* AMD's, but for sound */
    put("/sys/bus/pci/devices/0000:00:03.0/class", "0x040300\n");
    assert_int_equal(doctor("/nonexistent/libamdhip64.so", 0, 0), 1);
    assert_contains(text, "AMD GPU      none on the PCI bus");
    assert_contains(text, "  - this machine has no AMD GPU");
    assert_null(strstr(strstr(text, "  - ") + 1, "  - "));

    put("/sys/bus/pci/devices/0000:c4:00.0/vendor", "0x1002\n");
    put("/sys/bus/pci/devices/0000:c4:00.0/class", "0x038000\n");
    assert_int_equal(doctor("/nonexistent/libamdhip64.so", 0, 0), 1);
    assert_contains(text, "AMD GPU      on the PCI bus");
    assert_contains(text, "  - /dev/kfd is not there");
}

static void the_memory_limits_are_shown(void **state)
{
    (void)state;
    a_good_system();
    doctor("/nonexistent/libamdhip64.so", 0, 0);
    assert_contains(text, "ttm.pages_limit is 8388608 pages, 32.0 GiB");
    assert_contains(text, "32.0 GiB of the machine's memory (GTT), 512.0 MiB set aside by the BIOS");
    assert_contains(text, "the amdgpu driver is loaded");
    assert_contains(text, "/dev/dri/renderD128");
    assert_null(strstr(text, root)); /* names as the user knows them */
}

static void closed_device_nodes_are_told_with_the_groups(void **state)
{
    (void)state;
    char kfd[96];
    if (geteuid() == 0)
        skip(); /* nothing is closed to root */
    a_good_system();
    snprintf(kfd, sizeof kfd, "%s/dev/kfd", root);
    assert_int_equal(chmod(kfd, 0), 0);
    assert_int_equal(doctor("/nonexistent/libamdhip64.so", 0, 0), 1);
    assert_contains(text, "/dev/kfd may not be opened by this user: sudo usermod -aG render,video");
}

static void no_device_and_an_unknown_one_are_told(void **state)
{
    (void)state;
    const char *library = hip_test_library("faulty");
    a_good_system();
    setenv("FAULTY_DEVICES", "0", 1);
    assert_int_equal(doctor(library, 0, 0), 1);
    assert_contains(text, "none that the HIP runtime can use");
    hip_need_bundle();
    unsetenv("FAULTY_DEVICES");
    setenv("FAULTY_ARCH", "gfx906", 1);
    setenv("FAULTY", "hipModuleLoadData:1:209", 1);
    assert_int_equal(doctor(library, 0, 0), 1);
    assert_contains(text, "there are no kernels for gfx906 in this build");
    assert_contains(text, "HSA_OVERRIDE_GFX_VERSION");
}

static void a_gpu_that_computes_nothing_fails_the_self_test(void **state)
{
    (void)state;
    hip_need_bundle();
    assert_int_equal(doctor(hip_test_library("faulty"), UINT64_C(1) << BLOCK_Q8_0, 0), 1); /* kernels of this one do nothing */
    assert_contains(text, "self-test    failed");
    assert_contains(text, "embed");
    assert_contains(text, "no GPU at all, gfx1152, 8 compute units, waves of 32");
    assert_null(strstr(text, "usermod")); /* the system is well: the device opened */
    assert_null(strstr(text, "- /dev/kfd is not there"));
}

static void a_gpu_that_computes_as_the_cpu_does_can_be_used_unless_the_model_is_too_large(void **state)
{
    (void)state;
    hip_need_bundle();
    const char *shim = hip_test_library("shim");
    a_good_system();
    assert_int_equal(doctor(shim, UINT64_C(1) << BLOCK_F16, 1000), 0);
    assert_contains(text, "every operation agrees with the CPU");
    assert_contains(text, "HIP graphs   off (--hip-graph on)");
    assert_contains(text, "GPU 0 can be used: --device hip:0");
    assert_contains(text, "kernels for ");
    setenv("SHIM_SKIP", "embed", 1); /* quick */
    assert_int_equal(doctor(shim, UINT64_C(1) << BLOCK_F16, UINT64_C(1) << 60), 1);
    assert_contains(text, "weights do not fit");
    assert_contains(text, "ttm.pages_limit");
}

/* Graphs are tried only where they were asked for, and the GPU can be used without. */
static void hip_graphs_are_tried_where_they_are_wanted(void **state)
{
    (void)state;
    char emulator[4400];
    hip_need_bundle();
    a_good_system();
    struct hip_doctor_options o = {.library = hip_test_library("shim"), .root = root, .types = UINT64_C(1) << BLOCK_F16, .graph = true};
    assert_int_equal(doctor_with(o), 0);
    assert_contains(text, "HIP graphs   wanted, but they stay off");
    assert_contains(text, "has no function hipStreamBeginCapture");
    assert_contains(text, "GPU 0 can be used");
    if (!hip_can_emulate("gfx1152"))
        return;
    snprintf(emulator, sizeof emulator, "%s", hip_test_library("emu"));
    o.library = emulator;
    assert_int_equal(doctor_with(o), 0);
    assert_contains(text, "HIP graphs   on, and what was replayed was right");
    setenv("EMU_STALE", "200", 1);
    assert_int_equal(doctor_with(o), 0);
    unsetenv("EMU_STALE");
    assert_contains(text, "HIP graphs   wanted, but they stay off");
    assert_contains(text, "a graph that is replayed reads old values");
}

int main(void)
{
#define CASE(test) cmocka_unit_test_setup_teardown(test, setup, teardown)
    const struct CMUnitTest tests[] = {
        CASE(a_machine_without_anything_is_told_what_is_missing),
        CASE(a_machine_without_an_amd_gpu_is_told_that_and_nothing_else),
        CASE(the_memory_limits_are_shown),
        CASE(closed_device_nodes_are_told_with_the_groups),
        CASE(no_device_and_an_unknown_one_are_told),
        CASE(a_gpu_that_computes_nothing_fails_the_self_test),
        CASE(a_gpu_that_computes_as_the_cpu_does_can_be_used_unless_the_model_is_too_large),
        CASE(hip_graphs_are_tried_where_they_are_wanted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
