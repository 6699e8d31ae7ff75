/* reclaim.c - gives device pages back to the pool when the pool has none left.
 *
 * It runs on the thread that asked for pages, and that thread waits for the device. One step at a time: a
 * free slot, else the region that policy.c names, until the pool has enough or nothing is left.
 */
#include "tiering/reclaim.h"

#include "tiering/policy.h"
#include "tiering/trace.h"

#include <stdlib.h>

/* The policy's choice, NULL when there is none. Policy is pure, so it gets a snapshot. Lock held. */
static fcdp_region *victim_choose(const fcdp_tiering *tiering, uint64_t call) {
    size_t n = 0;
    for (const fcdp_region *r = tiering->regions; r; r = r->next) n++;
    fcdp_candidate *candidates = calloc(n + 1, sizeof *candidates);
    if (!candidates) return NULL;
    n = 0;
    for (const fcdp_region *r = tiering->regions; r; r = r->next)
        candidates[n++] = (fcdp_candidate){
            .bytes = r->kept ? r->layout->bytes : 0,
            .last_use = r->last_use,
            .clean = fcdp__region_is_clean(r),
            .busy = !r->kept || r->moving || r->failed_call == call,
        };
    size_t choice = fcdp__policy_victim(candidates, n);
    free(candidates);
    fcdp_region *region = choice < n ? tiering->regions : NULL;
    while (region && choice--) region = region->next;
    return region;
}

/* Is another thread evicting a region, or taking a slot apart? It needs no pages to finish, so this thread
 * may wait for it, and then finds pages or a victim. Lock held. */
static bool somebody_gives(const fcdp_tiering *tiering) {
    for (const fcdp_region *r = tiering->regions; r; r = r->next)
        if (r->moving && r->kept) return true;
    for (const fcdp_slot *slot = tiering->slots; slot; slot = slot->next)
        if (slot->dissolving) return true;
    return false;
}

/* One step towards more pages; false: nothing is left. Lock held on entry and exit. What fails to
 * dissolve or evict is not tried again by this call. */
static bool reclaim_step(fcdp_tiering *tiering, uint64_t call) {
    fcdp_slot *slot = fcdp__slot_oldest_free(tiering, call);
    if (slot) {
        if (fcdp__slot_dissolve(tiering, slot)) slot->failed_call = call;
        return true;
    }
    fcdp_region *victim = victim_choose(tiering, call);
    if (!victim) {
        if (!somebody_gives(tiering)) return false;
        fcdp__lock_wait(&tiering->lock, &tiering->moved);
        return true;
    }
    fcdp__region_begin_move(victim);
    fcdp__lock_release(&tiering->lock);
    fcdp_status status = fcdp__region_evict(victim); /* then its slot is free */
    fcdp__lock_acquire(&tiering->lock);
    if (status) {
        victim->failed_call = call;
        fcdp__log(FCDP_LOG_WARN, "'%s' keeps its device pages: %s", victim->name, fcdp_error_text());
    }
    fcdp__region_end_move(victim);
    return true;
}

/* Pages that other threads gave back meanwhile count too: the pool can take them all the same. */
size_t fcdp__tiering_reclaim(void *ctx, size_t n_pages) {
    fcdp_tiering *tiering = ctx;
    fcdp__lock_acquire(&tiering->lock);
    uint64_t call = ++tiering->n_reclaims, before = tiering->pages_given;
    while (tiering->pages_given - before < n_pages && reclaim_step(tiering, call)) continue;
    size_t given = (size_t)(tiering->pages_given - before);
    tiering->stats.n_waits++;
    fcdp__trace_count(FCDP_COUNT_MEMORY_WAITS, 1);
    fcdp__lock_release(&tiering->lock);
    return given;
}

size_t fcdp__tiering_idle(void *ctx) {
    fcdp_tiering *tiering = ctx;
    size_t n = 0;
    fcdp__lock_acquire(&tiering->lock);
    for (const fcdp_slot *slot = tiering->slots; slot; slot = slot->next)
        n += slot->owner ? 0 : slot->n_pages;
    fcdp__lock_release(&tiering->lock);
    return n;
}
