/*
 * Unordered accesses: each edge is shown to order two accesses through different addresses, and each is shown
 * to be what did it, since without it there is a report. No test depends on when the operations really run.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/simgpu/support.h"

/* One page at two addresses, two streams, an event. */
static struct world {
    struct pages pages;
    CUdeviceptr alias;
    CUstream first, second, third;
    CUevent event;
    unsigned char *pinned;
} w;

static CUstream stream_make(unsigned flags) {
    CUstream stream;
    OK(cuStreamCreate(&stream, flags));
    return stream;
}

static void world_make(void) {
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

static void touch(CUstream stream, CUdeviceptr address, size_t bytes, int writes) {
    OK(simgpu_launch(stream, &(struct simgpu_kernel){.name = writes ? "writer" : "reader",
                                                     .n_accesses = 1,
                                                     .accesses = {{address, bytes, writes}}}));
}

static void post(void *semaphore) {
    sem_post(semaphore);
}

/* The stream's work is over, and the simulator does not know that anybody knows. */
static void wait_unseen(CUstream stream) {
    sem_t done;
    sem_init(&done, 0, 0);
    OK(cuLaunchHostFunc(stream, post, &done));
    while (sem_wait(&done) != 0) continue;
}

static struct simgpu_unordered unordered_now(void) {
    struct simgpu_unordered unordered;
    simgpu_unordered(&unordered);
    return unordered;
}

/* The work so far ended with a report, or without one. */
static void assert_reported(bool expected, const char *what) {
    CUresult result = cuCtxSynchronize();
    struct simgpu_unordered unordered = unordered_now();
    if (unordered.aliases != (expected ? 1 : 0) || unordered.races || unordered.unmaps)
        fail_msg("%s: %lu reports: %s", what, unordered.aliases, unordered.text);
    assert_int_equal(result, expected ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS);
    assert_int_equal(*unordered.text != '\0', expected);
}

/* ---- edges from stream to stream ---- */

static void an_event_orders(void) {
    touch(w.first, w.pages.at, 64, 1);
    OK(cuEventRecord(w.event, w.first));
    OK(cuStreamWaitEvent(w.second, w.event, 0));
    touch(w.second, w.alias, 64, 0);
}

static void nothing_orders(void) {
    touch(w.first, w.pages.at, 64, 1);
    touch(w.second, w.alias, 64, 0);
}

static void luck_does_not_order(void) {
    touch(w.first, w.pages.at, 64, 0);
    wait_unseen(w.first);
    touch(w.second, w.alias, 64, 1);
}

static void one_stream_orders(void) {
    touch(w.first, w.pages.at, 64, 1);
    touch(w.first, w.alias, 64, 1);
}

static void an_event_recorded_before_does_not_order(void) {
    OK(cuEventRecord(w.event, w.first));
    touch(w.first, w.pages.at, 64, 1);
    OK(cuStreamWaitEvent(w.second, w.event, 0));
    touch(w.second, w.alias, 64, 0);
}

static void an_event_waited_for_later_does_not_order(void) {
    touch(w.first, w.pages.at, 64, 1);
    OK(cuEventRecord(w.event, w.first));
    touch(w.second, w.alias, 64, 0);
    cuStreamWaitEvent(w.second, w.event, 0); /* refused, where the report was quicker */
}

static void an_event_recorded_anew_orders_as_it_was(void) {
    touch(w.first, w.pages.at, 64, 1);
    OK(cuEventRecord(w.event, w.first));
    OK(cuStreamWaitEvent(w.second, w.event, 0));
    OK(cuEventRecord(w.event, w.third));
    touch(w.second, w.alias, 64, 0);
}

static void an_event_recorded_elsewhere_does_not_order(void) {
    touch(w.first, w.pages.at, 64, 1);
    OK(cuEventRecord(w.event, w.first));
    OK(cuEventRecord(w.event, w.third));
    OK(cuStreamWaitEvent(w.second, w.event, 0));
    touch(w.second, w.alias, 64, 0);
}

static void an_event_that_is_long_over_orders(void) {
    touch(w.first, w.pages.at, 64, 1);
    OK(cuEventRecord(w.event, w.first));
    wait_unseen(w.first);
    OK(cuStreamWaitEvent(w.second, w.event, 0)); /* on an idle stream */
    touch(w.second, w.alias, 64, 0);
}

static void an_event_that_is_over_orders_what_is_behind_the_wait(void) {
    struct gate gate;
    touch(w.first, w.pages.at, 64, 1);
    OK(cuEventRecord(w.event, w.first));
    wait_unseen(w.first);
    gate_close(&gate, w.second);
    touch(w.second, w.alias, 64, 0); /* before the wait, which is enqueued while the event is over */
    OK(cuStreamWaitEvent(w.second, w.event, 0));
    gate_open(&gate);
}

static void events_order_from_stream_to_stream(void) {
    touch(w.first, w.pages.at, 64, 1);
    OK(cuEventRecord(w.event, w.first));
    OK(cuStreamWaitEvent(w.third, w.event, 0));
    OK(cuEventRecord(w.event, w.third));
    OK(cuStreamWaitEvent(w.second, w.event, 0));
    touch(w.second, w.alias, 64, 0);
}

static void the_null_stream_orders_behind_blocking_streams(void) {
    CUstream blocking = stream_make(0);
    touch(blocking, w.pages.at, 64, 1);
    touch(NULL, w.alias, 64, 1);
}

static void blocking_streams_order_behind_the_null_stream(void) {
    CUstream one = stream_make(0), other = stream_make(0);
    touch(one, w.pages.at, 64, 1);
    touch(NULL, w.pages.at + PAGE - 1, 1, 1);
    touch(other, w.alias, 64, 1);
}

static void blocking_streams_alone_are_not_ordered(void) {
    CUstream one = stream_make(0), other = stream_make(0);
    touch(one, w.pages.at, 64, 1);
    touch(other, w.alias, 64, 1);
}

static void non_blocking_streams_and_the_null_stream_are_not_ordered(void) {
    touch(w.first, w.pages.at, 64, 1);
    touch(NULL, w.alias, 64, 1);
}

/* ---- edges through the host ---- */

static void synchronising_with_the_event_orders(void) {
    touch(w.first, w.pages.at, 64, 1);
    OK(cuEventRecord(w.event, w.first));
    OK(cuEventSynchronize(w.event));
    touch(w.second, w.alias, 64, 0);
}

static void synchronising_with_an_event_before_does_not_order(void) {
    OK(cuEventRecord(w.event, w.first));
    touch(w.first, w.pages.at, 64, 1);
    OK(cuEventSynchronize(w.event));
    wait_unseen(w.first);
    touch(w.second, w.alias, 64, 0);
}

static void synchronising_with_the_stream_orders(void) {
    touch(w.first, w.pages.at, 64, 1);
    OK(cuStreamSynchronize(w.first));
    touch(w.second, w.alias, 64, 0);
}

static void synchronising_with_another_stream_does_not_order(void) {
    touch(w.first, w.pages.at, 64, 1);
    wait_unseen(w.first);
    OK(cuStreamSynchronize(w.third));
    touch(w.second, w.alias, 64, 0);
}

static void synchronising_with_a_stream_that_waited_orders(void) {
    touch(w.first, w.pages.at, 64, 1);
    OK(cuEventRecord(w.event, w.first));
    OK(cuStreamWaitEvent(w.third, w.event, 0));
    OK(cuStreamSynchronize(w.third));
    touch(w.second, w.alias, 64, 0);
}

static void synchronising_with_the_context_orders(void) {
    touch(w.first, w.pages.at, 64, 1);
    OK(cuCtxSynchronize());
    touch(w.second, w.alias, 64, 0);
}

static void synchronising_with_the_context_orders_behind_streams_that_are_gone(void) {
    touch(w.first, w.pages.at, 64, 1);
    wait_unseen(w.first);
    OK(cuStreamDestroy_v2(w.first));
    OK(cuCtxSynchronize());
    touch(w.second, w.alias, 64, 0);
}

static void destroying_a_stream_does_not_order(void) {
    touch(w.first, w.pages.at, 64, 1);
    wait_unseen(w.first);
    OK(cuStreamDestroy_v2(w.first));
    touch(stream_make(CU_STREAM_NON_BLOCKING), w.alias, 64, 0);
}

static void an_event_query_that_says_done_orders(void) {
    touch(w.first, w.pages.at, 64, 1);
    OK(cuEventRecord(w.event, w.first));
    while (cuEventQuery(w.event) == CUDA_ERROR_NOT_READY) continue;
    touch(w.second, w.alias, 64, 0);
}

static void a_stream_query_that_says_done_orders(void) {
    touch(w.first, w.pages.at, 64, 1);
    while (cuStreamQuery(w.first) == CUDA_ERROR_NOT_READY) continue;
    touch(w.second, w.alias, 64, 0);
}

static void a_query_that_says_not_yet_does_not_order(void) {
    struct gate gate;
    touch(w.first, w.pages.at, 64, 1);
    gate_close(&gate, w.first);
    OK(cuEventRecord(w.event, w.first));
    gate_wait_entered(&gate);
    REFUSED(cuEventQuery(w.event), CUDA_ERROR_NOT_READY);
    REFUSED(cuStreamQuery(w.first), CUDA_ERROR_NOT_READY);
    touch(w.second, w.alias, 64, 0);
    gate_open(&gate);
}

static void what_the_host_learns_orders_nothing_enqueued_before(void) {
    struct gate gate;
    touch(w.first, w.pages.at, 64, 1);
    gate_close(&gate, w.second);
    touch(w.second, w.alias, 64, 0);
    OK(cuStreamSynchronize(w.first));
    gate_open(&gate);
}

static void a_copy_to_pageable_memory_orders(void) {
    unsigned char pageable[64];
    touch(w.first, w.pages.at, 64, 1);
    OK(cuMemcpyDtoHAsync_v2(pageable, w.pages.at, sizeof pageable, w.first));
    touch(w.second, w.alias, 64, 0);
}

/* It may only have reached the driver's staging memory. */
static void a_copy_from_pageable_memory_does_not_order(void) {
    unsigned char pageable[64] = {0};
    OK(cuMemcpyHtoDAsync_v2(w.pages.at, pageable, sizeof pageable, w.first));
    touch(w.second, w.alias, 64, 0);
}

static void *synchronise(void *stream) {
    CUcontext context;
    bool ok = cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS &&
              cuCtxSetCurrent(context) == CUDA_SUCCESS && cuStreamSynchronize(stream) == CUDA_SUCCESS;
    return ok ? stream : NULL;
}

static void what_one_thread_learns_all_know(void) {
    pthread_t thread;
    void *done;
    touch(w.first, w.pages.at, 64, 1);
    assert_int_equal(pthread_create(&thread, NULL, synchronise, w.first), 0);
    pthread_join(thread, &done);
    assert_ptr_equal(done, w.first);
    touch(w.second, w.alias, 64, 0);
}

/* ---- edges by values, and by means of the program's own ---- */

#define FLAG (w.pages.at + PAGE - 64)

static void a_value_orders(void) {
    touch(w.first, w.pages.at, 64, 1);
    OK(cuStreamWriteValue32_v2(w.first, FLAG, 1, CU_STREAM_WRITE_VALUE_DEFAULT));
    OK(cuStreamWaitValue32_v2(w.second, FLAG, 1, CU_STREAM_WAIT_VALUE_GEQ));
    touch(w.second, w.alias, 64, 0);
}

static void a_value_orders_at_any_address(void) {
    touch(w.first, w.pages.at, 64, 1);
    OK(cuStreamWriteValue32_v2(w.first, FLAG, 1, CU_STREAM_WRITE_VALUE_DEFAULT));
    OK(cuStreamWaitValue32_v2(w.second, w.alias + PAGE - 64, 1, CU_STREAM_WAIT_VALUE_GEQ));
    touch(w.second, w.alias, 64, 0);
}

static void a_value_without_its_barrier_does_not_order(void) {
    touch(w.first, w.pages.at, 64, 1);
    OK(cuStreamWriteValue32_v2(w.first, FLAG, 1, CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER));
    OK(cuStreamWaitValue32_v2(w.second, FLAG, 1, CU_STREAM_WAIT_VALUE_GEQ));
    touch(w.second, w.alias, 64, 0);
}

static void a_value_written_before_does_not_order(void) {
    OK(cuStreamWriteValue32_v2(w.first, FLAG, 1, CU_STREAM_WRITE_VALUE_DEFAULT));
    touch(w.first, w.pages.at, 64, 1);
    OK(cuStreamWaitValue32_v2(w.second, FLAG, 1, CU_STREAM_WAIT_VALUE_GEQ));
    touch(w.second, w.alias, 64, 0);
}

static void another_stream_s_value_does_not_order(void) {
    touch(w.first, w.pages.at, 64, 1);
    OK(cuStreamWriteValue32_v2(w.first, FLAG + 8, 1, CU_STREAM_WRITE_VALUE_DEFAULT));
    OK(cuStreamWriteValue32_v2(w.third, FLAG, 1, CU_STREAM_WRITE_VALUE_DEFAULT));
    OK(cuStreamWaitValue32_v2(w.second, FLAG, 1, CU_STREAM_WAIT_VALUE_GEQ));
    touch(w.second, w.alias, 64, 0);
}

/* The host stores the value once it knows; so the simulator takes all that the host knows for known. */
static void a_value_that_the_host_stores_orders_behind_what_it_knows(void) {
    OK(cuStreamWaitValue32_v2(w.second, FLAG, 1, CU_STREAM_WAIT_VALUE_GEQ));
    touch(w.second, w.alias, 64, 0);
    touch(w.first, w.pages.at, 64, 1);
    OK(cuStreamSynchronize(w.first));
    __atomic_store_n((uint32_t *)(uintptr_t)FLAG, 1, __ATOMIC_RELEASE);
}

static void a_value_that_the_host_stores_does_not_order_what_it_does_not_know(void) {
    OK(cuStreamWaitValue32_v2(w.second, FLAG, 1, CU_STREAM_WAIT_VALUE_GEQ));
    touch(w.second, w.alias, 64, 0);
    touch(w.first, w.pages.at, 64, 1);
    wait_unseen(w.first);
    __atomic_store_n((uint32_t *)(uintptr_t)FLAG, 1, __ATOMIC_RELEASE);
}

/* Another process answers a value with one of its own: the answer is behind whatever was signalled. */
static void a_foreign_value_orders_behind_all_values_of_ours(void) {
    OK(cuStreamWaitValue32_v2(w.second, FLAG, 1, CU_STREAM_WAIT_VALUE_GEQ));
    touch(w.second, w.alias, 64, 0);
    touch(w.first, w.pages.at, 64, 1);
    OK(cuStreamWriteValue32_v2(w.first, FLAG + 8, 1, CU_STREAM_WRITE_VALUE_DEFAULT));
    while (__atomic_load_n((uint32_t *)(uintptr_t)(FLAG + 8), __ATOMIC_ACQUIRE) != 1) continue;
    __atomic_store_n((uint32_t *)(uintptr_t)FLAG, 1, __ATOMIC_RELEASE);
}

static void many_values_lose_no_edge(void) {
    uint32_t *flags = host_make(64 * 4096, true);
    touch(w.first, w.pages.at, 64, 1);
    OK(cuStreamWriteValue32_v2(w.first, FLAG, 1, CU_STREAM_WRITE_VALUE_DEFAULT));
    for (size_t i = 0; i < 64 * 1024; i += 16)
        OK(cuStreamWriteValue32_v2(w.third, (uintptr_t)&flags[i], 1, CU_STREAM_WRITE_VALUE_DEFAULT));
    OK(cuStreamWriteValue32_v2(w.third, FLAG + 8, 1, CU_STREAM_WRITE_VALUE_DEFAULT));
    OK(cuStreamWaitValue32_v2(w.second, FLAG + 8, 1, CU_STREAM_WAIT_VALUE_GEQ));
    OK(cuStreamWaitValue32_v2(w.second, FLAG, 1, CU_STREAM_WAIT_VALUE_GEQ));
    touch(w.second, w.alias, 64, 0);
    OK(cuStreamSynchronize(w.third));
    OK(cuStreamSynchronize(w.second));
    OK(cuMemHostUnregister(flags));
    host_destroy(flags, 64 * 4096);
}

static void signal_and_post(void *semaphore) {
    simgpu_signal(semaphore);
    sem_post(semaphore);
}

static void a_host_function_that_signals_orders(void) {
    sem_t done;
    sem_init(&done, 0, 0);
    touch(w.first, w.pages.at, 64, 1);
    OK(cuLaunchHostFunc(w.first, signal_and_post, &done));
    while (sem_wait(&done) != 0) continue;
    simgpu_observe(&done);
    touch(w.second, w.alias, 64, 0);
}

static void a_word_that_the_host_sees_orders_what_observes_it(void) {
    touch(w.first, w.pages.at, 64, 1);
    OK(cuStreamWriteValue32_v2(w.first, FLAG, 1, CU_STREAM_WRITE_VALUE_DEFAULT));
    while (__atomic_load_n((uint32_t *)(uintptr_t)FLAG, __ATOMIC_ACQUIRE) != 1) continue;
    simgpu_observe((void *)(uintptr_t)FLAG);
    touch(w.second, w.alias, 64, 0);
}

static void a_word_that_nothing_observes_does_not_order(void) {
    touch(w.first, w.pages.at, 64, 1);
    OK(cuStreamWriteValue32_v2(w.first, FLAG, 1, CU_STREAM_WRITE_VALUE_DEFAULT));
    while (__atomic_load_n((uint32_t *)(uintptr_t)FLAG, __ATOMIC_ACQUIRE) != 1) continue;
    touch(w.second, w.alias, 64, 0);
}

static void a_signal_of_another_does_not_order(void) {
    sem_t done, other;
    sem_init(&done, 0, 0);
    sem_init(&other, 0, 0);
    touch(w.first, w.pages.at, 64, 1);
    OK(cuLaunchHostFunc(w.first, signal_and_post, &done));
    OK(cuLaunchHostFunc(w.third, signal_and_post, &other));
    while (sem_wait(&done) != 0 || sem_wait(&other) != 0) continue;
    simgpu_observe(&other);
    touch(w.second, w.alias, 64, 0);
}

static void observe(void *semaphore) {
    while (sem_wait(semaphore) != 0) continue;
    simgpu_observe(semaphore);
}

static void a_host_function_that_observes_is_ordered(void) {
    static sem_t known; /* the stream may get to it last */
    sem_init(&known, 0, 0);
    OK(cuLaunchHostFunc(w.second, observe, &known));
    touch(w.second, w.alias, 64, 0);
    touch(w.first, w.pages.at, 64, 1);
    OK(cuStreamSynchronize(w.first));
    simgpu_signal(&known);
    sem_post(&known);
}

static void host_function_touches(CUstream stream, CUdeviceptr address, int writes) {
    static sem_t ignored;
    sem_init(&ignored, 0, 0);
    assert_int_equal(simgpu_announce(&(struct simgpu_access){address, 64, writes}, 1), 0);
    OK(cuLaunchHostFunc(stream, post, &ignored));
}

static void a_host_function_is_in_its_stream_s_order(void) {
    touch(w.first, w.pages.at, 64, 1);
    host_function_touches(w.first, w.alias, 1);
    touch(w.first, w.pages.at, 64, 0);
}

static void a_host_function_is_in_no_other_stream_s_order(void) {
    touch(w.first, w.pages.at, 64, 0);
    host_function_touches(w.second, w.alias, 1);
}

static const struct {
    const char *name;
    void (*run)(void);
    bool reports;
} cases[] = {
#define ORDERED(function) {#function, function, false}
#define UNORDERED(function) {#function, function, true}
    ORDERED(an_event_orders),
    UNORDERED(nothing_orders),
    UNORDERED(luck_does_not_order),
    ORDERED(one_stream_orders),
    UNORDERED(an_event_recorded_before_does_not_order),
    UNORDERED(an_event_waited_for_later_does_not_order),
    ORDERED(an_event_recorded_anew_orders_as_it_was),
    UNORDERED(an_event_recorded_elsewhere_does_not_order),
    ORDERED(an_event_that_is_long_over_orders),
    UNORDERED(an_event_that_is_over_orders_what_is_behind_the_wait),
    ORDERED(events_order_from_stream_to_stream),
    ORDERED(the_null_stream_orders_behind_blocking_streams),
    ORDERED(blocking_streams_order_behind_the_null_stream),
    UNORDERED(blocking_streams_alone_are_not_ordered),
    UNORDERED(non_blocking_streams_and_the_null_stream_are_not_ordered),
    ORDERED(synchronising_with_the_event_orders),
    UNORDERED(synchronising_with_an_event_before_does_not_order),
    ORDERED(synchronising_with_the_stream_orders),
    UNORDERED(synchronising_with_another_stream_does_not_order),
    ORDERED(synchronising_with_a_stream_that_waited_orders),
    ORDERED(synchronising_with_the_context_orders),
    ORDERED(synchronising_with_the_context_orders_behind_streams_that_are_gone),
    UNORDERED(destroying_a_stream_does_not_order),
    ORDERED(an_event_query_that_says_done_orders),
    ORDERED(a_stream_query_that_says_done_orders),
    UNORDERED(a_query_that_says_not_yet_does_not_order),
    UNORDERED(what_the_host_learns_orders_nothing_enqueued_before),
    ORDERED(a_copy_to_pageable_memory_orders),
    UNORDERED(a_copy_from_pageable_memory_does_not_order),
    ORDERED(what_one_thread_learns_all_know),
    ORDERED(a_value_orders),
    ORDERED(a_value_orders_at_any_address),
    UNORDERED(a_value_without_its_barrier_does_not_order),
    UNORDERED(a_value_written_before_does_not_order),
    UNORDERED(another_stream_s_value_does_not_order),
    ORDERED(a_value_that_the_host_stores_orders_behind_what_it_knows),
    UNORDERED(a_value_that_the_host_stores_does_not_order_what_it_does_not_know),
    ORDERED(a_foreign_value_orders_behind_all_values_of_ours),
    ORDERED(many_values_lose_no_edge),
    ORDERED(a_word_that_the_host_sees_orders_what_observes_it),
    UNORDERED(a_word_that_nothing_observes_does_not_order),
    ORDERED(a_host_function_that_signals_orders),
    UNORDERED(a_signal_of_another_does_not_order),
    ORDERED(a_host_function_that_observes_is_ordered),
    ORDERED(a_host_function_is_in_its_stream_s_order),
    UNORDERED(a_host_function_is_in_no_other_stream_s_order),
};

/* Each a few times, as the two sides may start in either order. */
static void what_orders_and_what_does_not(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int round = 0; round < 5; round++) {
            world_make();
            cases[i].run();
            assert_reported(cases[i].reports, cases[i].name);
        }
}

