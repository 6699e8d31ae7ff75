/* support.h - what the tests of alloc share: the driver that $FCDP_DRIVER names, a seeded generator, children
 * that die. */
#ifndef FCDP_TESTS_ALLOC_SUPPORT_H
#define FCDP_TESTS_ALLOC_SUPPORT_H

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "alloc/driver.h"
#include "sim/gpu/simgpu.h"
#include "tests/assert_ok.h"

enum {
    CUDA_INVALID_VALUE = 1,
    CUDA_OUT_OF_MEMORY = 2,
    CUDA_NO_DEVICE = 100,
    CUDA_NOT_READY = 600,
    CUDA_UNKNOWN = 999
};
enum { HOLDER_OTHERS = 1 }; /* of pages: the users of the pool beside the heap */
extern char **environ;

#define assert_text(part)                                                                                    \
    do {                                                                                                     \
        if (!strstr(fcdp_error_text(), (part)))                                                              \
            fail_msg("\"%s\" is not in \"%s\"", (part), fcdp_error_text());                                  \
    } while (0)

/* A child has no cmocka to fail in: it exits with the line that broke. */
#define MUST(condition)                                                                                      \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, fcdp_error_text());          \
            _exit(99);                                                                                       \
        }                                                                                                    \
    } while (0)

static inline fcdp_driver *driver_open_any(void) {
    fcdp_options options;
    fcdp_driver *drv = NULL;
    assert_ok(fcdp_options_load(environ, &options));
    assert_ok(fcdp__driver_open(options.driver, 0, NULL, &drv));
    return drv;
}

/* The simulated one, in a program that is linked with it. Disarms a fault. */
static inline bool driver_is_controlled(const fcdp_driver *drv) {
    return fcdp__driver_is_sim(drv) && simgpu_fail_nth(NULL, 0, 0) == 0;
}

/* Faults and leak counts are the simulated driver's: elsewhere such a test skips. */
static inline fcdp_driver *driver_open_sim(void) {
    simgpu_reset();
    fcdp_driver *drv = driver_open_any();
    if (driver_is_controlled(drv)) return drv;
    fcdp__driver_close(drv);
    print_message("needs the simulated driver\n");
    skip();
    return NULL;
}

static inline void assert_nothing_lives(void) {
    struct simgpu_live live;
    simgpu_live(&live);
    assert_int_equal(live.handles, 0);
    assert_int_equal(live.ranges, 0);
    assert_int_equal(live.maps, 0);
    assert_int_equal(live.streams, 0);
    assert_int_equal(live.events, 0);
    assert_int_equal(live.registrations, 0);
    assert_int_equal(live.modules, 0);
    assert_int_equal(live.device_bytes, 0);
}

/* splitmix64 */
static inline uint64_t random_next(uint64_t *state) {
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static inline size_t random_below(uint64_t *state, size_t n) {
    return (size_t)(random_next(state) % n);
}

/* $FCDP_TEST_SEED, else a new one; printed, so that a failure can be run again. */
static inline uint64_t seed_choose(const char *test) {
    const char *given = getenv("FCDP_TEST_SEED");
    uint64_t seed = given ? strtoull(given, NULL, 0) : fcdp__now_ns();
    print_message("%s: FCDP_TEST_SEED=%#llx\n", test, (unsigned long long)seed);
    return seed;
}

/* Run `body` in a child with default signal actions and no standard error; its wait status. */
static inline int child_run(void (*body)(void *), void *arg) {
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        signal(SIGSEGV, SIG_DFL);
        signal(SIGABRT, SIG_DFL);
        if (!freopen("/dev/null", "w", stderr)) _exit(99);
        body(arg);
        _exit(0);
    }
    int wait_status = 0;
    assert_int_equal(waitpid(pid, &wait_status, 0), pid);
    return wait_status;
}

static inline void assert_dies(void (*body)(void *), void *arg, int signal_number) {
    int wait_status = child_run(body, arg);
    if (!WIFSIGNALED(wait_status) || WTERMSIG(wait_status) != signal_number)
        fail_msg("expected death by signal %d, got wait status %#x", signal_number, wait_status);
}

#endif
