/* packed.c - see the header. */
#include "comm/packed.h"

#include <stdlib.h>

/* Above what a transformer's block of 9 parameters has on 4 nodes. */
size_t fcdp__packed_above_parts = 36;
/* Of 64 x 8 ranks each sends 256 KiB at once then, and 8B parameters in bfloat16 take 4 chunks a block. */
size_t fcdp__packed_half_bytes = (size_t)128 << 20;

/* A transport through host memory packs by itself. On a node of one rank members' shards lie side by side:
 * each is an all-gather already. */
bool fcdp__packed_serves(const fcdp_group *group, const fcdp_plan *plan) {
    const fcdp_topology *topology = &group->comm->topology;
    return !group->comm->transport.through_host && topology->node_size > 1 && plan->n_stale > 0 &&
           (size_t)plan->n_stale * topology->n_nodes > fcdp__packed_above_parts;
}

static size_t n_blocks_of(const fcdp_group *group) {
    const fcdp_topology *topology = &group->comm->topology;
    return fcdp__group_by_slice(group) ? topology->n_ranks : topology->n_nodes;
}

/* B of a gather whose ranks each have `bytes`. */
static size_t block_bytes_of(const fcdp_group *group, size_t bytes) {
    size_t most = fcdp__packed_half_bytes / n_blocks_of(group) / 512 * 512;
    if (most < 512) most = 512;
    return bytes < most ? bytes : most;
}

size_t fcdp__packed_staging_bytes(const fcdp_group *group) {
    const fcdp_layout *layout = group->layout;
    const fcdp_topology *topology = &group->comm->topology;
    size_t bytes = 0, n = 0;
    for (uint32_t i = 0; i < layout->n_extents; i++) {
        bytes += layout->extents[i].shard_bytes;
        n += layout->extents[i].shard_bytes > 0;
    }
    bool serves = !group->comm->transport.through_host && topology->node_size > 1 &&
                  n * topology->n_nodes > fcdp__packed_above_parts;
    return serves ? 2 * n_blocks_of(group) * block_bytes_of(group, bytes) : 0;
}

fcdp_status fcdp__packed_reserve(const fcdp_use *use) {
    const fcdp_group *group = use->group;
    fcdp_stream_set *set = group->comm->set;
    fcdp__staging_acquire(&set->staging);
    fcdp_status status = fcdp__staging_reserve(set, n_blocks_of(group) *
                                                        block_bytes_of(group, use->plan->block_bytes));
    if (status) fcdp__staging_release(&set->staging);
    return status;
}

void fcdp__packed_release(const fcdp_use *use, bool succeeded) {
    fcdp_staging *staging = &use->group->comm->set->staging;
    if (!succeeded) staging->incomplete = true;
    fcdp__staging_release(staging);
}

typedef struct chunk {
    fcdp_use *use;
    fcdp_stream inter;
    fcdp_stream writer; /* what unpacks: the node's stream, or where the node meets in host memory `inter` */
    bool by_slice;
    fcdp_cut *cuts;
    size_t n_cuts, block_bytes; /* B */
    int half;
    fcdp_dptr at; /* of the half */
} chunk;

/* Blocks (local, 0..n_nodes-1). */
static fcdp_dptr blocks_of(const chunk *c, uint32_t local) {
    const fcdp_topology *topology = &c->use->group->comm->topology;
    return fcdp__dptr_add(c->at, c->by_slice ? local * topology->n_nodes * c->block_bytes : 0);
}

static fcdp_status chunk_inter(const chunk *c) {
    const fcdp_group *group = c->use->group;
    const fcdp_topology *topology = &group->comm->topology;
    fcdp_driver *drv = group->comm->engine->drv;
    const fcdp_staging *staging = &group->comm->set->staging;
    fcdp_dptr blocks = blocks_of(c, topology->local);
    fcdp_dptr own = fcdp__dptr_add(blocks, topology->node * c->block_bytes);
    fcdp_part part = {blocks, c->block_bytes, c->block_bytes};
    fcdp_status status = fcdp__driver_stream_wait(drv, c->inter, staging->emptied[c->half]);
    for (size_t k = 0; k < c->n_cuts && !status; k++) {
        fcdp_dptr shard = {c->use->inputs[c->cuts[k].extent]};
        status = fcdp__driver_copy_d2d(drv, fcdp__dptr_add(own, c->cuts[k].at),
                                       fcdp__dptr_add(shard, c->cuts[k].from), c->cuts[k].bytes, c->inter);
    }
    if (!status) status = fcdp__comm_all_gather(group->comm, group, FCDP_LANE_INTER, &part, 1, 0, c->inter);
    return status ? status : fcdp__driver_event_record(drv, staging->filled[c->half], c->inter);
}

