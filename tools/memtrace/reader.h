/* reader.h - a trace in a file: its chunks, its processes, and what of it could not be read.
 *
 * Opening reads the headers and the index, or with no index the headers of all chunks: milliseconds for
 * gigabytes. A chunk is read, and its checksum compared, when it is asked for. What is damaged or missing is
 * left out, and a note says so. A file is used by one thread at a time.
 *
 *     chunks[i].at + 64 + chunks[i].chunk.bytes <= chunks[i + 1].at, and <= n_bytes for the last
 *
 */
#ifndef MEMTRACE_READER_H
#define MEMTRACE_READER_H

#include <stdbool.h>
#include <stddef.h>

#include "base/trace_format.h"
#include "tools/memtrace/error.h"

typedef struct memtrace_file memtrace_file;

/* Refuses a file that is not a trace, or of another version. */
bool memtrace_file_open(const char *path, memtrace_file **file_out, memtrace_error *error);
/* The same of a descriptor, which becomes the file's and is closed with it. */
bool memtrace_file_open_descriptor(int fd, const char *name, memtrace_file **file_out, memtrace_error *error);
void memtrace_file_close(memtrace_file *file); /* NULL: nothing */

typedef struct memtrace_summary {
    uint64_t n_bytes, n_events;  /* of the file; in chunks that are there */
    uint64_t n_unreadable_bytes; /* between chunks, behind the last one, and in chunks left out. Grows while
                                  * chunks are read */
    uint64_t created_real_ns;
    size_t n_chunks, n_processes;
    bool is_complete; /* it has its index */
    bool is_growing;  /* its recorder is still at work */
} memtrace_summary;
memtrace_summary memtrace_file_summary(const memtrace_file *file);

/* What could not be read, and why: one sentence each. Grows while chunks are read. */
size_t memtrace_file_n_notes(const memtrace_file *file);
const char *memtrace_file_note(const memtrace_file *file, size_t i);

/* ---- chunks ---- */

/* The header of chunk i < n_chunks. */
const fcdp_trace_chunk *memtrace_file_chunk(const memtrace_file *file, size_t i);
/* Its body, valid until the next call; NULL, and a note the first time, where it is damaged. */
const void *memtrace_file_body(memtrace_file *file, size_t i);
/* The events of chunk i, NULL if it has none; their number is at most the header's. */
const fcdp_trace_event *memtrace_file_events(memtrace_file *file, size_t i, size_t *n_out);

/* A chunk that says what held: STATE or END. Pointers into the body: valid until the next call. */
typedef struct memtrace_state {
    fcdp_trace_state state;
    const uint64_t *counters; /* state.n_counters */
    const void *objects;      /* memtrace_state_object */
} memtrace_state;
bool memtrace_file_state(memtrace_file *file, size_t i, memtrace_state *state_out);
/* Object i < state.n_objects; its number. */
const fcdp_trace_object *memtrace_state_object(const memtrace_state *state, size_t i, uint32_t *number_out);

/* ---- processes ---- */

enum { MEMTRACE_NO_CHUNK = -1 };
typedef struct memtrace_process {
    fcdp_trace_header header;     /* as last written: its rank is known a while after its start */
    long first_state, last_state; /* chunks that say what held; MEMTRACE_NO_CHUNK */
    bool is_ended;                /* its end was recorded; `ended` says whether in order, or by a signal */
    uint32_t ended;
    uint64_t n_events, n_lost, n_dropped;
    uint64_t first_ns, last_ns; /* CLOCK_MONOTONIC, of its chunks */
} memtrace_process;
/* Process i < n_processes; i is what chunks call it. */
const memtrace_process *memtrace_file_process(const memtrace_file *file, size_t i);
/* Its name: "rank 3", or "process 4711" if it has no rank. */
void memtrace_process_label(const memtrace_process *process, char label[64]);

/* What an object is for life. */
typedef struct memtrace_object {
    const char *name;     /* "" for object 0, and for what no state knows. Borrowed from the file */
    uint64_t shard_group; /* as in fcdp_trace_object; 0: not known */
} memtrace_object;
/* The object that chunk `chunk` calls so. A number may stand for one after the other: the last state before
 * the chunk says, where there is none the next. */
memtrace_object memtrace_file_object(memtrace_file *file, size_t process, size_t chunk, uint32_t number);
const char *memtrace_file_object_name(memtrace_file *file, size_t process, size_t chunk, uint32_t number);

#endif
