/* One region at a time: its states, what it refuses, what faults, and what eviction leaves behind. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "tests/tiering/support.h"
#include "tiering/region_internal.h"

static const fcdp_extent_spec SPECS[] = {{3000, FCDP_SPAN_TRAINABLE},
                                         {70000, FCDP_SPAN_FROZEN},
                                         {1, FCDP_SPAN_TRAINABLE},
                                         {90001, FCDP_SPAN_TRAINABLE}};
enum { N_SPECS = sizeof SPECS / sizeof SPECS[0] };

static void assert_span(fcdp_region *region, uint32_t s, bool on_device, bool slice_on_host,
                        bool whole_on_host, uint32_t epoch) {
    fcdp_region_state state = state_of(region);
    assert_int_equal(state.span[s].on_device, on_device);
    assert_int_equal(state.span[s].slice_on_host, slice_on_host);
    assert_int_equal(state.span[s].whole_on_host, whole_on_host);
    assert_int_equal(state.span[s].epoch, epoch);
}

static size_t live_pages(const node *node, uint32_t r) {
    fcdp_pool_stats stats;
    fcdp__pool_stats(node->ranks[r].pool, &stats);
    return stats.live_pages;
}

static void fill_all(group *g) {
    for (uint32_t r = 0; r < g->node->n; r++) {
        assert_ok(fcdp__region_begin_use(g->regions[r]));
        span_fill(g, r, FCDP_SPAN_MASK_ALL);
        fcdp__region_end_use(g->regions[r]);
    }
}

static void the_life_of_a_region(void **state) {
    (void)state;
    node n;
    group g;
    node_open(&n, 2, 8);
    group_open(&g, &n, "life", SPECS, N_SPECS, 1);
    fcdp_dptr base = fcdp__region_base(g.regions[0]);
    assert_span(g.regions[0], 0, false, false, false, 0);
    assert_int_equal(live_pages(&n, 0), 0);
    fill_all(&g);
    assert_span(g.regions[0], 1, true, false, false, 1);
    assert_int_equal(live_pages(&n, 0), 1);
    for (uint32_t r = 0; r < 2; r++) {
        assert_ok(fcdp__region_store(g.regions[r], NULL));
        assert_span(g.regions[r], 0, true, true, false, 1);
        assert_ok(fcdp__region_drop(g.regions[r], NULL));
        assert_int_equal(live_pages(&n, r), 0);
    }
    /* by slice, then by the whole */
    assert_ok(fcdp__region_begin_use(g.regions[0]));
    for (uint32_t s = 0; s < 2; s++) {
        assert_ok(fcdp__region_load_slice(g.regions[0], s));
        assert_span(g.regions[0], s, false, true, false, 1);
        slices_arrive(&g, 0, s, 1);
        fcdp__region_loaded(g.regions[0], s);
        assert_content(&g, 0, s, 1);
    }
    fcdp__region_end_use(g.regions[0]);
    assert_ok(fcdp__region_begin_use(g.regions[1]));
    for (uint32_t s = 0; s < 2; s++) {
        assert_ok(fcdp__region_load_whole(g.regions[1], s));
        assert_span(g.regions[1], s, true, true, true, 1);
        assert_content(&g, 1, s, 1);
    }
    fcdp__region_end_use(g.regions[1]);
    assert_int_equal(fcdp__region_base(g.regions[0]).addr, base.addr);

    fcdp_tiering_stats stats;
    fcdp__tiering_stats(n.ranks[1].tiering, &stats);
    assert_int_equal(stats.n_stores, 1);
    assert_int_equal(stats.d2h_bytes, g.layout->bytes / 2);
    assert_int_equal(stats.h2d_bytes, g.layout->bytes);
    assert_int_equal(stats.n_whole_loads, 2);
    assert_int_equal(stats.n_drops, 1);
    group_close(&g);
    node_close(&n);
}

