/* heap.c - the heap's public calls. A hit is served here; a miss looks for pages in heap_pages.c.
 *
 * Two look-ups are on the path of every hit, so both read their table without a lock. A malloc has a stream
 * and needs its arenas: entries of the table of streams are only ever added, each published by one store once
 * it is complete. A free has an address and no stream: ranges are whole granules of 1 GiB, so the address's
 * upper bits index a table of arenas.
 *
 * The file chooses no pages and waits for nothing. It is compiled with -fexceptions, since an exception of
 * `covers` passes through fcdp_heap_malloc.
 */
#include "alloc/heap_internal.h"
#include "alloc/trace.h"

#include <stdlib.h>
#include <string.h>

/* An arena reports its live bytes to the heap in steps, so that most hits touch no shared cache line. */
enum { REPORT_BYTES = 2 << 20 };

/* ---- streams, with their arenas ---- */

/* Of the calling thread's mallocs. */
static _Thread_local uint32_t current_tag;

uint32_t fcdp_heap_set_tag(uint32_t tag) {
    uint32_t before = current_tag;
    current_tag = tag;
    return before;
}

static size_t stream_slot(fcdp_stream stream, const heap_private *private, uint32_t tag) {
    uint64_t key = (uint64_t)(uintptr_t)stream ^ (uint64_t)(uintptr_t)private << 20 ^ (uint64_t)tag << 44;
    return (size_t)(key * 0x9e3779b97f4a7c15u >> 40) % HEAP_MAX_STREAMS;
}

static heap_stream *stream_find(fcdp_heap *heap, fcdp_stream stream, const heap_private *private,
                                uint32_t tag) {
    for (size_t i = 0, at = stream_slot(stream, private, tag); i < HEAP_MAX_STREAMS;
         i++, at = (at + 1) % HEAP_MAX_STREAMS) {
        heap_stream *found = atomic_load_explicit(&heap->streams[at], memory_order_acquire);
        if (!found || (found->stream == stream && found->private == private && found->tag == tag))
            return found;
    }
    return NULL;
}

static void stream_free(fcdp_heap *heap, heap_stream *of) {
    if (of->fence) fcdp__driver_event_destroy(heap->drv, of->fence);
    for (int small = 0; small < 2; small++) {
        fcdp__arena_destroy(of->arenas[small].blocks);
        fcdp__lock_destroy(&of->arenas[small].lock);
    }
    free(of);
}

/* An arena that is made while others of its tag are asleep, or everything is, sleeps from its beginning. The
 * heap's lock is held. */
static bool tag_is_asleep(fcdp_heap *heap, uint32_t tag) {
    for (size_t i = 0; i < HEAP_MAX_STREAMS; i++) {
        heap_stream *of = fcdp__heap_stream_at(heap, i);
        if (of && of->tag == tag) return atomic_load(&of->arenas[0].asleep);
    }
    return heap->sleep.all;
}

/* Both arenas at once, so that a stream is in the table with both or not at all. */
static fcdp_status stream_make(fcdp_heap *heap, fcdp_stream stream, heap_private *private, uint32_t tag,
                               heap_stream **stream_out) {
    heap_stream *made = aligned_alloc(HEAP_CACHE_LINE, fcdp__round_up(sizeof *made, HEAP_CACHE_LINE));
    if (!made) return fcdp__fail(FCDP_ERR_SYSTEM, "no host memory for a stream's arenas");
    memset(made, 0, sizeof *made);
    made->stream = stream;
    made->private = private;
    made->tag = tag;
    bool asleep = tag_is_asleep(heap, tag);
    fcdp_status status = FCDP_OK;
    for (int small = 0; small < 2; small++) {
        heap_arena *arena = &made->arenas[small];
        arena->heap = heap;
        arena->stream = stream;
        arena->private = private;
        arena->tag = tag;
        arena->small = small;
        atomic_store(&arena->asleep, asleep);
        arena->sibling = &made->arenas[!small];
        fcdp__lock_init(&arena->lock, FCDP_RANK_ARENA);
        if (!status) status = fcdp__arena_create(heap->page_bytes, &arena->blocks);
    }
    if (status)
        stream_free(heap, made);
    else
        *stream_out = made;
    return status;
}

