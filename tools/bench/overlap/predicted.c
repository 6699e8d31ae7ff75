/* predicted.c - see the header.
 *
 * Computing is in seconds: a GPU that makes one operation per second. A gather between nodes brings half a
 * group over a node's link, one within the node half a group to each rank, a store half a group to the
 * host. */
#include "tools/bench/overlap/predicted.h"

#include <math.h>
#include <string.h>

#include "tools/plan/choices.h"
#include "tools/plan/simulate.h"

static const double GROUP_BYTES = (double)N_RANKS * SHARD_BYTES;
enum { MAX_STATES = 1 << 13 };

typedef struct described {
    plan_region regions[N_GROUPS];
    plan_job job;
    plan_cluster cluster;
} described;

static void describe(const scenario *s, described *d) {
    double half = GROUP_BYTES / 2, parameters = GROUP_BYTES / 2;
    for (int g = 0; g < N_GROUPS; g++)
        d->regions[g] = (plan_region){.trainable = parameters,
                                      .forward_flops = s->forward_ms / 1e3,
                                      .backward_flops = s->backward_ms / 1e3,
                                      .stays = g == 0};
    d->job = (plan_job){.parameter_bytes = 2,
                        .gradient_bytes = 2,
                        .state_bytes = 12,
                        .n_regions = N_GROUPS,
                        .regions = d->regions};
    double state = N_GROUPS * parameters * (d->job.state_bytes + d->job.gradient_bytes) / N_RANKS;
    d->cluster = (plan_cluster){.n_nodes = N_NODES,
                                .gpus_per_node = NODE_SIZE,
                                .flops = 1,
                                .memory_rate = 2 * state / (s->optimizer_ms / 1e3),
                                .pcie_rate = half / (s->pcie_ms / 1e3),
                                .node_rate = half / (s->node_ms / 1e3),
                                .inter_rate = half / (s->link_ms / 1e3),
                                .node_latency_s = s->node_latency_us / 1e6,
                                .inter_latency_s = s->link_latency_us / 1e6};
}

double predicted_ms(const scenario *s, uint32_t prefetch, const uint8_t tiers[N_GROUPS]) {
    described d;
    plan_step step;
    plan_schedule schedule = {
        .prefetch = prefetch, .n_steps = 1, .micro_batches = 1, .reduce_times = 1, .differences = 1};
    describe(s, &d);
    bool good = plan_simulate(&d.job, &d.cluster, PLAN_FCDP, tiers, &schedule, &step);
    return good ? step.seconds * 1e3 : -1;
}

/* The better of what `tiers` has and `others`; negative `ms`: it has nothing yet. */
static void better_take(const scenario *s, uint32_t prefetch, const uint8_t *others, uint8_t *tiers,
                        double *ms) {
    double others_ms = predicted_ms(s, prefetch, others);
    if (others_ms < 0 || (*ms >= 0 && others_ms >= *ms)) return;
    *ms = others_ms;
    memcpy(tiers, others, N_GROUPS);
}

double planned_ms(const scenario *s, uint32_t prefetch, double device_bytes, uint8_t tiers_out[N_GROUPS]) {
    described d;
    plan_choice choices[N_GROUPS * PLAN_N_TIERS];
    plan_found found;
    uint8_t tiers[N_GROUPS];
    double best_ms = -1;
    describe(s, &d);
    double all_bytes = device_bytes + GROUP_BYTES; /* the root's stay */
    if (!plan_choices_make(&d.job, &d.cluster, prefetch, 1, choices, NULL) ||
        !plan_search(choices, N_GROUPS, PLAN_N_TIERS, all_bytes, 1e30, INFINITY, MAX_STATES, tiers, &found) ||
        !found.fits)
        return -1;
    better_take(s, prefetch, tiers, tiers_out, &best_ms);
    plan_tiers_spread(&d.job, NULL, tiers);
    better_take(s, prefetch, tiers, tiers_out, &best_ms);
    for (int tier = 0; tier < PLAN_N_TIERS; tier++) {
        memset(tiers, tier, sizeof tiers);
        if (tier != PLAN_IN_FILE && (tier != PLAN_ON_DEVICE || N_GROUPS * GROUP_BYTES <= device_bytes))
            better_take(s, prefetch, tiers, tiers_out, &best_ms);
    }
    return best_ms;
}
