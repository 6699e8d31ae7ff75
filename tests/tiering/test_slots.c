/* What regions do to each other: pages that pass on in stream order, which slot each gets, which one gives
 * way when memory is short. */
#include "tests/tiering/slots_world.h"

/* ---- pages pass on in stream order ---- */

typedef enum pending_kind { PENDING_COMPUTE, PENDING_D2H, PENDING_H2D, N_PENDING } pending_kind;

/* The first region's last operation of a kind is held on the device; the second gets its pages
 * at once, and writes them only then. */
static void a_slot_passes_on_behind(pending_kind kind, bool next_loads) {
    node n;
    group g[2];
    node_open(&n, 1, 1, false);
    groups_open(g, 2, &n);
    for (int i = 0; i < 2; i++) { /* both are in host memory, both mapped onto the one slot */
        group_fill(&g[i], BOTH, FILL_SLICE, 0);
        group_release(&g[i], false);
    }
    node_sync(&n);
    gate held = gate_make(&n);
    fcdp_stream streams[N_PENDING] = {n.ranks[0].compute,
                                      fcdp__tiering_stream(n.ranks[0].tiering, FCDP_TO_HOST),
                                      fcdp__tiering_stream(n.ranks[0].tiering, FCDP_TO_DEVICE)};
    calls before = calls_now();
    group_acquire(&g[0]);
    if (kind != PENDING_D2H) gate_hold(&held, streams[kind]);
    for (uint32_t s = 0; s < 2; s++) region_restore(&g[0], 0, s, true);
    region_compute(&g[0], 0, MS);
    if (kind == PENDING_D2H) {
        gate_hold(&held, streams[kind]);
        fcdp_piece all[] = {g[0].layout->span[0], g[0].layout->span[1]};
        assert_ok(fcdp__region_store(g[0].regions[0], BOTH, (fcdp_piece_list){all, 2},
                                     fcdp__region_ready(g[0].regions[0])));
    }
    group_release(&g[0], false);
    if (next_loads)
        group_restore(&g[1], true, MS);
    else
        group_fill(&g[1], BOTH, FILL_SLICE, MS);
    assert_true(slot_of(&g[0]) == slot_of(&g[1]));
    assert_no_calls(calls_since(before)); /* only the device waits */
    assert_false(has_passed(&n, fcdp__region_ready(g[1].regions[0])));
    gate_open(&held);
    group_release(&g[1], false);
    group_restore(&g[0], true, 0);
    group_release(&g[0], false);
    node_sync(&n);
    gate_destroy(&held);
    groups_close(g, 2);
    node_close(&n);
}

static void a_slot_passes_on_in_stream_order(void **state) {
    (void)state;
    for (int kind = 0; kind < N_PENDING; kind++) {
        a_slot_passes_on_behind((pending_kind)kind, false);
        a_slot_passes_on_behind((pending_kind)kind, true);
    }
}

/* A use that ended before it enqueued anything, or by an order alone, is no end of what was before it. */
static void the_order_passes_through_a_use_that_did_nothing(void **state) {
    (void)state;
    for (int orders = 0; orders < 2; orders++)
        for (int destroys = 0; destroys < 2; destroys++) {
            node n;
            group g[3];
            node_open(&n, 1, 1, false);
            groups_open(g, 3, &n);
            gate held = gate_make(&n);
            group_acquire(&g[0]);
            region_fill(&g[0], 0, BOTH, FILL_SLICE);
            gate_hold(&held, n.ranks[0].compute);
            region_compute(&g[0], 0, MS);
            group_release(&g[0], false);
            group_acquire(&g[1]);
            if (orders)
                assert_ok(fcdp__region_order(g[1].regions[0],
                                             fcdp__tiering_stream(n.ranks[0].tiering, FCDP_TO_DEVICE)));
            if (destroys)
                group_close(&g[1]);
            else
                assert_ok(fcdp__region_release(g[1].regions[0], n.ranks[0].gather, false));
            group_fill(&g[2], BOTH, FILL_SLICE, 0);
            assert_true(slot_of(&g[0]) == slot_of(&g[2]));
            assert_false(has_passed(&n, g[2].crossed[0]));
            gate_open(&held);
            group_release(&g[2], false);
            node_sync(&n);
            gate_destroy(&held);
            for (int i = 0; i < 3; i++)
                if (i != 1 || !destroys) group_close(&g[i]);
            node_close(&n);
        }
}

