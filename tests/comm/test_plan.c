/* Plans against an oracle: every step is carried out for all ranks in plain memory,
 * as plan.h words it; afterwards every region must hold every parameter, host memory
 * what a later restore needs, and what crossed the nodes must be the least that can.
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

enum { MAX_EXTENTS = 9, MAX_NODES = 9, MAX_SIZE = 4, MAX_RANKS = MAX_NODES * MAX_SIZE, VOID = 0xA5 };

typedef struct world {
    uint32_t n_nodes, node_size, n_ranks;
    fcdp_topology topology[MAX_RANKS];
    fcdp_layout *layout;
    uint8_t stale[MAX_EXTENTS];
    fcdp_plan *plan;
    uint8_t *truth; /* of the region */
    uint8_t *region[MAX_RANKS], *host[MAX_NODES];
} world;

/* ---- the world ---- */

static size_t random_bytes(test_random *random) {
    static const size_t edges[] = {0, 1, 511, 512, 513};
    if (random_below(random, 3) == 0) return edges[random_below(random, sizeof edges / sizeof *edges)];
    return random_below(random, random_below(random, 2) ? 512 : 3000);
}

static uint8_t *bytes_make(size_t n) {
    uint8_t *bytes = malloc(n + 1);
    memset(bytes, VOID, n + 1);
    return bytes;
}

static void world_make(world *w, test_random *random) {
    *w = (world){.n_nodes = 2 + random_below(random, random_below(random, 4) ? 3 : MAX_NODES - 1),
                 .node_size = 1 + random_below(random, MAX_SIZE)};
    w->n_ranks = w->n_nodes * w->node_size;
    uint32_t node_of[MAX_RANKS], n = 1 + random_below(random, MAX_EXTENTS), chance = random_below(random, 5);
    for (uint32_t r = 0; r < w->n_ranks; r++) node_of[r] = r / w->node_size;
    for (uint32_t r = 0; r < w->n_ranks; r++)
        assert_int_equal(fcdp__topology_make(node_of, w->n_ranks, r, &w->topology[r]), FCDP_OK);
    fcdp_extent_spec specs[MAX_EXTENTS];
    for (uint32_t i = 0; i < n; i++) {
        specs[i] = (fcdp_extent_spec){random_bytes(random), (uint8_t)random_below(random, 2)};
        w->stale[i] = chance == 4 ? (uint8_t)(1 + random_below(random, 127))
                                  : random_below(random, 4) < chance;
    }
    assert_int_equal(fcdp__layout_create(specs, n, w->n_ranks, w->node_size, &w->layout), FCDP_OK);
    assert_int_equal(fcdp__plan_make(w->layout, w->stale, &w->plan), FCDP_OK);
    w->truth = bytes_make(w->layout->bytes);
    for (size_t k = 0; k < w->layout->bytes; k++) w->truth[k] = (uint8_t)random_next(random);
    for (uint32_t r = 0; r < w->n_ranks; r++) w->region[r] = bytes_make(w->layout->bytes);
    for (uint32_t b = 0; b < w->n_nodes; b++) w->host[b] = bytes_make(w->layout->bytes);
}

static void world_free(world *w) {
    for (uint32_t r = 0; r < w->n_ranks; r++) {
        assert_int_equal(w->region[r][w->layout->bytes], VOID);
        free(w->region[r]);
    }
    for (uint32_t b = 0; b < w->n_nodes; b++) {
        assert_int_equal(w->host[b][w->layout->bytes], VOID);
        free(w->host[b]);
    }
    free(w->truth);
    fcdp__plan_destroy(w->plan);
    fcdp__layout_destroy(w->layout);
}

static size_t extent_bytes(const world *w, uint32_t i) {
    return w->n_ranks * w->layout->extents[i].shard_bytes;
}

static void regions_clear(world *w) {
    for (uint32_t r = 0; r < w->n_ranks; r++) memset(w->region[r], VOID, w->layout->bytes);
}

