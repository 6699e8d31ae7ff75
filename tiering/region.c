/* region.c - the state of one region, which no other file changes. slot.c chooses the region's slot, and
 * reclaim.c which region gives its pages back. */
#include "tiering/region.h"

#include "tiering/copy.h"
#include "tiering/slot.h"
#include "tiering/trace.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const fcdp_board_word STORED_WORD[FCDP_N_SPANS] = {FCDP_BOARD_STORED_0, FCDP_BOARD_STORED_1};

/* Lock held. */
static bool region_is_valid(const fcdp_region *region) {
    bool owns = region->slot && region->slot->owner == region;
    if ((region->in_use || region->kept) && !owns) return false;
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
        const fcdp_span_state *span = &region->span[s];
        if (span->on_device && !owns) return false;
        if (span->epoch == 0 && (span->on_device || span->stored || span->whole)) return false;
    }
    return region->moving || (region->slot != NULL) == fcdp__vrange_is_mapped(region->range);
}

void fcdp__region_begin_move(fcdp_region *region) {
    while (region->moving) fcdp__lock_wait(&region->tiering->lock, &region->tiering->moved);
    region->moving = true;
}

void fcdp__region_end_move(fcdp_region *region) {
    region->moving = false;
    pthread_cond_broadcast(&region->tiering->moved);
    FCDP_CHECK(3, region_is_valid(region));
}

static void region_lock(fcdp_region *region) {
    fcdp__lock_acquire(&region->tiering->lock);
}

static void region_unlock(fcdp_region *region) {
    FCDP_CHECK(3, region_is_valid(region));
    fcdp__region_trace_state(region);
    fcdp__lock_release(&region->tiering->lock);
}

/* ---- life ---- */

static fcdp_status region_check_args(const char *name, const fcdp_layout *layout, uint32_t slice,
                                     const fcdp_host_block *block) {
    if (slice >= layout->n_slices || !layout->bytes)
        return fcdp__fail(FCDP_ERR_INVALID, "region '%s': %zu bytes, slice %u of %u", name, layout->bytes,
                          slice, layout->n_slices);
    if (fcdp__host_data_bytes(block) < layout->bytes)
        return fcdp__fail(FCDP_ERR_INVALID, "region '%s' of %zu bytes over a host block of %zu", name,
                          layout->bytes, fcdp__host_data_bytes(block));
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (fcdp__board_read(block, STORED_WORD[s], slice))
            return fcdp__fail(FCDP_ERR_INVALID,
                              "region '%s': its host block served another region before; use a fresh one",
                              name);
    return FCDP_OK;
}

static void region_free(fcdp_region *region) {
    fcdp__region_trace_destroy(region);
    fcdp_event *const events[] = {&region->ready, &region->used, &region->loaded, &region->stored};
    for (size_t i = 0; i < sizeof events / sizeof *events; i++)
        if (*events[i]) fcdp__driver_event_destroy(region->tiering->drv, *events[i]);
    fcdp__readers_free(&region->readers, region->tiering->drv);
    fcdp__vrange_destroy(region->range);
    free(region->layout);
    free(region->name);
    free(region);
}

/* The region's addresses and events. The host may wait for these events, so they let it sleep. */
static fcdp_status region_make(fcdp_region *region) {
    fcdp_driver *drv = region->tiering->drv;
    size_t page_bytes = fcdp__driver_page_bytes(drv);
    fcdp_event *const events[] = {&region->ready, &region->used, &region->loaded, &region->stored};
    fcdp_status status = fcdp__vrange_create(
        drv, FCDP_SLOT_RATIO * fcdp__round_up(region->layout->bytes, page_bytes), &region->range);
    for (size_t i = 0; i < sizeof events / sizeof *events && !status; i++) {
        status = fcdp__driver_event_create_blocking(drv, events[i]);
        if (status) *events[i] = NULL;
    }
    return status;
}

