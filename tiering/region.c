/* region.c - the state of one region, and the only code that changes it. Whose pages are taken back is
 * reclaim.c's choice. */
#include "tiering/region_internal.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_COPIES = FCDP_N_SPANS * FCDP_MAX_SLICES };

static const fcdp_board_word STORED_WORD[FCDP_N_SPANS] = {FCDP_BOARD_STORED_0, FCDP_BOARD_STORED_1};

/* Lock held. */
static bool region_is_valid(const fcdp_region *region) {
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
        const fcdp_span_state *span = &region->span[s];
        if (span->on_device && !region->mapped) return false;
        if (span->whole_on_host && !span->slice_on_host) return false;
        if (span->slice_on_host && !region->block) return false;
        if (span->epoch == 0 && (span->on_device || span->slice_on_host)) return false;
    }
    return region->moving || region->mapped == fcdp__vrange_is_mapped(region->range);
}

void fcdp__region_enter(fcdp_region *region) {
    while (region->moving) fcdp__lock_wait(&region->tiering->lock, &region->tiering->moved);
    region->moving = true;
}

void fcdp__region_leave(fcdp_region *region) {
    region->moving = false;
    pthread_cond_broadcast(&region->tiering->moved);
    FCDP_CHECK(3, region_is_valid(region));
}

static void region_lock(fcdp_region *region) {
    fcdp__lock_acquire(&region->tiering->lock);
}

static void region_unlock(fcdp_region *region) {
    FCDP_CHECK(3, region_is_valid(region));
    fcdp__lock_release(&region->tiering->lock);
}

/* ---- what the host has ---- */

static bool slice_is_stored(const fcdp_region *region, uint32_t s, uint32_t slice) {
    if (!region->block) return false;
    if (slice == region->slice) return region->span[s].slice_on_host;
    /* Acquire in board_read, partner of the publish in stored_publish: the peer's bytes are there. */
    return (int32_t)(fcdp__board_read(region->block, STORED_WORD[s], slice) - region->span[s].epoch) >= 0;
}

static bool span_is_clean(const fcdp_region *region, uint32_t s) {
    const fcdp_span_state *span = &region->span[s];
    if (!span->on_device || span->whole_on_host || !region->layout->span[s].bytes) return true;
    for (uint32_t i = 0; i < region->layout->n_slices; i++)
        if (!slice_is_stored(region, s, i)) return false;
    return true;
}

bool fcdp__region_is_clean(const fcdp_region *region) {
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (!span_is_clean(region, s)) return false;
    return true;
}

static fcdp_copy piece_copy(const fcdp_region *region, fcdp_piece piece) {
    char *data = region->block ? fcdp__host_data(region->block) : NULL;
    return (fcdp_copy){fcdp__dptr_add(fcdp__vrange_base(region->range), piece.offset_bytes),
                       data + piece.offset_bytes, piece.bytes};
}

/* The slices of span `s` that the host lacks, neighbours as one copy. Lock held. */
static size_t missing_slices(const fcdp_region *region, uint32_t s, fcdp_copy *copies) {
    size_t n = 0;
    bool joins = false;
    for (uint32_t i = 0; i < region->layout->n_slices; i++) {
        if (slice_is_stored(region, s, i)) {
            joins = false;
            continue;
        }
        fcdp_piece piece = fcdp__layout_slice(region->layout, s, i);
        if (joins)
            copies[n - 1].bytes += piece.bytes;
        else
            copies[n++] = piece_copy(region, piece);
        joins = true;
    }
    return n;
}

static void stored_publish(fcdp_region *region, uint32_t s, uint32_t epoch) {
    fcdp__board_publish(region->block, STORED_WORD[s], epoch);
}

/* The copies of the spans in `mask` have landed: say so to the peers, then to ourselves. Entered, lock not
 * held. */
