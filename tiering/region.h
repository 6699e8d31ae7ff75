/* region.h - the gathered parameters of one group, the same bytes in every tier, at one device address for life.
 *
 * This file's functions are the sole writers of a region's state. A region knows slices, not ranks: slice `i` of `n_slices` is the
 * part of each span that this process stores to and restores from the node's shared host memory.
 *
 * Per span:  on_device       the device pages hold this epoch's bytes
 *            slice_on_host   this rank's slice of this epoch is in host memory
 *            whole_on_host   this rank knows the whole span of this epoch is in host memory (wrote or saw all of it)
 *     invalid = !on_device && !slice_on_host     whole_on_host => slice_on_host     on_device => mapped
 *     clean   = for every span: !on_device || whole_on_host || (slice_on_host && every peer has published this epoch)
 * Life: invalid -> filled (a gather wrote the pages) -> stored -> dropped (unmapped; a touch faults) -> loaded -> ...
 *
 * Threads: one thread moves a given region at a time (comm's worker); the reclaimer may evict any region that is not in use from
 * any thread that takes pages. Lock: FCDP_RANK_REGION guards the state; it is not held while a copy is waited for.
 */
#ifndef FCDP_REGION_H
#define FCDP_REGION_H

#include "alloc/vrange.h"
#include "tiering/host.h"
#include "tiering/layout.h"

typedef struct fcdp_tiering fcdp_tiering;
typedef struct fcdp_region fcdp_region;

typedef struct fcdp_tiering_stats {
    uint64_t h2d_bytes, d2h_bytes;
    uint64_t n_stores, n_slice_loads, n_whole_loads, n_drops, n_evictions;
} fcdp_tiering_stats;

/* Copy streams (one each way) and the list of regions; the pool's reclaimer is set to evict them. */
fcdp_status fcdp__tiering_create(fcdp_driver *drv, fcdp_pool *pool, fcdp_tiering **tiering_out) FCDP_MUST_CHECK;
void fcdp__tiering_destroy(fcdp_tiering *tiering);
void fcdp__tiering_stats(fcdp_tiering *tiering, fcdp_tiering_stats *stats_out);

typedef struct fcdp_span_state { bool on_device, slice_on_host, whole_on_host; uint32_t epoch; } fcdp_span_state;
typedef struct fcdp_region_state {
    bool mapped, in_use;
    fcdp_span_state span[FCDP_N_SPANS];
} fcdp_region_state;

/* `layout` and `name` are copied; `slice` of layout->n_slices is this process's; `block` is borrowed (data_bytes >= layout->bytes;
 * NULL: no host tier, the region can then only be kept). A block serves one region, since its board counts that region's epochs. */
fcdp_status fcdp__region_create(fcdp_tiering *tiering, const char *name, const fcdp_layout *layout, uint32_t slice,
                                fcdp_host_block *block, fcdp_region **region_out) FCDP_MUST_CHECK;
void fcdp__region_destroy(fcdp_region *region);
const char *fcdp__region_name(const fcdp_region *region);
fcdp_dptr fcdp__region_base(const fcdp_region *region);
const fcdp_layout *fcdp__region_layout(const fcdp_region *region);
void fcdp__region_state(fcdp_region *region, fcdp_region_state *state_out);

/* Map pages if there are none, and keep the reclaimer away until end_use. Nested uses count. */
fcdp_status fcdp__region_begin_use(fcdp_region *region) FCDP_MUST_CHECK;
/* The device must be done with the pages (the caller has waited for its streams): from now on the reclaimer may unmap them. */
void fcdp__region_end_use(fcdp_region *region);

/* The spans' bytes are void in every tier (their parameters changed). */
void fcdp__region_invalidate(fcdp_region *region, uint32_t span_mask);
/* A gather has written these spans' pages completely: a new epoch, on the device only. In use. */
void fcdp__region_filled(fcdp_region *region, uint32_t span_mask);

/* A gather through the host, instead of pages first and fcdp__region_filled: this process copies its pieces from elsewhere on the
 * device to their places in host memory, after `after` (NULL: nothing pending). In use, and no process of the node may
 * read or write those host bytes for an older epoch any more. */
typedef struct fcdp_region_piece {
    size_t offset_bytes, bytes;     /* in the region */
    fcdp_dptr from;                 /* put: where the bytes are now. take: unused */
} fcdp_region_piece;
fcdp_status fcdp__region_put(fcdp_region *region, const fcdp_region_piece *pieces, size_t n, fcdp_event after) FCDP_MUST_CHECK;
/* Every process has put its pieces: H2D of what is new to this region, then a new epoch of the spans in `span_mask`, on the device, and
 * wholly on the host if the rest of the span was (or there is no rest: it was invalid). `after`: the pages' last readers. In use. */
fcdp_status fcdp__region_take(fcdp_region *region, const fcdp_region_piece *pieces, size_t n, uint32_t span_mask, fcdp_event after) FCDP_MUST_CHECK;

/* D2H of this rank's slice of every span that is on the device and not yet on the host, after `after` (an event on the stream that last
 * wrote or read the pages, NULL: nothing pending); waits, then publishes the epochs on the board. */
fcdp_status fcdp__region_store(fcdp_region *region, fcdp_event after) FCDP_MUST_CHECK;
/* H2D of this rank's slice of `span`; the other slices are the caller's to all-gather, then fcdp__region_loaded. In use. Loads of a span that is
 * on the device move nothing. */
fcdp_status fcdp__region_load_slice(fcdp_region *region, uint32_t span) FCDP_MUST_CHECK;
/* The other slices have arrived: the span is on the device. */
void fcdp__region_loaded(fcdp_region *region, uint32_t span);
/* H2D of the whole span. Waits until every slice of this epoch has been stored (unless this rank knows it). In use. */
fcdp_status fcdp__region_load_whole(fcdp_region *region, uint32_t span) FCDP_MUST_CHECK;

/* Unmap, after `after` has passed: the pages go back to the pool. Every span on the device must have its slice on the host or be void
 * (else FCDP_ERR_INVALID: bytes would be lost). Not in use. */
fcdp_status fcdp__region_drop(fcdp_region *region, fcdp_event after) FCDP_MUST_CHECK;
/* What the reclaimer does: a clean region is unmapped; a dirty one is first written whole to the host by this rank alone, so that it can
 * be restored alone. FCDP_PENDING when in use. */
fcdp_status fcdp__region_evict(fcdp_region *region) FCDP_MUST_CHECK;

#endif
