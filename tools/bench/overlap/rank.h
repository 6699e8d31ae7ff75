/* rank.h - one rank's state, and what an engine is to the training loop: rank.c has the loop, engine.c
 * the engine.
 *
 * Errors end the process (MUST): nothing here returns one.
 */
#ifndef FCDP_BENCH_RANK_H
#define FCDP_BENCH_RANK_H

#include <stdio.h>
#include <unistd.h>

#include "comm/engine.h"
#include "comm/topology.h"
#include "tools/bench/overlap/overlap.h"

enum { ROOT = 0, N_GRADIENTS = 2, TIMEOUT_S = 60, MEMORY_RATE = 1000 };

typedef struct engine engine; /* engine.c's own */

typedef struct stamps { /* of one rank; written by its compute stream */
    uint64_t end_ns[BOARD_MAX_STEPS];
    _Atomic unsigned long wrong;
} stamps;

typedef struct rank {
    const run_config *config;
    board *board;
    fcdp_topology topology;
    engine *engine;
    fcdp_driver *drv;
    simnet_endpoint *endpoint;
    simnet_comm *world;
    fcdp_stream compute, reduce;
    fcdp_event computed, reduced[N_GRADIENTS]; /* reduced: of the group that used this buffer last */
    /* shards of all groups, their reduced gradients, then N_GRADIENTS times those of a whole group */
    uint64_t memory;
    size_t memory_bytes;
    fcdp_phys pages;
    uint64_t extents[N_GROUPS][N_EXTENTS]; /* where the engine gathers them to */
    uint32_t step;
    /* the last two: of the model's thread in calls of the engine that are no driver calls */
    unsigned long agreements, blocking, waits;
    uint64_t agreed_ns;
    stamps stamps;
} rank;

#define MUST(condition)                                                                                      \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: %s; last failure: %s\n", __FILE__, __LINE__, #condition,                 \
                    fcdp_error_text());                                                                      \
            _exit(2);                                                                                        \
        }                                                                                                    \
    } while (0)

/* ---- rank.c, for engines ---- */

/* The address of this rank's shard. */
uint64_t shard_at(const rank *r, uint32_t g, uint32_t extent);
/* Until all ranks are there. */
void meet(rank *r);
/* The ranks' maximum of each vote, counted. */
void agree_on(rank *r, uint8_t *votes, size_t n_votes);

/* ---- the engine, in the order of its life ---- */

/* Sets r->drv, from a process that has not used the device yet. */
void engine_open(rank *r);
/* To the other ranks, through r->endpoint; makes the groups and sets r->extents. */
void engine_connect(rank *r);
void engine_begin_forward(rank *r);
void engine_begin_backward(rank *r);
/* As FSDP2's unshard of a group, which the loop waits for later: the agreement where one is due, the gather
 * or restore, and what the engine begins ahead. */
void engine_unshard(rank *r, uint32_t g, bool forward);
/* r->compute, or the calling thread, goes on when the group's bytes are there. */
void engine_wait(rank *r, uint32_t g);
/* r->compute is behind the group's use. */
void engine_reshard(rank *r, uint32_t g);
/* The group's gradients were reduced. */
void engine_reduced(rank *r, uint32_t g);
/* Before the optimizer; a failure that came meanwhile. */
void engine_check(rank *r);
/* What the engine has counted so far. */
void engine_stats(const rank *r, fcdp_engine_stats *stats_out);
/* All that was begun is over, on r->compute too. */
void engine_drain(rank *r);
/* Drained: what the codec did in all steps. */
void engine_codec(const rank *r, rank_result *result_out);
/* All ranks are drained. */
void engine_disconnect(rank *r);
/* The last user of r->drv. */
void engine_close(rank *r);

#endif
