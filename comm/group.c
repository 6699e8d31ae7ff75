/* group.c - one parameter group, from creation to destruction.
 *
 * A group comes to be in two steps, since its ranks must lay out the same host memory: each rank makes the
 * group, then the node's leader takes a block and all attach to it. The region and the events between its
 * streams are made then, and not in a training step.
 *
 * Destruction waits for the group's operations while the monitor still watches them. What a group does in
 * between is in vote.c, unshard.c and use.c.
 */
#include "comm/group.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "comm/copy.h"
#include "comm/internal.h"
#include "comm/trace.h"
#include "tiering/policy.h"

static void group_free(fcdp_group *group) {
    fcdp_event *const events[] = {&group->written, &group->crossed, &group->restored, &group->gathered};
    for (size_t i = 0; i < sizeof events / sizeof *events; i++)
        if (*events[i]) fcdp__driver_event_destroy(group->comm->engine->drv, *events[i]);
    fcdp__fingerprints_destroy(group->reads);
    fcdp__copy_free(group);
    fcdp__validity_destroy(group->validity);
    for (uint32_t i = 0; group->extent_names && i < group->layout->n_extents; i++)
        free(group->extent_names[i]);
    fcdp__layout_destroy(group->layout);
    fcdp__sight_free(&group->sight);
    free(group->extent_names);
    free(group->inputs);
    free(group->element_bytes);
    free(group->numbers);
    free(group->stale);
    free(group->votes);
    free(group->read_pieces);
    fcdp__own_group_free(&group->own, group->comm->engine->drv);
    free(group->name);
    free(group);
}

/* An optimizer on the host waits for `crossed`, when its shards have been read: that event lets it sleep. */
static fcdp_status group_make(fcdp_group *group, const char *name, const fcdp_extent_spec *specs,
                              uint32_t n_extents) {
    const fcdp_topology *topology = &group->comm->topology;
    group->name = strdup(name);
    group->element_bytes = calloc(n_extents + 1, 1);
    group->numbers = calloc(n_extents + 1, 1);
    group->stale = calloc(n_extents + 1, 1);
    group->votes = calloc(n_extents + 1, 1);
    group->read_pieces = calloc(n_extents + 1, sizeof *group->read_pieces);
    group->inputs = calloc(n_extents + 1, sizeof *group->inputs);
    group->missing = n_extents;
    group->not_on_device = true;
    if (!group->name || !group->element_bytes || !group->numbers || !group->stale || !group->votes ||
        !group->read_pieces || !group->inputs)
        return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for the group '%s'", name);
    fcdp_status status = fcdp__layout_create(specs, n_extents, topology->n_ranks, topology->node_size,
                                             &group->layout);
    if (!status && group->layout->bytes == 0)
        status = fcdp__fail(FCDP_ERR_UNSUPPORTED, "'%s' has no bytes to gather", name);
    if (!status) status = fcdp__validity_create(n_extents, &group->validity);
    if (!status) status = fcdp__sight_init(&group->sight, n_extents);
    fcdp_event *const events[] = {&group->written, &group->crossed, &group->restored, &group->gathered};
    for (size_t i = 0; i < sizeof events / sizeof *events && !status; i++) {
        fcdp_driver *drv = group->comm->engine->drv;
        status = events[i] == &group->crossed ? fcdp__driver_event_create_blocking(drv, events[i])
                                              : fcdp__driver_event_create(drv, events[i]);
        if (status) *events[i] = NULL;
    }
    return status;
}

