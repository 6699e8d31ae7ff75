/* How long collectives take: which ranks share which link, and what runs at the same time. */
#include <semaphore.h>

#include "sim/gpu/simgpu.h"
#include "tests/simnet/support.h"

enum { BYTES = 100000, MS = 1000000 };

typedef void (*program)(net *net);

static void stamp_body(void *data) {
    **(uint64_t **)data = simgpu_ready_ns();
}

static void wait_body(void *data) {
    sem_wait(data);
}

static void stamp(fcdp_stream stream, uint64_t *to) {
    assert_int_equal(simgpu_launch(stream, &(struct simgpu_kernel){.duration_ns = 1,
                                                                   .body = stamp_body,
                                                                   .data = &to,
                                                                   .data_bytes = sizeof to}),
                     0);
}

/* All streams wait for one another, and for `may_go`; when they can go on, in modelled time. */
static void start_together(net *net, sem_t *may_go, uint64_t *begin_ns_out) {
    fcdp_stream first = net->ranks[0].streams[0];
    fcdp_event ready;
    struct simgpu_kernel held = {.body = wait_body, .data = may_go};
    assert_int_equal(simgpu_launch(first, &held), 0);
    stamp(first, begin_ns_out);
    assert_ok(fcdp__driver_event_create(net->drv, &ready));
    assert_ok(fcdp__driver_event_record(net->drv, ready, first));
    for (uint32_t i = 1; i < net->n * STREAMS; i++)
        assert_ok(fcdp__driver_stream_wait(net->drv, net->ranks[i / STREAMS].streams[i % STREAMS], ready));
    fcdp__driver_event_destroy(net->drv, ready);
}

/* In modelled time, which no other load on the machine changes, until the last stream has ended. */
static void assert_takes(net *net, program run, uint64_t expected_ms) {
    uint64_t begin_ns, end_ns[SIMNET_MAX_RANKS * STREAMS], last_ns = 0;
    sem_t may_go;
    sem_init(&may_go, 0, 0);
    start_together(net, &may_go, &begin_ns);
    run(net);
    for (uint32_t i = 0; i < net->n * STREAMS; i++)
        stamp(net->ranks[i / STREAMS].streams[i % STREAMS], &end_ns[i]);
    sem_post(&may_go);
    sync_all(net);
    for (uint32_t i = 0; i < net->n * STREAMS; i++)
        if (end_ns[i] > last_ns) last_ns = end_ns[i];
    print_message("%.6f ms, expected %.3f\n", (double)(last_ns - begin_ns) / MS, (double)expected_ms);
    assert_all_ok(net);
    assert_int_equal(last_ns - begin_ns, expected_ms * MS + 1); /* and the first stamp's */
    sem_destroy(&may_go);
}

static void gather(net *net, simnet_lane lane, uint32_t id, int stream, int times) {
    for (uint32_t r = 0; r < net->n; r++) {
        rank *rank = &net->ranks[r];
        fcdp_dptr at = fcdp__dptr_add(rank->memory,
                                      (size_t)stream * (2 << 20)); /* other bytes on each stream */
        for (int i = 0; i < times; i++)
            assert_ok(simnet_all_gather(comm_of(net, r, lane, id), at, BYTES / 2, rank->streams[stream]));
    }
}

static void inter_once(net *net) {
    gather(net, SIMNET_INTER, 0, 0, 1);
}

static void two_inter(net *net) {
    gather(net, SIMNET_INTER, 0, 0, 1);
    gather(net, SIMNET_INTER, 1, 1, 1);
}

static void inter_beside_intra(net *net) {
    gather(net, SIMNET_INTER, 0, 0, 1);
    gather(net, SIMNET_INTRA, 0, 1, 1);
}

static void intra_once(net *net) {
    gather(net, SIMNET_INTRA, 0, 0, 1);
}

static void world_once(net *net) {
    for (uint32_t r = 0; r < net->n; r++)
        assert_ok(simnet_reduce_scatter(comm_of(net, r, SIMNET_WORLD, 0), net->ranks[r].memory,
                                        fcdp__dptr_add(net->ranks[r].memory, 2 << 20), BYTES / 4,
                                        net->ranks[r].streams[0]));
}

static void many_small(net *net) {
    for (uint32_t r = 0; r < net->n; r++)
        for (int i = 0; i < 100; i++)
            assert_ok(simnet_all_gather(comm_of(net, r, SIMNET_INTER, 0), net->ranks[r].memory, 1000,
                                        net->ranks[r].streams[0]));
}

