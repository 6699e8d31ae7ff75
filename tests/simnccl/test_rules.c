/* The double's rules, each broken once; all ranks are the test's one thread, since no call blocks. */
#include "sim/gpu/simgpu.h"
#include "sim/nccl/simnccl.h"
#include "tests/simnccl/nccl.h"
#include "tests/simnet/support.h"

enum { N = 4, LANES = 3, BYTES = 4096 };

typedef struct world {
    net *net;
    ncclComm_t comms[N][LANES]; /* of each rank: inter, inter, node */
} world;

static nccl_config config_of(int blocking) {
    return (nccl_config){
        .size = sizeof(nccl_config), .magic = 0xcafebeef, .version = 21400, .blocking = blocking};
}

/* What ncclCommGetAsyncError comes to. */
static int settle(ncclComm_t comm) {
    int error = IN_PROGRESS;
    for (int i = 0; i < 100 && error == IN_PROGRESS; i++)
        assert_int_equal(ncclCommGetAsyncError(comm, &error), SUCCESS);
    return error;
}

static int join(world *w, uint32_t device, nccl_id id, int n, int rank, ncclComm_t *comm_out) {
    nccl_config config = config_of(0);
    simnccl_device_set(w->net->ranks[device].endpoint, w->net->drv);
    return ncclCommInitRankConfig(comm_out, n, id, rank, &config);
}

static uint32_t place_of(uint32_t rank, int lane) {
    return lane < 2 ? rank / 2 : rank % 2;
}

static uint8_t *memory_of(world *w, uint32_t rank, int lane) {
    return w->net->ranks[rank].bytes + lane * 64 * BYTES;
}

static int gather(world *w, uint32_t rank, int lane, size_t count, uint32_t from) {
    uint8_t *to = memory_of(w, rank, lane);
    ncclComm_t comm = w->comms[rank][lane];
    assert_int_equal(ncclGroupStart(), SUCCESS);
    int result = ncclAllGather(to + from * count, to, count, 0, comm, w->net->ranks[rank].streams[0]);
    int end = ncclGroupEnd();
    return result != SUCCESS ? result : end;
}

/* Members of the lane `lane` that are `first` and another, 2 x 2; connected. */
static void lane_make(world *w, uint32_t first, int lane) {
    nccl_id id;
    uint32_t other = lane < 2 ? first + 2 : first + 1;
    assert_int_equal(ncclGetUniqueId(&id), SUCCESS);
    assert_int_equal(join(w, first, id, 2, 0, &w->comms[first][lane]), IN_PROGRESS);
    assert_int_equal(join(w, other, id, 2, 1, &w->comms[other][lane]), IN_PROGRESS);
    assert_int_equal(settle(w->comms[first][lane]), SUCCESS);
    assert_int_equal(settle(w->comms[other][lane]), SUCCESS);
    assert_int_equal(gather(w, first, lane, 64, 0), IN_PROGRESS);
    assert_int_equal(settle(w->comms[first][lane]), IN_PROGRESS); /* the other has not begun */
    assert_int_equal(gather(w, other, lane, 64, 1), IN_PROGRESS);
    assert_int_equal(settle(w->comms[first][lane]), SUCCESS);
    assert_int_equal(settle(w->comms[other][lane]), SUCCESS);
}

static world *world_make(void) {
    world *w = calloc(1, sizeof *w);
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 1);
    simnccl_reset(); /* after a test that failed */
    w->net = net_create((simnet_config){.nodes = 2, .ranks_per_node = 2, .staging_bytes = 64 << 10});
    for (int lane = 0; lane < LANES; lane++) {
        lane_make(w, 0, lane);
        lane_make(w, lane < 2 ? 1 : 2, lane);
    }
    sync_all(w->net);
    return w;
}

/* Aborts what lives; each in a child thread, since each waits for all of its device. */
static void *abort_one(void *comm) {
    assert_int_equal(ncclCommAbort(comm), SUCCESS);
    return NULL;
}

static void world_abort(world *w) {
    pthread_t threads[N][LANES];
    for (int r = 0; r < N; r++)
        for (int lane = 0; lane < LANES; lane++)
            if (w->comms[r][lane])
                assert_int_equal(pthread_create(&threads[r][lane], NULL, abort_one, w->comms[r][lane]), 0);
    for (int r = 0; r < N; r++)
        for (int lane = 0; lane < LANES; lane++)
            if (w->comms[r][lane]) pthread_join(threads[r][lane], NULL);
    memset(w->comms, 0, sizeof w->comms);
}

