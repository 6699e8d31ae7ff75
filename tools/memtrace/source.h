/* source.h - one process of a recording: its ring, and what of it is in the file. */
#ifndef MEMTRACE_SOURCE_H
#define MEMTRACE_SOURCE_H

#include "tools/memtrace/attach.h"
#include "tools/memtrace/writer.h"

/* Events [0, next) of the ring are behind us: written, in `events`, lost, or from before the recording. */
typedef struct memtrace_source {
    memtrace_segment segment; /* of a process that is gone: pid and start_ticks alone */
    uint32_t process;         /* its number in the file */
    bool is_gone;             /* its END is written */
    uint64_t next;
    uint64_t n_events, n_lost;
    uint32_t step;            /* the header's, when it was last looked at */
    fcdp_trace_event *events; /* read, not written yet */
    size_t n;
    uint64_t since_ns;     /* when the first of them was read */
    uint64_t stuck_ns;     /* since when event `next` has not come; 0: it is not missing */
    uint64_t state_ns;     /* when what held was last written */
    uint64_t looked_ns;    /* when the objects were last compared */
    uint32_t *generations; /* of each object, as last written */
    uint64_t objects;      /* a sum of their generations, as last written */
    uint64_t identity;     /* a sum of the header's fields that become known late, as last written */
} memtrace_source;

/* `segment` becomes the source's. Writes what the process is, and what holds. */
bool memtrace_source_begin(memtrace_source *source, const memtrace_segment *segment, uint32_t process,
                           memtrace_writer *writer, memtrace_error *error);
/* Reads what is new, and writes what is due; all, where the process is gone. */
bool memtrace_source_drain(memtrace_source *source, uint64_t now_ns, memtrace_writer *writer,
                           memtrace_error *error);
/* Writes what is left, and frees it. */
bool memtrace_source_end(memtrace_source *source, memtrace_writer *writer, memtrace_error *error);

uint64_t memtrace_now_ns(void); /* CLOCK_MONOTONIC */

#endif
