/* engine.c - engines, comms and groups from creation to destruction, and what they have counted. */
#include "comm/engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm/group.h"

fcdp_status fcdp__engine_check(const fcdp_engine *engine, const char *what) {
    if (engine->pid == getpid()) return FCDP_OK;
    return fcdp__fail(
        FCDP_ERR_UNSUPPORTED,
        "%s belongs to process %d; a forked child (%d) cannot use it: start fresh processes instead", what,
        (int)engine->pid, (int)getpid());
}

static bool engine_is_foreign(const fcdp_engine *engine) {
    return engine->pid != getpid();
}

/* ---- failures of jobs that nobody waits for ---- */

void fcdp__group_late_set(fcdp_group *group, fcdp_status status) {
    fcdp_engine *engine = group->comm->engine;
    fcdp__lock_acquire(&engine->lock);
    if (!group->late_status) {
        group->late_status = status;
        snprintf(group->late_text, sizeof group->late_text, "%s", fcdp_error_text());
    }
    fcdp__lock_release(&engine->lock);
}

/* With the engine's lock. */
static fcdp_status late_move(fcdp_group *group, char *text_out) {
    fcdp_status status = group->late_status;
    if (status) memcpy(text_out, group->late_text, FCDP_LATE_TEXT_BYTES);
    group->late_status = FCDP_OK;
    return status;
}

fcdp_status fcdp__group_late_take(fcdp_group *group, char *text_out) {
    fcdp_engine *engine = group->comm->engine;
    fcdp__lock_acquire(&engine->lock);
    fcdp_status status = late_move(group, text_out);
    fcdp__lock_release(&engine->lock);
    return status;
}

/* The inter worker's last: what it waits for is done then. */
static void workers_drain(fcdp_engine *engine) {
    if (engine->node_worker) fcdp__worker_drain(engine->node_worker);
    if (engine->inter_worker) fcdp__worker_drain(engine->inter_worker);
}

fcdp_status fcdp_engine_drain(fcdp_engine *engine) {
    fcdp_status status = fcdp__engine_check(engine, "the engine");
    if (status) return status;
    workers_drain(engine);
    char text[FCDP_LATE_TEXT_BYTES];
    fcdp__lock_acquire(&engine->lock);
    for (fcdp_comm *comm = engine->comms; comm && !status; comm = comm->next)
        for (fcdp_group *group = comm->groups; group && !status; group = group->next)
            status = late_move(group, text);
    fcdp__lock_release(&engine->lock);
    return status ? fcdp__fail(status, "%s", text) : FCDP_OK;
}

/* ---- engine ---- */

static fcdp_status engine_open(fcdp_engine *engine, const fcdp_engine_config *config) {
    fcdp_status status = FCDP_OK;
    if (!config->device)
        status = fcdp_device_open(config->driver, config->ordinal, config->sim_library,
                                  config->options.device_budget_bytes, false, &engine->own);
    const fcdp_device *device = config->device ? config->device : &engine->own;
    engine->drv = device->drv;
    engine->pool = device->pool;
    /* Slices spare the PCIe link and use what joins the GPUs. Simulated ones are joined by the host's memory
     * alone. */
    if (!status && engine->options.restore == FCDP_RESTORE_AUTO)
        engine->options.restore = fcdp__driver_is_sim(engine->drv) ? FCDP_RESTORE_WHOLE : FCDP_RESTORE_SLICE;
    if (!status) status = fcdp__tiering_create(engine->drv, engine->pool, &engine->tiering);
    if (!status) status = fcdp__columns_create(engine->drv, engine->pool, &engine->columns);
    if (!status) status = fcdp__driver_stream_create(engine->drv, &engine->node_stream);
    if (!status) status = fcdp__driver_stream_create(engine->drv, &engine->inter_stream);
    if (!status) status = fcdp__worker_create("fcdp-node", &engine->node_worker);
    if (!status && !config->one_worker)
        status = fcdp__worker_create("fcdp-inter", &engine->inter_worker);
    else
        engine->inter_worker = engine->node_worker;
    return status;
}

