/* nccl.h - the transport whose collectives are NCCL's, on communicators of FCDP's own. They are enqueued by
 * the thread that calls, in stream order.
 *
 *     fcdp__nccl_load, once per process
 *     -> fcdp__nccl_ids_make on every rank; the caller exchanges the ids: rank r's at index r
 *     -> fcdp__nccl_create, a collective of the shard group
 *     -> fcdp__nccl_table, for fcdp_comm_create; that comm destroys it
 *
 * Communicators do not block: whatever NCCL cannot do at once goes on in a thread of NCCL's while ours
 * watches the time, so that a peer that never comes ends in a failure. NCCL asks for the order that
 * transport.h promises.
 *
 * Precondition of every call here, all_gather included: the calling thread is in no group of NCCL's
 * (ncclGroupStart without its ncclGroupEnd; so in torch.distributed's coalescing manager, over the same
 * libnccl). Groups nest, per thread: an all-gather in one would be launched at the outer group's end, after
 * the events that say it has ended. NCCL has no call that tells.
 */
#ifndef FCDP_NCCL_H
#define FCDP_NCCL_H

#include "comm/topology.h"
#include "comm/transport.h"

/* ---- the library, loaded at run time ---- */

enum { FCDP_NCCL_ID_BYTES = 128 };

typedef struct fcdp_nccl fcdp_nccl; /* the library's entry points */
/* What one rank brings to the exchange: the ids of the lanes that it leads (it is their first member), the
 * others zero. */
typedef struct fcdp_nccl_ids {
    uint8_t lane[FCDP_N_LANES][FCDP_NCCL_ID_BYTES];
} fcdp_nccl_ids;

/* `named`, if it is not NULL; else the first there is of: the libnccl.so.2 that this process has loaded
 * (torch's), `beside_torch` (may be NULL), the loader's. NCCL orders the communicators of one library only,
 * so the one that torch uses comes before the others. The library stays loaded. FCDP_ERR_UNSUPPORTED: there
 * is none, it is older than 2.26, or NCCL_LAUNCH_ORDER_IMPLICIT is not set. The caller frees with
 * fcdp__nccl_unload, after all that uses it. */
fcdp_status fcdp__nccl_load(const char *named, const char *beside_torch,
                            fcdp_nccl **nccl_out) FCDP_MUST_CHECK;
void fcdp__nccl_unload(fcdp_nccl *nccl);

fcdp_status fcdp__nccl_ids_make(const fcdp_nccl *nccl, const fcdp_topology *topology,
                                fcdp_nccl_ids *ids_out) FCDP_MUST_CHECK;

/* ---- a transport ---- */

typedef struct fcdp_nccl_transport fcdp_nccl_transport;

typedef struct fcdp_nccl_config {
    const fcdp_nccl *nccl; /* copied */
    fcdp_driver *drv;      /* its device is this rank's, and no other rank's */
    fcdp_topology topology;
    const fcdp_nccl_ids *ids; /* of all n_ranks, in their order */
    double timeout_s;         /* a collective's wait on the host for peers; of making and ending, see below */
} fcdp_nccl_config;

/* All ranks of the shard group call it; it returns once every member of this rank's lanes has, and in
 * any case within 3/4 of timeout_s (half of it and 2 s, if that is more): a rank that fails alone meets the
 * others there. FCDP_ERR_TIMEOUT: a member did not come in half of it. */
fcdp_status fcdp__nccl_create(const fcdp_nccl_config *config,
                              fcdp_nccl_transport **transport_out) FCDP_MUST_CHECK;
/* Making ends with all-gathers of every size, of which the largest brings so many bytes to each member at
 * most. Tests change it, of all ranks alike. */
extern size_t fcdp__nccl_probe_bytes;
/* A test's: the lane's ncclComm_t; NULL: it has one member, or its communicator is gone. */
const void *fcdp__nccl_communicator(const fcdp_nccl_transport *transport, fcdp_lane lane);
/* Valid until the transport is destroyed. */
fcdp_transport fcdp__nccl_table(fcdp_nccl_transport *transport);
/* Where no comm has taken the table. Its streams have ended what was enqueued, or it was aborted; on every
 * rank of the shard group. Waits for peers, at most 3/4 of timeout_s, or half of it and 2 s. What NCCL has
 * not aborted by then stays, and needs neither the driver nor the library's table any more. NULL: nothing. */
void fcdp__nccl_destroy(fcdp_nccl_transport *transport);

#endif
