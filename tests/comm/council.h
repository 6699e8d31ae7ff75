/* council.h - agreements between the ranks of one process: the maximum of their votes, as the control plane's
 * all-reduce gives it.
 *
 * Every rank says what it asks for, since ranks that ask for different things would hang, or worse. A rank
 * that leaves (it raised an exception) ends the agreements of the others; one that stops without a word lets
 * them run into their timeout.
 */
#ifndef FCDP_TEST_COUNCIL_H
#define FCDP_TEST_COUNCIL_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/base.h"

enum { COUNCIL_MAX_VOTES = 4096 };

typedef struct council {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    uint32_t n;
    double timeout_s;
    /* guarded by mutex */
    uint64_t round; /* agreements so far */
    uint32_t n_arrived, n_left, question;
    size_t n_votes;
    uint8_t votes[COUNCIL_MAX_VOTES], agreed[2][COUNCIL_MAX_VOTES]; /* agreed: by round % 2 */
    bool disagrees;                                                 /* ranks asked for different things */
} council;

void council_init(council *c, uint32_t n, double timeout_s);
void council_destroy(council *c);
/* Replaces the votes by their maximum. FCDP_ERR_PEER: a rank has left;
 * FCDP_ERR_TIMEOUT: a rank did not come. */
fcdp_status council_agree(council *c, uint32_t question, uint8_t *votes, size_t n_votes) FCDP_MUST_CHECK;
void council_leave(council *c);

#endif
