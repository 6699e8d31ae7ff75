/* Failures: a rank disagrees, does not come, fails, stalls or aborts; and every rank gets
 * away with a text that says so. */
#include "tests/simnet/support.h"

static fcdp_status gather(net *net, uint32_t rank, simnet_lane lane, uint32_t id, size_t bytes) {
    return simnet_all_gather(comm_of(net, rank, lane, id), net->ranks[rank].memory, bytes,
                             net->ranks[rank].streams[0]);
}

static net *net_with_timeout(double timeout_s) {
    return net_create((simnet_config){.nodes = 2, .ranks_per_node = 2, .timeout_s = timeout_s});
}

static void who_disagrees_is_named(void **state) {
    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        net *net = net_make(3, 1);
        fcdp_dptr at = net->ranks[1].memory;
        assert_ok(gather(net, 0, SIMNET_INTER, 0, 4096));
        assert_ok(kind ? simnet_reduce_scatter(comm_of(net, 1, SIMNET_INTER, 0), at, at, 4096,
                                               net->ranks[1].streams[0])
                       : gather(net, 1, SIMNET_INTER, 0, 8192));
        assert_ok(gather(net, 2, SIMNET_INTER, 0, 4096));
        sync_all(net);
        const char *theirs = kind ? "rank 1 is in operation 0, reduce-scatter of 4096 bytes"
                                  : "rank 1 is in operation 0, all-gather of 8192 bytes";
        assert_failed(net, 0, FCDP_ERR_PEER,
                      "rank 0: operation 0 of inter/0, an all-gather of 4096 bytes a rank");
        assert_failed(net, 0, FCDP_ERR_PEER, theirs);
        assert_failed(net, 1, FCDP_ERR_PEER, "rank 0 is in operation 0, all-gather of 4096 bytes");
        assert_failed(net, 2, FCDP_ERR_PEER, theirs);
        net_destroy(net);
    }
}

static void operations_in_another_order_are_a_disagreement(void **state) {
    (void)state;
    net *net = net_make(2, 1);
    assert_ok(gather(net, 0, SIMNET_INTER, 0, 64));
    assert_ok(gather(net, 0, SIMNET_INTER, 0, 128));
    assert_ok(gather(net, 1, SIMNET_INTER, 0, 128));
    fcdp_status second = gather(net, 1, SIMNET_INTER, 0,
                                64); /* refused, where the first has failed by then */
    assert_true(second == FCDP_OK || second == FCDP_ERR_PEER);
    sync_all(net);
    for (uint32_t r = 0; r < 2; r++) assert_failed(net, r, FCDP_ERR_PEER, "in the same order");
    net_destroy(net);
}

static void who_does_not_come_is_named(void **state) {
    (void)state;
    net *net = net_with_timeout(0.2);
    uint64_t begin = fcdp__now_ns();
    assert_ok(gather(net, 0, SIMNET_WORLD, 1, 64));
    assert_ok(gather(net, 2, SIMNET_WORLD, 1, 64));
    sync_all(net);
    assert_true(fcdp__now_ns() - begin >= 200000000);
    /* the later one may have been told by the earlier one */
    char text[512];
    fcdp_status statuses[2] = {simnet_status(net->ranks[0].endpoint, NULL, 0),
                               simnet_status(net->ranks[2].endpoint, NULL, 0)};
    for (int i = 0; i < 2; i++) assert_true(statuses[i] == FCDP_ERR_TIMEOUT || statuses[i] == FCDP_ERR_PEER);
    uint32_t late = statuses[0] == FCDP_ERR_TIMEOUT ? 0 : 2;
    assert_int_equal(simnet_status(net->ranks[late].endpoint, text, sizeof text), FCDP_ERR_TIMEOUT);
    assert_failed(
        net, late, FCDP_ERR_TIMEOUT,
        "operation 0 of world/1, an all-gather of 64 bytes a rank: ranks 1, 3 did not come within 0.2 s");
    net_destroy(net);
}

static void a_rank_that_leaves_is_missed(void **state) {
    (void)state;
    net *net = net_with_timeout(60);
    assert_ok(gather(net, 0, SIMNET_INTER, 0, 64));
    simnet_detach(net->ranks[2].endpoint);
    net->ranks[2].endpoint = NULL;
    sync_all(net);
    assert_failed(net, 0, FCDP_ERR_PEER, "rank 2 has left");
    net_destroy(net);
}

