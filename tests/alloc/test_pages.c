/* The page pool: budget, reuse, reclaim from inside a take, exhaustion below the budget, concurrent takers.
 */
#include <pthread.h>
#include <stdatomic.h>

#include "alloc/pages.h"

#include "tests/alloc/support.h"

enum { PAGE = 2 << 20, MAX_PAGES = 256, N_SLOTS = 1 << 16 };

enum { HOLDER_TENSORS = 0 };
static const fcdp_holder_words tensors_words = {"tensors", "free some"},
                               others_words = {"others", "ask less"};

static void assert_counts(fcdp_pool *pool, size_t n_live, size_t n_cached) {
    fcdp_pool_stats stats;
    fcdp__pool_stats(pool, &stats);
    assert_int_equal(stats.live_pages, n_live);
    assert_int_equal(stats.cached_pages, n_cached);
}

static fcdp_pool *pool_open(fcdp_driver *drv, size_t n_pages) {
    fcdp_pool *pool = NULL;
    assert_ok(fcdp__pool_create(drv, n_pages * PAGE, &pool));
    fcdp__pool_set_holder(pool, HOLDER_TENSORS, &tensors_words);
    fcdp__pool_set_holder(pool, HOLDER_OTHERS, &others_words);
    return pool;
}

/* Without asking anybody, all of them or none. */
static bool take_at_once(fcdp_pool *pool, fcdp_holder holder, size_t n, fcdp_phys *pages_out) {
    size_t n_taken;
    assert_ok(fcdp__pool_take_some(pool, holder, n, pages_out, &n_taken));
    if (n_taken < n) fcdp__pool_give(pool, holder, n_taken, pages_out);
    return n_taken == n;
}

static void pool_close(fcdp_pool *pool, fcdp_driver *drv) {
    fcdp__pool_destroy(pool);
    if (fcdp__driver_is_sim(drv)) assert_nothing_lives();
    fcdp__driver_close(drv);
}

static void pages_are_reused_not_released(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_any();
    fcdp_pool *pool = pool_open(drv, 8);
    fcdp_phys pages[8];
    fcdp_pool_stats stats;
    for (int round = 0; round < 10; round++) {
        assert_ok(fcdp__pool_take(pool, HOLDER_OTHERS, 5, pages));
        assert_counts(pool, 5, 0);
        fcdp__pool_give(pool, HOLDER_OTHERS, 2, pages);
        assert_counts(pool, 3, 2);
        fcdp__pool_give(pool, HOLDER_OTHERS, 3, pages + 2);
        assert_counts(pool, 0, 5);
    }
    fcdp__pool_stats(pool, &stats);
    assert_int_equal(stats.n_creates, 5);
    assert_int_equal(stats.n_reclaims, 0);
    assert_int_equal(stats.page_bytes, PAGE);
    assert_int_equal(stats.budget_bytes, 8 * PAGE);
    assert_int_equal(fcdp__pool_trim(pool), 5 * PAGE);
    assert_counts(pool, 0, 0);
    assert_int_equal(fcdp__pool_trim(pool), 0);
    assert_ok(fcdp__pool_take(pool, HOLDER_OTHERS, 8, pages));
    fcdp__pool_give(pool, HOLDER_OTHERS, 8, pages);
    pool_close(pool, drv);
}

static void the_peak_is_kept_and_reset(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_any();
    fcdp_pool *pool = pool_open(drv, 8);
    fcdp_phys pages[8];
    fcdp_pool_stats stats;
    assert_ok(fcdp__pool_take(pool, HOLDER_OTHERS, 6, pages));
    fcdp__pool_give(pool, HOLDER_OTHERS, 5, pages);
    fcdp__pool_stats(pool, &stats);
    assert_int_equal(stats.peak_live_pages, 6);
    fcdp__pool_reset_peak(pool, HOLDER_OTHERS);
    fcdp__pool_stats(pool, &stats);
    assert_int_equal(stats.peak_live_pages, 1);
    assert_int_equal(fcdp__pool_take(pool, HOLDER_OTHERS, 8, pages),
                     FCDP_ERR_NO_DEVICE_MEM); /* what failed was never live */
    fcdp__pool_stats(pool, &stats);
    assert_int_equal(stats.peak_live_pages, 1);
    fcdp__pool_give(pool, HOLDER_OTHERS, 1, pages + 5);
    pool_close(pool, drv);
}

static void the_budget_holds_and_the_text_tells_it(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_any();
    fcdp_pool *pool = NULL;
    fcdp_phys pages[9], untouched = {77};
    assert_int_equal(fcdp__pool_create(drv, PAGE - 1, &pool), FCDP_ERR_NO_DEVICE_MEM);
    assert_text("FCDP_DEVICE_BUDGET");
    assert_null(pool);

    assert_ok(fcdp__pool_create(drv, 8 * PAGE + PAGE / 2, &pool)); /* half a page is no page */
    fcdp__pool_set_holder(pool, HOLDER_OTHERS, &others_words);
    assert_ok(fcdp__pool_take(pool, HOLDER_OTHERS, 0, &untouched));
    assert_ok(fcdp__pool_take(pool, HOLDER_OTHERS, 6, pages));
    fcdp__pool_give(pool, HOLDER_OTHERS, 1, pages + 5);
    assert_int_equal(fcdp__pool_take(pool, HOLDER_OTHERS, 4, &untouched), FCDP_ERR_NO_DEVICE_MEM);
    assert_text("no device memory for 8 MiB of others");
    assert_text("the budget is 17 MiB: others 10 MiB, idle 2 MiB");
    assert_text("raise FCDP_DEVICE_BUDGET");
    assert_int_equal(untouched.handle, 77);
    assert_int_equal(fcdp__pool_take(pool, HOLDER_OTHERS, SIZE_MAX, &untouched), FCDP_ERR_NO_DEVICE_MEM);
    assert_counts(pool, 5, 1);
    assert_ok(fcdp__pool_take(pool, HOLDER_OTHERS, 3, pages + 5));
    assert_counts(pool, 8, 0);
    fcdp__pool_give(pool, HOLDER_OTHERS, 8, pages);
    pool_close(pool, drv);
}

