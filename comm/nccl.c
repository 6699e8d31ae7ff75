/* nccl.c - all-gathers as NCCL's, their failures, and their end.
 *
 * Who uses a communicator holds the mutex, or is counted in n_inside while no abort has begun:
 *
 *     aborted  =>  nobody comes in any more, and a communicator is NCCL's to free once n_inside is 0
 *
 * ncclCommAbort may wait for the whole device, and so for the kernels of the other communicators, which end
 * only when those are aborted: each has a thread for it, and the caller, who may hold locks that a training
 * loop needs for its error, waits for none of them. Such a thread may outlive the driver and the library's
 * table: it uses the transport alone, which stays for it (fcdp__nccl_destroy).
 *
 * Shares of timeout_s, T, so that a rank that fails alone meets the others, who wait T for it: making T/2 +
 * aborting T/4 < T, and where the others have failed, finalizing T/4 per lane + aborting T/4 < T.
 */
#include "comm/nccl.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "comm/nccl_api.h"

enum { POLLS_BEFORE_YIELD = 20, POLLS_BEFORE_SLEEP = 200, POLL_NS = 50000, ABORT_GRACE_MS = 1000 };

typedef struct nccl_lane {
    fcdp_nccl_transport *transport;
    ncclComm_t comm; /* NULL: the lane has one member, or its communicator is gone */
    uint32_t size, place;
    const char *name;
} nccl_lane;

struct fcdp_nccl_transport {
    fcdp_nccl nccl;
    fcdp_driver *drv;
    fcdp_driver_context context; /* drv's */
    double timeout_s;
    uint64_t made_by_ns;    /* when the making is to end; 0: it has */
    uint64_t aborted_by_ns; /* under the mutex; when those that abort are waited for no longer */
    nccl_lane lanes[FCDP_N_LANES];
    atomic_bool aborted; /* set under the mutex; also read by who waits for NCCL inside, to come out */
    pthread_mutex_t mutex;
    pthread_cond_t changed; /* on the monotonic clock: what follows */
    unsigned n_inside, n_aborting;
    fcdp_error failure; /* the first one */
};

static const char *const lane_names[FCDP_N_LANES] = {"inter", "node"};

/* ---- failures ---- */

static fcdp_status latched(fcdp_nccl_transport *t) {
    pthread_mutex_lock(&t->mutex);
    fcdp_status status = fcdp__error_restore(&t->failure);
    pthread_mutex_unlock(&t->mutex);
    return status;
}

static fcdp_status call_failed(const nccl_lane *lane, ncclComm_t comm, ncclResult_t result,
                               const char *call) {
    const fcdp_nccl *nccl = &lane->transport->nccl;
    const char *more = nccl->ncclGetLastError(comm);
    return fcdp__fail(FCDP_ERR_TRANSPORT,
                      "%s (%s, member %u of %u): %s%s%s (ncclResult %d, NCCL %d); NCCL_DEBUG=INFO shows more",
                      call, lane->name, lane->place, lane->size, nccl->ncclGetErrorString(result),
                      more && *more ? ": " : "", more ? more : "", result, nccl->version);
}

/* ---- waiting for NCCL's own threads ---- */

/* A launch takes NCCL's thread some microseconds, a first connection many milliseconds. */
static void pause_after(unsigned n_polls) {
    const struct timespec period = {.tv_nsec = POLL_NS};
    if (n_polls < POLLS_BEFORE_YIELD) return;
    if (n_polls < POLLS_BEFORE_SLEEP)
        sched_yield();
    else
        nanosleep(&period, NULL);
}

static uint64_t share_ends_ns(const fcdp_nccl_transport *t, double share) {
    return fcdp__now_ns() + (uint64_t)(share * t->timeout_s * 1e9);
}

/* When a wait for peers that begins now is over. */
static uint64_t wait_ends_ns(const fcdp_nccl_transport *t) {
    return t->made_by_ns ? t->made_by_ns : share_ends_ns(t, 1);
}

