/* group.h - one FSDP parameter group: its region, what is stale of it, and the operations that bring it
 * there.
 *
 * Life of a use: fcdp_group_begin puts all of an unshard on the streams; fcdp_group_wait lets a stream wait
 * for its end; fcdp_group_reshard ends the use. A group may be begun ahead of its use, and resharded without
 * one. Which groups a rank asks its peers about is decided by agreement.h; the votes and their maximum over
 * the ranks are the caller's to carry:
 *
 *     fcdp_group_question
 *     -> for each group asked for: fcdp_group_vote -> the ranks' maximum -> fcdp_group_agree
 *     -> fcdp_group_begin
 *
 * A vote is one byte per parameter, why its copy is stale here (validity.h), and one more: the region is not
 * on this rank's device. What is agreed stale crosses the nodes; what is fresh, and lacks on some rank, is
 * restored on all of them together.
 *
 * Calls on one group are the caller's to order, and so are those on the groups of one tree.
 */
#ifndef FCDP_GROUP_H
#define FCDP_GROUP_H

#include "comm/agreement.h"
#include "comm/comm.h"
#include "comm/validity.h"
#include "tiering/layout.h"

typedef struct fcdp_group fcdp_group;
/* All groups under one root, in one shard group. */
typedef struct fcdp_tree fcdp_tree;

fcdp_status fcdp_tree_create(fcdp_comm *comm, fcdp_tree **tree_out) FCDP_MUST_CHECK;
/* Its groups belong to none from then on. */
void fcdp_tree_destroy(fcdp_tree *tree);
void fcdp_tree_begin_forward(fcdp_tree *tree);
void fcdp_tree_begin_backward(fcdp_tree *tree);
/* All of its groups have been agreed on. */
void fcdp_tree_agreed(fcdp_tree *tree);

/* A group's layout is made here; it cannot be used before it is attached
 * to host memory. `name` for messages. */
fcdp_status fcdp_group_create(fcdp_comm *comm, const char *name, const fcdp_extent_spec *specs,
                              uint32_t n_extents, fcdp_group **group_out) FCDP_MUST_CHECK;
/* Waits for its operations, unmaps, detaches. */
void fcdp_group_destroy(fcdp_group *group);
/* Leader: take the group's block of host memory. Every rank, leader included: attach at the
 * leader's offset; then the region exists. */
fcdp_status fcdp_group_host_alloc(fcdp_group *group, uint64_t *offset_out) FCDP_MUST_CHECK;
fcdp_status fcdp_group_attach(fcdp_group *group, uint64_t offset) FCDP_MUST_CHECK;
/* Is the device's budget enough to gather each of one model's `groups` in its turn? stays[i]: group i is not
 * resharded after forward. Else FCDP_ERR_NO_DEVICE_MEM, with the FCDP_DEVICE_BUDGET that would do.
 * *ahead_out: is there room to begin one ahead of its use? Created, attached or not. */
fcdp_status fcdp_groups_fit(fcdp_group *const *groups, const uint8_t *stays, uint32_t n,
                            bool *ahead_out) FCDP_MUST_CHECK;
/* From here on a SIGSEGV in the region says so, with the group's name and names[i] of extent i
 * (tiering/segv.h). Attached, once. */
fcdp_status fcdp_group_watch(fcdp_group *group, const char *const *names, uint32_t n_names) FCDP_MUST_CHECK;
/* Addresses of the extents' storages, for life; bytes of extent i = n_ranks * shard_bytes. */
fcdp_dptr fcdp_group_extent(const fcdp_group *group, uint32_t i);
uint32_t fcdp_group_n_extents(const fcdp_group *group);

/* What the caller saw of the group's parameters: arrays of n_extents. */
typedef struct fcdp_evidence {
    const fcdp_signals *signals;
    const void *const *shards; /* host-readable bytes, which are fingerprinted here; NULL: none */
    const size_t *shard_bytes;
    /* by the device (fcdp_comm_fingerprint_end), in place of `shards`; NULL: none */
    const uint64_t *fingerprints;
} fcdp_evidence;

