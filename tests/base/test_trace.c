/* The ring: every event that a reader takes is whole, what is lost is counted, no writer waits, and a forked
 * child writes nothing. Each test is a process of its own, since a process has one ring for life. */
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "alloc/trace_events.h"
#include "base/trace.h"
#include "tests/alloc/support.h"
#include "tests/log_text.h"

enum { RING_EVENTS = 1024, RING_BYTES = RING_EVENTS * FCDP_TRACE_EVENT_BYTES, N_WRITERS = 4, N_EACH = 60000 };

/* `test` in a child: what it asserts fails there, with its message. */
static void in_a_child(void (*test)(void)) {
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        test();
        exit(0);
    }
    int wait_status = 0;
    assert_int_equal(waitpid(pid, &wait_status, 0), pid);
    assert_int_equal(wait_status, 0);
}

/* ---- a reader ---- */

/* This process's segment, found as readers find it; -1: none. */
static int segment_descriptor(void) {
    char path[64], target[64];
    for (int descriptor = 0; descriptor < 256; descriptor++) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", descriptor);
        ssize_t n = readlink(path, target, sizeof target);
        const char *name = "/memfd:" FCDP_TRACE_MEMFD;
        if (n > (ssize_t)strlen(name) && !memcmp(target, name, strlen(name))) return descriptor;
    }
    return -1;
}

typedef _Atomic uint64_t slot_words[FCDP_TRACE_EVENT_BYTES / 8];

static slot_words *slot_of(const fcdp_trace_header *header, uint64_t n) {
    return (slot_words *)((uintptr_t)header + header->ring_at) + (n & (header->ring_events - 1));
}

/* Event n; false: it is not there whole, now or any more. */
static bool event_read(const fcdp_trace_header *header, uint64_t n, fcdp_trace_event *event_out) {
    slot_words *slot = slot_of(header, n);
    uint64_t words[FCDP_TRACE_EVENT_BYTES / 8];
    if (atomic_load_explicit(&(*slot)[0], memory_order_acquire) != 2 * n + 2) return false;
    for (size_t i = 1; i < sizeof words / 8; i++)
        words[i] = atomic_load_explicit(&(*slot)[i], memory_order_acquire);
    words[0] = n;
    memcpy(event_out, words, sizeof words);
    return atomic_load_explicit(&(*slot)[0], memory_order_acquire) == 2 * n + 2;
}

/* What a writer of these tests puts into b. */
static uint64_t checksum(const fcdp_trace_event *event) {
    uint64_t state = event->time_ns ^ event->duration_ns << 1 ^ event->bytes << 2 ^ event->a << 3 ^
                     (uint64_t)event->kind << 40 ^ (uint64_t)event->cause << 32 ^
                     (uint64_t)event->flags << 24 ^ event->object;
    return random_next(&state);
}

/* ---- many writers ---- */

static void *writer_main(void *arg) {
    uint64_t state = (uint64_t)(uintptr_t)arg;
    for (int i = 0; i < N_EACH; i++) {
        fcdp_trace_event event = {.time_ns = random_next(&state) | 1,
                                  .duration_ns = random_next(&state),
                                  .bytes = random_next(&state),
                                  .kind = (uint16_t)random_next(&state),
                                  .cause = (uint8_t)random_next(&state),
                                  .flags = (uint8_t)random_next(&state),
                                  .object = (uint32_t)random_below(&state, FCDP_TRACE_N_OBJECTS),
                                  .a = random_next(&state)};
        event.b = checksum(&event);
        fcdp__trace(&event);
        fcdp__trace_count(FCDP_COUNT_MAPS, 3);
    }
    return NULL;
}

/* Reads until `stop`, far too slowly for all of them: how many were whole. */
static atomic_bool stop;
static void *reader_main(void *arg) {
    const fcdp_trace_header *header = fcdp__trace_header();
    uint64_t n_read = 0, n = 0;
    fcdp_trace_event event;
    while (!atomic_load(&stop)) {
        uint64_t head = atomic_load_explicit(&header->head, memory_order_acquire);
        if (head > n + RING_EVENTS) n = head - RING_EVENTS;
        for (; n < head; n++) {
            if (!event_read(header, n, &event)) continue;
            MUST(event.b == checksum(&event));
            n_read++;
        }
    }
    *(uint64_t *)arg = n_read;
    return NULL;
}