static void spans_go_stale_apart(void **state) {
    (void)state;
    node n;
    group g;
    node_open(&n, 2, 8);
    group_open(&g, &n, "apart", SPECS, N_SPECS, 2);
    fill_all(&g);
    for (uint32_t r = 0; r < 2; r++) assert_ok(fcdp__region_store(g.regions[r], NULL));
    for (uint32_t r = 0; r < 2; r++) {
        fcdp__region_invalidate(g.regions[r], 1u << FCDP_SPAN_TRAINABLE);
        assert_span(g.regions[r], FCDP_SPAN_TRAINABLE, false, false, false, 1);
        assert_span(g.regions[r], FCDP_SPAN_FROZEN, true, true, false, 1);
        assert_true(state_of(g.regions[r]).mapped);
        assert_ok(fcdp__region_begin_use(g.regions[r]));
        assert_int_equal(fcdp__region_load_slice(g.regions[r], FCDP_SPAN_TRAINABLE), FCDP_ERR_INVALID);
        assert_int_equal(fcdp__region_load_whole(g.regions[r], FCDP_SPAN_TRAINABLE), FCDP_ERR_INVALID);
        span_fill(&g, r, 1u << FCDP_SPAN_TRAINABLE);
        fcdp__region_end_use(g.regions[r]);
        assert_span(g.regions[r], FCDP_SPAN_TRAINABLE, true, false, false, 2);
    }
    /* only the trainable slice is new: only it is stored */
    fcdp_tiering_stats before, after;
    fcdp__tiering_stats(n.ranks[0].tiering, &before);
    assert_ok(fcdp__region_store(g.regions[0], NULL));
    fcdp__tiering_stats(n.ranks[0].tiering, &after);
    assert_int_equal(after.d2h_bytes - before.d2h_bytes, g.layout->span[FCDP_SPAN_TRAINABLE].bytes / 2);
    assert_ok(fcdp__region_drop(g.regions[0], NULL));
    assert_ok(fcdp__region_store(g.regions[1], NULL));
    assert_ok(fcdp__region_begin_use(g.regions[0]));
    assert_ok(fcdp__region_load_whole(g.regions[0], FCDP_SPAN_FROZEN));
    assert_ok(fcdp__region_load_whole(g.regions[0], FCDP_SPAN_TRAINABLE));
    assert_content(&g, 0, FCDP_SPAN_FROZEN, 1);
    assert_content(&g, 0, FCDP_SPAN_TRAINABLE, 2);
    fcdp__region_end_use(g.regions[0]);
    group_close(&g);
    node_close(&n);
}

static void drop_refuses_to_lose_bytes(void **state) {
    (void)state;
    node n;
    group g;
    node_open(&n, 2, 8);
    group_open(&g, &n, "precious", SPECS, N_SPECS, 3);
    fill_all(&g);
    assert_int_equal(fcdp__region_drop(g.regions[0], NULL), FCDP_ERR_INVALID);
    assert_text("precious");
    assert_text("span 0");
    assert_ok(fcdp__region_begin_use(g.regions[0]));
    assert_content(&g, 0, 0, 1);
    assert_ok(fcdp__region_store(g.regions[0], NULL));
    assert_int_equal(fcdp__region_drop(g.regions[0], NULL), FCDP_ERR_INVALID);
    assert_text("in use");
    assert_int_equal(fcdp__region_evict(g.regions[0]), FCDP_PENDING);
    fcdp__region_end_use(g.regions[0]);
    assert_ok(fcdp__region_drop(g.regions[0], NULL));
    assert_ok(fcdp__region_drop(g.regions[0], NULL)); /* nothing to do */
    /* void bytes may go */
    fcdp__region_invalidate(g.regions[1], FCDP_SPAN_MASK_ALL);
    assert_ok(fcdp__region_drop(g.regions[1], NULL));
    group_close(&g);
    node_close(&n);
}

static void who_evicted_alone_restores_alone(void **state) {
    (void)state;
    node n;
    group g;
    node_open(&n, 4, 8);
    group_open(&g, &n, "alone", SPECS, N_SPECS, 4);
    fill_all(&g);
    assert_ok(fcdp__region_evict(g.regions[2])); /* nobody else has stored anything */
    assert_span(g.regions[2], 0, false, true, true, 1);
    assert_ok(fcdp__region_begin_use(g.regions[2]));
    for (uint32_t s = 0; s < 2; s++) {
        assert_ok(fcdp__region_load_whole(g.regions[2], s));
        assert_content(&g, 2, s, 1);
    }
    fcdp__region_end_use(g.regions[2]);
    /* its slice counts as stored for the others: once they have stored theirs, all of them are clean */
    fcdp_tiering_stats before, after;
    for (uint32_t r = 0; r < 4; r++)
        if (r != 2) assert_ok(fcdp__region_store(g.regions[r], NULL));
    fcdp__tiering_stats(n.ranks[3].tiering, &before);
    assert_ok(fcdp__region_evict(g.regions[3]));
    fcdp__tiering_stats(n.ranks[3].tiering, &after);
    assert_int_equal(after.d2h_bytes, before.d2h_bytes);
    assert_int_equal(after.n_evictions, before.n_evictions + 1);
    group_close(&g);
    node_close(&n);
}

