/* bound.c - how long a step must take: arithmetic only. Operations of one resource are never
 * at once, and none begins before what it reads is there. That is all that is assumed: how
 * deep groups are gathered ahead, and how many slots there are, is the engine's affair.
 */
#include "tools/bench/overlap/overlap.h"

const char *const resource_names[N_CODEC_BOUNDS] = {"compute", "pcie", "link", "pcie+link", "host+link"};

static const size_t GROUP_BYTES = (size_t)N_RANKS * SHARD_BYTES;

static double rate(size_t bytes, double ms) {
    return (double)bytes / (ms * 1e6);
}

scenario scenario_scaled(scenario s, double x) {
    double *const ms[] = {&s.forward_ms, &s.backward_ms, &s.optimizer_ms, &s.pcie_ms, &s.link_ms, &s.node_ms};
    for (size_t i = 0; i < sizeof ms / sizeof *ms; i++) *ms[i] *= x;
    return s;
}

/* A rank puts its local index' shards of all nodes, and restores a slice: as many bytes. */
double pcie_rate(const scenario *s) {
    return rate(GROUP_BYTES / NODE_SIZE, s->pcie_ms);
}

/* The node's ranks share its link; each sends its shard to every other node. */
double link_rate(const scenario *s) {
    return rate((size_t)(N_NODES - 1) * NODE_SIZE * SHARD_BYTES, s->link_ms);
}

/* As simnet counts: what the node's ranks receive from each other, together. */
double node_rate(const scenario *s) {
    return rate((NODE_SIZE - 1) * GROUP_BYTES, s->node_ms);
}

double bound_ms(const bound *of) {
    return of->before_ms + of->busy_ms + of->turn_ms + of->after_ms;
}

/* Chains: a group is there once its shards have crossed and were gathered within the node; its gradients are
 * reduced once its backward is over. Both ranks of a node are needed for the first, so the later of them is.
 *
 * Compute waits for the first group, and the optimizer for the last reduction. PCIe has something to store
 * once the first group has crossed (for the node's later rank: both have), stores all groups in forward and
 * loads all but the root in backward, in the opposite order: so what comes first after the last store depends
 * on it. Its last load is of group 1, behind which are the backwards of groups 1 and 0. The link is busy from
 * the step's first moment; the first reduction waits for what the last gather brought to go through forward
 * and backward. */
void bounds_of(const scenario *s, bound bounds_out[N_RESOURCES]) {
    double link_latency_ms = s->link_latency_us / 1e3, node_latency_ms = s->node_latency_us / 1e3;
    double crossed_ms = s->link_ms + link_latency_ms, node_ms = s->node_ms + node_latency_ms;
    double reduce_ms = (double)((N_RANKS - 1) * SHARD_BYTES) / (link_rate(s) * 1e6);
    double reduced_ms = reduce_ms + link_latency_ms;
    bounds_out[RESOURCE_COMPUTE] = (bound){.before_ms = crossed_ms + node_ms,
                                           .busy_ms = N_GROUPS * (s->forward_ms + s->backward_ms) +
                                                      s->optimizer_ms,
                                           .after_ms = reduced_ms};
    bounds_out[RESOURCE_PCIE] = (bound){.before_ms = crossed_ms,
                                        .busy_ms = (N_GROUPS + N_GROUPS - 1) * s->pcie_ms,
                                        .after_ms = node_ms + 2 * s->backward_ms + reduced_ms +
                                                    s->optimizer_ms};
    bounds_out[RESOURCE_LINK] = (bound){.busy_ms = N_GROUPS * (s->link_ms + reduce_ms),
                                        .turn_ms = link_latency_ms + node_ms + s->forward_ms + s->backward_ms,
                                        .after_ms = link_latency_ms + s->optimizer_ms};
}

/* A gather of differences (comm/delta.h) begins with two exchanges, of heads and of differences; what the
 * device writes to the host for these is left out. Then the other members' shards come to the device over
 * PCIe, while the members compare. This rank's shards come to the host beside all that, and the host stores
 * what came: nothing is left to store over PCIe, which in forward carries as much one way as the other. What
 * the host computes for a group is to be hidden, so it is in no chain; but where a rank has one core, that
 * computes for one group after another.
 *
 * PCIe has something to bring to the device once the first differences have crossed, and loads all groups but
 * the root in backward. Behind the last group that forward brings are its forward and backward, and only then
 * is there something to reduce. So all that forward brings, and all reductions, come one after another. */
void codec_bounds_of(const scenario *s, double crossing_ms, double host_ms,
                     bound bounds_out[N_CODEC_BOUNDS]) {
    double shard_ms = s->pcie_ms * NODE_SIZE / N_RANKS, latency_ms = s->link_latency_us / 1e3;
    double bring_ms = (N_NODES - 1) * shard_ms, crossed_ms = crossing_ms + 2 * latency_ms;
    double node_ms = s->node_ms + s->node_latency_us / 1e3;
    double reduce_ms = (double)((N_RANKS - 1) * SHARD_BYTES) / (link_rate(s) * 1e6);
    bounds_of(s, bounds_out);
    bounds_out[RESOURCE_COMPUTE].before_ms = crossed_ms + bring_ms + node_ms;
    bounds_out[RESOURCE_PCIE].before_ms = crossed_ms;
    bounds_out[RESOURCE_PCIE].busy_ms = N_GROUPS * bring_ms + (N_GROUPS - 1) * s->pcie_ms;
    bounds_out[RESOURCE_LINK].busy_ms = N_GROUPS * (crossing_ms + reduce_ms);
    bounds_out[RESOURCE_LINK].turn_ms += bring_ms;
    bounds_out[N_RESOURCES] = (bound){.before_ms = crossed_ms,
                                      .busy_ms = N_GROUPS * (bring_ms + reduce_ms),
                                      .turn_ms = node_ms + s->forward_ms + s->backward_ms,
                                      .after_ms = latency_ms + s->optimizer_ms};
    bounds_out[CODEC_BOUND_HOST] = bounds_out[N_RESOURCES];
    bounds_out[CODEC_BOUND_HOST].before_ms = 0;
    bounds_out[CODEC_BOUND_HOST].busy_ms = N_GROUPS * (host_ms + reduce_ms);
    bounds_out[CODEC_BOUND_HOST].turn_ms += bring_ms;
}
