/* series.h - a trace over time, in columns of equal width: where regions were, what crossed links, and the
 * memory of each holder. */
#ifndef MEMTRACE_SERIES_H
#define MEMTRACE_SERIES_H

#include "tools/memtrace/reader.h"

/* Where a region's bytes are, by what is fastest to reach. */
typedef enum memtrace_tier {
    MEMTRACE_UNKNOWN, /* no event has said it yet, or it does not exist */
    MEMTRACE_NOWHERE,
    MEMTRACE_IN_FILE,
    MEMTRACE_ON_HOST,
    MEMTRACE_MAPPED, /* host memory under its addresses (FCDP_HOST_MAP) */
    MEMTRACE_KEPT,   /* on the device between uses */
    MEMTRACE_IN_USE, /* on the device */
    MEMTRACE_N_TIERS
} memtrace_tier;
const char *memtrace_tier_name(memtrace_tier tier);
/* As a STATE event says, and as an object does. */
memtrace_tier memtrace_tier_of_event(const fcdp_trace_event *event);
memtrace_tier memtrace_tier_of_object(const fcdp_trace_object *object);

typedef enum memtrace_link {
    MEMTRACE_BETWEEN_NODES,
    MEMTRACE_WITHIN_NODE,
    MEMTRACE_TO_HOST,
    MEMTRACE_TO_DEVICE,
    MEMTRACE_N_LINKS
} memtrace_link;
const char *memtrace_link_name(memtrace_link link);
/* Bytes that the event moved over the link. */
uint64_t memtrace_link_bytes(const fcdp_trace_event *event, memtrace_link link);

enum { MEMTRACE_N_HOLDERS = 2, MEMTRACE_N_POOLS = 16 /* of device pages, per process */ };
/* PAGES_TAKE, PAGES_GIVE: what the holder had of the pool before. */
uint64_t memtrace_held_before(const fcdp_trace_event *event);
typedef struct memtrace_row {
    const char *name; /* the file's */
    uint32_t number;
    uint64_t bytes;
    uint8_t *tiers; /* n_columns: the fastest tier in each, memtrace_tier */
} memtrace_row;
/* Bytes that crossed links at a time of which only the begin is known: an event without a duration. They
 * have no rate, and are in no column of links. */
typedef struct memtrace_mark {
    uint64_t time_ns, bytes[MEMTRACE_N_LINKS];
    uint16_t kind;
} memtrace_mark;
typedef struct memtrace_series {
    uint64_t first_ns,
        last_ns; /* CLOCK_MONOTONIC; column i begins at first_ns + i (last_ns - first_ns) / n_columns */
    size_t n_columns;
    memtrace_row *rows; /* regions in the order in which they appeared */
    size_t n_rows;
    double *links[MEMTRACE_N_LINKS]; /* n_columns: bytes moved in each */
    double *waited;                  /* n_columns: ns in waits, of all threads and the compute stream */
    memtrace_mark *marks;            /* in the order of the file */
    size_t n_marks;
    uint64_t *held[MEMTRACE_N_HOLDERS]; /* n_columns: the most that each holder had, of all pools */
    uint64_t *steps_ns;                 /* when each STEP was */
    size_t n_steps;
} memtrace_series;

/* Of one process. NULL: no memory. */
memtrace_series *memtrace_series_create(memtrace_file *file, size_t process, size_t n_columns);
void memtrace_series_destroy(memtrace_series *series);

#endif
