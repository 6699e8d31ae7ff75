/* The layout's promises, over seeded random groups, and what it refuses. */
#include "tests/alloc/support.h"

#include "tiering/layout.h"

static void check_tiles(const fcdp_layout *layout) {
    size_t at = 0;
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
        assert_int_equal(layout->span[s].offset_bytes, at);
        assert_int_equal(layout->span[s].bytes % (layout->n_slices * 512), 0);
        for (uint32_t i = 0; i < layout->n_slices; i++) {
            fcdp_piece slice = fcdp__layout_slice(layout, s, i);
            assert_int_equal(slice.offset_bytes, at);
            assert_int_equal(slice.offset_bytes % 512, 0);
            at += slice.bytes;
        }
        assert_int_equal(at, layout->span[s].offset_bytes + layout->span[s].bytes);
    }
    assert_int_equal(at, layout->bytes);
}

static void check_extents(const fcdp_layout *layout, const fcdp_extent_spec *specs) {
    size_t end[FCDP_N_SPANS] = {layout->span[0].offset_bytes, layout->span[1].offset_bytes}, data = 0,
           n_used = 0;
    for (uint32_t i = 0; i < layout->n_extents; i++) {
        const fcdp_extent *e = &layout->extents[i];
        assert_int_equal(e->span, specs[i].span);
        assert_int_equal(e->shard_bytes, specs[i].shard_bytes);
        assert_int_equal(e->offset_bytes % FCDP_EXTENT_ALIGN, 0);
        assert_true(e->offset_bytes >= end[e->span]); /* the caller's order, so no overlap */
        end[e->span] = e->offset_bytes + e->shard_bytes * layout->n_shards;
        assert_true(end[e->span] <= layout->span[e->span].offset_bytes + layout->span[e->span].bytes);
        data += e->shard_bytes * layout->n_shards;
        n_used += e->shard_bytes > 0;
    }
    assert_true(layout->bytes - data <=
                n_used * (FCDP_EXTENT_ALIGN - 1) + FCDP_N_SPANS * (layout->n_slices * 512 - 1));
}

static void random_groups_hold_the_promises(void **state) {
    (void)state;
    uint64_t rng = seed_choose("layout");
    fcdp_extent_spec specs[40];
    for (int round = 0; round < 5000; round++) {
        uint32_t n = (uint32_t)random_below(&rng, 41), n_slices = 1 + (uint32_t)random_below(&rng, 64);
        for (uint32_t i = 0; i < n; i++)
            specs[i] = (fcdp_extent_spec){
                random_below(&rng, 4) ? random_below(&rng, 1 << (1 + random_below(&rng, 20))) : 0,
                (uint8_t)random_below(&rng, 2)};
        fcdp_layout *layout;
        assert_ok(fcdp__layout_create(specs, n, n_slices * (1 + (uint32_t)random_below(&rng, 4)), n_slices,
                                      &layout));
        check_tiles(layout);
        check_extents(layout, specs);
        fcdp__layout_destroy(layout);
    }
}

static void a_span_without_bytes_is_empty(void **state) {
    (void)state;
    fcdp_extent_spec spec = {100, FCDP_SPAN_TRAINABLE};
    fcdp_layout *layout;
    assert_ok(fcdp__layout_create(&spec, 1, 4, 2, &layout));
    assert_int_equal(layout->span[FCDP_SPAN_FROZEN].bytes, 0);
    assert_int_equal(layout->span[FCDP_SPAN_TRAINABLE].bytes, 1024);
    fcdp__layout_destroy(layout);
}

static void what_cannot_be_laid_out_is_refused(void **state) {
    (void)state;
    fcdp_layout *layout = NULL;
    fcdp_extent_spec fine = {8, 0}, third = {8, 2}, huge = {SIZE_MAX / 2, 0}, brim = {SIZE_MAX - 600, 0};
    fcdp_extent_spec sum[] = {{SIZE_MAX / 4, 0}, {SIZE_MAX / 4, 0}, {SIZE_MAX / 4, 1}, {SIZE_MAX / 4, 1}};
    assert_int_equal(fcdp__layout_create(&fine, 1, 0, 1, &layout), FCDP_ERR_INVALID);
    assert_int_equal(fcdp__layout_create(&fine, 1, 1, 0, &layout), FCDP_ERR_INVALID);
    assert_int_equal(fcdp__layout_create(&fine, 1, 1, 65, &layout), FCDP_ERR_INVALID);
    assert_int_equal(fcdp__layout_create(&third, 1, 1, 1, &layout), FCDP_ERR_INVALID);
    assert_text("span 2");
    assert_int_equal(fcdp__layout_create(&huge, 1, 4, 2, &layout), FCDP_ERR_INVALID);
    assert_text("extent 0");
    assert_int_equal(fcdp__layout_create(&brim, 1, 1, 64, &layout), FCDP_ERR_INVALID);
    assert_int_equal(fcdp__layout_create(sum, 4, 1, 1, &layout), FCDP_ERR_INVALID);
    assert_null(layout);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_groups_hold_the_promises),
        cmocka_unit_test(a_span_without_bytes_is_empty),
        cmocka_unit_test(what_cannot_be_laid_out_is_refused),
    };
    return cmocka_run_group_tests_name("tiering_layout", tests, NULL, NULL);
}
