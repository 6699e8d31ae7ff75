/* One region at a time: its states, what each tier holds, what waits for what, eviction and restoring,
 * with slots and with exact mapping. test_slots.c has what several regions do to each other. */
#include <pthread.h>
#include <sched.h>

#include "tests/tiering/region_specs.h"

/* ---- the life of a region ---- */

static void a_life(bool exact) {
    node n;
    group g;
    node_open(&n, 2, 8, exact);
    group_open(&g, &n, "life", SPECS, N_SPECS, 1);
    fcdp_dptr base = fcdp__region_base(g.regions[0]);
    assert_span(g.regions[0], 0, false, false, false, 0);
    assert_false(state_of(g.regions[0]).mapped);
    assert_int_equal(pool_stats_of(&n, 0).live_pages, 0);

    group_acquire(&g);
    assert_true(state_of(g.regions[0]).in_use && state_of(g.regions[0]).mapped);
    assert_int_equal(pool_stats_of(&n, 0).live_pages, 1);
    assert_span(g.regions[0], 0, false, false, false, 0);
    for (uint32_t r = 0; r < 2; r++) region_fill(&g, r, BOTH, r ? FILL_SLICE : FILL_KEPT);
    for (uint32_t r = 0; r < 2; r++)
        for (uint32_t s = 0; s < 2; s++) assert_span(g.regions[r], s, true, r == 1, false, 1);
    region_store_late(&g, 0, BOTH);
    for (uint32_t r = 0; r < 2; r++) region_compute(&g, r, MS);
    for (uint32_t r = 0; r < 2; r++)
        for (uint32_t s = 0; s < 2; s++) assert_host_slice(&g, r, s, r, 1);
    for (uint32_t s = 0; s < 2; s++) assert_host_span(&g, 0, s, 1); /* both have been waited for */
    node_sync(&n);
    group_release(&g, false);
    for (uint32_t r = 0; r < 2; r++) {
        assert_false(state_of(g.regions[r]).in_use || state_of(g.regions[r]).kept);
        assert_int_equal(state_of(g.regions[r]).mapped, !exact); /* the device was done with it */
        for (uint32_t s = 0; s < 2; s++) assert_span(g.regions[r], s, false, true, false, 1);
    }

    group_acquire(&g);
    for (uint32_t s = 0; s < 2; s++) region_restore(&g, 0, s, false);
    for (uint32_t s = 0; s < 2; s++) region_restore(&g, 1, s, true);
    for (uint32_t r = 0; r < 2; r++) {
        for (uint32_t s = 0; s < 2; s++) assert_span(g.regions[r], s, true, true, false, 1);
        region_compute(&g, r, MS);
        region_release(&g, r, true);
        assert_true(state_of(g.regions[r]).kept && state_of(g.regions[r]).mapped &&
                    !state_of(g.regions[r]).in_use);
    }
    group_acquire(&g); /* kept: as it was */
    for (uint32_t r = 0; r < 2; r++) region_compute(&g, r, 0);
    group_release(&g, false);
    assert_int_equal(fcdp__region_base(g.regions[0]).addr, base.addr);

    fcdp_tiering_stats stats = stats_of(&n, 0);
    assert_int_equal(stats.n_stores, 1);
    assert_int_equal(stats.d2h_bytes, g.layout->bytes / 2);
    assert_int_equal(stats.h2d_bytes, g.layout->bytes / 2);
    assert_int_equal(stats.n_slice_loads, 2);
    assert_int_equal(stats.n_whole_loads, 0);
    stats = stats_of(&n, 1);
    assert_int_equal(stats.h2d_bytes, g.layout->bytes);
    assert_int_equal(stats.n_whole_loads, 2);
    assert_int_equal(stats.n_evictions, 0);
    group_close(&g);
    node_close(&n);
}

static void the_life_of_a_region(void **state) {
    (void)state;
    for (int slices = 0; slices < 2; slices++) {
        node_pins_slices = slices;
        a_life(false);
        a_life(true);
    }
    node_pins_slices = false;
}

/* The node's processes meet in its memory: each stores its slice, and loads the others' once they are
 * there. */
