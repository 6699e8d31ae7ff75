/* put.c - see the header. */
#include "comm/put.h"

#include <stdlib.h>

#include "comm/internal.h"

uint32_t fcdp__put_lacking(fcdp_group *group, uint32_t mask) {
    fcdp_region_state state;
    fcdp__region_state(group->region, &state);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (state.span[s].stored || state.span[s].whole) mask &= ~(1u << s);
    return mask;
}

uint32_t fcdp__put_device_only(fcdp_group *group) {
    fcdp_region_state state;
    uint32_t mask = 0;
    fcdp__region_state(group->region, &state);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (group->layout->span[s].bytes && state.span[s].on_device) mask |= 1u << s;
    return fcdp__put_lacking(group, mask);
}

/* By slices each rank puts what it will load: few and long copies, and only they need to be page-locked, near
 * its device. */
fcdp_status fcdp__put(fcdp_group *group, const fcdp_plan *plan, uint32_t span_mask, uint32_t whole_mask,
                      fcdp_event after) {
    const fcdp_topology *topology = &group->comm->topology;
    fcdp_piece *pieces = malloc(((size_t)group->layout->n_extents * topology->n_nodes + FCDP_N_SPANS) *
                                sizeof *pieces);
    if (!pieces) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory to store '%s'", group->name);
    size_t n = fcdp__group_by_slice(group)
                   ? fcdp__plan_put_slices(plan, whole_mask, group->layout, topology, pieces)
                   : fcdp__plan_put_pieces(plan, whole_mask, group->layout, topology, pieces);
    fcdp_status status = fcdp__region_store(group->region, span_mask, (fcdp_piece_list){pieces, n}, after);
    free(pieces);
    return status;
}

fcdp_status fcdp__put_now(fcdp_group *group, uint32_t mask) {
    fcdp_plan *plan;
    uint8_t *none = calloc(group->layout->n_extents + 1, 1);
    fcdp_status status = none ? fcdp__plan_make(group->layout, none, &plan)
                              : fcdp__fail(FCDP_ERR_SYSTEM, "no memory to store '%s'", group->name);
    free(none);
    if (status) return status;
    status = fcdp__put(group, plan, mask, mask, fcdp__region_ready(group->region));
    fcdp__plan_destroy(plan);
    return status;
}
