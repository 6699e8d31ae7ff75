/* heap_grow.c - where the pages of a miss come from, and when freed memory may be touched again: cold pages,
 * events, the order of pressure. */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "alloc/heap_internal.h"

enum { MAX_VACATED = 64 }; /* blocks vacated at a time */

/* ---- what is cold ---- */

/* With the arena's lock, and no capture under way. */
static void mark_look(heap_arena *arena) {
    fcdp_driver *drv = arena->heap->drv;
    uint64_t now = fcdp__arena_clock(arena->blocks);
    if (arena->has_mark) {
        fcdp_status status = fcdp__driver_event_query(drv, arena->mark);
        if (status == FCDP_OK) arena->cold_clock = arena->mark_clock;
        arena->has_mark = status == FCDP_PENDING; /* after a failure it is recorded anew */
    }
    if (arena->has_mark || arena->cold_clock == now) return;
    if (fcdp__driver_stream_query(drv, arena->stream) == FCDP_OK) {
        arena->cold_clock = now;
        return;
    }
    if (!arena->mark && fcdp__driver_event_create(drv, &arena->mark)) return;
    if (fcdp__driver_event_record(drv, arena->mark, arena->stream)) return;
    arena->has_mark = true;
    arena->mark_clock = now;
}

/* With the arena's lock. The driver is asked, never waited for. What a graph wrote to, on whatever stream it
 * ran, no stream's state can tell: a private pool's pages get cold by private_await alone. */
static void arena_cool(heap_arena *arena) {
    fcdp_heap *heap = arena->heap;
    if (arena->private) return;
    pthread_rwlock_rdlock(&heap->private_lock);
    if (!fcdp__heap_is_capturing(heap)) mark_look(arena);
    pthread_rwlock_unlock(&heap->private_lock);
}

