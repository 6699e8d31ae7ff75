/* Spans of streams: the device's times, from events that are made once; and what the pool writes of itself.
 * Each test is a process of its own, since a process has one ring for life. */
#include "alloc/pages.h"
#include "alloc/trace_events.h"
#include "alloc/trace_stream.h"
#include "tests/alloc/support.h"
#include "tests/log_text.h"

enum { RING_EVENTS = 8192, WORK_NS = 5000000, TRACK = 7, FIRST_PAIRS = 64, MOST_PAIRS = 1024 };

typedef struct world {
    fcdp_driver *drv;
    fcdp_stream stream;
    fcdp_trace_spans *spans;
    const fcdp_trace_header *header;
} world;

static void in_a_child(void (*test)(world *)) {
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        world w = {.drv = driver_open_sim()};
        assert_ok(fcdp__driver_stream_create(w.drv, &w.stream));
        fcdp_trace_open(1, RING_EVENTS * FCDP_TRACE_EVENT_BYTES);
        w.spans = fcdp__trace_spans_create(w.drv);
        w.header = fcdp__trace_header();
        if (!w.spans) _exit(2);
        test(&w);
        fcdp__trace_spans_destroy(w.spans);
        fcdp__driver_stream_destroy(w.drv, w.stream);
        fcdp__driver_close(w.drv);
        assert_nothing_lives();
        _exit(0);
    }
    int wait_status = 0;
    assert_int_equal(waitpid(pid, &wait_status, 0), pid);
    assert_int_equal(wait_status, 0);
}

static uint64_t counter(const world *w, unsigned number) {
    return ((const _Atomic uint64_t *)(uintptr_t)((uintptr_t)w->header + w->header->counters_at))[number];
}

static fcdp_trace_event event_at(const world *w, uint64_t n) {
    fcdp_trace_event event;
    memcpy(&event, (const char *)w->header + w->header->ring_at + n % RING_EVENTS * sizeof event,
           sizeof event);
    MUST(event.stamp == 2 * n + 2);
    return event;
}

static const fcdp_trace_event load = {.kind = 36, .bytes = 4711, .a = 3};

/* A span around so much work. */
static void span_run(const world *w, uint64_t work_ns) {
    fcdp_trace_span span = fcdp__trace_span_begin(w->spans, w->stream, TRACK);
    if (work_ns) MUST(!simgpu_launch(w->stream, &(struct simgpu_kernel){.duration_ns = work_ns}));
    fcdp__trace_span_end(w->spans, span, w->stream, &load, 1);
}

static void times(world *w) {
    uint64_t before = fcdp__now_ns(), head = w->header->head, last_ns = before;
    for (int i = 0; i < 3; i++) span_run(w, WORK_NS);
    fcdp__trace_spans_poll(w->spans); /* at most the first has ended */
    MUST(counter(w, FCDP_COUNT_SPANS_BEGUN) == 3 && counter(w, FCDP_COUNT_SPANS_ENDED) < 3);
    MUST(!fcdp__driver_stream_sync(w->drv, w->stream));
    uint64_t after = fcdp__now_ns();
    fcdp__trace_spans_poll(w->spans);
    MUST(w->header->head == head + 3 && counter(w, FCDP_COUNT_SPANS_ENDED) == 3);
    for (uint64_t n = head; n < head + 3; n++) {
        fcdp_trace_event event = event_at(w, n);
        MUST(event.kind == load.kind && event.bytes == load.bytes && event.a == 3 && event.thread == TRACK);
        MUST(event.flags == FCDP_TRACE_ON_STREAM && event.time_ns >= last_ns);
        MUST(event.duration_ns > WORK_NS * 9 / 10 && event.duration_ns < 200ull * WORK_NS);
        last_ns = event.time_ns + event.duration_ns;
    }
    MUST(last_ns < after + 10ull * WORK_NS && counter(w, FCDP_COUNT_SPANS_UNTIMED) == 0);
}

static void a_span_has_the_devices_times(void **state) {
    (void)state;
    in_a_child(times);
}