static void eviction_writes_only_what_the_host_lacks(void **state) {
    (void)state;
    node n;
    group g;
    node_open(&n, 4, 8);
    group_open(&g, &n, "rest", SPECS, N_SPECS, 5);
    fill_all(&g);
    assert_ok(fcdp__region_store(g.regions[1], NULL));
    assert_ok(fcdp__region_store(g.regions[3], NULL));
    assert_ok(fcdp__region_evict(g.regions[3]));
    fcdp_tiering_stats stats;
    fcdp__tiering_stats(n.ranks[3].tiering, &stats);
    assert_int_equal(stats.d2h_bytes, g.layout->bytes / 4 * 3); /* its own, then slices 0 and 2 */
    assert_ok(fcdp__region_begin_use(g.regions[3]));
    for (uint32_t s = 0; s < 2; s++) {
        assert_ok(fcdp__region_load_whole(g.regions[3], s));
        assert_content(&g, 3, s, 1);
    }
    fcdp__region_end_use(g.regions[3]);
    group_close(&g);
    node_close(&n);
}

static void the_reclaimer_takes_what_is_idle_and_content_survives(void **state) {
    (void)state;
    enum { N = 6 };
    node n;
    group g[N];
    node_open(&n, 1, 2);
    for (int i = 0; i < N; i++) group_open(&g[i], &n, "pressed", SPECS, N_SPECS, 100 + (uint64_t)i);
    for (int i = 0; i < N; i++) {
        fill_all(&g[i]);
        assert_true(live_pages(&n, 0) <= 2);
    }
    for (int i = 0; i < N; i++) {
        assert_ok(fcdp__region_begin_use(g[i].regions[0]));
        for (uint32_t s = 0; s < 2; s++) {
            assert_ok(fcdp__region_load_whole(g[i].regions[0], s));
            assert_content(&g[i], 0, s, 1);
        }
        fcdp__region_end_use(g[i].regions[0]);
    }
    /* all idle pages are in use: the error is clean, and goes away with the use */
    assert_ok(fcdp__region_begin_use(g[0].regions[0]));
    assert_ok(fcdp__region_begin_use(g[1].regions[0]));
    assert_int_equal(fcdp__region_begin_use(g[2].regions[0]), FCDP_ERR_NO_DEVICE_MEM);
    assert_false(state_of(g[2].regions[0]).in_use);
    fcdp__region_end_use(g[1].regions[0]);
    assert_ok(fcdp__region_begin_use(g[2].regions[0]));
    fcdp__region_end_use(g[2].regions[0]);
    fcdp__region_end_use(g[0].regions[0]);
    for (int i = 0; i < N; i++) group_close(&g[i]);
    node_close(&n);
}

static void without_host_memory_a_region_can_only_be_kept(void **state) {
    (void)state;
    node n;
    group g;
    fcdp_region *bare;
    node_open(&n, 1, 1);
    group_open(&g, &n, "other", SPECS, N_SPECS, 6);
    assert_ok(fcdp__region_create(n.ranks[0].tiering, "bare", g.layout, 0, NULL, &bare));
    assert_ok(fcdp__region_begin_use(bare));
    fcdp__region_filled(bare, FCDP_SPAN_MASK_ALL);
    fcdp__region_end_use(bare);
    assert_int_equal(fcdp__region_store(bare, NULL), FCDP_ERR_INVALID);
    assert_int_equal(fcdp__region_evict(bare), FCDP_ERR_INVALID);
    assert_int_equal(fcdp__region_begin_use(g.regions[0]),
                     FCDP_ERR_NO_DEVICE_MEM); /* nor does the reclaimer take it */
    fcdp__region_invalidate(bare, FCDP_SPAN_MASK_ALL);
    assert_ok(fcdp__region_begin_use(g.regions[0])); /* void bytes it takes */
    fcdp__region_end_use(g.regions[0]);
    fcdp__region_destroy(bare);
    group_close(&g);
    node_close(&n);
}

static void a_block_serves_one_region(void **state) {
    (void)state;
    node n;
    group g;
    fcdp_region *second = NULL;
    node_open(&n, 1, 2);
    group_open(&g, &n, "first", SPECS, N_SPECS, 7);
    fill_all(&g);
    assert_ok(fcdp__region_store(g.regions[0], NULL));
    assert_int_equal(fcdp__region_create(n.ranks[0].tiering, "second", g.layout, 0, g.blocks[0], &second),
                     FCDP_ERR_INVALID);
    assert_text("fresh");
    assert_null(second);
    group_close(&g);
    node_close(&n);
}

