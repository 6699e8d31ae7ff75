/* trace_events.h - what the plugin says of FSDP2's own work. The rows' columns: base/trace_format.h. */
#ifndef FCDP_PLUGIN_TRACE_EVENTS_H
#define FCDP_PLUGIN_TRACE_EVENTS_H

#include "comm/trace_events.h"

#define FCDP_PLUGIN_EVENTS(X)                                                                                \
    X(STEP, 96, "step", "optimizer steps so far, this one counted", "", "an optimizer stepped")              \
    X(PLAIN_GATHER, 97, "plain_gather", "of those, bytes sent between nodes", "ranks",                       \
      "FSDP2 gathered a group itself; this rank sends `bytes` to the next of its ring")                      \
    X(REDUCE_SCATTER, 98, "reduce_scatter", "of those, bytes sent between nodes", "ranks",                   \
      "gradients were reduced, and scattered; this rank sends `bytes`")                                      \
    X(BYPASS, 99, "bypass", "", "", "a group is left to FSDP; its object's `why` says why")

#define FCDP_PLUGIN_CAUSES(X)

/* The names are those of fcdp.stats(), whose numbers they are. */
#define FCDP_PLUGIN_COUNTERS(X)                                                                              \
    X(STEPS, 96, "steps", COUNT, SUM, "optimizer steps")                                                     \
    X(PLAIN_GATHER_CALLS, 97, "collectives.plain_gather.calls", COUNT, SUM, "gathers of FSDP2's own")        \
    X(PLAIN_GATHER_INTER_BYTES, 98, "collectives.plain_gather.inter_bytes_sent", BYTES, SUM,                 \
      "between nodes")                                                                                       \
    X(PLAIN_GATHER_INTRA_BYTES, 99, "collectives.plain_gather.intra_bytes_sent", BYTES, SUM,                 \
      "within the node")                                                                                     \
    X(REDUCE_SCATTER_CALLS, 100, "collectives.reduce_scatter.calls", COUNT, SUM, "of gradients")             \
    X(REDUCE_SCATTER_INTER_BYTES, 101, "collectives.reduce_scatter.inter_bytes_sent", BYTES, SUM,            \
      "between nodes")                                                                                       \
    X(REDUCE_SCATTER_INTRA_BYTES, 102, "collectives.reduce_scatter.intra_bytes_sent", BYTES, SUM,            \
      "within the node")                                                                                     \
    X(AGREE_CALLS, 103, "collectives.agree.calls", COUNT, SUM, "agreements on what is stale")                \
    X(AGREE_INTER_BYTES, 104, "collectives.agree.inter_bytes_sent", BYTES, SUM, "between nodes")             \
    X(BESIDE_BYTES, 106, "saved.beside_bytes", BYTES, SUM, "received in gathers of FSDP2's own")             \
    X(AGREE_NS, 107, "waits.agreement_ns", NS, SUM, "time of the host in agreements")                        \
    X(BYPASSED, 108, "bypassed", COUNT, SUM, "groups that are left to FSDP2")

/* None: what FSDP2 puts on streams is not measured. */
#define FCDP_PLUGIN_STREAMS(X)

enum { FCDP_PLUGIN_EVENTS(FCDP_AS_EVENT) };
enum { FCDP_PLUGIN_COUNTERS(FCDP_AS_COUNTER) };

#endif
