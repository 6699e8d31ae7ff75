/* each.h - visits the events of a file. */
#ifndef MEMTRACE_EACH_H
#define MEMTRACE_EACH_H

#include "tools/memtrace/reader.h"

enum { MEMTRACE_ALL = -1 };
/* Calls visit for every event of `process`, or of all, in the order of the file, until it says false. */
typedef bool memtrace_visit(void *context, size_t process, size_t chunk, const fcdp_trace_event *event);
void memtrace_each(memtrace_file *file, long process, memtrace_visit *visit, void *context);

#endif
