/* tree.h - all groups under one root, in one shard group: which of them an unshard asks about, and which come
 * next.
 *
 * These are what all ranks of a shard group decide alike without a message. A hit must be a hit on every
 * rank, or collectives hang; and what one rank does alone may not move its peers. So a decision to ask is
 * made from events that all ranks of the shard group have, in the same order: passes of the tree begin, its
 * groups are unsharded, gradients are reduced. A pass is a root forward or a backward. Its first unshard asks
 * for all groups of the tree; within it a group is asked for alone when its gradients have been reduced, when
 * an optimizer stepped its parameters, or when its copy may be lost behind a use (copy.h). An unshard by
 * hand, outside of the framework's own hooks, may come at any time and so always asks.
 *
 *     agreed(g) <=> g.pass == tree.pass && !g.ask          asked for all <=> tree.agreed == tree.pass
 *
 * Calls on the groups of one tree are the caller's to order.
 */
#ifndef FCDP_TREE_H
#define FCDP_TREE_H

#include "comm/group.h"

typedef struct fcdp_tree fcdp_tree;
/* Which groups the ranks must agree on before an unshard. */
typedef enum fcdp_question { FCDP_ASK_NOBODY, FCDP_ASK_GROUP, FCDP_ASK_TREE } fcdp_question;

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
/* What an unshard of the group asks about. `by_hand`: it is not one of the framework's own hooks. */
fcdp_question fcdp_group_question(const fcdp_group *group, bool by_hand);
/* Its gradients were reduced, its parameters stepped: ask again. */
void fcdp_group_ask_again(fcdp_group *group);
/* The program unshards the group now (begun or not): its place in the order of a forward. The groups to be
 * begun ahead of their uses, at most `n` in `ahead_out`, in this order; how many. */
size_t fcdp_group_unsharded(fcdp_group *group, bool forward, fcdp_group **ahead_out, size_t n);

/* ---- the agreement of a tree: pure, events in, decisions out ---- */

typedef struct fcdp_member fcdp_member;

typedef struct fcdp_agreement {
    uint64_t pass;     /* passes begun */
    uint64_t agreed;   /* the last pass in which all groups were asked for */
    uint64_t n_agreed; /* times that all groups were asked for */
    fcdp_member *last; /* unsharded last in this forward, NULL: none yet */
} fcdp_agreement;

struct fcdp_member {           /* one group */
    fcdp_agreement *agreement; /* NULL: none yet */
    uint64_t pass;             /* of the agreement, when the group was asked for last */
    bool ask;                  /* again, before its next unshard */
    bool resharded;            /* in this pass, since it was asked for */
    bool ahead;                /* begun, and not unsharded yet by the program */
    bool live;                 /* unsharded */
    uint64_t used;             /* agreement->n_agreed when it was unsharded last; 0: never */
    fcdp_member *next;         /* followed it in the last forward; NULL: none did */
};

void fcdp__agreement_init(fcdp_agreement *agreement);
void fcdp__agreement_begin_forward(fcdp_agreement *agreement);
void fcdp__agreement_begin_backward(fcdp_agreement *agreement);

/* The group lies under this agreement's tree from here on. If it did not before, it is asked for before its
 * next unshard. */
void fcdp__member_join(fcdp_member *member, fcdp_agreement *agreement);
/* It belongs to no tree; the caller sees to it that no member has it as `next`. */
void fcdp__member_remove(fcdp_member *member);
void fcdp__member_ask_again(fcdp_member *member);

/* What an unshard of the group must ask about. `each`: the user wants every unshard to ask. */
fcdp_question fcdp__member_question(const fcdp_member *member, bool by_hand, bool each);
/* The ranks have agreed on it. */
void fcdp__member_agreed(fcdp_member *member);
/* They have agreed on all groups of the tree. */
void fcdp__agreement_agreed(fcdp_agreement *agreement);

/* The program unshards the group; in a forward this is its place in the order. */
void fcdp__member_unsharded(fcdp_member *member, bool forward);
void fcdp__member_resharded(fcdp_member *member);
/* Was it unsharded in one of the last two passes in which all groups were asked for, this one apart? */
bool fcdp__member_was_used(const fcdp_member *member);
/* The groups that followed last time and may begin now, at most `depth` groups ahead, in `ahead_out`; how
 * many. */
size_t fcdp__member_ahead(const fcdp_member *member, size_t depth, fcdp_member **ahead_out);

#endif
