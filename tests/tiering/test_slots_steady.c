/* What a steady state of training calls: with slots no driver call for memory, with exact mapping one map
 * and one unmap a use. */
#include "tests/tiering/slots_world.h"

typedef struct training {
    node n;
    group g[MAX_GROUPS];
    int n_groups, window;
    bool paced;  /* the device keeps up with the host, which waits for it before every release */
    bool cyclic; /* the same order in every pass */
    unsigned n_uses;
} training;

static void training_use(training *t, int i, bool forward) {
    group *g = &t->g[i];
    bool first = !state_of(g->regions[0]).span[0].epoch;
    t->n_uses++;
    group_acquire(g);
    for (uint32_t r = 0; r < t->n.n; r++) {
        fcdp_region_state state = state_of(g->regions[r]);
        uint32_t stale = first ? BOTH : forward ? TRAINABLE : 0;
        for (uint32_t s = 0; s < 2; s++)
            if (!(stale & 1u << s) && !state.span[s].on_device) region_restore(g, r, s, i % 2 == 0);
        if (stale) region_fill(g, r, stale, i % 3 ? FILL_SLICE : FILL_HOST);
        region_compute(g, r, MS / 20);
    }
}

static void training_pass(training *t, bool forward) {
    for (uint32_t r = 0; r < t->n.n; r++) fcdp__tiering_begin_pass(t->n.ranks[r].tiering);
    for (int k = 0; k < t->n_groups + t->window - 1; k++) {
        int begins = k, ends = k - t->window + 1;
        bool mirrored = !forward && !t->cyclic;
        if (begins < t->n_groups) training_use(t, mirrored ? t->n_groups - 1 - begins : begins, forward);
        if (ends < 0) continue;
        if (t->paced) node_sync(&t->n);
        group_release(&t->g[mirrored ? t->n_groups - 1 - ends : ends], false);
    }
}

static void training_open(training *t, uint32_t n_ranks, int n_groups, int window, bool exact) {
    *t = (training){.n_groups = n_groups, .window = window};
    node_open(&t->n, n_ranks, 64, exact);
    groups_open(t->g, n_groups, &t->n);
}

static void training_close(training *t) {
    node_sync(&t->n);
    groups_close(t->g, t->n_groups);
    node_close(&t->n);
}

static void a_steady_step_calls_nothing(uint32_t n_ranks, int n_groups, int window, bool cyclic) {
    training t;
    training_open(&t, n_ranks, n_groups, window, false);
    t.cyclic = cyclic;
    for (int i = 0; i < 2; i++) training_pass(&t, true), training_pass(&t, false);
    uint64_t n_maps = stats_of(&t.n, 0).n_maps, n_waits = stats_of(&t.n, 0).n_waits;
    assert_int_equal(pool_stats_of(&t.n, 0).live_pages,
                     (size_t)window < (size_t)n_groups ? window : n_groups);
    calls before = calls_now();
    for (int i = 0; i < 3; i++) training_pass(&t, true), training_pass(&t, false);
    assert_no_calls(calls_since(before));
    assert_int_equal(stats_of(&t.n, 0).n_maps, n_maps);
    assert_int_equal(stats_of(&t.n, 0).n_waits, n_waits);
    assert_int_equal(n_maps, n_groups); /* each once, ever */
    training_close(&t);
}

static void a_steady_step_makes_no_driver_call_for_memory(void **state) {
    (void)state;
    for (int window = 1; window <= 4; window++)
        for (int n_groups = 1; n_groups <= 8; n_groups++)
            a_steady_step_calls_nothing(1, n_groups, window, false);
    a_steady_step_calls_nothing(1, 8, 2, true);
    a_steady_step_calls_nothing(1, 9, 3, true);
    a_steady_step_calls_nothing(3, 7, 3, false);
}

/* Exact mapping: a use is one map, one set-access and one unmap. Where the device keeps up with
 * the host the unmap is the release's. */
static void with_exact_mapping_a_use_is_one_map_and_one_unmap(void **state) {
    (void)state;
    for (int window = 1; window <= 3; window++) {
        training t;
        training_open(&t, 2, 6, window, true);
        t.paced = true;
        for (int i = 0; i < 2; i++) training_pass(&t, true), training_pass(&t, false);
        calls before = calls_now();
        t.n_uses = 0;
        for (int i = 0; i < 2; i++) training_pass(&t, true), training_pass(&t, false);
        calls c = calls_since(before);
        unsigned n_uses = t.n_uses * t.n.n;
        assert_int_equal(c.maps, n_uses);
        assert_int_equal(c.accesses, n_uses);
        assert_int_equal(c.unmaps, n_uses);
        assert_int_equal(c.creates + c.releases, 0);
        for (int i = 0; i < 6; i++) assert_false(state_of(t.g[i].regions[0]).mapped);
        /* the host runs ahead: a region that needs the pages unmaps the one before, and one that
         * finds its own still there maps nothing */
        t.paced = false;
        training_pass(&t, true), training_pass(&t, false);
        before = calls_now();
        t.n_uses = 0;
        for (int i = 0; i < 2; i++) training_pass(&t, true), training_pass(&t, false);
        c = calls_since(before);
        n_uses = t.n_uses * t.n.n;
        assert_true(c.maps <= n_uses && c.accesses == c.maps && c.unmaps <= n_uses);
        assert_true(c.maps > 0);
        /* a slot more where the device is further behind than it was before */
        assert_true(c.creates <= t.n.n * FCDP_SLOTS_PENDING);
        assert_int_equal(c.releases, 0);
        training_close(&t);
    }
}

/* At most one region is mapped onto a slot, so that no address shows another's bytes. */
static void with_exact_mapping_nobody_sees_anothers_pages(void **state) {
    (void)state;
    node n;
    group g[4];
    node_open(&n, 1, 4, true);
    groups_open(g, 4, &n);
    for (int round = 0; round < 3; round++)
        for (int i = 0; i < 4; i++) {
            group_fill(&g[i], BOTH, FILL_SLICE, MS / 2);
            for (int k = 0; k < 4; k++)
                assert_true(k == i || !slot_of(&g[k]) || slot_of(&g[k]) != slot_of(&g[i]));
            group_release(&g[i], false);
        }
    node_sync(&n);
    groups_close(g, 4);
    node_close(&n);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_steady_step_makes_no_driver_call_for_memory),
        cmocka_unit_test(with_exact_mapping_a_use_is_one_map_and_one_unmap),
        cmocka_unit_test(with_exact_mapping_nobody_sees_anothers_pages),
    };
    return cmocka_run_group_tests_name("tiering_slots_steady", tests, NULL, NULL);
}
