/* The timeline: that it is JSON, which threads and streams are in it and when, and that it ends properly. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/simgpu/support.h"

#define MS ((uint64_t)1000000)

static char path[64];
static char text[1 << 16];

static int with_file(void **state) {
    snprintf(path, sizeof path, "/tmp/fcdp-timeline-XXXXXX");
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    return fresh_device(state);
}

static int without_file(void **state) {
    simgpu_timeline_end();
    unlink(path);
    return end_device(state);
}

/* ---- a reader of JSON, as far as a timeline uses it ---- */

static const char *value_end(const char *at);

static const char *string_end(const char *at) {
    if (*at != '"') return NULL;
    for (at++; *at && *at != '"'; at++) {
        if ((unsigned char)*at < 0x20) return NULL;
        if (*at == '\\' && !*++at) return NULL;
    }
    return *at ? at + 1 : NULL;
}

static const char *list_end(const char *at, char close, bool keys) {
    at += 1 + strspn(at + 1, "\n");
    if (*at == close) return at + 1;
    for (;;) {
        if (keys && (!(at = string_end(at)) || *at++ != ':')) return NULL;
        at = value_end(at);
        if (!at) return NULL;
        at += strspn(at, "\n");
        if (*at == close) return at + 1;
        if (*at++ != ',') return NULL;
        at += strspn(at, "\n");
    }
}

static const char *value_end(const char *at) {
    if (*at == '{') return list_end(at, '}', true);
    if (*at == '[') return list_end(at, ']', false);
    if (*at == '"') return string_end(at);
    size_t n = strspn(at, "-+.0123456789");
    return n ? at + n : NULL;
}

static void read_timeline(const char *from) {
    FILE *file = fopen(from, "r");
    assert_non_null(file);
    text[fread(text, 1, sizeof text - 1, file)] = '\0';
    fclose(file);
    const char *end = value_end(text);
    if (!end || strcmp(end, "\n") != 0) fail_msg("not JSON: %s", text);
}

static size_t count(const char *part) {
    size_t n = 0;
    for (const char *at = text; (at = strstr(at, part)); at++) n++;
    return n;
}

/* The number behind "key": in the event whose line has `part`. */
static double number_in(const char *part, const char *key) {
    char quoted[32];
    const char *at = strstr(text, part);
    if (!at) fail_msg("\"%s\" is not in %s", part, text);
    while (at > text && at[-1] != '\n') at--;
    snprintf(quoted, sizeof quoted, "\"%s\":", key);
    const char *line_end = strchr(at, '\n'), *found = strstr(at, quoted);
    if (!found || found > line_end) fail_msg("no %s in %.*s", key, (int)(line_end - at), at);
    return strtod(found + strlen(quoted), NULL);
}

/* ---- */