/* ---- which accesses conflict ---- */

static void one_of_both_writes(void **state) {
    (void)state;
    for (int kind = 0; kind < 4; kind++) {
        world_make();
        touch(w.first, w.pages.at, 64, kind & 1);
        touch(w.second, w.alias, 64, kind & 2);
        assert_reported(kind != 0, "reads and writes");
    }
}

static void both_touch_the_same_byte(void **state) {
    (void)state;
    for (size_t gap = 0; gap < 2; gap++) {
        world_make();
        touch(w.first, w.pages.at, 64, 1);
        touch(w.second, w.alias + 63 + gap, 64, 1);
        assert_reported(gap == 0, "bytes");
    }
}

static void copies_fills_and_values_count_as_kernels_do(void **state) {
    (void)state;
    for (int kind = 0; kind < 7; kind++) {
        world_make();
        unsigned char *pinned = host_make(4096, true);
        touch(w.first, w.pages.at, 64, kind != 2 && kind != 6);
        switch (kind) {
        case 0: OK(cuMemcpyDtoDAsync_v2(w.alias + 4096, w.alias, 64, w.second)); break;
        case 1: OK(cuMemcpyDtoHAsync_v2(pinned, w.alias, 64, w.second)); break;
        case 2: OK(cuMemcpyHtoDAsync_v2(w.alias, pinned, 64, w.second)); break;
        case 3: OK(cuMemsetD8Async(w.alias, 0, 64, w.second)); break;
        case 4: OK(cuStreamWaitValue32_v2(w.second, w.alias, 0, CU_STREAM_WAIT_VALUE_GEQ)); break;
        case 5: OK(cuMemcpyAsync(w.alias + 4096, w.alias, 64, w.second)); break;
        case 6: OK(cuStreamWriteValue32_v2(w.second, w.alias, 1, CU_STREAM_WRITE_VALUE_DEFAULT)); break;
        }
        assert_reported(true, "kind");
        fresh_device(NULL);
        host_destroy(pinned, 4096);
    }
}

