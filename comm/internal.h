/* internal.h - the structs of engine, comm and group, for the files that are them: engine.c,
 * comm.c, group.c (life and votes), gather.c (what goes on the streams), monitor.c, content.c.
 */
#ifndef FCDP_COMM_INTERNAL_H
#define FCDP_COMM_INTERNAL_H

#include <stdatomic.h>
#include <sys/types.h>

#include "comm/fingerprint.h"
#include "comm/group.h"
#include "comm/plan.h"
#include "tiering/segv.h"

/* Gathers take the two of INTER in turn, so that one gets ready while the one before is on the link. */
enum {
    FCDP_STREAM_INTER_0,
    FCDP_STREAM_INTER_1,
    FCDP_N_INTER,
    FCDP_STREAM_NODE = FCDP_N_INTER,
    FCDP_N_STREAMS
};

typedef struct fcdp_monitor fcdp_monitor;

typedef struct fcdp_staging { /* coalesce.c */
    fcdp_lock lock;
    pthread_cond_t left; /* `busy` became false */
    bool busy;           /* guarded by lock: one thread uses or changes what follows, without the lock */
    fcdp_vrange *range;  /* NULL: none yet */
    fcdp_phys block;
    size_t n_pages;
    unsigned n_idle; /* passes that have begun since it was used last */
    bool torn;       /* a crossing has failed half way: operations may be behind the events */
    fcdp_event crossed[2], emptied[2]; /* of each half: the collective's end; the copies out of it */
} fcdp_staging;

struct fcdp_engine {
    pid_t pid; /* a forked child has no streams and shares the device's mappings: it must not touch them */
    fcdp_options options;
    bool host_computes;
    fcdp_device own; /* all zeroes: drv and pool are the configuration's device */
    fcdp_driver *drv;
    fcdp_pool *pool;
    fcdp_tiering *tiering;
    fcdp_account *account; /* NULL until created or joined */
    fcdp_stream streams[FCDP_N_STREAMS];
    /* the end of the last transfer that was enqueued on the lane, of any comm */
    fcdp_event turn[FCDP_N_LANES];
    fcdp_monitor *monitor;
    fcdp_staging staging;
    fcdp_lock lock;
    /* guarded by lock */
    fcdp_comm *comms;
    fcdp_engine_stats stats; /* the counts; what others count is filled in when asked for */
};

struct fcdp_comm {
    fcdp_engine *engine;
    fcdp_comm *next;
    fcdp_topology topology;
    fcdp_transport transport;
    fcdp_host *host;                 /* NULL until created or joined; set under the engine's lock */
    uint64_t n_gathers;              /* so far, the same on every rank: which inter stream is next */
    fcdp_fingerprints *fingerprints; /* NULL: never asked for */
    atomic_bool failed;              /* release: `failure` is there; acquire in fcdp_comm_check */
    fcdp_error failure;              /* the first one */
    /* guarded by the engine's lock */
    fcdp_group *groups;
};

struct fcdp_tree {
    fcdp_comm *comm;
    fcdp_agreement agreement;
};

/*     begun <=> the region is in use      unended => begun
 *     in_flight_ns != 0 => begun since then, and not seen to be ready      */
struct fcdp_group {
    fcdp_comm *comm;
    fcdp_group *next; /* guarded by the engine's lock */
    fcdp_member member;
    char *name;
    fcdp_layout *layout;
    bool owns_block;
    uint64_t offset;
    fcdp_host_block *block; /* NULL until attached, as is region; set under the engine's lock */
    fcdp_region *region;
    fcdp_segv_watch *watch; /* NULL until watched */
    fcdp_validity *validity;
    /* on the caller's stream at begin; the inter step's end; the restore's end */
    fcdp_event written, crossed, restored;
    fcdp_event gathered;  /* the node step's end, where slices are put behind it */
    uint8_t *stale;       /* agreed, n_extents; zeroed once begun */
    bool lacks;           /* agreed: not on the device of every rank */
    size_t crossed_bytes; /* of this rank's shards, by coalesce.c since the last begin */
    bool begun;
    /* begun, and its reshard was refused: the program thinks that it has ended */
    bool unended;
    bool waited;      /* the program may have written into it since */
    bool has_content; /* content.h */
    uint64_t content;
    _Atomic uint64_t in_flight_ns; /* since when; 0: nothing */
    /* guarded by the engine's lock */
    /* the shards have been read then, and nothing of the program's is behind it yet; NULL: none reads */
    fcdp_event reading;
    uint64_t gathers_made, gathers_avoided, gathers_forward, gathers_backward;
};

/* FCDP_ERR_UNSUPPORTED in a forked child. */
fcdp_status fcdp__engine_check_process(const fcdp_engine *engine, const char *what) FCDP_MUST_CHECK;

/* FCDP_ERR_INVALID while `stream` captures a CUDA graph: nothing of FCDP's may be part of
 * one. `what` was to be done to `name`. */
fcdp_status fcdp__engine_check_capture(const fcdp_engine *engine, fcdp_stream stream, const char *what,
                                       const char *name) FCDP_MUST_CHECK;

/* Latch the comm's failure, `status` with the calling thread's text, unless it has one; open all that waits
 * for a peer. Returns the latched status with its text. */
fcdp_status fcdp__comm_fail(fcdp_comm *comm, fcdp_status status) FCDP_MUST_CHECK;
/* The same, with the engine's lock. */
void fcdp__comm_fail_locked(fcdp_comm *comm, fcdp_status status);

/* monitor.c */
fcdp_status fcdp__monitor_start(fcdp_engine *engine, fcdp_monitor **monitor_out) FCDP_MUST_CHECK;
void fcdp__monitor_stop(fcdp_monitor *monitor);

/* coalesce.c */
void fcdp__staging_init(fcdp_staging *staging);
/* The pool asks it no more. */
void fcdp__staging_destroy(fcdp_engine *engine);
/* An fcdp_reclaim_fn and an fcdp_idle_fn; `ctx` is the fcdp_engine. Between
 * two crossings its pages are anybody's. */
size_t fcdp__staging_reclaim(void *ctx, size_t n_pages);
size_t fcdp__staging_idle(void *ctx);
/* Its pages go, where the last passes did not use it. */
void fcdp__staging_begin_pass(fcdp_engine *engine);
/* The last group has gone: so do its pages. */
void fcdp__staging_drop(fcdp_engine *engine);

/* gather.c */
/* Do the ranks of the node meet on the device, each with its slice? Else each has all from host memory. */
bool fcdp__group_by_slice(const fcdp_group *group);
/* What was agreed stale is as it was observed, and no longer stale. */
void fcdp__group_accept(fcdp_group *group);
/* Ends a use that the program did not see: nothing is behind it but the engine's own operations. */
fcdp_status fcdp__group_cancel(fcdp_group *group) FCDP_MUST_CHECK;

/* content.c - has anybody written into a gathered copy that is kept? A fingerprint of the region's bytes,
 * taken when they are there and compared when the use ends. Plain FSDP drops such writes at reshard; a kept
 * one would live on. Only where the host can read the device's bytes (the simulated one, with host_computes).
 * On a GPU the caller's version counters are the one sign. */
void fcdp__content_take(fcdp_group *group);
/* The same function of any bytes that the host can read. */
uint64_t fcdp__content_of_bytes(const void *bytes, size_t n_bytes);
/* A fingerprint was taken before the program could write, or none can be. */
bool fcdp__content_is_known(const fcdp_group *group);
/* As it was, as far as anybody can tell. What nobody has waited for nobody has
 * written into, and it may not be there yet. */
bool fcdp__content_holds(const fcdp_group *group);

#endif
