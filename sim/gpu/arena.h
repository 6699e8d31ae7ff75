/* A sparse memfd carved into extents; under the simulator's lock. */
#ifndef FCDP_SIMGPU_ARENA_H
#define FCDP_SIMGPU_ARENA_H

#include <stdbool.h>
#include <stddef.h>

struct sim_extent;

/* end = used + free, in bytes; n_free <= n_used + 1, since free extents never touch */
struct sim_arena {
    const char *name;
    bool is_open;
    int fd;
    size_t end;
    size_t n_used;
    size_t n_free;
    size_t n_free_capacity;
    struct sim_extent *free;
};

bool simgpu__arena_take(struct sim_arena *arena, size_t bytes, size_t *offset_out);
void simgpu__arena_give(struct sim_arena *arena, size_t offset, size_t bytes);
void simgpu__arena_close(struct sim_arena *arena);

#endif
