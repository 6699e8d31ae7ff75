/* The engine gathers again what has changed, and nothing else: steps, writes that were told and writes
 * that were not, by signals and by fingerprints. */
#include <stdlib.h>

#include "comm/coalesce.h"
#include "comm/tree.h"
#include "tests/comm/engine_world.h"

/* ---- writes into the gathered bytes ---- */

static void test_a_write_that_was_told_is_gathered_again(void **state) {
    (void)state;
    for (int tau = 0; tau < 2; tau++) {
        cluster_config config = one_group;
        uint8_t agreed[CLUSTER_MAX_EXTENTS + FCDP_VOTE_MORE];
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
        /* all alike: else the host has what was gathered */
        fcdp_question question = tau ? FCDP_ASK_GROUP : FCDP_ASK_NOBODY;
        EVERY_MEMBER(c, m) assert_int_equal(fcdp_group_question(m->groups[0], false), question);
        agree_all(c, 0, agreed);
        for (uint32_t i = 0; i < 4; i++) assert_int_equal(agreed[i] != 0, tau);
        unshard_all(c, 0, FCDP_PASS_BACKWARD);
        end(c);
    }
}

typedef struct raw_write {
    uint32_t writer;
    bool in_one_pass; /* all uses are of one forward, so the tree is asked for once */
} raw_write;

static void raw_write_body(member *m, void *arg) {
    const raw_write *w = arg;
    MUST(!member_step(m, 0, all_extents, true));
    for (int use = 0; use < 4; use++) {
        bool forward = w->in_one_pass || use % 2 == 0;
        if (!forward)
            member_begin_backward(m);
        else if (use == 0 || !w->in_one_pass)
            member_begin_forward(m);
        MUST(!member_unshard(m, 0, forward ? UNSHARD_FORWARD : UNSHARD_BACKWARD));
        MUST(!member_use(m, 0));
        if (use == 1 && m->topology.rank == w->writer) MUST(!member_scribble(m, 0));
        MUST(!member_reshard(m, 0, false));
    }
    MUST(!fcdp__driver_stream_sync(m->engine->drv, m->stream));
    MUST(!m->wrong[0]);
}

/* Nothing but the bytes themselves tells of it, on one rank alone; where they are kept they are looked
 * at, by the host or by the device. */
static void test_a_write_that_nobody_told_is_not_kept(void **state) {
    (void)state;
    /* of every fifth way, from a random one on, each option comes both ways */
    const int stride = getenv("TEST_COARSER") ? 5 : 1;
    for (int way = (int)(fcdp__now_ns() / 1000 % (uint64_t)stride); way < 16; way += stride) {
        cluster_config config = one_group;
        raw_write w = {.writer = 4, .in_one_pass = way & 1};
        config.host_computes = way & 2;
        config.restore = way & 4 ? FCDP_RESTORE_WHOLE : FCDP_RESTORE_SLICE;
        for (uint32_t r = 0; r < CLUSTER_MAX_RANKS; r++) config.tau[r] = way & 8 ? 1 : 0;
        cluster *c = start(&config);
        cluster_run(c, raw_write_body, &w);
        fcdp_engine_stats stats;
        fcdp_engine_stats_get(c->members[0].engine, &stats);
        /* Else it comes back from host memory, as it was gathered: by slices it is not stored while it is
         * kept. A device does not tell whether it was stored before the write. */
        bool is_stored = config.host_computes && config.restore == FCDP_RESTORE_WHOLE;
        bool gathers = config.tau[0] > 0 && !is_stored;
        assert_int_equal(stats.gathers.made, gathers ? 2 : 1);
        end(c);
    }
}

static void write_on_one_rank_body(member *m, void *arg) {
    const raw_write *w = arg;
    MUST(!member_step(m, 0, all_extents, true));
    member_begin_forward(m);
    for (int use = 0; use < 3; use++) {
        bool writes = m->topology.rank == w->writer;
        MUST(!member_unshard(m, 0, UNSHARD_FORWARD));
        MUST(!member_use(m, 0));
        if (writes) MUST(!member_scribble(m, 0));
        MUST(!member_reshard(m, 0, writes));
    }
    MUST(!fcdp__driver_stream_sync(m->engine->drv, m->stream));
    MUST(!m->wrong[0]);
}

