#include "hip/bundle.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* A bundle is "__CLANG_OFFLOAD_BUNDLE__", a u64 count, and for each entry u64 offset, u64 size, u64 length of the name and the name, such as
 * "hipv4-amdgcn-amd-amdhsa--gfx1152" or "host-x86_64-unknown-linux--". Numbers are little-endian. Built by ourselves, but walked with care. */
static const char magic[] = "__CLANG_OFFLOAD_BUNDLE__";

struct walk {
    const unsigned char *at;
    size_t left;
    uint64_t entries;
};

static bool take_u64(struct walk *w, uint64_t *out)
{
    if (w->left < 8)
        return false;
    memcpy(out, w->at, 8);
    w->at += 8;
    w->left -= 8;
    return true;
}

static struct walk walk_start(void)
{
    struct walk w = {.at = hip_bundle_start, .left = (uintptr_t)hip_bundle_end - (uintptr_t)hip_bundle_start};
    const size_t n = sizeof magic - 1;
    if (w.left < n || memcmp(w.at, magic, n) != 0)
        return (struct walk){0};
    w.at += n;
    w.left -= n;
    if (!take_u64(&w, &w.entries))
        w.entries = 0;
    return w;
}

/* The next entry's instruction set in arch [size]; false at the end. Entries of other kinds give "". */
static bool walk_next(struct walk *w, char *arch, size_t size)
{
    uint64_t offset, bytes, len;
    if (w->entries == 0 || !take_u64(w, &offset) || !take_u64(w, &bytes) || !take_u64(w, &len) || len > w->left)
        return false;
    w->entries--;
    arch[0] = '\0';
    for (size_t i = 0; i + 3 <= len; i++)
        if (memcmp(w->at + i, "gfx", 3) == 0) {
            snprintf(arch, size, "%.*s", (int)(len - i), (const char *)w->at + i);
            break;
        }
    w->at += len;
    w->left -= (size_t)len;
    return true;
}

struct hip_bundle_list hip_bundle_list(void)
{
    struct hip_bundle_list list = {""};
    struct walk w = walk_start();
    char arch[32];
    size_t used = 0;
    while (walk_next(&w, arch, sizeof arch)) {
        const int n = arch[0] ? snprintf(list.text + used, sizeof list.text - used, "%s%s", used ? ", " : "", arch) : 0;
        if (n < 0 || (size_t)n >= sizeof list.text - used)
            break;
        used += (size_t)n;
    }
    return list;
}

bool hip_bundle_has(const char *arch)
{
    struct walk w = walk_start();
    char name[32];
    while (walk_next(&w, name, sizeof name))
        if (name[0] && strcmp(name, arch) == 0)
            return true;
    return false;
}