static void a_gather_through_the_host(void **state) {
    (void)state;
    for (int exact = 0; exact < 2; exact++) {
        node n;
        group g;
        node_open(&n, 4, 8, exact);
        group_open(&g, &n, "host", SPECS, N_SPECS, 2);
        for (uint32_t epoch = 1; epoch <= 4; epoch++) {
            group_fill(&g, BOTH, FILL_HOST, MS / 10);
            group_release(&g, false);
            for (uint32_t s = 0; s < 2; s++) assert_span(g.regions[3], s, false, true, false, epoch);
        }
        node_sync(&n);
        for (uint32_t s = 0; s < 2; s++) assert_host_span(&g, 0, s, 4);
        assert_int_equal(stats_of(&n, 2).d2h_bytes, g.layout->bytes);
        assert_int_equal(stats_of(&n, 2).h2d_bytes, 3 * g.layout->bytes);
        group_close(&g);
        node_close(&n);
    }
}

static void host_spoil(group *group, uint32_t r) {
    memset(fcdp__host_data(group->blocks[r]), 0xee, group->layout->bytes);
}

static void restore_alone(group *group, uint32_t r) {
    step(fcdp__region_acquire(group->regions[r]));
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) region_restore(group, r, s, true);
    region_compute(group, r, 0);
    region_release(group, r, false);
    node_sync(group->node);
}

/* Each rank stores to both, and loads from its own: what is in the other one does not matter to it. */
static void a_rank_reads_one_of_two_copies_and_writes_both(void **state) {
    (void)state;
    for (uint32_t spoiled = 0; spoiled < 2; spoiled++) {
        node n;
        group g;
        node_has_copies = true;
        node_open(&n, 3, 8, false);
        group_open(&g, &n, "copies", SPECS, N_SPECS, 2);
        group_fill(&g, BOTH, FILL_HOST, 0);
        group_release(&g, false);
        node_sync(&n);
        for (uint32_t r = 0; r < 3; r++)
            for (uint32_t s = 0; s < FCDP_N_SPANS; s++) assert_host_span(&g, r, s, 1);
        assert_int_equal(stats_of(&n, 2).d2h_bytes, 2 * g.layout->bytes / 3);
        assert_int_equal(stats_of(&n, 2).h2d_bytes, 2 * g.layout->bytes / 3);
        host_spoil(&g, spoiled); /* ranks 0 and 2 read one copy, rank 1 the other */
        restore_alone(&g, !spoiled);
        assert_peek(&g, !spoiled, FCDP_SPAN_FROZEN, 1, true);
        group_close(&g);
        node_close(&n);
    }
    node_has_copies = false;
}

/* The ranks of the other copy wait for what it writes, as those of its own do. */
static void an_eviction_writes_every_copy(void **state) {
    (void)state;
    node n;
    group g;
    node_has_copies = true;
    node_open(&n, 2, 8, false);
    group_open(&g, &n, "evicted", SPECS, N_SPECS, 2);
    group_acquire(&g);
    region_fill(&g, 0, BOTH, FILL_KEPT);
    region_fill(&g, 1, BOTH, FILL_SLICE);
    region_release(&g, 0, true);
    region_release(&g, 1, false);
    assert_true(fcdp__tiering_reclaim(n.ranks[0].tiering, 1) > 0);
    for (uint32_t r = 0; r < 2; r++) {
        restore_alone(&g, r);
        for (uint32_t s = 0; s < FCDP_N_SPANS; s++) assert_host_span(&g, r, s, 1);
    }
    group_close(&g);
    node_close(&n);
    node_has_copies = false;
}

