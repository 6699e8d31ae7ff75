/* The engine against an oracle: clusters of ranks as threads, every byte checked after every unshard. */
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/comm/program.h"
#include "tools/simgpu/simgpu.h"

enum { PAGE_BYTES = 2 << 20 };

/* ---- random programs ---- */

static size_t random_shard_bytes(test_random *random) {
    switch (random_below(random, 6)) {
    case 0:
        return 0;
    case 1:
        return 1 + random_below(random, 600);
    case 2:
        return FCDP_PLAN_SMALL_BYTES - 1 + random_below(random, 3);
    case 3:
        return 1 + random_below(random, 20000);
    default:
        return 50000 + random_below(random, 200000);
    }
}

static cluster_config random_cluster(test_random *random) {
    static const double taus[] = {0, 0.5, 1};
    cluster_config config = {.n_nodes = 2 + random_below(random, 2),
                             .node_size = 1 + random_below(random, 3)};
    config.n_groups = 2 + random_below(random, 3);
    config.restore = random_below(random, 2) ? FCDP_RESTORE_WHOLE : FCDP_RESTORE_SLICE;
    for (uint32_t g = 0; g < config.n_groups; g++) {
        config.groups[g].n_extents = 1 + random_below(random, 6);
        for (uint32_t i = 0; i < config.groups[g].n_extents; i++)
            config.groups[g].extents[i] =
                (fcdp_extent_spec){random_shard_bytes(random), (uint8_t)random_below(random, 2)};
        config.groups[g].extents[0].shard_bytes += 100;
    }
    bool alike = random_below(random, 2);
    for (uint32_t r = 0; r < CLUSTER_MAX_RANKS; r++)
        config.tau[r] = alike && r ? config.tau[0] : taus[random_below(random, 3)];
    return config;
}

/* What the schedule needs at once: the largest region in use, and as many columns as may be (crossing.h). */
static size_t least_budget(const cluster_config *config) {
    size_t region = 0, column = 0;
    for (uint32_t g = 0; g < config->n_groups; g++) {
        const group_spec *spec = &config->groups[g];
        uint32_t node_of[CLUSTER_MAX_RANKS], n_ranks = config->n_nodes * config->node_size;
        uint8_t stale[CLUSTER_MAX_EXTENTS];
        memset(stale, 1, sizeof stale);
        for (uint32_t r = 0; r < n_ranks; r++) node_of[r] = r / config->node_size;
        fcdp_topology topology;
        fcdp_layout *layout;
        fcdp_plan *plan;
        assert_ok(fcdp__topology_make(node_of, n_ranks, 0, &topology));
        assert_ok(fcdp__layout_create(spec->extents, spec->n_extents, n_ranks, config->node_size, &layout));
        assert_ok(fcdp__plan_make(layout, &topology, stale, &plan));
        if (layout->bytes > region) region = layout->bytes;
        if (plan->column_bytes > column) column = plan->column_bytes;
        fcdp__plan_destroy(plan);
        fcdp__layout_destroy(layout);
    }
    return fcdp__round_up(region, PAGE_BYTES) +
           (config->node_size > 1 ? 2 : 1) * fcdp__round_up(column, PAGE_BYTES);
}

static void check_counts(const cluster *c) {
    uint64_t sent = 0;
    for (uint32_t r = 0; r < c->n_ranks; r++) {
        fcdp_engine_stats stats;
        fcdp_engine_stats_get(c->members[r].engine, &stats);
        sent += stats.gather.inter_bytes_sent;
        assert_true(stats.device_peak_bytes <= stats.device_budget_bytes);
        assert_int_equal(stats.restore.inter_bytes_sent, 0);
    }
    assert_int_equal(sent, c->inter_bytes_sent);
}

