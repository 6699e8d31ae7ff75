/* The fault run: a short schedule of gathers, stores, restores and evictions, and of a mapped region, in
 * which the n-th driver call fails, for every third n from a random one on, until the schedule passes
 * untouched. (TEST_COARSER=k: for every k-th; TEST_STRIDE=k likewise, and before that; 1: for all.) Every
 * step ends well or with a clean error; then it is done again and must work; contents are right throughout,
 * nothing is unordered, and at the end nothing lives and every pool is balanced. */
#include "tests/tiering/support.h"

#include "tiering/mapped.h"

static const fcdp_extent_spec SPECS[] = {
    {1500, FCDP_SPAN_FROZEN}, {1200, FCDP_SPAN_TRAINABLE}, {501, FCDP_SPAN_TRAINABLE}};
enum { N_SPECS = sizeof SPECS / sizeof SPECS[0], BOTH = FCDP_SPAN_MASK_ALL };

typedef struct variant {
    uint32_t n_ranks;
    bool exact;
    int code;
    bool has_copies;
    bool maps; /* a third region, onto host memory */
} variant;

/* Kept regions go, and slots: what fails is tried again by the next call. */
static void all_evict(node *n) {
    for (uint32_t r = 0; r < n->n; r++) {
        (void)fcdp__tiering_reclaim(n->ranks[r].tiering, 1);
        pages_squeeze(n, r, 1);
        assert_int_equal(pool_stats_of(n, r).live_pages, 0);
    }
}

static void all_peek(group *g, uint32_t epoch) {
    node_sync(g->node);
    for (uint32_t r = 0; r < g->node->n; r++)
        for (uint32_t s = 0; s < FCDP_N_SPANS; s++) assert_peek(g, r, s, epoch, true);
}

static void mapped_begin(group *g, node *n) {
    group_open(g, n, "mapped", SPECS, N_SPECS, 3);
    for (uint32_t r = 0; r < n->n; r++) step(fcdp__region_map_host(g->regions[r], n->account, 0));
    group_fill(g, BOTH, FILL_HOST, 0);
    group_release(g, true);
}

/* Memory was short since. */
static void mapped_use(group *g) {
    all_peek(g, 1); /* from its own pages */
    group_restore(g, true, 0);
    group_release(g, false);
    group_restore(g, true, 0); /* from the host's copy, to the same pages */
    group_release(g, true);
}

/* One page per rank: each group's use takes the other's. Memory that could not be page-locked makes a copy
 * wait on the host: not with one thread that is two ranks. */
static void schedule(const variant *v) {
    node n;
    group a, b, mapped;
    node_pin = v->n_ranks == 1 ? FCDP_PIN_AUTO : FCDP_PIN_REQUIRE;
    node_has_copies = v->has_copies;
    node_open(&n, v->n_ranks, 1, v->exact);
    group_open(&a, &n, "a", SPECS, N_SPECS, 1);
    group_open(&b, &n, "b", SPECS, N_SPECS, 2);
    if (v->maps) mapped_begin(&mapped, &n);
    group_fill(&a, BOTH, FILL_HOST, 0);
    group_release(&a, false);
    group_fill(&b, BOTH, FILL_KEPT, 0);
    group_release(&b, true);
    all_peek(&a, 1);             /* from the host */
    all_peek(&b, 1);             /* from the device */
    group_restore(&a, false, 0); /* evicts b, dirty */
    group_release(&a, true);
    group_restore(&b, true, 0); /* evicts a, clean */
    group_release(&b, false);
    group_restore(&a, true, 0);
    group_release(&a, true);
    group_acquire(&a);
    for (uint32_t r = 0; r < n.n; r++) region_fill(&a, r, 1u << FCDP_SPAN_TRAINABLE, FILL_KEPT);
    for (uint32_t r = 0; r < n.n; r++) region_store_late(&a, r, 1u << FCDP_SPAN_TRAINABLE);
    group_release(&a, true);
    group_restore(&a, true, 0); /* has all of it */
    group_release(&a, true);
    all_evict(&n);
    if (v->maps) mapped_use(&mapped);
    group_restore(&a, true, 0);
    group_release(&a, true);
    group_close(&a); /* has its pages */
    group_close(&b);
    if (v->maps) group_close(&mapped);
    size_t taken_bytes, peak_bytes;
    fcdp__account_usage(n.account, &taken_bytes, &peak_bytes);
    assert_int_equal(taken_bytes, 0);
    node_close(&n);
}

/* Returns the number of calls until the schedule ran to its end with the fault still to come. */
static unsigned long every_call_fails_once(const variant *v) {
    const char *given = getenv("TEST_STRIDE"), *coarser = given ? given : getenv("TEST_COARSER");
    unsigned long stride = coarser ? strtoul(coarser, NULL, 10) : 3, n = 1 + fcdp__now_ns() / 1000 % stride;
    print_message("each %lu. from %lu on\n", stride, n);
    steps_may_fail_once = true;
    for (;; n += stride) {
        simgpu_reset();
        assert_int_equal(simgpu_fail_nth(NULL, n, v->code), 0);
        schedule(v);
        if (simgpu_calls(NULL) < n) break;
    }
    steps_may_fail_once = false;
    simgpu_reset();
    return n;
}

/* Both mappings, alone and together (with slots, over two copies in host memory); `few`: once each, with a
 * mapped region. */
static void run(int code, bool few) {
    fcdp_driver *drv = driver_open_sim();
    fcdp__driver_close(drv);
    fcdp_log_set_level(FCDP_LOG_QUIET);
    for (int i = 0; i < 4; i += few ? 3 : 1) {
        variant v = {1 + (uint32_t)i / 2, i % 2, code, i == 2, i % 3 == 0};
        unsigned long n = every_call_fails_once(&v);
        print_message("code %d, %u ranks, %s%s: %lu driver calls\n", code, v.n_ranks,
                      v.exact ? "exact mapping" : "slots",
                      v.has_copies ? ", two copies"
                      : v.maps     ? ", one region mapped onto host memory"
                                   : "",
                      n - 1);
        assert_true(n > 100);
    }
    fcdp_log_set_level(FCDP_LOG_WARN);
}

static void an_unknown_error(void **state) {
    (void)state;
    run(CUDA_UNKNOWN, false);
}
static void out_of_memory(void **state) {
    (void)state;
    run(CUDA_OUT_OF_MEMORY, true);
}
static void not_ready(void **state) {
    (void)state;
    run(CUDA_NOT_READY, true);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(an_unknown_error), cmocka_unit_test(out_of_memory),
                                       cmocka_unit_test(not_ready)};
    return cmocka_run_group_tests_name("tiering_faults", tests, NULL, NULL);
}
