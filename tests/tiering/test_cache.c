/* The node's disk cache: what was written is read again and nothing else is; files are bounded, the oldest
 * go first; writers that are killed, full disks and damaged files leave nothing behind. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/log_text.h"
#include "tiering/cache.h"

enum { SLICE_BYTES = 100000, FILE_BYTES = SLICE_BYTES + FCDP_CACHE_HEADER_BYTES };

static char dir[64];
static uint8_t bytes[SLICE_BYTES], seen[SLICE_BYTES];

/* The library's, too: each lock that is taken has a child forked that keeps its open file. */
static bool forks;
static pid_t children[8];
static size_t n_children;

int flock(int fd, int operation) {
    int result = (int)syscall(SYS_flock, fd, operation);
    if (!forks || result || !(operation & LOCK_EX)) return result;
    assert_true(n_children < 8);
    if ((children[n_children++] = fork())) return 0;
    for (;;) pause();
}

/* Likewise: the disk's. */
static bool cannot_read;

ssize_t pread(int fd, void *buf, size_t nbytes, off_t offset) {
    if (cannot_read) {
        errno = EIO;
        return -1;
    }
    return syscall(SYS_pread64, fd, buf, nbytes, offset);
}

static int setup(void **state) {
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/fcdp-cache-XXXXXX");
    assert_non_null(mkdtemp(dir));
    for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (uint8_t)(i * 31 >> 3);
    return 0;
}

static size_t n_files(const char *prefix) {
    size_t n = 0;
    DIR *listing = opendir(dir);
    for (const struct dirent *file; (file = readdir(listing));)
        n += file->d_name[0] != '.' || (prefix && strncmp(file->d_name, prefix, strlen(prefix)) == 0);
    closedir(listing);
    return n;
}

static int teardown(void **state) {
    (void)state;
    DIR *listing = opendir(dir);
    for (const struct dirent *file; (file = readdir(listing));)
        (void)unlinkat(dirfd(listing), file->d_name, 0);
    closedir(listing);
    assert_int_equal(rmdir(dir), 0);
    return 0;
}

static fcdp_cache *opened(size_t limit_bytes) {
    fcdp_cache *cache;
    assert_ok(fcdp__cache_open(dir, limit_bytes, &cache));
    return cache;
}

static fcdp_cache_key key_of(uint8_t which) {
    return (fcdp_cache_key){{which, 0xAB}};
}

static bool valid(void *ctx) {
    return *(const bool *)ctx;
}

static fcdp_status put(fcdp_cache *cache, uint8_t which) {
    bool yes = true;
    fcdp_cache_entry entry = {key_of(which), "blocks.0", 1, 4, bytes, sizeof bytes};
    return fcdp__cache_write(cache, &entry, valid, &yes);
}

static fcdp_status get(fcdp_cache *cache, uint8_t which) {
    fcdp_cache_key key = key_of(which);
    memset(seen, 0, sizeof seen);
    fcdp_status status = fcdp__cache_read(cache, &key, seen, sizeof seen);
    if (!status) assert_memory_equal(seen, bytes, sizeof bytes);
    return status;
}

static bool has(fcdp_cache *cache, uint8_t which) {
    return get(cache, which) == FCDP_OK;
}

static void path_of(uint8_t which, char path[128]) {
    snprintf(path, 128, "%s/%02xab%028d.frozen", dir, which, 0);
}

/* As if it had been used `seconds` ago. */
static void age(uint8_t which, int seconds) {
    char path[128];
    struct stat state;
    path_of(which, path);
    assert_int_equal(stat(path, &state), 0);
    const struct timespec times[] = {{state.st_mtim.tv_sec - seconds, 0},
                                     {state.st_mtim.tv_sec - seconds, 0}};
    assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
}

static void test_what_was_written_is_read(void **state) {
    (void)state;
    fcdp_cache *cache = opened(0);
    assert_int_equal(get(cache, 1), FCDP_PENDING);
    assert_ok(put(cache, 1));
    assert_int_equal(put(cache, 1), FCDP_PENDING); /* it is there */
    assert_true(has(cache, 1));
    assert_false(has(cache, 2));
    fcdp__cache_close(cache);
    cache = opened(0);
    assert_true(has(cache, 1));
    fcdp_cache_key key = key_of(1);
    fcdp__cache_drop(cache, &key);
    assert_false(has(cache, 1));
    assert_int_equal(n_files(".writing"), 0);
    fcdp__cache_close(cache);
}

