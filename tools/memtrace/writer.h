/* writer.h - writes a trace's file, chunk by chunk.
 *
 * Each chunk is written at once, so that after a kill a reader finds all chunks but the one being written. */
#ifndef MEMTRACE_WRITER_H
#define MEMTRACE_WRITER_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/uio.h>

#include "base/trace_format.h"
#include "tools/memtrace/error.h"

typedef struct memtrace_writer memtrace_writer;

/* A file at `path` stays as it is until the first chunk is written: then the new one, mode 0600, takes its
 * place. Refuses to replace a file that is not empty, unless `replaces`, and one that is being written. Holds
 * an exclusive lock, by which readers see that the file grows. */
bool memtrace_writer_create(const char *path, bool replaces, memtrace_writer **writer_out,
                            memtrace_error *error);
enum { MEMTRACE_MAX_PARTS = 6 };
/* Of `chunk` the caller sets type, process, n, times and steps. The body is the parts, one behind the other:
 * at most MEMTRACE_MAX_PARTS. After a failure nothing more is written: the file is readable as it is. */
bool memtrace_writer_chunk(memtrace_writer *writer, const fcdp_trace_chunk *chunk, const struct iovec *parts,
                           size_t n_parts, memtrace_error *error);
/* Events in the order of their numbers. */
bool memtrace_writer_events(memtrace_writer *writer, uint32_t process, const fcdp_trace_event *events,
                            size_t n, memtrace_error *error);
uint64_t memtrace_writer_n_bytes(const memtrace_writer *writer);
/* Writes the index, unless a write has failed; frees the writer in any case. Without a chunk there is no
 * file. */
bool memtrace_writer_close(memtrace_writer *writer, memtrace_error *error);

#endif