/* Until what `call` began is done on the host: only then is it on the stream, and what follows may be put
 * behind it. Not with the mutex. An abort is looked for first: a second after it, comm is NCCL's. */
static fcdp_status settle(const nccl_lane *lane, ncclComm_t comm, const char *call, uint64_t until_ns) {
    fcdp_nccl_transport *t = lane->transport;
    uint64_t begin_ns = fcdp__now_ns();
    for (unsigned n = 0;; n++) {
        if (atomic_load(&t->aborted)) return latched(t);
        ncclResult_t state = ncclSuccess, result = t->nccl.ncclCommGetAsyncError(comm, &state);
        if (result != ncclSuccess) return call_failed(lane, comm, result, "ncclCommGetAsyncError");
        if (state == ncclSuccess) return FCDP_OK;
        if (state != ncclInProgress) return call_failed(lane, comm, state, call);
        uint64_t now_ns = fcdp__now_ns();
        if (now_ns > until_ns)
            return fcdp__fail(FCDP_ERR_TIMEOUT,
                              "%s (%s, member %u of %u) has not ended after %.1f s (FCDP_TIMEOUT=%g): a "
                              "member did not come, or "
                              "the network does not carry it; NCCL_DEBUG=INFO shows which",
                              call, lane->name, lane->place, lane->size, (double)(now_ns - begin_ns) / 1e9,
                              t->timeout_s);
        pause_after(n);
    }
}

/* ---- all-gather ---- */

typedef struct launch {
    const nccl_lane *lane;
    ncclComm_t comm; /* the lane's, which an abort may take away meanwhile */
    const fcdp_part *parts;
    size_t n;
    fcdp_stream stream;
    fcdp_status status;
} launch;

/* Members' bytes that do not lie side by side are no all-gather of NCCL's: between nodes that is every gather
 * of a node with several ranks. Each goes straight to each peer instead, as grouped sends and receives: a
 * rank sends (n - 1) * bytes, as in a ring, both ways at once and through no third rank. A broadcast of each
 * member would do too, each along a ring of all members, which NCCL sets up n times in one group; packing
 * would take a copy each way, and memory. Which is fastest on many nodes has not been measured. */
static ncclResult_t exchange(const launch *l, const fcdp_part *part) {
    const fcdp_nccl *nccl = &l->lane->transport->nccl;
    uint32_t size = l->lane->size, me = l->lane->place;
    ncclResult_t result = ncclSuccess;
    for (uint32_t k = 1; k < size && (result == ncclSuccess || result == ncclInProgress); k++) {
        /* at each moment each receives from one */
        uint32_t to = (me + k) % size, from = (me + size - k) % size;
        result = nccl->ncclSend((const void *)(uintptr_t)(part->at.addr + me * part->stride_bytes),
                                part->bytes, ncclInt8, (int)to, l->comm, l->stream);
        if (result == ncclSuccess || result == ncclInProgress)
            result = nccl->ncclRecv((void *)(uintptr_t)(part->at.addr + from * part->stride_bytes),
                                    part->bytes, ncclInt8, (int)from, l->comm, l->stream);
    }
    return result;
}

static ncclResult_t part_enqueue(const launch *l, const fcdp_part *part) {
    const nccl_lane *lane = l->lane;
    if (part->bytes == 0) return ncclSuccess;
    if (part->stride_bytes != part->bytes) return exchange(l, part);
    return lane->transport->nccl.ncclAllGather(
        (const void *)(uintptr_t)(part->at.addr + lane->place * part->bytes),
        (void *)(uintptr_t)part->at.addr, part->bytes, ncclInt8, l->comm, l->stream);
}

/* A group that an error is in launches nothing, but must be ended, or it would swallow the next. Nobody asks
 * a communicator that is aborted what went wrong. */
