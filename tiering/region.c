/* region.c - the life of a region and its pages: acquired, ordered, released, passed on.
 *
 * With region_host.c it is the only writer of a region's state. A use of a region ends with events, and the
 * next region on the same pages begins behind them, so in the steady state no thread waits. slot.c chooses
 * the region's slot and maps it, tiering.c which region gives its pages back; this file knows no policy.
 */
#include "tiering/region.h"

#include "tiering/schedule.h"
#include "tiering/slot.h"
#include "tiering/trace.h"

#include <stdlib.h>
#include <string.h>

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

void fcdp__region_lock(fcdp_region *region) {
    fcdp__lock_acquire(&region->tiering->lock);
}

void fcdp__region_unlock(fcdp_region *region) {
    FCDP_CHECK(3, region_is_valid(region));
    fcdp__region_trace_state(region);
    fcdp__lock_release(&region->tiering->lock);
}

/* ---- other streams that read it ---- */

/* Waits walk the list without the lock, so an entry is published whole, stays until the region is destroyed,
 * and serves all later uses by its stream. Lock held: `stream` reads the region in the current use. */
static fcdp_status readers_note(fcdp_readers *readers, fcdp_driver *drv, fcdp_stream stream) {
    fcdp_reader *reader = atomic_load_explicit(readers, memory_order_relaxed);
    while (reader && reader->stream != stream) reader = reader->next;
    if (!reader) {
        reader = calloc(1, sizeof *reader);
        if (!reader) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a stream that reads parameters");
        fcdp_status status = fcdp__driver_event_create_blocking(drv, &reader->done);
        if (status) {
            free(reader);
            return status;
        }
        reader->stream = stream;
        reader->next = atomic_load_explicit(readers, memory_order_relaxed);
        atomic_store_explicit(readers, reader, memory_order_release); /* partner: readers_first */
    }
    reader->noted = true;
    return FCDP_OK;
}

/* Lock held: the use ends. */
static fcdp_status readers_record(fcdp_readers *readers, fcdp_driver *drv) {
    fcdp_status first_failure = FCDP_OK;
    for (fcdp_reader *r = atomic_load_explicit(readers, memory_order_relaxed); r; r = r->next) {
        if (!r->noted) continue;
        fcdp_status status = fcdp__driver_event_record(drv, r->done, r->stream);
        if (status) status = fcdp__driver_stream_sync(drv, r->stream);
        r->noted = status != FCDP_OK;
        if (!first_failure) first_failure = status;
    }
    return first_failure;
}

static const fcdp_reader *readers_first(const fcdp_readers *readers) {
    return atomic_load_explicit(readers, memory_order_acquire); /* partner: readers_note */
}

/* Without the lock: `stream` goes on behind what was recorded. */
static fcdp_status readers_stream_wait(const fcdp_readers *readers, fcdp_driver *drv, fcdp_stream stream) {
    fcdp_status status = FCDP_OK;
    for (const fcdp_reader *r = readers_first(readers); r && !status; r = r->next)
        status = fcdp__driver_stream_wait(drv, stream, r->done);
    return status;
}

static fcdp_status readers_sync(const fcdp_readers *readers, fcdp_driver *drv) {
    fcdp_status status = FCDP_OK;
    for (const fcdp_reader *r = readers_first(readers); r && !status; r = r->next)
        status = fcdp__driver_event_sync(drv, r->done);
    return status;
}

static fcdp_status readers_query(const fcdp_readers *readers, fcdp_driver *drv) {
    fcdp_status status = FCDP_OK;
    for (const fcdp_reader *r = readers_first(readers); r && !status; r = r->next)
        status = fcdp__driver_event_query(drv, r->done);
    return status;
}

static void readers_free(fcdp_readers *readers, fcdp_driver *drv) {
    fcdp_reader *reader = atomic_load_explicit(readers, memory_order_relaxed);
    while (reader) {
        fcdp_reader *next = reader->next;
        fcdp__driver_event_destroy(drv, reader->done);
        free(reader);
        reader = next;
    }
}

/* ---- life ---- */

