/* The steady state of a training step, without pressure: what it may cost, from simgpu's counters.
 *
 * No page is created, mapped or unmapped, no thread that runs the model waits for the device, and each group
 * crosses each lane once.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "comm/internal.h"
#include "comm/tree.h"
#include "sim/gpu/simgpu.h"
#include "tests/comm/member.h"
#include "tiering/slot.h"

enum {
    PAGE_BYTES = 2 << 20,
    N_GROUPS = 7,
    N_ADAPTERS = 448,
    ROOT = 0,
    FROZEN = 4,
    N_WARM = 3,
    N_STEPS = 3,
    MEET = 99
};

static const char *const page_calls[] = {"cuMemCreate",     "cuMemRelease",   "cuMemMap",
                                         "cuMemUnmap",      "cuMemSetAccess", "cuMemAddressReserve",
                                         "cuMemAddressFree"};

typedef struct measured {
    struct simgpu_blocking blocking[CLUSTER_MAX_RANKS];
    size_t n_launches[CLUSTER_MAX_RANKS]; /* before, then of the measured steps */
    uint64_t n_waits[CLUSTER_MAX_RANKS];  /* for pages, likewise */
} measured;

static void meet(member *m) {
    MUST(!council_agree(&m->cluster->council, MEET, NULL, 0));
}

/* As FSDP2 does: the root stays from its forward to its backward, and in backward the next
 * group is unsharded while one computes. */
static void step(member *m) {
    static const uint8_t trainable[CLUSTER_MAX_EXTENTS] = {0, 1, 1};
    uint32_t n = m->cluster->config.n_groups;
    member_begin_forward(m);
    for (uint32_t g = 0; g < n; g++) {
        MUST(!member_unshard(m, g, UNSHARD_FORWARD));
        MUST(!member_use(m, g));
        if (g != ROOT) MUST(!member_reshard(m, g, false));
    }
    member_begin_backward(m);
    MUST(!member_unshard(m, n - 1, UNSHARD_BACKWARD));
    for (uint32_t g = n; g-- > 0;) {
        if (g > ROOT + 1) MUST(!member_unshard(m, g - 1, UNSHARD_BACKWARD));
        MUST(!member_use(m, g));
        MUST(!member_reshard(m, g, false));
        fcdp_group_ask_again(m->groups[g]);
    }
    MUST(!fcdp_engine_check(m->engine));
    for (uint32_t g = 0; g < n; g++)
        if (g != FROZEN) MUST(!member_step(m, g, trainable, true));
}

static uint64_t waits_of(member *m) {
    fcdp_engine_stats stats;
    fcdp_engine_stats_get(m->engine, &stats);
    return stats.moves.n_waits;
}

static void steps(member *m, void *arg) {
    static const uint8_t all[CLUSTER_MAX_EXTENTS] = {1, 1, 1};
    measured *out = arg;
    uint32_t rank = m->topology.rank;
    for (uint32_t g = 0; g < m->cluster->config.n_groups; g++) MUST(!member_step(m, g, all, true));
    for (int i = 0; i < N_WARM; i++) step(m);
    out->n_launches[rank] = m->port.n_launches;
    out->n_waits[rank] = waits_of(m);
    meet(m);
    if (rank == 0) simgpu_calls_reset();
    if (rank == 0) simgpu_blocking_reset();
    meet(m);
    for (int i = 0; i < N_STEPS; i++) step(m);
    simgpu_blocking_total(0, &out->blocking[rank]);
    out->n_launches[rank] = m->port.n_launches - out->n_launches[rank];
    out->n_waits[rank] = waits_of(m) - out->n_waits[rank];
    meet(m);
}

static cluster_config config_of(uint32_t node_size, fcdp_restore_mode restore, int tau, int prefetch) {
    cluster_config config = {
        .n_nodes = 2, .node_size = node_size, .n_groups = N_GROUPS, .restore = restore, .prefetch = prefetch};
    for (uint32_t g = 0; g < N_GROUPS; g++) {
        /* of all shards; blocks of two pages, a root of one */
        size_t bytes = g == ROOT ? 1400000 : 2500000 + 100 * g;
        size_t shard_bytes = bytes / 10 / (2 * node_size);
        config.groups[g] = (group_spec){
            3, {{5 * shard_bytes, 0}, {4 * shard_bytes, g != FROZEN}, {shard_bytes, g != FROZEN}}};
    }
    for (uint32_t r = 0; r < CLUSTER_MAX_RANKS; r++) config.tau[r] = tau;
    config.device_budget_bytes = 2 * cluster_most_pages(&config) * PAGE_BYTES;
    return config;
}

