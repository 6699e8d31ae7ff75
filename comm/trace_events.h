/* trace_events.h - what comm says of its work. The rows' columns: base/trace_format.h.
 *
 * GATHER, RESTORE and STALL are spans of streams, written once the device's times are known; `step` is the
 * one in which they were enqueued.
 */
#ifndef FCDP_COMM_TRACE_EVENTS_H
#define FCDP_COMM_TRACE_EVENTS_H

#include "tiering/trace_events.h"

#define FCDP_COMM_EVENTS(X)                                                                                  \
    X(GATHER, 64, "gather", "bytes that this rank sent between nodes", "bytes that it sent within the node", \
      "an all-gather of new content, on one lane; `bytes` = a + b")                                          \
    X(RESTORE, 65, "restore", "", "bytes that this rank sent within the node",                               \
      "an all-gather of what the node has; `bytes` = b")                                                     \
    X(USE, 66, "use", "bytes of this rank's stale shards, 0: a hit", "stale parameters",                     \
      "an unshard was put on the streams; `bytes` is what a flat gather would have sent between nodes")      \
    X(STALE, 67, "stale", "the first such parameter's index | their number << 32",                           \
      "all signals that said so, a mask of fcdp_stale",                                                      \
      "the ranks agreed that parameters of the region are stale; the cause is the signal on this rank, or "  \
      "that another rank said so; `bytes` of their shards")                                                  \
    X(CACHE_READ, 68, "cache_read", "1: it could not be read, or was not what was written", "",              \
      "this rank's slice of a frozen span, of `bytes`, was read from FCDP_CACHE_DIR, or given up")           \
    X(CACHE_WRITE, 69, "cache_write", "1: it could not be written", "", "it was written there")              \
    X(STALL, 70, "stall", "", "", "the compute stream waited until the region was ready")                    \
    X(RESHARD, 71, "reshard", "", "", "the program resharded the region; the cause says what became of it")  \
    X(FAIL, 72, "fail", "status, as a positive number", "", "a failure was latched: the job ends with it")   \
    X(COALESCE, 73, "coalesce", "groups", "",                                                                \
      "small groups cross the nodes together; `bytes` of this rank's shards")                                \
    X(PASS, 76, "pass", "", "", "a root forward begins; with the flag BACKWARD, a backward")                 \
    X(AGREE, 77, "agree", "groups asked for", "of those, stale in part or whole",                            \
      "the ranks agreed on what is stale, and this took so long")

/* USE: HIT, MADE. STALE: a signal. HOST_WAIT: FOR_x. RESHARD: KEEPS, STORED, WRITTEN, DROPPED. */
#define FCDP_COMM_CAUSES(X)                                                                                  \
    X(HIT, 64, "hit", "nothing crossed the nodes")                                                           \
    X(MADE, 65, "made", "bytes crossed the nodes")                                                           \
    X(SIGNAL_NEW, 66, "new", "it was never gathered, or its copy was invalidated")                           \
    X(SIGNAL_IDENTITY, 67, "identity", "another object, storage, dtype, or requires_grad")                   \
    X(SIGNAL_VERSION, 68, "version", "a version counter moved")                                              \
    X(SIGNAL_OPTIMIZER, 69, "optimizer", "an optimizer stepped")                                             \
    X(SIGNAL_FINGERPRINT, 70, "fingerprint", "its bytes have changed")                                       \
    X(SIGNAL_GRAD_MODE, 71, "grad_mode", "grad mode changed, and there is no fingerprint")                   \
    X(SIGNAL_REDUCED, 72, "reduced", "gradients were reduced, and no optimizer hook ever fired")             \
    X(SIGNAL_PEER, 73, "peer", "another rank said so, this one saw no change")                               \
    X(FOR_AGREEMENT, 74, "agreement", "the ranks agreed on what is stale")                                   \
    X(FOR_END, 76, "end", "the device had to finish")                                                        \
    X(FOR_COMPUTE, 77, "host_computes", "the host is the compute stream (CPU tensors), and needs the bytes") \
    X(FOR_WRITES, 78, "writes", "an optimizer may write what a gather still reads")                          \
    X(FOR_FINGERPRINT, 79, "fingerprint_wait", "the device fingerprinted shards")                            \
    X(KEEPS, 80, "keeps", "the region stays on the device")                                                  \
    X(STORED, 81, "stored", "its bytes are on the host")                                                     \
    X(WRITTEN, 82, "written", "the program wrote into the gathered parameters: no copy is valid")            \
    X(SIGNAL_MISSING, 83, "missing", "its shard's storage was freed")                                        \
    X(DROPPED, 84, "dropped", "its next use gathers it anew: no copy is kept")

