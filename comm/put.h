/* put.h - the host's copy of a gathered group: which spans it lacks, the copies that complete it. */
#ifndef FCDP_PUT_H
#define FCDP_PUT_H

#include "comm/group.h"
#include "comm/plan.h"

/* The spans of `mask` of which the host does not have this rank's pieces. */
uint32_t fcdp__put_lacking(fcdp_group *group, uint32_t mask);
/* The spans that are on the device alone. */
uint32_t fcdp__put_device_only(fcdp_group *group);

/* Behind `after`: this rank's pieces of the plan's stale extents in `span_mask`, and all of its pieces of the
 * spans in `whole_mask`, to host memory. */
fcdp_status fcdp__put(fcdp_group *group, const fcdp_plan *plan, uint32_t span_mask, uint32_t whole_mask,
                      fcdp_event after) FCDP_MUST_CHECK;
/* Without a gather: all of this rank's pieces of the spans in `mask`, as they are on the device. */
fcdp_status fcdp__put_now(fcdp_group *group, uint32_t mask) FCDP_MUST_CHECK;

#endif