/* Whatever engine_open got; nothing runs any more once the workers are drained. */
static void engine_close(fcdp_engine *engine) {
    workers_drain(engine);
    while (engine->comms) fcdp_comm_destroy(engine->comms);
    if (engine->inter_worker != engine->node_worker) fcdp__worker_destroy(engine->inter_worker);
    fcdp__worker_destroy(engine->node_worker);
    fcdp__events_destroy(engine);
    fcdp__account_destroy(engine->account);
    fcdp__columns_destroy(engine->columns);
    if (engine->node_stream) fcdp__driver_stream_destroy(engine->drv, engine->node_stream);
    if (engine->inter_stream) fcdp__driver_stream_destroy(engine->drv, engine->inter_stream);
    if (engine->tiering) fcdp__tiering_destroy(engine->tiering);
    fcdp_device_close(&engine->own);
    fcdp__lock_destroy(&engine->lock);
    free(engine);
}

fcdp_status fcdp_engine_create(const fcdp_engine_config *config, fcdp_engine **engine_out) {
    fcdp_engine *engine = calloc(1, sizeof *engine);
    if (!engine) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for an engine");
    engine->pid = getpid();
    engine->options = config->options;
    fcdp__lock_init(&engine->lock, FCDP_RANK_ENGINE);
    fcdp_status status = engine_open(engine, config);
    if (status) {
        char text[1024];
        snprintf(text, sizeof text, "%s", fcdp_error_text());
        engine_close(engine);
        return fcdp__fail(status, "%s", text);
    }
    *engine_out = engine;
    return FCDP_OK;
}

void fcdp_engine_destroy(fcdp_engine *engine) {
    if (!engine || engine_is_foreign(engine)) return;
    engine_close(engine);
}

bool fcdp_engine_is_sim(const fcdp_engine *engine) {
    return fcdp__driver_is_sim(engine->drv);
}

static fcdp_status account_check(const fcdp_engine *engine) {
    fcdp_status status = fcdp__engine_check(engine, "the engine");
    if (!status && engine->account)
        status = fcdp__fail(FCDP_ERR_INVALID, "the engine knows the node's account already");
    return status;
}

fcdp_status fcdp_engine_account_create(fcdp_engine *engine, fcdp_shared_ticket *ticket_out) {
    fcdp_status status = account_check(engine);
    return status ? status
                  : fcdp__account_create(engine->options.host_budget_bytes, &engine->account, ticket_out);
}

fcdp_status fcdp_engine_account_join(fcdp_engine *engine, const fcdp_shared_ticket *ticket) {
    fcdp_status status = account_check(engine);
    return status ? status : fcdp__account_join(ticket, &engine->account);
}

/* ---- comm ---- */

static uint32_t ahead_limit(const fcdp_options *options, uint32_t node_size) {
    uint32_t limit = options->prefetch < 1 ? 1 : (uint32_t)options->prefetch;
    if (limit > node_size) limit = node_size;
    return limit < FCDP_MAX_AHEAD ? limit : FCDP_MAX_AHEAD;
}

fcdp_status fcdp_comm_create(fcdp_engine *engine, const fcdp_topology *topology,
                             const fcdp_transport *transport, fcdp_comm **comm_out) {
    fcdp_status status = fcdp__engine_check(engine, "the engine");
    if (!status && !engine->account)
        status = fcdp__fail(FCDP_ERR_INVALID, "a comm needs the node's account first");
    if (status) return status;
    fcdp_comm *comm = calloc(1, sizeof *comm);
    if (!comm) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a comm");
    *comm = (fcdp_comm){.engine = engine,
                        .topology = *topology,
                        .transport = *transport,
                        .ahead_limit = ahead_limit(&engine->options, topology->node_size)};
    fcdp__lock_acquire(&engine->lock);
    comm->next = engine->comms;
    engine->comms = comm;
    fcdp__lock_release(&engine->lock);
    *comm_out = comm;
    return FCDP_OK;
}

