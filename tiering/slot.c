/* slot.c - the life of slots: chosen by a region, mapped, passed on, made and dissolved.
 *
 * Driver calls for memory are slow and may wait for the device. So a region first looks for the free slot
 * that it is mapped onto, which costs no call; then for another free one, which costs a map; and makes one
 * only if there is none. No lock is held across such a call: what one thread changes meanwhile is marked
 * (moving, dissolving), and other threads wait for the mark to go. region.c knows what a region's bytes are.
 */
#include "tiering/slot.h"

#include "tiering/trace.h"

#include <stdlib.h>

size_t fcdp__region_pages(const fcdp_region *region) {
    size_t page_bytes = fcdp__driver_page_bytes(region->tiering->drv);
    return fcdp__round_up(region->layout->bytes, page_bytes) / page_bytes;
}

static bool is_free(const fcdp_slot *slot) {
    return !slot->owner && !slot->dissolving;
}

static unsigned class_of(size_t n_pages) {
    unsigned class = 0;
    while (n_pages /= FCDP_SLOT_RATIO) class++;
    return class < FCDP_SLOT_CLASSES ? class : FCDP_SLOT_CLASSES - 1;
}

static void slot_own(fcdp_slot *slot, fcdp_region *region) {
    fcdp_tiering *tiering = region->tiering;
    unsigned class = class_of(slot->n_pages);
    slot->owner = region;
    size_t n_owned = tiering->owned_pages[class] += slot->n_pages;
    if (n_owned > tiering->peak_pages[0][class]) tiering->peak_pages[0][class] = n_owned;
}

void fcdp__slot_disown(fcdp_slot *slot) {
    fcdp_tiering *tiering = slot->owner->tiering;
    slot->owner = NULL;
    slot->last_use = ++tiering->clock;
    tiering->owned_pages[class_of(slot->n_pages)] -= slot->n_pages;
}

/* ---- choosing ---- */

static bool is_older(const fcdp_slot *slot, const fcdp_slot *oldest) {
    return !oldest || slot->last_use < oldest->last_use;
}

/* Does the slot's last user run on another stream set, and is the device not done with it? Other ranks may
 * have ordered the two sets differently, so a wait could close a circle. Such a slot is neither passed on nor
 * trimmed; only a reclaim waits for it. `region` NULL: another set than that of some region. */
static bool is_apart(const fcdp_slot *slot, const fcdp_region *region) {
    const fcdp_region *last = slot->last, *other = region;
    if (!last) return false;
    if (!region)
        for (other = last->tiering->regions; other && other->streams == last->streams;) other = other->next;
    return other && other->streams != last->streams && fcdp__region_query(last);
}

/* With exact mapping only one region is mapped onto the slot, so the others are unmapped first. Is the device
 * still busy with one of them? Lock held. */
static bool is_pending(const fcdp_slot *slot, const fcdp_tiering *tiering) {
    for (const fcdp_region *r = tiering->exact ? tiering->regions : NULL; r; r = r->next)
        if (r->slot == slot && (r->moving || fcdp__region_query(r))) return true;
    return false;
}

/* A slot much larger than the region is kept for larger ones; the bound is the region's range. */
static bool would_fit(const fcdp_slot *slot, const fcdp_region *region) {
    size_t page_bytes = fcdp__driver_page_bytes(region->tiering->drv);
    return is_free(slot) && !is_apart(slot, region) && slot->n_pages >= fcdp__region_pages(region) &&
           slot->n_pages <= fcdp__vrange_bytes(region->range) / page_bytes;
}

/* The smallest slot that fits, the longest unused first. With exact mapping a slot that is not pending comes
 * first, and *n_pending_out counts the fitting slots that are pending. */