typedef struct work {
    const world *of;
    fcdp_trace_span span;
} work;

static void bytes_say(void *arg) {
    const work *w = arg;
    fcdp__trace_span_bytes(w->of->spans, w->span, 1234);
}

/* The second span has the pair of the first, whose work says its bytes once more: they are of the first. */
static void bytes_of_the_work(world *w) {
    work says = {0};
    for (int round = 0; round < 2; round++) {
        uint64_t head = w->header->head;
        fcdp_trace_span span = fcdp__trace_span_begin(w->spans, w->stream, TRACK);
        if (round == 0) says = (work){w, span};
        MUST(span.number == says.span.number);
        MUST(!fcdp__driver_host_function(w->drv, w->stream, bytes_say, &says));
        MUST(!fcdp__driver_stream_sync(w->drv, w->stream)); /* the work may run before the span ends */
        fcdp__trace_span_end(w->spans, span, w->stream, &load, 1);
        MUST(!fcdp__driver_stream_sync(w->drv, w->stream));
        fcdp__trace_spans_poll(w->spans);
        fcdp_trace_event event = event_at(w, head);
        MUST(w->header->head == head + 1 && event.duration_ns > 0);
        MUST(event.bytes == (round ? load.bytes : 1234) && event.a == (round ? load.a : 1234));
    }
}

static void the_work_says_its_bytes(void **state) {
    (void)state;
    in_a_child(bytes_of_the_work);
}

/* More than there are pairs, again and again: they become more, up to a bound, and then nothing is
 * created. */
static void exhaust(world *w) {
    enum { TOO_MANY = 10 };
    uint64_t n_spans = 0, n_untimed = 0;
    for (int n_pairs = FIRST_PAIRS, n_full = 0; n_full < 3; n_full += n_pairs == MOST_PAIRS) {
        unsigned long before = simgpu_calls("cuEventCreate");
        for (int i = 0; i < n_pairs + TOO_MANY; i++) span_run(w, 0);
        MUST(simgpu_calls("cuEventCreate") == before);
        MUST(!fcdp__driver_stream_sync(w->drv, w->stream));
        before = simgpu_calls("cuEventCreate");
        fcdp__trace_spans_poll(w->spans);
        int n_more = n_pairs < MOST_PAIRS ? n_pairs : 0;
        MUST(simgpu_calls("cuEventCreate") == before + 2 * (unsigned long)n_more);
        n_spans += (uint64_t)(n_pairs + TOO_MANY);
        n_untimed += TOO_MANY;
        n_pairs += n_more;
        MUST(counter(w, FCDP_COUNT_SPANS_BEGUN) == n_spans && counter(w, FCDP_COUNT_SPANS_ENDED) == n_spans);
        MUST(w->header->head == n_spans && counter(w, FCDP_COUNT_SPANS_UNTIMED) == n_untimed);
    }
    fcdp__trace_span_drop(w->spans, fcdp__trace_span_begin(w->spans, w->stream, TRACK));
    MUST(w->header->head == n_spans);
}

static void a_span_too_many_has_the_hosts_time(void **state) {
    (void)state;
    in_a_child(exhaust);
}

/* Whichever call of the driver fails: the event is there, the thread's failure text is the program's. */
static void faults(world *w) {
    (void)!fcdp__fail(FCDP_ERR_INVALID, "the program's own");
    static const char *const calls[] = {"cuEventRecord", "cuEventElapsedTime"};
    uint64_t n = 0;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        for (unsigned long nth = 1; nth <= 2; nth++) {
            simgpu_fail_nth(calls[i], nth, CUDA_UNKNOWN);
            span_run(w, 0);
            simgpu_fail_nth(NULL, 0, 0);
            MUST(!fcdp__driver_stream_sync(w->drv, w->stream));
            if (i) simgpu_fail_nth(calls[i], nth, CUDA_UNKNOWN);
            fcdp__trace_spans_poll(w->spans);
            simgpu_fail_nth(NULL, 0, 0);
            n++;
            MUST(w->header->head == n && counter(w, FCDP_COUNT_SPANS_ENDED) == n);
            MUST(counter(w, FCDP_COUNT_SPANS_UNTIMED) == n);
            MUST(event_at(w, n - 1).duration_ns == 0 && event_at(w, n - 1).time_ns != 0);
        }
    MUST(!strcmp(fcdp_error_text(), "the program's own"));
}