static void test_random_programs(void **state) {
    (void)state;
    const char *rounds = getenv("TEST_ROUNDS");
    test_random random = {random_seed("test_random_programs", 1)};
    for (int round = 0; round < (rounds ? atoi(rounds) : 16); round++) {
        uint64_t seed = random_next(&random);
        test_random own = {seed};
        cluster_config config = random_cluster(&own);
        config.device_budget_bytes =
            least_budget(&config) + random_below(&own, 3) * random_below(&own, 4) * PAGE_BYTES;
        print_message("round %d, seed %#llx: %u x %u, %u groups, restore %s, %zu pages\n", round,
                      (unsigned long long)seed, config.n_nodes, config.node_size, config.n_groups,
                      config.restore ? "whole" : "slice", config.device_budget_bytes / PAGE_BYTES);
        cluster *c = cluster_create(&config);
        program p = {.cluster = c, .seed = seed, .n_steps = 8, .evict_chance = random_below(&own, 3) * 60};
        program_run(&p);
        if (p.wrong[0]) fail_msg("%s", p.wrong);
        check_counts(c);
        cluster_destroy(c);
        assert_nothing_lives();
    }
}

/* ---- every mix of votes ---- */

enum { KEPT, RELEASED, EVICTED, N_FATES };

typedef struct ask {
    member *m;
    const uint8_t *stale;
    fcdp_pass pass;
    char failure[256];
    int wrong_extent;
} ask;

static void *ask_unshard(void *arg) {
    ask *a = arg;
    uint64_t inputs[CLUSTER_MAX_EXTENTS];
    for (uint32_t i = 0; i < CLUSTER_MAX_EXTENTS; i++) inputs[i] = (uintptr_t)a->m->shards[0][i];
    fcdp_job *job;
    fcdp_status status = fcdp_group_unshard(a->m->groups[0], a->stale, inputs, a->pass, a->m->stream, &job);
    if (!status) status = fcdp_job_wait(job);
    a->wrong_extent = status ? -1 : member_wrong_extent(a->m, 0);
    snprintf(a->failure, sizeof a->failure, "%s", status ? fcdp_error_text() : "");
    return NULL;
}

/* Group 0 on all ranks at once; the asks for whoever wants to know what failed. */
static void unshard_all(cluster *c, const uint8_t *stale, fcdp_pass pass, ask *asks) {
    pthread_t threads[CLUSTER_MAX_RANKS];
    for (uint32_t r = 0; r < c->n_ranks; r++) {
        asks[r] = (ask){.m = &c->members[r], .stale = stale, .pass = pass};
        pthread_create(&threads[r], NULL, ask_unshard, &asks[r]);
    }
    for (uint32_t r = 0; r < c->n_ranks; r++) pthread_join(threads[r], NULL);
}

static void unshard_all_right(cluster *c, const uint8_t *stale) {
    ask asks[CLUSTER_MAX_RANKS];
    unshard_all(c, stale, FCDP_PASS_FORWARD, asks);
    for (uint32_t r = 0; r < c->n_ranks; r++) {
        if (asks[r].failure[0]) fail_msg("rank %u: %s", r, asks[r].failure);
        if (asks[r].wrong_extent >= 0) fail_msg("rank %u: extent %d is wrong", r, asks[r].wrong_extent);
    }
}

static void reshard_all(cluster *c) {
    for (uint32_t r = 0; r < c->n_ranks; r++)
        assert_ok(fcdp_group_reshard(c->members[r].groups[0], c->members[r].stream));
    for (uint32_t r = 0; r < c->n_ranks; r++) assert_ok(fcdp_engine_drain(c->members[r].engine));
}

static const uint8_t none_stale[CLUSTER_MAX_EXTENTS],
    all_stale[CLUSTER_MAX_EXTENTS] = {1, 1, 1, 1, 1, 1, 1, 1};

static void rewrite_all(cluster *c) {
    for (uint32_t i = 0; i < c->config.groups[0].n_extents; i++) cluster_write(c, 0, i);
    for (uint32_t r = 0; r < c->n_ranks; r++) assert_ok(member_update_shards(&c->members[r], 0, all_stale));
}

