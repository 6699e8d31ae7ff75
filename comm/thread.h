/* thread.h - POSIX threads as FCDP uses them: without signals, on the monotonic clock. */
#ifndef FCDP_THREAD_H
#define FCDP_THREAD_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

/* Starts a thread that no signal is delivered to: signals are for the program's own threads. 0, or an errno;
 * *thread_out is the caller's to join or to detach. */
int fcdp__thread_start(void *(*main)(void *), void *arg, pthread_t *thread_out);

/* A condition whose timed waits are by the monotonic clock, which fcdp__now_ns reads. */
void fcdp__condition_init(pthread_cond_t *condition);
/* Waits for a signal until `until_ns`. False: that time has come. With the mutex, as
 * pthread_cond_timedwait. */
bool fcdp__condition_wait(pthread_cond_t *condition, pthread_mutex_t *mutex, uint64_t until_ns);

#endif
