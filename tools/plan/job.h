/* job.h - a training job as the model sees it: its regions in the order of a forward, and what a parameter
 * costs. One region is what one unshard gathers, as in the engine. */
#ifndef PLAN_JOB_H
#define PLAN_JOB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tools/plan/cluster.h"

/* How parameters are sharded and gathered. */
typedef enum plan_mode {
    PLAN_FSDP2, /* ZeRO-3: gathered by all ranks, in forward and in backward */
    PLAN_KEEP,  /* reshard_after_forward=False: gathered in forward alone */
    PLAN_HPZ,   /* reshard_after_forward=<int>, ZeRO++'s hpZ: in backward by the node's ranks alone */
    PLAN_HSDP,  /* MiCS: sharded within the node, gradients all-reduced between nodes */
    PLAN_HFSDP, /* Megatron-FSDP's: a node's copy of 1/g per rank, gathered once per optimizer step, twice */
    PLAN_OFFLOAD, /* ZeRO-Offload over FSDP2: optimizer and its state on the host */
    PLAN_FCDP,    /* each region in the tier that plan_tier says */
    PLAN_N_MODES
} plan_mode;

/* Where FCDP has a region between two uses. */
typedef enum plan_tier {
    PLAN_ON_DEVICE, /* kept */
    PLAN_BY_SLICE,  /* host memory; each rank copies its slice, the node's ranks all-gather */
    PLAN_WHOLE,     /* host memory; each rank copies the whole region */
    PLAN_IN_FILE,   /* a disk of the node, then as by slice */
    PLAN_GATHERED,  /* nowhere: gathered again, as FSDP2 does */
    PLAN_N_TIERS
} plan_tier;

/* A linear layer of a region, which fcdp.split() can cut by its rows. */
typedef struct plan_linear {
    double rows;
    double trainable, frozen;         /* parameters, of the region's */
    double share;                     /* of what the region computes */
    double input_bytes, output_bytes; /* of a micro-batch, on one GPU */
    double extra_gathers;             /* of a part, in backward: for what is recomputed there; 0 */
} plan_linear;

typedef struct plan_region {
    double trainable, frozen;             /* parameters */
    double forward_flops, backward_flops; /* of a step, on one GPU */
    double activation_bytes;              /* from its forward to its backward, on one GPU */
    /* Measured, in place of the operations; 0: they are not. On one GPU, of one micro-batch. */
    double forward_seconds, backward_seconds;
    /* What FSDP2 itself computes in an unshard and in a reduction, beside the collective: copies in and out,
     * on CPUs, and only counted there (host_computes). Measured; 0: it is not. */
    double unshard_seconds, reduce_seconds;
    /* Of a part of a linear layer (split.h): parameters that are gathered beside it, and counted nowhere
     * else; bytes of the GPU's memory that are copied because there are parts. */
    double beside, forward_copied_bytes, backward_copied_bytes;
    double extra_gathers; /* as the layer's */
    bool stays;           /* gathered from its forward to its backward: FSDP2's root */
    size_t n_linears;
    const plan_linear *linears; /* NULL: none can be split */
} plan_region;

typedef struct plan_job {
    double parameter_bytes, gradient_bytes; /* of one parameter as it is gathered, reduced */
    double state_bytes; /* of a trainable parameter, sharded: all but the gathered copy and the gradient */
    double shard_bytes; /* of a parameter's shard beside that, frozen ones too */
    double other_bytes; /* of a GPU, at the peak: logits */
    double optimizer_seconds; /* measured, of one GPU if it had all shards; 0: it is not */
    double step_seconds;      /* of a step, beside regions and optimizer: measured; 0: it is not */
    double live_parameters;   /* of the last regions, gathered still when backward begins; DeepSpeed's
                               stage3_max_live_parameters */
    size_t n_regions;
    const plan_region *regions; /* in the order of a forward */
} plan_job;

static inline double plan_parameters(const plan_region *region) {
    return region->trainable + region->frozen;
}

/* Parameters that are gathered while it is used, beside the regions that stay. */
static inline double plan_gathered(const plan_region *region) {
    return (region->stays ? 0 : plan_parameters(region)) + region->beside;
}

/* Seconds of computing, of one micro-batch. */
static inline double plan_forward_seconds(const plan_region *region, const plan_cluster *cluster) {
    double copies = plan_seconds(region->forward_copied_bytes, cluster->memory_rate);
    return copies + (region->forward_seconds > 0 ? plan_measured(cluster, region->forward_seconds)
                                                 : plan_seconds(region->forward_flops, cluster->flops));
}
static inline double plan_backward_seconds(const plan_region *region, const plan_cluster *cluster) {
    double copies = plan_seconds(region->backward_copied_bytes, cluster->memory_rate);
    return copies + (region->backward_seconds > 0 ? plan_measured(cluster, region->backward_seconds)
                                                  : plan_seconds(region->backward_flops, cluster->flops));
}

#endif
