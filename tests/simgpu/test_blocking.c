/* Calls that wait for the device: which count, for which thread, from where, and how long they took. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tests/simgpu/support.h"

#define MS ((uint64_t)1000000)
#define VISIBLE __attribute__((visibility("default"), noinline))

static CUstream stream_make(void) {
    CUstream stream;
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    return stream;
}

static CUevent event_make(void) {
    CUevent event;
    OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    return event;
}

static void busy(CUstream stream, uint64_t duration_ns) {
    OK(simgpu_launch(stream, &(struct simgpu_kernel){.duration_ns = duration_ns}));
}

static struct simgpu_blocking total(void) {
    struct simgpu_blocking sum;
    simgpu_blocking_total(0, &sum);
    return sum;
}

static void assert_total(unsigned long calls, unsigned long waits) {
    struct simgpu_blocking sum = total();
    assert_int_equal(sum.calls, calls);
    assert_int_equal(sum.waits, waits);
    assert_true(waits == 0 ? sum.wait_ns == 0 : sum.wait_ns > 0);
    assert_true(sum.longest_ns <= sum.wait_ns);
}

static void what_only_enqueues_or_asks_does_not_count(void **state) {
    (void)state;
    struct pages pages = pages_make(1);
    unsigned char *pinned = host_make(4096, true);
    CUstream stream = stream_make();
    CUevent event = event_make();
    busy(stream, MS);
    OK(cuMemcpyHtoDAsync_v2(pages.at, pinned, 4096, stream));
    OK(cuMemcpyDtoHAsync_v2(pinned, pages.at, 4096, stream));
    OK(cuMemcpyDtoDAsync_v2(pages.at, pages.at + 4096, 4096, stream));
    OK(cuMemsetD8Async(pages.at, 0, 64, stream));
    OK(cuEventRecord(event, stream));
    OK(cuStreamWaitEvent(stream, event, 0));
    while (cuStreamQuery(stream) != CUDA_SUCCESS || cuEventQuery(event) != CUDA_SUCCESS) continue;
    pages_destroy(&pages);
    assert_total(0, 0);
    OK(cuMemHostUnregister(pinned));
    assert_total(1, 0); /* it would have waited for a use */
    host_destroy(pinned, 4096);
}

static void a_call_waits_when_there_is_something_to_wait_for(void **state) {
    (void)state;
    CUstream stream = stream_make();
    CUevent event = event_make();
    OK(cuStreamSynchronize(stream));
    OK(cuEventSynchronize(event));
    OK(cuCtxSynchronize());
    assert_total(3, 0);
    unsigned long n_calls = 3;
    for (int i = 0; i < 3; i++) {
        unsigned long before = total().waits;
        /* again where this thread had no core until the kernel had ended, or almost */
        for (int tries = 0; tries < 100 && (total().waits == before || total().longest_ns < 5 * MS);
             tries++) {
            unsigned long n_waits = total().waits;
            busy(stream, 10 * MS);
            OK(cuEventRecord(event, stream));
            OK(i == 0   ? cuStreamSynchronize(stream)
               : i == 1 ? cuEventSynchronize(event)
                        : cuCtxSynchronize());
            assert_in_range(total().waits, n_waits, n_waits + 1);
            assert_total(++n_calls, total().waits);
        }
        assert_true(total().waits > before && total().longest_ns >= 5 * MS);
    }
    simgpu_blocking_reset();
    assert_total(0, 0);
}

/* Whether or not there was something to wait for, the flags decide: the
 * caller cannot know that there is nothing. */
