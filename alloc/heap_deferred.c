/* heap_deferred.c - freed blocks that other streams still use.
 *
 * A block on this list becomes free, or goes to quarantine, once an event has passed on each of those
 * streams. A thread takes the whole list and checks it without the lock, since a check may wait. n_checking
 * counts such threads: a malloc that finds the list empty then knows that blocks may still come back.
 */
#include <stdlib.h>

#include "alloc/heap_internal.h"

/* ---- events ---- */

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
        bool passed = wait ? fcdp__heap_event_await(heap, event->event) || fcdp__heap_device_await(heap)
                           : !fcdp__driver_event_query(heap->drv, event->event);
        if (!passed) return;
        uses->events = event->next;
        event_give(heap, event);
    }
}

/* ---- deferred blocks ---- */

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
    if (!fcdp__heap_wait_begin(heap)) return false;
    while (uses->n > 0) use_record(heap, uses->streams[--uses->n], uses);
    for (size_t i = 0; uses->awaits_all && i < HEAP_MAX_STREAMS; i++) {
        heap_stream *of = fcdp__heap_stream_at(heap, i);
        if (of && fcdp__driver_stream_query(heap->drv, of->stream)) use_record(heap, of->stream, uses);
    }
    uses->awaits_all = false;
    uses_check(heap, uses, false);
    fcdp__heap_wait_end(heap);
    if (wait) uses_check(heap, uses, true);
    return !uses->events;
}

/* The block becomes free, or goes to quarantine. */
static void deferred_end(heap_uses *uses) {
    heap_arena *arena = uses->arena;
    if (!fcdp__heap_quarantines(arena, uses->block) || !fcdp__heap_quarantine_push(arena, uses->block)) {
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
bool fcdp__heap_deferred_await(fcdp_heap *heap) {
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
