/* host.h - the node's host memory for gathered parameters: one memory, shared by the node's ranks.
 *
 * It is a sparse memfd (shared.h). The leader, the first of the node's ranks in a shard group, creates it,
 * and the others open it. The leader allocates blocks in it (offsets.h). Every rank attaches a block at the
 * agreed offset: it maps the block, binds its slice to its device's NUMA node (and those that it copies, to
 * their ranks' nodes) and pins the bytes that it copies.
 *
 * A block is one 4 KiB page of words, by which the node's ranks see each other (board.h), and then the data:
 * once, or once for each NUMA node that ranks take their pages from (FCDP_HOST_COPIES=numa, `per_numa_node`).
 * A block of data_bytes takes 4 KiB + n_copies * round_up(data_bytes, 4 KiB) of the host budget (account.h).
 *
 * With several copies each rank writes its pieces to all of them and reads from its own, whose pages come
 * from its NUMA node. So each byte crosses between two NUMA nodes once, when it is written. A word of the
 * board is raised behind the last of these writes: it says that the owner's pieces are in every copy, and a
 * copy is complete when the words of all ranks have come. A word for each copy would let no rank go earlier:
 * it waits for the ranks of the other NUMA nodes, and these write its copy last. A rank that dies between two
 * copies has not raised its word, and no rank reads either of them.
 *
 * A rank that restores its slice alone reads from its own NUMA node with one copy already.
 */
#ifndef FCDP_HOST_H
#define FCDP_HOST_H

#include "alloc/driver.h"
#include "base/options.h"
#include "base/trace.h"
#include "tiering/account.h"
#include "tiering/layout.h"

typedef struct fcdp_host fcdp_host;
typedef struct fcdp_host_block fcdp_host_block;

typedef struct fcdp_host_config {
    fcdp_driver *drv;
    fcdp_account *account; /* borrowed */
    int numa_node;         /* that pages of its slices come from; -1: wherever */
    fcdp_counts *counts;   /* FCDP_COUNT_HOST_NEAR_BYTES and _FAR_BYTES; NULL: they are not counted */
    fcdp_pin_mode pin;
    /* a copy of a block's data in each NUMA node that ranks of the node take their pages from, instead of one
     * copy; on every rank of the node alike. A rank with numa_node -1 reads the first copy */
    bool per_numa_node;
    /* this rank's index among the shard group's ranks on the node, their number (<= FCDP_MAX_SLICES) */
    uint32_t slice, n_slices;
    double timeout_s;
} fcdp_host_config;

fcdp_status fcdp__host_create(const fcdp_host_config *config, fcdp_host **host_out,
                              fcdp_shared_ticket *ticket_out) FCDP_MUST_CHECK;
fcdp_status fcdp__host_join(const fcdp_host_config *config, const fcdp_shared_ticket *ticket,
                            fcdp_host **host_out) FCDP_MUST_CHECK;
/* Every block detached. Cannot fail. */
void fcdp__host_destroy(fcdp_host *host);

/* Try whether a job's first rank gets from this machine what it needs (a host budget, addresses, a memfd) for
 * `option_bytes` (0: what the machine and its cgroup allow). Gives everything back. */
fcdp_status fcdp__host_try(size_t option_bytes) FCDP_MUST_CHECK;

/* How many copies of its data a block has here; with per_numa_node, 0 until every rank has joined. */
uint32_t fcdp__host_copies(const fcdp_host *host);

/* Leader only. FCDP_ERR_NO_HOST_MEM, with a text, if the host budget is spent. With per_numa_node, as
 * fcdp__host_attach, only once every rank of the node has joined: FCDP_ERR_INVALID. */
fcdp_status fcdp__host_block_alloc(fcdp_host *host, size_t data_bytes, uint64_t *offset_out) FCDP_MUST_CHECK;
/* Leader only. The block goes back to the system once every rank has detached, since peers may still read
 * there. */
void fcdp__host_block_free(fcdp_host *host, uint64_t offset);
/* This rank has failed. The others see that, and ignore the words that it raises from here on. */
void fcdp__host_fail(fcdp_host *host);
/* Has another rank failed, and which? Acquire: a thread that has seen a word raised by it sees the
 * failure. */
bool fcdp__host_peer_failed(const fcdp_host *host, uint32_t *slice_out);

/* Leader: give the freed blocks that every rank has detached back to the system. Others: do nothing. */
void fcdp__host_reap(fcdp_host *host);

/* What this rank does with a block of one copy, by span; the pieces ascend, and may be empty. (Of several
 * copies it page-locks all, since its pieces lie all over them.) */
typedef struct fcdp_host_share {
    fcdp_piece own[FCDP_N_SPANS];    /* its slices: they come from its NUMA node */
    fcdp_piece copied[FCDP_N_SPANS]; /* what it copies in the ordinary case: page-locked */
} fcdp_host_share;

/* Where the node's ranks meet: a block outside the host budget, mapped by every rank as long as its host
 * lasts. It holds FCDP_MEETING_BYTES for each slice, one after another. No device sees it. */
enum { FCDP_MEETING_BYTES = 64 << 10 };
fcdp_host_block *fcdp__host_meeting(fcdp_host *host);

/* Map `data_bytes` at `offset`, bind and pin this rank's share (NULL: all of them). With FCDP_PIN_AUTO a
 * refusal to pin is a warning (once), with REQUIRE FCDP_ERR_OPTION. */
fcdp_status fcdp__host_attach(fcdp_host *host, uint64_t offset, size_t data_bytes,
                              const fcdp_host_share *share, fcdp_host_block **block_out) FCDP_MUST_CHECK;
/* How many of the `bytes` of data at `at` one transfer may cover, since CUDA takes none that is page-locked
 * in part, and whether they are page-locked. Without a driver none are. */
size_t fcdp__host_run_bytes(const fcdp_host_block *block, const void *at, size_t bytes, bool *pinned_out);
void fcdp__host_detach(fcdp_host_block *block);
/* The copy that this rank reads. */
void *fcdp__host_data(const fcdp_host_block *block);
/* Every copy, which this rank writes: `copy` < fcdp__host_block_copies. */
uint32_t fcdp__host_block_copies(const fcdp_host_block *block);
void *fcdp__host_copy(const fcdp_host_block *block, uint32_t copy);
size_t fcdp__host_data_bytes(const fcdp_host_block *block);

#endif
