/* region_internal.h - what region.c (one region's state) and reclaim.c (whose pages go) share. */
#ifndef FCDP_REGION_INTERNAL_H
#define FCDP_REGION_INTERNAL_H

#include "tiering/mover.h"
#include "tiering/region.h"

struct fcdp_tiering {
    fcdp_driver *drv;
    fcdp_pool *pool;
    fcdp_mover *mover;
    fcdp_lock lock;       /* FCDP_RANK_REGION: all that follows, and what regions say is under it */
    pthread_cond_t moved; /* some region's `moving` became false */
    fcdp_region *regions;
    size_t n_regions;
    uint64_t clock;       /* last_use of the region used last */
    uint64_t pages_given; /* by all drops and evictions, ever */
    uint64_t n_reclaims;  /* calls of the reclaimer, ever */
    uint64_t n_stores, n_slice_loads, n_whole_loads, n_drops, n_evictions;
};

/*     moving: one thread is between two states and may touch pages, host bytes and the range without the lock.
 *     n_uses > 0 => no eviction begins      an eviction, a drop, a map happen only while moving */
struct fcdp_region {
    fcdp_tiering *tiering;
    fcdp_region *next; /* under the lock */
    char *name;
    fcdp_layout *layout;
    uint32_t slice; /* of layout->n_slices: this process's */
    fcdp_host_block *block;
    fcdp_vrange *range;
    /* under the tiering's lock */
    bool mapped, moving;
    unsigned n_uses;
    uint64_t last_use;
    uint64_t refused_by; /* the reclaimer's call that failed to evict it, 0: none */
    fcdp_span_state span[FCDP_N_SPANS];
};

/* All of these: lock held. */
/* Wait until nobody else moves the region, and move it. */
void fcdp__region_enter(fcdp_region *region);
void fcdp__region_leave(fcdp_region *region);
bool fcdp__region_is_clean(const fcdp_region *region);

/* Lock not held, entered, not in use, mapped: write what the host lacks, then unmap. */
fcdp_status fcdp__region_evict_entered(fcdp_region *region) FCDP_MUST_CHECK;

#endif
