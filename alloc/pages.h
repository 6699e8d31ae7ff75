/* pages.h - one pool of physical device pages with one budget, for everything that maps device memory.
 *
 * Handles are pooled: a page given back is cached, not released (release costs 23 us, create 8-193 us). The
 * pool does not know what lies on a page. Under pressure it asks its reclaimers, which its users register.
 *
 *     created = live + cached <= budget / page_bytes (under a smaller budget: once as many are given back)
 *     live = sum over holders of held
 *     peak_live, peak_held: the maximum over time of live, of held
 *
 * All functions may be called from any thread.
 */
#ifndef FCDP_PAGES_H
#define FCDP_PAGES_H

#include "alloc/driver.h"

typedef struct fcdp_pool fcdp_pool;

/* Give back at least `n_pages` to the pool if you can (by fcdp__pool_give). Called on the thread that is in
 * fcdp__pool_take, without the pool's lock, perhaps on several threads at once. Returns the pages given back;
 * 0: nothing left to reclaim. It must not take pages. */
typedef size_t (*fcdp_reclaim_fn)(void *ctx, size_t n_pages);

/* The holder of pages, for counts and messages alone: any page serves any holder. Each kind of user has an id
 * of its own, below FCDP_N_HOLDERS. */
typedef unsigned fcdp_holder;
enum { FCDP_N_HOLDERS = 2 };
/* How messages describe a holder. Static strings. */
typedef struct fcdp_holder_words {
    const char *name;   /* of what lies on its pages, e.g. "tensors" */
    const char *advice; /* how its user can make do with fewer pages */
} fcdp_holder_words;

typedef struct fcdp_pool_stats {
    size_t page_bytes, budget_bytes;
    size_t live_pages, cached_pages, peak_live_pages;
    size_t held_pages[FCDP_N_HOLDERS], peak_held_pages[FCDP_N_HOLDERS];
    size_t n_creates, n_reclaims; /* driver creates; times a reclaimer was asked */
} fcdp_pool_stats;

/* budget_bytes 0: the device memory free right now. */
fcdp_status fcdp__pool_create(fcdp_driver *drv, size_t budget_bytes, fcdp_pool **pool_out) FCDP_MUST_CHECK;
/* The budget is what is free right now but `headroom_bytes`, or an eighth of the device where that is less:
 * libraries take device memory late, and not from the pool (NCCL as it connects, cuBLAS, lazily loaded
 * kernels). */
fcdp_status fcdp__pool_create_with_headroom(fcdp_driver *drv, size_t headroom_bytes,
                                            fcdp_pool **pool_out) FCDP_MUST_CHECK;
/* Every page must have come back. Releases all handles. */
void fcdp__pool_destroy(fcdp_pool *pool);
/* Set the holder's words in messages. `words` stays the caller's and must live as long as the pool. */
void fcdp__pool_set_holder(fcdp_pool *pool, fcdp_holder holder, const fcdp_holder_words *words);
/* In the order in which they are asked: what costs least to give back comes first. */
typedef enum fcdp_reclaimer {
    FCDP_RECLAIM_CACHES,  /* at once */
    FCDP_RECLAIM_SCRATCH, /* contents that are being copied elsewhere: it waits for that */
    FCDP_RECLAIM_EVICT,   /* contents that are stored elsewhere, or are to be stored first */
    FCDP_RECLAIM_WAITING, /* caches again, waiting for the device where that helps */
    /* Another allocator of this process: it gives what it does not use to the driver, not
     * to the pool. Asked at most once in a take, and only where the budget has room, the
     * driver none, and the others had nothing. */
    FCDP_RECLAIM_NEIGHBOUR,
    FCDP_N_RECLAIMERS
} fcdp_reclaimer;
/* How many of the taken pages are idle: they hold nothing that is missed, and the reclaimer would give them
 * back. Called without the pool's lock. */
typedef size_t (*fcdp_idle_fn)(void *ctx);
/* `reclaim` NULL removes the reclaimer. `idle` NULL: none of its pages are idle. Returns when no call of the
 * previous one is under way, so it must not be called from within one. */
void fcdp__pool_set_reclaimer(fcdp_pool *pool, fcdp_reclaimer which, fcdp_reclaim_fn reclaim,
                              fcdp_idle_fn idle, void *ctx);
/* Live pages less the idle ones; what policy calls device use. */
size_t fcdp__pool_pages_in_use(fcdp_pool *pool);

