/* gather.c - what an unshard and a reshard put on the streams.
 *
 * Order within one use, each arrow an event (or, between the processes of a node, a word):
 *
 *     caller's stream: written -> inter: own shards, all-gather between nodes -> crossed
 *     through host memory: crossed -> d2h: put own shards, words
 *                          h2d: take the others' once their words have come -> loaded
 *     by slices:           crossed, loaded -> node: all-gather within the node -> gathered
 *                          gathered -> d2h: put own slices, words
 *     (a restore: h2d: load -> loaded)
 *     the last of these streams, behind all of the others: ready -> caller's stream: compute -> used
 *
 * The compute waits for the put too: it may write into what it is given, and the host's copy must be what was
 * gathered. Without device pages nothing has happened, here or on all ranks. Once it has them, a rank that
 * fails has missed what its peers take part in: the comm has failed.
 */
#include <stdlib.h>
#include <string.h>

#include "comm/internal.h"
#include "tiering/policy.h"

typedef struct use { /* of one begin */
    fcdp_group *group;
    fcdp_plan *plan;
    const uint64_t *inputs;
    fcdp_stream last; /* behind everything */
    bool collects;    /* the restore is one of all ranks of the node: by slices */
    /* and its slices are all-gathered with the gather's blocks: one collective on the node's lane */
    bool joined;
} use;

static fcdp_engine *engine_of(const fcdp_group *group) {
    return group->comm->engine;
}

/* Slices spare the PCIe link and use what joins the GPUs, if the transport does; through host functions they
 * could wait in a circle, on a real device (transport.h). */
bool fcdp__group_by_slice(const fcdp_group *group) {
    const fcdp_engine *engine = engine_of(group);
    bool may_wait = group->comm->transport.through_host && !fcdp__driver_is_sim(engine->drv);
    return engine->options.restore != FCDP_RESTORE_WHOLE && !may_wait && group->comm->topology.node_size > 1;
}

static bool is_alone(const fcdp_group *group) {
    return group->comm->topology.node_size == 1;
}

static fcdp_stream h2d_of(const fcdp_group *group) {
    return fcdp__tiering_stream(engine_of(group)->tiering, FCDP_TO_DEVICE);
}

static fcdp_status stream_wait(const fcdp_group *group, fcdp_stream stream, fcdp_event event) {
    return fcdp__driver_stream_wait(engine_of(group)->drv, stream, event);
}

/* ---- collectives ---- */

/* Of the n parts the first n_restored are a restore's. A call that serves both counts as a gather's. */
static void count_call(fcdp_group *group, fcdp_lane lane, const fcdp_part *parts, size_t n,
                       size_t n_restored) {
    fcdp_engine *engine = engine_of(group);
    const fcdp_topology *topology = &group->comm->topology;
    uint64_t bytes[2] = {0};
    for (size_t i = 0; i < n; i++) bytes[i < n_restored] += parts[i].bytes;
    fcdp__lock_acquire(&engine->lock);
    fcdp_engine_stats *stats = &engine->stats;
    (n > n_restored ? &stats->gather : &stats->restore)->calls++;
    if (lane == FCDP_LANE_NODE) {
        stats->gather.intra_bytes_sent += (topology->node_size - 1) * bytes[0];
        stats->restore.intra_bytes_sent += (topology->node_size - 1) * bytes[1];
    } else {
        stats->gather.inter_bytes_sent += (topology->n_nodes - 1) * bytes[0];
    }
    fcdp__lock_release(&engine->lock);
}

static fcdp_status all_gather(use *u, fcdp_lane lane, const fcdp_part *parts, size_t n, size_t n_restored,
                              fcdp_stream stream) {
    fcdp_group *group = u->group;
    const fcdp_transport *transport = &group->comm->transport;
    fcdp_status status = transport->all_gather(transport->ctx, lane, parts, n, stream,
                                               engine_of(group)->turn[lane]);
    if (!status) count_call(group, lane, parts, n, n_restored);
    return status;
}

/* ---- the host's copy ---- */

/* The spans of `mask` that the host does not have this rank's pieces of. */
static uint32_t unstored(fcdp_group *group, uint32_t mask) {
    fcdp_region_state state;
    fcdp__region_state(group->region, &state);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (state.span[s].put || state.span[s].whole) mask &= ~(1u << s);
    return mask;
}

