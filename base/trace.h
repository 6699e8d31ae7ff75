/* trace.h - an event ring in shared memory, to which every layer writes what it does.
 *
 * Writing an event costs a clock read and two atomic operations, takes no lock, and never waits: not for
 * other writers, nor for readers, of which there may be none. Where the process has no ring (FCDP_TRACE=0,
 * a forked child, no memory) nothing is written, and nothing else changes.
 *
 * A layer lists its kinds and counters in its trace_events.h. This file writes events of the host;
 * trace_stream.h writes those of streams.
 */
#ifndef FCDP_TRACE_H
#define FCDP_TRACE_H

#include "base/base.h"
#include "base/trace_format.h"

/* Open this process's ring, once; `level` 0: none. A failure is logged, and the process goes on without a
 * ring. A forked child has none until it opens one. */
void fcdp_trace_open(uint32_t level, size_t ring_bytes);
/* NULL: there is none. Its atomics are the caller's to write. */
fcdp_trace_header *fcdp__trace_header(void);

/* Is anything written at this level? 1: what moves between tiers; 2: each tensor's memory too. */
bool fcdp__trace_is_on(uint32_t level);

/* Write an event. The caller fills all fields except stamp, step and thread; time_ns 0 is now. */
void fcdp__trace(const fcdp_trace_event *event);
/* The same, but the caller fills all fields except the stamp. */
void fcdp__trace_as_is(const fcdp_trace_event *event);
/* The optimizer steps so far. */
uint32_t fcdp__trace_step(void);
/* A moment. */
void fcdp__trace_now(uint16_t kind, uint32_t object, uint64_t bytes, uint64_t a, uint64_t b);
/* Since when the host has been at it: fcdp__trace_since(start) ends what began at fcdp__trace_start().
 * 0: off. */
uint64_t fcdp__trace_start(void);
void fcdp__trace_since(uint64_t start_ns, fcdp_trace_event event);

void fcdp__trace_count(unsigned counter, uint64_t n); /* adds */
void fcdp__trace_set(unsigned counter, uint64_t value);

/* What a part of the process counts, by FCDP_COUNT_...; all zeroes at first. What it counts is counted in
 * `whole` as well, of which it is a part, and in the end in the process's trace. */
typedef struct fcdp_counts {
    struct fcdp_counts *whole; /* NULL: the process */
    _Atomic uint64_t n[FCDP_TRACE_N_COUNTERS];
} fcdp_counts;
void fcdp__count(fcdp_counts *counts, unsigned counter, uint64_t n); /* adds */

/* A place in the table of objects, for life; 0 where there is none. Readers see all of it or nothing. */
typedef struct fcdp_trace_new {
    const char *name; /* cut at its length */
    uint32_t state;   /* FCDP_OBJECT_..., not 0 */
    uint32_t why;
    uint64_t bytes, trainable_bytes;
} fcdp_trace_new;
uint32_t fcdp__trace_object_add(const fcdp_trace_new *what);
uint32_t fcdp__trace_object_create(const char *name, uint64_t bytes); /* FCDP_OBJECT_LIVE */
void fcdp__trace_object_destroy(uint32_t object);
fcdp_trace_object *fcdp__trace_object(uint32_t object); /* NULL: none */

#endif
