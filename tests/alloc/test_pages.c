/* The page pool: budget, reuse, reclaim from inside a take, exhaustion below the budget. */
#include <pthread.h>

#include "alloc/heap.h"
#include "tests/alloc/pool_world.h"
#include "tests/fail_release.h"
#include "tests/log_text.h"

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
    assert_text("no device memory for 8.39 MB of others");
    assert_text("the budget is 17.8 MB: others 10.5 MB, idle 2.1 MB");
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

/* A single holder takes all that the budget allows. */
static fcdp_phys *take_all(fcdp_pool *pool, size_t *n_out) {
    fcdp_pool_stats stats;
    fcdp__pool_stats(pool, &stats);
    *n_out = stats.budget_bytes / stats.page_bytes;
    fcdp_phys *pages = malloc(*n_out * sizeof *pages);
    assert_non_null(pages);
    assert_ok(fcdp__pool_take(pool, HOLDER_OTHERS, *n_out, pages));
    return pages;
}

static void what_is_left_to_others_is_there_when_they_come_late(void **state) {
    (void)state;
    enum { DEVICE_PAGES = 64, LATE_PAGES = 4 };
    static const struct {
        size_t headroom_bytes, budget_pages;
        bool late_comer_succeeds;
    } cases[] = {{0, DEVICE_PAGES, false},
                 {LATE_PAGES * PAGE, DEVICE_PAGES - LATE_PAGES, true},
                 {2ul << 30, DEVICE_PAGES * 7 / 8, true}}; /* of a small device, an eighth */
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fcdp_driver *others = driver_open_sim();
        fcdp_device device;
        fcdp_phys late;
        fcdp_pool_stats stats;
        simgpu_set_capacity(DEVICE_PAGES * (size_t)PAGE);
        log_keep(FCDP_LOG_INFO);
        fcdp_status opened = fcdp_device_open(FCDP_DRIVER_SIM, 0, NULL, 0, cases[i].headroom_bytes, false,
                                              &device);
        const char *said = log_kept();
        assert_ok(opened);
        if (i == 1)
            assert_says(
                said,
                "info: the device has 134 MB free: the budget is 126 MB, and 8.39 MB are left to others "
                "(FCDP_HEADROOM)\n");
        fcdp__pool_stats(device.pool, &stats);
        assert_int_equal(stats.budget_bytes, cases[i].budget_pages * PAGE);
        size_t n;
        fcdp_phys *pages = take_all(device.pool, &n), more;
        fcdp_status status = fcdp__driver_phys_create(others, LATE_PAGES * (size_t)PAGE, &late);
        assert_int_equal(status == FCDP_OK, cases[i].late_comer_succeeds);
        if (!status) { /* once they have gone, the budget is the limit */
            assert_ok(fcdp__driver_phys_release(others, late));
            assert_int_equal(fcdp__pool_take(device.pool, HOLDER_OTHERS, 1, &more), FCDP_ERR_NO_DEVICE_MEM);
            assert_text("lower FCDP_HEADROOM");
        }
        fcdp__pool_give(device.pool, HOLDER_OTHERS, n, pages);
        free(pages);
        fcdp_device_close(&device);
        fcdp__driver_close(others);
        assert_nothing_lives();
        simgpu_reset();
    }
}

/* ---- reclaim ---- */

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
    assert_text("the device has 0 B of 12.6 MB free");
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

static void pages_that_are_lost_are_said(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_sim();
    fcdp_pool *pool = pool_open(drv, 8);
    fcdp_phys pages[2];
    assert_ok(fcdp__pool_take(pool, HOLDER_OTHERS, 2, pages));
    fcdp__pool_give(pool, HOLDER_OTHERS, 2, pages);
    log_keep(FCDP_LOG_WARN);
    n_releases_to_fail = 2;
    (void)fcdp__pool_trim(pool);
    assert_says(log_kept(), "warning: 2.1 MB of device memory are lost until the process ends: no release\n");
    assert_ok(fcdp__driver_phys_release(drv, unreleased));
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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pages_are_reused_not_released),
        cmocka_unit_test(the_peak_is_kept_and_reset),
        cmocka_unit_test(the_budget_holds_and_the_text_tells_it),
        cmocka_unit_test(holders_are_counted_apart),
        cmocka_unit_test(another_budget_binds_at_once_and_takes_nothing_away),
        cmocka_unit_test(room_is_what_others_leave),
        cmocka_unit_test(no_budget_means_what_is_free),
        cmocka_unit_test(what_is_left_to_others_is_there_when_they_come_late),
        cmocka_unit_test(a_take_asks_for_what_is_missing),
        cmocka_unit_test(a_hopeless_take_evicts_nothing),
        cmocka_unit_test(a_full_device_is_reclaimed_too),
        cmocka_unit_test(other_driver_errors_pass_through),
        cmocka_unit_test(pages_that_are_lost_are_said),
        cmocka_unit_test(a_reclaimer_is_gone_when_another_is_set),
        cmocka_unit_test(misuse_aborts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