/* 2 x 2; the link takes 0.002 GB/s: 50 KB in 25 ms. */
static void the_node_s_link_is_shared_by_its_ranks_and_communicators(void **state) {
    (void)state;
    net *net = net_make(2, 2);
    simnet_set_rate(net->fabric, SIMNET_INTER, 0.002, 0);
    assert_takes(net, inter_once, 2 * 25);
    assert_takes(net, two_inter, 4 * 25);
    net_destroy(net);
}

static void one_rank_s_part_goes_to_all_other_nodes(void **state) {
    (void)state;
    net *net = net_make(3, 1);
    simnet_set_rate(net->fabric, SIMNET_INTER, 0.002, 0);
    assert_takes(net, inter_once, 2 * 25);
    net_destroy(net);
}

static void lanes_run_side_by_side(void **state) {
    (void)state;
    net *net = net_make(2, 2);
    simnet_set_rate(net->fabric, SIMNET_INTER, 0.002, 0);
    simnet_set_rate(net->fabric, SIMNET_INTRA, 0.002, 0);
    assert_takes(net, intra_once, 2 * 25); /* both ranks of a node receive 50 KB; the nodes do so at once */
    assert_takes(net, inter_beside_intra, 2 * 25);
    net_destroy(net);
}

/* 4 ranks: 3 parts of 25 KB over each node's link, and as much over the hop inside. */
static void a_ring_through_all_ranks_crosses_each_link_once(void **state) {
    (void)state;
    net *net = net_make(2, 2);
    simnet_set_rate(net->fabric, SIMNET_INTER, 0.0015, 0);
    simnet_set_rate(net->fabric, SIMNET_INTRA, 0.003, 0);
    assert_takes(net, world_once, 50);
    net_destroy(net);
}

static void latency_is_added_to_each_operation(void **state) {
    (void)state;
    net *net = net_make(2, 1);
    simnet_set_rate(net->fabric, SIMNET_INTER, 0.01, 400); /* 1000 bytes: 0.1 ms and 0.4 ms */
    assert_takes(net, many_small, 50);
    net_destroy(net);
}

/* ---- the order of modelled time ---- */

/* Of two gathers the one that is ready first comes last, since the thread of its stream is held up: as it is
 * on a busy machine. It takes the link before the other all the same. */
static void a_late_thread_does_not_lose_its_turn(void **state) {
    (void)state;
    net *net = net_make(2, 1);
    uint64_t begin_ns[2], end_ns[2];
    sem_t may_go;
    sem_init(&may_go, 0, 0);
    simnet_set_rate(net->fabric, SIMNET_INTER, 0.002, 0);
    struct simgpu_kernel held = {.duration_ns = 1, .body = wait_body, .data = &may_go},
                         busy = {.duration_ns = 600 * MS};
    for (uint32_t r = 0; r < 2; r++) {
        fcdp_stream *streams = net->ranks[r].streams;
        assert_int_equal(simgpu_launch(streams[0], &held), 0);
        stamp(streams[0], &begin_ns[r]);
        assert_int_equal(simgpu_launch(streams[1], &busy), 0);
    }
    gather(net, SIMNET_INTER, 0, 0, 1);
    gather(net, SIMNET_INTER, 1, 1, 1);
    for (uint32_t r = 0; r < 2; r++) stamp(net->ranks[r].streams[0], &end_ns[r]);
    for (uint32_t r = 0; r < 2; r++) assert_ok(fcdp__driver_stream_sync(net->drv, net->ranks[r].streams[1]));
    for (int i = 0; i < 2; i++) sem_post(&may_go);
    sync_all(net);
    uint64_t later_ns = begin_ns[0] > begin_ns[1] ? begin_ns[0] : begin_ns[1];
    /* and what it took to enqueue */
    for (uint32_t r = 0; r < 2; r++) assert_in_range(end_ns[r] - later_ns, 25 * MS, 600 * MS);
    sem_destroy(&may_go);
    net_destroy(net);
}

