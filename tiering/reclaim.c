/* reclaim.c - the list of regions, and whose pages go when the pool has none left. */
#include "tiering/policy.h"
#include "tiering/region_internal.h"

#include <stdlib.h>

static size_t tiering_reclaim(void *ctx, size_t n_pages);

fcdp_status fcdp__tiering_create(fcdp_driver *drv, fcdp_pool *pool, fcdp_tiering **tiering_out) {
    fcdp_tiering *tiering = calloc(1, sizeof *tiering);
    if (!tiering) return fcdp__fail(FCDP_ERR_SYSTEM, "tiering: no memory");
    tiering->drv = drv;
    tiering->pool = pool;
    fcdp_status status = fcdp__mover_create(drv, &tiering->mover);
    if (status) {
        free(tiering);
        return status;
    }
    fcdp__lock_init(&tiering->lock, FCDP_RANK_REGION);
    pthread_cond_init(&tiering->moved, NULL);
    fcdp__pool_set_reclaimer(pool, FCDP_RECLAIM_REGIONS, tiering_reclaim, NULL, tiering);
    *tiering_out = tiering;
    return FCDP_OK;
}

void fcdp__tiering_destroy(fcdp_tiering *tiering) {
    if (!tiering) return;
    FCDP_CHECK(1, tiering->n_regions == 0);
    fcdp__pool_set_reclaimer(tiering->pool, FCDP_RECLAIM_REGIONS, NULL, NULL, NULL);
    fcdp__mover_destroy(tiering->mover);
    pthread_cond_destroy(&tiering->moved);
    fcdp__lock_destroy(&tiering->lock);
    free(tiering);
}

void fcdp__tiering_stats(fcdp_tiering *tiering, fcdp_tiering_stats *stats_out) {
    fcdp__lock_acquire(&tiering->lock);
    *stats_out = (fcdp_tiering_stats){
        .h2d_bytes = fcdp__mover_bytes(tiering->mover, FCDP_TO_DEVICE),
        .d2h_bytes = fcdp__mover_bytes(tiering->mover, FCDP_TO_HOST),
        .n_stores = tiering->n_stores,
        .n_slice_loads = tiering->n_slice_loads,
        .n_whole_loads = tiering->n_whole_loads,
        .n_drops = tiering->n_drops,
        .n_evictions = tiering->n_evictions,
    };
    fcdp__lock_release(&tiering->lock);
}

static fcdp_candidate candidate_of(const fcdp_region *region, uint64_t call) {
    bool clean = fcdp__region_is_clean(region);
    return (fcdp_candidate){
        .bytes = region->mapped ? region->layout->bytes : 0,
        .last_use = region->last_use,
        .clean = clean,
        .busy = region->n_uses || region->moving || (!clean && !region->block) || region->refused_by == call,
    };
}

/* The policy's choice, NULL when there is none. Lock held. */
static fcdp_region *victim_choose(const fcdp_tiering *tiering, uint64_t call) {
    fcdp_candidate *candidates = calloc(tiering->n_regions + 1, sizeof *candidates);
    if (!candidates) return NULL;
    size_t n = 0;
    for (fcdp_region *r = tiering->regions; r; r = r->next) candidates[n++] = candidate_of(r, call);
    size_t choice = fcdp__policy_victim(candidates, n);
    free(candidates);
    fcdp_region *region = choice < n ? tiering->regions : NULL;
    while (region && choice--) region = region->next;
    return region;
}

/* Is another thread storing, dropping or evicting a region that is not in use? It needs no pages to finish, so it may be
 * waited for, and then there are pages or a victim. Lock held. */
static bool somebody_gives(const fcdp_tiering *tiering) {
    for (const fcdp_region *r = tiering->regions; r; r = r->next)
        if (r->moving && r->mapped && !r->n_uses) return true;
    return false;
}

/* Lock held on entry and exit, not in between. */
static void victim_evict(fcdp_region *region, uint64_t call) {
    fcdp__region_enter(region);
    fcdp__lock_release(&region->tiering->lock);
    fcdp_status status = fcdp__region_evict_entered(region);
    fcdp__lock_acquire(&region->tiering->lock);
    if (status) {
        region->refused_by = call;
        fcdp__log(FCDP_LOG_WARN, "'%s' keeps its device pages: %s", region->name, fcdp_error_text());
    }
    fcdp__region_leave(region);
}

/* fcdp_reclaim_fn: what came back meanwhile by other threads' doing counts too, the pool can take it all the same. */
static size_t tiering_reclaim(void *ctx, size_t n_pages) {
    fcdp_tiering *tiering = ctx;
    fcdp__lock_acquire(&tiering->lock);
    uint64_t call = ++tiering->n_reclaims, before = tiering->pages_given;
    while (tiering->pages_given - before < n_pages) {
        fcdp_region *victim = victim_choose(tiering, call);
        if (victim)
            victim_evict(victim, call);
        else if (somebody_gives(tiering))
            fcdp__lock_wait(&tiering->lock, &tiering->moved);
        else
            break;
    }
    size_t given = (size_t)(tiering->pages_given - before);
    fcdp__lock_release(&tiering->lock);
    return given;
}