static const cluster_config one_group = {
    .n_nodes = 2,
    .node_size = 3,
    .n_groups = 1,
    .groups = {{4, {{90000, 0}, {700, 0}, {70001, 1}, {513, 1}}}},
    .device_budget_bytes = 64 * (size_t)PAGE_BYTES,
};

/* Decided after a gather, by each rank for itself; `stored`: the slices were on the host before, from an
 * earlier release. */
static void fates_apply(cluster *c, const int *fates, bool stored) {
    for (uint32_t r = 0; r < c->n_ranks; r++)
        c->members[r].engine->options.tau = stored || fates[r] == RELEASED ? 0 : 1;
    reshard_all(c);
    if (!stored) {
        for (uint32_t r = 0; r < c->n_ranks; r++)
            if (fates[r] == EVICTED) assert_ok(fcdp__region_evict(c->members[r].groups[0]->region));
        return;
    }
    unshard_all_right(c, none_stale);
    fates_apply(c, fates, false);
}

static void check_fates(cluster *c, const int *fates) {
    for (uint32_t r = 0; r < c->n_ranks; r++) {
        fcdp_region_state region;
        fcdp__region_state(c->members[r].groups[0]->region, &region);
        assert_int_equal(region.mapped, fates[r] == KEPT);
    }
}

static void test_every_mix_of_votes(void **state) {
    (void)state;
    for (int restore = FCDP_RESTORE_SLICE; restore <= FCDP_RESTORE_WHOLE; restore++) {
        cluster_config config = one_group;
        config.restore = (fcdp_restore_mode)restore;
        cluster *c = cluster_create(&config);
        for (int mix = 0; mix < N_FATES * N_FATES * N_FATES * 2; mix++) {
            bool stored = mix % 2;
            int fates[CLUSTER_MAX_RANKS];
            for (uint32_t r = 0, left = (uint32_t)mix / 2; r < 3; r++, left /= N_FATES) {
                fates[r] = (int)(left % N_FATES);
                fates[3 + (r + 1) % 3] = fates[r]; /* the other node's ranks, turned */
            }
            rewrite_all(c);
            unshard_all_right(c, all_stale);
            uint64_t crossed = c->inter_bytes_sent;
            fates_apply(c, fates, stored);
            check_fates(c, fates);
            unshard_all_right(c, none_stale);
            fates_apply(c, fates, false); /* a second time: who was evicted alone now knows the whole */
            const uint8_t part[CLUSTER_MAX_EXTENTS] = {0, 1, 0, 0};
            assert_int_equal(c->inter_bytes_sent, crossed);
            cluster_write(c, 0, 1);
            for (uint32_t r = 0; r < c->n_ranks; r++)
                assert_ok(member_update_shards(&c->members[r], 0, part));
            unshard_all_right(c, part); /* one extent of a span that must be restored first */
            reshard_all(c);
        }
        cluster_destroy(c);
        assert_nothing_lives();
    }
}

/* ---- one by one ---- */

static void test_void_copy_fails_on_every_rank_of_the_node_at_once(void **state) {
    (void)state;
    for (int restore = FCDP_RESTORE_SLICE; restore <= FCDP_RESTORE_WHOLE; restore++) {
        cluster_config config = one_group;
        config.restore = (fcdp_restore_mode)restore;
        cluster *c = cluster_create(&config);
        ask asks[CLUSTER_MAX_RANKS];
        rewrite_all(c);
        unshard_all_right(c, all_stale);
        fcdp_group_spoil(c->members[1].groups[0]); /* one rank of node 0 wrote into its copy */
        reshard_all(c);
        unshard_all(c, none_stale, FCDP_PASS_BACKWARD, asks);
        for (uint32_t r = 0; r < c->n_ranks; r++) {
            assert_int_equal(asks[r].failure[0] != 0, r < 3);
            if (r < 3) assert_non_null(strstr(asks[r].failure, "blocks.0"));
            if (r < 3) assert_non_null(strstr(asks[r].failure, "gather it again"));
        }
        reshard_all(c);
        unshard_all_right(c, all_stale);
        reshard_all(c);
        unshard_all_right(c, none_stale);
        cluster_destroy(c);
        assert_nothing_lives();
    }
}

