/* host.h - the node's host memory for gathered parameters: one memory, shared by the node's ranks.
 *
 * A sparse memfd (shared.h) that the first of the node's ranks in a shard group (the leader) creates and the
 * others open. The leader allocates blocks in it (offsets.h); every rank attaches a block at the agreed offset: maps it, binds its
 * slice to its device's NUMA node and pins exactly the bytes that it copies.
 *
 * A block is one 4 KiB board page and then the data. The board is how the node's ranks see each other without
 * a collective: 32-bit words in shared memory, one per slice and kind, written by the slice's owner with
 * release order and read by the others with acquire order; waiting is on a futex, with a timeout and an eye
 * on the writer's life.
 *
 * A block of data_bytes costs the node's account (account.h) 4 KiB + round_up(data_bytes, 4 KiB).
 */
#ifndef FCDP_HOST_H
#define FCDP_HOST_H

#include "alloc/driver.h"
#include "alloc/options.h"
#include "tiering/account.h"
#include "tiering/layout.h"

typedef struct fcdp_host fcdp_host;
typedef struct fcdp_host_block fcdp_host_block;

typedef struct fcdp_host_config {
    fcdp_driver *drv;
    fcdp_account *account; /* borrowed */
    int numa_node;         /* -1: wherever */
    fcdp_pin_mode pin;
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

/* Leader only. FCDP_ERR_NO_HOST_MEM where the account refuses, with its text. */
fcdp_status fcdp__host_block_alloc(fcdp_host *host, size_t data_bytes, uint64_t *offset_out) FCDP_MUST_CHECK;
/* Leader only. The block goes back to the system once every rank has detached: a rank may be ahead of its
 * peers, which still read there. */
void fcdp__host_block_free(fcdp_host *host, uint64_t offset);
/* This rank has failed: a word that it raises on a board from here on means nothing. The others see it. */
void fcdp__host_fail(fcdp_host *host);
/* Has another rank failed; which one? Acquire: seen by whoever has seen a word that it raised. */
bool fcdp__host_peer_failed(const fcdp_host *host, uint32_t *slice_out);

/* Leader: give back the freed blocks that the last rank has detached since. Others: nothing. */
void fcdp__host_reap(fcdp_host *host);

/* What this rank does with a block, by span; the pieces ascend, and may be empty. */
typedef struct fcdp_host_share {
    fcdp_piece own[FCDP_N_SPANS];    /* its slices: they come from its NUMA node */
    fcdp_piece copied[FCDP_N_SPANS]; /* what it copies in the ordinary case: page-locked */
} fcdp_host_share;

/* Map `data_bytes` at `offset`, bind and pin this rank's share (NULL: all of them). With FCDP_PIN_AUTO a
 * refusal to pin is a warning (once), with REQUIRE FCDP_ERR_OPTION. */
fcdp_status fcdp__host_attach(fcdp_host *host, uint64_t offset, size_t data_bytes,
                              const fcdp_host_share *share, fcdp_host_block **block_out) FCDP_MUST_CHECK;
/* From the data's `offset_bytes` on, of at most `bytes`: what one copy may cover, since CUDA takes none that
 * is page-locked in part. Is that page-locked? Without a driver nothing is. */
size_t fcdp__host_run_bytes(const fcdp_host_block *block, size_t offset_bytes, size_t bytes,
                            bool *pinned_out);
void fcdp__host_detach(fcdp_host_block *block);
void *fcdp__host_data(const fcdp_host_block *block);
size_t fcdp__host_data_bytes(const fcdp_host_block *block);

typedef enum fcdp_board_word {
    FCDP_BOARD_STORED_0, /* region.h: epoch of span 0 of which this rank's pieces are in host memory */
    FCDP_BOARD_STORED_1, /* the same of span 1 */
    /* region.h: number of the fill for which this rank's older reads and writes are over */
    FCDP_BOARD_READY,
    FCDP_BOARD_ATTACHED, /* host.c's: 1 while this rank has the block attached */
    FCDP_BOARD_N_WORDS,
} fcdp_board_word;

/* Write this rank's word from the host and wake who waits there. */
void fcdp__board_publish(fcdp_host_block *block, fcdp_board_word word, uint32_t value);
/* Acquire: what its writer wrote before is there, whether a stream or the host wrote the word. */
uint32_t fcdp__board_read(const fcdp_host_block *block, fcdp_board_word word, uint32_t slice);
/* Where the device sees a word: for the owner's streams to write, the others' to wait for.
 * Page-locked, whatever FCDP_PIN says. */
fcdp_dptr fcdp__board_word_at(const fcdp_host_block *block, fcdp_board_word word, uint32_t slice);
/* Until (int32_t)(word[slice] - at_least) >= 0 for every slice, on the host. FCDP_ERR_TIMEOUT or, when the
 * owner's process is gone, FCDP_ERR_PEER; the text names the slices that did not come and `what`. */
fcdp_status fcdp__board_wait_all(const fcdp_host_block *block, fcdp_board_word word, uint32_t at_least,
                                 const char *what) FCDP_MUST_CHECK;
/* The same, as it is now, for somebody who has waited for waited_ns: FCDP_PENDING while some
 * have not come, live, and may come yet. */
fcdp_status fcdp__board_query_all(const fcdp_host_block *block, fcdp_board_word word, uint32_t at_least,
                                  const char *what, uint64_t waited_ns) FCDP_MUST_CHECK;
/* Raise every slice's word to `at_least`, so that whoever waits for it goes on: after
 * fcdp__host_fail, for streams whose peer is gone. */
void fcdp__board_raise(fcdp_host_block *block, fcdp_board_word word, uint32_t at_least);

#endif
