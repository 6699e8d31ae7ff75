/* region.h - the gathered parameters of one group, the same bytes in every tier, at one device address for
 * life.
 *
 * A region has device pages from acquire to release (slot.h), or longer where it is kept. In between its
 * bytes are filled by a gather, which the caller enqueues, or loaded from the node's shared host memory. What
 * a function here enqueues is done in stream order: the state says what holds once it is, and only acquire,
 * destroy and the reclaimer ever wait for the device.
 *
 * A region knows slices, not ranks. The node's processes write the host copy together, each the pieces that
 * it brought; slice i of n_slices is the part of each span that process i loads where the others' parts reach
 * it by other ways.
 *
 * Per span, of `epoch`: on_device the slot holds it
 *                        stored      this process's pieces are in host memory
 *                        whole       this process has written the whole span there (an eviction)
 *     invalid = !on_device && !stored && !whole          on_device => in_use || kept
 *     the host has all of it <=> whole || every process's word STORED has reached the epoch
 *
 * Words on the board (board.h), written by streams of their owner, waited for by streams of the others:
 *     STORED_s = e    the owner's pieces of span s of epoch e are in host memory
 *     READY = f       the owner does not read host bytes older than fill f any more
 *
 * Threads: one thread at a time makes calls on a given region; the reclaimer may evict a kept one, from any
 * thread.
 */
#ifndef FCDP_REGION_H
#define FCDP_REGION_H

#include "tiering/board.h"
#include "tiering/layout.h"
#include "tiering/tiering.h"

typedef struct fcdp_region fcdp_region;

typedef struct fcdp_span_state {
    bool on_device, stored, whole;
    uint32_t epoch;
} fcdp_span_state;
typedef struct fcdp_region_state {
    bool mapped, in_use, kept;
    fcdp_span_state span[FCDP_N_SPANS];
} fcdp_region_state;

/* `layout` and `name` are copied; `slice` of layout->n_slices is this process's; `block` is borrowed
 * (data_bytes >= layout->bytes). A block serves one region, since its board counts that region's epochs. */
fcdp_status fcdp__region_create(fcdp_tiering *tiering, const char *name, const fcdp_layout *layout,
                                uint32_t slice, fcdp_host_block *block,
                                fcdp_region **region_out) FCDP_MUST_CHECK;
/* Until the device is done with it, also with what a failed call has left on the copy streams; what the
 * driver rejects is tried once more. */
fcdp_status fcdp__region_drain(const fcdp_region *region) FCDP_MUST_CHECK;
/* Drains it. */
void fcdp__region_destroy(fcdp_region *region);
fcdp_dptr fcdp__region_base(const fcdp_region *region);
void fcdp__region_state(fcdp_region *region, fcdp_region_state *state_out);
/* Recorded by the caller behind what made the region whole: others wait for it. */
fcdp_event fcdp__region_ready(const fcdp_region *region);
fcdp_event fcdp__region_loaded(const fcdp_region *region);
fcdp_event fcdp__region_stored(const fcdp_region *region);

/* Pages, until release. Not in use. Waits only where memory lacks, or where exact mapping
 * must unmap what the device still uses. */
fcdp_status fcdp__region_acquire(fcdp_region *region) FCDP_MUST_CHECK;
/* What `stream` gets from now on comes after all that was done with the pages before. For each stream that
 * writes to the region without having waited for one that was ordered so. In use. */
fcdp_status fcdp__region_order(fcdp_region *region, fcdp_stream stream) FCDP_MUST_CHECK;
/* `stream` is behind the last use. keep: the pages stay the region's, until the reclaimer needs them. Else
 * the bytes are where the host has them, or nowhere. */
fcdp_status fcdp__region_release(fcdp_region *region, fcdp_stream stream, bool keep) FCDP_MUST_CHECK;

/* The spans' bytes are invalid in every tier (their parameters changed, or somebody wrote into them). */
void fcdp__region_invalidate(fcdp_region *region, uint32_t span_mask);

/* A gather of new content begins, on every process of the node alike: the spans of `span_mask` have a new
 * epoch, on the device once the caller's operations are done; the others' bytes stay. This process reads no
 * older host bytes from here on, and says so. In use. */
fcdp_status fcdp__region_begin_fill(fcdp_region *region, uint32_t span_mask) FCDP_MUST_CHECK;
typedef struct fcdp_piece_list {
    const fcdp_piece *pieces; /* offsets in the region */
    size_t n;
} fcdp_piece_list;
/* After `after`, D2H of this process's pieces of the spans in `span_mask`; then their
 * words. In use; `stored` is recorded. */
fcdp_status fcdp__region_store(fcdp_region *region, uint32_t span_mask, fcdp_piece_list own,
                               fcdp_event after) FCDP_MUST_CHECK;
/* device bytes, and where in the region they belong */
typedef struct fcdp_source {
    fcdp_dptr at;
    fcdp_piece place;
} fcdp_source;
/* New content for the spans of `span_mask`, on every process of the node alike, that comes to
 * the host alone: after `after`, D2H of this process's pieces from `sources`; then their
 * words. Not in use; `stored` is recorded. */
fcdp_status fcdp__region_fill_host(fcdp_region *region, uint32_t span_mask, const fcdp_source *sources,
                                   size_t n, fcdp_event after) FCDP_MUST_CHECK;
/* H2D of pieces that the others store, once they have. In use, ordered; `loaded` is recorded. */
fcdp_status fcdp__region_load_pieces(fcdp_region *region, uint32_t span_mask,
                                     fcdp_piece_list others) FCDP_MUST_CHECK;
/* H2D of this process's slice of `span`, once the host has it; the other slices are the caller's to
 * all-gather. In use, ordered; `loaded` is recorded, and the span is on the device. */
fcdp_status fcdp__region_load_slice(fcdp_region *region, uint32_t span) FCDP_MUST_CHECK;
/* H2D of the whole span, likewise. */
fcdp_status fcdp__region_load_whole(fcdp_region *region, uint32_t span) FCDP_MUST_CHECK;

/* Have the others done what streams wait for, here for waited_ns so far? FCDP_PENDING: as far as they will,
 * or they may still; else what fcdp__board_wait_all says. Any thread. */
fcdp_status fcdp__region_query_peers(fcdp_region *region, uint64_t waited_ns) FCDP_MUST_CHECK;
/* Waits of streams that may never end, since a peer is gone: let them pass. What they guard is
 * invalid; nobody may use it. Any thread. */
void fcdp__region_end_waits(fcdp_region *region);

#endif
