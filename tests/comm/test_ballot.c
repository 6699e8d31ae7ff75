/* Agreements between threads that stand for the ranks of 1 to 9 nodes, against an oracle: the maximum of what
 * all ranks brought. A rank that comes to a verdict has that one, whatever happens to other ranks; and all
 * come to an end.
 *
 * A node's threads have its memory in common, so that TSan sees every access. A first rank that dies inside
 * of an agreement goes on with memory of its own, which no other rank sees.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "comm/ballot.h"
#include "tests/assert_ok.h"
#include "tests/comm/random.h"
#include "tiering/host_internal.h"
#include "tiering/shared.h"

enum { MAX_NODES = 9, MAX_LOCAL = 4, MAX_RANKS = MAX_NODES * MAX_LOCAL, MAX_ROUNDS = 4, MAX_VOTES = 200000 };
enum { BOARD_BYTES = 4096, DATA_BYTES = MAX_LOCAL * FCDP_MEETING_BYTES };

/* ---- nodes, and what passes between them ---- */

typedef struct message {
    struct message *next;
    size_t n;
    uint8_t bytes[];
} message;

typedef struct node {
    fcdp_slab_header header;
    _Alignas(64) char memory[BOARD_BYTES + DATA_BYTES];
    bool is_silent;           /* its first rank is gone, or has given up */
    message *from[MAX_NODES]; /* from each node, the first one first */
} node;

typedef enum fault {
    NO_FAULT,
    COMES_NOT,      /* it is gone before */
    COMES_LATE,     /* when all others are through */
    DIES_IN_A_SWAP, /* this and what follows are of a first rank */
    DIES_HAVING_SENT,
    DIES_BEFORE_IT_TELLS,
    N_FAULTS
} fault;

typedef struct world world;

typedef struct rank {
    world *w;
    fcdp_host host;
    fcdp_host_block block;
    fcdp_ballots ballots;
    fcdp_carrier carrier;
    pthread_t thread;
    char *grave; /* its memory once it has died inside */
    fault fault;
    uint32_t fault_round, n_swaps;
    /* of one agreement */
    uint64_t number;
    size_t n;
    uint8_t *votes;
    bool comes;
    fcdp_status status;
    char text[256];
} rank;

struct world {
    uint32_t n_nodes, n_local, n_ranks;
    node *nodes;
    rank ranks[MAX_RANKS];
    test_random random;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    uint32_t n_through; /* ranks, of this agreement; guarded, as is what nodes have of each other */
    uint8_t *expected;
};

static void node_fall_silent(world *w, uint32_t i) {
    pthread_mutex_lock(&w->mutex);
    w->nodes[i].is_silent = true;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->mutex);
}

/* From here on its words and bytes go where no rank looks. */
static fcdp_status die(rank *r) {
    r->grave = calloc(1, BOARD_BYTES + DATA_BYTES);
    assert_non_null(r->grave);
    atomic_store_explicit(&r->host.header->members[0].pid, FCDP_MEMBER_LEFT, memory_order_release);
    r->block.board = (fcdp_board_line *)(void *)r->grave;
    r->block.data = r->grave + BOARD_BYTES;
    node_fall_silent(r->w, r->ballots.topology.node);
    return fcdp__fail(FCDP_ERR_PEER, "dead");
}

static void message_send(world *w, uint32_t from, uint32_t to, const void *bytes, size_t n) {
    message *m = malloc(sizeof *m + n), **link = &w->nodes[to].from[from];
    assert_non_null(m);
    *m = (message){.n = n};
    memcpy(m->bytes, bytes, n);
    pthread_mutex_lock(&w->mutex);
    while (*link) link = &(*link)->next;
    *link = m;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->mutex);
}

static fcdp_status message_receive(world *w, uint32_t from, uint32_t to, void *bytes_out, size_t n,
                                   double timeout_s) {
    message **link = &w->nodes[to].from[from], *m;
    uint64_t until_ns = fcdp__now_ns() + (uint64_t)(timeout_s * 1e9);
    bool in_time = true;
    pthread_mutex_lock(&w->mutex);
    while (!*link && !w->nodes[from].is_silent && in_time)
        in_time = fcdp__condition_wait(&w->changed, &w->mutex, until_ns);
    m = *link;
    if (m) *link = m->next;
    pthread_mutex_unlock(&w->mutex);
    if (!m) return fcdp__fail(in_time ? FCDP_ERR_PEER : FCDP_ERR_TIMEOUT, "node %u is silent", from);
    assert_int_equal(m->n, n); /* a carrier may fall over bytes that it did not expect */
    memcpy(bytes_out, m->bytes, n);
    free(m);
    return FCDP_OK;
}

