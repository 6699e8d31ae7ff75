/* grow.h - lists that grow by one. */
#ifndef MEMTRACE_GROW_H
#define MEMTRACE_GROW_H

#include <stddef.h>

/* An array of `*room` elements of `size` bytes, of which n are used, with room for one more: `array` itself,
 * or what takes its place, twice as large. NULL: no memory; then `array` and `*room` are as they were. */
void *memtrace_grown(void *array, size_t *room, size_t n, size_t size);

#endif
