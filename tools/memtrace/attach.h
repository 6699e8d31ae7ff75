/* attach.h - the segments of live processes: found in /proc, mapped read-only.
 *
 * A segment outlives its process in every reader that has it mapped. Nothing here makes a process wait. The
 * process may write anything into its segment at any time, so the numbers that bound a read are copied once
 * and checked. It cannot take pages away (F_SEAL_SHRINK).
 */
#ifndef MEMTRACE_ATTACH_H
#define MEMTRACE_ATTACH_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#include "base/trace_format.h"
#include "tools/memtrace/error.h"

typedef struct memtrace_segment {
    pid_t pid;            /* here; header->pid is that in the process's own namespace */
    uint64_t start_ticks; /* of /proc/PID/stat: with pid it names a process for all time */
    int pidfd;            /* becomes readable when the process is gone; -1: this kernel has none */
    const void *base;     /* the mapping, read-only */
    size_t n_mapped_bytes;
    const fcdp_trace_header *header; /* for what changes; it is not asked again for what follows here */
    const _Atomic uint64_t *counters;
    const fcdp_trace_object *objects;
    const fcdp_trace_event *ring;
    uint32_t n_counters, n_objects;
    uint64_t ring_events; /* a power of two */
} memtrace_segment;

/* Maps the segment of process `pid`. False, with the reason: there is no such process, it belongs to another
 * user, it has no segment (yet), or one of another version, or one that may shrink. Closed by
 * memtrace_detach. */
bool memtrace_attach(pid_t pid, memtrace_segment *segment_out, memtrace_error *error);
void memtrace_detach(memtrace_segment *segment);
/* Is the process there? What it wrote before it went is in the segment once this says no. */
bool memtrace_is_alive(const memtrace_segment *segment);

/* Processes that memtrace_find looked at. Refused: it could not look at them, since other users own them. */
typedef struct memtrace_scan {
    size_t n_processes, n_refused;
} memtrace_scan;
/* Calls found(pid, start_ticks, context) for every process with a segment of its own: all of this machine
 * with `ancestor` 0, otherwise `ancestor` and its descendants. Costs about 1 us per open file of each. */
memtrace_scan memtrace_find(pid_t ancestor, void (*found)(pid_t pid, uint64_t start_ticks, void *context),
                            void *context);

typedef enum memtrace_read {
    MEMTRACE_READ,    /* the event is copied */
    MEMTRACE_NOT_YET, /* not written yet, or never to be: its writer was killed, or dropped it */
    MEMTRACE_LOST,    /* overwritten by a later one */
} memtrace_read;
/* Copies the header word by word, since the process may be writing it. */
void memtrace_read_header(const memtrace_segment *segment, fcdp_trace_header *header_out);
/* 0 if the process has no such counter. */
uint64_t memtrace_read_counter(const memtrace_segment *segment, uint32_t number);
/* Copies event `n` of the ring, whole or not at all; event_out->stamp is n. */
memtrace_read memtrace_read_event(const memtrace_segment *segment, uint64_t n, fcdp_trace_event *event_out);
/* Copies an object, its name and numbers of one generation; false: it stands for nothing now. */
bool memtrace_read_object(const memtrace_segment *segment, uint32_t number, fcdp_trace_object *object_out);
/* The same, of an object that is gone too, as it was last; false: it never was, or is being made. */
bool memtrace_read_any_object(const memtrace_segment *segment, uint32_t number,
                              fcdp_trace_object *object_out);
/* The text that object `number` begins (FCDP_OBJECT_TEXT), cut at `n_bytes` with its 0; "" where there is
 * none. */
void memtrace_read_text(const memtrace_segment *segment, uint32_t number, char *text_out, size_t n_bytes);
/* Events begun so far: those below are written, or about to be. */
uint64_t memtrace_head(const memtrace_segment *segment);
/* Events that the process itself dropped, as all places of the ring were being written. */
uint64_t memtrace_n_dropped(const memtrace_segment *segment);

#endif
