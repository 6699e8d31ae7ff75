/* internal.h - the structs behind comm's opaque types, for comm's own files. */
#ifndef FCDP_COMM_INTERNAL_H
#define FCDP_COMM_INTERNAL_H

#include <stdatomic.h>
#include <sys/types.h>

#include "comm/ballot.h"
#include "comm/delta.h"
#include "comm/fingerprint.h"
#include "comm/frozen.h"
#include "comm/group.h"
#include "comm/monitor.h"
#include "comm/own_base.h"
#include "comm/plan.h"
#include "comm/spilled.h"
#include "comm/staging.h"
#include "comm/tree.h"
#include "comm/unshard.h"
#include "comm/validity.h"
#include "tiering/cache.h"
#include "tiering/mapped.h"
#include "tiering/numa.h"
#include "tiering/segv.h"
#include "tiering/spill.h"

/* Gathers take the two of INTER in turn, so that one gets ready while the one before is on the link. FETCH
 * brings shards to the host for gathers of differences (delta.h). */
enum {
    FCDP_STREAM_INTER_0,
    FCDP_STREAM_INTER_1,
    FCDP_N_INTER,
    FCDP_STREAM_NODE = FCDP_N_INTER,
    FCDP_STREAM_FETCH,
    FCDP_N_STREAMS
};

/* Streams, and what passes between the operations on them: of shard groups whose collectives come in one
 * order on every rank (fcdp_comm_set_streams). Operations of two sets wait for each other nowhere, so it does
 * not matter in which order a rank puts them there. */
struct fcdp_stream_set {
    fcdp_engine *engine;
    fcdp_stream_set *next; /* fixed */
    uint32_t n_comms;      /* guarded by the engine's lock */
    fcdp_stream streams[FCDP_N_STREAMS];
    fcdp_stream copies[FCDP_N_DIRECTIONS];
    bool owns_copies; /* else they are the tiering's */
    /* the end of the last transfer that was enqueued on the lane, of any comm */
    fcdp_event turn[FCDP_N_LANES];
    fcdp_staging staging;
    fcdp_own_bases own_bases;
    fcdp_delta_scratch delta_scratch[FCDP_N_INTER];
    /* For what the streams between the nodes have for the host to do, each one's, and the one to the host.
     * NULL: no gather of differences on a device yet */
    fcdp_worker *workers[FCDP_N_INTER], *storer;
    fcdp_team *teams[FCDP_N_INTER]; /* which decode what comes on each; NULL: its worker alone */
};

struct fcdp_engine {
    pid_t pid; /* a forked child has no streams and shares the device's mappings: it must not touch them */
    fcdp_options options;
    bool host_computes;
    fcdp_device own; /* all zeroes: drv and pool are the configuration's device */
    fcdp_driver *drv;
    fcdp_pool *pool;
    fcdp_tiering *tiering;
    fcdp_account *account;           /* NULL until created or joined */
    _Atomic(fcdp_stream_set *) sets; /* the last one made; the first lasts too, until the engine ends */
    fcdp_monitor *monitor;
    fcdp_frozen *frozen; /* NULL without FCDP_CACHE_DIR */
    fcdp_spill *spill;   /* NULL without FCDP_SPILL_DIR, or where it cannot be used */
    char spill_lacks[FCDP_OPTION_PATH_BYTES + 256]; /* to be said once; "": nothing */
    bool spill_warned;
    fcdp_numa_plan numa;
    fcdp_cpus cpus_before;           /* numa.binds: where threads ran before */
    fcdp_counts counts;              /* what others count is filled in when the stats are asked for */
    atomic_bool asleep;              /* no group may be unsharded */
    atomic_bool old_shards_are_read; /* by fcdp_group_gathered_shard: what has been gathered is stored */
    fcdp_lock lock;
    /* guarded by lock */
    fcdp_rounding rounding; /* of this rank's shards, with FCDP_CODEC=int8 */
    fcdp_comm *comms;
};