/* Spans that are on the device alone. */
static uint32_t dirty(fcdp_group *group) {
    fcdp_region_state state;
    uint32_t mask = 0;
    fcdp__region_state(group->region, &state);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (group->layout->span[s].bytes && state.span[s].on_device) mask |= 1u << s;
    return unstored(group, mask);
}

/* `whole_mask`: spans of which all of this rank's pieces are put, not those of the stale
 * extents alone. By slices each rank puts what it will load: few and long copies, and only they
 * need to be page-locked, near its device. */
static fcdp_status put(use *u, uint32_t span_mask, uint32_t whole_mask, fcdp_event after) {
    fcdp_group *group = u->group;
    const fcdp_topology *topology = &group->comm->topology;
    fcdp_piece *pieces = malloc(((size_t)group->layout->n_extents * topology->n_nodes + FCDP_N_SPANS) *
                                sizeof *pieces);
    if (!pieces) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory to store '%s'", group->name);
    size_t n = fcdp__group_by_slice(group)
                   ? fcdp__plan_put_slices(u->plan, whole_mask, group->layout, topology, pieces)
                   : fcdp__plan_put_pieces(u->plan, whole_mask, group->layout, topology, pieces);
    fcdp_status status = fcdp__region_put(group->region, span_mask, (fcdp_piece_list){pieces, n}, after);
    free(pieces);
    return status;
}

/* Without a gather: all of this rank's pieces of the spans in `mask`, as they are on the device. */
static fcdp_status put_now(fcdp_group *group, uint32_t mask) {
    use u = {.group = group};
    uint8_t *none = calloc(group->layout->n_extents + 1, 1);
    fcdp_status status = none ? fcdp__plan_make(group->layout, none, &u.plan)
                              : fcdp__fail(FCDP_ERR_SYSTEM, "no memory to store '%s'", group->name);
    free(none);
    if (status) return status;
    status = put(&u, mask, mask, fcdp__region_ready(group->region));
    fcdp__plan_destroy(u.plan);
    return status;
}

/* ---- restore ---- */

/* The others load once all words say that host memory is complete, and it has crossed there by shards of all
 * ranks where the group is small: so they need what this rank has kept to itself. */
static fcdp_status restore_puts(use *u) {
    uint32_t mask = dirty(u->group) & u->plan->restore_mask;
    return mask ? put_now(u->group, mask) : FCDP_OK;
}

/* This rank's slices to their places, the others' from the node's other ranks: here, or in the node step.
 * What this rank has on the device is in its place already. */
static fcdp_status restore_slices(use *u) {
    fcdp_group *group = u->group;
    fcdp_stream node = engine_of(group)->streams[FCDP_STREAM_NODE];
    fcdp_part parts[FCDP_N_SPANS];
    fcdp_region_state state;
    fcdp__region_state(group->region, &state);
    fcdp_status status = restore_puts(u);
    if (!status) status = fcdp__region_order(group->region, node);
    for (uint32_t s = 0; s < FCDP_N_SPANS && !status; s++)
        if (u->plan->restore_mask & 1u << s && !state.span[s].on_device)
            status = fcdp__region_load_slice(group->region, s);
    if (!status) status = stream_wait(group, node, fcdp__region_loaded(group->region));
    if (!status) status = stream_wait(group, node, fcdp__region_stored(group->region));
    u->last = u->joined ? h2d_of(group) : node;
    if (status || u->joined) return status;
    size_t n = fcdp__plan_slice_parts(u->plan->restore_mask, group->layout, &group->comm->topology,
                                      fcdp__region_base(group->region), parts);
    return all_gather(u, FCDP_LANE_NODE, parts, n, n, node);
}

/* From the node's host memory alone. */
static fcdp_status restore_alone(use *u) {
    fcdp_group *group = u->group;
    fcdp_region_state state;
    fcdp__region_state(group->region, &state);
    fcdp_status status = FCDP_OK;
    for (uint32_t s = 0; s < FCDP_N_SPANS && !status; s++)
        if (u->plan->restore_mask & 1u << s && !state.span[s].on_device)
            status = fcdp__region_load_whole(group->region, s);
    u->last = h2d_of(group);
    return status;
}

static fcdp_status restore(use *u) {
    fcdp_group *group = u->group;
    if (!u->plan->restore_mask) return FCDP_OK;
    fcdp_status status = fcdp__region_order(group->region, h2d_of(group));
    if (!status) status = u->collects ? restore_slices(u) : restore_alone(u);
    if (!status) status = fcdp__driver_event_record(engine_of(group)->drv, group->restored, u->last);
    return status ? fcdp__fail(status, "restoring '%s': %s", group->name, fcdp_error_text()) : FCDP_OK;
}