static void spans_go_stale_apart(void **state) {
    (void)state;
    node n;
    group g;
    node_open(&n, 2, 8, false);
    group_open(&g, &n, "apart", SPECS, N_SPECS, 2);
    group_fill(&g, BOTH, FILL_SLICE, 0);
    group_release(&g, true);
    for (uint32_t r = 0; r < 2; r++) {
        fcdp__region_invalidate(g.regions[r], TRAINABLE);
        assert_span(g.regions[r], FCDP_SPAN_TRAINABLE, false, false, false, 1);
        assert_span(g.regions[r], FCDP_SPAN_FROZEN, true, true, false, 1);
        assert_true(state_of(g.regions[r]).kept);
    }
    group_acquire(&g);
    for (uint32_t r = 0; r < 2; r++) {
        assert_int_equal(fcdp__region_load_slice(g.regions[r], FCDP_SPAN_TRAINABLE), FCDP_ERR_INVALID);
        assert_int_equal(fcdp__region_load_whole(g.regions[r], FCDP_SPAN_TRAINABLE), FCDP_ERR_INVALID);
        assert_text("apart");
        assert_text("span 1 of epoch 1 is nowhere");
    }
    fcdp_tiering_stats before = stats_of(&n, 0);
    for (uint32_t r = 0; r < 2; r++) region_fill(&g, r, TRAINABLE, FILL_SLICE);
    for (uint32_t r = 0; r < 2; r++) {
        assert_span(g.regions[r], FCDP_SPAN_TRAINABLE, true, true, false, 2);
        assert_span(g.regions[r], FCDP_SPAN_FROZEN, true, true, false, 1);
        region_compute(&g, r, 0);
    }
    /* only the trainable slice is new: only it is stored */
    assert_int_equal(stats_of(&n, 0).d2h_bytes - before.d2h_bytes,
                     g.layout->span[FCDP_SPAN_TRAINABLE].bytes / 2);
    group_release(&g, false);
    group_restore(&g, true, 0);
    group_release(&g, false);
    group_close(&g);
    node_close(&n);
}

static void what_was_never_filled_is_nowhere(void **state) {
    (void)state;
    node n;
    group g;
    node_open(&n, 1, 2, false);
    group_open(&g, &n, "invalid", SPECS, N_SPECS, 3);
    group_acquire(&g);
    assert_int_equal(fcdp__region_load_slice(g.regions[0], 0), FCDP_ERR_INVALID);
    region_fill(&g, 0, BOTH, FILL_KEPT);
    region_compute(&g, 0, 0);
    group_release(&g, false); /* neither kept nor stored: gone */
    assert_span(g.regions[0], 0, false, false, false, 1);
    group_acquire(&g);
    assert_int_equal(fcdp__region_load_whole(g.regions[0], 1), FCDP_ERR_INVALID);
    assert_text("gather it");
    region_fill(&g, 0, BOTH, FILL_SLICE);
    assert_span(g.regions[0], 1, true, true, false, 2);
    group_release(&g, false);
    group_close(&g);
    node_close(&n);
}

static void a_block_serves_one_region(void **state) {
    (void)state;
    node n;
    group g;
    fcdp_region *second = NULL;
    node_open(&n, 2, 2, false);
    group_open(&g, &n, "first", SPECS, N_SPECS, 7);
    assert_int_equal(fcdp__region_create(n.ranks[0].tiering, "wrong", g.layout, 2, g.blocks[0], &second),
                     FCDP_ERR_INVALID);
    assert_text("slice 2 of 2");
    group_fill(&g, BOTH, FILL_SLICE, 0);
    group_release(&g, false);
    node_sync(&n);
    assert_int_equal(fcdp__region_create(n.ranks[0].tiering, "second", g.layout, 0, g.blocks[0], &second),
                     FCDP_ERR_INVALID);
    assert_text("fresh");
    assert_null(second);
    group_close(&g);
    node_close(&n);
}

/* ---- what waits for what ---- */

static void a_store_waits_for_what_writes_the_pages(void **state) {
    (void)state;
    node n;
    group g;
    node_open(&n, 1, 2, false);
    group_open(&g, &n, "late", SPECS, N_SPECS, 8);
    gate held = gate_make(&n);
    group_acquire(&g);
    gate_hold(&held, n.ranks[0].gather);
    region_fill(&g, 0, BOTH, FILL_SLICE);
    assert_false(has_passed(&n, fcdp__region_stored(g.regions[0])));
    gate_open(&held);
    for (uint32_t s = 0; s < 2; s++) assert_host_span(&g, 0, s, 1);
    group_release(&g, false);
    gate_destroy(&held);
    group_close(&g);
    node_close(&n);
}

