#include "server/histogram.h"

const double histogram_bounds[HISTOGRAM_BOUNDS] = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120};

void histogram_add(struct histogram *h, uint64_t ns)
{
    const double seconds = (double)ns * 1e-9;
    int i = 0;
    while (i < HISTOGRAM_BOUNDS && seconds > histogram_bounds[i])
        i++;
    h->buckets[i]++;
    h->count++;
    h->sum += seconds;
}
