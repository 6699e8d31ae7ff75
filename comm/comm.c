/* comm.c - one shard group: its transport, its ranks' host memory, its agreements, its failure.
 *
 * The collectives and agreements of a shard group pass here, so that they are checked, counted and traced in
 * one place. A failure is latched, not handled: a rank that has missed one collective can never join the
 * next, so the first failure ends all waits of the group's streams, tells the peers, and is what every later
 * call returns. No collective is tried again.
 */
#include "comm/comm.h"

#include <stdlib.h>
#include <unistd.h>

#include "comm/trace.h"

/* Any thread; during a collective, which is after the host memory is there. */
static void node_warn(void *arg) {
    const fcdp_comm *comm = arg;
    if (comm->host) fcdp__host_fail(comm->host);
}

static void copies_warn(const fcdp_comm *comm) {
    static atomic_bool said;
    bool wanted = comm->engine->options.host_copies == FCDP_HOST_COPIES_NUMA;
    if (wanted && fcdp__comm_by_slice(comm) && comm->topology.rank == 0 && !atomic_exchange(&said, true))
        fcdp__log(FCDP_LOG_WARN, "FCDP_HOST_COPIES=numa changes nothing: each rank restores its slice, which "
                                 "one copy has in the rank's NUMA node (FCDP_RESTORE)");
}

fcdp_status fcdp_comm_create(fcdp_engine *engine, const fcdp_topology *topology,
                             const fcdp_transport *transport, fcdp_comm **comm_out) {
    fcdp_status status = fcdp__engine_check_process(engine, "the engine");
    if (!status && !engine->account)
        status = fcdp__fail(FCDP_ERR_INVALID, "a comm needs the node's account first");
    if (status) return status;
    fcdp_comm *comm = calloc(1, sizeof *comm);
    if (!comm) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a comm");
    comm->engine = engine;
    comm->topology = *topology;
    comm->transport = *transport;
    comm->ahead = true;
    if (transport->on_failure) transport->on_failure(transport->ctx, node_warn, comm);
    fcdp__lock_acquire(&engine->lock);
    for (comm->set = engine->sets; comm->set->next; comm->set = comm->set->next) continue;
    comm->set->n_comms++;
    comm->next = engine->comms;
    engine->comms = comm;
    fcdp__lock_release(&engine->lock);
    fcdp__comm_trace(comm);
    *comm_out = comm;
    copies_warn(comm);
    fcdp__delta_warn(comm);
    fcdp__frozen_warn(comm);
    fcdp__spilled_warn(comm);
    return FCDP_OK;
}

void fcdp_comm_set_shard_group(fcdp_comm *comm, uint64_t shard_group) {
    comm->shard_group = shard_group;
}

void fcdp_comm_set_ahead(fcdp_comm *comm, bool ahead) {
    comm->ahead = ahead;
}

/* A failure that the monitor has not come to yet is told to the peers, which would wait. */
void fcdp_comm_destroy(fcdp_comm *comm) {
    if (!comm || comm->engine->pid != getpid()) return;
    fcdp_status status = fcdp_comm_check(comm);
    if (status) (void)!fcdp__comm_fail(comm, status);
    while (comm->groups) fcdp_group_destroy(comm->groups);
    fcdp_engine *engine = comm->engine;
    if (comm->transport.on_failure) comm->transport.on_failure(comm->transport.ctx, NULL, NULL);
    fcdp__lock_acquire(&engine->lock);
    fcdp_comm **link = &engine->comms;
    while (*link != comm) link = &(*link)->next;
    *link = comm->next;
    comm->set->n_comms--;
    fcdp__lock_release(&engine->lock);
    fcdp__fingerprints_destroy(comm->fingerprints);
    fcdp__deltas_free(comm);
    fcdp__host_destroy(comm->host);
    if (comm->transport.destroy) comm->transport.destroy(comm->transport.ctx);
    free(comm);
}

/* ---- all-gather ---- */

