/* gather.c - executes plans on the worker: column, pack, inter, scatter, intra, small; the unshard around
 * them.
 *
 * The column is mapped from the start of the inter step to the end of the unshard that consumes it, so the
 * device's peak is the regions in use and one column.
 */
#include <stdio.h>

#include "comm/imprint.h"

static fcdp_status step_fail(const fcdp_group *group, const char *step, fcdp_status status) {
    return fcdp__fail(status, "gathering '%s' %s: %s", group->name, step, fcdp_error_text());
}

/* ---- the column ---- */

static fcdp_status column_map(fcdp_group *group, size_t bytes) {
    fcdp_engine *engine = group->comm->engine;
    size_t page_bytes = fcdp__driver_page_bytes(engine->drv);
    if (group->column && fcdp__vrange_n_pages(group->column) * page_bytes < bytes) {
        fcdp__vrange_destroy(group->column);
        group->column = NULL;
    }
    fcdp_status status = FCDP_OK;
    if (!group->column) status = fcdp__vrange_create(engine->drv, engine->pool, bytes, &group->column);
    if (!status && !fcdp__vrange_is_mapped(group->column)) status = fcdp__vrange_map(group->column);
    return status;
}

/* Nothing on the worker's stream touches it any more. */
static fcdp_status column_unmap(fcdp_group *group) {
    group->column_full = false;
    if (!group->column || !fcdp__vrange_is_mapped(group->column)) return FCDP_OK;
    return fcdp__vrange_unmap(group->column);
}

/* After a failure: copies into or out of the column may be pending. If even the wait fails, the pages stay.
 * Keeps the text. */
static fcdp_status column_abandon(fcdp_group *group, fcdp_status status) {
    fcdp_engine *engine = group->comm->engine;
    char text[1024];
    snprintf(text, sizeof text, "%s", fcdp_error_text());
    group->column_full = false;
    if (fcdp__driver_stream_sync(engine->drv, engine->stream) || column_unmap(group))
        fcdp__log(FCDP_LOG_WARN, "'%s' keeps the device pages of its column: %s", group->name,
                  fcdp_error_text());
    return fcdp__fail(status, "%s", text);
}

/* ---- steps ---- */

static fcdp_status collective(fcdp_group *group, fcdp_lane lane, fcdp_dptr buffer, size_t bytes) {
    fcdp_comm *comm = group->comm;
    fcdp_engine *engine = comm->engine;
    fcdp_status status = comm->transport.all_gather(comm->transport.ctx, lane, buffer, bytes);
    if (status) return status;
    fcdp__lock_acquire(&engine->lock);
    engine->gather.calls++;
    if (lane == FCDP_LANE_INTER)
        engine->gather.inter_bytes_sent += (comm->topology.n_nodes - 1) * bytes;
    else
        engine->gather.intra_bytes_sent += (comm->topology.node_size - 1) * bytes;
    fcdp__lock_release(&engine->lock);
    return FCDP_OK;
}

/* What the worker's stream gets from now on comes after what the caller's had at submission. */
static fcdp_status caller_precede(const fcdp_job *job) {
    if (!job->event) return FCDP_OK;
    return fcdp__driver_stream_wait(job->engine->drv, job->engine->stream, job->event->event);
}

static fcdp_status pack_and_inter(fcdp_job *job) {
    fcdp_group *group = job->group;
    fcdp_engine *engine = group->comm->engine;
    const fcdp_plan *plan = job->plan;
    fcdp_topology *topology = &group->comm->topology;
    fcdp_status status = column_map(group, fcdp__exchange_applies(job) ? topology->n_nodes * plan->block_bytes
                                                                       : plan->column_bytes);
    if (status) return status;
    fcdp_dptr column = fcdp__vrange_base(group->column);
    fcdp_dptr own = fcdp__dptr_add(column, topology->node * plan->block_bytes);
    status = caller_precede(job);
    for (uint32_t k = 0; k < plan->n_big + plan->n_small && !status; k++)
        status = fcdp__driver_copy_d2d(engine->drv, fcdp__dptr_add(own, plan->extents[k].column_offset_bytes),
                                       (fcdp_dptr){job->inputs[k]},
                                       group->layout->extents[plan->extents[k].extent].shard_bytes,
                                       engine->stream);
    if (!status) status = fcdp__driver_stream_sync(engine->drv, engine->stream);
    return status ? status : collective(group, FCDP_LANE_INTER, column, plan->block_bytes);
}

