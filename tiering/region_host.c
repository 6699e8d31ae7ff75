/* region_host.c - what host memory has of a region: stores to it, loads from it, and eviction.
 *
 * The host's copy of a region is its node's: each rank stores its slice, and tells the others by a word
 * beside the bytes (board.h). Where the node keeps several copies (host.h), a rank stores to all of them
 * before its word, and loads from one. Streams write the words and wait for them, so no host thread waits for
 * a peer to store:
 *
 *     STORED_s   epoch of span s of which this rank's pieces are in host memory
 *     READY      number of the fill for which this rank's older reads and writes there are over
 *
 * The exceptions, in which the host waits, are an eviction and a read between uses: no use follows that would
 * check whether a peer is gone. An eviction writes what the host lacks without the other ranks, since they
 * may not come.
 *
 * The file chooses nothing: region.c passes the pages on, tiering.c names what is evicted, and comm decides
 * what is stored and loaded.
 */
#include "tiering/region.h"

#include "tiering/slot.h"
#include "tiering/trace.h"

#include <stdio.h>
#include <string.h>

/* ---- copies ---- */

/* CUDA takes no copy that is page-locked in part. So bytes in which page-locked memory begins or ends are
 * cut there; any others are one copy.
 *
 * Copy between `device` and `host`. CUDA may read memory that is not pinned during the call, before the
 * stream has waited. So the host waits for the stream first; the stream's own waits end without this thread,
 * by the program's order. */
static fcdp_status bytes_copy(const fcdp_region *region, fcdp_direction direction, fcdp_dptr device,
                              char *host, size_t bytes, fcdp_stream stream) {
    fcdp_tiering *tiering = region->tiering;
    fcdp_status status = FCDP_OK;
    for (size_t done = 0, n; done < bytes && !status; done += n) {
        bool pinned;
        n = fcdp__host_run_bytes(region->block, host + done, bytes - done, &pinned);
        fcdp_dptr at = fcdp__dptr_add(device, done);
        if (direction == FCDP_TO_HOST) {
            status = fcdp__driver_copy_d2h(tiering->drv, host + done, at, n, stream);
        } else {
            if (!pinned) status = fcdp__driver_stream_sync(tiering->drv, stream);
            if (!status) status = fcdp__driver_copy_h2d(tiering->drv, at, host + done, n, stream);
        }
    }
    fcdp__count(&tiering->counts, direction == FCDP_TO_HOST ? FCDP_COUNT_D2H_BYTES : FCDP_COUNT_H2D_BYTES,
                bytes);
    return status;
}

/* Between `device` and the piece's place in host memory: to every copy there, from the one that is read.
 * *bytes grows by what is moved. */
static fcdp_status piece_copy(const fcdp_region *region, fcdp_direction direction, fcdp_dptr device,
                              fcdp_piece piece, fcdp_stream stream, uint64_t *bytes) {
    const fcdp_host_block *block = region->block;
    uint32_t n_copies = direction == FCDP_TO_HOST ? fcdp__host_block_copies(block) : 1;
    fcdp_status status = FCDP_OK;
    for (uint32_t i = 0; i < n_copies && !status; i++) {
        char *copy = direction == FCDP_TO_HOST ? fcdp__host_copy(block, i) : fcdp__host_data(block);
        status = bytes_copy(region, direction, device, copy + piece.offset_bytes, piece.bytes, stream);
        *bytes += piece.bytes;
    }
    return status;
}

/* A span in the trace: from the first copy to the last, behind what they wait for. */
typedef struct copying {
    fcdp_trace_span span;
    fcdp_trace_event event;
} copying;

static copying copying_begin(const fcdp_region *region, fcdp_direction direction, uint32_t span_mask,
                             fcdp_stream stream) {
    bool to_host = direction == FCDP_TO_HOST;
    fcdp_tiering *tiering = region->tiering;
    return (copying){
        fcdp__trace_span_begin(tiering->spans, stream, to_host ? FCDP_TRACK_TO_HOST : FCDP_TRACK_TO_DEVICE),
        {.kind = to_host ? FCDP_EVENT_STORE : FCDP_EVENT_LOAD, .object = region->object, .a = span_mask}};
}

