/* coalesce.c - small stale groups cross the nodes together.
 *
 * An adapter per group makes hundreds of collectives of a few kilobytes, each with the link's latency. Here
 * their shards are packed side by side into the staging buffer, cross the nodes in one all-gather, and go on
 * to the groups' places in host memory. From there each group is restored in its turn, as if it had been
 * gathered and released before.
 *
 *     staging half: n_nodes blocks of B bytes
 *     block b: the shards of rank (b, local) of every group of the chunk, one after another
 *     the chunks use the halves in turn, each once the copies out of it are done
 *
 * A chunk may cross as one gather of differences (FCDP_CODEC: delta.h), from what host memory has of its
 * groups.
 *
 * As in moves.c, everything is enqueued by the thread that runs the model, in the program's order, which all
 * ranks have in common.
 */
#include "comm/coalesce.h"

#include <stdlib.h>

#include "comm/copy.h"
#include "comm/trace.h"

enum { MAX_CHUNKS = 8, MIN_CHUNK_BYTES = 1 << 20 };

/* Bytes of this rank's shards of what is stale. */
static size_t stale_bytes(const fcdp_group *group) {
    size_t bytes = 0;
    for (uint32_t i = 0; i < group->layout->n_extents; i++)
        if (group->stale[i]) bytes += group->layout->extents[i].shard_bytes;
    return bytes;
}

static uint32_t stale_mask(const fcdp_group *group, bool stale) {
    uint32_t mask = 0;
    for (uint32_t i = 0; i < group->layout->n_extents; i++)
        if (!group->stale[i] != stale && group->layout->extents[i].shard_bytes)
            mask |= 1u << group->layout->extents[i].span;
    return mask;
}

/* Decided from what all ranks have in common: what was agreed, and whether the group was unsharded of late,
 * or is (one rank alone may have put off its begin). A span that is stale in part stays where it is: its
 * other bytes may be on the device alone. A mapped group is not to be restored, so it has its gather to
 * itself. */
bool fcdp_group_is_small(const fcdp_group *group) {
    size_t bytes = stale_bytes(group) * group->comm->topology.n_ranks;
    return group->block && group->tier != FCDP_TIER_MAPPED && fcdp__delta_joins(group) && !group->begun &&
           !group->member.live && !group->member.ask && bytes > 0 &&
           bytes <= group->comm->engine->options.coalesce_bytes &&
           !(stale_mask(group, true) & stale_mask(group, false)) && fcdp__member_was_used(&group->member);
}

typedef struct chunk {
    fcdp_comm *comm;
    fcdp_stream stream; /* the program's */
    /* of the first chunk's first group, recorded once for all chunks: their shards are as the ranks agreed */
    fcdp_event written;
    fcdp_group *const *groups;
    const uint64_t *inputs; /* of the groups' extents, one group after another */
    uint32_t n;
    size_t block_bytes; /* B */
    int half;
    fcdp_dptr at; /* of the half */
    bool delta;   /* it crosses as differences, or asks for it */
} chunk;

/* Fills in where the group's pieces of its lane lie: in its region, and from offset `at` of each block on.
 * Room for n_extents * n_nodes; returns how many. */
static size_t sources_of(const chunk *c, const fcdp_group *group, size_t at, fcdp_source *sources_out) {
    const fcdp_topology *topology = &c->comm->topology;
    size_t n = 0;
    for (uint32_t i = 0; i < group->layout->n_extents; i++) {
        size_t bytes = group->layout->extents[i].shard_bytes;
        if (!group->stale[i] || !bytes) continue;
        for (uint32_t b = 0; b < topology->n_nodes; b++)
            sources_out[n++] = (fcdp_source){
                fcdp__dptr_add(c->at, b * c->block_bytes + at),
                fcdp__plan_shard(group->layout, topology, i, b, topology->local)};
        at += bytes;
    }
    return n;
}

static fcdp_source *sources_make(const chunk *c, const fcdp_group *group) {
    return malloc(((size_t)group->layout->n_extents * c->comm->topology.n_nodes + 1) * sizeof(fcdp_source));
}

