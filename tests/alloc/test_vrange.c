/* Ranges: one address for life, blocks that come and go and may lie under several of them, faults when
 * unmapped, every failing driver call, a random schedule. */
#include "alloc/vrange.h"
#include "tests/alloc/support.h"
#include "tests/log_text.h"

enum { PAGE = 2 << 20 };

typedef struct block {
    fcdp_phys phys;
    size_t n_pages;
} block;

static block block_create(fcdp_driver *drv, size_t n_pages) {
    block made = {.n_pages = n_pages};
    assert_ok(fcdp__driver_phys_create(drv, n_pages * PAGE, &made.phys));
    return made;
}

static fcdp_status block_map(fcdp_vrange *range, const block *of) {
    return fcdp__vrange_map(range, of->phys, of->n_pages * PAGE);
}

static void driver_close(fcdp_driver *drv) {
    if (fcdp__driver_is_sim(drv)) assert_nothing_lives();
    fcdp__driver_close(drv);
}

/* ---- a few words of each page, its first and last among them, by copies: a real device can do this ---- */

enum { N_PROBES = 4, MOST_PAGES = 8 };

/* The 64-bit word at byte `at` of a block holding pattern `tag`. */
static uint64_t pattern_word(uint64_t tag, size_t at) {
    return (tag << 40) ^ at * 0x9E3779B97F4A7C15u;
}

static size_t probe_offset(size_t i) {
    return i / N_PROBES * PAGE + i % N_PROBES * (PAGE - 8) / (N_PROBES - 1) / 8 * 8;
}

static void pattern_write(fcdp_driver *drv, const fcdp_vrange *range, size_t n_pages, uint64_t tag) {
    uint64_t words[MOST_PAGES * N_PROBES];
    for (size_t i = 0; i < n_pages * N_PROBES; i++) {
        fcdp_dptr at = fcdp__dptr_add(fcdp__vrange_base(range), probe_offset(i));
        words[i] = pattern_word(tag, probe_offset(i));
        assert_ok(fcdp__driver_copy_h2d(drv, at, &words[i], 8, NULL));
    }
    assert_ok(fcdp__driver_stream_sync(drv, NULL));
}

static void pattern_check(fcdp_driver *drv, const fcdp_vrange *range, size_t n_pages, uint64_t tag) {
    uint64_t words[MOST_PAGES * N_PROBES] = {0};
    for (size_t i = 0; i < n_pages * N_PROBES; i++) {
        fcdp_dptr at = fcdp__dptr_add(fcdp__vrange_base(range), probe_offset(i));
        assert_ok(fcdp__driver_copy_d2h(drv, &words[i], at, 8, NULL));
    }
    assert_ok(fcdp__driver_stream_sync(drv, NULL));
    for (size_t i = 0; i < n_pages * N_PROBES; i++)
        assert_true(words[i] == pattern_word(tag, probe_offset(i)));
}

/* ---- addresses and blocks ---- */

static void the_address_stays_and_so_does_what_a_block_holds(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_any();
    fcdp_vrange *range;
    block blocks[3];
    for (size_t i = 0; i < 3; i++) blocks[i] = block_create(drv, 3 + i);
    assert_ok(fcdp__vrange_create(drv, 4 * PAGE + 1, &range));
    assert_int_equal(fcdp__vrange_bytes(range), 5 * PAGE);
    uint64_t base = fcdp__vrange_base(range).addr;
    assert_int_equal(base % PAGE, 0);
    for (uint64_t round = 0; round < 30; round++) {
        const block *one = &blocks[round % 3];
        assert_false(fcdp__vrange_is_mapped(range));
        assert_ok(block_map(range, one));
        assert_true(fcdp__vrange_is_mapped(range));
        assert_true(fcdp__vrange_base(range).addr == base);
        if (round >= 3) pattern_check(drv, range, one->n_pages, round - 3);
        pattern_write(drv, range, one->n_pages, round);
        pattern_check(drv, range, one->n_pages, round);
        assert_ok(fcdp__vrange_unmap(range));
    }
    fcdp__vrange_destroy(range);
    for (size_t i = 0; i < 3; i++) assert_ok(fcdp__driver_phys_release(drv, blocks[i].phys));
    driver_close(drv);
}

