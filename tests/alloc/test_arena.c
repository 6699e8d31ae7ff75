/* Blocks, holes and places: by hand where the right answer is plain, and by a random schedule against an
 * oracle of live ranges and mapped pages. */
#include "alloc/arena.h"

#include <string.h>

#include "tests/alloc/arena_oracle.h"
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
    if (!fcdp__arena_take(arena, bytes, false, &block)) return block;
    if (fcdp__arena_grow_begin(arena, bytes, false, 0, &growth)) return NULL;
    *n_pages_out = growth.n_pages;
    return fcdp__arena_grow_commit(arena, &growth, 1);
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
    fcdp_block *large = take_new(arena, 8 * UNIT, 1), *x = take_new(arena, UNIT, 0),
               *small = take_new(arena, 4 * UNIT, 0);
    take_new(arena, 3 * UNIT, 0); /* the page is full */
    (void)x;
    uint64_t at = small->address;
    fcdp__arena_give(arena, large);
    fcdp__arena_give(arena, small);
    fcdp_block *block = take_new(arena, 3 * UNIT, 0);
    assert_int_equal(block->address, at + UNIT); /* beside the block of its size */
    fcdp__arena_give(arena, x);                  /* joins the large one and nothing else */
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
    fcdp_block *unmapped[4];
    assert_ok(fcdp__arena_grow_begin(arena, 3 * PAGE, false, 0, &growth));
    assert_int_equal(growth.n_pages, 3);
    assert_int_equal(fcdp__arena_unmap_begin(arena, fcdp__arena_clock(arena) - 1, 3, unmapped, 4),
                     2);                                 /* the third was freed later */
    assert_int_equal(unmapped[0]->address, BASE + PAGE); /* freed first */
    assert_int_equal(unmapped[1]->address, BASE + 3 * PAGE);
    fcdp__arena_unmap_commit(arena, unmapped[0]);
    fcdp__arena_unmap_abort(arena, unmapped[1]);
    fcdp__arena_grow_abort(arena, &growth);
    const fcdp_arena_stats stats = *fcdp__arena_stats(arena);
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
    fcdp_block *a = take_new(arena, 4 * PAGE, 4), *b = take_new(arena, PAGE / 2, 1), *unmapped[4];
    take_new(arena, PAGE / 2, 0);
    fcdp__arena_give(arena, a);
    fcdp__arena_give(arena, b);
    fcdp__arena_flush(arena); /* 4.5 pages free, then a live half */
    assert_int_equal(fcdp__arena_unmap_begin(arena, UINT64_MAX, 4, unmapped, 4), 1);
    /* 4 pages of hole, half a page free, half a page live, holes */
    fcdp__arena_unmap_commit(arena, unmapped[0]);
    fcdp_block *block = take_new(arena, PAGE + PAGE / 2, 1);
    assert_int_equal(block->address, BASE + 3 * PAGE);
    fcdp__arena_destroy(arena);
}

/* Where memory is short, free pages that are mapped cost what holes do: the
 * place that begins to use fewer is taken. */
static void a_short_memory_is_used_page_by_page(void **state) {
    (void)state;
    fcdp_arena *arena = arena_open();
    fcdp_block *free_pages = take_new(arena, 2 * PAGE, 2), *block;
    fcdp_growth growth;
    take_new(arena, PAGE / 2, 1); /* half of the third page is free, behind it is a hole */
    fcdp__arena_give(arena, free_pages);
    fcdp__arena_flush(arena);
    assert_int_equal(fcdp__arena_take(arena, PAGE + PAGE / 2, true, &block), FCDP_PENDING); /* 2 pages */
    assert_ok(fcdp__arena_grow_begin(arena, PAGE + PAGE / 2, true, 0, &growth));
    assert_int_equal(growth.address, BASE + 2 * PAGE + PAGE / 2);
    assert_int_equal(growth.n_pages, 1);
    fcdp__arena_grow_abort(arena, &growth);
    assert_ok(fcdp__arena_take(arena, PAGE + PAGE / 2, false, &block)); /* nothing is to be mapped */
    assert_int_equal(block->address, BASE + PAGE / 2);
    fcdp__arena_destroy(arena);
}

/* A mapping of several pages leaves its place whole or not at all. */
static void a_large_mapping_moves_as_one(void **state) {
    (void)state;
    fcdp_arena *arena = arena_open();
    fcdp_block *unmapped[4];
    fcdp_growth growth;
    assert_ok(fcdp__arena_grow_begin(arena, PAGE, false, 4, &growth));
    assert_int_equal(growth.n_pages, 4); /* three of them ahead */
    fcdp_block *a = fcdp__arena_grow_commit(arena, &growth, 4);
    assert_int_equal(fcdp__arena_idle_pages(arena), 0);
    assert_int_equal(fcdp__arena_unmap_begin(arena, UINT64_MAX, 2, unmapped, 4), 0);
    fcdp__arena_give(arena, a);
    fcdp__arena_flush(arena);
    assert_int_equal(fcdp__arena_idle_pages(arena), 4);
    assert_int_equal(fcdp__arena_unmap_begin(arena, UINT64_MAX, 2, unmapped, 4), 1);
    assert_int_equal(unmapped[0]->bytes, 4 * PAGE);
    assert_true(fcdp__arena_is_joined(arena, unmapped[0]));
    fcdp__arena_unmap_commit(arena, unmapped[0]);
    assert_int_equal(fcdp__arena_stats(arena)->n_holes, 1);
    fcdp__arena_destroy(arena);
}

static void a_span_can_be_full(void **state) {
    (void)state;
    fcdp_arena *arena = arena_open();
    fcdp_growth growth;
    take_new(arena, SPAN - PAGE, N_PAGES - 1);
    assert_int_equal(fcdp__arena_grow_begin(arena, 2 * PAGE, false, 0, &growth), FCDP_PENDING);
    assert_ok(fcdp__arena_add_span(arena, BASE + 2 * SPAN, SPAN, NULL));
    take_new(arena, 2 * PAGE, 2);
    take_new(arena, PAGE, 1);
    fcdp__arena_destroy(arena);
}

/* ---- against an oracle ---- */

static void random_schedules(void **state) {
    (void)state;
    uint64_t seed = seed_choose("random_schedules");
    static uint8_t choices[1 << 14];
    for (int round = 0; round < 40; round++) {
        for (size_t i = 0; i < sizeof choices; i++) choices[i] = (uint8_t)random_next(&seed);
        arena_oracle_run(choices, sizeof choices);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_block_comes_back_by_its_size),
        cmocka_unit_test(blocks_follow_each_other_across_pages),
        cmocka_unit_test(the_smallest_that_fits_is_cut),
        cmocka_unit_test(pages_that_are_apart_serve_one_block),
        cmocka_unit_test(growth_uses_what_is_mapped),
        cmocka_unit_test(a_short_memory_is_used_page_by_page),
        cmocka_unit_test(a_large_mapping_moves_as_one),
        cmocka_unit_test(a_span_can_be_full),
        cmocka_unit_test(random_schedules),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
