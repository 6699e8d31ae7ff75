/* cluster.h - N nodes x g ranks in one process: every rank an engine of its own, driven by one thread at a
 * time, their collectives over hub.h, their agreements over council.h.
 *
 * What a parameter holds is a function of (group, extent, version), so that any byte can be checked at any
 * time, on any thread. Shards are in device memory of their own, which simgpu watches for races; what
 * computes is a kernel on the rank's stream that compares what it reads, or the rank's own thread
 * (host_computes).
 */
#ifndef FCDP_TEST_CLUSTER_H
#define FCDP_TEST_CLUSTER_H

#include <stdio.h>
#include <stdlib.h>

#include "alloc/vrange.h"
#include "comm/group.h"
#include "comm/tree.h"
#include "tests/assert_ok.h"
#include "tests/comm/council.h"
#include "tests/comm/hub.h"

enum {
    CLUSTER_MAX_RANKS = HUB_MAX_RANKS,
    CLUSTER_MAX_GROUPS = 448,
    CLUSTER_MAX_EXTENTS = 8,
    CLUSTER_TEXT_BYTES = 640
};

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
    fcdp_tree *tree;
    fcdp_stream stream; /* the rank's compute */
    hub_port port;
    fcdp_group *groups[CLUSTER_MAX_GROUPS];
    uint8_t *shards; /* of all parameters: device memory, or with host_computes the host's */
    size_t shards_bytes;
    fcdp_vrange *shards_range; /* NULL with host_computes */
    fcdp_phys shards_block;
    size_t shard_at[CLUSTER_MAX_GROUPS][CLUSTER_MAX_EXTENTS];
    /* of the parameters, by the rank's program so far */
    uint32_t version[CLUSTER_MAX_GROUPS][CLUSTER_MAX_EXTENTS];
    uint32_t held[CLUSTER_MAX_GROUPS][CLUSTER_MAX_EXTENTS];  /* of what the last begin brought */
    uint64_t steps[CLUSTER_MAX_GROUPS][CLUSTER_MAX_EXTENTS]; /* the signal that this rank reports */
    bool missing[CLUSTER_MAX_GROUPS][CLUSTER_MAX_EXTENTS];   /* the rank's program has freed the shard */
    bool inputs_fail;                                        /* it cannot make them */
    bool evaluates;                                          /* grad mode is off */
    unsigned n_drains;            /* agreements in which it waited for its device */
    const fcdp_group *asked_last; /* of the last agreement, the last one */
    pthread_mutex_t mutex;
    char wrong[CLUSTER_TEXT_BYTES]; /* guarded by mutex: the first wrong byte that compute saw; "": none */
} member;

typedef struct cluster_config {
    uint32_t n_nodes, node_size, n_groups;
    group_spec groups[CLUSTER_MAX_GROUPS];
    fcdp_restore_mode restore;
    bool host_copies; /* FCDP_HOST_COPIES=numa, local ranks in turn on two NUMA nodes of their machine */
    fcdp_mapping_mode mapping;
    fcdp_agree_mode agree;
    int prefetch;
    size_t coalesce_bytes;
    size_t packed_half_bytes; /* of the buffer that all gathers go through; 0: those of many parts alone */
    bool host_computes;
    /* shards in device memory are fingerprinted before every agreement; the host's always are */
    bool fingerprints;
    double tau[CLUSTER_MAX_RANKS];
    bool next_use; /* FCDP_POLICY=next-use, else tau */
    size_t device_budget_bytes;
    double timeout_s;      /* 0: long enough for a slow machine */
    const char *cache_dir; /* FCDP_CACHE_DIR; NULL: none */
    size_t cache_bytes;
    const char *spill_dir; /* FCDP_SPILL_DIR; NULL: none */
    bool spilled[CLUSTER_MAX_GROUPS];
    fcdp_tier tiers[CLUSTER_MAX_GROUPS]; /* FCDP_TIER_MAPPED: once it is attached */
    bool deltas;                         /* FCDP_CODEC=delta, or, by_gain, auto; else none */
    bool by_gain;
    bool codec_is_slow;     /* by_gain: whatever the link's rate is, differences are a loss */
    bool rounds;            /* FCDP_CODEC=int8; extents in turn are of each kind of numbers */
    bool alike;             /* seven eighths of what a parameter holds are the same in all versions */
    uint32_t uncached_rank; /* its directory cannot be used; 0: none */
    bool has_root;          /* the first group has the name of a model's root, "" */
} cluster_config;

struct cluster {
    cluster_config config;
    uint32_t n_ranks;
    member members[CLUSTER_MAX_RANKS];
    hub hub;
    council council;
    uint8_t *pool; /* random bytes: what parameters hold are pieces of it */
};

/* Engines, host memory, comms, groups, attached and in a tree. Fails the test on any error. */
cluster *cluster_create(const cluster_config *config);
void cluster_destroy(cluster *c);
size_t cluster_extent_bytes(const cluster *c, uint32_t g, uint32_t i); /* of the whole parameter */
/* What the whole parameter holds in that version. */
const uint8_t *cluster_truth(const cluster *c, uint32_t g, uint32_t i, uint32_t version);
/* The same as ranks have it in their regions: with `rounds`, rounded, in `room`, of as many bytes. */
const uint8_t *cluster_gathered(const cluster *c, const fcdp_group *group, uint32_t g, uint32_t i,
                                uint32_t version, uint8_t *room);
/* Device memory with which no group can fail to get pages, though all are in use, each
 * in a slot that is too large for it. */
size_t cluster_most_pages(const cluster_config *config);
size_t cluster_region_bytes(const cluster_config *config, uint32_t g);
/* Every rank launched the same, as far as each came; fails the test. `whole`: all came to the end. */
void cluster_check_launches(const cluster *c, bool whole);

/* `body` on a thread of its own for every rank, all at once; until the last one ends. */
void cluster_run(cluster *c, void (*body)(member *m, void *arg), void *arg);

/* Nothing of the simulated device is held by anyone, and nothing was unordered. */
void assert_nothing_lives(void);
void assert_nothing_lives_after(const char *what, long n); /* one of several runs */
/* Since the last reset no thread has waited in a way in which CUDA may keep a core busy. */
void assert_nobody_spun(void);

/* For the ranks' threads, from which cmocka cannot return. */
#define MUST(condition)                                                                                      \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: %s; last failure: %s\n", __FILE__, __LINE__, #condition,                 \
                    fcdp_error_text());                                                                      \
            abort();                                                                                         \
        }                                                                                                    \
    } while (0)

#endif
