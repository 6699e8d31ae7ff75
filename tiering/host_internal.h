/* host_internal.h - the layout of the slab in shared memory, for host.c, board.c alone.
 *
 *     slab  = header page | meeting | block | ...
 *     meeting = board page | data          block = board page | data, n_copies times
 *     board = FCDP_MAX_SLICES cache lines, line i written by slice i alone
 */
#ifndef FCDP_HOST_INTERNAL_H
#define FCDP_HOST_INTERNAL_H

#include "tiering/board.h"
#include "tiering/host.h"
#include "tiering/offsets.h"

#include <stdatomic.h>
#include <sys/types.h>

enum { FCDP_BOARD_LINE_WORDS = 16 };
#define FCDP_SLAB_MAGIC UINT64_C(0x0042414c53504443) /* "CDPSLAB" */
enum { FCDP_SLAB_VERSION = 4 };
enum { FCDP_MEMBER_ABSENT = 0, FCDP_MEMBER_LEFT = -1 };

typedef struct fcdp_slab_member { /* the process that writes slice i's words */
    _Atomic int32_t pid;          /* release, after start_time; FCDP_MEMBER_*; acquire in member_gone() */
    int32_t numa_node;            /* of its slices; before pid, as start_time */
    uint64_t start_time;          /* of that process, so that a reused pid is not taken for it */
    _Atomic uint32_t has_failed;  /* release in fcdp__host_fail, acquire in fcdp__host_peer_failed */
} fcdp_slab_member;

typedef struct fcdp_slab_header {
    uint64_t magic, capacity_bytes, page_bytes;
    uint32_t version, n_slices, per_numa_node;
    fcdp_slab_member members[FCDP_MAX_SLICES];
} fcdp_slab_header;

typedef struct fcdp_board_line {
    _Atomic uint32_t words[FCDP_BOARD_LINE_WORDS];
} fcdp_board_line;

_Static_assert(sizeof(fcdp_slab_header) <= 4096, "the header fits the smallest page");
_Static_assert(sizeof(fcdp_board_line) * FCDP_MAX_SLICES == 4096, "the board is one page");
_Static_assert((int)FCDP_BOARD_N_WORDS <= (int)FCDP_BOARD_LINE_WORDS, "the words of a slice share its line");

typedef struct fcdp_block_record { /* leader's note of a block */
    struct fcdp_block_record *next;
    uint64_t offset;
    size_t bytes;
    bool freed; /* goes when its last rank has detached */
} fcdp_block_record;

/* Which bytes of a mapping are page-locked. CUDA takes no copy that lies partly in one registration and
 * partly outside, so copies are cut at the edges that fcdp__host_run_bytes tells. */
enum { FCDP_MAX_PINNED = 1 + FCDP_N_SPANS }; /* the board, and a piece of each span */
typedef struct fcdp_pinned {
    size_t n;
    /* from the mapping's start; disjoint, ascending, none empty, of whole pages */
    fcdp_piece ranges[FCDP_MAX_PINNED];
} fcdp_pinned;

struct fcdp_host_block {
    fcdp_host *host;
    fcdp_board_line *board; /* start of the mapping */
    fcdp_dptr board_at;     /* where the device sees it */
    char *data;             /* the copy that this rank reads */
    uint32_t n_copies;
    size_t data_bytes, copy_bytes, map_bytes; /* copy_bytes: data_bytes in whole pages */
    fcdp_pinned pinned;                       /* of the mapping */
};

struct fcdp_host {
    fcdp_host_config config;
    pid_t pid;
    int fd;
    size_t page_bytes;
    fcdp_slab_header *header;
    size_t header_bytes;       /* of the mapping: the header's page and the meeting */
    fcdp_host_block meeting;   /* not pinned */
    _Atomic unsigned n_blocks; /* attached here */
    atomic_bool pin_warned;
    /* leader only */
    fcdp_offsets *offsets;
    fcdp_lock lock; /* FCDP_RANK_HOST: records */
    fcdp_block_record *records;
};

#endif
