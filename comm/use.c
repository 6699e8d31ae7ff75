/* use.c - the life of one use: begin, wait, reshard.
 *
 * Begin takes device pages, enqueues a restore and a gather (moves.c), and records `ready` behind them.
 * Wait puts the program's stream behind `ready`; the host waits only where it is the compute stream
 * itself. Reshard keeps the bytes on the device or leaves the pages to other groups.
 *
 * A use that gets no device pages has not begun: nothing has happened, here or on all ranks. Once it has
 * them, its peers count on the collectives that follow, so a failure from then on is the shard group's,
 * for good.
 *
 * What is stale was agreed before (vote.c), and when a use begins is not decided here (unshard.c).
 */
#include "comm/use.h"

#include <stdlib.h>
#include <string.h>

#include "comm/copy.h"
#include "comm/frozen.h"
#include "comm/moves.h"
#include "comm/trace.h"

void fcdp__group_accept(fcdp_group *group) {
    for (uint32_t i = 0; i < group->layout->n_extents; i++) {
        if (!group->stale[i]) continue;
        fcdp_observation observed = fcdp__validity_observed(group->validity, i);
        fcdp__validity_accept(group->validity, i, &observed);
        group->dropped = false; /* where it was, all are stale */
    }
    memset(group->stale, 0, group->layout->n_extents);
}

/* What was read before, and that nothing has waited for, may have been made on another stream. */
fcdp_status fcdp__group_set_reading(fcdp_group *group, fcdp_event event, fcdp_stream stream) {
    fcdp_engine *engine = group->comm->engine;
    fcdp_status status = FCDP_OK;
    fcdp__lock_acquire(&engine->lock);
    if (group->reading && group->read_from != stream && !engine->host_computes)
        status = fcdp__driver_stream_wait(engine->drv, group->read_from, group->reading);
    group->reading = event;
    group->read_from = stream;
    fcdp__lock_release(&engine->lock);
    return status;
}

/* The program waits on `stream`. Where it made the shards on another one, that one writes them next, or
 * uses their memory again: it waits for their readers. An optimizer may step on a third, which has waited
 * for neither (fcdp_engine_order_writes). */
static fcdp_status readers_await(fcdp_group *group, fcdp_stream stream) {
    fcdp_engine *engine = group->comm->engine;
    fcdp_status status = FCDP_OK;
    fcdp__lock_acquire(&engine->lock);
    if (engine->host_computes || group->read_from == stream)
        group->reading = NULL; /* ready is behind crossed */
    else if (group->reading)
        status = fcdp__driver_stream_wait(engine->drv, group->read_from, group->reading);
    fcdp__lock_release(&engine->lock);
    return status;
}

/* A use that sent something has made a gather. */
void fcdp__group_count_use(fcdp_group *group, const fcdp_use_counts *use) {
    bool made = use->block_bytes > 0;
    fcdp__count(&group->counts, made ? FCDP_COUNT_GATHERS_MADE : FCDP_COUNT_GATHERS_AVOIDED, 1);
    fcdp__count(&group->counts, FCDP_COUNT_GATHERS_FORWARD, made && use->pass == FCDP_PASS_FORWARD);
    fcdp__count(&group->counts, FCDP_COUNT_GATHERS_BACKWARD, made && use->pass == FCDP_PASS_BACKWARD);
    fcdp__count(&group->counts, FCDP_COUNT_SAVED_PLAIN_BYTES, use->plain_bytes);
    fcdp__count(&group->counts, FCDP_COUNT_SAVED_GATHER_BYTES, use->gather_bytes);
    fcdp__group_trace_use(group, use);
}

fcdp_gather_counts fcdp__gathers_counted(const fcdp_counts *counts) {
    const _Atomic uint64_t *n = counts->n;
    return (fcdp_gather_counts){.made = n[FCDP_COUNT_GATHERS_MADE],
                                .avoided = n[FCDP_COUNT_GATHERS_AVOIDED],
                                .forward = n[FCDP_COUNT_GATHERS_FORWARD],
                                .backward = n[FCDP_COUNT_GATHERS_BACKWARD]};
}

