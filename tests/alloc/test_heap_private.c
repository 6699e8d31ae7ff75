/* Private pools: what a graph capture allocates from, alone and beside other threads. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "tests/alloc/heap_world.h"
#include "tests/log_text.h"

static bool covers_stream(void *ctx, fcdp_stream stream) {
    return stream == ctx;
}

/* As torch.cuda.graph: the pool begins, then the capture. */
static void capture_begin(world *w, fcdp_private_id id, int stream) {
    void *stale;
    assert_ok(fcdp_heap_private_begin(w->heap, id, covers_stream, w->streams[stream], &stale));
    assert_int_equal(simgpu_capture(w->streams[stream], 1), 0);
}

static void capture_end(world *w, fcdp_private_id id, int stream) {
    void *ctx;
    assert_int_equal(simgpu_capture(w->streams[stream], 0), 0);
    assert_ok(fcdp_heap_private_end(w->heap, id, &ctx));
}

static void a_private_pool_keeps_to_itself_until_it_is_released(void **state) {
    (void)state;
    world w = world_open(8);
    fcdp_private_id id = {3, 0};
    void *ctx = NULL, *stale;
    fcdp_dptr before = take(&w, 2 * PAGE, 0), other, ooms;
    give(&w, before);
    capture_begin(&w, id, 0);
    assert_int_equal(fcdp_heap_private_begin(w.heap, id, covers_stream, w.streams[0], &stale),
                     FCDP_ERR_INVALID);
    assert_null(stale);
    fcdp_dptr a = take(&w, 2 * PAGE, 0), b = take(&w, PAGE, 0);
    assert_int_not_equal(a.addr, before.addr);
    give(&w, a);
    assert_int_equal(take(&w, 2 * PAGE, 0).addr, a.addr);
    other = take(&w, PAGE, 1); /* not covered */
    fcdp_dptr used = take(&w, 512, 1);
    assert_ok(fcdp_heap_record_stream(w.heap, used, w.streams[0]));
    static const char *const asking[] = {"cuStreamQuery",      "cuEventRecord",       "cuEventQuery",
                                         "cuEventSynchronize", "cuStreamSynchronize", "cuCtxSynchronize"};
    unsigned long before_calls[6];
    for (int i = 0; i < 6; i++) before_calls[i] = simgpu_calls(asking[i]);
    give(&w, used); /* the stream is captured: its event comes later */
    assert_int_equal(stats_of(&w).busy_bytes, 512);
    assert_int_equal(fcdp_heap_malloc(w.heap, 7 * PAGE, w.streams[1], &ooms), FCDP_ERR_NO_DEVICE_MEM);
    assert_ok(fcdp_heap_trim(w.heap));
    for (int i = 0; i < 6; i++) assert_int_equal(simgpu_calls(asking[i]), before_calls[i]);
    assert_int_equal(simgpu_capture(w.streams[0], 0), 0); /* it is not invalidated */
    assert_ok(fcdp_heap_private_end(w.heap, id, &ctx));
    assert_ptr_equal(ctx, w.streams[0]);
    assert_int_equal(fcdp_heap_private_end(w.heap, id, &ctx), FCDP_ERR_INVALID);
    give(&w, a);
    give(&w, b);
    give(&w, other);
    assert_ok(fcdp_heap_trim(w.heap));
    assert_int_equal(stats_of(&w).reserved_bytes, 3 * PAGE); /* a graph may write there */
    assert_int_equal(fcdp_heap_malloc(w.heap, 6 * PAGE, w.streams[0], &ooms), FCDP_ERR_NO_DEVICE_MEM);
    assert_ok(fcdp_heap_private_release(w.heap, id));
    assert_int_equal(fcdp_heap_private_release(w.heap, id), FCDP_ERR_INVALID);
    gate g = gate_make(); /* a last replay, on another stream, is still under way */
    gate_hold(g, w.streams[2]);
    assert_ok(fcdp__driver_copy_d2d(w.drv, a, b, 4096, w.streams[2]));
    assert_ok(fcdp_heap_malloc(w.heap, 5 * PAGE, w.streams[1], &other)); /* not of the pool's pages */
    assert_int_equal(stats_of(&w).reserved_bytes, 8 * PAGE);
    give(&w, other);
    gate_open(g);
    give(&w, take(&w, 8 * PAGE, 1));
    assert_int_equal(cuStreamQuery(w.streams[2]), CUDA_SUCCESS); /* it has been waited for */
    gate_free(g);
    /* its name may come again */
    assert_ok(fcdp_heap_private_begin(w.heap, id, covers_stream, w.streams[0], &stale));
    give(&w, take(&w, PAGE, 0));
    assert_ok(fcdp_heap_private_end(w.heap, id, &ctx));
    world_close(&w);
}

