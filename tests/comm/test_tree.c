/* When ranks ask each other, against an oracle: all ranks have the same collective
 * events in the same order; between them each has events of its own, at random, which
 * may change no decision. The oracle is one for all, and knows only the collective ones.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "comm/tree.h"
#include "tests/comm/random.h"

enum { N_RANKS = 4, N_GROUPS = 6, N_TREES = 2, NOBODY = -1, MAX_AHEAD = 8 };

typedef struct rank {
    fcdp_agreement trees[N_TREES];
    fcdp_member groups[N_GROUPS];
} rank;

/* What every rank must think. */
typedef struct oracle {
    int tree[N_GROUPS];  /* that the group lies under */
    bool asked[N_TREES]; /* for all groups of the tree, in this pass */
    /* something was unsharded by the framework in this pass, or may yet be */
    bool passes[N_TREES];
    bool agreed[N_GROUPS];  /* in this pass, and nothing has happened since */
    bool reduced[N_GROUPS]; /* and not asked for since */
    bool live[N_GROUPS], ahead[N_GROUPS];
    int last[N_TREES], next[N_GROUPS]; /* of the forward */
    /* times that all groups were asked for; and how often they had been when this one was unsharded last */
    int n_asked[N_TREES], used[N_GROUPS];
} oracle;

typedef struct world {
    rank ranks[N_RANKS];
    oracle o;
    test_random random;
    bool each; /* FCDP_AGREE=unshard */
} world;

#define EVERY_RANK(w, r) for (rank *r = (w)->ranks; r < (w)->ranks + N_RANKS; r++)

static void world_make(world *w, uint64_t seed) {
    *w = (world){.random = {seed}};
    w->each = random_below(&w->random, 8) == 0;
    EVERY_RANK(w, r)
    for (int t = 0; t < N_TREES; t++) fcdp__agreement_init(&r->trees[t]);
    for (int t = 0; t < N_TREES; t++) w->o.last[t] = NOBODY;
    for (int g = 0; g < N_GROUPS; g++) {
        w->o.next[g] = NOBODY;
        w->o.tree[g] = random_below(&w->random, 4) == 0;
        EVERY_RANK(w, r) fcdp__member_join(&r->groups[g], &r->trees[w->o.tree[g]]);
    }
}

/* ---- what a rank does alone ---- */

static void alone(world *w, rank *r) {
    int g = (int)random_below(&w->random, N_GROUPS), t = (int)random_below(&w->random, N_TREES);
    switch (random_below(&w->random, 4)) {
    case 0:
        /* its optimizer stepped, the others' have not */
        if (w->o.reduced[g]) fcdp__member_ask_again(&r->groups[g]);
        break;
    /* evaluated alone, with all groups held by hand: nothing is
     * unsharded, and the next pass has yet to begin */
    case 1:
        if (!w->o.passes[t]) fcdp__agreement_begin_forward(&r->trees[t]);
        break;
    case 2:
        (void)fcdp__member_question(&r->groups[g], false, w->each); /* to ask is no event */
        break;
    default: break;
    }
}

/* ---- collective events ---- */

static void pass_begins(world *w, int t) {
    bool forward = random_below(&w->random, 2);
    w->o.asked[t] = false;
    w->o.passes[t] = true;
    w->o.last[t] = NOBODY;
    for (int g = 0; g < N_GROUPS; g++)
        if (w->o.tree[g] == t) w->o.agreed[g] = false;
    EVERY_RANK(w, r) {
        if (forward)
            fcdp__agreement_begin_forward(&r->trees[t]);
        else
            fcdp__agreement_begin_backward(&r->trees[t]);
    }
}

static fcdp_question expected_question(const world *w, int g, bool by_hand) {
    if (by_hand || w->each) return FCDP_ASK_GROUP;
    if (!w->o.asked[w->o.tree[g]]) return FCDP_ASK_TREE;
    return w->o.agreed[g] ? FCDP_ASK_NOBODY : FCDP_ASK_GROUP;
}

/* As a vote does: what was begun ahead is ended first. */
static void group_asked(world *w, int g) {
    w->o.agreed[g] = true;
    w->o.reduced[g] = false;
    EVERY_RANK(w, r) {
        if (r->groups[g].ahead) fcdp__member_resharded(&r->groups[g]);
        fcdp__member_agreed(&r->groups[g]);
        assert_false(r->groups[g].resharded);
    }
    w->o.ahead[g] = false;
}

static void ask(world *w, int g, bool by_hand) {
    fcdp_question question = expected_question(w, g, by_hand);
    EVERY_RANK(w, r) assert_int_equal(fcdp__member_question(&r->groups[g], by_hand, w->each), question);
    if (question == FCDP_ASK_GROUP) group_asked(w, g);
    if (question != FCDP_ASK_TREE) return;
    for (int other = 0; other < N_GROUPS; other++)
        if (w->o.tree[other] == w->o.tree[g]) group_asked(w, other);
    EVERY_RANK(w, r) fcdp__agreement_agreed(&r->trees[w->o.tree[g]]);
    w->o.asked[w->o.tree[g]] = true;
    w->o.n_asked[w->o.tree[g]]++;
}

