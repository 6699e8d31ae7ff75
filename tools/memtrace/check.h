/* check.h - does a trace keep the rules? Every transition of every region, every sum, and gates for a CI.
 *
 * The rules are what the layers promise (ARCHITECTURE.md). If events were lost, or the recording began late,
 * the state is unknown, and a rule that needs it is not checked until it is known again. */
#ifndef MEMTRACE_CHECK_H
#define MEMTRACE_CHECK_H

#include "tools/memtrace/reader.h"

/* X(NAME, "name", "the rule") */
#define MEMTRACE_RULES(X)                                                                                    \
    X(FILE, "file", "all of the file can be read")                                                           \
    X(NUMBERS, "numbers", "events' numbers increase, and those that are missing were counted as lost")       \
    X(TIMES, "times", "what one thread or stream does is written in the order of its times")                 \
    X(STEPS, "steps", "steps are counted one by one")                                                        \
    X(LIFE, "life", "a region is created once, and nothing happens to it before, or after its end")          \
    X(USE, "use", "a region's uses begin and end in turn")                                                   \
    X(SLOT, "slot", "a slot's pages serve one region at a time")                                             \
    X(KEPT, "kept", "only a region that is kept on the device, and not in use, is evicted")                  \
    X(STATE, "state",                                                                                        \
      "the bytes that a tier has of a region are at most its size; those on the device are in use or kept")  \
    X(STORE, "store", "only a region that was filled is stored")                                             \
    X(LOAD, "load", "only a region that the host had is loaded")                                             \
    X(HELD, "held", "what a holder has = what it had + taken - given")                                       \
    X(CREATED, "created",                                                                                    \
      "what a pool has created = what it had + created - released >= what its holders have")                 \
    X(COUNTERS, "counters", "counters that sum up do not fall, and in the end equal what the events say")    \
    X(RANKS, "ranks",                                                                                        \
      "the ranks of a shard group gather a region equally often in a step that an optimizer has ended")      \
    X(MAX_STALL, "max-stall", "no wait is longer than --max-stall")                                          \
    X(MAX_PEAK, "max-peak", "no process has more device memory than --max-peak")                             \
    X(MAX_INTER, "max-inter", "no rank sends more than --max-inter between nodes in a step")
#define MEMTRACE_AS_RULE(NAME, ...) MEMTRACE_RULE_##NAME,
typedef enum memtrace_rule { MEMTRACE_RULES(MEMTRACE_AS_RULE) MEMTRACE_N_RULES } memtrace_rule;
const char *memtrace_rule_name(memtrace_rule rule);
const char *memtrace_rule_says(memtrace_rule rule);

typedef struct memtrace_gates {
    uint64_t max_stall_ns, max_peak_bytes, max_inter_bytes; /* UINT64_MAX: any */
    uint32_t
        first_step; /* waits and bytes of earlier ones are not looked at: a job's first steps are others */
} memtrace_gates;

typedef struct memtrace_violation {
    memtrace_rule rule;
    bool has_event;
    size_t process, chunk;
    fcdp_trace_event event;
    char text[512]; /* the numbers */
} memtrace_violation;

typedef struct memtrace_checked {
    uint64_t n_events, n_lost;                              /* looked at; missing */
    uint64_t max_stall_ns, max_peak_bytes, max_inter_bytes; /* found, from first_step on */
    uint64_t n_by_rule[MEMTRACE_N_RULES];                   /* how often each was applied */
} memtrace_checked;

/* True: no rule is broken. Else the first violation, in the order of the file. */
bool memtrace_check(memtrace_file *file, const memtrace_gates *gates, memtrace_checked *checked_out,
                    memtrace_violation *violation_out);

#endif
