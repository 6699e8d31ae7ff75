/* engine.c - a process's device, streams, monitor and counters, opened once and closed in the reverse order.
 *
 * The engine decides what depends on the machine rather than on a group: options that were left to FCDP, the
 * reclaimer of staging buffers and of own bases, when an optimizer may write shards that a gather still
 * reads. It refuses a forked child and a CUDA graph that is being captured: both would corrupt memory
 * silently.
 *
 * It moves no bytes; comm.c and use.c do, on its streams.
 */
#include "comm/engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm/trace.h"

fcdp_status fcdp__engine_check_process(const fcdp_engine *engine, const char *what) {
    if (engine->pid == getpid()) return FCDP_OK;
    return fcdp__fail(
        FCDP_ERR_UNSUPPORTED,
        "%s belongs to process %d; a forked child (%d) cannot use it: start fresh processes instead", what,
        (int)engine->pid, (int)getpid());
}

/* What is stale is asked by the host, which a replay does not do; and by then other groups may have the pages
 * that it writes to. A query that fails says nothing, and must not keep a use from its end. */
fcdp_status fcdp__engine_check_capture(const fcdp_engine *engine, fcdp_stream stream, const char *what,
                                       const char *name) {
    if (fcdp__driver_stream_capture_query(engine->drv, stream) != FCDP_PENDING) return FCDP_OK;
    return fcdp__fail(FCDP_ERR_INVALID,
                      "a CUDA graph is being captured, and '%s' cannot be %s in it: a replay would not ask "
                      "what has changed, and "
                      "would use device pages that other groups have by then; capture only what lies between "
                      "a group's unshard and "
                      "its reshard, or set FCDP=0",
                      fcdp__name_text(name), what);
}

/* What a user's FCDP_MAPPING=auto is. In a slot, pages that another group has by now stay mapped. A stale
 * access would read wrong numbers there, unless the framework's storages refuse it: else it must fault. */
static fcdp_mapping_mode mapping_choose(const fcdp_engine_config *config) {
    const fcdp_options *options = &config->options;
    if (options->mapping != FCDP_MAPPING_AUTO) return options->mapping;
    return options->check < 2 && config->storages_raise ? FCDP_MAPPING_SLOTS : FCDP_MAPPING_EXACT;
}

/* Threads that the driver has started, and those of the framework, go where the device is. Where the host
 * computes they are the model's, and stay: if one NUMA node has all of their CPUs, the device is there. */
static void cpus_bind(fcdp_engine *engine) {
    bool is_sim = fcdp__driver_is_sim(engine->drv);
    const char *described = is_sim ? getenv("FCDP_SIM_ROOT") : NULL, *root = described ? described : "";
    fcdp_numa_plan *plan = &engine->numa;
    if (!fcdp__cpus_own(&engine->cpus_before)) return;
    int node = engine->host_computes ? fcdp__cpus_node(root, &engine->cpus_before) : -1;
    const fcdp_numa_device device = {.node = node >= 0 ? node : fcdp__driver_numa_node(engine->drv),
                                     .pci = fcdp__driver_pci(engine->drv)};
    fcdp__numa_plan(root, &device, engine->options.pin_cpu == FCDP_PIN_CPU_AUTO, &engine->cpus_before, plan);
    if (engine->host_computes && plan->binds) {
        plan->binds = false;
        snprintf(plan->text, sizeof plan->text, "%u NUMA nodes; the model computes on CPUs: nothing is bound",
                 plan->n_nodes);
    }
    if (plan->binds && !fcdp__cpus_bind(&engine->cpus_before, &plan->cpus)) {
        plan->binds = false;
        snprintf(plan->text, sizeof plan->text, "NUMA node %d of %u; the system refuses to bind threads",
                 plan->node, plan->n_nodes);
    }
    fcdp__trace_set(FCDP_COUNT_BOUND_CPUS, plan->binds ? fcdp__cpus_count(&plan->cpus) : 0);
    if (plan->n_nodes > 1) fcdp__log(FCDP_LOG_INFO, "%s", plan->text);
}

/* What a user's FCDP_POLICY=auto is. Where the host is the device, a kept group would be in host memory
 * twice. Where PyTorch allocates tensors beside the pool, not each of its ways to run out of memory takes
 * kept pages back (docs/allocator.md). A user who sets FCDP_TAU asks for its rule. Without
 * fingerprints nothing tells what a program wrote into a kept copy. */