struct fcdp_comm {
    fcdp_engine *engine;
    fcdp_comm *next;
    fcdp_stream_set *set;
    fcdp_topology topology;
    uint64_t shard_group; /* the trace's; 0: not said */
    fcdp_transport transport;
    fcdp_host *host;                 /* NULL until created or joined; set under the engine's lock */
    fcdp_ballots ballots;            /* its meeting is the host's */
    uint64_t n_gathers;              /* so far, the same on every rank: which inter stream is next */
    fcdp_fingerprints *fingerprints; /* NULL: never asked for */
    atomic_bool failed;              /* release: `failure` is there; acquire in fcdp_comm_check */
    fcdp_failure failure;            /* the first one */
    bool ahead;                      /* fcdp_comm_set_ahead */
    fcdp_delta_rates delta_rates;
    atomic_bool all_decode_behind;    /* its members, as the heads of a gather of differences have said */
    fcdp_delta_state deltas_together; /* of the gathers of coalesce.c */
    struct fcdp_delta *deltas;        /* of groups that have ended; guarded by the engine's lock */
    /* guarded by the engine's lock */
    fcdp_group *groups;
    fcdp_tree *trees;
    uint64_t peer_ended_ns; /* the monitor's: when it first saw that one of the node has ended; 0: none has */
};

/* copy.c. Two reads of the copy by the device: NULL until the first; `reading`: their answer is to come. */
enum { FCDP_COPY_TAKEN, FCDP_COPY_ENDED, FCDP_COPY_N_READS };
typedef struct fcdp_copy_state {
    bool known; /* `fingerprint` is the copy's, or the first read brings it */
    bool ended; /* the second read is of this copy, and has not been judged */
    bool unsupported;
    uint64_t fingerprint;
    fcdp_fingerprints *reads[FCDP_COPY_N_READS];
    bool reading[FCDP_COPY_N_READS];
} fcdp_copy_state;

/* frozen.c */
typedef struct fcdp_frozen_state {
    bool tried;           /* in a group's life once: did its frozen span come from disk? */
    bool agreed;          /* all ranks can look on their disks for it */
    bool writes;          /* it is to be written, once it is stored */
    bool is_unread;       /* it is there, and could not be read */
    _Atomic bool on_disk; /* this rank's slice was read there, or the writer has written it */
    fcdp_cache_key key;   /* of this rank's slice */
    fcdp_group *next;     /* in the writer's queue, under its mutex */
} fcdp_frozen_state;

/*     begun <=> the region is in use      reshard_refused => begun
 *     in_flight_ns != 0 => begun since then, and not seen to be ready      */
struct fcdp_group {
    fcdp_comm *comm;
    fcdp_group *next; /* guarded by the engine's lock */
    fcdp_member member;
    char *name;
    uint64_t id;         /* of the process's groups, this one's alone */
    char **extent_names; /* n_extents; NULL: it was given none */
    fcdp_layout *layout;
    uint8_t *element_bytes; /* n_extents */
    uint8_t *numbers;       /* n_extents: fcdp_number */
    void *owner;            /* the program's */
    fcdp_sight sight;       /* what the program's last look at it has seen */
    uint64_t *inputs;       /* n_extents: of the begin under way */
    uint32_t missing;       /* agreed: the first extent of which a shard is missing; n_extents: none */
    fcdp_pass pass;         /* of the unshard under way */
    bool late;              /* put off by this rank alone, at that unshard */
    bool owns_block;
    uint64_t offset;
    /* NULL until attached, as is region, and where that is spilled; set under the engine's lock */
    fcdp_host_block *block;
    fcdp_region *region;
    fcdp_tier tier;          /* fixed before its first use; the same on every rank */
    fcdp_tier unmapped_tier; /* of one that is FCDP_TIER_MAPPED: before */
    fcdp_segv_watch *watch;  /* NULL until watched */
    fcdp_validity *validity;
    /* on the caller's stream at begin, and on the reader at a reshard; the inter step's end; the restore's */
    fcdp_event written, crossed, restored;
    fcdp_event gathered; /* the node step's end, where slices are stored behind it */
    uint8_t *stale;      /* agreed, n_extents; zeroed once begun */
    uint8_t *votes;      /* this rank's last one, n_extents masks of fcdp_stale */
    /* vote.c: fingerprints of what gathers read, by the device; NULL: never asked for */
    fcdp_fingerprints *reads;
    bool has_reads;        /* they have begun */
    uint64_t n_reads;      /* so far */
    uint64_t *read_pieces; /* n_extents: how many pieces each has among them */
    bool not_on_device;    /* agreed: it is not on the device of every rank */
    bool may_be_lost; /* agreed: some rank may have no valid copy behind its use, or learn so at the vote */
    bool dropped;     /* the region has no bytes any more, and the copy was as valid as `validity` says */
    bool unchanged;   /* by this rank's last vote, apart from that: nothing is stale */
    /* of this rank's shards, by coalesce.c since the last begin; of them those that crossed as they are */
    size_t coalesced_bytes, coalesced_whole_bytes;
    size_t room_bytes; /* of the pool, as the driver said in this use; 0: not asked yet */
    bool begun;
    bool reshard_refused; /* while a graph was captured: the program thinks that the use has ended */
    bool waited;          /* the program may have written into it since */
    fcdp_stream reader;   /* the stream that waited, where its users are */
    fcdp_copy_state copy;
    fcdp_frozen_state frozen;
    fcdp_delta_state delta;
    fcdp_own_group own;
    _Atomic uint64_t in_flight_ns; /* since when; 0: nothing */
    fcdp_counts counts;            /* of its unshards so far; part of the engine's */
    /* guarded by the engine's lock */
    /* the shards have been read then, and not all of the program is behind it yet; NULL: none reads */
    fcdp_event reading;
    uint32_t n_waiters;    /* host threads that wait for `reading`, without the lock: the group stays */
    fcdp_stream read_from; /* where the program made these shards, and uses their memory again */
};