/* What a slot's last user waits for may come in another order on other ranks, where its copies run on other
 * streams: until it is over, the slot is not passed on to them. */
static void a_slot_passes_to_other_streams_once_its_user_is_through(void **state) {
    (void)state;
    node n;
    group g[2];
    fcdp_stream other[FCDP_N_DIRECTIONS];
    node_open(&n, 1, 2, false);
    groups_open(g, 2, &n);
    for (int d = 0; d < FCDP_N_DIRECTIONS; d++) assert_ok(fcdp__driver_stream_create(n.drv, &other[d]));
    fcdp__region_set_streams(g[1].regions[0], other);
    for (int holds = 0; holds < 2; holds++) {
        gate held = gate_make(&n);
        group_acquire(&g[0]);
        region_fill(&g[0], 0, BOTH, FILL_KEPT);
        if (holds) gate_hold(&held, n.ranks[0].compute);
        region_compute(&g[0], 0, 0);
        group_release(&g[0], false);
        if (!holds) node_sync(&n);
        group_acquire(&g[1]);
        assert_true((slot_of(&g[0]) == slot_of(&g[1])) == !holds);
        region_fill(&g[1], 0, BOTH, FILL_KEPT);
        group_release(&g[1], false);
        gate_open(&held);
        node_sync(&n);
        gate_destroy(&held);
    }
    groups_close(g, 2);
    for (int d = 0; d < FCDP_N_DIRECTIONS; d++) fcdp__driver_stream_destroy(n.drv, other[d]);
    node_close(&n);
}

/* The last user of a slot goes, or moves to another: the next user waits neither for
 * the dead nor for the other's new work. */
static void the_last_user_may_go_or_move(void **state) {
    (void)state;
    node n;
    group g[4];
    node_open(&n, 1, 3, false);
    groups_open(g, 4, &n);
    group_fill(&g[0], BOTH, FILL_SLICE, MS);
    group_release(&g[0], false);
    group_fill(&g[1], BOTH, FILL_SLICE, MS); /* the same slot */
    assert_true(slot_of(&g[1]) == slot_of(&g[0]));
    group_restore(&g[0], true, 0); /* finds it busy: another */
    assert_true(slot_of(&g[1]) != slot_of(&g[0]));
    gate held = gate_make(&n);
    gate_hold(&held, n.ranks[0].compute);
    group_release(&g[0], false);
    for (uint32_t s = 0; s < 2; s++) /* g[0] was its last user, and is held elsewhere */
        assert_ok(fcdp__region_order(g[1].regions[0], n.ranks[0].gather));
    fcdp_event here;
    assert_ok(fcdp__driver_event_create(n.drv, &here));
    assert_ok(fcdp__driver_event_record(n.drv, here, n.ranks[0].gather));
    assert_ok(fcdp__driver_event_sync(n.drv, here));
    fcdp__driver_event_destroy(n.drv, here);
    gate_open(&held);
    group_release(&g[1], false);
    group_close(&g[1]);
    for (const fcdp_slot *slot = n.ranks[0].tiering->slots; slot; slot = slot->next)
        assert_true(slot->last != g[1].regions[0]);
    group_fill(&g[2], BOTH, FILL_SLICE, 0);
    group_fill(&g[3], BOTH, FILL_SLICE, 0);
    group_release(&g[2], false);
    group_release(&g[3], false);
    node_sync(&n);
    gate_destroy(&held);
    group_close(&g[0]);
    group_close(&g[2]);
    group_close(&g[3]);
    node_close(&n);
}

/* ---- which slot ---- */

