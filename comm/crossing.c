/* crossing.c - see crossing.h. */
#include "comm/crossing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static fcdp_status step_fail(const fcdp_crossing *crossing, fcdp_status status) {
    return fcdp__fail(status, "gathering '%s' between nodes: %s", crossing->group->name, fcdp_error_text());
}

/* ---- on the inter worker ---- */

static fcdp_status all_gather_start(fcdp_crossing *crossing) {
    const fcdp_transport *transport = &crossing->group->comm->transport;
    fcdp_status status = fcdp__comm_check_step(crossing->group->comm);
    if (status) return status;
    return transport->start(transport->ctx, FCDP_LANE_INTER, fcdp__vrange_base(crossing->column->range),
                            crossing->plan->block_bytes, &crossing->pending);
}

static fcdp_status pack(const fcdp_crossing *crossing) {
    const fcdp_group *group = crossing->group;
    const fcdp_plan *plan = crossing->plan;
    fcdp_engine *engine = crossing->engine;
    fcdp_dptr own = fcdp__dptr_add(fcdp__vrange_base(crossing->column->range),
                                   group->comm->topology.node * plan->block_bytes);
    fcdp_status status = fcdp__mark_precede(engine, &crossing->mark, engine->inter_stream);
    for (uint32_t k = 0; k < plan->n_big + plan->n_small && !status; k++)
        status = fcdp__driver_copy_d2d(engine->drv, fcdp__dptr_add(own, plan->extents[k].column_offset_bytes),
                                       (fcdp_dptr){crossing->inputs[k]},
                                       group->layout->extents[plan->extents[k].extent].shard_bytes,
                                       engine->inter_stream);
    return status ? status : fcdp__driver_stream_sync(engine->drv, engine->inter_stream);
}

size_t fcdp__crossing_column_bytes(const fcdp_group *group, const fcdp_plan *plan) {
    bool exchange = fcdp__exchange_applies(group, plan);
    return exchange ? group->comm->topology.n_nodes * plan->block_bytes : plan->column_bytes;
}

static fcdp_status cross(fcdp_crossing *crossing) {
    size_t bytes = fcdp__crossing_column_bytes(crossing->group, crossing->plan);
    fcdp_status status = fcdp__column_take(crossing->engine->columns, bytes, &crossing->column);
    if (!status) status = pack(crossing);
    return status ? status : all_gather_start(crossing);
}

/* Keeps the text. */
static fcdp_status column_leave(fcdp_crossing *crossing, fcdp_stream stream, fcdp_status status) {
    if (!crossing->column) return status;
    fcdp_engine *engine = crossing->engine;
    char text[1024];
    snprintf(text, sizeof text, "%s", fcdp_error_text());
    if (crossing->is_restless || fcdp__driver_stream_sync(engine->drv, stream) ||
        fcdp__crossing_end(crossing)) {
        fcdp__log(FCDP_LOG_WARN, "'%s' keeps the device pages of its column: %s", crossing->group->name,
                  fcdp_error_text());
        fcdp__column_lose(engine->columns, crossing->column);
        crossing->column = NULL;
    }
    return fcdp__fail(status, "%s", text);
}

static fcdp_status crossing_run(fcdp_work *work) {
    fcdp_crossing *crossing = (fcdp_crossing *)work;
    fcdp__worker_wait_ticket(crossing->engine->node_worker, crossing->after);
    fcdp_status status = cross(crossing);
    if (!status) return FCDP_OK;
    fcdp__comm_lose_step(crossing->group->comm);
    status = step_fail(crossing, status);
    return column_leave(crossing, crossing->engine->inter_stream, status);
}

/* ---- by who takes it ---- */

static fcdp_status all_gather_wait(fcdp_crossing *crossing) {
    const fcdp_comm *comm = crossing->group->comm;
    fcdp_engine *engine = crossing->engine;
    size_t bytes = crossing->plan->block_bytes;
    fcdp_status status = comm->transport.wait(comm->transport.ctx, crossing->pending);
    if (status) {
        crossing->is_restless = !comm->transport.fails_quietly;
        fcdp__comm_lose_step(crossing->group->comm);
        return step_fail(crossing, status);
    }
    fcdp__lock_acquire(&engine->lock);
    engine->gather.calls++;
    engine->gather.inter_bytes_sent += (comm->topology.n_nodes - 1) * bytes;
    fcdp__lock_release(&engine->lock);
    return FCDP_OK;
}

fcdp_status fcdp__crossing_wait(fcdp_crossing *crossing) {
    crossing->waited_for = true;
    fcdp_status status = fcdp__worker_wait(crossing->engine->inter_worker, &crossing->work);
    return status ? status : all_gather_wait(crossing);
}

fcdp_dptr fcdp__crossing_column(const fcdp_crossing *crossing) {
    return fcdp__vrange_base(crossing->column->range);
}

fcdp_status fcdp__crossing_end(fcdp_crossing *crossing) {
    fcdp_status status = fcdp__column_give(crossing->engine->columns, crossing->column);
    if (!status) crossing->column = NULL;
    return status;
}

