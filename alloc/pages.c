/* pages.c - the accounting of the pool: how much of the budget each holder has, and which pages are idle.
 *
 * It maps nothing and does not know what lies on a page. The lock guards counts and the stack alone: driver
 * calls and reclaimers run without it, so a take that creates or evicts does not hold up a give.
 */
#include "alloc/pages.h"

#include "alloc/trace.h"
#include "base/size.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct reclaimer {
    fcdp_reclaim_fn reclaim;
    fcdp_idle_fn idle;
    void *ctx;
    size_t n_inside; /* calls under way */
} reclaimer;

/* A take first promises itself its pages in the counts, then creates what the stack lacks and pushes it there
 * as reserved, and at the end pops all of its pages at once. So a handle is always live or on the stack, and
 * two takes never count the same page or the same budget twice:
 *
 *     n_created = n_live + n_cached = sum of n_held + n_cached
 *     n_reserved <= n_cached, n_reserved <= n_promised
 *     n_created + (n_promised - n_reserved) <= n_room
 *     n_live + n_promised <= n_room
 *
 * n_room is n_budget, unless a smaller budget was set: then promises are made only below the budget, and idle
 * handles above it are released. */
struct fcdp_pool {
    fcdp_driver *drv;
    size_t page_bytes;
    fcdp_lock lock;
    /* under lock */
    size_t budget_bytes, n_budget, n_room; /* n_room: of the stack */
    size_t headroom_bytes;                 /* fixed: what is not in the budget, for others; 0: it was given */
    reclaimer reclaimers[FCDP_N_RECLAIMERS];
    pthread_cond_t left; /* one of them has ended */
    size_t n_created, n_live, n_peak;
    size_t n_held[FCDP_N_HOLDERS], n_peak_held[FCDP_N_HOLDERS];
    size_t n_cached;   /* handles on the stack, the reserved ones among them */
    size_t n_promised; /* pages that takes in progress will make live */
    size_t n_reserved; /* of n_cached: for takes in progress */
    uint64_t
        n_moves; /* gives and ends of takes, ever: whether another attempt to take could end differently */
    size_t n_driver_creates, n_reclaims;
    fcdp_phys *stack;
    fcdp_pool_told told;
    /* not under lock; NULL: the holder has not been named. Partner: fcdp__pool_set_holder */
    _Atomic(const fcdp_holder_words *) words[FCDP_N_HOLDERS];
};

static fcdp_status handle_release(fcdp_pool *pool, fcdp_phys handle, size_t n_pages) {
    fcdp_status status = FCDP_RETRY_ONCE(fcdp__driver_phys_release(pool->drv, handle));
    if (status)
        fcdp__log(FCDP_LOG_WARN, "%s of device memory are lost until the process ends: %s",
                  fcdp__size_text(n_pages * pool->page_bytes).s, fcdp_error_text());
    return status;
}

static bool pool_is_valid(const fcdp_pool *pool) {
    size_t n_held = 0;
    for (fcdp_holder holder = 0; holder < FCDP_N_HOLDERS; holder++) n_held += pool->n_held[holder];
    return n_held == pool->n_live && pool->n_created == pool->n_live + pool->n_cached &&
           pool->n_reserved <= pool->n_cached && pool->n_reserved <= pool->n_promised &&
           pool->n_live + pool->n_promised <= pool->n_room && pool->n_budget <= pool->n_room &&
           pool->n_created + (pool->n_promised - pool->n_reserved) <= pool->n_room &&
           pool->n_live <= pool->n_peak;
}

static bool stack_holds(const fcdp_pool *pool, fcdp_phys page) {
    for (size_t i = 0; i < pool->n_cached; i++)
        if (pool->stack[i].handle == page.handle) return true;
    return false;
}

/* Under lock. */
static fcdp_pool_stats stats_now(const fcdp_pool *pool) {
    fcdp_pool_stats stats = {
        .page_bytes = pool->page_bytes,
        .budget_bytes = pool->budget_bytes,
        .live_pages = pool->n_live,
        .cached_pages = pool->n_cached,
        .peak_live_pages = pool->n_peak,
        .n_creates = pool->n_driver_creates,
        .n_reclaims = pool->n_reclaims,
    };
    memcpy(stats.held_pages, pool->n_held, sizeof pool->n_held);
    memcpy(stats.peak_held_pages, pool->n_peak_held, sizeof pool->n_peak_held);
    return stats;
}