/* Packs this rank's block. */
static fcdp_status shards_pack(const chunk *c, fcdp_stream inter) {
    fcdp_dptr to = fcdp__dptr_add(c->at, c->comm->topology.node * c->block_bytes);
    const uint64_t *inputs = c->inputs;
    fcdp_status status = FCDP_OK;
    for (uint32_t g = 0; g < c->n && !status; inputs += c->groups[g]->layout->n_extents, g++) {
        const fcdp_layout *layout = c->groups[g]->layout;
        for (uint32_t i = 0; i < layout->n_extents && !status; i++) {
            size_t bytes = layout->extents[i].shard_bytes;
            if (!c->groups[g]->stale[i] || !bytes) continue;
            status = fcdp__driver_copy_d2d(c->comm->engine->drv, to, (fcdp_dptr){inputs[i]}, bytes, inter);
            to = fcdp__dptr_add(to, bytes);
        }
    }
    return status;
}

static fcdp_status differences_gather(const chunk *c, fcdp_stream inter) {
    size_t n_extents = 0, n = 0, at = 0;
    for (uint32_t g = 0; g < c->n; g++) n_extents += c->groups[g]->layout->n_extents;
    fcdp_delta_cut *cuts = malloc((n_extents + 1) * sizeof *cuts);
    if (!cuts) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a gather of %u groups", c->n);
    const uint64_t *inputs = c->inputs;
    for (uint32_t g = 0; g < c->n; inputs += c->groups[g]->layout->n_extents, g++)
        for (uint32_t i = 0; i < c->groups[g]->layout->n_extents; i++) {
            size_t bytes = c->groups[g]->layout->extents[i].shard_bytes;
            if (!c->groups[g]->stale[i] || !bytes) continue;
            fcdp_part part = {fcdp__dptr_add(c->at, at), bytes, c->block_bytes};
            fcdp_base base = fcdp__delta_base(c->groups[g], c->groups[g]->layout->extents[i].span);
            if (base.where == FCDP_BASE_ON_DEVICE) base.where = FCDP_BASE_NOWHERE; /* not in the part */
            cuts[n++] = (fcdp_delta_cut){c->groups[g], i, {inputs[i]}, part, base};
            at += bytes;
        }
    fcdp_delta_way way = {.inter = inter, .bring = inter};
    fcdp_status status = fcdp__delta_gather(c->comm, &c->comm->deltas_together, cuts, n, &way);
    free(cuts);
    return status;
}

/* Packs this rank's block and fills the others. Packing waits for the half's last copies, not for its turn on
 * the lane. */
static fcdp_status chunk_gather(const chunk *c) {
    fcdp_comm *comm = c->comm;
    fcdp_engine *engine = comm->engine;
    fcdp_stream inter = comm->set->streams[comm->n_gathers++ % FCDP_N_INTER];
    fcdp_part part = {c->at, c->block_bytes, c->block_bytes};
    fcdp_status status = fcdp__driver_stream_wait(engine->drv, inter, c->written);
    if (!status)
        status = fcdp__driver_stream_wait(engine->drv, inter, c->comm->set->staging.emptied[c->half]);
    if (!status && c->delta) {
        status = differences_gather(c, inter);
    } else if (!status) {
        status = shards_pack(c, inter);
        if (!status) status = fcdp__comm_all_gather(comm, NULL, FCDP_LANE_INTER, &part, 1, 0, inter);
    }
    return status ? status
                  : fcdp__driver_event_record(engine->drv, c->comm->set->staging.filled[c->half], inter);
}

/* What was gathered of one group goes from offset `at` of each block to its places in host memory. The next
 * begin restores the group, and counts these bytes. group->reading is the half's event: it is recorded again
 * only behind the copies of this use, so a wait for a later record of it is long enough. */
static fcdp_status group_store(const chunk *c, fcdp_group *group, size_t at) {
    fcdp_event filled = c->comm->set->staging.filled[c->half];
    fcdp_source *sources = sources_make(c, group);
    if (!sources) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory to store '%s'", group->name);
    size_t n = sources_of(c, group, at, sources);
    fcdp_status status = fcdp__region_fill_host(group->region, stale_mask(group, true), sources, n, filled);
    free(sources);
    if (status) return status;
    status = fcdp__group_set_reading(group, filled, c->stream);
    if (status) return status;
    group->coalesced_bytes += stale_bytes(group);
    if (!c->delta) group->coalesced_whole_bytes += stale_bytes(group);
    group->not_on_device = true; /* on every rank */
    fcdp__copy_replaced(group);
    fcdp__group_accept(group);
    return FCDP_OK;
}

