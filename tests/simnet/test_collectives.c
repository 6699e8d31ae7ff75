/* Collectives: that the right bytes arrive, in stream order, whatever the lane, the size and the number of
 * communicators. */
#include <pthread.h>

#include "tests/simnet/support.h"

static const struct {
    uint32_t nodes, ranks_per_node;
} shapes[] = {{1, 1}, {2, 1}, {1, 3}, {2, 2}, {3, 2}};
enum { N_SHAPES = sizeof shapes / sizeof shapes[0] };

/* In every rank's memory from `offset` on: its own part holds its pattern, the others' do not. */
static void gather_prepare(net *net, simnet_lane lane, size_t offset, size_t bytes, uint32_t salt) {
    for (uint32_t r = 0; r < net->n; r++) {
        simnet_comm *comm = comm_of(net, r, lane, 0);
        uint8_t *own = net->ranks[r].bytes + offset + simnet_comm_index(comm) * bytes;
        for (size_t i = 0; i < bytes; i++) own[i] = pattern(r, salt, i);
    }
}

static uint32_t member_rank(const net *net, uint32_t rank, simnet_lane lane, uint32_t member) {
    uint32_t g = net->ranks_per_node;
    return lane == SIMNET_WORLD   ? member
           : lane == SIMNET_INTER ? member * g + rank % g
                                  : rank / g * g + member;
}

static void gather_check(net *net, simnet_lane lane, size_t offset, size_t bytes, uint32_t salt) {
    for (uint32_t r = 0; r < net->n; r++) {
        uint32_t n = simnet_comm_size(comm_of(net, r, lane, 0));
        const uint8_t *at = net->ranks[r].bytes + offset;
        for (uint32_t m = 0; m < n; m++)
            for (size_t i = 0; i < bytes; i++, at++)
                if (*at != pattern(member_rank(net, r, lane, m), salt, i))
                    fail_msg("rank %u, lane %d, member %u, byte %zu of %zu: %#x", r, lane, m, i, bytes, *at);
        if (*at != 0) fail_msg("rank %u: a byte behind the end", r);
    }
}

static void an_all_gather_brings_every_part(void **state) {
    (void)state;
    static const size_t sizes[] = {0,     1, 4099, 64 << 10, (64 << 10) + 1,
                                   300001}; /* 64 KiB are staged at once */
    for (int s = 0; s < N_SHAPES; s++) {
        net *net = net_make(shapes[s].nodes, shapes[s].ranks_per_node);
        for (simnet_lane lane = 0; lane < SIMNET_N_LANES; lane++)
            for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
                for (uint32_t r = 0; r < net->n; r++) memset(net->ranks[r].bytes, 0, MEMORY_BYTES);
                gather_prepare(net, lane, 40, sizes[k], (uint32_t)k);
                for (uint32_t r = 0; r < net->n; r++)
                    assert_ok(simnet_all_gather(comm_of(net, r, lane, 0),
                                                fcdp__dptr_add(net->ranks[r].memory, 40), sizes[k],
                                                net->ranks[r].streams[0]));
                sync_all(net);
                assert_all_ok(net);
                gather_check(net, lane, 40, sizes[k], (uint32_t)k);
            }
        net_destroy(net);
    }
}

/* ---- several parts at once ---- */

enum { N_PARTS = 12 }; /* with several members more ranges than a host function announces */

/* Part p is where `at` says, its members' bytes `stride` apart; the sum is staged in several rounds. */
typedef struct part_spec {
    size_t at, bytes, stride;
} part_spec;

static void parts_choose(uint64_t *random, uint32_t n, part_spec *specs) {
    size_t at = 8;
    for (int p = 0; p < N_PARTS; p++) {
        specs[p].bytes = random_below(random, 4) ? random_below(random, 20000) : 0;
        specs[p].stride = specs[p].bytes + random_below(random, 3) * 7;
        specs[p].at = at;
        at += n * specs[p].stride + random_below(random, 50);
    }
}