/* What the others have not stored yet is waited for, whatever is loaded, on the device. */
static void loads_wait_for_the_others_words(void **state) {
    (void)state;
    node n;
    group g;
    node_open(&n, 2, 8, false);
    group_open(&g, &n, "waits", SPECS, N_SPECS, 10);
    gate held = gate_make(&n);
    group_acquire(&g);
    gate_hold(&held, n.ranks[1].gather);
    for (uint32_t r = 0; r < 2; r++) region_fill(&g, r, BOTH, FILL_HOST);
    assert_false(has_passed(&n, fcdp__region_loaded(g.regions[0])));
    for (uint32_t r = 0; r < 2; r++) region_compute(&g, r, 0);
    gate_open(&held);
    group_release(&g, false);
    node_sync(&n);
    gate_destroy(&held);

    held = gate_make(&n);
    group_acquire(&g);
    gate_hold(&held, n.ranks[1].gather);
    for (uint32_t r = 0; r < 2; r++) region_fill(&g, r, BOTH, FILL_SLICE);
    group_release(&g, false);
    group_acquire(&g);
    /* the whole of one, its slice of the other */
    for (uint32_t s = 0; s < 2; s++) region_restore(&g, 0, s, s == 0);
    region_compute(&g, 0, 0);
    assert_false(has_passed(&n, fcdp__region_loaded(g.regions[0])));
    gate_open(&held);
    assert_ok(fcdp__driver_event_sync(n.drv, fcdp__region_loaded(g.regions[0])));
    group_release(&g, false);
    gate_destroy(&held);
    group_close(&g);
    node_close(&n);
}

/* Host bytes are written over only when every process has read what it wanted of the older ones. */
static void a_store_waits_for_the_others_older_reads(void **state) {
    (void)state;
    node n;
    group g;
    node_open(&n, 2, 8, false);
    group_open(&g, &n, "readers", SPECS, N_SPECS, 11);
    group_fill(&g, BOTH, FILL_SLICE, 0);
    group_release(&g, false);
    node_sync(&n);
    gate held = gate_make(&n);
    gate_hold(&held, fcdp__tiering_stream(n.ranks[1].tiering, FCDP_TO_DEVICE));
    group_restore(&g, true, MS); /* epoch 1, late on rank 1 */
    group_release(&g, false);
    group_acquire(&g);
    for (uint32_t r = 0; r < 2; r++) region_fill(&g, r, BOTH, FILL_SLICE);
    assert_false(has_passed(&n, fcdp__region_stored(g.regions[0])));
    assert_ok(fcdp__driver_stream_sync(n.drv, n.ranks[0].compute));
    fcdp_piece mine = fcdp__layout_slice(g.layout, 0, 0);
    uint8_t *now = (uint8_t *)fcdp__host_data(g.blocks[0]) + mine.offset_bytes, *then = malloc(mine.bytes);
    assert_non_null(then);
    memcpy(then, now, mine.bytes);
    gate_open(&held);
    for (uint32_t r = 0; r < 2; r++) {
        region_compute(&g, r, 0);
        region_release(&g, r, false);
    }
    assert_host_slice(&g, 0, 0, 0, 2);
    assert_memory_not_equal(now, then, mine.bytes); /* it was of epoch 1 */
    free(then);
    gate_destroy(&held);
    group_close(&g);
    node_close(&n);
}

/* In which what nothing holds is done. */
static void time_pass(const node *n) {
    fcdp_stream stream;
    assert_ok(fcdp__driver_stream_create(n->drv, &stream));
    pause_enqueue(stream, 20 * MS, NULL);
    assert_ok(fcdp__driver_stream_sync(n->drv, stream));
    fcdp__driver_stream_destroy(n->drv, stream);
}

/* And only when no write of older ones is under way: whose place it was
 * last time need not be whose it is now. */
static void a_store_waits_for_the_others_older_writes(void **state) {
    (void)state;
    node n;
    group g;
    node_open(&n, 2, 8, false);
    group_open(&g, &n, "writers", SPECS, N_SPECS, 12);
    gate held = gate_make(&n);
    gate_hold(&held, fcdp__tiering_stream(n.ranks[1].tiering, FCDP_TO_HOST));
    for (uint32_t epoch = 1; epoch <= 2; epoch++) {
        group_acquire(&g);
        for (uint32_t r = 0; r < 2; r++) region_fill(&g, r, BOTH, FILL_SLICE);
        group_release(&g, false);
    }
    time_pass(&n);
    assert_true(fcdp__board_read(g.blocks[0], FCDP_BOARD_READY, 1) < 2);
    assert_false(has_passed(&n, fcdp__region_stored(g.regions[0])));
    gate_open(&held);
    node_sync(&n);
    for (uint32_t s = 0; s < 2; s++) assert_host_span(&g, 0, s, 2);
    gate_destroy(&held);
    group_close(&g);
    node_close(&n);
}

