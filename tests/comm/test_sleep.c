/* Between uses an engine gives its device pages to others, and goes on behind that with the node's copies:
 * nothing is gathered again, and every byte is right. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "comm/shard.h"
#include "tests/comm/engine_world.h"

static size_t device_bytes(const member *m) {
    fcdp_engine_stats stats;
    fcdp_engine_stats_get(m->engine, &stats);
    return stats.device_bytes;
}

/* Kept groups are stored first, by each rank alone. */
static void test_an_engine_sleeps_between_uses(void **state) {
    (void)state;
    for (int way = 0; way < 16; way++) {
        cluster_config config = one_group;
        uint8_t agreed[CLUSTER_MAX_EXTENTS + FCDP_VOTE_MORE];
        config.restore = way & 1 ? FCDP_RESTORE_WHOLE : FCDP_RESTORE_SLICE;
        config.mapping = way & 2 ? FCDP_MAPPING_EXACT : FCDP_MAPPING_SLOTS;
        config.packed_half_bytes = way & 8 ? 1 << 20 : 0;
        config.fingerprints = true;
        for (uint32_t r = 0; r < CLUSTER_MAX_RANKS; r++) config.tau[r] = way & 4 ? r % 3 > 0 : 0;
        cluster *c = start(&config);
        step_all(c, 0, all_extents);
        unshard_all(c, 0, FCDP_PASS_FORWARD);
        reshard_all(c, 0);
        uint64_t crossed = sent(c);
        EVERY_MEMBER(c, m) {
            assert_false(fcdp_engine_is_asleep(m->engine));
            assert_ok(fcdp_engine_sleep(m->engine, m->stream));
            assert_true(fcdp_engine_is_asleep(m->engine));
            assert_ok(fcdp_engine_sleep(m->engine, m->stream)); /* it is asleep */
            assert_int_equal(device_bytes(m), 0);
            assert_int_equal(member_unshard(m, 0, UNSHARD_BACKWARD), FCDP_ERR_INVALID);
            assert_non_null(strstr(fcdp_error_text(), "fcdp.wake()"));
            uint8_t shard[8];
            bool has;
            assert_int_equal(fcdp_group_gathered_shard(m->groups[0], 0, shard, sizeof shard, &has),
                             FCDP_ERR_INVALID);
            assert_non_null(strstr(fcdp_error_text(), "'blocks.0' is asleep: fcdp.wake() comes first"));
        }
        EVERY_MEMBER(c, m) fcdp_engine_wake(m->engine);
        agree_all(c, 0, agreed);
        for (uint32_t i = 0; i < 4; i++) assert_int_equal(agreed[i], 0);
        begin_all(c, 0, FCDP_PASS_BACKWARD);
        use_all(c, 0);
        reshard_all(c, 0);
        assert_int_equal(sent(c), crossed);
        end(c);
    }
}

static void test_a_group_in_use_keeps_the_engine_awake(void **state) {
    (void)state;
    cluster *c = start(&one_group);
    step_all(c, 0, all_extents);
    unshard_all(c, 0, FCDP_PASS_FORWARD);
    EVERY_MEMBER(c, m) {
        assert_int_equal(fcdp_engine_sleep(m->engine, m->stream), FCDP_ERR_INVALID);
        assert_non_null(strstr(fcdp_error_text(), "'blocks.0' is in use: call its reshard() first"));
        assert_false(fcdp_engine_is_asleep(m->engine));
    }
    reshard_all(c, 0);
    unshard_all(c, 0, FCDP_PASS_BACKWARD);
    reshard_all(c, 0);
    end(c);
}

/* The groups that were kept are on the device behind it, and the capture goes on. */
static void test_a_capture_is_found_before_a_group_is_evicted(void **state) {
    (void)state;
    cluster_config config = one_group;
    for (uint32_t r = 0; r < CLUSTER_MAX_RANKS; r++) config.tau[r] = 1;
    cluster *c = start(&config);
    step_all(c, 0, all_extents);
    unshard_all(c, 0, FCDP_PASS_FORWARD);
    reshard_all(c, 0);
    drain_all(c);
    EVERY_MEMBER(c, m) {
        size_t bytes = device_bytes(m);
        assert_true(bytes > 0);
        assert_int_equal(simgpu_capture(m->stream, 1), 0);
        assert_int_equal(fcdp_engine_sleep(m->engine, m->stream), FCDP_ERR_INVALID);
        assert_non_null(strstr(fcdp_error_text(), "while a CUDA graph is captured"));
        assert_false(fcdp_engine_is_asleep(m->engine));
        assert_int_equal(device_bytes(m), bytes);
        assert_int_equal(simgpu_capture(m->stream, 0), 0); /* it was not broken */
        assert_ok(fcdp_engine_sleep(m->engine, m->stream));
        fcdp_engine_wake(m->engine);
    }
    unshard_all(c, 0, FCDP_PASS_BACKWARD);
    reshard_all(c, 0);
    end(c);
}

static void first_use(member *m, void *arg) {
    (void)arg;
    MUST(!member_step(m, 0, all_extents, true));
    member_begin_forward(m);
    MUST(!member_unshard(m, 0, UNSHARD_FORWARD));
    MUST(!member_use(m, 0));
    MUST(!member_reshard(m, 0, false));
    member_begin_backward(m);
    MUST(!member_unshard(m, 0, UNSHARD_BACKWARD));
}

static void second_use(member *m, void *arg) {
    (void)arg;
    MUST(!member_use(m, 0));
    MUST(!member_reshard(m, 0, false));
}

/* Without a look ahead, a restore begins at its wait. */
static void test_a_wait_restores_nothing_asleep(void **state) {
    (void)state;
    cluster_config config = one_group;
    config.prefetch = 0;
    cluster *c = start(&config);
    cluster_run(c, first_use, NULL);
    EVERY_MEMBER(c, m) {
        assert_false(fcdp_group_has_begun(m->groups[0]));
        assert_ok(fcdp_engine_sleep(m->engine, m->stream));
        assert_int_equal(member_use(m, 0), FCDP_ERR_INVALID);
        assert_non_null(strstr(fcdp_error_text(), "fcdp.wake()"));
        assert_int_equal(device_bytes(m), 0);
        fcdp_engine_wake(m->engine);
    }
    cluster_run(c, second_use, NULL);
    drain_all(c);
    end(c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_an_engine_sleeps_between_uses),
        cmocka_unit_test(test_a_capture_is_found_before_a_group_is_evicted),
        cmocka_unit_test(test_a_wait_restores_nothing_asleep),
        cmocka_unit_test(test_a_group_in_use_keeps_the_engine_awake),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
