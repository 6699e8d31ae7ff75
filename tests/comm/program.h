/* program.h - training programs, the same on every rank of a cluster, with
 * everything between that a user may do. */
#ifndef FCDP_TEST_PROGRAM_H
#define FCDP_TEST_PROGRAM_H

#include "tests/comm/member.h"
#include "tests/comm/random.h"

typedef struct rank_end { /* how a rank's program ended */
    fcdp_status status;   /* of the call that failed, after which it made none; FCDP_OK: it came to the end */
    int step;
    char text[CLUSTER_TEXT_BYTES];
} rank_end;

typedef struct program {
    cluster *cluster;
    uint64_t seed;
    int n_steps;
    bool plain;            /* the same short schedule every time: no random extras */
    uint32_t jitter;       /* at each call a rank lingers for a random while, up to so many turns */
    uint32_t pressure;     /* of 256: how likely another holder takes pages, at each call of each rank */
    size_t pressure_pages; /* so many of them, at most */
    /* one rank alone writes into its gathered bytes, unannounced (host_computes) */
    bool raw_writes;
    int stops;    /* the rank that stops without a word, -1: none ... */
    int stops_at; /* ... before its call of this number */
    /* out */
    char wrong[CLUSTER_TEXT_BYTES]; /* "" when every byte was right, or an error was raised after it */
    rank_end ends[CLUSTER_MAX_RANKS];
    int n_failed;  /* ranks that ended with a failure */
    int n_actions; /* calls of rank 0 */
} program;

/* To the end, or until a call fails. */
void program_run(program *p);
/* It came to its end on every rank, and all was right; fails the test. */
void program_check(const program *p);

#endif
