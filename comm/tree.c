/* tree.c - see the header. */
#include "comm/tree.h"

#include <stddef.h>
#include <stdlib.h>
#include <unistd.h>

#include "comm/trace.h"

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
