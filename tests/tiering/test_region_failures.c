/* One region at a time: calls that fail, peers that are late or gone, touches of what was released,
 * misuse. */
#include "tests/log_text.h"
#include "tests/tiering/region_specs.h"

/* jemalloc takes all of its locks before a fork, more than the thread
 * sanitizer's lock order detector can hold (64). */
const char *__tsan_default_options(void);
__attribute__((visibility("default"))) const char *__tsan_default_options(void) {
    return "detect_deadlocks=0";
}

/* ---- failures ---- */

/* A caller that was told that a copy failed may reuse the memory: no copy of it may land later,
 * and the pages pass on only behind it. */
static void a_call_that_fails_half_way_leaves_nothing_unordered(void **state) {
    (void)state;
    static const char *const calls[] = {"cuEventRecord", "cuMemcpyDtoHAsync", "cuStreamWriteValue32",
                                        "cuStreamWaitEvent"};
    for (size_t c = 0; c < sizeof calls / sizeof calls[0]; c++)
        for (unsigned long nth = 1; nth <= 4; nth++) {
            node n;
            group g, next;
            node_open(&n, 2, 2, false);
            group_open(&g, &n, "unrecorded", SPECS, N_SPECS, 13);
            group_open(&next, &n, "next", SPECS, N_SPECS, 14);
            group_fill(&g, BOTH, FILL_KEPT, 0);
            gate held = gate_make(&n);
            for (int d = 0; d < FCDP_N_DIRECTIONS; d++)
                gate_hold(&held, fcdp__tiering_stream(n.ranks[0].tiering, (fcdp_direction)d));
            fcdp_piece own = fcdp__layout_slice(g.layout, 0, 0);
            assert_int_equal(simgpu_fail_nth(calls[c], nth, CUDA_UNKNOWN), 0);
            fcdp_status store = fcdp__region_store(g.regions[0], 1, (fcdp_piece_list){&own, 1},
                                                   fcdp__region_ready(g.regions[0]));
            assert_int_equal(state_of(g.regions[0]).span[0].stored, !store);
            (void)simgpu_fail_nth(NULL, 0, 0);
            group_release(&g, false);
            group_fill(&next, BOTH, FILL_KEPT, MS); /* on the same pages */
            assert_true(next.regions[0]->slot == g.regions[0]->slot);
            gate_open(&held);
            node_sync(&n); /* races would show */
            if (!store) assert_host_slice(&g, 0, 0, 0, 1);
            group_release(&next, false);
            gate_destroy(&held);
            group_close(&next);
            group_close(&g);
            node_close(&n);
        }
}

/* A failed eviction has not begun, or is over: the region is what it was, and the next one works. */
static void a_failed_eviction_leaves_the_region_kept(void **state) {
    (void)state;
    static const char *const calls[] = {"cuMemcpyDtoHAsync", "cuEventRecord", "cuStreamWriteValue32"};
    for (size_t c = 0; c < sizeof calls / sizeof calls[0]; c++) {
        node n;
        group g;
        fcdp_phys block;
        node_open(&n, 2, 1, false);
        group_open(&g, &n, c ? "stays" : "", SPECS, N_SPECS, 15);
        group_fill(&g, BOTH, FILL_KEPT, 0);
        group_release(&g, true);
        assert_int_equal(simgpu_fail_nth(calls[c], 1, CUDA_UNKNOWN), 0);
        log_keep(FCDP_LOG_WARN);
        fcdp_status status = fcdp__pool_take_handle(n.ranks[0].pool, FCDP_HOLDER_TENSORS, 1, &block);
        char says[128];
        snprintf(says, sizeof says, "warning: '%s' stays on the device, as it cannot be evicted: %s",
                 c ? "stays" : "the root", calls[c]);
        assert_says(log_kept(), says);
        assert_int_equal(status, FCDP_ERR_NO_DEVICE_MEM);
        assert_true(state_of(g.regions[0]).kept);
        for (uint32_t s = 0; s < 2; s++) assert_span(g.regions[0], s, true, false, false, 1);
        pages_squeeze(&n, 0, 1);
        step(fcdp__region_acquire(g.regions[0]));
        for (uint32_t s = 0; s < 2; s++) region_restore(&g, 0, s, true);
        region_compute(&g, 0, 0);
        region_release(&g, 0, false);
        group_close(&g);
        node_close(&n);
    }
}

/* The event that says when a use ends may fail: then its end is waited for. */
static void a_release_without_an_event_waits(void **state) {
    (void)state;
    for (int keep = 0; keep < 2; keep++) {
        node n;
        group g, next;
        _Atomic bool done = false;
        node_open(&n, 1, 1, false);
        group_open(&g, &n, "first", SPECS, N_SPECS, 16);
        group_open(&next, &n, "second", SPECS, N_SPECS, 17);
        group_fill(&g, BOTH, FILL_SLICE, 2 * MS);
        pause_enqueue(n.ranks[0].compute, 20 * MS, &done);
        assert_int_equal(simgpu_fail_nth("cuEventRecord", 1, CUDA_UNKNOWN), 0);
        group_release(&g, keep);
        assert_true(done);
        assert_int_equal(state_of(g.regions[0]).kept, keep);
        group_fill(&next, BOTH, FILL_SLICE, 0);
        group_release(&next, false);
        group_restore(&g, true, 0);
        group_release(&g, false);
        group_close(&g);
        group_close(&next);
        node_close(&n);
    }
}

