/* heap_quiescent.c - what becomes of freed memory until the device has passed its uses.
 *
 * A block that other streams have used is deferred: it becomes free, or goes to quarantine, once an event has
 * passed on each of those streams. A thread takes the whole list and checks it without the lock, since a
 * check may wait. n_checking counts such threads: a malloc that finds the list empty then knows that blocks
 * may still come back.
 *
 * Freed memory is quiescent once all work that any stream of the heap had when it was freed is done. Only
 * quiescent pages may be unmapped. The stream that freed a block orders its reuse, but not an unmap: the
 * block may have been used on other, unrecorded streams, where the program itself orders the next use
 * (FSDP2's reduced gradients). So one fence serves the whole heap: an event on each stream that is not idle,
 * recorded when a miss looks for pages. Once all events have passed, everything freed before the fence is
 * quiescent.
 *
 * Quarantine unmaps freed blocks and keeps their addresses unused for a while. An access to freed memory then
 * faults at once instead of reading another tensor's bytes. FCDP_CHECK=2 turns it on, and the number of bytes
 * bounds how much address space is held back.
 *
 * The file chooses no pages for a miss, and while a capture may be under way it neither queries nor waits.
 */
#include "alloc/heap_internal.h"

#include <stdlib.h>

/* ---- waits ---- */

/* A wait for the device, unless a capture is under way; while it lasts none begins. False: one is. */
static bool wait_begin(fcdp_heap *heap) {
    pthread_rwlock_rdlock(&heap->private_lock);
    if (!fcdp__heap_is_capturing(heap)) return true;
    pthread_rwlock_unlock(&heap->private_lock);
    return false;
}

static void wait_end(fcdp_heap *heap) {
    pthread_rwlock_unlock(&heap->private_lock);
}

/* False: a capture is under way, or the driver failed. */
static bool device_await(fcdp_heap *heap) {
    if (!wait_begin(heap)) return false;
    fcdp_status status = fcdp__driver_sync(heap->drv);
    wait_end(heap);
    return !status;
}

static bool event_await(fcdp_heap *heap, fcdp_event event) {
    if (!wait_begin(heap)) return false;
    fcdp_status status = fcdp__driver_event_sync(heap->drv, event);
    wait_end(heap);
    return !status;
}

/* ---- quarantine ---- */