/* One collective: members in lane order, each with its own parts. */
static void all_gather(uint32_t n_members, fcdp_part parts[][MAX_EXTENTS * MAX_NODES], size_t n_parts) {
    for (size_t k = 0; k < n_parts; k++)
        for (uint32_t to = 0; to < n_members; to++)
            for (uint32_t from = 0; from < n_members; from++) {
                const fcdp_part *a = &parts[to][k], *b = &parts[from][k];
                assert_int_equal(a->bytes, b->bytes);
                assert_int_equal(a->stride_bytes, b->stride_bytes);
                assert_true(a->stride_bytes >= a->bytes);
                memmove((uint8_t *)a->at.addr + from * a->stride_bytes,
                        (uint8_t *)b->at.addr + from * b->stride_bytes, a->bytes);
            }
}

static fcdp_dptr base_of(const world *w, uint32_t r) {
    return (fcdp_dptr){(uintptr_t)w->region[r]};
}

/* ---- the steps ---- */

/* What the host has before: the fresh extents, and old bytes where they are stale. */
static void host_fill(world *w) {
    for (uint32_t b = 0; b < w->n_nodes; b++)
        for (uint32_t i = 0; i < w->layout->n_extents; i++)
            if (!w->stale[i]) {
                size_t at = w->layout->extents[i].offset_bytes;
                memcpy(w->host[b] + at, w->truth + at, extent_bytes(w, i));
            }
}

static void restore_whole(world *w) {
    for (uint32_t r = 0; r < w->n_ranks; r++)
        for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
            if (w->plan->restore_mask & 1u << s)
                memcpy(w->region[r] + w->layout->span[s].offset_bytes,
                       w->host[r / w->node_size] + w->layout->span[s].offset_bytes, w->layout->span[s].bytes);
}

static void restore_by_slices(world *w) {
    static fcdp_part parts[MAX_SIZE][MAX_EXTENTS * MAX_NODES];
    for (uint32_t r = 0; r < w->n_ranks; r++)
        for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
            if (!(w->plan->restore_mask & 1u << s)) continue;
            fcdp_piece slice = fcdp__layout_slice(w->layout, s, w->topology[r].local);
            memcpy(w->region[r] + slice.offset_bytes, w->host[r / w->node_size] + slice.offset_bytes,
                   slice.bytes);
        }
    for (uint32_t b = 0; b < w->n_nodes; b++) {
        size_t n = 0;
        for (uint32_t l = 0; l < w->node_size; l++) {
            uint32_t r = b * w->node_size + l;
            n = fcdp__plan_slice_parts(w->plan->restore_mask, w->layout, &w->topology[r], base_of(w, r),
                                       parts[l]);
        }
        assert_true(n <= FCDP_N_SPANS);
        all_gather(w->node_size, parts, n);
    }
}

static void own_step(world *w) {
    for (uint32_t r = 0; r < w->n_ranks; r++)
        for (uint32_t k = 0; k < w->plan->n_stale; k++) {
            uint32_t i = w->plan->stale[k];
            fcdp_piece place = fcdp__plan_shard(w->layout, &w->topology[r], i, w->topology[r].node,
                                                w->topology[r].local);
            assert_int_equal(place.bytes, w->layout->extents[i].shard_bytes);
            assert_int_equal(place.offset_bytes, w->layout->extents[i].offset_bytes + r * place.bytes);
            memcpy(w->region[r] + place.offset_bytes, w->truth + place.offset_bytes, place.bytes);
        }
}

static void inter_step(world *w) {
    static fcdp_part parts[MAX_NODES][MAX_EXTENTS * MAX_NODES];
    for (uint32_t l = 0; l < w->node_size; l++) {
        size_t n = 0, bytes = 0;
        for (uint32_t b = 0; b < w->n_nodes; b++) {
            uint32_t r = b * w->node_size + l;
            n = fcdp__plan_inter_parts(w->plan, w->layout, &w->topology[r], base_of(w, r), parts[b]);
        }
        assert_int_equal(n, w->plan->n_stale);
        for (size_t k = 0; k < n; k++) bytes += parts[0][k].bytes;
        assert_int_equal(bytes, w->plan->block_bytes);
        all_gather(w->n_nodes, parts, n);
    }
}

