/* model.h - the jobs of this machine over the last minutes: whose processes they are, and a history of
 * each.
 *
 * A poll reads every process (follow.h) and keeps a sample of each. What a frame (frame.h) shows is made
 * of samples, of the present or of an earlier time. The oldest samples go when all of them would take
 * more than the model may:
 *
 *     sum over processes and samples of sample_bytes <= history_bytes, or each process has one
 *
 * A process that is gone keeps its last sample and its history. One thread.
 */
#ifndef MEMTRACE_MODEL_H
#define MEMTRACE_MODEL_H

#include "tools/memtrace/follow.h"

typedef enum memtrace_fate {
    MEMTRACE_RUNS,
    MEMTRACE_ENDED, /* it closed its trace */
    MEMTRACE_KILLED /* it is gone, and did not */
} memtrace_fate;

typedef struct memtrace_live_process {
    memtrace_segment segment;
    memtrace_follower *follower;
    memtrace_fate fate;
    uint32_t job;              /* the place in the model's list of the job's first process */
    memtrace_sample **samples; /* in the order of their times */
    size_t n_samples, n_room;
} memtrace_live_process;

typedef struct memtrace_model {
    memtrace_live_process **processes; /* in the order in which they were found */
    size_t n_processes, n_room;
    size_t history_bytes, sample_bytes; /* may be kept; are */
    uint64_t now_ns;                    /* of the last poll */
    memtrace_scan scan;                 /* the last */
} memtrace_model;

/* NULL: no memory. */
memtrace_model *memtrace_model_create(size_t history_bytes);
void memtrace_model_destroy(memtrace_model *model); /* NULL: nothing */

/* Follows process `pid` as well. False, with the reason, as from memtrace_attach. Nothing happens if it is
 * followed already. */
bool memtrace_model_attach(memtrace_model *model, pid_t pid, memtrace_error *error);
/* Attaches to all processes of this machine that can be, or to `ancestor` and what it has started;
 * returns how many are new. */
size_t memtrace_model_find(memtrace_model *model, pid_t ancestor);
/* The model owns the segment from here on, and detaches from it. For memtrace_model_attach, and tests. */
bool memtrace_model_add(memtrace_model *model, const memtrace_segment *segment);
/* Reads all of them; now_ns: CLOCK_MONOTONIC. */
void memtrace_model_poll(memtrace_model *model, uint64_t now_ns);

/* The last sample at or before `time_ns`, else the first. NULL: there is none. */
const memtrace_sample *memtrace_live_process_at(const memtrace_live_process *process, uint64_t time_ns);

#endif