/* plain_bytes is what a flat gather would have sent between nodes in this one's place. */
static void count_use(const fcdp_use *use, fcdp_pass pass) {
    fcdp_group *group = use->group;
    const fcdp_topology *topology = &group->comm->topology;
    size_t block_bytes = use->plan->block_bytes + group->coalesced_bytes;
    /* What crossed as differences, delta_exchange.c knows, later. */
    size_t sent_bytes = group->coalesced_whole_bytes;
    if (!use->delta) sent_bytes += use->plan->block_bytes;
    group->coalesced_bytes = group->coalesced_whole_bytes = 0;
    fcdp_use_counts counts = {.pass = pass,
                              .block_bytes = block_bytes,
                              .plain_bytes = (uint64_t)use->plain_shard_bytes * (topology->n_ranks - 1),
                              .gather_bytes = (uint64_t)sent_bytes * (topology->n_nodes - 1) *
                                              topology->node_size,
                              .n_stale = use->plan->n_stale};
    fcdp__group_count_use(group, &counts);
}

fcdp_status fcdp_group_check_capture(const fcdp_group *group, fcdp_stream stream) {
    return fcdp__engine_check_capture(group->comm->engine, stream, "gathered", group->name);
}

/* ---- begin ---- */

bool (*fcdp__restore_is_refused)(const fcdp_group *group);

/* The use has failed, with the thread's text: the peers take part in what this rank has missed. `stream` is
 * put behind what is on the engine's streams, which no event of the region's may tell of; the comm has
 * failed, so none of it waits for a peer. */
static fcdp_status use_fail(fcdp_use *use, fcdp_stream stream, fcdp_status status) {
    fcdp_group *group = use->group;
    const fcdp_engine *engine = group->comm->engine;
    fcdp_failure error = fcdp__failure_keep(fcdp__comm_fail(group->comm, status));
    fcdp__region_invalidate(group->region, FCDP_SPAN_MASK_ALL);
    fcdp__validity_invalidate(group->validity);
    status = FCDP_OK;
    const fcdp_stream_set *set = group->comm->set;
    fcdp_stream streams[FCDP_N_STREAMS + FCDP_N_DIRECTIONS];
    memcpy(streams, set->streams, sizeof set->streams);
    memcpy(streams + FCDP_N_STREAMS, set->copies, sizeof set->copies);
    for (size_t i = 0; i < sizeof streams / sizeof *streams && !status; i++) {
        status = fcdp__driver_event_record(engine->drv, group->crossed, streams[i]);
        if (!status) status = fcdp__driver_stream_wait(engine->drv, stream, group->crossed);
    }
    for (size_t i = 0; i < sizeof streams / sizeof *streams && status; i++)
        if (fcdp__driver_stream_sync(engine->drv, streams[i]))
            fcdp__log(FCDP_LOG_DEBUG, "'%s': %s", group->name, fcdp_error_text());
    if (fcdp__region_release(group->region, stream, false))
        fcdp__log(FCDP_LOG_DEBUG, "'%s': %s", group->name, fcdp_error_text());
    return fcdp__failure_restore(&error);
}

/* What the use needs, for the plan of later ones (tiering/schedule.h). Where the node's ranks exchange in
 * host memory, or the host stores what came to it, a store is not to be spared. What is gathered though
 * nothing has changed, as some rank has dropped it, is what the use would have loaded: a plan is not to drop
 * it again. */
static void use_tell(const fcdp_use *use) {
    const fcdp_group *group = use->group;
    bool by_host = fcdp__delta_stores_next(group) && !(use->plan->restore_mask & use->plan->fill_mask);
    bool stores_always = by_host || (!fcdp__group_by_slice(group) && group->comm->topology.node_size > 1);
    size_t load_bytes = 0, fill_bytes = 0; /* of a spilled group none: it is kept by nobody */
    for (uint32_t s = 0; s < FCDP_N_SPANS && !fcdp__group_is_spilled(group); s++) {
        if (use->plan->restore_mask & 1u << s) load_bytes += group->layout->span[s].bytes;
        if (use->plan->fill_mask & 1u << s) fill_bytes += group->layout->span[s].bytes;
    }
    bool in_vain = group->unchanged && use->plan->n_stale > 0;
    fcdp__region_plan_use(group->region, load_bytes + (in_vain ? fill_bytes : 0),
                          stores_always ? 0 : fill_bytes, use->plan->n_stale > 0 && !in_vain);
}