static void every_page_and_access_is_looked_at(void **state) {
    (void)state;
    world_make();
    CUdeviceptr long_range = range_make(3 * PAGE);
    for (size_t i = 0; i < 3; i++)
        OK(cuMemMap(long_range + i * PAGE, PAGE, 0, i == 2 ? w.pages.handles[0] : handle_make(PAGE), 0));
    OK(cuMemSetAccess(long_range, 3 * PAGE, &read_write, 1));
    touch(w.first, w.pages.at + PAGE - 1, 1, 0);
    OK(simgpu_launch(w.second, &(struct simgpu_kernel){
                                   .n_accesses = 2,
                                   .accesses = {{long_range, 64, 0}, {long_range + 64, 3 * PAGE - 64, 1}}}));
    assert_reported(true, "pages");
}

static void an_operation_is_ordered_with_itself(void **state) {
    (void)state;
    world_make();
    OK(simgpu_launch(w.first, &(struct simgpu_kernel){.n_accesses = 2,
                                                      .accesses = {{w.pages.at, 64, 0}, {w.alias, 64, 1}}}));
    assert_reported(false, "itself");
}

/* What is ordered with the last access alone is unordered with those before that the last was not ordered
 * with. */
static void earlier_accesses_are_remembered(void **state) {
    (void)state;
    world_make();
    touch(w.third, w.alias, 64, 0); /* unordered with all that follows */
    touch(w.first, w.pages.at, 64, 0);
    for (int i = 0; i < 100; i++) touch(w.first, w.pages.at, 64, 0);
    OK(cuEventRecord(w.event, w.first));
    OK(cuStreamWaitEvent(w.second, w.event, 0));
    touch(w.second, w.pages.at, 64, 1);
    assert_reported(true, "earlier");
}

