/* recorder.h - writes the events of live processes to a file.
 *
 * It reads what the processes write anyway, and never makes one wait. Each process's ring is emptied faster
 * than it comes round; what it missed all the same is counted. A process that is killed is read to its last
 * event, as its segment stays mapped. One thread at a time. */
#ifndef MEMTRACE_RECORDER_H
#define MEMTRACE_RECORDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "tools/memtrace/error.h"

typedef struct memtrace_recorder memtrace_recorder;

typedef struct memtrace_progress {
    size_t n_processes, n_live; /* recorded so far; of those, not gone yet */
    size_t n_ancestors;         /* that are there, and may start more */
    uint64_t n_events, n_lost;  /* n_lost: overwritten before they were read */
    uint64_t n_bytes;           /* of the file */
    uint32_t step;              /* the last one of any process */
} memtrace_progress;

typedef struct memtrace_targets {
    const pid_t *pids, *ancestors;
    size_t n_pids, n_ancestors;
} memtrace_targets;
/* Records the processes `pids` from now on, with what their rings hold from before; and each of `ancestors`
 * and every process that descends from it, once it has a segment. Fails where one of `pids` cannot be
 * recorded. What becomes of a file at `path`: memtrace_writer_create. */
bool memtrace_recorder_create(const char *path, bool replaces, const memtrace_targets *targets,
                              memtrace_recorder **recorder_out, memtrace_error *error);
/* Waits for at most timeout_ms, less where a process ends or a signal comes; then looks for new processes,
 * and writes what is new. False: the file cannot be written any more. */
bool memtrace_recorder_poll(memtrace_recorder *recorder, int timeout_ms, memtrace_progress *progress_out,
                            memtrace_error *error);
/* Writes the rest and the index, and frees the recorder in any case. */
bool memtrace_recorder_close(memtrace_recorder *recorder, memtrace_progress *progress_out,
                             memtrace_error *error);

/* From a thread of its own, from here until stop, which waits for the thread and closes the recorder. A start
 * that fails closes it too. */
typedef struct memtrace_recording memtrace_recording;
bool memtrace_recording_start(memtrace_recorder *recorder, memtrace_recording **recording_out,
                              memtrace_error *error);
bool memtrace_recording_stop(memtrace_recording *recording, memtrace_progress *progress_out,
                             memtrace_error *error);

#endif