/* At the end each slot holds the last event that was numbered for it, unless that one was dropped. */
static void writers_and_a_reader(void) {
    pthread_t writers[N_WRITERS], reader;
    uint64_t n_read = 0, n_missing = 0, seed = seed_choose("writers_and_a_reader");
    fcdp_trace_event event;
    fcdp_trace_open(1, RING_BYTES);
    fcdp_trace_header *header = fcdp__trace_header();
    MUST(header && header->ring_events == RING_EVENTS);
    MUST(!pthread_create(&reader, NULL, reader_main, &n_read));
    for (uintptr_t i = 0; i < N_WRITERS; i++)
        MUST(!pthread_create(&writers[i], NULL, writer_main, (void *)(seed + i)));
    for (int i = 0; i < N_WRITERS; i++) MUST(!pthread_join(writers[i], NULL));
    atomic_store(&stop, true);
    MUST(!pthread_join(reader, NULL));
    const uint64_t n_written = (uint64_t)N_WRITERS * N_EACH;
    MUST(header->head == n_written);
    for (uint64_t n = n_written - RING_EVENTS; n < n_written; n++) {
        if (!event_read(header, n, &event))
            n_missing++;
        else
            MUST(event.b == checksum(&event) && event.step == 0 && event.thread);
    }
    /* how many are dropped is a matter of how long a writer is off its core: the ring is small */
    MUST(n_missing <= header->n_dropped && header->n_dropped < n_written && n_read > 0);
    const _Atomic uint64_t *counters = (const void *)((const char *)header + header->counters_at);
    MUST(counters[FCDP_COUNT_MAPS] == 3 * n_written);
}

static void every_event_that_is_read_is_whole(void **state) {
    (void)state;
    in_a_child(writers_and_a_reader);
}

/* ---- one writer ---- */

static bool is_now(uint64_t time_ns) {
    return time_ns >= fcdp__trace_header()->start_monotonic_ns && time_ns <= fcdp__now_ns() + 10000;
}

static void order_and_laps(void) {
    fcdp_trace_event event;
    fcdp_trace_open(1, RING_BYTES);
    fcdp_trace_header *header = fcdp__trace_header();
    atomic_store(&header->step, 7);
    for (uint64_t n = 0; n < 2 * RING_EVENTS + 5; n++) fcdp__trace_now(FCDP_EVENT_MAP, 9, n, 2 * n, 3 * n);
    MUST(header->head == 2 * RING_EVENTS + 5 && header->n_dropped == 0);
    for (uint64_t n = 0; n < header->head; n++) {
        bool is_there = n >= RING_EVENTS + 5;
        MUST(event_read(header, n, &event) == is_there);
        if (!is_there) continue;
        MUST(event.stamp == n && event.bytes == n && event.a == 2 * n && event.b == 3 * n && event.step == 7);
        MUST(event.kind == FCDP_EVENT_MAP && event.object == 9 && event.duration_ns == 0);
        MUST(event.thread == (uint32_t)getpid() && is_now(event.time_ns));
    }
    uint64_t start = fcdp__trace_start();
    fcdp__trace_since(start, (fcdp_trace_event){.kind = FCDP_EVENT_OOM_AVOIDED, .bytes = 1});
    MUST(event_read(header, header->head - 1, &event));
    MUST(event.time_ns == start && is_now(start + event.duration_ns));
}

static void a_lap_overwrites_the_oldest(void **state) {
    (void)state;
    in_a_child(order_and_laps);
}

/* For a second, by two threads: the clock of events against CLOCK_MONOTONIC, around each reading. */
static void *clock_watch(void *arg) {
    const uint64_t until_ns = fcdp__now_ns() + 1000000000;
    uint64_t before, after, worst_ns = 0;
    while ((before = fcdp__now_ns()) < until_ns) {
        uint64_t time_ns = fcdp__trace_start();
        after = fcdp__now_ns();
        if (time_ns < before && before - time_ns > worst_ns) worst_ns = before - time_ns;
        if (time_ns > after && time_ns - after > worst_ns) worst_ns = time_ns - after;
    }
    *(uint64_t *)arg = worst_ns;
    return NULL;
}

static void clocks(void) {
    pthread_t thread;
    uint64_t worst_ns[2];
    fcdp_trace_open(1, RING_BYTES);
    MUST(!pthread_create(&thread, NULL, clock_watch, &worst_ns[0]));
    clock_watch(&worst_ns[1]);
    MUST(!pthread_join(thread, NULL));
    printf("off by at most %llu and %llu ns\n", (unsigned long long)worst_ns[0],
           (unsigned long long)worst_ns[1]);
    MUST(worst_ns[0] < 10000 && worst_ns[1] < 10000);
}

static void the_clock_is_the_monotonic_one(void **state) {
    (void)state;
    in_a_child(clocks);
}

