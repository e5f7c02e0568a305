#include "base/alloc.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

void *alloc_array(size_t n, size_t size)
{
    if (n == 0 || size == 0)
        return calloc(1, 1);
    return calloc(n, size); /* calloc checks the product */
}

void *alloc_lines(size_t n, size_t size)
{
    if (size && n > (SIZE_MAX - 64) / size)
        return NULL;
    size_t bytes = (n * size + 63) & ~(size_t)63;
    if (!bytes)
        bytes = 64;
    void *p = aligned_alloc(64, bytes);
    if (p)
        memset(p, 0, bytes);
    return p;
}

int alloc_grow(void *array, size_t *cap, size_t need, size_t size)
{
    if (need <= *cap)
        return 0;
    size_t want = *cap ? *cap : 16;
    while (want < need) {
        if (want > SIZE_MAX / 2)
            return -1;
        want *= 2;
    }
    if (size == 0 || want > SIZE_MAX / size)
        return -1;
    void *old;
    memcpy(&old, array, sizeof old);
    void *p = realloc(old, want * size);
    if (!p)
        return -1;
    memcpy(array, &p, sizeof p);
    *cap = want;
    return 0;
}

char *alloc_text(const char *data, size_t n)
{
    if (n == SIZE_MAX)
        return NULL;
    char *p = malloc(n + 1);
    if (!p)
        return NULL;
    if (n)
        memcpy(p, data, n);
    p[n] = '\0';
    return p;
}