static void holders_are_counted_apart(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_any();
    fcdp_pool *pool = pool_open(drv, 8);
    fcdp_phys regions[8], tensors[8];
    fcdp_pool_stats stats;
    assert_ok(fcdp__pool_take(pool, HOLDER_OTHERS, 5, regions));
    assert_true(take_at_once(pool, HOLDER_TENSORS, 3, tensors));
    assert_false(take_at_once(pool, HOLDER_TENSORS, 1, tensors + 3));
    assert_false(take_at_once(pool, HOLDER_TENSORS, SIZE_MAX, tensors + 3));
    fcdp__pool_give(pool, HOLDER_OTHERS, 4, regions + 1);
    fcdp__pool_give(pool, HOLDER_TENSORS, 1, tensors + 2);
    fcdp__pool_stats(pool, &stats);
    assert_int_equal(stats.held_pages[HOLDER_OTHERS], 1);
    assert_int_equal(stats.held_pages[HOLDER_TENSORS], 2);
    assert_int_equal(stats.peak_held_pages[HOLDER_OTHERS], 5);
    assert_int_equal(stats.peak_held_pages[HOLDER_TENSORS], 3);
    fcdp__pool_reset_peak(pool, HOLDER_TENSORS);
    fcdp__pool_stats(pool, &stats);
    assert_int_equal(stats.peak_held_pages[HOLDER_OTHERS], 5);
    assert_int_equal(stats.peak_held_pages[HOLDER_TENSORS], 2);
    fcdp__pool_give(pool, HOLDER_OTHERS, 1, regions);
    fcdp__pool_give(pool, HOLDER_TENSORS, 2, tensors);
    pool_close(pool, drv);
}

static void another_budget_binds_at_once_and_takes_nothing_away(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_any();
    fcdp_pool *pool = pool_open(drv, 8);
    fcdp_phys pages[16];
    assert_ok(fcdp__pool_take(pool, HOLDER_OTHERS, 7, pages));
    fcdp__pool_give(pool, HOLDER_OTHERS, 1, pages + 6);
    assert_int_equal(fcdp__pool_set_budget(pool, PAGE - 1), FCDP_ERR_INVALID);
    assert_ok(fcdp__pool_set_budget(pool, 4 * PAGE));
    assert_counts(pool, 6, 0); /* above the budget: nothing idle is kept */
    assert_int_equal(fcdp__pool_take(pool, HOLDER_TENSORS, 1, pages + 6), FCDP_ERR_NO_DEVICE_MEM);
    fcdp__pool_give(pool, HOLDER_OTHERS, 3, pages + 3);
    assert_counts(pool, 3, 1); /* nor is what comes back later */
    assert_ok(fcdp__pool_take(pool, HOLDER_TENSORS, 1, pages + 3));
    assert_int_equal(fcdp__pool_take(pool, HOLDER_TENSORS, 1, pages + 4), FCDP_ERR_NO_DEVICE_MEM);
    fcdp__pool_give(pool, HOLDER_TENSORS, 1, pages + 3);
    assert_ok(fcdp__pool_set_budget(pool, 16 * PAGE));
    assert_ok(fcdp__pool_take(pool, HOLDER_OTHERS, 13, pages + 3));
    assert_counts(pool, 16, 0);
    fcdp__pool_give(pool, HOLDER_OTHERS, 16, pages);
    assert_counts(pool, 0, 16);
    pool_close(pool, drv);
}

/* Exact on the simulator. A GPU's driver takes memory of its own when it likes, and
 * so do others that share the device. */
static void assert_room(fcdp_driver *drv, fcdp_pool *pool, size_t bytes) {
    size_t slack = fcdp__driver_is_sim(drv) ? 0 : (size_t)64 << 20;
    assert_in_range(fcdp__pool_room_bytes(pool), bytes - (slack < bytes ? slack : bytes), bytes + slack);
}

/* Two pools on one device: what one holds is no room for the other. */
static void room_is_what_others_leave(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_any();
    size_t free_bytes, total_bytes;
    assert_ok(fcdp__driver_mem_info(drv, &free_bytes, &total_bytes));
    size_t n = free_bytes / PAGE;
    if (n > MAX_PAGES) n = MAX_PAGES;
    fcdp_pool *mine = pool_open(drv, free_bytes / PAGE), *theirs = pool_open(drv, free_bytes / PAGE);
    fcdp_phys *pages = calloc(n, sizeof *pages);
    assert_room(drv, mine, free_bytes / PAGE * PAGE);
    assert_ok(fcdp__pool_take(mine, HOLDER_OTHERS, n / 2, pages));
    assert_room(drv, mine, free_bytes / PAGE * PAGE); /* one's own are room */
    assert_ok(fcdp__pool_take(theirs, HOLDER_TENSORS, n - n / 2, pages + n / 2));
    if (fcdp__driver_is_sim(drv))
        assert_in_range(fcdp__pool_room_bytes(mine), free_bytes - (n - n / 2) * PAGE - PAGE,
                        free_bytes - (n - n / 2) * PAGE);
    fcdp__pool_give(theirs, HOLDER_TENSORS, n - n / 2, pages + n / 2);
    fcdp__pool_give(mine, HOLDER_OTHERS, n / 2, pages);
    free(pages);
    fcdp__pool_destroy(theirs);
    pool_close(mine, drv);
}

static void no_budget_means_what_is_free(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_any();
    fcdp_pool *pool = NULL;
    size_t free_bytes, total_bytes;
    fcdp_pool_stats stats;
    assert_ok(fcdp__driver_mem_info(drv, &free_bytes, &total_bytes));
    assert_ok(fcdp__pool_create(drv, 0, &pool));
    fcdp__pool_stats(pool, &stats);
    assert_in_range(stats.budget_bytes, free_bytes / 2, total_bytes);
    pool_close(pool, drv);
}

/* ---- reclaim ---- */

/* Pages that somebody holds and could spare. */
typedef struct spare {
    fcdp_pool *pool;
    fcdp_lock lock;
    fcdp_phys pages[MAX_PAGES];
    size_t n, n_asked, at_most;
    bool lies;
} spare;

static size_t spare_reclaim(void *ctx, size_t n_pages) {
    spare *s = ctx;
    fcdp__lock_acquire(&s->lock);
    s->n_asked = n_pages;
    size_t n = n_pages < s->n ? n_pages : s->n;
    if (s->at_most && n > s->at_most) n = s->at_most;
    s->n -= n;
    fcdp__pool_give(s->pool, HOLDER_OTHERS, n, s->pages + s->n);
    fcdp__lock_release(&s->lock);
    return s->lies ? n_pages : n;
}

static spare *spare_create(fcdp_pool *pool) {
    spare *s = calloc(1, sizeof *s);
    s->pool = pool;
    fcdp__lock_init(&s->lock,
                    FCDP_RANK_REGION); /* above the pool's: taking it proves that the pool's is not held */
    fcdp__pool_set_reclaimer(pool, FCDP_RECLAIM_EVICT, spare_reclaim, NULL, s);
    return s;
}

static void spare_destroy(spare *s) {
    fcdp__pool_set_reclaimer(s->pool, FCDP_RECLAIM_EVICT, NULL, NULL, NULL);
    fcdp__pool_give(s->pool, HOLDER_OTHERS, s->n, s->pages);
    fcdp__lock_destroy(&s->lock);
    free(s);
}

