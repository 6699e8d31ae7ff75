/* Where in one sparse memfd the physical memory of handles lies: lowest free offset first,
 * so that handles created one after another have adjacent offsets and their maps merge in
 * the kernel's table (vm.max_map_count). */
#include "sim/gpu/arena.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Free extents, ascending, never touching each other. */
struct sim_extent {
    size_t offset;
    size_t bytes;
};

static bool arena_open(struct sim_arena *arena) {
    if (arena->is_open) return true;
    int fd = memfd_create(arena->name, MFD_CLOEXEC);
    if (fd < 0) return false;
    arena->fd = fd;
    arena->is_open = true;
    return true;
}

static bool take_free_extent(struct sim_arena *arena, size_t bytes, size_t *offset_out) {
    for (size_t i = 0; i < arena->n_free; i++) {
        struct sim_extent *extent = &arena->free[i];
        if (extent->bytes < bytes) continue;
        *offset_out = extent->offset;
        extent->offset += bytes;
        extent->bytes -= bytes;
        if (extent->bytes == 0) {
            arena->n_free--;
            memmove(extent, extent + 1, (arena->n_free - i) * sizeof *extent);
        }
        return true;
    }
    return false;
}

/* Room for one more free extent per piece in use, taken beforehand, so that giving back cannot fail. */
static bool reserve_extents(struct sim_arena *arena) {
    if (arena->n_used + 2 <= arena->n_free_capacity) return true;
    size_t n = arena->n_free_capacity ? 2 * arena->n_free_capacity : 64;
    struct sim_extent *extents = realloc(arena->free, n * sizeof *extents);
    if (!extents) return false;
    arena->free = extents;
    arena->n_free_capacity = n;
    return true;
}

bool simgpu__arena_take(struct sim_arena *arena, size_t bytes, size_t *offset_out) {
    if (!arena_open(arena) || !reserve_extents(arena)) return false;
    if (!take_free_extent(arena, bytes, offset_out)) {
        if (ftruncate(arena->fd, (off_t)(arena->end + bytes)) != 0) return false;
        *offset_out = arena->end;
        arena->end += bytes;
    }
    arena->n_used++;
    return true;
}

void simgpu__arena_give(struct sim_arena *arena, size_t offset, size_t bytes) {
    while (fallocate(arena->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)bytes) !=
               0 &&
           errno == EINTR)
        continue;
    size_t i = arena->n_free;
    while (i > 0 && arena->free[i - 1].offset > offset) i--;
    struct sim_extent *before = i > 0 ? &arena->free[i - 1] : NULL;
    struct sim_extent *after = i < arena->n_free ? &arena->free[i] : NULL;
    bool joins_before = before && before->offset + before->bytes == offset;
    bool joins_after = after && offset + bytes == after->offset;
    if (joins_before && joins_after) {
        before->bytes += bytes + after->bytes;
        memmove(after, after + 1, (arena->n_free - i - 1) * sizeof *after);
        arena->n_free--;
    } else if (joins_before) {
        before->bytes += bytes;
    } else if (joins_after) {
        after->offset = offset;
        after->bytes += bytes;
    } else {
        memmove(&arena->free[i + 1], &arena->free[i], (arena->n_free - i) * sizeof *arena->free);
        arena->free[i] = (struct sim_extent){offset, bytes};
        arena->n_free++;
    }
    arena->n_used--;
}

void simgpu__arena_close(struct sim_arena *arena) {
    if (arena->is_open) close(arena->fd);
    free(arena->free);
    *arena = (struct sim_arena){.name = arena->name};
}
