/* Threads against the reclaimer: each moves its own regions while takes on other threads evict them.
 *
 * One node of one rank, one pool that is too small for all. Workers use, store, drop, refill their own groups; others only
 * take pages from the pool, so that evictions come from threads that move nothing. What is read must always be right. */
#include <pthread.h>
#include <stdatomic.h>

#include "tests/tiering/support.h"

enum { N_WORKERS = 3, N_TAKERS = 2, GROUPS_EACH = 2, N_STEPS = 300, POOL_PAGES = N_WORKERS + 2 };
static const fcdp_extent_spec SPECS[] = {{60000, FCDP_SPAN_FROZEN}, {50000, FCDP_SPAN_TRAINABLE}};

typedef struct worker {
    pthread_t thread;
    node *node;
    group groups[GROUPS_EACH];
    uint64_t rng;
} worker;

static atomic_uint n_working;

static void bytes_copy(worker *w, const group *g, fcdp_stream stream, uint32_t s, uint8_t *host,
                       bool to_device) {
    fcdp_driver *drv = w->node->drv;
    fcdp_piece span = g->layout->span[s];
    fcdp_dptr at = fcdp__dptr_add(fcdp__region_base(g->regions[0]), span.offset_bytes);
    if (to_device)
        assert_ok(fcdp__driver_copy_h2d(drv, at, host, span.bytes, stream));
    else
        assert_ok(fcdp__driver_copy_d2h(drv, host, at, span.bytes, stream));
    assert_ok(fcdp__driver_stream_sync(drv, stream));
}

/* One use: whatever is not on the device is loaded, all is checked, and now and then a span is filled anew. */
static void use(worker *w, group *g, fcdp_stream stream, uint8_t *have, uint8_t *want) {
    fcdp_region *region = g->regions[0];
    assert_ok(fcdp__region_begin_use(region));
    fcdp_region_state state = state_of(region);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
        fcdp_piece span = g->layout->span[s];
        if (random_below(&w->rng, 4) == 0 || !state.span[s].epoch) {
            fcdp__region_invalidate(region, 1u << s);
            content_make(g, s, state.span[s].epoch + 1, span.offset_bytes, span.bytes, want);
            bytes_copy(w, g, stream, s, want, true);
            fcdp__region_filled(region, 1u << s);
            continue;
        }
        assert_ok(fcdp__region_load_whole(region, s));
        content_make(g, s, state.span[s].epoch, span.offset_bytes, span.bytes, want);
        bytes_copy(w, g, stream, s, have, false);
        assert_memory_equal(have, want, span.bytes);
    }
    fcdp__region_end_use(region);
}

static void *worker_run(void *arg) {
    worker *w = arg;
    fcdp_stream stream;
    uint8_t *have = malloc(PAGE), *want = malloc(PAGE);
    assert_ok(fcdp__driver_stream_create(w->node->drv, &stream));
    for (int i = 0; i < N_STEPS; i++) {
        group *g = &w->groups[random_below(&w->rng, GROUPS_EACH)];
        switch (random_below(&w->rng, 4)) {
        case 0:
            assert_ok(fcdp__region_store(g->regions[0], NULL));
            assert_ok(fcdp__region_drop(g->regions[0],
                                        NULL)); /* everything there was stored, by us or by an eviction */
            break;
        case 1:
            assert_ok(fcdp__region_evict(g->regions[0]));
            break;
        default:
            use(w, g, stream, have, want);
        }
    }
    fcdp__driver_stream_destroy(w->node->drv, stream);
    free(have);
    free(want);
    atomic_fetch_sub(&n_working, 1);
    return NULL;
}

/* At most one page each, held for a moment: a worker holds one in use, so there is always one to be had. */
static void *taker_run(void *arg) {
    worker *w = arg;
    fcdp_pool *pool = w->node->ranks[0].pool;
    while (atomic_load(&n_working)) {
        fcdp_phys page;
        assert_ok(fcdp__pool_take(pool, FCDP_HOLDER_REGIONS, 1, &page));
        fcdp__pool_give(pool, FCDP_HOLDER_REGIONS, 1, &page);
    }
    return NULL;
}

static void workers_and_takers(void **state) {
    (void)state;
    node n;
    worker workers[N_WORKERS], takers[N_TAKERS];
    uint64_t seed = seed_choose("region threads");
    node_open(&n, 1, POOL_PAGES);
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
    fcdp_tiering_stats stats;
    fcdp__tiering_stats(n.ranks[0].tiering, &stats);
    print_message("%llu evictions, %llu drops, %llu whole loads\n", (unsigned long long)stats.n_evictions,
                  (unsigned long long)stats.n_drops, (unsigned long long)stats.n_whole_loads);
    assert_true(stats.n_evictions > 0 && stats.n_whole_loads > 0);
    for (int i = 0; i < N_WORKERS; i++)
        for (int k = 0; k < GROUPS_EACH; k++) group_close(&workers[i].groups[k]);
    node_close(&n);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(workers_and_takers)};
    return cmocka_run_group_tests_name("tiering_region_threads", tests, NULL, NULL);
}
