/* The engine against an oracle: clusters of ranks, every byte checked in every use. Where compute is
 * the device's no call waits for another rank, so one thread can be all ranks, one after the other.
 */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "comm/coalesce.h"
#include "comm/fit.h"
#include "comm/internal.h"
#include "comm/tree.h"
#include "comm/unshard.h"
#include "comm/vote.h"
#include "tests/comm/program.h"
#include "tiering/reclaim.h"
#include "tools/simgpu/simgpu.h"

enum { PAGE_BYTES = 2 << 20, CUDA_UNKNOWN = 999 };

static const uint8_t all_extents[CLUSTER_MAX_EXTENTS] = {1, 1, 1, 1, 1, 1, 1, 1};

static const cluster_config one_group = {
    .n_nodes = 2,
    .node_size = 3,
    .n_groups = 1,
    .groups = {{4, {{90000, 0}, {700, 0}, {70001, 1}, {513, 1}}}},
    .mapping = FCDP_MAPPING_SLOTS,
    .prefetch = 2,
    .device_budget_bytes = 16 * (size_t)PAGE_BYTES,
};

static cluster *start(const cluster_config *config) {
    simgpu_reset();
    simgpu_set_races(1);
    return cluster_create(config);
}

static void end(cluster *c) {
    cluster_check_launches(c, false);
    cluster_destroy(c);
    assert_nobody_spun();
    assert_nothing_lives();
}

/* ---- all ranks, one after the other ---- */

#define EVERY_MEMBER(c, m) for (member *m = (c)->members; m < (c)->members + (c)->n_ranks; m++)

static void step_all(cluster *c, uint32_t g, const uint8_t *which) {
    EVERY_MEMBER(c, m) assert_ok(member_step(m, g, which, true));
}

/* The maximum of the votes, of n_extents + 1. */
static void agree_all(cluster *c, uint32_t g, uint8_t *agreed_out) {
    uint32_t n = c->config.groups[g].n_extents + 1;
    uint8_t vote[CLUSTER_MAX_EXTENTS + 1];
    memset(agreed_out, 0, n);
    EVERY_MEMBER(c, m) {
        assert_ok(member_vote(m, g, vote));
        for (uint32_t i = 0; i < n; i++)
            if (vote[i] > agreed_out[i]) agreed_out[i] = vote[i];
    }
    EVERY_MEMBER(c, m) fcdp_group_agree(m->groups[g], agreed_out);
}

static void begin_all(cluster *c, uint32_t g, fcdp_pass pass) {
    EVERY_MEMBER(c, m) assert_ok(member_begin(m, g, pass));
}

static void drain_all(cluster *c) {
    EVERY_MEMBER(c, m) {
        assert_ok(fcdp__driver_stream_sync(m->engine->drv, m->stream));
        assert_ok(fcdp_engine_drain(m->engine));
        if (m->wrong[0]) fail_msg("%s", m->wrong);
    }
}

static void use_all(cluster *c, uint32_t g) {
    EVERY_MEMBER(c, m) {
        fcdp_group *ahead[1];
        (void)fcdp_group_unsharded(m->groups[g], false, ahead, 1);
        assert_ok(member_use(m, g));
    }
    drain_all(c);
}

/* Agree, gather or restore, look at every byte. */
static void unshard_all(cluster *c, uint32_t g, fcdp_pass pass) {
    uint8_t agreed[CLUSTER_MAX_EXTENTS + 1];
    agree_all(c, g, agreed);
    begin_all(c, g, pass);
    use_all(c, g);
}

static void reshard_all(cluster *c, uint32_t g) {
    EVERY_MEMBER(c, m) assert_ok(member_reshard(m, g, false));
    EVERY_MEMBER(c, m) assert_ok(fcdp_engine_drain(m->engine));
}

static uint64_t sent(const cluster *c) {
    return c->hub.inter_bytes_sent;
}

static fcdp_span_state span_state(const member *m, uint32_t g, uint32_t span) {
    fcdp_region_state state;
    fcdp__region_state(m->groups[g]->region, &state);
    return state.span[span];
}

/* ---- every mix of fates ---- */

enum { KEPT, RELEASED, EVICTED, N_FATES };

/* Decided after a gather, by each rank for itself. */
static void fates_apply(cluster *c, const int *fates) {
    EVERY_MEMBER(c, m) m->engine->options.tau = fates[m->topology.rank] == RELEASED ? 0 : 1;
    reshard_all(c, 0);
    EVERY_MEMBER(c, m) {
        fcdp_region_state state;
        if (fates[m->topology.rank] == EVICTED) assert_true(fcdp__tiering_reclaim(m->engine->tiering, 1) > 0);
        fcdp__region_state(m->groups[0]->region, &state);
        assert_int_equal(state.kept, fates[m->topology.rank] == KEPT);
    }
}

/* What the ranks bring back together is right, and does not cross the
 * nodes; then a part of a span changes. */
