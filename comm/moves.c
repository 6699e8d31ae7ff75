/* moves.c - what an unshard moves: gather, restore, store.
 *
 * Gather brings stale extents from the other nodes, restore brings fresh spans back from the node's host
 * memory, and store copies what was gathered to host memory, so that another region may take the device
 * pages. Where the bytes lie is plan.c's; when a use begins and ends is use.c's. The thread that runs the
 * model enqueues all of it, in the program's order.
 *
 * Order within one use, each arrow an event (or, between the processes of a node, a word):
 *
 *     caller's stream: written -> inter: own shards, all-gather between nodes -> crossed
 *     through host memory: crossed -> d2h: store own shards, words
 *                          h2d: take the others' once their words have come -> loaded
 *     by slices:           crossed, loaded -> node: all-gather within the node -> gathered
 *                          gathered -> d2h: store own slices, words
 *     (a restore: h2d: load -> loaded)
 *     the last of these streams, behind all of the others: ready -> caller's stream: compute -> used
 *
 * The compute waits for the store too: it may write into what it is given, and the host's copy must be what
 * was gathered. It does not where the host stores what came to it before the device has it (delta.h):
 *
 *     caller's stream: written -> inter: encode; in the lane's turn: exchange; decode; compare
 *                          -> h2d: what came, and within the device own shards -> crossed
 *                             (or each part once it is decoded; behind these and the verdict, `inter` puts
 *                             what crossed whole to the places, and h2d copies that)
 *                          -> d2h: by the host: store own lane's pieces, words
 *                      written -> fetch: own shards, which come to `inter` before it compares them, or, where
 *                          the host encodes, before that
 *
 * No failure is handled here. A step that fails leaves the streams half filled, and use.c ends the use.
 */
#include "comm/moves.h"

#include <stdlib.h>

#include "comm/copy.h"
#include "tiering/policy.h"

/* A transport through host memory cannot exchange slices for a device: its host functions could wait in a
 * circle (transport.h). */
bool fcdp__comm_may_slice(const fcdp_comm *comm) {
    return !comm->transport.through_host || comm->engine->host_computes;
}

/* By slices, each GPU copies 1/g over PCIe and the GPUs exchange the rest. A file has a slice alone. */
bool fcdp__comm_by_slice(const fcdp_comm *comm) {
    return comm->engine->options.restore != FCDP_RESTORE_WHOLE && fcdp__comm_may_slice(comm) &&
           comm->topology.node_size > 1;
}

bool fcdp__group_by_slice(const fcdp_group *group) {
    const fcdp_comm *comm = group->comm;
    bool wanted = comm->engine->options.restore != FCDP_RESTORE_WHOLE;
    if (group->tier == FCDP_TIER_HOST || group->tier == FCDP_TIER_HOST_WHOLE)
        wanted = group->tier == FCDP_TIER_HOST;
    wanted = wanted || fcdp__group_is_spilled(group);
    return wanted && fcdp__comm_may_slice(comm) && comm->topology.node_size > 1;
}

/* A mapped group's pages are its own, so it is always kept. A plan of the job's decides before policy does;
 * what it keeps, it keeps while tau 1 would, with the pages of what policy keeps counted as free. This rank's
 * own memory may decide otherwise than its peers': whether a rank has the group on the device, the ranks tell
 * each other in each agreement. The driver says how much memory is free, once per use, and only if the group
 * would be kept in the whole budget: the free memory can only lower that limit. */
bool fcdp__policy_keeps_group(fcdp_group *group) {
    const fcdp_engine *engine = group->comm->engine;
    if (group->copy.unsupported || fcdp__group_is_spilled(group)) return false;
    if (group->tier == FCDP_TIER_MAPPED) return true;
    bool by_policy = group->tier == FCDP_TIER_POLICY;
    if (by_policy && engine->options.policy == FCDP_POLICY_NEXT_USE)
        return fcdp__region_is_planned(group->region);
    double tau = by_policy ? engine->options.tau : group->tier == FCDP_TIER_DEVICE ? 1 : 0;
    if (tau <= 0) return false; /* the driver is not asked then */
    fcdp_pool_stats pool;
    fcdp__pool_stats(engine->pool, &pool);
    size_t n_used = fcdp__pool_pages_in_use(engine->pool);
    size_t n_others = by_policy ? 0 : fcdp__tiering_unplanned_pages(engine->tiering);
    size_t used_bytes = (n_used > n_others ? n_used - n_others : 0) * pool.page_bytes;
    if (!fcdp__policy_keeps(tau, used_bytes, pool.budget_bytes)) return false;
    if (!group->room_bytes) group->room_bytes = fcdp__pool_room_bytes(engine->pool);
    return fcdp__policy_keeps(tau, used_bytes, group->room_bytes);
}