static fcdp_slot *slot_find(const fcdp_region *region, unsigned *n_pending_out) {
    fcdp_slot *best = NULL;
    bool best_is_pending = false;
    *n_pending_out = 0;
    for (fcdp_slot *slot = region->tiering->slots; slot; slot = slot->next) {
        if (!would_fit(slot, region)) continue;
        bool pending = is_pending(slot, region->tiering);
        *n_pending_out += pending;
        bool is_better = !best || slot->n_pages < best->n_pages ||
                         (slot->n_pages == best->n_pages && is_older(slot, best));
        if (best && pending != best_is_pending) is_better = best_is_pending;
        if (!is_better) continue;
        best = slot;
        best_is_pending = pending;
    }
    return best;
}

/* A new slot for `region`, without asking a reclaimer; NULL: the pool has no spare pages. Lock not held. */
static fcdp_slot *slot_make_extra(fcdp_region *region);

/* In forward the host is ahead of the device: the slot that fits best is often one whose last group still
 * computes. With exact mapping, while at most FCDP_SLOTS_PENDING slots are pending, make another one instead
 * of waiting. */
fcdp_slot *fcdp__slot_choose(fcdp_region *region) {
    fcdp_lock *lock = &region->tiering->lock;
    unsigned n_pending = 0;
    fcdp_slot *own = region->slot;
    bool is_own = own && is_free(own) && !is_apart(own, region);
    fcdp_slot *slot = is_own ? own : slot_find(region, &n_pending);
    if (slot && n_pending > 0 && n_pending <= FCDP_SLOTS_PENDING && is_pending(slot, region->tiering)) {
        fcdp__lock_release(lock);
        fcdp_slot *extra = slot_make_extra(region);
        fcdp__lock_acquire(lock);
        if (extra) return extra;
        slot = slot_find(region, &n_pending);
    }
    if (slot) slot_own(slot, region);
    return slot;
}

fcdp_slot *fcdp__slot_oldest_free(const fcdp_tiering *tiering, uint64_t call) {
    fcdp_slot *oldest = NULL;
    for (fcdp_slot *slot = tiering->slots; slot; slot = slot->next)
        if (slot->failed_call != call && is_free(slot) && is_older(slot, oldest)) oldest = slot;
    return oldest;
}

/* ---- mapping ---- */

fcdp_status fcdp__slot_unmap(fcdp_region *region) {
    fcdp_tiering *tiering = region->tiering;
    fcdp_status status = fcdp__region_await(region);
    if (!status) status = fcdp__vrange_unmap(region->range);
    if (status) return status;
    fcdp__lock_acquire(&tiering->lock);
    fcdp__slot_trace(region->slot, FCDP_EVENT_REGION_UNMAP, region);
    region->slot->n_mapped--;
    /* its events have passed, and the use of another slot will record them anew */
    if (region->slot->last == region) region->slot->last = NULL;
    region->slot = NULL;
    pthread_cond_broadcast(&tiering->moved); /* mapped_begin_move may wait for this */
    fcdp__lock_release(&tiering->lock);
    return FCDP_OK;
}

/* Mark a region mapped onto the slot, other than `except`, as moving, and return it; NULL: none is left.
 * Another thread may destroy the region that it moves, so every wait is followed by a new search. Lock
 * held. */
static fcdp_region *mapped_begin_move(fcdp_slot *slot, const fcdp_region *except, fcdp_tiering *tiering) {
    for (;;) {
        fcdp_region *moving = NULL;
        for (fcdp_region *r = tiering->regions; r; r = r->next) {
            if (r->slot != slot || r == except) continue;
            if (!r->moving) {
                fcdp__region_begin_move(r);
                return r;
            }
            moving = r;
        }
        if (!moving) return NULL;
        fcdp__lock_wait(&tiering->lock, &tiering->moved);
    }
}

/* Unmap every region but `except` from the slot. A thread that moves one of them needs no pages before
 * that one is unmapped: acquire unmaps the old slot before it asks for pages, and before it waits here. So
 * no wait closes a circle. Lock held on entry and exit, not in between. */
