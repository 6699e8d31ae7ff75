/* heap_handles.c - new handles of many pages.
 *
 * One driver call maps a handle of any size, so while memory is plentiful the heap creates large handles. It
 * stops in time: a large handle moves only as a whole, and would hold back pages that others need.
 */
#include "alloc/heap_internal.h"

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