static void group_launch(void *arg) {
    launch *l = arg;
    fcdp_nccl_transport *t = l->lane->transport;
    const fcdp_nccl *nccl = &t->nccl;
    l->comm = l->lane->comm;
    ncclResult_t result = nccl->ncclGroupStart();
    if (result != ncclSuccess) {
        l->status = atomic_load(&t->aborted) ? latched(t)
                                             : call_failed(l->lane, l->comm, result, "ncclGroupStart");
        return;
    }
    for (size_t i = 0; i < l->n && (result == ncclSuccess || result == ncclInProgress); i++)
        result = part_enqueue(l, &l->parts[i]);
    bool refused = result != ncclSuccess && result != ncclInProgress;
    ncclResult_t end = nccl->ncclGroupEnd();
    char call[96];
    snprintf(call, sizeof call, "an all-gather of %zu parts, the first of %zu bytes", l->n,
             l->n ? l->parts[0].bytes : 0);
    if (atomic_load(&t->aborted))
        l->status = latched(t);
    else if (refused || (end != ncclSuccess && end != ncclInProgress))
        l->status = call_failed(l->lane, l->comm, refused ? result : end, call);
    else
        l->status = settle(l->lane, l->comm, call, wait_ends_ns(t));
}

static fcdp_status enter(fcdp_nccl_transport *t) {
    pthread_mutex_lock(&t->mutex);
    fcdp_status status = fcdp__error_restore(&t->failure);
    if (!status) t->n_inside++;
    pthread_mutex_unlock(&t->mutex);
    return status;
}

static void leave(fcdp_nccl_transport *t) {
    pthread_mutex_lock(&t->mutex);
    if (--t->n_inside == 0) pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->mutex);
}

static fcdp_status enqueue(fcdp_nccl_transport *t, fcdp_lane lane, const fcdp_part *parts, size_t n,
                           fcdp_stream stream) {
    launch l = {.lane = &t->lanes[lane], .parts = parts, .n = n, .stream = stream};
    fcdp_status status = enter(t);
    if (status) return status;
    if (t->lanes[lane].size > 1) {
        status = fcdp__driver_with_context(t->drv, group_launch, &l);
        if (!status) status = l.status;
    }
    leave(t);
    return status;
}

/* NCCL would order a communicator's collectives by itself, whatever their
 * streams, but says so of no version. */
static fcdp_status nccl_all_gather(void *ctx, fcdp_lane lane, const fcdp_part *parts, size_t n,
                                   fcdp_stream stream, fcdp_event turn) {
    fcdp_nccl_transport *t = ctx;
    fcdp_status status = fcdp__driver_stream_wait(t->drv, stream, turn);
    if (!status) status = enqueue(t, lane, parts, n, stream);
    return status ? status : fcdp__driver_event_record(t->drv, turn, stream);
}

/* ---- looking, aborting ---- */

static fcdp_status lane_check(const nccl_lane *lane) {
    ncclResult_t state = ncclSuccess;
    if (!lane->comm) return FCDP_OK;
    ncclResult_t result = lane->transport->nccl.ncclCommGetAsyncError(lane->comm, &state);
    if (result != ncclSuccess) return call_failed(lane, lane->comm, result, "ncclCommGetAsyncError");
    return state == ncclSuccess || state == ncclInProgress
               ? FCDP_OK
               : call_failed(lane, lane->comm, state, "a collective");
}

static fcdp_status nccl_check(void *ctx) {
    fcdp_nccl_transport *t = ctx;
    pthread_mutex_lock(&t->mutex);
    for (int lane = 0; lane < FCDP_N_LANES && !t->failure.status; lane++) {
        fcdp_status status = lane_check(&t->lanes[lane]);
        if (status) fcdp__error_keep(&t->failure, status);
    }
    fcdp_status status = fcdp__error_restore(&t->failure);
    pthread_mutex_unlock(&t->mutex);
    return status;
}

/* With the mutex. False: not by then. */
static bool wait_for_none(fcdp_nccl_transport *t, const unsigned *count, uint64_t until_ns) {
    const struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000),
                                   .tv_nsec = (long)(until_ns % 1000000000)};
    while (*count > 0)
        if (pthread_cond_timedwait(&t->changed, &t->mutex, &until) == ETIMEDOUT) return *count == 0;
    return true;
}