static fcdp_status slot_unmap_all(fcdp_slot *slot, const fcdp_region *except, fcdp_tiering *tiering) {
    fcdp_status status = FCDP_OK;
    fcdp_region *region;
    while (!status && (region = mapped_begin_move(slot, except, tiering))) {
        fcdp__lock_release(&tiering->lock);
        status = fcdp__slot_unmap(region);
        fcdp__lock_acquire(&tiering->lock);
        fcdp__region_end_move(region);
    }
    return status;
}

fcdp_status fcdp__slot_map(fcdp_region *region, fcdp_slot *slot) {
    fcdp_tiering *tiering = region->tiering;
    if (region->slot == slot) return FCDP_OK;
    fcdp_status status = region->slot ? fcdp__slot_unmap(region) : FCDP_OK;
    if (!status && tiering->exact) {
        fcdp__lock_acquire(&tiering->lock);
        status = slot_unmap_all(slot, region, tiering);
        fcdp__lock_release(&tiering->lock);
    }
    if (!status)
        status = fcdp__vrange_map(region->range, slot->phys,
                                  slot->n_pages * fcdp__driver_page_bytes(tiering->drv));
    if (status) return status;
    fcdp__lock_acquire(&tiering->lock);
    region->slot = slot;
    slot->n_mapped++;
    fcdp__slot_trace(slot, FCDP_EVENT_REGION_MAP, region);
    fcdp__count(&tiering->counts, FCDP_COUNT_REGION_MAPS, 1);
    fcdp__lock_release(&tiering->lock);
    return FCDP_OK;
}

void fcdp__slot_unmap_if_done(fcdp_region *region) {
    if (!region->tiering->exact || fcdp__region_query(region)) return;
    if (fcdp__slot_unmap(region))
        fcdp__log(FCDP_LOG_DEBUG, "'%s' stays mapped for now: %s", region->name, fcdp_error_text());
}

/* ---- making and dissolving ---- */

fcdp_status fcdp__slot_dissolve(fcdp_tiering *tiering, fcdp_slot *slot) {
    slot->dissolving = true;
    fcdp_status status = slot_unmap_all(slot, NULL, tiering);
    if (status) {
        slot->dissolving = false;
        pthread_cond_broadcast(&tiering->moved);
        return status;
    }
    fcdp_slot **link = &tiering->slots;
    while (*link != slot) link = &(*link)->next;
    *link = slot->next;
    fcdp__lock_release(&tiering->lock);
    fcdp__pool_give_handle(tiering->pool, FCDP_HOLDER_GATHERED, slot->n_pages, slot->phys);
    fcdp__lock_acquire(&tiering->lock);
    tiering->pages_given += slot->n_pages;
    size_t *extra_pages = &tiering->extra_pages[class_of(slot->n_pages)];
    *extra_pages -= *extra_pages < slot->n_pages ? *extra_pages : slot->n_pages;
    fcdp__slot_trace(slot, FCDP_EVENT_SLOT_DISSOLVE, NULL);
    fcdp__trace_count(FCDP_COUNT_SLOTS, (uint64_t)-1);
    fcdp__trace_count(FCDP_COUNT_SLOT_BYTES, -(uint64_t)(slot->n_pages * slot->page_bytes));
    pthread_cond_broadcast(&tiering->moved);
    free(slot);
    return FCDP_OK;
}

/* Lock held: does the class have more pages than the last passes, or what is owned now, need at once? */
static bool is_excess(const fcdp_tiering *tiering, unsigned class, size_t n_coming) {
    size_t n = n_coming, most = tiering->owned_pages[class] + n_coming;
    for (int i = 0; i < FCDP_PEAK_PASSES; i++)
        if (tiering->peak_pages[i][class] > most) most = tiering->peak_pages[i][class];
    for (const fcdp_slot *slot = tiering->slots; slot; slot = slot->next)
        if (class_of(slot->n_pages) == class) n += slot->n_pages;
    return n > most + tiering->extra_pages[class];
}

/* `n_coming`: pages of a slot that is about to be made for `region`; NULL: none is. Lock held on entry and
 * exit, not in between. */
