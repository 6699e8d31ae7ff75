/* Regions that are mapped onto host memory: they take nothing of the device, are never moved, and hold what
 * was gathered. */
#include "tests/fail_release.h"
#include "tests/log_text.h"
#include "tests/tiering/slots_world.h"

#include "tiering/mapped.h"

enum { N_PAGES = 3 };

static size_t taken_bytes(const node *n) {
    size_t now, peak;
    fcdp__account_usage(n->account, &now, &peak);
    return now;
}

static size_t device_bytes(void) {
    struct simgpu_live live;
    simgpu_live(&live);
    return live.device_bytes;
}

/* One rank, two pages of device memory, a region of three that is mapped, and one that is not. */
typedef struct world {
    node n;
    group mapped, other;
    size_t blocks_bytes; /* of the host budget, before the map */
} world;

static void world_open(world *w, uint32_t n_ranks, bool exact) {
    node_open(&w->n, n_ranks, 2, exact);
    group_open_pages(&w->mapped, &w->n, N_PAGES, 1);
    group_open_pages(&w->other, &w->n, 2, 2);
    w->blocks_bytes = taken_bytes(&w->n);
    for (uint32_t r = 0; r < n_ranks; r++)
        assert_ok(fcdp__region_map_host(w->mapped.regions[r], w->n.account, 0));
}

static void world_close(world *w) {
    group_close(&w->mapped);
    group_close(&w->other);
    assert_int_equal(taken_bytes(&w->n), 0);
    node_close(&w->n);
}

static void it_takes_host_memory_of_each_rank_and_none_of_the_device(void **state) {
    (void)state;
    world w;
    world_open(&w, 2, false);
    assert_int_equal(taken_bytes(&w.n) - w.blocks_bytes, 2 * N_PAGES * PAGE);
    group_fill(&w.mapped, TRAINABLE, FILL_HOST, MS);
    node_sync(&w.n);
    assert_int_equal(device_bytes(), 0);
    for (uint32_t r = 0; r < 2; r++) {
        assert_int_equal(pool_stats_of(&w.n, r).live_pages, 0);
        assert_int_equal(stats_of(&w.n, r).mapped_bytes, N_PAGES * PAGE);
    }
    group_release(&w.mapped, true);
    world_close(&w);
}

/* The other region needs both pages of the device, and takes them back and forth. */
static void nothing_is_restored_and_nothing_evicted(bool exact) {
    world w;
    world_open(&w, 1, exact);
    group_fill(&w.mapped, TRAINABLE, FILL_KEPT, 0);
    group_release(&w.mapped, true);
    group_fill(&w.other, TRAINABLE, FILL_HOST, 0);
    group_release(&w.other, true);
    calls before = calls_now();
    for (int i = 0; i < 3; i++) {
        group_restore(&w.mapped, true, MS);
        group_release(&w.mapped, true);
    }
    node_sync(&w.n);
    calls made = calls_since(before);
    made.blocking = 0; /* the test's */
    assert_no_calls(made);
    pages_squeeze(&w.n, 0, 2);
    assert_int_equal(fcdp__tiering_reclaim(w.n.ranks[0].tiering, 1), 0);
    assert_int_equal(stats_of(&w.n, 0).n_evictions, 1); /* the other's */
    assert_span(w.mapped.regions[0], FCDP_SPAN_TRAINABLE, true, false, false, 1);
    group_restore(&w.mapped, true, MS);
    group_release(&w.mapped, true);
    assert_int_equal(stats_of(&w.n, 0).n_whole_loads, 0);
    assert_int_equal(stats_of(&w.n, 0).h2d_bytes, 0);
    world_close(&w);
}

static void with_slots_nothing_is_moved(void **state) {
    (void)state;
    nothing_is_restored_and_nothing_evicted(false);
}

static void with_exact_mapping_nothing_is_moved(void **state) {
    (void)state;
    nothing_is_restored_and_nothing_evicted(true);
}

static void a_sleep_leaves_it_as_it_is(void **state) {
    (void)state;
    world w;
    world_open(&w, 1, false);
    group_fill(&w.mapped, TRAINABLE, FILL_KEPT, 0);
    group_release(&w.mapped, true);
    group_fill(&w.other, TRAINABLE, FILL_HOST, 0);
    group_release(&w.other, true);
    assert_ok(fcdp__tiering_sleep(w.n.ranks[0].tiering));
    assert_int_equal(pool_stats_of(&w.n, 0).live_pages, 0);
    group_restore(&w.mapped, true, MS);
    group_release(&w.mapped, true);
    assert_int_equal(stats_of(&w.n, 0).n_whole_loads, 0);
    world_close(&w);
}

/* As where what the program wrote into it cannot be told. */
static void what_is_not_kept_comes_from_the_hosts_copy(void **state) {
    (void)state;
    world w;
    world_open(&w, 2, false);
    for (uint32_t epoch = 1; epoch <= 3; epoch++) {
        group_fill(&w.mapped, TRAINABLE, FILL_HOST, MS);
        group_release(&w.mapped, false);
        assert_span(w.mapped.regions[0], FCDP_SPAN_TRAINABLE, false, true, false, epoch);
        group_restore(&w.mapped, epoch % 2, MS);
        group_release(&w.mapped, true);
    }
    for (uint32_t r = 0; r < 2; r++) assert_int_equal(stats_of(&w.n, r).n_maps, 0);
    node_sync(&w.n);
    world_close(&w);
}

