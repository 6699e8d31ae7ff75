/* host.h - the node's host memory for gathered parameters: one memory, shared by the node's ranks.
 *
 * A sparse memfd (shared.h) that the first of the node's ranks in a shard group (the leader) creates and the others open. The leader carves blocks out of it with a private jemalloc arena (whose
 * size-class slack is never touched, hence never backed); every rank attaches a block at the agreed offset: maps it, binds it to the
 * device's NUMA node and pins exactly the bytes used.
 *
 * A block is one 4 KiB board page and then the data. The board is how the node's ranks see each other without a
 * collective: 32-bit words in shared memory, one per slice and kind, written by the slice's owner with release order and
 * read by the others with acquire order; waiting is on a futex, with a timeout and an eye on the writer's life.
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
    fcdp_account *account;              /* borrowed */
    int numa_node;                      /* -1: wherever */
    fcdp_pin_mode pin;
    uint32_t slice, n_slices;           /* this rank's index among the shard group's ranks on the node, their number (<= FCDP_MAX_SLICES) */
    double timeout_s;
} fcdp_host_config;

fcdp_status fcdp__host_create(const fcdp_host_config *config, fcdp_host **host_out, fcdp_shared_ticket *ticket_out) FCDP_MUST_CHECK;
fcdp_status fcdp__host_join(const fcdp_host_config *config, const fcdp_shared_ticket *ticket, fcdp_host **host_out) FCDP_MUST_CHECK;
/* Every block detached. Cannot fail. */
void fcdp__host_destroy(fcdp_host *host);

/* Leader only. FCDP_ERR_NO_HOST_MEM where the account refuses, with its text. */
fcdp_status fcdp__host_carve(fcdp_host *host, size_t data_bytes, uint64_t *offset_out) FCDP_MUST_CHECK;
/* Leader only. The block goes back to the system once every rank has detached: a rank may be ahead of its peers, which still read there. */
void fcdp__host_free(fcdp_host *host, uint64_t offset);
/* Leader: give back the freed blocks that the last rank has detached since. Others: nothing. */
void fcdp__host_reap(fcdp_host *host);

/* Map and pin `data_bytes` at `offset`. With FCDP_PIN_AUTO a refusal to pin is a warning (once), with REQUIRE FCDP_ERR_OPTION. */
fcdp_status fcdp__host_attach(fcdp_host *host, uint64_t offset, size_t data_bytes, fcdp_host_block **block_out) FCDP_MUST_CHECK;
void fcdp__host_detach(fcdp_host_block *block);
void *fcdp__host_data(const fcdp_host_block *block);
size_t fcdp__host_data_bytes(const fcdp_host_block *block);

typedef enum fcdp_board_word {
    FCDP_BOARD_STORED_0,        /* epoch of span 0 whose slice this rank has stored */
    FCDP_BOARD_STORED_1,        /* the same of span 1 */
    FCDP_BOARD_BALLOT_0,        /* comm's: what this rank did at its last even-numbered release */
    FCDP_BOARD_BALLOT_1,        /* and at its last odd-numbered one */
    FCDP_BOARD_FILL,            /* comm's: how far this rank is with the fill through host memory (exchange.c) */
    FCDP_BOARD_FILL_LOST,       /* comm's: the last fill that failed here */
    FCDP_BOARD_ATTACHED,        /* host.c's: 1 while this rank has the block attached */
    FCDP_BOARD_N_WORDS,
} fcdp_board_word;

/* Write this rank's word and wake who waits. */
void fcdp__board_publish(fcdp_host_block *block, fcdp_board_word word, uint32_t value);
uint32_t fcdp__board_read(const fcdp_host_block *block, fcdp_board_word word, uint32_t slice);
/* Until (int32_t)(word[slice] - at_least) >= 0 for every slice. FCDP_ERR_TIMEOUT or, when the owner's process is gone,
 * FCDP_ERR_PEER; the text names the slices that did not come and `what`. */
fcdp_status fcdp__board_wait_all(const fcdp_host_block *block, fcdp_board_word word, uint32_t at_least, const char *what) FCDP_MUST_CHECK;

#endif