static void trim_class(fcdp_tiering *tiering, unsigned class, size_t n_coming, const fcdp_region *region) {
    while (is_excess(tiering, class, n_coming)) {
        fcdp_slot *oldest = NULL;
        for (fcdp_slot *slot = tiering->slots; slot; slot = slot->next)
            if (class_of(slot->n_pages) == class && is_free(slot) && !is_apart(slot, region) &&
                is_older(slot, oldest))
                oldest = slot;
        if (!oldest || fcdp__slot_dissolve(tiering, oldest)) return;
    }
}

/* A class needs no more slots than it has regions. With exact mapping most slots have no region mapped. */
void fcdp__slot_drop_spare(const fcdp_region *gone) {
    fcdp_tiering *tiering = gone->tiering;
    unsigned class = class_of(fcdp__region_pages(gone));
    size_t n_slots = 0, n_regions = 0;
    fcdp_slot *spare = NULL;
    for (const fcdp_region *r = tiering->regions; r; r = r->next)
        n_regions += class_of(fcdp__region_pages(r)) == class && r->tier != FCDP_TIER_MAPPED;
    for (fcdp_slot *slot = tiering->slots; slot; slot = slot->next) {
        if (class_of(slot->n_pages) != class) continue;
        n_slots++;
        if (is_free(slot) && !slot->n_mapped) spare = slot;
    }
    if (spare && n_slots > n_regions) (void)!fcdp__slot_dissolve(tiering, spare);
}

void fcdp__slots_trim(fcdp_tiering *tiering) {
    fcdp__lock_acquire(&tiering->lock);
    for (unsigned class = 0; class < FCDP_SLOT_CLASSES; class++) trim_class(tiering, class, 0, NULL);
    fcdp__lock_release(&tiering->lock);
}

/* List the new slot, owned by `region`. Lock not held. */
static fcdp_slot *slot_add(fcdp_region *region, fcdp_slot *slot, size_t n_pages, bool is_extra) {
    fcdp_tiering *tiering = region->tiering;
    slot->n_pages = n_pages;
    slot->page_bytes = fcdp__driver_page_bytes(tiering->drv);
    fcdp__lock_acquire(&tiering->lock);
    slot->number = ++tiering->n_slots_made;
    if (is_extra) tiering->extra_pages[class_of(n_pages)] += n_pages;
    slot_own(slot, region);
    fcdp__slot_trace(slot, FCDP_EVENT_SLOT_MAKE, region);
    fcdp__trace_count(FCDP_COUNT_SLOTS, 1);
    fcdp__trace_count(FCDP_COUNT_SLOT_BYTES, n_pages * slot->page_bytes);
    slot->next = tiering->slots;
    tiering->slots = slot;
    fcdp__lock_release(&tiering->lock);
    return slot;
}

fcdp_status fcdp__slot_make(fcdp_region *region, fcdp_slot **slot_out) {
    fcdp_tiering *tiering = region->tiering;
    size_t n_pages = fcdp__region_pages(region);
    fcdp_slot *slot = calloc(1, sizeof *slot);
    if (!slot) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a slot");
    fcdp__lock_acquire(&tiering->lock);
    trim_class(tiering, class_of(n_pages), n_pages, region);
    fcdp__lock_release(&tiering->lock);
    fcdp_status status = fcdp__pool_take_handle(tiering->pool, FCDP_HOLDER_GATHERED, n_pages, &slot->phys);
    if (status)
        free(slot);
    else
        *slot_out = slot_add(region, slot, n_pages, false);
    return status;
}

static fcdp_slot *slot_make_extra(fcdp_region *region) {
    size_t n_pages = fcdp__region_pages(region);
    fcdp_slot *slot = calloc(1, sizeof *slot);
    if (slot && !fcdp__pool_try_handle(region->tiering->pool, FCDP_HOLDER_GATHERED, n_pages, &slot->phys))
        return slot_add(region, slot, n_pages, true);
    free(slot);
    return NULL;
}
