/* Unordered accesses: which are reported, what a report says, races through one address. No test depends
 * on when the operations really run. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/simgpu/order_world.h"

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

static void any_number_of_accesses_is_announced(void **state) {
    (void)state;
    enum { N = 100 };
    static sem_t ignored;
    struct simgpu_access accesses[N];
    sem_init(&ignored, 0, 0);
    for (int last = 0; last < 2; last++) {
        world_make();
        for (int i = 0; i < N; i++) accesses[i] = (struct simgpu_access){w.alias + 64 * (uint64_t)i, 64, 1};
        assert_int_equal(simgpu_announce(accesses, N - !last), 0);
        OK(cuLaunchHostFunc(w.second, post, &ignored));
        touch(w.first, w.pages.at + 64 * (N - 1), 64, 0);
        assert_reported(last, "what the last one touches");
    }
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

static void an_answer_to_a_query_orders_nothing_where_races_are_strict(void **state) {
    (void)state;
    for (int waits = 0; waits < 2; waits++) {
        world_make();
        simgpu_set_races(SIMGPU_RACES_STRICT);
        touch(w.first, w.alias, 64, 1);
        OK(cuEventRecord(w.event, w.first));
        wait_unseen(w.first);
        assert_int_equal(cuEventQuery(w.event), CUDA_ERROR_NOT_READY);
        assert_int_equal(cuStreamQuery(w.first), CUDA_ERROR_NOT_READY);
        if (waits) {
            OK(cuEventSynchronize(w.event));
            OK(cuEventQuery(w.event));
        }
        touch(w.second, w.alias, 64, 1);
        assert_int_equal(cuCtxSynchronize(), waits ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS);
    }
}

static void signal_and_post(void *semaphore) {
    simgpu_signal(semaphore);
    sem_post(semaphore);
}

/* A thread of the program stores the word. What the work touched counts as the host function's, so the stream
 * is behind it, and what waits for the stream; one that waits for the same word alone is not. (It would be,
 * if anything else stored the word, as the host function has signalled.) */
static void a_word_of_a_thread_orders_the_stream_of_its_host_function_alone(void **state) {
    (void)state;
    static const struct {
        int races, how; /* 0: on the stream; 1: behind an event of it; 2: behind the same word alone */
        bool reports;
    } rows[] = {{SIMGPU_RACES_STRICT, 0, false}, {SIMGPU_RACES_STRICT, 1, false},
                {SIMGPU_RACES_STRICT, 2, true},  {SIMGPU_RACES, 0, false},
                {SIMGPU_RACES, 1, false},        {SIMGPU_RACES, 2, true}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        sem_t done;
        uint32_t *word = host_make(4096, false);
        unsigned char *host = host_make(4096, false);
        world_make();
        OK(cuMemHostRegister_v2(word, 4096, CU_MEMHOSTREGISTER_DEVICEMAP));
        OK(cuMemHostRegister_v2(host, 4096, CU_MEMHOSTREGISTER_DEVICEMAP));
        simgpu_set_races(rows[i].races);
        sem_init(&done, 0, 0);
        OK(simgpu_announce(&(struct simgpu_access){(uintptr_t)host, 64, 1}, 1));
        OK(cuLaunchHostFunc(w.first, signal_and_post, &done));
        OK(cuStreamWaitValue32_v2(w.first, (uintptr_t)word, 1, CU_STREAM_WAIT_VALUE_GEQ));
        CUstream stream = rows[i].how ? w.second : w.first;
        OK(cuEventRecord(w.event, w.first));
        if (rows[i].how == 1) OK(cuStreamWaitEvent(w.second, w.event, 0));
        if (rows[i].how == 2)
            OK(cuStreamWaitValue32_v2(w.second, (uintptr_t)word, 1, CU_STREAM_WAIT_VALUE_GEQ));
        OK(cuMemcpyHtoDAsync_v2(w.pages.at, host, 64, stream));
        while (sem_wait(&done) != 0) continue;
        simgpu_word_store(word, 1);
        assert_int_equal(cuCtxSynchronize(), rows[i].reports ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS);
        assert_int_equal(unordered_now().races, rows[i].reports);
        simgpu_reset();
        host_destroy(word, 4096);
        host_destroy(host, 4096);
    }
}

static void a_report_need_not_end_the_device(void **state) {
    (void)state;
    world_make();
    simgpu_set_races(SIMGPU_RACES_STRICT | SIMGPU_RACES_GO_ON);
    touch(w.first, w.alias, 64, 1);
    touch(w.second, w.alias, 64, 1);
    OK(cuCtxSynchronize());
    assert_int_equal(unordered_now().races, 1);
    simgpu_unordered_reset();
    touch(w.first, w.alias, 64, 1);
    OK(cuCtxSynchronize());
    assert_int_equal(unordered_now().races, 0);
}

/* ---- calls that order ---- */

static void first_then_second(void) {
    touch(w.first, w.alias, 64, 1);
    OK(cuEventRecord(w.event, w.first));
    OK(cuStreamWaitEvent(w.second, w.event, 0));
    OK(cuStreamWaitEvent(w.second, w.event, 0)); /* teaches nothing */
    touch(w.second, w.alias, 64, 1);
}

static void a_wait_is_counted_and_left_out(void **state) {
    (void)state;
    for (int dropped = 0; dropped < 3; dropped++) {
        world_make();
        simgpu_set_races(1);
        simgpu_stream_name(w.first, "one");
        simgpu_stream_name(w.second, "two");
        simgpu_sites_watch(1);
        struct simgpu_site rows[8], like = {.entry = "cuStreamWaitEvent", .stream = "two", .event = "one"};
        if (dropped == 2) like.event[0] = 't'; /* another one */
        if (dropped) assert_int_equal(simgpu_sites_drop(&like), 0);
        first_then_second();
        assert_int_equal(cuCtxSynchronize(), dropped == 1 ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS);
        assert_int_equal(simgpu_sites_list(rows, 8), 3);
        assert_string_equal(rows[0].entry, "cuEventRecord");
        assert_string_equal(rows[0].stream, "one");
        assert_true(rows[1].calls == 1 && rows[1].taught == (dropped != 1));
        assert_true(rows[2].calls == 1 && rows[2].taught == 0);
        simgpu_sites_watch(0);
    }
    assert_int_equal(simgpu_sites_drop(&(struct simgpu_site){.entry = "cuNothing"}), -1);
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
        test(any_number_of_accesses_is_announced),
        test(races_are_looked_for_on_demand),
        test(races_in_registered_memory),
        test(values_do_not_race_with_values),
        test(an_unmap_that_is_lucky_is_a_race),
        test(an_answer_to_a_query_orders_nothing_where_races_are_strict),
        test(a_word_of_a_thread_orders_the_stream_of_its_host_function_alone),
        test(a_report_need_not_end_the_device),
        test(a_wait_is_counted_and_left_out),
        test(the_environment_looks_for_races),
    };
    return cmocka_run_group_tests_name("simgpu order reports", tests, NULL, NULL);
}