/* The trainable span of epoch 1 reaches the pages only at the end of much queued work; `written` is recorded after it. In use. */
static fcdp_event fill_late(group *g, uint8_t *want) {
    node *n = g->node;
    fcdp_event written;
    fcdp_piece span = g->layout->span[FCDP_SPAN_TRAINABLE];
    fcdp_dptr base = fcdp__region_base(g->regions[0]), aside = fcdp__dptr_add(base, PAGE / 2);
    content_make(g, FCDP_SPAN_TRAINABLE, 1, span.offset_bytes, span.bytes, want);
    assert_ok(fcdp__driver_copy_h2d(n->drv, aside, want, span.bytes, n->stream));
    assert_ok(fcdp__driver_stream_sync(n->drv, n->stream));
    for (int i = 0; i < 400; i++)
        assert_ok(fcdp__driver_copy_d2d(n->drv, base, fcdp__dptr_add(aside, PAGE / 8), PAGE / 4, n->stream));
    assert_ok(
        fcdp__driver_copy_d2d(n->drv, fcdp__dptr_add(base, span.offset_bytes), aside, span.bytes, n->stream));
    assert_ok(fcdp__driver_event_create(n->drv, &written));
    assert_ok(fcdp__driver_event_record(n->drv, written, n->stream));
    fcdp__region_filled(g->regions[0], 1u << FCDP_SPAN_TRAINABLE);
    return written;
}

static const fcdp_extent_spec LATE_SPECS[] = {{100000, FCDP_SPAN_TRAINABLE}};

static void late_open(node *n, group *g, uint8_t **want_out) {
    node_open(n, 1, 2);
    group_open(g, n, "late", LATE_SPECS, 1, 8);
    assert_ok(fcdp__region_begin_use(g->regions[0]));
    *want_out = malloc(g->layout->bytes);
    assert_non_null(*want_out);
}

static void late_close(node *n, group *g, uint8_t *want, fcdp_event written) {
    fcdp__driver_event_destroy(n->drv, written);
    free(want);
    group_close(g);
    node_close(n);
}

static void a_store_waits_for_the_work_before_it(void **state) {
    (void)state;
    node n;
    group g;
    uint8_t *want;
    late_open(&n, &g, &want);
    fcdp_event written = fill_late(&g, want);
    if (fcdp__driver_is_sim(n.drv))
        assert_int_equal(fcdp__driver_event_query(n.drv, written), FCDP_PENDING); /* else nothing is shown */
    assert_ok(fcdp__region_store(g.regions[0], written));
    fcdp__region_end_use(g.regions[0]);
    assert_ok(fcdp__region_drop(g.regions[0], written));
    assert_memory_equal(fcdp__host_data(g.blocks[0]), want, g.layout->bytes);
    late_close(&n, &g, want, written);
}

/* Whoever was told that the store failed may reuse the memory: no copy of it may land later. */
static void a_failed_store_leaves_no_copy_behind(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_sim();
    fcdp__driver_close(drv);
    node n;
    group g;
    uint8_t *want, *then;
    late_open(&n, &g, &want);
    then = malloc(g.layout->bytes);
    fcdp_event written = fill_late(&g, want);
    assert_int_equal(simgpu_fail_nth("cuEventRecord", 1, CUDA_UNKNOWN), 0);
    assert_int_equal(fcdp__region_store(g.regions[0], written), FCDP_ERR_DRIVER);
    memcpy(then, fcdp__host_data(g.blocks[0]), g.layout->bytes);
    assert_int_equal(fcdp__board_read(g.blocks[0], FCDP_BOARD_STORED_1, 0), 0);
    assert_span(g.regions[0], FCDP_SPAN_TRAINABLE, true, false, false, 1);
    assert_ok(fcdp__region_store(g.regions[0],
                                 written)); /* on the same stream, so what was left behind has landed now */
    assert_memory_equal(then, want, g.layout->bytes);
    fcdp__region_end_use(g.regions[0]);
    free(then);
    late_close(&n, &g, want, written);
}

typedef struct storer {
    fcdp_region *region;
    fcdp_event after;
    fcdp_status status;
} storer;

static void *store_run(void *arg) {
    storer *s = arg;
    s->status = fcdp__region_store(s->region, s->after);
    return NULL;
}

static bool is_moving(fcdp_region *region) {
    fcdp__lock_acquire(&region->tiering->lock);
    bool moving = region->moving;
    fcdp__lock_release(&region->tiering->lock);
    return moving;
}

