/* policy.h - what moves where. Pure: a snapshot in, a decision out. */
#ifndef FCDP_POLICY_H
#define FCDP_POLICY_H

#include "tiering/tiers.h"

/* FCDP_POLICY=tau, the paper's threshold: at the end of a group's use, device usage below tau * budget keeps
 * the group on the device, which spares the restore, and the store too unless the node's ranks exchange in
 * host memory (moves.c); else the group is stored and released. tau 0 never keeps. used_bytes counts the
 * group itself. */
bool fcdp__policy_keeps(double tau, size_t used_bytes, size_t budget_bytes);

typedef struct fcdp_candidate { /* a region that could give its pages back */
    size_t bytes;
    /* uses of any region until it is needed again; where that is not known, uses since it was used last */
    uint64_t distance;
    bool clean;   /* its host copy is complete: taking its pages is an unmap */
    bool busy;    /* in use: never a victim */
    bool planned; /* FCDP_TIER_DEVICE */
} fcdp_candidate;

/* The next victim: those that no plan keeps first; then clean before dirty, then the one of the largest
 * distance. n when there is none. */
size_t fcdp__policy_victim(const fcdp_candidate *candidates, size_t n);

/* A group that asks for host memory. */
typedef struct fcdp_host_claim {
    size_t bytes, frozen_bytes; /* of its region; of that, in the frozen span */
    bool stays;                 /* not resharded between forward and backward */
    uint32_t index;             /* the caller's */
    fcdp_tier tier;
} fcdp_host_claim;

/* Sort the claims in the order in which host memory is given while it lasts: by what a copy there spares
 * between the nodes, in a step of one forward and one backward, per byte of it. Plain FSDP gathers a group
 * twice in such a step, or once if it stays gathered. With the copy, frozen bytes are not gathered at all,
 * and trainable ones once. So a group spares
 *     frozen_bytes * (2 or 1) + trainable bytes * (1 or 0).
 * Of equals, the one with more frozen bytes comes first, since more passes in a step spare more of them; then
 * the larger one, as small ones fill gaps; then by index. Behind them come those that a plan puts in files,
 * and then those that it has gathered again, in the order of their indices: they take no host memory. */
void fcdp__policy_host_order(fcdp_host_claim *claims, size_t n);

/* ---- FCDP_POLICY=next-use: the order of uses is known, from the last time that it was the same ---- */

/* How many uses ago the program was where it is now: the L >= 1 for which the symbols before symbols[n - L]
 * agree with those at the end for longest, of equally long ones the smallest. `n_same_out`, at most n - L:
 * how many symbols agree. 0: the last symbol is new. `scratch` has n elements. O(n). */
size_t fcdp__policy_period(const uint32_t *symbols, size_t n, uint32_t *scratch, size_t *n_same_out);

/* One use of a period. What a region holds between two of its uses is an interval. To keep it on the device
 * spares what the later use loads. If all intervals between two fills are kept, the store is spared too. */
typedef struct fcdp_planned_use {
    uint32_t region;    /* 0 <= region < n_regions */
    uint32_t n_pages;   /* of the region */
    size_t load_bytes;  /* of what it has from before: to be loaded unless the region was kept. 0: nothing */
    size_t store_bytes; /* of what it fills anew: to be stored once unless it is kept to the next fill */
    uint32_t n_shunned; /* above 0: what it has is not to be kept, whatever the budget */
    bool evicted, evicted_before; /* the schedule's: what was kept behind it; and a period ago */
    uint32_t n_held;              /* later uses that begin before this one has ended */
    /* of all other holders and of regions in use, this one too: at most, from this use to the next one */
    size_t busy_pages;
} fcdp_planned_use;

/* Which intervals to keep, if the `n` uses repeat for ever: keep_out[i] for the one that begins at use i. At
 * no use j do the kept intervals that are open there (i + uses[i].n_held < j, and ended behind j) have more
 * than n_budget_pages - uses[j].busy_pages pages. FCDP_ERR_SYSTEM: no memory. O(n * n_regions); periods of up
 * to 1024 uses are looked at more closely. */
fcdp_status fcdp__policy_plan(const fcdp_planned_use *uses, size_t n, uint32_t n_regions,
                              size_t n_budget_pages, size_t page_bytes, bool *keep_out) FCDP_MUST_CHECK;

#endif