static uint64_t spans_bytes(const fcdp_region *region, uint32_t mask) {
    uint64_t bytes = 0;
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (mask & 1u << s) bytes += region->layout->span[s].bytes;
    return bytes;
}

static void copying_end(const fcdp_region *region, copying *of, fcdp_stream stream) {
    fcdp_tiering *tiering = region->tiering;
    bool stores = of->event.kind == FCDP_EVENT_STORE && region->block;
    uint64_t n_copies = stores ? fcdp__host_block_copies(region->block) : 1;
    bool is_all = of->event.bytes >= n_copies * spans_bytes(region, (uint32_t)of->event.a);
    of->event.flags = is_all ? 0 : FCDP_TRACE_SLICE;
    fcdp__trace_span_end(tiering->spans, of->span, stream, &of->event, 1);
}

/* Enqueue the copies of the region's own pieces, of the spans of `span_mask`. A failed call may have enqueued
 * some of them. */
static fcdp_status copy_pieces(fcdp_region *region, fcdp_direction direction, uint32_t span_mask,
                               fcdp_piece_list pieces) {
    fcdp_stream stream = region->streams[direction];
    fcdp_dptr base = fcdp__vrange_base(region->range);
    copying traced = copying_begin(region, direction, span_mask, stream);
    fcdp_status status = FCDP_OK;
    for (size_t i = 0; i < pieces.n && !status; i++) {
        fcdp_piece piece = pieces.pieces[i];
        status = piece_copy(region, direction, fcdp__dptr_add(base, piece.offset_bytes), piece, stream,
                            &traced.event.bytes);
    }
    copying_end(region, &traced, stream);
    return status;
}

/* A slice of each span of `span_mask`, to the file or from it (spill.h). */
static fcdp_status copy_spilled(fcdp_region *region, fcdp_direction direction, uint32_t span_mask) {
    fcdp_stream stream = region->streams[direction];
    copying traced = copying_begin(region, direction, span_mask, stream);
    fcdp_status status = FCDP_OK;
    for (uint32_t s = 0; s < FCDP_N_SPANS && !status; s++) {
        if (!(span_mask & 1u << s) || !region->spilled[s]) continue;
        fcdp_piece slice = fcdp__layout_slice(region->layout, s, region->slice);
        fcdp_dptr at = fcdp__dptr_add(fcdp__vrange_base(region->range), slice.offset_bytes);
        status = direction == FCDP_TO_HOST ? fcdp__spill_store(region->spilled[s], at, stream)
                                           : fcdp__spill_load(region->spilled[s], at, stream);
        traced.event.bytes += slice.bytes;
    }
    fcdp__count(&region->tiering->counts,
                direction == FCDP_TO_HOST ? FCDP_COUNT_D2H_BYTES : FCDP_COUNT_H2D_BYTES, traced.event.bytes);
    copying_end(region, &traced, stream);
    return status;
}

/* Between the host and elsewhere on the device. */
static fcdp_status copy_sources(fcdp_region *region, fcdp_direction direction, uint32_t span_mask,
                                const fcdp_source *sources, size_t n, fcdp_stream stream) {
    copying traced = copying_begin(region, direction, span_mask, stream);
    fcdp_status status = FCDP_OK;
    for (size_t i = 0; i < n && !status; i++)
        status = piece_copy(region, direction, sources[i].at, sources[i].place, stream, &traced.event.bytes);
    copying_end(region, &traced, stream);
    return status;
}

/* ---- the words ---- */

/* Nothing of it in host memory is another process's. */
static bool is_alone(const fcdp_region *region) {
    return region->layout->n_slices == 1 || !region->block;
}

