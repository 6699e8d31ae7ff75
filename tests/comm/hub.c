/* hub.c - a transport between the ranks of one process. One mutex for all lanes; bytes are copied
 * under it, so that a rank that aborts can take its memory away at once.
 */
#include "tests/comm/hub.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "comm/delta_exchange.h"
#include "sim/gpu/simgpu.h"

enum { GIVE_UP_S = 60 };

struct hub_call {
    hub_call *next; /* of the port: a device that failed runs none, so the port frees them */
    hub_port *port;
    hub_lane *lane;
    uint32_t me; /* on the lane */
    int fault;   /* hub_fault, -1: none */
    bool failed; /* guarded by the mutex: the round was not to be */
    size_t n, bytes;
    fcdp_part parts[];
};

static void lane_init(hub_lane *l, uint32_t n, uint32_t first, uint32_t step) {
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&l->changed, &attr);
    pthread_condattr_destroy(&attr);
    l->n = n;
    l->first = first;
    l->step = step;
}

void hub_init(hub *h, uint32_t n_nodes, uint32_t node_size) {
    pthread_mutex_init(&h->mutex, NULL);
    h->n_nodes = n_nodes;
    h->node_size = node_size;
    for (uint32_t i = 0; i < HUB_MAX_RANKS; i++) {
        pthread_barrier_init(&h->heads[i], NULL, node_size);
        lane_init(&h->inter[i], n_nodes, i, node_size);
        for (int k = 0; k < 2; k++) lane_init(&h->verdicts[k][i], n_nodes, i, node_size);
        lane_init(&h->node[i], node_size, i * node_size, 1);
    }
}

void hub_destroy(hub *h) {
    for (uint32_t i = 0; i < HUB_MAX_RANKS; i++) {
        pthread_barrier_destroy(&h->heads[i]);
        pthread_cond_destroy(&h->inter[i].changed);
        for (int k = 0; k < 2; k++) pthread_cond_destroy(&h->verdicts[k][i].changed);
        pthread_cond_destroy(&h->node[i].changed);
    }
    pthread_mutex_destroy(&h->mutex);
}

void hub_port_init(hub_port *port, hub *h, const fcdp_topology *topology, fcdp_driver *drv,
                   uint64_t (*place)(const void *owner, fcdp_dptr at), const void *owner) {
    *port = (hub_port){.hub = h, .topology = *topology, .drv = drv, .place = place, .owner = owner};
}

void hub_port_destroy(hub_port *port) {
    while (port->calls) {
        hub_call *call = port->calls;
        port->calls = call->next;
        free(call);
    }
    free(port->launches);
}

static hub_lane *lane_of(hub_port *port, fcdp_lane lane) {
    hub *h = port->hub;
    return lane == FCDP_LANE_NODE ? &h->node[port->topology.node] : &h->inter[port->topology.local];
}

/* ---- a round ---- */

/* With the mutex. */
static void port_fail(hub_port *port, fcdp_status status, const char *text) {
    if (port->failure) return;
    port->failure = status;
    snprintf(port->text, sizeof port->text, "%s", text);
    if (port->failed) port->failed(port->failed_arg);
}

static bool calls_agree(const hub_call *a, const hub_call *b) {
    bool agree = a->n == b->n && a->bytes == b->bytes;
    for (size_t i = 0; agree && i < a->n; i++)
        agree = a->parts[i].bytes == b->parts[i].bytes &&
                a->parts[i].stride_bytes == b->parts[i].stride_bytes;
    return agree;
}

static void parts_copy(hub_call *const *calls, uint32_t n) {
    for (uint32_t to = 0; to < n; to++)
        for (uint32_t from = 0; from < n; from++)
            for (size_t i = 0; i < calls[to]->n && from != to; i++) {
                const fcdp_part *target = &calls[to]->parts[i], *source = &calls[from]->parts[i];
                size_t offset = from * target->stride_bytes;
                memcpy((char *)target->at.addr + offset, (char *)source->at.addr + offset, target->bytes);
            }
}

/* All have arrived. With the mutex. */
static void round_complete(hub_lane *l) {
    bool fails = false, agree = true;
    for (uint32_t i = 0; i < l->n; i++) {
        agree = agree && calls_agree(l->calls[0], l->calls[i]);
        fails = fails || l->calls[i]->fault == HUB_FAILS_EVERYWHERE;
    }
    if (!agree) atomic_store(&l->calls[0]->port->hub->disagrees, true);
    if (agree && !fails) parts_copy(l->calls, l->n);
    for (uint32_t i = 0; i < l->n; i++) l->calls[i]->failed = fails || !agree;
    memset(l->arrived, 0, sizeof l->arrived);
    l->n_arrived = 0;
    l->round++;
    pthread_cond_broadcast(&l->changed);
}

static bool is_hopeless(const hub_call *call) {
    return call->port->aborted || call->lane->broken;
}

