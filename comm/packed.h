/* packed.h - a gather of many shards by one collective a lane.
 *
 * In their places in the region, shards of E extents from N nodes of g ranks are E * (N - 1) sends and as
 * many receives between the nodes, and E * N all-gathers within: each part costs the host a call, and NCCL a
 * piece of its plan. Packed side by side they are one all-gather each, and device copies before and after:
 *
 *     staging half: g * N blocks of B bytes (restored whole: N); block l * N + b is rank (b, l)'s
 *     inter         own shards -> block (local, node); blocks (local, 0..N-1) all-gathered between the nodes
 *     node          all of it all-gathered within the node: member l brings blocks (l, 0..N-1)
 *     unpack        for each extent and each l one copy of N rows, to their places in the region
 *
 * A gather that is larger than a half goes through in chunks: bytes [at, at + B) of every rank's shards, one
 * after another. The halves take turns, so a gather packs while the one before unpacks.
 */
#ifndef FCDP_PACKED_H
#define FCDP_PACKED_H

#include "comm/internal.h"

/* Gathers of more parts than these are packed; a half has so many bytes at most. Tests change them, of all
 * ranks alike, while there is no engine. */
extern size_t fcdp__packed_above_parts, fcdp__packed_half_bytes;

/* Is it worth it? Decided from what all ranks have in common. */
bool fcdp__packed_serves(const fcdp_group *group, const fcdp_plan *plan);
/* Device bytes that the gathers of a group, all of it stale, want of the staging buffer; 0: none. */
size_t fcdp__packed_staging_bytes(const fcdp_group *group);

/* Acquires the set's staging buffer and sees to its pages; nothing is enqueued. Released by
 * fcdp__packed_release, also after a failure of what comes between. */
fcdp_status fcdp__packed_reserve(const fcdp_use *use) FCDP_MUST_CHECK;
void fcdp__packed_release(const fcdp_use *use, bool succeeded);
/* Of an acquired buffer: the gather's step between the nodes, and by slices also that within the node, in the
 * place of the plan's parts. use->last: the stream that has written the region. */
fcdp_status fcdp__packed_gather(fcdp_use *use) FCDP_MUST_CHECK;

#endif