/* Who is inside comes out as soon as NCCL's call returns. Where it does not, it waits for
 * the device, whose kernels wait for this. The thread's context stays: the thread ends here,
 * and the driver may be closed by then. */
static void *abort_main(void *arg) {
    nccl_lane *lane = arg;
    fcdp_nccl_transport *t = lane->transport;
    pthread_mutex_lock(&t->mutex);
    (void)wait_for_none(t, &t->n_inside, fcdp__now_ns() + ABORT_GRACE_MS * UINT64_C(1000000));
    pthread_mutex_unlock(&t->mutex);
    fcdp__driver_context_take(t->context);
    ncclResult_t result = t->nccl.ncclCommAbort(lane->comm);
    if (result != ncclSuccess)
        fcdp__log(FCDP_LOG_DEBUG, "ncclCommAbort (%s): %s", lane->name, t->nccl.ncclGetErrorString(result));
    pthread_mutex_lock(&t->mutex);
    lane->comm = NULL;
    t->n_aborting--;
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->mutex);
    return NULL;
}

static bool thread_start(void *(*main)(void *), void *arg) {
    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all);
    /* the new thread inherits the mask: signals go to the program's own */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = pthread_create(&thread, NULL, main, arg) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (started) pthread_detach(thread);
    return started;
}

static void nccl_abort(void *ctx, const char *why) {
    fcdp_nccl_transport *t = ctx;
    pthread_mutex_lock(&t->mutex);
    if (!t->failure.status) fcdp__error_keep(&t->failure, fcdp__fail(FCDP_ERR_TRANSPORT, "%s", why));
    bool first = !atomic_exchange(&t->aborted, true);
    if (first) t->aborted_by_ns = share_ends_ns(t, 0.25);
    for (int lane = 0; lane < FCDP_N_LANES && first; lane++) {
        if (!t->lanes[lane].comm) continue;
        t->n_aborting++;
        if (thread_start(abort_main, &t->lanes[lane])) continue;
        t->n_aborting--;
        fcdp__log(FCDP_LOG_WARN,
                  "no thread to abort NCCL's communicator (%s): its collectives do not end before this "
                  "process does",
                  t->lanes[lane].name);
    }
    pthread_mutex_unlock(&t->mutex);
}

static void nccl_destroy(void *ctx) {
    fcdp__nccl_destroy(ctx);
}

fcdp_transport fcdp__nccl_table(fcdp_nccl_transport *transport) {
    return (fcdp_transport){.ctx = transport,
                            .all_gather = nccl_all_gather,
                            .check = nccl_check,
                            .abort = nccl_abort,
                            .destroy = nccl_destroy};
}

/* ---- making ---- */

typedef struct init {
    nccl_lane *lane;
    ncclUniqueId id;
    fcdp_status status;
} init;

static void comm_init(void *arg) {
    init *of = arg;
    nccl_lane *lane = of->lane;
    const fcdp_nccl *nccl = &lane->transport->nccl;
    ncclConfig_v21400 config = {
        .size = sizeof config, .magic = (unsigned)NCCL_API_MAGIC, .version = NCCL_OLDEST, .blocking = 0};
    ncclResult_t result = nccl->ncclCommInitRankConfig(&lane->comm, (int)lane->size, of->id, (int)lane->place,
                                                       &config);
    if (result != ncclSuccess && result != ncclInProgress)
        of->status = call_failed(lane, NULL, result, "ncclCommInitRankConfig");
    else
        of->status = settle(lane, lane->comm, "ncclCommInitRankConfig", wait_ends_ns(lane->transport));
}