static fcdp_status chunk_run(const chunk *c) {
    fcdp_engine *engine = c->comm->engine;
    fcdp_stream d2h = c->comm->set->copies[FCDP_TO_HOST];
    fcdp_status status = chunk_gather(c);
    size_t at = 0;
    for (uint32_t g = 0; g < c->n && !status; g++) {
        size_t bytes = stale_bytes(c->groups[g]); /* of which none is left once it is stored */
        status = group_store(c, c->groups[g], at);
        at += bytes;
    }
    return status ? status
                  : fcdp__driver_event_record(engine->drv, c->comm->set->staging.emptied[c->half], d2h);
}

/* Cuts the groups into chunks, each of as many groups as a half has room for, and at least one. A half is
 * small enough that the first group need not wait for all of them, and large enough that chunks are few. */
static fcdp_status chunks_run(fcdp_group *const *groups, const uint64_t *inputs, uint32_t n,
                              fcdp_stream stream) {
    fcdp_engine *engine = groups[0]->comm->engine;
    fcdp_stream_set *set = groups[0]->comm->set;
    size_t n_nodes = groups[0]->comm->topology.n_nodes, total = 0, largest = 0;
    for (uint32_t g = 0; g < n; g++) {
        size_t bytes = stale_bytes(groups[g]) * n_nodes;
        total += bytes;
        if (bytes > largest) largest = bytes;
    }
    size_t half_bytes = total / MAX_CHUNKS + largest; /* less than `largest` of a half stays empty */
    if (half_bytes < MIN_CHUNK_BYTES) half_bytes = MIN_CHUNK_BYTES;
    bool delta = false;
    fcdp_status status = fcdp__staging_reserve(set, half_bytes);
    if (!status) status = fcdp__deltas_serve(groups, n, &delta);
    if (!status) status = fcdp__driver_event_record(engine->drv, groups[0]->written, stream);
    chunk c = {.comm = groups[0]->comm,
               .delta = delta,
               .stream = stream,
               .written = groups[0]->written,
               .groups = groups,
               .inputs = inputs};
    while (n > 0 && !status) {
        uint32_t n_inputs = 0;
        c.half = fcdp__staging_take(set, &c.at);
        for (c.n = 0, c.block_bytes = 0; c.n < n; c.n++) {
            size_t bytes = stale_bytes(c.groups[c.n]);
            if (c.n && (c.block_bytes + bytes) * n_nodes > half_bytes) break;
            c.block_bytes += bytes;
            n_inputs += c.groups[c.n]->layout->n_extents;
        }
        status = chunk_run(&c);
        c.groups += c.n;
        c.inputs += n_inputs;
        n -= c.n;
    }
    return status;
}

/* Its own checks come first: what fails before the buffer is used fails here alone. */
fcdp_status fcdp_groups_coalesce(fcdp_group *const *groups, const uint64_t *inputs, uint32_t n,
                                 fcdp_stream stream) {
    if (n == 0) return FCDP_OK;
    fcdp_comm *comm = groups[0]->comm;
    fcdp_engine *engine = comm->engine;
    fcdp_status status = fcdp__engine_check_process(engine, groups[0]->name);
    if (!status) status = fcdp_comm_check(comm);
    if (!status) status = fcdp__engine_check_capture(engine, stream, "gathered", groups[0]->name);
    if (status) return status;
    for (uint32_t g = 0; g < n; g++) FCDP_CHECK(1, groups[g]->comm == comm && fcdp_group_is_small(groups[g]));
    fcdp__staging_acquire(&comm->set->staging);
    fcdp__driver_annotate(engine->drv, "small groups together");
    uint64_t bytes = 0;
    for (uint32_t g = 0; g < n; g++) bytes += stale_bytes(groups[g]);
    fcdp__trace_now(FCDP_EVENT_COALESCE, 0, bytes, n, 0);
    status = chunks_run(groups, inputs, n, stream);
    fcdp__driver_annotate(engine->drv, NULL);
    if (status) comm->set->staging.incomplete = true;
    fcdp__staging_release(&comm->set->staging);
    if (!status) return FCDP_OK;
    status = fcdp__fail(status, "gathering %u small groups together ('%s', ...): %s", n, groups[0]->name,
                        fcdp_error_text());
    fcdp_failure failure = fcdp__failure_keep(fcdp__comm_fail(comm, status));
    bool delta = comm->deltas_together.last; /* no event of a group's tells of what was enqueued then */
    for (int i = 0; i < FCDP_N_STREAMS && delta; i++)
        if (fcdp__driver_stream_sync(engine->drv, comm->set->streams[i]))
            fcdp__log(FCDP_LOG_DEBUG, "'%s': %s", groups[0]->name, fcdp_error_text());
    return fcdp__failure_restore(&failure);
}
