/* agreement.c - see the header. */
#include "comm/agreement.h"

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
 * this pass: what is begun there could be begun on this rank alone. */
size_t fcdp__member_ahead(const fcdp_member *member, size_t depth, fcdp_member **ahead_out) {
    const fcdp_agreement *agreement = member->agreement;
    const fcdp_member *at = member;
    size_t n = 0;
    for (size_t i = 0; i < depth; i++) {
        fcdp_member *next = at->next;
        if (!next || next == member || next->agreement != agreement || next->live) break;
        if (next->pass != agreement->pass || next->ask) break;
        if (!next->ahead) ahead_out[n++] = next;
        at = next;
    }
    return n;
}
