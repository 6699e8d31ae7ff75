/* heap.c - the heap's public calls. A hit is served here; a miss goes to the other files (heap_internal.h).
 * The file is compiled with -fexceptions, since an exception of `covers` passes through fcdp_heap_malloc. */
#include "alloc/heap_internal.h"
#include "alloc/trace_events.h"
#include "base/trace.h"

#include <stdlib.h>
#include <string.h>

/* An arena reports its live bytes to the heap in steps, so that most hits touch no shared cache line. */
enum { REPORT_BYTES = 2 << 20 };

/* ---- malloc ---- */

/* With the arena's lock. */
void fcdp__heap_live_report(heap_arena *arena, bool at_once) {
    size_t live = fcdp__arena_stats(arena->blocks)->live_bytes;
    size_t step = live > arena->reported ? live - arena->reported : arena->reported - live;
    if (step < REPORT_BYTES && !at_once) return;
    size_t before = atomic_fetch_add_explicit(&arena->heap->allocated, live - arena->reported,
                                              memory_order_relaxed);
    fcdp__heap_peak_raise(&arena->heap->peak_allocated, before - arena->reported + arena->most_unreported);
    arena->reported = live;
    arena->most_unreported = live;
}

static void raise(size_t *peak, size_t value) {
    if (*peak < value) *peak = value;
}

/* With the arena's lock. */
static void block_hand_out(heap_arena *arena, fcdp_block *block, size_t bytes, uint64_t *count) {
    fcdp__arena_request(arena->blocks, block, bytes);
    arena->n_mallocs++;
    arena->malloc_bytes += block->bytes;
    arena->malloc_requested_bytes += bytes;
    ++*count;
    const fcdp_arena_stats *of = fcdp__arena_stats(arena->blocks);
    raise(&arena->peak_n_live, of->n_live);
    raise(&arena->peak_live_bytes, of->live_bytes);
    raise(&arena->most_unreported, of->live_bytes);
    raise(&arena->peak_requested_bytes, of->requested_bytes);
    raise(&arena->peak_mapped_bytes, fcdp__heap_mapped_bytes(arena));
    fcdp__heap_live_report(arena, false);
}

/* Pages under the growth, all or none; `n_each` 0: single ones.
 * FCDP_PENDING: no such handles are to be had. */
static fcdp_status growth_map(heap_arena *arena, const fcdp_growth *growth, size_t bytes, size_t n_each,
                              bool *stuck_out) {
    if (growth->n_pages == 0) return FCDP_OK;
    fcdp_phys *pages = malloc(growth->n_pages * sizeof *pages);
    if (!pages) return fcdp__fail(FCDP_ERR_SYSTEM, "no host memory for %zu pages", growth->n_pages);
    fcdp_status status = n_each ? fcdp__heap_handles_find(arena->heap, growth, n_each, pages)
                                : fcdp__heap_pages_find(arena, growth->n_pages, bytes, pages);
    if (!status) status = fcdp__heap_map(arena->heap, growth, pages, n_each ? n_each : 1, stuck_out);
    free(pages);
    return status;
}

/* Take a place that needs pages. The growth owns the place, so the search for pages runs without the lock. */
static fcdp_status malloc_grow(heap_arena *arena, size_t rounded, size_t bytes, size_t n_each,
                               fcdp_block **block_out) {
    fcdp_growth growth;
    bool stuck = false;
    fcdp_status status = FCDP_PENDING;
    while (status == FCDP_PENDING) {
        fcdp__lock_acquire(&arena->lock);
        status = fcdp__arena_grow_begin(arena->blocks, rounded, n_each == 0, n_each, &growth);
        fcdp__lock_release(&arena->lock);
        if (status != FCDP_PENDING) break;
        fcdp_status added = fcdp__heap_range_add(arena, rounded);
        if (added) return added;
    }
    if (status) return status;
    bool fits = growth.n_pages == 0;
    status = growth_map(arena, &growth, bytes, n_each, &stuck);
    fcdp__lock_acquire(&arena->lock);
    if (!status) {
        *block_out = fcdp__arena_grow_commit(arena->blocks, &growth, n_each ? n_each : 1);
        block_hand_out(arena, *block_out, bytes, fits ? &arena->n_fits : &arena->n_grows);
    } else if (!stuck) {
        fcdp__arena_grow_abort(arena->blocks, &growth);
    }
    fcdp__lock_release(&arena->lock);
    return status;
}

/* Free memory, once quick blocks have joined the free blocks beside them; else new handles; else, when memory
 * is short or there are no handles, single pages from anywhere. */