/* Out of device memory is all ranks' lot, or a reason to stop; whatever else fails, fails here alone, and
 * the peers go on. */
static fcdp_status use_run(fcdp_use *use, fcdp_pass pass, fcdp_stream stream) {
    fcdp_group *group = use->group;
    fcdp_driver *drv = group->comm->engine->drv;
    fcdp_status status = fcdp__gather_reserve(use);
    if (!status) {
        status = fcdp__region_acquire(group->region);
        if (status) fcdp__gather_release(use, true);
    }
    if (status) {
        status = fcdp__fail(status, "taking device pages for '%s': %s", group->name, fcdp_error_text());
        return status == FCDP_ERR_NO_DEVICE_MEM ? status : fcdp__comm_fail(group->comm, status);
    }
    group->room_bytes = 0;
    use_tell(use);
    fcdp__driver_annotate(drv, group->name);
    status = fcdp__driver_event_record(drv, group->written, stream);
    if (!status) status = fcdp__restore(use);
    if (!status) status = fcdp__gather(use);
    fcdp__gather_release(use, !status);
    /* Ready is behind everything that touches the region, on the stream that ends last. Where nothing was
     * enqueued it is what it was. */
    if (!status && use->last && use->plan->restore_mask)
        status = fcdp__driver_stream_wait(drv, use->last, group->restored);
    if (!status && use->last && use->plan->n_stale) {
        status = fcdp__driver_stream_wait(drv, use->last, group->crossed);
        if (!status && !use->by_host)
            status = fcdp__driver_stream_wait(drv, use->last, fcdp__region_stored(group->region));
    }
    if (!status && use->last)
        status = fcdp__driver_event_record(drv, fcdp__region_ready(group->region), use->last);
    if (!status && use->plan->n_stale) status = fcdp__group_set_reading(group, group->crossed, stream);
    fcdp__driver_annotate(drv, NULL);
    if (status) return use_fail(use, stream, status);
    group->begun = true;
    group->waited = false;
    if (use->last) atomic_store_explicit(&group->in_flight_ns, fcdp__now_ns(), memory_order_relaxed);
    fcdp__group_accept(group);
    count_use(use, pass);
    return FCDP_OK;
}

/* A use whose reshard was refused ends here: to the program this is another one, of what it has agreed on
 * since. */
fcdp_status fcdp__use_begin(fcdp_use *use, fcdp_pass pass, fcdp_stream stream) {
    fcdp_group *group = use->group;
    const uint64_t *inputs = use->inputs;
    if (fcdp_group_has_begun(group)) return FCDP_OK;
    fcdp_status status = fcdp__engine_check_process(group->comm->engine, group->name);
    if (!status) status = fcdp_comm_check(group->comm);
    if (!status) status = fcdp_group_check_capture(group, stream);
    if (!status && !group->region)
        status = fcdp__fail(FCDP_ERR_INVALID, "'%s' is not attached to host memory yet", group->name);
    for (uint32_t i = 0; i < group->layout->n_extents && !status; i++)
        if (group->stale[i] && group->layout->extents[i].shard_bytes && !(inputs && inputs[i]))
            status = fcdp__fail(FCDP_ERR_INVALID, "'%s': extent %u is stale and has no input", group->name,
                                i);
    if (!status && fcdp__restore_is_refused && fcdp_group_begins_alone(group) &&
        fcdp__restore_is_refused(group))
        status = fcdp__fail(FCDP_ERR_NO_DEVICE_MEM, "'%s': a test refuses the memory", group->name);
    if (!status && group->reshard_refused) status = fcdp_group_reshard(group, stream, false);
    if (!status) status = fcdp__plan_make(group->layout, group->stale, &use->plan);
    if (status) return status;
    /* The ranks of a node meet in the restore unless all of them said that they have it, and none
     * can have given it up since by the program's order. One that was made to give it up has written
     * it to the host, and restores alone. */
    use->collects = fcdp__group_by_slice(group) &&
                    (fcdp__group_is_spilled(group) || group->not_on_device || group->member.resharded);
    /* else the one reads what the other writes */
    use->joined = use->collects && use->plan->n_stale && !(use->plan->restore_mask & use->plan->fill_mask);
    status = use_run(use, pass, stream);
    fcdp__plan_destroy(use->plan);
    if (!status) group->member.ahead = !group->member.live;
    return status;
}