/* Two buffers change hands between streams by events, as slots do, for longer than a history is long. */
static void a_long_ordered_program_is_never_reported(void **state) {
    (void)state;
    world_make();
    CUevent read;
    OK(cuEventCreate(&read, CU_EVENT_DISABLE_TIMING));
    for (int i = 0; i < 5000; i++) {
        CUdeviceptr at = i % 2 ? w.alias : w.pages.at;
        OK(cuStreamWaitEvent(w.first, read, 0));
        touch(w.first, at + (size_t)(i % 7) * 4096, 8192, 1);
        OK(cuEventRecord(w.event, w.first));
        OK(cuStreamWaitEvent(w.second, w.event, 0));
        touch(w.second, at, PAGE, 0);
        OK(cuEventRecord(read, w.second));
    }
    assert_reported(false, "long");
}

static void streams_that_come_and_go_are_told_apart(void **state) {
    (void)state;
    world_make();
    for (int i = 0; i < 300; i++) {
        CUstream stream = stream_make(CU_STREAM_NON_BLOCKING);
        OK(cuStreamWaitEvent(stream, w.event, 0));
        touch(stream, i % 2 ? w.alias : w.pages.at, PAGE, 1);
        OK(cuEventRecord(w.event, stream));
        OK(cuStreamDestroy_v2(stream));
    }
    touch(w.first, w.pages.at, 64, 1);
    assert_reported(true, "the last stream's event was not waited for");
}

