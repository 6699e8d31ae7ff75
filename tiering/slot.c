/* slot.c - who owns which slot, and which regions are mapped onto it. What a region's bytes are is region.c's affair. */
#include "tiering/slot.h"

#include <stdlib.h>

static size_t pages_of(const fcdp_region *region) {
    size_t page_bytes = fcdp__driver_page_bytes(region->tiering->drv);
    return fcdp__round_up(region->layout->bytes, page_bytes) / page_bytes;
}

static bool is_free(const fcdp_slot *slot) {
    return !slot->owner && !slot->leaving;
}

/* Lock held. */
static void slot_own(fcdp_slot *slot, fcdp_region *region) {
    fcdp_tiering *tiering = region->tiering;
    slot->owner = region;
    tiering->owned_pages += slot->n_pages;
    if (tiering->owned_pages > tiering->peak_pages[0]) tiering->peak_pages[0] = tiering->owned_pages;
}

/* ---- choosing ---- */

/* A slot much larger than the region would keep a larger one from it; how large is bounded by the region's range. */
static bool slot_fits(const fcdp_slot *slot, const fcdp_region *region) {
    size_t page_bytes = fcdp__driver_page_bytes(region->tiering->drv);
    return slot->n_pages >= pages_of(region) && slot->n_pages * page_bytes <= fcdp__vrange_bytes(region->range);
}

static bool is_better(const fcdp_slot *slot, const fcdp_slot *best) {
    if (!best || slot->n_pages != best->n_pages) return !best || slot->n_pages < best->n_pages;
    return slot->last_use < best->last_use;
}

fcdp_slot *fcdp__slot_choose(fcdp_region *region) {
    fcdp_slot *best = region->slot && is_free(region->slot) ? region->slot : NULL;
    if (!best)
        for (fcdp_slot *slot = region->tiering->slots; slot; slot = slot->next)
            if (is_free(slot) && slot_fits(slot, region) && is_better(slot, best)) best = slot;
    if (best) slot_own(best, region);
    return best;
}

/* None of the regions mapped onto it is being moved by somebody, who might be waiting for pages. Lock held. */
static bool can_leave(const fcdp_tiering *tiering, const fcdp_slot *slot) {
    for (const fcdp_region *r = tiering->regions; r; r = r->next)
        if (r->slot == slot && r->moving) return false;
    return is_free(slot);
}

fcdp_slot *fcdp__slot_oldest_free(const fcdp_tiering *tiering, uint64_t call) {
    fcdp_slot *oldest = NULL;
    for (fcdp_slot *slot = tiering->slots; slot; slot = slot->next)
        if (slot->refused_by != call && can_leave(tiering, slot) && (!oldest || slot->last_use < oldest->last_use)) oldest = slot;
    return oldest;
}

/* ---- mapping ---- */

fcdp_status fcdp__slot_leave(fcdp_region *region) {
    fcdp_tiering *tiering = region->tiering;
    fcdp_status status = fcdp__region_await(region);
    if (!status) status = fcdp__vrange_unmap(region->range);
    if (status) return status;
    fcdp__lock_acquire(&tiering->lock);
    region->slot->n_mapped--;
    region->slot = NULL;
    fcdp__lock_release(&tiering->lock);
    return FCDP_OK;
}

/* The region that is mapped onto the slot beside its owner-to-be, entered; NULL: none. Only with exact mapping is it looked for: then
 * there is at most one, released, and nobody moves it but a thread that is taking it off already. */
static fcdp_region *other_enter(fcdp_slot *slot, const fcdp_region *region) {
    fcdp_tiering *tiering = region->tiering;
    fcdp_region *other = NULL;
    fcdp__lock_acquire(&tiering->lock);
    for (fcdp_region *r = tiering->regions; r && !other; r = r->next)
        if (r->slot == slot && r != region) other = r;
    if (other) fcdp__region_enter(other);
    fcdp__lock_release(&tiering->lock);
    return other;
}

static fcdp_status others_leave(fcdp_slot *slot, const fcdp_region *region) {
    fcdp_tiering *tiering = region->tiering;
    fcdp_region *other = tiering->exact ? other_enter(slot, region) : NULL;
    if (!other) return FCDP_OK;
    fcdp_status status = other->slot == slot ? fcdp__slot_leave(other) : FCDP_OK;
    fcdp__lock_acquire(&tiering->lock);
    fcdp__region_leave(other);
    fcdp__lock_release(&tiering->lock);
    return status;
}