static const fcdp_scene training = {.grad_mode = true, .optimizer_seen = true};

static uint32_t observe(fcdp_group *group, uint64_t steps) {
    fcdp_signals signals[CLUSTER_MAX_EXTENTS] = {{0}};
    uint8_t stale[CLUSTER_MAX_EXTENTS] = {0};
    uint32_t all = 0;
    for (uint32_t i = 0; i < CLUSTER_MAX_EXTENTS; i++) signals[i].optimizer_steps = steps;
    fcdp_group_observe(group, signals, &training, NULL, NULL, stale);
    for (uint32_t i = 0; i < CLUSTER_MAX_EXTENTS; i++) all |= stale[i];
    return all;
}

static void test_a_gather_is_of_what_was_observed_at_its_submission(void **state) {
    (void)state;
    cluster *c = cluster_create(&one_group);
    fcdp_group *group = c->members[0].groups[0];
    ask asks[CLUSTER_MAX_RANKS];
    pthread_t threads[CLUSTER_MAX_RANKS];
    rewrite_all(c);
    assert_int_equal(observe(group, 1), FCDP_STALE_NEW);
    asks[0] = (ask){.m = &c->members[0], .stale = all_stale};
    pthread_create(&threads[0], NULL, ask_unshard, &asks[0]);
    while (!c->n_calls) sched_yield(); /* in its first collective, which cannot end: nobody else is there */
    assert_int_equal(observe(group, 2), FCDP_STALE_NEW);
    for (uint32_t r = 1; r < c->n_ranks; r++) {
        asks[r] = (ask){.m = &c->members[r], .stale = all_stale};
        pthread_create(&threads[r], NULL, ask_unshard, &asks[r]);
    }
    for (uint32_t r = 0; r < c->n_ranks; r++) pthread_join(threads[r], NULL);
    assert_int_equal(observe(group, 2), FCDP_STALE_OPTIMIZER);
    assert_int_equal(observe(group, 1), 0);
    fcdp_group_spoil(group);
    assert_int_equal(observe(group, 1), FCDP_STALE_NEW);
    cluster_destroy(c);
    assert_nothing_lives();
}

static uint64_t device_bytes(const member *m) {
    fcdp_engine_stats stats;
    fcdp_engine_stats_get(m->engine, &stats);
    return stats.device_bytes;
}

/* Waits, as far as there is something to wait for. */
static void prefetch_all(cluster *c, const uint8_t *stale) {
    bool ahead;
    for (uint32_t r = 0; r < c->n_ranks; r++) {
        uint64_t inputs[CLUSTER_MAX_EXTENTS];
        for (uint32_t i = 0; i < CLUSTER_MAX_EXTENTS; i++) inputs[i] = (uintptr_t)c->members[r].shards[0][i];
        assert_ok(fcdp_group_prefetch(c->members[r].groups[0], stale, inputs, c->members[r].stream, &ahead));
        assert_int_equal(ahead, stale != none_stale);
    }
    for (uint32_t r = 0; r < c->n_ranks; r++) assert_ok(fcdp_engine_drain(c->members[r].engine));
}

