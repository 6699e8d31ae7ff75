/* grow.h - lists that grow by one. */
#ifndef MEMTRACE_GROW_H
#define MEMTRACE_GROW_H

#include <stddef.h>

/* Makes room for one more element in an array of `*room` elements of `size` bytes, of which n are used.
 * Returns `array` itself, or its replacement of twice the size. NULL: no memory; `array` and `*room` are
 * unchanged. */
void *memtrace_grown(void *array, size_t *room, size_t n, size_t size);

#endif