fcdp_status fcdp_group_create(fcdp_comm *comm, const char *name, const fcdp_extent_spec *specs,
                              uint32_t n_extents, fcdp_group **group_out) {
    fcdp_engine *engine = comm->engine;
    fcdp_status status = fcdp__engine_check_process(engine, name);
    if (status) return status;
    fcdp_group *group = calloc(1, sizeof *group);
    if (!group) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for the group '%s'", name);
    static _Atomic uint64_t n_groups;
    group->comm = comm;
    group->counts.whole = &engine->counts;
    group->id = 1 + atomic_fetch_add_explicit(&n_groups, 1, memory_order_relaxed);
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

/* Its gathers have ended, and no thread finds it any more: those that wait for them go on. (Where groups were
 * gathered together, the event may be that of a later gather, which ends as well.) */
static void waiters_end(fcdp_group *group) {
    const struct timespec pause = {.tv_nsec = 1000000};
    for (bool wait = true; wait;) {
        fcdp__lock_acquire(&group->comm->engine->lock);
        wait = group->n_waiters > 0;
        fcdp__lock_release(&group->comm->engine->lock);
        if (wait) (void)nanosleep(&pause, NULL);
    }
}

/* It is waited for while the monitor still knows it, so that a wait for a peer that is gone ends. With the
 * last group of all shard groups the pages of the staging buffer and of own bases go. */
void fcdp_group_destroy(fcdp_group *group) {
    if (!group || group->comm->engine->pid != getpid()) return;
    fcdp_comm *comm = group->comm;
    fcdp_engine *engine = comm->engine;
    if (group->begun && fcdp__group_cancel(group)) fcdp__log(FCDP_LOG_DEBUG, "%s", fcdp_error_text());
    fcdp__frozen_forget(group);
    if (group->region && fcdp__region_drain(group->region))
        fcdp__log(FCDP_LOG_DEBUG, "%s", fcdp_error_text());
    fcdp__delta_forget(group);
    fcdp__tree_remove(group);
    fcdp__trees_forget(group);
    fcdp__lock_acquire(&engine->lock);
    fcdp_group **link = &comm->groups;
    while (*link != group) link = &(*link)->next;
    *link = group->next;
    bool is_last = true;
    for (const fcdp_comm *other = engine->comms; other; other = other->next)
        is_last = is_last && !other->groups;
    fcdp__lock_release(&engine->lock);
    waiters_end(group);
    fcdp__segv_unwatch(group->watch);
    fcdp__region_destroy(group->region);
    if (group->block) fcdp__host_detach(group->block);
    if (group->owns_block) fcdp__host_block_free(comm->host, group->offset);
    group_free(group);
    for (fcdp_stream_set *set = is_last ? engine->sets : NULL; set; set = set->next) {
        fcdp__staging_trim(set);
        fcdp__own_bases_trim(set);
    }
}

void fcdp_group_set_tier(fcdp_group *group, fcdp_tier tier) {
    FCDP_CHECK(1, !group->region);
    group->tier = tier;
}

fcdp_status fcdp_groups_host_order(fcdp_group *const *groups, const uint8_t *stays, uint32_t n,
                                   uint32_t *order_out, uint32_t *n_memory_out, uint32_t *n_file_out) {
    fcdp_host_claim *claims = calloc((size_t)n + 1, sizeof *claims);
    if (!claims) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory to order %u groups", n);
    for (uint32_t i = 0; i < n; i++)
        claims[i] = (fcdp_host_claim){.bytes = groups[i]->layout->bytes,
                                      .frozen_bytes = groups[i]->layout->span[FCDP_SPAN_FROZEN].bytes,
                                      .stays = stays[i],
                                      .index = i,
                                      .tier = groups[i]->tier};
    fcdp__policy_host_order(claims, n);
    uint32_t n_file = 0, n_gathered = 0;
    for (uint32_t i = 0; i < n; i++) {
        order_out[i] = claims[i].index;
        n_file += claims[i].tier == FCDP_TIER_FILE;
        n_gathered += claims[i].tier == FCDP_TIER_GATHER;
    }
    *n_memory_out = n - n_file - n_gathered;
    *n_file_out = n_file;
    free(claims);
    return FCDP_OK;
}

fcdp_status fcdp_group_host_alloc(fcdp_group *group, uint64_t *offset_out) {
    fcdp_comm *comm = group->comm;
    fcdp_status status = fcdp__engine_check_process(comm->engine, group->name);
    if (status) return status;
    if (!comm->host || comm->topology.local != 0 || group->owns_block)
        return fcdp__fail(FCDP_ERR_INVALID,
                          "'%s': only local rank 0 takes host memory for it, once, after it has created it",
                          group->name);
    status = fcdp__host_block_alloc(comm->host, group->layout->bytes, &group->offset);
    if (status) return fcdp__fail(status, "host memory for '%s': %s", group->name, fcdp_error_text());
    group->owns_block = true;
    *offset_out = group->offset;
    return FCDP_OK;
}

/* By slices a rank copies its own to host memory. What may be gathered with other small groups, it copies
 * shard by shard as well, all over the span. */
fcdp_status fcdp_group_attach(fcdp_group *group, uint64_t offset) {
    fcdp_comm *comm = group->comm;
    fcdp_status status = fcdp__engine_check_process(comm->engine, group->name);
    if (status) return status;
    if (!comm->host || group->region)
        return fcdp__fail(FCDP_ERR_INVALID, "'%s': attach once, after the shard group has its host memory",
                          group->name);
    fcdp_host_block *block;
    fcdp_region *region;
    fcdp_host_share share = {0};
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
        size_t bytes = 0; /* of parameters: a span's end may be padded */
        for (uint32_t i = 0; i < group->layout->n_extents; i++)
            if (group->layout->extents[i].span == s) bytes += fcdp__layout_extent_bytes(group->layout, i);
        bool is_small = bytes <= comm->engine->options.coalesce_bytes;
        share.own[s] = fcdp__layout_slice(group->layout, s, comm->topology.local);
        share.copied[s] = fcdp__group_by_slice(group) && !is_small ? share.own[s] : group->layout->span[s];
    }
    status = fcdp__host_attach(comm->host, offset, group->layout->bytes, &share, &block);
    if (status) return fcdp__fail(status, "host memory for '%s': %s", group->name, fcdp_error_text());
    status = fcdp__region_create(comm->engine->tiering, group->name, group->layout, comm->topology.local,
                                 block, &region);
    if (status) {
        fcdp__host_detach(block);
        return status;
    }
    fcdp__region_set_streams(region, comm->set->copies);
    fcdp__region_set_tier(region, group->tier);
    fcdp__lock_acquire(&comm->engine->lock); /* the monitor looks at them */
    group->block = block;
    group->region = region;
    fcdp__lock_release(&comm->engine->lock);
    fcdp__group_trace_attach(group);
    return FCDP_OK;
}

