/* group.h - the engine's structs, for the files that are the engine: engine.c (lifecycle, stats), submit.c
 * (the caller's side of every job), gather.c, exchange.c and restore.c (the worker's side).
 */
#ifndef FCDP_GROUP_H
#define FCDP_GROUP_H

#include <sys/types.h>

#include "comm/engine.h"
#include "comm/worker.h"

enum { FCDP_LATE_TEXT_BYTES = 512 };

typedef struct fcdp_event_node {
    struct fcdp_event_node *next;
    fcdp_event event;
} fcdp_event_node;

struct fcdp_engine {
    pid_t pid; /* a forked child has no worker and shares the device's mappings: it must not touch them */
    fcdp_options options;
    uint32_t local, node_size;
    fcdp_driver *drv;
    fcdp_pool *pool;
    fcdp_tiering *tiering;
    fcdp_host *host;    /* NULL until created or joined */
    fcdp_stream stream; /* the worker's own */
    fcdp_worker *worker;
    fcdp_lock lock;
    /* guarded by lock */
    fcdp_comm *comms;
    fcdp_event_node *idle_events;
    fcdp_counts gather, restore;
};

struct fcdp_comm {
    fcdp_engine *engine;
    fcdp_comm *next;
    fcdp_topology topology;
    fcdp_transport transport;
    fcdp_group *groups; /* guarded by the engine's lock */
};

typedef struct fcdp_seen { /* what a stale extent looked like when its gather was submitted */
    uint32_t extent;
    fcdp_observation observation;
} fcdp_seen;

typedef struct fcdp_seen_list {
    uint32_t n;
    fcdp_seen *items;
} fcdp_seen_list;

struct fcdp_group {
    fcdp_comm *comm;
    fcdp_group *next;
    char *name;
    fcdp_layout *layout;
    bool carved;
    uint64_t offset;
    fcdp_host_block *block; /* NULL until attached, as is region */
    fcdp_region *region;

    fcdp_lock lock; /* rank ENGINE; never together with the engine's or the worker's */
    /* guarded by lock: the order of submissions, the same on every rank */
    fcdp_validity *validity;
    uint64_t n_spoils;
    uint32_t n_releases;
    uint32_t n_fills; /* unshards that gather something */
    bool is_unsharded;
    uint8_t *prefetched;            /* the staleness of the prefetch that waits for its unshard, NULL: none */
    fcdp_seen_list prefetched_seen; /* the shards' signals at that prefetch */

    /* guarded by the engine's lock */
    uint64_t gathers_made, gathers_avoided, gathers_forward, gathers_backward;
    fcdp_status late_status; /* of a job nobody waits for */
    char late_text[FCDP_LATE_TEXT_BYTES];

    /* the worker's alone */
    uint32_t vote;           /* at the last release, as it stands on the board (restore.c) */
    bool in_use;         /* between a successful begin_use and its end_use */
    fcdp_vrange *column; /* NULL until the first inter step; mapped only while it holds something */
    bool column_full;    /* a prefetch's bytes wait in it */
    char prefetch_text[FCDP_LATE_TEXT_BYTES]; /* why the last prefetch failed */
    uint64_t content_spoils; /* n_spoils when the region was last gathered wholly; behind n_spoils: written to
                                since */
    uint64_t imprint;        /* of the bytes of the last fill, if has_imprint (imprint.h) */
    bool has_imprint, imprint_is_whole; /* else of this rank's slices */
    uint32_t owed_epochs[FCDP_N_SPANS]; /* fills that failed before the region had pages: the peers have
                                           counted them */
};

struct fcdp_job {
    fcdp_work work; /* first */
    fcdp_engine *engine;
    fcdp_group *group; /* may be gone when a job that was never waited for is disposed of */
    /* On the caller's stream at submission. NULL: all that was on that stream is done; or `refused` says why
     * there is none: the job then keeps its place, which the peers count on, and fails there. */
    fcdp_event_node *event;
    fcdp_status refused;
    char refused_text[FCDP_LATE_TEXT_BYTES];
    /* unshard and prefetch */
    fcdp_pass pass;
    fcdp_plan *plan;
    uint64_t *inputs; /* in the order of plan->extents */
    fcdp_seen_list seen;
    bool use_column, after_release;
    /* unshard and reshard */
    uint64_t n_spoils;
    uint32_t n_releases;
    uint32_t n_fills; /* this fill's number, if the plan gathers something */
};

/* gather.c: jobs' run functions. */
fcdp_status fcdp__job_unshard(fcdp_work *work) FCDP_MUST_CHECK;
fcdp_status fcdp__job_prefetch(fcdp_work *work) FCDP_MUST_CHECK;
fcdp_status fcdp__job_unprefetch(fcdp_work *work) FCDP_MUST_CHECK;

/* exchange.c: the steps within the node through host memory, instead of all-gathers. */
/* Does this job's gather go that way? The same on every rank of the node. */
bool fcdp__exchange_applies(const fcdp_job *job);
/* Tell the peers that this rank does not touch host bytes of an older epoch any more. In use, restored. */
void fcdp__exchange_ready(const fcdp_job *job);
/* From the full column to the host; from there, once all ranks have done so, to the region: a new epoch. */
fcdp_status fcdp__exchange_put(const fcdp_job *job) FCDP_MUST_CHECK;
fcdp_status fcdp__exchange_take(const fcdp_job *job) FCDP_MUST_CHECK;
/* This unshard has failed: the peers must not wait for this rank's part, nor believe it. */
void fcdp__exchange_forsake(const fcdp_job *job);

/* restore.c */
fcdp_status fcdp__job_reshard(fcdp_work *work) FCDP_MUST_CHECK;
/* Bring the plan's restore spans to the device. In use. */
fcdp_status fcdp__group_restore(fcdp_job *job) FCDP_MUST_CHECK;
/* This unshard has failed: peers must not wait for this rank's slice. */
void fcdp__group_forsake(const fcdp_job *job);
/* Would a store copy anything? */
bool fcdp__group_is_dirty(const fcdp_group *group);
/* Pages under the region and the reclaimer away. */
fcdp_status fcdp__group_enter(fcdp_group *group) FCDP_MUST_CHECK;
/* Until the device has done what was on the caller's stream at submission. */
fcdp_status fcdp__job_await(const fcdp_job *job) FCDP_MUST_CHECK;
/* After the job's failure `status`: nothing of the copy is believed any more, in any tier, and the next
 * observation says stale. `filling`: spans that the peers may have filled. The pages go, unless the device
 * may still use them. Keeps the thread's text. Returns `status`. */
fcdp_status fcdp__group_void(const fcdp_job *job, uint32_t filling, fcdp_status status) FCDP_MUST_CHECK;

/* engine.c */
fcdp_status fcdp__event_take(fcdp_engine *engine, fcdp_event_node **event_out) FCDP_MUST_CHECK;
void fcdp__event_give(fcdp_engine *engine, fcdp_event_node *event);
/* Remember the failure of a job that nobody waits for, with the thread's text. */
void fcdp__group_late_set(fcdp_group *group, fcdp_status status);
/* Take it; FCDP_OK when there is none. `text_out`: FCDP_LATE_TEXT_BYTES. */
fcdp_status fcdp__group_late_take(fcdp_group *group, char *text_out) FCDP_MUST_CHECK;
/* FCDP_ERR_UNSUPPORTED in a forked child. */
fcdp_status fcdp__engine_check(const fcdp_engine *engine, const char *what) FCDP_MUST_CHECK;
/* submit.c */
void fcdp__seen_free(fcdp_seen_list *seen);
void fcdp__job_dispose(fcdp_work *work);

#endif