static fcdp_status swap(void *ctx, uint32_t to, uint32_t from, const void *sent, void *received_out,
                        size_t bytes, double timeout_s) {
    rank *r = ctx;
    uint32_t me = r->ballots.topology.node;
    bool is_round = r->n_swaps++ == r->fault_round;
    if (r->grave) return FCDP_ERR_PEER;
    if (is_round && r->fault == DIES_IN_A_SWAP) return die(r);
    message_send(r->w, me, to, sent, bytes);
    if (is_round && r->fault == DIES_HAVING_SENT) return die(r);
    fcdp_status status = message_receive(r->w, from, me, received_out, bytes, timeout_s);
    bool is_last = r->n_swaps == fcdp__ballot_n_rounds(r->w->n_nodes);
    if (is_last && r->fault == DIES_BEFORE_IT_TELLS) return die(r);
    return status;
}

/* ---- ranks ---- */

static void world_make(world *w, uint32_t n_nodes, uint32_t n_local, double timeout_s, uint64_t seed) {
    uint64_t start_time;
    *w = (world){.n_nodes = n_nodes, .n_local = n_local, .n_ranks = n_nodes * n_local, .random = {seed}};
    pthread_mutex_init(&w->mutex, NULL);
    fcdp__condition_init(&w->changed);
    w->nodes = aligned_alloc(64, n_nodes * sizeof *w->nodes);
    w->expected = malloc(MAX_VOTES);
    assert_true(w->nodes && w->expected && fcdp__process_start_time(getpid(), &start_time));
    memset(w->nodes, 0, n_nodes * sizeof *w->nodes);
    for (uint32_t i = 0; i < w->n_ranks; i++) {
        rank *r = &w->ranks[i];
        node *at = &w->nodes[i / n_local];
        at->header.members[i % n_local].start_time = start_time;
        atomic_store(&at->header.members[i % n_local].pid, getpid());
        r->w = w;
        r->host = (fcdp_host){.config = {.slice = i % n_local, .n_slices = n_local, .timeout_s = timeout_s},
                              .header = &at->header};
        r->block = (fcdp_host_block){.host = &r->host,
                                     .board = (fcdp_board_line *)(void *)at->memory,
                                     .data = at->memory + BOARD_BYTES,
                                     .data_bytes = DATA_BYTES};
        r->ballots = (fcdp_ballots){.meeting = &r->block,
                                    .topology = {w->n_ranks, n_nodes, n_local, i, i / n_local, i % n_local},
                                    .timeout_s = timeout_s};
        r->carrier = (fcdp_carrier){.ctx = r, .swap = swap};
        r->votes = malloc(MAX_VOTES);
        assert_non_null(r->votes);
    }
}

static void world_end(world *w) {
    for (uint32_t i = 0; i < w->n_ranks; i++) {
        free(w->ranks[i].votes);
        free(w->ranks[i].grave);
    }
    for (uint32_t i = 0; i < w->n_nodes; i++)
        for (uint32_t k = 0; k < w->n_nodes; k++)
            while (w->nodes[i].from[k]) {
                message *m = w->nodes[i].from[k];
                w->nodes[i].from[k] = m->next;
                free(m);
            }
    free(w->nodes);
    free(w->expected);
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->mutex);
}

static void *rank_main(void *arg) {
    rank *r = arg;
    world *w = r->w;
    pthread_mutex_lock(&w->mutex);
    while (r->fault == COMES_LATE && w->n_through < w->n_ranks - 1) pthread_cond_wait(&w->changed, &w->mutex);
    pthread_mutex_unlock(&w->mutex);
    r->status = r->comes ? fcdp__ballots_agree(&r->ballots, &r->carrier, r->number, r->votes, r->n)
                         : FCDP_ERR_PEER;
    if (r->comes && r->status) snprintf(r->text, sizeof r->text, "%s", fcdp_error_text());
    bool gives_up = r->status != FCDP_OK && r->status != FCDP_ERR_INVALID;
    if (gives_up && r->ballots.topology.local == 0) node_fall_silent(w, r->ballots.topology.node);
    pthread_mutex_lock(&w->mutex);
    w->n_through++;
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->mutex);
    return NULL;
}

static size_t some_length(test_random *random) {
    switch (random_below(random, 8)) {
    case 0: return 0;
    case 1: return 985 + random_below(random, 12); /* about a frame */
    case 2: return random_below(random, MAX_VOTES);
    default: return random_below(random, 400);
    }
}

