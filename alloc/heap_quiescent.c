/* heap_quiescent.c - finds which freed memory is quiescent: all work that any stream of the heap had when the
 * memory was freed is done. Only quiescent pages may be unmapped. It records events, queries and waits, and
 * moves nothing.
 *
 * The stream that freed a block orders its reuse, but not an unmap: the block may have been used on other,
 * unrecorded streams, where the program itself orders the next use (FSDP2's reduced gradients). So one fence
 * serves the whole heap: an event on each stream that is not idle, recorded when a miss looks for pages. Once
 * all events have passed, everything freed before the fence is quiescent.
 */
#include "alloc/heap_internal.h"

bool fcdp__heap_wait_begin(fcdp_heap *heap) {
    pthread_rwlock_rdlock(&heap->private_lock);
    if (!fcdp__heap_is_capturing(heap)) return true;
    pthread_rwlock_unlock(&heap->private_lock);
    return false;
}

void fcdp__heap_wait_end(fcdp_heap *heap) {
    pthread_rwlock_unlock(&heap->private_lock);
}

bool fcdp__heap_device_await(fcdp_heap *heap) {
    if (!fcdp__heap_wait_begin(heap)) return false;
    fcdp_status status = fcdp__driver_sync(heap->drv);
    fcdp__heap_wait_end(heap);
    return !status;
}

bool fcdp__heap_event_await(fcdp_heap *heap, fcdp_event event) {
    if (!fcdp__heap_wait_begin(heap)) return false;
    fcdp_status status = fcdp__driver_event_sync(heap->drv, event);
    fcdp__heap_wait_end(heap);
    return !status;
}

bool fcdp__heap_arena_is_quiescent(heap_arena *arena) {
    fcdp__lock_acquire(&arena->lock);
    bool quiescent = arena->quiescent_clock == fcdp__arena_clock(arena->blocks);
    fcdp__lock_release(&arena->lock);
    return quiescent;
}

/* Up to `clock`, unless a private pool has begun anew since: a graph may know its pages again. */
static void arena_advance(heap_arena *arena, uint64_t clock) {
    fcdp__lock_acquire(&arena->lock);
    if (arena->quiescent_clock < clock && !fcdp__heap_is_pinned(arena)) arena->quiescent_clock = clock;
    fcdp__lock_release(&arena->lock);
}

/* Would a wait for the device make some memory quiescent? */
static bool arena_would_gain(heap_arena *arena) {
    if (fcdp__heap_is_pinned(arena)) return false;
    fcdp__lock_acquire(&arena->lock);
    bool gains = arena->quiescent_clock < fcdp__arena_clock(arena->blocks) &&
                 fcdp__arena_idle_pages(arena->blocks) > 0;
    fcdp__lock_release(&arena->lock);
    return gains;
}

static uint64_t arena_clock(heap_arena *arena) {
    fcdp__lock_acquire(&arena->lock);
    uint64_t clock = fcdp__arena_clock(arena->blocks);
    fcdp__lock_release(&arena->lock);
    return clock;
}

/* ---- the fence ---- */

/* An idle stream needs no event. A stream on which none can be recorded
 * is one that the fence does not pass. */
static bool fence_record(fcdp_heap *heap, heap_stream *of) {
    of->fence_waits = false;
    if (fcdp__driver_stream_query(heap->drv, of->stream) == FCDP_OK) return true;
    if (!of->fence && fcdp__driver_event_create_blocking(heap->drv, &of->fence)) return false;
    if (fcdp__driver_event_record(heap->drv, of->fence, of->stream)) return false;
    of->fence_waits = true;
    return true;
}

/* With the fence's lock. The clocks are read before any stream is asked: what is freed later is for
 * the next fence. A private pool has no part in it: what a graph wrote to, on whatever stream it
 * ran, no stream of the heap can tell. */