/* ---- gather ---- */

/* This rank's shards, from where the program has them to their places. */
static fcdp_status own_shards(const use *u, fcdp_stream inter) {
    const fcdp_group *group = u->group;
    const fcdp_topology *topology = &group->comm->topology;
    fcdp_status status = FCDP_OK;
    for (uint32_t k = 0; k < u->plan->n_stale && !status; k++) {
        uint32_t i = u->plan->stale[k];
        fcdp_piece place = fcdp__plan_shard(group->layout, topology, i, topology->node, topology->local);
        status = fcdp__driver_copy_d2d(engine_of(group)->drv,
                                       fcdp__dptr_add(fcdp__region_base(group->region), place.offset_bytes),
                                       (fcdp_dptr){u->inputs[i]}, place.bytes, inter);
    }
    return status;
}

static fcdp_status inter_step(use *u) {
    fcdp_group *group = u->group;
    fcdp_engine *engine = engine_of(group);
    fcdp_stream inter = engine->streams[group->comm->n_gathers++ % FCDP_N_INTER];
    fcdp_part *parts = malloc((u->plan->n_stale + 1) * sizeof *parts);
    if (!parts) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a gather of '%s'", group->name);
    fcdp_status status = fcdp__region_order(group->region, inter);
    if (!status) status = stream_wait(group, inter, group->written);
    if (!status && u->plan->restore_mask & u->plan->fill_mask)
        status = stream_wait(group, inter, group->restored);
    if (!status) status = own_shards(u, inter);
    size_t n = fcdp__plan_inter_parts(u->plan, group->layout, &group->comm->topology,
                                      fcdp__region_base(group->region), parts);
    if (!status) status = all_gather(u, FCDP_LANE_INTER, parts, n, 0, inter);
    if (!status) status = fcdp__driver_event_record(engine->drv, group->crossed, inter);
    free(parts);
    u->last = inter;
    return status ? fcdp__fail(status, "gathering '%s' between nodes: %s", group->name, fcdp_error_text())
                  : FCDP_OK;
}

static fcdp_status node_by_slice(use *u) {
    fcdp_group *group = u->group;
    const fcdp_topology *topology = &group->comm->topology;
    fcdp_dptr base = fcdp__region_base(group->region);
    fcdp_stream node = engine_of(group)->streams[FCDP_STREAM_NODE];
    fcdp_part *parts = malloc(((size_t)u->plan->n_stale * topology->n_nodes + FCDP_N_SPANS) * sizeof *parts);
    if (!parts) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a gather of '%s'", group->name);
    fcdp_status status = fcdp__region_order(group->region, node);
    if (!status) status = stream_wait(group, node, group->crossed);
    size_t n_restored = u->joined ? fcdp__plan_slice_parts(u->plan->restore_mask, group->layout, topology,
                                                           base, parts)
                                  : 0;
    size_t n = n_restored + fcdp__plan_node_parts(u->plan, group->layout, topology, base, parts + n_restored);
    if (!status) status = all_gather(u, FCDP_LANE_NODE, parts, n, n_restored, node);
    free(parts);
    u->last = node;
    return status;
}

static fcdp_status node_by_host(use *u) {
    fcdp_group *group = u->group;
    const fcdp_topology *topology = &group->comm->topology;
    fcdp_piece *pieces = malloc(((size_t)u->plan->n_stale * (topology->n_nodes + 1) + 1) * sizeof *pieces);
    if (!pieces) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a gather of '%s'", group->name);
    size_t n = fcdp__plan_take_pieces(u->plan, group->layout, topology, pieces);
    fcdp_status status = fcdp__region_order(group->region, h2d_of(group));
    /* A span that was restored is loaded before its stale parts are
     * written over: the copy stream's own order. */
    if (!status) status = fcdp__region_take(group->region, u->plan->fill_mask, (fcdp_piece_list){pieces, n});
    if (!status) status = stream_wait(group, h2d_of(group), group->crossed);
    free(pieces);
    u->last = h2d_of(group);
    return status;
}

static fcdp_status node_step(use *u) {
    if (is_alone(u->group)) return FCDP_OK;
    fcdp_status status = fcdp__group_by_slice(u->group) ? node_by_slice(u) : node_by_host(u);
    return status
               ? fcdp__fail(status, "gathering '%s' within the node: %s", u->group->name, fcdp_error_text())
               : FCDP_OK;
}

