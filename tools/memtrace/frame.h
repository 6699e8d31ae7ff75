/* frame.h - what `top` shows at one time, of one job: numbers that are ready to be drawn.
 *
 * A frame is of one rank, or of all ranks of the job that are on this machine: then bytes are their sums.
 * Rates are of the query's window before, and of two steps where they take at most half a minute; waits
 * per step are of as many steps as that had, at least four where there were as many.
 */
#ifndef MEMTRACE_FRAME_H
#define MEMTRACE_FRAME_H

#include "tools/memtrace/model.h"

typedef struct memtrace_query {
    int pid;            /* of any process of the job; 0: the job that began last, running ones first */
    int rank_pid;       /* of the one process to show; 0: all */
    uint64_t at_ns;     /* CLOCK_MONOTONIC; UINT64_MAX: now */
    bool at_peak;       /* instead: when each process held the most device memory */
    uint64_t window_ns; /* over which rates are taken */
} memtrace_query;

typedef struct memtrace_live_row {
    const char *name; /* the model's, until its next poll */
    uint64_t bytes, device_bytes, host_bytes, file_bytes;
    uint32_t state; /* FCDP_OBJECT_..., of any rank */
    uint32_t lives; /* FCDP_LIVES_..., too */
    uint32_t n_ranks, n_evictions;
    double moved_per_s[MEMTRACE_N_LINKS];
} memtrace_live_row;

typedef struct memtrace_live_rank {
    const memtrace_live_process *process;
    const memtrace_sample *sample;                     /* at the frame's time */
    double step_ns;                                    /* from step to step; 0: not known */
    double waited_ns[MEMTRACE_N_WAITS], all_waited_ns; /* per step, of: */
    uint32_t n_waited_steps;                           /* 0: so far */
} memtrace_live_rank;

typedef struct memtrace_shown_note {
    const memtrace_live_note *note;
    int rank;
    const char *name; /* of the region; NULL: of none */
} memtrace_shown_note;

typedef struct memtrace_frame {
    uint64_t at_ns, now_ns;        /* the frame's time; that of the last poll */
    uint64_t oldest_ns, newest_ns; /* the job's history */
    size_t n_jobs, job;            /* jobs that the model knows; the place of this one, by their beginning */
    size_t n_running, n_ended, n_killed;
    memtrace_live_rank *ranks; /* of the whole job, by rank; those of a query's rank_pid alone are summed */
    size_t n_ranks;
    size_t worst;   /* in `ranks`: the one that waits the most per step */
    size_t fullest; /* in `ranks`, of those shown: the one that has used the largest share of its budget */
    double moved_per_s[MEMTRACE_N_LINKS];
    uint64_t plain_bytes, gather_bytes; /* sent between nodes so far: by plain FSDP2, by FCDP; sums */
    uint64_t n_lost, n_dropped;
    memtrace_live_row *rows; /* in the order of their creation */
    size_t n_rows;
    memtrace_shown_note *notes; /* newest first */
    size_t n_notes;
} memtrace_frame;

/* NULL: the model has no such job, or no memory. */
memtrace_frame *memtrace_frame_create(const memtrace_model *model, const memtrace_query *query);
void memtrace_frame_destroy(memtrace_frame *frame); /* NULL: nothing */

#endif