static fcdp_status inter_step(fcdp_job *job) {
    fcdp_status status = pack_and_inter(job);
    if (!status) job->group->column_full = true;
    return status ? step_fail(job->group, "between nodes", status) : FCDP_OK;
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
            fcdp_dptr from = fcdp__dptr_add(fcdp__vrange_base(group->column),
                                            b * plan->block_bytes + planned->column_offset_bytes);
            status =
                fcdp__driver_copy_d2d(engine->drv, shard_at(group, planned, b, topology->local), from,
                                      group->layout->extents[planned->extent].shard_bytes, engine->stream);
        }
    return status ? status : fcdp__driver_stream_sync(engine->drv, engine->stream);
}

static fcdp_status intra_step(const fcdp_job *job) {
    fcdp_group *group = job->group;
    const fcdp_topology *topology = &group->comm->topology;
    fcdp_status status = FCDP_OK;
    for (uint32_t k = 0; k < job->plan->n_big && topology->node_size > 1; k++)
        for (uint32_t b = 0; b < topology->n_nodes && !status; b++) {
            const fcdp_plan_extent *planned = &job->plan->extents[k];
            status = collective(group, FCDP_LANE_INTRA, shard_at(group, planned, b, 0),
                                group->layout->extents[planned->extent].shard_bytes);
        }
    return status;
}

/* The small area: slot l holds what local rank l received, n_nodes parts of small_bytes. */
static fcdp_dptr small_part(const fcdp_job *job, uint32_t l, uint32_t b) {
    const fcdp_group *group = job->group;
    size_t n_nodes = group->comm->topology.n_nodes;
    return fcdp__dptr_add(fcdp__vrange_base(group->column),
                          n_nodes * job->plan->block_bytes + (l * n_nodes + b) * job->plan->small_bytes);
}

static fcdp_status small_pack(const fcdp_job *job) {
    const fcdp_group *group = job->group;
    const fcdp_plan *plan = job->plan;
    fcdp_engine *engine = group->comm->engine;
    fcdp_status status = FCDP_OK;
    for (uint32_t b = 0; b < group->comm->topology.n_nodes && !status; b++) {
        fcdp_dptr from =
            fcdp__dptr_add(fcdp__vrange_base(group->column), (b + 1) * plan->block_bytes - plan->small_bytes);
        status = fcdp__driver_copy_d2d(engine->drv, small_part(job, group->comm->topology.local, b), from,
                                       plan->small_bytes, engine->stream);
    }
    return status ? status : fcdp__driver_stream_sync(engine->drv, engine->stream);
}

static fcdp_status small_unpack(const fcdp_job *job, const fcdp_plan_extent *planned) {
    const fcdp_group *group = job->group;
    const fcdp_topology *topology = &group->comm->topology;
    fcdp_engine *engine = group->comm->engine;
    size_t offset_bytes = planned->column_offset_bytes - (job->plan->block_bytes - job->plan->small_bytes);
    fcdp_status status = FCDP_OK;
    for (uint32_t b = 0; b < topology->n_nodes; b++)
        for (uint32_t l = 0; l < topology->node_size && !status; l++)
            status =
                fcdp__driver_copy_d2d(engine->drv, shard_at(group, planned, b, l),
                                      fcdp__dptr_add(small_part(job, l, b), offset_bytes),
                                      group->layout->extents[planned->extent].shard_bytes, engine->stream);
    return status;
}

static fcdp_status small_step(const fcdp_job *job) {
    const fcdp_plan *plan = job->plan;
    fcdp_engine *engine = job->group->comm->engine;
    if (plan->n_small == 0) return FCDP_OK;
    fcdp_status status = small_pack(job);
    if (!status)
        status = collective(job->group, FCDP_LANE_INTRA, small_part(job, 0, 0),
                            job->group->comm->topology.n_nodes * plan->small_bytes);
    for (uint32_t k = 0; k < plan->n_small && !status; k++)
        status = small_unpack(job, &plan->extents[plan->n_big + k]);
    return status ? status : fcdp__driver_stream_sync(engine->drv, engine->stream);
}

