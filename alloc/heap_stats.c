/* heap_stats.c - what the heap reports: counts, a walk over its blocks, the text of a failure.
 *
 * The counts that hits change live in the arenas, and reports add them up, so that threads share no counter.
 */
#include <stdio.h>

#include "alloc/heap_internal.h"
#include "base/size.h"

/* With the arena's lock. What the arena has not reported yet counts too. */
static void stats_add(heap_arena *arena, fcdp_heap_stats *stats) {
    fcdp__heap_live_report(arena, true);
    stats->n_hits += arena->n_hits;
    stats->n_fits += arena->n_fits;
    stats->n_grows += arena->n_grows;
    fcdp_heap_counts *counts = arena->small ? &stats->small : &stats->large;
    const fcdp_arena_stats *of = fcdp__arena_stats(arena->blocks);
    counts->n_live += of->n_live;
    counts->allocated_bytes += of->live_bytes;
    counts->requested_bytes += of->requested_bytes;
    counts->n_free += of->n_free + of->n_quick;
    counts->free_bytes += of->free_bytes + of->quick_bytes;
    counts->busy_bytes += of->busy_bytes;
    counts->asleep_bytes += arena->asleep ? fcdp__heap_mapped_bytes(arena) : 0;
    counts->peak_n_live += arena->peak_n_live;
    counts->peak_allocated_bytes += arena->peak_live_bytes;
    counts->peak_requested_bytes += arena->peak_requested_bytes;
    counts->peak_reserved_bytes += arena->peak_mapped_bytes;
    counts->n_mallocs += arena->n_mallocs;
    counts->n_frees += arena->n_frees;
    counts->malloc_bytes += arena->malloc_bytes;
    counts->malloc_requested_bytes += arena->malloc_requested_bytes;
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
    stats_out->busy_bytes = large->busy_bytes + small->busy_bytes;
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
    /* another thread may have raised it already */
    fcdp__heap_peak_raise(peak, atomic_load_explicit(now, memory_order_relaxed));
}

void fcdp_heap_reset_peaks(fcdp_heap *heap) {
    heap_arena *arenas[2 * HEAP_MAX_STREAMS];
    size_t n = fcdp__heap_arenas(heap, arenas);
    for (size_t i = 0; i < n; i++) {
        heap_arena *arena = arenas[i];
        fcdp__lock_acquire(&arena->lock);
        const fcdp_arena_stats *of = fcdp__arena_stats(arena->blocks);
        fcdp__heap_live_report(arena, true);
        arena->peak_n_live = of->n_live;
        arena->peak_live_bytes = of->live_bytes;
        arena->peak_requested_bytes = of->requested_bytes;
        arena->peak_mapped_bytes = fcdp__heap_mapped_bytes(arena);
        fcdp__lock_release(&arena->lock);
    }
    peak_reset(&heap->peak_allocated, &heap->allocated);
    peak_reset(&heap->peak_pages, &heap->n_pages);
}

void fcdp_heap_walk(fcdp_heap *heap, void (*see)(void *ctx, const fcdp_heap_view *view), void *ctx) {
    heap_arena *arenas[2 * HEAP_MAX_STREAMS];
    size_t n = fcdp__heap_arenas(heap, arenas);
    for (size_t i = 0; i < n; i++) {
        fcdp__lock_acquire(&arenas[i]->lock);
        fcdp_private_id private_id = {0, 0};
        if (arenas[i]->private) {
            pthread_rwlock_rdlock(&heap->private_lock);
            private_id = arenas[i]->private->id;
            pthread_rwlock_unlock(&heap->private_lock);
        }
        for (const fcdp_span *span = fcdp__arena_spans(arenas[i]->blocks); span; span = span->next)
            for (fcdp_block *block = span->first; block; block = block->after)
                if (!block->unmapped)
                    see(ctx, &(fcdp_heap_view){arenas[i]->stream, private_id, arenas[i]->small, span->base,
                                               block->address, block->bytes, block->requested_bytes,
                                               block->state});
        fcdp__lock_release(&arenas[i]->lock);
    }
}

/* ---- out of memory ---- */

enum { N_CLASSES = 4 };
static const size_t class_bytes[N_CLASSES] = {1000000, 10000000, 100000000, SIZE_MAX};
static const char *const class_name[N_CLASSES] = {"to 1 MB", "to 10 MB", "to 100 MB", "larger"};

typedef struct holdings {
    size_t live[N_CLASSES], cached, busy;
} holdings;

static void holdings_see(void *ctx, const fcdp_heap_view *view) {
    holdings *h = ctx;
    int k = 0;
    while (view->bytes > class_bytes[k]) k++;
    if (view->state == FCDP_BLOCK_LIVE)
        h->live[k] += view->bytes;
    else if (view->state == FCDP_BLOCK_BUSY)
        h->busy += view->bytes;
    else
        h->cached += view->bytes;
}

const fcdp_holder_words fcdp__heap_words = {"tensors",
                                            "use a smaller batch, activation checkpointing, or more ranks"};

/* Sizes of live blocks say what to look for: a few large activations, or many small tensors. */
fcdp_status fcdp__heap_out_of_memory(fcdp_heap *heap, size_t bytes, size_t n_missing) {
    holdings h = {{0}, 0, 0};
    fcdp_pool_usage usage;
    size_t at = 0;
    char tensors[160];
    atomic_fetch_add_explicit(&heap->n_ooms, 1, memory_order_relaxed);
    fcdp__pool_trace_oom(heap->pool, n_missing * heap->page_bytes);
    fcdp_heap_walk(heap, holdings_see, &h);
    fcdp__pool_usage(heap->pool, &usage);
    for (int i = 0; i < N_CLASSES; i++)
        at += (size_t)snprintf(tensors + at, sizeof tensors - at, "%s%s %s", i ? ", " : "",
                               fcdp__size_text(h.live[i]).s, class_name[i]);
    const char *advice = fcdp__heap_words.advice;
    if (usage.others_bytes > bytes)
        advice =
            "end the other processes on this device, or set FCDP_DEVICE_BUDGET to what is left for this one";
    else if (fcdp__heap_is_capturing(heap))
        advice = "a graph is being captured, so that nothing can be waited for";
    else if (usage.budget_bytes + bytes <= usage.device_bytes - usage.others_bytes)
        advice = fcdp__pool_budget_advice(heap->pool);
    return fcdp__fail(
        FCDP_ERR_NO_DEVICE_MEM,
        "no device memory for %zu bytes: %s are missing; %s; live tensors by size: %s; freed tensors: "
        "%s, of which %s wait for other streams; %s; %s",
        bytes, fcdp__size_text(n_missing * heap->page_bytes).s, usage.budget_text, tensors,
        fcdp__size_text(h.cached + h.busy).s, fcdp__size_text(h.busy).s, usage.device_text, advice);
}
