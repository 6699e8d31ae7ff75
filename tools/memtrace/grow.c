/* grow.c - doubles a list when it is full, so that adding stays cheap. */
#include "tools/memtrace/grow.h"

#include <stdlib.h>

enum { FIRST_ROOM = 64 };

void *memtrace_grown(void *array, size_t *room, size_t n, size_t size) {
    if (n < *room) return array;
    size_t more = *room ? 2 * *room : FIRST_ROOM;
    void *bigger = realloc(array, more * size);
    if (bigger) *room = more;
    return bigger;
}