static void mix_run(cluster *c, const int *fates, bool stored) {
    static const uint8_t part[CLUSTER_MAX_EXTENTS] = {0, 1, 0, 0};
    step_all(c, 0, all_extents);
    unshard_all(c, 0, FCDP_PASS_FORWARD);
    uint64_t crossed = sent(c);
    if (stored) { /* the host has all of it, from an earlier release */
        EVERY_MEMBER(c, m) m->engine->options.tau = 0;
        reshard_all(c, 0);
        unshard_all(c, 0, FCDP_PASS_BACKWARD);
    }
    for (int again = 0; again < 2; again++) { /* who was evicted alone knows the whole the second time */
        fates_apply(c, fates);
        unshard_all(c, 0, FCDP_PASS_BACKWARD);
        assert_int_equal(sent(c), crossed);
    }
    fates_apply(c, fates);
    step_all(c, 0, part);
    unshard_all(c, 0, FCDP_PASS_FORWARD);
    assert_true(sent(c) > crossed);
    fates_apply(c, fates);
    unshard_all(c, 0, FCDP_PASS_BACKWARD);
    reshard_all(c, 0);
}

static void test_every_mix_of_fates(void **state) {
    (void)state;
    for (int restore = FCDP_RESTORE_SLICE; restore <= FCDP_RESTORE_WHOLE; restore++) {
        cluster_config config = one_group;
        config.restore = (fcdp_restore_mode)restore;
        cluster *c = start(&config);
        for (uint32_t mix = 0; mix < N_FATES * N_FATES * N_FATES * 2; mix++) {
            int fates[CLUSTER_MAX_RANKS];
            for (uint32_t r = 0, left = mix / 2; r < 3; r++, left /= N_FATES) {
                fates[r] = (int)(left % N_FATES);
                fates[3 + (r + 1) % 3] = fates[r]; /* the other node's ranks, turned */
            }
            mix_run(c, fates, mix % 2);
        }
        end(c);
    }
}

/* ---- writes into the gathered bytes ---- */

static void test_a_write_that_was_told_is_gathered_again(void **state) {
    (void)state;
    for (int tau = 0; tau < 2; tau++) {
        cluster_config config = one_group;
        uint8_t agreed[CLUSTER_MAX_EXTENTS + 1];
        for (uint32_t r = 0; r < CLUSTER_MAX_RANKS; r++) config.tau[r] = tau;
        config.tau[4] = 0; /* it has stored its pieces already; the others have them on the device alone */
        cluster *c = start(&config);
        step_all(c, 0, all_extents);
        unshard_all(c, 0, FCDP_PASS_FORWARD);
        EVERY_MEMBER(c, m) assert_int_equal(fcdp_group_question(m->groups[0], false), FCDP_ASK_TREE);
        EVERY_MEMBER(c, m) fcdp_tree_agreed(m->tree);
        EVERY_MEMBER(c, m) assert_int_equal(fcdp_group_question(m->groups[0], false), FCDP_ASK_NOBODY);
        EVERY_MEMBER(c, m) assert_ok(member_scribble(m, 0));
        EVERY_MEMBER(c, m) assert_ok(member_reshard(m, 0, true));
        /* all alike */
        EVERY_MEMBER(c, m) assert_int_equal(fcdp_group_question(m->groups[0], false), FCDP_ASK_GROUP);
        agree_all(c, 0, agreed);
        /* else the host has what was gathered */
        for (uint32_t i = 0; i < 4; i++) assert_int_equal(agreed[i] != 0, tau);
        unshard_all(c, 0, FCDP_PASS_BACKWARD);
        end(c);
    }
}

static void raw_write_body(member *m, void *arg) {
    const uint32_t *writer = arg;
    MUST(!member_step(m, 0, all_extents, true));
    for (int pass = 0; pass < 4; pass++) { /* a pass each: the ranks agree first */
        if (pass % 2)
            member_begin_backward(m);
        else
            member_begin_forward(m);
        MUST(!member_unshard(m, 0, pass % 2 ? UNSHARD_BACKWARD : UNSHARD_FORWARD));
        MUST(!member_use(m, 0));
        MUST(!m->wrong[0]);
        if (pass == 1 && m->topology.rank == *writer) MUST(!member_scribble(m, 0));
        MUST(!member_reshard(m, 0, false));
    }
}

/* Nothing but the bytes themselves tells of it, on one rank alone; where they are kept they are looked at. */
static void test_a_write_that_nobody_told_is_not_kept(void **state) {
    (void)state;
    for (int restore = FCDP_RESTORE_SLICE; restore <= FCDP_RESTORE_WHOLE; restore++)
        for (int tau = 0; tau < 2; tau++) {
            cluster_config config = one_group;
            uint32_t writer = 4;
            config.host_computes = true;
            config.restore = (fcdp_restore_mode)restore;
            for (uint32_t r = 0; r < CLUSTER_MAX_RANKS; r++) config.tau[r] = tau;
            cluster *c = start(&config);
            cluster_run(c, raw_write_body, &writer);
            end(c);
        }
}

/* ---- one by one ---- */

/* Nobody waits for what was begun ahead of a use that did not come: the step itself
 * must be behind the reads of the shards. */
