/* transport.h - how bytes reach other ranks: a table, so that NCCL, torch.distributed or a test's memory can
 * serve.
 *
 * Lanes. One communicator goes between nodes, one within the node. A lane's collectives come on several
 * streams and are carried one after another, in the order of the calls: a link that two of them share brings
 * both late, and the first is needed first. What a transport does before and after (packing) needs no turn,
 * and overlaps with the transfers of others.
 *
 * Order. Every call is made by a thread that runs the model, in the program's order, between whatever
 * collectives the program launches itself: so all communicators of a process see one order, the same on every
 * rank. That is what NCCL asks for, and why no stream can wait in a circle: a stream waits for events
 * recorded earlier in that order, and for peers that are at the same call. Where the program has a thread for
 * each of several models, each model has such an order, and streams of its own (stream_set.c).
 */
#ifndef FCDP_TRANSPORT_H
#define FCDP_TRANSPORT_H

#include "alloc/driver.h"

typedef enum fcdp_lane {
    FCDP_LANE_INTER, /* the ranks with this rank's local index, one per node, in node order */
    FCDP_LANE_NODE,  /* the ranks of this node, in local order */
    FCDP_N_LANES
} fcdp_lane;

/* Of exchanges of host memory, which go on beside each other and beside a lane's collectives, between the
 * members of FCDP_LANE_INTER. */
typedef enum fcdp_channel {
    FCDP_CHANNEL_TURN, /* those of a gather that has the lane's turn */
    /* what follows when the turn has passed on, in the order of the turns: of every second gather */
    FCDP_CHANNEL_VERDICT_0,
    FCDP_CHANNEL_VERDICT_1,
    FCDP_N_CHANNELS
} fcdp_channel;

/* One all-gather in place: member i of the lane owns the `bytes` at `at + i * stride_bytes`, and all hold all
 * of them when it is done. stride_bytes >= bytes. */
typedef struct fcdp_part {
    fcdp_dptr at;
    size_t bytes, stride_bytes;
} fcdp_part;

typedef struct fcdp_transport {
    void *ctx;
    /* Enqueue on `stream` one collective that does all parts, which do not overlap; every member of the lane
     * makes the same call. `turn` is the lane's: the transfer is handed over behind it, and recorded in it
     * when the lane's next one may be. Returns at once. An error: nothing was transferred, nor will be. A
     * failure later on is what `check` says, and what follows on the stream runs nevertheless. */
    fcdp_status (*all_gather)(void *ctx, fcdp_lane lane, const fcdp_part *parts, size_t n, fcdp_stream stream,
                              fcdp_event turn);
    /* All-gathers host memory, of which member i owns the `bytes` at `buffer + i * bytes`, and returns when
     * all hold all of it. Those of a channel are called one after another, by a thread that streams wait for
     * (alloc/worker.h), or in host functions. A failure is what `check` says from here on, and each later
     * exchange returns one at once, on any channel. NULL: it cannot. */
    fcdp_status (*exchange)(void *ctx, fcdp_channel channel, void *buffer, size_t bytes);
    bool all_channels; /* on all channels; else on the first alone */
    /* Why it cannot, for the line that says so; read while the comm is made alone. NULL: nothing to add. */
    const char *why_no_exchange;
    /* The first failure of what was enqueued, with its text; FCDP_OK: none so far. Any thread. */
    fcdp_status (*check)(void *ctx);
    /* No collective of it ends well from here on, and none waits for a peer. Any thread. `why` is what
     * `check` says then, unless it has something to say already. It may be the thread's failure text, which
     * this may change. */
    void (*abort)(void *ctx, const char *why);
    /* Which ranks of the shard group have not come to the collectives that this rank is in, as text ("rank 3,
     * rank 5"). False: it cannot say; NULL: it never can. Any thread. */
    bool (*missing)(void *ctx, char *text_out, size_t text_bytes);
    /* From here on call `failed(arg)` (NULL: nothing) when a collective fails, on whichever thread,
     * before anything that follows it on its stream begins: so that the node's ranks, to which the
     * stream may hand on what the collective should have brought, know of it. NULL: a collective that
     * fails does not end before it is aborted. */
    void (*on_failure)(void *ctx, void (*failed)(void *arg), void *arg);
    /* The comm has ended, and calls nothing of this any more. NULL: the
     * transport is not the comm's to destroy. */
    void (*destroy)(void *ctx);
    /* Its collectives go through host memory, and host functions wait for peers in them. CUDA may run the
     * host functions of all streams one after another: with both lanes in use, ranks could wait for each
     * other in a circle, so the inter lane alone is used; both where the host computes, whose streams are
     * simulated. */
    bool through_host;
} fcdp_transport;

#endif
