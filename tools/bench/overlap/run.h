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

/* ---- codec.c ---- */

/* What keeps the link busy for a group, as it crossed in the run. */
double crossing_ms(const run_config *config, const rank_result *sum);
/* What keeps a core of each rank busy for a group: it encodes, and decodes what the others sent. */
double host_ms(const run_config *config, const rank_result *sum);
/* What the codec did in the run, printed. False: gathers crossed whole. */
bool codec_print(const run_config *config, const rank_result *sum);
/* What it adds to a step that compute binds, for links of several rates. False: a goal is missed, or gathered
 * parameters were wrong. */
bool codec_cost(const run_config *asked, shared *s);
/* How many times the core's time of this bench's bytes a group has on a link of so many Gbit/s, on which its
 * gather takes what the scenario says. */
double core_times(const scenario *s, double gbit_per_s);

/* ---- budgets.c; false: a figure misses its goal, or gathered parameters were wrong ---- */

/* FCDP_POLICY=next-use in less and less device memory. */
bool budgets_report(const run_config *asked, shared *s);
/* The plans that fcdp-plan search finds, beside what it predicts and beside fixed settings of FCDP_TAU. */
bool plans_report(const run_config *asked, shared *s);

#endif
