/* Kernels: how long they hold their stream, what they may touch, what they compute. */
#include <pthread.h>
#include <string.h>
#include <time.h>

#include "tests/simgpu/support.h"

#define MS ((uint64_t)1000000)

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

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

static void launch_for(CUstream stream, uint64_t duration_ns) {
    OK(simgpu_launch(stream, &(struct simgpu_kernel){.name = "busy", .duration_ns = duration_ns}));
}

static void stamp_body(void *data) {
    **(uint64_t **)data = simgpu_ready_ns();
}

/* Also writes when it could start, in modelled time, which no other load on the machine changes. */
static void launch_stamped(CUstream stream, uint64_t duration_ns, uint64_t *ready_ns_out) {
    OK(simgpu_launch(stream, &(struct simgpu_kernel){.duration_ns = duration_ns,
                                                     .body = stamp_body,
                                                     .data = &ready_ns_out,
                                                     .data_bytes = sizeof ready_ns_out}));
}

static void order(CUstream before, CUstream after) {
    CUevent event = event_make();
    OK(cuEventRecord(event, before));
    OK(cuStreamWaitEvent(after, event, 0));
    OK(cuEventDestroy_v2(event));
}

static void a_kernel_holds_its_stream_for_its_duration(void **state) {
    (void)state;
    CUstream stream = stream_make();
    uint64_t ready_ns[2], begin = now_ns();
    launch_stamped(stream, 20 * MS, &ready_ns[0]);
    launch_stamped(stream, 0, &ready_ns[1]);
    OK(cuStreamSynchronize(stream));
    assert_true(now_ns() - begin >= 20 * MS);
    assert_int_equal(ready_ns[1] - ready_ns[0], 20 * MS);
}

/* 200 kernels of 0.2 ms, each waiting for the other stream's last one: a wake-up that comes 0.05 ms late, as
 * they do, would make 50 ms of 40. */
static void late_wake_ups_do_not_add_up(void **state) {
    (void)state;
    enum { N = 200 };
    CUstream streams[2] = {stream_make(), stream_make()};
    uint64_t ready_ns[N];
    struct gate gate;
    gate_close(&gate, streams[0]);
    for (int i = 0; i < N; i++) {
        launch_stamped(streams[i % 2], MS / 5, &ready_ns[i]);
        order(streams[i % 2], streams[1 - i % 2]);
    }
    gate_open(&gate);
    OK(cuCtxSynchronize());
    for (int i = 1; i < N; i++) assert_int_equal(ready_ns[i] - ready_ns[i - 1], MS / 5);
}

/* In modelled time: a value that is written, and one that is waited for and there, hold
 * a stream as little as an event does. */
static void values_that_are_there_take_no_time(void **state) {
    (void)state;
    enum { N = 50, DURATION_NS = 100000 };
    uint64_t ready_ns[N];
    struct pages pages = pages_make(1);
    CUstream stream = stream_make();
    struct gate gate;
    gate_close(&gate, stream);
    for (unsigned i = 0; i < N; i++) {
        launch_stamped(stream, DURATION_NS, &ready_ns[i]);
        OK(cuStreamWriteValue32_v2(stream, pages.at, i, CU_STREAM_WRITE_VALUE_DEFAULT));
        OK(cuStreamWaitValue32_v2(stream, pages.at, i, CU_STREAM_WAIT_VALUE_GEQ));
    }
    gate_open(&gate);
    OK(cuStreamSynchronize(stream));
    for (unsigned i = 1; i < N; i++) assert_int_equal(ready_ns[i] - ready_ns[i - 1], DURATION_NS);
}

