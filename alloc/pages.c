/* pages.c - the pool of physical pages: the accounting of one budget, a stack of idle handles, and whom to ask for more.
 *
 * Maps nothing and knows no region. The lock guards counts and the stack alone: driver calls and the reclaimer run
 * without it, so a take that creates or evicts does not hold up a give.
 */
#include "alloc/pages.h"

#include <stdlib.h>
#include <string.h>

/* A take first promises itself its pages in the counts, then creates what the stack lacks and pushes it there as reserved,
 * and at the end pops all of its pages at once. So a handle is always live or on the stack, and two takes never count
 * the same page or the same budget twice:
 *
 *     n_created = n_live + n_cached                    n_created + (n_promised - n_reserved) <= n_budget
 *     n_live + n_promised <= n_budget                  n_reserved <= n_cached, n_reserved <= n_promised
 */
struct fcdp_pool {
    fcdp_driver *drv;
    size_t page_bytes, budget_bytes, n_budget;
    fcdp_lock lock;
    /* under lock */
    fcdp_reclaim_fn reclaim;
    void *reclaim_ctx;
    size_t n_created, n_live, n_peak;
    size_t n_cached;   /* handles on the stack, the reserved ones among them */
    size_t n_promised; /* pages that takes in progress will make live */
    size_t n_reserved; /* of n_cached: for takes in progress */
    size_t n_given;    /* pages ever given back: what the reclaimer really achieved */
    size_t n_driver_creates, n_reclaims;
    fcdp_phys *stack; /* room for n_budget */
};

static bool pool_is_valid(const fcdp_pool *pool)
{
    return pool->n_created == pool->n_live + pool->n_cached && pool->n_reserved <= pool->n_cached &&
           pool->n_reserved <= pool->n_promised && pool->n_live + pool->n_promised <= pool->n_budget &&
           pool->n_created + (pool->n_promised - pool->n_reserved) <= pool->n_budget && pool->n_live <= pool->n_peak;
}

static bool stack_holds(const fcdp_pool *pool, fcdp_phys page)
{
    for (size_t i = 0; i < pool->n_cached; i++)
        if (pool->stack[i].handle == page.handle) return true;
    return false;
}

static void pool_leave(fcdp_pool *pool)
{
    FCDP_CHECK(3, pool_is_valid(pool));
    fcdp__lock_release(&pool->lock);
}

fcdp_status fcdp__pool_create(fcdp_driver *drv, size_t budget_bytes, fcdp_pool **pool_out)
{
    size_t total_bytes, page_bytes = fcdp__driver_page_bytes(drv);
    fcdp_status status = FCDP_OK;
    if (!budget_bytes) status = fcdp__driver_mem_info(drv, &budget_bytes, &total_bytes);
    if (status) return status;
    if (budget_bytes < page_bytes)
        return fcdp__fail(FCDP_ERR_NO_DEVICE_MEM, "a device budget of %zu bytes is less than one page of %zu bytes; raise "
                          "FCDP_DEVICE_BUDGET or free device memory", budget_bytes, page_bytes);

    fcdp_pool *pool = calloc(1, sizeof *pool);
    fcdp_phys *stack = calloc(budget_bytes / page_bytes, sizeof *stack);
    if (!pool || !stack) {
        free(pool);
        free(stack);
        return fcdp__fail(FCDP_ERR_NO_HOST_MEM, "no host memory for the list of %zu device pages", budget_bytes / page_bytes);
    }
    *pool = (fcdp_pool){.drv = drv, .page_bytes = page_bytes, .budget_bytes = budget_bytes,
                        .n_budget = budget_bytes / page_bytes, .stack = stack};
    fcdp__lock_init(&pool->lock, FCDP_RANK_POOL);
    *pool_out = pool;
    return FCDP_OK;
}

/* A second try: what fails once at a release (a driver busy, an injected fault) must not lose a page for good. */
static fcdp_status page_release(fcdp_pool *pool, fcdp_phys page)
{
    fcdp_status status = fcdp__driver_phys_release(pool->drv, page);
    if (status) status = fcdp__driver_phys_release(pool->drv, page);
    if (status) fcdp__log(FCDP_LOG_WARN, "a device page of %zu bytes is lost: %s", pool->page_bytes, fcdp_error_text());
    return status;
}

