/* internal.h - what simnccl's files share. One lock guards all that is this process's; pages are shared with
 * other processes and written so that a process may die at any instruction: each word has one writer, and
 * says that what belongs to it is complete.
 */
#ifndef FCDP_SIMNCCL_INTERNAL_H
#define FCDP_SIMNCCL_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "sim/nccl/simnccl.h"

/* NCCL's, as its header has them. */
typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7
} ncclResult_t;
typedef struct ncclComm *ncclComm_t;
typedef struct {
    char internal[128];
} ncclUniqueId;

enum { SIMNCCL_LOG = 256, SIMNCCL_TEXT_BYTES = 512, POLLS_IN_PROGRESS = 2 };

typedef struct page_launch { /* `number` says which operation the rest is of; 0: it is being written */
    _Atomic uint64_t number, place, shape; /* number: from 1; place: in the order of the device's launches */
} page_launch;

typedef struct page_member {
    _Atomic uint32_t joined; /* release: the next two were written before */
    _Atomic uint32_t begun;  /* the ways (bits of op_ways) that an operation of it has wanted so far */
    uint32_t n, device;
    page_launch launches[SIMNCCL_LOG]; /* the latest ones, operation k at k % SIMNCCL_LOG */
} page_member;

typedef struct page { /* of one communicator */
    uint64_t nonce;
    _Atomic uint32_t broken; /* 1: a rank writes the text; 2: it is there */
    char text[SIMNCCL_TEXT_BYTES];
    page_member members[SIMNET_MAX_RANKS];
} page;

typedef struct sim_device {
    struct sim_device *next;
    simnet_endpoint *endpoint;
    fcdp_driver *drv;
    uint64_t (*ready_ns)(void); /* the simulated driver's */
    void (*end_at)(uint64_t end_ns);
    uint32_t rank, node, local, ranks_per_node;
    uint32_t ids[SIMNET_N_LANES]; /* of simnet's communicators that are taken */
    uint64_t n_launches;
    unsigned in_flight; /* operations that have not ended */
} sim_device;

typedef enum comm_state { COMM_JOINS, COMM_READY, COMM_FINALIZED, COMM_DESTROYED, COMM_ABORTED } comm_state;

struct ncclComm {
    ncclComm_t next; /* of all that ever were: so a call of a dead one is seen, not suffered */
    sim_device *device;
    page *page;
    uint64_t nonce;
    uint32_t n, rank;
    int n_ctas; /* that an operation of it holds */
    simnet_comm *net;
    comm_state state;
    ncclResult_t failure; /* the first one */
    char text[SIMNCCL_TEXT_BYTES];
    uint32_t wanted;                  /* ways, of what was begun */
    uint32_t connected;               /* ways */
    fcdp_phys memory[SIMNCCL_N_WAYS]; /* of their connections, by number; handle 0: none */
    unsigned polls_left;              /* until what was begun is done; 0: nothing is in progress */
    pthread_t user;                   /* the thread that began that */
    simnet_part *parts;               /* begun, not launched; NULL: nothing */
    size_t n_parts;
    fcdp_stream stream;
    uint64_t n_launched;
};

struct sim_nccl {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    sim_device *devices;
    ncclComm_t comms;
    struct simnccl_state state;
    char last_error[SIMNCCL_TEXT_BYTES];
    int version;
    size_t connection_bytes;
};
extern struct sim_nccl simnccl;

/* ---- entry.c ---- */

/* A rule is broken: counted, printed, and the last error. Returns `result`. With the lock. */
ncclResult_t simnccl__broken(ncclResult_t result, const char *format, ...) FCDP_PRINTF(2, 3);

/* ---- join.c, with the lock ---- */

ncclResult_t simnccl__id_make(ncclUniqueId *id);
ncclResult_t simnccl__join(ncclComm_t comm, const ncclUniqueId *id);
/* ncclInProgress: not all members are there. */
ncclResult_t simnccl__join_look(ncclComm_t comm);
void simnccl__id_close(uint64_t nonce); /* 0: all of this process */

/* ---- launch.c ---- */

/* Puts what the group has begun on its stream, with the lock. */
ncclResult_t simnccl__launch(ncclComm_t comm);
/* What its connections hold is given back, with the lock. */
void simnccl__disconnect(ncclComm_t comm);
unsigned simnccl__group_depth(void); /* of the calling thread */

#endif