static void pool_leave(fcdp_pool *pool) {
    FCDP_CHECK(3, pool_is_valid(pool));
    if (fcdp__trace_is_on(1)) {
        fcdp_pool_stats now = stats_now(pool);
        fcdp__pool_tell(&pool->told, &now);
    }
    fcdp__lock_release(&pool->lock);
}

fcdp_status fcdp__pool_create(fcdp_driver *drv, size_t budget_bytes, fcdp_pool **pool_out) {
    size_t total_bytes, page_bytes = fcdp__driver_page_bytes(drv);
    fcdp_status status = FCDP_OK;
    if (!budget_bytes) status = fcdp__driver_mem_info(drv, &budget_bytes, &total_bytes);
    if (status) return status;
    if (budget_bytes < page_bytes)
        return fcdp__fail(FCDP_ERR_NO_DEVICE_MEM,
                          "a device budget of %zu bytes is less than one page of %zu bytes; raise "
                          "FCDP_DEVICE_BUDGET or free device memory",
                          budget_bytes, page_bytes);

    fcdp_pool *pool = calloc(1, sizeof *pool);
    fcdp_phys *stack = calloc(budget_bytes / page_bytes, sizeof *stack);
    if (!pool || !stack) {
        free(pool);
        free(stack);
        return fcdp__fail(FCDP_ERR_NO_HOST_MEM, "no host memory for the list of %zu device pages",
                          budget_bytes / page_bytes);
    }
    *pool = (fcdp_pool){.drv = drv,
                        .page_bytes = page_bytes,
                        .budget_bytes = budget_bytes,
                        .n_budget = budget_bytes / page_bytes,
                        .n_room = budget_bytes / page_bytes,
                        .stack = stack,
                        .told = {.pool = fcdp__pool_next_number()}};
    fcdp__lock_init(&pool->lock, FCDP_RANK_POOL);
    pthread_cond_init(&pool->left, NULL);
    *pool_out = pool;
    return FCDP_OK;
}

/* An eighth, so that a small device, or a partition of one, is not mostly headroom. */
enum { HEADROOM_DIVISOR = 8 };

fcdp_status fcdp__pool_create_with_headroom(fcdp_driver *drv, size_t headroom_bytes, fcdp_pool **pool_out) {
    size_t free_bytes, total_bytes;
    fcdp_status status = fcdp__driver_mem_info(drv, &free_bytes, &total_bytes);
    if (status) return status;
    size_t kept_bytes = headroom_bytes < total_bytes / HEADROOM_DIVISOR ? headroom_bytes
                                                                        : total_bytes / HEADROOM_DIVISOR;
    size_t page_bytes = fcdp__driver_page_bytes(drv);
    size_t budget_bytes = free_bytes; /* of less than a page: refused */
    if (free_bytes > page_bytes)
        budget_bytes = free_bytes > kept_bytes + page_bytes ? free_bytes - kept_bytes : page_bytes;
    status = fcdp__pool_create(drv, budget_bytes, pool_out);
    if (status) return status;
    (*pool_out)->headroom_bytes = kept_bytes;
    fcdp__log(FCDP_LOG_INFO,
              "the device has %s free: the budget is %s, and %s are left to others (FCDP_HEADROOM)",
              fcdp__size_text(free_bytes).s, fcdp__size_text(budget_bytes).s, fcdp__size_text(kept_bytes).s);
    return FCDP_OK;
}

fcdp_driver *fcdp__pool_driver(const fcdp_pool *pool) {
    return pool->drv;
}

void fcdp__pool_destroy(fcdp_pool *pool) {
    if (!pool) return;
    FCDP_CHECK(1, pool->n_live == 0 && pool->n_promised == 0);
    (void)fcdp__pool_trim(pool);
    fcdp__pool_tell_end(&pool->told);
    pthread_cond_destroy(&pool->left);
    fcdp__lock_destroy(&pool->lock);
    free(pool->stack);
    free(pool);
}

