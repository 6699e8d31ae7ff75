/* plan.c - the arithmetic of a gather and a restore: which bytes go where.
 *
 * A shard's place in the region follows from its rank, and the region's layout is that of the unsharded
 * parameters. So collectives bring bytes straight to their places; only a packed gather is copied on. The
 * functions turn places into what the callers need: parts of a collective, cuts of a packed one, pieces of
 * host memory.
 *
 * Nothing is enqueued here, so that a test can carry out the plans of all ranks on plain memory
 * (tests/comm/test_plan.c).
 */
#include "comm/plan.h"

#include <stdlib.h>

fcdp_status fcdp__plan_make(const fcdp_layout *layout, const uint8_t *stale, fcdp_plan **plan_out) {
    fcdp_plan *plan = calloc(1, sizeof *plan + layout->n_extents * sizeof plan->stale[0]);
    if (!plan) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a plan of %u extents", layout->n_extents);
    for (uint32_t i = 0; i < layout->n_extents; i++) {
        const fcdp_extent *extent = &layout->extents[i];
        if (extent->shard_bytes == 0) continue;
        if (stale[i]) {
            plan->fill_mask |= 1u << extent->span;
            plan->stale[plan->n_stale++] = i;
            plan->block_bytes += extent->shard_bytes;
        } else {
            plan->restore_mask |= 1u << extent->span;
        }
    }
    *plan_out = plan;
    return FCDP_OK;
}

void fcdp__plan_destroy(fcdp_plan *plan) {
    free(plan);
}

fcdp_piece fcdp__plan_shard(const fcdp_layout *layout, const fcdp_topology *topology, uint32_t extent,
                            uint32_t node, uint32_t local) {
    const fcdp_extent *e = &layout->extents[extent];
    size_t rank = (size_t)node * topology->node_size + local;
    return (fcdp_piece){e->offset_bytes + rank * e->shard_bytes, e->shard_bytes};
}

size_t fcdp__plan_inter_parts(const fcdp_plan *plan, const fcdp_layout *layout, const fcdp_topology *topology,
                              fcdp_dptr base, fcdp_part *parts_out) {
    for (uint32_t k = 0; k < plan->n_stale; k++) {
        fcdp_piece first = fcdp__plan_shard(layout, topology, plan->stale[k], 0, topology->local);
        parts_out[k] = (fcdp_part){.at = fcdp__dptr_add(base, first.offset_bytes),
                                   .bytes = first.bytes,
                                   .stride_bytes = topology->node_size * first.bytes};
    }
    return plan->n_stale;
}

size_t fcdp__plan_node_parts(const fcdp_plan *plan, const fcdp_layout *layout, const fcdp_topology *topology,
                             fcdp_dptr base, fcdp_part *parts_out) {
    size_t n = 0;
    for (uint32_t k = 0; k < plan->n_stale; k++)
        for (uint32_t b = 0; b < topology->n_nodes; b++) {
            fcdp_piece first = fcdp__plan_shard(layout, topology, plan->stale[k], b, 0);
            parts_out[n++] = (fcdp_part){fcdp__dptr_add(base, first.offset_bytes), first.bytes, first.bytes};
        }
    return n;
}

size_t fcdp__plan_slice_parts(uint32_t span_mask, const fcdp_layout *layout, const fcdp_topology *topology,
                              fcdp_dptr base, fcdp_part *parts_out) {
    size_t n = 0;
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
        if (!(span_mask & 1u << s)) continue;
        size_t bytes = layout->span[s].bytes / topology->node_size;
        parts_out[n++] = (fcdp_part){fcdp__dptr_add(base, layout->span[s].offset_bytes), bytes, bytes};
    }
    return n;
}

size_t fcdp__plan_cuts(const fcdp_plan *plan, const fcdp_layout *layout, size_t first, size_t bytes,
                       fcdp_cut *cuts_out) {
    size_t n = 0, begin = 0; /* begin: of the shard */
    for (uint32_t k = 0; k < plan->n_stale && begin < first + bytes; k++) {
        size_t end = begin + layout->extents[plan->stale[k]].shard_bytes;
        size_t from = begin > first ? begin : first, to = end < first + bytes ? end : first + bytes;
        if (from < to)
            cuts_out[n++] = (fcdp_cut){
                .extent = plan->stale[k], .from = from - begin, .bytes = to - from, .at = from - first};
        begin = end;
    }
    return n;
}