/* Of the lane's first member. */
static fcdp_status id_find(const fcdp_nccl_config *config, int lane, ncclUniqueId *id_out) {
    static const ncclUniqueId none;
    const fcdp_topology *topology = &config->topology;
    uint32_t leader = lane == FCDP_LANE_NODE ? topology->node * topology->node_size : topology->local;
    memcpy(id_out->internal, config->ids[leader].lane[lane], sizeof id_out->internal);
    if (memcmp(id_out, &none, sizeof none)) return FCDP_OK;
    return fcdp__fail(FCDP_ERR_PEER,
                      "rank %u of the shard group made no NCCL id for the lane %s, and says why", leader,
                      lane_names[lane]);
}

static fcdp_status lane_make(fcdp_nccl_transport *t, const fcdp_nccl_config *config, int number) {
    const fcdp_topology *topology = &config->topology;
    nccl_lane *lane = &t->lanes[number];
    *lane = number == FCDP_LANE_NODE ? (nccl_lane){.size = topology->node_size, .place = topology->local}
                                     : (nccl_lane){.size = topology->n_nodes, .place = topology->node};
    lane->transport = t;
    lane->name = lane_names[number];
    if (lane->size == 1) return FCDP_OK;
    init of = {.lane = lane};
    fcdp_status status = id_find(config, number, &of.id);
    if (status) return status;
    status = fcdp__driver_with_context(t->drv, comm_init, &of);
    return status ? status : of.status;
}

static fcdp_nccl_transport *transport_make(const fcdp_nccl_config *config) {
    fcdp_nccl_transport *t = calloc(1, sizeof *t);
    if (!t) return NULL;
    t->nccl = *config->nccl;
    t->drv = config->drv;
    t->context = fcdp__driver_context(config->drv);
    t->timeout_s = config->timeout_s;
    t->made_by_ns = share_ends_ns(t, 0.5);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&t->mutex, NULL);
    pthread_cond_init(&t->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    return t;
}

/* ---- the first operation of each lane ----
 *
 * NCCL connects members when they first send to each other, and the host waits for that. It is done here, in
 * both forms that all_gather has, so that no training step waits for a peer's host; and what came is looked
 * at, before anything relies on it. */

enum { PROBE_BYTES = 64 };

typedef struct probe {
    fcdp_nccl_transport *t;
    fcdp_stream stream;
    fcdp_dptr at; /* one page */
    size_t page_bytes;
    fcdp_phys page;
    int n_made;    /* of the steps of probe_make */
    uint8_t *host; /* what goes to the page, and what comes from it */
} probe;

/* Each step that was made, backwards. Nothing of it is on the stream any more. */
static void probe_free(probe *p) {
    fcdp_driver *drv = p->t->drv;
    fcdp_status status = FCDP_OK;
    if (p->n_made > 3) fcdp__driver_stream_destroy(drv, p->stream);
    if (p->n_made > 2) status = fcdp__driver_unmap(drv, p->at, p->page_bytes);
    if (p->n_made > 1 && !status) status = fcdp__driver_phys_release(drv, p->page);
    if (p->n_made > 0 && !status) status = fcdp__driver_range_free(drv, p->at, p->page_bytes);
    if (status) fcdp__log(FCDP_LOG_DEBUG, "%s", fcdp_error_text());
    free(p->host);
}

static fcdp_status probe_make(probe *p) {
    fcdp_driver *drv = p->t->drv;
    p->page_bytes = fcdp__driver_page_bytes(drv);
    p->host = malloc(p->page_bytes);
    if (!p->host) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory to try NCCL's communicators");
    fcdp_status status = fcdp__driver_range_reserve(drv, p->page_bytes, &p->at);
    if (!status) p->n_made++, status = fcdp__driver_phys_create(drv, p->page_bytes, &p->page);
    if (!status) p->n_made++, status = fcdp__driver_map(drv, p->at, p->page_bytes, p->page);
    if (!status) p->n_made++, status = fcdp__driver_set_access(drv, p->at, p->page_bytes);
    if (!status) status = fcdp__driver_stream_create(drv, &p->stream);
    if (!status) p->n_made++;
    return status;
}