/* Unmapping is behind all that used the map (fact 3), and a new map starts with nothing. */
static void a_map_s_accesses_end_with_it(void **state) {
    (void)state;
    world_make();
    touch(w.first, w.alias, 64, 1);
    wait_unseen(w.first);
    OK(cuMemUnmap(w.alias, PAGE));
    touch(w.second, w.pages.at, 64, 1);
    OK(cuMemMap(w.alias, PAGE, 0, w.pages.handles[0], 0));
    OK(cuMemSetAccess(w.alias, PAGE, &read_write, 1));
    assert_reported(false, "unmapped");
    touch(w.first, w.alias, 64, 1);
    touch(w.second, w.pages.at, 64, 1);
    assert_reported(true, "mapped again");
}

static void what_was_accessed_before_the_second_map_counts(void **state) {
    (void)state;
    world_make();
    OK(cuMemUnmap(w.alias, PAGE));
    touch(w.first, w.pages.at, 64, 1);
    wait_unseen(w.first);
    OK(cuMemMap(w.alias, PAGE, 0, w.pages.handles[0], 0));
    OK(cuMemSetAccess(w.alias, PAGE, &read_write, 1));
    touch(w.second, w.alias, 64, 0);
    assert_reported(true, "before the second map");
}

/* ---- reports ---- */

