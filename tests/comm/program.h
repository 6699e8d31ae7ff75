/* program.h - a random training job on a cluster: the same order of calls on every rank, as a program gives
 * it, and whatever else may differ between ranks: who notices a write, who evicts what and when.
 */
#ifndef FCDP_TEST_PROGRAM_H
#define FCDP_TEST_PROGRAM_H

#include "tests/comm/cluster.h"
#include "tests/comm/random.h"

typedef struct program {
    cluster *cluster;
    uint64_t seed;
    int n_steps;
    uint32_t evict_chance; /* of 256, at each unshard and reshard of each rank */
    bool plain;            /* the same short schedule every time: no random extras */
    bool faults; /* errors are allowed, wrong bytes are not; and a step without a fault must succeed again */
    /* out */
    char wrong[512]; /* "" when all was right */
    int n_errors;    /* calls that failed */
    int first_error_step;
    char first_error[512];
} program;

/* Runs to the end whatever happens. `program->wrong` says what was not right. */
void program_run(program *p);

#endif