static void test_prefetch(void **state) {
    (void)state;
    cluster *c = cluster_create(&one_group);
    member *m = &c->members[4];
    const uint8_t part[CLUSTER_MAX_EXTENTS] = {1, 0, 0, 0};
    rewrite_all(c);
    prefetch_all(c, none_stale);
    assert_int_equal(c->n_calls, 0);
    assert_int_equal(device_bytes(m), 0);

    prefetch_all(c, all_stale);
    uint64_t crossed = c->inter_bytes_sent;
    assert_true(crossed > 0);
    assert_true(fcdp_group_is_prefetched(m->groups[0], all_stale));
    assert_false(fcdp_group_is_prefetched(m->groups[0], part));
    uint64_t column_bytes = device_bytes(m);
    assert_true(column_bytes > 0);
    unshard_all_right(c, all_stale);
    assert_int_equal(c->inter_bytes_sent, crossed); /* it crossed once */
    assert_false(fcdp_group_is_prefetched(m->groups[0], all_stale));
    assert_int_equal(device_bytes(m), fcdp__round_up(fcdp_group_bytes(m->groups[0]), PAGE_BYTES));

    prefetch_all(c, part);
    unshard_all_right(c, all_stale); /* another staleness: thrown away */
    assert_true(c->inter_bytes_sent > 2 * crossed);
    reshard_all(c);
    prefetch_all(c, part);
    assert_int_equal(device_bytes(m), column_bytes);
    for (uint32_t r = 0; r < c->n_ranks; r++) assert_ok(fcdp_group_unprefetch(c->members[r].groups[0]));
    for (uint32_t r = 0; r < c->n_ranks; r++) assert_ok(fcdp_engine_drain(c->members[r].engine));
    assert_int_equal(device_bytes(m), 0);
    fcdp_group_stats stats;
    fcdp_group_stats_get(m->groups[0], &stats);
    assert_int_equal(stats.gathers_made, 2);
    prefetch_all(c, part); /* left behind at the end */
    cluster_destroy(c);
    assert_nothing_lives();
}

/* Its peers wait in the gather that this rank did not join: the next one must not meet them there. */
static void test_after_a_gather_that_failed_alone_nothing_crosses(void **state) {
    (void)state;
    cluster_config config = one_group;
    config.n_groups = 2;
    config.groups[1] = config.groups[0];
    cluster *c = cluster_create(&config);
    member *m = &c->members[1];
    bool ahead[2];
    for (uint32_t g = 0; g < 2; g++) assert_ok(member_update_shards(m, g, all_stale));
    assert_ok(fcdp__driver_stream_sync(m->engine->drv, m->stream));
    assert_int_equal(simgpu_fail_nth("cuMemcpyDtoDAsync", 1, 999), 0);
    for (uint32_t g = 0; g < 2; g++) {
        uint64_t inputs[CLUSTER_MAX_EXTENTS];
        for (uint32_t i = 0; i < CLUSTER_MAX_EXTENTS; i++) inputs[i] = (uintptr_t)m->shards[g][i];
        assert_ok(fcdp_group_prefetch(m->groups[g], all_stale, inputs, m->stream, &ahead[g]));
        assert_true(ahead[g]);
    }
    assert_ok(fcdp_engine_drain(m->engine));
    assert_int_equal(c->n_calls, 0);
    assert_int_equal(fcdp_group_unprefetch(m->groups[0]), FCDP_ERR_DRIVER);
    assert_int_equal(fcdp_group_unprefetch(m->groups[1]), FCDP_ERR_TRANSPORT);
    assert_non_null(strstr(fcdp_error_text(), "out of step"));
    cluster_destroy(c);
    assert_nothing_lives();
}