static fcdp_status malloc_slow(heap_arena *arena, size_t rounded, size_t bytes, fcdp_block **block_out) {
    fcdp__heap_deferred_poll(arena->heap);
    size_t n_each = fcdp__heap_handle_pages(arena, rounded);
    fcdp__lock_acquire(&arena->lock);
    fcdp__arena_flush(arena->blocks);
    fcdp_status status = fcdp__arena_take(arena->blocks, rounded, n_each == 0, block_out);
    if (!status) block_hand_out(arena, *block_out, bytes, &arena->n_fits);
    fcdp__lock_release(&arena->lock);
    if (status == FCDP_PENDING && n_each > 0) status = malloc_grow(arena, rounded, bytes, n_each, block_out);
    if (status == FCDP_PENDING) status = malloc_grow(arena, rounded, bytes, 0, block_out);
    return status;
}

fcdp_status fcdp_heap_malloc(fcdp_heap *heap, size_t bytes, fcdp_stream stream, fcdp_dptr *address_out) {
    heap_stream *of;
    heap_private *private = fcdp__heap_is_capturing(heap) ? fcdp__heap_private_covering(heap, stream) : NULL;
    fcdp_status status = fcdp__heap_stream_of(heap, stream, private, &of);
    if (status) return status;
    /* partner: fcdp__heap_privates_end_dead */
    if (private) atomic_store_explicit(&private->has_served, true, memory_order_release);
    if (bytes == 0 || bytes > SIZE_MAX / 2) {
        address_out->addr = 0;
        return bytes ? fcdp__fail(FCDP_ERR_INVALID, "%zu bytes cannot be allocated", bytes) : FCDP_OK;
    }
    size_t rounded = fcdp__round_up(bytes, FCDP_ARENA_UNIT);
    heap_arena *arena = &of->arenas[rounded <= FCDP_HEAP_SMALL_BYTES];
    if (heap->quarantine_bytes && !arena->small) rounded = fcdp__round_up(rounded, heap->page_bytes);
    fcdp__lock_acquire(&arena->lock);
    fcdp_block *block = fcdp__arena_take_quick(arena->blocks, rounded);
    if (block) block_hand_out(arena, block, bytes, &arena->n_hits);
    fcdp__lock_release(&arena->lock);
    if (!block) status = malloc_slow(arena, rounded, bytes, &block);
    if (status) return status;
    address_out->addr = block->address;
    if (fcdp__trace_is_on(2))
        fcdp__trace_now(FCDP_EVENT_ALLOCATE, 0, block->bytes, block->address, (uintptr_t)stream);
    return FCDP_OK;
}

/* ---- free, record_stream ---- */

static fcdp_status not_ours(fcdp_dptr address, const char *what) {
    return fcdp__fail(
        FCDP_ERR_INVALID,
        "%s of %#llx: no live block begins there; it was freed already, or it is not fcdp_alloc's", what,
        (unsigned long long)address.addr);
}

/* With the arena's lock. */
static fcdp_status use_add(fcdp_block *block, fcdp_stream stream) {
    heap_uses *uses = block->tag;
    for (size_t i = 0; uses && i < uses->n; i++)
        if (uses->streams[i] == stream) return FCDP_OK;
    size_t n = uses ? uses->n : 0;
    uses = realloc(uses, sizeof *uses + (n + 1) * sizeof uses->streams[0]);
    if (!uses) return fcdp__fail(FCDP_ERR_SYSTEM, "no host memory to record a stream");
    if (n == 0) *uses = (heap_uses){0};
    uses->n = n + 1;
    uses->streams[n] = stream;
    block->tag = uses;
    return FCDP_OK;
}

fcdp_status fcdp_heap_free(fcdp_heap *heap, fcdp_dptr address) {
    if (address.addr == 0) return FCDP_OK;
    heap_arena *arena = fcdp__heap_arena_at(heap, address);
    if (!arena) return not_ours(address, "free");
    fcdp__lock_acquire(&arena->lock);
    fcdp_block *block = fcdp__arena_find(arena->blocks, address.addr);
    /* The block's own stream orders a reuse, but not an unmap: so quarantine begins behind all streams of the
     * heap. Without host memory to wait for them the block skips quarantine. */
    bool quarantines = block && fcdp__heap_quarantines(arena, block);
    if (quarantines && !block->tag) block->tag = calloc(1, sizeof(heap_uses));
    bool defers = block && block->tag;
    if (block && fcdp__trace_is_on(2))
        fcdp__trace_now(FCDP_EVENT_FREE, 0, block->bytes, address.addr, (uintptr_t)arena->stream);
    if (defers) ((heap_uses *)block->tag)->awaits_all = quarantines;
    if (defers)
        fcdp__arena_set_busy(arena->blocks, block);
    else if (block)
        fcdp__arena_give(arena->blocks, block);
    if (block) {
        arena->n_frees++;
        fcdp__heap_live_report(arena, false);
    }
    fcdp__lock_release(&arena->lock);
    if (defers) fcdp__heap_defer(arena, block);
    if (heap->quarantine_bytes) fcdp__heap_deferred_poll(heap);
    return block ? FCDP_OK : not_ours(address, "free");
}

