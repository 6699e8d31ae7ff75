/* coalesce.c - small groups that are stale together cross the nodes in few collectives.
 *
 * An adapter per group makes hundreds of collectives of a few kilobytes, each with the link's latency. Here
 * their shards are packed side by side into a staging buffer, cross in one all-gather, and go on to the
 * groups' places in host memory: from there each is restored in its turn, as if it had been gathered and
 * released before.
 *
 *     staging half: n_nodes blocks of B bytes
 *     block b: the shards of rank (b, local) of every group of the chunk, one after another
 *     chunk k uses half k % 2, once the copies of chunk k - 2 out of it are done
 *
 * As in gather.c, everything is enqueued by the thread that runs the model, in the program's order, which all
 * ranks have in common.
 */
#include <stdlib.h>

#include "comm/internal.h"

enum { MAX_CHUNKS = 8, MIN_CHUNK_BYTES = 1 << 20, MAX_IDLE_PASSES = 4 };

/* ---- the staging buffer ---- */

static fcdp_status staging_events(fcdp_engine *engine, fcdp_staging *staging) {
    fcdp_status status = FCDP_OK;
    for (int h = 0; h < 2 && !status; h++) {
        if (!staging->crossed[h])
            status = fcdp__driver_event_create_blocking(engine->drv, &staging->crossed[h]);
        if (status) staging->crossed[h] = NULL;
        if (!status && !staging->emptied[h])
            status = fcdp__driver_event_create_blocking(engine->drv, &staging->emptied[h]);
        if (status && !staging->emptied[h]) staging->emptied[h] = NULL;
    }
    return status;
}

static void staging_enter(fcdp_staging *staging) {
    fcdp__lock_acquire(&staging->lock);
    while (staging->busy) fcdp__lock_wait(&staging->lock, &staging->left);
    staging->busy = true;
    fcdp__lock_release(&staging->lock);
}

static void staging_leave(fcdp_staging *staging) {
    fcdp__lock_acquire(&staging->lock);
    staging->busy = false;
    pthread_cond_broadcast(&staging->left);
    fcdp__lock_release(&staging->lock);
}

static fcdp_status streams_await(fcdp_engine *engine) {
    fcdp_status status = FCDP_OK;
    for (int i = 0; i < FCDP_N_INTER && !status; i++)
        status = fcdp__driver_stream_sync(engine->drv, engine->streams[i]);
    return status
               ? status
               : fcdp__driver_stream_sync(engine->drv, fcdp__tiering_stream(engine->tiering, FCDP_TO_HOST));
}

/* Entered: until the device is done with it. */
static fcdp_status staging_await(fcdp_engine *engine, fcdp_staging *staging) {
    fcdp_status status = FCDP_OK;
    if (staging->torn && streams_await(engine)) status = streams_await(engine); /* what fails once may pass */
    staging->torn = staging->torn && status;
    for (int h = 0; h < 2 && !status; h++)
        if (staging->emptied[h]) status = fcdp__driver_event_sync(engine->drv, staging->emptied[h]);
    return status;
}

/* Entered: its pages go. */
static fcdp_status staging_empty(fcdp_engine *engine, fcdp_staging *staging) {
    if (!staging->range) return FCDP_OK;
    fcdp_status status = staging_await(engine, staging);
    if (status) return status;
    fcdp__vrange_destroy(staging->range);
    staging->range = NULL;
    fcdp__pool_give_handle(engine->pool, FCDP_HOLDER_GATHERED, staging->n_pages, staging->block);
    return FCDP_OK;
}

/* Entered. */
static void staging_try_empty(fcdp_engine *engine) {
    if (staging_empty(engine, &engine->staging))
        fcdp__log(FCDP_LOG_WARN, "the staging buffer stays: %s", fcdp_error_text());
}

void fcdp__staging_drop(fcdp_engine *engine) {
    staging_enter(&engine->staging);
    staging_try_empty(engine);
    staging_leave(&engine->staging);
}