static void a_block_is_the_same_under_every_range_that_it_is_mapped_under(void **state) {
    (void)state;
    enum { N = 4 };
    fcdp_driver *drv = driver_open_any();
    fcdp_vrange *ranges[N];
    block one = block_create(drv, 2);
    for (int i = 0; i < N; i++) {
        assert_ok(fcdp__vrange_create(drv, (size_t)(2 + i) * PAGE, &ranges[i]));
        assert_ok(block_map(ranges[i], &one));
    }
    for (int i = 0; i < N; i++) { /* each write is over before the next read: pattern_* wait */
        pattern_write(drv, ranges[i], 2, (uint64_t)i);
        for (int k = 0; k < N; k++) pattern_check(drv, ranges[k], 2, (uint64_t)i);
    }
    assert_ok(fcdp__vrange_unmap(ranges[0]));
    pattern_check(drv, ranges[1], 2, N - 1); /* the others stay mapped */
    assert_ok(fcdp__driver_phys_release(drv, one.phys));
    pattern_check(drv, ranges[N - 1], 2, N - 1); /* and keep the block alive */
    for (int i = 0; i < N; i++) fcdp__vrange_destroy(ranges[i]);
    driver_close(drv);
}

static void blocks_are_apart(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_any();
    fcdp_vrange *one, *two;
    block blocks[2] = {block_create(drv, 3), block_create(drv, 3)};
    assert_ok(fcdp__vrange_create(drv, 3 * PAGE, &one));
    assert_ok(fcdp__vrange_create(drv, 3 * PAGE, &two));
    for (uint64_t round = 0; round < 8; round++) { /* the blocks change places */
        assert_ok(block_map(one, &blocks[round % 2]));
        assert_ok(block_map(two, &blocks[1 - round % 2]));
        if (round) pattern_check(drv, one, 3, 2 * round - 1);
        if (round) pattern_check(drv, two, 3, 2 * round - 2);
        pattern_write(drv, one, 3, 2 * round);
        pattern_write(drv, two, 3, 2 * round + 1);
        pattern_check(drv, one, 3, 2 * round);
        assert_ok(fcdp__vrange_unmap(one));
        assert_ok(fcdp__vrange_unmap(two));
    }
    for (int i = 0; i < 2; i++) assert_ok(fcdp__driver_phys_release(drv, blocks[i].phys));
    fcdp__vrange_destroy(one);
    fcdp__vrange_destroy(two);
    driver_close(drv);
}

static void a_mapped_range_is_unmapped_by_its_end(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_any();
    fcdp_vrange *range;
    block one = block_create(drv, 2);
    assert_ok(fcdp__vrange_create(drv, 2 * PAGE, &range));
    assert_ok(block_map(range, &one));
    fcdp__vrange_destroy(range);
    fcdp__vrange_destroy(NULL);
    assert_ok(fcdp__driver_phys_release(drv, one.phys));
    driver_close(drv);
}

static void a_size_that_cannot_be_is_refused(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_any();
    fcdp_vrange *nothing = NULL;
    assert_int_equal(fcdp__vrange_create(drv, 0, &nothing), FCDP_ERR_INVALID);
    assert_int_equal(fcdp__vrange_create(drv, SIZE_MAX, &nothing), FCDP_ERR_INVALID);
    assert_null(nothing);
    driver_close(drv);
}

/* ---- misuse ---- */

typedef struct misuse {
    fcdp_vrange *range;
    block one;
} misuse;

static void map_twice(void *arg) {
    misuse *m = arg;
    fcdp__check_level = 1;
    (void)!block_map(m->range, &m->one);
}

