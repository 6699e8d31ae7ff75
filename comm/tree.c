/* tree.c - when the ranks must agree, and which groups begin ahead of their use.
 *
 * An agreement costs a round trip between the nodes, so one at the first unshard of a pass covers all groups
 * of the tree. Each rank decides by itself when another one is due, so the decision uses only events that
 * every rank has: a count of passes, and flags that such events set. What one rank alone sees (memory is out,
 * a copy was lost) never enters here.
 *
 * The agreement is pure, and a test drives it through random orders of events (tests/comm/test_tree.c). The
 * rest of the file keeps its members, which are the groups, consistent while groups come and go. No rank is
 * asked here, and nothing is begun: unshard.c does both.
 */
#include "comm/tree.h"

#include <stddef.h>
#include <stdlib.h>
#include <unistd.h>

#include "comm/trace.h"

/* ---- the agreement ---- */

void fcdp__agreement_init(fcdp_agreement *agreement) {
    *agreement = (fcdp_agreement){.pass = 1};
}

void fcdp__agreement_begin_forward(fcdp_agreement *agreement) {
    agreement->pass++;
    agreement->last = NULL;
}

/* The order is forgotten here too: a forward that one rank alone began may not show in it. */
void fcdp__agreement_begin_backward(fcdp_agreement *agreement) {
    agreement->pass++;
    agreement->last = NULL;
}

void fcdp__member_join(fcdp_member *member, fcdp_agreement *agreement) {
    if (member->agreement == agreement) return;
    *member = (fcdp_member){.agreement = agreement, .live = member->live, .ahead = member->ahead};
}

void fcdp__member_remove(fcdp_member *member) {
    if (member->agreement && member->agreement->last == member) member->agreement->last = NULL;
    *member = (fcdp_member){.live = member->live, .ahead = member->ahead};
}

void fcdp__member_ask_again(fcdp_member *member) {
    member->ask = true;
}

fcdp_question fcdp__member_question(const fcdp_member *member, bool by_hand, bool each) {
    const fcdp_agreement *agreement = member->agreement;
    if (by_hand || each) return FCDP_ASK_GROUP;
    if (agreement->agreed != agreement->pass) return FCDP_ASK_TREE;
    return member->ask || member->pass != agreement->pass ? FCDP_ASK_GROUP : FCDP_ASK_NOBODY;
}

void fcdp__member_agreed(fcdp_member *member) {
    member->pass = member->agreement->pass;
    member->ask = member->resharded = false;
}

void fcdp__agreement_agreed(fcdp_agreement *agreement) {
    agreement->agreed = agreement->pass;
    agreement->n_agreed++;
}

void fcdp__member_unsharded(fcdp_member *member, bool forward) {
    fcdp_agreement *agreement = member->agreement;
    member->live = true;
    member->ahead = false;
    member->used = agreement->n_agreed;
    if (!forward) return;
    if (agreement->last && agreement->last != member) agreement->last->next = member;
    agreement->last = member;
}

bool fcdp__member_was_used(const fcdp_member *member) {
    return member->used > 0 && member->agreement->n_agreed - member->used <= 2;
}

void fcdp__member_resharded(fcdp_member *member) {
    member->live = member->ahead = false;
    member->resharded = true;
}

/* Not beyond a group that the program holds unsharded already, nor one that the ranks have not agreed on in
 * this pass: what is begun there could be begun on this rank alone. Nor to one that the program has ceased to
 * use, which the last group of a forward would have as its successor for good. */
size_t fcdp__member_ahead(const fcdp_member *member, size_t depth, fcdp_member **ahead_out) {
    const fcdp_agreement *agreement = member->agreement;
    const fcdp_member *at = member;
    size_t n = 0;
    for (size_t i = 0; i < depth; i++) {
        fcdp_member *next = at->next;
        if (!next || next == member || next->agreement != agreement || next->live) break;
        if (next->pass != agreement->pass || next->ask || !fcdp__member_was_used(next)) break;
        if (!next->ahead) ahead_out[n++] = next;
        at = next;
    }
    return n;
}

/* ---- trees ---- */

struct fcdp_tree {
    fcdp_comm *comm;
    fcdp_tree *next; /* guarded by the engine's lock */
    fcdp_agreement agreement;
    fcdp_group **groups;
    uint32_t n_groups;
};

fcdp_status fcdp_tree_create(fcdp_comm *comm, fcdp_tree **tree_out) {
    fcdp_tree *tree = calloc(1, sizeof *tree);
    if (!tree) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a tree");
    tree->comm = comm;
    fcdp__agreement_init(&tree->agreement);
    fcdp__lock_acquire(&comm->engine->lock);
    tree->next = comm->trees;
    comm->trees = tree;
    fcdp__lock_release(&comm->engine->lock);
    *tree_out = tree;
    return FCDP_OK;
}

