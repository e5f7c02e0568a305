#include "base/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

static _Atomic int current_level = LOG_INFO;

void log_set_level(enum log_level level)
{
    atomic_store(&current_level, (int)level);
}

void log_line(enum log_level level, const char *format, ...)
{
    static const char *const names[] = {"error", "warn ", "info ", "debug"};
    if ((int)level > atomic_load(&current_level))
        return;
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);

    char line[sizeof text * 4 + 64];
    size_t n = 0;
    struct timespec now;
    struct tm tm;
    clock_gettime(CLOCK_REALTIME, &now);
    localtime_r(&now.tv_sec, &tm);
    n += strftime(line, 32, "%Y-%m-%d %H:%M:%S", &tm);
    n += (size_t)snprintf(line + n, 32, ".%03d %s ", (int)(now.tv_nsec / 1000000), names[level]);
    for (const char *p = text; *p; p++) {
        unsigned char c = (unsigned char)*p;
        if (c < 0x20 || c == 0x7F)
            n += (size_t)snprintf(line + n, 5, "\\x%02x", c);
        else
            line[n++] = (char)c;
    }
    line[n++] = '\n';
    for (size_t done = 0; done < n;) {
        ssize_t k = write(STDERR_FILENO, line + done, n - done);
        if (k <= 0)
            break; /* nowhere to complain */
        done += (size_t)k;
    }
}
