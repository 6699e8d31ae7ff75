/* One parameter as a whole: what each rank votes, that a vote leaves agreements alone, that the bytes are
 * those of now, and that nothing crosses the nodes for them. */
#include <stdlib.h>

#include "comm/shard.h"
#include "comm/trace_events.h"
#include "comm/whole.h"
#include "tests/comm/engine_world.h"
#include "tiering/tiering.h"

enum { N_EXTENTS = 4, LARGE = 0, SMALL = 1 };

static cluster_config config_of(fcdp_restore_mode restore, double tau) {
    cluster_config config = one_group;
    config.restore = restore;
    config.fingerprints = true;
    for (uint32_t r = 0; r < CLUSTER_MAX_RANKS; r++) config.tau[r] = tau;
    return config;
}

static fcdp_whole vote_of(member *m, uint32_t i, bool looks) {
    fcdp_signals signals = {.optimizer_steps = m->steps[0][i]};
    uint64_t shard = (uintptr_t)(m->shards + m->shard_at[0][i]), fingerprint;
    size_t bytes = m->cluster->config.groups[0].extents[i].shard_bytes;
    assert_ok(fcdp_comm_fingerprint_begin(m->comm, &shard, &bytes, 1, m->stream));
    assert_ok(fcdp_comm_fingerprint_end(m->comm, &fingerprint));
    fcdp_evidence evidence = {.signals = &signals, .fingerprints = looks ? &fingerprint : NULL};
    return fcdp_group_whole_vote(m->groups[0], i, &evidence);
}

static void assert_votes(cluster *c, uint32_t i, fcdp_whole expected) {
    EVERY_MEMBER(c, m) assert_int_equal(vote_of(m, i, true), expected);
}

/* Every rank, from host memory, alone. */
static void read_all(cluster *c, uint32_t i) {
    size_t bytes = cluster_extent_bytes(c, 0, i) - 3; /* the end may be padding */
    uint8_t *read = malloc(bytes);
    assert_non_null(read);
    EVERY_MEMBER(c, m) {
        memset(read, 0xEE, bytes);
        assert_ok(fcdp_group_whole_read(m->groups[0], i, (fcdp_dptr){(uintptr_t)read}, bytes, m->stream));
        assert_ok(fcdp__driver_stream_sync(m->engine->drv, m->stream));
        assert_memory_equal(read, cluster_truth(c, 0, i, m->version[0][i]), bytes);
    }
    free(read);
}

/* Every rank, with its group on the device; `gathers`: after an agreement. */
static void use_whole(cluster *c, uint32_t i) {
    EVERY_MEMBER(c, m) {
        fcdp_program program = member_program(m);
        assert_ok(fcdp_group_whole_begin(m->groups[0], i, &program, m->stream));
        assert_ok(member_use(m, 0));
    }
    drain_all(c);
    reshard_all(c, 0);
}

static void gather_all(cluster *c) {
    step_all(c, 0, all_extents);
    unshard_all(c, 0, FCDP_PASS_FORWARD);
    reshard_all(c, 0);
}

static void test_a_fresh_one_comes_from_the_node(void **state) {
    (void)state;
    for (int restore = FCDP_RESTORE_SLICE; restore <= FCDP_RESTORE_WHOLE; restore++) {
        cluster_config config = config_of((fcdp_restore_mode)restore, 0);
        cluster *c = start(&config);
        for (int again = 0; again < 3; again++) {
            gather_all(c);
            uint64_t crossed = sent(c), avoided = c->members[1].engine->counts.n[FCDP_COUNT_GATHERS_AVOIDED];
            for (uint32_t i = 0; i < N_EXTENTS; i++) {
                bool is_large = config.groups[0].extents[i].shard_bytes > 50000;
                bool from_host = restore == FCDP_RESTORE_WHOLE || !is_large;
                assert_votes(c, i, from_host ? FCDP_WHOLE_HOST : FCDP_WHOLE_FRESH);
                if (from_host) read_all(c, i);
                use_whole(c, i);
                assert_votes(c, i, from_host ? FCDP_WHOLE_HOST : FCDP_WHOLE_FRESH);
            }
            assert_int_equal(sent(c), crossed);
            assert_true(c->members[1].engine->counts.n[FCDP_COUNT_GATHERS_AVOIDED] >= avoided + N_EXTENTS);
        }
        end(c);
    }
}