static void a_call_may_spin_unless_its_event_lets_it_sleep(void **state) {
    (void)state;
    CUstream stream = stream_make();
    CUevent spins = event_make(), sleeps;
    OK(cuEventCreate(&sleeps, CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC));
    busy(stream, MS);
    OK(cuEventRecord(sleeps, stream));
    OK(cuEventSynchronize(sleeps));
    OK(cuEventSynchronize(sleeps));
    OK(cuCtxSynchronize()); /* the framework's flags say */
    assert_int_equal(total().spins, 0);
    busy(stream, 100 * MS);
    OK(cuEventRecord(spins, stream));
    OK(cuEventSynchronize(spins));
    OK(cuEventSynchronize(spins));
    OK(cuEventSynchronize(sleeps)); /* the thread's next call is counted anew */
    assert_int_equal(total().spins, 2);
    OK(cuStreamSynchronize(stream));
    assert_int_equal(total().spins, 3);
    assert_int_equal(total().calls, 7);
    OK(cuEventDestroy_v2(spins));
    OK(cuEventDestroy_v2(sleeps));
    OK(cuStreamDestroy_v2(stream));
}

static void copies_of_pageable_memory_wait(void **state) {
    (void)state;
    struct pages pages = pages_make(1);
    unsigned char pageable[64] = {0};
    struct simgpu_blocking rows[4];
    OK(cuMemcpyHtoDAsync_v2(pages.at, pageable, sizeof pageable, NULL));
    OK(cuMemcpyDtoHAsync_v2(pageable, pages.at, sizeof pageable, NULL));
    assert_total(2, 2);
    assert_int_equal(simgpu_blocking_list(rows, 4), 2);
    for (int i = 0; i < 2; i++)
        assert_true(strcmp(rows[i].entry, "cuMemcpyHtoDAsync_v2") == 0 ||
                    strcmp(rows[i].entry, "cuMemcpyDtoHAsync_v2") == 0);
    assert_string_not_equal(rows[0].entry, rows[1].entry);
}

static void unregistering_waits_for_a_use(void **state) {
    (void)state;
    struct pages pages = pages_make(1);
    unsigned char *pinned = host_make(4096, true);
    busy(NULL, 100 * MS);
    OK(cuMemcpyHtoDAsync_v2(pages.at, pinned, 4096, NULL));
    OK(cuMemHostUnregister(pinned));
    assert_total(1, 1);
    host_destroy(pinned, 4096);
}

static void the_context_s_end_waits(void **state) {
    (void)state;
    busy(stream_make(), 100 * MS);
    OK(cuDevicePrimaryCtxRelease_v2(0));
    assert_total(1, 1);
}

static void refused_calls_do_not_count(void **state) {
    (void)state;
    assert_int_equal(simgpu_fail_nth("cuStreamSynchronize", 1, CUDA_ERROR_UNKNOWN), 0);
    REFUSED(cuStreamSynchronize(NULL), CUDA_ERROR_UNKNOWN);
    assert_total(0, 0);
}

/* ---- which thread, and where ---- */

void waits_here(CUstream stream);
void waits_there(CUstream stream);

VISIBLE void waits_here(CUstream stream) {
    OK(cuStreamSynchronize(stream));
    __asm__ volatile(""); /* no tail call: it is in the stack */
}

VISIBLE void waits_there(CUstream stream) {
    busy(stream, 100 * MS);
    waits_here(stream);
    __asm__ volatile("");
}

static void a_row_names_where_the_call_came_from(void **state) {
    (void)state;
    CUstream stream = stream_make();
    struct simgpu_blocking rows[4];
    for (int i = 0; i < 5; i++) waits_here(stream);
    simgpu_annotate("agreement");
    waits_there(stream);
    simgpu_annotate(NULL);
    assert_int_equal(simgpu_blocking_list(rows, 4), 2);
    assert_string_equal(rows[0].label, "agreement"); /* the longest wait first */
    assert_int_equal(rows[0].calls, 1);
    assert_int_equal(rows[0].waits, 1);
    assert_string_equal(rows[0].entry, "cuStreamSynchronize");
    assert_int_equal(rows[0].thread, syscall(SYS_gettid));
    if (strncmp(rows[0].site, "waits_here (test_simgpu_blocking) < waits_there (", 49) != 0)
        fail_msg("%s", rows[0].site);
    assert_string_equal(rows[1].label, "");
    assert_int_equal(rows[1].calls, 5);
    assert_int_equal(rows[1].waits, 0);
    assert_null(strstr(rows[1].site, "waits_there"));
}