fcdp_status fcdp_group_map_host(fcdp_group *group) {
    const fcdp_engine *engine = group->comm->engine;
    fcdp_status status = fcdp__engine_check_process(engine, group->name);
    if (!status) status = fcdp__engine_check_maps(engine);
    if (status) return status;
    if (!group->region || fcdp__group_is_spilled(group))
        return fcdp__fail(
            FCDP_ERR_UNSUPPORTED,
            "'%s' has no copy in the node's host memory that could be mapped: it is in a file, or "
            "gathered at each use",
            fcdp__name_text(group->name));
    status = fcdp__region_map_host(group->region, engine->account, engine->numa.memory_node);
    if (status) return status;
    group->unmapped_tier = group->tier;
    group->tier = FCDP_TIER_MAPPED;
    fcdp__group_trace_lives(group);
    return FCDP_OK;
}

fcdp_status fcdp_group_unmap_host(fcdp_group *group) {
    fcdp_status status = fcdp__engine_check_process(group->comm->engine, group->name);
    if (!status && group->tier != FCDP_TIER_MAPPED)
        status = fcdp__fail(FCDP_ERR_INVALID, "'%s' is not mapped onto host memory", group->name);
    if (!status) status = fcdp__region_unmap_host(group->region, group->unmapped_tier);
    if (status) return status;
    group->tier = group->unmapped_tier;
    fcdp__group_trace_lives(group);
    return FCDP_OK;
}

fcdp_dptr fcdp_group_extent(const fcdp_group *group, uint32_t i) {
    FCDP_CHECK(1, group->region && i < group->layout->n_extents);
    return fcdp__dptr_add(fcdp__region_base(group->region), group->layout->extents[i].offset_bytes);
}