void fcdp__staging_begin_pass(fcdp_engine *engine) {
    fcdp_staging *staging = &engine->staging;
    staging_enter(staging);
    if (staging->range && ++staging->n_idle > MAX_IDLE_PASSES) staging_try_empty(engine);
    staging_leave(staging);
}

/* Lock held: are there pages that nobody uses? */
static bool is_idle(const fcdp_staging *staging) {
    return !staging->busy && staging->range;
}

/* Whoever is in a crossing may be the one who asks; so nobody is waited for. */
size_t fcdp__staging_reclaim(void *ctx, size_t n_pages) {
    (void)n_pages; /* all or nothing */
    fcdp_engine *engine = ctx;
    fcdp_staging *staging = &engine->staging;
    fcdp__lock_acquire(&staging->lock);
    bool is_mine = is_idle(staging);
    if (is_mine) staging->busy = true;
    fcdp__lock_release(&staging->lock);
    if (!is_mine) return 0;
    staging_try_empty(engine);
    size_t n_given = staging->range ? 0 : staging->n_pages;
    staging_leave(staging);
    return n_given;
}

size_t fcdp__staging_idle(void *ctx) {
    fcdp_staging *staging = &((fcdp_engine *)ctx)->staging;
    fcdp__lock_acquire(&staging->lock);
    size_t n_pages = is_idle(staging) ? staging->n_pages : 0;
    fcdp__lock_release(&staging->lock);
    return n_pages;
}

void fcdp__staging_init(fcdp_staging *staging) {
    fcdp__lock_init(&staging->lock, FCDP_RANK_ENGINE);
    pthread_cond_init(&staging->left, NULL);
}

void fcdp__staging_destroy(fcdp_engine *engine) {
    fcdp_staging *staging = &engine->staging;
    if (engine->drv) fcdp__staging_drop(engine);
    for (int h = 0; h < 2; h++) {
        if (staging->crossed[h]) fcdp__driver_event_destroy(engine->drv, staging->crossed[h]);
        if (staging->emptied[h]) fcdp__driver_event_destroy(engine->drv, staging->emptied[h]);
    }
    pthread_cond_destroy(&staging->left);
    fcdp__lock_destroy(&staging->lock);
}

static fcdp_status staging_take(fcdp_engine *engine, fcdp_staging *staging, size_t n_pages) {
    size_t bytes = n_pages * fcdp__driver_page_bytes(engine->drv);
    fcdp_vrange *range;
    fcdp_phys block;
    fcdp_status status = fcdp__vrange_create(engine->drv, bytes, &range);
    if (status) return status;
    status = fcdp__pool_take_handle(engine->pool, FCDP_HOLDER_GATHERED, n_pages, &block);
    if (!status) {
        status = fcdp__vrange_map(range, block, bytes);
        if (status) fcdp__pool_give_handle(engine->pool, FCDP_HOLDER_GATHERED, n_pages, block);
    }
    if (status) {
        fcdp__vrange_destroy(range);
        return status;
    }
    staging->range = range;
    staging->block = block;
    staging->n_pages = n_pages;
    return FCDP_OK;
}

/* Entered: two halves of at least `half_bytes`. A larger one replaces a smaller one; it does not shrink. */
static fcdp_status staging_need(fcdp_engine *engine, size_t half_bytes) {
    fcdp_staging *staging = &engine->staging;
    size_t page_bytes = fcdp__driver_page_bytes(engine->drv);
    size_t n_pages = fcdp__round_up(2 * half_bytes, page_bytes) / page_bytes;
    fcdp_status status = staging_events(engine, staging);
    if (status || (staging->range && staging->n_pages >= n_pages)) return status;
    status = staging_empty(engine, staging);
    return status ? status : staging_take(engine, staging, n_pages);
}

/* ---- which groups ---- */

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

/* Decided from what all ranks have in common: what was agreed, and who was unsharded of late. A span that is
 * stale in part stays where it is: its other bytes may be on the device alone. */