static void world_free(world *w, unsigned long broken) {
    struct simnccl_state state;
    world_abort(w);
    simnccl_state(&state);
    if (state.broken != broken)
        fail_msg("%lu rules broken, expected %lu: %s", state.broken, broken, state.text);
    assert_int_equal(state.live, 0);
    sync_all(w->net);
    simnccl_reset();
    net_destroy(w->net);
    free(w);
}

static void assert_last(const char *part) {
    if (!strstr(ncclGetLastError(NULL), part))
        fail_msg("\"%s\" is not in \"%s\"", part, ncclGetLastError(NULL));
}

static int launch(world *w, uint32_t rank, int lane, size_t count) {
    assert_int_equal(gather(w, rank, lane, count, place_of(rank, lane)), IN_PROGRESS);
    return settle(w->comms[rank][lane]);
}

/* ---- what is right ---- */

static void bytes_come_to_their_places(void **state) {
    (void)state;
    world *w = world_make();
    for (int lane = 0; lane < LANES; lane++) {
        for (uint32_t r = 0; r < N; r++)
            memset(memory_of(w, r, lane) + place_of(r, lane) * BYTES, (int)(1 + r + 10 * (uint32_t)lane),
                   BYTES);
        for (uint32_t r = 0; r < N; r++) assert_int_equal(launch(w, r, lane, BYTES), SUCCESS);
    }
    sync_all(w->net);
    for (int lane = 0; lane < LANES; lane++)
        for (uint32_t r = 0; r < N; r++)
            for (uint32_t m = 0; m < 2; m++) {
                uint32_t from = lane < 2 ? 2 * m + r % 2 : r / 2 * 2 + m;
                assert_int_equal(memory_of(w, r, lane)[m * BYTES + 17], 1 + from + 10 * (uint32_t)lane);
            }
    world_free(w, 0);
}

/* The operation is on its stream only after that. */
static void what_was_begun_is_in_progress_until_it_is_polled(void **state) {
    (void)state;
    struct simnccl_state before, after;
    int error;
    world *w = world_make();
    simnccl_state(&before);
    assert_int_equal(gather(w, 0, 2, BYTES, 0), IN_PROGRESS);
    assert_int_equal(ncclCommGetAsyncError(w->comms[0][2], &error), SUCCESS);
    assert_int_equal(error, IN_PROGRESS);
    simnccl_state(&after);
    assert_int_equal(after.launches, before.launches);
    assert_int_equal(gather(w, 0, 2, BYTES, 0), INVALID_USAGE);
    assert_last("in progress");
    assert_int_equal(settle(w->comms[0][2]), SUCCESS);
    world_free(w, 1);
}

/* A communicator connects its members for each algorithm when it first takes it: its host waits for them. */
static void each_way_is_connected_once(void **state) {
    (void)state;
    struct simnccl_state before, after;
    world *w = world_make();
    simnccl_state(&before);
    for (int i = 0; i < 2; i++) { /* the small way is there already */
        assert_int_equal(gather(w, 0, 0, SIMNCCL_LARGE_BYTES / 2, 0), IN_PROGRESS);
        assert_int_equal(settle(w->comms[0][0]), i ? SUCCESS : IN_PROGRESS);
        assert_int_equal(gather(w, 2, 0, SIMNCCL_LARGE_BYTES / 2, 1), IN_PROGRESS);
        assert_int_equal(settle(w->comms[0][0]), SUCCESS);
        assert_int_equal(settle(w->comms[2][0]), SUCCESS);
    }
    assert_int_equal(launch(w, 0, 0, 64), SUCCESS);
    assert_int_equal(launch(w, 2, 0, 64), SUCCESS);
    simnccl_state(&after);
    assert_int_equal(after.connections - before.connections, 2); /* of both members */
    world_free(w, 0);
}

