/* FCDP_POLICY=next-use on regions: a step is learned, what fits is kept, and what the program then does
 * otherwise is learned anew. One rank; each region is one page, and its content is checked at every use. */
#include "tests/tiering/slots_world.h"

#include "tiering/schedule.h"

enum { N_GROUPS = 8, WINDOW = 2 };

typedef struct world {
    node n;
    group g[N_GROUPS];
    bool frozen;
    bool stays[N_GROUPS]; /* FCDP_TIER_DEVICE: kept whatever is planned here */
} world;

static void world_open(world *w, size_t n_pages, bool frozen) {
    *w = (world){.frozen = frozen};
    node_policy = FCDP_POLICY_NEXT_USE;
    node_open(&w->n, 1, n_pages, false);
    for (int i = 0; i < N_GROUPS; i++) group_open_pages(&w->g[i], &w->n, 1, 40 + (uint64_t)i);
}

static void world_close(world *w) {
    node_sync(&w->n);
    groups_close(w->g, N_GROUPS);
    node_close(&w->n);
    node_policy = FCDP_POLICY_TAU;
}

static size_t period_of(const world *w) {
    return fcdp__schedule_period(w->n.ranks[0].tiering);
}

/* As comm begins a use. */
static void use_begin(world *w, int i, bool fills) {
    group *g = &w->g[i];
    fcdp_region *region = g->regions[0];
    uint32_t s = FCDP_SPAN_TRAINABLE;
    size_t bytes = g->layout->span[s].bytes;
    fills |= !state_of(region).span[s].epoch;
    group_acquire(g);
    fcdp__region_plan_use(region, fills ? 0 : bytes, fills ? bytes : 0, fills);
    if (fills)
        region_fill(g, 0, TRAINABLE, w->stays[i] || fcdp__region_is_planned(region) ? FILL_KEPT : FILL_SLICE);
    else if (!state_of(region).span[s].on_device)
        region_restore(g, 0, s, true);
    region_compute(g, 0, MS / 20);
}

static void use_end(world *w, int i) {
    fcdp_region_state state = state_of(w->g[i].regions[0]);
    bool keeps = w->stays[i] || fcdp__region_is_planned(w->g[i].regions[0]);
    if (!keeps && !state.span[FCDP_SPAN_TRAINABLE].stored && !state.span[FCDP_SPAN_TRAINABLE].whole)
        region_store_late(&w->g[i], 0, TRAINABLE);
    region_release(&w->g[i], 0, keeps);
}

/* All groups, WINDOW of them in use at once. */
static void pass(world *w, bool forward, bool fills) {
    for (int k = 0; k < N_GROUPS + WINDOW - 1; k++) {
        if (k < N_GROUPS) use_begin(w, forward ? k : N_GROUPS - 1 - k, fills);
        if (k >= WINDOW - 1) use_end(w, forward ? k - WINDOW + 1 : N_GROUPS - 1 - (k - WINDOW + 1));
    }
    node_sync(&w->n);
}

static void step_train(world *w) {
    pass(w, true, !w->frozen);
    pass(w, false, false);
}

typedef struct moves {
    size_t n_loads, n_stores, n_evictions;
} moves;

static moves moves_of(world *w, void (*job)(world *w)) {
    fcdp_tiering_stats before = stats_of(&w->n, 0);
    job(w);
    fcdp_tiering_stats after = stats_of(&w->n, 0);
    return (moves){after.n_whole_loads - before.n_whole_loads, after.n_stores - before.n_stores,
                   after.n_evictions - before.n_evictions};
}

static void assert_moves(moves m, size_t n_loads, size_t n_stores) {
    if (m.n_loads != n_loads || m.n_stores != n_stores || m.n_evictions)
        fail_msg("%zu loads, %zu stores, %zu evictions, not %zu, %zu and none", m.n_loads, m.n_stores,
                 m.n_evictions, n_loads, n_stores);
}

/* With TEST_COARSER every third budget, from a random one on. */
static size_t stride_of_pages(void) {
    return getenv("TEST_COARSER") ? 3 : 1;
}

/* At a turn all n pages are for what is kept, so n groups are restored less than without; and of these, about
 * as many that are kept from fill to fill are not stored. */
