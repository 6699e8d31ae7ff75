/* trace.c - comm's events, and the figures of the process and its groups that go with them.
 *
 * An event and the counters that sum it up are written together. Nothing here can fail a use: without a ring
 * the calls do nothing, and a span that cannot be timed is dropped.
 */
#include "comm/trace.h"

#include <stdio.h>

enum { DEVICE_PERIODS = 10 }; /* of the monitor, between two looks at how full the device is */

void fcdp__engine_trace_open(const fcdp_engine_config *config) {
    fcdp_trace_open((uint32_t)config->options.trace, config->options.trace_bytes);
}

void fcdp__engine_trace_device(const fcdp_engine *engine) {
    fcdp_trace_header *header = fcdp__trace_header();
    if (!header) return;
    fcdp_pool_stats pool;
    fcdp__pool_stats(engine->pool, &pool);
    atomic_store_explicit(&header->page_bytes, pool.page_bytes, memory_order_relaxed);
    atomic_store_explicit(&header->device_budget_bytes, pool.budget_bytes, memory_order_relaxed);
    snprintf(header->device, sizeof header->device, "%s",
             fcdp__driver_is_sim(engine->drv) ? "simulated" : "CUDA");
    fcdp__pool_trace_device(engine->pool);
}

void fcdp__comm_trace(const fcdp_comm *comm) {
    fcdp_trace_header *header = fcdp__trace_header();
    const fcdp_topology *topology = &comm->topology;
    int32_t unknown = -1;
    if (!header || !atomic_compare_exchange_strong(&header->rank, &unknown, (int32_t)topology->rank)) return;
    atomic_store(&header->world_size, (int32_t)topology->n_ranks);
    atomic_store(&header->node, (int32_t)topology->node);
    atomic_store(&header->n_nodes, (int32_t)topology->n_nodes);
    atomic_store(&header->local_rank, (int32_t)topology->local);
    atomic_store(&header->node_size, (int32_t)topology->node_size);
}

void fcdp__engine_trace_poll(const fcdp_engine *engine, uint64_t n) {
    if (!fcdp__trace_is_on(1)) return;
    fcdp__trace_spans_poll(fcdp__tiering_spans(engine->tiering));
    if (n % DEVICE_PERIODS == 0) fcdp__pool_trace_device(engine->pool);
}

uint32_t fcdp__group_object(const fcdp_group *group) {
    return group && group->region ? fcdp__region_object(group->region) : 0;
}

void fcdp__group_trace_attach(const fcdp_group *group) {
    fcdp_trace_object *object = fcdp__trace_object(fcdp__group_object(group));
    if (!object) return;
    atomic_store_explicit(&object->shard_group, group->comm->shard_group, memory_order_relaxed);
    atomic_store_explicit(&object->trainable_bytes, group->layout->span[FCDP_SPAN_TRAINABLE].bytes,
                          memory_order_relaxed);
    fcdp__group_trace_lives(group);
}

void fcdp__group_trace_lives(const fcdp_group *group) {
    fcdp_trace_object *object = fcdp__trace_object(fcdp__group_object(group));
    if (!object) return;
    uint32_t lives = fcdp__group_is_spilled(group)     ? FCDP_LIVES_IN_FILE
                     : group->tier == FCDP_TIER_MAPPED ? FCDP_LIVES_MAPPED
                                                       : 0;
    atomic_fetch_and_explicit(&object->lives, FCDP_LIVES_ON_DISK, memory_order_relaxed);
    atomic_fetch_or_explicit(&object->lives, lives, memory_order_relaxed);
}

void fcdp__group_trace_on_disk(const fcdp_group *group) {
    fcdp_trace_object *object = fcdp__trace_object(fcdp__group_object(group));
    if (object) atomic_fetch_or_explicit(&object->lives, FCDP_LIVES_ON_DISK, memory_order_relaxed);
}

void fcdp__group_trace_use(const fcdp_group *group, const fcdp_use_counts *counts) {
    bool made = counts->block_bytes > 0, backward = counts->pass == FCDP_PASS_BACKWARD;
    fcdp__trace(&(fcdp_trace_event){.kind = FCDP_EVENT_USE,
                                    .cause = made ? FCDP_CAUSE_MADE : FCDP_CAUSE_HIT,
                                    .flags = backward ? FCDP_TRACE_BACKWARD : 0,
                                    .object = fcdp__group_object(group),
                                    .bytes = counts->plain_bytes,
                                    .a = counts->block_bytes,
                                    .b = counts->n_stale});
    fcdp_trace_object *object = fcdp__trace_object(fcdp__group_object(group));
    if (!object) return;
    atomic_fetch_add_explicit(&object->n_uses, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&object->plain_bytes, counts->plain_bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&object->gather_bytes, counts->gather_bytes, memory_order_relaxed);
}

