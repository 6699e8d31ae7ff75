/* tiers.h - where a group's bytes live between its uses, if the job has a plan of that (FCDP_PLAN) or the
 * user says it (FCDP_HOST_MAP). Pure.
 *
 * A plan has a region for each parameter group of a model, as fcdp-plan search has found them. A group whose
 * tier is FCDP_TIER_POLICY has no plan: tau or next-use decides, as without FCDP_PLAN. FCDP_TIER_MAPPED is in
 * no plan: FCDP_HOST_MAP names these groups.
 */
#ifndef FCDP_TIERS_H
#define FCDP_TIERS_H

#include "base/base.h"

typedef enum fcdp_tier {
    FCDP_TIER_POLICY,
    FCDP_TIER_DEVICE,     /* kept on the device, before all groups that the plan does not keep there */
    FCDP_TIER_HOST,       /* in host memory, from which each rank restores its slice */
    FCDP_TIER_HOST_WHOLE, /* in host memory, from which each rank restores the whole */
    FCDP_TIER_FILE,       /* in a file of each rank's (FCDP_SPILL_DIR) */
    FCDP_TIER_GATHER,     /* nowhere: plain FSDP gathers it for each use */
    FCDP_TIER_MAPPED,     /* on its own pages of host memory, at its addresses on the device (mapped.h) */
    FCDP_N_TIERS
} fcdp_tier;

/* As a plan's file has it; "policy". */
const char *fcdp__tier_name(fcdp_tier tier);
/* False: no tier is called that. */
bool fcdp__tier_parse(const char *name, fcdp_tier *tier_out);

typedef struct fcdp_counted {
    const char *name;           /* of a model's root: "" or "(root)" */
    uint64_t trainable, frozen; /* parameters */
} fcdp_counted;

/* Which region of the plan each group of a model is, region_of_out[n_groups]; every region is one group's.
 * By name where each group's name is a region's: their counts of parameters then differ by a sixteenth and
 * 32 Ki at most, since what was measured on a job counts what pads the shards, too. Else the plan was made
 * from a model's shape: each region is the first group left that has exactly as many parameters.
 * FCDP_ERR_INVALID, with the first difference as text: the plan is of another model. */
fcdp_status fcdp__tiers_match(const fcdp_counted *regions, uint32_t n_regions, const fcdp_counted *groups,
                              uint32_t n_groups, uint32_t *region_of_out) FCDP_MUST_CHECK;

#endif