/* One collective between nodes and one within for each group that is gathered; one within
 * for each that is restored by slices. */
static size_t expected_launches(const cluster_config *config) {
    bool by_slice = config->restore == FCDP_RESTORE_SLICE && config->node_size > 1, kept = config->tau[0] > 0;
    /* all that is stale in one; then each comes from the host, by slices but where it is kept in backward */
    if (config->coalesce_bytes)
        return N_STEPS * (1 + (by_slice ? (size_t)(kept ? N_GROUPS - 1 : 2 * (N_GROUPS - 1) + 1) : 0));
    size_t gathers = (N_GROUPS - 1) * (1 + (size_t)by_slice);
    /* backward, all but the root; and the frozen one's forward */
    size_t restores = by_slice && !kept ? N_GROUPS - 1 + 1 : 0;
    return N_STEPS * (gathers + restores);
}

static void check_mapping(const cluster_config *config) {
    bool exact = config->mapping == FCDP_MAPPING_EXACT;
    size_t n_uses = N_STEPS * config->n_nodes * config->node_size * (2 * N_GROUPS - 1);
    /* with exact mapping, where a rank runs further ahead than before: in each of two classes */
    size_t n_extra = exact ? 2 * FCDP_SLOTS_PENDING * config->n_nodes * config->node_size : 0;
    assert_in_range(simgpu_calls("cuMemCreate"), 0, n_extra);
    assert_int_equal(simgpu_calls("cuMemRelease"), 0);
    for (size_t i = 0; i < sizeof page_calls / sizeof *page_calls; i++) {
        unsigned long n = simgpu_calls(page_calls[i]);
        if (n > (exact ? n_uses + n_extra : 0))
            fail_msg("%lu calls of %s in %zu uses", n, page_calls[i], n_uses);
    }
    unsigned long n_asked = simgpu_calls("cuMemGetInfo"), most = config->tau[0] > 0 ? n_uses : 0;
    if (n_asked > most && !fcdp__trace_is_on(1)) /* else its monitor asks too */
        fail_msg("the driver was asked %lu times what is free in %zu uses", n_asked, n_uses);
}

/* Runs it; each rank launches at most `most` collectives in the measured steps,
 * and exactly as many where `exactly`. */
static void steady(cluster_config config, size_t most, bool exactly) {
    measured out = {0};
    simgpu_reset();
    simgpu_set_races(1);
    cluster *c = cluster_create(&config);
    cluster_run(c, steps, &out);
    check_mapping(&config);
    for (uint32_t r = 0; r < c->n_ranks; r++) {
        const struct simgpu_blocking *b = &out.blocking[r];
        /* a vote waits for what the device has read of a copy that is kept (comm/copy.h) */
        size_t most_waits = config.tau[0] > 0 ? (size_t)N_STEPS * 2 * config.n_groups : 0;
        if (config.mapping != FCDP_MAPPING_EXACT && b->calls > most_waits)
            fail_msg("rank %u: %lu calls that may wait for the device", r, b->calls);
        if (config.mapping != FCDP_MAPPING_EXACT) assert_int_equal(out.n_waits[r], 0);
        assert_in_range(out.n_launches[r], exactly ? most : 1, most);
        assert_ok(fcdp__driver_stream_sync(c->members[r].engine->drv, c->members[r].stream));
        if (c->members[r].wrong[0]) fail_msg("%s", c->members[r].wrong);
    }
    for (size_t k = 0; k < c->members[0].port.n_launches && config.packed_half_bytes; k++)
        assert_in_range(c->members[0].port.launches[k].n_parts, 1, FCDP_N_SPANS);
    cluster_check_launches(c, true);
    cluster_destroy(c);
    assert_nobody_spun();
    assert_nothing_lives();
}

/* Of the ways, about each TEST_COARSER-th, from a random one on: many runs come to all of them. */
static bool is_taken(unsigned *n_seen) {
    const char *given = getenv("TEST_COARSER");
    /* odd: the ways come in powers of two */
    unsigned stride = given && atoi(given) > 0 ? (unsigned)atoi(given) | 1 : 1;
    if (!*n_seen) *n_seen = (unsigned)(fcdp__now_ns() / 1000 % stride);
    return (*n_seen)++ % stride == 0;
}

