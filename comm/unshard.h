/* unshard.h - the protocol of an unshard, for every program that drives the core.
 *
 *     fcdp_unshard: ask the other ranks, or trust what they have agreed on; gather or restore, or put that
 *                   off; then the same of the groups that follow
 *     fcdp_wait:    begin what was put off; the stream goes on when the bytes are there
 *     fcdp_group_reshard (use.h)
 *
 * A program is a framework's plugin, or a test. It knows what its parameters are (fcdp_program); all
 * decisions are made here. It orders its calls on the groups of a shard group alike on all ranks.
 *
 * Each rank decides by itself whether to ask (tree.h), from events that all ranks have. To ask is to
 * look at the parameters, to vote (vote.h), and to take the ranks' maximum. What is asked for all groups of a
 * tree is asked at the first unshard of a pass; small groups that are stale then are gathered together.
 *
 * A stale group begins at its unshard, or ahead of it in the order of the last forward, on every rank alike.
 * A restore is put off until fcdp_wait, by which the previous group has released its pages: on all ranks
 * without FCDP_PREFETCH, and if some rank's device has no room for one more group (fcdp_comm_set_ahead); on
 * one rank alone if device memory is short there now, and only if the restore makes no collective.
 *
 * A call that fails has ended what it began; only a use that was begun ahead of the call stays begun, for the
 * next agreement to end.
 */
#ifndef FCDP_UNSHARD_H
#define FCDP_UNSHARD_H

#include "comm/tree.h"
#include "comm/use.h"
#include "comm/vote.h"

/* What `look` is to see. */
enum {
    FCDP_LOOK_PLACES = 1,  /* where the pieces of the shards lie, and the optimizers' steps of each extent */
    FCDP_LOOK_SIGNALS = 2, /* the signals of each extent */
    /* the process's signals, which a vote needs. Without this bit the program keeps nothing of this look */
    FCDP_LOOK_SCENE = 4,
};

/* What only the program knows. A function that fails returns a failure with a text, or FCDP_ERR_PROGRAM: the
 * program has the error itself. The call that it was made from returns that. */
typedef struct fcdp_program {
    void *ctx;
    /* Bring the shards up to date before the ranks agree on the group. NULL: the shards always are. */
    fcdp_status (*settle)(void *ctx, fcdp_group *group);
    /* Fill in what the mask asks of *sight, which is the group's own memory (vote.h). The address of a shard
     * that neither the device nor the host may read is NULL. */
    fcdp_status (*look)(void *ctx, fcdp_group *group, unsigned what, fcdp_sight *sight);
    /* The device cannot take fingerprints: the program never sets `by_device` again. Called with one group of
     * the agreement. NULL: the program never sets it. */
    void (*blind)(void *ctx, fcdp_group *group);
    /* May the group begin though the program has not unsharded it: ahead of its use, or (not `ahead`)
     * together with other small ones? The same on all ranks. NULL: it may. */
    bool (*may_begin)(void *ctx, fcdp_group *group, bool ahead);
    /* For each stale extent i that has bytes, set inputs_out[i] to the device address of this rank's shard in
     * the gathered dtype; it stays valid until the group has been waited for (use.h). *stream is the current
     * stream, behind which the shards are read; replace it by the stream that made them, if another did. */
    fcdp_status (*inputs)(void *ctx, fcdp_group *group, const uint8_t *stale, uint64_t *inputs_out,
                          fcdp_stream *stream);
    /* The inputs were read outside of a use, and are not needed any more. NULL: nothing is to be done. */
    void (*inputs_done)(void *ctx, fcdp_group *group);
    /* Replace each of the n bytes of `votes`, which are on these groups, by its maximum over all ranks. */
    fcdp_status (*agree)(void *ctx, fcdp_group *const *groups, uint32_t n_groups, uint8_t *votes, size_t n);
    /* Were the gathered bytes written into since this was asked last? NULL: they never are. */
    bool (*written)(void *ctx, fcdp_group *group);
} fcdp_program;

typedef struct fcdp_unshard_args {
    fcdp_pass pass;
    bool by_hand;       /* it is not one of the framework's own hooks: the ranks agree on it alone */
    fcdp_stream stream; /* the current one */
    /* with by_hand: the shards are looked at behind this one, where the program has made them */
    fcdp_stream made_on;
} fcdp_unshard_args;

/* Is the device's budget enough to gather each of one model's `groups` in its turn? stays[i]: group i is not
 * resharded after forward. Else FCDP_ERR_NO_DEVICE_MEM, with the FCDP_DEVICE_BUDGET that would do.
 * *ahead_out: is there room to begin one ahead of its use? Created, attached or not. Takes nothing. */
fcdp_status fcdp_groups_fit(fcdp_group *const *groups, const uint8_t *stays, uint32_t n,
                            bool *ahead_out) FCDP_MUST_CHECK;

/* The use of `group` begins, or is put off; then those of the groups that follow it begin. The group lies
 * under `tree` from here on. FCDP_ERR_INVALID, with nothing done: a CUDA graph is being captured, the tree
 * does not list the group, a shard of the group is missing on some rank, or a parameter has changed since the
 * ranks agreed on it.
 * FCDP_ERR_NO_DEVICE_MEM: as fcdp_group_begin. */
fcdp_status fcdp_unshard(fcdp_group *group, fcdp_tree *tree, const fcdp_program *program,
                         const fcdp_unshard_args *args) FCDP_MUST_CHECK;
/* fcdp_group_wait, of a use that may have been put off. */
fcdp_status fcdp_wait(fcdp_group *group, const fcdp_program *program, fcdp_stream stream) FCDP_MUST_CHECK;
/* The program will not use what it unsharded: before fcdp_group_reshard, in place of fcdp_wait. */
fcdp_status fcdp_cancel(fcdp_group *group, const fcdp_program *program, fcdp_stream stream) FCDP_MUST_CHECK;
/* End a use that failed after its unshard. Without this call, the group's next unshard would find the use
 * begun and reuse its bytes. Further failures are only logged; the thread's failure text stays. */
void fcdp_give_up(fcdp_group *group, const fcdp_program *program, fcdp_stream stream);

/* The ranks agree on what is stale of `groups`, which are of one shard group and lie under trees; their
 * shards are looked at behind `stream`. */
fcdp_status fcdp_agree(fcdp_group *const *groups, uint32_t n_groups, const fcdp_program *program,
                       fcdp_stream stream) FCDP_MUST_CHECK;
/* The first extent of which some rank's shard was missing when the ranks agreed on the group last;
 * n_extents: none. */
uint32_t fcdp_group_missing(const fcdp_group *group);

#endif