static void a_failing_driver_costs_the_times_alone(void **state) {
    (void)state;
    in_a_child(faults);
}

/* Two events of one span, counters of another, and what never ends is written when all ends. */
static void no_events(world *w) {
    log_keep(FCDP_LOG_INFO);
    simgpu_fail_nth("cuEventCreate", 1, CUDA_UNKNOWN);
    fcdp_trace_spans *spans = fcdp__trace_spans_create(w->drv);
    const char *said = log_kept();
    MUST(!spans);
    MUST(strstr(said, "info: no device times are traced: the driver gave no events that know them\n"));
}

static void a_driver_without_events_is_said(void **state) {
    (void)state;
    in_a_child(no_events);
}

static void several(world *w) {
    const fcdp_trace_event two[] = {load, {.kind = 65, .bytes = 1}};
    fcdp_trace_span span = fcdp__trace_span_begin(w->spans, w->stream, TRACK);
    fcdp__trace_span_end(w->spans, span, w->stream, two, 2);
    span = fcdp__trace_span_begin(w->spans, w->stream, TRACK);
    MUST(!simgpu_launch(w->stream, &(struct simgpu_kernel){.duration_ns = WORK_NS}));
    fcdp__trace_span_end_counted(w->spans, span, w->stream, &load, 100, 101);
    MUST(!fcdp__driver_stream_sync(w->drv, w->stream));
    fcdp__trace_spans_poll(w->spans);
    MUST(w->header->head == 3 && event_at(w, 1).kind == 65);
    MUST(event_at(w, 0).time_ns == event_at(w, 1).time_ns && counter(w, 100) == 1);
    MUST(counter(w, 101) == event_at(w, 2).duration_ns && counter(w, 101) > WORK_NS / 2);
    span_run(w, 20 * WORK_NS);
    fcdp__trace_spans_destroy(w->spans);
    w->spans = NULL;
    MUST(w->header->head == 4 && event_at(w, 3).duration_ns == 0);
    MUST(!fcdp__driver_stream_sync(w->drv, w->stream));
}

static void spans_of_two_events_and_of_counters(void **state) {
    (void)state;
    in_a_child(several);
}

/* ---- the pool ---- */

typedef struct sums {
    uint64_t created, held[FCDP_N_HOLDERS];
} sums;

/* What the ring says of pool `pool`, from the first event on; each must say what is so after it. */
static sums sums_of(const world *w, uint64_t pool) {
    sums s = {0};
    for (uint64_t n = 0; n < w->header->head; n++) {
        fcdp_trace_event e = event_at(w, n);
        if (e.kind == FCDP_EVENT_PAGES_CREATE || e.kind == FCDP_EVENT_PAGES_RELEASE) {
            s.created += e.kind == FCDP_EVENT_PAGES_CREATE ? e.bytes : -e.bytes;
            MUST(e.a == pool && e.b == s.created);
        } else if (e.kind == FCDP_EVENT_PAGES_TAKE || e.kind == FCDP_EVENT_PAGES_GIVE) {
            uint64_t *held = &s.held[e.a & 0xFF];
            *held += e.kind == FCDP_EVENT_PAGES_TAKE ? e.bytes : -e.bytes;
            MUST(e.a >> 8 == pool && e.b == *held);
        }
        MUST(s.held[0] + s.held[1] <= s.created);
    }
    return s;
}

static fcdp_pool *the_pool;
static fcdp_phys kept[2];
static size_t give_two(void *ctx, size_t n_pages) {
    size_t *n_left = ctx;
    (void)n_pages;
    if (!*n_left) return 0;
    fcdp__pool_give(the_pool, 1, 2, kept);
    *n_left = 0;
    return 2;
}