static void streams_and_threads_have_rows(void **state) {
    (void)state;
    struct pages pages = pages_make(1);
    unsigned char *pinned = host_make(4096, true);
    CUstream compute, copies;
    CUevent event;
    struct gate gate;
    OK(cuStreamCreate(&compute, CU_STREAM_NON_BLOCKING));
    OK(cuStreamCreate(&copies, CU_STREAM_NON_BLOCKING));
    OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    assert_int_equal(simgpu_stream_name(compute, "compute"), 0);
    OK(simgpu_launch(compute, &(struct simgpu_kernel){.name = "before", .duration_ns = MS}));
    OK(cuStreamSynchronize(compute));
    assert_int_equal(simgpu_timeline_begin(path), 0);
    gate_close(&gate, compute); /* until all is enqueued */
    simgpu_annotate("block \"3\"\n");
    OK(simgpu_launch(compute, &(struct simgpu_kernel){.name = "gemm", .duration_ns = 50 * MS}));
    OK(cuEventRecord(event, compute));
    simgpu_annotate("restore");
    OK(cuStreamWaitEvent(copies, event, 0));
    OK(cuMemcpyHtoDAsync_v2(pages.at, pinned, 4096, copies));
    simgpu_annotate(NULL);
    OK(cuMemcpyDtoHAsync_v2(pinned, pages.at, 1024, copies));
    gate_open(&gate);
    OK(cuStreamSynchronize(copies));
    simgpu_timeline_end();
    OK(simgpu_launch(compute, &(struct simgpu_kernel){.name = "after"}));
    OK(cuCtxSynchronize());

    read_timeline(path);
    assert_int_equal(count("\"ph\":\"X\""), 6);
    assert_int_equal(count("before") + count("after"), 0);
    assert_int_equal(count("\"process_name\""), 1);
    assert_int_equal(count("\"args\":{\"name\":\"compute\"}"), 1);
    assert_int_equal(count("\"args\":{\"name\":\"stream 2\"}"), 1);
    assert_int_equal(count("\"args\":{\"name\":\"main thread\"}"), 1);
    assert_int_equal(count("\"label\":\"block \\\"3\\\"\\u000a\""), 1);
    assert_int_equal(count("\"name\":\"gemm\",\"cat\":\"kernel\""), 1);
    assert_int_equal(count("\"name\":\"restore\",\"cat\":\"copy to device\""), 1);
    assert_int_equal(count("\"name\":\"restore\",\"cat\":\"wait for event\""), 1);
    assert_int_equal(count("\"name\":\"copy to host\",\"cat\":\"copy to host\""), 1);
    assert_int_equal(count("\"name\":\"cuStreamSynchronize\",\"cat\":\"wait\""), 1);
    assert_true(number_in("copy to device", "bytes") == 4096);
    assert_true(number_in("gemm", "modelled_us") == 50000);
    assert_true(number_in("gemm", "pid") == getpid());
    assert_true(number_in("copy to device", "tid") == number_in("copy to host", "tid"));
    assert_true(number_in("gemm", "tid") != number_in("copy to host", "tid"));
    double kernel_end = number_in("gemm", "ts") + number_in("gemm", "dur");
    assert_true(kernel_end <= number_in("copy to device", "ts"));
    assert_true(number_in("copy to device", "ts") + number_in("copy to device", "dur") <=
                number_in("copy to host", "ts"));
    assert_true(number_in("cuStreamSynchronize", "ts") + number_in("cuStreamSynchronize", "dur") >=
                kernel_end);
    OK(cuMemHostUnregister(pinned));
    host_destroy(pinned, 4096);
}

/* Its modelled times are exact where cores take none of it, and they lie ahead. */
struct works {
    uint32_t *word;
    uint64_t from_ns, begin_ns, end_ns;
    int row;
};

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void *thread_works(void *data) {
    struct works *of = data;
    of->row = gettid();
    pthread_setname_np(pthread_self(), "decoder \"7\"");
    (void)simgpu_work_end(); /* there is none yet */
    simgpu_work_begin(now_ns());
    simgpu_word_store(of->word, 1);
    of->from_ns = now_ns() + 3600000 * MS;
    of->begin_ns = now_ns();
    simgpu_work_begin(of->from_ns);
    simgpu_end_at(of->from_ns + 7 * MS);
    (void)simgpu_work_end();
    of->end_ns = now_ns();
    (void)simgpu_work_end(); /* it has ended */
    return NULL;
}

