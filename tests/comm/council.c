/* council.c - agreements between the ranks of one process: one mutex, one round at a time, and the faults
 * that a test asks for. */
#include "tests/comm/council.h"

#include <errno.h>
#include <string.h>
#include <time.h>

void council_init(council *c, uint32_t n, double timeout_s) {
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&c->changed, &attr);
    pthread_condattr_destroy(&attr);
    pthread_mutex_init(&c->mutex, NULL);
    c->n = n;
    c->timeout_s = timeout_s;
}

void council_destroy(council *c) {
    pthread_cond_destroy(&c->changed);
    pthread_mutex_destroy(&c->mutex);
}

/* With the mutex. */
static void vote_join(council *c, uint32_t question, const uint8_t *votes, size_t n_votes) {
    if (c->n_arrived++ == 0) {
        c->question = question;
        c->n_votes = n_votes;
        memset(c->votes, 0, sizeof c->votes);
    }
    if (c->question != question || c->n_votes != n_votes) c->disagrees = true;
    for (size_t i = 0; i < n_votes; i++)
        if (votes[i] > c->votes[i]) c->votes[i] = votes[i];
    if (c->n_arrived < c->n) return;
    memcpy(c->agreed[c->round++ % 2], c->votes, sizeof c->votes);
    c->n_arrived = 0;
    pthread_cond_broadcast(&c->changed);
}

/* With the mutex. */
static fcdp_status round_wait(council *c, uint64_t round) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    uint64_t until_ns = (uint64_t)until.tv_sec * 1000000000u + (uint64_t)until.tv_nsec +
                        (uint64_t)(c->timeout_s * 1e9);
    until = (struct timespec){(time_t)(until_ns / 1000000000u), (long)(until_ns % 1000000000u)};
    bool in_time = true;
    while (c->round == round && !c->n_left && in_time)
        in_time = pthread_cond_timedwait(&c->changed, &c->mutex, &until) != ETIMEDOUT;
    if (c->round != round) return FCDP_OK;
    if (c->n_left) return fcdp__fail(FCDP_ERR_PEER, "agreement: a rank has left");
    return fcdp__fail(FCDP_ERR_TIMEOUT, "agreement: %u of %u ranks came", c->n_arrived, c->n);
}

fcdp_status council_agree(council *c, uint32_t question, uint8_t *votes, size_t n_votes) {
    pthread_mutex_lock(&c->mutex);
    uint64_t round = c->round;
    vote_join(c, question, votes, n_votes);
    fcdp_status status = round_wait(c, round);
    if (!status && n_votes) memcpy(votes, c->agreed[round % 2], n_votes);
    if (!status && c->disagrees)
        status = fcdp__fail(FCDP_ERR_INVALID, "agreement: the ranks asked for different things");
    pthread_mutex_unlock(&c->mutex);
    return status;
}

void council_leave(council *c) {
    pthread_mutex_lock(&c->mutex);
    c->n_left++;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->mutex);
}