static void test_counts_and_states(void **state) {
    (void)state;
    cluster *c = cluster_create(&one_group);
    fcdp_group *group = c->members[2].groups[0];
    fcdp_group_stats of_group;
    fcdp_engine_stats stats;
    ask asks[CLUSTER_MAX_RANKS];
    size_t bytes = 0;
    for (uint32_t i = 0; i < one_group.groups[0].n_extents; i++)
        bytes += one_group.groups[0].extents[i].shard_bytes;
    fcdp_group_stats_get(group, &of_group);
    assert_string_equal(of_group.state, "invalid");
    rewrite_all(c);
    unshard_all_right(c, all_stale);
    fcdp_group_stats_get(group, &of_group);
    assert_string_equal(of_group.state, "device");
    reshard_all(c);
    fcdp_engine_stats_get(c->members[2].engine, &stats);
    assert_int_equal(stats.gather.inter_bytes_sent, bytes);         /* to the one other node */
    assert_int_equal(stats.gather.intra_bytes_sent, 2 * 2 * bytes); /* two blocks, to two ranks */
    assert_int_equal(stats.restore.intra_bytes_sent, 0);
    assert_int_equal(stats.moves.d2h_bytes, fcdp_group_bytes(group) / 3);
    assert_int_equal(stats.device_bytes, 0);
    assert_true(stats.host_bytes >= fcdp_group_bytes(group));
    assert_true(stats.host_bytes <= fcdp_group_bytes(group) + 3 * 4096);
    fcdp_group_stats_get(group, &of_group);
    assert_string_equal(of_group.state, "host");
    unshard_all(c, none_stale, FCDP_PASS_BACKWARD, asks);
    reshard_all(c);
    fcdp_engine_stats_get(c->members[2].engine, &stats);
    assert_int_equal(stats.moves.h2d_bytes, fcdp_group_bytes(group) / 3);
    assert_int_equal(stats.moves.d2h_bytes, fcdp_group_bytes(group) / 3); /* clean: not stored again */
    assert_int_equal(stats.restore.intra_bytes_sent, fcdp_group_bytes(group) / 3 * 2);
    unshard_all(c, all_stale, FCDP_PASS_BACKWARD, asks);
    fcdp_group_stats_get(group, &of_group);
    assert_int_equal(of_group.gathers_made, 2);
    assert_int_equal(of_group.gathers_avoided, 1);
    assert_int_equal(of_group.gathers_forward, 1);
    assert_int_equal(of_group.gathers_backward, 1);
    cluster_destroy(c);
    assert_nothing_lives();
}

static void test_failed_release_is_told_once_and_voids(void **state) {
    (void)state;
    cluster *c = cluster_create(&one_group);
    fcdp_group *group = c->members[5].groups[0];
    ask asks[CLUSTER_MAX_RANKS];
    rewrite_all(c);
    for (int by_drain = 0; by_drain < 2; by_drain++) {
        observe(group, 7);
        unshard_all_right(c, all_stale);
        assert_int_equal(observe(group, 7), 0);
        assert_int_equal(simgpu_fail_nth("cuMemcpyDtoHAsync", 1, 999), 0);
        assert_ok(fcdp_group_reshard(group, c->members[5].stream));
        if (by_drain) {
            assert_int_equal(fcdp_engine_drain(c->members[5].engine), FCDP_ERR_DRIVER);
            assert_non_null(strstr(fcdp_error_text(), "releasing 'blocks.0'"));
            assert_ok(fcdp_engine_drain(c->members[5].engine));
        } else {
            while (simgpu_calls("cuMemcpyDtoHAsync") == 0) sched_yield();
            fcdp__worker_drain(c->members[5].engine->node_worker);
        }
        assert_int_equal(observe(group, 7), FCDP_STALE_NEW);
        for (uint32_t r = 0; r < 5; r++)
            assert_ok(fcdp_group_reshard(c->members[r].groups[0], c->members[r].stream));
        unshard_all(c, all_stale, FCDP_PASS_FORWARD, asks);
        for (uint32_t r = 0; r < c->n_ranks; r++)
            assert_int_equal(asks[r].failure[0] != 0, !by_drain && r == 5);
        if (!by_drain) assert_non_null(strstr(asks[5].failure, "releasing 'blocks.0'"));
        assert_int_equal(member_wrong_extent(&c->members[5], 0), -1); /* the gather itself went well */
    }
    cluster_destroy(c);
    assert_nothing_lives();
}