static fcdp_host_config host_config(const fcdp_comm *comm) {
    const fcdp_engine *engine = comm->engine;
    return (fcdp_host_config){
        .drv = engine->drv,
        .account = engine->account,
        .numa_node = fcdp__driver_numa_node(engine->drv),
        .pin = engine->options.pin,
        .slice = comm->topology.local,
        .n_slices = comm->topology.node_size,
        .timeout_s = engine->options.timeout_s,
    };
}

static fcdp_status host_check(const fcdp_comm *comm) {
    fcdp_status status = fcdp__engine_check(comm->engine, "the shard group");
    if (!status && comm->host)
        status = fcdp__fail(FCDP_ERR_INVALID, "the shard group has its host memory already");
    return status;
}

fcdp_status fcdp_comm_host_create(fcdp_comm *comm, fcdp_shared_ticket *ticket_out) {
    fcdp_host_config config = host_config(comm);
    fcdp_status status = host_check(comm);
    return status ? status : fcdp__host_create(&config, &comm->host, ticket_out);
}

fcdp_status fcdp_comm_host_join(fcdp_comm *comm, const fcdp_shared_ticket *ticket) {
    fcdp_host_config config = host_config(comm);
    fcdp_status status = host_check(comm);
    return status ? status : fcdp__host_join(&config, ticket, &comm->host);
}

void fcdp__comm_lose_step(fcdp_comm *comm) {
    atomic_store_explicit(&comm->out_of_step, true, memory_order_relaxed);
}

fcdp_status fcdp__comm_check_step(const fcdp_comm *comm) {
    if (!atomic_load_explicit(&comm->out_of_step, memory_order_relaxed)) return FCDP_OK;
    return fcdp__fail(
        FCDP_ERR_TRANSPORT,
        "an earlier gather failed on this rank, which is out of step with its peers since; restart the job");
}

void fcdp_comm_destroy(fcdp_comm *comm) {
    if (!comm || engine_is_foreign(comm->engine)) return;
    while (comm->groups) fcdp_group_destroy(comm->groups);
    fcdp_engine *engine = comm->engine;
    fcdp__lock_acquire(&engine->lock);
    fcdp_comm **link = &engine->comms;
    while (*link != comm) link = &(*link)->next;
    *link = comm->next;
    fcdp__lock_release(&engine->lock);
    fcdp__host_destroy(comm->host);
    free(comm);
}

/* ---- group ---- */

static void group_free(fcdp_group *group) {
    fcdp__validity_destroy(group->validity);
    fcdp__layout_destroy(group->layout);
    free(group->name);
    fcdp__lock_destroy(&group->lock);
    free(group);
}

static fcdp_status group_make(fcdp_group *group, const char *name, const fcdp_extent_spec *specs,
                              uint32_t n_extents) {
    const fcdp_topology *topology = &group->comm->topology;
    group->name = strdup(name);
    if (!group->name) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for the group '%s'", name);
    fcdp_status status =
        fcdp__layout_create(specs, n_extents, topology->n_ranks, topology->node_size, &group->layout);
    if (!status && group->layout->bytes == 0)
        status = fcdp__fail(FCDP_ERR_UNSUPPORTED, "'%s' has no bytes to gather", name);
    return status ? status : fcdp__validity_create(n_extents, &group->validity);
}