static void spans_stored(fcdp_region *region, uint32_t mask, bool whole) {
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (mask & 1u << s)
            stored_publish(region, s,
                           region->span[s].epoch); /* only the thread that moves changes an epoch */
    region_lock(region);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
        if (!(mask & 1u << s)) continue;
        region->span[s].slice_on_host = true;
        region->span[s].whole_on_host |= whole;
    }
    region_unlock(region);
}

/* ---- life ---- */

static fcdp_status region_check_args(const char *name, const fcdp_layout *layout, uint32_t slice,
                                     const fcdp_host_block *block) {
    if (slice >= layout->n_slices || !layout->bytes)
        return fcdp__fail(FCDP_ERR_INVALID, "region '%s': %zu bytes, slice %u of %u", name, layout->bytes, slice,
                          layout->n_slices);
    if (!block) return FCDP_OK;
    if (fcdp__host_data_bytes(block) < layout->bytes)
        return fcdp__fail(FCDP_ERR_INVALID, "region '%s' of %zu bytes over a host block of %zu", name,
                          layout->bytes, fcdp__host_data_bytes(block));
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (fcdp__board_read(block, STORED_WORD[s], slice))
            return fcdp__fail(FCDP_ERR_INVALID,
                              "region '%s': its host block served another region before; carve a fresh one",
                              name);
    return FCDP_OK;
}

static void region_free(fcdp_region *region) {
    fcdp__vrange_destroy(region->range);
    free(region->layout);
    free(region->name);
    free(region);
}

fcdp_status fcdp__region_create(fcdp_tiering *tiering, const char *name, const fcdp_layout *layout,
                                uint32_t slice, fcdp_host_block *block, fcdp_region **region_out) {
    fcdp_status status = region_check_args(name, layout, slice, block);
    if (status) return status;
    size_t layout_bytes = sizeof *layout + layout->n_extents * sizeof layout->extents[0];
    fcdp_region *region = calloc(1, sizeof *region);
    if (!region) return fcdp__fail(FCDP_ERR_SYSTEM, "region '%s': no memory", name);
    region->tiering = tiering;
    region->slice = slice;
    region->block = block;
    region->name = strdup(name);
    region->layout = malloc(layout_bytes);
    if (!region->name || !region->layout)
        status = fcdp__fail(FCDP_ERR_SYSTEM, "region '%s': no memory", name);
    else
        status = fcdp__vrange_create(tiering->drv, tiering->pool, layout->bytes, &region->range);
    if (status) {
        region_free(region);
        return status;
    }
    memcpy(region->layout, layout, layout_bytes);
    region_lock(region);
    region->next = tiering->regions;
    tiering->regions = region;
    tiering->n_regions++;
    region_unlock(region);
    *region_out = region;
    return FCDP_OK;
}

void fcdp__region_destroy(fcdp_region *region) {
    if (!region) return;
    fcdp_tiering *tiering = region->tiering;
    region_lock(region);
    FCDP_CHECK(1, region->n_uses == 0);
    fcdp__region_enter(region);
    fcdp_region **link = &tiering->regions;
    while (*link != region) link = &(*link)->next;
    *link = region->next;
    tiering->n_regions--;
    fcdp__lock_release(&tiering->lock);
    region_free(region);
    /* A reclaimer may be waiting for this region's move to end: its pages are in the pool now. */
    fcdp__lock_acquire(&tiering->lock);
    pthread_cond_broadcast(&tiering->moved);
    fcdp__lock_release(&tiering->lock);
}

const char *fcdp__region_name(const fcdp_region *region) {
    return region->name;
}
fcdp_dptr fcdp__region_base(const fcdp_region *region) {
    return fcdp__vrange_base(region->range);
}
const fcdp_layout *fcdp__region_layout(const fcdp_region *region) {
    return region->layout;
}

void fcdp__region_state(fcdp_region *region, fcdp_region_state *state_out) {
    region_lock(region);
    *state_out = (fcdp_region_state){.mapped = region->mapped, .in_use = region->n_uses > 0};
    memcpy(state_out->span, region->span, sizeof state_out->span);
    region_unlock(region);
}

