/* collective.c - see the header. */
#include "comm/collective.h"

#include "comm/internal.h"

/* Bytes are counted as the plan's: what a ring or a direct exchange sends, whatever the transport does. */
fcdp_status fcdp__all_gather(fcdp_comm *comm, fcdp_lane lane, const fcdp_part *parts, size_t n,
                             size_t n_restored, fcdp_stream stream) {
    fcdp_engine *engine = comm->engine;
    const fcdp_topology *topology = &comm->topology;
    uint64_t bytes[2] = {0};
    fcdp_status status = comm->transport.all_gather(comm->transport.ctx, lane, parts, n, stream,
                                                    engine->turn[lane]);
    if (status) return status;
    for (size_t i = 0; i < n; i++) bytes[i < n_restored] += parts[i].bytes;
    fcdp__lock_acquire(&engine->lock);
    fcdp_engine_stats *stats = &engine->stats;
    (n > n_restored ? &stats->gather : &stats->restore)->calls++;
    if (lane == FCDP_LANE_NODE) {
        stats->gather.intra_bytes_sent += (topology->node_size - 1) * bytes[0];
        stats->restore.intra_bytes_sent += (topology->node_size - 1) * bytes[1];
    } else {
        stats->gather.inter_bytes_sent += (topology->n_nodes - 1) * bytes[0];
    }
    fcdp__lock_release(&engine->lock);
    return FCDP_OK;
}