/* The extent that was written crosses once; what is kept of it serves the next pass. */
static void test_a_stale_one_is_gathered_for_the_next_pass_too(void **state) {
    (void)state;
    static const uint8_t part[CLUSTER_MAX_EXTENTS] = {0, 1, 0, 0};
    for (int noticed = 0; noticed < 2; noticed++) {
        cluster_config config = config_of(FCDP_RESTORE_SLICE, 0);
        uint8_t agreed[CLUSTER_MAX_EXTENTS + FCDP_VOTE_MORE];
        cluster *c = start(&config);
        assert_votes(c, SMALL, FCDP_WHOLE_STALE); /* never gathered */
        gather_all(c);
        EVERY_MEMBER(c, m) assert_ok(member_step(m, 0, part, noticed));
        assert_votes(c, SMALL, FCDP_WHOLE_STALE);
        assert_votes(c, LARGE, FCDP_WHOLE_FRESH);
        agree_all(c, 0, agreed);
        uint64_t crossed = sent(c);
        use_whole(c, SMALL);
        assert_true(sent(c) > crossed);
        crossed = sent(c);
        assert_votes(c, SMALL, FCDP_WHOLE_HOST);
        read_all(c, SMALL);
        unshard_all(c, 0, FCDP_PASS_FORWARD);
        reshard_all(c, 0);
        assert_int_equal(sent(c), crossed);
        end(c);
    }
}

/* A write that one rank alone has seen, in the last byte. */
static void test_a_write_on_one_rank_is_stale_there(void **state) {
    (void)state;
    cluster_config config = config_of(FCDP_RESTORE_WHOLE, 0);
    cluster *c = start(&config);
    gather_all(c);
    c->members[3].shards[c->members[3].shard_at[0][2] + 70000] ^= 1;
    EVERY_MEMBER(c, m)
    assert_int_equal(vote_of(m, 2, true), m == &c->members[3] ? FCDP_WHOLE_STALE : FCDP_WHOLE_HOST);
    end(c);
}

/* The program of one rank has written into what it computed with, which the next agreement would find. The
 * copy is still on the device, or has gone from there to the host memory of the node. */
static void test_a_copy_that_was_written_into_is_stale(void **state) {
    (void)state;
    for (int restore = FCDP_RESTORE_SLICE; restore <= FCDP_RESTORE_WHOLE; restore++)
        for (int evicted = 0; evicted < 2; evicted++) {
            cluster_config config = config_of((fcdp_restore_mode)restore, 1);
            uint8_t agreed[CLUSTER_MAX_EXTENTS + FCDP_VOTE_MORE];
            cluster *c = start(&config);
            member *writer = &c->members[1];
            step_all(c, 0, all_extents);
            unshard_all(c, 0, FCDP_PASS_FORWARD);
            assert_ok(member_scribble(writer, 0));
            reshard_all(c, 0);
            if (evicted) { /* the writer last: what it stores is what stays */
                EVERY_MEMBER(c, m) if (m != writer) fcdp__tiering_reclaim(m->engine->tiering, 1);
                fcdp__tiering_reclaim(writer->engine->tiering, 1);
            }
            assert_int_equal(vote_of(writer, SMALL, true), FCDP_WHOLE_STALE);
            agree_all(c, 0, agreed);
            use_whole(c, SMALL);
            assert_votes(c, SMALL, FCDP_WHOLE_FRESH);
            end(c);
        }
}