static fcdp_status region_check_args(const char *name, const fcdp_layout *layout, uint32_t slice,
                                     const fcdp_host_block *block) {
    if (slice >= layout->n_slices || !layout->bytes)
        return fcdp__fail(FCDP_ERR_INVALID, "region '%s': %zu bytes, slice %u of %u", name, layout->bytes,
                          slice, layout->n_slices);
    if (!block) return FCDP_OK;
    if (fcdp__host_data_bytes(block) < layout->bytes)
        return fcdp__fail(FCDP_ERR_INVALID, "region '%s' of %zu bytes over a host block of %zu", name,
                          layout->bytes, fcdp__host_data_bytes(block));
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (fcdp__board_read(block, FCDP_STORED_WORD[s], slice))
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
    readers_free(&region->readers, region->tiering->drv);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) fcdp__spill_release(region->spilled[s]);
    fcdp__vrange_destroy(region->range);
    free(region->layout);
    free(region->name);
    free(region);
}

static fcdp_status slices_reserve(fcdp_region *region, fcdp_spill *spill) {
    fcdp_status status = FCDP_OK;
    for (uint32_t s = 0; s < FCDP_N_SPANS && !status; s++) {
        fcdp_piece slice = fcdp__layout_slice(region->layout, s, region->slice);
        if (slice.bytes)
            status = fcdp__spill_reserve(spill, region->name, region->object, slice.bytes,
                                         &region->spilled[s]);
    }
    return status;
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

static fcdp_status region_create(fcdp_tiering *tiering, const char *name, const fcdp_layout *layout,
                                 uint32_t slice, fcdp_host_block *block, fcdp_spill *spill,
                                 fcdp_region **region_out) {
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
    if (spill) status = slices_reserve(region, spill);
    if (status) {
        region_free(region);
        return status;
    }
    fcdp__region_lock(region);
    region->next = tiering->regions;
    tiering->regions = region;
    fcdp__schedule_forget(tiering);
    fcdp__region_unlock(region);
    *region_out = region;
    return FCDP_OK;
}

fcdp_status fcdp__region_create(fcdp_tiering *tiering, const char *name, const fcdp_layout *layout,
                                uint32_t slice, fcdp_host_block *block, fcdp_region **region_out) {
    return region_create(tiering, name, layout, slice, block, NULL, region_out);
}

fcdp_status fcdp__region_create_spilled(fcdp_tiering *tiering, const char *name, const fcdp_layout *layout,
                                        uint32_t slice, fcdp_spill *spill, fcdp_region **region_out) {
    return region_create(tiering, name, layout, slice, NULL, spill, region_out);
}

bool fcdp__region_is_spilled(const fcdp_region *region) {
    return !region->block;
}

static void spans_drop(fcdp_region *region) {
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) region->span[s].on_device = false;
}

void fcdp__region_give_slot(fcdp_region *region) {
    fcdp__slot_disown(region->slot);
    region->kept = region->in_use = false;
    spans_drop(region);
}

/* Its slot goes too if no other region is mapped onto it. */
void fcdp__region_destroy(fcdp_region *region) {
    if (!region) return;
    fcdp_tiering *tiering = region->tiering;
    fcdp__region_lock(region);
    fcdp__region_begin_move(region);
    fcdp__region_unlock(region);
    if (fcdp__region_drain(region))
        fcdp__log(FCDP_LOG_WARN, "'%s' is destroyed while the device may still use it: %s",
                  fcdp__name_text(region->name), fcdp_error_text());
    if (region->slot && FCDP_RETRY_ONCE(fcdp__vrange_unmap(region->range)))
        fcdp__log(FCDP_LOG_WARN, "the device memory of '%s' cannot be unmapped: %s; this is tried once more",
                  fcdp__name_text(region->name), fcdp_error_text());
    fcdp__lock_acquire(&tiering->lock);
    fcdp_slot *slot = region->slot, *mapped = slot && slot->on_host ? slot : NULL;
    if (mapped) slot = region->slot = NULL;
    if (slot && slot->owner == region) fcdp__region_give_slot(region);
    if (slot) fcdp__slot_trace(slot, FCDP_EVENT_REGION_UNMAP, region);
    if (mapped) region->kept = region->in_use = false;
    if (mapped) spans_drop(region);
    fcdp__region_trace_state(region);
    fcdp_region **link = &tiering->regions;
    while (*link != region) link = &(*link)->next;
    *link = region->next;
    fcdp__schedule_forget(tiering);
    for (fcdp_slot *other = tiering->slots; other; other = other->next)
        if (other->last == region) other->last = NULL; /* its events have passed */
    if (slot && !--slot->n_mapped && !slot->owner && !slot->dissolving)
        (void)!fcdp__slot_dissolve(tiering, slot);
    fcdp__slot_drop_spare(region);
    pthread_cond_broadcast(&tiering->moved);
    fcdp__lock_release(&tiering->lock);
    if (mapped) fcdp__mapped_free(tiering, region->account, mapped);
    region_free(region);
}

