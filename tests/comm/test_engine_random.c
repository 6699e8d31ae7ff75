/* Random training programs on random clusters, every byte checked in every use. */
#include <stdlib.h>

#include "tests/comm/engine_world.h"
#include "tests/comm/program.h"

static size_t random_shard_bytes(test_random *random) {
    switch (random_below(random, 6)) {
    case 0: return 0;
    case 1: return 1 + random_below(random, 600);
    case 2: return 511 + random_below(random, 3);
    case 3: return 200000 + random_below(random, 300000);
    default: return 1 + random_below(random, 20000);
    }
}

static cluster_config random_cluster(test_random *random) {
    static const double taus[] = {0, 0.5, 1};
    static const size_t coalesce[] = {0, 64 << 10, 1 << 20, 64 << 20}, halves[] = {0, 0, 20000, 1 << 20};
    cluster_config config = {.n_nodes = 2 + random_below(random, 2),
                             .node_size = 1 + random_below(random, 3)};
    config.n_groups = 2 + random_below(random, 4);
    config.restore = random_below(random, 2) ? FCDP_RESTORE_WHOLE : FCDP_RESTORE_SLICE;
    config.host_copies = random_below(random, 2);
    config.mapping = random_below(random, 2) ? FCDP_MAPPING_EXACT : FCDP_MAPPING_SLOTS;
    config.host_computes = random_below(random, 2);
    config.prefetch = (int)random_below(random, 4);
    config.coalesce_bytes = coalesce[random_below(random, 4)];
    config.agree = random_below(random, 8) ? FCDP_AGREE_FORWARD : FCDP_AGREE_UNSHARD;
    config.packed_half_bytes = halves[random_below(random, 4)];
    for (uint32_t g = 0; g < config.n_groups; g++) {
        config.groups[g].n_extents = 1 + random_below(random, 6);
        for (uint32_t i = 0; i < config.groups[g].n_extents; i++)
            config.groups[g].extents[i] = (fcdp_extent_spec){random_shard_bytes(random),
                                                             (uint8_t)random_below(random, 2)};
        config.groups[g].extents[0].shard_bytes += 100;
    }
    config.fingerprints = random_below(random, 2);
    bool may_spill = random_below(random, 4) == 0;
    config.spill_dir = may_spill ? "/tmp" : NULL;
    for (uint32_t g = 0; g < config.n_groups; g++) config.spilled[g] = may_spill && random_below(random, 2);
    bool has_plan = random_below(random, 2);
    for (uint32_t g = 0; g < config.n_groups && has_plan; g++)
        config.tiers[g] = (fcdp_tier)random_below(random, FCDP_TIER_HOST_WHOLE + 1);
    bool alike = random_below(random, 2);
    config.deltas = random_below(random, 4);
    config.alike = config.deltas && random_below(random, 4);
    config.by_gain = config.deltas && random_below(random, 4) == 0;
    config.rounds = config.deltas && random_below(random, 3) == 0;
    for (uint32_t r = 0; r < CLUSTER_MAX_RANKS; r++)
        config.tau[r] = alike && r ? config.tau[0] : taus[random_below(random, 3)];
    return config;
}

static void check_counts(const cluster *c) {
    uint64_t sent = 0;
    for (uint32_t r = 0; r < c->n_ranks; r++) {
        fcdp_engine_stats stats;
        fcdp_engine_stats_get(c->members[r].engine, &stats);
        sent += stats.gather.inter_bytes_sent;
        assert_true(stats.device_peak_bytes <= stats.device_budget_bytes);
        assert_int_equal(stats.restore.inter_bytes_sent, 0);
        uint64_t n_deltas = stats.n_delta_gathers + stats.n_delta_whole; /* no launches of the hub's */
        assert_int_equal(stats.gather.calls + stats.restore.calls, c->members[r].port.n_launches + n_deltas);
    }
    assert_int_equal(sent, c->hub.inter_bytes_sent);
}

static void random_program(uint64_t seed, int round) {
    test_random own = {seed};
    cluster_config config = random_cluster(&own);
    size_t extra = random_below(&own, 3) * random_below(&own, 4);
    size_t staging = 2 * config.packed_half_bytes / PAGE_BYTES + 1;
    config.device_budget_bytes = (cluster_most_pages(&config) + staging + extra) * PAGE_BYTES;
    char spilled[CLUSTER_MAX_GROUPS + 1] = "", tiers[CLUSTER_MAX_GROUPS + 1] = "";
    for (uint32_t g = 0; g < config.n_groups; g++) spilled[g] = config.spilled[g] ? 'F' : '-';
    for (uint32_t g = 0; g < config.n_groups; g++) tiers[g] = "-dhw"[config.tiers[g]];
    print_message("round %d, seed %#llx: %u x %u, %u groups, restore %s, a copy per %s, mapping %s, %s "
                  "computes, %s, prefetch %d, "
                  "agree %s, halves of %zu bytes, %zu + %zu pages, in files %s, tiers %s, %s\n",
                  round, (unsigned long long)seed, config.n_nodes, config.node_size, config.n_groups,
                  config.restore ? "whole" : "slice", config.host_copies ? "NUMA node" : "node",
                  config.mapping == FCDP_MAPPING_EXACT ? "exact" : "slots",
                  config.host_computes ? "host" : "device",
                  config.fingerprints ? "fingerprints" : "signals alone", config.prefetch,
                  config.agree ? "unshard" : "forward", config.packed_half_bytes,
                  config.device_budget_bytes / PAGE_BYTES - extra, extra, spilled, tiers,
                  !config.deltas  ? "whole"
                  : config.rounds ? "rounded"
                  : config.alike  ? "differences"
                                  : "too many differences");
    cluster *c = start(&config);
    program p = {.cluster = c, .seed = seed, .n_steps = 8, .jitter = 64, .stops = -1, .raw_writes = true};
    p.pressure = extra ? random_below(&own, 3) * 40 : 0;
    p.pressure_pages = extra;
    program_run(&p);
    program_check(&p);
    check_counts(c);
    end(c);
}

static void test_random_programs(void **state) {
    (void)state;
    const char *rounds = getenv("TEST_ROUNDS"), *only = getenv("TEST_ONLY");
    if (only) {
        random_program(strtoull(only, NULL, 0), 0);
        return;
    }
    test_random random = {random_seed("test_random_programs", 1)};
    for (int round = 0; round < (rounds ? atoi(rounds) : 16); round++)
        random_program(random_next(&random), round);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_programs),
    };
    cmocka_set_test_filter(getenv("TEST_FILTER"));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
