/* copy.c - a copy's fingerprints, by the host or by the device.
 *
 * The device reads what the program's stream has behind it, so the fingerprints are in the order of the
 * program's writes, whatever the host does meanwhile: one launch in front of the use, one behind it. The
 * pages are not given up before the second, as the region's release is recorded behind it. The first one
 * holds for as long as the bytes stay: a copy that is kept for many uses is read once at the end of each.
 *
 * The padding between extents is left out. It differs between ranks, and nobody trains with it.
 */
#include "comm/copy.h"

#include <stdlib.h>

#include "comm/trace.h"
#include "comm/use.h"

static bool by_host(const fcdp_group *group) {
    return group->comm->engine->host_computes;
}

static bool is_wanted(const fcdp_group *group) {
    return group->comm->engine->options.fingerprint != FCDP_FINGERPRINT_NEVER;
}

/* The tiers that keep a group do so whatever the options say (comm/moves.c). */
static bool may_stay(const fcdp_group *group) {
    const fcdp_options *options = &group->comm->engine->options;
    bool by_options = options->policy == FCDP_POLICY_NEXT_USE || options->tau > 0;
    bool by_tier = group->tier == FCDP_TIER_DEVICE || group->tier == FCDP_TIER_MAPPED;
    return by_options || by_tier;
}

bool fcdp__copy_may_outlive(const fcdp_group *group) {
    return !by_host(group) && is_wanted(group) && may_stay(group);
}

/* Where the host computes and the node meets in host memory, each gather stores what it brings. */
bool fcdp__copy_may_be_lost(const fcdp_group *group) {
    bool is_stored = by_host(group) && group->comm->topology.node_size > 1 && !fcdp__group_by_slice(group);
    return may_stay(group) && !is_stored;
}

bool fcdp__copy_is_first(const fcdp_group *group, int which) {
    return !group->copy.reads[which] && !group->copy.unsupported && fcdp__copy_may_outlive(group);
}

static uint64_t read_by_host(const fcdp_group *group) {
    const char *bytes = (const char *)(uintptr_t)fcdp__region_base(group->region).addr;
    uint64_t mixed = 0;
    for (uint32_t i = 0; i < group->layout->n_extents; i++)
        mixed = fcdp__fingerprint_by_host(bytes + group->layout->extents[i].offset_bytes,
                                          fcdp__layout_extent_bytes(group->layout, i), mixed);
    return mixed;
}

/* The device's answers to one launch, as one. */
static fcdp_status read_end(fcdp_group *group, int which, uint64_t *fingerprint_out) {
    size_t n = group->layout->n_extents;
    uint64_t *fingerprints = malloc((n + 1) * sizeof *fingerprints);
    if (!fingerprints)
        return fcdp__comm_fail(
            group->comm,
            fcdp__fail(FCDP_ERR_SYSTEM, "no memory for %zu fingerprints of '%s'", n, group->name));
    fcdp_status status = fcdp__comm_fingerprint_end(group->comm, group->copy.reads[which], fingerprints);
    if (!status) *fingerprint_out = fcdp__fingerprint_by_host(fingerprints, n * sizeof *fingerprints, 0);
    group->copy.reading[which] = false;
    free(fingerprints);
    return status;
}

/* A launch whose answer nobody wants any more is ended first; the device has passed it, or soon will. */
static fcdp_status read_begin(fcdp_group *group, int which, fcdp_stream stream) {
    const fcdp_layout *layout = group->layout;
    uint64_t base = fcdp__region_base(group->region).addr, ignored;
    fcdp_status status = group->copy.reading[which] ? read_end(group, which, &ignored) : FCDP_OK;
    if (status) return status;
    uint64_t *arrays = malloc((layout->n_extents + 1) * sizeof *arrays);
    size_t *bytes = malloc((layout->n_extents + 1) * sizeof *bytes);
    if (!arrays || !bytes)
        status = fcdp__comm_fail(
            group->comm,
            fcdp__fail(FCDP_ERR_SYSTEM, "no memory to fingerprint the copy of '%s'", group->name));
    for (uint32_t i = 0; i < layout->n_extents && !status; i++) {
        arrays[i] = base + layout->extents[i].offset_bytes;
        bytes[i] = fcdp__layout_extent_bytes(layout, i);
    }
    if (!status)
        status = fcdp__comm_fingerprint_begin(group->comm, &group->copy.reads[which], arrays, bytes,
                                              layout->n_extents, stream);
    group->copy.reading[which] = status == FCDP_OK;
    if (status == FCDP_ERR_UNSUPPORTED) group->copy.unsupported = true;
    free(arrays);
    free(bytes);
    return status == FCDP_ERR_UNSUPPORTED ? FCDP_OK : status;
}

fcdp_status fcdp__copy_taken(fcdp_group *group, fcdp_stream stream) {
    if (group->copy.known || group->copy.unsupported || !is_wanted(group)) return FCDP_OK;
    fcdp_status status = FCDP_OK;
    if (by_host(group))
        group->copy.fingerprint = read_by_host(group);
    else
        status = read_begin(group, FCDP_COPY_TAKEN, stream);
    group->copy.known = !status && !group->copy.unsupported;
    return status;
}

/* One that nothing has waited for is as it was. */
bool fcdp__copy_is_known(const fcdp_group *group) {
    return !group->waited || group->copy.known || !is_wanted(group);
}

/* A copy that no stream has waited for may not be there yet, and the program has not seen it. */
fcdp_status fcdp__copy_ended(fcdp_group *group, fcdp_stream stream, bool *written_out) {
    *written_out = false;
    if (!group->waited || !group->copy.known) return FCDP_OK;
    if (!by_host(group)) {
        fcdp_status status = read_begin(group, FCDP_COPY_ENDED, stream);
        group->copy.ended = !status;
        return status;
    }
    *written_out = read_by_host(group) != group->copy.fingerprint;
    return FCDP_OK;
}

fcdp_status fcdp__copy_judged(fcdp_group *group) {
    uint64_t ended;
    if (!group->copy.ended) return FCDP_OK;
    group->copy.ended = false;
    fcdp_status status = group->copy.reading[FCDP_COPY_TAKEN]
                             ? read_end(group, FCDP_COPY_TAKEN, &group->copy.fingerprint)
                             : FCDP_OK;
    if (!status) status = read_end(group, FCDP_COPY_ENDED, &ended);
    if (status || ended == group->copy.fingerprint) return status;
    fcdp__region_invalidate(group->region, FCDP_SPAN_MASK_ALL);
    fcdp__validity_invalidate(group->validity);
    fcdp__copy_replaced(group);
    return FCDP_OK;
}

void fcdp__copy_replaced(fcdp_group *group) {
    group->copy.known = group->copy.ended = false;
}

void fcdp__copy_free(fcdp_group *group) {
    for (int which = 0; which < FCDP_COPY_N_READS; which++)
        fcdp__fingerprints_destroy(group->copy.reads[which]);
}
