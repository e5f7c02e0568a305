#include "hip/doctor.h"

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <grp.h>
#include <inttypes.h>
#include <pwd.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "base/clock.h"
#include "engine/memory.h"
#include "hip/bundle.h"
#include "hip/hip_impl.h"
#include "hip/runtime.h"

enum { MOST_FINDINGS = 12, PATH_ROOM = 512, PAGE_BYTES = 4096 };

struct report {
    FILE *out;
    const struct hip_doctor_options *o;
    struct error wrong[MOST_FINDINGS]; /* what keeps the GPU from being used */
    int n_wrong;
    struct error hints[MOST_FINDINGS]; /* what may go better */
    int n_hints;
    bool opened; /* the GPU works, as far as the system is concerned */
};

static void line(struct report *r, const char *what, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void line(struct report *r, const char *what, const char *format, ...)
{
    va_list args;
    fprintf(r->out, "  %-12s ", what);
    va_start(args, format);
    vfprintf(r->out, format, args);
    va_end(args);
    fputc('\n', r->out);
}

static void wrong(struct report *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void wrong(struct report *r, const char *format, ...)
{
    if (r->n_wrong == MOST_FINDINGS)
        return;
    va_list args;
    va_start(args, format);
    error_vset(&r->wrong[r->n_wrong++], format, args);
    va_end(args);
}

static void hint(struct report *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void hint(struct report *r, const char *format, ...)
{
    if (r->n_hints == MOST_FINDINGS)
        return;
    va_list args;
    va_start(args, format);
    error_vset(&r->hints[r->n_hints++], format, args);
    va_end(args);
}

/* ---- the system ---- */

struct path {
    char text[PATH_ROOM];
};

static struct path path_of(const struct report *r, const char *name)
{
    struct path p;
    snprintf(p.text, sizeof p.text, "%s%s", r->o->root ? r->o->root : "", name);
    return p;
}

static void look_at_kernel(struct report *r)
{
    struct utsname u;
    if (uname(&u))
        return;
    char *dot, *end; /* of "6.10.3-amd64" */
    const unsigned long major = strtoul(u.release, &dot, 10), minor = *dot == '.' ? strtoul(dot + 1, &end, 10) : 0;
    const bool known = dot != u.release && *dot == '.' && end != dot + 1;
    const bool driver = access(path_of(r, "/sys/module/amdgpu").text, F_OK) == 0;
    line(r, "kernel", "%s %s, the amdgpu driver is %sloaded", u.sysname, u.release, driver ? "" : "not ");
    if (!driver)
        wrong(r, "the kernel's amdgpu driver is not loaded: is there an AMD GPU, and is linux-firmware (firmware-amd-graphics) installed?");
    if (driver && known && (major < 6 || (major == 6 && minor < 10)))
        hint(r,
             "kernel %lu.%lu keeps an APU's GPU memory to what the BIOS sets aside: 6.10 or later shares the machine's memory, and the Radeon 800M "
             "series is known to "
             "be stable from 6.18.4 on",
             major, minor);
}

/* Whether a display controller of AMD is on the PCI bus; true also where there is no such list to look at. */
static bool look_at_bus(struct report *r)
{
    enum { AMD = 0x1002, DISPLAY = 0x03 };
    glob_t g;
    bool found = false;
    if (glob(path_of(r, "/sys/bus/pci/devices/*").text, 0, NULL, &g))
        return true;
    for (size_t i = 0; i < g.gl_pathc && !found; i++) {
        char path[PATH_ROOM + 16];
        uint64_t values[2] = {0, 0};
        static const char *const names[2] = {"vendor", "class"};
        for (int k = 0; k < 2; k++) {
            snprintf(path, sizeof path, "%s/%s", g.gl_pathv[i], names[k]);
            number_in_file(path, "", &values[k]);
        }
        found = values[0] == AMD && values[1] >> 16 == DISPLAY;
    }
    globfree(&g);
    line(r, "AMD GPU", "%s", found ? "on the PCI bus" : "none on the PCI bus");
    return found;
}

static void owner_text(const struct stat *st, char *out, size_t room)
{
    const struct group *g = getgrgid(st->st_gid);
    if (g)
        snprintf(out, room, "group %s", g->gr_name);
    else
        snprintf(out, room, "group %u", (unsigned)st->st_gid);
}

static bool look_at_node(struct report *r, const char *path, const char *name)
{
    struct stat st;
    char owner[80];
    if (stat(path, &st)) {
        line(r, "device node", "%s: %s", name, strerror(errno));
        return false;
    }
    owner_text(&st, owner, sizeof owner);
    const bool open_to_us = access(path, R_OK | W_OK) == 0;
    line(r, "device node", "%s (%s): %s", name, owner, open_to_us ? "may be opened" : strerror(errno));
    if (!open_to_us) {
        const struct passwd *user = getpwuid(getuid());
        wrong(r,
              "%s may not be opened by this user: sudo usermod -aG render,video %s, then log out and in again (in a container: --device %s and "
              "--group-add)",
              name, user ? user->pw_name : "$USER", name);
    }
    return true;
}

static void look_at_nodes(struct report *r)
{
    const struct path kfd = path_of(r, "/dev/kfd"), pattern = path_of(r, "/dev/dri/renderD*");
    const size_t root = strlen(pattern.text) - strlen("/dev/dri/renderD*");
    if (!look_at_node(r, kfd.text, "/dev/kfd"))
        wrong(r, "/dev/kfd is not there: the amdgpu driver does not offer computing on this machine, or this is a container that was started without "
                 "--device /dev/kfd "
                 "--device /dev/dri");
    glob_t g;
    if (glob(pattern.text, 0, NULL, &g) == 0) {
        for (size_t i = 0; i < g.gl_pathc; i++)
            look_at_node(r, g.gl_pathv[i], g.gl_pathv[i] + root);
        globfree(&g);
    } else {
        line(r, "device node", "/dev/dri/renderD*: none");
        wrong(r, "there is no /dev/dri/renderD*: no graphics driver is loaded, or this is a container that was started without --device /dev/dri");
    }
}

static bool member_of(const char *name)
{
    const struct group *g = getgrnam(name);
    gid_t groups[256];
    const int n = getgroups((int)(sizeof groups / sizeof *groups), groups);
    for (int i = 0; g && i < n; i++)
        if (groups[i] == g->gr_gid)
            return true;
    return g && getegid() == g->gr_gid;
}

/* What the GPU may take of the machine's memory: ttm.pages_limit bounds the sum of all cards, mem_info_gtt_total each. */
static void look_at_memory(struct report *r)
{
    uint64_t pages = 0;
    line(r, "groups", "render: %s, video: %s", member_of("render") ? "yes" : "no", member_of("video") ? "yes" : "no");
    line(r, "memory", "%s available", memory_text(memory_available()).text);
    if (number_in_file(path_of(r, "/sys/module/ttm/parameters/pages_limit").text, "", &pages) && pages < UINT64_MAX / PAGE_BYTES)
        line(r, "GPU limit", "ttm.pages_limit is %" PRIu64 " pages, %s", pages, memory_text(pages * PAGE_BYTES).text);
    glob_t g;
    if (glob(path_of(r, "/sys/class/drm/card[0-9]*/device/mem_info_gtt_total").text, 0, NULL, &g))
        return;
    for (size_t i = 0; i < g.gl_pathc; i++) {
        uint64_t gtt = 0, vram = 0;
        char vram_path[PATH_ROOM];
        const char *end = strstr(g.gl_pathv[i], "mem_info_gtt_total");
        if (!end || !number_in_file(g.gl_pathv[i], "", &gtt))
            continue;
        snprintf(vram_path, sizeof vram_path, "%.*smem_info_vram_total", (int)(end - g.gl_pathv[i]), g.gl_pathv[i]);
        number_in_file(vram_path, "", &vram);
        line(r, "GPU limit", "%s of the machine's memory (GTT), %s set aside by the BIOS", memory_text(gtt).text, memory_text(vram).text);
    }
    globfree(&g);
}

/* ---- the runtime and the devices ---- */

static void look_at_device(struct report *r, const struct hip_runtime *rt, int i)
{
    char name[128] = "?";
    int integrated = 0, units = 0, wave = 0;
    size_t left = 0, total = 0;
    if (rt->hipSetDevice(i) != HIP_OK || rt->hipDeviceGetName(name, (int)sizeof name, i) != HIP_OK ||
        rt->hipDeviceGetAttribute(&integrated, HIP_ATTR_INTEGRATED, i) != HIP_OK ||
        rt->hipDeviceGetAttribute(&units, HIP_ATTR_COMPUTE_UNITS, i) != HIP_OK || rt->hipDeviceGetAttribute(&wave, HIP_ATTR_WAVE_SIZE, i) != HIP_OK ||
        rt->hipMemGetInfo(&left, &total) != HIP_OK) {
        line(r, "GPU", "%d: does not answer", i);
        return;
    }
    name[sizeof name - 1] = '\0';
    const struct hip_arch arch = hip_runtime_arch(rt, i);
    line(r, "GPU", "%d: %s, %s, %d compute units, waves of %d, %s free of %s%s", i, name, arch.name[0] ? arch.name : "of unknown kind", units, wave,
         memory_text(left).text, memory_text(total).text, integrated ? " shared with the machine" : "");
    if (arch.name[0] && !hip_bundle_has(arch.name))
        line(r, "", "there are no kernels for %s in this build", arch.name);
}

/* Without them the GPU can be used all the same. A runtime that does not replay well may do worse, so they are only tried where they are wanted. */
static void look_at_graphs(struct report *r, struct hip_device *d)
{
    struct error err = {""};
    const uint64_t start = clock_ns();
    if (!r->o->graph) {
        line(r, "HIP graphs", "off (--hip-graph on)");
    } else if (hip_graphs_try(d, &err) == 0) {
        line(r, "HIP graphs", "on, and what was replayed was right (%.2f s)", (double)(clock_ns() - start) / 1e9);
    } else if (hip_device_failed(d)) {
        line(r, "HIP graphs", "failed");
        wrong(r, "the GPU failed when HIP graphs were tried (leave hip-graph off): %s", err.text);
    } else {
        line(r, "HIP graphs", "wanted, but they stay off");
        hint(r, "kernels are launched one by one, as without --hip-graph on: %s", err.text);
    }
}

static void test_device(struct report *r, const char *library)
{
    struct hip_device *d = NULL;
    struct error err = {""};
    if (hip_device_open(&d, library, r->o->device, &err)) {
        wrong(r, "%s", err.text);
        return;
    }
    r->opened = true;
    const uint64_t left = hip_device_memory_free(d);
    if (r->o->weight_bytes) {
        line(r, "model", "%s of weights, %s free for them and the contexts", memory_text(r->o->weight_bytes).text, memory_text(left).text);
        if (r->o->weight_bytes > left)
            wrong(r,
                  "the model's weights do not fit: close programs, raise the kernel parameter ttm.pages_limit (4 KiB pages), or use a smaller model");
    }
    const uint64_t start = clock_ns();
    if (hip_selftest(d, r->o->types, NULL, &err)) {
        line(r, "self-test", "failed");
        wrong(r, "%s", err.text);
    } else {
        line(r, "self-test", "every operation agrees with the CPU (%.2f s)", (double)(clock_ns() - start) / 1e9);
        look_at_graphs(r, d);
    }
    hip_device_close(d);
}

static void look_at_runtime(struct report *r)
{
    struct hip_runtime rt;
    struct error err = {""};
    const struct hip_bundle_list list = hip_bundle_list();
    const char *library = r->o->library && r->o->library[0] ? r->o->library : NULL;
    int version = 0;
    line(r, "this build", "%s%s", list.text[0] ? "kernels for " : "no GPU kernels", list.text);
    if (hip_runtime_load(&rt, library, &err)) {
        line(r, "HIP runtime", "%s", library ? err.text : "not found"); /* a library that was named is worth a reason whatever else is wrong */
        wrong(r, "%s", err.text);
        return;
    }
    if (rt.hipRuntimeGetVersion(&version) == HIP_OK)
        line(r, "HIP runtime", "%s, version %d.%d", rt.library, version / 10000000, version / 100000 % 100);
    if (version > 0 && version < 60000000)
        hint(r,
             "the HIP runtime is version %d.%d: versions before 6 know few or none of the GPUs that this program has kernels for, and gfx1152 is "
             "known "
             "from 6.4 on",
             version / 10000000, version / 100000 % 100);
    else if (version <= 0)
        line(r, "HIP runtime", "%s", rt.library);
    const int n = hip_runtime_start(&rt, &err);
    if (n < 0) {
        wrong(r, "%s", err.text);
        return;
    }
    for (int i = 0; i < n; i++)
        look_at_device(r, &rt, i);
    if (n == 0)
        line(r, "GPU", "none that the HIP runtime can use");
    test_device(r, library);
}

/* The system's side is only worth a complaint when the runtime does not find what it wants: a GPU that answers needs no advice about device nodes. */
int hip_doctor(FILE *out, const struct hip_doctor_options *options)
{
    struct report r = {.out = out, .o = options};
    fputs("bedside doctor: can the GPU be used?\n\n", out);
    const bool there = look_at_bus(&r);
    look_at_kernel(&r);
    look_at_nodes(&r);
    look_at_memory(&r);
    if (!there) { /* nothing else matters then */
        r.n_wrong = 0;
        wrong(&r, "this machine has no AMD GPU, or it is hidden from this container or virtual machine");
    }
    const int system_wrong = r.n_wrong;
    look_at_runtime(&r);
    const bool usable = r.n_wrong == system_wrong;
    if (usable) {
        fprintf(out, "\nGPU %d can be used: --device hip:%d, or --device auto for the first one\n", options->device, options->device);
    } else {
        fputs("\nThe GPU cannot be used, and the CPU computes (--device cpu, or auto):\n", out);
        for (int i = r.opened ? system_wrong : 0; i < (there || r.opened ? r.n_wrong : system_wrong); i++)
            fprintf(out, "  - %s\n", r.wrong[i].text);
    }
    for (int i = 0; i < r.n_hints; i++)
        fprintf(out, "  note: %s\n", r.hints[i].text);
    return usable ? 0 : 1;
}
