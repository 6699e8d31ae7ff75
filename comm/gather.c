/* gather.c - see the header.
 *
 * Order within one use, each arrow an event (or, between the processes of a node, a word):
 *
 *     caller's stream: written -> inter: own shards, all-gather between nodes -> crossed
 *     through host memory: crossed -> d2h: put own shards, words
 *                          h2d: take the others' once their words have come -> loaded
 *     by slices:           crossed, loaded -> node: all-gather within the node -> gathered
 *                          gathered -> d2h: put own slices, words
 *     (a restore: h2d: load -> loaded; many shards of many nodes: packed.h, in the place of inter and node)
 *     the last of these streams, behind all of the others: ready -> caller's stream: compute -> used
 *
 * The compute waits for the put too: it may write into what it is given, and the host's copy must be what was
 * gathered.
 */
#include "comm/gather.h"

#include <stdlib.h>

#include "comm/packed.h"
#include "comm/put.h"
#include "tiering/policy.h"

/* Slices spare the PCIe link and use what joins the GPUs, if the transport does; through host functions they
 * could wait in a circle (transport.h). */
bool fcdp__group_by_slice(const fcdp_group *group) {
    const fcdp_engine *engine = group->comm->engine;
    bool may_wait = group->comm->transport.through_host && !engine->host_computes;
    return engine->options.restore != FCDP_RESTORE_WHOLE && !may_wait && group->comm->topology.node_size > 1;
}

/* The driver is asked what is free once in a use, and only where the whole budget would keep the group: what
 * others leave of it is less. */
bool fcdp__policy_keeps_group(fcdp_group *group) {
    const fcdp_engine *engine = group->comm->engine;
    double tau = engine->options.tau;
    if (tau <= 0) return false; /* nor is anybody asked */
    fcdp_pool_stats pool;
    fcdp__pool_stats(engine->pool, &pool);
    size_t used_bytes = fcdp__pool_pages_in_use(engine->pool) * pool.page_bytes;
    if (!fcdp__policy_keeps(tau, used_bytes, pool.budget_bytes)) return false;
    if (!group->room_bytes) group->room_bytes = fcdp__pool_room_bytes(engine->pool);
    return fcdp__policy_keeps(tau, used_bytes, group->room_bytes);
}

/* This rank's shards go from where the program has them to their places, and from there to the ranks with the
 * same local index. What is restored of the same spans comes first: it would write over them. */
static fcdp_status inter_step(fcdp_use *use) {
    fcdp_group *group = use->group;
    const fcdp_topology *topology = &group->comm->topology;
    fcdp_driver *drv = group->comm->engine->drv;
    fcdp_stream inter = group->comm->set->streams[group->comm->n_gathers++ % FCDP_N_INTER];
    fcdp_dptr base = fcdp__region_base(group->region);
    fcdp_part *parts = malloc((use->plan->n_stale + 1) * sizeof *parts);
    if (!parts) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a gather of '%s'", group->name);
    fcdp_status status = fcdp__region_order(group->region, inter);
    if (!status) status = fcdp__driver_stream_wait(drv, inter, group->written);
    if (!status && use->plan->restore_mask & use->plan->fill_mask)
        status = fcdp__driver_stream_wait(drv, inter, group->restored);
    for (uint32_t k = 0; k < use->plan->n_stale && !status; k++) {
        uint32_t i = use->plan->stale[k];
        fcdp_piece place = fcdp__plan_shard(group->layout, topology, i, topology->node, topology->local);
        status = fcdp__driver_copy_d2d(drv, fcdp__dptr_add(base, place.offset_bytes),
                                       (fcdp_dptr){use->inputs[i]}, place.bytes, inter);
    }
    size_t n = fcdp__plan_inter_parts(use->plan, group->layout, topology, base, parts);
    if (!status) status = fcdp__comm_all_gather(group->comm, group, FCDP_LANE_INTER, parts, n, 0, inter);
    if (!status) status = fcdp__driver_event_record(drv, group->crossed, inter);
    free(parts);
    use->last = inter;
    return status ? fcdp__fail(status, "gathering '%s' between nodes: %s", group->name, fcdp_error_text())
                  : FCDP_OK;
}

