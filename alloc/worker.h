/* worker.h - a thread that does what streams have for the host to do, in the order in which it was enqueued.
 *
 * CUDA may run the host functions of all streams one after another, so one that computes for long, or waits
 * for a peer, holds up all others, and two that wait in a circle hang (cuLaunchHostFunc's text says "may be
 * serialized"). Here a host function only says that a job's turn has come on its stream, and the stream waits
 * for a word that the worker stores:
 *
 *     the word = the number up to which all jobs are done
 *
 * Where the driver has no calls that wait for words, jobs are host functions, and fcdp__worker_job_end does
 * nothing. One thread at a time launches on a worker.
 */
#ifndef FCDP_WORKER_H
#define FCDP_WORKER_H

#include "alloc/driver.h"

typedef struct fcdp_worker fcdp_worker;

/* The caller's, zeroed at first; at one place from its launch to fcdp__worker_job_end. */
typedef struct fcdp_worker_job {
    fcdp_worker *worker; /* NULL: it was not launched, or is a host function */
    fcdp_host_function function;
    void *context;
    struct fcdp_worker_job *next; /* from here on guarded by the worker's mutex */
    uint64_t from_ns;             /* the simulated device's time at which its stream came to it */
    uint32_t number;
    bool is_queued, is_posted, runs;
} fcdp_worker_job;

/* `name`: the thread's, up to 15 bytes. */
fcdp_status fcdp__worker_create(fcdp_driver *drv, const char *name, fcdp_worker **worker_out) FCDP_MUST_CHECK;
/* No job is left, and all streams on which one was launched have ended or been waited for. NULL: nothing. */
void fcdp__worker_destroy(fcdp_worker *worker);

/* `function(context)` runs in the stream's order, and behind all jobs launched before it. So none of those
 * may wait for anything that comes behind this one. As a host function it must not call the driver, and does
 * not run once the device has failed. After an error it may run, now or later, and no stream waits for it. */
fcdp_status fcdp__worker_launch(fcdp_worker *worker, fcdp_stream stream, fcdp_host_function function,
                                void *context, fcdp_worker_job *job) FCDP_MUST_CHECK;
/* From here on the job neither runs nor is used by the worker. If it runs, this waits for its end; if its
 * stream has not come to it, it never runs, and the stream goes on. A host function of the stream's may still
 * use the job's memory, unless the stream has ended or been waited for. */
void fcdp__worker_job_end(fcdp_worker_job *job);
/* Waits for the jobs to which their streams have come. */
void fcdp__worker_drain(fcdp_worker *worker);

#endif
