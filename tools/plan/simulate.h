/* simulate.h - the time of a step: a discrete-event simulation of one rank's streams. Pure.
 *
 * All ranks are alike, so one rank's streams stand for all of them; a collective takes the time of its
 * slowest leg. Streams are those of the engine and of FSDP2 (compute, gathers between the nodes, within the
 * node, copies each way, reductions), each first in, first out. Each link carries one operation's bytes at a
 * time, in the order in which operations become ready. One that uses several links is over when all of them
 * have carried its bytes, and its hops are over.
 */
#ifndef PLAN_SIMULATE_H
#define PLAN_SIMULATE_H

#include "tools/plan/cluster.h"
#include "tools/plan/job.h"

typedef enum plan_link {
    PLAN_LINK_INTER,
    PLAN_LINK_NODE,
    PLAN_LINK_TO_DEVICE,
    PLAN_LINK_TO_HOST,
    PLAN_LINK_FILE,
    PLAN_N_LINKS
} plan_link;

typedef struct plan_schedule {
    uint32_t prefetch;      /* groups gathered ahead of the one that computes (FCDP_PREFETCH) */
    uint32_t n_steps;       /* of a job that runs already: frozen parameters have been gathered */
    uint32_t micro_batches; /* forwards and backwards per optimizer step; each reduces its gradients */
    bool no_overlap;        /* operations one behind the other, as without streams */
    bool host_computes;     /* a job on CPUs: FSDP2's collectives hold up compute, FCDP's gathers do not; its
                               copies do, and the ranks of a node meet in host memory */
    bool flat_gather;       /* FCDP's gather in one ring of all ranks, as the paper has it */
    double reduce_times;    /* a reduce-scatter's bytes, in those of a ring: 1; gloo's: 2 */
    double differences;     /* FCDP's gathers send this share of what has changed: 1; less: FCDP_CODEC */
    /* FCDP_COALESCE: regions of which at most so much is stale cross the nodes together, at the beginning of
     * a forward; 0: each by itself. */
    double coalesce_bytes;
    double host_seconds; /* of a step: measured work that the job's seconds do not have; negative: they
                               have too much; 0: it was not measured */
    /* On CPUs: what the cores need for FSDP2's gathers and reductions, in what the cluster says; 0: that. */
    double gather_cores, reduce_cores;
    double jitter; /* of the computing time of a step: its standard deviation, as a share of it */
    uint32_t seed;
} plan_schedule;

/* Per step. */
typedef struct plan_step {
    double seconds;
    double compute_seconds;   /* the GPU computes, agreements and optimizer included */
    double agreement_seconds; /* of them */
    double busy_seconds[PLAN_N_LINKS];
    double gather_core_seconds, reduce_core_seconds; /* of the node's link, on CPUs: FSDP2's collectives */
    double forward_inter, backward_inter; /* bytes that a node sends: gathers, and reductions in backward */
    double reduce_inter;                  /* of backward_inter, the reductions */
    double to_device, to_host, file;      /* bytes: of a GPU, of a GPU, of a node */
    double n_operations;
} plan_step;

/* `tiers` of the regions: PLAN_FCDP's. False: no memory, or sizes that the engine's plan refuses. */
bool plan_simulate(const plan_job *job, const plan_cluster *cluster, plan_mode mode, const uint8_t *tiers,
                   const plan_schedule *schedule, plan_step *step_out);

#endif
