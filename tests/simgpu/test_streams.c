/* Streams, events, values in memory, host functions, and illegal accesses of pending work. */
#include <stdatomic.h>
#include <string.h>

#include "tests/simgpu/support.h"

static CUstream stream_make(unsigned flags) {
    CUstream stream;
    OK(cuStreamCreate(&stream, flags));
    return stream;
}

static CUevent event_make(void) {
    CUevent event;
    OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    return event;
}

/* Host functions that note the order in which they ran. */
struct log {
    atomic_uint n;
    unsigned seen[256];
};

struct note {
    struct log *log;
    unsigned number;
};

static void note_function(void *argument) {
    struct note *note = argument;
    note->log->seen[atomic_fetch_add(&note->log->n, 1)] = note->number;
}

static void note_push(CUstream stream, struct note *note, struct log *log, unsigned number) {
    *note = (struct note){log, number};
    OK(cuLaunchHostFunc(stream, note_function, note));
}

static void a_stream_keeps_order(void **state) {
    (void)state;
    CUstream stream = stream_make(CU_STREAM_NON_BLOCKING);
    struct log log = {0};
    struct note notes[256];
    for (unsigned i = 0; i < 256; i++) note_push(stream, &notes[i], &log, i);
    OK(cuStreamSynchronize(stream));
    for (unsigned i = 0; i < 256; i++) assert_int_equal(log.seen[i], i);
}

static void query_tells_pending_from_done(void **state) {
    (void)state;
    CUstream stream = stream_make(CU_STREAM_NON_BLOCKING);
    CUevent event = event_make();
    struct gate gate;
    OK(cuEventQuery(event)); /* never recorded */
    OK(cuEventSynchronize(event));
    OK(cuStreamQuery(stream));
    gate_close(&gate, stream);
    OK(cuEventRecord(event, stream));
    REFUSED(cuStreamQuery(stream), CUDA_ERROR_NOT_READY);
    REFUSED(cuEventQuery(event), CUDA_ERROR_NOT_READY);
    gate_open(&gate);
    OK(cuEventSynchronize(event));
    OK(cuEventQuery(event));
    OK(cuStreamSynchronize(stream));
    OK(cuStreamQuery(stream));
}

/* Of a copy of 64 KiB at 0.001 GB/s: 65.5 ms, on top of what came before it. */
static void elapsed_time_is_the_modelled_one(void **state) {
    (void)state;
    enum { BYTES = 65536 };
    static _Alignas(4096) char host[BYTES];
    CUstream stream = stream_make(CU_STREAM_NON_BLOCKING);
    CUevent from, to, untimed = event_make();
    struct pages pages = pages_make(1);
    struct gate gate;
    float ms = -1;
    simgpu_set_pcie(0.001);
    OK(cuMemHostRegister_v2(host, BYTES, 0));
    OK(cuEventCreate(&from, CU_EVENT_DEFAULT));
    OK(cuEventCreate(&to, CU_EVENT_BLOCKING_SYNC));
    REFUSED(cuEventElapsedTime_v2(&ms, from, to), CUDA_ERROR_INVALID_HANDLE); /* never recorded */
    gate_close(&gate, stream);
    OK(cuEventRecord(from, stream));
    OK(cuMemcpyHtoDAsync_v2(pages.at, host, BYTES, stream));
    OK(cuEventRecord(to, stream));
    OK(cuEventRecord(untimed, stream));
    REFUSED(cuEventElapsedTime_v2(&ms, from, to), CUDA_ERROR_NOT_READY);
    REFUSED(cuEventElapsedTime_v2(&ms, from, untimed), CUDA_ERROR_INVALID_HANDLE);
    REFUSED(cuEventElapsedTime_v2(NULL, from, to), CUDA_ERROR_INVALID_VALUE);
    gate_open(&gate);
    OK(cuEventSynchronize(to));
    OK(cuEventElapsedTime_v2(&ms, from, to));
    assert_true(ms > 65 && ms < 66);
    OK(cuEventElapsedTime_v2(&ms, to, from));
    assert_true(ms > -66 && ms < -65);
    OK(cuEventDestroy_v2(from));
    REFUSED(cuEventElapsedTime_v2(&ms, from, to), CUDA_ERROR_INVALID_HANDLE);
}