/* One after the other, any number of them; what is alive in one keeps its place from the next. */
static void released_pools_make_room_for_others(void **state) {
    (void)state;
    enum { N_POOLS = 1100 /* more than there are streams */, N_KEPT = 100 };
    world w = world_open(2 * N_KEPT + 16);
    fcdp_dptr kept[N_KEPT] = {{0}};
    for (uint64_t i = 0; i < N_POOLS; i++) {
        fcdp_private_id id = {i + 1, 1};
        capture_begin(&w, id, 0);
        fcdp_dptr at = take(&w, 2 * PAGE, 0), output = take(&w, 1000, 0);
        for (int k = 0; k < N_KEPT; k++) assert_int_not_equal(output.addr, kept[k].addr);
        capture_end(&w, id, 0);
        if (kept[i % N_KEPT].addr) give(&w, kept[i % N_KEPT]);
        kept[i % N_KEPT] = output;
        give(&w, at);
        assert_ok(fcdp_heap_private_release(w.heap, id));
    }
    for (int k = 0; k < N_KEPT; k++) give(&w, kept[k]);
    assert_ok(fcdp_heap_trim(w.heap));
    assert_int_equal(stats_of(&w).reserved_bytes, 0);
    world_close(&w);
}

/* A block that lives in one arena of a released pool keeps the pool, not the pages of its other arenas. */
static void a_released_pools_free_pages_serve_the_next_capture(void **state) {
    (void)state;
    for (int order = 0; order < 2; order++) { /* whichever arena is looked at first */
        world w = world_open(8);
        fcdp_private_id first = {1, 1}, second = {2, 1};
        int a = order, b = !order;
        capture_begin(&w, first, a);
        fcdp_dptr alive = take(&w, 1000, a);
        capture_end(&w, first, a);
        capture_begin(&w, first, b);
        give(&w, take(&w, 5 * PAGE, b));
        capture_end(&w, first, b);
        assert_ok(fcdp_heap_private_release(w.heap, first));
        assert_ok(fcdp_heap_private_release(w.heap, first));
        capture_begin(&w, second, a);
        give(&w, take(&w, 6 * PAGE, a));
        capture_end(&w, second, a);
        give(&w, alive);
        world_close(&w);
    }
}

/* As torch does for a graph's conditional nodes. */
static void a_pool_may_end_and_begin_within_a_capture(void **state) {
    (void)state;
    world w = world_open(8);
    fcdp_private_id id = {1, 1};
    void *ctx, *stale;
    gate g = gate_make();
    fcdp_dptr warm = take(&w, 2 * PAGE, 1), ooms;
    capture_begin(&w, id, 0);
    fcdp_dptr first = take(&w, PAGE, 0);
    give(&w, warm);
    assert_ok(fcdp_heap_private_end(w.heap, id, &ctx));
    assert_int_equal(fcdp_heap_malloc(w.heap, 7 * PAGE, w.streams[2], &ooms), FCDP_ERR_NO_DEVICE_MEM);
    assert_ok(fcdp_heap_trim(w.heap)); /* the gap is part of the capture */
    assert_ok(fcdp_heap_private_begin(w.heap, id, covers_stream, w.streams[0], &stale));
    assert_null(stale);
    give(&w, first);
    assert_int_equal(take(&w, PAGE, 0).addr, first.addr);
    assert_int_equal(simgpu_capture(w.streams[0], 0), 0);
    assert_ok(fcdp_heap_private_end(w.heap, id, &ctx));
    give(&w, take(&w, 7 * PAGE, 2)); /* and now it is over */
    give(&w, first);
    capture_begin(&w, id, 0); /* once more, without a malloc, and it ends before the capture does */
    assert_ok(fcdp_heap_private_end(w.heap, id, &ctx));
    assert_int_equal(simgpu_capture(w.streams[0], 0), 0);
    give(&w, take(&w, 7 * PAGE, 1));
    assert_ok(fcdp_heap_private_release(w.heap, id));
    assert_ok(fcdp_heap_trim(w.heap));
    assert_int_equal(stats_of(&w).reserved_bytes, PAGE); /* released once, begun three times */
    gate_free(g);
    world_close(&w);
}

