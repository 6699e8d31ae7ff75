/* policy.h - what moves where. Pure: a snapshot in, a decision out. */
#ifndef FCDP_POLICY_H
#define FCDP_POLICY_H

#include "base/base.h"

/* The paper's threshold: at the end of a group's use, device usage below tau * budget keeps the group on the
 * device, which spares the restore, and the store too unless the node's ranks exchange in host memory
 * (moves.c); else the group is stored and released. tau 0 never keeps. used_bytes counts the group itself. */
bool fcdp__policy_keeps(double tau, size_t used_bytes, size_t budget_bytes);

typedef struct fcdp_candidate { /* a region that could give its pages back */
    size_t bytes;
    uint64_t last_use; /* a counter, larger is later */
    bool clean;        /* its host copy is complete: taking its pages is an unmap */
    bool busy;         /* in use: never a victim */
} fcdp_candidate;

/* The next victim: clean before dirty, then least recently used. n when there is none. */
size_t fcdp__policy_victim(const fcdp_candidate *candidates, size_t n);

#endif
