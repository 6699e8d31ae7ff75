/* plan.h - the places that the bytes of an unshard move between. Pure: staleness, layout and topology in,
 * places out.
 *
 * The same agreed staleness gives the same plan on every rank. Everything lands in its place in the region at
 * once:
 *
 *     own       this rank's shards of the stale extents -> their places in the region, device to device
 *     inter     over the slow link: for each stale extent an all-gather over the nodes, in place, of shards
 *               (0..n_nodes-1, local)
 *     node      for each stale extent and each node b an all-gather within the node, in place, of shards
 *               (b, 0..g-1)
 *     put       to their places in the node's host memory; all ranks together put every byte. Before the node
 *               step: shards (b, local) of all b. Behind it: this rank's slices
 *     take      the other ranks' shards, from host memory: instead of the node step
 *     restore   a span that keeps at least one fresh extent: from host memory, its slices all-gathered within
 *               the node, or whole
 *
 * A node of one rank has no node step. A span that is restored and partly stale is restored first.
 */
#ifndef FCDP_PLAN_H
#define FCDP_PLAN_H

#include "comm/topology.h"
#include "comm/transport.h"
#include "tiering/layout.h"

typedef struct fcdp_plan {
    uint32_t restore_mask; /* spans that keep at least one fresh extent, and are not empty */
    uint32_t fill_mask;    /* spans that the gather (partly) rewrites; both: restored first */
    size_t block_bytes;    /* bytes this rank sends to each other node = its shards of the stale extents */
    uint32_t n_stale;
    uint32_t stale[]; /* indices of the stale extents that have bytes */
} fcdp_plan;

/* `stale[i]` nonzero: extent i must be gathered. The caller frees with fcdp__plan_destroy. */
fcdp_status fcdp__plan_make(const fcdp_layout *layout, const uint8_t *stale,
                            fcdp_plan **plan_out) FCDP_MUST_CHECK;
void fcdp__plan_destroy(fcdp_plan *plan);

/* Where shard (node, local) of an extent lies in the region. */
fcdp_piece fcdp__plan_shard(const fcdp_layout *layout, const fcdp_topology *topology, uint32_t extent,
                            uint32_t node, uint32_t local);

/* The parts of a collective on a region at `base`. n_stale of them; n_stale * n_nodes; at most
 * FCDP_N_SPANS. Each returns how many. */
size_t fcdp__plan_inter_parts(const fcdp_plan *plan, const fcdp_layout *layout, const fcdp_topology *topology,
                              fcdp_dptr base, fcdp_part *parts_out);
size_t fcdp__plan_node_parts(const fcdp_plan *plan, const fcdp_layout *layout, const fcdp_topology *topology,
                             fcdp_dptr base, fcdp_part *parts_out);
size_t fcdp__plan_slice_parts(uint32_t span_mask, const fcdp_layout *layout, const fcdp_topology *topology,
                              fcdp_dptr base, fcdp_part *parts_out);

/* Packed (moves.c): bytes `first` to `first + bytes` of a rank's stale shards, one after another. A cut is
 * what of them is one shard's: bytes `from` on of it, which lie at `at` in the block. At most n_stale, of all
 * ranks alike. */
typedef struct fcdp_cut {
    uint32_t extent;
    size_t from, bytes, at;
} fcdp_cut;
size_t fcdp__plan_cuts(const fcdp_plan *plan, const fcdp_layout *layout, size_t first, size_t bytes,
                       fcdp_cut *cuts_out);
/* The copies that bring a cut of ranks (0..n_nodes-1, local) from their blocks, which begin at `blocks` and
 * lie `block_bytes` apart, to the places in the region at `base`. */
fcdp_rows fcdp__plan_rows(const fcdp_cut *cut, const fcdp_layout *layout, const fcdp_topology *topology,
                          uint32_t local, fcdp_dptr blocks, size_t block_bytes, fcdp_dptr base);

/* Pieces to put: this rank's shards of the stale extents, and of every extent of the spans in
 * `whole_mask`. At most n_extents * n_nodes. */
size_t fcdp__plan_put_pieces(const fcdp_plan *plan, uint32_t whole_mask, const fcdp_layout *layout,
                             const fcdp_topology *topology, fcdp_piece *pieces_out);
/* The same bytes in other pieces: what of them lies in this rank's slices. Ascending within a
 * span; at most n_extents + FCDP_N_SPANS. */
size_t fcdp__plan_put_slices(const fcdp_plan *plan, uint32_t whole_mask, const fcdp_layout *layout,
                             const fcdp_topology *topology, fcdp_piece *pieces_out);
/* Pieces to take: everything of the stale extents but this rank's shards. At most n_stale * (n_nodes + 1). */
size_t fcdp__plan_take_pieces(const fcdp_plan *plan, const fcdp_layout *layout, const fcdp_topology *topology,
                              fcdp_piece *pieces_out);

#endif
