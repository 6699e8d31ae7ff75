/* monitor.h - a thread that finds what only time tells: a failure that the transport has latched, a peer that
 * has died, a collective that is late. It waits for nothing but its own clock, and never changes a region. */
#ifndef FCDP_MONITOR_H
#define FCDP_MONITOR_H

#include "comm/engine.h"

typedef struct fcdp_monitor fcdp_monitor;

/* It looks at all shard groups of the engine, ten times a second. */
fcdp_status fcdp__monitor_start(fcdp_engine *engine, fcdp_monitor **monitor_out) FCDP_MUST_CHECK;
/* Returns when its thread has ended. NULL: nothing. */
void fcdp__monitor_stop(fcdp_monitor *monitor);

#endif