static void links_count_what_went_over_them(void **state) {
    (void)state;
    net *net = net_make(2, 2);
    simnet_link link;
    simnet_set_rate(net->fabric, SIMNET_INTER, 1, 0);
    inter_beside_intra(net);
    sync_all(net);
    world_once(net);
    sync_all(net);
    for (uint32_t node = 0; node < 2; node++) {
        simnet_link_get(net->fabric, node, SIMNET_INTER, &link);
        assert_int_equal(link.operations, 2 + 1);
        assert_int_equal(link.bytes, 2 * BYTES / 2 + 3 * BYTES / 4);
        assert_int_equal(link.busy_ns, link.bytes);
        simnet_link_get(net->fabric, node, SIMNET_INTRA, &link);
        assert_int_equal(link.operations, 1 + 1);
        assert_int_equal(link.bytes, 2 * BYTES / 2 + 3 * BYTES / 4);
        assert_int_equal(link.busy_ns, 0);
    }
    net_destroy(net);
}

/* A collective that starts late does not end early, and its stream goes on from its modelled end. */
static void what_is_before_counts(void **state) {
    (void)state;
    net *net = net_make(2, 1);
    simnet_set_rate(net->fabric, SIMNET_INTER, 0.002, 0);
    uint64_t begin = fcdp__now_ns();
    struct simgpu_kernel kernel = {.name = "compute", .duration_ns = 30 * MS};
    assert_int_equal(simgpu_launch(net->ranks[1].streams[0], &kernel), 0);
    inter_once(net);
    assert_int_equal(simgpu_launch(net->ranks[0].streams[0], &kernel), 0);
    assert_ok(fcdp__driver_stream_sync(net->drv, net->ranks[0].streams[0]));
    assert_true(fcdp__now_ns() - begin >= 30 * MS + 25 * MS + 30 * MS);
    net_destroy(net);
}

/* ---- exchanges of host memory ---- */

enum { EXCHANGED = 25000, N_EXCHANGES = 2 };

typedef struct exchange {
    simnet_comm *comm;
    uint32_t me;
    fcdp_status status;
    uint8_t bytes[2 * EXCHANGED];
} exchange;

static exchange exchanges[2];

static void exchange_run(void *context) {
    exchange *e = context;
    for (int i = 0; i < N_EXCHANGES && !e->status; i++) {
        memset(e->bytes, 0, sizeof e->bytes);
        memset(e->bytes + e->me * EXCHANGED, 1 + (int)e->me + i, EXCHANGED);
        e->status = simnet_exchange(e->comm, e->bytes, EXCHANGED);
    }
}

static void exchange_twice(net *net) {
    for (uint32_t r = 0; r < net->n; r++) {
        exchanges[r] = (exchange){.comm = comm_of(net, r, SIMNET_INTER, 1), .me = r};
        assert_ok(
            fcdp__driver_host_function(net->drv, net->ranks[r].streams[0], exchange_run, &exchanges[r]));
    }
}

/* 25 KB at 0.002 GB/s take 12.5 ms. A core's time counts next to nothing here, so the sum is exact. */
static void exchanges_in_a_host_function_come_one_after_another(void **state) {
    (void)state;
    net *net = net_make(2, 1);
    simgpu_set_core(1e-9);
    simnet_set_rate(net->fabric, SIMNET_INTER, 0.002, 0);
    assert_takes(net, exchange_twice, N_EXCHANGES * 25 / 2);
    for (uint32_t r = 0; r < 2; r++) {
        assert_ok(exchanges[r].status);
        for (size_t i = 0; i < 2 * EXCHANGED; i++)
            assert_int_equal(exchanges[r].bytes[i], i / EXCHANGED + N_EXCHANGES);
    }
    simnet_abort(net->ranks[1].endpoint);
    exchange_twice(net);
    sync_all(net);
    for (uint32_t r = 0; r < 2; r++) assert_true(exchanges[r].status != FCDP_OK);
    net_destroy(net);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_node_s_link_is_shared_by_its_ranks_and_communicators),
        cmocka_unit_test(one_rank_s_part_goes_to_all_other_nodes),
        cmocka_unit_test(lanes_run_side_by_side),
        cmocka_unit_test(a_ring_through_all_ranks_crosses_each_link_once),
        cmocka_unit_test(latency_is_added_to_each_operation),
        cmocka_unit_test(a_late_thread_does_not_lose_its_turn),
        cmocka_unit_test(links_count_what_went_over_them),
        cmocka_unit_test(what_is_before_counts),
        cmocka_unit_test(exchanges_in_a_host_function_come_one_after_another),
    };
    return cmocka_run_group_tests_name("simnet links", tests, NULL, NULL);
}