/* A stream that is in the table costs no lock. */
static fcdp_status stream_of(fcdp_heap *heap, fcdp_stream stream, heap_private *private, uint32_t tag,
                             heap_stream **stream_out) {
    *stream_out = stream_find(heap, stream, private, tag);
    if (*stream_out) return FCDP_OK;
    fcdp_status status = FCDP_OK;
    fcdp__lock_acquire(&heap->lock);
    heap_stream *found = stream_find(heap, stream, private, tag);
    bool is_new = !found;
    if (is_new && heap->n_streams == HEAP_MAX_STREAMS / 2)
        status = fcdp__fail(FCDP_ERR_UNSUPPORTED, "tensors on more than %d streams and private pools",
                            HEAP_MAX_STREAMS / 2);
    else if (is_new)
        status = stream_make(heap, stream, private, tag, &found);
    if (!status && is_new) {
        size_t at = stream_slot(stream, private, tag);
        while (atomic_load_explicit(&heap->streams[at], memory_order_relaxed))
            at = (at + 1) % HEAP_MAX_STREAMS;
        /* partners: stream_find, fcdp__heap_stream_at */
        atomic_store_explicit(&heap->streams[at], found, memory_order_release);
        heap->n_streams++;
    }
    fcdp__lock_release(&heap->lock);
    *stream_out = found;
    return status;
}

size_t fcdp__heap_arenas(fcdp_heap *heap, heap_arena **arenas_out) {
    size_t n = 0;
    for (size_t i = 0; i < HEAP_MAX_STREAMS; i++) {
        heap_stream *of = fcdp__heap_stream_at(heap, i);
        for (int small = 0; of && small < 2; small++) arenas_out[n++] = &of->arenas[small];
    }
    return n;
}

/* ---- address ranges ---- */

enum { GRANULE_LOG2 = 30, N_GRANULES = 1 << 18 /* 48 bits of addresses */ };

static fcdp_status granules_create(fcdp_heap *heap) {
    heap->granules = calloc(N_GRANULES, sizeof *heap->granules);
    return heap->granules ? FCDP_OK : fcdp__fail(FCDP_ERR_SYSTEM, "no host memory for the allocator");
}

static heap_arena *arena_at(fcdp_heap *heap, fcdp_dptr address) {
    uint64_t granule = address.addr >> GRANULE_LOG2;
    return granule < N_GRANULES ? atomic_load_explicit(&heap->granules[granule], memory_order_acquire) : NULL;
}

