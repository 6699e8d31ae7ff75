/* nccl.c - NCCL's library, communicators of FCDP's own, and their all-gathers.
 *
 * The communicators are FCDP's own and do not block, so that every wait has an end: a peer that never comes
 * is a failure with a text, and not a job that hangs. A library that cannot order the launches of several
 * communicators on a device is refused when it is loaded: they could block each other. This file carries
 * parts of bytes, and knows neither groups nor plans.
 *
 * One thread at a time calls NCCL for a communicator, polls included: since 2.26 ncclCommGetAsyncError itself
 * ends what a call has begun, and frees it. So a thread that launches enters the lane until its launch has
 * settled, and `check` polls under the mutex, and only lanes that are not entered:
 *
 *     n_inside = number of lanes with is_entered
 *     aborted  =>  no lane is entered any more; a communicator is NCCL's to free once n_inside is 0
 *
 * ncclCommAbort may wait for the whole device, and so for the kernels of the other communicators, which end
 * only when those are aborted: each has a thread for it, and the caller, which may hold locks that a training
 * loop needs for its error, waits for none of them. Such a thread may outlive the driver and the library's
 * table: it uses the transport alone, which stays for it (fcdp__nccl_destroy).
 *
 * Shares of timeout_s, T, so that a rank that fails alone meets the others, which wait T for it: making T/2 +
 * aborting T/4 < T, and where the others have failed, finalizing T/4 per lane + aborting T/4 < T. An abort
 * is given ABORT_LEAST_S in any case, which matters where T is a few seconds.
 */
#include "comm/nccl.h"

#include <dlfcn.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "comm/nccl_api.h"

enum {
    POLLS_BEFORE_YIELD = 20,
    POLLS_BEFORE_SLEEP = 200,
    POLL_NS = 50000,
    ABORT_GRACE_MS = 1000,
    ABORT_LEAST_S = 2,
    NODE_CTAS = 8,
    PROBE_BYTES = 64,
    PROBE_STEP = 16
};

static const char *const lane_names[FCDP_N_LANES] = {"inter", "node"};

size_t fcdp__nccl_probe_bytes = (size_t)32 << 20;

typedef struct nccl_lane {
    fcdp_nccl_transport *transport;
    ncclComm_t comm; /* NULL: the lane has one member, or its communicator is gone */
    uint32_t size, place;
    const char *name;
    bool is_entered; /* under the mutex: a thread launches or waits for NCCL's launch. No other call of NCCL's
                        takes the communicator meanwhile, a poll neither; an abort alone does */
} nccl_lane;

struct fcdp_nccl_transport {
    fcdp_nccl nccl;
    fcdp_driver *drv;
    fcdp_driver_context context; /* drv's */
    double timeout_s;
    uint64_t made_by_ns;    /* when the making is to end; 0: it has */
    uint64_t aborted_by_ns; /* under the mutex; when those that abort are waited for no longer */
    nccl_lane lanes[FCDP_N_LANES];
    /* set under the mutex; also read by a thread that waits for NCCL inside, to come out */
    atomic_bool aborted;
    pthread_mutex_t mutex;
    pthread_cond_t changed;        /* on the monotonic clock: what follows */
    unsigned n_inside, n_aborting; /* n_inside: of the lanes, those that are entered */
    fcdp_failure failure;          /* the first one */
};

/* ---- the library ---- */

_Static_assert(sizeof(ncclUniqueId) == FCDP_NCCL_ID_BYTES, "NCCL's ABI");

static const char IMPLICIT_ORDER[] = "NCCL_LAUNCH_ORDER_IMPLICIT";

/* False, with the reason appended: it is not there, or lacks something. It stays loaded all
 * the same: it has threads of its own. */
static bool api_load(const char *path, int flags, fcdp_nccl *nccl, char *reasons, size_t n_reasons) {
    size_t at = strlen(reasons);
    const char *between = at ? "; " : "";
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL | flags);
    if (!library && flags) return false;
    if (!library) {
        snprintf(reasons + at, n_reasons - at, "%s%s", between, dlerror());
        return false;
    }
