/* test_large.c - a file of 2 GB is opened in under a second, with its index and without. The second is this
 * thread's own: what else the machine does is not measured. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "tools/memtrace/reader.h"

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* Opens it, and reads a chunk from its middle. */
static double open_and_look(const char *path, bool is_complete) {
    double start = seconds();
    memtrace_file *file;
    memtrace_error error;
    size_t n;
    if (!memtrace_file_open(path, &file, &error)) fail_msg("%s", error.text);
    memtrace_summary summary = memtrace_file_summary(file);
    size_t middle = summary.n_chunks / 2;
    while (memtrace_file_chunk(file, middle)->type != FCDP_CHUNK_EVENTS) middle++;
    assert_non_null(memtrace_file_events(file, middle, &n));
    double taken = seconds() - start;
    assert_int_equal(summary.is_complete, is_complete);
    assert_true(summary.n_events > 30000000);
    memtrace_file_close(file);
    return taken;
}

/* The file has no name, so that nothing stays however the test ends. */
static void two_gigabytes_open_in_a_second(void **state) {
    (void)state;
    char path[64] = "/var/tmp/memtrace-XXXXXX", command[512];
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    unlink(path);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd); /* the command's too: it inherits the descriptor */
    snprintf(command, sizeof command, "%s %s 2000000000 4", getenv("MEMTRACE_GENERATE"), path);
    struct statvfs room;
    assert_int_equal(fstatvfs(fd, &room), 0);
    if ((uint64_t)room.f_bavail * room.f_frsize < UINT64_C(2200000000)) {
        close(fd);
        printf("no room for 2 GB in /var/tmp\n");
        skip();
    }
    assert_int_equal(system(command), 0);
    double with_index = open_and_look(path, true);
    struct stat file;
    assert_int_equal(fstat(fd, &file), 0);
    assert_int_equal(ftruncate(fd, file.st_size - 16), 0);
    double without = open_and_look(path, false);
    printf("opened in %.3f s with the index, %.3f s without\n", with_index, without);
    assert_true(with_index < 1 && without < 1);
    close(fd);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(two_gigabytes_open_in_a_second)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
