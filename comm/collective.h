/* collective.h - an all-gather of a shard group, counted in the engine's statistics. */
#ifndef FCDP_COLLECTIVE_H
#define FCDP_COLLECTIVE_H

#include "comm/group.h"

/* fcdp_transport's all_gather of `parts` of `group` (NULL: of several) on `stream`, in the lane's turn.
 * The first n_restored parts are counted as a restore's bytes, the others as a gather's; a call that
 * serves both counts as a gather's. */
fcdp_status fcdp__all_gather(fcdp_comm *comm, const fcdp_group *group, fcdp_lane lane, const fcdp_part *parts,
                             size_t n, size_t n_restored, fcdp_stream stream) FCDP_MUST_CHECK;

#endif
