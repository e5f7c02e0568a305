/* base/alloc.h: allocation with the multiplication checked. All return zeroed memory or NULL; release with free(). */
#ifndef BEDSIDE_BASE_ALLOC_H
#define BEDSIDE_BASE_ALLOC_H

#include <stddef.h>

/* n elements of `size` bytes; at least one byte, so that NULL always means out of memory. */
void *alloc_array(size_t n, size_t size);

/* The same, starting on a 64-byte cache line (n * size is rounded up to whole lines). */
void *alloc_lines(size_t n, size_t size);

/* Grows *array (elements of `size` bytes, capacity *cap) to hold at least `need` elements. 0 or -1; on -1 nothing changed. */
int alloc_grow(void *array, size_t *cap, size_t need, size_t size);

/* A NUL-terminated copy of n bytes. */
char *alloc_text(const char *data, size_t n);

#endif