/* The whole memory of a rank as it must be: what lies between the parts is not touched. */
static void parts_expect(net *net, uint32_t rank, simnet_lane lane, const part_spec *specs, bool gathered,
                         uint8_t *out) {
    uint32_t n = simnet_comm_size(comm_of(net, rank, lane, 0));
    memset(out, 0, MEMORY_BYTES);
    for (uint32_t p = 0; p < N_PARTS; p++)
        for (uint32_t m = 0; m < n; m++) {
            uint32_t from = member_rank(net, rank, lane, m);
            for (size_t i = 0; i < specs[p].bytes && (gathered || from == rank); i++)
                out[specs[p].at + m * specs[p].stride + i] = pattern(from, p, i);
        }
}

static void parts_try(net *net, simnet_lane lane, const part_spec *specs, uint8_t *expected) {
    for (uint32_t r = 0; r < net->n; r++) {
        simnet_part parts[N_PARTS];
        parts_expect(net, r, lane, specs, false, net->ranks[r].bytes);
        for (int p = 0; p < N_PARTS; p++)
            parts[p] = (simnet_part){fcdp__dptr_add(net->ranks[r].memory, specs[p].at), specs[p].bytes,
                                     specs[p].stride};
        assert_ok(
            simnet_all_gather_parts(comm_of(net, r, lane, 0), parts, N_PARTS, net->ranks[r].streams[0]));
    }
    sync_all(net);
    assert_all_ok(net);
    for (uint32_t r = 0; r < net->n; r++) {
        parts_expect(net, r, lane, specs, true, expected);
        size_t i = 0;
        if (!memcmp(net->ranks[r].bytes, expected, MEMORY_BYTES)) continue;
        while (net->ranks[r].bytes[i] == expected[i]) i++;
        fail_msg("rank %u, lane %d, byte %zu", r, lane, i);
    }
}

static void an_all_gather_of_parts_brings_each_to_its_place(void **state) {
    (void)state;
    uint64_t random = seed_choose("an_all_gather_of_parts_brings_each_to_its_place");
    uint8_t *expected = malloc(MEMORY_BYTES);
    for (int s = 0; s < N_SHAPES; s++) {
        net *net = net_make(shapes[s].nodes, shapes[s].ranks_per_node);
        simgpu_set_races(1);
        for (simnet_lane lane = 0; lane < SIMNET_N_LANES; lane++) {
            part_spec specs[N_PARTS];
            parts_choose(&random, net->n, specs);
            parts_try(net, lane, specs, expected);
        }
        simgpu_set_races(0);
        net_destroy(net);
    }
    free(expected);
}

/* As many bytes in all, cut otherwise: no rank gets them in wrong places. */
static void other_parts_are_not_taken_for_the_same(void **state) {
    (void)state;
    net *net = net_make(2, 1);
    for (uint32_t r = 0; r < 2; r++) {
        fcdp_dptr at = net->ranks[r].memory;
        simnet_part parts[] = {{at, r ? 40 : 60, 100}, {fcdp__dptr_add(at, 200), r ? 60 : 40, 100}};
        assert_ok(
            simnet_all_gather_parts(comm_of(net, r, SIMNET_INTER, 0), parts, 2, net->ranks[r].streams[0]));
    }
    sync_all(net);
    for (uint32_t r = 0; r < 2; r++)
        assert_failed(net, r, FCDP_ERR_PEER, "all-gather of 100 bytes a rank, in other parts");
    simnet_part overlapping = {net->ranks[0].memory, 8, 7};
    assert_int_equal(
        simnet_all_gather_parts(comm_of(net, 0, SIMNET_INTRA, 0), &overlapping, 1, net->ranks[0].streams[0]),
        FCDP_ERR_INVALID);
    assert_text("8 bytes a rank, 7 apart");
    net_destroy(net);
}

/* ---- reduce-scatter ---- */

static float value_of(uint32_t rank, size_t i) {
    return (float)((int)((i * 7919 + rank * 104729) % 2001) - 1000) / 7.0f;
}

