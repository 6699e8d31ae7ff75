/* Ranges: one address for life, contents, faults when unmapped, every failing driver call, a random schedule.
 */
#include "alloc/vrange.h"
#include "tests/alloc/support.h"

enum { PAGE = 2 << 20 };

typedef struct world {
    fcdp_driver *drv;
    fcdp_pool *pool;
} world;

static world world_create(fcdp_driver *drv, size_t n_pages) {
    world w = {.drv = drv};
    assert_ok(fcdp__pool_create(drv, n_pages * PAGE, &w.pool));
    return w;
}

static void world_destroy(world *w) {
    bool is_sim = fcdp__driver_is_sim(w->drv);
    fcdp__pool_destroy(w->pool);
    if (is_sim) assert_nothing_lives();
    fcdp__driver_close(w->drv);
}

static size_t n_live_pages(world *w) {
    fcdp_pool_stats stats;
    fcdp__pool_stats(w->pool, &stats);
    return stats.live_pages;
}

/* The 64-bit word at byte `at` of a range holding pattern `tag`. */
static uint64_t pattern_word(uint64_t tag, size_t at) {
    return (tag << 40) ^ at * 0x9E3779B97F4A7C15u;
}

enum { N_PROBES = 4, MOST_PAGES = 8 };

static size_t probe_offset(size_t page, int probe) {
    return page * PAGE + (size_t)probe * (PAGE - 8) / (N_PROBES - 1) / 8 * 8;
}

/* A few words of each page, its first and last among them, by copies: a real device can run this too. */
static void pattern_write(world *w, const fcdp_vrange *range, uint64_t tag) {
    uint64_t words[MOST_PAGES * N_PROBES];
    for (size_t i = 0; i < fcdp__vrange_n_pages(range) * N_PROBES; i++) {
        size_t at = probe_offset(i / N_PROBES, (int)(i % N_PROBES));
        words[i] = pattern_word(tag, at);
        assert_ok(
            fcdp__driver_copy_h2d(w->drv, fcdp__dptr_add(fcdp__vrange_base(range), at), &words[i], 8, NULL));
    }
    assert_ok(fcdp__driver_stream_sync(w->drv, NULL));
}

static void pattern_check(world *w, const fcdp_vrange *range, uint64_t tag) {
    uint64_t words[MOST_PAGES * N_PROBES] = {0};
    for (size_t i = 0; i < fcdp__vrange_n_pages(range) * N_PROBES; i++) {
        fcdp_dptr at =
            fcdp__dptr_add(fcdp__vrange_base(range), probe_offset(i / N_PROBES, (int)(i % N_PROBES)));
        assert_ok(fcdp__driver_copy_d2h(w->drv, &words[i], at, 8, NULL));
    }
    assert_ok(fcdp__driver_stream_sync(w->drv, NULL));
    for (size_t i = 0; i < fcdp__vrange_n_pages(range) * N_PROBES; i++)
        assert_true(words[i] == pattern_word(tag, probe_offset(i / N_PROBES, (int)(i % N_PROBES))));
}

static void the_address_stays_the_pages_change(void **state) {
    (void)state;
    world w = world_create(driver_open_any(), 16);
    fcdp_vrange *range;
    assert_ok(fcdp__vrange_create(w.drv, w.pool, 4 * PAGE + 1, &range));
    assert_int_equal(fcdp__vrange_n_pages(range), 5);
    uint64_t base = fcdp__vrange_base(range).addr;
    assert_int_equal(base % PAGE, 0);
    for (uint64_t round = 1; round <= 50; round++) {
        assert_false(fcdp__vrange_is_mapped(range));
        assert_ok(fcdp__vrange_map(range));
        assert_true(fcdp__vrange_is_mapped(range));
        assert_int_equal(n_live_pages(&w), 5);
        assert_true(fcdp__vrange_base(range).addr == base);
        pattern_write(&w, range, round);
        pattern_check(&w, range, round);
        assert_ok(fcdp__vrange_unmap(range));
        assert_int_equal(n_live_pages(&w), 0);
    }
    fcdp__vrange_destroy(range);
    world_destroy(&w);
}

