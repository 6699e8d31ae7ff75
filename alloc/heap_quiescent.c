/* heap_quiescent.c - which freed memory is quiescent: the device has done what its streams had when it was freed, so that its pages may be
 * unmapped. Asks and waits; moves nothing. */
#include "alloc/heap_internal.h"

/* With the arena's lock, and no capture under way. */
static void fence_look(heap_arena *arena) {
    fcdp_driver *drv = arena->heap->drv;
    uint64_t now = fcdp__arena_clock(arena->blocks);
    if (arena->has_fence) {
        fcdp_status status = fcdp__driver_event_query(drv, arena->fence);
        if (status == FCDP_OK) arena->quiescent_clock = arena->fence_clock;
        arena->has_fence = status == FCDP_PENDING; /* after a failure it is recorded anew */
    }
    if (arena->has_fence || arena->quiescent_clock == now) return;
    if (fcdp__driver_stream_query(drv, arena->stream) == FCDP_OK) {
        arena->quiescent_clock = now;
        return;
    }
    if (!arena->fence && fcdp__driver_event_create(drv, &arena->fence)) return;
    if (fcdp__driver_event_record(drv, arena->fence, arena->stream)) return;
    arena->has_fence = true;
    arena->fence_clock = now;
}

/* With the arena's lock. The driver is asked, never waited for. What a graph wrote to, on whatever stream it
 * ran, no stream's state can tell: a private pool's pages become quiescent by private_await alone. */
void fcdp__heap_arena_quiesce(heap_arena *arena) {
    fcdp_heap *heap = arena->heap;
    if (arena->private) return;
    pthread_rwlock_rdlock(&heap->private_lock);
    if (!fcdp__heap_is_capturing(heap)) fence_look(arena);
    pthread_rwlock_unlock(&heap->private_lock);
}

void fcdp__heap_quiesce(fcdp_heap *heap) {
    heap_arena *arenas[2 * HEAP_MAX_STREAMS];
    size_t n = fcdp__heap_arenas(heap, arenas);
    for (size_t i = 0; i < n; i++) {
        fcdp__lock_acquire(&arenas[i]->lock);
        fcdp__heap_arena_quiesce(arenas[i]);
        fcdp__lock_release(&arenas[i]->lock);
    }
}

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

/* Until the device has done everything: then what has been freed of a released pool is quiescent. */
static bool private_await(heap_arena *arena) {
    fcdp__lock_acquire(&arena->lock);
    uint64_t now = fcdp__arena_clock(arena->blocks);
    bool waits = arena->quiescent_clock < now;
    fcdp__lock_release(&arena->lock);
    if (!waits || !fcdp__heap_device_await(arena->heap)) return false;
    fcdp__lock_acquire(&arena->lock);
    if (arena->quiescent_clock < now && !fcdp__heap_is_pinned(arena)) arena->quiescent_clock = now;
    fcdp__lock_release(&arena->lock);
    return true;
}

/* One wait for the arena's fence; false: there is none. */
static bool fence_await(heap_arena *arena) {
    fcdp__lock_acquire(&arena->lock);
    fcdp__heap_arena_quiesce(arena);
    bool waits = arena->has_fence;
    fcdp__lock_release(&arena->lock);
    return waits && fcdp__heap_event_await(arena->heap, arena->fence);
}

bool fcdp__heap_arena_await(heap_arena *arena) {
    if (fcdp__heap_is_pinned(arena)) return false;
    bool waited = arena->private ? private_await(arena) : fence_await(arena);
    if (waited && !arena->private) (void)fence_await(arena); /* the first may have been an old fence */
    if (waited) atomic_fetch_add_explicit(&arena->heap->n_waits, 1, memory_order_relaxed);
    return waited;
}