/* `stream` waits until the word of every other process has reached `value`. */
static fcdp_status words_await(fcdp_region *region, fcdp_board_word word, uint32_t value,
                               fcdp_stream stream) {
    fcdp_status status = FCDP_OK;
    if (is_alone(region)) return FCDP_OK;
    fcdp__region_lock(region);
    if (word == FCDP_BOARD_READY) region->awaited_fill = value;
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (word == FCDP_STORED_WORD[s]) region->awaited_epoch[s] = value;
    fcdp__region_unlock(region);
    for (uint32_t i = 0; i < region->layout->n_slices && !status; i++)
        if (i != region->slice)
            status = fcdp__driver_wait_value32(region->tiering->drv, stream,
                                               fcdp__board_word_at(region->block, word, i), value);
    return status;
}

static fcdp_status word_write(const fcdp_region *region, fcdp_board_word word, uint32_t value,
                              fcdp_stream stream) {
    if (is_alone(region)) return FCDP_OK;
    return fcdp__driver_write_value32(region->tiering->drv, stream,
                                      fcdp__board_word_at(region->block, word, region->slice), value);
}

/* Behind the copies of the spans in `span_mask`: tell the others that they may read them. */
static fcdp_status words_write_stored(const fcdp_region *region, uint32_t span_mask) {
    fcdp_stream d2h = region->streams[FCDP_TO_HOST];
    fcdp_status status = FCDP_OK;
    for (uint32_t s = 0; s < FCDP_N_SPANS && !status; s++)
        if (span_mask & 1u << s) status = word_write(region, FCDP_STORED_WORD[s], region->span[s].epoch, d2h);
    return status;
}

/* ---- stores, fills and loads ---- */

/* A call has failed after it enqueued some operations and before it recorded its event: release records
 * it. */
static fcdp_status fail_unrecorded(fcdp_region *region, fcdp_status status) {
    region->unrecorded = true;
    return status;
}

/* The others may overwrite host memory once this rank neither reads nor writes older bytes there. Its writes
 * count too, since the next writer of a place may be another rank. */
static fcdp_status fill_permit(fcdp_region *region) {
    fcdp_stream h2d = region->streams[FCDP_TO_DEVICE];
    fcdp_status status = FCDP_OK;
    if (!is_alone(region)) status = fcdp__driver_stream_wait(region->tiering->drv, h2d, region->stored);
    if (!status) status = word_write(region, FCDP_BOARD_READY, region->n_fills + 1, h2d);
    if (!status) region->n_fills++;
    return status;
}

static void fill_trace(const fcdp_region *region, uint32_t span_mask) {
    uint32_t last = FCDP_N_SPANS - 1;
    while (last > 0 && !(span_mask & 1u << last)) last--;
    fcdp__region_trace(region, FCDP_EVENT_FILL, 0, span_mask, region->span[last].epoch);
}

fcdp_status fcdp__region_begin_fill(fcdp_region *region, uint32_t span_mask) {
    fcdp_status status = fill_permit(region);
    if (status) return status;
    fcdp__region_lock(region);
    FCDP_CHECK(1, region->in_use);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (span_mask & 1u << s)
            region->span[s] = (fcdp_span_state){.on_device = true, .epoch = region->span[s].epoch + 1};
    fill_trace(region, span_mask);
    fcdp__region_unlock(region);
    return FCDP_OK;
}

/* This process's copies to the host come after `after`, after its own reads of older bytes there, and after
 * the other processes' reads and writes of them. */
static fcdp_status store_begin(fcdp_region *region, fcdp_event after) {
    fcdp_tiering *tiering = region->tiering;
    fcdp_stream d2h = region->streams[FCDP_TO_HOST];
    fcdp_status status = fcdp__driver_stream_wait(tiering->drv, d2h, after);
    if (!status) status = fcdp__driver_stream_wait(tiering->drv, d2h, region->loaded);
    return status ? status : words_await(region, FCDP_BOARD_READY, region->n_fills, d2h);
}