/* A writer that was stopped, or killed, in the middle of an event. */
static void stuck_slot(void) {
    fcdp_trace_event event;
    fcdp_trace_open(1, RING_BYTES);
    fcdp_trace_header *header = fcdp__trace_header();
    for (int n = 0; n < RING_EVENTS; n++) fcdp__trace_now(FCDP_EVENT_MAP, 0, 1, 0, 0);
    (*slot_of(header, 5))[0] = 2 * RING_EVENTS + 11; /* 2 n + 1 of the next lap's */
    for (int n = 0; n < 3 * RING_EVENTS; n++) fcdp__trace_now(FCDP_EVENT_MAP, 0, 1, 0, 0);
    MUST(header->n_dropped == 3 && header->head == 4 * RING_EVENTS);
    for (uint64_t n = 3 * RING_EVENTS; n < header->head; n++)
        MUST(event_read(header, n, &event) == (n % RING_EVENTS != 5));
    (*slot_of(header, 5))[0] = 2 * RING_EVENTS + 12; /* it goes on */
    for (int n = 0; n < RING_EVENTS; n++) fcdp__trace_now(FCDP_EVENT_MAP, 0, 1, 0, 0);
    MUST(header->n_dropped == 3 && event_read(header, 4 * RING_EVENTS + 5, &event));
    (*slot_of(header, 6))[0] = 100 * RING_EVENTS; /* a writer is a lap ahead of this one */
    for (int n = 0; n < RING_EVENTS; n++) fcdp__trace_now(FCDP_EVENT_MAP, 0, 1, 0, 0);
    MUST(header->n_dropped == 4);
}

static void a_stuck_writer_is_not_waited_for(void **state) {
    (void)state;
    in_a_child(stuck_slot);
}

/* ---- none ---- */

static void nothing_at_all(void) {
    fcdp_trace_open(0, RING_BYTES);
    MUST(!fcdp__trace_header() && segment_descriptor() == -1 && !fcdp__trace_is_on(1));
    fcdp__trace_now(FCDP_EVENT_MAP, 1, 1, 1, 1);
    fcdp__trace_count(FCDP_COUNT_MAPS, 1);
    fcdp__trace_set(FCDP_COUNT_MAPS, 1);
    MUST(fcdp__trace_start() == 0);
    fcdp__trace_since(0, (fcdp_trace_event){.kind = FCDP_EVENT_OOM});
    MUST(fcdp__trace_object_create("layer", 5) == 0 && !fcdp__trace_object(0) && !fcdp__trace_object(1));
    fcdp__trace_object_destroy(1);
}

static void level_0_writes_nothing(void **state) {
    (void)state;
    in_a_child(nothing_at_all);
}

static void too_large(void) {
    log_keep(FCDP_LOG_WARN);
    fcdp_trace_open(1, (size_t)1 << 62);
    assert_says(log_kept(), "warning: no trace is written: a shared segment of 4.61 EB cannot be had (");
    assert_says(log_text.text, "); make FCDP_TRACE_BUFFER smaller, or set FCDP_TRACE=0\n");
    MUST(!fcdp__trace_header());
    fcdp__trace_now(FCDP_EVENT_MAP, 1, 1, 1, 1);
}

static void a_segment_that_cannot_be_had_is_no_failure(void **state) {
    (void)state;
    in_a_child(too_large);
}

static void levels(void) {
    fcdp_trace_open(1, RING_BYTES);
    MUST(fcdp__trace_is_on(1) && !fcdp__trace_is_on(2));
    fcdp_trace_open(2, RING_BYTES); /* once */
    MUST(!fcdp__trace_is_on(2));
}

static void the_first_level_holds(void **state) {
    (void)state;
    in_a_child(levels);
}

/* ---- counts ---- */

static void counts_of_parts(void) {
    static fcdp_counts whole, parts[2] = {{.whole = &whole}, {.whole = &whole}};
    fcdp__count(&parts[0], FCDP_COUNT_MAPS, 1); /* without a ring too */
    fcdp_trace_open(1, RING_BYTES);
    fcdp__count(&parts[0], FCDP_COUNT_MAPS, 2);
    fcdp__count(&parts[1], FCDP_COUNT_MAPS, 4);
    fcdp__count(&whole, FCDP_COUNT_MAPS, 8);
    MUST(parts[0].n[FCDP_COUNT_MAPS] == 3 && parts[1].n[FCDP_COUNT_MAPS] == 4);
    MUST(whole.n[FCDP_COUNT_MAPS] == 15 && whole.n[FCDP_COUNT_UNMAPS] == 0);
    const fcdp_trace_header *header = fcdp__trace_header();
    MUST(((const _Atomic uint64_t *)((uintptr_t)header + header->counters_at))[FCDP_COUNT_MAPS] == 14);
}