/* What the program of one rank did, and was told of, moves no other rank to ask: a weight that is clamped
 * where a value of that rank's batch is too large, in a module that is used three times in a pass. */
static void test_a_write_that_one_rank_is_told_of(void **state) {
    (void)state;
    for (int way = 0; way < 8; way++) {
        cluster_config config = one_group;
        raw_write w = {.writer = 4};
        config.host_computes = way & 1;
        config.restore = way & 2 ? FCDP_RESTORE_WHOLE : FCDP_RESTORE_SLICE;
        for (uint32_t r = 0; r < CLUSTER_MAX_RANKS; r++) config.tau[r] = way & 4 ? 1 : 0;
        cluster *c = start(&config);
        cluster_run(c, write_on_one_rank_body, &w);
        end(c);
    }
}

/* ---- what is agreed, and what is gathered ---- */

/* No use waits for what was begun ahead of a use that did not come: the step itself
 * must be behind the reads of the shards. */
static void test_a_step_is_behind_gathers_that_nobody_used(void **state) {
    (void)state;
    for (int together = 0; together < 2; together++)
        for (int host_computes = 0; host_computes < 2; host_computes++) {
            cluster_config config = one_group;
            uint8_t agreed[CLUSTER_MAX_EXTENTS + FCDP_VOTE_MORE];
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
            EVERY_MEMBER(c, m) {
                assert_non_null(m->groups[0]->reading); /* for another thread that writes */
                if (host_computes) assert_ok(fcdp__driver_event_query(m->engine->drv, m->groups[0]->reading));
            }
            drain_all(c);
            unshard_all(c, 0, FCDP_PASS_FORWARD);
            end(c);
        }
}

