/* server/histogram.h: how often something took how long, in fixed buckets of seconds. */
#ifndef BEDSIDE_SERVER_HISTOGRAM_H
#define BEDSIDE_SERVER_HISTOGRAM_H

#include <stdint.h>

enum { HISTOGRAM_BOUNDS = 16 };

/* Upper bounds of the buckets in seconds, ascending; one more bucket has what is above the last. */
extern const double histogram_bounds[HISTOGRAM_BOUNDS];

struct histogram {
    uint64_t buckets[HISTOGRAM_BOUNDS + 1]; /* each value counts in one of them (Prometheus wants the running sums) */
    uint64_t count;
    double sum; /* seconds */
};

void histogram_add(struct histogram *h, uint64_t ns);

#endif