/* `only`, or all members where it is NULL. A group that `only` followed has no successor then. */
static void members_remove(fcdp_comm *comm, const fcdp_agreement *agreement, fcdp_member *only) {
    fcdp__lock_acquire(&comm->engine->lock);
    for (fcdp_group *group = comm->groups; group; group = group->next) {
        if (group->member.agreement != agreement) continue;
        if (!only || &group->member == only)
            fcdp__member_remove(&group->member);
        else if (group->member.next == only)
            group->member.next = NULL;
    }
    fcdp__lock_release(&comm->engine->lock);
}

void fcdp_tree_destroy(fcdp_tree *tree) {
    if (!tree) return;
    fcdp_comm *comm = tree->comm;
    if (comm->engine->pid == getpid()) {
        members_remove(comm, &tree->agreement, NULL);
        fcdp__lock_acquire(&comm->engine->lock);
        fcdp_tree **link = &comm->trees;
        while (*link != tree) link = &(*link)->next;
        *link = tree->next;
        fcdp__lock_release(&comm->engine->lock);
    }
    free(tree->groups);
    free(tree);
}

fcdp_status fcdp_tree_set_groups(fcdp_tree *tree, fcdp_group *const *groups, uint32_t n) {
    fcdp_group **own = malloc((n + 1) * sizeof *own);
    if (!own) return fcdp__fail(FCDP_ERR_SYSTEM, "no memory for a tree of %u groups", n);
    for (uint32_t g = 0; g < n; g++) own[g] = groups[g];
    fcdp__lock_acquire(&tree->comm->engine->lock);
    free(tree->groups);
    tree->groups = own;
    tree->n_groups = n;
    fcdp__lock_release(&tree->comm->engine->lock);
    return FCDP_OK;
}

fcdp_group *const *fcdp__tree_groups(const fcdp_tree *tree, uint32_t *n_out) {
    *n_out = tree->n_groups;
    return tree->groups;
}

void fcdp__trees_forget(fcdp_group *group) {
    fcdp_comm *comm = group->comm;
    fcdp__lock_acquire(&comm->engine->lock);
    for (fcdp_tree *tree = comm->trees; tree; tree = tree->next) {
        uint32_t n = 0;
        for (uint32_t g = 0; g < tree->n_groups; g++)
            if (tree->groups[g] != group) tree->groups[n++] = tree->groups[g];
        tree->n_groups = n;
    }
    fcdp__lock_release(&comm->engine->lock);
}

/* ---- what the program does ---- */

void fcdp_tree_begin_forward(fcdp_tree *tree) {
    fcdp__agreement_begin_forward(&tree->agreement);
}

void fcdp_tree_begin_backward(fcdp_tree *tree) {
    fcdp__trace(&(fcdp_trace_event){.kind = FCDP_EVENT_PASS, .flags = FCDP_TRACE_BACKWARD});
    fcdp__agreement_begin_backward(&tree->agreement);
}

void fcdp_tree_agreed(fcdp_tree *tree) {
    fcdp__agreement_agreed(&tree->agreement);
}

void fcdp_group_join(fcdp_group *group, fcdp_tree *tree) {
    if (group->member.agreement == &tree->agreement) return;
    fcdp__tree_remove(group);
    fcdp__member_join(&group->member, &tree->agreement);
}

void fcdp__tree_remove(fcdp_group *group) {
    if (group->member.agreement) members_remove(group->comm, group->member.agreement, &group->member);
}

fcdp_question fcdp_group_question(const fcdp_group *group, bool by_hand) {
    return fcdp__member_question(&group->member, by_hand,
                                 group->comm->engine->options.agree == FCDP_AGREE_UNSHARD);
}

void fcdp_group_ask_again(fcdp_group *group) {
    fcdp__member_ask_again(&group->member);
}

/* Nothing is begun ahead where every unshard asks: the ranks have not agreed on what it would gather. */
size_t fcdp_group_unsharded(fcdp_group *group, bool forward, fcdp_group **ahead_out, size_t n) {
    enum { MAX_AHEAD = 8 };
    const fcdp_options *options = &group->comm->engine->options;
    fcdp_member *ahead[MAX_AHEAD];
    fcdp__member_unsharded(&group->member, forward);
    if (!forward || options->agree == FCDP_AGREE_UNSHARD || options->prefetch <= 0) return 0;
    if (n > MAX_AHEAD) n = MAX_AHEAD;
    size_t depth = (size_t)options->prefetch < n ? (size_t)options->prefetch : n;
    size_t n_ahead = fcdp__member_ahead(&group->member, depth, ahead);
    for (size_t i = 0; i < n_ahead; i++)
        ahead_out[i] = (fcdp_group *)(void *)((char *)ahead[i] - offsetof(fcdp_group, member));
    return n_ahead;
}
