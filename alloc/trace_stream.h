/* trace_stream.h - events that span work on a stream, with the device's times.
 *
 * A span is a pair of timing events around the work, out of a pool that grows until it suffices; from then on
 * nothing is created. A poll (fcdp__trace_spans_poll) writes the spans that have ended to the ring, mapped to
 * CLOCK_MONOTONIC. Without a free pair, or when the driver fails, the event is written at once, without the
 * device's times. Nothing here fails a use or writes the thread's failure text.
 *
 * Spans of one stream follow each other; they do not nest.
 *
 * Threads: any. Lock: FCDP_RANK_TRACE, a leaf, under which no driver call is made.
 */
#ifndef FCDP_TRACE_STREAM_H
#define FCDP_TRACE_STREAM_H

#include "alloc/driver.h"
#include "base/trace.h"

typedef struct fcdp_trace_spans fcdp_trace_spans; /* of one device; NULL stands for none, everywhere */

/* NULL: nothing is traced, or the driver does not tell times. Waits for the device once. */
fcdp_trace_spans *fcdp__trace_spans_create(fcdp_driver *drv);
/* What has not ended by now is written without times. */
void fcdp__trace_spans_destroy(fcdp_trace_spans *spans);

typedef struct fcdp_trace_span {
    uint32_t number;   /* of a pair of timing events; 0: none, and then only the host's time is known */
    uint32_t turn;     /* the pair's, which serves one span after another */
    uint32_t track;    /* of FCDP_..._STREAMS */
    uint32_t step;     /* when it was enqueued */
    uint64_t begun_ns; /* on the host; 0: nothing is traced */
} fcdp_trace_span;

/* The work that `stream` is given from here on. */
fcdp_trace_span fcdp__trace_span_begin(fcdp_trace_spans *spans, fcdp_stream stream, uint32_t track);
/* End the span: it becomes `n` events (1 or 2). This module fills in their time, duration, step and
 * thread. */
void fcdp__trace_span_end(fcdp_trace_spans *spans, fcdp_trace_span span, fcdp_stream stream,
                          const fcdp_trace_event *events, size_t n);
/* From the span's own work, whose events are enqueued without them: bytes that only it knows, of the first
 * event. Nothing without a pair: then the work itself ends the span. */
void fcdp__trace_span_bytes(fcdp_trace_spans *spans, fcdp_trace_span span, uint64_t bytes);
/* Nothing was done: no event. */
void fcdp__trace_span_drop(fcdp_trace_spans *spans, fcdp_trace_span span);
/* As fcdp__trace_span_end, and when its time is known it is added to two counters. */
void fcdp__trace_span_end_counted(fcdp_trace_spans *spans, fcdp_trace_span span, fcdp_stream stream,
                                  const fcdp_trace_event *event, unsigned n_counter, unsigned ns_counter);

/* Writes what has ended. Asks the driver: not while a graph is captured, but in relaxed mode. */
void fcdp__trace_spans_poll(fcdp_trace_spans *spans);

#endif
