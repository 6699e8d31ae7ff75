/* coalesce.h - small groups that are stale together are gathered in few collectives. */
#ifndef FCDP_COALESCE_H
#define FCDP_COALESCE_H

#include "comm/group.h"

/* Is the group worth it: agreed stale, small (FCDP_COALESCE), used of late, not begun, and not to be asked
 * for again? */
bool fcdp_group_is_small(const fcdp_group *group);
/* Gather what is stale of `groups`, small ones of one shard group, to the node's host memory, in few
 * collectives; it is stale no more. inputs: as for fcdp_group_begin, of one group after another. On every
 * rank of the shard group alike. A failure is the comm's. */
fcdp_status fcdp_groups_coalesce(fcdp_group *const *groups, const uint64_t *inputs, uint32_t n,
                                 fcdp_stream stream) FCDP_MUST_CHECK;

#endif
