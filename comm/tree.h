/* tree.h - all groups under one root, in one shard group. It knows whom an unshard asks, and who follows
 * whom.
 *
 * A tree is an agreement.h agreement, and its groups are the members. Calls on the groups of one tree are
 * the caller's to order.
 */
#ifndef FCDP_TREE_H
#define FCDP_TREE_H

#include "comm/agreement.h"
#include "comm/group.h"

typedef struct fcdp_tree fcdp_tree;

fcdp_status fcdp_tree_create(fcdp_comm *comm, fcdp_tree **tree_out) FCDP_MUST_CHECK;
/* Its groups belong to none from then on. */
void fcdp_tree_destroy(fcdp_tree *tree);
void fcdp_tree_begin_forward(fcdp_tree *tree);
void fcdp_tree_begin_backward(fcdp_tree *tree);
/* All of its groups have been agreed on. */
void fcdp_tree_agreed(fcdp_tree *tree);

/* The groups that an agreement on all of them asks for, in this order: those of the root that lie in the
 * shard group, the same on every rank. In place of those before. */
fcdp_status fcdp_tree_set_groups(fcdp_tree *tree, fcdp_group *const *groups, uint32_t n) FCDP_MUST_CHECK;

void fcdp_group_join(fcdp_group *group, fcdp_tree *tree);
/* Whom an unshard of the group asks. `by_hand`: it is not one of the framework's own hooks. */
fcdp_question fcdp_group_question(const fcdp_group *group, bool by_hand);
/* Its gradients were reduced, its parameters stepped: ask again. */
void fcdp_group_ask_again(fcdp_group *group);
/* The program unshards the group now (begun or not): its place in the order of a forward. The groups to be
 * begun ahead of their uses, at most `n` in `ahead_out`, in this order; how many. */
size_t fcdp_group_unsharded(fcdp_group *group, bool forward, fcdp_group **ahead_out, size_t n);

#endif