static void *squeeze_main(void *arg) {
    pages_squeeze(arg, 0, 2);
    return NULL;
}

static void *fill_host_main(void *arg) {
    const group *g = arg;
    return (void *)(intptr_t)fcdp__region_fill_host(g->regions[0], BOTH, NULL, 0, g->crossed[0]);
}

static bool is_moving(fcdp_region *region) {
    fcdp__lock_acquire(&region->tiering->lock);
    bool moving = region->moving;
    fcdp__lock_release(&region->tiering->lock);
    return moving;
}

/* Another thread writes all of the region to the host meanwhile: no rank
 * else may write there before it has. */
static void filling_the_host_waits_for_an_eviction(void **state) {
    (void)state;
    node n;
    group g;
    pthread_t evictor, filler;
    void *status;
    node_open(&n, 2, 2, false);
    /* the evictor waits in a copy of what is not pinned, before it has recorded any event */
    node_pins_slices = true;
    group_open(&g, &n, "evicted", SPECS, N_SPECS, 13);
    node_pins_slices = false;
    group_fill(&g, BOTH, FILL_KEPT, 0);
    group_release(&g, true);
    node_sync(&n);
    gate held = gate_make(&n);
    gate_hold(&held, fcdp__tiering_stream(n.ranks[0].tiering, FCDP_TO_HOST));
    assert_int_equal(pthread_create(&evictor, NULL, squeeze_main, &n), 0);
    while (!is_moving(g.regions[0])) sched_yield();
    assert_int_equal(pthread_create(&filler, NULL, fill_host_main, &g), 0);
    time_pass(&n);
    assert_int_equal(fcdp__board_read(g.blocks[1], FCDP_BOARD_READY, 0), 1);
    gate_open(&held);
    pthread_join(evictor, NULL);
    pthread_join(filler, &status);
    assert_int_equal((intptr_t)status, FCDP_OK);
    assert_ok(fcdp__region_fill_host(g.regions[1], BOTH, NULL, 0, g.crossed[1]));
    node_sync(&n);
    assert_int_equal(fcdp__board_read(g.blocks[1], FCDP_BOARD_READY, 0), 2);
    gate_destroy(&held);
    group_close(&g);
    node_close(&n);
}

/* ---- eviction and restoring ---- */

static void evict_and_restore_alone(void) {
    node n;
    group g;
    node_open(&n, 4, 2, false);
    group_open(&g, &n, "alone", SPECS, N_SPECS, 4);
    group_fill(&g, BOTH, FILL_KEPT, MS);
    group_release(&g, true);
    pages_squeeze(&n, 2, 2); /* no rank has stored anything: it writes all */
    assert_int_equal(stats_of(&n, 2).n_evictions, 1);
    assert_int_equal(stats_of(&n, 2).d2h_bytes, g.layout->bytes);
    assert_false(state_of(g.regions[2]).mapped || state_of(g.regions[2]).kept);
    for (uint32_t s = 0; s < 2; s++) {
        assert_span(g.regions[2], s, false, true, true, 1);
        assert_host_span(&g, 2, s, 1);
    }
    step(fcdp__region_acquire(g.regions[2]));
    for (uint32_t s = 0; s < 2; s++) region_restore(&g, 2, s, true);
    region_compute(&g, 2, 0);
    region_release(&g, 2, true);
    /* Later all of them release, the others having stored theirs: its own pieces count
     * as stored, or they would wait for ever. */
    group_acquire(&g);
    for (uint32_t r = 0; r < 4; r++)
        if (r != 2) region_store_late(&g, r, BOTH);
    group_release(&g, false);
    group_restore(&g, false, 0);
    group_release(&g, false);
    group_restore(&g, true, 0);
    group_release(&g, false);
    group_close(&g);
    node_close(&n);
}

static void who_evicts_alone_restores_alone(void **state) {
    (void)state;
    for (int slices = 0; slices < 2; slices++) {
        node_pins_slices = slices;
        evict_and_restore_alone();
    }
    node_pins_slices = false;
}