static void a_take_asks_for_what_is_missing(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_any();
    fcdp_pool *pool = pool_open(drv, 10);
    spare *s = spare_create(pool);
    fcdp_phys pages[10];
    fcdp_pool_stats stats;
    assert_ok(fcdp__pool_take(pool, HOLDER_OTHERS, 6, s->pages));
    s->n = 6;
    assert_ok(fcdp__pool_take(pool, HOLDER_OTHERS, 4, pages));
    assert_int_equal(s->n, 6); /* not asked while the budget allows */
    assert_ok(fcdp__pool_take(pool, HOLDER_OTHERS, 3, pages + 4));
    assert_int_equal(s->n_asked, 3);
    assert_int_equal(s->n, 3);
    fcdp__pool_stats(pool, &stats);
    assert_int_equal(stats.n_reclaims, 1);

    s->at_most = 1; /* one page at a time is progress */
    assert_ok(fcdp__pool_take(pool, HOLDER_OTHERS, 3, pages + 7));
    fcdp__pool_stats(pool, &stats);
    assert_int_equal(stats.n_reclaims, 4);
    assert_int_equal(stats.n_creates, 10);

    fcdp_phys more;
    assert_int_equal(fcdp__pool_take(pool, HOLDER_OTHERS, 1, &more), FCDP_ERR_NO_DEVICE_MEM);
    s->lies = true; /* claims pages that did not come: the take ends all the same */
    assert_int_equal(fcdp__pool_take(pool, HOLDER_OTHERS, 1, &more), FCDP_ERR_NO_DEVICE_MEM);
    assert_int_equal(fcdp__pool_take(pool, HOLDER_OTHERS, 11, &more), FCDP_ERR_NO_DEVICE_MEM);
    fcdp__pool_give(pool, HOLDER_OTHERS, 10, pages);
    spare_destroy(s);
    pool_close(pool, drv);
}

static void a_hopeless_take_evicts_nothing(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_any();
    fcdp_pool *pool = pool_open(drv, 4);
    spare *s = spare_create(pool);
    fcdp_phys pages[5];
    assert_ok(fcdp__pool_take(pool, HOLDER_OTHERS, 4, s->pages));
    s->n = 4;
    assert_int_equal(fcdp__pool_take(pool, HOLDER_OTHERS, 5, pages), FCDP_ERR_NO_DEVICE_MEM);
    assert_int_equal(s->n, 4);
    spare_destroy(s);
    pool_close(pool, drv);
}

/* Others fill the device: the driver refuses although the budget would allow. */
static void a_full_device_is_reclaimed_too(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_sim();
    simgpu_set_capacity(6 * PAGE);
    fcdp_pool *pool = pool_open(drv, 100);
    spare *s = spare_create(pool);
    fcdp_phys pages[6];
    assert_ok(fcdp__pool_take(pool, HOLDER_OTHERS, 4, s->pages));
    s->n = 4;
    /* 2 from the driver, 3 from the reclaimer */
    assert_ok(fcdp__pool_take(pool, HOLDER_OTHERS, 5, pages));
    assert_int_equal(s->n_asked, 3);
    assert_int_equal(s->n, 1);
    assert_int_equal(fcdp__pool_take(pool, HOLDER_OTHERS, 3, pages + 5), FCDP_ERR_NO_DEVICE_MEM);
    assert_text("the device has 0 of 12 MiB free");
    assert_text("other allocations fill the device");
    assert_counts(pool, 5, 1); /* the page that came back is idle, for others to take */
    fcdp__pool_give(pool, HOLDER_OTHERS, 5, pages);
    spare_destroy(s);
    pool_close(pool, drv);
    simgpu_reset();
}

static void other_driver_errors_pass_through(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_sim();
    fcdp_pool *pool = pool_open(drv, 8);
    fcdp_phys pages[4];
    assert_int_equal(simgpu_fail_nth("cuMemCreate", 3, CUDA_UNKNOWN), 0);
    assert_int_equal(fcdp__pool_take(pool, HOLDER_OTHERS, 4, pages), FCDP_ERR_DRIVER);
    assert_text("cuMemCreate");
    assert_counts(pool, 0, 2); /* what was created is not lost */
    assert_ok(fcdp__pool_take(pool, HOLDER_OTHERS, 4, pages));
    fcdp__pool_give(pool, HOLDER_OTHERS, 4, pages);
    assert_int_equal(simgpu_fail_nth("cuMemRelease", 2, CUDA_UNKNOWN), 0);
    assert_int_equal(fcdp__pool_trim(pool), 4 * PAGE); /* a failure that passes loses nothing */
    pool_close(pool, drv);
}

/* One handle of several pages is counted as so many, within the budget, and is the driver's again at once. */
static void a_large_handle_counts_as_its_pages(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_any();
    fcdp_pool *pool = pool_open(drv, 8);
    fcdp_phys pages[8], large;
    size_t n, n_budget;
    assert_ok(fcdp__pool_take(pool, HOLDER_OTHERS, 2, pages));
    fcdp__pool_give(pool, HOLDER_OTHERS, 1, pages + 1);
    assert_int_equal(fcdp__pool_spare_pages(pool, &n_budget), 7); /* the cached one too */
    assert_int_equal(n_budget, 8);
    /* it stays */
    assert_int_equal(fcdp__pool_try_handle(pool, HOLDER_TENSORS, 7, &large), FCDP_PENDING);
    assert_ok(fcdp__pool_try_handle(pool, HOLDER_TENSORS, 5, &large));
    assert_counts(pool, 6, 1);
    /* cached, and what the budget leaves */
    assert_ok(fcdp__pool_take_some(pool, HOLDER_TENSORS, 4, pages + 1, &n));
    assert_int_equal(n, 2);
    assert_counts(pool, 8, 0);
    assert_ok(fcdp__pool_take_some(pool, HOLDER_TENSORS, 4, pages + 3, &n));
    assert_int_equal(n, 0);
    fcdp__pool_give_handle(pool, HOLDER_TENSORS, 5, large);
    assert_counts(pool, 3, 0);
    assert_ok(fcdp__pool_take(pool, HOLDER_OTHERS, 5, pages + 3)); /* its memory as single pages */
    fcdp__pool_give(pool, HOLDER_TENSORS, 2, pages + 1);
    fcdp__pool_give(pool, HOLDER_OTHERS, 1, pages);
    fcdp__pool_give(pool, HOLDER_OTHERS, 5, pages + 3);
    pool_close(pool, drv);
}