/* Until the round is over, or hopeless. With the mutex. */
static void round_wait(hub_call *call, uint64_t round) {
    hub_lane *l = call->lane;
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += GIVE_UP_S;
    while (l->round == round && !is_hopeless(call))
        if (pthread_cond_timedwait(&l->changed, &call->port->hub->mutex, &until) == ETIMEDOUT) {
            atomic_store(&call->port->hub->gave_up, true);
            return;
        }
}

/* With the mutex. */
static void round_run(hub_call *call) {
    hub_lane *l = call->lane;
    uint64_t round = l->round;
    if (call->fault == HUB_STALLS)
        round_wait(call, round); /* the others cannot complete it without this rank */
    if (is_hopeless(call) || call->fault == HUB_STALLS) {
        port_fail(call->port, FCDP_ERR_PEER, "a peer has given up");
        return;
    }
    l->calls[call->me] = call;
    l->arrived[call->me] = true;
    if (++l->n_arrived == l->n)
        round_complete(l);
    else
        round_wait(call, round);
    if (l->round == round) { /* it leaves as it came */
        l->n_arrived--;
        l->arrived[call->me] = false;
        port_fail(call->port, FCDP_ERR_PEER, "a peer has given up");
    } else if (call->failed) {
        port_fail(call->port, FCDP_ERR_TRANSPORT, "the test's fault: no rank got a byte");
    } else if (call->fault == HUB_FAILS_HERE) {
        port_fail(call->port, FCDP_ERR_TRANSPORT, "the test's fault: it failed here alone");
    }
}

/* On the stream's thread. */
static void call_run(void *context) {
    hub_call *call = context;
    hub *h = call->port->hub;
    pthread_mutex_lock(&h->mutex);
    call->lane->entered[call->me] = true;
    round_run(call);
    call->lane->entered[call->me] = false;
    pthread_mutex_unlock(&h->mutex);
}

/* ---- the table ---- */

/* What the call reads and writes, for simgpu's checks: a host function can say eight ranges, so kernels of no
 * duration before it say the rest. */
static void accesses_say(const hub_call *call, uint32_t n, fcdp_stream stream) {
    struct simgpu_kernel touch = {.name = "all-gather"};
    for (size_t i = 0; i < call->n; i++)
        for (uint32_t m = 0; m < n; m++) {
            if (touch.n_accesses == SIMGPU_MAX_ACCESSES) {
                (void)simgpu_launch(stream, &touch);
                touch.n_accesses = 0;
            }
            touch.accesses[touch.n_accesses++] = (struct simgpu_access){call->parts[i].at.addr +
                                                                            m * call->parts[i].stride_bytes,
                                                                        call->parts[i].bytes, m != call->me};
        }
    (void)simgpu_announce(touch.accesses, touch.n_accesses);
    simgpu_stand_in();
}

static void launch_note(hub_call *call, fcdp_lane lane) {
    hub_port *port = call->port;
    size_t n = port->n_launches++;
    if ((n & (n - 1)) == 0) port->launches = realloc(port->launches, (2 * n + 1) * sizeof *port->launches);
    port->launches[n] = (hub_launch){lane, call->n, call->bytes, port->place(port->owner, call->parts[0].at)};
}

static hub_call *call_make(hub_port *port, fcdp_lane lane, const fcdp_part *parts, size_t n) {
    hub_call *call = calloc(1, sizeof *call + n * sizeof *parts);
    *call = (hub_call){.port = port, .lane = lane_of(port, lane), .n = n, .fault = -1, .next = port->calls};
    call->me = lane == FCDP_LANE_NODE ? port->topology.local : port->topology.node;
    memcpy(call->parts, parts, n * sizeof *parts);
    for (size_t i = 0; i < n; i++) call->bytes += parts[i].bytes;
    port->calls = call;
    return call;
}

static fcdp_status hub_all_gather(void *ctx, fcdp_lane lane, const fcdp_part *parts, size_t n,
                                  fcdp_stream stream, fcdp_event turn) {
    hub_port *port = ctx;
    hub *h = port->hub;
    bool fails = atomic_fetch_add(&h->n_calls, 1) + 1 == atomic_load(&h->fail_at);
    int fault = atomic_load(&h->fault);
    if (fails && fault == HUB_REFUSED)
        return fcdp__fail(FCDP_ERR_TRANSPORT, "the test's fault: the call is refused");
    hub_call *call = call_make(port, lane, parts, n);
    if (fails) call->fault = fault;
    fcdp_status status = fcdp__driver_stream_wait(port->drv, stream, turn);
    if (status) return status;
    accesses_say(call, call->lane->n, stream);
    status = fcdp__driver_host_function(port->drv, stream, call_run, call);
    if (!status) status = fcdp__driver_event_record(port->drv, turn, stream);
    if (status) return status;
    launch_note(call, lane);
    if (lane != FCDP_LANE_NODE) atomic_fetch_add(&h->inter_bytes_sent, (h->n_nodes - 1) * call->bytes);
    return FCDP_OK;
}