static void what_a_part_counts_the_whole_and_the_trace_count(void **state) {
    (void)state;
    in_a_child(counts_of_parts);
}

/* ---- processes ---- */

static void forked_child(void) {
    fcdp_trace_open(1, RING_BYTES);
    fcdp_trace_header *header = fcdp__trace_header();
    int descriptor = segment_descriptor(), wait_status;
    fcdp__trace_now(FCDP_EVENT_MAP, 1, 1, 1, 1);
    pid_t pid = fork();
    if (pid == 0) {
        fcdp__trace_now(FCDP_EVENT_MAP, 1, 1, 1, 1);
        fcdp__trace_count(FCDP_COUNT_MAPS, 1);
        MUST(!fcdp__trace_header() && fcntl(descriptor, F_GETFD) == -1);
        fcdp_trace_open(1, RING_BYTES); /* one of its own */
        fcdp__trace_now(FCDP_EVENT_UNMAP, 1, 1, 1, 1);
        MUST(fcdp__trace_header()->head == 1 && fcdp__trace_header()->pid == getpid());
        exit(0);
    }
    MUST(waitpid(pid, &wait_status, 0) == pid && wait_status == 0);
    MUST(header->head == 1 && header->ended == 0);
}

static void a_forked_child_writes_nothing(void **state) {
    (void)state;
    in_a_child(forked_child);
}

/* The segment of a process, mapped by its parent while it runs; the child then ends as `how` says. */
static const fcdp_trace_header *segment_of_a_process_that_ends(int how) {
    int ready[2], go[2], wait_status;
    char path[64], byte = 0;
    assert_int_equal(pipe(ready) | pipe(go), 0);
    pid_t pid = fork();
    if (pid == 0) {
        fcdp_trace_open(1, RING_BYTES);
        fcdp__trace_now(FCDP_EVENT_MAP, 0, 4711, 0, 0);
        int descriptor = segment_descriptor();
        if (write(ready[1], &descriptor, sizeof descriptor) < 0 || read(go[0], &byte, 1) < 0) _exit(1);
        fcdp__trace_now(FCDP_EVENT_UNMAP, 0, 4712, 0, 0);
        if (how) raise(how);
        exit(0);
    }
    int descriptor;
    assert_int_equal(read(ready[0], &descriptor, sizeof descriptor), sizeof descriptor);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, descriptor);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    struct stat info;
    assert_true(file >= 0 && fstat(file, &info) == 0);
    assert_int_equal(info.st_mode & 07777, 0600);
    assert_true(fcntl(file, F_GET_SEALS) & F_SEAL_SHRINK); /* readers refuse one without */
    const fcdp_trace_header *header = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_SHARED, file, 0);
    assert_ptr_not_equal(header, MAP_FAILED);
    assert_int_equal(header->segment_bytes, info.st_size);
    assert_int_equal(header->pid, pid);
    assert_int_equal(header->ended, 0);
    close(file);
    assert_int_equal(write(go[1], &byte, 1), 1);
    assert_int_equal(waitpid(pid, &wait_status, 0), pid);
    for (int i = 0; i < 2; i++) close(ready[i]), close(go[i]);
    return header;
}

static void a_reader_keeps_the_ring_of_a_process_that_is_gone(void **state) {
    (void)state;
    for (int how = 0; how <= SIGKILL; how += SIGKILL) {
        fcdp_trace_event event;
        const fcdp_trace_header *header = segment_of_a_process_that_ends(how);
        assert_int_equal(header->ended, how == 0);
        assert_int_equal(header->head, 2);
        assert_true(event_read(header, 1, &event));
        assert_int_equal(event.bytes, 4712);
        assert_memory_equal(header->magic, FCDP_TRACE_MAGIC, 8);
        assert_true(strstr(header->command, "test_base_trace") != NULL);
        munmap((void *)(uintptr_t)header, header->segment_bytes);
    }
}

/* ---- objects ---- */

