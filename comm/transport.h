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
    /* In place: the lane's n members each own part `me` of the n * bytes at `buffer`, and all hold all parts afterwards. Called by
     * one thread per lane, in the same order on every rank; returns when the bytes are there. FCDP_ERR_TRANSPORT or FCDP_ERR_PEER with a text. */
    fcdp_status (*all_gather)(void *ctx, fcdp_lane lane, fcdp_dptr buffer, size_t bytes);
} fcdp_transport;

#endif
