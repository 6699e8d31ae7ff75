/* engine.h - what all shard groups of a process share on one device.
 *
 * There are no workers. What an unshard does is put on streams by the thread that runs the model, in the
 * program's order (use.h), and its end is an event that the compute stream waits for: the host does not.
 * It blocks in three places: in an agreement, which the caller carries out; where device memory lacks; and
 * at the end. Where the model computes on the host itself (CPU tensors on the simulated device) the host is
 * the compute stream, and waits in its stead.
 *
 * The shard groups of one model share these streams, those of another have a set of their own (stream_set.c):
 *
 *     inter 0, inter 1   bytes between nodes, in turn, one transfer at a time
 *     node               bytes between the ranks of this node
 *     d2h, h2d           the node's host memory (tiering)
 *
 * Failures are asynchronous: the first one of a shard group is latched, its waits are opened so that no
 * stream and no host thread waits for a peer any more, and every later call on the group says it. The
 * monitor is a thread that looks for what only time tells: a collective that is late, a peer that has died.
 *
 * Lock: FCDP_RANK_ENGINE guards the lists. It is not held while the host waits for the device or for memory.
 */
#ifndef FCDP_ENGINE_H
#define FCDP_ENGINE_H

#include "alloc/heap.h"
#include "base/options.h"
#include "comm/int8.h"
#include "tiering/numa.h"
#include "tiering/region.h"

typedef struct fcdp_engine fcdp_engine;

typedef struct fcdp_engine_config {
    fcdp_options options;
    fcdp_driver_kind driver; /* CUDA for groups on a GPU, SIM for groups on CPUs */
    int ordinal;             /* device index */
    const char *sim_library; /* where the simulated driver lies, may be NULL */
    /* not NULL: this one, open as long as the engine, instead of one of the engine's own */
    const fcdp_device *device;
    bool host_computes;  /* the model's tensors are the host's: fcdp_group_wait waits on the host */
    bool storages_raise; /* a released tensor's storage refuses to be used, in the framework */
} fcdp_engine_config;

fcdp_status fcdp_engine_create(const fcdp_engine_config *config, fcdp_engine **engine_out) FCDP_MUST_CHECK;
/* Waits for the device; comms and groups that are left go too. */
void fcdp_engine_destroy(fcdp_engine *engine);
bool fcdp_engine_is_sim(const fcdp_engine *engine);
bool fcdp_engine_host_computes(const fcdp_engine *engine);
fcdp_driver *fcdp_engine_driver(const fcdp_engine *engine);
/* The budget of the node's host memory, common to all its processes and shard groups: one process creates it,
 * the others join with its ticket. Once, before the first comm. */
fcdp_status fcdp_engine_account_create(fcdp_engine *engine, fcdp_shared_ticket *ticket_out) FCDP_MUST_CHECK;
fcdp_status fcdp_engine_account_join(fcdp_engine *engine, const fcdp_shared_ticket *ticket) FCDP_MUST_CHECK;
/* Can groups be mapped onto host memory (FCDP_HOST_MAP, fcdp_group_map_host)? FCDP_ERR_UNSUPPORTED and
 * others, with the reason. */
fcdp_status fcdp_engine_probe_host_map(fcdp_engine *engine) FCDP_MUST_CHECK;
/* Until the device has done all that was enqueued; the first failure of any shard group. */
fcdp_status fcdp_engine_drain(fcdp_engine *engine) FCDP_MUST_CHECK;
/* The first failure that is known of by now, without waiting. */
fcdp_status fcdp_engine_check(fcdp_engine *engine) FCDP_MUST_CHECK;
/* What `stream` does from now on comes behind every read of a shard: it may write into them. Where a forward
 * was broken off, a gather that was begun ahead of its use reads yet, and no stream has waited for it. With
 * host_computes the host waits. Does nothing where `stream` captures a CUDA graph: a replay that writes under
 * such a read changes a copy that is kept, which the next fingerprints then find stale. */
fcdp_status fcdp_engine_order_writes(fcdp_engine *engine, fcdp_stream stream) FCDP_MUST_CHECK;
/* A root forward begins: the pages that passes before did not need go back (slot.h). */
void fcdp_engine_begin_pass(fcdp_engine *engine);