static uint64_t n_of(const world *w, unsigned kind) {
    uint64_t found = 0;
    for (uint64_t n = 0; n < w->header->head; n++) found += event_at(w, n).kind == kind;
    return found;
}

static void pool_tells(world *w) {
    const size_t page = fcdp__driver_page_bytes(w->drv);
    fcdp_phys pages[4], handle;
    size_t n_left = 1;
    MUST(!fcdp__pool_create(w->drv, 4 * page, &the_pool));
    fcdp__pool_set_reclaimer(the_pool, FCDP_RECLAIM_EVICT, give_two, NULL, &n_left);
    MUST(!fcdp__pool_take(the_pool, 1, 2, kept) && !fcdp__pool_take(the_pool, 0, 1, pages));
    MUST(n_of(w, FCDP_EVENT_PRESSURE) == 0);
    MUST(!fcdp__pool_take(the_pool, 0, 3, pages + 1)); /* needs what the reclaimer gives */
    MUST(n_of(w, FCDP_EVENT_PRESSURE) == 1 && n_of(w, FCDP_EVENT_RECLAIM) == 1);
    MUST(n_of(w, FCDP_EVENT_OOM_AVOIDED) == 1 && n_of(w, FCDP_EVENT_OOM) == 0);
    MUST(fcdp__pool_take_handle(the_pool, 1, 1, &handle) == FCDP_ERR_NO_DEVICE_MEM);
    MUST(n_of(w, FCDP_EVENT_OOM) == 1 && counter(w, FCDP_COUNT_OOMS) == 1);
    MUST(fcdp__pool_seek(the_pool, 0, 1, pages) == FCDP_PENDING); /* its holder may find others */
    MUST(n_of(w, FCDP_EVENT_PRESSURE) == 3 && n_of(w, FCDP_EVENT_OOM) == 1);
    fcdp__pool_trace_oom(the_pool, page);
    MUST(n_of(w, FCDP_EVENT_OOM) == 2 && counter(w, FCDP_COUNT_OOMS) == 2);
    MUST(counter(w, FCDP_COUNT_CREATED_BYTES) == 4 * page && counter(w, FCDP_COUNT_HELD_0_BYTES) == 4 * page);
    MUST(counter(w, FCDP_COUNT_PEAK_1_BYTES) == 2 * page && counter(w, FCDP_COUNT_BUDGET_BYTES) == 4 * page);
    fcdp__pool_give(the_pool, 0, 4, pages);
    MUST(counter(w, FCDP_COUNT_CACHED_BYTES) == 4 * page);
    MUST(!fcdp__pool_take_handle(the_pool, 1, 3, &handle));
    sums s = sums_of(w, 1);
    MUST(s.created == counter(w, FCDP_COUNT_CREATED_BYTES) && s.held[1] == 3 * page && s.held[0] == 0);
    fcdp__pool_give_handle(the_pool, 1, 3, handle);
    fcdp__pool_set_reclaimer(the_pool, FCDP_RECLAIM_EVICT, NULL, NULL, NULL);
    fcdp__pool_destroy(the_pool);
    s = sums_of(w, 1);
    MUST(s.created == 0 && s.held[1] == 0 && counter(w, FCDP_COUNT_BUDGET_BYTES) == 0);
    MUST(counter(w, FCDP_COUNT_CREATED_BYTES) == 0 && counter(w, FCDP_COUNT_CACHED_BYTES) == 0);
}

static void the_pools_events_add_up_to_its_counts(void **state) {
    (void)state;
    in_a_child(pool_tells);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_span_has_the_devices_times),
        cmocka_unit_test(the_work_says_its_bytes),
        cmocka_unit_test(a_span_too_many_has_the_hosts_time),
        cmocka_unit_test(a_failing_driver_costs_the_times_alone),
        cmocka_unit_test(a_driver_without_events_is_said),
        cmocka_unit_test(spans_of_two_events_and_of_counters),
        cmocka_unit_test(the_pools_events_add_up_to_its_counts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