/* What member `m` gets in place `i` of its part: the members' values in their order, as floats are added. */
static float expected_sum(const net *net, uint32_t rank, simnet_lane lane, uint32_t n, size_t at) {
    float sum = value_of(member_rank(net, rank, lane, 0), at);
    for (uint32_t m = 1; m < n; m++) sum += value_of(member_rank(net, rank, lane, m), at);
    return sum;
}

static void reduce_scatter_try(net *net, simnet_lane lane, size_t count, bool in_place) {
    enum { TO = 2 << 20 };
    size_t part = count * sizeof(float);
    for (uint32_t r = 0; r < net->n; r++) {
        simnet_comm *comm = comm_of(net, r, lane, 0);
        float *values = (float *)(void *)net->ranks[r].bytes;
        for (size_t i = 0; i < count * simnet_comm_size(comm); i++) values[i] = value_of(r, i);
        fcdp_dptr to = fcdp__dptr_add(net->ranks[r].memory, in_place ? simnet_comm_index(comm) * part : TO);
        assert_ok(simnet_reduce_scatter(comm, net->ranks[r].memory, to, part, net->ranks[r].streams[0]));
    }
    sync_all(net);
    assert_all_ok(net);
    for (uint32_t r = 0; r < net->n; r++) {
        simnet_comm *comm = comm_of(net, r, lane, 0);
        uint32_t n = simnet_comm_size(comm), me = simnet_comm_index(comm);
        const float *sums = (const float *)(const void *)(net->ranks[r].bytes + (in_place ? me * part : TO));
        for (size_t i = 0; i < count; i++)
            if (sums[i] != expected_sum(net, r, lane, n, me * count + i)) /* bit for bit */
                fail_msg("rank %u, float %zu of %zu: %g", r, i, count, sums[i]);
    }
}

static void a_reduce_scatter_adds_in_order(void **state) {
    (void)state;
    static const size_t counts[] = {1, 1000, 50001}; /* floats a part; the last takes many rounds */
    for (int s = 0; s < N_SHAPES; s++) {
        net *net = net_make(shapes[s].nodes, shapes[s].ranks_per_node);
        for (simnet_lane lane = 0; lane < SIMNET_N_LANES; lane++)
            for (size_t k = 0; k < 6; k++) reduce_scatter_try(net, lane, counts[k % 3], k >= 3);
        net_destroy(net);
    }
}

static void a_reduce_scatter_is_of_floats(void **state) {
    (void)state;
    net *net = net_make(1, 1);
    fcdp_dptr at = net->ranks[0].memory;
    assert_int_equal(
        simnet_reduce_scatter(comm_of(net, 0, SIMNET_WORLD, 0), at, at, 6, net->ranks[0].streams[0]),
        FCDP_ERR_INVALID);
    assert_text("6 bytes");
    net_destroy(net);
}

/* ---- order ---- */

static void it_takes_what_is_before_it_on_the_stream_and_is_behind_nothing_else(void **state) {
    (void)state;
    enum { BYTES = 100000 };
    net *net = net_make(2, 1);
    uint8_t *staged = malloc(BYTES);
    for (uint32_t r = 0; r < 2; r++) {
        rank *rank = &net->ranks[r];
        fcdp_dptr behind = fcdp__dptr_add(rank->memory, 1 << 20);
        for (size_t i = 0; i < BYTES; i++) staged[i] = pattern(r, 3, i);
        assert_ok(fcdp__driver_copy_h2d(net->drv, fcdp__dptr_add(rank->memory, r * BYTES), staged, BYTES,
                                        rank->streams[0]));
        assert_ok(simnet_all_gather(comm_of(net, r, SIMNET_INTER, 0), rank->memory, BYTES, rank->streams[0]));
        assert_ok(fcdp__driver_copy_d2d(net->drv, behind, rank->memory, 2 * BYTES, rank->streams[0]));
        if (r == 0)
            assert_int_equal(fcdp__driver_stream_query(net->drv, rank->streams[0]),
                             FCDP_PENDING); /* for rank 1 */
    }
    sync_all(net);
    for (uint32_t r = 0; r < 2; r++)
        for (uint32_t m = 0; m < 2; m++)
            for (size_t i = 0; i < BYTES; i++)
                assert_int_equal(net->ranks[r].bytes[(1 << 20) + m * BYTES + i], pattern(m, 3, i));
    free(staged);
    net_destroy(net);
}

