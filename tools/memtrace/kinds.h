/* kinds.h - the layers' lists of kinds, causes, counters and streams, by number (trace_events.h of each). */
#ifndef MEMTRACE_KINDS_H
#define MEMTRACE_KINDS_H

#include <stddef.h>
#include <stdint.h>

#include "torch_plugin/trace_events.h"

typedef struct memtrace_kind {
    const char *layer, *name, *a, *b, *says;
    uint16_t number;
} memtrace_kind;
typedef struct memtrace_cause {
    const char *layer, *name, *says;
    uint8_t number;
} memtrace_cause;
typedef enum memtrace_unit { MEMTRACE_BYTES, MEMTRACE_NS, MEMTRACE_COUNT } memtrace_unit;
typedef enum memtrace_counts {
    MEMTRACE_SUM,
    MEMTRACE_NODE_SUM,
    MEMTRACE_LEVEL,
    MEMTRACE_PEAK
} memtrace_counts;
typedef struct memtrace_counter {
    const char *layer, *name, *says;
    memtrace_unit unit;
    memtrace_counts what;
    uint32_t number;
} memtrace_counter;
typedef struct memtrace_stream {
    const char *layer, *name, *says;
    uint32_t number;
} memtrace_stream;

/* All rows, in the order of the layers; borrowed for ever. */
const memtrace_kind *memtrace_kinds(size_t *n_out);
const memtrace_cause *memtrace_causes(size_t *n_out);
const memtrace_counter *memtrace_counters(size_t *n_out);
const memtrace_stream *memtrace_streams(size_t *n_out);

/* NULL where no list has the number, which a later version may have written. */
const memtrace_kind *memtrace_kind_of(uint32_t number);
const memtrace_cause *memtrace_cause_of(uint32_t number);
const memtrace_counter *memtrace_counter_of(uint32_t number);
const memtrace_stream *memtrace_stream_of(uint32_t number);

#endif