/* The names are those of fcdp.stats(), whose numbers they are. */
#define FCDP_COMM_COUNTERS(X)                                                                                \
    X(GATHER_CALLS, 64, "collectives.gather.calls", COUNT, SUM, "collectives of gathers")                    \
    X(GATHER_INTER_BYTES, 65, "collectives.gather.inter_bytes_sent", BYTES, SUM, "sent between nodes")       \
    X(GATHER_INTRA_BYTES, 66, "collectives.gather.intra_bytes_sent", BYTES, SUM, "sent within the node")     \
    X(RESTORE_CALLS, 67, "collectives.restore.calls", COUNT, SUM, "collectives of restores")                 \
    X(RESTORE_INTRA_BYTES, 69, "collectives.restore.intra_bytes_sent", BYTES, SUM, "sent within the node")   \
    X(GATHERS_MADE, 70, "gathers.made", COUNT, SUM, "unshards that crossed the nodes")                       \
    X(GATHERS_AVOIDED, 71, "gathers.avoided", COUNT, SUM, "unshards that did not")                           \
    X(GATHERS_FORWARD, 72, "gathers.forward", COUNT, SUM, "of those made, in a forward")                     \
    X(GATHERS_BACKWARD, 73, "gathers.backward", COUNT, SUM, "of those made, in a backward")                  \
    X(SAVED_PLAIN_BYTES, 74, "saved.plain_bytes", BYTES, NODE_SUM,                                           \
      "what flat gathers would have sent between nodes, per node")                                           \
    X(SAVED_GATHER_BYTES, 75, "saved.gather_bytes", BYTES, NODE_SUM, "what these gathers sent, per node")    \
    X(HOST_WAITS, 76, "waits.gathers", COUNT, SUM, "waits of the host for gathered bytes (CPU tensors)")     \
    X(HOST_WAIT_NS, 77, "waits.ns", NS, SUM, "their time")                                                   \
    X(STALLS, 78, "stalls.count", COUNT, SUM, "waits of the compute stream that were measured")              \
    X(STALL_NS, 79, "stalls.ns", NS, SUM, "their time")                                                      \
    X(PASSES, 80, "passes", COUNT, SUM, "root forwards")                                                     \
    X(CACHE_READ_BYTES, 81, "cache.read_bytes", BYTES, SUM,                                                  \
      "of this rank's slices of frozen parameters, what was read from FCDP_CACHE_DIR")                       \
    X(CACHE_WRITTEN_BYTES, 82, "cache.written_bytes", BYTES, SUM, "and what was written there")              \
    X(DELTA_GATHERS, 83, "deltas.gathers", COUNT, SUM, "gathers that crossed as differences, or rounded")    \
    X(DELTA_WHOLE, 84, "deltas.whole", COUNT, SUM, "gathers that asked for that, and crossed whole")         \
    X(CACHE_FAILURES, 85, "cache.failures", COUNT, SUM,                                                      \
      "slices that could not be written there or read, or were dropped with a damaged one of their group")   \
    X(GATHERS_LATE, 86, "gathers.late", COUNT, SUM,                                                          \
      "unshards that began only when they were waited for, as device pages lacked")                          \
    X(DROPS, 87, "moves.drops", COUNT, SUM,                                                                  \
      "reshards that kept no copy, as the next use gathers it anew (FCDP_POLICY=next-use)")                  \
    X(DELTA_BY_DEVICE, 88, "deltas.by_device", COUNT, SUM,                                                   \
      "gathers whose differences the device has encoded, on this rank")

#define FCDP_COMM_STREAMS(X)                                                                                 \
    X(INTER_0, 64, "inter 0", "bytes between nodes")                                                         \
    X(INTER_1, 65, "inter 1", "bytes between nodes, in turn with inter 0")                                   \
    X(NODE, 66, "node", "bytes between the ranks of this node")                                              \
    X(COMPUTE, 67, "compute", "the model")

enum { FCDP_COMM_EVENTS(FCDP_AS_EVENT) };
enum { FCDP_COMM_CAUSES(FCDP_AS_CAUSE) };
enum { FCDP_COMM_COUNTERS(FCDP_AS_COUNTER) };
enum { FCDP_COMM_STREAMS(FCDP_AS_TRACK) };

#endif
