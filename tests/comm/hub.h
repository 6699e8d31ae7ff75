/* hub.h - a transport between the ranks of one process: an all-gather is a host function on the lane's
 * stream, which waits for its peers and copies.
 *
 * As NCCL's, its calls return at once, are matched by their order on each lane, and wait for a peer for ever,
 * until a rank aborts. The hub records what every rank launches. Calls can be made to fail by number,
 * counted over all ranks.
 */
#ifndef FCDP_TEST_HUB_H
#define FCDP_TEST_HUB_H

#include <pthread.h>
#include <stdatomic.h>

#include "comm/topology.h"
#include "comm/transport.h"

enum { HUB_MAX_RANKS = 9, HUB_TEXT_BYTES = 256 };

typedef enum hub_fault {
    HUB_REFUSED,          /* the call fails and enqueues nothing */
    HUB_FAILS_HERE,       /* it succeeds for the others; this rank learns of a failure from `check` */
    HUB_FAILS_EVERYWHERE, /* no rank gets a byte, and every member learns of it from `check` */
    HUB_STALLS,           /* this rank does not come until it aborts */
    HUB_N_FAULTS
} hub_fault;

typedef struct hub_launch { /* what a rank launched */
    fcdp_lane lane;
    size_t n_parts, bytes;
    uint64_t place; /* of the first part: which group, and where in it */
} hub_launch;

typedef struct hub hub;
typedef struct hub_call hub_call;

/* one rank's end of it; written by the rank's own thread, or guarded by the hub's mutex */
typedef struct hub_port {
    hub *hub;
    fcdp_topology topology;
    fcdp_driver *drv;
    uint64_t (*place)(const void *owner, fcdp_dptr at);
    const void *owner;
    hub_launch *launches;
    size_t n_launches;
    hub_call *calls;
    /* guarded by the hub's mutex */
    bool aborted;
    fcdp_status failure;
    char text[HUB_TEXT_BYTES];
    void (*failed)(void *arg);
    void *failed_arg;
} hub_port;

typedef struct hub_lane { /* the members of one collective; guarded by the hub's mutex */
    pthread_cond_t changed;
    uint32_t n, n_arrived, first, step; /* member i is rank first + i * step */
    uint64_t round;
    bool broken; /* one of its members has aborted, and the others know */
    hub_call *calls[HUB_MAX_RANKS];
    /* its stream is in a call; and takes part in this round */
    bool entered[HUB_MAX_RANKS], arrived[HUB_MAX_RANKS];
} hub_lane;

struct hub {
    pthread_mutex_t mutex;
    uint32_t n_nodes, node_size;
    bool silent; /* a rank that aborts does not tell its peers: time must */
    /* A node's ranks come to the heads of differences together (delta.h): each has looked at its base before
     * any stores what comes. For ranks of which none fails */
    bool abreast;
    pthread_barrier_t heads[HUB_MAX_RANKS];                    /* by node */
    hub_lane inter[HUB_MAX_RANKS], verdicts[2][HUB_MAX_RANKS]; /* by local index */
    hub_lane node[HUB_MAX_RANKS];                              /* by node */
    _Atomic long n_calls, fail_at; /* fail_at: the number of the call that fails, from 1; 0: none */
    _Atomic int fault;
    /* exchanges of more than 64 bytes; the number of the one of which a rank gets a byte wrong; 0: none */
    _Atomic long n_exchanges, spoil_at;
    size_t spoil_byte; /* of those that other ranks sent */
    _Atomic uint64_t inter_bytes_sent;
    atomic_bool disagrees; /* two ranks met in different collectives */
    atomic_bool gave_up;   /* for a minute no rank aborted a collective that could not end */
};

void hub_init(hub *h, uint32_t n_nodes, uint32_t node_size);
void hub_destroy(hub *h);
/* `place` says where an address lies, alike on every rank. */
void hub_port_init(hub_port *port, hub *h, const fcdp_topology *topology, fcdp_driver *drv,
                   uint64_t (*place)(const void *owner, fcdp_dptr at), const void *owner);
/* Its process is about to go, and its peers see that (not where the hub is silent). */
void hub_port_exit(hub_port *port);
/* No stream may run a call of it any more. */
void hub_port_destroy(hub_port *port);
fcdp_transport hub_transport(hub_port *port);

#endif