/* It had done its part: a rank that leaves then is not missed. */
static void a_rank_may_leave_when_its_part_is_done(void **state) {
    (void)state;
    for (int i = 0; i < 50; i++) {
        net *net = net_make(2, 1);
        for (uint32_t r = 0; r < 2; r++) assert_ok(gather(net, r, SIMNET_INTER, 0, 64));
        assert_ok(fcdp__driver_stream_sync(net->drv, net->ranks[1].streams[0]));
        assert_int_equal(simnet_status(net->ranks[1].endpoint, NULL, 0), FCDP_OK);
        simnet_detach(net->ranks[1].endpoint);
        net->ranks[1].endpoint = NULL;
        sync_all(net);
        assert_int_equal(simnet_status(net->ranks[0].endpoint, NULL, 0), FCDP_OK);
        net_destroy(net);
    }
}

/* ---- faults on demand ---- */

static void a_call_can_be_made_to_fail(void **state) {
    (void)state;
    net *net = net_make(2, 1);
    simnet_fail_nth(net->ranks[1].endpoint, 2, SIMNET_FAULT_CALL);
    for (uint32_t r = 0; r < 2; r++) assert_ok(gather(net, r, SIMNET_INTER, 0, 64));
    assert_int_equal(gather(net, 1, SIMNET_INTER, 0, 64), FCDP_ERR_TRANSPORT);
    assert_text("operation 1 of inter/0, an all-gather of 64 bytes a rank was made to fail");
    for (uint32_t r = 0; r < 2; r++)
        assert_ok(gather(net, r, SIMNET_INTER, 0, 64)); /* nothing was enqueued */
    sync_all(net);
    assert_all_ok(net);
    net_destroy(net);
}

static void a_driver_call_that_fails_enqueues_nothing(void **state) {
    (void)state;
    net *net = net_make(2, 1);
    assert_ok(gather(net, 0, SIMNET_INTER, 0, 64));
    assert_int_equal(simgpu_fail_nth("cuLaunchHostFunc", 1, CUDA_UNKNOWN), 0);
    assert_int_equal(gather(net, 1, SIMNET_INTER, 0, 64), FCDP_ERR_DRIVER);
    assert_int_equal(simnet_comm_operations(comm_of(net, 1, SIMNET_INTER, 0)), 0);
    assert_ok(gather(net, 1, SIMNET_INTER, 0, 64));
    sync_all(net);
    assert_all_ok(net);
    net_destroy(net);
}

/* The n-th operation of rank 1 fails, for every n: the operations before are done, the peers are told, no
 * rank hangs. */
static void an_operation_can_be_made_to_fail(void **state) {
    (void)state;
    enum { N = 6 };
    for (uint32_t n = 1; n <= N; n++) {
        net *net = net_make(2, 1);
        char part[128];
        simnet_fail_nth(net->ranks[1].endpoint, n, SIMNET_FAULT_FAIL);
        for (uint32_t i = 0; i < N; i++)
            for (uint32_t r = 0; r < 2; r++) {
                fcdp_status status = gather(net, r, SIMNET_INTER, i % 2, 64);
                assert_true(status == FCDP_OK || (i >= n - 1 && status != FCDP_PENDING));
            }
        sync_all(net);
        snprintf(part, sizeof part, "operation %u of inter/%u, an all-gather of 64 bytes a rank", (n - 1) / 2,
                 (n - 1) % 2);
        assert_failed(net, 1, FCDP_ERR_TRANSPORT, part);
        assert_failed(net, 1, FCDP_ERR_TRANSPORT, "was made to fail");
        assert_failed(net, 0, FCDP_ERR_PEER, "rank 1 has failed: rank 1: operation");
        assert_int_equal(gather(net, 0, SIMNET_INTER, 0, 64),
                         FCDP_ERR_PEER); /* and so does everything later */
        assert_text("was made to fail");
        net_destroy(net);
    }
}