/* What follows waits on the copy stream: the node's stream goes on with the next group meanwhile. */
static fcdp_status put_gathered(use *u, uint32_t whole_mask) {
    fcdp_group *group = u->group;
    fcdp_engine *engine = engine_of(group);
    fcdp_status status = fcdp__driver_event_record(engine->drv, group->gathered, u->last);
    if (!status) status = put(u, u->plan->fill_mask, whole_mask, group->gathered);
    u->last = fcdp__tiering_stream(engine->tiering, FCDP_TO_HOST);
    return status;
}

static bool policy_keeps(const fcdp_group *group) {
    const fcdp_engine *engine = engine_of(group);
    if (engine->options.tau <= 0) return false; /* nor is anybody asked */
    size_t used_bytes = fcdp__pool_pages_in_use(engine->pool) * fcdp__driver_page_bytes(engine->drv);
    return fcdp__policy_keeps(engine->options.tau, used_bytes, fcdp__pool_room_bytes(engine->pool));
}

/* Where the group is expected to stay on the device, and its ranks meet there, the
 * host's copy can wait until it must go. */
static fcdp_status gather(use *u) {
    fcdp_group *group = u->group;
    if (u->plan->n_stale == 0) return FCDP_OK;
    /* Spans that it rewrites in part, and the host does not have. */
    uint32_t whole_mask = unstored(group, u->plan->restore_mask & u->plan->fill_mask);
    bool by_slice = fcdp__group_by_slice(group),
         puts = (!by_slice && !is_alone(group)) || !policy_keeps(group);
    fcdp_status status = fcdp__region_begin_fill(group->region, u->plan->fill_mask);
    if (!status) status = inter_step(u);
    if (!status && puts && !by_slice) status = put(u, u->plan->fill_mask, whole_mask, group->crossed);
    if (!status) status = node_step(u);
    if (!status && puts && by_slice) status = put_gathered(u, whole_mask);
    group->has_content = false;
    return status;
}

/* ---- begin ---- */

/* Behind everything, on the stream that ends last. */
static fcdp_status ready_record(use *u) {
    fcdp_group *group = u->group;
    fcdp_driver *drv = engine_of(group)->drv;
    if (!u->last) return FCDP_OK; /* nothing was enqueued: it is as ready as it was */
    fcdp_status status = FCDP_OK;
    if (u->plan->restore_mask) status = stream_wait(group, u->last, group->restored);
    if (!status && u->plan->n_stale) status = stream_wait(group, u->last, group->crossed);
    if (!status && u->plan->n_stale) status = stream_wait(group, u->last, fcdp__region_stored(group->region));
    if (!status) status = fcdp__driver_event_record(drv, fcdp__region_ready(group->region), u->last);
    return status;
}

void fcdp__group_accept(fcdp_group *group) {
    for (uint32_t i = 0; i < group->layout->n_extents; i++) {
        if (!group->stale[i]) continue;
        fcdp_observation observed = fcdp__validity_observed(group->validity, i);
        fcdp__validity_accept(group->validity, i, &observed);
    }
    memset(group->stale, 0, group->layout->n_extents);
}

static void count_use(const use *u, fcdp_pass pass) {
    fcdp_group *group = u->group;
    const fcdp_topology *topology = &group->comm->topology;
    fcdp_engine_stats *stats = &engine_of(group)->stats;
    size_t shard_bytes = 0;
    for (uint32_t i = 0; i < group->layout->n_extents; i++)
        shard_bytes += group->layout->extents[i].shard_bytes;
    size_t block_bytes = u->plan->block_bytes + group->crossed_bytes;
    bool made = block_bytes > 0;
    group->crossed_bytes = 0;
    fcdp__lock_acquire(&engine_of(group)->lock);
    if (u->plan->n_stale) group->reading = group->crossed;
    group->gathers_made += made;
    group->gathers_avoided += !made;
    group->gathers_forward += made && pass == FCDP_PASS_FORWARD;
    group->gathers_backward += made && pass == FCDP_PASS_BACKWARD;
    stats->gathers_made += made;
    stats->gathers_avoided += !made;
    stats->gathers_forward += made && pass == FCDP_PASS_FORWARD;
    stats->gathers_backward += made && pass == FCDP_PASS_BACKWARD;
    stats->plain_bytes += (uint64_t)shard_bytes * (topology->n_ranks - 1);
    stats->gather_bytes += (uint64_t)block_bytes * (topology->n_nodes - 1) * topology->node_size;
    fcdp__lock_release(&engine_of(group)->lock);
}