static void communicators_do_not_wait_for_each_other(void **state) {
    (void)state;
    net *net = net_make(2, 1);
    rank *ranks = net->ranks;
    assert_ok(simnet_all_gather(comm_of(net, 0, SIMNET_INTER, 0), ranks[0].memory, 64, ranks[0].streams[0]));
    for (uint32_t r = 0; r < 2; r++)
        assert_ok(simnet_all_gather(comm_of(net, r, SIMNET_INTER, 1), fcdp__dptr_add(ranks[r].memory, 4096),
                                    64, ranks[r].streams[1]));
    assert_ok(fcdp__driver_stream_sync(net->drv, ranks[0].streams[1]));
    assert_ok(fcdp__driver_stream_sync(net->drv, ranks[1].streams[1]));
    assert_int_equal(fcdp__driver_stream_query(net->drv, ranks[0].streams[0]), FCDP_PENDING);
    assert_ok(simnet_all_gather(comm_of(net, 1, SIMNET_INTER, 0), ranks[1].memory, 64, ranks[1].streams[0]));
    assert_int_equal(simnet_comm_operations(comm_of(net, 0, SIMNET_INTER, 0)), 1);
    assert_null(simnet_comm_get(ranks[0].endpoint, SIMNET_INTER, 4));
    net_destroy(net);
}

/* One rank has its operations on one stream, the other takes turns on two: the communicator's order is that
 * of the calls. */
static void a_communicator_s_operations_take_turns(void **state) {
    (void)state;
    enum { N = 40, BYTES = 5000 };
    net *net = net_make(2, 1);
    for (uint32_t i = 0; i < N; i++) {
        gather_prepare(net, SIMNET_INTER, i * 2 * BYTES, BYTES, i);
        for (uint32_t r = 0; r < 2; r++)
            assert_ok(simnet_all_gather(comm_of(net, r, SIMNET_INTER, 0),
                                        fcdp__dptr_add(net->ranks[r].memory, i * 2 * BYTES), BYTES,
                                        net->ranks[r].streams[r * i % 2]));
    }
    sync_all(net);
    assert_all_ok(net);
    for (uint32_t r = 0; r < 2; r++)
        for (uint32_t i = 0; i < N; i++)
            for (uint32_t m = 0; m < 2; m++)
                for (size_t k = 0; k < BYTES; k += 7)
                    assert_int_equal(net->ranks[r].bytes[(i * 2 + m) * BYTES + k], pattern(m, i, k));
    net_destroy(net);
}

/* ---- random programs ---- */

enum { N_PROGRAMS = 15, N_STEPS = 24, STEP_BYTES = 96 << 10 };

typedef struct step {
    simnet_lane lane;
    uint32_t id;
    bool reduces;
    size_t bytes;
} step;

typedef struct player {
    net *net;
    uint32_t rank;
    const step *steps;
    uint64_t seed;
    fcdp_status status;
    pthread_t thread;
} player;

static void *play(void *argument) {
    player *player = argument;
    rank *rank = &player->net->ranks[player->rank];
    for (uint32_t i = 0; i < N_STEPS && !player->status; i++) {
        const step *step = &player->steps[i];
        simnet_comm *comm = simnet_comm_get(rank->endpoint, step->lane, step->id);
        fcdp_dptr at = fcdp__dptr_add(rank->memory, (size_t)i * STEP_BYTES);
        fcdp_stream stream = rank->streams[random_below(&player->seed, STREAMS)];
        for (size_t spin = random_below(&player->seed, 30000); spin > 0; spin--) __asm__ volatile("");
        player->status = step->reduces ? simnet_reduce_scatter(comm, at, at, step->bytes, stream)
                                       : simnet_all_gather(comm, at, step->bytes, stream);
    }
    return NULL;
}

