/* heap_reclaim.c - unmaps quiescent pages, for a miss of the heap or for the pool's other holders.
 *
 * Single pages can serve at once. A page of a larger handle cannot move alone, so the whole handle goes back
 * to the pool, which makes room for single pages.
 */
#include <stdlib.h>

#include "alloc/heap_internal.h"

enum { MAX_UNMAPPED = 64 }; /* blocks unmapped at a time */

/* Single pages go to `pages_out`; a larger handle to the pool, where it is room for single ones. */
size_t fcdp__heap_arena_collect(heap_arena *arena, size_t n_wanted, fcdp_phys *pages_out, size_t *n_out) {
    fcdp_block *blocks[MAX_UNMAPPED];
    bool gone[MAX_UNMAPPED];
    size_t n_blocks = 0, n_pages = 0;
    *n_out = 0;
    fcdp__lock_acquire(&arena->lock);
    if (!fcdp__heap_is_pinned(arena)) { /* a pool that begins again mallocs under this lock */
        fcdp__arena_flush(arena->blocks);
        n_blocks = fcdp__arena_unmap_begin(arena->blocks, arena->quiescent_clock, n_wanted, blocks,
                                           MAX_UNMAPPED);
    }
    fcdp__lock_release(&arena->lock);
    if (n_blocks == 0) return 0;
    for (size_t i = 0; i < n_blocks; i++) {
        fcdp_phys handle, *pages = pages_out + *n_out;
        size_t n = blocks[i]->bytes / arena->heap->page_bytes;
        bool as_one = fcdp__arena_is_joined(arena->blocks, blocks[i]);
        gone[i] = fcdp__heap_block_unmap(arena->heap, blocks[i], as_one, as_one ? &handle : pages);
        if (!gone[i]) continue;
        if (as_one) fcdp__heap_pages_give(arena->heap, n, &handle, n);
        *n_out += as_one ? 0 : n;
        n_pages += n;
    }
    fcdp__lock_acquire(&arena->lock);
    for (size_t i = 0; i < n_blocks; i++)
        gone[i] ? fcdp__arena_unmap_commit(arena->blocks, blocks[i])
                : fcdp__arena_unmap_abort(arena->blocks, blocks[i]);
    fcdp__lock_release(&arena->lock);
    return n_pages;
}

/* To the pool, at least `n_wanted` if there are as many; `room` for so many. */
static size_t all_give(fcdp_heap *heap, size_t n_wanted, fcdp_phys *room) {
    heap_arena *arenas[2 * HEAP_MAX_STREAMS];
    size_t n_arenas = fcdp__heap_arenas(heap, arenas), n_given = 0, n, n_single;
    for (size_t i = 0; i < n_arenas; i++) {
        while (n_given < n_wanted &&
               (n = fcdp__heap_arena_collect(arenas[i], n_wanted - n_given, room, &n_single)) > 0) {
            fcdp__heap_pages_give(heap, n_single, room, 1);
            n_given += n;
        }
    }
    return n_given;
}

static size_t reclaim(fcdp_heap *heap, size_t n_pages, bool waits) {
    fcdp_phys *room = malloc(n_pages * sizeof *room);
    size_t n_given = 0;
    bool waited = false;
    if (!room) return 0;
    fcdp__heap_deferred_poll(heap);
    for (;;) {
        fcdp__heap_quiesce(heap);
        n_given += all_give(heap, n_pages - n_given, room);
        if (!waits || n_given >= n_pages || !fcdp__heap_await(heap, waited)) break;
        waited = true;
    }
    free(room);
    return n_given;
}

size_t fcdp__heap_reclaim(void *heap, size_t n_pages) {
    return reclaim(heap, n_pages, false);
}

size_t fcdp__heap_reclaim_waiting(void *heap, size_t n_pages) {
    return reclaim(heap, n_pages, true);
}

fcdp_status fcdp_heap_trim(fcdp_heap *heap) {
    enum { AT_ONCE = 4096 };
    fcdp_phys *room = malloc(AT_ONCE * sizeof *room);
    if (!room) return fcdp__fail(FCDP_ERR_SYSTEM, "no host memory");
    (void)fcdp__heap_privates_end_dead(heap);
    (void)fcdp__heap_await(heap, true);
    while (all_give(heap, AT_ONCE, room) > 0) {
    }
    free(room);
    (void)fcdp__pool_trim(heap->pool);
    return FCDP_OK;
}

size_t fcdp__heap_idle(void *ctx) {
    heap_arena *arenas[2 * HEAP_MAX_STREAMS];
    size_t n = fcdp__heap_arenas(ctx, arenas), n_pages = 0;
    for (size_t i = 0; i < n; i++) {
        if (fcdp__heap_is_pinned(arenas[i])) continue;
        fcdp__lock_acquire(&arenas[i]->lock);
        n_pages += fcdp__arena_idle_pages(arenas[i]->blocks);
        fcdp__lock_release(&arenas[i]->lock);
    }
    return n_pages;
}
