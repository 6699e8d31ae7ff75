/* trace_clock.c - CLOCK_MONOTONIC from the processor's counter, with a base and a rate per thread:
 *
 *     time = base_ns + (counter - base_counter) * rate / 2^32      while counter - base_counter < 10 ms
 */
#include "base/trace_clock.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { RATE_SHIFT = 32, MAX_TRIES = 8, MOST_BETWEEN = 2000 /* counts, for one reading of the clock */ };
static const uint64_t SPAN_NS = 10 * 1000 * 1000;

typedef struct here {
    uint64_t base_ns, base_counter; /* of one moment; 0: none yet */
    uint64_t most;                  /* the counter may be so much further */
    uint64_t rate;
    uint32_t thread; /* 0: not asked yet */
} here;

static _Thread_local here mine;
static uint64_t open_ns, open_counter; /* of one moment, the first */
static bool is_counted;

#if defined(__x86_64__)
static uint64_t counter_read(void) {
    return __builtin_ia32_rdtsc();
}
#else
static uint64_t counter_read(void) {
    return 0;
}
#endif

/* The kernel has looked whether the processors' counters agree, and goes on looking. */
static bool counter_is_the_kernels(void) {
#if defined(__x86_64__)
    char text[16] = "";
    int file = open("/sys/devices/system/clocksource/clocksource0/current_clocksource", O_RDONLY | O_CLOEXEC);
    ssize_t n = file >= 0 ? read(file, text, sizeof text - 1) : 0;
    if (file >= 0) (void)close(file);
    return n == 4 && !memcmp(text, "tsc\n", 4);
#else
    return false;
#endif
}

/* One moment by both clocks. False: each time the thread lost its core between the two. No rate may rest on
 * that: a millisecond there would be one in each ten afterwards. */
static bool moment_read(uint64_t *counter_out, uint64_t *now_ns_out) {
    for (int tries = 0; tries < MAX_TRIES; tries++) {
        *counter_out = counter_read();
        *now_ns_out = fcdp__now_ns();
        if (counter_read() - *counter_out < MOST_BETWEEN) return true;
    }
    return false;
}

void fcdp__trace_clock_open(void) {
    mine = (here){0}; /* a forked child's thread has another number */
    is_counted = counter_is_the_kernels() && moment_read(&open_counter, &open_ns);
}

/* A new base, and the rate since the beginning: the longer that is, the better it is known. */
static uint64_t base_renew(void) {
    uint64_t counter, now_ns;
    bool together = moment_read(&counter, &now_ns);
    if (!mine.thread) mine.thread = (uint32_t)syscall(SYS_gettid);
    if (!is_counted || !together || now_ns - open_ns < SPAN_NS || counter <= open_counter) return now_ns;
    double rate = (double)(now_ns - open_ns) / (double)(counter - open_counter);
    mine.rate = (uint64_t)(rate * (double)(1ull << RATE_SHIFT));
    mine.most = (uint64_t)((double)SPAN_NS / rate);
    mine.base_ns = now_ns;
    mine.base_counter = counter;
    return now_ns;
}

fcdp_trace_moment fcdp__trace_moment(void) {
    uint64_t counter = counter_read() - mine.base_counter;
    uint64_t now_ns = counter < mine.most ? mine.base_ns + (counter * mine.rate >> RATE_SHIFT) : base_renew();
    return (fcdp_trace_moment){now_ns, mine.thread};
}