static void objects(void) {
    char longer[3 * FCDP_TRACE_NAME_BYTES];
    memset(longer, 'x', sizeof longer);
    longer[sizeof longer - 1] = '\0';
    fcdp_trace_open(1, RING_BYTES);
    uint32_t first = fcdp__trace_object_create("model.layers.3", 77),
             second = fcdp__trace_object_create(longer, 1);
    fcdp_trace_object *object = fcdp__trace_object(first);
    MUST(first && second && first != second && object->bytes == 77 && object->state == FCDP_OBJECT_LIVE);
    MUST(!strcmp(object->name, "model.layers.3") && object->generation == 2);
    MUST(strlen(fcdp__trace_object(second)->name) == FCDP_TRACE_NAME_BYTES - 1);
    object->device_bytes = 5;
    object->shard_group = 7;
    fcdp__trace_object_destroy(first);
    MUST(object->state == 0 && object->device_bytes == 0 && !strcmp(object->name, "model.layers.3"));
    uint32_t third = fcdp__trace_object_create("another", 1);
    MUST(third != first && third != second); /* its number serves again late */
    for (uint32_t i = 2; i < FCDP_TRACE_N_OBJECTS - 1; i++) MUST(fcdp__trace_object_create("more", 1));
    MUST(object->generation == 4 && !strcmp(object->name, "more") && object->shard_group == 0);
    MUST(fcdp__trace_object_create("one too many", 1) == 0);
    fcdp__trace_object_destroy(0);
}

enum { WATCHED = 7, N_LIVES = 2000 };
static _Atomic uint32_t n_looks; /* at WATCHED, that found an object */

/* As memtrace_read_any_object reads: until `stop`, whatever is found is whole, and of one of its lives. */
static void *object_watch(void *arg) {
    const fcdp_trace_object *object = arg;
    const _Atomic uint64_t *at = (const void *)object;
    while (!atomic_load(&stop)) {
        uint64_t words[sizeof *object / 8];
        fcdp_trace_object read;
        uint32_t generation = atomic_load_explicit(&object->generation, memory_order_acquire);
        for (size_t i = 0; i < sizeof words / 8; i++)
            words[i] = atomic_load_explicit(&at[i], memory_order_acquire);
        if (generation % 2 || atomic_load_explicit(&object->generation, memory_order_acquire) != generation)
            continue;
        memcpy((void *)&read, words, sizeof words);
        if (!read.state) continue; /* between two lives */
        MUST(read.state == FCDP_OBJECT_TEXT && read.why == read.bytes + 1);
        MUST(read.trainable_bytes == 2 * read.bytes);
        for (size_t i = 0; i < sizeof read.name - 1; i++) MUST(read.name[i] == 'a' + (char)(read.bytes % 26));
        atomic_fetch_add(&n_looks, 1);
    }
    return NULL;
}

/* All other numbers are taken: one serves again and again. */
static void whole_objects(void) {
    pthread_t reader;
    char name[FCDP_TRACE_NAME_BYTES] = "";
    fcdp_trace_open(1, RING_BYTES);
    for (uint32_t i = 1; i < FCDP_TRACE_N_OBJECTS; i++) MUST(fcdp__trace_object_create("other", 1) == i);
    fcdp__trace_object_destroy(WATCHED);
    MUST(!pthread_create(&reader, NULL, object_watch, fcdp__trace_object(WATCHED)));
    for (uint32_t i = 0; i < N_LIVES || !atomic_load(&n_looks); i++) {
        memset(name, 'a' + (char)(i % 26), sizeof name - 1);
        MUST(fcdp__trace_object_add(&(fcdp_trace_new){.name = name,
                                                      .state = FCDP_OBJECT_TEXT,
                                                      .why = i + 1,
                                                      .bytes = i,
                                                      .trainable_bytes = 2ull * i}) == WATCHED);
        fcdp__trace_object_destroy(WATCHED);
    }
    atomic_store(&stop, true);
    MUST(!pthread_join(reader, NULL));
}

static void every_object_that_is_read_is_whole(void **state) {
    (void)state;
    in_a_child(whole_objects);
}

static void objects_have_a_place_and_a_name(void **state) {
    (void)state;
    in_a_child(objects);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_event_that_is_read_is_whole),
        cmocka_unit_test(a_lap_overwrites_the_oldest),
        cmocka_unit_test(the_clock_is_the_monotonic_one),
        cmocka_unit_test(a_stuck_writer_is_not_waited_for),
        cmocka_unit_test(level_0_writes_nothing),
        cmocka_unit_test(a_segment_that_cannot_be_had_is_no_failure),
        cmocka_unit_test(the_first_level_holds),
        cmocka_unit_test(what_a_part_counts_the_whole_and_the_trace_count),
        cmocka_unit_test(a_forked_child_writes_nothing),
        cmocka_unit_test(a_reader_keeps_the_ring_of_a_process_that_is_gone),
        cmocka_unit_test(objects_have_a_place_and_a_name),
        cmocka_unit_test(every_object_that_is_read_is_whole),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