static fcdp_policy_kind policy_choose(const fcdp_engine_config *config) {
    const fcdp_options *options = &config->options;
    if (options->policy != FCDP_POLICY_AUTO) return options->policy;
    bool shares_pool = config->device && !config->host_computes;
    bool is_judged = options->fingerprint != FCDP_FINGERPRINT_NEVER; /* copy.h */
    return shares_pool && is_judged && !options->tau_is_set ? FCDP_POLICY_NEXT_USE : FCDP_POLICY_TAU;
}

/* An fcdp_reclaim_fn: what is cheap to fill again. */
static size_t scratch_reclaim(void *ctx, size_t n_pages) {
    fcdp_engine *engine = ctx;
    size_t n_given = 0;
    for (fcdp_stream_set *set = engine->sets; set && n_given < n_pages; set = set->next)
        n_given += fcdp__staging_reclaim(set);
    for (fcdp_stream_set *set = engine->sets; set && n_given < n_pages; set = set->next)
        n_given += fcdp__own_bases_reclaim(set);
    return n_given;
}

static size_t scratch_idle(void *ctx) {
    fcdp_engine *engine = ctx;
    size_t n_pages = 0;
    for (fcdp_stream_set *set = engine->sets; set; set = set->next)
        n_pages += fcdp__staging_idle(set) + fcdp__own_bases_idle(set);
    return n_pages;
}

/* Options that are left to FCDP are decided once the driver is known. Where the host computes, ranks are
 * joined by its memory alone, so a restore is whole; else it depends on the transport
 * (fcdp__group_by_slice). */
static fcdp_status engine_open(fcdp_engine *engine, const fcdp_engine_config *config) {
    fcdp_status status = FCDP_OK;
    if (!config->device)
        status = fcdp_device_open(
            config->driver, config->ordinal, config->sim_library, config->options.device_budget_bytes,
            config->host_computes ? 0 : config->options.headroom_bytes, false, &engine->own);
    const fcdp_device *device = config->device ? config->device : &engine->own;
    engine->drv = device->drv;
    engine->pool = device->pool;
    if (status) return status;
    cpus_bind(engine);
    fcdp_options *options = &engine->options;
    if (options->restore == FCDP_RESTORE_AUTO && engine->host_computes) options->restore = FCDP_RESTORE_WHOLE;
    options->mapping = mapping_choose(config);
    options->policy = policy_choose(config);
    fcdp_tiering_config tiers = {.exact = options->mapping == FCDP_MAPPING_EXACT, .policy = options->policy};
    status = fcdp__tiering_create(engine->drv, engine->pool, &tiers, &engine->tiering);
    fcdp_stream_set *first;
    const fcdp_stream copies[FCDP_N_DIRECTIONS] = {
        status ? NULL : fcdp__tiering_stream(engine->tiering, FCDP_TO_HOST),
        status ? NULL : fcdp__tiering_stream(engine->tiering, FCDP_TO_DEVICE)};
    if (!status) status = fcdp__stream_set_create(engine, copies, &first);
    if (!status)
        fcdp__pool_set_reclaimer(engine->pool, FCDP_RECLAIM_SCRATCH, scratch_reclaim, scratch_idle, engine);
    if (!status) status = fcdp__frozen_open(engine, &engine->frozen);
    if (!status) fcdp__spilled_open(engine);
    return status ? status : fcdp__monitor_start(engine, &engine->monitor);
}

/* Whatever engine_open got. */
static void engine_close(fcdp_engine *engine) {
    while (engine->comms) fcdp_comm_destroy(engine->comms);
    fcdp__frozen_close(engine->frozen);
    fcdp__spill_close(engine->spill);
    fcdp__monitor_stop(engine->monitor);
    if (engine->pool) fcdp__pool_set_reclaimer(engine->pool, FCDP_RECLAIM_SCRATCH, NULL, NULL, NULL);
    fcdp__stream_sets_destroy(engine);
    fcdp__tiering_destroy(engine->tiering);
    fcdp__account_destroy(engine->account);
    fcdp_device_close(&engine->own);
    if (engine->numa.binds) (void)fcdp__cpus_bind(&engine->numa.cpus, &engine->cpus_before);
    fcdp__lock_destroy(&engine->lock);
    free(engine);
}

/* What an engine that could not be opened has got goes again. */
fcdp_status fcdp_engine_create(const fcdp_engine_config *config, fcdp_engine **engine_out) {
    fcdp_engine *engine = calloc(1, sizeof *engine);
    if (!engine) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for an engine");
    fcdp__engine_trace_open(config);
    engine->pid = getpid();
    engine->options = config->options;
    engine->host_computes = config->host_computes;
    fcdp__lock_init(&engine->lock, FCDP_RANK_ENGINE);
    fcdp_status status = engine_open(engine, config);
    if (!status) fcdp__engine_trace_device(engine);
    if (status) {
        fcdp_failure error = fcdp__failure_keep(status);
        engine_close(engine);
        return fcdp__failure_restore(&error);
    }
    *engine_out = engine;
    return FCDP_OK;
}