typedef struct sent {
    const fcdp_group *group; /* NULL: of several */
    fcdp_lane lane;
    uint64_t gathered, restored; /* bytes */
    bool gathers;
} sent;

/* The lane's turn comes before the span, not within: it is the one before that takes so long. */
fcdp_trace_span fcdp__comm_span_begin(const fcdp_stream_set *set, fcdp_lane lane, fcdp_stream stream) {
    const fcdp_engine *engine = set->engine;
    fcdp_trace_spans *spans = fcdp__tiering_spans(engine->tiering);
    uint32_t track = lane == FCDP_LANE_NODE                        ? FCDP_TRACK_NODE
                     : stream == set->streams[FCDP_STREAM_INTER_0] ? FCDP_TRACK_INTER_0
                                                                   : FCDP_TRACK_INTER_1;
    if (spans) (void)!fcdp__driver_timer_wait(engine->drv, stream, set->turn[lane]);
    return fcdp__trace_span_begin(spans, stream, track);
}

/* One collective that carries both is one span, of two events. */
static void span_end(const fcdp_engine *engine, fcdp_trace_span span, fcdp_stream stream, const sent *of) {
    fcdp_trace_event events[2];
    size_t n = 0;
    bool within = of->lane == FCDP_LANE_NODE;
    uint32_t object = fcdp__group_object(of->group);
    if (of->gathers)
        events[n++] = (fcdp_trace_event){.kind = FCDP_EVENT_GATHER,
                                         .object = object,
                                         .bytes = of->gathered,
                                         .a = within ? 0 : of->gathered,
                                         .b = within ? of->gathered : 0};
    if (!of->gathers || of->restored)
        events[n++] = (fcdp_trace_event){
            .kind = FCDP_EVENT_RESTORE, .object = object, .bytes = of->restored, .b = of->restored};
    fcdp__trace_span_end(fcdp__tiering_spans(engine->tiering), span, stream, events, n);
}

/* Bytes are counted as the plan's: what a ring or a direct exchange sends, whatever the transport does. */
fcdp_status fcdp__comm_all_gather(fcdp_comm *comm, const fcdp_group *group, fcdp_lane lane,
                                  const fcdp_part *parts, size_t n, size_t n_restored, fcdp_stream stream) {
    fcdp_engine *engine = comm->engine;
    const fcdp_topology *topology = &comm->topology;
    uint64_t bytes[2] = {0};
    fcdp_trace_span span = fcdp__comm_span_begin(comm->set, lane, stream);
    fcdp_status status = comm->transport.all_gather(comm->transport.ctx, lane, parts, n, stream,
                                                    comm->set->turn[lane]);
    if (status) {
        fcdp__trace_span_drop(fcdp__tiering_spans(engine->tiering), span);
        return status;
    }
    for (size_t i = 0; i < n; i++) bytes[i < n_restored] += parts[i].bytes;
    for (size_t i = 0; i < 2; i++)
        bytes[i] *= (lane == FCDP_LANE_NODE ? topology->node_size : topology->n_nodes) - 1;
    bool gathers = n > n_restored;
    span_end(engine, span, stream, &(sent){group, lane, bytes[0], bytes[1], gathers});
    fcdp__count(&engine->counts, gathers ? FCDP_COUNT_GATHER_CALLS : FCDP_COUNT_RESTORE_CALLS, 1);
    fcdp__count(&engine->counts,
                lane == FCDP_LANE_NODE ? FCDP_COUNT_GATHER_INTRA_BYTES : FCDP_COUNT_GATHER_INTER_BYTES,
                bytes[0]);
    fcdp__count(&engine->counts, FCDP_COUNT_RESTORE_INTRA_BYTES, bytes[1]);
    return FCDP_OK;
}

/* ---- fingerprints ---- */

/* What the driver cannot do, or the caller did wrong, leaves the comm as it is; after anything else
 * this rank takes part in no agreement, and its peers are told, which may be waiting on their hosts for
 * a collective that it will not begin. */
