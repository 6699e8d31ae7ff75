/* Groups with a tier of their own (tiering/tiers.h): each lives where its tier says, whatever FCDP_TAU and
 * FCDP_RESTORE are, beside groups that policy has; every byte is checked in every use. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>

#include "tests/comm/engine_world.h"

enum { N_GROUPS = 6, N_STEPS = 3 };

static cluster_config make_config(fcdp_tier tier, uint32_t node_size, double tau) {
    cluster_config config = {.n_nodes = 2,
                             .node_size = node_size,
                             .n_groups = N_GROUPS,
                             .mapping = FCDP_MAPPING_SLOTS,
                             .prefetch = 1,
                             .fingerprints = true,
                             .device_budget_bytes = 40 * (size_t)PAGE_BYTES,
                             .spill_dir = "/tmp"};
    for (uint32_t r = 0; r < CLUSTER_MAX_RANKS; r++) config.tau[r] = tau;
    for (uint32_t g = 0; g < N_GROUPS; g++) { /* frozen, trainable, both */
        config.groups[g] = (group_spec){2, {{150000 + g, g % 3 != 1}, {66001, g % 3 == 0}}};
        config.tiers[g] = tier;
        config.spilled[g] = tier == FCDP_TIER_FILE;
    }
    return config;
}

/* A forward and a backward. */
static void passes(member *m) {
    for (int pass = 0; pass < 2; pass++) {
        if (pass)
            member_begin_backward(m);
        else
            member_begin_forward(m);
        for (uint32_t k = 0; k < N_GROUPS; k++) {
            uint32_t g = pass ? N_GROUPS - 1 - k : k;
            MUST(!member_unshard(m, g, pass ? UNSHARD_BACKWARD : UNSHARD_FORWARD));
            MUST(!member_use(m, g));
            MUST(!member_reshard(m, g, false));
        }
    }
}

static void settle(member *m) {
    MUST(!fcdp__driver_stream_sync(m->engine->drv, m->stream));
    MUST(!fcdp_engine_drain(m->engine));
    MUST(!m->wrong[0]);
}

/* Steps of training; at its end all groups have been released by a backward. */
static void job_body(member *m, void *arg) {
    (void)arg;
    for (uint32_t g = 0; g < N_GROUPS; g++) MUST(!member_step(m, g, all_extents, true));
    for (int i = 0; i < N_STEPS; i++) {
        if (i > 0) member_step_trainable(m);
        passes(m);
    }
    settle(m);
}

static bool is_kept(const member *m, uint32_t g) {
    fcdp_region_state state;
    fcdp__region_state(m->groups[g]->region, &state);
    return state.kept;
}

static const fcdp_tier tiers[] = {FCDP_TIER_DEVICE, FCDP_TIER_HOST, FCDP_TIER_HOST_WHOLE, FCDP_TIER_FILE};

/* The options ask for the opposite: tau 1 keeps what is to be in host memory, and tau 0 nothing. */
static void test_a_tier_goes_before_the_options(void **state) {
    (void)state;
    for (size_t t = 0; t < sizeof tiers / sizeof *tiers; t++)
        for (int way = 0; way < 4; way++) {
            cluster_config config = make_config(tiers[t], 2, tiers[t] == FCDP_TIER_DEVICE ? 0 : 1);
            config.restore = way & 1 ? FCDP_RESTORE_WHOLE : FCDP_RESTORE_SLICE;
            config.host_computes = way & 2;
            cluster *c = start(&config);
            cluster_run(c, job_body, NULL);
            cluster_check_launches(c, true);
            EVERY_MEMBER(c, m) {
                fcdp_engine_stats stats;
                fcdp_engine_stats_get(m->engine, &stats);
                for (uint32_t g = 0; g < N_GROUPS; g++) {
                    assert_int_equal(is_kept(m, g), tiers[t] == FCDP_TIER_DEVICE);
                    fcdp_group_stats of;
                    fcdp_group_stats_get(m->groups[g], &of);
                    assert_int_equal(of.tier, tiers[t]);
                }
                bool slices = tiers[t] == FCDP_TIER_HOST || tiers[t] == FCDP_TIER_FILE;
                assert_int_equal(stats.moves.n_slice_loads > 0, slices);
                assert_int_equal(stats.moves.n_whole_loads > 0, tiers[t] == FCDP_TIER_HOST_WHOLE);
            }
            end(c);
        }
}