fcdp_status fcdp_group_watch(fcdp_group *group, const char *const *names, uint32_t n_names) {
    const fcdp_layout *layout = group->layout;
    fcdp_status status = fcdp__engine_check_process(group->comm->engine, group->name);
    if (status) return status;
    if (!group->region || group->watch || n_names != layout->n_extents)
        return fcdp__fail(FCDP_ERR_INVALID, "'%s': watch once, after it is attached, %u parameters, not %u",
                          group->name, layout->n_extents, n_names);
    fcdp_segv_part *parts = malloc((layout->n_extents + 1) * sizeof *parts);
    if (!parts) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory to name the parameters of '%s'", group->name);
    for (uint32_t i = 0; i < layout->n_extents; i++)
        parts[i] = (fcdp_segv_part){layout->extents[i].offset_bytes, fcdp__layout_extent_bytes(layout, i),
                                    names[i]};
    status = fcdp__segv_watch(fcdp__region_base(group->region), layout->bytes, fcdp__name_text(group->name),
                              parts, layout->n_extents, &group->watch);
    free(parts);
    return status;
}

fcdp_status fcdp_group_name_extents(fcdp_group *group, const char *const *names) {
    uint32_t n = group->layout->n_extents;
    if (!group->extent_names) group->extent_names = calloc(n + 1, sizeof *group->extent_names);
    for (uint32_t i = 0; group->extent_names && i < n; i++) {
        free(group->extent_names[i]);
        group->extent_names[i] = strdup(names[i]);
        if (!group->extent_names[i])
            return fcdp__fail(FCDP_ERR_SYSTEM, "no memory to name the parameters of '%s'", group->name);
    }
    return group->extent_names
               ? FCDP_OK
               : fcdp__fail(FCDP_ERR_SYSTEM, "no memory to name the parameters of '%s'", group->name);
}

void fcdp_group_set_element_bytes(fcdp_group *group, const uint8_t *element_bytes) {
    memcpy(group->element_bytes, element_bytes, group->layout->n_extents);
}

void fcdp_group_set_numbers(fcdp_group *group, const uint8_t *numbers) {
    for (uint32_t i = 0; i < group->layout->n_extents; i++) {
        bool frozen = group->layout->extents[i].span == FCDP_SPAN_FROZEN;
        group->numbers[i] = frozen ? FCDP_NUMBER_OTHER : numbers[i];
    }
}

void fcdp_group_set_owner(fcdp_group *group, void *owner) {
    group->owner = owner;
}

void *fcdp_group_owner(const fcdp_group *group) {
    return group->owner;
}

uint64_t fcdp_group_id(const fcdp_group *group) {
    return group->id;
}

uint32_t fcdp_group_n_extents(const fcdp_group *group) {
    return group->layout->n_extents;
}

/* "mixed": its spans are not all in the same place. */
void fcdp_group_stats_get(fcdp_group *group, fcdp_group_stats *stats_out) {
    *stats_out = (fcdp_group_stats){
        .name = group->name,
        .bytes = group->layout->bytes,
        .trainable_bytes = group->layout->span[FCDP_SPAN_TRAINABLE].bytes,
        .in_file = fcdp__group_is_spilled(group),
        .on_disk = atomic_load_explicit(&group->frozen.on_disk, memory_order_relaxed),
        .tier = group->tier,
        .state = "invalid"};
    if (group->comm->engine->pid != getpid()) return;
    stats_out->gathers = fcdp__gathers_counted(&group->counts);
    stats_out->plain_bytes = group->counts.n[FCDP_COUNT_SAVED_PLAIN_BYTES];
    stats_out->gather_bytes = group->counts.n[FCDP_COUNT_SAVED_GATHER_BYTES];
    if (!group->region) return;
    enum { ON_DEVICE, ON_HOST, NOWHERE, N_PLACES };
    const char *const names[] = {group->tier == FCDP_TIER_MAPPED ? "mapped" : "device",
                                 fcdp__group_is_spilled(group) ? "file" : "host", "invalid"};
    uint32_t n_spans = 0, n_in[N_PLACES] = {0};
    fcdp_region_state state;
    fcdp__region_state(group->region, &state);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
        if (group->layout->span[s].bytes == 0) continue;
        bool on_host = state.span[s].stored || state.span[s].whole;
        n_in[state.span[s].on_device ? ON_DEVICE : on_host ? ON_HOST : NOWHERE]++;
        n_spans++;
    }
    stats_out->state = "mixed";
    for (int place = 0; place < N_PLACES; place++)
        if (n_in[place] == n_spans) stats_out->state = names[place];
}
