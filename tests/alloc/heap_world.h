/* heap_world.h - a simulated device with a pool, a heap and four streams, and gates that hold streams up. */
#ifndef FCDP_TESTS_HEAP_WORLD_H
#define FCDP_TESTS_HEAP_WORLD_H

#include "alloc/heap.h"
#include "sim/gpu/simgpu_cuda.h"
#include "tests/alloc/support.h"

enum { PAGE = 2 << 20, KIB = 1 << 10, MIB = 1 << 20 };

typedef struct world {
    fcdp_driver *drv;
    fcdp_pool *pool;
    fcdp_heap *heap;
    fcdp_stream streams[4];
} world;

static inline world world_open(size_t n_pages) {
    world w = {.drv = driver_open_sim()};
    assert_ok(fcdp__pool_create(w.drv, n_pages * PAGE, &w.pool));
    assert_ok(fcdp_heap_create(w.drv, w.pool, &w.heap));
    for (int i = 0; i < 4; i++) assert_ok(fcdp__driver_stream_create(w.drv, &w.streams[i]));
    return w;
}

static inline void world_close(world *w) {
    fcdp_heap_destroy(w->heap);
    for (int i = 0; i < 4; i++) fcdp__driver_stream_destroy(w->drv, w->streams[i]);
    fcdp__pool_destroy(w->pool);
    assert_nothing_lives();
    fcdp__driver_close(w->drv);
}

static inline fcdp_dptr take(world *w, size_t bytes, int stream) {
    fcdp_dptr at = {0};
    assert_ok(fcdp_heap_malloc(w->heap, bytes, w->streams[stream], &at));
    assert_int_equal(at.addr % 512, 0);
    return at;
}

static inline void give(world *w, fcdp_dptr at) {
    assert_ok(fcdp_heap_free(w->heap, at));
}

static inline fcdp_heap_stats stats_of(world *w) {
    fcdp_heap_stats stats;
    fcdp_heap_stats_get(w->heap, &stats);
    return stats;
}

/* Streams that are busy until the gate opens. */
typedef uint32_t *gate;

static inline gate gate_make(void) {
    CUcontext context;
    assert_int_equal(cuDevicePrimaryCtxRetain(&context, 0),
                     CUDA_SUCCESS); /* the test's own calls need a current one */
    assert_int_equal(cuCtxSetCurrent(context), CUDA_SUCCESS);
    gate g = aligned_alloc(4096, 4096);
    memset(g, 0, 4096);
    assert_int_equal(cuMemHostRegister_v2(g, 4096, 0), CUDA_SUCCESS);
    return g;
}

static inline void gate_hold(gate g, fcdp_stream stream) {
    assert_int_equal(cuStreamWaitValue32_v2(stream, (uintptr_t)g, 1, CU_STREAM_WAIT_VALUE_GEQ), CUDA_SUCCESS);
}

static inline void gate_open(gate g) {
    __atomic_store_n(g, 1, __ATOMIC_RELEASE);
}

static inline void gate_free(gate g) {
    assert_int_equal(cuMemHostUnregister(g), CUDA_SUCCESS);
    assert_int_equal(cuDevicePrimaryCtxRelease_v2(0), CUDA_SUCCESS);
    free(g);
}

#endif
