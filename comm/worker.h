/* worker.h - one thread that runs works one at a time, in the order of submission. Knows nothing of what they
 * do.
 *
 * A work's owner embeds fcdp_work as its first member. A work that is waited for belongs to the waiter once
 * fcdp__worker_wait returns; one that nobody waits for is disposed of by the worker.
 *
 *     submitted = queued + running + done          drained: queued + running = 0
 */
#ifndef FCDP_WORKER_H
#define FCDP_WORKER_H

#include "alloc/fcdp.h"

typedef struct fcdp_worker fcdp_worker;
typedef struct fcdp_work fcdp_work;

struct fcdp_work {
    fcdp_status (*run)(fcdp_work *work); /* on the worker; a failure's text is that of the worker's thread */
    void (*dispose)(fcdp_work *work);
    bool waited; /* somebody will call fcdp__worker_wait, once */
    /* the worker's */
    fcdp_work *next, *next_waited;
    bool done;
    fcdp_status status;
    char *text;
};

/* The thread blocks all signals and bears `name` (at most 15 bytes). */
fcdp_status fcdp__worker_create(const char *name, fcdp_worker **worker_out) FCDP_MUST_CHECK;
/* Runs what is queued, ends the thread, disposes of works that were never waited for. */
void fcdp__worker_destroy(fcdp_worker *worker);
/* Its ticket: how many works have been submitted up to this one. */
uint64_t fcdp__worker_submit(fcdp_worker *worker, fcdp_work *work);
/* That of the last work submitted, 0: none yet. */
uint64_t fcdp__worker_ticket(fcdp_worker *worker);
/* Until the work of that ticket, and so all before it, are done. */
void fcdp__worker_wait_ticket(fcdp_worker *worker, uint64_t ticket);
/* Until `work` is done: its status, its text now the calling thread's. The work is the caller's again. */
fcdp_status fcdp__worker_wait(fcdp_worker *worker, fcdp_work *work) FCDP_MUST_CHECK;
/* Is the calling thread a worker's? Then it must not wait for one. */
bool fcdp__worker_is_current(void);
/* Until nothing is queued or running. */
void fcdp__worker_drain(fcdp_worker *worker);

#endif