fcdp_status fcdp__region_create(fcdp_tiering *tiering, const char *name, const fcdp_layout *layout,
                                uint32_t slice, fcdp_host_block *block, fcdp_region **region_out) {
    fcdp_status status = region_check_args(name, layout, slice, block);
    if (status) return status;
    size_t layout_bytes = sizeof *layout + layout->n_extents * sizeof layout->extents[0];
    fcdp_region *region = calloc(1, sizeof *region);
    if (!region) return fcdp__fail(FCDP_ERR_SYSTEM, "region '%s': no memory", name);
    region->tiering = tiering;
    region->streams = tiering->streams;
    region->slice = slice;
    region->block = block;
    region->name = strdup(name);
    region->layout = malloc(layout_bytes);
    if (region->layout) memcpy(region->layout, layout, layout_bytes);
    if (!region->name || !region->layout)
        status = fcdp__fail(FCDP_ERR_SYSTEM, "region '%s': no memory", name);
    else
        status = region_make(region);
    if (status) {
        region_free(region);
        return status;
    }
    fcdp__region_trace_create(region);
    region_lock(region);
    region->next = tiering->regions;
    tiering->regions = region;
    region_unlock(region);
    *region_out = region;
    return FCDP_OK;
}

/* Lock held: the region no longer owns its slot. */
static void slot_release(fcdp_region *region) {
    fcdp__slot_disown(region->slot);
    region->kept = region->in_use = false;
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) region->span[s].on_device = false;
}

fcdp_status fcdp__region_drain(const fcdp_region *region) {
    fcdp_tiering *tiering = region->tiering;
    fcdp_status status = FCDP_OK;
    for (int d = 0; d < FCDP_N_DIRECTIONS && region->unrecorded && !status; d++)
        status = FCDP_RETRY_ONCE(fcdp__driver_stream_sync(tiering->drv, region->streams[d]));
    return status ? status : FCDP_RETRY_ONCE(fcdp__region_await(region));
}

/* Its slot goes too if no other region is mapped onto it. */
void fcdp__region_destroy(fcdp_region *region) {
    if (!region) return;
    fcdp_tiering *tiering = region->tiering;
    region_lock(region);
    fcdp__region_begin_move(region);
    region_unlock(region);
    if (fcdp__region_drain(region))
        fcdp__log(FCDP_LOG_WARN, "'%s' is destroyed while the device may still use it: %s", region->name,
                  fcdp_error_text());
    if (region->slot && FCDP_RETRY_ONCE(fcdp__vrange_unmap(region->range)))
        fcdp__log(FCDP_LOG_WARN, "'%s' stays mapped: %s", region->name, fcdp_error_text());
    fcdp__lock_acquire(&tiering->lock);
    fcdp_slot *slot = region->slot;
    if (slot && slot->owner == region) slot_release(region);
    if (slot) fcdp__slot_trace(slot, FCDP_EVENT_REGION_UNMAP, region);
    fcdp__region_trace_state(region);
    fcdp_region **link = &tiering->regions;
    while (*link != region) link = &(*link)->next;
    *link = region->next;
    for (fcdp_slot *other = tiering->slots; other; other = other->next)
        if (other->last == region) other->last = NULL; /* its events have passed */
    if (slot && !--slot->n_mapped && !slot->owner && !slot->dissolving)
        (void)!fcdp__slot_dissolve(tiering, slot);
    fcdp__slot_drop_spare(region);
    pthread_cond_broadcast(&tiering->moved);
    fcdp__lock_release(&tiering->lock);
    region_free(region);
}

void fcdp__region_set_streams(fcdp_region *region, const fcdp_stream *streams) {
    region->streams = streams;
}

fcdp_dptr fcdp__region_base(const fcdp_region *region) {
    return fcdp__vrange_base(region->range);
}
fcdp_event fcdp__region_ready(const fcdp_region *region) {
    return region->ready;
}
fcdp_event fcdp__region_loaded(const fcdp_region *region) {
    return region->loaded;
}
fcdp_event fcdp__region_stored(const fcdp_region *region) {
    return region->stored;
}

void fcdp__region_state(fcdp_region *region, fcdp_region_state *state_out) {
    region_lock(region);
    *state_out = (fcdp_region_state){
        .mapped = region->slot != NULL, .in_use = region->in_use, .kept = region->kept};
    memcpy(state_out->span, region->span, sizeof state_out->span);
    region_unlock(region);
}

/* ---- waiting ---- */

fcdp_status fcdp__region_await(const fcdp_region *region) {
    const fcdp_event events[] = {region->ready, region->used, region->loaded, region->stored};
    fcdp_status status = FCDP_OK;
    for (size_t i = 0; i < sizeof events / sizeof *events && !status; i++)
        status = fcdp__driver_event_sync(region->tiering->drv, events[i]);
    return status ? status : fcdp__readers_sync(&region->readers, region->tiering->drv);
}

