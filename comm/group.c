/* group.c - groups and trees: their life, what is stale of them, what the ranks agreed on. */
#include "comm/group.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm/internal.h"

/* ---- trees ---- */

fcdp_status fcdp_tree_create(fcdp_comm *comm, fcdp_tree **tree_out) {
    fcdp_tree *tree = calloc(1, sizeof *tree);
    if (!tree) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a tree");
    tree->comm = comm;
    fcdp__agreement_init(&tree->agreement);
    *tree_out = tree;
    return FCDP_OK;
}

/* Those that nobody follows any more have no successor. */
static void members_leave(fcdp_comm *comm, const fcdp_agreement *agreement, fcdp_member *only) {
    fcdp__lock_acquire(&comm->engine->lock);
    for (fcdp_group *group = comm->groups; group; group = group->next) {
        if (group->member.agreement != agreement) continue;
        if (!only || &group->member == only)
            fcdp__member_leave(&group->member);
        else if (group->member.next == only)
            group->member.next = NULL;
    }
    fcdp__lock_release(&comm->engine->lock);
}

void fcdp_tree_destroy(fcdp_tree *tree) {
    if (!tree) return;
    if (tree->comm->engine->pid == getpid()) members_leave(tree->comm, &tree->agreement, NULL);
    free(tree);
}

void fcdp_tree_begin_forward(fcdp_tree *tree) {
    fcdp__agreement_begin_forward(&tree->agreement);
}

void fcdp_tree_begin_backward(fcdp_tree *tree) {
    fcdp__agreement_begin_backward(&tree->agreement);
}

void fcdp_tree_agreed(fcdp_tree *tree) {
    fcdp__agreement_agreed(&tree->agreement);
}

/* ---- groups ---- */

static void group_free(fcdp_group *group) {
    fcdp_event *const events[] = {&group->written, &group->crossed, &group->restored, &group->gathered};
    for (size_t i = 0; i < sizeof events / sizeof *events; i++)
        if (*events[i]) fcdp__driver_event_destroy(group->comm->engine->drv, *events[i]);
    fcdp__validity_destroy(group->validity);
    fcdp__layout_destroy(group->layout);
    free(group->stale);
    free(group->name);
    free(group);
}

/* A step on the host waits for what was read, by `crossed`. */
static fcdp_status events_make(fcdp_group *group) {
    fcdp_driver *drv = group->comm->engine->drv;
    fcdp_event *const events[] = {&group->written, &group->crossed, &group->restored, &group->gathered};
    fcdp_status status = FCDP_OK;
    for (size_t i = 0; i < sizeof events / sizeof *events && !status; i++) {
        bool host_waits = events[i] == &group->crossed;
        status = host_waits ? fcdp__driver_event_create_blocking(drv, events[i])
                            : fcdp__driver_event_create(drv, events[i]);
        if (status) *events[i] = NULL;
    }
    return status;
}

static fcdp_status group_make(fcdp_group *group, const char *name, const fcdp_extent_spec *specs,
                              uint32_t n_extents) {
    const fcdp_topology *topology = &group->comm->topology;
    group->name = strdup(name);
    group->stale = calloc(n_extents + 1, 1);
    group->lacks = true;
    if (!group->name || !group->stale)
        return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for the group '%s'", name);
    fcdp_status status = fcdp__layout_create(specs, n_extents, topology->n_ranks, topology->node_size,
                                             &group->layout);
    if (!status && group->layout->bytes == 0)
        status = fcdp__fail(FCDP_ERR_UNSUPPORTED, "'%s' has no bytes to gather", name);
    if (!status) status = fcdp__validity_create(n_extents, &group->validity);
    return status ? status : events_make(group);
}

