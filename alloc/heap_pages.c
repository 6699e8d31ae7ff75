/* heap_pages.c - where the pages of a miss come from: the order of pressure, and what the heap gives back to the pool. */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "alloc/heap_internal.h"

enum { MAX_VACATED = 64 }; /* blocks vacated at a time */

/* ---- quiescent pages ---- */

/* Cold pages of one arena, at most `n`, in one go. */
static size_t arena_collect(heap_arena *arena, size_t n, fcdp_phys *pages_out) {
    fcdp_block *blocks[MAX_VACATED];
    bool gone[MAX_VACATED];
    size_t n_pages = 0, n_blocks = 0;
    fcdp__lock_acquire(&arena->lock);
    if (!fcdp__heap_is_pinned(arena)) { /* a pool that begins again mallocs under this lock */
        fcdp__arena_flush(arena->blocks);
        n_blocks = fcdp__arena_vacate_begin(arena->blocks, arena->quiescent_clock, n, blocks, MAX_VACATED);
    }
    fcdp__lock_release(&arena->lock);
    for (size_t i = 0; i < n_blocks; i++) {
        gone[i] = fcdp__heap_block_unmap(arena->heap, blocks[i], pages_out + n_pages);
        if (gone[i]) n_pages += blocks[i]->bytes / arena->heap->page_bytes;
    }
    if (n_blocks == 0) return 0;
    fcdp__lock_acquire(&arena->lock);
    for (size_t i = 0; i < n_blocks; i++) {
        if (gone[i])
            fcdp__arena_vacate_commit(arena->blocks, blocks[i]);
        else
            fcdp__arena_vacate_abort(arena->blocks, blocks[i]);
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

void fcdp__heap_pages_give(fcdp_heap *heap, size_t n, const fcdp_phys *pages) {
    if (n == 0) return;
    fcdp__heap_pages_remove(heap, n);
    fcdp__pool_give(heap->pool, FCDP_HOLDER_TENSORS, n, pages);
    atomic_fetch_add_explicit(&heap->n_returns, 1, memory_order_relaxed);
}

static size_t reclaim(fcdp_heap *heap, size_t n_pages, bool waits) {
    fcdp_phys *pages = malloc(n_pages * sizeof *pages);
    size_t n_given = 0;
    bool waited = false;
    if (!pages) return 0;
    fcdp__heap_poll(heap);
    for (;;) {
        fcdp__heap_quiesce(heap);
        size_t n = all_collect(heap, n_pages - n_given, pages);
        fcdp__heap_pages_give(heap, n, pages); /* nobody else should lack them while this thread waits */
        n_given += n;
        if (!waits || n_given >= n_pages || !fcdp__heap_await(heap, waited)) break;
        waited = true;
    }
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
    (void)fcdp__heap_await(heap, true);
    for (size_t n = 1; n > 0;) {
        n = all_collect(heap, AT_ONCE, pages);
        fcdp__heap_pages_give(heap, n, pages);
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
        fcdp__heap_quiesce(heap);
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
        fcdp__heap_pages_give(heap, n_got, pages_out); /* nobody else should lack them while this thread waits */
        if (status != FCDP_PENDING) return status;
        if (!fcdp__heap_await(heap, attempt_out->waited) && !fcdp__heap_end_dead_pools(heap)) return status;
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