/* numa.c - reads the machine's NUMA nodes from /sys, and asks the kernel for CPUs and pages.
 *
 * It reads /sys itself and makes the system calls itself. libnuma knows the machine that it runs on alone,
 * and takes no node and no CPU that this one lacks; tests describe others. (tests/tiering/test_numa.c
 * compares with libnuma where it is installed.)
 *
 * A preference is never a demand: containers without CAP_SYS_NICE forbid mbind, and a strictly bound mapping
 * would meet the OOM killer when its node is full.
 */
#include "tiering/numa.h"

#include "tiering/cgroup.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <linux/mempolicy.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MAX_NODES = 1024, BITS = 8 * sizeof(unsigned long) }; /* CONFIG_NODES_SHIFT is at most 10 */

/* ---- lists of numbers, as the kernel writes them ---- */

_Static_assert((int)MAX_NODES <= (int)FCDP_MAX_CPUS, "a set of CPUs is large enough for a set of nodes");

static bool has(const fcdp_cpus *set, int i) {
    return CPU_ISSET_S((size_t)i, sizeof *set, set->sets);
}

unsigned fcdp__cpus_count(const fcdp_cpus *cpus) {
    return (unsigned)CPU_COUNT_S(sizeof *cpus, cpus->sets);
}

static fcdp_cpus both(const fcdp_cpus *a, const fcdp_cpus *b) {
    fcdp_cpus set;
    CPU_AND_S(sizeof set, set.sets, a->sets, b->sets);
    return set;
}

static bool is_same(const fcdp_cpus *a, const fcdp_cpus *b) {
    return CPU_EQUAL_S(sizeof *a, a->sets, b->sets);
}

/* "0-3,8\n"; an empty list is a list. False: the text is no list. */
static bool list_parse(const char *text, fcdp_cpus *set_out) {
    fcdp_cpus set = {0};
    while (isdigit((unsigned char)*text)) {
        char *end;
        unsigned long first = strtoul(text, &end, 10), last = first;
        if (*end == '-') last = strtoul(end + 1, &end, 10);
        if (last < first || last >= FCDP_MAX_CPUS) return false;
        for (unsigned long i = first; i <= last; i++) CPU_SET_S(i, sizeof set, set.sets);
        if (*end == ',') end++;
        text = end;
    }
    if (*text && *text != '\n') return false;
    *set_out = set;
    return true;
}

/* The first line of root/folder/name; false: no such file. A CPU list of FCDP_MAX_CPUS is at most so long. */
static bool line_read(const char *root, const char *folder, const char *name, char *line, size_t n_bytes) {
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%s%s/%s", root, folder, name) >= (int)sizeof path) return false;
    FILE *file = fopen(path, "re");
    if (!file) return false;
    bool found = fgets(line, (int)n_bytes, file) != NULL;
    fclose(file);
    return found;
}

static bool list_read(const char *root, const char *folder, const char *name, fcdp_cpus *set_out) {
    static const size_t N_LINE = 5 * FCDP_MAX_CPUS;
    char *line = malloc(N_LINE);
    bool found = line && line_read(root, folder, name, line, N_LINE) && list_parse(line, set_out);
    free(line);
    return found;
}

void fcdp__cpus_text(const fcdp_cpus *cpus, char *text, size_t n_bytes) {
    size_t at = 0;
    text[0] = 0;
    for (int i = 0, last; i < FCDP_MAX_CPUS; i = last + 1) {
        last = i;
        if (!has(cpus, i)) continue;
        while (last + 1 < FCDP_MAX_CPUS && has(cpus, last + 1)) last++;
        char range[32];
        int n = last > i ? snprintf(range, sizeof range, "%s%d-%d", at ? "," : "", i, last)
                         : snprintf(range, sizeof range, "%s%d", at ? "," : "", i);
        if (at + (size_t)n >= n_bytes) return;
        memcpy(text + at, range, (size_t)n + 1);
        at += (size_t)n;
    }
}

/* ---- threads ---- */

static bool thread_cpus(pid_t thread, fcdp_cpus *cpus_out) {
    *cpus_out = (fcdp_cpus){0};
    return sched_getaffinity(thread, sizeof *cpus_out, cpus_out->sets) == 0;
}

bool fcdp__cpus_own(fcdp_cpus *cpus_out) {
    return thread_cpus(0, cpus_out);
}

/* A thread may be started meanwhile, by one that was not bound yet: a pass that finds none is the last. A
 * thread that may run on no other CPUs of `to` than `from` does not move, and is not tried again. */
