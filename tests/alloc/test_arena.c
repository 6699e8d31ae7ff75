/* Blocks, holes and places: by hand where the right answer is plain, and by a random schedule against an oracle of live ranges and
 * mapped pages. */
#include "alloc/arena.h"

#include <string.h>

#include "tests/alloc/support.h"

enum { PAGE = 8192, N_PAGES = 64, SPAN = PAGE * N_PAGES, UNIT = FCDP_ARENA_UNIT };
static const uint64_t BASE = 1 << 30;

static fcdp_arena *arena_open(void) {
    fcdp_arena *arena = NULL;
    assert_ok(fcdp__arena_create(PAGE, &arena));
    assert_ok(fcdp__arena_add_span(arena, BASE, SPAN, NULL));
    return arena;
}

/* As the heap does it: quick, fit, grow. The pages it had to map. */
static fcdp_block *take(fcdp_arena *arena, size_t bytes, size_t *n_pages_out) {
    fcdp_block *block = fcdp__arena_take_quick(arena, bytes);
    fcdp_growth growth;
    *n_pages_out = 0;
    if (block) return block;
    fcdp__arena_flush(arena);
    if (!fcdp__arena_take(arena, bytes, &block)) return block;
    if (fcdp__arena_grow(arena, bytes, &growth)) return NULL;
    *n_pages_out = growth.n_pages;
    return fcdp__arena_grown(arena, &growth);
}

static fcdp_block *take_new(fcdp_arena *arena, size_t bytes, size_t n_pages) {
    size_t n;
    fcdp_block *block = take(arena, bytes, &n);
    assert_non_null(block);
    assert_int_equal(n, n_pages);
    assert_int_equal(block->bytes, bytes);
    return block;
}

static void a_block_comes_back_by_its_size(void **state) {
    (void)state;
    fcdp_arena *arena = arena_open();
    fcdp_block *a = take_new(arena, 5 * UNIT, 1), *b = take_new(arena, 6 * UNIT, 0);
    uint64_t at = a->address;
    assert_int_equal(b->address, at + 5 * UNIT);
    fcdp__arena_give(arena, a);
    assert_null(fcdp__arena_find(arena, at));
    assert_null(fcdp__arena_take_quick(arena, 4 * UNIT));
    assert_ptr_equal(fcdp__arena_take_quick(arena, 5 * UNIT), a);
    assert_ptr_equal(fcdp__arena_find(arena, at), a);
    assert_null(fcdp__arena_find(arena, at + UNIT));
    fcdp__arena_destroy(arena);
}

static void blocks_follow_each_other_across_pages(void **state) {
    (void)state;
    fcdp_arena *arena = arena_open();
    take_new(arena, PAGE + PAGE / 2, 2);
    take_new(arena, PAGE, 1); /* half of it lies on the page that is there */
    take_new(arena, PAGE / 2, 0);
    fcdp__arena_destroy(arena);
}

static void the_smallest_that_fits_is_cut(void **state) {
    (void)state;
    fcdp_arena *arena = arena_open();
    fcdp_block *large = take_new(arena, 8 * UNIT, 1), *x = take_new(arena, UNIT, 0), *small = take_new(arena, 4 * UNIT, 0);
    take_new(arena, 3 * UNIT, 0); /* the page is full */
    (void)x;
    uint64_t at = small->address;
    fcdp__arena_give(arena, large);
    fcdp__arena_give(arena, small);
    fcdp_block *block = take_new(arena, 3 * UNIT, 0);
    assert_int_equal(block->address, at);
    fcdp__arena_give(arena, x); /* joins the large one and nothing else */
    fcdp__arena_flush(arena);
    take_new(arena, 9 * UNIT, 0);
    fcdp__arena_destroy(arena);
}

/* Free pages at two places, none of them long enough: a new place takes them, and nothing else is needed. */
static void pages_that_are_apart_serve_one_block(void **state) {
    (void)state;
    fcdp_arena *arena = arena_open();
    fcdp_block *blocks[7];
    for (int i = 0; i < 7; i++) blocks[i] = take_new(arena, PAGE, 1);
    for (int i = 1; i < 7; i += 2) fcdp__arena_give(arena, blocks[i]);
    fcdp__arena_flush(arena);
    fcdp_growth growth;
    fcdp_block *vacated[4];
    assert_ok(fcdp__arena_grow(arena, 3 * PAGE, &growth));
    assert_int_equal(growth.n_pages, 3);
    assert_int_equal(fcdp__arena_vacate(arena, fcdp__arena_clock(arena) - 1, 3, vacated, 4), 2); /* the third is not cold */
    assert_int_equal(vacated[0]->address, BASE + PAGE);                                         /* freed first */
    assert_int_equal(vacated[1]->address, BASE + 3 * PAGE);
    fcdp__arena_vacated(arena, vacated[0]);
    fcdp__arena_unvacate(arena, vacated[1]);
    fcdp__arena_shrink(arena, &growth);
    fcdp_arena_stats stats;
    fcdp__arena_stats(arena, &stats);
    assert_int_equal(stats.free_bytes, 2 * PAGE);
    assert_int_equal(stats.n_holes, 2);
    take_new(arena, PAGE, 0);
    take_new(arena, PAGE, 0);
    take_new(arena, PAGE, 1); /* into the hole */
    fcdp__arena_destroy(arena);
}

