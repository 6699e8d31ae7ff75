/* nccl_world.h - ranks that are processes, each with a simulated device, over a fabric and the NCCL
 * double. */
#ifndef FCDP_TESTS_COMM_NCCL_WORLD_H
#define FCDP_TESTS_COMM_NCCL_WORLD_H

#include <pthread.h>
#include <stdatomic.h>

#include "comm/nccl.h"
#include "sim/nccl/simnccl.h"
#include "tests/alloc/support.h"
#include "tiering/shared.h"

enum { WORLD_MAX_RANKS = 8, WORLD_N_STREAMS = 3, MEMORY_BYTES = 4 << 20, WORLD_DIES = 1000 };

typedef struct board { /* in memory that the ranks share */
    pthread_barrier_t barrier;
    fcdp_nccl_ids ids[WORLD_MAX_RANKS];
    _Atomic unsigned reached[WORLD_MAX_RANKS]; /* WORLD_DIES: it is about to be killed */
    /* for the body, as what follows: written before a meeting, read after it */
    _Atomic bool spent;
    _Atomic unsigned long launches;
    fcdp_shared_ticket account[WORLD_MAX_RANKS], host[WORLD_MAX_RANKS]; /* of each node */
    uint64_t offset[WORLD_MAX_RANKS];
} board;

typedef struct member {
    board *board;
    fcdp_topology topology;
    fcdp_driver *drv;
    simnet_endpoint *endpoint;
    fcdp_nccl *nccl;
    fcdp_nccl_transport *transport; /* NULL until transport_make */
    fcdp_transport table;
    fcdp_stream streams[WORLD_N_STREAMS];
    fcdp_event turn[FCDP_N_LANES];
    unsigned n_inter; /* all-gathers between nodes so far */
    fcdp_dptr memory; /* MEMORY_BYTES, zero */
    uint8_t *bytes;   /* the same, as this process sees it */
    uint64_t seed;
    unsigned n; /* the world's */
    double timeout_s;
} member;

typedef struct world {
    uint32_t nodes, ranks_per_node;
    double timeout_s;
    uint64_t seed;
    unsigned n; /* for the body: which call, which rank */
    void (*body)(member *m);
} world;

/* All ranks run the body to its end and give everything back, or the test fails. A rank that calls member_die
 * does not. What the ranks said stays in *board_out, if that is not NULL, until the next world. */
void world_run(const world *w, board **board_out);
const char *double_path(void); /* the library that this program is linked with */
/* Ids and communicators; a failure is for the body. Some rank may not come here. */
fcdp_status transport_make(member *m);
void meet(member *m);
/* As the engine does: between nodes on one stream after the other, within the node on the third. */
fcdp_status member_all_gather(member *m, int lane, const fcdp_part *parts, size_t n) FCDP_MUST_CHECK;
/* All streams have ended, within the time that a fault may take. */
void streams_sync(member *m);
void member_die(member *m) __attribute__((noreturn)); /* by SIGKILL; the world takes it for an end */

#endif
