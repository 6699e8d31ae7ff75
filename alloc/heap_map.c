/* heap_map.c - pages under blocks: mapped under a growth's holes, unmapped from under a block. */
#include <stdio.h>
#include <string.h>

#include "alloc/heap_internal.h"

static fcdp_phys *page_slot(const fcdp_heap *heap, const fcdp_block *block, uint64_t address) {
    heap_span *span = block->span->owner;
    return &span->pages[(address - span->base) / heap->page_bytes];
}

bool fcdp__heap_block_unmap(fcdp_heap *heap, const fcdp_block *block, fcdp_phys *pages_out) {
    fcdp_phys *slots = page_slot(heap, block, block->address);
    size_t n = block->bytes / heap->page_bytes;
    if (fcdp__driver_unmap(heap->drv, (fcdp_dptr){block->address}, block->bytes)) return false;
    memcpy(pages_out, slots, n * sizeof *slots);
    memset(slots, 0, n * sizeof *slots);
    return true;
}

/* The pages of one hole; on failure those that were mapped are in their slots. */
static fcdp_status hole_map(fcdp_heap *heap, const fcdp_block *hole, const fcdp_phys *pages,
                            size_t *n_mapped_out) {
    fcdp_phys *slots = page_slot(heap, hole, hole->address);
    size_t n = hole->bytes / heap->page_bytes;
    for (size_t i = 0; i < n; i++) {
        fcdp_dptr at = {hole->address + i * heap->page_bytes};
        fcdp_status status = fcdp__driver_map(heap->drv, at, heap->page_bytes, pages[i]);
        if (status) return status;
        slots[i] = pages[i];
        *n_mapped_out = i + 1;
    }
    return fcdp__driver_set_access(heap->drv, (fcdp_dptr){hole->address}, hole->bytes);
}

/* Take the first `n` pages of the hole away again; the driver may refuse. */
static bool hole_unmap(fcdp_heap *heap, const fcdp_block *hole, size_t n) {
    fcdp_phys *slots = page_slot(heap, hole, hole->address);
    if (n == 0) return true;
    fcdp_status status = fcdp__driver_unmap(heap->drv, (fcdp_dptr){hole->address}, n * heap->page_bytes);
    if (status) status = fcdp__driver_unmap(heap->drv, (fcdp_dptr){hole->address}, n * heap->page_bytes);
    if (status) return false;
    fcdp__heap_pages_give(heap, n, slots);
    memset(slots, 0, n * sizeof *slots);
    return true;
}

/* Hole by hole, since what lies between them is mapped already; undone in the reverse order. */
fcdp_status fcdp__heap_map(fcdp_heap *heap, const fcdp_growth *growth, const fcdp_phys *pages, bool *stuck_out) {
    size_t n_done = 0, n_mapped = 0;
    fcdp_status status = FCDP_OK;
    fcdp_block *block = growth->first;
    for (;; block = block->after) {
        n_mapped = 0;
        if (block->unmapped) status = hole_map(heap, block, pages + n_done, &n_mapped);
        if (status) break;
        n_done += n_mapped;
        if (block == growth->last) return FCDP_OK;
    }
    char text[512];
    snprintf(text, sizeof text, "%s", fcdp_error_text());
    fcdp__heap_pages_give(heap, growth->n_pages - n_done - n_mapped, pages + n_done + n_mapped);
    *stuck_out = !hole_unmap(heap, block, n_mapped);
    while (block != growth->first) {
        block = block->before;
        if (block->unmapped && !hole_unmap(heap, block, block->bytes / heap->page_bytes)) *stuck_out = true;
    }
    return fcdp__fail(status, "%s", text);
}
