/* processes.h - what /proc says of processes. */
#ifndef MEMTRACE_PROCESSES_H
#define MEMTRACE_PROCESSES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

typedef struct memtrace_process_entry {
    pid_t pid, parent;
    uint64_t start_ticks;
    bool has_ended; /* its parent, which may never do so, has not asked for its status yet */
} memtrace_process_entry;

/* All processes, or with an ancestor it and those that descend from it. malloc'ed, the caller's; NULL: no
 * memory. */
memtrace_process_entry *memtrace_processes(pid_t ancestor, size_t *n_out);
/* One process; false: it is gone. */
bool memtrace_process_get(pid_t pid, memtrace_process_entry *entry_out);
/* Its number in its own namespace, which is what it calls itself. */
pid_t memtrace_process_inner_pid(pid_t pid);

#endif