static void nobody_asks_or_waits_during_a_capture(void **state) {
    (void)state;
    CUstream captured = stream_make(CU_STREAM_NON_BLOCKING), other = stream_make(CU_STREAM_NON_BLOCKING);
    CUevent event = event_make();
    CUstreamCaptureStatus status;
    OK(cuEventRecord(event, other));
    assert_int_equal(simgpu_capture(captured, 0), -1);
    assert_int_equal(simgpu_capture(NULL, 1), -1);
    assert_int_equal(simgpu_capture(captured, 1), 0);
    assert_int_equal(simgpu_capture(captured, 1), -1);
    OK(cuStreamIsCapturing(captured, &status));
    assert_int_equal(status, CU_STREAM_CAPTURE_STATUS_ACTIVE);
    OK(cuStreamIsCapturing(other, &status));
    assert_int_equal(status, CU_STREAM_CAPTURE_STATUS_NONE);
    OK(cuEventRecord(event, other));
    assert_int_equal(simgpu_capture(captured, 0), 0);
    for (int i = 0; i < 5; i++) {
        assert_int_equal(simgpu_capture(captured, 1), 0);
        CUresult result = i == 0   ? cuStreamQuery(other)
                          : i == 1 ? cuStreamSynchronize(other)
                          : i == 2 ? cuEventQuery(event)
                          : i == 3 ? cuEventSynchronize(event)
                                   : cuCtxSynchronize();
        assert_int_equal(result, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        OK(cuStreamIsCapturing(captured, &status));
        assert_int_equal(status, CU_STREAM_CAPTURE_STATUS_INVALIDATED);
        assert_int_equal(simgpu_capture(captured, 0), 1);
    }
    OK(cuStreamSynchronize(other));
    OK(cuEventSynchronize(event));
}

static void a_relaxed_thread_breaks_no_capture(void **state) {
    (void)state;
    CUstream captured = stream_make(CU_STREAM_NON_BLOCKING), other = stream_make(CU_STREAM_NON_BLOCKING);
    CUevent event = event_make();
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    OK(cuEventRecord(event, other));
    OK(cuThreadExchangeStreamCaptureMode(&mode));
    assert_int_equal(mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
    assert_int_equal(simgpu_capture(captured, 1), 0);
    OK(cuEventQuery(event));
    OK(cuStreamSynchronize(other));
    OK(cuThreadExchangeStreamCaptureMode(&mode));
    assert_int_equal(mode, CU_STREAM_CAPTURE_MODE_RELAXED);
    REFUSED(cuEventQuery(event), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    assert_int_equal(simgpu_capture(captured, 0), 1);
    mode = (CUstreamCaptureMode)3;
    REFUSED(cuThreadExchangeStreamCaptureMode(&mode), CUDA_ERROR_INVALID_VALUE);
}

/* There is no such work in the graph: an event of before, or of another stream, orders nothing there. */
static void a_capture_knows_its_own_events_alone(void **state) {
    (void)state;
    CUstream captured = stream_make(CU_STREAM_NON_BLOCKING), other = stream_make(CU_STREAM_NON_BLOCKING);
    CUevent before = event_make(), inside = event_make(), never = event_make();
    OK(cuEventRecord(before, captured));
    assert_int_equal(simgpu_capture(captured, 1), 0);
    OK(cuStreamWaitEvent(captured, never, 0));
    OK(cuEventRecord(inside, captured));
    OK(cuStreamWaitEvent(captured, inside, 0));
    OK(cuStreamWaitEvent(other, before, 0)); /* is not captured */
    assert_int_equal(simgpu_capture(captured, 0), 0);
    assert_int_equal(simgpu_capture(captured, 1), 0);
    REFUSED(cuStreamWaitEvent(captured, before, 0), CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    assert_int_equal(simgpu_capture(captured, 0), 1);
}

static void a_stream_waits_for_what_the_event_had_captured(void **state) {
    (void)state;
    CUstream first = stream_make(CU_STREAM_NON_BLOCKING), second = stream_make(CU_STREAM_NON_BLOCKING);
    CUevent event = event_make();
    struct gate gate, later;
    struct log log = {0};
    struct note notes[2];
    gate_close(&gate, first);
    note_push(first, &notes[0], &log, 1);
    OK(cuEventRecord(event, first));
    OK(cuStreamWaitEvent(second, event, 0));
    note_push(second, &notes[1], &log, 2);
    gate_close(&later, first); /* behind the recorded point, and recorded anew: second does not wait for it */
    OK(cuEventRecord(event, first));
    OK(cuEventDestroy_v2(event));
    REFUSED(cuStreamQuery(second), CUDA_ERROR_NOT_READY);
    gate_open(&gate);
    OK(cuStreamSynchronize(second));
    assert_int_equal(log.n, 2);
    assert_int_equal(log.seen[0], 1);
    gate_open(&later);
    OK(cuCtxSynchronize());
}

/* What waits at the head of a hardware queue holds up the streams that share it; what runs does not. */
static void streams_share_hardware_queues(void **state) {
    (void)state;
    CUstream first = stream_make(CU_STREAM_NON_BLOCKING), second = stream_make(CU_STREAM_NON_BLOCKING),
             third = stream_make(CU_STREAM_NON_BLOCKING);
    CUevent event = event_make();
    struct gate gate;
    struct log log = {0};
    struct note notes[5];
    simgpu_set_queues(2); /* second has one for itself */
    gate_close(&gate, first);
    gate_wait_entered(&gate);
    note_push(third, &notes[0], &log, 0); /* beside the gate, which runs */
    OK(cuStreamSynchronize(third));
    note_push(first, &notes[1], &log, 1);
    OK(cuEventRecord(event, second));
    OK(cuStreamWaitEvent(third, event, 0)); /* there already, and yet behind what waits for the gate */
    note_push(third, &notes[2], &log, 2);
    note_push(second, &notes[3], &log, 3);
    OK(cuStreamSynchronize(second));
    REFUSED(cuStreamQuery(third), CUDA_ERROR_NOT_READY);
    assert_int_equal(log.n, 2);
    gate_open(&gate);
    OK(cuCtxSynchronize());
    assert_int_equal(log.n, 4);
    assert_int_equal(log.seen[0], 0);
    assert_int_equal(log.seen[1], 3);
    simgpu_set_queues(0);
}

/* A wait for what the same queue has behind it never ends, as on a GPU; with a queue more it does. */
static void a_wait_for_what_its_queue_has_behind_it_does_not_end(void **state) {
    (void)state;
    struct pages pages = pages_make(1);
    CUstream waits = stream_make(CU_STREAM_NON_BLOCKING), writes = stream_make(CU_STREAM_NON_BLOCKING);
    *(uint32_t *)(uintptr_t)pages.at = 0;
    CUevent event = event_make();
    simgpu_set_queues(1);
    OK(cuStreamWaitValue32_v2(waits, pages.at, 1, CU_STREAM_WAIT_VALUE_GEQ));
    OK(cuEventRecord(event, writes)); /* of an idle stream: else it is there at once */
    REFUSED(cuEventQuery(event), CUDA_ERROR_NOT_READY);
    OK(cuStreamWriteValue32_v2(writes, pages.at, 1, 0));
    simgpu_set_queues(2);
    OK(cuStreamSynchronize(waits));
}

static void the_null_stream_orders_itself_with_blocking_streams(void **state) {
    (void)state;
    CUstream blocking = stream_make(0), free_running = stream_make(CU_STREAM_NON_BLOCKING);
    struct gate gate;
    struct log log = {0};
    struct note notes[4];
    gate_close(&gate, blocking);
    note_push(blocking, &notes[0], &log, 1);
    note_push(NULL, &notes[1], &log, 2);
    note_push(blocking, &notes[2], &log, 3);
    REFUSED(cuStreamQuery(NULL), CUDA_ERROR_NOT_READY);
    note_push(free_running, &notes[3], &log, 4);
    OK(cuStreamSynchronize(free_running)); /* it waits for no other stream */
    assert_int_equal(log.seen[0], 4);
    gate_open(&gate);
    OK(cuCtxSynchronize());
    for (unsigned i = 1; i < 4; i++) assert_int_equal(log.seen[i], i);
}

/* An event on an idle stream is done at once, unless the null stream holds it back. */
static void blocking_streams_wait_for_the_null_stream(void **state) {
    (void)state;
    CUstream blocking = stream_make(0), free_running = stream_make(CU_STREAM_NON_BLOCKING);
    CUevent held = event_make(), free_event = event_make();
    struct gate gate;
    gate_close(&gate, NULL);
    OK(cuEventRecord(held, blocking));
    OK(cuEventRecord(free_event, free_running));
    REFUSED(cuEventQuery(held), CUDA_ERROR_NOT_READY);
    OK(cuEventQuery(free_event));
    gate_open(&gate);
    OK(cuEventSynchronize(held));
    OK(cuStreamQuery(NULL));
}

static void the_null_stream_is_also_called_legacy(void **state) {
    (void)state;
    struct gate gate;
    gate_close(&gate, CU_STREAM_LEGACY);
    REFUSED(cuStreamQuery(NULL), CUDA_ERROR_NOT_READY);
    gate_open(&gate);
    OK(cuStreamSynchronize(NULL));
    REFUSED(cuStreamSynchronize(CU_STREAM_PER_THREAD), CUDA_ERROR_INVALID_HANDLE);
    REFUSED(cuStreamDestroy_v2(NULL), CUDA_ERROR_INVALID_HANDLE);
}

static void a_destroyed_stream_finishes_its_work(void **state) {
    (void)state;
    CUstream stream = stream_make(CU_STREAM_NON_BLOCKING);
    CUevent event = event_make();
    struct gate gate;
    struct log log = {0};
    struct note note;
    gate_close(&gate, stream);
    note_push(stream, &note, &log, 1);
    OK(cuEventRecord(event, stream));
    OK(cuStreamDestroy_v2(stream));
    assert_int_equal(live_now().streams, 0);
    REFUSED(cuStreamSynchronize(stream), CUDA_ERROR_INVALID_HANDLE);
    REFUSED(cuStreamDestroy_v2(stream), CUDA_ERROR_INVALID_HANDLE);
    gate_open(&gate);
    OK(cuEventSynchronize(event));
    assert_int_equal(log.n, 1);
}

static void foreign_handles_are_invalid(void **state) {
    (void)state;
    CUstream stream = stream_make(0);
    CUevent event = event_make();
    REFUSED(cuEventRecord((CUevent)(void *)stream, stream), CUDA_ERROR_INVALID_HANDLE);
    REFUSED(cuEventRecord(event, (CUstream)(void *)event), CUDA_ERROR_INVALID_HANDLE);
    REFUSED(cuStreamWaitEvent(stream, NULL, 0), CUDA_ERROR_INVALID_HANDLE);
    OK(cuEventDestroy_v2(event));
    REFUSED(cuEventDestroy_v2(event), CUDA_ERROR_INVALID_HANDLE);
    REFUSED(cuEventQuery(event), CUDA_ERROR_INVALID_HANDLE);
}

static void call_cuda(void *argument) {
    CUresult *results = argument;
    size_t free_bytes, total_bytes;
    results[0] = cuMemGetInfo_v2(&free_bytes, &total_bytes);
    results[1] = cuCtxSynchronize();
    results[2] = cuInit(0);
}

static void fact_9_host_functions_must_not_call_cuda(void **state) {
    (void)state;
    CUresult results[3] = {0};
    OK(cuLaunchHostFunc(NULL, call_cuda, results));
    OK(cuStreamSynchronize(NULL));
    for (int i = 0; i < 3; i++) REFUSED(results[i], CUDA_ERROR_NOT_PERMITTED);
    OK(cuCtxSynchronize());
}

static void streams_meet_at_a_value_in_device_memory(void **state) {
    (void)state;
    struct pages pages = pages_make(1);
    CUstream waiting = stream_make(CU_STREAM_NON_BLOCKING), writing = stream_make(CU_STREAM_NON_BLOCKING);
    struct log log = {0};
    struct note note;
    OK(cuStreamWaitValue32_v2(waiting, pages.at, 3, CU_STREAM_WAIT_VALUE_GEQ));
    note_push(waiting, &note, &log, 1);
    OK(cuStreamWriteValue32_v2(writing, pages.at, 2, CU_STREAM_WRITE_VALUE_DEFAULT));
    OK(cuStreamSynchronize(writing));
    REFUSED(cuStreamQuery(waiting), CUDA_ERROR_NOT_READY);
    OK(cuStreamWriteValue32_v2(writing, pages.at, 4, CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER));
    OK(cuStreamSynchronize(waiting));
    assert_int_equal(log.n, 1);
}

static void a_value_is_compared_as_asked(void **state) {
    (void)state;
    static const struct {
        unsigned flags;
        uint32_t value, not_yet, reached;
    } cases[] = {{CU_STREAM_WAIT_VALUE_GEQ, 5, 4, 6},
                 {CU_STREAM_WAIT_VALUE_GEQ, 1, 0xFFFFFFFF, 1}, /* cyclic: -1 is before 1 */
                 {CU_STREAM_WAIT_VALUE_EQ, 5, 6, 5},
                 {CU_STREAM_WAIT_VALUE_AND, 4, 3, 6},
                 {CU_STREAM_WAIT_VALUE_NOR, 1, 0xFFFFFFFE, 0}};
    CUstream stream = stream_make(CU_STREAM_NON_BLOCKING);
    uint32_t *value = host_make(4096, true);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        __atomic_store_n(value, cases[i].not_yet, __ATOMIC_RELEASE);
        OK(cuStreamWaitValue32_v2(stream, (uintptr_t)value, cases[i].value, cases[i].flags));
        REFUSED(cuStreamQuery(stream), CUDA_ERROR_NOT_READY);
        __atomic_store_n(value, cases[i].reached, __ATOMIC_RELEASE); /* a plain CPU thread's store */
        OK(cuStreamSynchronize(stream));
    }
    OK(cuMemHostUnregister(value));
    host_destroy(value, 4096);
}

static void values_live_where_the_device_reaches_them(void **state) {
    (void)state;
    struct pages pages = pages_make(1);
    static uint32_t unregistered;
    REFUSED(cuStreamWaitValue32_v2(NULL, (uintptr_t)&unregistered, 0, 0), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuStreamWriteValue32_v2(NULL, (uintptr_t)&unregistered, 0, 0), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuStreamWaitValue32_v2(NULL, pages.at + 2, 0, 0), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuStreamWaitValue32_v2(NULL, pages.at, 0, 4), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuStreamWaitValue32_v2(NULL, pages.at, 0, CU_STREAM_WAIT_VALUE_FLUSH), CUDA_ERROR_NOT_SUPPORTED);
    REFUSED(cuStreamWriteValue32_v2(NULL, pages.at, 0, 2), CUDA_ERROR_INVALID_VALUE);
}

/* Every later call says 700, as after a fault on a GPU; a reset ends it. */
static void assert_sticky(void) {
    size_t free_bytes, total_bytes;
    int count;
    REFUSED(cuCtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS);
    REFUSED(cuMemGetInfo_v2(&free_bytes, &total_bytes), CUDA_ERROR_ILLEGAL_ADDRESS);
    OK(cuDeviceGetCount(&count));
    fresh_device(NULL);
    OK(cuCtxSynchronize());
}

static void fact_3_unmapping_what_pending_work_uses_is_an_illegal_access(void **state) {
    (void)state;
    struct pages pages = pages_make(3);
    CUstream stream = stream_make(CU_STREAM_NON_BLOCKING);
    struct gate gate;
    struct log log = {0};
    struct note note;
    gate_close(&gate, stream);
    OK(cuMemsetD8Async(pages.at + PAGE, 1, PAGE, stream));
    note_push(stream, &note, &log, 1);
    OK(cuMemUnmap(pages.at + 2 * PAGE, PAGE)); /* the map beside it is not used */
    REFUSED(cuMemUnmap(pages.at, 2 * PAGE), CUDA_ERROR_ILLEGAL_ADDRESS);
    assert_true(can_read(pages.at));
    gate_open(&gate);
    assert_sticky();
    assert_int_equal(log.n, 0); /* host functions do not run after an error */
}

static void fact_3_unmapping_behind_an_event_is_fine(void **state) {
    (void)state;
    struct pages pages = pages_make(1);
    CUstream stream = stream_make(CU_STREAM_NON_BLOCKING);
    CUevent event = event_make();
    OK(cuMemsetD8Async(pages.at, 1, PAGE, stream));
    OK(cuEventRecord(event, stream));
    OK(cuEventSynchronize(event));
    OK(cuMemUnmap(pages.at, PAGE));
    OK(cuCtxSynchronize());
}

static void unmapping_what_a_value_is_waited_for_in_is_an_illegal_access(void **state) {
    (void)state;
    struct pages pages = pages_make(1);
    CUstream stream = stream_make(CU_STREAM_NON_BLOCKING);
    OK(cuStreamWaitValue32_v2(stream, pages.at + 8, 1, CU_STREAM_WAIT_VALUE_EQ));
    REFUSED(cuMemUnmap(pages.at, PAGE), CUDA_ERROR_ILLEGAL_ADDRESS);
    assert_sticky();
}

static void copies_of_memory_without_a_grant_are_illegal_accesses(void **state) {
    (void)state;
    for (int kind = 0; kind < 3; kind++) {
        struct pages pages = pages_make(3);
        if (kind == 0) OK(cuMemUnmap(pages.at + PAGE, PAGE));                    /* a hole */
        if (kind == 1) OK(cuMemSetAccess(pages.at + PAGE, PAGE, &no_access, 1)); /* mapped, not granted */
        /* written, granted for reading */
        if (kind == 2) OK(cuMemSetAccess(pages.at + PAGE, PAGE, &read_only, 1));
        OK(cuMemsetD8Async(pages.at, 1, 3 * PAGE, NULL));
        REFUSED(cuStreamSynchronize(NULL), CUDA_ERROR_ILLEGAL_ADDRESS);
        assert_sticky();
    }
}

static void reading_needs_a_read_grant_only(void **state) {
    (void)state;
    struct pages pages = pages_make(2);
    bytes_at(pages.at)[9] = 9;
    OK(cuMemSetAccess(pages.at, PAGE, &read_only, 1));
    OK(cuMemcpyDtoDAsync_v2(pages.at + PAGE, pages.at, PAGE, NULL));
    OK(cuStreamSynchronize(NULL));
    assert_int_equal(bytes_at(pages.at + PAGE)[9], 9);
}

/* An access is checked when the work starts, so a grant that comes in time is fine. */
static void a_grant_may_come_after_the_enqueueing(void **state) {
    (void)state;
    struct pages pages = pages_make(1);
    struct gate gate;
    gate_close(&gate, NULL);
    OK(cuMemSetAccess(pages.at, PAGE, &no_access, 1));
    OK(cuMemsetD8Async(pages.at, 6, PAGE, NULL));
    OK(cuMemSetAccess(pages.at, PAGE, &read_write, 1));
    gate_open(&gate);
    OK(cuStreamSynchronize(NULL));
    assert_int_equal(bytes_at(pages.at)[PAGE - 1], 6);
}

static void waiting_streams_end_when_the_device_fails(void **state) {
    (void)state;
    struct pages pages = pages_make(2);
    CUstream stuck = stream_make(CU_STREAM_NON_BLOCKING), failing = stream_make(CU_STREAM_NON_BLOCKING);
    CUevent event = event_make();
    OK(cuStreamWaitValue32_v2(stuck, pages.at, 1, CU_STREAM_WAIT_VALUE_EQ));
    OK(cuEventRecord(event, stuck));
    OK(cuStreamWaitEvent(NULL, event, 0));
    OK(cuMemUnmap(pages.at + PAGE, PAGE));
    OK(cuMemsetD8Async(pages.at + PAGE, 1, 1, failing));
    CUresult result = cuStreamSynchronize(NULL);
    assert_int_equal(result, CUDA_ERROR_ILLEGAL_ADDRESS);
    assert_sticky();
}

static void a_reset_drops_pending_work(void **state) {
    (void)state;
    struct pages pages = pages_make(1);
    struct log log = {0};
    struct note note;
    CUstream stream = stream_make(CU_STREAM_NON_BLOCKING);
    OK(cuStreamWaitValue32_v2(stream, pages.at, 1, CU_STREAM_WAIT_VALUE_EQ));
    note_push(stream, &note, &log, 1);
    simgpu_reset();
    assert_int_equal(log.n, 0);
    struct simgpu_live live = live_now(), nothing = {0};
    assert_memory_equal(&live, &nothing, sizeof live);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        test(a_stream_keeps_order),
        test(query_tells_pending_from_done),
        test(elapsed_time_is_the_modelled_one),
        test(nobody_asks_or_waits_during_a_capture),
        test(a_relaxed_thread_breaks_no_capture),
        test(a_capture_knows_its_own_events_alone),
        test(a_stream_waits_for_what_the_event_had_captured),
        test(streams_share_hardware_queues),
        test(a_wait_for_what_its_queue_has_behind_it_does_not_end),
        test(the_null_stream_orders_itself_with_blocking_streams),
        test(blocking_streams_wait_for_the_null_stream),
        test(the_null_stream_is_also_called_legacy),
        test(a_destroyed_stream_finishes_its_work),
        test(foreign_handles_are_invalid),
        test(fact_9_host_functions_must_not_call_cuda),
        test(streams_meet_at_a_value_in_device_memory),
        test(a_value_is_compared_as_asked),
        test(values_live_where_the_device_reaches_them),
        test(fact_3_unmapping_what_pending_work_uses_is_an_illegal_access),
        test(fact_3_unmapping_behind_an_event_is_fine),
        test(unmapping_what_a_value_is_waited_for_in_is_an_illegal_access),
        test(copies_of_memory_without_a_grant_are_illegal_accesses),
        test(reading_needs_a_read_grant_only),
        test(a_grant_may_come_after_the_enqueueing),
        test(waiting_streams_end_when_the_device_fails),
        test(a_reset_drops_pending_work),
    };
    return cmocka_run_group_tests_name("simgpu streams", tests, NULL, NULL);
}
