/* worker.c - jobs that streams wait for, done by a thread of FCDP's own (worker.h).
 *
 * A job is in the queue from its launch until it has run, in the order of launches: not of the streams that
 * come to them, which may differ. Only the first may run.
 */
#include "alloc/worker.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "alloc/pinned.h"

struct fcdp_worker {
    fcdp_driver *drv;
    pthread_t thread;
    fcdp_pinned memory; /* the word; none: jobs are host functions, and there is no thread */
    fcdp_dptr word_at;  /* as the device sees it */
    pthread_mutex_t mutex;
    pthread_cond_t changed; /* the first job is another one, or its stream has come to it, or it is done */
    /* guarded by the mutex */
    fcdp_worker_job *first, *last;
    uint32_t n_launched, n_done; /* n_done: the word, or what the thread is about to store there */
    bool stops;
};

/* ---- the queue; with the mutex ---- */

static void job_remove(fcdp_worker *worker, fcdp_worker_job *job) {
    fcdp_worker_job **link = &worker->first, *before = NULL;
    for (; *link != job; link = &before->next) before = *link;
    *link = job->next;
    if (worker->last == job) worker->last = before;
    job->is_queued = job->runs = false;
    pthread_cond_broadcast(&worker->changed);
}

/* Once the jobs before `next` are done; NULL: all. */
static uint32_t done_before(const fcdp_worker *worker, const fcdp_worker_job *next) {
    return next ? next->number - 1 : worker->n_launched;
}

static void word_set(const fcdp_worker *worker, uint32_t n_done) {
    fcdp__driver_word_store(worker->drv, (uint32_t *)(void *)worker->memory.at, n_done);
}

static void word_raise(fcdp_worker *worker) {
    uint32_t n_done = done_before(worker, worker->first);
    if (n_done == worker->n_done) return;
    worker->n_done = n_done;
    word_set(worker, n_done);
}

/* ---- the thread ---- */

/* The simulated driver stores the word at the job's modelled end, so the thread does that without the mutex.
 * Jobs that end meanwhile are no longer there to be waited for. */
static void *worker_main(void *arg) {
    fcdp_worker *worker = arg;
    pthread_mutex_lock(&worker->mutex);
    while (!worker->stops) {
        fcdp_worker_job *job = worker->first;
        if (!job || !job->is_posted) {
            pthread_cond_wait(&worker->changed, &worker->mutex);
            continue;
        }
        job->runs = true;
        pthread_mutex_unlock(&worker->mutex);
        fcdp__driver_work_begin(worker->drv, job->from_ns);
        job->function(job->context);
        pthread_mutex_lock(&worker->mutex);
        uint32_t n_done = worker->n_done = done_before(worker, job->next);
        pthread_mutex_unlock(&worker->mutex);
        word_set(worker, n_done);
        pthread_mutex_lock(&worker->mutex);
        job_remove(worker, job);
        word_raise(worker);
    }
    pthread_mutex_unlock(&worker->mutex);
    return NULL;
}

/* A host function, so it is short. */
static void job_post(void *context) {
    fcdp_worker_job *job = context;
    fcdp_worker *worker = job->worker;
    pthread_mutex_lock(&worker->mutex);
    job->from_ns = fcdp__driver_work_hand(worker->drv);
    job->is_posted = true;
    pthread_cond_broadcast(&worker->changed);
    pthread_mutex_unlock(&worker->mutex);
}

/* ---- for the caller ---- */

fcdp_status fcdp__worker_launch(fcdp_worker *worker, fcdp_stream stream, fcdp_host_function function,
                                void *context, fcdp_worker_job *job) {
    if (!worker->memory.at) return fcdp__driver_host_function(worker->drv, stream, function, context);
    *job = (fcdp_worker_job){.worker = worker, .function = function, .context = context, .is_queued = true};
    pthread_mutex_lock(&worker->mutex);
    uint32_t number = job->number = ++worker->n_launched;
    *(worker->first ? &worker->last->next : &worker->first) = job;
    worker->last = job;
    pthread_mutex_unlock(&worker->mutex);
    fcdp_status status = fcdp__driver_host_function(worker->drv, stream, job_post, job);
    if (!status) return fcdp__driver_wait_value32(worker->drv, stream, worker->word_at, number);
    fcdp__worker_job_end(job);
    return status;
}

void fcdp__worker_job_end(fcdp_worker_job *job) {
    fcdp_worker *worker = job->worker;
    if (!worker) return;
    pthread_mutex_lock(&worker->mutex);
    while (job->runs) pthread_cond_wait(&worker->changed, &worker->mutex);
    if (job->is_queued) {
        bool is_next = worker->first == job;
        job_remove(worker, job);
        if (is_next) word_raise(worker);
    }
    pthread_mutex_unlock(&worker->mutex);
}

void fcdp__worker_drain(fcdp_worker *worker) {
    if (!worker) return;
    pthread_mutex_lock(&worker->mutex);
    while (worker->first && worker->first->is_posted) pthread_cond_wait(&worker->changed, &worker->mutex);
    pthread_mutex_unlock(&worker->mutex);
}

/* ---- making and ending ---- */

static void worker_free(fcdp_worker *worker) {
    if (fcdp__pinned_destroy(worker->drv, &worker->memory))
        fcdp__log(FCDP_LOG_DEBUG, "%s", fcdp_error_text());
    pthread_cond_destroy(&worker->changed);
    pthread_mutex_destroy(&worker->mutex);
    free(worker);
}

static fcdp_status worker_start(fcdp_worker *worker, const char *name) {
    fcdp_status status = fcdp__pinned_create(worker->drv, sizeof(uint32_t), "a word", &worker->memory);
    if (!status) status = fcdp__driver_host_dptr(worker->drv, worker->memory.at, &worker->word_at);
    if (status) return status;
    int error = fcdp__thread_start(worker_main, worker, &worker->thread);
    if (error) return fcdp__fail(FCDP_ERR_SYSTEM, "cannot start the thread %s: %s", name, strerror(error));
    pthread_setname_np(worker->thread, name);
    return FCDP_OK;
}

fcdp_status fcdp__worker_create(fcdp_driver *drv, const char *name, fcdp_worker **worker_out) {
    fcdp_worker *worker = calloc(1, sizeof *worker);
    if (!worker) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for the thread %s", name);
    worker->drv = drv;
    pthread_mutex_init(&worker->mutex, NULL);
    pthread_cond_init(&worker->changed, NULL);
    fcdp_status status = fcdp__driver_has_values(drv) ? worker_start(worker, name) : FCDP_OK;
    if (status) {
        fcdp_failure error = fcdp__failure_keep(status);
        worker_free(worker);
        return fcdp__failure_restore(&error);
    }
    *worker_out = worker;
    return FCDP_OK;
}

void fcdp__worker_destroy(fcdp_worker *worker) {
    if (!worker) return;
    if (worker->memory.at) {
        pthread_mutex_lock(&worker->mutex);
        FCDP_CHECK(1, !worker->first);
        worker->stops = true;
        pthread_cond_broadcast(&worker->changed);
        pthread_mutex_unlock(&worker->mutex);
        pthread_join(worker->thread, NULL);
    }
    worker_free(worker);
}