fcdp_status fcdp__region_query(const fcdp_region *region) {
    const fcdp_event events[] = {region->ready, region->used, region->loaded, region->stored};
    fcdp_status status = FCDP_OK;
    for (size_t i = 0; i < sizeof events / sizeof *events && !status; i++)
        status = fcdp__driver_event_query(region->tiering->drv, events[i]);
    return status ? status : fcdp__readers_query(&region->readers, region->tiering->drv);
}

static fcdp_status stream_wait_region(const fcdp_region *region, fcdp_stream stream) {
    const fcdp_event events[] = {region->ready, region->used, region->loaded, region->stored};
    fcdp_status status = FCDP_OK;
    for (size_t i = 0; i < sizeof events / sizeof *events && !status; i++)
        status = fcdp__driver_stream_wait(region->tiering->drv, stream, events[i]);
    return status ? status : fcdp__readers_stream_wait(&region->readers, region->tiering->drv, stream);
}

/* ---- pages ---- */

/* No slot was free. A region that needs pages is unmapped first, so that no thread that frees pages waits for
 * it. Making a slot may call the reclaimer on this thread; if that finds nothing, another thread may have
 * released a slot meanwhile. */
static fcdp_status slot_get(fcdp_region *region, fcdp_slot **slot_out) {
    fcdp_status status = region->slot ? fcdp__slot_unmap(region) : FCDP_OK;
    if (!status) status = fcdp__slot_make(region, slot_out);
    if (status != FCDP_ERR_NO_DEVICE_MEM) return status;
    region_lock(region);
    fcdp_slot *slot = fcdp__slot_choose(region);
    region_unlock(region);
    if (!slot) return status;
    *slot_out = slot;
    return FCDP_OK;
}

/* Waits while the region's slot dissolves, which needs no pages. The thread that dissolves it waits for
 * regions that are being moved, so a region must not begin to move and then wait for that slot's pages. */
fcdp_status fcdp__region_acquire(fcdp_region *region) {
    fcdp_status status = FCDP_OK;
    region_lock(region);
    FCDP_CHECK(1, !region->in_use);
    while (region->moving || (region->slot && region->slot->dissolving))
        fcdp__lock_wait(&region->tiering->lock, &region->tiering->moved);
    region->moving = true;
    region->last_use = ++region->tiering->clock;
    fcdp_slot *slot = region->kept ? region->slot : fcdp__slot_choose(region);
    region_unlock(region);
    if (!slot) status = slot_get(region, &slot);
    if (!status) status = fcdp__slot_map(region, slot);
    region_lock(region);
    region->in_use = !status;
    region->kept = region->ordered = false;
    if (!status) fcdp__region_trace_acquire(region, slot->last == region ? NULL : slot->last);
    if (status && slot) fcdp__slot_disown(slot); /* owned, and not mapped */
    fcdp__region_end_move(region);
    region_unlock(region);
    return status;
}

fcdp_status fcdp__region_order(fcdp_region *region, fcdp_stream stream) {
    region_lock(region); /* or the last slot might be destroyed meanwhile */
    FCDP_CHECK(1, region->in_use);
    const fcdp_region *last = region->slot->last;
    fcdp_status status = last ? stream_wait_region(last, stream) : FCDP_OK;
    region_unlock(region);
    return status;
}

/* Record events that come after all that was done with the pages. This includes what a failed call has
 * left on the copy streams and, where nothing in this use is known to have waited for it, the pages' last
 * user. */
static fcdp_status use_seal(fcdp_region *region, fcdp_stream stream) {
    fcdp_tiering *tiering = region->tiering;
    fcdp_status status = region->ordered ? FCDP_OK : fcdp__region_order(region, stream);
    if (region->unrecorded) {
        if (!status)
            status = fcdp__driver_event_record(tiering->drv, region->loaded, region->streams[FCDP_TO_DEVICE]);
        if (!status)
            status = fcdp__driver_event_record(tiering->drv, region->stored, region->streams[FCDP_TO_HOST]);
    }
    if (!status) status = fcdp__driver_event_record(tiering->drv, region->used, stream);
    region_lock(region);
    fcdp_status readers = fcdp__readers_record(&region->readers, tiering->drv);
    region_unlock(region);
    return status ? status : readers;
}