static void a_busy_slot_gives_another_and_then_ones_own(void **state) {
    (void)state;
    node n;
    group g[3];
    node_open(&n, 1, 3, false);
    groups_open(g, 3, &n);
    group_fill(&g[0], BOTH, FILL_SLICE, 0);
    group_release(&g[0], false);
    group_fill(&g[1], BOTH, FILL_SLICE, 0);
    fcdp_slot *shared = slot_of(&g[1]);
    assert_true(slot_of(&g[0]) == shared);
    group_restore(&g[0], true, 0); /* g[1] is in use there */
    assert_true(slot_of(&g[0]) != shared);
    assert_int_equal(pool_stats_of(&n, 0).live_pages, 2);
    assert_int_equal(stats_of(&n, 0).n_maps, 3);
    group_release(&g[0], true); /* kept: its slot is as busy as one in use */
    group_release(&g[1], true);
    group_fill(&g[2], BOTH, FILL_SLICE, 0);
    assert_int_equal(pool_stats_of(&n, 0).live_pages, 3);
    group_release(&g[2], false);
    for (int round = 0; round < 3; round++)
        for (int i = 0; i < 3; i++) { /* each has its own now */
            group_restore(&g[i], true, 0);
            group_release(&g[i], false);
        }
    assert_int_equal(stats_of(&n, 0).n_maps, 4);
    node_sync(&n);
    groups_close(g, 3);
    node_close(&n);
}

/* A use that touches every byte and leaves nothing. */
static void touch(group *g) {
    step(fcdp__region_acquire(g->regions[0]));
    step(fcdp__region_order(g->regions[0], g->node->ranks[0].gather));
    struct simgpu_kernel kernel = {
        .name = "touch",
        .duration_ns = MS / 50,
        .n_accesses = 1,
        .accesses = {{fcdp__region_base(g->regions[0]).addr, g->layout->bytes, 1}},
    };
    assert_int_equal(simgpu_launch(g->node->ranks[0].gather, &kernel), 0);
    step(
        fcdp__driver_event_record(g->node->drv, fcdp__region_ready(g->regions[0]), g->node->ranks[0].gather));
    step(
        fcdp__driver_stream_wait(g->node->drv, g->node->ranks[0].compute, fcdp__region_ready(g->regions[0])));
}

/* A loop without an end between its rounds, over a number of regions that the slots do not divide: each finds
 * its slot taken by the one in use before it. Two slots are enough, at a remap per use. */
static void an_order_that_the_slots_do_not_divide_costs_remaps_not_memory(void **state) {
    (void)state;
    enum { N = 5, N_ROUNDS = 6 };
    node n;
    group g[N];
    calls before = {0};
    node_open(&n, 1, 8, false);
    groups_open(g, N, &n);
    for (int k = 0; k < N * N_ROUNDS; k++) {
        if (k == 2 * N) before = calls_now();
        touch(&g[k % N]);
        if (k > 0) group_release(&g[(k - 1) % N], false);
    }
    calls c = calls_since(before);
    assert_int_equal(c.creates + c.releases, 0);
    assert_in_range(c.maps, 1, N * (N_ROUNDS - 2));
    assert_true(c.accesses == c.maps && c.unmaps == c.maps);
    assert_int_equal(pool_stats_of(&n, 0).live_pages, 2);
    group_release(&g[N - 1], false);
    groups_close(g, N);
    node_close(&n);
}

/* Forward and backward over regions of these sizes, `window` in use at once. */
static void sizes_pass(node *n, group *g, int n_groups, int window, bool forward) {
    fcdp__tiering_begin_pass(n->ranks[0].tiering);
    for (int k = 0; k < n_groups + window - 1; k++) {
        int begins = k, ends = k - window + 1;
        if (begins < n_groups) touch(&g[forward ? begins : n_groups - 1 - begins]);
        if (ends >= 0) group_release(&g[forward ? ends : n_groups - 1 - ends], false);
    }
}

static size_t most_at_once(const size_t *n_pages, int n_groups, int window) {
    size_t most = 0;
    for (int i = 0; i < n_groups; i++) {
        size_t sum = 0;
        for (int k = i; k < i + window && k < n_groups; k++) sum += n_pages[k];
        if (sum > most) most = sum;
    }
    return most;
}