void fcdp__pool_destroy(fcdp_pool *pool)
{
    if (!pool) return;
    FCDP_CHECK(1, pool->n_live == 0 && pool->n_promised == 0);
    (void)fcdp__pool_trim(pool);
    fcdp__lock_destroy(&pool->lock);
    free(pool->stack);
    free(pool);
}

void fcdp__pool_set_reclaimer(fcdp_pool *pool, fcdp_reclaim_fn reclaim, void *ctx)
{
    fcdp__lock_acquire(&pool->lock);
    pool->reclaim = reclaim;
    pool->reclaim_ctx = ctx;
    pool_leave(pool);
}

/* ---- take ------------------------------------------------------------------------------------------------------ */

/* A take in progress: of its n pages, n_reserved lie on the stack for it. */
typedef struct promise {
    size_t n, n_reserved;
} promise;

/* Under lock: promise `n` pages if the budget allows, else false with the pages that are missing. */
static bool promise_make(fcdp_pool *pool, size_t n, promise *promise_out, size_t *n_missing_out)
{
    size_t n_spoken_for = pool->n_live + pool->n_promised;
    if (n_spoken_for + n > pool->n_budget) {
        *n_missing_out = n_spoken_for + n - pool->n_budget;
        return false;
    }
    size_t n_idle = pool->n_cached - pool->n_reserved;
    *promise_out = (promise){n, n < n_idle ? n : n_idle};
    pool->n_promised += n;
    pool->n_reserved += promise_out->n_reserved;
    return true;
}

/* Under lock: give up the promise; what was reserved or created for it is idle on the stack. */
static void promise_break(fcdp_pool *pool, const promise *mine)
{
    pool->n_promised -= mine->n;
    pool->n_reserved -= mine->n_reserved;
}

/* Under lock: all pages are reserved; pop them. */
static void promise_keep(fcdp_pool *pool, const promise *mine, fcdp_phys *pages_out)
{
    promise_break(pool, mine);
    pool->n_cached -= mine->n;
    pool->n_live += mine->n;
    if (pool->n_live > pool->n_peak) pool->n_peak = pool->n_live;
    memcpy(pages_out, pool->stack + pool->n_cached, mine->n * sizeof *pages_out);
}

/* Create one handle for the promise, without the lock during the driver's call. */
static fcdp_status promise_create_one(fcdp_pool *pool, promise *mine)
{
    fcdp_phys page;
    fcdp_status status = fcdp__driver_phys_create(pool->drv, pool->page_bytes, &page);
    if (status) return status;
    fcdp__lock_acquire(&pool->lock);
    pool->stack[pool->n_cached++] = page;
    pool->n_created++;
    pool->n_driver_creates++;
    pool->n_reserved++;
    mine->n_reserved++;
    pool_leave(pool);
    return FCDP_OK;
}

/* One attempt without the reclaimer. FCDP_PENDING: `n_missing_out` pages must come back first, because the budget is spent
 * or the device itself is full (`driver_full_out`). */
static fcdp_status take_try(fcdp_pool *pool, size_t n, fcdp_phys *pages_out, size_t *n_missing_out, bool *driver_full_out)
{
    promise mine;
    *driver_full_out = false;
    fcdp__lock_acquire(&pool->lock);
    bool promised = promise_make(pool, n, &mine, n_missing_out);
    pool_leave(pool);
    if (!promised) return FCDP_PENDING;

    fcdp_status status = FCDP_OK;
    while (!status && mine.n_reserved < mine.n) status = promise_create_one(pool, &mine);
    fcdp__lock_acquire(&pool->lock);
    if (!status) promise_keep(pool, &mine, pages_out);
    else promise_break(pool, &mine);
    pool_leave(pool);
    if (status != FCDP_ERR_NO_DEVICE_MEM) return status;
    *n_missing_out = mine.n - mine.n_reserved;
    *driver_full_out = true;
    return FCDP_PENDING;
}

/* Ask the reclaimer for `n` pages. True when pages did come back. */
static bool take_reclaim(fcdp_pool *pool, size_t n)
{
    fcdp__lock_acquire(&pool->lock);
    fcdp_reclaim_fn reclaim = pool->reclaim;
    void *ctx = pool->reclaim_ctx;
    size_t n_given = pool->n_given;
    if (reclaim) pool->n_reclaims++;
    pool_leave(pool);
    if (!reclaim || reclaim(ctx, n) == 0) return false;

    fcdp__lock_acquire(&pool->lock);
    bool progress = pool->n_given != n_given; /* its word is not enough: a take must end */
    pool_leave(pool);
    return progress;
}