static void a_stalled_operation_stalls_until_the_abort(void **state) {
    (void)state;
    net *net = net_with_timeout(0.2);
    rank *stalled = &net->ranks[2];
    simnet_fail_nth(stalled->endpoint, 1, SIMNET_FAULT_STALL);
    assert_ok(gather(net, 0, SIMNET_INTER, 0, 64));
    assert_ok(gather(net, 2, SIMNET_INTER, 0, 64));
    assert_ok(fcdp__driver_stream_sync(net->drv, net->ranks[0].streams[0]));
    assert_failed(net, 0, FCDP_ERR_TIMEOUT, "rank 2 did not come within 0.2 s");
    assert_int_equal(fcdp__driver_stream_query(net->drv, stalled->streams[0]), FCDP_PENDING);
    simnet_abort(stalled->endpoint);
    assert_ok(fcdp__driver_stream_sync(net->drv, stalled->streams[0]));
    assert_failed(net, 2, FCDP_ERR_TRANSPORT, "rank 2: aborted");
    net_destroy(net);
}

/* Without a timeout only an abort ends the wait; it opens all that streams wait in, and the peers hear
 * of it. */
static void an_abort_opens_everything(void **state) {
    (void)state;
    net *net = net_with_timeout(0);
    rank *first = &net->ranks[0];
    assert_ok(gather(net, 0, SIMNET_INTER, 0, 64));
    assert_ok(gather(net, 0, SIMNET_INTER, 0, 64));
    assert_ok(simnet_all_gather(comm_of(net, 0, SIMNET_INTRA, 3), fcdp__dptr_add(first->memory, 4096), 64,
                                first->streams[1]));
    assert_ok(gather(net, 2, SIMNET_WORLD, 0, 64));
    for (int s = 0; s < STREAMS; s++)
        assert_int_equal(fcdp__driver_stream_query(net->drv, first->streams[s]), FCDP_PENDING);
    simnet_abort(first->endpoint);
    sync_all(net);
    assert_failed(net, 0, FCDP_ERR_TRANSPORT, "rank 0: aborted");
    assert_failed(net, 2, FCDP_ERR_PEER, "rank 0 has failed: rank 0: aborted");
    assert_int_equal(simnet_status(net->ranks[1].endpoint, NULL, 0), FCDP_OK); /* it waits for no rank */
    net_destroy(net);
}

static void the_first_failure_stays(void **state) {
    (void)state;
    net *net = net_with_timeout(0.1);
    assert_ok(gather(net, 0, SIMNET_INTRA, 0, 64));
    sync_all(net);
    simnet_abort(net->ranks[0].endpoint);
    assert_failed(net, 0, FCDP_ERR_TIMEOUT, "rank 1 did not come");
    net_destroy(net);
}

/* Host functions never run once the device has failed: what was enqueued is given back with the endpoint. */
static void a_failed_device_leaks_no_operation(void **state) {
    (void)state;
    net *net = net_with_timeout(60);
    rank *first = &net->ranks[0];
    struct simgpu_kernel wrong = {.n_accesses = 1,
                                  .accesses = {{first->memory.addr + MEMORY_BYTES - 1, 2, 1}}};
    assert_int_equal(simgpu_launch(first->streams[0], &wrong), 0);
    fcdp_status status = gather(net, 0, SIMNET_INTER, 0, 64);
    assert_true(status == FCDP_OK || status == FCDP_ERR_DRIVER);
    assert_int_equal(fcdp__driver_sync(net->drv), FCDP_ERR_DRIVER);
    for (uint32_t r = 0; r < net->n; r++) simnet_detach(net->ranks[r].endpoint);
    simnet_close(net->fabric);
    simgpu_reset();
    fcdp__driver_close(net->drv);
    free(net);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(who_disagrees_is_named),
        cmocka_unit_test(operations_in_another_order_are_a_disagreement),
        cmocka_unit_test(who_does_not_come_is_named),
        cmocka_unit_test(a_rank_that_leaves_is_missed),
        cmocka_unit_test(a_rank_may_leave_when_its_part_is_done),
        cmocka_unit_test(a_call_can_be_made_to_fail),
        cmocka_unit_test(a_driver_call_that_fails_enqueues_nothing),
        cmocka_unit_test(an_operation_can_be_made_to_fail),
        cmocka_unit_test(a_stalled_operation_stalls_until_the_abort),
        cmocka_unit_test(an_abort_opens_everything),
        cmocka_unit_test(the_first_failure_stays),
        cmocka_unit_test(a_failed_device_leaks_no_operation),
    };
    return cmocka_run_group_tests_name("simnet faults", tests, NULL, NULL);
}
