/* fail_thread.h - threads that cannot start, for a test that is linked with -Wl,--wrap=fcdp__thread_start. */
#ifndef FCDP_TESTS_FAIL_THREAD_H
#define FCDP_TESTS_FAIL_THREAD_H

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>

/* The library's, by the linker. */
static bool starts_no_thread;
static unsigned n_that_start; /* nevertheless, and first; set where one thread starts them */
int __real_fcdp__thread_start(void *(*body)(void *), void *arg, pthread_t *thread_out);
int __wrap_fcdp__thread_start(void *(*body)(void *), void *arg, pthread_t *thread_out);

__attribute__((visibility("default"))) int __wrap_fcdp__thread_start(void *(*body)(void *), void *arg,
                                                                     pthread_t *thread_out) {
    if (starts_no_thread) {
        if (!n_that_start) return EAGAIN;
        n_that_start--;
    }
    return __real_fcdp__thread_start(body, arg, thread_out);
}

#endif
