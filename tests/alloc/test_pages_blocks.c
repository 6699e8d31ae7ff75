/* Blocks of the page pool, which are many pages under one handle: they are counted, kept to the budget and
 * reclaimed as pages are. */
#include "tests/alloc/pool_world.h"

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
    assert_text("no device memory for 18.9 MB");
    assert_int_equal(fcdp__pool_take_handle(pool, HOLDER_OTHERS, SIZE_MAX, &untouched),
                     FCDP_ERR_NO_DEVICE_MEM);
    assert_ok(fcdp__pool_take(pool, HOLDER_TENSORS, 3, pages));
    assert_int_equal(fcdp__pool_take_handle(pool, HOLDER_OTHERS, 6, &untouched), FCDP_ERR_NO_DEVICE_MEM);
    assert_text("tensors 6.29 MB, others 0 B");
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
    assert_int_equal(caches.n, 2); /* no reclaimer is asked while the budget allows */
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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_large_handle_counts_as_its_pages),
        cmocka_unit_test(a_block_counts_as_its_pages),
        cmocka_unit_test(a_block_keeps_to_the_budget),
        cmocka_unit_test(idle_pages_leave_for_a_block_and_no_more_than_must),
        cmocka_unit_test(a_smaller_budget_binds_blocks_too),
        cmocka_unit_test(a_block_asks_the_reclaimers_in_their_order),
        cmocka_unit_test(a_block_on_a_full_device),
        cmocka_unit_test(every_failing_call_loses_no_block),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