void fcdp_engine_destroy(fcdp_engine *engine) {
    if (!engine || engine->pid != getpid()) return;
    engine_close(engine);
}

bool fcdp_engine_is_sim(const fcdp_engine *engine) {
    return fcdp__driver_is_sim(engine->drv);
}

bool fcdp_engine_host_computes(const fcdp_engine *engine) {
    return engine->host_computes;
}

fcdp_driver *fcdp_engine_driver(const fcdp_engine *engine) {
    return engine->drv;
}

static fcdp_status account_check(const fcdp_engine *engine) {
    fcdp_status status = fcdp__engine_check_process(engine, "the engine");
    if (!status && engine->account)
        status = fcdp__fail(FCDP_ERR_INVALID, "the engine knows the node's account already");
    return status;
}

/* Under the lock: the monitor looks at it. */
static void account_set(fcdp_engine *engine, fcdp_account *account) {
    fcdp__lock_acquire(&engine->lock);
    engine->account = account;
    fcdp__lock_release(&engine->lock);
}

fcdp_status fcdp_engine_account_create(fcdp_engine *engine, fcdp_shared_ticket *ticket_out) {
    fcdp_account *account;
    fcdp_status status = account_check(engine);
    if (!status) status = fcdp__account_create(engine->options.host_budget_bytes, &account, ticket_out);
    if (!status) account_set(engine, account);
    return status;
}

fcdp_status fcdp_engine_account_join(fcdp_engine *engine, const fcdp_shared_ticket *ticket) {
    fcdp_account *account;
    fcdp_status status = account_check(engine);
    if (!status) status = fcdp__account_join(ticket, &account);
    if (!status) account_set(engine, account);
    return status;
}

fcdp_status fcdp__engine_check_maps(const fcdp_engine *engine) {
    if (!engine->host_computes) return FCDP_OK;
    return fcdp__fail(FCDP_ERR_UNSUPPORTED,
                      "models on CPUs have their gathered parameters in host memory already");
}

fcdp_status fcdp_engine_probe_host_map(fcdp_engine *engine) {
    fcdp_status status = fcdp__engine_check_process(engine, "the engine");
    if (!status) status = fcdp__engine_check_maps(engine);
    return status ? status : fcdp__mapped_probe(engine->drv, engine->numa.memory_node);
}

fcdp_status fcdp_engine_check(fcdp_engine *engine) {
    fcdp_status status = fcdp__engine_check_process(engine, "the engine");
    if (status) return status;
    fcdp__lock_acquire(&engine->lock);
    for (fcdp_comm *comm = engine->comms; comm && !status; comm = comm->next) status = fcdp_comm_check(comm);
    fcdp__lock_release(&engine->lock);
    return status;
}

fcdp_status fcdp_engine_drain(fcdp_engine *engine) {
    fcdp_status status = fcdp__engine_check_process(engine, "the engine");
    uint64_t start_ns = fcdp__trace_start();
    for (fcdp_stream_set *set = engine->sets; set && !status; set = set->next)
        status = fcdp__stream_set_drain(set);
    fcdp__host_wait_trace(start_ns, FCDP_CAUSE_FOR_END);
    if (!status) fcdp__engine_trace_poll(engine, 0);
    fcdp_status known = fcdp_engine_check(engine); /* it says more */
    return known ? known : status;
}

/* Each group's shards are read until group->reading. A stream is put behind all of these events, and they
 * stay: another stream, or another thread, may write too. The host waits for one after another that has not
 * passed, since the lock is not held while it waits. What a CUDA graph captures writes nothing now, and
 * cannot wait for what is not in the graph. */