static void a_capture_that_fails_does_not_stop_the_heap(void **state) {
    (void)state;
    log_keep(FCDP_LOG_WARN);
    world w = world_open(8);
    fcdp_private_id id = {1, 1};
    void *ctx, *stale;
    fcdp_dptr before = take(&w, 5 * PAGE, 1), ooms;
    capture_begin(&w, id, 0);
    assert_int_equal(fcdp_heap_malloc(w.heap, 9 * PAGE, w.streams[1], &ooms), FCDP_ERR_NO_DEVICE_MEM);
    fcdp_dptr inside = take(&w, PAGE, 0);
    give(&w, before);
    assert_int_equal(fcdp_heap_malloc(w.heap, 5 * PAGE, w.streams[2], &ooms), FCDP_ERR_NO_DEVICE_MEM);
    assert_text("a graph is being captured");
    give(&w, inside);
    assert_int_equal(simgpu_capture(w.streams[0], 0), 0); /* and its owner does not end the pool */
    give(&w, take(&w, 5 * PAGE, 2));
    assert_ok(fcdp_heap_trim(w.heap));
    assert_int_equal(stats_of(&w).reserved_bytes, PAGE); /* not released */
    assert_ok(fcdp_heap_private_end(w.heap, id, &ctx));  /* late, but it gets back what is its own */
    assert_ptr_equal(ctx, w.streams[0]);
    assert_int_equal(fcdp_heap_private_end(w.heap, id, &ctx), FCDP_ERR_INVALID);
    capture_begin(&w, id, 0);
    give(&w, take(&w, PAGE, 0));
    assert_int_equal(simgpu_capture(w.streams[0], 0), 0);
    assert_ok(fcdp_heap_trim(w.heap)); /* closes it */
    assert_ok(fcdp_heap_private_begin(w.heap, id, covers_stream, w.streams[0], &stale));
    assert_ptr_equal(stale, w.streams[0]); /* or the next begin gives it back */
    assert_ok(fcdp_heap_private_end(w.heap, id, &ctx));
    for (int i = 0; i < 3; i++) assert_ok(fcdp_heap_private_release(w.heap, id));
    assert_ok(fcdp_heap_trim(w.heap));
    assert_int_equal(stats_of(&w).reserved_bytes, 0);
    assert_says(log_kept(),
                "warning: a private pool was left open by a graph capture that has ended; it is closed "
                "now\n");
    world_close(&w);
}

/* ---- captures beside other threads ---- */

/* a third of them takes TSan 10 s */
static unsigned rounds(void) {
    return getenv("TEST_COARSER") ? 20 : 60;
}

typedef struct beside {
    world *w;
    pthread_t thread;
    int stream;
    atomic_int *n_done;
    int n_invalidated, n_failed;
} beside;

