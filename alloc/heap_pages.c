/* heap_pages.c - the heap's pages: found for a miss, mapped, unmapped, given to the pool.
 *
 * One driver call maps a handle of any size, so while memory is plentiful the heap creates large handles. It
 * stops in time: a large handle moves only as a whole, and would hold back pages that others need. When
 * memory is short, a miss looks for single pages in the order that heap.h gives. What one source yields is
 * kept in a batch until there is enough, and given back if there never is, so a malloc that fails has taken
 * nothing from other threads.
 *
 * The pool's other holders reclaim the heap's pages through the same unmap: single pages serve at once, and a
 * larger handle goes back to the pool, where it is room for single pages.
 *
 * A map of several holes is all or nothing: a failure in the middle undoes what was mapped. The driver may
 * refuse to undo it; then those pages stay where they are, and stuck_out tells the caller. This file decides
 * nothing about which pages may be unmapped: heap_quiescent.c does.
 */
#include "alloc/heap_internal.h"
#include "alloc/trace.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

/* ---- mapping ---- */

void fcdp__heap_pages_add(fcdp_heap *heap, size_t n) {
    size_t now = atomic_fetch_add_explicit(&heap->n_pages, n, memory_order_relaxed) + n;
    fcdp__heap_peak_raise(&heap->peak_pages, now);
}

static void pages_remove(fcdp_heap *heap, size_t n) {
    atomic_fetch_sub_explicit(&heap->n_pages, n, memory_order_relaxed);
}

static size_t least(size_t a, size_t b) {
    return a < b ? a : b;
}

static fcdp_phys *page_slot(const fcdp_heap *heap, const fcdp_block *block) {
    heap_range *range = block->span->owner;
    return &range->pages[(block->address - range->base) / heap->page_bytes];
}

bool fcdp__heap_block_unmap(fcdp_heap *heap, const fcdp_block *block, bool as_one, fcdp_phys *pages_out) {
    fcdp_phys *slots = page_slot(heap, block);
    size_t n = block->bytes / heap->page_bytes;
    if (fcdp__driver_unmap(heap->drv, (fcdp_dptr){block->address}, block->bytes)) return false;
    fcdp__trace_unmap(block->address, block->bytes);
    memcpy(pages_out, slots, (as_one ? 1 : n) * sizeof *slots);
    memset(slots, 0, n * sizeof *slots);
    return true;
}

void fcdp__heap_pages_give(fcdp_heap *heap, size_t n, const fcdp_phys *pages, size_t n_each) {
    if (n == 0) return;
    pages_remove(heap, n);
    if (n_each == 1) fcdp__pool_give(heap->pool, FCDP_HOLDER_TENSORS, n, pages);
    for (size_t i = 0; i < n && n_each > 1; i += n_each)
        fcdp__pool_give_handle(heap->pool, FCDP_HOLDER_TENSORS, least(n_each, n - i), pages[i]);
    atomic_fetch_add_explicit(&heap->n_returns, 1, memory_order_relaxed);
}

/* The pages of one hole; on failure those that were mapped are in their slots. */
static fcdp_status hole_map(fcdp_heap *heap, const fcdp_block *hole, const fcdp_phys *pages, size_t n_each,
                            size_t *n_mapped_out) {
    fcdp_phys *slots = page_slot(heap, hole);
    size_t n = hole->bytes / heap->page_bytes;
    for (size_t i = 0; i < n; i += n_each) {
        fcdp_dptr at = {hole->address + i * heap->page_bytes};
        size_t n_here = least(n_each, n - i);
        fcdp_status status = fcdp__driver_map(heap->drv, at, n_here * heap->page_bytes, pages[i]);
        if (status) return status;
        fcdp__trace_map(at.addr, n_here * heap->page_bytes);
        memcpy(&slots[i], &pages[i], n_here * sizeof *slots);
        *n_mapped_out = i + n_here;
    }
    return fcdp__driver_set_access(heap->drv, (fcdp_dptr){hole->address}, hole->bytes);
}