bool fcdp_group_is_small(const fcdp_group *group) {
    size_t bytes = stale_bytes(group) * group->comm->topology.n_ranks;
    return group->region && !group->begun && bytes > 0 &&
           bytes <= group->comm->engine->options.coalesce_bytes &&
           !(stale_mask(group, true) & stale_mask(group, false)) && fcdp__member_was_used(&group->member);
}

/* ---- crossing ---- */

typedef struct chunk {
    fcdp_comm *comm;
    /* of the first chunk's first group, recorded once for all chunks: their shards are as the ranks agreed */
    fcdp_event written;
    fcdp_group *const *groups;
    const uint64_t *inputs; /* of the groups' extents, one group after another */
    uint32_t n;
    size_t block_bytes; /* B */
    fcdp_dptr at;       /* its half */
} chunk;

/* As many groups as have room; at least one. */
static uint32_t chunk_length(fcdp_group *const *groups, uint32_t n, size_t half_bytes,
                             size_t *block_bytes_out) {
    uint32_t n_nodes = groups[0]->comm->topology.n_nodes, length = 0;
    *block_bytes_out = 0;
    while (length < n) {
        size_t bytes = stale_bytes(groups[length]);
        if (length && (*block_bytes_out + bytes) * n_nodes > half_bytes) break;
        *block_bytes_out += bytes;
        length++;
    }
    return length;
}