static void *capturer_main(void *arg) {
    beside *me = arg;
    world *w = me->w;
    CUcontext context;
    assert_int_equal(cuDevicePrimaryCtxRetain(&context, 0), CUDA_SUCCESS);
    assert_int_equal(cuCtxSetCurrent(context), CUDA_SUCCESS);
    for (uint64_t i = 0; i < rounds() / (1 + (uint64_t)me->stream); i++) { /* the second is done sooner */
        fcdp_private_id id = {i + 1, (uint64_t)me->stream};
        fcdp_dptr at[4] = {{0}};
        void *ctx, *stale;
        assert_ok(fcdp_heap_private_begin(w->heap, id, covers_stream, w->streams[me->stream], &stale));
        assert_int_equal(simgpu_capture(w->streams[me->stream], 1), 0);
        for (int k = 0; k < 4; k++) {
            if (fcdp_heap_malloc(w->heap, (size_t)(k + 1) * 700 * KIB, w->streams[me->stream], &at[k]))
                me->n_failed++;
            sched_yield();
        }
        for (int k = 0; k < 2; k++) give(w, at[k]);
        me->n_invalidated += simgpu_capture(w->streams[me->stream], 0) != 0;
        assert_ok(fcdp_heap_private_end(w->heap, id, &ctx));
        for (int k = 2; k < 4; k++) give(w, at[k]);
        assert_ok(fcdp_heap_private_release(w->heap, id));
        if (me->stream == 0) assert_ok(fcdp_heap_trim(w->heap)); /* waits, unless the other one captures */
    }
    assert_int_equal(cuDevicePrimaryCtxRelease_v2(0), CUDA_SUCCESS);
    atomic_fetch_add(me->n_done, 1);
    return NULL;
}

/* Keeps its stream busy, and allocates so much that it must wait for what others have freed. */
static void *neighbour_main(void *arg) {
    beside *me = arg;
    world *w = me->w;
    for (int i = 0; atomic_load(me->n_done) < 2; i++) {
        fcdp_dptr at[6] = {{0}};
        for (int k = 0; k < 6; k++)
            if (fcdp_heap_malloc(w->heap, (size_t)(1 + (i + k) % 5) * PAGE, w->streams[me->stream], &at[k]))
                me->n_failed++;
        for (int k = 0; k < 5; k++)
            if (at[k].addr && at[k + 1].addr)
                assert_ok(fcdp__driver_copy_d2d(w->drv, at[k], at[k + 1], MIB, w->streams[me->stream]));
        if (at[0].addr) assert_ok(fcdp_heap_record_stream(w->heap, at[0], w->streams[(me->stream + 1) % 4]));
        for (int k = 0; k < 6; k++) give(w, at[k]);
        if (i % 7 == 0) assert_ok(fcdp_heap_trim(w->heap));
    }
    return NULL;
}

static void captures_survive_other_threads(void **state) {
    (void)state;
    world w = world_open(96);
    atomic_int n_done = 0;
    beside threads[4];
    for (int i = 0; i < 4; i++) {
        threads[i] = (beside){.w = &w, .stream = i, .n_done = &n_done};
        pthread_create(&threads[i].thread, NULL, i < 2 ? capturer_main : neighbour_main, &threads[i]);
    }
    for (int i = 0; i < 4; i++) pthread_join(threads[i].thread, NULL);
    print_message("out of memory: %d and %d in captures, %d and %d beside them\n", threads[0].n_failed,
                  threads[1].n_failed, threads[2].n_failed, threads[3].n_failed);
    assert_int_equal(threads[0].n_invalidated + threads[1].n_invalidated, 0);
    for (int i = 0; i < 4; i++) assert_ok(fcdp__driver_stream_sync(w.drv, w.streams[i]));
    assert_ok(fcdp_heap_trim(w.heap));
    assert_int_equal(stats_of(&w).reserved_bytes, 0);
    world_close(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_private_pool_keeps_to_itself_until_it_is_released),
        cmocka_unit_test(released_pools_make_room_for_others),
        cmocka_unit_test(a_released_pools_free_pages_serve_the_next_capture),
        cmocka_unit_test(a_pool_may_end_and_begin_within_a_capture),
        cmocka_unit_test(a_capture_that_fails_does_not_stop_the_heap),
        cmocka_unit_test(captures_survive_other_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