/* Take the first `n` pages of the hole away again; the driver may refuse. */
static bool hole_unmap(fcdp_heap *heap, const fcdp_block *hole, size_t n, size_t n_each) {
    fcdp_phys *slots = page_slot(heap, hole);
    if (n == 0) return true;
    if (FCDP_RETRY_ONCE(fcdp__driver_unmap(heap->drv, (fcdp_dptr){hole->address}, n * heap->page_bytes)))
        return false;
    fcdp__trace_unmap(hole->address, n * heap->page_bytes);
    fcdp__heap_pages_give(heap, n, slots, n_each);
    memset(slots, 0, n * sizeof *slots);
    return true;
}

/* What is not mapped goes back hole by hole, as it came. */
static void rest_give(fcdp_heap *heap, const fcdp_growth *growth, const fcdp_block *failed, size_t n_mapped,
                      const fcdp_phys *pages, size_t n_each) {
    for (const fcdp_block *block = failed;; block = block->after) {
        size_t n = block->unmapped ? block->bytes / heap->page_bytes : 0;
        fcdp__heap_pages_give(heap, n - n_mapped, pages + n_mapped, n_each);
        pages += n;
        n_mapped = 0;
        if (block == growth->last) break;
    }
}

/* Hole by hole, since what lies between them is mapped already; undone in the reverse order. */
fcdp_status fcdp__heap_map(fcdp_heap *heap, const fcdp_growth *growth, const fcdp_phys *pages, size_t n_each,
                           bool *stuck_out) {
    size_t n_done = 0, n_mapped = 0;
    fcdp_status status = FCDP_OK;
    fcdp_block *block = growth->first;
    for (;; block = block->after) {
        n_mapped = 0;
        if (block->unmapped) status = hole_map(heap, block, pages + n_done, n_each, &n_mapped);
        if (status) break;
        n_done += n_mapped;
        if (block == growth->last) return FCDP_OK;
    }
    fcdp_failure failure = fcdp__failure_keep(status);
    rest_give(heap, growth, block, n_mapped, pages + n_done, n_each);
    *stuck_out = !hole_unmap(heap, block, n_mapped, n_each);
    while (block != growth->first) {
        block = block->before;
        size_t n = block->unmapped ? block->bytes / heap->page_bytes : 0;
        if (!hole_unmap(heap, block, n, n_each)) *stuck_out = true;
    }
    return fcdp__failure_restore(&failure);
}

/* ---- new handles of many pages ---- */

/* Large handles cost few driver calls, but move only as a whole. So while half of the budget
 * is spare a handle is half as large as what the arena has mapped, or as large as the block,
 * and at most a sixth of what is spare. */
size_t fcdp__heap_handle_pages(heap_arena *arena, size_t bytes) {
    enum { MAX_PAGES = 64, SPARE_FOR_ONE = 6 };
    const fcdp_heap *heap = arena->heap;
    size_t n_budget, n_spare = fcdp__pool_spare_pages(heap->pool, &n_budget),
                     n_most = n_spare / SPARE_FOR_ONE;
    if (heap->quarantine_bytes || n_spare < n_budget - n_spare) return 0;
    fcdp__lock_acquire(&arena->lock);
    size_t n = fcdp__heap_mapped_bytes(arena) / heap->page_bytes / 2;
    fcdp__lock_release(&arena->lock);
    size_t n_block = fcdp__round_up(bytes, heap->page_bytes) / heap->page_bytes;
    if (n < n_block) n = n_block;
    if (n_most > MAX_PAGES) n_most = MAX_PAGES;
    return n < n_most ? n : n_most;
}

fcdp_status fcdp__heap_handles_find(fcdp_heap *heap, const fcdp_growth *growth, size_t n_each,
                                    fcdp_phys *pages_out) {
    fcdp_status status = FCDP_OK;
    size_t n_done = 0, n_budget;
    if (growth->n_pages > fcdp__pool_spare_pages(heap->pool, &n_budget)) return FCDP_PENDING;
    for (const fcdp_block *block = growth->first; !status; block = block->after) {
        size_t n = block->unmapped ? block->bytes / heap->page_bytes : 0;
        for (size_t i = 0; i < n && !status; i += n_each) {
            size_t n_here = n_each < n - i ? n_each : n - i;
            status = fcdp__pool_try_handle(heap->pool, FCDP_HOLDER_TENSORS, n_here, &pages_out[n_done]);
            for (size_t k = 1; k < n_here && !status; k++) pages_out[n_done + k] = pages_out[n_done];
            if (!status) n_done += n_here;
        }
        if (block == growth->last) break;
    }
    fcdp__heap_pages_add(heap, n_done);
    if (!status) {
        atomic_fetch_add_explicit(&heap->n_taken, n_done, memory_order_relaxed);
        return FCDP_OK;
    }
    for (const fcdp_block *block = growth->first; n_done > 0; block = block->after) {
        size_t n = block->unmapped ? block->bytes / heap->page_bytes : 0;
        if (n > n_done) n = n_done;
        fcdp__heap_pages_give(heap, n, pages_out, n_each);
        pages_out += n;
        n_done -= n;
    }
    return status;
}

