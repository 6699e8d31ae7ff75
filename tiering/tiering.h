/* tiering.h - what a device's regions have in common: copy streams, slots, the pool's reclaimer, counts. */
#ifndef FCDP_TIERING_H
#define FCDP_TIERING_H

#include "alloc/pages.h"
#include "alloc/trace_stream.h"
#include "base/options.h"

/* The holder (pages.h) of device pages that gathered parameters lie on or pass through: slots, and the
 * staging buffers of the layer above. */
enum { FCDP_HOLDER_GATHERED = 1 };

typedef struct fcdp_tiering fcdp_tiering;

typedef enum fcdp_direction { FCDP_TO_HOST, FCDP_TO_DEVICE, FCDP_N_DIRECTIONS } fcdp_direction;

typedef struct fcdp_tiering_stats {
    uint64_t h2d_bytes, d2h_bytes; /* enqueued */
    uint64_t n_stores, n_slice_loads, n_whole_loads, n_evictions;
    uint64_t n_maps;               /* times that a region was mapped onto a slot */
    uint64_t n_plans, n_surprises; /* plans of what to keep; uses that these did not expect */
    uint64_t n_waits, wait_ns;     /* times that the host waited for pages; the time of these */
    uint64_t mapped_bytes;         /* host pages under regions' addresses, now (mapped.h) */
} fcdp_tiering_stats;

typedef struct fcdp_tiering_config {
    bool exact; /* a region's addresses are unmapped when it is released (slot.h) */
    fcdp_policy_kind policy;
} fcdp_tiering_config;

/* One copy stream for each direction, and the pool's reclaimer, which takes pages back from the regions. */
fcdp_status fcdp__tiering_create(fcdp_driver *drv, fcdp_pool *pool, const fcdp_tiering_config *config,
                                 fcdp_tiering **tiering_out) FCDP_MUST_CHECK;
/* Every region has been destroyed. */
void fcdp__tiering_destroy(fcdp_tiering *tiering);
/* A pass of the program begins. The slots that the last passes needed at once stay; the others are freed. */
void fcdp__tiering_begin_pass(fcdp_tiering *tiering);
fcdp_stream fcdp__tiering_stream(const fcdp_tiering *tiering, fcdp_direction direction);
/* For the spans of other streams of the same device (trace_stream.h); NULL: none are traced. */
fcdp_trace_spans *fcdp__tiering_spans(const fcdp_tiering *tiering);
/* Give at least `n_pages` of slots and regions back to the pool, as far as there are any. An fcdp_reclaim_fn,
 * of which `ctx` is the fcdp_tiering: the pool calls it, and tests do. */
size_t fcdp__tiering_reclaim(void *ctx, size_t n_pages);
/* Of regions that are kept, and not by a plan (tiers.h): the first to go where pages are asked for. */
size_t fcdp__tiering_unplanned_pages(fcdp_tiering *tiering);
/* Every region gives its device pages up, and all slots go back to the pool. FCDP_ERR_INVALID: a region is in
 * use. On failure some may still have theirs. */
fcdp_status fcdp__tiering_sleep(fcdp_tiering *tiering) FCDP_MUST_CHECK;
void fcdp__tiering_stats_get(const fcdp_tiering *tiering, fcdp_tiering_stats *stats_out);

#endif