static fcdp_status hub_check(void *ctx) {
    hub_port *port = ctx;
    pthread_mutex_lock(&port->hub->mutex);
    fcdp_status status = port->failure;
    if (status) status = fcdp__fail(status, "%s", port->text);
    pthread_mutex_unlock(&port->hub->mutex);
    return status;
}

/* One byte that other members sent, of a call of more than heads or verdicts (delta_exchange.c). With the
 * mutex. */
static void exchange_spoil(const hub_call *call) {
    hub *h = call->port->hub;
    uint8_t *buffer = (uint8_t *)(uintptr_t)call->parts[0].at.addr; /* NOLINT(performance-no-int-to-ptr) */
    if (call->bytes <= 64 || atomic_fetch_add(&h->n_exchanges, 1) + 1 != atomic_load(&h->spoil_at)) return;
    size_t at = h->spoil_byte % ((call->lane->n - 1) * call->bytes);
    buffer[at < call->me * call->bytes ? at : at + call->bytes] ^= 0x10;
}

/* On the stream's thread, or a worker's. */
static fcdp_status hub_exchange(void *ctx, fcdp_channel channel, void *buffer, size_t bytes) {
    hub_port *port = ctx;
    hub *h = port->hub;
    fcdp_status failed = hub_check(port);
    if (failed) return failed;
    bool fails = atomic_fetch_add(&h->n_calls, 1) + 1 == atomic_load(&h->fail_at);
    hub_call *call = calloc(1, sizeof *call + sizeof *call->parts);
    *call = (hub_call){.port = port, .n = 1, .bytes = bytes, .fault = -1, .me = port->topology.node};
    call->lane = channel == FCDP_CHANNEL_TURN
                     ? lane_of(port, FCDP_LANE_INTER)
                     : &h->verdicts[channel - FCDP_CHANNEL_VERDICT_0][port->topology.local];
    call->parts[0] = (fcdp_part){{(uintptr_t)buffer}, bytes, bytes};
    if (fails) call->fault = atomic_load(&h->fault);
    if (call->fault == HUB_REFUSED) call->fault = HUB_FAILS_EVERYWHERE; /* the others have begun it */
    if (h->abreast && bytes == sizeof(fcdp_delta_head)) pthread_barrier_wait(&h->heads[port->topology.node]);
    call_run(call);
    atomic_fetch_add(&h->inter_bytes_sent, (h->n_nodes - 1) * bytes);
    pthread_mutex_lock(&h->mutex);
    if (!port->failure) exchange_spoil(call);
    pthread_mutex_unlock(&h->mutex);
    free(call);
    return hub_check(port);
}

/* With the mutex. */
static void lanes_break(hub_port *port) {
    hub_lane *const lanes[] = {lane_of(port, FCDP_LANE_INTER), lane_of(port, FCDP_LANE_NODE),
                               &port->hub->verdicts[0][port->topology.local],
                               &port->hub->verdicts[1][port->topology.local]};
    for (size_t i = 0; i < sizeof lanes / sizeof *lanes; i++) {
        hub_lane *l = lanes[i];
        l->broken = l->broken || !port->hub->silent;
        pthread_cond_broadcast(&l->changed);
    }
}

static void hub_abort(void *ctx, const char *why) {
    hub_port *port = ctx;
    pthread_mutex_lock(&port->hub->mutex);
    port->aborted = true;
    port_fail(port, FCDP_ERR_TRANSPORT, why);
    lanes_break(port);
    pthread_mutex_unlock(&port->hub->mutex);
}

void hub_port_exit(hub_port *port) {
    pthread_mutex_lock(&port->hub->mutex);
    lanes_break(port);
    pthread_mutex_unlock(&port->hub->mutex);
}

static bool hub_missing(void *ctx, char *text_out, size_t text_bytes) {
    hub_port *port = ctx;
    size_t at = 0;
    pthread_mutex_lock(&port->hub->mutex);
    for (int lane = 0; lane < FCDP_N_LANES; lane++) {
        const hub_lane *l = lane_of(port, (fcdp_lane)lane);
        if (!l->entered[lane == FCDP_LANE_NODE ? port->topology.local : port->topology.node]) continue;
        for (uint32_t i = 0; i < l->n && at < text_bytes; i++)
            if (!l->arrived[i])
                at += (size_t)snprintf(text_out + at, text_bytes - at, "%srank %u", at ? ", " : "",
                                       l->first + i * l->step);
    }
    pthread_mutex_unlock(&port->hub->mutex);
    return at > 0;
}

static void hub_on_failure(void *ctx, void (*failed)(void *arg), void *arg) {
    hub_port *port = ctx;
    pthread_mutex_lock(&port->hub->mutex);
    port->failed = failed;
    port->failed_arg = arg;
    pthread_mutex_unlock(&port->hub->mutex);
}

fcdp_transport hub_transport(hub_port *port) {
    return (fcdp_transport){.ctx = port,
                            .all_gather = hub_all_gather,
                            .exchange = hub_exchange,
                            .all_channels = true,
                            .check = hub_check,
                            .abort = hub_abort,
                            .missing = hub_missing,
                            .on_failure = hub_on_failure};
}