/* As does a copy within the device, where that has a rate: 64 KiB at 1 GB/s, between kernels. */
static void copies_within_the_device_take_their_rate(void **state) {
    (void)state;
    enum { N = 50, BYTES = 65536, COPY_NS = BYTES, DURATION_NS = 1000 };
    uint64_t ready_ns[N];
    struct pages pages = pages_make(1);
    CUstream stream = stream_make();
    struct gate gate;
    simgpu_set_memory(1);
    gate_close(&gate, stream);
    for (unsigned i = 0; i < N; i++) {
        launch_stamped(stream, DURATION_NS, &ready_ns[i]);
        if (i % 2)
            OK(cuMemsetD8Async(pages.at, 1, BYTES, stream));
        else
            OK(cuMemcpyDtoDAsync_v2(pages.at, pages.at + PAGE / 2, BYTES, stream));
    }
    gate_open(&gate);
    OK(cuStreamSynchronize(stream));
    for (unsigned i = 1; i < N; i++) assert_int_equal(ready_ns[i] - ready_ns[i - 1], COPY_NS + DURATION_NS);
}

static void sleeps(void *unused) {
    (void)unused;
    (void)nanosleep(&(struct timespec){.tv_nsec = 50 * MS}, NULL);
}

static void computes(void *core_ms) {
    struct timespec now, begin;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begin);
    do clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    while ((now.tv_sec - begin.tv_sec) * 1000 + (now.tv_nsec - begin.tv_nsec) / (int64_t)MS <
           *(const int *)core_ms);
}

/* Computes, says that it ends 30 ms behind that, and computes for a time that does not count any more. */
static void says_its_end(void *core_ms) {
    computes(core_ms);
    uint64_t end_ns = simgpu_here_ns() + 30 * MS;
    simgpu_end_at(end_ns);
    uint64_t behind_ns = simgpu_here_ns();
    computes(core_ms);
    if (behind_ns < end_ns || simgpu_here_ns() < behind_ns + 10 * MS) *(int *)core_ms = -1;
}

/* Ten times: not 50 ms that it slept, but 2 ms that it computed. */
static void host_functions_take_their_core_s_time(void **state) {
    (void)state;
    CUstream stream = stream_make();
    CUhostFn functions[] = {sleeps, computes, says_its_end};
    int core_ms = 2;
    uint64_t ready_ns[4];
    simgpu_set_core(10);
    launch_stamped(stream, 1, &ready_ns[0]);
    for (int i = 0; i < 3; i++) {
        OK(cuLaunchHostFunc(stream, functions[i], &core_ms));
        launch_stamped(stream, 1, &ready_ns[i + 1]);
    }
    OK(cuStreamSynchronize(stream));
    assert_int_equal(core_ms, 2);
    assert_true(ready_ns[1] - ready_ns[0] < 50 * MS);
    assert_true(ready_ns[2] - ready_ns[1] >= 20 * MS);
    assert_true(ready_ns[3] - ready_ns[2] >= 50 * MS);
    assert_int_equal(simgpu_here_ns(), 0);
}

/* ---- work that host functions hand to threads ---- */

enum { CORE_TIMES = 10 };

/* Computes behind that, too, for a time that does not count. */
struct hand_over {
    sem_t there, *until; /* until: NULL, or what it then waits for */
    uint64_t from_ns;
    int core_ms;
};

static void hands_over(void *data) {
    struct hand_over *hand_over = data;
    hand_over->from_ns = simgpu_work_hand();
    computes(&hand_over->core_ms);
    sem_post(&hand_over->there);
    while (hand_over->until && sem_wait(hand_over->until) != 0) continue;
}

static void hand_over(CUstream stream, struct hand_over *of) {
    sem_init(&of->there, 0, 0);
    of->core_ms = 2;
    of->until = NULL;
    OK(cuLaunchHostFunc(stream, hands_over, of));
}

static void take(struct hand_over *of) {
    while (sem_wait(&of->there) != 0) continue;
    simgpu_work_begin(of->from_ns);
}

/* What is enqueued from here on can start when the gate is opened, and from the gate on cores take their
 * time. */
static void hold(struct gate *gate, CUstream stream) {
    gate_close(gate, stream);
    gate_wait_entered(gate);
    simgpu_set_core(CORE_TIMES);
}