static void node_step(world *w) {
    static fcdp_part parts[MAX_SIZE][MAX_EXTENTS * MAX_NODES];
    for (uint32_t b = 0; b < w->n_nodes; b++) {
        size_t n = 0;
        for (uint32_t l = 0; l < w->node_size; l++) {
            uint32_t r = b * w->node_size + l;
            n = fcdp__plan_node_parts(w->plan, w->layout, &w->topology[r], base_of(w, r), parts[l]);
        }
        assert_int_equal(n, w->plan->n_stale * w->n_nodes);
        all_gather(w->node_size, parts, n);
    }
}

static void rows_copy(const fcdp_rows *rows) {
    for (size_t i = 0; i < rows->n; i++)
        memcpy((uint8_t *)rows->dst.addr + i * rows->dst_stride,
               (uint8_t *)rows->src.addr + i * rows->src_stride, rows->bytes);
}

/* moves.c: chunks of at most `most` bytes of each rank. by_slices: the node's ranks meet in the buffer. */
static void packed_step(world *w, size_t most, bool by_slices) {
    static fcdp_part parts[MAX_NODES][MAX_EXTENTS * MAX_NODES];
    static uint8_t *staging[MAX_RANKS];
    fcdp_cut cuts[MAX_EXTENTS];
    uint32_t n_nodes = w->n_nodes, g = w->node_size;
    for (size_t first = 0; first < w->plan->block_bytes; first += most) {
        size_t bytes = w->plan->block_bytes - first < most ? w->plan->block_bytes - first : most,
               cut_bytes = 0;
        size_t n_cuts = fcdp__plan_cuts(w->plan, w->layout, first, bytes, cuts);
        for (size_t k = 0; k < n_cuts; k++) cut_bytes += cuts[k].bytes;
        assert_true(n_cuts <= w->plan->n_stale);
        assert_int_equal(cut_bytes, bytes);
        for (uint32_t r = 0; r < w->n_ranks; r++) {
            const fcdp_topology *t = &w->topology[r];
            staging[r] = bytes_make(w->n_ranks * bytes);
            for (size_t k = 0; k < n_cuts; k++) {
                fcdp_piece shard = fcdp__plan_shard(w->layout, t, cuts[k].extent, t->node, t->local);
                assert_true(cuts[k].from + cuts[k].bytes <= shard.bytes);
                memcpy(staging[r] + (t->local * n_nodes + t->node) * bytes + cuts[k].at,
                       w->truth + shard.offset_bytes + cuts[k].from, cuts[k].bytes);
            }
        }
        for (uint32_t l = 0; l < g; l++) {
            for (uint32_t b = 0; b < n_nodes; b++)
                parts[b][0] = (fcdp_part){
                    {(uintptr_t)(staging[b * g + l] + l * n_nodes * bytes)}, bytes, bytes};
            all_gather(n_nodes, parts, 1);
        }
        for (uint32_t b = 0; b < n_nodes && by_slices; b++) {
            for (uint32_t l = 0; l < g; l++)
                parts[l][0] = (fcdp_part){{(uintptr_t)staging[b * g + l]}, n_nodes * bytes, n_nodes * bytes};
            all_gather(g, parts, 1);
        }
        for (uint32_t r = 0; r < w->n_ranks; r++) {
            for (uint32_t l = 0; l < g; l++)
                for (size_t k = 0; k < n_cuts && (by_slices || l == w->topology[r].local); k++) {
                    fcdp_rows rows = fcdp__plan_rows(
                        &cuts[k], w->layout, &w->topology[r], l,
                        (fcdp_dptr){(uintptr_t)(staging[r] + l * n_nodes * bytes)}, bytes, base_of(w, r));
                    assert_int_equal(rows.n, n_nodes);
                    rows_copy(&rows);
                }
            free(staging[r]);
        }
    }
}

static void check_is_own(const world *w, uint32_t r, fcdp_piece piece) {
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
        fcdp_piece slice = fcdp__layout_slice(w->layout, s, w->topology[r].local);
        if (piece.offset_bytes >= slice.offset_bytes &&
            piece.offset_bytes + piece.bytes <= slice.offset_bytes + slice.bytes)
            return;
    }
    fail_msg("rank %u puts %zu bytes at %zu, which are not its slices'", r, piece.bytes, piece.offset_bytes);
}

