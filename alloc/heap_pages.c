/* heap_pages.c - finds single pages for a miss, in the order that heap.h gives.
 *
 * Pages that one source yields are kept in a batch until there are enough, and given back if there never are:
 * so a malloc that fails has taken nothing from other threads.
 */
#include <sched.h>

#include "alloc/heap_internal.h"

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
        size_t n, n_all = fcdp__heap_arena_collect(arena, n_lacks, b->pages + b->n, &n);
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
