/* chrome.h - a trace as Chrome's JSON, which Perfetto reads: beside PyTorch's profiler's, on the same clock.
 *
 * One process per rank. Its tracks: steps, a thread for each of the job's threads and streams, one for each
 * region with where its bytes are, and counters for each link's rate and each holder's memory. Arrows (flows)
 * go from each gather, load and restore to the wait with which the use of its bytes begins. */
#ifndef MEMTRACE_CHROME_H
#define MEMTRACE_CHROME_H

#include <stdio.h>

#include "tools/memtrace/reader.h"

/* Writes a text as JSON: returns `text` quoted and escaped, valid until the next call; NULL: it failed. */
typedef const char *memtrace_encode(void *context, const char *text);

/* Times are in microseconds from base_real_ns on, a moment since 1970. False: out cannot be written, or
 * encode failed. */
bool memtrace_chrome_write(memtrace_file *file, uint64_t base_real_ns, FILE *out, memtrace_encode *encode,
                           void *context, uint64_t *n_events_out);

#endif
