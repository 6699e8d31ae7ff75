/* numa.c - the only file that knows the kernel's memory policies. It makes the system call itself: libnuma
 * offers more than one call needs, and a wheel would have to bundle it. */
#include "tiering/numa.h"

#include <errno.h>
#include <linux/mempolicy.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MAX_NODES = 1024, BITS = 8 * sizeof(unsigned long) }; /* CONFIG_NODES_SHIFT is at most 10 */

bool fcdp__numa_prefer(void *at, size_t bytes, int node) {
    unsigned long mask[MAX_NODES / BITS] = {0};
    if (node < 0 || node >= MAX_NODES) return false;
    mask[node / BITS] = 1UL << node % BITS;
    /* The kernel reads one bit fewer than it is told. */
    if (syscall(SYS_mbind, at, bytes, MPOL_PREFERRED, mask, (unsigned long)MAX_NODES + 1, 0) == 0)
        return true;
    fcdp__log(FCDP_LOG_DEBUG, "host tier: NUMA node %d not honoured for %zu bytes: %s", node, bytes,
              strerror(errno));
    return false;
}
