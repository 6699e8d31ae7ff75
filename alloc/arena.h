/* arena.h - which bytes of some address ranges are in use: blocks, free blocks, holes. It touches no device
 * memory and calls no driver.
 *
 * A span is a reserved range of addresses, cut into blocks without gaps:
 *
 *     hole    whole pages that are not mapped
 *     free    mapped and unused
 *     quick   mapped and unused, kept whole for the next request of its size
 *     live    in use
 *     busy    out of the arena's hands: being mapped, being unmapped, or unusable until an event has passed
 *
 *     two adjacent blocks are never both free, nor both holes (quick blocks count as neither until a flush)
 *     a hole begins and ends on a page
 *     bytes are multiples of FCDP_ARENA_UNIT
 *
 * A mapping is one page, or several pages that were mapped as one and can be unmapped only together:
 * joined[i] <=> page i is in the mapping of page i - 1.
 *
 * Placement. A request takes a quick block of its size; else a place in one free block; else it must grow
 * into a run of adjacent free blocks and holes. While memory is plentiful, the arena chooses the place that
 * needs the fewest new pages. When memory is short, it chooses the place that occupies the fewest unused
 * pages, mapped or not, since each of them could serve anywhere. So free pages need not be adjacent to be
 * used: holes cost no memory, and an unused mapping can leave its place (fcdp__arena_unmap_begin).
 *
 * An arena has no lock. Its owner serialises all calls.
 */
#ifndef FCDP_ARENA_H
#define FCDP_ARENA_H

#include "base/base.h"

enum { FCDP_ARENA_UNIT = 512 };

typedef enum fcdp_block_state {
    FCDP_BLOCK_HOLE,
    FCDP_BLOCK_FREE,
    FCDP_BLOCK_QUICK,
    FCDP_BLOCK_LIVE,
    FCDP_BLOCK_BUSY
} fcdp_block_state;

typedef struct fcdp_arena fcdp_arena;
typedef struct fcdp_span fcdp_span;
typedef struct fcdp_block fcdp_block;

struct fcdp_block {
    uint64_t address;
    size_t bytes;
    fcdp_block_state state;
    bool unmapped; /* a hole, or a busy one without pages */
    fcdp_span *span;
    /* live: the owner's */
    size_t requested_bytes;
    void *tag;
    /* the arena's */
    uint64_t freed_at;                 /* quick, free: the arena's clock when the last of it was given back */
    uint64_t born;                     /* live, quick: how many blocks had been taken before */
    fcdp_block *before, *after;        /* in the span */
    fcdp_block *list_next, *list_prev; /* quick or free list, or unused nodes */
};

struct fcdp_span {
    uint64_t base;
    size_t bytes;
    void *owner; /* of the pages */
    fcdp_block *first;
    uint8_t *joined; /* by page: it is one mapping with the page before */
    fcdp_span *next;
};

/* A place for a block. Blocks first..last are busy and stay as they are until the growth ends. The caller
 * maps those that are `unmapped`, each by pages of its own or as one, and reads them without its lock. */
typedef struct fcdp_growth {
    fcdp_block *first, *last;
    uint64_t address; /* of the block to be */
    size_t bytes;
    size_t n_pages; /* to be mapped; 0: it fits */
    fcdp_block *spare[2];
} fcdp_growth;

fcdp_status fcdp__arena_create(size_t page_bytes, fcdp_arena **arena_out) FCDP_MUST_CHECK;
/* Frees what describes the blocks, whatever their state. */
void fcdp__arena_destroy(fcdp_arena *arena);
/* One hole from `base` on; page aligned. */
fcdp_status fcdp__arena_add_span(fcdp_arena *arena, uint64_t base, size_t bytes, void *owner) FCDP_MUST_CHECK;
const fcdp_span *fcdp__arena_spans(const fcdp_arena *arena);

