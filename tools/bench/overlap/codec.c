/* codec.c - what is reported of FCDP_CODEC=delta.
 *
 * The host encodes and decodes. Here its functions take what their threads had of a core, in modelled time,
 * so ranks that share this machine's cores do not make each other late. But the bench's bytes are few, and a
 * link on which they take as long as a scenario says is slow. How many bytes they stand for, and so how long
 * the host takes for these, depends on the link that is meant.
 */
#include <stdio.h>
#include <stdlib.h>

#include "tools/bench/overlap/run.h"

double crossing_ms(const run_config *config, const rank_result *sum) {
    double n_gathers = (double)(config->n_warm + config->n_steps - 1) * N_GROUPS * N_NODES;
    return (double)sum->crossed_bytes / n_gathers / (link_rate(config->scenario) * 1e6);
}

double host_ms(const run_config *config, const rank_result *sum) {
    double ns = (sum->encode_ns + (N_NODES - 1) * sum->decode_ns) / N_RANKS;
    return config->core_times * SHARD_BYTES * ns / 1e6;
}

double core_times(const scenario *s, double gbit_per_s) {
    return gbit_per_s / 8 / link_rate(s);
}

bool codec_print(const run_config *config, const rank_result *sum) {
    uint64_t n_gathers = (uint64_t)(config->n_warm + config->n_steps - 1) * N_GROUPS * N_RANKS;
    double encode_ns = sum->encode_ns / N_RANKS, decode_ns = (N_NODES - 1) * sum->decode_ns / N_RANKS;
    double group_ms = config->core_times * SHARD_BYTES / 1e6;
    printf("  differences: %.3f of the bytes crossed; the device encoded %llu of %llu times; of a group, the "
           "host had %.2f ms (%.1f GB/s) to do before they crossed, and decoded for %.2f (%.1f)\n",
           (double)sum->crossed_bytes / (double)((uint64_t)(N_NODES - 1) * SHARD_BYTES * n_gathers),
           (unsigned long long)sum->n_by_device, (unsigned long long)n_gathers, encode_ns * group_ms,
           1 / encode_ns, decode_ns * group_ms, (N_NODES - 1) / decode_ns);
    if (sum->n_differences == n_gathers && !sum->n_whole) return true;
    fprintf(stderr, "%llu of %llu gathers were of differences, and %llu crossed whole after all\n",
            (unsigned long long)sum->n_differences, (unsigned long long)n_gathers,
            (unsigned long long)sum->n_whole);
    return false;
}

/* ---- what it costs where nothing is gained ---- */

static const double links[] = {1, 10, 25}; /* Gbit/s */
enum { N_LINKS = sizeof links / sizeof *links, N_ROUNDS = 3 };
static const double MOST_COST = 1.02;

static int ascending(const void *a, const void *b) {
    double one = *(const double *)a, other = *(const double *)b;
    return one < other ? -1 : one > other;
}

/* The median of the rounds' medians. */
static double median(double rounds[N_ROUNDS]) {
    qsort(rounds, N_ROUNDS, sizeof *rounds, ascending);
    return rounds[N_ROUNDS / 2];
}

bool codec_cost(const run_config *asked, shared *s) {
    run_config config = *asked;
    double ms[1 + N_LINKS][N_ROUNDS], least, most;
    bool good = true;
    config.timelines = NULL;
    for (int round = 0; round < N_ROUNDS; round++)
        for (int i = 0; i <= N_LINKS; i++) {
            config.codec = i > 0;
            config.core_times = i > 0 ? core_times(config.scenario, links[i - 1]) : 1;
            if (!scenario_run(&config, s)) return false;
            if (sum_of(s).wrong) {
                fprintf(stderr, "%lu gathered shards were wrong\n", sum_of(s).wrong);
                good = false;
            }
            ms[i][round] = median_step_ms(s, config.n_steps, &least, &most);
        }
    double without = median(ms[0]);
    printf("a step that compute binds, with the codec over without (%.2f ms); medians of %d runs in turns:\n",
           without, N_ROUNDS);
    for (int i = 0; i < N_LINKS; i++) {
        double ratio = median(ms[1 + i]) / without;
        bool meets = ratio <= MOST_COST;
        printf("  groups of %.1f MB, on a link of %g Gbit/s: %.3f (goal %.2f%s)\n",
               N_RANKS * SHARD_BYTES * core_times(config.scenario, links[i]) / 1e6, links[i], ratio,
               MOST_COST, meets ? "" : ", MISSED");
        good = good && meets;
    }
    return good;
}
