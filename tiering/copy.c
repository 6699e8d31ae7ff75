/* copy.c - enqueues the copies between a region and host memory, and their spans in the trace.
 *
 * CUDA takes no copy that is page-locked in part. So a piece in which page-locked memory begins or ends is
 * cut there; any other piece is one copy.
 */
#include "tiering/copy.h"

#include "tiering/trace.h"

/* Copy between `device` and the piece's place in host memory. CUDA may read memory that is not pinned during
 * the call, before the stream has waited. So the host waits for the stream first; the stream's own waits end
 * without this thread, by the program's order. */
static fcdp_status piece_copy(fcdp_region *region, fcdp_direction direction, fcdp_dptr device,
                              fcdp_piece piece) {
    fcdp_tiering *tiering = region->tiering;
    fcdp_stream stream = region->streams[direction];
    char *host = (char *)fcdp__host_data(region->block) + piece.offset_bytes;
    fcdp_status status = FCDP_OK;
    for (size_t done = 0, n; done < piece.bytes && !status; done += n) {
        bool pinned;
        n = fcdp__host_run_bytes(region->block, piece.offset_bytes + done, piece.bytes - done, &pinned);
        fcdp_dptr at = fcdp__dptr_add(device, done);
        if (direction == FCDP_TO_HOST) {
            status = fcdp__driver_copy_d2h(tiering->drv, host + done, at, n, stream);
        } else {
            if (!pinned) status = fcdp__driver_stream_sync(tiering->drv, stream);
            if (!status) status = fcdp__driver_copy_h2d(tiering->drv, at, host + done, n, stream);
        }
    }
    fcdp__lock_acquire(&tiering->lock);
    *(direction == FCDP_TO_HOST ? &tiering->stats.d2h_bytes : &tiering->stats.h2d_bytes) += piece.bytes;
    fcdp__lock_release(&tiering->lock);
    fcdp__trace_count(direction == FCDP_TO_HOST ? FCDP_COUNT_D2H_BYTES : FCDP_COUNT_H2D_BYTES, piece.bytes);
    return status;
}

/* ---- in the trace: from the first copy to the last, behind what they wait for ---- */

typedef struct copying {
    fcdp_trace_span span;
    fcdp_trace_event event;
} copying;

static copying copying_begin(const fcdp_region *region, fcdp_direction direction, uint32_t span_mask) {
    bool to_host = direction == FCDP_TO_HOST;
    fcdp_tiering *tiering = region->tiering;
    return (copying){
        fcdp__trace_span_begin(tiering->spans, region->streams[direction],
                               to_host ? FCDP_TRACK_TO_HOST : FCDP_TRACK_TO_DEVICE),
        {.kind = to_host ? FCDP_EVENT_STORE : FCDP_EVENT_LOAD, .object = region->object, .a = span_mask}};
}

static void copying_end(const fcdp_region *region, fcdp_direction direction, copying *of) {
    fcdp_tiering *tiering = region->tiering;
    uint64_t spans_bytes = 0;
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (of->event.a & 1u << s) spans_bytes += region->layout->span[s].bytes;
    of->event.flags = of->event.bytes < spans_bytes ? FCDP_TRACE_SLICE : 0;
    fcdp__trace_span_end(tiering->spans, of->span, region->streams[direction], &of->event, 1);
}

fcdp_status fcdp__region_copy(fcdp_region *region, fcdp_direction direction, uint32_t span_mask,
                              fcdp_piece_list pieces) {
    fcdp_dptr base = fcdp__vrange_base(region->range);
    copying traced = copying_begin(region, direction, span_mask);
    fcdp_status status = FCDP_OK;
    for (size_t i = 0; i < pieces.n && !status; i++) {
        fcdp_piece piece = pieces.pieces[i];
        status = piece_copy(region, direction, fcdp__dptr_add(base, piece.offset_bytes), piece);
        traced.event.bytes += piece.bytes;
    }
    copying_end(region, direction, &traced);
    return status;
}

fcdp_status fcdp__region_copy_in(fcdp_region *region, uint32_t span_mask, const fcdp_source *sources,
                                 size_t n) {
    copying traced = copying_begin(region, FCDP_TO_HOST, span_mask);
    fcdp_status status = FCDP_OK;
    for (size_t i = 0; i < n && !status; i++) {
        status = piece_copy(region, FCDP_TO_HOST, sources[i].at, sources[i].place);
        traced.event.bytes += sources[i].place.bytes;
    }
    copying_end(region, FCDP_TO_HOST, &traced);
    return status;
}

fcdp_status fcdp__region_copy_out(fcdp_region *region, uint32_t span_mask, fcdp_piece piece, fcdp_dptr to) {
    copying traced = copying_begin(region, FCDP_TO_DEVICE, span_mask);
    fcdp_status status = piece_copy(region, FCDP_TO_DEVICE, to, piece);
    traced.event.bytes = piece.bytes;
    copying_end(region, FCDP_TO_DEVICE, &traced);
    return status;
}