static void assert_names(const char *text, const char *part) {
    if (!strstr(text, part)) fail_msg("\"%s\" is not in \"%s\"", part, text);
}

static void a_report_names_both_operations(void **state) {
    (void)state;
    char address[64];
    unsigned char *pinned = host_make(4096, false);
    world_make();
    OK(cuMemHostRegister_v2(pinned, 4096, 0));
    assert_int_equal(simgpu_stream_name(w.first, "compute"), 0);
    assert_int_equal(simgpu_stream_name((void *)(uintptr_t)0x1234, "none"), -1);
    simgpu_annotate("block 7");
    touch(w.first, w.pages.at + 16, 64, 0);
    wait_unseen(w.first);
    simgpu_annotate(NULL);
    OK(cuMemcpyHtoDAsync_v2(w.alias, pinned, 64, w.second));
    assert_reported(true, "names");
    struct simgpu_unordered unordered = unordered_now();
    assert_names(unordered.text, "reader (block 7) on stream \"compute\" reads [");
    assert_names(unordered.text, "copy to device on stream \"stream 2\" writes [");
    snprintf(address, sizeof address, "[%#llx, %#llx)", w.pages.at + 16, w.pages.at + 80);
    assert_names(unordered.text, address);
    snprintf(address, sizeof address, "[%#llx, %#llx)", w.alias, w.alias + 64);
    assert_names(unordered.text, address);
    simgpu_reset();
    host_destroy(pinned, 4096);
}

