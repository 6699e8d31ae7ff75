/* What orders two accesses: each edge is shown to order two accesses through different addresses, and each
 * is shown to be what did it, since without it there is a report. No test depends on when the operations
 * really run. */
#include <pthread.h>

#include "tests/simgpu/order_world.h"

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
    static struct gate gate; /* the stream may leave it last */
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
    static struct gate gate; /* the stream may leave it last */
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
    static struct gate gate; /* the stream may leave it last */
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

int main(void) {
    const struct CMUnitTest tests[] = {
        test(what_orders_and_what_does_not),
    };
    return cmocka_run_group_tests_name("simgpu order", tests, NULL, NULL);
}
