/* gather.c - an unshard on the node worker: restore, then from the column that a crossing brought to the
 * region: scatter, intra, small.
 */
#include <stdio.h>

#include "comm/crossing.h"
#include "comm/imprint.h"

/* ---- steps ---- */

static fcdp_status collective(fcdp_group *group, fcdp_dptr buffer, size_t bytes) {
    fcdp_comm *comm = group->comm;
    fcdp_engine *engine = comm->engine;
    fcdp_status status = fcdp__comm_check_step(comm);
    if (!status) status = fcdp__transport_all_gather(&comm->transport, FCDP_LANE_INTRA, buffer, bytes);
    if (status) return status;
    fcdp__lock_acquire(&engine->lock);
    engine->gather.calls++;
    engine->gather.intra_bytes_sent += (comm->topology.node_size - 1) * bytes;
    fcdp__lock_release(&engine->lock);
    return FCDP_OK;
}

/* Where shard (node b, local l) of plan extent k belongs. */
static fcdp_dptr shard_at(const fcdp_group *group, const fcdp_plan_extent *planned, uint32_t b, uint32_t l) {
    const fcdp_extent *extent = &group->layout->extents[planned->extent];
    size_t rank = (size_t)b * group->comm->topology.node_size + l;
    return fcdp__dptr_add(fcdp__region_base(group->region),
                          extent->offset_bytes + rank * extent->shard_bytes);
}

static fcdp_status scatter_step(const fcdp_job *job) {
    const fcdp_group *group = job->group;
    const fcdp_topology *topology = &group->comm->topology;
    const fcdp_plan *plan = job->plan;
    fcdp_engine *engine = group->comm->engine;
    fcdp_status status = FCDP_OK;
    for (uint32_t k = 0; k < plan->n_big; k++)
        for (uint32_t b = 0; b < topology->n_nodes && !status; b++) {
            const fcdp_plan_extent *planned = &plan->extents[k];
            fcdp_dptr from = fcdp__dptr_add(fcdp__crossing_column(job->crossing),
                                            b * plan->block_bytes + planned->column_offset_bytes);
            status = fcdp__driver_copy_d2d(engine->drv, shard_at(group, planned, b, topology->local), from,
                                           group->layout->extents[planned->extent].shard_bytes,
                                           engine->node_stream);
        }
    return status ? status : fcdp__driver_stream_sync(engine->drv, engine->node_stream);
}

static fcdp_status intra_step(const fcdp_job *job) {
    fcdp_group *group = job->group;
    const fcdp_topology *topology = &group->comm->topology;
    fcdp_status status = FCDP_OK;
    for (uint32_t k = 0; k < job->plan->n_big && topology->node_size > 1; k++)
        for (uint32_t b = 0; b < topology->n_nodes && !status; b++) {
            const fcdp_plan_extent *planned = &job->plan->extents[k];
            status = collective(group, shard_at(group, planned, b, 0),
                                group->layout->extents[planned->extent].shard_bytes);
        }
    return status;
}

/* The small area: slot l holds what local rank l received, n_nodes parts of small_bytes. */
static fcdp_dptr small_part(const fcdp_job *job, uint32_t l, uint32_t b) {
    const fcdp_group *group = job->group;
    size_t n_nodes = group->comm->topology.n_nodes;
    return fcdp__dptr_add(fcdp__crossing_column(job->crossing),
                          n_nodes * job->plan->block_bytes + (l * n_nodes + b) * job->plan->small_bytes);
}

static fcdp_status small_pack(const fcdp_job *job) {
    const fcdp_group *group = job->group;
    const fcdp_plan *plan = job->plan;
    fcdp_engine *engine = group->comm->engine;
    fcdp_status status = FCDP_OK;
    for (uint32_t b = 0; b < group->comm->topology.n_nodes && !status; b++) {
        fcdp_dptr from = fcdp__dptr_add(fcdp__crossing_column(job->crossing),
                                        (b + 1) * plan->block_bytes - plan->small_bytes);
        status = fcdp__driver_copy_d2d(engine->drv, small_part(job, group->comm->topology.local, b), from,
                                       plan->small_bytes, engine->node_stream);
    }
    return status ? status : fcdp__driver_stream_sync(engine->drv, engine->node_stream);
}

static fcdp_status small_unpack(const fcdp_job *job, const fcdp_plan_extent *planned) {
    const fcdp_group *group = job->group;
    const fcdp_topology *topology = &group->comm->topology;
    fcdp_engine *engine = group->comm->engine;
    size_t offset_bytes = planned->column_offset_bytes - (job->plan->block_bytes - job->plan->small_bytes);
    fcdp_status status = FCDP_OK;
    for (uint32_t b = 0; b < topology->n_nodes; b++)
        for (uint32_t l = 0; l < topology->node_size && !status; l++)
            status = fcdp__driver_copy_d2d(engine->drv, shard_at(group, planned, b, l),
                                           fcdp__dptr_add(small_part(job, l, b), offset_bytes),
                                           group->layout->extents[planned->extent].shard_bytes,
                                           engine->node_stream);
    return status;
}