static void a_host_function_that_hands_its_work_over_takes_no_time(void **state) {
    (void)state;
    CUstream stream = stream_make();
    struct hand_over of;
    struct gate gate;
    uint64_t ready_ns[2];
    hold(&gate, stream);
    launch_stamped(stream, 1000, &ready_ns[0]);
    hand_over(stream, &of);
    launch_stamped(stream, 1, &ready_ns[1]);
    gate_open(&gate);
    OK(cuStreamSynchronize(stream));
    assert_int_equal(of.from_ns, ready_ns[0] + 1000);
    assert_int_equal(ready_ns[1], of.from_ns);
    assert_int_equal(simgpu_work_hand(), 0); /* no host function */
}

/* A thread's three works. Two are handed over at the same time, so that the second begins at the first's end;
 * the third so late that the thread is free. Their ends are known but for what the thread takes to ask. */
static void a_thread_s_work_takes_its_core_s_time(void **state) {
    (void)state;
    enum { N = 3 };
    CUstream streams[N] = {stream_make(), stream_make(), stream_make()}, before = stream_make();
    uint32_t *words = host_make(PAGE, true);
    struct hand_over of[N];
    struct gate gate;
    uint64_t ready_ns[N], from_ns[N], here_ns[N], behind_ns[N];
    int core_ms = 2;
    hold(&gate, before);
    assert_int_equal(simgpu_here_ns(), 0);
    for (int i = 0; i < N; i++) {
        order(before, streams[i]);
        if (i == N - 1) launch_for(streams[i], 300 * MS);
        hand_over(streams[i], &of[i]);
        OK(cuStreamWaitValue32_v2(streams[i], (uintptr_t)&words[i], 5, CU_STREAM_WAIT_VALUE_GEQ));
        launch_stamped(streams[i], 1, &ready_ns[i]);
    }
    gate_open(&gate);
    for (int i = 0; i < N; i++) {
        take(&of[i]);
        from_ns[i] = simgpu_here_ns();
        computes(&core_ms);
        if (i == 1) simgpu_end_at(simgpu_here_ns() + 30 * MS);
        here_ns[i] = simgpu_here_ns();
        REFUSED(cuStreamQuery(streams[i]), CUDA_ERROR_NOT_READY);
        simgpu_word_store(&words[i], 5);
        behind_ns[i] = simgpu_here_ns();
        assert_true(now_ns() >= here_ns[i]);
        assert_int_equal(words[i], 5);
    }
    OK(cuCtxSynchronize());
    for (int i = 0; i < N; i++) {
        assert_true(here_ns[i] >= from_ns[i] + (uint64_t)core_ms * CORE_TIMES * MS + (i == 1 ? 30 * MS : 0));
        assert_true(ready_ns[i] >= here_ns[i] && ready_ns[i] <= behind_ns[i]);
    }
    assert_int_equal(of[0].from_ns, of[1].from_ns);
    assert_true(from_ns[0] >= of[0].from_ns && from_ns[0] < of[0].from_ns + 10 * MS);
    assert_true(from_ns[1] >= ready_ns[0] && from_ns[1] < ready_ns[0] + 10 * MS);
    assert_true(behind_ns[1] < of[2].from_ns);
    assert_true(from_ns[2] >= of[2].from_ns && from_ns[2] < of[2].from_ns + 10 * MS);
    OK(cuMemHostUnregister(words));
    host_destroy(words, PAGE);
}

/* The stream sees the word only when the thread has stored a later number there. */
static void a_stream_goes_on_from_when_its_number_was_stored(void **state) {
    (void)state;
    CUstream stream = stream_make();
    uint32_t *word = host_make(PAGE, true);
    sem_t late;
    struct hand_over of = {.until = &late};
    struct gate gate;
    uint64_t ready_ns, first_ns;
    sem_init(&late, 0, 0);
    sem_init(&of.there, 0, 0);
    hold(&gate, stream);
    OK(cuLaunchHostFunc(stream, hands_over, &of));
    OK(cuStreamWaitValue32_v2(stream, (uintptr_t)word, 1, CU_STREAM_WAIT_VALUE_GEQ));
    launch_stamped(stream, 1, &ready_ns);
    gate_open(&gate);
    take(&of);
    simgpu_word_store(word, 1);
    first_ns = simgpu_here_ns();
    simgpu_end_at(first_ns + 50 * MS);
    simgpu_word_store(word, 2);
    sem_post(&late);
    OK(cuStreamSynchronize(stream));
    assert_true(ready_ns >= of.from_ns && ready_ns <= first_ns);
    OK(cuMemHostUnregister(word));
    host_destroy(word, PAGE);
}

