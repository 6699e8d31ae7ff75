/* arena_internal.h - the arena's struct, for arena.c (its blocks) and arena_place.c (where one goes). */
#ifndef FCDP_ARENA_INTERNAL_H
#define FCDP_ARENA_INTERNAL_H

#include "alloc/arena.h"

enum {
    ARENA_SUB_BITS = 4, /* each power of two is cut into 16 size classes */
    ARENA_N_CLASSES = 64 << ARENA_SUB_BITS,
    ARENA_N_QUICK_SLOTS = 256,
    ARENA_NODES_PER_CHUNK = 64,
};

typedef struct node_chunk {
    struct node_chunk *next;
    fcdp_block nodes[ARENA_NODES_PER_CHUNK];
} node_chunk;

typedef struct quick_slot {
    size_t bytes; /* of all blocks in it */
    fcdp_block *head;
} quick_slot;

struct fcdp_arena {
    size_t page_bytes;
    uint64_t clock;   /* gives so far */
    uint64_t n_takes; /* so far */
    fcdp_span *spans;
    node_chunk *chunks;
    fcdp_block *unused;
    size_t n_unused;
    fcdp_block *free_lists[ARENA_N_CLASSES];
    uint64_t class_bits[ARENA_N_CLASSES / 64];
    quick_slot quick[ARENA_N_QUICK_SLOTS];
    fcdp_block **table; /* linear probing; live and quick blocks */
    size_t n_table, table_capacity;
    fcdp_arena_stats counts;
};

static inline uint64_t fcdp__arena_page_down(const fcdp_arena *arena, uint64_t address) {
    return address / arena->page_bytes * arena->page_bytes;
}

static inline uint64_t fcdp__arena_page_up(const fcdp_arena *arena, uint64_t address) {
    return fcdp__arena_page_down(arena, address + arena->page_bytes - 1);
}

/* The class of blocks of `bytes`; blocks of one class differ by less than a 16th. */
unsigned fcdp__arena_class_of(size_t bytes);
/* The first class from `class` on that has blocks, ARENA_N_CLASSES: none. */
unsigned fcdp__arena_class_next(const fcdp_arena *arena, unsigned class);

/* ---- arena_place.c ---- */

/* [from, to) of the block's addresses: the mappings that lie wholly within it; both 0: none. */
typedef struct arena_range {
    uint64_t from, to;
} arena_range;
arena_range fcdp__arena_whole_mappings(const fcdp_arena *arena, const fcdp_block *block);
/* Where the mapping that ends at `to` begins. */
uint64_t fcdp__arena_mapping_start(const fcdp_arena *arena, const fcdp_span *span, uint64_t to);

typedef struct arena_place {
    fcdp_block *first; /* holds the beginning; NULL: there is no such place */
    uint64_t address;
    size_t n_touched;  /* pages that nothing lay on before, mapped or not */
    size_t n_unmapped; /* of these, the holes' */
    bool is_alike;     /* it touches a block of its own size */
    size_t run_bytes;  /* of the free blocks and holes around it */
    uint64_t born;     /* when the younger of the blocks that it touches was taken; 0: it touches none */
} arena_place;

/* The best place in one free block. */
arena_place fcdp__arena_fit_find(const fcdp_arena *arena, size_t bytes, bool is_short);
/* The best place among all free blocks and holes. */
arena_place fcdp__arena_place_find(const fcdp_arena *arena, size_t bytes, bool is_short);
/* No place can occupy fewer unused pages. */
size_t fcdp__arena_least_touched(const fcdp_arena *arena, size_t bytes);

#endif
