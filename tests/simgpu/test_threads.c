/* Threads that share the device: each maps, fills, copies, waits, checks and unmaps pages of its own,
 * over streams that all of them use, with handles and events made and destroyed on the way. What it
 * looks for is races (TSan) and mix-ups. */
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "tests/simgpu/support.h"

#define N_THREADS 4
#define N_ROUNDS 30
#define N_STREAMS 3
#define MOST_PAGES 4

static CUstream streams[N_STREAMS];
static CUcontext context;

struct worker {
    pthread_t thread;
    unsigned seed;
    unsigned char *pinned;
    const char *failed; /* the step that went wrong; cmocka's asserts are the main thread's */
};

#define STEP(call)                                                                                           \
    do {                                                                                                     \
        if (call) {                                                                                          \
            worker->failed = #call;                                                                          \
            return false;                                                                                    \
        }                                                                                                    \
    } while (0)

/* Fill on one stream, copy out on another that waits for it; the unmap waits for both. */
static bool use_pages(struct worker *worker, CUdeviceptr at, size_t bytes) {
    CUstream first = streams[rand_r(&worker->seed) % N_STREAMS],
             second = streams[rand_r(&worker->seed) % N_STREAMS];
    unsigned char value = (unsigned char)rand_r(&worker->seed);
    CUevent filled, copied;
    STEP(cuEventCreate(&filled, CU_EVENT_DISABLE_TIMING));
    STEP(cuEventCreate(&copied, CU_EVENT_DISABLE_TIMING));
    STEP(cuMemsetD8Async(at, value, bytes, first));
    STEP(cuEventRecord(filled, first));
    STEP(cuStreamWaitEvent(second, filled, 0));
    STEP(cuMemcpyDtoHAsync_v2(worker->pinned, at + bytes - 4096, 4096, second));
    STEP(cuEventRecord(copied, second));
    STEP(cuEventDestroy_v2(filled));
    STEP(cuEventSynchronize(copied));
    STEP(cuEventDestroy_v2(copied));
    for (size_t i = 0; i < 4096; i++) STEP(worker->pinned[i] != value);
    return true;
}

static bool run_round(struct worker *worker) {
    size_t n = 1 + (size_t)rand_r(&worker->seed) % MOST_PAGES;
    CUdeviceptr at;
    STEP(cuMemAddressReserve(&at, n * PAGE, 0, 0, 0));
    for (size_t i = 0; i < n; i++) {
        CUmemGenericAllocationHandle handle;
        STEP(cuMemCreate(&handle, PAGE, &device_memory, 0));
        STEP(cuMemMap(at + i * PAGE, PAGE, 0, handle, 0));
        STEP(cuMemRelease(handle)); /* the map keeps it */
    }
    STEP(cuMemSetAccess(at, n * PAGE, &read_write, 1));
    if (!use_pages(worker, at, n * PAGE)) return false;
    STEP(cuMemUnmap(at, n * PAGE));
    STEP(cuMemAddressFree(at, n * PAGE));
    return true;
}

static bool run_rounds(struct worker *worker) {
    STEP(cuCtxSetCurrent(context));
    STEP(cuMemHostRegister_v2(worker->pinned, 4096, 0));
    for (int i = 0; i < N_ROUNDS; i++)
        if (!run_round(worker)) return false;
    STEP(cuMemHostUnregister(worker->pinned));
    return true;
}

static void *worker_main(void *argument) {
    run_rounds(argument);
    return NULL;
}

static void threads_share_the_device(void **state) {
    (void)state;
    struct worker workers[N_THREADS];
    const char *given = getenv("FCDP_TEST_SEED");
    unsigned seed = given ? (unsigned)strtoul(given, NULL, 0) : (unsigned)time(NULL);
    print_message("FCDP_TEST_SEED=%u\n", seed);
    OK(cuCtxGetCurrent(&context));
    for (int i = 0; i < N_STREAMS; i++) OK(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING));
    for (unsigned i = 0; i < N_THREADS; i++) {
        workers[i] = (struct worker){.seed = seed + i, .pinned = host_make(4096, false)};
        assert_int_equal(pthread_create(&workers[i].thread, NULL, worker_main, &workers[i]), 0);
    }
    for (unsigned i = 0; i < N_THREADS; i++) {
        pthread_join(workers[i].thread, NULL);
        host_destroy(workers[i].pinned, 4096);
        if (workers[i].failed) fail_msg("thread %u: %s", i, workers[i].failed);
    }
    for (int i = 0; i < N_STREAMS; i++) OK(cuStreamDestroy_v2(streams[i]));
    struct simgpu_live live = live_now(), nothing = {0};
    assert_memory_equal(&live, &nothing, sizeof live);
}

int main(void) {
    const struct CMUnitTest tests[] = {test(threads_share_the_device)};
    return cmocka_run_group_tests_name("simgpu threads", tests, NULL, NULL);
}