/* The node's ranks all-gather what each has got; with a joined restore, its slices in the same collective. */
static fcdp_status node_by_slice(fcdp_use *use) {
    fcdp_group *group = use->group;
    const fcdp_plan *plan = use->plan;
    const fcdp_topology *topology = &group->comm->topology;
    fcdp_engine *engine = group->comm->engine;
    fcdp_dptr base = fcdp__region_base(group->region);
    fcdp_stream node = group->comm->set->streams[FCDP_STREAM_NODE];
    fcdp_part *parts = malloc(((size_t)plan->n_stale * topology->n_nodes + FCDP_N_SPANS) * sizeof *parts);
    if (!parts) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a gather of '%s'", group->name);
    fcdp_status status = fcdp__region_order(group->region, node);
    if (!status) status = fcdp__driver_stream_wait(engine->drv, node, group->crossed);
    size_t n_restored = 0;
    if (use->joined)
        n_restored = fcdp__plan_slice_parts(plan->restore_mask, group->layout, topology, base, parts);
    size_t n = n_restored + fcdp__plan_node_parts(plan, group->layout, topology, base, parts + n_restored);
    if (!status)
        status = fcdp__comm_all_gather(group->comm, group, FCDP_LANE_NODE, parts, n, n_restored, node);
    free(parts);
    use->last = node;
    return status;
}

/* Each rank takes the others' shards from host memory. A span that was restored is loaded before its stale
 * parts are written over, by the copy stream's own order. */
static fcdp_status node_by_host(fcdp_use *use) {
    fcdp_group *group = use->group;
    fcdp_engine *engine = group->comm->engine;
    const fcdp_topology *topology = &group->comm->topology;
    fcdp_stream h2d = group->comm->set->copies[FCDP_TO_DEVICE];
    fcdp_piece *pieces = malloc(((size_t)use->plan->n_stale * (topology->n_nodes + 1) + 1) * sizeof *pieces);
    if (!pieces) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a gather of '%s'", group->name);
    size_t n = fcdp__plan_take_pieces(use->plan, group->layout, topology, pieces);
    fcdp_status status = fcdp__region_order(group->region, h2d);
    if (!status)
        status = fcdp__region_load_pieces(group->region, use->plan->fill_mask, (fcdp_piece_list){pieces, n});
    if (!status) status = fcdp__driver_stream_wait(engine->drv, h2d, group->crossed);
    free(pieces);
    use->last = h2d;
    return status;
}

/* Where the group is expected to stay on the device, and its ranks meet there, the host's copy can wait until
 * it must go. Behind node_by_slice the put waits on the copy stream: the node's stream goes on with the next
 * group meanwhile. */
fcdp_status fcdp__gather(fcdp_use *use) {
    fcdp_group *group = use->group;
    const fcdp_plan *plan = use->plan;
    fcdp_engine *engine = group->comm->engine;
    if (plan->n_stale == 0) return FCDP_OK;
    /* Spans that it rewrites in part, and the host does not have. */
    uint32_t whole_mask = fcdp__put_lacking(group, plan->restore_mask & plan->fill_mask);
    bool is_alone = group->comm->topology.node_size == 1, by_slice = fcdp__group_by_slice(group);
    bool puts = (!by_slice && !is_alone) || !fcdp__policy_keeps_group(group);
    fcdp_status status = fcdp__region_begin_fill(group->region, plan->fill_mask);
    if (!status && use->packed)
        status = fcdp__packed_gather(use);
    else if (!status)
        status = inter_step(use);
    if (!status && puts && !by_slice)
        status = fcdp__put(group, plan, plan->fill_mask, whole_mask, group->crossed);
    if (!status && !is_alone && !(by_slice && use->packed)) {
        status = by_slice ? node_by_slice(use) : node_by_host(use);
        if (status)
            status = fcdp__fail(status, "gathering '%s' within the node: %s", group->name, fcdp_error_text());
    }
    if (!status && puts && by_slice) {
        status = fcdp__driver_event_record(engine->drv, group->gathered, use->last);
        if (!status) status = fcdp__put(group, plan, plan->fill_mask, whole_mask, group->gathered);
        use->last = group->comm->set->copies[FCDP_TO_HOST];
    }
    group->has_fingerprint = false;
    return status;
}