static void a_step_that_is_known_keeps_what_fits(void **state) {
    (void)state;
    const size_t stride = stride_of_pages();
    for (size_t n_pages = WINDOW + fcdp__now_ns() / 1000 % stride; n_pages <= N_GROUPS + WINDOW;
         n_pages += stride) {
        world w;
        world_open(&w, n_pages, false);
        assert_moves(moves_of(&w, step_train), N_GROUPS, N_GROUPS);
        for (int i = 0; i < 3; i++) step_train(&w);
        size_t n_lacking = n_pages < N_GROUPS ? N_GROUPS - n_pages : 0;
        moves m = moves_of(&w, step_train);
        assert_in_range(m.n_stores, n_lacking, n_lacking ? n_lacking + 2 : 0);
        assert_moves(m, n_lacking, m.n_stores);
        assert_int_equal(period_of(&w), 2 * N_GROUPS);
        world_close(&w);
    }
}

/* Both turns of a step, and of the rest as many as fit, twice. */
static void frozen_groups_are_kept_across_steps(void **state) {
    (void)state;
    const size_t stride = stride_of_pages();
    for (size_t n_pages = WINDOW + fcdp__now_ns() / 1000 % stride; n_pages <= N_GROUPS + WINDOW;
         n_pages += stride) {
        world w;
        world_open(&w, n_pages, true);
        for (int i = 0; i < 4; i++) step_train(&w);
        size_t n_loads = n_pages > N_GROUPS ? 0 : 2 * (N_GROUPS - n_pages);
        assert_moves(moves_of(&w, step_train), n_loads, 0);
        world_close(&w);
    }
}

static void step_evaluate(world *w) {
    pass(w, true, false);
}

static void another_phase_is_learned(void **state) {
    (void)state;
    enum { N_PAGES = 5 };
    world w;
    world_open(&w, N_PAGES, true);
    for (int i = 0; i < 4; i++) step_train(&w);
    moves trained = moves_of(&w, step_train);
    for (int i = 0; i < 3; i++) step_evaluate(&w);
    assert_true(stats_of(&w.n, 0).n_surprises > 0);
    moves evaluated = moves_of(&w, step_evaluate); /* always in the same order: one page is in use */
    assert_moves(evaluated, N_GROUPS - (N_PAGES - 1), 0);
    assert_int_equal(period_of(&w), N_GROUPS);
    for (int i = 0; i < 2; i++) step_train(&w); /* known already */
    moves again = moves_of(&w, step_train);     /* the period begins elsewhere in the step: another plan */
    assert_in_range(again.n_loads, trained.n_loads, trained.n_loads + 1);
    assert_moves(again, again.n_loads, 0);
    world_close(&w);
}

/* What others take is not kept from them: once with evictions, and then without. It is kept again when they
 * give it back. */
static void memory_that_others_take_is_planned_around(void **state) {
    (void)state;
    enum { N_PAGES = 8, N_TAKEN = 4 };
    world w;
    fcdp_phys taken[N_TAKEN];
    world_open(&w, N_PAGES, true);
    for (int i = 0; i < 4; i++) step_train(&w);
    moves before = moves_of(&w, step_train);
    assert_ok(fcdp__pool_take(w.n.ranks[0].pool, 0, N_TAKEN, taken));
    assert_true(moves_of(&w, step_train).n_loads > before.n_loads);
    for (int i = 0; i < 2; i++) step_train(&w);
    moves squeezed = moves_of(&w, step_train);
    assert_int_equal(squeezed.n_evictions, 0);
    fcdp__pool_give(w.n.ranks[0].pool, 0, N_TAKEN, taken);
    int n_steps = 0;
    while (moves_of(&w, step_train).n_loads > before.n_loads)
        if (++n_steps == 40) fail_msg("what was given back is not kept again");
    assert_moves(moves_of(&w, step_train), before.n_loads, 0);
    world_close(&w);
}

/* Regions with a tier of their own are no plan's here, and those of the device take its pages: the others are
 * kept in what is left, as if the device had no more, and nothing is evicted. */