fcdp_status fcdp_group_create(fcdp_comm *comm, const char *name, const fcdp_extent_spec *specs,
                              uint32_t n_extents, fcdp_group **group_out) {
    fcdp_engine *engine = comm->engine;
    fcdp_status status = fcdp__engine_check(engine, name);
    if (status) return status;
    fcdp_group *group = calloc(1, sizeof *group);
    if (!group) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for the group '%s'", name);
    group->comm = comm;
    fcdp__lock_init(&group->lock, FCDP_RANK_ENGINE);
    status = group_make(group, name, specs, n_extents);
    if (status) {
        group_free(group);
        return status;
    }
    fcdp__lock_acquire(&engine->lock);
    group->next = comm->groups;
    comm->groups = group;
    fcdp__lock_release(&engine->lock);
    *group_out = group;
    return FCDP_OK;
}

/* The node worker is idle or gone, and so is the group's prefetch. */
static void group_detach(fcdp_group *group) {
    fcdp__segv_forget(group->watch);
    if (group->in_use) fcdp__region_end_use(group->region);
    if (group->region) fcdp__region_destroy(group->region);
    if (group->block) fcdp__host_detach(group->block);
    if (group->carved) fcdp__host_free(group->comm->host, group->offset);
}

void fcdp_group_destroy(fcdp_group *group) {
    if (!group || engine_is_foreign(group->comm->engine)) return;
    fcdp_engine *engine = group->comm->engine;
    if (engine->node_worker) fcdp__worker_drain(engine->node_worker);
    if (fcdp_group_unprefetch(group))
        fcdp__log(FCDP_LOG_WARN, "a prefetch that nobody used: %s", fcdp_error_text());
    fcdp__lock_acquire(&engine->lock);
    fcdp_group **link = &group->comm->groups;
    while (*link != group) link = &(*link)->next;
    *link = group->next;
    fcdp_status late = group->late_status;
    fcdp__lock_release(&engine->lock);
    if (late) fcdp__log(FCDP_LOG_WARN, "%s", group->late_text);
    group_detach(group);
    group_free(group);
}

fcdp_status fcdp_group_carve(fcdp_group *group, uint64_t *offset_out) {
    fcdp_engine *engine = group->comm->engine;
    fcdp_status status = fcdp__engine_check(engine, group->name);
    if (status) return status;
    fcdp_comm *comm = group->comm;
    if (!comm->host || comm->topology.local != 0 || group->carved)
        return fcdp__fail(FCDP_ERR_INVALID,
                          "'%s': only local rank 0 carves host memory, once, after it has created it",
                          group->name);
    status = fcdp__host_carve(comm->host, group->layout->bytes, &group->offset);
    if (status) return fcdp__fail(status, "host memory for '%s': %s", group->name, fcdp_error_text());
    group->carved = true;
    *offset_out = group->offset;
    return FCDP_OK;
}

fcdp_status fcdp_group_attach(fcdp_group *group, uint64_t offset) {
    fcdp_engine *engine = group->comm->engine;
    fcdp_status status = fcdp__engine_check(engine, group->name);
    if (status) return status;
    fcdp_comm *comm = group->comm;
    if (!comm->host || group->region)
        return fcdp__fail(FCDP_ERR_INVALID, "'%s': attach once, after the shard group has its host memory",
                          group->name);
    fcdp_host_block *block;
    status = fcdp__host_attach(comm->host, offset, group->layout->bytes, &block);
    if (status) return fcdp__fail(status, "host memory for '%s': %s", group->name, fcdp_error_text());
    status = fcdp__region_create(engine->tiering, group->name, group->layout, comm->topology.local, block,
                                 &group->region);
    if (status) {
        fcdp__host_detach(block);
        return status;
    }
    group->block = block;
    return FCDP_OK;
}

fcdp_dptr fcdp_group_extent(const fcdp_group *group, uint32_t i) {
    FCDP_CHECK(1, group->region && i < group->layout->n_extents);
    return fcdp__dptr_add(fcdp__region_base(group->region), group->layout->extents[i].offset_bytes);
}

size_t fcdp_group_bytes(const fcdp_group *group) {
    return group->layout->bytes;
}

