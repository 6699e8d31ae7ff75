/* region.h - the gathered parameters of one group, the same bytes in every tier, at one device address for
 * life.
 *
 * A region has device pages from acquire to release (slot.h), or longer if it is kept. In between, a gather
 * that the caller enqueues fills its bytes, or a load from the node's shared host memory. A function's
 * operations run in stream order, and the state says what holds once they have run. Only acquire, destroy and
 * the reclaimer ever wait for the device.
 *
 * A region knows slices, not ranks. The node's processes write the host copy together: each writes the pieces
 * that it gathered. Slice i of n_slices is the part of each span that process i loads when an all-gather
 * brings the rest. What is in host memory is in every copy there (host.h); a process loads from its own.
 *
 * Per span, of `epoch`: on_device the slot holds it
 *                        stored      this process's pieces are in host memory
 *                        whole       this process has written the whole span there (an eviction)
 *     invalid = !on_device && !stored && !whole          on_device => in_use || kept
 *     the host has all of it <=> whole || every process's word STORED has reached the epoch
 *
 * Words on the board (board.h), written by streams of their owner, waited for by streams of the others:
 *     STORED_s = e    the owner's pieces of span s, epoch e, are in host memory
 *     READY = f       the owner's reads and writes of host bytes older than fill f are over, but for those of
 *                     a base (fcdp_base): these end before it brings the others anything of fill f
 *
 * Threads: one thread at a time makes calls on a given region; the reclaimer may evict a kept one, from any
 * thread.
 *
 * Preconditions of functions: "in use" (from acquire to release), "not in use", and "ordered" (the stream was
 * given to fcdp__region_order in this use).
 */
#ifndef FCDP_REGION_H
#define FCDP_REGION_H

#include "tiering/board.h"
#include "tiering/layout.h"
#include "tiering/spill.h"
#include "tiering/tiering.h"
#include "tiering/tiers.h"

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
/* The same for a region that no host memory is for: its slices live in this process's file (spill.h), which
 * has room for them: errors as from fcdp__spill_reserve. It is stored and loaded by whole slices, and kept
 * by nobody: only begin_fill, store, fetch and load_slice (or load_whole, where the slice is the whole)
 * move its bytes. */
fcdp_status fcdp__region_create_spilled(fcdp_tiering *tiering, const char *name, const fcdp_layout *layout,
                                        uint32_t slice, fcdp_spill *spill,
                                        fcdp_region **region_out) FCDP_MUST_CHECK;
bool fcdp__region_is_spilled(const fcdp_region *region);
/* Of a spilled region, not in use: the host waits until this process's slice of `span` can be loaded.
 * False: the bytes are lost, and every process of the node must fill the span anew. */
bool fcdp__region_fetch(fcdp_region *region, uint32_t span);
/* Wait until the device is done with the region, including what a failed call has left on the copy streams.
 * A wait that fails is tried once more. */
fcdp_status fcdp__region_drain(const fcdp_region *region) FCDP_MUST_CHECK;
/* Drains the region first. NULL: does nothing. */
void fcdp__region_destroy(fcdp_region *region);
/* Its copies run on these streams, one for each direction, instead of the tiering's. They outlive the region.
 * Before its first use. */
void fcdp__region_set_streams(fcdp_region *region, const fcdp_stream *streams);
/* A plan says where it lives; FCDP_TIER_POLICY without this call. Before its first use. */
void fcdp__region_set_tier(fcdp_region *region, fcdp_tier tier);
fcdp_dptr fcdp__region_base(const fcdp_region *region);
/* In the trace's table, 0: none. */
uint32_t fcdp__region_object(const fcdp_region *region);
void fcdp__region_state(fcdp_region *region, fcdp_region_state *state_out);
/* The caller records `ready` behind the last operation that filled or restored the region. */
fcdp_event fcdp__region_ready(const fcdp_region *region);
/* Recorded behind the last copies of the region on the two copy streams. */
fcdp_event fcdp__region_loaded(const fcdp_region *region);
fcdp_event fcdp__region_stored(const fcdp_region *region);