fcdp_status fcdp_engine_order_writes(fcdp_engine *engine, fcdp_stream stream) {
    bool by_host = engine->host_computes;
    fcdp_status status = fcdp_engine_check(engine); /* what has failed already is not waited for */
    if (!status && !by_host && fcdp__driver_stream_capture_query(engine->drv, stream) == FCDP_PENDING)
        return FCDP_OK;
    while (!status) {
        fcdp_group *taken = NULL;
        fcdp_event reading = NULL;
        fcdp__lock_acquire(&engine->lock);
        for (fcdp_comm *comm = engine->comms; comm && !taken; comm = comm->next)
            for (fcdp_group *group = comm->groups; group && !taken && !status; group = group->next) {
                if (!group->reading) continue;
                if (!by_host) {
                    status = fcdp__driver_stream_wait(engine->drv, stream, group->reading);
                    continue;
                }
                status = fcdp__driver_event_query(engine->drv, group->reading);
                if (status != FCDP_PENDING) continue;
                status = FCDP_OK;
                taken = group;
                reading = group->reading;
                group->n_waiters++;
            }
        fcdp__lock_release(&engine->lock);
        if (!taken) break;
        uint64_t start_ns = fcdp__trace_start();
        status = fcdp__driver_event_sync(engine->drv, reading);
        fcdp__host_wait_trace(start_ns, FCDP_CAUSE_FOR_WRITES);
        fcdp__lock_acquire(&engine->lock);
        taken->n_waiters--;
        fcdp__lock_release(&engine->lock);
    }
    fcdp_status known = fcdp_engine_check(engine); /* after the waits: what was opened means nothing */
    return known ? known : status;
}

void fcdp_engine_begin_pass(fcdp_engine *engine) {
    if (engine->pid != getpid()) return;
    fcdp__trace_now(FCDP_EVENT_PASS, 0, 0, 0, 0);
    fcdp__trace_count(FCDP_COUNT_PASSES, 1);
    fcdp__tiering_begin_pass(engine->tiering);
    for (fcdp_stream_set *set = engine->sets; set; set = set->next) {
        fcdp__staging_begin_pass(set);
        fcdp__own_bases_begin_pass(set);
    }
}

fcdp_status fcdp__engine_check_awake(const fcdp_engine *engine, const char *name) {
    if (!engine->asleep) return FCDP_OK;
    return fcdp__fail(FCDP_ERR_INVALID, "'%s' cannot be gathered: FCDP is asleep. Call fcdp.wake() first",
                      fcdp__name_text(name));
}

static fcdp_group *ahead_find(fcdp_engine *engine) {
    fcdp_group *found = NULL;
    fcdp__lock_acquire(&engine->lock);
    for (fcdp_comm *comm = engine->comms; comm && !found; comm = comm->next)
        for (fcdp_group *group = comm->groups; group && !found; group = group->next)
            if (group->member.ahead && group->begun) found = group;
    fcdp__lock_release(&engine->lock);
    return found;
}

/* Uses that were begun ahead of the program end: it has not seen them. */
static fcdp_status ahead_cancel(fcdp_engine *engine) {
    fcdp_status status = FCDP_OK;
    fcdp_group *group;
    while (!status && (group = ahead_find(engine))) status = fcdp__group_cancel(group);
    return status;
}

fcdp_status fcdp_engine_sleep(fcdp_engine *engine, fcdp_stream stream) {
    fcdp_status status = fcdp__engine_check_process(engine, "the engine");
    if (!status) status = fcdp_engine_check(engine);
    /* to evict, the host waits for copies, which would break the capture */
    if (!status && fcdp__driver_stream_capture_query(engine->drv, stream) == FCDP_PENDING)
        status = fcdp__fail(FCDP_ERR_INVALID,
                            "gathered parameters cannot go to sleep while a CUDA graph is captured");
    if (status || atomic_exchange(&engine->asleep, true)) return status;
    status = ahead_cancel(engine);
    if (!status) status = fcdp__tiering_sleep(engine->tiering);
    for (fcdp_stream_set *set = engine->sets; set && !status; set = set->next) {
        fcdp__staging_trim(set);
        fcdp__own_bases_trim(set);
    }
    if (status)
        engine->asleep = false;
    else
        (void)fcdp__pool_trim(engine->pool);
    return status;
}

void fcdp_engine_wake(fcdp_engine *engine) {
    engine->asleep = false;
}

bool fcdp_engine_is_asleep(const fcdp_engine *engine) {
    return engine->asleep;
}

fcdp_status fcdp_engine_record_stream(fcdp_engine *engine, fcdp_dptr address, fcdp_stream stream) {
    return engine->pid == getpid() ? fcdp__regions_record_stream(engine->tiering, address, stream)
                                   : FCDP_ERR_INVALID;
}

void fcdp_engine_set_neighbour(fcdp_engine *engine, fcdp_reclaim_fn ask, void *ctx) {
    if (engine->pid == getpid())
        fcdp__pool_set_reclaimer(engine->pool, FCDP_RECLAIM_NEIGHBOUR, ask, NULL, ctx);
}

