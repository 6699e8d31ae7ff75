/* memory.h - what a job takes of a GPU's memory and of a node's, by mode. Pure. */
#ifndef PLAN_MEMORY_H
#define PLAN_MEMORY_H

#include "tools/plan/cluster.h"
#include "tools/plan/job.h"

/* The constants that described hardware does not give; docs/plan.md says what each was fitted on. */
typedef struct plan_constants {
    double usable;           /* of a GPU's memory: fragmentation, and what libraries take */
    double activation_bytes; /* of a token, layer and unit of the hidden size; 16-bit, nothing recomputed */
    double cache;            /* times W/g that a second partition takes (hpZ) */
} plan_constants;

typedef struct plan_memory {
    /* of a GPU, at the end of forward:  total = state + cache + gathered + activations + other */
    double state, cache, gathered, activations, other, total;
    double limit; /* of the GPU's memory, what is usable */
    double host;  /* of a node */
    double file;  /* of a node */
    bool fits;    /* total <= limit, and host <= the node's */
} plan_memory;

/* `tiers` of the regions, which PLAN_FCDP alone looks at. */
void plan_memory_of(const plan_job *job, const plan_cluster *cluster, plan_mode mode, const uint8_t *tiers,
                    const plan_constants *constants, plan_memory *memory_out);

#endif