static void the_work_of_threads_is_in_rows_of_their_names(void **state) {
    (void)state;
    struct works of = {.word = host_make(PAGE, true)};
    pthread_t thread;
    char part[64];
    assert_int_equal(simgpu_timeline_begin(path), 0);
    assert_int_equal(pthread_create(&thread, NULL, thread_works, &of), 0);
    pthread_join(thread, NULL);
    simgpu_timeline_end();
    read_timeline(path);
    assert_int_equal(count("\"name\":\"work\",\"cat\":\"work\""), 2);
    assert_int_equal(count("\"args\":{\"name\":\"decoder \\\"7\\\"\"}"), 1);
    assert_true(number_in("decoder", "tid") == of.row);
    snprintf(part, sizeof part, "\"ready_us\":%.3f", (double)of.from_ns / 1e3);
    assert_int_equal(count(part), 1);
    assert_true(number_in(part, "modelled_us") == 7000);
    assert_true(number_in(part, "tid") == of.row);
    assert_true(number_in(part, "pid") == getpid());
    double begin_us = number_in(part, "ts"), end_us = begin_us + number_in(part, "dur");
    assert_true(begin_us >= (double)of.begin_ns / 1e3 - 0.01 && end_us <= (double)of.end_ns / 1e3 + 0.01);
    OK(cuMemHostUnregister(of.word));
    host_destroy(of.word, PAGE);
}

static void the_environment_begins_it_and_a_reset_does_not_end_it(void **state) {
    (void)state;
    char pattern[96], named[128];
    snprintf(pattern, sizeof pattern, "%s-%%p", path);
    snprintf(named, sizeof named, "%s-%d", path, getpid());
    simgpu_reset();
    setenv("FCDP_SIM_TIMELINE", pattern, 1);
    for (int i = 0; i < 2; i++) {
        fresh_device(NULL);
        OK(simgpu_launch(NULL, &(struct simgpu_kernel){.name = "gemm", .duration_ns = MS}));
        OK(cuCtxSynchronize());
    }
    unsetenv("FCDP_SIM_TIMELINE");
    simgpu_timeline_end();
    read_timeline(named);
    assert_int_equal(count("\"gemm\""), 2);
    unlink(named);
}

static void an_exit_ends_it_and_a_child_s_exit_does_not(void **state) {
    (void)state;
    fflush(NULL);
    simgpu_reset(); /* the child is the one that initialises */
    pid_t child = fork();
    if (child == 0) {
        fresh_device(NULL);
        if (simgpu_timeline_begin(path)) _exit(1);
        if (simgpu_launch(NULL, &(struct simgpu_kernel){.name = "gemm", .duration_ns = MS})) _exit(2);
        if (cuCtxSynchronize()) _exit(3);
        pid_t grandchild = fork();
        if (grandchild == 0) exit(0);
        waitpid(grandchild, NULL, 0);
        exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    assert_int_equal(status, 0);
    read_timeline(path);
    assert_int_equal(count("\"gemm\""), 1);
}

static void a_path_that_cannot_be_written_is_refused(void **state) {
    (void)state;
    assert_int_equal(simgpu_timeline_begin("/nowhere/at/all"), -1);
    assert_int_equal(simgpu_timeline_begin(NULL), -1);
}

/* More than the buffer holds. */
static void every_operation_is_in_it(void **state) {
    (void)state;
    assert_int_equal(simgpu_timeline_begin(path), 0);
    for (int i = 0; i < 2000; i++) OK(simgpu_launch(NULL, &(struct simgpu_kernel){.name = "gemm"}));
    OK(cuCtxSynchronize());
    simgpu_timeline_end();
    FILE *file = fopen(path, "r");
    char line[1024];
    size_t n = 0;
    while (fgets(line, sizeof line, file)) n += strstr(line, "\"gemm\"") != NULL;
    fclose(file);
    assert_int_equal(n, 2000);
}

#define filed(function) cmocka_unit_test_setup_teardown(function, with_file, without_file)

int main(void) {
    const struct CMUnitTest tests[] = {
        /* first: under TSan, a process that has had threads forks none that starts some */
        filed(an_exit_ends_it_and_a_child_s_exit_does_not),
        filed(streams_and_threads_have_rows),
        filed(the_work_of_threads_is_in_rows_of_their_names),
        filed(the_environment_begins_it_and_a_reset_does_not_end_it),
        filed(a_path_that_cannot_be_written_is_refused),
        filed(every_operation_is_in_it),
    };
    return cmocka_run_group_tests_name("simgpu timeline", tests, NULL, NULL);
}
