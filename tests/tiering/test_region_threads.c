/* Threads against the reclaimer: each moves its own regions while takes on other threads take slots apart and
 * evict.
 *
 * One node of one rank, one pool that is too small for all. Workers use, store, keep and release their own
 * groups; others only take pages from the pool, so that evictions come from threads that move nothing. Every
 * byte that a use finds on the device is compared there. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <unistd.h>

#include "tests/tiering/support.h"
#include "tiering/internal.h"

enum { N_WORKERS = 3, N_TAKERS = 2, GROUPS_EACH = 2, POOL_PAGES = N_WORKERS + 2, US = 1000 };
enum { N_STEPS = 300, MOST_STEPS = 20 * N_STEPS, N_EVICTIONS = 20 };
static const fcdp_extent_spec SPECS[] = {{60000, FCDP_SPAN_FROZEN}, {50000, FCDP_SPAN_TRAINABLE}};

typedef struct worker {
    pthread_t thread;
    node *node;
    group groups[GROUPS_EACH];
    uint64_t rng;
    unsigned n_found; /* spans that a kept region had still */
} worker;

static atomic_uint n_working;

/* One use: what is not on the device is loaded or, where it is nowhere, filled,
 * now and then anew; all is compared. */
static void use(worker *w, group *g) {
    fcdp_region *region = g->regions[0];
    uint32_t fills = random_below(&w->rng, 4) ? 0 : 1 + (uint32_t)random_below(&w->rng, 3), late = 0;
    step(fcdp__region_acquire(region));
    fcdp_region_state state = state_of(region);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
        w->n_found += state.span[s].on_device;
        if (state.span[s].on_device || fills & 1u << s) continue;
        if (state.span[s].stored || state.span[s].whole)
            region_restore(g, 0, s, random_below(&w->rng, 2));
        else
            fills |= 1u << s;
    }
    if (fills) region_fill(g, 0, fills, random_below(&w->rng, 2) ? FILL_SLICE : FILL_KEPT);
    region_compute(g, 0, random_below(&w->rng, 2) * 30 * US);
    state = state_of(region);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (!state.span[s].stored && random_below(&w->rng, 2)) late |= 1u << s;
    if (late) region_store_late(g, 0, late);
    region_release(g, 0, random_below(&w->rng, 3) > 0);
}

/* On a busy machine the takers may come late: a worker goes on until they have evicted something. */
static void *worker_run(void *arg) {
    worker *w = arg;
    for (int i = 0; i < N_STEPS || (i < MOST_STEPS && stats_of(w->node, 0).n_evictions < N_EVICTIONS); i++) {
        group *g = &w->groups[random_below(&w->rng, GROUPS_EACH)];
        if (random_below(&w->rng, 16) == 0)
            fcdp__region_invalidate(g->regions[0], 1 + (uint32_t)random_below(&w->rng, 3));
        if (random_below(&w->rng, 16) == 0) fcdp__tiering_begin_pass(w->node->ranks[0].tiering);
        use(w, g);
    }
    atomic_fetch_sub(&n_working, 1);
    return NULL;
}

/* At most one page each, held for a moment: a worker holds one in use, so there is always one to be had. */
static void *taker_run(void *arg) {
    worker *w = arg;
    fcdp_pool *pool = w->node->ranks[0].pool;
    while (atomic_load(&n_working)) {
        fcdp_phys page;
        assert_ok(fcdp__pool_take(pool, FCDP_HOLDER_TENSORS, 1, &page));
        sched_yield();
        fcdp__pool_give(pool, FCDP_HOLDER_TENSORS, 1, &page);
    }
    return NULL;
}

static void report(const node *n, const worker *workers) {
    fcdp_tiering_stats stats = stats_of(n, 0);
    unsigned n_found = 0;
    for (int i = 0; i < N_WORKERS; i++) n_found += workers[i].n_found;
    print_message("%llu evictions, %llu maps, %llu whole loads, %u spans found on the device\n",
                  (unsigned long long)stats.n_evictions, (unsigned long long)stats.n_maps,
                  (unsigned long long)stats.n_whole_loads, n_found);
    assert_true(stats.n_evictions > 0 && stats.n_whole_loads > 0 && stats.n_maps > N_WORKERS * GROUPS_EACH);
    assert_true(n_found > 0);
}