/* The place that needs the fewest pages: here one that ends where free bytes end. */
static void growth_uses_what_is_mapped(void **state) {
    (void)state;
    fcdp_arena *arena = arena_open();
    fcdp_block *a = take_new(arena, 4 * PAGE, 4), *b = take_new(arena, PAGE / 2, 1), *vacated[4];
    take_new(arena, PAGE / 2, 0);
    fcdp__arena_give(arena, a);
    fcdp__arena_give(arena, b);
    fcdp__arena_flush(arena); /* 4.5 pages free, then a live half */
    assert_int_equal(fcdp__arena_vacate(arena, UINT64_MAX, 4, vacated, 4), 1);
    fcdp__arena_vacated(arena, vacated[0]); /* 4 pages of hole, half a page free, half a page live, holes */
    fcdp_block *block = take_new(arena, PAGE + PAGE / 2, 1);
    assert_int_equal(block->address, BASE + 3 * PAGE);
    fcdp__arena_destroy(arena);
}

static void a_span_can_be_full(void **state) {
    (void)state;
    fcdp_arena *arena = arena_open();
    fcdp_growth growth;
    take_new(arena, SPAN - PAGE, N_PAGES - 1);
    assert_int_equal(fcdp__arena_grow(arena, 2 * PAGE, &growth), FCDP_PENDING);
    assert_ok(fcdp__arena_add_span(arena, BASE + 2 * SPAN, SPAN, NULL));
    take_new(arena, 2 * PAGE, 2);
    take_new(arena, PAGE, 1);
    fcdp__arena_destroy(arena);
}

/* ---- against an oracle ---- */

enum { MAX_HELD = 256, MAX_BUSY = 8 };

typedef struct range { /* nobody else may have it: live, or busy */
    fcdp_block *block;
    uint64_t address;
    size_t bytes;
    bool busy;
} range;

typedef struct oracle {
    fcdp_arena *arena;
    uint64_t seed;
    bool mapped[N_PAGES];
    range held[MAX_HELD];
    size_t n_held, n_busy;
} oracle;

static size_t below(oracle *o, size_t n) {
    return random_below(&o->seed, n);
}

static void growth_map(oracle *o, const fcdp_growth *growth) {
    size_t n = 0;
    for (const fcdp_block *block = growth->first;; block = block->after) {
        for (size_t at = 0; block->unmapped && at < block->bytes; at += PAGE, n++) {
            size_t page = (block->address + at - BASE) / PAGE;
            assert_false(o->mapped[page]);
            o->mapped[page] = true;
        }
        if (block == growth->last) break;
    }
    assert_int_equal(n, growth->n_pages);
}

static void held_add(oracle *o, fcdp_block *block, size_t bytes) {
    assert_int_equal(block->bytes, bytes);
    for (size_t at = 0; at < bytes; at += UNIT) assert_true(o->mapped[(block->address + at - BASE) / PAGE]);
    for (size_t i = 0; i < o->n_held; i++)
        assert_true(block->address >= o->held[i].address + o->held[i].bytes ||
                    o->held[i].address >= block->address + bytes);
    fcdp__arena_request(o->arena, block, bytes - 1);
    o->held[o->n_held++] = (range){block, block->address, bytes, false};
}

static fcdp_block *oracle_grow(oracle *o, size_t bytes) {
    fcdp_growth growth;
    fcdp_status status = fcdp__arena_grow(o->arena, bytes, &growth);
    if (status == FCDP_PENDING) return NULL;
    assert_ok(status);
    if (below(o, 4) == 0) { /* no pages were to be had */
        fcdp__arena_shrink(o->arena, &growth);
        return NULL;
    }
    growth_map(o, &growth);
    return fcdp__arena_grown(o->arena, &growth);
}

static void oracle_take(oracle *o) {
    size_t bytes = UNIT * (1 + (below(o, 4) ? below(o, 40) : below(o, 300)));
    if (o->n_held == MAX_HELD) return;
    fcdp_block *block = below(o, 2) ? fcdp__arena_take_quick(o->arena, bytes) : NULL;
    if (!block && below(o, 4)) fcdp__arena_flush(o->arena);
    if (!block && fcdp__arena_take(o->arena, bytes, &block) == FCDP_PENDING) block = oracle_grow(o, bytes);
    if (block) held_add(o, block, bytes);
}

