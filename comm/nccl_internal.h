/* nccl_internal.h - the struct of a transport over NCCL, for nccl*.c. */
#ifndef FCDP_NCCL_INTERNAL_H
#define FCDP_NCCL_INTERNAL_H

#include <stdatomic.h>
#include <stdio.h>

#include "comm/nccl.h"
#include "comm/nccl_api.h"

typedef struct nccl_lane {
    fcdp_nccl_transport *transport;
    ncclComm_t comm; /* NULL: the lane has one member, or its communicator is gone */
    uint32_t size, place;
    const char *name;
    bool is_entered; /* under the mutex: a thread launches or waits for NCCL's launch. No other call of NCCL's
                        takes the communicator meanwhile, a poll neither; an abort alone does */
} nccl_lane;

struct fcdp_nccl_transport {
    fcdp_nccl nccl;
    fcdp_driver *drv;
    fcdp_driver_context context; /* drv's */
    double timeout_s;
    uint64_t made_by_ns;    /* when the making is to end; 0: it has */
    uint64_t aborted_by_ns; /* under the mutex; when those that abort are waited for no longer */
    nccl_lane lanes[FCDP_N_LANES];
    atomic_bool aborted; /* set under the mutex; also read by who waits for NCCL inside, to come out */
    pthread_mutex_t mutex;
    pthread_cond_t changed;        /* on the monotonic clock: what follows */
    unsigned n_inside, n_aborting; /* n_inside: of the lanes, those that are entered */
    fcdp_failure failure;          /* the first one */
};

/* When a wait for peers that begins now is over. */
uint64_t fcdp__nccl_wait_ends_ns(const fcdp_nccl_transport *t);
/* Between two looks at what NCCL's threads or the device are to end; the longer, the more there were. */
void fcdp__nccl_poll_pause(unsigned n_polls);
/* fcdp_transport's, without the lane's turn. */
fcdp_status fcdp__nccl_enqueue(fcdp_nccl_transport *t, fcdp_lane lane, const fcdp_part *parts, size_t n,
                               fcdp_stream stream) FCDP_MUST_CHECK;
/* fcdp_transport's; `ctx` is the transport. */
fcdp_status fcdp__nccl_check(void *ctx) FCDP_MUST_CHECK;
void fcdp__nccl_abort(void *ctx, const char *why);
/* Have the threads that abort ended in their time? */
bool fcdp__nccl_abort_await(fcdp_nccl_transport *t);

#endif
