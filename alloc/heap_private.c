/* heap_private.c - private pools: which malloc is whose, when a capture is over,
 * and who gets a released pool's arenas. */
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

static bool private_is_over(const heap_private *private) {
    return !private->counted && atomic_load_explicit(&private->n_uses, memory_order_relaxed) == 0;
}

/* Nothing is left of it that somebody uses, not even the device. */
static bool arena_is_over(heap_arena *arena) {
    fcdp__lock_acquire(&arena->lock);
    const fcdp_arena_stats *of = fcdp__arena_stats(arena->blocks);
    bool quiescent = arena->quiescent_clock == fcdp__arena_clock(arena->blocks);
    bool over = of->live_bytes == 0 && of->busy_bytes == 0 &&
                (quiescent || of->free_bytes + of->quick_bytes == 0);
    fcdp__lock_release(&arena->lock);
    return over;
}

typedef struct private_over { /* a released pool, as it was after so many begins */
    heap_private *private;
    uint64_t n_begins;
    bool used; /* something of it, by somebody */
} private_over;

/* All of them; NULL: there are none, or no memory for a list. */
static private_over *privates_over(fcdp_heap *heap, size_t *n_out) {
    size_t n = 0;
    pthread_rwlock_rdlock(&heap->private_lock);
    for (heap_private *private = heap->privates; private; private = private->next)
        n += private_is_over(private);
    private_over *over = n > 0 ? malloc(n * sizeof *over) : NULL;
    *n_out = over ? n : 0;
    n = 0;
    for (heap_private *private = heap->privates; private && over; private = private->next)
        if (private_is_over(private)) over[n++] = (private_over){private, private->n_begins, false};
    pthread_rwlock_unlock(&heap->private_lock);
    return over;
}

static private_over *over_find(private_over *over, size_t n, const heap_private *private) {
    for (size_t i = 0; i < n; i++)
        if (over[i].private == private) return &over[i];
    return NULL;
}

/* A released pool whose arenas can serve another: a program may make any number of pools, one after the
 * other. It is looked at without the private lock, which comes after the arenas': who takes it sees by
 * n_begins whether another has had it meanwhile. Waits for the device once, for all released pools: during
 * the capture that may follow nobody can. */
static private_over private_find_over(fcdp_heap *heap) {
    size_t n_over, n_used = 0;
    private_over none = {NULL, 0, false}, *over = privates_over(heap, &n_over);
    if (!over) return none;
    heap_arena *arenas[2 * HEAP_MAX_STREAMS];
    size_t n = fcdp__heap_arenas(heap, arenas);
    bool quiescent = true;
    for (size_t i = 0; i < n; i++)
        if (arenas[i]->private && over_find(over, n_over, arenas[i]->private))
            quiescent = quiescent && fcdp__heap_arena_is_quiescent(arenas[i]);
    if (!quiescent) (void)fcdp__heap_device_quiesce(heap);
    for (size_t i = 0; i < n; i++) {
        private_over *of = arenas[i]->private ? over_find(over, n_over, arenas[i]->private) : NULL;
        if (of) of->used = !arena_is_over(arenas[i]) || of->used;
    }
    while (n_used < n_over && over[n_used].used) n_used++;
    private_over found = n_used < n_over ? over[n_used] : none;
    free(over);
    return found;
}

/* With the private lock, as writer. */
static heap_private *private_make(fcdp_heap *heap, fcdp_private_id id, private_over over) {
    bool unchanged = over.private && over.private->n_begins == over.n_begins;
    heap_private *private = unchanged ? over.private : NULL;
    if (!private) {
        private = calloc(1, sizeof *private);
        if (!private) return NULL;
        private->next = heap->privates;
        heap->privates = private;
    }
    private->id = id;
    return private;
}

/* With the private lock, as writer. */
static fcdp_status private_open(fcdp_heap *heap, fcdp_private_id id, private_over over, fcdp_covers_fn covers,
                                void *ctx, void **stale_ctx_out) {
    heap_private *private = private_find(heap, id);
    if (private && private->open)
        return fcdp__fail(FCDP_ERR_INVALID, "a private pool that has not ended begins again");
    if (!private) private = private_make(heap, id, over);
    if (!private) return fcdp__fail(FCDP_ERR_SYSTEM, "no host memory for a private pool");
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
    private_over over = private_find_over(heap);
    pthread_rwlock_wrlock(&heap->private_lock);
    fcdp_status status = private_open(heap, id, over, covers, ctx, stale_ctx_out);
    pthread_rwlock_unlock(&heap->private_lock);
    return status;
}

/* With the private lock. A stream that cannot be asked may be capturing. */
static bool private_captures(fcdp_heap *heap, const heap_private *private) {
    for (size_t i = 0; i < HEAP_MAX_STREAMS; i++) {
        heap_stream *of = atomic_load_explicit(&heap->streams[i], memory_order_acquire);
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

/* A capture that fails may leave its pool open (torch::CUDAGraph::capture_end throws before it ends
 * it), and then nothing could be waited for any more. What has served a malloc of a capture, and is
 * captured no more, is over. Its pages stay, since it was not released. (What has served none may be
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
    return ends ? FCDP_OK : fcdp__fail(FCDP_ERR_INVALID, "a private pool ends that has not begun");
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