/* What the pool could hold now: its budget, or less where others have filled the device since. */
size_t fcdp__pool_room_bytes(fcdp_pool *pool);

/* `n` pages of page_bytes each, all or none. Order: cached pages, new handles while the budget and the
 * driver allow, then the reclaimers until they give nothing more, then PyTorch's own allocator.
 * FCDP_ERR_NO_DEVICE_MEM has a text that lists the memory of each holder. */
fcdp_status fcdp__pool_take(fcdp_pool *pool, fcdp_holder holder, size_t n,
                            fcdp_phys *pages_out) FCDP_MUST_CHECK;
/* The same for a holder that has other sources of pages. FCDP_PENDING: there are none, without a text and
 * without an out-of-memory event in the trace: a holder that gives up calls fcdp__pool_trace_oom. */
fcdp_status fcdp__pool_seek(fcdp_pool *pool, fcdp_holder holder, size_t n,
                            fcdp_phys *pages_out) FCDP_MUST_CHECK;
void fcdp__pool_trace_oom(fcdp_pool *pool, size_t bytes);
/* As many as there are without the reclaimers, at most `n`. */
fcdp_status fcdp__pool_take_some(fcdp_pool *pool, fcdp_holder holder, size_t n, fcdp_phys *pages_out,
                                 size_t *n_taken_out) FCDP_MUST_CHECK;
/* Pages that the budget allows to be taken without a reclaimer; and the budget. */
size_t fcdp__pool_spare_pages(fcdp_pool *pool, size_t *n_budget_out);
void fcdp__pool_give(fcdp_pool *pool, fcdp_holder holder, size_t n, const fcdp_phys *pages);
/* `n` pages under one new handle, which one map call takes whole: for what stays mapped long. Idle pages
 * above the budget are released for it. Order and failures as for fcdp__pool_take. */
fcdp_status fcdp__pool_take_handle(fcdp_pool *pool, fcdp_holder holder, size_t n,
                                   fcdp_phys *handle_out) FCDP_MUST_CHECK;
/* The same, but no reclaimer is asked and no idle page is released. FCDP_PENDING: the budget or the driver
 * does not allow it. */
fcdp_status fcdp__pool_try_handle(fcdp_pool *pool, fcdp_holder holder, size_t n,
                                  fcdp_phys *handle_out) FCDP_MUST_CHECK;
/* Such a handle is released at once, since others may need single pages. */
void fcdp__pool_give_handle(fcdp_pool *pool, fcdp_holder holder, size_t n, fcdp_phys handle);
/* Release the cached handles to the driver; the bytes released. */
size_t fcdp__pool_trim(fcdp_pool *pool);
/* Called when PyTorch's own allocator is about to fail: release about `bytes` of the unused memory of the
 * pool and its reclaimers to the driver. Returns the bytes; 0: there is nothing. Not from within a
 * reclaimer. */
size_t fcdp__pool_yield(fcdp_pool *pool, size_t bytes);
/* Set another budget. Pages in use above it stay, and none are taken until their number is below it. */
fcdp_status fcdp__pool_set_budget(fcdp_pool *pool, size_t budget_bytes) FCDP_MUST_CHECK;
void fcdp__pool_stats(fcdp_pool *pool, fcdp_pool_stats *stats_out);
/* How to get a larger budget, for the text of a failure where it is the limit and not the device. */
const char *fcdp__pool_budget_advice(const fcdp_pool *pool);

/* The holders of the budget's memory and of the device's, for the text of a failure. */
typedef struct fcdp_pool_usage {
    size_t budget_bytes, cached_bytes;
    size_t device_bytes, free_bytes; /* the device's; 0: the driver does not tell */
    size_t others_bytes;             /* used on the device, but not from this pool */
    char budget_text[256], device_text[128];
} fcdp_pool_usage;
void fcdp__pool_usage(fcdp_pool *pool, fcdp_pool_usage *usage_out);
/* Asks the driver how full the device is, and writes it to the trace. */
void fcdp__pool_trace_device(fcdp_pool *pool);
/* What the driver has page-locked, to the trace. Cheap. */
void fcdp__pool_trace_pins(const fcdp_pool *pool);
/* Of the holder, and of all pages. */
void fcdp__pool_reset_peak(fcdp_pool *pool, fcdp_holder holder);

#endif