fcdp_status fcdp_group_check_capture(const fcdp_group *group, fcdp_stream stream) {
    return fcdp__engine_check_capture(engine_of(group), stream, "gathered", group->name);
}

static fcdp_status begin_check(const fcdp_group *group, const uint64_t *inputs, fcdp_stream stream) {
    fcdp_status status = fcdp__engine_check_process(engine_of(group), group->name);
    if (!status) status = fcdp_comm_check(group->comm);
    if (!status) status = fcdp_group_check_capture(group, stream);
    if (status) return status;
    if (!group->region)
        return fcdp__fail(FCDP_ERR_INVALID, "'%s' is not attached to host memory yet", group->name);
    for (uint32_t i = 0; i < group->layout->n_extents; i++)
        if (group->stale[i] && group->layout->extents[i].shard_bytes && !(inputs && inputs[i]))
            return fcdp__fail(FCDP_ERR_INVALID, "'%s': extent %u is stale and has no input", group->name, i);
    return FCDP_OK;
}

/* Pages. Out of memory is all ranks' lot, or a reason to stop; whatever else fails,
 * fails here alone, and the peers go on. */
static fcdp_status use_enter(use *u) {
    fcdp_group *group = u->group;
    fcdp_status status = fcdp__region_acquire(group->region);
    if (!status) return FCDP_OK;
    status = fcdp__fail(status, "taking device pages for '%s': %s", group->name, fcdp_error_text());
    return status == FCDP_ERR_NO_DEVICE_MEM ? status : fcdp__comm_fail(group->comm, status);
}

/* `stream` is behind what is on the engine's streams, which no event of the region's may tell of. The comm
 * has failed, so none of it waits for a peer. */
static void streams_join(const use *u, fcdp_stream stream) {
    const fcdp_engine *engine = engine_of(u->group);
    fcdp_status status = FCDP_OK;
    for (int i = 0; i < FCDP_N_STREAMS && !status; i++) {
        status = fcdp__driver_event_record(engine->drv, u->group->crossed, engine->streams[i]);
        if (!status) status = stream_wait(u->group, stream, u->group->crossed);
    }
    for (int i = 0; i < FCDP_N_STREAMS && status; i++)
        if (fcdp__driver_stream_sync(engine->drv, engine->streams[i]))
            fcdp__log(FCDP_LOG_DEBUG, "'%s': %s", u->group->name, fcdp_error_text());
}

/* The use has failed, with the thread's text: the peers take part in what this rank has missed. */
static fcdp_status use_abandon(use *u, fcdp_stream stream, fcdp_status status) {
    fcdp_group *group = u->group;
    status = fcdp__comm_fail(group->comm, status);
    fcdp__region_invalidate(group->region, FCDP_SPAN_MASK_ALL);
    fcdp__validity_spoil(group->validity);
    fcdp_error error;
    fcdp__error_keep(&error, status);
    streams_join(u, stream);
    if (fcdp__region_release(group->region, stream, false))
        fcdp__log(FCDP_LOG_DEBUG, "'%s': %s", group->name, fcdp_error_text());
    return fcdp__error_restore(&error);
}

static fcdp_status use_run(use *u, fcdp_pass pass, fcdp_stream stream) {
    fcdp_group *group = u->group;
    fcdp_status status = use_enter(u);
    if (status) return status;
    fcdp__driver_annotate(engine_of(group)->drv, group->name);
    status = fcdp__driver_event_record(engine_of(group)->drv, group->written, stream);
    if (!status) status = restore(u);
    if (!status) status = gather(u);
    if (!status) status = ready_record(u);
    fcdp__driver_annotate(engine_of(group)->drv, NULL);
    if (status) return use_abandon(u, stream, status);
    group->begun = true;
    group->waited = false;
    if (u->last) atomic_store_explicit(&group->in_flight_ns, fcdp__now_ns(), memory_order_relaxed);
    fcdp__group_accept(group);
    count_use(u, pass);
    return FCDP_OK;
}

/* A use whose reshard was refused ends here: to the program this is another
 * one, of what it has agreed on since. */