/* The trainable groups cross together, as adapters do. */
static void test_small_groups_cross_in_one_collective(void **state) {
    (void)state;
    unsigned n_seen = 0;
    for (uint32_t node_size = 1; node_size <= 2; node_size++)
        for (int restore = FCDP_RESTORE_SLICE; restore <= FCDP_RESTORE_WHOLE; restore++)
            for (int tau = 0; tau <= 1; tau++) {
                if (!is_taken(&n_seen)) continue;
                cluster_config config = config_of(node_size, (fcdp_restore_mode)restore, tau, 1);
                for (uint32_t g = 0; g < N_GROUPS; g++)
                    for (uint32_t i = 0; i < 3; i++) config.groups[g].extents[i].shard_bytes /= 16;
                config.coalesce_bytes = 1 << 20;
                print_message("2 x %u, restore %s, tau %d\n", node_size, restore ? "whole" : "slice", tau);
                steady(config, expected_launches(&config), true);
            }
}

/* A LoRA job that wraps each adapter on its own; a sixteenth of them where TEST_COARSER is set, as TSan takes
 * 90 s for all. Whole: no collective within the node, so all that is counted crosses nodes. */
static void test_448_adapters_cross_in_at_most_8_collectives(void **state) {
    (void)state;
    cluster_config config = config_of(2, FCDP_RESTORE_WHOLE, 0, 1);
    config.n_groups = getenv("TEST_COARSER") ? N_ADAPTERS / 16 : N_ADAPTERS;
    for (uint32_t g = 0; g < config.n_groups; g++)
        config.groups[g] = (group_spec){
            3, {{4096, 0}, {16384 + 16 * (g % 5), g != FROZEN}, {1024, g != FROZEN}}};
    config.coalesce_bytes = 1 << 20;
    steady(config, N_STEPS * 8, false);
}

/* Each crosses in one all-gather of one part a lane, however many parameters and nodes it has. */
static void test_packed_groups_cross_in_one_part(void **state) {
    (void)state;
    unsigned n_seen = 0;
    for (int restore = FCDP_RESTORE_SLICE; restore <= FCDP_RESTORE_WHOLE; restore++)
        for (int mapping = FCDP_MAPPING_SLOTS; mapping <= FCDP_MAPPING_EXACT; mapping++)
            for (int tau = 0; tau <= 1; tau++) {
                if (!is_taken(&n_seen)) continue;
                cluster_config config = config_of(2, (fcdp_restore_mode)restore, tau, 2);
                config.mapping = (fcdp_mapping_mode)mapping;
                config.packed_half_bytes = 8 << 20;
                print_message("restore %s, %s, tau %d\n", restore ? "whole" : "slice",
                              mapping == FCDP_MAPPING_EXACT ? "exact" : "slots", tau);
                steady(config, expected_launches(&config), true);
            }
}

static void every_way(fcdp_mapping_mode mapping) {
    unsigned n_seen = 0;
    for (uint32_t node_size = 1; node_size <= 2; node_size++)
        for (int restore = FCDP_RESTORE_SLICE; restore <= FCDP_RESTORE_WHOLE; restore++)
            for (int tau = 0; tau <= 1; tau++)
                for (int prefetch = 0; prefetch <= 2; prefetch += 2) {
                    if (!is_taken(&n_seen)) continue;
                    cluster_config config = config_of(node_size, (fcdp_restore_mode)restore, tau, prefetch);
                    config.mapping = mapping;
                    print_message("2 x %u, restore %s, tau %d, prefetch %d\n", node_size,
                                  restore ? "whole" : "slice", tau, prefetch);
                    steady(config, expected_launches(&config), true);
                }
}

static void test_slots_cost_no_driver_call_and_nobody_waits(void **state) {
    (void)state;
    every_way(FCDP_MAPPING_SLOTS);
}

static void test_exact_mapping_costs_one_block_per_use(void **state) {
    (void)state;
    every_way(FCDP_MAPPING_EXACT);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_small_groups_cross_in_one_collective),
        cmocka_unit_test(test_448_adapters_cross_in_at_most_8_collectives),
        cmocka_unit_test(test_packed_groups_cross_in_one_part),
        cmocka_unit_test(test_slots_cost_no_driver_call_and_nobody_waits),
        cmocka_unit_test(test_exact_mapping_costs_one_block_per_use),
    };
    cmocka_set_test_filter(getenv("TEST_FILTER"));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
