/* trace.h - what tiering writes to the trace of its regions (trace_events.h). */
#ifndef FCDP_TIERING_TRACE_H
#define FCDP_TIERING_TRACE_H

#include "alloc/trace_stream.h"
#include "tiering/internal.h"
#include "tiering/slot.h"
#include "tiering/trace_events.h"

/* The region has a place in the table of objects, until it is destroyed. */
void fcdp__region_trace_create(fcdp_region *region);
void fcdp__region_trace_destroy(fcdp_region *region);

/* Lock held, after any change: write the region's state, if it differs from the last one written. */
void fcdp__region_trace_state(fcdp_region *region);
/* Lock held. A moment of the region. */
void fcdp__region_trace(const fcdp_region *region, uint16_t kind, uint8_t cause, uint64_t a, uint64_t b);
/* Lock held: the region has the slot, which `last` had before (NULL: no region, or the same). */
void fcdp__region_trace_acquire(const fcdp_region *region, const fcdp_region *last);
void fcdp__slot_trace(const fcdp_slot *slot, uint16_t kind, const fcdp_region *region);

#endif
