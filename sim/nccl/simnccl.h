/* simnccl.h - the control side of a NCCL double. libfcdp_simnccl.so exports the NCCL entry points that FCDP
 * uses, over simnet and the simulated GPU: for ranks that are processes, and for threads of one process that
 * each have a device.
 *
 * A device is a simnet endpoint. A communicator's members must be a lane of the fabric, in its order; its
 * operations take the lane's modelled time. A unique id names a page of shared memory in the process that
 * made it, which the members open through /proc; it must live until they all have. Communicators of one lane
 * are made one after another, in the same order on all members.
 *
 * As NCCL: calls of communicators that do not block (blocking = 0; others are refused) return
 * ncclInProgress, and what they began is done only after some polls of ncclCommGetAsyncError, a
 * communicator's first operation of each way (simnccl_way) only once all members have begun theirs, as
 * connections are made then; an operation that fails, here or on a peer, does not end before its
 * communicator is aborted; ncclCommAbort waits for everything of NCCL's that is on the device, of other
 * communicators too.
 *
 * Each broken rule fails the call or the communicator, with a text (ncclGetLastError) and a line on stderr,
 * and is counted:
 * - the members' launches: the n-th operation of a communicator must be the same on all members (sizes and
 *   order of its parts), and have come at the same place in the order of all launches of each member's
 *   device, over all its communicators. That is more than NCCL asks for, which cannot be seen from one
 *   communicator: no launches in a circle;
 * - an all-gather in place reads at recvbuff + rank * count;
 * - one rank per device;
 * - a device has a second communicator only with NCCL_LAUNCH_ORDER_IMPLICIT=1, for the order of their kernels
 *   on the device; an order by the caller's events would do for NCCL, and is not modelled;
 * - one thread at a time in a communicator: what a thread has begun, that thread alone polls until it is
 *   done;
 * - a communicator that is in progress, aborted, finalized or destroyed takes no call that needs more;
 * - ncclGroupStart and ncclGroupEnd in pairs;
 * - minCTAs and maxCTAs of a configuration of 2.17 or later.
 *
 * Not modelled, and refused: operations out of place, sends and receives that are not an all-gather with a
 * stride, several communicators or streams in one group.
 */
#ifndef FCDP_SIMNCCL_H
#define FCDP_SIMNCCL_H

#include "sim/net/simnet.h"

#define SIMNCCL_API __attribute__((visibility("default")))

/* The calling thread's device from now on: what communicators that it makes are on. The endpoint and its
 * driver live until simnccl_reset. */
SIMNCCL_API void simnccl_device_set(simnet_endpoint *endpoint, fcdp_driver *drv);
/* For processes that know nothing of a double: a fabric in the file `path`, which is made. Threads without a
 * device take the rank RANK of the fabric that SIMNCCL_FABRIC names, and the simulated driver that
 * FCDP_SIM_LIBRARY names, until the process ends. 0, or -1 with a line on stderr. */
SIMNCCL_API int simnccl_fabric_make(const char *path, unsigned nodes, unsigned ranks_per_node);

/* The n-th call from now (1: the next) of `entry` (NULL: of any) returns `result` and does nothing; then the
 * fault is spent. 0 disarms. Returns -1 when no entry point has that name. Operations that fail or stall when
 * their turn comes: simnet_fail_nth. */
SIMNCCL_API int simnccl_fail_nth(const char *entry, unsigned long n, int result);
SIMNCCL_API bool simnccl_fault_is_spent(void);

/* Device memory that each way which a communicator connects takes, in whole pages, until the communicator is
 * destroyed or aborted; 0 at first. Where the device has none, the operation fails (unhandled cuda error). */
SIMNCCL_API void simnccl_set_connection_bytes(size_t bytes);
SIMNCCL_API void simnccl_set_version(int version); /* as ncclGetVersion says it; 22809 at first */

/* How many CTAs an operation of the communicator `comm` (an ncclComm_t) holds on its device: 24, or fewer by
 * its configuration (maxCTAs) or NCCL_MAX_CTAS. */
SIMNCCL_API int simnccl_ctas(const void *comm);

/* The ways to carry an operation, for each of which a communicator connects its members when it first takes
 * it: all-gathers of less than SIMNCCL_LARGE_BYTES in all, larger ones, sends and receives. */
enum { SIMNCCL_LARGE_BYTES = 16 << 10 };
enum { SIMNCCL_N_WAYS = 3 };
typedef enum simnccl_way { SIMNCCL_WAY_SMALL = 1, SIMNCCL_WAY_LARGE = 2, SIMNCCL_WAY_PEERS = 4 } simnccl_way;

struct simnccl_state {
    unsigned long broken;      /* rules, so far */
    char text[512];            /* of the first */
    unsigned long live;        /* communicators neither destroyed nor aborted */
    unsigned long launches;    /* operations, all devices together */
    unsigned long connections; /* ways that communicators have connected, all together */
    unsigned long groups;      /* that are open, of all threads */
};
SIMNCCL_API void simnccl_state(struct simnccl_state *state_out);

/* Forgets everything of this process. No call and no operation is under way. */
SIMNCCL_API void simnccl_reset(void);

#endif