/* From the full column to the region. */
static fcdp_status node_steps(fcdp_job *job) {
    fcdp_group *group = job->group;
    fcdp_status status = caller_precede(job); /* the region's last readers */
    if (!status) status = scatter_step(job);
    if (!status) status = intra_step(job);
    if (!status) status = small_step(job);
    if (!status) status = column_unmap(group);
    return status ? step_fail(group, "within the node", status) : FCDP_OK;
}

/* The column goes before the region has a new epoch: after that nothing may fail. */
static fcdp_status node_exchange(fcdp_job *job) {
    fcdp_status status = fcdp__exchange_put(job);
    if (!status) status = column_unmap(job->group);
    if (!status) status = fcdp__exchange_take(job);
    return status ? step_fail(job->group, "within the node", status) : FCDP_OK;
}

/* ---- jobs ---- */

static fcdp_status stale_gather(fcdp_job *job) {
    fcdp_group *group = job->group;
    if (job->plan->block_bytes == 0) return FCDP_OK;
    if (!job->use_column) {
        fcdp_status status = inter_step(job);
        if (status) return status;
    } else if (!group->column_full) {
        return fcdp__fail(FCDP_ERR_TRANSPORT, "gathering '%s': its prefetch failed: %s", group->name,
                          group->prefetch_text);
    }
    return fcdp__exchange_applies(job) ? node_exchange(job) : node_steps(job);
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

/* The job may start: it has its event, and no prefetch that it does not use is in the way. */
static fcdp_status job_begin(fcdp_job *job) {
    if (job->refused)
        return fcdp__fail(job->refused, "gathering '%s': %s", job->group->name, job->refused_text);
    if (job->use_column) return FCDP_OK;
    fcdp_status status = column_unmap(job->group);
    return status ? step_fail(job->group, "after a prefetch that is not used", status) : FCDP_OK;
}

static fcdp_status unshard_steps(fcdp_job *job) {
    fcdp_group *group = job->group;
    const fcdp_plan *plan = job->plan;
    if (plan->void_mask) fcdp__region_invalidate(group->region, plan->void_mask);
    fcdp_status status = fcdp__group_restore(job);
    if (!status && fcdp__exchange_applies(job)) fcdp__exchange_ready(job);
    if (!status) status = stale_gather(job);
    if (status || !plan->fill_mask) return status;
    if (!fcdp__exchange_applies(job)) fcdp__region_filled(group->region, plan->fill_mask);
    fcdp__imprint_take(group);
    return FCDP_OK;
}

fcdp_status fcdp__job_unshard(fcdp_work *work) {
    fcdp_job *job = (fcdp_job *)work;
    fcdp_group *group = job->group;
    fcdp_status status = job_begin(job);
    if (!status) {
        status = fcdp__group_enter(group);
        if (status)
            status = fcdp__fail(status, "taking device pages for '%s': %s", group->name, fcdp_error_text());
        else
            status = unshard_steps(job);
    }
    if (status) {
        status = column_abandon(group, status);
        fcdp__group_forsake(job);
        fcdp__exchange_forsake(job);
        bool untouched = !group->in_use &&
                         !job->plan->fill_mask; /* no pages for a restore: its bytes are still on the host */
        return untouched ? status : fcdp__group_void(job, job->plan->fill_mask, status);
    }
    unshard_accept(job);
    unshard_count(job);
    return FCDP_OK;
}

fcdp_status fcdp__job_prefetch(fcdp_work *work) {
    fcdp_job *job = (fcdp_job *)work;
    fcdp_group *group = job->group;
    fcdp_status status = job_begin(job);
    if (!status) status = inter_step(job);
    if (!status) return FCDP_OK;
    status = column_abandon(group, status);
    snprintf(group->prefetch_text, sizeof group->prefetch_text, "%s", fcdp_error_text());
    return status;
}

fcdp_status fcdp__job_unprefetch(fcdp_work *work) {
    fcdp_job *job = (fcdp_job *)work;
    fcdp_status status = job_begin(job);
    if (status) fcdp__group_late_set(job->group, status);
    return status;
}