static void test_a_step_is_behind_gathers_that_nobody_used(void **state) {
    (void)state;
    for (int together = 0; together < 2; together++)
        for (int host_computes = 0; host_computes < 2; host_computes++) {
            cluster_config config = one_group;
            uint8_t agreed[CLUSTER_MAX_EXTENTS + 1];
            config.coalesce_bytes = together ? 1 << 20 : 0;
            config.host_computes = host_computes;
            cluster *c = start(&config);
            step_all(c, 0, all_extents);
            EVERY_MEMBER(c, m) fcdp_tree_agreed(m->tree);
            unshard_all(c, 0, FCDP_PASS_FORWARD); /* from then on it crosses with others, if it is small */
            reshard_all(c, 0);
            step_all(c, 0, all_extents);
            agree_all(c, 0, agreed);
            EVERY_MEMBER(c, m) assert_int_equal(fcdp_group_is_small(m->groups[0]), together);
            EVERY_MEMBER(c, m) {
                uint64_t inputs[CLUSTER_MAX_EXTENTS] = {0};
                for (uint32_t i = 0; i < config.groups[0].n_extents; i++)
                    inputs[i] = (uintptr_t)(m->shards + m->shard_at[0][i]);
                if (together) assert_ok(fcdp_groups_coalesce(&m->groups[0], inputs, 1, m->stream));
            }
            begin_all(c, 0, FCDP_PASS_FORWARD);
            EVERY_MEMBER(c, m) assert_ok(member_reshard(m, 0, false));
            step_all(c, 0, all_extents);
            /* simgpu does not see what the host writes */
            EVERY_MEMBER(c, m) assert_int_equal(m->groups[0]->reading == NULL, host_computes);
            drain_all(c);
            unshard_all(c, 0, FCDP_PASS_FORWARD);
            end(c);
        }
}

static void test_a_gather_is_of_what_was_voted_on(void **state) {
    (void)state;
    cluster *c = start(&one_group);
    member *m = &c->members[0];
    uint8_t agreed[CLUSTER_MAX_EXTENTS + 1], vote[CLUSTER_MAX_EXTENTS + 1];
    step_all(c, 0, all_extents);
    agree_all(c, 0, agreed);
    for (uint32_t i = 0; i < 4; i++) assert_int_equal(agreed[i], FCDP_STALE_NEW);
    assert_int_equal(agreed[4], 1);
    begin_all(c, 0, FCDP_PASS_FORWARD);
    fcdp_group_stale(m->groups[0], vote);
    for (uint32_t i = 0; i < 4; i++) assert_int_equal(vote[i], 0);
    fcdp_group *ahead[1];
    /* else a vote would end the use that nobody made */
    (void)fcdp_group_unsharded(m->groups[0], false, ahead, 1);
    m->steps[0][2]++; /* while it is under way */
    assert_ok(member_vote(m, 0, vote));
    assert_int_equal(vote[2], FCDP_STALE_OPTIMIZER);
    m->steps[0][2]--;
    use_all(c, 0);
    agree_all(c, 0, agreed);
    for (uint32_t i = 0; i < 5; i++) assert_int_equal(agreed[i], 0);
    m->steps[0][1]++;
    agree_all(c, 0, agreed); /* one rank saw a step: stale for all */
    assert_int_equal(agreed[1], FCDP_STALE_OPTIMIZER);
    EVERY_MEMBER(c, each) {
        fcdp_group_stale(each->groups[0], vote);
        for (uint32_t i = 0; i < 4; i++) assert_int_equal(vote[i] != 0, i == 1);
    }
    reshard_all(c, 0);
    end(c);
}

/* What no signal shows, of some extents, and of one bit on one rank: asked on a device, as on
 * a GPU. Signals alone do not see it. */
static void test_a_silent_write_is_seen_by_its_bytes(void **state) {
    (void)state;
    static const uint8_t part[CLUSTER_MAX_EXTENTS] = {0, 1, 0, 1};
    for (int looks = 0; looks < 2; looks++) {
        cluster_config config = one_group;
        uint8_t agreed[CLUSTER_MAX_EXTENTS + 1];
        config.fingerprints = looks;
        cluster *c = start(&config);
        step_all(c, 0, all_extents);
        unshard_all(c, 0, FCDP_PASS_FORWARD);
        reshard_all(c, 0);
        member *m = &c->members[4];
        uint8_t *byte = m->shards + m->shard_at[0][2] + 69999;
        *byte ^= 0x10;
        agree_all(c, 0, agreed);
        for (uint32_t i = 0; i < 4; i++)
            assert_int_equal(agreed[i], looks && i == 2 ? FCDP_STALE_FINGERPRINT : 0);
        *byte ^= 0x10;
        agree_all(c, 0, agreed);
        for (uint32_t i = 0; i < 4; i++) assert_int_equal(agreed[i], 0);
        uint64_t crossed = sent(c);
        if (looks) EVERY_MEMBER(c, each) assert_ok(member_step(each, 0, part, false));
        unshard_all(c, 0, FCDP_PASS_FORWARD); /* which looks at every byte */
        assert_int_equal(sent(c) > crossed, looks);
        reshard_all(c, 0);
        end(c);
    }
}

/* Grad mode, there and back, is no change where the bytes are known: a reference
 * forward between forward and backward. */
static void test_fingerprints_keep_what_grad_mode_would_not(void **state) {
    (void)state;
    for (int looks = 0; looks < 2; looks++) {
        cluster_config config = one_group;
        config.fingerprints = looks;
        cluster *c = start(&config);
        step_all(c, 0, all_extents);
        unshard_all(c, 0, FCDP_PASS_FORWARD);
        reshard_all(c, 0);
        uint64_t crossed = sent(c);
        for (int pass = 0; pass < 2; pass++) {
            EVERY_MEMBER(c, m) m->evaluates = pass == 0;
            unshard_all(c, 0, pass ? FCDP_PASS_BACKWARD : FCDP_PASS_FORWARD);
            reshard_all(c, 0);
        }
        assert_int_equal(sent(c) == crossed, looks);
        end(c);
    }
}

