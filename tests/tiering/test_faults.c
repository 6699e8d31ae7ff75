/* The fault run: a short schedule of gathers, stores, restores and evictions in which the n-th driver call fails, for
 * every n until the schedule passes untouched. Every step ends well or with a clean error; then it is done again and must
 * work; contents are right throughout, and at the end nothing lives and every pool is balanced. */
#include "tests/tiering/support.h"

static const fcdp_extent_spec SPECS[] = {
    {1500, FCDP_SPAN_FROZEN}, {1200, FCDP_SPAN_TRAINABLE}, {501, FCDP_SPAN_TRAINABLE}};
enum { N_SPECS = sizeof SPECS / sizeof SPECS[0], N_RANKS = 2, BOTH = FCDP_SPAN_MASK_ALL };

static void gather(group *g, uint32_t span_mask) {
    for (uint32_t r = 0; r < N_RANKS; r++) {
        step(fcdp__region_begin_use(g->regions[r]));
        fcdp__region_invalidate(g->regions[r], span_mask);
        span_fill(g, r, span_mask);
        fcdp__region_end_use(g->regions[r]);
    }
}

static void release(group *g) {
    for (uint32_t r = 0; r < N_RANKS; r++) {
        step(fcdp__region_store(g->regions[r], NULL));
        step(fcdp__region_drop(g->regions[r], NULL));
        assert_false(state_of(g->regions[r]).mapped);
    }
}

static void restore(group *g, bool whole) {
    for (uint32_t r = 0; r < N_RANKS; r++) {
        step(fcdp__region_begin_use(g->regions[r]));
        fcdp_region_state state = state_of(g->regions[r]);
        for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
            if (whole) {
                step(fcdp__region_load_whole(g->regions[r], s));
            } else if (!state.span[s].on_device) {
                step(fcdp__region_load_slice(g->regions[r], s));
                slices_arrive(g, r, s, state.span[s].epoch);
                fcdp__region_loaded(g->regions[r], s);
            }
            assert_content(g, r, s, state.span[s].epoch);
        }
        fcdp__region_end_use(g->regions[r]);
    }
}

static void schedule(void) {
    node n;
    group a, b;
    node_open(&n, N_RANKS, 1); /* one page per rank: each group's use evicts the other */
    group_open(&a, &n, "a", SPECS, N_SPECS, 1);
    group_open(&b, &n, "b", SPECS, N_SPECS, 2);
    gather(&a, BOTH);
    release(&a);
    gather(&b, BOTH);   /* kept */
    restore(&a, false); /* evicts b, dirty */
    restore(&b, true);  /* evicts a, clean */
    gather(&a, 1u << FCDP_SPAN_TRAINABLE);
    restore(&a, true);
    for (uint32_t r = 0; r < N_RANKS; r++) step(fcdp__region_evict(a.regions[r]));
    restore(&a, true);
    group_close(&a); /* mapped */
    group_close(&b);
    node_close(&n);
}

/* Returns the number of calls until the schedule ran to its end with the fault still to come. */
static unsigned long every_call_fails_once(int code) {
    unsigned long n = 1;
    steps_may_fail_once = true;
    for (;; n++) {
        simgpu_reset();
        assert_int_equal(simgpu_fail_nth(NULL, n, code), 0);
        schedule();
        if (simgpu_calls(NULL) < n) break;
    }
    steps_may_fail_once = false;
    simgpu_reset();
    return n;
}

static void run(int code) {
    fcdp_driver *drv = driver_open_sim();
    fcdp__driver_close(drv);
    fcdp_log_set_level(FCDP_LOG_QUIET);
    unsigned long n = every_call_fails_once(code);
    fcdp_log_set_level(FCDP_LOG_WARN);
    print_message("code %d: %lu driver calls, each failed once\n", code, n - 1);
    assert_true(n > 100);
}

static void an_unknown_error(void **state) {
    (void)state;
    run(CUDA_UNKNOWN);
}
static void out_of_memory(void **state) {
    (void)state;
    run(CUDA_OUT_OF_MEMORY);
}
static void not_ready(void **state) {
    (void)state;
    run(CUDA_NOT_READY);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(an_unknown_error), cmocka_unit_test(out_of_memory),
                                       cmocka_unit_test(not_ready)};
    return cmocka_run_group_tests_name("tiering_faults", tests, NULL, NULL);
}
