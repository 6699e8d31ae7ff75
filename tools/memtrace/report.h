/* report.h - the sums of a trace: per step, per region, per process, and its longest waits.
 *
 * Sums are over all processes. They lack lost events, while a process's counters include them. */
#ifndef MEMTRACE_REPORT_H
#define MEMTRACE_REPORT_H

#include "tools/memtrace/reader.h"

/* Of the events of a step, a region, or all. */
typedef struct memtrace_sums {
    uint64_t n_gathers, n_restores, n_stores, n_loads, n_evictions;
    uint64_t n_hits, n_made;                                 /* uses that crossed no nodes, and that did */
    uint64_t n_stale;                                        /* times that the ranks agreed it was */
    uint64_t inter_bytes, intra_bytes, h2d_bytes, d2h_bytes; /* sent by the ranks; copied */
    uint64_t moved_ns;     /* gathers, restores, stores and loads, on their streams */
    uint64_t stall_ns;     /* the compute stream waited for a region */
    uint64_t host_wait_ns; /* a thread of the program waited, for any cause */
    uint64_t exposed_ns;   /* of both, waits for moves and for pages */
    uint64_t n_waits;      /* of both */
} memtrace_sums;
/* The part of the moves during which nothing waited. */
uint64_t memtrace_hidden_ns(const memtrace_sums *sums);

typedef struct memtrace_step {
    uint32_t step;
    uint32_t n_timed; /* processes that recorded both its begin and its end */
    uint64_t span_ns; /* the sum of theirs */
    bool is_compared; /* it is one of n_compared */
    memtrace_sums sums;
} memtrace_step;

enum { MEMTRACE_N_CAUSES = 256, MEMTRACE_N_STALLS = 10 };
typedef struct memtrace_region {
    const char *name;                       /* the file's */
    uint64_t bytes;                         /* its size, 0: not known */
    memtrace_sums sums, compared;           /* of all steps; of those that are compared */
    uint32_t n_by_cause[MEMTRACE_N_CAUSES]; /* of STALE and EVICT */
} memtrace_region;

/* Why a wait took as long: what was under way, and what could be changed. X(NAME, "what happened", "option",
 * "advice") */
#define MEMTRACE_REASONS(X)                                                                                  \
    X(UNKNOWN, "nothing of the region was under way that the trace knows of", "", "")                        \
    X(GATHER_LATE, "its gather between nodes began only when it was needed", "FCDP_PREFETCH",                \
      "a larger one gathers more groups ahead of their use")                                                 \
    X(GATHER_LONG, "its gather between nodes had begun ahead, and was not done", "FCDP_PREFETCH",            \
      "a larger one begins earlier; where the link is busy all the time, only a faster one helps")           \
    X(GATHER_SMALL, "small groups crossed the nodes one by one", "FCDP_COALESCE",                            \
      "a larger one sends more of them together")                                                            \
    X(GATHER_AGAIN, "it crossed the nodes in backward, as the host had no room to keep it",                  \
      "FCDP_HOST_BUDGET", "a larger one keeps it on the host")                                               \
    X(LOAD, "it came back from the host", "FCDP_TAU",                                                        \
      "a larger one keeps more groups on the device between forward and backward")                           \
    X(LOAD_EVICTED, "it came back from the host, after it was evicted for lack of device memory",            \
      "FCDP_DEVICE_BUDGET", "a larger one evicts less")                                                      \
    X(RESTORE, "the node's ranks sent each other their slices of it", "FCDP_TAU",                            \
      "a larger one keeps more groups on the device between forward and backward")                           \
    X(MEMORY, "device pages lacked", "FCDP_DEVICE_BUDGET",                                                   \
      "a larger one; or a smaller FCDP_PREFETCH or FCDP_TAU, which ask for fewer pages at once")             \
    X(AGREEMENT, "other ranks came later to the agreement on what is stale", "FCDP_AGREE",                   \
      "forward asks once per pass; else see what the slowest rank does")                                     \
    X(FINGERPRINT, "the device compared parameters by content", "FCDP_FINGERPRINT",                          \
      "never trusts version counters and the optimizer's hook alone")                                        \
    X(COMPUTE, "the tensors are the host's, so that it waits where a GPU's stream would", "FCDP_PREFETCH",   \
      "a larger one gathers more groups ahead of their use")                                                 \
    X(WRITES, "an optimizer would have written what a gather still read", "FCDP_PREFETCH",                   \
      "a smaller one leaves fewer gathers under way at the step")                                            \
    X(OTHERS, "its own moves took a small part of that: they began late, or waited for other ranks", "",     \
      "see what the slowest rank does at the time")                                                          \
    X(END, "the device had to finish before the program went on", "", "")
#define MEMTRACE_AS_REASON(NAME, ...) MEMTRACE_BECAUSE_##NAME,
typedef enum memtrace_reason { MEMTRACE_REASONS(MEMTRACE_AS_REASON) MEMTRACE_N_REASONS } memtrace_reason;

typedef struct memtrace_stall {
    fcdp_trace_event event; /* STALL or HOST_WAIT; stamp is its number */
    size_t process, chunk;
    const char *region; /* the file's; "": none */
    memtrace_reason reason;
    fcdp_trace_event move; /* what it waited for; kind 0: not known */
    uint64_t move_ns;      /* of the wait, while it was under way */
    bool was_evicted;      /* since the region was last used */
} memtrace_stall;
const char *memtrace_reason_says(memtrace_reason reason);
const char *memtrace_reason_option(memtrace_reason reason); /* "": none would help */
const char *memtrace_reason_advice(memtrace_reason reason);

typedef struct memtrace_report {
    memtrace_sums total;
    memtrace_step *steps; /* by step */
    size_t n_steps, n_compared;
    memtrace_region *regions; /* in the order of their first event */
    size_t n_regions;
    memtrace_stall stalls[MEMTRACE_N_STALLS]; /* the longest first */
    size_t n_stalls;
    uint64_t n_by_cause[MEMTRACE_N_CAUSES];  /* of HOST_WAIT */
    uint64_t ns_by_cause[MEMTRACE_N_CAUSES]; /* the same's time */
    uint64_t n_by_kind[65536];
    uint64_t *peaks; /* by process: the most device memory that its holders had at once */
} memtrace_report;

enum { MEMTRACE_COMPARE_NONE = UINT32_MAX };
/* Reads all events, twice; once more where steps are to be compared. Those are the steps from first_compared
 * on that as many processes timed as timed any of them. NULL: no memory. */
memtrace_report *memtrace_report_create(memtrace_file *file, uint32_t first_compared);
void memtrace_report_destroy(memtrace_report *report);

#endif