static void test_refusals(void **state) {
    (void)state;
    cluster *c = cluster_create(&one_group);
    member *m = &c->members[1];
    fcdp_group *group;
    fcdp_job *job;
    uint64_t inputs[CLUSTER_MAX_EXTENTS] = {0}, offset;
    const fcdp_extent_spec empty[] = {{0, 0}, {0, 1}}, one[] = {{512, 0}};
    assert_int_equal(fcdp_group_create(m->comm, "empty", empty, 2, &group), FCDP_ERR_UNSUPPORTED);
    assert_ok(fcdp_group_create(m->comm, "one", one, 1, &group));
    assert_int_equal(fcdp_group_carve(group, &offset), FCDP_ERR_INVALID); /* not the leader */
    assert_int_equal(fcdp_group_unshard(group, all_stale, inputs, FCDP_PASS_FORWARD, NULL, &job),
                     FCDP_ERR_INVALID);
    assert_non_null(strstr(fcdp_error_text(), "'one' is not attached"));
    assert_int_equal(fcdp_group_unshard(m->groups[0], all_stale, inputs, FCDP_PASS_FORWARD, NULL, &job),
                     FCDP_ERR_INVALID);
    assert_non_null(strstr(fcdp_error_text(), "has no input"));
    assert_ok(fcdp_group_reshard(m->groups[0], NULL)); /* nothing to release */
    fcdp_group_destroy(group);

    assert_int_equal(fcdp_group_unshard(m->groups[0], none_stale, inputs, FCDP_PASS_FORWARD, NULL, &job),
                     FCDP_OK);
    assert_int_equal(fcdp_job_wait(job), FCDP_ERR_INVALID);
    assert_non_null(strstr(fcdp_error_text(), "restoring 'blocks.0'"));
    assert_ok(fcdp_group_unshard(m->groups[0], none_stale, inputs, FCDP_PASS_FORWARD, NULL,
                                 &job)); /* never waited for */
    cluster_destroy(c);
    assert_nothing_lives();
}

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define UNDER_TSAN 1
#endif
#elif defined(__SANITIZE_THREAD__)
#define UNDER_TSAN 1
#endif

/* A child that touches the released region of blocks.0: its last words. */
static void child_touches(const member *m, char *said, size_t said_bytes) {
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    const volatile char *at = (const volatile char *)(uintptr_t)fcdp_group_extent(m->groups[0], 1).addr;
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        _exit(*at);
    }
    close(ends[1]);
    size_t n = 0;
    for (ssize_t got; (got = read(ends[0], said + n, said_bytes - 1 - n)) > 0;) n += (size_t)got;
    said[n] = 0;
    close(ends[0]);
    int ended;
    assert_int_equal(waitpid(child, &ended, 0), child);
    assert_true(ended != 0); /* by SIGSEGV, or by a sanitizer that was told of it */
}

static void test_a_fault_in_a_released_group_is_named(void **state) {
    (void)state;
#ifdef UNDER_TSAN
    print_message("jemalloc takes more locks before a fork than TSan's deadlock detector can count\n");
    skip();
#endif
    cluster *c = cluster_create(&one_group);
    member *m = &c->members[0];
    const char *names[CLUSTER_MAX_EXTENTS] = {"up.weight", "up.bias", "down.weight", "down.bias"};
    uint32_t n = c->config.groups[0].n_extents;
    char said[4096];
    assert_in_range(n, 2, 4);
    assert_int_equal(fcdp_group_watch(m->groups[0], names, n + 1), FCDP_ERR_INVALID);
    assert_ok(fcdp_group_watch(m->groups[0], names, n));
    assert_int_equal(fcdp_group_watch(m->groups[0], names, n), FCDP_ERR_INVALID);
    rewrite_all(c);
    unshard_all_right(c, all_stale);
    reshard_all(c);
    assert_ok(fcdp_engine_drain(m->engine));
    child_touches(m, said, sizeof said);
    if (!strstr(said, "is in the gathered parameter up.bias of blocks.0, ")) fail_msg("%s", said);
    cluster_destroy(c);
    assert_nothing_lives();
}

/* On two nodes of two. Three groups of 3, 2 and 1 pages, of which the first stays gathered; half of a group
 * crosses while it is gathered. */
