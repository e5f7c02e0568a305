#include "engine/memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool number_in_file(const char *path, const char *label, uint64_t *out)
{
    FILE *f = fopen(path, "re");
    if (!f)
        return false;
    char line[256];
    bool found = false;
    size_t n = strlen(label);
    while (!found && fgets(line, sizeof line, f)) {
        if (strncmp(line, label, n) != 0)
            continue;
        const char *digits = line + n + strspn(line + n, " \t");
        found = *digits >= '0' && *digits <= '9';
        if (found)
            *out = strtoull(digits, NULL, 0);
    }
    fclose(f);
    return found;
}

uint64_t memory_available(void)
{
    uint64_t kib = 0, limit, used, cache;
    if (!number_in_file("/proc/meminfo", "MemAvailable:", &kib))
        return 0;
    uint64_t available = kib > UINT64_MAX / 1024 ? UINT64_MAX : kib * 1024;
    /* cgroup v2; "max" is no number, and outside a container the root group has no such file. File pages that can be dropped do not count. */
    if (number_in_file("/sys/fs/cgroup/memory.max", "", &limit) && number_in_file("/sys/fs/cgroup/memory.current", "", &used)) {
        if (!number_in_file("/sys/fs/cgroup/memory.stat", "inactive_file ", &cache))
            cache = 0;
        used -= cache < used ? cache : used;
        uint64_t left = limit > used ? limit - used : 0;
        if (left < available)
            available = left;
    }
    return available;
}

struct memory_text memory_text(uint64_t bytes)
{
    struct memory_text t;
    double mib = (double)bytes / (1024 * 1024);
    if (mib >= 1024)
        snprintf(t.text, sizeof t.text, "%.1f GiB", mib / 1024);
    else
        snprintf(t.text, sizeof t.text, "%.1f MiB", mib);
    return t;
}