void fcdp_group_join(fcdp_group *group, fcdp_tree *tree);
fcdp_question fcdp_group_question(const fcdp_group *group, bool by_hand);
/* Its gradients were reduced, its parameters stepped: ask again. */
void fcdp_group_ask_again(fcdp_group *group);
/* The vote, of n_extents + 1 bytes. A use that was begun ahead is ended first. */
fcdp_status fcdp_group_vote(fcdp_group *group, const fcdp_evidence *evidence, const fcdp_scene *scene,
                            uint8_t *vote_out) FCDP_MUST_CHECK;
/* `agreed`: the maximum over the ranks, of as many bytes. */
void fcdp_group_agree(fcdp_group *group, const uint8_t *agreed);
/* The gather of what is agreed stale reads the shards next: `signals` (n_extents) as they are now, right
 * before fcdp_group_begin or fcdp_groups_cross. Then equal fingerprints are enough to keep the copy, whatever
 * signals move later; without this call they are not. */
void fcdp_group_confirm(fcdp_group *group, const fcdp_signals *signals);
/* What was agreed on must still hold where it is trusted: the first extent whose parameter has
 * changed since; n_extents: none has. */
uint32_t fcdp_group_audit(fcdp_group *group, const fcdp_evidence *evidence);
/* n_extents flags: what the next begin gathers, and needs inputs for. */
void fcdp_group_stale(const fcdp_group *group, uint8_t *stale_out);

typedef enum fcdp_pass { FCDP_PASS_FORWARD, FCDP_PASS_BACKWARD, FCDP_PASS_OTHER } fcdp_pass;

/* FCDP_ERR_INVALID while `stream` captures a CUDA graph, of which no gather can be part: to be asked before
 * an agreement. So do begin, wait, reshard and cross say then, and nothing has happened. */
fcdp_status fcdp_group_check_capture(const fcdp_group *group, fcdp_stream stream) FCDP_MUST_CHECK;

/* Put everything on the streams. inputs[i]: device address of this rank's shard of extent i in the gathered
 * dtype (shard_bytes long), read where stale, after what is on `stream` now; it lives until a stream that
 * waited for the group (fcdp_group_wait) has passed that. May be NULL where nothing is stale. Nothing to do
 * where the group has begun already. FCDP_ERR_NO_DEVICE_MEM: nothing was begun, and the ranks may go on
 * together if all of them failed so. */
fcdp_status fcdp_group_begin(fcdp_group *group, const uint64_t *inputs, fcdp_pass pass,
                             fcdp_stream stream) FCDP_MUST_CHECK;
bool fcdp_group_has_begun(const fcdp_group *group);
/* The program unshards the group now (begun or not): its place in the order of a forward. The groups to be
 * begun ahead of their uses, at most `n` in `ahead_out`, in this order; how many. */
size_t fcdp_group_unsharded(fcdp_group *group, bool forward, fcdp_group **ahead_out, size_t n);
/* `stream` goes on when the bytes are there; with host_computes the calling thread does. The failure of the
 * group's shard group, if it has one by then. */
fcdp_status fcdp_group_wait(fcdp_group *group, fcdp_stream stream) FCDP_MUST_CHECK;
/* The use ends: `stream` is behind it. `written`: somebody wrote into the gathered bytes, which must not be
 * used again. Does nothing where the group has not begun. */
fcdp_status fcdp_group_reshard(fcdp_group *group, fcdp_stream stream, bool written) FCDP_MUST_CHECK;

/* Small groups that are stale together. Is the group one that is worth it: agreed stale, small
 * (FCDP_COALESCE), used of late, not begun? */
bool fcdp_group_is_small(const fcdp_group *group);
/* Gather what is stale of `groups`, small ones of one shard group, to the node's host memory, in few
 * collectives; it is stale no more. inputs: as for begin, of one group after another. On every rank of the
 * shard group alike. A failure is the comm's. */
fcdp_status fcdp_groups_cross(fcdp_group *const *groups, const uint64_t *inputs, uint32_t n,
                              fcdp_stream stream) FCDP_MUST_CHECK;

typedef struct fcdp_group_stats {
    const char *name;                           /* borrowed from the group */
    size_t bytes;                               /* region */
    uint64_t gathers_made, gathers_avoided;     /* unshards that crossed the link / that did not */
    uint64_t gathers_forward, gathers_backward; /* of those made */
    const char *state;                          /* "device", "host", "mixed", "invalid" */
} fcdp_group_stats;
void fcdp_group_stats_get(fcdp_group *group, fcdp_group_stats *stats_out);

#endif
