/* check_internal.h - what the parts of a check share. */
#ifndef MEMTRACE_CHECK_INTERNAL_H
#define MEMTRACE_CHECK_INTERNAL_H

#include "tools/memtrace/check.h"

enum {
    CHECK_N_POOLS = 16,
    CHECK_N_HOLDERS = 2,
    CHECK_N_THREADS = 4096,
    CHECK_N_PROBES = 64,
    CHECK_N_SLOTS = 4096
};

/* What is known of a region. Each part becomes known with the first event that says it. */
typedef struct check_region {
    bool is_known;  /* the rest holds */
    bool is_alive;  /* between REGION_CREATE and REGION_DESTROY */
    bool use_known; /* in_use, kept and slot hold */
    bool in_use, kept;
    uint32_t slot;      /* + 1, 0: none */
    bool content_known; /* was_filled and host_had hold */
    bool was_filled, host_had;
    uint64_t bytes;    /* its size, 0: not known */
    uint64_t ended_ns; /* when it was destroyed */
} check_region;

typedef struct check_thread {
    uint32_t thread;
    bool is_stream;
    uint32_t
        object; /* of streams: a region's operations are in order, those of others may be another stream's */
    uint64_t end_ns;
} check_thread;

typedef struct check_known { /* a number, once it is known */
    bool is_known;
    uint64_t value;
} check_known;

/* One process of the file. */
typedef struct check_process {
    bool has_begun, from_start, is_whole; /* an event was seen; event 0 was; none is missing */
    uint64_t next;                        /* the number that comes next */
    uint64_t n_missing;
    check_region *regions;                 /* FCDP_TRACE_N_OBJECTS */
    uint32_t slots[CHECK_N_SLOTS];         /* the region that has it, 0: none that is known */
    check_thread threads[CHECK_N_THREADS]; /* open addressing; what finds no room is not looked at */
    check_known held[CHECK_N_POOLS][CHECK_N_HOLDERS], created[CHECK_N_POOLS];
    check_known steps;               /* as the last STEP said */
    uint64_t held_bytes, peak_bytes; /* of all holders, as far as known */
    uint64_t inter_bytes;            /* sent in inter_step */
    uint32_t inter_step;
    uint64_t counters[FCDP_TRACE_N_COUNTERS]; /* of the last state */
    bool has_counters;
    uint64_t said[FCDP_TRACE_N_COUNTERS]; /* what the events say the counters are */
} check_process;

typedef struct check {
    memtrace_file *file;
    const memtrace_gates *gates;
    memtrace_checked *checked;
    memtrace_violation *violation;
    check_process *processes;
    size_t process, chunk; /* what is looked at */
    const fcdp_trace_event *event;
    bool is_broken;
} check;

/* One application of a rule: counts it, and where it does not hold reports the event at hand. Returns
 * `holds`. */
__attribute__((format(printf, 4, 5))) bool check_rule(check *c, memtrace_rule rule, bool holds,
                                                      const char *format, ...);

void check_event_of_region(check *c, check_process *p, const fcdp_trace_event *e);
void check_event_of_pool(check *c, check_process *p, const fcdp_trace_event *e);
/* Adds what the event says of counters. */
void check_count(check_process *p, const fcdp_trace_event *e);
/* A STATE or END chunk. */
void check_state(check *c, check_process *p, const memtrace_state *state, bool is_end);
/* Forget what is known, since events are missing. */
void check_forget(check_process *p);
/* Reads all events again. */
void check_ranks(check *c);

#endif
