/* heap_ranges.c - the arenas' address ranges, in whole granules.
 *
 * A free gets an address without a stream. Ranges are whole granules of 1 GiB, so the address's upper bits
 * index a table of arenas, which is read without a lock.
 */
#include <stdlib.h>

#include "alloc/heap_internal.h"
#include "alloc/trace_map.h"

enum { GRANULE_LOG2 = 30, N_GRANULES = 1 << 18 /* 48 bits of addresses */ };

fcdp_status fcdp__heap_granules_create(fcdp_heap *heap) {
    heap->granules = calloc(N_GRANULES, sizeof *heap->granules);
    return heap->granules ? FCDP_OK : fcdp__fail(FCDP_ERR_SYSTEM, "no host memory for the allocator");
}

heap_arena *fcdp__heap_arena_at(fcdp_heap *heap, fcdp_dptr address) {
    uint64_t granule = address.addr >> GRANULE_LOG2;
    return granule < N_GRANULES ? atomic_load_explicit(&heap->granules[granule], memory_order_acquire) : NULL;
}

static void range_free(fcdp_heap *heap, heap_range *range) {
    if (fcdp__driver_range_free(heap->drv, range->reserved, range->reserved_bytes))
        fcdp__log(FCDP_LOG_WARN, "a range of device addresses is lost: %s", fcdp_error_text());
    free(range->pages);
    free(range);
}

/* A range of whole granules, so that no address of it belongs to another arena. */
static fcdp_status range_reserve(fcdp_heap *heap, size_t bytes, heap_range **range_out) {
    size_t granule = (size_t)1 << GRANULE_LOG2;
    heap_range *range = calloc(1, sizeof *range);
    fcdp_phys *pages = calloc(bytes / heap->page_bytes, sizeof *pages);
    if (!range || !pages) {
        free(range);
        free(pages);
        return fcdp__fail(FCDP_ERR_SYSTEM, "no host memory for a range of %zu bytes", bytes);
    }
    range->pages = pages;
    range->bytes = bytes;
    range->reserved_bytes = bytes + granule;
    fcdp_status status = fcdp__driver_range_reserve(heap->drv, range->reserved_bytes, &range->reserved);
    if (status) {
        free(pages);
        free(range);
        return status;
    }
    range->base = fcdp__round_up(range->reserved.addr, granule);
    if ((range->base + bytes) >> GRANULE_LOG2 > N_GRANULES) {
        range_free(heap, range);
        return fcdp__fail(FCDP_ERR_UNSUPPORTED, "device addresses beyond 48 bits");
    }
    *range_out = range;
    return FCDP_OK;
}

/* As long as the budget, so that a block finds room beside others whatever lies between them. */
fcdp_status fcdp__heap_range_add(heap_arena *arena, size_t bytes) {
    fcdp_heap *heap = arena->heap;
    fcdp_pool_stats pool;
    fcdp__pool_stats(heap->pool, &pool);
    size_t wanted = bytes > pool.budget_bytes || arena->private ? bytes : pool.budget_bytes;
    heap_range *range = NULL;
    fcdp_status status = range_reserve(heap, fcdp__round_up(wanted, (size_t)1 << GRANULE_LOG2), &range);
    if (status) return status;
    fcdp__lock_acquire(&arena->lock);
    status = fcdp__arena_add_span(arena->blocks, range->base, range->bytes, range);
    for (uint64_t g = range->base >> GRANULE_LOG2;
         !status && g < (range->base + range->bytes) >> GRANULE_LOG2; g++)
        atomic_store_explicit(&heap->granules[g], arena,
                              memory_order_release); /* partner: fcdp__heap_arena_at */
    fcdp__lock_release(&arena->lock);
    if (status) range_free(heap, range);
    return status;
}

/* Mapping by mapping, whatever the blocks over them. */
void fcdp__heap_range_destroy(fcdp_heap *heap, const fcdp_span *of) {
    heap_range *range = of->owner;
    size_t n = range->bytes / heap->page_bytes;
    for (size_t i = 0, end; i < n; i = end) {
        for (end = i + 1; end < n && of->joined[end];) end++;
        if (!range->pages[i].handle) continue;
        fcdp_dptr at = {range->base + i * heap->page_bytes};
        if (FCDP_RETRY_ONCE(fcdp__driver_unmap(heap->drv, at, (end - i) * heap->page_bytes))) {
            fcdp__pool_give_handle(heap->pool, FCDP_HOLDER_TENSORS, end - i, range->pages[i]);
        } else {
            fcdp__trace_unmap(at.addr, (end - i) * heap->page_bytes);
            fcdp__heap_pages_give(heap, end - i, &range->pages[i], end - i);
        }
    }
    range_free(heap, range);
}