/* ---- use ---- */

fcdp_status fcdp__region_begin_use(fcdp_region *region) {
    fcdp_status status = FCDP_OK;
    region_lock(region);
    fcdp__region_enter(region);
    region->n_uses++;
    region->last_use = ++region->tiering->clock;
    if (!region->mapped) {
        region_unlock(region);
        status = fcdp__vrange_map(region->range); /* may call the reclaimer on this thread */
        region_lock(region);
        region->mapped = !status;
        if (status) region->n_uses--;
    }
    fcdp__region_leave(region);
    region_unlock(region);
    return status;
}

void fcdp__region_end_use(fcdp_region *region) {
    region_lock(region);
    FCDP_CHECK(1, region->n_uses > 0);
    region->n_uses--;
    region_unlock(region);
}

void fcdp__region_invalidate(fcdp_region *region, uint32_t span_mask) {
    region_lock(region);
    fcdp__region_enter(region);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (span_mask & 1u << s) region->span[s] = (fcdp_span_state){.epoch = region->span[s].epoch};
    fcdp__region_leave(region);
    region_unlock(region);
}

void fcdp__region_filled(fcdp_region *region, uint32_t span_mask) {
    region_lock(region);
    FCDP_CHECK(1, region->n_uses > 0);
    fcdp__region_enter(region);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (span_mask & 1u << s)
            region->span[s] = (fcdp_span_state){.on_device = true, .epoch = region->span[s].epoch + 1};
    fcdp__region_leave(region);
    region_unlock(region);
}

/* ---- a fill through the host ---- */

static fcdp_status pieces_copy(fcdp_region *region, fcdp_direction direction, const fcdp_region_piece *pieces,
                               size_t n, fcdp_event after) {
    if (!region->block)
        return fcdp__fail(FCDP_ERR_INVALID, "region '%s' has no host memory to be gathered through",
                          region->name);
    fcdp_copy *copies = malloc((n + 1) * sizeof *copies);
    if (!copies) return fcdp__fail(FCDP_ERR_SYSTEM, "region '%s': no memory", region->name);
    for (size_t i = 0; i < n; i++) {
        copies[i] = piece_copy(region, (fcdp_piece){pieces[i].offset_bytes, pieces[i].bytes});
        if (direction == FCDP_TO_HOST) copies[i].device = pieces[i].from;
    }
    fcdp_status status = fcdp__mover_run(region->tiering->mover, direction, copies, n, &after, after ? 1 : 0);
    free(copies);
    return status;
}

static void use_enter(fcdp_region *region) {
    region_lock(region);
    FCDP_CHECK(1, region->n_uses > 0);
    fcdp__region_enter(region);
    region_unlock(region);
}

static void use_leave(fcdp_region *region) {
    region_lock(region);
    fcdp__region_leave(region);
    region_unlock(region);
}

fcdp_status fcdp__region_put(fcdp_region *region, const fcdp_region_piece *pieces, size_t n,
                             fcdp_event after) {
    use_enter(region);
    fcdp_status status = pieces_copy(region, FCDP_TO_HOST, pieces, n, after);
    use_leave(region);
    return status;
}

/* Spans of `mask` of which the host has everything once the stale extents have been put. Lock held. */
static uint32_t wholly_put(const fcdp_region *region, uint32_t mask) {
    uint32_t whole = 0;
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
        const fcdp_span_state *span = &region->span[s];
        bool was_invalid = !span->on_device && !span->slice_on_host;
        if (mask & 1u << s && (was_invalid || span->whole_on_host)) whole |= 1u << s;
    }
    return whole;
}

fcdp_status fcdp__region_take(fcdp_region *region, const fcdp_region_piece *pieces, size_t n,
                              uint32_t span_mask, fcdp_event after) {
    use_enter(region);
    fcdp_status status = pieces_copy(region, FCDP_TO_DEVICE, pieces, n, after);
    uint32_t whole = 0;
    region_lock(region);
    if (!status) whole = wholly_put(region, span_mask);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (!status && span_mask & 1u << s)
            region->span[s] = (fcdp_span_state){.on_device = true, .epoch = region->span[s].epoch + 1};
    region_unlock(region);
    spans_stored(region, whole, true);
    use_leave(region);
    return status;
}