static void two_ranges_never_share_a_page(void **state) {
    (void)state;
    world w = world_create(driver_open_any(), 6);
    fcdp_vrange *one, *two;
    assert_ok(fcdp__vrange_create(w.drv, w.pool, 3 * PAGE, &one));
    assert_ok(fcdp__vrange_create(w.drv, w.pool, 3 * PAGE, &two));
    assert_ok(fcdp__vrange_map(one));
    assert_ok(fcdp__vrange_map(two));
    pattern_write(&w, one, 1);
    pattern_write(&w, two, 2);
    pattern_check(&w, one, 1);
    for (uint64_t round = 3; round < 20; round++) { /* the pages wander from one to the other */
        assert_ok(fcdp__vrange_unmap(one));
        assert_ok(fcdp__vrange_map(one));
        pattern_write(&w, one, round);
        pattern_check(&w, two, round - 1);
        fcdp_vrange *swap = one;
        one = two;
        two = swap;
    }
    fcdp__vrange_destroy(one);
    fcdp__vrange_destroy(two);
    world_destroy(&w);
}

static void a_mapped_range_is_unmapped_by_its_end(void **state) {
    (void)state;
    world w = world_create(driver_open_any(), 2);
    fcdp_vrange *range;
    assert_ok(fcdp__vrange_create(w.drv, w.pool, 2 * PAGE, &range));
    assert_ok(fcdp__vrange_map(range));
    fcdp__vrange_destroy(range);
    fcdp__vrange_destroy(NULL);
    assert_int_equal(n_live_pages(&w), 0);
    world_destroy(&w);
}

static void a_range_beyond_the_budget_takes_nothing(void **state) {
    (void)state;
    world w = world_create(driver_open_any(), 3);
    fcdp_vrange *range, *nothing = NULL;
    assert_ok(fcdp__vrange_create(w.drv, w.pool, 4 * PAGE, &range));
    assert_int_equal(fcdp__vrange_map(range), FCDP_ERR_NO_DEVICE_MEM);
    assert_false(fcdp__vrange_is_mapped(range));
    assert_int_equal(n_live_pages(&w), 0);
    fcdp__vrange_destroy(range);
    assert_int_equal(fcdp__vrange_create(w.drv, w.pool, 0, &nothing), FCDP_ERR_INVALID);
    assert_int_equal(fcdp__vrange_create(w.drv, w.pool, SIZE_MAX, &nothing), FCDP_ERR_INVALID);
    assert_null(nothing);
    world_destroy(&w);
}

/* ---- what a touch meets: the simulated driver lets the CPU in where CUDA lets the device in ---- */

static void touch(void *at) {
    *(volatile char *)at = 1;
}

static void an_unmapped_range_faults(void **state) {
    (void)state;
    world w = world_create(driver_open_sim(), 2);
    fcdp_vrange *range;
    assert_ok(fcdp__vrange_create(w.drv, w.pool, 2 * PAGE, &range));
    char *first = (char *)fcdp__vrange_base(range).addr, *last = first + 2 * PAGE - 1;
    assert_dies(touch, first, SIGSEGV);
    assert_ok(fcdp__vrange_map(range));
    uint64_t *words = (uint64_t *)first;
    for (size_t i = 0; i < 2 * PAGE / 8; i++) words[i] = i ^ 0xC0FFEE;
    for (size_t i = 0; i < 2 * PAGE / 8; i++) assert_true(words[i] == (i ^ 0xC0FFEE));
    assert_ok(fcdp__vrange_unmap(range));
    assert_dies(touch, first, SIGSEGV);
    assert_dies(touch, last, SIGSEGV);
    fcdp__vrange_destroy(range);
    world_destroy(&w);
}

/* ---- the n-th driver call fails ---- */