bool fcdp__heap_quarantines(const heap_arena *arena, const fcdp_block *block) {
    size_t page_bytes = arena->heap->page_bytes;
    return arena->heap->quarantine_bytes && !arena->private && !arena->asleep &&
           block->address % page_bytes == 0 && block->bytes % page_bytes == 0;
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
static bool quarantine_push(heap_arena *arena, fcdp_block *block) {
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

/* ---- freed blocks that other streams still use: their events ---- */

static void event_give(fcdp_heap *heap, heap_event *event) {
    fcdp__lock_acquire(&heap->lock);
    event->next = heap->idle_events;
    heap->idle_events = event;
    fcdp__lock_release(&heap->lock);
}

/* Without an event the host waits for the stream: slow, but correct. */
static void use_record(fcdp_heap *heap, fcdp_stream stream, heap_uses *uses) {
    fcdp__lock_acquire(&heap->lock);
    heap_event *event = heap->idle_events;
    if (event) heap->idle_events = event->next;
    fcdp__lock_release(&heap->lock);
    if (!event) event = calloc(1, sizeof *event);
    if (event && !event->event && fcdp__driver_event_create_blocking(heap->drv, &event->event)) {
        free(event);
        event = NULL;
    }
    if (event && !fcdp__driver_event_record(heap->drv, event->event, stream)) {
        event->next = uses->events;
        uses->events = event;
        return;
    }
    if (event) event_give(heap, event);
    if (FCDP_RETRY_ONCE(fcdp__driver_stream_sync(heap->drv, stream)))
        fcdp__log(FCDP_LOG_WARN, "a stream that used freed memory cannot be waited for: %s",
                  fcdp_error_text());
}

/* Drop the events that have passed, up to the first that has not. With `wait`, wait for all of them, unless a
 * capture begins; an event that the driver cannot query any more has passed once the device is idle. */
static void uses_check(fcdp_heap *heap, heap_uses *uses, bool wait) {
    while (uses->events) {
        heap_event *event = uses->events;
        bool passed = wait ? event_await(heap, event->event) || device_await(heap)
                           : !fcdp__driver_event_query(heap->drv, event->event);
        if (!passed) return;
        uses->events = event->next;
        event_give(heap, event);
    }
}

/* ---- freed blocks that other streams still use: the list ---- */

static void deferred_add(fcdp_heap *heap, heap_uses *uses) {
    fcdp__lock_acquire(&heap->lock);
    uses->next = heap->deferred;
    heap->deferred = uses;
    fcdp__lock_release(&heap->lock);
}

/* Take the whole list. It belongs to this thread until the thread leaves n_checking. */
static heap_uses *deferred_detach(fcdp_heap *heap) {
    fcdp__lock_acquire(&heap->lock);
    heap_uses *list = heap->deferred;
    heap->deferred = NULL;
    heap->n_checking++;
    fcdp__lock_release(&heap->lock);
    return list;
}

/* True: no stream uses the block any more. An idle stream needs no event. */
static bool uses_have_ended(fcdp_heap *heap, heap_uses *uses, bool wait) {
    if (!wait_begin(heap)) return false;
    while (uses->n > 0) use_record(heap, uses->streams[--uses->n], uses);
    for (size_t i = 0; uses->awaits_all && i < HEAP_MAX_STREAMS; i++) {
        heap_stream *of = fcdp__heap_stream_at(heap, i);
        if (of && fcdp__driver_stream_query(heap->drv, of->stream)) use_record(heap, of->stream, uses);
    }
    uses->awaits_all = false;
    uses_check(heap, uses, false);
    wait_end(heap);
    if (wait) uses_check(heap, uses, true);
    return !uses->events;
}

/* The block becomes free, or goes to quarantine. */
static void deferred_end(heap_uses *uses) {
    heap_arena *arena = uses->arena;
    if (!fcdp__heap_quarantines(arena, uses->block) || !quarantine_push(arena, uses->block)) {
        fcdp__lock_acquire(&arena->lock);
        fcdp__arena_give(arena->blocks, uses->block);
        fcdp__lock_release(&arena->lock);
    }
    free(uses);
}

void fcdp__heap_defer(heap_arena *arena, fcdp_block *block) {
    fcdp_heap *heap = arena->heap;
    heap_uses *uses = block->tag;
    block->tag = NULL;
    uses->arena = arena;
    uses->block = block;
    if (uses_have_ended(heap, uses, false)) {
        deferred_end(uses);
        return;
    }
    atomic_fetch_add_explicit(&heap->n_deferred, 1, memory_order_relaxed);
    deferred_add(heap, uses);
}

/* The lock is not held while blocks are checked: a check may wait for an event. */
static bool deferred_check(fcdp_heap *heap, bool wait) {
    heap_uses *list = deferred_detach(heap);
    bool any = false;
    while (list) {
        heap_uses *uses = list;
        list = uses->next;
        if (!uses_have_ended(heap, uses, wait)) {
            deferred_add(heap, uses);
            continue;
        }
        deferred_end(uses);
        atomic_fetch_sub_explicit(&heap->n_deferred, 1, memory_order_relaxed);
        any = true;
    }
    fcdp__lock_acquire(&heap->lock);
    heap->n_checking--;
    pthread_cond_broadcast(&heap->checked);
    fcdp__lock_release(&heap->lock);
    return any;
}

void fcdp__heap_deferred_poll(fcdp_heap *heap) {
    if (atomic_load_explicit(&heap->n_deferred, memory_order_relaxed) > 0) (void)deferred_check(heap, false);
}

/* If another thread has the whole list, wait until it has put back or freed the blocks. */
static bool deferred_await(fcdp_heap *heap) {
    if (atomic_load_explicit(&heap->n_deferred, memory_order_relaxed) == 0) return false;
    fcdp__lock_acquire(&heap->lock);
    size_t n = heap->n_checking;
    bool others = n > 0 && !heap->deferred;
    if (others)
        while (heap->n_checking >= n) fcdp__lock_wait(&heap->lock, &heap->checked);
    fcdp__lock_release(&heap->lock);
    return others || deferred_check(heap, true);
}

void fcdp__heap_deferred_destroy(fcdp_heap *heap) {
    for (heap_uses *uses = deferred_detach(heap), *next; uses; uses = next) {
        next = uses->next;
        while (uses->events) {
            heap_event *event = uses->events;
            uses->events = event->next;
            event_give(heap, event);
        }
        free(uses);
    }
    while (heap->idle_events) {
        heap_event *event = heap->idle_events;
        heap->idle_events = event->next;
        fcdp__driver_event_destroy(heap->drv, event->event);
        free(event);
    }
}

/* ---- what is quiescent ---- */

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
    if (!gains || !wait_begin(heap)) return;
    heap->has_fence = true;
    for (size_t i = 0; i < HEAP_MAX_STREAMS; i++) {
        heap_stream *of = fcdp__heap_stream_at(heap, i);
        if (of && !fence_record(heap, of)) heap->has_fence = false;
    }
    wait_end(heap);
}

/* With the fence's lock. Once the fence has passed on every stream, what was freed before it is quiescent.
 * True: this call was the first to see that. */
static bool fence_look(fcdp_heap *heap) {
    bool passed = true;
    if (!heap->has_fence || !wait_begin(heap)) return false;
    for (size_t i = 0; i < HEAP_MAX_STREAMS && passed; i++) {
        heap_stream *of = fcdp__heap_stream_at(heap, i);
        if (!of || !of->fence_waits) continue;
        fcdp_status status = fcdp__driver_event_query(heap->drv, of->fence);
        passed = status == FCDP_OK;
        of->fence_waits = !passed;
        if (status < 0) heap->has_fence = false; /* the next begins anew */
    }
    wait_end(heap);
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
    if (!gains || !device_await(heap)) return false;
    for (size_t i = 0; i < n; i++) arena_advance(arenas[i], clocks[i]);
    atomic_fetch_add_explicit(&heap->n_waits, 1, memory_order_relaxed);
    return true;
}

bool fcdp__heap_await(fcdp_heap *heap, bool whole_device) {
    bool any = deferred_await(heap), fence_passed = false;
    if (!whole_device) {
        fcdp_event event = fence_event(heap, &fence_passed);
        for (; event && event_await(heap, event); event = fence_event(heap, &fence_passed))
            fence_passed = true;
    }
    if (fence_passed) { /* a fence that passed since the caller looked for pages counts as well */
        atomic_fetch_add_explicit(&heap->n_waits, 1, memory_order_relaxed);
        return true;
    }
    return fcdp__heap_device_quiesce(heap) || any;
}
