/* mover.c - queue copies, wait for their event. Knows neither regions nor what the bytes mean. */
#include "tiering/mover.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

enum { N_IDLE_EVENTS = 8 };

struct fcdp_mover {
    fcdp_driver *drv;
    fcdp_stream streams[FCDP_N_DIRECTIONS];
    _Atomic uint64_t bytes[FCDP_N_DIRECTIONS];
    fcdp_lock lock; /* FCDP_RANK_HOST: the idle events */
    fcdp_event idle[N_IDLE_EVENTS];
    size_t n_idle;
};

fcdp_status fcdp__mover_create(fcdp_driver *drv, fcdp_mover **mover_out) {
    fcdp_mover *mover = calloc(1, sizeof *mover);
    if (!mover) return fcdp__fail(FCDP_ERR_SYSTEM, "mover: no memory");
    mover->drv = drv;
    fcdp__lock_init(&mover->lock, FCDP_RANK_HOST);
    for (int d = 0; d < FCDP_N_DIRECTIONS; d++) {
        fcdp_status status = fcdp__driver_stream_create(drv, &mover->streams[d]);
        if (status) {
            mover->streams[d] = NULL;
            fcdp__mover_destroy(mover);
            return status;
        }
    }
    *mover_out = mover;
    return FCDP_OK;
}

void fcdp__mover_destroy(fcdp_mover *mover) {
    if (!mover) return;
    while (mover->n_idle) fcdp__driver_event_destroy(mover->drv, mover->idle[--mover->n_idle]);
    for (int d = 0; d < FCDP_N_DIRECTIONS; d++)
        if (mover->streams[d]) fcdp__driver_stream_destroy(mover->drv, mover->streams[d]);
    fcdp__lock_destroy(&mover->lock);
    free(mover);
}

static fcdp_status event_take(fcdp_mover *mover, fcdp_event *event_out) {
    fcdp_event event = NULL;
    fcdp__lock_acquire(&mover->lock);
    if (mover->n_idle) event = mover->idle[--mover->n_idle];
    fcdp__lock_release(&mover->lock);
    if (!event) return fcdp__driver_event_create(mover->drv, event_out);
    *event_out = event;
    return FCDP_OK;
}

static void event_give(fcdp_mover *mover, fcdp_event event) {
    fcdp__lock_acquire(&mover->lock);
    bool kept = mover->n_idle < N_IDLE_EVENTS;
    if (kept) mover->idle[mover->n_idle++] = event;
    fcdp__lock_release(&mover->lock);
    if (!kept) fcdp__driver_event_destroy(mover->drv, event);
}

static fcdp_status copy_queue(fcdp_mover *mover, fcdp_direction direction, const fcdp_copy *copy) {
    fcdp_stream stream = mover->streams[direction];
    if (!copy->bytes) return FCDP_OK;
    if (direction == FCDP_TO_HOST)
        return fcdp__driver_copy_d2h(mover->drv, copy->host, copy->device, copy->bytes, stream);
    return fcdp__driver_copy_h2d(mover->drv, copy->device, copy->host, copy->bytes, stream);
}

static fcdp_status run_queue(fcdp_mover *mover, fcdp_direction direction, const fcdp_copy *copies,
                             size_t n_copies, const fcdp_event *after, size_t n_after, fcdp_event done) {
    fcdp_status status = FCDP_OK;
    fcdp_stream stream = mover->streams[direction];
    for (size_t i = 0; i < n_after && !status; i++)
        status = fcdp__driver_stream_wait(mover->drv, stream, after[i]);
    for (size_t i = 0; i < n_copies && !status; i++) status = copy_queue(mover, direction, &copies[i]);
    if (!status) status = fcdp__driver_event_record(mover->drv, done, stream);
    if (!status) status = fcdp__driver_event_sync(mover->drv, done);
    return status;
}

/* After a failed run: what was queued before the failure must not land in memory that its owner has since reused. */
static fcdp_status run_drain(fcdp_mover *mover, fcdp_direction direction, fcdp_status status) {
    char first[512];
    snprintf(first, sizeof first, "%s", fcdp_error_text());
    fcdp_status drained = fcdp__driver_stream_sync(mover->drv, mover->streams[direction]);
    if (drained) drained = fcdp__driver_stream_sync(mover->drv, mover->streams[direction]);
    if (drained) fcdp__log(FCDP_LOG_WARN, "a copy stream cannot be waited for: %s", fcdp_error_text());
    return fcdp__fail(status, "%s", first);
}

fcdp_status fcdp__mover_run(fcdp_mover *mover, fcdp_direction direction, const fcdp_copy *copies,
                            size_t n_copies, const fcdp_event *after, size_t n_after) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < n_copies; i++) bytes += copies[i].bytes;
    if (!bytes) return FCDP_OK;
    fcdp_event done;
    fcdp_status status = event_take(mover, &done);
    if (status) return status;
    status = run_queue(mover, direction, copies, n_copies, after, n_after, done);
    if (status) status = run_drain(mover, direction, status);
    event_give(mover, done);
    if (!status) atomic_fetch_add_explicit(&mover->bytes[direction], bytes, memory_order_relaxed);
    return status;
}

uint64_t fcdp__mover_bytes(const fcdp_mover *mover, fcdp_direction direction) {
    return atomic_load_explicit(&mover->bytes[direction], memory_order_relaxed);
}
