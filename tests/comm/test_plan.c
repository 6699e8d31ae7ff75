/* Plans against an oracle: every rank's plan is executed in plain memory, step by step as plan.h words them;
 * afterwards every region must hold every parameter, and what crossed the nodes must be the least that can.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "comm/plan.h"
#include "tests/comm/random.h"

enum { MAX_EXTENTS = 9, MAX_RANKS = 12 };

typedef struct world {
    uint32_t n_nodes, node_size, n_ranks;
    fcdp_layout *layout;
    uint8_t stale[MAX_EXTENTS];
    fcdp_plan *plan; /* the same on every rank, which is checked */
    uint8_t *region[MAX_RANKS], *column[MAX_RANKS];
} world;

/* Byte k of the whole parameter i, now. */
static uint8_t truth(uint32_t i, size_t k) {
    return (uint8_t)((k * 2654435761u >> 13) + i * 37 + 1);
}

static fcdp_topology topology_of(const world *w, uint32_t rank) {
    uint32_t node_of[MAX_RANKS];
    for (uint32_t r = 0; r < w->n_ranks; r++) node_of[r] = r / w->node_size;
    fcdp_topology topology;
    assert_int_equal(fcdp__topology_make(node_of, w->n_ranks, rank, &topology), FCDP_OK);
    return topology;
}

static size_t random_bytes(test_random *random) {
    static const size_t edges[] = {
        0, 1, 511, 512, FCDP_PLAN_SMALL_BYTES - 1, FCDP_PLAN_SMALL_BYTES, FCDP_PLAN_SMALL_BYTES + 1};
    if (random_below(random, 3) == 0) return edges[random_below(random, sizeof edges / sizeof *edges)];
    return random_below(random, random_below(random, 2) ? 512 : 20000);
}

static void world_make(world *w, test_random *random) {
    *w = (world){.n_nodes = 2 + random_below(random, 3), .node_size = 1 + random_below(random, 3)};
    w->n_ranks = w->n_nodes * w->node_size;
    fcdp_extent_spec specs[MAX_EXTENTS];
    uint32_t n = 1 + random_below(random, MAX_EXTENTS), chance = random_below(random, 5);
    for (uint32_t i = 0; i < n; i++) {
        specs[i] = (fcdp_extent_spec){random_bytes(random), (uint8_t)random_below(random, 2)};
        w->stale[i] =
            chance == 4 ? (uint8_t)(1 + random_below(random, 127)) : random_below(random, 4) < chance;
    }
    assert_int_equal(fcdp__layout_create(specs, n, w->n_ranks, w->node_size, &w->layout), FCDP_OK);
    for (uint32_t r = 0; r < w->n_ranks; r++) {
        fcdp_topology topology = topology_of(w, r);
        fcdp_plan *plan;
        assert_int_equal(fcdp__plan_make(w->layout, &topology, w->stale, &plan), FCDP_OK);
        if (w->plan) {
            assert_memory_equal(plan, w->plan,
                                sizeof *plan + (plan->n_big + plan->n_small) * sizeof plan->extents[0]);
            fcdp__plan_destroy(plan);
        } else {
            w->plan = plan;
        }
        w->region[r] = malloc(w->layout->bytes + 1);
        w->column[r] = malloc(w->plan->column_bytes + 1);
        memset(w->region[r], 0xA5, w->layout->bytes + 1);
        memset(w->column[r], 0x5A, w->plan->column_bytes + 1);
    }
}

static void world_free(world *w) {
    for (uint32_t r = 0; r < w->n_ranks; r++) {
        free(w->region[r]);
        free(w->column[r]);
    }
    fcdp__plan_destroy(w->plan);
    fcdp__layout_destroy(w->layout);
}

/* What tiering brings back: the fresh extents of the spans to restore, and old bytes where they are stale. */
static void restore(world *w) {
    for (uint32_t r = 0; r < w->n_ranks; r++)
        for (uint32_t i = 0; i < w->layout->n_extents; i++) {
            const fcdp_extent *extent = &w->layout->extents[i];
            if (w->stale[i] || !(w->plan->restore_mask & 1u << extent->span)) continue;
            for (size_t k = 0; k < w->n_ranks * extent->shard_bytes; k++)
                w->region[r][extent->offset_bytes + k] = truth(i, k);
        }
}

static void pack_and_inter(world *w) {
    const fcdp_plan *plan = w->plan;
    for (uint32_t r = 0; r < w->n_ranks; r++) /* pack, and at once what the inter all-gather makes of it */
        for (uint32_t k = 0; k < plan->n_big + plan->n_small; k++) {
            const fcdp_plan_extent *planned = &plan->extents[k];
            size_t bytes = w->layout->extents[planned->extent].shard_bytes;
            assert_true(planned->column_offset_bytes + bytes <= plan->block_bytes);
            for (uint32_t to = r % w->node_size; to < w->n_ranks; to += w->node_size)
                for (size_t j = 0; j < bytes; j++)
                    w->column[to][r / w->node_size * plan->block_bytes + planned->column_offset_bytes + j] =
                        truth(planned->extent, r * bytes + j);
        }
}

/* Scatter and intra: shard (b, l) of a big extent lies in the column of every rank with local index l. */
static void big_steps(world *w, uint32_t r) {
    for (uint32_t k = 0; k < w->plan->n_big; k++)
        for (uint32_t b = 0; b < w->n_nodes; b++)
            for (uint32_t l = 0; l < w->node_size; l++) {
                const fcdp_plan_extent *planned = &w->plan->extents[k];
                const fcdp_extent *extent = &w->layout->extents[planned->extent];
                const uint8_t *column = w->column[r / w->node_size * w->node_size + l];
                memcpy(w->region[r] + extent->offset_bytes + (b * w->node_size + l) * extent->shard_bytes,
                       column + b * w->plan->block_bytes + planned->column_offset_bytes, extent->shard_bytes);
            }
}