static void a_connection_takes_device_memory(void **state) {
    (void)state;
    enum { PAGE = 2 << 20 };
    struct simgpu_live before, after;
    world *w = world_make();
    simnccl_set_connection_bytes(PAGE);
    simgpu_live(&before);
    for (int round = 0; round < 2; round++) {
        for (uint32_t r = 0; r < N; r += 2)
            assert_int_equal(gather(w, r, 0, SIMNCCL_LARGE_BYTES, place_of(r, 0)), IN_PROGRESS);
        for (uint32_t r = 0; r < N; r += 2) assert_int_equal(settle(w->comms[r][0]), SUCCESS);
    }
    simgpu_live(&after);
    assert_int_equal(after.device_bytes - before.device_bytes, 2 * PAGE); /* of two members, once */
    simgpu_set_capacity(after.device_bytes);                              /* others have taken the rest */
    for (uint32_t r = 0; r < 2; r++)
        assert_int_equal(gather(w, r, 2, SIMNCCL_LARGE_BYTES, place_of(r, 2)), IN_PROGRESS);
    for (uint32_t r = 0; r < 2; r++) assert_int_equal(settle(w->comms[r][2]), CUDA_ERROR);
    assert_last("out of memory");
    sync_all(w->net);
    world_abort(w);
    simgpu_live(&after);
    assert_int_equal(after.device_bytes, before.device_bytes);
    world_free(w, 0);
}

static void finalized_and_destroyed_in_that_order(void **state) {
    (void)state;
    world *w = world_make();
    ncclComm_t comm = w->comms[3][0];
    assert_int_equal(ncclCommDestroy(comm), INVALID_USAGE);
    assert_int_equal(ncclCommFinalize(comm), IN_PROGRESS);
    assert_int_equal(settle(comm), SUCCESS);
    assert_int_equal(ncclCommDestroy(comm), SUCCESS);
    assert_int_equal(ncclCommFinalize(comm), INVALID_ARGUMENT);
    assert_last("destroyed");
    w->comms[3][0] = NULL;
    world_free(w, 2);
}

/* ---- what is not ---- */

static void another_launch_order_is_refused(void **state) {
    (void)state;
    world *w = world_make();
    assert_int_equal(launch(w, 0, 0, BYTES), SUCCESS);
    assert_int_equal(launch(w, 0, 1, BYTES), SUCCESS);
    assert_int_equal(launch(w, 2, 1, BYTES), INVALID_USAGE);
    assert_last("launch order across communicators differs");
    assert_int_equal(settle(w->comms[0][1]), INVALID_USAGE); /* the other member learns of it */
    world_free(w, 1);
}

/* No two ranks share more than one communicator in it: seen from each alone, each pair agrees. */
static void a_circle_over_four_ranks_is_refused(void **state) {
    (void)state;
    /* 0 waits for 2 (inter), 2 for 3 (node), 3 for 1 (inter), 1 for 0 (node) */
    static const int first[N] = {0, 2, 2, 0};
    int results[N] = {0}, refused = 0;
    world *w = world_make();
    for (uint32_t r = 0; r < N; r++) results[r] = launch(w, r, first[r], BYTES);
    for (uint32_t r = 0; r < N; r++)
        if (results[r] == SUCCESS) results[r] = launch(w, r, 2 - first[r], BYTES);
    for (uint32_t r = 0; r < N; r++) refused += results[r] == INVALID_USAGE;
    assert_true(refused > 0);
    world_free(w, (unsigned long)refused);
}

static void a_second_communicator_without_their_order_is_refused(void **state) {
    (void)state;
    world *w = world_make();
    nccl_id id;
    ncclComm_t comm;
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "0", 1);
    assert_int_equal(ncclGetUniqueId(&id), SUCCESS);
    assert_int_equal(join(w, 0, id, 2, 0, &comm), INVALID_USAGE);
    assert_last("NCCL_LAUNCH_ORDER_IMPLICIT");
    world_free(w, 1);
}

static void *poll_one(void *comm) {
    int error;
    return (void *)(intptr_t)ncclCommGetAsyncError(comm, &error);
}

static void a_poll_in_another_threads_launch_is_refused(void **state) {
    (void)state;
    world *w = world_make();
    pthread_t thread;
    void *result;
    assert_int_equal(gather(w, 0, 2, BYTES, 0), IN_PROGRESS);
    assert_int_equal(pthread_create(&thread, NULL, poll_one, w->comms[0][2]), 0);
    pthread_join(thread, &result);
    assert_int_equal((intptr_t)result, INVALID_USAGE);
    assert_last("in progress in another thread");
    assert_int_equal(settle(w->comms[0][2]), SUCCESS);
    assert_int_equal(pthread_create(&thread, NULL, poll_one, w->comms[0][2]), 0);
    pthread_join(thread, &result);
    assert_int_equal((intptr_t)result, SUCCESS);
    world_free(w, 1);
}