static void eviction_writes_the_spans_that_the_host_lacks(void **state) {
    (void)state;
    node n;
    group g;
    node_open(&n, 2, 2, false);
    group_open(&g, &n, "lacks", SPECS, N_SPECS, 5);
    group_fill(&g, BOTH, FILL_SLICE, 0);
    group_release(&g, true);
    group_fill(&g, TRAINABLE, FILL_KEPT, 0); /* only on the device */
    group_release(&g, true);
    node_sync(&n);
    fcdp_tiering_stats before = stats_of(&n, 1);
    pages_squeeze(&n, 1, 2);
    assert_int_equal(stats_of(&n, 1).d2h_bytes - before.d2h_bytes, g.layout->span[FCDP_SPAN_TRAINABLE].bytes);
    assert_span(g.regions[1], FCDP_SPAN_FROZEN, false, true, false, 1);
    assert_span(g.regions[1], FCDP_SPAN_TRAINABLE, false, true, true, 2);
    step(fcdp__region_acquire(g.regions[1]));
    for (uint32_t s = 0; s < 2; s++) region_restore(&g, 1, s, true);
    region_compute(&g, 1, 0);
    region_release(&g, 1, true);
    /* now it is clean here, and by its own word half clean there */
    before = stats_of(&n, 1);
    pages_squeeze(&n, 1, 2);
    assert_int_equal(stats_of(&n, 1).d2h_bytes, before.d2h_bytes);
    assert_int_equal(stats_of(&n, 1).n_evictions, before.n_evictions + 1);
    group_close(&g);
    node_close(&n);
}

/* A node of one process has no peer to wait for. */
static void a_process_alone_evicts_what_was_never_stored(void **state) {
    (void)state;
    for (int exact = 0; exact < 2; exact++) {
        node n;
        group g;
        node_open(&n, 1, 1, exact);
        group_open(&g, &n, "single", SPECS, N_SPECS, 6);
        for (uint32_t epoch = 1; epoch <= 3; epoch++) {
            uint64_t start_ns = fcdp__now_ns();
            group_fill(&g, BOTH, FILL_KEPT, MS);
            group_release(&g, true);
            pages_squeeze(&n, 0, 1);
            assert_true(fcdp__now_ns() - start_ns < 15000ull * MS); /* the board's timeout is 20 s */
            assert_host_span(&g, 0, 0, epoch);
            group_restore(&g, true, MS);
            group_release(&g, epoch == 2);
        }
        assert_int_equal(stats_of(&n, 0).n_evictions, 3);
        group_close(&g);
        node_close(&n);
    }
}

static void void_bytes_go_without_a_copy(void **state) {
    (void)state;
    node n;
    group g;
    node_open(&n, 2, 2, false);
    group_open(&g, &n, "invalid", SPECS, N_SPECS, 12);
    group_fill(&g, BOTH, FILL_KEPT, 0);
    group_release(&g, true);
    fcdp__region_invalidate(g.regions[0], BOTH);
    pages_squeeze(&n, 0, 2);
    assert_int_equal(stats_of(&n, 0).d2h_bytes, 0);
    assert_span(g.regions[0], 0, false, false, false, 1);
    group_close(&g);
    node_close(&n);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_life_of_a_region),
        cmocka_unit_test(a_gather_through_the_host),
        cmocka_unit_test(a_rank_reads_one_of_two_copies_and_writes_both),
        cmocka_unit_test(an_eviction_writes_every_copy),
        cmocka_unit_test(spans_go_stale_apart),
        cmocka_unit_test(what_was_never_filled_is_nowhere),
        cmocka_unit_test(a_block_serves_one_region),
        cmocka_unit_test(a_store_waits_for_what_writes_the_pages),
        cmocka_unit_test(loads_wait_for_the_others_words),
        cmocka_unit_test(a_store_waits_for_the_others_older_reads),
        cmocka_unit_test(a_store_waits_for_the_others_older_writes),
        cmocka_unit_test(filling_the_host_waits_for_an_eviction),
        cmocka_unit_test(who_evicts_alone_restores_alone),
        cmocka_unit_test(eviction_writes_the_spans_that_the_host_lacks),
        cmocka_unit_test(a_process_alone_evicts_what_was_never_stored),
        cmocka_unit_test(void_bytes_go_without_a_copy),
    };
    return cmocka_run_group_tests_name("tiering_region", tests, NULL, NULL);
}