/* With a joined restore its slices go along with the first chunk. */
static fcdp_status chunk_node(const chunk *c, bool is_first) {
    const fcdp_group *group = c->use->group;
    const fcdp_topology *topology = &group->comm->topology;
    size_t bytes = topology->n_nodes * c->block_bytes, n = 0;
    fcdp_part parts[FCDP_N_SPANS + 1];
    fcdp_status status = fcdp__driver_stream_wait(group->comm->engine->drv, c->writer,
                                                  group->comm->set->staging.filled[c->half]);
    if (c->use->joined && is_first)
        n = fcdp__plan_slice_parts(c->use->plan->restore_mask, group->layout, topology,
                                   fcdp__region_base(group->region), parts);
    parts[n] = (fcdp_part){c->at, bytes, bytes};
    return status ? status
                  : fcdp__comm_all_gather(group->comm, group, FCDP_LANE_NODE, parts, n + 1, n, c->writer);
}

static fcdp_status chunk_unpack(const chunk *c) {
    const fcdp_group *group = c->use->group;
    const fcdp_topology *topology = &group->comm->topology;
    fcdp_driver *drv = group->comm->engine->drv;
    uint32_t first = c->by_slice ? 0 : topology->local, n = c->by_slice ? topology->node_size : 1;
    fcdp_status status = FCDP_OK;
    for (uint32_t local = first; local < first + n; local++)
        for (size_t k = 0; k < c->n_cuts && !status; k++) {
            fcdp_rows rows = fcdp__plan_rows(&c->cuts[k], group->layout, topology, local, blocks_of(c, local),
                                             c->block_bytes, fcdp__region_base(group->region));
            status = fcdp__driver_copy_rows(drv, &rows, c->writer);
        }
    return status ? status
                  : fcdp__driver_event_record(drv, group->comm->set->staging.emptied[c->half], c->writer);
}

/* All of it packs on one stream, so `crossed`, recorded at its end, is behind every read of a shard. What is
 * restored of the same spans comes first: unpacking writes over it. */
fcdp_status fcdp__packed_gather(fcdp_use *use) {
    fcdp_group *group = use->group;
    fcdp_stream_set *set = group->comm->set;
    fcdp_driver *drv = group->comm->engine->drv;
    const fcdp_plan *plan = use->plan;
    chunk c = {.use = use, .by_slice = fcdp__group_by_slice(group)};
    c.inter = set->streams[group->comm->n_gathers++ % FCDP_N_INTER];
    c.writer = c.by_slice ? set->streams[FCDP_STREAM_NODE] : c.inter;
    c.cuts = malloc(plan->n_stale * sizeof *c.cuts);
    if (!c.cuts) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a gather of '%s'", group->name);
    fcdp_status status = fcdp__region_order(group->region, c.writer);
    if (!status) status = fcdp__driver_stream_wait(drv, c.inter, group->written);
    if (!status && plan->restore_mask & plan->fill_mask)
        status = fcdp__driver_stream_wait(drv, c.writer, group->restored);
    size_t most = block_bytes_of(group, plan->block_bytes);
    for (size_t first = 0; first < plan->block_bytes && !status; first += most) {
        c.block_bytes = plan->block_bytes - first < most ? plan->block_bytes - first : most;
        c.n_cuts = fcdp__plan_cuts(plan, group->layout, first, c.block_bytes, c.cuts);
        c.half = fcdp__staging_take(set, &c.at);
        status = chunk_inter(&c);
        if (!status && c.by_slice) status = chunk_node(&c, first == 0);
        if (!status) status = chunk_unpack(&c);
    }
    if (!status) status = fcdp__driver_event_record(drv, group->crossed, c.inter);
    free(c.cuts);
    use->last = c.writer;
    return status ? fcdp__fail(status, "gathering '%s' between nodes: %s", group->name, fcdp_error_text())
                  : FCDP_OK;
}
