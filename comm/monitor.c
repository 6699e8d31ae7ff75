/* monitor.c - the thread that turns silence into an error.
 *
 * Streams wait for peers without the host, so no call of the program fails when a peer dies: the job would
 * hang. This thread looks at every group in flight ten times a second, and latches what it finds: a failed
 * transport, a dead process, a collective that is later than FCDP_TIMEOUT. The text names the ranks that are
 * missing. The thread also reads the trace's device times, which only polling tells.
 */
#include "comm/monitor.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/spilled.h"
#include "comm/trace.h"

/* What a peer has sent before its end arrives within SENT_NS. */
static const uint64_t PERIOD_NS = 100 * 1000 * 1000, SENT_NS = 500 * 1000 * 1000;

struct fcdp_monitor {
    fcdp_engine *engine;
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed; /* fcdp__condition_init's */
    bool stops;             /* guarded by mutex */
};

/* Where the transport cannot say which ranks are missing, it is one of those that this rank shares a lane
 * with. */
static fcdp_status late(const fcdp_group *group, uint64_t waited_ns) {
    const fcdp_transport *transport = &group->comm->transport;
    const fcdp_topology *topology = &group->comm->topology;
    char ranks[256];
    bool is_known = transport->missing && transport->missing(transport->ctx, ranks, sizeof ranks);
    if (!is_known) strcpy(ranks, "one of");
    const char *comma = "";
    for (uint32_t rank = 0; rank < topology->n_ranks && !is_known; rank++) {
        size_t at = strlen(ranks);
        bool shares = rank / topology->node_size == topology->node ||
                      rank % topology->node_size == topology->local;
        if (!shares || rank == topology->rank) continue;
        snprintf(ranks + at, sizeof ranks - at, "%s rank %u", comma, rank);
        comma = ",";
    }
    return fcdp__fail(
        FCDP_ERR_TIMEOUT,
        "gathering '%s': its collectives have not ended after %.1f s (FCDP_TIMEOUT): %s did not come",
        group->name, (double)waited_ns / 1e9, ranks);
}

/* A spilled group has no words that would tell what a peer has done. The board of the node's meeting tells
 * that it has ended. The collectives that it was in have ended for this rank too by SENT_NS later; one that
 * has not lacks that peer. */
static fcdp_status peers_of_spilled(fcdp_group *group, uint64_t since_ns, uint64_t now_ns) {
    fcdp_comm *comm = group->comm;
    char what[256];
    snprintf(what, sizeof what, "the node's parts of '%.200s'", group->name);
    if (!comm->host || !fcdp__board_query_alive(fcdp__host_meeting(comm->host), what, now_ns - since_ns))
        return FCDP_PENDING;
    if (!comm->peer_ended_ns) comm->peer_ended_ns = now_ns;
    uint64_t from_ns = comm->peer_ended_ns > since_ns ? comm->peer_ended_ns : since_ns;
    return now_ns - from_ns < SENT_NS ? FCDP_PENDING : FCDP_ERR_PEER;
}

/* FCDP_OK: nothing has gone wrong with the group by now. With the engine's lock, under which no group is
 * destroyed. */
static fcdp_status group_look(fcdp_group *group) {
    uint64_t since_ns = atomic_load_explicit(&group->in_flight_ns, memory_order_relaxed),
             now_ns = fcdp__now_ns();
    const fcdp_engine *engine = group->comm->engine;
    const fcdp_topology *topology = &group->comm->topology;
    if (!since_ns || now_ns <= since_ns) return FCDP_OK; /* it may have begun just now */
    fcdp_status status = fcdp__driver_event_query(engine->drv, fcdp__region_ready(group->region));
    bool gathers = status == FCDP_PENDING; /* behind that no peer is needed */
    if (!status) status = fcdp__driver_event_query(engine->drv, fcdp__region_stored(group->region));
    if (status != FCDP_PENDING) {
        /* It may have begun again meanwhile: then the time is another one. */
        atomic_compare_exchange_strong_explicit(&group->in_flight_ns, &since_ns, 0, memory_order_relaxed,
                                                memory_order_relaxed);
        return status;
    }
    status = fcdp__region_query_peers(group->region, now_ns - since_ns);
    if (status == FCDP_PENDING && gathers && fcdp__group_is_spilled(group))
        status = peers_of_spilled(group, since_ns, now_ns);
    if (status != FCDP_PENDING) /* a region knows slices, and no ranks */
        return fcdp__fail(status, "%s; slice 0 is rank %u", fcdp_error_text(),
                          topology->rank - topology->local);
    bool is_late = (double)(now_ns - since_ns) >= engine->options.timeout_s * 1e9;
    return is_late ? late(group, now_ns - since_ns) : FCDP_OK;
}

/* Every period it looks at all shard groups. Failures are latched. Waits of a comm that has failed are opened
 * each time, since a call that was under way when it failed may have enqueued another one. Its queries would
 * break the graph that another thread captures, and fail themselves: until the driver lets it ignore that, it
 * does not look. */
static void *monitor_main(void *arg) {
    fcdp_monitor *monitor = arg;
    fcdp_engine *engine = monitor->engine;
    bool may_look = false;
    uint64_t n = 0;
    pthread_mutex_lock(&monitor->mutex);
    while (!monitor->stops) {
        uint64_t until_ns = fcdp__now_ns() + PERIOD_NS;
        int mode = FCDP_CAPTURE_MODE_RELAXED;
        while (!monitor->stops && fcdp__condition_wait(&monitor->changed, &monitor->mutex, until_ns))
            continue;
        if (monitor->stops) break;
        pthread_mutex_unlock(&monitor->mutex);
        may_look = may_look || !fcdp__driver_capture_mode_exchange(engine->drv, &mode);
        fcdp__lock_acquire(&engine->lock);
        for (fcdp_comm *comm = engine->comms; comm && may_look; comm = comm->next) {
            fcdp_status status = fcdp_comm_check(comm);
            for (fcdp_group *group = comm->groups; group && !status; group = group->next)
                status = group_look(group);
            if (status) fcdp__comm_fail_locked(comm, status);
        }
        if (engine->account) fcdp__account_trace(engine->account);
        fcdp__pool_trace_pins(engine->pool);
        fcdp__lock_release(&engine->lock);
        if (may_look) fcdp__engine_trace_poll(engine, n++);
        pthread_mutex_lock(&monitor->mutex);
    }
    pthread_mutex_unlock(&monitor->mutex);
    return NULL;
}

static void monitor_free(fcdp_monitor *monitor) {
    pthread_cond_destroy(&monitor->changed);
    pthread_mutex_destroy(&monitor->mutex);
    free(monitor);
}

fcdp_status fcdp__monitor_start(fcdp_engine *engine, fcdp_monitor **monitor_out) {
    fcdp_monitor *monitor = calloc(1, sizeof *monitor);
    if (!monitor) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for the monitor");
    pthread_mutex_init(&monitor->mutex, NULL);
    fcdp__condition_init(&monitor->changed);
    monitor->engine = engine;
    int error = fcdp__thread_start(monitor_main, monitor, &monitor->thread);
    if (error) {
        monitor_free(monitor);
        return fcdp__fail(FCDP_ERR_SYSTEM, "cannot start the monitor's thread: %s", strerror(error));
    }
    pthread_setname_np(monitor->thread, "fcdp-monitor");
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
