/* vote.c - what a rank says of its shards, and what the ranks' agreement makes of the group.
 *
 * A copy is never guessed to be fresh: validity.c compares every signal, and this file brings it the
 * strongest one, the fingerprint of a shard's bytes. The device or the host takes it, depending on where the
 * shard lies.
 *
 * A shard may be written after the ranks agreed, before its gather reads it, and be as it was when they agree
 * the next time. So what is compared then is what the gather read. The device fingerprints it behind the
 * gather's inputs while the host goes on, and the result is collected at the group's next vote, which has
 * waited for later ones of the same device anyway:
 *
 *     fcdp_group_confirm -> reads_begin -> the gather -> fcdp__group_reads_end -> vote
 *
 * No vote leaves the process here: ballot.c carries it.
 */
#include "comm/vote.h"

#include <stdlib.h>
#include <string.h>

#include "comm/copy.h"
#include "comm/frozen.h"
#include "comm/trace.h"

/* ---- evidence ---- */

uint64_t fcdp__evidence_n_pieces(const fcdp_evidence *evidence, uint32_t i) {
    return evidence->n_pieces ? evidence->n_pieces[i] : 1;
}

/* The device's of several pieces are bytes like any, of which the host takes one. */
const uint64_t *fcdp__evidence_fingerprint(const fcdp_evidence *evidence, uint32_t i, size_t *at,
                                           uint64_t *own) {
    size_t n = fcdp__evidence_n_pieces(evidence, i), first = *at;
    *at += n;
    *own = 0;
    if (evidence->fingerprints) {
        const uint64_t *taken = &evidence->fingerprints[first];
        if (n == 1) return taken;
        *own = fcdp__fingerprint_by_host(taken, n * sizeof *taken, 0);
        return own;
    }
    if (!evidence->shards || evidence->by_device) return NULL;
    for (size_t p = first; p < first + n; p++) {
        if (!evidence->shards[p]) return NULL;
        *own = fcdp__fingerprint_by_host(evidence->shards[p], evidence->shard_bytes[p], *own);
    }
    return own;
}

bool fcdp__evidence_is_missing(const fcdp_evidence *evidence, uint32_t i, size_t at) {
    if (!evidence->shards || !evidence->shard_bytes) return false;
    for (size_t end = at + fcdp__evidence_n_pieces(evidence, i); at < end; at++)
        if (!evidence->shards[at] && evidence->shard_bytes[at]) return true;
    return false;
}

/* ---- what a gather reads ---- */

fcdp_status fcdp__group_reads_end(fcdp_group *group) {
    if (!group->has_reads) return FCDP_OK;
    size_t n = 0, at = 0;
    for (uint32_t i = 0; i < group->layout->n_extents; i++) n += group->read_pieces[i];
    uint64_t *fingerprints = malloc((n + 1) * sizeof *fingerprints);
    if (!fingerprints)
        return fcdp__comm_fail(
            group->comm,
            fcdp__fail(FCDP_ERR_SYSTEM, "no memory for %zu fingerprints of '%s'", n, group->name));
    fcdp_status status = fcdp__comm_fingerprint_end(group->comm, group->reads, fingerprints);
    fcdp_evidence taken = {.fingerprints = fingerprints, .n_pieces = group->read_pieces};
    for (uint32_t i = 0; i < group->layout->n_extents && !status; i++) {
        if (!group->read_pieces[i]) continue;
        uint64_t own;
        fcdp__validity_amend(group->validity, i, group->n_reads,
                             *fcdp__evidence_fingerprint(&taken, i, &at, &own));
    }
    group->has_reads = false;
    free(fingerprints);
    return status;
}

/* group->read_pieces[i]: of how many pieces extent i is in the batch; 0: it is not. */
static void pieces_collect(fcdp_group *group, const fcdp_evidence *evidence, uint64_t *arrays_out,
                           size_t *bytes_out) {
    size_t n = 0, at = 0;
    group->n_reads++;
    for (uint32_t i = 0; i < group->layout->n_extents; i++) {
        size_t n_pieces = fcdp__evidence_n_pieces(evidence, i);
        group->read_pieces[i] = group->stale[i] ? n_pieces : 0;
        for (size_t p = at; p < at + group->read_pieces[i]; p++, n++) {
            arrays_out[n] = (uintptr_t)evidence->shards[p];
            bytes_out[n] = evidence->shard_bytes[p];
        }
        if (group->stale[i]) fcdp__validity_await(group->validity, i, &evidence->signals[i], group->n_reads);
        at += n_pieces;
    }
}