/* Not by a synchronise, which would have no end without a peer. */
static fcdp_status stream_await(probe *p, const nccl_lane *lane) {
    fcdp_nccl_transport *t = p->t;
    uint64_t begin_ns = fcdp__now_ns();
    for (unsigned n = 0;; n++) {
        fcdp_status status = fcdp__driver_stream_query(t->drv, p->stream);
        if (status != FCDP_PENDING) return status;
        status = nccl_check(t);
        if (status) return status;
        uint64_t now_ns = fcdp__now_ns();
        if (now_ns > wait_ends_ns(t))
            return fcdp__fail(FCDP_ERR_TIMEOUT,
                              "the first all-gather (%s, member %u of %u) has not ended after %.1f s "
                              "(FCDP_TIMEOUT=%g): the "
                              "network does not carry it; NCCL_DEBUG=INFO shows what NCCL has chosen",
                              lane->name, lane->place, lane->size, (double)(now_ns - begin_ns) / 1e9,
                              t->timeout_s);
        pause_after(n);
    }
}

/* Members side by side at the page's begin, and with a gap each behind them. */
static void probe_parts(const probe *p, const nccl_lane *lane, fcdp_part parts_out[2]) {
    parts_out[0] = (fcdp_part){p->at, PROBE_BYTES, PROBE_BYTES};
    parts_out[1] = (fcdp_part){fcdp__dptr_add(p->at, (size_t)lane->size * PROBE_BYTES), PROBE_BYTES,
                               2 * PROBE_BYTES};
}

static uint8_t *probe_place(const probe *p, const fcdp_part *part, uint32_t member) {
    return p->host + (part->at.addr - p->at.addr) + member * part->stride_bytes;
}

static fcdp_status probe_compare(const probe *p, const nccl_lane *lane, const fcdp_part parts[2]) {
    for (int i = 0; i < 2; i++)
        for (uint32_t member = 0; member < lane->size; member++)
            for (size_t k = 0; k < PROBE_BYTES; k++)
                if (probe_place(p, &parts[i], member)[k] != (uint8_t)(member + 1))
                    return fcdp__fail(FCDP_ERR_TRANSPORT,
                                      "the first all-gather (%s, member %u of %u) brought %u from member %u, "
                                      "not %u: NCCL %d "
                                      "does not carry bytes right here; FCDP cannot use it",
                                      lane->name, lane->place, lane->size,
                                      probe_place(p, &parts[i], member)[k], member, (uint8_t)(member + 1),
                                      lane->transport->nccl.version);
    return FCDP_OK;
}

static fcdp_status lane_probe(probe *p, int number) {
    fcdp_nccl_transport *t = p->t;
    const nccl_lane *lane = &t->lanes[number];
    fcdp_part parts[2];
    if (lane->size == 1) return FCDP_OK;
    size_t bytes = (size_t)3 * lane->size * PROBE_BYTES;
    if (bytes > p->page_bytes) return fcdp__fail(FCDP_ERR_UNSUPPORTED, "a lane of %u members", lane->size);
    probe_parts(p, lane, parts);
    memset(p->host, 0, bytes);
    for (int i = 0; i < 2; i++)
        memset(probe_place(p, &parts[i], lane->place), (uint8_t)(lane->place + 1), PROBE_BYTES);
    fcdp_status status = fcdp__driver_copy_h2d(t->drv, p->at, p->host, bytes, p->stream);
    if (!status) status = enqueue(t, (fcdp_lane)number, parts, 2, p->stream);
    if (!status) status = stream_await(p, lane);
    if (!status) status = fcdp__driver_copy_d2h(t->drv, p->host, p->at, bytes, p->stream);
    if (!status) status = fcdp__driver_stream_sync(t->drv, p->stream);
    return status ? status : probe_compare(p, lane, parts);
}

/* Have those that abort ended in their time? */
static bool abort_await(fcdp_nccl_transport *t) {
    pthread_mutex_lock(&t->mutex);
    bool ended = wait_for_none(t, &t->n_aborting, t->aborted_by_ns);
    pthread_mutex_unlock(&t->mutex);
    return ended;
}

