/* clang-format off */
/* restore.c - a region between the device and the host tier: release by policy, ballots, restore.
 *
 * What a rank did at release q is its own decision, its vote says which:
 *     kept        the region stayed on the device (the reclaimer may have taken its pages since, without asking anyone: it
 *                 then wrote what the host lacked of it)
 *     released    this rank's slice is on the host, the pages are gone
 *     void        the copy is worthless (written to, or a failure)
 * and for a node of more than one rank a restore goes by the votes of all and by what this rank's own region is now:
 *
 *     votes of the node   this rank now        FCDP_RESTORE=slice                  FCDP_RESTORE=whole
 *     ----------------------------------------------------------------------------------------------------------------
 *     all kept            on the device        nothing                             nothing
 *     all kept            kept, then evicted   H2D of the whole span, alone        H2D of the whole span, alone
 *     some released       released             H2D of its slice, all-gather        waits for every slice, H2D of the whole
 *     some released       on the device        all-gather, its slice in place      stores its slice, says so
 *     some released       kept, then evicted   H2D of its slice, all-gather        says so, H2D of the whole span
 *     any void            any                  fails on every rank alike, so that nobody waits in a collective
 *
 * Whether there is an all-gather depends on the votes alone, which all ranks read alike; what a rank moves before it depends on
 * its own region, which nobody else needs to know.
 *
 * A vote changes once, after the others have begun to read: kept becomes stored (whole: this rank's slice is on the host, for
 * those who released) or lost (its restore failed: do not wait for it). Both still count as kept when asking whether anybody
 * released, so that early and late readers decide alike.
 *
 * The words. Release q writes q * VOTES_PER_RELEASE + its vote to word q % 2; the restore after it reads the words of q. Between
 * two releases of a rank lies an unshard, which either waits for every peer's vote (a fresh span) or meets every peer in an
 * all-gather within the node (all stale), so nobody writes the word of q + 2 before everybody has read that of q. For the same
 * reason no rank writes host bytes of a new epoch while another still reads those of the old one.
 */
/* clang-format on */
#include <stdio.h>
#include <string.h>

#include "comm/imprint.h"
#include "tiering/policy.h"

/* In the order of a wait: from VOTE_SETTLED on nobody's slice is still to come. */
enum {
    VOTE_KEPT,
    VOTE_RELEASED,
    VOTE_STORED,
    VOTE_LOST,
    VOTE_VOID,
    VOTES_PER_RELEASE = 8,
    VOTE_SETTLED = VOTE_RELEASED
};

static fcdp_engine *engine_of(const fcdp_group *group) {
    return group->comm->engine;
}

static fcdp_board_word ballot_word(uint32_t n_releases) {
    return n_releases % 2 ? FCDP_BOARD_BALLOT_1 : FCDP_BOARD_BALLOT_0;
}

static void vote(fcdp_group *group, uint32_t n_releases, uint32_t what) {
    group->vote = what;
    if (group->comm->topology.node_size == 1) return;
    fcdp__board_publish(group->block, ballot_word(n_releases), n_releases * VOTES_PER_RELEASE + what);
}

fcdp_status fcdp__group_enter(fcdp_group *group) {
    if (group->in_use) return FCDP_OK;
    fcdp_status status = fcdp__region_begin_use(group->region);
    if (status) return status;
    group->in_use = true;
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        for (; group->owed_epochs[s] > 0; group->owed_epochs[s]--) {
            fcdp__region_filled(group->region, 1u << s);
            fcdp__region_invalidate(group->region, 1u << s);
        }
    return FCDP_OK;
}

/* The epochs of a node's ranks count fills, and say whose stored slices belong together: so a fill that
 * failed here counts too, since it may have succeeded on a peer. */
static void epochs_advance(fcdp_group *group, uint32_t filling) {
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
        if (!(filling & 1u << s)) continue;
        if (group->in_use)
            fcdp__region_filled(group->region, 1u << s);
        else
            group->owed_epochs[s]++;
    }
}

/* Void content needs no pages; but they go only once the device is known to be done with them. */
static void pages_leave(const fcdp_job *job) {
    fcdp_group *group = job->group;
    if (!group->in_use) return;
    if (fcdp__driver_stream_sync(job->engine->drv, job->engine->node_stream) ||
        fcdp__mark_await(job->engine, &job->mark))
        return;
    fcdp__region_end_use(group->region);
    group->in_use = false;
    if (fcdp__region_drop(group->region, NULL))
        fcdp__log(FCDP_LOG_WARN, "'%s' keeps device pages that it does not need: %s", group->name,
                  fcdp_error_text());
}

