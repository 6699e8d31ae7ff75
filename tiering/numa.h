/* numa.h - where a mapping's pages come from. A preference, never a demand: containers without CAP_SYS_NICE
 * forbid mbind, and a strictly bound mapping would meet the OOM killer when its node is full. */
#ifndef FCDP_NUMA_H
#define FCDP_NUMA_H

#include "base/base.h"

/* Pages of [at, at + bytes) that are first touched from now on come from `node` while it has any. `at` page
 * aligned; node -1: no preference. A failure is a debug line. True when the kernel took the preference. */
bool fcdp__numa_prefer(void *at, size_t bytes, int node);

#endif
