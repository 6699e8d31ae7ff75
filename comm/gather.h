/* gather.h - the step of an unshard that brings stale extents from their ranks. */
#ifndef FCDP_GATHER_H
#define FCDP_GATHER_H

#include "comm/internal.h"

/* Enqueues it, where something is stale, with the copies to host memory behind it; behind the restore. */
fcdp_status fcdp__gather(fcdp_use *use) FCDP_MUST_CHECK;
/* Does the group stay on the device when its use ends, by FCDP_TAU and the memory that is in use? */
bool fcdp__policy_keeps_group(fcdp_group *group);

#endif