/* ---- the end ---- */

static void destroying_waits_for_the_device(void **state) {
    (void)state;
    for (int how = 0; how < 4; how++) { /* released, kept, in use; with exact mapping */
        node n;
        group g;
        _Atomic bool done = false;
        node_open(&n, 1, 2, how == 3);
        group_open(&g, &n, "ends", SPECS, N_SPECS, 18);
        group_fill(&g, BOTH, FILL_SLICE, MS);
        if (how == 2) {
            node_sync(&n);
            pause_enqueue(n.ranks[0].gather, 20 * MS, &done);
            region_fill(&g, 0, BOTH, FILL_SLICE);
        } else {
            pause_enqueue(n.ranks[0].compute, 20 * MS, &done);
            group_release(&g, how == 1);
        }
        group_close(&g);
        assert_true(done);
        assert_int_equal(pool_stats_of(&n, 0).live_pages, 0);
        node_close(&n);
    }
}

/* The driver's, by the linker: simgpu fails one call, and these are tried twice. */
static int n_syncs_to_fail, n_unmaps_to_fail;
fcdp_status __real_fcdp__driver_event_sync(fcdp_driver *drv, fcdp_event event);
fcdp_status __real_fcdp__driver_unmap(fcdp_driver *drv, fcdp_dptr at, size_t bytes);
fcdp_status __wrap_fcdp__driver_event_sync(fcdp_driver *drv, fcdp_event event);
fcdp_status __wrap_fcdp__driver_unmap(fcdp_driver *drv, fcdp_dptr at, size_t bytes);

__attribute__((visibility("default"))) fcdp_status __wrap_fcdp__driver_event_sync(fcdp_driver *drv,
                                                                                  fcdp_event event) {
    if (n_syncs_to_fail && n_syncs_to_fail--) return fcdp__fail(FCDP_ERR_DRIVER, "no sync");
    return __real_fcdp__driver_event_sync(drv, event);
}

__attribute__((visibility("default"))) fcdp_status __wrap_fcdp__driver_unmap(fcdp_driver *drv, fcdp_dptr at,
                                                                             size_t bytes) {
    if (n_unmaps_to_fail && n_unmaps_to_fail--) return fcdp__fail(FCDP_ERR_DRIVER, "no unmap");
    return __real_fcdp__driver_unmap(drv, at, bytes);
}

static void an_end_that_fails_is_said(void **state) {
    (void)state;
    for (int unmaps = 0; unmaps < 2; unmaps++) {
        node n;
        group g;
        node_open(&n, 1, 2, false);
        group_open(&g, &n, unmaps ? "" : "ends", SPECS, N_SPECS, 21);
        group_fill(&g, BOTH, FILL_SLICE, 0);
        group_release(&g, false);
        node_sync(&n);
        log_keep(FCDP_LOG_WARN);
        *(unmaps ? &n_unmaps_to_fail : &n_syncs_to_fail) = 2;
        group_close(&g);
        assert_says(log_kept(),
                    unmaps ? "warning: the device memory of 'the root' cannot be unmapped: no unmap; "
                             "this is tried once more\n"
                           : "warning: 'ends' is destroyed while the device may still use it: no "
                             "sync\n");
        assert_int_equal(n_unmaps_to_fail + n_syncs_to_fail, 0);
        node_close(&n);
    }
}

/* ---- what peers that are late or gone leave ---- */

static void looking_says_who_is_late_and_opening_lets_all_pass(void **state) {
    (void)state;
    node n;
    group g;
    node_open(&n, 2, 4, false);
    group_open(&g, &n, "the third layer", SPECS, N_SPECS, 19);
    assert_int_equal(fcdp__region_query_peers(g.regions[0], 0), FCDP_PENDING);
    assert_int_equal(fcdp__region_query_peers(g.regions[0], 3600000ull * MS),
                     FCDP_PENDING); /* nothing is awaited */
    step(fcdp__region_acquire(g.regions[0]));
    region_fill(&g, 0, BOTH, FILL_HOST); /* and rank 1 never comes */
    assert_int_equal(fcdp__region_query_peers(g.regions[0], 1000ull * MS), FCDP_PENDING);
    assert_int_equal(fcdp__region_query_peers(g.regions[0], 3600000ull * MS), FCDP_ERR_TIMEOUT);
    assert_text("the third layer");
    assert_text("slice 1");
    assert_false(has_passed(&n, fcdp__region_ready(g.regions[0])));
    fcdp__region_end_waits(g.regions[0]);
    assert_ok(fcdp__driver_event_sync(n.drv, fcdp__region_ready(g.regions[0])));
    assert_int_equal(fcdp__region_query_peers(g.regions[0], 3600000ull * MS), FCDP_PENDING);
    fcdp__region_invalidate(g.regions[0], BOTH);
    region_release(&g, 0, false);
    group_close(&g);
    node_close(&n);
}