/* What was agreed before, and what an audit finds, is the same after a vote. */
static void test_a_vote_leaves_an_agreement_alone(void **state) {
    (void)state;
    cluster_config config = config_of(FCDP_RESTORE_WHOLE, 0);
    uint8_t agreed[CLUSTER_MAX_EXTENTS + FCDP_VOTE_MORE];
    cluster *c = start(&config);
    gather_all(c);
    agree_all(c, 0, agreed);
    EVERY_MEMBER(c, m) {
        fcdp_signals signals[CLUSTER_MAX_EXTENTS] = {{0}};
        for (uint32_t i = 0; i < N_EXTENTS; i++) signals[i].optimizer_steps = m->steps[0][i];
        const void *none[CLUSTER_MAX_EXTENTS] = {NULL};
        fcdp_evidence evidence = {.signals = signals, .shards = none};
        assert_int_equal(fcdp_group_audit(m->groups[0], &evidence), N_EXTENTS);
        m->steps[0][SMALL]++;
        signals[SMALL].optimizer_steps++;
        assert_int_equal(fcdp_group_audit(m->groups[0], &evidence), SMALL);
        assert_int_equal(vote_of(m, SMALL, true), FCDP_WHOLE_HOST); /* its bytes are what they were */
        assert_int_equal(fcdp_group_audit(m->groups[0], &evidence), SMALL);
    }
    end(c);
}

/* A use of the group would gather what is agreed stale, though this extent is fresh. */
static void test_what_is_agreed_stale_is_asked_for_anew(void **state) {
    (void)state;
    static const uint8_t part[CLUSTER_MAX_EXTENTS] = {1, 0, 0, 0};
    cluster_config config = config_of(FCDP_RESTORE_WHOLE, 0);
    uint8_t agreed[CLUSTER_MAX_EXTENTS + FCDP_VOTE_MORE];
    cluster *c = start(&config);
    gather_all(c);
    step_all(c, 0, part);
    agree_all(c, 0, agreed);
    assert_votes(c, SMALL, FCDP_WHOLE_STALE);
    agree_all(c, 0, agreed);
    use_whole(c, SMALL);
    assert_votes(c, LARGE, FCDP_WHOLE_HOST);
    read_all(c, LARGE);
    end(c);
}

static void test_nobody_answers_for_a_group_in_use(void **state) {
    (void)state;
    cluster_config config = config_of(FCDP_RESTORE_SLICE, 0);
    uint8_t agreed[CLUSTER_MAX_EXTENTS + FCDP_VOTE_MORE];
    cluster *c = start(&config);
    gather_all(c);
    EVERY_MEMBER(c, m) assert_int_equal(vote_of(m, SMALL, false), FCDP_WHOLE_PLAIN); /* no observation yet */
    agree_all(c, 0, agreed);
    begin_all(c, 0, FCDP_PASS_FORWARD);
    assert_votes(c, SMALL, FCDP_WHOLE_PLAIN); /* begun ahead of its use */
    EVERY_MEMBER(c, m)
    assert_int_equal(fcdp_group_whole_read(m->groups[0], SMALL, (fcdp_dptr){64}, 1, m->stream),
                     FCDP_ERR_INVALID);
    use_all(c, 0);
    assert_votes(c, SMALL, FCDP_WHOLE_PLAIN);
    reshard_all(c, 0);
    assert_votes(c, SMALL, FCDP_WHOLE_HOST);
    end(c);
}