/* The only pages are those of a region that another thread is just storing: they are waited for, and there is no error. */
static void pages_of_a_region_being_stored_are_waited_for(void **state) {
    (void)state;
    node n;
    group late, next;
    uint8_t *want;
    pthread_t thread;
    node_open(&n, 1, 1);
    group_open(&late, &n, "late", LATE_SPECS, 1, 8);
    group_open(&next, &n, "next", SPECS, N_SPECS, 9);
    want = malloc(late.layout->bytes);
    assert_ok(fcdp__region_begin_use(late.regions[0]));
    storer s = {late.regions[0], fill_late(&late, want), FCDP_OK};
    fcdp__region_end_use(late.regions[0]);
    assert_int_equal(pthread_create(&thread, NULL, store_run, &s), 0);
    while (!is_moving(late.regions[0]) && !state_of(late.regions[0]).span[FCDP_SPAN_TRAINABLE].slice_on_host)
        sched_yield();
    assert_ok(fcdp__region_begin_use(next.regions[0]));
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_ok(s.status);
    assert_span(late.regions[0], FCDP_SPAN_TRAINABLE, false, true, true, 1);
    fcdp__region_end_use(next.regions[0]);
    fcdp__driver_event_destroy(n.drv, s.after);
    free(want);
    group_close(&late);
    group_close(&next);
    node_close(&n);
}

typedef struct loader {
    fcdp_region *region;
    fcdp_status status;
    atomic_bool done;
} loader;

static void *load_run(void *arg) {
    loader *l = arg;
    for (uint32_t s = 0; s < FCDP_N_SPANS && !l->status; s++)
        l->status = fcdp__region_load_whole(l->region, s);
    atomic_store(&l->done, true);
    return NULL;
}

static void a_load_of_the_whole_waits_for_the_peers_slices(void **state) {
    (void)state;
    node n;
    group g;
    pthread_t thread;
    node_open(&n, 2, 8);
    group_open(&g, &n, "waits", SPECS, N_SPECS, 10);
    fill_all(&g);
    assert_ok(fcdp__region_store(g.regions[0], NULL));
    assert_ok(fcdp__region_drop(g.regions[0], NULL));
    assert_ok(fcdp__region_begin_use(g.regions[0]));
    loader l = {.region = g.regions[0]};
    assert_int_equal(pthread_create(&thread, NULL, load_run, &l), 0);
    while (!is_moving(g.regions[0]) && !atomic_load(&l.done)) sched_yield();
    assert_ok(fcdp__region_store(g.regions[1], NULL));
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_ok(l.status);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) assert_content(&g, 0, s, 1);
    fcdp__region_end_use(g.regions[0]);
    group_close(&g);
    node_close(&n);
}

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

static void a_touch_of_a_dropped_region_faults(void **state) {
    (void)state;
    node n;
    group g;
    node_open(&n, 1, 2);
    if (!fcdp__driver_is_sim(n.drv)) {
        node_close(&n);
        print_message("needs the simulated driver: the host touches device pages\n");
        skip();
    }
    group_open(&g, &n, "gone", SPECS, N_SPECS, 9);
    char *at = (char *)(uintptr_t)fcdp__region_base(g.regions[0]).addr;
    fill_all(&g);
    assert_false(faults(at));
    assert_ok(fcdp__region_store(g.regions[0], NULL));
    assert_ok(fcdp__region_drop(g.regions[0], NULL));
    assert_true(faults(at));
    assert_true(faults(at + g.layout->bytes - 1));
    group_close(&g);
    node_close(&n);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_life_of_a_region),
        cmocka_unit_test(spans_go_stale_apart),
        cmocka_unit_test(drop_refuses_to_lose_bytes),
        cmocka_unit_test(who_evicted_alone_restores_alone),
        cmocka_unit_test(eviction_writes_only_what_the_host_lacks),
        cmocka_unit_test(the_reclaimer_takes_what_is_idle_and_content_survives),
        cmocka_unit_test(without_host_memory_a_region_can_only_be_kept),
        cmocka_unit_test(a_block_serves_one_region),
        cmocka_unit_test(a_store_waits_for_the_work_before_it),
        cmocka_unit_test(a_failed_store_leaves_no_copy_behind),
        cmocka_unit_test(pages_of_a_region_being_stored_are_waited_for),
        cmocka_unit_test(a_load_of_the_whole_waits_for_the_peers_slices),
        cmocka_unit_test(a_touch_of_a_dropped_region_faults),
    };
    return cmocka_run_group_tests_name("tiering_region", tests, NULL, NULL);
}
