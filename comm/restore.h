/* restore.h - the step of an unshard that brings fresh spans back from the node's host memory. */
#ifndef FCDP_RESTORE_H
#define FCDP_RESTORE_H

#include "comm/internal.h"

/* Enqueues it, where the plan has spans to restore; group->restored is its end. */
fcdp_status fcdp__restore(fcdp_use *use) FCDP_MUST_CHECK;

#endif