/* `status`: the store's, so far. */
static fcdp_status store_end(fcdp_region *region, uint32_t span_mask, fcdp_status status) {
    fcdp_tiering *tiering = region->tiering;
    if (!status) status = words_write_stored(region, span_mask);
    if (!status)
        status = fcdp__driver_event_record(tiering->drv, region->stored, region->streams[FCDP_TO_HOST]);
    if (status) return fail_unrecorded(region, status);
    fcdp__region_lock(region);
    fcdp__count(&tiering->counts, FCDP_COUNT_STORES, 1);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (span_mask & 1u << s) region->span[s].stored = true;
    fcdp__region_unlock(region);
    return FCDP_OK;
}

fcdp_status fcdp__region_store(fcdp_region *region, uint32_t span_mask, fcdp_piece_list own,
                               fcdp_event after) {
    fcdp_status status = store_begin(region, after);
    if (!status)
        status = region->block ? copy_pieces(region, FCDP_TO_HOST, span_mask, own)
                               : copy_spilled(region, FCDP_TO_HOST, span_mask);
    return store_end(region, span_mask, status);
}

fcdp_status fcdp__region_store_by(fcdp_region *region, uint32_t span_mask, fcdp_region_copy copy, void *arg,
                                  fcdp_event after) {
    FCDP_CHECK(1, region->block);
    fcdp_status status = store_begin(region, after);
    if (!status) status = copy(arg, region->streams[FCDP_TO_HOST]);
    return store_end(region, span_mask, status);
}

/* At first the new epoch is nowhere. Another thread may be evicting a kept region: its copy must end before
 * the others may write. */
fcdp_status fcdp__region_fill_host(fcdp_region *region, uint32_t span_mask, const fcdp_source *sources,
                                   size_t n, fcdp_event after) {
    fcdp__region_lock(region);
    FCDP_CHECK(1, !region->in_use);
    fcdp__region_begin_move(region);
    fcdp__region_unlock(region);
    fcdp_status status = fill_permit(region);
    fcdp__region_lock(region);
    for (uint32_t s = 0; s < FCDP_N_SPANS && !status; s++)
        if (span_mask & 1u << s) region->span[s] = (fcdp_span_state){.epoch = region->span[s].epoch + 1};
    if (!status) fill_trace(region, span_mask);
    fcdp__region_end_move(region);
    fcdp__region_unlock(region);
    if (status) return status;
    status = store_begin(region, after);
    if (!status)
        status = copy_sources(region, FCDP_TO_HOST, span_mask, sources, n, region->streams[FCDP_TO_HOST]);
    return store_end(region, span_mask, status);
}

/* The words are the host's to write here: no stream of this process has written one yet. */
void fcdp__region_fill_by_host(fcdp_region *region, uint32_t span_mask) {
    fcdp__region_lock(region);
    FCDP_CHECK(1, !region->in_use);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
        if (!(span_mask & 1u << s)) continue;
        FCDP_CHECK(1, region->span[s].epoch == 0);
        region->span[s] = (fcdp_span_state){.stored = true, .epoch = 1};
        fcdp__board_publish(region->block, FCDP_STORED_WORD[s], 1);
    }
    fill_trace(region, span_mask);
    fcdp__region_unlock(region);
}

fcdp_status fcdp__region_load_pieces(fcdp_region *region, uint32_t span_mask, fcdp_piece_list others) {
    fcdp_tiering *tiering = region->tiering;
    fcdp_stream h2d = region->streams[FCDP_TO_DEVICE];
    fcdp_status status = FCDP_OK;
    for (uint32_t s = 0; s < FCDP_N_SPANS && !status; s++)
        if (span_mask & 1u << s)
            status = words_await(region, FCDP_STORED_WORD[s], region->span[s].epoch, h2d);
    if (!status) status = copy_pieces(region, FCDP_TO_DEVICE, span_mask, others);
    if (!status) status = fcdp__driver_event_record(tiering->drv, region->loaded, h2d);
    if (status) return fail_unrecorded(region, status);
    region->ordered = true;
    return FCDP_OK;
}

/* The stream of copies to the device goes on once host memory has the span. A span that this process has
 * written as a whole needs no word of the others. */
