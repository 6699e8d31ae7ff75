/* search.h - which tier each region has, so that the step is shortest within the memory of a GPU and of a
 * node.
 *
 * Exact for costs that add up: every choice has seconds, bytes of the device and bytes of the host, and
 * the sum of the seconds is least while the sums of the bytes stay within their budgets. States that
 * another one dominates (no more of either memory, no more seconds) are dropped, and so are those that a
 * bound shows to be no better than a choice that is known.
 */
#ifndef PLAN_SEARCH_H
#define PLAN_SEARCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tools/plan/simulate.h"

typedef struct plan_choice {
    double seconds, device_bytes, host_bytes; /* infinite seconds: not to be had */
} plan_choice;

typedef struct plan_found {
    double seconds, device_bytes, host_bytes;
    double bound; /* no choice takes less; == seconds where is_exact */
    bool is_exact;
    bool fits; /* false: no choice fits, and the rest is not written */
} plan_found;

/* `choices`: n x n_choices, of region after region. `chosen_out`: n of them. Budgets are finite.
 * `max_states`: how many to keep at most; with more, the best are kept, and `bound` says what the others
 * could have given. False: no memory. */
bool plan_search(const plan_choice *choices, size_t n, size_t n_choices, double device_budget,
                 double host_budget, size_t max_states, uint8_t *chosen_out, plan_found *found_out);

/* The choices of a job's regions, PLAN_N_TIERS each. A region's seconds are those by which a pipeline of
 * one group ahead is held up in its forward and its backward: the larger of what its neighbour computes
 * and what brings it. The device's bytes are those of keeping it. False: as of plan_engine_moves_make. */
bool plan_tier_choices(const plan_job *job, const plan_cluster *cluster, plan_choice *choices_out);

/* Of several regions that are alike, those that stay on the device are spaced evenly among the others, so
 * that the copies of these are too: a pipeline that has more to copy than to compute for some regions in a
 * row falls behind, which the sums above do not see. Bytes stay as they are; whether it is faster, a
 * simulation says. */
void plan_tiers_spread(const plan_job *job, uint8_t *tiers);

#endif
