/* cluster.h - N nodes x g ranks in one process: every rank an engine of its own, their collectives over
 * shared memory.
 *
 * A rank is driven by one thread at a time. The transport (a lane: the members of one collective) never
 * hangs: it gives up after a minute, and at once when a rank that has failed calls hub_break. Calls can be
 * made to fail by number.
 */
#ifndef FCDP_TEST_CLUSTER_H
#define FCDP_TEST_CLUSTER_H

#include <pthread.h>
#include <stdatomic.h>

#include "comm/group.h"

enum { CLUSTER_MAX_RANKS = 9, CLUSTER_MAX_GROUPS = 5, CLUSTER_MAX_EXTENTS = 8, LANE_ROUNDS = 16 };

typedef struct lane_round {
    uint32_t n_arrived;
    bool disagrees;
    fcdp_dptr buffer[CLUSTER_MAX_RANKS];
    size_t bytes[CLUSTER_MAX_RANKS];
} lane_round;

typedef struct lane {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    uint32_t n;
    bool broken;
    uint64_t epoch; /* mends so far */
    uint64_t n_started[CLUSTER_MAX_RANKS];
    lane_round rounds[LANE_ROUNDS];
} lane;

typedef enum hub_fault {
    HUB_FAULT_ABSENT, /* the call fails before the rank has taken part */
    HUB_FAULT_LOST,   /* the wait fails here, and has succeeded for the others */
} hub_fault;

typedef struct group_spec {
    uint32_t n_extents;
    fcdp_extent_spec extents[CLUSTER_MAX_EXTENTS];
} group_spec;

typedef struct cluster cluster;

typedef struct member {
    cluster *cluster;
    fcdp_topology topology;
    fcdp_engine *engine;
    fcdp_comm *comm;
    fcdp_stream stream; /* the rank's compute */
    fcdp_group *groups[CLUSTER_MAX_GROUPS];
    uint8_t *shards[CLUSTER_MAX_GROUPS][CLUSTER_MAX_EXTENTS]; /* where FSDP would have them */
    uint8_t *sink[CLUSTER_MAX_GROUPS];                        /* what compute read from the region */
} member;

typedef struct cluster_config {
    uint32_t n_nodes, node_size, n_groups;
    group_spec groups[CLUSTER_MAX_GROUPS];
    fcdp_restore_mode restore;
    double tau[CLUSTER_MAX_RANKS];
    size_t device_budget_bytes;
    double timeout_s;
} cluster_config;

struct cluster {
    cluster_config config;
    uint32_t n_ranks;
    member members[CLUSTER_MAX_RANKS];
    lane inter[CLUSTER_MAX_RANKS], intra[CLUSTER_MAX_RANKS]; /* by local index, by node */
    _Atomic uint64_t inter_bytes_sent;
    _Atomic long n_calls, fail_at; /* fail_at: number of the call that fails, 0: none */
    _Atomic int fault;
    uint8_t *truth[CLUSTER_MAX_GROUPS][CLUSTER_MAX_EXTENTS]; /* the parameters as they are */
    uint32_t version[CLUSTER_MAX_GROUPS][CLUSTER_MAX_EXTENTS];
};

/* Engines, host memory, comms, groups, attached. Fails the test on any error. */
cluster *cluster_create(const cluster_config *config);
void cluster_destroy(cluster *c);
size_t cluster_extent_bytes(const cluster *c, uint32_t g, uint32_t i); /* of the whole parameter */

/* A parameter gets new content. No rank runs. */
void cluster_write(cluster *c, uint32_t g, uint32_t i);
/* Enqueue on the rank's stream: its shards become what the truth says. */
fcdp_status member_update_shards(member *m, uint32_t g, const uint8_t *which) FCDP_MUST_CHECK;
/* Enqueue on the rank's stream: a read of the whole region, as compute would do. */
fcdp_status member_compute(member *m, uint32_t g) FCDP_MUST_CHECK;
/* The extent that is not the truth in the region, -1: none. */
int member_wrong_extent(const member *m, uint32_t g);
/* The same of what compute read; the stream is idle. */
int member_wrong_sink(const member *m, uint32_t g);

void hub_break(cluster *c);
void hub_mend(cluster *c); /* no collective is running */

#define assert_ok(call)                                                                                      \
    do {                                                                                                     \
        fcdp_status status_ = (call);                                                                        \
        if (status_) fail_msg("%s: %s (%s)", #call, fcdp_status_name(status_), fcdp_error_text());           \
    } while (0)

/* Nothing of the simulated device is held by anyone. */
void assert_nothing_lives(void);

#endif