/* Each driver call of it in turn. */
static void a_driver_that_refuses_leaves_an_ordinary_region(void **state) {
    (void)state;
    static const char *const entries[] = {"cuMemCreate", "cuMemMap", "cuMemSetAccess"};
    enum { NOT_SUPPORTED = 801, OUT_OF_MEMORY = 2 };
    for (int i = 0; i < 2 * 3; i++) {
        node n;
        group g;
        node_open(&n, 1, N_PAGES, false);
        group_open_pages(&g, &n, N_PAGES, 1);
        size_t before = taken_bytes(&n);
        assert_int_equal(simgpu_fail_nth(entries[i / 2], 1, i % 2 ? NOT_SUPPORTED : OUT_OF_MEMORY), 0);
        fcdp_status status = fcdp__region_map_host(g.regions[0], n.account, 0);
        assert_true(status < 0);
        assert_non_null(strstr(fcdp_error_text(), entries[i / 2]));
        if (i == 0) assert_int_equal(status, FCDP_ERR_NO_HOST_MEM);
        if (i == 1) assert_int_equal(status, FCDP_ERR_UNSUPPORTED);
        assert_false(fcdp__region_is_mapped_on_host(g.regions[0]));
        assert_int_equal(taken_bytes(&n), before);
        group_fill(&g, TRAINABLE, FILL_HOST, MS);
        group_release(&g, false);
        group_restore(&g, true, MS);
        assert_int_equal(pool_stats_of(&n, 0).live_pages, N_PAGES);
        group_release(&g, true);
        group_close(&g);
        node_close(&n);
    }
}

static void a_probe_leaves_nothing_behind(void **state) {
    (void)state;
    static const char *const entries[] = {"cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"};
    node n;
    node_open(&n, 1, 1, false);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(simgpu_fail_nth(entries[i], 1, 801), 0);
        assert_true(fcdp__mapped_probe(n.drv, -1) < 0);
        assert_non_null(strstr(fcdp_error_text(), entries[i]));
    }
    assert_ok(fcdp__mapped_probe(n.drv, -1));
    node_close(&n);
}

static void a_spent_budget_refuses(void **state) {
    (void)state;
    node n;
    group g;
    node_open(&n, 1, N_PAGES, false);
    group_open_pages(&g, &n, N_PAGES, 1);
    size_t left = fcdp__account_budget_bytes(n.account) - taken_bytes(&n) - N_PAGES * PAGE + 1;
    assert_ok(fcdp__account_take(n.account, left));
    assert_int_equal(fcdp__region_map_host(g.regions[0], n.account, 0), FCDP_ERR_NO_HOST_MEM);
    fcdp__account_give(n.account, left);
    assert_ok(fcdp__region_map_host(g.regions[0], n.account, 0));
    group_close(&g);
    node_close(&n);
}

static void a_map_that_is_undone_leaves_an_ordinary_region(void **state) {
    (void)state;
    world w;
    world_open(&w, 1, false);
    assert_ok(fcdp__region_unmap_host(w.mapped.regions[0], FCDP_TIER_POLICY));
    assert_int_equal(taken_bytes(&w.n), w.blocks_bytes);
    assert_int_equal(stats_of(&w.n, 0).mapped_bytes, 0);
    group_fill(&w.other, TRAINABLE, FILL_HOST, MS);
    group_release(&w.other, true);
    assert_int_equal(fcdp__region_acquire(w.mapped.regions[0]), FCDP_ERR_NO_DEVICE_MEM); /* 3 pages of 2 */
    world_close(&w);
}

static void pages_that_the_driver_keeps_are_said(void **state) {
    (void)state;
    world w;
    world_open(&w, 1, false);
    log_keep(FCDP_LOG_WARN);
    n_releases_to_fail = 2;
    fcdp_status status = fcdp__region_unmap_host(w.mapped.regions[0], FCDP_TIER_POLICY);
    assert_says(log_kept(),
                "warning: FCDP_HOST_MAP: 6.29 MB of host memory stay in use until the process ends: no "
                "release\n");
    assert_ok(status);
    assert_int_equal(taken_bytes(&w.n), w.blocks_bytes);
    assert_ok(__real_fcdp__driver_phys_release(w.n.drv, unreleased));
    world_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_takes_host_memory_of_each_rank_and_none_of_the_device),
        cmocka_unit_test(with_slots_nothing_is_moved),
        cmocka_unit_test(with_exact_mapping_nothing_is_moved),
        cmocka_unit_test(a_sleep_leaves_it_as_it_is),
        cmocka_unit_test(what_is_not_kept_comes_from_the_hosts_copy),
        cmocka_unit_test(a_driver_that_refuses_leaves_an_ordinary_region),
        cmocka_unit_test(a_probe_leaves_nothing_behind),
        cmocka_unit_test(a_spent_budget_refuses),
        cmocka_unit_test(a_map_that_is_undone_leaves_an_ordinary_region),
        cmocka_unit_test(pages_that_the_driver_keeps_are_said),
    };
    return cmocka_run_group_tests_name("tiering_mapped", tests, NULL, NULL);
}