static void oracle_give(oracle *o) {
    if (o->n_held == 0) return;
    range *r = &o->held[below(o, o->n_held)];
    assert_ptr_equal(fcdp__arena_find(o->arena, r->address), r->busy ? NULL : r->block);
    if (!r->busy && o->n_busy < MAX_BUSY && below(o, 8) == 0) {
        fcdp__arena_hold(o->arena, r->block);
        r->busy = true;
        o->n_busy++;
        return;
    }
    o->n_busy -= r->busy;
    fcdp__arena_give(o->arena, r->block);
    *r = o->held[--o->n_held];
}

static void oracle_vacate(oracle *o) {
    fcdp_block *blocks[4];
    uint64_t clock = fcdp__arena_clock(o->arena) - below(o, 4);
    size_t limit = 1 + below(o, 20), n_pages = 0, n = fcdp__arena_vacate(o->arena, clock, limit, blocks, 4);
    for (size_t i = 0; i < n; i++) {
        assert_int_equal((blocks[i]->address - BASE) % PAGE, 0);
        assert_true(blocks[i]->freed_at <= clock);
        n_pages += blocks[i]->bytes / PAGE;
    }
    assert_true(n_pages <= limit);
    for (size_t i = 0; i < n; i++) {
        bool refused = below(o, 4) == 0;
        for (size_t at = 0; at < blocks[i]->bytes; at += PAGE) {
            size_t page = (blocks[i]->address + at - BASE) / PAGE;
            assert_true(o->mapped[page]);
            o->mapped[page] = refused;
        }
        if (refused)
            fcdp__arena_unvacate(o->arena, blocks[i]);
        else
            fcdp__arena_vacated(o->arena, blocks[i]);
    }
}

static void check_totals(const oracle *o) {
    fcdp_arena_stats stats;
    size_t mapped = 0, live = 0, requested = 0, busy = 0;
    fcdp__arena_stats(o->arena, &stats);
    for (size_t i = 0; i < N_PAGES; i++) mapped += o->mapped[i] ? PAGE : 0;
    for (size_t i = 0; i < o->n_held; i++) {
        *(o->held[i].busy ? &busy : &live) += o->held[i].bytes;
        requested += o->held[i].busy ? 0 : o->held[i].bytes - 1;
    }
    assert_int_equal(stats.live_bytes, live);
    assert_int_equal(stats.requested_bytes, requested);
    assert_int_equal(stats.busy_bytes, busy);
    assert_int_equal(stats.live_bytes + stats.busy_bytes + stats.free_bytes + stats.quick_bytes, mapped);
}

/* Everything is given back: then every page can leave. */
static void oracle_end(oracle *o) {
    fcdp_block *blocks[N_PAGES];
    for (size_t i = 0; i < o->n_held; i++) fcdp__arena_give(o->arena, o->held[i].block);
    fcdp__arena_flush(o->arena);
    size_t n = fcdp__arena_vacate(o->arena, UINT64_MAX, N_PAGES, blocks, N_PAGES);
    for (size_t i = 0; i < n; i++) fcdp__arena_vacated(o->arena, blocks[i]);
    fcdp_arena_stats stats;
    fcdp__arena_stats(o->arena, &stats);
    assert_int_equal(stats.free_bytes + stats.busy_bytes + stats.quick_bytes + stats.live_bytes, 0);
    assert_int_equal(stats.n_holes, 1);
    fcdp__arena_destroy(o->arena);
}

static void random_schedules(void **state) {
    (void)state;
    uint64_t seed = seed_choose("random_schedules");
    fcdp__check_level = 3;
    for (int round = 0; round < 40; round++) {
        oracle o = {.arena = arena_open(), .seed = random_next(&seed)};
        for (int step = 0; step < 1500; step++) {
            size_t what = below(&o, 16);
            if (what < 8)
                oracle_take(&o);
            else if (what < 14)
                oracle_give(&o);
            else if (what < 15)
                oracle_vacate(&o);
            else
                fcdp__arena_flush(o.arena);
            check_totals(&o);
        }
        oracle_end(&o);
    }
    fcdp__check_level = 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_block_comes_back_by_its_size),
        cmocka_unit_test(blocks_follow_each_other_across_pages),
        cmocka_unit_test(the_smallest_that_fits_is_cut),
        cmocka_unit_test(pages_that_are_apart_serve_one_block),
        cmocka_unit_test(growth_uses_what_is_mapped),
        cmocka_unit_test(a_span_can_be_full),
        cmocka_unit_test(random_schedules),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