static fcdp_status pack(const chunk *c, fcdp_stream inter) {
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

static fcdp_status cross(const chunk *c, int half) {
    fcdp_comm *comm = c->comm;
    fcdp_engine *engine = comm->engine;
    fcdp_stream inter = engine->streams[comm->n_gathers++ % FCDP_N_INTER];
    fcdp_part part = {c->at, c->block_bytes, c->block_bytes};
    fcdp_status status = fcdp__driver_stream_wait(engine->drv, inter, c->written);
    if (!status) status = fcdp__driver_stream_wait(engine->drv, inter, engine->staging.emptied[half]);
    if (!status) status = pack(c, inter);
    if (!status)
        status = comm->transport.all_gather(comm->transport.ctx, FCDP_LANE_INTER, &part, 1, inter,
                                            engine->turn[FCDP_LANE_INTER]);
    if (!status) status = fcdp__driver_event_record(engine->drv, engine->staging.crossed[half], inter);
    if (status) return status;
    fcdp__lock_acquire(&engine->lock);
    engine->stats.gather.calls++;
    engine->stats.gather.inter_bytes_sent += (comm->topology.n_nodes - 1) * c->block_bytes;
    fcdp__lock_release(&engine->lock);
    return FCDP_OK;
}

/* What crossed of one group, from the staging buffer at `at` in each block to its places in host memory. */
static fcdp_status store(const chunk *c, fcdp_group *group, size_t at, fcdp_event crossed) {
    const fcdp_topology *topology = &c->comm->topology;
    fcdp_source *sources = malloc(((size_t)group->layout->n_extents * topology->n_nodes + 1) *
                                  sizeof *sources);
    if (!sources) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory to store '%s'", group->name);
    size_t n = 0;
    for (uint32_t i = 0; i < group->layout->n_extents; i++) {
        size_t bytes = group->layout->extents[i].shard_bytes;
        if (!group->stale[i] || !bytes) continue;
        for (uint32_t b = 0; b < topology->n_nodes; b++)
            sources[n++] = (fcdp_source){fcdp__dptr_add(c->at, b * c->block_bytes + at),
                                         fcdp__plan_shard(group->layout, topology, i, b, topology->local)};
        at += bytes;
    }
    fcdp_status status = fcdp__region_fill_host(group->region, stale_mask(group, true), sources, n, crossed);
    free(sources);
    return status;
}

/* The next begin restores it, and counts what has crossed for it here. `crossed`: of its
 * half, which is used again only behind the stores of this use, so that whoever waits for a
 * later record of it waits long enough. */
static void settle(fcdp_group *group, fcdp_event crossed) {
    fcdp__lock_acquire(&group->comm->engine->lock);
    group->reading = crossed;
    fcdp__lock_release(&group->comm->engine->lock);
    group->crossed_bytes += stale_bytes(group);
    group->lacks = true; /* on every rank */
    group->has_content = false;
    fcdp__group_accept(group);
}

static fcdp_status chunk_run(const chunk *c, int half) {
    fcdp_engine *engine = c->comm->engine;
    fcdp_stream d2h = fcdp__tiering_stream(engine->tiering, FCDP_TO_HOST);
    fcdp_status status = cross(c, half);
    size_t at = 0;
    for (uint32_t g = 0; g < c->n && !status; g++) {
        status = store(c, c->groups[g], at, engine->staging.crossed[half]);
        at += stale_bytes(c->groups[g]);
        if (!status) settle(c->groups[g], engine->staging.crossed[half]);
    }
    return status ? status : fcdp__driver_event_record(engine->drv, engine->staging.emptied[half], d2h);
}

/* Chunks small enough that the first group need not wait for all of them, large enough that there are few. */
static size_t half_bytes_of(fcdp_group *const *groups, uint32_t n) {
    size_t n_nodes = groups[0]->comm->topology.n_nodes, total = 0, largest = 0;
    for (uint32_t g = 0; g < n; g++) {
        size_t bytes = stale_bytes(groups[g]) * n_nodes;
        total += bytes;
        if (bytes > largest) largest = bytes;
    }
    /* A chunk leaves less than `largest` of its half empty. */
    size_t half = total / MAX_CHUNKS + largest;
    return half > MIN_CHUNK_BYTES ? half : MIN_CHUNK_BYTES;
}

static fcdp_status run(fcdp_group *const *groups, const uint64_t *inputs, uint32_t n, fcdp_stream stream) {
    fcdp_engine *engine = groups[0]->comm->engine;
    size_t half_bytes = half_bytes_of(groups, n);
    fcdp_status status = staging_need(engine, half_bytes);
    if (!status) status = fcdp__driver_event_record(engine->drv, groups[0]->written, stream);
    engine->staging.n_idle = 0;
    chunk c = {.comm = groups[0]->comm, .written = groups[0]->written, .groups = groups, .inputs = inputs};
    for (int k = 0; n > 0 && !status; k++) {
        c.n = chunk_length(c.groups, n, half_bytes, &c.block_bytes);
        c.at = fcdp__dptr_add(fcdp__vrange_base(engine->staging.range), (size_t)(k % 2) * half_bytes);
        uint32_t n_inputs = 0;
        for (uint32_t g = 0; g < c.n; g++) n_inputs += c.groups[g]->layout->n_extents;
        status = chunk_run(&c, k % 2);
        c.groups += c.n;
        c.inputs += n_inputs;
        n -= c.n;
    }
    return status;
}

fcdp_status fcdp_groups_cross(fcdp_group *const *groups, const uint64_t *inputs, uint32_t n,
                              fcdp_stream stream) {
    if (n == 0) return FCDP_OK;
    fcdp_comm *comm = groups[0]->comm;
    fcdp_status status = fcdp__engine_check_process(comm->engine, groups[0]->name);
    if (!status) status = fcdp_comm_check(comm);
    if (!status) status = fcdp__engine_check_capture(comm->engine, stream, "gathered", groups[0]->name);
    if (status) return status;
    for (uint32_t g = 0; g < n; g++) FCDP_CHECK(1, groups[g]->comm == comm && fcdp_group_is_small(groups[g]));
    staging_enter(&comm->engine->staging);
    fcdp__driver_annotate(comm->engine->drv, "small groups together");
    status = run(groups, inputs, n, stream);
    fcdp__driver_annotate(comm->engine->drv, NULL);
    if (status) comm->engine->staging.torn = true;
    staging_leave(&comm->engine->staging);
    if (!status) return FCDP_OK;
    status = fcdp__fail(status, "gathering %u small groups together ('%s', ...): %s", n, groups[0]->name,
                        fcdp_error_text());
    return fcdp__comm_fail(comm, status);
}