struct fcdp_use { /* of one begin */
    fcdp_group *group;
    fcdp_plan *plan;
    const uint64_t *inputs;
    /* of this rank's shards in the gather of the framework's that it stands for */
    size_t plain_shard_bytes;
    fcdp_stream last; /* behind everything; NULL: nothing is enqueued yet */
    bool collects;    /* the restore is one of all ranks of the node: by slices */
    /* and its slices are all-gathered with the gather's blocks: one collective on the node's lane */
    bool joined;
    bool packed;                   /* the gather is, through the staging buffer (moves.c) */
    bool delta;                    /* the gather is of differences (delta.h) ... */
    fcdp_base bases[FCDP_N_SPANS]; /* ... from these */
    bool by_host;                  /* and the host stores what came: nothing is read from the device */
};

/* What one unshard, or one read from the node's copy, came to; bytes as in the engine's stats. */
typedef struct fcdp_use_counts {
    fcdp_pass pass;
    size_t block_bytes;
    uint64_t plain_bytes, gather_bytes;
    uint32_t n_stale;
} fcdp_use_counts;
void fcdp__group_count_use(fcdp_group *group, const fcdp_use_counts *use);
fcdp_gather_counts fcdp__gathers_counted(const fcdp_counts *counts);

/* The engine has the set, first, until it ends. `copies`: the streams of copies; NULL: it gets its own. */
fcdp_status fcdp__stream_set_create(fcdp_engine *engine, const fcdp_stream *copies,
                                    fcdp_stream_set **set_out) FCDP_MUST_CHECK;
void fcdp__stream_sets_destroy(fcdp_engine *engine);
/* The host waits for all that is on its streams, and what workers do for them. */
fcdp_status fcdp__stream_set_drain(fcdp_stream_set *set) FCDP_MUST_CHECK;

/* Inputs of what is stale, for a begin or to be gathered together, which comes next. *stream: the current
 * one, replaced by the one behind which they are read. */
fcdp_status fcdp__inputs_take(fcdp_group *group, const fcdp_program *program, uint64_t *inputs_out,
                              fcdp_stream *stream) FCDP_MUST_CHECK;

/* fcdp_group_begin, of a use that the caller has made. */
fcdp_status fcdp__use_begin(fcdp_use *use, fcdp_pass pass, fcdp_stream stream) FCDP_MUST_CHECK;

/* `stream`, or with host_computes the calling thread, goes on behind the region's `ready`. */
fcdp_status fcdp__group_await(fcdp_group *group, fcdp_stream stream) FCDP_MUST_CHECK;

