/* moves.h - what an unshard moves: gather, restore, store. Each is enqueued on the engine's streams; use.c
 * says when, plan.h where the bytes lie.
 */
#ifndef FCDP_MOVES_H
#define FCDP_MOVES_H

#include "comm/internal.h"

/* Fresh spans come back from the node's host memory, where the plan has any; group->restored is its end. */
fcdp_status fcdp__restore(fcdp_use *use) FCDP_MUST_CHECK;

/* Behind the restore: stale extents come from their ranks, where there are any, and go on to host memory.
 * Where shards are packed on the way, by what all ranks have in common, use->packed. */
fcdp_status fcdp__gather(fcdp_use *use) FCDP_MUST_CHECK;
/* Before a gather: if it is to be packed, acquires the set's staging buffer and sees to its pages; nothing is
 * enqueued. Released by fcdp__gather_release, also after a failure of what comes between. */
fcdp_status fcdp__gather_reserve(fcdp_use *use) FCDP_MUST_CHECK;
void fcdp__gather_release(const fcdp_use *use, bool succeeded);
/* Device bytes that the gathers of a group, all of it stale, want of the staging buffer; 0: none. */
size_t fcdp__gather_staging_bytes(const fcdp_group *group);
/* Gathers of more parts than these are packed; a half of the staging buffer has so many bytes at most. Tests
 * change them, of all ranks alike, while there is no engine. */
extern size_t fcdp__packed_above_parts, fcdp__packed_half_bytes;

/* The spans that are on the device alone. */
uint32_t fcdp__unstored(fcdp_group *group);
/* Without a gather: all of this rank's pieces of the spans in `mask`, as they are on the device behind
 * `after`, to host memory. */
fcdp_status fcdp__store_now(fcdp_group *group, uint32_t mask, fcdp_event after) FCDP_MUST_CHECK;

/* Does the group stay on the device when its use ends, by FCDP_TAU and the memory that is in use? */
bool fcdp__policy_keeps_group(fcdp_group *group);

#endif