static void test_what_does_not_fit_is_refused_with_what_would(void **state) {
    (void)state;
    enum { PAGE = 2 << 20 };
    static const struct {
        size_t budget_pages;
        const char *text;
    } cases[] = {{6, "FCDP_DEVICE_BUDGET=22M would do"}, {7, NULL}, {11, NULL}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cluster_config config = one_group;
        config.n_nodes = config.node_size = 2;
        config.restore = FCDP_RESTORE_SLICE;
        config.device_budget_bytes = cases[i].budget_pages * PAGE;
        config.n_groups = 3;
        for (uint32_t g = 0; g < 3; g++)
            config.groups[g] = (group_spec){1, {{(3 - g) * PAGE / 4, FCDP_SPAN_TRAINABLE}}};
        cluster *c = cluster_create(&config);
        const uint8_t stays[] = {1, 0, 0};
        fcdp_status status = fcdp_groups_fit(c->members[3].groups, stays, 3);
        assert_int_equal(status, cases[i].text ? FCDP_ERR_NO_DEVICE_MEM : FCDP_OK);
        if (status && (!strstr(fcdp_error_text(), cases[i].text) ||
                       !strstr(fcdp_error_text(), "'blocks.0', takes 6 MiB and 4 MiB more")))
            fail_msg("%s", fcdp_error_text());
        cluster_destroy(c);
    }
    assert_nothing_lives();
}

/* In the child: every call says so, none waits for the worker that is not there. */
static int child_calls(member *m) {
    uint64_t inputs[CLUSTER_MAX_EXTENTS] = {0};
    fcdp_job *job;
    fcdp_engine_stats stats;
    if (fcdp_group_unshard(m->groups[0], all_stale, inputs, FCDP_PASS_FORWARD, NULL, &job) !=
        FCDP_ERR_UNSUPPORTED)
        return 1;
    if (fcdp_group_reshard(m->groups[0], NULL) != FCDP_ERR_UNSUPPORTED) return 2;
    if (fcdp_engine_drain(m->engine) != FCDP_ERR_UNSUPPORTED) return 3;
    if (!strstr(fcdp_error_text(), "fork")) return 4;
    fcdp_engine_stats_get(m->engine, &stats);
    fcdp_group_destroy(m->groups[0]);
    fcdp_engine_destroy(m->engine);
    return 0;
}

static void test_forked_child_touches_nothing(void **state) {
    (void)state;
#ifdef UNDER_TSAN
    print_message("jemalloc takes more locks before a fork than TSan's deadlock detector can count\n");
    skip();
#endif
    cluster *c = cluster_create(&one_group);
    rewrite_all(c);
    unshard_all_right(c, all_stale);
    pid_t child = fork();
    if (child == 0) _exit(child_calls(&c->members[0]));
    int ended;
    assert_int_equal(waitpid(child, &ended, 0), child);
    assert_int_equal(ended, 0);
    reshard_all(c);
    unshard_all_right(c, none_stale);
    cluster_destroy(c);
    assert_nothing_lives();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_a_fault_in_a_released_group_is_named),
        cmocka_unit_test(test_what_does_not_fit_is_refused_with_what_would),
        cmocka_unit_test(test_counts_and_states),
        cmocka_unit_test(test_prefetch),
        cmocka_unit_test(test_after_a_gather_that_failed_alone_nothing_crosses),
        cmocka_unit_test(test_a_gather_is_of_what_was_observed_at_its_submission),
        cmocka_unit_test(test_void_copy_fails_on_every_rank_of_the_node_at_once),
        cmocka_unit_test(test_failed_release_is_told_once_and_voids),
        cmocka_unit_test(test_forked_child_touches_nothing),
        cmocka_unit_test(test_every_mix_of_votes),
        cmocka_unit_test(test_random_programs),
    };
    cmocka_set_test_filter(getenv("TEST_FILTER"));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
