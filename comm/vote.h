/* vote.h - what is stale of a group: this rank's vote, the ranks' agreement.
 *
 * What an agreement (unshard.h) is of:
 *
 *     fcdp_group_question (tree.h)
 *     -> for each group asked for: fcdp_group_vote -> the ranks' maximum -> fcdp_group_agree
 *     -> fcdp_group_begin (use.h)
 *
 * A vote is one byte per parameter, why its copy is stale here (validity.h), and three more: the region is
 * not on this rank's device; its copy may be lost here behind a use (copy.h); its frozen span cannot come
 * from this rank's disk (frozen.h). What is agreed stale crosses the nodes. What is fresh, and not on the
 * device of every rank, is restored on all of them together.
 *
 * A shard's bytes need not be there when the ranks agree: a program may free what it does not use, or
 * fill it right before its use. FCDP_STALE_MISSING is the highest bit, so the maximum has it where any
 * rank's vote has it. Such a group crosses with no others and is not begun ahead: the ranks ask for it
 * again at its own unshard, and what is missing then is an error on all of them.
 */
#ifndef FCDP_VOTE_H
#define FCDP_VOTE_H

#include "comm/group.h"
#include "comm/validity.h"

/* Behind the parameters' bytes of a vote. */
enum { FCDP_VOTE_OFF_DEVICE, FCDP_VOTE_MAY_BE_LOST, FCDP_VOTE_NOT_ON_DISK, FCDP_VOTE_MORE };

/* What the caller saw of the group's parameters: arrays of n_extents. */
typedef struct fcdp_evidence {
    const fcdp_signals *signals;
    /* host-readable bytes, which are fingerprinted here; NULL: none. Of the pieces of one extent after
     * another. A piece that is NULL cannot be read here; where it has bytes all the same, they are not
     * there at all */
    const void *const *shards;
    const size_t *shard_bytes;
    /* of the pieces, by the device (fcdp_comm_fingerprint_end), in place of `shards`; NULL: none */
    const uint64_t *fingerprints;
    /* how many pieces each extent's shard is, in which order counts; NULL: one each. None: no bytes */
    const uint64_t *n_pieces;
    /* the shards' addresses are the device's, which fingerprints what is gathered (fcdp_group_confirm); the
     * host reads none */
    bool by_device;
} fcdp_evidence;

/* What a program's look at a group fills in (unshard.h): memory of the group's, for life. At first each
 * extent is one piece that is not read. */
typedef struct fcdp_sight {
    uint32_t n_extents;
    fcdp_signals *signals;        /* n_extents */
    fcdp_process_signals process; /* at the last look for a vote */
    uint64_t *n_pieces;           /* n_extents */
    const void **shards;          /* of the pieces, as in fcdp_evidence; there is room for n_places */
    size_t *shard_bytes, n_places;
    bool by_device;
} fcdp_sight;

fcdp_status fcdp__sight_init(fcdp_sight *sight, uint32_t n_extents) FCDP_MUST_CHECK;
void fcdp__sight_free(fcdp_sight *sight);
/* Room for so many pieces, before they are filled in. */
fcdp_status fcdp_sight_reserve(fcdp_sight *sight, size_t n_pieces) FCDP_MUST_CHECK;
size_t fcdp__sight_n_pieces(const fcdp_sight *sight);
/* Borrowed. `fingerprints`: the device's, of the pieces; NULL: none. */
fcdp_evidence fcdp__sight_evidence(const fcdp_sight *sight, const uint64_t *fingerprints);

uint64_t fcdp__evidence_n_pieces(const fcdp_evidence *evidence, uint32_t i);
/* Are the bytes of extent i's shard not there, which has its first piece `at`? */
bool fcdp__evidence_is_missing(const fcdp_evidence *evidence, uint32_t i, size_t at);
/* Of extent i's shard, where the evidence has it; NULL: its bytes were not read. *own: for one that is
 * taken here. `at`: the extent's first piece; it moves on to the next extent's. */
const uint64_t *fcdp__evidence_fingerprint(const fcdp_evidence *evidence, uint32_t i, size_t *at,
                                           uint64_t *own);

/* Must the device read the group's shards for the vote, and the host wait for it? Not where an optimizer
 * has stepped each parameter, and the step before changed each (validity.h): they are voted stale
 * without, and the gather's own fingerprints say what they are. The optimizers' steps count, of n_extents
 * signals. */
bool fcdp_group_needs_fingerprints(const fcdp_group *group, const fcdp_signals *signals);
/* The vote, of n_extents + FCDP_VOTE_MORE bytes. A use that was begun ahead is ended first. */
fcdp_status fcdp_group_vote(fcdp_group *group, const fcdp_evidence *evidence,
                            const fcdp_process_signals *process, uint8_t *vote_out) FCDP_MUST_CHECK;
/* `agreed`: the maximum over the ranks, of as many bytes. The first extent of which some rank's shard is
 * missing; n_extents: none is. */
uint32_t fcdp_group_agree(fcdp_group *group, const uint8_t *agreed);
/* The gather of what is agreed stale reads the shards next: `evidence` as it is now, right before
 * fcdp_group_begin or fcdp_groups_coalesce. Then equal fingerprints are enough to keep the copy, whatever
 * signals move later; without this call they are not. Shards are fingerprinted again, by the host, or by
 * the device behind what is on `stream` now, so that a write since the agreement is known even if it is
 * undone later. Failures are of the device's part, and the comm's. */
fcdp_status fcdp_group_confirm(fcdp_group *group, const fcdp_evidence *evidence,
                               fcdp_stream stream) FCDP_MUST_CHECK;
/* The device's fingerprints of what the last gathers read, if it takes any, become those of the copies:
 * before the copies are compared with anything. Waits for the device. */
fcdp_status fcdp__group_reads_end(fcdp_group *group) FCDP_MUST_CHECK;
/* What was agreed on must still hold where it is trusted: the first extent whose parameter has
 * changed since, or whose shard is missing; n_extents: none has. */
uint32_t fcdp_group_audit(fcdp_group *group, const fcdp_evidence *evidence);

#endif
