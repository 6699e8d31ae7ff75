/* choices.h - what can be chosen of a job's regions, and the best of it: the tier of each, and in how many
 * parts its linear layers are (fcdp.split). Pure.
 */
#ifndef PLAN_CHOICES_H
#define PLAN_CHOICES_H

#include "tools/plan/cluster.h"
#include "tools/plan/job.h"
#include "tools/plan/search.h"
#include "tools/plan/split.h"

typedef struct plan_limits {
    double device_bytes; /* for regions: kept, staying, and gathered at the same time */
    double host_bytes;
    uint32_t ahead;    /* as plan_split's */
    uint32_t n_splits; /* 1 to PLAN_N_SPLITS: parts are 1, 2, 4, ..., 1 << (n_splits - 1); 1: none is split */
    uint32_t max_states; /* as plan_search's */
} plan_limits;

/* The choices of each region, n_splits x PLAN_N_TIERS of them: by parts, then by tier. A region's seconds are
 * those by which a pipeline of one group ahead is held up in its forward and its backward: the larger of what
 * its neighbour computes and what brings it. Of a part, the neighbour is the part before: what bringing it
 * takes longer is added, and so are the copies that parts cost. All pieces of a region have one tier. The
 * device's bytes are those of keeping it, and those that stay. `gathered_out`, n_splits for each region, if
 * not NULL: bytes that are gathered while it is used. False: as of plan_engine_moves_make. */
bool plan_choices_make(const plan_job *job, const plan_cluster *cluster, uint32_t ahead, uint32_t n_splits,
                       plan_choice *choices_out, double *gathered_out);

/* The best tier of each region, and number of parts, so that
 *
 *     kept + staying + the most that is gathered while a region is used <= device_bytes.
 *
 * The last is a maximum: for each value that it can have, the choices that stay below are searched, the most
 * promising first, and those with a bound that is no better than what is known are left out. `seconds` of
 * found_out is that of the choices, and device_bytes what they take, the maximum included. Of choices that
 * take as long, the one with fewer parts is taken. False: as of plan_choices_make. */
bool plan_choose(const plan_job *job, const plan_cluster *cluster, const plan_limits *limits,
                 uint8_t *tiers_out, uint8_t *parts_out, plan_found *found_out);

/* Of several regions that are alike, and in as many parts, those that stay on the device are spaced evenly
 * among the others, so that the copies of these are too: a pipeline that has more to copy than to compute
 * for some regions in a row falls behind, which the sums above do not see. Bytes stay as they are; whether
 * it is faster, a simulation says. `parts`: NULL: none is split. */
void plan_tiers_spread(const plan_job *job, const uint8_t *parts, uint8_t *tiers);

#endif