fcdp_status fcdp__regions_record_stream(fcdp_tiering *tiering, fcdp_dptr address, fcdp_stream stream) {
    fcdp_status status = FCDP_ERR_INVALID;
    fcdp__lock_acquire(&tiering->lock);
    fcdp_region *region = tiering->regions;
    while (region && address.addr - fcdp__region_base(region).addr >= region->layout->bytes)
        region = region->next;
    if (region && region->in_use) status = fcdp__readers_note(&region->readers, tiering->drv, stream);
    fcdp__lock_release(&tiering->lock);
    return status;
}

/* Where no event can say when the use ends, the host waits for the streams that take part. It waits for no
 * other stream, which may wait for peers that wait for this thread. */
fcdp_status fcdp__region_release(fcdp_region *region, fcdp_stream stream, bool keep) {
    region_lock(region);
    FCDP_CHECK(1, region->in_use);
    region_unlock(region);
    fcdp_status status = use_seal(region, stream);
    fcdp_region *last = status ? NULL : region;
    if (status) {
        status = fcdp__region_order(region, stream);
        if (!status) status = stream_wait_region(region, stream);
        if (!status) status = fcdp__driver_stream_sync(region->tiering->drv, stream);
        if (!status) status = fcdp__region_drain(region);
    }
    region->unrecorded = region->unrecorded && status;
    region_lock(region);
    fcdp__region_begin_move(region);
    region->kept = keep && !status;
    region->in_use = false;
    region->slot->last = last;
    bool kept = region->kept;
    uint8_t became = kept                     ? FCDP_CAUSE_KEPT
                     : region->tiering->exact ? FCDP_CAUSE_UNMAPPED
                                              : FCDP_CAUSE_PASSED_ON;
    fcdp__region_trace(region, FCDP_EVENT_RELEASE, became, region->slot->number, 0);
    if (!kept) slot_release(region);
    region_unlock(region);
    if (!kept) fcdp__slot_unmap_if_done(region);
    region_lock(region);
    fcdp__region_end_move(region);
    region_unlock(region);
    return status;
}

void fcdp__region_invalidate(fcdp_region *region, uint32_t span_mask) {
    region_lock(region);
    fcdp__region_begin_move(region);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (span_mask & 1u << s) region->span[s] = (fcdp_span_state){.epoch = region->span[s].epoch};
    fcdp__region_trace(region, FCDP_EVENT_INVALIDATE, 0, span_mask, 0);
    fcdp__region_end_move(region);
    region_unlock(region);
}

/* ---- what the host has ---- */

/* Spans with bytes on the device that are not all in host memory. The acquire in board_read is the partner of
 * the device's write of the word: after it, the other rank's bytes are there. */
static uint32_t dirty_spans(const fcdp_region *region) {
    uint32_t mask = 0;
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
        const fcdp_span_state *span = &region->span[s];
        if (!span->on_device || span->whole || !region->layout->span[s].bytes) continue;
        if (!span->stored) mask |= 1u << s;
        for (uint32_t i = 0; i < region->layout->n_slices; i++)
            if (i != region->slice &&
                (int32_t)(fcdp__board_read(region->block, STORED_WORD[s], i) - span->epoch) < 0)
                mask |= 1u << s;
    }
    return mask;
}

bool fcdp__region_is_clean(const fcdp_region *region) {
    return dirty_spans(region) == 0;
}

static bool is_alone(const fcdp_region *region) {
    return region->layout->n_slices == 1;
}

/* `stream` waits until the word of every other process has reached `value`. */
static fcdp_status words_await(fcdp_region *region, fcdp_board_word word, uint32_t value,
                               fcdp_stream stream) {
    fcdp_status status = FCDP_OK;
    region_lock(region);
    if (word == FCDP_BOARD_READY) region->awaited_fill = value;
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (word == STORED_WORD[s]) region->awaited_epoch[s] = value;
    region_unlock(region);
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
        if (span_mask & 1u << s) status = word_write(region, STORED_WORD[s], region->span[s].epoch, d2h);
    return status;
}

/* ---- copies ---- */

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
    region_lock(region);
    FCDP_CHECK(1, region->in_use);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (span_mask & 1u << s)
            region->span[s] = (fcdp_span_state){.on_device = true, .epoch = region->span[s].epoch + 1};
    fill_trace(region, span_mask);
    region_unlock(region);
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
    region_lock(region);
    tiering->stats.n_stores++;
    fcdp__trace_count(FCDP_COUNT_STORES, 1);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (span_mask & 1u << s) region->span[s].stored = true;
    region_unlock(region);
    return FCDP_OK;
}