/* A signal moves on one rank, and no byte: a trip through another
 * device, an optimizer that changed nothing. */
static void test_equal_bytes_are_not_gathered_again(void **state) {
    (void)state;
    for (int looks = 0; looks < 2; looks++) {
        cluster_config config = one_group;
        config.fingerprints = looks;
        cluster *c = start(&config);
        step_all(c, 0, all_extents);
        unshard_all(c, 0, FCDP_PASS_FORWARD);
        reshard_all(c, 0);
        uint64_t crossed = sent(c);
        for (uint32_t i = 0; i < 4; i++) c->members[2].steps[0][i]++;
        unshard_all(c, 0, FCDP_PASS_FORWARD);
        reshard_all(c, 0);
        assert_int_equal(sent(c) == crossed, looks);
        end(c);
    }
}

/* Written between the agreement and the gather, then put back: the bytes are what was
 * agreed on, and the copy is not of them. */
static void test_a_write_that_only_the_gather_saw(void **state) {
    (void)state;
    cluster_config config = one_group;
    uint8_t agreed[CLUSTER_MAX_EXTENTS + 1];
    config.fingerprints = true;
    cluster *c = start(&config);
    step_all(c, 0, all_extents);
    agree_all(c, 0, agreed);
    step_all(c, 0, all_extents); /* version 2 */
    begin_all(c, 0, FCDP_PASS_FORWARD);
    use_all(c, 0);
    reshard_all(c, 0);
    EVERY_MEMBER(c, m) memset(m->version, 0, sizeof m->version);
    step_all(c, 0, all_extents); /* version 1 again */
    unshard_all(c, 0, FCDP_PASS_FORWARD);
    reshard_all(c, 0);
    end(c);
}

static uint64_t device_bytes(const member *m) {
    fcdp_engine_stats stats;
    fcdp_engine_stats_get(m->engine, &stats);
    return stats.device_bytes;
}

static void test_a_group_begun_ahead(void **state) {
    (void)state;
    cluster *c = start(&one_group);
    member *m = &c->members[4];
    uint8_t agreed[CLUSTER_MAX_EXTENTS + 1];
    step_all(c, 0, all_extents);
    assert_int_equal(device_bytes(m), 0);
    agree_all(c, 0, agreed);
    begin_all(c, 0, FCDP_PASS_FORWARD);
    assert_true(fcdp_group_has_begun(m->groups[0]));
    assert_int_equal(device_bytes(m), PAGE_BYTES);
    drain_all(c); /* nobody waits for it yet */
    uint64_t crossed = sent(c);
    assert_true(crossed > 0);
    begin_all(c, 0, FCDP_PASS_FORWARD); /* its use: it has begun */
    use_all(c, 0);
    assert_int_equal(sent(c), crossed);
    reshard_all(c, 0);
    assert_false(fcdp_group_has_begun(m->groups[0]));

    const uint8_t part[CLUSTER_MAX_EXTENTS] = {1, 0, 0, 0};
    step_all(c, 0, part);
    agree_all(c, 0, agreed);
    begin_all(c, 0, FCDP_PASS_FORWARD);
    step_all(c, 0, all_extents); /* the forward was broken off */
    agree_all(c, 0, agreed);     /* ends the use that nobody made */
    assert_false(fcdp_group_has_begun(m->groups[0]));
    for (uint32_t i = 0; i < 4; i++) assert_int_equal(agreed[i], FCDP_STALE_OPTIMIZER);
    begin_all(c, 0, FCDP_PASS_FORWARD);
    use_all(c, 0);
    reshard_all(c, 0);

    fcdp_group_stats stats;
    fcdp_group_stats_get(m->groups[0], &stats);
    assert_int_equal(stats.gathers.made, 3);
    step_all(c, 0, part);
    agree_all(c, 0, agreed);
    begin_all(c, 0, FCDP_PASS_FORWARD); /* left behind at the end */
    end(c);
}

static void test_what_follows_is_begun_ahead(void **state) {
    (void)state;
    cluster_config config = one_group;
    config.n_groups = 4;
    for (uint32_t g = 1; g < 4; g++) config.groups[g] = config.groups[0];
    cluster *c = start(&config);
    member *m = &c->members[0];
    fcdp_group *ahead[8];
    uint8_t agreed[CLUSTER_MAX_EXTENTS + 1];
    for (int pass = 0; pass < 2; pass++) {
        fcdp_tree_begin_forward(m->tree);
        for (uint32_t g = 0; g < 4; g++) agree_all(c, g, agreed);
        fcdp_tree_agreed(m->tree);
        for (uint32_t g = 0; g < 4; g++) {
            size_t n = fcdp_group_unsharded(m->groups[g], true, ahead, 8), expected = g < 2 ? 2 : 3 - g;
            assert_int_equal(n, pass == 0 ? 0 : expected);
            for (size_t i = 0; i < n; i++) assert_ptr_equal(ahead[i], m->groups[g + 1 + i]);
            assert_int_equal(fcdp_group_unsharded(m->groups[g], true, ahead, 1), pass == 0 || g == 3 ? 0 : 1);
        }
        EVERY_MEMBER(c, other) for (uint32_t g = 0; g < 4; g++) assert_ok(member_reshard(other, g, false));
        for (uint32_t g = 0; g < 4; g++) fcdp__member_resharded(&m->groups[g]->member);
    }
    fcdp_tree_begin_backward(m->tree);
    assert_int_equal(fcdp_group_unsharded(m->groups[0], false, ahead, 8), 0);
    m->engine->options.prefetch = 0;
    assert_int_equal(fcdp_group_unsharded(m->groups[0], true, ahead, 8), 0);
    end(c);
}

