/* trace.h - what comm writes to the trace (trace_events.h). */
#ifndef FCDP_COMM_TRACE_H
#define FCDP_COMM_TRACE_H

#include "comm/internal.h"
#include "comm/trace_events.h"

/* The ring is open from here on, and says what the engine runs on. */
void fcdp__engine_trace_open(const fcdp_engine_config *config);
void fcdp__engine_trace_device(const fcdp_engine *engine);
/* The comm's place is the job's, unless another one was said before. */
void fcdp__comm_trace(const fcdp_comm *comm);
/* What the monitor sees to: spans that have ended, and levels that no event tells. In relaxed capture
 * mode. `n`: its periods so far. */
void fcdp__engine_trace_poll(const fcdp_engine *engine, uint64_t n);

uint32_t fcdp__group_object(const fcdp_group *group); /* 0: it has no region yet, or `group` is NULL */

/* It has its region: what of it is trainable. */
void fcdp__group_trace_attach(const fcdp_group *group);
/* An unshard that is on the streams. */
void fcdp__group_trace_use(const fcdp_group *group, const fcdp_use_counts *counts);
/* The ranks have agreed; group->votes is what this one said. */
void fcdp__group_trace_stale(const fcdp_group *group);
void fcdp__group_trace_reshard(const fcdp_group *group, uint8_t cause);
/* A slice was read from FCDP_CACHE_DIR, or written there; or it failed. */
void fcdp__group_trace_cache(const fcdp_group *group, uint16_t kind, uint64_t start_ns, size_t bytes,
                             fcdp_status status);
/* Where it lives, between its uses, has changed (FCDP_LIVES_...). */
void fcdp__group_trace_lives(const fcdp_group *group);
/* Its frozen span's slice is on the node's disk. Any thread. */
void fcdp__group_trace_on_disk(const fcdp_group *group);
void fcdp__group_trace_host_wait(const fcdp_group *group, uint64_t start_ns, uint64_t ns);
/* Puts `stream` behind the event, between two timing events. */
fcdp_status fcdp__group_trace_stall(const fcdp_group *group, fcdp_stream stream,
                                    fcdp_event event) FCDP_MUST_CHECK;

/* The host has waited since `start_ns` of fcdp__trace_start(). */
void fcdp__host_wait_trace(uint64_t start_ns, uint8_t cause);

#endif