/* Not in use. Give the region pages until release. The host waits only where memory is short, or where exact
 * mapping must unmap what the device still uses. */
fcdp_status fcdp__region_acquire(fcdp_region *region) FCDP_MUST_CHECK;
/* Order the later work of `stream` behind every earlier use of the pages. Call it for each stream that writes
 * to the region, unless that stream waits for one that was ordered. In use. */
fcdp_status fcdp__region_order(fcdp_region *region, fcdp_stream stream) FCDP_MUST_CHECK;
/* The use ends; `stream` is behind its last operation. keep: the pages stay the region's until the reclaimer
 * needs them. Otherwise only host memory has the bytes from here on, if anything has (of a mapped region,
 * mapped.h: its block there). */
fcdp_status fcdp__region_release(fcdp_region *region, fcdp_stream stream, bool keep) FCDP_MUST_CHECK;

/* With FCDP_POLICY=next-use (schedule.h), in use. The use needs `load_bytes` of what the region had before,
 * from whichever tier, and fills others; `store_bytes` of these need not be stored if the region is kept. */
void fcdp__region_plan_use(fcdp_region *region, size_t load_bytes, size_t store_bytes, bool fills);
/* Is it to be kept behind this use? Within a use, true may become false: a region comes or goes. */
bool fcdp__region_is_planned(fcdp_region *region);
/* Is nothing to be loaded of what it has now, as its next use fills it anew? Within a use, true may become
 * false: a use comes that the period did not tell. */
bool fcdp__region_dies(fcdp_region *region);

/* Make the spans' bytes invalid in every tier: their parameters have changed, or the program wrote into
 * them. */
void fcdp__region_invalidate(fcdp_region *region, uint32_t span_mask);

/* The program also uses the region at `address` on `stream`, another than the one it gives to release: the
 * release then comes behind the work on that stream, too. FCDP_ERR_INVALID: no region that is in use is
 * there. Any thread. */
fcdp_status fcdp__regions_record_stream(fcdp_tiering *tiering, fcdp_dptr address,
                                        fcdp_stream stream) FCDP_MUST_CHECK;

/* Begin a fill, on every process of the node alike. Each span of `span_mask` gets a new epoch and counts as
 * on the device, where the caller's operations bring it; other spans keep their bytes. This process raises
 * READY behind its older reads and writes of host memory. In use. */
fcdp_status fcdp__region_begin_fill(fcdp_region *region, uint32_t span_mask) FCDP_MUST_CHECK;
typedef struct fcdp_piece_list {
    const fcdp_piece *pieces; /* offsets in the region */
    size_t n;
} fcdp_piece_list;
/* Enqueue, behind `after`, the copies of this process's pieces of the spans in `span_mask` to the host, then
 * their words. In use; `stored` is recorded. */
fcdp_status fcdp__region_store(fcdp_region *region, uint32_t span_mask, fcdp_piece_list own,
                               fcdp_event after) FCDP_MUST_CHECK;
/* The same where `copy` enqueues what brings this process's pieces there, to every copy of the block, on the
 * stream that it is given: the host from elsewhere in its memory, as what came over the network. No byte is
 * read from the device then. */
typedef fcdp_status (*fcdp_region_copy)(void *arg, fcdp_stream stream);
fcdp_status fcdp__region_store_by(fcdp_region *region, uint32_t span_mask, fcdp_region_copy copy, void *arg,
                                  fcdp_event after) FCDP_MUST_CHECK;
/* Device bytes outside the region, and their place in it. */
typedef struct fcdp_source {
    fcdp_dptr at;
    fcdp_piece place;
} fcdp_source;
/* New content for the spans of `span_mask`, on every process of the node alike, that goes to host memory
 * alone. Enqueue, behind `after`, the copies of this process's pieces from `sources`, then their words.
 * Not in use; `stored` is recorded. */