/* The one that tells most, where several say so: a step of an optimizer moves counters and bytes as well. */
static uint8_t signal_of(uint32_t mask) {
    static const struct {
        uint32_t bit;
        uint8_t cause;
    } order[] = {{FCDP_STALE_MISSING, FCDP_CAUSE_SIGNAL_MISSING},
                 {FCDP_STALE_NEW, FCDP_CAUSE_SIGNAL_NEW},
                 {FCDP_STALE_IDENTITY, FCDP_CAUSE_SIGNAL_IDENTITY},
                 {FCDP_STALE_OPTIMIZER, FCDP_CAUSE_SIGNAL_OPTIMIZER},
                 {FCDP_STALE_VERSION, FCDP_CAUSE_SIGNAL_VERSION},
                 {FCDP_STALE_FINGERPRINT, FCDP_CAUSE_SIGNAL_FINGERPRINT},
                 {FCDP_STALE_GRAD_MODE, FCDP_CAUSE_SIGNAL_GRAD_MODE},
                 {FCDP_STALE_REDUCED, FCDP_CAUSE_SIGNAL_REDUCED}};
    for (size_t i = 0; i < sizeof order / sizeof *order; i++)
        if (mask & order[i].bit) return order[i].cause;
    return FCDP_CAUSE_SIGNAL_PEER;
}

void fcdp__group_trace_stale(const fcdp_group *group) {
    uint64_t n = 0, first = 0, bytes = 0;
    uint32_t mask = 0;
    if (!fcdp__trace_is_on(1)) return;
    for (uint32_t i = 0; i < group->layout->n_extents; i++) {
        if (!group->stale[i]) continue;
        if (n++ == 0) first = i;
        mask |= group->votes[i];
        bytes += group->layout->extents[i].shard_bytes;
    }
    if (n == 0) return;
    fcdp__trace(&(fcdp_trace_event){.kind = FCDP_EVENT_STALE,
                                    .cause = signal_of(mask),
                                    .object = fcdp__group_object(group),
                                    .bytes = bytes,
                                    .a = first | n << 32,
                                    .b = mask});
}

void fcdp__group_trace_reshard(const fcdp_group *group, uint8_t cause) {
    fcdp__trace(&(fcdp_trace_event){.kind = FCDP_EVENT_RESHARD,
                                    .cause = cause,
                                    .object = fcdp__group_object(group),
                                    .bytes = group->layout->bytes});
}

void fcdp__group_trace_cache(const fcdp_group *group, uint16_t kind, uint64_t start_ns, size_t bytes,
                             fcdp_status status) {
    unsigned counter = status                          ? FCDP_COUNT_CACHE_FAILURES
                       : kind == FCDP_EVENT_CACHE_READ ? FCDP_COUNT_CACHE_READ_BYTES
                                                       : FCDP_COUNT_CACHE_WRITTEN_BYTES;
    fcdp__count(&group->comm->engine->counts, counter, status ? 1 : bytes);
    fcdp__trace_since(start_ns, (fcdp_trace_event){.kind = kind,
                                                   .object = fcdp__group_object(group),
                                                   .bytes = bytes,
                                                   .a = status != FCDP_OK});
}

void fcdp__group_trace_host_wait(const fcdp_group *group, uint64_t start_ns, uint64_t ns) {
    fcdp__trace(&(fcdp_trace_event){.kind = FCDP_EVENT_HOST_WAIT,
                                    .cause = FCDP_CAUSE_FOR_COMPUTE,
                                    .object = fcdp__group_object(group),
                                    .time_ns = start_ns,
                                    .duration_ns = ns,
                                    .bytes = group->layout->bytes});
}

fcdp_status fcdp__group_trace_stall(const fcdp_group *group, fcdp_stream stream, fcdp_event event) {
    const fcdp_engine *engine = group->comm->engine;
    fcdp_trace_spans *spans = fcdp__tiering_spans(engine->tiering);
    fcdp_trace_span span = fcdp__trace_span_begin(spans, stream, FCDP_TRACK_COMPUTE);
    fcdp_status status = fcdp__driver_stream_wait(engine->drv, stream, event);
    if (status) {
        fcdp__trace_span_drop(spans, span);
        return status;
    }
    fcdp_trace_event stall = {
        .kind = FCDP_EVENT_STALL, .object = fcdp__group_object(group), .bytes = group->layout->bytes};
    fcdp__trace_span_end_counted(spans, span, stream, &stall, FCDP_COUNT_STALLS, FCDP_COUNT_STALL_NS);
    return FCDP_OK;
}

void fcdp__host_wait_trace(uint64_t start_ns, uint8_t cause) {
    fcdp__trace_since(start_ns, (fcdp_trace_event){.kind = FCDP_EVENT_HOST_WAIT, .cause = cause});
}