/* Its peers wait in the gather that this rank did not join: no later one may meet them there. */
static void test_after_a_gather_that_failed_alone_nothing_crosses(void **state) {
    (void)state;
    cluster_config config = one_group;
    config.n_groups = 2;
    config.groups[1] = config.groups[0];
    cluster *c = start(&config);
    member *m = &c->members[1];
    uint8_t agreed[CLUSTER_MAX_EXTENTS + 1];
    for (uint32_t g = 0; g < 2; g++) step_all(c, g, all_extents);
    for (uint32_t g = 0; g < 2; g++) agree_all(c, g, agreed);
    EVERY_MEMBER(c, other) assert_ok(fcdp__driver_stream_sync(other->engine->drv, other->stream));
    assert_int_equal(simgpu_fail_nth("cuMemcpyDtoDAsync", 1, CUDA_UNKNOWN), 0);
    assert_int_equal(member_begin(m, 0, FCDP_PASS_FORWARD), FCDP_ERR_DRIVER);
    assert_non_null(strstr(fcdp_error_text(), "gathering 'blocks.0' between nodes"));
    assert_int_equal(c->hub.n_calls, 0);
    assert_int_equal(member_begin(m, 1, FCDP_PASS_FORWARD), FCDP_ERR_DRIVER);
    assert_non_null(strstr(fcdp_error_text(), "blocks.0")); /* it says what was first */
    assert_int_equal(fcdp_engine_check(m->engine), FCDP_ERR_DRIVER);
    assert_int_equal(c->hub.n_calls, 0);
    assert_int_equal(member_begin(&c->members[0], 0, FCDP_PASS_FORWARD), FCDP_ERR_PEER); /* on its node */
    assert_non_null(strstr(fcdp_error_text(), "rank 1"));
    end(c);
}

static void assert_refused(fcdp_status status, const char *words) {
    assert_int_equal(status, FCDP_ERR_INVALID);
    assert_non_null(strstr(fcdp_error_text(), "a CUDA graph is being captured"));
    if (!strstr(fcdp_error_text(), words)) fail_msg("'%s' is not in: %s", words, fcdp_error_text());
}

/* What is refused has done nothing: the capture goes on, and so do the ranks. The monitor
 * looks meanwhile, at what is under way. */
static void test_nothing_is_part_of_a_captured_graph(void **state) {
    (void)state;
    cluster *c = start(&one_group);
    member *m = &c->members[1];
    uint8_t agreed[CLUSTER_MAX_EXTENTS + 1];
    uint64_t inputs[CLUSTER_MAX_EXTENTS] = {(uintptr_t)m->shards};
    const size_t bytes = 64;
    step_all(c, 0, all_extents);
    agree_all(c, 0, agreed);
    drain_all(c);
    assert_int_equal(simgpu_capture(m->stream, 1), 0);
    assert_refused(member_begin(m, 0, FCDP_PASS_FORWARD), "'blocks.0' cannot be gathered");
    assert_refused(fcdp_groups_coalesce(&m->groups[0], inputs, 1, m->stream),
                   "'blocks.0' cannot be gathered");
    assert_refused(fcdp_comm_fingerprint_begin(m->comm, inputs, &bytes, 1, m->stream), "cannot be compared");
    assert_ok(fcdp_engine_order_writes(m->engine, m->stream));
    assert_int_equal(simgpu_capture(m->stream, 0), 0);
    assert_int_equal(c->hub.n_calls, 0);
    begin_all(c, 0, FCDP_PASS_FORWARD);
    assert_int_equal(simgpu_capture(m->stream, 1), 0);
    assert_non_null(m->groups[0]->reading);
    assert_ok(fcdp_engine_order_writes(m->engine, m->stream)); /* the step is not made now */
    assert_refused(fcdp_group_wait(m->groups[0], m->stream), "'blocks.0' cannot be waited for");
    while (atomic_load(&m->groups[0]->in_flight_ns)) sched_yield(); /* until the monitor has seen its end */
    assert_int_equal(simgpu_capture(m->stream, 0), 0);
    use_all(c, 0);
    assert_int_equal(simgpu_capture(m->stream, 1), 0);
    assert_refused(fcdp_group_reshard(m->groups[0], m->stream, false), "'blocks.0' cannot be resharded");
    assert_int_equal(simgpu_capture(m->stream, 0), 0);
    EVERY_MEMBER(c, other) if (other != m) assert_ok(member_reshard(other, 0, false));
    /* to the framework it was resharded: what is stale is gathered again */
    assert_false(fcdp_group_has_begun(m->groups[0]));
    step_all(c, 0, all_extents);
    unshard_all(c, 0, FCDP_PASS_FORWARD);
    reshard_all(c, 0);
    end(c);
}