static void give_twice(void *arg) {
    fcdp_pool *pool = arg;
    fcdp_phys pages[2], again[2];
    fcdp__check_level = 3;
    if (fcdp__pool_take(pool, HOLDER_OTHERS, 2, pages)) _exit(1);
    again[0] = again[1] = pages[0];
    fcdp__pool_give(pool, HOLDER_OTHERS, 2, again);
}

static void give_too_many(void *arg) {
    fcdp_phys pages[3] = {{1}, {2}, {3}};
    fcdp__pool_give(arg, HOLDER_OTHERS, 3, pages);
}

static void misuse_aborts(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_sim();
    fcdp_pool *pool = pool_open(drv, 4);
    fcdp_phys pages[2];
    assert_ok(fcdp__pool_take(pool, HOLDER_OTHERS, 2, pages));
    fcdp__pool_give(pool, HOLDER_OTHERS, 2,
                    pages); /* cached, so that the child, where the driver answers nothing, can take them */
    assert_dies(give_twice, pool, SIGABRT);
    assert_dies(give_too_many, pool, SIGABRT);
    pool_close(pool, drv);
}

/* ---- blocks: many pages under one handle ---- */

static void assert_held(fcdp_pool *pool, size_t n_regions, size_t n_tensors) {
    fcdp_pool_stats stats;
    fcdp__pool_stats(pool, &stats);
    assert_int_equal(stats.held_pages[HOLDER_OTHERS], n_regions);
    assert_int_equal(stats.held_pages[HOLDER_TENSORS], n_tensors);
    assert_int_equal(stats.live_pages, n_regions + n_tensors);
}

/* What the device has lent to this process, as the simulated driver counts it. */
static void assert_device_pages(fcdp_driver *drv, size_t n) {
    struct simgpu_live live;
    if (!driver_is_controlled(drv)) return;
    simgpu_live(&live);
    assert_int_equal(live.device_bytes, n * PAGE);
}

static void a_block_counts_as_its_pages(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_any();
    fcdp_pool *pool = pool_open(drv, 16);
    fcdp_phys block, other, pages[4];
    fcdp_pool_stats stats;
    fcdp_dptr at;
    assert_ok(fcdp__pool_take(pool, HOLDER_TENSORS, 3, pages));
    assert_ok(fcdp__pool_take_handle(pool, HOLDER_OTHERS, 5, &block));
    assert_held(pool, 5, 3);
    assert_device_pages(drv, 8);
    assert_ok(fcdp__driver_range_reserve(drv, 5 * PAGE, &at)); /* one handle: one map call takes it whole */
    assert_ok(fcdp__driver_map(drv, at, 5 * PAGE, block));
    assert_ok(fcdp__driver_unmap(drv, at, 5 * PAGE));
    assert_ok(fcdp__driver_range_free(drv, at, 5 * PAGE));
    assert_ok(fcdp__pool_take_handle(pool, HOLDER_TENSORS, 8, &other));
    assert_held(pool, 5, 11);
    fcdp__pool_give_handle(pool, HOLDER_TENSORS, 8, other);
    assert_held(pool, 5, 3);
    assert_counts(pool, 8, 0); /* a block is given back to the driver, not kept idle */
    assert_device_pages(drv, 8);
    fcdp__pool_give_handle(pool, HOLDER_OTHERS, 5, block);
    fcdp__pool_stats(pool, &stats);
    assert_int_equal(stats.peak_live_pages, 16);
    assert_int_equal(stats.peak_held_pages[HOLDER_OTHERS], 5);
    assert_int_equal(stats.peak_held_pages[HOLDER_TENSORS], 11);
    assert_int_equal(stats.n_creates, 5);
    fcdp__pool_give(pool, HOLDER_TENSORS, 3, pages);
    assert_counts(pool, 0, 3);
    pool_close(pool, drv);
}

static void a_block_keeps_to_the_budget(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_any();
    fcdp_pool *pool = pool_open(drv, 8);
    fcdp_phys block, pages[8], untouched = {77};
    assert_int_equal(fcdp__pool_take_handle(pool, HOLDER_OTHERS, 9, &untouched), FCDP_ERR_NO_DEVICE_MEM);
    assert_text("no device memory for 18 MiB");
    assert_int_equal(fcdp__pool_take_handle(pool, HOLDER_OTHERS, SIZE_MAX, &untouched),
                     FCDP_ERR_NO_DEVICE_MEM);
    assert_ok(fcdp__pool_take(pool, HOLDER_TENSORS, 3, pages));
    assert_int_equal(fcdp__pool_take_handle(pool, HOLDER_OTHERS, 6, &untouched), FCDP_ERR_NO_DEVICE_MEM);
    assert_text("tensors 6 MiB, others 0 MiB");
    assert_text("raise FCDP_DEVICE_BUDGET");
    assert_int_equal(untouched.handle, 77);
    assert_held(pool, 0, 3);
    assert_ok(fcdp__pool_take_handle(pool, HOLDER_OTHERS, 5, &block));
    assert_held(pool, 5, 3);
    assert_int_equal(fcdp__pool_take(pool, HOLDER_TENSORS, 1, &untouched), FCDP_ERR_NO_DEVICE_MEM);
    assert_false(take_at_once(pool, HOLDER_TENSORS, 1, &untouched));
    fcdp__pool_give_handle(pool, HOLDER_OTHERS, 5, block);
    assert_ok(fcdp__pool_take(pool, HOLDER_TENSORS, 5, pages + 3));
    fcdp__pool_give(pool, HOLDER_TENSORS, 8, pages);
    pool_close(pool, drv);
}

static void idle_pages_leave_for_a_block_and_no_more_than_must(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_any();
    fcdp_pool *pool = pool_open(drv, 8);
    fcdp_phys block, pages[8];
    assert_ok(fcdp__pool_take(pool, HOLDER_TENSORS, 6, pages));
    fcdp__pool_give(pool, HOLDER_TENSORS, 5, pages + 1);
    assert_counts(pool, 1, 5);
    assert_ok(fcdp__pool_take_handle(pool, HOLDER_OTHERS, 2, &block)); /* there is room beside them */
    assert_counts(pool, 3, 5);
    fcdp__pool_give_handle(pool, HOLDER_OTHERS, 2, block);
    /* for two of these there is not */
    assert_ok(fcdp__pool_take_handle(pool, HOLDER_OTHERS, 4, &block));
    assert_counts(pool, 5, 3);
    assert_device_pages(drv, 8);
    /* the others are idle as they were */
    assert_ok(fcdp__pool_take(pool, HOLDER_TENSORS, 3, pages + 1));
    assert_counts(pool, 8, 0);
    fcdp__pool_give(pool, HOLDER_TENSORS, 4, pages);
    fcdp__pool_give_handle(pool, HOLDER_OTHERS, 4, block);
    assert_ok(fcdp__pool_take_handle(pool, HOLDER_OTHERS, 8, &block));
    assert_counts(pool, 8, 0);
    fcdp__pool_give_handle(pool, HOLDER_OTHERS, 8, block);
    assert_counts(pool, 0, 0);
    pool_close(pool, drv);
}