static fcdp_status take_failed(fcdp_pool *pool, size_t n, bool driver_full)
{
    const size_t mib = 1 << 20;
    size_t free_bytes = 0, total_bytes = 0;
    fcdp_pool_stats stats;
    fcdp__pool_stats(pool, &stats);
    if (fcdp__driver_mem_info(pool->drv, &free_bytes, &total_bytes)) total_bytes = 0;
    const char *advice = "use smaller groups or a smaller FCDP_TAU";
    if (driver_full) advice = "other allocations fill the device: use a smaller batch or a smaller FCDP_TAU, or set FCDP_DEVICE_BUDGET "
                              "to what is left for FCDP";
    else if (total_bytes && free_bytes + stats.cached_pages * stats.page_bytes >= n * stats.page_bytes)
        advice = "the budget is the limit, not the device: raise FCDP_DEVICE_BUDGET";
    return fcdp__fail(FCDP_ERR_NO_DEVICE_MEM,
                      "no device memory for %zu MiB of gathered parameters: the budget is %zu MiB, in use %zu MiB and idle in the "
                      "pool %zu MiB, nothing of it can be taken back now; the device has %zu of %zu MiB free; %s",
                      n * stats.page_bytes / mib, stats.budget_bytes / mib, stats.live_pages * stats.page_bytes / mib,
                      stats.cached_pages * stats.page_bytes / mib, free_bytes / mib, total_bytes / mib, advice);
}

fcdp_status fcdp__pool_take(fcdp_pool *pool, size_t n, fcdp_phys *pages_out)
{
    size_t n_missing = 0;
    bool driver_full = false, more = true;
    while (n <= pool->n_budget) {
        fcdp_status status = take_try(pool, n, pages_out, &n_missing, &driver_full);
        if (status != FCDP_PENDING) return status;
        if (!more) break; /* that was the last try: others may have given pages meanwhile */
        more = take_reclaim(pool, n_missing);
    }
    return take_failed(pool, n, driver_full);
}

/* ---- give, trim, stats ----------------------------------------------------------------------------------------- */

void fcdp__pool_give(fcdp_pool *pool, size_t n, const fcdp_phys *pages)
{
    fcdp__lock_acquire(&pool->lock);
    FCDP_CHECK(0, n <= pool->n_live);
    for (size_t i = 0; i < n; i++) {
        FCDP_CHECK(3, !stack_holds(pool, pages[i])); /* given twice */
        pool->stack[pool->n_cached++] = pages[i];
    }
    pool->n_live -= n;
    pool->n_given += n;
    pool_leave(pool);
}

void fcdp__pool_forget(fcdp_pool *pool, size_t n, const fcdp_phys *pages)
{
    fcdp__lock_acquire(&pool->lock);
    FCDP_CHECK(0, n <= pool->n_live);
    pool->n_live -= n;
    pool->n_created -= n;
    pool_leave(pool);
    for (size_t i = 0; i < n; i++) (void)page_release(pool, pages[i]);
}

size_t fcdp__pool_trim(fcdp_pool *pool)
{
    size_t n_released = 0;
    for (;;) {
        fcdp__lock_acquire(&pool->lock);
        bool idle = pool->n_cached > pool->n_reserved;
        fcdp_phys page = idle ? pool->stack[--pool->n_cached] : (fcdp_phys){0};
        pool->n_created -= idle;
        pool_leave(pool);
        if (!idle) return n_released * pool->page_bytes;
        if (!page_release(pool, page)) n_released++;
    }
}

void fcdp__pool_stats(fcdp_pool *pool, fcdp_pool_stats *stats_out)
{
    fcdp__lock_acquire(&pool->lock);
    *stats_out = (fcdp_pool_stats){
        .page_bytes = pool->page_bytes,
        .budget_bytes = pool->budget_bytes,
        .live_pages = pool->n_live,
        .cached_pages = pool->n_cached,
        .peak_live_pages = pool->n_peak,
        .n_creates = pool->n_driver_creates,
        .n_reclaims = pool->n_reclaims,
    };
    pool_leave(pool);
}

void fcdp__pool_reset_peak(fcdp_pool *pool)
{
    fcdp__lock_acquire(&pool->lock);
    pool->n_peak = pool->n_live;
    pool_leave(pool);
}