/* Far from now: who waits until a modelled time comes, waits for longer than any test may take. */
struct ended {
    uint64_t from_ns, none_ns, computed_ns, end_ns, behind_ns, next_ns, later_from_ns, later_ns;
};

static void *work_ends(void *data) {
    struct ended *of = data;
    int core_ms = 2;
    of->none_ns = simgpu_work_end();
    simgpu_work_begin(of->from_ns);
    computes(&core_ms);
    of->computed_ns = simgpu_here_ns();
    of->end_ns = simgpu_work_end();
    of->behind_ns = simgpu_here_ns();
    computes(&core_ms); /* does not count */
    simgpu_work_begin(of->from_ns);
    of->next_ns = simgpu_here_ns();
    (void)simgpu_work_end();
    of->later_from_ns = of->next_ns + 300 * MS;
    simgpu_work_begin(of->later_from_ns);
    of->later_ns = simgpu_here_ns();
    return NULL;
}

static void a_thread_s_work_ends_without_a_word(void **state) {
    (void)state;
    struct ended of = {.from_ns = now_ns() + 3600000 * MS};
    pthread_t thread;
    simgpu_set_core(CORE_TIMES);
    assert_int_equal(pthread_create(&thread, NULL, work_ends, &of), 0);
    pthread_join(thread, NULL);
    assert_int_equal(of.none_ns, 0);
    assert_true(of.computed_ns >= of.from_ns + 2 * CORE_TIMES * MS);
    assert_in_range(of.end_ns, of.computed_ns, of.behind_ns);
    assert_in_range(of.next_ns, of.end_ns, of.end_ns + 10 * MS);
    assert_in_range(of.later_ns, of.later_from_ns, of.later_from_ns + 10 * MS);
}

/* ---- several streams ---- */

/* The second computes for 2 ms, ten times, from the first one's modelled end on. One that stands for a device
 * waits for none. */
static void serial_host_functions_run_one_after_another(void **state) {
    (void)state;
    CUstream streams[3];
    struct gate gate, other;
    int core_ms = 2;
    uint64_t ready_ns[3];
    simgpu_set_core(10);
    simgpu_set_serial(1);
    for (int i = 0; i < 3; i++) streams[i] = stream_make();
    gate_close(&gate, streams[0]);
    gate_wait_entered(&gate);
    OK(cuLaunchHostFunc(streams[1], computes, &core_ms));
    launch_stamped(streams[1], 1, &ready_ns[1]);
    simgpu_stand_in();
    gate_close(&other, streams[2]);
    gate_wait_entered(&other);
    gate_open(&other);
    OK(cuStreamSynchronize(streams[2]));
    OK(cuLaunchHostFunc(streams[2], computes, &core_ms)); /* what stood in was one function */
    assert_int_equal(cuStreamQuery(streams[1]), CUDA_ERROR_NOT_READY);
    assert_int_equal(cuStreamQuery(streams[2]), CUDA_ERROR_NOT_READY);
    launch_stamped(streams[2], 1, &ready_ns[2]);
    gate_open(&gate);
    for (int i = 0; i < 3; i++) OK(cuStreamSynchronize(streams[i]));
    uint64_t first_ns = ready_ns[1] < ready_ns[2] ? ready_ns[1] : ready_ns[2];
    assert_true(ready_ns[1] + ready_ns[2] - 2 * first_ns >= 20 * MS);
}