static void a_refused_operation_is_not_run(void **state) {
    (void)state;
    world_make();
    touch(w.first, w.pages.at, 64, 0);
    wait_unseen(w.first);
    OK(cuMemsetD8Async(w.alias, 9, 64, w.second));
    assert_reported(true, "run");
    assert_int_equal(bytes_at(w.pages.at)[0], 0);
    world_make();
    touch(w.first, w.pages.at, 64, 0);
    touch(w.first, w.alias, 64, 1);
    assert_reported(false, "a reset forgets");
}

static void an_announcement_is_for_one_launch(void **state) {
    (void)state;
    static sem_t ignored;
    struct simgpu_access access = {w.alias, 64, 1}, wrong = {UINT64_MAX, 64, 1};
    world_make();
    sem_init(&ignored, 0, 0);
    access.address = w.alias;
    assert_int_equal(simgpu_announce(&wrong, 1), CUDA_ERROR_INVALID_VALUE);
    assert_int_equal(simgpu_announce(&access, SIMGPU_MAX_ACCESSES + 1), CUDA_ERROR_INVALID_VALUE);
    touch(w.first, w.pages.at, 64, 0);
    assert_int_equal(simgpu_announce(&access, 1), 0);
    assert_int_equal(simgpu_fail_nth("cuLaunchHostFunc", 1, CUDA_ERROR_UNKNOWN), 0);
    REFUSED(cuLaunchHostFunc(w.second, post, &ignored), CUDA_ERROR_UNKNOWN);
    OK(cuLaunchHostFunc(w.second, post, &ignored));
    assert_reported(false, "announced for a launch that failed");
    OK(cuMemUnmap(w.alias, PAGE));
    assert_int_equal(simgpu_announce(&access, 1), 0);
    OK(cuLaunchHostFunc(w.second, post, &ignored));
    REFUSED(cuStreamSynchronize(w.second), CUDA_ERROR_ILLEGAL_ADDRESS); /* as a kernel's access would be */
}

