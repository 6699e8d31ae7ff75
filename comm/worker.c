/* worker.c - the queue and its thread. */
#include "comm/worker.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

struct fcdp_worker {
    pthread_t thread;
    fcdp_lock lock;
    pthread_cond_t changed; /* broadcast: something was queued, something is done, stop */
    /* guarded by lock */
    fcdp_work *first, *last; /* queued */
    fcdp_work *waited;       /* every work with `waited` from submission until fcdp__worker_wait */
    uint64_t n_submitted, n_done;
    bool stop;
};

static fcdp_work *queue_pop(fcdp_worker *worker) {
    fcdp_work *work = worker->first;
    worker->first = work->next;
    if (!worker->first) worker->last = NULL;
    return work;
}

static void work_execute(fcdp_worker *worker, fcdp_work *work) {
    fcdp_status status = work->run(work);
    char *text = status ? strdup(fcdp_error_text()) : NULL;
    bool waited = work->waited;
    if (!waited) {
        free(text);
        work->dispose(work);
    }
    fcdp__lock_acquire(&worker->lock);
    if (waited) {
        work->status = status;
        work->text = text;
        work->done = true;
    }
    worker->n_done++;
    pthread_cond_broadcast(&worker->changed);
    fcdp__lock_release(&worker->lock);
}

static _Thread_local bool is_current;

bool fcdp__worker_is_current(void) {
    return is_current;
}

static void *worker_main(void *arg) {
    fcdp_worker *worker = arg;
    is_current = true;
    for (;;) {
        fcdp__lock_acquire(&worker->lock);
        while (!worker->first && !worker->stop) fcdp__lock_wait(&worker->lock, &worker->changed);
        fcdp_work *work = worker->first ? queue_pop(worker) : NULL;
        fcdp__lock_release(&worker->lock);
        if (!work) return NULL;
        work_execute(worker, work);
    }
}

static int thread_start(fcdp_worker *worker, const char *name) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all,
                    &before); /* the new thread inherits the mask: signals go to the program's own */
    int error = pthread_create(&worker->thread, NULL, worker_main, worker);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!error) pthread_setname_np(worker->thread, name);
    return error;
}

fcdp_status fcdp__worker_create(const char *name, fcdp_worker **worker_out) {
    fcdp_worker *worker = calloc(1, sizeof *worker);
    if (!worker) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for the worker");
    fcdp__lock_init(&worker->lock, FCDP_RANK_ENGINE);
    pthread_cond_init(&worker->changed, NULL);
    int error = thread_start(worker, name);
    if (error) {
        pthread_cond_destroy(&worker->changed);
        fcdp__lock_destroy(&worker->lock);
        free(worker);
        return fcdp__fail(FCDP_ERR_SYSTEM, "cannot start the thread '%s': %s", name, strerror(error));
    }
    *worker_out = worker;
    return FCDP_OK;
}

void fcdp__worker_destroy(fcdp_worker *worker) {
    if (!worker) return;
    fcdp__lock_acquire(&worker->lock);
    worker->stop = true;
    pthread_cond_broadcast(&worker->changed);
    fcdp__lock_release(&worker->lock);
    pthread_join(worker->thread, NULL);
    while (worker->waited) {
        fcdp_work *work = worker->waited;
        worker->waited = work->next_waited;
        free(work->text);
        work->dispose(work);
    }
    pthread_cond_destroy(&worker->changed);
    fcdp__lock_destroy(&worker->lock);
    free(worker);
}

uint64_t fcdp__worker_submit(fcdp_worker *worker, fcdp_work *work) {
    work->next = NULL;
    work->done = false;
    fcdp__lock_acquire(&worker->lock);
    if (worker->last)
        worker->last->next = work;
    else
        worker->first = work;
    worker->last = work;
    if (work->waited) {
        work->next_waited = worker->waited;
        worker->waited = work;
    }
    uint64_t ticket = ++worker->n_submitted;
    pthread_cond_broadcast(&worker->changed);
    fcdp__lock_release(&worker->lock);
    return ticket;
}

uint64_t fcdp__worker_ticket(fcdp_worker *worker) {
    fcdp__lock_acquire(&worker->lock);
    uint64_t ticket = worker->n_submitted;
    fcdp__lock_release(&worker->lock);
    return ticket;
}

void fcdp__worker_wait_ticket(fcdp_worker *worker, uint64_t ticket) {
    fcdp__lock_acquire(&worker->lock);
    while (worker->n_done < ticket) fcdp__lock_wait(&worker->lock, &worker->changed);
    fcdp__lock_release(&worker->lock);
}

fcdp_status fcdp__worker_wait(fcdp_worker *worker, fcdp_work *work) {
    FCDP_CHECK(1, work->waited);
    fcdp__lock_acquire(&worker->lock);
    while (!work->done) fcdp__lock_wait(&worker->lock, &worker->changed);
    fcdp_work **link = &worker->waited;
    while (*link != work) link = &(*link)->next_waited;
    *link = work->next_waited;
    fcdp__lock_release(&worker->lock);

    fcdp_status status = work->status;
    if (status)
        status = fcdp__fail(status, "%s", work->text ? work->text : "no memory for the text of the failure");
    free(work->text);
    work->text = NULL;
    return status;
}

void fcdp__worker_drain(fcdp_worker *worker) {
    fcdp__lock_acquire(&worker->lock);
    while (worker->n_done < worker->n_submitted) fcdp__lock_wait(&worker->lock, &worker->changed);
    fcdp__lock_release(&worker->lock);
}
