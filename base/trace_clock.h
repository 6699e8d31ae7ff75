/* trace_clock.h - an event's moment, which is CLOCK_MONOTONIC read in a third of its time.
 *
 * Where the kernel's own clock is the processor's counter (x86-64, clocksource tsc), so is this one: each
 * thread that writes events reads CLOCK_MONOTONIC once in 10 ms, and goes on from there by the counter and
 * its rate. The difference stays below a microsecond. Elsewhere, and in the first milliseconds,
 * CLOCK_MONOTONIC is read each time.
 */
#ifndef FCDP_TRACE_CLOCK_H
#define FCDP_TRACE_CLOCK_H

#include "base/base.h"

typedef struct fcdp_trace_moment {
    uint64_t time_ns;
    uint32_t thread; /* gettid() */
} fcdp_trace_moment;

/* Once, before the others, and again in a forked child. */
void fcdp__trace_clock_open(void);
fcdp_trace_moment fcdp__trace_moment(void);

#endif