static void kernels_of_two_streams_run_at_once(void **state) {
    (void)state;
    CUstream streams[2] = {stream_make(), stream_make()};
    uint64_t ready_ns[3];
    struct gate gate;
    gate_close(&gate, streams[0]);
    order(streams[0], streams[1]);
    for (int i = 0; i < 2; i++) launch_stamped(streams[i], 30 * MS, &ready_ns[i]);
    order(streams[1], streams[0]);
    launch_stamped(streams[0], 0, &ready_ns[2]);
    gate_open(&gate);
    OK(cuCtxSynchronize());
    assert_int_equal(ready_ns[0], ready_ns[1]);
    assert_int_equal(ready_ns[2] - ready_ns[0], 30 * MS);
}

/* What was enqueued late starts late: the stream's past is no credit. */
static void an_idle_stream_saves_no_time_up(void **state) {
    (void)state;
    CUstream stream = stream_make();
    for (int i = 0; i < 3; i++) {
        uint64_t begin = now_ns();
        launch_for(stream, 5 * MS);
        OK(cuStreamSynchronize(stream));
        assert_true(now_ns() - begin >= 5 * MS);
        while (now_ns() - begin < 12 * MS) continue;
    }
}

static void the_null_stream_waits_for_kernels_of_blocking_streams(void **state) {
    (void)state;
    CUstream blocking;
    OK(cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
    uint64_t begin = now_ns();
    launch_for(blocking, 5 * MS);
    launch_for(NULL, 5 * MS);
    launch_for(blocking, 5 * MS);
    OK(cuStreamSynchronize(blocking));
    assert_true(now_ns() - begin >= 15 * MS);
}

/* ---- what they touch ---- */

static int launch_on(CUstream stream, CUdeviceptr address, size_t bytes, int writes) {
    return simgpu_launch(stream,
                         &(struct simgpu_kernel){.n_accesses = 1, .accesses = {{address, bytes, writes}}});
}

static void assert_sticky(void) {
    REFUSED(cuCtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS);
    REFUSED(launch_on(NULL, 0, 0, 0), CUDA_ERROR_ILLEGAL_ADDRESS);
    fresh_device(NULL);
}

static void what_a_kernel_accesses_is_mapped_and_granted(void **state) {
    (void)state;
    for (int kind = 0; kind < 4; kind++) {
        struct pages pages = pages_make(3);
        struct simgpu_kernel kernel = {.n_accesses = 3,
                                       .accesses = {{pages.at, 64, 1}, {pages.at, 3 * PAGE, kind == 2}, {0}}};
        if (kind == 0) OK(cuMemUnmap(pages.at + PAGE, PAGE));
        if (kind == 1) OK(cuMemSetAccess(pages.at + PAGE, PAGE, &no_access, 1));
        if (kind >= 2) OK(cuMemSetAccess(pages.at + PAGE, PAGE, &read_only, 1));
        OK(simgpu_launch(NULL, &kernel));
        if (kind == 3) {
            OK(cuStreamSynchronize(NULL)); /* it reads */
            continue;
        }
        REFUSED(cuStreamSynchronize(NULL), CUDA_ERROR_ILLEGAL_ADDRESS);
        assert_sticky();
    }
}

static void post(void *semaphore) {
    sem_post(semaphore);
}

/* Queued, and running for longer than any test may take. */
static void unmapping_what_a_kernel_uses_is_an_illegal_access(void **state) {
    (void)state;
    for (int running = 0; running < 2; running++) {
        struct pages pages = pages_make(3);
        CUstream stream = stream_make();
        struct gate gate;
        sem_t started;
        sem_init(&started, 0, 0);
        struct simgpu_kernel kernel = {
            .duration_ns = 3600000 * MS,
            .n_accesses = 2,
            .accesses = {{pages.at + PAGE, 64, 1}, {pages.at + 3 * PAGE - 1, 1, 0}},
            .body = post,
            .data = &started};
        if (!running) gate_close(&gate, stream);
        OK(simgpu_launch(stream, &kernel));
        if (running) sem_wait(&started);
        OK(cuMemUnmap(pages.at, PAGE));
        REFUSED(cuMemUnmap(pages.at + 2 * PAGE, PAGE), CUDA_ERROR_ILLEGAL_ADDRESS);
        if (!running) gate_open(&gate);
        assert_sticky();
    }
}

static void what_is_wrong_is_refused(void **state) {
    (void)state;
    struct simgpu_kernel kernel = {.n_accesses = SIMGPU_MAX_ACCESSES + 1};
    REFUSED(simgpu_launch(NULL, NULL), CUDA_ERROR_INVALID_VALUE);
    REFUSED(simgpu_launch(NULL, &kernel), CUDA_ERROR_INVALID_VALUE);
    REFUSED(launch_on(NULL, 0, 64, 1), CUDA_ERROR_INVALID_VALUE);
    REFUSED(launch_on(NULL, UINT64_MAX - 10, 64, 1), CUDA_ERROR_INVALID_VALUE);
    REFUSED(launch_on((CUstream)(uintptr_t)0x1234, 0, 0, 0), CUDA_ERROR_INVALID_HANDLE);
    simgpu_reset();
    REFUSED(launch_on(NULL, 0, 0, 0), CUDA_ERROR_NOT_INITIALIZED);
}

/* ---- what they compute ---- */

struct sum {
    const unsigned char *of;
    size_t n;
    uint64_t *into;
    int launch_result;
};

static void sum_body(void *data) {
    struct sum *sum = data;
    for (size_t i = 0; i < sum->n; i++) *sum->into += sum->of[i];
}

static void a_body_computes_in_stream_order_from_a_copy_of_its_data(void **state) {
    (void)state;
    struct pages pages = pages_make(1);
    uint64_t total = 0;
    struct sum sum = {.of = bytes_at(pages.at), .n = 1000, .into = &total};
    struct simgpu_kernel kernel = {.name = "sum",
                                   .body = sum_body,
                                   .data = &sum,
                                   .data_bytes = sizeof sum,
                                   .n_accesses = 1,
                                   .accesses = {{pages.at, 1000, 0}}};
    OK(cuMemsetD8Async(pages.at, 3, PAGE, NULL));
    OK(simgpu_launch(NULL, &kernel));
    sum.into = NULL; /* the launch has its own */
    OK(cuMemsetD8Async(pages.at, 5, PAGE, NULL));
    OK(cuStreamSynchronize(NULL));
    assert_int_equal(total, 3000);
}

static void launch_again(void *data) {
    struct sum *sum = data;
    sum->launch_result = simgpu_launch(NULL, &(struct simgpu_kernel){0});
}

static void a_body_must_not_launch(void **state) {
    (void)state;
    struct sum sum = {.launch_result = -1};
    OK(simgpu_launch(NULL, &(struct simgpu_kernel){.body = launch_again, .data = &sum}));
    OK(cuStreamSynchronize(NULL));
    REFUSED(sum.launch_result, CUDA_ERROR_NOT_PERMITTED);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        test(a_kernel_holds_its_stream_for_its_duration),
        test(late_wake_ups_do_not_add_up),
        test(values_that_are_there_take_no_time),
        test(copies_within_the_device_take_their_rate),
        test(host_functions_take_their_core_s_time),
        test(serial_host_functions_run_one_after_another),
        test(a_host_function_that_hands_its_work_over_takes_no_time),
        test(a_thread_s_work_takes_its_core_s_time),
        test(a_stream_goes_on_from_when_its_number_was_stored),
        test(a_thread_s_work_ends_without_a_word),
        test(kernels_of_two_streams_run_at_once),
        test(an_idle_stream_saves_no_time_up),
        test(the_null_stream_waits_for_kernels_of_blocking_streams),
        test(what_a_kernel_accesses_is_mapped_and_granted),
        test(unmapping_what_a_kernel_uses_is_an_illegal_access),
        test(what_is_wrong_is_refused),
        test(a_body_computes_in_stream_order_from_a_copy_of_its_data),
        test(a_body_must_not_launch),
    };
    return cmocka_run_group_tests_name("simgpu kernels", tests, NULL, NULL);
}
