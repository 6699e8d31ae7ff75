/* arena_table.c - finds a block by its address.
 *
 * A free names an address alone, so each one pays for a look-up. Open addressing with linear probing, in a
 * table that is at most half full, keeps the look-up short.
 */
#include "alloc/arena_internal.h"

#include <stdlib.h>

static size_t table_slot(const fcdp_arena *arena, uint64_t address) {
    return (size_t)((address / FCDP_ARENA_UNIT * 0x9e3779b97f4a7c15u) >> 20) & (arena->table_capacity - 1);
}

void fcdp__arena_table_insert(fcdp_arena *arena, fcdp_block *block) {
    size_t at = table_slot(arena, block->address);
    while (arena->table[at]) at = (at + 1) & (arena->table_capacity - 1);
    arena->table[at] = block;
    arena->n_table++;
}

fcdp_status fcdp__arena_table_reserve(fcdp_arena *arena) {
    if ((arena->n_table + 1) * 2 <= arena->table_capacity) return FCDP_OK;
    size_t old_capacity = arena->table_capacity, capacity = old_capacity ? 2 * old_capacity : 256;
    fcdp_block **old = arena->table, **table = calloc(capacity, sizeof *table);
    if (!table) return fcdp__fail(FCDP_ERR_SYSTEM, "no host memory for the allocator's table");
    arena->table = table;
    arena->table_capacity = capacity;
    arena->n_table = 0;
    for (size_t i = 0; i < old_capacity; i++)
        if (old[i]) fcdp__arena_table_insert(arena, old[i]);
    free(old);
    return FCDP_OK;
}

size_t fcdp__arena_table_find(const fcdp_arena *arena, uint64_t address) {
    if (arena->n_table == 0) return SIZE_MAX;
    size_t at = table_slot(arena, address);
    while (arena->table[at] && arena->table[at]->address != address)
        at = (at + 1) & (arena->table_capacity - 1);
    return arena->table[at] ? at : SIZE_MAX;
}

void fcdp__arena_table_remove(fcdp_arena *arena, uint64_t address) {
    size_t hole = fcdp__arena_table_find(arena, address), mask = arena->table_capacity - 1;
    FCDP_CHECK(0, hole != SIZE_MAX);
    for (size_t at = (hole + 1) & mask; arena->table[at]; at = (at + 1) & mask) {
        size_t home = table_slot(arena, arena->table[at]->address);
        if (((at - home) & mask) < ((at - hole) & mask)) continue; /* it may not move before its home */
        arena->table[hole] = arena->table[at];
        hole = at;
    }
    arena->table[hole] = NULL;
    arena->n_table--;
}