/* A short life: create, map, write, unmap, map, destroy while mapped. Returns the first failure. Whatever
 * failed, the range is at every point wholly mapped or wholly unmapped, and another attempt works. */
static fcdp_status life_run(world *w) {
    fcdp_vrange *range = NULL;
    fcdp_status first = fcdp__vrange_create(w->drv, w->pool, 3 * PAGE, &range);
    if (first) {
        assert_null(range);
        return first;
    }
    for (int round = 0; round < 2; round++) {
        fcdp_status status = fcdp__vrange_map(range);
        assert_true(fcdp__vrange_is_mapped(range) == !status);
        if (status) {
            if (!first) first = status;
            assert_ok(fcdp__vrange_map(range));
        }
        assert_int_equal(n_live_pages(w), 3);
        for (int page = 0; page < 3; page++)
            ((char *)fcdp__vrange_base(range).addr)[page * PAGE] = (char)(round + 1);
        if (round == 1) break;
        status = fcdp__vrange_unmap(range);
        assert_true(fcdp__vrange_is_mapped(range) == (status != FCDP_OK));
        if (status) {
            if (!first) first = status;
            assert_int_equal(*(char *)fcdp__vrange_base(range).addr, 1); /* still mapped, with its contents */
            assert_ok(fcdp__vrange_unmap(range));
        }
        assert_int_equal(n_live_pages(w), 0);
    }
    fcdp__vrange_destroy(range);
    return first;
}

static void every_failing_call_leaves_nothing_behind(void **state) {
    (void)state;
    const int codes[] = {CUDA_INVALID_VALUE, CUDA_OUT_OF_MEMORY, CUDA_UNKNOWN};
    size_t n_failed = 0, n_survived = 0;
    fcdp_log_set_level(FCDP_LOG_QUIET);
    for (size_t c = 0; c < sizeof codes / sizeof codes[0]; c++) {
        for (unsigned long n = 1;; n++) {
            world w = world_create(driver_open_sim(), 4);
            unsigned long before = simgpu_calls(NULL);
            assert_int_equal(simgpu_fail_nth(NULL, n, codes[c]), 0);
            fcdp_status status = life_run(&w);
            bool spent = simgpu_calls(NULL) - before >= n;
            simgpu_fail_nth(NULL, 0, 0);
            n_failed += status != FCDP_OK;
            n_survived += status == FCDP_OK &&
                          spent; /* a destroy that tried again, or the way back to a thread's context */
            assert_int_equal(n_live_pages(&w), 0);
            world_destroy(&w);
            if (!spent) break;
        }
    }
    fcdp_log_set_level(FCDP_LOG_WARN);
    print_message("%zu failures reported, %zu survived\n", n_failed, n_survived);
    assert_true(n_failed > 30 && n_survived > 3);
}

/* A failed map whose rollback fails too: the pages stay out of everybody's reach until an undo works. */
static void a_failed_rollback_is_undone_later(void **state) {
    (void)state;
    world w = world_create(driver_open_sim(), 4);
    fcdp_vrange *range;
    assert_ok(fcdp__vrange_create(w.drv, w.pool, 3 * PAGE, &range));
    /* A page that another mapping of the same address blocks: the third cuMemMap fails by itself, the unmap
     * by order. */
    fcdp_phys blocker;
    fcdp_dptr third = fcdp__dptr_add(fcdp__vrange_base(range), 2 * PAGE);
    assert_ok(fcdp__driver_phys_create(w.drv, PAGE, &blocker));
    assert_ok(fcdp__driver_map(w.drv, third, PAGE, blocker));
    assert_int_equal(simgpu_fail_nth("cuMemUnmap", 1, CUDA_UNKNOWN), 0);
    assert_int_equal(fcdp__vrange_map(range), FCDP_ERR_DRIVER);
    assert_text("cuMemMap");
    assert_text("2 pages stay under the range");
    assert_text("cuMemUnmap");
    assert_false(fcdp__vrange_is_mapped(range));
    assert_int_equal(n_live_pages(&w), 2);

    assert_ok(fcdp__driver_unmap(w.drv, third, PAGE));
    assert_ok(fcdp__driver_phys_release(w.drv, blocker));
    assert_ok(fcdp__vrange_map(range));
    assert_int_equal(n_live_pages(&w), 3);
    pattern_write(&w, range, 5);
    pattern_check(&w, range, 5);
    fcdp__vrange_destroy(range);
    world_destroy(&w);
}

