/* engine.h - groups, their gathers, and the two workers that run them in order.
 *
 * An engine belongs to a process and a device: driver, page pool, tiering, the account of the node's host memory, and two worker threads (or one
 * that is both). A comm is one shard process group seen as nodes x ranks, with its transport and the host memory of its ranks on this node: shard
 * groups of different shapes (experts beside dense layers) are served side by side. A group is one FSDP parameter group: a region, its validity, its counts.
 * The node worker runs jobs (unshard, reshard), the inter worker the steps of unshards that cross nodes (crossing.h); each runs one at a
 * time in the order of submission, which is the program's order and so the same on every rank: collectives of different ranks meet.
 *
 * What an unshard does: map the region's pages; restore the fresh spans; gather the stale extents as the plan says. What a reshard
 * does: keep the region on the device if policy says so, else store its slice and unmap it.
 *
 * Ballots: whether a rank kept or released a region is its own decision, and yet the ranks of a node restore together. So at the end of
 * release number q each rank writes q * 4 + its vote (kept, released, void) on the board (word q % 2: a peer can be at most one release ahead), and
 * a restore first waits for all words of its q. If nobody released, nothing moves. If anybody did, by slice: all join the all-gather (who
 * kept has the bytes already, in place); whole: who kept stores its slice so that who released can read all of it. A void vote (a rank's
 * copy is lost) makes the restore fail on every rank of the node alike. restore.c has the table.
 *
 * After a failed job nothing of the group's copy is believed any more, in any tier: every extent is observed stale, and an unshard that gathers
 * all of it succeeds again. Calls on one group are the caller's to order; a group's jobs keep the order even when one fails.
 *
 * Lock: FCDP_RANK_ENGINE guards queues, job states and counters. A worker holds no lock while it moves bytes.
 */
#ifndef FCDP_ENGINE_H
#define FCDP_ENGINE_H

#include "alloc/device.h"
#include "alloc/options.h"
#include "comm/plan.h"
#include "comm/transport.h"
#include "comm/validity.h"
#include "tiering/region.h"

typedef struct fcdp_engine fcdp_engine;
typedef struct fcdp_comm fcdp_comm;
typedef struct fcdp_group fcdp_group;
typedef struct fcdp_job fcdp_job;

typedef struct fcdp_engine_config {
    fcdp_options options;
    fcdp_driver_kind driver;    /* CUDA for groups on a GPU, SIM for groups on CPUs */
    int ordinal;                /* device index */
    const char *sim_library;    /* where the simulated driver lies, may be NULL */
    const fcdp_device *device;  /* not NULL: this one, open as long as the engine, instead of one of the engine's own */
    /* NCCL wants the collectives of different communicators launched in one order on all ranks: both lanes on the node worker. */
    bool one_worker;
} fcdp_engine_config;

fcdp_status fcdp_engine_create(const fcdp_engine_config *config, fcdp_engine **engine_out) FCDP_MUST_CHECK;
/* Finishes the queue, stops the worker, frees groups and comms that are left. */
void fcdp_engine_destroy(fcdp_engine *engine);
bool fcdp_engine_is_sim(const fcdp_engine *engine);
/* The budget of the node's host memory, common to all its processes and shard groups: one process creates it, the others join with
 * its ticket. Once, before the first comm. */
fcdp_status fcdp_engine_account_create(fcdp_engine *engine, fcdp_shared_ticket *ticket_out) FCDP_MUST_CHECK;
fcdp_status fcdp_engine_account_join(fcdp_engine *engine, const fcdp_shared_ticket *ticket) FCDP_MUST_CHECK;
/* Wait until the queue is empty; the first error of a job nobody waited for (a reshard's), once. */
fcdp_status fcdp_engine_drain(fcdp_engine *engine) FCDP_MUST_CHECK;

/* After the account. The transport's ctx stays the caller's. */
fcdp_status fcdp_comm_create(fcdp_engine *engine, const fcdp_topology *topology, const fcdp_transport *transport, fcdp_comm **comm_out) FCDP_MUST_CHECK;
void fcdp_comm_destroy(fcdp_comm *comm);        /* its groups first */
/* The host memory of the comm's ranks on this node: local rank 0 creates, the others join with its ticket. Once, before the first group. */
fcdp_status fcdp_comm_host_create(fcdp_comm *comm, fcdp_shared_ticket *ticket_out) FCDP_MUST_CHECK;
fcdp_status fcdp_comm_host_join(fcdp_comm *comm, const fcdp_shared_ticket *ticket) FCDP_MUST_CHECK;
/* After a gather that failed on this rank alone, its peers may be in a collective that it did not take part in; what it started next would meet
 * that one, silently. So every later gather of the comm fails. */

/* A group's layout is made here; it cannot be used before it is attached to host memory. `name` for messages. */
fcdp_status fcdp_group_create(fcdp_comm *comm, const char *name, const fcdp_extent_spec *specs, uint32_t n_extents, fcdp_group **group_out) FCDP_MUST_CHECK;
/* Drains, unmaps, detaches; the leader's block is freed (the others must have detached: the caller has a barrier before). */
void fcdp_group_destroy(fcdp_group *group);
/* Leader: carve the group's block. Every rank, leader included: attach at the leader's offset; then the region exists. */
fcdp_status fcdp_group_carve(fcdp_group *group, uint64_t *offset_out) FCDP_MUST_CHECK;
fcdp_status fcdp_group_attach(fcdp_group *group, uint64_t offset) FCDP_MUST_CHECK;
/* Is the device's budget enough to gather each of one model's `groups` in its turn? stays[i]: group i is not
 * resharded after forward. Else FCDP_ERR_NO_DEVICE_MEM, with the FCDP_DEVICE_BUDGET that would do. Created,
 * attached or not. */
