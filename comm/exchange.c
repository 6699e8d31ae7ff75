/* clang-format off */
/* exchange.c - a gather's steps within the node, through its host memory (FCDP_RESTORE=whole).
 *
 *     put     column -> host block: this rank's part of every stale extent                            D2H, W/g
 *     take    host block -> region: every stale extent, or the whole span where all of it is stale    H2D, W
 *
 * So the host copy is there before the first use: the store after forward has nothing left to do, and what somebody writes into the
 * gathered copy never reaches it. Instead of an all-gather the ranks meet twice on the board, per fill f of the group (the order of
 * submission numbers fills alike on every rank):
 *
 *     ready   f * PHASES_PER_FILL + 1    this rank reads no host bytes of an older epoch any more (its jobs before this one are done),
 *                                        and writes none (the region is in use, so the reclaimer stays away)
 *     put     f * PHASES_PER_FILL + 2    its part is on the host
 *
 * A rank that fails writes f to FCDP_BOARD_FILL_LOST and then says put: nobody waits for it, and who sees the loss fails as well.
 * A rank may be a fill ahead of a slow peer: then it has lost f or a later one, and `lost - f >= 0` is read as lost, which errs
 * towards failing.
 */
/* clang-format on */
#include <stdlib.h>

#include "comm/crossing.h"

enum { PHASE_READY = 1, PHASE_PUT = 2, PHASES_PER_FILL = 4 };

bool fcdp__exchange_applies(const fcdp_group *group, const fcdp_plan *plan) {
    return group->comm->topology.node_size > 1 && plan->block_bytes > 0 &&
           group->comm->engine->options.restore == FCDP_RESTORE_WHOLE;
}

static void phase_publish(const fcdp_job *job, uint32_t phase) {
    fcdp__board_publish(job->group->block, FCDP_BOARD_FILL, job->n_fills * PHASES_PER_FILL + phase);
}

void fcdp__exchange_ready(const fcdp_job *job) {
    phase_publish(job, PHASE_READY);
}

void fcdp__exchange_forsake(const fcdp_job *job) {
    if (!fcdp__exchange_applies(job->group, job->plan)) return;
    fcdp__board_publish(job->group->block, FCDP_BOARD_FILL_LOST, job->n_fills);
    phase_publish(job, PHASE_PUT);
}

static fcdp_status phase_await(const fcdp_job *job, uint32_t phase, const char *what) {
    const fcdp_host_block *block = job->group->block;
    fcdp_status status =
        fcdp__board_wait_all(block, FCDP_BOARD_FILL, job->n_fills * PHASES_PER_FILL + phase, what);
    for (uint32_t l = 0; l < job->group->comm->topology.node_size && !status; l++) {
        uint32_t lost = fcdp__board_read(block, FCDP_BOARD_FILL_LOST, l);
        if (lost && (int32_t)(lost - job->n_fills) >= 0)
            status = fcdp__fail(FCDP_ERR_PEER, "local rank %u of this node failed in the same gather", l);
    }
    return status;
}

/* Shard (node b, this rank's local index) of every planned extent, for every b. */
static fcdp_status parts_put(const fcdp_job *job) {
    const fcdp_group *group = job->group;
    const fcdp_topology *topology = &group->comm->topology;
    const fcdp_plan *plan = job->plan;
    size_t n = 0;
    fcdp_region_piece *parts = malloc((plan->n_big + plan->n_small) * topology->n_nodes * sizeof *parts);
    if (!parts) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory");
    for (uint32_t k = 0; k < plan->n_big + plan->n_small; k++)
        for (uint32_t b = 0; b < topology->n_nodes; b++) {
            const fcdp_extent *extent = &group->layout->extents[plan->extents[k].extent];
            size_t rank = (size_t)b * topology->node_size + topology->local;
            size_t at = b * plan->block_bytes + plan->extents[k].column_offset_bytes;
            parts[n++] =
                (fcdp_region_piece){extent->offset_bytes + rank * extent->shard_bytes, extent->shard_bytes,
                                    fcdp__dptr_add(fcdp__crossing_column(job->crossing), at)};
        }
    fcdp_status status = fcdp__region_put(group->region, parts, n, NULL);
    free(parts);
    return status;
}

static fcdp_status spans_take(const fcdp_job *job) {
    const fcdp_group *group = job->group;
    const fcdp_layout *layout = group->layout;
    const fcdp_plan *plan = job->plan;
    uint32_t n_planned = plan->n_big + plan->n_small;
    size_t n = 0;
    fcdp_region_piece *pieces = malloc((n_planned + FCDP_N_SPANS) * sizeof *pieces);
    if (!pieces) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory");
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (plan->void_mask & 1u << s)
            pieces[n++] = (fcdp_region_piece){.offset_bytes = layout->span[s].offset_bytes,
                                              .bytes = layout->span[s].bytes};
    for (uint32_t k = 0; k < n_planned; k++) {
        const fcdp_extent *extent = &layout->extents[plan->extents[k].extent];
        if (!(plan->void_mask & 1u << extent->span))
            pieces[n++] = (fcdp_region_piece){.offset_bytes = extent->offset_bytes,
                                              .bytes = layout->n_shards * extent->shard_bytes};
    }
    fcdp_status status =
        fcdp__region_take(group->region, pieces, n, plan->fill_mask, fcdp__mark_event(&job->mark));
    free(pieces);
    return status;
}

fcdp_status fcdp__exchange_put(const fcdp_job *job) {
    fcdp_status status = phase_await(job, PHASE_READY, "the gather's turn at this node's host memory");
    if (!status) status = parts_put(job);
    if (!status) phase_publish(job, PHASE_PUT);
    return status;
}

fcdp_status fcdp__exchange_take(const fcdp_job *job) {
    fcdp_status status = phase_await(job, PHASE_PUT, "the parts that the ranks of this node gathered");
    return status ? status : spans_take(job);
}