/* ---- random schedule ---- */

enum { N_RANGES = 12, BUDGET = 24, N_STEPS = 1500 };

typedef struct slot {
    fcdp_vrange *range;
    uint64_t base, tag;
    bool mapped;
} slot;

typedef struct schedule {
    world *w;
    slot slots[N_RANGES];
    uint64_t rng, next_tag;
    size_t n_mapped_pages;
} schedule;

static void slot_map(schedule *s, slot *one) {
    size_t n = fcdp__vrange_n_pages(one->range);
    fcdp_status status = fcdp__vrange_map(one->range);
    assert_int_equal(status, s->n_mapped_pages + n <= BUDGET ? FCDP_OK : FCDP_ERR_NO_DEVICE_MEM);
    if (status) return;
    one->mapped = true;
    one->tag = ++s->next_tag;
    s->n_mapped_pages += n;
    pattern_write(s->w, one->range, one->tag);
}

static void slot_step(schedule *s, slot *one) {
    size_t action = random_below(&s->rng, 8);
    if (!one->range) {
        assert_ok(
            fcdp__vrange_create(s->w->drv, s->w->pool, 1 + random_below(&s->rng, 6 * PAGE), &one->range));
        one->base = fcdp__vrange_base(one->range).addr;
    } else if (action == 0) {
        if (one->mapped) s->n_mapped_pages -= fcdp__vrange_n_pages(one->range);
        fcdp__vrange_destroy(one->range);
        *one = (slot){0};
    } else if (!one->mapped) {
        slot_map(s, one);
    } else if (action < 4) {
        pattern_check(s->w, one->range, one->tag);
        assert_ok(fcdp__vrange_unmap(one->range));
        one->mapped = false;
        s->n_mapped_pages -= fcdp__vrange_n_pages(one->range);
    } else {
        pattern_check(s->w, one->range, one->tag);
    }
}

static void a_random_schedule_agrees_with_the_oracle(void **state) {
    (void)state;
    world w = world_create(driver_open_any(), BUDGET);
    schedule s = {.w = &w, .rng = seed_choose(__func__)};
    for (int step = 0; step < N_STEPS; step++) {
        slot *one = &s.slots[random_below(&s.rng, N_RANGES)];
        slot_step(&s, one);
        if (random_below(&s.rng, 64) == 0) (void)fcdp__pool_trim(w.pool);
        assert_int_equal(n_live_pages(&w), s.n_mapped_pages);
        if (one->range) {
            assert_true(fcdp__vrange_base(one->range).addr == one->base);
            assert_int_equal(fcdp__vrange_is_mapped(one->range), one->mapped);
        }
    }
    for (int i = 0; i < N_RANGES; i++) {
        if (s.slots[i].mapped) pattern_check(&w, s.slots[i].range, s.slots[i].tag);
        fcdp__vrange_destroy(s.slots[i].range);
    }
    world_destroy(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_address_stays_the_pages_change),
        cmocka_unit_test(two_ranges_never_share_a_page),
        cmocka_unit_test(a_mapped_range_is_unmapped_by_its_end),
        cmocka_unit_test(a_range_beyond_the_budget_takes_nothing),
        cmocka_unit_test(an_unmapped_range_faults),
        cmocka_unit_test(every_failing_call_leaves_nothing_behind),
        cmocka_unit_test(a_failed_rollback_is_undone_later),
        cmocka_unit_test(a_random_schedule_agrees_with_the_oracle),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