void fcdp__pool_set_holder(fcdp_pool *pool, fcdp_holder holder, const fcdp_holder_words *words) {
    atomic_store_explicit(&pool->words[holder], words, memory_order_release);
}

void fcdp__pool_set_reclaimer(fcdp_pool *pool, fcdp_reclaimer which, fcdp_reclaim_fn reclaim,
                              fcdp_idle_fn idle, void *ctx) {
    fcdp__lock_acquire(&pool->lock);
    pool->reclaimers[which].reclaim = NULL; /* no thread enters any more */
    pool->reclaimers[which].idle = NULL;
    while (pool->reclaimers[which].n_inside) fcdp__lock_wait(&pool->lock, &pool->left);
    pool->reclaimers[which].reclaim = reclaim;
    pool->reclaimers[which].idle = idle;
    pool->reclaimers[which].ctx = ctx;
    pool_leave(pool);
}

/* ---- take ---- */

/* How often a take starts over because other threads moved pages while its own reclaimer found nothing. */
enum { MAX_LOST_RACES = 64 };

/* A take in progress: of its n pages, n_reserved lie on the stack for it. */
typedef struct promise {
    size_t n, n_reserved;
} promise;

/* Why an attempt failed, and the pool's count of moves at that time. */
typedef struct shortage {
    size_t n_missing;
    uint64_t n_moves;
    bool driver_full; /* the device refused, below the budget */
} shortage;

/* Under lock: give up the promise; what was reserved or created for it is idle on the stack. */
static void promise_break(fcdp_pool *pool, const promise *mine) {
    pool->n_promised -= mine->n;
    pool->n_reserved -= mine->n_reserved;
}

/* Under lock: created pages that are the holder's from here on. */
static void held_join(fcdp_pool *pool, fcdp_holder holder, size_t n) {
    pool->n_live += n;
    if (pool->n_live > pool->n_peak) pool->n_peak = pool->n_live;
    size_t n_held = pool->n_held[holder] += n;
    if (n_held > pool->n_peak_held[holder]) pool->n_peak_held[holder] = n_held;
}