static void a_smaller_budget_binds_blocks_too(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_any();
    fcdp_pool *pool = pool_open(drv, 8);
    fcdp_phys block, second, pages[8];
    assert_ok(fcdp__pool_take_handle(pool, HOLDER_OTHERS, 3, &block));
    assert_ok(fcdp__pool_take(pool, HOLDER_TENSORS, 5, pages));
    assert_ok(fcdp__pool_set_budget(pool, 4 * PAGE));
    fcdp__pool_give(pool, HOLDER_TENSORS, 4, pages + 1);
    assert_counts(pool, 4, 0);
    assert_int_equal(fcdp__pool_take_handle(pool, HOLDER_OTHERS, 1, &second), FCDP_ERR_NO_DEVICE_MEM);
    fcdp__pool_give_handle(pool, HOLDER_OTHERS, 3, block);
    assert_int_equal(fcdp__pool_take_handle(pool, HOLDER_OTHERS, 4, &second), FCDP_ERR_NO_DEVICE_MEM);
    assert_ok(fcdp__pool_take_handle(pool, HOLDER_OTHERS, 3, &second));
    fcdp__pool_give_handle(pool, HOLDER_OTHERS, 3, second);
    fcdp__pool_give(pool, HOLDER_TENSORS, 1, pages);
    assert_counts(pool, 0, 1);
    pool_close(pool, drv);
}

static void a_block_asks_the_reclaimers_in_their_order(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_any();
    fcdp_pool *pool = pool_open(drv, 10);
    spare *regions = spare_create(pool), caches = {.pool = pool, .n = 2};
    fcdp_phys block;
    fcdp_pool_stats stats;
    fcdp__lock_init(&caches.lock, FCDP_RANK_REGION);
    fcdp__pool_set_reclaimer(pool, FCDP_RECLAIM_CACHES, spare_reclaim, NULL, &caches);
    assert_ok(fcdp__pool_take(pool, HOLDER_OTHERS, 2, caches.pages));
    assert_ok(fcdp__pool_take(pool, HOLDER_OTHERS, 6, regions->pages));
    regions->n = 6;
    assert_ok(fcdp__pool_take_handle(pool, HOLDER_TENSORS, 2, &block));
    assert_int_equal(caches.n, 2); /* nobody is asked while the budget allows */
    fcdp__pool_give_handle(pool, HOLDER_TENSORS, 2, block);
    assert_ok(fcdp__pool_take_handle(pool, HOLDER_TENSORS, 7, &block));
    assert_int_equal(caches.n_asked, 5);
    assert_int_equal(caches.n, 0);
    assert_int_equal(regions->n_asked, 3);
    assert_int_equal(regions->n, 3);
    fcdp__pool_stats(pool, &stats);
    assert_int_equal(stats.n_reclaims, 2);
    assert_counts(pool, 10, 0); /* what came back was idle for a moment, and made room */
    fcdp_phys more;
    assert_int_equal(fcdp__pool_take_handle(pool, HOLDER_TENSORS, 4, &more), FCDP_ERR_NO_DEVICE_MEM);
    regions->lies = true;
    assert_int_equal(fcdp__pool_take_handle(pool, HOLDER_TENSORS, 4, &more), FCDP_ERR_NO_DEVICE_MEM);
    fcdp__pool_give_handle(pool, HOLDER_TENSORS, 7, block);
    fcdp__pool_set_reclaimer(pool, FCDP_RECLAIM_CACHES, NULL, NULL, NULL);
    fcdp__lock_destroy(&caches.lock);
    spare_destroy(regions);
    pool_close(pool, drv);
}

/* Others fill the device: idle pages and the reclaimers make room below the budget. */
static void a_block_on_a_full_device(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_sim();
    simgpu_set_capacity(8 * PAGE);
    fcdp_pool *pool = pool_open(drv, 100);
    spare *s = spare_create(pool);
    fcdp_phys block, pages[3], more;
    assert_ok(fcdp__pool_take(pool, HOLDER_OTHERS, 4, s->pages));
    s->n = 4;
    assert_ok(fcdp__pool_take(pool, HOLDER_TENSORS, 3, pages));
    fcdp__pool_give(pool, HOLDER_TENSORS, 3, pages);
    assert_ok(fcdp__pool_take_handle(pool, HOLDER_TENSORS, 4, &block)); /* three of it were idle */
    assert_int_equal(s->n, 4);
    assert_counts(pool, 8, 0);
    fcdp__pool_give_handle(pool, HOLDER_TENSORS, 4, block);
    assert_ok(fcdp__pool_take_handle(pool, HOLDER_TENSORS, 6, &block));
    assert_held(pool, s->n, 6);
    assert_true(s->n <= 2);
    assert_int_equal(fcdp__pool_take_handle(pool, HOLDER_TENSORS, 9, &more), FCDP_ERR_NO_DEVICE_MEM);
    assert_text("other allocations fill the device");
    fcdp__pool_give_handle(pool, HOLDER_TENSORS, 6, block);
    spare_destroy(s);
    pool_close(pool, drv);
    simgpu_reset();
}

/* Takes, blocks, idle pages that leave, a reclaimer: the n-th driver call fails once. A clean error and then
 * success, or success; the counts are right either way, and nothing is lost. */
static fcdp_status blocks_run(fcdp_pool *pool, spare *s) {
    fcdp_phys block, other, pages[6];
    fcdp_status first = FCDP_OK, status;
    size_t n = fcdp__pool_take(pool, HOLDER_TENSORS, 6, pages) ? 0 : 6;
    fcdp__pool_give(pool, HOLDER_TENSORS, n, pages);
    if (n == 0) first = FCDP_ERR_DRIVER;
    status = fcdp__pool_take_handle(pool, HOLDER_OTHERS, 5, &block);
    if (status) {
        first = first ? first : status;
        assert_true(fcdp_error_text()[0] != 0);
        assert_held(pool, 0, 0);
        assert_ok(fcdp__pool_take_handle(pool, HOLDER_OTHERS, 5, &block));
    }
    assert_held(pool, 5, 0);
    s->n = fcdp__pool_take(pool, HOLDER_OTHERS, 3, s->pages) ? 0 : 3;
    /* the reclaimer gives what it has */
    status = fcdp__pool_take_handle(pool, HOLDER_TENSORS, 3, &other);
    if (status) {
        first = first ? first : status;
        assert_held(pool, 5 + s->n, 0);
        assert_ok(fcdp__pool_take_handle(pool, HOLDER_TENSORS, 3, &other));
    }
    assert_held(pool, 5 + s->n, 3);
    fcdp__pool_give_handle(pool, HOLDER_TENSORS, 3, other);
    fcdp__pool_give_handle(pool, HOLDER_OTHERS, 5, block);
    assert_held(pool, s->n, 0);
    return first;
}

