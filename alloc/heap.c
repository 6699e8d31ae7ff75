/* heap.c - arenas by stream, addresses to arenas, malloc and free. Where a miss gets its pages is in
 * heap_pages.c. Compiled with -fexceptions: what `covers` throws passes through fcdp_heap_malloc. */
#include "alloc/heap_internal.h"

#include <stdlib.h>
#include <string.h>

enum { GRANULE_LOG2 = 30, N_GRANULES = 1 << 18 /* 48 bits of addresses */ };
/* An arena tells the heap of its live bytes in steps, so that most hits touch nothing that threads share. */
enum { REPORT_BYTES = 2 << 20 };

/* ---- streams ---- */

static size_t stream_slot(fcdp_stream stream, const heap_private *private) {
    uint64_t key = (uint64_t)(uintptr_t)stream ^ (uint64_t)(uintptr_t)private << 20;
    return (size_t)(key * 0x9e3779b97f4a7c15u >> 40) % HEAP_MAX_STREAMS;
}

static heap_stream *stream_find(fcdp_heap *heap, fcdp_stream stream, const heap_private *private) {
    for (size_t i = 0, at = stream_slot(stream, private); i < HEAP_MAX_STREAMS;
         i++, at = (at + 1) % HEAP_MAX_STREAMS) {
        heap_stream *found = atomic_load_explicit(&heap->streams[at], memory_order_acquire);
        if (!found || (found->stream == stream && found->private == private)) return found;
    }
    return NULL;
}

static fcdp_status arena_open(fcdp_heap *heap, heap_arena *arena, const heap_stream *of, bool small) {
    arena->heap = heap;
    arena->stream = of->stream;
    arena->private = of->private;
    arena->small = small;
    fcdp__lock_init(&arena->lock, FCDP_RANK_ARENA);
    return fcdp__arena_create(heap->page_bytes, &arena->blocks);
}

static void arena_close(heap_arena *arena) {
    if (!arena->heap) return;
    fcdp__arena_destroy(arena->blocks);
    fcdp__lock_destroy(&arena->lock);
}

static void stream_free(fcdp_heap *heap, heap_stream *of) {
    if (of->fence) fcdp__driver_event_destroy(heap->drv, of->fence);
    for (int small = 0; small < 2; small++) arena_close(&of->arenas[small]);
    free(of);
}

static fcdp_status stream_make(fcdp_heap *heap, fcdp_stream stream, heap_private *private,
                               heap_stream **stream_out) {
    heap_stream *made = aligned_alloc(HEAP_CACHE_LINE, fcdp__round_up(sizeof *made, HEAP_CACHE_LINE));
    if (!made) return fcdp__fail(FCDP_ERR_SYSTEM, "no host memory for a stream's arenas");
    memset(made, 0, sizeof *made);
    made->stream = stream;
    made->private = private;
    fcdp_status status = FCDP_OK;
    for (int small = 0; small < 2; small++) made->arenas[small].sibling = &made->arenas[!small];
    for (int small = 0; small < 2 && !status; small++)
        status = arena_open(heap, &made->arenas[small], made, small);
    if (status)
        stream_free(heap, made);
    else
        *stream_out = made;
    return status;
}

/* With the heap's lock. */
static fcdp_status stream_add(fcdp_heap *heap, fcdp_stream stream, heap_private *private,
                              heap_stream **stream_out) {
    if (heap->n_streams == HEAP_MAX_STREAMS / 2)
        return fcdp__fail(FCDP_ERR_UNSUPPORTED, "tensors on more than %d streams and private pools",
                          HEAP_MAX_STREAMS / 2);
    fcdp_status status = stream_make(heap, stream, private, stream_out);
    if (status) return status;
    size_t at = stream_slot(stream, private);
    while (atomic_load_explicit(&heap->streams[at], memory_order_relaxed)) at = (at + 1) % HEAP_MAX_STREAMS;
    atomic_store_explicit(&heap->streams[at], *stream_out, memory_order_release); /* partner: stream_find */
    heap->n_streams++;
    return FCDP_OK;
}

