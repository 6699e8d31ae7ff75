/* tiering.c - the life of a tiering: its streams, its place as a reclaimer of the pool, its passes, its
 * counts. */
#include "tiering/tiering.h"

#include "tiering/reclaim.h"
#include "tiering/slot.h"

#include <stdlib.h>
#include <string.h>

static void tiering_free(fcdp_tiering *tiering) {
    fcdp__trace_spans_destroy(tiering->spans);
    for (int d = 0; d < FCDP_N_DIRECTIONS; d++)
        if (tiering->streams[d]) fcdp__driver_stream_destroy(tiering->drv, tiering->streams[d]);
    pthread_cond_destroy(&tiering->moved);
    fcdp__lock_destroy(&tiering->lock);
    free(tiering);
}

static const fcdp_holder_words gathered_words = {
    "gathered parameters",
    "shard smaller modules, lower FCDP_PREFETCH, or lower FCDP_TAU where it is above 0"};

fcdp_status fcdp__tiering_create(fcdp_driver *drv, fcdp_pool *pool, bool exact, fcdp_tiering **tiering_out) {
    static const char *const names[FCDP_N_DIRECTIONS] = {"d2h", "h2d"};
    fcdp_tiering *tiering = calloc(1, sizeof *tiering);
    if (!tiering) return fcdp__fail(FCDP_ERR_SYSTEM, "tiering: no memory");
    tiering->drv = drv;
    tiering->pool = pool;
    tiering->exact = exact;
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
    tiering->spans = fcdp__trace_spans_create(drv);
    fcdp__pool_set_holder(pool, FCDP_HOLDER_GATHERED, &gathered_words);
    fcdp__pool_set_reclaimer(pool, FCDP_RECLAIM_EVICT, fcdp__tiering_reclaim, fcdp__tiering_idle, tiering);
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

void fcdp__tiering_stats_get(fcdp_tiering *tiering, fcdp_tiering_stats *stats_out) {
    fcdp__lock_acquire(&tiering->lock);
    *stats_out = tiering->stats;
    fcdp__lock_release(&tiering->lock);
}
