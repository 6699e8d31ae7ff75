/* plan.h - what an unshard does, as a list of steps. Pure: staleness, layout and topology in, steps out.
 *
 * The same agreed staleness gives the same plan on every rank; inter-node steps exist only for stale extents.
 *
 * The column: what one rank receives from the ranks with its own local index on all nodes. It is a buffer of n_nodes blocks of
 * block_bytes; block b holds, for each stale extent, the shard of rank (b, local): big extents first, then small ones.
 *
 *     pack      own shards -> column block `node`                                        (device to device)
 *     inter     all-gather of the column's blocks, in place, over the nodes             (the only step that crosses the slow link)
 *     scatter   big extents: column block b, extent i -> region, extent i, shard (b, local)
 *     intra     big extents: for each b an in-place all-gather over the node of shards (b, 0..g-1) of extent i
 *     small     small extents (< FCDP_PLAN_SMALL_BYTES a shard) together: their parts of all blocks packed into slot `local` of the
 *               column's small area, one in-place all-gather over the node, unpacked to the region
 *     restore   a span that keeps at least one fresh extent: from the host tier, before the stale ones are gathered over it
 *
 * A node of one rank has no intra step: scatter is the whole of it, and every extent counts as big.
 */
#ifndef FCDP_PLAN_H
#define FCDP_PLAN_H

#include "comm/topology.h"
#include "tiering/layout.h"

enum { FCDP_PLAN_SMALL_BYTES = 64 << 10 };

typedef struct fcdp_plan_extent {
    uint32_t extent;            /* index in the layout */
    size_t column_offset_bytes; /* inside a column block */
} fcdp_plan_extent;

typedef struct fcdp_plan {
    uint32_t restore_mask;      /* spans to bring back before the gather (they keep at least one fresh extent, and are not empty) */
    uint32_t fill_mask;         /* spans that the gather (partly) rewrites */
    uint32_t void_mask;         /* spans wholly stale: nothing of the old copy is wanted */
    size_t block_bytes;         /* bytes this rank sends to each other node = its share of the stale extents */
    size_t small_bytes;         /* the small extents' part of a block, at its end */
    size_t column_bytes;        /* n_nodes * block_bytes, then the small step's area: node_size slots of n_nodes * small_bytes */
    uint32_t n_big, n_small;
    fcdp_plan_extent extents[]; /* n_big big ones, then n_small small ones; shards of 0 bytes are left out */
} fcdp_plan;

/* `stale[i]` nonzero: extent i must be gathered. The caller frees with fcdp__plan_destroy. */
fcdp_status fcdp__plan_make(const fcdp_layout *layout, const fcdp_topology *topology, const uint8_t *stale, fcdp_plan **plan_out) FCDP_MUST_CHECK;
void fcdp__plan_destroy(fcdp_plan *plan);

#endif