static void other_counts_are_refused(void **state) {
    (void)state;
    world *w = world_make();
    assert_int_equal(launch(w, 0, 0, BYTES), SUCCESS);
    assert_int_equal(launch(w, 2, 0, BYTES - 512), INVALID_USAGE);
    assert_last("other counts");
    world_free(w, 1);
}

static void an_offset_that_is_not_the_ranks_is_refused(void **state) {
    (void)state;
    world *w = world_make();
    assert_int_equal(gather(w, 2, 0, BYTES, 0), INVALID_ARGUMENT);
    assert_last("in place; it must be + rank * count, 4096");
    world_free(w, 1);
}

static void two_ranks_on_one_device_are_refused(void **state) {
    (void)state;
    nccl_id id;
    ncclComm_t comms[2];
    world *w = world_make();
    assert_int_equal(ncclGetUniqueId(&id), SUCCESS);
    for (int r = 0; r < 2; r++) assert_int_equal(join(w, 0, id, 2, r, &comms[r]), IN_PROGRESS);
    for (int r = 0; r < 2; r++) assert_int_equal(settle(comms[r]), INVALID_USAGE);
    assert_last("Duplicate GPU detected : rank 0 and rank 1 both on device 0");
    for (int r = 0; r < 2; r++) assert_int_equal(ncclCommAbort(comms[r]), SUCCESS);
    world_free(w, 2);
}

static void members_that_disagree_are_refused(void **state) {
    (void)state;
    nccl_id id, none = {{0}};
    ncclComm_t comms[2], unused;
    nccl_config blocking = config_of(1), raw = {0};
    world *w = world_make();
    assert_int_equal(ncclGetUniqueId(&id), SUCCESS);
    assert_int_equal(join(w, 0, none, 2, 0, &unused), INVALID_ARGUMENT);
    assert_int_equal(join(w, 0, id, 2, 2, &unused), INVALID_ARGUMENT);
    assert_int_equal(ncclCommInitRankConfig(&unused, 2, id, 0, &blocking), INTERNAL_ERROR);
    assert_int_equal(ncclCommInitRankConfig(&unused, 2, id, 0, &raw), INVALID_ARGUMENT);
    assert_int_equal(join(w, 0, id, 2, 0, &comms[0]), IN_PROGRESS);
    assert_int_equal(join(w, 1, id, 2, 0, &unused), INVALID_USAGE); /* a rank twice */
    assert_int_equal(join(w, 3, id, 2, 1, &comms[1]), IN_PROGRESS); /* 0 and 3 share nothing */
    for (int r = 0; r < 2; r++) assert_int_equal(settle(comms[r]), INVALID_ARGUMENT);
    assert_last("no lane");
    for (int r = 0; r < 2; r++) assert_int_equal(ncclCommAbort(comms[r]), SUCCESS);
    world_free(w, 7);
}

/* As NCCL reads them: by the version that the configuration says it has. */
static void a_configuration_may_cap_the_ctas(void **state) {
    (void)state;
    enum { UNDEFINED = (int)0x80000000 };
    static const struct {
        unsigned version;
        int least, most, ctas;
    } cases[] = {{21400, 1, 4, 24},          {21700, UNDEFINED, 4, 4}, {21700, UNDEFINED, UNDEFINED, 24},
                 {21700, UNDEFINED, 30, 24}, {21700, 5, 4, 0},         {21700, UNDEFINED, 0, 0}};
    nccl_id id;
    ncclComm_t comm;
    world *w = world_make();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nccl_config config = config_of(0);
        config.version = cases[i].version;
        config.min_ctas = cases[i].least;
        config.max_ctas = cases[i].most;
        assert_int_equal(ncclGetUniqueId(&id), SUCCESS);
        simnccl_device_set(w->net->ranks[0].endpoint, w->net->drv);
        int result = ncclCommInitRankConfig(&comm, 2, id, 0, &config);
        assert_int_equal(result, cases[i].ctas ? IN_PROGRESS : INVALID_ARGUMENT);
        if (!cases[i].ctas) continue;
        assert_int_equal(simnccl_ctas(comm), cases[i].ctas);
        assert_int_equal(ncclCommAbort(comm), SUCCESS);
    }
    world_free(w, 2);
}