/* Ballots of one length, mostly of zeroes, and their maximum. */
static void ballots_make(world *w, uint64_t number) {
    size_t n = some_length(&w->random);
    memset(w->expected, 0, MAX_VOTES);
    for (uint32_t i = 0; i < w->n_ranks; i++) {
        rank *r = &w->ranks[i];
        r->n = n;
        r->number = number;
        r->n_swaps = 0;
        memset(r->votes, 0, n);
        for (uint64_t k = random_below(&w->random, 20); n && k > 0; k--)
            r->votes[random_below(&w->random, n)] = (uint8_t)random_next(&w->random);
        for (size_t k = 0; k < n; k++)
            if (r->votes[k] > w->expected[k]) w->expected[k] = r->votes[k];
    }
}

static void meet(world *w) {
    w->n_through = 0;
    for (uint32_t i = 0; i < w->n_ranks; i++)
        assert_int_equal(fcdp__thread_start(rank_main, &w->ranks[i], &w->ranks[i].thread), 0);
    for (uint32_t i = 0; i < w->n_ranks; i++) assert_int_equal(pthread_join(w->ranks[i].thread, NULL), 0);
}

static bool has_the_maximum(const rank *r) {
    return memcmp(r->votes, r->w->expected, r->n) == 0;
}

static void all_agree(world *w, uint64_t number) {
    ballots_make(w, number);
    meet(w);
    for (uint32_t i = 0; i < w->n_ranks; i++) {
        if (w->ranks[i].status) fail_msg("rank %u: %s", i, w->ranks[i].text);
        assert_true(has_the_maximum(&w->ranks[i]));
    }
}

#define EVERY_SHAPE(n_nodes, n_local)                                                                        \
    for (uint32_t n_nodes = 1; n_nodes <= MAX_NODES; n_nodes++)                                              \
        for (uint32_t n_local = 1; n_local <= MAX_LOCAL; n_local++)

/* Of the shapes, with TEST_COARSER every third by chance: threads that wait are slow under a sanitizer. */
static bool is_left_out(test_random *random) {
    return getenv("TEST_COARSER") && random_below(random, 3);
}

static void all_come(world *w) {
    for (uint32_t i = 0; i < w->n_ranks; i++) w->ranks[i].comes = true;
}

/* ---- tests ---- */

static void the_maximum_on_every_rank(void **state) {
    (void)state;
    test_random random = {random_seed("the_maximum_on_every_rank", 5)};
    EVERY_SHAPE(n_nodes, n_local) {
        world w;
        if (is_left_out(&random)) continue;
        world_make(&w, n_nodes, n_local, 60, random_next(&random));
        all_come(&w);
        for (uint64_t number = 1; number <= 12; number++) all_agree(&w, number);
        world_end(&w);
    }
}

static void as_many_bytes_as_rounds(void **state) {
    (void)state;
    static const uint32_t rounds[] = {0, 0, 1, 2, 2, 3, 3, 3, 3, 4};
    for (uint32_t n_nodes = 1; n_nodes <= MAX_NODES; n_nodes++) {
        world w;
        world_make(&w, n_nodes, 2, 60, 1);
        all_come(&w);
        for (uint32_t i = 0; i < w.n_ranks; i++) w.ranks[i].n = 300;
        meet(&w);
        assert_int_equal(fcdp__ballot_n_rounds(n_nodes), rounds[n_nodes]);
        for (uint32_t i = 0; i < w.n_ranks; i++)
            assert_int_equal(w.ranks[i].ballots.sent_bytes,
                             i % 2 == 0 ? rounds[n_nodes] * FCDP_BALLOT_FRAME_BYTES : 0);
        world_end(&w);
    }
}

/* One rank is at another agreement, or brings another number of votes. All of them are told, and go on. */
static void ranks_that_are_not_in_the_same_place(void **state) {
    (void)state;
    test_random random = {random_seed("ranks_that_are_not_in_the_same_place", 6)};
    EVERY_SHAPE(n_nodes, n_local) {
        world w;
        if (n_nodes * n_local == 1 || is_left_out(&random)) continue;
        world_make(&w, n_nodes, n_local, 60, random_next(&random));
        all_come(&w);
        for (uint64_t number = 1; number <= 6; number++) {
            ballots_make(&w, 2 * number);
            rank *other = &w.ranks[random_below(&random, w.n_ranks)];
            if (random_below(&random, 2))
                other->number += 1 + random_below(&random, 1000);
            else
                other->n += 1 + random_below(&random, 1000);
            other->n %= MAX_VOTES;
            meet(&w);
            for (uint32_t i = 0; i < w.n_ranks; i++) assert_int_equal(w.ranks[i].status, FCDP_ERR_INVALID);
            assert_non_null(strstr(w.ranks[0].text, "the ranks are not in the same place"));
            all_agree(&w, 2 * number + 1);
        }
        world_end(&w);
    }
}