fcdp_status fcdp__region_fill_host(fcdp_region *region, uint32_t span_mask, const fcdp_source *sources,
                                   size_t n, fcdp_event after) FCDP_MUST_CHECK;
/* New content for the spans of `span_mask`, which every process of the node has written to host memory by
 * itself, not by a stream: each has written its part to every copy, and knows that the others have. Nothing
 * had filled them before. Not in use. */
void fcdp__region_fill_by_host(fcdp_region *region, uint32_t span_mask);
/* Enqueue the copies to the device of pieces that the others store, behind their words. In use, ordered;
 * `loaded` is recorded. */
fcdp_status fcdp__region_load_pieces(fcdp_region *region, uint32_t span_mask,
                                     fcdp_piece_list others) FCDP_MUST_CHECK;
/* Where pieces of a span are as the last fill brought them. In host memory, what the host does for a stream
 * that is behind `stored` may read them; others' pieces only if fcdp__region_others_stored says so there.
 * READY of the next fill does not wait for these reads: they must be over before this process brings the
 * other processes anything of that fill, since these store it only then; what they store without it (of
 * fcdp__region_store_by) must lie elsewhere. */
typedef enum fcdp_base_tier { FCDP_BASE_NOWHERE, FCDP_BASE_IN_HOST, FCDP_BASE_ON_DEVICE } fcdp_base_tier;
typedef struct fcdp_base {
    fcdp_base_tier where;
    uint32_t epoch;
    bool of_others; /* in host memory, and others have stored some of them */
} fcdp_base;
/* Before the next fill. `of_others`: of all processes' pieces; else of those that this one stores. */
fcdp_base fcdp__region_base_of(fcdp_region *region, uint32_t span, bool of_others);
/* Has each other process stored its pieces of `epoch`, or of a later one? Takes no lock; any thread. */
bool fcdp__region_others_stored(const fcdp_region *region, uint32_t span, uint32_t epoch);
/* Enqueue the copy to the device of this process's slice of `span`, once host memory has it. The caller
 * all-gathers the other slices. In use, ordered; `loaded` is recorded, and the span is on the device. */
fcdp_status fcdp__region_load_slice(fcdp_region *region, uint32_t span) FCDP_MUST_CHECK;
/* The same for the whole span, so that nothing is left to all-gather. */
fcdp_status fcdp__region_load_whole(fcdp_region *region, uint32_t span) FCDP_MUST_CHECK;

/* Enqueue, behind `after`, the copy of a piece of `span` from host memory to elsewhere on the device. The
 * host waits until host memory has it: errors as from fcdp__board_wait_all. Not in use; `loaded` is recorded,
 * and the state is as before. */
fcdp_status fcdp__region_read(fcdp_region *region, uint32_t span, fcdp_piece piece, fcdp_dptr to,
                              fcdp_event after) FCDP_MUST_CHECK;

/* Copy a piece of `span`, from whichever tier has it, to `to_out`, in ordinary host memory. The host waits
 * for this process's streams. *has_out: false, and nothing is copied, where no tier has it but a file, or a
 * process of the node has not stored its pieces. In use, `ready` has been recorded in this use. The state is
 * as before. */
fcdp_status fcdp__region_peek(fcdp_region *region, uint32_t span, fcdp_piece piece, void *to_out,
                              bool *has_out) FCDP_MUST_CHECK;

/* Check the peers for whose words streams have waited `waited_ns`. FCDP_PENDING: no peer has failed or is too
 * late, or the region is spilled, and has no words; else an error as from fcdp__board_wait_all. Any
 * thread. */
fcdp_status fcdp__region_query_peers(fcdp_region *region, uint64_t waited_ns) FCDP_MUST_CHECK;
/* A peer is gone: end the waits of streams for its words. The bytes that these waits guard are invalid and
 * must not be used. Any thread. */
void fcdp__region_end_waits(fcdp_region *region);

#endif