static void calls_after_an_abort_are_refused(void **state) {
    (void)state;
    world *w = world_make();
    int error;
    ncclComm_t comm = w->comms[1][1];
    assert_int_equal(ncclCommAbort(comm), SUCCESS);
    assert_int_equal(gather(w, 1, 1, BYTES, 0), INVALID_USAGE);
    assert_int_equal(ncclCommGetAsyncError(comm, &error), INVALID_ARGUMENT);
    assert_last("aborted");
    assert_int_equal(ncclCommAbort(comm), INVALID_ARGUMENT);
    w->comms[1][1] = NULL;
    world_free(w, 3);
}

static void groups_come_in_pairs(void **state) {
    (void)state;
    int error;
    world *w = world_make();
    assert_int_equal(ncclGroupEnd(), INVALID_USAGE);
    assert_last("not in a group");
    assert_int_equal(ncclGroupStart(), SUCCESS);
    assert_int_equal(ncclCommGetAsyncError(w->comms[0][0], &error), INVALID_USAGE);
    assert_last("a group is open");
    assert_int_equal(ncclGroupEnd(), SUCCESS);
    world_free(w, 2);
}

/* Strided, as sends and receives: `wrong` moves the second receive. */
static int exchange(world *w, uint32_t rank, size_t stride, size_t wrong) {
    uint8_t *at = memory_of(w, rank, 0);
    uint32_t me = place_of(rank, 0), peer = 1 - me;
    assert_int_equal(ncclGroupStart(), SUCCESS);
    for (size_t part = 0; part < 2; part++) {
        uint8_t *base = at + part * 8 * BYTES;
        assert_int_equal(ncclSend(base + me * stride, BYTES, 0, (int)peer, w->comms[rank][0],
                                  w->net->ranks[rank].streams[0]),
                         SUCCESS);
        assert_int_equal(ncclRecv(base + peer * stride + part * wrong, BYTES, 0, (int)peer, w->comms[rank][0],
                                  w->net->ranks[rank].streams[0]),
                         SUCCESS);
    }
    return ncclGroupEnd();
}

static void sends_and_receives_are_an_all_gather_or_refused(void **state) {
    (void)state;
    world *w = world_make();
    for (uint32_t r = 0; r < N; r += 2)
        for (size_t part = 0; part < 2; part++)
            memset(memory_of(w, r, 0) + part * 8 * BYTES + place_of(r, 0) * 3 * BYTES, (int)(7 + r + part),
                   BYTES);
    for (uint32_t r = 0; r < N; r += 2) assert_int_equal(exchange(w, r, 3 * BYTES, 0), IN_PROGRESS);
    for (uint32_t r = 0; r < N; r += 2) assert_int_equal(settle(w->comms[r][0]), SUCCESS);
    sync_all(w->net);
    for (uint32_t r = 0; r < N; r += 2)
        for (size_t part = 0; part < 2; part++)
            for (uint32_t m = 0; m < 2; m++)
                assert_int_equal(memory_of(w, r, 0)[part * 8 * BYTES + m * 3 * BYTES + BYTES - 1],
                                 7 + 2 * m + part);
    assert_int_equal(exchange(w, 0, BYTES / 2, 0), INTERNAL_ERROR); /* its members overlap */
    assert_int_equal(ncclGroupStart(), SUCCESS);
    assert_int_equal(ncclSend(memory_of(w, 0, 0), BYTES, 0, 1, w->comms[0][0], w->net->ranks[0].streams[0]),
                     SUCCESS);
    assert_int_equal(ncclGroupEnd(), INTERNAL_ERROR); /* nothing is received */
    world_free(w, 2);
}

/* ---- failures ---- */

/* A failed operation stays on its stream until its communicator is aborted, on the peer as well; and the
 * abort of one communicator waits for the operations of the device's others. */
static void a_failed_operation_ends_with_its_abort(void **state) {
    (void)state;
    world *w = world_make();
    fcdp_stream stream = w->net->ranks[0].streams[0];
    simnet_fail_nth(w->net->ranks[0].endpoint, 1, SIMNET_FAULT_FAIL);
    /* it may fail as soon as it is launched */
    int error[2] = {launch(w, 0, 0, BYTES), launch(w, 2, 0, BYTES)};
    while (error[0] == SUCCESS) assert_int_equal(ncclCommGetAsyncError(w->comms[0][0], &error[0]), SUCCESS);
    while (error[1] == SUCCESS) assert_int_equal(ncclCommGetAsyncError(w->comms[2][0], &error[1]), SUCCESS);
    assert_int_equal(error[0], SYSTEM_ERROR);
    assert_int_equal(error[1], REMOTE_ERROR);
    assert_int_equal(fcdp__driver_stream_query(w->net->drv, stream), FCDP_PENDING);
    world_abort(w);
    assert_ok(fcdp__driver_stream_sync(w->net->drv, stream));
    world_free(w, 0);
}