/* ---- between the tiers ---- */

/* Spans whose slice must be stored, with their copies. Lock held. */
static uint32_t store_plan(const fcdp_region *region, fcdp_copy *copies, size_t *n_out) {
    uint32_t mask = 0;
    *n_out = 0;
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
        if (!region->span[s].on_device || region->span[s].slice_on_host) continue;
        copies[(*n_out)++] =
            piece_copy(region, fcdp__layout_slice(region->layout, s, region->slice));
        mask |= 1u << s;
    }
    return mask;
}

fcdp_status fcdp__region_store(fcdp_region *region, fcdp_event after) {
    fcdp_tiering *tiering = region->tiering;
    fcdp_copy copies[FCDP_N_SPANS];
    size_t n;
    if (!region->block)
        return fcdp__fail(FCDP_ERR_INVALID, "region '%s' has no host memory to be stored in", region->name);
    region_lock(region);
    fcdp__region_enter(region);
    uint32_t mask = store_plan(region, copies, &n);
    region_unlock(region);

    fcdp_status status = fcdp__mover_run(tiering->mover, FCDP_TO_HOST, copies, n, &after, after ? 1 : 0);
    if (!status) spans_stored(region, mask, region->layout->n_slices == 1);

    region_lock(region);
    tiering->n_stores += !status && mask;
    fcdp__region_leave(region);
    region_unlock(region);
    return status;
}

/* Entered, in use. */
static fcdp_status load_copy(fcdp_region *region, fcdp_piece piece) {
    fcdp_copy copy = piece_copy(region, piece);
    return fcdp__mover_run(region->tiering->mover, FCDP_TO_DEVICE, &copy, 1, NULL, 0);
}

/* Enter for a load of `span`. FCDP_PENDING: nothing to do, it is on the device. Not entered unless FCDP_OK. */
static fcdp_status load_enter(fcdp_region *region, uint32_t span, fcdp_span_state *state_out) {
    fcdp_status status = FCDP_OK;
    FCDP_CHECK(1, span < FCDP_N_SPANS);
    region_lock(region);
    FCDP_CHECK(1, region->n_uses > 0);
    fcdp__region_enter(region);
    *state_out = region->span[span];
    if (state_out->on_device)
        status = FCDP_PENDING;
    else if (!state_out->slice_on_host)
        status = fcdp__fail(FCDP_ERR_INVALID, "region '%s': span %u of epoch %u is nowhere; gather it",
                            region->name, span, state_out->epoch);
    if (status) fcdp__region_leave(region);
    region_unlock(region);
    return status;
}

fcdp_status fcdp__region_load_slice(fcdp_region *region, uint32_t span) {
    fcdp_span_state state;
    fcdp_status status = load_enter(region, span, &state);
    if (status) return status == FCDP_PENDING ? FCDP_OK : status;
    status = load_copy(region, fcdp__layout_slice(region->layout, span, region->slice));
    region_lock(region);
    region->tiering->n_slice_loads += !status;
    fcdp__region_leave(region);
    region_unlock(region);
    return status;
}

void fcdp__region_loaded(fcdp_region *region, uint32_t span) {
    region_lock(region);
    FCDP_CHECK(1, span < FCDP_N_SPANS && region->n_uses > 0);
    FCDP_CHECK(1, region->span[span].on_device || region->span[span].slice_on_host);
    region->span[span].on_device = true;
    region_unlock(region);
}

