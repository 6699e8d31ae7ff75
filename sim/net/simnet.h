/* simnet.h - a network in shared memory: collectives in stream order between ranks that are threads or
 * processes.
 *
 * A fabric is `nodes` x `ranks_per_node` ranks; rank r is on node r / ranks_per_node. It lies in an unnamed
 * memfd, which forked children have, or in a file, which any process of the machine can open.
 * Each rank attaches once and gets an endpoint, whose communicators join it with the ranks of a lane; a small
 * id tells several of a lane apart.
 *
 * An operation is a host function on the caller's stream (fcdp__driver_host_function). It begins when all
 * members have reached it on their streams, and ends for all at once: when the bytes are there and its
 * modelled time is over. Members must agree on the operations of a communicator, in order, kind and bytes:
 * a message names the one that does not.
 *
 * Time: an operation books what it uses from the first moment at which all of it is free, and has it alone.
 * With n members, and `bytes` one member's part, as a ring sends them:
 * - SIMNET_INTER: (n - 1) * bytes on each node's link to the others, each way. All ranks of the node share
 * it, and all communicators.
 * - SIMNET_INTRA: ranks_per_node * (n - 1) * bytes inside the node, which is what its ranks receive together.
 * - SIMNET_WORLD: (n - 1) * bytes on each node's link, and as much on each of the ranks_per_node - 1 hops
 * inside each node (ranks_per_node on one node alone).
 *
 * Failures are the endpoint's and stay: simnet_status has the first one's text. A member that fails, aborts,
 * detaches or whose process dies is noticed by those that wait for it within 0.05 s. A failed
 * operation ends its host function; what it would have written is undefined, and later operations of the
 * endpoint end at once.
 *
 * Thread-safe, except that simnet_detach and simnet_close come last. Functions return FCDP_OK or a status
 * with a text.
 */
#ifndef FCDP_SIMNET_H
#define FCDP_SIMNET_H

#include "alloc/driver.h"

enum { SIMNET_MAX_RANKS = 64, SIMNET_MAX_IDS = 16 };

typedef enum simnet_lane {
    SIMNET_INTER, /* the ranks with this rank's local index, one per node, in node order */
    SIMNET_INTRA, /* the ranks of this node, in local order */
    SIMNET_WORLD, /* all ranks */
    SIMNET_N_LANES
} simnet_lane;

typedef struct simnet_fabric simnet_fabric;
typedef struct simnet_endpoint simnet_endpoint;
typedef struct simnet_comm simnet_comm;

typedef struct simnet_config {
    uint32_t nodes;
    uint32_t ranks_per_node;
    uint32_t ids;         /* communicators per lane; 0: 4 */
    size_t staging_bytes; /* what a member puts into shared memory at once; 0: 16 MiB. Longer operations take
                             several rounds */
    double timeout_s;     /* an operation waits so long for another member; 0: for ever */
    /* of the file, which must not be there and is the caller's to remove; NULL: a memfd */
    const char *path;
} simnet_config;

fcdp_status simnet_create(const simnet_config *asked, simnet_fabric **fabric_out) FCDP_MUST_CHECK;
fcdp_status simnet_open(int fd, simnet_fabric **fabric_out) FCDP_MUST_CHECK; /* fd stays the caller's */
int simnet_fd(const simnet_fabric *fabric);
void simnet_close(simnet_fabric *fabric); /* of this process; after its endpoints */

/* SIMNET_INTER: of each node's link, each way; SIMNET_INTRA: of each node's inside. 0: as fast as memory,
 * with no latency. Latency is added once per operation. For operations that begin later; at first both are
 * unlimited. */
void simnet_set_rate(simnet_fabric *fabric, simnet_lane lane, double gigabytes_per_s, double latency_us);

/* What went over a node's link (SIMNET_INTER, each way), or inside it (SIMNET_INTRA), since the fabric was
 * made. */
typedef struct simnet_link {
    uint64_t operations;
    uint64_t bytes;
    uint64_t busy_ns; /* modelled */
} simnet_link;
void simnet_link_get(simnet_fabric *fabric, uint32_t node, simnet_lane lane, simnet_link *link_out);

/* The calling process is rank `rank` from now on; several ranks may be one process. */
fcdp_status simnet_attach(simnet_fabric *fabric, uint32_t rank, fcdp_driver *drv,
                          simnet_endpoint **endpoint_out) FCDP_MUST_CHECK;
/* Its operations must be over: synchronise with their streams before (after simnet_abort they end). NULL:
 * nothing. */
void simnet_detach(simnet_endpoint *endpoint);

/* The communicator of a lane with this id, the same object each time; ends with the endpoint. NULL: no such
 * id. */
simnet_comm *simnet_comm_get(simnet_endpoint *endpoint, simnet_lane lane, uint32_t id);
uint32_t simnet_comm_size(const simnet_comm *comm);
uint32_t simnet_comm_index(const simnet_comm *comm); /* this rank's among the members */
uint64_t simnet_comm_operations(simnet_comm *comm);  /* enqueued so far */

/* In place: member i's `bytes` are at i * bytes, and all have all of them afterwards. */
fcdp_status simnet_all_gather(simnet_comm *comm, fcdp_dptr at, size_t bytes,
                              fcdp_stream stream) FCDP_MUST_CHECK;
/* Several at once, as one operation, in place: of each part, member i's `bytes` are at `at + i *
 * stride_bytes`, and all have all of them afterwards. stride_bytes >= bytes; parts do not overlap. Members
 * agree on n, and on the sizes of each. */
typedef struct simnet_part {
    fcdp_dptr at;
    size_t bytes, stride_bytes;
} simnet_part;
fcdp_status simnet_all_gather_parts(simnet_comm *comm, const simnet_part *parts, size_t n,
                                    fcdp_stream stream) FCDP_MUST_CHECK;
/* Float32. `from` has one part of `bytes` for each member; the sum of all members' parts for this one, added
 * up in their order, comes to `to`, which may be that part's own place. */
fcdp_status simnet_reduce_scatter(simnet_comm *comm, fcdp_dptr from, fcdp_dptr to, size_t bytes,
                                  fcdp_stream stream) FCDP_MUST_CHECK;

/* Within a host function: an all-gather of host memory, in place as simnet_all_gather's, over the same
 * links. It returns when the bytes are there, and its modelled time is the function's (simgpu_here_ns):
 * an exchange begins where its latest member is, and what follows in the function comes behind its end. A
 * communicator has either exchanges, one at a time, or operations on streams. */
fcdp_status simnet_exchange(simnet_comm *comm, void *buffer, size_t bytes) FCDP_MUST_CHECK;

/* FCDP_OK, or the endpoint's first failure with its text: FCDP_ERR_TIMEOUT, FCDP_ERR_PEER,
 * FCDP_ERR_TRANSPORT. */
fcdp_status simnet_status(simnet_endpoint *endpoint, char *text, size_t n) FCDP_MUST_CHECK;
/* All operations of the endpoint end now, also those that stall; peers that wait for this rank are told. Any
 * thread. */
void simnet_abort(simnet_endpoint *endpoint);

typedef enum simnet_fault {
    SIMNET_FAULT_CALL,  /* the call fails, and nothing is enqueued */
    SIMNET_FAULT_FAIL,  /* the operation fails when its turn comes */
    SIMNET_FAULT_STALL, /* it never joins in, and waits until simnet_abort */
} simnet_fault;
/* The n-th operation of this endpoint from now (1: the next) goes wrong; 0: none. */
void simnet_fail_nth(simnet_endpoint *endpoint, uint64_t n, simnet_fault fault);

#endif
