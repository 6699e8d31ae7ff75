/* heap_map.c - maps pages under a growth's holes and unmaps them from under a block.
 *
 * A map of several holes is all or nothing: a failure in the middle undoes what was mapped. The driver may
 * refuse to undo it; then those pages stay where they are, and stuck_out tells the caller.
 */
#include <string.h>

#include "alloc/heap_internal.h"
#include "alloc/trace_map.h"

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
    fcdp__heap_pages_remove(heap, n);
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