/* ---- races through one address, where they are looked for ---- */

static void races_are_looked_for_on_demand(void **state) {
    (void)state;
    for (int on = 0; on < 2; on++) {
        world_make();
        simgpu_set_races(on);
        touch(w.first, w.pages.at, 64, 1);
        touch(w.second, w.pages.at, 64, 0);
        assert_int_equal(cuCtxSynchronize(), on ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS);
        assert_int_equal(unordered_now().races, on);
        assert_int_equal(unordered_now().aliases, 0);
    }
    world_make();
    simgpu_set_races(1);
    touch(w.first, w.pages.at, 64, 1);
    OK(cuEventRecord(w.event, w.first));
    OK(cuStreamWaitEvent(w.second, w.event, 0));
    touch(w.second, w.pages.at, 64, 0);
    touch(w.third, w.pages.at + 64, 64, 1);
    assert_reported(false, "ordered, or other bytes");
}

static void races_in_registered_memory(void **state) {
    (void)state;
    for (int ordered = 0; ordered < 2; ordered++) {
        unsigned char *pinned = host_make(2 * 4096, false);
        world_make();
        simgpu_set_races(1);
        OK(cuMemHostRegister_v2(pinned, 4096, 0));
        OK(cuMemHostRegister_v2(pinned + 4096, 4096, 0));
        OK(cuMemcpyDtoHAsync_v2(pinned + 4096, w.pages.at, 64, w.first));
        OK(cuEventRecord(w.event, w.first));
        if (ordered) OK(cuStreamWaitEvent(w.second, w.event, 0));
        OK(cuMemcpyHtoDAsync_v2(w.alias + 4096, pinned, 64, w.second));
        OK(cuMemcpyHtoDAsync_v2(w.alias + 4096, pinned + 4096, 64, w.second));
        assert_int_equal(cuCtxSynchronize(), ordered ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS);
        assert_int_equal(unordered_now().races, !ordered);
        simgpu_reset();
        host_destroy(pinned, 2 * 4096);
    }
}

static void values_do_not_race_with_values(void **state) {
    (void)state;
    world_make();
    simgpu_set_races(1);
    OK(cuStreamWriteValue32_v2(w.first, FLAG, 1, CU_STREAM_WRITE_VALUE_DEFAULT));
    OK(cuStreamWriteValue32_v2(w.second, w.alias + PAGE - 64, 2, CU_STREAM_WRITE_VALUE_DEFAULT));
    OK(cuStreamWaitValue32_v2(w.third, FLAG, 1, CU_STREAM_WAIT_VALUE_GEQ));
    assert_reported(false, "values");
}

static void an_unmap_that_is_lucky_is_a_race(void **state) {
    (void)state;
    for (int kind = 0; kind < 3; kind++) {
        world_make();
        simgpu_set_races(kind > 0);
        touch(w.first, w.alias, 64, 0);
        wait_unseen(w.first);
        if (kind == 2) OK(cuStreamSynchronize(w.first));
        assert_int_equal(cuMemUnmap(w.alias, PAGE), kind == 1 ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS);
        assert_int_equal(unordered_now().unmaps, kind == 1);
        assert_int_equal(cuCtxSynchronize(), kind == 1 ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS);
    }
}

static void the_environment_looks_for_races(void **state) {
    (void)state;
    simgpu_reset();
    setenv("FCDP_SIM_RACES", "1", 1);
    world_make();
    unsetenv("FCDP_SIM_RACES");
    touch(w.first, w.pages.at, 64, 1);
    touch(w.second, w.pages.at, 64, 1);
    REFUSED(cuCtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS);
    assert_int_equal(unordered_now().races, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        test(what_orders_and_what_does_not),
        test(one_of_both_writes),
        test(both_touch_the_same_byte),
        test(copies_fills_and_values_count_as_kernels_do),
        test(every_page_and_access_is_looked_at),
        test(an_operation_is_ordered_with_itself),
        test(earlier_accesses_are_remembered),
        test(a_long_ordered_program_is_never_reported),
        test(streams_that_come_and_go_are_told_apart),
        test(a_map_s_accesses_end_with_it),
        test(what_was_accessed_before_the_second_map_counts),
        test(a_report_names_both_operations),
        test(a_refused_operation_is_not_run),
        test(an_announcement_is_for_one_launch),
        test(races_are_looked_for_on_demand),
        test(races_in_registered_memory),
        test(values_do_not_race_with_values),
        test(an_unmap_that_is_lucky_is_a_race),
        test(the_environment_looks_for_races),
    };
    return cmocka_run_group_tests_name("simgpu order", tests, NULL, NULL);
}
