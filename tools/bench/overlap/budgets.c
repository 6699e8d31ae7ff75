/* budgets.c - steps in less device memory than all groups take.
 *
 * Kernels as in the first scenario, and over PCIe a step's stores and loads take as long as its kernels.
 * Budgets are what may be kept beside the groups in use: those pages are measured first, with nothing kept.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "tools/bench/overlap/predicted.h"
#include "tools/bench/overlap/run.h"

static const struct budget {
    uint32_t percent; /* of all groups */
    double goal;      /* of the step over that with all of them on the device; 0: none */
} budgets[] = {{100, 0}, {75, 0}, {50, 1.05}, {25, 0}, {0, 1.15}};
enum { N_BUDGETS = sizeof budgets / sizeof *budgets };

/* The median step; negative: gathered parameters were wrong. */
static double step_ms(const run_config *config, shared *s) {
    double least, most;
    if (!scenario_run(config, s)) exit(1);
    double median = median_step_ms(s, config->n_steps, &least, &most);
    unsigned long n_wrong = sum_of(s).wrong;
    if (n_wrong) fprintf(stderr, "%lu gathered shards were wrong\n", n_wrong);
    return n_wrong ? -median : median;
}

/* As step_ms; a row of the table. */
static double budget_run(const run_config *config, shared *s, double all_ms) {
    double ms = step_ms(config, s), median = fabs(ms);
    rank_result sum = sum_of(s);
    double per_step = (double)config->n_steps * N_RANKS * SHARD_BYTES * N_RANKS / NODE_SIZE;
    printf(" %.2f ms | %.3f | %.1f | %.1f | %.1f |", median, all_ms > 0 ? median / all_ms : 1,
           (double)sum.d2h_bytes / per_step, (double)sum.h2d_bytes / per_step,
           (double)sum.evictions / (double)config->n_steps / N_RANKS);
    return ms;
}

/* Pages that the groups in use take where none is kept. */
static size_t pages_in_use(run_config config, shared *s) {
    config.policy = FCDP_POLICY_TAU;
    config.budget_bytes = (size_t)1 << 30;
    if (!scenario_run(&config, s)) exit(1);
    return sum_of(s).peak_bytes / PAGE_BYTES;
}

bool budgets_report(const run_config *asked, shared *s) {
    run_config config = *asked;
    double all_ms = 0, ratios[2][N_BUDGETS];
    bool good = true;
    for (int ahead = 1; ahead >= 0; ahead--) {
        config.prefetch = ahead ? asked->prefetch : 0;
        size_t n_in_use = pages_in_use(config, s);
        printf("\nFCDP_PREFETCH=%d, %zu pages for groups in use; per step and rank:\n\n", config.prefetch,
               n_in_use);
        printf("| budget | step | over all on the device | stored | restored | evictions |\n"
               "| --- | --- | --- | --- | --- | --- |\n");
        for (int i = 0; i < N_BUDGETS; i++) {
            config.policy = FCDP_POLICY_NEXT_USE;
            config.budget_bytes = (n_in_use + N_GROUPS * budgets[i].percent / 100) * PAGE_BYTES;
            printf("| %u %% |", budgets[i].percent);
            double ms = budget_run(&config, s, all_ms);
            printf("\n");
            good = good && ms > 0;
            if (ms < 0) ms = -ms;
            if (ahead && i == 0) all_ms = ms;
            ratios[ahead][i] = ms / all_ms;
        }
    }
    printf("\n");
    for (int i = 0; i < N_BUDGETS; i++) {
        if (budgets[i].goal == 0) continue;
        bool meets = ratios[1][i] <= budgets[i].goal;
        printf("step at %u %% of W over all on the device: %.3f (goal %.2f%s); without prefetch %.3f\n",
               budgets[i].percent, ratios[1][i], budgets[i].goal, meets ? "" : ", MISSED", ratios[0][i]);
        good = good && meets;
    }
    return good;
}

/* ---- plans ---- */

static const uint32_t plan_percents[] = {75, 50, 25, 0};
static const double taus[] = {0, 0.25, 0.5, 0.75, 1};
enum { N_PLANS = sizeof plan_percents / sizeof *plan_percents, N_TAUS = sizeof taus / sizeof *taus };
static const double MOST_ERROR = 0.05; /* of a prediction */
static const double MOST_OVER = 1.01; /* of a plan's step over another one; the clock's own spread is in it */

static const fcdp_tier fcdp_tiers[PLAN_N_TIERS] = {[PLAN_ON_DEVICE] = FCDP_TIER_DEVICE,
                                                   [PLAN_BY_SLICE] = FCDP_TIER_HOST,
                                                   [PLAN_WHOLE] = FCDP_TIER_HOST_WHOLE,
                                                   [PLAN_IN_FILE] = FCDP_TIER_FILE,
                                                   [PLAN_GATHERED] = FCDP_TIER_GATHER};

/* The best of the taus. */
static double best_tau_ms(run_config config, shared *s, double *tau_out) {
    double best = 0;
    for (int i = 0; i < N_TAUS; i++) {
        config.tau = taus[i];
        double ms = step_ms(&config, s);
        if (ms < 0) return ms;
        if (best > 0 && ms >= best) continue;
        best = ms;
        *tau_out = taus[i];
    }
    return best;
}

static bool plan_row(run_config config, shared *s, uint32_t percent) {
    uint8_t planned[N_GROUPS];
    fcdp_tier tiers[N_GROUPS];
    uint32_t n_kept = 0;
    double tau = 0, room = (double)(N_GROUPS * percent / 100) * N_RANKS * SHARD_BYTES;
    double predicted = planned_ms(config.scenario, (uint32_t)config.prefetch, room, planned);
    for (int g = 0; g < N_GROUPS; g++) {
        tiers[g] = fcdp_tiers[planned[g]];
        n_kept += tiers[g] == FCDP_TIER_DEVICE;
    }
    double best = best_tau_ms(config, s, &tau);
    config.tiers = tiers;
    double ms = step_ms(&config, s);
    bool good = predicted > 0 && best > 0 && ms > 0 && ms / predicted - 1 <= MOST_ERROR &&
                predicted / ms - 1 <= MOST_ERROR && ms / best <= MOST_OVER;
    printf("| %u %% | %.2f ms | %.2f ms | %+.1f %% | %u | %.2f ms, FCDP_TAU=%g | %.3f%s |\n", percent, ms,
           predicted, 100 * (predicted / ms - 1), n_kept, best, tau, ms / best, good ? "" : " MISSED");
    return good;
}

bool plans_report(const run_config *asked, shared *s) {
    run_config config = *asked;
    bool good = true;
    size_t n_in_use = pages_in_use(config, s);
    config.policy = FCDP_POLICY_TAU;
    printf("FCDP_PREFETCH=%d; the budget beside %zu pages for groups in use; goals: a prediction within %g "
           "%%, and no "
           "fixed FCDP_TAU is faster\n\n",
           config.prefetch, n_in_use, 100 * MOST_ERROR);
    printf("| budget | step, as planned | predicted | error | kept on the device | best fixed setting | plan "
           "over it "
           "|\n| --- | --- | --- | --- | --- | --- | --- |\n");
    for (int i = 0; i < N_PLANS; i++) {
        config.budget_bytes = (n_in_use + N_GROUPS * plan_percents[i] / 100) * PAGE_BYTES;
        if (!plan_row(config, s, plan_percents[i])) good = false;
        fflush(stdout);
    }
    return good;
}