static fcdp_status load_begin(fcdp_region *region, uint32_t span, bool in_use) {
    fcdp_tiering *tiering = region->tiering;
    fcdp_stream h2d = region->streams[FCDP_TO_DEVICE];
    fcdp__region_lock(region);
    FCDP_CHECK(1, region->in_use == in_use && span < FCDP_N_SPANS);
    fcdp_span_state state = region->span[span];
    fcdp__region_unlock(region);
    if (!state.stored && !state.whole)
        return fcdp__fail(FCDP_ERR_INVALID, "region '%s': span %u of epoch %u is nowhere; gather it",
                          region->name, span, state.epoch);
    fcdp_status status = fcdp__driver_stream_wait(tiering->drv, h2d, region->stored);
    if (!status && !state.whole) status = words_await(region, FCDP_STORED_WORD[span], state.epoch, h2d);
    return status;
}

static fcdp_status load(fcdp_region *region, uint32_t span, fcdp_piece piece, unsigned counter) {
    fcdp_tiering *tiering = region->tiering;
    fcdp_stream h2d = region->streams[FCDP_TO_DEVICE];
    fcdp_status status = load_begin(region, span, true);
    if (!status)
        status = region->block ? copy_pieces(region, FCDP_TO_DEVICE, 1u << span, (fcdp_piece_list){&piece, 1})
                               : copy_spilled(region, FCDP_TO_DEVICE, 1u << span);
    if (!status) status = fcdp__driver_event_record(tiering->drv, region->loaded, h2d);
    if (status) return fail_unrecorded(region, status);
    region->ordered = true;
    fcdp__region_lock(region);
    fcdp__count(&tiering->counts, counter, 1);
    region->span[span].on_device = true;
    fcdp__region_unlock(region);
    return FCDP_OK;
}

bool fcdp__region_fetch(fcdp_region *region, uint32_t span) {
    fcdp__region_lock(region);
    FCDP_CHECK(1, !region->block && span < FCDP_N_SPANS);
    fcdp_span_state state = region->span[span];
    fcdp__region_unlock(region);
    return state.stored && fcdp__spill_fetch(region->spilled[span]);
}

fcdp_status fcdp__region_load_slice(fcdp_region *region, uint32_t span) {
    fcdp_piece slice = fcdp__layout_slice(region->layout, span, region->slice);
    return load(region, span, slice, FCDP_COUNT_SLICE_LOADS);
}

fcdp_status fcdp__region_load_whole(fcdp_region *region, uint32_t span) {
    FCDP_CHECK(0, region->block || region->layout->n_slices == 1); /* a file has a slice alone */
    return load(region, span, region->layout->span[span], FCDP_COUNT_WHOLE_LOADS);
}

/* A stream's wait for words also ends when a peer is gone (fcdp__region_end_waits). The next use of a region
 * checks for that; here no use follows, so the host waits for the words. The others write there again once
 * this stream has said that it has read (fill_permit). */
fcdp_status fcdp__region_read(fcdp_region *region, uint32_t span, fcdp_piece piece, fcdp_dptr to,
                              fcdp_event after) {
    fcdp_tiering *tiering = region->tiering;
    fcdp_stream h2d = region->streams[FCDP_TO_DEVICE];
    fcdp__region_lock(region);
    fcdp_span_state state = region->span[span];
    fcdp__region_unlock(region);
    fcdp_status status = FCDP_OK;
    if (state.stored && !state.whole && !is_alone(region))
        status = fcdp__board_wait_all(region->block, FCDP_STORED_WORD[span], state.epoch, region->name);
    if (!status) status = fcdp__driver_stream_wait(tiering->drv, h2d, after);
    if (!status) status = load_begin(region, span, false);
    if (!status) status = copy_sources(region, FCDP_TO_DEVICE, 1u << span, &(fcdp_source){to, piece}, 1, h2d);
    if (!status) status = fcdp__driver_event_record(tiering->drv, region->loaded, h2d);
    return status ? fail_unrecorded(region, status) : FCDP_OK;
}