fcdp_status fcdp_group_create(fcdp_comm *comm, const char *name, const fcdp_extent_spec *specs,
                              uint32_t n_extents, fcdp_group **group_out) {
    fcdp_engine *engine = comm->engine;
    fcdp_status status = fcdp__engine_check_process(engine, name);
    if (status) return status;
    fcdp_group *group = calloc(1, sizeof *group);
    if (!group) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for the group '%s'", name);
    group->comm = comm;
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

/* Nobody finds the group any more: the monitor neither. */
static void group_unlink(fcdp_group *group) {
    fcdp_comm *comm = group->comm;
    members_leave(comm, group->member.agreement, &group->member);
    fcdp__lock_acquire(&comm->engine->lock);
    fcdp_group **link = &comm->groups;
    while (*link != group) link = &(*link)->next;
    *link = group->next;
    fcdp__lock_release(&comm->engine->lock);
}

/* While the monitor still knows it, so that a wait for a peer that is gone ends. */
static void group_await(fcdp_group *group) {
    if (group->begun && fcdp__group_cancel(group)) fcdp__log(FCDP_LOG_DEBUG, "%s", fcdp_error_text());
    if (fcdp__region_drain(group->region)) fcdp__log(FCDP_LOG_DEBUG, "%s", fcdp_error_text());
}

/* Is no group left in any shard group? */
static bool has_no_groups(fcdp_engine *engine) {
    bool none = true;
    fcdp__lock_acquire(&engine->lock);
    for (fcdp_comm *comm = engine->comms; comm; comm = comm->next) none = none && !comm->groups;
    fcdp__lock_release(&engine->lock);
    return none;
}

void fcdp_group_destroy(fcdp_group *group) {
    if (!group || group->comm->engine->pid != getpid()) return;
    if (group->region) group_await(group);
    group_unlink(group);
    fcdp__segv_unwatch(group->watch);
    fcdp__region_destroy(group->region);
    if (group->block) fcdp__host_detach(group->block);
    if (group->owns_block) fcdp__host_block_free(group->comm->host, group->offset);
    fcdp_engine *engine = group->comm->engine;
    group_free(group);
    if (has_no_groups(engine)) fcdp__staging_drop(engine);
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

/* Bytes of parameters; a span's end may be padded. */
static size_t span_bytes(const fcdp_layout *layout, uint32_t s) {
    size_t bytes = 0;
    for (uint32_t i = 0; i < layout->n_extents; i++)
        if (layout->extents[i].span == s) bytes += layout->n_shards * layout->extents[i].shard_bytes;
    return bytes;
}

/* By slices a rank copies its own. What may cross with other small groups, it copies shard
 * by shard as well, all over the span. */
static fcdp_host_share host_share(const fcdp_group *group) {
    fcdp_host_share share = {0};
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
        fcdp_piece span = group->layout->span[s];
        bool is_small = span_bytes(group->layout, s) <= group->comm->engine->options.coalesce_bytes;
        share.own[s] = fcdp__layout_slice(group->layout, s, group->comm->topology.local);
        share.copied[s] = fcdp__group_by_slice(group) && !is_small ? share.own[s] : span;
    }
    return share;
}

fcdp_status fcdp_group_attach(fcdp_group *group, uint64_t offset) {
    fcdp_comm *comm = group->comm;
    fcdp_status status = fcdp__engine_check_process(comm->engine, group->name);
    if (status) return status;
    if (!comm->host || group->region)
        return fcdp__fail(FCDP_ERR_INVALID, "'%s': attach once, after the shard group has its host memory",
                          group->name);
    fcdp_host_block *block;
    fcdp_region *region;
    fcdp_host_share share = host_share(group);
    status = fcdp__host_attach(comm->host, offset, group->layout->bytes, &share, &block);
    if (status) return fcdp__fail(status, "host memory for '%s': %s", group->name, fcdp_error_text());
    status = fcdp__region_create(comm->engine->tiering, group->name, group->layout, comm->topology.local,
                                 block, &region);
    if (status) {
        fcdp__host_detach(block);
        return status;
    }
    fcdp__lock_acquire(&comm->engine->lock); /* the monitor looks at them */
    group->block = block;
    group->region = region;
    fcdp__lock_release(&comm->engine->lock);
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
        parts[i] = (fcdp_segv_part){layout->extents[i].offset_bytes,
                                    layout->n_shards * layout->extents[i].shard_bytes, names[i]};
    status = fcdp__segv_watch(fcdp__region_base(group->region), layout->bytes,
                              group->name[0] ? group->name : "the root", parts, layout->n_extents,
                              &group->watch);
    free(parts);
    return status;
}

uint32_t fcdp_group_n_extents(const fcdp_group *group) {
    return group->layout->n_extents;
}

/* ---- agreement ---- */

void fcdp_group_join(fcdp_group *group, fcdp_tree *tree) {
    if (group->member.agreement == &tree->agreement) return;
    if (group->member.agreement) members_leave(group->comm, group->member.agreement, &group->member);
    fcdp__member_join(&group->member, &tree->agreement);
}

fcdp_question fcdp_group_question(const fcdp_group *group, bool by_hand) {
    return fcdp__member_question(&group->member, by_hand,
                                 group->comm->engine->options.agree == FCDP_AGREE_UNSHARD);
}

void fcdp_group_ask_again(fcdp_group *group) {
    fcdp__member_ask_again(&group->member);
}

/* Does every span that has bytes lie on this rank's device? */
static bool is_on_device(fcdp_group *group) {
    fcdp_region_state state;
    fcdp__region_state(group->region, &state);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (group->layout->span[s].bytes && !state.span[s].on_device) return false;
    return true;
}

/* Of extent i, NULL: none. */
static const uint64_t *fingerprint_of(const fcdp_evidence *evidence, uint32_t i, uint64_t *own) {
    if (evidence->fingerprints) return &evidence->fingerprints[i];
    if (!evidence->shards[i]) return NULL;
    *own = fcdp__content_of_bytes(evidence->shards[i], evidence->shard_bytes[i]);
    return own;
}

fcdp_status fcdp_group_vote(fcdp_group *group, const fcdp_evidence *evidence, const fcdp_scene *scene,
                            uint8_t *vote_out) {
    uint32_t n = group->layout->n_extents;
    fcdp_status status = group->member.ahead ? fcdp__group_cancel(group) : FCDP_OK;
    if (status) return status;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t own;
        vote_out[i] = (uint8_t)fcdp__validity_observe(group->validity, i, &evidence->signals[i], scene,
                                                      fingerprint_of(evidence, i, &own));
    }
    vote_out[n] = !is_on_device(group);
    return FCDP_OK;
}