/* The passes until one makes no call, or `n_passes` */
static int sizes_settle(const size_t *n_pages, int n_groups, int window, int n_passes, double *excess_out) {
    node n;
    group g[MAX_GROUPS];
    int settled = n_passes;
    node_pin = FCDP_PIN_NEVER; /* or every byte of it becomes real */
    node_open(&n, 1, 4096, false);
    for (int i = 0; i < n_groups; i++) group_open_pages(&g[i], &n, n_pages[i], (uint64_t)i);
    for (int pass = 0; pass < n_passes; pass++) {
        calls before = calls_now();
        sizes_pass(&n, g, n_groups, window, pass % 2 == 0);
        calls c = calls_since(before);
        if (c.creates + c.maps + c.unmaps + c.releases + c.blocking)
            settled = n_passes;
        else if (settled == n_passes)
            settled = pass;
    }
    *excess_out = (double)pool_stats_of(&n, 0).live_pages / (double)most_at_once(n_pages, n_groups, window);
    groups_close(g, n_groups);
    node_close(&n);
    node_pin = FCDP_PIN_AUTO;
    return settled;
}

static void mixed_sizes_settle(void **state) {
    (void)state;
    static const struct {
        int n, window;
        size_t n_pages[12];
    } models[] = {
        {8, 2, {20, 6, 6, 6, 6, 6, 6, 6}},       /* embedding and head in one root, equal layers */
        {9, 3, {20, 6, 6, 6, 6, 6, 6, 6, 1}},    /* and a norm of its own at the end */
        {10, 1, {8, 1, 8, 1, 8, 1, 8, 1, 8, 1}}, /* adapters between layers */
        {10, 2, {8, 1, 8, 1, 8, 1, 8, 1, 8, 1}},
        {12, 3, {16, 1, 1, 1, 16, 1, 1, 1, 16, 1, 1, 1}},
        {4, 1, {3, 4, 3, 4}},          /* across the bound between two classes */
        {6, 2, {4, 15, 4, 15, 4, 15}}, /* the ends of one */
        {3, 1, {1, 2, 3}},
    };
    for (size_t m = 0; m < sizeof models / sizeof models[0]; m++) {
        double excess;
        int settled = sizes_settle(models[m].n_pages, models[m].n, models[m].window, 10, &excess);
        print_message("model %zu: settled after %d passes, %.2f times what is used at once\n", m, settled,
                      excess);
        assert_true(settled <= 5);
        assert_true(excess <= 2);
    }
}

static void random_sizes_settle(void **state) {
    (void)state;
    uint64_t rng = seed_choose("sizes");
    double worst = 0;
    int latest = 0;
    for (int round = 0; round < 40; round++) {
        size_t n_pages[12];
        int n = 2 + (int)random_below(&rng, 11), window = 1 + (int)random_below(&rng, 3);
        for (int i = 0; i < n; i++) n_pages[i] = (size_t)1 << random_below(&rng, 5);
        for (int i = 0; i < n; i++) n_pages[i] += random_below(&rng, n_pages[i]);
        double excess;
        int settled = sizes_settle(n_pages, n, window, 16, &excess);
        if (settled > latest) latest = settled;
        if (excess > worst) worst = excess;
        if (settled == 16) {
            for (int i = 0; i < n; i++) print_message("%zu ", n_pages[i]);
            print_message("window %d: not settled\n", window);
        }
    }
    print_message("settled after %d passes at most, %.2f times what is used at once at most\n", latest,
                  worst);
    assert_true(latest < 16);
    assert_true(worst <= 3);
}

/* Exact mapping, and a device that is behind the host: each of the next uses gets pages of its own while
 * there are few that only the device uses; then the host waits for those that were released first. */