void fcdp__region_set_streams(fcdp_region *region, const fcdp_stream *streams) {
    region->streams = streams;
}

void fcdp__region_set_tier(fcdp_region *region, fcdp_tier tier) {
    fcdp__region_lock(region);
    region->tier = tier;
    fcdp__region_unlock(region);
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
    fcdp__region_lock(region);
    *state_out = (fcdp_region_state){
        .mapped = region->slot != NULL, .in_use = region->in_use, .kept = region->kept};
    memcpy(state_out->span, region->span, sizeof state_out->span);
    fcdp__region_unlock(region);
}

/* ---- waiting ---- */

static fcdp_status region_sync(const fcdp_region *region) {
    const fcdp_event events[] = {region->ready, region->used, region->loaded, region->stored};
    fcdp_status status = FCDP_OK;
    for (size_t i = 0; i < sizeof events / sizeof *events && !status; i++)
        status = fcdp__driver_event_sync(region->tiering->drv, events[i]);
    return status ? status : readers_sync(&region->readers, region->tiering->drv);
}

fcdp_status fcdp__region_query(const fcdp_region *region) {
    const fcdp_event events[] = {region->ready, region->used, region->loaded, region->stored};
    fcdp_status status = FCDP_OK;
    for (size_t i = 0; i < sizeof events / sizeof *events && !status; i++)
        status = fcdp__driver_event_query(region->tiering->drv, events[i]);
    return status ? status : readers_query(&region->readers, region->tiering->drv);
}

fcdp_status fcdp__region_await(const fcdp_region *region) {
    fcdp_counts *counts = &region->tiering->counts;
    fcdp_status status = fcdp__region_query(region);
    if (status != FCDP_PENDING) return status;
    uint64_t start_ns = fcdp__now_ns();
    status = region_sync(region);
    fcdp__count(counts, FCDP_COUNT_MEMORY_WAITS, 1);
    fcdp__count(counts, FCDP_COUNT_MEMORY_WAIT_NS, fcdp__now_ns() - start_ns);
    return status;
}

fcdp_status fcdp__region_drain(const fcdp_region *region) {
    fcdp_tiering *tiering = region->tiering;
    fcdp_status status = FCDP_OK;
    for (int d = 0; d < FCDP_N_DIRECTIONS && region->unrecorded && !status; d++)
        status = FCDP_RETRY_ONCE(fcdp__driver_stream_sync(tiering->drv, region->streams[d]));
    return status ? status : FCDP_RETRY_ONCE(region_sync(region));
}

static fcdp_status stream_wait_region(const fcdp_region *region, fcdp_stream stream) {
    const fcdp_event events[] = {region->ready, region->used, region->loaded, region->stored};
    fcdp_status status = FCDP_OK;
    for (size_t i = 0; i < sizeof events / sizeof *events && !status; i++)
        status = fcdp__driver_stream_wait(region->tiering->drv, stream, events[i]);
    return status ? status : readers_stream_wait(&region->readers, region->tiering->drv, stream);
}

/* ---- pages ---- */

/* No slot was free. A region that needs pages is unmapped first, so that no thread that frees pages waits for
 * it. Making a slot may call the reclaimer on this thread; if that finds nothing, another thread may have
 * released a slot meanwhile. */
static fcdp_status slot_get(fcdp_region *region, fcdp_slot **slot_out) {
    fcdp_status status = region->slot ? fcdp__slot_unmap(region) : FCDP_OK;
    if (!status) status = fcdp__slot_make(region, slot_out);
    if (status != FCDP_ERR_NO_DEVICE_MEM) return status;
    fcdp__region_lock(region);
    fcdp_slot *slot = fcdp__slot_choose(region);
    fcdp__region_unlock(region);
    if (!slot) return status;
    *slot_out = slot;
    return FCDP_OK;
}

/* Waits while the region's slot dissolves, which needs no pages. The thread that dissolves it waits for
 * regions that are being moved, so a region must not begin to move and then wait for that slot's pages. */