void fcdp__heap_cool(fcdp_heap *heap) {
    heap_arena *arenas[2 * HEAP_MAX_STREAMS];
    size_t n = fcdp__heap_arenas(heap, arenas);
    for (size_t i = 0; i < n; i++) {
        fcdp__lock_acquire(&arenas[i]->lock);
        arena_cool(arenas[i]);
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

static bool device_await(fcdp_heap *heap) {
    if (!fcdp__heap_wait_begin(heap)) return false;
    fcdp_status status = fcdp__driver_sync(heap->drv);
    fcdp__heap_wait_end(heap);
    return !status;
}

static bool event_await(fcdp_heap *heap, fcdp_event event) {
    if (!fcdp__heap_wait_begin(heap)) return false;
    fcdp_status status = fcdp__driver_event_sync(heap->drv, event);
    fcdp__heap_wait_end(heap);
    return !status;
}

/* Until the device has done everything: then what has been freed of a released pool is cold. */
static bool private_await(heap_arena *arena) {
    fcdp__lock_acquire(&arena->lock);
    uint64_t now = fcdp__arena_clock(arena->blocks);
    bool waits = arena->cold_clock < now;
    fcdp__lock_release(&arena->lock);
    if (!waits || !device_await(arena->heap)) return false;
    fcdp__lock_acquire(&arena->lock);
    if (arena->cold_clock < now && !fcdp__heap_is_pinned(arena)) arena->cold_clock = now;
    fcdp__lock_release(&arena->lock);
    return true;
}

/* One wait for the arena's mark; false: there is none. */
static bool mark_await(heap_arena *arena) {
    fcdp__lock_acquire(&arena->lock);
    arena_cool(arena);
    bool waits = arena->has_mark;
    fcdp__lock_release(&arena->lock);
    return waits && event_await(arena->heap, arena->mark);
}

bool fcdp__heap_arena_await(heap_arena *arena) {
    if (fcdp__heap_is_pinned(arena)) return false;
    bool waited = arena->private ? private_await(arena) : mark_await(arena);
    if (waited && !arena->private) (void)mark_await(arena); /* the first may have been an old mark */
    if (waited) atomic_fetch_add_explicit(&arena->heap->n_waits, 1, memory_order_relaxed);
    return waited;
}

/* ---- vacating ---- */

static fcdp_phys *page_slot(const fcdp_heap *heap, const fcdp_block *block, uint64_t address) {
    heap_span *span = block->span->owner;
    return &span->pages[(address - span->base) / heap->page_bytes];
}

/* The pages of a vacated block, off their place. */
static bool block_unmap(fcdp_heap *heap, const fcdp_block *block, fcdp_phys *pages_out) {
    fcdp_phys *slots = page_slot(heap, block, block->address);
    size_t n = block->bytes / heap->page_bytes;
    if (fcdp__driver_unmap(heap->drv, (fcdp_dptr){block->address}, block->bytes)) return false;
    memcpy(pages_out, slots, n * sizeof *slots);
    memset(slots, 0, n * sizeof *slots);
    return true;
}

/* Cold pages of one arena, at most `n`, in one go. */
static size_t arena_collect(heap_arena *arena, size_t n, fcdp_phys *pages_out) {
    fcdp_block *blocks[MAX_VACATED];
    bool gone[MAX_VACATED];
    size_t n_pages = 0, n_blocks = 0;
    fcdp__lock_acquire(&arena->lock);
    if (!fcdp__heap_is_pinned(arena)) { /* a pool that begins again mallocs under this lock */
        fcdp__arena_flush(arena->blocks);
        arena_cool(arena);
        n_blocks = fcdp__arena_vacate(arena->blocks, arena->cold_clock, n, blocks, MAX_VACATED);
    }
    fcdp__lock_release(&arena->lock);
    for (size_t i = 0; i < n_blocks; i++) {
        gone[i] = block_unmap(arena->heap, blocks[i], pages_out + n_pages);
        if (gone[i]) n_pages += blocks[i]->bytes / arena->heap->page_bytes;
    }
    if (n_blocks == 0) return 0;
    fcdp__lock_acquire(&arena->lock);
    for (size_t i = 0; i < n_blocks; i++) {
        if (gone[i])
            fcdp__arena_vacated(arena->blocks, blocks[i]);
        else
            fcdp__arena_unvacate(arena->blocks, blocks[i]);
    }
    fcdp__lock_release(&arena->lock);
    return n_pages;
}

static size_t arena_collect_all(heap_arena *arena, size_t n, fcdp_phys *pages_out) {
    size_t n_got = 0, more = 1;
    while (n_got < n && more > 0) {
        more = arena_collect(arena, n - n_got, pages_out + n_got);
        n_got += more;
    }
    return n_got;
}

/* Of `arena`'s stream, from its own pages first. */
static size_t stream_collect(heap_arena *arena, size_t n, fcdp_phys *pages_out) {
    size_t n_got = arena_collect_all(arena, n, pages_out);
    return n_got + arena_collect_all(arena->sibling, n - n_got, pages_out + n_got);
}

static size_t all_collect(fcdp_heap *heap, size_t n, fcdp_phys *pages_out) {
    heap_arena *arenas[2 * HEAP_MAX_STREAMS];
    size_t n_arenas = fcdp__heap_arenas(heap, arenas), n_got = 0;
    for (size_t i = 0; i < n_arenas && n_got < n; i++)
        n_got += arena_collect_all(arenas[i], n - n_got, pages_out + n_got);
    return n_got;
}

static bool all_await(fcdp_heap *heap) {
    heap_arena *arenas[2 * HEAP_MAX_STREAMS];
    size_t n = fcdp__heap_arenas(heap, arenas);
    bool any = fcdp__heap_held_await(heap);
    for (size_t i = 0; i < n; i++) any = fcdp__heap_arena_await(arenas[i]) || any;
    return any;
}

static void pages_leave(fcdp_heap *heap, size_t n, const fcdp_phys *pages) {
    if (n == 0) return;
    fcdp__heap_pages_remove(heap, n);
    fcdp__pool_give(heap->pool, FCDP_HOLDER_TENSORS, n, pages);
    atomic_fetch_add_explicit(&heap->n_returns, 1, memory_order_relaxed);
}

static size_t reclaim(fcdp_heap *heap, size_t n_pages, bool waits) {
    fcdp_phys *pages = malloc(n_pages * sizeof *pages);
    size_t n_given = 0;
    if (!pages) return 0;
    fcdp__heap_poll(heap);
    do {
        size_t n = all_collect(heap, n_pages - n_given, pages);
        pages_leave(heap, n, pages); /* nobody else should lack them while this thread waits */
        n_given += n;
    } while (waits && n_given < n_pages && all_await(heap));
    free(pages);
    return n_given;
}

size_t fcdp__heap_reclaim(void *heap, size_t n_pages) {
    return reclaim(heap, n_pages, false);
}

size_t fcdp__heap_reclaim_waiting(void *heap, size_t n_pages) {
    return reclaim(heap, n_pages, true);
}

fcdp_status fcdp_heap_trim(fcdp_heap *heap) {
    enum { AT_ONCE = 4096 };
    fcdp_phys *pages = malloc(AT_ONCE * sizeof *pages);
    if (!pages) return fcdp__fail(FCDP_ERR_SYSTEM, "no host memory");
    (void)fcdp__heap_end_dead_pools(heap);
    (void)all_await(heap);
    for (size_t n = 1; n > 0;) {
        n = all_collect(heap, AT_ONCE, pages);
        pages_leave(heap, n, pages);
    }
    free(pages);
    (void)fcdp__pool_trim(heap->pool);
    return FCDP_OK;
}

/* ---- the order of pressure ---- */

enum { N_CLASSES = 4 };
static const size_t class_bytes[N_CLASSES] = {1 << 20, 16 << 20, 128 << 20, SIZE_MAX};
static const char *const class_name[N_CLASSES] = {"to 1 MiB", "to 16 MiB", "to 128 MiB", "larger"};

typedef struct holdings {
    size_t live[N_CLASSES], cached, held;
} holdings;

static void holdings_see(void *ctx, const fcdp_heap_view *view) {
    holdings *h = ctx;
    int k = 0;
    while (view->bytes > class_bytes[k]) k++;
    if (view->state == FCDP_BLOCK_LIVE)
        h->live[k] += view->bytes;
    else if (view->state == FCDP_BLOCK_BUSY)
        h->held += view->bytes;
    else
        h->cached += view->bytes;
}

static fcdp_status out_of_memory(fcdp_heap *heap, size_t bytes, size_t n_missing) {
    const size_t mib = 1 << 20;
    holdings h = {{0}, 0, 0};
    fcdp_pool_stats pool;
    size_t free_bytes = 0, total_bytes = 0, at = 0;
    char tensors[160];
    atomic_fetch_add_explicit(&heap->n_ooms, 1, memory_order_relaxed);
    fcdp_heap_walk(heap, holdings_see, &h);
    fcdp__pool_stats(heap->pool, &pool);
    if (fcdp__driver_mem_info(heap->drv, &free_bytes, &total_bytes)) total_bytes = 0;
    for (int i = 0; i < N_CLASSES; i++)
        at += (size_t)snprintf(tensors + at, sizeof tensors - at, "%s%zu MiB %s", i ? ", " : "",
                               h.live[i] / mib, class_name[i]);
    size_t reserved = atomic_load_explicit(&heap->n_pages, memory_order_relaxed) * heap->page_bytes;
    size_t live = pool.live_pages * pool.page_bytes, cached = pool.cached_pages * pool.page_bytes;
    size_t ours = live + cached, used = total_bytes - free_bytes;
    size_t others = total_bytes && used > ours ? used - ours : 0;
    const char *advice = "use a smaller batch, activation checkpointing, or more ranks";
    if (others > bytes)
        advice =
            "end the other processes on this device, or set FCDP_DEVICE_BUDGET to what is left for this one";
    else if (fcdp__heap_is_capturing(heap))
        advice = "a graph is being captured, so that nothing can be waited for";
    else if (pool.budget_bytes + bytes <= total_bytes - others)
        advice = "the budget is the limit, not the device: raise FCDP_DEVICE_BUDGET";
    return fcdp__fail(
        FCDP_ERR_NO_DEVICE_MEM,
        "no device memory for %zu bytes: %zu pages of %zu KiB are missing. Of a budget of %zu MiB tensors "
        "hold %s; freed ones %zu MiB, of it %zu MiB waiting for other streams; regions %zu MiB; idle "
        "pages %zu MiB. Other processes hold %zu MiB of the device's %zu MiB; %s",
        bytes, n_missing, heap->page_bytes >> 10, pool.budget_bytes / mib, tensors, (h.cached + h.held) / mib,
        h.held / mib, (live > reserved ? live - reserved : 0) / mib, cached / mib, others / mib,
        total_bytes / mib, advice);
}

/* From the pool, all `n` or none; with `ask`, its reclaimers are asked. FCDP_PENDING: there are none. */
static fcdp_status pool_pages(fcdp_heap *heap, size_t n, bool ask, fcdp_phys *pages_out) {
    fcdp_status status =
        ask ? fcdp__pool_take(heap->pool, FCDP_HOLDER_TENSORS, n, pages_out) : fcdp__pool_take_idle(heap->pool, FCDP_HOLDER_TENSORS, n, pages_out);
    if (status == FCDP_ERR_NO_DEVICE_MEM) status = FCDP_PENDING;
    if (status) return status;
    fcdp__heap_pages_add(heap, n);
    atomic_fetch_add_explicit(&heap->n_taken, n, memory_order_relaxed);
    return FCDP_OK;
}

typedef struct attempt {
    size_t n_missing;
    bool waited;
    uint64_t n_returns; /* times that it has given back what it had */
} attempt;

/* One attempt at `n` pages, all or none; FCDP_PENDING: there are none. */
static fcdp_status pages_try(heap_arena *arena, size_t n, fcdp_phys *pages_out, attempt *attempt_out) {
    fcdp_heap *heap = arena->heap;
    *attempt_out = (attempt){n, attempt_out->waited, 0};
    for (;;) {
        fcdp_status status = FCDP_PENDING;
        size_t n_got = stream_collect(arena, n, pages_out);
        if (n_got < n) status = pool_pages(heap, n - n_got, false, pages_out + n_got);
        if (n_got < n && status == FCDP_PENDING) n_got += all_collect(heap, n - n_got, pages_out + n_got);
        bool ask = !fcdp__heap_is_capturing(heap); /* a region that must be stored first is waited for */
        if (n_got < n && status == FCDP_PENDING)
            status = pool_pages(heap, n - n_got, ask, pages_out + n_got);
        if (n_got == n || status == FCDP_OK) {
            atomic_fetch_add_explicit(&heap->n_moved, n_got, memory_order_relaxed);
            return FCDP_OK;
        }
        attempt_out->n_missing = n - n_got;
        attempt_out->n_returns += n_got > 0;
        pages_leave(heap, n_got, pages_out); /* nobody else should lack them while this thread waits */
        if (status != FCDP_PENDING) return status;
        if (!all_await(heap) && !fcdp__heap_end_dead_pools(heap)) return status;
        if (!attempt_out->waited) atomic_fetch_add_explicit(&heap->n_retries, 1, memory_order_relaxed);
        attempt_out->waited = true;
    }
}

/* Who finds too few while another looks as well may have missed what that one had in its hands: tries again.
 */
static fcdp_status pages_seek(heap_arena *arena, size_t n, size_t bytes, fcdp_phys *pages_out) {
    enum { MAX_LOST_RACES = 64 };
    fcdp_heap *heap = arena->heap;
    attempt last = {n, false, 0};
    for (int n_lost = 0; n_lost < MAX_LOST_RACES; n_lost++) {
        uint64_t n_returns = atomic_load_explicit(&heap->n_returns, memory_order_relaxed);
        fcdp_status status = pages_try(arena, n, pages_out, &last);
        if (status != FCDP_PENDING) return status;
        bool alone = atomic_load_explicit(&heap->n_seeking, memory_order_relaxed) == 1;
        n_returns += last.n_returns;
        if (alone && atomic_load_explicit(&heap->n_returns, memory_order_relaxed) == n_returns) break;
        sched_yield();
    }
    return out_of_memory(heap, bytes, last.n_missing);
}

static fcdp_status pages_find(heap_arena *arena, size_t n, size_t bytes, fcdp_phys *pages_out) {
    atomic_fetch_add_explicit(&arena->heap->n_seeking, 1, memory_order_relaxed);
    fcdp_status status = pages_seek(arena, n, bytes, pages_out);
    atomic_fetch_sub_explicit(&arena->heap->n_seeking, 1, memory_order_relaxed);
    return status;
}

/* ---- mapping ---- */

/* The pages of one hole; on failure those that were mapped are in their slots. */
static fcdp_status hole_map(fcdp_heap *heap, const fcdp_block *hole, const fcdp_phys *pages,
                            size_t *n_mapped_out) {
    fcdp_phys *slots = page_slot(heap, hole, hole->address);
    size_t n = hole->bytes / heap->page_bytes;
    for (size_t i = 0; i < n; i++) {
        fcdp_dptr at = {hole->address + i * heap->page_bytes};
        fcdp_status status = fcdp__driver_map(heap->drv, at, heap->page_bytes, pages[i]);
        if (status) return status;
        slots[i] = pages[i];
        *n_mapped_out = i + 1;
    }
    return fcdp__driver_set_access(heap->drv, (fcdp_dptr){hole->address}, hole->bytes);
}

/* Take the first `n` pages of the hole away again; the driver may refuse. */
static bool hole_unmap(fcdp_heap *heap, const fcdp_block *hole, size_t n) {
    fcdp_phys *slots = page_slot(heap, hole, hole->address);
    if (n == 0) return true;
    fcdp_status status = fcdp__driver_unmap(heap->drv, (fcdp_dptr){hole->address}, n * heap->page_bytes);
    if (status) status = fcdp__driver_unmap(heap->drv, (fcdp_dptr){hole->address}, n * heap->page_bytes);
    if (status) return false;
    pages_leave(heap, n, slots);
    memset(slots, 0, n * sizeof *slots);
    return true;
}

static fcdp_status holes_map(fcdp_heap *heap, const fcdp_growth *growth, const fcdp_phys *pages,
                             bool *stuck_out) {
    size_t n_done = 0, n_mapped = 0;
    fcdp_status status = FCDP_OK;
    fcdp_block *block = growth->first;
    for (;; block = block->after) {
        n_mapped = 0;
        if (block->unmapped) status = hole_map(heap, block, pages + n_done, &n_mapped);
        if (status) break;
        n_done += n_mapped;
        if (block == growth->last) return FCDP_OK;
    }
    char text[512];
    snprintf(text, sizeof text, "%s", fcdp_error_text());
    pages_leave(heap, growth->n_pages - n_done - n_mapped, pages + n_done + n_mapped);
    *stuck_out = !hole_unmap(heap, block, n_mapped);
    while (block != growth->first) {
        block = block->before;
        if (block->unmapped && !hole_unmap(heap, block, block->bytes / heap->page_bytes)) *stuck_out = true;
    }
    return fcdp__fail(status, "%s", text);
}

fcdp_status fcdp__heap_map(heap_arena *arena, const fcdp_growth *growth, bool *stuck_out) {
    fcdp_phys *pages = malloc((growth->n_pages + 1) * sizeof *pages);
    if (!pages) return fcdp__fail(FCDP_ERR_SYSTEM, "no host memory for %zu pages", growth->n_pages);
    fcdp_status status = pages_find(arena, growth->n_pages, growth->bytes, pages);
    if (!status) status = holes_map(arena->heap, growth, pages, stuck_out);
    free(pages);
    return status;
}

/* ---- blocks that other streams still use ---- */

static heap_event *event_take(fcdp_heap *heap) {
    fcdp__lock_acquire(&heap->lock);
    heap_event *event = heap->idle_events;
    if (event) heap->idle_events = event->next;
    fcdp__lock_release(&heap->lock);
    if (event) return event;
    event = calloc(1, sizeof *event);
    if (event && fcdp__driver_event_create(heap->drv, &event->event)) {
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
static void use_mark(fcdp_heap *heap, fcdp_stream stream, heap_uses *uses) {
    heap_event *event = event_take(heap);
    if (event && !fcdp__driver_event_record(heap->drv, event->event, stream)) {
        event->next = uses->events;
        uses->events = event;
        return;
    }
    if (event) event_give(heap, event);
    fcdp_status status = fcdp__driver_stream_sync(heap->drv, stream);
    if (status) status = fcdp__driver_stream_sync(heap->drv, stream);
    if (status)
        fcdp__log(FCDP_LOG_WARN, "a stream that used freed memory cannot be waited for: %s",
                  fcdp_error_text());
}

/* ---- quarantine ---- */

bool fcdp__heap_quarantines(const heap_arena *arena, const fcdp_block *block) {
    size_t page_bytes = arena->heap->page_bytes;
    return arena->heap->quarantine_bytes && !arena->private && block->address % page_bytes == 0 &&
           block->bytes % page_bytes == 0;
}

/* The oldest beyond what is kept; NULL: none is. */
static heap_grave *grave_open(fcdp_heap *heap) {
    fcdp__lock_acquire(&heap->lock);
    heap_grave *oldest = heap->buried_bytes > heap->quarantine_bytes ? heap->graves : NULL;
    if (oldest) {
        heap->buried_bytes -= oldest->block->bytes;
        heap->graves = oldest->next;
        if (!heap->graves) heap->graves_end = &heap->graves;
    }
    fcdp__lock_release(&heap->lock);
    return oldest;
}

static void grave_close(fcdp_heap *heap, heap_grave *grave) {
    fcdp__lock_acquire(&heap->lock);
    grave->next = NULL;
    *heap->graves_end = grave;
    heap->graves_end = &grave->next;
    heap->buried_bytes += grave->block->bytes;
    fcdp__lock_release(&heap->lock);
}

/* Nobody uses the block any more. False: it could not be unmapped. */
static bool block_bury(heap_arena *arena, fcdp_block *block) {
    fcdp_heap *heap = arena->heap;
    size_t n = block->bytes / heap->page_bytes;
    heap_grave *grave = malloc(sizeof *grave);
    fcdp_phys *pages = malloc(n * sizeof *pages);
    bool buried = grave && pages && block_unmap(heap, block, pages);
    if (buried) {
        *grave = (heap_grave){.arena = arena, .block = block};
        fcdp__lock_acquire(&arena->lock);
        fcdp__arena_quarantine(arena->blocks, block);
        fcdp__lock_release(&arena->lock);
        pages_leave(heap, n, pages);
        grave_close(heap, grave);
    } else {
        free(grave);
    }
    free(pages);
    return buried;
}

static void graves_level(fcdp_heap *heap) {
    for (heap_grave *grave = grave_open(heap); grave; grave = grave_open(heap)) {
        fcdp__lock_acquire(&grave->arena->lock);
        fcdp__arena_unquarantine(grave->arena->blocks, grave->block);
        fcdp__lock_release(&grave->arena->lock);
        free(grave);
    }
}

static void block_give(heap_arena *arena, fcdp_block *block, bool spared) {
    if (!spared && fcdp__heap_quarantines(arena, block) && block_bury(arena, block)) {
        graves_level(arena->heap);
        return;
    }
    fcdp__lock_acquire(&arena->lock);
    fcdp__arena_give(arena->blocks, block);
    fcdp__lock_release(&arena->lock);
}

/* ---- what is held ---- */

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
    if (wait) return event_await(heap, event) || device_await(heap);
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
    while (held->n > 0) use_mark(heap, held->streams[--held->n], held);
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
    while (heap->graves) {
        heap_grave *grave = heap->graves;
        heap->graves = grave->next;
        free(grave);
    }
    while (heap->idle_events) {
        heap_event *event = heap->idle_events;
        heap->idle_events = event->next;
        fcdp__driver_event_destroy(heap->drv, event->event);
        free(event);
    }
}
