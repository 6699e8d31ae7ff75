/* test_model.c - what live jobs do, from segments that are filled here: nothing runs beside the test. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "tools/memtrace/frame.h"
#include "tools/memtrace/processes.h"
#include "torch_plugin/trace_events.h"

#define SECOND 1000000000ull
enum { RING = 64, SIZE = 1000, POOL = 3 };

/* A segment whose process is this one. */
typedef struct fake {
    fcdp_trace_header header;
    _Atomic uint64_t counters[FCDP_TRACE_N_COUNTERS];
    _Alignas(64) fcdp_trace_object objects[16];
    fcdp_trace_event ring[RING];
} fake;

static fake *fake_make(memtrace_model *model, int rank, int world_size, const char *command) {
    fake *f = mmap(NULL, sizeof *f, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(f != MAP_FAILED);
    f->header.ring_events = f->header.n_counters = f->header.n_objects = 1u << 30; /* not asked any more */
    f->header.rank = rank;
    f->header.world_size = world_size;
    strncpy(f->header.command, command, sizeof f->header.command - 1);
    memtrace_process_entry self;
    assert_true(memtrace_process_get(getpid(), &self));
    memtrace_segment segment = {.pid = getpid(),
                                .start_ticks = self.start_ticks,
                                .pidfd = -1,
                                .base = f,
                                .n_mapped_bytes = sizeof *f,
                                .header = &f->header,
                                .counters = f->counters,
                                .objects = f->objects,
                                .ring = f->ring,
                                .n_counters = FCDP_TRACE_N_COUNTERS,
                                .n_objects = sizeof f->objects / sizeof *f->objects,
                                .ring_events = RING};
    assert_true(memtrace_model_add(model, &segment));
    return f;
}

static void fake_event(fake *f, fcdp_trace_event event) {
    uint64_t n = atomic_fetch_add(&f->header.head, 1);
    event.stamp = 2 * n + 2;
    event.step = f->header.step;
    f->ring[n % RING] = event;
}

static void fake_object(fake *f, uint32_t number, const char *name) {
    fcdp_trace_object *object = &f->objects[number];
    object->generation += 2;
    object->state = FCDP_OBJECT_LIVE;
    object->bytes = SIZE;
    object->device_bytes = object->host_bytes = 0;
    strncpy(object->name, name, sizeof object->name - 1);
}

static void fake_state(fake *f, uint32_t number, uint64_t device_bytes, uint64_t host_bytes) {
    f->objects[number].device_bytes = device_bytes;
    f->objects[number].host_bytes = host_bytes;
    fake_event(f, (fcdp_trace_event){.kind = FCDP_EVENT_STATE,
                                     .object = number,
                                     .flags = FCDP_OBJECT_LIVE << FCDP_TRACE_STATE_SHIFT,
                                     .a = device_bytes,
                                     .b = host_bytes});
}

/* The holder of gathered parameters has `bytes` at `time_ns`. */
static void fake_held(fake *f, uint64_t time_ns, uint64_t bytes) {
    uint64_t had = f->counters[FCDP_COUNT_HELD_1_BYTES];
    f->counters[FCDP_COUNT_HELD_1_BYTES] = bytes;
    fake_event(f, (fcdp_trace_event){.kind = bytes > had ? FCDP_EVENT_PAGES_TAKE : FCDP_EVENT_PAGES_GIVE,
                                     .time_ns = time_ns,
                                     .bytes = bytes > had ? bytes - had : had - bytes,
                                     .a = 1 | POOL << 8,
                                     .b = bytes});
}

static memtrace_model *model_make(size_t history_bytes) {
    memtrace_model *model = memtrace_model_create(history_bytes);
    assert_non_null(model);
    return model;
}

static memtrace_frame *frame_at(const memtrace_model *model, uint64_t at_ns, bool at_peak) {
    memtrace_query query = {.at_ns = at_ns, .at_peak = at_peak, .window_ns = SECOND};
    memtrace_frame *frame = memtrace_frame_create(model, &query);
    assert_non_null(frame);
    return frame;
}

static void what_a_slow_reader_missed_is_counted(void **state) {
    (void)state;
    memtrace_model *model = model_make(1 << 20);
    fake *f = fake_make(model, 0, 1, "a");
    memtrace_model_poll(model, SECOND);
    for (int i = 0; i < 200; i++) fake_event(f, (fcdp_trace_event){.kind = FCDP_EVENT_PASS});
    memtrace_model_poll(model, 2 * SECOND);
    memtrace_frame *frame = frame_at(model, UINT64_MAX, false);
    assert_int_equal(frame->n_lost, 200 - RING);
    memtrace_frame_destroy(frame);
    memtrace_model_destroy(model);
}

static void an_event_that_never_comes_holds_up_one_poll(void **state) {
    (void)state;
    memtrace_model *model = model_make(1 << 20);
    fake *f = fake_make(model, 0, 1, "a");
    uint64_t n = atomic_fetch_add(&f->header.head, 1); /* its writer was killed in the middle */
    f->ring[n % RING].stamp = 2 * n + 1;
    fake_event(f, (fcdp_trace_event){
                      .kind = FCDP_EVENT_HOST_WAIT, .cause = FCDP_CAUSE_FOR_MEMORY, .duration_ns = 5000});
    uint64_t waited[2];
    for (int i = 0; i < 2; i++) {
        memtrace_model_poll(model, (uint64_t)(i + 1) * SECOND);
        memtrace_frame *frame = frame_at(model, UINT64_MAX, false);
        waited[i] = (uint64_t)frame->ranks[0].all_waited_ns;
        memtrace_frame_destroy(frame);
    }
    assert_int_equal(waited[0], 0);
    assert_int_equal(waited[1], 5000);
    memtrace_model_destroy(model);
}

/* There is no next poll. */
static void what_follows_an_event_that_never_comes_is_read_at_the_end(void **state) {
    (void)state;
    for (int is_killed = 0; is_killed < 2; is_killed++) {
        memtrace_model *model = model_make(1 << 20);
        fake *f = fake_make(model, 0, 1, "a");
        memtrace_model_poll(model, SECOND);
        uint64_t n = atomic_fetch_add(&f->header.head, 1);
        f->ring[n % RING].stamp = 2 * n + 1;
        fake_event(f, (fcdp_trace_event){.kind = FCDP_EVENT_STALL, .duration_ns = 5000});
        if (is_killed)
            model->processes[0]->segment.start_ticks++; /* that process is not there */
        else
            f->header.ended = 1;
        memtrace_model_poll(model, 2 * SECOND);
        memtrace_frame *frame = frame_at(model, UINT64_MAX, false);
        assert_int_equal(frame->n_running, 0);
        assert_int_equal((uint64_t)frame->ranks[0].all_waited_ns, 5000);
        memtrace_frame_destroy(frame);
        memtrace_model_destroy(model);
    }
}

static void a_number_that_serves_again_is_another_region(void **state) {
    (void)state;
    memtrace_model *model = model_make(1 << 20);
    fake *f = fake_make(model, 0, 1, "a");
    fake_object(f, 3, "first");
    fake_event(f, (fcdp_trace_event){.kind = FCDP_EVENT_STORE, .object = 3, .bytes = 7});
    memtrace_model_poll(model, SECOND);
    fake_object(f, 3, "second");
    fake_event(f, (fcdp_trace_event){.kind = FCDP_EVENT_STORE, .object = 3, .bytes = 5});
    memtrace_model_poll(model, 2 * SECOND);
    static const char *const names[] = {"first", "second"};
    for (uint64_t i = 0; i < 2; i++) {
        memtrace_frame *frame = frame_at(model, (i + 1) * SECOND, false);
        assert_int_equal(frame->n_rows, 1);
        assert_string_equal(frame->rows[0].name, names[i]);
        if (i) assert_float_equal(frame->rows[0].moved_per_s[MEMTRACE_TO_HOST], 5, 1e-9);
        memtrace_frame_destroy(frame);
    }
    memtrace_model_destroy(model);
}

static void the_peak_is_seen_between_two_polls(void **state) {
    (void)state;
    memtrace_model *model = model_make(1 << 20);
    fake *f = fake_make(model, 0, 1, "a");
    fake_object(f, 1, "one");
    fake_object(f, 2, "two");
    memtrace_model_poll(model, SECOND);
    fake_state(f, 1, SIZE, 0);
    fake_held(f, SECOND + 10, 3 * SIZE);
    fake_held(f, SECOND + 20, SIZE);
    fake_state(f, 1, 0, SIZE);
    fake_state(f, 2, SIZE, 0);
    fake_held(f, SECOND + 30, 2 * SIZE);
    memtrace_model_poll(model, 2 * SECOND);
    memtrace_frame *now = frame_at(model, UINT64_MAX, false), *peak = frame_at(model, UINT64_MAX, true);
    assert_int_equal(now->rows[0].device_bytes, 0);
    assert_int_equal(now->rows[1].device_bytes, SIZE);
    assert_int_equal(peak->at_ns, SECOND + 10);
    assert_int_equal(peak->ranks[0].sample->held_bytes[1], 3 * SIZE);
    assert_int_equal(peak->rows[0].device_bytes, SIZE);
    assert_int_equal(peak->rows[0].host_bytes, 0);
    assert_int_equal(peak->rows[1].device_bytes, 0);
    memtrace_frame_destroy(now);
    memtrace_frame_destroy(peak);
    memtrace_model_destroy(model);
}

/* Its earlier events were overwritten before the follower began: the counters alone tell of it. */
static void what_was_held_before_the_first_event_is_counted_once(void **state) {
    (void)state;
    memtrace_model *model = model_make(1 << 20);
    fake *f = fake_make(model, 0, 1, "a");
    f->counters[FCDP_COUNT_HELD_1_BYTES] = 5 * SIZE;
    memtrace_model_poll(model, SECOND);
    fake_held(f, SECOND + 10, 4 * SIZE);
    memtrace_model_poll(model, 2 * SECOND);
    memtrace_frame *now = frame_at(model, UINT64_MAX, false), *peak = frame_at(model, UINT64_MAX, true);
    assert_int_equal(now->ranks[0].sample->held_bytes[1], 4 * SIZE);
    assert_int_equal(peak->ranks[0].sample->held_bytes[1], 5 * SIZE);
    memtrace_frame_destroy(now);
    memtrace_frame_destroy(peak);
    memtrace_model_destroy(model);
}

static void history_takes_no_more_than_it_may(void **state) {
    (void)state;
    size_t may = 20 * sizeof(memtrace_sample);
    memtrace_model *model = model_make(may);
    for (int rank = 0; rank < 2; rank++) fake_object(fake_make(model, rank, 2, "a"), 1, "one");
    for (uint64_t i = 1; i <= 100; i++) {
        memtrace_model_poll(model, i * SECOND);
        assert_true(model->sample_bytes <= may);
    }
    memtrace_frame *frame = frame_at(model, UINT64_MAX, false);
    assert_int_equal(frame->newest_ns, 100 * SECOND);
    assert_in_range(frame->oldest_ns, 85 * SECOND, 99 * SECOND);
    memtrace_frame_destroy(frame);
    size_t bytes = 0;
    for (size_t i = 0; i < model->n_processes; i++)
        for (size_t k = 0; k < model->processes[i]->n_samples; k++)
            bytes += model->processes[i]->samples[k]->sample_bytes;
    assert_int_equal(bytes, model->sample_bytes);
    model->history_bytes = 1;
    memtrace_model_poll(model, 101 * SECOND);
    for (size_t i = 0; i < model->n_processes; i++) assert_int_equal(model->processes[i]->n_samples, 1);
    memtrace_model_destroy(model);
}

static void ranks_of_one_command_are_one_job(void **state) {
    (void)state;
    memtrace_model *model = model_make(1 << 20);
    static const struct {
        int rank, world_size;
        const char *command;
        uint32_t job;
    } cases[] = {{0, 2, "a", 0}, {1, 2, "a", 0},  {0, 2, "b", 2},  {1, 2, "b", 2},
                 {0, 2, "a", 4}, {-1, 0, "a", 5}, {-1, 0, "a", 6}, {1, 2, "a", 4}};
    enum { N = sizeof cases / sizeof *cases };
    for (int i = 0; i < N; i++) fake_make(model, cases[i].rank, cases[i].world_size, cases[i].command);
    memtrace_model_poll(model, SECOND);
    for (int i = 0; i < N; i++) assert_int_equal(model->processes[i]->job, cases[i].job);
    memtrace_query query = {.at_ns = UINT64_MAX, .window_ns = SECOND};
    memtrace_frame *last = memtrace_frame_create(model, &query);
    assert_int_equal(last->n_jobs, 5);
    assert_int_equal(last->job, 4);
    memtrace_frame_destroy(last);
    memtrace_model_destroy(model);
}

/* Rank 1 waits longer; the sums are of both. */
static void waits_are_per_step_and_rates_per_second(void **state) {
    (void)state;
    memtrace_model *model = model_make(1 << 20);
    fake *ranks[2];
    for (int i = 0; i < 2; i++) fake_object(ranks[i] = fake_make(model, i, 2, "a"), 1, "one");
    for (uint64_t second = 1; second <= 10; second++) {
        for (int i = 0; i < 2; i++) {
            fake_event(ranks[i],
                       (fcdp_trace_event){.kind = FCDP_EVENT_GATHER, .object = 1, .a = 300, .b = 100});
            ranks[i]->counters[FCDP_COUNT_GATHER_INTER_BYTES] += 300;
            fake_event(ranks[i], (fcdp_trace_event){.kind = FCDP_EVENT_STALL, .duration_ns = 10});
            fake_event(ranks[i], (fcdp_trace_event){.kind = FCDP_EVENT_HOST_WAIT,
                                                    .cause = FCDP_CAUSE_FOR_AGREEMENT,
                                                    .duration_ns = i ? 70 : 20});
            ranks[i]->header.step++;
            fake_event(ranks[i], (fcdp_trace_event){.kind = FCDP_EVENT_STEP, .time_ns = second * SECOND - 5});
        }
        memtrace_model_poll(model, second * SECOND);
    }
    memtrace_frame *frame = frame_at(model, UINT64_MAX, false);
    assert_int_equal(frame->worst, 1);
    assert_float_equal(frame->ranks[1].all_waited_ns, 80, 1e-9);
    assert_float_equal(frame->ranks[1].waited_ns[MEMTRACE_STALL], 10, 1e-9);
    assert_float_equal(frame->ranks[1].waited_ns[MEMTRACE_FIRST_CAUSE], 70, 1e-9);
    assert_float_equal(frame->ranks[0].step_ns, 1e9, 1e-9);
    assert_float_equal(frame->rows[0].moved_per_s[MEMTRACE_BETWEEN_NODES], 600, 1e-9);
    assert_float_equal(frame->rows[0].moved_per_s[MEMTRACE_WITHIN_NODE], 200, 1e-9);
    assert_float_equal(frame->moved_per_s[MEMTRACE_BETWEEN_NODES], 600, 1e-9);
    assert_int_equal(frame->rows[0].n_ranks, 2);
    assert_int_equal(frame->rows[0].bytes, 2 * SIZE);
    memtrace_frame_destroy(frame);
    memtrace_model_destroy(model);
}

static void who_is_gone_has_ended_or_was_killed(void **state) {
    (void)state;
    memtrace_model *model = model_make(1 << 20);
    fake *f[3];
    for (int i = 0; i < 3; i++) f[i] = fake_make(model, i, 3, "a");
    memtrace_model_poll(model, SECOND);
    f[0]->header.ended = 1;
    model->processes[1]->segment.start_ticks++; /* that process is not there */
    fake_object(f[1], 1, "its last words");
    memtrace_model_poll(model, 2 * SECOND);
    memtrace_model_poll(model, 3 * SECOND);
    memtrace_frame *frame = frame_at(model, UINT64_MAX, false);
    assert_int_equal(frame->n_running, 1);
    assert_int_equal(frame->n_ended, 1);
    assert_int_equal(frame->n_killed, 1);
    assert_int_equal(frame->n_rows, 1);
    assert_string_equal(frame->rows[0].name, "its last words");
    assert_int_equal(frame->ranks[1].sample->time_ns, 2 * SECOND);
    memtrace_frame_destroy(frame);
    memtrace_model_destroy(model);
}

static void the_last_state_is_that_before_the_regions_went(void **state) {
    (void)state;
    memtrace_model *model = model_make(1 << 20);
    fake *f = fake_make(model, 0, 1, "a");
    for (uint32_t i = 1; i <= 3; i++) fake_object(f, i, "layer");
    f->objects[2].device_bytes = SIZE;
    f->counters[FCDP_COUNT_BUDGET_BYTES] = 9;
    f->counters[FCDP_COUNT_STEPS] = 1;
    memtrace_model_poll(model, SECOND);
    f->objects[2].state = 0; /* it is taken down, and this takes several polls */
    f->counters[FCDP_COUNT_STEPS] = 2;
    memtrace_model_poll(model, 2 * SECOND);
    f->objects[1].state = f->objects[3].state = 0;
    f->counters[FCDP_COUNT_BUDGET_BYTES] = 0;
    memtrace_model_poll(model, 3 * SECOND);
    memtrace_model_poll(model, 4 * SECOND);
    f->header.ended = 1;
    memtrace_model_poll(model, 5 * SECOND);
    const memtrace_live_process *p = model->processes[0];
    const memtrace_sample *last = memtrace_live_process_at(p, UINT64_MAX);
    assert_int_equal(last->time_ns, 5 * SECOND);
    assert_int_equal(last->n_places, 3);
    assert_int_equal(last->places[1].device_bytes, SIZE);
    assert_int_equal(last->counters[FCDP_COUNT_BUDGET_BYTES], 9);
    assert_int_equal(last->counters[FCDP_COUNT_STEPS], 2);
    memtrace_model_destroy(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_a_slow_reader_missed_is_counted),
        cmocka_unit_test(an_event_that_never_comes_holds_up_one_poll),
        cmocka_unit_test(what_follows_an_event_that_never_comes_is_read_at_the_end),
        cmocka_unit_test(a_number_that_serves_again_is_another_region),
        cmocka_unit_test(the_peak_is_seen_between_two_polls),
        cmocka_unit_test(what_was_held_before_the_first_event_is_counted_once),
        cmocka_unit_test(history_takes_no_more_than_it_may),
        cmocka_unit_test(ranks_of_one_command_are_one_job),
        cmocka_unit_test(waits_are_per_step_and_rates_per_second),
        cmocka_unit_test(who_is_gone_has_ended_or_was_killed),
        cmocka_unit_test(the_last_state_is_that_before_the_regions_went),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
