/* moves.h - which bytes one unshard, store, restore or reduction brings over each leg, and how many hops it
 * takes. FCDP's are those of the engine's own plan (comm/plan.h): model and engine cannot disagree. */
#ifndef PLAN_MOVES_H
#define PLAN_MOVES_H

#include "tools/plan/cluster.h"
#include "tools/plan/job.h"

/* Bytes per direction: `inter` that a node sends, the others of one GPU. `file` is that of a node. */
typedef struct plan_bytes {
    double inter, node, to_device, to_host, file;
    double inter_hops, node_hops; /* one behind the other */
} plan_bytes;

/* A ring of all ranks, side by side in their nodes: the all-gather of `bytes`, or their reduce-scatter. */
plan_bytes plan_flat_ring(const plan_cluster *cluster, double bytes);
/* A ring of a node's ranks. */
plan_bytes plan_node_ring(const plan_cluster *cluster, double bytes);
/* HSDP's reduction of `bytes` of gradients: a reduce-scatter within the node, and an all-reduce between nodes
 * of what each rank has. */
plan_bytes plan_hsdp_reduction(const plan_cluster *cluster, double bytes);

/* A collective of `bytes` between nodes, among the ranks of the same local index: a gather, or a
 * reduction. */
plan_bytes plan_between_nodes(const plan_cluster *cluster, double bytes);

/* What the engine moves for one region, leg by leg. */
typedef struct plan_engine_moves {
    plan_bytes gather;  /* the inter step of what is stale */
    plan_bytes node;    /* the node step behind it */
    plan_bytes store;   /* to the host, behind that */
    plan_bytes restore; /* of what is fresh, in the tier; none on the device. Before the gather */
} plan_engine_moves;

/* `stale_frozen`, `stale_trainable`: these parameters are gathered now; else they are restored, if the
 * tier is not the device. False: the engine's plan could not be made (fcdp_error_text says why). */
bool plan_engine_moves_make(const plan_cluster *cluster, const plan_job *job, const plan_region *region,
                            plan_tier tier, bool stale_frozen, bool stale_trainable,
                            plan_engine_moves *moves_out);

#endif