static void with_exact_mapping_the_host_waits_last(void **state) {
    (void)state;
    enum { N = FCDP_SLOTS_PENDING + 2 };
    node n;
    group g[N];
    node_open(&n, 1, 16, true);
    groups_open(g, N, &n);
    gate held = gate_make(&n);
    gate_hold(&held, n.ranks[0].compute);
    struct simgpu_blocking before, after;
    simgpu_blocking_total(0, &before);
    for (int i = 0; i < N - 1; i++) {
        group_fill(&g[i], BOTH, FILL_SLICE, 0);
        group_release(&g[i], false);
    }
    simgpu_blocking_total(0, &after);
    assert_int_equal(after.calls, before.calls);
    assert_int_equal(stats_of(&n, 0).n_waits, 0);
    assert_int_equal(stats_of(&n, 0).wait_ns, 0);
    assert_int_equal(pool_stats_of(&n, 0).live_pages, N - 1);
    gate_open(&held);
    group_fill(&g[N - 1], BOTH, FILL_SLICE, 0); /* the device may be done by now: a wait, or none */
    group_release(&g[N - 1], false);
    assert_int_equal(pool_stats_of(&n, 0).live_pages, N - 1);
    node_sync(&n);
    gate_destroy(&held);
    groups_close(g, N);
    node_close(&n);
}

/* Opens the gate once some thread waits for the device. */
static void *open_when_waited_for(void *held) {
    struct simgpu_blocking now;
    do {
        sched_yield();
        simgpu_blocking_total(-1, &now);
    } while (now.calls == 0);
    gate_open(held);
    return NULL;
}

/* No page is idle: then the host waits, and says so. */
static void with_exact_mapping_and_no_idle_page_the_host_waits(void **state) {
    (void)state;
    node n;
    group g[2];
    pthread_t thread;
    node_open(&n, 1, 1, true);
    groups_open(g, 2, &n);
    gate held = gate_make(&n);
    gate_hold(&held, n.ranks[0].compute);
    group_fill(&g[0], BOTH, FILL_SLICE, 0);
    group_release(&g[0], false);
    simgpu_blocking_reset();
    assert_int_equal(pthread_create(&thread, NULL, open_when_waited_for, &held), 0);
    group_fill(&g[1], BOTH, FILL_SLICE, 0);
    pthread_join(thread, NULL);
    group_release(&g[1], false);
    assert_int_equal(stats_of(&n, 0).n_waits, 1);
    assert_true(stats_of(&n, 0).wait_ns > 0);
    node_sync(&n);
    gate_destroy(&held);
    groups_close(g, 2);
    node_close(&n);
}

/* ---- what is given back ---- */

static void what_passes_no_longer_need_goes(void **state) {
    (void)state;
    for (int exact = 0; exact < 2; exact++) {
        node n;
        group g[8];
        node_open(&n, 1, 16, exact);
        groups_open(g, 8, &n);
        fcdp__tiering_begin_pass(n.ranks[0].tiering);
        for (int i = 0; i < 8; i++) { /* kept, as at a high FCDP_TAU */
            group_fill(&g[i], BOTH, FILL_SLICE, 0);
            group_release(&g[i], true);
        }
        assert_int_equal(pool_stats_of(&n, 0).live_pages, 8);
        assert_int_equal(fcdp__pool_pages_in_use(n.ranks[0].pool), 8);
        for (int pass = 0; pass < FCDP_PEAK_PASSES + 1; pass++) {
            fcdp__tiering_begin_pass(n.ranks[0].tiering);
            for (int i = 0; i < 8; i++) {
                group_restore(&g[i], true, 0);
                if (i) group_release(&g[i - 1], false);
            }
            group_release(&g[7], false);
            /* until the pass that kept them is forgotten */
            size_t expected = pass < FCDP_PEAK_PASSES ? 8 : 2;
            size_t extra = exact && expected < 8 ? FCDP_SLOTS_PENDING : 0; /* at most */
            assert_in_range(pool_stats_of(&n, 0).live_pages, expected, expected + extra);
            assert_int_equal(fcdp__pool_pages_in_use(n.ranks[0].pool), 0); /* a free slot is idle */
        }
        node_sync(&n);
        groups_close(g, 8);
        node_close(&n);
    }
}

static void a_slots_pages_go_with_its_last_region(void **state) {
    (void)state;
    node n;
    group g[3];
    node_open(&n, 1, 4, false);
    groups_open(g, 3, &n);
    for (int i = 0; i < 3; i++) {
        group_fill(&g[i], BOTH, FILL_SLICE, MS);
        group_release(&g[i], false);
    }
    for (int i = 0; i < 3; i++) {
        assert_int_equal(pool_stats_of(&n, 0).live_pages, 1);
        group_close(&g[i]);
    }
    assert_int_equal(pool_stats_of(&n, 0).live_pages, 0);
    node_close(&n);
}