size_t fcdp_engine_yield(fcdp_engine *engine, size_t bytes) {
    int mode = FCDP_CAPTURE_MODE_RELAXED;
    if (engine->pid != getpid() || fcdp__driver_capture_mode_exchange(engine->drv, &mode)) return 0;
    size_t n_given = fcdp__pool_yield(engine->pool, bytes);
    if (fcdp__driver_capture_mode_exchange(engine->drv, &mode))
        fcdp__log(FCDP_LOG_DEBUG, "%s", fcdp_error_text());
    return n_given;
}

/* Counts of the engine, and what its parts count themselves. */
void fcdp_engine_stats_get(fcdp_engine *engine, fcdp_engine_stats *stats_out) {
    const _Atomic uint64_t *n = engine->counts.n;
    *stats_out = (fcdp_engine_stats){0};
    if (engine->pid != getpid()) return;
    *stats_out = (fcdp_engine_stats){
        .gather = {n[FCDP_COUNT_GATHER_CALLS], n[FCDP_COUNT_GATHER_INTER_BYTES],
                   n[FCDP_COUNT_GATHER_INTRA_BYTES]},
        .restore = {n[FCDP_COUNT_RESTORE_CALLS], 0, n[FCDP_COUNT_RESTORE_INTRA_BYTES]},
        .gathers = fcdp__gathers_counted(&engine->counts),
        .plain_bytes = n[FCDP_COUNT_SAVED_PLAIN_BYTES],
        .gather_bytes = n[FCDP_COUNT_SAVED_GATHER_BYTES],
        .n_host_waits = n[FCDP_COUNT_HOST_WAITS],
        .host_wait_ns = n[FCDP_COUNT_HOST_WAIT_NS],
        .policy = engine->options.policy,
        .spill = {.bytes = engine->spill ? fcdp__spill_bytes(engine->spill) : 0,
                  .written_bytes = n[FCDP_COUNT_SPILL_WRITTEN_BYTES],
                  .read_bytes = n[FCDP_COUNT_SPILL_READ_BYTES],
                  .n_failures = n[FCDP_COUNT_SPILL_FAILURES],
                  .n_waits = n[FCDP_COUNT_SPILL_WAITS],
                  .wait_ns = n[FCDP_COUNT_SPILL_WAIT_NS]},
        .n_delta_gathers = n[FCDP_COUNT_DELTA_GATHERS],
        .n_delta_whole = n[FCDP_COUNT_DELTA_WHOLE],
        .n_delta_by_device = n[FCDP_COUNT_DELTA_BY_DEVICE],
        .n_late = n[FCDP_COUNT_GATHERS_LATE],
        .n_drops = n[FCDP_COUNT_DROPS],
        .cache = {.read_bytes = n[FCDP_COUNT_CACHE_READ_BYTES],
                  .written_bytes = n[FCDP_COUNT_CACHE_WRITTEN_BYTES],
                  .n_failures = n[FCDP_COUNT_CACHE_FAILURES]}};
    fcdp_pool_stats pool;
    fcdp__pool_stats(engine->pool, &pool);
    fcdp__lock_acquire(&engine->lock);
    for (fcdp_comm *comm = engine->comms; comm; comm = comm->next) {
        if (!comm->host) continue;
        fcdp__host_reap(comm->host);
        uint32_t n_copies = fcdp__host_copies(comm->host);
        if (n_copies > stats_out->host_copies) stats_out->host_copies = n_copies;
    }
    if (engine->account)
        fcdp__account_usage(engine->account, &stats_out->host_bytes, &stats_out->host_peak_bytes);
    stats_out->rounding = engine->rounding;
    if (engine->account) fcdp__account_trace(engine->account);
    fcdp__lock_release(&engine->lock);
    fcdp__pool_trace_pins(engine->pool);
    stats_out->pins = fcdp__driver_pins_get(engine->drv);
    stats_out->numa = engine->numa;
    stats_out->host_near_bytes = n[FCDP_COUNT_HOST_NEAR_BYTES];
    stats_out->host_far_bytes = n[FCDP_COUNT_HOST_FAR_BYTES];
    fcdp__tiering_stats_get(engine->tiering, &stats_out->moves);
    stats_out->device_bytes = pool.held_pages[FCDP_HOLDER_GATHERED] * pool.page_bytes;
    stats_out->device_peak_bytes = pool.peak_held_pages[FCDP_HOLDER_GATHERED] * pool.page_bytes;
    stats_out->device_budget_bytes = pool.budget_bytes;
}

void fcdp_engine_reset_peaks(fcdp_engine *engine) {
    if (engine->pid != getpid()) return;
    fcdp__pool_reset_peak(engine->pool, FCDP_HOLDER_GATHERED);
    if (engine->account) fcdp__account_reset_peak(engine->account);
}