/* Some ranks have it on the device, others have had to give it up: they go the way that all of them can. */
static void test_kept_on_some_ranks_and_evicted_on_others(void **state) {
    (void)state;
    for (int restore = FCDP_RESTORE_SLICE; restore <= FCDP_RESTORE_WHOLE; restore++) {
        cluster_config config = config_of((fcdp_restore_mode)restore, 1);
        cluster *c = start(&config);
        gather_all(c);
        assert_votes(c, SMALL, FCDP_WHOLE_FRESH);
        assert_true(fcdp__tiering_reclaim(c->members[2].engine->tiering, 1) > 0);
        EVERY_MEMBER(c, m)
        assert_int_equal(vote_of(m, SMALL, true), m == &c->members[2] ? FCDP_WHOLE_HOST : FCDP_WHOLE_FRESH);
        uint64_t crossed = sent(c);
        use_whole(c, SMALL);
        use_whole(c, LARGE);
        assert_int_equal(sent(c), crossed);
        end(c);
    }
}

/* Of rank m: a shard of what was gathered last, whatever the parameter is now. */
static void assert_gathered_shard(member *m, uint32_t i, uint32_t version) {
    size_t bytes = m->cluster->config.groups[0].extents[i].shard_bytes;
    uint8_t *read = malloc(bytes);
    bool has;
    assert_non_null(read);
    assert_ok(fcdp_group_gathered_shard(m->groups[0], i, read, bytes, &has));
    assert_true(has);
    assert_memory_equal(
        read, cluster_truth(m->cluster, 0, i, version) + (size_t)(m - m->cluster->members) * bytes, bytes);
    assert_int_equal(fcdp_group_gathered_shard(m->groups[0], i, read, bytes + 1, &has), FCDP_ERR_INVALID);
    free(read);
}

static void test_a_shard_is_what_was_last_gathered(void **state) {
    (void)state;
    for (int way = 0; way < 4; way++) {
        cluster_config config = config_of(way & 1 ? FCDP_RESTORE_SLICE : FCDP_RESTORE_WHOLE, way >> 1);
        uint8_t agreed[CLUSTER_MAX_EXTENTS + FCDP_VOTE_MORE], byte;
        cluster *c = start(&config);
        bool has = true;
        assert_ok(fcdp_group_gathered_shard(c->members[1].groups[0], SMALL, &byte, 1, &has));
        assert_false(has); /* never gathered */
        for (int again = 0; again < 3; again++) {
            gather_all(c);
            drain_all(c);
            for (uint32_t i = 0; i < N_EXTENTS; i++)
                EVERY_MEMBER(c, m) assert_gathered_shard(m, i, m->version[0][i]);
            if (again == 1)
                assert_true(!(way >> 1) || fcdp__tiering_reclaim(c->members[2].engine->tiering, 1) > 0);
            step_all(c, 0, all_extents);
            for (uint32_t i = 0; i < N_EXTENTS; i++)
                EVERY_MEMBER(c, m) assert_gathered_shard(m, i, m->version[0][i] - 1);
        }
        agree_all(c, 0, agreed);
        begin_all(c, 0, FCDP_PASS_FORWARD);
        assert_int_equal(fcdp_group_gathered_shard(c->members[1].groups[0], SMALL, &byte, 1, &has),
                         FCDP_ERR_INVALID);
        use_all(c, 0);
        EVERY_MEMBER(c, m) assert_gathered_shard(m, LARGE, m->version[0][LARGE]); /* in use */
        reshard_all(c, 0);
        end(c);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_fresh_one_comes_from_the_node),
        cmocka_unit_test(test_a_stale_one_is_gathered_for_the_next_pass_too),
        cmocka_unit_test(test_a_write_on_one_rank_is_stale_there),
        cmocka_unit_test(test_a_copy_that_was_written_into_is_stale),
        cmocka_unit_test(test_a_vote_leaves_an_agreement_alone),
        cmocka_unit_test(test_what_is_agreed_stale_is_asked_for_anew),
        cmocka_unit_test(test_nobody_answers_for_a_group_in_use),
        cmocka_unit_test(test_kept_on_some_ranks_and_evicted_on_others),
        cmocka_unit_test(test_a_shard_is_what_was_last_gathered),
    };
    cmocka_set_test_filter(getenv("TEST_FILTER"));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