/* Each rank's pieces to the node's host memory; `whole_mask` as the plan
 * takes it. Every byte at most once. */
static void put_step(world *w, uint32_t whole_mask, bool by_slices, uint8_t *n_written_out) {
    static fcdp_piece pieces[MAX_EXTENTS * MAX_NODES + FCDP_N_SPANS];
    for (uint32_t r = 0; r < w->n_ranks; r++) {
        size_t n = (by_slices ? fcdp__plan_put_slices : fcdp__plan_put_pieces)(w->plan, whole_mask, w->layout,
                                                                               &w->topology[r], pieces);
        assert_true(n <= (by_slices ? w->layout->n_extents + FCDP_N_SPANS
                                    : (size_t)w->layout->n_extents * w->n_nodes));
        for (size_t k = 0; k < n && by_slices; k++) check_is_own(w, r, pieces[k]);
        for (size_t k = 0; k < n; k++) {
            memcpy(w->host[r / w->node_size] + pieces[k].offset_bytes, w->region[r] + pieces[k].offset_bytes,
                   pieces[k].bytes);
            for (size_t j = 0; j < pieces[k].bytes; j++)
                n_written_out[(r / w->node_size) * w->layout->bytes + pieces[k].offset_bytes + j]++;
        }
    }
}

static void take_step(world *w) {
    static fcdp_piece pieces[MAX_EXTENTS * (MAX_NODES + 1)];
    for (uint32_t r = 0; r < w->n_ranks; r++) {
        size_t n = fcdp__plan_take_pieces(w->plan, w->layout, &w->topology[r], pieces);
        assert_true(n <= (size_t)w->plan->n_stale * (w->n_nodes + 1));
        for (size_t k = 0; k < n; k++)
            memcpy(w->region[r] + pieces[k].offset_bytes, w->host[r / w->node_size] + pieces[k].offset_bytes,
                   pieces[k].bytes);
    }
}

/* ---- the checks ---- */

static void check_bytes(const world *w, const uint8_t *bytes, const char *what, uint32_t whose) {
    for (uint32_t i = 0; i < w->layout->n_extents; i++) {
        size_t at = w->layout->extents[i].offset_bytes;
        if (memcmp(bytes + at, w->truth + at, extent_bytes(w, i)))
            fail_msg("%s %u, extent %u", what, whose, i);
    }
}

static void check_regions(const world *w) {
    for (uint32_t r = 0; r < w->n_ranks; r++) check_bytes(w, w->region[r], "the region of rank", r);
}

static void check_masks_and_bytes(const world *w) {
    size_t stale_bytes = 0; /* of the region */
    uint32_t n_stale_in_all = 0;
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
        n_stale_in_all += n_stale;
        assert_int_equal(w->plan->restore_mask >> s & 1, n_fresh > 0);
        assert_int_equal(w->plan->fill_mask >> s & 1, n_stale > 0);
    }
    assert_int_equal(w->plan->n_stale, n_stale_in_all);
    size_t received_by_node = w->node_size * (w->n_nodes - 1) * w->plan->block_bytes;
    assert_int_equal(received_by_node, stale_bytes / w->n_nodes * (w->n_nodes - 1));
}

/* Once: every byte of the stale extents, and with `whole_mask` of all extents of those spans. Never: any
 * other's. What pads is anybody's. */
static void check_puts(const world *w, uint32_t whole_mask, uint8_t *n_written) {
    uint8_t *expected = calloc(w->layout->bytes + 1, 1), *is_used = calloc(w->layout->bytes + 1, 1);
    for (uint32_t i = 0; i < w->layout->n_extents; i++) {
        const fcdp_extent *extent = &w->layout->extents[i];
        if (w->stale[i] || whole_mask >> extent->span & 1)
            memset(expected + extent->offset_bytes, 1, w->n_ranks * extent->shard_bytes);
        memset(is_used + extent->offset_bytes, 1, w->n_ranks * extent->shard_bytes);
    }
    for (uint32_t b = 0; b < w->n_nodes; b++) {
        for (size_t k = 0; k < w->layout->bytes; k++)
            if (!is_used[k]) n_written[b * w->layout->bytes + k] = 0;
        assert_memory_equal(n_written + b * w->layout->bytes, expected, w->layout->bytes);
    }
    free(is_used);
    free(expected);
}

