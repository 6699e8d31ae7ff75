/* overlap.h - a training loop of the shape that FSDP2 gives it, as 2 nodes x 2 ranks, each a process with a
 * simulated device.
 *
 * All groups are alike. A scenario sets how long kernels and moves take; the bytes are few, and the rates of
 * devices, links and nodes such that they take so long. Times are simgpu's modelled ones, so that a busy
 * machine, on which threads wake up late, measures what an idle one does.
 */
#ifndef FCDP_BENCH_OVERLAP_H
#define FCDP_BENCH_OVERLAP_H

#include "base/options.h"
#include "sim/net/simnet.h"
#include "tiering/tiers.h"
#include "tools/bench/overlap/board.h"

enum {
    N_NODES = 2,
    NODE_SIZE = 2,
    N_RANKS = N_NODES * NODE_SIZE,
    N_GROUPS = 16, /* group 0 is the root, which stays gathered from its forward to its backward */
    N_EXTENTS = 2,
    /* of one group, all its extents. With fewer bytes, and core_times as many times, what a thread's work
     * costs whatever its bytes are (it wakes up, a cold cache) would count too often: four threads decoded
     * 0.8 GB/s each of 128 KiB, and 1.5 of these */
    SHARD_BYTES = 512 << 10,
    PAGE_BYTES = 4 << 20 /* more than a whole group */
};
static const size_t EXTENT_SHARD_BYTES[N_EXTENTS] = {384 << 10, 128 << 10};

typedef struct scenario {
    const char *name;
    double forward_ms, backward_ms; /* of one group's kernel */
    double optimizer_ms;
    double pcie_ms; /* one rank's half of a group, to the host or from it */
    double link_ms; /* one group's gather between the nodes, for both ranks of a node */
    double node_ms; /* one group's gather within the node */
    double link_latency_us, node_latency_us; /* of each operation */
} scenario;
/* All durations x times as long, but for latencies. */
scenario scenario_scaled(scenario s, double x);

typedef struct run_config {
    const scenario *scenario;
    uint32_t n_warm, n_steps;
    bool exact; /* FCDP_MAPPING=exact; else slots */
    int prefetch;
    fcdp_policy_kind policy;
    double tau;
    const fcdp_tier *tiers; /* of the groups, as FCDP_PLAN says them; NULL: policy decides */
    size_t budget_bytes;    /* FCDP_DEVICE_BUDGET */
    bool codec;             /* FCDP_CODEC=delta; else none */
    int codec_threads;      /* FCDP_CODEC_THREADS */
    double core_times;      /* simgpu_set_core's, for what the host encodes and decodes; 0: 1 */
    bool nccl;              /* the engine's collectives are NCCL's, of the double; else simnet's own */
    const char *timelines;  /* a folder for SCENARIO.RANK.json, NULL: none */
    const char *sim_library;
} run_config;

/* Of one rank, written by it when it is done: of all steps after the warm-up. */
typedef struct rank_result {
    double step_ms[BOARD_MAX_STEPS];               /* from the end of an optimizer to that of the next */
    unsigned long creates, maps, accesses, unmaps; /* driver calls */
    unsigned long blocking, waits; /* of the model's thread: that may wait for the device; that did */
    unsigned long agreements;
    uint64_t enqueue_ns; /* of the host, without agreements */
    uint64_t d2h_bytes, h2d_bytes, evictions;
    size_t peak_bytes;   /* of gathered parameters, in all steps */
    unsigned long wrong; /* shards as gathered that were not what they should be, in all uses */
    /* With the codec, in all steps but the first, in which there is no base: what this rank's gathers
     * sent to the other nodes; gathers that were of differences, and those that were to be and crossed
     * whole; and those in which the device has encoded. */
    uint64_t crossed_bytes, n_differences, n_whole, n_by_device;
    double encode_ns, decode_ns; /* of a core, for a byte of a shard */
} rank_result;

/* One rank's whole life, in a process of its own that has not used the device yet. The fabric has its rates.
 * Exits with 2 and a line on stderr on any error. */
void rank_run(const run_config *config, simnet_fabric *fabric, board *b, uint32_t number,
              rank_result *result_out);

typedef enum resource { RESOURCE_COMPUTE, RESOURCE_PCIE, RESOURCE_LINK, N_RESOURCES } resource;

/* What a step cannot take less than, by one resource: all its operations one after another (busy), and what
 * nothing can hide: the shortest chains of operations from the step's begin to its first use (before), from
 * its last use in forward to its first in backward where that depends on it (turn), and from its last use to
 * the step's end (after). */
typedef struct bound {
    double before_ms, busy_ms, turn_ms, after_ms;
} bound;

double bound_ms(const bound *of);
/* For each resource; the step's bound is the largest. */
void bounds_of(const scenario *s, bound bounds_out[N_RESOURCES]);
/* With differences: a group's keep the link busy for crossing_ms, and one core of the host for host_ms. The
 * last two are of two resources: PCIe in forward, then the link in backward; and in place of PCIe the host,
 * where each rank has one core. */
enum { CODEC_BOUND_HOST = N_RESOURCES + 1, N_CODEC_BOUNDS };
void codec_bounds_of(const scenario *s, double crossing_ms, double host_ms, bound bounds_out[N_CODEC_BOUNDS]);
extern const char *const resource_names[N_CODEC_BOUNDS];
/* GB/s that give the scenario's durations. */
double pcie_rate(const scenario *s);
double link_rate(const scenario *s);
double node_rate(const scenario *s);

#endif