static void map_too_much(void *arg) {
    misuse *m = arg;
    fcdp__check_level = 1;
    (void)!fcdp__vrange_map(m->range, m->one.phys, fcdp__vrange_bytes(m->range) + PAGE);
}

static void unmap_nothing(void *arg) {
    misuse *m = arg;
    fcdp__check_level = 1;
    (void)!fcdp__vrange_unmap(m->range);
}

static void misuse_aborts(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_sim();
    misuse m = {.one = block_create(drv, 1)};
    assert_ok(fcdp__vrange_create(drv, PAGE, &m.range));
    assert_dies(unmap_nothing, &m, SIGABRT);
    assert_dies(map_too_much, &m, SIGABRT);
    assert_ok(block_map(m.range, &m.one));
    assert_dies(map_twice, &m, SIGABRT);
    fcdp__vrange_destroy(m.range);
    assert_ok(fcdp__driver_phys_release(drv, m.one.phys));
    driver_close(drv);
}

/* ---- what a touch meets: the simulated driver lets the CPU in where CUDA lets the device in ---- */

static void touch(void *at) {
    *(volatile char *)at = 1;
}

static void an_unmapped_range_faults(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_sim();
    fcdp_vrange *range;
    block one = block_create(drv, 2);
    assert_ok(fcdp__vrange_create(drv, 3 * PAGE, &range));
    char *first = (char *)fcdp__vrange_base(range).addr, *last = first + 2 * PAGE - 1;
    assert_dies(touch, first, SIGSEGV);
    assert_ok(block_map(range, &one));
    uint64_t *words = (uint64_t *)first;
    for (size_t i = 0; i < 2 * PAGE / 8; i++) words[i] = i ^ 0xC0FFEE;
    for (size_t i = 0; i < 2 * PAGE / 8; i++) assert_true(words[i] == (i ^ 0xC0FFEE));
    assert_dies(touch, last + 1, SIGSEGV); /* the range goes on, the block does not */
    assert_ok(fcdp__vrange_unmap(range));
    assert_dies(touch, first, SIGSEGV);
    assert_dies(touch, last, SIGSEGV);
    fcdp__vrange_destroy(range);
    assert_ok(fcdp__driver_phys_release(drv, one.phys));
    driver_close(drv);
}

/* ---- the n-th driver call fails ---- */

/* A short life: create, map, write, unmap, map, destroy while mapped. Returns the first failure. Whatever
 * failed, the block is at every point wholly mapped or wholly unmapped, and another attempt works. */
static fcdp_status life_run(fcdp_driver *drv, const block *one) {
    fcdp_vrange *range = NULL;
    fcdp_status first = fcdp__vrange_create(drv, 3 * PAGE, &range);
    if (first) {
        assert_null(range);
        return first;
    }
    for (int round = 0; round < 2; round++) {
        fcdp_status status = block_map(range, one);
        assert_true(fcdp__vrange_is_mapped(range) == !status);
        if (status) {
            if (!first) first = status;
            assert_ok(block_map(range, one));
        }
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
            fcdp_driver *drv = driver_open_sim();
            block one = block_create(drv, 3);
            unsigned long before = simgpu_calls(NULL);
            assert_int_equal(simgpu_fail_nth(NULL, n, codes[c]), 0);
            fcdp_status status = life_run(drv, &one);
            bool spent = simgpu_calls(NULL) - before >= n;
            simgpu_fail_nth(NULL, 0, 0);
            n_failed += status != FCDP_OK;
            /* a destroy that tried again, or the way back to a thread's context */
            n_survived += status == FCDP_OK && spent;
            assert_ok(fcdp__driver_phys_release(drv, one.phys));
            driver_close(drv);
            if (!spent) break;
        }
    }
    fcdp_log_set_level(FCDP_LOG_WARN);
    print_message("%zu failures reported, %zu survived\n", n_failed, n_survived);
    assert_true(n_failed > 15 && n_survived > 3);
}