static void count(uint8_t *n_got, fcdp_piece piece) {
    for (size_t j = 0; j < piece.bytes; j++) n_got[piece.offset_bytes + j]++;
}

/* What a rank takes and what it has by itself (its shards of all nodes) are every stale byte, once. */
static void check_takes(const world *w) {
    fcdp_piece pieces[MAX_EXTENTS * (MAX_NODES + 1)];
    uint8_t *n_got = calloc(w->layout->bytes + 1, 2), *expected = n_got + w->layout->bytes;
    for (uint32_t k = 0; k < w->plan->n_stale; k++)
        memset(expected + w->layout->extents[w->plan->stale[k]].offset_bytes, 1,
               extent_bytes(w, w->plan->stale[k]));
    for (uint32_t r = 0; r < w->n_ranks; r++) {
        memset(n_got, 0, w->layout->bytes);
        size_t n = fcdp__plan_take_pieces(w->plan, w->layout, &w->topology[r], pieces);
        for (size_t k = 0; k < n; k++) count(n_got, pieces[k]);
        for (uint32_t k = 0; k < w->plan->n_stale; k++)
            for (uint32_t b = 0; b < w->n_nodes; b++)
                count(n_got, fcdp__plan_shard(w->layout, &w->topology[r], w->plan->stale[k], b,
                                              w->topology[r].local));
        assert_memory_equal(n_got, expected, w->layout->bytes);
    }
    free(n_got);
}

static void gather(world *w, bool by_slices) {
    regions_clear(w);
    if (by_slices)
        restore_by_slices(w);
    else
        restore_whole(w);
    own_step(w);
    inter_step(w);
}

/* Behind the node's step by slices; else before it, and the ranks meet in host memory. */
static void put_and_check(world *w, uint32_t whole_mask, bool by_slices) {
    uint8_t *n_written = calloc(w->n_nodes, w->layout->bytes + 1);
    gather(w, false);
    if (by_slices) node_step(w);
    put_step(w, whole_mask, by_slices, n_written);
    check_puts(w, whole_mask, n_written);
    for (uint32_t b = 0; b < w->n_nodes; b++) check_bytes(w, w->host[b], "the host of node", b);
    if (!by_slices) take_step(w);
    check_regions(w);
    free(n_written);
}

/* In any chunks, what lies in the region is what the parts bring. */
static void packed_and_check(world *w, test_random *random) {
    size_t most = 1 + random_below(random, 2) * w->plan->block_bytes + random_below(random, 700);
    for (int by_slices = 1; by_slices >= 0; by_slices--) {
        regions_clear(w);
        if (by_slices)
            restore_by_slices(w);
        else
            restore_whole(w);
        packed_step(w, most, by_slices);
        if (by_slices) check_regions(w);
    }
    uint8_t *packed[MAX_RANKS];
    for (uint32_t r = 0; r < w->n_ranks; r++) { /* of the step between the nodes alone */
        packed[r] = w->region[r];
        w->region[r] = bytes_make(w->layout->bytes);
    }
    restore_whole(w);
    own_step(w);
    inter_step(w);
    for (uint32_t r = 0; r < w->n_ranks; r++) {
        assert_memory_equal(packed[r], w->region[r], w->layout->bytes);
        free(packed[r]);
    }
}

/* A transformer's block: 9 parameters, 64 nodes x 8. NCCL is given one call a part within the node, and
 * between the nodes n - 1 sends and as many receives (nccl.c). */