/* ---- quiescent pages, unmapped ---- */

enum { MAX_UNMAPPED = 64 }; /* blocks unmapped at a time */

/* Single pages go to `pages_out`; a larger handle to the pool, where it is room for single ones. */
static size_t arena_collect(heap_arena *arena, size_t n_wanted, fcdp_phys *pages_out, size_t *n_out) {
    fcdp_block *blocks[MAX_UNMAPPED];
    bool gone[MAX_UNMAPPED];
    size_t n_blocks = 0, n_pages = 0;
    *n_out = 0;
    fcdp__lock_acquire(&arena->lock);
    if (!fcdp__heap_is_pinned(arena) &&
        !arena->asleep) { /* a pool that begins again mallocs under this lock */
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

/* ---- single pages, for a miss ---- */

/* Pages found so far, of those wanted. */
typedef struct batch {
    fcdp_phys *pages;
    size_t n, n_wanted;
} batch;

static void batch_add(fcdp_heap *heap, batch *b, size_t n) {
    b->n += n;
    fcdp__heap_pages_add(heap, n);
    atomic_fetch_add_explicit(&heap->n_taken, n, memory_order_relaxed);
}

/* What the pool has, or may create, without asking a reclaimer. */
static fcdp_status batch_from_pool(fcdp_heap *heap, batch *b) {
    size_t n;
    fcdp_status status = fcdp__pool_take_some(heap->pool, FCDP_HOLDER_TENSORS, b->n_wanted - b->n,
                                              b->pages + b->n, &n);
    batch_add(heap, b, n);
    return status;
}

/* What the batch lacks beside the spare pages of the pool. */
static size_t batch_lacks(fcdp_heap *heap, const batch *b) {
    size_t n_budget, n_spare = fcdp__pool_spare_pages(heap->pool, &n_budget), n = b->n_wanted - b->n;
    return n > n_spare ? n - n_spare : 0;
}

/* What of the arena is quiescent, until the batch is full; or until the spare pages will fill it, of which
 * none is taken. A larger handle becomes spare pages. */
static fcdp_status batch_from_arena(heap_arena *arena, batch *b, bool beside_spare) {
    fcdp_heap *heap = arena->heap;
    fcdp_status status = FCDP_OK;
    size_t n_lacks;
    while (!status && (n_lacks = beside_spare ? batch_lacks(heap, b) : b->n_wanted - b->n) > 0) {
        size_t n, n_all = arena_collect(arena, n_lacks, b->pages + b->n, &n);
        if (n_all == 0) break;
        b->n += n;
        atomic_fetch_add_explicit(&heap->n_moved, n, memory_order_relaxed);
        if (n_all > n && !beside_spare) status = batch_from_pool(heap, b);
    }
    return status;
}

/* The stream's own arena, its other one, those of other streams. */
static fcdp_status batch_from_arenas(heap_arena *arena, batch *b, bool beside_spare) {
    heap_arena *arenas[2 * HEAP_MAX_STREAMS];
    size_t n = fcdp__heap_arenas(arena->heap, arenas);
    fcdp__heap_quiesce(arena->heap);
    fcdp_status status = batch_from_arena(arena, b, beside_spare);
    if (!status) status = batch_from_arena(arena->sibling, b, beside_spare);
    for (size_t i = 0; i < n && !status; i++) status = batch_from_arena(arenas[i], b, beside_spare);
    return status;
}

/* Sources that need no other thread. The spare pages come last, so that a malloc that fails creates none. */
static fcdp_status batch_fill(heap_arena *arena, batch *b) {
    fcdp_heap *heap = arena->heap;
    fcdp_status status = FCDP_OK;
    if (batch_lacks(heap, b) > 0) status = batch_from_arenas(arena, b, true);
    if (status || batch_lacks(heap, b) > 0) return status;
    status = batch_from_pool(heap, b);
    /* the driver had fewer than the budget allows */
    return status || b->n == b->n_wanted ? status : batch_from_arenas(arena, b, false);
}

typedef struct attempt {
    size_t n_missing;
    bool waited;
    uint64_t n_returns; /* times that it has given back what it had */
} attempt;

/* One attempt at `n` pages, all or none; FCDP_PENDING: there are none. */
static fcdp_status pages_try(heap_arena *arena, size_t n, fcdp_phys *pages_out, attempt *attempt_out) {
    fcdp_heap *heap = arena->heap;
    *attempt_out = (attempt){n, attempt_out->waited, 0};
    for (;;) {
        batch b = {pages_out, 0, n};
        fcdp_status status = batch_fill(arena, &b);
        if (!status &&
            b.n < n) { /* what others have, but in a capture: what must be stored first is waited for */
            status = fcdp__heap_is_capturing(heap)
                         ? FCDP_PENDING
                         : fcdp__pool_seek(heap->pool, FCDP_HOLDER_TENSORS, n - b.n, pages_out + b.n);
            if (!status) batch_add(heap, &b, n - b.n);
        }
        if (!status && b.n == n) return FCDP_OK;
        size_t n_lacks = batch_lacks(heap, &b);
        attempt_out->n_missing = n_lacks > 0 ? n_lacks : n - b.n;
        attempt_out->n_returns += b.n > 0;
        /* other threads must not lack them while this one waits */
        fcdp__heap_pages_give(heap, b.n, pages_out, 1);
        if (status != FCDP_PENDING) return status;
        if (!fcdp__heap_await(heap, attempt_out->waited) && !fcdp__heap_privates_end_dead(heap))
            return status;
        if (!attempt_out->waited) atomic_fetch_add_explicit(&heap->n_retries, 1, memory_order_relaxed);
        attempt_out->waited = true;
    }
}

/* A concurrent search may hold pages that this one missed, so retry once it has ended. */
fcdp_status fcdp__heap_pages_find(heap_arena *arena, size_t n, size_t bytes, fcdp_phys *pages_out) {
    enum { MAX_LOST_RACES = 64 };
    fcdp_heap *heap = arena->heap;
    attempt last = {n, false, 0};
    fcdp_status status = FCDP_PENDING;
    atomic_fetch_add_explicit(&heap->n_searching, 1, memory_order_relaxed);
    for (int n_lost = 0; n_lost < MAX_LOST_RACES; n_lost++) {
        uint64_t n_returns = atomic_load_explicit(&heap->n_returns, memory_order_relaxed);
        status = pages_try(arena, n, pages_out, &last);
        if (status != FCDP_PENDING) break;
        bool alone = atomic_load_explicit(&heap->n_searching, memory_order_relaxed) == 1;
        n_returns += last.n_returns;
        if (alone && atomic_load_explicit(&heap->n_returns, memory_order_relaxed) == n_returns) break;
        sched_yield();
    }
    if (status == FCDP_PENDING) status = fcdp__heap_out_of_memory(heap, bytes, last.n_missing);
    atomic_fetch_sub_explicit(&heap->n_searching, 1, memory_order_relaxed);
    return status;
}

/* ---- for the pool ---- */

/* To the pool, at least `n_wanted` if there are as many; `room` for so many. */
static size_t all_give(fcdp_heap *heap, size_t n_wanted, fcdp_phys *room) {
    heap_arena *arenas[2 * HEAP_MAX_STREAMS];
    size_t n_arenas = fcdp__heap_arenas(heap, arenas), n_given = 0, n, n_single;
    for (size_t i = 0; i < n_arenas; i++) {
        while (n_given < n_wanted &&
               (n = arena_collect(arenas[i], n_wanted - n_given, room, &n_single)) > 0) {
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
        if (fcdp__heap_is_pinned(arenas[i]) || arenas[i]->asleep) continue;
        fcdp__lock_acquire(&arenas[i]->lock);
        n_pages += fcdp__arena_idle_pages(arenas[i]->blocks);
        fcdp__lock_release(&arenas[i]->lock);
    }
    return n_pages;
}
