/* run.h - runs of a scenario, and what is reported of them. */
#ifndef FCDP_BENCH_RUN_H
#define FCDP_BENCH_RUN_H

#include "tools/bench/overlap/overlap.h"

typedef struct shared { /* by the ranks; mapped before they begin */
    board board;
    rank_result results[N_RANKS];
} shared;

/* False: a rank ended badly; a line on stderr says how. */
bool scenario_run(const run_config *config, shared *s);
/* Of the ranks' steps together: all ranks have the same steps. */
double median_step_ms(const shared *s, uint32_t n_steps, double *least_out, double *most_out);
/* Over the ranks; the largest peak_bytes. */
rank_result sum_of(const shared *s);

/* ---- budgets.c; false: a figure misses its goal, or gathered parameters were wrong ---- */

/* FCDP_POLICY=next-use in less and less device memory. */
bool budgets_report(const run_config *asked, shared *s);
/* The plans that fcdp-plan search finds, beside what it predicts and beside fixed settings of FCDP_TAU. */
bool plans_report(const run_config *asked, shared *s);

#endif