/* What changed while it was being written gets no name. */
static void test_what_is_not_valid_leaves_nothing(void **state) {
    (void)state;
    bool no = false;
    fcdp_cache *cache = opened(0);
    fcdp_cache_entry entry = {key_of(1), "blocks.0", 0, 1, bytes, sizeof bytes};
    assert_int_equal(fcdp__cache_write(cache, &entry, valid, &no), FCDP_PENDING);
    assert_int_equal(n_files(".writing"), 0);
    assert_false(has(cache, 1));
    fcdp__cache_close(cache);
}

static void test_files_that_are_not_whole_go(void **state) {
    (void)state;
    fcdp_cache *cache = opened(0);
    char path[128], other[128];
    path_of(1, path);
    path_of(2, other);
    for (int way = 0; way < 4; way++) {
        assert_ok(put(cache, 1));
        int fd = open(path, O_RDWR);
        assert_true(fd >= 0);
        if (way == 0) assert_int_equal(ftruncate(fd, FILE_BYTES - 1), 0);
        if (way == 1) assert_int_equal(ftruncate(fd, 0), 0);
        if (way == 2) assert_int_equal(pwrite(fd, "x", 1, 3), 1);
        if (way == 3) assert_int_equal(rename(path, other), 0); /* under the name of another */
        close(fd);
        log_keep(FCDP_LOG_WARN);
        fcdp_status status = get(cache, way == 3 ? 2 : 1);
        char says[256];
        snprintf(says, sizeof says,
                 "FCDP_CACHE_DIR: %s is damaged, and removed; its parameters are gathered\n",
                 way == 3 ? other : path);
        assert_says(log_kept(), says);
        assert_int_equal(status, FCDP_ERR_SYSTEM);
        assert_int_equal(n_files(NULL), 0);
    }
    fcdp__cache_close(cache);
}

static void test_a_file_that_cannot_be_read_stays(void **state) {
    (void)state;
    fcdp_cache *cache = opened(0);
    assert_ok(put(cache, 1));
    log_keep(FCDP_LOG_WARN);
    cannot_read = true;
    fcdp_status status = get(cache, 1);
    cannot_read = false;
    assert_says(log_kept(), ".frozen cannot be read: Input/output error; its parameters are gathered\n");
    assert_int_equal(status, FCDP_ERR_SYSTEM);
    assert_true(has(cache, 1));
    fcdp__cache_close(cache);
}

/* As a job in another container, whose process has the same number, may be writing them. */
static void test_names_are_not_those_of_others(void **state) {
    (void)state;
    enum { N = 300 };
    int fds[N];
    char path[128];
    fcdp_cache *cache = opened(0);
    for (int i = 0; i < N; i++) {
        snprintf(path, sizeof path, "%s/.writing-%d-%d", dir, (int)getpid(), i);
        fds[i] = open(path, O_CREAT | O_RDWR, 0666);
        assert_int_equal(flock(fds[i], LOCK_EX), 0);
    }
    assert_ok(put(cache, 1));
    assert_true(has(cache, 1));
    for (int i = 0; i < N; i++) close(fds[i]);
    fcdp__cache_close(cache);
}

static void test_what_was_used_longest_ago_makes_room(void **state) {
    (void)state;
    fcdp_cache *cache = opened(0);
    for (uint8_t i = 0; i < 3; i++) assert_ok(put(cache, i));
    for (uint8_t i = 0; i < 3; i++) age(i, 1000 - 100 * i);
    fcdp__cache_close(cache);
    cache = opened(3 * (size_t)FILE_BYTES + 100);
    assert_true(has(cache, 0)); /* it was used now */
    assert_ok(put(cache, 3));
    assert_true(has(cache, 0) && has(cache, 2) && has(cache, 3));
    assert_false(has(cache, 1));
    assert_int_equal(put(cache, 4), FCDP_ERR_NO_HOST_MEM); /* this cache has used all of them */
    assert_non_null(strstr(fcdp_error_text(), "FCDP_CACHE_SIZE"));
    assert_int_equal(n_files(".writing"), 3);
    age(2, 500);
    assert_ok(put(cache, 4));
    assert_true(has(cache, 0) && has(cache, 3) && has(cache, 4));
    assert_false(has(cache, 2));
    fcdp__cache_close(cache);
}