static void what_has_a_tier_is_planned_around(void **state) {
    (void)state;
    enum { N_STAY = 3 };
    for (size_t n_pages = WINDOW + N_STAY; n_pages <= N_GROUPS + WINDOW; n_pages++) {
        world w;
        world_open(&w, n_pages, true);
        for (int i = 0; i < N_STAY + 1; i++) {
            w.stays[i] = i < N_STAY;
            fcdp__region_set_tier(w.g[i].regions[0], w.stays[i] ? FCDP_TIER_DEVICE : FCDP_TIER_HOST);
        }
        for (int i = 0; i < 6; i++) step_train(&w);
        moves m = moves_of(&w, step_train);
        size_t n_others = N_GROUPS - N_STAY, n_left = n_pages - N_STAY;
        size_t n_loads = n_left > n_others ? 0 : 2 * (n_others - n_left), n_host = 2;
        assert_in_range(m.n_loads, n_host, n_loads + n_host);
        assert_moves(m, m.n_loads, 0);
        assert_int_equal(period_of(&w), 2 * N_GROUPS);
        for (int i = 0; i < N_STAY; i++) assert_true(state_of(w.g[i].regions[0]).kept);
        assert_false(state_of(w.g[N_STAY].regions[0]).kept);
        world_close(&w);
    }
}

static void a_region_that_comes_or_goes_is_a_new_schedule(void **state) {
    (void)state;
    world w;
    group other;
    world_open(&w, 5, true);
    for (int i = 0; i < 4; i++) step_train(&w);
    moves before = moves_of(&w, step_train);
    group_open_pages(&other, &w.n, 1, 7);
    assert_int_equal(period_of(&w), 0);
    for (int i = 0; i < 4; i++) step_train(&w);
    assert_moves(moves_of(&w, step_train), before.n_loads, 0);
    group_close(&other);
    assert_int_equal(period_of(&w), 0);
    for (int i = 0; i < 4; i++) step_train(&w);
    assert_moves(moves_of(&w, step_train), before.n_loads, 0);
    world_close(&w);
}

/* Uses in no order, beside others' memory that comes and goes: nothing fails, and all content is right. */
static void uses_in_no_order_are_right(void **state) {
    (void)state;
    uint64_t rng = seed_choose("schedule");
    world w;
    fcdp_phys taken[2];
    size_t n_taken = 0;
    const char *coarser = getenv("TEST_COARSER");
    const int n_uses = !coarser ? 3000 : atoi(coarser) < 32 ? 500 : 150;
    world_open(&w, 5, true);
    for (int i = 0; i < n_uses; i++) {
        int g = (int)random_below(&rng, i * 6 / n_uses % 2 ? N_GROUPS : 2);
        use_begin(&w, g, random_below(&rng, 5) == 0);
        use_end(&w, g);
        if (random_below(&rng, 10) != 0) continue;
        if (n_taken) fcdp__pool_give(w.n.ranks[0].pool, 0, n_taken, taken);
        n_taken = n_taken ? 0 : 1 + random_below(&rng, 2);
        if (n_taken) assert_ok(fcdp__pool_take(w.n.ranks[0].pool, 0, n_taken, taken));
    }
    if (n_taken) fcdp__pool_give(w.n.ranks[0].pool, 0, n_taken, taken);
    world_close(&w);
}

/* Longer than the record. Not with TEST_COARSER: all of it is one thread's, and TSan takes a minute. */
static void a_long_period_is_forgotten_and_found(void **state) {
    (void)state;
    world w;
    if (getenv("TEST_COARSER")) skip();
    world_open(&w, 5, true);
    for (int i = 0; i < 4; i++) step_train(&w);
    moves before = moves_of(&w, step_train);
    for (int i = 0; i < 600; i++) { /* 16 uses each; 8192 are recorded */
        moves now = moves_of(&w, step_train);
        if (now.n_evictions || now.n_loads > 2 * before.n_loads)
            fail_msg("step %d: %zu loads", i, now.n_loads);
    }
    assert_moves(moves_of(&w, step_train), before.n_loads, 0);
    world_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_that_is_known_keeps_what_fits),
        cmocka_unit_test(frozen_groups_are_kept_across_steps),
        cmocka_unit_test(another_phase_is_learned),
        cmocka_unit_test(memory_that_others_take_is_planned_around),
        cmocka_unit_test(what_has_a_tier_is_planned_around),
        cmocka_unit_test(a_region_that_comes_or_goes_is_a_new_schedule),
        cmocka_unit_test(uses_in_no_order_are_right),
        cmocka_unit_test(a_long_period_is_forgotten_and_found),
    };
    return cmocka_run_group_tests_name("tiering_schedule", tests, NULL, NULL);
}
