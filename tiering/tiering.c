/* tiering.c - what a device's regions share: the copy streams, a place among the pool's reclaimers, the
 * passes of the program, the counts.
 *
 * As a reclaimer it runs on the thread that asked for pages, and that thread waits for the device. One step
 * at a time: a free slot goes back to the pool, else the pages of the region that policy.c names, until the
 * pool has enough or nothing is left. It maps nothing and copies nothing itself: slot.c and region.c do.
 */
#include "tiering/tiering.h"

#include "tiering/policy.h"
#include "tiering/schedule.h"
#include "tiering/slot.h"
#include "tiering/trace.h"

#include <stdlib.h>
#include <string.h>

/* ---- the pool's reclaimer ---- */

/* It has device pages, and is not in use. Lock held. */
static bool may_give(const fcdp_region *region) {
    return region->kept && !region->slot->on_host;
}

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
            .distance = fcdp__schedule_distance(r),
            .clean = fcdp__region_is_clean(r),
            .busy = !may_give(r) || r->moving || r->failed_call == call,
            .planned = r->tier == FCDP_TIER_DEVICE,
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
        if (r->moving && may_give(r)) return true;
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
    fcdp__schedule_note_eviction(tiering, victim);
    fcdp__lock_release(&tiering->lock);
    fcdp_status status = fcdp__region_evict(victim); /* then its slot is free */
    fcdp__lock_acquire(&tiering->lock);
    if (status) {
        victim->failed_call = call;
        fcdp__log(FCDP_LOG_WARN, "'%s' stays on the device, as it cannot be evicted: %s",
                  fcdp__name_text(victim->name), fcdp_error_text());
    }
    fcdp__region_end_move(victim);
    return true;
}

/* Pages that other threads gave back meanwhile count too: the pool can take them all the same. */
size_t fcdp__tiering_reclaim(void *ctx, size_t n_pages) {
    fcdp_tiering *tiering = ctx;
    fcdp__schedule_sample(tiering, n_pages);
    fcdp__lock_acquire(&tiering->lock);
    uint64_t call = ++tiering->n_reclaims, before = tiering->pages_given;
    while (tiering->pages_given - before < n_pages && reclaim_step(tiering, call)) continue;
    size_t given = (size_t)(tiering->pages_given - before);
    fcdp__lock_release(&tiering->lock);
    return given;
}

size_t fcdp__tiering_unplanned_pages(fcdp_tiering *tiering) {
    size_t n = 0;
    fcdp__lock_acquire(&tiering->lock);
    for (const fcdp_region *r = tiering->regions; r; r = r->next)
        n += may_give(r) && r->tier != FCDP_TIER_DEVICE ? r->slot->n_pages : 0;
    fcdp__lock_release(&tiering->lock);
    return n;
}

static fcdp_region *in_use_find(const fcdp_tiering *tiering) {
    fcdp_region *region = tiering->regions;
    while (region && !region->in_use) region = region->next;
    return region;
}

/* A region that has pages and is not in use, and that no other thread moves: that may be its end. */
static fcdp_region *kept_find(const fcdp_tiering *tiering) {
    fcdp_region *region = tiering->regions;
    while (region && (!may_give(region) || region->moving)) region = region->next;
    return region;
}

/* Its plan is as it was: an eviction that memory asked for would tell something of it. */
fcdp_status fcdp__tiering_sleep(fcdp_tiering *tiering) {
    fcdp_status status = FCDP_OK;
    fcdp_region *region;
    fcdp__lock_acquire(&tiering->lock);
    if ((region = in_use_find(tiering)))
        status = fcdp__fail(FCDP_ERR_INVALID, "'%s' is in use: call its reshard() first",
                            fcdp__name_text(region->name));
    while (!status && ((region = kept_find(tiering)) || somebody_gives(tiering))) {
        if (!region) {
            fcdp__lock_wait(&tiering->lock, &tiering->moved);
            continue;
        }
        fcdp__region_begin_move(region);
        fcdp__lock_release(&tiering->lock);
        status = fcdp__region_evict(region);
        fcdp__lock_acquire(&tiering->lock);
        fcdp__region_end_move(region);
    }
    uint64_t call = ++tiering->n_reclaims;
    for (fcdp_slot *slot; !status && (slot = fcdp__slot_oldest_free(tiering, call));)
        if (fcdp__slot_dissolve(tiering, slot)) slot->failed_call = call;
    fcdp__lock_release(&tiering->lock);
    return status;
}

/* An fcdp_idle_fn: pages of free slots. */
static size_t tiering_idle(void *ctx) {
    fcdp_tiering *tiering = ctx;
    size_t n = 0;
    fcdp__lock_acquire(&tiering->lock);
    for (const fcdp_slot *slot = tiering->slots; slot; slot = slot->next)
        n += slot->owner ? 0 : slot->n_pages;
    fcdp__lock_release(&tiering->lock);
    return n;
}

/* ---- life ---- */

