/* numa.h - the machine's NUMA nodes: to which one a device belongs, its CPUs, and from where pages come.
 *
 * What is read takes `root`, which is put before /proc and /sys ("" outside of tests and described machines).
 * Nothing here fails: where the system does not say, a device belongs to no node, and nothing is bound.
 */
#ifndef FCDP_NUMA_H
#define FCDP_NUMA_H

#include "base/base.h"

#include <sched.h>

/* ---- CPUs ---- */

enum { FCDP_MAX_CPUS = 8192 }; /* Linux' own limit */
typedef struct fcdp_cpus {
    cpu_set_t sets[FCDP_MAX_CPUS / CPU_SETSIZE];
} fcdp_cpus;

/* As the kernel writes lists ("0-3,8"), cut at the end of `text`. */
void fcdp__cpus_text(const fcdp_cpus *cpus, char *text, size_t n_bytes);
unsigned fcdp__cpus_count(const fcdp_cpus *cpus);
/* The node that has all of them; -1: none has. `root`: see above. */
int fcdp__cpus_node(const char *root, const fcdp_cpus *cpus);
/* Of the calling thread. False: the kernel refuses. */
bool fcdp__cpus_own(fcdp_cpus *cpus_out);
/* Threads of this process that may run on the CPUs `from`, no more and no fewer, may run on `to` from here
 * on, and so may those that they start. The others stay as they are. The number of threads that changed. */
unsigned fcdp__cpus_bind(const fcdp_cpus *from, const fcdp_cpus *to);

/* ---- what is to be done for a device ---- */

typedef struct fcdp_numa_device {
    int node;        /* as its driver says; -1: it does not */
    const char *pci; /* "0000:3b:00.0"; "": it has no place there */
} fcdp_numa_device;

typedef struct fcdp_numa_plan {
    unsigned n_nodes; /* that the machine has; 0: it does not say */
    int node;         /* the device's; -1: it does not matter, or is not known */
    int memory_node;  /* that node, or the nearest one with memory; -1: pages come from anywhere */
    bool binds;       /* threads go to `cpus` */
    fcdp_cpus cpus;
    char text[320]; /* what is done, or why not, for messages */
} fcdp_numa_plan;

/* wanted: FCDP_PIN_CPU. own: the CPUs on which the process may run. Threads are bound only if these are all
 * CPUs that the machine and the process's cpuset have: otherwise something else has chosen them. They go to
 * the CPUs of the device's node, or of the nearest node that has any among them. */
void fcdp__numa_plan(const char *root, const fcdp_numa_device *device, bool wanted, const fcdp_cpus *own,
                     fcdp_numa_plan *plan_out);

/* ---- pages ---- */

/* The system calls, which tests replace. As the kernel has them: 0 or more, or -1 with errno. */
typedef struct fcdp_numa_calls {
    long (*mbind)(void *at, unsigned long bytes, int mode, const unsigned long *nodes, unsigned long max_node,
                  unsigned flags);
    long (*move_pages)(int pid, unsigned long n, void **pages, const int *nodes, int *status_out, int flags);
} fcdp_numa_calls;
extern fcdp_numa_calls fcdp__numa_calls;

/* Pages of [at, at + bytes) that are first touched from now on come from `node` while it has any. `at` page
 * aligned; node -1: no preference. A failure is a debug line. True when the kernel took the preference. */
bool fcdp__numa_prefer(void *at, size_t bytes, int node);
/* Of the pages that [at, at + bytes) has by now: bytes on `node`, and on others. Zeroes where the kernel does
 * not say. */
void fcdp__numa_count(void *at, size_t bytes, int node, size_t *near_bytes_out, size_t *far_bytes_out);

#endif