static void every_failing_call_loses_no_block(void **state) {
    (void)state;
    const int codes[] = {CUDA_OUT_OF_MEMORY, CUDA_UNKNOWN};
    size_t n_failed = 0, n_survived = 0;
    fcdp_log_set_level(FCDP_LOG_QUIET);
    for (size_t c = 0; c < sizeof codes / sizeof codes[0]; c++)
        for (unsigned long n = 1;; n++) {
            fcdp_driver *drv = driver_open_sim();
            fcdp_pool *pool = pool_open(drv, 8);
            spare *s = spare_create(pool);
            unsigned long before = simgpu_calls(NULL);
            assert_int_equal(simgpu_fail_nth(NULL, n, codes[c]), 0);
            fcdp_status status = blocks_run(pool, s);
            bool spent = simgpu_calls(NULL) - before >= n;
            simgpu_fail_nth(NULL, 0, 0);
            n_failed += status != FCDP_OK;
            n_survived += status == FCDP_OK && spent;
            spare_destroy(s);
            pool_close(pool, drv); /* nothing lives */
            if (!spent) break;
        }
    fcdp_log_set_level(FCDP_LOG_WARN);
    print_message("%zu failures reported, %zu survived\n", n_failed, n_survived);
    assert_true(n_failed > 5 && n_survived > 10);
}

/* ---- many threads ---- */

enum { N_THREADS = 4, N_ROUNDS = 10000, MOST_IN_HAND = 8 };

/* The oracle: who owns each handle. A handle's slot is found by its value, which is unique while the pool
 * lives. */
typedef struct owners {
    _Atomic uint64_t handle[N_SLOTS];
    atomic_int owner[N_SLOTS];
} owners;

static size_t owners_slot(owners *o, uint64_t handle) {
    for (size_t i = handle * 0x9E3779B97F4A7C15u % N_SLOTS;; i = (i + 1) % N_SLOTS) {
        uint64_t seen = 0;
        if (atomic_compare_exchange_strong(&o->handle[i], &seen, handle) || seen == handle) return i;
    }
}

typedef struct taker {
    fcdp_pool *pool;
    spare *spare; /* NULL: gives back itself */
    owners *owners;
    uint64_t seed;
    int id;
    size_t n_taken, n_refused;
    const char *broken;
} taker;

static void taker_put_back(taker *t, size_t n, fcdp_phys *pages) {
    for (size_t i = 0; i < n; i++) {
        int me = t->id;
        if (!atomic_compare_exchange_strong(&t->owners->owner[owners_slot(t->owners, pages[i].handle)], &me,
                                            0))
            t->broken = "a page in hand changed its owner";
    }
    if (!t->spare || t->seed % 3 == 0) {
        fcdp__pool_give(t->pool, HOLDER_OTHERS, n, pages);
        return;
    }
    fcdp__lock_acquire(&t->spare->lock);
    memcpy(t->spare->pages + t->spare->n, pages, n * sizeof *pages);
    t->spare->n += n;
    fcdp__lock_release(&t->spare->lock);
}

static void *taker_run(void *arg) {
    taker *t = arg;
    fcdp_phys hand[MOST_IN_HAND];
    size_t n_hand = 0;
    for (int round = 0; round < N_ROUNDS && !t->broken; round++) {
        size_t n = random_below(&t->seed, MOST_IN_HAND + 1);
        if (n_hand + n <= MOST_IN_HAND) {
            fcdp_status status = fcdp__pool_take(t->pool, HOLDER_OTHERS, n, hand + n_hand);
            if (status && status != FCDP_ERR_NO_DEVICE_MEM)
                t->broken = "a take failed for another reason than memory";
            t->n_refused += status != FCDP_OK;
            for (size_t i = n_hand; !status && i < n_hand + n; i++) {
                int nobody = 0;
                size_t slot = owners_slot(t->owners, hand[i].handle);
                if (!atomic_compare_exchange_strong(&t->owners->owner[slot], &nobody, t->id))
                    t->broken = "a page has two owners";
            }
            if (!status) n_hand += n;
            if (!status) t->n_taken += n;
        } else {
            n = 1 + random_below(&t->seed, n_hand);
            n_hand -= n;
            taker_put_back(t, n, hand + n_hand);
        }
        if (round % 2048 == 0) (void)fcdp__pool_trim(t->pool);
    }
    taker_put_back(t, n_hand, hand);
    return NULL;
}

/* The same with blocks, whose handles are the pool's alone until they are given back. */
static void *block_taker_run(void *arg) {
    taker *t = arg;
    for (int round = 0; round < N_ROUNDS / 4 && !t->broken; round++) {
        size_t n = 1 + random_below(&t->seed, MOST_IN_HAND);
        fcdp_phys block;
        fcdp_status status = fcdp__pool_take_handle(t->pool, HOLDER_TENSORS, n, &block);
        t->n_refused += status != FCDP_OK;
        if (status && status != FCDP_ERR_NO_DEVICE_MEM)
            t->broken = "a block failed for another reason than memory";
        if (status) continue;
        t->n_taken += n;
        int nobody = 0, me = t->id;
        size_t slot = owners_slot(t->owners, block.handle);
        if (!atomic_compare_exchange_strong(&t->owners->owner[slot], &nobody, t->id))
            t->broken = "a block has two owners";
        if (!atomic_compare_exchange_strong(&t->owners->owner[slot], &me, 0))
            t->broken = "a block changed its owner";
        fcdp__pool_give_handle(t->pool, HOLDER_TENSORS, n, block);
    }
    return NULL;
}

/* `n_budget` pages; with `sparing`, pages not in hand are kept until the reclaimer takes them; with `blocks`,
 * every other taker takes blocks. The takers' refusals. */