unsigned fcdp__cpus_bind(const fcdp_cpus *from, const fcdp_cpus *to) {
    unsigned n_all = 0, n_pass;
    if (!fcdp__cpus_count(to) || is_same(from, to)) return 0;
    do {
        n_pass = 0;
        DIR *threads = opendir("/proc/self/task");
        for (struct dirent *entry; threads && (entry = readdir(threads));) {
            pid_t thread = (pid_t)atoi(entry->d_name);
            fcdp_cpus now;
            if (thread > 0 && thread_cpus(thread, &now) && is_same(&now, from) &&
                !sched_setaffinity(thread, sizeof *to, to->sets) && thread_cpus(thread, &now) &&
                !is_same(&now, from))
                n_pass++;
        }
        if (threads) closedir(threads);
        n_all += n_pass;
    } while (n_pass);
    return n_all;
}

/* All CPUs that are online and that the process's cpuset has; where no cpuset is visible, all that are
 * online. */
static bool cpus_allowed(const char *root, fcdp_cpus *allowed_out) {
    fcdp_cpus online, cpuset;
    char group[PATH_MAX], folder[PATH_MAX + 32];
    if (!list_read(root, "/sys/devices/system/cpu", "online", &online)) return false;
    *allowed_out = online;
    for (int version = 1; version <= 2; version++) {
        if (!fcdp__cgroup_find(root, version == 1 ? "cpuset" : "", group, sizeof group)) continue;
        do {
            snprintf(folder, sizeof folder, "/sys/fs/cgroup%s%s", version == 1 ? "/cpuset" : "", group);
            if (!list_read(root, folder, version == 1 ? "cpuset.effective_cpus" : "cpuset.cpus.effective",
                           &cpuset))
                continue; /* a container's mount shows the container's own group as the root */
            *allowed_out = both(&online, &cpuset);
            return true;
        } while (fcdp__cgroup_up(group));
    }
    return true;
}

/* ---- nodes ---- */

static const char NODES[] = "/sys/devices/system/node";

static bool node_cpus(const char *root, int node, fcdp_cpus *cpus_out) {
    char folder[64];
    snprintf(folder, sizeof folder, "%s/node%d", NODES, node);
    return list_read(root, folder, "cpulist", cpus_out);
}

/* The member of `candidates` that is nearest to `node`, which it may be itself; -1: there is none. Where the
 * distances are not known, the lowest one. The k-th distance is that to the k-th node that is online. */
static int nearest(const char *root, int node, const fcdp_cpus *online, const fcdp_cpus *candidates) {
    char folder[64], line[8 * MAX_NODES];
    snprintf(folder, sizeof folder, "%s/node%d", NODES, node);
    if (!line_read(root, folder, "distance", line, sizeof line)) line[0] = 0;
    const char *at = line;
    long best_distance = LONG_MAX;
    int best = -1;
    if (has(candidates, node)) return node;
    for (int i = 0; i < MAX_NODES; i++) {
        if (!has(online, i)) continue;
        char *end;
        long distance = strtol(at, &end, 10);
        if (end == at) distance = LONG_MAX - 1;
        at = end;
        if (has(candidates, i) && distance < best_distance) {
            best_distance = distance;
            best = i;
        }
    }
    return best;
}

/* Nodes below MAX_NODES that have CPUs among `allowed`. */
static fcdp_cpus nodes_with_cpus(const char *root, const fcdp_cpus *online, const fcdp_cpus *allowed) {
    fcdp_cpus found = {0}, cpus;
    for (int i = 0; i < MAX_NODES; i++) {
        if (!has(online, i) || !node_cpus(root, i, &cpus)) continue;
        cpus = both(&cpus, allowed);
        if (fcdp__cpus_count(&cpus)) CPU_SET_S((size_t)i, sizeof found, found.sets);
    }
    return found;
}

int fcdp__cpus_node(const char *root, const fcdp_cpus *cpus) {
    fcdp_cpus online, of_node;
    if (!fcdp__cpus_count(cpus) || !list_read(root, NODES, "online", &online)) return -1;
    for (int i = 0; i < MAX_NODES; i++) {
        if (!has(&online, i) || !node_cpus(root, i, &of_node)) continue;
        of_node = both(&of_node, cpus);
        if (is_same(&of_node, cpus)) return i;
    }
    return -1;
}

/* Drivers before CUDA 12.2 do not tell a device's node, the kernel knows its PCI slot's. */
static int device_node(const char *root, const fcdp_numa_device *device) {
    char folder[64], line[32];
    if (device->node >= 0 || !device->pci[0]) return device->node;
    snprintf(folder, sizeof folder, "/sys/bus/pci/devices/%.32s", device->pci);
    return line_read(root, folder, "numa_node", line, sizeof line) ? atoi(line) : -1;
}