fcdp_status fcdp__region_load_whole(fcdp_region *region, uint32_t span) {
    fcdp_span_state state;
    fcdp_status status = load_enter(region, span, &state);
    if (status) return status == FCDP_PENDING ? FCDP_OK : status;
    bool empty = !region->layout->span[span].bytes;
    if (!state.whole_on_host && !empty)
        status = fcdp__board_wait_all(region->block, STORED_WORD[span], state.epoch, region->name);
    if (!status) status = load_copy(region, region->layout->span[span]);
    region_lock(region);
    if (!status) {
        region->span[span].on_device = region->span[span].whole_on_host = true;
        region->tiering->n_whole_loads++;
    }
    fcdp__region_leave(region);
    region_unlock(region);
    return status;
}

/* Entered, not in use, the device is done with the pages. */
static fcdp_status region_unmap(fcdp_region *region) {
    fcdp_status status = fcdp__vrange_unmap(region->range);
    if (status) return status;
    region_lock(region);
    region->mapped = false;
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) region->span[s].on_device = false;
    region->tiering->pages_given += fcdp__vrange_n_pages(region->range);
    fcdp__lock_release(&region->tiering->lock);
    return FCDP_OK;
}

/* May the pages go as they are? Lock held. */
static fcdp_status drop_check(const fcdp_region *region) {
    if (region->n_uses)
        return fcdp__fail(FCDP_ERR_INVALID, "region '%s' is in use and cannot be dropped", region->name);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
        const fcdp_span_state *span = &region->span[s];
        if (span->on_device && !span->slice_on_host && region->layout->span[s].bytes)
            return fcdp__fail(
                FCDP_ERR_INVALID,
                "region '%s': dropping it would lose span %u of epoch %u, which is not on the host",
                region->name, s, span->epoch);
    }
    return FCDP_OK;
}

fcdp_status fcdp__region_drop(fcdp_region *region, fcdp_event after) {
    fcdp_tiering *tiering = region->tiering;
    region_lock(region);
    fcdp__region_enter(region);
    fcdp_status status = drop_check(region);
    bool mapped = region->mapped;
    region_unlock(region);

    if (!status && after) status = fcdp__driver_event_sync(tiering->drv, after);
    if (!status && mapped) status = region_unmap(region);

    region_lock(region);
    tiering->n_drops += !status && mapped;
    fcdp__region_leave(region);
    region_unlock(region);
    return status;
}

/* Spans on the device that the host lacks parts of, with their copies. Lock held. */
static uint32_t evict_plan(const fcdp_region *region, fcdp_copy *copies, size_t *n_out) {
    uint32_t mask = 0;
    *n_out = 0;
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
        if (!region->span[s].on_device || region->span[s].whole_on_host) continue;
        if (region->layout->span[s].bytes) *n_out += missing_slices(region, s, copies + *n_out);
        mask |= 1u << s;
    }
    return mask;
}

fcdp_status fcdp__region_evict_entered(fcdp_region *region) {
    fcdp_copy copies[MAX_COPIES];
    size_t n;
    region_lock(region);
    uint32_t mask = evict_plan(region, copies, &n);
    region_unlock(region);
    if (n && !region->block)
        return fcdp__fail(FCDP_ERR_INVALID, "region '%s' has no host memory and cannot be evicted",
                          region->name);
    fcdp_status status = fcdp__mover_run(region->tiering->mover, FCDP_TO_HOST, copies, n, NULL, 0);
    if (!status && mask && region->block) spans_stored(region, mask, true);
    if (!status) status = region_unmap(region);
    if (status) return status;
    region_lock(region);
    region->tiering->n_evictions++;
    fcdp__lock_release(&region->tiering->lock);
    return FCDP_OK;
}

fcdp_status fcdp__region_evict(fcdp_region *region) {
    region_lock(region);
    fcdp__region_enter(region);
    fcdp_status status = region->n_uses ? FCDP_PENDING : FCDP_OK;
    bool mapped = region->mapped;
    region_unlock(region);
    if (!status && mapped) status = fcdp__region_evict_entered(region);
    region_lock(region);
    fcdp__region_leave(region);
    region_unlock(region);
    return status;
}