/* Its file counts while it lives, and goes once it is dead. */
static void test_a_killed_writer_leaves_nothing(void **state) {
    (void)state;
    int ready[2];
    char byte, path[128];
    assert_int_equal(pipe(ready), 0);
    pid_t child = fork();
    if (child == 0) {
        snprintf(path, sizeof path, "%s/.writing-1-1", dir);
        int fd = open(path, O_CREAT | O_RDWR, 0666);
        if (flock(fd, LOCK_EX) == 0 && ftruncate(fd, FILE_BYTES) == 0 && write(ready[1], "x", 1) == 1)
            pause();
        _exit(1);
    }
    assert_int_equal(read(ready[0], &byte, 1), 1);
    fcdp_cache *cache = opened(2 * (size_t)FILE_BYTES);
    assert_ok(put(cache, 1));
    assert_int_equal(put(cache, 2), FCDP_ERR_NO_HOST_MEM);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    assert_ok(put(cache, 2));
    assert_int_equal(n_files(".writing"), 2);
    fcdp__cache_close(cache);
    close(ready[0]);
    close(ready[1]);
}

static bool can_lock(const char *path) {
    int fd = open(path, O_RDWR);
    assert_true(fd >= 0);
    bool can = flock(fd, LOCK_EX | LOCK_NB) == 0;
    close(fd);
    return can;
}

/* As the workers of a data loader, say, that are forked while a file is being written. */
static void test_a_forked_child_keeps_no_lock(void **state) {
    (void)state;
    char path[128], lock[128];
    fcdp_cache *cache = opened(0);
    path_of(1, path);
    snprintf(lock, sizeof lock, "%s/.lock", dir);
    forks = true;
    assert_ok(put(cache, 1));
    forks = false;
    assert_int_equal(n_children, 2); /* of the directory and of the file */
    bool free = can_lock(lock) && can_lock(path);
    while (n_children) {
        kill(children[--n_children], SIGKILL);
        waitpid(children[n_children], NULL, 0);
    }
    assert_true(free);
    fcdp__cache_close(cache);
}

/* The size of files is bounded: what a full disk says, without one. */
static void test_a_full_disk_leaves_nothing(void **state) {
    (void)state;
    struct rlimit before, low = {FILE_BYTES - 1, RLIM_INFINITY};
    fcdp_cache *cache = opened(0);
    signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &before);
    low.rlim_max = before.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &low), 0);
    fcdp_status status = put(cache, 1);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    signal(SIGXFSZ, SIG_DFL);
    assert_int_equal(status, FCDP_ERR_NO_HOST_MEM);
    assert_int_equal(n_files(".writing"), 0);
    assert_ok(put(cache, 1));
    fcdp__cache_close(cache);
}

static void test_a_directory_that_cannot_be_used_is_named(void **state) {
    (void)state;
    char path[128];
    fcdp_cache *cache;
    snprintf(path, sizeof path, "%s/file", dir);
    close(open(path, O_CREAT | O_WRONLY, 0666));
    assert_int_equal(fcdp__cache_open(path, 0, &cache), FCDP_ERR_OPTION);
    assert_non_null(strstr(fcdp_error_text(), path));
    snprintf(path, sizeof path, "%s/file/below", dir);
    assert_int_equal(fcdp__cache_open(path, 0, &cache), FCDP_ERR_OPTION);
    assert_says(fcdp_error_text(), "the directory cannot be made: Not a directory");
    assert_int_equal(fcdp__cache_open("/proc", 0, &cache), FCDP_ERR_OPTION);
    assert_says(fcdp_error_text(), "FCDP_CACHE_DIR=/proc: no file can be written there: ");
    snprintf(path, sizeof path, "%s/new/below", dir);
    assert_ok(fcdp__cache_open(path, 0, &cache)); /* with its parents */
    fcdp__cache_close(cache);
    assert_int_equal(rmdir(path), 0);
    snprintf(path, sizeof path, "%s/new", dir);
    assert_int_equal(rmdir(path), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_what_was_written_is_read, setup, teardown),
        cmocka_unit_test_setup_teardown(test_what_is_not_valid_leaves_nothing, setup, teardown),
        cmocka_unit_test_setup_teardown(test_files_that_are_not_whole_go, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_file_that_cannot_be_read_stays, setup, teardown),
        cmocka_unit_test_setup_teardown(test_names_are_not_those_of_others, setup, teardown),
        cmocka_unit_test_setup_teardown(test_what_was_used_longest_ago_makes_room, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_killed_writer_leaves_nothing, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_forked_child_keeps_no_lock, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_full_disk_leaves_nothing, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_directory_that_cannot_be_used_is_named, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