fcdp_status fcdp_group_begin(fcdp_group *group, const uint64_t *inputs, fcdp_pass pass, fcdp_stream stream) {
    if (fcdp_group_has_begun(group)) return FCDP_OK;
    use u = {.group = group, .inputs = inputs};
    fcdp_status status = begin_check(group, inputs, stream);
    if (!status && group->unended) status = fcdp_group_reshard(group, stream, false);
    if (!status) status = fcdp__plan_make(group->layout, group->stale, &u.plan);
    if (status) return status;
    /* The ranks of a node meet in the restore unless all of them said that they have it, and none
     * can have given it up since by the program's order. One that was made to give it up has written
     * it to the host, and restores alone. */
    u.collects = fcdp__group_by_slice(group) && (group->lacks || group->member.resharded);
    /* else the one reads what the other writes */
    u.joined = u.collects && u.plan->n_stale && !(u.plan->restore_mask & u.plan->fill_mask);
    status = use_run(&u, pass, stream);
    fcdp__plan_destroy(u.plan);
    if (!status) group->member.ahead = !group->member.live;
    return status;
}

bool fcdp_group_has_begun(const fcdp_group *group) {
    return group->begun && !group->unended;
}

/* ---- wait ---- */

/* The host is the compute stream. */
static fcdp_status host_wait(fcdp_group *group) {
    fcdp_engine *engine = engine_of(group);
    uint64_t start_ns = fcdp__now_ns();
    fcdp_status status = fcdp__driver_event_sync(engine->drv, fcdp__region_ready(group->region));
    fcdp__lock_acquire(&engine->lock);
    engine->stats.n_host_waits++;
    engine->stats.host_wait_ns += fcdp__now_ns() - start_ns;
    fcdp__lock_release(&engine->lock);
    return status;
}

fcdp_status fcdp_group_wait(fcdp_group *group, fcdp_stream stream) {
    fcdp_engine *engine = engine_of(group);
    if (!group->begun)
        return fcdp__fail(FCDP_ERR_INVALID, "'%s' is waited for and has not begun", group->name);
    fcdp_status status = fcdp__engine_check_capture(engine, stream, "waited for", group->name);
    if (status) return status;
    status = engine->host_computes ? host_wait(group)
                                   : stream_wait(group, stream, fcdp__region_ready(group->region));
    fcdp_status failure = fcdp_comm_check(group->comm); /* after the wait: what was opened means nothing */
    if (failure) status = fcdp__comm_fail(group->comm, failure);
    if (status)
        return fcdp__fail(status, "waiting for '%s': %s", group->name[0] ? group->name : "the root",
                          fcdp_error_text());
    fcdp__lock_acquire(&engine->lock);
    group->reading = NULL; /* ready is behind crossed */
    fcdp__lock_release(&engine->lock);
    if (!group->waited && !group->has_content && (policy_keeps(group) || dirty(group)))
        fcdp__content_take(group);
    group->waited = true;
    return FCDP_OK;
}

/* ---- end ---- */

/* `written` is what all ranks were told alike, so all of them ask again. A write that only this rank's bytes
 * betray waits for the next agreement. What cannot be stored stays on the device, whatever policy says. */
fcdp_status fcdp_group_reshard(fcdp_group *group, fcdp_stream stream, bool written) {
    fcdp_status status = fcdp__engine_check_process(engine_of(group), group->name);
    if (status || !group->begun) return status;
    status = fcdp__engine_check_capture(engine_of(group), stream, "resharded", group->name);
    group->unended = status != FCDP_OK;
    if (status) return status;
    uint32_t dirty_mask = dirty(group);
    bool keeps = policy_keeps(group) && fcdp__content_is_known(group);
    bool is_void = written || ((keeps || dirty_mask) && !fcdp__content_holds(group));
    if (written) fcdp__member_ask_again(&group->member);
    if (is_void && dirty_mask) { /* nowhere is what was gathered: the ranks gather it again */
        fcdp__region_invalidate(group->region, dirty_mask);
        fcdp__validity_spoil(group->validity);
    } else if (!keeps && dirty_mask) {
        status = put_now(group, dirty_mask);
        atomic_store_explicit(&group->in_flight_ns, fcdp__now_ns(), memory_order_relaxed);
    }
    fcdp_status released = fcdp__region_release(group->region, stream, (keeps && !is_void) || status);
    group->begun = false;
    fcdp__member_resharded(&group->member);
    if (status) return fcdp__fail(status, "releasing '%s': %s", group->name, fcdp_error_text());
    return released;
}

fcdp_status fcdp__group_cancel(fcdp_group *group) {
    return fcdp_group_reshard(group, engine_of(group)->streams[FCDP_STREAM_NODE], false);
}