static void test_counts_and_states(void **state) {
    (void)state;
    cluster *c = start(&one_group);
    fcdp_group *group = c->members[2].groups[0];
    fcdp_group_stats of_group;
    fcdp_engine_stats stats;
    size_t bytes = 0;
    for (uint32_t i = 0; i < one_group.groups[0].n_extents; i++)
        bytes += one_group.groups[0].extents[i].shard_bytes;
    fcdp_group_stats_get(group, &of_group);
    assert_string_equal(of_group.state, "invalid");
    assert_int_equal(of_group.bytes, group->layout->bytes);
    step_all(c, 0, all_extents);
    unshard_all(c, 0, FCDP_PASS_FORWARD);
    fcdp_group_stats_get(group, &of_group);
    assert_string_equal(of_group.state, "device");
    reshard_all(c, 0);
    fcdp_engine_stats_get(c->members[2].engine, &stats);
    assert_int_equal(stats.gather.calls, 2);                        /* one per lane */
    assert_int_equal(stats.gather.inter_bytes_sent, bytes);         /* to the one other node */
    assert_int_equal(stats.gather.intra_bytes_sent, 2 * 2 * bytes); /* two blocks, to two ranks */
    assert_int_equal(stats.restore.calls, 0);
    /* its slice: all ranks together put all, once */
    assert_int_equal(stats.moves.d2h_bytes, group->layout->bytes / 3);
    assert_int_equal(stats.device_bytes, PAGE_BYTES); /* a free slot */
    assert_true(stats.host_bytes >= group->layout->bytes);
    assert_true(stats.host_bytes <= group->layout->bytes + 3 * 4096);
    fcdp_group_stats_get(group, &of_group);
    assert_string_equal(of_group.state, "host");
    unshard_all(c, 0, FCDP_PASS_BACKWARD);
    reshard_all(c, 0);
    fcdp_engine_stats_get(c->members[2].engine, &stats);
    assert_int_equal(stats.gather.calls, 2);
    assert_int_equal(stats.restore.calls, 1);
    assert_int_equal(stats.restore.inter_bytes_sent, 0);
    assert_int_equal(stats.moves.h2d_bytes, group->layout->bytes / 3);
    assert_int_equal(stats.moves.d2h_bytes, group->layout->bytes / 3); /* clean: not stored again */
    assert_int_equal(stats.restore.intra_bytes_sent, group->layout->bytes / 3 * 2);
    step_all(c, 0, all_extents);
    unshard_all(c, 0, FCDP_PASS_BACKWARD);
    fcdp_group_stats_get(group, &of_group);
    assert_int_equal(of_group.gathers.made, 2);
    assert_int_equal(of_group.gathers.avoided, 1);
    assert_int_equal(of_group.gathers.forward, 1);
    assert_int_equal(of_group.gathers.backward, 1);
    fcdp_engine_stats_get(c->members[2].engine, &stats);
    assert_int_equal(stats.gathers.made, 2);
    assert_int_equal(stats.gathers.avoided, 1);
    assert_int_equal(stats.plain_bytes, 3 * 5 * bytes);
    /* of the node: three ranks, one other node, two gathers */
    assert_int_equal(stats.gather_bytes, 2 * 3 * bytes);
    assert_int_equal(stats.n_host_waits, 0);
    end(c);
}

/* What cannot be stored stays where it is: the call fails, and nothing is lost. */
static void test_a_store_that_fails_keeps_the_pages(void **state) {
    (void)state;
    cluster *c = start(&one_group);
    member *m = &c->members[5];
    step_all(c, 0, all_extents);
    EVERY_MEMBER(c, each) each->engine->options.tau = 1; /* stays on the device alone ... */
    unshard_all(c, 0, FCDP_PASS_FORWARD);
    EVERY_MEMBER(c, each) each->engine->options.tau = 0; /* ... until its release */
    assert_int_equal(simgpu_fail_nth("cuMemcpyDtoHAsync", 1, CUDA_UNKNOWN), 0);
    assert_int_equal(member_reshard(m, 0, false), FCDP_ERR_DRIVER);
    assert_non_null(strstr(fcdp_error_text(), "releasing 'blocks.0'"));
    EVERY_MEMBER(c, each) assert_ok(member_reshard(each, 0, false)); /* the others' first, its second */
    drain_all(c);
    assert_true(span_state(m, 0, 0).on_device);
    assert_false(span_state(&c->members[0], 0, 0).on_device);
    uint64_t crossed = sent(c);
    unshard_all(c, 0, FCDP_PASS_BACKWARD);
    assert_int_equal(sent(c), crossed);
    reshard_all(c, 0);
    assert_false(span_state(m, 0, 0).on_device);
    unshard_all(c, 0, FCDP_PASS_BACKWARD);
    assert_int_equal(sent(c), crossed);
    end(c);
}