#define AS_LOAD(name, result, args)                                                                          \
    if (!(*(void **)&nccl->name = dlsym(library, #name))) {                                                  \
        snprintf(reasons + at, n_reasons - at, "%s%s has no %s", between, path, #name);                      \
        return false;                                                                                        \
    }
    NCCL_CALLS(AS_LOAD)
    nccl->is_double = dlsym(library, "simnccl_state") != NULL;
    return true;
}

/* Each communicator's kernels hold SMs until its members have come. Without an order on the device, two of
 * them can hold it against each other on two ranks: a deadlock (NCCL's user guide, "Using multiple NCCL
 * communicators concurrently"). NCCL makes the order of their launches that of the device, for the
 * communicators of one library, where this variable was set before its first launch. */
static fcdp_status order_check(void) {
    const char *value = getenv(IMPLICIT_ORDER);
    if (value && strtol(value, NULL, 10) != 0) return FCDP_OK;
    return fcdp__fail(
        FCDP_ERR_UNSUPPORTED,
        "%s is %s, so the job's communicators could block each other on the device; set it to 1 "
        "before the job starts",
        IMPLICIT_ORDER, value ? value : "not set");
}

fcdp_status fcdp__nccl_load(const char *named, const char *beside_torch, fcdp_nccl **nccl_out) {
    char reasons[512] = "";
    fcdp_nccl *nccl = calloc(1, sizeof *nccl);
    if (!nccl) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for NCCL's entry points");
    bool loaded = named ? api_load(named, 0, nccl, reasons, sizeof reasons)
                        : api_load("libnccl.so.2", RTLD_NOLOAD, nccl, reasons, sizeof reasons);
    if (!loaded && !named && beside_torch) loaded = api_load(beside_torch, 0, nccl, reasons, sizeof reasons);
    if (!loaded && !named) loaded = api_load("libnccl.so.2", 0, nccl, reasons, sizeof reasons);
    fcdp_status status = FCDP_OK;
    if (!loaded)
        status = fcdp__fail(
            FCDP_ERR_UNSUPPORTED,
            "no NCCL that FCDP can use: %s; it must be version 2.26 or later, beside torch or in the "
            "library path",
            reasons);
    else if (nccl->ncclGetVersion(&nccl->version) != ncclSuccess || nccl->version < NCCL_OLDEST)
        status = fcdp__fail(FCDP_ERR_UNSUPPORTED,
                            "NCCL says that it is version %d; FCDP needs 2.26 (22600) or later, which orders "
                            "the collectives of several communicators on a device",
                            nccl->version);
    else
        status = order_check();
    if (status)
        free(nccl);
    else
        *nccl_out = nccl;
    return status;
}

void fcdp__nccl_unload(fcdp_nccl *nccl) {
    free(nccl);
}

/* NCCL begins a thread for each id, which waits for the members: so only the rank that leads a lane makes
 * one. */
fcdp_status fcdp__nccl_ids_make(const fcdp_nccl *nccl, const fcdp_topology *topology,
                                fcdp_nccl_ids *ids_out) {
    fcdp_nccl_ids ids = {0};
    for (int lane = 0; lane < FCDP_N_LANES; lane++) {
        bool leads = lane == FCDP_LANE_NODE ? topology->local == 0 && topology->node_size > 1
                                            : topology->node == 0;
        if (!leads) continue;
        ncclUniqueId id;
        ncclResult_t result = nccl->ncclGetUniqueId(&id);
        if (result != ncclSuccess)
            return fcdp__fail(
                FCDP_ERR_TRANSPORT,
                "ncclGetUniqueId: %s (%s); NCCL_SOCKET_IFNAME names the network interface to use, "
                "NCCL_DEBUG=INFO shows more",
                nccl->ncclGetErrorString(result), nccl->ncclGetLastError(NULL));
        memcpy(ids.lane[lane], id.internal, sizeof id.internal);
    }
    *ids_out = ids;
    return FCDP_OK;
}

/* ---- failures ---- */

static fcdp_status latched(fcdp_nccl_transport *t) {
    pthread_mutex_lock(&t->mutex);
    fcdp_status status = fcdp__failure_restore(&t->failure);
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
static void poll_pause(unsigned n_polls) {
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

static double abort_wait_s(const fcdp_nccl_transport *t) {
    return t->timeout_s / 4 > ABORT_LEAST_S ? t->timeout_s / 4 : ABORT_LEAST_S;
}

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
        poll_pause(n);
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
 * member would do too, each along a ring of all members, which NCCL sets up n times in one group. Of many
 * parts none comes here: moves.c packs them. Which is fastest has not been measured. */
static ncclResult_t part_enqueue(const launch *l, const fcdp_part *part) {
    const fcdp_nccl *nccl = &l->lane->transport->nccl;
    uint32_t size = l->lane->size, me = l->lane->place;
    uint8_t *at = (uint8_t *)(uintptr_t)part->at.addr;
    ncclResult_t result = ncclSuccess;
    if (part->bytes == 0) return ncclSuccess;
    if (part->stride_bytes == part->bytes)
        return nccl->ncclAllGather(at + me * part->bytes, at, part->bytes, ncclInt8, l->comm, l->stream);
    for (uint32_t k = 1; k < size && (result == ncclSuccess || result == ncclInProgress); k++) {
        /* at each moment each receives from one */
        uint32_t to = (me + k) % size, from = (me + size - k) % size;
        result = nccl->ncclSend(at + me * part->stride_bytes, part->bytes, ncclInt8, (int)to, l->comm,
                                l->stream);
        if (result == ncclSuccess || result == ncclInProgress)
            result = nccl->ncclRecv(at + from * part->stride_bytes, part->bytes, ncclInt8, (int)from, l->comm,
                                    l->stream);
    }
    return result;
}

/* A group that an error is in launches nothing, but must be ended, or it would swallow the next. A
 * communicator that is aborted is not asked what went wrong. */
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

/* Behind another thread's launch on the same lane, which ends in time. The mutex is not held while NCCL
 * works. */
static fcdp_status lane_enter(nccl_lane *lane) {
    fcdp_nccl_transport *t = lane->transport;
    pthread_mutex_lock(&t->mutex);
    while (lane->is_entered && !t->failure.status) pthread_cond_wait(&t->changed, &t->mutex);
    fcdp_status status = fcdp__failure_restore(&t->failure);
    if (!status) {
        lane->is_entered = true;
        t->n_inside++;
    }
    pthread_mutex_unlock(&t->mutex);
    return status;
}

/* A launch that failed may still be in progress: it is latched here, so that no poll follows. */
static void lane_leave(nccl_lane *lane, fcdp_status status) {
    fcdp_nccl_transport *t = lane->transport;
    pthread_mutex_lock(&t->mutex);
    if (status && !t->failure.status) t->failure = fcdp__failure_keep(status);
    lane->is_entered = false;
    t->n_inside--;
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->mutex);
}

static fcdp_status lane_gather(fcdp_nccl_transport *t, fcdp_lane lane, const fcdp_part *parts, size_t n,
                               fcdp_stream stream) {
    launch l = {.lane = &t->lanes[lane], .parts = parts, .n = n, .stream = stream};
    fcdp_status status = lane_enter(&t->lanes[lane]);
    if (status) return status;
    if (l.lane->size > 1) {
        status = fcdp__driver_with_context(t->drv, group_launch, &l);
        if (!status) status = l.status;
    }
    lane_leave(&t->lanes[lane], status);
    return status;
}

/* NCCL would order a communicator's collectives by itself, whatever their
 * streams, but says so of no version. */
static fcdp_status all_gather(void *ctx, fcdp_lane lane, const fcdp_part *parts, size_t n, fcdp_stream stream,
                              fcdp_event turn) {
    fcdp_nccl_transport *t = ctx;
    fcdp_status status = fcdp__driver_stream_wait(t->drv, stream, turn);
    if (!status) status = lane_gather(t, lane, parts, n, stream);
    return status ? status : fcdp__driver_event_record(t->drv, turn, stream);
}

/* ---- looking, aborting ---- */

/* A communicator that is gone has said what it had to say. That of a lane which is entered is polled by the
 * thread that is in it. */
static fcdp_status check(void *ctx) {
    fcdp_nccl_transport *t = ctx;
    pthread_mutex_lock(&t->mutex);
    for (int i = 0; i < FCDP_N_LANES && !t->failure.status; i++) {
        const nccl_lane *lane = &t->lanes[i];
        ncclResult_t state = ncclSuccess;
        if (!lane->comm || lane->is_entered) continue;
        ncclResult_t result = t->nccl.ncclCommGetAsyncError(lane->comm, &state);
        fcdp_status status = FCDP_OK;
        if (result != ncclSuccess)
            status = call_failed(lane, lane->comm, result, "ncclCommGetAsyncError");
        else if (state != ncclSuccess && state != ncclInProgress)
            status = call_failed(lane, lane->comm, state, "a collective");
        if (status) t->failure = fcdp__failure_keep(status);
    }
    fcdp_status status = fcdp__failure_restore(&t->failure);
    pthread_mutex_unlock(&t->mutex);
    return status;
}

/* With the mutex. False: not by then. */
static bool wait_for_none(fcdp_nccl_transport *t, const unsigned *count, uint64_t until_ns) {
    while (*count > 0)
        if (!fcdp__condition_wait(&t->changed, &t->mutex, until_ns)) return *count == 0;
    return true;
}

/* A thread that is inside comes out as soon as NCCL's call returns. Where the call does not, it waits for the
 * device, whose kernels wait for this. This thread's context stays: the thread ends here, and the driver may
 * be closed by then. */
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

/* One thread a communicator, each detached: none of them waits for another's end. */
static void lanes_abort(void *ctx, const char *why) {
    fcdp_nccl_transport *t = ctx;
    pthread_mutex_lock(&t->mutex);
    if (!t->failure.status) t->failure = fcdp__failure_keep(fcdp__fail(FCDP_ERR_TRANSPORT, "%s", why));
    bool first = !atomic_exchange(&t->aborted, true);
    if (first) t->aborted_by_ns = fcdp__now_ns() + (uint64_t)(abort_wait_s(t) * 1e9);
    for (int lane = 0; lane < FCDP_N_LANES && first; lane++) {
        if (!t->lanes[lane].comm) continue;
        t->n_aborting++;
        pthread_t thread;
        if (!fcdp__thread_start(abort_main, &t->lanes[lane], &thread)) {
            pthread_detach(thread);
            continue;
        }
        t->n_aborting--;
        fcdp__log(FCDP_LOG_WARN,
                  "no thread to abort NCCL's communicator (%s): its collectives do not end before this "
                  "process does",
                  t->lanes[lane].name);
    }
    pthread_mutex_unlock(&t->mutex);
}

/* Have the threads that abort ended in their time? */
static bool abort_await(fcdp_nccl_transport *t) {
    pthread_mutex_lock(&t->mutex);
    bool ended = wait_for_none(t, &t->n_aborting, t->aborted_by_ns);
    pthread_mutex_unlock(&t->mutex);
    return ended;
}

static void destroy(void *ctx) {
    fcdp__nccl_destroy(ctx);
}

const void *fcdp__nccl_communicator(const fcdp_nccl_transport *transport, fcdp_lane lane) {
    return transport->lanes[lane].comm;
}

fcdp_transport fcdp__nccl_table(fcdp_nccl_transport *transport) {
    return (fcdp_transport){
        .ctx = transport, .all_gather = all_gather, .check = check, .abort = lanes_abort, .destroy = destroy};
}

/* ---- communicators ---- */

typedef struct init {
    nccl_lane *lane;
    ncclUniqueId id;
    fcdp_status status;
} init;

/* A CTA of NCCL's holds a multiprocessor, which the model then lacks. FSDP2's all-gathers and reduce-scatters
 * are one communicator's, so one after the other; the node's all-gather has a communicator of its own, beside
 * torch's reduce-scatter, and both with all of NCCL's CTAs (24 to 32) would hold twice as much. It has the
 * time: a gather waits for the slow link. The link's own lane is left alone, which takes what its network
 * needs. What the user sets (NCCL_MIN_CTAS, NCCL_MAX_CTAS) is for all communicators. */
static int most_ctas(const nccl_lane *lane) {
    bool is_users = getenv("NCCL_MAX_CTAS") || getenv("NCCL_MIN_CTAS");
    return lane == &lane->transport->lanes[FCDP_LANE_NODE] && !is_users ? NODE_CTAS : NCCL_CONFIG_UNDEF;
}

static void comm_init(void *arg) {
    init *of = arg;
    nccl_lane *lane = of->lane;
    const fcdp_nccl *nccl = &lane->transport->nccl;
    ncclConfig_v21700 config = {.size = sizeof config,
                                .magic = (unsigned)NCCL_API_MAGIC,
                                .version = NCCL_CONFIG_VERSION,
                                .blocking = 0,
                                .cgaClusterSize = NCCL_CONFIG_UNDEF,
                                .minCTAs = NCCL_CONFIG_UNDEF,
                                .maxCTAs = most_ctas(lane)};
    ncclResult_t result = nccl->ncclCommInitRankConfig(&lane->comm, (int)lane->size, of->id, (int)lane->place,
                                                       &config);
    if (result != ncclSuccess && result != ncclInProgress)
        of->status = call_failed(lane, NULL, result, "ncclCommInitRankConfig");
    else
        of->status = settle(lane, lane->comm, "ncclCommInitRankConfig", wait_ends_ns(lane->transport));
}

/* The lane's id is its first member's, among those that the ranks have exchanged. */
static fcdp_status lane_make(fcdp_nccl_transport *t, const fcdp_nccl_config *config, int number) {
    static const ncclUniqueId none;
    const fcdp_topology *topology = &config->topology;
    bool is_node = number == FCDP_LANE_NODE;
    nccl_lane *lane = &t->lanes[number];
    *lane = is_node ? (nccl_lane){.size = topology->node_size, .place = topology->local}
                    : (nccl_lane){.size = topology->n_nodes, .place = topology->node};
    lane->transport = t;
    lane->name = lane_names[number];
    if (lane->size == 1) return FCDP_OK;
    init of = {.lane = lane};
    uint32_t leader = is_node ? topology->node * topology->node_size : topology->local;
    memcpy(of.id.internal, config->ids[leader].lane[number], sizeof of.id.internal);
    if (!memcmp(&of.id, &none, sizeof none))
        return fcdp__fail(
            FCDP_ERR_PEER,
            "rank %u of the shard group made no NCCL id for the lane %s; its own message says why", leader,
            lane_names[number]);
    fcdp_status status = fcdp__driver_with_context(t->drv, comm_init, &of);
    return status ? status : of.status;
}

/* ---- the first all-gathers ----
 *
 * NCCL connects members when it first takes an algorithm, and the host waits for that, and device memory goes
 * to it. Which one it takes depends on the size. So all-gathers of all sizes are done here, and one of
 * all_gather's other form, by sends and receives; and no training step waits for a peer's host. What came is
 * compared with what was sent, before anything relies on it. */

typedef struct probe {
    fcdp_nccl_transport *t;
    fcdp_stream stream;
    fcdp_dptr at; /* whole pages */
    size_t bytes;
    fcdp_phys pages;
    int n_made;    /* of the steps of lanes_probe */
    uint8_t *host; /* what goes to the pages, and what comes from them */
} probe;

/* Each step that was made, backwards. Nothing of it is on the stream any more. */
static void probe_free(probe *p) {
    fcdp_driver *drv = p->t->drv;
    fcdp_status status = FCDP_OK;
    if (p->n_made > 3) fcdp__driver_stream_destroy(drv, p->stream);
    if (p->n_made > 2) status = fcdp__driver_unmap(drv, p->at, p->bytes);
    if (p->n_made > 1 && !status) status = fcdp__driver_phys_release(drv, p->pages);
    if (p->n_made > 0 && !status) status = fcdp__driver_range_free(drv, p->at, p->bytes);
    if (status) fcdp__log(FCDP_LOG_DEBUG, "%s", fcdp_error_text());
    free(p->host);
}

/* Not by a synchronise, which would have no end without a peer. */
static fcdp_status stream_await(probe *p, const nccl_lane *lane) {
    fcdp_nccl_transport *t = p->t;
    uint64_t begin_ns = fcdp__now_ns();
    for (unsigned n = 0;; n++) {
        fcdp_status status = fcdp__driver_stream_query(t->drv, p->stream);
        if (status != FCDP_PENDING) return status;
        status = check(t);
        if (status) return status;
        uint64_t now_ns = fcdp__now_ns();
        if (now_ns > wait_ends_ns(t))
            return fcdp__fail(FCDP_ERR_TIMEOUT,
                              "the first all-gather (%s, member %u of %u) has not ended after %.1f s "
                              "(FCDP_TIMEOUT=%g): the "
                              "network does not carry it; NCCL_DEBUG=INFO shows what NCCL has chosen",
                              lane->name, lane->place, lane->size, (double)(now_ns - begin_ns) / 1e9,
                              t->timeout_s);
        poll_pause(n);
    }
}

static uint8_t *probe_place(const probe *p, const fcdp_part *part, uint32_t member) {
    return p->host + (part->at.addr - p->at.addr) + member * part->stride_bytes;
}

/* All members bring the number of their place, and one more. */
static fcdp_status parts_probe(probe *p, int number, const fcdp_part *parts, int n, size_t bytes) {
    fcdp_nccl_transport *t = p->t;
    const nccl_lane *lane = &t->lanes[number];
    memset(p->host, 0, bytes);
    for (int i = 0; i < n; i++)
        memset(probe_place(p, &parts[i], lane->place), (uint8_t)(lane->place + 1), parts[i].bytes);
    fcdp_status status = fcdp__driver_copy_h2d(t->drv, p->at, p->host, bytes, p->stream);
    if (!status) status = lane_gather(t, (fcdp_lane)number, parts, (size_t)n, p->stream);
    if (!status) status = stream_await(p, lane);
    if (!status) status = fcdp__driver_copy_d2h(t->drv, p->host, p->at, bytes, p->stream);
    if (!status) status = fcdp__driver_stream_sync(t->drv, p->stream);
    if (status) return status;
    for (int i = 0; i < n; i++)
        for (uint32_t member = 0; member < lane->size; member++) {
            const uint8_t *came = probe_place(p, &parts[i], member);
            for (size_t k = 0; k < parts[i].bytes; k++)
                if (came[k] != (uint8_t)(member + 1))
                    return fcdp__fail(FCDP_ERR_TRANSPORT,
                                      "the first all-gather (%s, member %u of %u) brought %u from member %u, "
                                      "not %u: NCCL %d "
                                      "does not carry bytes right here; FCDP cannot use it",
                                      lane->name, lane->place, lane->size, came[k], member,
                                      (uint8_t)(member + 1), t->nccl.version);
        }
    return FCDP_OK;
}

/* In both forms: members side by side, and with a gap each behind them. Then ever larger ones. */
static fcdp_status lane_probe(probe *p, int number) {
    uint32_t size = p->t->lanes[number].size;
    if (size == 1) return FCDP_OK;
    const fcdp_part forms[] = {
        {p->at, PROBE_BYTES, PROBE_BYTES},
        {fcdp__dptr_add(p->at, (size_t)size * PROBE_BYTES), PROBE_BYTES, 2 * PROBE_BYTES}};
    if ((size_t)3 * size * PROBE_BYTES > p->bytes)
        return fcdp__fail(FCDP_ERR_UNSUPPORTED, "a lane of %u members", size);
    fcdp_status status = parts_probe(p, number, forms, 2, (size_t)3 * size * PROBE_BYTES);
    for (size_t bytes = PROBE_STEP * PROBE_BYTES; size * bytes <= fcdp__nccl_probe_bytes && !status;
         bytes *= PROBE_STEP)
        status = parts_probe(p, number, &(fcdp_part){p->at, bytes, bytes}, 1, size * bytes);
    return status;
}

/* After a failure the stream ends with the abort; where that takes too long, what it uses stays. */
static fcdp_status lanes_probe(fcdp_nccl_transport *t) {
    fcdp_driver *drv = t->drv;
    size_t page_bytes = fcdp__driver_page_bytes(drv);
    probe p = {.t = t, .bytes = fcdp__round_up(fcdp__nccl_probe_bytes, page_bytes)};
    p.host = malloc(p.bytes);
    fcdp_status status = p.host ? fcdp__driver_range_reserve(drv, p.bytes, &p.at)
                                : fcdp__fail(FCDP_ERR_SYSTEM, "no memory to try NCCL's communicators");
    if (!status) p.n_made++, status = fcdp__driver_phys_create(drv, p.bytes, &p.pages);
    if (!status) p.n_made++, status = fcdp__driver_map(drv, p.at, p.bytes, p.pages);
    if (!status) p.n_made++, status = fcdp__driver_set_access(drv, p.at, p.bytes);
    if (!status) status = fcdp__driver_stream_create(drv, &p.stream);
    if (!status) p.n_made++;
    for (int lane = 0; lane < FCDP_N_LANES && !status; lane++) status = lane_probe(&p, lane);
    if (!status) {
        probe_free(&p);
        return FCDP_OK;
    }
    fcdp_failure error = fcdp__failure_keep(status);
    lanes_abort(t, error.text);
    if (abort_await(t) && (p.n_made < 4 || !fcdp__driver_stream_sync(t->drv, p.stream))) probe_free(&p);
    return fcdp__failure_restore(&error);
}

/* ---- a transport ---- */

/* What was made before a failure is aborted, so that no peer waits for this rank. */
fcdp_status fcdp__nccl_create(const fcdp_nccl_config *config, fcdp_nccl_transport **transport_out) {
    if (config->nccl->is_double != fcdp__driver_is_sim(config->drv))
        return fcdp__fail(FCDP_ERR_UNSUPPORTED,
                          "NCCL moves the memory of GPUs alone, and the model is on the CPU");
    fcdp_nccl_transport *t = calloc(1, sizeof *t);
    if (!t) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for NCCL's communicators");
    t->nccl = *config->nccl;
    t->drv = config->drv;
    t->context = fcdp__driver_context(config->drv);
    t->timeout_s = config->timeout_s;
    t->made_by_ns = share_ends_ns(t, 0.5);
    pthread_mutex_init(&t->mutex, NULL);
    fcdp__condition_init(&t->changed);
    fcdp_status status = FCDP_OK;
    for (int lane = 0; lane < FCDP_N_LANES && !status; lane++) status = lane_make(t, config, lane);
    if (!status) status = lanes_probe(t);
    if (!status) {
        t->made_by_ns = 0;
        *transport_out = t;
        return FCDP_OK;
    }
    fcdp_failure error = fcdp__failure_keep(status);
    lanes_abort(t, error.text);
    fcdp__nccl_destroy(t);
    return fcdp__failure_restore(&error);
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

/* What NCCL has not given back by then stays allocated: its threads may still use it. */
void fcdp__nccl_destroy(fcdp_nccl_transport *t) {
    if (!t) return;
    fcdp_status status = FCDP_OK;
    bool aborted = atomic_load(&t->aborted);
    for (int lane = 0; lane < FCDP_N_LANES && !aborted && !status; lane++) {
        init of = {.lane = &t->lanes[lane]};
        if (!of.lane->comm) continue;
        status = fcdp__driver_with_context(t->drv, comm_finalize, &of);
        if (!status) status = of.status;
    }
    if (status) lanes_abort(t, fcdp_error_text());
    if (!abort_await(t)) {
        fcdp__log(FCDP_LOG_WARN,
                  "NCCL's communicators have not been aborted after %.1f s; they stay until the process ends",
                  abort_wait_s(t));
        return;
    }
    pthread_cond_destroy(&t->changed);
    pthread_mutex_destroy(&t->mutex);
    free(t);
}
