/*
 * Random programs over streams, events, values and synchronisation, against an oracle that knows each
 * operation's predecessors as a set of bits: there is a report exactly when two accesses through different
 * addresses share a page, one writes, and neither is among the other's predecessors.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/simgpu/support.h"

#define N_PROGRAMS 600
#define MOST_STEPS 40
#define N_STREAMS 5 /* 0 is the null stream, 1 and 2 wait for it, the others do not */
#define N_EVENTS 3
#define N_PAGES 2
#define N_ADDRESSES 3

static uint64_t random_state;

static unsigned pick(unsigned n) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(random_state >> 33) % n;
}

/* The oracle: node i is the i-th operation; a set of nodes is a mask. */
struct node {
    uint64_t before; /* its predecessors, and itself */
    bool is_access, writes;
    unsigned page, address;
};

static struct {
    struct node nodes[64];
    unsigned n;
    uint64_t of_stream[N_STREAMS]; /* the last node's `before` */
    uint64_t of_event[N_EVENTS];
    uint64_t of_flag[MOST_STEPS];
    uint64_t host;
} oracle;

static struct {
    CUstream streams[N_STREAMS];
    CUevent events[N_EVENTS];
    CUdeviceptr at[N_PAGES][N_ADDRESSES];
    CUdeviceptr flags;
    unsigned n_flags;
} device;

/* A report ends the device, whenever it comes. */
static void put(CUresult result) {
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_ILLEGAL_ADDRESS) fail_msg("CUresult %d", result);
}

static bool is_blocking(unsigned stream) {
    return stream <= 2;
}

/* What the null stream's order puts before the next operation of a stream. */
static uint64_t implicit(unsigned stream) {
    uint64_t before = 0;
    for (unsigned other = 0; is_blocking(stream) && other < N_STREAMS; other++)
        if (is_blocking(other) && (stream == 0 || other == 0)) before |= oracle.of_stream[other];
    return before;
}

static struct node *node_add(unsigned stream, uint64_t more_before) {
    struct node *node = &oracle.nodes[oracle.n];
    uint64_t before = oracle.of_stream[stream] | implicit(stream) | oracle.host | more_before;
    *node = (struct node){.before = before | (uint64_t)1 << oracle.n++};
    oracle.of_stream[stream] = node->before;
    return node;
}

static void step_access(void) {
    unsigned stream = pick(N_STREAMS), page = pick(N_PAGES), address = pick(N_ADDRESSES);
    bool writes = pick(3) == 0;
    struct node *node = node_add(stream, 0);
    node->is_access = true;
    node->writes = writes;
    node->page = page;
    node->address = address;
    put(simgpu_launch(
        device.streams[stream],
        &(struct simgpu_kernel){.n_accesses = 1, .accesses = {{device.at[page][address], 64, writes}}}));
}

static void step_record(void) {
    unsigned stream = pick(N_STREAMS), event = pick(N_EVENTS);
    oracle.of_event[event] = node_add(stream, 0)->before;
    put(cuEventRecord(device.events[event], device.streams[stream]));
}

static void step_wait(void) {
    unsigned stream = pick(N_STREAMS), event = pick(N_EVENTS);
    if (oracle.of_event[event]) node_add(stream, oracle.of_event[event]); /* else it does nothing at all */
    put(cuStreamWaitEvent(device.streams[stream], device.events[event], 0));
}

static void step_write_value(void) {
    unsigned stream = pick(N_STREAMS), flag = device.n_flags++;
    oracle.of_flag[flag] = node_add(stream, 0)->before;
    put(cuStreamWriteValue32_v2(device.streams[stream], device.flags + 4 * flag, 1,
                                CU_STREAM_WRITE_VALUE_DEFAULT));
}

static void step_wait_value(void) {
    if (device.n_flags == 0) return;
    unsigned stream = pick(N_STREAMS), flag = pick(device.n_flags);
    node_add(stream, oracle.of_flag[flag]);
    put(cuStreamWaitValue32_v2(device.streams[stream], device.flags + 4 * flag, 1, CU_STREAM_WAIT_VALUE_EQ));
}