static void range_free(fcdp_heap *heap, heap_range *range) {
    if (fcdp__driver_range_free(heap->drv, range->reserved, range->reserved_bytes))
        fcdp__log(FCDP_LOG_WARN, "a range of device addresses is lost until the process ends: %s",
                  fcdp_error_text());
    free(range->pages);
    free(range->saved);
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
static fcdp_status range_add(heap_arena *arena, size_t bytes) {
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
        atomic_store_explicit(&heap->granules[g], arena, memory_order_release); /* partner: arena_at */
    fcdp__lock_release(&arena->lock);
    if (status) range_free(heap, range);
    return status;
}

/* Mapping by mapping, whatever the blocks over them. If the driver refuses to unmap a handle, its pages live
 * until the process ends, as does the range; the pool counts it as given back, as its holder is gone. */
static void range_destroy(fcdp_heap *heap, const fcdp_span *of) {
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

static void peak_raise(size_t *peak, size_t value) {
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
    peak_raise(&arena->peak_n_live, of->n_live);
    peak_raise(&arena->peak_live_bytes, of->live_bytes);
    peak_raise(&arena->most_unreported, of->live_bytes);
    peak_raise(&arena->peak_requested_bytes, of->requested_bytes);
    peak_raise(&arena->peak_mapped_bytes, fcdp__heap_mapped_bytes(arena));
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
        status = arena->asleep ? fcdp__heap_asleep_fail()
                               : fcdp__arena_grow_begin(arena->blocks, rounded, n_each == 0, n_each, &growth);
        arena->n_growths += !status;
        fcdp__lock_release(&arena->lock);
        if (status != FCDP_PENDING) break;
        fcdp_status added = range_add(arena, rounded);
        if (added) return added;
    }
    if (status) return status;
    bool fits = growth.n_pages == 0;
    status = growth_map(arena, &growth, bytes, n_each, &stuck);
    fcdp__lock_acquire(&arena->lock);
    arena->n_growths--;
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
    if (!arena->asleep) fcdp__arena_flush(arena->blocks);
    fcdp_status status = arena->asleep ? fcdp__heap_asleep_fail()
                                       : fcdp__arena_take(arena->blocks, rounded, n_each == 0, block_out);
    if (!status) block_hand_out(arena, *block_out, bytes, &arena->n_fits);
    fcdp__lock_release(&arena->lock);
    if (status == FCDP_PENDING && n_each > 0) status = malloc_grow(arena, rounded, bytes, n_each, block_out);
    if (status == FCDP_PENDING) status = malloc_grow(arena, rounded, bytes, 0, block_out);
    return status;
}

fcdp_status fcdp_heap_malloc(fcdp_heap *heap, size_t bytes, fcdp_stream stream, fcdp_dptr *address_out) {
    heap_stream *of;
    heap_private *private = fcdp__heap_is_capturing(heap) ? fcdp__heap_private_covering(heap, stream) : NULL;
    fcdp_status status = stream_of(heap, stream, private, current_tag, &of);
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
    bool asleep = arena->asleep;
    fcdp_block *block = asleep ? NULL : fcdp__arena_take_quick(arena->blocks, rounded);
    if (block) block_hand_out(arena, block, bytes, &arena->n_hits);
    fcdp__lock_release(&arena->lock);
    if (asleep) return fcdp__heap_asleep_fail();
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
    heap_arena *arena = arena_at(heap, address);
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
    heap_arena *arena = arena_at(heap, address);
    if (!arena) return not_ours(address, "record_stream");
    if (arena->stream == stream) return FCDP_OK;
    fcdp__lock_acquire(&arena->lock);
    fcdp_block *block = fcdp__arena_find(arena->blocks, address.addr);
    fcdp_status status = block ? use_add(block, stream) : FCDP_OK;
    fcdp__lock_release(&arena->lock);
    heap_stream *known; /* fences wait for it from here on */
    if (!status && block) status = stream_of(heap, stream, NULL, 0, &known);
    return block ? status : not_ours(address, "record_stream");
}

/* ---- life ---- */

/* The pool may ask the heap as soon as it is registered, so that is the last step. */
fcdp_status fcdp_heap_create(fcdp_driver *drv, fcdp_pool *pool, fcdp_heap **heap_out) {
    fcdp_heap *heap = aligned_alloc(HEAP_CACHE_LINE, sizeof *heap);
    if (heap) memset(heap, 0, sizeof *heap);
    if (!heap) return fcdp__fail(FCDP_ERR_SYSTEM, "no host memory for the allocator");
    fcdp_status status = granules_create(heap);
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
            range_destroy(heap, span);
        }
    }
    for (size_t i = 0; i < HEAP_MAX_STREAMS; i++)
        if (atomic_load_explicit(&heap->streams[i], memory_order_relaxed))
            stream_free(heap, atomic_load_explicit(&heap->streams[i], memory_order_relaxed));
    while (heap->privates) {
        heap_private *private = heap->privates;
        heap->privates = private->next;
        free(private);
    }
    fcdp__heap_sleep_destroy(heap);
    pthread_rwlock_destroy(&heap->private_lock);
    pthread_cond_destroy(&heap->checked);
    fcdp__lock_destroy(&heap->lock);
    fcdp__lock_destroy(&heap->fence_lock);
    free((void *)heap->granules);
    free(heap);
}

/* ---- a device ---- */

/* Driver, then pool, then heap. A part that fails to open closes those before it. */
fcdp_status fcdp_device_open(fcdp_driver_kind kind, int ordinal, const char *sim_library, size_t budget_bytes,
                             size_t headroom_bytes, bool with_heap, fcdp_device *device_out) {
    fcdp_device device = {NULL, NULL, NULL};
    fcdp_status status = fcdp__driver_open(kind, ordinal, sim_library, &device.drv);
    if (!status)
        status = budget_bytes ? fcdp__pool_create(device.drv, budget_bytes, &device.pool)
                              : fcdp__pool_create_with_headroom(device.drv, headroom_bytes, &device.pool);
    if (!status && with_heap) status = fcdp_heap_create(device.drv, device.pool, &device.heap);
    if (status) {
        fcdp_failure failure = fcdp__failure_keep(status);
        fcdp_device_close(&device);
        return fcdp__failure_restore(&failure);
    }
    *device_out = device;
    return FCDP_OK;
}

void fcdp_device_close(fcdp_device *device) {
    if (device->heap) fcdp_heap_destroy(device->heap);
    if (device->pool) fcdp__pool_destroy(device->pool);
    if (device->drv) fcdp__driver_close(device->drv);
    *device = (fcdp_device){NULL, NULL, NULL};
}