static fcdp_status stream_of(fcdp_heap *heap, fcdp_stream stream, heap_private *private,
                             heap_stream **stream_out) {
    heap_stream *found = stream_find(heap, stream, private);
    fcdp_status status = FCDP_OK;
    if (!found) {
        fcdp__lock_acquire(&heap->lock);
        found = stream_find(heap, stream, private);
        if (!found) status = stream_add(heap, stream, private, &found);
        fcdp__lock_release(&heap->lock);
    }
    *stream_out = found;
    return status;
}

size_t fcdp__heap_arenas(fcdp_heap *heap, heap_arena **arenas_out) {
    size_t n = 0;
    for (size_t i = 0; i < HEAP_MAX_STREAMS; i++) {
        heap_stream *of = atomic_load_explicit(&heap->streams[i], memory_order_acquire);
        for (int small = 0; of && small < 2; small++) arenas_out[n++] = &of->arenas[small];
    }
    return n;
}

/* ---- addresses ---- */

static heap_arena *arena_at(fcdp_heap *heap, fcdp_dptr address) {
    uint64_t granule = address.addr >> GRANULE_LOG2;
    return granule < N_GRANULES ? atomic_load_explicit(&heap->granules[granule], memory_order_acquire) : NULL;
}

static void granules_set(fcdp_heap *heap, uint64_t base, size_t bytes, heap_arena *arena) {
    for (uint64_t g = base >> GRANULE_LOG2; g < (base + bytes) >> GRANULE_LOG2; g++)
        atomic_store_explicit(&heap->granules[g], arena, memory_order_release); /* partner: arena_at */
}

static void span_free(fcdp_heap *heap, heap_span *span) {
    if (fcdp__driver_range_free(heap->drv, span->reserved, span->reserved_bytes))
        fcdp__log(FCDP_LOG_WARN, "a range of device addresses is lost: %s", fcdp_error_text());
    free(span->pages);
    free(span);
}

/* A range of whole granules, so that no address of it belongs to another arena. */
static fcdp_status span_reserve(fcdp_heap *heap, size_t bytes, heap_span **span_out) {
    size_t granule = (size_t)1 << GRANULE_LOG2;
    heap_span *span = calloc(1, sizeof *span);
    fcdp_phys *pages = calloc(bytes / heap->page_bytes, sizeof *pages);
    if (!span || !pages) {
        free(span);
        free(pages);
        return fcdp__fail(FCDP_ERR_SYSTEM, "no host memory for a range of %zu bytes", bytes);
    }
    span->pages = pages;
    span->bytes = bytes;
    span->reserved_bytes = bytes + granule;
    fcdp_status status = fcdp__driver_range_reserve(heap->drv, span->reserved_bytes, &span->reserved);
    if (status) {
        free(pages);
        free(span);
        return status;
    }
    span->base = fcdp__round_up(span->reserved.addr, granule);
    if ((span->base + bytes) >> GRANULE_LOG2 > N_GRANULES) {
        span_free(heap, span);
        return fcdp__fail(FCDP_ERR_UNSUPPORTED, "device addresses beyond 48 bits");
    }
    *span_out = span;
    return FCDP_OK;
}

static fcdp_status span_add(heap_arena *arena, size_t bytes) {
    fcdp_heap *heap = arena->heap;
    fcdp_pool_stats pool;
    fcdp__pool_stats(heap->pool, &pool);
    size_t wanted = bytes > pool.budget_bytes || arena->private ? bytes : pool.budget_bytes;
    heap_span *span = NULL;
    fcdp_status status = span_reserve(heap, fcdp__round_up(wanted, (size_t)1 << GRANULE_LOG2), &span);
    if (status) return status;
    fcdp__lock_acquire(&arena->lock);
    status = fcdp__arena_add_span(arena->blocks, span->base, span->bytes, span);
    if (!status) granules_set(heap, span->base, span->bytes, arena);
    fcdp__lock_release(&arena->lock);
    if (status) span_free(heap, span);
    return status;
}

/* ---- counts ---- */