fcdp_status fcdp__group_void(const fcdp_job *job, uint32_t filling, fcdp_status status) {
    fcdp_group *group = job->group;
    char text[1024];
    snprintf(text, sizeof text, "%s", fcdp_error_text());
    epochs_advance(group, filling);
    fcdp__region_invalidate(group->region, FCDP_SPAN_MASK_ALL);
    pages_leave(job);
    fcdp__lock_acquire(&group->lock);
    fcdp__validity_spoil(group->validity);
    fcdp__lock_release(&group->lock);
    return fcdp__fail(status, "%s", text);
}

void fcdp__group_forsake(const fcdp_job *job) {
    if (job->after_release && job->group->vote == VOTE_KEPT) vote(job->group, job->n_releases, VOTE_LOST);
}

/* ---- release ---- */

static bool policy_keeps(fcdp_engine *engine) {
    if (engine->options.tau <= 0) return false; /* nor is anybody asked */
    size_t used_bytes = fcdp__pool_pages_in_use(engine->pool) * fcdp__driver_page_bytes(engine->drv);
    return fcdp__policy_keeps(engine->options.tau, used_bytes, fcdp__pool_room_bytes(engine->pool));
}

static void use_end(fcdp_group *group) {
    fcdp__region_end_use(group->region);
    group->in_use = false;
}

bool fcdp__group_is_dirty(const fcdp_group *group) {
    fcdp_region_state state;
    fcdp__region_state(group->region, &state);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (state.span[s].on_device && !state.span[s].slice_on_host) return true;
    return false;
}

/* The device is done with the region. `vote_out` is what to vote, whatever the status. Bytes that somebody
 * wrote to are neither kept nor stored; those of a clean region go with its pages. */
static fcdp_status release_by_policy(fcdp_job *job, uint32_t *vote_out) {
    fcdp_group *group = job->group;
    *vote_out = VOTE_VOID;
    bool keeps = policy_keeps(engine_of(group));
    if ((keeps || fcdp__group_is_dirty(group)) && !fcdp__imprint_holds(group)) return FCDP_OK;
    if (keeps) {
        use_end(group);
        *vote_out = VOTE_KEPT;
        return FCDP_OK;
    }
    fcdp_status status = fcdp__region_store(group->region, NULL);
    if (status) return status;
    use_end(group);
    status = fcdp__region_drop(group->region, NULL);
    if (!status) *vote_out = VOTE_RELEASED;
    return status;
}

/* The unshard before this release failed, and said so. What is left? */
static uint32_t vote_unused(const fcdp_job *job) {
    fcdp_region_state state;
    fcdp__region_state(job->group->region, &state);
    bool on_device = job->n_spoils == job->group->content_spoils, on_host = on_device;
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++) {
        if (job->group->layout->span[s].bytes == 0) continue;
        on_device = on_device && state.span[s].on_device;
        on_host = on_host && state.span[s].slice_on_host;
    }
    return on_device ? VOTE_KEPT : on_host ? VOTE_RELEASED : VOTE_VOID;
}

fcdp_status fcdp__job_reshard(fcdp_work *work) {
    fcdp_job *job = (fcdp_job *)work;
    fcdp_group *group = job->group;
    if (!group->in_use) {
        vote(group, job->n_releases, vote_unused(job));
        return FCDP_OK;
    }
    uint32_t what = VOTE_VOID;
    fcdp_status status = fcdp__mark_await(job->engine, &job->mark);
    if (!status && job->n_spoils == group->content_spoils) status = release_by_policy(job, &what);
    if (what == VOTE_VOID) {
        fcdp_status cause =
            status ? fcdp__fail(status, "releasing '%s': %s", group->name, fcdp_error_text()) : FCDP_OK;
        status = fcdp__group_void(job, 0, cause);
    }
    vote(group, job->n_releases, what);
    if (status) fcdp__group_late_set(group, status);
    return status;
}

/* ---- restore ---- */

typedef struct mix {
    bool any_released, any_lost, any_void;
} mix;