fcdp_status fcdp_group_watch(fcdp_group *group, const char *const *names, uint32_t n_names) {
    const fcdp_layout *layout = group->layout;
    fcdp_status status = fcdp__engine_check(group->comm->engine, group->name);
    if (status) return status;
    if (!group->region || group->watch || n_names != layout->n_extents)
        return fcdp__fail(FCDP_ERR_INVALID, "'%s': watch once, after it is attached, %u parameters, not %u",
                          group->name, layout->n_extents, n_names);
    fcdp_segv_part *parts = malloc((layout->n_extents + 1) * sizeof *parts);
    if (!parts) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory to name the parameters of '%s'", group->name);
    for (uint32_t i = 0; i < layout->n_extents; i++)
        parts[i] = (fcdp_segv_part){layout->extents[i].offset_bytes,
                                    layout->n_shards * layout->extents[i].shard_bytes, names[i]};
    status = fcdp__segv_watch(fcdp__region_base(group->region), layout->bytes,
                              group->name[0] ? group->name : "the root", parts, layout->n_extents,
                              &group->watch);
    free(parts);
    return status;
}

/* ---- stats ---- */

static const char *group_state(const fcdp_group *group) {
    if (!group->region) return "invalid";
    fcdp_region_state state;
    fcdp__region_state(group->region, &state);
    uint32_t n_device = 0, n_host = 0, n_invalid = 0;
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
        if (group->layout->span[s].bytes == 0) continue;
        if (state.span[s].on_device)
            n_device++;
        else if (state.span[s].slice_on_host)
            n_host++;
        else
            n_invalid++;
    }
    uint32_t n = n_device + n_host + n_invalid;
    return n_device == n ? "device" : n_host == n ? "host" : n_invalid == n ? "invalid" : "mixed";
}

void fcdp_group_stats_get(fcdp_group *group, fcdp_group_stats *stats_out) {
    fcdp_engine *engine = group->comm->engine;
    *stats_out = (fcdp_group_stats){.name = group->name, .bytes = group->layout->bytes, .state = "invalid"};
    if (engine_is_foreign(engine)) return;
    fcdp__lock_acquire(&engine->lock);
    stats_out->gathers_made = group->gathers_made;
    stats_out->gathers_avoided = group->gathers_avoided;
    stats_out->gathers_forward = group->gathers_forward;
    stats_out->gathers_backward = group->gathers_backward;
    fcdp__lock_release(&engine->lock);
    stats_out->state = group_state(group);
}

void fcdp_engine_stats_get(fcdp_engine *engine, fcdp_engine_stats *stats_out) {
    *stats_out = (fcdp_engine_stats){0};
    if (engine_is_foreign(engine)) return;
    fcdp_pool_stats pool;
    fcdp__pool_stats(engine->pool, &pool);
    stats_out->device_bytes = pool.held_pages[FCDP_HOLDER_REGIONS] * pool.page_bytes;
    stats_out->device_peak_bytes = pool.peak_held_pages[FCDP_HOLDER_REGIONS] * pool.page_bytes;
    stats_out->device_budget_bytes = pool.budget_bytes;
    fcdp__tiering_stats(engine->tiering, &stats_out->moves);
    fcdp__lock_acquire(&engine->lock);
    for (fcdp_comm *comm = engine->comms; comm; comm = comm->next)
        if (comm->host) fcdp__host_reap(comm->host);
    if (engine->account)
        fcdp__account_usage(engine->account, &stats_out->host_bytes, &stats_out->host_peak_bytes);
    stats_out->gather = engine->gather;
    stats_out->restore = engine->restore;
    fcdp__lock_release(&engine->lock);
}

void fcdp_engine_reset_peaks(fcdp_engine *engine) {
    if (engine_is_foreign(engine)) return;
    fcdp__pool_reset_peak(engine->pool, FCDP_HOLDER_REGIONS);
    if (engine->account) fcdp__account_reset_peak(engine->account);
}