static void test_launches_do_not_grow_with_the_nodes(void **state) {
    (void)state;
    enum { NODES = 64, LOCAL = 8, EXTENTS = 9, RANKS = NODES * LOCAL };
    static uint32_t node_of[RANKS];
    static fcdp_part parts[EXTENTS * NODES];
    fcdp_extent_spec specs[EXTENTS];
    uint8_t stale[EXTENTS];
    fcdp_cut cuts[EXTENTS];
    fcdp_topology topology;
    fcdp_layout *layout;
    fcdp_plan *plan;
    for (uint32_t r = 0; r < RANKS; r++) node_of[r] = r / LOCAL;
    for (int i = 0; i < EXTENTS; i++)
        specs[i] = (fcdp_extent_spec){(size_t)512 * (size_t)(i + 1), 1}, stale[i] = 1;
    assert_int_equal(fcdp__topology_make(node_of, RANKS, 0, &topology), FCDP_OK);
    assert_int_equal(fcdp__layout_create(specs, EXTENTS, RANKS, LOCAL, &layout), FCDP_OK);
    assert_int_equal(fcdp__plan_make(layout, stale, &plan), FCDP_OK);
    size_t inter = fcdp__plan_inter_parts(plan, layout, &topology, (fcdp_dptr){0}, parts) * 2 * (NODES - 1);
    size_t node = fcdp__plan_node_parts(plan, layout, &topology, (fcdp_dptr){0}, parts);
    size_t n_cuts = fcdp__plan_cuts(plan, layout, 0, plan->block_bytes, cuts);
    print_message("64 x 8, 9 parameters: %zu calls between the nodes, %zu within; packed 1 and 1, beside %zu "
                  "copies\n",
                  inter, node, n_cuts * (1 + LOCAL));
    assert_int_equal(inter, 1134);
    assert_int_equal(node, 576);
    assert_int_equal(n_cuts, EXTENTS);
    fcdp__plan_destroy(plan);
    fcdp__layout_destroy(layout);
}

static void test_random_plans(void **state) {
    (void)state;
    test_random random = {random_seed("test_random_plans", 7)};
    for (int round = 0; round < 300; round++) {
        world w;
        world_make(&w, &random);
        check_masks_and_bytes(&w);
        check_takes(&w);
        host_fill(&w);
        for (int by_slices = 0; by_slices < 2; by_slices++) { /* the ranks meet on the node's lane */
            gather(&w, by_slices);
            node_step(&w);
            check_regions(&w);
        }
        packed_and_check(&w, &random);
        for (uint32_t whole_mask = 0; whole_mask <= FCDP_SPAN_MASK_ALL; whole_mask++)
            for (int by_slices = 0; by_slices < 2; by_slices++)
                put_and_check(&w, whole_mask & w.plan->restore_mask, by_slices);
        world_free(&w);
    }
}

static void test_nothing_stale_is_no_step(void **state) {
    (void)state;
    const fcdp_extent_spec specs[] = {{100000, 0}, {0, 1}, {4, 1}};
    const uint32_t node_of[] = {0, 0, 1, 1};
    const uint8_t stale[3] = {0, 1, 0}; /* a stale extent without bytes is nothing */
    fcdp_layout *layout;
    fcdp_topology topology;
    fcdp_plan *plan;
    fcdp_piece pieces[6];
    assert_int_equal(fcdp__layout_create(specs, 3, 4, 2, &layout), FCDP_OK);
    assert_int_equal(fcdp__topology_make(node_of, 4, 0, &topology), FCDP_OK);
    assert_int_equal(fcdp__plan_make(layout, stale, &plan), FCDP_OK);
    assert_int_equal(plan->block_bytes + plan->n_stale, 0);
    assert_int_equal(plan->restore_mask, FCDP_SPAN_MASK_ALL);
    assert_int_equal(plan->fill_mask, 0);
    assert_int_equal(fcdp__plan_put_pieces(plan, 0, layout, &topology, pieces), 0);
    assert_int_equal(fcdp__plan_take_pieces(plan, layout, &topology, pieces), 0);
    assert_int_equal(fcdp__plan_put_pieces(plan, FCDP_SPAN_MASK_ALL, layout, &topology, pieces), 4);
    assert_int_equal(fcdp__plan_put_slices(plan, 0, layout, &topology, pieces), 0);
    assert_int_equal(fcdp__plan_put_slices(plan, FCDP_SPAN_MASK_ALL, layout, &topology, pieces), 2);
    fcdp__plan_destroy(plan);
    fcdp__layout_destroy(layout);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_plans),
        cmocka_unit_test(test_launches_do_not_grow_with_the_nodes),
        cmocka_unit_test(test_nothing_stale_is_no_step),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
