/* report_internal.h - the parts of a report, for report*.c. */
#ifndef MEMTRACE_REPORT_INTERNAL_H
#define MEMTRACE_REPORT_INTERNAL_H

#include "tools/memtrace/report.h"

/* Finds what each of report->stalls waited for. Reads all events. */
void memtrace__explain(memtrace_file *file, memtrace_report *report);

#endif
