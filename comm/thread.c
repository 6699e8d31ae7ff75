/* thread.c - see the header. */
#include "comm/thread.h"

#include <errno.h>
#include <signal.h>
#include <time.h>

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