static void fence_begin(fcdp_heap *heap) {
    heap_arena *arenas[2 * HEAP_MAX_STREAMS];
    size_t n = fcdp__heap_arenas(heap, arenas);
    bool gains = false;
    for (size_t i = 0; i < n; i++) {
        if (arenas[i]->private) continue;
        arenas[i]->fence_clock = arena_clock(arenas[i]);
        gains = gains || arena_would_gain(arenas[i]);
    }
    if (!gains || !fcdp__heap_wait_begin(heap)) return;
    heap->has_fence = true;
    for (size_t i = 0; i < HEAP_MAX_STREAMS; i++) {
        heap_stream *of = fcdp__heap_stream_at(heap, i);
        if (of && !fence_record(heap, of)) heap->has_fence = false;
    }
    fcdp__heap_wait_end(heap);
}

/* With the fence's lock. Once the fence has passed on every stream, what was freed before it is quiescent.
 * True: this call was the first to see that. */
static bool fence_look(fcdp_heap *heap) {
    bool passed = true;
    if (!heap->has_fence || !fcdp__heap_wait_begin(heap)) return false;
    for (size_t i = 0; i < HEAP_MAX_STREAMS && passed; i++) {
        heap_stream *of = fcdp__heap_stream_at(heap, i);
        if (!of || !of->fence_waits) continue;
        fcdp_status status = fcdp__driver_event_query(heap->drv, of->fence);
        passed = status == FCDP_OK;
        of->fence_waits = !passed;
        if (status < 0) heap->has_fence = false; /* the next begins anew */
    }
    fcdp__heap_wait_end(heap);
    if (!passed) return false;
    heap->has_fence = false;
    heap_arena *arenas[2 * HEAP_MAX_STREAMS];
    size_t n = fcdp__heap_arenas(heap, arenas);
    for (size_t i = 0; i < n; i++)
        if (!arenas[i]->private) arena_advance(arenas[i], arenas[i]->fence_clock);
    return true;
}

void fcdp__heap_quiesce(fcdp_heap *heap) {
    fcdp__lock_acquire(&heap->fence_lock);
    (void)fence_look(heap);
    if (!heap->has_fence) fence_begin(heap);
    (void)fence_look(heap);
    fcdp__lock_release(&heap->fence_lock);
}

/* An event that the fence waits for; NULL: none. *passed_out becomes true where it has passed by now. */
static fcdp_event fence_event(fcdp_heap *heap, bool *passed_out) {
    fcdp_event event = NULL;
    fcdp__lock_acquire(&heap->fence_lock);
    if (fence_look(heap)) *passed_out = true;
    for (size_t i = 0; i < HEAP_MAX_STREAMS && heap->has_fence && !event; i++) {
        heap_stream *of = fcdp__heap_stream_at(heap, i);
        if (of && of->fence_waits) event = of->fence;
    }
    fcdp__lock_release(&heap->fence_lock);
    return event;
}

/* ---- the device ---- */

bool fcdp__heap_device_quiesce(fcdp_heap *heap) {
    heap_arena *arenas[2 * HEAP_MAX_STREAMS];
    uint64_t clocks[2 * HEAP_MAX_STREAMS];
    size_t n = fcdp__heap_arenas(heap, arenas);
    bool gains = false;
    for (size_t i = 0; i < n; i++) {
        clocks[i] = fcdp__heap_is_pinned(arenas[i]) ? 0 : arena_clock(arenas[i]);
        gains = gains || arena_would_gain(arenas[i]);
    }
    if (!gains || !fcdp__heap_device_await(heap)) return false;
    for (size_t i = 0; i < n; i++) arena_advance(arenas[i], clocks[i]);
    atomic_fetch_add_explicit(&heap->n_waits, 1, memory_order_relaxed);
    return true;
}

bool fcdp__heap_await(fcdp_heap *heap, bool whole_device) {
    bool any = fcdp__heap_deferred_await(heap), fence_passed = false;
    if (!whole_device) {
        fcdp_event event = fence_event(heap, &fence_passed);
        for (; event && fcdp__heap_event_await(heap, event); event = fence_event(heap, &fence_passed))
            fence_passed = true;
    }
    if (fence_passed) { /* a fence that passed since the caller looked for pages counts as well */
        atomic_fetch_add_explicit(&heap->n_waits, 1, memory_order_relaxed);
        return true;
    }
    return fcdp__heap_device_quiesce(heap) || any;
}
