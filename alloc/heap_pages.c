/* heap_pages.c - where the pages of a miss come from: the order of pressure, and
 * what the heap gives back to the pool. */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "alloc/heap_internal.h"

enum { MAX_VACATED = 64 }; /* blocks vacated at a time */

/* ---- quiescent pages ---- */

/* A vacated block's pages: single ones to `pages_out`; a larger handle to the
 * pool, where it is room for single ones. */
static bool block_collect(heap_arena *arena, const fcdp_block *block, fcdp_phys *pages_out, size_t *n_out) {
    fcdp_phys handle;
    size_t n = block->bytes / arena->heap->page_bytes;
    bool as_one = fcdp__arena_is_joined(arena->blocks, block);
    if (!fcdp__heap_block_unmap(arena->heap, block, as_one, as_one ? &handle : pages_out)) return false;
    if (as_one) fcdp__heap_pages_give(arena->heap, n, &handle, n);
    *n_out += as_one ? 0 : n;
    return true;
}

/* Quiescent pages of one arena in one go, at most `n_wanted` of them to `pages_out`. Returns how many there
 * were, with those that the pool got. */
static size_t arena_collect(heap_arena *arena, size_t n_wanted, fcdp_phys *pages_out, size_t *n_out) {
    fcdp_block *blocks[MAX_VACATED];
    bool gone[MAX_VACATED];
    size_t n_blocks = 0, n_pages = 0;
    *n_out = 0;
    fcdp__lock_acquire(&arena->lock);
    if (!fcdp__heap_is_pinned(arena)) { /* a pool that begins again mallocs under this lock */
        fcdp__arena_flush(arena->blocks);
        n_blocks = fcdp__arena_vacate_begin(arena->blocks, arena->quiescent_clock, n_wanted, blocks,
                                            MAX_VACATED);
    }
    fcdp__lock_release(&arena->lock);
    if (n_blocks == 0) return 0;
    for (size_t i = 0; i < n_blocks; i++) {
        gone[i] = block_collect(arena, blocks[i], pages_out + *n_out, n_out);
        n_pages += gone[i] ? blocks[i]->bytes / arena->heap->page_bytes : 0;
    }
    fcdp__lock_acquire(&arena->lock);
    for (size_t i = 0; i < n_blocks; i++)
        gone[i] ? fcdp__arena_vacate_commit(arena->blocks, blocks[i])
                : fcdp__arena_vacate_abort(arena->blocks, blocks[i]);
    fcdp__lock_release(&arena->lock);
    return n_pages;
}

/* To the pool, at least `n_wanted` if there are as many; `room` for so many. */
static size_t all_give(fcdp_heap *heap, size_t n_wanted, fcdp_phys *room) {
    heap_arena *arenas[2 * HEAP_MAX_STREAMS];
    size_t n_arenas = fcdp__heap_arenas(heap, arenas), n_given = 0, n, n_in_hand;
    for (size_t i = 0; i < n_arenas; i++) {
        while (n_given < n_wanted &&
               (n = arena_collect(arenas[i], n_wanted - n_given, room, &n_in_hand)) > 0) {
            fcdp__heap_pages_give(heap, n_in_hand, room, 1);
            n_given += n;
        }
    }
    return n_given;
}