/* Of what is agreed stale, behind what is on `stream` now: evidence->shards are addresses in device memory. A
 * failure is the comm's. */
static fcdp_status reads_begin(fcdp_group *group, const fcdp_evidence *evidence, fcdp_stream stream) {
    fcdp_status status = fcdp__group_reads_end(group);
    size_t n = 0;
    for (uint32_t i = 0; i < group->layout->n_extents; i++)
        if (group->stale[i]) n += fcdp__evidence_n_pieces(evidence, i);
    if (status || n == 0) return status;
    uint64_t *arrays = malloc(n * sizeof *arrays);
    size_t *bytes = malloc(n * sizeof *bytes);
    if (!arrays || !bytes) {
        status = fcdp__comm_fail(
            group->comm, fcdp__fail(FCDP_ERR_SYSTEM, "no memory for %zu shards of '%s'", n, group->name));
    } else {
        pieces_collect(group, evidence, arrays, bytes);
        status = fcdp__comm_fingerprint_begin(group->comm, &group->reads, arrays, bytes, n, stream);
    }
    group->has_reads = status == FCDP_OK;
    free(arrays);
    free(bytes);
    return status;
}

/* ---- vote and agreement ---- */

bool fcdp_group_needs_fingerprints(const fcdp_group *group, const fcdp_signals *signals) {
    for (uint32_t i = 0; i < group->layout->n_extents; i++)
        if (!fcdp__validity_is_foretold(group->validity, i, signals[i].optimizer_steps)) return true;
    return false;
}

/* Not where the copy of each parameter is foretold to be stale: it is gathered anew, whatever it is, and the
 * host need not wait for the device. */
static bool any_is_to_stay(const fcdp_group *group, const fcdp_evidence *evidence) {
    return !evidence->by_device || evidence->fingerprints ||
           fcdp_group_needs_fingerprints(group, evidence->signals);
}

/* FCDP_VOTE_OFF_DEVICE is 0 where every span that has bytes lies on this rank's device. */
fcdp_status fcdp_group_vote(fcdp_group *group, const fcdp_evidence *evidence,
                            const fcdp_process_signals *process, uint8_t *vote_out) {
    uint32_t n = group->layout->n_extents;
    fcdp_region_state state;
    fcdp_status status = group->member.ahead ? fcdp__group_cancel(group) : FCDP_OK;
    if (!status) status = fcdp__group_reads_end(group);
    if (status) return status;
    if (any_is_to_stay(group, evidence)) status = fcdp__copy_judged(group);
    if (status) return status;
    size_t at = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t own;
        bool missing = fcdp__evidence_is_missing(evidence, i, at);
        const uint64_t *fingerprint = fcdp__evidence_fingerprint(evidence, i, &at, &own);
        vote_out[i] = (uint8_t)(missing ? fcdp__validity_miss(group->validity, i)
                                        : fcdp__validity_observe(group->validity, i, &evidence->signals[i],
                                                                 process, fingerprint));
    }
    memcpy(group->votes, vote_out, n);
    group->unchanged = true;
    for (uint32_t i = 0; i < n; i++) {
        group->unchanged = group->unchanged && !vote_out[i];
        if (!group->dropped) continue;
        vote_out[i] |= FCDP_STALE_NEW;
        if (!group->votes[i]) group->votes[i] = FCDP_STALE_NEW;
    }
    vote_out[n + FCDP_VOTE_OFF_DEVICE] = 0;
    vote_out[n + FCDP_VOTE_MAY_BE_LOST] = fcdp__copy_may_be_lost(group);
    vote_out[n + FCDP_VOTE_NOT_ON_DISK] = !fcdp__frozen_is_asked(group);
    fcdp__region_state(group->region, &state);
    for (uint32_t s = 0; s < FCDP_N_SPANS; s++)
        if (group->layout->span[s].bytes && !state.span[s].on_device) vote_out[n + FCDP_VOTE_OFF_DEVICE] = 1;
    return FCDP_OK;
}

