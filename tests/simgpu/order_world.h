/* order_world.h - a page at two addresses, three streams, and whether accesses to it were reported as
 * unordered. */
#ifndef FCDP_TESTS_SIMGPU_ORDER_WORLD_H
#define FCDP_TESTS_SIMGPU_ORDER_WORLD_H

#include "tests/simgpu/support.h"

/* One page at two addresses, two streams, an event. */
static struct world {
    struct pages pages;
    CUdeviceptr alias;
    CUstream first, second, third;
    CUevent event;
    unsigned char *pinned;
} w;

/* A word of the page. */
#define FLAG (w.pages.at + PAGE - 64)

static inline CUstream stream_make(unsigned flags) {
    CUstream stream;
    OK(cuStreamCreate(&stream, flags));
    return stream;
}

static inline void world_make(void) {
    fresh_device(NULL);
    w.pages = pages_make(1);
    w.alias = range_make(PAGE);
    OK(cuMemMap(w.alias, PAGE, 0, w.pages.handles[0], 0));
    OK(cuMemSetAccess(w.alias, PAGE, &read_write, 1));
    w.first = stream_make(CU_STREAM_NON_BLOCKING);
    w.second = stream_make(CU_STREAM_NON_BLOCKING);
    w.third = stream_make(CU_STREAM_NON_BLOCKING);
    OK(cuEventCreate(&w.event, CU_EVENT_DISABLE_TIMING));
}

static inline void touch(CUstream stream, CUdeviceptr address, size_t bytes, int writes) {
    OK(simgpu_launch(stream, &(struct simgpu_kernel){.name = writes ? "writer" : "reader",
                                                     .n_accesses = 1,
                                                     .accesses = {{address, bytes, writes}}}));
}

static inline void post(void *semaphore) {
    sem_post(semaphore);
}

/* The stream's work is over, and the simulator does not know that anybody knows. */
static inline void wait_unseen(CUstream stream) {
    sem_t done;
    sem_init(&done, 0, 0);
    OK(cuLaunchHostFunc(stream, post, &done));
    while (sem_wait(&done) != 0) continue;
}

static inline struct simgpu_unordered unordered_now(void) {
    struct simgpu_unordered unordered;
    simgpu_unordered(&unordered);
    return unordered;
}

/* The work so far ended with a report, or without one. */
static inline void assert_reported(bool expected, const char *what) {
    CUresult result = cuCtxSynchronize();
    struct simgpu_unordered unordered = unordered_now();
    if (unordered.aliases != (expected ? 1 : 0) || unordered.races || unordered.unmaps)
        fail_msg("%s: %lu reports: %s", what, unordered.aliases, unordered.text);
    assert_int_equal(result, expected ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS);
    assert_int_equal(*unordered.text != '\0', expected);
}

#endif