static void step_synchronize(void) {
    unsigned which = pick(8), event = pick(N_EVENTS), stream = pick(N_STREAMS);
    if (which == 0) {
        for (unsigned i = 0; i < N_STREAMS; i++) oracle.host |= oracle.of_stream[i];
        put(cuCtxSynchronize());
    } else if (which < 5) {
        oracle.host |= oracle.of_event[event];
        put(cuEventSynchronize(device.events[event]));
    } else {
        oracle.host |= oracle.of_stream[stream] | implicit(stream);
        put(cuStreamSynchronize(device.streams[stream]));
    }
}

static bool has_conflict(void) {
    for (unsigned b = 0; b < oracle.n; b++)
        for (unsigned a = 0; a < b; a++) {
            const struct node *one = &oracle.nodes[a], *other = &oracle.nodes[b];
            if (!one->is_access || !other->is_access || one->page != other->page ||
                one->address == other->address)
                continue;
            bool ordered = (other->before >> a & 1) || (one->before >> b & 1);
            if (!ordered && (one->writes || other->writes)) return true;
        }
    return false;
}

static void device_make(void) {
    fresh_device(NULL);
    memset(&oracle, 0, sizeof oracle);
    memset(&device, 0, sizeof device);
    for (unsigned i = 1; i < N_STREAMS; i++)
        OK(cuStreamCreate(&device.streams[i], is_blocking(i) ? CU_STREAM_DEFAULT : CU_STREAM_NON_BLOCKING));
    for (unsigned i = 0; i < N_EVENTS; i++) OK(cuEventCreate(&device.events[i], CU_EVENT_DISABLE_TIMING));
    for (unsigned p = 0; p < N_PAGES; p++) {
        CUmemGenericAllocationHandle handle = handle_make(PAGE);
        for (unsigned a = 0; a < N_ADDRESSES; a++) {
            device.at[p][a] = range_make(PAGE);
            OK(cuMemMap(device.at[p][a], PAGE, 0, handle, 0));
            OK(cuMemSetAccess(device.at[p][a], PAGE, &read_write, 1));
        }
    }
    device.flags = pages_make(1).at;
}

static bool program_is_reported(void) {
    static void (*const steps[])(void) = {step_access,      step_access,     step_record,     step_record,
                                          step_wait,        step_wait,       step_wait,       step_wait,
                                          step_write_value, step_wait_value, step_synchronize};
    struct simgpu_unordered unordered;
    device_make();
    for (unsigned i = 0, n = 4 + pick(MOST_STEPS - 4); i < n; i++) {
        steps[pick(sizeof steps / sizeof *steps)]();
        simgpu_unordered(&unordered);
        if (unordered.aliases) break; /* nothing more is taken */
    }
    CUresult result = cuCtxSynchronize();
    simgpu_unordered(&unordered);
    assert_int_equal(result, unordered.aliases ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS);
    assert_int_equal(unordered.races, 0);
    return unordered.aliases > 0;
}

static void reports_are_the_oracle_s(void **state) {
    (void)state;
    const char *given = getenv("FCDP_TEST_SEED");
    uint64_t seed = given ? strtoull(given, NULL, 0) : (uint64_t)time(NULL);
    unsigned n_reported = 0;
    print_message("FCDP_TEST_SEED=%llu\n", (unsigned long long)seed);
    for (unsigned i = 0; i < N_PROGRAMS; i++) {
        random_state = seed + i;
        bool reported = program_is_reported();
        if (reported != has_conflict())
            fail_msg("program %u of FCDP_TEST_SEED=%llu: %s", i, (unsigned long long)seed,
                     reported ? "a report, but all is ordered" : "no report of what is not ordered");
        n_reported += reported;
    }
    print_message("%u of %u programs were reported\n", n_reported, N_PROGRAMS);
    assert_in_range(n_reported, N_PROGRAMS / 5, N_PROGRAMS * 4 / 5);
}

int main(void) {
    const struct CMUnitTest tests[] = {test(reports_are_the_oracle_s)};
    return cmocka_run_group_tests_name("simgpu order, random", tests, NULL, NULL);
}