static void tiering_free(fcdp_tiering *tiering) {
    fcdp__trace_spans_destroy(tiering->spans);
    fcdp__schedule_destroy(tiering);
    for (int d = 0; d < FCDP_N_DIRECTIONS; d++)
        if (tiering->streams[d]) fcdp__driver_stream_destroy(tiering->drv, tiering->streams[d]);
    pthread_cond_destroy(&tiering->moved);
    fcdp__lock_destroy(&tiering->lock);
    free(tiering);
}

static const fcdp_holder_words gathered_words = {
    "gathered parameters",
    "shard smaller modules, lower FCDP_PREFETCH, or lower FCDP_TAU where it is above 0"};

fcdp_status fcdp__tiering_create(fcdp_driver *drv, fcdp_pool *pool, const fcdp_tiering_config *config,
                                 fcdp_tiering **tiering_out) {
    static const char *const names[FCDP_N_DIRECTIONS] = {"d2h", "h2d"};
    fcdp_tiering *tiering = calloc(1, sizeof *tiering);
    if (!tiering) return fcdp__fail(FCDP_ERR_SYSTEM, "tiering: no memory");
    tiering->drv = drv;
    tiering->pool = pool;
    tiering->exact = config->exact;
    fcdp__lock_init(&tiering->lock, FCDP_RANK_REGION);
    pthread_cond_init(&tiering->moved, NULL);
    for (int d = 0; d < FCDP_N_DIRECTIONS; d++) {
        fcdp_status status = fcdp__driver_stream_create(drv, &tiering->streams[d]);
        if (status) {
            tiering->streams[d] = NULL;
            tiering_free(tiering);
            return status;
        }
        fcdp__driver_stream_name(drv, tiering->streams[d], names[d]);
    }
    if (config->policy == FCDP_POLICY_NEXT_USE) {
        fcdp_status status = fcdp__schedule_create(tiering);
        if (status) {
            tiering_free(tiering);
            return status;
        }
    }
    tiering->spans = fcdp__trace_spans_create(drv);
    fcdp__pool_set_holder(pool, FCDP_HOLDER_GATHERED, &gathered_words);
    fcdp__pool_set_reclaimer(pool, FCDP_RECLAIM_EVICT, fcdp__tiering_reclaim, tiering_idle, tiering);
    *tiering_out = tiering;
    return FCDP_OK;
}

void fcdp__tiering_destroy(fcdp_tiering *tiering) {
    if (!tiering) return;
    FCDP_CHECK(1, !tiering->regions);
    fcdp__pool_set_reclaimer(tiering->pool, FCDP_RECLAIM_EVICT, NULL, NULL, NULL);
    fcdp__lock_acquire(&tiering->lock);
    while (tiering->slots)
        if (fcdp__slot_dissolve(tiering, tiering->slots)) break; /* no region is mapped: it cannot fail */
    fcdp__lock_release(&tiering->lock);
    tiering_free(tiering);
}

/* ---- passes and counts ---- */

void fcdp__tiering_begin_pass(fcdp_tiering *tiering) {
    fcdp__lock_acquire(&tiering->lock);
    memmove(tiering->peak_pages[1], tiering->peak_pages[0],
            (FCDP_PEAK_PASSES - 1) * sizeof tiering->peak_pages[0]);
    memcpy(tiering->peak_pages[0], tiering->owned_pages, sizeof tiering->owned_pages);
    fcdp__lock_release(&tiering->lock);
    fcdp__slots_trim(tiering);
}

fcdp_stream fcdp__tiering_stream(const fcdp_tiering *tiering, fcdp_direction direction) {
    return tiering->streams[direction];
}

fcdp_trace_spans *fcdp__tiering_spans(const fcdp_tiering *tiering) {
    return tiering->spans;
}

void fcdp__tiering_stats_get(const fcdp_tiering *tiering, fcdp_tiering_stats *stats_out) {
    const _Atomic uint64_t *n = tiering->counts.n;
    *stats_out = (fcdp_tiering_stats){.h2d_bytes = n[FCDP_COUNT_H2D_BYTES],
                                      .d2h_bytes = n[FCDP_COUNT_D2H_BYTES],
                                      .n_stores = n[FCDP_COUNT_STORES],
                                      .n_slice_loads = n[FCDP_COUNT_SLICE_LOADS],
                                      .n_whole_loads = n[FCDP_COUNT_WHOLE_LOADS],
                                      .n_evictions = n[FCDP_COUNT_EVICTIONS],
                                      .n_maps = n[FCDP_COUNT_REGION_MAPS],
                                      .n_plans = n[FCDP_COUNT_PLANS],
                                      .n_surprises = n[FCDP_COUNT_SURPRISES],
                                      .n_waits = n[FCDP_COUNT_MEMORY_WAITS],
                                      .wait_ns = n[FCDP_COUNT_MEMORY_WAIT_NS],
                                      .mapped_bytes = n[FCDP_COUNT_HOST_MAPPED_BYTES]};
}
