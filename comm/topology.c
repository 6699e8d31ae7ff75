/* topology.c - nodes and ranks, from one number per rank.
 *
 * Places in the region, and the lanes of all collectives, are computed from (node, local) alone. That works
 * for equal blocks of ranks and for no other arrangement, so every other one is refused here, by a text that
 * says what to change, and plain FSDP serves such a group.
 */
#include "comm/topology.h"

#include <stdlib.h>
#include <string.h>

typedef struct run { /* ranks side by side on one node */
    uint32_t node, first, n;
} run;

/* Every refusal names the ranks that do not fit, which are the user's to order. */
static fcdp_status runs_check(const run *runs, uint32_t n) {
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = 0; j < i; j++)
            if (runs[j].node == runs[i].node)
                return fcdp__fail(FCDP_ERR_UNSUPPORTED,
                                  "the ranks of node %u do not stand side by side in the shard group: rank "
                                  "%u follows another node's, "
                                  "and ranks %u to %u are on node %u too; order the ranks node by node",
                                  runs[i].node, runs[i].first, runs[j].first, runs[j].first + runs[j].n - 1,
                                  runs[j].node);
    for (uint32_t i = 1; i < n; i++)
        if (runs[i].n != runs[0].n)
            return fcdp__fail(FCDP_ERR_UNSUPPORTED,
                              "ranks per node differ: %u on node %u, %u on node %u; start the same number on "
                              "every node, or "
                              "correct FCDP_LOCAL_SIZE if it is set",
                              runs[0].n, runs[0].node, runs[i].n, runs[i].node);
    if (n == 1)
        return fcdp__fail(
            FCDP_ERR_UNSUPPORTED,
            "all %u ranks of the shard group are on one node: no gather crosses nodes, nothing to save",
            runs[0].n);
    return FCDP_OK;
}

/* Runs of ranks on one node are the nodes, once there is one run for each and all are of one length. */
fcdp_status fcdp__topology_make(const uint32_t *node_of, uint32_t n_ranks, uint32_t rank,
                                fcdp_topology *topology_out) {
    if (n_ranks == 0 || rank >= n_ranks)
        return fcdp__fail(FCDP_ERR_INVALID, "topology: rank %u of %u ranks", rank, n_ranks);
    run *runs = malloc(n_ranks * sizeof *runs);
    if (!runs) return fcdp__fail(FCDP_ERR_SYSTEM, "topology: no memory for %u ranks", n_ranks);
    uint32_t n_nodes = 0;
    for (uint32_t r = 0; r < n_ranks; r++) {
        if (n_nodes == 0 || runs[n_nodes - 1].node != node_of[r]) runs[n_nodes++] = (run){node_of[r], r, 0};
        runs[n_nodes - 1].n++;
    }
    fcdp_status status = runs_check(runs, n_nodes);
    free(runs);
    if (status) return status;

    uint32_t node_size = n_ranks / n_nodes;
    *topology_out = (fcdp_topology){.n_ranks = n_ranks,
                                    .n_nodes = n_nodes,
                                    .node_size = node_size,
                                    .rank = rank,
                                    .node = rank / node_size,
                                    .local = rank % node_size};
    return FCDP_OK;
}