static void the_nth_call_fails(void **state) {
    (void)state;
    nccl_id id;
    world *w = world_make();
    assert_int_equal(simnccl_fail_nth("ncclNothing", 1, SYSTEM_ERROR), -1);
    assert_int_equal(simnccl_fail_nth("ncclGetUniqueId", 2, SYSTEM_ERROR), 0);
    assert_int_equal(ncclGetUniqueId(&id), SUCCESS);
    assert_false(simnccl_fault_is_spent());
    assert_int_equal(ncclGetUniqueId(&id), SYSTEM_ERROR);
    assert_true(simnccl_fault_is_spent());
    assert_int_equal(ncclGetUniqueId(&id), SUCCESS);
    assert_int_equal(simnccl_fail_nth("ncclAllGather", 1, SYSTEM_ERROR), 0); /* takes its group with it */
    assert_int_equal(gather(w, 0, 0, BYTES, 0), SYSTEM_ERROR);
    assert_int_equal(launch(w, 0, 0, BYTES), SUCCESS);
    world_free(w, 0);
}

/* Any two launches of different communicators, swapped on any rank. */
static void a_hundred_schedules_with_one_swap_are_refused(void **state) {
    (void)state;
    enum { SCHEDULES = 100, LENGTH = 12 };
    uint64_t random = seed_choose("a_hundred_schedules_with_one_swap_are_refused");
    for (int s = 0; s < SCHEDULES; s++) {
        world *w = world_make();
        int lanes[LENGTH];
        for (int i = 0; i < LENGTH; i++) lanes[i] = (int)random_below(&random, LANES);
        uint32_t victim = (uint32_t)random_below(&random, N);
        int at = (int)random_below(&random, LENGTH - 1);
        if (lanes[at] == lanes[at + 1]) lanes[at + 1] = (lanes[at] + 1) % LANES;
        int results[N] = {0};
        for (int i = 0; i < LENGTH; i++)
            for (uint32_t r = 0; r < N; r++) {
                int k = r != victim || (i != at && i != at + 1) ? i : 2 * at + 1 - i;
                if (results[r] != INVALID_USAGE) results[r] = launch(w, r, lanes[k], 64);
            }
        struct simnccl_state now;
        simnccl_state(&now);
        assert_true(now.broken > 0);
        assert_non_null(strstr(now.text, "launch order"));
        world_free(w, now.broken);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_come_to_their_places),
        cmocka_unit_test(what_was_begun_is_in_progress_until_it_is_polled),
        cmocka_unit_test(each_way_is_connected_once),
        cmocka_unit_test(a_connection_takes_device_memory),
        cmocka_unit_test(finalized_and_destroyed_in_that_order),
        cmocka_unit_test(another_launch_order_is_refused),
        cmocka_unit_test(a_circle_over_four_ranks_is_refused),
        cmocka_unit_test(a_second_communicator_without_their_order_is_refused),
        cmocka_unit_test(a_poll_in_another_threads_launch_is_refused),
        cmocka_unit_test(other_counts_are_refused),
        cmocka_unit_test(an_offset_that_is_not_the_ranks_is_refused),
        cmocka_unit_test(two_ranks_on_one_device_are_refused),
        cmocka_unit_test(members_that_disagree_are_refused),
        cmocka_unit_test(a_configuration_may_cap_the_ctas),
        cmocka_unit_test(calls_after_an_abort_are_refused),
        cmocka_unit_test(groups_come_in_pairs),
        cmocka_unit_test(sends_and_receives_are_an_all_gather_or_refused),
        cmocka_unit_test(a_failed_operation_ends_with_its_abort),
        cmocka_unit_test(the_nth_call_fails),
        cmocka_unit_test(a_hundred_schedules_with_one_swap_are_refused),
    };
    return cmocka_run_group_tests_name("simnccl rules", tests, NULL, NULL);
}