fcdp_status fcdp_groups_fit(fcdp_group *const *groups, const uint8_t *stays, uint32_t n) FCDP_MUST_CHECK;
/* Addresses of the extents' storages, for life; bytes of extent i = n_ranks * shard_bytes. */
fcdp_dptr fcdp_group_extent(const fcdp_group *group, uint32_t i);
size_t fcdp_group_bytes(const fcdp_group *group);       /* of the region */
/* From here on a SIGSEGV in the region says so, with the group's name and names[i] of extent i
 * (tiering/segv.h). Attached, once. */
fcdp_status fcdp_group_watch(fcdp_group *group, const char *const *names, uint32_t n_names) FCDP_MUST_CHECK;

/* Observe every extent's signals (arrays of n_extents; `shards[i]` NULL: no fingerprint). stale_out[i]: the mask of reasons, 0 fresh. */
void fcdp_group_observe(fcdp_group *group, const fcdp_signals *signals, const fcdp_scene *scene, const void *const *shards,
                        const size_t *shard_bytes, uint8_t *stale_out);
/* Audit: moved_out[i] is 1 where a signal or the fingerprint of extent i changed since it was last observed. Arrays as for observe. */
void fcdp_group_moved(const fcdp_group *group, const fcdp_signals *signals, const void *const *shards, const size_t *shard_bytes,
                      uint8_t *moved_out);
/* Somebody wrote into the gathered copy: never store or reuse it. Every extent is stale; an unshard that says otherwise fails. */
void fcdp_group_spoil(fcdp_group *group);

typedef enum fcdp_pass { FCDP_PASS_FORWARD, FCDP_PASS_BACKWARD, FCDP_PASS_OTHER } fcdp_pass;

/* Submit. `stale` (n_extents, agreed by all ranks) selects what crosses the nodes; inputs[i]: device address of this rank's shard of extent i in
 * the gathered dtype (shard_bytes long), read only where stale, and kept alive by the caller until the job is waited for. `inputs` may be NULL
 * where nothing is stale or the group is prefetched with this `stale`. `stream`: the
 * stream that wrote the inputs and last used the region. */
fcdp_status fcdp_group_unshard(fcdp_group *group, const uint8_t *stale, const uint64_t *inputs, fcdp_pass pass, fcdp_stream stream, fcdp_job **job_out) FCDP_MUST_CHECK;
/* Only the inter-node step of the unshard that will follow with the same `stale`, into a column (crossing.h). That unshard uses it; any
 * other unshard, or fcdp_group_unprefetch, throws it away. *ahead_out false: nothing was done, since nothing is stale, or as many groups
 * as FCDP_PREFETCH allows (crossing.h) are ahead already. Else the caller keeps the inputs alive until the unshard that follows
 * has been waited for, or until fcdp_group_unprefetch has returned. */
fcdp_status fcdp_group_prefetch(fcdp_group *group, const uint8_t *stale, const uint64_t *inputs, fcdp_stream stream, bool *ahead_out) FCDP_MUST_CHECK;
bool fcdp_group_is_prefetched(const fcdp_group *group, const uint8_t *stale);
/* Waits for it; its failure, if it has failed. */
fcdp_status fcdp_group_unprefetch(fcdp_group *group) FCDP_MUST_CHECK;
/* Submit the release that policy decides on. `stream`: the one that last used the region. */
fcdp_status fcdp_group_reshard(fcdp_group *group, fcdp_stream stream) FCDP_MUST_CHECK;

/* Until the job is done, then its status (text set); for an unshard also the failure of an earlier reshard of its group that nobody has been
 * told of. The bytes are then in place for any stream. Releases the job. Before its group is destroyed; a job that is never waited for goes with the engine. */
fcdp_status fcdp_job_wait(fcdp_job *job) FCDP_MUST_CHECK;

typedef struct fcdp_counts {
    uint64_t calls, inter_bytes_sent, intra_bytes_sent;
} fcdp_counts;

typedef struct fcdp_group_stats {
    const char *name;           /* borrowed from the group */
    size_t bytes;               /* region */
    uint64_t gathers_made, gathers_avoided;     /* unshards that crossed the link / that did not */
    uint64_t gathers_forward, gathers_backward; /* of those made */
    const char *state;          /* "device", "host", "mixed", "invalid" */
} fcdp_group_stats;

typedef struct fcdp_engine_stats {
    fcdp_counts gather, restore;
    fcdp_tiering_stats moves;
    size_t device_bytes, device_peak_bytes;     /* the pool's live pages */
    size_t device_budget_bytes;
    size_t host_bytes, host_peak_bytes;         /* the node's */
} fcdp_engine_stats;

void fcdp_engine_stats_get(fcdp_engine *engine, fcdp_engine_stats *stats_out);
void fcdp_group_stats_get(fcdp_group *group, fcdp_group_stats *stats_out);
void fcdp_engine_reset_peaks(fcdp_engine *engine);

#endif