static void test_a_gather_is_of_what_was_voted_on(void **state) {
    (void)state;
    cluster *c = start(&one_group);
    member *m = &c->members[0];
    uint8_t agreed[CLUSTER_MAX_EXTENTS + FCDP_VOTE_MORE], vote[CLUSTER_MAX_EXTENTS + FCDP_VOTE_MORE];
    step_all(c, 0, all_extents);
    agree_all(c, 0, agreed);
    for (uint32_t i = 0; i < 4; i++) assert_int_equal(agreed[i], FCDP_STALE_NEW);
    assert_int_equal(agreed[4], 1);
    begin_all(c, 0, FCDP_PASS_FORWARD);
    assert_false(fcdp__group_is_stale(m->groups[0]));
    fcdp_group *ahead[1];
    /* else a vote would end the use that was not made */
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
    EVERY_MEMBER(c, each)
    for (uint32_t i = 0; i < 4; i++) assert_int_equal(each->groups[0]->stale[i] != 0, i == 1);
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
        uint8_t agreed[CLUSTER_MAX_EXTENTS + FCDP_VOTE_MORE];
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

/* A pass: the times that its agreement waited for the devices of all ranks; and whether it gathered. */
static void assert_pass(cluster *c, fcdp_pass pass, unsigned n_drains, bool gathers) {
    unsigned before = 0, after = 0;
    uint64_t crossed = sent(c);
    EVERY_MEMBER(c, m) before += m->n_drains;
    unshard_all(c, 0, pass);
    reshard_all(c, 0);
    EVERY_MEMBER(c, m) after += m->n_drains;
    assert_int_equal(after - before, n_drains * c->n_ranks);
    assert_int_equal(sent(c) > crossed, gathers);
}

/* After the first step that was seen to change every byte, the next one says so by itself. A step that
 * changes nothing costs a gather then, once. No write passes unseen by it. */
static void test_an_optimizers_step_needs_no_look_at_the_bytes(void **state) {
    (void)state;
    cluster_config config = one_group;
    config.fingerprints = true;
    cluster *c = start(&config);
    for (int step = 0; step < 4; step++) {
        step_all(c, 0, all_extents);
        assert_pass(c, FCDP_PASS_FORWARD, step < 2, true);
        assert_pass(c, FCDP_PASS_BACKWARD, 1, false);
    }
    for (int step = 0; step < 3; step++) {
        EVERY_MEMBER(c, m) for (uint32_t i = 0; i < 4; i++) m->steps[0][i]++;
        assert_pass(c, FCDP_PASS_FORWARD, step > 0, step == 0);
        assert_pass(c, FCDP_PASS_BACKWARD, 1, false);
    }
    EVERY_MEMBER(c, m) assert_ok(member_step(m, 0, all_extents, false)); /* no signal moves */
    assert_pass(c, FCDP_PASS_BACKWARD, 1, true);
    step_all(c, 0, all_extents);
    assert_pass(c, FCDP_PASS_FORWARD, 0, true); /* the copy before had been stepped, and was of other bytes */
    static const uint8_t part[CLUSTER_MAX_EXTENTS] = {0, 1, 1, 1};
    step_all(c, 0, part); /* not of every extent: the bytes of the first one tell */
    assert_pass(c, FCDP_PASS_FORWARD, 1, true);
    end(c);
}

/* Written between the agreement and the gather, then put back: the bytes are what was
 * agreed on, and the copy is not of them. */
static void test_a_write_that_only_the_gather_saw(void **state) {
    (void)state;
    cluster_config config = one_group;
    uint8_t agreed[CLUSTER_MAX_EXTENTS + FCDP_VOTE_MORE];
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

/* One rank's program has freed a shard that it does not use: no rank reads it, and what the ranks do with
 * the group, which was small enough to cross with others, they do alike. Filled with the same bytes it is
 * fresh, where they are looked at. */
static void test_a_missing_shard_is_asked_for_again(void **state) {
    (void)state;
    for (int looks = 0; looks < 2; looks++) {
        cluster_config config = one_group;
        uint8_t agreed[CLUSTER_MAX_EXTENTS + FCDP_VOTE_MORE];
        config.fingerprints = looks;
        config.coalesce_bytes = 1 << 20;
        cluster *c = start(&config);
        step_all(c, 0, all_extents);
        EVERY_MEMBER(c, m) fcdp_tree_agreed(m->tree);
        unshard_all(c, 0, FCDP_PASS_FORWARD);
        reshard_all(c, 0);
        uint64_t crossed = sent(c);
        c->members[4].missing[0][2] = true;
        for (int pass = 0; pass < 2; pass++) {
            agree_all(c, 0, agreed);
            for (uint32_t i = 0; i < 4; i++) assert_int_equal(agreed[i], i == 2 ? FCDP_STALE_MISSING : 0);
            EVERY_MEMBER(c, m) assert_int_equal(fcdp_group_question(m->groups[0], false), FCDP_ASK_GROUP);
            EVERY_MEMBER(c, m) assert_int_equal(fcdp_group_agree(m->groups[0], agreed), 2);
            EVERY_MEMBER(c, m) assert_false(fcdp_group_is_small(m->groups[0]));
        }
        c->members[4].missing[0][2] = false;
        unshard_all(c, 0, FCDP_PASS_FORWARD); /* which looks at every byte */
        EVERY_MEMBER(c, m) assert_int_equal(fcdp_group_question(m->groups[0], false), FCDP_ASK_NOBODY);
        assert_int_equal(sent(c) == crossed, looks);
        reshard_all(c, 0);
        end(c);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_step_is_behind_gathers_that_nobody_used),
        cmocka_unit_test(test_a_gather_is_of_what_was_voted_on),
        cmocka_unit_test(test_a_silent_write_is_seen_by_its_bytes),
        cmocka_unit_test(test_fingerprints_keep_what_grad_mode_would_not),
        cmocka_unit_test(test_equal_bytes_are_not_gathered_again),
        cmocka_unit_test(test_an_optimizers_step_needs_no_look_at_the_bytes),
        cmocka_unit_test(test_a_write_that_only_the_gather_saw),
        cmocka_unit_test(test_a_missing_shard_is_asked_for_again),
        cmocka_unit_test(test_a_write_that_was_told_is_gathered_again),
        cmocka_unit_test(test_a_write_that_nobody_told_is_not_kept),
        cmocka_unit_test(test_a_write_that_one_rank_is_told_of),
    };
    cmocka_set_test_filter(getenv("TEST_FILTER"));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