static void step_fill(net *net, const step *step, uint32_t i) {
    for (uint32_t r = 0; r < net->n; r++) {
        uint32_t n = simnet_comm_size(comm_of(net, r, step->lane, 0));
        uint32_t me = simnet_comm_index(comm_of(net, r, step->lane, 0));
        uint8_t *at = net->ranks[r].bytes + (size_t)i * STEP_BYTES;
        for (size_t k = 0; step->reduces && k < step->bytes / sizeof(float) * n; k++)
            ((float *)(void *)at)[k] = value_of(r, k + i);
        for (size_t k = 0; !step->reduces && k < step->bytes; k++)
            at[me * step->bytes + k] = pattern(r, i, k);
    }
}

static void step_check(net *net, const step *step, uint32_t i) {
    for (uint32_t r = 0; r < net->n; r++) {
        uint32_t n = simnet_comm_size(comm_of(net, r, step->lane, 0));
        uint32_t me = simnet_comm_index(comm_of(net, r, step->lane, 0));
        const uint8_t *at = net->ranks[r].bytes + (size_t)i * STEP_BYTES;
        size_t count = step->bytes / sizeof(float);
        for (size_t k = 0; step->reduces && k < count; k++)
            if (((const float *)(const void *)at)[k] !=
                expected_sum(net, r, step->lane, n, me * count + k + i))
                fail_msg("step %u, rank %u, float %zu", i, r, k);
        for (size_t k = 0; !step->reduces && k < n * step->bytes; k++)
            if (at[k] !=
                pattern(member_rank(net, r, step->lane, (uint32_t)(k / step->bytes)), i, k % step->bytes))
                fail_msg("step %u, rank %u, byte %zu", i, r, k);
    }
}

/* Every rank a thread, at its own speed, on streams of its own choice; the program is the same. */
static void random_programs(void **state) {
    (void)state;
    uint64_t seed = seed_choose("random_programs");
    for (int p = 0; p < N_PROGRAMS; p++) {
        uint64_t random = seed + (uint64_t)p;
        step steps[N_STEPS];
        player players[SIMNET_MAX_RANKS];
        size_t shape = random_below(&random, N_SHAPES);
        net *net = net_make(shapes[shape].nodes, shapes[shape].ranks_per_node);
        for (uint32_t i = 0; i < N_STEPS; i++) {
            steps[i] = (step){.lane = (simnet_lane)random_below(&random, SIMNET_N_LANES),
                              .id = (uint32_t)random_below(&random, 2),
                              .reduces = random_below(&random, 3) == 0,
                              .bytes = (random_below(&random, STEP_BYTES / 6) + 1) & ~(size_t)3};
            step_fill(net, &steps[i], i);
        }
        for (uint32_t r = 0; r < net->n; r++) {
            players[r] = (player){.net = net, .rank = r, .steps = steps, .seed = random + r};
            assert_int_equal(pthread_create(&players[r].thread, NULL, play, &players[r]), 0);
        }
        for (uint32_t r = 0; r < net->n; r++) {
            pthread_join(players[r].thread, NULL);
            assert_int_equal(players[r].status, FCDP_OK);
        }
        sync_all(net);
        assert_all_ok(net);
        for (uint32_t i = 0; i < N_STEPS; i++) step_check(net, &steps[i], i);
        net_destroy(net);
    }
}

/* ---- with the simulated driver's checks ---- */

static unsigned long races_now(void) {
    struct simgpu_unordered unordered;
    simgpu_unordered(&unordered);
    return unordered.races;
}

/* The collective's own reads and writes are known, and so is that what is behind it is behind all that is
 * before it. */