/* simgpu fails one call; what fails beside it is failed here, by the linker's --wrap. */
fcdp_status __real_fcdp__driver_unmap(fcdp_driver *drv, fcdp_dptr at, size_t bytes);
fcdp_status __wrap_fcdp__driver_unmap(fcdp_driver *drv, fcdp_dptr at, size_t bytes);
static int n_unmaps_to_fail;

__attribute__((visibility("default"))) fcdp_status __wrap_fcdp__driver_unmap(fcdp_driver *drv, fcdp_dptr at,
                                                                             size_t bytes) {
    if (n_unmaps_to_fail == 0) return __real_fcdp__driver_unmap(drv, at, bytes);
    n_unmaps_to_fail--;
    return fcdp__fail(FCDP_ERR_DRIVER, "unmap %d", n_unmaps_to_fail + 1);
}

static fcdp_vrange *half_mapped(fcdp_driver *drv, const block *one) {
    fcdp_vrange *range;
    assert_ok(fcdp__vrange_create(drv, 3 * PAGE, &range));
    assert_int_equal(simgpu_fail_nth("cuMemSetAccess", 1, CUDA_UNKNOWN), 0);
    n_unmaps_to_fail = 1;
    assert_int_equal(block_map(range, one), FCDP_ERR_DRIVER);
    assert_int_equal(n_unmaps_to_fail, 0);
    assert_text("cuMemSetAccess");
    assert_text("bytes stay under the range");
    assert_text("unmap 1");
    assert_false(fcdp__vrange_is_mapped(range));
    assert_dies(touch, (char *)fcdp__vrange_base(range).addr, SIGSEGV);
    return range;
}

/* A failed map whose undoing fails too: the next map, or the end, undoes it first. */
static void a_failed_undo_is_undone_later(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_sim();
    block blocks[2] = {block_create(drv, 3), block_create(drv, 2)};
    fcdp_vrange *range = half_mapped(drv, &blocks[0]);
    n_unmaps_to_fail = 1;
    assert_int_equal(block_map(range, &blocks[1]), FCDP_ERR_DRIVER);
    assert_false(fcdp__vrange_is_mapped(range));
    assert_ok(block_map(range, &blocks[1]));
    pattern_write(drv, range, 2, 5);
    pattern_check(drv, range, 2, 5);
    fcdp__vrange_destroy(range);
    fcdp__vrange_destroy(half_mapped(drv, &blocks[0]));
    for (int i = 0; i < 2; i++) assert_ok(fcdp__driver_phys_release(drv, blocks[i].phys));
    driver_close(drv);
}

static void addresses_that_are_lost_are_said(void **state) {
    (void)state;
    fcdp_driver *drv = driver_open_sim();
    block one = block_create(drv, 3);
    fcdp_vrange *range;
    assert_ok(fcdp__vrange_create(drv, 3 * PAGE, &range));
    assert_ok(block_map(range, &one));
    fcdp_dptr base = fcdp__vrange_base(range);
    log_keep(FCDP_LOG_WARN);
    n_unmaps_to_fail = 2;
    fcdp__vrange_destroy(range);
    assert_says(log_kept(), "warning: 6.29 MB of device addresses are lost until the process ends: unmap ");
    assert_ok(__real_fcdp__driver_unmap(drv, base, 3 * PAGE));
    assert_ok(fcdp__driver_range_free(drv, base, 3 * PAGE));
    assert_ok(fcdp__driver_phys_release(drv, one.phys));
    driver_close(drv);
}

/* ---- random schedule: few blocks under many ranges, each block's content known ---- */

enum { N_RANGES = 12, N_BLOCKS = 5, N_STEPS = 1500 };