static fcdp_status fingerprint_failed(fcdp_comm *comm, fcdp_status status) {
    if (status == FCDP_ERR_UNSUPPORTED || status == FCDP_ERR_INVALID) return status;
    return fcdp__comm_fail(comm, fcdp__fail(status, "fingerprints of the shards: %s", fcdp_error_text()));
}

/* One kernel for all batches: the agreement's has it, which comes first. */
fcdp_status fcdp__comm_fingerprint_begin(fcdp_comm *comm, fcdp_fingerprints **batch, const uint64_t *shards,
                                         const size_t *shard_bytes, size_t n, fcdp_stream stream) {
    fcdp_status status = fcdp__engine_check_process(comm->engine, "the engine");
    if (!status)
        status = fcdp__engine_check_capture(comm->engine, stream, "compared with what was gathered",
                                            "a parameter");
    if (!status && !comm->fingerprints)
        status = fcdp__fingerprints_create(comm->engine->drv, &comm->fingerprints);
    if (!status && !*batch) status = fcdp__fingerprints_create_beside(comm->fingerprints, batch);
    if (!status) status = fcdp__fingerprints_begin(*batch, shards, shard_bytes, n, stream);
    return status ? fingerprint_failed(comm, status) : FCDP_OK;
}

fcdp_status fcdp_comm_fingerprint_begin(fcdp_comm *comm, const uint64_t *shards, const size_t *shard_bytes,
                                        size_t n, fcdp_stream stream) {
    return fcdp__comm_fingerprint_begin(comm, &comm->fingerprints, shards, shard_bytes, n, stream);
}

fcdp_status fcdp_comm_fingerprint_end(fcdp_comm *comm, uint64_t *fingerprints_out) {
    return fcdp__comm_fingerprint_end(comm, comm->fingerprints, fingerprints_out);
}

fcdp_status fcdp__comm_fingerprint_end(fcdp_comm *comm, fcdp_fingerprints *batch,
                                       uint64_t *fingerprints_out) {
    fcdp_status status = fcdp__engine_check_process(comm->engine, "the engine");
    if (!status && !batch)
        status = fcdp__fail(FCDP_ERR_INVALID, "no fingerprints have begun that could be waited for");
    uint64_t start_ns = fcdp__trace_start();
    if (!status) status = fcdp__fingerprints_end(batch, fingerprints_out);
    fcdp__host_wait_trace(start_ns, FCDP_CAUSE_FOR_FINGERPRINT);
    if (status) return fingerprint_failed(comm, status);
    status = fcdp_comm_check(comm); /* after the wait, which may have ended because of it */
    return status ? fcdp__comm_fail(comm, status) : FCDP_OK;
}

/* ---- host memory ---- */

static fcdp_host_config host_config(const fcdp_comm *comm) {
    fcdp_engine *engine = comm->engine;
    return (fcdp_host_config){
        .drv = engine->drv,
        .account = engine->account,
        .numa_node = engine->numa.memory_node,
        .counts = &engine->counts,
        .pin = engine->options.pin,
        .per_numa_node = engine->options.host_copies == FCDP_HOST_COPIES_NUMA && !fcdp__comm_by_slice(comm),
        .slice = comm->topology.local,
        .n_slices = comm->topology.node_size,
        .timeout_s = engine->options.timeout_s,
    };
}

static fcdp_status host_check(const fcdp_comm *comm) {
    fcdp_status status = fcdp__engine_check_process(comm->engine, "the shard group");
    if (!status && comm->host)
        status = fcdp__fail(FCDP_ERR_INVALID, "the shard group has its host memory already");
    return status;
}

/* Under the lock: the monitor looks at it. */
static void host_set(fcdp_comm *comm, fcdp_host *host) {
    fcdp__lock_acquire(&comm->engine->lock);
    comm->host = host;
    comm->ballots = (fcdp_ballots){.meeting = fcdp__host_meeting(host),
                                   .topology = comm->topology,
                                   .timeout_s = comm->engine->options.timeout_s};
    fcdp__lock_release(&comm->engine->lock);
}