static bool was_used(const oracle *o, int g) {
    return o->used[g] && o->n_asked[o->tree[g]] - o->used[g] <= 2;
}

/* The groups that followed last time, up to one that is in use, was not agreed on, or is used no more. */
static int expected_ahead(const world *w, int g, int depth, int *ahead_out) {
    const oracle *o = &w->o;
    int n = 0;
    for (int at = g, i = 0; i < depth; i++) {
        int next = o->next[at];
        if (next == NOBODY || next == g || o->live[next] || !o->agreed[next] || !was_used(o, next)) break;
        if (!o->ahead[next]) ahead_out[n++] = next;
        at = next;
    }
    return n;
}

static void begin_ahead(world *w, int g) {
    int depth = (int)random_below(&w->random, 4), expected[MAX_AHEAD],
        n = expected_ahead(w, g, depth, expected);
    EVERY_RANK(w, r) {
        fcdp_member *ahead[MAX_AHEAD];
        assert_int_equal(fcdp__member_ahead(&r->groups[g], (size_t)depth, ahead), n);
        for (int i = 0; i < n; i++) assert_ptr_equal(ahead[i], &r->groups[expected[i]]);
        for (int i = 0; i < n; i++) ahead[i]->ahead = true; /* as begin does */
    }
    for (int i = 0; i < n; i++) w->o.ahead[expected[i]] = true;
}

static void unshard(world *w, int g) {
    bool by_hand = random_below(&w->random, 6) == 0, forward = !by_hand && random_below(&w->random, 2);
    int t = w->o.tree[g];
    if (w->o.live[g] || !(by_hand || w->o.passes[t])) return;
    ask(w, g, by_hand);
    assert_true(w->o.agreed[g]); /* whatever the answer, it is of this pass */
    EVERY_RANK(w, r) fcdp__member_unsharded(&r->groups[g], forward);
    w->o.live[g] = true;
    w->o.ahead[g] = false;
    w->o.used[g] = w->o.n_asked[t];
    if (!forward) return;
    if (w->o.last[t] != NOBODY && w->o.last[t] != g) w->o.next[w->o.last[t]] = g;
    w->o.last[t] = g;
    if (!w->each) begin_ahead(w, g);
}

static void reshard(world *w, int g) {
    if (!w->o.live[g]) return;
    w->o.live[g] = false;
    EVERY_RANK(w, r) {
        fcdp__member_resharded(&r->groups[g]);
        assert_true(r->groups[g].resharded);
    }
}

static void reduced(world *w, int g) {
    w->o.agreed[g] = false;
    w->o.reduced[g] = true;
    EVERY_RANK(w, r) fcdp__member_ask_again(&r->groups[g]);
}

/* A part of the model gets another root: no group follows it, and it follows none. */
static void group_moves(world *w, int g) {
    int to = (int)random_below(&w->random, N_TREES), from = w->o.tree[g];
    if (to == from) return;
    EVERY_RANK(w, r) {
        for (int other = 0; other < N_GROUPS; other++)
            if (r->groups[other].next == &r->groups[g]) r->groups[other].next = NULL;
        fcdp__member_remove(&r->groups[g]);
        fcdp__member_join(&r->groups[g], &r->trees[to]);
    }
    for (int other = 0; other < N_GROUPS; other++)
        if (w->o.next[other] == g) w->o.next[other] = NOBODY;
    if (w->o.last[from] == g) w->o.last[from] = NOBODY;
    w->o.tree[g] = to;
    w->o.next[g] = NOBODY;
    w->o.agreed[g] = w->o.reduced[g] = false;
    w->o.used[g] = 0;
}

static void one_event(world *w) {
    int g = (int)random_below(&w->random, N_GROUPS), t = (int)random_below(&w->random, N_TREES);
    switch (random_below(&w->random, 16)) {
    case 0: pass_begins(w, t); break;
    case 1:
        w->o.passes[t] = false; /* the framework's last unshard of the pass was */
        break;
    case 2:
    case 3: reduced(w, g); break;
    case 4: group_moves(w, g); break;
    case 5:
    case 6:
    case 7:
    case 8: reshard(w, g); break;
    default: unshard(w, g); break;
    }
}