static void peak_raise(_Atomic size_t *peak, size_t value) {
    size_t seen = atomic_load_explicit(peak, memory_order_relaxed);
    while (seen < value && !atomic_compare_exchange_weak_explicit(peak, &seen, value, memory_order_relaxed,
                                                                  memory_order_relaxed)) {
    }
}

/* With the arena's lock. */
static void live_report(heap_arena *arena, bool at_once) {
    size_t live = fcdp__arena_stats(arena->blocks)->live_bytes;
    size_t step = live > arena->reported ? live - arena->reported : arena->reported - live;
    if (step < REPORT_BYTES && !at_once) return;
    size_t before = atomic_fetch_add_explicit(&arena->heap->allocated, live - arena->reported,
                                              memory_order_relaxed);
    peak_raise(&arena->heap->peak_allocated, before - arena->reported + arena->most_unreported);
    arena->reported = live;
    arena->most_unreported = live;
}

void fcdp__heap_pages_add(fcdp_heap *heap, size_t n) {
    size_t now = atomic_fetch_add_explicit(&heap->n_pages, n, memory_order_relaxed) + n;
    peak_raise(&heap->peak_pages, now);
}

void fcdp__heap_pages_remove(fcdp_heap *heap, size_t n) {
    atomic_fetch_sub_explicit(&heap->n_pages, n, memory_order_relaxed);
}

/* ---- malloc ---- */

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
    live_report(arena, false);
}

/* What is free already, once quick blocks have joined their neighbours. */
static fcdp_status malloc_fit(heap_arena *arena, size_t rounded, size_t bytes, bool is_short,
                              fcdp_block **block_out) {
    fcdp__lock_acquire(&arena->lock);
    fcdp__arena_flush(arena->blocks);
    fcdp_status status = fcdp__arena_take(arena->blocks, rounded, is_short, block_out);
    if (!status) block_hand_out(arena, *block_out, bytes, &arena->n_fits);
    fcdp__lock_release(&arena->lock);
    return status;
}