/* FCDP_ERR_UNSUPPORTED in a forked child. */
fcdp_status fcdp__engine_check_process(const fcdp_engine *engine, const char *what) FCDP_MUST_CHECK;

/* FCDP_ERR_UNSUPPORTED where no group can be mapped onto host memory, as the model computes there. */
fcdp_status fcdp__engine_check_maps(const fcdp_engine *engine) FCDP_MUST_CHECK;
/* FCDP_ERR_INVALID while the engine is asleep. */
fcdp_status fcdp__engine_check_awake(const fcdp_engine *engine, const char *name) FCDP_MUST_CHECK;

/* FCDP_ERR_INVALID while `stream` captures a CUDA graph: nothing of FCDP's may be part of
 * one. `what` was to be done to `name`. */
fcdp_status fcdp__engine_check_capture(const fcdp_engine *engine, fcdp_stream stream, const char *what,
                                       const char *name) FCDP_MUST_CHECK;

/* Latch the comm's failure, `status` with the calling thread's text, unless it has one; open all that waits
 * for a peer. Returns the latched status with its text. */
fcdp_status fcdp__comm_fail(fcdp_comm *comm, fcdp_status status) FCDP_MUST_CHECK;
/* The same, with the engine's lock. */
void fcdp__comm_fail_locked(fcdp_comm *comm, fcdp_status status);

/* The trace's span of a collective that `stream` is given from here on, in the lane's turn. */
fcdp_trace_span fcdp__comm_span_begin(const fcdp_stream_set *set, fcdp_lane lane, fcdp_stream stream);
/* fcdp_transport's all_gather of `parts` of `group` (NULL: of several) on `stream`, in the lane's turn. The
 * first n_restored parts are counted as a restore's bytes, the others as a gather's; a call that serves both
 * counts as a gather's. */
fcdp_status fcdp__comm_all_gather(fcdp_comm *comm, const fcdp_group *group, fcdp_lane lane,
                                  const fcdp_part *parts, size_t n, size_t n_restored,
                                  fcdp_stream stream) FCDP_MUST_CHECK;

/* As fcdp_comm_fingerprint_begin and _end, of another batch than the agreement's: *batch, made where it is
 * NULL. */
fcdp_status fcdp__comm_fingerprint_begin(fcdp_comm *comm, fcdp_fingerprints **batch, const uint64_t *shards,
                                         const size_t *shard_bytes, size_t n,
                                         fcdp_stream stream) FCDP_MUST_CHECK;
fcdp_status fcdp__comm_fingerprint_end(fcdp_comm *comm, fcdp_fingerprints *batch,
                                       uint64_t *fingerprints_out) FCDP_MUST_CHECK;

/* Can the ranks of a node exchange slices? */
bool fcdp__comm_may_slice(const fcdp_comm *comm);
/* Do the ranks of the node meet on the device, each with its slice? Else each has all from host memory. The
 * first is the answer for every group that is not spilled. */
bool fcdp__comm_by_slice(const fcdp_comm *comm);
bool fcdp__group_by_slice(const fcdp_group *group);
/* The shards that the program made on `stream` are read until `event`. */
fcdp_status fcdp__group_set_reading(fcdp_group *group, fcdp_event event, fcdp_stream stream) FCDP_MUST_CHECK;
/* What was agreed stale is as it was observed, and no longer stale. */
void fcdp__group_accept(fcdp_group *group);
/* Is any extent of it agreed stale, and not begun since? */
bool fcdp__group_is_stale(const fcdp_group *group);
/* Ends a use that the program did not see: nothing is behind it but the engine's own operations. */
fcdp_status fcdp__group_cancel(fcdp_group *group) FCDP_MUST_CHECK;
/* The group is in no tree from here on, and no group follows it or is followed by it. */
void fcdp__tree_remove(fcdp_group *group);
/* And no tree asks for it: it ends. */
void fcdp__trees_forget(fcdp_group *group);
fcdp_group *const *fcdp__tree_groups(const fcdp_tree *tree, uint32_t *n_out);

#endif