/* ---- pressure ---- */

static void pages_taken_back_are_waited_for(void **state) {
    (void)state;
    for (int how = 0; how < 4; how++) { /* released, kept and clean, kept and dirty; with exact mapping */
        node n;
        group g;
        _Atomic bool done = false;
        node_open(&n, 1, 1, how == 3);
        group_open(&g, &n, "busy", SPECS, 2, 1);
        group_fill(&g, BOTH, how == 2 ? FILL_KEPT : FILL_SLICE, MS);
        pause_enqueue(n.ranks[0].compute, 30 * MS, &done);
        span_expect(&g, 0, 1, 1, n.ranks[0].compute, 0);
        group_release(&g, how == 1 || how == 2);
        assert_false(done);
        pages_squeeze(&n, 0, 1);
        assert_true(done);
        assert_false(state_of(g.regions[0]).mapped);
        assert_int_equal(stats_of(&n, 0).n_evictions, how == 1 || how == 2);
        assert_true(stats_of(&n, 0).n_waits > 0);
        assert_true(stats_of(&n, 0).wait_ns > 0);
        group_restore(&g, true, 0);
        group_release(&g, false);
        group_close(&g);
        node_close(&n);
    }
}

/* Pages that only lie there cost the host no wait. */
static void a_reclaim_that_finds_the_device_done_is_no_wait(void **state) {
    (void)state;
    node n;
    group g;
    node_open(&n, 1, 1, false);
    group_open(&g, &n, "idle", SPECS, 2, 1);
    group_fill(&g, BOTH, FILL_SLICE, 0);
    group_release(&g, true);
    node_sync(&n);
    assert_int_equal(fcdp__tiering_reclaim(n.ranks[0].tiering, 1), 1); /* an eviction */
    assert_int_equal(fcdp__tiering_reclaim(n.ranks[0].tiering, 1), 0); /* nothing is left */
    assert_int_equal(stats_of(&n, 0).n_evictions, 1);
    assert_int_equal(stats_of(&n, 0).n_waits, 0);
    assert_int_equal(stats_of(&n, 0).wait_ns, 0);
    group_close(&g);
    node_close(&n);
}

static void the_reclaimer_takes_what_is_idle_and_content_survives(void **state) {
    (void)state;
    enum { N = 6 };
    for (int exact = 0; exact < 2; exact++) {
        node n;
        group g[N];
        node_open(&n, 1, 2, exact);
        groups_open(g, N, &n);
        for (int i = 0; i < N; i++) {
            group_fill(&g[i], BOTH, i % 2 ? FILL_SLICE : FILL_KEPT, MS / 5);
            group_release(&g[i], true);
            assert_true(pool_stats_of(&n, 0).live_pages <= 2);
        }
        for (int round = 0; round < 3; round++)
            for (int i = 0; i < N; i++) {
                group_restore(&g[i], true, MS / 5);
                group_release(&g[i], (i + round) % 3 > 0);
            }
        /* all pages are in use: the error is clean, and goes away with the use */
        group_restore(&g[0], true, 0);
        group_restore(&g[1], true, 0);
        const uint64_t n_waits = stats_of(&n, 0).n_waits;
        assert_int_equal(fcdp__region_acquire(g[2].regions[0]), FCDP_ERR_NO_DEVICE_MEM);
        assert_text("nothing of it can be taken back now");
        assert_int_equal(stats_of(&n, 0).n_waits, n_waits); /* in vain: nothing is waited for */
        assert_false(state_of(g[2].regions[0]).in_use);
        group_release(&g[1], false);
        group_restore(&g[2], true, 0);
        group_release(&g[2], false);
        group_release(&g[0], false);
        node_sync(&n);
        groups_close(g, N);
        node_close(&n);
    }
}

/* Free slots go before anybody is evicted, clean regions before dirty ones, and
 * within those what was used longest ago. */