static fcdp_status host_peek(fcdp_region *region, fcdp_piece piece, void *to) {
    fcdp_status status = fcdp__driver_event_sync(region->tiering->drv, region->stored);
    if (!status) memcpy(to, (const char *)fcdp__host_data(region->block) + piece.offset_bytes, piece.bytes);
    return status;
}

static fcdp_status device_peek(fcdp_region *region, fcdp_piece piece, void *to) {
    fcdp_driver *drv = region->tiering->drv;
    fcdp_stream d2h = region->streams[FCDP_TO_HOST];
    fcdp_dptr from = fcdp__dptr_add(fcdp__vrange_base(region->range), piece.offset_bytes);
    fcdp_status status = fcdp__driver_stream_wait(drv, d2h, region->ready);
    if (!status) status = fcdp__driver_copy_d2h(drv, to, from, piece.bytes, d2h);
    fcdp_status ended = fcdp__driver_stream_sync(drv, d2h); /* the caller may free `to` */
    return status ? status : ended;
}

/* Not waited for: one that keeps the region on its device stores it when it must, which may be never. The
 * acquire in board_read is the partner of the device's write of the word: after it, the other rank's bytes
 * are there. */
bool fcdp__region_others_stored(const fcdp_region *region, uint32_t span, uint32_t epoch) {
    if (is_alone(region)) return true;
    for (uint32_t i = 0; i < region->layout->n_slices; i++)
        if (i != region->slice &&
            (int32_t)(fcdp__board_read(region->block, FCDP_STORED_WORD[span], i) - epoch) < 0)
            return false;
    return true;
}

/* ---- the base of differences ---- */

/* Host memory first: there, what the program wrote into its copy is not. What is on the device serves where
 * another process may never store. */
fcdp_base fcdp__region_base_of(fcdp_region *region, uint32_t span, bool of_others) {
    fcdp__region_lock(region);
    fcdp_span_state state = region->span[span];
    fcdp__region_unlock(region);
    fcdp_base base = {.epoch = state.epoch, .of_others = of_others && !state.whole && !is_alone(region)};
    bool in_host = region->block && (state.stored || state.whole);
    if (state.on_device && base.of_others && !fcdp__region_others_stored(region, span, state.epoch))
        in_host = false;
    base.where = in_host ? FCDP_BASE_IN_HOST : state.on_device ? FCDP_BASE_ON_DEVICE : FCDP_BASE_NOWHERE;
    base.of_others = base.of_others && in_host;
    return base;
}

/* It is being moved meanwhile, so that the reclaimer leaves it where it is. */
fcdp_status fcdp__region_peek(fcdp_region *region, uint32_t span, fcdp_piece piece, void *to_out,
                              bool *has_out) {
    fcdp__region_lock(region);
    fcdp__region_begin_move(region);
    fcdp_span_state state = region->span[span];
    fcdp__region_unlock(region);
    bool in_host = region->block &&
                   (state.whole || (state.stored && fcdp__region_others_stored(region, span, state.epoch)));
    fcdp_status status = FCDP_OK;
    if (state.on_device)
        status = device_peek(region, piece, to_out);
    else if (in_host)
        status = host_peek(region, piece, to_out);
    *has_out = !status && (state.on_device || in_host);
    fcdp__region_lock(region);
    fcdp__region_end_move(region);
    fcdp__region_unlock(region);
    return status;
}

/* ---- eviction ---- */

/* Spans with bytes on the device that are not all in host memory. */
static uint32_t dirty_spans(const fcdp_region *region) {
    uint32_t mask = 0;
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
        const fcdp_span_state *span = &region->span[s];
        if (!span->on_device || span->whole || !region->layout->span[s].bytes) continue;
        if (!span->stored || !fcdp__region_others_stored(region, s, span->epoch)) mask |= 1u << s;
    }
    return mask;
}

bool fcdp__region_is_clean(const fcdp_region *region) {
    return dirty_spans(region) == 0;
}