fcdp_status fcdp_heap_record_stream(fcdp_heap *heap, fcdp_dptr address, fcdp_stream stream) {
    if (address.addr == 0) return FCDP_OK;
    heap_arena *arena = fcdp__heap_arena_at(heap, address);
    if (!arena) return not_ours(address, "record_stream");
    if (arena->stream == stream) return FCDP_OK;
    fcdp__lock_acquire(&arena->lock);
    fcdp_block *block = fcdp__arena_find(arena->blocks, address.addr);
    fcdp_status status = block ? use_add(block, stream) : FCDP_OK;
    fcdp__lock_release(&arena->lock);
    heap_stream *known; /* fences wait for it from here on */
    if (!status && block) status = fcdp__heap_stream_of(heap, stream, NULL, &known);
    return block ? status : not_ours(address, "record_stream");
}

/* ---- life ---- */

/* The pool may ask the heap as soon as it is registered, so that is the last step. */
fcdp_status fcdp_heap_create(fcdp_driver *drv, fcdp_pool *pool, fcdp_heap **heap_out) {
    fcdp_heap *heap = aligned_alloc(HEAP_CACHE_LINE, sizeof *heap);
    if (heap) memset(heap, 0, sizeof *heap);
    if (!heap) return fcdp__fail(FCDP_ERR_SYSTEM, "no host memory for the allocator");
    fcdp_status status = fcdp__heap_granules_create(heap);
    if (status) {
        free(heap);
        return status;
    }
    heap->drv = drv;
    heap->pool = pool;
    heap->page_bytes = fcdp__driver_page_bytes(drv);
    heap->quarantine_end = &heap->quarantine;
    fcdp__lock_init(&heap->lock, FCDP_RANK_HEAP);
    fcdp__lock_init(&heap->fence_lock, FCDP_RANK_FENCE);
    pthread_rwlock_init(&heap->private_lock, NULL);
    pthread_cond_init(&heap->checked, NULL);
    fcdp__pool_set_holder(pool, FCDP_HOLDER_TENSORS, &fcdp__heap_words);
    fcdp__pool_set_reclaimer(pool, FCDP_RECLAIM_CACHES, fcdp__heap_reclaim, fcdp__heap_idle, heap);
    fcdp__pool_set_reclaimer(pool, FCDP_RECLAIM_WAITING, fcdp__heap_reclaim_waiting, NULL, heap);
    *heap_out = heap;
    return FCDP_OK;
}

void fcdp_heap_set_quarantine(fcdp_heap *heap, size_t bytes) {
    heap->quarantine_bytes = bytes;
}

void fcdp_heap_destroy(fcdp_heap *heap) {
    if (!heap) return;
    fcdp__pool_set_reclaimer(heap->pool, FCDP_RECLAIM_CACHES, NULL, NULL, NULL);
    fcdp__pool_set_reclaimer(heap->pool, FCDP_RECLAIM_WAITING, NULL, NULL, NULL);
    fcdp__heap_deferred_destroy(heap);
    fcdp__heap_quarantine_destroy(heap);
    heap_arena *arenas[2 * HEAP_MAX_STREAMS];
    size_t n = fcdp__heap_arenas(heap, arenas);
    for (size_t i = 0; i < n; i++) {
        for (const fcdp_span *span = fcdp__arena_spans(arenas[i]->blocks); span; span = span->next) {
            for (fcdp_block *block = span->first; block; block = block->after)
                if (block->state == FCDP_BLOCK_LIVE) free(block->tag);
            fcdp__heap_range_destroy(heap, span);
        }
    }
    for (size_t i = 0; i < HEAP_MAX_STREAMS; i++)
        if (atomic_load_explicit(&heap->streams[i], memory_order_relaxed))
            fcdp__heap_stream_free(heap, atomic_load_explicit(&heap->streams[i], memory_order_relaxed));
    while (heap->privates) {
        heap_private *private = heap->privates;
        heap->privates = private->next;
        free(private);
    }
    pthread_rwlock_destroy(&heap->private_lock);
    pthread_cond_destroy(&heap->checked);
    fcdp__lock_destroy(&heap->lock);
    fcdp__lock_destroy(&heap->fence_lock);
    free((void *)heap->granules);
    free(heap);
}
