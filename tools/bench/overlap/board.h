/* board.h - what the ranks of the bench share beside simnet: agreements (the control plane's all-reduce) and
 * tickets. In memory that forked processes have in common.
 */
#ifndef FCDP_BENCH_BOARD_H
#define FCDP_BENCH_BOARD_H

#include <pthread.h>

#include "tiering/shared.h"

enum {
    BOARD_MAX_STEPS = 64,
    BOARD_MAX_VOTES = 256,
    BOARD_MAX_NODES = 4,
    BOARD_MAX_RANKS = 8,
    BOARD_ID_BYTES = 256
};

typedef struct board {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    uint32_t n;
    /* guarded by mutex */
    uint64_t round;
    uint32_t n_arrived;
    uint8_t votes[BOARD_MAX_VOTES], agreed[2][BOARD_MAX_VOTES]; /* agreed: by round % 2 */
    /* written before an agreement, read after it */
    fcdp_shared_ticket account[BOARD_MAX_NODES], host[BOARD_MAX_NODES];
    uint64_t offset[BOARD_MAX_NODES];
    uint8_t ids[BOARD_MAX_RANKS][BOARD_ID_BYTES]; /* of communicators, by the rank that made them */
} board;

/* Among n processes. */
void board_init(board *b, uint32_t n);
/* Replaces the votes by the ranks' maximum; all ranks come with as many. FCDP_ERR_TIMEOUT after a minute. */
fcdp_status board_agree(board *b, uint8_t *votes, size_t n_votes) FCDP_MUST_CHECK;

#endif