fcdp_status fcdp_comm_host_create(fcdp_comm *comm, fcdp_shared_ticket *ticket_out) {
    fcdp_host_config config = host_config(comm);
    fcdp_host *host;
    fcdp_status status = host_check(comm);
    if (!status) status = fcdp__host_create(&config, &host, ticket_out);
    if (!status) host_set(comm, host);
    return status;
}

fcdp_status fcdp_comm_host_join(fcdp_comm *comm, const fcdp_shared_ticket *ticket) {
    fcdp_host_config config = host_config(comm);
    fcdp_host *host;
    fcdp_status status = host_check(comm);
    if (!status) status = fcdp__host_join(&config, ticket, &host);
    if (!status) host_set(comm, host);
    return status;
}

/* ---- agreements ---- */

/* A board knows slices, and no ranks. */
fcdp_status fcdp_comm_agree(fcdp_comm *comm, const fcdp_carrier *carrier, uint64_t number, uint8_t *votes,
                            size_t n, uint64_t *sent_bytes_out) {
    uint64_t before = comm->ballots.sent_bytes;
    *sent_bytes_out = 0;
    fcdp_status status = fcdp__engine_check_process(comm->engine, "the shard group");
    if (!status && !comm->host)
        status = fcdp__fail(FCDP_ERR_INVALID, "an agreement needs the shard group's host memory first");
    if (status) return status;
    status = fcdp__ballots_agree(&comm->ballots, carrier, number, votes, n);
    *sent_bytes_out = comm->ballots.sent_bytes - before;
    if (status == FCDP_ERR_TIMEOUT || status == FCDP_ERR_PEER)
        return fcdp__fail(status, "%s; slice 0 is rank %u", fcdp_error_text(),
                          comm->topology.rank - comm->topology.local);
    return status;
}

/* ---- failures ---- */

/* The peers on this node learn of it before anything that they wait for opens: a peer that finds it open
 * looks there next. Waits are opened each time: a call that was under way may have enqueued another one. Out
 * of memory is what a program tries again with less; this is for good. */
void fcdp__comm_fail_locked(fcdp_comm *comm, fcdp_status status) {
    if (status == FCDP_ERR_NO_DEVICE_MEM) status = FCDP_ERR_SYSTEM;
    if (!atomic_load_explicit(&comm->failed, memory_order_relaxed)) {
        comm->failure = fcdp__failure_keep(status);
        atomic_store_explicit(&comm->failed, true, memory_order_release);
        fcdp__trace_now(FCDP_EVENT_FAIL, 0, 0, (uint64_t)-(int)status, 0);
        if (comm->host) fcdp__host_fail(comm->host);
        comm->transport.abort(comm->transport.ctx, comm->failure.text);
    }
    for (fcdp_group *group = comm->groups; group; group = group->next)
        if (group->region) fcdp__region_end_waits(group->region);
}

fcdp_status fcdp__comm_fail(fcdp_comm *comm, fcdp_status status) {
    fcdp__lock_acquire(&comm->engine->lock);
    fcdp__comm_fail_locked(comm, status);
    fcdp__lock_release(&comm->engine->lock);
    return fcdp__failure_restore(&comm->failure);
}

/* Takes no lock: engine.c calls it with the engine's. */
fcdp_status fcdp_comm_check(fcdp_comm *comm) {
    uint32_t slice;
    if (atomic_load_explicit(&comm->failed, memory_order_acquire))
        return fcdp__failure_restore(&comm->failure);
    fcdp_status status = comm->transport.check(comm->transport.ctx);
    if (status) return status;
    if (!comm->host || !fcdp__host_peer_failed(comm->host, &slice)) return FCDP_OK;
    return fcdp__fail(FCDP_ERR_PEER, "rank %u of this node has failed; its own message says why",
                      comm->topology.rank - comm->topology.local + slice);
}