static size_t reclaim(fcdp_heap *heap, size_t n_pages, bool waits) {
    fcdp_phys *room = malloc(n_pages * sizeof *room);
    size_t n_given = 0;
    bool waited = false;
    if (!room) return 0;
    fcdp__heap_poll(heap);
    for (;;) {
        fcdp__heap_quiesce(heap);
        n_given += all_give(heap, n_pages - n_given, room);
        if (!waits || n_given >= n_pages || !fcdp__heap_await(heap, waited)) break;
        waited = true;
    }
    free(room);
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
    fcdp_phys *room = malloc(AT_ONCE * sizeof *room);
    if (!room) return fcdp__fail(FCDP_ERR_SYSTEM, "no host memory");
    (void)fcdp__heap_privates_end_dead(heap);
    (void)fcdp__heap_await(heap, true);
    while (all_give(heap, AT_ONCE, room) > 0) {
    }
    free(room);
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

const fcdp_holder_words fcdp__heap_words = {"tensors",
                                            "use a smaller batch, activation checkpointing, or more ranks"};

/* Sizes of live blocks say what to look for: a few large activations, or many small tensors. */
static fcdp_status out_of_memory(fcdp_heap *heap, size_t bytes, size_t n_missing) {
    const size_t mib = 1 << 20;
    holdings h = {{0}, 0, 0};
    fcdp_pool_usage usage;
    size_t at = 0;
    char tensors[160];
    atomic_fetch_add_explicit(&heap->n_ooms, 1, memory_order_relaxed);
    fcdp_heap_walk(heap, holdings_see, &h);
    fcdp__pool_usage(heap->pool, &usage);
    for (int i = 0; i < N_CLASSES; i++)
        at += (size_t)snprintf(tensors + at, sizeof tensors - at, "%s%zu MiB %s", i ? ", " : "",
                               h.live[i] / mib, class_name[i]);
    const char *advice = fcdp__heap_words.advice;
    if (usage.others_bytes > bytes)
        advice =
            "end the other processes on this device, or set FCDP_DEVICE_BUDGET to what is left for this one";
    else if (fcdp__heap_is_capturing(heap))
        advice = "a graph is being captured, so that nothing can be waited for";
    else if (usage.budget_bytes + bytes <= usage.device_bytes - usage.others_bytes)
        advice = "the budget is the limit, not the device: raise FCDP_DEVICE_BUDGET";
    return fcdp__fail(FCDP_ERR_NO_DEVICE_MEM,
                      "no device memory for %zu bytes: %zu pages of %zu KiB are missing; %s; live tensors by "
                      "size: %s; freed tensors: %zu MiB, of which %zu MiB wait for other streams; %s; %s",
                      bytes, n_missing, heap->page_bytes >> 10, usage.budget_text, tensors,
                      (h.cached + h.held) / mib, h.held / mib, usage.device_text, advice);
}

/* Pages in hand, of those wanted. */
typedef struct hand {
    fcdp_phys *pages;
    size_t n, n_wanted;
} hand;

static void hand_got(fcdp_heap *heap, hand *h, size_t n) {
    h->n += n;
    fcdp__heap_pages_add(heap, n);
    atomic_fetch_add_explicit(&heap->n_taken, n, memory_order_relaxed);
}

/* What the pool has, or may create, without asking anybody. */
static fcdp_status hand_from_pool(fcdp_heap *heap, hand *h) {
    size_t n;
    fcdp_status status = fcdp__pool_take_some(heap->pool, FCDP_HOLDER_TENSORS, h->n_wanted - h->n,
                                              h->pages + h->n, &n);
    hand_got(heap, h, n);
    return status;
}

/* What others hold: the rest, or FCDP_PENDING. Not in a capture, since a region that
 * must be stored first is waited for. */
static fcdp_status hand_from_others(fcdp_heap *heap, hand *h) {
    if (fcdp__heap_is_capturing(heap)) return FCDP_PENDING;
    size_t n = h->n_wanted - h->n;
    fcdp_status status = fcdp__pool_take(heap->pool, FCDP_HOLDER_TENSORS, n, h->pages + h->n);
    if (!status) hand_got(heap, h, n);
    return status == FCDP_ERR_NO_DEVICE_MEM ? FCDP_PENDING : status;
}

/* What of the arena is quiescent, until the hand is full. */
static fcdp_status hand_from_arena(heap_arena *arena, hand *h) {
    fcdp_heap *heap = arena->heap;
    fcdp_status status = FCDP_OK;
    while (!status && h->n < h->n_wanted) {
        size_t n, n_all = arena_collect(arena, h->n_wanted - h->n, h->pages + h->n, &n);
        if (n_all == 0) break;
        h->n += n;
        atomic_fetch_add_explicit(&heap->n_moved, n, memory_order_relaxed);
        if (n_all > n) status = hand_from_pool(heap, h);
    }
    return status;
}

/* The stream's own arena, its other one, those of other streams. */
static fcdp_status hand_from_arenas(heap_arena *arena, hand *h) {
    heap_arena *arenas[2 * HEAP_MAX_STREAMS];
    size_t n = fcdp__heap_arenas(arena->heap, arenas);
    fcdp__heap_quiesce(arena->heap);
    fcdp_status status = hand_from_arena(arena, h);
    if (!status) status = hand_from_arena(arena->sibling, h);
    for (size_t i = 0; i < n && !status; i++) status = hand_from_arena(arenas[i], h);
    return status;
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
        hand h = {pages_out, 0, n};
        fcdp_status status = hand_from_pool(heap, &h);
        if (!status && h.n < n) status = hand_from_arenas(arena, &h);
        if (!status && h.n < n) status = hand_from_others(heap, &h);
        if (!status && h.n == n) return FCDP_OK;
        attempt_out->n_missing = n - h.n;
        attempt_out->n_returns += h.n > 0;
        /* nobody else should lack them while this thread waits */
        fcdp__heap_pages_give(heap, h.n, pages_out, 1);
        if (status != FCDP_PENDING) return status;
        if (!fcdp__heap_await(heap, attempt_out->waited) && !fcdp__heap_privates_end_dead(heap))
            return status;
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

fcdp_status fcdp__heap_pages_find(heap_arena *arena, size_t n, size_t bytes, fcdp_phys *pages_out) {
    atomic_fetch_add_explicit(&arena->heap->n_seeking, 1, memory_order_relaxed);
    fcdp_status status = pages_seek(arena, n, bytes, pages_out);
    atomic_fetch_sub_explicit(&arena->heap->n_seeking, 1, memory_order_relaxed);
    return status;
}

/* ---- where memory is not short ---- */

/* Large handles cost few driver calls, but move only as a whole. So while half of the budget
 * is spare a handle is half as large as what the arena has mapped, or as large as the block,
 * and at most a sixth of what is spare. */
size_t fcdp__heap_handle_pages(heap_arena *arena, size_t bytes) {
    enum { MAX_PAGES = 64, SPARE_FOR_ONE = 6 };
    const fcdp_heap *heap = arena->heap;
    size_t n_budget, n_spare = fcdp__pool_spare_pages(heap->pool, &n_budget),
                     n_most = n_spare / SPARE_FOR_ONE;
    if (heap->quarantine_bytes || n_spare < n_budget - n_spare) return 0;
    fcdp__lock_acquire(&arena->lock);
    size_t n = fcdp__heap_mapped_bytes(arena) / heap->page_bytes / 2;
    fcdp__lock_release(&arena->lock);
    size_t n_block = fcdp__round_up(bytes, heap->page_bytes) / heap->page_bytes;
    if (n < n_block) n = n_block;
    if (n_most > MAX_PAGES) n_most = MAX_PAGES;
    return n < n_most ? n : n_most;
}

fcdp_status fcdp__heap_handles_find(fcdp_heap *heap, const fcdp_growth *growth, size_t n_each,
                                    fcdp_phys *pages_out) {
    fcdp_status status = FCDP_OK;
    size_t n_done = 0;
    for (const fcdp_block *block = growth->first; !status; block = block->after) {
        size_t n = block->unmapped ? block->bytes / heap->page_bytes : 0;
        for (size_t i = 0; i < n && !status; i += n_each) {
            size_t n_here = n_each < n - i ? n_each : n - i;
            status = fcdp__pool_try_handle(heap->pool, FCDP_HOLDER_TENSORS, n_here, &pages_out[n_done]);
            for (size_t k = 1; k < n_here && !status; k++) pages_out[n_done + k] = pages_out[n_done];
            if (!status) n_done += n_here;
        }
        if (block == growth->last) break;
    }
    fcdp__heap_pages_add(heap, n_done);
    if (!status) {
        atomic_fetch_add_explicit(&heap->n_taken, n_done, memory_order_relaxed);
        return FCDP_OK;
    }
    for (const fcdp_block *block = growth->first; n_done > 0; block = block->after) {
        size_t n = block->unmapped ? block->bytes / heap->page_bytes : 0;
        if (n > n_done) n = n_done;
        fcdp__heap_pages_give(heap, n, pages_out, n_each);
        pages_out += n;
        n_done -= n;
    }
    return status;
}