fcdp_status fcdp__region_store(fcdp_region *region, uint32_t span_mask, fcdp_piece_list own,
                               fcdp_event after) {
    fcdp_status status = store_begin(region, after);
    if (!status) status = fcdp__region_copy(region, FCDP_TO_HOST, span_mask, own);
    return store_end(region, span_mask, status);
}

/* At first the new epoch is nowhere. Another thread may be evicting a kept region: its copy must end before
 * the others may write. */
fcdp_status fcdp__region_fill_host(fcdp_region *region, uint32_t span_mask, const fcdp_source *sources,
                                   size_t n, fcdp_event after) {
    region_lock(region);
    FCDP_CHECK(1, !region->in_use);
    fcdp__region_begin_move(region);
    region_unlock(region);
    fcdp_status status = fill_permit(region);
    region_lock(region);
    for (uint32_t s = 0; s < FCDP_N_SPANS && !status; s++)
        if (span_mask & 1u << s) region->span[s] = (fcdp_span_state){.epoch = region->span[s].epoch + 1};
    if (!status) fill_trace(region, span_mask);
    fcdp__region_end_move(region);
    region_unlock(region);
    if (status) return status;
    status = store_begin(region, after);
    if (!status) status = fcdp__region_copy_in(region, span_mask, sources, n);
    return store_end(region, span_mask, status);
}

fcdp_status fcdp__region_load_pieces(fcdp_region *region, uint32_t span_mask, fcdp_piece_list others) {
    fcdp_tiering *tiering = region->tiering;
    fcdp_stream h2d = region->streams[FCDP_TO_DEVICE];
    fcdp_status status = FCDP_OK;
    for (uint32_t s = 0; s < FCDP_N_SPANS && !status; s++)
        if (span_mask & 1u << s) status = words_await(region, STORED_WORD[s], region->span[s].epoch, h2d);
    if (!status) status = fcdp__region_copy(region, FCDP_TO_DEVICE, span_mask, others);
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
    region_lock(region);
    FCDP_CHECK(1, region->in_use == in_use && span < FCDP_N_SPANS);
    fcdp_span_state state = region->span[span];
    region_unlock(region);
    if (!state.stored && !state.whole)
        return fcdp__fail(FCDP_ERR_INVALID, "region '%s': span %u of epoch %u is nowhere; gather it",
                          region->name, span, state.epoch);
    fcdp_status status = fcdp__driver_stream_wait(tiering->drv, h2d, region->stored);
    if (!status && !state.whole) status = words_await(region, STORED_WORD[span], state.epoch, h2d);
    return status;
}

static fcdp_status load(fcdp_region *region, uint32_t span, fcdp_piece piece, uint64_t *counter) {
    fcdp_tiering *tiering = region->tiering;
    fcdp_stream h2d = region->streams[FCDP_TO_DEVICE];
    fcdp_status status = load_begin(region, span, true);
    if (!status) status = fcdp__region_copy(region, FCDP_TO_DEVICE, 1u << span, (fcdp_piece_list){&piece, 1});
    if (!status) status = fcdp__driver_event_record(tiering->drv, region->loaded, h2d);
    if (status) return fail_unrecorded(region, status);
    region->ordered = true;
    region_lock(region);
    ++*counter;
    fcdp__trace_count(
        counter == &tiering->stats.n_whole_loads ? FCDP_COUNT_WHOLE_LOADS : FCDP_COUNT_SLICE_LOADS, 1);
    region->span[span].on_device = true;
    region_unlock(region);
    return FCDP_OK;
}

fcdp_status fcdp__region_load_slice(fcdp_region *region, uint32_t span) {
    fcdp_piece slice = fcdp__layout_slice(region->layout, span, region->slice);
    return load(region, span, slice, &region->tiering->stats.n_slice_loads);
}

fcdp_status fcdp__region_load_whole(fcdp_region *region, uint32_t span) {
    return load(region, span, region->layout->span[span], &region->tiering->stats.n_whole_loads);
}

/* A stream's wait for words also ends when a peer is gone (fcdp__region_end_waits). The next use of a region
 * checks for that; here no use follows, so the host waits for the words. The others write there again once
 * this stream has said that it has read (fill_permit). */