/* All tiers in one job, and what it sends between nodes is what it sends without any. */
static void test_tiers_send_no_more_between_nodes(void **state) {
    (void)state;
    for (int way = 0; way < 4; way++) {
        uint64_t crossed[2];
        for (int planned = 0; planned < 2; planned++) {
            cluster_config config = make_config(FCDP_TIER_POLICY, way & 1 ? 3 : 1, way >> 1);
            config.host_computes = way & 2;
            for (uint32_t g = 0; g < N_GROUPS && planned; g++) {
                config.tiers[g] = g < 4 ? tiers[g] : FCDP_TIER_POLICY;
                config.spilled[g] = config.tiers[g] == FCDP_TIER_FILE;
            }
            cluster *c = start(&config);
            cluster_run(c, job_body, NULL);
            cluster_check_launches(c, true);
            EVERY_MEMBER(c, m) if (planned) assert_true(is_kept(m, 0) && !is_kept(m, 1));
            crossed[planned] = sent(c);
            end(c);
        }
        assert_int_equal(crossed[0], crossed[1]);
    }
}

/* With four pages, of one region each: those that policy keeps give way, and the plan's stay. */
static void test_what_a_plan_keeps_goes_last(void **state) {
    (void)state;
    cluster_config config = make_config(FCDP_TIER_POLICY, 2, 1);
    config.prefetch = 0;
    config.device_budget_bytes = 4 * (size_t)PAGE_BYTES;
    config.tiers[2] = config.tiers[3] = FCDP_TIER_DEVICE;
    cluster *c = start(&config);
    cluster_run(c, job_body, NULL);
    cluster_check_launches(c, true);
    EVERY_MEMBER(c, m) {
        fcdp_engine_stats stats;
        fcdp_engine_stats_get(m->engine, &stats);
        assert_true(stats.moves.n_evictions > 0);
        for (uint32_t g = 0; g < N_GROUPS; g++) {
            bool is_planned = g == 2 || g == 3;
            if (is_planned) assert_true(is_kept(m, g));
        }
        /* tensors may have them all the same */
        assert_true(fcdp__tiering_reclaim(m->engine->tiering, 4) >= 4);
        assert_false(is_kept(m, 2) || is_kept(m, 3));
    }
    end(c);
}

enum { N_LEARNED = 8 }; /* steps, in which the order of uses becomes known */
enum { BEFORE, STEADY, LEFT_OUT, LEFT_OUT_AGAIN, ACCUMULATED, N_SEEN };
static struct seen {
    fcdp_engine_stats stats;
    unsigned n_drains;
} seen[CLUSTER_MAX_RANKS][N_SEEN];

static void look(member *m, int when) {
    settle(m);
    seen[m->topology.rank][when].n_drains = m->n_drains;
    fcdp_engine_stats_get(m->engine, &seen[m->topology.rank][when].stats);
}

/* Behind a steady step come two in which no weight is written, as where a GradScaler has seen an inf, and
 * then steps of two micro-batches. */
static void left_out_body(member *m, void *arg) {
    (void)arg;
    for (uint32_t g = 0; g < N_GROUPS; g++) MUST(!member_step(m, g, all_extents, true));
    for (int i = 0; i < N_LEARNED; i++) {
        member_step_trainable(m);
        passes(m);
    }
    for (int when = BEFORE; when < LEFT_OUT_AGAIN; when++) {
        look(m, when);
        if (when == BEFORE) member_step_trainable(m);
        passes(m);
    }
    look(m, LEFT_OUT_AGAIN);
    for (int i = 0; i < 2 * N_LEARNED; i++) { /* in the middle, one micro-batch is left over */
        member_step_trainable(m);
        passes(m);
        if (i != N_LEARNED) passes(m);
    }
    look(m, ACCUMULATED);
}

/* In fewer pages than all groups take. A kept group of which the next use brings new content is not stored
 * behind its last use. Where the program does otherwise it is gathered again, once, and nothing else is. No
 * host waits for its device for that. */