fcdp_status fcdp__crossing_abandon(fcdp_crossing *crossing, fcdp_stream stream, fcdp_status status) {
    if (!crossing->waited_for) {
        char text[1024];
        snprintf(text, sizeof text, "%s", fcdp_error_text());
        (void)!fcdp__crossing_wait(crossing);
        status = fcdp__fail(status, "%s", text);
    }
    return column_leave(crossing, stream, status);
}

/* ---- submission ---- */

void fcdp__crossing_destroy(fcdp_crossing *crossing) {
    if (!crossing) return;
    FCDP_CHECK(0, !crossing->column);
    fcdp__mark_forget(crossing->engine, &crossing->mark);
    if (crossing->plan) fcdp__plan_destroy(crossing->plan);
    free(crossing->inputs);
    free(crossing->stale);
    fcdp__seen_free(&crossing->seen);
    free(crossing);
}

static void crossing_dispose(fcdp_work *work) {
    fcdp__crossing_destroy((fcdp_crossing *)work);
}

static fcdp_status inputs_take(fcdp_crossing *crossing, const uint64_t *inputs) {
    const fcdp_plan *plan = crossing->plan;
    for (uint32_t k = 0; k < plan->n_big + plan->n_small; k++) {
        crossing->inputs[k] = inputs[plan->extents[k].extent];
        if (!crossing->inputs[k])
            return fcdp__fail(FCDP_ERR_INVALID, "'%s': extent %u is stale and has no input",
                              crossing->group->name, plan->extents[k].extent);
    }
    return FCDP_OK;
}

static fcdp_status crossing_fill(fcdp_crossing *crossing, const uint8_t *stale, const uint64_t *inputs) {
    const fcdp_group *group = crossing->group;
    uint32_t n_extents = group->layout->n_extents;
    fcdp_status status = fcdp__plan_make(group->layout, &group->comm->topology, stale, &crossing->plan);
    if (status || crossing->plan->block_bytes == 0) return status;
    if (!inputs)
        return fcdp__fail(FCDP_ERR_INVALID, "'%s' is stale, has no inputs, and no prefetch", group->name);
    crossing->inputs = malloc((n_extents + 1) * sizeof *crossing->inputs);
    crossing->stale = malloc(n_extents + 1);
    if (!crossing->inputs || !crossing->stale)
        return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a gather of '%s'", group->name);
    memcpy(crossing->stale, stale, n_extents);
    return inputs_take(crossing, inputs);
}

fcdp_status fcdp__crossing_create(fcdp_group *group, const uint8_t *stale, const uint64_t *inputs,
                                  fcdp_stream stream, fcdp_crossing **crossing_out) {
    fcdp_crossing *crossing = calloc(1, sizeof *crossing);
    if (!crossing) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a gather of '%s'", group->name);
    crossing->engine = group->comm->engine;
    crossing->group = group;
    crossing->work = (fcdp_work){.run = crossing_run, .dispose = crossing_dispose, .waited = true};
    fcdp_status status = crossing_fill(crossing, stale, inputs);
    bool needed = !status && crossing->plan->block_bytes > 0;
    if (needed)
        fcdp__mark_make(crossing->engine, stream, &crossing->mark);
    else
        fcdp__crossing_destroy(crossing);
    *crossing_out = needed ? crossing : NULL;
    return status;
}

bool fcdp__crossing_matches(const fcdp_crossing *crossing, const uint8_t *stale) {
    for (uint32_t i = 0; i < crossing->group->layout->n_extents; i++)
        if (!stale[i] != !crossing->stale[i]) return false;
    return true;
}

void fcdp__crossing_submit(fcdp_crossing *crossing) {
    crossing->after = fcdp__worker_ticket(crossing->engine->node_worker);
    (void)fcdp__worker_submit(crossing->engine->inter_worker, &crossing->work);
}

bool fcdp__crossing_submit_ahead(fcdp_crossing *crossing) {
    fcdp_engine *engine = crossing->engine;
    fcdp_comm *comm = crossing->group->comm;
    fcdp__lock_acquire(&engine->lock);
    bool fits = comm->n_ahead < comm->ahead_limit;
    if (fits) crossing->after = comm->taken_at[comm->ahead_limit - ++comm->n_ahead];
    fcdp__lock_release(&engine->lock);
    if (fits) (void)fcdp__worker_submit(engine->inter_worker, &crossing->work);
    return fits;
}

void fcdp__crossing_not_ahead(fcdp_comm *comm) {
    fcdp__lock_acquire(&comm->engine->lock);
    comm->n_ahead--;
    fcdp__lock_release(&comm->engine->lock);
}

void fcdp__crossing_taken(fcdp_comm *comm, uint64_t ticket) {
    fcdp__lock_acquire(&comm->engine->lock);
    memmove(&comm->taken_at[1], &comm->taken_at[0], sizeof comm->taken_at - sizeof comm->taken_at[0]);
    comm->taken_at[0] = ticket;
    fcdp__lock_release(&comm->engine->lock);
}