static void test_refusals(void **state) {
    (void)state;
    cluster *c = start(&one_group);
    member *m = &c->members[1];
    fcdp_group *group;
    uint64_t inputs[CLUSTER_MAX_EXTENTS] = {0}, offset;
    uint8_t agreed[CLUSTER_MAX_EXTENTS + 1] = {0};
    const fcdp_extent_spec empty[] = {{0, 0}, {0, 1}}, one[] = {{512, 0}};
    assert_int_equal(fcdp_group_create(m->comm, "empty", empty, 2, &group), FCDP_ERR_UNSUPPORTED);
    assert_ok(fcdp_group_create(m->comm, "one", one, 1, &group));
    assert_int_equal(fcdp_group_host_alloc(group, &offset), FCDP_ERR_INVALID); /* not the leader */
    assert_int_equal(fcdp_group_begin(group, inputs, FCDP_PASS_FORWARD, m->stream), FCDP_ERR_INVALID);
    assert_non_null(strstr(fcdp_error_text(), "'one' is not attached"));
    fcdp_group_destroy(group);
    assert_int_equal(fcdp_group_wait(m->groups[0], m->stream), FCDP_ERR_INVALID);
    assert_non_null(strstr(fcdp_error_text(), "has not begun"));
    assert_ok(fcdp_group_reshard(m->groups[0], m->stream, false)); /* nothing to release */
    agree_all(c, 0, agreed);
    assert_int_equal(fcdp_group_begin(m->groups[0], inputs, FCDP_PASS_FORWARD, m->stream), FCDP_ERR_INVALID);
    assert_non_null(strstr(fcdp_error_text(), "has no input"));
    assert_int_equal(fcdp_group_begin(m->groups[0], NULL, FCDP_PASS_FORWARD, m->stream), FCDP_ERR_INVALID);
    assert_ok(fcdp_comm_check(m->comm)); /* the caller's errors are nobody else's */
    memset(agreed, 0, sizeof agreed);
    fcdp_group_agree(m->groups[0], agreed);
    assert_int_equal(fcdp_group_begin(m->groups[0], NULL, FCDP_PASS_FORWARD, m->stream), FCDP_ERR_INVALID);
    /* nowhere, and the others would wait for it */
    assert_non_null(strstr(fcdp_error_text(), "restoring 'blocks.0'"));
    assert_int_equal(fcdp_comm_check(m->comm), FCDP_ERR_INVALID);
    assert_int_equal(c->hub.n_calls, 0);
    end(c);
}

/* In the child: every call says so, none waits for what is not there. */
static int child_calls(member *m) {
    uint64_t inputs[CLUSTER_MAX_EXTENTS] = {0};
    fcdp_engine_stats stats;
    if (fcdp_group_reshard(m->groups[0], NULL, false) != FCDP_ERR_UNSUPPORTED) return 1;
    if (fcdp_engine_drain(m->engine) != FCDP_ERR_UNSUPPORTED) return 2;
    if (!strstr(fcdp_error_text(), "fork")) return 3;
    if (fcdp_engine_check(m->engine) != FCDP_ERR_UNSUPPORTED) return 4;
    m->groups[0]->begun = false; /* as if it had been resharded before the fork */
    if (fcdp_group_begin(m->groups[0], inputs, FCDP_PASS_FORWARD, NULL) != FCDP_ERR_UNSUPPORTED) return 5;
    if (fcdp_engine_order_writes(m->engine, NULL) != FCDP_ERR_UNSUPPORTED) return 6;
    fcdp_engine_begin_pass(m->engine);
    fcdp_engine_reset_peaks(m->engine);
    fcdp_engine_stats_get(m->engine, &stats);
    fcdp_group_destroy(m->groups[0]);
    fcdp_engine_destroy(m->engine);
    return 0;
}

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define UNDER_TSAN 1
#endif
#elif defined(__SANITIZE_THREAD__)
#define UNDER_TSAN 1
#endif

static void test_forked_child_touches_nothing(void **state) {
    (void)state;
#ifdef UNDER_TSAN
    print_message("jemalloc takes more locks before a fork than TSan's deadlock detector can count\n");
    skip();
#endif
    cluster *c = start(&one_group);
    step_all(c, 0, all_extents);
    unshard_all(c, 0, FCDP_PASS_FORWARD);
    pid_t child = fork();
    if (child == 0) _exit(child_calls(&c->members[0]));
    int ended;
    assert_int_equal(waitpid(child, &ended, 0), child);
    assert_int_equal(ended, 0);
    reshard_all(c, 0);
    unshard_all(c, 0, FCDP_PASS_BACKWARD);
    end(c);
}

/* ---- random programs ---- */

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
    static const size_t coalesce[] = {0, 64 << 10, 1 << 20, 64 << 20};
    cluster_config config = {.n_nodes = 2 + random_below(random, 2),
                             .node_size = 1 + random_below(random, 3)};
    config.n_groups = 2 + random_below(random, 4);
    config.restore = random_below(random, 2) ? FCDP_RESTORE_WHOLE : FCDP_RESTORE_SLICE;
    config.mapping = random_below(random, 2) ? FCDP_MAPPING_EXACT : FCDP_MAPPING_SLOTS;
    config.host_computes = random_below(random, 2);
    config.prefetch = (int)random_below(random, 4);
    config.coalesce_bytes = coalesce[random_below(random, 4)];
    config.agree = random_below(random, 8) ? FCDP_AGREE_FORWARD : FCDP_AGREE_UNSHARD;
    for (uint32_t g = 0; g < config.n_groups; g++) {
        config.groups[g].n_extents = 1 + random_below(random, 6);
        for (uint32_t i = 0; i < config.groups[g].n_extents; i++)
            config.groups[g].extents[i] = (fcdp_extent_spec){random_shard_bytes(random),
                                                             (uint8_t)random_below(random, 2)};
        config.groups[g].extents[0].shard_bytes += 100;
    }
    config.fingerprints = random_below(random, 2);
    bool alike = random_below(random, 2);
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
        assert_int_equal(stats.gather.calls + stats.restore.calls, c->members[r].port.n_launches);
    }
    assert_int_equal(sent, c->hub.inter_bytes_sent);
}