static fcdp_status small_step(const fcdp_job *job) {
    const fcdp_plan *plan = job->plan;
    fcdp_engine *engine = job->group->comm->engine;
    if (plan->n_small == 0) return FCDP_OK;
    fcdp_status status = small_pack(job);
    if (!status)
        status = collective(job->group, small_part(job, 0, 0),
                            job->group->comm->topology.n_nodes * plan->small_bytes);
    for (uint32_t k = 0; k < plan->n_small && !status; k++)
        status = small_unpack(job, &plan->extents[plan->n_big + k]);
    return status ? status : fcdp__driver_stream_sync(engine->drv, engine->node_stream);
}

/* From the column to the region. */
static fcdp_status node_steps(fcdp_job *job) {
    fcdp_status status =
        fcdp__mark_precede(job->engine, &job->mark, job->engine->node_stream); /* the region's last readers */
    if (!status) status = scatter_step(job);
    if (!status) status = intra_step(job);
    if (!status) status = small_step(job);
    return status ? status : fcdp__crossing_end(job->crossing);
}

/* The column goes before the region has a new epoch: after that nothing may fail. */
static fcdp_status node_exchange(fcdp_job *job) {
    fcdp_status status = fcdp__exchange_put(job);
    if (!status) status = fcdp__crossing_end(job->crossing);
    return status ? status : fcdp__exchange_take(job);
}

/* ---- the job ---- */

static fcdp_status stale_gather(fcdp_job *job) {
    if (!job->crossing) return FCDP_OK;
    fcdp_status status = fcdp__crossing_wait(job->crossing);
    if (status) return status;
    status = fcdp__exchange_applies(job->group, job->plan) ? node_exchange(job) : node_steps(job);
    return status
               ? fcdp__fail(status, "gathering '%s' within the node: %s", job->group->name, fcdp_error_text())
               : FCDP_OK;
}

static void unshard_accept(const fcdp_job *job) {
    fcdp_group *group = job->group;
    if (!job->plan->restore_mask) group->content_spoils = job->n_spoils;
    fcdp__lock_acquire(&group->lock);
    if (job->n_spoils == group->n_spoils) /* else somebody wrote into the copy meanwhile: it stays stale */
        for (uint32_t k = 0; k < job->seen.n; k++)
            fcdp__validity_accept(group->validity, job->seen.items[k].extent,
                                  &job->seen.items[k].observation);
    fcdp__lock_release(&group->lock);
}

static void unshard_count(const fcdp_job *job) {
    fcdp_group *group = job->group;
    bool made = job->plan->block_bytes > 0;
    fcdp__lock_acquire(&group->comm->engine->lock);
    group->gathers_made += made;
    group->gathers_avoided += !made;
    group->gathers_forward += made && job->pass == FCDP_PASS_FORWARD;
    group->gathers_backward += made && job->pass == FCDP_PASS_BACKWARD;
    fcdp__lock_release(&group->comm->engine->lock);
}

static fcdp_status unshard_steps(fcdp_job *job) {
    fcdp_group *group = job->group;
    const fcdp_plan *plan = job->plan;
    if (plan->void_mask) fcdp__region_invalidate(group->region, plan->void_mask);
    fcdp_status status = fcdp__group_restore(job);
    if (!status && fcdp__exchange_applies(group, plan)) fcdp__exchange_ready(job);
    if (!status) status = stale_gather(job);
    if (status || !plan->fill_mask) return status;
    if (!fcdp__exchange_applies(group, plan)) fcdp__region_filled(group->region, plan->fill_mask);
    fcdp__imprint_take(group);
    return FCDP_OK;
}

static fcdp_status unshard_enter(fcdp_job *job) {
    const char *name = job->group->name;
    if (job->mark.refused)
        return fcdp__fail(job->mark.refused, "gathering '%s': %s", name, job->mark.refused_text);
    fcdp_status status = fcdp__group_enter(job->group);
    return status ? fcdp__fail(status, "taking device pages for '%s': %s", name, fcdp_error_text()) : FCDP_OK;
}

/* A failure that the node's ranks do not share by their votes: they may be in an all-gather of this unshard.
 */
static bool loses_step(const fcdp_job *job, fcdp_status status) {
    bool by_slice = job->engine->options.restore == FCDP_RESTORE_SLICE &&
                    job->group->comm->topology.node_size > 1;
    return by_slice && status != FCDP_ERR_PEER && status != FCDP_ERR_INVALID;
}

fcdp_status fcdp__job_unshard(fcdp_work *work) {
    fcdp_job *job = (fcdp_job *)work;
    fcdp_group *group = job->group;
    fcdp_status status = unshard_enter(job);
    if (!status) status = unshard_steps(job);
    if (status) {
        if (loses_step(job, status)) fcdp__comm_lose_step(group->comm);
        fcdp__group_forsake(job);
        fcdp__exchange_forsake(job);
        if (job->crossing) status = fcdp__crossing_abandon(job->crossing, job->engine->node_stream, status);
        bool untouched = !group->in_use &&
                         !job->plan->fill_mask; /* no pages for a restore: its bytes are still on the host */
        return untouched ? status : fcdp__group_void(job, job->plan->fill_mask, status);
    }
    unshard_accept(job);
    unshard_count(job);
    return FCDP_OK;
}
