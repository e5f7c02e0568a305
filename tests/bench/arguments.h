/* tests/bench/arguments.h: numbers on the command lines of the benchmarks. */
#ifndef BEDSIDE_TESTS_BENCH_ARGUMENTS_H
#define BEDSIDE_TESTS_BENCH_ARGUMENTS_H

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

static inline int whole_number(const char *text)
{
    char *end;
    errno = 0;
    const long n = strtol(text, &end, 10);
    if (end == text || *end || errno || n < INT_MIN || n > INT_MAX) {
        fprintf(stderr, "%s is not a whole number\n", text);
        exit(2);
    }
    return (int)n;
}

#endif