fcdp_status fcdp_group_begin(fcdp_group *group, const uint64_t *inputs, fcdp_pass pass, fcdp_stream stream) {
    fcdp_use use = {.group = group, .inputs = inputs};
    for (uint32_t i = 0; i < group->layout->n_extents; i++)
        use.plain_shard_bytes += group->layout->extents[i].shard_bytes;
    return fcdp__use_begin(&use, pass, stream);
}

/* Nothing was stale then: what is agreed stale now is the next use's. */
fcdp_status fcdp_group_begin_late(fcdp_group *group, fcdp_pass pass, fcdp_stream stream) {
    uint8_t *agreed = group->stale, *none = calloc(group->layout->n_extents + 1, 1);
    if (!none) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory to begin '%s'", group->name);
    group->stale = none;
    fcdp_status status = fcdp_group_begin(group, NULL, pass, stream);
    group->stale = agreed;
    free(none);
    return status;
}

bool fcdp_group_has_begun(const fcdp_group *group) {
    return group->begun && !group->reshard_refused;
}

bool fcdp_group_begins_alone(const fcdp_group *group) {
    return !fcdp__group_is_stale(group) && !fcdp__group_by_slice(group);
}

/* ---- wait ---- */

/* The comm is looked at after the wait: a wait that a failure has opened means nothing. */
fcdp_status fcdp__group_await(fcdp_group *group, fcdp_stream stream) {
    fcdp_engine *engine = group->comm->engine;
    fcdp_status status;
    uint64_t start_ns = fcdp__now_ns();
    fcdp__driver_annotate(engine->drv, group->name);
    status = engine->host_computes /* the host is the compute stream */
                 ? fcdp__driver_event_sync(engine->drv, fcdp__region_ready(group->region))
                 : fcdp__group_trace_stall(group, stream, fcdp__region_ready(group->region));
    fcdp__driver_annotate(engine->drv, NULL);
    if (engine->host_computes) {
        uint64_t ns = fcdp__now_ns() - start_ns;
        fcdp__group_trace_host_wait(group, start_ns, ns);
        fcdp__count(&engine->counts, FCDP_COUNT_HOST_WAITS, 1);
        fcdp__count(&engine->counts, FCDP_COUNT_HOST_WAIT_NS, ns);
    }
    fcdp_status failure = fcdp_comm_check(group->comm);
    if (failure) status = failure;
    return status ? fcdp__comm_fail(group->comm, status) : FCDP_OK;
}

fcdp_status fcdp_group_wait(fcdp_group *group, fcdp_stream stream) {
    fcdp_engine *engine = group->comm->engine;
    if (!group->begun)
        return fcdp__fail(FCDP_ERR_INVALID, "'%s' is waited for and has not begun", group->name);
    fcdp_status status = fcdp__engine_check_capture(engine, stream, "waited for", group->name);
    if (status) return status;
    status = fcdp__group_await(group, stream);
    if (!status) status = readers_await(group, stream);
    if (status)
        return fcdp__fail(status, "waiting for '%s': %s", fcdp__name_text(group->name), fcdp_error_text());
    if (!group->waited && (fcdp__policy_keeps_group(group) || fcdp__unstored(group) ||
                           fcdp__copy_is_first(group, FCDP_COPY_TAKEN)))
        status = fcdp__copy_taken(group, stream);
    group->waited = true;
    group->reader = stream;
    return status;
}

/* ---- reshard ---- */

/* The program may end the use on another stream than it waited on, with the first users still on that one:
 * plain FSDP2 frees a storage that was allocated there, which nothing gets before them. */
static fcdp_status users_await(fcdp_group *group, fcdp_stream stream) {
    fcdp_engine *engine = group->comm->engine;
    if (engine->host_computes || !group->waited || group->reader == stream) return FCDP_OK;
    fcdp_status status = fcdp__driver_event_record(engine->drv, group->written, group->reader);
    return status ? status : fcdp__driver_stream_wait(engine->drv, stream, group->written);
}

