/* plan.c - which spans to restore, and where each stale extent's shard lies in a column block. */
#include "comm/plan.h"

#include <stdlib.h>

typedef struct span_tally { /* of the extents that have bytes */
    uint32_t n_fresh, n_stale;
} span_tally;

static void tally_take(const fcdp_layout *layout, const uint8_t *stale, span_tally *tally_out) {
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) tally_out[s] = (span_tally){0, 0};
    for (uint32_t i = 0; i < layout->n_extents; i++) {
        const fcdp_extent *extent = &layout->extents[i];
        if (extent->shard_bytes == 0) continue;
        if (stale[i])
            tally_out[extent->span].n_stale++;
        else
            tally_out[extent->span].n_fresh++;
    }
}

static void plan_add(fcdp_plan *plan, uint32_t i, size_t shard_bytes) {
    plan->extents[plan->n_big + plan->n_small] =
        (fcdp_plan_extent){.extent = i, .column_offset_bytes = plan->block_bytes};
    plan->block_bytes += shard_bytes;
}

fcdp_status fcdp__plan_make(const fcdp_layout *layout, const fcdp_topology *topology, const uint8_t *stale,
                            fcdp_plan **plan_out) {
    span_tally tally[FCDP_N_SPANS];
    tally_take(layout, stale, tally);
    uint32_t n_stale = tally[0].n_stale + tally[1].n_stale;
    fcdp_plan *plan = calloc(1, sizeof *plan + n_stale * sizeof plan->extents[0]);
    if (!plan) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a plan of %u extents", n_stale);

    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
        if (tally[s].n_fresh) plan->restore_mask |= 1u << s;
        if (tally[s].n_stale) plan->fill_mask |= 1u << s;
        if (tally[s].n_stale && !tally[s].n_fresh) plan->void_mask |= 1u << s;
    }
    size_t small_below = topology->node_size > 1 ? FCDP_PLAN_SMALL_BYTES : 0;
    for (uint32_t i = 0; i < layout->n_extents; i++) {
        size_t bytes = layout->extents[i].shard_bytes;
        if (!stale[i] || bytes == 0 || bytes < small_below) continue;
        plan_add(plan, i, bytes);
        plan->n_big++;
    }
    size_t big_bytes = plan->block_bytes;
    for (uint32_t i = 0; i < layout->n_extents; i++) {
        size_t bytes = layout->extents[i].shard_bytes;
        if (!stale[i] || bytes == 0 || bytes >= small_below) continue;
        plan_add(plan, i, bytes);
        plan->n_small++;
    }
    plan->small_bytes = plan->block_bytes - big_bytes;
    plan->column_bytes = topology->n_nodes * (plan->block_bytes + topology->node_size * plan->small_bytes);
    *plan_out = plan;
    return FCDP_OK;
}

void fcdp__plan_destroy(fcdp_plan *plan) {
    free(plan);
}
