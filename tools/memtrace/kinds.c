/* kinds.c - the layers' lists as tables. */
#include "tools/memtrace/kinds.h"

#define AS_KIND(NAME, number, name, a, b, says) {LAYER, name, a, b, says, number},
#define AS_CAUSE(NAME, number, name, says) {LAYER, name, says, number},
#define AS_COUNTER(NAME, number, name, unit, what, says)                                                     \
    {LAYER, name, says, MEMTRACE_##unit, MEMTRACE_##what, number},
#define AS_STREAM(NAME, number, name, says) {LAYER, name, says, number},

static const memtrace_kind kinds[] = {
#define LAYER "alloc"
    FCDP_ALLOC_EVENTS(AS_KIND)
#undef LAYER
#define LAYER "tiering"
        FCDP_TIERING_EVENTS(AS_KIND)
#undef LAYER
#define LAYER "comm"
            FCDP_COMM_EVENTS(AS_KIND)
#undef LAYER
#define LAYER "torch_plugin"
                FCDP_PLUGIN_EVENTS(AS_KIND)
#undef LAYER
};
static const memtrace_cause causes[] = {
#define LAYER "alloc"
    FCDP_ALLOC_CAUSES(AS_CAUSE)
#undef LAYER
#define LAYER "tiering"
        FCDP_TIERING_CAUSES(AS_CAUSE)
#undef LAYER
#define LAYER "comm"
            FCDP_COMM_CAUSES(AS_CAUSE)
#undef LAYER
#define LAYER "torch_plugin"
                FCDP_PLUGIN_CAUSES(AS_CAUSE)
#undef LAYER
};
static const memtrace_counter counters[] = {
#define LAYER "alloc"
    FCDP_ALLOC_COUNTERS(AS_COUNTER)
#undef LAYER
#define LAYER "tiering"
        FCDP_TIERING_COUNTERS(AS_COUNTER)
#undef LAYER
#define LAYER "comm"
            FCDP_COMM_COUNTERS(AS_COUNTER)
#undef LAYER
#define LAYER "torch_plugin"
                FCDP_PLUGIN_COUNTERS(AS_COUNTER)
#undef LAYER
};
static const memtrace_stream streams[] = {
#define LAYER "alloc"
    FCDP_ALLOC_STREAMS(AS_STREAM)
#undef LAYER
#define LAYER "tiering"
        FCDP_TIERING_STREAMS(AS_STREAM)
#undef LAYER
#define LAYER "comm"
            FCDP_COMM_STREAMS(AS_STREAM)
#undef LAYER
#define LAYER "torch_plugin"
                FCDP_PLUGIN_STREAMS(AS_STREAM)
#undef LAYER
};

/* The two functions of each table. */
#define TABLE(type, rows, all, of)                                                                           \
    const type *all(size_t *n_out) {                                                                         \
        *n_out = sizeof rows / sizeof *rows;                                                                 \
        return rows;                                                                                         \
    }                                                                                                        \
    const type *of(uint32_t number) {                                                                        \
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)                                              \
            if (rows[i].number == number) return &rows[i];                                                   \
        return NULL;                                                                                         \
    }

TABLE(memtrace_kind, kinds, memtrace_kinds, memtrace_kind_of)
TABLE(memtrace_cause, causes, memtrace_causes, memtrace_cause_of)
TABLE(memtrace_counter, counters, memtrace_counters, memtrace_counter_of)
TABLE(memtrace_stream, streams, memtrace_streams, memtrace_stream_of)