uint32_t fcdp_group_agree(fcdp_group *group, const uint8_t *agreed) {
    uint32_t n = group->layout->n_extents, missing = 0;
    memcpy(group->stale, agreed, n);
    group->not_on_device = agreed[n + FCDP_VOTE_OFF_DEVICE];
    group->may_be_lost = agreed[n + FCDP_VOTE_MAY_BE_LOST];
    group->frozen.agreed = !agreed[n + FCDP_VOTE_NOT_ON_DISK];
    fcdp__group_trace_stale(group);
    fcdp__member_agreed(&group->member);
    while (missing < n && !(agreed[missing] & FCDP_STALE_MISSING)) missing++;
    if (missing < n) fcdp__member_ask_again(&group->member);
    group->missing = missing;
    return missing;
}

fcdp_status fcdp_group_confirm(fcdp_group *group, const fcdp_evidence *evidence, fcdp_stream stream) {
    if (evidence->by_device) return reads_begin(group, evidence, stream);
    size_t at = 0;
    for (uint32_t i = 0; i < group->layout->n_extents; i++) {
        uint64_t own;
        if (group->stale[i])
            fcdp__validity_confirm(group->validity, i, &evidence->signals[i],
                                   fcdp__evidence_fingerprint(evidence, i, &at, &own));
        else
            at += fcdp__evidence_n_pieces(evidence, i);
    }
    return FCDP_OK;
}

/* What this pass has gathered, or begins to reuse, must be what the ranks saw when they agreed. What is
 * agreed stale and has not begun is read when it does: it may still change. */
uint32_t fcdp_group_audit(fcdp_group *group, const fcdp_evidence *evidence) {
    uint32_t n = group->layout->n_extents;
    size_t at = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t own;
        if (group->stale[i]) {
            at += fcdp__evidence_n_pieces(evidence, i);
            continue;
        }
        if (fcdp__evidence_is_missing(evidence, i, at) ||
            fcdp__validity_moved(group->validity, i, &evidence->signals[i],
                                 fcdp__evidence_fingerprint(evidence, i, &at, &own)))
            return i;
    }
    return n;
}

bool fcdp__group_is_stale(const fcdp_group *group) {
    for (uint32_t i = 0; i < group->layout->n_extents; i++)
        if (group->stale[i]) return true;
    return false;
}

/* ---- what a program sees ---- */

fcdp_status fcdp_sight_reserve(fcdp_sight *sight, size_t n_pieces) {
    if (n_pieces <= sight->n_places) return FCDP_OK;
    const void **shards = realloc(sight->shards, n_pieces * sizeof *shards);
    if (shards) sight->shards = shards;
    size_t *bytes = realloc(sight->shard_bytes, n_pieces * sizeof *bytes);
    if (bytes) sight->shard_bytes = bytes;
    if (!shards || !bytes)
        return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for the places of %zu pieces", n_pieces);
    for (; sight->n_places < n_pieces; sight->n_places++) {
        shards[sight->n_places] = NULL;
        bytes[sight->n_places] = 0;
    }
    return FCDP_OK;
}

fcdp_status fcdp__sight_init(fcdp_sight *sight, uint32_t n_extents) {
    *sight = (fcdp_sight){.n_extents = n_extents,
                          .signals = calloc(n_extents + 1, sizeof *sight->signals),
                          .n_pieces = calloc(n_extents + 1, sizeof *sight->n_pieces)};
    if (!sight->signals || !sight->n_pieces)
        return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for the signals of %u parameters", n_extents);
    for (uint32_t i = 0; i < n_extents; i++) sight->n_pieces[i] = 1;
    return fcdp_sight_reserve(sight, n_extents + 1);
}

void fcdp__sight_free(fcdp_sight *sight) {
    free(sight->signals);
    free(sight->n_pieces);
    free(sight->shards);
    free(sight->shard_bytes);
}

size_t fcdp__sight_n_pieces(const fcdp_sight *sight) {
    size_t n = 0;
    for (uint32_t i = 0; i < sight->n_extents; i++) n += sight->n_pieces[i];
    return n;
}

fcdp_evidence fcdp__sight_evidence(const fcdp_sight *sight, const uint64_t *fingerprints) {
    return (fcdp_evidence){.signals = sight->signals,
                           .shards = sight->shards,
                           .shard_bytes = sight->shard_bytes,
                           .fingerprints = fingerprints,
                           .n_pieces = sight->n_pieces,
                           .by_device = sight->by_device};
}
