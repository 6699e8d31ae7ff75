/* collective.c - see the header. */
#include "comm/collective.h"

#include "comm/trace.h"

typedef struct sent {
    const fcdp_group *group; /* NULL: of several */
    fcdp_lane lane;
    uint64_t gathered, restored; /* bytes */
    bool gathers;
} sent;

/* The lane's turn comes before the span, not within: it is the one before that takes so long. */
static fcdp_trace_span span_begin(const fcdp_stream_set *set, fcdp_lane lane, fcdp_stream stream) {
    const fcdp_engine *engine = set->engine;
    fcdp_trace_spans *spans = fcdp__tiering_spans(engine->tiering);
    uint32_t track = lane == FCDP_LANE_NODE                        ? FCDP_TRACK_NODE
                     : stream == set->streams[FCDP_STREAM_INTER_0] ? FCDP_TRACK_INTER_0
                                                                   : FCDP_TRACK_INTER_1;
    if (spans) (void)!fcdp__driver_timer_wait(engine->drv, stream, set->turn[lane]);
    return fcdp__trace_span_begin(spans, stream, track);
}

/* One collective that carries both is one span, of two events. */
static void span_end(const fcdp_engine *engine, fcdp_trace_span span, fcdp_stream stream, const sent *of) {
    fcdp_trace_event events[2];
    size_t n = 0;
    bool within = of->lane == FCDP_LANE_NODE;
    uint32_t object = fcdp__group_object(of->group);
    if (of->gathers)
        events[n++] = (fcdp_trace_event){.kind = FCDP_EVENT_GATHER,
                                         .object = object,
                                         .bytes = of->gathered,
                                         .a = within ? 0 : of->gathered,
                                         .b = within ? of->gathered : 0};
    if (!of->gathers || of->restored)
        events[n++] = (fcdp_trace_event){
            .kind = FCDP_EVENT_RESTORE, .object = object, .bytes = of->restored, .b = of->restored};
    fcdp__trace_span_end(fcdp__tiering_spans(engine->tiering), span, stream, events, n);
    fcdp__trace_count(of->gathers ? FCDP_COUNT_GATHER_CALLS : FCDP_COUNT_RESTORE_CALLS, 1);
    fcdp__trace_count(within ? FCDP_COUNT_GATHER_INTRA_BYTES : FCDP_COUNT_GATHER_INTER_BYTES, of->gathered);
    if (within) fcdp__trace_count(FCDP_COUNT_RESTORE_INTRA_BYTES, of->restored);
}

/* Bytes are counted as the plan's: what a ring or a direct exchange sends, whatever the transport does. */
fcdp_status fcdp__all_gather(fcdp_comm *comm, const fcdp_group *group, fcdp_lane lane, const fcdp_part *parts,
                             size_t n, size_t n_restored, fcdp_stream stream) {
    fcdp_engine *engine = comm->engine;
    const fcdp_topology *topology = &comm->topology;
    uint64_t bytes[2] = {0};
    fcdp_trace_span span = span_begin(comm->set, lane, stream);
    fcdp_status status = comm->transport.all_gather(comm->transport.ctx, lane, parts, n, stream,
                                                    comm->set->turn[lane]);
    if (status) {
        fcdp__trace_span_drop(fcdp__tiering_spans(engine->tiering), span);
        return status;
    }
    for (size_t i = 0; i < n; i++) bytes[i < n_restored] += parts[i].bytes;
    for (size_t i = 0; i < 2; i++)
        bytes[i] *= (lane == FCDP_LANE_NODE ? topology->node_size : topology->n_nodes) - 1;
    bool gathers = n > n_restored;
    span_end(engine, span, stream, &(sent){group, lane, bytes[0], bytes[1], gathers});
    fcdp__lock_acquire(&engine->lock);
    fcdp_engine_stats *stats = &engine->stats;
    (gathers ? &stats->gather : &stats->restore)->calls++;
    if (lane == FCDP_LANE_NODE) {
        stats->gather.intra_bytes_sent += bytes[0];
        stats->restore.intra_bytes_sent += bytes[1];
    } else {
        stats->gather.inter_bytes_sent += bytes[0];
    }
    fcdp__lock_release(&engine->lock);
    return FCDP_OK;
}
