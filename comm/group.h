/* group.h - the engine's structs, for the files that are the engine: engine.c (lifecycle, stats), submit.c
 * (the caller's side of every job), mark.c, crossing.c (the inter worker's side), gather.c, exchange.c and
 * restore.c (the node worker's).
 */
#ifndef FCDP_GROUP_H
#define FCDP_GROUP_H

#include <stdatomic.h>
#include <sys/types.h>

#include "comm/column.h"
#include "comm/engine.h"
#include "comm/worker.h"
#include "tiering/segv.h"

enum { FCDP_LATE_TEXT_BYTES = 512, FCDP_MAX_AHEAD = 8 };

typedef struct fcdp_event_node {
    struct fcdp_event_node *next;
    fcdp_event event;
} fcdp_event_node;

/* Where the caller's stream stood at submission. event NULL: all that was on it is done; or `refused` says why
 * that is not known: the job then keeps its place, which the peers count on, and fails there. */
typedef struct fcdp_mark {
    fcdp_event_node *event;
    fcdp_status refused;
    char refused_text[FCDP_LATE_TEXT_BYTES];
} fcdp_mark;

typedef struct fcdp_crossing fcdp_crossing; /* crossing.h */

struct fcdp_engine {
    pid_t pid; /* a forked child has no worker and shares the device's mappings: it must not touch them */
    fcdp_options options;
    fcdp_device own; /* all zeroes: drv and pool are the configuration's device */
    fcdp_driver *drv;
    fcdp_pool *pool;
    fcdp_tiering *tiering;
    fcdp_account *account; /* NULL until created or joined */
    fcdp_columns *columns;
    fcdp_worker *node_worker, *inter_worker;
    fcdp_stream node_stream, inter_stream; /* the workers' own */
    fcdp_lock lock;
    /* guarded by lock */
    fcdp_comm *comms;
    fcdp_event_node *idle_events;
    fcdp_counts gather, restore;
};

struct fcdp_comm {
    fcdp_engine *engine;
    /* This rank has missed a collective that its peers take part in, or may have: the next one would meet theirs of before. Then none
     * is started any more. */
    _Atomic bool out_of_step;
    fcdp_comm *next;
    fcdp_topology topology;
    fcdp_transport transport;
    fcdp_host *host;      /* NULL until created or joined */
    uint32_t ahead_limit; /* crossing.h */
    /* guarded by the engine's lock */
    uint32_t n_ahead;                  /* crossings that wait for their unshards */
    uint64_t taken_at[FCDP_MAX_AHEAD]; /* tickets of the last unshards that took one, newest first */
    fcdp_group *groups;
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
    fcdp_segv_watch *watch; /* NULL until watched */

    fcdp_lock lock; /* rank ENGINE; never together with the engine's or the worker's */
    /* guarded by lock: the order of submissions, the same on every rank */
    fcdp_validity *validity;
    uint64_t n_spoils;
    uint32_t n_releases;
    uint32_t n_fills; /* unshards that gather something */
    bool is_unsharded;
    fcdp_crossing *ahead; /* the prefetch that waits for its unshard, NULL: none */

    /* guarded by the engine's lock */
    uint64_t gathers_made, gathers_avoided, gathers_forward, gathers_backward;
    fcdp_status late_status; /* of a job nobody waits for */
    char late_text[FCDP_LATE_TEXT_BYTES];

    /* the node worker's alone */
    uint32_t vote; /* at the last release, as it stands on the board (restore.c) */
    bool in_use;   /* between a successful begin_use and its end_use */
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
    fcdp_mark mark;
    /* unshard */
    fcdp_pass pass;
    fcdp_plan *plan;
    fcdp_crossing *crossing; /* NULL: nothing is gathered */
    fcdp_seen_list seen;
    bool after_release;
    /* unshard and reshard */
    uint64_t n_spoils;
    uint32_t n_releases;
    uint32_t n_fills; /* this fill's number, if the plan gathers something */
};

/* gather.c */
fcdp_status fcdp__job_unshard(fcdp_work *work) FCDP_MUST_CHECK;

/* exchange.c: the steps within the node through host memory, instead of all-gathers. */
/* Does this gather go that way? The same on every rank of the node. */
bool fcdp__exchange_applies(const fcdp_group *group, const fcdp_plan *plan);
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
/* After the job's failure `status`: nothing of the copy is believed any more, in any tier, and the next
 * observation says stale. `filling`: spans that the peers may have filled. The pages go, unless the device
 * may still use them. Keeps the thread's text. Returns `status`. */
fcdp_status fcdp__group_void(const fcdp_job *job, uint32_t filling, fcdp_status status) FCDP_MUST_CHECK;

/* From now on no collective of the comm is started (its peers may be in one that this rank did not take part in). */
void fcdp__comm_lose_step(fcdp_comm *comm);
fcdp_status fcdp__comm_check_step(const fcdp_comm *comm) FCDP_MUST_CHECK;

/* mark.c */
/* Without an event the caller waits here, so that the worker need not. */
void fcdp__mark_make(fcdp_engine *engine, fcdp_stream stream, fcdp_mark *mark_out);
/* The job is to fail at its place, with the thread's text. */
void fcdp__mark_refuse(fcdp_mark *mark, fcdp_status status);
void fcdp__mark_forget(fcdp_engine *engine, fcdp_mark *mark);
/* What `stream` gets from now on comes after what the caller's had. */
fcdp_status fcdp__mark_precede(const fcdp_engine *engine, const fcdp_mark *mark, fcdp_stream stream) FCDP_MUST_CHECK;
/* Until the device has done what was on the caller's stream. */
fcdp_status fcdp__mark_await(const fcdp_engine *engine, const fcdp_mark *mark) FCDP_MUST_CHECK;
/* NULL: nothing to wait for. */
fcdp_event fcdp__mark_event(const fcdp_mark *mark);
void fcdp__events_destroy(fcdp_engine *engine);

/* engine.c */
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
