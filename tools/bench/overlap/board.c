/* board.c - agreements between the bench's ranks, under one mutex in shared memory: the bench measures the
 * engine, and not how its ranks agree. */
#include "tools/bench/overlap/board.h"

#include <errno.h>
#include <string.h>
#include <time.h>

enum { GIVE_UP_S = 60 };

void board_init(board *b, uint32_t n) {
    pthread_mutexattr_t mutex;
    pthread_condattr_t cond;
    memset(b, 0, sizeof *b);
    pthread_mutexattr_init(&mutex);
    pthread_mutexattr_setpshared(&mutex, PTHREAD_PROCESS_SHARED);
    pthread_mutex_init(&b->mutex, &mutex);
    pthread_condattr_init(&cond);
    pthread_condattr_setpshared(&cond, PTHREAD_PROCESS_SHARED);
    pthread_condattr_setclock(&cond, CLOCK_MONOTONIC);
    pthread_cond_init(&b->changed, &cond);
    b->n = n;
}

/* The last one to come ends the round. With the mutex. */
static void votes_join(board *b, const uint8_t *votes, size_t n_votes) {
    if (b->n_arrived++ == 0) memset(b->votes, 0, sizeof b->votes);
    for (size_t i = 0; i < n_votes; i++)
        if (votes[i] > b->votes[i]) b->votes[i] = votes[i];
    if (b->n_arrived < b->n) return;
    memcpy(b->agreed[b->round++ % 2], b->votes, sizeof b->votes);
    b->n_arrived = 0;
    pthread_cond_broadcast(&b->changed);
}

/* No rank begins the round after the next before all have read this one's result, so two results are
 * enough. */
fcdp_status board_agree(board *b, uint8_t *votes, size_t n_votes) {
    FCDP_CHECK(0, n_votes <= BOARD_MAX_VOTES);
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += GIVE_UP_S;
    pthread_mutex_lock(&b->mutex);
    uint64_t round = b->round;
    int waited = 0;
    votes_join(b, votes, n_votes);
    while (b->round == round && waited != ETIMEDOUT)
        waited = pthread_cond_timedwait(&b->changed, &b->mutex, &until);
    bool ended = b->round != round;
    uint32_t n_arrived = b->n_arrived;
    if (ended && n_votes) memcpy(votes, b->agreed[round % 2], n_votes);
    pthread_mutex_unlock(&b->mutex);
    if (ended) return FCDP_OK;
    return fcdp__fail(FCDP_ERR_TIMEOUT, "agreement: %u of %u ranks came within %d s", n_arrived, b->n,
                      GIVE_UP_S);
}