/* Between steps: every device page of gathered parameters goes to the driver, and none is taken before the
 * engine wakes: an unshard fails with FCDP_ERR_INVALID. What the node's host memory has already is not
 * copied. Each rank by itself. FCDP_ERR_INVALID: a group is in use, or `stream`, the caller's current one,
 * captures a CUDA graph. After any failure the engine is awake; what was begun ahead of its use may have
 * been cancelled, and groups that were kept may be in host memory alone. Does nothing where the engine is
 * asleep, or awake, already. */
fcdp_status fcdp_engine_sleep(fcdp_engine *engine, fcdp_stream stream) FCDP_MUST_CHECK;
void fcdp_engine_wake(fcdp_engine *engine);
bool fcdp_engine_is_asleep(const fcdp_engine *engine);

/* tensor.record_stream(): `stream` reads gathered parameters at `address`; a group's pages pass on behind
 * what is on that stream at its reshard, too. FCDP_ERR_INVALID: no gathered parameter is there. Any
 * thread. */
fcdp_status fcdp_engine_record_stream(fcdp_engine *engine, fcdp_dptr address,
                                      fcdp_stream stream) FCDP_MUST_CHECK;

/* Another allocator of the process on the same device (FCDP_RECLAIM_NEIGHBOUR in pages.h);
 * NULL: none. Not from within the call. */
void fcdp_engine_set_neighbour(fcdp_engine *engine, fcdp_reclaim_fn ask, void *ctx);
/* Its own take lacks `bytes`: device memory that the engine does not use goes to the driver, about as much.
 * The bytes; 0: there is none. It may wait for the device, and, where groups were kept, for the node's other
 * ranks. Breaks no capture of a CUDA graph. */
size_t fcdp_engine_yield(fcdp_engine *engine, size_t bytes);

typedef struct fcdp_collective_counts {
    uint64_t calls, inter_bytes_sent, intra_bytes_sent;
} fcdp_collective_counts;

typedef struct fcdp_gather_counts {
    uint64_t made, avoided;     /* unshards that crossed the link / that did not */
    uint64_t forward, backward; /* of those made */
} fcdp_gather_counts;

/* FCDP_SPILL_DIR, of this rank's slices */
typedef struct fcdp_spill_stats {
    uint64_t bytes, written_bytes, read_bytes;
    uint64_t n_failures;       /* slices that could not be written, or not be read as they were written */
    uint64_t n_waits, wait_ns; /* of the host for the disk */
} fcdp_spill_stats;

/* FCDP_CACHE_DIR, of this rank's slices of frozen parameters */
typedef struct fcdp_cache_stats {
    uint64_t read_bytes, written_bytes;
    uint64_t n_failures; /* slices that could not be written or read, or were dropped with a damaged one */
} fcdp_cache_stats;

typedef struct fcdp_engine_stats {
    fcdp_collective_counts gather, restore; /* collectives of gathers, and of restores */
    fcdp_gather_counts gathers;
    /* between nodes, per node: of flat gathers in their place, and of these */
    uint64_t plain_bytes, gather_bytes;
    uint64_t n_host_waits, host_wait_ns; /* of the model's threads in fcdp_group_wait (host_computes) */
    fcdp_tiering_stats moves;
    fcdp_policy_kind policy;                /* which FCDP_POLICY=auto is here; never AUTO */
    size_t device_bytes, device_peak_bytes; /* pages of gathered parameters */
    size_t device_budget_bytes;
    size_t host_bytes, host_peak_bytes; /* the node's */
    fcdp_driver_pins pins;
    uint32_t host_copies; /* that the node's host memory keeps, at most; 0: it keeps nothing yet */
    /* of this rank's slices, or of the one of several copies that it reads, by where their pages came from */
    uint64_t host_near_bytes, host_far_bytes;
    uint64_t n_late;  /* unshards that began only when they were waited for, as device pages lacked */
    uint64_t n_drops; /* reshards that kept no copy, as the next use gathers it anew */
    fcdp_cache_stats cache;
    fcdp_spill_stats spill;
    uint64_t n_delta_gathers, n_delta_whole; /* comm/delta.h: as differences, or rounded; whole after all */
    uint64_t n_delta_by_device;              /* of this rank's differences, that the device has encoded */
    fcdp_rounding rounding;                  /* of this rank's shards, with FCDP_CODEC=int8 */
    fcdp_numa_plan numa;
} fcdp_engine_stats;

void fcdp_engine_stats_get(fcdp_engine *engine, fcdp_engine_stats *stats_out);
void fcdp_engine_reset_peaks(fcdp_engine *engine);

#endif
