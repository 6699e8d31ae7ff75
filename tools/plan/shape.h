/* shape.h - a decoder's regions from its shape: parameters, operations and activations. Pure. */
#ifndef PLAN_SHAPE_H
#define PLAN_SHAPE_H

#include "tools/plan/job.h"
#include "tools/plan/memory.h"

typedef struct plan_shape {
    double layers, hidden, heads, kv_heads, head_size, intermediate, vocab;
    double positions; /* learned ones; 0: none */
    double gated;     /* 1: an MLP of three matrices (Llama); 0: of two (GPT-2) */
    double biases;    /* 1: of linear layers and norms */
    double tied;      /* 1: the head is the embedding */
    double lora_rank; /* of adapters on q, k, v and o, all else frozen; 0: all is trained */
    double sequence;  /* tokens */
    double recompute; /* 1: activation checkpointing of each layer */
    double scores;    /* 1: attention scores are kept: no fused attention */
} plan_shape;

/* Embedding, layers, head. */
static inline size_t plan_shape_n_regions(const plan_shape *shape) {
    return (size_t)shape->layers + 2;
}
/* `batch` sequences on each GPU. `job_inout` keeps what a parameter costs; its regions are `regions_out`, of
 * plan_shape_n_regions. */
void plan_shape_describe(const plan_shape *shape, double batch, const plan_constants *constants,
                         plan_job *job_inout, plan_region *regions_out);

/* The largest batch per GPU, a power of two, that fits; 0: not even one sequence does. FCDP has all
 * regions in `tier`. False: no memory. */
bool plan_largest_batch(const plan_shape *shape, const plan_job *costs, const plan_cluster *cluster,
                        plan_mode mode, plan_tier tier, const plan_constants *constants, double *batch_out);

#endif