/* ---- store ---- */

/* The spans of `mask` of which the host does not have this rank's pieces. */
static uint32_t unstored_of(fcdp_group *group, uint32_t mask) {
    fcdp_region_state state;
    fcdp__region_state(group->region, &state);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (state.span[s].stored || state.span[s].whole) mask &= ~(1u << s);
    return mask;
}

uint32_t fcdp__unstored(fcdp_group *group) {
    fcdp_region_state state;
    uint32_t mask = 0;
    fcdp__region_state(group->region, &state);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (group->layout->span[s].bytes && state.span[s].on_device) mask |= 1u << s;
    return unstored_of(group, mask);
}

/* Behind `after`, store this rank's pieces of the plan's stale extents in `span_mask`, and all its pieces of
 * the spans in `whole_mask`. By slices, each rank stores exactly what it will load: few long copies, and only
 * that memory needs to be page-locked, near its device. */
static fcdp_status pieces_store(fcdp_group *group, const fcdp_plan *plan, uint32_t span_mask,
                                uint32_t whole_mask, fcdp_event after) {
    const fcdp_topology *topology = &group->comm->topology;
    if (fcdp__group_is_spilled(group)) /* whole slices */
        return fcdp__region_store(group->region, span_mask, (fcdp_piece_list){0}, after);
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

fcdp_status fcdp__store_now(fcdp_group *group, uint32_t mask, fcdp_event after) {
    fcdp_plan *plan;
    uint8_t *none = calloc(group->layout->n_extents + 1, 1);
    fcdp_status status = none ? fcdp__plan_make(group->layout, none, &plan)
                              : fcdp__fail(FCDP_ERR_SYSTEM, "no memory to store '%s'", group->name);
    free(none);
    if (status) return status;
    status = pieces_store(group, plan, mask, mask, after);
    fcdp__plan_destroy(plan);
    return status;
}

/* ---- restore ---- */

/* Load this rank's slices; the other slices come by the all-gather here, or in the gather's node step
 * (use->joined). Spans already on the device are not loaded. A load waits for the STORED words of all ranks:
 * if the group was gathered together with other small ones, each slice holds shards that each rank stored
 * (coalesce.c). So a rank that holds a span unstored stores it first: the others wait for its word. */
static fcdp_status restore_slices(fcdp_use *use) {
    fcdp_group *group = use->group;
    fcdp_engine *engine = group->comm->engine;
    fcdp_stream node = group->comm->set->streams[FCDP_STREAM_NODE];
    fcdp_part parts[FCDP_N_SPANS];
    fcdp_region_state state;
    fcdp__region_state(group->region, &state);
    uint32_t unstored = fcdp__unstored(group) & use->plan->restore_mask;
    fcdp_status status = unstored ? fcdp__store_now(group, unstored, fcdp__region_ready(group->region))
                                  : FCDP_OK;
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

/* Restore the spans that have a fresh extent: by slices if the node's ranks take part (use->collects), else
 * whole. */
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

/* ---- a packed gather ----
 *
 * In their places in the region, shards of E extents from N nodes of g ranks are E * (N - 1) sends and as
 * many receives between the nodes, and E * N all-gathers within: each part costs the host a call, and NCCL a
 * piece of its plan. Packed side by side they are one all-gather each, and device copies before and after:
 *
 *     staging half: g * N blocks of B bytes (restored whole: N); block l * N + b is rank (b, l)'s
 *     inter         own shards -> block (local, node); blocks (local, 0..N-1) all-gathered between the nodes
 *     node          all of it all-gathered within the node: member l brings blocks (l, 0..N-1)
 *     unpack        for each extent and each l one copy of N rows, to their places in the region
 *
 * A gather that is larger than a half goes through in chunks: bytes [at, at + B) of every rank's shards, one
 * after another. The halves take turns, so a gather packs while the one before unpacks. */

/* A gather of more parts is packed. 36 = 9 parameters of a transformer's block x 4 nodes. */
size_t fcdp__packed_above_parts = 36;
/* On 64 nodes x 8 ranks each rank then sends 256 KiB at a time, and a block of an 8B model in bfloat16 takes
 * 4 chunks. */
size_t fcdp__packed_half_bytes = (size_t)128 << 20;

/* A transport through host memory packs by itself. On a node of one rank members' shards lie side by side:
 * each is an all-gather already. What may cross as differences is not packed, on any rank. */
static bool packed_serves(const fcdp_group *group, const fcdp_plan *plan) {
    const fcdp_topology *topology = &group->comm->topology;
    return !group->comm->transport.through_host && topology->node_size > 1 && plan->n_stale > 0 &&
           (size_t)plan->n_stale * topology->n_nodes > fcdp__packed_above_parts;
}

static size_t n_blocks_of(const fcdp_group *group) {
    const fcdp_topology *topology = &group->comm->topology;
    return fcdp__group_by_slice(group) ? topology->n_ranks : topology->n_nodes;
}

/* B, the bytes of one block of the largest chunk, if each rank has `bytes` of stale shards. */
static size_t block_bytes_of(const fcdp_group *group, size_t bytes) {
    size_t most = fcdp__packed_half_bytes / n_blocks_of(group) / 512 * 512;
    if (most < 512) most = 512;
    return bytes < most ? bytes : most;
}

size_t fcdp__gather_staging_bytes(const fcdp_group *group) {
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

fcdp_status fcdp__gather_reserve(fcdp_use *use) {
    const fcdp_group *group = use->group;
    fcdp_stream_set *set = group->comm->set;
    use->packed = packed_serves(group, use->plan) && !fcdp__delta_may(group);
    if (!use->packed) return FCDP_OK;
    fcdp__staging_acquire(&set->staging);
    fcdp_status status = fcdp__staging_reserve(set, n_blocks_of(group) *
                                                        block_bytes_of(group, use->plan->block_bytes));
    if (status) fcdp__staging_release(&set->staging);
    return status;
}

void fcdp__gather_release(const fcdp_use *use, bool succeeded) {
    fcdp_staging *staging = &use->group->comm->set->staging;
    if (!use->packed) return;
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
static fcdp_status packed_gather(fcdp_use *use) {
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

/* ---- gather ---- */

/* Part k is stale extent k's. */
static fcdp_status differences_gather(fcdp_use *use, const fcdp_part *parts, size_t n,
                                      const fcdp_delta_way *way) {
    fcdp_group *group = use->group;
    fcdp_delta_cut *cuts = malloc((n + 1) * sizeof *cuts);
    if (!cuts) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a gather of '%s'", group->name);
    for (size_t k = 0; k < n; k++) {
        uint32_t i = use->plan->stale[k];
        fcdp_base base = use->bases[group->layout->extents[i].span];
        cuts[k] = (fcdp_delta_cut){group, i, {use->inputs[i]}, parts[k], base};
    }
    fcdp_status status = fcdp__delta_gather(group->comm, &group->delta, cuts, n, way);
    free(cuts);
    return status;
}

/* Does the gather touch the region before its turn on the lane? One of differences does so where its base is
 * there, or where the host computes. */
static bool comes_in_place(const fcdp_use *use) {
    if (!use->delta || use->group->comm->engine->host_computes) return true;
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (use->plan->fill_mask & 1u << s && use->bases[s].where == FCDP_BASE_ON_DEVICE) return true;
    return false;
}

/* Copy this rank's stale shards into the region, then all-gather them with the ranks of the same local index;
 * or what of them differs from the last gather (delta.h). That comes to a device on the stream of copies
 * there, in the order of the uses: until then the gather need not wait for the pages. A restore of the same
 * spans runs first: it would overwrite them. */
static fcdp_status inter_step(fcdp_use *use) {
    fcdp_group *group = use->group;
    const fcdp_topology *topology = &group->comm->topology;
    fcdp_engine *engine = group->comm->engine;
    fcdp_driver *drv = engine->drv;
    fcdp_stream inter = group->comm->set->streams[group->comm->n_gathers++ % FCDP_N_INTER];
    fcdp_delta_way way = {.inter = inter, .bring = inter, .stores = use->by_host};
    if (use->delta && !engine->host_computes) way.bring = group->comm->set->copies[FCDP_TO_DEVICE];
    fcdp_stream writer = comes_in_place(use) ? inter : way.bring; /* what is first to */
    fcdp_dptr base = fcdp__region_base(group->region);
    fcdp_part *parts = malloc((use->plan->n_stale + 1) * sizeof *parts);
    if (!parts) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a gather of '%s'", group->name);
    fcdp_status status = fcdp__region_order(group->region, writer);
    if (!status) status = fcdp__driver_stream_wait(drv, inter, group->written);
    if (!status && use->plan->restore_mask & use->plan->fill_mask)
        status = fcdp__driver_stream_wait(drv, writer, group->restored);
    size_t n = fcdp__plan_inter_parts(use->plan, group->layout, topology, base, parts);
    for (uint32_t k = 0; k < use->plan->n_stale && !use->delta && !status; k++) {
        uint32_t i = use->plan->stale[k];
        fcdp_piece place = fcdp__plan_shard(group->layout, topology, i, topology->node, topology->local);
        status = fcdp__driver_copy_d2d(drv, fcdp__dptr_add(base, place.offset_bytes),
                                       (fcdp_dptr){use->inputs[i]}, place.bytes, inter);
    }
    if (!status)
        status = use->delta ? differences_gather(use, parts, n, &way)
                            : fcdp__comm_all_gather(group->comm, group, FCDP_LANE_INTER, parts, n, 0, inter);
    if (!status) status = fcdp__driver_event_record(drv, group->crossed, way.bring);
    free(parts);
    use->last = way.bring;
    return status ? fcdp__fail(status, "gathering '%s' between nodes: %s", group->name, fcdp_error_text())
                  : FCDP_OK;
}

/* All-gather within the node the shards that each rank has now, its own and those that it received; if
 * use->joined, also the restored slices, in the same collective. */
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

/* If the policy would keep the group, or nothing is to load it, and the ranks exchange on the device (or the
 * node has one), skip the store: reshard or an eviction does it when needed. By slices, the store waits for
 * the node's all-gather on the copy stream, so that the node's stream goes on with the next group.
 *
 * A gather of differences of whole spans is in the host's memory anyhow, which stores it (delta.h), whatever
 * policy says: so on all ranks of the node, each its lane's pieces. By slices that comes last: the node's
 * all-gather waits for the stores of its slot's last user, which may be this region. */
fcdp_status fcdp__gather(fcdp_use *use) {
    fcdp_group *group = use->group;
    const fcdp_plan *plan = use->plan;
    fcdp_engine *engine = group->comm->engine;
    if (plan->n_stale == 0) return FCDP_OK;
    /* Spans of which this gather rewrites a part and host memory lacks the rest: they are stored whole. */
    uint32_t whole_mask = unstored_of(group, plan->restore_mask & plan->fill_mask);
    bool is_alone = group->comm->topology.node_size == 1, by_slice = fcdp__group_by_slice(group);
    /* what is in a file is loaded at its next use, whatever a plan says, to which it tells nothing */
    bool may_wait = fcdp__policy_keeps_group(group) ||
                    (!group->copy.unsupported && !fcdp__group_is_spilled(group) &&
                     fcdp__region_dies(group->region));
    bool stores = (!by_slice && !is_alone) || !may_wait;
    fcdp_status status = use->packed ? FCDP_OK : fcdp__delta_serves(use, &use->delta);
    for (uint32_t s = 0; s < FCDP_N_SPANS && use->delta; s++) use->bases[s] = fcdp__delta_base(group, s);
    use->by_host = use->delta && fcdp__delta_may_store(group) && !(plan->restore_mask & plan->fill_mask);
    if (!status) status = fcdp__region_begin_fill(group->region, plan->fill_mask);
    if (!status && use->packed)
        status = packed_gather(use);
    else if (!status)
        status = inter_step(use);
    if (!status && use->by_host && !by_slice)
        status = fcdp__delta_store(group, plan->fill_mask);
    else if (!status && stores && !by_slice)
        status = pieces_store(group, plan, plan->fill_mask, whole_mask, group->crossed);
    if (!status && !is_alone && !(by_slice && use->packed)) {
        status = by_slice ? node_by_slice(use) : node_by_host(use);
        if (status)
            status = fcdp__fail(status, "gathering '%s' within the node: %s", group->name, fcdp_error_text());
    }
    if (!status && use->by_host && by_slice)
        status = fcdp__delta_store(group, plan->fill_mask);
    else if (!status && stores && by_slice) {
        status = fcdp__driver_event_record(engine->drv, group->gathered, use->last);
        if (!status) status = pieces_store(group, plan, plan->fill_mask, whole_mask, group->gathered);
        use->last = group->comm->set->copies[FCDP_TO_HOST];
    }
    fcdp__copy_replaced(group);
    return status;
}
