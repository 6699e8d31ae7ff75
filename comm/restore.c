/* restore.c - see the header. */
#include "comm/restore.h"

#include "comm/put.h"

/* This rank's slices go to their places; the others come from the node's other ranks, here or in the gather's
 * node step (use->joined). What this rank has on the device is in its place already. The others load once all
 * words say that host memory is complete. A small group's shards are there from all ranks, so what this rank
 * has kept to itself must be put first. */
static fcdp_status restore_slices(fcdp_use *use) {
    fcdp_group *group = use->group;
    fcdp_engine *engine = group->comm->engine;
    fcdp_stream node = group->comm->set->streams[FCDP_STREAM_NODE];
    fcdp_part parts[FCDP_N_SPANS];
    fcdp_region_state state;
    fcdp__region_state(group->region, &state);
    uint32_t unput = fcdp__put_device_only(group) & use->plan->restore_mask;
    fcdp_status status = unput ? fcdp__put_now(group, unput) : FCDP_OK;
    if (!status) status = fcdp__region_order(group->region, node);
    for (uint32_t s = 0; s < FCDP_N_SPANS && !status; s++)
        if (use->plan->restore_mask & 1u << s && !state.span[s].on_device)
            status = fcdp__region_load_slice(group->region, s);
    if (!status) status = fcdp__driver_stream_wait(engine->drv, node, fcdp__region_loaded(group->region));
    if (!status) status = fcdp__driver_stream_wait(engine->drv, node, fcdp__region_stored(group->region));
    use->last = use->joined ? group->comm->set->copies[FCDP_TO_DEVICE] : node;
    if (status || use->joined) return status;
    size_t n = fcdp__plan_slice_parts(use->plan->restore_mask, group->layout, &group->comm->topology,
                                      fcdp__region_base(group->region), parts);
    return fcdp__comm_all_gather(group->comm, group, FCDP_LANE_NODE, parts, n, n, node);
}

/* Without the other ranks, everything comes from the node's host memory. */
fcdp_status fcdp__restore(fcdp_use *use) {
    fcdp_group *group = use->group;
    fcdp_engine *engine = group->comm->engine;
    fcdp_stream h2d = group->comm->set->copies[FCDP_TO_DEVICE];
    fcdp_region_state state;
    if (!use->plan->restore_mask) return FCDP_OK;
    fcdp_status status = fcdp__region_order(group->region, h2d);
    if (use->collects) {
        if (!status) status = restore_slices(use);
    } else {
        fcdp__region_state(group->region, &state);
        for (uint32_t s = 0; s < FCDP_N_SPANS && !status; s++)
            if (use->plan->restore_mask & 1u << s && !state.span[s].on_device)
                status = fcdp__region_load_whole(group->region, s);
        use->last = h2d;
    }
    if (!status) status = fcdp__driver_event_record(engine->drv, group->restored, use->last);
    return status ? fcdp__fail(status, "restoring '%s': %s", group->name, fcdp_error_text()) : FCDP_OK;
}
