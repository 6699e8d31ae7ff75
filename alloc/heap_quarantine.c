/* heap_quarantine.c - unmaps freed blocks and keeps their addresses unused for a while.
 *
 * An access to freed memory then faults at once instead of reading another tensor's bytes. FCDP_CHECK=2 turns
 * it on, and the number of bytes bounds how much address space is held back.
 */
#include <stdlib.h>

#include "alloc/heap_internal.h"

bool fcdp__heap_quarantines(const heap_arena *arena, const fcdp_block *block) {
    size_t page_bytes = arena->heap->page_bytes;
    return arena->heap->quarantine_bytes && !arena->private && block->address % page_bytes == 0 &&
           block->bytes % page_bytes == 0;
}

/* The oldest, if there are more bytes than are to be kept; else NULL. */
static heap_quarantined *list_take_surplus(fcdp_heap *heap) {
    fcdp__lock_acquire(&heap->lock);
    heap_quarantined *oldest = heap->quarantined_bytes > heap->quarantine_bytes ? heap->quarantine : NULL;
    if (oldest) {
        heap->quarantined_bytes -= oldest->block->bytes;
        heap->quarantine = oldest->next;
        if (!heap->quarantine) heap->quarantine_end = &heap->quarantine;
    }
    fcdp__lock_release(&heap->lock);
    return oldest;
}

/* The addresses of the oldest may be used again. */
static void quarantine_pop(fcdp_heap *heap) {
    for (heap_quarantined *entry = list_take_surplus(heap); entry; entry = list_take_surplus(heap)) {
        fcdp__lock_acquire(&entry->arena->lock);
        fcdp__arena_quarantine_end(entry->arena->blocks, entry->block);
        fcdp__lock_release(&entry->arena->lock);
        free(entry);
    }
}

/* All memory is reserved before the unmap, which cannot be taken back. */
bool fcdp__heap_quarantine_push(heap_arena *arena, fcdp_block *block) {
    fcdp_heap *heap = arena->heap;
    size_t n = block->bytes / heap->page_bytes;
    heap_quarantined *entry = malloc(sizeof *entry);
    fcdp_phys *pages = malloc(n * sizeof *pages);
    bool pushed = entry && pages && fcdp__heap_block_unmap(heap, block, false, pages);
    if (pushed) {
        *entry = (heap_quarantined){.arena = arena, .block = block};
        fcdp__lock_acquire(&arena->lock);
        fcdp__arena_quarantine_begin(arena->blocks, block);
        fcdp__lock_release(&arena->lock);
        fcdp__heap_pages_give(heap, n, pages, 1);
        fcdp__lock_acquire(&heap->lock);
        *heap->quarantine_end = entry;
        heap->quarantine_end = &entry->next;
        heap->quarantined_bytes += block->bytes;
        fcdp__lock_release(&heap->lock);
        quarantine_pop(heap);
    } else {
        free(entry);
    }
    free(pages);
    return pushed;
}

void fcdp__heap_quarantine_destroy(fcdp_heap *heap) {
    while (heap->quarantine) {
        heap_quarantined *entry = heap->quarantine;
        heap->quarantine = entry->next;
        free(entry);
    }
}
