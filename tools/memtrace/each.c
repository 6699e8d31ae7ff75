/* each.c - visits the events of a file. */
#include "tools/memtrace/each.h"

void memtrace_each(memtrace_file *file, long process, memtrace_visit *visit, void *context) {
    size_t n_chunks = memtrace_file_summary(file).n_chunks,
           n_processes = memtrace_file_summary(file).n_processes;
    for (size_t i = 0; i < n_chunks; i++) {
        size_t n, of = memtrace_file_chunk(file, i)->process;
        if (of >= n_processes || (process != MEMTRACE_ALL && of != (size_t)process)) continue;
        const fcdp_trace_event *events = memtrace_file_events(file, i, &n);
        for (size_t k = 0; k < n; k++) {
            fcdp_trace_event event = events[k];
            if (!visit(context, of, i, &event)) return;
        }
    }
}