static void what_it_touches_is_checked(void **state) {
    (void)state;
    for (int ordered = 0; ordered < 3; ordered++) {
        double timeout_s = ordered ? 0.5
                                   : 60; /* the rank that reports is dropped, and the other waits for it */
        net *net = net_create((simnet_config){.nodes = 2, .ranks_per_node = 1, .timeout_s = timeout_s});
        rank *ranks = net->ranks;
        char *pinned = NULL;
        assert_int_equal(posix_memalign((void **)&pinned, 4096, 4096), 0);
        assert_ok(fcdp__driver_host_pin(net->drv, pinned, 4096, &(size_t){0}));
        simgpu_set_races(1);
        if (ordered == 1) { /* another stream writes into a part that the all-gather writes */
            assert_ok(fcdp__driver_copy_d2d(net->drv, fcdp__dptr_add(ranks[0].memory, 64),
                                            fcdp__dptr_add(ranks[0].memory, 4096), 64, ranks[0].streams[1]));
        } else { /* it reads the part that the all-gather reads; rank 0 puts out what rank 1 takes */
            assert_ok(
                fcdp__driver_copy_d2h(net->drv, pinned, ranks[0].memory, 64, ranks[0].streams[ordered == 2]));
        }
        fcdp_status status = FCDP_OK; /* a call is refused, where the report was quicker */
        for (uint32_t r = 0; r < 2 && !status; r++)
            status = simnet_all_gather(comm_of(net, r, SIMNET_INTER, 0), ranks[r].memory, 64,
                                       ranks[r].streams[0]);
        if (!status)
            status = fcdp__driver_copy_h2d(net->drv, fcdp__dptr_add(ranks[1].memory, 8192), pinned, 64,
                                           ranks[1].streams[0]);
        if (!status) status = fcdp__driver_sync(net->drv);
        assert_int_equal(status, ordered ? FCDP_ERR_DRIVER : FCDP_OK);
        assert_int_equal(races_now(), ordered > 0);
        simgpu_set_races(0);
        if (ordered) { /* the device has failed */
            simgpu_reset();
            for (uint32_t r = 0; r < 2; r++) simnet_detach(ranks[r].endpoint);
            simnet_close(net->fabric);
            fcdp__driver_close(net->drv);
            free(net);
        } else {
            assert_ok(fcdp__driver_host_unpin(net->drv, pinned, 4096, &(size_t){0}));
            net_destroy(net);
        }
        free(pinned);
    }
}

static void wrong_arguments_are_refused(void **state) {
    (void)state;
    simnet_fabric *fabric;
    simnet_endpoint *endpoint;
    net *net = net_make(1, 2);
    assert_int_equal(simnet_attach(net->fabric, 0, net->drv, &endpoint), FCDP_ERR_INVALID);
    assert_int_equal(simnet_attach(net->fabric, 2, net->drv, &endpoint), FCDP_ERR_INVALID);
    assert_int_equal(simnet_create(&(simnet_config){.nodes = 9, .ranks_per_node = 8}, &fabric),
                     FCDP_ERR_INVALID);
    assert_int_equal(simnet_create(&(simnet_config){.nodes = 2}, &fabric), FCDP_ERR_INVALID);
    assert_int_equal(simnet_open(0, &fabric), FCDP_ERR_INVALID);
    assert_ok(simnet_open(simnet_fd(net->fabric), &fabric));
    simnet_close(fabric);
    net_destroy(net);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_all_gather_brings_every_part),
        cmocka_unit_test(an_all_gather_of_parts_brings_each_to_its_place),
        cmocka_unit_test(other_parts_are_not_taken_for_the_same),
        cmocka_unit_test(a_reduce_scatter_adds_in_order),
        cmocka_unit_test(a_reduce_scatter_is_of_floats),
        cmocka_unit_test(it_takes_what_is_before_it_on_the_stream_and_is_behind_nothing_else),
        cmocka_unit_test(communicators_do_not_wait_for_each_other),
        cmocka_unit_test(a_communicator_s_operations_take_turns),
        cmocka_unit_test(random_programs),
        cmocka_unit_test(what_it_touches_is_checked),
        cmocka_unit_test(wrong_arguments_are_refused),
    };
    return cmocka_run_group_tests_name("simnet collectives", tests, NULL, NULL);
}