fcdp_rows fcdp__plan_rows(const fcdp_cut *cut, const fcdp_layout *layout, const fcdp_topology *topology,
                          uint32_t local, fcdp_dptr blocks, size_t block_bytes, fcdp_dptr base) {
    fcdp_piece first = fcdp__plan_shard(layout, topology, cut->extent, 0, local);
    return (fcdp_rows){.dst = fcdp__dptr_add(base, first.offset_bytes + cut->from),
                       .dst_stride = topology->node_size * first.bytes,
                       .src = fcdp__dptr_add(blocks, cut->at),
                       .src_stride = block_bytes,
                       .bytes = cut->bytes,
                       .n = topology->n_nodes};
}

/* Shards (b, local) of one extent, for every b. */
static size_t own_pieces(const fcdp_layout *layout, const fcdp_topology *topology, uint32_t extent,
                         fcdp_piece *pieces_out) {
    for (uint32_t b = 0; b < topology->n_nodes; b++)
        pieces_out[b] = fcdp__plan_shard(layout, topology, extent, b, topology->local);
    return topology->n_nodes;
}

size_t fcdp__plan_put_pieces(const fcdp_plan *plan, uint32_t whole_mask, const fcdp_layout *layout,
                             const fcdp_topology *topology, fcdp_piece *pieces_out) {
    size_t n = 0;
    for (uint32_t k = 0; k < plan->n_stale; k++)
        if (!(whole_mask & 1u << layout->extents[plan->stale[k]].span))
            n += own_pieces(layout, topology, plan->stale[k], pieces_out + n);
    for (uint32_t i = 0; i < layout->n_extents; i++)
        if (whole_mask & 1u << layout->extents[i].span && layout->extents[i].shard_bytes)
            n += own_pieces(layout, topology, i, pieces_out + n);
    return n;
}

/* A span that is stale as a whole is one piece: what pads it may go along. */
size_t fcdp__plan_put_slices(const fcdp_plan *plan, uint32_t whole_mask, const fcdp_layout *layout,
                             const fcdp_topology *topology, fcdp_piece *pieces_out) {
    uint32_t one_piece = whole_mask | (plan->fill_mask & ~plan->restore_mask);
    size_t n = 0;
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (one_piece & 1u << s && layout->span[s].bytes)
            pieces_out[n++] = fcdp__layout_slice(layout, s, topology->local);
    for (uint32_t k = 0; k < plan->n_stale; k++) {
        const fcdp_extent *e = &layout->extents[plan->stale[k]];
        if (one_piece & 1u << e->span) continue;
        fcdp_piece slice = fcdp__layout_slice(layout, e->span, topology->local);
        size_t begin = e->offset_bytes, end = begin + fcdp__layout_extent_bytes(layout, plan->stale[k]);
        if (begin < slice.offset_bytes) begin = slice.offset_bytes;
        if (end > slice.offset_bytes + slice.bytes) end = slice.offset_bytes + slice.bytes;
        if (begin < end) pieces_out[n++] = (fcdp_piece){begin, end - begin};
    }
    return n;
}

/* Of each stale extent, what lies between this rank's shards: before the first, between each two, after the
 * last. */
size_t fcdp__plan_take_pieces(const fcdp_plan *plan, const fcdp_layout *layout, const fcdp_topology *topology,
                              fcdp_piece *pieces_out) {
    size_t n = 0;
    for (uint32_t k = 0; k < plan->n_stale; k++) {
        const fcdp_extent *e = &layout->extents[plan->stale[k]];
        size_t at = e->offset_bytes, end = at + fcdp__layout_extent_bytes(layout, plan->stale[k]);
        for (uint32_t b = 0; b <= topology->n_nodes; b++) {
            size_t own = end;
            if (b < topology->n_nodes)
                own = fcdp__plan_shard(layout, topology, plan->stale[k], b, topology->local).offset_bytes;
            if (own > at) pieces_out[n++] = (fcdp_piece){at, own - at};
            at = own + e->shard_bytes;
        }
    }
    return n;
}