/* Once every vote is at least `least`. */
static fcdp_status votes_read(const fcdp_job *job, uint32_t least, const char *what, mix *mix_out) {
    const fcdp_group *group = job->group;
    uint32_t first = job->n_releases * VOTES_PER_RELEASE;
    fcdp_board_word word = ballot_word(job->n_releases);
    *mix_out = (mix){false, false, false};
    fcdp_status status = fcdp__board_wait_all(group->block, word, first + least, what);
    if (status) return status;
    for (uint32_t l = 0; l < group->comm->topology.node_size; l++) {
        uint32_t voted = fcdp__board_read(group->block, word, l) - first;
        if (voted == VOTE_RELEASED) mix_out->any_released = true;
        if (voted == VOTE_LOST) mix_out->any_lost = true;
        if (voted >= VOTE_VOID) mix_out->any_void = true;
    }
    return FCDP_OK;
}

static fcdp_status peer_lost(void) {
    return fcdp__fail(FCDP_ERR_PEER,
                      "a rank of this node lost its copy to an earlier failure or a write; gather it again");
}

/* All ranks of the node: the span from everybody's slice. */
static fcdp_status span_gather(const fcdp_group *group, uint32_t s) {
    fcdp_engine *engine = engine_of(group);
    const fcdp_transport *transport = &group->comm->transport;
    uint32_t node_size = group->comm->topology.node_size;
    size_t slice_bytes = group->layout->span[s].bytes / node_size;
    fcdp_status status = fcdp__region_load_slice(group->region, s); /* nothing, where it is on the device */
    if (!status && node_size > 1) {
        fcdp_dptr at = fcdp__dptr_add(fcdp__region_base(group->region), group->layout->span[s].offset_bytes);
        status = fcdp__comm_check_step(group->comm);
        if (!status) status = fcdp__transport_all_gather(transport, FCDP_LANE_INTRA, at, slice_bytes);
        if (status) return status;
        fcdp__lock_acquire(&engine->lock);
        engine->restore.calls++;
        engine->restore.intra_bytes_sent += (node_size - 1) * slice_bytes;
        fcdp__lock_release(&engine->lock);
    }
    if (!status) fcdp__region_loaded(group->region, s);
    return status;
}

/* Whole, and some released: who kept brings its slice to the host, who released waits for all of them. */
static fcdp_status slices_meet(const fcdp_job *job) {
    fcdp_group *group = job->group;
    if (group->vote == VOTE_KEPT) {
        fcdp_status status =
            fcdp__region_store(group->region, NULL); /* nothing, where an eviction has done it */
        if (!status) vote(group, job->n_releases, VOTE_STORED);
        return status;
    }
    mix mix;
    fcdp_status status = votes_read(job, VOTE_SETTLED, "the slices of the ranks that kept it", &mix);
    return !status && (mix.any_lost || mix.any_void) ? peer_lost() : status;
}

static fcdp_status spans_check(const fcdp_job *job) {
    fcdp_region_state state;
    fcdp__region_state(job->group->region, &state);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (job->plan->restore_mask & 1u << s && !state.span[s].on_device && !state.span[s].slice_on_host)
            return fcdp__fail(FCDP_ERR_INVALID, "no valid copy is left of what should be fresh: it was never "
                                                "gathered, or a failure voided it");
    return FCDP_OK;
}

static fcdp_status spans_restore(fcdp_job *job) {
    fcdp_group *group = job->group;
    bool alone = group->comm->topology.node_size == 1;
    bool by_slice = engine_of(group)->options.restore == FCDP_RESTORE_SLICE;
    mix mix = {false, false, false};
    fcdp_status status = FCDP_OK;
    if (!alone && job->after_release)
        status = votes_read(job, VOTE_KEPT, "the release before this restore", &mix);
    if (!status && (mix.any_void || (mix.any_released && mix.any_lost))) status = peer_lost();
    if (!status) status = spans_check(job);
    if (!status && mix.any_released && !by_slice) status = slices_meet(job);
    bool together = alone || (mix.any_released && by_slice);
    for (uint32_t s = 0; s < FCDP_N_SPANS && !status; s++) {
        if (!(job->plan->restore_mask & 1u << s)) continue;
        status = together ? span_gather(group, s) : fcdp__region_load_whole(group->region, s);
    }
    return status;
}

fcdp_status fcdp__group_restore(fcdp_job *job) {
    fcdp_group *group = job->group;
    if (!job->plan->restore_mask) return FCDP_OK;
    fcdp_status status =
        job->n_spoils == group->content_spoils
            ? spans_restore(job)
            : fcdp__fail(FCDP_ERR_INVALID, "its gathered copy was written to since; gather it again");
    return status ? fcdp__fail(status, "restoring '%s': %s", group->name, fcdp_error_text()) : FCDP_OK;
}
