/* trace_map.h - maps and unmaps of device addresses, in the trace. */
#ifndef FCDP_TRACE_MAP_H
#define FCDP_TRACE_MAP_H

#include "alloc/trace_events.h"
#include "base/trace.h"

static inline void fcdp__trace_map(uint64_t at, uint64_t bytes) {
    fcdp__trace_now(FCDP_EVENT_MAP, 0, bytes, at, 0);
    fcdp__trace_count(FCDP_COUNT_MAPS, 1);
    fcdp__trace_count(FCDP_COUNT_MAPPED_BYTES, bytes);
}

static inline void fcdp__trace_unmap(uint64_t at, uint64_t bytes) {
    fcdp__trace_now(FCDP_EVENT_UNMAP, 0, bytes, at, 0);
    fcdp__trace_count(FCDP_COUNT_UNMAPS, 1);
    fcdp__trace_count(FCDP_COUNT_MAPPED_BYTES, -bytes);
}

#endif