static fcdp_status growth_begin(heap_arena *arena, size_t rounded, bool is_short, size_t ahead_pages,
                                fcdp_growth *growth_out) {
    fcdp_status status;
    do {
        fcdp__lock_acquire(&arena->lock);
        status = fcdp__arena_grow_begin(arena->blocks, rounded, is_short, ahead_pages, growth_out);
        fcdp__lock_release(&arena->lock);
        if (status != FCDP_PENDING) return status;
        status = span_add(arena, rounded);
    } while (!status);
    return status;
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

static fcdp_status malloc_grow(heap_arena *arena, size_t rounded, size_t bytes, size_t n_each,
                               fcdp_block **block_out) {
    fcdp_growth growth;
    bool stuck = false;
    fcdp_status status = growth_begin(arena, rounded, n_each == 0, n_each, &growth);
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

/* Free memory; else new handles; else, where none are to be had or memory
 * is short, single pages from wherever. */
static fcdp_status malloc_slow(heap_arena *arena, size_t rounded, size_t bytes, fcdp_block **block_out) {
    fcdp__heap_poll(arena->heap);
    size_t n_each = fcdp__heap_handle_pages(arena, rounded);
    fcdp_status status = malloc_fit(arena, rounded, bytes, n_each == 0, block_out);
    if (status == FCDP_PENDING && n_each > 0) status = malloc_grow(arena, rounded, bytes, n_each, block_out);
    if (status == FCDP_PENDING) status = malloc_grow(arena, rounded, bytes, 0, block_out);
    return status;
}

fcdp_status fcdp_heap_malloc(fcdp_heap *heap, size_t bytes, fcdp_stream stream, fcdp_dptr *address_out) {
    heap_stream *of;
    heap_private *private = fcdp__heap_is_capturing(heap) ? fcdp__heap_private_covering(heap, stream) : NULL;
    fcdp_status status = stream_of(heap, stream, private, &of);
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
    if (!status) address_out->addr = block->address;
    return status;
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
    heap_arena *arena = arena_at(heap, address);
    if (!arena) return not_ours(address, "free");
    fcdp__lock_acquire(&arena->lock);
    fcdp_block *block = fcdp__arena_find(arena->blocks, address.addr);
    /* Quarantine begins where the stream is done with it. Without memory for that it is left out. */
    bool spared = block && fcdp__heap_quarantines(arena, block) && use_add(block, arena->stream);
    bool held = block && block->tag;
    if (held) ((heap_uses *)block->tag)->spared = spared;
    if (held)
        fcdp__arena_hold(arena->blocks, block);
    else if (block)
        fcdp__arena_give(arena->blocks, block);
    if (block) {
        arena->n_frees++;
        live_report(arena, false);
    }
    fcdp__lock_release(&arena->lock);
    if (held) fcdp__heap_hold(arena, block);
    if (heap->quarantine_bytes) fcdp__heap_poll(heap);
    return block ? FCDP_OK : not_ours(address, "free");
}

fcdp_status fcdp_heap_record_stream(fcdp_heap *heap, fcdp_dptr address, fcdp_stream stream) {
    if (address.addr == 0) return FCDP_OK;
    heap_arena *arena = arena_at(heap, address);
    if (!arena) return not_ours(address, "record_stream");
    if (arena->stream == stream) return FCDP_OK;
    fcdp__lock_acquire(&arena->lock);
    fcdp_block *block = fcdp__arena_find(arena->blocks, address.addr);
    fcdp_status status = block ? use_add(block, stream) : FCDP_OK;
    fcdp__lock_release(&arena->lock);
    heap_stream *known; /* fences wait for it from here on */
    if (!status && block) status = stream_of(heap, stream, NULL, &known);
    return block ? status : not_ours(address, "record_stream");
}

/* ---- life ---- */

static size_t heap_idle(void *ctx) {
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

fcdp_status fcdp_heap_create(fcdp_driver *drv, fcdp_pool *pool, fcdp_heap **heap_out) {
    fcdp_heap *heap = aligned_alloc(HEAP_CACHE_LINE, sizeof *heap);
    if (heap) memset(heap, 0, sizeof *heap);
    _Atomic(heap_arena *) *granules = calloc(N_GRANULES, sizeof *granules);
    if (!heap || !granules) {
        free(heap);
        free(granules);
        return fcdp__fail(FCDP_ERR_SYSTEM, "no host memory for the allocator");
    }
    heap->drv = drv;
    heap->pool = pool;
    heap->page_bytes = fcdp__driver_page_bytes(drv);
    heap->granules = granules;
    heap->quarantine_end = &heap->quarantine;
    fcdp__lock_init(&heap->lock, FCDP_RANK_HEAP);
    fcdp__lock_init(&heap->fence_lock, FCDP_RANK_FENCE);
    pthread_rwlock_init(&heap->private_lock, NULL);
    pthread_cond_init(&heap->held_back, NULL);
    fcdp__pool_set_holder(pool, FCDP_HOLDER_TENSORS, &fcdp__heap_words);
    fcdp__pool_set_reclaimer(pool, FCDP_RECLAIM_CACHES, fcdp__heap_reclaim, heap_idle, heap);
    fcdp__pool_set_reclaimer(pool, FCDP_RECLAIM_WAITING, fcdp__heap_reclaim_waiting, NULL, heap);
    *heap_out = heap;
    return FCDP_OK;
}

void fcdp_heap_set_quarantine(fcdp_heap *heap, size_t bytes) {
    heap->quarantine_bytes = bytes;
}

/* Mapping by mapping, whatever the blocks over them. */
static void span_unmap(fcdp_heap *heap, const fcdp_span *of) {
    heap_span *span = of->owner;
    size_t n = span->bytes / heap->page_bytes;
    for (size_t i = 0, end; i < n; i = end) {
        for (end = i + 1; end < n && of->joined[end];) end++;
        if (!span->pages[i].handle) continue;
        fcdp_dptr at = {span->base + i * heap->page_bytes};
        if (FCDP_RETRY_ONCE(fcdp__driver_unmap(heap->drv, at, (end - i) * heap->page_bytes)))
            fcdp__pool_give_handle(heap->pool, FCDP_HOLDER_TENSORS, end - i, span->pages[i]);
        else
            fcdp__heap_pages_give(heap, end - i, &span->pages[i], end - i);
    }
    span_free(heap, span);
}

static void arena_tags_free(const fcdp_arena *blocks) {
    for (const fcdp_span *span = fcdp__arena_spans(blocks); span; span = span->next)
        for (fcdp_block *block = span->first; block; block = block->after)
            if (block->state == FCDP_BLOCK_LIVE) free(block->tag);
}

void fcdp_heap_destroy(fcdp_heap *heap) {
    if (!heap) return;
    fcdp__pool_set_reclaimer(heap->pool, FCDP_RECLAIM_CACHES, NULL, NULL, NULL);
    fcdp__pool_set_reclaimer(heap->pool, FCDP_RECLAIM_WAITING, NULL, NULL, NULL);
    fcdp__heap_held_destroy(heap);
    heap_arena *arenas[2 * HEAP_MAX_STREAMS];
    size_t n = fcdp__heap_arenas(heap, arenas);
    for (size_t i = 0; i < n; i++) {
        arena_tags_free(arenas[i]->blocks);
        for (const fcdp_span *span = fcdp__arena_spans(arenas[i]->blocks); span; span = span->next)
            span_unmap(heap, span);
    }
    for (size_t i = 0; i < HEAP_MAX_STREAMS; i++)
        if (atomic_load_explicit(&heap->streams[i], memory_order_relaxed))
            stream_free(heap, atomic_load_explicit(&heap->streams[i], memory_order_relaxed));
    while (heap->privates) {
        heap_private *private = heap->privates;
        heap->privates = private->next;
        free(private);
    }
    pthread_rwlock_destroy(&heap->private_lock);
    pthread_cond_destroy(&heap->held_back);
    fcdp__lock_destroy(&heap->lock);
    fcdp__lock_destroy(&heap->fence_lock);
    free((void *)heap->granules);
    free(heap);
}

/* ---- stats ---- */

/* With the arena's lock. */
static void counts_add(heap_arena *arena, fcdp_heap_counts *counts) {
    const fcdp_arena_stats *of = fcdp__arena_stats(arena->blocks);
    counts->n_live += of->n_live;
    counts->allocated_bytes += of->live_bytes;
    counts->requested_bytes += of->requested_bytes;
    counts->n_free += of->n_free + of->n_quick;
    counts->free_bytes += of->free_bytes + of->quick_bytes;
    counts->held_bytes += of->busy_bytes;
    counts->peak_n_live += arena->peak_n_live;
    counts->peak_allocated_bytes += arena->peak_live_bytes;
    counts->peak_requested_bytes += arena->peak_requested_bytes;
    counts->peak_reserved_bytes += arena->peak_mapped_bytes;
    counts->n_mallocs += arena->n_mallocs;
    counts->n_frees += arena->n_frees;
    counts->malloc_bytes += arena->malloc_bytes;
    counts->malloc_requested_bytes += arena->malloc_requested_bytes;
}

/* With the arena's lock. */
static void stats_add(heap_arena *arena, fcdp_heap_stats *stats) {
    live_report(arena, true);
    counts_add(arena, arena->small ? &stats->small : &stats->large);
    stats->n_hits += arena->n_hits;
    stats->n_fits += arena->n_fits;
    stats->n_grows += arena->n_grows;
}

static void lower(size_t *peak, size_t bound) {
    if (*peak > bound) *peak = bound;
}

void fcdp_heap_stats_get(fcdp_heap *heap, fcdp_heap_stats *stats_out) {
    heap_arena *arenas[2 * HEAP_MAX_STREAMS];
    size_t n = fcdp__heap_arenas(heap, arenas);
    *stats_out = (fcdp_heap_stats){0};
    for (size_t i = 0; i < n; i++) {
        fcdp__lock_acquire(&arenas[i]->lock);
        stats_add(arenas[i], stats_out);
        fcdp__lock_release(&arenas[i]->lock);
    }
    fcdp_heap_counts *large = &stats_out->large, *small = &stats_out->small;
    stats_out->allocated_bytes = large->allocated_bytes + small->allocated_bytes;
    stats_out->requested_bytes = large->requested_bytes + small->requested_bytes;
    stats_out->held_bytes = large->held_bytes + small->held_bytes;
    stats_out->n_live = large->n_live + small->n_live;
    stats_out->n_mallocs = large->n_mallocs + small->n_mallocs;
    stats_out->n_frees = large->n_frees + small->n_frees;
    stats_out->reserved_bytes = atomic_load_explicit(&heap->n_pages, memory_order_relaxed) * heap->page_bytes;
    stats_out->peak_reserved_bytes = atomic_load_explicit(&heap->peak_pages, memory_order_relaxed) *
                                     heap->page_bytes;
    stats_out->peak_allocated_bytes = atomic_load_explicit(&heap->peak_allocated, memory_order_relaxed);
    for (fcdp_heap_counts *of = large; of; of = of == large ? small : NULL) {
        lower(&of->peak_allocated_bytes, stats_out->peak_allocated_bytes);
        lower(&of->peak_requested_bytes, stats_out->peak_allocated_bytes);
        lower(&of->peak_reserved_bytes, stats_out->peak_reserved_bytes);
    }
    stats_out->n_pages_moved = atomic_load_explicit(&heap->n_moved, memory_order_relaxed);
    stats_out->n_pages_taken = atomic_load_explicit(&heap->n_taken, memory_order_relaxed);
    stats_out->n_waits = atomic_load_explicit(&heap->n_waits, memory_order_relaxed);
    stats_out->n_retries = atomic_load_explicit(&heap->n_retries, memory_order_relaxed);
    stats_out->n_ooms = atomic_load_explicit(&heap->n_ooms, memory_order_relaxed);
}

static void peak_reset(_Atomic size_t *peak, _Atomic size_t *now) {
    atomic_store_explicit(peak, 0, memory_order_relaxed);
    /* somebody else may have raised it already */
    peak_raise(peak, atomic_load_explicit(now, memory_order_relaxed));
}

void fcdp_heap_reset_peaks(fcdp_heap *heap) {
    heap_arena *arenas[2 * HEAP_MAX_STREAMS];
    size_t n = fcdp__heap_arenas(heap, arenas);
    for (size_t i = 0; i < n; i++) {
        heap_arena *arena = arenas[i];
        fcdp__lock_acquire(&arena->lock);
        const fcdp_arena_stats *of = fcdp__arena_stats(arena->blocks);
        live_report(arena, true);
        arena->peak_n_live = of->n_live;
        arena->peak_live_bytes = of->live_bytes;
        arena->peak_requested_bytes = of->requested_bytes;
        arena->peak_mapped_bytes = fcdp__heap_mapped_bytes(arena);
        fcdp__lock_release(&arena->lock);
    }
    peak_reset(&heap->peak_allocated, &heap->allocated);
    peak_reset(&heap->peak_pages, &heap->n_pages);
}

static fcdp_private_id arena_private_id(const heap_arena *arena) {
    if (!arena->private) return (fcdp_private_id){0, 0};
    pthread_rwlock_rdlock(&arena->heap->private_lock);
    fcdp_private_id id = arena->private->id;
    pthread_rwlock_unlock(&arena->heap->private_lock);
    return id;
}

void fcdp_heap_walk(fcdp_heap *heap, void (*see)(void *ctx, const fcdp_heap_view *view), void *ctx) {
    heap_arena *arenas[2 * HEAP_MAX_STREAMS];
    size_t n = fcdp__heap_arenas(heap, arenas);
    for (size_t i = 0; i < n; i++) {
        fcdp__lock_acquire(&arenas[i]->lock);
        fcdp_private_id private_id = arena_private_id(arenas[i]);
        for (const fcdp_span *span = fcdp__arena_spans(arenas[i]->blocks); span; span = span->next)
            for (fcdp_block *block = span->first; block; block = block->after)
                if (!block->unmapped)
                    see(ctx, &(fcdp_heap_view){arenas[i]->stream, private_id, arenas[i]->small, span->base,
                                               block->address, block->bytes, block->requested_bytes,
                                               block->state});
        fcdp__lock_release(&arenas[i]->lock);
    }
}