static void plan_threads(const char *root, const fcdp_cpus *online, bool wanted, const fcdp_cpus *own,
                         fcdp_numa_plan *plan) {
    fcdp_cpus allowed, with_cpus, cpus;
    char list[128], before[64];
    snprintf(before, sizeof before, "NUMA node %d of %u", plan->node, plan->n_nodes);
    fcdp__cpus_text(own, list, sizeof list);
    if (!wanted) {
        snprintf(plan->text, sizeof plan->text, "%s; FCDP_PIN_CPU=off: threads run on CPUs %s", before, list);
        return;
    }
    if (!cpus_allowed(root, &allowed) || !is_same(own, &allowed)) {
        snprintf(plan->text, sizeof plan->text,
                 "%s; threads stay on CPUs %s, to which something else has bound the process", before, list);
        return;
    }
    with_cpus = nodes_with_cpus(root, online, &allowed);
    int node = nearest(root, plan->node, online, &with_cpus);
    if (node < 0 || !node_cpus(root, node, &cpus)) {
        snprintf(plan->text, sizeof plan->text, "%s; threads stay on CPUs %s: no node has CPUs among these",
                 before, list);
        return;
    }
    plan->cpus = both(&cpus, &allowed);
    if (is_same(&plan->cpus, own)) {
        snprintf(plan->text, sizeof plan->text, "%s; threads stay on CPUs %s, which are on node %d", before,
                 list, node);
        return;
    }
    plan->binds = true;
    fcdp__cpus_text(&plan->cpus, list, sizeof list);
    if (node == plan->node)
        snprintf(plan->text, sizeof plan->text, "%s; threads are bound to its CPUs %s", before, list);
    else
        snprintf(plan->text, sizeof plan->text,
                 "%s, which has no CPUs for this process; threads are bound to CPUs %s of node %d", before,
                 list, node);
}

void fcdp__numa_plan(const char *root, const fcdp_numa_device *device, bool wanted, const fcdp_cpus *own,
                     fcdp_numa_plan *plan_out) {
    fcdp_cpus online, with_memory;
    *plan_out = (fcdp_numa_plan){.node = -1, .memory_node = -1};
    char *text = plan_out->text;
    if (list_read(root, NODES, "online", &online)) plan_out->n_nodes = fcdp__cpus_count(&online);
    if (plan_out->n_nodes < 2) {
        snprintf(text, sizeof plan_out->text,
                 plan_out->n_nodes ? "1 NUMA node: nothing is bound"
                                   : "no NUMA nodes in /sys: nothing is bound");
        return;
    }
    int node = device_node(root, device);
    if (node < 0 || node >= MAX_NODES || !has(&online, node)) {
        snprintf(text, sizeof plan_out->text,
                 "%u NUMA nodes; the device's is not known, so nothing is bound: neither its driver nor "
                 "/sys/bus/pci says it",
                 plan_out->n_nodes);
        return;
    }
    plan_out->node = node;
    if (!list_read(root, NODES, "has_memory", &with_memory)) with_memory = online;
    plan_out->memory_node = nearest(root, node, &online, &with_memory);
    plan_threads(root, &online, wanted, own, plan_out);
}

/* ---- pages ---- */

static long call_mbind(void *at, unsigned long bytes, int mode, const unsigned long *nodes,
                       unsigned long max_node, unsigned flags) {
    return syscall(SYS_mbind, at, bytes, mode, nodes, max_node, flags);
}

static long call_move_pages(int pid, unsigned long n, void **pages, const int *nodes, int *status_out,
                            int flags) {
    return syscall(SYS_move_pages, pid, n, pages, nodes, status_out, flags);
}

fcdp_numa_calls fcdp__numa_calls = {call_mbind, call_move_pages};

bool fcdp__numa_prefer(void *at, size_t bytes, int node) {
    unsigned long mask[MAX_NODES / BITS] = {0};
    if (node < 0 || node >= MAX_NODES) return false;
    mask[node / BITS] = 1UL << node % BITS;
    /* The kernel reads one bit fewer than it is told. */
    if (fcdp__numa_calls.mbind(at, bytes, MPOL_PREFERRED, mask, (unsigned long)MAX_NODES + 1, 0) == 0)
        return true;
    fcdp__log(FCDP_LOG_DEBUG, "host tier: NUMA node %d not honoured for %zu bytes: %s", node, bytes,
              strerror(errno));
    return false;
}

/* Without `nodes`, move_pages moves nothing, and says where each page is. */
void fcdp__numa_count(void *at, size_t bytes, int node, size_t *near_bytes_out, size_t *far_bytes_out) {
    enum { N = 512 };
    size_t page = (size_t)sysconf(_SC_PAGESIZE), near_bytes = 0, far_bytes = 0;
    for (size_t done = 0; done < bytes;) {
        void *pages[N];
        int status[N];
        unsigned long n = 0;
        for (; n < N && done < bytes; n++, done += page) pages[n] = (char *)at + done;
        if (fcdp__numa_calls.move_pages(0, n, pages, NULL, status, 0)) {
            near_bytes = far_bytes = 0;
            break;
        }
        for (unsigned long i = 0; i < n; i++)
            if (status[i] >= 0) *(status[i] == node ? &near_bytes : &far_bytes) += page;
    }
    *near_bytes_out = near_bytes;
    *far_bytes_out = far_bytes;
}
