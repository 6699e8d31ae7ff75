/* monitor.c - a thread that looks at what is under way: failures that the transport has latched, peers
 * that died, operations that are late. It waits for nothing but its own clock, and never touches a region.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "comm/internal.h"

enum { PERIOD_NS = 100 * 1000 * 1000 };

struct fcdp_monitor {
    fcdp_engine *engine;
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed; /* on the monotonic clock */
    bool stops;             /* guarded by mutex */
};

/* Those that this rank shares a lane with: one of them it must be. */
static void peers_describe(const fcdp_topology *topology, char *text_out, size_t text_bytes) {
    size_t at = (size_t)snprintf(text_out, text_bytes, "one of");
    for (uint32_t rank = 0; rank < topology->n_ranks && at < text_bytes; rank++) {
        bool shares = rank / topology->node_size == topology->node ||
                      rank % topology->node_size == topology->local;
        if (!shares || rank == topology->rank) continue;
        int length = snprintf(text_out + at, text_bytes - at, "%s rank %u", at > strlen("one of") ? "," : "",
                              rank);
        at += length > 0 ? (size_t)length : 0;
    }
}

static fcdp_status late(const fcdp_group *group, uint64_t waited_ns) {
    const fcdp_transport *transport = &group->comm->transport;
    char who[256];
    if (!transport->missing || !transport->missing(transport->ctx, who, sizeof who))
        peers_describe(&group->comm->topology, who, sizeof who);
    return fcdp__fail(
        FCDP_ERR_TIMEOUT,
        "gathering '%s': its collectives have not ended after %.1f s (FCDP_TIMEOUT): %s did not come",
        group->name, (double)waited_ns / 1e9, who);
}

/* A region knows slices. */
static fcdp_status word_late(const fcdp_group *group, fcdp_status status) {
    const fcdp_topology *topology = &group->comm->topology;
    return fcdp__fail(status, "%s; slice 0 is rank %u", fcdp_error_text(), topology->rank - topology->local);
}

/* FCDP_OK: nothing is wrong with the group by now. With the engine's lock, under which no group dies. */
static fcdp_status group_look(fcdp_group *group) {
    uint64_t since_ns = atomic_load_explicit(&group->in_flight_ns, memory_order_relaxed),
             now_ns = fcdp__now_ns();
    const fcdp_engine *engine = group->comm->engine;
    if (!since_ns || now_ns <= since_ns) return FCDP_OK; /* it may have begun just now */
    fcdp_status status = fcdp__driver_event_query(engine->drv, fcdp__region_ready(group->region));
    if (!status) status = fcdp__driver_event_query(engine->drv, fcdp__region_stored(group->region));
    if (status != FCDP_PENDING) {
        /* It may have begun again meanwhile: then the time is another one. */
        atomic_compare_exchange_strong_explicit(&group->in_flight_ns, &since_ns, 0, memory_order_relaxed,
                                                memory_order_relaxed);
        return status;
    }
    status = fcdp__region_query_peers(group->region, now_ns - since_ns);
    if (status != FCDP_PENDING) return word_late(group, status);
    return (double)(now_ns - since_ns) < engine->options.timeout_s * 1e9 ? FCDP_OK
                                                                         : late(group, now_ns - since_ns);
}

static fcdp_status comm_look(fcdp_comm *comm) {
    fcdp_status status = fcdp_comm_check(comm);
    for (fcdp_group *group = comm->groups; group && !status; group = group->next) status = group_look(group);
    return status;
}

/* Those that fail are latched; those that have failed are opened again, since a call that was under way then
 * may have enqueued another wait. */
static void comms_look(fcdp_engine *engine) {
    fcdp__lock_acquire(&engine->lock);
    for (fcdp_comm *comm = engine->comms; comm; comm = comm->next) {
        fcdp_status status = comm_look(comm);
        if (status) fcdp__comm_fail_locked(comm, status);
    }
    fcdp__lock_release(&engine->lock);
}

static bool wait_a_period(fcdp_monitor *monitor) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += PERIOD_NS;
    if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
    pthread_mutex_lock(&monitor->mutex);
    while (!monitor->stops && pthread_cond_timedwait(&monitor->changed, &monitor->mutex, &until) != ETIMEDOUT)
        continue;
    bool goes_on = !monitor->stops;
    pthread_mutex_unlock(&monitor->mutex);
    return goes_on;
}

/* Its queries would break the graph that another thread captures, and fail themselves: until the driver lets
 * it ignore that, it does not look. */
static void *monitor_main(void *arg) {
    fcdp_monitor *monitor = arg;
    for (bool may_look = false; wait_a_period(monitor);) {
        int mode = FCDP_CAPTURE_MODE_RELAXED;
        may_look = may_look || !fcdp__driver_capture_mode_exchange(monitor->engine->drv, &mode);
        if (may_look) comms_look(monitor->engine);
    }
    return NULL;
}

static int thread_start(fcdp_monitor *monitor) {
    sigset_t all, before;
    sigfillset(&all);
    /* the new thread inherits the mask: signals go to the program's own */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&monitor->thread, NULL, monitor_main, monitor);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!error) pthread_setname_np(monitor->thread, "fcdp-monitor");
    return error;
}

static void monitor_free(fcdp_monitor *monitor) {
    pthread_cond_destroy(&monitor->changed);
    pthread_mutex_destroy(&monitor->mutex);
    free(monitor);
}

fcdp_status fcdp__monitor_start(fcdp_engine *engine, fcdp_monitor **monitor_out) {
    fcdp_monitor *monitor = calloc(1, sizeof *monitor);
    if (!monitor) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for the monitor");
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&monitor->mutex, NULL);
    pthread_cond_init(&monitor->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    monitor->engine = engine;
    int error = thread_start(monitor);
    if (error) {
        monitor_free(monitor);
        return fcdp__fail(FCDP_ERR_SYSTEM, "cannot start the monitor's thread: %s", strerror(error));
    }
    *monitor_out = monitor;
    return FCDP_OK;
}

void fcdp__monitor_stop(fcdp_monitor *monitor) {
    if (!monitor) return;
    pthread_mutex_lock(&monitor->mutex);
    monitor->stops = true;
    pthread_cond_signal(&monitor->changed);
    pthread_mutex_unlock(&monitor->mutex);
    pthread_join(monitor->thread, NULL);
    monitor_free(monitor);
}