/* Not beside the use: the program may write there, in bytes that copy.c is to judge. */
static fcdp_status store_behind_use(fcdp_group *group, uint32_t unstored, fcdp_stream stream) {
    fcdp_engine *engine = group->comm->engine;
    fcdp_event after = fcdp__region_ready(group->region);
    fcdp_status status = FCDP_OK;
    if (!engine->host_computes && group->waited) {
        after = group->written;
        status = fcdp__driver_event_record(engine->drv, after, stream);
    }
    return status ? status : fcdp__store_now(group, unstored, after);
}

/* Would a store be in vain? By the schedule the next use fills the region anew, and nothing takes differences
 * from what it has now: no codec, and not fcdp.changed(). Where the program does otherwise (it leaves out the
 * optimizer's step), this rank votes that it has no copy, and all ranks gather the group. */
static bool is_for_nothing(fcdp_group *group, uint32_t unstored) {
    fcdp_engine *engine = group->comm->engine;
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (group->layout->span[s].bytes && !(unstored & 1u << s)) return false;
    return group->waited && !fcdp__delta_may(group) &&
           !atomic_load_explicit(&engine->old_shards_are_read, memory_order_relaxed) &&
           fcdp__region_dies(group->region);
}

/* The program of one rank may have written alone, and on a device the bytes tell of a write no earlier than
 * the next vote. And one rank may drop what others keep. So where a copy may be lost, the group is asked for
 * before its next use on all ranks, whatever has become of it; elsewhere host memory has what was gathered.
 * What cannot be stored stays on the device, whatever policy says. */
fcdp_status fcdp_group_reshard(fcdp_group *group, fcdp_stream stream, bool written) {
    fcdp_engine *engine = group->comm->engine;
    fcdp_status status = fcdp__engine_check_process(engine, group->name);
    if (status) return status;
    if (!group->begun) { /* a restore that was put off, and never waited for */
        group->member.live = group->member.ahead = false;
        return FCDP_OK;
    }
    status = fcdp__engine_check_capture(engine, stream, "resharded", group->name);
    if (!status) status = users_await(group, stream);
    group->reshard_refused = status != FCDP_OK;
    if (status) return status;
    uint32_t unstored = fcdp__unstored(group);
    bool keeps = fcdp__policy_keeps_group(group) && fcdp__copy_is_known(group), is_invalid = false;
    bool drops = !keeps && unstored && is_for_nothing(group, unstored);
    if (keeps || (unstored && !drops) || fcdp__copy_is_first(group, FCDP_COPY_ENDED))
        status = fcdp__copy_ended(group, stream, &is_invalid);
    is_invalid = is_invalid || written;
    uint32_t stores = keeps ? unstored & fcdp__frozen_stores(group) : unstored;
    if (group->may_be_lost) fcdp__member_ask_again(&group->member);
    group->dropped = group->dropped || drops;
    if (drops && !is_invalid) fcdp__count(&engine->counts, FCDP_COUNT_DROPS, 1);
    if ((is_invalid || drops) && unstored) { /* nowhere is what was gathered: the ranks gather it again */
        fcdp__region_invalidate(group->region, unstored);
        if (is_invalid) fcdp__validity_invalidate(group->validity);
    } else if (!status && stores) {
        status = store_behind_use(group, stores, stream);
        atomic_store_explicit(&group->in_flight_ns, fcdp__now_ns(), memory_order_relaxed);
    }
    fcdp_status released = fcdp__region_release(group->region, stream, (keeps && !is_invalid) || status);
    group->begun = false;
    fcdp__group_trace_reshard(group, is_invalid           ? FCDP_CAUSE_WRITTEN
                                     : drops              ? FCDP_CAUSE_DROPPED
                                     : keeps && !released ? FCDP_CAUSE_KEEPS
                                                          : FCDP_CAUSE_STORED);
    fcdp__member_resharded(&group->member);
    fcdp__frozen_write(group);
    if (status) return fcdp__fail(status, "releasing '%s': %s", group->name, fcdp_error_text());
    return released;
}

fcdp_status fcdp__group_cancel(fcdp_group *group) {
    return fcdp_group_reshard(group, group->comm->set->streams[FCDP_STREAM_NODE], false);
}