void fcdp_group_agree(fcdp_group *group, const uint8_t *agreed) {
    memcpy(group->stale, agreed, group->layout->n_extents);
    group->lacks = agreed[group->layout->n_extents];
    fcdp__member_agreed(&group->member);
}

void fcdp_group_confirm(fcdp_group *group, const fcdp_signals *signals) {
    for (uint32_t i = 0; i < group->layout->n_extents; i++)
        if (group->stale[i]) fcdp__validity_confirm(group->validity, i, &signals[i]);
}

/* What this pass has gathered, or begins to reuse, must be what the ranks saw when they agreed. What is
 * agreed stale and has not begun is read when it does: it may still change. */
uint32_t fcdp_group_audit(fcdp_group *group, const fcdp_evidence *evidence) {
    uint32_t n = group->layout->n_extents;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t own;
        if (group->stale[i]) continue;
        if (fcdp__validity_moved(group->validity, i, &evidence->signals[i],
                                 fingerprint_of(evidence, i, &own)))
            return i;
    }
    return n;
}

void fcdp_group_stale(const fcdp_group *group, uint8_t *stale_out) {
    memcpy(stale_out, group->stale, group->layout->n_extents);
}

size_t fcdp_group_unsharded(fcdp_group *group, bool forward, fcdp_group **ahead_out, size_t n) {
    enum { MAX_AHEAD = 8 };
    const fcdp_options *options = &group->comm->engine->options;
    fcdp_member *ahead[MAX_AHEAD];
    fcdp__member_unsharded(&group->member, forward);
    if (!forward || options->agree == FCDP_AGREE_UNSHARD || options->prefetch <= 0) return 0;
    if (n > MAX_AHEAD) n = MAX_AHEAD;
    size_t depth = (size_t)options->prefetch < n ? (size_t)options->prefetch : n;
    size_t n_ahead = fcdp__member_ahead(&group->member, depth, ahead);
    for (size_t i = 0; i < n_ahead; i++)
        ahead_out[i] = (fcdp_group *)(void *)((char *)ahead[i] - offsetof(fcdp_group, member));
    return n_ahead;
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
        else if (state.span[s].stored || state.span[s].whole)
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
    if (engine->pid != getpid()) return;
    fcdp__lock_acquire(&engine->lock);
    stats_out->gathers_made = group->gathers_made;
    stats_out->gathers_avoided = group->gathers_avoided;
    stats_out->gathers_forward = group->gathers_forward;
    stats_out->gathers_backward = group->gathers_backward;
    fcdp__lock_release(&engine->lock);
    stats_out->state = group_state(group);
}
