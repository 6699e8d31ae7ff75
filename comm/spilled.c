/* spilled.c - what a spilled group's ranks do before they count on their files. */
#include "comm/spilled.h"

#include <stdio.h>

#include "comm/internal.h"
#include "comm/moves.h"
#include "comm/trace.h"

/* One that is loaded, one that is stored, and one that is written. */
enum { BUFFERS_BESIDE_PREFETCH = 3 };

bool fcdp__group_is_spilled(const fcdp_group *group) {
    return group->region && fcdp__region_is_spilled(group->region);
}

/* Spans that have a fresh extent. */
static uint32_t restore_mask(const fcdp_group *group) {
    uint32_t mask = 0;
    for (uint32_t i = 0; i < group->layout->n_extents; i++)
        if (!group->stale[i] && group->layout->extents[i].shard_bytes)
            mask |= 1u << group->layout->extents[i].span;
    return mask;
}

bool fcdp__group_needs_file(const fcdp_group *group) {
    return fcdp__group_is_spilled(group) && !fcdp_group_has_begun(group) && restore_mask(group);
}

fcdp_status fcdp__spilled_fetch(fcdp_group *group, const fcdp_program *program) {
    if (!fcdp__group_needs_file(group)) return FCDP_OK;
    uint8_t lost[FCDP_N_SPANS] = {0};
    uint32_t mask = restore_mask(group);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (mask & 1u << s) lost[s] = !fcdp__region_fetch(group->region, s);
    fcdp_status status = program->agree(program->ctx, &group, 1, lost, FCDP_N_SPANS);
    if (status) { /* an earlier failure says more */
        fcdp_failure failure = fcdp__failure_keep(status);
        fcdp_status earlier = fcdp_engine_check(group->comm->engine);
        return earlier ? earlier : fcdp__failure_restore(&failure);
    }
    bool any = false;
    for (uint32_t i = 0; i < group->layout->n_extents; i++) {
        if (!lost[group->layout->extents[i].span]) continue;
        group->votes[i] |= FCDP_STALE_NEW;
        group->stale[i] |= FCDP_STALE_NEW;
        any = true;
    }
    if (any) fcdp__group_trace_stale(group);
    return FCDP_OK;
}

void fcdp__spilled_open(fcdp_engine *engine) {
    const fcdp_options *options = &engine->options;
    if (!options->spill_dir[0]) return;
    /* a disk is waited for for longer than a peer, whose failure says more */
    fcdp_spill_config config = {.n_buffers = (uint32_t)options->prefetch + BUFFERS_BESIDE_PREFETCH,
                                .timeout_s = 2 * options->timeout_s,
                                .counts = &engine->counts};
    fcdp_status status = fcdp__spill_open(engine->drv, options->spill_dir, &config, &engine->spill);
    if (status)
        snprintf(engine->spill_lacks, sizeof engine->spill_lacks, "%s", fcdp_error_text());
    else if (fcdp__spill_lacks(engine->spill)[0])
        snprintf(engine->spill_lacks, sizeof engine->spill_lacks, "FCDP_SPILL_DIR=%s: %s", options->spill_dir,
                 fcdp__spill_lacks(engine->spill));
}

void fcdp__spilled_warn(const fcdp_comm *comm) {
    fcdp_engine *engine = comm->engine;
    if (comm->topology.local == 0 && engine->spill_lacks[0] && !engine->spill_warned)
        fcdp__log(FCDP_LOG_WARN, "%s", engine->spill_lacks);
    engine->spill_warned = true;
}

fcdp_status fcdp_group_attach_file(fcdp_group *group) {
    fcdp_comm *comm = group->comm;
    fcdp_engine *engine = comm->engine;
    fcdp_status status = fcdp__engine_check_process(engine, group->name);
    if (status) return status;
    if (group->region) return fcdp__fail(FCDP_ERR_INVALID, "'%s': attach once", group->name);
    if (!engine->spill)
        return fcdp__fail(FCDP_ERR_UNSUPPORTED, "%s",
                          engine->spill_lacks[0] ? engine->spill_lacks : "FCDP_SPILL_DIR is not set");
    if (engine->options.pin == FCDP_PIN_NEVER)
        return fcdp__fail(
            FCDP_ERR_UNSUPPORTED,
            "'%s': FCDP_SPILL_DIR needs page-locked memory, and FCDP_PIN is never; unset FCDP_PIN",
            group->name);
    if (comm->topology.node_size > 1 && !fcdp__comm_may_slice(comm))
        return fcdp__fail(
            FCDP_ERR_UNSUPPORTED,
            "'%s': over gloo the ranks of a node meet in host memory, so FCDP_SPILL_DIR does not serve; "
            "it does over NCCL, and with one rank on a node",
            group->name);
    fcdp_region *region;
    status = fcdp__region_create_spilled(engine->tiering, group->name, group->layout, comm->topology.local,
                                         engine->spill, &region);
    if (status) return status;
    fcdp__region_set_streams(region, comm->set->copies);
    fcdp__lock_acquire(&engine->lock); /* the monitor looks at it */
    group->region = region;
    fcdp__lock_release(&engine->lock);
    fcdp__group_trace_attach(group);
    return FCDP_OK;
}