static size_t takers_run(const char *test, size_t n_budget, size_t n_capacity, bool sparing, bool blocks) {
    fcdp_driver *drv = driver_open_sim();
    simgpu_set_capacity(n_capacity * PAGE);
    fcdp_pool *pool = pool_open(drv, n_budget);
    spare *s = sparing ? spare_create(pool) : NULL;
    owners *o = calloc(1, sizeof *o);
    taker takers[N_THREADS];
    pthread_t threads[N_THREADS];
    uint64_t seed = seed_choose(test);
    size_t n_refused = 0, n_taken = 0;
    for (int i = 0; i < N_THREADS; i++) {
        takers[i] = (taker){.pool = pool, .spare = s, .owners = o, .seed = seed + (uint64_t)i, .id = i + 1};
        bool of_blocks = blocks && i % 2 == 1;
        assert_int_equal(
            pthread_create(&threads[i], NULL, of_blocks ? block_taker_run : taker_run, &takers[i]), 0);
    }
    for (int i = 0; i < N_THREADS; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        if (takers[i].broken) fail_msg("%s", takers[i].broken);
        n_refused += takers[i].n_refused;
        n_taken += takers[i].n_taken;
    }
    fcdp_pool_stats stats;
    fcdp__pool_stats(pool, &stats);
    assert_true(n_taken > 0);
    assert_true(stats.peak_live_pages <= n_budget);
    assert_int_equal(stats.live_pages, s ? s->n : 0);
    if (s) spare_destroy(s);
    free(o);
    pool_close(pool, drv);
    simgpu_reset();
    return n_refused;
}

static void takers_with_room_are_never_refused(void **state) {
    (void)state;
    assert_int_equal(takers_run(__func__, N_THREADS * MOST_IN_HAND, MAX_PAGES, false, false), 0);
}

static void takers_with_little_room_share_it(void **state) {
    (void)state;
    takers_run(__func__, MOST_IN_HAND + 2, MAX_PAGES, false, false);
}

static void takers_reclaim_from_each_other(void **state) {
    (void)state;
    assert_int_equal(takers_run(__func__, N_THREADS * MOST_IN_HAND, MAX_PAGES, true, false), 0);
}

static void takers_reclaim_on_a_full_device(void **state) {
    (void)state;
    takers_run(__func__, N_THREADS * MOST_IN_HAND, N_THREADS * MOST_IN_HAND / 2, true, false);
}

static void takers_of_pages_and_of_blocks_with_room(void **state) {
    (void)state;
    assert_int_equal(takers_run(__func__, N_THREADS * MOST_IN_HAND, MAX_PAGES, false, true), 0);
    assert_int_equal(takers_run(__func__, N_THREADS * MOST_IN_HAND, MAX_PAGES, true, true), 0);
}

static void takers_of_pages_and_of_blocks_with_little_room(void **state) {
    (void)state;
    takers_run(__func__, MOST_IN_HAND + 2, MAX_PAGES, false, true);
    takers_run(__func__, N_THREADS * MOST_IN_HAND, N_THREADS * MOST_IN_HAND / 2, true, true);
}

/* ---- a reclaimer that ends ---- */

typedef struct slow {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    bool entered, may_leave, left;
} slow;

static size_t slow_reclaim(void *ctx, size_t n_pages) {
    slow *s = ctx;
    (void)n_pages;
    pthread_mutex_lock(&s->mutex);
    s->entered = true;
    pthread_cond_broadcast(&s->changed);
    while (!s->may_leave) pthread_cond_wait(&s->changed, &s->mutex);
    s->left = true;
    pthread_mutex_unlock(&s->mutex);
    return 0;
}

typedef struct slow_take {
    fcdp_pool *pool;
    slow s;
} slow_take;

static void *slow_take_main(void *arg) {
    slow_take *t = arg;
    fcdp_phys page;
    assert_int_equal(fcdp__pool_take(t->pool, HOLDER_TENSORS, 1, &page), FCDP_ERR_NO_DEVICE_MEM);
    return NULL;
}

static void *slow_leave_main(void *arg) {
    slow *s = arg;
    pthread_mutex_lock(&s->mutex);
    s->may_leave = true;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->mutex);
    return NULL;
}

/* What it stands on may be freed after that. */
static void a_reclaimer_is_gone_when_another_is_set(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_any();
    slow_take t = {pool_open(drv, 1),
                   {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false, false, false}};
    fcdp_phys page;
    pthread_t taker, opener;
    assert_ok(fcdp__pool_take(t.pool, HOLDER_OTHERS, 1, &page));
    fcdp__pool_set_reclaimer(t.pool, FCDP_RECLAIM_EVICT, slow_reclaim, NULL, &t.s);
    pthread_create(&taker, NULL, slow_take_main, &t);
    pthread_mutex_lock(&t.s.mutex);
    while (!t.s.entered) pthread_cond_wait(&t.s.changed, &t.s.mutex);
    pthread_mutex_unlock(&t.s.mutex);
    pthread_create(&opener, NULL, slow_leave_main, &t.s);
    fcdp__pool_set_reclaimer(t.pool, FCDP_RECLAIM_EVICT, NULL, NULL, NULL);
    assert_true(t.s.left);
    pthread_join(opener, NULL);
    pthread_join(taker, NULL);
    fcdp__pool_give(t.pool, HOLDER_OTHERS, 1, &page);
    pool_close(t.pool, drv);
}

/* ---- beside another allocator of the process ---- */

/* Another pool on the same device: it keeps what was given back to it. */
typedef struct neighbour {
    fcdp_pool *pool;
    unsigned n_asked;
    size_t n_wanted;
} neighbour;

static size_t neighbour_reclaim(void *ctx, size_t n_pages) {
    neighbour *n = ctx;
    n->n_asked++;
    n->n_wanted = n_pages;
    return fcdp__pool_trim(n->pool) / PAGE;
}

/* A device of 8 pages, of which another allocator uses 3 and keeps 4 without using them. */
typedef struct street {
    fcdp_driver *drv;
    fcdp_pool *pool;
    neighbour other;
    fcdp_phys used[7];
} street;

static street *street_open(void) {
    street *s = calloc(1, sizeof *s);
    s->drv = driver_open_sim();
    simgpu_set_capacity(8 * PAGE);
    s->pool = pool_open(s->drv, 8);
    s->other.pool = pool_open(s->drv, 8);
    assert_ok(fcdp__pool_take(s->other.pool, HOLDER_TENSORS, 7, s->used));
    fcdp__pool_give(s->other.pool, HOLDER_TENSORS, 4, s->used + 3);
    fcdp__pool_set_reclaimer(s->pool, FCDP_RECLAIM_NEIGHBOUR, neighbour_reclaim, NULL, &s->other);
    return s;
}

static void street_close(street *s) {
    fcdp__pool_give(s->other.pool, HOLDER_TENSORS, 3, s->used);
    fcdp__pool_destroy(s->other.pool);
    pool_close(s->pool, s->drv);
    free(s);
}