typedef struct schedule {
    fcdp_driver *drv;
    uint64_t rng, n_tags;
    struct {
        fcdp_vrange *range;
        size_t n_pages;
        uint64_t base;
        int block; /* -1: none */
    } ranges[N_RANGES];
    struct {
        block block;
        uint64_t tag; /* 0: nothing was written */
    } blocks[N_BLOCKS];
} schedule;

static void range_check(const schedule *s, size_t i) {
    int b = s->ranges[i].block;
    if (!s->ranges[i].range) return;
    assert_true(fcdp__vrange_base(s->ranges[i].range).addr == s->ranges[i].base);
    assert_int_equal(fcdp__vrange_is_mapped(s->ranges[i].range), b >= 0);
    if (b >= 0 && s->blocks[b].tag)
        pattern_check(s->drv, s->ranges[i].range, s->blocks[b].block.n_pages, s->blocks[b].tag);
}

static void range_write(schedule *s, size_t i) {
    int b = s->ranges[i].block;
    s->blocks[b].tag = ++s->n_tags;
    pattern_write(s->drv, s->ranges[i].range, s->blocks[b].block.n_pages, s->blocks[b].tag);
}

static void range_step(schedule *s, size_t i) {
    size_t action = random_below(&s->rng, 8);
    int b = (int)random_below(&s->rng, N_BLOCKS);
    if (!s->ranges[i].range) {
        s->ranges[i].n_pages = 1 + random_below(&s->rng, MOST_PAGES);
        assert_ok(fcdp__vrange_create(s->drv, s->ranges[i].n_pages * PAGE, &s->ranges[i].range));
        s->ranges[i].base = fcdp__vrange_base(s->ranges[i].range).addr;
        s->ranges[i].block = -1;
    } else if (action == 0) {
        fcdp__vrange_destroy(s->ranges[i].range);
        s->ranges[i].range = NULL;
    } else if (s->ranges[i].block < 0) {
        if (s->blocks[b].block.n_pages > s->ranges[i].n_pages) return;
        assert_ok(block_map(s->ranges[i].range, &s->blocks[b].block));
        s->ranges[i].block = b;
    } else if (action < 3) {
        assert_ok(fcdp__vrange_unmap(s->ranges[i].range));
        s->ranges[i].block = -1;
    } else if (action < 6) {
        range_write(s, i);
    }
}

static void a_random_schedule_agrees_with_the_oracle(void **state) {
    (void)state;
    schedule s = {.drv = driver_open_any(), .rng = seed_choose(__func__)};
    for (int b = 0; b < N_BLOCKS; b++)
        s.blocks[b].block = block_create(s.drv, 1 + random_below(&s.rng, MOST_PAGES));
    for (int step = 0; step < N_STEPS; step++) {
        size_t i = random_below(&s.rng, N_RANGES);
        range_step(&s, i);
        range_check(&s, i);
        range_check(&s, random_below(&s.rng, N_RANGES));
    }
    for (size_t i = 0; i < N_RANGES; i++) {
        range_check(&s, i);
        fcdp__vrange_destroy(s.ranges[i].range);
    }
    for (int b = 0; b < N_BLOCKS; b++) assert_ok(fcdp__driver_phys_release(s.drv, s.blocks[b].block.phys));
    driver_close(s.drv);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_address_stays_and_so_does_what_a_block_holds),
        cmocka_unit_test(a_block_is_the_same_under_every_range_that_it_is_mapped_under),
        cmocka_unit_test(blocks_are_apart),
        cmocka_unit_test(a_mapped_range_is_unmapped_by_its_end),
        cmocka_unit_test(a_size_that_cannot_be_is_refused),
        cmocka_unit_test(misuse_aborts),
        cmocka_unit_test(an_unmapped_range_faults),
        cmocka_unit_test(every_failing_call_leaves_nothing_behind),
        cmocka_unit_test(a_failed_undo_is_undone_later),
        cmocka_unit_test(addresses_that_are_lost_are_said),
        cmocka_unit_test(a_random_schedule_agrees_with_the_oracle),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