static void random_program(uint64_t seed, int round) {
    test_random own = {seed};
    cluster_config config = random_cluster(&own);
    size_t extra = random_below(&own, 3) * random_below(&own, 4);
    config.device_budget_bytes = (cluster_most_pages(&config) + extra) * PAGE_BYTES;
    print_message(
        "round %d, seed %#llx: %u x %u, %u groups, restore %s, mapping %s, %s computes, %s, prefetch %d, "
        "agree %s, %zu + %zu pages\n",
        round, (unsigned long long)seed, config.n_nodes, config.node_size, config.n_groups,
        config.restore ? "whole" : "slice", config.mapping == FCDP_MAPPING_EXACT ? "exact" : "slots",
        config.host_computes ? "host" : "device", config.fingerprints ? "fingerprints" : "signals alone",
        config.prefetch, config.agree ? "unshard" : "forward",
        config.device_budget_bytes / PAGE_BYTES - extra, extra);
    cluster *c = start(&config);
    program p = {.cluster = c,
                 .seed = seed,
                 .n_steps = 8,
                 .jitter = 64,
                 .stops = -1,
                 .raw_writes = config.host_computes};
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

/* A child that touches the region of blocks.0 that nobody has unsharded: its last words. */
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
    skip(); /* jemalloc takes more locks before a fork than TSan's deadlock detector can count */
#endif
    cluster_config config = one_group;
    config.mapping = FCDP_MAPPING_EXACT;
    /* what FCDP's handler goes on to: cmocka's would have the child run all tests behind this one */
    signal(SIGSEGV, SIG_DFL);
    cluster *c = start(&config);
    member *m = &c->members[0];
    const char *names[CLUSTER_MAX_EXTENTS] = {"up.weight", "up.bias", "down.weight", "down.bias"};
    uint32_t n = config.groups[0].n_extents;
    char said[4096];
    assert_int_equal(fcdp_group_watch(m->groups[0], names, n + 1), FCDP_ERR_INVALID);
    assert_ok(fcdp_group_watch(m->groups[0], names, n));
    assert_int_equal(fcdp_group_watch(m->groups[0], names, n), FCDP_ERR_INVALID);
    child_touches(m, said, sizeof said);
    if (!strstr(said, "is in the gathered parameter up.bias of blocks.0, ")) fail_msg("%s", said);
    end(c);
}

/* On two nodes of two. Three groups of 30, 20 and 10 pages, of which the first stays gathered. */
static void test_what_does_not_fit_is_refused_with_what_would(void **state) {
    (void)state;
    static const struct {
        size_t budget_pages;
        bool fits, ahead;
    } cases[] = {{49, false, false}, {50, true, false}, {60, true, true}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cluster_config config = one_group;
        config.node_size = 2;
        config.device_budget_bytes = cases[i].budget_pages * PAGE_BYTES;
        config.n_groups = 3;
        for (uint32_t g = 0; g < 3; g++)
            config.groups[g] = (group_spec){1,
                                            {{10 * (3 - g) * (size_t)PAGE_BYTES / 4, FCDP_SPAN_TRAINABLE}}};
        cluster *c = start(&config);
        const uint8_t stays[] = {1, 0, 0};
        bool ahead;
        fcdp_status status = fcdp_groups_fit(c->members[3].groups, stays, 3, &ahead);
        assert_int_equal(status, cases[i].fits ? FCDP_OK : FCDP_ERR_NO_DEVICE_MEM);
        assert_int_equal(ahead, cases[i].ahead);
        if (status && (!strstr(fcdp_error_text(), "FCDP_DEVICE_BUDGET=120M would do") ||
                       !strstr(fcdp_error_text(), "'blocks.0', takes 60 MiB")))
            fail_msg("%s", fcdp_error_text());
        end(c);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_a_fault_in_a_released_group_is_named),
        cmocka_unit_test(test_what_does_not_fit_is_refused_with_what_would),
        cmocka_unit_test(test_nothing_is_part_of_a_captured_graph),
        cmocka_unit_test(test_counts_and_states),
        cmocka_unit_test(test_a_group_begun_ahead),
        cmocka_unit_test(test_what_follows_is_begun_ahead),
        cmocka_unit_test(test_after_a_gather_that_failed_alone_nothing_crosses),
        cmocka_unit_test(test_a_step_is_behind_gathers_that_nobody_used),
        cmocka_unit_test(test_a_gather_is_of_what_was_voted_on),
        cmocka_unit_test(test_a_silent_write_is_seen_by_its_bytes),
        cmocka_unit_test(test_fingerprints_keep_what_grad_mode_would_not),
        cmocka_unit_test(test_equal_bytes_are_not_gathered_again),
        cmocka_unit_test(test_a_write_that_only_the_gather_saw),
        cmocka_unit_test(test_a_write_that_was_told_is_gathered_again),
        cmocka_unit_test(test_a_write_that_nobody_told_is_not_kept),
        cmocka_unit_test(test_a_store_that_fails_keeps_the_pages),
        cmocka_unit_test(test_forked_child_touches_nothing),
        cmocka_unit_test(test_every_mix_of_fates),
        cmocka_unit_test(test_random_programs),
    };
    cmocka_set_test_filter(getenv("TEST_FILTER"));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