static uint8_t *small_part(const world *w, uint32_t r, uint32_t l, uint32_t b) {
    size_t at = w->n_nodes * w->plan->block_bytes + (l * w->n_nodes + b) * w->plan->small_bytes;
    assert_true(at + w->plan->small_bytes <= w->plan->column_bytes);
    return w->column[r] + at;
}

static void small_gather(world *w) {
    for (uint32_t r = 0; r < w->n_ranks; r++)
        for (uint32_t peer = r / w->node_size * w->node_size, l = 0; l < w->node_size; l++)
            for (uint32_t b = 0; b < w->n_nodes; b++)
                memcpy(small_part(w, r, l, b),
                       w->column[peer + l] + (b + 1) * w->plan->block_bytes - w->plan->small_bytes,
                       w->plan->small_bytes);
}

static void small_unpack(world *w, uint32_t r) {
    for (uint32_t k = w->plan->n_big; k < w->plan->n_big + w->plan->n_small; k++)
        for (uint32_t b = 0; b < w->n_nodes; b++)
            for (uint32_t l = 0; l < w->node_size; l++) {
                const fcdp_plan_extent *planned = &w->plan->extents[k];
                const fcdp_extent *extent = &w->layout->extents[planned->extent];
                size_t offset = planned->column_offset_bytes - (w->plan->block_bytes - w->plan->small_bytes);
                memcpy(w->region[r] + extent->offset_bytes + (b * w->node_size + l) * extent->shard_bytes,
                       small_part(w, r, l, b) + offset, extent->shard_bytes);
            }
}

static void check_regions(const world *w) {
    for (uint32_t r = 0; r < w->n_ranks; r++) {
        for (uint32_t i = 0; i < w->layout->n_extents; i++) {
            const fcdp_extent *extent = &w->layout->extents[i];
            for (size_t k = 0; k < w->n_ranks * extent->shard_bytes; k++)
                if (w->region[r][extent->offset_bytes + k] != truth(i, k))
                    fail_msg("rank %u, extent %u, byte %zu", r, i, k);
        }
        assert_int_equal(w->region[r][w->layout->bytes], 0xA5);
        assert_int_equal(w->column[r][w->plan->column_bytes], 0x5A);
    }
}

static void check_masks_and_bytes(const world *w) {
    const fcdp_plan *plan = w->plan;
    size_t stale_bytes = 0; /* of the region */
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
        uint32_t n_stale = 0, n_fresh = 0;
        for (uint32_t i = 0; i < w->layout->n_extents; i++) {
            const fcdp_extent *extent = &w->layout->extents[i];
            if (extent->span != s || extent->shard_bytes == 0) continue;
            if (w->stale[i])
                n_stale++, stale_bytes += extent->shard_bytes * w->n_ranks;
            else
                n_fresh++;
        }
        assert_int_equal(plan->restore_mask >> s & 1, n_fresh > 0);
        assert_int_equal(plan->fill_mask >> s & 1, n_stale > 0);
        assert_int_equal(plan->void_mask >> s & 1, n_stale > 0 && n_fresh == 0);
    }
    size_t received_by_node = w->node_size * (w->n_nodes - 1) * plan->block_bytes;
    assert_int_equal(received_by_node, stale_bytes / w->n_nodes * (w->n_nodes - 1));
    if (w->node_size == 1) assert_int_equal(plan->n_small, 0);
    for (uint32_t k = 0; k < plan->n_big && w->node_size > 1; k++)
        assert_true(w->layout->extents[plan->extents[k].extent].shard_bytes >= FCDP_PLAN_SMALL_BYTES);
}

static void test_random_plans(void **state) {
    (void)state;
    test_random random = {random_seed("test_random_plans", 20260101)};
    for (int round = 0; round < 25; round++) {
        world w;
        world_make(&w, &random);
        check_masks_and_bytes(&w);
        restore(&w);
        pack_and_inter(&w);
        small_gather(&w);
        for (uint32_t r = 0; r < w.n_ranks; r++) {
            big_steps(&w, r);
            small_unpack(&w, r);
        }
        check_regions(&w);
        world_free(&w);
    }
}

static void test_nothing_stale_is_no_step(void **state) {
    (void)state;
    const fcdp_extent_spec specs[] = {{100000, 0}, {0, 1}, {4, 1}};
    const uint32_t node_of[] = {0, 0, 1, 1};
    uint8_t stale[3] = {0, 1, 0}; /* a stale extent without bytes is nothing */
    fcdp_layout *layout;
    fcdp_topology topology;
    fcdp_plan *plan;
    assert_int_equal(fcdp__layout_create(specs, 3, 4, 2, &layout), FCDP_OK);
    assert_int_equal(fcdp__topology_make(node_of, 4, 0, &topology), FCDP_OK);
    assert_int_equal(fcdp__plan_make(layout, &topology, stale, &plan), FCDP_OK);
    assert_int_equal(plan->block_bytes + plan->column_bytes + plan->n_big + plan->n_small, 0);
    assert_int_equal(plan->restore_mask, FCDP_SPAN_MASK_ALL);
    assert_int_equal(plan->fill_mask | plan->void_mask, 0);
    fcdp__plan_destroy(plan);
    fcdp__layout_destroy(layout);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_plans),
        cmocka_unit_test(test_nothing_stale_is_no_step),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
