/* ballot.h - the maximum of every byte of the ranks' ballots, the same on all ranks of a shard group.
 *
 * The ranks of a node meet in its shared memory (fcdp__host_meeting): each lays down its ballot, and the
 * node's first rank takes their maximum. That rank alone goes out, over a carrier: in round k node i sends
 * what it knows to node i + 2^k, and learns what node i - 2^k knows (modulo n). After ceil(log2 n) rounds
 * all know all, since every distance below n is a sum of different powers of two. A node may be counted
 * twice on the way where n is no power of two, which a maximum does not mind: it is associative,
 * commutative and idempotent. Then the first rank tells its node.
 *
 *     came[i] >= s   rank i's ballot for meeting s lies there; it has read the verdict of meeting s - 1
 *     told    >= s   the verdict of meeting s lies there; all ballots of it have been read
 *
 * So nothing is written before its last reader is through, and one place per rank is enough.
 *
 * Failures. A rank that does not come, is gone or has failed makes its node's first rank fail, and that one
 * goes on through its rounds with a mark, which is part of the maximum. So a rank that gets a verdict has
 * that of all ranks' ballots, whatever happened to some: every other rank fails. A rank whose agreement has
 * failed takes part in none again.
 *
 * Nothing here is thread-safe: agreements of one shard group come one after another.
 */
#ifndef FCDP_BALLOT_H
#define FCDP_BALLOT_H

#include "comm/topology.h"
#include "tiering/board.h"

/* How bytes pass between the first ranks of the nodes. */
typedef struct fcdp_carrier {
    void *ctx;
    /* Sends `bytes` to node `to`, and receives as many from node `from`, which makes the same call the other
     * way round; within timeout_s. After a failure other swaps may still succeed. A node whose first rank has
     * ended, or has given up, fails those that wait for it. */
    fcdp_status (*swap)(void *ctx, uint32_t to, uint32_t from, const void *sent, void *received_out,
                        size_t bytes, double timeout_s);
} fcdp_carrier;

typedef struct fcdp_ballots { /* of one rank in one shard group; zeroes but for the first three */
    fcdp_host_block *meeting; /* fcdp__host_meeting; with as many slices as the node has ranks */
    fcdp_topology topology;
    double timeout_s;
    uint32_t n_meetings; /* so far, the same on every rank */
    bool failed;
    uint64_t sent_bytes; /* by this rank to other nodes */
} fcdp_ballots;

/* How a ballot begins between nodes: ranks whose ballots differ in length find that out by these. */
enum { FCDP_BALLOT_FRAME_BYTES = 1024 };

/* Replaces n votes by their maximum over the ranks. `number`: of the agreement, the same on every rank.
 * FCDP_ERR_INVALID on all of them: numbers or n differ. Else a failure is this rank's last agreement:
 * FCDP_ERR_TIMEOUT, FCDP_ERR_PEER, or what the carrier says. It takes up to timeout_s from when this rank
 * comes until the node's first rank does, and as long again until that one has told. */
fcdp_status fcdp__ballots_agree(fcdp_ballots *ballots, const fcdp_carrier *carrier, uint64_t number,
                                uint8_t *votes, size_t n) FCDP_MUST_CHECK;

/* ceil(log2 n_nodes) */
uint32_t fcdp__ballot_n_rounds(uint32_t n_nodes);

#endif
