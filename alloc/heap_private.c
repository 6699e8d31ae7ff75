/* heap_private.c - private pools, from their first begin to the reuse of their arenas by another pool.
 *
 * A graph holds raw addresses, and its streams are unknown to the heap. So a private pool's pages stay mapped
 * until its last release, and are reused only after a wait for the whole device. While any pool is open, a
 * capture may be under way, and the heap asks the driver nothing.
 */
#include <stdlib.h>

#include "alloc/heap_internal.h"

static heap_private *private_find(fcdp_heap *heap, fcdp_private_id id) {
    heap_private *found = heap->privates;
    while (found && (found->id.first != id.first || found->id.second != id.second)) found = found->next;
    return found;
}

static void lock_leave(pthread_rwlock_t **lock) {
    pthread_rwlock_unlock(*lock);
}

/* `covers` may be C++, and throw: this file is compiled with -fexceptions, and nothing else is held. */
heap_private *fcdp__heap_private_covering(fcdp_heap *heap, fcdp_stream stream) {
    pthread_rwlock_t *lock __attribute__((cleanup(lock_leave))) = &heap->private_lock;
    pthread_rwlock_rdlock(lock);
    heap_private *private = heap->privates;
    while (private && !(private->open && private->covers(private->ctx, stream))) private = private->next;
    return private;
}

/* By its owner, with its captures ended: its arenas may serve another pool. */
static bool private_is_released(const heap_private *private) {
    return !private->counted && atomic_load_explicit(&private->n_uses, memory_order_relaxed) == 0;
}

typedef struct released_private { /* a released pool, as it was after so many begins */
    heap_private *private;
    uint64_t n_begins;
    bool used; /* at least one of its arenas has blocks */
} released_private;

/* All of them; NULL: there are none, or no memory for a list. */
static released_private *released_privates(fcdp_heap *heap, size_t *n_out) {
    size_t n = 0;
    pthread_rwlock_rdlock(&heap->private_lock);
    for (heap_private *private = heap->privates; private; private = private->next)
        n += private_is_released(private);
    released_private *released = n > 0 ? malloc(n * sizeof *released) : NULL;
    *n_out = released ? n : 0;
    n = 0;
    for (heap_private *private = heap->privates; private && released; private = private->next)
        if (private_is_released(private))
            released[n++] = (released_private){private, private->n_begins, false};
    pthread_rwlock_unlock(&heap->private_lock);
    return released;
}

static released_private *released_find(released_private *released, size_t n, const heap_private *private) {
    for (size_t i = 0; i < n; i++)
        if (released[i].private == private) return &released[i];
    return NULL;
}

/* A released pool that lends its arenas to another: a program may make any number of pools, one by one. The
 * search runs without the private lock, which comes after the arenas'; n_begins then tells whether another
 * thread has taken the pool meanwhile. It waits for the device once, for all released pools, since no thread
 * can wait during the capture that may follow. */
static released_private reusable_find(fcdp_heap *heap) {
    size_t n_released, n_used = 0;
    released_private none = {NULL, 0, false}, *released = released_privates(heap, &n_released);
    if (!released) return none;
    heap_arena *arenas[2 * HEAP_MAX_STREAMS];
    size_t n = fcdp__heap_arenas(heap, arenas);
    bool quiescent = true;
    for (size_t i = 0; i < n; i++)
        if (arenas[i]->private && released_find(released, n_released, arenas[i]->private))
            quiescent = quiescent && fcdp__heap_arena_is_quiescent(arenas[i]);
    if (!quiescent) (void)fcdp__heap_device_quiesce(heap);
    for (size_t i = 0; i < n; i++) {
        released_private *of = arenas[i]->private ? released_find(released, n_released, arenas[i]->private)
                                                  : NULL;
        if (!of) continue;
        fcdp__lock_acquire(&arenas[i]->lock);
        const fcdp_arena_stats *stats = fcdp__arena_stats(arenas[i]->blocks);
        bool empty = stats->free_bytes + stats->quick_bytes == 0;
        bool settled = empty || arenas[i]->quiescent_clock == fcdp__arena_clock(arenas[i]->blocks);
        if (stats->live_bytes || stats->busy_bytes || !settled) of->used = true;
        fcdp__lock_release(&arenas[i]->lock);
    }
    while (n_used < n_released && released[n_used].used) n_used++;
    released_private found = n_used < n_released ? released[n_used] : none;
    free(released);
    return found;
}