/* Some agreements, one that goes wrong on one rank, and one more, to which that rank does not come. */
static void one_fault(uint32_t n_nodes, uint32_t n_local, fault fault, uint64_t seed) {
    world w;
    world_make(&w, n_nodes, n_local, fault == COMES_LATE ? 0.3 : 60, seed);
    all_come(&w);
    rank *victim = &w.ranks[random_below(&w.random, w.n_ranks)];
    uint32_t n_rounds = fcdp__ballot_n_rounds(n_nodes);
    if (fault >= DIES_IN_A_SWAP) victim = &w.ranks[victim->ballots.topology.node * n_local];
    uint64_t number = 1;
    for (uint64_t n = fault == COMES_LATE ? 0 : random_below(&w.random, 3); n > 0; n--)
        all_agree(&w, number++);
    ballots_make(&w, number++);
    victim->fault = fault;
    victim->fault_round = (uint32_t)random_below(&w.random, n_rounds ? n_rounds : 1);
    victim->comes = fault != COMES_NOT;
    if (fault == COMES_NOT) {
        atomic_store(&victim->host.header->members[victim->ballots.topology.local].pid, FCDP_MEMBER_LEFT);
        if (victim->ballots.topology.local == 0) node_fall_silent(&w, victim->ballots.topology.node);
    }
    meet(&w);
    uint32_t n_agreed = 0;
    for (uint32_t i = 0; i < w.n_ranks; i++) {
        const rank *r = &w.ranks[i];
        if (r == victim && fault != COMES_LATE) continue;
        if (!r->status) assert_true(has_the_maximum(r));
        assert_int_not_equal(r->status, FCDP_ERR_INVALID);
        n_agreed += r != victim && !r->status;
    }
    if (fault == COMES_NOT || fault == COMES_LATE) assert_int_equal(n_agreed, 0);
    ballots_make(&w, number);
    victim->comes = false;
    victim->fault = NO_FAULT;
    atomic_store(&victim->host.header->members[victim->ballots.topology.local].pid, FCDP_MEMBER_LEFT);
    if (victim->ballots.topology.local == 0) node_fall_silent(&w, victim->ballots.topology.node);
    meet(&w);
    for (uint32_t i = 0; i < w.n_ranks; i++) assert_int_not_equal(w.ranks[i].status, FCDP_OK);
    world_end(&w);
}

/* In each shape; with TEST_COARSER=k one of 2 + k / 4, by chance: threads that wait are slow under a
 * sanitizer. */
static void whatever_happens_to_one(void **state) {
    (void)state;
    test_random random = {random_seed("whatever_happens_to_one", 7)};
    const char *coarser = getenv("TEST_COARSER");
    const uint32_t one_of = coarser ? 2 + (uint32_t)atoi(coarser) / 4 : 1;
    EVERY_SHAPE(n_nodes, n_local) {
        for (fault fault = COMES_NOT; fault < N_FAULTS; fault++) {
            bool can_happen = fault < DIES_IN_A_SWAP ? n_nodes * n_local > 1 : n_nodes > 1;
            if (random_below(&random, one_of)) continue;
            if (can_happen) one_fault(n_nodes, n_local, fault, random_next(&random));
        }
    }
}

/* A rank that has failed is not waited for, though it lives. */
static void a_rank_that_has_failed_is_named(void **state) {
    (void)state;
    world w;
    world_make(&w, 2, 3, 60, 1);
    all_come(&w);
    w.ranks[4].comes = false;
    atomic_store(&w.nodes[1].header.members[1].has_failed, 1);
    meet(&w);
    for (uint32_t i = 0; i < w.n_ranks; i++) assert_int_equal(w.ranks[i].status, FCDP_ERR_PEER);
    for (uint32_t i = 3; i < 6; i += 2) {
        assert_non_null(strstr(w.ranks[i].text, "did not come from slice 1 (process "));
        assert_non_null(strstr(w.ranks[i].text, "which has failed"));
    }
    assert_non_null(strstr(w.ranks[1].text, "another node"));
    world_end(&w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_maximum_on_every_rank),
        cmocka_unit_test(as_many_bytes_as_rounds),
        cmocka_unit_test(ranks_that_are_not_in_the_same_place),
        cmocka_unit_test(whatever_happens_to_one),
        cmocka_unit_test(a_rank_that_has_failed_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
