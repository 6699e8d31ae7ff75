/* The engine against an oracle, every byte checked in every use: what it brings back, begins ahead, counts,
 * refuses, and what it does after a failure and a fork. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/coalesce.h"
#include "comm/staging.h"
#include "comm/tree.h"
#include "tests/comm/engine_world.h"
#include "tests/log_text.h"
#include "tests/under_tsan.h"
#include "tiering/tiering.h"

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
    for (int again = 0; again < 2; again++) { /* the evicted rank alone knows the whole the second time */
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

/* With TEST_COARSER, every fifth from a random one on: odd, as the mixes come in pairs. */
static void test_every_mix_of_fates(void **state) {
    const uint32_t stride = getenv("TEST_COARSER") ? 5 : 1;
    (void)state;
    for (int restore = FCDP_RESTORE_SLICE; restore <= FCDP_RESTORE_WHOLE; restore++) {
        cluster_config config = one_group;
        config.restore = (fcdp_restore_mode)restore;
        cluster *c = start(&config);
        /* fates change within a use, when it is too late to read a copy that was not to be kept */
        EVERY_MEMBER(c, m) m->engine->options.fingerprint = FCDP_FINGERPRINT_NEVER;
        for (uint32_t mix = (uint32_t)(fcdp__now_ns() / 1000 % stride); mix < N_FATES * N_FATES * N_FATES * 2;
             mix += stride) {
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

/* ---- copies of host memory ---- */

/* Of ranks that restore the whole, whatever becomes of their pages. Those that restore slices share one. */
static void test_a_copy_in_host_memory_for_each_numa_node(void **state) {
    (void)state;
    for (int restore = FCDP_RESTORE_SLICE; restore <= FCDP_RESTORE_WHOLE; restore++) {
        static const int fates[CLUSTER_MAX_RANKS] = {KEPT, EVICTED, RELEASED, EVICTED, RELEASED, KEPT};
        cluster_config config = one_group;
        uint32_t n_copies = restore == FCDP_RESTORE_WHOLE ? 2 : 1;
        config.restore = (fcdp_restore_mode)restore;
        config.host_copies = true;
        log_keep(FCDP_LOG_WARN);
        cluster *c = start(&config);
        const char *said = log_kept();
        if (restore == FCDP_RESTORE_SLICE) /* once in a process */
            assert_says(said,
                        "warning: FCDP_HOST_COPIES=numa changes nothing: each rank restores its slice, ");
        EVERY_MEMBER(c, m) {
            fcdp_engine_stats stats;
            fcdp_engine_stats_get(m->engine, &stats);
            assert_int_equal(stats.host_copies, n_copies);
            assert_int_equal(stats.host_bytes,
                             4096 + n_copies * fcdp__round_up(cluster_region_bytes(&config, 0), 4096));
            assert_int_equal(stats.numa.memory_node, m->topology.local % 2);
            m->engine->options.fingerprint = FCDP_FINGERPRINT_NEVER; /* see test_every_mix_of_fates */
        }
        for (int stored = 0; stored < 2; stored++) mix_run(c, fates, stored);
        end(c);
    }
}

/* ---- one by one ---- */

static uint64_t device_bytes(const member *m) {
    fcdp_engine_stats stats;
    fcdp_engine_stats_get(m->engine, &stats);
    return stats.device_bytes;
}

static void test_a_group_begun_ahead(void **state) {
    (void)state;
    cluster *c = start(&one_group);
    member *m = &c->members[4];
    uint8_t agreed[CLUSTER_MAX_EXTENTS + FCDP_VOTE_MORE];
    step_all(c, 0, all_extents);
    assert_int_equal(device_bytes(m), 0);
    agree_all(c, 0, agreed);
    begin_all(c, 0, FCDP_PASS_FORWARD);
    assert_true(fcdp_group_has_begun(m->groups[0]));
    assert_int_equal(device_bytes(m), PAGE_BYTES);
    drain_all(c); /* no thread waits for it yet */
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
    agree_all(c, 0, agreed);     /* ends the use that was not made */
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
    uint8_t agreed[CLUSTER_MAX_EXTENTS + FCDP_VOTE_MORE];
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

/* ---- a restore that is put off ---- */

enum { N_PUT_OFF = 3 };
static _Atomic unsigned n_refused[N_PUT_OFF];

/* On two ranks each restore is refused at its unshard, and not when it is waited for. */
static bool every_second_is_refused(const fcdp_group *group) {
    uint32_t rank = group->comm->topology.rank, g = (uint32_t)(group->name[strlen(group->name) - 1] - '0');
    bool refuses = (rank == 1 || rank == 4) && !group->late;
    n_refused[g] += refuses;
    return refuses;
}

static void put_off_body(member *m, void *arg) {
    (void)arg;
    bool is_refused = m->topology.rank == 1 || m->topology.rank == 4;
    for (uint32_t g = 0; g < N_PUT_OFF; g++) MUST(!member_step(m, g, all_extents, true));
    for (int pass = 0; pass < 4; pass++) {
        if (pass % 2)
            member_begin_backward(m);
        else
            member_begin_forward(m);
        for (uint32_t k = 0; k < N_PUT_OFF; k++) {
            uint32_t g = pass % 2 ? N_PUT_OFF - 1 - k : k;
            MUST(!member_unshard(m, g, pass % 2 ? UNSHARD_BACKWARD : UNSHARD_FORWARD));
            MUST(fcdp_group_has_begun(m->groups[g]) == (pass == 0 || !is_refused));
            MUST(!member_use(m, g));
            MUST(!m->wrong[0]);
            MUST(!member_reshard(m, g, false));
        }
    }
}

/* The others begin it, and each bit is what it is without. A use that was put off may end without a wait. */
static void test_a_restore_without_memory_is_put_off(void **state) {
    (void)state;
    cluster_config config = one_group;
    config.n_groups = N_PUT_OFF;
    config.restore = FCDP_RESTORE_WHOLE;
    for (uint32_t g = 1; g < N_PUT_OFF; g++) config.groups[g] = config.groups[0];
    cluster *c = start(&config);
    memset(n_refused, 0, sizeof n_refused);
    fcdp__restore_is_refused = every_second_is_refused;
    cluster_run(c, put_off_body, NULL);
    for (uint32_t g = 0; g < N_PUT_OFF; g++) assert_true(n_refused[g] >= 6);
    EVERY_MEMBER(c, one) { /* but for the first pass, which gathers */
        bool is_refused = one->topology.rank == 1 || one->topology.rank == 4;
        fcdp_engine_stats stats;
        fcdp_engine_stats_get(one->engine, &stats);
        assert_int_equal(stats.n_late, is_refused ? 3 * N_PUT_OFF : 0);
    }
    member *m = &c->members[4];
    fcdp_program program = member_program(m);
    const fcdp_unshard_args args = {.pass = FCDP_PASS_BACKWARD, .stream = m->stream};
    assert_ok(fcdp_unshard(m->groups[0], m->tree, &program, &args)); /* in the same pass: nobody is asked */
    assert_false(fcdp_group_has_begun(m->groups[0]));
    assert_ok(fcdp_cancel(m->groups[0], &program, m->stream));
    assert_ok(member_reshard(m, 0, false));
    assert_ok(fcdp_unshard(m->groups[0], m->tree, &program, &args));
    fcdp_give_up(m->groups[0], &program, m->stream);
    assert_false(m->groups[0]->member.live);
    fcdp__restore_is_refused = NULL;
    end(c);
}

static fcdp_status look_fails(void *ctx, fcdp_group *group, unsigned what, fcdp_sight *sight) {
    (void)ctx;
    (void)group;
    (void)sight;
    return fcdp__fail(FCDP_ERR_PROGRAM, "the look at %u", what);
}

/* What the program fails at comes out as it is, and nothing has begun. */
static void test_what_the_program_fails_at_is_its_own(void **state) {
    (void)state;
    cluster *c = start(&one_group);
    member *m = &c->members[2];
    fcdp_program program = member_program(m);
    const fcdp_unshard_args args = {FCDP_PASS_OTHER, true, m->stream, m->stream};
    program.look = look_fails;
    assert_int_equal(fcdp_unshard(m->groups[0], m->tree, &program, &args), FCDP_ERR_PROGRAM);
    assert_string_equal(fcdp_error_text(), "the look at 1");
    assert_false(fcdp_group_has_begun(m->groups[0]));
    end(c);
}

/* The ranks would agree without it, so no copy of it could be told fresh from stale. */
static void test_a_group_that_its_tree_does_not_list_is_refused(void **state) {
    (void)state;
    cluster *c = start(&one_group);
    member *m = &c->members[1];
    assert_ok(fcdp_tree_set_groups(m->tree, NULL, 0));
    assert_int_equal(member_unshard(m, 0, UNSHARD_FORWARD), FCDP_ERR_INVALID);
    assert_non_null(strstr(fcdp_error_text(), "not among the groups of its tree"));
    assert_false(fcdp_group_has_begun(m->groups[0]));
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
    uint8_t agreed[CLUSTER_MAX_EXTENTS + FCDP_VOTE_MORE];
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
    uint8_t agreed[CLUSTER_MAX_EXTENTS + FCDP_VOTE_MORE];
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
    assert_int_equal(of_group.plain_bytes, 3 * 5 * bytes);
    assert_int_equal(of_group.gather_bytes, 2 * 3 * bytes);
    assert_int_equal(of_group.trainable_bytes, group->layout->span[FCDP_SPAN_TRAINABLE].bytes);
    assert_in_range(of_group.trainable_bytes, 1, of_group.bytes - 1);
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
    uint8_t agreed[CLUSTER_MAX_EXTENTS + FCDP_VOTE_MORE] = {0};
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
    assert_ok(fcdp_comm_check(m->comm)); /* the caller's errors do not fail the group */
    memset(agreed, 0, sizeof agreed);
    fcdp_group_agree(m->groups[0], agreed);
    assert_int_equal(fcdp_group_begin(m->groups[0], NULL, FCDP_PASS_FORWARD, m->stream), FCDP_ERR_INVALID);
    /* nowhere, and the others would wait for it */
    assert_non_null(strstr(fcdp_error_text(), "restoring 'blocks.0'"));
    assert_int_equal(fcdp_comm_check(m->comm), FCDP_ERR_INVALID);
    assert_int_equal(c->hub.n_calls, 0);
    end(c);
}

static void *orders_writes(void *arg) {
    const member *m = arg;
    return (void *)(uintptr_t)fcdp_engine_order_writes(m->engine, m->stream);
}

static void *destroys_group(void *arg) {
    const member *m = arg;
    fcdp_group_destroy(m->groups[0]);
    return NULL;
}

static uint32_t n_waiters(const member *m, int more) {
    fcdp__lock_acquire(&m->engine->lock);
    uint32_t n = m->groups[0]->n_waiters += (uint32_t)more;
    fcdp__lock_release(&m->engine->lock);
    return n;
}

static bool is_listed(const member *m) {
    fcdp__lock_acquire(&m->engine->lock);
    bool is = m->comm->groups != NULL; /* its only group */
    fcdp__lock_release(&m->engine->lock);
    return is;
}

/* A model may be collected on one thread while an optimizer steps on another: the event for which that waits
 * is the group's. */
static void test_a_group_ends_behind_those_that_wait_for_its_gather(void **state) {
    (void)state;
    cluster_config config = one_group;
    config.host_computes = true;
    cluster *c = start(&config);
    member *m = &c->members[0];
    uint8_t agreed[CLUSTER_MAX_EXTENTS + FCDP_VOTE_MORE];
    pthread_t writer, ender;
    void *status;
    step_all(c, 0, all_extents);
    agree_all(c, 0, agreed);
    assert_ok(member_begin(m, 0, FCDP_PASS_FORWARD)); /* the others are missing */
    assert_int_equal(pthread_create(&writer, NULL, orders_writes, m), 0);
    while (!n_waiters(m, 0)) sched_yield();
    (void)n_waiters(m, 1); /* one more, that stays until it is seen that the group does */
    assert_int_equal(pthread_create(&ender, NULL, destroys_group, m), 0);
    EVERY_MEMBER(c, other) if (other != m) assert_ok(member_begin(other, 0, FCDP_PASS_FORWARD));
    assert_int_equal(pthread_join(writer, &status), 0);
    assert_int_equal((uintptr_t)status, FCDP_OK);
    while (is_listed(m)) sched_yield();
    for (int i = 0; i < 1000; i++) sched_yield();
    assert_int_equal(pthread_tryjoin_np(ender, NULL), EBUSY);
    (void)n_waiters(m, -1);
    assert_int_equal(pthread_join(ender, NULL), 0);
    m->groups[0] = NULL;
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

/* A child that touches the region of blocks.0, which is not unsharded: its last words. */
static void touch(void *m) {
    _exit(*(const volatile char *)(uintptr_t)fcdp_group_extent(((const member *)m)->groups[0], 1).addr);
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
    int ended;
    assert_int_equal(fcdp_group_watch(m->groups[0], names, n + 1), FCDP_ERR_INVALID);
    assert_ok(fcdp_group_watch(m->groups[0], names, n));
    assert_int_equal(fcdp_group_watch(m->groups[0], names, n), FCDP_ERR_INVALID);
    const char *said = child_says(touch, m, &ended);
    assert_true(ended != 0); /* by SIGSEGV, or by a sanitizer that was told of it */
    assert_says(said, "is in the gathered parameter up.bias of blocks.0, ");
    end(c);
}

/* On two nodes of two. Three groups of 30, 20 and 10 pages, of which the first stays gathered. With
 * TEST_COARSER every third case, from a random one on: most of the time is new pages. */
static void test_what_does_not_fit_is_refused_with_what_would(void **state) {
    (void)state;
    static const struct {
        size_t budget_pages, half_pages; /* half_pages: of the buffer that gathers go through */
        bool fits, ahead;
        const char *would_do;
    } cases[] = {{49, 0, false, false, "FCDP_DEVICE_BUDGET=126MB would do"},
                 {50, 0, true, false, NULL},
                 {60, 0, true, true, NULL},
                 {53, 2, false, false, "FCDP_DEVICE_BUDGET=135MB would do"},
                 {54, 2, true, false, NULL},
                 {64, 2, true, true, NULL}};
    const size_t stride = getenv("TEST_COARSER") ? 3 : 1;
    for (size_t i = fcdp__now_ns() / 1000 % stride; i < sizeof cases / sizeof *cases; i += stride) {
        cluster_config config = one_group;
        config.node_size = 2;
        config.device_budget_bytes = cases[i].budget_pages * PAGE_BYTES;
        config.packed_half_bytes = cases[i].half_pages * PAGE_BYTES;
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
        if (status && (!strstr(fcdp_error_text(), cases[i].would_do) ||
                       !strstr(fcdp_error_text(), "'blocks.0', takes 62.9 MB")))
            fail_msg("%s", fcdp_error_text());
        end(c);
    }
}

static void test_what_is_left_to_others_is_device_memory_of_a_gpu(void **state) {
    (void)state;
    simgpu_reset();
    for (int host_computes = 0; host_computes <= 1; host_computes++) {
        fcdp_engine_config config = {.driver = FCDP_DRIVER_SIM, .host_computes = host_computes};
        config.options.headroom_bytes = 1ul << 30;
        fcdp_engine *engine;
        fcdp_engine_stats stats;
        size_t free_bytes, total_bytes;
        assert_ok(fcdp_engine_create(&config, &engine));
        assert_ok(fcdp__driver_mem_info(fcdp_engine_driver(engine), &free_bytes, &total_bytes));
        fcdp_engine_stats_get(engine, &stats);
        assert_int_equal(stats.device_budget_bytes, host_computes ? free_bytes : free_bytes - (1ul << 30));
        fcdp_engine_destroy(engine);
    }
}

/* In slots a stale access passes unseen where nothing else refuses it. */
static void test_a_mapping_that_is_left_to_the_engine_shows_stale_accesses(void **state) {
    (void)state;
    static const struct {
        fcdp_mapping_mode asked;
        int check;
        bool storages_raise;
        fcdp_mapping_mode is;
    } cases[] = {
        {FCDP_MAPPING_AUTO, 0, true, FCDP_MAPPING_SLOTS},  {FCDP_MAPPING_AUTO, 0, false, FCDP_MAPPING_EXACT},
        {FCDP_MAPPING_AUTO, 2, true, FCDP_MAPPING_EXACT},  {FCDP_MAPPING_SLOTS, 2, false, FCDP_MAPPING_SLOTS},
        {FCDP_MAPPING_EXACT, 0, true, FCDP_MAPPING_EXACT},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fcdp_engine_config config = {.driver = FCDP_DRIVER_SIM,
                                     .options = {.mapping = cases[i].asked, .check = cases[i].check},
                                     .storages_raise = cases[i].storages_raise};
        fcdp_engine *engine;
        simgpu_reset();
        assert_ok(fcdp_engine_create(&config, &engine));
        assert_int_equal(engine->options.mapping, cases[i].is);
        fcdp_engine_destroy(engine);
    }
}

/* A second model's: the driver refuses one after another. */
static void test_streams_that_cannot_be_made(void **state) {
    (void)state;
    cluster *c = start(&one_group);
    member *m = &c->members[0];
    fcdp_status status = FCDP_ERR_DRIVER;
    unsigned n = 0;
    while (status) {
        fcdp_transport transport = m->comm->transport;
        fcdp_comm *second;
        transport.destroy = NULL;
        transport.on_failure = NULL;
        assert_ok(fcdp_comm_create(m->engine, &m->topology, &transport, &second));
        simgpu_fail_nth("cuStreamCreateWithPriority", ++n, 2);
        status = fcdp_comm_set_streams(second, NULL);
        simgpu_fail_nth(NULL, 0, 0);
        fcdp_comm_destroy(second);
    }
    assert_true(n > 2);
    end(c);
}

/* One that the device may still read stays, and goes later. */
static void test_a_staging_buffer_that_stays_is_said(void **state) {
    (void)state;
    cluster_config config = one_group;
    config.packed_half_bytes = 1 << 20;
    cluster *c = start(&config);
    step_all(c, 0, all_extents);
    unshard_all(c, 0, FCDP_PASS_FORWARD);
    reshard_all(c, 0);
    log_keep(FCDP_LOG_WARN);
    simgpu_fail_nth("cuEventSynchronize", 1, CUDA_UNKNOWN);
    fcdp__staging_trim(c->members[0].engine->sets);
    simgpu_fail_nth(NULL, 0, 0);
    assert_says(log_kept(), "warning: the staging buffer stays for now: cuEventSynchronize");
    end(c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_is_left_to_others_is_device_memory_of_a_gpu),
        cmocka_unit_test(test_a_mapping_that_is_left_to_the_engine_shows_stale_accesses),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_a_fault_in_a_released_group_is_named),
        cmocka_unit_test(test_what_does_not_fit_is_refused_with_what_would),
        cmocka_unit_test(test_nothing_is_part_of_a_captured_graph),
        cmocka_unit_test(test_a_group_ends_behind_those_that_wait_for_its_gather),
        cmocka_unit_test(test_counts_and_states),
        cmocka_unit_test(test_a_group_begun_ahead),
        cmocka_unit_test(test_what_follows_is_begun_ahead),
        cmocka_unit_test(test_a_restore_without_memory_is_put_off),
        cmocka_unit_test(test_what_the_program_fails_at_is_its_own),
        cmocka_unit_test(test_a_group_that_its_tree_does_not_list_is_refused),
        cmocka_unit_test(test_after_a_gather_that_failed_alone_nothing_crosses),
        cmocka_unit_test(test_a_store_that_fails_keeps_the_pages),
        cmocka_unit_test(test_forked_child_touches_nothing),
        cmocka_unit_test(test_every_mix_of_fates),
        cmocka_unit_test(test_streams_that_cannot_be_made),
        cmocka_unit_test(test_a_staging_buffer_that_stays_is_said),
        cmocka_unit_test(test_a_copy_in_host_memory_for_each_numa_node),
    };
    cmocka_set_test_filter(getenv("TEST_FILTER"));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
