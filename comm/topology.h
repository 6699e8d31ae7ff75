/* topology.h - which ranks of a shard group share a node. Pure. */
#ifndef FCDP_TOPOLOGY_H
#define FCDP_TOPOLOGY_H

#include "base/base.h"

/* Regular only: the group's ranks, in group order, are n_nodes blocks of node_size ranks each:
 *     n_ranks = n_nodes * node_size      rank = node * node_size + local */
typedef struct fcdp_topology {
    uint32_t n_ranks, n_nodes, node_size;
    uint32_t rank, node, local; /* this process, in the shard group */
} fcdp_topology;

/* `node_of[r]`: any number that names the node of the group's rank r. FCDP_ERR_UNSUPPORTED with the reason
 * for: one node only (nothing to save), ranks per node that differ, a node's ranks not side by side. */
fcdp_status fcdp__topology_make(const uint32_t *node_of, uint32_t n_ranks, uint32_t rank,
                                fcdp_topology *topology_out) FCDP_MUST_CHECK;

#endif