static void test_what_is_gathered_anew_is_not_stored(void **state) {
    (void)state;
    for (int reads_old = 0; reads_old < 2; reads_old++) {
        cluster_config config = make_config(FCDP_TIER_POLICY, 2, 0);
        for (uint32_t g = 0; g < N_GROUPS; g++)
            config.groups[g] = (group_spec){2, {{150000 + g, true}, {66001, true}}};
        config.next_use = true;
        config.prefetch = 2;
        config.device_budget_bytes = 4 * (size_t)PAGE_BYTES;
        cluster *c = start(&config);
        EVERY_MEMBER(c, m) m->engine->old_shards_are_read = reads_old; /* fcdp.changed() is used */
        cluster_run(c, left_out_body, NULL);
        cluster_check_launches(c, true);
        EVERY_MEMBER(c, m) {
            const struct seen *at = seen[m->topology.rank];
            uint64_t made[N_SEEN];
            for (int when = 0; when < N_SEEN; when++) made[when] = at[when].stats.gathers.made;
            const fcdp_tiering_stats *was = &at[BEFORE].stats.moves, *is = &at[STEADY].stats.moves;
            uint64_t n_loads = is->n_slice_loads - was->n_slice_loads,
                     n_stores = is->n_stores - was->n_stores;
            uint64_t n_again = made[LEFT_OUT] - made[STEADY];
            uint64_t n_drops = at[STEADY].stats.n_drops - at[BEFORE].stats.n_drops;
            assert_true(is->n_plans > 0 && n_loads > 0 && n_loads < N_GROUPS);
            if (reads_old)
                assert_true(n_stores > n_loads && n_again == 0 && n_drops == 0);
            else
                assert_true(n_stores == n_loads && n_again > 0 && n_again <= n_drops);
            assert_int_equal(at[STEADY].n_drains - at[BEFORE].n_drains, 1); /* in backward */
            assert_int_equal(made[LEFT_OUT_AGAIN], made[LEFT_OUT]);
            assert_true(made[ACCUMULATED] - made[LEFT_OUT_AGAIN] <= 2 * N_LEARNED * N_GROUPS + n_again);
        }
        end(c);
    }
}

/* All groups, which are small enough to cross together: no device memory, and nothing to move but gathers.
 * One that is mapped and unmapped again is like any other. */
static void test_mapped_groups_take_no_device_memory(void **state) {
    (void)state;
    for (int way = 0; way < 4; way++) {
        cluster_config config = make_config(FCDP_TIER_MAPPED, 2, 0);
        config.restore = way & 1 ? FCDP_RESTORE_WHOLE : FCDP_RESTORE_SLICE;
        config.coalesce_bytes = way & 2 ? 1 << 20 : 0;
        cluster *c = start(&config);
        cluster_run(c, job_body, NULL);
        cluster_check_launches(c, true);
        EVERY_MEMBER(c, m) {
            fcdp_engine_stats stats;
            fcdp_engine_stats_get(m->engine, &stats);
            assert_int_equal(stats.moves.n_slice_loads + stats.moves.n_whole_loads, 0);
            assert_int_equal(stats.restore.calls, 0);
            assert_int_equal(stats.device_peak_bytes, 0);
            assert_int_equal(stats.moves.mapped_bytes, N_GROUPS * PAGE_BYTES);
            assert_int_equal(fcdp__tiering_reclaim(m->engine->tiering, 1), 0);
            assert_ok(fcdp_engine_sleep(m->engine, m->stream));
            fcdp_engine_wake(m->engine);
            for (uint32_t g = 0; g < N_GROUPS; g++) {
                fcdp_group_stats of;
                fcdp_group_stats_get(m->groups[g], &of);
                assert_string_equal(of.state, "mapped");
                assert_true(is_kept(m, g));
            }
        }
        end(c);
    }
}

static void test_models_on_cpus_map_nothing(void **state) {
    (void)state;
    cluster_config config = make_config(FCDP_TIER_POLICY, 1, 0);
    config.host_computes = true;
    cluster *c = start(&config);
    EVERY_MEMBER(c, m) {
        assert_int_equal(fcdp_engine_probe_host_map(m->engine), FCDP_ERR_UNSUPPORTED);
        assert_int_equal(fcdp_group_map_host(m->groups[0]), FCDP_ERR_UNSUPPORTED);
        assert_non_null(strstr(fcdp_error_text(), "on CPUs"));
        assert_int_equal(fcdp_group_unmap_host(m->groups[0]), FCDP_ERR_INVALID);
    }
    end(c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_tier_goes_before_the_options),
        cmocka_unit_test(test_tiers_send_no_more_between_nodes),
        cmocka_unit_test(test_what_a_plan_keeps_goes_last),
        cmocka_unit_test(test_what_is_gathered_anew_is_not_stored),
        cmocka_unit_test(test_mapped_groups_take_no_device_memory),
        cmocka_unit_test(test_models_on_cpus_map_nothing),
    };
    cmocka_set_test_filter(getenv("TEST_FILTER"));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
