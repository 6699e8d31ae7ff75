/* trace_rows.h - the columns of the lists in which a layer says what it tells of its work.
 *
 * Every layer has a trace_events.h of such lists. Readers, the documentation and checks are made of the same
 * rows:
 *
 *     FCDP_<LAYER>_EVENTS(X)    X(NAME, number, "name", "what a is", "what b is", "what it says")
 *     FCDP_<LAYER>_CAUSES(X)    X(NAME, number, "name", "what it says")
 *     FCDP_<LAYER>_COUNTERS(X)  X(NAME, number, "name", UNIT, WHAT, "what it says")
 *     FCDP_<LAYER>_STREAMS(X)   X(NAME, number, "name", "what runs on it")
 *
 * UNIT is BYTES, NS or COUNT. WHAT is SUM (only grows), NODE_SUM (a sum that each rank of a node counts for
 * the whole node: readers must not add the ranks' numbers), LEVEL (what holds now) or PEAK. A number is of
 * the whole process, so a reader needs no layer to understand one; each layer has 32 of each sort
 * (FCDP_TRACE_ALLOC, ...). "" as what a or b is: nothing. An event's span is [time_ns, time_ns +
 * duration_ns]; a moment has duration 0.
 */
#ifndef FCDP_TRACE_ROWS_H
#define FCDP_TRACE_ROWS_H

/* Numbers by name: FCDP_EVENT_MAP, FCDP_CAUSE_RECLAIM_EVICT, FCDP_COUNT_MAPS, FCDP_TRACK_TO_HOST. */
#define FCDP_AS_EVENT(NAME, number, ...) FCDP_EVENT_##NAME = (number),
#define FCDP_AS_CAUSE(NAME, number, ...) FCDP_CAUSE_##NAME = (number),
#define FCDP_AS_COUNTER(NAME, number, ...) FCDP_COUNT_##NAME = (number),
#define FCDP_AS_TRACK(NAME, number, ...) FCDP_TRACK_##NAME = (number),

#endif
