/* threads.h - waiting for threads with a limit, their ends, and what takes a core's time. */
#ifndef FCDP_TESTS_ALLOC_THREADS_H
#define FCDP_TESTS_ALLOC_THREADS_H

#include <dirent.h>
#include <errno.h>
#include <semaphore.h>
#include <time.h>

#include "tests/alloc/support.h"

enum { LIMIT_S = 30 };

static inline bool came(sem_t *semaphore) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += LIMIT_S;
    while (sem_timedwait(semaphore, &until))
        if (errno != EINTR) return false;
    return true;
}

#define assert_came(semaphore)                                                                               \
    do {                                                                                                     \
        if (!came(semaphore)) fail_msg("%s did not come", #semaphore);                                       \
    } while (0)

/* Of those whose names begin with "fcdp-test". */
static inline size_t n_threads(void) {
    static const char ours[] = "fcdp-test";
    size_t n = 0;
    DIR *tasks = opendir("/proc/self/task");
    assert_non_null(tasks);
    for (struct dirent *task; (task = readdir(tasks));) {
        char path[300], name[32] = "";
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", task->d_name);
        FILE *file = fopen(path, "re");
        if (file && fgets(name, sizeof name, file)) n += strncmp(name, ours, strlen(ours)) == 0;
        if (file) fclose(file);
    }
    closedir(tasks);
    return n;
}

/* A thread that was joined may still be listed for a moment. */
static inline void assert_no_thread(void) {
    struct timespec now, begin;
    size_t n;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    do {
        n = n_threads();
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while (n && now.tv_sec - begin.tv_sec < LIMIT_S);
    assert_int_equal(n, 0);
}

static inline void compute(void *core_ns) {
    struct timespec now, begin;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begin);
    do clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    while ((now.tv_sec - begin.tv_sec) * 1000000000 + now.tv_nsec - begin.tv_nsec < *(int64_t *)core_ns);
}

#endif