/* A live block of `bytes` (a multiple of the unit) from the quick ones, NULL: none of that size. */
fcdp_block *fcdp__arena_take_quick(fcdp_arena *arena, size_t bytes);
/* One from the free blocks. FCDP_PENDING: none is large enough; or, where memory is short, another place may
 * use fewer pages. */
fcdp_status fcdp__arena_take(fcdp_arena *arena, size_t bytes, bool is_short,
                             fcdp_block **block_out) FCDP_MUST_CHECK;
/* How many bytes the caller asked for when it took the block; for the counts. */
void fcdp__arena_request(fcdp_arena *arena, fcdp_block *block, size_t requested_bytes);
/* Give a live or busy block back, whole: it becomes quick if its size has a slot, else free. */
void fcdp__arena_give(fcdp_arena *arena, fcdp_block *block);
/* The live block that begins at `address`, NULL: none. */
fcdp_block *fcdp__arena_find(const fcdp_arena *arena, uint64_t address);
/* Live to busy: fcdp__arena_find does not find the block any more. It ends with fcdp__arena_give. */
void fcdp__arena_set_busy(fcdp_arena *arena, fcdp_block *block);
/* All quick blocks become free ones. */
void fcdp__arena_flush(fcdp_arena *arena);
uint64_t fcdp__arena_clock(const fcdp_arena *arena);

/* The cheapest place for `bytes`, busy from now on: it needs the fewest pages to be mapped or, where memory
 * is short, to be used. With `ahead_pages` a last hole is taken up to so long, for what comes next.
 * FCDP_PENDING: no span has a place, add one. */
fcdp_status fcdp__arena_grow_begin(fcdp_arena *arena, size_t bytes, bool is_short, size_t ahead_pages,
                                   fcdp_growth *growth_out) FCDP_MUST_CHECK;
/* Its holes are mapped, each from its begin on in mappings of `n_each` pages, the last of which may be
 * smaller: the live block. Ends the growth. */
fcdp_block *fcdp__arena_grow_commit(fcdp_arena *arena, fcdp_growth *growth, size_t n_each);
/* Nothing was mapped: everything is as before the growth. */
void fcdp__arena_grow_abort(fcdp_arena *arena, fcdp_growth *growth);

/* Mappings that nothing lies on, freed at or before `clock`, the longest unused first: at most `n_pages`
 * pages in mappings of one page, and the last one may be larger; as busy blocks, each of one larger mapping
 * or of any number of such pages, at most `max_blocks` of them. Returns how many blocks. */
size_t fcdp__arena_unmap_begin(fcdp_arena *arena, uint64_t clock, size_t n_pages, fcdp_block **blocks_out,
                               size_t max_blocks);
/* End the unmapping of one of these blocks: its pages are unmapped, or the driver refused. */
void fcdp__arena_unmap_commit(fcdp_arena *arena, fcdp_block *block);
void fcdp__arena_unmap_abort(fcdp_arena *arena, fcdp_block *block);
/* For a busy block that begins a mapping: does that mapping have more than one page? */
bool fcdp__arena_is_joined(const fcdp_arena *arena, const fcdp_block *block);

/* A busy block of whole pages: its pages are gone, and nothing takes its
 * addresses until they are returned. */
void fcdp__arena_quarantine_begin(fcdp_arena *arena, fcdp_block *block);
void fcdp__arena_quarantine_end(fcdp_arena *arena, fcdp_block *block);

typedef struct fcdp_arena_stats {
    size_t live_bytes, requested_bytes, free_bytes, quick_bytes, busy_bytes; /* mapped = all but holes */
    size_t n_live, n_free, n_quick, n_holes;
} fcdp_arena_stats;
/* Mapped pages that no live or busy block lies on. Looks at every block. */
size_t fcdp__arena_idle_pages(const fcdp_arena *arena);
/* Always up to date; the arena's. */
const fcdp_arena_stats *fcdp__arena_stats(const fcdp_arena *arena);

#endif