/* Create one handle for the promise, without the lock during the driver's call. */
static fcdp_status promise_create_one(fcdp_pool *pool, promise *mine) {
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

/* One attempt without the reclaimer. FCDP_PENDING: not without pages that come back first. */
static fcdp_status take_try(fcdp_pool *pool, fcdp_holder holder, size_t n, fcdp_phys *pages_out,
                            shortage *shortage_out) {
    fcdp__lock_acquire(&pool->lock);
    size_t n_spoken_for = pool->n_live + pool->n_promised, n_idle = pool->n_cached - pool->n_reserved;
    bool allowed = n <= pool->n_budget && n_spoken_for <= pool->n_budget - n;
    promise mine = {n, n < n_idle ? n : n_idle};
    if (allowed) {
        pool->n_promised += n;
        pool->n_reserved += mine.n_reserved;
    } else {
        *shortage_out = (shortage){n_spoken_for + n - pool->n_budget, pool->n_moves, false};
    }
    pool_leave(pool);
    if (!allowed) return FCDP_PENDING;

    fcdp_status status = FCDP_OK;
    while (!status && mine.n_reserved < mine.n) status = promise_create_one(pool, &mine);
    fcdp__lock_acquire(&pool->lock);
    promise_break(pool, &mine);
    if (!status) { /* all of them are reserved: pop them */
        pool->n_cached -= n;
        held_join(pool, holder, n);
        memcpy(pages_out, pool->stack + pool->n_cached, n * sizeof *pages_out);
    }
    pool->n_moves++;
    *shortage_out = (shortage){mine.n - mine.n_reserved, pool->n_moves, true};
    pool_leave(pool);
    return status == FCDP_ERR_NO_DEVICE_MEM ? FCDP_PENDING : status;
}

/* It stays what it is until reclaimer_leave. */
static reclaimer reclaimer_enter(fcdp_pool *pool, fcdp_reclaimer which) {
    fcdp__lock_acquire(&pool->lock);
    pool->reclaimers[which].n_inside++;
    reclaimer entered = pool->reclaimers[which];
    pool_leave(pool);
    return entered;
}

static void reclaimer_leave(fcdp_pool *pool, fcdp_reclaimer which, bool reclaimed) {
    fcdp__lock_acquire(&pool->lock);
    pool->n_reclaims += reclaimed;
    pool->reclaimers[which].n_inside--;
    pthread_cond_broadcast(&pool->left);
    pool_leave(pool);
}

static size_t reclaimer_ask(fcdp_pool *pool, fcdp_reclaimer which, size_t n_pages,
                            fcdp_pool_shortage *shortage) {
    uint64_t begun_ns = fcdp__trace_start();
    reclaimer entered = reclaimer_enter(pool, which);
    size_t n_back = entered.reclaim ? entered.reclaim(entered.ctx, n_pages) : 0;
    reclaimer_leave(pool, which, entered.reclaim != NULL);
    if (entered.reclaim)
        fcdp__pool_tell_reclaim(shortage, which, begun_ns, n_pages * pool->page_bytes,
                                n_back * pool->page_bytes);
    shortage->back_bytes += n_back * pool->page_bytes;
    return n_back;
}

/* Ask the reclaimers for what is missing. False when nothing has moved since the attempt failed, whatever
 * they return: another attempt would fail the same way. */
static bool take_reclaim(fcdp_pool *pool, const shortage *missing, fcdp_pool_shortage *told,
                         size_t *n_back_out) {
    *n_back_out = 0;
    for (int which = 0; which < FCDP_RECLAIM_NEIGHBOUR && *n_back_out < missing->n_missing; which++)
        *n_back_out += reclaimer_ask(pool, (fcdp_reclaimer)which, missing->n_missing - *n_back_out, told);

    fcdp__lock_acquire(&pool->lock);
    bool moved = pool->n_moves != missing->n_moves;
    pool_leave(pool);
    return moved;
}

/* The callers name the holders, since the pool knows none of them. */
void fcdp__pool_usage(fcdp_pool *pool, fcdp_pool_usage *usage_out) {
    fcdp_pool_stats stats;
    fcdp__pool_stats(pool, &stats);
    fcdp_pool_usage usage = {.budget_bytes = stats.budget_bytes,
                             .cached_bytes = stats.cached_pages * stats.page_bytes};
    if (fcdp__driver_mem_info(pool->drv, &usage.free_bytes, &usage.device_bytes)) usage.device_bytes = 0;
    size_t used_bytes = usage.device_bytes - usage.free_bytes;
    size_t ours_bytes = stats.live_pages * stats.page_bytes + usage.cached_bytes;
    if (usage.device_bytes && used_bytes > ours_bytes) usage.others_bytes = used_bytes - ours_bytes;

    char *text = usage.budget_text;
    size_t n_text = sizeof usage.budget_text,
           at = (size_t)snprintf(text, n_text, "the budget is %s: ", fcdp__size_text(usage.budget_bytes).s);
    for (fcdp_holder holder = 0; holder < FCDP_N_HOLDERS; holder++) {
        const fcdp_holder_words *words = atomic_load_explicit(&pool->words[holder], memory_order_acquire);
        if (words && at < n_text)
            at += (size_t)snprintf(text + at, n_text - at, "%s %s, ", words->name,
                                   fcdp__size_text(stats.held_pages[holder] * stats.page_bytes).s);
    }
    if (at < n_text) snprintf(text + at, n_text - at, "idle %s", fcdp__size_text(usage.cached_bytes).s);
    snprintf(usage.device_text, sizeof usage.device_text,
             "the device has %s of %s free, and other allocations hold %s",
             fcdp__size_text(usage.free_bytes).s, fcdp__size_text(usage.device_bytes).s,
             fcdp__size_text(usage.others_bytes).s);
    *usage_out = usage;
}

const char *fcdp__pool_budget_advice(const fcdp_pool *pool) {
    return pool->headroom_bytes
               ? "the budget is the limit, not the device: lower FCDP_HEADROOM, which is left to others"
               : "the budget is the limit, not the device: raise FCDP_DEVICE_BUDGET";
}

/* What would help depends on which limit was met: the device, the budget, or what the holder itself needs. */
static fcdp_status take_failed(fcdp_pool *pool, fcdp_holder holder, size_t n, bool driver_full) {
    static const fcdp_holder_words unnamed = {"pages", "use fewer of them"};
    const fcdp_holder_words *words = atomic_load_explicit(&pool->words[holder], memory_order_acquire);
    fcdp_pool_usage usage;
    fcdp__pool_usage(pool, &usage);
    if (!words) words = &unnamed;
    const char *advice = "";
    if (driver_full)
        advice = "other allocations fill the device: use a smaller batch, set FCDP_DEVICE_BUDGET to what is "
                 "left for FCDP, or ";
    bool fits_device = usage.device_bytes && (usage.free_bytes + usage.cached_bytes) / pool->page_bytes >= n;
    bool raise = !driver_full && fits_device;
    return fcdp__fail(FCDP_ERR_NO_DEVICE_MEM,
                      "no device memory for %s of %s; %s, nothing of it can be taken back now; %s; %s%s",
                      fcdp__size_text(n * pool->page_bytes).s, words->name, usage.budget_text,
                      usage.device_text, advice, raise ? fcdp__pool_budget_advice(pool) : words->advice);
}

/* ---- handles of many pages ---- */

/* Under lock: as for single pages, but none of the idle ones is reserved. Those that the budget has no room
 * for beside the handle leave the stack, to be released by the caller. n_live + n_promised <= n_budget =>
 * they are enough. */
static bool handle_promise(fcdp_pool *pool, size_t n, fcdp_phys *leaving, size_t *n_leaving_out,
                           shortage *shortage_out) {
    size_t n_spoken_for = pool->n_live + pool->n_promised;
    *n_leaving_out = 0;
    if (n > pool->n_budget || n_spoken_for > pool->n_budget - n) {
        *shortage_out = (shortage){n_spoken_for + n - pool->n_budget, pool->n_moves, false};
        return false;
    }
    size_t n_idle = pool->n_cached - pool->n_reserved, n_needed = n_spoken_for + n_idle + n;
    size_t n_leaving = n_needed > pool->n_budget ? n_needed - pool->n_budget : 0;
    /* those above a budget that has shrunk leave when others are given back */
    if (n_leaving > n) n_leaving = n;
    for (; *n_leaving_out < n_leaving; ++*n_leaving_out)
        leaving[*n_leaving_out] = pool->stack[--pool->n_cached];
    pool->n_created -= n_leaving;
    pool->n_promised += n;
    return true;
}

/* The handle of `n` promised pages. The promise ends, whatever comes of it. */
static fcdp_status handle_create(fcdp_pool *pool, fcdp_holder holder, size_t n, bool trims,
                                 fcdp_phys *handle_out, shortage *shortage_out) {
    fcdp_status status = fcdp__driver_phys_create(pool->drv, n * pool->page_bytes, handle_out);
    if (trims && status == FCDP_ERR_NO_DEVICE_MEM && fcdp__pool_trim(pool))
        status = fcdp__driver_phys_create(pool->drv, n * pool->page_bytes, handle_out);
    fcdp__lock_acquire(&pool->lock);
    pool->n_promised -= n;
    if (!status) {
        pool->n_created += n;
        pool->n_driver_creates++;
        held_join(pool, holder, n);
    }
    pool->n_moves++;
    *shortage_out = (shortage){n, pool->n_moves, true};
    pool_leave(pool);
    return status == FCDP_ERR_NO_DEVICE_MEM ? FCDP_PENDING : status;
}

/* One attempt without the reclaimers. FCDP_PENDING: not without pages that come back first. */
static fcdp_status handle_try(fcdp_pool *pool, fcdp_holder holder, size_t n, fcdp_phys *handle_out,
                              shortage *shortage_out) {
    size_t n_leaving = 0;
    fcdp_phys *leaving = malloc(n * sizeof *leaving); /* at most n idle pages make room for n */
    if (!leaving) return fcdp__fail(FCDP_ERR_NO_HOST_MEM, "no host memory for a list of %zu pages", n);
    fcdp__lock_acquire(&pool->lock);
    bool promised = handle_promise(pool, n, leaving, &n_leaving, shortage_out);
    pool_leave(pool);
    for (size_t i = 0; i < n_leaving; i++) (void)handle_release(pool, leaving[i], 1);
    free(leaving);
    return promised ? handle_create(pool, holder, n, true, handle_out, shortage_out) : FCDP_PENDING;
}

/* ---- with the reclaimers ---- */

static void pressure_tell(fcdp_pool *pool, fcdp_pool_shortage *told) {
    fcdp_pool_stats now;
    if (told->begun_ns || !fcdp__trace_is_on(1)) return;
    fcdp__pool_stats(pool, &now);
    fcdp__pool_tell_pressure(told, &now);
}

typedef fcdp_status (*attempt_fn)(fcdp_pool *pool, fcdp_holder holder, size_t n, fcdp_phys *out,
                                  shortage *shortage_out);

/* Attempt, and ask the reclaimers for what is missing, until nothing moves any more. Then ask PyTorch's own
 * allocator, once: its memory goes to the driver, not to the pool. FCDP_PENDING: nothing helps. */
static fcdp_status take_until_nothing_moves(attempt_fn attempt, fcdp_pool *pool, size_t n, fcdp_phys *out,
                                            shortage *missing_out, fcdp_pool_shortage *told) {
    shortage missing = {0};
    bool has_asked = false;
    for (unsigned n_lost = 0; n_lost < MAX_LOST_RACES;) {
        size_t n_budget;
        (void)fcdp__pool_spare_pages(pool, &n_budget);
        if (n > n_budget) break;
        fcdp_status status = attempt(pool, told->holder, n, out, &missing);
        *missing_out = missing;
        if (status != FCDP_PENDING) return status;
        pressure_tell(pool, told);
        size_t n_back;
        if (take_reclaim(pool, &missing, told, &n_back)) {
            if (n_back > 0) continue;
            /* Other threads keep moving pages, and may make no more progress than this one. */
            if (++n_lost < MAX_LOST_RACES || has_asked) continue;
        }
        if (!missing.driver_full || has_asked ||
            !reclaimer_ask(pool, FCDP_RECLAIM_NEIGHBOUR, missing.n_missing, told))
            break;
        has_asked = true;
        n_lost = 0;
    }
    return FCDP_PENDING;
}

/* FCDP_PENDING: nothing helps. */
static fcdp_status seek_by(attempt_fn attempt, fcdp_pool *pool, fcdp_holder holder, size_t n, fcdp_phys *out,
                           shortage *missing_out) {
    fcdp_pool_shortage told = {.pool = pool->told.pool, .holder = holder, .bytes = n * pool->page_bytes};
    fcdp_status status = take_until_nothing_moves(attempt, pool, n, out, missing_out, &told);
    if (told.begun_ns) fcdp__pool_tell_outcome(&told, !status);
    return status;
}

void fcdp__pool_trace_oom(fcdp_pool *pool, size_t bytes) {
    fcdp_pool_stats now;
    if (!fcdp__trace_is_on(1)) return;
    fcdp__pool_stats(pool, &now);
    fcdp__pool_tell_oom(bytes, &now);
}

static fcdp_status take_by(attempt_fn attempt, fcdp_pool *pool, fcdp_holder holder, size_t n,
                           fcdp_phys *out) {
    shortage missing = {0};
    fcdp_status status = seek_by(attempt, pool, holder, n, out, &missing);
    if (status) fcdp__pool_trace_oom(pool, n * pool->page_bytes);
    return status == FCDP_PENDING ? take_failed(pool, holder, n, missing.driver_full) : status;
}

fcdp_status fcdp__pool_take(fcdp_pool *pool, fcdp_holder holder, size_t n, fcdp_phys *pages_out) {
    return n == 0 ? FCDP_OK : take_by(take_try, pool, holder, n, pages_out);
}

fcdp_status fcdp__pool_take_handle(fcdp_pool *pool, fcdp_holder holder, size_t n, fcdp_phys *handle_out) {
    return take_by(handle_try, pool, holder, n, handle_out);
}

fcdp_status fcdp__pool_seek(fcdp_pool *pool, fcdp_holder holder, size_t n, fcdp_phys *pages_out) {
    shortage missing = {0};
    return n == 0 ? FCDP_OK : seek_by(take_try, pool, holder, n, pages_out, &missing);
}

fcdp_status fcdp__pool_take_some(fcdp_pool *pool, fcdp_holder holder, size_t n, fcdp_phys *pages_out,
                                 size_t *n_taken_out) {
    size_t n_budget, n_spare = fcdp__pool_spare_pages(pool, &n_budget);
    *n_taken_out = 0;
    for (n = n < n_spare ? n : n_spare; n > 0;) {
        shortage missing;
        fcdp_status status = take_try(pool, holder, n, pages_out, &missing);
        if (status == FCDP_OK) *n_taken_out = n;
        if (status != FCDP_PENDING) return status;
        /* the driver had no more, or another was faster */
        n -= missing.n_missing < n ? missing.n_missing : n;
    }
    return FCDP_OK;
}

/* Idle single pages stay, within the budget: so it can be less than what is spare. */
fcdp_status fcdp__pool_try_handle(fcdp_pool *pool, fcdp_holder holder, size_t n, fcdp_phys *handle_out) {
    shortage missing;
    fcdp__lock_acquire(&pool->lock);
    size_t n_used = pool->n_created + pool->n_promised - pool->n_reserved;
    bool promised = n <= pool->n_budget && n_used <= pool->n_budget - n;
    if (promised) pool->n_promised += n;
    pool_leave(pool);
    return promised ? handle_create(pool, holder, n, false, handle_out, &missing) : FCDP_PENDING;
}

/* ---- give, trim, stats ---- */

/* Idle handles go back to the driver: all of them, or those above the budget. Returns how many. */
static size_t pool_release(fcdp_pool *pool, bool all) {
    size_t n_released = 0;
    for (;;) {
        fcdp__lock_acquire(&pool->lock);
        bool one = pool->n_cached > pool->n_reserved && (all || pool->n_created > pool->n_budget);
        fcdp_phys page = one ? pool->stack[--pool->n_cached] : (fcdp_phys){0};
        pool->n_created -= one;
        pool_leave(pool);
        if (!one) return n_released;
        if (!handle_release(pool, page, 1)) n_released++;
    }
}

/* Under lock. */
static void held_leave(fcdp_pool *pool, fcdp_holder holder, size_t n) {
    FCDP_CHECK(0, n <= pool->n_held[holder]);
    pool->n_held[holder] -= n;
    pool->n_live -= n;
}

void fcdp__pool_give(fcdp_pool *pool, fcdp_holder holder, size_t n, const fcdp_phys *pages) {
    if (n == 0) return; /* no move: a take that waits for one must not start over */
    fcdp__lock_acquire(&pool->lock);
    held_leave(pool, holder, n);
    for (size_t i = 0; i < n; i++) {
        FCDP_CHECK(3, !stack_holds(pool, pages[i])); /* given twice */
        pool->stack[pool->n_cached++] = pages[i];
    }
    pool->n_moves++;
    bool above = pool->n_created > pool->n_budget;
    pool_leave(pool);
    if (above) (void)pool_release(pool, false);
}

/* Released first: until then its memory is not there for others. */
void fcdp__pool_give_handle(fcdp_pool *pool, fcdp_holder holder, size_t n, fcdp_phys handle) {
    (void)handle_release(pool, handle, n);
    fcdp__lock_acquire(&pool->lock);
    held_leave(pool, holder, n);
    pool->n_created -= n;
    pool->n_moves++;
    pool_leave(pool);
}

size_t fcdp__pool_spare_pages(fcdp_pool *pool, size_t *n_budget_out) {
    fcdp__lock_acquire(&pool->lock);
    size_t n_used = pool->n_live + pool->n_promised;
    size_t n_spare = n_used < pool->n_budget ? pool->n_budget - n_used : 0;
    *n_budget_out = pool->n_budget;
    pool_leave(pool);
    return n_spare;
}

size_t fcdp__pool_trim(fcdp_pool *pool) {
    return pool_release(pool, true) * pool->page_bytes;
}

/* Large handles are the driver's as soon as they are given back; single pages are idle here first. */
size_t fcdp__pool_yield(fcdp_pool *pool, size_t bytes) {
    size_t n = bytes / pool->page_bytes + (bytes % pool->page_bytes > 0), n_back = pool_release(pool, true);
    fcdp_pool_shortage told = {.pool = pool->told.pool, .bytes = bytes};
    for (int which = 0; which < FCDP_RECLAIM_NEIGHBOUR && n_back < n; which++)
        n_back += reclaimer_ask(pool, (fcdp_reclaimer)which, n - n_back, &told);
    (void)pool_release(pool, true);
    fcdp__trace_now(FCDP_EVENT_NEIGHBOUR, 0, n_back * pool->page_bytes, bytes, 0);
    fcdp__trace_count(FCDP_COUNT_YIELDED_BYTES, n_back * pool->page_bytes);
    return n_back * pool->page_bytes;
}

fcdp_status fcdp__pool_set_budget(fcdp_pool *pool, size_t budget_bytes) {
    size_t n = budget_bytes / pool->page_bytes;
    if (n == 0)
        return fcdp__fail(FCDP_ERR_INVALID, "a device budget of %zu bytes is less than one page of %zu bytes",
                          budget_bytes, pool->page_bytes);
    fcdp__lock_acquire(&pool->lock);
    size_t n_room = n > pool->n_room ? n : pool->n_room;
    fcdp_phys *stack = realloc(pool->stack, n_room * sizeof *stack);
    if (stack) {
        pool->stack = stack;
        pool->n_room = n_room;
        pool->n_budget = n;
        pool->budget_bytes = budget_bytes;
        pool->n_moves++;
    }
    pool_leave(pool);
    if (!stack) return fcdp__fail(FCDP_ERR_NO_HOST_MEM, "no host memory for the list of %zu device pages", n);
    (void)pool_release(pool, false);
    return FCDP_OK;
}

void fcdp__pool_stats(fcdp_pool *pool, fcdp_pool_stats *stats_out) {
    fcdp__lock_acquire(&pool->lock);
    *stats_out = stats_now(pool);
    pool_leave(pool);
}

size_t fcdp__pool_pages_in_use(fcdp_pool *pool) {
    size_t n_idle = 0;
    for (int which = 0; which < FCDP_N_RECLAIMERS; which++) {
        reclaimer entered = reclaimer_enter(pool, (fcdp_reclaimer)which);
        if (entered.idle) n_idle += entered.idle(entered.ctx);
        reclaimer_leave(pool, (fcdp_reclaimer)which, false);
    }
    fcdp__lock_acquire(&pool->lock);
    size_t n_live = pool->n_live;
    pool_leave(pool);
    return n_idle < n_live ? n_live - n_idle : 0;
}

size_t fcdp__pool_room_bytes(fcdp_pool *pool) {
    size_t free_bytes, total_bytes;
    bool knows = !fcdp__driver_mem_info(pool->drv, &free_bytes, &total_bytes);
    fcdp__lock_acquire(&pool->lock);
    size_t room_bytes = pool->budget_bytes, ours_bytes = pool->n_created * pool->page_bytes;
    pool_leave(pool);
    return knows && free_bytes + ours_bytes < room_bytes ? free_bytes + ours_bytes : room_bytes;
}

void fcdp__pool_reset_peak(fcdp_pool *pool, fcdp_holder holder) {
    fcdp__lock_acquire(&pool->lock);
    pool->n_peak = pool->n_live;
    pool->n_peak_held[holder] = pool->n_held[holder];
    pool_leave(pool);
}