static void who_goes_first(void **state) {
    (void)state;
    node n;
    group g[5];
    node_open(&n, 1, 5, false);
    groups_open(g, 5, &n);
    for (int i = 0; i < 5; i++) group_fill(&g[i], BOTH, i == 0 || i == 3 ? FILL_KEPT : FILL_SLICE, 0);
    for (int i = 0; i < 5; i++) group_release(&g[i], i != 4); /* 0, 3: dirty; 1, 2: clean; 4: free */
    group_restore(&g[1], true, 0);
    group_release(&g[1], true); /* used after 2 */
    static const int order[] = {4, 2, 1, 0, 3};
    for (int k = 0; k < 5; k++) {
        fcdp_phys block;
        assert_ok(fcdp__pool_take_handle(n.ranks[0].pool, FCDP_HOLDER_TENSORS, (size_t)k + 1, &block));
        fcdp__pool_give_handle(n.ranks[0].pool, FCDP_HOLDER_TENSORS, (size_t)k + 1, block);
        for (int i = 0; i < 5; i++) {
            bool gone = false;
            for (int j = 0; j <= k; j++) gone |= order[j] == i;
            assert_int_equal(state_of(g[i].regions[0]).mapped, !gone);
        }
    }
    assert_int_equal(stats_of(&n, 0).n_evictions, 4);
    node_sync(&n);
    groups_close(g, 5);
    node_close(&n);
}

/* A driver that refuses to unmap costs that slot for this call, not the others, and nothing for ever. */
static void a_slot_that_cannot_be_taken_apart_is_passed_over(void **state) {
    (void)state;
    node n;
    group g[2];
    fcdp_phys block;
    node_open(&n, 1, 2, false);
    groups_open(g, 2, &n);
    for (int i = 0; i < 2; i++) group_fill(&g[i], BOTH, FILL_SLICE, 0);
    for (int i = 0; i < 2; i++) group_release(&g[i], false);
    assert_int_equal(simgpu_fail_nth("cuMemUnmap", 1, CUDA_UNKNOWN), 0);
    pages_squeeze(&n, 0, 1); /* the first would be the oldest */
    assert_true(state_of(g[0].regions[0]).mapped);
    assert_false(state_of(g[1].regions[0]).mapped);
    assert_int_equal(simgpu_fail_nth("cuMemUnmap", 1, CUDA_UNKNOWN), 0);
    assert_int_equal(fcdp__pool_take_handle(n.ranks[0].pool, FCDP_HOLDER_TENSORS, 2, &block),
                     FCDP_ERR_NO_DEVICE_MEM);
    assert_true(state_of(g[0].regions[0]).mapped);
    pages_squeeze(&n, 0, 2);
    assert_false(state_of(g[0].regions[0]).mapped);
    for (int i = 0; i < 2; i++) {
        group_restore(&g[i], true, 0);
        group_release(&g[i], false);
    }
    node_sync(&n);
    groups_close(g, 2);
    node_close(&n);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_slot_passes_on_in_stream_order),
        cmocka_unit_test(the_order_passes_through_a_use_that_did_nothing),
        cmocka_unit_test(a_slot_passes_to_other_streams_once_its_user_is_through),
        cmocka_unit_test(the_last_user_may_go_or_move),
        cmocka_unit_test(a_busy_slot_gives_another_and_then_ones_own),
        cmocka_unit_test(an_order_that_the_slots_do_not_divide_costs_remaps_not_memory),
        cmocka_unit_test(mixed_sizes_settle),
        cmocka_unit_test(random_sizes_settle),
        cmocka_unit_test(with_exact_mapping_the_host_waits_last),
        cmocka_unit_test(with_exact_mapping_and_no_idle_page_the_host_waits),
        cmocka_unit_test(what_passes_no_longer_need_goes),
        cmocka_unit_test(a_slots_pages_go_with_its_last_region),
        cmocka_unit_test(pages_taken_back_are_waited_for),
        cmocka_unit_test(a_reclaim_that_finds_the_device_done_is_no_wait),
        cmocka_unit_test(the_reclaimer_takes_what_is_idle_and_content_survives),
        cmocka_unit_test(who_goes_first),
        cmocka_unit_test(a_slot_that_cannot_be_taken_apart_is_passed_over),
    };
    return cmocka_run_group_tests_name("tiering_slots", tests, NULL, NULL);
}
