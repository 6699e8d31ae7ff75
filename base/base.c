/* base.c - the thread's failure text, the log, checks, ranked locks, the clock, threads.
 *
 * FCDP_CHECK is the only option that this file knows. The file reads it when the library is loaded, so that
 * locks and invariants are checked from the first call on. options.c reports a malformed value.
 */
#include "base/base.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { LINE_BYTES = 4096, MAX_HELD = 8 };

static _Thread_local char failure_text[FCDP_TEXT_BYTES];
static atomic_int log_threshold = FCDP_LOG_WARN;
int fcdp__check_level;

__attribute__((constructor)) static void check_level_init(void) {
    const char *value = getenv("FCDP_CHECK");
    if (value && value[0] >= '0' && value[0] <= '3' && !value[1]) fcdp__check_level = value[0] - '0';
}

const char *fcdp_error_text(void) {
    return failure_text;
}

fcdp_status fcdp__fail(fcdp_status status, const char *format, ...) {
    char text[FCDP_TEXT_BYTES]; /* not failure_text itself: an argument may point into it */
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    memcpy(failure_text, text, strlen(text) + 1);
    return status;
}

fcdp_failure fcdp__failure_keep(fcdp_status status) {
    fcdp_failure failure = {.status = status};
    memcpy(failure.text, failure_text, strlen(failure_text) + 1);
    return failure;
}

fcdp_status fcdp__failure_restore(const fcdp_failure *failure) {
    return failure->status ? fcdp__fail(failure->status, "%s", failure->text) : FCDP_OK;
}

void fcdp_log_set_level(fcdp_log_level level) {
    atomic_store_explicit(&log_threshold, level, memory_order_relaxed);
}

/* One write per line: the lines of ranks that share a terminal stay whole. */
static void line_write(const char *line, size_t n_bytes) {
    while (n_bytes > 0) {
        ssize_t n_written = write(STDERR_FILENO, line, n_bytes);
        if (n_written < 0 && errno == EINTR) continue;
        if (n_written <= 0) return;
        line += n_written;
        n_bytes -= (size_t)n_written;
    }
}

void fcdp__log(fcdp_log_level level, const char *format, ...) {
    static const char *const words[] = {"", "warning: ", "info: ", "debug: "};
    if ((int)level > atomic_load_explicit(&log_threshold, memory_order_relaxed)) return;

    int saved_errno = errno;
    char line[LINE_BYTES];
    size_t n_bytes = (size_t)snprintf(line, sizeof line, "fcdp: %s", words[level]);
    va_list args;
    va_start(args, format);
    int n_text = vsnprintf(line + n_bytes, sizeof line - n_bytes - 1, format, args);
    va_end(args);
    if (n_text > 0) n_bytes = strlen(line);
    line[n_bytes++] = '\n';
    line_write(line, n_bytes);
    errno = saved_errno;
}

void fcdp__check_failed(const char *expr, const char *file, int line) {
    char text[LINE_BYTES];
    int n_bytes = snprintf(text, sizeof text, "fcdp: check failed, state is corrupt: %s (%s:%d)\n", expr,
                           file, line);
    if (n_bytes > 0) line_write(text, n_bytes < LINE_BYTES ? (size_t)n_bytes : LINE_BYTES - 1);
    abort();
}

/* The locks that this thread holds, in the order taken. Kept at every check level, so that the level may
 * change while locks are held. */
static _Thread_local struct {
    const fcdp_lock *locks[MAX_HELD];
    int n;
} held;

static bool held_allows(const fcdp_lock *lock) {
    for (int i = 0; i < held.n; i++)
        if (held.locks[i]->rank <= lock->rank) return false;
    return true;
}

static void held_push(const fcdp_lock *lock) {
    FCDP_CHECK(0, held.n < MAX_HELD);
    held.locks[held.n++] = lock;
}

static void held_remove(const fcdp_lock *lock) {
    int at = held.n - 1;
    while (at >= 0 && held.locks[at] != lock) at--;
    FCDP_CHECK(0, at >= 0); /* released by a thread that does not hold it */
    for (; at + 1 < held.n; at++) held.locks[at] = held.locks[at + 1];
    held.n--;
}

void fcdp__lock_init(fcdp_lock *lock, fcdp_lock_rank rank) {
    FCDP_CHECK(0, pthread_mutex_init(&lock->mutex, NULL) == 0);
    lock->rank = rank;
}

void fcdp__lock_destroy(fcdp_lock *lock) {
    FCDP_CHECK(0, pthread_mutex_destroy(&lock->mutex) == 0);
}

void fcdp__lock_acquire(fcdp_lock *lock) {
    FCDP_CHECK(2, held_allows(lock)); /* before the wait: a cycle aborts instead of hanging */
    FCDP_CHECK(0, pthread_mutex_lock(&lock->mutex) == 0);
    held_push(lock);
}

void fcdp__lock_release(fcdp_lock *lock) {
    held_remove(lock);
    FCDP_CHECK(0, pthread_mutex_unlock(&lock->mutex) == 0);
}

void fcdp__lock_wait(fcdp_lock *lock, pthread_cond_t *cond) {
    held_remove(lock);
    FCDP_CHECK(2, held_allows(lock));
    FCDP_CHECK(0, pthread_cond_wait(cond, &lock->mutex) == 0);
    held_push(lock);
}

uint64_t fcdp__now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

int fcdp__thread_start(void *(*main)(void *), void *arg, pthread_t *thread_out) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* the new thread inherits the mask */
    int error = pthread_create(thread_out, NULL, main, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

void fcdp__condition_init(pthread_cond_t *condition) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

bool fcdp__condition_wait(pthread_cond_t *condition, pthread_mutex_t *mutex, uint64_t until_ns) {
    const struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000),
                                   .tv_nsec = (long)(until_ns % 1000000000)};
    return pthread_cond_timedwait(condition, mutex, &until) != ETIMEDOUT;
}