fcdp_status fcdp__slot_map(fcdp_region *region, fcdp_slot *slot) {
    fcdp_tiering *tiering = region->tiering;
    if (region->slot == slot) return FCDP_OK;
    fcdp_status status = region->slot ? fcdp__slot_leave(region) : FCDP_OK;
    if (!status) status = others_leave(slot, region);
    if (!status)
        status = fcdp__vrange_map(region->range, slot->block,
                                  slot->n_pages * fcdp__driver_page_bytes(tiering->drv));
    if (status) return status;
    fcdp__lock_acquire(&tiering->lock);
    region->slot = slot;
    slot->n_mapped++;
    tiering->stats.n_maps++;
    fcdp__lock_release(&tiering->lock);
    return FCDP_OK;
}

void fcdp__slot_unmap_if_done(fcdp_region *region) {
    if (!region->tiering->exact || fcdp__region_query(region)) return;
    if (fcdp__slot_leave(region))
        fcdp__log(FCDP_LOG_DEBUG, "'%s' stays mapped for now: %s", region->name, fcdp_error_text());
}

/* ---- making and dissolving ---- */

/* Everything that is mapped onto a leaving slot is unmapped. Lock held on entry and exit, not in between. */
static fcdp_status mapped_leave(fcdp_tiering *tiering, fcdp_slot *slot) {
    fcdp_status status = FCDP_OK;
    while (slot->n_mapped > 0 && !status) {
        fcdp_region *region = tiering->regions;
        while (region->slot != slot) region = region->next;
        fcdp__region_enter(region);
        fcdp__lock_release(&tiering->lock);
        status = fcdp__slot_leave(region);
        fcdp__lock_acquire(&tiering->lock);
        fcdp__region_leave(region);
    }
    return status;
}

fcdp_status fcdp__slot_dissolve(fcdp_tiering *tiering, fcdp_slot *slot) {
    slot->leaving = true;
    fcdp_status status = mapped_leave(tiering, slot);
    if (status) {
        slot->leaving = false;
        pthread_cond_broadcast(&tiering->moved);
        return status;
    }
    fcdp_slot **link = &tiering->slots;
    while (*link != slot) link = &(*link)->next;
    *link = slot->next;
    fcdp__lock_release(&tiering->lock);
    fcdp__pool_give_block(tiering->pool, FCDP_HOLDER_REGIONS, slot->n_pages, slot->block);
    fcdp__lock_acquire(&tiering->lock);
    tiering->pages_given += slot->n_pages;
    pthread_cond_broadcast(&tiering->moved);
    free(slot);
    return FCDP_OK;
}

/* Lock held. */
static size_t most_needed(const fcdp_tiering *tiering) {
    size_t most = 0;
    for (int i = 0; i < FCDP_PEAK_PASSES; i++)
        if (tiering->peak_pages[i] > most) most = tiering->peak_pages[i];
    return most;
}

/* Lock held on entry and exit, not in between. `n_coming`: pages of a slot that is about to be made. */
static void trim_to_need(fcdp_tiering *tiering, size_t n_coming) {
    for (;;) {
        size_t n = n_coming, most = most_needed(tiering);
        for (const fcdp_slot *slot = tiering->slots; slot; slot = slot->next) n += slot->n_pages;
        if (tiering->owned_pages + n_coming > most) most = tiering->owned_pages + n_coming;
        fcdp_slot *oldest = n > most ? fcdp__slot_oldest_free(tiering, UINT64_MAX) : NULL;
        if (!oldest || fcdp__slot_dissolve(tiering, oldest)) return;
    }
}

void fcdp__slots_trim(fcdp_tiering *tiering) {
    fcdp__lock_acquire(&tiering->lock);
    trim_to_need(tiering, 0);
    fcdp__lock_release(&tiering->lock);
}

fcdp_status fcdp__slot_make(fcdp_region *region, fcdp_slot **slot_out) {
    fcdp_tiering *tiering = region->tiering;
    size_t n_pages = pages_of(region);
    fcdp_slot *slot = calloc(1, sizeof *slot);
    if (!slot) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a slot");
    fcdp__lock_acquire(&tiering->lock);
    trim_to_need(tiering, n_pages);
    fcdp__lock_release(&tiering->lock);
    fcdp_status status = fcdp__pool_take_block(tiering->pool, FCDP_HOLDER_REGIONS, n_pages, &slot->block);
    if (status) {
        free(slot);
        return status;
    }
    slot->n_pages = n_pages;
    fcdp__lock_acquire(&tiering->lock);
    slot_own(slot, region);
    slot->next = tiering->slots;
    tiering->slots = slot;
    fcdp__lock_release(&tiering->lock);
    *slot_out = slot;
    return FCDP_OK;
}