static void workers_and_takers(bool exact) {
    node n;
    worker workers[N_WORKERS], takers[N_TAKERS];
    uint64_t seed = seed_choose("region threads");
    node_open(&n, 1, POOL_PAGES, exact);
    atomic_store(&n_working, N_WORKERS);
    for (int i = 0; i < N_WORKERS; i++) {
        workers[i] = (worker){.node = &n, .rng = seed + (uint64_t)i};
        for (int k = 0; k < GROUPS_EACH; k++)
            group_open(&workers[i].groups[k], &n, "shared", SPECS, 2, seed ^ (uint64_t)(i * 10 + k));
    }
    for (int i = 0; i < N_WORKERS; i++)
        assert_int_equal(pthread_create(&workers[i].thread, NULL, worker_run, &workers[i]), 0);
    for (int i = 0; i < N_TAKERS; i++) {
        takers[i] = (worker){.node = &n};
        assert_int_equal(pthread_create(&takers[i].thread, NULL, taker_run, &takers[i]), 0);
    }
    for (int i = 0; i < N_WORKERS; i++) assert_int_equal(pthread_join(workers[i].thread, NULL), 0);
    for (int i = 0; i < N_TAKERS; i++) assert_int_equal(pthread_join(takers[i].thread, NULL), 0);
    node_sync(&n);
    report(&n, workers);
    for (int i = 0; i < N_WORKERS; i++)
        for (int k = 0; k < GROUPS_EACH; k++) group_close(&workers[i].groups[k]);
    node_close(&n);
}

static void with_slots(void **state) {
    (void)state;
    workers_and_takers(false);
}
static void with_exact_mapping(void **state) {
    (void)state;
    workers_and_takers(true);
}

static void *close_run(void *arg) {
    group_close(arg);
    return NULL;
}

static void *sleep_run(void *arg) {
    assert_ok(fcdp__tiering_sleep(arg));
    return NULL;
}

/* The end of a kept region waits for the device; it is gone when the other thread may go on. */
static void sleep_beside_an_end(void **state) {
    (void)state;
    node n;
    group ends, stays;
    pthread_t closer, sleeper;
    node_open(&n, 1, POOL_PAGES, false);
    group_open(&stays, &n, "stays", SPECS, 2, 1);
    group_open(&ends, &n, "ends", SPECS, 2, 2);
    gate held = gate_make(&n);
    group *groups[] = {&stays, &ends};
    for (int i = 0; i < 2; i++) {
        group_acquire(groups[i]);
        region_fill(groups[i], 0, 3, FILL_SLICE);
        if (i) gate_hold(&held, n.ranks[0].compute);
        region_compute(groups[i], 0, 0);
        group_release(groups[i], true);
    }
    assert_int_equal(pthread_create(&closer, NULL, close_run, &ends), 0);
    bool moving = false;
    while (!moving) {
        fcdp__region_lock(ends.regions[0]);
        moving = ends.regions[0]->moving;
        fcdp__region_unlock(ends.regions[0]);
    }
    assert_int_equal(pthread_create(&sleeper, NULL, sleep_run, n.ranks[0].tiering), 0);
    while (state_of(stays.regions[0]).span[0].on_device) sched_yield();
    usleep(20 * US); /* now it waits for the other region */
    gate_open(&held);
    assert_int_equal(pthread_join(closer, NULL), 0);
    assert_int_equal(pthread_join(sleeper, NULL), 0);
    gate_destroy(&held);
    group_close(&stays);
    node_close(&n);
}

int main(void) {
    node_policy = FCDP_POLICY_NEXT_USE; /* what is recorded changes nothing but the choice of victims */
    const struct CMUnitTest tests[] = {cmocka_unit_test(with_slots), cmocka_unit_test(with_exact_mapping),
                                       cmocka_unit_test(sleep_beside_an_end)};
    return cmocka_run_group_tests_name("tiering_region_threads", tests, NULL, NULL);
}