/* After a failure the stream ends with the abort; where that takes too long, what it uses stays. */
static fcdp_status connect(fcdp_nccl_transport *t) {
    probe p = {.t = t};
    fcdp_status status = probe_make(&p);
    for (int lane = 0; lane < FCDP_N_LANES && !status; lane++) status = lane_probe(&p, lane);
    if (!status) {
        probe_free(&p);
        return FCDP_OK;
    }
    fcdp_error error;
    fcdp__error_keep(&error, status);
    nccl_abort(t, error.text);
    if (abort_await(t) && (p.n_made < 4 || !fcdp__driver_stream_sync(t->drv, p.stream))) probe_free(&p);
    return fcdp__error_restore(&error);
}

fcdp_status fcdp__nccl_create(const fcdp_nccl_config *config, fcdp_nccl_transport **transport_out) {
    if (config->nccl->is_double != fcdp__driver_is_sim(config->drv))
        return fcdp__fail(FCDP_ERR_UNSUPPORTED,
                          "NCCL moves the memory of GPUs alone, and the model is on the CPU");
    fcdp_nccl_transport *t = transport_make(config);
    if (!t) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for NCCL's communicators");
    fcdp_status status = FCDP_OK;
    for (int lane = 0; lane < FCDP_N_LANES && !status; lane++) status = lane_make(t, config, lane);
    if (!status) status = connect(t);
    if (!status) {
        t->made_by_ns = 0;
        *transport_out = t;
        return FCDP_OK;
    }
    fcdp_error error;
    fcdp__error_keep(&error, status);
    nccl_abort(t, error.text);
    fcdp__nccl_destroy(t);
    return fcdp__error_restore(&error);
}

/* ---- the end ---- */

/* Finalizing waits for the peers while ours watches the time; destroying what
 * is not finalized would wait in NCCL. */
static void comm_finalize(void *arg) {
    init *of = arg;
    nccl_lane *lane = of->lane;
    const fcdp_nccl *nccl = &lane->transport->nccl;
    ncclResult_t result = nccl->ncclCommFinalize(lane->comm);
    if (result != ncclSuccess && result != ncclInProgress)
        of->status = call_failed(lane, lane->comm, result, "ncclCommFinalize");
    else
        of->status = settle(lane, lane->comm, "ncclCommFinalize", share_ends_ns(lane->transport, 0.25));
    if (of->status) return;
    result = nccl->ncclCommDestroy(lane->comm);
    lane->comm = NULL;
    if (result != ncclSuccess)
        fcdp__log(FCDP_LOG_DEBUG, "ncclCommDestroy (%s): %s", lane->name, nccl->ncclGetErrorString(result));
}

static fcdp_status lanes_finalize(fcdp_nccl_transport *t) {
    fcdp_status status = FCDP_OK;
    for (int lane = 0; lane < FCDP_N_LANES && !status; lane++) {
        init of = {.lane = &t->lanes[lane]};
        if (!of.lane->comm) continue;
        status = fcdp__driver_with_context(t->drv, comm_finalize, &of);
        if (!status) status = of.status;
    }
    return status;
}

/* What NCCL has not given back by then stays allocated: its threads may still use it. */
void fcdp__nccl_destroy(fcdp_nccl_transport *t) {
    if (!t) return;
    if (!atomic_load(&t->aborted) && lanes_finalize(t)) nccl_abort(t, fcdp_error_text());
    if (!abort_await(t)) {
        fcdp__log(FCDP_LOG_WARN,
                  "NCCL's communicators have not been aborted after %.1f s (a quarter of FCDP_TIMEOUT); they "
                  "stay until the process "
                  "ends",
                  t->timeout_s / 4);
        return;
    }
    pthread_cond_destroy(&t->changed);
    pthread_mutex_destroy(&t->mutex);
    free(t);
}