static void test_random_events(void **state) {
    (void)state;
    test_random random = {random_seed("test_random_events", 3)};
    int n_trusted = 0;
    for (int round = 0; round < 400; round++) {
        world w;
        world_make(&w, random_next(&random));
        for (int event = 0; event < 300; event++) {
            one_event(&w);
            EVERY_RANK(&w, r) while (random_below(&w.random, 3) == 0) alone(&w, r);
            for (int g = 0; g < N_GROUPS; g++)
                n_trusted += w.o.passes[w.o.tree[g]] && expected_question(&w, g, false) == FCDP_ASK_NOBODY;
        }
    }
    assert_true(n_trusted > 10000); /* the events are such that trust comes about */
}

/* ---- the plain course of a training step ---- */

static fcdp_question question(fcdp_member *member) {
    return fcdp__member_question(member, false, false);
}

static void pass(fcdp_agreement *tree, fcdp_member *groups, bool forward, int *n_asked) {
    if (forward)
        fcdp__agreement_begin_forward(tree);
    else
        fcdp__agreement_begin_backward(tree);
    for (int k = 0; k < N_GROUPS; k++) {
        int g = forward ? k : N_GROUPS - 1 - k;
        if (question(&groups[g]) == FCDP_ASK_TREE) {
            for (int i = 0; i < N_GROUPS; i++) fcdp__member_agreed(&groups[i]);
            fcdp__agreement_agreed(tree);
            ++*n_asked;
        }
        assert_int_equal(question(&groups[g]), FCDP_ASK_NOBODY);
        fcdp__member_unsharded(&groups[g], forward);
        fcdp__member_resharded(&groups[g]);
        if (!forward) fcdp__member_ask_again(&groups[g]);
    }
}

static void test_a_micro_batch_asks_twice(void **state) {
    (void)state;
    fcdp_agreement tree;
    fcdp_member groups[N_GROUPS] = {{0}}, *ahead[MAX_AHEAD];
    int n_asked = 0;
    fcdp__agreement_init(&tree);
    for (int g = 0; g < N_GROUPS; g++) fcdp__member_join(&groups[g], &tree);
    for (int micro_batch = 1; micro_batch <= 3; micro_batch++) {
        pass(&tree, groups, true, &n_asked);
        assert_int_equal(fcdp__member_ahead(&groups[1], 3, ahead), 3);
        assert_ptr_equal(ahead[0], &groups[2]);
        pass(&tree, groups, false, &n_asked);
        assert_int_equal(n_asked, 2 * micro_batch);
        assert_int_equal(fcdp__member_ahead(&groups[1], 3, ahead), 0); /* all of them were reduced */
    }
}

/* The last group of a forward is used no more: what has no successor would name it for good. */
static void test_a_group_that_is_used_no_more_is_not_begun(void **state) {
    (void)state;
    fcdp_agreement tree;
    fcdp_member groups[2] = {{0}}, *ahead[MAX_AHEAD];
    size_t n[5];
    fcdp__agreement_init(&tree);
    for (int g = 0; g < 2; g++) fcdp__member_join(&groups[g], &tree);
    for (int step = 0; step < 5; step++) {
        fcdp__agreement_begin_forward(&tree);
        for (int g = 0; g < 2; g++) fcdp__member_agreed(&groups[g]);
        fcdp__agreement_agreed(&tree);
        for (int g = 0; g < (step ? 1 : 2); g++) {
            fcdp__member_unsharded(&groups[g], true);
            fcdp__member_resharded(&groups[g]);
        }
        n[step] = fcdp__member_ahead(&groups[0], 3, ahead);
    }
    assert_int_equal(n[1], 1);
    assert_int_equal(n[2], 1);
    assert_int_equal(n[3], 0);
    assert_int_equal(n[4], 0);
}

static void test_a_group_that_was_reduced_is_asked_for_alone(void **state) {
    (void)state;
    fcdp_agreement tree;
    fcdp_member groups[N_GROUPS] = {{0}};
    int n_asked = 0;
    fcdp__agreement_init(&tree);
    for (int g = 0; g < N_GROUPS; g++) fcdp__member_join(&groups[g], &tree);
    pass(&tree, groups, true, &n_asked);
    fcdp__member_ask_again(&groups[2]);
    assert_int_equal(question(&groups[2]), FCDP_ASK_GROUP);
    assert_int_equal(question(&groups[3]), FCDP_ASK_NOBODY);
    fcdp__member_agreed(&groups[2]);
    assert_int_equal(question(&groups[2]), FCDP_ASK_NOBODY);
    assert_int_equal(fcdp__member_question(&groups[3], true, false), FCDP_ASK_GROUP); /* by hand: always */
    /* the user wants it so */
    assert_int_equal(fcdp__member_question(&groups[3], false, true), FCDP_ASK_GROUP);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_micro_batch_asks_twice),
        cmocka_unit_test(test_a_group_that_is_used_no_more_is_not_begun),
        cmocka_unit_test(test_a_group_that_was_reduced_is_asked_for_alone),
        cmocka_unit_test(test_random_events),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
