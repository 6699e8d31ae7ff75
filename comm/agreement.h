/* agreement.h - what all ranks of a shard group decide alike without a message: whom to ask, whom to gather
 * ahead. Pure: events in, decisions out.
 *
 * A hit must be a hit on every rank, or collectives hang; and what one rank does alone may not move its
 * peers. So a decision to ask is made from events that all ranks of the shard group have, in the same order:
 * passes of the tree begin, its groups are unsharded, gradients are reduced. A pass is a root forward or a
 * backward. Its first unshard asks for all groups of the tree; within it a group is asked for alone when its
 * gradients have been reduced, when an optimizer stepped its parameters, or when somebody wrote into its
 * gathered copy. An unshard by hand, outside of the framework's own hooks, may come at any time and so
 * always asks.
 *
 *     agreed(g) <=> g.pass == tree.pass && !g.ask          asked for all <=> tree.agreed == tree.pass
 *
 * The agreement is of one tree (all groups under one root) in one shard group. Nothing here is thread-safe:
 * its groups' caller orders calls.
 */
#ifndef FCDP_AGREEMENT_H
#define FCDP_AGREEMENT_H

#include "base/base.h"

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
    fcdp_member *next;         /* followed it in the last forward; NULL: nobody */
};

typedef enum fcdp_question { FCDP_ASK_NOBODY, FCDP_ASK_GROUP, FCDP_ASK_TREE } fcdp_question;

void fcdp__agreement_init(fcdp_agreement *agreement);
void fcdp__agreement_begin_forward(fcdp_agreement *agreement);
void fcdp__agreement_begin_backward(fcdp_agreement *agreement);

/* The group lies under this agreement's tree from here on. It is asked for before
 * its next unshard if it did not before. */
void fcdp__member_join(fcdp_member *member, fcdp_agreement *agreement);
/* It belongs to no tree; the caller sees to it that it follows nobody. */
void fcdp__member_remove(fcdp_member *member);
void fcdp__member_ask_again(fcdp_member *member);

/* Whom an unshard of the group must ask for. `each`: the user wants every unshard to ask. */
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
/* The groups that followed last time and may begin now, at most `depth`
 * groups ahead, in `ahead_out`; how many. */
size_t fcdp__member_ahead(const fcdp_member *member, size_t depth, fcdp_member **ahead_out);

#endif