static void a_full_device_asks_the_neighbour_once(void **state) {
    (void)state;
    for (int block = 0; block < 2; block++) {
        street *s = street_open();
        fcdp_phys pages[8];
        fcdp_status (*take)(fcdp_pool *, fcdp_holder, size_t, fcdp_phys *) = block ? fcdp__pool_take_handle
                                                                                   : fcdp__pool_take;
        assert_ok(take(s->pool, HOLDER_OTHERS, 4, pages)); /* 1 was free */
        assert_int_equal(s->other.n_asked, 1);
        assert_int_equal(s->other.n_wanted, block ? 4 : 3);
        /* it has nothing left: one free */
        assert_int_equal(fcdp__pool_take(s->pool, HOLDER_OTHERS, 2, pages + 4), FCDP_ERR_NO_DEVICE_MEM);
        assert_text("other allocations fill the device");
        assert_int_equal(s->other.n_asked, 2);
        if (block)
            fcdp__pool_give_handle(s->pool, HOLDER_OTHERS, 4, pages[0]);
        else
            fcdp__pool_give(s->pool, HOLDER_OTHERS, 4, pages);
        street_close(s);
    }
}

/* Beyond the budget its memory would be of no use; and what is not all that lacks
 * is no reason to ask again and again. */
static void the_neighbour_is_left_alone_where_it_cannot_help(void **state) {
    (void)state;
    street *s = street_open();
    fcdp_phys pages[8];
    assert_ok(fcdp__pool_set_budget(s->pool, 3 * PAGE));
    assert_int_equal(fcdp__pool_take(s->pool, HOLDER_OTHERS, 4, pages), FCDP_ERR_NO_DEVICE_MEM);
    assert_ok(fcdp__pool_take(s->pool, HOLDER_OTHERS, 1, pages));
    assert_int_equal(fcdp__pool_take(s->pool, HOLDER_OTHERS, 3, pages + 1), FCDP_ERR_NO_DEVICE_MEM);
    assert_int_equal(s->other.n_asked, 0);
    assert_ok(fcdp__pool_set_budget(s->pool, 8 * PAGE));
    /* 4 of 5 missing */
    assert_int_equal(fcdp__pool_take(s->pool, HOLDER_OTHERS, 6, pages + 1), FCDP_ERR_NO_DEVICE_MEM);
    assert_int_equal(s->other.n_asked, 1);
    fcdp__pool_give(s->pool, HOLDER_OTHERS, 1, pages);
    street_close(s);
}

/* A reclaimer of blocks that nobody uses, as regions' slots are. */
typedef struct slots {
    fcdp_pool *pool;
    fcdp_phys blocks[3];
    size_t n;
} slots;

static size_t slots_reclaim(void *ctx, size_t n_pages) {
    slots *s = ctx;
    size_t n_back = 0;
    for (; s->n > 0 && n_back < n_pages; n_back++)
        fcdp__pool_give_handle(s->pool, HOLDER_OTHERS, 1, s->blocks[--s->n]);
    return n_back;
}

/* The neighbour's take fails, asks the pool, and goes on with the memory: of the idle
 * pages all, of the rest what it asks for. */
static void the_pool_yields_what_it_does_not_use(void **state) {
    (void)state;
    street *s = street_open();
    slots unused = {.pool = s->pool};
    fcdp_phys pages[5], more[5];
    for (; unused.n < 3; unused.n++)
        assert_ok(fcdp__pool_take_handle(s->pool, HOLDER_OTHERS, 1, &unused.blocks[unused.n]));
    assert_ok(fcdp__pool_take(s->pool, HOLDER_OTHERS, 2, pages));
    fcdp__pool_give(s->pool, HOLDER_OTHERS, 1, pages);
    fcdp__pool_set_reclaimer(s->pool, FCDP_RECLAIM_EVICT, slots_reclaim, NULL, &unused);
    s->other.n_asked = 0;
    assert_false(take_at_once(s->other.pool, HOLDER_TENSORS, 2, more));
    assert_int_equal(fcdp__pool_yield(s->pool, PAGE + 1), 2 * PAGE);
    assert_counts(s->pool, 3, 0);
    assert_true(take_at_once(s->other.pool, HOLDER_TENSORS, 2, more));
    assert_int_equal(unused.n, 2);
    assert_int_equal(fcdp__pool_yield(s->pool, SIZE_MAX), 2 * PAGE);
    assert_true(take_at_once(s->other.pool, HOLDER_TENSORS, 2, more + 2));
    assert_int_equal(fcdp__pool_yield(s->pool, SIZE_MAX), 0); /* the last page is in use */
    assert_int_equal(s->other.n_asked, 0);                    /* nobody asks it for itself */
    fcdp__pool_give(s->pool, HOLDER_OTHERS, 1, pages + 1);
    fcdp__pool_give(s->other.pool, HOLDER_TENSORS, 4, more);
    fcdp__pool_set_reclaimer(s->pool, FCDP_RECLAIM_EVICT, NULL, NULL, NULL);
    street_close(s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pages_are_reused_not_released),
        cmocka_unit_test(the_peak_is_kept_and_reset),
        cmocka_unit_test(the_budget_holds_and_the_text_tells_it),
        cmocka_unit_test(holders_are_counted_apart),
        cmocka_unit_test(another_budget_binds_at_once_and_takes_nothing_away),
        cmocka_unit_test(room_is_what_others_leave),
        cmocka_unit_test(no_budget_means_what_is_free),
        cmocka_unit_test(a_take_asks_for_what_is_missing),
        cmocka_unit_test(a_hopeless_take_evicts_nothing),
        cmocka_unit_test(a_full_device_is_reclaimed_too),
        cmocka_unit_test(other_driver_errors_pass_through),
        cmocka_unit_test(a_large_handle_counts_as_its_pages),
        cmocka_unit_test(a_block_counts_as_its_pages),
        cmocka_unit_test(a_block_keeps_to_the_budget),
        cmocka_unit_test(idle_pages_leave_for_a_block_and_no_more_than_must),
        cmocka_unit_test(a_smaller_budget_binds_blocks_too),
        cmocka_unit_test(a_block_asks_the_reclaimers_in_their_order),
        cmocka_unit_test(a_block_on_a_full_device),
        cmocka_unit_test(every_failing_call_loses_no_block),
        cmocka_unit_test(a_reclaimer_is_gone_when_another_is_set),
        cmocka_unit_test(a_full_device_asks_the_neighbour_once),
        cmocka_unit_test(the_neighbour_is_left_alone_where_it_cannot_help),
        cmocka_unit_test(the_pool_yields_what_it_does_not_use),
        cmocka_unit_test(misuse_aborts),
        cmocka_unit_test(takers_with_room_are_never_refused),
        cmocka_unit_test(takers_with_little_room_share_it),
        cmocka_unit_test(takers_reclaim_from_each_other),
        cmocka_unit_test(takers_reclaim_on_a_full_device),
        cmocka_unit_test(takers_of_pages_and_of_blocks_with_room),
        cmocka_unit_test(takers_of_pages_and_of_blocks_with_little_room),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