/* This process alone writes every byte of the spans of `mask` to the host, and waits. Its own pieces are
 * among them, and the others may wait for those. */
static fcdp_status whole_store(fcdp_region *region, uint32_t mask) {
    fcdp_tiering *tiering = region->tiering;
    fcdp_stream d2h = region->streams[FCDP_TO_HOST];
    fcdp_piece pieces[FCDP_N_SPANS];
    size_t n = 0;
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (mask & 1u << s) pieces[n++] = region->layout->span[s];
    fcdp_status status = FCDP_OK;
    if (!region->block)
        return fcdp__fail(FCDP_ERR_UNSUPPORTED,
                          "'%s' lives in a file, and one process cannot write all of it", region->name);
    if (!is_alone(region))
        status = fcdp__board_wait_all(region->block, FCDP_BOARD_READY, region->n_fills, region->name);
    if (status) return status;
    status = copy_pieces(region, FCDP_TO_HOST, mask, (fcdp_piece_list){pieces, n});
    if (!status) status = words_write_stored(region, mask);
    if (!status) status = fcdp__driver_event_record(tiering->drv, region->stored, d2h);
    if (!status) status = fcdp__region_await(region);
    if (!status) return FCDP_OK;
    /* No copy may still run when this returns. */
    fcdp_failure failure = fcdp__failure_keep(status);
    (void)!fcdp__driver_stream_sync(tiering->drv, d2h);
    return fcdp__failure_restore(&failure);
}

/* Write only the spans of which the host lacks a part. The node's processes have written the others
 * together. */
fcdp_status fcdp__region_evict(fcdp_region *region) {
    fcdp_tiering *tiering = region->tiering;
    fcdp_status status = fcdp__region_await(region);
    fcdp__region_lock(region);
    uint32_t dirty = dirty_spans(region);
    fcdp__region_unlock(region);
    if (!status && dirty) status = whole_store(region, dirty);
    if (status) return status;
    fcdp__region_lock(region);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (dirty & 1u << s) region->span[s].stored = region->span[s].whole = true;
    region->slot->last = NULL; /* it was waited for */
    fcdp__region_trace(region, FCDP_EVENT_EVICT, FCDP_CAUSE_MEMORY_SHORT, region->slot->number,
                       spans_bytes(region, dirty));
    fcdp__region_give_slot(region);
    fcdp__count(&tiering->counts, FCDP_COUNT_EVICTIONS, 1);
    fcdp__region_unlock(region);
    return FCDP_OK;
}

/* ---- peers that do not come ---- */

fcdp_status fcdp__region_query_peers(fcdp_region *region, uint64_t waited_ns) {
    if (is_alone(region)) return FCDP_PENDING;
    fcdp__region_lock(region);
    uint32_t fill = region->awaited_fill, epochs[FCDP_N_SPANS];
    memcpy(epochs, region->awaited_epoch, sizeof epochs);
    fcdp__region_unlock(region);
    char what[256];
    snprintf(what, sizeof what, "the node's parts of '%.200s'", region->name);
    fcdp_status status = fcdp__board_query_all(region->block, FCDP_BOARD_READY, fill, what, waited_ns);
    for (uint32_t s = 0; s < FCDP_N_SPANS && status >= 0; s++)
        status = fcdp__board_query_all(region->block, FCDP_STORED_WORD[s], epochs[s], what, waited_ns);
    return status < 0 ? status : FCDP_PENDING;
}

void fcdp__region_end_waits(fcdp_region *region) {
    if (is_alone(region)) return;
    fcdp__region_lock(region);
    uint32_t fill = region->awaited_fill, epochs[FCDP_N_SPANS];
    memcpy(epochs, region->awaited_epoch, sizeof epochs);
    fcdp__region_unlock(region);
    fcdp__board_raise(region->block, FCDP_BOARD_READY, fill);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        fcdp__board_raise(region->block, FCDP_STORED_WORD[s], epochs[s]);
}
