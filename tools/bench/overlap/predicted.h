/* predicted.h - a scenario of the bench, as fcdp-plan's model sees it. Nothing is fitted. */
#ifndef FCDP_BENCH_PREDICTED_H
#define FCDP_BENCH_PREDICTED_H

#include "tools/bench/overlap/overlap.h"
#include "tools/plan/job.h"

/* A step, in milliseconds, with group g in tiers[g] (plan_tier). Negative: no memory. */
double predicted_ms(const scenario *s, uint32_t prefetch, const uint8_t tiers[N_GROUPS]);

/* The tiers that fcdp-plan search finds, as it does: the best of its search and of one tier for all groups.
 * `device_bytes`: of the device, for kept groups. Returns their predicted step as above. */
double planned_ms(const scenario *s, uint32_t prefetch, double device_bytes, uint8_t tiers_out[N_GROUPS]);

#endif