fcdp_status fcdp__region_acquire(fcdp_region *region) {
    fcdp_status status = FCDP_OK;
    fcdp__schedule_prepare(region->tiering);
    fcdp__region_lock(region);
    FCDP_CHECK(1, !region->in_use);
    while (region->moving || (region->slot && region->slot->dissolving))
        fcdp__lock_wait(&region->tiering->lock, &region->tiering->moved);
    region->moving = true;
    region->last_use = ++region->tiering->clock;
    fcdp__schedule_record(region);
    fcdp_slot *slot = region->kept ? region->slot : fcdp__slot_choose(region);
    fcdp__region_unlock(region);
    if (!slot) status = slot_get(region, &slot);
    if (!status) status = fcdp__slot_map(region, slot);
    fcdp__region_lock(region);
    region->in_use = !status;
    region->kept = region->ordered = false;
    if (!status) fcdp__region_trace_acquire(region, slot->last == region ? NULL : slot->last);
    if (status && slot) fcdp__slot_disown(slot); /* owned, and not mapped */
    fcdp__region_end_move(region);
    fcdp__region_unlock(region);
    fcdp__schedule_sample(region->tiering, 0);
    return status;
}

fcdp_status fcdp__region_order(fcdp_region *region, fcdp_stream stream) {
    fcdp__region_lock(region); /* or the last slot might be destroyed meanwhile */
    FCDP_CHECK(1, region->in_use);
    const fcdp_region *last = region->slot->last;
    fcdp_status status = last ? stream_wait_region(last, stream) : FCDP_OK;
    fcdp__region_unlock(region);
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
    fcdp__region_lock(region);
    fcdp_status readers = readers_record(&region->readers, tiering->drv);
    fcdp__region_unlock(region);
    return status ? status : readers;
}

fcdp_status fcdp__regions_record_stream(fcdp_tiering *tiering, fcdp_dptr address, fcdp_stream stream) {
    fcdp_status status = FCDP_ERR_INVALID;
    fcdp__lock_acquire(&tiering->lock);
    fcdp_region *region = tiering->regions;
    while (region && address.addr - fcdp__region_base(region).addr >= region->layout->bytes)
        region = region->next;
    if (region && region->in_use) status = readers_note(&region->readers, tiering->drv, stream);
    fcdp__lock_release(&tiering->lock);
    return status;
}

/* Where no event can say when the use ends, the host waits for the streams that take part. It waits for no
 * other stream, which may wait for peers that wait for this thread. */
fcdp_status fcdp__region_release(fcdp_region *region, fcdp_stream stream, bool keep) {
    fcdp__region_lock(region);
    FCDP_CHECK(1, region->in_use);
    fcdp__region_unlock(region);
    fcdp__schedule_sample(region->tiering, 0);
    fcdp_status status = use_seal(region, stream);
    fcdp_region *last = status ? NULL : region;
    if (status) {
        status = fcdp__region_order(region, stream);
        if (!status) status = stream_wait_region(region, stream);
        if (!status) status = fcdp__driver_stream_sync(region->tiering->drv, stream);
        if (!status) status = fcdp__region_drain(region);
    }
    region->unrecorded = region->unrecorded && status;
    fcdp__region_lock(region);
    fcdp__region_begin_move(region);
    bool holds = keep && !status;
    region->kept = holds || region->slot->on_host;
    region->in_use = false;
    region->slot->last = last;
    fcdp__schedule_note_release(region);
    bool kept = region->kept;
    uint8_t became = kept                     ? FCDP_CAUSE_KEPT
                     : region->tiering->exact ? FCDP_CAUSE_UNMAPPED
                                              : FCDP_CAUSE_PASSED_ON;
    fcdp__region_trace(region, FCDP_EVENT_RELEASE, became, region->slot->number, 0);
    if (!kept)
        fcdp__region_give_slot(region);
    else if (!holds)
        spans_drop(region);
    fcdp__region_unlock(region);
    if (!kept) fcdp__slot_unmap_if_done(region);
    fcdp__region_lock(region);
    fcdp__region_end_move(region);
    fcdp__region_unlock(region);
    return status;
}

void fcdp__region_invalidate(fcdp_region *region, uint32_t span_mask) {
    fcdp__region_lock(region);
    fcdp__region_begin_move(region);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (span_mask & 1u << s) region->span[s] = (fcdp_span_state){.epoch = region->span[s].epoch};
    fcdp__region_trace(region, FCDP_EVENT_INVALIDATE, 0, span_mask, 0);
    fcdp__region_end_move(region);
    fcdp__region_unlock(region);
}