fcdp_status fcdp__region_read(fcdp_region *region, uint32_t span, fcdp_piece piece, fcdp_dptr to,
                              fcdp_event after) {
    fcdp_tiering *tiering = region->tiering;
    fcdp_stream h2d = region->streams[FCDP_TO_DEVICE];
    region_lock(region);
    fcdp_span_state state = region->span[span];
    region_unlock(region);
    fcdp_status status = FCDP_OK;
    if (state.stored && !state.whole && !is_alone(region))
        status = fcdp__board_wait_all(region->block, STORED_WORD[span], state.epoch, region->name);
    if (!status) status = fcdp__driver_stream_wait(tiering->drv, h2d, after);
    if (!status) status = load_begin(region, span, false);
    if (!status) status = fcdp__region_copy_out(region, 1u << span, piece, to);
    if (!status) status = fcdp__driver_event_record(tiering->drv, region->loaded, h2d);
    return status ? fail_unrecorded(region, status) : FCDP_OK;
}

/* ---- eviction ---- */

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
    if (!is_alone(region))
        status = fcdp__board_wait_all(region->block, FCDP_BOARD_READY, region->n_fills, region->name);
    if (status) return status;
    status = fcdp__region_copy(region, FCDP_TO_HOST, mask, (fcdp_piece_list){pieces, n});
    if (!status) status = words_write_stored(region, mask);
    if (!status) status = fcdp__driver_event_record(tiering->drv, region->stored, d2h);
    if (!status) return fcdp__driver_event_sync(tiering->drv, region->stored);
    /* No copy may still run when this returns. */
    fcdp_failure failure = fcdp__failure_keep(status);
    (void)!fcdp__driver_stream_sync(tiering->drv, d2h);
    return fcdp__failure_restore(&failure);
}

static uint64_t spans_bytes(const fcdp_region *region, uint32_t mask) {
    uint64_t bytes = 0;
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (mask & 1u << s) bytes += region->layout->span[s].bytes;
    return bytes;
}

/* Write only the spans of which the host lacks a part. The node's processes have written the others
 * together. */
fcdp_status fcdp__region_evict(fcdp_region *region) {
    fcdp_tiering *tiering = region->tiering;
    fcdp_status status = fcdp__region_await(region);
    region_lock(region);
    uint32_t dirty = dirty_spans(region);
    region_unlock(region);
    if (!status && dirty) status = whole_store(region, dirty);
    if (status) return status;
    region_lock(region);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (dirty & 1u << s) region->span[s].stored = region->span[s].whole = true;
    region->slot->last = NULL; /* it was waited for */
    fcdp__region_trace(region, FCDP_EVENT_EVICT, FCDP_CAUSE_MEMORY_SHORT, region->slot->number,
                       spans_bytes(region, dirty));
    slot_release(region);
    tiering->stats.n_evictions++;
    fcdp__trace_count(FCDP_COUNT_EVICTIONS, 1);
    region_unlock(region);
    return FCDP_OK;
}

fcdp_status fcdp__region_query_peers(fcdp_region *region, uint64_t waited_ns) {
    if (is_alone(region)) return FCDP_PENDING;
    region_lock(region);
    uint32_t fill = region->awaited_fill, epochs[FCDP_N_SPANS];
    memcpy(epochs, region->awaited_epoch, sizeof epochs);
    region_unlock(region);
    char what[256];
    snprintf(what, sizeof what, "the node's parts of '%.200s'", region->name);
    fcdp_status status = fcdp__board_query_all(region->block, FCDP_BOARD_READY, fill, what, waited_ns);
    for (uint32_t s = 0; s < FCDP_N_SPANS && status >= 0; s++)
        status = fcdp__board_query_all(region->block, STORED_WORD[s], epochs[s], what, waited_ns);
    return status < 0 ? status : FCDP_PENDING;
}

void fcdp__region_end_waits(fcdp_region *region) {
    if (is_alone(region)) return;
    region_lock(region);
    uint32_t fill = region->awaited_fill, epochs[FCDP_N_SPANS];
    memcpy(epochs, region->awaited_epoch, sizeof epochs);
    region_unlock(region);
    fcdp__board_raise(region->block, FCDP_BOARD_READY, fill);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) fcdp__board_raise(region->block, STORED_WORD[s], epochs[s]);
}
