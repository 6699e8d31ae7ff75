/* transport.h - how bytes reach other ranks: a table, so that torch.distributed, NCCL or a test's memory can serve. */
#ifndef FCDP_TRANSPORT_H
#define FCDP_TRANSPORT_H

#include "alloc/driver.h"

typedef enum fcdp_lane {
    FCDP_LANE_INTER,            /* the ranks with this rank's local index, one per node, in node order */
    FCDP_LANE_INTRA,            /* the ranks of this node, in local order */
} fcdp_lane;

typedef struct fcdp_transport {
    void *ctx;
    /* Start, in place: the lane's n members each own part `me` of the n * bytes at `buffer`, and all hold all parts when it is done. Called
     * by one thread per lane, in the same order on every rank; several of a lane may be under way at once. FCDP_ERR_TRANSPORT or
     * FCDP_ERR_PEER with a text. */
    fcdp_status (*start)(void *ctx, fcdp_lane lane, fcdp_dptr buffer, size_t bytes, void **pending_out);
    /* Until the bytes are there; ends `pending`. Any thread, once per start; errors as above. */
    fcdp_status (*wait)(void *ctx, void *pending);
    bool fails_quietly; /* after a failed wait nothing touches the buffer any more (gloo; not NCCL) */
} fcdp_transport;

static inline fcdp_status fcdp__transport_all_gather(const fcdp_transport *transport, fcdp_lane lane, fcdp_dptr buffer, size_t bytes) {
    void *pending;
    fcdp_status status = transport->start(transport->ctx, lane, buffer, bytes, &pending);
    return status ? status : transport->wait(transport->ctx, pending);
}

#endif
