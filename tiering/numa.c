/* numa.c - the one file that knows libnuma. */
#include "tiering/numa.h"

#include <errno.h>
#include <numa.h>
#include <numaif.h>
#include <string.h>

bool fcdp__numa_prefer(void *at, size_t bytes, int node) {
    if (node < 0 || numa_available() < 0) return false;
    struct bitmask *mask = numa_allocate_nodemask();
    if (!mask || (unsigned)node >= mask->size) {
        if (mask) numa_free_nodemask(mask);
        return false;
    }
    numa_bitmask_setbit(mask, (unsigned)node);
    long rc = mbind(at, bytes, MPOL_PREFERRED, mask->maskp, mask->size + 1, 0);
    int err = errno;
    numa_free_nodemask(mask);
    if (rc)
        fcdp__log(FCDP_LOG_DEBUG, "host tier: NUMA node %d not honoured for %zu bytes: %s", node, bytes,
                  strerror(err));
    return rc == 0;
}