struct other {
    CUcontext context;
    CUstream stream;
    int thread;
};

static void *other_thread(void *argument) {
    struct other *other = argument;
    if (cuCtxSetCurrent(other->context) || cuStreamSynchronize(other->stream) ||
        cuStreamSynchronize(other->stream))
        return NULL;
    other->thread = (int)syscall(SYS_gettid);
    return other;
}

static void threads_are_counted_apart(void **state) {
    (void)state;
    struct other other = {.stream = stream_make()};
    struct simgpu_blocking sum;
    pthread_t thread;
    void *ended;
    OK(cuCtxGetCurrent(&other.context));
    OK(cuCtxSynchronize());
    assert_int_equal(pthread_create(&thread, NULL, other_thread, &other), 0);
    pthread_join(thread, &ended);
    assert_ptr_equal(ended, &other);
    assert_total(1, 0);
    simgpu_blocking_total(other.thread, &sum);
    assert_int_equal(sum.calls, 2);
    assert_int_equal(sum.thread, other.thread);
    simgpu_blocking_total(-1, &sum);
    assert_int_equal(sum.calls, 3);
}

/* More rows than there is room for: the sum stays right. */
static void rows_are_bounded_and_nothing_is_lost(void **state) {
    (void)state;
    enum { N = 4000 };
    static struct simgpu_blocking rows[N];
    char label[32];
    for (int i = 0; i < N; i++) {
        snprintf(label, sizeof label, "label %d", i);
        simgpu_annotate(label);
        OK(cuStreamSynchronize(NULL));
    }
    simgpu_annotate(NULL);
    size_t n = simgpu_blocking_list(rows, N);
    assert_true(n < N);
    unsigned long n_calls = 0;
    for (size_t i = 0; i < n; i++) n_calls += rows[i].calls;
    assert_int_equal(n_calls, N);
    assert_string_equal(rows[0].entry, "others");
    struct simgpu_blocking sum;
    simgpu_blocking_total(-1, &sum);
    assert_int_equal(sum.calls, N);
}

static void calls_are_counted_in_a_window(void **state) {
    (void)state;
    struct pages pages = pages_make(2);
    assert_int_equal(simgpu_calls("cuMemMap"), 2);
    assert_int_equal(simgpu_fail_nth("cuMemCreate", 2, CUDA_ERROR_OUT_OF_MEMORY), 0);
    simgpu_calls_reset();
    OK(cuMemsetD8Async(pages.at, 0, 64, NULL));
    assert_int_equal(simgpu_calls("cuMemMap") + simgpu_calls("cuMemUnmap") + simgpu_calls("cuMemCreate") +
                         simgpu_calls("cuMemSetAccess"),
                     0);
    assert_int_equal(simgpu_calls(NULL), 1);
    CUmemGenericAllocationHandle handle;
    OK(cuMemCreate(&handle, PAGE, &device_memory, 0));
    REFUSED(cuMemCreate(&handle, PAGE, &device_memory, 0), CUDA_ERROR_OUT_OF_MEMORY);
    assert_int_equal(simgpu_calls("cuMemCreate"), 2);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        test(what_only_enqueues_or_asks_does_not_count),
        test(a_call_waits_when_there_is_something_to_wait_for),
        test(a_call_may_spin_unless_its_event_lets_it_sleep),
        test(copies_of_pageable_memory_wait),
        test(unregistering_waits_for_a_use),
        test(the_context_s_end_waits),
        test(refused_calls_do_not_count),
        test(a_row_names_where_the_call_came_from),
        test(threads_are_counted_apart),
        test(rows_are_bounded_and_nothing_is_lost),
        test(calls_are_counted_in_a_window),
    };
    return cmocka_run_group_tests_name("simgpu blocking", tests, NULL, NULL);
}