/* With the private lock, as writer. Uses `reusable`, unless another thread has taken it meanwhile. */
static fcdp_status private_open(fcdp_heap *heap, fcdp_private_id id, released_private reusable,
                                fcdp_covers_fn covers, void *ctx, void **stale_ctx_out) {
    heap_private *private = private_find(heap, id);
    if (private && private->open)
        return fcdp__fail(FCDP_ERR_INVALID, "a private pool cannot begin again before it has ended");
    if (!private && reusable.private && reusable.private->n_begins == reusable.n_begins)
        private = reusable.private;
    if (!private) {
        private = calloc(1, sizeof *private);
        if (!private) return fcdp__fail(FCDP_ERR_SYSTEM, "no host memory for a private pool");
        private->next = heap->privates;
        heap->privates = private;
    }
    private->id = id;
    if (private->begun) *stale_ctx_out = private->ctx;
    if (!private->counted) {
        atomic_store_explicit(&private->has_served, false, memory_order_relaxed);
        atomic_fetch_add_explicit(&heap->n_open, 1, memory_order_relaxed);
    }
    private->open = private->begun = private->counted = true;
    private->n_begins++;
    private->covers = covers;
    private->ctx = ctx;
    atomic_fetch_add_explicit(&private->n_uses, 1, memory_order_relaxed);
    return FCDP_OK;
}

fcdp_status fcdp_heap_private_begin(fcdp_heap *heap, fcdp_private_id id, fcdp_covers_fn covers, void *ctx,
                                    void **stale_ctx_out) {
    *stale_ctx_out = NULL;
    fcdp__heap_quiesce(heap); /* while it may still be asked */
    released_private reusable = reusable_find(heap);
    pthread_rwlock_wrlock(&heap->private_lock);
    fcdp_status status = private_open(heap, id, reusable, covers, ctx, stale_ctx_out);
    pthread_rwlock_unlock(&heap->private_lock);
    return status;
}

/* With the private lock. A stream that cannot be asked may be capturing. */
static bool private_captures(fcdp_heap *heap, const heap_private *private) {
    for (size_t i = 0; i < HEAP_MAX_STREAMS; i++) {
        heap_stream *of = fcdp__heap_stream_at(heap, i);
        if (of && of->private == private && fcdp__driver_stream_capture_query(heap->drv, of->stream))
            return true;
    }
    return false;
}

/* With the private lock, as writer. */
static void private_uncount(fcdp_heap *heap, heap_private *private) {
    private->open = private->counted = false;
    atomic_fetch_sub_explicit(&heap->n_open, 1, memory_order_relaxed);
}

/* A capture that fails may leave its pool open (torch::CUDAGraph::capture_end throws before it ends the
 * pool), and then the heap could never wait again. So a pool that has served a malloc of a capture, and is no
 * longer captured, has ended. Its pages stay, since it was not released. (A pool that has served none may be
 * about to be captured: it stays open.) */
bool fcdp__heap_privates_end_dead(fcdp_heap *heap) {
    bool any = false;
    if (!fcdp__heap_is_capturing(heap)) return false;
    pthread_rwlock_wrlock(&heap->private_lock);
    for (heap_private *private = heap->privates; private; private = private->next) {
        bool served = atomic_load_explicit(&private->has_served, memory_order_acquire);
        if (!private->counted || !served || private_captures(heap, private)) continue;
        if (private->open)
            fcdp__log(FCDP_LOG_WARN,
                      "a private pool was left open by a graph capture that has ended; it is closed now");
        private_uncount(heap, private);
        any = true;
    }
    pthread_rwlock_unlock(&heap->private_lock);
    return any;
}

fcdp_status fcdp_heap_private_end(fcdp_heap *heap, fcdp_private_id id, void **ctx_out) {
    pthread_rwlock_wrlock(&heap->private_lock);
    heap_private *private = private_find(heap, id);
    bool ends = private && private->begun;
    if (ends) {
        private->open = private->begun = false;
        if (private->counted && !private_captures(heap, private)) private_uncount(heap, private);
        /* whatever is still captured has begun */
        atomic_store_explicit(&private->has_served, true, memory_order_relaxed);
        *ctx_out = private->ctx;
    }
    pthread_rwlock_unlock(&heap->private_lock);
    return ends ? FCDP_OK : fcdp__fail(FCDP_ERR_INVALID, "a private pool cannot end before it has begun");
}

fcdp_status fcdp_heap_private_release(fcdp_heap *heap, fcdp_private_id id) {
    pthread_rwlock_wrlock(&heap->private_lock);
    heap_private *private = private_find(heap, id);
    bool used = private && atomic_load_explicit(&private->n_uses, memory_order_relaxed) > 0;
    if (used) atomic_fetch_sub_explicit(&private->n_uses, 1, memory_order_relaxed);
    pthread_rwlock_unlock(&heap->private_lock);
    return used ? FCDP_OK
                : fcdp__fail(FCDP_ERR_INVALID, "a private pool is released more often than it has begun");
}
