/* whole.c - full_tensor() and full state dicts read the node's copy.
 *
 * The framework's own gather of one parameter crosses the nodes, though the node may have the bytes. A rank
 * reads them from host memory by itself where that is fast, or begins a use of the whole group, which costs
 * no transfer between nodes while the copy is fresh. A program asks this at any time and may have written
 * anything before, so signals are not trusted here: only a fingerprint makes a copy fresh, and without one
 * the framework gathers.
 */
#include "comm/whole.h"

#include "comm/copy.h"
#include "comm/internal.h"
#include "comm/trace.h"

/* Where the ranks meet on the device, a use of the group restores 1/g of it on each of them, and most of an
 * extent is not page-locked here: a large one comes faster with its group. */
static bool host_serves(const fcdp_group *group, uint32_t i) {
    fcdp_region_state state;
    fcdp__region_state(group->region, &state);
    const fcdp_span_state *span = &state.span[group->layout->extents[i].span];
    if (span->on_device || !(span->stored || span->whole)) return false;
    return !fcdp__group_by_slice(group) || fcdp__layout_extent_bytes(group->layout, i) <=
                                               group->layout->bytes / group->comm->topology.node_size;
}

/* What was agreed stale and has not been gathered yet would be gathered by a use of the group: then the ranks
 * agree anew, on all of it. */
fcdp_whole fcdp_group_whole_vote(fcdp_group *group, uint32_t i, const fcdp_evidence *evidence) {
    uint64_t own;
    size_t at = 0;
    if (!group->region || fcdp__group_is_spilled(group) || group->begun || group->member.live ||
        !group->member.agreement || group->comm->engine->asleep)
        return FCDP_WHOLE_PLAIN;
    if (fcdp__extent_rounds(group, i)) return FCDP_WHOLE_PLAIN;
    const uint64_t *fingerprint = fcdp__evidence_fingerprint(evidence, 0, &at, &own);
    if (!fingerprint || fcdp__group_reads_end(group) || fcdp__copy_judged(group)) return FCDP_WHOLE_PLAIN;
    for (uint32_t k = 0; k < group->layout->n_extents; k++)
        if (group->stale[k]) return FCDP_WHOLE_STALE;
    if (group->dropped || !fcdp__validity_is_fresh(group->validity, i, evidence->signals, *fingerprint))
        return FCDP_WHOLE_STALE;
    return host_serves(group, i) ? FCDP_WHOLE_HOST : FCDP_WHOLE_FRESH;
}

fcdp_status fcdp_group_whole_begin(fcdp_group *group, uint32_t i, const fcdp_program *program,
                                   fcdp_stream stream) {
    fcdp_use use = {
        .group = group, .inputs = group->inputs, .plain_shard_bytes = group->layout->extents[i].shard_bytes};
    fcdp_status status = fcdp__inputs_take(group, program, group->inputs, &stream);
    return status ? status : fcdp__use_begin(&use, FCDP_PASS_OTHER, stream);
}

/* `ready` is recorded behind the copy, so that the monitor looks for the peers whose words that waits for. */
static fcdp_status read_enqueue(fcdp_group *group, uint32_t i, fcdp_dptr to, size_t bytes,
                                fcdp_stream stream) {
    fcdp_engine *engine = group->comm->engine;
    const fcdp_extent *extent = &group->layout->extents[i];
    fcdp_stream h2d = group->comm->set->copies[FCDP_TO_DEVICE];
    fcdp_status status = fcdp__driver_event_record(engine->drv, group->written, stream);
    if (!status)
        status = fcdp__region_read(group->region, extent->span, (fcdp_piece){extent->offset_bytes, bytes}, to,
                                   group->written);
    if (!status) status = fcdp__driver_event_record(engine->drv, fcdp__region_ready(group->region), h2d);
    atomic_store_explicit(&group->in_flight_ns, fcdp__now_ns(), memory_order_relaxed);
    return status;
}

fcdp_status fcdp_group_whole_read(fcdp_group *group, uint32_t i, fcdp_dptr to, size_t bytes,
                                  fcdp_stream stream) {
    fcdp_engine *engine = group->comm->engine;
    fcdp_status status = fcdp__engine_check_process(engine, group->name);
    if (!status) status = fcdp_comm_check(group->comm);
    if (!status) status = fcdp__engine_check_capture(engine, stream, "read", group->name);
    if (!status && (bytes > fcdp__layout_extent_bytes(group->layout, i) || group->begun))
        status = fcdp__fail(FCDP_ERR_INVALID, "'%s': %zu bytes of extent %u cannot be read now", group->name,
                            bytes, i);
    if (status || bytes == 0) return status;
    status = read_enqueue(group, i, to, bytes, stream);
    if (!status) status = fcdp__group_await(group, stream);
    if (status) { /* No copy may still run when the caller frees `to`. */
        fcdp_failure failure = fcdp__failure_keep(status);
        (void)!fcdp__driver_stream_sync(engine->drv, group->comm->set->copies[FCDP_TO_DEVICE]);
        status = fcdp__failure_restore(&failure);
        return fcdp__fail(status, "reading '%s': %s", fcdp__name_text(group->name), fcdp_error_text());
    }
    fcdp_use_counts read = {.pass = FCDP_PASS_OTHER,
                            .plain_bytes = (uint64_t)group->layout->extents[i].shard_bytes *
                                           (group->comm->topology.n_ranks - 1)};
    fcdp__group_count_use(group, &read);
    return FCDP_OK;
}