/* The comm is not checked again between a read's copy and the use of its bytes: an error, not what is
 * there. */
static void a_read_of_what_a_peer_has_not_stored_fails(void **state) {
    (void)state;
    node n;
    group g;
    node_timeout_s = 0.3;
    node_open(&n, 2, 4, false);
    node_timeout_s = 20;
    group_open(&g, &n, "the head", SPECS, N_SPECS, 20);
    step(fcdp__region_acquire(g.regions[0]));
    region_fill(&g, 0, BOTH, FILL_HOST); /* and rank 1 never comes */
    region_release(&g, 0, false);
    fcdp_dptr nowhere = {64};
    assert_int_equal(
        fcdp__region_read(g.regions[0], 1, (fcdp_piece){0, 64}, nowhere, fcdp__region_ready(g.regions[0])),
        FCDP_ERR_TIMEOUT);
    assert_text("the head");
    assert_text("slice 1");
    fcdp__region_end_waits(g.regions[0]);
    fcdp__region_invalidate(g.regions[0], BOTH);
    group_close(&g);
    node_close(&n);
}

/* ---- a touch of what was released ---- */

/* Not in a forked child: the simulated device's pages are not in it, so everything would fault there. */
static sigjmp_buf fault_exit;

static void fault_take(int signal_number) {
    (void)signal_number;
    siglongjmp(fault_exit, 1);
}

static bool faults(const volatile char *at) {
    struct sigaction take = {.sa_handler = fault_take}, before;
    assert_int_equal(sigaction(SIGSEGV, &take, &before), 0);
    bool faulted = sigsetjmp(fault_exit, 1) != 0;
    if (!faulted) (void)*at;
    assert_int_equal(sigaction(SIGSEGV, &before, NULL), 0);
    return faulted;
}

static void with_exact_mapping_a_touch_of_a_released_region_faults(void **state) {
    (void)state;
    node n;
    group g;
    node_open(&n, 1, 2, true);
    group_open(&g, &n, "gone", SPECS, N_SPECS, 9);
    char *at = (char *)(uintptr_t)fcdp__region_base(g.regions[0]).addr;
    assert_true(faults(at));
    group_fill(&g, BOTH, FILL_SLICE, 0);
    node_sync(&n);
    assert_false(faults(at));
    group_release(&g, false);
    assert_true(faults(at));
    assert_true(faults(at + g.layout->bytes - 1));
    group_restore(&g, true, 0);
    node_sync(&n);
    assert_false(faults(at));
    group_release(&g, true); /* kept: it may be read */
    assert_false(faults(at));
    group_close(&g);
    node_close(&n);
}

/* ---- misuse ---- */

static void acquire_twice(void *arg) {
    (void)!fcdp__region_acquire(arg);
}
static void release_idle(void *arg) {
    (void)!fcdp__region_release(arg, NULL, false);
}
static void order_idle(void *arg) {
    (void)!fcdp__region_order(arg, NULL);
}
static void fill_idle(void *arg) {
    (void)!fcdp__region_begin_fill(arg, BOTH);
}

static void misuse_aborts(void **state) {
    (void)state;
    node n;
    group g;
    int level = fcdp__check_level;
    node_open(&n, 1, 2, false);
    group_open(&g, &n, "misused", SPECS, N_SPECS, 20);
    fcdp__check_level = 1;
    assert_dies(fill_idle, g.regions[0], SIGABRT);
    assert_dies(order_idle, g.regions[0], SIGABRT);
    assert_dies(release_idle, g.regions[0], SIGABRT);
    group_acquire(&g);
    assert_dies(acquire_twice, g.regions[0], SIGABRT);
    group_release(&g, false);
    fcdp__check_level = level;
    group_close(&g);
    node_close(&n);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_call_that_fails_half_way_leaves_nothing_unordered),
        cmocka_unit_test(a_failed_eviction_leaves_the_region_kept),
        cmocka_unit_test(a_release_without_an_event_waits),
        cmocka_unit_test(destroying_waits_for_the_device),
        cmocka_unit_test(an_end_that_fails_is_said),
        cmocka_unit_test(looking_says_who_is_late_and_opening_lets_all_pass),
        cmocka_unit_test(a_read_of_what_a_peer_has_not_stored_fails),
        cmocka_unit_test(with_exact_mapping_a_touch_of_a_released_region_faults),
        cmocka_unit_test(misuse_aborts),
    };
    return cmocka_run_group_tests_name("tiering_region_failures", tests, NULL, NULL);
}
