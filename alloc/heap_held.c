/* heap_held.c - freed blocks that other streams still use: held back until events of those streams. */
#include <stdlib.h>

#include "alloc/heap_internal.h"

/* ---- events ---- */

static heap_event *event_take(fcdp_heap *heap) {
    fcdp__lock_acquire(&heap->lock);
    heap_event *event = heap->idle_events;
    if (event) heap->idle_events = event->next;
    fcdp__lock_release(&heap->lock);
    if (event) return event;
    event = calloc(1, sizeof *event);
    if (event && fcdp__driver_event_create_blocking(heap->drv, &event->event)) {
        free(event);
        return NULL;
    }
    return event;
}

static void event_give(fcdp_heap *heap, heap_event *event) {
    fcdp__lock_acquire(&heap->lock);
    event->next = heap->idle_events;
    heap->idle_events = event;
    fcdp__lock_release(&heap->lock);
}

/* Where there is no event the host waits: late, but right. */
static void use_record(fcdp_heap *heap, fcdp_stream stream, heap_uses *uses) {
    heap_event *event = event_take(heap);
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

static void block_give(heap_arena *arena, fcdp_block *block, bool spared) {
    if (!spared && fcdp__heap_quarantines(arena, block) && fcdp__heap_quarantine_push(arena, block)) return;
    fcdp__lock_acquire(&arena->lock);
    fcdp__arena_give(arena->blocks, block);
    fcdp__lock_release(&arena->lock);
}
/* ---- held blocks ---- */

static void held_keep(fcdp_heap *heap, heap_uses *held) {
    fcdp__lock_acquire(&heap->lock);
    held->next = heap->held;
    heap->held = held;
    fcdp__lock_release(&heap->lock);
}

/* The list, to look at; until held_return others know that it is in somebody's hands. */
static heap_uses *held_detach(fcdp_heap *heap) {
    fcdp__lock_acquire(&heap->lock);
    heap_uses *list = heap->held;
    heap->held = NULL;
    heap->n_in_hand++;
    fcdp__lock_release(&heap->lock);
    return list;
}

static void held_return(fcdp_heap *heap) {
    fcdp__lock_acquire(&heap->lock);
    heap->n_in_hand--;
    pthread_cond_broadcast(&heap->held_back);
    fcdp__lock_release(&heap->lock);
}

/* With `wait`, an event that the driver cannot tell of any more has passed once the device is idle. */
static bool event_has_passed(fcdp_heap *heap, fcdp_event event, bool wait) {
    if (wait) return fcdp__heap_event_await(heap, event) || fcdp__heap_device_await(heap);
    return !fcdp__driver_event_query(heap->drv, event);
}

/* Drop the events that have passed; with `wait`, all of them, unless a capture begins. */
static void held_check(fcdp_heap *heap, heap_uses *held, bool wait) {
    heap_event *left = NULL;
    while (held->events) {
        heap_event *event = held->events;
        held->events = event->next;
        if (event_has_passed(heap, event->event, wait)) {
            event_give(heap, event);
        } else {
            event->next = left;
            left = event;
        }
    }
    held->events = left;
}

/* True: nobody uses the block any more. */
static bool held_look(fcdp_heap *heap, heap_uses *held, bool wait) {
    if (!fcdp__heap_wait_begin(heap)) return false;
    while (held->n > 0) use_record(heap, held->streams[--held->n], held);
    held_check(heap, held, false);
    fcdp__heap_wait_end(heap);
    if (wait) held_check(heap, held, true);
    return !held->events;
}

static void held_end(heap_uses *held) {
    block_give(held->arena, held->block, held->spared);
    free(held);
}

void fcdp__heap_hold(heap_arena *arena, fcdp_block *block) {
    fcdp_heap *heap = arena->heap;
    heap_uses *held = block->tag;
    block->tag = NULL;
    held->arena = arena;
    held->block = block;
    if (held_look(heap, held, false)) {
        held_end(held);
        return;
    }
    atomic_fetch_add_explicit(&heap->n_held, 1, memory_order_relaxed);
    held_keep(heap, held);
}

static bool held_pass(fcdp_heap *heap, bool wait) {
    heap_uses *list = held_detach(heap);
    bool any = false;
    while (list) {
        heap_uses *held = list;
        list = held->next;
        if (!held_look(heap, held, wait)) {
            held_keep(heap, held);
            continue;
        }
        held_end(held);
        atomic_fetch_sub_explicit(&heap->n_held, 1, memory_order_relaxed);
        any = true;
    }
    held_return(heap);
    return any;
}

void fcdp__heap_poll(fcdp_heap *heap) {
    if (atomic_load_explicit(&heap->n_held, memory_order_relaxed) > 0) (void)held_pass(heap, false);
}

/* Until another thread has put back what it has in its hands; false: none has. */
static bool held_back_await(fcdp_heap *heap) {
    fcdp__lock_acquire(&heap->lock);
    size_t n = heap->n_in_hand;
    bool others = n > 0 && !heap->held;
    if (others)
        while (heap->n_in_hand >= n) fcdp__lock_wait(&heap->lock, &heap->held_back);
    fcdp__lock_release(&heap->lock);
    return others;
}

bool fcdp__heap_held_await(fcdp_heap *heap) {
    if (atomic_load_explicit(&heap->n_held, memory_order_relaxed) == 0) return false;
    return held_back_await(heap) || held_pass(heap, true);
}

void fcdp__heap_held_destroy(fcdp_heap *heap) {
    for (heap_uses *held = held_detach(heap), *next; held; held = next) {
        next = held->next;
        while (held->events) {
            heap_event *event = held->events;
            held->events = event->next;
            event_give(heap, event);
        }
        free(held);
    }
    fcdp__heap_quarantine_destroy(heap);
    while (heap->idle_events) {
        heap_event *event = heap->idle_events;
        heap->idle_events = event->next;
        fcdp__driver_event_destroy(heap->drv, event->event);
        free(event);
    }
}
